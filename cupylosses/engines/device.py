"""Interface of one GPU to engines, independent of array libraries: allocation, streams, workspaces, addresses."""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from cupylosses.jit.gpu import Chip

#: Number of slots of the table of expected grad_outputs (``kernels/core/speculative_grad.cuh``). Losses that share a
#: slot are slower.
EXPECTATIONS = 4096

#: Number of counters of a workspace (``kCounters``), for segments and for tiles that blocks share. It does not include
#: the ticket of the last block and the ticket of claims.
COUNTERS = 512
#: Number of doubles before the partial sums of a workspace.
TICKET = 2 + COUNTERS // 2


class Device(ABC):
    """One GPU, as accessed through one array library."""

    #: False if kernels run on the host, for tests.
    is_gpu = True
    #: Creates launchers for this device; None for `compiler.Launcher`.
    launcher: Callable[..., Any] | None = None
    #: Returns the library's current stream on this device.
    stream: Callable[[], int]
    #: True if the current stream is being captured into a CUDA graph. Callers skip the query for the default stream, 0,
    #: which cannot be captured.
    capturing: Callable[[], bool]
    #: Waits for the current stream.
    synchronize: Callable[[], None]
    #: Returns the strides of one of the library's arrays, in elements.
    strides: Callable[[Any], tuple[int, ...]]
    #: Converts a normalizer of any library to a double on this device, or to a number if it must be read from the CPU.
    double: Callable[[Any], Any]
    #: Returns a context for calls of the library on `detached` arrays, in which autograd does not look at them.
    untracked: Callable[[], AbstractContextManager[Any]] = nullcontext

    def __init__(self, index: int, processors: int, chip: Chip | None = None) -> None:
        self.index = index
        self.processors = processors
        #: Features of the GPU that losses of rows can use.
        self.chip = chip or Chip()
        self._workspaces: dict[int, tuple[Any, int, int]] = {}
        self._table: tuple[Any, int] | None = None
        self._status: tuple[Any, int] | None = None
        self._missed: tuple[Any, Any, list[Divisor]] | None = None
        #: First word of the status. It is not 0 once a kernel has started to report.
        self.report = ctypes.c_uint64(0)

    @abstractmethod
    def empty(self, shape: tuple[int, ...], strides: tuple[int, ...], dtype: str, misalignment: int = 0) -> Any:
        """Allocates an array with these strides, in elements, on the current stream.

        It starts ``misalignment`` bytes after an aligned address. Precondition: an array with a misalignment has no
        gaps.
        """

    @abstractmethod
    def zeros(self, shape: tuple[int, ...], strides: tuple[int, ...], dtype: str) -> Any:
        """Allocates an array of zeros on the current stream. Precondition: the strides leave no gaps."""

    @abstractmethod
    def full(self, count: int, value: float) -> Any:
        """Allocates ``count`` doubles and sets them to ``value`` on the current stream."""

    def kept(self, count: int, value: float) -> Any:
        """Allocates like `full`, for the lifetime of the process: outside of any memory pool."""
        return self.full(count, value)

    @abstractmethod
    def visible(self, words: int) -> tuple[Any, int]:
        """Allocates ``words`` 64-bit zeros that kernels and the host can read and write. Also returns their address."""

    @abstractmethod
    def copy(self, array: Any, strides: tuple[int, ...]) -> Any:
        """Returns a copy with other strides, on the current stream."""

    @abstractmethod
    def address(self, array: Any) -> int:
        """Returns the device address of an array that this object allocated."""

    # Matrices, for composite plans

    def detached(self, array: Any) -> Any:
        """Returns the array without its history in autograd, without a copy."""
        return array

    def matrix(self, array: Any, rows: int, columns: int) -> Any:
        """Returns a contiguous array as a matrix, without a copy."""
        return array if array.shape == (rows, columns) else array.reshape(rows, columns)

    def rows(self, matrix: Any, first: int, count: int) -> Any:
        """Returns consecutive rows of a matrix, without a copy."""
        return matrix[first : first + count]

    def parts(self, matrix: Any, rows: int, count: int) -> Sequence[Any]:
        """Returns a matrix of ``rows`` rows in parts of ``count`` rows, without copies. The last may have fewer."""
        return [self.rows(matrix, first, count) for first in range(0, rows, count)]

    def corner(self, matrix: Any, rows: int, columns: int) -> Any:
        """Returns the first rows and columns of a matrix, without a copy."""
        return matrix if matrix.shape == (rows, columns) else matrix[:rows, :columns]

    def transposed(self, matrix: Any) -> Any:
        """Returns the transpose of a matrix, without a copy."""
        return matrix.T

    def counted(self, target: Any, ignored: int | None, mask: Any) -> Any:
        """Returns the indices of the rows whose label is not ``ignored`` and whose mask is True.

        ``ignored`` is None if there are no labels. Waits for the device.
        """
        raise NotImplementedError

    def taken(self, array: Any, index: Any) -> Any:
        """Returns the elements, or rows, at these indices."""
        raise NotImplementedError

    def spread(self, array: Any, index: Any, count: int) -> Any:
        """Returns an array of ``count`` rows: the rows of ``array`` at these indices, and zeros elsewhere."""
        raise NotImplementedError

    def viewed(self, matrix: Any, dtype: str) -> Any:
        """Returns the bytes of a contiguous matrix as elements of another dtype, without a copy."""
        raise NotImplementedError

    def converted(self, array: Any, dtype: str) -> Any:
        """Returns a copy in another dtype."""
        raise NotImplementedError

    def padded(self, matrix: Any, rows: int, columns: int) -> Any:
        """Returns a contiguous copy of a matrix, padded with zeros to these numbers of rows and columns."""
        raise NotImplementedError

    def clear_columns(self, matrix: Any, first: int) -> None:
        """Sets the columns of a matrix to 0, starting with column ``first``."""
        raise NotImplementedError

    def assign(self, to: Any, array: Any) -> None:
        """Copies the elements of ``array`` to an array ``to`` of the same shape and dtype."""
        raise NotImplementedError

    def matmul(self, a: Any, b: Any, out: Any, add: Any = None) -> None:
        """Computes ``out = a @ b + add`` on the current stream, by the library's matrix product.

        ``add`` is None, ``out`` itself, or a row that is added to every row. ``out`` may have a wider dtype than ``a``
        and ``b``. Preconditions: one dimension of each matrix has stride 1, and the arrays are `detached`.
        """
        raise NotImplementedError

    def captures(self) -> bool:
        """True if the current stream is being captured into a graph."""
        return self.stream() != 0 and self.capturing()

    def workspace(self, stream: int, groups: int, capturing: bool) -> tuple[Any, int]:
        """Returns a workspace with tickets of 0 and room for ``groups`` partial sums.

        The result is the array, which must stay alive until the launch, and its address. Each stream has one workspace,
        since the launches of a stream run one after another. A captured launch gets its own, because its graph may be
        replayed on any stream; the graph then owns the memory.
        """
        need = TICKET + groups
        if capturing:
            array = self.full(need, 0.0)
            return array, self.address(array)
        workspace = self._workspaces.get(stream)
        if workspace is None or workspace[2] < need:
            size = max(need, 1024)
            array = self.kept(size, 0.0)
            workspace = self._workspaces[stream] = (array, self.address(array), size)
        return workspace[0], workspace[1]

    def status(self) -> int:
        """Returns the address of the status words, for reports of labels out of range.

        Returns 0 if they do not exist yet and the current stream is being captured.
        """
        if self._status is None:
            if self.capturing():
                return 0
            self._status = self.visible(8)
            self.report = ctypes.c_uint64.from_address(self._status[1])
        return self._status[1]

    def assumption(self, slot: int) -> Divisor | None:
        """Returns the divisor for kernels whose gradients assume that all rows count.

        Returns None once the assumption was wrong for a call of this slot, and if the table does not exist yet and the
        current stream is being captured.
        """
        if self._missed is None:
            if self.capturing():
                return None
            array, address = self.visible(EXPECTATIONS)
            words = (ctypes.c_uint64 * EXPECTATIONS).from_address(address)
            self._missed = array, words, [Divisor.found_by_kernels(address + 8 * i) for i in range(EXPECTATIONS)]
        _array, words, divisors = self._missed
        return None if words[slot] else divisors[slot]

    def expectation(self, slot: int) -> int:
        """Returns the address of a slot in the table of expected grad_outputs.

        Returns 0 if the table does not exist yet and the current stream is being captured.
        """
        if self._table is None:
            if self.capturing():
                return 0
            array = self.kept(EXPECTATIONS, 1.0)
            self._table = (array, self.address(array))
        return self._table[1] + 8 * slot


class Divisor:
    """Divisor of a sum, as kernels take it.

    It is a number, or a number times an array on the device, which is kept alive. The number is None for kernels that
    compute the divisor themselves; they take no arguments for it, or arguments of their own.
    """

    __slots__ = ("arguments", "array", "counted", "known")

    def __init__(self, number: float | None, array: Any = None, address: int = 0) -> None:
        self.counted = array is not None
        self.array = array
        self.arguments: tuple[float, ...] = ()
        #: False if kernels compute the divisor themselves.
        self.known = number is not None
        if number is not None:
            # The mean of no elements has a gradient of 0. The reciprocal is 0, since 0 * inf would be NaN.
            self.arguments = number, address if self.counted else 1.0 / number if number else 0.0

    @classmethod
    def found_by_kernels(cls, *arguments: float) -> Divisor:
        """Returns the divisor of kernels that compute their own and take these arguments for it."""
        divisor = cls(None)
        divisor.arguments = arguments
        return divisor

    @property
    def number_and_count(self) -> tuple[float, int]:
        """Number of the divisor, and the address of a count that multiplies it, or 0."""
        number, more = self.arguments
        return number, int(more) if self.counted else 0

    @property
    def value(self) -> Any:
        """Divisor as a number, or as an array on the device."""
        return self.array * self.arguments[0] if self.counted else float(self.arguments[0])


#: Divisor of results that are not divided.
UNDIVIDED = Divisor(1.0)

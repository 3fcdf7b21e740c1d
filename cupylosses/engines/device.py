"""One GPU as an engine sees it: allocation, the current stream, workspaces, addresses, in terms of no array library."""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from cupylosses.jit.gpu import Chip

#: Slots of the table of expected grad_outputs (``kernels/core/speculative_grad.cuh``). Losses that share a slot lose
#: speed.
EXPECTATIONS = 4096

#: Counters of a workspace besides the ticket of the last block and that of claims (``kCounters``): of segments, and of
#: tiles that blocks share.
COUNTERS = 512
#: Doubles in front of the partial sums.
TICKET = 2 + COUNTERS // 2


class Device(ABC):
    """One GPU through the eyes of one array library."""

    #: False where kernels run on the host, for tests.
    is_gpu = True
    #: What makes launchers for it; None for the compiler's own.
    launcher: Callable[..., Any] | None = None
    #: The library's current stream on this device.
    stream: Callable[[], int]
    #: Whether that is being captured into a CUDA graph. It is not asked of the default stream, 0, which never is.
    capturing: Callable[[], bool]
    #: Waits for it.
    synchronize: Callable[[], None]
    #: The strides of an array of the library's, in elements.
    strides: Callable[[Any], tuple[int, ...]]
    #: A normalizer of any library as a double on this device; a number where it has to be read from the CPU.
    double: Callable[[Any], Any]

    def __init__(self, index: int, processors: int, chip: Chip | None = None) -> None:
        self.index = index
        self.processors = processors
        #: What losses of rows can make use of.
        self.chip = chip or Chip()
        self._workspaces: dict[int, tuple[Any, int, int]] = {}
        self._table: tuple[Any, int] | None = None
        self._status: tuple[Any, int] | None = None
        self._missed: tuple[Any, Any, list[Divisor]] | None = None
        #: The first word of the status: not 0 once a kernel has begun to report.
        self.report = ctypes.c_uint64(0)

    @abstractmethod
    def empty(self, shape: tuple[int, ...], strides: tuple[int, ...], dtype: str, misalignment: int = 0) -> Any:
        """A new array with these strides, in elements, on the current stream. It begins ``misalignment`` bytes behind
        an aligned address; such an array has no gaps.
        """

    @abstractmethod
    def zeros(self, shape: tuple[int, ...], strides: tuple[int, ...], dtype: str) -> Any:
        """A new array of zeros with these strides, which leave no gaps, on the current stream."""

    @abstractmethod
    def full(self, count: int, value: float) -> Any:
        """``count`` doubles, set on the current stream."""

    def kept(self, count: int, value: float) -> Any:
        """The same, to be kept for the life of the process: in nobody's pool of memory."""
        return self.full(count, value)

    @abstractmethod
    def visible(self, words: int) -> tuple[Any, int]:
        """Memory of so many zeros of 64 bits that kernels and the host can both read and write, and its address."""

    @abstractmethod
    def copy(self, array: Any, strides: tuple[int, ...]) -> Any:
        """A copy with other strides, on the current stream."""

    @abstractmethod
    def address(self, array: Any) -> int:
        """The device address of an array that this object allocated."""

    # Matrices, for composite plans

    def matrix(self, array: Any, rows: int, columns: int) -> Any:
        """A contiguous array as a matrix, without a copy."""
        return array.reshape(rows, columns)

    def rows(self, matrix: Any, first: int, count: int) -> Any:
        """Neighbouring rows of a matrix, without a copy."""
        return matrix[first : first + count]

    def corner(self, matrix: Any, rows: int, columns: int) -> Any:
        """The first rows and columns of a matrix, without a copy."""
        return matrix[:rows, :columns]

    def transposed(self, matrix: Any) -> Any:
        """A matrix with rows and columns exchanged, without a copy."""
        return matrix.T

    def counted(self, target: Any, ignored: int | None, mask: Any) -> Any:
        """The indices of the rows whose label is not ``ignored`` (None: there are no labels), and whose mask is True.
        Waits for the device.
        """
        raise NotImplementedError

    def taken(self, array: Any, index: Any) -> Any:
        """The elements, or rows, at these indices."""
        raise NotImplementedError

    def spread(self, array: Any, index: Any, count: int) -> Any:
        """An array of ``count`` rows that has those of ``array`` at these indices, and zeros elsewhere."""
        raise NotImplementedError

    def viewed(self, matrix: Any, dtype: str) -> Any:
        """The bytes of a contiguous matrix as elements of another dtype, without a copy."""
        raise NotImplementedError

    def converted(self, array: Any, dtype: str) -> Any:
        """A copy in another dtype."""
        raise NotImplementedError

    def padded(self, matrix: Any, rows: int, columns: int) -> Any:
        """A contiguous copy of a matrix with so many rows and columns, zeros behind its own."""
        raise NotImplementedError

    def clear_columns(self, matrix: Any, first: int) -> None:
        """Sets the columns of a matrix from ``first`` on to 0."""
        raise NotImplementedError

    def assign(self, to: Any, array: Any) -> None:
        """Copies the elements of an array of the same shape and dtype."""
        raise NotImplementedError

    def matmul(self, a: Any, b: Any, out: Any, add: Any = None) -> None:
        """``out = a @ b + add``, on the current stream, by the library's matrix product. ``add`` is None, ``out``
        itself, or a row that is added to each; ``out`` may have a wider dtype than ``a`` and ``b``. One dimension of
        each matrix has stride 1.
        """
        raise NotImplementedError

    def captures(self) -> bool:
        """True if the current stream is under capture by a graph."""
        return self.stream() != 0 and self.capturing()

    def workspace(self, stream: int, groups: int, capturing: bool) -> tuple[Any, int]:
        """Room for a ticket of 0 and ``groups`` partial sums: the array, to keep alive for the launch, and its address.

        One per stream, since launches of one stream run one after another. A captured launch gets its own, because its
        graph may be replayed on any stream; the graph then owns the memory.
        """
        need = TICKET + groups
        if capturing:
            array = self.full(need, 0.0)
            return array, self.address(array)
        found = self._workspaces.get(stream)
        if found is None or found[2] < need:
            size = max(need, 1024)
            array = self.kept(size, 0.0)
            found = self._workspaces[stream] = (array, self.address(array), size)
        return found[0], found[1]

    def status(self) -> int:
        """The address of what kernels report of labels out of range, or 0 where there is none yet under capture."""
        if self._status is None:
            if self.capturing():
                return 0
            self._status = self.visible(8)
            self.report = ctypes.c_uint64.from_address(self._status[1])
        return self._status[1]

    def assumption(self, slot: int) -> Divisor | None:
        """The divisor of kernels whose gradients assume that all rows count; None once that was wrong for a call of
        this slot, and where there is no table yet under capture.
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
        """The address of a slot in the table of expected grad_outputs, or 0 where there is none yet under capture."""
        if self._table is None:
            if self.capturing():
                return 0
            array = self.kept(EXPECTATIONS, 1.0)
            self._table = (array, self.address(array))
        return self._table[1] + 8 * slot


class Divisor:
    """The divisor of a sum as kernels take it: a number; or a number and an array on the device, which is kept alive;
    or None, for kernels that find it themselves and take no arguments for it, or some of their own.
    """

    __slots__ = ("arguments", "array", "counted", "known")

    def __init__(self, number: float | None, array: Any = None, address: int = 0) -> None:
        self.counted = array is not None
        self.array = array
        self.arguments: tuple[float, ...] = ()
        #: False if kernels find it themselves.
        self.known = number is not None
        if number is not None:
            # A mean of nothing has no gradient: 0, because 0 * inf would be NaN.
            self.arguments = number, address if self.counted else 1.0 / number if number else 0.0

    @classmethod
    def found_by_kernels(cls, *arguments: float) -> Divisor:
        """That of kernels that take these arguments in its place."""
        divisor = cls(None)
        divisor.arguments = arguments
        return divisor

    @property
    def number_and_count(self) -> tuple[float, int]:
        """The divisor as a number, and the address of a count that multiplies it, or 0."""
        number, more = self.arguments
        return number, int(more) if self.counted else 0

    @property
    def value(self) -> Any:
        """The divisor as a number, or as an array on the device."""
        return self.array * self.arguments[0] if self.counted else float(self.arguments[0])


#: The divisor of what is not divided.
UNDIVIDED = Divisor(1.0)

"""Recorder of the kernels that a call needs: it makes the call without data and records the launches.

Engines plan as they do for real calls, so the recorder lists exactly the kernels that calls compile, and no second list
has to be kept in step. It needs neither an array library nor a GPU, and changes no state that other calls share.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from cupylosses import interop, options
from cupylosses.call import Call
from cupylosses.engines import execute
from cupylosses.engines.base import Machine, Plan, TensorSpec, Wanted
from cupylosses.engines.device import Device, Divisor
from cupylosses.engines.strides import dense_strides
from cupylosses.jit import compiler
from cupylosses.jit.gpu import Chip
from cupylosses.jit.kernel import Kernel


@dataclass(frozen=True)
class Placeholder(TensorSpec):
    """Stand-in for an array: its spec, all that planning a call reads."""

    def __getitem__(self, index: tuple[None, ...]) -> Placeholder:
        """Adds leading dimensions of size 1."""
        added = (1,) * len(index)
        return Placeholder(self.dtype, added + self.shape, added + self.strides, self.misalignment)


#: Distinguishes placeholders from numbers, and keeps an array library from adopting them.
interop.known_kinds[Placeholder] = "placeholder"


def placeholder(dtype: str, shape: Sequence[int]) -> Placeholder:
    """Returns a placeholder for a contiguous, aligned array."""
    return Placeholder(dtype, tuple(shape), dense_strides(shape, (0,) * len(shape)), 0)


class _NoDevice(Device):
    """A device that allocates nothing and runs nothing."""

    def __init__(self, chip: Chip | None) -> None:
        # Grids depend on the number of multiprocessors, kernels only on it being large, as on an H100.
        super().__init__(0, 132, chip)

    def empty(self, shape: tuple[int, ...], strides: tuple[int, ...], dtype: str, misalignment: int = 0) -> Any:
        return self

    def zeros(self, shape: tuple[int, ...], strides: tuple[int, ...], dtype: str) -> Any:
        return self

    def full(self, count: int, value: float) -> Any:
        return self

    def copy(self, array: Placeholder, strides: tuple[int, ...]) -> Any:
        return Placeholder(array.dtype, array.shape, strides, 0)

    def visible(self, words: int) -> tuple[Any, int]:
        return self, 0

    def assumption(self, slot: int) -> Divisor:
        return Divisor.found_by_kernels(0)

    def matrix(self, array: Any, rows: int, columns: int) -> Any:
        return array

    def rows(self, matrix: Any, first: int, count: int) -> Any:
        return matrix

    def corner(self, matrix: Any, rows: int, columns: int) -> Any:
        return matrix

    def transposed(self, matrix: Any) -> Any:
        return matrix

    def viewed(self, matrix: Any, dtype: str) -> Any:
        return matrix

    def converted(self, array: Any, dtype: str) -> Any:
        return array

    def padded(self, matrix: Any, rows: int, columns: int) -> Any:
        return matrix

    def clear_columns(self, matrix: Any, first: int) -> None:
        pass

    def assign(self, to: Any, array: Any) -> None:
        pass

    def counted(self, target: Any, ignored: int | None, mask: Any) -> Any:
        return placeholder("int64", (0,))  # no packed rows: the plan of all rows runs

    def matmul(self, a: Any, b: Any, out: Any, add: Any = None) -> None:
        pass

    def address(self, array: Any) -> int:
        return 16  # not null, so the output is wanted; aligned

    def strides(self, array: Placeholder) -> tuple[int, ...]:
        return array.strides

    def stream(self) -> int:
        return 0

    def capturing(self) -> bool:
        return False


class _RecordingLauncher(compiler.Launcher):
    """A launcher that records its kernel and launches nothing."""

    def __init__(
        self,
        kernels: dict[Kernel, int],
        variant: Kernel,
        grid: int,
        block: int,
        fixed: Sequence[int | float | Sequence[int]],
        shared: int = 0,
    ) -> None:
        kernels[variant] = max(shared, kernels.get(variant, 0))
        super().__init__(variant, grid, block, fixed, shared)

    @classmethod
    def load(cls, variant: Kernel, shared: int = 0) -> tuple[Callable[..., Any], Any]:
        return (lambda *_: None), None

    @classmethod
    def at_once(cls, function: Any, block: int, shared: int) -> int:
        return 1

    def _enter(self) -> None:
        pass


class KernelRecorder:
    """Recorder of the kernels of calls.

    ``kernels`` maps each kernel, in the order of first use, to the bytes of dynamic shared memory that its launches
    need. ``chip`` describes the GPU that the kernels are for; it determines the layouts of losses of rows.
    """

    def __init__(self, chip: Chip | None = None) -> None:
        self.kernels: dict[Any, int] = {}
        self._device = _NoDevice(chip)
        self._device.launcher = partial(_RecordingLauncher, self.kernels)
        self._machine = Machine.of(self._device)

    def call(self, call: Call, wanted: Collection[Wanted], promoted: str | None = None, summed: bool = True) -> None:
        """Records forward without gradients, and forward with backward for each choice of ``wanted`` gradients.

        The arrays of the call are `Placeholder` objects. ``promoted`` is the dtype that they promote to, if it does not
        follow torch's rule. With ``summed``, a result with dimensions may be summed later, so the kernels for one
        ``grad_output`` of all elements are recorded too. Gradients are written speculatively if the options of the
        library say so now.
        """
        engine = call.loss.engine
        engine.check(call)
        promoted = promoted or engine.promoted(call)
        self._make(call, None, promoted, summed)
        for choice in wanted:
            if True in choice:
                self._make(call, choice, promoted, summed)

    def second(self, call: Call, wanted: Wanted) -> None:
        """Records the second-derivative products of ``call``, a derivative along tangents.

        The upstream gradient is one number, or dense if the value has dimensions.
        """
        engine = call.loss.engine
        plan = engine.plan(call, call.arrays, engine.promoted(call), self._machine)
        if not plan.empty:
            dense = plan.upstream_strides() or dense_strides(plan.shape, (0,) * len(plan.shape))
            upstream = None if plan.scalar else dense
            scalars = (*call.scalars, 0) if plan.takes_status else call.scalars
            launch = plan, self._device, self._operands(plan, call.arrays), scalars, plan.constant
            execute.hvp(*launch, wanted, 0, upstream, has_value=False)
            if plan.fused_hvp and plan.has_product:
                execute.hvp(*launch, wanted, 0, upstream)

    def _make(self, call: Call, wanted: Wanted | None, promoted: str, summed: bool) -> None:
        engine, device = call.loss.engine, self._device
        tensors: tuple[Any, ...] = call.arrays
        copies = engine.copies(call, tensors, self._machine, sum(wanted or ()))
        if copies:
            arrays = [device.copy(x, copies[i]) if i in copies else x for i, x in enumerate(tensors)]
            self._make(call._replace(arrays=tuple(arrays)), wanted, promoted, summed)
            return
        plan = engine.plan(call, tensors, promoted, self._machine)
        if plan.empty:
            return
        on_device = plan.counted if call.normalizer is None else type(call.normalizer) is not float
        weights = [i for i in plan.divides_by if wanted is not None and wanted[i]]
        if on_device and (not plan.scalar or weights):
            apart = engine.apart(call, promoted, wanted or plan.nothing, False)
            total, *divisor = apart.calls
            for choice in (None, wanted) if wanted else (None,):
                self._make(total, choice, promoted, False)
            for x in divisor:
                inner = engine.promoted(x)
                self._make(x, None, inner, False)
                names = [call.loss.operands[i].name for i in weights]
                here = tuple([y.name in names for y in x.loss.operands])
                if True in here:
                    self._make(x, here, inner, False)
            return
        scalars = (*call.scalars, 0) if plan.takes_status else call.scalars
        operands = self._operands(plan, tensors)
        divisors = [execute.denominator(plan, device, operands, call.scalars, call.normalizer)]
        if call.normalizer is None and (divisor := execute.tallied(plan, device, wanted is not None)):
            divisors.append(divisor)
        for divisor in divisors:
            launch: execute.Bound = plan, device, operands, scalars, divisor
            if wanted is None:
                execute.reduced_or_not(*launch)
            else:
                self._with_gradients(launch, wanted, summed)

    def _with_gradients(self, launch: execute.Bound, wanted: Wanted, summed: bool) -> None:
        plan = launch[0]
        speculates = plan.scalar and options.one_pass_enabled() and not (plan.single_use or plan.keeps_residual)
        if plan.residual is not None and not (speculates or plan.recomputes):
            execute.reduced_or_not(*launch)
            execute.from_residual(*launch, wanted, 0, 0, not plan.scalar)
            if summed and plan.takes_one_upstream:
                execute.from_residual(*launch, wanted, 0, 0, False)
        elif plan.scalar:
            speculation = None
            if speculates:
                _, speculation = execute.value_and_gradients(*launch, wanted)
            execute.gradients(*launch, wanted, 0, None, speculation)
        else:
            dense = plan.upstream_strides() or dense_strides(plan.shape, (0,) * len(plan.shape))
            expanded = (0,) * len(plan.shape)
            for strides in [dense, expanded] if summed and plan.upstream_strides() is None else [dense]:
                execute.gradients(*launch, wanted, 0, strides)
            if summed and plan.takes_one_upstream:
                execute.gradients(*launch, wanted, 0, None)
        if plan.expects_sum:
            _, speculation = execute.value_and_gradients(*launch, wanted)
            execute.gradients(*launch, wanted, 0, None, speculation)

    def _operands(self, plan: Plan, arrays: Sequence[Any]) -> Sequence[Any]:
        return arrays if plan.composite else [0] * len(plan.tensors)

"""Which kernels a call needs, found by making it without data: the engine plans as always, and what it would launch is
noted instead.

So a rehearsal lists what calls compile, whatever the engine decides, and nothing has to be kept in step with it. It
takes neither an array library nor a GPU, and touches nothing that other calls share.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

from cupylosses import checks, interop, options
from cupylosses.definition.base import WEIGHT
from cupylosses.engines import device as engine_device
from cupylosses.engines.pointwise import checks as pointwise_checks
from cupylosses.engines.pointwise import plan as pointwise_plan
from cupylosses.engines.pointwise.call import Call, split
from cupylosses.engines.softmax import checks as softmax_checks
from cupylosses.engines.softmax import dense_plan, planning
from cupylosses.engines.softmax import plan as softmax_plan
from cupylosses.engines.softmax.call import RowCall
from cupylosses.engines.strides import dense_strides
from cupylosses.jit import compiler
from cupylosses.jit.gpu import Chip
from cupylosses.jit.kernel import Kernel


@dataclass(frozen=True)
class Placeholder(engine_device.Tensor):
    """An array that is not there: what a plan needs to know of it, and what a call asks of its operands."""

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    def __getitem__(self, index: tuple[None, ...]) -> Placeholder:
        """With dimensions of size 1 in front."""
        added = (1,) * len(index)
        return Placeholder(self.dtype, added + self.shape, added + self.strides, self.misalignment)


#: Tells operands from numbers, and keeps them from being taken over by a library of arrays.
interop.known_kinds[Placeholder] = "placeholder"


def placeholder(dtype: str, shape: Sequence[int]) -> Placeholder:
    """A contiguous and aligned operand."""
    return Placeholder(dtype, tuple(shape), dense_strides(shape, (0,) * len(shape)), 0)


class _Nothing(engine_device.Device):
    """A device that allocates nothing and on which nothing runs."""

    def __init__(self, chip: Chip | None) -> None:
        # A grid takes the number of processors, a kernel does not.
        super().__init__(0, 1, chip)

    def empty(self, shape: tuple[int, ...], strides: tuple[int, ...], dtype: str) -> Any:
        return self

    def full(self, count: int, value: float) -> Any:
        return self

    def copy(self, array: Placeholder, strides: tuple[int, ...]) -> Any:
        return Placeholder(array.dtype, array.shape, strides, 0)

    def visible(self, words: int) -> tuple[Any, int]:
        return self, 0

    def address(self, array: Any) -> int:
        return 16  # what has an address is wanted, and aligned

    def strides(self, array: Placeholder) -> tuple[int, ...]:
        return array.strides

    def stream(self) -> int:
        return 0

    def capturing(self) -> bool:
        return False


class _Noted(compiler.Launcher):
    """A launcher that is noted, and launches nothing."""

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

    def _enter(self) -> None:
        pass


class Rehearsal:
    """Calls of losses that note their kernels: the keys of ``kernels``, in the order of their first use, and the shared
    memory, in bytes, that launches of each need besides what it declares. The ``chip`` is that of the GPU that they are
    for, which decides how losses of rows are taken.
    """

    def __init__(self, chip: Chip | None = None) -> None:
        self.kernels: dict[Any, int] = {}
        self._device = _Nothing(chip)
        self._device.launcher = partial(_Noted, self.kernels)

    def call(
        self, call: Call, wanted: Collection[tuple[bool, ...]], promoted: str | None = None, summed: bool = True
    ) -> None:
        """Forward without gradients, and forward and backward for each choice of operands that want one.

        The operands are `Placeholder`; ``promoted`` is the dtype that they promote to where that is not torch's rule.
        With ``summed`` a result that is no number may be added up: its upstream gradient is one number for all, too.
        """
        tensors = call.operands
        names = [x.dtype for x in tensors]
        pointwise_checks.dtypes(call.loss, names)
        promoted = promoted or checks.promote(names, [x.ndim for x in tensors])
        device = self._device
        plan = pointwise_plan.Plan(
            call.loss, call.flags, call.reduction, tensors, promoted, device.processors, device.launcher
        )
        if plan.elements == 0:
            return
        on_device = plan.resolved.counted if call.normalizer is None else type(call.normalizer) is not float
        if on_device and not plan.scalar:
            self._divided(call, plan, wanted)
            return
        whole = [x for x in wanted if not (on_device and plan.resolved.weights and call.wants_weight(x))]
        if len(whole) < len(wanted):
            self._divided(call, plan, [x for x in wanted if x not in whole])
        pointers, parameters = [0] * len(tensors), call.parameters
        normalizer = call.normalizer
        if on_device and normalizer is not None:
            normalizer = normalizer, 0
        divisor = pointwise_plan.count(plan, self._device, pointers, parameters, normalizer)
        arguments = plan, self._device, pointers, parameters, divisor
        if not plan.scalar:
            pointwise_plan.elements(*arguments)
            shape = plan.resolved.shape
            dense, expanded = dense_strides(shape, (0,) * len(shape)), (0,) * len(shape)
            for choice, strides in product(whole, [dense, expanded] if summed else [dense]):
                pointwise_plan.gradients(*arguments, choice, 0, strides)
            return
        pointwise_plan.reduce(*arguments)
        for choice in whole:
            _, promise = pointwise_plan.reduce_with_gradient(*arguments, choice)
            pointwise_plan.gradients(*arguments, choice, 0, None, promise)

    def _divided(self, call: Call, plan: pointwise_plan.Plan, wanted: Collection[tuple[bool, ...]]) -> None:
        """A mean whose divisor has dimensions, or a gradient: the two sums that it is the quotient of."""
        total, divisor, _ = split(call, plan.resolved, plan.shape)
        self.call(total, wanted, plan.promoted, summed=False)
        if divisor is not None:
            weights = any(call.wants_weight(x) for x in wanted) and plan.resolved.weights
            here = tuple(x is WEIGHT for x in divisor.loss.operands)
            self.call(divisor, [here] if weights else [], summed=False)

    def rows(self, call: RowCall, wanted: Collection[tuple[bool, bool]], promoted: str | None = None) -> None:
        """The same of a loss of rows. Gradients are written ahead or not, as calls do now."""
        softmax_checks.arrays(call)
        promoted = promoted or softmax_checks.promoted(call)
        rehearse = self._of_indices if call.kind == "indices" else self._of_terms
        if not planning.copies(call, self._device):
            rehearse(call, wanted, promoted)
            return
        if not call.loss.softmax:
            rehearse(call, [], promoted)  # without a gradient nothing is copied
        rehearse(planning.with_classes_together(call, self._device), wanted, promoted)

    def _of_indices(self, call: RowCall, wanted: Collection[tuple[bool, bool]], promoted: str) -> None:
        device = self._device
        plan = planning.index_plan(call, device, promoted, call.out_dtype)
        if not plan.rows:
            return
        numbers = call.ignore_index, call.scale, call.softcap, call.parameters
        given = softmax_plan.Arguments(0, 0, 0, 0, *numbers, checked=False)
        divisor = _divisor(call) or softmax_plan.count(plan, device, given)
        if call.reduction == "none":
            softmax_plan.values(plan, device, given, softmax_plan.Outputs())
        else:
            softmax_plan.reduce(plan, device, given, divisor, softmax_plan.Outputs())
        if not any(first for first, _ in wanted):
            return
        if _writes_ahead(call):
            _, promise = softmax_plan.reduce_with_gradient(plan, device, given, divisor, softmax_plan.Outputs())
            softmax_plan.verified_gradient(plan, device, given, divisor, 0, promise)
        else:
            softmax_plan.apply(plan, device, given, divisor, 0, 0, call.reduction == "none", 0)

    def _of_terms(self, call: RowCall, wanted: Collection[tuple[bool, bool]], promoted: str) -> None:
        device = self._device
        plan = planning.term_plan(call, device, promoted, call.out_dtype)
        if not plan.rows:
            return
        given = dense_plan.TermArguments(0, 0, 0, 0, call.scale, call.softcap, call.parameters)
        divisor = _divisor(call) or dense_plan.count(plan, device, given)
        if call.reduction == "none":
            dense_plan.values(plan, device, given)
        else:
            dense_plan.reduce(plan, device, given, divisor)
        for choice in wanted:
            if call.reduction == "none":
                dense_plan.gradients(plan, device, given, choice, 0)
                continue
            promise = None
            if _writes_ahead(call):
                _, promise = dense_plan.reduce_with_gradients(plan, device, given, divisor, choice)
            dense_plan.verified_gradients(plan, device, given, divisor, choice, 0, promise)


def _divisor(call: RowCall) -> engine_device.Divisor | None:
    """What the sum of the rows is divided by; None if that is to be counted."""
    if call.normalizer is not None and type(call.normalizer) is not float:
        return engine_device.Divisor(1.0, call.normalizer, 0)
    return None if call.divisor is None else engine_device.Divisor(call.divisor)


def _writes_ahead(call: RowCall) -> bool:
    """Whether the gradient is written while the value is computed."""
    return call.reduction != "none" and not call.inplace and options.one_pass_enabled()

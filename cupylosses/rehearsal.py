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

from cupylosses import checks, compiler, engine, launch
from cupylosses.call import Call, split
from cupylosses.codegen import Compilable, Variant
from cupylosses.definition import WEIGHT


@dataclass(frozen=True)
class Placeholder(engine.Tensor):
    """An array that is not there: what a plan needs to know of it, and what a call asks of its operands."""

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    def __getitem__(self, index: tuple[None, ...]) -> Placeholder:
        """With dimensions of size 1 in front."""
        added = (1,) * len(index)
        return Placeholder(self.dtype, added + self.shape, added + self.strides, self.misalignment)

    def __dlpack__(self, **_: Any) -> Any:
        """Tells operands from numbers; there is nothing to hand over."""
        raise BufferError("a placeholder holds no data")

    __dlpack_device__ = __dlpack__


def placeholder(dtype: str, shape: Sequence[int]) -> Placeholder:
    """A contiguous and aligned operand."""
    return Placeholder(dtype, tuple(shape), launch.dense_strides(shape, (0,) * len(shape)), 0)


class _Nothing(engine.Device):
    """A device that allocates nothing and on which nothing runs."""

    def __init__(self) -> None:
        # A grid takes the number of processors, a kernel does not.
        super().__init__(index=0, processors=1)

    def empty(self, shape: tuple[int, ...], strides: tuple[int, ...], dtype: str) -> Any:
        return self

    def full(self, count: int, value: float) -> Any:
        return self

    def visible(self, words: int) -> tuple[Any, int]:
        return self, 0

    def address(self, array: Any) -> int:
        return 0

    def stream(self) -> int:
        return 0

    def capturing(self) -> bool:
        return False


class _Noted(compiler.Launcher):
    """A launcher that is noted, and launches nothing."""

    def __init__(self, kernels: dict[Any, None], variant: Compilable, *geometry: Any) -> None:
        kernels[variant] = None
        super().__init__(variant, *geometry)

    @classmethod
    def load(cls, variant: Compilable, shared: int = 0) -> tuple[Callable[..., Any], Any]:
        return (lambda *_: None), None

    def _enter(self) -> None:
        pass


class Rehearsal:
    """Calls of losses that note their kernels: the keys of ``kernels``, in the order of their first use."""

    def __init__(self) -> None:
        self.kernels: dict[Variant, None] = {}
        self._device = _Nothing()

    def call(
        self, call: Call, wanted: Collection[tuple[bool, ...]], promoted: str | None = None, summed: bool = True
    ) -> None:
        """Forward without gradients, and forward and backward for each choice of operands that want one.

        The operands are `Placeholder`; ``promoted`` is the dtype that they promote to where that is not torch's rule.
        With ``summed`` a result that is no number may be added up: its upstream gradient is one number for all, too.
        """
        tensors = call.operands
        names = [x.dtype for x in tensors]
        checks.dtypes(call.loss, names)
        promoted = promoted or checks.promote(names, [x.ndim for x in tensors])
        processors = self._device.processors
        launcher = partial(_Noted, self.kernels)
        plan = engine.Plan(call.loss, call.flags, call.reduction, tensors, promoted, processors, launcher)
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
        divisor = engine.count(plan, self._device, pointers, parameters, normalizer)
        arguments = plan, self._device, pointers, parameters, divisor
        if not plan.scalar:
            engine.elements(*arguments)
            shape = plan.resolved.shape
            dense, expanded = launch.dense_strides(shape, (0,) * len(shape)), (0,) * len(shape)
            for choice, strides in product(whole, [dense, expanded] if summed else [dense]):
                engine.gradients(*arguments, choice, 0, strides)
            return
        engine.reduce(*arguments)
        for choice in whole:
            _, promise = engine.reduce_with_gradient(*arguments, choice)
            engine.gradients(*arguments, choice, 0, None, promise)

    def _divided(self, call: Call, plan: engine.Plan, wanted: Collection[tuple[bool, ...]]) -> None:
        """A mean whose divisor has dimensions, or a gradient: the two sums that it is the quotient of."""
        total, divisor, _ = split(call, plan.resolved, plan.shape)
        self.call(total, wanted, plan.promoted, summed=False)
        if divisor is not None:
            weights = any(call.wants_weight(x) for x in wanted) and plan.resolved.weights
            here = tuple(x is WEIGHT for x in divisor.loss.operands)
            self.call(divisor, [here] if weights else [], summed=False)

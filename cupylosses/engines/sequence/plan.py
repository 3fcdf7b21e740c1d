"""Plans of sequence losses."""

from __future__ import annotations

from typing import Any

from cupylosses.call import Call
from cupylosses.engines.base import Engine, Machine, TensorSpec, contiguous
from cupylosses.engines.composite import CompositePlan
from cupylosses.engines.sequence.call import Static, constant_divisor, sizes


class SequencePlan(CompositePlan):
    """The plan of a sequence loss."""

    static: Static

    def __init__(
        self, engine: Engine, call: Call, tensors: tuple[TensorSpec, ...], promoted: str, machine: Machine
    ) -> None:
        super().__init__(engine, call, tensors, promoted, machine)
        static: Static = call.static
        self.sizes = sizes(static, tensors[0].shape, tensors[1].shape)
        self.scalar = static.reduction != "none"
        self.result = static.out_dtype or promoted
        spec = contiguous(self.result, () if self.scalar else self.sizes.samples)
        self.shape, self.strides = spec.shape, spec.strides
        self.differentiable = self.speculative = tuple([i == 0 for i in range(len(tensors))])
        self.divisor, self.counted = constant_divisor(static, self.sizes.samples), static.counted
        self.partials = self.records = 0
        self.empty = True

    def run_value(self, *_: Any) -> Any:
        raise NotImplementedError("formulas serve every call")

    run_value_and_gradients = run_gradients = run_value  # type: ignore[assignment]

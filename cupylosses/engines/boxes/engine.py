"""The box engine: implements the protocol of :mod:`cupylosses.engines.base`.

A box is a row of four features. Transforms therefore split, batch and differentiate a call as one of row statistics.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, ClassVar

from cupylosses import interop
from cupylosses.call import Call, Parts
from cupylosses.engines.base import ARGUMENTS, Apart, Machine, Plan, Question, TensorSpec, Wanted
from cupylosses.engines.boxes import checks as box_checks
from cupylosses.engines.boxes.definition import COMPONENTS, BoxLoss
from cupylosses.engines.boxes.plan import BoxPlan
from cupylosses.engines.pointwise.layout import is_sparse
from cupylosses.engines.row_statistics.engine import StatisticsEngine
from cupylosses.engines.strides import dense_strides

#: Last dimension of an array of boxes.
_LAST = (COMPONENTS,)

#: Reductions that are replaced by a sum if there are no boxes: the result is 0.
_MEANS = ("mean", "weighted_mean", "batchmean")


class BoxEngine(StatisticsEngine):
    """Engine of losses of boxes."""

    name = "boxes"
    needs_chip = False
    Definition: ClassVar[Any] = BoxLoss

    def bind(
        self, loss: Any, arrays: tuple[Any, ...], settings: tuple[Any, ...], legacy: tuple[Any, ...] = ()
    ) -> Parts:
        for i in loss.vector_slots:
            x = arrays[i]
            if interop.kind(x) != "unknown" and hasattr(x, "shape") and x.shape[-1:] != _LAST:
                box_checks.components(loss, loss.operands[i].name, tuple(x.shape))
        return self.bind_rows(loss, arrays, settings, legacy)

    def check(self, call: Call) -> None:
        loss: Any = call.loss
        for operand, x in zip(loss.operands, call.arrays, strict=False):
            box_checks.components(loss, operand.name, tuple(x.shape))
        super().check(call)

    def promoted(self, call: Call, zero_d_widens: bool = False) -> str:
        """Returns the promoted dtype, but at least float32, in which 16-bit boxes are computed."""
        promoted = super().promoted(call, zero_d_widens)
        return "float32" if promoted in ("float16", "bfloat16") else promoted

    def plan(self, call: Call, tensors: tuple[TensorSpec, ...], promoted: str, machine: Machine) -> Plan:
        return BoxPlan(self, call, tensors, promoted, machine)

    def copies(
        self, call: Call, tensors: tuple[TensorSpec, ...], machine: Machine, writes: int
    ) -> Mapping[int, tuple[int, ...]]:
        """Returns the operands that are copied, with the strides of the copies: those that are read twice (for a value
        per box, and for its gradients) and of which each memory sector holds little.
        """
        if not writes or call.static.reduction != "none" or call.static.has_tangent:
            return {}
        loss: Any = call.loss
        boxes = [(i, tensors[i]) for i in loss.vector_slots]
        sparse = [(i, x) for i, x in boxes if is_sparse(x.shape, x.strides, interop.ITEMSIZE[x.dtype])]
        return {i: dense_strides(x.shape, x.strides) for i, x in sparse}

    def reference(self, call: Call, promoted: str, readable: bool = True) -> Any:
        return super().reference(_of_some(call), promoted, readable)

    def apart(self, call: Call, promoted: str, wanted: Wanted, traced: bool) -> Apart | None:
        return super().apart(_of_some(call), promoted, wanted, traced)

    def placeholders(
        self, loss: Any, dtypes: Sequence[str], shapes: Sequence[tuple[int, ...]], options: Mapping[str, Any]
    ) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Returns dtypes and shapes of all arrays. The last dimension of a shape is replaced by that of the components,
        whatever its size, because a warm-up of all losses has one shape for all of them.
        """
        boxes = [(*shape[:-1], COMPONENTS) for shape in shapes]
        return super().placeholders(loss, dtypes, boxes, {**options, "feature_dim": -1})

    def differs(self, loss: Any, call: Call, takes: Callable[[Question], str | None], autocast: bool) -> str | None:
        return ARGUMENTS


def _of_some(call: Call) -> Call:
    """Returns the call, with a mean of no boxes replaced by their sum."""
    static = call.static
    if static.reduction in _MEANS and not static.normalized and prod(call.arrays[0].shape) == 0:
        return call._replace(static=static._replace(reduction="sum"))
    return call


BOXES = BoxEngine()

"""Second derivatives of an element-wise loss that are zero wherever they exist."""

from __future__ import annotations

from functools import cache

from cupylosses.definition.curvature import Dependence, Pairs, evaluate, joined, of_flags, of_names
from cupylosses.engines.pointwise.definition import Loss, ModifiedLoss


@cache
def curved_pairs(loss: Loss, flags: tuple[int, ...]) -> Pairs:
    """Returns the pairs of operands, in both orders, by which the second derivative of a loss may differ from 0."""
    known = of_names([x.name for x in loss.operands]) | of_flags(loss.flags, flags)
    for name, expression in loss.let.items():
        known[name] = evaluate(expression, known)
    dependence = evaluate(loss.value, known)
    if loss.derivatives:
        # Hand-written: nothing is known about their derivatives.
        dependence = joined([Dependence(frozenset([x.name for x in loss.operands]))], [(0, 0)])
    if isinstance(loss, ModifiedLoss) and loss.weight == "array":
        dependence = joined([known["weight"], dependence], [(0, 1)])
    return dependence.curved

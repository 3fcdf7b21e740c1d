"""Pairs of operands of a row-statistics loss whose mixed second derivative is zero wherever it exists."""

from __future__ import annotations

from functools import cache

from cupylosses.definition.curvature import Dependence, Pairs, evaluate, joined, of_flags, of_names
from cupylosses.engines.row_statistics.definition import StatisticsLoss

#: Degrees of the norms that are piecewise linear in their components.
_LINEAR = ("1", "inf")


@cache
def curved_pairs(loss: StatisticsLoss, flags: tuple[int, ...], norm: str, weighted: bool) -> Pairs:
    """Returns the pairs of operands, in both orders, for which a mixed second derivative of a row's value may be
    nonzero, with norms of degree ``norm``, and with the operand ``weight`` if ``weighted``. A pair stands for all
    features of the two operands: features are not distinguished.
    """
    known = of_names([x.name for x in loss.operands]) | of_flags(loss.flags, flags)
    for name, expression in loss.terms(flags).items():
        known[name] = evaluate(expression, known)
        if name in loss.norms and norm not in _LINEAR:
            known[name] = joined([known[name]], [(0, 0)])
    for name, expression in loss.let.items():
        known[name] = evaluate(expression, known)
    dependence = evaluate(loss.value, known)
    if weighted:
        dependence = joined([Dependence(frozenset(["weight"])), dependence], [(0, 1)])
    return dependence.curved

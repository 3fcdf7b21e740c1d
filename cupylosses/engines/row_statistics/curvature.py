"""The second derivatives of a loss of row statistics that are zero wherever they exist."""

from __future__ import annotations

from functools import cache

from cupylosses.definition.curvature import Dependence, Pairs, evaluate, joined, of_flags, of_names
from cupylosses.engines.row_statistics.definition import StatisticsLoss

#: Degrees of norms that are piecewise linear in their components.
_LINEAR = ("1", "inf")


@cache
def curved_pairs(loss: StatisticsLoss, flags: tuple[int, ...], norm: str, weighted: bool) -> Pairs:
    """The pairs of operands, in both orders, by which the second derivative of a row's value may be other than 0; of
    norms of degree ``norm``, and with the operand ``weight`` if ``weighted``. What holds of two features of an operand
    holds of any two.
    """
    known = of_names([x.name for x in loss.operands]) | of_flags(loss.flags, flags)
    for name, expression in loss.terms(flags).items():
        known[name] = evaluate(expression, known)
        if name in loss.norms and norm not in _LINEAR:
            known[name] = joined([known[name]], [(0, 0)])
    for name, expression in loss.let.items():
        known[name] = evaluate(expression, known)
    found = evaluate(loss.value, known)
    if weighted:
        found = joined([Dependence(frozenset(["weight"])), found], [(0, 1)])
    return found.curved

"""Which checks a loss is put through in the tests, where every kernel is compiled for the check alone.

The representatives (``representatives.py``) go through everything, so that every pair of layout, dtype and reduction
occurs. Of any other loss its formula is left to be checked. It meets every set of parameters in every dtype, every
reduction and every layout, and each operand's gradient as a sum, but not all of that with each other.
"""

from __future__ import annotations

from cupylosses.testing.check import EDGES, Check
from cupylosses.testing.layouts import LAYOUTS

#: The dtype that meets every reduction and layout.
EVERYWHERE = ("float32",)

#: Layouts that, reduced, share the kernels of contiguous operands, and those that have their own.
SHARED = frozenset({"contiguous", "transposed", "channels_last", "zero_d", "empty"})
OWN = tuple(x for x in LAYOUTS if x not in SHARED)

#: The layout in which every operand is broadcast, so that each gradient is a sum.
SUMS = "outer"


def contains(check: Check) -> bool:
    """Whether a loss that is no representative is put through a check."""
    loss, wanted = check.loss, check.wanted or (True,)
    if check.dim is not None or len(check.dtypes) > 1 or any(wanted) != all(wanted):
        return False
    usual = loss.values(loss.cases[0])
    if check.layout in ("contiguous", EDGES):
        # Each choice of the flags is a formula, which every element shows; adding these up does not depend on it.
        everything = check.dtypes == EVERYWHERE and loss.choose(check.values) == loss.choose(usual)
        return everything or check.reduction == "none"
    plain = (check.values, check.dtypes, check.reduction) == (usual, EVERYWHERE, "mean")
    return plain and (check.layout in (*SHARED, SUMS) or not any(wanted))

"""Selection of checks that covers a loss, for tests where every kernel is compiled for one check alone.

The representatives (``representatives.py``) run all checks, so every pair of layout, dtype and reduction occurs. For
any other loss only its formula is left to check: every set of parameters in every dtype, every reduction, every layout,
and each operand's gradient as a sum, but not every combination of these.
"""

from __future__ import annotations

from cupylosses.testing.check import EDGES, Check
from cupylosses.testing.layouts import LAYOUTS

#: The dtype that is checked with every reduction and layout.
EVERYWHERE = ("float32",)

#: Layouts that, reduced, share the kernels of contiguous operands, and layouts with their own kernels.
SHARED = frozenset({"contiguous", "transposed", "channels_last", "zero_d", "empty"})
OWN = tuple(x for x in LAYOUTS if x not in SHARED)

#: Layout in which every operand is broadcast, so that each gradient is a sum.
SUMS = "outer"


def contains(check: Check) -> bool:
    """True if a loss that is not a representative runs the check."""
    loss, wanted = check.loss, check.wanted or (True,)
    if check.dim is not None or len(check.dtypes) > 1 or any(wanted) != all(wanted):
        return False
    usual = loss.values(loss.cases[0])
    if check.layout in ("contiguous", EDGES):
        # Each choice of the flags is a formula of its own, which unreduced elements test; sums do not depend on it.
        everything = check.dtypes == EVERYWHERE and loss.choose(check.values) == loss.choose(usual)
        return everything or check.reduction == "none"
    plain = (check.values, check.dtypes, check.reduction) == (usual, EVERYWHERE, "mean")
    return plain and (check.layout in (*SHARED, SUMS) or not any(wanted))

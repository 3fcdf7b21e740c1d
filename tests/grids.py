"""What tests are parametrised over, cut so that a GPU compiles each kernel of interest once.

Parameters meet dtypes and reductions on contiguous operands, layouts meet losses in float32, and dtypes meet layouts in
one loss, because the loads do not know the loss.
"""

from __future__ import annotations

import pytest

from cupylosses.checks import FLOATING
from cupylosses.definition import registry
from cupylosses.testing.layouts import WIDEST

#: Every loss with every set of parameters that its definition names.
CASES = [
    pytest.param(loss, case, id=f"{loss.name}({','.join(f'{k}={v}' for k, v in case.items())})")
    for loss in registry().values()
    for case in loss.cases
]

#: Layouts in which the width of an element decides how it is loaded.
LOADS = ("misaligned", "sliced", "row_aligned", "column_aligned", "scalar")

#: Dtypes of the operands, and what torch promotes them to.
MIXED = {
    ("float32", "bfloat16"): "float32",
    ("bfloat16", "float32"): "float32",
    ("float16", "bfloat16"): "float32",
    ("float64", "float16"): "float64",
    ("float32", "int64"): "float32",
    ("bfloat16", "int8"): "bfloat16",
    ("float16", "bool"): "float16",
    ("float64", "uint8"): "float64",
    ("int32", "float32"): "float32",
    ("int16", "float32"): "float32",
}

#: Every mixture in one loss that takes integers, and a few in the others: the loads do not know the loss.
MIXTURES = [
    pytest.param(loss, dtypes, id=f"{loss.name}-{'-'.join(dtypes)}")
    for position, loss in enumerate(sorted(registry().values(), key=lambda x: not x.operands[0].integer))
    for dtypes in MIXED
    if position == 0 or dtypes in [("float32", "bfloat16"), ("float16", "bfloat16"), ("float32", "int64")]
    if all(x.integer or name in FLOATING for x, name in zip(loss.operands, (*dtypes, *dtypes[-1:] * 2)))
]

#: One element; around a vector of each width; around what a warp takes at once (32 lanes, 4 vectors, each width).
SIZES = sorted(
    {1, 2, 3}
    | {lanes * k + d for lanes in (2, 4, WIDEST) for k in (1, 2) for d in (-1, 0, 1)}
    | {32 * 4 * lanes + d for lanes in (1, 2, 4, WIDEST) for d in (-1, 0, 1)}
)

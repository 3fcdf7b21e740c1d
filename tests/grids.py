"""What tests are parametrised over, cut so that a GPU compiles each kernel of interest once.

Parameters meet dtypes and reductions on contiguous operands, layouts meet losses in float32, and dtypes meet layouts in
one loss each, because the loads do not know the loss. What of it runs on the host: ``cupylosses.testing.covering``.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import cycle, product
from typing import Any

import pytest

from cupylosses.checks import FLOATING
from cupylosses.definition import REDUCTIONS, registry
from cupylosses.testing.layouts import WIDEST
from cupylosses.testing.representatives import representatives

#: Every loss with every set of parameters that its definition names.
CASES = [
    pytest.param(loss, case, id=f"{loss.name}({','.join(f'{k}={v}' for k, v in case.items())})")
    for loss in registry().values()
    for case in loss.cases
]

#: Elements, and what has one kernel for all: a test goes through the reductions of either.
BY_KERNEL = pytest.mark.parametrize("reductions", [REDUCTIONS[:1], REDUCTIONS[1:]], ids=["none", "reduced"])


#: Beside float32, which losses meet layouts in.
OTHERS = tuple(x for x in FLOATING if x != "float32")


def in_turn(*values: Iterable[str]) -> list[Any]:
    """Each combination of values with one of the representatives: for what a loss has little to do with."""
    return [
        pytest.param(loss, *combination, id="-".join((loss.name, *combination)))
        for loss, combination in zip(cycle(representatives()), product(*values))
    ]


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

#: A loss that takes integers for every operand, or nearly so.
INTEGER = next(x for x in representatives() if x.operands[0].integer)

#: Every mixture in one loss, and a few in the others.
MIXTURES = [
    pytest.param(loss, dtypes, id=f"{loss.name}-{'-'.join(dtypes)}")
    for loss in registry().values()
    for dtypes in MIXED
    if loss is INTEGER or dtypes in [("float32", "bfloat16"), ("float16", "bfloat16"), ("float32", "int64")]
    if all(x.integer or name in FLOATING for x, name in zip(loss.operands, (*dtypes, *dtypes[-1:] * 2)))
]

#: One element; around a vector of each width; around what a warp takes at once (32 lanes, 4 vectors, each width).
SIZES = sorted(
    {1, 2, 3}
    | {lanes * k + d for lanes in (2, 4, WIDEST) for k in (1, 2) for d in (-1, 0, 1)}
    | {32 * 4 * lanes + d for lanes in (1, 2, 4, WIDEST) for d in (-1, 0, 1)}
)

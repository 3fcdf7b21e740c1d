"""What tests are parametrised over, cut so that a GPU compiles each kernel of interest once.

Parameters meet dtypes and reductions on contiguous operands, layouts meet losses in float32, and dtypes meet layouts in
one loss each, because the loads do not know the loss. What of it runs on the host: ``cupylosses.testing.covering``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle, product
from typing import Any, TypeVar

import pytest

from cupylosses.checks import FLOATING
from cupylosses.definition import REDUCTIONS, Loss, registry
from cupylosses.testing.layouts import WIDEST
from cupylosses.testing.representatives import representatives

T = TypeVar("T")

_mode = {"thorough": False}


def set_thorough(chosen: bool) -> None:
    """Chooses exhaustive grids; called once, before any test module is imported."""
    _mode["thorough"] = chosen


def thorough() -> bool:
    """True if pytest runs with ``--thorough``."""
    return _mode["thorough"]


def short_or_full(short: T, full: T) -> T:
    """``full`` with ``--thorough``, else ``short``: for a selection that its test knows best."""
    return full if thorough() else short


def in_turn(*axes: Sequence[Any], times: int = 1) -> list[tuple[Any, ...]]:
    """Settings of several axes: their product with ``--thorough``, else so few that every value of each axis occurs.

    The short selection has as many settings as the longest axis has values, or ``times`` as many, for more of the
    pairs. Setting ``i`` takes value ``i`` of every axis, modulo its length; each further round shifts the axes against
    one another, so that it meets other pairs.
    """
    if thorough() or len(axes) == 1:
        return list(product(*axes))
    longest = max(map(len, axes))
    settings = [
        tuple(axis[(i + position * (i // longest)) % len(axis)] for position, axis in enumerate(axes))
        for i in range(times * longest)
    ]
    return [x for i, x in enumerate(settings) if x not in settings[:i]]


def identity(value: Any) -> str | None:
    """A loss, the parameters of one, or several names, as part of the name of a test; None for anything else."""
    if isinstance(value, Loss):
        return value.name
    if isinstance(value, Mapping) and all(isinstance(x, (bool, int, float, str)) for x in value.values()):
        return ",".join(f"{k}={v}" for k, v in value.items()) or "defaults"
    if isinstance(value, tuple) and value and all(isinstance(x, str) for x in value):
        return "-".join(value)
    return None


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


def losses_in_turn(*values: Iterable[str]) -> list[Any]:
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

"""Parameters of tests: short selections, and exhaustive grids with ``--thorough``.

Formulas are tested separately from kernels, for every loss, parameter and dtype. Layouts, dtypes and reductions, which
the kernels add, do not depend on the loss. For these the short selections go through each axis in turn, so that every
value of every axis occurs; ``--thorough`` goes through the product.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any, TypeVar

import pytest
from devices import KERNELS
from tools.representatives import representatives

from cupylosses.definition.registry import registry
from cupylosses.engines.pointwise.definition import Loss
from cupylosses.testing.check import Check
from cupylosses.testing.layouts import WIDEST

T = TypeVar("T")

_mode = {"thorough": False}


def set_thorough(chosen: bool) -> None:
    """Selects exhaustive grids; called once, before any test module is imported."""
    _mode["thorough"] = chosen


def thorough() -> bool:
    """True if pytest runs with ``--thorough``."""
    return _mode["thorough"]


def short_or_full(short: T, full: T) -> T:
    """Returns ``full`` with ``--thorough``, else ``short``: for tests that make their own selection."""
    return full if thorough() else short


def in_turn(*axes: Sequence[Any], times: int = 1) -> list[tuple[Any, ...]]:
    """Returns settings of several axes: their product with ``--thorough``, else a short selection with every value.

    The short selection has as many settings as the longest axis has values, or ``times`` as many, to cover more pairs.
    Setting ``i`` takes value ``i`` of every axis, modulo its length; each further round shifts the axes against one
    another, so that other pairs meet.
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
    """Returns the text of losses, parameters, names and tuples of these in test ids; None for anything else."""
    if isinstance(value, Loss):
        return value.name
    if isinstance(value, Mapping) and all(isinstance(x, (bool, int, float, str)) for x in value.values()):
        return ",".join(f"{k}={v}" for k, v in value.items()) or "defaults"
    if isinstance(value, tuple) and value:
        parts = [x if isinstance(x, str) else identity(x) for x in value]
        return "-".join(map(str, parts)) if None not in parts else None
    return None


LOSSES = tuple(registry(Loss).values())
REPRESENTATIVES = representatives()
#: Representative with the fewest kernels.
FEWEST = min(REPRESENTATIVES, key=lambda x: (len(x.operands), len(x.parameters), len(x.flags)))

#: Every loss with every set of parameters in its definition.
CASES = [(loss, case) for loss in LOSSES for case in loss.cases]


def reference_and_kernels(names: str, *axes: Sequence[Any], kernels: Sequence[tuple[Any, ...]] | None = None) -> Any:
    """Parametrizes ``names`` and ``device``.

    The reference path runs the product of the axes. Without ``--thorough``, kernels go through the axes in turn, or run
    the settings in ``kernels``.
    """
    every = list(product(*axes))
    few = short_or_full(in_turn(*axes) if kernels is None else list(kernels), every)
    cases = [pytest.param(*x, "cpu", id=f"{_title(x)}-reference") for x in every]
    cases += [pytest.param(*x, KERNELS, id=f"{_title(x)}-kernels", marks=pytest.mark.kernels) for x in few]
    return pytest.mark.parametrize((*(x.strip() for x in names.split(",")), "device"), cases)


def _title(setting: tuple[Any, ...]) -> str:
    return "-".join(x if isinstance(x, str) else identity(x) or str(x) for x in setting)


def by_reference_and_kernels(test: Any) -> Any:
    """Runs a test for each representative on the reference path, and in kernels for the one with the most operands."""
    largest = max(REPRESENTATIVES, key=lambda x: len(x.operands))
    return reference_and_kernels("loss", REPRESENTATIVES, kernels=[(largest,)])(test)


#: Dtypes of the operands, and the dtype that torch promotes them to.
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


def mixtures() -> list[tuple[Loss, tuple[str, ...]]]:
    """Pairs each mixture with a representative that accepts it, in turn; with ``--thorough``, with every such loss."""
    possible = {dtypes: [x for x in LOSSES if Check(x, dtypes=dtypes).possible] for dtypes in MIXED}
    if thorough():
        return [(loss, dtypes) for dtypes, losses in possible.items() for loss in losses]
    few = {dtypes: [x for x in losses if x in REPRESENTATIVES] for dtypes, losses in possible.items()}
    return [(losses[i % len(losses)], dtypes) for i, (dtypes, losses) in enumerate(few.items())]


#: Few elements; sizes around a vector of each width; around one step of a warp (32 lanes, 4 vectors, each width).
SIZES = sorted(
    {1, 2, 3}
    | {lanes * k + d for lanes in (2, 4, WIDEST) for k in (1, 2) for d in (-1, 0, 1)}
    | {32 * 4 * lanes + d for lanes in (1, 2, 4, WIDEST) for d in (-1, 0, 1)}
)

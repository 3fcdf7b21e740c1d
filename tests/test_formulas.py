"""The formula of every loss: value and gradients for all its parameters and flags, in every result dtype.

A formula is compiled alone (``tools.formulas``), one unit per choice of flags, because the kernels of a loss differ in
everything except the formula. ``test_gradients.py`` shows that kernels evaluate it. Every mistake in an expression or
a primitive must show here; the altered expressions below prove that it does.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
from devices import GPU, KERNELS
from expression_mutants import mutants
from grids import CASES, LOSSES, thorough
from tools import formulas

import cupylosses.functional as F
from cupylosses.checks import FLOATING
from cupylosses.engines.pointwise.definition import Loss
from cupylosses.jit import sources
from cupylosses.testing import properties
from cupylosses.testing.check import EDGES
from cupylosses.testing.pointwise.truth import OVERFLOWING

pytestmark = [pytest.mark.kernels, pytest.mark.every_loss]

#: Shape of operands with some points of the interior. Edges and kinks, where errors are likelier, have their own tests.
SHAPE = (19, 23)


def by_element(loss: Loss) -> Loss:
    """The loss without its mean over rows, since a formula is that of one element."""
    return replace(loss, mean_of_rows=False) if loss.mean_of_rows else loss


def agrees_inside(loss: Loss, case: Mapping[str, Any], dtype: str) -> None:
    """Value and gradients match the truth at random points of the domain."""
    setting: dict[str, Any] = {"case": case, "dtypes": (dtype,), "reduction": "none", "shape": SHAPE}
    properties.agrees_with_truth(formulas.function(loss), loss, **setting, device=KERNELS)


def agrees_at_edges(loss: Loss, case: Mapping[str, Any], dtype: str) -> None:
    """Value and gradients match at zeros of both signs, subnormals, huge numbers, infinities, NaN, and around kinks."""
    if (loss.name, dtype) in OVERFLOWING:
        return  # The truth overflows in intermediate steps; test_numerics.py has a truth of many digits.
    setting: dict[str, Any] = {"case": case, "dtypes": (dtype,), "reduction": "none", "layout": EDGES}
    properties.agrees_with_truth(formulas.function(loss), loss, **setting, device=KERNELS)


def agrees_at_kinks(loss: Loss, case: Mapping[str, Any], dtype: str) -> None:
    """Value and gradients at the declared kinks match the declared ones."""
    properties.follows_declared_kinks(formulas.function(loss), loss, case, dtype, KERNELS)


def keeps_nan(loss: Loss, case: Mapping[str, Any], dtype: str) -> None:
    """A NaN in any operand makes value and all gradients NaN."""
    function = formulas.function(loss)
    properties.propagates_nan(function, loss, case, dtype, KERNELS, layouts=["contiguous"], reductions=["none"])


CHECKS: tuple[Callable[[Loss, Mapping[str, Any], str], None], ...] = (
    agrees_inside,
    agrees_at_edges,
    agrees_at_kinks,
    keeps_nan,
)


@pytest.mark.parametrize("check", CHECKS, ids=lambda x: x.__name__)
@pytest.mark.parametrize(("loss", "case"), CASES)
def test_formula(loss: Loss, case: Mapping[str, Any], check: Callable[..., None]) -> None:
    for dtype in FLOATING:
        check(by_element(loss), case, dtype)


@pytest.mark.parametrize(("loss", "case"), CASES)
def test_torch_agrees(loss: Loss, case: Mapping[str, Any]) -> None:
    """torch's results do not depend on the definition's own reference formula."""
    if loss.mean_of_rows:
        pytest.skip("torch has no elements of it; test_gradients.py has its rows")
    properties.agrees_with_torch(formulas.function(loss), loss, case, reduction="none", device=KERNELS)


# ----------------------------------------------------------------------------------------------------------------------
# Wrong formulas are caught

#: Changes of a token that leave an expression right, or wrong only for operands that no check of one formula has.
UNSEEN = (
    ("abs(target) > 0", "square(target) > 0"),
    ("where(q > 0", "where((q * 1.001) > 0"),
    # test_numerics.py has labels this small.
    ("abs(target) > 0", "abs(target) > 0.001"),
    ("where(target > 0,", "where(target > 0.001,"),
    # A label of 0 already gives NaN.
    ("where(target > 0,", "where(target >= 0,"),
)


def caught(loss: Loss, dtypes: tuple[str, ...] = ("float32",)) -> bool:
    """True if a check distinguishes the loss from its reference formula."""
    for case in loss.cases:
        for dtype in dtypes:
            for check in CHECKS:
                try:
                    check(by_element(loss), case, dtype)
                except AssertionError:
                    return True
    return False


def wrong_expressions() -> list[Any]:
    """Every mutant with ``--thorough``; otherwise two of each kind, from losses far apart in the list."""
    kinds: dict[str, list[Any]] = defaultdict(list)
    for loss in LOSSES:
        for kind, where, wrong in mutants(loss):
            if not any(a in where and b in where for a, b in UNSEEN):
                kinds[kind].append(pytest.param(wrong, id=f"{kind}: {where}"))
    return [x for found in kinds.values() for x in (found if thorough() else found[:: -(-len(found) // 2)])]


@pytest.mark.programs
@pytest.mark.parametrize("wrong", wrong_expressions())
def test_wrong_expression_is_caught(wrong: Loss) -> None:
    assert caught(wrong)


@pytest.mark.programs
@pytest.mark.skipif(GPU, reason="compiled from altered text on the host")
@pytest.mark.parametrize(
    ("name", "text", "instead"),
    [
        ("mse_loss", r"T\(1\), T\(-1\)\)", "T(1), T(1))"),
        ("soft_margin_loss", r"(x\.value \* y\.value), y\.value, x\.value", r"\1, x.value, y.value"),
        ("hinge_loss", r"(where\(x\.value) < (T\(0\), constant)", r"\1 <= \2"),
        ("soft_margin_loss", r"scalar_nan\(T\(\)\)", "T(0)"),
    ],
)
def test_wrong_primitive_is_caught(name: str, text: str, instead: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expand = sources.expand

    def altered(files: tuple[str, ...]) -> str:
        source, count = re.subn(text, instead, expand(files))
        assert count, f"no text matches {text}"
        return source

    monkeypatch.setattr(sources, "expand", altered)
    assert caught(getattr(F, name).loss, ("float32", "bfloat16"))

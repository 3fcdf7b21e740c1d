"""Checks on the host of losses that are not representatives: every setting occurs, with few kernels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest
from tools.covering import contains

from cupylosses.checks import FLOATING
from cupylosses.definition.base import REDUCTIONS
from cupylosses.definition.registry import registry
from cupylosses.engines.pointwise.codegen import PointwiseKernel
from cupylosses.engines.pointwise.definition import Loss
from cupylosses.testing import host
from cupylosses.testing.check import EDGES, Check, run
from cupylosses.testing.layouts import LAYOUTS


def everything(loss: Loss) -> Iterator[Check]:
    """The checks of a loss: the full product of the settings."""
    choices = ((True,) * len(loss.operands), (False,) * len(loss.operands))
    for case, dtype, reduction in product(loss.cases, FLOATING, REDUCTIONS):
        for layout, wanted in product((*LAYOUTS, EDGES), choices):
            yield Check(loss, case=case, dtypes=(dtype,), reduction=reduction, layout=layout, wanted=wanted)


def test_every_setting_is_met(loss: Loss) -> None:
    found = [x for x in everything(loss) if contains(x)]
    for layout, wanted in product(("contiguous", EDGES), (True, False)):
        some = [x for x in found if x.layout == layout and any(x.gradients_of) == wanted]
        assert {(repr(x.case), x.dtypes) for x in some} == {(repr(c), (d,)) for c, d in product(loss.cases, FLOATING)}
        assert {x.reduction for x in some} == set(REDUCTIONS)
    assert {x.layout for x in found} == {*LAYOUTS, EDGES}


@pytest.mark.representatives
@pytest.mark.filterwarnings("ignore:.*broadcast")
def test_kernels_are_few(loss: Loss) -> None:
    """Few kernels suffice, yet some kernel sums the gradient of each operand."""
    with host.recording() as kernels:
        for check in filter(contains, everything(loss)):
            operands = check.operands()
            run(check.ours(), operands, check.gradients_of, check.upstream(operands)[0])
    # Sums in a pass of their own, or in the kernel that computes the value.
    apart = {i for x in kernels if x.kind == "broadcast_gradient" for i, wanted in enumerate(x.gradients) if wanted}
    beside = {i for x in kernels if isinstance(x, PointwiseKernel) for i, *_ in x.summed}
    assert apart | beside == set(range(len(loss.operands))) and beside
    settings = len({loss.choose(loss.values(x)) for x in loss.cases})
    # With means of rows, unreduced kernels become kernels of sums, one per layout.
    assert len(kernels) <= (13 + 2 * len(loss.operands)) * (1 + loss.mean_of_rows) + 8 * settings


@pytest.mark.parametrize(
    "change",
    [
        {"wanted": (True, False)},
        {"dtypes": ("float32", "bfloat16")},
        {"dim": (0,)},
        {"dtypes": ("float64",)},
        {"layout": "row"},
        {"layout": "outer", "reduction": "none"},
    ],
    ids=str,
)
def test_what_depends_on_no_formula_is_left_to_representatives(change: dict) -> None:
    check = Check(registry(Loss)["mse_loss"])
    assert contains(check) and not contains(replace(check, **change))

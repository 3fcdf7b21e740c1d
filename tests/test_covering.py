"""What a loss that is no representative meets on the host: enough of everything, with few kernels."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from conftest import check_of
from devices import GPU, HOST

from cupylosses.checks import FLOATING
from cupylosses.definition import REDUCTIONS, Loss, registry
from cupylosses.testing import host
from cupylosses.testing.check import EDGES, Check, run
from cupylosses.testing.covering import OWN, SHARED, contains
from cupylosses.testing.layouts import LAYOUTS
from cupylosses.testing.representatives import representatives

OTHERS = [x for x in registry().values() if x not in representatives()]


def everything(loss: Loss) -> Iterator[Check]:
    """The checks of a loss, each setting with each other."""
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


@pytest.mark.filterwarnings("ignore:.*broadcast")
def test_kernels_are_few(loss: Loss) -> None:
    """But each gradient is a sum somewhere."""
    with host.noting() as kernels:
        for check in filter(contains, everything(loss)):
            operands = check.operands()
            run(check.ours(), operands, check.gradients_of, check.upstream(operands)[0])
    sums = [x.gradients for x in kernels if x.kind == "broadcast_gradient"]
    assert {i for x in sums for i, wanted in enumerate(x) if wanted} == set(range(len(loss.operands)))
    settings = len({loss.choose(loss.values(x)) for x in loss.cases})
    # With means of rows, what is a kernel of elements elsewhere is one of sums, for each layout.
    assert len(kernels) <= (9 + 2 * len(loss.operands)) * (1 + loss.mean_of_rows) + 8 * settings


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
    check = Check(registry()["mse_loss"])
    assert contains(check) and not contains(replace(check, **change))


def test_checks_of_tests() -> None:
    loss = registry()["kl_div"]
    case = {"log_target": True}
    found = check_of({"loss": loss, "case": case, "dtype": "float16", "reductions": ("sum", "mean"), "device": "cpu"})
    assert found == Check(loss, case=case, dtypes=("float16",), reduction="sum")
    found = check_of({"loss": loss, "layout": "row", "dtypes": ("float32", "float16"), "gradients": False})
    assert found == Check(loss, layout="row", dtypes=("float32", "float16"), wanted=(False, False))


@pytest.mark.skipif(GPU or not HOST, reason="no kernels run on the host")
def test_tests_on_the_host_are_those_that_are_contained() -> None:
    """Of a loss that is no representative: nothing but what is marked, and of that each layout and dtype."""
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider", "--no-cov"]
    files = [str(Path(__file__).parent / f"test_{x}.py") for x in ("values", "gradients", "determinism", "one_pass")]
    done = subprocess.run([*command, *files], capture_output=True, text=True, cwd=Path(__file__).parent.parent)
    assert done.returncode == 0, done.stdout + done.stderr
    tests = defaultdict(set)
    for file, name, identity in re.findall(r"(\w+)\.py::(\w+)\[(.*)\]", done.stdout):
        words = re.split(r"[-(]", identity)
        for loss in {x.name for x in OTHERS} & set(words):
            if "host" in words:
                tests[loss, f"{file}::{name}"].add(identity)
    for loss in OTHERS:
        of_loss = {test: found for (name, test), found in tests.items() if name == loss.name}
        marked = {"parameters_and_dtypes", "edges_of_the_domain", "kinks_are_as_declared", "layouts", "torch_agrees"}
        assert {x.partition("::test_")[2] for x in of_loss} == {*marked, "nan_is_never_swallowed"}
        for file in ("test_values", "test_gradients"):
            for words, test in ((FLOATING, "parameters_and_dtypes"), (FLOATING, "edges_of_the_domain")):
                identities = " ".join(of_loss[f"{file}::test_{test}"])
                assert all(x in identities for x in words)
        assert all(any(x in y for y in of_loss["test_values::test_layouts"]) for x in LAYOUTS)
        assert not any(x in y for y in of_loss["test_gradients::test_layouts"] for x in {*OWN} - {"outer"})
        assert all(any(x in y for y in of_loss["test_gradients::test_layouts"]) for x in SHARED)

"""The budget of kernels: each kernel counts once, whatever the caches hold and however many processes request it."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import budget
import conftest
import pytest

from cupylosses.testing import counters as counters_module
from cupylosses.testing import host
from cupylosses.testing.counters import Counters
from cupylosses.testing.host import build


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "budget.json").write_text('{"host": 2, "NVRTC": 1}')
    monkeypatch.setattr(budget, "PATH", tmp_path / "budget.json")


def counted(host_kernels: str, nvrtc_kernels: str) -> Counters:
    return Counters(host_kernels=set(host_kernels), nvrtc_kernels=set(nvrtc_kernels))


@pytest.mark.skipif(sys.platform != "linux" or host.find_compiler() is None, reason="no C++ compiler on Linux")
def test_a_kernel_counts_whether_or_not_the_cache_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    source = 'extern "C" __global__ void counted(int* a) { *a = 1; }'
    build.of_source("counted", source)
    for again in (source, source, source.replace("1", "2")):
        build.of_source("counted", again)
    fresh = Counters()
    monkeypatch.setattr(build, "counters", fresh)
    for again in (source, source, source.replace("1", "2")):
        build.of_source("counted", again)
    assert (fresh.compiled, len(fresh.host_kernels)) == (0, 2)


def test_processes_that_ask_for_one_kernel_count_it_once() -> None:
    whole = counted("ab", "x")
    whole.add(json.loads(json.dumps(vars(counted("bc", "x")), default=list)))
    assert budget.kernels(whole) == {"host": 3, "NVRTC": 1}


@pytest.mark.usefixtures("small")
def test_what_is_over_budget_is_named() -> None:
    assert budget.excess(counted("ab", "x")) is None
    assert budget.excess(counted("abc", "x")).startswith("3 kernels for host, 2 are in the budget. Every kernel")
    assert "2 kernels for NVRTC" in budget.excess(counted("", "xy"))
    assert budget.report(counted("abc", "x")) == "kernels: 3 for host (budget 2), 1 for NVRTC (budget 1)"


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("option", "thorough", "kernels", "status"),
    [(True, False, "abc", 1), (True, False, "ab", 0), (True, True, "abc", 0), (False, False, "abc", 0)],
)
def test_a_run_over_budget_fails(
    monkeypatch: pytest.MonkeyPatch, option: bool, thorough: bool, kernels: str, status: int
) -> None:
    monkeypatch.setattr(conftest.grids, "thorough", lambda: thorough)
    monkeypatch.setattr(host, "counters", counted(kernels, "x"))
    config = SimpleNamespace(
        stash={conftest.SECONDS: Counter(), conftest.COUNTS: Counter()},
        getoption={"--budget": option, "numprocesses": None}.get,
    )
    session = SimpleNamespace(config=config, exitstatus=0)
    conftest.pytest_sessionfinish(session)
    assert session.exitstatus == status


def test_parts_of_the_time_add_up() -> None:
    found = Counters(compiling=3.0, nvrtc=2.0, launching=1.0)
    assert budget.times(found, python=10.0, others=7.0) == (
        "processor time: 17 s, of which compiling for the host 3, NVRTC 2, launches on the host 1, other programs 4, "
        "Python and torch 7"
    )
    assert counters_module.counters is host.counters

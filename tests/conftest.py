"""Fixtures and markers.

``kernels``  runs kernels: on the GPU or, without one, on the host; skipped if there is no C++ compiler either.
``gpu``      needs a CUDA device and CuPy; skipped without a device, but a device without CuPy is an error, not a skip.
``large``    needs tens of GiB of GPU memory: waits for that much, and is skipped on a GPU that never has it.

A test with the argument ``loss`` runs for every loss; if it runs kernels, for the representatives only. Further
markers:

``representatives``  runs for the representatives only, with or without kernels: it tests shared behaviour;
``in_turn``          runs kernels of one representative per setting, in turn;
``every_loss``       runs for every loss, with kernels: it tests formulas, or has few kernels per loss;
``plain``            compiles its kernels without the check for races, which takes a tenth of the time, and without
                     optimization: it tests formulas, options or host code, and tests of the engine check the same
                     kernels for other losses, dtypes or options;
``races``            checks for races nevertheless, in a module that is marked ``plain``;
``programs``         runs with ``--programs`` or ``--thorough`` only, as .ci/run does. Such a test waits for other
                     programs, such as processes that talk to each other or Inductor's compiler; or tests the tests,
                     with wrong losses, seeded defects, or kernels that execution on the host must reject; or tests
                     the scripts of benchmarks and sanitizers;
``thorough``         runs with ``--thorough`` only. That option also treats every loss like a representative, and makes
                     the grids of ``grids.py`` exhaustive.
"""

from __future__ import annotations

import gc
import importlib
import os
import subprocess
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import budget
import grids
import pytest
import torch
from devices import GPU, HOST, KERNELS, LARGE_BYTES, room
from hypothesis import HealthCheck, settings
from tools.representatives import representatives

import cupylosses
from cupylosses.definition.registry import registry
from cupylosses.engines.cache import plans
from cupylosses.engines.pointwise.definition import Loss
from cupylosses.testing import host
from cupylosses.testing.host.settings import settings as settings_of_the_host

REPRESENTATIVES = representatives()

#: Counters of a run, printed at its end.
COUNTS = pytest.StashKey[Counter[str]]()
#: Processor time of a run's processes ("python"), and of their child processes ("others").
SECONDS = pytest.StashKey[Counter[str]]()


# Equal examples in every run, and no time limit on busy machines.
settings.register_profile(
    "cupylosses", max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)
settings.load_profile("cupylosses")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--thorough", action="store_true", help="run exhaustive grids, with kernels of every loss")
    parser.addoption(
        "--programs", action="store_true", help="run tests of the tests, of scripts, and of other programs, too"
    )
    parser.addoption("--budget", action="store_true", help="fail with more kernels than tests/budget.json")


def pytest_configure(config: pytest.Config) -> None:
    gc.disable()  # until all tests are collected, since hardly any object created until then is garbage
    # Several processes run tests, and torch would start one thread per core in each: with two workers on two cores,
    # tests took two to six times as long.
    torch.set_num_threads(1)
    config.stash[COUNTS], config.stash[SECONDS] = Counter(), Counter()
    # Before any test module is imported, since parametrization uses it.
    grids.set_thorough(config.getoption("--thorough"))
    config.addinivalue_line("markers", "kernels: runs kernels, on the GPU or on the host")
    config.addinivalue_line("markers", "formulas: of kernels that differ in what they compute, not in where")
    config.addinivalue_line("markers", "plain: kernels without the check for races, which others of their engine have")
    config.addinivalue_line("markers", "races: kernels with the check for races, in a module marked plain")
    config.addinivalue_line("markers", "thorough: runs with --thorough only")
    config.addinivalue_line("markers", "programs: runs with --programs or --thorough only")
    config.addinivalue_line("markers", "addresses: runs again with AddressSanitizer in .ci/run, if it runs kernels")
    config.addinivalue_line("markers", "gpu: needs a CUDA device and CuPy")
    config.addinivalue_line("markers", "large: needs 26 GiB of free GPU memory")
    config.addinivalue_line("markers", "representatives: for the losses that stand for all, only")
    config.addinivalue_line("markers", "in_turn: kernels of one representative per setting, in turn")
    config.addinivalue_line("markers", "every_loss: kernels of every loss, not of the representatives alone")
    # torch warns about its own kl_div at every call.
    config.addinivalue_line("filterwarnings", "ignore:reduction. 'mean' divides the total loss:UserWarning")


def pytest_make_parametrize_id(val: Any) -> str | None:
    """Names losses, parameters and dtypes in test ids; pytest handles any other value."""
    return grids.identity(val)


def names_losses(item: pytest.Item) -> bool:
    """True for a test whose parametrization names its losses."""
    return any("loss" in x.args[0] for x in item.iter_markers("parametrize"))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrizes tests by all definitions: a new loss is tested without a new line."""
    if "loss" in metafunc.fixturenames and not names_losses(metafunc.definition):
        some = metafunc.definition.get_closest_marker("representatives")
        losses = REPRESENTATIVES if some else tuple(registry(Loss).values())
        metafunc.parametrize("loss", losses, ids=[x.name for x in losses], indirect=True)


def runs_kernels(item: pytest.Item) -> bool:
    """True for a test that runs kernels, on a GPU or on the host."""
    return bool(item.get_closest_marker("kernels") or item.get_closest_marker("gpu"))


def turn(item: pytest.Function) -> Loss:
    """Returns the representative whose turn it is in a setting of a test.

    With ``--thorough``, or if the test names its losses, this is the test's own loss, since a named one might never
    have its turn. Otherwise the name of the test determines the first one, so that selecting tests does not change
    which representative a test runs.
    """
    if grids.thorough() or names_losses(item):
        return item.callspec.params["loss"]
    settings = sum(i for name, i in item.callspec.indices.items() if name != "loss")
    return REPRESENTATIVES[(zlib.crc32(item.originalname.encode()) + settings) % len(REPRESENTATIVES)]


def stays(item: pytest.Item) -> bool:
    """False if this run leaves out the test.

    A run without the options ``--thorough`` and ``--programs`` leaves out tests with these markers, and losses that the
    representatives cover.
    """
    if item.get_closest_marker("thorough") and not grids.thorough():
        return False
    if item.get_closest_marker("programs") and not (grids.thorough() or item.config.getoption("--programs")):
        return False
    loss = item.callspec.params.get("loss") if hasattr(item, "callspec") else None
    if not isinstance(loss, Loss):  # a name, or a loss of another engine
        return True
    if loss in REPRESENTATIVES:
        return loss is turn(item) if item.get_closest_marker("in_turn") and runs_kernels(item) else True
    if item.get_closest_marker("representatives"):
        return False
    return grids.thorough() or item.get_closest_marker("every_loss") is not None or not runs_kernels(item)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    config.hook.pytest_deselected(items=[x for x in items if not stays(x)])
    items[:] = filter(stays, items)
    free = torch.cuda.mem_get_info()[0] if GPU else 0
    for item in items:
        if item.get_closest_marker("gpu") and not GPU:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
        elif item.get_closest_marker("kernels") and not (GPU or HOST):
            item.add_marker(pytest.mark.skip(reason="neither a CUDA device nor a C++ compiler on Linux"))
        elif item.get_closest_marker("large") and free < LARGE_BYTES:
            item.add_marker(pytest.mark.skip(reason=f"needs {LARGE_BYTES >> 30} GiB of free GPU memory"))


def pytest_collection_finish() -> None:
    # Tens of thousands of test objects live until the end; freezing them spares the collector from scanning them
    # repeatedly.
    gc.freeze()
    gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Adds the counts of a pytest-xdist worker to those of this process."""
    output = getattr(node, "workeroutput", {})
    host.counters.add(output.get("host", {}))
    node.config.stash[COUNTS].update(output.get("counts", {}))
    node.config.stash[SECONDS].update(output.get("seconds", {}))


def over_budget(config: pytest.Config) -> str | None:
    """Returns the reason to fail a run with ``--budget``, or None. The budget does not apply to ``--thorough``."""
    return budget.excess(host.counters) if config.getoption("--budget") and not grids.thorough() else None


def pytest_sessionfinish(session: pytest.Session) -> None:
    config = session.config
    config.stash[SECONDS]["python"] += budget.python_seconds()
    if not config.getoption(
        "numprocesses", None
    ):  # with xdist, child processes are workers, which report for themselves
        config.stash[SECONDS]["others"] += budget.other_seconds()
    if hasattr(config, "workeroutput"):
        counts, seconds = (dict(config.stash[x]) for x in (COUNTS, SECONDS))
        config.workeroutput.update(host=vars(host.counters), counts=counts, seconds=seconds)
    elif over_budget(config) and not session.exitstatus:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for what, count in config.stash[COUNTS].items():
        terminalreporter.write_line(f"{what}: {count}")
    terminalreporter.write_line(f"{host.counters}")
    seconds = config.stash[SECONDS]
    terminalreporter.write_line(budget.times(host.counters, seconds["python"], seconds["others"]))
    terminalreporter.write_line(budget.report(host.counters))
    if excess := over_budget(config):
        terminalreporter.write_line(f"over budget: {excess}", red=True)


@pytest.fixture
def counts(request: pytest.FixtureRequest) -> Counter[str]:
    """Counters printed at the end of the run."""
    return request.config.stash[COUNTS]


@pytest.fixture(autouse=True)
def _kernels_on_the_host(request: pytest.FixtureRequest) -> Iterator[None]:
    """Without a GPU, runs tests marked ``kernels`` on the host, with threads in one of several orders.

    With ``--thorough`` these tests also check for undefined behaviour, which comes from indices and addresses, so tests
    marked ``formulas`` are exempt. Without ``--thorough``, accesses are not checked in tests marked ``plain``, nor for
    element-wise losses other than the representatives, whose accesses are the same.
    """
    if GPU or not request.node.get_closest_marker("kernels"):
        yield
        return
    undefined = grids.thorough() and not request.node.get_closest_marker("formulas")
    chosen: dict[str, Any] = {"sanitize": ("thread", "undefined")} if undefined else {}
    loss = request.node.callspec.params.get("loss") if hasattr(request.node, "callspec") else None
    others = loss is not None and loss not in REPRESENTATIVES
    plain = request.node.get_closest_marker("plain") and not request.node.get_closest_marker("races")
    if not grids.thorough() and (others or plain):
        chosen = {"sanitize": ()}
    with host.execution(seed=zlib.crc32(request.node.nodeid.encode()) % 4, **chosen):
        yield


@pytest.fixture(autouse=True)
def _room(request: pytest.FixtureRequest) -> Iterator[None]:
    """Lets as many tests marked ``large`` run at once as the GPU has room for."""
    if not request.node.get_closest_marker("large"):
        yield
        return
    with room():
        yield


@pytest.fixture(
    params=[
        pytest.param("cpu", id="reference"),
        pytest.param(KERNELS, id="cuda" if GPU else "host", marks=pytest.mark.kernels),
    ]
)
def device(request: pytest.FixtureRequest) -> str:
    """Device of a test's tensors: the CPU for the reference formulas, and the device of the kernels."""
    return request.param


@pytest.fixture
def loss(request: pytest.FixtureRequest) -> Loss:
    """One of the definitions."""
    return request.param


@pytest.fixture
def cupy(request: pytest.FixtureRequest) -> Iterator[Any]:
    """CuPy, or its stand-in without a GPU."""
    if GPU:
        yield importlib.import_module("cupy")
        return
    from tools import cupy_stand_in as stand_in

    chosen = {"sanitize": settings_of_the_host().sanitize} if request.node.get_closest_marker("plain") else {}
    with stand_in.cupy(seed=zlib.crc32(request.node.nodeid.encode()) % 4, **chosen) as module:
        yield module


@pytest.fixture
def fresh_plans() -> Iterator[Callable[[], None]]:
    """Empties the cache of plans, now and at each call of the result; plans of the test are dropped after it."""
    plans.clear()
    yield plans.clear
    plans.clear()


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Kinds of kernels that losses of class indices have run, in order."""
    from cupylosses.engines import execute
    from cupylosses.engines.softmax.plan import SoftmaxPlan

    # Kernels compiled in advance do not run, so they must not be recorded.
    monkeypatch.setattr(execute, "begin", lambda *_: None)
    found: list[str] = []
    launcher = SoftmaxPlan.launcher

    def noted(plan: SoftmaxPlan, kind: str, *rest: Any) -> Any:
        found.append(kind)
        return launcher(plan, kind, *rest)

    monkeypatch.setattr(SoftmaxPlan, "launcher", noted)
    return found


@pytest.fixture
def kernel_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty kernel cache, on disk and in this process."""
    from cupylosses.jit import compiler

    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("CUPYLOSSES_DUMP_DIR", str(tmp_path / "dump"))
    monkeypatch.setattr(compiler, "_kernels", {})
    return tmp_path


#: Makes modules look as if they were not installed.
_HIDE = """
import sys
class _Hide:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {names!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, _Hide())
"""


@pytest.fixture
def python(tmp_path: Path) -> Callable[..., str]:
    """Runs a program in a new interpreter, and returns its output.

    The interpreter finds this cupylosses, but not the modules ``without``.
    """

    def run(program: str, without: tuple[str, ...] = (), **environment: str) -> str:
        where = str(Path(cupylosses.__file__).resolve().parent.parent)
        path = os.pathsep.join([where, os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        variables = {**os.environ, "PYTHONPATH": path, **environment}
        command = [sys.executable, "-c", _HIDE.format(names=without) + program]
        done = subprocess.run(command, env=variables, cwd=tmp_path, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    return run

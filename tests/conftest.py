"""Fixtures and markers.

``gpu``    needs a CUDA device and CuPy; skipped without a device, but a device without CuPy is an error, not a skip.
``large``  needs tens of GiB of GPU memory: runs by itself where there is that much, and is skipped elsewhere.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

import cupylosses
from cupylosses.definition import Loss, registry

GPU = torch.cuda.is_available()

#: Free memory that a test marked ``large`` may count on.
LARGE_BYTES = 24 << 30


#: What a run did that the number of its tests does not say, printed at its end.
COUNTS = pytest.StashKey[Counter[str]]()


# The same examples in every run, and no time limit on machines that are busy.
settings.register_profile(
    "cupylosses", max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)
settings.load_profile("cupylosses")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[COUNTS] = Counter()
    config.addinivalue_line("markers", "gpu: needs a CUDA device and CuPy")
    config.addinivalue_line("markers", "large: more than 2**31 elements; needs 24 GiB of free GPU memory")
    # torch says so of its own kl_div, wherever it is called.
    config.addinivalue_line("filterwarnings", "ignore:reduction. 'mean' divides the total loss:UserWarning")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    free = torch.cuda.mem_get_info()[0] if GPU else 0
    for item in items:
        if item.get_closest_marker("gpu") and not GPU:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
        elif item.get_closest_marker("large") and free < LARGE_BYTES:
            item.add_marker(pytest.mark.skip(reason=f"needs {LARGE_BYTES >> 30} GiB of free GPU memory"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for what, count in config.stash[COUNTS].items():
        terminalreporter.write_line(f"{what}: {count}")


@pytest.fixture
def counts(request: pytest.FixtureRequest) -> Counter[str]:
    """Counters that are printed at the end of the run."""
    return request.config.stash[COUNTS]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """Where a test runs; the second is skipped without a GPU."""
    return request.param


@pytest.fixture(params=list(registry().values()), ids=list(registry()))
def loss(request: pytest.FixtureRequest) -> Loss:
    """Every definition: a loss that is added is tested without a new line."""
    return request.param


@pytest.fixture
def fresh_plans(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Empties the caches of plans, now and (by calling it) later; they are whole again after the test."""

    def clear() -> None:
        for name in ("cupylosses.autograd", "cupylosses.cupy_arrays"):
            if name in sys.modules:
                monkeypatch.setattr(sys.modules[name], "_plans", {})

    clear()
    return clear


@pytest.fixture
def kernel_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A kernel cache that nothing has been compiled into, on disk and in this process."""
    from cupylosses import compiler

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
    """Runs a program in a new interpreter that finds this cupylosses but not the modules ``without``; its output."""

    def run(program: str, without: tuple[str, ...] = (), **environment: str) -> str:
        where = str(Path(cupylosses.__file__).resolve().parent.parent)
        path = os.pathsep.join([where, os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        variables = {**os.environ, "PYTHONPATH": path, **environment}
        command = [sys.executable, "-c", _HIDE.format(names=without) + program]
        done = subprocess.run(command, env=variables, cwd=tmp_path, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    return run

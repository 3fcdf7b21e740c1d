"""``scripts/sanitize.py`` runs the right programs under each tool, and parses their reports; no GPU is needed."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
from checkout import ROOT, load_script
from grids import REPRESENTATIVES, short_or_full
from tools import smoke
from tools.variants import variants

from cupylosses.definition.registry import registry
from cupylosses.engines.pointwise.codegen import KINDS, PRODUCT, PointwiseKernel
from cupylosses.engines.pointwise.definition import Loss
from cupylosses.jit import compiler
from cupylosses.testing import host
from cupylosses.testing.host.execution import HostDevice
from cupylosses.testing.host.launch import Launcher

pytestmark = pytest.mark.programs

NAMES = list(registry(Loss))

#: One representative; with ``--thorough``, all of them.
of_some = pytest.mark.parametrize("loss", short_or_full(REPRESENTATIVES[-1:], REPRESENTATIVES))
OURS = f"{NAMES[0]}_{next(iter(KINDS))}_f32"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("sanitize")


# ----------------------------------------------------------------------------------------------------------------------
# The program under the tools


def planned(loss: Loss) -> dict[PointwiseKernel, set[int]]:
    """Returns the kernels that the smoke test launches, each with its numbers of blocks."""
    found: dict[PointwiseKernel, set[int]] = {}

    class Noted(Launcher):
        def __init__(self, variant: PointwiseKernel, grid: int, *rest: Any) -> None:
            found.setdefault(variant, set()).add(grid)
            super().__init__(variant, grid, *rest)

        @classmethod
        def load(cls, variant: PointwiseKernel, shared: int = 0) -> tuple[Callable[..., Any], Any]:
            return (lambda *_: None), None

    with mock.patch.object(HostDevice, "launcher", Noted), host.execution():
        for check in smoke.selection(loss, "cpu"):
            if check.possible and check.shape != smoke.BATCHES:
                smoke.launch(check)
    return found


@of_some
@pytest.mark.filterwarnings("ignore:.*broadcast")
def test_smoke_test_reaches_every_entry_point_layout_and_dtype(loss: Loss) -> None:
    # Gathering works alike for any number of dimensions, so layouts are compared without that number.
    found = {replace(x, layout=x.layout.rstrip("1234")): g for x, g in planned(loss).items()}
    everything = [replace(x, layout=x.layout.rstrip("1234")) for x in variants(loss)]
    for field in ("kind", "layout", "flags", "vec_size", "result", "columns"):
        assert {getattr(x, field) for x in found} == {getattr(x, field) for x in everything}, field
    assert {(x.kind, x.layout) for x in found} == {(x.kind, x.layout) for x in everything}
    for kind in {x.kind for x in everything}:
        grids = set().union(*(g for x, g in found.items() if x.kind == kind))
        assert min(grids) == 1 and max(grids) > 1, kind


@of_some
@pytest.mark.filterwarnings("ignore:.*broadcast")
def test_smoke_test_runs(loss: Loss, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smoke, "BATCHES", (1025,))
    monkeypatch.setattr(smoke, "TILES", smoke.TILES[:1])
    seen = []
    launch = smoke.launch
    monkeypatch.setattr(smoke, "launch", lambda check: seen.append(check) or launch(check))
    assert smoke.run([loss], "cpu") == len(seen) > 100
    assert len({(x.id, x.shape, str(x.case)) for x in seen}) == len(seen)


def test_launches_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(compiler.Launcher, "launch", lambda self, *arguments: calls.append(arguments))
    count = smoke.count_launches()
    launcher = compiler.Launcher.__new__(compiler.Launcher)
    launcher.launch(0, 1)
    launcher.launch(0, 2)
    assert count == [2] and calls == [(0, 1), (0, 2)]


# ----------------------------------------------------------------------------------------------------------------------
# The command


@pytest.mark.parametrize("tool", ["memcheck", "initcheck"])
def test_command_watches_only_our_kernels(script: ModuleType, tool: str) -> None:
    command = script.command(Path("/x/compute-sanitizer"), tool, NAMES[:2], script.TRACKS_OTHERS)
    assert command[:3] == ["/x/compute-sanitizer", "--tool", tool]
    program = command.index(sys.executable)
    assert command[program:] == [sys.executable, "-m", "tools.smoke", "--loss", *NAMES[:2]]
    filters = [y.partition("=")[2] for x, y in pairwise(command) if x == "--kernel-name"]
    assert all(x.endswith(tuple(f"_{kind}_" for kind in (*KINDS, PRODUCT))) for x in filters)
    for loss in (registry(Loss)[x] for x in NAMES[:2]):
        assert all(v.entry.startswith(tuple(filters)) for v in variants(loss))
    others = [v for x in NAMES[2:] for v in variants(registry(Loss)[x], fast=True) if v.loss.name == x]
    assert not any(v.entry.startswith(tuple(filters)) for v in others)
    assert (script.TRACKS_OTHERS in command) == (tool == "initcheck")


def test_old_initcheck_has_to_watch_all_kernels(script: ModuleType) -> None:
    """Without watching torch's kernels, an old initcheck does not notice that torch wrote the operands."""
    assert "--kernel-name" not in script.command(Path("x"), "initcheck", NAMES, "--tool")
    assert "--kernel-name" in script.command(Path("x"), "memcheck", NAMES, "--tool")


def test_allocators_do_not_hide_what_lies_behind_an_array(script: ModuleType) -> None:
    found = script.environment({"A": "b", "PYTHONPATH": "c"})
    assert found["PYTORCH_NO_CUDA_MEMORY_CACHING"] == "1" and found["A"] == "b"
    assert found["PYTHONPATH"] == os.pathsep.join([str(ROOT), "c"])


def test_sanitizer_is_found(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CUDA_PATH", str(tmp_path / "toolkit"))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setattr(script, "INSTALLED_TOOLKIT", tmp_path / "none")
    monkeypatch.setattr(script.site, "getsitepackages", lambda: [str(tmp_path / "packages")])
    for place in ("packages/nvidia/cu13/bin", "toolkit/bin", "path"):
        (tmp_path / place).mkdir(parents=True)
        program = tmp_path / place / "compute-sanitizer"
        program.touch(mode=0o755)
        if place == "path":
            monkeypatch.setenv("PATH", str(tmp_path / place))
        assert script.find_sanitizer() == program


# ----------------------------------------------------------------------------------------------------------------------
# Reports of the tools

RAN = "smoke: 10 checks, 20 kernels, 30 launches\n"

INVALID = """\
========= COMPUTE-SANITIZER
========= Invalid __global__ read of size 4 bytes
=========     at {kernel}+0x110
=========     by thread (1,0,0) in block (0,0,0)
=========     Access to 0x7f3c7ec000fc is out of bounds
=========
"""


@pytest.mark.parametrize(
    ("output", "errors", "elsewhere"),
    [
        pytest.param("========= ERROR SUMMARY: 0 errors\n", 0, 0, id="clean"),
        pytest.param("========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n", 0, 0, id="no race"),
        pytest.param("========= RACECHECK SUMMARY: 1 hazard displayed (0 errors, 1 warning)\n", 1, 0, id="race"),
        pytest.param(INVALID.format(kernel=OURS) + "========= ERROR SUMMARY: 1 error\n", 1, 0, id="ours"),
        pytest.param(
            INVALID.format(kernel="void at::native::f<int>(int)") * 2
            + INVALID.format(kernel=OURS)
            + "========= ERROR SUMMARY: 3 errors\n",
            1,
            2,
            id="others",
        ),
        pytest.param(
            "========= Target application returned an error\n========= ERROR SUMMARY: 1 error\n", 1, 0, id="nobody's"
        ),
        pytest.param("========= LEAK SUMMARY: 8 bytes leaked in 1 allocations\n", None, 0, id="no summary"),
        pytest.param("========= Error: Device not supported\n", None, 0, id="no device"),
    ],
)
def test_reports_are_counted(script: ModuleType, output: str, errors: int | None, elsewhere: int) -> None:
    found = script.read(RAN + output, NAMES)
    assert (found.errors, found.elsewhere) == (errors, elsewhere)
    assert found.ran == "10 checks, 20 kernels, 30 launches"
    assert found.ok == (errors == 0)
    assert not script.read(output, NAMES).ok


@pytest.fixture
def fake(tmp_path: Path) -> Path:
    """A sanitizer that fails one tool and reports that it ran."""
    program = tmp_path / "compute-sanitizer"
    program.write_text(
        f"#!{sys.executable}\n"
        "import os, sys\n"
        "if '--help' in sys.argv or '--version' in sys.argv: print('Version 1'); sys.exit()\n"
        "tool = sys.argv[sys.argv.index('--tool') + 1]\n"
        "assert os.environ['PYTORCH_NO_CUDA_MEMORY_CACHING'] == '1'\n"
        f"print({RAN!r}, end='')\n"
        "name, what = ('RACECHECK', 'hazards displayed') if tool == 'racecheck' else ('ERROR', 'errors')\n"
        "print(f\"========= {name} SUMMARY: {int(tool == 'racecheck')} {what}\")\n"
        "sys.exit(7 if tool == 'synccheck' else 0)\n"
    )
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return program


@pytest.mark.skipif(sys.platform == "win32", reason="the fake is a script with a #! line")
@pytest.mark.parametrize(
    ("tools", "status"),
    [(["memcheck", "initcheck"], 0), (["racecheck"], 1), (["synccheck"], 1), (["memcheck", "racecheck"], 1)],
)
def test_script_fails_with_any_tool(
    script: ModuleType, fake: Path, tools: list[str], status: int, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    logs = fake.parent / "logs"
    monkeypatch.setattr(sys, "argv", ["sanitize.py", "--sanitizer", str(fake), "--logs", str(logs), "--tool", *tools])
    assert script.main() == status
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("Version 1")
    assert [x.split()[0] for x in lines[1:] if not x.startswith(" ")] == tools
    assert {x.stem for x in logs.iterdir()} == set(tools)


def test_script_says_where_to_get_the_sanitizer(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "find_sanitizer", lambda: None)
    monkeypatch.setattr(sys, "argv", ["sanitize.py"])
    with pytest.raises(SystemExit, match="pip install nvidia-cuda-sanitizer-api"):
        script.main()

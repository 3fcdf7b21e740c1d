"""``scripts/run.py`` picks packages by the driver, installs once, and reports problems."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from checkout import ROOT, load_script


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("run")


@pytest.mark.parametrize(
    ("wanted", "driver", "extra"),
    [
        ("auto", 0, None),
        ("auto", 10, None),
        ("auto", 11, "cuda11x"),
        ("auto", 12, "cuda12x"),
        ("auto", 13, "cuda13x"),
        ("auto", 14, "cuda13x"),
        ("none", 13, None),
        ("cuda11x", 13, "cuda11x"),
        ("cuda13x", 0, "cuda13x"),
    ],
)
def test_cupy_fits_the_driver(script: ModuleType, wanted: str, driver: int, extra: str | None) -> None:
    assert script.choose_cupy(wanted, driver) == extra


def test_every_extra_exists(script: ModuleType) -> None:
    named = [*script.CUPY.values(), *(x for extras, _ in script.COMMANDS.values() for x in extras)]
    assert set(script.requirements([])) == {"numpy", "array-api-compat"}
    for extra in named:
        assert len(script.requirements([extra])) > 2, extra


def test_commands_run_what_exists(script: ModuleType) -> None:
    for _, program in script.COMMANDS.values():
        assert program == ["-m", "pytest"] or (ROOT / program[0]).is_file()


@pytest.mark.parametrize("passed", [[], ["--thorough"], ["-k", "name"]])
def test_the_whole_suite_runs_in_several_processes(
    script: ModuleType, passed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = []
    monkeypatch.setattr(script.subprocess, "call", lambda command, **_: ran.append(command) or 5)
    monkeypatch.setattr(script, "driver_cuda", lambda: 0)
    monkeypatch.setattr(script, "check_requirements", lambda extras: None)
    monkeypatch.setattr(sys, "argv", ["run.py", "--here", "test", *passed])
    assert script.main() == 5
    program = [sys.executable, "-m", "pytest", *passed]
    given = ran[0][len(program) :]
    assert ran[0][: len(program)] == program
    assert ("--numprocesses=auto" in given) == (passed != ["-k", "name"])
    assert ("--cov" in given) == (passed == ["--thorough"])


def test_constraints_name_a_torch_that_fits_the_driver(script: ModuleType) -> None:
    tested, older = script.constraint_text(13).splitlines(), script.constraint_text(12).splitlines()
    changed = [(a, b) for a, b in zip(tested, older, strict=True) if a != b]
    assert changed == [("torch==2.13.0", script.TORCH[12])]


def test_a_driver_for_cuda_11_is_told_what_to_do(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "driver_cuda", lambda: 11)
    monkeypatch.setattr(script.sys, "argv", ["run.py", "compare"])
    with pytest.raises(SystemExit, match=r"torch for CUDA 11 .*cuda11x.* with --here"):
        script.main()


def test_installs_once(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[list[str]] = []

    def record(command: list[str], **_: object) -> int:
        calls.append(command)
        if "venv" in command:
            python = tmp_path / "env" / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
            python.parent.mkdir(parents=True)
            python.touch()
        return 0

    monkeypatch.setattr(script.subprocess, "call", record)
    monkeypatch.setattr(script, "pip", lambda python: ["pip"])
    python = script.prepare(tmp_path / "env", ["torch"], 0)
    assert python.is_file()
    assert ["venv" in calls[0], calls[1][0], calls[1][-1]] == [True, "pip", ".[torch]"]
    assert "torch==2.13.0" in (tmp_path / "env" / "constraints.txt").read_text()
    script.prepare(tmp_path / "env", ["torch"], 0)
    assert len(calls) == 2
    script.prepare(tmp_path / "env", ["torch", "test"], 0)
    assert len(calls) == 3
    assert calls[2][-1] == ".[test,torch]"
    script.prepare(tmp_path / "env", ["torch"], 0)
    assert len(calls) == 3
    script.prepare(tmp_path / "env", ["torch"], 13)
    assert calls[3][-1] == ".[torch]"


def test_a_step_is_one_line_and_what_it_prints_is_kept(
    script: ModuleType, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "install.log"
    program = "import sys; print('to stdout'); print('to stderr', file=sys.stderr); sys.exit(int(sys.argv[1]))"
    script.step("doing something", [sys.executable, "-c", program, "0"], log)
    assert re.fullmatch(r"run\.py: doing something \.\.\. \d+ s\n", capfd.readouterr().out)
    with pytest.raises(SystemExit, match=rf"failed with status 3; its output is in {re.escape(str(log))}\."):
        script.step("doing more", [sys.executable, "-c", program, "3"], log)
    out, error = capfd.readouterr()
    assert re.fullmatch(r"run\.py: doing more \.\.\. failed after \d+ s\n", out) and not error
    kept = log.read_text()
    assert kept.count("to stdout") == kept.count("to stderr") == 4 and kept.count("$ ") == 2


def test_an_old_python_is_told_so(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script.sys, "version_info", (3, 9, 18))
    with pytest.raises(SystemExit, match=r"needs Python 3\.10 or newer, and .* is 3\.9\."):
        script.main()


def test_here_names_what_is_missing(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    script.check_requirements(["torch", "test"])
    monkeypatch.setattr(script, "requirements", lambda extras: ["numpy", "no-such-distribution"])
    with pytest.raises(SystemExit, match=r"lacks no-such-distribution\. Leave out --here"):
        script.check_requirements(["torch"])


@pytest.mark.programs
def test_here_passes_arguments_and_the_exit_code_on() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "run.py"), "--here", "--cupy", "none", "test", "--version"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0
    assert "pytest" in done.stdout
    done = subprocess.run([*command[:-1], "--no-such-option"], capture_output=True, text=True)
    assert done.returncode == 4

"""``scripts/compare.py`` as a user runs it: from a checkout, on a machine without a GPU."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from cupylosses import checks
from cupylosses.definition import registry
from cupylosses.row_definition import row_registry
from cupylosses.testing import host, row_check
from cupylosses.testing.representatives import representatives

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"

pytestmark = pytest.mark.skipif(not (SCRIPTS / "compare.py").is_file(), reason="needs the checkout")


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    """The script as a module, for what it does before it changes anything in the process but its environment."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUPYLOSSES_HOST_SANITIZE", "thread")
        patch.syspath_prepend(SCRIPTS)
        yield importlib.import_module("compare")
        del sys.modules["compare"]


def exit_code(script: ModuleType, arguments: tuple[str, ...]) -> object:
    """What the script exits with before it begins."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as stop:
        patch.setattr(sys, "argv", ["compare.py", *arguments])
        script.main()
    return stop.value.code


FEW = ("--loss", "mse_loss", "--dtype", "float32", "--device", "cpu")


def compare(*arguments: str, before: str = "") -> subprocess.CompletedProcess[str]:
    """Runs the script in a new interpreter, which first executes ``before``."""
    program = (
        f"import runpy, sys\nsys.path.insert(0, {str(SCRIPTS)!r})\nsys.path.insert(0, {str(SCRIPTS.parent)!r})\n"
        f"sys.argv = {['compare.py', *arguments]!r}\n{before}\n"
        f"runpy.run_path({str(SCRIPTS / 'compare.py')!r}, run_name='__main__')\n"
    )
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, env=environment)


def test_everything_is_right_and_written_down(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    done = compare(*FEW, "--json", str(file))
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert "validating the CPU path" in lines[0]
    content = json.loads(file.read_text())
    rows = content["rows"]
    assert content["summary"] == {"rows": len(rows), "failed": 0} and content["environment"]["torch"]
    assert any(f"{len(rows)} rows in" in line and "all ok" in line for line in lines)
    assert {r["section"] for r in rows} == {"losses", "same bits", "numpy arrays"}
    assert {"contiguous", "edges", "row", "eight_d"} <= {r["layout"] for r in rows}
    assert {"all", "input", "target", "none"} == {r["gradients"] for r in rows}
    measured = [r for r in rows if r["section"] == "losses"]
    assert all(r["value_ulp"] is not None and r["torch_value_ulp"] is not None for r in measured)
    # One line each, with the columns below each other.
    printed = [line for line in lines if line.startswith("mse_loss") and line.endswith("ok")]
    assert len(printed) == len(rows) and len({len(line) for line in printed}) == 1


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("right(*a, **k) * (1 + 1e-4)", "value:"),
        ("right(a[0], a[1].detach(), **k)", "gradient"),
        ("right(*a, **k) + next(noise)", "other bits again"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
    ],
)
def test_a_wrong_loss_fails_the_run(wrong: str, words: str) -> None:
    spoil = (
        "import itertools, cupylosses.functional as F\nnoise = (1e-5 * n for n in itertools.count())\n"
        f"right = F.mse_loss\nF.mse_loss = lambda *a, **k: {wrong}\nF.mse_loss.loss = right.loss\n"
    )
    done = compare(*FEW, "--reduction", "mean", before=spoil)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "FAIL" in done.stdout and words in done.stdout and "failed" in done.stdout.splitlines()[-1]


#: Of a loss of rows, one case of each kind.
OF_ROWS = ("--loss", "cross_entropy", "--dtype", "float32", "--reduction", "mean", "--device", "cpu")


def test_losses_of_rows_are_right_and_beside_torch(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    chosen = ("--loss", "nll_loss", "distillation_loss", "--dtype", "float32", "bfloat16", "--device", "cpu")
    done = compare(*chosen, "--json", str(file))
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(file.read_text())["rows"]
    assert {(r["section"], r["loss"], r["dtype"]) for r in rows} >= {
        ("rows of logits", loss, dtype)
        for loss in ("nll_loss", "distillation_loss")
        for dtype in ("float32", "bfloat16")
    }
    assert {r["layout"] for r in rows} == {"gather", "lanes", "block", "cluster", "long", "columns", "long_columns"}
    assert {r["reduction"] for r in rows} == {"none", "mean", "sum", "batchmean"}
    measured = [r for r in rows if r["section"] == "rows of logits"]
    assert all(r["gradient_ulp"] is not None for r in measured)
    assert all((r["torch_value_ulp"] is None) == ("mask" in r["case"]) for r in measured)
    assert {r["gradients"] for r in measured} == {"input", "all"}


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("right(**k) * (1 + 1e-4)", "value:"),
        ("right(**k) + 1e-3 * (k['input'] - k['input'].detach()).sum()", "gradient of input:"),
        ("right(**k) + next(noise)", "other bits again"),
        ("right(**{**k, 'ignore_index': 2})", "value:"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
    ],
)
def test_a_wrong_loss_of_rows_fails_the_run(wrong: str, words: str) -> None:
    spoil = (
        "import itertools, cupylosses.functional as F\nnoise = (1e-5 * n for n in itertools.count())\n"
        f"right = F.cross_entropy\nF.cross_entropy = lambda **k: {wrong}\n"
    )
    done = compare(*OF_ROWS, before=spoil)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "FAIL" in done.stdout and words in done.stdout and "failed" in done.stdout.splitlines()[-1]


# ----------------------------------------------------------------------------------------------------------------------
# Kernels on the CPU

needs_compiler = pytest.mark.skipif(
    sys.platform != "linux" or host.find_compiler() is None, reason="no C++ compiler on Linux"
)

#: A few kernels: over everything, and over rows.
KERNELS = ("--loss", "mse_loss", "--dtype", "float32", "--reduction", "mean", "--layout", "contiguous", "row")

NO_GPU = "import os, torch; torch.cuda.is_available = lambda: False"
NO_COMPILER = "os.environ['PATH'] = ''; os.environ.pop('CXX', None)"


@needs_compiler
@pytest.mark.parametrize(
    ("arguments", "before", "first"),
    [
        (("--device", "host"), "", "Asked for the host: executing the kernels on the CPU, compiled by "),
        ((), NO_GPU, "No GPU found, but a C++ compiler: executing the kernels on the CPU, compiled by "),
    ],
)
def test_kernels_run_on_the_cpu(arguments: tuple[str, ...], before: str, first: str, tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    done = compare(*KERNELS, *arguments, "--json", str(file), before=before)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith(first) and "All rows." in done.stdout
    # Forward, with each choice of gradients; their check; and for rows a sum.
    count = re.fullmatch(r"host execution: (\d+) launches of (\d+) kernels; .*", lines[-2])
    assert count and int(count[1]) >= 16 and int(count[2]) >= 8
    content = json.loads(file.read_text())
    assert content["environment"]["compiler"]
    assert {r["layout"] for r in content["rows"]} == {"contiguous", "row"}
    assert all(r["value_ulp"] is not None and r["ms"] is None for r in content["rows"])


@needs_compiler
def test_same_bits_whatever_the_order_of_threads() -> None:
    done = compare("--loss", "mse_loss", "--dtype", "float32", "--reduction", "mean", "--device", "host")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "same bits: 2 rows" in done.stdout and "numpy arrays: 3 rows" in done.stdout


def test_without_gpu_and_compiler_the_formulas_run() -> None:
    done = compare(*KERNELS, before=f"{NO_GPU}; {NO_COMPILER}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("No GPU found, and there is no C++ compiler: validating the CPU path")
    assert "host execution" not in done.stdout


def test_large_shapes_take_the_formulas(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(host, "obstacle", lambda: None)
    found = {n: script.find_place("auto", (n, 1 << 10), None) for n in (1 << 10, 1 << 11)}
    assert [place for place, _ in found.values()] == ["host", "cpu"] and "the shape is large" in found[1 << 11][1]
    assert script.find_place("host", (1 << 11, 1 << 10), None)[0] == "host"


@needs_compiler
@pytest.mark.parametrize(
    ("right", "wrong", "words"),
    [
        ("int offset = 16;", "int offset = 8;", "value:"),
        ("/ 32] = x;\n  __syncthreads();", "/ 32] = x;", "KernelFault:"),
        ("warp_sum(double x) {", "warp_sum(double x) { what", "HostCompileError:"),
    ],
)
def test_a_wrong_kernel_fails_the_run(right: str, wrong: str, words: str) -> None:
    spoil = (
        "from cupylosses import codegen, row_term_codegen\nsource = codegen.source\n"
        f"codegen.source = lambda variant: source(variant).replace({right!r}, {wrong!r})\n"
    )
    done = compare(*KERNELS[:-1], "--device", "host", before=spoil)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "FAIL" in done.stdout and words in done.stdout and re.search(r"rows in .* failed$", done.stdout, re.M)


@pytest.mark.filterwarnings("ignore:.* is broadcast against:UserWarning")
def test_the_short_run_on_the_host(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every loss, dtype and reduction, with a part of the kernels; of the representatives each with each."""
    matrix = importlib.import_module("comparing.matrix")
    ahead = importlib.import_module("comparing.ahead")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def planned(*arguments: str) -> list:
        monkeypatch.setattr(sys, "argv", ["compare.py", *arguments])
        sections = script.planned(script.parse()[0], "host")
        return [(check, x.calls) for x in sections if x.calls for check in x.checks]

    other = next(x for x in registry().values() if x not in representatives())
    calls = planned()
    for loss, share in ((representatives()[0], 2), (other, 4)):
        few, every = [x for x in calls if x[0].loss is loss], planned("--device", "host", "--loss", loss.name)
        assert {x.id for x, _ in few} < {x.id for x, _ in every}
        assert 0 < share * len(ahead.needed(few)) < len(ahead.needed(every))

    some = [check for check, _ in calls]
    for loss in registry().values():
        of_loss = [x for x in some if x.loss is loss]
        assert {repr(x.case) for x in of_loss} == {repr(x) for x in loss.cases}
        assert {x.reduction for x in of_loss} == set(loss.reductions)
        assert {(x,) for x in checks.FLOATING} <= {x.dtypes for x in of_loss}
    for loss in representatives():
        of_loss = [x for x in some if x.loss is loss]
        for dtypes in matrix.DTYPES:
            assert {x.reduction for x in of_loss if x.dtypes == dtypes} == set(loss.reductions)
        for reduction in matrix.WANTED_REDUCTIONS:
            assert {x.gradients_of for x in of_loss if x.reduction == reduction} == set(matrix.combinations(loss))
    # Whoever asks for something gets all of it.
    every = planned("--device", "host")
    assert len(planned("--dtype", "float64")) == sum(x.dtypes == ("float64",) for x, _ in every)


@needs_compiler
def test_a_wrong_kernel_of_rows_fails_the_run() -> None:
    spoil = (
        "from cupylosses import codegen, row_term_codegen\nsource = codegen.source\n"
        "codegen.source = lambda variant: source(variant).replace('weighted(weight, nll)', '(nll)')\n"
    )
    chosen = ("--loss", "nll_loss", "--dtype", "float32", "--reduction", "mean", "--layout", "gather")
    done = compare(*chosen, "--device", "host", before=spoil)
    assert done.returncode == 1, done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("nll_loss")]
    assert {line.split()[1]: line.split()[-1] for line in lines[:2]} == {"defaults": "ok", "weight": "FAIL"}


def test_the_short_run_of_rows_on_the_host(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every loss and kind of target; of cross entropy each layout, dtype, reduction and option."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def planned(*arguments: str) -> list:
        monkeypatch.setattr(sys, "argv", ["compare.py", *arguments])
        sections = script.planned(script.parse()[0], "host")
        return [check for x in sections if x.title == script.OF_ROWS for check in x.checks]

    few, every = planned(), planned("--device", "host")
    assert {x.id for x in few} < {x.id for x in every} and len(every) == len({x.id for x in every})
    for loss in row_registry().values():
        of_loss = [x for x in few if x.loss is loss]
        assert {x.kind for x in of_loss} == set(loss.targets)
        assert {"mean", "none"} <= {x.reduction for x in of_loss} and {("bfloat16",)} <= {x.dtypes for x in of_loss}
        named = {name for x in of_loss for name in x.case}
        assert {name for case in loss.cases for name in case} <= named
        assert loss.weights is None or loss.weights in named
        assert loss.scale is None or {"softcap", "temperature"} & named
    first = [x for x in few if x.loss.name == "cross_entropy" and x.kind == "indices"]
    assert {x.layout for x in first} == {"lanes", "block", "cluster", "long", "short", "columns", "long_columns"}
    assert {x.reduction for x in first} == {"none", "mean", "sum", "batchmean"}
    assert {x.dtypes for x in first} == {(x,) for x in checks.FLOATING}
    every_layout = {x.layout for x in every if x.loss.name in ("cross_entropy", "nll_loss")}
    assert every_layout == set(row_check.ROW_LAYOUTS)
    assert {x.dtypes for x in every if x.kind == "logits"} == {
        *((x,) for x in checks.FLOATING),
        ("bfloat16", "float32"),
    }
    assert {x.id for x in planned("--layout", "cluster")} <= {x.id for x in planned("--full")}
    assert {x.layout for x in planned("--layout", "cluster", "row")} == {"cluster"}
    assert planned("--layout", "row") == []
    assert {x.layout for x in planned("--shape", "9x16")} == {row_check.GIVEN}


def test_layouts_of_rows_are_what_the_engine_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels that are launched say so."""
    loss = row_registry()["cross_entropy"]
    for layout, (shape, dim) in row_check.layouts(loss, "indices", ("float32",), row_check.chip_of("cpu")).items():
        check = row_check.RowCheck(loss, "indices", layout=layout)
        assert check.laid == (shape, dim)
        with host.noting() as kernels:
            check.ours()(*check.operands())
        found = {(x.layout.replace(" ", "_"), x.cluster > 1) for x in kernels if x.kind == "value"}
        kind = "block" if layout == "cluster" else layout
        assert found == {(kind, layout in ("cluster", "long"))}


# ----------------------------------------------------------------------------------------------------------------------
# The command line


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--loss", "no_such_loss"), "no_such_loss"),
        (("--dtype", "float8"), "'float8' is none of float16"),
        (("--shape", "12by13"), "'12by13' is no shape such as 4096x4096"),
        (("--device", "cpu", "--compile"), "--compile times torch.compile on a GPU"),
        pytest.param(("--device", "host", "--compile"), "--compile times torch.compile on a GPU", marks=needs_compiler),
        (("--device", "cpu", "--loss", "kl_div", "--dtype", "float32+int64"), "nothing to do"),
        (("--device", "cpu", "--loss", "nll_loss", "--layout", "cluster"), "nothing to do"),
        (("--device", "cpu", "--loss", "nll_loss", "--accuracy"), "--accuracy has no losses of rows"),
    ],
)
def test_bad_arguments_are_named(
    arguments: tuple[str, ...], words: str, script: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code(script, arguments) == 2
    assert words in capsys.readouterr().err


def test_a_gpu_that_is_not_there(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert exit_code(script, ("--device", "cuda")) == 2
    error = capsys.readouterr().err
    assert "finds no GPU" in error and "--device cpu" in error


def test_a_compiler_that_is_not_there(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(host, "obstacle", lambda: "there is no C++ compiler")
    assert exit_code(script, ("--device", "host")) == 2
    error = capsys.readouterr().err
    assert "there is no C++ compiler; install g++" in error and "--device cpu" in error


def test_what_is_missing_is_named() -> None:
    hide = "sys.modules['rich'] = None"
    done = compare(*FEW, before=hide)
    assert done.returncode == 2 and "compare.py needs rich" in done.stderr and "pip install" in done.stderr


def test_selections(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    chosen = ("--loss", "huber_loss", "kl_div", "--layout", "row", "edges", "--dtype", "float16", "float32+int64")
    done = compare(*chosen, "--device", "cpu", "--shape", "9x16", "--json", str(file))
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(file.read_text())["rows"]
    assert {(r["loss"], r["dtype"]) for r in rows} == {
        ("huber_loss", "float16"), ("huber_loss", "float32+int64"), ("kl_div", "float16"),
    }  # fmt: skip
    assert {r["layout"] for r in rows} == {"row", "edges"} and len({r["case"] for r in rows}) > 3

"""``scripts/compare.py`` without a GPU: its lines and tables, the defects it notices, and the files it writes."""

from __future__ import annotations

import csv
import importlib.util
import itertools
import json
import re
import runpy
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial, partialmethod
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from gpu_stand_ins import PEAK, stand_ins
from rich.console import Console
from tools import cupy_stand_in as stand_in
from tools.representatives import representatives

import cupylosses.functional as F
from cupylosses import checks
from cupylosses.definition.registry import registry
from cupylosses.engines.linear_softmax.definition import LinearSoftmaxLoss
from cupylosses.engines.pointwise.codegen import PointwiseKernel
from cupylosses.engines.pointwise.definition import Loss
from cupylosses.engines.softmax.codegen import SoftmaxKernel
from cupylosses.engines.softmax.definition import SoftmaxLoss
from cupylosses.testing import host
from cupylosses.testing.check import EDGES, Check
from cupylosses.testing.linear_softmax import check as linear_check
from cupylosses.testing.softmax import check as softmax_check

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"

pytestmark = pytest.mark.skipif(not (SCRIPTS / "compare.py").is_file(), reason="needs the checkout")

needs_compiler = pytest.mark.skipif(
    sys.platform != "linux" or host.find_compiler() is None, reason="no C++ compiler on Linux"
)


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(SCRIPTS)
        yield importlib.import_module("compare")
        del sys.modules["compare"]


class Done(NamedTuple):
    """Exit status and printed lines of a run."""

    status: int
    lines: list[str]

    @property
    def output(self) -> str:
        return "\n".join(self.lines)


Compare = Callable[..., Done]


@pytest.fixture
def compare(script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Compare:
    """Runs the script in this process, as if without a GPU."""

    def run(*arguments: str) -> Done:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.setattr(sys, "argv", ["compare.py", *arguments])
        status = script.main()
        return Done(status, capsys.readouterr().out.splitlines())

    return run


def line_of(done: Done, loss: str) -> list[str]:
    """The cells of a loss's line."""
    found = [x.split() for x in done.lines if x.split()[:1] == [loss]]
    assert len(found) == 1, done.output
    return found[0]


ON_CPU = ("--device", "cpu")


# ----------------------------------------------------------------------------------------------------------------------
# A line for each loss


def test_a_line_for_each_loss_and_one_for_the_verdict(compare: Compare, tmp_path: Path) -> None:
    files = {name: tmp_path / f"lines.{name}" for name in ("csv", "json", "plot")}
    losses = ("huber_loss", "nll_loss", "distillation_loss")
    named = [x for name, path in files.items() for x in (f"--{name}", str(path))]
    done = compare("--loss", *losses, *ON_CPU, *named)
    assert done.status == 0, done.output
    assert "validating the CPU path" in done.lines[0]
    for loss in losses:
        name, *numbers, verdict = line_of(done, loss)
        assert (name, verdict, len(numbers)) == (loss, "ok", 4) and all(0 <= float(x) < 1e3 for x in numbers)
    content = json.loads(files["json"].read_text())
    rows = content["rows"]
    assert re.fullmatch(rf"3 losses, {len(rows)} checks in \d+ s: all ok", done.lines[-1])
    assert {r["section"] for r in rows if r["loss"] == "nll_loss"} == {
        "losses of rows of logits",
        "same bits",
        "numpy arrays",
    }
    # The worst error of all checks except edges, whose results are only right or wrong.
    usual = [r for r in rows if r["loss"] == "huber_loss" and r["layout"] != EDGES]
    for written in (content["losses"], list(csv.DictReader(files["csv"].open()))):
        huber = next(x for x in written if x["loss"] == "huber_loss")
        for field in ("value", "torch_value", "gradient", "torch_gradient"):
            worst = max(r[f"{field}_error"] for r in usual if r[f"{field}_error"] is not None)
            assert float(huber[f"{field}_ulp"]) == pytest.approx(worst, rel=1e-5)
    assert files["plot"].read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_the_picture_has_errors_and_speeds(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib import pyplot

    files, overview = (importlib.import_module(f"comparing.{x}") for x in ("files", "overview"))
    seen: list[Any] = []
    monkeypatch.setattr(pyplot, "close", seen.append)
    times = {"ms": 1.0, "torch_ms": 2.5, "copy_fraction": 0.9}
    errors = {"value_ulp": 0.0, "torch_value_ulp": float("inf"), "gradient_ulp": 2.0}
    lines = [overview.Line("a", "x", 3, 0, **errors, **times), overview.Line("b", "x", 3, 1, **errors)]
    for drawn, panels in ((lines, 3), (lines[1:], 2)):
        files.draw(tmp_path / "picture.png", drawn, {"gpu": "GPU A"})
        assert len(seen[-1].axes) == panels
    value, gradient, speed = seen[0].axes
    assert [x.get_text() for x in value.get_yticklabels()] == ["a", "b"]
    points = {x.get_label(): x.get_offsets().tolist() for x in value.collections}
    assert points == {"torch": [[files.MOST, 0], [files.MOST, 1]], "cupylosses": [[files.LEAST, 0], [files.LEAST, 1]]}
    assert [x.get_label() for x in gradient.collections] == ["cupylosses"]
    assert [x.get_width() for x in speed.patches] == [2.5, 0.0]


NOISE = itertools.count()
#: By function: a wrong result computed from the right one, and words of the reported problem.
WRONG: dict[str, list[tuple[Callable[..., Any], str]]] = {
    "mse_loss": [
        (lambda right, **k: right(**k) * (1 + 1e-4), "value:"),
        (lambda right, **k: right(**{**k, "target": k["target"].detach()}), "gradient"),
        (lambda right, **k: right(**k) + 1e-5 * next(NOISE), "other bits again"),
        (lambda right, **k: 1 / 0, "ZeroDivisionError: division by zero"),
    ],
    "cross_entropy": [
        (lambda right, **k: right(**k) + 1e-3 * (k["input"] - k["input"].detach()).sum(), "gradient of input:"),
        (lambda right, **k: right(**{**k, "ignore_index": 2}), "value:"),
    ],
}


@pytest.mark.programs
@pytest.mark.parametrize(
    ("loss", "wrong", "words"),
    [pytest.param(loss, *x, id=f"{loss}-{x[1]}") for loss, found in WRONG.items() for x in found],
)
@pytest.mark.parametrize("more", [(), ("--full",)], ids=["lines", "rows"])
def test_a_wrong_loss_fails_the_run(
    compare: Compare, loss: str, wrong: Callable[..., Any], words: str, more: tuple[str, ...], monkeypatch: Any
) -> None:
    right = getattr(F, loss)
    spoiled = partial(wrong, right)
    spoiled.loss, spoiled.prepare = right.loss, right.prepare  # type: ignore[attr-defined]
    monkeypatch.setattr(F, loss, spoiled)
    narrowed = ("--dtype", "float32", "--reduction", "mean") if more else ()
    done = compare("--loss", loss, *ON_CPU, *more, *narrowed)
    assert done.status == 1
    assert "FAIL" in done.output and words in done.output
    if not more:
        assert line_of(done, loss)[-1] == "FAIL"
        assert re.fullmatch(rf"1 losses, \d+ checks in \d+ s: \d+ checks failed, of {loss}", done.lines[-1])


def test_arrays_of_losses_of_rows_are_compared(compare: Compare, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the NumPy rows notice errors that affect NumPy arrays alone."""
    from cupylosses.backends import numpy as numpy_backend

    right = numpy_backend.evaluate
    monkeypatch.setattr(numpy_backend, "evaluate", lambda call: right(call) * (1 + 1e-4))
    done = compare("--loss", "nll_loss", *ON_CPU)
    assert done.status == 1 and "(numpy arrays): value:" in done.output
    assert "1 checks failed" in done.lines[-1]


@needs_compiler
@pytest.mark.parametrize(("factor", "wrong"), [(1.0, []), (2.0, ["value", "value without gradients"])])
def test_cupy_arrays_are_compared(
    script: ModuleType, factor: float, wrong: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of CuPy arrays, with the host's kernels and a stand-in for CuPy."""
    overview, bits = (importlib.import_module(f"comparing.{x}") for x in ("overview", "bits"))
    (task,) = [x for x in overview.tasks(registry(SoftmaxLoss)["nll_loss"], "cpu") if x.measure is bits.arrays]
    with stand_in.cupy() as cupy, host.execution():
        from cupylosses.backends import cupy as cupy_backend

        right = cupy_backend.evaluate_with_gradients

        def spoiled(*given: Any) -> Any:
            value, gradients = right(*given)
            value *= factor
            return value, gradients

        monkeypatch.setattr(cupy_backend, "evaluate_with_gradients", spoiled)
        back: Callable[[Any], torch.Tensor] = lambda x: torch.from_numpy(numpy.asarray(x))  # noqa: E731
        crossing = cupy.from_dlpack, back, lambda x: x.data.ptr
        monkeypatch.setattr(bits, "library", lambda device: bits.Library("cupy", cupy.ndarray, *crossing, exact=True))
        assert list(task.measure(task.check).problems) == [f"{x}: other bits than from torch tensors" for x in wrong]


def test_without_a_compiler_the_formulas_run(compare: Compare, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "obstacle", lambda: "there is no C++ compiler")
    done = compare("--loss", "l1_loss")
    assert done.status == 0, done.output
    assert done.lines[0].startswith("No GPU found, and there is no C++ compiler: validating the CPU path")


def test_large_shapes_take_the_formulas(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(host, "obstacle", lambda: None)
    found = {n: script.find_place("auto", (n, 1 << 10), None) for n in (1 << 10, 1 << 11)}
    assert [place for place, _ in found.values()] == ["host", "cpu"] and "the shape is large" in found[1 << 11][1]
    assert script.find_place("host", (1 << 11, 1 << 10), None)[0] == "host"


# ----------------------------------------------------------------------------------------------------------------------
# Kernels


@needs_compiler
def test_kernels_run_on_the_cpu(compare: Compare) -> None:
    before = host.counters.launches
    done = compare("--loss", "mse_loss")
    assert done.status == 0, done.output
    assert done.lines[0].startswith("No GPU found, but a C++ compiler: executing the kernels on the CPU")
    # Forward and backward of each of nine checks.
    assert host.counters.launches - before >= 18


@pytest.mark.programs
@needs_compiler
@pytest.mark.parametrize(
    ("loss", "right", "wrong", "words"),
    [
        ("mse_loss", "int offset = 16;", "int offset = 8;", "value:"),
        ("mse_loss", "/ 32] = x;\n  __syncthreads();", "/ 32] = x;", "KernelFault:"),
        ("mse_loss", "warp_sum(T x) {", "warp_sum(T x) { what", "HostCompileError:"),
        ("nll_loss", "weighted(weight, nll)", "(nll)", "nll_loss, weight, float32"),
    ],
)
def test_a_wrong_kernel_fails_the_run(
    compare: Compare, loss: str, right: str, wrong: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variant in (PointwiseKernel, SoftmaxKernel):
        spoiled = partial(lambda x, whole: whole(x).replace(right, wrong), whole=variant.source)
        monkeypatch.setattr(variant, "source", partialmethod(spoiled))
    monkeypatch.setattr("comparing.overview.tasks", one_task)
    done = compare("--loss", loss, "--device", "host")
    assert done.status == 1
    assert line_of(done, loss)[-1] == "FAIL" and words in done.output


def one_task(loss: Any, device: str, seed: int = 0) -> list[Any]:
    """The check of a mean, with class weights if the loss has any."""
    overview = importlib.import_module("comparing.overview")
    matrix = importlib.import_module("comparing.matrix")
    found = matrix.Matrix(loss, matrix.Selection(device, seed)).line()
    case = {"weight": True} if loss.name in registry(SoftmaxLoss) else {}
    check = next(x for x in found if x.case == case and x.reduction == "mean")
    return [overview.Task(check, "x", partial(overview.accuracy_and_time, time=False), overview.rehearse)]


@pytest.mark.filterwarnings("ignore:.* is broadcast against:UserWarning")
def test_the_lines_stand_for_everything_that_makes_a_kernel(script: ModuleType) -> None:
    """The lines cover every promised set of parameters, dtype, reduction and layout, with few kernels."""
    overview, bits = (importlib.import_module(f"comparing.{x}") for x in ("overview", "bits"))
    kernels: dict[Any, None] = {}
    for loss in registry(Loss).values():
        tasks = overview.tasks(loss, "cpu")
        checks = [x.check for x in tasks]
        assert {repr(x.case) for x in checks if x.layout == EDGES} == {repr(x) for x in loss.cases}
        assert {"none", "mean", "sum", "batchmean"} <= {x.reduction for x in checks}
        rows = {"row"} if loss in representatives() else set()
        assert {"contiguous", "transposed", EDGES} | rows == {x.layout for x in checks}
        assert {("float32",), ("bfloat16",)} == {x.dtypes for x in checks}
        assert {x for c in checks for x, w in enumerate(c.gradients_of) if w} == set(range(len(loss.operands)))
        assert {"element-wise losses", bits.REPEATED, "numpy arrays"} == {x.section for x in tasks}
        kernels |= kernels_of(tasks)
    elementwise = len(kernels)
    for row_loss in registry(SoftmaxLoss).values():
        tasks = overview.tasks(row_loss, "cpu")
        checks = [x.check for x in tasks]
        assert {x.kind for x in checks} == set(row_loss.targets)
        assert {"none", "mean", "sum", "batchmean"} == {x.reduction for x in checks}
        assert {("float32",), ("bfloat16",)} == {x.dtypes for x in checks}
        assert {name for case in row_loss.cases for name in case} <= {name for x in checks for name in x.case}
        assert {"losses of rows of logits", bits.REPEATED, "numpy arrays"} == {x.section for x in tasks}
        if row_loss.name == "cross_entropy":
            assert {x.layout for x in checks} == set(softmax_check.ROW_LAYOUTS) - {
                "label_only_rows", "label_only_tiles", "label_only_few", "label_only_columns",
            }  # fmt: skip
        kernels |= kernels_of(tasks)
    # A kernel takes 0.15 to 0.5 s of a core, and the whole run should take a minute.
    assert elementwise <= 9 * len(registry(Loss))
    assert len(kernels) - elementwise <= 24 * len(registry(SoftmaxLoss))


def test_the_lines_of_losses_of_a_layer(script: ModuleType) -> None:
    """The line covers every promised argument, dtype, reduction and layout, with few kernels."""
    overview, bits = (importlib.import_module(f"comparing.{x}") for x in ("overview", "bits"))
    for loss in registry(LinearSoftmaxLoss).values():
        tasks = overview.tasks(loss, "cpu")
        checks = [x.check for x in tasks]
        assert {x.kind for x in checks} == set(loss.of_logits.targets)
        assert {"none", "mean", "sum", "batchmean"} == {x.reduction for x in checks}
        assert {("float32",), ("bfloat16",)} == {x.dtypes for x in checks}
        named = {name for x in checks for name in x.case}
        assert {name for case in loss.cases for name in case} | {"linear_bias", "weight", "logits_dtype"} <= named
        assert {x.layout for x in checks} == set(linear_check.LAYOUTS)
        assert {"losses of a linear layer", bits.REPEATED, "numpy arrays"} == {x.section for x in tasks}
        assert len(kernels_of(tasks)) <= 60


@needs_compiler
def test_losses_of_a_layer_are_compared(compare: Compare) -> None:
    # `.ci/run` runs the script without these arguments.
    done = compare("--loss", "linear_cross_entropy", "--dtype", "bfloat16", "--reduction", "mean", "--layout", "packed")
    assert done.status == 0, done.output
    assert "rows of logits of a linear layer" in done.output and "packed" in done.output
    done = compare("--loss", "linear_cross_entropy", "--shape", "6x9", "--dtype", "bfloat16", *ON_CPU)
    assert done.status == 0 and "given" in done.output, done.output


def kernels_of(tasks: list[Any]) -> dict[Any, None]:
    """Kernels that a run of tasks compiles."""
    with host.recording() as found:
        for x in tasks:
            if x.calls:
                x.calls(x.check)
    return found


def test_kernels_compile_in_the_order_of_their_use_and_once(script: ModuleType) -> None:
    background = importlib.import_module("comparing.background")
    begun, gate = [], threading.Event()

    def compile(kernel: Any) -> None:
        begun.append(kernel)
        gate.wait(10)

    advanced: list[None] = []
    with background.BackgroundCompiler(compile, False, lambda: advanced.append(None)) as compiler:
        tensors = [torch.ones(4, 8, requires_grad=True), torch.zeros(4, 8)]
        compiler.announce("mean", lambda: [F.mse_loss(*tensors).backward(), F.mse_loss(*tensors, reduction="none")])
        kernels = list(compiler.kernels)
        # The first brings its companion, the check of the gradient.
        assert [x.kind for x in kernels] == ["value_and_gradient", "elements"]
        compiler.announce("again", lambda: F.mse_loss(*tensors).backward())
        compiler.announce("wrong", lambda: 1 / 0)
        assert list(compiler.kernels) == kernels and not advanced
        compiler.wait("never announced")
        compiler.wait("wrong")
        gate.set()
        compiler.wait("again")
        assert set(begun) == set(kernels) and len(begun) == len(kernels)
    assert len(advanced) == len(kernels)


def test_workers_compile_in_processes_of_their_own(script: ModuleType, tmp_path: Path) -> None:
    """Each worker compiles its share, callers wait for it, and its death is noticed; a program stands in for NVRTC."""
    background = importlib.import_module("comparing.background")
    program = """if True:
        import os, pickle, sys
        while True:
            text = pickle.load(sys.stdin.buffer)
            if text == "die": sys.exit(1)
            with open(f"{sys.argv[1]}/{os.getpid()}", "a") as file: print(text, file=file)
            print("done", flush=True)
    """
    texts = [f"source {i}" for i in range(6)]
    both = threading.Barrier(2)

    def compile(part: list[str]) -> list[bool]:
        both.wait(10)
        return [workers.compile(x) for x in part]

    with background.Workers([sys.executable, "-c", program, str(tmp_path)]) as workers, ThreadPoolExecutor(2) as pool:
        assert list(pool.map(compile, (texts[:3], texts[3:]))) == [[True] * 3] * 2
        assert sorted(x.read_text() for x in tmp_path.iterdir()) == [
            "".join(f"{x}\n" for x in p) for p in (texts[:3], texts[3:])
        ]
        assert workers.compile("die") is False and workers.compile("later") is False


def test_torch_never_gets_a_label_that_it_does_not_know(script: ModuleType) -> None:
    """On the CPU torch raises, and `run_torch` continues without it. On a GPU it asserts, which ends all work there."""
    matrix, checking = (importlib.import_module(x) for x in ("comparing.matrix", "cupylosses.testing.check"))
    ways = 0
    for loss in registry().values():
        for check in [] if isinstance(loss, Loss) else matrix.Matrix(loss, matrix.Selection()).line():
            operands = check.operands()
            for way in check.torch():
                ways += 1
                try:
                    checking.run(way, operands, check.gradients_of, check.upstream(operands)[0])
                except (RuntimeError, ValueError, IndexError) as error:
                    assert "not implemented for" in str(error), check.id
    assert ways > 100


# ----------------------------------------------------------------------------------------------------------------------
# Times


def test_a_gpu_adds_times_and_memory(script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Everything that a GPU adds, with stand-ins for its clock and memory."""
    stand_ins(monkeypatch)
    speed, overview = (importlib.import_module(f"comparing.{x}") for x in ("speed", "overview"))
    for loss in (registry(Loss)["charbonnier_loss"], registry(SoftmaxLoss)["cross_entropy"]):
        workload = speed.workload(loss, 1 << 20)
        with host.recording() as kernels:
            speed.calls(workload)
        assert "value_and_gradient" in {x.kind for x in kernels}
        fields, problems = speed.measure(workload)
        assert not problems
        assert min(fields["ms"], fields["torch_ms"], fields["copy_fraction"]) > 0
        # The stand-in's peak, without the value and the gradient.
        size = workload.operand_bytes[0] + getattr(torch, workload.dtype).itemsize
        assert fields["extra_bytes"] == fields["torch_extra_bytes"] == PEAK - size
        line = overview.Line(loss.name, "x", 1, 0, 0.5, None, 0.5, None, **fields)
        console = Console(width=160, record=True, file=(tmp_path / "table").open("w"))
        console.print(overview.table([line], "x", speed.described(workload)))
        text = console.export_text()
        assert all(x in text for x in ("speed-up", "of a copy", "MiB", overview.number(line.speed_up)))


def test_a_gpu_adds_times_of_layers_but_no_share_of_a_copy(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_ins(monkeypatch)
    speed = importlib.import_module("comparing.speed")
    workload = speed.workload(registry(LinearSoftmaxLoss)["linear_cross_entropy"], 1 << 12)
    assert workload.shape[0] * workload.shape[1] * 2 <= 1 << 12
    with host.recording() as kernels:
        speed.calls(workload)
    assert {"value", "value_and_gradient"} <= {x.kind for x in kernels}
    fields, problems = speed.measure(workload)
    assert not problems and min(fields["ms"], fields["torch_ms"]) > 0 and fields["copy_fraction"] is None
    # The stand-in's peak, without the value and both gradients.
    assert fields["extra_bytes"] == PEAK - sum(workload.operand_bytes[:2]) - 2


WHERE = {"gpu": "GPU A", "driver": "1", "torch": "2", "cuda": "13.0", "cupy": "14"}


@pytest.fixture
def as_if_on_a_gpu(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A GPU's run on the CPU, with stand-ins for clock, memory and compiler; returns the kernels to compile."""
    stand_ins(monkeypatch)
    overview, background = (importlib.import_module(f"comparing.{x}") for x in ("overview", "background"))
    tasks, compiled = overview.tasks, []
    monkeypatch.setattr(script, "find_place", lambda *_: ("cuda", "Found a GPU"))
    monkeypatch.setattr(script.report, "environment", lambda place: WHERE)
    monkeypatch.setattr(script, "free_memory", lambda: 1 << 20)
    monkeypatch.setattr(overview, "tasks", lambda loss, device, seed: tasks(loss, "cpu", seed))
    monkeypatch.setattr(background, "workers", lambda: None)
    monkeypatch.setattr(background, "for_gpu", lambda kernel, workers: compiled.append(kernel))
    # Records kernels of CPU tensors instead of CUDA tensors.
    monkeypatch.setattr(host, "recording", lambda gpu, recording=host.recording: recording())
    return compiled


def test_a_run_on_a_gpu(
    as_if_on_a_gpu: list[Any], compare: Compare, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "lines.csv"
    monkeypatch.setattr(sys.modules["compare"], "output", lambda: Console(width=60, soft_wrap=True))
    done = compare("--loss", "mse_loss", "nll_loss", "--csv", str(file))
    assert done.status == 0, done.output
    assert done.lines[0] == "GPU A, driver 1, torch 2 for CUDA 13.0, CuPy 14"
    assert sum("times of" in x and "speed-up" in y for x, y in itertools.pairwise(done.lines)) == 2, done.output
    for line in csv.DictReader(file.open()):
        assert all(float(line[x]) > 0 for x in ("ms", "torch_ms", "speed_up", "copy_fraction")), line
        assert int(line["extra_bytes"]) < PEAK
    # However narrow the terminal, no cell is cut.
    assert "…" not in done.output and len(line_of(done, "mse_loss")) == 12
    # Losses of rows have kernels of their own for the large workload.
    assert len(as_if_on_a_gpu) == len(set(as_if_on_a_gpu)) > 6 + 8


def test_a_gpu_that_stops_ends_the_run(
    as_if_on_a_gpu: list[Any], compare: Compare, monkeypatch: pytest.MonkeyPatch
) -> None:
    speed = importlib.import_module("comparing.speed")

    def die(workload: Any) -> None:
        raise RuntimeError("the GPU does not outlive it")

    monkeypatch.setattr(speed, "measure", die)
    done = compare("--loss", "l1_loss")
    assert done.status == 1 and "stopped: the GPU does not outlive it" in done.lines
    assert line_of(done, "l1_loss")[-1] == "ok"
    assert re.fullmatch(r"1 losses, \d+ checks in \d+ s: stopped before the end", done.lines[-1])


def test_a_gpu_that_stops_at_the_first_check_ends_the_run(
    as_if_on_a_gpu: list[Any], script: ModuleType, compare: Compare, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The run prints only the first of the many lines of CUDA's message; there is no row to sum up."""

    def die(*_: Any) -> None:
        raise RuntimeError("CUDA error: device-side assert triggered\nCompile with `TORCH_USE_CUDA_DSA`.")

    monkeypatch.setattr(script, "guarded", die)
    done = compare("--loss", "l1_loss", "--csv", str(tmp_path / "lines.csv"))
    assert done.status == 1 and "stopped: CUDA error: device-side assert triggered" in done.lines
    assert "DSA" not in done.output and done.lines[-1].endswith("s: stopped before the end")


@pytest.mark.parametrize("dead", [False, True])
def test_a_process_leaves_quietly(script: ModuleType, monkeypatch: pytest.MonkeyPatch, dead: bool) -> None:
    """On a GPU that has stopped, the process exits without unloading kernels."""

    class Left(Exception):
        pass

    def synchronize() -> None:
        if dead:
            raise RuntimeError("device-side assert triggered")

    def leave(status: int) -> None:
        raise Left

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(script.os, "_exit", leave)
    with pytest.raises(Left if dead else SystemExit):
        script.leave(1)


def test_a_loss_that_cannot_be_timed_fails(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_ins(monkeypatch)
    speed = importlib.import_module("comparing.speed")
    monkeypatch.setattr(F, "mse_loss", lambda **_: 1 / 0)
    fields, problems = speed.measure(speed.workload(registry(Loss)["mse_loss"], 1 << 20))
    assert problems == ["ours: failed: ZeroDivisionError: division by zero"] and fields["ms"] is None
    assert fields["torch_ms"] > 0


@pytest.mark.parametrize(("free", "exponent", "rows"), [(80 << 30, 26, 8192), (4 << 30, 25, 2048), (1, 1, 1)])
def test_workloads_fit_into_memory(script: ModuleType, free: int, exponent: int, rows: int) -> None:
    speed = importlib.import_module("comparing.speed")
    assert speed.workload(registry(Loss)["mse_loss"], free).elements == 1 << exponent
    assert speed.workload(registry(SoftmaxLoss)["nll_loss"], free).shape == (rows, 32000)


# ----------------------------------------------------------------------------------------------------------------------
# A line for each check


def test_every_row_is_right_and_written_down(compare: Compare, tmp_path: Path) -> None:
    files = {name: tmp_path / f"rows.{name}" for name in ("json", "csv")}
    named = [x for name, path in files.items() for x in (f"--{name}", str(path))]
    losses = ("mse_loss", "nll_loss", "distillation_loss")
    done = compare("--loss", *losses, "--dtype", "float32", "bfloat16", *ON_CPU, *named)
    assert done.status == 0, done.output
    content = json.loads(files["json"].read_text())
    rows = content["rows"]
    assert content["summary"] == {"rows": len(rows), "failed": 0} and content["environment"]["torch"]
    assert [r["layout"] for r in csv.DictReader(files["csv"].open())] == [r["layout"] for r in rows]
    assert any(f"{len(rows)} rows in" in line and "all ok" in line for line in done.lines)

    own = [r for r in rows if r["loss"] == "mse_loss"]
    assert {r["section"] for r in own} == {"losses", "same bits", "numpy arrays"}
    assert {"contiguous", "edges", "row", "eight_d"} <= {r["layout"] for r in own}
    assert {"all", "input", "target", "none"} == {r["gradients"] for r in own}
    measured = [r for r in own if r["section"] == "losses"]
    assert all(r["value_ulp"] is not None and r["torch_value_ulp"] is not None for r in measured)
    # One line per check, with aligned columns.
    printed = [line for line in done.lines if line.startswith("mse_loss") and line.endswith("ok")]
    assert len(printed) == len(own) and len({len(line) for line in printed}) == 1

    assert {(r["section"], r["loss"], r["dtype"]) for r in rows} >= {
        *(("rows of logits", loss, dtype) for loss in losses[1:] for dtype in ("float32", "bfloat16")),
        *(("numpy arrays", loss, "float32") for loss in losses),
    }
    measured = [r for r in rows if r["section"] == "rows of logits"]
    assert {r["layout"] for r in measured} == {
        "label_only_rows",
        "label_only_tiles",
        "label_only_few",
        "label_only_columns",
        "subwarp",
        "block",
        "cluster",
        "columns",
        "windowed",
        "thread_per_row",
        "packed_rows",
        "copied",
    }
    assert {r["reduction"] for r in measured} == {"none", "mean", "sum", "batchmean"}
    assert all(r["gradient_ulp"] is not None for r in measured)
    assert all((r["torch_value_ulp"] is None) == ("mask" in r["case"]) for r in measured)
    assert {r["gradients"] for r in measured} == {"input", "all"}


def test_selections(compare: Compare, tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    chosen = ("--loss", "huber_loss", "kl_div", "--layout", "row", "edges", "--dtype", "float16", "float32+int64")
    done = compare(*chosen, *ON_CPU, "--shape", "9x16", "--json", str(file))
    assert done.status == 0, done.output
    rows = json.loads(file.read_text())["rows"]
    assert {(r["loss"], r["dtype"]) for r in rows} == {
        ("huber_loss", "float16"), ("huber_loss", "float32+int64"), ("kl_div", "float16"),
    }  # fmt: skip
    assert {r["layout"] for r in rows} == {"row", "edges"} and len({r["case"] for r in rows}) > 3


@needs_compiler
def test_rows_of_kernels(compare: Compare, tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    chosen = ("--loss", "mse_loss", "--dtype", "float32", "--reduction", "mean", "--layout", "contiguous", "row")
    done = compare(*chosen, "--device", "host", "--json", str(file))
    assert done.status == 0, done.output
    assert (
        done.lines[0].startswith("Asked for the host: executing the kernels on the CPU") and "All rows." in done.lines
    )
    assert re.fullmatch(r"host execution: \d+ launches of \d+ kernels; .*", done.lines[-2])
    content = json.loads(file.read_text())
    assert content["environment"]["compiler"]
    assert {r["layout"] for r in content["rows"]} == {"contiguous", "row"}
    assert all(r["value_ulp"] is not None and r["ms"] is None for r in content["rows"])


class Planned:
    """The checks planned for a command line, with the functions that make their calls."""

    def __init__(self, script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
        self._script, self._patch = script, monkeypatch
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def sections(self, *arguments: str) -> list[Any]:
        self._patch.setattr(sys, "argv", ["compare.py", *arguments])
        return self._script.planned(self._script.parse()[0], "host")


@pytest.mark.filterwarnings("ignore:.* is broadcast against:UserWarning")
def test_the_short_table_on_the_host(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table has every loss, dtype and reduction with part of the kernels; of representatives, every combination."""
    matrix, pointwise = (importlib.import_module(f"comparing.{x}") for x in ("matrix", "pointwise"))
    sections = Planned(script, monkeypatch).sections

    def planned(*arguments: str) -> list[Any]:
        return [(check, x.calls) for x in sections(*arguments) if x.calls for check in x.checks]

    def needed(calls: list[Any]) -> int:
        with host.recording() as kernels:
            for check, call in calls:
                call(check)
        return len(kernels)

    other = next(x for x in registry(Loss).values() if x not in representatives())
    calls = planned("--full")
    for loss, share in ((representatives()[0], 2), (other, 4)):
        few, every = [x for x in calls if x[0].loss is loss], planned("--device", "host", "--loss", loss.name)
        assert {x.id for x, _ in few} < {x.id for x, _ in every}
        assert 0 < share * needed(few) < needed(every)

    some = [check for check, _ in calls]
    for loss in registry(Loss).values():
        of_loss = [x for x in some if x.loss is loss]
        assert {repr(x.case) for x in of_loss} == {repr(x) for x in loss.cases}
        assert {x.reduction for x in of_loss} == set(loss.reductions)
        assert {(x,) for x in checks.FLOATING} <= {x.dtypes for x in of_loss}
    for loss in representatives():
        of_loss = [x for x in some if x.loss is loss]
        for dtypes in matrix.DTYPES:
            assert {x.reduction for x in of_loss if x.dtypes == dtypes} == set(loss.reductions)
        for reduction in pointwise.WANTED_REDUCTIONS:
            assert {x.gradients_of for x in of_loss if x.reduction == reduction} == set(
                itertools.product((True, False), repeat=len(loss.operands))
            )
    # Explicit requests get all rows.
    every = planned("--device", "host", "--full")
    assert len(planned("--dtype", "float64")) == sum(x.dtypes == ("float64",) for x, _ in every)


def test_the_short_table_of_rows_on_the_host(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table has every loss and kind of target; for cross entropy each layout, dtype, reduction and option."""
    sections = Planned(script, monkeypatch).sections

    def planned(*arguments: str) -> list[Any]:
        return [check for x in sections(*arguments) if x.title == "rows of logits" for check in x.checks]

    few, every = planned("--full"), planned("--device", "host", "--full")
    assert {x.id for x in few} < {x.id for x in every} and len(every) == len({x.id for x in every})
    for loss in registry(SoftmaxLoss).values():
        of_loss = [x for x in few if x.loss is loss]
        assert {x.kind for x in of_loss} == set(loss.targets)
        assert {"mean", "none"} <= {x.reduction for x in of_loss} and {("bfloat16",)} <= {x.dtypes for x in of_loss}
        named = {name for x in of_loss for name in x.case}
        assert {name for case in loss.cases for name in case} <= named
        assert loss.weights is None or loss.weights in named
        assert loss.scale is None or {"softcap", "temperature"} & named
    first = [x for x in few if x.loss.name == "cross_entropy" and x.kind == "indices"]
    assert {x.layout for x in first} == {
        "subwarp",
        "block",
        "cluster",
        "two_pass",
        "thread_per_row_packed",
        "thread_per_row",
        "packed_rows",
        "columns",
        "interleaved_rows",
        "copied",
    }
    assert {x.reduction for x in first} == {"none", "mean", "sum", "batchmean"}
    assert {x.dtypes for x in first} == {(x,) for x in checks.FLOATING}
    every_layout = {x.layout for x in every if x.loss.name in ("cross_entropy", "nll_loss")}
    assert every_layout == set(softmax_check.ROW_LAYOUTS)
    assert {x.dtypes for x in every if x.kind == "logits"} == {
        *((x,) for x in checks.FLOATING),
        ("bfloat16", "float32"),
    }
    assert {x.id for x in planned("--layout", "cluster")} <= {x.id for x in planned("--everything")}
    assert {x.layout for x in planned("--layout", "cluster", "row")} == {"cluster"}
    assert planned("--layout", "row") == []
    assert {x.layout for x in planned("--shape", "9x16")} == {softmax_check.GIVEN}


def test_layouts_of_rows_are_what_the_engine_takes() -> None:
    """The launched kernels prove the layout."""
    loss = registry(SoftmaxLoss)["cross_entropy"]
    layouts = softmax_check.layouts(loss, "indices", ("float32",), softmax_check.chip_of("cpu"))
    for layout, (shape, dim) in layouts.items():
        check = Check(loss, layout=layout)
        assert check.laid == (shape, dim)
        with host.recording() as kernels:
            check.ours()(*check.operands())
        found = {(x.layout, x.cluster > 1) for x in kernels if x.kind == "value"}
        kind = {"cluster": "block", "copied": "subwarp"}.get(layout, layout)
        assert found == {(kind, layout in ("cluster", "two_pass"))}


# ----------------------------------------------------------------------------------------------------------------------
# The command line


def exit_code(script: ModuleType, arguments: tuple[str, ...]) -> object:
    """Exit status of a run that stops before it begins."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as stop:
        patch.setattr(sys, "argv", ["compare.py", *arguments])
        script.main()
    return stop.value.code


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--loss", "no_such_loss"), "no_such_loss"),
        (("--dtype", "float8"), "'float8' is none of float16"),
        (("--shape", "12by13"), "'12by13' is no shape such as 4096x4096"),
        (("--accuracy", "--plot", "picture.png", *ON_CPU), "--accuracy has no --plot"),
        (("--csv", "no-such-folder/lines.csv"), "'no-such-folder/lines.csv' is a folder, or in none that exists"),
        (("--device", "cpu", "--compile"), "--compile times torch.compile on a GPU"),
        pytest.param(("--device", "host", "--compile"), "--compile times torch.compile on a GPU", marks=needs_compiler),
        (("--device", "cpu", "--loss", "kl_div", "--dtype", "float32+int64"), "nothing to do"),
        (("--device", "cpu", "--loss", "nll_loss", "--layout", "cluster"), "nothing to do"),
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


def test_a_picture_needs_matplotlib(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The script says so before the run, not after it."""
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find(name))
    assert exit_code(script, (*ON_CPU, "--plot", "picture.png")) == 2
    assert "--plot needs matplotlib" in capsys.readouterr().err


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "rich.console", None)
    monkeypatch.syspath_prepend(SCRIPTS)
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(SCRIPTS / "compare.py"), run_name="__main__")
    error = capsys.readouterr().err
    assert stop.value.code == 2 and "compare.py needs rich" in error and "pip install" in error

"""``scripts/benchmark.py`` without a GPU: statistics, traffic, rows, tables, figures, the picture and the command line.

The last part performs a whole run on the CPU, with stand-ins for GPU-only features (events, memory counters, graphs):
the times mean nothing, but the real code makes every row, table and file.
"""

from __future__ import annotations

import importlib
import json
import struct
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

import gpu_stand_ins

import benchmark
from benchmarking import (
    figures,
    host_parts,
    linear,
    linear_softmax,
    plot,
    pointwise,
    providers,
    records,
    report,
    sequence,
    softmax,
    startup,
    throughput,
    timing,
    workloads,
)
from benchmarking.figures import BARS, HINGE_COLUMNS, KL_PROBABILITIES, MODES, Bar, verdict
from benchmarking.pointwise import sweep
from benchmarking.softmax import SoftmaxWorkload
from benchmarking.workloads import Inputs, Workload
from cupylosses.backends.torch import device as torch_device
from cupylosses.backends.torch import evaluation
from cupylosses.checks import FLOATING
from cupylosses.definition.registry import registry
from cupylosses.engines import execute
from cupylosses.engines.pointwise.definition import Loss
from cupylosses.engines.sequence.definition import SequenceLoss
from cupylosses.engines.softmax.definition import SoftmaxLoss
from cupylosses.jit import compiler
from cupylosses.testing.softmax.truth import NAMES, truth

pytestmark = pytest.mark.programs

MSE = registry(Loss)["mse_loss"]
WHERE = dict.fromkeys(records.ENVIRONMENT, "x") | {"gpu": "GPU A", "date": "2025-01-01T00:00:00+00:00"}


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu_stand_ins.on_cpu(monkeypatch)


# ----------------------------------------------------------------------------------------------------------------------
# Time


def test_a_summary_is_the_median_between_its_quantiles() -> None:
    found = timing.summarize([5.0, 1.0, 2.0, 3.0, 4.0, 100.0])
    assert (found.median, found.low, found.high, found.repetitions) == (3.5, 2.0, 5.0, 6)


@pytest.mark.parametrize(
    ("seconds", "expected"), [(1e-6, timing.MOST), (1.0, timing.FEWEST), (0.002, 20), (0.0, timing.MOST)]
)
def test_repetitions_fill_the_target(seconds: float, expected: int) -> None:
    assert timing.repetitions(0.04, seconds) == expected


def test_a_budget_lets_begin_until_it_is_spent_and_remembers_the_rest() -> None:
    now = iter([0.0, 3.0, 10.0, 11.0])
    budget = timing.Budget(10.0, clock=lambda: next(now))
    assert budget.allows("first")
    assert not budget.allows("second")
    assert not budget.allows("third")
    assert budget.left_out == ["second", "third"]


def test_host_time_is_per_call_and_waits_only_between_batches() -> None:
    order: list[str] = []
    calls = {"a": lambda: order.append("a"), "b": lambda: order.append("b")}
    found = timing.host(calls, lambda: order.append("wait"), batches=3, batch=2)
    assert order == ["a"] * 2 + ["b"] * 2 + ["wait", "a", "a", "wait", "b", "b"] * 3 + ["wait"]
    assert found["a"].repetitions == 3
    assert 0 < found["a"].low <= found["a"].median <= found["a"].high < 1e4


# ----------------------------------------------------------------------------------------------------------------------
# Workloads


@pytest.mark.parametrize(
    ("dtype", "mode", "factor"),
    [
        ("float32", "forward", 2 * 4),
        ("float32", "forward+backward", 3 * 4),
        ("float32", "all gradients", 4 * 4),
        ("bfloat16", "forward+backward", 3 * 2),
        ("float64", "all gradients", 4 * 8),
    ],
)
def test_traffic_is_every_operand_once_and_every_gradient_once(dtype: str, mode: str, factor: int) -> None:
    assert sweep(MSE, dtype, 21).traffic(mode) == factor << 21


def test_a_broadcast_operand_counts_with_its_own_size() -> None:
    hinge = next(x for x in pointwise.special() if x.title == HINGE_COLUMNS)
    full, row = 4 << 30, 4 << 15
    assert hinge.elements == 1 << 30
    assert hinge.traffic("forward") == full + row
    assert hinge.traffic("forward+backward") == 2 * full + row
    assert hinge.traffic("all gradients") == 2 * full + 2 * row


@pytest.mark.parametrize("exponent", [0, 1, 7, 10, 28, 30, 31])
def test_a_sweep_has_the_size_that_it_says(exponent: int) -> None:
    assert sweep(MSE, "float32", exponent).elements == 1 << exponent


@pytest.mark.parametrize(("size", "sets"), [(1 << 30, 1), (100, 2), (60, 2), (99, 2), (1, 101), (101, 1)])
def test_rotated_sets_are_larger_than_the_footprint(size: int, sets: int) -> None:
    assert workloads.set_count(size, 100) == sets
    assert sets * size > 100


def test_there_are_as_many_sets_as_calls_at_most_and_no_measurement_makes_more_calls() -> None:
    assert workloads.set_count(8, 180 << 20) == workloads.MOST_SETS
    assert (timing.MOST + 1) * len(figures.PROVIDERS) <= workloads.MOST_SETS


def test_what_the_figures_need_is_measured_first() -> None:
    chosen = pointwise.selection(list(registry(Loss).values()), figures.DTYPES, (10, 28, 30), (28,))
    needed = [pointwise.is_figure(x) for x in chosen]
    assert needed == sorted(needed, reverse=True)
    assert sum(needed) == len(pointwise.special()) + len(figures.LOSSES) * len(figures.DTYPES) * len(figures.SIZES)
    assert {x.elements for x in chosen if x.compiled and x.title == figures.SWEEP} == {1 << 28}


@pytest.mark.representatives
def test_inputs_rotate_and_are_not_alike(on_cpu: None, loss: Loss) -> None:
    inputs = Inputs(sweep(loss, "float32", 6), 3)
    assert inputs[0] is inputs[3]
    first, second = inputs[0][0], inputs[1][0]
    assert first.shape == (8, 8)
    assert not torch.equal(first, second)
    assert not torch.equal(first, Inputs(sweep(loss, "float32", 6), 3)[0][0])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("sets", [1, 3])
def test_a_step_computes_the_gradients_of_its_mode_and_drops_them(on_cpu: None, mode: str, sets: int) -> None:
    workload = sweep(MSE, "float32", 6)
    inputs = Inputs(workload, sets)
    inputs.differentiate(workload.differentiated(mode))
    operands, seen = inputs[sets - 1], []
    for i, x in enumerate(operands):
        if x.requires_grad:
            x.register_hook(lambda _, i=i: seen.append(i))
    workloads.step(torch.nn.functional.mse_loss, operands)
    assert sorted(seen) == list(range(workload.differentiated(mode)))
    assert [x.grad for x in operands] == [None, None]


def row_workloads_of_a_run() -> list[SoftmaxWorkload]:
    return softmax.selection(list(registry(SoftmaxLoss).values()), figures.DTYPES, quick=False)


def shrunk(workload: SoftmaxWorkload) -> SoftmaxWorkload:
    """A copy with few rows and classes."""
    first, second, *weights = workload.shapes
    small = tuple(min(n, most) for n, most in zip(first, (4, 7, 3, 2), strict=False))
    shapes = [small, small if len(second) == len(first) else (*small[:1], *small[2:]), *[small[1:2] for _ in weights]]
    return replace(workload, shapes=tuple(shapes), compiled=False, beside=None)


def test_rows_of_logits_are_the_shapes_and_options_of_the_figures() -> None:
    chosen = row_workloads_of_a_run()
    described = [x.describe("forward", figures.KEY) for x in chosen]
    shapes = {(x["shape"], x["dtype"]) for x in described if x["workload"] in figures.LOGITS}
    assert shapes == {(figures.spell_shape(s), d) for x in figures.LOGITS.values() for s, d, _ in x}
    assert len({tuple(x.values()) for x in described}) == len(chosen), "each is told from the others by its columns"
    assert {x.loss.name for x in chosen} == set(registry(SoftmaxLoss))
    assert all(x.beside and x.beside.bytes for x in chosen if x.title == figures.OPTIONS)
    quick = softmax.selection(list(registry(SoftmaxLoss).values()), figures.DTYPES, quick=True)
    assert {(x.loss.name, x.kind) for x in quick} == {("cross_entropy", "indices")}


@pytest.mark.parametrize(
    ("kind", "case", "mode", "expected"),
    [
        ("indices", {}, "forward", 6 * 5 * 2 + 6 * 8),
        ("indices", {}, "forward+backward", 2 * 6 * 5 * 2 + 6 * 8),
        ("indices", {"weight": True}, "forward", 6 * 5 * 2 + 6 * 8 + 5 * 2),
        ("probabilities", {}, "forward+backward", 3 * 6 * 5 * 2),
    ],
)
def test_traffic_of_rows(kind: str, case: dict[str, Any], mode: str, expected: int) -> None:
    workload = softmax.rows(registry(SoftmaxLoss)["cross_entropy"], (6, 5), "bfloat16", "", case, kind=kind)
    assert workload.traffic(mode) == expected
    assert (workload.elements, workload.shape) == (30, (6, 5))


@pytest.mark.parametrize("sets", [1, 3])
def test_operands_of_rows_are_what_their_loss_takes(on_cpu: None, sets: int) -> None:
    for workload in map(shrunk, row_workloads_of_a_run()):
        first, second, *weights = Inputs(workload, sets)[sets - 1]
        assert first.shape == workload.shape and str(first.dtype).endswith(workload.dtype)
        if workload.kind == "indices":
            kept = second[second != workload.case.get("ignore_index", -1)]
            assert kept.min() >= 0 and kept.max() < workload.shape[1] and second.dim() == first.dim() - 1
        elif workload.case.get("log_target") or workload.kind == "probabilities":
            sums = second.float().exp().sum(1) if workload.case.get("log_target") else second.float().sum(1)
            torch.testing.assert_close(sums, torch.ones_like(sums), rtol=0.02, atol=0)
        assert [x.shape for x in weights] == [workload.shape[1:2]] * ("weight" in workload.case)
    image = softmax.rows(registry(SoftmaxLoss)["cross_entropy"], (4, 3, 16, 16), "float32", "", {"ignore_index": 255})
    ignored = (Inputs(image)[0][1] == 255).float().mean()
    assert 0.05 < ignored < 0.25


# ----------------------------------------------------------------------------------------------------------------------
# Providers


def cases(loss: Loss) -> Iterator[Workload]:
    for case in loss.cases:
        for reduction in loss.reductions[1:]:
            yield Workload(loss, ((8, 8),) * len(loss.operands), "float32", case=case, reduction=reduction)
    for x in pointwise.special():
        if x.loss.name == loss.name:
            yield replace(x, shapes=tuple(tuple(n // 2048 for n in shape) for shape in x.shapes), dtype="float32")


def test_all_providers_compute_the_same(on_cpu: None, loss: Loss) -> None:
    for workload in cases(loss):
        found = providers.expressions(workload)
        operands = Inputs(workload)[0]
        values = {name: call(*operands) for name, call in found.items()}
        for name, value in values.items():
            torch.testing.assert_close(value, values[figures.OURS], msg=lambda m, w=workload, n=name: f"{w} {n}: {m}")


def test_eager_is_torchs_own_function_where_it_exists(loss: Loss) -> None:
    assert (figures.NAIVE in providers.expressions(sweep(loss, "float32", 6))) == (loss.torch is not None)


def test_liger_takes_part_only_where_it_computes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[dict[str, Any]] = []
    module = SimpleNamespace(LigerKLDIVLoss=lambda **options: made.append(options) or "liger")
    monkeypatch.setitem(sys.modules, "liger_kernel", SimpleNamespace(transformers=module))
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", module)
    kl = sweep(registry(Loss)["kl_div"], "float32", 6)
    assert providers.peers(kl, "forward+backward") == {figures.LIGER: "liger"}
    assert made == [{"reduction": "mean", "log_target": False}]
    assert providers.peers(kl, "all gradients") == {}
    assert providers.peers(sweep(MSE, "float32", 6), "forward") == {}


def test_rows_of_all_providers_are_the_same(on_cpu: None) -> None:
    for workload in map(shrunk, row_workloads_of_a_run()):
        workload = replace(workload, dtype="float64")
        operands = Inputs(workload)[0]
        arguments = dict(zip(workload.names, operands, strict=True)) | workload.options
        exact = truth(workload.loss.name, {**arguments, "reduction": workload.reduction, "class_dim": 1}).value.exact
        for name, call in providers.expressions(workload).items():
            message = f"{workload} {name}"
            torch.testing.assert_close(call(*operands), exact, msg=lambda m, x=message: f"{x}: {m}")
        assert {*providers.expressions(workload)} == {figures.OURS, figures.EAGER}
    assert {x.loss.name for x in row_workloads_of_a_run()} <= set(NAMES)


def liger_cross_entropy(
    input: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None = None, size_average: bool | None = None,
    ignore_index: int = -100, reduce: bool | None = None, reduction: str = "mean", label_smoothing: float = 0.0,
    lse_square_scale: float = 0.0, softcap: float | None = None, return_z_loss: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Stands in for Liger's function, with its signature; like Liger's, it overwrites the logits."""
    value = torch.nn.functional.cross_entropy(
        input, target, weight, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing
    )
    input.detach().zero_()
    return value + lse_square_scale


def cross_entropy_fwd(
    x: torch.Tensor, target: torch.Tensor, target_logit: Any = None, ignore_index: int = -100,
    return_lse: bool = False, return_dx: bool = False, inplace_backward: bool = False,
) -> Any:  # fmt: skip
    """Stands in for QuACK's function, with its signature."""
    assert not x.requires_grad and not torch.is_grad_enabled() and return_dx
    return torch.nn.functional.cross_entropy(x, target, reduction="none", ignore_index=ignore_index), x


def quack_cross_entropy(
    x: torch.Tensor, target: torch.Tensor, lse_partial: Any = None, ignore_index: int = -100, reduction: str = "mean",
    inplace_backward: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Stands in for QuACK's function, with its signature."""
    return torch.nn.functional.cross_entropy(x, target, reduction=reduction, ignore_index=ignore_index)


@pytest.fixture
def peers_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    liger = SimpleNamespace(liger_cross_entropy=liger_cross_entropy)
    quack = SimpleNamespace(cross_entropy=quack_cross_entropy, cross_entropy_fwd=cross_entropy_fwd)
    for name, module in {
        "liger_kernel": SimpleNamespace(),
        "liger_kernel.transformers": SimpleNamespace(functional=liger),
        "liger_kernel.transformers.functional": liger,
        "quack": SimpleNamespace(cross_entropy=quack),
        "quack.cross_entropy": quack,
    }.items():
        monkeypatch.setitem(sys.modules, name, module)


def test_peers_take_part_with_options_that_they_have(on_cpu: None, peers_of_rows: None) -> None:
    loss = registry(SoftmaxLoss)["cross_entropy"]
    every = {figures.LIGER, figures.QUACK, figures.QUACK_OP}

    def found(case: dict[str, Any], mode: str = "forward+backward", **more: Any) -> set[str]:
        return set(providers.peers(softmax.rows(loss, (4, 7), "float32", "", case, **more), mode))

    assert found({}) == every
    assert found({}, "forward") == every - {figures.QUACK_OP}
    for case in ({"weight": True}, {"label_smoothing": 0.1}, {"z_loss": 0.1, "softcap": 3.0}):
        assert found(case) == {figures.LIGER}
    assert found({"gamma": 2.0}) == found({}, kind="probabilities") == set()

    workload = softmax.rows(loss, (4, 7), "float32", "", {"z_loss": 0.25, "weight": True, "ignore_index": 2})
    x, y, w = Inputs(workload)[0]
    expected = torch.nn.functional.cross_entropy(x, y, w, ignore_index=2) + 0.25
    assert providers.peers(workload, "forward")[figures.LIGER](x, y, w) == expected

    image = softmax.rows(loss, (2, 3, 4, 5), "float32", "")
    operands = Inputs(image)[0]
    calls = providers.peers(image, "forward")
    statuses = providers.attempts({name: lambda call=call: call(*operands) for name, call in calls.items()})
    assert set(statuses.values()) == {"absent: takes logits of two dimensions"}


def test_a_peer_that_cannot_be_imported_is_a_failure_and_one_that_is_not_there_is_named(
    on_cpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    workload = softmax.rows(registry(SoftmaxLoss)["cross_entropy"], (4, 7), "float32", "")
    assert providers.peers(workload, "forward") == {}
    assert providers.not_installed([figures.EAGER, figures.QUACK]) == {figures.QUACK: "no package quack"}
    # A package that lacks the module, as another version might.
    monkeypatch.setitem(sys.modules, "quack", SimpleNamespace())
    call = providers.peers(workload, "forward")[figures.QUACK]
    status, _ = providers.attempt(lambda: call(*Inputs(workload)[0]))
    assert status.startswith("failed: ModuleNotFoundError: No module named 'quack.cross_entropy'")


def test_who_left_the_gpu_unusable_is_named(on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost() -> None:
        raise RuntimeError("an illegal memory access was encountered")

    def peer() -> None:
        monkeypatch.setattr(torch.cuda, "synchronize", lost)
        lost()

    with pytest.raises(RuntimeError, match="the GPU does not outlive quack; see --providers"):
        providers.attempts({"ours": lambda: None, "quack": peer})


def test_a_failure_does_not_reach_who_comes_next(on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA reports a non-fatal error again at the next launch."""
    left: list[str] = []
    ones = torch.ones

    def launch(*arguments: Any, **options: Any) -> torch.Tensor:
        if left:
            raise RuntimeError(left.pop())
        return ones(*arguments, **options)

    def failing() -> None:
        left.append("invalid argument")
        raise RuntimeError("invalid argument")

    monkeypatch.setattr(torch, "ones", launch)
    assert providers.attempt(failing) == ("failed: RuntimeError: invalid argument", None)
    assert providers.attempt(lambda: torch.ones(2).sum().item()) == ("ok", 2.0)


def test_a_failed_attempt_says_why(on_cpu: None) -> None:
    def out_of_memory() -> None:
        raise torch.cuda.OutOfMemoryError("no room")

    def wrong() -> None:
        raise ValueError("first line\nsecond line")

    assert providers.attempt(lambda: 3) == ("ok", 3)
    assert providers.attempt(out_of_memory) == ("out of memory", None)
    assert providers.attempt(wrong) == ("failed: ValueError: first line", None)


# ----------------------------------------------------------------------------------------------------------------------
# Rows


def test_rows_compare_every_provider_with_ours_and_with_the_copy() -> None:
    workload = sweep(MSE, "float32", 20)
    times = {"ours": 2.0, "eager": 5.0, "copy": 1.5}
    timings = {name: timing.Timing(ms, ms - 0.1, ms + 0.1, 9) for name, ms in times.items()}
    statuses = dict.fromkeys(times, "ok") | {"compile": "out of memory"}
    rows = {r["provider"]: r for r in throughput.rows(workload, "forward+backward", statuses, timings)}
    traffic = 3 * 4 << 20
    assert rows["ours"]["tb_per_s"] == pytest.approx(traffic / 2e-3 / 1e12)
    assert rows["ours"]["copy_fraction"] == 0.75
    assert rows["eager"]["speedup_of_ours"] == 2.5
    assert rows["copy"]["copy_fraction"] == 1.0
    assert rows["compile"]["status"] == "out of memory"
    assert "ms" not in rows["compile"]
    assert all(set(r) <= set(throughput.COLUMNS) for r in rows.values())


def test_rows_are_appended_and_read_back(tmp_path: Path) -> None:
    for value in (1.23456789, None):
        writer = records.Writer(tmp_path / "new", "some", ("name", "count", "value"), WHERE)
        writer.write({"name": "a, b", "count": 1 << 30, "value": value})
        assert len(records.read(tmp_path / "new" / "some.csv")) == (1 if value else 2), "each row is on disk at once"
    first, second = records.read(tmp_path / "new" / "some.csv")
    assert first == {"name": "a, b", "count": 1 << 30, "value": 1.23457, **WHERE}
    assert second["value"] == ""
    assert (tmp_path / "new" / "some.csv").read_text().count("name,") == 1


def test_a_file_with_other_columns_is_not_touched(tmp_path: Path) -> None:
    records.Writer(tmp_path, "some", ("a", "b"), WHERE).write({"a": 1, "b": 2})
    before = (tmp_path / "some.csv").read_text()
    with pytest.raises(ValueError, match=r"has the columns a, b, gpu.*--out"):
        records.Writer(tmp_path, "some", ("b", "a"), WHERE)
    with pytest.raises(ValueError, match="fields not in fieldnames"):
        records.Writer(tmp_path, "some", ("a", "b"), WHERE).write({"c": 3})
    assert (tmp_path / "some.csv").read_text() == before


def test_the_latest_row_of_each_measurement_on_the_last_gpu_counts() -> None:
    rows = [
        {"loss": "a", "ms": 1, "gpu": "old", "date": "2025-03-01"},
        {"loss": "a", "ms": 2, "gpu": "new", "date": "2025-02-01"},
        {"loss": "a", "ms": 3, "gpu": "new", "date": "2025-01-01"},
        {"loss": "b", "ms": 4, "gpu": "new", "date": "2025-01-01"},
    ]
    assert {r["loss"]: r["ms"] for r in records.latest(rows, ["loss"])} == {"a": 2, "b": 4}
    assert [r["ms"] for r in records.latest(rows, ["loss"], "old")] == [1]
    assert records.latest([], ["loss"]) == []


def test_the_commit_is_that_of_the_checkout_and_marked_when_it_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUPYLOSSES_COMMIT", raising=False)
    answers = {"rev-parse": "0123abcd", "status": ""}
    monkeypatch.setattr(records, "output", lambda *command: answers[command[3]])
    assert records.commit() == "0123abcd"
    answers["status"] = " M cupylosses/engine.py"
    assert records.commit() == "0123abcd-dirty"
    answers.update({"rev-parse": "", "status": ""})
    assert records.commit() == "unknown"
    monkeypatch.setenv("CUPYLOSSES_COMMIT", "4567cdef")
    answers["status"] = "?? cupylosses/"
    assert records.commit() == "4567cdef", "what git says of a copy without history says nothing"


def test_a_command_that_does_not_exist_or_fails_prints_nothing() -> None:
    assert records.output("no-such-command-here") == ""
    assert records.output(sys.executable, "-c", "print('x'); raise SystemExit(1)") == ""
    assert records.output(sys.executable, "-c", "print(' x ')") == "x"


def test_the_first_loss_is_read_from_the_last_line_and_a_failure_from_the_last_error() -> None:
    row = startup.outcome(0, 'a warning\n{"total_s": 0.25, "import_s": 0.1}\n', "")
    assert row == {"status": "ok", "total_s": 0.25, "import_s": 0.1}
    assert startup.outcome(1, "", "Traceback\nValueError: no GPU\n") == {"status": "failed: ValueError: no GPU"}
    assert startup.outcome(-9, "", "") == {"status": "failed: no message"}


# ----------------------------------------------------------------------------------------------------------------------
# Figures


BAR = Bar("b", "s", "x", 0.9, {"loss": ("p", "q"), "mode": ("m",)}, at_least=True)


@pytest.mark.parametrize(
    ("values", "met", "worst", "count"),
    [
        ({"p": 0.95, "q": 0.9}, "yes", 0.9, "2 of 2"),
        ({"p": 0.95, "q": 0.89}, "no", 0.89, "1 of 2"),
        ({"p": 0.95}, "so far", 0.95, "1 of 1, 2 asked for"),
        ({"p": 0.95, "q": float("nan")}, "no", None, "1 of 2"),
        ({"p": None, "other": 0.1}, "not measured", None, "0 of 0, 2 asked for"),
    ],
)
def test_a_bar_is_met_when_every_row_that_counts_is_within(
    values: dict[str, float | None], met: str, worst: float | None, count: str
) -> None:
    rows = [{"loss": name, "mode": "m", "x": x} for name, x in values.items()]
    rows.append({"loss": "p", "mode": "another", "x": 0.0})
    found = verdict(BAR, {"s": rows})
    assert (found.met, found.count) == (met, count)
    if worst is not None:
        assert found.worst is not None
        assert found.worst["x"] == worst


def test_a_bar_from_above_takes_the_largest() -> None:
    bar = Bar("memory", "s", "x", 8 << 20, {"loss": ("p", "q"), "elements": (4, 8)}, unit=" MiB", scale=1 << 20)
    rows = [{"loss": "p", "elements": 4, "x": 1 << 20}, {"loss": "q", "elements": 8, "x": 9 << 20}]
    found = verdict(bar, {"s": rows})
    assert (found.met, found.limit, found.measured) == ("no", "≤ 8 MiB", "9 MiB (q 2^3)")


def test_every_bar_asks_for_columns_and_values_that_its_section_writes() -> None:
    """A misspelt column or value would silently leave a figure unmeasured."""
    known = {
        "loss": set(registry(Loss)),
        "dtype": set(FLOATING),
        "mode": set(MODES),
        "provider": set(figures.PROVIDERS),
        "workload": {figures.SWEEP, KL_PROBABILITIES, HINGE_COLUMNS, *figures.LOGITS, figures.OPTIONS},
        "cache": {"empty", "warm"},
        "what": set(importlib.import_module("benchmarking.host").CALLS),
        "elements": {1 << n for n in benchmark.SIZES},
    }
    of_rows = [x.describe("forward", figures.KEY) for x in row_workloads_of_a_run()]
    for column in ("loss", "shape", "case"):
        known.setdefault(column, set()).update(x[column] for x in of_rows)
    known["elements"].add(softmax.SoftmaxWorkload.large(registry(SoftmaxLoss)["cross_entropy"]).elements)
    known["loss"] |= {"linear_cross_entropy", "linear_token_log_probs", "token_log_probs", *registry(SequenceLoss)}
    known["variant"] = {*linear.VARIANTS, *MODES}
    known["shape"] |= {figures.spell_shape(x) for x, _ in (*figures.LAYERS, figures.LOG_PROBS)}
    known["shape"] |= set(map(figures.spell_shape, figures.SEQUENCES))
    # Each off-headline case has its own bar.
    assert {bar.section for bar in BARS} == set(report.DEFAULT)
    for bar in BARS:
        columns = benchmark.section(bar.section).COLUMNS
        assert {bar.column, *bar.where} <= set(columns), bar.what
        for column, values in bar.where.items():
            assert set(values) <= known[column], bar.what


def test_the_titles_of_the_figures_are_those_of_workloads() -> None:
    titles = {KL_PROBABILITIES, HINGE_COLUMNS, figures.MASKED, figures.WEIGHTED, figures.BY_ROW}
    assert {x.title for x in pointwise.special()} == titles


# ----------------------------------------------------------------------------------------------------------------------
# The picture


def rows_to_draw() -> dict[str, list[dict[str, Any]]]:
    """Rows by file: two element-wise losses at three sizes, and cross entropy at two shapes."""
    shares = {"ours": 0.9, "eager": 0.3, "naive": 0.2, "copy": 1.0}
    found: dict[str, list[dict[str, Any]]] = {"throughput": [], "rows": []}

    def add(file: str, workload: Workload, shares: dict[str, float | None]) -> None:
        columns = benchmark.section(file).COLUMNS
        for name, share in shares.items():
            measured = {
                "provider": name,
                "copy_fraction": share,
                "status": "ok" if share else "failed: DSLRuntimeError",
            }
            found[file].append({**workload.describe("forward+backward", columns), **measured})

    for loss in ("mse_loss", "kl_div", "l1_loss"):
        for exponent in (20, 28, 30):
            compiled = {"compile": 0.5} if exponent == 28 else {}
            add("throughput", sweep(registry(Loss)[loss], "float32", exponent), {**shares, **compiled})
    for (shape, dtype, _), quack in zip(figures.LOGITS[figures.ROWS][:2], (0.6, None), strict=True):
        workload = softmax.rows(registry(SoftmaxLoss)["cross_entropy"], shape, dtype, figures.ROWS)
        add("rows", workload, {**shares, "quack": quack, "liger": 0.4})
    return found


def test_the_picture_is_drawn_from_the_rows_on_disk(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "docs" / "picture.png"
    for file, rows in rows_to_draw().items():
        assert benchmark.main(["--plot", "--out", str(tmp_path), "--picture", str(picture)]) == benchmark.CANNOT
        assert f"{file}.csv has no rows" in capsys.readouterr().out.replace("\n", " ")
        writer = records.Writer(tmp_path, file, benchmark.section(file).COLUMNS, WHERE)
        for row in rows:
            writer.write(row)
    assert benchmark.main(["--plot", "--out", str(tmp_path), "--picture", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")

    from matplotlib import image

    height, width = image.imread(picture).shape[:2]
    assert width >= 1200
    assert width > height


def test_committed_rows_can_be_drawn() -> None:
    elementwise, cross_entropy = plot.chosen(Path(__file__).resolve().parents[1] / "benchmarks")
    assert len(plot.bars_of_losses(elementwise)[1]) == len(plot.LOSSES)
    assert len(plot.bars_of_shapes(cross_entropy)) == len(figures.LOGITS[figures.ROWS])


def test_bars_stand_for_the_size_that_most_rivals_were_measured_at() -> None:
    size, losses = plot.bars_of_losses(rows_to_draw()["throughput"])
    assert size == 1 << 28
    assert losses == {x: {"ours": 0.9, "compile": 0.5, "eager": 0.3} for x in ("mse", "kl_div")}


def test_bars_of_cross_entropy_say_what_failed() -> None:
    bars = plot.bars_of_shapes(rows_to_draw()["rows"])
    measured = {"ours": 0.9, "quack": 0.6, "liger": 0.4, "eager": 0.3}
    assert bars == {
        f"8192{plot.TIMES}32000\nbfloat16": measured,
        f"8192{plot.TIMES}128256\nbfloat16": measured | {"quack": None},
    }


def test_without_rows_the_picture_says_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert benchmark.main(["--plot", "--out", str(tmp_path)]) == benchmark.CANNOT
    assert "python scripts/benchmark.py" in capsys.readouterr().out.replace("\n", " ")


# ----------------------------------------------------------------------------------------------------------------------
# The command line


@pytest.mark.parametrize(
    ("text", "expected"), [("10", (10,)), ("10,12", (10, 12)), ("10-12", (10, 11, 12)), ("28,28-30", (28, 29, 30))]
)
def test_sizes(text: str, expected: tuple[int, ...]) -> None:
    assert benchmark.exponents(text) == expected


@pytest.mark.parametrize(
    "arguments",
    [
        ["--sizes", "x"],
        ["--sizes", "12-10"],
        ["--sizes", "40"],
        ["--sections", "throughput,else"],
        ["--loss", "no_such_loss"],
        ["--dtype", "int8"],
        ["--budget", "0"],
        ["--budget", "soon"],
    ],
)
def test_a_bad_command_line_is_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        benchmark.main(arguments)
    assert exit.value.code == 2
    error = capsys.readouterr().err
    assert arguments[0] in error
    assert arguments[1].split(",")[-1] in error


def test_sections_run_in_one_order_whatever_is_asked_for() -> None:
    assert benchmark.section_names("throughput,startup") == ("startup", "throughput")


def test_without_a_gpu_one_line_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert benchmark.main([]) == benchmark.CANNOT
    assert capsys.readouterr().out.strip().splitlines() == [
        "benchmark.py: an NVIDIA GPU is needed: torch.cuda.is_available() is False. "
        "(--plot draws committed rows without one.)"
    ]


# ----------------------------------------------------------------------------------------------------------------------
# A whole run, on the CPU


@pytest.fixture
def stand_ins(on_cpu: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    graph, host, accuracy = (importlib.import_module(f"benchmarking.{x}") for x in ("graph", "host", "accuracy"))
    monkeypatch.setattr(benchmark, "why_not", lambda: None)
    monkeypatch.setattr(records, "environment", lambda: WHERE)
    gpu_stand_ins.stand_ins(monkeypatch)
    monkeypatch.setattr(timing, "host", partial(timing.host, batches=2, batch=2))
    monkeypatch.setattr(timing.gc, "collect", lambda: 0)  # The real one would run before each of some hundred timings.
    monkeypatch.setattr(torch, "compile", lambda call, **_: call)
    monkeypatch.setattr(torch.compiler, "reset", lambda: None)
    monkeypatch.setattr(pointwise, "LARGE", 8)
    monkeypatch.setattr(accuracy, "EXPONENT", 8)
    monkeypatch.setattr(graph, "EXPONENTS", (6,))
    monkeypatch.setattr(graph, "QUICK_EXPONENTS", (6,))
    monkeypatch.setattr(graph, "captured", lambda call, inputs: SimpleNamespace(replay=lambda: call(*inputs[0])))
    monkeypatch.setattr(host, "parts", lambda *_: {"whole": timing.Timing(3.0, 2.0, 4.0, 5)})
    monkeypatch.setattr(startup, "_child", lambda loss, cache: {"status": "ok", "total_s": 0.1})
    hinge = next(x for x in pointwise.special() if x.title == HINGE_COLUMNS)
    small = [replace(hinge, shapes=((4, 8), (8,)), compiled=False)]
    monkeypatch.setattr(pointwise, "special", lambda: tuple(small))

    def little(shape: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(n % 7 + 2 for n in shape)

    rows = {title: [(little(s), *more) for s, *more in found] for title, found in figures.LOGITS.items()}
    monkeypatch.setattr(softmax, "LOGITS", rows)
    monkeypatch.setattr(softmax, "ODD", little(figures.ODD))
    for name in ("PLAIN_LOGITS", "LARGE_LOGITS"):
        shape, dtype = getattr(figures, name)
        monkeypatch.setattr(softmax, name, (little(shape), dtype))
    monkeypatch.setattr(linear, "LAYERS", [(little(sizes), names) for sizes, names in figures.LAYERS])
    for name in ("LOG_PROBS", "LINEAR_LOG_PROBS"):
        sizes, bars = getattr(figures, name)
        monkeypatch.setattr(figures, name, (little(sizes), bars))
    monkeypatch.setattr(linear_softmax, "LARGE_LAYER", (little(figures.LARGE_LAYER[0]), "bfloat16"))


def test_calls_take_turns_and_never_get_the_same_number_twice(stand_ins: None) -> None:
    order: list[tuple[str, int]] = []
    calls = {name: (lambda number, name=name: order.append((name, number))) for name in "abc"}
    found = timing.interleaved(calls, 1e-9)
    assert {x.repetitions for x in found.values()} == {timing.FEWEST}
    assert [number for _, number in order] == list(range(3 * (timing.FEWEST + 1)))
    turns = ["".join(name for name, _ in order[i : i + 3]) for i in range(0, len(order), 3)]
    assert turns[1:5] == ["abc", "bca", "cab", "abc"]


def test_every_call_starts_behind_a_spin_and_if_asked_in_a_clean_cache(
    stand_ins: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a call would pay for its predecessor: for a synchronization, or for dirty cache lines."""
    for cold in (False, True):
        before: list[str] = []
        monkeypatch.setattr(timing, "clean_cache", lambda before=before: before.append("clean"))
        monkeypatch.setattr(torch.cuda, "_sleep", lambda _, before=before: before.append("spin"))
        calls = {name: (lambda _, name=name, before=before: before.append(name)) for name in "ab"}
        timing.interleaved(calls, 1e-9, cold)
        turn = [*(["clean"] if cold else []), "spin"]
        assert before == [*"ab", *[x for name in "abbaabbaabbaab" for x in (*turn, name)]]


#: Sections whose losses are not in the run below.
OTHERS = ("linear", "sequences")


def test_a_run_writes_every_section_and_ends_with_the_figures(
    stand_ins: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ["mse_loss", "hinge_loss"]
    arguments = ["--dtype", "float32", "--sizes", "4,6", "--compile-sizes", "6", "--target", "0.001"]
    assert benchmark.main(["--loss", *names, "cross_entropy", *arguments, "--out", str(tmp_path)]) == 0
    rows = {name: records.read(tmp_path / f"{name}.csv") for name in report.DEFAULT if name not in OTHERS}
    assert all(rows.values())
    for found in rows.values():
        assert {r["gpu"] for r in found} == {"GPU A"}
        assert {r["status"] for r in found} == {"ok"}

    measured = {(r["loss"], r["workload"], r["elements"], r["mode"]) for r in rows["throughput"]}
    sweeps = {(name, figures.SWEEP, n, mode) for name in names for n in (16, 64) for mode in MODES}
    assert measured == sweeps | {("hinge_loss", HINGE_COLUMNS, 32, mode) for mode in MODES}
    assert {r["elements"] for r in rows["throughput"] if r["provider"] == "compile"} == {64}
    assert all(r["ms"] > 0 and r["copy_fraction"] > 0 for r in rows["throughput"])
    assert {r["cache"] for r in rows["startup"]} == {"empty", "warm"}
    assert {r["what"] for r in rows["host"] if r["kind"] == "part"} == {"forward: whole", "forward+backward: whole"}
    assert all(r["ulp"] <= 1 for r in rows["accuracy"] if r["provider"] == "ours")
    outputs = {r["mode"]: r["outputs"] for r in rows["memory"] if r["provider"] == "ours" and r["loss"] in names}
    assert outputs == {"forward": 4, "forward+backward": 4 + (4 << 8), "all gradients": 4 + 2 * (4 << 8)}

    printed = capsys.readouterr().out
    assert printed.index("Peak memory") < printed.index("GPU time") < printed.index("Figures")
    assert [bar.what for bar in BARS if bar.what not in printed] == []


def test_a_run_of_sequences_has_both_of_torchs_implementations(
    stand_ins: None, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sequence, "SEQUENCES", {(6, 2, 4, 2): None})
    arguments = ["--loss", "ctc_loss_with_logits", "--sections", "sequences", "--target", "0.001"]
    assert benchmark.main([*arguments, "--out", str(tmp_path)]) == 0
    rows = records.read(tmp_path / "sequences.csv")
    expected = {(x, mode) for x in ("ours", "eager", "cudnn") for mode in ("forward", "forward+backward")}
    assert {(r["provider"], r["mode"]) for r in rows} == expected and {r["status"] for r in rows} == {"ok"}
    assert all(r["shape"] == "6x2x4x2" and r["ms"] > 0 and r["speedup_of_ours"] > 0 for r in rows)
    assert "Losses of sequences" in capsys.readouterr().out


def test_a_run_of_rows_has_their_peers_options_memory_and_host_time(
    stand_ins: None, peers_of_rows: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    losses = ["cross_entropy", "distillation_loss", "nll_loss"]
    arguments = ["--loss", *losses, "--sections", "rows,memory,host", "--target", "0.001", "--out", str(tmp_path)]
    assert benchmark.main(arguments) == 0
    rows = {name: records.read(tmp_path / f"{name}.csv") for name in ("rows", "memory", "host")}
    assert all({r["loss"] for r in found} == set(losses) for found in rows.values())

    of_shapes = [r for r in rows["rows"] if r["workload"] == figures.ROWS]
    assert {r["provider"] for r in of_shapes} == {*figures.PROVIDERS} - {figures.NAIVE}
    assert {r["mode"] for r in of_shapes if r["provider"] == figures.COMPILE} == {"forward+backward"}
    assert {r["mode"] for r in of_shapes if r["provider"] == figures.OURS} == {"forward", "forward+backward"}
    absent = {r["provider"]: r["status"] for r in rows["rows"] if r["status"] != "ok"}
    reason = "absent: takes logits of two dimensions"
    assert absent == dict.fromkeys((figures.LIGER, figures.QUACK, figures.QUACK_OP), reason)
    assert {r["workload"] for r in rows["rows"] if r["status"] != "ok"} == {figures.IMAGES}
    timed = [r for r in rows["rows"] if r["status"] == "ok"]
    assert all(r["ms"] > 0 and r["copy_fraction"] > 0 and r["speedup_of_ours"] > 0 for r in timed)
    options = [r for r in timed if r["workload"] == figures.OPTIONS]
    assert all(r["plain_ratio"] > 0 for r in options)
    assert {figures.spell_case(x) for x in figures.ROW_OPTIONS} | {"target=probabilities", "beta=0.5"} <= {
        r["case"] for r in options
    }
    assert {r["provider"] for r in options if r["loss"] == "distillation_loss"} == {"ours", "eager", "plain", "copy"}
    assert {(r["provider"], r["mode"]) for r in rows["memory"]} == {
        (x, mode) for x in ("ours", "eager") for mode in ("forward", "forward+backward")
    }
    assert {r["elements"] for r in rows["host"]} == {640}

    printed = capsys.readouterr().out
    assert f"quack {reason}" in printed and "Rows of logits" in printed


def test_a_run_of_layers_has_each_variant_beside_its_products(
    stand_ins: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--loss", "linear_cross_entropy", "--sections", "linear,memory,host", "--target", "0.001"]
    assert benchmark.main([*arguments, "--out", str(tmp_path)]) == 0
    rows = records.read(tmp_path / "linear.csv")
    of_tokens = [r for r in rows if r["loss"] != "linear_cross_entropy"]
    assert [(r["loss"], r["variant"], r["provider"]) for r in of_tokens] == [
        (*x, provider)
        for x in (("token_log_probs", "forward"), ("token_log_probs", "forward+backward"),
                  ("linear_token_log_probs", "forward+backward"))
        for provider in (figures.OURS, figures.EAGER)
    ]  # fmt: skip
    assert {r["status"] for r in of_tokens} == {"ok"} and of_tokens[-1]["products"] == 4
    assert of_tokens[2]["copy_fraction"] == pytest.approx(1.5 * of_tokens[2]["copy_ms"] / of_tokens[2]["ms"], rel=1e-4)
    rows = [r for r in rows if r["loss"] == "linear_cross_entropy"]
    ours = [r for r in rows if r["provider"] == figures.OURS]
    assert [r["variant"] for r in ours] == [x for _, names in figures.LAYERS for x in names]
    assert {r["status"] for r in ours} == {"ok"} and len({r["shape"] for r in ours}) == len(figures.LAYERS)
    assert {r["variant"]: r["products"] for r in ours} == {x.name: x.products for x in linear.VARIANTS.values()}
    timed = [r for r in rows if r["status"] == "ok"]
    assert all(r["ratio"] == pytest.approx(r["ms"] / r["products_ms"], rel=1e-4) for r in timed)
    assert all(0 < r["peak_gb"] < gpu_stand_ins.PEAK / linear.GB and r["rounds"] == timing.ROUNDS for r in timed)
    rivals = {r["provider"]: r["status"] for r in rows if r["variant"] == "default"}
    assert rivals[figures.EAGER] == "ok"
    assert {*rivals} == {figures.OURS, figures.EAGER, linear.CHUNKED, figures.LIGER, linear.CUT, figures.QUACK}
    assert all(x == "ok" or x.startswith("absent: ") for x in rivals.values()), rivals
    assert {r["loss"] for name in ("memory", "host") for r in records.read(tmp_path / f"{name}.csv")} == {
        "linear_cross_entropy"
    }
    assert "products of matrices" in capsys.readouterr().out


def test_a_row_of_layers_says_if_it_meets_its_bars() -> None:
    row = {"loss": "linear_cross_entropy", "shape": "8192x4096x128256", "variant": "default", "provider": figures.OURS}
    assert report.bars_of({**row, "ratio": 1.04, "peak_gb": 1.05}, "linear") == ("≤ 1.05 x, ≤ 1.1 GB", "yes")
    assert report.bars_of({**row, "ratio": 1.06, "peak_gb": 1.05}, "linear")[1] == "no"
    assert report.bars_of({**row, "status": "out of memory"}, "linear")[1] == "no"
    assert report.bars_of({**row, "provider": figures.EAGER}, "linear") == ("", "")


def test_a_quick_run_of_layers_has_the_first_call_alone(stand_ins: None, tmp_path: Path) -> None:
    arguments = ["--quick", "--loss", "linear_cross_entropy", "--sections", "linear", "--target", "0.001"]
    assert benchmark.main([*arguments, "--providers", "eager", "--out", str(tmp_path)]) == 0
    rows = records.read(tmp_path / "linear.csv")
    assert {(r["variant"], r["provider"]) for r in rows} == {
        ("default", x) for x in (figures.OURS, figures.EAGER, linear.CHUNKED)
    }


def test_pairs_take_turns_with_several_calls_each(stand_ins: None) -> None:
    order: list[str] = []
    found = timing.paired(lambda: order.append("a"), lambda: order.append("b"), 1e-9)
    assert [x.repetitions for x in found] == [timing.ROUNDS] * 2
    assert "".join(order).endswith("aaaabb" * timing.ROUNDS)


def test_labels_of_a_layer_are_ignored_if_asked(on_cpu: None) -> None:
    loss = registry()["linear_cross_entropy"]
    workload = linear_softmax.layer(loss, (6, 4, 5), "float32", ignored=True)
    assert str(workload) == "linear_cross_entropy float32 6x4x5" and workload.shape == (6, 5)
    for count in (1, 3):
        x, w, y = Inputs(workload, count)[count - 1]
        assert (x.shape, w.shape) == ((6, 4), (5, 4))
        assert (y[::2] == -100).all() and (y[1::2] >= 0).all()


@pytest.mark.parametrize("wanted", [(figures.EAGER,), (figures.EAGER, figures.LIGER)])
def test_providers_are_chosen_and_one_that_overwrites_has_operands_of_its_own(
    stand_ins: None, peers_of_rows: None, monkeypatch: pytest.MonkeyPatch, wanted: tuple[str, ...]
) -> None:
    seen: dict[str, set[int]] = {name: set() for name in (figures.EAGER, figures.LIGER)}
    expressions, peers = providers.expressions, providers.peers

    def watched(calls: dict[str, Any]) -> dict[str, Any]:
        def watch(name: str, call: Any) -> Any:
            return lambda *operands: (seen[name].add(operands[0].data_ptr()), call(*operands))[1]

        return {name: watch(name, call) if name in seen else call for name, call in calls.items()}

    monkeypatch.setattr(providers, "expressions", lambda workload: watched(expressions(workload)))
    monkeypatch.setattr(providers, "peers", lambda *given: watched(peers(*given)))
    workload = softmax.rows(registry(SoftmaxLoss)["cross_entropy"], (4, 7), "float32", "")
    run: Any = SimpleNamespace(providers=wanted, target=0.001, say=print)
    found = {r["provider"]: r["status"] for r in throughput.timed(workload, run, ["forward+backward"], [])}
    assert found == dict.fromkeys(("ours", *wanted, "copy"), "ok")
    assert seen[figures.EAGER] and bool(seen[figures.LIGER]) == (figures.LIGER in wanted)
    assert not seen[figures.EAGER] & seen[figures.LIGER]


def test_time_beside_the_plain_case_is_per_byte() -> None:
    plain = softmax.rows(registry(SoftmaxLoss)["cross_entropy"], (8, 16), "float32", "")
    workload = replace(plain, shapes=((16, 16), (16,)), beside=plain)
    times = {"ours": 3.0, "plain": 1.0, "copy": 1.0}
    timings = {name: timing.Timing(ms, ms, ms, 9) for name, ms in times.items()}
    rows = {r["provider"]: r for r in throughput.rows(workload, "forward", dict.fromkeys(times, "ok"), timings)}
    assert rows["ours"]["plain_ratio"] == pytest.approx(1.5)
    assert rows["plain"]["plain_ratio"] == pytest.approx(1.0)
    assert rows["plain"]["copy_fraction"] == pytest.approx(0.5), "of the bytes that it moves itself"
    assert rows["plain"]["bytes"] * 2 == rows["ours"]["bytes"]


def test_a_quick_run_measures_the_figures_alone(stand_ins: None, tmp_path: Path) -> None:
    arguments = [
        "--quick",
        "--sections",
        "throughput,graph",
        "--sizes",
        "4",
        "--target",
        "0.001",
        "--out",
        str(tmp_path),
    ]
    assert benchmark.main(arguments) == 0
    assert {r["workload"] for r in records.read(tmp_path / "throughput.csv")} == {HINGE_COLUMNS}
    assert {r["loss"] for r in records.read(tmp_path / "graph.csv")} == set(figures.LOSSES)


def test_a_spent_budget_leaves_out_the_rest_and_says_so(
    stand_ins: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--sections", "accuracy", "--budget", "1e-9", "--out", str(tmp_path)]
    assert benchmark.main(arguments) == 0
    assert not (tmp_path / "accuracy.csv").exists()
    printed = capsys.readouterr().out
    assert f"left out mse_loss float32 2^8: accuracy and {len(registry(Loss)) - 1} more" in printed
    assert "not measured" in printed


def test_a_failure_of_ours_is_an_error_and_a_failure_of_others_is_a_row(
    stand_ins: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(workload: Workload) -> Any:
        def call(*operands: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("broken on purpose")

        return call

    arguments = [
        "--loss",
        "l1_loss",
        "--dtype",
        "float32",
        "--sections",
        "throughput",
        "--sizes",
        "4",
        "--target",
        "0.001",
    ]
    monkeypatch.setattr(providers, "naive", broken)
    assert benchmark.main([*arguments, "--out", str(tmp_path / "a")]) == 0
    found = {r["provider"]: r for r in records.read(tmp_path / "a" / "throughput.csv")}
    assert found["naive"]["status"] == "failed: RuntimeError: broken on purpose"
    assert found["naive"]["ms"] == ""
    assert found["ours"]["status"] == "ok"

    monkeypatch.setattr(providers, "ours", broken)
    assert benchmark.main([*arguments, "--out", str(tmp_path / "b")]) == 1
    assert "broken on purpose" in capsys.readouterr().out


@pytest.mark.parametrize("usable", [True, False])
def test_a_crash_keeps_what_was_measured_and_goes_on_while_the_gpu_answers(
    stand_ins: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    usable: bool,
) -> None:
    def lost() -> None:
        raise RuntimeError("an illegal memory access was encountered")

    def crash(run: Any) -> Iterator[Any]:
        yield {"loss": "mse_loss", "cache": "empty", "status": "ok", "total_s": 0.4}
        if not usable:
            monkeypatch.setattr(torch.cuda, "synchronize", lost)
        raise RuntimeError("the section broke")

    monkeypatch.setattr(startup, "measure", crash)
    arguments = ["--loss", "mse_loss", "--sections", "startup,accuracy", "--out", str(tmp_path)]
    assert benchmark.main(arguments) == 1
    assert len(records.read(tmp_path / "startup.csv")) == 1
    assert (tmp_path / "accuracy.csv").exists() == usable
    captured = capsys.readouterr()
    assert "the section broke" in captured.err
    assert "Figures" in captured.out


def test_files_of_another_version_stop_a_run_before_it_measures(stand_ins: None, tmp_path: Path) -> None:
    (tmp_path / "graph.csv").write_text("other,columns\n1,2\n")
    assert benchmark.main(["--out", str(tmp_path)]) == benchmark.CANNOT
    assert [x.name for x in tmp_path.iterdir()] == ["graph.csv"]


@pytest.mark.parametrize("name", report.TABLES)
def test_tables_take_rows_of_failures(name: str) -> None:
    columns = benchmark.section(name).COLUMNS
    row = dict.fromkeys(columns) | {"status": "out of memory", "provider": "ours", "elements": 8, "kind": "call"}
    row |= {"workload": figures.SWEEP, "loss": "mse_loss", "what": "forward", "shape": "8"}
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(report.TABLES[name]([row]))
    assert "mse_loss" in console.export_text()


# ----------------------------------------------------------------------------------------------------------------------
# Parts of the host time


class Device(torch_device.TorchDevice):
    """A device without streams."""

    def __init__(self) -> None:
        self.stream = lambda: 0


def test_parts_of_a_call_add_up_to_the_whole(on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    device, launched = Device(), []
    launcher = object.__new__(compiler.Launcher)
    launcher.format, launcher.fixed, launcher.pack = "qd", [], struct.Struct("=qd").pack_into
    launcher._local = threading.local()

    def launch(launcher: compiler.Launcher, stream: int, table: int) -> None:
        launched.append((stream, *host_parts.arguments_of(launcher, table)))

    monkeypatch.setattr(compiler.Launcher, "launch", launch)
    monkeypatch.setattr(torch_device, "empty_strided", lambda *x: torch.empty_strided(*x[:2], dtype=x[2]))

    def reduce(*_: Any) -> torch.Tensor:
        value = device.empty((), (), "float32")
        launcher(device.stream(), device.address(value), 0.5)
        return value

    monkeypatch.setattr(execute, "value", reduce)
    monkeypatch.setattr(evaluation, "evaluate", lambda *operands: execute.value(operands))
    found = host_parts.parts(
        lambda *operands: evaluation.evaluate(*operands), Inputs(sweep(MSE, "float32", 6))[0], False
    )
    first, *_, last = found
    assert (first, last) == ("whole", "rest")
    assert {"kernel launches (1)", "allocations (1)"} <= set(found)
    assert sum(x.median for name, x in found.items() if name != "whole") == pytest.approx(found["whole"].median)
    assert launched[1][0] == 0 and launched[1][2] == 0.5
    assert launched.count(launched[1]) > 1000, "a launch is done again with the arguments that it was recorded with"


def test_cutting_off_what_is_not_called_is_an_error() -> None:
    value = torch.zeros(())
    with host_parts.cut(execute, "value", value):
        assert execute.value(1, 2) is value
    with (
        pytest.raises(RuntimeError, match=r"execute\.value is not on the path"),
        host_parts.cut(execute, "value", value),
    ):
        pass


def test_an_empty_function_costs_torch_alone_and_gives_its_gradient(on_cpu: None) -> None:
    value, gradient = torch.tensor(2.0), torch.full((3,), 5.0)
    p, t = torch.zeros(3, requires_grad=True), torch.zeros(3)
    result = host_parts._Nothing.apply(value, gradient, p, t)
    result.backward()
    assert result.item() == 2.0
    assert p.grad is not None
    assert p.grad.tolist() == [5.0] * 3


def test_the_child_prints_what_is_read(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], on_cpu: None
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(empty=lambda n: None))
    first_loss = importlib.import_module("benchmarking.first_loss")
    assert set(first_loss.OPERANDS) == set(startup.LOSSES)
    rand = torch.rand
    monkeypatch.setattr(torch, "rand", lambda *shape, device: rand(*shape))
    first_loss.main("mse_loss")
    printed = capsys.readouterr().out
    row = startup.outcome(0, printed, "")
    assert set(row) <= {*startup.COLUMNS}
    stages = ("import_s", "forward_s", "backward_s")
    assert row["total_s"] == pytest.approx(sum(json.loads(printed)[x] for x in stages))

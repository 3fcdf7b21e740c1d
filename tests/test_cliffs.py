"""The section ``cliffs`` of ``scripts/benchmark.py`` without a GPU: its cases, rows, table and picture.

Every case of the grid runs on the CPU with a few elements. Ours and eager each compute and differentiate it, and both
agree.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

import gpu_stand_ins

import benchmark
from benchmarking import (
    cliffs,
    plot,
    pointwise_cliffs,
    random_cases,
    reasons,
    records,
    regions_cliffs,
    report,
    softmax_cliffs,
    timing,
)
from benchmarking.cases import Case, Layout, channels_last, transposed
from benchmarking.draw import Draw
from benchmarking.figures import HVP
from benchmarking.softmax import SoftmaxWorkload
from cupylosses.definition.registry import functions, registry
from cupylosses.engines.pointwise.definition import Loss
from cupylosses.engines.regions.definition import RegionLoss
from cupylosses.engines.row_margin.definition import MarginLoss
from cupylosses.engines.softmax.definition import SoftmaxLoss

pytestmark = pytest.mark.programs

WHERE = dict.fromkeys(records.ENVIRONMENT, "x") | {"gpu": "GPU A", "date": "2025-01-01T00:00:00+00:00"}


def small(case: Case) -> Case:
    """The case with a few elements: equal sizes stay equal; sizes up to 4, such as a box's components, are kept."""
    sizes = sorted({n for shape in case.workload.shapes for n in shape})
    names = {n: n if n <= 4 else 5 + i for i, n in enumerate(sizes)}
    shapes = tuple(tuple(names[n] for n in shape) for shape in case.workload.shapes)
    beside = small(case.beside) if case.beside else None
    return replace(case, workload=replace(case.workload, shapes=shapes), beside=beside)


@pytest.fixture
def grid(monkeypatch: pytest.MonkeyPatch) -> list[Case]:
    """All cases with a few elements, in a run on the CPU."""
    gpu_stand_ins.stand_ins(monkeypatch)
    found = [small(case) for case in cliffs.cases()]
    monkeypatch.setattr(cliffs, "cases", lambda: found)
    monkeypatch.setattr(benchmark, "why_not", lambda: None)
    monkeypatch.setattr(records, "environment", lambda: WHERE)
    monkeypatch.setattr(timing, "FEWEST", 1)
    monkeypatch.setattr(timing.gc, "collect", lambda: 0)
    return found


def test_the_whole_grid_runs_and_its_rows_are_complete(
    grid: list[Case], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--sections", "cliffs", "--target", "1e-6", "--out", str(tmp_path)]
    assert benchmark.main(arguments) == 0
    rows = records.read(tmp_path / "cliffs.csv")
    assert [r["case"] for r in rows] == [x.title for x in grid]
    assert {r["status"] for r in rows} == {"ok"}
    # On the CPU, torch lacks the gradient of nll_loss for channels-last operands, the margin losses in 16 bits, and
    # their second derivatives.
    lacking = [r for r in rows if r["eager_status"] != "ok"]
    assert {r["loss"] for r in lacking} == {"nll_loss", *registry(MarginLoss)}
    for case, row in zip(grid, rows, strict=True):
        assert row["ms"] > 0 and row["copy_fraction"] > 0 and row["met"] in ("yes", "no")
        assert row["shortfall"] > 0 or row in lacking
        assert bool(row["contiguous_ms"]) == (not case.contiguous) and bool(row["beside_ms"]) == bool(case.beside)
    assert f"of {len(grid)} miss a bar" in capsys.readouterr().out.replace("\n", " ")


@pytest.mark.filterwarnings("ignore:.*which may not be what you want")
def test_eager_computes_the_same(grid: list[Case]) -> None:
    for case in grid:
        if case.workload.loss.name in registry(MarginLoss) and case.workload.dtype == "bfloat16":
            continue  # torch has these on GPUs only.
        operands = case.operands()
        call = case.eager()
        assert call is not None
        found, expected = (x(*operands).double() for x in (case.workload.ours(), call))
        torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02, msg=lambda m, c=case: f"{c.title}: {m}")


def test_each_reason_has_its_cases() -> None:
    titles = [x.title for x in cliffs.cases()]
    for parts in reasons.REASONS:
        assert any(reasons.explains(parts, title) for title in titles), parts


def test_each_committed_row_that_misses_a_bar_names_its_reason() -> None:
    rows = records.read(Path(__file__).resolve().parents[1] / "benchmarks" / "cliffs.csv")
    assert {x.title for x in cliffs.cases()} == {r["case"] for r in rows}
    missing = [r["case"] for r in rows if r["met"] != "yes" and not r["reason"]]
    assert not missing


def test_every_case_has_a_title_of_its_own_and_every_engine_its_cases() -> None:
    cases = cliffs.cases()
    assert len({x.title for x in cases}) == len(cases)
    known = [*registry().values(), *(functions()[x] for x in cliffs.FUNCTIONS)]
    assert {x.workload.loss.engine.name for x in cases} == {x.engine.name for x in known}
    # This much fits on a 16 GB GPU beside gradients and copies.
    assert max(x.workload.bytes for x in cases) < 3e9


@pytest.mark.parametrize(
    ("layout", "shape", "strides"),
    [
        (Layout(), (4, 5), (5, 1)),
        (transposed(2), (4, 5), (1, 4)),
        (transposed(3, 0, 2), (2, 3, 4), (1, 2, 6)),
        (channels_last(4), (2, 3, 4, 5), (60, 1, 15, 3)),
        (Layout(step=2), (4, 5), (10, 2)),
        (Layout(padding=3), (4, 5), (8, 1)),
        (Layout(offset=1), (), ()),
    ],
)
def test_operands_are_placed_in_their_layout(layout: Layout, shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    placed = layout.place(x)
    assert placed.stride() == strides == layout.strides(shape)
    assert torch.equal(placed, x) and placed.storage_offset() == layout.offset
    assert placed.untyped_storage().data_ptr() % 64 == 0, "an offset of one element misaligns only from there"


def test_traffic_counts_both_passes_of_what_is_not_reduced_and_the_vectors_of_second_derivatives() -> None:
    pair, logits = pointwise_cliffs.pair, softmax_cliffs.logits
    full = 4 * 64
    # Forward reads both operands and stores the losses, which the sum reads. Backward reads both operands again and
    # stores the gradient.
    assert Case("", pair("mse_loss", (8, 8), "float32", reduction="none")).traffic == (2 + 1 + 1 + 2 + 1) * full
    assert Case("", pair("mse_loss", (8, 8), "float32", reduction="none"), "forward").traffic == 4 * full
    assert Case("", pair("mse_loss", (8, 8), "float32"), HVP).traffic == 4 * full
    voxels = regions_cliffs.regions(registry(RegionLoss)["dice_loss"], (1, 8, 8), "float32", "int64")
    assert Case("", voxels, HVP).traffic == 2 * (2 * full + 8 * 8) + full, "sums over voxels come first"
    rows = logits((8, 8), "float32", reduction="none")
    assert Case("", rows).traffic == 2 * (full + 8 * 8) + full + 2 * 8 * 4
    nll = logits((2, 8, 4), "float32", loss="nll_loss")
    assert Case("", nll).traffic == 8 * 8 + 8 * 4 + full, "the label's log-probability alone, and the gradient"


def timings(**ms: float) -> dict[str, timing.Timing]:
    return {name: timing.Timing(x, x, x, 9) for name, x in ms.items()}


@pytest.mark.parametrize(
    ("ms", "shortfall"),
    [
        ({"ours": 1.0, "eager": 2.0, "copy": 0.6}, 0.5 / 0.6),
        ({"ours": 1.0, "eager": 2.0, "copy": 0.25}, 2.0),
        ({"ours": 3.0, "eager": 2.0, "copy": 3.0}, 1.5),
        ({"ours": 3.0, "contiguous": 1.5, "copy": 3.0}, 2.0),
        ({"ours": 2.4, "beside": 1.0, "copy": 2.4}, 2.0),
    ],
)
def test_the_bar_that_is_missed_by_most_counts(ms: dict[str, float], shortfall: float) -> None:
    case = Case("", pointwise_cliffs.pair("mse_loss", (8, 8), "float32"), copy_bar=0.5, beside_bar=1.2)
    row = cliffs.row(case, dict.fromkeys(ms, "ok"), timings(**ms))
    assert row["shortfall"] == pytest.approx(shortfall)
    assert row["met"] == ("yes" if shortfall <= 1 else "no")
    assert set(row) <= set(cliffs.COLUMNS)


def printed(rows: Sequence[records.Row]) -> str:
    console = Console(width=300, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(report.cliffs(rows))
    return console.export_text()


def test_the_worst_case_is_printed_first_and_one_that_failed_before_it() -> None:
    case = Case("", pointwise_cliffs.pair("mse_loss", (8, 8), "float32"), copy_bar=0.5)
    rows = []
    for name, ms in {"good": {"ours": 1.0, "copy": 0.9}, "bad": {"ours": 9.0, "copy": 0.9}, "broken": {}}.items():
        found = cliffs.row(replace(case, group=name), {"ours": "ok" if ms else "out of memory"}, timings(**ms))
        rows.append(found)
    text = printed(rows)
    assert text.index("broken") < text.index("bad") < text.index("good")
    assert "2 of 3 miss a bar" in text and "out of memory" in text


def test_cases_are_chosen_by_parts_of_their_titles_and_by_loss(grid: list[Case], tmp_path: Path) -> None:
    def titles(*more: str) -> list[str]:
        out = tmp_path / "-".join(more)
        arguments = ["--sections", "cliffs", "--target", "1e-6", "--out", str(out), *more]
        assert benchmark.main(arguments) == 0
        return [r["case"] for r in records.read(out / "cliffs.csv")]

    few = titles("--cases", "few classes", "--quick")
    assert few == [x.title for x in grid if x.group == "few classes" and x.quick]
    named = titles("--cases", "heavy", "unaligned operands", "--loss", "wing_loss")
    assert [x.split(",")[0] for x in named] == ["heavy arithmetic"]


def test_random_cases_run_and_a_seed_draws_them_again(
    grid: list[Case], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = list(registry().values())
    drawn = random_cases.cases(losses, 200, 7)
    assert [x.title for x in drawn] == [x.title for x in random_cases.cases(losses, 200, 7)]
    assert {x.workload.loss.engine.name for x in drawn} == {x.engine.name for x in losses}
    assert max(x.workload.bytes for x in drawn) < 6e9
    monkeypatch.setattr(random_cases, "cases", lambda *_: [small(x) for x in drawn[:30]])
    arguments = ["--sections", "random_cases", "--target", "1e-6", "--out", str(tmp_path)]
    assert benchmark.main(arguments) == 0
    rows = records.read(tmp_path / "random_cases.csv")
    assert [r["status"] for r in rows] == ["ok"] * 30


def test_random_rows_have_options_of_their_targets() -> None:
    loss = registry(SoftmaxLoss)["cross_entropy"]
    drawn = [SoftmaxWorkload.random(loss, Draw(seed)) for seed in range(200)]
    of_kind = {x.kind: [y for y in drawn if y.kind == x.kind] for x in drawn}
    assert len(of_kind) == 2 and all(any(x.case for x in y) for y in of_kind.values())
    for x in drawn:
        assert x.kind == "indices" or not x.case.keys() & {*loss.only_of_indices}, x.case


@pytest.mark.filterwarnings("ignore:.*is broadcast against:UserWarning")
def test_torch_computes_what_random_cases_ask_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager applies the case's reduction, whether operands are broadcast or keep their default numbers."""
    gpu_stand_ins.stand_ins(monkeypatch)
    for case in random_cases.cases(list(registry(Loss).values()), 60, 11):
        # Eager promotes operands of mixed dtypes to one of them, so all are float64 here.
        case = small(replace(case, workload=replace(case.workload, others=""), layouts={}))
        operands = [x.detach().double() if x.is_floating_point() else x for x in case.operands()]
        found, right = case.workload.ours()(*operands), case.eager()(*operands)
        torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-7, equal_nan=True, msg=case.title)


def test_a_run_without_sections_leaves_the_cases_out() -> None:
    assert set(report.TABLES) - set(benchmark.parser().parse_args([]).sections) == {"cliffs", "random_cases"}


def test_the_distribution_is_drawn_beside_the_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plot, "draw", lambda directory, picture: None)
    picture = tmp_path / "docs" / "picture.png"
    assert plot.draw_all(tmp_path, picture) == [picture], "without rows there is nothing to draw"
    case = Case("", pointwise_cliffs.pair("mse_loss", (2048, 2048), "float32"), copy_bar=0.5)
    writer = records.Writer(tmp_path, "cliffs", cliffs.COLUMNS, WHERE)
    for name, ms in (("a", 1.0), ("b", 4.0), ("broken", None)):
        measured: dict[str, float] = {"ours": ms, "eager": 2 * ms, "copy": 0.8} if ms else {}
        status = "ok" if ms else "out of memory"
        writer.write(cliffs.row(replace(case, group=name), {"ours": status}, timings(**measured)))
    rows: list[Any] = records.read(tmp_path / "cliffs.csv")
    assert plot.distribution(rows, "copy_fraction") == pytest.approx([0.2, 0.8])
    assert plot.draw_all(tmp_path, picture)[1].read_bytes().startswith(b"\x89PNG")

"""Mutation tests: checks on the host must notice each defect seeded in the kernels or in the code that drives them.

The battery consists of checks of the suite, none of them made for a mutant: functions of ``cupylosses.testing`` that
other tests call for every representative, or for every loss. Here one representative is enough, and shapes are the
smallest that reach several blocks, chunks and slices, and a tail. A mutant names the checks that must fail; others do
not run, because each kernel of a mutant is compiled.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from importlib import import_module
from math import inf
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from tools import host_properties as host_properties
from tools import log_probs as log_probs_properties
from tools.linear_softmax import properties as layer_properties
from tools.mutants import MUTANTS, OUTSIDE
from tools.mutations import Mutant, StaleMutant, applied
from tools.regions import properties as region_properties
from tools.representatives import representatives
from tools.row_margin import properties as margin_properties
from tools.row_statistics import properties as statistics_properties
from tools.sequence import properties as sequence_properties
from tools.softmax import properties as term_properties

import cupylosses.functional as F
from cupylosses.backends.torch import device as torch_device
from cupylosses.engines import relayout
from cupylosses.engines.pointwise import codegen as pointwise_codegen
from cupylosses.engines.pointwise.definition import Loss, modified
from cupylosses.jit.sources import expand
from cupylosses.testing import host, properties
from cupylosses.testing.check import run
from cupylosses.testing.softmax import properties as row_properties

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux" or host.find_compiler() is None, reason="no C++ compiler on Linux"),
    pytest.mark.filterwarnings("ignore:.*broadcast"),
]

# ----------------------------------------------------------------------------------------------------------------------
# The battery


#: A representative that every check accepts. Its operands may be labels, narrow enough for offsets beyond 32 bits.
FUNCTION = next(
    getattr(F, x.name) for x in representatives() if len(x.operands) == 2 and all(y.integer for y in x.operands)
)

#: Executions that differ in the order of threads, in the grid, and in the number of batches per chunk, one or several.
EXECUTIONS: tuple[tuple[Callable[[], Any], dict[str, int]], ...] = (
    (nullcontext, {"seed": 1}),
    (host_properties.few_groups, {"seed": 2, "processors": 1}),
)


def executed(check: Callable[..., None], function: Any = FUNCTION, **setting: Any) -> Callable[[], None]:
    """Returns a check of a property of ``properties`` in every execution."""

    def run() -> None:
        for groups, chosen in EXECUTIONS:
            with groups(), host.execution(**chosen):
                check(function, function.loss, **setting)

    return run


def truth(*shapes: tuple[int, ...], **setting: Any) -> Callable[[], None]:
    """Returns a check of value and gradients against the truth, for several shapes with the same kernels."""
    checks = [executed(properties.agrees_with_truth, shape=shape, **setting) for shape in shapes]

    def run() -> None:
        for check in checks:
            check()

    return run


def masked(**setting: Any) -> Callable[[], None]:
    """Returns a check of value and gradients against the truth, with a mask."""

    def check(function: Any, loss: Loss) -> None:
        properties.agrees_with_truth(function, modified(loss, mask=True), **setting)

    return executed(check)


def weighted(**setting: Any) -> Callable[[], None]:
    """Returns a check of value and gradients against the truth, with weights.

    The gradient of broadcast weights is a sum of its own.
    """

    def check(function: Any, loss: Loss) -> None:
        properties.agrees_with_truth(function, modified(loss, weight="array"), **setting)

    return executed(check)


def every_second_of_rows_apart() -> None:
    """Rows of every second element, with gaps between rows."""
    operands = [x[:, :258:2] for x in torch.randn(len(FUNCTION.loss.operands), 67, 261)]
    with host.execution(seed=1):
        found, expected = (
            run(partial(FUNCTION, reduction="none"), x, (True,) * len(x), torch.ones(67, 129))
            for x in (operands, [x.contiguous() for x in operands])
        )
    assert torch.equal(found.value, expected.value)
    assert all(map(torch.equal, found.gradients, expected.gradients))


#: Setting that returns a value per row.
PER_ROW = {"reduction": "none"}


def rows(check: Callable[..., None], layout: str, *settings: dict[str, Any], **how: Any) -> Callable[[], None]:
    """Returns a check of a property of ``row_properties`` in one layout, with each setting; ``how`` draws logits."""

    def run() -> None:
        with host.execution(seed=1):
            for chosen in settings or ({},):
                check(row_properties.of_layout(layout, **how), **chosen)

    return run


def streamed() -> None:
    """Forward only, with rows read in parts as if there were many."""
    with host.execution(seed=1), row_properties.parts():
        row_properties.value_agrees_with_truth(row_properties.draw((3, 4507), 1))


def pipelined() -> None:
    """Forward only, of short rows: warps that process several rows each, and warps that share a row."""
    with host.execution(seed=1), row_properties.pipelined():
        for shape in ((70, 128), (21, 1104)):
            row_properties.value_agrees_with_truth(row_properties.draw(shape, 1))


def cut_by_tiles() -> None:
    """Tiles of gradients that start within a row."""
    with host.execution(seed=1):
        row_properties.agrees_with_truth(row_properties.draw((129, 300), 1, loss="nll_loss"))


def tallied(classes: int) -> Callable[[], None]:
    """A mean of more rows than kernels count before they evaluate them; some labels are ignored."""

    def run() -> None:
        with host.execution(seed=1):
            row_properties.value_agrees_with_truth(row_properties.draw((1100, classes), 1))

    return run


def several_edges() -> None:
    """Lanes that process several elements at the ends of a row."""
    with host.execution(seed=1), row_properties.few_lanes_share_rows():
        row_properties.agrees_with_truth(row_properties.draw((65, 37), 1, dtype="bfloat16"))


def in_registers(shape: tuple[int, ...], **how: Any) -> Callable[[], None]:
    """Returns a check of rows that are held in registers, although there are few."""

    def run() -> None:
        with host.execution(seed=1), row_properties.few_rows_are_many():
            row_properties.agrees_with_truth(row_properties.draw(shape, 1, **how))

    return run


def with_small_gaps() -> None:
    """Rows with gaps between them. Memory ends with the last class of the last row."""
    memory = torch.randn(162 * 7 + 5, generator=torch.Generator().manual_seed(0)).half()
    rows = row_properties.Drawn(memory.as_strided((163, 5), (7, 1)), torch.arange(163) % 5, 1)
    with host.execution(seed=1), row_properties.few_rows_are_many():
        row_properties.agrees_with_truth(rows)


def copied() -> None:
    """A copy with another fastest dimension, in tiles that are partial along both dimensions."""
    x = torch.arange(2 * 9 * 1033).view(2, 9, 1033)
    with host.execution(seed=1), mock.patch.object(relayout, "LEAST", 1):
        assert torch.equal(torch_device.copied(x, (9 * 1033, 1, 9)), x)


def second_in_registers() -> None:
    """Second derivatives of rows that a warp loads and stores together."""
    with host.execution(seed=1), row_properties.few_rows_are_many():
        row_properties.second_agrees_with_truth(row_properties.draw((163, 6), 1))


def second_by_logits() -> None:
    """Second derivatives of rows against targets per class that are read again, by the logits only."""
    call = term_properties.draw_terms("cross_entropy", (2, 4099), places=("sliced", "contiguous"))
    with host.execution(seed=1):
        row_properties.second_by_logits_agrees_with_truth(call)


def second_of_impossible_classes() -> None:
    """The second derivative of a logit of -inf is 0, even in an infinite direction; others are not affected."""
    x, v = torch.randn(2, 3, 43, generator=torch.Generator().manual_seed(0))
    x[:, 2], v[:, 2] = -inf, inf
    x.requires_grad_()
    with host.execution(seed=1):
        loss = F.cross_entropy(x, torch.zeros(3, dtype=torch.int64), reduction="sum")
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        (found,) = torch.autograd.grad(gradient, x, v)
    assert bool(found.isfinite().all()) and bool((found[:, 2] == 0).all())


def sliced() -> None:
    """Rows of two tiles that blocks share in slices, one of which contains a part of both tiles."""
    with row_properties.few_slices(5), host.execution(seed=1):
        row_properties.agrees_with_truth(row_properties.draw((2, 1025, 40), 1))


def sliced_in_one_pass() -> None:
    """Value and gradient of a few rows that blocks share in slices."""
    with row_properties.some_rows_are_many(), host.execution(seed=1):
        row_properties.writes_one_gradient_in_one_pass_or_two(row_properties.of_layout("column_slices"))


def few_teams() -> None:
    """Threads that claim many groups of rows, in one launch after another."""
    with row_properties.blocks(2, "cpu"):
        for seed in range(2):
            row_properties.agrees_with_truth(row_properties.draw((163, 43), 1, seed=seed))


def terms(check: Callable[..., None], row_loss: str, layout: str, **drawn: Any) -> Callable[[], None]:
    """Returns a check of a property of ``tools/softmax/properties.py`` for one loss in one layout."""

    def run() -> None:
        with term_properties.term_chip(), host.execution(seed=1):
            check(term_properties.draw_terms(row_loss, term_properties.TERM_LAYOUTS[layout], **drawn))

    return run


def grads_by_p_in_a_window() -> None:
    """Rows of 16 bits that are as long as those of the layout "windowed" in 32 bits."""
    with term_properties.term_chip(), host.execution(seed=1):
        call = term_properties.draw_terms("distillation_loss, mixed", (9, 8207), dtypes=("bfloat16", "bfloat16"))
        row_properties.agrees_with_truth(call, both=False)


def of_shape(check: Callable[..., None], layout: str) -> Callable[[], None]:
    """Returns a check of a property of ``tools/softmax/properties.py`` that has a shape as its argument."""

    def run() -> None:
        with term_properties.term_chip(), host.execution(seed=1):
            check(term_properties.TERM_LAYOUTS[layout])

    return run


def hosted(check: Callable[..., None], *settings: tuple[Any, ...]) -> Callable[[], None]:
    """Returns a check of a property with each of these argument tuples."""

    def run() -> None:
        with host.execution(seed=1):
            for chosen in settings or ((),):
                check(*chosen)

    return run


#: One element; one block of several chunks; several blocks; whole batches except for one element; several batches per
#: chunk.
SIZES = ((1,), (1001,), (2503,), (2559,), (10301,))

BATTERY: dict[str, Callable[[], None]] = {
    "truth": truth(*SIZES),
    "truth, elements": truth(*SIZES, reduction="none"),
    "truth, bfloat16": truth(*SIZES, reduction="none", dtypes=("bfloat16",)),
    "truth, whole batches, loaded ahead": executed(
        properties.agrees_with_truth, F.binary_cross_entropy, shape=(2048,), dtypes=("bfloat16", "bfloat16")
    ),
    "truth, misaligned": truth(*SIZES, layout="misaligned"),
    "truth, sliced": truth((67, 129), (40, 7), layout="sliced"),
    "truth, strided": truth((67, 129), (40, 7), layout="strided"),
    "every second element of rows apart": every_second_of_rows_apart,
    "truth, mixed": truth((67, 129), (40, 72), layout="mixed"),
    "truth, eight dimensions": truth((67, 129), (5, 3), layout="eight_d"),
    "truth, row": truth((67, 129), (1301, 5), layout="row"),
    "truth, row, elements": truth((67, 129), (1301, 5), layout="row", reduction="none"),
    "truth, column": truth((67, 129), layout="column"),
    # Rows that are joined until vectors divide them, and rows that share vectors.
    "truth, odd rows": truth((1801, 33), layout="row"),
    "truth, long odd rows": truth((17, 3077), layout="column"),
    "truth, sums of odd rows": truth((2001, 9), dtypes=("bfloat16",), layout="column"),
    "truth, scalar": truth((67, 129), layout="scalar"),
    "repeats": executed(properties.repeats_bit_by_bit, shape=(2503,)),
    "alone and together": executed(properties.differentiates_operands_alone_and_together),
    # Every loss passes this check; this one has a derivative of 0 on one side, where it does not produce a NaN itself.
    "NaN": executed(properties.propagates_nan, F.hinge_loss, layouts=("contiguous", "outer"), reductions=("mean",)),
    # One of the two divides a weighted mean by the weights, and the other by the number of unmasked elements.
    "weights and masks": executed(properties.weighs_masks_and_reduces),
    "weights and masks, by count": executed(properties.weighs_masks_and_reduces, F.huber_loss),
    "shield": executed(properties.shields_what_does_not_count),
    "shield, by count": executed(properties.shields_what_does_not_count, F.huber_loss),
    "normalizer": executed(properties.weighs_masks_and_reduces, normalizer=7.0),
    "truth, column of a mask": masked(layout="column"),
    "truth, column of a mask along a dimension": masked(layout="column", dim=(1,)),
    "truth, row of weights, elements": weighted(shape=(1301, 5), layout="row", reduction="none"),
    "truth, along a dimension": truth((67, 129), dim=(0,)),
    "one pass or two": executed(properties.writes_one_gradient_in_one_pass_or_two, shape=(2503,)),
    "beyond 32 bits": executed(properties.reads_beyond_32_bits),
    "any order": partial(host_properties.keeps_its_bits_in_any_order, FUNCTION, FUNCTION.loss, shape=(2503,)),
    "rows, subwarp": rows(row_properties.agrees_with_truth, "subwarp", {}, PER_ROW),
    "rows, thread_per_row": rows(row_properties.agrees_with_truth, "thread_per_row"),
    "rows, thread_per_row_packed": rows(row_properties.agrees_with_truth, "thread_per_row_packed"),
    "rows, packed": in_registers((163, 6), dtype="float16"),
    "rows, paired": in_registers((2, 17, 521), dtype="bfloat16"),
    "rows, packed with gaps": in_registers((163, 14), dtype="float16", place="sliced"),
    "rows, packed with gaps, to the end of memory": with_small_gaps,
    "rows, column_tiles": in_registers((1, 57, 37)),
    "rows, staggered": in_registers((2, 50, 119)),
    "rows, column_slices": sliced,
    "rows, column_slices in one pass": sliced_in_one_pass,
    "rows, several edges": several_edges,
    "rows, tallied": tallied(36),
    "rows, tallied by lanes": tallied(4),
    "rows, streamed": streamed,
    "rows, pipelined": pipelined,
    "rows, claimed": few_teams,
    "rows, capped": rows(row_properties.agrees_with_truth, "block, cluster", {"softcap": 3.0}, dtype="bfloat16"),
    "rows, block": rows(row_properties.agrees_with_truth, "block"),
    "rows, shifted": rows(row_properties.agrees_with_truth, "block", dtype="bfloat16", place="sliced"),
    "rows, shifted, in a warp": rows(row_properties.agrees_with_truth, "subwarp", dtype="bfloat16", place="sliced"),
    "rows, cluster": rows(row_properties.agrees_with_truth, "block, cluster"),
    "rows, two_pass": rows(row_properties.agrees_with_truth, "two_pass"),
    "rows, label_only": rows(row_properties.agrees_with_truth, "label_only_tiles", {}, PER_ROW),
    "rows, cut by tiles": cut_by_tiles,
    "rows, label_only apart": rows(row_properties.agrees_with_truth, "label_only_columns"),
    "rows, label_only and left out": rows(row_properties.leaves_rows_out, "label_only_tiles"),
    "rows, smoothed": rows(row_properties.agrees_with_truth, "subwarp", {"label_smoothing": 0.1}),
    "rows, weighted": rows(row_properties.agrees_with_truth, "subwarp", {"weight": torch.linspace(0.0, 2.0, 43)}),
    "rows, second": rows(
        row_properties.second_agrees_with_truth, "subwarp", *({"how": x} for x in row_properties.DIRECTIONS)
    ),
    "rows, second, block": rows(row_properties.second_agrees_with_truth, "block", {"how": "of a class"}),
    "rows, second, apart": rows(row_properties.second_agrees_with_truth, "thread_per_row", {"how": "transposed"}),
    "rows, second, classes": rows(row_properties.second_agrees_with_truth, "thread_per_row"),
    "rows, second, packed": second_in_registers,
    "rows, second, impossible": second_of_impossible_classes,
    "rows, second, equal": rows(row_properties.second_of_equal_logits, "subwarp"),
    "rows, one pass or two": rows(row_properties.writes_one_gradient_in_one_pass_or_two, "subwarp"),
    "rows, left out": rows(row_properties.leaves_rows_out, "subwarp"),
    "rows, labels": rows(row_properties.survives_labels_out_of_range, "subwarp"),
    "dense, subwarp": terms(row_properties.agrees_with_truth, "distillation_loss, mixed", "subwarp"),
    "dense, block": terms(row_properties.agrees_with_truth, "cross_entropy", "block"),
    "dense, cluster": terms(row_properties.agrees_with_truth, "cross_entropy", "block, cluster"),
    "dense, windowed": terms(row_properties.agrees_with_truth, "distillation_loss, mixed", "windowed"),
    "dense, packed": terms(row_properties.agrees_with_truth, "cross_entropy", "packed_rows"),
    "dense, thread_per_row": terms(row_properties.agrees_with_truth, "cross_entropy", "thread_per_row"),
    "dense, shared by warps": terms(row_properties.agrees_with_truth, "cross_entropy", "columns, shared by warps"),
    "dense, everything": terms(row_properties.agrees_with_truth, "cross_entropy with everything", "subwarp"),
    "dense, second": terms(row_properties.second_agrees_with_truth, "distillation_loss, mixed", "subwarp"),
    "dense, second, by logits": second_by_logits,
    "dense, second, equal": terms(term_properties.terms_second_of_equal_logits, "distillation_loss, mixed", "subwarp"),
    "dense, second, sure teacher": terms(
        partial(row_properties.second_agrees_with_truth, moving=(True, False)),
        "distillation_loss",
        "subwarp",
        sure=(False, True),
    ),
    "dense, second, sure target": terms(
        partial(row_properties.second_agrees_with_truth, moving=(False, True)),
        "kl_div_with_logits of logarithms",
        "subwarp",
        sure=(True, True),
        temperature=1.0,
    ),
    "dense, sure": of_shape(term_properties.terms_keep_sure_rows, "subwarp"),
    "dense, alone": of_shape(term_properties.terms_keep_sure_teachers, "packed_rows"),
    "dense, alone, both": terms(row_properties.agrees_with_truth, "distillation_loss", "packed_rows"),
    "dense, alone, at once": terms(
        partial(row_properties.agrees_with_truth, both=False),
        "distillation_loss",
        "packed_rows, of many classes",
        dtypes=("bfloat16", "bfloat16"),
    ),
    "dense, alone, shared by warps": terms(
        partial(row_properties.agrees_with_truth, both=False), "distillation_loss", "columns, shared by warps"
    ),
    "dense, at once": terms(
        partial(row_properties.leaves_rows_out, reductions=("none",), both=False),
        "distillation_loss",
        "subwarp",
        dtypes=("bfloat16", "bfloat16"),
    ),
    "dense, dh/dp": terms(
        partial(row_properties.agrees_with_truth, both=False),
        "distillation_loss, mixed",
        "subwarp",
        dtypes=("bfloat16", "bfloat16"),
        sure=(True, True),
    ),
    "dense, dh/dp of values that are not covered": of_shape(term_properties.terms_read_teachers_again, "subwarp"),
    "dense, dh/dp in a window": grads_by_p_in_a_window,
    "dense, equal": of_shape(term_properties.terms_share_equal_logits, "subwarp"),
    "copies": copied,
    "layers, chunks": hosted(partial(layer_properties.agrees_with_truth, "chunks", linear_bias=True)),
    "layers, second": hosted(layer_properties.second_agrees_with_truth),
    "layers, weighted": hosted(layer_properties.weighs_rows),
    "margins": hosted(margin_properties.agrees_with_formula, ("multi_margin_loss", 5, 43)),
    "margins of lists": hosted(margin_properties.agrees_with_formula, ("multilabel_margin_loss", 5, 43)),
    "margins of long lists": hosted(margin_properties.agrees_with_formula, ("multilabel_margin_loss", 3, 43, 40)),
    "margins, second": hosted(margin_properties.second_agrees_with_differences),
    "statistics": hosted(statistics_properties.agrees_with_formula, ("triplet_margin_loss", 3, 1000)),
    "statistics, parts": hosted(statistics_properties.agrees_with_formula, ("triplet_margin_loss", 3, 3000)),
    "statistics, apart": partial(statistics_properties.agrees_where_parts_have_blocks, "triplet_margin_loss", 3, 9000),
    "statistics, held": hosted(statistics_properties.agrees_with_formula, ("triplet_margin_loss", 3, 350)),
    "statistics, in registers": hosted(statistics_properties.agrees_in_registers, ("triplet_margin_loss", 5, 3)),
    "statistics, staged": hosted(
        statistics_properties.agrees_where_warps_stage_gradients, ("triplet_margin_loss", 70, 15)
    ),
    "statistics, norms": hosted(
        partial(statistics_properties.agrees_with_formula, p=200.0, margin=9.0), ("triplet_margin_loss", 3, 9)
    ),
    "statistics, maxima": hosted(
        partial(statistics_properties.agrees_with_formula, p=inf, eps=0.0, margin=9.0), ("triplet_margin_loss", 3, 40)
    ),
    "log-probabilities": hosted(
        log_probs_properties.agrees_with_truth, (9, 300, 3), (3, 5000, 2), (4100, 7, 1), (9, 300, 3, "bfloat16")
    ),
    "log-probabilities, second": hosted(
        log_probs_properties.second_agrees_with_truth, (9, 300, 3), (3, 5000, 2), (4100, 7, 1), (9, 300, 3, "bfloat16")
    ),
    "log-probabilities, second, capped": hosted(
        partial(log_probs_properties.second_agrees_with_truth, softcap=4.0), (9, 300, 3)
    ),
    "regions": hosted(partial(region_properties.agrees_with_truth, alpha=0.2, beta=0.7), ("tversky_loss", "vectors")),
    "regions, ignored": hosted(region_properties.leaves_voxels_out),
    "regions, pooled": hosted(partial(region_properties.agrees_with_truth, pool="class"), ("dice_loss", "vectors")),
    "regions, tiles": hosted(region_properties.agrees_with_truth, ("dice_loss", "many")),
    "regions, lanes": hosted(
        partial(region_properties.agrees_with_truth, label_smoothing=0.1), ("dice_ce_loss", "many")
    ),
    "regions, by warps": hosted(region_properties.moves_vectors_by_warps),
    "regions, second": hosted(region_properties.second_agrees_with_differences),
    "regions, absent": hosted(region_properties.leaves_absent_classes_out),
    "regions, confident": hosted(region_properties.keeps_the_digits_of_confident_voxels),
    "sequences": hosted(sequence_properties.agrees_with_truth, (61, 9), (400, 70)),
    "sequences, logits": hosted(
        partial(sequence_properties.agrees_with_truth, logits=True), (61, 9), (61, 9, 1101, 20.0)
    ),
    "sequences, logits in parts": hosted(sequence_properties.agrees_with_truth_in_parts, (61, 9, 1101, 20.0)),
    "alignments": hosted(sequence_properties.aligns_as_truth, (61, 9), (150, 70)),
    "records": partial(host_properties.goes_by_the_note_of_each_warp, FUNCTION, FUNCTION.loss, shape=(2503,)),
}

#: Exceptions with which a check reports a defect. Any other exception is an error in the mutant itself.
CAUGHT = (AssertionError, host.KernelFault)


@pytest.mark.programs
@pytest.mark.parametrize("check", BATTERY)
def test_right_library_passes(check: str) -> None:
    BATTERY[check]()


@pytest.mark.programs
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda x: x.name)
def test_mutant_is_caught(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    if not mutant.races and "CUPYLOSSES_HOST_SANITIZE" not in os.environ:
        monkeypatch.setenv("CUPYLOSSES_HOST_SANITIZE", "")
    with applied(mutant):
        for check in mutant.caught_by:
            try:
                BATTERY[check]()
            except CAUGHT:
                continue
            pytest.fail(f"{mutant.name}: not noticed by {check}")


#: AddressSanitizer ends the process with status 1 at the first error, so each mutant has a process of its own. These
#: processes are forked, because importing torch takes long in a build with AddressSanitizer.
SANITIZED = """
import runpy, sys
sys.argv = ["host", "--sanitize", "address", "--", "-c", {program!r}]
runpy.run_module("cupylosses.testing.host", run_name="__main__")
"""
OUTCOMES = """
import contextlib, os, sys, warnings
warnings.simplefilter("ignore")
sys.path.insert(0, {tests!r})
from test_mutations import BATTERY, OUTSIDE, applied, host, torch

def outcome(change, checks):
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    try:
        with change:
            for check in checks:
                BATTERY[check]()
        os._exit(0)
    finally:
        os._exit(2)

def probe(n):
    memory = torch.zeros(16, dtype=torch.float64)
    source = 'extern "C" __global__ void probe(double* a, long long n) {{ a[threadIdx.x + n] = 1; }}'
    host.run_source("probe", source, [memory.data_ptr(), n], 1, 16)

BATTERY |= {{"inside": lambda: probe(0), "outside": lambda: probe(1)}}
print(outcome(contextlib.nullcontext(), ["inside", *{{x for mutant in OUTSIDE for x in mutant.caught_by}}]))
print(outcome(contextlib.nullcontext(), ["outside"]))
for mutant in OUTSIDE:
    print(outcome(applied(mutant), mutant.caught_by))
"""


@pytest.mark.programs
def test_accesses_outside_of_an_allocation_are_caught(python: Callable[..., str]) -> None:
    program = OUTCOMES.format(tests=str(Path(__file__).resolve().parent))
    # Nobody reads the report, and symbolizing it takes longer than the checks.
    found = python(SANITIZED.format(program=program), ASAN_OPTIONS="symbolize=0").split()
    assert found == ["0", "1", *["1"] * len(OUTSIDE)], "the right library, a wrong kernel, then the mutants"


def test_mutants_are_undone() -> None:
    def names() -> dict[str, dict[str, int]]:
        """Names of every module of the library, with the identities of their values."""
        modules = {n: dict(vars(x)) for n, x in sys.modules.items() if n.startswith("cupylosses.")}
        return {n: {k: id(v) for k, v in x.items()} for n, x in modules.items()}

    # Lazily imported modules are imported first, so that they do not count as changes.
    for mutant in MUTANTS:
        if mutant.file.endswith(".py"):
            import_module(mutant.file.removesuffix(".py").replace("/", "."))
    text, before = expand(pointwise_codegen.SUMMING), names()
    for mutant in MUTANTS:
        with applied(mutant):
            pass
    assert expand(pointwise_codegen.SUMMING) == text
    assert names() == before


@pytest.mark.parametrize(
    ("function", "pattern", "times"),
    [("arrive_last", "no such text", 0), ("arrive_last", r"__syncthreads\(\);", 2), ("no_such_function", ".", 0)],
)
def test_stale_mutant_is_an_error(function: str, pattern: str, times: int) -> None:
    mutant = Mutant("a name", "kernels/core/reduce.cuh", function, pattern, "", ())
    with pytest.raises(StaleMutant, match=rf"a name: `{function}` of kernels/core/reduce\.cuh matches {times} times, "):
        mutant.text()


def test_a_mutant_changes_one_place_of_its_function_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = """
struct Sum { int n; Sum(int n) : n(n) { call(n); } };
int add(int (&x)[2], Sum y) const { if (x[0]) { return add(x,
    y); } return 1; }
int call(int n) { return add(n, 1); }
"""
    module = "def call(n):\n    return add(n,  1)\n\n\nclass Sum:\n    n = 1\n\n    def call(self):\n        return 2\n"
    (tmp_path / "x.cuh").write_text(kernel)
    (tmp_path / "x.py").write_text(module)
    monkeypatch.setattr(Mutant, "path", property(lambda self: tmp_path / self.file))
    for file, function, pattern, new, old, changed in [
        ("x.cuh", "add", r"add\(x, y\)", "0", "add(x,\n    y)", "0"),
        ("x.cuh", "Sum", r"call\(n\)", r"call(-\g<0>)", "{ call(n)", "{ call(-call(n))"),
        ("x.cuh", "call", "1", "2", "add(n, 1)", "add(n, 2)"),
        ("x.py", "call", "n, 1", "1, n", "n,  1", "1, n"),
        ("x.py", "Sum", "return 2", "return 3", "return 2", "return 3"),
    ]:
        original = (tmp_path / file).read_text()
        assert Mutant("a name", file, function, pattern, new, ()).text() == original.replace(old, changed) != original

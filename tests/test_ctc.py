"""CTC losses: exact cases, accuracy, edges, properties, forms of arguments, derivatives, transforms and libraries."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise
from math import inf, isnan, log, nan, sqrt
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from devices import HOST, KERNELS
from grids import in_turn, short_or_full
from mpmath import mp
from tools import cupy_stand_in as stand_in
from tools.sequence import truth

import cupylosses
from cupylosses import functional as F
from cupylosses import nn
from cupylosses.backends.torch import device as torch_device
from cupylosses.backends.torch import plans
from cupylosses.engines.sequence import plan as sequence_plan

kernels = pytest.mark.kernels
#: Runs a test with the formulas on the CPU, and with the kernels.
paths = pytest.mark.parametrize(
    "device", [pytest.param("cpu", id="formula"), pytest.param(KERNELS, id="kernels", marks=kernels)]
)
f32, f64 = torch.float32, torch.float64


def fresh() -> torch.Generator:
    """A generator with a new seed in each run; the seed is printed, so that the report of a failure shows it."""
    seed = int(torch.empty((), dtype=torch.int64).random_().item())
    print(f"seed {seed}")
    return torch.Generator().manual_seed(seed)


class Case(NamedTuple):
    """One sample with known results: factors of its frames, the sum over its paths, the loss, and the occupancies."""

    rows: tuple[tuple[Fraction, ...], ...]
    target: tuple[int, ...]
    blank: int
    p: Fraction
    loss: float
    occ: tuple[tuple[Fraction, ...], ...] | None


def rows_of(text: str) -> tuple[tuple[Fraction, ...], ...]:
    """Parses rows of fractions; a row may end in a common divisor."""
    rows = []
    for row in text.split(","):
        numbers, _, below = row.partition("/") if row.count("/") == 1 and row.strip().startswith("(") else (row, "", "")
        found = [Fraction(x) for x in numbers.strip("() ").split()]
        rows.append(tuple([x / int(below or 1) for x in found]))
    return tuple(rows)


A = rows_of("(2 1 1)/4, (1 2 1)/4, (1 1 2)/4")
B = (*A, A[0])
UNIT = "(1 0 0), (1 0 0), (1 0 0)"
CASES = {
    "1-two-labels": Case(
        A, (1, 2), 0, Fraction(17, 64), 1.3256697393034558, rows_of("(8 9 0)/17, (2 12 3)/17, (1 0 16)/17")
    ),
    "2-repeat-that-just-fits": Case(
        A, (1, 1), 0, Fraction(1, 64), 4.1588830833596719, rows_of("(0 1 0), (1 0 0), (0 1 0)")
    ),
    "3-repeat": Case(
        B, (1, 1), 0, Fraction(5, 128), 3.2425923514855168, rows_of("(2 3 0)/5, (2 3 0)/5, (7 3 0)/10, (1 4 0)/5")
    ),
    "4-empty": Case(A, (), 0, Fraction(1, 32), 3.4657359027997265, rows_of(UNIT)),
    "5-impossible": Case(A[:2], (1, 1), 0, Fraction(0), inf, None),
    "6-other-blank": Case(
        B, (1, 0, 1), 2, Fraction(5, 128), 3.2425923514855168, rows_of("(0 8 2)/10, (5 4 1)/10, (6 2 2)/10, (0 9 1)/10")
    ),
    "7-zeros": Case(
        rows_of("(1 1 0)/2, (0 1 1)/2, (1 0 1)/2"), (1, 2), 0, Fraction(1, 2), 0.69314718055994531,
        rows_of("(1 3 0)/4, (0 1 1)/2, (1 0 3)/4"),
    ),
    "8-not-normalized": Case(
        tuple([tuple([k * x for x in row]) for k, row in zip((2, 3, 4), A, strict=True)]), (1, 2), 0, Fraction(51, 8),
        -1.8523840910444898, rows_of("(8 9 0)/17, (2 12 3)/17, (1 0 16)/17"),
    ),
}  # fmt: skip
by_case = pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))


def logarithms(rows: Sequence[Sequence[Fraction]], dtype: torch.dtype = f64) -> torch.Tensor:
    """Logarithms of the factors, of shape (T, C)."""
    return torch.tensor([[log(x) if x else -inf for x in row] for row in rows], dtype=dtype)


def floats(rows: Sequence[Sequence[Fraction]]) -> torch.Tensor:
    return torch.tensor([[float(x) for x in row] for row in rows], dtype=f64)


def run(
    x: torch.Tensor,
    targets: Any,
    input_lengths: Any = None,
    target_lengths: Any = None,
    logits: bool = False,
    upstream: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss and its gradient for ``upstream``; without it, the gradient of the sum of the losses."""
    x = x.detach().requires_grad_()
    function = F.ctc_loss_with_logits if logits else F.ctc_loss
    value = function(x, targets, input_lengths, target_lengths, **options)
    (slope,) = torch.autograd.grad(value, x, torch.ones_like(value) if upstream is None else upstream)
    return value.detach(), slope


class Batch(NamedTuple):
    """Samples of several lengths."""

    x: torch.Tensor
    targets: torch.Tensor
    input_lengths: torch.Tensor
    target_lengths: torch.Tensor

    def run(self, device: str = "cpu", dtype: torch.dtype = f64, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Loss and gradient."""
        return run(self.x.to(device, dtype), *(x.to(device) for x in self[1:]), **options)

    def expected(self, logits: bool = False, blank: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Loss of each sample and gradient of their sum, by the float64 truth."""
        losses, slopes = [], torch.zeros(self.x.shape, dtype=f64)
        for n, (frames, labels) in enumerate(
            zip(self.input_lengths.tolist(), self.target_lengths.tolist(), strict=True)
        ):
            rows = self.x[:frames, n].double()
            rows = rows.log_softmax(-1) if logits else rows
            loss, occ = truth.in_float64(rows.numpy(), self.targets[n, :labels].tolist(), blank)
            slope = -torch.from_numpy(occ)
            if logits and loss < inf:
                slope = rows.exp() + slope
            losses.append(loss)
            slopes[:frames, n] = slope
        return torch.tensor(losses, dtype=f64), slopes


def batch(
    frames: int = 37, samples: int = 5, classes: int = 9, labels: int = 11, scale: float = 1.0, blank: int = 0
) -> Batch:
    """Random samples; the first has full lengths, the last has no labels."""
    generator = fresh()
    x = scale * torch.randn(frames, samples, classes, generator=generator, dtype=f64)
    targets = torch.randint(classes - 1, (samples, labels), generator=generator)
    targets += targets >= blank
    targets[:, 1::4] = targets[:, : targets[:, 1::4].shape[1] * 4 : 4][:, : targets[:, 1::4].shape[1]]  # repeats
    lengths = torch.randint(1, labels + 1, (samples,), generator=generator)
    ends = torch.randint(min(frames, 2 * labels), frames + 1, (samples,), generator=generator)
    lengths[0], lengths[-1], ends[0] = labels, 0, frames
    return Batch(x.float().double(), targets, ends, lengths)


def close(found: torch.Tensor, right: torch.Tensor, frames: int) -> None:
    """Asserts that float32 results are as accurate as the recursion promises; a loss's bound grows with its size."""
    size = right.abs().where(right.isfinite(), 0.0)
    allowed = 4.5e-7 + 3e-8 * sqrt(frames) if found.dim() > 1 else 1e-6 * sqrt(frames) + size * 2.0**-24
    wrong = (found.cpu().double() - right).abs()
    wrong = wrong.where(found.cpu().double() != right, 0.0)
    assert (wrong <= allowed).all(), (float(wrong.max()), allowed)


# ----------------------------------------------------------------------------------------------------------------------
# Exact cases


@by_case
def test_truths_agree_with_the_table(case: Case) -> None:
    """Enumerated paths in fractions, and the recursion in fractions, in many digits and in float64."""
    exact = truth.by_paths(case.rows, case.target, case.blank)
    assert exact == truth.in_fractions(case.rows, case.target, case.blank)
    assert exact.p == case.p and (None if exact.occ is None else tuple(map(tuple, exact.occ))) == case.occ
    rows = logarithms(case.rows).numpy()
    loss, occ = truth.in_float64(rows, case.target, case.blank)
    digits = truth.in_digits(rows.tolist(), case.target, case.blank)
    assert loss == pytest.approx(case.loss, rel=1e-15) and float(digits.loss) == pytest.approx(case.loss, rel=1e-15)
    if case.occ is not None:
        torch.testing.assert_close(torch.from_numpy(occ), floats(case.occ), rtol=0, atol=1e-15)


@pytest.mark.parametrize("target", [(), (1,), (1, 1), (1, 2, 2, 1), (2, 1, 2)])
def test_truths_agree_on_uniform_rows(target: tuple[int, ...]) -> None:
    for frames in (1, 3, 5):
        rows = [[Fraction(1, 3)] * 3] * frames
        assert truth.by_paths(rows, target) == truth.of_uniform(frames, 3, target) == truth.in_fractions(rows, target)


@paths
@by_case
def test_exact_cases(case: Case, device: str) -> None:
    x = logarithms(case.rows, f32).to(device)
    target = torch.tensor(case.target, dtype=torch.int64, device=device)
    value, slope = run(x, target, reduction="none", blank=case.blank)
    close(value, torch.tensor(case.loss, dtype=f64), len(case.rows))
    right = floats(case.occ) if case.occ is not None else torch.zeros(x.shape, dtype=f64)
    close(slope, -right, len(case.rows))
    softmax = floats([[x / sum(row) for x in row] for row in case.rows])
    value, slope = run(x, target, logits=True, reduction="none", blank=case.blank)
    scale = log(numpy.prod([float(sum(row)) for row in case.rows]))
    close(value, torch.tensor(case.loss + scale, dtype=f64), len(case.rows))
    close(slope, softmax - right if case.occ is not None else right, len(case.rows))


@paths
def test_batch_of_exact_cases(device: str) -> None:
    """Cases 1, 4 and 5, with NaN in the padded frame and labels in padded positions that are no classes."""
    x = torch.full((3, 3, 3), nan)
    x[:, 0], x[:, 1], x[:2, 2] = logarithms(A, f32), logarithms(A, f32), logarithms(A[:2], f32)
    targets = torch.tensor([[1, 2], [7, 7], [1, 1]], device=device)
    lengths = torch.tensor([3, 3, 2], device=device), torch.tensor([2, 0, 2], device=device)
    occ = torch.zeros(3, 3, 3, dtype=f64)
    occ[:, 0], occ[:, 1] = floats(CASES["1-two-labels"].occ or ()), floats(rows_of(UNIT))
    for reduction, expected, divisors in (
        ("mean", 1.3761902574838178, (6.0, 3.0, 6.0)),
        ("sum", 4.791405642103181, (1.0, 1.0, 1.0)),
        ("batchmean", 4.791405642103181 / 3, (3.0, 3.0, 3.0)),
    ):
        value, slope = run(x.to(device), targets, *lengths, reduction=reduction, zero_infinity=True)
        assert float(value) == pytest.approx(expected, rel=3e-7)
        close(slope, -occ / torch.tensor(divisors, dtype=f64)[:, None], 3)
        value, slope = run(x.to(device), targets, *lengths, reduction=reduction)
        assert value == inf and slope.isfinite().all() and not slope[:, 2].any()


@pytest.mark.parametrize("frames", [9, 40])
def test_uniform_rows_of_any_size(frames: int) -> None:
    """Binomial coefficients give exact results for more frames than paths can be enumerated for."""
    target = (1, 1, 2, 3, 3, 3, 1)
    exact = truth.of_uniform(frames, 5, target)
    x = torch.full((frames, 5), -log(5.0), dtype=f64)
    value, slope = run(x, torch.tensor(target), reduction="sum")
    if exact.occ is None:
        assert value == inf and not slope.any()
        return
    assert float(value) == pytest.approx(-log(exact.p), rel=1e-13)
    torch.testing.assert_close(-slope, floats(exact.occ), rtol=0, atol=1e-13)


# ----------------------------------------------------------------------------------------------------------------------
# Random samples


@pytest.mark.parametrize(
    ("classes", "blank"), [(9, 0), (9, 3), (128, 5), (200, 199), (600, 0), (1101, 3), (8199, 8190)]
)
@pytest.mark.parametrize("logits", [False, True], ids=["log_probs", "logits"])
@paths
def test_random_samples(device: str, logits: bool, classes: int, blank: int) -> None:
    """Few classes, which 1 to 32 lanes share, whole vectors, and more classes than fit in shared memory.

    The last take one or two windows.
    """
    given = batch(classes=classes, blank=blank)
    value, slope = given.run(device, f32, logits=logits, blank=blank, reduction="none")
    right = given.expected(logits, blank)
    close(value, right[0], 37)
    close(slope, right[1], 37)


@pytest.mark.parametrize("classes", [9, 40, 600, 1101])
@paths
def test_logits_far_apart(device: str, classes: int) -> None:
    """Larger logits dwarf sums of exponentials that were accumulated before them."""
    given = batch(classes=classes, scale=30.0)
    value, slope = given.run(device, f32, logits=True, reduction="none")
    right = given.expected(True)
    close(value, right[0], 37)
    close(slope, right[1], 37)


@pytest.mark.parametrize(("classes", "logits"), [(1101, False), (1101, True), (301, True)])
@paths
def test_many_classes_in_any_layout(device: str, classes: int, logits: bool) -> None:
    """Logits and gradients whose vectors are aligned alike, differently per frame or per array, or not contiguous."""
    given = batch(classes=classes)
    value, slope = given.expected(logits)
    x = given.x.to(device, f32)
    wide = torch.zeros(37, 5, classes + 7, device=device)
    others = [t.to(device) for t in given[1:]]
    for first in (0, 1, 4):
        wide[..., first : first + classes] = x
        found = run(wide[..., first : first + classes], *others, logits=logits, reduction="none")
        close(found[0], value, 37)
        close(found[1], slope, 37)
    for order in ((1, 0, 2), (0, 2, 1), (2, 1, 0)):
        found = run(x.permute(order).contiguous().permute(order), *others, logits=logits, reduction="none")
        close(found[0], value, 37)
        close(found[1], slope, 37)


@pytest.mark.parametrize("frames", [1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 33])
@paths
def test_numbers_of_frames(device: str, frames: int) -> None:
    """Odd and even numbers of frames, whose halves meet in the middle, and those around blocks of 8 frames.

    Each occurs with every possible number of labels up to 3.
    """
    generator = fresh()
    x = torch.randn(frames, 4, 5, generator=generator, dtype=f64).float().double()
    given = Batch(x, torch.tensor([[1, 1, 2], [1, 2, 3], [4, 1, 1], [2, 2, 2]]), torch.full((4,), frames),
                  torch.tensor([3, 2, 1, 0]))  # fmt: skip
    value, slope = given.run(device, f32, logits=True, reduction="none")
    right = given.expected(True)
    close(value, right[0], frames)
    close(slope, right[1], frames)


@pytest.mark.addresses
@pytest.mark.parametrize(("labels", "classes"), [*[(x, 6) for x in (31, 32, 63, 64, 130, 260, 600)], (260, 1030)])
@paths
def test_numbers_of_labels(device: str, labels: int, classes: int) -> None:
    """Numbers of positions that just fill warps and blocks, or just fail to.

    Some are so large that a warp has room for one frame or for none; others are more labels than a block has threads,
    in frames of many classes.
    """
    # With many labels, hardly more frames than alignments need.
    given = batch(2 * labels + 5 if labels < 100 else 5 * labels // 4 + 5, 3 if labels < 600 else 2, classes, labels)
    value, slope = given.run(device, f32, reduction="none")
    right = given.expected()
    close(value, right[0], given.x.shape[0])
    close(slope, right[1], given.x.shape[0])


@paths
def test_one_frame_beside_many_labels(device: str) -> None:
    """Warps without work arrive at each barrier, as the others do."""
    given = batch(80, 3, 6, 40)
    given = given._replace(input_lengths=torch.tensor([1, 1, 80]), target_lengths=torch.tensor([0, 1, 40]))
    value, slope = given.run(device, f32, reduction="none")
    right = given.expected()
    close(value, right[0], 80)
    close(slope, right[1], 80)
    others = [t.to(device) for t in given[1:]]
    assert torch.equal(F.ctc_loss(given.x.to(device, f32), *others, reduction="none"), value)


@pytest.mark.parametrize("scale", short_or_full([10.0], [1.0, 10.0]))
@paths
def test_long_sequences_keep_their_digits(device: str, scale: float) -> None:
    """With 600 frames, logarithms in float32 would be off by more than 1e-3."""
    given = batch(600, 1, 16, 60, scale)._replace(target_lengths=torch.tensor([60]))
    x = given.x[:, 0].float()
    value, slope = run(x.to(device), given.targets[0].to(device), reduction="sum")
    exact = truth.in_digits(x.double().tolist(), given.targets[0].tolist())
    assert exact.occ is not None
    wrong = abs(mp.mpf(float(value)) - exact.loss)
    assert wrong <= 1e-6 * sqrt(600) + abs(float(exact.loss)) * 2.0**-24
    close(slope, -torch.tensor([[float(y) for y in row] for row in exact.occ], dtype=f64), 600)


@pytest.mark.parametrize("sure", [3.0, 9.0, 20.0])
@paths
def test_frames_of_a_trained_model(device: str, sure: float) -> None:
    """Labels as spikes among blanks, as spells, and anywhere, in samples that are first unsure and then sure.

    States of neighbouring positions and frames differ by powers of two beyond what a float represents. The lengths
    leave every chunk whole.
    """
    given = batch(96, 6, 12, 40)
    frames, samples, classes = given.x.shape
    x, targets = given.x * 2.0, given.targets
    x[48:] -= sure
    x[48:, :, 0] += 2.0 * sure
    for n, row in enumerate(targets.tolist()):
        places = torch.linspace(0, frames - 1, len(row) + 1).long()
        for label, first, end in zip(row, places, places[1:], strict=False):
            if n % 3 == 0:
                x[first, n, label] += 3.0 * sure
                x[first, n, 0] -= sure
            if n % 3 == 1:
                x[first:end, n, label] += 4.0 * sure
    x[:, 2::3] += sure * torch.randn(1, 1, classes, dtype=f64)
    full = torch.full((samples,), frames), torch.full((samples,), targets.shape[1])
    given = Batch(x.float().double(), targets, *full)
    value, slope = given.run(device, f32, logits=True, reduction="none")
    right = given.expected(True)
    close(value, right[0], frames)
    close(slope, right[1], frames)


@pytest.mark.parametrize(("dtype", "far"), [(f32, 400.0), (f32, 1e4), (f64, 3e3)], ids=str)
@paths
def test_states_too_far_apart_for_a_shared_exponent(device: str, dtype: torch.dtype, far: float) -> None:
    """Within a few frames, a state falls or rises by more than the lattice's exponents represent.

    Either all classes of a frame change this much, or only a class that alignments may need. With some lengths, chunks
    of the two directions do not coincide; with others, all chunks are whole.
    """
    generator = fresh()
    for frames in (37, 48, 51):
        given = batch(frames, 5, 9, 11)
        x = given.x.clone()
        x[::5] -= far
        x[3::11, 1] += far
        x[:, 2:] -= far * (torch.rand(frames, 3, 9, generator=generator) < 0.3)
        x[:, 3, 5:] -= far
        given = given._replace(x=x.to(dtype).double())
        value, slope = given.run(device, dtype, logits=True, reduction="none")
        right = given.expected(True)
        if dtype == f64:
            torch.testing.assert_close(value.cpu(), right[0], rtol=1e-12, atol=1e-9)
            torch.testing.assert_close(slope.cpu(), right[1], rtol=0, atol=1e-9)
        else:
            close(value, right[0], frames)
            close(slope, right[1], frames)


@pytest.mark.parametrize("classes", [4, 1037])
@paths
def test_sure_samples_keep_their_digits(device: str, classes: int) -> None:
    """With logits, a loss that is nearly 0 is not negative, and gradients of nearly certain frames stay accurate.

    If one class has nearly all of a frame, the gradient is accurate relative to what the other classes have in softmax
    and occ.
    """
    target = torch.tensor([1, 2], device=device)
    path = torch.tensor([0, 1, 1, 0, 2, 2, 0, 0])
    for size in (8.0, 14.0, 40.0):
        x = torch.zeros(8, classes, dtype=f64)
        x[torch.arange(8), path] = size
        value, slope = run(x.to(device, f32), target, logits=True, reduction="sum")
        exact = truth.in_digits(x.tolist(), [1, 2])
        with mp.workdps(truth.DIGITS):
            rows = [[mp.exp(mp.mpf(y)) for y in row] for row in x.tolist()]
            sums = [mp.fsum(row) for row in rows]
            loss = exact.loss + mp.fsum(map(mp.log, sums))
            softmax = [[y / total for y in row] for row, total in zip(rows, sums, strict=True)]
            pairs = [list(zip(*both, strict=True)) for both in zip(softmax, exact.occ or (), strict=True)]
            right = torch.tensor([[float(y - z) for y, z in row] for row in pairs], dtype=f64)
            parts = torch.tensor([[float(y + z) for y, z in row] for row in pairs], dtype=f64)
        assert value >= 0 and abs(float(value) - float(loss)) <= 1e-6 * sqrt(8)
        parts[torch.arange(8), path] = 0.0
        parts[torch.arange(8), path] = parts.sum(-1)
        # The formula subtracts in float64.
        around = 1e-15 if device == "cpu" and not torch_device.host else 1e-37
        assert ((slope.cpu().double() - right).abs() <= 1e-6 * parts + around).all()


@pytest.mark.parametrize(
    ("classes", "dtype"), in_turn([6, 96, 4107], [torch.float16, torch.bfloat16, torch.float64]), ids=str
)
@paths
def test_dtypes(device: str, dtype: torch.dtype, classes: int) -> None:
    """Operands of 16 bits are read as they are and computed in float32; the gradient has their dtype."""
    given = batch(20, 3, classes, 5)
    given = given._replace(x=given.x.to(dtype).double())
    value, slope = given.run(device, dtype, logits=True, reduction="none", out_dtype=f64)
    right = given.expected(True)
    assert slope.dtype == dtype and value.dtype == f64
    eps = torch.finfo(dtype).eps if dtype != f64 else 1e-13
    if dtype == f64:
        torch.testing.assert_close(value.cpu(), right[0], rtol=1e-12, atol=0)
    else:
        close(value, right[0], 20)
    assert float((slope.cpu().double() - right[1]).abs().max()) <= max(eps, 1e-13)
    value, _ = given.run(device, dtype, logits=True)
    assert value.dtype == dtype


# ----------------------------------------------------------------------------------------------------------------------
# Edges


def frames_of(device: str, size: int = 6, classes: int = 4) -> torch.Tensor:
    return torch.randn(size, classes, generator=fresh()).log_softmax(-1).to(device)


@paths
def test_impossible_targets(device: str) -> None:
    """The loss is infinite and the gradient 0; one such sample does not spoil the batch."""
    x = torch.stack([frames_of(device)] * 4, 1)
    targets = torch.tensor([[1, 2, 1, 2, 1, 2, 3], [1, 1, 1, 1, 0, 0, 0], [1, 2, 3, 0, 0, 0, 0], [2, 0, 0, 0, 0, 0, 0]])
    lengths = torch.tensor([7, 4, 3, 1], device=device)
    with torch.no_grad():
        x[2, 2] = -inf  # every path leads through it
    for logits in (False, True):
        given = x.clone()
        if logits:
            given[2, 2, 0] = 0.0  # a row of nothing but -inf is NaN
            given[:, 2, 3] = -inf  # and this label is impossible
        value, slope = run(given, targets.to(device), None, lengths, logits=logits, reduction="none")
        assert value[:3].tolist() == [inf] * 3 and value[3].isfinite()
        assert not slope[:, :3].any() and slope[:, 3].isfinite().all() and slope[:, 3].any()
        zeros, same = run(given, targets.to(device), None, lengths, logits=logits, reduction="none", zero_infinity=True)
        assert zeros.tolist() == [0.0, 0.0, 0.0, float(value[3])] and torch.equal(same, slope)


@paths
def test_classes_that_cannot_be(device: str) -> None:
    """A class of -inf that paths can avoid has gradient 0, and so has a class that is no label."""
    x = frames_of(device)
    x[:, 3], x[1, 1] = -inf, -inf
    value, slope = run(x, torch.tensor([1, 2], device=device), reduction="sum")
    right = truth.in_float64(x.cpu().double().numpy(), [1, 2])
    close(value, torch.tensor(right[0]), 6)
    close(slope, -torch.from_numpy(right[1]), 6)
    assert slope[1, 1] == 0 and not slope[:, 3].any()
    value, slope = run(x, torch.tensor([1, 2], device=device), logits=True, reduction="sum")
    assert value.isfinite() and slope.isfinite().all() and not slope[:, 3].any() and slope[1, 1] == 0


@paths
def test_large_masks_keep_their_value(device: str) -> None:
    """-1e4 and -1e7 count as numbers, -1e9 as -inf."""
    x = frames_of(device)
    for size, finite in ((-1e4, True), (-1e7, True), (-1e9, False)):
        given = x.clone()
        given[3] = size
        value, slope = run(given, torch.tensor([1, 2], device=device), reduction="sum")
        assert bool(value.isfinite()) is finite and slope.isfinite().all()
        assert not finite or float(value) == pytest.approx(-size, rel=1e-2)
    x[3] = torch.tensor([-6.7108860e7, -6.7108860e7, -6.7108872e7, -inf])
    value, slope = run(x, torch.tensor([1, 2], device=device), logits=True, reduction="sum")
    # Beyond 2^26 a class has no share of softmax, although the largest logit is near.
    assert value.isfinite() and slope.isfinite().all() and not slope[3, 2:].any()


@paths
def test_nan(device: str) -> None:
    """NaN and +inf count only where a path may pass."""
    target = torch.tensor([1, 2], device=device)
    x = frames_of(device)
    plain = run(x, target, reduction="sum")
    for wrong in (nan, inf):
        for frame, label in ((0, 2), (5, 1), (0, 3), (3, 3)):  # not yet reachable, no longer reachable, unused (twice)
            given = x.clone()
            given[frame, label] = wrong
            value, slope = run(given, target, reduction="sum")
            assert torch.equal(value, plain[0]) and torch.equal(slope, plain[1])
        given = x.clone()
        given[2, 1] = wrong
        for zero_infinity in (False, True):
            value, slope = run(given, target, reduction="sum", zero_infinity=zero_infinity)
            assert value.isnan() and slope.isnan().all()
    given = torch.cat([x, torch.full_like(x, nan)])
    value, slope = run(given, target, 6, reduction="sum")
    assert torch.equal(value, plain[0]) and torch.equal(slope[:6], plain[1]) and not slope[6:].any()
    for wrong in (nan, inf, 1e9):
        given = x.clone()
        given[3, 3] = wrong
        value, slope = run(given, target, logits=True, reduction="sum")
        assert value.isnan() and slope.isnan().all()


@paths
def test_frames_and_labels_of_none(device: str) -> None:
    x = torch.stack([frames_of(device)] * 3, 1)
    lengths = torch.tensor([0, 0, 6], device=device), torch.tensor([0, 2, 0], device=device)
    targets = torch.tensor([[1, 2]] * 3, device=device)
    for logits in (False, True):
        value, slope = run(x, targets, *lengths, logits=logits, reduction="none")
        assert value[0] == 0 and not value[0].signbit() and value[1] == inf and value[2].isfinite()
        assert not slope[:, :2].any() and slope[:, 2].any()
    no_labels = torch.zeros(3, 0, dtype=torch.int64, device=device)
    assert torch.equal(F.ctc_loss(x, no_labels, None, None, reduction="none")[2], F.ctc_loss(
        x, targets, *lengths, reduction="none")[2])  # fmt: skip
    joined, none = no_labels.flatten(), torch.zeros(3, dtype=torch.int64, device=device)
    padded = F.ctc_loss(x, no_labels, lengths[0], none, reduction="none")
    assert torch.equal(F.ctc_loss(x, joined, lengths[0], none, reduction="none"), padded)
    assert F.ctc_loss(x[:, :0], joined, none[:0], none[:0], reduction="sum") == 0
    empty = x[:0]
    assert F.ctc_loss(empty, no_labels, None, None, reduction="none").tolist() == [0.0] * 3
    assert F.ctc_loss(empty, targets, None, None, reduction="none").tolist() == [inf] * 3
    nobody, nothing = x[:, :0].detach().requires_grad_(), torch.zeros(0, 2, dtype=torch.int64, device=device)
    assert F.ctc_loss(nobody, nothing, None, None, reduction="none").shape == (0,)
    assert F.ctc_loss(nobody, nothing, None, None, reduction="sum") == 0
    assert F.ctc_loss(nobody, nothing, None, None).isnan()


@pytest.mark.addresses
@paths
def test_labels_that_are_no_class(device: str) -> None:
    """The blank is no valid label either. Such a sample is NaN, its gradient is 0, and no memory is read for it."""
    x = torch.stack([frames_of(device)] * 5, 1)
    lengths = torch.tensor([2, 2, 2, 2, 1], device=device)
    targets = torch.tensor([[1, 2], [1, 4], [1, 0], [-1, 2], [1, 1 << 40]], device=device)
    value, slope = run(x, targets, None, lengths, reduction="none", check_targets="off")
    assert value.isnan().tolist() == [False, True, True, True, False]
    assert slope.isfinite().all() and not slope[:, 1:4].any() and slope[:, 4].any()
    # One of them is reported: the first to be seen.
    reported = r"^ctc_loss: `targets\[(1, 1|2, 1|3, 0)\]` must be a class, 0 to 3, .*got (4|0|-1)\."
    with pytest.raises(IndexError, match=reported):
        F.ctc_loss(x, targets, None, lengths, check_targets="sync")


@paths
def test_lengths_out_of_range(device: str) -> None:
    x = torch.stack([frames_of(device)] * 4, 1)
    targets = torch.tensor([[1, 2]] * 4, device=device)
    ends, lengths = (torch.tensor(x, device=device) for x in ([6, 7, -1, 6], [2, 2, 2, 3]))
    value, slope = run(x, targets, ends, lengths, reduction="none", check_targets="off")
    assert value.isnan().tolist() == [False, True, True, True] and not slope[:, 1:].any() and slope[:, 0].any()
    joined = torch.tensor([1, 2, 1, 2, 1], device=device)
    uneven = torch.tensor([1, 1, 1, 1], device=device)
    value, slope = run(x, joined, None, uneven, reduction="none", check_targets="off")
    assert value.isnan().all() and not slope.any()
    with pytest.raises(
        ValueError, match=r"^ctc_loss: `(input|target)_lengths` must be within 0 to [62], got (7|-1|3) for sample"
    ):
        F.ctc_loss(x, targets, ends, lengths, check_targets="sync")
    with pytest.raises(ValueError, match=r"^ctc_loss: `target_lengths` must add up to .* 5, got 4"):
        F.ctc_loss(x, joined, None, uneven, check_targets="sync")


def test_lengths_that_the_host_knows_are_checked_at_once() -> None:
    x = frames_of("cpu")[:, None]
    for name, given in (
        ("input_lengths", ((7,), None)),
        ("target_lengths", (None, [3])),
        ("input_lengths", (-1, None)),
    ):
        with pytest.raises(ValueError, match=f"^ctc_loss: `{name}` must be within 0 to .* got"):
            F.ctc_loss(x, torch.tensor([[1, 2]]), *given, check_targets="off")


# ----------------------------------------------------------------------------------------------------------------------
# Properties


def reference_bits(given: Batch, device: str, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return given.run(device, f32, reduction="none", **options)


@paths
def test_bits_of_a_sample_are_its_own(device: str) -> None:
    """A sample has the same bits alone, in a batch, with any padding, strides and integer dtypes, and concatenated."""
    given = batch(21, 4, 7, 6)
    value, slope = reference_bits(given, device)
    again = reference_bits(given, device)
    assert torch.equal(value, again[0]) and torch.equal(slope, again[1])
    with torch.no_grad():
        assert torch.equal(
            value, F.ctc_loss(given.x.to(device, f32), *(x.to(device) for x in given[1:]), reduction="none")
        )
    x = given.x.to(device, f32)
    others = [t.to(device) for t in given[1:]]
    for n in range(4):
        end, length = int(given.input_lengths[n]), int(given.target_lengths[n])
        alone = run(x[:end, n], others[0][n, :length], reduction="none")
        assert torch.equal(alone[0], value[n]) and torch.equal(alone[1], slope[:end, n])
    padded = torch.full((50, 4, 7), nan, device=device)
    padded[:21] = x
    wide = torch.nn.functional.pad(others[0], (0, 80), value=-5)
    for y, t in ((padded, wide), (x.permute(1, 2, 0).contiguous().permute(2, 0, 1), wide[:, :6])):
        found = run(y, t, *others[1:], reduction="none")
        assert torch.equal(found[0], value) and torch.equal(found[1][:21], slope) and not found[1][21:].any()
    found = run(x.movedim(0, 1), *others, reduction="none", batch_first=True)
    assert torch.equal(found[0], value) and torch.equal(found[1].movedim(1, 0), slope)
    joined = torch.cat([others[0][n, : int(k)] for n, k in enumerate(given.target_lengths)])
    found = run(x, joined.int(), others[1].int(), others[2].int(), reduction="none")
    assert torch.equal(found[0], value) and torch.equal(found[1], slope)


@paths
def test_any_grad_output(device: str) -> None:
    """A gradient that forward wrote for the expected grad_output has the bits of one that backward computes."""
    given = batch(21, 4, 7, 6)
    x, others = given.x.to(device, f32).requires_grad_(), [t.to(device) for t in given[1:]]
    slopes = []
    for factor in (1.0, 0.5, 0.5, 3.0):
        value = F.ctc_loss_with_logits(x, *others)
        slopes.append(torch.autograd.grad(value, x, torch.tensor(factor, device=device))[0])
    assert torch.equal(slopes[1], slopes[2]) and torch.equal(slopes[1] * 2, slopes[0])
    torch.testing.assert_close(slopes[3], 3 * slopes[0], rtol=1e-6, atol=1e-9)
    value = F.ctc_loss_with_logits(x, *others)
    first = torch.autograd.grad(value, x, retain_graph=True)[0]
    assert torch.equal(first, torch.autograd.grad(value, x)[0]) and torch.equal(first, slopes[0])


@paths
def test_occ_is_a_distribution(device: str) -> None:
    given = batch(40, 4, 7, 6)
    value, slope = reference_bits(given, device)
    sums = -slope.double().sum(-1).cpu()
    ends = torch.arange(40)[:, None] < given.input_lengths
    torch.testing.assert_close(sums, ends.double(), rtol=0, atol=1e-6)
    assert ((-slope >= 0) & (-slope <= 1)).all()
    # A constant added to a frame changes no gradient, and classes may be permuted. Posteriors of a frame are summed
    # class by class.
    shift = torch.randint(-8, 9, (40, 1, 1)).to(device) * 0.5
    moved = run(given.x.to(device, f32) + shift, *(x.to(device) for x in given[1:]), reduction="none")
    close(moved[1], slope.cpu().double(), 40)
    order = torch.cat([torch.zeros(1, dtype=torch.int64), 1 + torch.randperm(6)])
    back = order.argsort()
    others = [x.to(device) for x in (back[given.targets], *given[2:])]
    permuted = run(given.x[..., order].to(device, f32), *others, reduction="none")
    assert torch.equal(permuted[0], value)
    close(permuted[1], slope[..., order.to(device)].cpu().double(), 40)


def test_gradient_behind_log_softmax_is_torchs() -> None:
    given = batch(30, 4, 8, 7)
    found = []
    for function in (F.ctc_loss, torch.nn.functional.ctc_loss):
        x = given.x.clone().requires_grad_()
        value = function(x.log_softmax(-1), *given[1:])
        found.append((value, *torch.autograd.grad(value, x)))
    fused = given.run(logits=True)
    for a in (found[0], fused):
        for b, c in zip(a, found[1], strict=True):
            torch.testing.assert_close(b, c, rtol=1e-12, atol=1e-13)


@paths
def test_gradient_of_logits_is_torchs_own(device: str) -> None:
    """gradient="logits" serves programs that depend on what torch returns for log_probs."""
    given = batch(30, 4, 8, 7)
    x = given.x.log_softmax(-1)
    _, slope = run(x.to(device, f32), *(t.to(device) for t in given[1:]), gradient="logits")
    y = x.clone().requires_grad_()
    torch.nn.functional.ctc_loss(y, *given[1:]).backward()
    assert y.grad is not None
    close(slope, y.grad, 30)


# ----------------------------------------------------------------------------------------------------------------------
# Arguments


def test_forms_of_targets_and_lengths() -> None:
    """All forms of the arguments make the same call."""
    given = batch(12, 3, 5, 4)
    right = given.run()
    x, targets, ends, lengths = given
    joined = torch.cat([targets[n, :k] for n, k in enumerate(lengths.tolist())])
    forms: list[tuple[Any, Any, Any]] = [
        (targets, tuple(ends.tolist()), lengths.tolist()),
        (targets.to(torch.int8), ends.numpy(), tuple(lengths.tolist())),
        (targets, ends[:, None], lengths[:, None].int()),
        (joined.to(torch.uint8), ends.short(), lengths.numpy().astype("int16")),
        (targets.flip(1).flip(1), tuple(map(numpy.int64, ends.tolist())), lengths.repeat_interleave(2)[::2]),
    ]
    for form in forms:
        for a, b in zip(run(x, *form), right, strict=True):
            assert torch.equal(a, b)
    one = x[:, 0], targets[0]
    alone = run(*one)
    for target, end, length in (
        (targets[:1], 12, 4), (targets[0], [12], None), (targets[0], None, torch.tensor(4)),
        (targets[0], torch.tensor([12]), (4,)),
    ):  # fmt: skip
        for a, b in zip(run(x[:, 0], target, end, length), alone, strict=True):
            assert torch.equal(a, b) and a.shape == b.shape


@paths
def test_reductions_weights_and_masks(device: str) -> None:
    given = batch(20, 5, 6, 5)
    losses, slopes = given.expected()
    counts = given.target_lengths.clamp(min=1).double()
    weight = torch.tensor([0.5, 0.0, 2.0, 1.0, 3.0], dtype=f64)
    mask = torch.tensor([True, True, False, True, True])
    x = given.x.clone()
    x[:, 1:3] = nan  # not read
    clean = losses.clone()
    for options, factors in (
        ({"reduction": "none"}, torch.ones(5, dtype=f64)),
        ({"reduction": "sum"}, torch.ones(5, dtype=f64)),
        ({"reduction": "mean"}, 1 / (4 * counts)),
        ({"reduction": "batchmean"}, torch.full((5,), 0.2, dtype=f64)),
        ({"reduction": "mean", "normalizer": 7.0}, torch.full((5,), 1 / 7, dtype=f64)),
        ({"reduction": "mean", "normalizer": torch.tensor(7.0, device=device)}, torch.full((5,), 1 / 7, dtype=f64)),
    ):
        used = weight * mask
        factors = (factors * used).where(used != 0, 0.0)
        value, slope = run(x.to(device, f32), *(t.to(device) for t in given[1:]), weight=weight.to(device, f32),
                           mask=mask.to(device), **options)  # fmt: skip
        right = factors * clean
        right = right if options["reduction"] == "none" else right.sum()
        torch.testing.assert_close(value.cpu().double(), right, rtol=1e-6, atol=1e-5)
        torch.testing.assert_close(slope.cpu().double(), slopes * factors[:, None], rtol=0, atol=2e-6)
    plain = given.run(device, f32, reduction="none")
    scaled = given.run(device, f32, reduction="none", weight=torch.tensor(2.0, device=device))
    assert torch.equal(scaled[0], 2 * plain[0]) and torch.equal(scaled[1], 2 * plain[1])


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"log_probs": torch.zeros(4, 2, 3, dtype=torch.int64)}, TypeError, "`log_probs` must have one of the dtypes"),
        ({"log_probs": torch.zeros(4)}, ValueError, r"`log_probs` must have the shape \(T, N, C\)"),
        ({"targets": torch.tensor([[1.0], [2.0]])}, TypeError, r"`targets` .*float32.*\.long\(\)"),
        ({"targets": torch.tensor([[True], [True]])}, TypeError, r"`targets` .*bool.*\.long\(\)"),
        ({"targets": [[1], [2]]}, TypeError, "`targets`"),
        ({"targets": torch.ones(3, 1, dtype=torch.int64)}, ValueError, r"`targets` must have the shape \(N, S\)"),
        ({"targets": torch.tensor([1, 2])}, ValueError, "`target_lengths` must be given"),
        ({"input_lengths": torch.tensor([4.0, 4.0])}, TypeError, "`input_lengths` .*float32"),
        ({"input_lengths": (4, 4, 4)}, ValueError, r"`input_lengths` must have the shape \(2,\)"),
        ({"input_lengths": "ab"}, TypeError, "`input_lengths` must be"),
        ({"input_lengths": (True, True)}, TypeError, "`input_lengths` must be"),
        ({"target_lengths": (1, 2)}, ValueError, "`target_lengths` must be within 0 to 1, .* got 2 for sample 1"),
        ({"blank": 3}, ValueError, "`blank` must be a class, 0 to 2"),
        ({"blank": -1}, ValueError, "`blank` must be a class, 0 to 2"),
        ({"blank": 1.0}, TypeError, "`blank` must be an integer"),
        ({"reduction": "max"}, ValueError, "reduction"),
        ({"zero_infinity": "yes"}, TypeError, "`zero_infinity` must be True or False"),
        ({"gradient": "loss"}, ValueError, "`gradient` must be one of 'log_probs', 'logits'"),
        ({"check_targets": "late"}, ValueError, "`check_targets` must be one of"),
        ({"mask": torch.ones(2)}, TypeError, "`mask` must be bool"),
        ({"weight": torch.ones(3)}, ValueError, "`weight` must broadcast"),
        ({"weight": torch.ones(2, requires_grad=True)}, ValueError, "`weight` has no gradient"),
    ],
    ids=lambda x: ",".join(x) if isinstance(x, dict) else "",
)
def test_errors(changed: dict[str, Any], error: type[Exception], message: str) -> None:
    given = {
        "log_probs": torch.zeros(4, 2, 3), "targets": torch.tensor([[1], [2]]), "input_lengths": None,
        "target_lengths": None,
    }  # fmt: skip
    F.ctc_loss(**given)
    with pytest.raises(error, match=f"^ctc_loss: .*{message}"):
        F.ctc_loss(**(given | changed))


def test_modules() -> None:
    given = batch(12, 3, 5, 4)
    ours = nn.CTCLoss(blank=1, reduction="sum", zero_infinity=True)
    assert isinstance(ours, torch.nn.CTCLoss) and ours.blank == 1 and ours.zero_infinity
    targets = given.targets.where(given.targets != 1, 2)
    right = F.ctc_loss(given.x, targets, *given[2:], blank=1, reduction="sum", zero_infinity=True)
    assert torch.equal(ours(given.x, targets, *given[2:]), right)
    fused = nn.CTCWithLogitsLoss(batch_first=True)
    right = F.ctc_loss_with_logits(given.x, *given[1:])
    torch.testing.assert_close(fused(given.x.movedim(0, 1), *given[1:]), right)
    weighted = ours(given.x, targets, *given[2:], weight=torch.zeros(3))
    assert weighted == 0


# ----------------------------------------------------------------------------------------------------------------------
# Derivatives, transforms and libraries


@pytest.mark.parametrize("logits", [False, True], ids=["log_probs", "logits"])
def test_derivatives_of_formulas(logits: bool) -> None:
    given = batch(6, 3, 4, 2)
    function = F.ctc_loss_with_logits if logits else F.ctc_loss

    def losses(x: torch.Tensor) -> torch.Tensor:
        return function(x, *given[1:], reduction="none")

    x = given.x.requires_grad_()
    assert torch.autograd.gradcheck(losses, x) and torch.autograd.gradgradcheck(losses, x)


@paths
def test_second_derivative_of_the_exact_case(device: str) -> None:
    """The Hessian of case 1 along the blank of the first frame, in 289ths."""
    x = logarithms(A).to(device).requires_grad_()
    value = F.ctc_loss(x, torch.tensor([1, 2], device=device), None, None, reduction="sum")
    (slope,) = torch.autograd.grad(value, x, create_graph=True)
    (row,) = torch.autograd.grad(slope[0, 0], x)
    right = torch.tensor([[-72.0, 72.0, 0.0], [16.0, -40.0, 24.0], [8.0, 0.0, -8.0]], dtype=f64) / 289
    torch.testing.assert_close(row.cpu(), right, rtol=0, atol=1e-12)


def by_matrices(x: torch.Tensor, given: Batch) -> torch.Tensor:
    """Losses of a batch of logits, by operations that torch differentiates."""
    found = []
    for n, (frames, labels) in enumerate(zip(given.input_lengths.tolist(), given.target_lengths.tolist(), strict=True)):
        found.append(truth.by_matrices(x[:frames, n].log_softmax(-1), given.targets[n, :labels].tolist()))
    return torch.stack(found)


@kernels
def test_transforms() -> None:
    given = batch(9, 3, 5, 3)
    x = given.x.to(KERNELS)
    others = [t.to(KERNELS) for t in given[1:]]
    v = torch.randn(x.shape, generator=fresh(), dtype=f64).to(KERNELS)

    def ours(x: torch.Tensor) -> torch.Tensor:
        return F.ctc_loss_with_logits(x, *others, reduction="none").sin().sum()

    def exact(x: torch.Tensor) -> torch.Tensor:
        return by_matrices(x, given).sin().sum()

    cpu, tangent = x.cpu(), v.cpu()
    torch.testing.assert_close(torch.func.grad(ours)(x).cpu(), torch.func.grad(exact)(cpu))
    for transform in (lambda f: f, torch.func.grad):
        a, b = (torch.func.jvp(transform(f), (y,), (w,)) for f, y, w in ((ours, x, v), (exact, cpu, tangent)))
        torch.testing.assert_close([y.cpu() for y in a], list(b))
    many = torch.stack([x, x + v])
    torch.testing.assert_close(
        torch.func.vmap(torch.func.grad(ours))(many).cpu(), torch.stack([torch.func.grad(exact)(y) for y in many.cpu()])
    )
    y, z = x.clone().requires_grad_(), cpu.clone().requires_grad_()
    for leaf, function, w in ((y, ours, v), (z, exact, tangent)):
        (slope,) = torch.autograd.grad(function(leaf), leaf, create_graph=True)
        leaf.grad = torch.autograd.grad((slope * w).sum(), leaf)[0]
    torch.testing.assert_close(y.grad.cpu(), z.grad)


@kernels
def test_a_compiled_graph() -> None:
    torch.compiler.reset()
    given = batch(21, 4, 7, 6)
    x, others = given.x.to(KERNELS, f32).requires_grad_(), [t.to(KERNELS) for t in given[1:]]

    def step(x: torch.Tensor) -> torch.Tensor:
        return F.ctc_loss_with_logits(x, *others)

    value = torch.compile(step, fullgraph=True, backend="aot_eager")(x)
    assert torch.equal(value, step(x))
    torch.testing.assert_close(torch.autograd.grad(value, x), torch.autograd.grad(step(x), x), rtol=0, atol=0)


def test_numpy_arrays() -> None:
    given = batch(12, 3, 5, 4)
    arrays = [x.numpy() for x in given]
    value, slope = cupylosses.value_and_grad(F.ctc_loss, *arrays)
    right = given.run()
    assert isinstance(slope, numpy.ndarray)
    numpy.testing.assert_allclose(value, right[0].numpy(), rtol=1e-14)
    numpy.testing.assert_allclose(slope, right[1].numpy(), atol=1e-14)
    numpy.testing.assert_allclose(F.ctc_loss(arrays[0], arrays[1], arrays[2].tolist(), tuple(arrays[3])), value)


@pytest.mark.skipif(not HOST, reason="no C++ compiler on Linux")
def test_cupy_arrays() -> None:
    given = batch(21, 4, 7, 6)
    right = given.expected(True)
    with stand_in.cupy() as cupy:
        arrays = [cupy.asarray(x.numpy()) for x in (given.x.float(), *given[1:])]
        value, slope = cupylosses.value_and_grad(F.ctc_loss_with_logits, *arrays, reduction="sum")
        plain = F.ctc_loss_with_logits(*arrays, reduction="none")
        close(torch.from_numpy(numpy.asarray(plain)), right[0], 21)
        close(torch.from_numpy(numpy.asarray(slope)), right[1], 21)
        assert float(numpy.asarray(value)) == pytest.approx(float(right[0].sum()), rel=1e-6)


@kernels
def test_results_are_the_same_on_any_grid() -> None:
    from cupylosses.testing import host

    given = batch(40, 5, 7, 12)
    found = []
    for processors in (2, 200):
        with host.execution(processors, seed=processors):
            plans.forget()
            found.append(given.run("cpu", f32, logits=True))
            x = given.x.float().requires_grad_()
            unexpected = torch.autograd.grad(F.ctc_loss_with_logits(x, *given[1:]), x, torch.tensor(2.0))[0]
            assert torch.equal(unexpected, 2 * found[-1][1])
    for a, b in pairwise(found):
        assert torch.equal(a[0], b[0]) and torch.equal(a[1], b[1])


@kernels
@pytest.mark.parametrize("labels", short_or_full((70,), (12, 70)))
def test_log_sum_exps_beside_both_halves(labels: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from cupylosses.testing import host

    # Many classes, whose elements the first half keeps; FRAME_BYTES of 0 keeps the gradient's kernel from computing
    # their log-sum-exps. With 70 labels, two blocks share a direction of a sample.
    given = batch(100, 3, 1030, labels)
    found = []
    monkeypatch.setattr(sequence_plan, "FRAME_BYTES", 0)
    for least, processors in ((0, 2), (0, 200), (sequence_plan.SPLIT_BYTES, 2)):
        monkeypatch.setattr(sequence_plan, "SPLIT_BYTES", least)
        with host.execution(processors, seed=processors):
            plans.forget()
            found.append(given.run("cpu", f32, logits=True))
            # A NaN counts, whichever half reads its frame.
            for frame in (4, 99):
                x = given.x.float()
                x[frame, 0, 1029] = nan
                value = F.ctc_loss_with_logits(x.requires_grad_(), *given[1:], reduction="none")
                slope = torch.autograd.grad(value.sum(), x)[0]
                assert value[0].isnan() and slope[:, 0].isnan().all() and value[1:].isfinite().all()
    for a, b in pairwise(found):
        assert torch.equal(a[0], b[0]) and torch.equal(a[1], b[1])


@kernels
@pytest.mark.parametrize(("dtype", "classes"), [(f32, 1101), (torch.bfloat16, 1040)])
def test_log_sum_exps_beside_gradients(dtype: torch.dtype, classes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The value has the same bits with and without gradients, and results match log-sum-exps computed in advance.

    A NaN counts in all frames of its sample, whether or not that has alignments, and whichever launch writes the
    gradient.
    """
    given = batch(15, 3, classes, 7)
    x, targets, frames, labels = [t.to(KERNELS) for t in (given.x.to(dtype), *given[1:])]
    frames[1] = 15
    monkeypatch.setattr(sequence_plan, "SPLIT_BYTES", 0)
    x[5, :, 3] += 20.0  # has most of the softmax
    x[6, 2, 0] += 20.0  # and of the posteriors
    x[:, 1, targets[1, 0]] = -inf
    x[3, :, 40:] = -inf
    for wrong, layout in ((0.0, (0, 1, 2)), (0.0, (1, 2, 0)), (nan, (0, 1, 2))):
        x[14, :2, 39] += wrong
        y = x.permute(layout).contiguous().permute([layout.index(d) for d in range(3)])
        found = []
        for least in (0, 1 << 20):
            monkeypatch.setattr(sequence_plan, "FRAME_LEAST", least)
            plans.forget()
            leaf = y.clone().requires_grad_()
            for reduction in ("none", "sum"):
                options: Any = {"reduction": reduction, "out_dtype": "float64"}
                value = F.ctc_loss_with_logits(leaf, targets, frames, labels, **options)
                alone = F.ctc_loss_with_logits(y, targets, frames, labels, **options)
                assert torch.equal(value.nan_to_num(-1.0), alone.nan_to_num(-1.0))
                assert value.isnan().any() == isnan(wrong)
                for factor in (1.0, 3.0):
                    slope = torch.autograd.grad(factor * value.sum(), leaf, retain_graph=True)[0]
                    found.append((value.sum(), slope.double() / factor))
        for (value, slope), (other, also) in zip(found[:4], found[4:], strict=True):
            torch.testing.assert_close(value, other, rtol=1e-7, atol=1e-6, equal_nan=True)
            torch.testing.assert_close(slope, also, rtol=1e-2, atol=1e-6, equal_nan=True)
            assert slope[:, :2].isnan().all() == isnan(wrong) and slope[:, 2].isfinite().all()

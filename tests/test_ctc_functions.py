"""Alignments and posteriors of targets, against paths in fractions and recursions in float64."""

from __future__ import annotations

import platform
from fractions import Fraction
from itertools import product
from math import inf, log, nan, prod
from typing import Any

import numpy
import pytest
import torch
from devices import HOST, KERNELS
from tools import cupy_stand_in as stand_in
from tools.gate_subsets import fast_compilers
from tools.sequence import truth

import cupylosses
from cupylosses import functional as F
from cupylosses.engines.sequence import alignment
from cupylosses.engines.sequence.alignment import AlignmentKernel
from cupylosses.engines.sequence.posteriors import PosteriorKernel

kernels = pytest.mark.kernels
paths = pytest.mark.parametrize(
    "device", [pytest.param("cpu", id="formula"), pytest.param(KERNELS, id="kernels", marks=kernels)]
)


def fresh() -> torch.Generator:
    """A generator with a new seed in each run; the seed is printed, so that the report of a failure shows it."""
    seed = int(torch.empty((), dtype=torch.int64).random_().item())
    print(f"seed {seed}")
    return torch.Generator().manual_seed(seed)


def drawn(frames: int, samples: int, classes: int, labels: int, ties: bool = False) -> list[torch.Tensor]:
    """Log-probabilities, targets and both lengths; with ``ties``, log-probabilities are multiples of 1/2."""
    generator = fresh()
    x = torch.randn(frames, samples, classes, generator=generator)
    x = (x * 2).round() / 2 if ties else x.log_softmax(-1)
    targets = torch.randint(1, classes, (samples, labels), generator=generator)
    targets[:, 1::3] = targets[:, 0::3][:, : targets[:, 1::3].shape[1]]  # repeats
    lengths = torch.randint(0, labels + 1, (samples,), generator=generator)
    ends = torch.randint(min(frames, labels), frames + 1, (samples,), generator=generator)
    lengths[0], ends[0] = labels, frames
    return [x, targets, ends, lengths]


def check(found: Any, x: torch.Tensor, targets: torch.Tensor, ends: torch.Tensor, lengths: torch.Tensor) -> None:
    """Asserts that paths are those of the truth, label for label, and that scores are rounded once."""
    x = x.detach().cpu()
    for n, (end, length) in enumerate(zip(ends.tolist(), lengths.tolist(), strict=True)):
        rows = x[:end, n].double().tolist()
        best = truth.best_path(rows, targets[n, :length].tolist())
        assert found.labels[:end, n].tolist() == best.labels
        assert found.positions[:end, n].tolist() == best.positions
        assert float(found.score[n]) == float(torch.tensor(best.score, dtype=torch.float64).to(found.score.dtype))
        taken = [rows[t][c] if c >= 0 else 0.0 for t, c in enumerate(best.labels)]
        assert found.log_probs[:end, n].tolist() == taken
        behind = [y[end:, n] for y in (found.labels, found.positions, found.log_probs)]
        assert (behind[0] == -1).all() and (behind[1] == -1).all() and not behind[2].any()


@pytest.mark.parametrize("target", [(), (1,), (1, 1), (1, 2), (2, 1, 2)])
def test_truth_is_the_best_of_all_paths(target: tuple[int, ...]) -> None:
    generator = fresh()
    for frames in (1, 3, 5):
        rows = [[Fraction(int(k), 16) for k in torch.randint(1, 16, (3,), generator=generator)] for _ in range(frames)]
        possible = [x for x in product(range(3), repeat=frames) if truth.collapsed(x, 0) == target]
        products = [prod((row[c] for row, c in zip(rows, x, strict=True)), start=Fraction(1)) for x in possible]
        found = truth.best_path([[log(x) for x in row] for row in rows], target)
        if not possible:
            assert found.score == -inf
            continue
        assert truth.collapsed(found.labels, 0) == target
        assert found.score == pytest.approx(log(max(products)), rel=1e-13)


@paths
@pytest.mark.parametrize("ties", [False, True], ids=["no-ties", "ties"])
@pytest.mark.parametrize(("frames", "labels"), [(1, 1), (7, 3), (8, 0), (33, 9), (150, 70)])
def test_best_paths(device: str, frames: int, labels: int, ties: bool) -> None:
    """Targets of one warp and of several, and numbers of frames around chunks of 8 and 32."""
    given = drawn(frames, 4, 6, labels, ties)
    found = F.ctc_forced_alignment(*(y.to(device) for y in given))
    check(found, *given)


@paths
def test_best_path_of_the_exact_case(device: str) -> None:
    x = torch.tensor([[0.5, 0.25, 0.25], [0.25, 0.5, 0.25], [0.25, 0.25, 0.5]], device=device).log()
    found = F.ctc_forced_alignment(x, torch.tensor([1, 2], device=device))
    assert found.labels.tolist() == [0, 1, 2] and found.positions.tolist() == [-1, 0, 1]
    assert float(found.score) == pytest.approx(-log(8.0), rel=1e-7) and found.score.shape == ()


@pytest.mark.addresses
@kernels
def test_sweeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """With more positions than a block has threads, the last column of a sweep goes through memory."""
    monkeypatch.setattr(alignment, "MAX_THREADS", 64)
    for ties in (False, True):
        given = drawn(300, 2, 5, 150, ties)
        check(F.ctc_forced_alignment(*(y.to(KERNELS) for y in given)), *given)


@paths
def test_forms_of_arguments(device: str) -> None:
    """Strides, integer dtypes, concatenated targets, host lengths and a leading batch dimension change no result."""
    x, targets, ends, lengths = drawn(20, 4, 6, 5)
    right = F.ctc_forced_alignment(*(y.to(device) for y in (x, targets, ends, lengths)))
    strided = x.permute(2, 1, 0).contiguous().permute(2, 1, 0).to(device)
    found = F.ctc_forced_alignment(strided, targets.to(device), tuple(ends.tolist()), lengths)
    for a, b in zip(found, right, strict=True):
        assert torch.equal(a, b)
    joined = torch.cat([targets[n, :k] for n, k in enumerate(lengths.tolist())]).int().to(device)
    found = F.ctc_forced_alignment(
        x.movedim(0, 1).to(device), joined, ends.int().to(device), lengths.int().to(device), batch_first=True
    )
    for a, b in zip(found, right, strict=True):
        assert torch.equal(a if a.dim() == 1 else a.T, b)
    alone = F.ctc_forced_alignment(x[:, 0].to(device), targets[0].to(device))
    for a, b in zip(alone, right, strict=True):
        assert torch.equal(a, b[..., 0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@paths
def test_dtypes(device: str, dtype: torch.dtype) -> None:
    x, *others = drawn(20, 3, 6, 5)
    x = x.to(dtype)
    found = F.ctc_forced_alignment(x.to(device), *(y.to(device) for y in others))
    check(found, x, *others)
    assert found.score.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


@paths
def test_edges(device: str) -> None:
    """Samples without a path, NaN on and off the path, labels and lengths out of range, and nothing to align."""
    x = torch.randn(6, 6, 4, generator=fresh()).log_softmax(-1)
    x[2, 1], x[5, 2, 3], x[3, 3], x[:, 5, 3] = -inf, nan, nan, -inf
    targets = torch.tensor([[1, 2, 1], [1, 2, 0], [1, 2, 0], [1, 2, 0], [1, 4, 0], [2, 1, 0]])
    lengths = torch.tensor([3, 2, 2, 2, 2, 2])
    found = F.ctc_forced_alignment(
        x.to(device), targets.to(device), torch.tensor([6, 6, 6, 6, 6, 6], device=device), lengths.to(device),
        check_targets="off",
    )  # fmt: skip
    assert found.score.isnan().tolist() == [False, False, False, True, True, False] and found.score[1] == -inf
    for n in (0, 2, 5):
        best = truth.best_path(x[:, n].tolist(), targets[n, : int(lengths[n])].tolist())
        assert found.labels[:, n].tolist() == best.labels
    for n in (1, 3, 4):
        assert (
            (found.labels[:, n] == -1).all() and (found.positions[:, n] == -1).all() and not found.log_probs[:, n].any()
        )
    plus = x.clone()
    plus[1, 0, 0] = inf
    found = F.ctc_forced_alignment(plus[:, 0].to(device), torch.tensor([1, 2, 1], device=device))
    assert found.score.isnan()
    ends = torch.tensor([0, 7, -1, 6, 0, 2], device=device)
    lengths = torch.tensor([0, 1, 1, 4, 1, 2], device=device)
    found = F.ctc_forced_alignment(x.to(device), targets.to(device), ends, lengths, check_targets="off")
    assert found.score.isnan().tolist() == [False, True, True, True, False, False]
    assert found.score[0] == 0 and found.score[4] == -inf and (found.labels[2:] == -1).all()
    empty = F.ctc_forced_alignment(x[:0].to(device), targets.to(device), None, torch.zeros_like(lengths))
    assert empty.labels.shape == (0, 6) and not empty.score.any()
    nobody = F.ctc_forced_alignment(x[:, :0].to(device), targets[:0].to(device))
    assert nobody.labels.shape == (6, 0) and nobody.score.shape == (0,)
    with pytest.raises(IndexError, match=r"^ctc_forced_alignment: `targets\[4, 1\]` must be a class, 0 to 3"):
        F.ctc_forced_alignment(x.to(device), targets.to(device), None, (3, 2, 2, 2, 2, 2), check_targets="sync")


@paths
def test_nothing_is_differentiated(device: str) -> None:
    x, *others = drawn(20, 3, 6, 5)
    x = x.to(device).requires_grad_()
    found = F.ctc_forced_alignment(x, *(y.to(device) for y in others))
    assert not any(y.requires_grad for y in found)
    taken = x.gather(-1, found.labels.clamp(min=0)[..., None])[..., 0]
    assert torch.equal(taken.where(found.labels >= 0, 0.0), found.log_probs)


@kernels
def test_a_compiled_graph_and_vmap() -> None:
    torch.compiler.reset()
    given = [y.to(KERNELS) for y in drawn(20, 3, 6, 5)]
    right = F.ctc_forced_alignment(*given)
    compiled = torch.compile(F.ctc_forced_alignment, fullgraph=True, backend="aot_eager")(*given)
    # vmap over samples that have no batch dimension puts the batch first in every result.
    many = torch.func.vmap(F.ctc_forced_alignment, (1, 0, 0, 0))(*given)
    for a, b, c in zip(right, compiled, many, strict=True):
        assert torch.equal(a, b) and torch.equal(a, c.T if c.dim() > 1 else c)


def test_numpy_arrays() -> None:
    given = drawn(20, 3, 6, 5)
    found = F.ctc_forced_alignment(*(y.numpy() for y in given))
    assert all(type(y) is numpy.ndarray for y in found)
    check(type(found)(*(torch.from_numpy(numpy.asarray(y)) for y in found)), *given)


@pytest.mark.skipif(not HOST, reason="no C++ compiler on Linux")
def test_cupy_arrays() -> None:
    given = drawn(20, 3, 6, 5)
    with stand_in.cupy() as cupy:
        found = F.ctc_forced_alignment(*(cupy.asarray(y.numpy()) for y in given))
        check(type(found)(*(torch.from_numpy(numpy.asarray(y)) for y in found)), *given)


@pytest.mark.skipif(platform.system() == "Darwin", reason="there is no NVRTC for macOS")
def test_kernels_compile() -> None:
    """Kernels compile without spills for the oldest and newest GPUs and compilers."""
    compilers = {x.version[0]: x for x in fast_compilers()}
    align, occ = F.ctc_forced_alignment.loss, F.ctc_posteriors.loss
    for version, architecture, kernel in (
        (13, "sm_90", AlignmentKernel(align, "float32")),
        (11, "sm_70", AlignmentKernel(align, "float64")),
        (13, "sm_75", AlignmentKernel(align, "bfloat16")),
        (11, "sm_90", PosteriorKernel(occ, "float32", True)),
        (13, "sm_90", PosteriorKernel(occ, "float64", False)),
    ):
        found = compilers[version].compile(kernel.source(), architecture).resources
        assert found.entries == (kernel.entry,) and not found.warnings and not found.spills


# ----------------------------------------------------------------------------------------------------------------------
# Posteriors

by_kind = pytest.mark.parametrize("of", ["classes", "positions"])


def expected(given: list[torch.Tensor], of: str) -> torch.Tensor:
    """The true posteriors of classes, or of a target's positions, with the sum of its blanks last."""
    x, targets, ends, lengths = given
    frames, samples, classes = x.shape
    room = targets.shape[1]
    found = torch.zeros(frames, samples, room + 1 if of == "positions" else classes, dtype=torch.float64)
    for n, (end, length) in enumerate(zip(ends.tolist(), lengths.tolist(), strict=True)):
        rows, target = x[:end, n].double().numpy(), targets[n, :length].tolist()
        if of == "classes":
            found[:end, n] = torch.from_numpy(truth.in_float64(rows, target)[1])
            continue
        states = truth.states_of(target, 0)
        # Equal neighbours stay apart, because a path passes through the blank between them.
        by_state = by_states(rows, states, target)
        found[:end, n, :length] = by_state[:, 1::2]
        found[:end, n, room] = by_state[:, ::2].sum(1)
    return found


def by_states(rows: Any, states: list[int], target: list[int]) -> torch.Tensor:
    """Posteriors of states by matrix products, forwards and backwards, in float64."""
    moves = torch.zeros(len(states), len(states), dtype=torch.float64)
    for s in range(len(states)):
        moves[s, truth.predecessors(states, s, 0)] = 1.0
    factors = torch.from_numpy(rows[:, states]).exp()
    alpha = [factors[0] * (torch.arange(len(states)) < 2)]
    beta = [(torch.arange(len(states)) >= len(states) - 2).double()]
    for t in range(1, len(rows)):
        alpha.append((moves @ alpha[-1]) * factors[t])
        beta.append(moves.T @ (beta[-1] * factors[len(rows) - t]))
    joint = torch.stack(alpha) * torch.stack(beta[::-1])
    return joint / joint.sum(1, keepdim=True)


@by_kind
@paths
def test_posteriors_of_the_exact_case(device: str, of: str) -> None:
    x = torch.tensor([[0.5, 0.25, 0.25], [0.25, 0.5, 0.25], [0.25, 0.25, 0.5]], device=device).log()
    found = F.ctc_posteriors(x, torch.tensor([1, 2], device=device), of=of)
    right = torch.tensor([[8.0, 9.0, 0.0], [2.0, 12.0, 3.0], [1.0, 0.0, 16.0]]) / 17
    right = right if of == "classes" else right.roll(-1, 1)
    torch.testing.assert_close(found.cpu(), right, rtol=0, atol=1e-7)


@pytest.mark.addresses
@by_kind
@paths
def test_posteriors(device: str, of: str) -> None:
    given = drawn(41, 4, 6, 9)
    given[2] = given[2].clamp(min=18)
    right = expected(given, of)
    found = F.ctc_posteriors(*(y.to(device) for y in given), of=of)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.cpu().double(), right, rtol=0, atol=5e-7)
    x, *others = (y.to(device) for y in given)
    strided = x.permute(1, 2, 0).contiguous().permute(0, 2, 1)
    moved = F.ctc_posteriors(strided, *others, of=of, batch_first=True)
    assert torch.equal(moved.transpose(0, 1), found)
    alone = F.ctc_posteriors(x[:, 0], others[0][0], of=of)
    assert torch.equal(alone, found[:, 0])


@paths
def test_posteriors_of_classes_are_the_gradient(device: str) -> None:
    """Posteriors by kernels match to the bit, for concatenated targets too."""
    x, targets, ends, lengths = (y.to(device) for y in drawn(41, 4, 6, 9))
    joined = torch.cat([targets[n, :k] for n, k in enumerate(lengths.tolist())])
    leaf = x.requires_grad_()
    F.ctc_loss(leaf, joined, ends, lengths, reduction="sum", zero_infinity=True).backward()
    found = F.ctc_posteriors(x.detach(), joined, ends, lengths)
    assert leaf.grad is not None
    torch.testing.assert_close(found, -leaf.grad, rtol=0, atol=0 if device == KERNELS and HOST else 1e-7)


@by_kind
@paths
def test_edges_of_posteriors(device: str, of: str) -> None:
    """Posteriors are 0 without a path, NaN with NaN, 0 with bad labels, and 0 past the end of a sample."""
    x = torch.randn(6, 4, 4, generator=fresh()).log_softmax(-1)
    x[2, 1], x[3, 2, 1] = -inf, nan
    targets = torch.tensor([[1, 2, 1], [1, 2, 0], [1, 2, 0], [1, 4, 0]], device=device)
    lengths = torch.tensor([3, 2, 2, 2], device=device)
    ends = torch.tensor([5, 6, 5, 6], device=device)
    found = F.ctc_posteriors(x.to(device), targets, ends, lengths, of=of, check_targets="off")
    torch.testing.assert_close(found[:5, 0].sum(-1), torch.ones(5, device=device))
    assert not found[5].any() and not found[:, [1, 3]].any() and found[:5, 2].isnan().all()
    empty = F.ctc_posteriors(x[:0].to(device), targets, None, torch.zeros_like(lengths), of=of)
    assert empty.shape == (0, 4, 4)


@by_kind
def test_derivatives_of_posteriors(of: str) -> None:
    x, targets, ends, lengths = drawn(7, 3, 4, 2)
    x = x.double().requires_grad_()
    assert torch.autograd.gradcheck(lambda y: F.ctc_posteriors(y, targets, ends, lengths, of=of), x)


@kernels
def test_derivatives_of_posteriors_are_the_hessian() -> None:
    x, targets, ends, lengths = (y.to(KERNELS) for y in drawn(9, 3, 5, 3))
    v = torch.randn(x.shape, generator=fresh(), dtype=torch.float64).to(KERNELS)
    x = x.double().requires_grad_()
    value = F.ctc_loss(x, targets, ends, lengths, reduction="sum", zero_infinity=True)
    (slope,) = torch.autograd.grad(value, x, create_graph=True)
    (right,) = torch.autograd.grad((slope * v).sum(), x)
    (found,) = torch.autograd.grad((F.ctc_posteriors(x, targets, ends, lengths) * v).sum(), x)
    torch.testing.assert_close(found, -right, rtol=1e-9, atol=1e-10)


@kernels
def test_a_compiled_graph_and_vmap_of_posteriors() -> None:
    torch.compiler.reset()
    given = [y.to(KERNELS) for y in drawn(20, 3, 6, 5)]
    right = F.ctc_posteriors(*given, of="positions")
    compiled = torch.compile(lambda *y: F.ctc_posteriors(*y, of="positions"), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*given), right)
    many = torch.func.vmap(lambda *y: F.ctc_posteriors(*y, of="positions"), (1, 0, 0, 0), 1)(*given)
    assert torch.equal(many, right)


@pytest.mark.skipif(not HOST, reason="no C++ compiler on Linux")
def test_posteriors_of_arrays_of_other_libraries() -> None:
    given = drawn(41, 4, 6, 9)
    right = F.ctc_posteriors(*given)
    plain = F.ctc_posteriors(*(y.numpy() for y in given))
    numpy.testing.assert_allclose(plain, right.numpy(), atol=1e-6)
    with stand_in.cupy() as cupy:
        found = F.ctc_posteriors(*(cupy.asarray(y.numpy()) for y in given))
        numpy.testing.assert_allclose(numpy.asarray(found), right.numpy(), atol=1e-6)


def test_errors_of_posteriors() -> None:
    x = torch.zeros(4, 2, 3)
    with pytest.raises(
        ValueError, match=r"^ctc_posteriors: `targets` must have the shape \(N, S\) with of='positions'"
    ):
        F.ctc_posteriors(x, torch.tensor([1, 2]), None, (1, 1), of="positions")
    with pytest.raises(ValueError, match=r"^ctc_posteriors: `of` must be one of 'classes', 'positions', got 'labels'"):
        F.ctc_posteriors(x, torch.tensor([[1], [2]]), of="labels")


@kernels
def test_a_warm_up_compiles_what_calls_need() -> None:
    """A warm-up needs the kernel that prepares samples, the recursion's two, and the last one of each function."""
    place = "cpu" if KERNELS == "cpu" else None
    shapes = (20, 3, 6), (3, 5)
    for function, needed in ((F.ctc_forced_alignment, 2), (F.ctc_posteriors, 3)):
        done = cupylosses.warmup(function, "float32", shapes, device=place, target_lengths=True)
        assert done.by_loss == {function.__name__: needed}

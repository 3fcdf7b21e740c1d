"""Log-probabilities of labels, and entropies, of given logits and of a linear layer's output."""

from __future__ import annotations

import functools
import platform
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy
import pytest
import torch
from devices import HOST, KERNELS
from grids import in_turn, short_or_full
from tools import cupy_stand_in as stand_in
from tools.gate_subsets import fast_compilers
from tools.linear_softmax.padding import pad_all
from tools.log_probs import derivatives, truth

import cupylosses
import cupylosses.functional
from cupylosses.backends.torch import device as torch_device
from cupylosses.backends.torch import evaluation, formulas
from cupylosses.engines.linear_softmax import chunks
from cupylosses.engines.log_probs.codegen import LogProbKernel
from cupylosses.engines.strides import MAX_RANK

F: Any = cupylosses.functional

kernels = pytest.mark.kernels

#: Accepted error of a gradient relative to its norm, by the dtype to which it is rounded. Results never have 16 bits.
TOLERANCE = {"float32": 3e-6, "bfloat16": 4e-3, "float16": 6e-4, "float64": 1e-14}


def fresh() -> torch.Generator:
    """A generator with a new random seed, which the report of a failure shows."""
    seed = int(torch.empty((), dtype=torch.int64).random_().item())
    print(f"seed {seed}")
    return torch.Generator().manual_seed(seed)


def operands(
    rows: tuple[int, ...], classes: int, several: int = 0, dtype: str = "float32", size: float = 3.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits that require a gradient, and labels; if rows have several labels, two of them are equal."""
    generator = fresh()
    x = size * torch.randn(*rows, classes, generator=generator, dtype=torch.float64)
    shape = (*rows, several) if several else rows
    index = torch.randint(classes, shape, generator=generator)
    if several > 1:
        index[..., 0] = index[..., 1]
    return x.to(getattr(torch, dtype)).to(KERNELS).requires_grad_(), index.to(KERNELS)


def agrees(
    logits: torch.Tensor, index: torch.Tensor, entropy: bool = True, dtype: str = "float32", **options: Any
) -> None:
    """Checks values and gradients against the truth."""
    found = F.token_log_probs(logits, index, return_entropy=entropy, **options)
    exact = truth(logits, index, **options)
    found = tuple(found) if entropy else (found,)
    scale = max([1.0, *torch.cat([x.detach().abs().flatten() for x in exact]).tolist()])
    upstream = [torch.randn(x.shape, dtype=torch.float64, device=KERNELS) for x in exact[: len(found)]]
    for x, y in zip(found, exact, strict=False):
        assert x.shape == y.shape and x.dtype == (torch.float64 if dtype == "float64" else torch.float32)
        wrong = (x - y).detach().abs().flatten().tolist()
        assert max(wrong, default=0.0) <= (1e-13 if dtype == "float64" else 4e-7) * scale
    (slope,) = torch.autograd.grad(found, logits, [g.to(x.dtype) for g, x in zip(upstream, found, strict=True)])
    (right,) = torch.autograd.grad(exact[: len(found)], logits, upstream)
    wrong, size = float((slope.double() - right.double()).norm()), float(right.double().norm())
    assert slope.dtype == logits.dtype and wrong <= TOLERANCE[dtype] * size, (wrong, size)


# ----------------------------------------------------------------------------------------------------------------------
# Values and gradients


@kernels
@pytest.mark.parametrize(
    ("dtype", "classes"), in_turn(["float32", "bfloat16", "float16", "float64"], [300, 5000], times=short_or_full(1, 2))
)
def test_values_and_gradients(dtype: str, classes: int) -> None:
    """Rows for one warp and rows for one block."""
    logits, index = operands((4, 5), classes, dtype=dtype)
    agrees(logits, index, dtype=dtype)
    agrees(logits, index, False, dtype)


@kernels
@pytest.mark.parametrize(("rows", "classes"), [(70, 1), (70, 7), (33, 37), (3, 20011), (1, 70000)])
def test_rows_of_any_length(rows: int, classes: int) -> None:
    """Rows for one thread, rows at any address, and a few long rows, which a cluster shares and backward slices."""
    agrees(*operands((rows,), classes), entropy=classes > 1)
    agrees(*operands((rows,), classes, dtype="bfloat16"), entropy=classes > 1, dtype="bfloat16")


@kernels
@pytest.mark.parametrize(("dtype", "classes", "several"), [("bfloat16", 10, 0), ("float32", 47, 2), ("float64", 7, 0)])
def test_many_rows_of_few_classes(dtype: str, classes: int, several: int) -> None:
    """A lane processes each row: of pairs of 16 bits, at any address, and with padding."""
    logits, index = operands((4099,), classes, several, dtype)
    index[17], index[-1] = -100, 3
    agrees(logits, index, dtype=dtype)
    padded = torch.nn.functional.pad(logits.detach(), (0, 3))[:, :classes].requires_grad_()
    agrees(padded, index, dtype=dtype)


@kernels
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_rows_that_vectors_do_not_divide(dtype: str) -> None:
    """A lane has up to four of the elements at the ends of such rows."""
    agrees(*operands((9,), 161, 2, dtype), dtype=dtype)


@kernels
@pytest.mark.parametrize("options", [{"temperature": 0.7, "logit_scale": 0.5}, {"softcap": 4.0, "temperature": 1.5}])
def test_options(options: dict[str, float]) -> None:
    agrees(*operands((9,), 301), **options)


@kernels
@pytest.mark.parametrize("classes", [40, 3001])
@pytest.mark.parametrize("several", [1, 5, 130])
def test_several_labels_of_a_row(several: int, classes: int) -> None:
    """Some rows have more labels than a thread has vectors, and equal labels."""
    logits, index = operands((6,), classes, several, "bfloat16")
    agrees(logits, index, dtype="bfloat16")
    agrees(logits.detach().float().requires_grad_(), index.int(), False)


@kernels
def test_masked_and_ignored_labels() -> None:
    """The logits of masked and ignored labels are not read."""
    for several in (0, 3):
        logits, index = operands((4, 6), 300, several)
        mask = torch.tensor([[True, False, True, True, True, True]]).to(KERNELS)
        index[1], index[2, 3] = 7, 7
        with torch.no_grad():
            logits[1, 0], logits[0, 1] = torch.nan, torch.inf
        index[1, 0] = 7
        if several:
            index[3, 4, 1] = 7
        given = logits.detach().nan_to_num(0.0, 0.0).requires_grad_()
        agrees(given, index, mask=mask, ignore_index=7)
        found = F.token_log_probs(logits, index, mask=mask, ignore_index=7, return_entropy=True)
        exact = truth(given, index, mask=mask, ignore_index=7)
        for x, y in zip(found, exact, strict=True):
            torch.testing.assert_close(x.double(), y, rtol=1e-6, atol=1e-6)
        (slope,) = torch.autograd.grad(found.log_probs.sum() + found.entropy.sum(), logits)
        assert slope.isfinite().all() and not slope[1].any() and not slope[:, 1].any()


@kernels
def test_entropies_alone() -> None:
    """Rows with 0 labels have an entropy, too, if the mask includes them."""
    logits, _ = operands((3, 4), 300)
    index = torch.empty(3, 4, 0, dtype=torch.int64, device=KERNELS)
    agrees(logits, index)
    given = layer((3, 4))
    linear_agrees(given | {"index": index}, 1e-6, 1e-5, mask=torch.tensor([True, False, True, True], device=KERNELS))


@kernels
def test_layouts_that_are_read_where_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shifted tokens, as in next-token prediction, and rows that start at odd addresses are not copied."""
    monkeypatch.setattr(evaluation, "with_copies", None)
    logits, index = operands((3, 8), 301, dtype="bfloat16")
    whole = torch.cat((logits.detach(), logits.detach()), 1)
    agrees(whole[:, 1:9].requires_grad_(), index, dtype="bfloat16")
    agrees(logits.detach()[..., 1:].requires_grad_(), index.clamp(max=299).T.contiguous().T, dtype="bfloat16")


@kernels
@pytest.mark.parametrize("classes", [40, 300])
def test_strided_classes_are_copied(classes: int) -> None:
    logits, index = operands((5,), classes)
    agrees(logits.detach().T.contiguous().T.requires_grad_(), index)
    agrees(logits.detach()[:1].expand(5, classes).requires_grad_(), index)


@kernels
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sure_rows_keep_their_digits(dtype: str) -> None:
    """If one class has nearly all probability, 1 - p, log p and the entropy are tiny, but accurate relative to that."""
    logits = torch.zeros(3, 500, dtype=getattr(torch, dtype), device=KERNELS)
    logits[:, 17] = torch.tensor([30.0, 60.0, 200.0]).to(logits)
    logits[:, 400] = 4.0
    logits.requires_grad_()
    index = torch.full((3,), 17, device=KERNELS)
    found = F.token_log_probs(logits, index, return_entropy=True)
    rest = logits.detach().double() - logits.detach().double()[:, 17:18]
    others = torch.cat((rest[:, :17], rest[:, 18:]), 1).exp().sum(-1)
    torch.testing.assert_close(found.log_probs.double(), -others.log1p(), rtol=1e-5, atol=1e-37)
    entropy = others.log1p() - (rest * rest.exp()).sum(-1) / (1 + others)
    torch.testing.assert_close(found.entropy.double(), entropy, rtol=1e-5, atol=1e-37)
    assert (found.log_probs <= 0).all()
    slopes = torch.autograd.grad(found.log_probs.sum(), logits, retain_graph=True)[0][:, 17].double()
    torch.testing.assert_close(slopes, others / (1 + others), rtol=5e-3 if dtype == "bfloat16" else 1e-5, atol=1e-37)
    slopes = torch.autograd.grad(found.entropy.sum(), logits)[0][:2, 17].double()
    gap = -(rest * rest.exp()).sum(-1) / (1 + others)
    torch.testing.assert_close(slopes, (-gap / (1 + others))[:2], rtol=5e-3 if dtype == "bfloat16" else 1e-5, atol=0)


@kernels
def test_never_above_zero() -> None:
    logits, _ = operands((64,), 333, size=40.0)
    for options in ({}, {"temperature": 0.3}, {"softcap": 30.0, "temperature": 0.1}):
        found = F.token_log_probs(logits, logits.argmax(-1), **options)
        assert (found <= 0).all() and found.isfinite().all()


@kernels
@pytest.mark.parametrize("softcap", [None, 8.0])
def test_infinite_logits(softcap: float | None) -> None:
    """Classes with a logit of -inf have no gradient, except as a label; rows of only such classes are NaN."""
    logits, index = operands((6,), 400)
    with torch.no_grad():
        logits[:, ::3] = -torch.inf
        if softcap is None:
            logits[4], logits[5, 7] = -torch.inf, torch.inf
    index = index.clamp(max=398) // 3 * 3 + 1
    index[0] = 3
    found = F.token_log_probs(logits, index, return_entropy=True, softcap=softcap)
    (slope,) = torch.autograd.grad(found.log_probs.sum() + 0.5 * found.entropy.sum(), logits)
    if softcap is not None:
        agrees(logits, index, softcap=softcap)
        return
    assert found.log_probs[0] == -torch.inf and found.entropy[:4].isfinite().all()
    assert found.log_probs[4:].isnan().all() and found.entropy[4:].isnan().all() and slope[4:].isnan().all()
    assert slope[0, 3] == 1.0 and slope[:4].isfinite().all() and not slope[1:4, ::3].any()
    kept = [c for c in range(400) if c % 3]
    plain = logits.detach()[1:4, kept].requires_grad_()
    exact = truth(plain, (index[1:4] - 1) // 3 * 2)
    torch.testing.assert_close(found.entropy[1:4].double(), exact[1], rtol=1e-6, atol=0)
    (right,) = torch.autograd.grad(exact[0].sum() + 0.5 * exact[1].sum(), plain)
    torch.testing.assert_close(slope[1:4, kept], right, rtol=1e-4, atol=1e-8)


@kernels
def test_labels_out_of_range() -> None:
    logits, index = operands((2, 4), 300, 3)
    index[1, 2, 1] = 300
    with pytest.raises(IndexError, match=r"^token_log_probs: `index\[1, 2, 1\]` must be .* got 300 for 300 classes"):
        F.token_log_probs(logits, index, check_targets="sync")
    found = F.token_log_probs(logits, index, check_targets="off")
    assert found.isnan().nonzero().tolist() == [[1, 2, 1]]
    (slope,) = torch.autograd.grad(found.sum(), logits)
    index[1, 2, 1] = -100
    (right,) = torch.autograd.grad(F.token_log_probs(logits, index).sum(), logits)
    torch.testing.assert_close(slope, right, rtol=0, atol=0)


# ----------------------------------------------------------------------------------------------------------------------
# Second derivatives


def agrees_along(
    logits: torch.Tensor,
    index: torch.Tensor,
    tangents: torch.Tensor | None = None,
    entropy: bool = True,
    least: float = 1.0,
    **options: Any,
) -> list[torch.Tensor]:
    """Checks the derivatives of values and gradients along tangents against the truth, and returns them.

    Values may be differences of large terms; ``least`` is the least size that their errors are compared with.
    """
    if tangents is None:
        tangents = torch.randn(logits.shape, dtype=torch.float64).to(logits.dtype).to(KERNELS)
    upstream = [torch.randn(x, dtype=torch.float64, device=KERNELS) for x in (index.shape, logits.shape[:-1])]
    upstream = upstream[: 1 + entropy]
    found = derivatives(F.token_log_probs, logits, index, tangents, upstream, return_entropy=entropy, **options)
    wide = logits.detach().nan_to_num(0.0, 0.0, 0.0).double().requires_grad_()
    right = derivatives(truth, wide, index, tangents.nan_to_num(0.0).double(), upstream, **options)
    for x, y in zip(found, right, strict=True):
        wrong, size = float((x.double() - y).norm()), float(y.norm())
        size = size if x.shape == logits.shape else max(size, least)
        assert wrong <= TOLERANCE[str(x.dtype)[6:]] * size, (wrong, size)
    return found


@pytest.fixture
def _without_formulas(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets derivatives fail that no kernel computes."""
    monkeypatch.setattr(formulas, "hvp", None)
    monkeypatch.setattr(formulas, "evaluate", None)


@kernels
@pytest.mark.usefixtures("_without_formulas")
@pytest.mark.parametrize(
    ("rows", "classes", "dtype"),
    [((4, 5), 301, "float32"), ((6,), 5000, "float16"), ((4,), 70001, "bfloat16"), ((3,), 2000, "float64")],
)
def test_second_derivatives(rows: tuple[int, ...], classes: int, dtype: str) -> None:
    """Rows for one warp, at any address, for one block, and for a cluster of blocks."""
    agrees_along(*operands(rows, classes, dtype=dtype))


@kernels
@pytest.mark.usefixtures("_without_formulas")
@pytest.mark.parametrize(("dtype", "classes", "several"), [("bfloat16", 10, 0), ("float32", 47, 2), ("float64", 7, 0)])
def test_second_derivatives_of_few_classes(dtype: str, classes: int, several: int) -> None:
    """A lane processes each row, of logits and tangents without gaps and with padding."""
    logits, index = operands((4099,), classes, several, dtype)
    index[17] = -100
    agrees_along(logits, index)
    padded = torch.nn.functional.pad(logits.detach(), (0, 3))[:, :classes].requires_grad_()
    agrees_along(padded, index, torch.randn_like(padded.detach()))


@kernels
@pytest.mark.usefixtures("_without_formulas")
def test_second_derivatives_with_options() -> None:
    """Several labels with and without entropies, a scale, a softcap, and rows that do not count, which are not read."""
    for several, entropy, options in (
        (2, False, {"temperature": 0.7}),
        (3, True, {"softcap": 4.0, "logit_scale": 1.3}),
    ):
        logits, index = operands((4, 6), 300, several)
        mask = torch.tensor([[True, False, True, True, True, True]]).to(KERNELS)
        index[1], index[2, 3, 0] = 7, 7
        tangents = torch.randn_like(logits.detach())
        with torch.no_grad():
            logits[1, 0], logits[0, 1], tangents[1, 2], tangents[3, 1] = torch.nan, torch.inf, torch.nan, torch.inf
        found = agrees_along(logits, index, tangents, entropy, mask=mask, ignore_index=7, **options)
        for x in found:
            assert x.isfinite().all() and not x[1].any() and not x[:, 1].any()


@kernels
@pytest.mark.usefixtures("_without_formulas")
def test_second_derivatives_of_entropies_alone() -> None:
    logits, _ = operands((3, 4), 300)
    agrees_along(logits, torch.empty(3, 4, 0, dtype=torch.int64, device=KERNELS))


@kernels
@pytest.mark.usefixtures("_without_formulas")
@pytest.mark.parametrize("classes", [9, 300])
def test_tangents_of_any_strides(classes: int) -> None:
    """Tangents that classes share or that are misaligned are read in place; transposed ones are copied."""
    logits, index = operands((5000 if classes == 9 else 7,), classes, dtype="bfloat16")
    x = torch.randn_like(logits.detach())
    shared, misaligned = (
        x[:, :1].expand(x.shape),
        torch.nn.functional.pad(x, (0, 1)).flatten()[1:].unfold(0, classes, classes + 1),
    )
    for tangents in (misaligned[: len(x)], x.T.contiguous().T):
        agrees_along(logits, index, tangents)
    found = derivatives(
        F.token_log_probs, logits, index, shared, [torch.ones(len(x), device=KERNELS)] * 2, return_entropy=True
    )
    assert not any(y.any() for y in found)


@kernels
@pytest.mark.usefixtures("_without_formulas")
def test_second_derivatives_of_confident_rows() -> None:
    """The derivatives keep their digits where the label's logit exceeds all others by far."""
    logits, index = operands((6,), 300, 1)
    with torch.no_grad():
        logits[range(6), index[:, 0]] += 30
    for x in (logits, (logits.detach() + 1000).requires_grad_()):
        agrees_along(x, index, least=0.0)
    agrees_along(logits, index, softcap=20.0)


@kernels
@pytest.mark.usefixtures("_without_formulas")
def test_second_derivatives_of_bad_labels_and_logits() -> None:
    """A label out of range has no derivatives; those of a row without a finite maximum are NaN."""
    logits, index = operands((5,), 300, 2)
    index[1, 0], index[2, 1] = 300, -3
    with torch.no_grad():
        logits[3, 7], logits[4] = torch.inf, -torch.inf
    upstream = [torch.randn(x, device=KERNELS) for x in ((5, 2), (5,))]
    found = derivatives(
        F.token_log_probs,
        logits,
        index,
        torch.randn_like(logits.detach()),
        upstream,
        return_entropy=True,
        check_targets="off",
    )
    of_labels, of_entropies, of_logits = found
    assert not of_labels[1, 0] and not of_labels[2, 1] and of_labels[:3].isfinite().all()
    assert of_logits[:3].isfinite().all() and of_logits[0].any()
    assert of_labels[3:].isnan().all() and of_entropies[3:].isnan().all() and of_logits[3:].isnan().all()


@kernels
def test_derivatives_of_values_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel computes forward mode."""
    logits, index = operands((9,), 300, 2)
    tangents = torch.randn_like(logits.detach())
    monkeypatch.setattr(formulas, "hvp", None)
    f = functools.partial(F.token_log_probs, index=index, return_entropy=True)
    _, found = torch.func.jvp(lambda x: tuple(f(x)), (logits.detach(),), (tangents,))
    _, right = torch.func.jvp(lambda x: truth(x, index), (logits.detach().double(),), (tangents.double(),))
    for x, y in zip(found, right, strict=True):
        torch.testing.assert_close(x.double(), y, rtol=1e-5, atol=1e-6)


# ----------------------------------------------------------------------------------------------------------------------
# Transforms and libraries


def packed(x: torch.Tensor, index: torch.Tensor, function: Callable[..., Any] | None = None) -> torch.Tensor:
    """A scalar that depends on log-probabilities and entropies."""
    if function is None:
        log_probs, entropy = F.token_log_probs(x, index, temperature=0.8, return_entropy=True)
    else:
        log_probs, entropy = function(x, index, temperature=0.8)
    return log_probs.sin().sum() + (entropy * entropy).sum()


def exact(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return packed(x, index, truth)


@kernels
@pytest.mark.parametrize("several", [0, 2])
def test_transforms(several: int) -> None:
    x, index = operands((3, 4), 20, several, "float64")
    x, v = x.detach(), torch.randn_like(x.detach())
    for f in (torch.func.grad, torch.func.vmap):
        torch.testing.assert_close(f(packed)(x, index), f(exact)(x, index))
    each = torch.func.vmap(torch.func.grad(packed), (0, None))
    torch.testing.assert_close(each(x, index[0]), torch.func.vmap(torch.func.grad(exact), (0, None))(x, index[0]))
    found = torch.func.jvp(lambda x: packed(x, index), (x,), (v,))
    torch.testing.assert_close(found, torch.func.jvp(lambda x: exact(x, index), (x,), (v,)))
    found = torch.func.jvp(torch.func.grad(lambda x: packed(x, index)), (x,), (v,))[1]
    torch.testing.assert_close(found, torch.func.jvp(torch.func.grad(lambda x: exact(x, index)), (x,), (v,))[1])


@kernels
def test_gradients_of_transforms_are_those_of_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    x, index = operands((3, 4), 20)
    x = x.detach()
    right = torch.func.vmap(torch.func.grad(exact))(x, index)
    monkeypatch.setattr(formulas, "evaluate", None)
    # A gradient is a difference of products of log-probabilities and entropies, which reach 10.
    torch.testing.assert_close(torch.func.vmap(torch.func.grad(packed))(x, index), right, rtol=1e-5, atol=4e-6)


@kernels
def test_higher_derivatives() -> None:
    x, index = operands((3,), 11, dtype="float64")
    v = torch.randn_like(x)

    def third(f: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        (first,) = torch.autograd.grad(f(x, index), x, create_graph=True)
        (second,) = torch.autograd.grad((first * v).sum(), x, create_graph=True)
        return [first, second, *torch.autograd.grad((second * v).sum(), x)]

    for a, b in zip(third(packed), third(exact), strict=True):
        torch.testing.assert_close(a, b)


@kernels
def test_one_label_is_a_loss_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an entropy, log-probabilities of one label have the kernels of losses of rows: those for strided classes,
    which are not copied, and those of second derivatives.
    """
    monkeypatch.setattr(evaluation, "with_copies", None)
    monkeypatch.setattr(formulas, "evaluate", None)
    x, index = operands((90,), 40)
    x = x.detach().T.contiguous().T.requires_grad_()
    index[3] = -100
    mask = torch.arange(90, device=KERNELS) != 7
    weights = torch.randn(90, device=KERNELS)

    def derivatives(f: Callable[..., torch.Tensor], x: torch.Tensor, weights: torch.Tensor) -> list[torch.Tensor]:
        found = f(x, index, mask=mask, temperature=0.7)
        (first,) = torch.autograd.grad((found * weights).sum(), x, create_graph=True)
        return [found, first, *torch.autograd.grad((first * first).sum(), x)]

    found = derivatives(F.token_log_probs, x, weights)
    right = derivatives(lambda *z, **options: truth(*z, **options)[0], x, weights.double())
    for a, b in zip(found, right, strict=True):
        torch.testing.assert_close(a.double(), b.double(), rtol=1e-5, atol=1e-5)


@kernels
@pytest.mark.parametrize("entropy", [True, False])
def test_a_compiled_graph(entropy: bool) -> None:
    torch.compiler.reset()
    x, index = operands((5,), 300)

    def step(x: torch.Tensor) -> Any:
        if not entropy:
            return F.token_log_probs(x, index).sum()
        found = F.token_log_probs(x, index, return_entropy=True)
        return found.log_probs.sum() + found.entropy.sum()

    value = torch.compile(step, fullgraph=True, backend="aot_eager")(x)
    torch.testing.assert_close(value, step(x), rtol=0, atol=0)
    torch.testing.assert_close(torch.autograd.grad(value, x), torch.autograd.grad(step(x), x), rtol=0, atol=0)


@kernels
def test_results_are_the_same_on_any_grid() -> None:
    from cupylosses.testing import host

    x, index = (y.detach().cpu() for y in operands((7,), 700, 2))
    found = []
    for processors in (2, 5):
        with host.execution(processors, seed=processors):
            given = x.clone().requires_grad_()
            result = F.token_log_probs(given, index, return_entropy=True)
            found.append([*result, *torch.autograd.grad([*result], given, [torch.ones_like(y) for y in result])])
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


@pytest.mark.skipif(not HOST, reason="no C++ compiler on Linux")
def test_cupy() -> None:
    x, index = (y.cpu() for y in operands((6,), 300, 2))
    log_probs, entropy = truth(x, index)
    (right,) = torch.autograd.grad(log_probs.sum() + entropy.sum(), x)
    with stand_in.cupy() as cupy:
        logits, labels = cupy.asarray(x.detach().numpy()), cupy.asarray(index.numpy())
        value, slope = cupylosses.value_and_grad(F.token_log_probs, logits, labels, return_entropy=True)
        plain = F.token_log_probs(logits, labels)
        for a, b in ((value.log_probs, log_probs), (plain, log_probs), (value.entropy, entropy), (slope, right)):
            numpy.testing.assert_allclose(numpy.asarray(a), b.detach().numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("classes", [0, 1, 30])
def test_numpy_and_formulas(classes: int) -> None:
    x = 3 * torch.randn(6, classes, generator=fresh())
    index = torch.zeros(6, dtype=torch.int64) if classes else torch.full((6,), -100)
    found = F.token_log_probs(x.numpy(), index.numpy(), return_entropy=True)
    tensors = F.token_log_probs(x, index, return_entropy=True)
    exact = truth(x, index) if classes else (torch.zeros(6), torch.zeros(6))
    for a, b, c in zip(found, tensors, exact, strict=True):
        assert a.dtype == numpy.float32 and b.dtype == torch.float32
        numpy.testing.assert_allclose(a, c.numpy(), rtol=1e-6, atol=1e-7)
        numpy.testing.assert_allclose(b.numpy(), c.numpy(), rtol=1e-5, atol=1e-6)
    if classes:
        value, slope = cupylosses.value_and_grad(F.token_log_probs, x.numpy(), index.numpy(), return_entropy=True)
        assert value.entropy.shape == (6,) and slope.shape == x.shape


@kernels
def test_a_warm_up_compiles_what_calls_need() -> None:
    place = "cpu" if KERNELS == "cpu" else None
    done = cupylosses.warmup(F.token_log_probs, "bfloat16", (6, 300), return_entropy=True, device=place)
    assert done.by_loss == {"token_log_probs": 2}
    done = cupylosses.warmup(F.token_log_probs, "bfloat16", (6, 300), device=place)
    assert done.by_loss == {"token_log_probs": 2}
    shapes = (41, 24), (300, 24)
    done = cupylosses.warmup("linear_token_log_probs", "bfloat16", shapes, max_memory=SMALL, device=place)
    assert done.by_loss == {"linear_token_log_probs": 3}  # one kernel rounds the sum of the weight's gradients


@pytest.mark.skipif(platform.system() == "Darwin", reason="there is no NVRTC for macOS")
def test_kernels_compile() -> None:
    """Kernels compile for the oldest and newest GPUs and compilers, with 16-byte accesses."""
    compilers = {x.version[0]: x for x in fast_compilers()}
    forward = {"kind": "unreduced", "layout": "block", "cluster": 4, "entropy": True, "rank": MAX_RANK, "mask": "bool"}
    backward = {"kind": "from_residual", "layout": "subwarp", "capped": True}
    lanes = {**backward, "layout": "thread_per_row", "vec_size": 1}
    second = {"kind": "hvp", "entropy": True, "capped": True}
    for version, architecture, chosen in (
        (13, "sm_90", {**forward, "input": "bfloat16", "vec_size": 8, "capped": True}),
        (13, "sm_75", {**forward, "input": "float64", "vec_size": 2, "cluster": 1}),
        (13, "sm_120", {**backward, "input": "float32", "vec_size": 4, "gradient": "bfloat16", "entropy": True}),
        (11, "sm_70", {**backward, "input": "float16", "vec_size": 8, "gradient": "float16"}),
        (11, "sm_80", {**lanes, "input": "float32", "gradient": "float32"}),
        (
            11,
            "sm_80",
            {**second, "layout": "thread_per_row", "vec_size": 1, "input": "bfloat16", "gradient": "bfloat16"},
        ),
        (
            11,
            "sm_70",
            {**second, "layout": "subwarp", "vec_size": 4, "edges": 1, "input": "float32", "gradient": "float32"},
        ),
        (
            13,
            "sm_90",
            {**second, "layout": "block", "vec_size": 8, "cluster": 8, "input": "float16", "gradient": "float16"},
        ),
    ):
        compute = "float64" if chosen["input"] == "float64" else "float32"
        kernel = LogProbKernel(F.token_log_probs.loss, **{"index": "int64", "mask": "", "compute": compute, **chosen})
        found = compilers[version].compile(kernel.source(), architecture).resources
        assert found.entries == (kernel.entry,) and not found.warnings and found.wide_loads >= 4
        assert found.spills <= 400 and (found.wide_stores > 0 or kernel.gradient == "bfloat16")


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"index": torch.zeros(4, dtype=torch.int64)}, ValueError, "`index` must have the shape of the rows"),
        ({"index": torch.zeros(5)}, TypeError, "`index` must have one of the dtypes .* got float32"),
        ({"logits": torch.zeros(5, 6, dtype=torch.int32)}, TypeError, "`logits` must have one of the dtypes"),
        ({"logits": torch.zeros(())}, ValueError, "`logits` needs a class dimension"),
        ({"mask": torch.ones(4, dtype=torch.bool)}, ValueError, r"`mask` must broadcast .* \(5,\), got \(4,\)"),
        ({"mask": torch.ones(5)}, TypeError, "`mask` must be bool"),
        ({"temperature": 0.0}, ValueError, "`temperature` must be a number > 0, got 0.0"),
        ({"softcap": float("inf")}, ValueError, "`softcap` must be finite"),
        ({"return_entropy": 1}, TypeError, "`return_entropy` must be True or False, got 1"),
        ({"check_targets": "never"}, ValueError, "`check_targets` must be one of"),
        ({"index": torch.tensor([0, 1, 2, 3, 6])}, IndexError, r"`index\[4\]` must be a class index, 0 to 5"),
    ],
)
def test_errors(changed: dict[str, Any], error: type[Exception], message: str) -> None:
    given = {"logits": torch.zeros(5, 6), "index": torch.zeros(5, dtype=torch.int64)}
    with pytest.raises(error, match=f"^token_log_probs: .*{message}"):
        F.token_log_probs(**(given | changed))


# ----------------------------------------------------------------------------------------------------------------------
# Log-probabilities of a linear layer's output

#: Size in bytes of a chunk of 8 rows of 320 classes in 16 bits, or of 4 rows in float32.
SMALL = 8 * 320 * 2


def layer(
    rows: tuple[int, ...] = (41,), classes: int = 300, several: int = 0, dtype: str = "float32", features: int = 24
) -> dict[str, torch.Tensor]:
    """Features, weight and bias that require a gradient, and labels."""
    generator = fresh()

    def draw(*shape: int, size: float = 1.0) -> torch.Tensor:
        x = size * torch.randn(shape, generator=generator, dtype=torch.float64)
        return x.to(getattr(torch, dtype)).to(KERNELS).requires_grad_()

    shape = (*rows, several) if several else rows
    return {
        "input": draw(*rows, features),
        "linear_weight": draw(classes, features, size=0.3),
        "index": torch.randint(classes, shape, generator=generator).to(KERNELS),
        "linear_bias": draw(classes),
    }


def linear_agrees(given: dict[str, torch.Tensor], value: float, slope: float, **options: Any) -> None:
    """Checks values, with an error relative to the largest one or to 1, and gradients, relative to their norm."""
    own = {x: options.pop(x) for x in ("logits_dtype", "accumulate_dtype", "max_memory") if x in options}
    leaves = {k: x for k, x in given.items() if x.requires_grad}
    wide = {k: x.detach().double().requires_grad_() for k, x in leaves.items()}
    whole = {k: x.double() for k, x in given.items() if k != "index"} | wide
    logits = torch.nn.functional.linear(whole["input"], whole["linear_weight"], whole.get("linear_bias"))
    exact = truth(logits, given["index"], **options)
    found = F.linear_token_log_probs(**given, **options, **own, return_entropy=True)
    upstream = [torch.randn_like(x) for x in exact]
    for x, y in zip(found, exact, strict=True):
        wrong, size = (max(d.detach().abs().flatten().tolist(), default=0.0) for d in (x - y, y))
        assert x.shape == y.shape and wrong <= value * max(1.0, size)
    grad_outputs = [g.to(x.dtype) for g, x in zip(upstream, found, strict=True)]
    slopes = torch.autograd.grad(found, [*leaves.values()], grad_outputs)
    right = torch.autograd.grad(exact, [*wide.values()], upstream)
    for x, y, z in zip(slopes, right, leaves.values(), strict=True):
        assert x.dtype == z.dtype and x.shape == z.shape
        assert float((x.double() - y).norm()) <= slope * float(y.norm())


@kernels
@pytest.mark.parametrize(
    ("dtype", "logits", "value", "slope"),
    [
        ("float32", None, 1e-6, 1e-6),
        ("bfloat16", None, 4e-2, 2e-2),
        ("float16", None, 5e-3, 4e-3),
        ("bfloat16", "float32", 1e-6, 4e-3),
        ("float64", None, 1e-13, 1e-13),
    ],
)
def test_chunks(dtype: str, logits: str | None, value: float, slope: float) -> None:
    for several in (0, 3):
        options = {"temperature": 0.8, "logits_dtype": logits, "accumulate_dtype": logits}
        linear_agrees(layer(several=several, dtype=dtype), value, slope, max_memory=SMALL, **options)


@kernels
@pytest.mark.parametrize("logits", [None, "float32"])
@pytest.mark.parametrize(("features", "classes"), [(19, 304), (16, 298)])
def test_sizes_that_are_padded(
    logits: str | None, features: int, classes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pad_all(monkeypatch)
    # No other test may have these sizes, because plans are cached.
    given = layer(dtype="bfloat16", features=features, classes=classes)
    assert chunks.pads_features(41, features, classes, "bfloat16") == (features == 19)
    assert chunks.pads_classes(41, features, classes, "bfloat16") == (classes == 298)
    options = {"logits_dtype": logits, "accumulate_dtype": logits}
    linear_agrees(given, *((4e-2, 2e-2) if logits is None else (1e-6, 4e-3)), max_memory=SMALL, **options)


@kernels
@pytest.mark.parametrize("classes", [5, 2050, 9001])
def test_long_and_short_rows_of_a_layer(classes: int) -> None:
    linear_agrees(layer((13,), classes), 1e-6, 2e-6, max_memory=5 * classes * 4, softcap=6.0)


@kernels
def test_masks_and_ignored_labels_of_a_layer() -> None:
    given = layer((4, 12))
    given["index"][1:3, ::3] = -100
    mask = (torch.arange(12) % 5 > 0).reshape(1, 12).to(KERNELS)
    linear_agrees(given, 1e-6, 2e-6, max_memory=SMALL, mask=mask)


@kernels
@pytest.mark.parametrize("frozen", [(), ("linear_weight",), ("input", "linear_bias")])
def test_products_and_memory(frozen: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Per chunk, forward takes one product; backward takes one more, and one per factor that requires a gradient.

    Nothing larger than a chunk is allocated, except results.
    """
    given = {k: x.detach().requires_grad_(x.requires_grad and k not in frozen) for k, x in layer(several=2).items()}
    kind, products, shapes = type(torch_device.device_of(given["input"])), [], []
    matmul, empty = kind.matmul, kind.empty
    monkeypatch.setattr(kind, "matmul", lambda *x, **y: products.append(1) or matmul(*x, **y))
    monkeypatch.setattr(kind, "empty", lambda *x: shapes.append(tuple(x[1])) or empty(*x))
    found = F.linear_token_log_probs(**given, max_memory=SMALL, return_entropy=True)
    chunks = -(-41 // 4)
    assert len(products) == chunks
    (found.log_probs.sum() + found.entropy.sum()).backward()
    assert len(products) == chunks * (2 + sum(given[x].requires_grad for x in ("input", "linear_weight")))
    assert set(shapes) <= {(41, 3), (41, 4), (4, 304), (41, 24), (300, 24), (300,)}


@kernels
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_main_grad(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products add to ``main_grad``: no buffer of the weight's size is allocated."""
    given = layer(dtype=dtype)
    kind, shapes = type(torch_device.device_of(given["input"])), []
    empty = kind.empty
    monkeypatch.setattr(kind, "empty", lambda *x: shapes.append(tuple(x[1])) or empty(*x))
    main_grad = torch.ones(300, 24, device=KERNELS)
    F.linear_token_log_probs(**given, max_memory=SMALL, main_grad=main_grad).sum().backward()
    wide = {k: x.detach().double().requires_grad_() for k, x in given.items() if k != "index"}
    logits = torch.nn.functional.linear(wide["input"], wide["linear_weight"], wide["linear_bias"])
    (right,) = torch.autograd.grad(truth(logits, given["index"])[0].sum(), wide["linear_weight"])
    assert float((main_grad - 1 - right).norm() / right.norm()) <= (4e-3 if dtype == "bfloat16" else 1e-6)
    assert given["linear_weight"].grad is None and given["input"].grad is not None and (300, 24) not in shapes


@kernels
def test_label_out_of_range_is_named_by_its_place_among_all() -> None:
    given = layer((41,), several=2)
    given["index"][33, 1] = 300
    with pytest.raises(IndexError, match=r"^linear_token_log_probs: `index\[33, 1\]` must be .* got 300 for 300"):
        F.linear_token_log_probs(**given, max_memory=SMALL, check_targets="sync")
    found = F.linear_token_log_probs(**given, max_memory=SMALL, check_targets="off")
    assert found.isnan().nonzero().tolist() == [[33, 1]]


def of_layer(function: Callable[..., Any], given: dict[str, Any]) -> Callable[..., Any]:
    """Returns a scalar function of features and weight; ``function`` returns log-probabilities and entropies."""

    def value(x: torch.Tensor, w: torch.Tensor, index: torch.Tensor | None = None) -> torch.Tensor:
        log_probs, entropy = function(x, w, given["index"] if index is None else index)
        return log_probs.sin().sum() + (entropy * entropy).sum()

    return value


@kernels
def test_transforms_of_a_layer() -> None:
    given = {k: x.detach() for k, x in layer((3, 6), 40, 2, "float64").items()}
    x, w, index = (given[k] for k in ("input", "linear_weight", "index"))

    def ours(x: torch.Tensor, w: torch.Tensor, index: torch.Tensor) -> Any:
        return F.linear_token_log_probs(x, w, index, return_entropy=True, max_memory=4 * 40 * 8)

    found, exact = (of_layer(f, given) for f in (ours, lambda x, w, i: truth(x @ w.T, i)))
    for transform in (
        lambda f: torch.func.grad(f, (0, 1)),
        lambda f: torch.func.vmap(torch.func.grad(f), (0, None, 0)),
    ):
        torch.testing.assert_close(transform(found)(x, w, index), transform(exact)(x, w, index))
    v = torch.randn_like(x)
    for transform in (lambda f: f, torch.func.grad):
        pair = [torch.func.jvp(partial(transform(f), w=w, index=index), (x,), (v,)) for f in (found, exact)]
        torch.testing.assert_close(*pair)
    leaves = [y.clone().requires_grad_() for y in (x, w)]
    both = []
    for f in (found, exact):
        (first,) = torch.autograd.grad(f(*leaves), leaves[0], create_graph=True)
        both.append(torch.autograd.grad((first * v).sum(), leaves))
    torch.testing.assert_close(*both)


@kernels
def test_a_compiled_graph_of_a_layer() -> None:
    torch.compiler.reset()
    given = layer()
    leaves = [x for x in given.values() if x.requires_grad]

    def step(**given: Any) -> torch.Tensor:
        found = F.linear_token_log_probs(**given, max_memory=SMALL, return_entropy=True)
        return found.log_probs.sum() + found.entropy.sum()

    value = torch.compile(step, fullgraph=True, backend="aot_eager")(**given)
    torch.testing.assert_close(value, step(**given))
    for a, b in zip(torch.autograd.grad(value, leaves), torch.autograd.grad(step(**given), leaves), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


def test_numpy_arrays_of_a_layer() -> None:
    given = {k: x.detach().cpu().numpy() for k, x in layer(several=2).items()}
    found = F.linear_token_log_probs(**given, return_entropy=True)
    logits = torch.from_numpy(given["input"]) @ torch.from_numpy(given["linear_weight"]).T
    exact = truth(logits + torch.from_numpy(given["linear_bias"]), torch.from_numpy(given["index"]))
    for a, b in zip(found, exact, strict=True):
        assert a.dtype == numpy.float32
        numpy.testing.assert_allclose(a, b.numpy(), rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(not HOST, reason="no C++ compiler on Linux")
def test_cupy_arrays_of_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {k: x.cpu() for k, x in layer().items()}
    log_probs, entropy = truth(
        torch.nn.functional.linear(given["input"], given["linear_weight"], given["linear_bias"]), given["index"]
    )
    (right,) = torch.autograd.grad(log_probs.sum() + entropy.sum(), given["linear_weight"])
    with stand_in.cupy() as cupy:
        from cupylosses.backends.cupy_device import CupyDevice

        def matmul(self: Any, a: Any, b: Any, out: Any, add: Any = None) -> None:
            out[...] = a @ b + (0 if add is None else add)

        monkeypatch.setattr(CupyDevice, "matmul", matmul)
        arrays = {k: cupy.asarray(x.detach().numpy()) for k, x in given.items()}
        value, slope = cupylosses.value_and_grad(
            F.linear_token_log_probs, argnums="linear_weight", **arrays, return_entropy=True, max_memory=SMALL
        )
        for a, b in ((value.log_probs, log_probs), (value.entropy, entropy), (slope, right)):
            numpy.testing.assert_allclose(numpy.asarray(a), b.detach().numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"linear_weight": torch.ones(300, 23)}, ValueError, "the same last dimension"),
        ({"linear_weight": torch.ones(300, 2, 24)}, ValueError, r"`linear_weight` must have shape \(C, D\)"),
        ({"linear_weight": torch.ones(300, 24).bfloat16()}, TypeError, "one dtype, got .*autocast"),
        (
            {"index": torch.zeros(40, dtype=torch.int64)},
            ValueError,
            "`index` must have the shape of the rows",
        ),
        ({"max_memory": 0}, ValueError, "`max_memory` must be a number of bytes > 0, got 0"),
        ({"logits_dtype": "float16"}, ValueError, "`logits_dtype` must be 'float32' for operands of float32"),
    ],
)
def test_errors_of_a_layer(changed: dict[str, Any], error: type[Exception], message: str) -> None:
    given = {k: x.detach().cpu() for k, x in layer().items() if k != "linear_bias"}
    with pytest.raises(error, match=f"^linear_token_log_probs: .*{message}"):
        F.linear_token_log_probs(**(given | changed))

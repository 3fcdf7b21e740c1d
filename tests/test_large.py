"""More than 2^31 elements: counts, indices and offsets need 64 bits; with 32 bits they would wrap around silently."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from grids import REPRESENTATIVES, short_or_full
from torch import Tensor

from cupylosses import functional
from cupylosses.engines.pointwise.definition import Loss
from cupylosses.testing.check import by_position
from cupylosses.testing.tolerance import same_bits

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:.*broadcast")]

#: One loss per number of operands: indices and offsets do not depend on the formula. Losses that return the mean of
#: each row are left out, because their elements have no values of their own.
OF_ELEMENTS = [x for x in REPRESENTATIVES if not x.mean_of_rows]
each_loss = pytest.mark.parametrize(
    "loss", short_or_full(list({len(x.operands): x for x in OF_ELEMENTS}.values()), OF_ELEMENTS)
)

#: Number of elements: more than 2^31, and not a multiple of any vector or block size.
COUNT = (1 << 31) + (1 << 20) + 3

CHUNK = 1 << 27


@pytest.fixture
def function(loss: Loss) -> Callable[..., Tensor]:
    return by_position(loss)


@pytest.fixture
def operands(loss: Loss) -> Iterator[list[Tensor]]:
    """One bfloat16 tensor of COUNT random numbers in [0, 1) per operand, 4 GiB each."""
    generator = torch.Generator("cuda").manual_seed(0)
    made = [
        torch.empty(COUNT, dtype=torch.bfloat16, device="cuda").uniform_(generator=generator) for _ in loss.operands
    ]
    yield made
    made.clear()
    torch.cuda.empty_cache()


def places() -> Tensor:
    """Indices of elements to compare: both ends, both sides of 2^31, the last vector and batch, and random ones."""
    edge = 1 << 31
    named = [
        0,
        1,
        edge - 9,
        edge - 8,
        edge - 1,
        edge,
        edge + 1,
        edge + 8,
        COUNT - 4097,
        COUNT - 9,
        COUNT - 2,
        COUNT - 1,
    ]
    generator = torch.Generator("cuda").manual_seed(1)
    return torch.cat(
        [
            torch.tensor(named, device="cuda"),
            torch.randint(COUNT, (4096,), generator=generator, device="cuda"),
            torch.randint(edge, COUNT, (4096,), generator=generator, device="cuda"),
        ]
    )


def chunked(function: Callable[..., Tensor], operands: list[Tensor]) -> float:
    """Sums the loss over pieces whose indices fit into 31 bits."""
    total = 0.0
    for start in range(0, COUNT, CHUNK):
        with torch.autocast("cuda"):  # float32 results of bfloat16 operands.
            total += function(*(x[start : start + CHUNK] for x in operands), reduction="sum").double().item()
    return total


@each_loss
@pytest.mark.large
def test_value(function: Callable[..., Tensor], operands: list[Tensor]) -> None:
    total = chunked(function, operands)
    with torch.autocast("cuda"):
        assert function(*operands, reduction="sum").item() == pytest.approx(total, rel=1e-6)
        assert function(*operands, reduction="mean").item() == pytest.approx(total / COUNT, rel=1e-6)


@each_loss
@pytest.mark.large
def test_gradients(function: Callable[..., Tensor], operands: list[Tensor]) -> None:
    """Forward writes the gradients; for another upstream gradient, backward computes them again."""
    at = places()
    few = [x[at].requires_grad_() for x in operands]
    for x in operands:
        x.requires_grad_()
    for grad_output in (1.0, -2.0):
        value = function(*operands, reduction="sum")
        found = torch.autograd.grad(value, operands, torch.full_like(value, grad_output))
        value = function(*few, reduction="sum")
        expected = torch.autograd.grad(value, few, torch.full_like(value, grad_output))
        for g, exact in zip(found, expected, strict=True):
            assert same_bits(g[at], exact)
        del found, g


@each_loss
@pytest.mark.large
def test_elements(function: Callable[..., Tensor], operands: list[Tensor]) -> None:
    """A value per element, and gradients for one upstream gradient per element."""
    at = places()
    few = [x[at] for x in operands]
    value = function(*operands, reduction="none")
    assert same_bits(value[at], function(*few, reduction="none"))
    del value
    first, small = operands[0].requires_grad_(), few[0].requires_grad_()
    upstream = operands[1]
    (found,) = torch.autograd.grad(function(*operands, reduction="none"), first, upstream)
    (expected,) = torch.autograd.grad(function(*few, reduction="none"), small, upstream[at])
    assert same_bits(found[at], expected)


@each_loss
@pytest.mark.large
def test_offsets_beyond_the_range_of_32_bits(function: Callable[..., Tensor], operands: list[Tensor]) -> None:
    """Few elements, far apart: rows that start 2^29 or about 2^30 elements apart, and elements 2^20 + 1 apart."""
    for view in (
        lambda x: x[: 3 << 29].view(3, 1 << 29)[:, :1000],
        lambda x: x.as_strided((3, 1000), ((1 << 30) + 7, 1)),
        lambda x: x[:: (1 << 20) + 1],
    ):
        far = [view(x).detach().requires_grad_() for x in operands]
        near = [x.detach().contiguous().requires_grad_() for x in far]
        for reduction in ("none", "sum"):
            a, b = function(*far, reduction=reduction), function(*near, reduction=reduction)
            assert same_bits(a, b) if reduction == "none" else torch.allclose(a, b)
            for g, exact in zip(torch.autograd.grad(a.sum(), far), torch.autograd.grad(b.sum(), near), strict=True):
                assert same_bits(g, exact)


# ----------------------------------------------------------------------------------------------------------------------
# Large index spaces in little memory: expanded operands


ROWS, COLUMNS = (1 << 17) + 1, 1 << 15


@each_loss
def test_value_of_expanded_operands(loss: Loss, function: Callable[..., Tensor]) -> None:
    """All rows are equal: the sum is that of one row times the number of rows."""
    rows = [torch.rand(COLUMNS, device="cuda") for _ in loss.operands]
    one = function(*rows, reduction="sum").double() * ROWS
    found = function(*(x.expand(ROWS, COLUMNS) for x in rows), reduction="sum")
    torch.testing.assert_close(found.double(), one, rtol=1e-6, atol=0)


@each_loss
def test_gradient_of_a_row_for_many_rows(loss: Loss, function: Callable[..., Tensor]) -> None:
    """Each column's gradient is a sum over all rows."""
    if any(x.per_row for x in loss.operands):
        pytest.skip("has an operand that is no row")
    first, *rest = (torch.rand(COLUMNS, device="cuda", requires_grad=True) for _ in loss.operands)
    expected = torch.autograd.grad(function(first, *rest, reduction="sum"), rest)
    found = torch.autograd.grad(function(first.detach().expand(ROWS, COLUMNS), *rest, reduction="sum"), rest)
    for g, one in zip(found, expected, strict=True):
        torch.testing.assert_close(g, one * ROWS, rtol=1e-5, atol=0)


@each_loss
def test_gradient_of_a_number_for_all(loss: Loss, function: Callable[..., Tensor]) -> None:
    first = torch.rand(COLUMNS, device="cuda")
    numbers = [torch.rand((), device="cuda", requires_grad=True) for _ in loss.operands[1:]]
    expected = torch.autograd.grad(function(first, *numbers, reduction="sum"), numbers)
    found = torch.autograd.grad(function(first.expand(ROWS, COLUMNS), *numbers, reduction="sum"), numbers)
    for g, one in zip(found, expected, strict=True):
        # Terms of both signs cancel: the error is relative to the sum of absolute values.
        torch.testing.assert_close(g, one * ROWS, rtol=1e-5, atol=1e-6 * ROWS * COLUMNS)


# ----------------------------------------------------------------------------------------------------------------------
# Rows, boxes, regions and sequences: samples past 2^31 elements have the same results as on their own

CLASSES = 1024
MANY = COUNT // CLASSES + 3


def _filled(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device="cuda").uniform_(generator=_generator())


def _labels(*shape: int, below: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.randint(below, shape, generator=_generator(), device="cuda", dtype=dtype)


def _generator() -> torch.Generator:
    return torch.Generator("cuda").manual_seed(0)


def _boxes(count: int) -> list[Tensor]:
    boxes = _filled(count, 4)
    boxes[:, 2:] += 1.0
    return [boxes, boxes.flip(0)]


#: By function: a factory of the operands, the first of which gets a gradient, and each operand's sample dimension.
MADE: dict[str, tuple[Callable[[], list[Tensor]], tuple[int, ...]]] = {
    "cross_entropy": (lambda: [_filled(MANY, CLASSES), _labels(MANY, below=CLASSES)], (0, 0)),
    "cosine_loss": (lambda: [_filled(MANY, CLASSES), _filled(MANY, CLASSES).flip(0)], (0, 0)),
    "multi_margin_loss": (lambda: [_filled(MANY, CLASSES), _labels(MANY, below=CLASSES)], (0, 0)),
    "multilabel_margin_loss": (lambda: [_filled(MANY, CLASSES), _labels(MANY, 4, below=CLASSES)], (0, 0)),
    "generalized_box_iou_loss": (lambda: _boxes(COUNT // 4), (0, 0)),
    "dice_loss": (
        lambda: [_filled(2051, 2, 1024, 512), _labels(2051, 1024, 512, below=2, dtype=torch.uint8)],
        (0, 0),
    ),
    "ctc_loss": (
        lambda: [_filled(512, MANY // 512 + 1, CLASSES), _labels(MANY // 512 + 1, 4, below=CLASSES - 1) + 1],
        (1, 0),
    ),
}


@pytest.mark.large
@pytest.mark.parametrize("name", MADE)
def test_last_samples(name: str) -> None:
    """The last samples have the same values and gradients as in a call of their own."""
    make, dims = MADE[name]
    whole = make()
    assert whole[0].numel() > 1 << 31
    last = [x.narrow(d, x.shape[d] - 3, 3).clone() for x, d in zip(whole, dims, strict=True)]
    lengths = (None, None) if name == "ctc_loss" else ()
    results = []
    for operands in (whole, last):
        first = operands[0].requires_grad_()
        value = getattr(functional, name)(*operands, *lengths, reduction="none")
        (gradient,) = torch.autograd.grad(value, first, torch.ones_like(value))
        results.append((value[-3:].clone(), gradient.narrow(dims[0], first.shape[dims[0]] - 3, 3).clone()))
        del value, gradient
    del whole
    torch.cuda.empty_cache()
    for found, alone in zip(*results, strict=True):
        assert alone.any()
        torch.testing.assert_close(found, alone)

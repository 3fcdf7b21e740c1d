"""Rows with strided classes: read as columns where that is fast, and from a copy elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import pytest
import torch
from cupy_memory import tensor
from devices import HOST, KERNELS
from grids import in_turn
from torch import Tensor

import cupylosses
import cupylosses.functional
from cupylosses.call import Call
from cupylosses.definition.registry import registry
from cupylosses.engines.base import Machine, TensorSpec
from cupylosses.engines.softmax import layout as softmax_layout
from cupylosses.engines.softmax.call import Static
from cupylosses.engines.softmax.definition import SoftmaxLoss
from cupylosses.engines.softmax.plan import copies, rows_of
from cupylosses.engines.strides import dense_strides
from cupylosses.jit.gpu import DECLARED_BYTES, Chip
from cupylosses.testing import host
from cupylosses.testing.softmax.properties import (
    Drawn,
    agrees_with_truth,
    few_rows_are_many,
    noted_layouts,
    value_agrees_with_truth,
)
from cupylosses.testing.tolerance import same_bits

F: Any = cupylosses.functional

#: Settings of a call with dense targets.
WITH_TERMS = Static(**dict.fromkeys(Static._fields, False) | {"kind": "probabilities", "class_dim": 1})

#: More classes than a warp keeps of a row with dense targets, but few enough to be quick.
SHAPE = (6, 433)


def copied(
    shape: tuple[int, ...],
    strides: tuple[int, ...] | None = None,
    class_dim: int = 1,
    size: int = 4,
    softmax: bool = True,
    operands: int = 1,
    **options: Any,
) -> bool:
    """True if operands with these strides are copied."""
    strides = strides or dense_strides(shape, (0,) * len(shape))
    own = rows_of(strides, class_dim, size, 0)
    gradient = rows_of(dense_strides(shape, strides), class_dim, size, 0)
    rows = tuple(n for d, n in enumerate(shape) if d != class_dim)
    tensors = [own] * operands + [gradient] * operands
    return softmax_layout.copied(rows, shape[class_dim], tensors, operands, softmax, **options)


def test_which_rows_are_copied() -> None:
    assert not copied((4096, 50000)) and not copied((4096, 1)) and not copied((8, 64, 8, 8), (4096, 1, 512, 64))
    # Images of few classes are not copied, and neither are parts of them.
    assert not copied((8, 19, 64, 64)) and not copied((8, 192, 64, 64)) and not copied((8, 384, 64, 64), size=2)
    assert not copied((8, 19, 64, 32), (19 * 4096, 4096, 64, 1)) and not copied(
        (8, 19, 64, 32), (19 * 4096, 4096, 64, 2)
    )
    assert not copied((4096, 150), (1, 4096)) and not copied((150, 4096), class_dim=0)
    # A single thread would process a row of many classes.
    assert copied((7, 262144), (1, 7)) and copied((1, 193, 24, 24)) and copied((1, 97, 24, 24), size=8)
    # Several warps share a row if there are many rows.
    assert not copied((1, 193, 64, 64)) and not copied((1, 97, 64, 64), size=8) and not copied((8, 1100, 64, 64))
    assert not copied((1024, 32000), (1, 1024))
    # Several blocks share a row if rows are few and classes many, as long as neighbouring rows fill sectors.
    assert not copied((256, 32000), (1, 256)) and copied((256, 1023), (1, 256))
    assert copied((15, 99999), (1, 15), size=2) and not copied((16, 99999), (1, 16), size=2)
    assert copied((1000, 81), (1, 1000)) and not copied((1000, 80), (1, 1000)) and not copied((1024, 81), (1, 1024))
    assert copied((8, 97, 64, 64), operands=2) and not copied((8, 96, 64, 64), operands=2)
    # With dense targets, the warps of a block share rows of which 32 fit into shared memory twice.
    assert not copied((8, 97, 64, 64), operands=2, tile=97 * 8 * 32) and copied((8, 98, 64, 64), operands=2, tile=24832)
    # Rows with gaps are read in place.
    assert not copied((64, 1000), (1001, 1), size=2)
    # Many such rows of few classes are copied: warps move them together, if they have no gaps.
    assert copied((8192, 17), (81, 1)) and not copied((8191, 17), (81, 1)) and not copied((16384, 33), (97, 1))
    assert not copied((16384, 17)) and not copied((16384, 17), (0, 1)) and copied((16384, 32), (40, 1), operands=2)
    # Small gaps, between rows and between classes, are read in place.
    assert not copied((16384, 17), (20, 1)) and copied((16384, 17), (20, 1), shares=False)
    assert not copied((16384, 17), (34, 2)) and copied((16384, 17), (85, 5)) and copied((16383, 17), (34, 2))
    assert not copied((16384, 100), (200, 2), size=2) and copied((16384, 100), (200, 2), size=2, heavy=True)
    # Two 16-bit operands whose vectors are aligned differently are copied, unless they stay on chip.
    assert copied((64, 1000), (1001, 1), size=2, operands=2) and not copied((64, 1000), (1008, 1), size=2, operands=2)
    assert not copied((64, 1000), (1001, 1), operands=2) and not copied(
        (64, 1000), (1001, 1), size=2, operands=2, room=4000
    )
    # Rows are copied if neighbouring rows are far from each other.
    assert copied((4096, 19), (38, 2)) and copied((8, 19, 64), (19 * 640, 640, 10))
    # Lanes read rows of two operands to registers if they are a few elements apart; fewer if 32 bits are read again.
    image = (32, 20, 64, 64)
    apart = [tuple(step * x for x in (81920, 4096, 64, 1)) for step in range(6)]
    assert not copied(image, apart[4], operands=2, lane=32) and copied(image, apart[5], operands=2, lane=32)
    assert copied(image, apart[4], operands=2, lane=32, again=True) and not copied(
        image, apart[4], operands=2, lane=32, again=True, size=2
    )
    # Other such rows are copied if they are many, and have 16 bits or are read again.
    assert not copied(image, apart[2], operands=2) and copied(image, apart[2], operands=2, again=True)
    assert copied(image, apart[2], operands=2, size=2) and not copied((8, *image[1:]), apart[2], operands=2, size=2)
    # 16-bit images with gaps are copied if only the copies have words of neighbours, unless classes are few.
    small, gaps = (4, 32, 8, 8), (32 * 88, 88, 11, 1)
    assert copied(small, gaps, operands=2, size=2) and not copied(small, operands=2, size=2)
    assert not copied((4, 15, 8, 8), (15 * 88, 88, 11, 1), operands=2, size=2)
    assert not copied((4, 32, 7, 7), (32 * 70, 70, 10, 1), operands=2, size=2)
    assert not copied(small, gaps, operands=2) and copied(small, gaps, operands=2, again=True)
    assert not copied(small, gaps, operands=2, size=8, again=True)
    # Many rows of few classes are read to registers in place.
    large, gaps = (4, 32, 128, 128), (32 * 128 * 131, 128 * 131, 131, 1)
    assert copied(large, gaps, operands=2, size=2) and not copied(large, gaps, operands=2, size=2, lane=32)
    assert not copied(large, gaps, operands=2, again=True)
    # Of log-probabilities only those of labels are read, and gradients are only written.
    assert not copied((8, 1000, 64, 64), softmax=False) and not copied((16, 262144), (1, 16), softmax=False)
    assert not copied((16, 1000), (1, 16), softmax=False) and not copied((8192, 262144), (1, 8192), softmax=False)
    assert not copied((0, 1000), (1, 0)) and not copied((5, 0), (1, 5))


@pytest.mark.parametrize(
    ("reduction", "writes", "is_copied"), [("none", 1, False), ("none", 0, True), ("mean", 1, True)]
)
def test_short_columns_that_are_read_again_are_not_copied(reduction: str, writes: int, is_copied: bool) -> None:
    tensors = TensorSpec("float32", (16, 1100), (1, 16)), TensorSpec("int64", (16,), (1,))
    static = Static(**dict.fromkeys(Static._fields, False) | {"kind": "indices", "class_dim": 1, "has_tangent": ()})
    call = Call(registry(SoftmaxLoss)["cross_entropy"], tensors, static._replace(reduction=reduction), (), None)
    assert (0 in call.loss.engine.copies(call, tensors, Machine(132, Chip()), writes)) == is_copied


@pytest.mark.parametrize(
    ("plain", "dtype", "rows", "classes", "apart", "writes", "copied"),
    [
        (False, "float32", 1000, 16, (True, True), True, (0, 1)),
        (False, "float32", 1000, 8, (True, True), True, ()),
        (False, "float32", 1000, 16, (True, True), False, ()),
        (False, "float32", 1000, 8, (True, False), True, (0,)),
        (False, "float32", 1000, 8, (False, True), False, (1,)),
        (False, "float64", 1000, 8, (True, True), False, (0, 1)),
        (False, "float32", 1000, 16, (False, False), True, ()),
        (False, "bfloat16", 1000, 16, (True, True), True, ()),
        (False, "bfloat16", 1000, 16, (True, False), True, (1,)),
        (False, "float32", softmax_layout.MANY_ROWS, 16, (True, True), True, ()),
        (False, "float64", softmax_layout.HEAVY_VALUE_ROWS, 16, (True, True), True, (0, 1)),
        (False, "float64", softmax_layout.HEAVY_VALUE_ROWS, 16, (True, True), False, ()),
        (True, "float32", 1000, 16, (True, True), True, ()),
        (True, "float32", 1000, 16, (True, False), True, (1,)),
    ],
)
def test_few_rows_of_heavy_terms_are_copied(
    plain: bool,
    dtype: str,
    rows: int,
    classes: int,
    apart: tuple[bool, bool],
    writes: bool,
    copied: tuple[int, ...],
) -> None:
    """Operands with strided classes are copied where lanes that share a row of the copy take less time than one thread
    per row. Elsewhere, operands that are laid out differently from the first one are copied.
    """
    loss = registry(SoftmaxLoss)["distillation_loss"]
    operands = [TensorSpec(dtype, (rows, classes), (1, rows) if x else (classes, 1)) for x in apart]
    static = WITH_TERMS._replace(kind="logits", plain=plain)
    assert {*copies(static, operands, loss, Chip(), writes)} == {*copied}


def test_copies_lie_as_kernels_read_fast() -> None:
    """Copies have the order of the other operand where that is enough, so that not all operands are copied."""
    losses = registry(SoftmaxLoss)

    def strides_of_copies(
        shape: tuple[int, ...],
        *strides: tuple[int, ...],
        has_tangent: tuple[bool, ...] = (),
        loss: str = "cross_entropy",
        dtype: str = "float32",
    ) -> dict[int, tuple[int, ...]]:
        operands = [TensorSpec(dtype, shape, x) for x in strides]
        given = WITH_TERMS if len(strides) > 1 else WITH_TERMS._replace(kind="indices")
        return dict(copies(given._replace(has_tangent=has_tangent), operands, losses[loss], Chip(), writes=True))

    image, plain = (8, 3, 40, 40), (4800, 1600, 40, 1)
    stepped, last = (14400, 4800, 120, 3), (4800, 1, 120, 3)
    assert strides_of_copies(image, stepped) == {0: plain}
    assert strides_of_copies(image, plain, plain) == {} and strides_of_copies(image, plain, last) == {1: plain}
    assert strides_of_copies(image, last, plain) == {1: last}
    assert strides_of_copies(image, plain, (4800, 1, 120, 3), has_tangent=(True, False)) == {}
    assert strides_of_copies(image, plain, last, has_tangent=(True, True)) == {1: plain}
    assert strides_of_copies(image, stepped, stepped) == {0: plain, 1: plain}
    # Of many rows, lanes read few classes to registers, although neighbouring rows are a few elements apart.
    many, fifth = (16, *image[1:]), tuple(5 * x for x in plain)
    assert strides_of_copies(many, stepped, plain) == strides_of_copies(many, stepped, stepped) == {}
    assert strides_of_copies(many, plain, fifth) == {1: plain}
    # Second derivatives copy classes that a thread would read twice and that warps do not share.
    for classes, pixels, count in ((52, 71, 0), (304, 71, 0), (305, 71, 2), (100, 22, 2), (52, 16, 0)):
        many, strides = (2, classes, pixels, pixels), (classes * pixels**2, pixels**2, pixels, 1)
        assert len(strides_of_copies(many, strides, strides, has_tangent=(True, False))) == count
    assert strides_of_copies((6, 333), (1, 6)) == {0: (333, 1)}
    assert strides_of_copies((16, 40000), (40001, 1), (1, 16)) == {1: (40000, 1)}
    assert strides_of_copies((4096, 50), (1, 4096), (50, 1)) == {0: (50, 1)}
    # Rows with gaps are copied if few lanes would have enough work, and lanes exchange more than once or rows are many.
    for loss, dtype, rows, classes, copied in (
        ("cross_entropy", "bfloat16", 1 << 14, 112, True),
        ("cross_entropy", "bfloat16", 1 << 13, 33, False),
        ("cross_entropy", "bfloat16", 1 << 14, 130, False),
        ("cross_entropy", "float32", 1 << 14, 33, False),
        ("distillation_loss", "bfloat16", 1 << 13, 112, True),
        ("distillation_loss", "bfloat16", 1 << 14, 130, True),
        ("distillation_loss", "bfloat16", 1 << 14, 160, False),
        ("distillation_loss", "float32", 1 << 14, 86, True),
        ("distillation_loss", "float32", 1 << 14, 130, False),
    ):
        dense, gaps = (classes, 1), (classes + 3, 1)
        found = strides_of_copies((rows, classes), gaps, dense, loss=loss, dtype=dtype)
        assert found == ({0: dense} if copied else {})
    # Two 16-bit classes that are strided in one operand would be read one by one.
    for dtype, found in (("bfloat16", {1: (2, 1)}), ("float32", {})):
        assert strides_of_copies((1 << 14, 2), (2, 1), (1, 1 << 14), dtype=dtype) == found


@pytest.mark.parametrize("shape", [(6, 5), (6, 5, 3, 2), (5,)])
def test_copies_have_no_gaps(shape: tuple[int, ...]) -> None:
    for dim in range(len(shape)):
        strides = softmax_layout.classes_last(shape, dim)
        expected = torch.empty([n for d, n in enumerate(shape) if d != dim] + [shape[dim]]).movedim(-1, dim)
        assert strides == expected.stride()


def transposed(x: Tensor) -> Tensor:
    """Returns a copy whose class stride is the number of rows."""
    return x.t().contiguous().t()


CASES = ["cross_entropy", "cross_entropy, soft", "distillation_loss", "nll_loss"]


def drawn(case: str) -> tuple[Callable[..., Tensor], list[Tensor]]:
    """Returns a function and contiguous operands; the floating ones require grad."""
    generator = torch.Generator().manual_seed(0)
    first, second = (3 * torch.randn(2, *SHAPE, generator=generator)).unbind()
    name, _, soft = case.partition(", ")
    if name == "nll_loss":
        first = first.log_softmax(1)
    labels = torch.randint(SHAPE[1], SHAPE[:1], generator=generator)
    second = second.softmax(1) if soft else second if name == "distillation_loss" else labels
    operands = [x.clone().to(KERNELS) for x in (first, second)]  # Aligned, like copies.
    return getattr(F, name), [x.requires_grad_() if x.is_floating_point() else x for x in operands]


@pytest.mark.kernels
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("case", CASES)
def test_the_bits_of_contiguous_rows(case: str, reduction: str, fresh_plans: Callable[[], None]) -> None:
    function, operands = drawn(case)
    apart = [transposed(x.detach()).requires_grad_() if x.dim() == 2 else x for x in operands]
    value, expected = function(*apart, reduction=reduction), function(*operands, reduction=reduction)
    assert same_bits(value.detach(), expected.detach())
    with torch.no_grad():
        assert same_bits(function(*apart, reduction=reduction), expected.detach())
    upstream = torch.linspace(0.5, 2, value.numel(), device=KERNELS).reshape(value.shape)
    leaves = [x for x in apart if x.requires_grad]
    found = torch.autograd.grad(value, leaves, upstream)
    gradients = torch.autograd.grad(expected, [x for x in operands if x.requires_grad], upstream)
    for gradient, right in zip(found, gradients, strict=True):
        assert same_bits(gradient, right)
    if operands[0].requires_grad and reduction == "mean":
        function(*apart).backward()
        assert all(x.grad.stride() == x.stride() for x in leaves)  # torch ensures this.


@pytest.mark.kernels
@pytest.mark.parametrize("case", CASES[:3])
def test_second_derivatives(case: str) -> None:
    function, operands = drawn(case)
    function_of, found = [], []
    for place in (transposed, torch.clone):
        leaves = [place(x.detach()).requires_grad_() if x.dim() == 2 else x for x in operands]
        x = leaves[0]
        (gradient,) = torch.autograd.grad(function(*leaves), x, create_graph=True)
        direction = torch.linspace(-1, 1, x.numel(), device=KERNELS).view(x.shape)
        function_of.append(gradient.detach())
        found.append(torch.autograd.grad(gradient, x, direction)[0])
    torch.testing.assert_close(*function_of, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(*found, rtol=1e-6, atol=1e-9)


@pytest.mark.kernels
def test_directions_that_lie_otherwise() -> None:
    function, (x, labels) = drawn("cross_entropy")
    (gradient,) = torch.autograd.grad(function(x, labels), x, create_graph=True)
    direction = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1)).to(KERNELS)
    expected = torch.autograd.grad(gradient, x, direction, retain_graph=True)[0]
    assert same_bits(torch.autograd.grad(gradient, x, transposed(direction))[0], expected)


@pytest.mark.kernels
def test_transforms_and_graphs_give_the_layout_of_the_operands() -> None:
    function, (x, labels) = drawn("cross_entropy")
    expected = torch.autograd.grad(function(x, labels), x)[0]
    apart = transposed(x.detach())
    found = torch.func.grad(function)(apart, labels)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)
    assert found.stride() == apart.stride()


@pytest.mark.kernels
def test_inplace_backward_writes_over_the_operand() -> None:
    function, (x, labels) = drawn("cross_entropy")
    expected = torch.autograd.grad(function(x, labels), x)[0]
    logits = transposed(x.detach()).requires_grad_() * 1.0
    version = logits._version
    (found,) = torch.autograd.grad(function(logits, labels, inplace_backward=True), logits)
    assert found.data_ptr() == logits.data_ptr() and logits._version > version
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)


@pytest.mark.kernels
def test_hooks_that_bring_saved_rows_back_otherwise() -> None:
    function, (x, labels) = drawn("cross_entropy")
    expected = torch.autograd.grad(function(x, labels), x)[0]
    apart = transposed(x.detach()).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: transposed(t) if t.dim() == 2 else t):
        value = function(apart, labels)
        found = torch.autograd.grad(value, apart)[0]
    assert same_bits(found, expected)


@pytest.mark.kernels
def test_gradients_of_sliced_rows_have_no_gaps() -> None:
    function, (x, labels) = drawn("cross_entropy")
    wide = x.detach().repeat_interleave(2, dim=1)
    (found,) = torch.autograd.grad(function(sliced := wide[:, ::2].requires_grad_(), labels), sliced)
    assert same_bits(found, torch.autograd.grad(function(x, labels), x)[0])
    assert found.is_contiguous()


@pytest.mark.kernels
@pytest.mark.parametrize(
    ("dtype", "gap", "step", "options", "classes"),
    [
        (*x, classes)
        for x, classes in in_turn(
            [
                (torch.bfloat16, 2, 1, {}),
                (torch.float32, 1, 1, {"softcap": 5.0}),
                (torch.float32, 0, 2, {}),
                (torch.bfloat16, 2, 3, {}),
            ],
            [333, 1000],
        )
    ],
    ids=str,
)
def test_rows_that_lie_otherwise_than_their_gradients(
    classes: int, gap: int, step: int, options: dict[str, float], dtype: torch.dtype, fresh_plans: Callable[[], None]
) -> None:
    found = agrees_with_contiguous_rows(classes, gap, step, options, dtype, KERNELS)
    assert [(x.vec_size, x.shifted, x.gathered) for x in found] == [(16 // dtype.itemsize, True, step > 1)]


@pytest.mark.skipif(not HOST, reason="no C++ compiler on Linux")
def test_rows_of_clusters_that_lie_otherwise_than_their_gradients() -> None:
    with host.execution(seed=1) as device:
        # One vector of each thread fits, and one more of each warp.
        device.chip = Chip(DECLARED_BYTES + (8 << 10) + 256, clusters=True, threads=512)
        found = agrees_with_contiguous_rows(9001, 1, 1, {}, torch.bfloat16, "cpu")
    assert [(x.kind, x.cluster, x.shifted) for x in found] == [("block", 4, True)]


def agrees_with_contiguous_rows(
    classes: int, gap: int, step: int, options: dict[str, float], dtype: torch.dtype, device: str
) -> list[softmax_layout.RowLayout]:
    """Asserts that strided rows have the loss and gradients of contiguous rows, and returns the layouts of their plans.

    The rows are nine rows of a larger matrix and begin at every distance from an aligned address. Logits with gaps
    between classes are gathered into the vectors of the gradients, so they have the bits of contiguous rows. Other
    logits are added in the order of their own vectors.
    """
    generator = torch.Generator().manual_seed(0)
    wide = torch.full((9, step * classes + gap), torch.nan, dtype=dtype, device=device)
    narrow = wide[:, : step * classes : step]
    narrow.copy_(3 * torch.randn(9, classes, generator=generator))
    labels = torch.randint(classes, (9,), generator=generator).to(device)
    labels[:2] = torch.tensor([0, classes - 1])
    with noted_layouts() as found:
        value = F.cross_entropy(leaf := narrow.requires_grad_(), labels, **options)
    expected = F.cross_entropy(other := narrow.detach().contiguous().requires_grad_(), labels, **options)

    def agrees(x: Tensor, right: Tensor) -> bool:
        if step > 1:
            return same_bits(x, right)
        bound = 4 * torch.finfo(dtype).eps
        return bool(((x - right).abs() <= bound * right.abs()).all())

    assert agrees(value.detach(), expected.detach())
    (gradient,) = torch.autograd.grad(value, leaf, torch.full((), 0.75, dtype=dtype, device=device))
    right = torch.autograd.grad(expected, other, torch.full((), 0.75, dtype=dtype, device=device))
    assert agrees(gradient, right[0])
    with torch.no_grad():
        assert same_bits(F.cross_entropy(leaf, labels, **options), value.detach())
    upstream = torch.linspace(0.5, 2, 9, dtype=dtype, device=device)
    unreduced = [
        torch.autograd.grad(F.cross_entropy(x, labels, reduction="none", **options), x, upstream) for x in (leaf, other)
    ]
    assert agrees(*(x for (x,) in unreduced))
    return found


#: Rows with small gaps: number of rows and of classes, dtype, row stride, class stride, and number of elements before
#: the first row. These cover tiles of one row per lane and of several, full and partial; words of each size; and rows
#: with and without padding in shared memory.
SMALL_GAPS = (
    (70, 10, torch.bfloat16, 13, 1, 1),
    (64, 10, torch.bfloat16, 16, 1, 0),
    (65, 10, torch.float16, 16, 1, 3),
    (33, 15, torch.bfloat16, 16, 1, 1),
    (45, 15, torch.float32, 32, 2, 0),
    (33, 7, torch.float64, 9, 1, 1),
    (257, 2, torch.bfloat16, 3, 1, 5),
    (150, 3, torch.bfloat16, 12, 3, 2),
    (70, 101, torch.bfloat16, 103, 1, 1),
    (1, 5, torch.bfloat16, 7, 1, 1),
)


def with_small_gaps(
    rows: int, classes: int, dtype: torch.dtype, pitch: int, step: int, before: int, generator: torch.Generator
) -> Tensor:
    """Returns random rows in memory that ends with the last class of the last row."""
    memory = torch.full((before + (rows - 1) * pitch + (classes - 1) * step + 1,), torch.nan, dtype=dtype)
    x = memory.to(KERNELS).as_strided((rows, classes), (pitch, step), before)
    return x.copy_(3 * torch.randn(rows, classes, generator=generator))


@pytest.mark.kernels
@pytest.mark.addresses
@pytest.mark.parametrize(("shape", "kernels"), in_turn(SMALL_GAPS, ("sum", "value", "none", "mean")), ids=str)
def test_many_rows_with_small_gaps(shape: tuple[Any, ...], kernels: str, fresh_plans: Callable[[], None]) -> None:
    """Warps copy such rows with their gaps and evaluate them like rows without gaps, so both have the same bits."""
    generator, (rows, classes, dtype, *_) = torch.Generator().manual_seed(0), shape
    x = with_small_gaps(*shape, generator)
    labels = torch.randint(classes, (rows,), generator=generator).to(KERNELS)
    labels[rows // 2] = -100
    found = []
    with few_rows_are_many(), noted_layouts() as layouts:
        for logits in (x, x.contiguous()):
            leaf = logits.detach().requires_grad_(kernels != "value")
            value = F.cross_entropy(leaf, labels, reduction="mean" if kernels == "value" else kernels)
            found.append([value.detach()])
            if value.requires_grad:
                upstream = torch.linspace(0.5, 2, value.numel(), dtype=dtype, device=KERNELS).view(value.shape)
                # The grad_output that forward expects, and another one.
                choices = torch.ones_like(value), upstream
                found[-1] += [torch.autograd.grad(value, leaf, y, retain_graph=True)[0] for y in choices]
    assert rows == 1 or {(y.kind, y.step) for y in layouts} == {("packed_rows", shape[4]), ("packed_rows", 0)}
    assert all(same_bits(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.kernels
@pytest.mark.parametrize("classes", [3, 19])
def test_many_rows_with_small_gaps_and_options(classes: int, fresh_plans: Callable[[], None]) -> None:
    """Covers labels, mask and results in an order of their own, with all other options of a row."""
    generator, shape = torch.Generator().manual_seed(0), (9, 23)
    x = with_small_gaps(prod(shape), classes, torch.bfloat16, classes + 2, 1, 1, generator).unflatten(0, shape)
    labels = torch.randint(classes, shape[::-1], generator=generator).to(KERNELS).mT
    labels[2, 3:7] = -100
    given = Drawn(x, labels, 2)
    options = {"weight": torch.rand(classes, generator=generator).to(KERNELS, torch.bfloat16)}
    mask = (torch.rand(shape[::-1], generator=generator) < 0.9).to(KERNELS).mT
    with few_rows_are_many(), noted_layouts() as layouts:
        agrees_with_truth(given, "sum", mask=mask)
        agrees_with_truth(given, "mean", **options)
        agrees_with_truth(given, "none", label_smoothing=0.1, softcap=5.0, mask=mask, **options)
        value_agrees_with_truth(given, label_smoothing=0.1, softcap=5.0)
    assert {(y.kind, y.step, y.rank) for y in layouts} == {("packed_rows", 1, 2)}


@pytest.mark.kernels
def test_two_operands_of_neighbouring_rows_a_few_elements_apart(fresh_plans: Callable[[], None]) -> None:
    """A lane reads its row in place to registers, so the bits are those of adjacent rows."""
    generator = torch.Generator().manual_seed(0)
    x, t = (torch.randn(1, 3, 128, 128, generator=generator).to(KERNELS) for _ in range(2))
    t = t.softmax(1)
    apart = [y.repeat_interleave(step, -1)[..., ::step] for y, step in ((x, 2), (t, 3))]
    found = []
    for logits, targets in ((x, t), apart):
        leaf = logits.detach().requires_grad_()
        with noted_layouts() as layouts:
            value = F.cross_entropy(leaf, targets)
        assert [(y.kind, y.per_thread) for y in layouts] == [("columns", 3)]
        found.append((value.detach(), *torch.autograd.grad(value, leaf)))
    assert all(same_bits(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.kernels
@pytest.mark.parametrize("shape", [(2, 6, 4, 8), (1, 97, 4, 8)], ids=str)
def test_images_of_16_bits_at_any_address(shape: tuple[int, ...], fresh_plans: Callable[[], None]) -> None:
    """Words of neighbouring rows are shifted to the words of gradients, so the bits are those of an aligned image."""
    generator = torch.Generator().manual_seed(0)
    images = [torch.randn(shape, generator=generator).to(KERNELS, torch.bfloat16) for _ in range(2)]
    found = []
    for offsets in ((0, 0), (1, 0), (0, 6)):
        student, teacher = (torch.empty(8 + x.numel(), dtype=x.dtype, device=KERNELS) for x in images)
        places = [
            y[n : n + x.numel()].view(shape).copy_(x)
            for x, y, n in zip(images, (student, teacher), offsets, strict=True)
        ]
        leaf = places[0].requires_grad_()
        with noted_layouts() as layouts:
            value = F.distillation_loss(leaf, places[1], class_dim=1)
        assert [(y.kind, y.vec_size, y.shifted) for y in layouts] == [("columns", 8, any(offsets))]
        found.append((value.detach(), *torch.autograd.grad(value, leaf)))
    for others in found[1:]:
        assert all(same_bits(a, b) for a, b in zip(found[0], others, strict=True))


@pytest.mark.kernels
@pytest.mark.parametrize("case", ["cross_entropy", "distillation_loss", "nll_loss"])
def test_cupy(case: str, cupy: Any) -> None:
    function, operands = drawn(case)
    arrays = [cupy.asarray(x.detach().cpu().numpy()) for x in operands]
    apart = [cupy.ascontiguousarray(x.T).T if x.ndim == 2 else x for x in arrays]
    (expected, gradient), (value, found) = (cupylosses.value_and_grad(function, *x) for x in (arrays, apart))
    assert float(value) == float(expected)
    assert torch.equal(tensor(found), tensor(gradient))
    # Log-probabilities are read in place, the others from a copy.
    assert found.strides == (apart if case == "nll_loss" else arrays)[0].strides


@pytest.mark.kernels
def test_kernels_of_neighbouring_classes_take_them(fresh_plans: Callable[[], None]) -> None:
    function, (x, labels) = drawn("cross_entropy")
    with noted_layouts() as found:
        function(transposed(x.detach()), labels)
    assert [x.kind for x in found] == ["block"]

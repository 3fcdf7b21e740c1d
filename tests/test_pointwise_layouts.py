"""Memory layouts that have code paths of their own in the pointwise engine, such as unaligned or transposed operands.

Without a GPU, the kernels run on the host with checks for races. Results are compared with the float64 truth, or with
the bits of contiguous operands.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

import pytest
import torch
from devices import KERNELS
from grids import in_turn, short_or_full

import cupylosses
import cupylosses.functional as F
from cupylosses.backends.torch.plans import forget, specs
from cupylosses.call import Call
from cupylosses.checks import FLOATING
from cupylosses.definition.registry import registry
from cupylosses.engines.base import Machine, TensorSpec
from cupylosses.engines.pointwise import engine as pointwise_engine
from cupylosses.engines.pointwise import layout as pointwise_layout
from cupylosses.engines.pointwise.definition import Loss
from cupylosses.engines.pointwise.layout import Stream
from cupylosses.engines.pointwise.reduction import Static
from cupylosses.engines.strides import broadcast_strides, dense_strides
from cupylosses.jit.gpu import Chip
from cupylosses.testing import properties
from cupylosses.testing.check import Check, run

pytestmark = [pytest.mark.filterwarnings("ignore:.*broadcast"), pytest.mark.kernels]

MSE: Loss = registry(Loss)["mse_loss"]


@pytest.fixture(autouse=True, params=short_or_full([False], [True, False]), ids=str)
def few(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Plans use the batches and micro-tiles of large tensors at any size; all other tests use those of small ones."""
    if not request.param:
        monkeypatch.setattr(pointwise_layout, "FEW_OF_A_LANE", ())
        monkeypatch.setattr(pointwise_layout, "in_short_batches", lambda found, *_: found)
    forget()
    yield
    forget()


# ----------------------------------------------------------------------------------------------------------------------
# Unaligned operands


@pytest.mark.parametrize(("reduction", "dtype"), in_turn(["mean", "none"], FLOATING))
def test_unaligned_operands_agree_with_the_truth(reduction: str, dtype: str) -> None:
    properties.agrees_with_truth(
        F.mse_loss, MSE, dtypes=(dtype,), layout="misaligned", reduction=reduction, device=KERNELS, shape=(67, 129)
    )


@pytest.mark.parametrize(("name", "dtype"), in_turn(["logistic_loss", "sigmoid_focal_loss"], FLOATING))
def test_heavy_losses_agree_with_the_truth(name: str, dtype: str) -> None:
    """Lanes have several vectors and, in 16 bits, load the next one ahead."""
    properties.agrees_with_truth(
        getattr(F, name), registry(Loss)[name], dtypes=(dtype,), device=KERNELS, shape=(9, 999)
    )


def gradients(operands: Sequence[torch.Tensor], reduction: str = "mean", grad_output: Any = 1.0) -> list[Any]:
    """Value and gradients of mse_loss."""
    call = Check(MSE, reduction=reduction, device=KERNELS).ours()
    found = run(call, operands, (True, True), grad_output)
    return [found.value, *found.gradients]


def drawn(dtype: str, *shape: int) -> torch.Tensor:
    """Random numbers."""
    generator = torch.Generator().manual_seed(3)
    return torch.randn(shape, generator=generator).to(KERNELS, getattr(torch, dtype))


def shifted(x: torch.Tensor, offset: int) -> torch.Tensor:
    """A copy that starts ``offset`` elements past an aligned address and ends where its memory ends."""
    return x.new_full((offset + x.numel(),), float("nan"))[offset:].copy_(x.flatten())


@pytest.mark.addresses
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_misalignment_has_the_bits_of_aligned_operands(dtype: str) -> None:
    # Whole vectors, the last of which must not be read as a whole, and a partial vector.
    for count in (2048, 2051):
        x, y = drawn(dtype, 2, count).unbind()
        y = y.clone()
        expected = gradients([x, y])
        for offset in range(1, 16 // x.element_size()):
            found = gradients([shifted(x, offset), y])
            assert all(map(torch.equal, found, expected)), (count, offset)
        row = y[:8].clone()
        for reduction in ("none", "mean"):
            expected_of_rows = gradients([x[:2048].view(-1, 8).clone(), row], reduction)
            found = gradients([x[:2048].view(-1, 8).clone(), shifted(row, 1)], reduction)
            assert all(map(torch.equal, found, expected_of_rows))
        both = gradients([shifted(x, 1), shifted(y, 3)])
        assert all(map(torch.equal, both, expected))


@pytest.mark.addresses
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_of_which_none_is_aligned_have_the_bits_of_aligned_rows(dtype: str) -> None:
    x, y = drawn(dtype, 2, 33, 64).unbind()
    expected = gradients([x.clone(), y.clone()])[1:]
    for part in (slice(0, 64), slice(1, 65)):
        apart = x.new_full((33, 65), float("nan"))
        apart[:, part] = x
        assert all(map(torch.equal, gradients([apart[:, part], y.clone()])[1:], expected)), part


@pytest.mark.parametrize("shape", [(3, 40, 64), (40, 3, 8), (5, 7, 260)], ids=str)
def test_rows_of_planes_in_another_order_have_the_bits_of_contiguous_ones(shape: tuple[int, ...]) -> None:
    x, y = drawn("float32", 2, *shape).unbind()
    x, y = x.clone(), y.clone()
    turned = y.transpose(0, 1).contiguous().transpose(0, 1)
    assert all(map(torch.equal, gradients([x, turned])[1:], gradients([x, y])[1:]))


def test_upstream_gradients_that_are_not_aligned() -> None:
    x, y = drawn("bfloat16", 2, 2051).unbind()
    y = y.clone()
    grad_output = drawn("bfloat16", 2051)
    expected = gradients([x, y], "none", grad_output)
    found = gradients([x, y], "none", shifted(grad_output, 1))
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize(
    ("stream", "vec_size", "access"),
    [
        # The words past a vector belong to the tensor.
        (Stream((1,), 2, 2, read=True), 8, "shifted"),
        (Stream((1,), 4, 4, read=True), 4, "shifted"),
        # Stores cannot be shifted.
        (Stream((1,), 2, 2), 1, "stream"),
    ],
)
def test_unaligned_vectors_are_read_and_not_stored(stream: Stream, vec_size: int, access: str) -> None:
    found = pointwise_layout.layout((1024,), [Stream((1,), stream.itemsize), stream])
    assert (found.vec_size, found.access) == (vec_size, ("stream", access))


def test_rows_out_of_order_are_not_shifted() -> None:
    """The last vector of the index space would not be the last in memory."""
    aligned = Stream((64, 1), 4)
    assert pointwise_layout.layout((8, 64), [aligned, Stream((65, 1), 4, read=True)]).access[1] == "shifted"
    # Nor are they read element by element, unless L1 holds them: rows that are broadcast often.
    found = pointwise_layout.layout((16, 64), [aligned, Stream((0, 1), 4, 4, read=True)])
    assert (found.vec_size, found.access) == (4, ("stream", "singles"))
    for strides in ((0, 1), (32, 1), (-65, 1)):
        found = pointwise_layout.layout((8, 64), [aligned, Stream(strides, 4, 4, read=True)])
        assert (found.vec_size, "shifted" in found.access) == (1, False), strides


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_micro_tiles_have_the_gradients_of_contiguous_operands(dtype: str) -> None:
    """Covers whole and partial tiles, gradients along both dimensions, and a transposed ``grad_output``."""
    # In float32, three steps of a tile span the 136 rows.
    for shape in ((136, 72), (3, 40, 18)):
        x, y = drawn(dtype, 2, *shape).unbind()
        x, y = x.clone(), y.clone()
        transposed = y.mT.contiguous().mT
        expected = gradients([x, y])
        found = gradients([x, transposed])
        assert all(map(torch.equal, found[1:], expected[1:])), shape
        assert torch.allclose(found[0], expected[0])
        assert found[2].stride() == transposed.stride()
        behind = shifted(transposed.mT, 1).view(transposed.mT.shape).mT
        assert all(map(torch.equal, gradients([x, behind])[1:], expected[1:]))
    found = gradients([x, y], "none", transposed)
    assert all(map(torch.equal, found, gradients([x, y], "none", y)))


@pytest.mark.addresses
@pytest.mark.parametrize(
    ("shape", "dtype", "transposed"),
    [
        ((125, 95), "bfloat16", 1),  # lines start at both halves of a word
        ((195, 192), "float16", 0),  # tiles in the middle of lines, which are copied in words, and one that ends a line
        ((192, 195), "bfloat16", 1),  # lines that start and end with whole words
        ((3, 63, 95), "float64", 1),
        ((2, 3, 61, 95), "float32", 0),
    ],
)
def test_tiles_in_shared_memory_have_the_gradients_of_contiguous_operands(
    shape: tuple[int, ...], dtype: str, transposed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Covers gradients along both dimensions, a transposed grad_output, any alignment, and several tiles per warp."""
    monkeypatch.setattr(pointwise_layout, "MAX_CHUNKS", 5)
    monkeypatch.setattr(pointwise_layout, "FEW_OF_A_LANE", ())
    monkeypatch.setattr(pointwise_layout, "STAGED_ELEMENTS", dict.fromkeys((2, 4, 8), 1 << 10))
    operands = [x.clone() for x in drawn(dtype, 2, *shape).unbind()]
    turned = [x.mT.contiguous().mT if i == transposed else x for i, x in enumerate(operands)]
    streams = [Stream(x.stride(), x.element_size(), read=read) for read in (True, False) for x in turned]
    assert pointwise_layout.layout(shape, streams).staged
    expected = gradients(operands)
    found = gradients(turned)
    assert all(map(torch.equal, found[1:], expected[1:]))
    assert torch.allclose(found[0], expected[0])
    # The value has the same bits without gradients.
    assert torch.equal(F.mse_loss(*turned), found[0])
    behind = [shifted(x.mT, 1).view(x.mT.shape).mT if i == transposed else x for i, x in enumerate(turned)]
    assert all(map(torch.equal, gradients(behind)[1:], expected[1:]))
    grad_output = drawn(dtype, *shape)
    expected = gradients(operands, "none", grad_output)
    assert all(map(torch.equal, gradients(turned, "none", grad_output.mT.contiguous().mT), expected))


def test_masks_stay_outside_of_tiles_in_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pointwise_layout, "FEW_OF_A_LANE", ())
    monkeypatch.setattr(pointwise_layout, "STAGED_ELEMENTS", dict.fromkeys((2, 4, 8), 1 << 10))
    x, y, kept = [z.clone() for z in drawn("float32", 3, 95, 93).unbind()]
    mask = kept > 0
    expected = F.mse_loss(x, y, mask=mask)
    for target in (y, y.mT.contiguous().mT):
        assert torch.allclose(F.mse_loss(x, target, mask=mask.mT.contiguous().mT), expected)


@pytest.mark.parametrize(
    ("rows", "columns", "itemsize", "side", "threads"),
    [
        (8191, 8191, 4, 64, 64),
        (4001, 2003, 4, 32, 128),  # too few for long lines
        (1001, 2003, 4, 0, 256),
        (4001, 4003, 2, 0, 256),  # copied first
        (8191, 8191, 2, 64, 256),
        (8191, 8192, 2, 64, 256),
        (8192, 8192, 2, 0, 256),  # vectors divide both
        (4095, 4097, 8, 32, 64),
        (1 << 22, 9, 4, 0, 256),  # most of each tile would lie outside
    ],
)
def test_tiles_of_odd_sizes_go_through_shared_memory(
    rows: int, columns: int, itemsize: int, side: int, threads: int
) -> None:
    """Blocks have as many threads as 40 KiB of shared memory allow."""
    strides = (columns, 1), (1, rows)
    streams = [Stream(s, itemsize, read=read) for read in (True, False) for s in strides]
    found = pointwise_layout.layout((rows, columns), streams)
    assert found.staged == (side > 0) and (not side or found.tile.sides == (32, side))
    assert pointwise_layout.staged_threads(found, streams) == threads


#: Shapes of two operands, the second of which is broadcast.
SHARED_SUMS = [
    ((1200, 8), (8,)),  # lanes and warps share the rows of a column
    ((2, 70, 40), (2, 1, 40)),  # warps share them, in two planes
    ((67, 64), (67, 1)),  # several rows in a warp
    ((3, 5, 40), (5, 1)),  # sums over two dimensions
    ((9000,), ()),  # slices
    ((2, 66, 520), (520,)),  # several strips; the sums of planes are added up
    ((2, 66, 520), (2, 1, 520)),  # the same, with separate sums
    ((70, 520), (70, 1)),  # rows of several strips
    ((2, 3, 2000), (3, 1)),  # the steps of a batch run along a row
    ((3, 64, 72), (64, 1)),  # rows of several planes
]


@pytest.mark.parametrize(("shapes", "dtype"), in_turn(SHARED_SUMS, ["float32", "bfloat16"]), ids=str)
def test_gradient_of_a_broadcast_operand_however_lanes_and_warps_share_it(
    shapes: tuple[tuple[int, ...], tuple[int, ...]], dtype: str
) -> None:
    """Operands are small integers, so every sum is exact."""
    shape, target = shapes
    x = (torch.arange(prod(shape), device=KERNELS) % 5 - 1).reshape(shape)
    t = (torch.arange(prod(target), device=KERNELS) % 3).reshape(target)
    found = gradients([x.to(getattr(torch, dtype)), t.to(getattr(torch, dtype))], "sum")[-1]
    expected = (2 * (t - x)).sum_to_size(target).to(getattr(torch, dtype))
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("shape", "target"),
    [((1200, 8), (8,)), ((70, 520), (70, 1)), ((2, 66, 520), (2, 1, 520)), ((9000,), ()), ((400, 3), (400, 1))],
    ids=str,
)
def test_gradient_of_a_broadcast_operand_for_a_grad_output_per_element(
    shape: tuple[int, ...], target: tuple[int, ...]
) -> None:
    x = (torch.arange(prod(shape), device=KERNELS) % 5 - 1.0).reshape(shape)
    t = (torch.arange(prod(target), device=KERNELS) % 3.0).reshape(target)
    upstream = (torch.arange(prod(shape), device=KERNELS) % 7 - 2.0).reshape(shape)
    _, of_x, of_t = gradients([x, t], "none", upstream)
    assert torch.equal(of_x, 2 * (x - t) * upstream)
    assert torch.equal(of_t, (2 * (t - x) * upstream).sum_to_size(target))


#: Shapes of two operands. No vector divides the rows of the first one.
RAGGED = [
    ((523, 33), (33,)),  # strips of several rows, the last one partial
    ((211, 7), (7,)),  # rows that are shorter than a vector
    ((9, 3077), (9, 1)),  # vectors that two rows share
    ((2, 3, 3077), (3, 1)),  # the same in several planes
]


@pytest.mark.parametrize("itemsize", [2, 4])
def test_strips_of_rows_that_no_vector_divides(itemsize: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Uses 16-byte vectors in rows that are joined until vectors divide them, or in rows that share vectors."""
    monkeypatch.setattr(pointwise_layout, "GATHERED_ELEMENTS", 1)
    monkeypatch.setattr(pointwise_layout, "FEWEST_JOINED_ROWS", 1)
    found = []
    for shape, target in [*RAGGED, ((67, 65), (67, 1))]:  # the last rows are short
        own = (*[1] * (len(shape) - len(target)), *target)
        full, lies = (dense_strides(x, (0,) * len(x)) for x in (shape, own))
        small = broadcast_strides(own, lies, shape)
        streams = [Stream(s, itemsize, read=read) for read in (True, False) for s in (full, small)]
        for heavy in (0, 1):
            layout = pointwise_layout.layout(shape, streams)
            strips = pointwise_layout.in_ragged_strips(layout, streams, [3], heavy)
            found.append((strips.vec_size, min(strips.joined, 2)) if strips else None)
    vec = 16 // itemsize
    # In 16 bits, a separate pass for the sums of rows takes no longer, unless the loss is heavy.
    light = None if itemsize == 2 else (vec, 1)
    assert found == [(vec, 2)] * 4 + [light, (vec, 1)] * 2 + [None] * 2


@pytest.mark.parametrize("reduction", ["sum", "none"])
@pytest.mark.parametrize(("shapes", "dtype"), in_turn(RAGGED, ["float32", "bfloat16"]), ids=str)
def test_gradients_of_broadcast_operands_beside_rows_that_no_vector_divides(
    shapes: tuple[tuple[int, ...], tuple[int, ...]], dtype: str, reduction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Operands are small integers, so every sum is exact. Strips are those of a heavy loss."""
    shape, target = shapes
    strips = pointwise_layout.in_ragged_strips
    monkeypatch.setattr(pointwise_layout, "in_ragged_strips", lambda *x: strips(*x[:3], 1))
    monkeypatch.setattr(pointwise_layout, "GATHERED_ELEMENTS", 1)
    monkeypatch.setattr(pointwise_layout, "FEWEST_JOINED_ROWS", 1)
    check_exact(shape, target, dtype, reduction)


def check_exact(shape: tuple[int, ...], target: tuple[int, ...], dtype: str, reduction: str, offset: int = 0) -> None:
    """Checks value and gradients of small integers. The first operand starts ``offset`` elements into its memory."""
    x = (torch.arange(prod(shape), device=KERNELS) % 5 - 1.0).reshape(shape)
    t = (torch.arange(prod(target), device=KERNELS) % 3.0).reshape(target)
    upstream = (torch.arange(prod(shape), device=KERNELS) % 7 - 2.0).reshape(shape)
    kind = getattr(torch, dtype)
    per_element = upstream.to(kind) if reduction == "none" else 1.0
    value, of_x, of_t = gradients([shifted(x.to(kind), offset).reshape(shape), t.to(kind)], reduction, per_element)
    factor = upstream if reduction == "none" else 1.0
    squares = (x - t).square()
    assert torch.equal(value, (squares if reduction == "none" else squares.sum()).to(kind))
    assert torch.equal(of_x, (2 * (x - t) * factor).to(kind))
    assert torch.equal(of_t, (2 * (t - x) * factor).sum_to_size(target).to(kind))


#: Shapes of two operands with rows that no vector divides, offset of the first one in elements, and dtype.
SUMS = [
    ((1601, 33), (1, 33), 0, "bfloat16"),  # lanes that share columns, in several slices
    ((1, 5, 1601), (5, 1), 1, "float32"),  # rows for one warp
    ((211, 7), (211, 1), 3, "bfloat16"),  # rows for one lane, shorter than a vector
    ((3, 41, 131), (3, 1, 131), 1, "bfloat16"),  # columns in planes, more vectors of them than a warp has lanes
    ((3, 19, 35), (19, 1), 0, "bfloat16"),  # rows in planes that are summed
    ((523, 3), (3,), 1, "bfloat16"),  # vectors of four elements
]


@pytest.mark.addresses
@pytest.mark.parametrize(("case", "reduction"), in_turn(SUMS, ["sum", "none"]), ids=str)
def test_sums_of_rows_that_no_vector_divides(
    case: tuple[tuple[int, ...], tuple[int, ...], int, str], reduction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Operands are small integers, so every sum is exact; memory ends with the last one."""
    shape, target, offset, dtype = case
    monkeypatch.setattr(pointwise_layout, "RAGGED_ELEMENTS", 1)
    for strips in ("in_strips", "in_ragged_strips"):
        monkeypatch.setattr(pointwise_layout, strips, lambda *_: None)
    check_exact(shape, target, dtype, reduction, offset)


@pytest.mark.parametrize(("length", "gap", "dtype"), [(3000, 0, "float32"), (2600, 1, "bfloat16")], ids=str)
def test_sum_of_few_long_rows_that_the_warps_of_a_block_share(length: int, gap: int, dtype: str) -> None:
    """Both operands are aligned, or one is not, and its elements are loaded one by one beside the other's vectors."""
    x = torch.nn.functional.pad(torch.arange(3 * length, device=KERNELS).reshape(3, length) % 5, (0, gap))
    y = torch.arange(3 * length, device=KERNELS).reshape(3, length) % 3
    x, y = x.to(getattr(torch, dtype))[:, :length], y.to(getattr(torch, dtype))
    expected = (x.double() - y.double()).square().sum(1)
    assert torch.equal(F.mse_loss(x, y, reduction="sum", dim=1, out_dtype=torch.float64), expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gathered_operands_have_the_gradients_of_contiguous_ones(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Short and long rows that no vector divides, with gaps, expanded, in another order, and every third element."""
    monkeypatch.setattr(pointwise_layout, "GATHERED_ELEMENTS", 1)
    if dtype == "bfloat16":  # as if there were many elements
        monkeypatch.setattr(pointwise_layout, "GATHERED_AT_ONCE", 8)
        monkeypatch.setattr(pointwise_layout, "KEPT_IN_L2", 1 << 10)
    x, y = drawn(dtype, 2, 13, 29, 5, 7).unbind()
    x = x.clone()
    padded = torch.nn.functional.pad(y, (0, 3))[..., :-3]
    permuted = y.permute(2, 0, 3, 1).contiguous().permute(1, 3, 0, 2)
    apart = torch.stack([y.flatten(), x.flatten(), x.flatten()], 1)[:, 0]
    for first, other in [
        (x, padded),
        (x, permuted),
        (x.flatten(), apart),
        (x, x[:1].expand_as(x)),
        (x.flatten(1), torch.nn.functional.pad(y.flatten(1), (0, 1))[:, :-1]),
        (permuted, x[:, :1, :, :1].expand_as(x)),
    ]:
        expected = gradients([first.contiguous(), other.contiguous()])
        found = gradients([first, other])
        assert all(map(torch.equal, found[1:], expected[1:])), other.stride()
        assert torch.allclose(found[0], expected[0])
    # An expanded operand has no order of its own.
    assert found[1].stride() == found[2].stride() == permuted.stride()
    found = gradients([padded, x], "none", permuted)
    assert all(map(torch.equal, found, gradients([y.contiguous(), x], "none", y)))


@pytest.mark.parametrize(
    ("dtype", "shape", "order"),
    [
        ("float32", (2, 3, 900), (0, 2, 1)),  # partial tiles
        ("bfloat16", (3, 510), (1, 0)),  # vectors of two
        ("float64", (2, 2, 2, 3, 512), (0, 2, 1, 4, 3)),  # several planes
        ("float16", (7, 256), (1, 0)),
    ],
)
def test_short_dimensions_of_another_order_have_the_gradients_of_contiguous_ones(
    dtype: str, shape: tuple[int, ...], order: tuple[int, ...]
) -> None:
    x, y = drawn(dtype, 2, *shape).unbind()
    other = y.permute(order).contiguous().permute([order.index(d) for d in range(len(order))])
    layout = pointwise_layout.layout(shape, [Stream(z.stride(), z.itemsize) for z in (x, other)])
    assert "packed" in layout.access
    for first, second in ((x, other), (other, x), (x, other[..., :1].expand_as(x))):
        expected = gradients([first.contiguous(), second.contiguous()])
        found = gradients([first, second])
        assert all(map(torch.equal, found[1:], expected[1:]))
        assert torch.allclose(found[0], expected[0])
    assert all(map(torch.equal, gradients([x, other], "none", other), gradients([x, y], "none", y)))


@pytest.mark.parametrize(("layout", "dtype"), in_turn(["contiguous", "padded", "turned"], ["float32", "bfloat16"]))
def test_each_warp_takes_a_batch_where_nothing_is_added_up(
    layout: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values, gradients and second derivatives have the same bits as with several batches per warp."""
    x, target, upstream, direction = torch.randn(4, 61, 68, device=KERNELS).to(getattr(torch, dtype)).unbind()
    x = {"contiguous": x, "padded": x[:, :67], "turned": x.t().contiguous().t()}[layout].requires_grad_()
    others = [z[:, : x.shape[1]].contiguous() for z in (target, upstream, direction)]

    def results() -> list[torch.Tensor]:
        forget()
        value = F.huber_loss(x, others[0], reduction="none")
        gradient = torch.autograd.grad(value, x, others[1], create_graph=True)
        return [value, *gradient, *torch.autograd.grad(gradient, x, others[2])]

    right, chunks = results(), []
    monkeypatch.setattr(pointwise_layout, "MAX_CHUNKS", 2)
    monkeypatch.setattr(pointwise_layout, "FEW_CHUNKS", 0)
    light = pointwise_layout.in_light_batches
    monkeypatch.setattr(
        pointwise_layout, "in_light_batches", lambda *given: chunks.append(light(*given).batches) or light(*given)
    )
    for a, b in zip(results(), right, strict=True):
        assert torch.equal(a, b)
    assert len(chunks) == 3 and min(chunks) > 2


def test_a_warp_takes_several_small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heavy second derivatives in 16 bits have many small batches; their bits are those of one batch per warp."""
    x, direction = torch.randn(2, 61, 68, device=KERNELS).bfloat16().unbind()
    target, x = torch.rand_like(x), x.requires_grad_()

    def product() -> torch.Tensor:
        forget()
        (gradient,) = torch.autograd.grad(F.sigmoid_focal_loss(x, target, reduction="sum"), x, create_graph=True)
        return torch.autograd.grad(gradient, x, direction)[0]

    right, shared = product(), []
    monkeypatch.setattr(pointwise_layout, "MAX_CHUNKS", 2)
    monkeypatch.setattr(pointwise_layout, "SPREAD_WARPS", 2)
    spread = pointwise_layout.spread_chunks
    monkeypatch.setattr(
        pointwise_layout, "spread_chunks", lambda found: shared.append((found.batches, spread(found))) or spread(found)
    )
    assert torch.equal(product(), right)
    assert shared == [(33, 5)]


def test_gradients_that_would_be_scattered_take_the_order_of_another_operand(monkeypatch: pytest.MonkeyPatch) -> None:
    """They keep the order of their own operand if kernels still store neighbours next to each other."""
    shape = 65, 2, 8, 4
    x, y = drawn("float32", 2, *shape).unbind()
    permuted = x.permute(1, 3, 2, 0).contiguous().permute(3, 0, 2, 1)
    near = y.permute(1, 0, 2, 3).contiguous().permute(1, 0, 2, 3)
    expected = gradients([x, y])
    for elements, first, second, strides in (
        (1 << 20, permuted, y, y.stride()),
        (1 << 12, permuted, y, permuted.stride()),
        (1 << 12, x, near, near.stride()),
    ):
        monkeypatch.setattr(pointwise_layout, "ORDERED_ELEMENTS", elements)
        forget()
        found = gradients([first, second])
        assert all(map(torch.equal, found[1:], expected[1:])) and torch.allclose(found[0], expected[0])
        assert found[2].stride() == strides
    forget()


@pytest.mark.parametrize(("columns", "gap", "rows"), [(64, 0, False), (64, 8, True), (63, 3, False)])
def test_gradients_of_operands_with_gaps_are_row_major(
    columns: int, gap: int, rows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Autograd would copy the gradients of leaves into that order.

    If kernels had to store single elements for it, gradients keep the order of their operand.
    """
    monkeypatch.setattr(pointwise_layout, "ORDERED_ELEMENTS", 1 << 10)
    x = TensorSpec("float32", (columns, 2 * columns), (1, columns + gap))
    call = Call(MSE, (), Static("mean"))
    plan = pointwise_engine.POINTWISE.plan(call, (x, x), "float32", Machine(132, Chip()))
    assert plan.gradient_strides(0) == ((2 * columns, 1) if rows else (1, columns))
    # Graph operators guarantee the operand's own order.
    assert plan.with_aligned_gradients.gradient_strides(0) == (1, columns)


def test_dimensions_of_size_one_leave_no_gaps() -> None:
    rows, columns = 1 << 10, 1 << 9
    x = TensorSpec("float32", (1, rows, columns, 1), (rows * columns, columns, 1, 1))
    y = TensorSpec("float32", x.shape, (rows, 1, rows, rows))
    call = Call(registry()["mse_loss"], (), Static("mean"))
    plan = pointwise_engine.POINTWISE.plan(call, (x, y), "float32", Machine(132, Chip()))
    assert y.lies_as(plan.gradient_strides(1)) and not y.lies_as(x.strides)


@pytest.mark.parametrize("gap", [0, 3])
def test_operands_that_would_be_gathered_twice_are_copied(gap: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies have the order of the first operand or, if that has gaps, the order that autograd gives its gradient."""
    monkeypatch.setattr(pointwise_layout, "ORDERED_ELEMENTS", 1 << 10)
    shape, twice = (13, 2, 8, 4, 2), "none"
    x, y = drawn("float32", 2, *shape).unbind()
    permuted = torch.nn.functional.pad(x.permute(1, 3, 2, 4, 0).contiguous(), (0, gap))[..., :13].permute(4, 0, 2, 1, 3)
    rows = y.stride()
    order = rows if gap else permuted.stride()
    for first, second, reduction in ((permuted, y, twice), (permuted, y, "mean"), (y, permuted, twice)):
        call = pointwise_engine.POINTWISE.bind(MSE, (first, second, None, None, None), (reduction, None, None))
        tensors = specs([first, second], [0, 0])
        copies = pointwise_engine.POINTWISE.copies(Call(*call), tensors, Machine(132, Chip()), True)
        target = order if first is permuted else rows
        assert copies == {i: target for i, z in enumerate((first, second)) if (z is y) != (target == rows)}
        expected = gradients([first.contiguous(), second.contiguous()], reduction)
        found = gradients([first, second], reduction)
        assert all(map(torch.equal, found[1:], expected[1:])) and torch.allclose(found[0], expected[0])
        assert found[1].stride() == target
    forget()


@pytest.mark.parametrize(
    ("columns", "dtype", "copied"),
    [(63, "float32", (1, 2)), (66, "float32", (2,)), (66, "bfloat16", (1, 2)), (68, "bfloat16", ())],
)
def test_operands_in_tiles_of_pairs_are_copied(
    columns: int, dtype: str, copied: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Operands that are read in pairs of four-byte elements are copied only if both gradients are written."""
    monkeypatch.setattr(pointwise_layout, "SINGLE_ELEMENTS", 1 << 10)
    rows = (1 << 14) + 1
    tensors = TensorSpec(dtype, (rows, columns), (columns, 1)), TensorSpec(dtype, (rows, columns), (1, rows))
    for writes in (1, 2):
        found = pointwise_engine.POINTWISE.copies(
            Call(MSE, tensors, Static("mean")), tensors, Machine(132, Chip()), writes
        )
        assert found == ({1: (columns, 1)} if writes in copied else {})


@pytest.mark.parametrize(
    ("shape", "order", "dtype", "copied"),
    [
        ((7, 11, 13, 33521), (0, 1, 3, 2), "float32", True),  # neighbours are a row apart
        ((7, 11, 13, 33521), (0, 2, 1, 3), "float32", False),  # both have the same rows
        ((11184811, 3), (1, 0), "float32", False),  # neighbours are three elements apart
        ((3344, 3345, 3), (2, 1, 0), "bfloat16", False),  # or 10035
        ((3, 11184811), (1, 0), "bfloat16", False),  # a sector has five of a vector's elements
        ((4, 3, 129, 130, 131), (3, 2, 1, 0, 4), "float32", True),  # too many dimensions
        ((4, 3, 9, 130, 131), (3, 2, 1, 0, 4), "float32", False),  # few elements
    ],
)
def test_operands_that_would_be_gathered_from_many_sectors_are_copied(
    shape: tuple[int, ...], order: tuple[int, ...], dtype: str, copied: bool
) -> None:
    rows, strides = dense_strides(shape, (0,) * len(shape)), [0] * len(shape)
    for i, d in enumerate(order):
        strides[d] = prod(shape[e] for e in order[i + 1 :])
    tensors = TensorSpec(dtype, shape, rows), TensorSpec(dtype, shape, tuple(strides))
    found = pointwise_engine.POINTWISE.copies(Call(MSE, tensors, Static("mean")), tensors, Machine(132, Chip()), 1)
    assert found == ({1: rows} if copied else {})


@pytest.mark.parametrize(
    ("loss", "dtype", "copied"),
    [("mse_loss", "bfloat16", False), ("js_div", "bfloat16", True), ("js_div", "float32", False)],
)
def test_operands_that_go_through_shared_memory_are_not_copied(loss: str, dtype: str, copied: bool) -> None:
    """Operands of a heavy loss in 16 bits do not go through it, and are copied."""
    tensors = TensorSpec(dtype, (6001, 6003), (6003, 1)), TensorSpec(dtype, (6001, 6003), (1, 6001))
    call = Call(registry()[loss], tensors, Static("mean", flags=tuple([0 for _ in registry()[loss].flags])))
    found = pointwise_engine.POINTWISE.copies(call, tensors, Machine(132, Chip()), 1)
    assert found == ({1: (6003, 1)} if copied else {})
    plan = pointwise_engine.POINTWISE.plan(call, tensors, dtype, Machine(132, Chip()))
    assert plan.elements_launch.layout.staged == (not copied)
    # Products with second derivatives go the same way, although they are heavier than the loss.
    tangent = TensorSpec(dtype, (6001, 6003), (6003, 1))
    moved = registry()[loss].engine.jvp(
        call._replace(static=call.static._replace(kind="sum")), (True, False), (tangent,)
    )
    second = pointwise_engine.POINTWISE.plan(moved, (*tensors, tangent), dtype, Machine(132, Chip()))
    assert second.product_launch.layout.staged == (not copied)


@pytest.mark.parametrize(
    ("rows", "columns", "itemsize", "tile"),
    [
        (1 << 20, 26, 4, (2, 4, 16, 1, 2)),  # rows of 104 bytes, at once
        (1 << 20, 24, 4, (4, 4, 4, 2, 1)),  # rows of whole sectors, in two steps
        (1 << 20, 26, 2, (2, 4, 8, 2, 1)),  # a sector along the other dimension as well
        (2048, 2047, 2, (1, 4, 8, 1, 4)),
        (2047, 2048, 2, (8, 1, 2, 1, 4)),
        (1023, 2048, 4, (4, 1, 2, 1, 4)),  # two sectors of single elements
        (8192, 8192, 2, (8, 4, 4, 1, 2)),
    ],
)
def test_tiles_have_sectors_along_both_dimensions(
    rows: int, columns: int, itemsize: int, tile: tuple[int, ...]
) -> None:
    strides = (columns, 1), (1, rows)
    streams = [Stream(s, itemsize, read=read) for read in (True, False) for s in strides]
    assert pointwise_layout.layout((rows, columns), streams).tile == pointwise_layout.Tile(*tile)


@pytest.mark.parametrize(
    ("loss", "dtype", "found"),
    [("general_robust_loss", "float32", True), ("general_robust_loss", "bfloat16", False)]
    + [("mse_loss", "float32", False)],
)
def test_heavy_losses_shift_one_vector_at_a_time(loss: str, dtype: str, found: bool) -> None:
    """Only heavy losses in float32 do. Rows that are 129 elements apart are shifted."""
    rows = TensorSpec(dtype, (1 << 16, 128), (128, 1)), TensorSpec(dtype, (1 << 16, 128), (129, 1))
    found_loss, defaults = registry()[loss], [x.default for x in registry()[loss].operands[2:]]
    absent, settings = (None, None, None), ("mean", None, None)
    call = Call(*pointwise_engine.POINTWISE.bind(found_loss, (*rows, *defaults, *absent), settings))
    plan = pointwise_engine.POINTWISE.plan(call, rows, dtype, Machine(132, Chip()))
    assert plan.elements_launch.layout.access[1] == "shifted"
    assert plan.shifts_one_by_one == found


@pytest.mark.parametrize(
    ("rows", "step", "writes", "copied"),
    [(16, 2, True, True), (8, 2, True, False), (8, 2, False, True), (4, 2, False, False), (16, 1, True, False)],
)
def test_broadcast_operands_with_a_step_are_copied(
    rows: int, step: int, writes: bool, copied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such operands would keep the others from being read in vectors, and are small beside them."""
    monkeypatch.setattr(pointwise_layout, "COMPACTED_ELEMENTS", 1 << 10)
    shape = (rows, 4, 64)
    x, y = drawn("float32", *shape), drawn("float32", 1, 4, 64 * step)[..., ::step]
    call = Call(*pointwise_engine.POINTWISE.bind(MSE, (x, y, None, None, None), ("mean", None, None)))
    copies = pointwise_engine.POINTWISE.copies(call, specs([x, y], [0, 0]), Machine(132, Chip()), writes)
    assert copies == ({1: (256, 64, 1)} if copied else {})
    if copied and writes:
        found, expected = gradients([x, y]), gradients([x, y.contiguous()])
        assert all(map(torch.equal, found, expected))
    forget()


def test_short_rows_with_long_gaps_are_copied_where_they_are_read_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that are read once, rows that fill their sectors, and expanded operands are not copied."""
    shape, padded = (2048, 3), (67, 1)
    assert not pointwise_layout.is_sparse(shape, padded, 4)
    monkeypatch.setattr(pointwise_layout, "SMALL", 1 << 12)
    assert [pointwise_layout.is_sparse(shape, padded, n) for n in (2, 4, 8)] == [True, True, False]
    assert not pointwise_layout.is_sparse(shape, (4, 1), 4) and not pointwise_layout.is_sparse(shape, (67, 0), 4)
    # Memory is read in pairs of sectors, and read again if L2 has not kept them.
    assert [pointwise_layout.is_sparse((n, 4), (16, 1), 4) for n in (1 << 19, 1 << 20)] == [False, True]
    assert not pointwise_layout.is_sparse((1 << 20, 8), (64, 1), 4)
    x = drawn("float32", 2048, 67)[:, :3]
    y = drawn("float32", *shape)
    for reduction, count in (("none", 1), ("mean", 0)):
        call = pointwise_engine.POINTWISE.bind(MSE, (x, y, None, None, None), (reduction, None, None))
        tensors = specs([x, y], [0, 0])
        assert len(pointwise_engine.POINTWISE.copies(Call(*call), tensors, Machine(132, Chip()), True)) == count
        assert all(map(torch.equal, gradients([x, y], reduction), gradients([x.contiguous(), y], reduction)))


@pytest.mark.parametrize(
    ("shape", "target", "stored"),
    [((1200, 8), (1, 8), (1, 1)), ((2, 70, 40), (2, 1, 40), (2, 1, 1)), ((67, 64), (67, 1), (1, 1))],
    ids=str,
)
def test_gradient_of_an_operand_that_is_broadcast_and_expanded(
    shape: tuple[int, ...], target: tuple[int, ...], stored: tuple[int, ...]
) -> None:
    x = (torch.arange(prod(shape), device=KERNELS) % 5 - 1.0).reshape(shape)
    t = (torch.arange(prod(stored), device=KERNELS) % 3.0).reshape(stored).expand(target)
    assert torch.equal(gradients([x, t], "sum")[-1], (2 * (t - x)).sum_to_size(target))


@pytest.mark.parametrize("shape", [(260,), (70, 1), ()], ids=str)
def test_sums_of_gradients_have_the_same_bits_in_every_backward(shape: tuple[int, ...]) -> None:
    """Covers a first and a second backward, one without speculation, and one without the other gradient."""
    x, t = drawn("float32", 70, 260).requires_grad_(), drawn("float32", *shape).requires_grad_()
    value = F.mse_loss(x, t)
    expected = torch.autograd.grad(value, [x, t], retain_graph=True)
    assert torch.allclose(expected[1], expected[0].neg().double().sum_to_size(shape).float(), rtol=1e-5, atol=1e-7)
    scaled = torch.autograd.grad(value, [x, t], -value.new_full((), 4.0))
    assert all(torch.equal(g, -4 * e) for g, e in zip(scaled, expected, strict=True))
    with cupylosses.set_one_pass(False):
        assert all(map(torch.equal, torch.autograd.grad(F.mse_loss(x, t), [x, t]), expected))
    assert torch.equal(torch.autograd.grad(F.mse_loss(x.detach(), t), t)[0], expected[1])
    assert torch.equal(F.mse_loss(x.detach(), t.detach()), value)


def test_terms_whose_sum_leaves_float32_are_summed_in_double() -> None:
    large = torch.full((64, 8), 1e38, device=KERNELS)
    found = gradients([large, large.new_zeros(8)])[-1]
    assert torch.allclose(found, found.new_full((8,), -2e38 * 64 / 512))

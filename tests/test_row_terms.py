"""Dense targets in every row layout of the softmax engine: values, both gradients, bits, rows that do not count.

``test_rows.py`` tests the formulas.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from math import prod
from typing import Any

import pytest
import torch
from devices import GPU, KERNELS
from grids import identity, in_turn, short_or_full
from tools.softmax.properties import (
    TERM_CHIP,
    TERM_LAYOUTS,
    TERM_LOSSES,
    draw_terms,
    term_chip,
    terms_keep_sure_rows,
    terms_keep_sure_teachers,
    terms_read_teachers_again,
    terms_share_equal_logits,
)
from torch import Tensor

import cupylosses.functional
from cupylosses.backends.torch import device as torch_device
from cupylosses.engines.softmax import layout as softmax_layout
from cupylosses.jit.gpu import DECLARED_BYTES
from cupylosses.testing import host
from cupylosses.testing.host.execution import HostDevice
from cupylosses.testing.softmax.properties import (
    BAD_ROWS,
    PLACES,
    SoftmaxCall,
    agrees_with_truth,
    blocks,
    gradients,
    leaves_rows_out,
    noted_layouts,
    upstream,
    writes_one_gradient_in_one_pass_or_two,
)
from cupylosses.testing.tolerance import same_bits

pytestmark = pytest.mark.kernels

#: A loss with probabilities, and one with a teacher.
FEW = ("cross_entropy", "distillation_loss, mixed")

#: A loss for each layout, in turn.
LOSS_OF_LAYOUT = [*list(TERM_LOSSES)[3:], *list(TERM_LOSSES)[:3]]

#: Dtypes of logits and targets, as many as there are layouts.
MIXED_TERMS = (
    ("bfloat16", "float32"),
    ("float64", "float64"),
    ("float16", "float32"),
    ("bfloat16", "bfloat16"),
    ("float32", "float16"),
    ("bfloat16", "float32"),
    ("bfloat16", "bfloat16"),
    ("float32", "float32"),
    ("bfloat16", "bfloat16"),
    ("float32", "float16"),
    ("float32", "float64"),
)

in_each_layout = pytest.mark.parametrize("layout", TERM_LAYOUTS)
#: Every loss in one layout, and every other layout with few losses.
EACH_LOSS = [
    *((x, "subwarp") for x in TERM_LOSSES),
    *((x, y) for y in list(TERM_LAYOUTS)[1:] for x in FEW),
]


@pytest.fixture(autouse=True)
def small_chip(monkeypatch: pytest.MonkeyPatch, fresh_plans: Callable[[], None]) -> Iterator[None]:
    """Plans for the small chip that TERM_LAYOUTS assumes, even on a larger GPU."""
    if GPU:
        x = torch.zeros(1, 2, device=KERNELS)
        cupylosses.functional.cross_entropy(x, x)
    device = torch_device.devices[torch.cuda.current_device() if GPU else -1]
    monkeypatch.setattr(device, "chip", dataclasses.replace(TERM_CHIP, clusters=device.chip.clusters))
    fresh_plans()
    with term_chip():
        yield


def drawn(row_loss: str, layout: str, **chosen: Any) -> SoftmaxCall:
    """Draws a call of a loss in a layout, on the device of the kernels."""
    return draw_terms(row_loss, TERM_LAYOUTS[layout], KERNELS, **chosen)


def mask(shape: Sequence[int]) -> Tensor:
    """A mask of about two rows in three, broadcast along the first dimension."""
    chosen = torch.rand(tuple(shape[1:]) or (1,), generator=torch.Generator().manual_seed(3)) < 0.67
    return chosen.to(KERNELS)


def shape_of(layout: str, dtypes: Sequence[str]) -> tuple[int, ...]:
    """Returns the shape of a layout for these dtypes. Rows that get the layout for their bytes keep these."""
    shape = TERM_LAYOUTS[layout]
    if "cluster" in layout or layout == "windowed":
        return (shape[0], shape[1] * 8 // sum(torch.finfo(getattr(torch, x)).bits // 8 for x in dtypes) + 1)
    return shape


def results(call: SoftmaxCall) -> list[Tensor]:
    """Returns the values and gradients of all entry points."""
    found = []
    for reduction, grad_output in (("mean", 1.0), ("mean", -3.0), ("none", 2.0)):
        leaves, given = call.with_(reduction=reduction).differentiable()
        value = given()
        found += [value.detach(), *gradients(value, leaves, grad_output)]
    return found


@in_each_layout
def test_layouts_are_what_they_are_called(layout: str, fresh_plans: Callable[[], None]) -> None:
    with noted_layouts() as found:
        drawn("cross_entropy", layout)()
    assert {(x.kind, x.cluster > 1, x.warps > 1) for x in found} == {
        (layout.partition(",")[0], layout in ("block, cluster", "windowed"), "warps" in layout or layout == "windowed")
    }


@pytest.mark.parametrize(("of", "reduction"), in_turn(EACH_LOSS, ["mean", "none"]), ids=identity)
def test_values_and_gradients(of: tuple[str, str], reduction: str) -> None:
    agrees_with_truth(drawn(*of, reduction=reduction))


#: Images with so many classes that several warps share a row on a GPU of usual size: loss, shape, dtypes, and number of
#: warps. Pixels are moved in words, or one by one.
OF_WARPS = [
    ("cross_entropy", (2, 60, 6, 14), ("float32", "float32"), 2),
    ("distillation_loss, mixed", (1, 150, 5, 7), ("bfloat16", "bfloat16"), 2),
    ("kl_div_with_logits", (2, 131, 4, 6), ("bfloat16", "float32"), 3),
    ("cross_entropy", (1, 93, 5, 6), ("float64", "float32"), 3),
    ("distillation_loss, mixed", (1, 93, 6, 6), ("float64", "float64"), 6),
]


@pytest.mark.parametrize(("case", "reduction"), in_turn(range(len(OF_WARPS)), ["mean", "none"]), ids=str)
def test_images_of_many_classes(case: int, reduction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    row_loss, shape, dtypes, warps = OF_WARPS[case]
    usual = dataclasses.replace(TERM_CHIP, shared=DECLARED_BYTES + (1 << 17))
    with monkeypatch.context() as patch, noted_layouts() as found:
        patch.setattr(torch_device.devices[torch.cuda.current_device() if GPU else -1], "chip", usual)
        patch.setattr(softmax_layout, "DENSE_COLUMN_TILES", 16)
        patch.setattr(softmax_layout, "HEAVY_TERM_ROWS", dict.fromkeys((2, 4, 8), 0))
        agrees_with_truth(draw_terms(row_loss, shape, KERNELS, dtypes, reduction=reduction))
    assert {(x.kind, x.warps) for x in found} == {("columns", warps)}


@pytest.mark.parametrize("row_loss", FEW)
def test_the_gradient_of_one_operand(row_loss: str) -> None:
    for reduction in ("mean", "none"):
        agrees_with_truth(drawn(row_loss, "subwarp", reduction=reduction), both=False)


@pytest.mark.parametrize("layout", short_or_full(list(TERM_LAYOUTS)[::2], list(TERM_LAYOUTS)))
def test_masks_and_class_weights(layout: str) -> None:
    shape = TERM_LAYOUTS[layout]
    weights = torch.rand(shape[1], generator=torch.Generator().manual_seed(2)).to(KERNELS) + 0.25
    weights[::3] = 0.0
    rows = mask((shape[0], *shape[2:]))
    agrees_with_truth(drawn("cross_entropy with everything", layout, weight=weights, mask=rows))


@pytest.mark.parametrize(
    ("layout", "dtypes"),
    short_or_full(
        [*zip(TERM_LAYOUTS, MIXED_TERMS, strict=True), *((x, ("bfloat16",) * 2) for x in ("subwarp", "block"))],
        [*product(TERM_LAYOUTS, dict.fromkeys(MIXED_TERMS))],
    ),
    ids=str,
)
def test_dtypes(layout: str, dtypes: tuple[str, str]) -> None:
    for row_loss in short_or_full(FEW[:1], FEW):
        agrees_with_truth(draw_terms(row_loss, shape_of(layout, dtypes), KERNELS, dtypes))


@pytest.mark.parametrize(
    ("layout", "dtype"),
    [
        *((x, "bfloat16") for x in TERM_LAYOUTS),
        *((x, "float32") for x in TERM_LAYOUTS if x in ("packed_rows", "thread_per_row") or "columns" in x),
        ("packed_rows", "float64"),
    ],
)
def test_the_gradient_of_a_student(layout: str, dtype: str) -> None:
    """Without the teacher's gradient, the pass that sums a row writes the student's, or keeps what it needs. Rows that
    do not count have a gradient of 0, and a row with a NaN has one of NaN.
    """
    shape = shape_of(layout, (dtype, dtype))
    counts = (torch.rand(shape[0], *shape[2:], generator=torch.Generator().manual_seed(4)) < 0.67).to(KERNELS)
    counts.view(-1)[0], counts.view(-1)[-1] = True, False
    call = draw_terms("distillation_loss", shape, KERNELS, (dtype, dtype), reduction="none", mask=counts)
    agrees_with_truth(call, both=False)

    def gradient(x: Tensor) -> Tensor:
        leaves, given = call.with_(student_logits=x).differentiable(both=False)
        return gradients(given(), leaves, 1.0)[0].movedim(1, -1).reshape(-1, shape[1])

    clean = call.arguments["student_logits"]
    spoilt = clean.clone()
    spoilt.movedim(1, -1)[(0,) * len(counts.shape)][shape[1] // 2] = torch.nan
    right, found = gradient(clean), gradient(spoilt)
    assert bool((right[~counts.view(-1)] == 0).all())
    assert bool(found[0].isnan().all())
    assert same_bits(found[1:], right[1:])


@pytest.mark.parametrize("layout", ["subwarp", "windowed"])
def test_the_gradient_of_a_student_close_to_its_teacher(layout: str) -> None:
    """The difference of two probabilities of 16 bits keeps its digits where they nearly agree."""
    generator = torch.Generator().manual_seed(5)
    shape = shape_of(layout, ("bfloat16", "bfloat16"))
    student = 5 * torch.randn(shape, generator=generator)
    teacher = student + 0.02 * torch.randn(shape, generator=generator)
    x, t = (y.bfloat16().to(KERNELS) for y in (student, teacher))
    x.requires_grad_()
    cupylosses.functional.distillation_loss(x, t, reduction="none").backward(torch.ones(shape[:1], device=KERNELS))
    truth = x.detach().double().softmax(1) - t.double().softmax(1)
    assert x.grad is not None
    assert float(((x.grad.double() - truth) / truth).abs().max()) < 2**-5


@pytest.mark.parametrize("layout", ["subwarp", "windowed"])
def test_slopes_take_the_place_of_teachers(layout: str) -> None:
    """In bfloat16, what the gradient needs replaces the teacher's logits, except those of likely classes. Behind a
    window it lies where the gradient will.
    """
    dtypes = ("bfloat16", "bfloat16")
    for sure in (False, True):
        call = draw_terms("distillation_loss, mixed", shape_of(layout, dtypes), KERNELS, dtypes, sure=(sure, sure))
        agrees_with_truth(call, both=False)
    terms_read_teachers_again(shape_of(layout, dtypes), KERNELS)


@pytest.mark.addresses
@pytest.mark.parametrize(
    ("dtype", "shapes"),
    [
        ("float32", [(33, 35), (31, 64), (300, 127), (1, 129), (65, 255), (2, 1023), (66, 1025), (3, 2050), (2, 4099)]),
        ("bfloat16", [(33, 37), (65, 255), (2, 511), (66, 2047), (3, 4099)]),
        ("float32", [(1, 1), (300, 3), (65, 32)]),
    ],
    ids=["float32", "bfloat16", "few"],
)
def test_sizes(dtype: str, shapes: Sequence[tuple[int, ...]]) -> None:
    """Class counts around the capacity of a vector, a row of a warp and a block."""
    for seed, shape in enumerate(shapes):
        agrees_with_truth(draw_terms("cross_entropy", shape, KERNELS, (dtype, dtype), seed=seed))


@pytest.mark.parametrize("row_loss", ["cross_entropy", "distillation_loss"])
def test_few_lanes_share_whole_rows(row_loss: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four lanes, so that a warp has eight rows, the last ones of which do not exist."""
    monkeypatch.setattr(softmax_layout, "FEW_LANES", 0)
    with noted_layouts() as found:
        agrees_with_truth(draw_terms(row_loss, (37, 128), KERNELS, ("bfloat16", "bfloat16")))
    assert {(x.kind, x.width) for x in found} == {("subwarp", 4)}


@pytest.mark.parametrize(
    ("places", "layout"),
    in_turn([(x, y) for x in PLACES for y in PLACES], ["subwarp", "block", "thread_per_row"]),
    ids=identity,
)
def test_places(places: tuple[str, str], layout: str) -> None:
    """Operands begin at different offsets; their gradients have no gaps. 16-bit vectors are shifted in registers, wider
    elements are copied one by one.
    """
    shape, class_dim = {"subwarp": ((3, 2, 35), 2), "block": ((1, 2, 1030), 2), "thread_per_row": ((3, 5, 8), 1)}[
        layout
    ]
    dtypes = ("bfloat16" if layout == "subwarp" else "float32",) * 2
    agrees_with_truth(draw_terms("cross_entropy", shape, KERNELS, dtypes, places=places, class_dim=class_dim))


@pytest.mark.parametrize(
    ("layout", "row_loss"),
    short_or_full([(x, FEW[0]) for x in TERM_LAYOUTS if x != "windowed"], list(product(TERM_LAYOUTS, LOSS_OF_LAYOUT))),
)
def test_one_pass_or_two(layout: str, row_loss: str) -> None:
    writes_one_gradient_in_one_pass_or_two(drawn(row_loss, layout))


@pytest.mark.parametrize(("layout", "row_loss", "reduction"), in_turn(list(TERM_LAYOUTS), FEW, ["mean", "none"]))
def test_values_do_not_depend_on_gradients(layout: str, row_loss: str, reduction: str) -> None:
    call = drawn(row_loss, layout, reduction=reduction)
    alone = call()
    for both in (False, True):
        assert same_bits(call.differentiable(both)[1]().detach(), alone)


@pytest.mark.parametrize("layout", [x for x in TERM_LAYOUTS if x != "windowed"])
def test_bits_do_not_depend_on_grid_and_order(layout: str, fresh_plans: Callable[[], None]) -> None:
    call = drawn("cross_entropy", layout)
    expected = results(call)
    executions: list[Any] = [partial(blocks, n, KERNELS) for n in (1, 3)]
    if not GPU:
        executions += [partial(host.execution, seed=1), partial(host.execution, processors=7, seed=2)]
    for execution in executions:
        fresh_plans()
        with execution():
            assert all(map(same_bits, results(call), expected)), execution


@pytest.mark.parametrize(
    ("layout", "row_loss", "reduction", "bad"), in_turn(list(TERM_LAYOUTS), LOSS_OF_LAYOUT, ["mean", "none"], BAD_ROWS)
)
def test_rows_that_are_masked(layout: str, row_loss: str, reduction: str, bad: float) -> None:
    leaves_rows_out(drawn(row_loss, layout), (reduction,), (bad,))


@in_each_layout
def test_sure_rows_and_impossible_classes(layout: str) -> None:
    terms_keep_sure_rows(TERM_LAYOUTS[layout], KERNELS)


@pytest.mark.kernels
@pytest.mark.parametrize("layout", ["subwarp", "thread_per_row", "columns, shared by warps", "packed_rows"])
def test_sure_students_and_teachers(layout: str) -> None:
    terms_keep_sure_teachers(TERM_LAYOUTS[layout], KERNELS)


@in_each_layout
def test_equal_logits(layout: str) -> None:
    terms_share_equal_logits(TERM_LAYOUTS[layout], KERNELS)


@in_each_layout
def test_rows_without_a_distribution(layout: str) -> None:
    """Impossible classes only, an infinite logit, or NaN make the value and gradients of the row NaN, and no others."""
    call = drawn("cross_entropy", layout, reduction="none")
    clean = call.arguments["input"]
    of_row = clean.shape[1]

    def rows(x: Tensor) -> Tensor:
        return x.movedim(1, -1).reshape(-1, of_row)

    def found(x: Tensor) -> tuple[Tensor, list[Tensor]]:
        leaves, given = call.with_(input=x).differentiable()
        value = given()
        return value.detach().view(-1), [rows(g) for g in gradients(value, leaves, 1.0)]

    value, others = found(clean)
    for bad, places in ((-float("inf"), slice(None)), (float("inf"), of_row // 2), (float("nan"), of_row - 1)):
        spoilt = rows(clean).clone()
        spoilt[1, places] = bad
        x = spoilt.view(clean.movedim(1, -1).shape).movedim(-1, 1).contiguous()
        value_of_it, gradients_of_it = found(x)
        for a, b in ((value_of_it, value), *zip(gradients_of_it, others, strict=True)):
            assert bool(a[1].isnan().all())
            assert same_bits(torch.cat([a[:1], a[2:]]), torch.cat([b[:1], b[2:]]))


@pytest.mark.parametrize(("layout", "reduction"), in_turn(list(TERM_LAYOUTS), ["mean", "none"]))
def test_no_memory_of_the_size_of_the_logits_but_the_gradients(
    layout: str, reduction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    kind = torch_device.TorchDevice if GPU else HostDevice
    empty = kind.empty

    def counted(self: Any, shape: Any, strides: Any, dtype: str) -> Tensor:
        sizes.append(prod(shape))
        return empty(self, shape, strides, dtype)

    monkeypatch.setattr(kind, "empty", counted)
    leaves, call = drawn("distillation_loss, mixed", layout, reduction=reduction).differentiable()
    value = call()
    gradients(value, leaves, upstream(value.detach()))
    size, rows = leaves[0].numel(), leaves[0].numel() // leaves[0].shape[1]
    assert sum(n >= size for n in sizes) == 2
    assert sum(n for n in sizes if n < size) <= 2 * rows + 1024 + 8 * 1024


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("row_loss", "shape", "dtype"),
    [
        (row_loss, *x)
        for x, row_loss in in_turn(
            [
                ((300, 1000), "float32"),
                ((300, 32000), "bfloat16"),
                ((300, 32000), "float32"),
                ((300, 50257), "bfloat16"),
                ((150, 128256), "bfloat16"),
                ((70, 262144), "float32"),
                ((3, 1048577), "float32"),
            ],
            FEW,
        )
    ],
    ids=str,
)
def test_a_whole_chip(row_loss: str, shape: tuple[int, ...], dtype: str, fresh_plans: Callable[[], None]) -> None:
    """Uses all the shared memory of the GPU."""
    device = torch_device.devices[torch.cuda.current_device()]
    device.chip = dataclasses.replace(device.chip, shared=torch_device.TorchDevice(device.index).chip.shared)
    fresh_plans()
    agrees_with_truth(draw_terms(row_loss, shape, KERNELS, (dtype, dtype)))

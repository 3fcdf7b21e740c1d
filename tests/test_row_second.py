"""Second derivatives of row losses, which kernels compute with nested dual numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import product
from math import inf, nan
from typing import Any

import pytest
import torch
from devices import KERNELS
from grids import identity, in_turn, short_or_full
from test_rows import build, few_cases, kernel_cases
from tools.softmax.properties import (
    TERM_LAYOUTS,
    TERM_LOSSES,
    draw_terms,
    terms_second_of_equal_logits,
)
from torch import Tensor

import cupylosses.functional as F
from cupylosses.backends.torch import formulas
from cupylosses.definition.registry import registry
from cupylosses.engines.softmax import layout as softmax_layout
from cupylosses.engines.softmax.definition import SoftmaxLoss
from cupylosses.testing.host.execution import SMALL
from cupylosses.testing.softmax import properties as row_properties
from cupylosses.testing.softmax.properties import (
    DIRECTIONS,
    LAYOUTS,
    PLACES,
    directions,
    few_rows_are_many,
    second,
    second_agrees_with_truth,
    second_by_logits_agrees_with_truth,
)
from cupylosses.testing.softmax.truth import NAMES, exact_second, truth
from cupylosses.testing.tolerance import compare, same_bits

pytestmark = pytest.mark.kernels

#: Layouts with different code for second derivatives; rows too long for shared memory need no code of their own here.
WAYS = (
    "subwarp", "block", "block, cluster", "thread_per_row", "thread_per_row_packed", "packed_rows", "label_only_tiles",
    "label_only_columns",
)  # fmt: skip

#: Losses of class indices.
LOSSES = [name for name, x in registry(SoftmaxLoss).items() if x.row]


@pytest.fixture
def no_formula(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object, **__: object) -> Tensor:
        raise AssertionError("the formula was taken")

    monkeypatch.setattr(formulas, "evaluate", never)


#: Storage of the logits, storage of the directions, and the dtype.
MEMORY = [
    *[(place, "alike", "float32") for place in PLACES],
    *[("contiguous", how, "float32") for how in DIRECTIONS[1:]],
    ("contiguous", "of a row", "bfloat16"),
    ("apart", "transposed", "bfloat16"),
    ("misaligned", "alike", "float16"),
    ("misaligned", "of a class", "float64"),
]


@pytest.mark.parametrize(("layout", "memory", "reduction"), in_turn(WAYS, MEMORY, ["mean", "none"]), ids=identity)
def test_layouts(
    layout: str, memory: tuple[str, str, str], reduction: str, no_formula: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, how, dtype = memory
    if layout == "subwarp":
        # Few lanes share a row, as if there were many rows.
        monkeypatch.setattr(softmax_layout, "SECOND_THREADS", 1)
    given = row_properties.of_layout(layout, device=KERNELS, place=place, dtype=dtype)
    second_agrees_with_truth(given, how, reduction)


@pytest.mark.plain
@pytest.mark.formulas
@pytest.mark.parametrize(
    ("what", "setting"),
    short_or_full(few_cases, list)([x for x in kernel_cases() if x.values[0] in LOSSES]),
)
def test_options(what: str, setting: Mapping[str, Any]) -> None:
    """Each choice of an option occurs with some loss; with ``--thorough``, any two choices occur with each loss."""
    name, arguments = build(what, setting, KERNELS)
    x = arguments["input"].detach().requires_grad_()
    along = torch.randn(x.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(x)
    value = getattr(F, name)(**{**arguments, "input": x})
    grad_output = (torch.rand(value.shape, dtype=torch.float64) + 0.25).to(value).requires_grad_()
    exact = truth(name, arguments, grad_output.detach(), directions={"input": along})
    gradient = torch.autograd.grad(value, x, grad_output, create_graph=True)[0]
    found = torch.autograd.grad(gradient, (grad_output, x), along, materialize_grads=True)
    for a, expected, like in zip(found, (exact.along, exact.changed["input"]), (grad_output, x), strict=True):
        assert expected is not None and (a.dtype, a.shape) == (like.dtype, like.shape)
        # Compare in the precision in which it was computed.
        narrow = a.float() if a.dtype == torch.float64 and x.dtype != torch.float64 else a
        comparison = compare(narrow.cpu(), expected)
        assert comparison.ok, str(comparison)


#: The reduction; for logits and targets the dtypes and the storage, and True if they have a direction.
MIXED_DERIVATIVES = [
    ("mean", ("float32", "float32"), ("contiguous", "contiguous"), (True, True)),
    ("none", ("bfloat16", "float32"), ("misaligned", "apart"), (True, False)),
    ("sum", ("float64", "float64"), ("apart", "sliced"), (False, True)),
]


@pytest.mark.parametrize(
    ("row_loss", "layout", "case"),
    in_turn(list(TERM_LOSSES), ["subwarp", "block", "thread_per_row"], range(len(MIXED_DERIVATIVES))),
)
def test_targets_per_class(row_loss: str, layout: str, case: int, no_formula: None) -> None:
    """Includes mixed derivatives, and derivatives of one operand alone."""
    reduction, dtypes, places, moving = MIXED_DERIVATIVES[case]
    call = draw_terms(row_loss, TERM_LAYOUTS[layout], KERNELS, dtypes, places, reduction=reduction)
    second_agrees_with_truth(call, moving=moving)


@pytest.mark.parametrize(
    ("row_loss", "moving", "dtypes"),
    in_turn(
        ["cross_entropy with everything", "distillation_loss, mixed"],
        [(True, True), (True, False), (False, True)],
        [("float32", "float32"), ("bfloat16", "float32")],
    ),
)
def test_many_rows_of_targets_per_class(
    row_loss: str, moving: tuple[bool, bool], dtypes: tuple[str, str], no_formula: None
) -> None:
    """A warp moves rows of few classes together."""
    with few_rows_are_many():
        second_agrees_with_truth(draw_terms(row_loss, (70, 6), KERNELS, dtypes), moving=moving)


def test_many_rows_whose_labels_and_masks_lie_otherwise(no_formula: None) -> None:
    """Rows follow each other in memory, but in another order than their labels and masks."""
    given = row_properties.draw((13, 9, 7), 2, device=KERNELS)
    given = given._replace(target=given.target.t().contiguous().t())
    terms = draw_terms("cross_entropy with everything", (13, 7, 9), KERNELS)
    x = {n: terms.arguments[n].movedim(1, -1).contiguous() for n in NAMES[terms.loss][:2]}
    mask = (torch.arange(9 * 13).view(9, 13) % 5 > 0).t().to(KERNELS)
    with few_rows_are_many():
        second_agrees_with_truth(given)
        second_agrees_with_truth(terms.with_(**x, mask=mask, class_dim=-1))


@pytest.mark.parametrize(
    ("shape", "row_loss"),
    in_turn([(4, 6), (2, 301)], ["distillation_loss, mixed", "cross_entropy with everything"]),
    ids=str,
)
def test_equal_logits_against_targets_per_class(row_loss: str, shape: tuple[int, ...], no_formula: None) -> None:
    terms_second_of_equal_logits(draw_terms(row_loss, shape, KERNELS))


#: Losses and options, operands that are confident of a class, and operands that have directions. Along these, what the
#: confident class adds to the derivative with respect to a confident operand does not get small.
SURE: Mapping[str, tuple[str, Mapping[str, float], tuple[bool, bool], tuple[bool, bool]]] = {
    "teacher": ("distillation_loss", {}, (False, True), (True, False)),
    "student": ("distillation_loss", {"beta": 1.0}, (True, False), (False, True)),
    "both": ("kl_div_with_logits of logarithms", {"temperature": 1.0}, (True, True), (False, True)),
}

#: Shapes whose rows one lane processes, or lanes, warps or blocks share; the last is processed like one of many rows.
SHARED = [(3, 4, 5, 7), (37, 43), (3, 301), (2, 4099), (70, 6)]


@pytest.mark.parametrize(("shape", "sure"), short_or_full([((37, 43), "teacher")], [*product(SHARED, SURE)]), ids=str)
def test_sure_targets_per_class_keep_their_digits(shape: tuple[int, ...], sure: str, no_formula: None) -> None:
    """All second derivatives of a row are as small as the probabilities of its other classes."""
    row_loss, options, operands, moving = SURE[sure]
    with few_rows_are_many() if shape == SHARED[-1] else nullcontext():
        second_agrees_with_truth(draw_terms(row_loss, shape, KERNELS, sure=operands, **options), moving=moving)


@pytest.mark.parametrize("row_loss", short_or_full(["cross_entropy with everything"], list(TERM_LOSSES)))
def test_masked_rows_of_targets_per_class(row_loss: str, no_formula: None) -> None:
    """The derivatives of masked rows are 0, whatever the rows and their directions hold."""
    call = draw_terms(row_loss, (6, 43), KERNELS, reduction="none")
    out = torch.tensor([True, False] * 3, device=KERNELS)
    names, expected = NAMES[call.loss][:2], None
    for bad in (0.0, nan, inf):
        spoiled = {n: call.arguments[n].masked_fill(out[:, None], bad) for n in names}
        leaves, spoilt = call.with_(mask=~out, **spoiled).differentiable()
        g = torch.ones(6, device=KERNELS).masked_fill(out, bad).requires_grad_()
        first = torch.autograd.grad(spoilt(), leaves, g, create_graph=True)
        along = [torch.linspace(-1.0, 2.0, 6 * 43).view(6, 43).to(KERNELS).masked_fill(out[:, None], bad)] * 2
        found = torch.autograd.grad(first, [g, *leaves], along)
        expected = expected or found
        assert all(map(same_bits, found, expected)) and all(bool((x[out] == 0).all()) for x in found)


@pytest.mark.parametrize(
    ("layout", "options"),
    in_turn(short_or_full(WAYS[:4], WAYS), [{}, {"gamma": 1.5, "z_loss": 0.1, "label_smoothing": 0.1}]),
    ids=str,
)
def test_equal_logits(layout: str, options: Mapping[str, float], no_formula: None) -> None:
    """Any of the largest logits, which are the reference of the softmax, may be the label's."""
    given = row_properties.of_layout(layout, device=KERNELS)
    row_properties.second_of_equal_logits(given, **options if registry(SoftmaxLoss)[given.loss].softmax else {})


@pytest.mark.parametrize("gap", [1.0, 17.0, 40.0, 80.0])
@pytest.mark.parametrize(
    ("options", "dtype"),
    in_turn(
        [{}, {"gamma": 1.0}, {"gamma": 2.0}, {"gamma": 0.5}, {"poly": 0.75}, {"gamma": 1.5, "poly": 0.5}],
        ["float32", "float64"],
    ),
    ids=str,
)
def test_sure_rows_keep_their_digits(dtype: str, gap: float, options: Mapping[str, float], no_formula: None) -> None:
    """Confidently right and wrong rows, along a direction that is nearly the same for all classes."""
    kind = getattr(torch, dtype)
    eps, tiny = torch.finfo(kind).eps, torch.finfo(kind).tiny
    for label in (0, 3):
        x = torch.tensor([[gap, 0.0, -1.5, -0.25]], dtype=kind, device=KERNELS, requires_grad=True)
        g = torch.ones((), dtype=kind, device=KERNELS, requires_grad=True)
        v = torch.tensor([[64.0, 65.0, 64.5, 62.0]], dtype=kind, device=KERNELS)
        value = F.cross_entropy(x, torch.tensor([label], device=KERNELS), reduction="sum", **options)
        gradient = torch.autograd.grad(value, x, g, create_graph=True)[0]
        along, changed = torch.autograd.grad(gradient, (g, x), v)
        exact, slopes = exact_second("cross_entropy", x[0].tolist(), label, v[0].tolist(), **options)
        for found, expected in zip([along.item(), *changed[0].tolist()], [exact, *slopes], strict=True):
            assert abs(found - expected) <= 128 * eps * abs(expected) + tiny, (found, expected)


@pytest.mark.parametrize("direction", [1.0, inf])
@pytest.mark.parametrize("shape", [(3, 4), (3, 40), (3, 700), (3, 4, 5)], ids=str)
def test_impossible_classes(shape: tuple[int, ...], direction: float, no_formula: None) -> None:
    """A logit of -inf has no second derivative, whatever its direction, and changes no other one."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    y = torch.zeros(shape[0], *shape[2:], dtype=torch.int64)
    x[:, 2] = -inf
    v = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    v[:, 2] *= direction
    without = [z.index_select(1, torch.tensor([i for i in range(shape[1]) if i != 2])) for z in (x, v)]
    drawn = [row_properties.Drawn(z.to(KERNELS), y.to(KERNELS), 1) for z in (x, without[0])]
    g = torch.ones(y.shape, device=KERNELS)
    (_, found), (_, expected) = (
        second(a, b.to(KERNELS), g, reduction="none") for a, b in zip(drawn, (v, without[1]), strict=True)
    )
    assert bool((found[:, 2] == 0).all())
    torch.testing.assert_close(torch.cat([found[:, :2], found[:, 3:]], 1), expected)


@pytest.mark.parametrize("layout", short_or_full(WAYS[::2], WAYS))
def test_rows_that_do_not_count(layout: str, no_formula: None) -> None:
    """Inactive rows are not read: derivatives are 0, whatever their logits, directions and grad_outputs hold."""
    given = row_properties.of_layout(layout, device=KERNELS)
    dim, y = given.class_dim, given.target
    mask = torch.rand(y.shape, generator=torch.Generator().manual_seed(1)).to(KERNELS) < 0.7
    out = (y == -100) | ~mask
    along, g = directions(given, "alike"), torch.linspace(0.5, 2.0, y.numel(), device=KERNELS).view(y.shape)
    expected = None
    for bad in (0.0, nan, inf):
        spoiled = given._replace(input=given.input.masked_fill(out.unsqueeze(dim), bad))
        v = along.masked_fill(out.unsqueeze(dim), bad)
        found = second(spoiled, v, g.masked_fill(out, bad), reduction="none", mask=mask)
        expected = expected or found
        assert all(map(same_bits, found, expected))
        assert bool((found[0][out] == 0).all()) and bool((found[1].movedim(dim, -1)[out] == 0).all())


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("row", [[nan, 1.0, 2.0], [inf, 1.0, 2.0], [-inf] * 3], ids=["nan", "inf", "-inf"])
@pytest.mark.parametrize("along", [[1.0, 1.0, 1.0], [0.5, -1.0, 2.0]], ids=str)
def test_rows_without_a_value(name: str, row: list[float], along: list[float], no_formula: None) -> None:
    """The derivatives of such a row are NaN along any direction; other rows are unaffected."""
    if not registry(SoftmaxLoss)[name].softmax:
        pytest.skip("only the label is read")
    x = torch.tensor([row, [0.5, -0.5, 1.0]], device=KERNELS)
    given = row_properties.Drawn(x, torch.tensor([0, 1], device=KERNELS), 1, name)
    v, g = torch.tensor([along, along], device=KERNELS), torch.ones(2, device=KERNELS)
    of_grad_output, changed = second(given, v, g, reduction="none")
    assert bool(of_grad_output[0].isnan()) and bool(changed[0].isnan().all())
    assert bool(of_grad_output[1].isfinite()) and bool(changed[1].isfinite().all())


def test_a_slope_of_zero_moves(no_formula: None) -> None:
    """At lse = 0, lse^2 has slope 0 but a curvature, so its second derivative must not be dropped."""
    x = torch.full((1, 4), -torch.tensor(4.0).log().item(), dtype=torch.float64, device=KERNELS, requires_grad=True)
    function = partial(
        F.cross_entropy, target=torch.tensor([1], device=KERNELS), weight=torch.zeros(4).to(x), z_loss=0.5
    )
    v = torch.tensor([[1.0, 2.0, 3.0, 4.0]], dtype=torch.float64, device=KERNELS)
    gradient = torch.autograd.grad(function(x, reduction="sum"), x, create_graph=True)[0]
    torch.testing.assert_close(torch.autograd.grad(gradient, x, v)[0], torch.full_like(v, v.mean().item() / 4))


@pytest.mark.parametrize(
    ("name", "divided"),
    [
        (name, divided)
        for name, divided in in_turn(LOSSES, ["by weights", "by rows", "by a normalizer"])
        if divided != "by weights" or registry(SoftmaxLoss)[name].mean_of_weights  # Others have a mean of rows.
    ],
)
def test_nothing_to_divide_by(name: str, divided: str, no_formula: None) -> None:
    """With a divisor of 0, the gradient is 0 whatever multiplies it, so its derivative is 0, too."""
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0)).to(KERNELS).requires_grad_()
    options: dict[str, Any] = {
        "by rows": {"ignore_index": 0},
        "by weights": {"weight": torch.zeros(4, device=KERNELS)},
        "by a normalizer": {"normalizer": torch.tensor(0.0, device=KERNELS)},
    }[divided]
    value = getattr(F, name)(x, torch.zeros(3, dtype=torch.int64, device=KERNELS), **options)
    for upstream in (1.0, inf):
        g = torch.tensor(upstream, device=KERNELS, requires_grad=True)
        gradient = torch.autograd.grad(value, x, g, create_graph=True)[0]
        found = torch.autograd.grad(gradient, (g, x), torch.ones_like(x), materialize_grads=True)
        assert all(bool((y == 0).all()) for y in (gradient, *found))


@pytest.mark.parametrize("layout", short_or_full(WAYS[::2], WAYS))
def test_order_and_grid_do_not_matter(layout: str) -> None:
    given = row_properties.of_layout(layout, device=KERNELS)
    along, g = directions(given, "alike"), torch.ones((), device=KERNELS)
    expected = second(given, along, g)
    for count in (1, 3):
        with row_properties.blocks(count, KERNELS):
            assert all(map(same_bits, second(given, along, g), expected))


def test_hessian_vector_products_read_twice(ran: list[str], no_formula: None) -> None:
    """Covers double backward, which runs one kernel, forward over reverse, and the double-backward trick."""
    given = row_properties.of_layout("subwarp", device=KERNELS, dtype="float64")
    v = directions(given, "alike")

    def loss(x: Tensor) -> Tensor:
        return F.cross_entropy(x, given.target, reduction="sum")

    x = given.input.clone().requires_grad_()
    gradient = torch.autograd.grad(loss(x), x, create_graph=True)[0]
    ran.clear()
    expected = torch.autograd.grad(gradient, x, v)[0]
    assert ran == ["hvp"]
    found = torch.func.jvp(torch.func.grad(loss), (x.detach(),), (v,))[1]
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-15)
    found = torch.autograd.functional.hvp(loss, x.detach(), v)[1]
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-15)


def test_an_affine_loss_takes_no_kernel(ran: list[str], no_formula: None) -> None:
    given = row_properties.of_layout("label_only_columns", device=KERNELS, place="apart")
    x = given.input.detach().requires_grad_()
    gradient = torch.autograd.grad(F.nll_loss(x, given.target), x, create_graph=True)[0]
    ran.clear()
    found = torch.autograd.grad(gradient, x, torch.full_like(x, inf))[0]
    assert not ran and found.shape == x.shape and not found.any()


def test_layouts_are_what_they_are_called() -> None:
    """WAYS covers every layout of second derivatives, and its names tell clusters and `label_only` layouts."""
    kinds = set()
    for layout in WAYS:
        shape, dim, name, *_ = LAYOUTS[layout]
        x = torch.empty(shape)
        of_rows = tuple(n for d, n in enumerate(shape) if d != dim)
        strides = tuple(s for d, s in enumerate(x.stride()) if d != dim)
        rows = softmax_layout.RowStrides(strides, x.stride(dim), 4, 0)
        others = [torch.empty(of_rows).stride()] * 3
        softmax = registry(SoftmaxLoss)[name].softmax
        found = softmax_layout.second_layout(of_rows, shape[dim], rows, rows, others, rows, softmax, chip=SMALL)
        assert (found.cluster > 1) == layout.endswith("cluster")
        assert (found.kind == "label_only") == layout.startswith("label_only")
        kinds.add(found.kind)
    assert kinds == {
        "register_rows", "block", "staged_thread_per_row", "staged_packed_rows", "thread_per_row_two_pass", "label_only"
    }  # fmt: skip


#: Losses, shapes, dtypes and storage of rows that stay in registers, or are read twice, for second derivatives with
#: respect to the first operand; and True if the derivative with respect to grad_output is requested, too.
BY_LOGITS = [
    ("cross_entropy", (9, 100), ("bfloat16", "bfloat16"), ("contiguous", "contiguous"), False),
    ("kl_div_with_logits of logarithms", (5, 199), ("float32", "float32"), ("contiguous", "misaligned"), True),
    ("cross_entropy, smoothed", (3, 40), ("float64", "float64"), ("sliced", "contiguous"), True),
    ("cross_entropy", (5, 147), ("float16", "float16"), ("misaligned", "contiguous"), False),
    ("kl_div_with_logits", (2, 4, 7, 9), ("float16", "float32"), ("apart", "contiguous"), False),
    ("cross_entropy, smoothed", (3, 5, 66), ("bfloat16", "bfloat16"), ("sliced", "apart"), True),
    ("distillation_loss", (5, 145), ("bfloat16", "bfloat16"), ("contiguous", "contiguous"), False),
    ("distillation_loss", (4, 100), ("float32", "float32"), ("contiguous", "contiguous"), False),
    ("cross_entropy, smoothed", (2, 40, 5, 9), ("float32", "float32"), ("contiguous", "contiguous"), True),
    ("kl_div_with_logits", (2, 100, 35), ("bfloat16", "bfloat16"), ("contiguous", "sliced"), False),
    ("distillation_loss", (2, 50, 5, 9), ("float64", "float64"), ("apart", "contiguous"), False),
    ("kl_div_with_logits of logarithms", (5, 1101), ("float16", "float16"), ("contiguous", "misaligned"), True),
    ("cross_entropy, smoothed", (3, 1800), ("bfloat16", "float32"), ("misaligned", "contiguous"), True),
    ("cross_entropy, smoothed", (2, 4099), ("float32", "float32"), ("contiguous", "sliced"), True),
    ("distillation_loss", (3, 1500), ("float32", "bfloat16"), ("sliced", "contiguous"), False),
    ("distillation_loss", (2, 5001), ("float64", "float64"), ("contiguous", "contiguous"), False),
]


@pytest.mark.parametrize(("case", "reduction"), in_turn(range(len(BY_LOGITS)), ["none", "sum"]))
def test_targets_per_class_by_logits(
    case: int, reduction: str, no_formula: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Covers rows that few lanes, the warps of a block, or all threads of a block share."""
    monkeypatch.setattr(softmax_layout, "SECOND_THREADS", 1)
    monkeypatch.setattr(softmax_layout, "SECOND_COLUMN_ROWS", 1)
    row_loss, shape, dtypes, places, valued = BY_LOGITS[case]
    smoothed = {"label_smoothing": 0.2, "z_loss": 0.1} if "smoothed" in row_loss else {}
    call = draw_terms(row_loss.split(", ")[0], shape, KERNELS, dtypes, places, reduction=reduction, **smoothed)
    second_by_logits_agrees_with_truth(call, valued)


@pytest.mark.parametrize(
    ("classes", "dtype", "place"),
    [
        (11, "float16", "contiguous"),
        (30, "float32", "contiguous"),
        (47, "bfloat16", "misaligned"),
        (60, "float64", "apart"),
    ],
)
def test_images_whose_rows_warps_share(
    classes: int, dtype: str, place: str, no_formula: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Warps have equal or unequal numbers of classes, and the last block has fewer rows."""
    monkeypatch.setattr(softmax_layout, "SECOND_COLUMN_ROWS", 1)
    given = row_properties.draw((2, classes, 5, 7), 1, dtype, KERNELS, place)
    second_agrees_with_truth(given, "alike", "mean")


@pytest.mark.parametrize(("itemsize", "least"), [(2, 10), (4, 17), (8, 25)])
def test_a_thread_alone_takes_fewer_classes_apart(itemsize: int, least: int) -> None:
    """From ``least`` classes on, warps share the rows of images with labels, and read them in place."""
    pixels, strides = (64, 64), (64, 1)
    for classes in (least - 1, least):
        rows = softmax_layout.RowStrides(strides, 64 * 64, itemsize, 0)
        found = softmax_layout.second_layout(pixels, classes, rows, rows, [strides] * 3, rows, True)
        assert (found.kind == "register_rows", found.warps > 1) == ((classes == least),) * 2
        if classes == least:
            assert not softmax_layout.copied(
                pixels, classes, [rows, rows], 1, True, shares=False, second=True, columns=True
            )


@pytest.mark.parametrize(("classes", "impossible"), [(75, (2,)), (1100, range(2, 600))], ids=["registers", "memory"])
def test_impossible_classes_and_masked_rows_by_logits(
    classes: int, impossible: Sequence[int], no_formula: None
) -> None:
    """The derivative is 0 for a class of -inf, whatever its direction, and in a masked row, whatever it holds.

    Two classes share the largest logit, but not its direction.
    """
    generator = torch.Generator().manual_seed(0)
    x, v = torch.randn(2, 6, classes, generator=generator)
    target = torch.randn(6, classes, generator=generator).softmax(1)
    kept = [i for i in range(classes) if i not in impossible]
    x[:, impossible], v[:, impossible], target[:, impossible] = -inf, inf, 0.0
    x[:, kept[:: len(kept) // 2]], out = 4.0, torch.tensor([True, False] * 3)
    bad = x.masked_fill(out[:, None], nan).to(KERNELS).requires_grad_()
    value = F.cross_entropy(bad, target.to(KERNELS), mask=~out.to(KERNELS), reduction="none")
    g = torch.ones(6, device=KERNELS).masked_fill(out.to(KERNELS), nan)
    gradient = torch.autograd.grad(value, bad, g, create_graph=True)[0]
    found = torch.autograd.grad(gradient, bad, v.masked_fill(out[:, None], nan).to(KERNELS))[0].cpu()
    expected = truth(
        "cross_entropy",
        {"input": x[~out][:, kept], "target": target[~out][:, kept], "reduction": "none"},
        torch.ones(3),
        directions={"input": v[~out][:, kept]},
    ).changed["input"]
    assert bool((found[out] == 0).all()) and bool((found[:, impossible] == 0).all())
    comparison = compare(found[~out][:, kept], expected)
    assert comparison.ok, str(comparison)


#: Rows, classes and bytes of a logit; True if large blocks share a row: in float32, unless rows are too short, too long
#: or too few.
LONG_ROWS = [
    ((8192, 32000, 4), True), ((8192, 50257, 4), True), ((8192, 9000, 4), False), ((2048, 128256, 4), False),
    ((64, 32000, 4), False), ((8192, 50257, 2), False), ((8192, 16000, 8), False),
]  # fmt: skip


@pytest.mark.parametrize(("size", "long"), LONG_ROWS, ids=str)
def test_blocks_of_long_rows(size: tuple[int, int, int], long: bool) -> None:
    rows, classes, itemsize = size
    x = softmax_layout.RowStrides((classes,), 1, itemsize, 0)
    found = softmax_layout.second_layout((rows,), classes, x, x, [(1,)] * 3, x, True)
    assert (found.threads, found.warps) == ((1024, 32) if long else (256, 1))


@pytest.mark.parametrize("row_loss", ["labels", "distillation_loss"])
def test_long_rows(row_loss: str, no_formula: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of twice as many threads as others share a row, as on a GPU that has many such rows."""
    monkeypatch.setattr(softmax_layout, "SECOND_LONG_THREADS", 512)
    monkeypatch.setattr(softmax_layout, "MANY_BLOCKS", 0)
    if row_loss == "labels":
        second_agrees_with_truth(row_properties.draw((2, 4099), 1, device=KERNELS))
    else:
        second_by_logits_agrees_with_truth(draw_terms(row_loss, (2, 4099), KERNELS))


@pytest.mark.parametrize(("classes", "dtype"), [(33, "bfloat16"), (96, "float16"), (43, "float32")])
def test_many_rows_of_more_classes(classes: int, dtype: str, no_formula: None) -> None:
    """A warp moves rows with labels together."""
    with few_rows_are_many():
        second_agrees_with_truth(row_properties.draw((70, classes), 1, dtype, KERNELS))

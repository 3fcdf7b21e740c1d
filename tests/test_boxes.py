"""Losses of boxes: exact cases, kernels against formulas in float64, transforms, other libraries, and arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import inf, nan, prod
from typing import Any

import numpy
import pytest
import torch
from devices import HOST, KERNELS
from grids import in_turn, short_or_full
from tools import cupy_stand_in as stand_in

import cupylosses
from cupylosses import functional as F
from cupylosses import nn
from cupylosses.backends.torch import formulas, plans
from cupylosses.call import Call
from cupylosses.definition.registry import registry
from cupylosses.engines.base import Machine, TensorSpec
from cupylosses.engines.boxes.definition import BOX_FORMAT, FORMATS, BoxLoss
from cupylosses.jit.gpu import Chip
from cupylosses.testing.boxes.check import LAYOUTS, draw
from cupylosses.testing.boxes.eager import twin
from cupylosses.testing.check import Check, perform
from cupylosses.testing.host.execution import execution
from cupylosses.testing.tolerance import same_bits

LOSSES = [getattr(F, x) for x in registry(BoxLoss)]
#: Kernels of ``IOU`` compile fastest, so it alone is tested for everything that does not depend on the formula.
IOU, GIOU, DIOU, CIOU = LOSSES


def titled(value: Any) -> str:
    """The text of a parameter in the name of a test, the same in every process."""
    return value.__name__ if callable(value) else str(value)


by_name = pytest.mark.parametrize("function", LOSSES, ids=titled)
f16, bf16, f32, f64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


def drawn(
    shapes: Sequence[Sequence[int]] = ((5,), (5,)), dtype: torch.dtype = f64, seed: int = 0, box_format: str = "xyxy"
) -> list[torch.Tensor]:
    """Random boxes, some of which overlap; differences of their edges are exact in every dtype."""
    return [draw(shape, 2 * seed + i, box_format).to(KERNELS, dtype) for i, shape in enumerate(shapes)]


def gradients(
    function: Callable[..., Any], operands: Sequence[torch.Tensor], scale: float = 1.0, **options: Any
) -> list[torch.Tensor]:
    """The value, and the gradients with respect to every operand and to the weight if it is an array."""
    leaves = [x.detach().requires_grad_() for x in operands]
    weight = options.get("weight")
    if isinstance(weight, torch.Tensor):
        options["weight"] = weight.detach().requires_grad_()
    value = function(*leaves, **options)
    inputs = [*leaves, options["weight"]] if isinstance(weight, torch.Tensor) else leaves
    upstream = scale * torch.linspace(0.5, 2, max(1, value.numel()), dtype=value.dtype, device=value.device)
    return [value.detach(), *torch.autograd.grad(value, inputs, upstream[: value.numel()].reshape(value.shape))]


def exact(function: Callable[..., Any], operands: Sequence[torch.Tensor], scale: float = 1.0, **options: Any) -> Any:
    """The results of the reference formula, in float64 on the CPU."""
    for name, x in options.items():
        if isinstance(x, torch.Tensor):
            options[name] = x.cpu().double() if x.is_floating_point() else x.cpu()
    before = plans.use_host(None)
    try:
        return gradients(function, [x.cpu().double() for x in operands], scale, **options)
    finally:
        plans.use_host(before)


def agree(function: Callable[..., Any], operands: Sequence[torch.Tensor], scale: float = 1.0, **options: Any) -> None:
    """Asserts that kernels return the value and gradients of the formula."""
    found, right = gradients(function, operands, scale, **options), exact(function, operands, scale, **options)
    for a, b in zip(found, right, strict=True):
        tolerance = 1e-12 if a.dtype == f64 else 8 * torch.finfo(a.dtype).eps
        torch.testing.assert_close(a.cpu().double(), b, rtol=tolerance, atol=tolerance, equal_nan=True)


# ----------------------------------------------------------------------------------------------------------------------
# Exact cases

A, B, UNIT, APART, TOUCHING = (0, 0, 4, 2), (1, 1, 5, 3), (0, 0, 1, 1), (2, 3, 4, 4), (1, 0, 2, 1)
ZEROS = (0.0,) * 4

#: Loss, boxes, options, value, and gradients with respect to both boxes; None where nothing is compared.
CASES: Sequence[tuple[Any, ...]] = (
    (GIOU, (A, B), {}, 0.902564103450362, (-0.075502957945, -0.093228138438, -0.125838263537, -0.279684416199), None),
    (GIOU, (A, B), {"eps": 0.0}, 176 / 195, None, None),
    (DIOU, (A, B), {}, 0.828054300244672, (-0.047613684693, -0.090037057910, -0.088583361934, -0.242429514597), None),
    (DIOU, (A, B), {"eps": 0.0}, 183 / 221, None, None),
    (
        CIOU, (A, (1, 0, 3, 4)), {}, 0.731668333600546,
        (-0.058233064344, -0.006363729902, 0.058233064344, -0.163341129881),
        (0.132091129978, 0.080221795537, -0.132091129978, 0.089483064246),
    ),
    (GIOU, (UNIT, APART), {}, 1.812499994922, (0.015624998633, 0.015624998633, -0.062499999609, -0.062499999609), None),
    (DIOU, (UNIT, APART), {}, 1.476562498511, None, None),
    (CIOU, (UNIT, APART), {}, 1.478251959210, None, None),
    (GIOU, (UNIT, TOUCHING), {}, 1.0, (0.0, 0.0, -0.499999975, 0.0), (0.499999975, 0.0, 0.0, 0.0)),
    (CIOU, ((1, 1, 1, 1), (0, 0, 4, 4)), {}, 1.112499995805, None, None),
    *((f, ((2, 2, 2, 2), (2, 2, 2, 2)), {"eps": 0.0}, 1.0, ZEROS, ZEROS) for f in (GIOU, DIOU, CIOU)),
    (GIOU, ((2, 2, 2, 2), (2, 2, 2, 2)), {}, 1.0, None, None),
    (GIOU, ((2, 0, 1, 1), UNIT), {}, None, None, None),
    (IOU, (A, B), {"mode": "linear"}, 10 / 13, None, None),
    (IOU, (A, B), {"mode": "square"}, 160 / 169, None, None),
    (IOU, (A, B), {}, 1.466337068793427, (-2 / 13, -4 / 13, -10 / 39, -12 / 13), None),
    (IOU, (UNIT, TOUCHING), {"mode": "linear"}, 1 - 1e-6, ZEROS, ZEROS),
    (GIOU, ((0, 0, nan, 2), B), {}, nan, (nan,) * 4, (nan,) * 4),
    (CIOU, ((0, 0, 1, inf), B), {}, nan, (nan,) * 4, (nan,) * 4),
)  # fmt: skip


@pytest.mark.plain
@pytest.mark.kernels
@pytest.mark.parametrize(
    ("function", "boxes", "options", "value", "first", "second"),
    CASES,
    ids=[f"{x[0].__name__}-{i}" for i, x in enumerate(CASES)],
)
def test_exact_values(function: Any, boxes: Any, options: Any, value: Any, first: Any, second: Any) -> None:
    tensors = [torch.tensor(x, dtype=f64, device=KERNELS) for x in boxes]
    for found in (gradients(function, tensors, 2.0, **options), exact(function, tensors, 2.0, **options)):
        for x, right in zip(found, (value, first, second), strict=True):
            if right is not None:
                right = torch.tensor(right, dtype=f64)
                torch.testing.assert_close(x.cpu(), right, rtol=2e-10, atol=1e-12, equal_nan=True)
    agree(function, tensors, **options)


@by_name
def test_operators_of_torch(function: Any) -> None:
    """Values and gradients match the operators that torchvision uses, ties included."""
    operands = [x.cpu() for x in drawn(((400,), (400,)))]
    operands[0][:50] = operands[1][:50]
    for case in function.loss.cases[:1]:
        call = twin(function.loss, function.loss.values(case), "none")
        assert call is not None
        for a, b in zip(gradients(function, operands, **case), gradients(call, operands), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


# ----------------------------------------------------------------------------------------------------------------------
# Kernels against formulas


@pytest.mark.plain
@pytest.mark.kernels
@pytest.mark.parametrize(
    ("function", "of"),
    in_turn(LOSSES, [(f16, "none"), (bf16, "mean"), (f32, "mean"), (f32, "none")]),
    ids=lambda x: x.__name__ if callable(x) else "-".join(map(str, x)),
)
def test_dtypes(function: Any, of: tuple[torch.dtype, str]) -> None:
    """Boxes in 16 bits are computed in float32, which is also the dtype of the result."""
    dtype, reduction = of
    operands = drawn(((70,), (70,)), dtype)
    agree(function, operands, reduction=reduction)
    assert function(*operands, reduction=reduction).dtype == f32


FORMATTED = in_turn(LOSSES, tuple(FORMATS), ("none", "mean"))


@pytest.mark.kernels
@pytest.mark.parametrize(("function", "box_format", "reduction"), FORMATTED, ids=titled)
def test_formats(function: Any, box_format: str, reduction: str) -> None:
    """Kernels agree with the formula for boxes in each format."""
    operands = drawn(((70,), (70,)), f32, 1, box_format)
    agree(function, operands, box_format=box_format, reduction=reduction)


@pytest.mark.kernels
@pytest.mark.parametrize(("layout", "function"), in_turn(tuple(LAYOUTS), LOSSES), ids=titled)
def test_checks(layout: str, function: Any) -> None:
    """Runs the checks of `scripts/compare.py` in each layout."""
    for case in short_or_full(function.loss.cases[-1:], function.loss.cases):
        outcome = perform(Check(function.loss, case, ("float32",), layout=layout, reduction="mean"))
        assert outcome.ok, outcome.problems


@pytest.mark.kernels
@pytest.mark.parametrize(
    ("shapes", "reduction"),
    in_turn([((1,), (6,)), ((5, 6), (6,)), ((70, 1), (1, 3)), ((), (40,)), ((4, 1, 3), (1, 2, 1))], ["mean", "none"]),
    ids=str,
)
def test_broadcast(shapes: Sequence[Sequence[int]], reduction: str) -> None:
    """Gradients of broadcast boxes are sums over the broadcast dimensions."""
    agree(IOU, drawn(shapes), reduction=reduction)
    assert IOU(*drawn(shapes)).shape == torch.broadcast_shapes(*shapes)


def placed(x: torch.Tensor, layout: str) -> torch.Tensor:
    """The boxes with components apart, in columns of a wider array, at an odd address, with gaps, or transposed."""
    if layout == "apart":
        return x.movedim(-1, 0).contiguous().movedim(0, -1)
    if layout == "columns":
        return torch.cat((x, x[..., :2]), -1)[..., :4]
    if layout == "odd":
        return torch.cat((x.new_zeros(1), x.flatten()))[1:].reshape(x.shape)
    if layout == "gaps":
        return torch.stack((x, x), 1)[:, 0]
    return x.transpose(0, 1).contiguous().transpose(0, 1)


@pytest.mark.kernels
@pytest.mark.parametrize(
    ("layout", "dtype"), in_turn(["apart", "columns", "odd", "gaps", "transposed"], [f32, bf16]), ids=str
)
def test_strides_change_no_value(layout: str, dtype: torch.dtype) -> None:
    first, second = drawn(((4, 20), (4, 20)), dtype)
    plain = gradients(IOU, (first, second), reduction="none")
    moved = placed(first, layout)
    assert (moved.stride(), moved.data_ptr() % 16) != (first.stride(), 0)
    for a, b in zip(gradients(IOU, (moved, second), reduction="none"), plain, strict=True):
        assert same_bits(a.contiguous(), b)


@pytest.mark.parametrize(("reduction", "writes", "count"), [("none", True, 1), ("none", False, 0), ("mean", True, 0)])
def test_boxes_with_long_gaps_are_copied_where_they_are_read_twice(reduction: str, writes: bool, count: int) -> None:
    vectors = TensorSpec("float32", (1 << 21, 4), (4, 1)), TensorSpec("float32", (1 << 21, 4), (64, 1))
    loss = registry()["iou_loss"]
    tensors = [torch.empty(x.shape, device="meta") for x in vectors]
    settings = dict(zip(loss.setting_names, loss.default_settings, strict=True)) | {"reduction": reduction}
    call = Call(*loss.engine.bind(loss, (*tensors, None, None, None), tuple(settings.values())))
    assert loss.engine.copies(call, vectors, Machine(132, Chip()), writes) == dict.fromkeys((1,)[:count], (4, 1))


@pytest.mark.kernels
def test_the_value_has_the_same_bits_without_gradients() -> None:
    first, second = drawn(((700,), (700,)), f32)
    alone = IOU(first, second, reduction="mean")
    for wanted in ((True, False), (False, True), (True, True)):
        leaves = [x.detach().requires_grad_(w) for x, w in zip((first, second), wanted, strict=True)]
        assert same_bits(IOU(*leaves, reduction="mean").detach(), alone)


MODIFIED = in_turn(("none", "mean", "sum", "batchmean", "weighted_mean"), ("boxes", None, 0.5, "one"), (True, False))


@pytest.mark.kernels
@pytest.mark.parametrize(("reduction", "weight", "masked"), MODIFIED, ids=str)
def test_weights_and_masks(reduction: str, weight: Any, masked: bool) -> None:
    """A box that has weight 0 or is masked out contributes nothing, even if it is NaN."""
    first, second = drawn(((4, 6), (4, 6)), f32)
    options: dict[str, Any] = {"reduction": reduction}
    if weight in ("boxes", "one"):
        shape = (4, 6) if weight == "boxes" else (1, 6)
        generator = torch.Generator().manual_seed(3)
        options["weight"] = torch.rand(shape, generator=generator).to(KERNELS)
        options["weight"][0, 1] = 0.0
        first[:, 1, 2] = nan if weight == "one" else first[:, 1, 2]
    elif weight is not None:
        options["weight"] = weight
    if masked:
        options["mask"] = torch.arange(24, device=KERNELS).reshape(4, 6) % 3 != 0
        first[0, 0] = nan
    if weight == "one" and reduction == "weighted_mean":
        first = first.nan_to_num(3.0)
    agree(IOU, (first, second), **options)


@pytest.mark.kernels
def test_a_second_grad_output() -> None:
    """Backward computes the gradients again if grad_output is not the one that forward expected."""
    operands = drawn(((70,), (70,)), f32)
    for scale in (2.0, -3.0, -3.0):
        agree(IOU, operands, scale, reduction="mean")


# ----------------------------------------------------------------------------------------------------------------------
# Transforms, graphs, other libraries


@pytest.mark.kernels
@pytest.mark.parametrize("function", short_or_full([GIOU], [IOU, GIOU, DIOU]), ids=titled)
def test_second_derivatives(function: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    boxes = [torch.rand(3, 4, generator=generator, dtype=f64) + torch.tensor([0.0, 0, 1, 1]) for _ in range(2)]
    operands = tuple(x.to(KERNELS).requires_grad_() for x in boxes)
    monkeypatch.setattr(formulas, "hvp", None)
    assert torch.autograd.gradgradcheck(function, operands, check_undefined_grad=False)


@pytest.mark.kernels
@pytest.mark.parametrize(
    ("function", "shapes", "reduction"),
    short_or_full([], [(GIOU, ((7,), (7,)), "none")]) + [(CIOU, ((4, 6), (1, 6)), "mean")],
)
def test_second_derivatives_of_weighted_boxes(
    function: Any, shapes: Any, reduction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weighted boxes that are broadcast and strided, in float32, against the formula in float64."""
    operands, tangents = drawn(shapes, f32), drawn(shapes, f32, seed=3)
    rows = shapes[0]
    weight = torch.linspace(0, 2, prod(rows)).reshape(rows).to(KERNELS)
    mask = (torch.arange(prod(rows)) % 5 != 1).reshape(rows).to(KERNELS)
    operands[0] = operands[0].mT.contiguous().mT

    def second(device: str, dtype: torch.dtype) -> Any:
        leaves = [x.to(device, dtype).requires_grad_() for x in operands]
        more = {"weight": weight.to(device, dtype), "mask": mask.to(device)}
        value = function(*leaves, reduction=reduction, **more).sum()
        slopes = torch.autograd.grad(value, leaves, create_graph=True)
        return torch.autograd.grad(slopes, leaves, [v.to(device, dtype) for v in tangents])

    before = plans.use_host(None)
    right = second("cpu", f64)
    plans.use_host(before)
    monkeypatch.setattr(formulas, "hvp", None)
    for a, b in zip(second(KERNELS, f32), right, strict=True):
        torch.testing.assert_close(a.cpu().double(), b, rtol=1e-5, atol=1e-6)


def test_the_factor_of_aspect_ratios_is_a_constant() -> None:
    """Second derivatives keep the factor fixed too, so the Hessian is symmetric."""
    a, b = (torch.tensor(x, dtype=f64) for x in ((0.0, 0, 4, 2), (1.0, 0, 3, 4)))
    loss = CIOU.loss

    def gradient(x: torch.Tensor) -> torch.Tensor:
        return torch.func.grad(lambda y: CIOU(y, b))(x)

    found = torch.func.jacrev(gradient)(a)
    assert loss.convention and torch.allclose(found, found.T, atol=1e-12)


@pytest.mark.kernels
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_transforms(reduction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (first, second), (tangent, _) = drawn(((3,), (3,))), drawn(((3,), (3,)), seed=1)
    batch = drawn(((4, 3), (4, 3)), seed=2)[0]

    def call(x: torch.Tensor) -> torch.Tensor:
        return GIOU(x, second, reduction=reduction).sum()

    slope = torch.func.grad(call)(first)
    along = torch.func.jvp(call, (first,), (tangent,))[1]
    torch.testing.assert_close(along, (slope * tangent).sum())
    monkeypatch.setattr(formulas, "evaluate", None)
    found = torch.func.vmap(torch.func.grad(call))(batch)
    torch.testing.assert_close(found, torch.stack([torch.func.grad(call)(x) for x in batch]))


@pytest.mark.kernels
@pytest.mark.parametrize("options", [{}, {"reduction": "mean", "box_format": "cxcywh"}], ids=str)
def test_a_compiled_graph(options: Mapping[str, Any]) -> None:
    torch.compiler.reset()
    first, second = (x.requires_grad_() for x in drawn(((3,), (3,))))
    compiled = torch.compile(IOU, fullgraph=True, backend="aot_eager")
    value, eager = (f(first, second, **options) for f in (compiled, IOU))
    assert same_bits(value.detach(), eager.detach())
    for a, b in zip(*(torch.autograd.grad(v.sum(), (first, second)) for v in (value, eager)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-14, atol=1e-15)


@pytest.mark.skipif(not HOST, reason="no C++ compiler on Linux")
def test_cupy() -> None:
    tensors = [x.cpu() for x in drawn()]
    right = exact(CIOU, tensors, reduction="mean")
    with stand_in.cupy() as cupy:
        arrays = [cupy.asarray(x.numpy()) for x in tensors]
        value, found = cupylosses.value_and_grad(CIOU, *arrays, argnums=("boxes1", "boxes2"), reduction="mean")
        numpy.testing.assert_allclose(numpy.asarray(value), right[0].numpy(), rtol=1e-13)
        for a, b in zip(found, right[1:], strict=True):
            numpy.testing.assert_allclose(numpy.asarray(a), b.numpy() / 0.5, rtol=1e-11, atol=1e-14)


def test_numpy() -> None:
    tensors = [x.cpu() for x in drawn()]
    value, slope = cupylosses.value_and_grad(CIOU, *[x.numpy() for x in tensors], reduction="mean")
    right = exact(CIOU, tensors, reduction="mean")
    numpy.testing.assert_allclose(value, right[0].numpy(), rtol=1e-14)
    numpy.testing.assert_allclose(slope, right[1].numpy() / 0.5, rtol=1e-12)


@by_name
@pytest.mark.parametrize("reduction", ["none", "mean", "sum", "batchmean", "weighted_mean"])
def test_of_no_boxes(function: Any, reduction: str) -> None:
    """A mean of no boxes is 0, as in torchvision."""
    found = gradients(function, (torch.ones(0, 4), torch.ones(0, 4)), reduction=reduction)
    assert found[0].shape == ((0,) if reduction == "none" else ())
    assert float(found[0].sum()) == 0.0 and found[1].shape == (0, 4)


def test_a_module() -> None:
    operands = [x.cpu() for x in drawn()]
    module = nn.CompleteBoxIouLoss(box_format="xywh", reduction="sum")
    assert same_bits(module(*operands), CIOU(*operands, box_format="xywh", reduction="sum"))


# ----------------------------------------------------------------------------------------------------------------------
# Arguments


@pytest.mark.parametrize(
    ("operands", "options", "message"),
    [
        ((torch.ones(()), torch.ones(4)), {}, "`boxes1` must have the four components"),
        ((torch.ones(2, 4), torch.ones(2, 1)), {}, "`boxes2` must have the four components"),
        ((torch.ones(4, 2), torch.ones(4, 2)), {}, "`boxes1` must have the four components"),
        ((torch.ones(2, 4), torch.ones(3, 4)), {}, "shapes do not broadcast"),
        ((torch.ones(2, 4), torch.ones(2, 4)), {"weight": torch.ones(2, 4)}, "`weight` must have the shape"),
        ((torch.ones(2, 4), torch.ones(2, 4)), {"eps": -1.0}, "`eps` must be"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_wrong_values(operands: Any, options: Mapping[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^generalized_box_iou_loss: .*{message}.*got"):
        GIOU(*operands, **options)


@pytest.mark.parametrize(
    ("operands", "options", "message"),
    [
        ((torch.ones(2, 4).long(), torch.ones(2, 4)), {}, "`boxes1` must have one of the dtypes"),
        ((torch.ones(2, 4), torch.ones(2, 4)), {"mask": torch.ones(2)}, "`mask` must be bool"),
        ((torch.ones(2, 4), torch.ones(2, 4)), {"box_format": "yxyx"}, "`box_format` must be 'xyxy'"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_wrong_types(operands: Any, options: Mapping[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=f"^generalized_box_iou_loss: {message}.*got"):
        GIOU(*operands, **options)


def test_formats_are_described() -> None:
    assert BOX_FORMAT.choices == tuple(FORMATS) and all(f"'{x}'" in BOX_FORMAT.doc for x in FORMATS)


@by_name
def test_pairs_of_any_size_are_near_those_in_double_beside_pairs_at_edges(function: Any) -> None:
    """Pairs that are first evaluated tentatively, pairs whose tentative value is not finite, and both in one batch."""
    generator = torch.Generator().manual_seed(0)
    sizes = torch.tensor([1, 2**-55, 0.75 * 2**62, 1, 2**-50, 2**60, 8, 1]).repeat(64)[:, None]
    a, b = (torch.rand(512, 4, generator=generator, dtype=torch.float64) for _ in range(2))
    a[:, 2:], b[:, 2:] = a[:, :2] + a[:, 2:] + 0.5, b[:, :2] + b[:, 2:] + 0.5
    a, b = a.float() * sizes, b.float() * sizes
    a[5::64], b[5::64] = 0.0, 0.0
    a[11::64, 1], b[21::64, 2] = nan, inf
    found = []
    for dtype in (torch.float32, torch.float64):
        x, y = a.to(dtype).requires_grad_(), b.to(dtype).requires_grad_()
        with execution():
            value = function(x, y, eps=0.0)
            gradients = torch.autograd.grad(value.sum(), (x, y))
        # For the largest boxes, factors of the gradients are below the range of floats.
        found.append((value.double(), *[(g.double() * sizes)[sizes[:, 0] < 2**61] for g in gradients]))
    for in_float, in_double in zip(*found, strict=True):
        torch.testing.assert_close(in_float, in_double, rtol=2e-5, atol=2e-5, equal_nan=True)

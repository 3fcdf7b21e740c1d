"""Losses of row statistics: exact cases, kernels against float64 formulas, copies, transforms, graphs, arguments."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from math import inf, nan
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
from cupylosses.definition.expressions import factors
from cupylosses.definition.registry import registry
from cupylosses.engines.base import Machine, TensorSpec
from cupylosses.engines.row_statistics import codegen
from cupylosses.engines.row_statistics import engine as row_engine
from cupylosses.engines.row_statistics import layout as row_layout
from cupylosses.engines.row_statistics.curvature import curved_pairs
from cupylosses.engines.row_statistics.definition import StatisticsLoss
from cupylosses.jit.gpu import Chip
from cupylosses.testing import host
from cupylosses.testing.check import Check, perform
from cupylosses.testing.row_statistics.check import LAYOUTS
from cupylosses.testing.tolerance import same_bits

LOSSES = [getattr(F, x) for x in registry(StatisticsLoss)]
COSINE, TRIPLET = F.cosine_embedding_loss, F.triplet_margin_loss


def drawn(
    function: Callable[..., Any],
    rows: Sequence[int] = (5,),
    features: int = 7,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> list[torch.Tensor]:
    """Draws vectors that are similar enough for hinges to be active, and labels of both signs."""
    generator = torch.Generator().manual_seed(seed)
    common = torch.randn(*rows, features, generator=generator, dtype=torch.float64)
    found = []
    for x in function.loss.operands:
        if x.name in function.loss.row_operands:
            label = torch.randn(tuple(rows), generator=generator, dtype=torch.float64).sign()
            found.append(label.to(torch.int64))
        else:
            noise = torch.randn(*rows, features, generator=generator, dtype=torch.float64)
            found.append((common + noise).to(dtype))
    return [x.to(KERNELS) for x in found]


def gradients(
    function: Callable[..., Any], operands: Sequence[torch.Tensor], scale: float = 1.0, **options: Any
) -> list[torch.Tensor]:
    """Returns the value, and the gradients of every floating operand and of the weight if it is an array."""
    leaves = [x.detach().requires_grad_(x.is_floating_point()) for x in operands]
    weight = options.get("weight")
    if isinstance(weight, torch.Tensor):
        options["weight"] = weight.detach().requires_grad_()
        leaves.append(options["weight"])
    names = [x.name for x in function.loss.operands]
    value = function(**dict(zip(names, leaves, strict=False)), **options)
    upstream = torch.linspace(0.5, 2, max(1, value.numel()), dtype=value.dtype, device=value.device)
    upstream = scale * upstream[: value.numel()].reshape(value.shape)
    inputs = [x for x in leaves if x.requires_grad]
    return [value.detach(), *torch.autograd.grad(value, inputs, upstream)]


def exact(function: Callable[..., Any], operands: Sequence[torch.Tensor], scale: float = 1.0, **options: Any) -> Any:
    """Returns the results of the formula in float64 on the CPU."""
    wide = {k: x.cpu().double() if _is_floating(x) else _on_cpu(x) for k, x in options.items()}
    before = plans.use_host(None)
    try:
        return gradients(
            function, [x.cpu().double() if x.is_floating_point() else x.cpu() for x in operands], scale, **wide
        )
    finally:
        plans.use_host(before)


def _is_floating(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.is_floating_point()


def _on_cpu(x: Any) -> Any:
    return x.cpu() if isinstance(x, torch.Tensor) else x


def agree(function: Callable[..., Any], operands: Sequence[torch.Tensor], scale: float = 1.0, **options: Any) -> None:
    """Asserts that kernels give the value and gradients of the formula."""
    found, right = gradients(function, operands, scale, **options), exact(function, operands, scale, **options)
    for a, b in zip(found, right, strict=True):
        tolerance = 2e-12 if a.dtype == torch.float64 else 2 * torch.finfo(a.dtype).eps
        torch.testing.assert_close(a.cpu().double(), b, rtol=tolerance, atol=tolerance / 4, equal_nan=True)


# ----------------------------------------------------------------------------------------------------------------------
# Exact cases

f16, bf16, f32, f64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
A, B, C = (1.0, 2.0, 2.0), (2.0, 0.0, 1.0), (0.0, 1.0, 4.0)
X, Y = (1.0, 2.0, 3.0, 5.0), (2.0, 2.0, 4.0, 7.0)
TRIPLET_SLOPES = (
    (-0.816496580928, 0.408248290464, 1.224744871392),
    (0.408248290464, -0.816496580928, -0.408248290464),
    (0.408248290464, 0.408248290464, -0.816496580928),
)

#: Loss, dtype, operands, options, value, and gradients of the vectors; None for a gradient that is not checked.
CASES: Sequence[tuple[Any, ...]] = (
    (
        COSINE, f64, (A, B, 1), {"eps": 0.0}, 0.403715206000056,
        ((-0.231888531, 0.132507732, -0.0165634665), (0.0894427191, -0.298142397, -0.1788854382)),
    ),
    (
        COSINE, f64, (A, B, 1), {}, 0.403715206000149,
        ((-0.231888531, 0.132507732, -0.0165634665), (0.0894427191, -0.298142397, -0.1788854382)),
    ),
    (
        COSINE, f64, (A, B, -1), {}, 0.596284793999851,
        ((0.231888531, -0.132507732, 0.0165634665), (-0.0894427191, 0.298142397, 0.1788854382)),
    ),
    (
        COSINE, f64, (A, B, -1), {"margin": 0.5}, 0.096284793999851,
        ((0.231888531, -0.132507732, 0.0165634665), (-0.0894427191, 0.298142397, 0.1788854382)),
    ),
    (COSINE, f64, ((1.0, 0.0), (0.0, 1.0), -1), {}, 0.0, ((0.0, 1 - 1e-12), (1 - 1e-12, 0.0))),
    (COSINE, f64, ((0.0, 0.0), (3.0, 4.0), 1), {}, 1.0, ((0.0, 0.0), (0.0, 0.0))),
    (COSINE, f64, ((0.0, 0.0), (0.0, 0.0), 1), {}, 1.0, ((0.0, 0.0), (0.0, 0.0))),
    (COSINE, f64, ((1e-6, 0.0), (1e-6, 0.0), 1), {}, 0.5, ((-250000.0, 0.0), (-250000.0, 0.0))),
    (COSINE, f64, ((1e-6, 0.0), (1e-6, 0.0), 1), {"eps": 0.0}, 0.0, ((0.0, 0.0), (0.0, 0.0))),
    (
        COSINE, f32, ((1e20, 0.0), (1e20, 1e20), 1), {}, 0.292893218813,
        ((0.0, -7.07106767e-21), (-3.53553384e-21, 3.53553384e-21)),
    ),
    (
        COSINE, f32, ((1.0, 0.0), (1.0, 1e-4), 1), {"eps": 0.0}, 4.99999970988e-9,
        ((0.0, -9.99999970e-5), (-9.99999934e-9, 9.99999960e-5)),
    ),
    (COSINE, f16, ((300.0, 0.0), (300.0, 0.0), 1), {}, 0.0, ((0.0, 0.0), (0.0, 0.0))),
    (F.cosine_loss, f64, (A, B), {"eps": 0.0}, 0.403715206000056,
        ((-0.231888531, 0.132507732, -0.0165634665), (0.0894427191, -0.298142397, -0.1788854382)),
    ),
    (F.cosine_loss, f64, ((5e-9, 0.0), (3.0, 4.0)), {}, 0.7, ((-6e7, -8e7), (-0.064, 0.048))),
    (F.cosine_loss, f64, ((0.0, 0.0), (3.0, 4.0)), {"eps": 0.0}, 1.0, ((0.0, 0.0), (0.0, 0.0))),
    (TRIPLET, f64, (A, B, C), {"eps": 0.0}, 1.0, TRIPLET_SLOPES),
    (
        TRIPLET, f64, (A, B, C), {}, 1.000000816496445,
        ((-0.816496444845, 0.408248018298, 1.224744735308), None, None),
    ),
    (TRIPLET, f64, (A, B, C), {"eps": 0.0, "p": 1.0}, 1.0, ((-2.0, 0.0, 2.0), (1.0, -1.0, -1.0), (1.0, 1.0, -1.0))),
    (
        TRIPLET, f64, (A, B, C), {"eps": 0.0, "p": 3}, 1.0,
        ((-0.430886938006, 0.646330407010, 1.077217345016), None, None),
    ),
    (TRIPLET, f64, (A, B, C), {"eps": 0.0, "p": inf}, 1.0, ((0.0, 1.0, 1.0), (0.0, -1.0, 0.0), (0.0, 0.0, -1.0))),
    (
        TRIPLET, f64, ((0.0, 0.0), (3.0, 0.0), (4.0, 0.0)), {"swap": True, "eps": 0.0}, 3.0,
        ((-1.0, 0.0), (2.0, 0.0), (-1.0, 0.0)),
    ),
    (
        TRIPLET, f64, ((0.0, 0.0), (2.0, 0.0), (1.0, 3.0)), {"swap": True, "margin": 5.0, "eps": 0.0},
        3.837722339831621,
        ((-0.841886116992, 0.474341649025), (0.841886116992, 0.474341649025), (0.0, -0.948683298051)),
    ),
    (
        TRIPLET, f64, ((0.0, 0.0), (1.0, 0.0), (2.0, 0.0)), {"eps": 0.0}, 0.0, ((0.0, 0.0), (1.0, 0.0), (-1.0, 0.0)),
    ),
    (TRIPLET, f64, ((0.0, 0.0), (1.0, 0.0), (inf, 0.0)), {}, 0.0, ((0.0, 0.0), (0.0, 0.0), (0.0, 0.0))),
    (TRIPLET, f64, ((1.0, 2.0), (1.0, 2.0), (1.0, 2.0)), {"eps": 0.0}, 1.0, ((0.0, 0.0), (0.0, 0.0), (0.0, 0.0))),
    (
        TRIPLET, f64, ((1.0, 2.0), (1.0, 2.0), (1.0, 2.0)), {}, 1.0,
        ((0.0, 0.0), (-(0.5**0.5), -(0.5**0.5)), (0.5**0.5, 0.5**0.5)),
    ),
    (
        TRIPLET, f32, ((0.0, 0.0), (1e20, 0.0), (1.0, 0.0)), {"eps": 0.0},
        100000002004087734272.0,
        ((0.0, 0.0), (1.0, 0.0), (-1.0, 0.0)),
    ),
    (TRIPLET, f32, ((0.0, 0.0), (1e20, 0.0), (2e20, 0.0)), {}, 0.0, ((0.0, 0.0), (0.0, 0.0), (0.0, 0.0))),
    *(
        (TRIPLET, f32, ((3e38, 4.0), (0.0, 0.0), (0.0, nan)), {"p": p, "margin": 0.5}, nan, ((nan, nan),) * 3)
        for p in (1.0, 2.0, 5.0, inf)
    ),
    (
        F.pearson_loss, f64, (X, Y), {}, 0.029430958461829,
        ((-0.049560972334, 0.061361203842, 0.007080138905, -0.018880370413), None),
    ),
    (
        F.pearson_loss, f64, (tuple(1e9 + x for x in X), tuple(y - 1e9 for y in Y)), {}, 0.029430958461829,
        ((-0.049560972334, 0.061361203842, 0.007080138905, -0.018880370413), None),
    ),
    (F.pearson_loss, f64, ((0.1,) * 4, Y), {}, 1.0, ((0.0,) * 4, (0.0,) * 4)),
    (
        F.ccc_loss, f64, (X, Y), {}, 0.203389830508475,
        ((-0.029876472278, 0.024130996840, -0.057454754381, -0.152829646653), None),
    ),
    (F.ccc_loss, f64, (X, Y), {"unbiased": True}, 0.175438596491228, (None, None)),
    (F.ccc_loss, f64, ((0.1,) * 4, (0.1,) * 4), {}, 0.0, ((0.0,) * 4, (0.0,) * 4)),
    (COSINE, f64, (A, B, 0), {}, nan, ((nan, nan, nan), (nan, nan, nan))),
    (COSINE, f64, ((1.0, nan, 2.0), B, -1), {"margin": 5.0}, nan, ((nan, nan, nan), (nan, nan, nan))),
)  # fmt: skip


@pytest.mark.plain
@pytest.mark.kernels
@pytest.mark.parametrize(
    ("function", "dtype", "operands", "options", "value", "slopes"),
    CASES,
    ids=[f"{x[0].__name__}-{i}" for i, x in enumerate(CASES)],
)
def test_exact_values(
    function: Any, dtype: torch.dtype, operands: Any, options: Mapping[str, Any], value: float, slopes: Any
) -> None:
    for where in ("kernels", "formula"):
        tensors = [torch.tensor(x, dtype=dtype if isinstance(x, tuple) else None).to(KERNELS) for x in operands]
        arguments = {"reduction": "none", **options}
        found = gradients(function, tensors, 2.0, **arguments)
        if where == "formula":
            found = exact(function, tensors, 2.0, **arguments)
        kind = f64 if where == "formula" else dtype
        for i, (a, b) in enumerate(zip(found, [value, *slopes], strict=True)):
            if b is None:
                continue
            # The expected values are rounded to twelve digits, the derivatives to nine, or to those of the dtype.
            rtol = {f16: 1e-3, f32: 2e-7, f64: 2e-9}[kind if i == 0 else dtype]
            rtol = 1e-11 if i == 0 and kind == f64 else rtol
            torch.testing.assert_close(
                a.cpu().double(),
                torch.tensor(b, dtype=f64),
                rtol=rtol,
                atol=1e-14 if i == 0 else 1e-10 if dtype == f64 else 1e-30,
                equal_nan=True,
            )


# ----------------------------------------------------------------------------------------------------------------------
# Kernels against formulas


@pytest.mark.plain
@pytest.mark.kernels
@pytest.mark.parametrize(("function", "dtype"), in_turn(LOSSES, [f16, bf16, f32, f64]))
def test_dtypes(function: Any, dtype: torch.dtype) -> None:
    agree(function, drawn(function, dtype=dtype))


#: Shapes of rows and numbers of features: subwarps of every width, blocks, and rows that do not fit into registers.
SHAPES = [((3, 5), 1), ((70,), 8), ((9,), 130), ((), 40), ((2,), 516), ((2,), 4100)]


@pytest.mark.kernels
@pytest.mark.parametrize(("shape", "reduction"), in_turn(SHAPES, ["mean", "none"]))
def test_lengths(shape: tuple[Sequence[int], int], reduction: str) -> None:
    rows, features = shape
    operands = drawn(COSINE, rows, features, torch.float32)
    agree(COSINE, operands, reduction=reduction)


@pytest.mark.kernels
@pytest.mark.parametrize(
    ("function", "layout"),
    short_or_full(
        [*((COSINE, x) for x in LAYOUTS), (TRIPLET, "long"), (TRIPLET, "broadcast"), (F.ccc_loss, "block")],
        list(product(LOSSES, LAYOUTS)),
    ),
)
def test_checks(function: Any, layout: str) -> None:
    """Runs the checks of `scripts/compare.py` in each layout."""
    outcome = perform(Check(function.loss, function.loss.cases[-1], ("float32",), layout=layout))
    assert outcome.ok, outcome.problems


def strided(x: torch.Tensor, layout: str) -> torch.Tensor:
    if layout == "transposed":
        return x.movedim(-1, 0).contiguous().movedim(0, -1)
    if layout == "shifted":
        return torch.cat((x[..., :1], x), -1)[..., 1:]
    if layout == "every second":
        return torch.stack((x, torch.full_like(x, torch.nan)), -1).flatten(-2)[..., ::2]
    return x.transpose(0, 1).contiguous().transpose(0, 1)


@pytest.mark.kernels
@pytest.mark.parametrize(
    ("layout", "rows", "features", "dtype"),
    [
        ("transposed", (4, 6), 8, f32),
        ("shifted", (4, 6), 8, f32),
        ("rows", (4, 6), 8, f32),
        ("transposed", (32, 64), 8, f32),
        ("transposed", (8, 8), 256, f32),
        ("every second", (4, 6), 16, bf16),
    ],
    ids=str,
)
def test_strides_change_no_bit(layout: str, rows: tuple[int, ...], features: int, dtype: torch.dtype) -> None:
    """Value and gradients have the bits of contiguous operands. Vectors of many features are read from copies."""
    first, second, label = drawn(COSINE, rows, features, dtype)
    plain = gradients(COSINE, (first, second, label), reduction="none")
    placed = strided(first, layout)
    found = gradients(COSINE, (placed, second, label), reduction="none")
    assert placed.stride() != first.stride()
    for a, b in zip(found, plain, strict=True):
        assert same_bits(a.contiguous(), b.contiguous())


@pytest.mark.parametrize(
    ("rows", "writes", "slot", "count"),
    [(14, True, 0, 1), (4, True, 0, 1), (4, False, 0, 0), (4, True, 1, 0), (3, True, 0, 0), (1024, True, 0, 1)],
)
def test_vectors_whose_features_lie_apart_are_copied(rows: int, writes: bool, slot: int, count: int) -> None:
    """Many rows are copied by tiles, few rows without tiles; even fewer share the sectors they are read from and are
    not copied. Four rows are read in place if no gradients are written, or if they belong to the target.
    """
    shape = (rows, 1 << 18)
    vectors = [TensorSpec("bfloat16", shape, (1, rows)), TensorSpec("bfloat16", shape, (1 << 18, 1))]
    vectors = vectors[::-1] if slot else vectors
    loss = registry()["pearson_loss"]
    tensors = [torch.empty(x.shape, device="meta") for x in vectors]
    call = Call(*loss.engine.bind(loss, (*tensors, None, None, None), loss.default_settings))
    copies = loss.engine.copies(call, tuple(vectors), Machine(132, Chip()), writes)
    assert len(copies) == count and 1 - slot not in copies


#: Orders of dimensions with adjacent vectors: of rows in order, of rows in another order, and of few neighbours.
ROWS, OTHER_ROWS, FOURS = (1, 0), (1, 2, 0), (0, 2, 1)


def _in_order(shape: Sequence[int], order: Sequence[int], dtype: str) -> TensorSpec:
    placed = torch.empty([shape[d] for d in order], device="meta").permute([*numpy.argsort(order)])
    return TensorSpec(dtype, tuple(shape), placed.stride())


@pytest.mark.parametrize(
    ("loss", "dtype", "shape", "order", "second", "copied", "alone"),
    [
        ("cosine_loss", "float32", (1 << 16, 8), ROWS, ROWS, (), ()),
        ("cosine_loss", "float32", (1 << 16, 128), ROWS, ROWS, (), ()),
        ("cosine_loss", "float32", (1 << 16, 256), ROWS, ROWS, (0, 1), ()),
        ("cosine_loss", "float32", (1 << 16, 512), ROWS, ROWS, (0, 1), (0, 1)),
        ("cosine_loss", "bfloat16", (1 << 16, 128), ROWS, ROWS, (), ()),
        ("cosine_loss", "bfloat16", (1 << 16, 256), ROWS, ROWS, (0, 1), ()),
        ("triplet_margin_loss", "bfloat16", (1 << 16, 64), ROWS, ROWS, (), ()),
        ("triplet_margin_loss", "bfloat16", (1 << 16, 128), ROWS, ROWS, (0, 1), ()),
        ("cosine_loss", "float32", (256, 256, 8), (2, 0, 1), (2, 0, 1), (), ()),
        ("cosine_loss", "float32", (256, 256, 8), OTHER_ROWS, OTHER_ROWS, (), ()),
        ("cosine_loss", "float32", (256, 256, 8), (2, 0, 1), (2, 1, 0), (1,), (1,)),
        ("cosine_loss", "float32", (1 << 14, 4, 32), FOURS, FOURS, (), ()),
        ("cosine_loss", "bfloat16", (1 << 14, 4, 32), FOURS, FOURS, (0,), ()),
    ],
)
def test_neighbouring_vectors_are_read_where_lanes_fill_sectors(
    loss: str,
    dtype: str,
    shape: Sequence[int],
    order: Sequence[int],
    second: Sequence[int],
    copied: Sequence[int],
    alone: Sequence[int],
) -> None:
    """With strided features, the lanes of a warp read an element of each of their rows at once. They read in place if
    that is a sector, or half a sector with few operands; half of that is enough if no gradients are written.
    """
    definition = registry()[loss]
    count = len(definition.operands)
    vectors = [_in_order(shape, order, dtype), _in_order(shape, second, dtype)]
    vectors += [_in_order(shape, range(len(shape)), dtype)] * (count - 2)
    tensors = [torch.empty(shape, device="meta")] * count
    call = Call(*definition.engine.bind(definition, (*tensors, None, None, None), definition.default_settings))
    for writes, expected in ((1, copied), (0, alone)):
        found = definition.engine.copies(call, tuple(vectors), Machine(132, Chip()), writes)
        assert tuple(found) == tuple(expected)


@pytest.mark.parametrize(
    ("loss", "dtype", "features", "step", "copied"),
    [
        ("triplet_margin_loss", "float16", 32, 3, True),
        ("triplet_margin_loss", "float16", 64, 3, True),
        ("triplet_margin_loss", "float16", 128, 3, False),
        ("triplet_margin_loss", "float16", 16, 3, False),
        ("triplet_margin_loss", "float16", 32, 2, False),
        ("triplet_margin_loss", "float32", 16, 3, True),
        ("triplet_margin_loss", "float32", 32, 3, False),
        ("cosine_loss", "float16", 32, 3, False),
    ],
)
def test_short_rows_of_several_vectors_are_copied(
    loss: str, dtype: str, features: int, step: int, copied: bool
) -> None:
    """Lanes that process such a row each read one element of many sectors at a time."""
    definition, shape = registry()[loss], (1 << 16, features)
    count = len(definition.operands)
    lies = TensorSpec(dtype, shape, (step * features, step)), TensorSpec(dtype, shape, (features, 1))
    vectors = (lies[0], *[lies[1]] * (count - 1))
    tensors = [torch.empty(shape, dtype=getattr(torch, dtype), device="meta")] * count
    call = Call(*definition.engine.bind(definition, (*tensors, None, None, None), definition.default_settings))
    found = definition.engine.copies(call, vectors, Machine(132, Chip()), True)
    assert found == ({0: (features, 1)} if copied else {})


@pytest.mark.parametrize(
    ("dtype", "rows", "features", "count"),
    [("bfloat16", 8, 1 << 18, 2), ("bfloat16", 4, 1 << 18, 0), ("float32", 4, 1 << 18, 2), ("float32", 3, 1 << 18, 0)]
    + [("float32", 1 << 16, 128, 0), ("bfloat16", 1 << 16, 64, 0), ("bfloat16", 1 << 16, 128, 2)],
)
def test_second_derivatives_copy_vectors_and_tangents(dtype: str, rows: int, features: int, count: int) -> None:
    """Few adjacent long vectors use a small part of each sector; of many short ones, lanes process neighbours."""
    shape = (rows, features)
    lies = TensorSpec(dtype, shape, (1, rows))
    tensors = [torch.empty(shape, dtype=getattr(torch, dtype), device="meta")] * 3
    loss = registry()["pearson_loss"]
    call = Call(*loss.engine.bind(loss, (*tensors[:2], None, None, None), loss.default_settings))
    along = loss.engine.jvp(call, (True, False), (tensors[2],))
    contiguous = TensorSpec(dtype, shape, (features, 1))
    copies = loss.engine.copies(along, (lies, contiguous, lies), Machine(132, Chip()), True)
    assert copies == dict.fromkeys((0, 2)[:count], (features, 1))


@pytest.mark.parametrize(
    ("dtype", "rows", "features", "step", "copied"),
    [
        ("float16", 34, 708701, 3, True),
        ("float16", 34, 708701, 2, False),
        ("float16", 340, 70870, 3, False),
        ("float32", 34, 708701, 3, False),
    ],
)
def test_second_derivatives_copy_long_sparse_rows(
    dtype: str, rows: int, features: int, step: int, copied: bool
) -> None:
    """16-bit rows that are too long for a cluster are read twice, so they are copied."""
    shape = (rows, features)
    lies = TensorSpec(dtype, shape, (step * features, step)), TensorSpec(dtype, shape, (features, 1))
    tensors = [torch.empty(shape, dtype=getattr(torch, dtype), device="meta")] * 3
    loss = registry()["cosine_loss"]
    call = Call(*loss.engine.bind(loss, (*tensors[:2], None, None, None), loss.default_settings))
    along = loss.engine.jvp(call, (True, False), (tensors[2],))
    copies = loss.engine.copies(along, (lies[0], lies[1], lies[1]), Machine(132, Chip()), True)
    assert copies == ({0: (features, 1)} if copied else {})


@pytest.mark.kernels
def test_second_derivatives_of_copies(monkeypatch: pytest.MonkeyPatch, fresh_plans: Callable[[], None]) -> None:
    """Second derivatives of vectors that are copied have the bits of those of contiguous vectors."""
    monkeypatch.setattr(row_engine, "SHORT_ELEMENTS", 1)
    first, second, _ = drawn(COSINE, (5,), 40, torch.float32)
    v = torch.randn(5, 40, generator=torch.Generator().manual_seed(1)).to(KERNELS)
    found = []
    for apart in (False, True):
        x, y, along = [z.t().contiguous().t() if apart else z for z in (first.detach(), second.detach(), v)]
        leaves = [x.requires_grad_(), y.requires_grad_()]
        (gradient,) = torch.autograd.grad(F.pearson_loss(*leaves), leaves[:1], create_graph=True)
        found.append(torch.autograd.grad(gradient, leaves, along))
    for a, b in zip(*found, strict=True):
        assert same_bits(a.contiguous(), b.contiguous())


#: Shapes of both vectors, and of labels.
BROADCAST = [((4, 6, 8), (8,), (4, 6)), ((4, 6, 8), (4, 1, 8), (6,)), ((4, 6, 8), (6, 1), ()), ((3, 1), (1, 8), (1,))]


@pytest.mark.kernels
@pytest.mark.parametrize(("shapes", "reduction"), in_turn(BROADCAST, ["mean", "none"]), ids=str)
def test_broadcast(shapes: Sequence[Sequence[int]], reduction: str) -> None:
    """Gradients of broadcast operands are sums; labels of a floating dtype have gradients of 0."""
    generator = torch.Generator().manual_seed(3)
    first, second, label = (torch.randn(x, generator=generator, dtype=f64).to(KERNELS) for x in shapes)
    agree(COSINE, (first, second, label.sign()), reduction=reduction)


#: Distance function, torch's equivalent, and the engine that serves the loss.
DISTANCES = {
    "default": (None, None, "row_statistics"),
    "torch": (torch.nn.functional.pairwise_distance, None, "row_statistics"),
    "module": (torch.nn.PairwiseDistance(3.0, 1e-3), torch.nn.PairwiseDistance(3.0, 1e-3), "row_statistics"),
    "partial": (
        functools.partial(F.pairwise_distance, p=1.0),
        functools.partial(torch.nn.functional.pairwise_distance, p=1.0),
        "row_statistics",
    ),
    "cosine": (F.cosine_distance, lambda x, y: 1 - torch.cosine_similarity(x, y, -1), "row_statistics"),
    "own": ((own := lambda x, y: (x - y).square().sum(-1)), own, "pointwise"),
    "kept": (torch.nn.PairwiseDistance(keepdim=True), torch.nn.PairwiseDistance(keepdim=True), "pointwise"),
}


@pytest.mark.plain
@pytest.mark.kernels
@pytest.mark.parametrize(("name", "swap"), in_turn(list(DISTANCES), [False, True]))
def test_functions_of_distances(name: str, swap: bool) -> None:
    ours, theirs, engine = DISTANCES[name]
    vectors = [x.requires_grad_() for x in drawn(TRIPLET, (4,), 6)]
    options = {"swap": swap, "margin": 1.5, "reduction": "none"}
    call = F.triplet_margin_with_distance_loss.prepare(*vectors, distance_function=ours, **options)
    assert call.loss.engine.name == engine
    both = []
    for function, distance in (
        (F.triplet_margin_with_distance_loss, ours),
        (torch.nn.functional.triplet_margin_with_distance_loss, theirs),
    ):
        value = function(*vectors, distance_function=distance, **options)
        both.append([value, *torch.autograd.grad(value.sum(), vectors)])
    for a, b in zip(*both, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)
    if name in short_or_full(("own",), DISTANCES):  # Tests below cover the others.
        operands = [x.detach().requires_grad_() for x in vectors]
        loss = functools.partial(F.triplet_margin_with_distance_loss, distance_function=ours, **options)
        assert torch.autograd.gradgradcheck(loss, operands, check_undefined_grad=False)


@pytest.mark.kernels
def test_functions_of_distances_in_a_graph() -> None:
    vectors = drawn(TRIPLET, (4,), 6)
    for name in ("module", "cosine", "own"):
        torch.compiler.reset()
        loss = functools.partial(F.triplet_margin_with_distance_loss, distance_function=DISTANCES[name][0])
        compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
        assert same_bits(compiled(*vectors), loss(*vectors))


def test_wrong_functions_of_distances() -> None:
    loss, vectors = F.triplet_margin_with_distance_loss, [torch.ones(2, 3)] * 3
    with pytest.raises(TypeError, match=r"`distance_function` must be a function of two arrays.*got 2"):
        loss(*vectors, distance_function=2)
    with pytest.raises(TypeError, match="`distance_function` must return an array, got float"):
        loss(*vectors, distance_function=lambda x, y: 1.0)
    with pytest.raises(ValueError, match="`feature_dim` must be -1 with a `distance_function` of your own, got 0"):
        loss(*vectors, distance_function=lambda x, y: x, feature_dim=0)


@pytest.mark.plain
@pytest.mark.kernels
def test_distance_and_similarity() -> None:
    """Results are torch's where it is right, and exact where it overflows or has the gradient of another value."""
    x, y = drawn(F.cosine_loss, (3, 4), 5)
    same = torch.testing.assert_close
    for ours, theirs, options in (
        (F.cosine_similarity, torch.cosine_similarity, {}),
        (F.cosine_similarity, torch.cosine_similarity, {"dim": -1}),
        (F.pairwise_distance, torch.pairwise_distance, {"keepdim": True}),
        (F.pairwise_distance, torch.pairwise_distance, {"p": 1.0, "eps": 1e-3}),
    ):
        same(ours(x, y, **options), theirs(x, y, **options), rtol=1e-14, atol=1e-14)
    same(F.cosine_distance(x, y), 1 - torch.cosine_similarity(x, y, -1), rtol=1e-13, atol=1e-14)
    long = torch.tensor([3.0, 4.0], device=KERNELS)
    found = F.pairwise_distance(long, long * 0, 100.0, 0.0, out_dtype="float64")
    assert abs(float(found) - 4.000000000000013) < 1e-14
    ones = torch.ones(2, dtype=f64, device=KERNELS).requires_grad_()
    (slope,) = torch.autograd.grad(F.pairwise_distance(ones, torch.zeros_like(ones), inf, 0.0), ones)
    assert slope.tolist() == [0.5, 0.5]
    a = torch.tensor([5e-9, 0.0], dtype=f64, device=KERNELS).requires_grad_()
    b = torch.tensor([3.0, 4.0], dtype=f64, device=KERNELS).requires_grad_()
    value = F.cosine_similarity(a, b, 0)
    by_a, by_b = torch.autograd.grad(value, (a, b))
    same(value.detach().cpu(), torch.tensor(0.3, dtype=f64))
    same(by_a.cpu(), torch.tensor([6e7, 8e7], dtype=f64))
    same(by_b.cpu(), torch.tensor([0.064, -0.048], dtype=f64))
    half = torch.full((768,), 10.0, dtype=f16, device=KERNELS)
    assert F.cosine_similarity(half, half, 0).item() == 1 and F.cosine_similarity(half, half * 0, 0).item() == 0
    with pytest.raises(ValueError, match=r"^cosine_similarity: `dim` must be within"):
        F.cosine_similarity(half, half)


@pytest.mark.kernels
@pytest.mark.parametrize(
    ("p", "features", "broadcast"), in_turn([1.0, 2.0, 2.5, 6.0, 300.0, 7.5, inf], [5, 1100], [False, True])
)
def test_norms(p: float, features: int, broadcast: bool) -> None:
    """Norms of each degree, across lanes and warps, also of broadcast operands; rounding makes many numbers equal."""
    dtype = torch.float32 if p in (2.5, 6.0, 7.5) else f64
    anchor, positive, negative = (x.round() for x in drawn(TRIPLET, (3,), features, dtype))
    plain, both = (anchor, positive, negative), (anchor[:, :1], positive, negative[:1])
    each = ((anchor, positive, negative[:1]), (anchor[:, :1], positive, negative))
    for operands in short_or_full([both], [both, *each]) if broadcast else [plain]:
        agree(TRIPLET, operands, reduction="none", p=p, swap=True, eps=0.0, margin=20.0)


@pytest.mark.kernels
@pytest.mark.parametrize(
    "function", short_or_full([F.ccc_loss], [F.pearson_loss, F.ccc_loss]), ids=lambda x: x.__name__
)
def test_first_elements_of_broadcast_rows(function: Any) -> None:
    first, second = drawn(function, (4, 3), 9)
    agree(function, (1e3 + first, second[:1]), reduction="none")
    agree(function, (first[:, :1], second))


@pytest.mark.kernels
def test_ones_against_a_broadcast_one() -> None:
    ones = torch.ones(2, 3, dtype=f64, device=KERNELS)
    found = gradients(COSINE, (ones, ones[:, :1], torch.ones(2, device=KERNELS)), reduction="none")
    for x in found:
        assert float(x.abs().max()) < 1e-11


@pytest.mark.kernels
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_feature_dim(dim: int) -> None:
    first, second, label = drawn(COSINE, (4, 6), 8, torch.float32)
    plain = gradients(COSINE, (first, second, label))
    moved = [x.movedim(-1, dim) for x in (first, second)]
    found = gradients(COSINE, (*moved, label), feature_dim=dim)
    assert same_bits(found[0], plain[0])
    for a, b in zip(found[1:], plain[1:], strict=True):
        assert same_bits(a.movedim(dim, -1).contiguous(), b)


REDUCTIONS = ["none", "mean", "sum", "batchmean", "weighted_mean"]


@pytest.mark.plain
@pytest.mark.kernels
@pytest.mark.parametrize(
    ("reduction", "weight", "masked"), in_turn(REDUCTIONS, [None, 0.5, "rows", "one"], [False, True])
)
def test_weights_and_masks(reduction: str, weight: Any, masked: bool) -> None:
    first, second, label = drawn(COSINE, (4, 5), 6)
    options: dict[str, Any] = {"reduction": reduction}
    if isinstance(weight, str):
        shape = (4, 5) if weight == "rows" else (5,)
        weight = torch.linspace(0, 2, 20, dtype=f64)[: torch.Size(shape).numel()].reshape(shape).to(KERNELS)
    if weight is not None:
        options["weight"] = weight
    if masked:
        options["mask"] = (torch.arange(20).reshape(4, 5) % 3 > 0).to(KERNELS)
    agree(COSINE, (first, second, label), **options)


@pytest.mark.kernels
def test_rows_that_do_not_count_may_hold_anything() -> None:
    first, second, label = drawn(COSINE, (4,), 6)
    first[0], second[1, 2] = nan, inf
    weight = torch.tensor([1.0, 0.0, 1.0, 2.0], dtype=f64, device=KERNELS)
    mask = torch.tensor([False, True, True, True], device=KERNELS)
    options = {"mask": mask, "weight": weight}
    for found in (
        gradients(COSINE, (first, second, label), **options),
        exact(COSINE, (first, second, label), **options),
    ):
        value, *of_vectors, of_weight = found
        assert value.isfinite() and of_weight[0] == 0
        assert all(bool(x.isfinite().all()) and not x[:2].count_nonzero() for x in of_vectors)


@pytest.mark.kernels
@pytest.mark.parametrize("normalizer", [3.0, "array"])
def test_normalizer_and_out_dtype(normalizer: Any) -> None:
    operands = drawn(COSINE, (4,), 6, torch.float32)
    if normalizer == "array":
        normalizer = torch.tensor(3.0, dtype=f64, device=KERNELS)
    value = COSINE(*operands, normalizer=normalizer, out_dtype="float64")
    total = COSINE(*operands, reduction="sum", out_dtype="float64")
    assert value.dtype == f64
    torch.testing.assert_close(value, total / 3, rtol=1e-14, atol=0)


@pytest.mark.kernels
def test_a_wrong_speculation_is_noticed() -> None:
    """Several warps share a row, and each has a record of its own."""
    operands = drawn(COSINE, (3,), 2052, torch.float32)
    leaves = [x.requires_grad_(x.is_floating_point()) for x in operands]
    right = exact(COSINE, operands)
    for factor in (1.0, 3.0, 3.0, -2.0):
        upstream = torch.tensor(factor, device=KERNELS)
        found = torch.autograd.grad(COSINE(*leaves), leaves[:2], upstream)
        for a, b in zip(found, right[1:], strict=True):
            torch.testing.assert_close(a.cpu().double(), b * factor / 0.5, rtol=1e-5, atol=1e-9)


@pytest.mark.kernels
@pytest.mark.parametrize("features", [40, 2100])
def test_chips_change_no_bit(features: int, fresh_plans: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """The part of a row that does not fit on chip is read twice; without clusters, one block processes all parts of
    it. Neither changes a bit.
    """
    operands = drawn(TRIPLET, (3,), features, torch.float32)
    chosen, found = row_layout.layout, []
    monkeypatch.setattr(row_layout, "PART_BYTES", 8 << 10)
    monkeypatch.setattr(row_layout, "LONG_AHEAD", 2)
    whole, some = 64 << 10, 8 << 10
    for room, clusters, most in (
        (whole, True, 512), (0, True, 512), (some, True, 512), (whole, False, 512), (whole, False, 64)
    ):  # fmt: skip

        def layout(*arguments: Any, room: int = room, clusters: bool = clusters) -> row_layout.Layout:
            x = chosen(*arguments[:-2], room, clusters)
            assert x.held == (room == whole)
            assert (x.shared > 0) == (room > 0)
            assert x.parts == x.cluster * x.rounds * (x.threads // 64) if features > 40 else x.parts == 1
            return x

        monkeypatch.setattr(row_layout, "layout", layout)
        monkeypatch.setattr(row_layout, "MAX_BLOCK_THREADS", most)
        fresh_plans()
        found.append(gradients(TRIPLET, operands))
        if features == 40 and len(found) == 2:
            break
    for others in found[1:]:
        for a, b in zip(found[0], others, strict=True):
            assert same_bits(a, b)


@pytest.mark.kernels
@pytest.mark.parametrize(
    ("function", "features", "dtype", "layout"),
    [(COSINE, 3, f32, "transposed"), (F.ccc_loss, 8, bf16, "every second"), (TRIPLET, 5, f32, "masked")],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_short_rows_in_registers_change_no_bit(
    function: Any,
    features: int,
    dtype: torch.dtype,
    layout: str,
    fresh_plans: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Values, gradients and Hessian products have the bits of rows that go through shared memory."""
    first, *others = drawn(function, (5, 7), features, dtype)
    if layout == "masked":
        options = {"mask": (torch.rand(5, 7, generator=torch.Generator().manual_seed(3)) < 0.7).to(KERNELS)}
    else:
        first, options = strided(first, layout), {}
    found = []
    for least in (36, 35):
        monkeypatch.setattr(row_layout, "REGISTER_ROWS", least)
        fresh_plans()
        mean, unreduced = (gradients(function, (first, *others), reduction=x, **options) for x in ("mean", "none"))
        along = [] if layout == "masked" else products(function, (first, *others))
        found.append([*mean, *unreduced, *along])
    for a, b in zip(*found, strict=True):
        assert same_bits(a.contiguous(), b.contiguous())


@pytest.mark.kernels
@pytest.mark.parametrize(
    ("function", "features", "dtype", "in_registers"),
    [(COSINE, 33, bf16, False), (TRIPLET, 15, f32, False), (TRIPLET, 6, bf16, True), (F.pearson_loss, 15, f32, False)],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_staged_gradients_change_no_bit(
    function: Any,
    features: int,
    dtype: torch.dtype,
    in_registers: bool,
    fresh_plans: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Gradients that a warp stores for all its rows, the last of which do not exist, have the bits of those that lanes
    store.
    """
    operands = drawn(function, (37,), features, dtype)
    chosen, found, staged = row_layout.layout, [], []

    def layout(*arguments: Any) -> row_layout.Layout:
        x = chosen(*arguments[:-2], 64 << 10, arguments[-1])
        staged.append(x.stages(2))
        assert (x.in_registers > 0) == in_registers
        return x

    monkeypatch.setattr(row_layout, "layout", layout)
    monkeypatch.setattr(row_layout, "REGISTER_ROWS", 1 if in_registers else 1 << 15)
    monkeypatch.setattr(row_layout, "STORES", 3)
    for stages in (True, False):
        if not stages:
            monkeypatch.setattr(row_layout, "STORES", 1 << 10)
            monkeypatch.setattr(row_layout, "STORES_OF_ONE", 1 << 10)
        fresh_plans()
        mean, unreduced = (gradients(function, operands, reduction=x) for x in ("mean", "none"))
        found.append([*mean, *unreduced, *products(function, operands)])
        assert all(x is stages for x in staged)
        staged.clear()
    for a, b in zip(*found, strict=True):
        assert same_bits(a.contiguous(), b.contiguous())


def test_many_rows_of_few_features_stay_in_registers() -> None:
    """16-bit rows need fewer features for that, which are converted twice. Few rows share kernels of other lengths."""

    def kept(dtype: str, rows: int, features: int, loss: str = "cosine_loss") -> int:
        definition, shape = registry()[loss], (rows, features)
        tensors = [torch.empty(shape, device="meta")] * len(definition.operands)
        call = Call(*definition.engine.bind(definition, (*tensors, None, None, None), definition.default_settings))
        vectors = tuple([TensorSpec(dtype, shape, (features, 1))] * len(tensors))
        plan: Any = definition.engine.plan(call, vectors, dtype, Machine(132, Chip(232448, True, 1024)))
        assert plan.layout.in_registers in (0, features) and (plan.layout.shared == 0) == (plan.layout.in_registers > 0)
        return int(plan.layout.in_registers)

    many = 1 << 15
    assert [kept("float32", many, x) for x in (3, 16, 17)] == [3, 16, 0]
    assert [kept("bfloat16", many, x) for x in (12, 16)] == [12, 0]
    assert [kept("float64", many, x) for x in (8, 9)] == [8, 0]
    assert [kept("float32", many, x, "triplet_margin_loss") for x in (10, 11)] == [10, 0]
    assert kept("float32", many - 1, 3) == 0


@pytest.mark.parametrize(
    ("loss", "looks", "kept"),
    short_or_full([], [(TRIPLET, 128, "all"), (COSINE, 0, "all")])
    + [(TRIPLET, 0, "first"), (COSINE, 128, "all"), (COSINE, 0, "none")],
)
def test_blocks_that_have_a_part_of_a_row_each_change_no_bit(
    loss: Any, looks: int, kept: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows fit into no cluster: blocks wait for each other, or leave their part to the last block of the row."""
    # Neither a row of the two long operands of one loss, nor of the three of the other, fits into a cluster.
    operands = drawn(loss, *(((2,), 9000) if loss is TRIPLET else ((3,), 5000)), torch.float32)
    leaves = [x.requires_grad_(x.is_floating_point()) for x in operands]
    wanted = leaves[: 2 + (loss is TRIPLET)]
    monkeypatch.setattr(row_layout, "LONG_PART_BYTES", 1 << 10)
    if kept == "first":
        # A thread has two batches of one vector, and one batch fits into shared memory.
        monkeypatch.setattr(row_layout, "BATCH", 1)
    if kept == "none":
        monkeypatch.setattr(row_layout, "MANY_PARTS", 0)
    files = codegen.RowKernel.source

    def source(kernel: codegen.RowKernel) -> str:
        return files(kernel).replace("kLooks = 128;", f"kLooks = {looks};")

    monkeypatch.setattr(codegen.RowKernel, "source", source)
    found = []
    several = ((200, 0), *short_or_full([], [(200, 1)]), (200, 2), (1, 0))
    orders = several if kept != "none" else ((200, 0), (1, 0))
    for processors, seed in orders:
        with host.execution(processors, seed=seed, resident=4 if seed < 2 else 40):
            of_call = []
            for factor in (1.0, 1.0, 3.0):
                value = loss(*leaves)
                upstream = torch.full_like(value, factor)
                of_call.append([value, *torch.autograd.grad(value, wanted, upstream)])
            with torch.no_grad():
                assert same_bits(loss(*leaves), of_call[0][0])
            values = loss(*leaves, reduction="none")
            upstream = torch.full_like(values, 1.0 / 3)
            of_call.append([values, *torch.autograd.grad(values, wanted, upstream)])
            found.append(of_call)
    for others in found[1:]:
        for call, again in zip(found[0], others, strict=True):
            for a, b in zip(call, again, strict=True):
                assert same_bits(a, b)
    # `exact` returns gradients of half the value.
    for a, b in zip(found[0][0][1:], exact(loss, operands)[1:], strict=False):
        torch.testing.assert_close(a.cpu().double(), b / 0.5, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize(
    ("step", "itemsize", "pitch", "misalignment", "paired"),
    [(2, 2, 64, 0, 1), (2, 2, 64, 2, 0), (2, 2, 66, 0, 0), (3, 2, 96, 0, 0), (1, 2, 32, 0, 0), (2, 4, 64, 0, 0)],
)
def test_every_second_element_is_read_in_whole_vectors(
    step: int, itemsize: int, pitch: int, misalignment: int, paired: int
) -> None:
    """Holds for 16-bit elements, if pairs of them begin at a multiple of their size."""
    rows = row_layout.RowStream((pitch,), step, itemsize, misalignment)
    assert row_layout.layout((64,), 32, [rows], [rows], 1, False, 48 << 10, True).paired == paired


def test_many_rows_have_few_chunks() -> None:
    rows = row_layout.RowStream((16,), 1, 4)
    found = row_layout.layout((1 << 20,), 16, [rows], [rows], 1, False, 48 << 10, True)
    assert found.kind == "lanes" and found.chunks * found.rows_per_chunk >= 1 << 20 and found.chunks <= 1 << 13


# ----------------------------------------------------------------------------------------------------------------------
# Transforms, graphs, other libraries


@pytest.mark.kernels
@pytest.mark.parametrize(
    ("function", "reduction"), in_turn(short_or_full([TRIPLET], LOSSES), short_or_full(["none"], ["mean", "none"]))
)
def test_second_derivatives(function: Any, reduction: str) -> None:
    """Compares with finite differences; a test below compares every loss with the formula."""
    operands = [x.requires_grad_(x.is_floating_point()) for x in drawn(function, (3,), 4)]
    vectors = [x for x in operands if x.requires_grad]

    def call(*vectors: torch.Tensor) -> torch.Tensor:
        return function(*vectors, *operands[len(vectors) :], reduction=reduction)

    assert torch.autograd.gradgradcheck(call, tuple(vectors), check_undefined_grad=False)


def products(function: Callable[..., Any], operands: Sequence[torch.Tensor], **options: Any) -> list[torch.Tensor]:
    """Returns products of second derivatives with tangents of each floating operand and of an array of weights."""
    leaves = [x.detach().requires_grad_(x.is_floating_point()) for x in operands]
    inputs = [x for x in leaves if x.requires_grad]
    if "weight" in options:
        options["weight"] = options["weight"].detach().requires_grad_()
        inputs.append(options["weight"])
    value = function(*leaves, **options)
    upstream = torch.linspace(0.5, 2, value.numel(), dtype=value.dtype, device=value.device).reshape(value.shape)
    slopes = torch.autograd.grad(value, inputs, upstream, create_graph=True)
    # Tangents differ between operands, so that differences of operands have tangents, too.
    sizes = [max(2, x.numel()) for x in inputs]
    tangents = [
        torch.linspace(-1, 1 + i, n, dtype=f32)[: x.numel()].view(x.shape)
        for i, (n, x) in enumerate(zip(sizes, inputs, strict=True))
    ]
    return list(torch.autograd.grad(slopes, inputs, [v.to(x) for v, x in zip(tangents, inputs, strict=True)]))


@pytest.mark.kernels
@pytest.mark.parametrize(
    ("function", "case"),
    [
        *in_turn(LOSSES, ["plain", "weighted"]),
        (COSINE, "broadcast"),
        (F.ccc_loss, "cluster"),
        *short_or_full([], [(F.ccc_loss, "broadcast"), (COSINE, "cluster")]),
        (COSINE, "edges"),
        (TRIPLET, "edges"),
        (TRIPLET, "cubes"),
        (TRIPLET, "powers"),
        (TRIPLET, "absolute"),
        (TRIPLET, "largest"),
        (TRIPLET, "beside a power of two"),
        (TRIPLET, "beside the largest"),
        (TRIPLET, "large"),
    ],
    ids=lambda x: x if isinstance(x, str) else x.__name__,
)
def test_products_with_second_derivatives(function: Any, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels give the products of the formula in float64."""
    options: dict[str, Any] = {"reduction": "none"} if case in ("plain", "edges") else {}
    operands = drawn(function, (3,), 4100 if case == "cluster" else 9, f32)
    if case == "weighted":
        options = {"weight": torch.tensor([0.5, 0.0, 2.0]), "mask": torch.tensor([True, True, False])}
        operands = drawn(function, (3,), 9, f32)
    elif case == "broadcast":
        operands[1] = operands[1][:1]
    elif case == "edges":
        operands = drawn(function, (6,), 5, f32)
        operands[0][0], operands[1][1], operands[0][2, 1], operands[1][3, 2] = 0.0, operands[0][1], nan, inf
        options["eps"] = 0.0
    elif case in ("cubes", "powers"):
        options = {"p": 3.0 if case == "cubes" else 2.5, "eps": 0.0}
        operands[0][0, 1] = operands[1][0, 1]
        operands[0][1] = operands[2][1]
    elif case == "absolute":
        options = {"p": 1.0, "weight": torch.tensor([0.5, 1.0, 2.0])}
    elif case == "largest":
        options = {"p": inf, "weight": torch.tensor([0.5, 1.0, 2.0])}
        operands[0][1, 1], operands[1][1, 1] = 9.0, 3.0
    elif case.startswith("beside"):
        options = {"p": 300.0 if case == "beside the largest" else 60.5, "eps": 0.0, "swap": True, "margin": 1e3}
        # Numbers around 2^8, where lanes differ in the power of two for degree 60.
        operands = [200 * x for x in drawn(function, (3,), 70, f32)]
        operands[0][0, 1] = operands[1][0, 1]
        operands[0][1] = operands[2][1]
    elif case == "large":
        options = {"p": 3.0}
        operands = drawn(function, (3,), 9)
        operands[0][1, 1] = 1e200
    placed = {k: x.to(KERNELS) if isinstance(x, torch.Tensor) else x for k, x in options.items()}
    with monkeypatch.context() as patched:
        patched.setattr(formulas, "hvp", None)
        found = products(function, operands, **placed)
    # The formula has no derivative with respect to a weight of 0.
    wide = {k: x.double().clamp(min=1e-30) if _is_floating(x) else x for k, x in options.items()}
    before = plans.use_host(None)
    try:
        right = products(function, [x.cpu().double() if _is_floating(x) else x.cpu() for x in operands], **wide)
    finally:
        plans.use_host(before)
    for a, b in zip(found, right, strict=True):
        torch.testing.assert_close(a.cpu().double(), b, rtol=1e-6, atol=1e-7, equal_nan=True)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    ("function", "case"), [(x, case) for x in LOSSES for case in x.loss.cases], ids=lambda x: getattr(x, "__name__", x)
)
def test_second_derivatives_that_vanish_do_so_in_the_formula(
    function: Any, case: Mapping[str, Any], weighted: bool
) -> None:
    loss = function.loss
    operands = [x.cpu().requires_grad_(x.is_floating_point()) for x in drawn(function, (6,), 5)]
    options, names = dict(case), [x.name for x in loss.operands]
    if weighted and "weight" in loss.common:
        options["weight"] = torch.rand(6, dtype=f64).requires_grad_()
        operands, names = [*operands, options["weight"]], [*names, "weight"]
    value = function(*operands[: len(loss.operands)], **options)
    named = [(name, x) for name, x in zip(names, operands, strict=True) if x.requires_grad]
    inputs = [x for _, x in named]
    static = [int(bool(loss.values(case)[x.name])) for x in loss.flags]
    norm = loss.norm_of([float(loss.values(case)[x.name]) for x in loss.parameters])
    curved = curved_pairs(loss, tuple(static), norm, "weight" in options)
    for (name, _), slope in zip(named, torch.autograd.grad(value.sum(), inputs, create_graph=True), strict=True):
        seconds = torch.autograd.grad(slope.sum(), inputs, retain_graph=True, allow_unused=True)
        for other, second in zip([x for x, _ in named], seconds, strict=True):
            assert (name, other) in curved or second is None or not second.any(), (name, other)


def test_absolute_differences_have_no_curvature() -> None:
    loss = TRIPLET.loss
    assert curved_pairs(loss, (1,), "1", False) == frozenset() != curved_pairs(loss, (1,), "2", False)
    by_weight = {pair for x in ("anchor", "positive", "negative") for pair in (("weight", x), (x, "weight"))}
    assert curved_pairs(loss, (1,), "inf", True) == by_weight


@pytest.mark.kernels
@pytest.mark.parametrize("reduction", ["mean", "none", "weighted_mean"])
def test_transforms(reduction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, label = drawn(COSINE, (3,), 5)
    tangent, batch = drawn(COSINE, (3,), 5, seed=1)[0], drawn(COSINE, (4, 3), 5, seed=2)[0]
    weight = torch.tensor([0.5, 1.0, 2.0], dtype=f64, device=KERNELS)

    def call(x: torch.Tensor, w: torch.Tensor = weight) -> torch.Tensor:
        return COSINE(x, second, label, weight=w, reduction=reduction).sum()

    slope, by_weight = torch.func.grad(call, (0, 1))(first, weight)
    right = exact(COSINE, (first, second, label), weight=weight, reduction=reduction)
    if reduction != "none":
        torch.testing.assert_close(slope.cpu(), right[1] / 0.5)
        torch.testing.assert_close(by_weight.cpu(), right[3] / 0.5)
    along = torch.func.jvp(call, (first,), (tangent,))[1]
    torch.testing.assert_close(along, (slope * tangent).sum())
    monkeypatch.setattr(formulas, "evaluate", None)
    found = torch.func.vmap(torch.func.grad(call))(batch)
    torch.testing.assert_close(found, torch.stack([torch.func.grad(call)(x) for x in batch]))


@pytest.mark.kernels
@pytest.mark.parametrize("options", [{}, {"reduction": "none"}, {"reduction": "weighted_mean"}], ids=str)
def test_a_compiled_graph(options: Mapping[str, Any]) -> None:
    torch.compiler.reset()
    first, second, label = drawn(COSINE, (3,), 5)
    weight = torch.tensor([0.5, 1.0, 2.0], dtype=f64, device=KERNELS).requires_grad_()
    x = first.requires_grad_()
    compiled = torch.compile(COSINE, fullgraph=True, backend="aot_eager")
    value, eager = (f(x, second, label, weight=weight, **options) for f in (compiled, COSINE))
    assert same_bits(value.detach(), eager.detach())
    for a, b in zip(*(torch.autograd.grad(v.sum(), (x, weight)) for v in (value, eager)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-14, atol=1e-15)


@pytest.mark.skipif(not HOST, reason="no C++ compiler on Linux")
@pytest.mark.parametrize("reduction", ["mean", "weighted_mean"])
def test_cupy(reduction: str) -> None:
    tensors = [x.cpu() for x in drawn(COSINE, (3,), 5)]
    weight = torch.tensor([0.5, 1.0, 2.0], dtype=f64)
    right = exact(COSINE, tensors, weight=weight, reduction=reduction)
    with stand_in.cupy() as cupy:
        arrays = [cupy.asarray(x.numpy()) for x in tensors]
        options = {"weight": cupy.asarray(weight.numpy()), "reduction": reduction}
        value, found = cupylosses.value_and_grad(COSINE, *arrays, argnums=("input1", "input2", "weight"), **options)
        numpy.testing.assert_allclose(numpy.asarray(value), right[0].numpy(), rtol=1e-13)
        for a, b in zip(found, right[1:], strict=True):
            numpy.testing.assert_allclose(numpy.asarray(a), b.numpy() / 0.5, rtol=1e-12, atol=1e-15)


def test_numpy() -> None:
    first, second, label = (x.cpu() for x in drawn(COSINE, (3,), 5))
    value, slope = cupylosses.value_and_grad(COSINE, first.numpy(), second.numpy(), label.numpy())
    right = exact(COSINE, (first, second, label))
    numpy.testing.assert_allclose(value, right[0].numpy(), rtol=1e-14)
    numpy.testing.assert_allclose(slope, right[1].numpy() / 0.5, rtol=1e-12)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_of_nothing(reduction: str) -> None:
    """Covers no rows, and rows without features. A mean of nothing is NaN."""
    label = torch.ones(0)
    found = gradients(COSINE, (torch.ones(0, 3), torch.ones(0, 3), label.long()), reduction=reduction)
    assert found[0].shape == ((0,) if reduction == "none" else ())
    assert reduction == "none" or bool(found[0].isnan()) == (reduction == "mean")
    found = gradients(COSINE, (torch.ones(2, 0), torch.ones(2, 0), torch.ones(2).long()), reduction=reduction)
    assert found[0].flatten()[0] == {"sum": 2.0}.get(reduction, 1.0) and found[1].shape == (2, 0)


# ----------------------------------------------------------------------------------------------------------------------
# Arguments


@pytest.mark.parametrize(
    ("operands", "options", "message"),
    [
        ((torch.ones(()), torch.ones(()), torch.ones(())), {}, "`input1` needs a dimension of features"),
        ((torch.ones(2, 3), torch.ones(2, 4), torch.ones(2)), {}, "shapes do not broadcast"),
        ((torch.ones(2, 3), torch.ones(2, 3), torch.ones(2, 1)), {}, "`target` must have the shape"),
        ((torch.ones(2, 3), torch.ones(2, 3), torch.ones(2)), {"feature_dim": 2}, "`feature_dim` must be within"),
        (
            (torch.ones(2, 3), torch.ones(2, 3), torch.ones(2)),
            {"weight": torch.ones(3)},
            "`weight` must have the shape",
        ),
        ((torch.ones(2, 3), torch.ones(2, 3), torch.ones(2)), {"eps": -1.0}, "`eps` must be"),
        ((torch.ones(2, 3), torch.ones(2, 3), torch.ones(2)), {"margin": nan}, "`margin` must be"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_wrong_values(operands: Any, options: Mapping[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^cosine_embedding_loss: .*{message}.*got"):
        COSINE(*operands, **options)


@pytest.mark.parametrize(
    ("operands", "options", "message"),
    [
        ((torch.ones(2, 3).long(), torch.ones(2, 3), torch.ones(2)), {}, "`input1` must have one of the dtypes"),
        ((torch.ones(2, 3), torch.ones(2, 3), torch.ones(2)), {"mask": torch.ones(2)}, "`mask` must be bool"),
        ((torch.ones(2, 3), torch.ones(2, 3), torch.ones(2)), {"feature_dim": 0.5}, "`feature_dim` must be an integer"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_wrong_types(operands: Any, options: Mapping[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=f"^cosine_embedding_loss: {message}.*got"):
        COSINE(*operands, **options)


def test_the_twin_of_torch() -> None:
    """The Module gives torch's values where these are right."""
    first, second, label = (x.cpu() for x in drawn(COSINE, (4,), 6))
    for options in ({}, {"margin": 0.25}, {"reduction": "sum"}):
        ours, theirs = (
            module(**options)(first, second, label) for module in (nn.CosineEmbeddingLoss, torch.nn.CosineEmbeddingLoss)
        )
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    ("expression", "pair"),
    [
        ("a * b", ("a ", " b")),
        ("square(a - b)", ("a - b", "a - b")),
        ("(a - b) * square(c)", ("(a - b) ", " square(c)")),
        ("a * b + c", None),
        ("square(a) / b", None),
        ("square(a) - square(b)", None),
        ("-a * b", None),
    ],
)
def test_products_are_told_from_other_expressions(expression: str, pair: tuple[str, str] | None) -> None:
    assert factors(expression) == pair

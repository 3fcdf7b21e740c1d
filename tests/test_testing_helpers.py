"""Tests of the helpers that other tests rely on: the metric, the truth, samples and layouts."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from grids import LOSSES, REPRESENTATIVES, in_turn
from torch import Tensor

import cupylosses.functional as F
from cupylosses import checks
from cupylosses.call import Call
from cupylosses.definition.registry import registry
from cupylosses.engines.base import Machine, TensorSpec
from cupylosses.engines.pointwise.definition import Loss
from cupylosses.engines.pointwise.reduction import Static
from cupylosses.jit.gpu import Chip
from cupylosses.testing import layouts, memory, samples, tolerance
from cupylosses.testing import truth as truth_module
from cupylosses.testing.check import EDGES, Check, perform, run
from cupylosses.testing.layouts import LAYOUTS, SHAPE
from cupylosses.testing.pieces import part, pieces
from cupylosses.testing.pointwise import eager
from cupylosses.testing.pointwise.truth import truth
from cupylosses.testing.tolerance import TABLE, Expected, compare, errors, same_bits, ulp

pytestmark = [pytest.mark.programs, pytest.mark.filterwarnings("ignore:.*broadcast:UserWarning")]

inf, nan = math.inf, math.nan
DTYPES = [getattr(torch, name) for name in checks.FLOATING]
dtype = pytest.mark.parametrize("dtype", DTYPES, ids=checks.FLOATING)
layout = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)

#: Each loss with one dtype in turn; with ``--thorough``, with every one.
dtypes_in_turn = pytest.mark.parametrize(("loss", "dtype"), in_turn(LOSSES, DTYPES))


def double(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def expected(*values: float, total: float | None = None) -> Expected:
    """Returns results of one term each, whose size is their absolute value or ``total``."""
    exact = double(*values)
    size = exact.abs().nan_to_num(0.0, posinf=0.0) if total is None else torch.full_like(exact, total)
    return Expected(exact, size, size)


def test_importing_needs_no_array_library(python: Callable[..., str]) -> None:
    modules = "check, eager, layouts, memory, pieces, samples, tolerance, truth"
    program = f"from cupylosses.testing import {modules}\nimport sys\nprint('torch' in sys.modules)"
    assert python(program, without=("torch", "cupy")) == "False"


# ----------------------------------------------------------------------------------------------------------------------
# The metric


@dtype
def test_ulp_is_the_distance_to_the_next_number(dtype: torch.dtype) -> None:
    info = torch.finfo(dtype)
    x = torch.tensor([0.0, info.tiny, info.tiny * 1.5, 0.7, 1.0, 1.0 + info.eps, 3.0, info.max / 2.5], dtype=dtype)
    after = torch.nextafter(x, torch.full_like(x, inf))
    assert torch.equal(ulp(x.double(), dtype), after.double() - x.double())
    assert torch.equal(ulp(-x.double(), dtype), ulp(x.double(), dtype))


@dtype
def test_ulp_between_and_beyond_the_numbers_of_the_dtype(dtype: torch.dtype) -> None:
    info = torch.finfo(dtype)
    assert ulp(double(1.0 - info.eps / 2), dtype).item() == info.eps / 2
    assert ulp(double(info.tiny / 3), dtype).item() == info.tiny * info.eps
    assert ulp(double(info.max), dtype).item() == ulp(double(info.max / 1.5), dtype).item()


@dtype
@pytest.mark.parametrize("steps", [0, 1, 2, 7])
def test_errors_count_steps(dtype: torch.dtype, steps: int) -> None:
    exact = torch.tensor([0.3, -1.0, 5.0, -700.0], dtype=dtype)
    x = exact
    for _ in range(steps):
        x = torch.nextafter(x, torch.full_like(x, inf))
    found = errors(x, exact.double()) / ulp(exact.double(), dtype)
    # Below a power of two the numbers are twice as dense.
    assert torch.equal(found, double(steps, steps / 2, steps, steps))
    assert compare(x, Expected(exact.double(), *[exact.double().abs()] * 2)).ulps == steps


@pytest.mark.parametrize(
    ("result", "exact", "error"),
    [
        (nan, nan, 0.0),
        (inf, inf, 0.0),
        (-inf, -inf, 0.0),
        (0.0, -0.0, 0.0),
        (-0.0, 0.0, 0.0),
        (nan, 1.0, inf),
        (1.0, nan, inf),
        (nan, inf, inf),
        (inf, nan, inf),
        (-inf, inf, inf),
        (torch.finfo(torch.float32).max, inf, inf),
        (0.0, 1.0, 1.0),
    ],
)
@dtype
def test_special_numbers(result: float, exact: float, error: float, dtype: torch.dtype) -> None:
    result = min(result, torch.finfo(dtype).max) if math.isfinite(result) else result
    assert errors(torch.tensor([result], dtype=dtype), double(exact)).item() == error
    assert compare(torch.tensor([result], dtype=dtype), expected(exact)).ok == (error == 0)


def test_infinity_stands_for_what_the_dtype_cannot_hold() -> None:
    half = partial(torch.tensor, dtype=torch.float16)
    assert compare(half([inf, -inf]), expected(7e4, -1e30)).ok
    # 65520 is halfway between the largest number and the one after it; both are correct.
    assert compare(half([inf, 65504.0]), expected(65520.0, 65520.0)).ok
    for wrong, exact in ((65504.0, 7e4), (inf, 65000.0), (-inf, 7e4), (inf, 1.0)):
        assert not compare(half([wrong]), expected(exact)).ok
    assert not compare(torch.tensor([inf], dtype=torch.float64), expected(1.7e308)).ok


def test_flushed_numbers_count_as_zero() -> None:
    below, above = torch.finfo(torch.float32).tiny / 2, torch.finfo(torch.float32).tiny * 16
    for name in ("float32", "bfloat16"):
        zero = torch.zeros(1, dtype=getattr(torch, name))
        assert compare(zero, expected(below)).ok
        assert not compare(zero, expected(above)).ok
    assert not compare(torch.zeros(1, dtype=torch.float64), expected(torch.finfo(torch.float64).tiny / 2)).ok
    # float16 numbers become subnormal much earlier, and are not flushed.
    assert not compare(torch.zeros(1, dtype=torch.float16), expected(1e-6)).ok


# ----------------------------------------------------------------------------------------------------------------------
# The rule


@pytest.mark.parametrize("name", TABLE)
def test_the_table_is_the_limit(name: str) -> None:
    kind = getattr(torch, name)
    arithmetic = torch.finfo(getattr(torch, tolerance.arithmetic(name))).eps
    # The result is many times smaller than its terms, so the allowed error is far from a multiple of a unit.
    exact, size = 1.0, 3000.0
    limit = torch.finfo(kind).eps / 2 + arithmetic * sum(TABLE[name]) * size
    for factor, ok in ((0.9, True), (1.2, False)):
        result = torch.tensor([exact], dtype=kind)
        found = compare(result, expected(exact + factor * limit, total=size))
        # The test moves the truth instead of the result, whose dtype has too few digits; half a unit hides the rest.
        assert found.ok == ok, (name, factor)


def test_a_sum_is_held_to_the_root_mean_square_of_its_errors() -> None:
    terms = 1_000_000
    exact = double(float(terms))
    truth_of_sum = Expected(exact, double(math.sqrt(terms)), exact)
    off = terms * (1 + 3 * torch.finfo(torch.float32).eps)
    assert compare(torch.tensor([off], dtype=torch.float32), truth_of_sum).ok is False
    alone = Expected(exact, exact, exact)
    assert compare(torch.tensor([off], dtype=torch.float32), alone).ok


@dtype
def test_closer_than_eager_is_accepted_and_farther_is_not(dtype: torch.dtype) -> None:
    eps = torch.finfo(dtype).eps
    ours = torch.tensor([1 + 100 * eps] * 3, dtype=torch.float64).to(dtype)
    theirs = torch.tensor([1 + 101 * eps, 1 - 101 * eps, 1 + 100 * eps], dtype=torch.float64).to(dtype)
    assert not compare(ours, expected(1.0, 1.0, 1.0)).ok
    found = compare(ours, expected(1.0, 1.0, 1.0), theirs)
    assert found.ok and found.ulps == 100
    # Below 1, twice as many numbers of the dtype fit the distance, but the unit is that of the truth.
    assert found.other_ulps == 101
    closer = torch.tensor([1 + 99 * eps], dtype=torch.float64).to(dtype)
    assert compare(ours, expected(1.0, 1.0, 1.0), torch.cat([theirs[:2], closer])).rejected == 1


@pytest.mark.parametrize(("wrong", "exact"), [(nan, 1.0), (0.0, nan), (inf, 1.0), (-inf, inf), (0.0, inf)])
def test_a_misplaced_nan_or_infinity_is_not_excused_by_torch(wrong: float, exact: float) -> None:
    result = torch.tensor([wrong])
    if wrong == inf:  # An overflow counts as a number that is too large.
        assert compare(result, expected(exact), torch.tensor([1.5])).rejected == 1
    else:
        assert compare(result, expected(exact), result).rejected == 1


def test_ill_conditioned_results_are_not_held_to_their_own_units() -> None:
    tiny_difference = expected(1e-6, total=1.0)
    assert compare(torch.tensor([1e-6 + 2e-7]), tiny_difference).ok
    assert not compare(torch.tensor([1e-6 + 2e-7]), expected(1e-6)).ok
    assert not compare(torch.tensor([1e-6 + 2e-6]), tiny_difference).ok


def test_the_report_names_the_first_wrong_element(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tolerance, "pieces", partial(pieces, limit=10))
    exact = torch.arange(1.0, 36.0, dtype=torch.float64).view(5, 7)
    result = exact.float()
    result[3, 2] += 1
    result[4, 6] = nan
    found = compare(result, Expected(exact, exact, exact))
    assert (found.elements, found.rejected, found.ulps) == (35, 2, inf)
    assert "(3, 2): got 25.0, expected 24.0" in str(found) and "2 of 35" in str(found)
    assert compare(exact.float(), Expected(exact, exact, exact)).elements == 35


def test_a_factor_scales_truth_and_tolerance() -> None:
    exact = expected(3.0, -2.0)
    assert compare(torch.tensor([-6.0, 4.0]), exact, factor=-2.0).ok
    assert not compare(torch.tensor([3.0, -2.0]), exact, factor=-2.0).ok


def test_other_shapes_are_no_results() -> None:
    with pytest.raises(ValueError, match=r"shape \(1,\), the truth \(2,\)"):
        compare(torch.ones(1), expected(1.0, 1.0))


def test_same_bits() -> None:
    x = torch.tensor([nan, 0.0, 1.0])
    assert same_bits(x, x.clone()) and same_bits(x.half(), x.half()) and same_bits(torch.ones(()), torch.ones(()))
    assert same_bits(torch.ones(3, 4).T, torch.ones(4, 3))
    for other in (torch.tensor([nan, -0.0, 1.0]), torch.tensor([nan, 0.0, 1.0 + 2**-23]), x.double(), x[:2]):
        assert not same_bits(x, other)


# ----------------------------------------------------------------------------------------------------------------------
# Pieces


@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (3, 50), (50, 3), (2, 3, 4, 5)])
def test_pieces_cover_everything_once(shape: tuple[int, ...]) -> None:
    covered = torch.zeros(shape)
    for index in pieces(shape, limit=8):
        covered[index] += 1
    assert bool((covered == 1).all())


def test_part_of_a_broadcast_operand() -> None:
    index = (slice(2, 5), slice(None))
    assert part(torch.arange(7.0).view(7, 1), index).tolist() == [[2.0], [3.0], [4.0]]
    assert part(torch.arange(3.0), index).tolist() == [0.0, 1.0, 2.0]
    assert part(torch.ones(1, 3), index).shape == (1, 3)
    assert part(torch.tensor(4.0), index).item() == 4.0


# ----------------------------------------------------------------------------------------------------------------------
# The truth


def by_autograd(
    loss: Loss, operands: list[Tensor], values: dict[str, Any], reduction: str, grad_output: Any
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Returns value and gradients in float64, by the formula and torch alone: no pieces, sizes or expanded operands."""
    leaves = [x.double().requires_grad_() for x in operands]
    value = eager.formula(loss, values, reduction)(*leaves)
    upstream = torch.as_tensor(grad_output, dtype=torch.float64).expand(value.shape)
    return value.detach(), torch.autograd.grad(value, leaves, upstream)


@pytest.mark.parametrize(
    ("layout", "loss", "limit"),
    in_turn(
        ["contiguous", "row", "column", "outer", "scalar", "zero_d", "eight_d"],
        REPRESENTATIVES,
        [1 << 24, 100],
        times=2,
    ),
)
def test_truth_is_the_derivative_of_the_formula(loss: Loss, layout: str, limit: int) -> None:
    for reduction in loss.reductions:
        check = Check(loss, dtypes=("float32",), reduction=reduction, layout=layout, shape=(14, 9))
        operands = check.operands()
        upstream = check.upstream(operands)[-1]
        found = truth(loss, operands, check.values, reduction, upstream, limit=limit)
        value, gradients = by_autograd(loss, operands, check.values, reduction, upstream)
        torch.testing.assert_close(found.value.exact, value, rtol=1e-12, atol=1e-12)
        for exact, gradient in zip(found.gradients, gradients, strict=True):
            assert exact is not None
            torch.testing.assert_close(exact.exact, gradient, rtol=1e-12, atol=1e-12)


def test_truth_knows_what_it_is_not_asked_for() -> None:
    loss = registry(Loss)["mse_loss"]
    operands = [torch.ones(3), torch.ones(3, dtype=torch.int64)]
    assert truth(loss, operands, {}, "mean").gradients[1] is None
    assert truth(loss, [torch.ones(3)] * 2, {}, "mean", wanted=(False, True)).gradients[0] is None


def test_sizes_are_at_least_the_terms_and_add_up() -> None:
    loss = registry(Loss)["mse_loss"]
    operands = samples.operands(loss, {}, ("float32",) * 2, [(40, 30)] * 2)
    elements = truth(loss, operands, {}, "none").value
    assert bool((elements.total >= elements.exact.abs()).all()) and torch.equal(elements.rms, elements.total)
    mean = truth(loss, operands, {}, "mean").value
    torch.testing.assert_close(mean.total, elements.total.mean())
    torch.testing.assert_close(mean.rms, (elements.total**2).sum().sqrt() / 1200)
    assert mean.rms < mean.total / 20


def test_sizes_see_cancellation() -> None:
    loss = registry(Loss)["kl_div"]
    target = double(0.3)
    operands = [target.log() * (1 + 1e-9), target]
    found = truth(loss, operands, loss.values(), "none").value
    assert found.exact.abs().item() < 1e-9 and found.total.item() > 0.3


def test_flush_makes_subnormal_operands_zero() -> None:
    loss = registry(Loss)["l1_loss"]
    operands = [torch.tensor([1e-40, 1e-30]), torch.zeros(2)]
    kept, flushed = (truth(loss, operands, {}, "none", flush=f) for f in (False, True))
    assert kept.value.exact[0] > 0 and kept.gradients[0].exact.tolist() == [1.0, 1.0]  # type: ignore[union-attr]
    assert flushed.value.exact[0] == 0 and flushed.gradients[0].exact.tolist() == [0.0, 1.0]  # type: ignore[union-attr]
    assert flushed.value.exact[1] == kept.value.exact[1] > 0
    half = truth(loss, [torch.tensor([1e-7], dtype=torch.float16), torch.zeros(1)], {}, "none", flush=True)
    assert half.value.exact.item() > 0


def test_nothing_is_flushed_on_the_cpu() -> None:
    assert not truth_module.flushes([torch.ones(1), torch.ones(1)])


@pytest.mark.gpu
def test_float32_is_flushed_on_a_gpu() -> None:
    assert truth_module.flushes([torch.ones(1, device="cuda"), torch.ones(1, dtype=torch.int64, device="cuda")])
    assert not truth_module.flushes([torch.ones(1, device="cuda"), torch.ones(1, dtype=torch.float64, device="cuda")])


# ----------------------------------------------------------------------------------------------------------------------
# Samples


@dtypes_in_turn
def test_samples_are_of_the_domain_and_repeatable(loss: Loss, dtype: torch.dtype) -> None:
    name = tolerance.dtype_name(dtype)
    for case in loss.cases:
        values = loss.values(case)
        draw = partial(samples.operands, loss, values, (name,) * len(loss.operands), [(50, 40)] * len(loss.operands))
        first, again, other = draw(seed=3), draw(seed=3), draw(seed=4)
        for operand, x, y, z in zip(loss.operands, first, again, other, strict=True):
            assert x.dtype == dtype and same_bits(x, y) and not same_bits(x, z)
            wide, domain = x.double(), operand.domain_for(values)
            if domain in ("sign", "binary"):
                assert set(wide.unique().tolist()) == {-1.0 if domain == "sign" else 0.0, 1.0}
            elif domain == "real":
                assert 1.5 < wide.std() < 2.5 and abs(wide.mean()) < 0.3
            elif domain in ("positive", "nonnegative"):
                assert wide.min() >= 0 and wide.max() > 4 and bool((wide == 0).any()) == (domain == "nonnegative")
            else:
                probability = wide.exp() if domain == "log_probability" else wide
                assert probability.min() > 0 and probability.max() < 1
                torch.testing.assert_close(probability.sum(-1), torch.ones(50).double(), rtol=0.02, atol=0)


def test_samples_without_a_row_are_no_constants() -> None:
    loss = registry(Loss)["kl_div"]
    for shape in ((), (9, 1)):
        for x in samples.operands(loss, loss.values(), ("float32",) * 2, [shape] * 2):
            assert x.shape == shape and bool((x != 1).all()) and bool((x != 0).all())


def test_integer_samples(loss: Loss) -> None:
    for name in checks.INTEGER:
        kind = getattr(torch, name)
        dtypes = [name if x.integer else "float32" for x in loss.operands]
        found = samples.operands(loss, loss.values(), dtypes, [(20, 10)] * len(dtypes))
        for operand, x in zip(loss.operands, found, strict=True):
            assert x.dtype == (kind if operand.integer else torch.float32)
            assert len(x.unique()) > 1 or (operand.domain == "sign" and not kind.is_signed)


@dtypes_in_turn
def test_edges_hold_what_goes_wrong(loss: Loss, dtype: torch.dtype) -> None:
    for case in loss.cases:
        values = loss.values(case)
        found = samples.edges(loss, values, (tolerance.dtype_name(dtype),) * len(loss.operands))
        assert len({x.shape for x in found}) == 1
        points = set(zip(*(x.tolist() for x in found), strict=True))
        for operand, x in zip(loss.operands, found, strict=True):
            assert x.dtype == dtype and bool(x.isnan().any())
            domain = operand.domain_for(values)
            assert domain in ("sign", "positive") or bool((x == 0).any())
            assert bool(x.isinf().any()) == (domain not in ("sign", "binary", "probability"))
        for kink in loss.kinks(**values):
            at = tuple(torch.tensor(x, dtype=dtype).item() for x in kink.operands)
            assert at in points
            for position, x in enumerate(at):
                around = samples.neighbours(x, dtype)
                assert all((*at[:position], y, *at[position + 1 :]) in points for y in around)
                assert sorted(set(around)) == list(around) and len(around) in ((1,) if math.isinf(x) else (3, 4, 5))
                assert len(around) == 5 or x == 0 or math.isinf(x) or dtype.itemsize == 2


# ----------------------------------------------------------------------------------------------------------------------
# Layouts


def placed(layout: layouts.Layout, shape: tuple[int, ...] = SHAPE, name: str = "float32") -> list[Tensor]:
    loss = registry(Loss)["mse_loss"]
    return layout.place(samples.operands(loss, {}, (name,) * 2, layout.shapes(shape, 2)))


@layout
@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_layouts_reach_the_path_that_they_name(layout: layouts.Layout, name: str) -> None:
    operands = placed(layout, name=name)
    if not all(x.numel() for x in operands):
        return
    tensors = tuple(TensorSpec(name, tuple(x.shape), x.stride(), x.data_ptr() % 16) for x in operands)
    loss = registry(Loss)["mse_loss"]
    plan = loss.engine.plan(Call(loss, (), Static("mean")), tensors, name, Machine(100, Chip()))
    found = plan.elements_launch.layout
    assert (found.kind, found.vec_size > 1) == (layout.kind, layout.vector), layout.reaches


@layout
def test_layouts_keep_the_values(layout: layouts.Layout) -> None:
    loss = registry(Loss)["mse_loss"]
    drawn = samples.operands(loss, {}, ("float32",) * 2, layout.shapes(SHAPE, 2))
    for x, y in zip(drawn, layout.place(drawn), strict=True):
        assert torch.equal(x.expand(y.shape), y)


def test_layouts_differ_in_memory() -> None:
    seen = [tuple((tuple(x.shape), x.stride(), x.storage_offset()) for x in placed(z)) for z in LAYOUTS.values()]
    assert len(set(seen)) == len(LAYOUTS)


@pytest.mark.parametrize("name", ["sliced", "strided", "misaligned", "eight_d"])
def test_nothing_but_nan_lies_around_the_elements(name: str) -> None:
    for x in placed(LAYOUTS[name]):
        whole = torch.empty(0).set_(x.untyped_storage())
        assert whole.numel() > x.numel() and int(whole.isnan().sum()) == whole.numel() - x.numel()


@layout
def test_layouts_mean_something_for_large_matrices(layout: layouts.Layout) -> None:
    """Layouts keep the requested shape, so that timings of a layout are timings of that size."""
    shape = (600, 256)
    elements = math.prod(torch.broadcast_shapes(*layout.shapes(shape, 2)))
    assert layout.name in ("zero_d", "empty") or 0.9 * 600 * 256 <= elements <= 1.1 * 600 * 256


# ----------------------------------------------------------------------------------------------------------------------
# Torch's counterparts, poisoned memory, and complete checks


def test_a_twin_must_have_the_options() -> None:
    kl = registry(Loss)["kl_div"]
    assert eager.twin(kl, {"log_target": True}, "sum") is not None
    assert eager.twin(kl, {"log_input": True}, "sum") is not None  # The default, which torch need not support.
    assert eager.twin(kl, {"log_input": False}, "sum") is None
    assert eager.twin(replace(kl, torch=None), {}, "sum") is None


def test_formula_agrees_with_the_twin(loss: Loss) -> None:
    for case in loss.cases:
        for reduction in loss.reductions:
            twin = eager.twin(loss, case, reduction)
            if twin is None:
                continue
            count = len(loss.operands)
            operands = samples.operands(loss, loss.values(case), ("float64",) * count, [(8, 5)] * count)
            torch.testing.assert_close(eager.formula(loss, loss.values(case), reduction)(*operands), twin(*operands))


@pytest.mark.parametrize(
    ("operands", "result"),
    [
        ([torch.ones(2).half(), torch.ones(2).bfloat16()], torch.float32),
        ([torch.ones(2).half(), torch.ones(()).double()], torch.float16),
        ([torch.ones(2).int(), torch.ones(()).double()], torch.float32),
        ([torch.ones(()).half(), torch.ones(()).double()], torch.float64),
    ],
)
def test_promotion_is_torchs(operands: list[Tensor], result: torch.dtype) -> None:
    assert eager.promoted(operands) == (operands[0] + operands[1]).dtype
    if all(x.is_floating_point() for x in operands):
        assert eager.promoted(operands) == result


def test_poison_needs_no_gpu() -> None:
    memory.poison([16, 0], "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("size", [4, 40000, 40_000_000])
def test_poison_is_what_the_next_allocation_holds(size: int) -> None:
    memory.poison([size, size], "cuda")
    for _ in range(2):
        assert bool(torch.empty(size // 4, device="cuda").isnan().all())


def spoiled(change: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    """Returns `mse_loss` with its result changed."""
    return lambda *operands, **options: change(F.__dict__["_right_mse_loss"](*operands, **options))


WRONG = {
    "factor": lambda x: x * (1 + 2e-5),
    "sign": lambda x: -x,
    "offset": lambda x: x + 1e-4,
    "half arithmetic": lambda x: x.half().float(),
    "swallowed nan": lambda x: x.nan_to_num(0.0),
    "one element too few": lambda x: x if x.dim() == 0 else x * (torch.arange(x.numel()).view(x.shape) < x.numel() - 1),
    "shape": lambda x: x.reshape(1, *x.shape),
    "dtype": lambda x: x.double(),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_results_are_rejected(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loss = registry(Loss)["mse_loss"]
    every = [Check(loss, reduction="none"), Check(loss), Check(loss, reduction="none", layout=EDGES)]
    assert all(perform(check).ok for check in every)
    monkeypatch.setitem(F.__dict__, "_right_mse_loss", F.mse_loss)
    monkeypatch.setattr(F, "mse_loss", spoiled(WRONG[name]))
    # An upstream gradient per element does not fit a value of another shape: torch raises before any comparison.
    outcomes = [perform(check) for check in every if name != "shape" or check.reduction != "none"]
    assert not all(x.ok for x in outcomes)
    assert all(problem for x in outcomes for problem in x.problems)


def test_a_wrong_gradient_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    right = F.mse_loss
    monkeypatch.setattr(
        F, "mse_loss", lambda input, target, **options: right(input, 2 * target.detach() - target, **options)
    )
    outcome = perform(Check(registry(Loss)["mse_loss"]))
    assert not outcome.ok and outcome.value is not None and outcome.value.ok
    assert all(problem.startswith("gradient of target") for problem in outcome.problems)


def test_gradients_of_a_check() -> None:
    loss = registry(Loss)["mse_loss"]
    assert Check(loss).gradients_of == (True, True)
    assert Check(loss, wanted=(False, False)).gradients_of == (False, False)
    assert Check(loss, dtypes=("float32", "int64")).gradients_of == (True, False)
    assert Check(loss, dtypes=("float32", "int64")).possible
    assert not Check(registry(Loss)["kl_div"], dtypes=("float32", "int64")).possible
    assert not Check(loss, layout="row", shape=(9,)).possible


@pytest.mark.representatives
def test_ids_tell_checks_apart(loss: Loss) -> None:
    found = [
        Check(loss, case=case, dtypes=(dtype,), reduction=reduction, layout=layout, wanted=wanted)
        for case in loss.cases
        for dtype in checks.FLOATING
        for reduction in loss.reductions
        for layout in (*LAYOUTS, EDGES)
        for wanted in product((True, False), repeat=len(loss.operands))
    ]
    assert len({x.id for x in found}) == len(found)


def test_run_without_gradients_builds_no_graph() -> None:
    found = run(F.mse_loss, [torch.ones(3), torch.zeros(3)], (False, False), 1.0)
    assert found.gradients == (None, None) and not found.value.requires_grad

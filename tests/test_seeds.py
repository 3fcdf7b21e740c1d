"""Typical bugs of hand-written CUDA losses: one test per bug, named after it, on the CPU and on a GPU.

Expected values are worked out by hand, or by the naive expression in float64.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from devices import allocated
from grids import in_turn
from torch import Tensor

import cupylosses.functional as F
from cupylosses.call import Call
from cupylosses.engines.base import Machine, TensorSpec
from cupylosses.jit.gpu import Chip

pytestmark = [pytest.mark.plain, pytest.mark.filterwarnings("ignore:.*broadcast")]

#: More elements than a fixed grid of 1024 blocks of 256 threads covers in one step, and not a round number.
MANY = 1024 * 256 * 3 + 77

PAIRWISE = [F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.hinge_loss]
BY_NAME = pytest.mark.parametrize("function", PAIRWISE, ids=lambda f: f.loss.name)


def pair(device: str, *shape: int, dtype: torch.dtype = torch.float32, requires_grad: bool = True) -> list[Tensor]:
    """Returns two tensors of numbers with few digits, whose sums are exact in float64."""
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randint(-64, 64, shape, generator=generator) / 16 for _ in range(2)]
    return [x.to(device, dtype).requires_grad_(requires_grad) for x in drawn]


def distributions(device: str, *shape: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Returns two softmax outputs."""
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(shape, generator=generator).softmax(-1) for _ in range(2)]
    return [x.to(device, dtype).requires_grad_() for x in drawn]


# ----------------------------------------------------------------------------------------------------------------------
# 1 and 2: torch.mean((predictions - targets) ** 2)


@BY_NAME
def test_final_reduction_that_drops_partial_sums(function, device: str) -> None:
    """The bug: a last block of 256 threads adds 256 of 1024 partial sums, and drops the others."""
    value = function(torch.ones(MANY, device=device) * -3, torch.ones(MANY, device=device), reduction="sum")
    one = function(torch.tensor([-3.0]), torch.tensor([1.0]), reduction="sum")
    assert one.item() > 0
    assert value.item() == pytest.approx(one.item() * MANY, rel=1e-7)


@BY_NAME
def test_stride_loop_that_starts_at_the_thread_index_alone(function, device: str) -> None:
    """The bug: every block sums the same elements. Only different numbers, far apart, expose it."""
    x = torch.zeros(MANY, device=device)
    where = torch.arange(0, MANY, 9973, device=device)
    x[where] = torch.arange(1.0, len(where) + 1, device=device)
    total = function(x, torch.zeros_like(x), reduction="sum").double()
    alone = function(x[where], torch.zeros_like(x[where]), reduction="sum").double()
    others = function(torch.zeros(1), torch.zeros(1), reduction="sum").item() * (MANY - len(where))
    assert total.item() == pytest.approx(alone.item() + others, rel=1e-6)


@BY_NAME
def test_gradients_of_both_operands(function, device: str) -> None:
    a, b = pair(device, 33)
    function(a, b).backward()
    assert a.grad is not None and b.grad is not None
    assert a.grad.any() and b.grad.any()


def test_gradients_of_the_squared_error_are_opposite(device: str) -> None:
    a, b = pair(device, 1000)
    F.mse_loss(a, b).backward()
    assert torch.equal(a.grad, -b.grad)
    torch.testing.assert_close(a.grad, 2 * (a - b).detach() / 1000)


@BY_NAME
def test_result_has_no_dimensions(function, device: str) -> None:
    """The shape is (), not (1,)."""
    for shape in [(7,), (1,), (), (2, 3)]:
        a, b = pair(device, *shape)
        assert function(a, b).shape == ()
        assert function(a, b, reduction="none").shape == shape


@BY_NAME
def test_value_that_has_no_gradient_silently(function, device: str) -> None:
    a, b = pair(device, 33)
    assert function(a, b).requires_grad
    assert not function(a.detach(), b.detach()).requires_grad


@BY_NAME
def test_float_atomics_that_change_from_run_to_run(function, device: str) -> None:
    a, b = (torch.rand(MANY, device=device) for _ in range(2))
    # Blocks race only on a GPU: on the host, the seed determines the order of the threads.
    values = {function(a, b).item().hex() for _ in range(2 if device == "cpu" else 20)}
    assert len(values) == 1


@pytest.mark.gpu
@BY_NAME
def test_upstream_gradient_read_on_the_host(function) -> None:
    """The bug: `.item()` in backward waits for the device."""
    a, b = pair("cuda", 33)
    function(a, b).backward()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        (function(a, b) * 3).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@BY_NAME
def test_default_stream_instead_of_the_current_one(function) -> None:
    a, b = (x.detach() for x in pair("cuda", MANY))
    expected = function(a, b)
    late = torch.zeros_like(a)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        late.copy_(a)
        value = function(late, b)
    stream.synchronize()
    assert torch.equal(value, expected)


def test_gradient_divided_in_float32(device: str) -> None:
    """The count is inexact in float32, so the scale must be a float64 quotient, rounded once, before the product."""
    count = (1 << 24) + 3
    a = torch.full((1,), -3.0, device=device).expand(count).requires_grad_()
    b = torch.ones(1, device=device).expand(count)
    (gradient,) = torch.autograd.grad(F.mse_loss(a, b), a)
    assert gradient[0].item() == pytest.approx(-8.0 / count, rel=2**-23, abs=0)
    assert bool((gradient == gradient[0]).all())


def test_difference_stored_for_backward(device: str) -> None:
    """Only the operands are saved for backward, and no tensor that has the size of their difference."""
    a, b = pair(device, 1 << 16)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        F.mse_loss(a, b)
    if device == "cuda":
        assert {x.data_ptr() for x in saved} <= {a.data_ptr(), b.data_ptr()}
    else:
        assert saved


# ----------------------------------------------------------------------------------------------------------------------
# 3: smooth_l1_loss(predictions, targets)


@pytest.mark.parametrize("beta", [0.0, 0.25, 1.0, 3.0, float("inf")])
def test_beta_that_is_fixed_at_one(beta: float, device: str) -> None:
    a, b = pair(device, 1000)
    theirs = torch.nn.functional.smooth_l1_loss(a.double(), b.double(), beta=beta)
    assert F.smooth_l1_loss(a, b, beta=beta).item() == pytest.approx(theirs.item(), rel=1e-6)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_reductions_of_smooth_l1(reduction: str, device: str) -> None:
    a, b = pair(device, 1000)
    torch.testing.assert_close(
        F.smooth_l1_loss(a, b, reduction=reduction),
        torch.nn.functional.smooth_l1_loss(a, b, reduction=reduction),
    )


VIEWS = {
    "transposed": lambda x: x.T,
    "rows": lambda x: x[::2],
    "columns": lambda x: x[:, 1::3],
    "block": lambda x: x[5:35, 7:50],
}


@pytest.mark.parametrize(
    ("function", "view"), in_turn(PAIRWISE, list(VIEWS)), ids=lambda x: x if isinstance(x, str) else x.loss.name
)
def test_contiguity_assumed_and_never_checked(function, view: str, device: str) -> None:
    a, b = pair(device, 40, 60)
    view = VIEWS[view]
    expected = function(view(a).contiguous(), view(b).contiguous(), reduction="none")
    assert torch.equal(function(view(a), view(b), reduction="none"), expected)
    mixed = function(view(a), view(b).contiguous())
    mixed.backward()
    expected.mean().backward(retain_graph=True)
    torch.testing.assert_close(mixed, expected.mean())


@pytest.mark.parametrize("beta", [0.25, 1.0])
def test_gradient_at_exactly_the_switch_point(beta: float, device: str) -> None:
    a = torch.tensor([beta, -beta, 0.0], device=device, requires_grad=True)
    b = torch.zeros(3, device=device)
    value = F.smooth_l1_loss(a, b, reduction="none", beta=beta)
    value.sum().backward()
    assert value.tolist() == [beta / 2, beta / 2, 0.0]
    assert a.grad.tolist() == [1.0, -1.0, 0.0]


# ----------------------------------------------------------------------------------------------------------------------
# 4: kl_div(torch.log(predictions), targets, reduction="batchmean")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_swapped_divergence(dtype: torch.dtype, device: str) -> None:
    """KL(target | prediction) of (3/4, 1/4) from (1/2, 1/2) is 3/4 log 3 - log 2; the other way log 2 - log(3) / 2."""
    prediction = torch.tensor([[0.5, 0.5]], dtype=dtype, device=device)
    target = torch.tensor([[0.75, 0.25]], dtype=dtype, device=device)
    expected = 0.75 * torch.tensor(3.0).double().log() - torch.tensor(2.0).double().log()
    for value in (
        F.kl_div(prediction.log(), target, reduction="batchmean"),
        F.kl_div(prediction, target, reduction="batchmean", log_input=False),
        F.kl_div(prediction.log(), target.log(), reduction="batchmean", log_target=True),
    ):
        assert value.item() == pytest.approx(expected.item(), rel=1e-6)


def test_batchmean_that_divides_by_all_leading_dimensions(device: str) -> None:
    prediction, target = distributions(device, 4, 5, 6)
    total = F.kl_div(prediction.log(), target, reduction="sum")
    assert F.kl_div(prediction.log(), target, reduction="batchmean").item() == pytest.approx(total.item() / 4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_gradients_of_both_distributions(dtype: torch.dtype, device: str) -> None:
    """With the logarithm fused: -t/q for the prediction, log(t/q) + 1 for the target."""
    prediction, target = distributions(device, 8, 33, dtype=dtype)
    F.kl_div(prediction, target, reduction="sum", log_input=False).backward()
    q, t = prediction.detach().double(), target.detach().double()
    tolerance = {"rtol": 2e-3, "atol": 1e-4} if dtype == torch.float16 else {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(prediction.grad.double(), -t / q, **tolerance)
    torch.testing.assert_close(target.grad.double(), (t / q).log() + 1, **tolerance)


def test_logarithms_and_sums_in_half(device: str) -> None:
    """A sum of float16 terms is accurate to one unit in the last place of its result's dtype."""
    prediction, target = distributions(device, 64, 1000, dtype=torch.float16)
    q, t = prediction.detach().double(), target.detach().double()
    exact = (torch.special.xlogy(t, t) - torch.xlogy(t, q)).sum().item() / 64
    value = F.kl_div(prediction, target, reduction="batchmean", log_input=False)
    assert value.dtype == torch.float16
    assert abs(value.item() - exact) <= 2**-11 * 2 ** (int(torch.tensor(exact).log2().floor()) + 1)


def test_zero_times_the_logarithm_of_zero(device: str) -> None:
    for prediction, target, options in [
        (torch.tensor([[0.0, 1.0]]), torch.tensor([[0.0, 1.0]]), {"log_input": False}),
        (torch.tensor([[-torch.inf, 0.0]]), torch.tensor([[0.0, 1.0]]), {}),
        (torch.tensor([[-torch.inf, 0.0]]), torch.tensor([[-torch.inf, 0.0]]), {"log_target": True}),
    ]:
        leaves = [prediction.to(device).requires_grad_(), target.to(device).requires_grad_()]
        value = F.kl_div(*leaves, reduction="sum", **options)
        value.backward()
        assert value.item() == 0
        assert [x.grad[0, 0].item() for x in leaves] == [0.0, 0.0]


@pytest.mark.gpu
def test_temporary_of_full_size() -> None:
    """The value with both gradients allocates no tensor of the operands' size except the gradients."""
    prediction, target = (torch.rand(2048, 4096, device="cuda").softmax(-1).requires_grad_() for _ in range(2))
    F.kl_div(prediction, target, reduction="batchmean", log_input=False).backward()
    prediction.grad = target.grad = None
    before = allocated()
    torch.cuda.reset_peak_memory_stats()
    F.kl_div(prediction, target, reduction="batchmean", log_input=False).backward()
    gradients = 2 * prediction.numel() * 4
    assert torch.cuda.max_memory_allocated() - before <= gradients + (1 << 20)


# ----------------------------------------------------------------------------------------------------------------------
# 5: torch.mean(torch.clamp(1 - predictions * targets, min=0)), targets of shape (N,) or (D,)


def test_broadcasting_by_row_where_it_is_by_column(device: str) -> None:
    """With N = D only the values reveal the bug: a target of shape (D,) belongs to the columns."""
    a, _ = pair(device, 16, 16)
    target = torch.tensor([1.0, -1.0] * 5 + [1.0] * 6, device=device)
    expected = torch.clamp(1 - a * target, min=0)
    assert torch.equal(F.hinge_loss(a, target, reduction="none"), expected)
    by_row = F.hinge_loss(a, target[:, None], reduction="none")
    assert torch.equal(by_row, torch.clamp(1 - a * target[:, None], min=0))
    assert not torch.equal(by_row, expected)


def test_target_per_row_without_an_index_is_an_error(device: str) -> None:
    a, _ = pair(device, 16, 8)
    with pytest.raises(ValueError, match=r"use `target\[:, None\]`"):
        F.hinge_loss(a, torch.ones(16, device=device))


def test_backward_that_is_missing(device: str) -> None:
    a, b = pair(device, 16, 8)
    F.hinge_loss(a, b).backward()
    active = (1 - a * b >= 0).detach()
    torch.testing.assert_close(a.grad, torch.where(active, -b.detach(), 0.0) / a.numel())
    torch.testing.assert_close(b.grad, torch.where(active, -a.detach(), 0.0) / a.numel())


def test_gradient_at_the_corner_of_the_hinge(device: str) -> None:
    """At a product of exactly 1, torch's clamp passes the gradient on; so does the loss."""
    ours, naive = (torch.tensor([1.0, -1.0, 2.0], device=device, requires_grad=True) for _ in range(2))
    target = torch.tensor([1.0, -1.0, 1.0], device=device)
    F.hinge_loss(ours, target, reduction="sum").backward()
    torch.clamp(1 - naive * target, min=0).sum().backward()
    assert ours.grad.tolist() == naive.grad.tolist() == [-1.0, 1.0, 0.0]


@pytest.mark.gpu
def test_partial_sums_added_on_the_host() -> None:
    a, b = (x.detach() for x in pair("cuda", 512, 512))
    F.hinge_loss(a, b[0])
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        F.hinge_loss(a, b[0])
    finally:
        torch.cuda.set_sync_debug_mode("default")


# ----------------------------------------------------------------------------------------------------------------------
# All losses: sizes


@BY_NAME
def test_any_number_of_dimensions_and_any_batch(function, device: str) -> None:
    for rank, batch in itertools.product(range(1, 9), (1, 3, 17)):
        a, b = pair(device, batch, *[2] * (rank - 1), requires_grad=False)
        expected = function(a.flatten(), b.flatten(), reduction="none")
        assert torch.equal(function(a, b, reduction="none"), expected.view(a.shape))
        torch.testing.assert_close(function(a, b), expected.double().mean().float())


@BY_NAME
def test_element_count_in_32_bits_on_the_host(function) -> None:
    """An expanded tensor of more than 2^31 elements takes no memory: sizes and counts must still be right."""
    from cupylosses.engines.pointwise.reduction import Static

    shape = (1 << 17, 1 << 16)
    one = TensorSpec("float32", shape, (0, 0), 0)
    call = Call(function.loss, (), Static("mean"))
    plan = function.loss.engine.plan(call, (one, one), "float32", Machine(132, Chip()))
    assert plan.elements == 1 << 33 and plan.resolved.divisor == float(1 << 33)
    assert plan.elements_launch.layout.elements == 1 << 33

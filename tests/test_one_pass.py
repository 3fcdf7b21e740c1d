"""One pass: the forward kernel writes the gradient speculatively, for the upstream gradient that it expects.

The gradient must always have the same bits as one that backward computes without speculation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch
from devices import KERNELS
from grids import in_turn, short_or_full
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import cupylosses
from cupylosses import options
from cupylosses.checks import FLOATING
from cupylosses.engines.pointwise.definition import Loss
from cupylosses.testing import samples
from cupylosses.testing.check import by_position
from cupylosses.testing.layouts import LAYOUTS
from cupylosses.testing.pointwise.truth import truth
from cupylosses.testing.tolerance import compare, same_bits
from cupylosses.testing.truth import flushes

pytestmark = [pytest.mark.representatives, pytest.mark.in_turn, pytest.mark.filterwarnings("ignore:.*broadcast")]

#: Upstream gradients of users, in turn: the usual 1, another factor, a negative one, and a loss scale.
GRAD_OUTPUTS = (1.0, 0.5, -3.0, 1.0, 1.0, 1024.0, 1024.0, 1.0)


def leaves(loss: Loss, dtype: str = "float32", layout: str = "contiguous", seed: int = 0) -> list[Tensor]:
    """Operands that go through kernels, all of which require grad."""
    shapes = LAYOUTS[layout].shapes_of(loss, (67, 129))
    drawn = samples.operands(loss, loss.values(), (dtype,) * len(shapes), shapes, KERNELS, seed)
    return [x.detach().requires_grad_() for x in LAYOUTS[layout].place(drawn)]


def gradients(value: Tensor, operands: list[Tensor], grad_output: float = 1.0, **options: Any) -> tuple[Tensor, ...]:
    """The gradients for an upstream gradient that is a number."""
    return torch.autograd.grad(value, operands, torch.full_like(value, grad_output), **options)


def two_passes(loss: Loss, operands: list[Tensor], grad_output: float = 1.0) -> tuple[Tensor, ...]:
    """The gradients if forward writes none."""
    with cupylosses.set_one_pass(False):
        return gradients(by_position(loss)(*operands), operands, grad_output)


def assert_same(found: Any, expected: Any) -> None:
    for a, b in zip(found, expected, strict=True):
        assert same_bits(a, b)


@pytest.fixture
def function(loss: Loss) -> Callable[..., Tensor]:
    return by_position(loss)


# ----------------------------------------------------------------------------------------------------------------------
# The switch, which needs no GPU


@pytest.fixture
def switch() -> Iterator[None]:
    yield
    cupylosses.set_one_pass(True)


def test_switch_as_a_call(switch: None) -> None:
    assert options.one_pass_enabled()
    cupylosses.set_one_pass(False)
    assert not options.one_pass_enabled()
    cupylosses.set_one_pass(True)
    assert options.one_pass_enabled()


def test_switch_as_a_block(switch: None) -> None:
    with cupylosses.set_one_pass(False):
        assert not options.one_pass_enabled()
        with cupylosses.set_one_pass(True):
            assert options.one_pass_enabled()
        assert not options.one_pass_enabled()
    assert options.one_pass_enabled()


def test_switch_comes_back_after_an_error(switch: None) -> None:
    with pytest.raises(ZeroDivisionError), cupylosses.set_one_pass(False):
        raise ZeroDivisionError
    assert options.one_pass_enabled()


# ----------------------------------------------------------------------------------------------------------------------
# Any upstream gradient


@pytest.mark.kernels
@pytest.mark.parametrize("dtype", FLOATING)
def test_gradient_has_the_same_bits_whichever_kernel_wrote_it(
    loss: Loss, function: Callable[..., Tensor], dtype: str
) -> None:
    """Each upstream gradient is unexpected the first time and expected the second time."""
    operands = leaves(loss, dtype)
    # Computed beforehand: forward expects the upstream gradient of the last backward, even of one in two passes.
    expected = {grad_output: two_passes(loss, operands, grad_output) for grad_output in GRAD_OUTPUTS}
    for grad_output in GRAD_OUTPUTS:
        for _ in range(2):
            assert_same(gradients(function(*operands), operands, grad_output), expected[grad_output])


@pytest.mark.kernels
@pytest.mark.parametrize("layout", ["sliced", "mixed", "row", "column", "scalar", "outer", "expanded", "eight_d"])
def test_layouts(loss: Loss, function: Callable[..., Tensor], layout: str) -> None:
    operands = leaves(loss, layout=layout)
    for grad_output in (1.0, 1.0, -3.0, -3.0):
        assert_same(gradients(function(*operands), operands, grad_output), two_passes(loss, operands, grad_output))


@pytest.mark.kernels
def test_not_a_number_and_infinity_are_forgotten(loss: Loss, function: Callable[..., Tensor]) -> None:
    """An overflow of the loss scale must not poison the calls after it."""
    operands = leaves(loss)
    expected = two_passes(loss, operands)
    for bad in (float("nan"), float("inf"), -float("inf")):
        found = gradients(function(*operands), operands, bad)
        assert_same(found, two_passes(loss, operands, bad))
        if bad != bad:
            assert all(bool(g[x != 0].isnan().all()) for g, x in zip(found, expected, strict=True))
        assert_same(gradients(function(*operands), operands), expected)


@pytest.mark.kernels
def test_zero_of_both_signs(loss: Loss, function: Callable[..., Tensor]) -> None:
    operands = leaves(loss)
    for grad_output in (0.0, 0.0, -0.0, 0.0):
        assert_same(gradients(function(*operands), operands, grad_output), two_passes(loss, operands, grad_output))


@pytest.mark.kernels
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_lazily_negated_upstream_gradient(loss: Loss, function: Callable[..., Tensor], reduction: str) -> None:
    """The values of a view with the negative bit differ from its memory."""
    operands = leaves(loss)
    value = function(*operands, reduction=reduction)
    found = torch.autograd.grad(value, operands, torch._neg_view(torch.ones_like(value)), retain_graph=True)
    assert_same(found, torch.autograd.grad(value, operands, -torch.ones_like(value)))


@pytest.mark.kernels
def test_weighted_sum_of_losses(loss: Loss, function: Callable[..., Tensor]) -> None:
    """Two calls of one shape share an expected upstream gradient, and each makes it wrong for the other."""
    first, second = leaves(loss), leaves(loss, seed=1)
    for _ in range(3):
        total = 0.25 * function(*first) + 3.0 * function(*second)
        found = torch.autograd.grad(total, [*first, *second])
        assert_same(found[: len(first)], two_passes(loss, first, 0.25))
        assert_same(found[len(first) :], two_passes(loss, second, 3.0))


@pytest.mark.kernels
def test_losses_of_one_operand_add_up(loss: Loss, function: Callable[..., Tensor]) -> None:
    """The gradients of two losses of the same tensors are added by torch."""
    operands = leaves(loss)
    expected = [2 * g for g in two_passes(loss, operands)]
    assert_same(torch.autograd.grad(function(*operands) + function(*operands), operands), expected)


@pytest.mark.kernels
def test_loss_scale_that_changes(loss: Loss, function: Callable[..., Tensor]) -> None:
    """The scale changes as a gradient scaler changes it: doubled now and then, halved after an overflow."""
    operands = leaves(loss, "float16")
    for scale in (2.0**k for k in (8, 8, 8, 9, 9, 8, 4, 4, 16, 3)):
        value = function(*operands)
        found = torch.autograd.grad(value.float() * scale, operands)
        with cupylosses.set_one_pass(False):
            expected = torch.autograd.grad(function(*operands).float() * scale, operands)
        assert_same(found, expected)


# ----------------------------------------------------------------------------------------------------------------------
# Any graph


@pytest.mark.kernels
def test_second_backward_of_one_graph(loss: Loss, function: Callable[..., Tensor]) -> None:
    """The buffers are handed out once: changes to the first gradient do not reach the second."""
    operands = leaves(loss)
    expected = two_passes(loss, operands)
    value = function(*operands)
    first = gradients(value, operands, retain_graph=True)
    assert_same(first, expected)
    for g in first:
        g.fill_(float("nan"))
    second = gradients(value, operands, retain_graph=True)
    assert_same(second, expected)
    assert_same(gradients(value, operands, 5.0), two_passes(loss, operands, 5.0))
    assert all(a.data_ptr() != b.data_ptr() for a, b in zip(first, second, strict=True))


@pytest.mark.kernels
def test_backward_twice_without_retaining_is_torchs_error(loss: Loss, function: Callable[..., Tensor]) -> None:
    operands = leaves(loss)
    value = function(*operands)
    value.backward()
    with pytest.raises(RuntimeError, match="second time"):
        value.backward()


@pytest.mark.kernels
def test_two_graphs_alive(loss: Loss, function: Callable[..., Tensor]) -> None:
    first, second = leaves(loss), leaves(loss, seed=1)
    a, b = function(*first), function(*second)
    assert_same(gradients(b, second, -2.0), two_passes(loss, second, -2.0))
    assert_same(gradients(a, first), two_passes(loss, first))


@pytest.mark.kernels
def test_one_gradient_of_two(loss: Loss, function: Callable[..., Tensor]) -> None:
    """All operands require grad, but only one gradient is requested."""
    operands = leaves(loss)
    expected = two_passes(loss, operands)
    for i, x in enumerate(operands):
        assert_same(torch.autograd.grad(function(*operands), [x]), [expected[i]])


@pytest.mark.kernels
def test_graph_that_is_dropped_leaves_its_check_to_the_next(loss: Loss, function: Callable[..., Tensor]) -> None:
    operands = leaves(loss)
    checks = []
    for _ in range(3):
        ((check, _),) = function(*operands).grad_fn.speculations
        checks.append(check)
    assert checks[0] is checks[1] is checks[2]
    ((one, _),) = (first := function(*operands)).grad_fn.speculations
    ((another, _),) = function(*operands).grad_fn.speculations
    assert one is checks[0] and another is not one, "two graphs have two checks"
    assert_same(gradients(first, operands), two_passes(loss, operands))


@pytest.mark.kernels
def test_accumulation(loss: Loss, function: Callable[..., Tensor]) -> None:
    """torch uses the first gradient as ``.grad`` and adds the second to it in place."""
    operands = leaves(loss)
    expected = two_passes(loss, operands)
    for times in (1, 2, 3):
        function(*operands).backward()
        for x, g in zip(operands, expected, strict=True):
            total = g
            for _ in range(times - 1):
                total = total + g
            assert same_bits(x.grad, total)


@pytest.mark.kernels
def test_hooks_see_the_gradient(loss: Loss, function: Callable[..., Tensor]) -> None:
    operands = leaves(loss)
    seen: list[Tensor] = []
    operands[0].register_hook(lambda g: seen.append(g.clone()) or 2 * g)
    function(*operands).backward()
    expected = two_passes(loss, [x.detach().requires_grad_() for x in operands])
    assert same_bits(seen[0], expected[0])
    assert same_bits(operands[0].grad, 2 * expected[0])


@pytest.mark.kernels
@pytest.mark.parametrize("one_pass", [True, False])
@pytest.mark.parametrize("position", [0, 1])
def test_edit_in_place_is_torchs_error(
    loss: Loss, function: Callable[..., Tensor], position: int, one_pass: bool
) -> None:
    """The error must not depend on whether the gradient is already written."""
    x = torch.rand(33, device=KERNELS, requires_grad=True)
    other = torch.rand(33, device=KERNELS)
    operands = [x * 1.0, other, *[torch.ones_like(other)] * (len(loss.operands) - 2)]
    with cupylosses.set_one_pass(one_pass):
        value = function(*operands)
    with torch.no_grad():
        operands[position].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        value.backward()


@pytest.mark.gpu
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=lambda x: x.__name__)
def test_without_gradients(function: Callable[..., Tensor], mode: Callable[[], Any], loss: Loss) -> None:
    operands = leaves(loss)
    expected = function(*operands)
    before = torch.cuda.memory_allocated()
    with mode():
        value = function(*operands)
        assert not value.requires_grad
        assert value.is_inference() == (mode is torch.inference_mode)
    assert torch.cuda.memory_allocated() - before <= 1024, "no gradient was allocated"
    assert same_bits(value.clone(), expected.detach())


@pytest.mark.kernels
def test_inference_tensors_as_constants(loss: Loss, function: Callable[..., Tensor]) -> None:
    """A target made under inference_mode cannot be saved for backward: torch raises, and nothing is wrong silently."""
    first, *rest = leaves(loss)
    with torch.inference_mode():
        constants = [x.detach().clone() for x in rest]
    with pytest.raises(RuntimeError, match=r"[Ii]nference"):
        function(first, *constants).backward()


@pytest.mark.gpu
def test_graph_that_is_dropped_frees_its_gradient(loss: Loss, function: Callable[..., Tensor]) -> None:
    operands = [torch.rand(1 << 20, device="cuda", requires_grad=True) for _ in loss.operands]
    function(*operands)
    before = torch.cuda.memory_allocated()
    value = function(*operands)
    assert torch.cuda.memory_allocated() - before >= 4 << 20
    del value
    assert torch.cuda.memory_allocated() == before


# ----------------------------------------------------------------------------------------------------------------------
# Streams, saved tensors, recomputation


@pytest.mark.gpu
@pytest.mark.parametrize("grad_output", [1.0, -3.0])
def test_backward_under_another_stream(loss: Loss, function: Callable[..., Tensor], grad_output: float) -> None:
    """torch runs backward on the stream of forward, whichever is current, and makes the two wait for each other."""
    operands = leaves(loss)
    expected = two_passes(loss, operands, grad_output)
    forward, backward = torch.cuda.Stream(), torch.cuda.Stream()
    forward.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(forward):
        torch.cuda._sleep(20_000_000)
        value = function(*operands)
    with torch.cuda.stream(backward):
        found = gradients(value, operands, grad_output)
        copies = [g.clone() for g in found]
    torch.cuda.synchronize()
    assert_same(copies, expected)


@pytest.mark.kernels
@pytest.mark.parametrize(
    ("layout", "grad_output"),
    in_turn(["contiguous", "transposed", "sliced", "misaligned", "expanded", "row"], [1.0, -3.0]),
)
def test_operands_offloaded_to_the_host(
    loss: Loss, function: Callable[..., Tensor], layout: str, grad_output: float
) -> None:
    """Offloaded operands come back at another address, and always contiguous."""
    operands = leaves(loss, layout=layout)
    expected = two_passes(loss, operands, grad_output)
    # If forward expects grad_output, its gradients are kept; otherwise backward computes them again.
    for before in (grad_output, 7.0):
        gradients(function(*operands), operands, before)
        with torch.autograd.graph.save_on_cpu():
            value = function(*operands)
        for found, exact in zip(gradients(value, operands, grad_output), expected, strict=True):
            torch.testing.assert_close(found, exact)


#: Misalignment of an operand in elements, before and after the hook, and the reduction.
EVERY_OFFSET = list(product(range(4), range(4), ["none", "mean"]))


@pytest.mark.kernels
@pytest.mark.parametrize(
    ("before", "after", "reduction"),
    short_or_full([(0, 1, "none"), (0, 2, "mean"), (1, 0, "mean"), (2, 3, "none"), (3, 2, "mean")], EVERY_OFFSET),
)
def test_operands_that_come_back_misaligned(
    loss: Loss, function: Callable[..., Tensor], before: int, after: int, reduction: str
) -> None:
    """A hook may return a saved tensor anywhere in memory; 8-byte loads from addresses aligned to 4 bytes fail."""

    def place(x: Tensor, offset: int) -> Tensor:
        memory = torch.empty(x.numel() + offset, device=x.device)
        return memory[offset:].copy_(x.detach())

    operands = [place(x.flatten(), before).requires_grad_() for x in leaves(loss)]
    arguments = {"reduction": reduction}
    expected = torch.autograd.grad(function(*operands, **arguments).sum(), operands)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: place(x, after)):
        value = function(*operands, **arguments).sum()
    assert_same(torch.autograd.grad(value, operands), expected)


@pytest.mark.kernels
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_checkpointing(loss: Loss, function: Callable[..., Tensor], reduction: str) -> None:
    operands = leaves(loss)
    plain = torch.autograd.grad(function(*operands, reduction=reduction).sum(), operands)
    again = checkpoint(lambda *x: function(*x, reduction=reduction), *operands, use_reentrant=False)
    assert_same(torch.autograd.grad(again.sum(), operands), plain)


# ----------------------------------------------------------------------------------------------------------------------
# Second derivatives


@pytest.mark.parametrize(("dtype", "reduction"), in_turn(["float32", "float64"], ["none", "mean"]))
def test_second_derivatives_against_the_truth(loss: Loss, dtype: str, reduction: str, device: str) -> None:
    """The derivative of a combination of the gradients, with respect to each operand and the upstream gradient."""
    drawn = samples.operands(loss, loss.values(), (dtype,) * len(loss.operands), [(5, 7)] * len(loss.operands))

    def second(operands: list[Tensor], call: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        operands = [x.clone().requires_grad_() for x in operands]
        value = call(*operands, reduction=reduction)
        upstream = torch.full_like(value, 1.5, requires_grad=True)
        first = torch.autograd.grad(value, operands, upstream, create_graph=True)
        mixed = sum(((i + 1) * g * g).sum() for i, g in enumerate(first))
        found = torch.autograd.grad(mixed, [*operands, upstream], allow_unused=True)
        return tuple(torch.zeros_like(x) if g is None else g for x, g in zip([*operands, upstream], found, strict=True))

    def formula(*operands: Tensor, reduction: str) -> Tensor:
        import array_api_compat.torch as xp

        elements = loss.reference(xp, *operands, **loss.values())
        if reduction == "none":
            return elements.mean(-1) if loss.mean_of_rows else elements
        return elements.mean()

    exact = second([x.double() for x in drawn], formula)
    found = second([x.to(device) for x in drawn], by_position(loss))
    for a, b in zip(found, exact, strict=True):
        torch.testing.assert_close(a.cpu().double(), b, rtol=1e-4 if dtype == "float32" else 1e-11, atol=1e-7)


def test_gradient_penalty(loss: Loss, device: str) -> None:
    """The usual use of a second derivative: the norm of the gradient as a part of the loss."""
    drawn = samples.operands(loss, loss.values(), ("float64",) * len(loss.operands), [(6,)] * len(loss.operands))
    operands = [x.to(device).requires_grad_() for x in drawn]
    call = by_position(loss)

    def penalty(*x: Tensor) -> Tensor:
        value = call(*x, reduction="sum")
        return sum((g * g).sum() for g in torch.autograd.grad(value, x, create_graph=True))

    assert torch.autograd.gradcheck(penalty, operands, rtol=1e-5, atol=1e-6)


@pytest.mark.kernels
def test_first_gradient_with_create_graph_is_the_same(loss: Loss, function: Callable[..., Tensor]) -> None:
    operands = leaves(loss)
    found = gradients(function(*operands), operands, 2.0, create_graph=True)
    expected = truth(loss, [x.detach().cpu() for x in operands], loss.values(), "mean", 2.0, flush=flushes(operands))
    for g, exact in zip(found, expected.gradients, strict=True):
        assert compare(g.detach().cpu(), exact).ok


@pytest.mark.kernels
def test_promise_survives_a_create_graph_pass(loss: Loss, function: Callable[..., Tensor]) -> None:
    operands = leaves(loss)
    value = function(*operands)
    gradients(value, operands, create_graph=True)
    assert_same(gradients(value, operands), two_passes(loss, operands))


@pytest.mark.kernels
@pytest.mark.parametrize("enabled", [True, False])
def test_switch_between_forward_and_backward(loss: Loss, function: Callable[..., Tensor], enabled: bool) -> None:
    """Backward uses the setting with which forward ran."""
    operands = leaves(loss)
    with cupylosses.set_one_pass(enabled):
        value = function(*operands)
    with cupylosses.set_one_pass(not enabled):
        found = gradients(value, operands)
    assert_same(found, two_passes(loss, operands))

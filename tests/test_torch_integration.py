"""Losses with torch's other features: streams, devices, graphs, autocast, threads, memory, transforms, subclasses."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from devices import GPU, KERNELS, allocated
from grids import LOSSES, REPRESENTATIVES, in_turn, short_or_full
from torch import Tensor

import cupylosses.functional as F
from cupylosses.backends.torch import plans as torch_plans
from cupylosses.engines.pointwise.definition import Loss
from cupylosses.engines.pointwise.reduction import Static
from cupylosses.testing import samples
from cupylosses.testing.check import by_position
from cupylosses.testing.pointwise.eager import twin
from cupylosses.testing.tolerance import same_bits

pytestmark = [pytest.mark.plain, pytest.mark.in_turn, pytest.mark.filterwarnings("ignore:.*broadcast")]

SLEEP = 50_000_000  # Cycles: tens of milliseconds.


def draw(loss: Loss, device: str = "cuda", shape: tuple[int, ...] = (257, 129), seed: int = 0) -> list[Tensor]:
    """Returns operands in float32, all of which require grad."""
    shapes = [shape] * len(loss.operands)
    drawn = samples.operands(loss, loss.values(), ("float32",) * len(shapes), shapes, device, seed)
    return [x.requires_grad_() for x in drawn]


def evaluate(loss: Loss, operands: list[Tensor], grad_output: float = 1.0, **options: Any) -> list[Tensor]:
    """Returns value and gradients."""
    value = by_position(loss)(*operands, **options)
    return [value.detach(), *torch.autograd.grad(value, operands, torch.full_like(value, grad_output))]


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    for a, b in zip(found, expected, strict=True):
        assert same_bits(a, b)


# ----------------------------------------------------------------------------------------------------------------------
# Streams and devices


@pytest.mark.representatives
@pytest.mark.gpu
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_current_stream_is_waited_for(loss: Loss, reduction: str) -> None:
    """The operands are still being produced, slowly, on the stream of the call: another stream would read zeros."""
    operands = draw(loss)
    expected = evaluate(loss, operands, 3.0, reduction=reduction)
    late = [torch.zeros_like(x).requires_grad_() for x in operands]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(SLEEP)
        with torch.no_grad():
            for x, y in zip(late, operands, strict=True):
                x.copy_(y)
        found = evaluate(loss, late, 3.0, reduction=reduction)
    stream.synchronize()
    assert_same(found, expected)


@pytest.mark.representatives
@pytest.mark.gpu
def test_stream_is_read_at_every_call(loss: Loss) -> None:
    """The stream of the first call with these shapes must not be remembered."""
    operands = draw(loss)
    expected = evaluate(loss, operands)
    for _ in range(3):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        late = [torch.zeros_like(x).requires_grad_() for x in operands]
        with torch.cuda.stream(stream):
            torch.cuda._sleep(SLEEP // 5)
            with torch.no_grad():
                for x, y in zip(late, operands, strict=True):
                    x.copy_(y)
            found = evaluate(loss, late)
        stream.synchronize()
        assert_same(found, expected)


@pytest.mark.representatives
@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_device_that_is_not_the_current_one(loss: Loss, reduction: str) -> None:
    operands = draw(loss)
    expected = evaluate(loss, operands, 3.0, reduction=reduction)
    there = [x.detach().to("cuda:1").requires_grad_() for x in operands]
    assert torch.cuda.current_device() == 0
    found = evaluate(loss, there, 3.0, reduction=reduction)
    assert torch.cuda.current_device() == 0
    assert {x.device for x in found} == {torch.device("cuda", 1)}
    assert_same([x.to("cuda:0") for x in found], expected)


@pytest.mark.representatives
@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_devices_in_turn(loss: Loss) -> None:
    here = draw(loss)
    there = [x.detach().to("cuda:1").requires_grad_() for x in here]
    for _ in range(3):
        assert_same([x.to("cuda:0") for x in evaluate(loss, there)], evaluate(loss, here))


@pytest.mark.representatives
@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_operands_on_two_devices(loss: Loss) -> None:
    first, *rest = draw(loss)
    with pytest.raises(ValueError, match=r"one device, got .*cuda:0.*cuda:1"):
        by_position(loss)(first, *(x.to("cuda:1") for x in rest))


# ----------------------------------------------------------------------------------------------------------------------
# CUDA graphs


@pytest.mark.representatives
@pytest.mark.gpu
@pytest.mark.parametrize(
    ("reduction", "layout", "grad_output"), in_turn(["none", "mean"], ["contiguous", "row"], [1.0, 3.0], times=2)
)
def test_graph_capture_after_one_warm_up(loss: Loss, reduction: str, layout: str, grad_output: float) -> None:
    """Forward and backward in one graph; replayed with other operands and another upstream gradient."""
    shape = (257, 129)
    shapes = [shape, *[shape if layout == "contiguous" else shape[1:]] * (len(loss.operands) - 1)]

    def sample(seed: int) -> list[Tensor]:
        return samples.operands(loss, loss.values(), ("float32",) * len(shapes), shapes, "cuda", seed)

    static = [x.requires_grad_() for x in sample(0)]
    function = by_position(loss)
    upstream = torch.tensor(grad_output, device="cuda")

    def step() -> list[Tensor]:
        value = function(*static, reduction=reduction)
        return [value, *torch.autograd.grad(value, static, upstream.expand_as(value))]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for seed in (1, 2, 1):
        for scale in (grad_output, grad_output, -2.0):
            fresh = sample(seed)
            with torch.no_grad():
                upstream.fill_(scale)
                for x, y in zip(static, fresh, strict=True):
                    x.copy_(y)
            graph.replay()
            torch.cuda.synchronize()
            expected = evaluate(loss, [x.requires_grad_() for x in fresh], scale, reduction=reduction)
            assert_same([x.detach() for x in captured], expected)


@pytest.mark.representatives
@pytest.mark.gpu
def test_calls_beside_a_replayed_graph(loss: Loss) -> None:
    """A graph owns its workspace: concurrent calls on other streams share nothing with it."""
    static, others = draw(loss, shape=(1031, 1031)), draw(loss, shape=(1031, 1031), seed=1)
    function = by_position(loss)
    with torch.no_grad():
        expected, outside = function(*static), function(*others)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            value = function(*static)
        stream = torch.cuda.Stream()
        for _ in range(20):
            graph.replay()
            with torch.cuda.stream(stream):
                found = function(*others)
            torch.cuda.synchronize()
            assert same_bits(value, expected) and same_bits(found, outside)


# ----------------------------------------------------------------------------------------------------------------------
# Autocast


@pytest.mark.representatives
@pytest.mark.parametrize(
    ("dtype", "inside"), in_turn(["float16", "bfloat16", "float32", "float64"], ["bfloat16", "float16"], times=2)
)
def test_autocast(loss: Loss, dtype: str, inside: str, device: str) -> None:
    """Under autocast, results are float32 like torch's, and gradients keep the dtypes of their operands."""
    if device == "cpu" and inside == "float16":
        pytest.skip("torch's autocast on the CPU is for bfloat16")
    operands = [x.detach().to(getattr(torch, dtype)).requires_grad_() for x in draw(loss, device)]
    with torch.autocast(device, getattr(torch, inside)):
        value = by_position(loss)(*operands)
        theirs = twin(loss, {}, "mean")
        # Detached: torch has no gradient for some operands.
        plain = [x.detach() for x in operands]
        # torch's autocast on the CPU does not support some losses.
        expected = torch.promote_types(theirs(*plain).dtype if theirs else plain[0].dtype, torch.float32)
    assert value.dtype == expected
    gradients = torch.autograd.grad(value, operands)
    assert [g.dtype for g in gradients] == [x.dtype for x in operands]
    with torch.no_grad(), torch.autocast(device, getattr(torch, inside)):
        elements = by_position(loss)(*operands, reduction="none")
    cast = by_position(loss)(*(x.detach().to(expected) for x in operands), reduction="none")
    if loss.mean_of_rows:  # vectors of 16 bits hold more terms of a mean
        assert torch.allclose(elements, cast, rtol=2.0**-22, atol=0)
    else:
        assert same_bits(elements, cast), "autocast is the cast, without its copy"


@pytest.mark.representatives
@pytest.mark.gpu
def test_gradient_scaler(loss: Loss) -> None:
    """Mixed-precision training that begins with a scale whose gradients overflow, and recovers from it."""
    first, *rest = draw(loss)
    weight = torch.nn.Parameter(first.detach().clone())

    def step() -> Tensor:
        with torch.autocast("cuda", torch.float16):
            return by_position(loss)(weight * 1.0, *(x.detach() for x in rest), reduction="sum") * 1024

    (expected,) = torch.autograd.grad(step(), weight)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**126, growth_interval=1000)
    optimizer = torch.optim.SGD([weight], lr=0.0)
    overflows = 0
    for _ in range(30):
        optimizer.zero_grad()
        scaler.scale(step()).backward()
        scaler.unscale_(optimizer)
        finite = bool(weight.grad.isfinite().all())
        overflows += not finite
        if finite:
            torch.testing.assert_close(weight.grad, expected)
        scaler.step(optimizer)
        scaler.update()
    assert 0 < overflows < 30


# ----------------------------------------------------------------------------------------------------------------------
# Threads, synchronization, memory


@pytest.mark.representatives
@pytest.mark.parametrize("compiled", [True, False], ids=["warm", "cold"])
@pytest.mark.parametrize("shared", [True, False] if GPU else [True], ids=lambda x: "one stream" if x else "own streams")
def test_threads(
    loss: Loss, device: str, shared: bool, compiled: bool, kernel_cache: Path, fresh_plans: Callable[[], None]
) -> None:
    """Several threads call the loss at once, from the first compilation on."""
    operands = [draw(loss, device, seed=i) for i in range(4)]
    expected = [evaluate(loss, x, 2.0) for x in operands] if compiled else []
    found: list[list[Tensor]] = [[] for _ in operands]
    errors: list[BaseException] = []

    def work(i: int) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream() if device == "cuda" and not shared else None):
                for _ in range(100 if device == "cuda" else 5):
                    found[i] = evaluate(loss, operands[i], 2.0)
                if device == "cuda":
                    torch.cuda.current_stream().synchronize()
        except BaseException as error:
            errors.append(error)

    if device == "cuda":
        torch.cuda.synchronize()
    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(operands))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    expected = expected or [evaluate(loss, x, 2.0) for x in operands]
    for a, b in zip(found, expected, strict=True):
        assert_same(a, b)


@pytest.mark.representatives
@pytest.mark.gpu
@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("broadcast", [False, True])
def test_nothing_waits_for_the_device(loss: Loss, reduction: str, broadcast: bool) -> None:
    first, *rest = draw(loss)
    operands = [first, *(x.detach()[0].requires_grad_() if broadcast else x for x in rest)]
    evaluate(loss, operands, 3.0, reduction=reduction)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for grad_output in (3.0, 1.0):
            evaluate(loss, operands, grad_output, reduction=reduction)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.representatives
@pytest.mark.gpu
@pytest.mark.parametrize("gradients", [0, 1, 2])
@pytest.mark.parametrize("broadcast", [False, True])
def test_peak_memory_is_the_outputs(loss: Loss, gradients: int, broadcast: bool) -> None:
    """Besides its outputs, a call allocates at most 8 MiB of workspace."""
    rows, columns = 1 << 13, 1 << 13
    shapes = [(rows, columns), *[(columns,) if broadcast else (rows, columns)] * (len(loss.operands) - 1)]
    operands = [torch.rand(s, device="cuda").requires_grad_(i < gradients) for i, s in enumerate(shapes)]
    inputs = [x for x in operands if x.requires_grad]
    function = by_position(loss)

    def step() -> None:
        value = function(*operands)
        if inputs:
            torch.autograd.grad(value, inputs)

    step()
    gc.collect()  # Garbage of earlier tests in reference cycles.
    torch.cuda.synchronize()
    before = allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    outputs = sum(x.numel() * x.element_size() for x in inputs)
    assert torch.cuda.max_memory_allocated() - before <= outputs + (8 << 20)
    assert allocated() == pytest.approx(before, abs=1 << 16)


@pytest.mark.gpu
def test_workspace_stays_small() -> None:
    """Between calls only the partial sums of each stream and the table of expectations stay allocated."""
    x = torch.rand(1 << 24, device="cuda")
    before = torch.cuda.memory_allocated()
    for _ in range(10):
        F.mse_loss(x, x)
    assert torch.cuda.memory_allocated() - before <= 8 << 20


# ----------------------------------------------------------------------------------------------------------------------
# Transforms, compilation, subclasses


def test_function_transform(loss: Loss, device: str) -> None:
    """``torch.func.grad`` agrees with autograd."""
    function = by_position(loss)
    operands = draw(loss, device, (5, 7))
    expected = torch.autograd.grad(function(*operands), operands)
    plain = [x.detach() for x in operands]
    found = torch.func.grad(function, argnums=tuple(range(len(plain))))(*plain)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_vectorising_map(loss: Loss, device: str) -> None:
    """``vmap`` computes value and gradient of each row by itself."""
    function = by_position(loss)
    operands = [x.detach() for x in draw(loss, device, (5, 7))]
    values = torch.func.vmap(function)(*operands)
    gradients = torch.func.vmap(torch.func.grad(function))(*operands)
    for i in range(5):
        row = [x[i].clone().requires_grad_() for x in operands]
        value = function(*row)
        torch.testing.assert_close(values[i], value.detach())
        torch.testing.assert_close(gradients[i], torch.autograd.grad(value, row[0])[0])


def test_forward_mode(loss: Loss, device: str) -> None:
    """The result carries a tangent, which must not be dropped silently."""
    function = by_position(loss)
    drawn = samples.operands(
        loss, loss.values(), ("float64",) * len(loss.operands), [(9,)] * len(loss.operands), device
    )
    leaves = [x.clone().requires_grad_() for x in drawn]
    expected = sum(g.sum() for g in torch.autograd.grad(function(*leaves), leaves))
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(x, torch.ones_like(x)) for x in drawn]
        tangent = forward_ad.unpack_dual(function(*duals)).tangent
    assert tangent is not None
    torch.testing.assert_close(tangent, expected)


@pytest.mark.representatives
def test_jacobian_vector_product(loss: Loss, device: str) -> None:
    function = by_position(loss)
    operands = draw(loss, device, (9,))
    expected = sum(g.sum() for g in torch.autograd.grad(function(*operands), operands))
    plain = tuple(x.detach() for x in operands)
    _, tangent = torch.func.jvp(function, plain, tuple(map(torch.ones_like, plain)))
    torch.testing.assert_close(tangent, expected)


@pytest.mark.filterwarnings("ignore:Dynamo detected a call")
@pytest.mark.parametrize("loss", short_or_full(REPRESENTATIVES[-2:], LOSSES))
def test_torch_compile(loss: Loss, device: str) -> None:
    """Dynamo traces the call; its code generator, which would need a C++ compiler, does not run."""
    torch.compiler.reset()
    function = by_position(loss)
    compiled = torch.compile(lambda *x: function(*x) * 2, backend="eager")
    operands = draw(loss, device, (5, 7))
    expected = function(*operands) * 2
    value = compiled(*operands)
    torch.testing.assert_close(value, expected)
    found = torch.autograd.grad(value, operands)
    for a, b in zip(found, torch.autograd.grad(expected, operands), strict=True):
        torch.testing.assert_close(a, b)


class Tagged(torch.Tensor):
    """A subclass that keeps its type through torch's functions, as every subclass does by default."""


@pytest.mark.representatives
def test_tensor_subclasses(loss: Loss, device: str) -> None:
    first, *rest = (x.detach() for x in draw(loss, device, (5, 7)))
    value = by_position(loss)(first.as_subclass(Tagged), *rest)
    assert isinstance(value, Tagged)
    torch.testing.assert_close(value.as_subclass(torch.Tensor), by_position(loss)(first, *rest))


@pytest.mark.representatives
def test_parameters(loss: Loss, device: str) -> None:
    first, *rest = (x.detach() for x in draw(loss, device, (5, 7)))
    weight = torch.nn.Parameter(first)
    by_position(loss)(weight, *rest).backward()
    assert type(weight.grad) is torch.Tensor


@pytest.mark.representatives
def test_lazily_negated_tensors(loss: Loss, device: str) -> None:
    """A view with the negative bit has other values than its memory."""
    first, *rest = (x.detach() for x in draw(loss, device, (5, 7)))
    negated = torch._neg_view(first)
    assert negated.is_neg()
    function = by_position(loss)
    torch.testing.assert_close(function(negated, *rest), function(-first, *rest))


def test_meta_tensors(loss: Loss) -> None:
    """Meta tensors have shapes but no values; memory planners use them."""
    operands = [torch.empty(5, 7, device="meta") for _ in loss.operands]
    for reduction, shape in [("none", (5,) if loss.mean_of_rows else (5, 7)), ("mean", ())]:
        value = by_position(loss)(*operands, reduction=reduction)
        assert value.shape == shape and value.device.type == "meta"


@pytest.mark.representatives
def test_operand_used_twice(loss: Loss, device: str) -> None:
    """One tensor as two operands: its gradient is the sum of both."""
    function = by_position(loss)
    x = torch.rand(9, device=device, requires_grad=True)
    copies = [x.detach().clone().requires_grad_() for _ in loss.operands]
    expected = sum(torch.autograd.grad(function(*copies, reduction="sum"), copies))
    (found,) = torch.autograd.grad(function(*[x] * len(loss.operands), reduction="sum"), x)
    torch.testing.assert_close(found, expected)


@pytest.mark.representatives
def test_overlapping_views(loss: Loss, device: str) -> None:
    """Operands may share memory."""
    function = by_position(loss)
    memory = torch.rand(20, device=device)
    operands = [memory[i : i + 16] for i in range(len(loss.operands))]
    found = function(*operands, reduction="none")
    # An element may be a mean over a row; the order of its terms depends on the row's address.
    torch.testing.assert_close(found, function(*(x.clone() for x in operands), reduction="none"), rtol=1e-6, atol=0)


@pytest.mark.representatives
def test_frozen_operands_save_nothing(loss: Loss, device: str) -> None:
    operands = [x.detach() for x in draw(loss, device)]
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        value = by_position(loss)(*operands)
    assert saved == [] and value.grad_fn is None


#: Changes after which the plan of the previous call must not be reused: of the operand, or of the call's context.
UNLIKE: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[], Any]]] = {
    "address": (lambda x: torch.cat((x[:1], x))[1:], nullcontext),
    "strides": (lambda x: torch.stack((x, x), 1)[:, 0], nullcontext),
    "shape": (lambda x: x.view(8, 8), nullcontext),
    "dtype": (lambda x: x.double(), nullcontext),
    "sign": (lambda x: torch._neg_view(x), nullcontext),
    "parameter": (lambda x: torch.nn.Parameter(x), nullcontext),
    "no derivative": (lambda x: x, torch.no_grad),
    "inference": (lambda x: x, torch.inference_mode),
    "autocast": (lambda x: x, lambda: torch.autocast(KERNELS, torch.bfloat16)),
}


@pytest.mark.kernels
@pytest.mark.parametrize("what", UNLIKE)
def test_a_call_unlike_the_one_before(what: str, fresh_plans: Callable[[], None]) -> None:
    """A changed call has the value, the dtype and the gradients that it would have as the first call."""
    change, around = UNLIKE[what]
    dtype = torch.bfloat16 if what == "autocast" else torch.float32
    x, y = (torch.linspace(a, 2, 64, device=KERNELS).to(dtype) for a in (0, 1))

    def call(differentiated: bool) -> list[Tensor]:
        a, b = change(x), change(y)
        if differentiated:
            a = a.detach().requires_grad_()
        with around():
            value = F.mse_loss(a, b)
        return [value, *torch.autograd.grad(value, a)] if value.requires_grad else [value]

    for differentiated in (False, True):
        fresh_plans()
        expected = call(differentiated)
        fresh_plans()
        for _ in range(2):
            value = F.mse_loss(x.clone().requires_grad_(differentiated), y)
            if differentiated:
                value.backward()
        for _ in range(2):
            found = call(differentiated)
            assert len(found) == len(expected)
            for a, b in zip(found, expected, strict=True):
                assert a.dtype == b.dtype and a.shape == b.shape and same_bits(a, b)


@pytest.mark.kernels
def test_a_call_like_the_one_before_is_not_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = (torch.linspace(a, 2, 64, device=KERNELS) for a in (0, 1))
    expected = F.mse_loss(x, y)
    monkeypatch.setattr(torch_plans, "find", None)
    assert same_bits(F.mse_loss(x.clone(), y.clone()), expected)


@pytest.mark.kernels
def test_an_address_unlike_the_one_before_is_not_read_in_vectors() -> None:
    """The test inspects the plan, because the host reads vectors at any address: only a GPU fails."""
    x, y = (torch.linspace(a, 2, 64, device=KERNELS) for a in (0, 1))
    F.mse_loss(x, y)
    shifted = torch.cat((x[:1], x))[1:]
    found = torch_plans.locate(F.mse_loss.loss, (shifted, y), Static("mean"))
    assert found is not None and found[0].tensors[0].misalignment == shifted.data_ptr() % 16 == 4


@pytest.mark.kernels
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("name", ["mse_loss", "cross_entropy"])
def test_a_call_of_another_grad_mode_is_not_like_the_one_before(name: str, first: bool) -> None:
    """A validation under no_grad once left the training after it without gradients."""
    x = torch.randn(6, 5, device=KERNELS, requires_grad=True)
    y = torch.arange(6, device=KERNELS) % 5 if name == "cross_entropy" else torch.randn(6, 5, device=KERNELS)
    for grad in (first, not first, first):
        with torch.set_grad_enabled(grad):
            assert getattr(F, name)(x, y).requires_grad is grad

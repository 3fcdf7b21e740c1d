"""Transforms of torch that work with losses: each is tried with a loss and compared with the truth.

`TRANSFORMS` is the definition: tests run it, and ``scripts/transforms.py`` records its outcomes for the table of
docs/transforms.md, whose text is that of the checks' docstrings.
"""

from __future__ import annotations

import copy
import io
import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
import torch._dynamo.testing
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from cupylosses import nn
from cupylosses.engines.pointwise import reference as pointwise_reference
from cupylosses.testing.by_engine import ByEngine
from cupylosses.testing.tolerance import same_bits

#: Tolerance relative to the largest number of a float64 result; second derivatives take only a few operations.
TOLERANCE = 1e-9

TRANSFORMS: dict[str, Transform] = {}


@dataclass(frozen=True)
class Transform:
    """A transform of torch: its name, the check that tries it with a loss, and True if it needs a GPU."""

    name: str
    check: Callable[[Subject], None]
    gpu: bool

    @property
    def summary(self) -> str:
        """The first sentence of the docstring."""
        return (self.check.__doc__ or "").strip().split("\n")[0]

    def outcome(self, subject: Subject) -> Exception | None:
        """Returns the problem that the transform has with a loss; None if it works."""
        try:
            self.check(subject)
        except Exception as error:
            return error
        return None


class Subject(ByEngine, ABC, modules="tools.{}.subject"):
    """A loss, its device, and operands for it, away from the borders of their domains.

    ``Subject(loss, device)`` makes an instance of the subclass for the loss's engine.

    Attributes:
        function: The loss as a function of its floating operands.
    """

    function: Callable[..., Tensor]

    def __init__(self, loss: Any, device: str = "cpu", seed: int = 0) -> None:
        self.loss, self.device, self.seed = loss, device, seed

    @classmethod
    def suits(cls, transform: Transform, loss: Any) -> bool:
        """True if a transform can be tried with a loss."""
        return True

    @abstractmethod
    def draw(self, *shapes: tuple[int, ...], dtype: str = "float64", seed: int = 0) -> list[Tensor]:
        """Returns an operand of each shape; the last shape serves the remaining operands."""

    @abstractmethod
    def truth(self, *operands: Tensor) -> Tensor:
        """Returns the mean by the formula, which autograd can differentiate any number of times."""

    @cached_property
    def reduced(self) -> list[Callable[..., Tensor]]:
        """The mean, and the elements."""
        return [partial(self.function, reduction=x) for x in ("mean", "none")]

    @cached_property
    def leaves(self) -> list[Tensor]:
        """Operands that require grad."""
        return [x.requires_grad_() for x in self.draw((3, 4))]

    def hessian(self, operands: list[Tensor]) -> Any:
        """Returns the second derivatives of the mean of the formula."""
        return torch.autograd.functional.hessian(self.truth, tuple(x.detach() for x in operands))


def suits(transform: Transform, loss: Any) -> bool:
    """True if a transform can be tried with a loss."""
    return Subject.of(loss).suits(transform, loss)


def transform(name: str, gpu: bool = False) -> Callable[[Callable[[Subject], None]], Callable[[Subject], None]]:
    """Adds a check to :data:`TRANSFORMS`."""

    def enter(check: Callable[[Subject], None]) -> Callable[[Subject], None]:
        TRANSFORMS[name] = Transform(name, check, gpu)
        return check

    return enter


def close(found: Any, expected: Any, tolerance: float = TOLERANCE) -> None:
    """Asserts that tensors, or nested tuples of them, agree."""
    if isinstance(expected, (tuple, list)):
        assert len(found) == len(expected)
        for a, b in zip(found, expected, strict=True):
            close(a, b, tolerance)
        return
    assert found.shape == expected.shape, f"{tuple(found.shape)} is not {tuple(expected.shape)}"
    size = expected.abs().max().item() if expected.numel() else 0.0
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance * max(size, 1.0))


# ----------------------------------------------------------------------------------------------------------------------
# Derivatives


@transform("`torch.autograd.gradcheck`")
def _gradcheck(s: Subject) -> None:
    """First derivatives of values and of elements against finite differences."""
    for f in s.reduced:
        torch.autograd.gradcheck(f, s.leaves, fast_mode=True)


@transform("`torch.autograd.gradgradcheck`")
def _gradgradcheck(s: Subject) -> None:
    """Second derivatives, with respect to grad_output too."""
    for f in s.reduced:
        torch.autograd.gradgradcheck(f, s.leaves, fast_mode=True, atol=1e-4)


@transform("`create_graph=True`")
def _gradient_penalty(s: Subject) -> None:
    """The gradient of a gradient's square; one operand is broadcast."""
    rest = (3, 4) if s.loss.warn_broadcast else (1, 4)
    operands = [x.requires_grad_() for x in s.draw((3, 4), rest)]

    def penalty(f: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        found = torch.autograd.grad(f(*operands), operands, create_graph=True)
        total = sum((g**2).sum() for g in found)
        return torch.autograd.grad(total, operands, allow_unused=True, materialize_grads=True)

    close(penalty(s.function), penalty(s.truth))


@transform("`torch.autograd.functional.hvp`")
def _hessian_vector_product(s: Subject) -> None:
    """The second derivatives along a direction."""
    along = tuple(torch.randn_like(x) for x in s.leaves)
    found = torch.autograd.functional.hvp(s.function, tuple(s.leaves), along)
    close(found, torch.autograd.functional.hvp(s.truth, tuple(s.leaves), along))


@transform("third derivatives")
def _third_derivative(s: Subject) -> None:
    """Third derivatives, by the reference formula."""

    def third(f: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        first = torch.autograd.grad(f(*s.leaves), s.leaves, create_graph=True)
        second = torch.autograd.grad(sum((g**2).sum() for g in first), s.leaves, create_graph=True, allow_unused=True)
        total = sum((g**2).sum() for g in second if g is not None)
        if not (isinstance(total, Tensor) and total.requires_grad):  # It has no second derivative.
            return ()
        return torch.autograd.grad(total, s.leaves, allow_unused=True, materialize_grads=True)

    found, expected = third(s.function), third(s.truth)
    if expected:
        close(found or tuple(map(torch.zeros_like, expected)), expected, 1e-7)


@transform("`torch.autograd.forward_ad`")
def _forward_mode(s: Subject) -> None:
    """Value and tangent of dual tensors."""
    operands = [x.detach() for x in s.leaves]
    along = [torch.randn_like(x) for x in operands]
    expected = torch.autograd.functional.jvp(s.truth, tuple(operands), tuple(along))
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(x, v) for x, v in zip(operands, along, strict=True)]
        value, tangent = forward_ad.unpack_dual(s.function(*duals))
    close((value, tangent), expected)


# ----------------------------------------------------------------------------------------------------------------------
# torch.func


@transform("`torch.func.grad`")
def _func_grad(s: Subject) -> None:
    """The gradients of all operands."""
    operands = [x.detach() for x in s.leaves]
    every = tuple(range(len(operands)))
    close(torch.func.grad(s.function, every)(*operands), torch.func.grad(s.truth, every)(*operands))


@transform("`torch.func.jvp`")
def _func_jvp(s: Subject) -> None:
    """Value and tangent."""
    operands = tuple(x.detach() for x in s.leaves)
    along = tuple(torch.randn_like(x) for x in operands)
    close(torch.func.jvp(s.function, operands, along), torch.func.jvp(s.truth, operands, along))


def _batch(s: Subject) -> tuple[list[Tensor], tuple[int | None, ...]]:
    """Returns operands for five samples, and the dimension of the samples in each.

    The first operand has them in its second dimension; all samples share every second one of the others.
    """
    drawn = s.draw((5, 3, 4))
    operands = [drawn[0].transpose(0, 1), *(x if i % 2 else x[0] for i, x in enumerate(drawn[1:]))]
    return operands, (1, *(0 if i % 2 else None for i in range(len(drawn) - 1)))


def _samples(operands: list[Tensor], dims: tuple[int | None, ...]) -> list[list[Tensor]]:
    return [[x if d is None else x.select(d, i) for x, d in zip(operands, dims, strict=True)] for i in range(5)]


@transform("`torch.func.vmap`")
def _vmap(s: Subject) -> None:
    """Operands with the samples in different dimensions, and some that all samples share."""
    operands, dims = _batch(s)
    for f in s.reduced:
        found = torch.func.vmap(f, in_dims=dims)(*operands)
        close(found, torch.stack([f(*x) for x in _samples(operands, dims)]))


@transform("`vmap(grad)`")
def _vmap_of_grad(s: Subject) -> None:
    """A gradient per sample."""
    operands, dims = _batch(s)
    gradients = torch.func.grad(s.function, tuple(range(len(operands))))
    found = torch.func.vmap(gradients, in_dims=dims)(*operands)
    expected = zip(*(torch.func.grad(s.truth, tuple(range(len(x))))(*x) for x in _samples(operands, dims)))
    close(found, [torch.stack(x) for x in expected])


def _jacobian(s: Subject, take: Callable[..., Any]) -> None:
    """Compares the Jacobians of the elements by ``take``, with respect to every operand, with those of the formula."""
    operands = [x.detach() for x in s.draw((3,))]
    found = take(partial(s.function, reduction="none"), tuple(range(len(operands))))(*operands)
    if s.loss.mean_of_rows:
        close(found, torch.autograd.functional.jacobian(s.truth, tuple(operands)))
        return
    values = s.loss.values()
    close(
        found,
        torch.autograd.functional.jacobian(lambda *x: pointwise_reference.elements(s.loss, x, values), tuple(operands)),
    )


@transform("`torch.func.jacrev`")
def _jacrev(s: Subject) -> None:
    """The Jacobian of the elements, row by row."""
    _jacobian(s, torch.func.jacrev)


@transform("`torch.func.jacfwd`")
def _jacfwd(s: Subject) -> None:
    """The Jacobian of the elements, column by column."""
    _jacobian(s, torch.func.jacfwd)


@transform("`torch.func.hessian`")
def _hessian(s: Subject) -> None:
    """All second derivatives, including mixed ones."""
    operands = [x.detach() for x in s.draw((2, 2))]
    found = torch.func.hessian(s.function, tuple(range(len(operands))))(*operands)
    close(found, s.hessian(operands))


@transform("`jacfwd(jacfwd)`")
def _jacfwd_twice(s: Subject) -> None:
    """Second derivatives by forward mode alone; the outer one uses the formula."""
    first, *rest = (x.detach() for x in s.draw((4,)))
    found = torch.func.jacfwd(torch.func.jacfwd(lambda x: s.function(x, *rest)))(first)
    close(found, torch.autograd.functional.hessian(lambda x: s.truth(x, *rest), first))


@transform("`is_grads_batched=True`")
def _batched_gradients(s: Subject) -> None:
    """``is_grads_batched``, as used by ``jacobian(vectorize=True)``."""
    operands = [x.requires_grad_() for x in s.draw((4,))]
    value = s.function(*operands, reduction="none")
    several = torch.randn((3, *value.shape), dtype=value.dtype, device=value.device)
    found = torch.autograd.grad(value, operands, several, is_grads_batched=True, retain_graph=True)
    each = [torch.autograd.grad(value, operands, g, retain_graph=True) for g in several]
    close(found, [torch.stack(x) for x in zip(*each, strict=True)])


# ----------------------------------------------------------------------------------------------------------------------
# Graphs


def _value_and_gradients(f: Callable[..., Tensor], operands: list[Tensor]) -> list[Tensor]:
    value = f(*operands)
    return [value.detach(), *torch.autograd.grad(value, operands, torch.full_like(value, -1.75))]


def _settled(f: Callable[..., Tensor], operands: list[Tensor]) -> list[Tensor]:
    """Returns value and gradients of a second call, whose upstream gradient is the expected one.

    For another upstream gradient, a loss that rescales gradients rounds them once more.
    """
    _value_and_gradients(f, operands)
    return _value_and_gradients(f, operands)


@transform("`torch.compile`")
def _compile(s: Subject) -> None:
    """In one graph, with the bits of eager mode; a new shape compiles again only the first time."""
    torch.compiler.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    for f in s.reduced:
        counter.clear()
        compiled = torch.compile(f, fullgraph=True, backend=counter)
        for n in (3, 5, 7, 9):
            operands = [x.requires_grad_() for x in s.draw((n, 4), dtype="float32", seed=n)]
            for a, b in zip(_value_and_gradients(compiled, operands), _value_and_gradients(f, operands), strict=True):
                assert same_bits(a, b)
        assert counter.frame_count <= 2, f"compiled {counter.frame_count} times"
        # One tensor as all operands; its gradients add up.
        same = torch.rand(3, 4, device=s.device, requires_grad=True)
        value, expected = (g(*[same] * len(s.loss.operands)) for g in (compiled, f))
        assert same_bits(value.detach(), expected.detach())
        close(*(torch.autograd.grad(x.sum(), same)[0] for x in (value, expected)), 1e-6)


@transform("`torch.export`")
def _export(s: Subject) -> None:
    """A program of torch.export, saved, loaded, and run."""

    class Model(torch.nn.Module):
        def forward(self, *x: Tensor) -> Tensor:
            return s.function(*x)

    operands = tuple(s.draw((3, 4), dtype="float32"))
    file = io.BytesIO()
    torch.export.save(torch.export.export(Model(), operands), file)
    file.seek(0)
    program = torch.export.load(file)
    assert any("cupylosses" in str(x.target) for x in program.graph.nodes)
    assert same_bits(program.module()(*operands), s.function(*operands))


# ----------------------------------------------------------------------------------------------------------------------
# Training


@transform("autocast")
def _autocast(s: Subject) -> None:
    """16-bit operands give a float32 loss and 16-bit gradients; compiled too."""
    torch.compiler.reset()
    operands = [x.requires_grad_() for x in s.draw((3, 4), dtype="bfloat16")]
    device = operands[0].device.type

    def f(*x: Tensor) -> Tensor:
        with torch.autocast(device, torch.bfloat16):
            return s.function(*x)

    found = _settled(f, operands)
    assert [x.dtype for x in found] == [torch.float32, *(x.dtype for x in operands)]
    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    for a, b in zip(_value_and_gradients(compiled, operands), found, strict=True):
        assert same_bits(a, b)


@transform("`torch.utils.checkpoint`")
def _activation_checkpointing(s: Subject) -> None:
    """Both variants, reentrant or not."""
    expected = _settled(s.function, s.leaves)[1:]
    for reentrant in (True, False):
        operands = [x.detach().clone().requires_grad_() for x in s.leaves]
        (-1.75 * checkpoint(s.function, *operands, use_reentrant=reentrant)).backward()
        for x, b in zip(operands, expected, strict=True):
            assert x.grad is not None and same_bits(x.grad, b)


@transform("`saved_tensors_hooks`")
def _saved_tensor_hooks(s: Subject) -> None:
    """Tensors saved for backward are sent away and come back as other tensors."""
    expected = _value_and_gradients(s.function, s.leaves)
    sent: list[Tensor] = []

    def pack(x: Tensor) -> Tensor:
        sent.append(x)
        return x.clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, torch.clone):
        found = _value_and_gradients(s.function, s.leaves)
    assert sent
    for a, b in zip(found, expected, strict=True):
        assert same_bits(a, b)


@transform("copies of a Module")
def _pickle_and_copy(s: Subject) -> None:
    """Modules, copied deeply and pickled."""
    module = getattr(nn, s.loss.class_name)()
    operands = [x.detach() for x, o in zip(s.leaves, s.loss.operands, strict=True) if o.default is None]
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert type(twin) is type(module)
        assert same_bits(twin(*operands), module(*operands))


@transform("`FakeTensor`")
def _fake_tensors(s: Subject) -> None:
    """Shapes, strides and dtypes of value and gradients, without memory."""
    for f in s.reduced:
        expected = _value_and_gradients(f, s.leaves)
        mode = FakeTensorMode()
        fakes = [mode.from_tensor(x.detach()) for x in s.leaves]
        with mode:
            found = _value_and_gradients(f, [x.requires_grad_() for x in fakes])
        for a, b in zip(found, expected, strict=True):
            assert isinstance(a, FakeTensor)
            assert (a.shape, a.stride(), a.dtype, a.device) == (b.shape, b.stride(), b.dtype, b.device)


# ----------------------------------------------------------------------------------------------------------------------
# CUDA graphs


def _replayed(s: Subject, f: Callable[..., Tensor], calls: int = 4) -> None:
    """Compares ``f``, which may replay a graph, with the loss, for fresh operands and other upstream gradients."""
    for i in range(calls):
        operands = [x.requires_grad_() for x in s.draw((8, 16), dtype="float32", seed=i)]
        copies = [x.detach().clone().requires_grad_() for x in operands]
        for g, x in ((f, operands), (s.function, copies)):
            (g(*x) * (i - 1.5)).backward()
        for x, y in zip(operands, copies, strict=True):
            assert x.grad is not None and y.grad is not None and same_bits(x.grad, y.grad)


@transform("`torch.cuda.graph`", gpu=True)
def _cuda_graph(s: Subject) -> None:
    """Forward and backward, captured after one call, replayed with other operands."""
    static = [x.requires_grad_() for x in s.draw((8, 16), dtype="float32")]
    upstream = torch.tensor(1.0, device=s.device)

    def step() -> list[Tensor]:
        value = s.function(*static)
        return [value.detach(), *torch.autograd.grad(value, static, upstream)]

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for i in range(3):
        with torch.no_grad():
            for x, y in zip(static, s.draw((8, 16), dtype="float32", seed=i), strict=True):
                x.copy_(y)
            upstream.fill_(i - 0.5)
        graph.replay()
        for a, b in zip([x.clone() for x in captured], step(), strict=True):
            assert same_bits(a, b)


@transform("`torch.cuda.make_graphed_callables`", gpu=True)
def _graphed_callables(s: Subject) -> None:
    """The function, forward and backward."""
    operands = tuple(x.requires_grad_() for x in s.draw((8, 16), dtype="float32"))
    _replayed(s, torch.cuda.make_graphed_callables(s.function, operands))


@transform('`torch.compile(mode="reduce-overhead")`', gpu=True)
def _reduce_overhead(s: Subject) -> None:
    """By Inductor, which captures CUDA graphs."""
    torch.compiler.reset()
    compiled = torch.compile(s.function, fullgraph=True, mode="reduce-overhead")

    def step(*x: Tensor) -> Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        return compiled(*x)

    _replayed(s, step)


@transform("`GradScaler`", gpu=True)
def _gradient_scaler(s: Subject) -> None:
    """Float16 training whose gradients underflow without a scale; the scale grows, overflows and shrinks."""
    count = len(s.loss.operands)
    operands = s.draw((64, 64), dtype="float32")
    moved = torch.nn.Parameter(operands[0].clone())
    small = 2.0**-14

    def step() -> Tensor:
        with torch.autocast("cuda", torch.float16):
            return s.function(moved.half(), *operands[1:count]) * small

    (exact,) = torch.autograd.grad(step() * 2.0**18, moved)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**18, growth_interval=2)
    optimizer = torch.optim.SGD([moved], lr=0.0)
    scales, agreed = [], 0
    for _ in range(90):
        optimizer.zero_grad()
        scale = scaler.get_scale()
        scales.append(scale)
        scaler.scale(step()).backward()
        scaler.unscale_(optimizer)
        assert moved.grad is not None
        if scale == 2.0**18 and moved.grad.isfinite().all():
            torch.testing.assert_close(moved.grad * scale, exact, rtol=2e-3, atol=2e-6 * exact.abs().max().item())
            agreed += 1
        scaler.step(optimizer)
        scaler.update()
    assert agreed
    assert max(scales) > 2.0**18, "the scale grew"
    assert exact.abs().max() > 0


@transform("several streams", gpu=True)
def _streams(s: Subject) -> None:
    """One call on two streams at once."""
    operands = [x.requires_grad_() for x in s.draw((257, 129), dtype="float32")]
    expected = _value_and_gradients(s.function, operands)
    streams = [torch.cuda.Stream() for _ in range(2)]
    found = []
    for stream in streams * 3:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            found.append(_value_and_gradients(s.function, operands))
    for stream in streams:
        torch.cuda.current_stream().wait_stream(stream)
    for x in found:
        for a, b in zip(x, expected, strict=True):
            assert same_bits(a, b)

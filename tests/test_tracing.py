"""Losses where torch records or vectorizes calls: graphs, traces and scripts, batched autograd, third derivatives."""

from __future__ import annotations

import ast
import io
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from devices import KERNELS
from grids import short_or_full
from torch import Tensor
from torch.autograd.functional import hessian, jacobian
from torch.fx.experimental.proxy_tensor import make_fx

import cupylosses
import cupylosses.functional as F
from cupylosses import nn

pytestmark = [
    pytest.mark.plain,
    pytest.mark.kernels,
    pytest.mark.filterwarnings("ignore:`?torch.jit.*deprecated:DeprecationWarning"),
]

Operands = tuple[Tensor, ...]


def _draw(rows: int, kind: str) -> Operands:
    generator = torch.Generator().manual_seed(rows)
    logits = torch.randn(rows, 4, generator=generator)
    other = {
        "indices": torch.randint(0, 4, (rows,), generator=generator),
        "probabilities": torch.randn(rows, 4, generator=generator).softmax(1),
        "real": torch.randn(rows, 4, generator=generator),
    }
    found = (logits, other["real"], other["probabilities"]) if kind == "variance" else (logits, other[kind])
    return tuple(x.to(KERNELS) for x in found)


#: One loss for each kind of plan: two operands, three operands, labels, and dense targets. Each entry ends with torch's
#: function.
LOSSES = {
    "mse_loss": (F.mse_loss, "real", torch.nn.functional.mse_loss),
    "gaussian_nll_loss": (F.gaussian_nll_loss, "variance", torch.nn.functional.gaussian_nll_loss),
    "cross_entropy": (F.cross_entropy, "indices", torch.nn.functional.cross_entropy),
    "soft cross_entropy": (F.cross_entropy, "probabilities", torch.nn.functional.cross_entropy),
}


@pytest.fixture(params=LOSSES)
def case(request: pytest.FixtureRequest) -> tuple[Callable[..., Tensor], str, Callable[..., Tensor]]:
    return LOSSES[request.param]


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("reduction", short_or_full(["mean"], ["mean", "none"]))
@pytest.mark.usefixtures("fresh_dynamo")
def test_full_graph_where_nothing_requires_grad(case: Any, reduction: str) -> None:
    """Dynamo drops the context of a Function whose forward gets as many tensors as it has named arguments."""
    function, kind, _ = case
    operands = _draw(5, kind)
    compiled = torch.compile(lambda *x: function(*x, reduction=reduction), fullgraph=True, backend="eager")
    assert torch.equal(compiled(*operands), function(*operands, reduction=reduction))


@pytest.mark.usefixtures("fresh_dynamo")
def test_strict_export_where_nothing_requires_grad(case: Any) -> None:
    function, kind, _ = case
    operands = _draw(5, kind)

    class Model(torch.nn.Module):
        def forward(self, *inputs: Tensor) -> Tensor:
            return function(*inputs)

    exported = torch.export.export(Model(), operands, strict=True)
    assert torch.equal(exported.module()(*operands), function(*operands))


@pytest.mark.parametrize(
    ("function", "shape", "options"),
    [(F.mse_loss, (1, 4), {}), (F.huber_loss, (1, 4), {}), (F.l1_loss, (5, 4), {"size_average": False})],
)
@pytest.mark.usefixtures("fresh_dynamo")
def test_full_graph_of_a_call_that_warns(
    function: Callable[..., Tensor], shape: tuple[int, ...], options: dict[str, Any]
) -> None:
    """The warning is raised at trace time, since the walk up the stack to the user's line cannot be traced."""
    x, y = torch.randn(5, 4, device=KERNELS), torch.randn(shape, device=KERNELS)
    compiled = torch.compile(lambda a, b: function(a, b, **options), fullgraph=True, backend="eager")
    with pytest.warns(UserWarning, match=function.__name__) as caught:
        found = compiled(x, y)
    assert [w.filename for w in caught if function.__name__ in str(w.message)] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert torch.equal(found, function(x, y, **options))


def test_patterns_are_compiled_on_import() -> None:
    """Functions use compiled patterns only, since Dynamo traces functions of `re` into the cache of patterns.

    Tracing `cross_entropy` once left the pattern of another expression there under ours, for the rest of the process.
    """
    package = Path(cupylosses.__file__).parent
    found = []
    for path in package.rglob("*.py"):
        for function in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(function, (ast.FunctionDef, ast.Lambda)):
                used = [x for x in ast.walk(function) if isinstance(x, ast.Attribute) and isinstance(x.value, ast.Name)]
                found += [f"{path.relative_to(package)}:{x.lineno}" for x in used if x.value.id == "re"]
    assert found == []


@pytest.mark.parametrize("differentiated", [False, True])
def test_make_fx_records_the_operators(case: Any, differentiated: bool) -> None:
    """A launch that the tracing mode did not see once left uninitialised memory in the graph."""
    function, kind, _ = case

    def call(first: Tensor, *others: Tensor) -> Tensor:
        if not differentiated:
            return function(first, *others)
        x = first.detach().requires_grad_()
        return torch.autograd.grad(function(x, *others), x)[0]

    graph = make_fx(call, tracing_mode="real")(*_draw(5, kind))
    operands = tuple(x * 2 if x.is_floating_point() else (x + 1) % 4 for x in _draw(5, kind))
    torch.testing.assert_close(graph(*operands), call(*operands))


def test_vectorized_autograd(case: Any) -> None:
    """Autograd's own vectorized modes use a vmap older than torch.func's, for which operators need other rules."""
    function, kind, twin = case
    first, *others = _draw(3, kind)
    wide = [x.double() if x.is_floating_point() else x for x in others]
    found = hessian(lambda x: function(x, *others), first, vectorize=True)
    exact = hessian(lambda x: twin(x, *wide), first.double())
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-6)
    found = jacobian(lambda x: function(x, *others), first, vectorize=True, strategy="forward-mode")
    exact = jacobian(lambda x: twin(x, *wide), first.double())
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-6)


def test_batched_gradients_of_a_gradient(case: Any) -> None:
    function, kind, twin = case
    first, *others = _draw(3, kind)
    directions = torch.randn(2, *first.shape, generator=torch.Generator().manual_seed(1)).to(KERNELS)

    def products(loss: Callable[..., Tensor], dtype: torch.dtype) -> Tensor:
        given = [y.to(dtype) if y.is_floating_point() else y for y in others]
        x = first.detach().to(dtype).requires_grad_()
        (gradient,) = torch.autograd.grad(loss(x, *given), x, create_graph=True)
        return torch.autograd.grad(gradient, x, directions.to(dtype), is_grads_batched=True)[0]

    found, exact = products(function, torch.float32), products(twin, torch.float64)
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-6)


def test_batched_gradients_in_a_thread_of_their_own(case: Any) -> None:
    """Backward on a GPU also runs in a thread that does not see the vmap around it."""
    function, kind, _ = case
    first, *others = _draw(3, kind)
    x = first.requires_grad_()
    (gradient,) = torch.autograd.grad(function(x, *others), x, create_graph=True)
    directions = torch.randn(2, *first.shape, generator=torch.Generator().manual_seed(1)).to(gradient)

    def product(along: Tensor) -> Tensor:
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(torch.autograd.grad, gradient, x, along, retain_graph=True).result()[0]

    found = torch._vmap_internals._vmap(product)(directions)
    torch.testing.assert_close(found, torch.stack([product(v) for v in directions]))


@pytest.mark.parametrize(
    "third",
    [
        lambda f: torch.func.jacrev(torch.func.hessian(f)),
        lambda f: torch.func.jacfwd(torch.func.hessian(f)),
        lambda f: torch.func.jacrev(torch.func.jacrev(torch.func.jacrev(f))),
    ],
    ids=["jacrev(hessian)", "jacfwd(hessian)", "jacrev thrice"],
)
def test_third_derivatives_by_torch_func(case: Any, third: Callable[..., Any]) -> None:
    """Batching expands operands that the samples share, and torch makes no dual numbers of expanded tensors."""
    function, kind, twin = case
    first, *others = _draw(2, kind)
    wide = [x.double() if x.is_floating_point() else x for x in others]
    found = third(lambda x: function(x, *others))(first)
    exact = third(lambda x: twin(x, *wide))(first.double())
    torch.testing.assert_close(found.double(), exact, rtol=1e-4, atol=1e-5)


# ----------------------------------------------------------------------------------------------------------------------
# TorchScript and torch.fx


def test_a_trace_divides_by_the_size_of_its_operands(case: Any) -> None:
    """A trace of 5 rows is correct for 3 rows, differentiable, and can be saved."""
    function, kind, _ = case
    traced = torch.jit.trace(lambda *x: function(*x), _draw(5, kind))
    buffer = io.BytesIO()
    torch.jit.save(traced, buffer)
    buffer.seek(0)
    first, *others = _draw(3, kind)
    first.requires_grad_()
    expected = function(first, *others)
    for graph in (traced, torch.jit.load(buffer)):
        value = graph(first, *others)
        assert torch.equal(value, expected)
        for ours, theirs in zip(
            torch.autograd.grad(value, first), torch.autograd.grad(expected, first, retain_graph=True)
        ):
            assert torch.equal(ours, theirs)


def test_a_trace_with_several_results_and_a_normalizer() -> None:
    logits, labels = _draw(5, "indices")
    count = torch.tensor(7.0, device=KERNELS)

    def call(x: Tensor, y: Tensor, n: Tensor) -> tuple[Tensor, ...]:
        value, lse, accuracy = F.cross_entropy(
            x, y, normalizer=n, return_lse=True, return_accuracy=True, label_smoothing=0.1
        )
        return value, lse, accuracy, F.mse_loss(x, x * 2, normalizer=n)

    traced = torch.jit.trace(call, (logits, labels, count))
    operands = (*_draw(3, "indices"), count * 2)
    for ours, theirs in zip(traced(*operands), call(*operands), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("name", LOSSES)
def test_symbolic_trace_keeps_the_call(name: str) -> None:
    function, kind, _ = LOSSES[name]
    count = 3 if kind == "variance" else 2
    model = {2: lambda x, y: function(x, y, reduction="sum"), 3: lambda x, y, v: function(x, y, v, reduction="sum")}
    graph = torch.fx.symbolic_trace(model[count])
    (call,) = [x for x in graph.graph.nodes if x.op == "call_function"]
    assert call.target is function and call.kwargs["reduction"] == "sum"
    assert not {"weight", "mask", "normalizer"} & set(call.kwargs)
    operands = _draw(3, kind)
    assert torch.equal(graph(*operands), function(*operands, reduction="sum"))


def test_script_refuses_and_says_what_to_do() -> None:
    def user(x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(x, y)

    for what, name in ((F.mse_loss, "mse_loss"), (user, "mse_loss"), (nn.CrossEntropyLoss(), "CrossEntropyLoss")):
        with pytest.raises(NotImplementedError, match=rf"{name}: torch.jit.script cannot .* Use torch.jit.trace"):
            torch.jit.script(what)

"""Losses of a linear layer, and log-probabilities, in training loops: graphs, checkpoints, autocast, transforms."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from devices import KERNELS
from grids import in_turn
from torch.utils.checkpoint import checkpoint

import cupylosses.functional

F: Any = cupylosses.functional

kernels = pytest.mark.kernels

ROWS, FEATURES, CLASSES = 12, 8, 40
#: Size in bytes of a chunk of 4 rows in float32.
SMALL = 4 * 48 * 4

#: Scalar functions of features, weight and labels, by name.
FUNCTIONS: dict[str, Callable[..., torch.Tensor]] = {
    "linear_cross_entropy": lambda x, w, y: F.linear_cross_entropy(x, w, y, max_memory=SMALL),
    "unreduced": lambda x, w, y: F.linear_cross_entropy(x, w, y, max_memory=SMALL, reduction="none").sin().sum(),
    "weighted": lambda x, w, y: F.linear_cross_entropy(x, w, y, token_weight=1.0 / (1 + y.clamp(min=0))),
    "linear_token_log_probs": lambda x, w, y: sum(
        z.sin().sum() for z in F.linear_token_log_probs(x, w, y, return_entropy=True, max_memory=SMALL)
    ),
    "token_log_probs": lambda x, w, y: sum(
        z.sin().sum() for z in F.token_log_probs(x @ w.T, y, return_entropy=True, temperature=0.7)
    ),
}

each = pytest.mark.parametrize("name", FUNCTIONS)


def operands(dtype: torch.dtype = torch.float32, device: str = KERNELS) -> tuple[torch.Tensor, ...]:
    """Features and weight, which require a gradient, and labels, two of which are ignored."""
    x = torch.randn(ROWS, FEATURES).to(device, dtype).requires_grad_()
    w = torch.randn(CLASSES, FEATURES).mul(0.3).to(device, dtype).requires_grad_()
    y = torch.randint(CLASSES, (ROWS,))
    y[[1, 6]] = -100
    return x, w, y.to(device)


def value_and_gradients(f: Callable[..., torch.Tensor], x: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> Any:
    """The value, and the gradients of three times the value."""
    value = f(x, w, y)
    return value.detach(), *torch.autograd.grad(3.0 * value, (x, w))


def close(found: Any, expected: Any, tolerance: float = 1e-5) -> None:
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype and float((a - b).detach().norm()) <= tolerance * max(float(b.detach().norm()), 1e-3)


@kernels
@each
@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing(name: str, reentrant: bool) -> None:
    given, f = operands(), FUNCTIONS[name]

    def g(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return checkpoint(f, x, w, y, use_reentrant=reentrant)

    x, w, y = given
    expected = value_and_gradients(f, x, w, y)
    value = g(x, w, y)
    (3.0 * value).backward()
    close((value.detach(), x.grad, w.grad), expected)


@kernels
@pytest.mark.parametrize(("name", "strict"), in_turn(list(FUNCTIONS), [True, False]))
def test_export(name: str, strict: bool) -> None:
    """An exported program is saved, loaded and run."""
    f = FUNCTIONS[name]

    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return f(x, w, y)

    given = tuple(x.detach() for x in operands())
    file = io.BytesIO()
    torch.export.save(torch.export.export(Model(), given, strict=strict), file)
    file.seek(0)
    program = torch.export.load(file)
    assert any("cupylosses" in str(x.target) for x in program.graph.nodes)
    close([program.module()(*given)], [f(*given)])


@kernels
@each
def test_autocast(name: str) -> None:
    """The layer is computed in 16 bits, and gradients are float32 like the parameters."""
    given, f = operands(), FUNCTIONS[name]

    def g(*x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(given[0].device.type, torch.bfloat16):
            return f(*x)

    found, expected = value_and_gradients(g, *given), value_and_gradients(f, *given)
    assert found[0].dtype == torch.float32 and not torch.equal(found[1], expected[1])
    close(found, expected, 0.05)
    torch.compiler.reset()
    compiled = torch.compile(g, fullgraph=True, backend="aot_eager")
    close(value_and_gradients(compiled, *given), found, 1e-2)


@kernels
@each
def test_double_backward_in_a_batch(name: str) -> None:
    """Second derivatives under vmap match central differences of the gradients, in float64."""
    x, w, y = operands(torch.float64)
    v, f = torch.randn(3, ROWS, FEATURES, dtype=torch.float64, device=KERNELS), FUNCTIONS[name]
    x, w = x.detach(), w.detach()

    def along(f: Callable[..., torch.Tensor], v: torch.Tensor) -> Any:
        return torch.func.jvp(lambda x: torch.func.grad(f, (0, 1))(x, w, y), (x,), (v,))[1]

    found = torch.func.vmap(lambda v: along(f, v))(v)
    step = 1e-5
    for i in range(3):
        ahead, behind = (torch.func.grad(f, (0, 1))(x + s * step * v[i], w, y) for s in (1, -1))
        close([z[i] for z in found], [(a - b) / (2 * step) for a, b in zip(ahead, behind, strict=True)], 1e-6)


@kernels
@pytest.mark.parametrize(
    "options", [{}, {"reduction": "none"}, {"reduction": "sum"}], ids=lambda x: "-".join(x.values())
)
def test_further_results_of_transforms(options: dict[str, Any]) -> None:
    """``lse`` and accuracy are returned per sample under vmap, and from a compiled graph."""
    x, w, y = operands()
    x, y = (z.detach().reshape(3, 4, *z.shape[1:]) for z in (x, y))
    w = w.detach()

    def f(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        given = {"return_lse": True, "return_accuracy": True, "max_memory": SMALL, **options}
        return tuple(F.linear_cross_entropy(x, w, y, **given))

    def summed(*given: torch.Tensor) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        value, *more = f(*given)
        return value.sum(), tuple(more)

    eager = [f(a, w, b) for a, b in zip(x, y, strict=True)]
    stacked = [torch.stack(z) for z in zip(*eager, strict=True)]
    close(torch.func.vmap(f, (0, None, 0))(x, w, y), stacked)
    slopes, more = torch.func.vmap(torch.func.grad(summed, has_aux=True), (0, None, 0))(x, w, y)
    close(more, stacked[1:])
    leaf = x.clone().requires_grad_()
    close([slopes], [torch.stack([torch.autograd.grad(f(a, w, b)[0].sum(), a)[0] for a, b in zip(leaf.unbind(), y)])])
    torch.compiler.reset()
    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")(leaf[0], w, y[0])
    close(compiled, eager[0])
    assert compiled[0].requires_grad and not compiled[1].requires_grad and not compiled[2].requires_grad


@pytest.mark.gpu
@each
def test_cuda_graphs(name: str) -> None:
    """Forward and backward, captured and replayed with other operands."""
    x, w, y = operands(device="cuda")
    f = FUNCTIONS[name]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        value_and_gradients(f, x, w, y)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = value_and_gradients(f, x, w, y)
    for _ in range(3):
        with torch.no_grad():
            x.normal_()
            y.copy_(torch.randint(CLASSES, (ROWS,)))
        graph.replay()
        close(found, value_and_gradients(f, x, w, y))


@pytest.mark.gpu
def test_cuda_graphs_that_add_to_main_grad() -> None:
    x, w, y = operands(device="cuda")
    main_grad = torch.zeros(CLASSES, FEATURES, device="cuda")

    def step() -> None:
        F.linear_cross_entropy(x, w, y, main_grad=main_grad, max_memory=SMALL).backward()

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    main_grad.zero_()
    for _ in range(3):
        graph.replay()
    (exact,) = torch.autograd.grad(FUNCTIONS["linear_cross_entropy"](x, w, y), w)
    close([main_grad], [3 * exact])

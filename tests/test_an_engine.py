"""An engine is one folder: tests/row_maximum has everything that an engine has, without a line of code elsewhere."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from devices import HOST, KERNELS
from row_maximum import ENGINE, RowLoss, row_maximum
from tools import cupy_stand_in as stand_in

import cupylosses
from cupylosses import modules
from cupylosses.backends.torch import formulas
from cupylosses.testing.tolerance import same_bits

REDUCTIONS = ("none", "mean", "sum")


def rows(seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(5, 7, generator=torch.Generator().manual_seed(seed), dtype=dtype).to(KERNELS)


def expected(x: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
    values = x.abs().amax(-1)
    return values if reduction == "none" else getattr(values, reduction)()


@pytest.mark.kernels
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "sliced"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_value_and_gradient(reduction: str, dtype: torch.dtype, layout: str) -> None:
    x = rows(dtype=dtype)
    if layout == "transposed":
        x = x.T.contiguous().T
    elif layout == "sliced":
        x = torch.cat((x, x), 1)[:, :7]
    x.requires_grad_()
    value, exact = row_maximum(x, reduction=reduction), expected(x, reduction)
    assert value.dtype == dtype and type(value.grad_fn).__name__ != "ToCopyBackward0"
    torch.testing.assert_close(value, exact)
    upstream = torch.linspace(0.5, 2, value.numel(), dtype=dtype, device=KERNELS).reshape(value.shape)
    found, right = (torch.autograd.grad(v, x, upstream)[0] for v in (value, exact))
    torch.testing.assert_close(found, right)


@pytest.mark.kernels
def test_a_wrong_speculation_is_noticed() -> None:
    x = rows().requires_grad_()
    for factor in (1.0, 3.0, 3.0, -2.0):
        found = torch.autograd.grad(row_maximum(x), x, torch.tensor(factor, dtype=x.dtype, device=KERNELS))[0]
        torch.testing.assert_close(found, factor * torch.autograd.grad(expected(x), x)[0])


@pytest.mark.kernels
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_transforms(reduction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, v, batch = rows(), rows(1), torch.stack([rows(2), rows(3)])

    def loss(x: torch.Tensor) -> torch.Tensor:
        return row_maximum(x, reduction=reduction).sum()

    def exact(x: torch.Tensor) -> torch.Tensor:
        return expected(x, reduction).sum()

    torch.testing.assert_close(torch.func.jvp(loss, (x,), (v,))[1], torch.func.jvp(exact, (x,), (v,))[1])
    assert torch.func.jvp(torch.func.grad(loss), (x,), (v,))[1].count_nonzero() == 0
    monkeypatch.setattr(formulas, "evaluate", None)
    torch.testing.assert_close(torch.func.grad(loss)(x), torch.func.grad(exact)(x))
    found = torch.func.vmap(torch.func.grad(loss))(batch)
    torch.testing.assert_close(found, torch.func.vmap(torch.func.grad(exact))(batch))


@pytest.mark.kernels
def test_create_graph() -> None:
    x = rows().requires_grad_()
    (gradient,) = torch.autograd.grad(row_maximum(x), x, create_graph=True)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected(x), x)[0])
    assert torch.autograd.grad(gradient.square().sum(), x)[0].count_nonzero() == 0


@pytest.mark.kernels
def test_a_compiled_graph() -> None:
    torch.compiler.reset()
    x = rows().requires_grad_()
    value = torch.compile(row_maximum, fullgraph=True, backend="aot_eager")(x)
    assert same_bits(value.detach(), row_maximum(x).detach())
    torch.testing.assert_close(torch.autograd.grad(value, x)[0], torch.autograd.grad(expected(x), x)[0])


@pytest.mark.skipif(not HOST, reason="no C++ compiler on Linux")
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_cupy(reduction: str) -> None:
    tensors = rows().cpu().requires_grad_()
    exact = expected(tensors, reduction)
    (gradient,) = torch.autograd.grad(exact.sum(), tensors)
    with stand_in.cupy() as cupy:
        array = cupy.asarray(tensors.detach().numpy())
        value, found = cupylosses.value_and_grad(row_maximum, array, reduction=reduction)
        assert type(value) is type(array)
        numpy.testing.assert_array_equal(numpy.asarray(found), gradient.numpy())
        numpy.testing.assert_allclose(numpy.asarray(value), exact.detach().numpy(), rtol=1e-15)


def test_numpy_and_formulas() -> None:
    x = rows().cpu()
    value, gradient = cupylosses.value_and_grad(row_maximum, x.numpy())
    numpy.testing.assert_allclose(value, expected(x).numpy(), rtol=1e-15)
    assert gradient.shape == x.shape
    torch.testing.assert_close(row_maximum(x.float()), expected(x.float()))


@pytest.mark.kernels
def test_a_warm_up_compiles_what_calls_need(loaded: Callable[..., Any]) -> None:
    done = cupylosses.warmup(row_maximum, "float32", (5, 7), reduction=["mean", "none"], device=loaded.device)
    assert done.by_loss == {"row_maximum": 4}
    with loaded.nothing():
        for reduction in ("mean", "none"):
            row_maximum(rows(dtype=torch.float32).requires_grad_(), reduction=reduction).sum().backward()


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch, fresh_plans: Callable[[], None]) -> Any:
    """The device to warm up, and a context in which loading a kernel for the first time is an error."""
    from contextlib import contextmanager
    from types import SimpleNamespace

    from cupylosses.testing.host.launch import Launcher

    known: set[Any] = set()
    whole = Launcher.load.__func__

    def load(kind: Any, variant: Any, shared: int = 0) -> Any:
        known.add(variant)
        return whole(kind, variant, shared)

    monkeypatch.setattr(Launcher, "load", classmethod(load))

    @contextmanager
    def nothing() -> Any:
        before = set(known)
        yield
        assert known == before

    return SimpleNamespace(device="cpu" if KERNELS == "cpu" else None, nothing=nothing)


def test_documentation() -> None:
    text = str(row_maximum.__doc__)
    for part in ("Largest absolute value of each row.", "max_c |input_c|", "Args:", "Returns:", "Gradient:", "Raises:"):
        assert part in text
    assert list(inspect.signature(row_maximum).parameters) == ["input", "reduction"]
    assert repr(modules.module_of(row_maximum)(reduction="sum")) == "RowMaximumLoss(reduction='sum')"


def test_the_engine_is_that_of_its_definitions() -> None:
    assert RowLoss.engine is ENGINE and row_maximum.loss.engine is ENGINE


@pytest.mark.parametrize("x", [torch.zeros(2, 3, dtype=torch.int64), torch.zeros(())])
def test_errors(x: torch.Tensor) -> None:
    with pytest.raises((TypeError, ValueError), match=r"^row_maximum: `input` must .*got"):
        row_maximum(x)

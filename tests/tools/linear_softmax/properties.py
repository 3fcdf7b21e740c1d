"""Properties of softmax losses of a linear layer, on CPU tensors, wherever their kernels run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from cupylosses import functional
from cupylosses.testing.check import Check, perform

LOSS = functional.linear_cross_entropy


def agrees_with_truth(layout: str, **case: Any) -> None:
    """Value and gradients match float64, for an expected grad_output and for another one."""
    outcome = perform(Check(LOSS.loss, case, ("float32",), layout=layout))
    assert outcome.ok, outcome.problems


def weighs_rows(seed: int = 0) -> None:
    """Value and gradients of a weighted mean are those of the weighted mean of its rows in float64."""
    generator = torch.Generator().manual_seed(seed)
    x, weight = (torch.randn(n, 24, generator=generator, requires_grad=True) for n in (37, 43))
    labels, weights = torch.randint(43, (37,), generator=generator), torch.rand(37, generator=generator)
    labels[::5] = -100
    rows = torch.nn.functional.cross_entropy(x.double() @ weight.double().T, labels, reduction="none")
    exact = (rows * weights).sum() / (weights * (labels != -100)).sum()
    found = LOSS(x, weight, labels, token_weight=weights, max_memory=8 * 48 * 4)
    pairs = zip(*(torch.autograd.grad(v, (x, weight), torch.full_like(v, -1.75)) for v in (found, exact)), strict=True)
    for a, b in ((found.detach(), exact.detach()), *pairs):
        assert float((a - b).norm()) <= 1e-5 * float(b.norm())


def second_agrees_with_truth(seed: int = 0) -> None:
    """The derivatives of both gradients along tangents of the features match those in float64."""
    generator = torch.Generator().manual_seed(seed)
    x, weight, tangent = (torch.randn(n, 24, generator=generator) for n in (37, 43, 37))
    labels = torch.randint(43, (37,), generator=generator)

    def ours(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        value: torch.Tensor = LOSS(x, weight, labels, max_memory=3 * 8 * 48 * 4)
        return value

    def exact(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(x @ weight.T, labels)

    def change(f: Callable[..., torch.Tensor], x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> Any:
        return torch.func.jvp(lambda x: torch.func.grad(f, (0, 1))(x, w), (x,), (v,))[1]

    found, expected = change(ours, x, weight, tangent), change(exact, x.double(), weight.double(), tangent.double())
    for a, b in zip(found, expected, strict=True):
        assert float((a - b).norm()) <= 1e-5 * float(b.norm())

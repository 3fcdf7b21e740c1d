"""Log-probabilities and entropies by torch's own operations, and a comparison with ours, on CPU tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from cupylosses import functional


def truth(
    logits: torch.Tensor,
    index: torch.Tensor,
    temperature: float = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    mask: torch.Tensor | None = None,
    ignore_index: int = -100,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns log-probabilities and entropies in float64, by torch."""
    z, index = logits.double() * logit_scale, index.long()
    z = (z if softcap is None else softcap * torch.tanh(z / softcap)) / temperature
    log_p = z.log_softmax(-1)
    labels = index if index.dim() == z.dim() else index[..., None]
    used = labels != ignore_index
    if mask is not None:
        used = used & mask[..., None]
    found = log_p.gather(-1, labels.where(used, 0)).where(used, 0.0)
    entropy = -(log_p.exp() * log_p.where(log_p > -torch.inf, 0.0)).sum(-1)
    counts = used.any(-1) if labels.shape[-1] else mask
    entropy = entropy if counts is None else entropy.where(counts, 0.0)
    return (found if index.dim() == z.dim() else found[..., 0]), entropy


def agrees_with_truth(rows: int, classes: int, several: int, dtype: str = "float32", seed: int = 0) -> None:
    """Values and gradients of log-probabilities and entropies match float64."""
    generator = torch.Generator().manual_seed(seed)
    logits = (3 * torch.randn(rows, classes, generator=generator)).to(getattr(torch, dtype)).requires_grad_()
    index = torch.randint(classes, (rows, several), generator=generator)
    found = functional.token_log_probs(logits, index, return_entropy=True)
    exact = truth(logits, index)
    upstream = [torch.randn(x.shape, generator=generator) for x in exact]
    slopes = (torch.autograd.grad([*v], logits, [g.to(v[0].dtype) for g in upstream])[0] for v in (found, exact))
    for a, b in (*zip(found, exact, strict=True), tuple(slopes)):
        tolerance = 4e-3 if a.dtype == torch.bfloat16 else 3e-6
        assert float((a.double() - b.double()).detach().norm()) <= tolerance * float(b.detach().double().norm())


def derivatives(
    function: Callable[..., Any],
    logits: torch.Tensor,
    index: torch.Tensor,
    tangents: torch.Tensor,
    upstream: list[torch.Tensor],
    **options: Any,
) -> list[torch.Tensor]:
    """Returns the derivatives of values along tangents, and the products of the second derivatives with tangents.

    Without ``upstream`` for the entropies, ``function`` is asked for log-probabilities only.
    """
    found = function(logits, index, **options)
    found = found if isinstance(found, tuple) else (found,)
    weights = [g.to(y.dtype).requires_grad_() for g, y in zip(upstream, found, strict=False)]
    value = sum((g * y).sum() for g, y in zip(weights, found, strict=False))
    (slope,) = torch.autograd.grad(value, logits, create_graph=True)
    return [*torch.autograd.grad(slope, [*weights, logits], tangents.to(slope.dtype))]


def second_agrees_with_truth(
    rows: int, classes: int, several: int, dtype: str = "float32", size: float = 3.0, **options: Any
) -> None:
    """Derivatives along tangents match float64. All classes of a row share a large part of their tangents."""
    generator = torch.Generator().manual_seed(0)
    logits = (size * torch.randn(rows, classes, generator=generator)).to(getattr(torch, dtype)).requires_grad_()
    index = torch.randint(classes, (rows, several), generator=generator)
    tangents = torch.randn(rows, classes, generator=generator) + 4 * torch.randn(rows, 1, generator=generator)
    tangents = tangents.to(logits.dtype)
    upstream = [torch.randn(rows, n, generator=generator, dtype=torch.float64) for n in (several, 1)]
    upstream[1] = upstream[1][:, 0]
    found = derivatives(functional.token_log_probs, logits, index, tangents, upstream, return_entropy=True, **options)
    wide = logits.detach().double().requires_grad_()
    right = derivatives(truth, wide, index, tangents.double(), upstream, **options)
    for a, b in zip(found, right, strict=True):
        tolerance = 4e-3 if a.dtype == torch.bfloat16 else 3e-6
        assert float((a.double() - b).norm()) <= tolerance * float(b.norm())

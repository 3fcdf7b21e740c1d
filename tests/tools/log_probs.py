"""Log-probabilities and entropies by torch's own operations, and a comparison with ours, on CPU tensors."""

from __future__ import annotations

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

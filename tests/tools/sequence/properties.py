"""Properties of CTC losses and alignments, on CPU tensors."""

from __future__ import annotations

import torch

from cupylosses import functional
from tools.sequence.truth import best_path, in_float64


def _samples(frames: int, labels: int, ties: bool = False) -> tuple[torch.Tensor, ...]:
    """Log-probabilities of three samples, one of them full, with repeated labels; multiples of 1/2 with ``ties``."""
    generator = torch.Generator().manual_seed(0)
    x = 2 * torch.randn(frames, 3, 5, generator=generator)
    x = (2 * x).round() / 2 if ties else x
    targets = torch.randint(1, 5, (3, labels), generator=generator)
    targets[:, 1::3] = targets[:, ::3][:, : targets[:, 1::3].shape[1]]
    return x, targets, torch.tensor([frames, frames - 1, frames - 7]), torch.tensor([labels, labels - 1, labels // 2])


def agrees_with_truth(frames: int, labels: int) -> None:
    """Losses and gradients match float64."""
    x, targets, ends, lengths = _samples(frames, labels)
    x = x.requires_grad_()
    found = functional.ctc_loss(x, targets, ends, lengths, reduction="none")
    (slope,) = torch.autograd.grad(found.sum(), x)
    for n, (end, length) in enumerate(zip(ends.tolist(), lengths.tolist(), strict=True)):
        loss, occ = in_float64(x.detach()[:end, n].double().numpy(), targets[n, :length].tolist())
        assert abs(float(found[n].detach()) - loss) <= 1e-5 + 1e-6 * abs(loss)
        assert float((slope[:end, n].double() + torch.from_numpy(occ)).abs().max()) <= 2e-6


def aligns_as_truth(frames: int, labels: int) -> None:
    """Alignments are those of float64, where many have the same sum."""
    x, targets, ends, lengths = _samples(frames, labels, True)
    found = functional.ctc_forced_alignment(x, targets, ends, lengths)
    for n, (end, length) in enumerate(zip(ends.tolist(), lengths.tolist(), strict=True)):
        best = best_path(x[:end, n].double().tolist(), targets[n, :length].tolist())
        assert found.labels[:end, n].tolist() == best.labels and found.positions[:end, n].tolist() == best.positions

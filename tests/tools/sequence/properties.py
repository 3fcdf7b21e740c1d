"""Properties of CTC losses and alignments, on CPU tensors."""

from __future__ import annotations

from unittest.mock import patch

import torch

from cupylosses import functional
from cupylosses.engines.sequence import plan
from tools.sequence.truth import best_path, in_float64


def _samples(
    frames: int, labels: int, ties: bool = False, classes: int = 5, scale: float = 2.0
) -> tuple[torch.Tensor, ...]:
    """Log-probabilities of three samples, one of them full, with repeated labels; multiples of 1/2 with ``ties``."""
    generator = torch.Generator().manual_seed(0)
    x = scale * torch.randn(frames, 3, classes, generator=generator)
    x = (2 * x).round() / 2 if ties else x
    targets = torch.randint(1, classes, (3, labels), generator=generator)
    targets[:, 1::3] = targets[:, ::3][:, : targets[:, 1::3].shape[1]]
    return x, targets, torch.tensor([frames, frames - 1, frames - 7]), torch.tensor([labels, labels - 1, labels // 2])


def agrees_with_truth(frames: int, labels: int, classes: int = 5, scale: float = 2.0, logits: bool = False) -> None:
    """Losses and gradients match float64."""
    x, targets, ends, lengths = _samples(frames, labels, classes=classes, scale=scale)
    x = x.requires_grad_()
    function = functional.ctc_loss_with_logits if logits else functional.ctc_loss
    found = function(x, targets, ends, lengths, reduction="none")
    right = []
    for n, (end, length) in enumerate(zip(ends.tolist(), lengths.tolist(), strict=True)):
        rows = x.detach()[:end, n].double()
        rows = rows.log_softmax(-1) if logits else rows
        loss, occ = in_float64(rows.numpy(), targets[n, :length].tolist())
        right.append(rows.exp() - torch.from_numpy(occ) if logits else -torch.from_numpy(occ))
        assert abs(float(found[n].detach()) - loss) <= 1e-5 + 1e-6 * abs(loss)
    (slope,) = torch.autograd.grad(found.sum(), x)  # after the values, so that a wrong one needs no gradient kernel
    for n, expected in enumerate(right):
        assert float((slope[: len(expected), n].double() - expected).abs().max()) <= 2e-6


def agrees_with_truth_in_parts(frames: int, labels: int, classes: int, scale: float) -> None:
    """As :func:`agrees_with_truth`, with log-sum-exps in the kernel of the gradient."""
    with patch.object(plan, "SPLIT_BYTES", 0), patch.object(plan, "FRAME_LEAST", 0):
        agrees_with_truth(frames, labels, classes, scale, logits=True)


def aligns_as_truth(frames: int, labels: int) -> None:
    """Alignments match those of float64, although many have the same sum."""
    x, targets, ends, lengths = _samples(frames, labels, True)
    found = functional.ctc_forced_alignment(x, targets, ends, lengths)
    for n, (end, length) in enumerate(zip(ends.tolist(), lengths.tolist(), strict=True)):
        best = best_path(x[:end, n].double().tolist(), targets[n, :length].tolist())
        assert found.labels[:end, n].tolist() == best.labels and found.positions[:end, n].tolist() == best.positions

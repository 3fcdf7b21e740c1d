"""Truth of losses of sequences: torch's loss in float64 on the CPU, with a corrected gradient.

torch returns exp(log_probs) - occ, but the gradient with respect to log-probabilities is -occ, where occ is the
probability that a frame emits a class given the target.

Errors of the arithmetic grow with the square root of the number of frames. They do not depend on the size of the loss
or of an entry of the gradient. In float64 the truth is no more accurate than its logarithms, whose errors are those of
the loss.
"""

from __future__ import annotations

from math import sqrt
from typing import TYPE_CHECKING, Any

from cupylosses.testing.tolerance import Expected
from cupylosses.testing.truth import Truth

if TYPE_CHECKING:
    from torch import Tensor


def truth(
    logits: bool,
    x: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    reduction: str,
    grad_output: Any,
    wide: bool,
) -> Truth:
    """Computes the truth of CPU tensors; ``x`` is (T, N, C) or (T, C), ``wide`` is True for float64 results."""
    import torch
    from torch.nn.functional import ctc_loss

    leaf = x.detach().double().requires_grad_()
    log_probs = leaf.log_softmax(-1) if logits else leaf
    with torch.enable_grad():
        losses = ctc_loss(log_probs, targets, input_lengths, target_lengths, reduction="none")
        (slope,) = torch.autograd.grad(losses.sum(), leaf)
    losses = losses.detach()
    if not logits:
        inside = torch.arange(x.shape[0])[:, None] < input_lengths.reshape(1, -1)
        slope = slope - log_probs.detach().exp() * inside.reshape(*x.shape[:-1], 1)
    frames = sqrt(max(1, x.shape[0]))
    size = losses.abs() + 2 * frames
    count = losses.shape[0] if losses.dim() else 1
    divisor = {"mean": target_lengths.clamp(min=1).double().reshape(losses.shape) * count}.get(reduction)
    divisor = torch.full_like(losses, {"batchmean": count}.get(reduction, 1)) if divisor is None else divisor
    if reduction == "none":
        value = Expected(losses, size, size)
    else:
        sizes = size / divisor
        value = Expected((losses / divisor).sum(), sizes.square().sum().sqrt(), sizes.sum())
    factor = (torch.as_tensor(grad_output, dtype=torch.float64) / divisor)[..., None]
    exact = slope * factor
    of_one = 0.7 + 0.05 * frames + (losses.abs()[..., None] if wide else 0.0)
    sizes = (of_one * factor.abs()).expand(exact.shape)
    return Truth(value, (Expected(exact, sizes, sizes), None, None, None))

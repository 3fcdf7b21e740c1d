"""torch's way to compute losses of sequences."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

#: Reductions that torch has.
REDUCTIONS = ("none", "mean", "sum")


def twin(logits: bool, options: Mapping[str, Any]) -> Callable[..., Tensor] | None:
    """Returns torch's loss with these options, after a log-softmax of ``logits``; None for reductions that it lacks."""
    keywords = dict(options)
    batch_first = keywords.pop("batch_first", False)
    if keywords.get("reduction", "mean") not in REDUCTIONS:
        return None

    def call(x: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor) -> Tensor:
        from torch.nn.functional import ctc_loss

        x = x.log_softmax(-1) if logits else x
        return ctc_loss(x.transpose(0, 1) if batch_first else x, targets, input_lengths, target_lengths, **keywords)

    return call

"""Operators of torch's dispatcher: what those of all losses share."""

from __future__ import annotations

from collections.abc import Sequence

import torch

library = torch.library.Library("cupylosses", "DEF")
# Sums are in the order of memory: with other strides than in eager mode a result would have other bits.
EXACT = [getattr(torch.Tag, x) for x in ("pt2_compliant_tag", "needs_exact_strides") if hasattr(torch.Tag, x)]


def laid_out(x: torch.Tensor, strides: Sequence[int], given: Sequence[torch.Tensor | None]) -> torch.Tensor:
    """``x`` with these strides and in memory of its own, as the dispatcher is promised; kernels make it so. ``given``
    are the arguments of the operator.
    """
    own = x.numel() == 0 or all(y is None or x.data_ptr() != y.data_ptr() for y in given)
    if own and x.stride() == tuple(strides):
        return x
    return torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device).copy_(x)

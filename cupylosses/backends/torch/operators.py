"""Operators of torch's dispatcher: what those of all losses share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from cupylosses import torch_compat

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


#: Levels that torch's older vmap nests at most.
DEEPEST = 64


class _Batch(NamedTuple):
    """Size and randomness of a batch, as a rule of torch.vmap gets them."""

    batch_size: int
    randomness: str = "error"


def batching_rule(name: str, rule: Callable[..., tuple[Any, Any]]) -> None:
    """Lets the vectorized modes of autograd call an operator: ``is_grads_batched``, ``hessian(vectorize=True)``.

    These use a vmap older than torch.func's, for which an operator needs a kernel of its own where it takes or returns
    lists. ``rule(info, in_dims, *arguments)`` is the `vmap` of the operator's Function, on the operator's arguments.
    """
    is_batched = torch_compat.is_legacy_batched
    if is_batched is None:
        return

    def levels(x: Any) -> Iterator[int]:
        if isinstance(x, (list, tuple)):
            for y in x:
                yield from levels(y)
        elif isinstance(x, torch.Tensor):
            for level in range(1, DEEPEST + 1):
                if not is_batched(x):
                    return
                # A tensor that has no such level gets a dimension of the given size, 0.
                plain = torch._remove_batch_dim(x, level, 0, 0)
                if plain.shape[0] or not is_batched(plain):
                    yield level
                    x = plain

    def call(*arguments: Any) -> Any:
        # The innermost level of the arguments. Not the depth at which torch's vmap counts this thread to be: a backward
        # pass on a GPU runs in a thread of its own, which counts none.
        level = max(levels(arguments))
        sizes: list[int] = []

        def unwrap(x: Any) -> tuple[Any, Any]:
            if isinstance(x, (list, tuple)):
                found = [unwrap(y) for y in x]
                return [y for y, _ in found], [d for _, d in found]
            if level not in levels(x):
                return x, None
            x = torch._remove_batch_dim(x, level, 0, 0)
            sizes.append(x.shape[0])
            return x, 0

        plain, dims = unwrap(arguments)
        result, _ = rule(_Batch(sizes[0]), dims, *plain)
        if isinstance(result, torch.Tensor):
            return torch._add_batch_dim(result, 0, level)
        return [torch._add_batch_dim(x, 0, level) for x in result]

    library.impl(name, call, "Batched")

"""Operands for tests: random numbers from the declared domains, and the edge cases of losses.

Numbers are drawn in float64 from a seed and rounded once to the operand's dtype. The truth reads the rounded numbers,
so it has exactly the inputs of a kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from math import inf, nan, prod
from typing import TYPE_CHECKING, Any

from cupylosses.engines.pointwise.definition import Loss

if TYPE_CHECKING:
    from torch import Generator, Tensor, dtype

#: Standard deviation of real operands: large enough for both branches of losses that switch at a distance of about 1.
SPREAD = 2.0

#: Number of elements below which they are drawn on the CPU, so that a test has the same numbers on every device.
DRAWN_ON_DEVICE = 1 << 20


def operands(
    loss: Loss,
    values: Mapping[str, Any],
    dtypes: Sequence[str],
    shapes: Sequence[Sequence[int]],
    device: str = "cpu",
    seed: int = 0,
) -> list[Tensor]:
    """Returns one contiguous random tensor per operand.

    Args:
        loss: The definition, whose operands declare their domains.
        values: All parameters and flags by name; flags may decide a domain.
        dtypes: One dtype per operand: floating-point or, if the definition accepts them, integer.
        shapes: One shape per operand.
        device: The device of the tensors.
        seed: Equal seeds draw equal numbers.
    """
    import torch

    large = max(map(prod, shapes)) >= DRAWN_ON_DEVICE
    generator = torch.Generator(device if large else "cpu").manual_seed(seed)
    return [
        _sample(operand.domain_for(values), shape, getattr(torch, name), generator).to(device)
        for operand, shape, name in zip(loss.operands, shapes, dtypes, strict=True)
    ]


def _sample(domain: str, shape: Sequence[int], kind: dtype, generator: Generator) -> Tensor:
    import torch

    wide = torch.float64 if kind == torch.float64 or prod(shape) < DRAWN_ON_DEVICE else torch.float32
    x = torch.randn(tuple(shape), generator=generator, dtype=wide, device=generator.device)
    # A probability of integer dtype is 0 or 1.
    x = _DOMAINS["binary" if domain == "probability" and not kind.is_floating_point else domain](x)
    if not kind.is_floating_point:
        x = x.round() if kind.is_signed else x.round().abs()
    return x.to(kind)


def _probability(x: Tensor) -> Tensor:
    # Over a last dimension of one element, the only distribution is 1. Each element is then one of two outcomes.
    return x.softmax(-1) if x.dim() and x.shape[-1] > 1 else x.sigmoid()


def _log_probability(x: Tensor) -> Tensor:
    from torch.nn.functional import logsigmoid

    return x.log_softmax(-1) if x.dim() and x.shape[-1] > 1 else logsigmoid(x)


_DOMAINS: dict[str, Callable[[Tensor], Tensor]] = {
    "real": lambda x: x * SPREAD,
    "probability": _probability,
    "log_probability": _log_probability,
    "sign": lambda x: (x >= 0).to(x.dtype) * 2 - 1,
    "binary": lambda x: (x >= 0).to(x.dtype),
    "positive": lambda x: x.exp(),
    "nonnegative": lambda x: (x - 0.5).exp() * (x > -1),
}


# ----------------------------------------------------------------------------------------------------------------------
# Edges


def edges(loss: Loss, values: Mapping[str, Any], dtypes: Sequence[str], device: str = "cpu") -> list[Tensor]:
    """Returns all combinations of the edges of the operands' domains, and the kinks with their neighbours."""
    import torch

    kinds = [getattr(torch, name) for name in dtypes]
    domains = [operand.domain_for(values) for operand in loss.operands]
    points = list(product(*(list(domain_edges(d, kind)) for d, kind in zip(domains, kinds, strict=True))))
    for kink in loss.kinks(**values):
        points += product(*(neighbours(x, kind) for x, kind in zip(kink.operands, kinds, strict=True)))
    columns = zip(*points, strict=True)
    return [torch.tensor(x, dtype=torch.float64).to(kind).to(device) for x, kind in zip(columns, kinds, strict=True)]


def domain_edges(domain: str, kind: dtype) -> Iterator[float]:
    """Yields zeros, the smallest numbers, large numbers, the infinities of the domain, and NaN.

    Squares of the large numbers overflow their dtype, but differences do not. For log-probabilities, the exponential of
    -80 is still normal in float32, and that of -10000 is 0 in every dtype.
    """
    import torch

    if not kind.is_floating_point:
        yield from {"sign": (-1.0, 0.0, 1.0), "binary": (0.0, 1.0)}.get(domain, (0.0, 1.0, 2.0))
        return
    info = torch.finfo(kind)
    subnormal, large = info.tiny / 2, info.max**0.75
    yield from {
        "real": (0.0, -0.0, 1.0, -1.5, info.tiny, subnormal, large, -large, inf, -inf),
        "probability": (0.0, subnormal, info.tiny, 0.25, 1 - info.eps / 2, 1.0),
        "log_probability": (0.0, -info.tiny, -info.eps, -1.5, -80.0, -10000.0, -inf),
        "sign": (-1.0, 0.0, 1.0),
        "binary": (0.0, 1.0),
        "positive": (subnormal, info.tiny, 0.25, 1.0, large, inf),
        "nonnegative": (0.0, subnormal, info.tiny, 0.25, 1.0, large, inf),
    }[domain]
    yield nan


def neighbours(x: float, kind: dtype) -> tuple[float, ...]:
    """Returns the numbers of a dtype below, at and above ``x``, and two more at a relative distance of 1/1024.

    At that distance, a branch taken too early or too late moves a gradient by more than rounding does. An infinity has
    no neighbours. The neighbours of 0 are the smallest normal numbers: a GPU that flushes subnormal numbers has no
    others, and where they are kept, every product with them is rounded by up to half of it and the truth is no measure.
    """
    import torch

    if abs(x) == inf or not kind.is_floating_point:
        return (x,)
    if x == 0:
        tiny = torch.finfo(kind).tiny
        return (-tiny, 0.0, tiny)
    at = torch.tensor(x, dtype=kind)
    beside = [torch.nextafter(at, torch.full_like(at, to)).item() for to in (-inf, x, inf)]
    apart = torch.tensor([x - x / 1024, x + x / 1024], dtype=torch.float64).to(kind).tolist()
    return tuple(sorted({*beside, *apart}))

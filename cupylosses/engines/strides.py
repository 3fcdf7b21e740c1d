"""Strides: dense, broadcast and merged dimensions. Pure functions of integers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

#: Outer dimensions that ``kernels/core/layout.cuh`` has room for, after merging.
MAX_RANK = 24


def dimension_words(sizes: Sequence[int], strides: Sequence[Sequence[int]], rank: int = MAX_RANK) -> list[int]:
    """The kernel's ``Dimensions`` as 64-bit words: rank, sizes, their multipliers, and the strides of each stream,
    padded to ``rank``.
    """
    padded = [*sizes, *[1] * (rank - len(sizes))]
    words = [len(sizes), *padded, *map(multiplier, padded)]
    for stream in strides:
        words += [*stream, *[0] * (rank - len(stream))]
    return words


def multiplier(divisor: int) -> int:
    """The multiplier by which ``quotient`` of ``kernels/core/layout.cuh`` divides indices below 2^63, exactly: it is
    larger than 2^(63 + bits) / divisor by 1 at most, which is less than an index / 2^63. As a word, which is signed.
    """
    if divisor < 2:
        return 0
    found = (1 << 63 + (divisor - 1).bit_length()) // divisor + 1
    return found - (1 << 64 if found >> 63 else 0)


def dense_strides(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """Strides of a new tensor of this shape without gaps, its dimensions in the order of ``strides``.

    A dense tensor keeps its strides; an expanded or sliced one loses the overlap and the gaps.
    """
    order = sorted(range(len(shape)), key=lambda d: (-abs(strides[d]), d))
    expanded = [d for d in order if strides[d] == 0 and shape[d] != 1]
    if expanded:
        order = list(range(len(shape)))
    result, step = [0] * len(shape), 1
    for d in reversed(order):
        result[d] = step
        step *= max(shape[d], 1)
    return tuple(result)


def in_order(shape: Sequence[int], strides: Sequence[int], dense: Sequence[int]) -> bool:
    """True if dimensions of these strides are in the order of those that are ``dense``."""
    outwards = sorted((d for d in range(len(shape)) if shape[d] > 1), key=dense.__getitem__)
    return all(strides[a] < strides[b] for a, b in pairwise(outwards))


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a contiguous tensor of this shape."""
    return dense_strides(shape, (0,) * len(shape))


def result_strides(shape: Sequence[int], operands: Iterable[tuple[Sequence[int], Sequence[int]]]) -> tuple[int, ...]:
    """The strides of a value per element: those of the first operand of this shape, without gaps.

    ``operands`` are shapes with strides.
    """
    for sizes, strides in operands:
        if tuple(sizes) == tuple(shape):
            return dense_strides(shape, strides)
    return dense_strides(shape, (0,) * len(shape))


def broadcast_strides(shape: Sequence[int], strides: Sequence[int], to: Sequence[int]) -> tuple[int, ...]:
    """The strides of a tensor of ``shape`` viewed in the larger shape ``to``: 0 along every broadcast dimension."""
    lead = len(to) - len(shape)
    return (0,) * lead + tuple(0 if shape[d] == 1 != to[lead + d] else strides[d] for d in range(len(shape)))


def merge(
    shape: Sequence[int], strides: Sequence[Sequence[int]]
) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
    """Reorders and merges dimensions as far as all streams allow; the results run from the innermost outwards.

    The first stream that tells two dimensions apart decides which is inner. Dimensions of size 1 vanish; if nothing
    is left, one dimension of size 1 remains.
    """

    def inside(a: int, b: int) -> bool:
        for stream in strides:
            x, y = abs(stream[a]), abs(stream[b])
            if x and y and x != y:
                return x < y
        return False

    # Insertion, not sort: a broadcast stream abstains, so "inside" is no total order, and what it leaves open keeps
    # the order of the shape.
    order: list[int] = []
    for d in reversed([d for d in range(len(shape)) if shape[d] != 1]):
        position = len(order)
        for i in reversed(range(len(order))):
            if inside(d, order[i]):
                position = i
            elif inside(order[i], d):
                break
        order.insert(position, d)

    sizes: list[int] = []
    merged: list[list[int]] = [[] for _ in strides]
    for d in order:
        if sizes and all(s[d] == m[-1] * sizes[-1] for s, m in zip(strides, merged, strict=True)):
            sizes[-1] *= shape[d]
            continue
        sizes.append(shape[d])
        for s, m in zip(strides, merged, strict=True):
            m.append(s[d])
    if not sizes:
        return (1,), tuple((1,) for _ in strides)
    return tuple(sizes), tuple(tuple(m) for m in merged)


def power_of_two(n: int) -> int:
    """The smallest power of two that is no less."""
    return 1 << max(0, n - 1).bit_length()

"""Arithmetic of strides: dense, broadcast and merged dimensions. Pure functions of integers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

#: Maximum number of outer dimensions, after merging, that fit in the structs of ``kernels/core/layout.cuh``.
MAX_RANK = 24


def dimension_words(sizes: Sequence[int], strides: Sequence[Sequence[int]], rank: int = MAX_RANK) -> list[int]:
    """Returns the kernel's ``Dimensions`` as 64-bit words: rank, sizes, multipliers, and the strides of each stream.

    Each group of words is padded to ``rank`` dimensions.
    """
    padded = [*sizes, *[1] * (rank - len(sizes))]
    words = [len(sizes), *padded, *map(multiplier, padded)]
    for stream in strides:
        words += [*stream, *[0] * (rank - len(stream))]
    return words


def multiplier(divisor: int) -> int:
    """Returns the multiplier with which ``quotient`` in ``kernels/core/layout.cuh`` divides, as a signed word.

    Division of indices below 2^63 is exact. With ``bits`` the bit length of divisor - 1, the multiplier exceeds
    2^(63 + bits) / divisor by at most 1, so index * multiplier / 2^(63 + bits) is too large by less than 1 / divisor.
    """
    if divisor < 2:
        return 0
    unsigned = (1 << 63 + (divisor - 1).bit_length()) // divisor + 1
    return unsigned - (1 << 64 if unsigned >> 63 else 0)


def dense_strides(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """Returns the strides of a new tensor of this shape without gaps, with its dimensions in the order of ``strides``.

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
    """True if ``strides`` order the dimensions as the ``dense`` strides do. Dimensions of size 1 are ignored."""
    outwards = sorted((d for d in range(len(shape)) if shape[d] > 1), key=dense.__getitem__)
    return all(strides[a] < strides[b] for a, b in pairwise(outwards))


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Returns the strides of a contiguous tensor of this shape."""
    return dense_strides(shape, (0,) * len(shape))


def result_strides(shape: Sequence[int], operands: Iterable[tuple[Sequence[int], Sequence[int]]]) -> tuple[int, ...]:
    """Returns the strides of a value per element: those of the first operand of this shape, without gaps.

    ``operands`` are pairs of shape and strides.
    """
    for sizes, strides in operands:
        if tuple(sizes) == tuple(shape):
            return dense_strides(shape, strides)
    return dense_strides(shape, (0,) * len(shape))


def broadcast_strides(shape: Sequence[int], strides: Sequence[int], to: Sequence[int]) -> tuple[int, ...]:
    """Returns the strides of a tensor broadcast to the larger shape ``to``: 0 along every broadcast dimension."""
    lead = len(to) - len(shape)
    return (0,) * lead + tuple(0 if shape[d] == 1 != to[lead + d] else strides[d] for d in range(len(shape)))


def merge(
    shape: Sequence[int], strides: Sequence[Sequence[int]]
) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
    """Reorders and merges dimensions as far as all streams allow. Returns sizes and strides, innermost first.

    The first stream whose strides of two dimensions differ, and are not 0, decides which one is inner. Dimensions of
    size 1 are dropped; if none is left, one dimension of size 1 remains.
    """

    def inside(a: int, b: int) -> bool:
        for stream in strides:
            x, y = abs(stream[a]), abs(stream[b])
            if x and y and x != y:
                return x < y
        return False

    # Insertion, since sort() needs a total order and "inside" is none: a broadcast stream decides nothing. Dimensions
    # that no stream orders keep the order of the shape.
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
    """Returns the smallest power of two that is not less than ``n``."""
    return 1 << max(0, n - 1).bit_length()

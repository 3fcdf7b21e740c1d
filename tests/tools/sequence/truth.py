"""Truths of CTC, each independent of the library's formula and of the others.

`by_paths`      every path, in fractions: exact, for a few frames
`in_digits`     the recursion forwards and backwards, on mpmath numbers of 50 digits
`of_uniform`    closed form for equally likely classes: exact, for any size
`in_float64`    the recursion on logarithms, along arrays of states, with the conventions for -inf and NaN
`by_matrices`   products of torch's vectors and matrices, which autograd differentiates any number of times
`best_path`     the most probable path, in float64, with ties broken as documented

A row has the numbers of one frame, one per class: factors y for the exact truths, their logarithms for those in
floating point. `occ[t][c]` is the probability that frame t emits class c, given the target.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import product
from math import comb, inf, nan
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy
from mpmath import mp, mpf
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor

Number = TypeVar("Number", Fraction, Any)
Floats = NDArray[numpy.float64]

#: Decimal digits of `in_digits`.
DIGITS = 50


class Exact(NamedTuple):
    """Sum of the products of all paths, and occ; occ is None where no path has a product above 0."""

    p: Fraction
    occ: list[list[Fraction]] | None


def collapsed(path: Sequence[int], blank: int) -> tuple[int, ...]:
    """Returns the labels that a path spells: repeats merged, blanks removed."""
    return tuple([c for t, c in enumerate(path) if c != blank and (t == 0 or c != path[t - 1])])


def by_paths(rows: Sequence[Sequence[Fraction]], target: Sequence[int], blank: int = 0) -> Exact:
    """Enumerates all paths of classes."""
    classes = len(rows[0]) if rows else 0
    occ = [[Fraction(0)] * classes for _ in rows]
    p = Fraction(0)
    for path in product(range(classes), repeat=len(rows)):
        if collapsed(path, blank) != tuple(target):
            continue
        weight = Fraction(1)
        for row, c in zip(rows, path, strict=True):
            weight *= row[c]
        p += weight
        for t, c in enumerate(path):
            occ[t][c] += weight
    return Exact(p, [[x / p for x in row] for row in occ] if p else None)


def states_of(target: Sequence[int], blank: int) -> list[int]:
    """Returns the classes of the states: blanks around and between the labels."""
    return [blank, *[x for label in target for x in (label, blank)]]


def predecessors(states: Sequence[int], s: int, blank: int) -> list[int]:
    """Returns the states from which a path may reach state ``s``: itself, the one before, and the label before that."""
    found = [s] + [s - 1] * (s > 0)
    return found + [s - 2] * (s > 1 and states[s] not in (blank, states[s - 2]))


class Recursion(NamedTuple):
    """Loss, and occ as a list of rows; occ is None for impossible targets."""

    loss: Any
    occ: list[list[Any]] | None


def in_digits(log_rows: Sequence[Sequence[float]], target: Sequence[int], blank: int = 0) -> Recursion:
    """Returns loss and occ by the recursion from both ends, in all digits; -inf has factor 0."""
    with mp.workdps(DIGITS):
        rows = [[mp.exp(mpf(x)) for x in row] for row in log_rows]
        return _recursion(rows, target, blank, mpf(0), mpf(1), lambda p: -mp.log(p) if p else inf)


def in_fractions(rows: Sequence[Sequence[Fraction]], target: Sequence[int], blank: int = 0) -> Exact:
    """Runs the recursion on factors in fractions, to compare it with `by_paths`."""
    found = _recursion(rows, target, blank, Fraction(0), Fraction(1), lambda p: p)
    return Exact(found.loss, found.occ)


def _recursion(
    rows: Sequence[Sequence[Number]],
    target: Sequence[int],
    blank: int,
    zero: Number,
    one: Number,
    loss: Callable[[Number], Any],
) -> Recursion:
    states, frames = states_of(target, blank), len(rows)
    reached = [one] + [zero] * (len(states) - 1)  # before the first frame: in the first blank, or at its label
    alphas = []
    for t, row in enumerate(rows):
        if t == 0:
            reached = [one if s < 2 else zero for s in range(len(states))]
        else:
            reached = [sum((reached[p] for p in predecessors(states, s, blank)), zero) for s in range(len(states))]
        reached = [x * row[c] for x, c in zip(reached, states, strict=True)]
        alphas.append(reached)
    ends = [s for s in (len(states) - 1, len(states) - 2) if s >= 0]
    p = sum((reached[s] for s in ends), zero)
    if p == 0:
        return Recursion(loss(p), None)
    followers: list[list[int]] = [[] for _ in states]
    for s in range(len(states)):
        for before in predecessors(states, s, blank):
            followers[before].append(s)
    occ = [[zero] * len(row) for row in rows]
    left = [one if s in ends else zero for s in range(len(states))]  # products of the frames after t
    for t in reversed(range(frames)):
        for s, c in enumerate(states):
            occ[t][c] += alphas[t][s] * left[s] / p
        arriving = [x * rows[t][c] for x, c in zip(left, states, strict=True)]
        left = [sum((arriving[f] for f in followers[s]), zero) for s in range(len(states))]
    return Recursion(loss(p), occ)


def of_uniform(frames: int, classes: int, target: Sequence[int], blank: int = 0) -> Exact:
    """Counts paths of rows of 1 / classes: those that end in label j at frame t are binomial coefficients."""
    labels = len(target)
    repeats = [sum(target[i] == target[i - 1] for i in range(1, j + 1)) for j in range(labels)]
    every = repeats[-1] if labels else 0
    count = comb(frames + labels - every, 2 * labels) if frames >= labels + every else 0
    if not count:
        return Exact(Fraction(0), None)

    def ending(t: int, j: int, repeats_of: Sequence[int]) -> int:
        above = t + 1 + j - repeats_of[j]
        return comb(above, 2 * j + 1) if above >= 0 else 0

    backwards = [every - x for x in reversed(repeats)]
    occ = [[Fraction(0)] * classes for _ in range(frames)]
    for t in range(frames):
        for j, label in enumerate(target):
            paths = ending(t, j, repeats) * ending(frames - 1 - t, labels - 1 - j, backwards)
            occ[t][label] += Fraction(paths, count)
        occ[t][blank] = 1 - sum(occ[t], Fraction(0))
    return Exact(Fraction(count, classes**frames), occ)


def in_float64(log_probs: Floats, target: Sequence[int], blank: int = 0) -> tuple[float, Floats]:
    """Returns loss and occ of one sample.

    They are inf and 0 if the target is impossible, and NaN in all frames if a path may pass a NaN or +inf.
    """
    frames, classes = log_probs.shape
    states = numpy.asarray(states_of(target, blank))
    last = len(states) - 1
    skips = numpy.zeros(len(states), bool)
    skips[2:] = (states[2:] != blank) & (states[2:] != states[:-2])
    emitted = log_probs[:, states] if frames else numpy.zeros((0, len(states)))
    bad = numpy.isnan(emitted) | (emitted == inf)
    start = numpy.arange(len(states)) < 2
    end = numpy.arange(len(states)) >= last - 1
    if not frames:
        return (0.0 if last == 0 else inf), numpy.zeros((0, classes))
    open_ = bad | (emitted > -inf)
    forwards = _reachable(open_, start, skips, False)
    backwards = _reachable(open_[::-1], end, skips, True)[::-1]
    on_path = forwards & backwards
    if not on_path.any():
        return inf, numpy.zeros((frames, classes))
    if (on_path & bad).any():
        return nan, numpy.full((frames, classes), nan)
    plain = numpy.where(on_path, emitted, -inf)
    alpha = _sums(plain, start, skips, False)
    beta = _sums(plain[::-1], end, skips, True)[::-1]
    total = numpy.logaddexp.reduce(alpha[-1, end])
    share = numpy.where(on_path, alpha + beta - numpy.where(on_path, plain, 0.0) - total, -inf)
    occ = numpy.zeros((frames, classes))
    for s, c in enumerate(states):
        occ[:, c] += numpy.exp(share[:, s])
    return -float(total), occ / occ.sum(1, keepdims=True)


def _shifted(x: Any, by: int, backwards: bool, fill: Any) -> Any:
    """Returns for each state the one ``by`` places before it, or after it if ``backwards``."""
    found = numpy.full_like(x, fill)
    if by < len(x):
        if backwards:
            found[:-by] = x[by:]
        else:
            found[by:] = x[:-by]
    return found


def _reachable(open_: Any, start: Any, skips: Any, backwards: bool) -> Any:
    """Returns the states that a path can be in, frame by frame from the beginning."""
    found = numpy.zeros_like(open_)
    state = start
    for t in range(len(open_)):
        if t:
            jump = _shifted(state & skips, 2, True, False) if backwards else _shifted(state, 2, False, False) & skips
            state = state | _shifted(state, 1, backwards, False) | jump
        state = found[t] = state & open_[t]
    return found


def _sums(emitted: Any, start: Any, skips: Any, backwards: bool) -> Any:
    """Returns logarithms of the sums of all paths from the beginning, including the frame's own factor."""
    found = numpy.full_like(emitted, -inf)
    state = numpy.where(start, 0.0, -inf)
    for t in range(len(emitted)):
        if t:
            whole = state
            jump = (
                _shifted(numpy.where(skips, whole, -inf), 2, True, -inf)
                if backwards
                else numpy.where(skips, _shifted(whole, 2, False, -inf), -inf)
            )
            state = numpy.logaddexp(numpy.logaddexp(whole, _shifted(whole, 1, backwards, -inf)), jump)
        state = found[t] = state + emitted[t]
    return found


def by_matrices(log_probs: Tensor, target: Sequence[int], blank: int = 0) -> Tensor:
    """Returns the loss of one sample of a few frames, whose paths have probabilities that float64 can hold."""
    import torch

    states = states_of(target, blank)
    moves = torch.zeros(len(states), len(states), dtype=log_probs.dtype, device=log_probs.device)
    for s in range(len(states)):
        moves[s, predecessors(states, s, blank)] = 1.0
    factors = log_probs[:, states].exp()
    alpha = factors[0] * (torch.arange(len(states), device=log_probs.device) < 2)
    for row in factors[1:]:
        alpha = (moves @ alpha) * row
    return -alpha[-2:].sum().log()


class Best(NamedTuple):
    """Class of each frame, position of its label in the target (-1 for blank), and the sum of the path's logarithms.

    Classes and positions are -1 where there is no path.
    """

    labels: list[int]
    positions: list[int]
    score: Any


def best_path(log_rows: Sequence[Sequence[Any]], target: Sequence[int], blank: int = 0) -> Best:
    """Returns the path with the largest sum.

    Ties are broken from the end: the last label wins over the last blank, staying in a state wins over coming from the
    state before, and that wins over skipping a blank.
    """
    states = states_of(target, blank)
    frames = len(log_rows)
    score: list[Any] = [0.0 if s < 2 else -inf for s in range(len(states))]
    came: list[list[int]] = []
    for t, row in enumerate(log_rows):
        if t:
            options = [predecessors(states, s, blank) for s in range(len(states))]
            chosen = []
            for of_state in options:
                best = of_state[0]
                for p in of_state[1:]:
                    if score[p] > score[best] or score[p] != score[p]:
                        best = p
                chosen.append(best)
            came.append(chosen)
            score = [score[p] for p in chosen]
        score = [-inf if x == -inf else x + row[c] for x, c in zip(score, states, strict=True)]
    last = len(states) - 1
    if not frames:
        return Best([], [], 0.0 if last == 0 else -inf)
    at = last
    if last and not (score[last] > score[last - 1] or score[last] != score[last]):
        at = last - 1
    total = score[at]
    if not (total > -inf):
        return Best([-1] * frames, [-1] * frames, total)
    path = [at]
    for chosen in reversed(came):
        path.append(chosen[path[-1]])
    path.reverse()
    return Best([states[s] for s in path], [s // 2 if s % 2 else -1 for s in path], total)

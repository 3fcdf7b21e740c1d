"""Covering arrays: few settings in which any two or three options take all combinations of their choices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations, product
from random import Random
from typing import Any


def covering_settings(options: Mapping[str, Sequence[Any]], strength: int = 2, seed: int = 0) -> list[dict[str, Any]]:
    """Returns settings of the options in which any ``strength`` of them take all their combinations.

    The algorithm is greedy: a setting starts from a missing combination, and takes for each other option the choice
    that adds the most missing combinations. Equal arguments return equal settings.
    """
    random, names = Random(seed), list(options)
    missing = {
        tuple(zip(chosen, picked, strict=True))
        for chosen in combinations(range(len(names)), strength)
        for picked in product(*(range(len(options[names[i]])) for i in chosen))
    }
    found = []
    for first in sorted(missing):
        if first not in missing:
            continue
        setting = dict(first)
        for i in random.sample(range(len(names)), len(names)):
            if i not in setting:
                gains = [_gain(missing, setting | {i: k}, i, strength) for k in range(len(options[names[i]]))]
                best = max(gains)
                setting[i] = random.choice([k for k, gain in enumerate(gains) if gain == best])
        missing -= set(combinations(sorted(setting.items()), strength))
        found.append({names[i]: options[names[i]][k] for i, k in sorted(setting.items())})
    return found


def _gain(missing: set[Any], setting: Mapping[int, int], new: int, strength: int) -> int:
    others = [x for x in sorted(setting.items()) if x[0] != new]
    with_new = (tuple(sorted((*x, (new, setting[new])))) for x in combinations(others, strength - 1))
    return sum(x in missing for x in with_new)

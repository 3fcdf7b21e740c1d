"""Representatives: a few losses that stand for all, for tests of shared behaviour rather than of a formula.

The structure of a definition determines the paths of a call through the library: the number of its operands, their
defaults, parameters, flags, a counterpart in torch. Together the representatives cover all of it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import fields
from functools import cache
from typing import Any

from cupylosses.definition.base import Operand
from cupylosses.definition.registry import registry
from cupylosses.engines.pointwise.definition import Loss

#: Fields of a definition that determine the formula, or explain it. All others are structure, including future ones.
FORMULA = frozenset({
    "name", "summary", "formula", "value", "reference", "kinks", "convention", "cases", "notes", "source", "places",
})  # fmt: skip
#: Fields of an operand that are not structure; its domain determines the samples.
MEANING = frozenset({"name", "doc", "domain"})

#: Counted fields, and the number from which more make no difference. A weight and a mask are operands too, so modified
#: versions of every loss have more than three operands.
COUNTED = {"operands": 3, "parameters": 2, "flags": 2}

Trait = tuple[Any, ...]


def traits(loss: Loss) -> list[Trait]:
    """Returns the structural traits of a definition."""
    found: list[Trait] = [(name, min(most, len(getattr(loss, name)))) for name, most in COUNTED.items()]
    found += [("choices", len(x.choices)) for x in loss.flags]
    found += [(x.name, bool(getattr(loss, x.name))) for x in fields(Loss) if x.name not in {*FORMULA, *COUNTED}]
    for position, operand in enumerate(loss.operands[: COUNTED["operands"]]):
        for x in fields(Operand):
            if x.name not in MEANING:
                found.append((position, x.name, getattr(operand, x.name) != x.default))
    return found


def representatives(losses: Iterable[Loss] | None = None) -> tuple[Loss, ...]:
    """Returns the fewest of these losses, by default of all, that together have every trait; in their order."""
    return _among(tuple(registry(Loss).values() if losses is None else losses))


@cache
def _among(losses: tuple[Loss, ...]) -> tuple[Loss, ...]:
    owners: dict[Trait, dict[Loss, None]] = {}
    for loss in losses:
        for trait in traits(loss):
            owners.setdefault(trait, {})[loss] = None
    chosen = _fewest(owners)
    return tuple(x for x in losses if x in chosen)


def _fewest(owners: Mapping[Trait, Collection[Loss]]) -> tuple[Loss, ...]:
    """Returns the smallest choice with an owner of each trait.

    It contains an owner of the rarest trait, and the fewest owners of the remaining traits.
    """
    if not owners:
        return ()
    rarest = min(owners.values(), key=len)
    choices = [(loss, *_fewest({t: x for t, x in owners.items() if loss not in x})) for loss in rarest]
    return min(choices, key=len)

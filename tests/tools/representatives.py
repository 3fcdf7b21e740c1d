"""A few losses that stand for all, where a test is about what every loss shares and not about a formula.

Which ways a call takes through the library is decided by the structure of a definition: the number of its operands,
what may stand for them, whether there are parameters, flags, a twin in torch. The representatives have all of it
between them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import fields
from functools import cache
from typing import Any

from cupylosses.definition.base import Operand
from cupylosses.engines.pointwise.definition import Loss, registry

#: Fields of a definition that say what is computed, or explain it. All others are structure, those to come included.
FORMULA = frozenset({
    "name", "summary", "formula", "value", "reference", "kinks", "convention", "cases", "notes", "source", "places",
})  # fmt: skip
#: The same of an operand; its domain decides what is sampled.
MEANING = frozenset({"name", "doc", "domain"})

#: What is counted, and from where on more make no difference. A weight and a mask are operands too, so there are more
#: operands than three among the forms of every loss.
COUNTED = {"operands": 3, "parameters": 2, "flags": 2}

Trait = tuple[Any, ...]


def traits(loss: Loss) -> list[Trait]:
    """What the structure of a definition consists of."""
    found: list[Trait] = [(name, min(most, len(getattr(loss, name)))) for name, most in COUNTED.items()]
    found += [("choices", len(x.choices)) for x in loss.flags]
    found += [(x.name, bool(getattr(loss, x.name))) for x in fields(Loss) if x.name not in {*FORMULA, *COUNTED}]
    for position, operand in enumerate(loss.operands[: COUNTED["operands"]]):
        for x in fields(Operand):
            if x.name not in MEANING:
                found.append((position, x.name, getattr(operand, x.name) != x.default))
    return found


def representatives(losses: Iterable[Loss] | None = None) -> tuple[Loss, ...]:
    """The fewest of these losses, by default of all, that have every trait which one of them has; in their order."""
    return _among(tuple(registry().values() if losses is None else losses))


@cache
def _among(losses: tuple[Loss, ...]) -> tuple[Loss, ...]:
    owners: dict[Trait, dict[Loss, None]] = {}
    for loss in losses:
        for trait in traits(loss):
            owners.setdefault(trait, {})[loss] = None
    chosen = _fewest(owners)
    return tuple(x for x in losses if x in chosen)


def _fewest(owners: Mapping[Trait, Collection[Loss]]) -> tuple[Loss, ...]:
    """The smallest choice with an owner of each trait: one of the rarest, and the fewest for what that one lacks."""
    if not owners:
        return ()
    rarest = min(owners.values(), key=len)
    choices = [(loss, *_fewest({t: x for t, x in owners.items() if loss not in x})) for loss in rarest]
    return min(choices, key=len)

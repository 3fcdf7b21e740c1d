"""The representatives together have every structure of a loss, and are as few as possible."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
from tools.representatives import FORMULA, MEANING, representatives, traits

from cupylosses.definition.base import Flag, Operand, Parameter
from cupylosses.definition.registry import registry
from cupylosses.engines.pointwise.definition import Loss

EVERY = tuple(registry(Loss).values())


def every_trait(losses: tuple[Loss, ...]) -> set[Any]:
    return {trait for loss in losses for trait in traits(loss)}


def loss(operands: int = 2, parameters: int = 0, flags: int = 0, **others: Any) -> Loss:
    """Returns a definition with this structure."""
    names = iter("abcdefghijkl")
    return Loss(
        name="loss",
        summary="",
        formula="",
        value="a",
        operands=tuple(Operand(next(names), "") for _ in range(operands)),
        parameters=tuple(Parameter(next(names), 1.0, "") for _ in range(parameters)),
        flags=tuple(Flag(next(names), False, "") for _ in range(flags)),
        **others,
    )


def test_every_structure_is_represented() -> None:
    assert every_trait(representatives()) == every_trait(EVERY)
    assert list(representatives()) == [x for x in EVERY if x in representatives()]


def test_none_could_be_spared() -> None:
    for fewer in combinations(representatives(), len(representatives()) - 1):
        assert every_trait(fewer) < every_trait(EVERY)


PLAIN = loss()
FIRST = PLAIN.operands[0]


@pytest.mark.parametrize(
    "other",
    [
        loss(operands=1),
        loss(operands=3),
        loss(parameters=1),
        loss(flags=1),
        loss(let={"x": "a"}),
        loss(derivatives={"a": "1"}),
        loss(torch="mse_loss"),
        loss(mean_of_rows=True),
        replace(PLAIN, operands=(replace(FIRST, integer=True), *PLAIN.operands[1:])),
        replace(PLAIN, operands=(FIRST, replace(PLAIN.operands[1], number=True))),
        replace(PLAIN, operands=(FIRST, replace(PLAIN.operands[1], default=0.0))),
    ],
    ids=lambda x: ",".join(str(t) for t in traits(x) if t not in traits(PLAIN)),
)
def test_another_structure_is_a_representative(other: Loss) -> None:
    assert representatives([PLAIN, other]) == (PLAIN, other)


def test_operands_are_one_two_or_several() -> None:
    several = loss(operands=3)
    assert representatives([several, loss(operands=4)]) == (several,)


def test_options_are_none_one_or_several() -> None:
    several = loss(parameters=2, flags=2)
    assert representatives([PLAIN, loss(parameters=1), several]) != (PLAIN, several)
    assert representatives([several, loss(parameters=3, flags=4)]) == (several,)
    bool_flag, choice = loss(flags=1), replace(loss(flags=1), flags=(Flag("c", False, "", (False, True, "exact")),))
    assert representatives([bool_flag, choice]) == (bool_flag, choice)


def test_another_formula_is_none() -> None:
    others = {"name": "other", "summary": "x", "formula": "x", "value": "b", "notes": "x", "cases": ({}, {})}
    others |= {"kinks": lambda: (), "convention": "x", "source": "x", "reference": lambda xp, a, b: a}
    others["places"] = {"value": ("x.py", 1)}
    assert set(others) == FORMULA
    assert representatives([PLAIN, replace(PLAIN, **others)]) == (PLAIN,)
    meaning = {"name": "x", "doc": "x", "domain": "sign"}
    assert set(meaning) == MEANING
    operands = (replace(FIRST, **meaning), PLAIN.operands[1])
    assert representatives([PLAIN, replace(PLAIN, value="x", operands=operands)]) == (PLAIN,)


def test_the_fewest_are_found() -> None:
    """A greedy choice by number of traits would need one more loss here."""
    most = replace(loss(parameters=1, flags=1), let={"x": "a"}, derivatives={"a": "1"})
    one = replace(loss(parameters=1), let={"x": "a"}, torch="x", mean_of_rows=True)
    two = replace(loss(flags=1), derivatives={"a": "1"}, module="x", warn_broadcast=True)
    assert representatives([most, one, two]) == (one, two)

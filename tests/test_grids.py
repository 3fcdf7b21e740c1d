"""Selections of settings: every value occurs in the short ones, every combination with ``--thorough``."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import grids
import pytest

from cupylosses.definition import Loss, registry


@pytest.fixture(params=[False, True], ids=["short", "thorough"])
def thorough(request: pytest.FixtureRequest) -> Iterator[bool]:
    before = grids.thorough()
    grids.set_thorough(request.param)
    yield request.param
    grids.set_thorough(before)


@pytest.mark.representatives
@pytest.mark.in_turn
@pytest.mark.kernels
@pytest.mark.parametrize("setting", range(len(grids.REPRESENTATIVES)))
def test_representatives_take_turns(loss: Loss, setting: int, request: pytest.FixtureRequest) -> None:
    """One loss per setting, and another one for the next."""
    items = [x for x in request.session.items if getattr(x, "function", None) is request.node.function]
    met = {x.callspec.params["setting"]: x.callspec.params["loss"] for x in items}
    if len(met) == len(grids.REPRESENTATIVES):  # unless the command line selects some of them
        assert set(met.values()) == set(grids.REPRESENTATIVES)
        assert len(items) == len(met) ** (2 if grids.thorough() else 1)


@pytest.mark.parametrize("axes", [("abc", "xy"), ("ab", "xyz", "pqrst"), ("abcd", "wxyz"), ("abc",)])
def test_each_value_of_each_axis_occurs(thorough: bool, axes: tuple[str, ...]) -> None:
    for times in (1, 2):
        found = grids.in_turn(*axes, times=times)
        if thorough or len(axes) == 1:
            assert found == list(product(*axes))
            continue
        assert max(map(len, axes)) <= len(found) <= times * max(map(len, axes))
        assert [set(x) for x in zip(*found, strict=True)] == [set(x) for x in axes]
        assert len(set(found)) == len(found)


@pytest.mark.skipif(grids.thorough(), reason="there is one round")
def test_another_round_meets_other_pairs() -> None:
    assert len(grids.in_turn("abcd", "wxyz", times=3)) == 12


def test_the_test_chooses(thorough: bool) -> None:
    assert grids.short_or_full("ab", "abc") == ("abc" if thorough else "ab")


@pytest.mark.thorough
def test_thorough_tests_run_with_the_option_only() -> None:
    assert grids.thorough()


def test_parameters_have_names() -> None:
    loss = registry()["mse_loss"]
    values = [loss, {"beta": 0.5, "full": True}, {}, ("float32", "int8"), (1, 2), object(), "x", {"x": object()}]
    assert [grids.identity(x) for x in values] == [
        "mse_loss", "beta=0.5,full=True", "defaults", "float32-int8", None, None, None, None,
    ]  # fmt: skip

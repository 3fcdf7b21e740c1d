"""Selections of settings: every value occurs in the short ones, every combination with ``--thorough``."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from types import SimpleNamespace

import conftest
import grids
import pytest

from cupylosses.definition.registry import registry
from cupylosses.engines.pointwise.definition import Loss


@pytest.fixture(params=[False, True], ids=["short", "thorough"])
def thorough(request: pytest.FixtureRequest) -> Iterator[bool]:
    before = grids.thorough()
    grids.set_thorough(request.param)
    yield request.param
    grids.set_thorough(before)


class Item:
    """A test marked in_turn that runs kernels, as pytest collects it for a loss and a setting."""

    originalname = "test"

    def __init__(self, loss: Loss, setting: int, names_losses: bool) -> None:
        self.callspec = SimpleNamespace(params={"loss": loss}, indices={"loss": 0, "setting": setting})
        self.marks = {"in_turn": [pytest.mark.in_turn.mark], "kernels": [pytest.mark.kernels.mark]}
        if names_losses:
            self.marks["parametrize"] = [pytest.mark.parametrize(("loss", "setting"), []).mark]

    def iter_markers(self, name: str) -> list[pytest.Mark]:
        return self.marks.get(name, [])

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return next(iter(self.iter_markers(name)), None)


@pytest.mark.parametrize("names_losses", [False, True])
def test_representatives_take_turns(thorough: bool, names_losses: bool) -> None:
    """Each setting runs with one of them, in turn; if the test itself names its losses, each setting runs with all."""
    count = len(grids.REPRESENTATIVES)
    kept = [
        [x for x in grids.REPRESENTATIVES if conftest.stays(Item(x, setting, names_losses))] for setting in range(count)
    ]
    assert {len(x) for x in kept} == {count if thorough or names_losses else 1}
    assert {x for some in kept for x in some} == set(grids.REPRESENTATIVES)


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
    loss = registry(Loss)["mse_loss"]
    values = [loss, {"beta": 0.5, "full": True}, {}, ("float32", "int8"), (1, 2), object(), "x", {"x": object()}]
    assert [grids.identity(x) for x in values] == [
        "mse_loss", "beta=0.5,full=True", "defaults", "float32-int8", None, None, None, None,
    ]  # fmt: skip

"""The checks of margin losses: losses of rows of scores that the labels' scores should exceed."""

from __future__ import annotations

from typing import Any, ClassVar

from comparing.matrix import SizedMatrix
from cupylosses.engines.row_margin.definition import MarginLoss
from cupylosses.testing.row_margin.check import LAYOUTS


class MarginMatrix(SizedMatrix):
    """Checks of every parameter, dtype, reduction and layout."""

    Definition: ClassVar = MarginLoss
    section = "losses of rows of scores"
    heading = "losses of rows of scores"
    layouts = tuple(LAYOUTS)
    array_layouts = ("subwarp", "apart")
    usual = "subwarp"
    repeated_as = (("mean", "subwarp"), ("mean", "block"), ("none", "long lists"))
    # Only the second loss has lists of labels.
    layouts_of_first = ("few", "block", "apart", "thread_per_row")
    layouts_of_others = ("block", "long lists", "long lists, block")

    loss: MarginLoss

    @property
    def cases(self) -> list[dict[str, Any]]:
        """The definition's cases, each further argument that changes the result alone, and all of them together."""
        more: list[dict[str, Any]] = [{"mask": True}]
        if not self.loss.several:
            more += [{"weight": True}, {"ignore_index": 1}]
        every = {k: v for case in self.loss.cases for k, v in case.items()} | {k: v for x in more for k, v in x.items()}
        return [*map(dict, self.loss.cases), *more, every]

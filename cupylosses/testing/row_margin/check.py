"""Checks of losses of rows of scores. A layout determines how the engine processes rows, or how scores are stored."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from cupylosses import checks
from cupylosses.engines.row_margin.call import without
from cupylosses.engines.row_margin.definition import END, MarginLoss
from cupylosses.engines.softmax.definition import IGNORED
from cupylosses.testing.check import GIVEN, Check
from cupylosses.testing.row_margin import eager
from cupylosses.testing.row_margin.truth import truth
from cupylosses.testing.truth import Truth

if TYPE_CHECKING:
    from torch import Tensor, dtype

#: Arguments that are arrays if their value is True.
ARRAYS = ("weight", "mask")
#: Number of places in the lists of labels, unless a layout has another.
PLACES = 5


class Layout(NamedTuple):
    """Shape and class dimension of the scores; number of places in lists of labels, and length of the longest list."""

    shape: tuple[int, ...]
    class_dim: int = 1
    places: int = PLACES
    longest: int = 4


LAYOUTS: Mapping[str, Layout] = {
    "subwarp": Layout((37, 43)),
    "few": Layout((70, 5)),
    "block": Layout((5, 1031)),
    "apart": Layout((3, 43, 5, 4)),
    "thread_per_row": Layout((2, 11, 64, 64)),
    "thread_per_list": Layout((4099, 9), 1, 9, 4),
    "long lists": Layout((5, 133), 1, 133, 90),
    "long lists, block": Layout((3, 1031), 1, 1031, 300),
}


@dataclass(frozen=True)
class MarginCheck(Check):
    """Check of a loss of rows of scores.

    ``case`` has parameters, flags and other arguments by name; True stands for an argument that is an array. ``shape``
    is a requested shape of the scores, with the classes in dimension 1.
    """

    Definition: ClassVar = MarginLoss

    loss: MarginLoss
    layout: str = "subwarp"
    shape: tuple[int, ...] | None = None

    @cached_property
    def values(self) -> dict[str, Any]:
        """All parameters and flags by name."""
        known = self.loss.values()
        return self.loss.values({k: v for k, v in self.case.items() if k in known})

    @cached_property
    def laid(self) -> Layout:
        """Sizes."""
        return Layout(self.shape, min(1, len(self.shape) - 1)) if self.shape else LAYOUTS[self.layout]

    @cached_property
    def names(self) -> list[str]:
        return [*(x.name for x in self.loss.operands), *(x for x in ARRAYS if self.case.get(x))]

    @cached_property
    def gradients_of(self) -> tuple[bool, ...]:
        return tuple(i == 0 for i in range(len(self.names)))

    @property
    def possible(self) -> bool:
        floating = len(self.dtypes) == 1 and self.dtypes[0] in checks.FLOATING
        of_one = not self.loss.several or not {"weight", "ignore_index"} & {*self.case}
        return floating and of_one and (self.layout in LAYOUTS or (self.layout == GIVEN and bool(self.shape)))

    @cached_property
    def options(self) -> dict[str, Any]:
        options = {k: v for k, v in self.case.items() if k not in ARRAYS}
        return {**options, "reduction": self.reduction, "class_dim": self.laid.class_dim}

    def small(self, layout: str | None = None) -> MarginCheck:
        return replace(self, layout=layout or next(iter(LAYOUTS)), shape=None)

    def operands(self) -> list[Tensor]:
        import torch

        shape, dim, places, longest = self.laid
        rows, classes = without(shape, dim), shape[dim]
        generator = torch.Generator().manual_seed(self.seed)
        kind = getattr(torch, self.dtypes[0])
        operands = [torch.randn(shape, generator=generator, dtype=torch.float64).to(kind)]
        if self.loss.several:
            labels = torch.randint(classes, (*rows, places), generator=generator)
            length = torch.randint(longest + 1, (*rows, 1), generator=generator)
            place = torch.arange(places)
            operands.append(torch.where(place < length, labels, END).movedim(-1, dim).contiguous())
        else:
            labels = torch.randint(classes, rows, generator=generator)
            if labels.numel() > 1:
                out = torch.rand(rows, generator=generator) < 0.125
                labels[out] = self.case.get("ignore_index", IGNORED)
            operands.append(labels)
        if "weight" in self.names:
            weights = torch.rand(classes, generator=generator) + 0.25
            weights[::5] = 0
            operands.append(weights.to(kind))
        if "mask" in self.names:
            operands.append(torch.rand(rows, generator=generator) < 0.75)
        return [x.to(self.device) for x in operands]

    def torch(self) -> list[Callable[..., Tensor]]:
        ignored = self.case.get("ignore_index", IGNORED)
        twin = eager.twin(self.loss, self.values, self.reduction, self.laid.class_dim, ignored)
        return [] if twin is None or "mask" in self.names else [twin]

    def result(self, operands: Sequence[Tensor]) -> tuple[tuple[int, ...], dtype]:
        rows = without(self.laid.shape, self.laid.class_dim)
        return rows if self.reduction == "none" else (), operands[0].dtype

    def truth(self, operands: Sequence[Tensor], grad_output: Any, where: str) -> Truth:
        named = {n: x.detach().to(where) for n, x in zip(self.names, operands, strict=True)}
        options = {"ignore_index": IGNORED, **self.options}
        return truth(named, self.values, options, self.loss.several, grad_output)

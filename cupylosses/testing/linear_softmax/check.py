"""Checks of softmax losses of a linear layer.

A layout determines how the engine processes a call: all logits at once or in chunks, short or long rows, a transposed
weight, or packed rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from cupylosses import checks
from cupylosses.engines.linear_softmax.definition import LinearSoftmaxLoss
from cupylosses.engines.softmax.definition import IGNORED
from cupylosses.interop import ITEMSIZE
from cupylosses.testing.check import GIVEN, Check
from cupylosses.testing.eager import promoted
from cupylosses.testing.linear_softmax import truth
from cupylosses.testing.softmax import eager
from cupylosses.testing.truth import Truth

if TYPE_CHECKING:
    from torch import Tensor, dtype

#: Arguments that are arrays if their value is True, in the order of the operands.
ARRAYS = ("linear_bias", "weight", "mask")


#: Number of features of an input whose logits have a requested shape.
FEATURES = 64


class Layout(NamedTuple):
    """Sizes of a layer: rows, features and classes.

    ``chunk`` is the number of rows of a chunk, or None for one chunk of all rows. ``transposed`` is True if the weight
    is transposed, ``packed`` if rows that do not count are left out.
    """

    rows: int
    features: int
    classes: int
    chunk: int | None = None
    transposed: bool = False
    packed: bool = False


LAYOUTS: Mapping[str, Layout] = {
    "one_chunk": Layout(37, 24, 43),
    "chunks": Layout(37, 24, 43, chunk=8),
    "short_rows": Layout(37, 16, 10),
    "long_rows": Layout(13, 16, 1031, chunk=8),
    "transposed_weight": Layout(37, 24, 43, transposed=True),
    "packed": Layout(37, 24, 43, packed=True),
}


@dataclass(frozen=True)
class LinearSoftmaxCheck(Check):
    """Check of a softmax loss of a linear layer with a kind of target, by default its first.

    ``case`` has parameters, flags and other arguments by name; True stands for an argument that is an array. ``dtypes``
    are those of the layer and of class probabilities. ``shape`` is a requested shape of the logits.
    """

    Definition: ClassVar = LinearSoftmaxLoss

    loss: LinearSoftmaxLoss
    layout: str = "one_chunk"
    kind: str = ""
    shape: tuple[int, ...] | None = None

    #: Backward rescales gradients that were written for another upstream gradient, which rounds them again.
    rescales: ClassVar[bool] = True
    multiplies: ClassVar[bool] = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "kind", self.kind or self.loss.of_logits.targets[0])

    @property
    def possible(self) -> bool:
        floating = all(x in checks.FLOATING for x in self.dtypes)
        of_indices = {*self.loss.of_logits.only_of_indices, "ignore_index"}
        indices = self.kind == "indices"
        wide = self.case.get("logits_dtype")
        return (
            floating
            and (indices or not {*self.case} & of_indices)
            and (indices or self.layout != "packed" or bool(self.case.get("mask")))
            and (len(self.dtypes) == 1 or not indices)
            and (wide is None or self.dtypes[0] in ("float16", "bfloat16"))
            and (self.layout in LAYOUTS or (self.layout == GIVEN and len(self.shape or ()) == 2))
        )

    @cached_property
    def laid(self) -> Layout:
        """Sizes."""
        if self.shape is not None:
            rows, classes = self.shape
            return Layout(rows, FEATURES, classes)
        return LAYOUTS[self.layout]

    @cached_property
    def names(self) -> list[str]:
        return [*(x.name for x in self.loss.operands), *(x for x in ARRAYS if self.case.get(x) is True)]

    @cached_property
    def options(self) -> dict[str, Any]:
        options = {k: v for k, v in self.case.items() if k not in self.names}
        laid = self.laid
        if laid.chunk:
            size = ITEMSIZE[str(self.case.get("logits_dtype") or self.dtypes[0])]
            options["max_memory"] = laid.chunk * (laid.classes + 64 // size) * size
        return {**options, **({"skip_ignored": True} if laid.packed else {}), "reduction": self.reduction}

    @cached_property
    def gradients_of(self) -> tuple[bool, ...]:
        target = self.kind != "indices"
        return (True, True, target, *(x == "linear_bias" for x in self.names[3:]))

    @property
    def case_words(self) -> str:
        words = [k if v is True else f"{k}={v}" for k, v in self.case.items()]
        return " ".join([*([self.kind] if self.kind != "indices" else []), *words])

    def small(self, layout: str | None = None) -> LinearSoftmaxCheck:
        return replace(self, layout=layout or next(iter(LAYOUTS)), shape=None)

    def operands(self) -> list[Tensor]:
        drawn = dict(self._draw())
        return [drawn[x].to(self.device) for x in self.names]

    def _draw(self) -> Iterator[tuple[str, Tensor]]:
        import torch

        rows, features, classes, *_ = laid = self.laid
        generator = torch.Generator().manual_seed(self.seed)
        kind = getattr(torch, self.dtypes[0])

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        yield "input", draw(rows, features).to(kind)
        # Makes logits as large as in the checks of losses of rows.
        weight = (3 * draw(classes, features) / features**0.5).to(kind)
        yield "linear_weight", weight.T.contiguous().T if laid.transposed else weight
        if self.kind == "indices":
            labels = torch.randint(classes, (rows,), generator=generator)
            if rows > 1:
                labels[torch.rand(rows, generator=generator) < 0.25] = self.case.get("ignore_index", IGNORED)
            yield "target", labels
        else:
            target = draw(rows, classes).softmax(-1).to(getattr(torch, self.dtypes[-1]))
            yield "target", target
        yield "linear_bias", draw(classes).to(kind)
        yield "weight", (torch.rand(classes, generator=generator) + 0.25).to(kind)
        yield "mask", torch.rand(rows, generator=generator) < 0.75

    def torch(self) -> list[Callable[..., Tensor]]:
        options = {k: v for k, v in self.case.items() if k not in (*ARRAYS, *truth.OWN)}
        options |= {"mask": True} if "mask" in self.names else {}
        expression = eager.twin(self.loss.of_logits, options, self.reduction, class_dim=1)
        if expression is None:
            return []
        names, wide = self.names, self.case.get("logits_dtype")

        def call(*operands: Tensor) -> Tensor:
            from torch.nn.functional import linear

            by_name = dict(zip(names, operands, strict=True))
            logits = linear(by_name["input"], by_name["linear_weight"], by_name.get("linear_bias"))
            logits = logits.float() if wide else logits
            weight = by_name.get("weight")
            return expression(logits, by_name["target"], weight.to(logits.dtype) if weight is not None else None)

        return [call]

    def result(self, operands: Sequence[Tensor]) -> tuple[tuple[int, ...], dtype]:
        import torch

        logits = torch.empty(1, dtype=truth.logits_dtype(operands[0], self.case))
        target = [x for x in operands[2:3] if x.is_floating_point()]
        return (self.laid.rows,) if self.reduction == "none" else (), promoted([logits, *target])

    def truth(self, operands: Sequence[Tensor], grad_output: Any, where: str) -> Truth:
        arguments = {**dict(zip(self.names, operands, strict=True)), **self.options}
        return truth.truth(self.loss.of_logits.name, self.names, arguments, grad_output, where)

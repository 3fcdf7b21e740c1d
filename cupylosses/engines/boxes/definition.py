"""Definition of a box loss, whose value is an expression of the edges and sizes of each operand's box.

An operand has shape (..., 4). Expressions name a part of its box by the operand and the part: ``boxes1_x1``,
``boxes1_width``. The format of the four components is an argument of each call, ``box_format``. A definition is written
once for all formats.

This module imports no array library, no CUDA and no compiler.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, wraps
from typing import Any, ClassVar, NamedTuple

from cupylosses.definition.base import COMMON_TEXTS, LEGACY, Definition, Flag, Operand, code_of
from cupylosses.definition.expressions import Part, check
from cupylosses.definition.registry import define as enter

#: Keyword arguments that all losses of the engine share, with their defaults.
COMMON: Mapping[str, Any] = {
    "reduction": "none", "weight": None, "mask": None, "normalizer": None, "out_dtype": None,
}  # fmt: skip

#: Number of components of a box.
COMPONENTS = 4

#: For each format, the expression of each part of a box in its components {0} to {3}. A size that is a component is not
#: computed from edges, which would lose digits.
FORMATS: Mapping[str, Mapping[str, str]] = {
    "xyxy": {"x1": "{0}", "y1": "{1}", "x2": "{2}", "y2": "{3}", "width": "{2} - {0}", "height": "{3} - {1}"},
    "xywh": {"x1": "{0}", "y1": "{1}", "x2": "{0} + {2}", "y2": "{1} + {3}", "width": "{2}", "height": "{3}"},
    "cxcywh": {
        "x1": "{0} - 0.5 * {2}", "y1": "{1} - 0.5 * {3}", "x2": "{0} + 0.5 * {2}", "y2": "{1} + 0.5 * {3}",
        "width": "{2}", "height": "{3}",
    },
}  # fmt: skip
PARTS = tuple(FORMATS["xyxy"])

BOX_FORMAT = Flag(
    "box_format",
    "xyxy",
    "Components of a box: 'xyxy' for left, top, right and bottom edge, 'xywh' for left and top edge, width and height, "
    "'cxcywh' for centre, width and height.",
    tuple(FORMATS),
)


class Box(NamedTuple):
    """Parts of boxes, as arrays without the dimension of components."""

    x1: Any
    y1: Any
    x2: Any
    y2: Any
    width: Any
    height: Any

    @classmethod
    def of(cls, x: Any, box_format: str) -> Box:
        """Returns the parts of boxes (..., 4) in a format."""
        a, b, c, d = (x[..., i] for i in range(COMPONENTS))
        if box_format == "xyxy":
            return cls(a, b, c, d, c - a, d - b)
        if box_format == "xywh":
            return cls(a, b, a + c, b + d, c, d)
        return cls(a - 0.5 * c, b - 0.5 * d, a + 0.5 * c, b + 0.5 * d, c, d)


@dataclass(frozen=True, eq=False, kw_only=True)
class BoxLoss(Definition):
    """A loss of boxes.

    ``let``        Named subexpressions of the value: expressions of the parts of boxes (`PARTS`).
    ``value``      Value of a pair of boxes, an expression of all these names.
    ``heavy``      Cost of a pair of boxes, as the ``heavy`` of an element-wise loss.
    ``tentative``  True if the value is infinite or NaN whenever a quotient or an angle in it is. Boxes are then first
                   evaluated without the edge cases of these, and again only if the value is not finite.
    ``reference``  Value through the array API: a function of ``xp``, of the operands (..., 4), and of parameters and
                   flags by name.
    """

    value: str
    let: Mapping[str, str] = field(default_factory=dict)
    reference: Callable[..., Any]
    heavy: int = 1
    tentative: bool = False

    #: Names of operands with one number per box: none. Weight and mask are not operands.
    row_operands: ClassVar[tuple[str, ...]] = ()

    def norm_of(self, parameters: Sequence[float]) -> str:
        """Returns "": box losses have no norms."""
        return ""

    @property
    def parts(self) -> tuple[str, ...]:
        return (*self.constants, *self.let)

    @cached_property
    def box_parts(self) -> tuple[str, ...]:
        """Names of the parts of all boxes in expressions."""
        return tuple(f"{x.name}_{part}" for x in self.operands for part in PARTS)

    def check_expressions(self) -> None:
        super().check_expressions()
        names = [*self.box_parts, *(x.name for x in self.options), *self.constants]
        for name, expression in self.let.items():
            check(expression, names, Part(self.name, name, self.places.get(name)))
            names.append(name)
        check(self.value, names, Part(self.name, "value", self.places.get("value")))

    @property
    def identity(self) -> tuple[Any, ...]:
        fields = (self.operands, self.value, self.let, self.constants, self.parameters, self.flags, self.tentative)
        return (*fields, code_of(getattr(self.reference, "__wrapped__", self.reference)))

    @cached_property
    def vector_slots(self) -> tuple[int, ...]:
        """Positions of the operands with components: all operands."""
        return tuple(range(len(self.operands)))

    @cached_property
    def setting_names(self) -> tuple[str, ...]:
        """Names of the settings, as for a loss of rows whose features are the components: the last dimension."""
        return ("reduction", *(x.name for x in self.options), "-1", "out_dtype")

    @property
    def common(self) -> Mapping[str, Any]:
        return COMMON

    @property
    def reserved(self) -> Collection[str]:
        return {*COMMON, *LEGACY, "unweighted", "self"}

    # ------------------------------------------------------------------------------------------------------------------
    # Documentation

    def describe_operand(self, operand: Operand) -> str:
        return (
            f"{operand.doc} Shape (N, 4), (4,), or any shape (..., 4) whose leading dimensions broadcast with those of "
            "the others; floating. Domain: any number."
        )

    @property
    def common_texts(self) -> Mapping[str, str]:
        return _COMMON_TEXTS

    @property
    def result_text(self) -> str:
        return (
            "With reduction 'none' one value per pair of boxes, in the broadcast shape of the leading dimensions; "
            "otherwise an array without dimensions. 'mean' divides the sum by the number of boxes that the mask keeps, "
            "'weighted_mean' by the sum of their weights, 'batchmean' by the size of the first dimension. A mean of no "
            "boxes is 0; if a mask leaves none, it is NaN with gradients of 0. Boxes of 16 bits are computed in "
            "float32, and so is their result. It belongs to the library and the device of the first operand, and has "
            "the promoted dtype of all operands, at least float32, unless `out_dtype` is given."
        )

    @property
    def gradient_text(self) -> str:
        return (
            f"Every operand is differentiable. {self.convention} Where the loss of a box is NaN, so is the gradient of "
            "the whole box."
        )

    @property
    def example_operands(self) -> Mapping[str, Any]:
        return dict(zip([x.name for x in self.operands], _SAMPLES, strict=False))


#: Operands of the examples in docstrings.
_SAMPLES: Sequence[Any] = ((0.0, 0.0, 4.0, 2.0), (1.0, 0.0, 3.0, 4.0))

_COMMON_TEXTS = COMMON_TEXTS | {
    "weight": "Factor of each box: a number, or an array that broadcasts to the shape of the boxes without their "
    "components; differentiable. A box of weight 0 contributes nothing to the value and the gradients of the operands, "
    "even if it is NaN. Default None, no weights.",
    "mask": "Bool array that broadcasts to the shape of the boxes without their components, True where a box counts. "
    "The gradients of the others are 0, and a mean does not count them. Default None, no mask.",
    "out_dtype": "Floating dtype of the result, of torch, of NumPy or by name. Default None, the promoted dtype of the "
    "operands, at least float32.",
}


def define_boxes(*, reference: Callable[..., Any], flags: tuple[Flag, ...] = (), **fields: Any) -> BoxLoss:
    """Makes a :class:`BoxLoss` and enters it in the registry, from which the public functions are built.

    ``reference`` takes a :class:`Box` for each operand. `box_format` is added to the flags.
    """

    @wraps(reference)
    def of_components(xp: Any, /, *operands: Any, box_format: str, **values: Any) -> Any:
        return reference(xp, *[Box.of(x, box_format) for x in operands], **values)

    return enter(BoxLoss(reference=of_components, flags=(*flags, BOX_FORMAT), **fields))

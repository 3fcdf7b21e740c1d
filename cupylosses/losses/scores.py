"""Margin losses of rows of scores: the labels should exceed all other classes by a margin."""

from cupylosses.definition.base import Flag, Operand, Parameter
from cupylosses.engines.row_margin.definition import define_margin

_SCORES = Operand("input", "The predicted scores of the classes.")
_MARGIN = Parameter("margin", 1.0, "Amount by which a label should exceed each other class.")
_BOUNDARY = (
    "A pair of scores that are exactly the margin apart is inactive, with gradient 0, as in torch. A row with equal "
    "infinite scores is NaN, as their difference is."
)


def _power(xp, excess, margin, p):
    return excess if p == 1 else excess * excess


multi_margin_loss = define_margin(
    name="multi_margin_loss",
    summary="Multi-class hinge loss: the score of the label should exceed every other score by a margin.",
    formula="(w_y / C) sum_{i != y} max(0, margin + input_i - input_y)^p",
    operands=(
        _SCORES,
        Operand(
            "target",
            "Class indices of any integer dtype, in the shape of `input` without its class dimension.",
            integer=True,
        ),
    ),
    parameters=(_MARGIN,),
    flags=(Flag("p", 1, "Power of each hinge.", choices=(1, 2)),),
    hinge="where(p, square(excess), excess)",
    linear=(("p", 1),),
    reference=_power,
    torch="multi_margin_loss",
    module="MultiMarginLoss",
    positional="input target p margin weight size_average reduce reduction",
    convention=f"{_BOUNDARY} A row of one class has no pairs and has loss 0.",
    cases=({}, {"p": 2}, {"margin": 0.3}),
    notes="The margin is added to the difference of two scores, so that large scores do not swallow it, as they do in "
    "torch.",
    source="K. Crammer, Y. Singer, On the algorithmic implementation of multiclass kernel-based vector machines, JMLR "
    "2, 2001.",
)


def _excess(xp, excess, margin):
    return excess


multilabel_margin_loss = define_margin(
    name="multilabel_margin_loss",
    summary="Multi-label hinge loss: the scores of all labels should exceed the scores of all other classes by a "
    "margin.",
    formula="(1 / C) sum_{j in T} sum_{i not in T} max(0, margin + input_i - input_j)",
    operands=(
        _SCORES,
        Operand(
            "target",
            "Lists of labels: class indices of any integer dtype, in the shape of `input` except that the class "
            "dimension holds the labels of a row. A list ends before the first -1, and entries after that are ignored. "
            "A label that is listed twice counts twice.",
            integer=True,
        ),
    ),
    parameters=(_MARGIN,),
    several=True,
    reference=_excess,
    torch="multilabel_margin_loss",
    module="MultiLabelMarginLoss",
    positional="input target size_average reduce reduction",
    convention=f"{_BOUNDARY} A row without labels, and one in which every class is a label, has no pairs and has "
    "loss 0.",
    cases=({}, {"margin": 0.3}),
    notes="Torch's margin is 1. Rows with many labels are sorted on chip, so that a row takes time proportional to "
    "C log |T|.",
    source="J. Weston, C. Watkins, Support vector machines for multi-class pattern recognition, ESANN 1999, for "
    "several labels.",
)

"""Losses of bounding boxes: the overlap of two boxes, and distances between boxes that do not overlap."""

import math

from cupylosses.definition.base import Flag, Operand, Parameter
from cupylosses.engines.boxes.definition import define_boxes
from cupylosses.reference_math import detached

_OPERANDS = (Operand("boxes1", "The predicted boxes."), Operand("boxes2", "The boxes to compare with."))
_EPS = Parameter("eps", 1e-7, "Added to divisors, in the square of the unit of the boxes.", minimum=0.0)

_OVERLAP = {
    "overlap_width": "smaller_edge(boxes1_x2, boxes2_x2) - larger_edge(boxes1_x1, boxes2_x1)",
    "overlap_height": "smaller_edge(boxes1_y2, boxes2_y2) - larger_edge(boxes1_y1, boxes2_y1)",
    "overlap": "positive_area(overlap_width, overlap_height)",
    "joint": "boxes1_width * boxes1_height + boxes2_width * boxes2_height - overlap",
}
_IOU = {**_OVERLAP, "iou": "ratio(overlap, joint + eps)"}
_HULL = {
    "hull_width": "larger_edge(boxes1_x2, boxes2_x2) - smaller_edge(boxes1_x1, boxes2_x1)",
    "hull_height": "larger_edge(boxes1_y2, boxes2_y2) - smaller_edge(boxes1_y1, boxes2_y1)",
}
_DISTANCE = {
    **_IOU,
    **_HULL,
    "distance": "0.25 * (square(boxes1_x1 + boxes1_x2 - boxes2_x1 - boxes2_x2) "
    "+ square(boxes1_y1 + boxes1_y2 - boxes2_y1 - boxes2_y2))",
    "apart": "ratio(distance, square(hull_width) + square(hull_height) + eps)",
}
_ANGLES = 4 / math.pi**2

_TIES = (
    "Where edges coincide, each box has half of the derivative. Boxes that touch do not overlap: their intersection is "
    "0 with gradient 0."
)
_NOTES = (
    "Values and gradients are those of torchvision's function. Edges are not checked: a box whose right edge lies left "
    "of its left edge has the value that the formula gives."
)
_SYMBOLS = (
    "IoU is the area I of the intersection over the area U of the union plus eps, C the area of the smallest box that "
    "encloses both"
)


def _ratio(xp, a, b):
    nothing = (a == 0) & (b == 0)
    return xp.where(nothing, xp.zeros_like(a), a / xp.where(nothing, xp.ones_like(b), b))


def _overlap(xp, a, b):
    width = xp.minimum(a.x2, b.x2) - xp.maximum(a.x1, b.x1)
    height = xp.minimum(a.y2, b.y2) - xp.maximum(a.y1, b.y1)
    area = xp.where((width > 0) & (height > 0), width * height, xp.zeros_like(width))
    return area, a.width * a.height + b.width * b.height - area


def _hull(xp, a, b):
    return xp.maximum(a.x2, b.x2) - xp.minimum(a.x1, b.x1), xp.maximum(a.y2, b.y2) - xp.minimum(a.y1, b.y1)


def _iou_reference(xp, boxes1, boxes2, eps, mode):
    overlap, joint = _overlap(xp, boxes1, boxes2)
    iou = xp.where(joint < eps, overlap / eps, _ratio(xp, overlap, joint)) if eps > 0 else _ratio(xp, overlap, joint)
    iou = xp.where(iou < eps, eps + xp.zeros_like(iou), iou)
    if mode == "log":
        return -xp.log(iou)
    return 1 - (iou * iou if mode == "square" else iou)


iou_loss = define_boxes(
    name="iou_loss",
    summary="IoU loss: a function of the intersection over union of two boxes.",
    formula="1 - IoU (linear), 1 - IoU^2 (square) or -log IoU (log), with IoU = max(I / max(U, eps), eps), the area I "
    "of the intersection and the area U of the union",
    operands=_OPERANDS,
    parameters=(Parameter("eps", 1e-6, "Smallest union and smallest IoU.", minimum=0.0),),
    flags=(Flag("mode", "log", "The function of the IoU.", ("linear", "square", "log")),),
    let={**_OVERLAP, "iou": "floored(ratio(overlap, floored(joint, eps)), eps)"},
    value="where(mode == 0, 1 - iou, where(mode == 1, 1 - square(iou), -log(iou)))",
    reference=_iou_reference,
    tentative=True,
    positional="boxes1 boxes2 reduction eps",
    convention=f"{_TIES} Below eps the derivative of union and IoU is 0.",
    cases=({}, {"mode": "linear"}, {"mode": "square"}),
    notes="Boxes that do not overlap have a gradient of 0; other losses of boxes pull them together.",
    source="J. Yu et al., UnitBox: An advanced object detection network, ACM Multimedia 2016.",
)


def _generalized_reference(xp, boxes1, boxes2, eps):
    overlap, joint = _overlap(xp, boxes1, boxes2)
    width, height = _hull(xp, boxes1, boxes2)
    hull = width * height
    return 1 - _ratio(xp, overlap, joint + eps) + _ratio(xp, hull - joint, hull + eps)


generalized_box_iou_loss = define_boxes(
    name="generalized_box_iou_loss",
    summary="Generalized IoU loss: 1 - IoU plus the share of the enclosing box that neither box covers.",
    formula=f"1 - IoU + (C - U) / (C + eps), where {_SYMBOLS}",
    operands=_OPERANDS,
    parameters=(_EPS,),
    let={**_IOU, **_HULL, "hull": "hull_width * hull_height"},
    value="1 - iou + ratio(hull - joint, hull + eps)",
    reference=_generalized_reference,
    tentative=True,
    positional="boxes1 boxes2 reduction eps",
    convention=_TIES,
    cases=({}, {"eps": 0.0}),
    notes=_NOTES,
    source="H. Rezatofighi et al., Generalized intersection over union, CVPR 2019.",
)


def _distance_reference(xp, boxes1, boxes2, eps):
    overlap, joint = _overlap(xp, boxes1, boxes2)
    width, height = _hull(xp, boxes1, boxes2)
    across = boxes1.x1 + boxes1.x2 - boxes2.x1 - boxes2.x2
    down = boxes1.y1 + boxes1.y2 - boxes2.y1 - boxes2.y2
    distance = 0.25 * (across * across + down * down)
    diagonal = width * width + height * height + eps
    return 1 - _ratio(xp, overlap, joint + eps) + _ratio(xp, distance, diagonal)


distance_box_iou_loss = define_boxes(
    name="distance_box_iou_loss",
    summary="Distance IoU loss: 1 - IoU plus a penalty for the distance of the centres.",
    formula="1 - IoU + r^2 / (c^2 + eps), where IoU is the area of the intersection over the area of the union plus "
    "eps, r the distance of the centres, c the diagonal of the smallest box that encloses both",
    operands=_OPERANDS,
    parameters=(_EPS,),
    let=_DISTANCE,
    value="1 - iou + apart",
    reference=_distance_reference,
    tentative=True,
    positional="boxes1 boxes2 reduction eps",
    convention=_TIES,
    cases=({}, {"eps": 0.0}),
    notes=_NOTES,
    source="Z. Zheng et al., Distance-IoU loss, AAAI 2020.",
)


def _angle(xp, width, height):
    nowhere = (width == 0) & (height == 0)
    sign = xp.where(height < 0, -xp.ones_like(height), xp.ones_like(height))
    height = xp.where(nowhere, xp.ones_like(height), height)
    return xp.where(nowhere, xp.zeros_like(width), xp.atan2(sign * width, sign * height))


def _complete_reference(xp, boxes1, boxes2, eps):
    overlap, joint = _overlap(xp, boxes1, boxes2)
    turned = _angle(xp, boxes2.width, boxes2.height) - _angle(xp, boxes1.width, boxes1.height)
    v = _ANGLES * turned * turned
    iou = detached(_ratio(xp, overlap, joint + eps))
    alpha = _ratio(xp, detached(v), 1 - iou + detached(v) + eps)
    return _distance_reference(xp, boxes1, boxes2, eps) + alpha * v


complete_box_iou_loss = define_boxes(
    name="complete_box_iou_loss",
    summary="Complete IoU loss: the distance IoU loss plus a penalty for different aspect ratios.",
    formula="1 - IoU + r^2 / (c^2 + eps) + a v, with v = (4 / pi^2) (atan(w2 / h2) - atan(w1 / h1))^2 of widths and "
    "heights, a = v / (1 - IoU + v + eps), where IoU is the area of the intersection over the area of the union plus "
    "eps, r the distance of the centres, c the diagonal of the smallest box that encloses both",
    operands=_OPERANDS,
    parameters=(_EPS,),
    constants={"of_angles": repr(_ANGLES)},
    let={
        **_DISTANCE,
        "v": "of_angles * square(angle_between(boxes1_width, boxes1_height, boxes2_width, boxes2_height))",
        "alpha": "detached(ratio(v, 1 - iou + v + eps))",
    },
    value="1 - iou + apart + alpha * v",
    reference=_complete_reference,
    tentative=True,
    positional="boxes1 boxes2 reduction eps",
    convention=f"{_TIES} a is a constant in every derivative, as in the publication. A box without width and height "
    "has the angle 0, with gradient 0.",
    cases=({}, {"eps": 0.0}),
    notes=f"{_NOTES} There are two exceptions: torchvision uses `eps` only in a, and its gradient is NaN for boxes of "
    "height 0.",
    heavy=2,
    source="Z. Zheng et al., Distance-IoU loss, AAAI 2020.",
)

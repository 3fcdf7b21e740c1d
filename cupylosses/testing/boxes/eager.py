"""Losses of boxes by torch's operators, as torchvision computes them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from cupylosses.engines.boxes.definition import BoxLoss
from cupylosses.testing.eager import Call

if TYPE_CHECKING:
    from torch import Tensor


def twin(loss: BoxLoss, values: Mapping[str, Any], reduction: str) -> Call | None:
    """Returns torch's way to compute a loss; None if it lacks the loss, the box format or the reduction."""
    if values["box_format"] != "xyxy" or reduction not in ("none", "mean", "sum") or loss.name not in EXPRESSIONS:
        return None
    expression = EXPRESSIONS[loss.name]

    def call(boxes1: Tensor, boxes2: Tensor) -> Tensor:
        wide = [x if x.dtype.itemsize > 2 else x.float() for x in (boxes1, boxes2)]
        rows = expression(*wide, values)
        return rows if reduction == "none" else getattr(rows, reduction)()

    return call


def _overlap(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    import torch

    (left, top, right, bottom), (left2, top2, right2, bottom2) = a.unbind(-1), b.unbind(-1)
    width = torch.min(right, right2) - torch.max(left, left2)
    height = torch.min(bottom, bottom2) - torch.max(top, top2)
    area = torch.where((width > 0) & (height > 0), width * height, 0.0)
    return area, (right - left) * (bottom - top) + (right2 - left2) * (bottom2 - top2) - area


def _hull(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    import torch

    size = torch.max(a[..., 2:], b[..., 2:]) - torch.min(a[..., :2], b[..., :2])
    return size[..., 0], size[..., 1]


def _iou(a: Tensor, b: Tensor, values: Mapping[str, Any]) -> Tensor:
    area, joint = _overlap(a, b)
    iou = (area / joint.clamp(min=values["eps"])).clamp(min=values["eps"])
    if values["mode"] == "log":
        return -iou.log()
    return 1 - (iou.square() if values["mode"] == "square" else iou)


def _generalized(a: Tensor, b: Tensor, values: Mapping[str, Any]) -> Tensor:
    area, joint = _overlap(a, b)
    width, height = _hull(a, b)
    hull = width * height
    return 1 - area / (joint + values["eps"]) + (hull - joint) / (hull + values["eps"])


def _distance(a: Tensor, b: Tensor, values: Mapping[str, Any]) -> Tensor:
    area, joint = _overlap(a, b)
    width, height = _hull(a, b)
    apart = (a[..., :2] + a[..., 2:]) / 2 - (b[..., :2] + b[..., 2:]) / 2
    diagonal = width**2 + height**2 + values["eps"]
    return 1 - area / (joint + values["eps"]) + apart.square().sum(-1) / diagonal


def _complete(a: Tensor, b: Tensor, values: Mapping[str, Any]) -> Tensor:
    import torch

    area, joint = _overlap(a, b)
    angles = [torch.atan((x[..., 2] - x[..., 0]) / (x[..., 3] - x[..., 1])) for x in (a, b)]
    v = 4 / math.pi**2 * (angles[1] - angles[0]) ** 2
    with torch.no_grad():
        alpha = v / (1 - area / (joint + values["eps"]) + v + values["eps"])
    return _distance(a, b, values) + alpha * v


#: Function that computes the value of each pair of boxes, by name of the loss.
EXPRESSIONS: Mapping[str, Callable[[Any, Any, Mapping[str, Any]], Any]] = {
    "iou_loss": _iou,
    "generalized_box_iou_loss": _generalized,
    "distance_box_iou_loss": _distance,
    "complete_box_iou_loss": _complete,
}

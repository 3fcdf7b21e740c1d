"""Losses of boxes: a formula of the edges of two boxes, such as 1 - IoU and its variants."""

from cupylosses.engines.boxes.engine import BOXES

__all__ = ["BOXES"]

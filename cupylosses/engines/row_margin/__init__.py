"""Losses of rows of scores that a label is to exceed by a margin: hinges of pairs of a label and another class."""

from cupylosses.engines.row_margin.engine import ROW_MARGIN

__all__ = ["ROW_MARGIN"]

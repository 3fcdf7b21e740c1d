"""Margin losses of rows of scores: hinges of pairs of a label and another class, which the label should exceed."""

from cupylosses.engines.row_margin.engine import ROW_MARGIN

__all__ = ["ROW_MARGIN"]

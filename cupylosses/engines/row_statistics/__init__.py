"""Losses whose value per row is a formula of a few sums over the row: cosines, distances, correlations."""

from cupylosses.engines.row_statistics.engine import ROW_STATISTICS

__all__ = ["ROW_STATISTICS"]

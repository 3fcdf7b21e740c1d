"""The engine of region losses: formulas of the overlap of predicted and true regions."""

from cupylosses.engines.regions.engine import REGIONS

__all__ = ["REGIONS"]

"""Engine of region losses: functions of the overlap of predicted and true regions."""

from cupylosses.engines.regions.engine import REGIONS

__all__ = ["REGIONS"]

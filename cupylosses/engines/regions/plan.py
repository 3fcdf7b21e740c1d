from __future__ import annotations

from cupylosses.engines.base import Plan


def residual_shape(samples, classes):
    return (samples * classes * 3 + 1,)


class RegionPlan(Plan):
    pass

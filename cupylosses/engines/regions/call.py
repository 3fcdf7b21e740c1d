"""A call of a region loss: its static part, its arrays by name, and its settings by name."""

from __future__ import annotations

from collections.abc import Sequence
from math import nan
from typing import Any, NamedTuple

from cupylosses.call import Call
from cupylosses.engines.regions.definition import PARAMETERS, RegionLoss

#: The numbers of a call before those of the loss's own voxels: the formula's, `empty` (NaN for None), the share of
#: regions, and that of voxels.
NUMBERS = (*PARAMETERS, "empty", "share", "voxel_share")


class Static(NamedTuple):
    """The settings that plans specialise on.

    Attributes:
        kind: "labels", or "dense" for a target per class.
        class_dim: The dimension of the classes, counted from 0.
        activation, overlap, pool, absent, weighting, weight_in, average, gamma_over: As the call has them.
        log_loss, mean_of_weights, background: Likewise; the last is True if class 0 has a region.
        power: True if the exponent is not 1.
        voxel: The expression of the loss of a voxel: "row", "term", "element", or "" for none.
        smoothed: True if labels are smoothed, for which kernels are compiled.
        class_weighted, weighted, masked: True if class weights of regions, of voxels, a mask are among the arrays.
        ignore_index: The label of voxels that do not count.
        reduction, out_dtype: As the call has them.
        check: When a label that is no class raises.
        normalized: True if a normalizer is given, which replaces whatever else a mean divides by.
        has_tangent: Of the arrays, those that have a tangent: the call is a derivative along these.
    """

    kind: str
    class_dim: int
    activation: str
    overlap: str
    pool: str
    absent: str
    weighting: str
    weight_in: str
    average: str
    gamma_over: str
    log_loss: bool
    power: bool
    mean_of_weights: bool
    background: bool
    voxel: str
    smoothed: bool
    class_weighted: bool
    weighted: bool
    masked: bool
    ignore_index: int
    reduction: str
    out_dtype: str | None
    check: str
    normalized: bool = False
    has_tangent: tuple[bool, ...] = ()

    @property
    def class_dims(self) -> tuple[int, int | None]:
        """The dimension of the classes in the input and in the target, None if that has labels."""
        return self.class_dim, None if self.kind == "labels" else self.class_dim

    @property
    def label_apart(self) -> bool:
        """True if the label's class is kept apart from the others where classes are in registers (``kLabelApart``)."""
        return (self.kind, self.activation, self.overlap) == ("labels", "softmax", "product")

    @property
    def pools_batch(self) -> bool:
        """True if samples are pooled."""
        return self.pool in ("batch", "both")

    @property
    def pools_classes(self) -> bool:
        """True if classes are pooled."""
        return self.pool in ("class", "both")


def names(loss: RegionLoss, static: Static) -> tuple[str, ...]:
    """The names of a call's arrays, without those of tangents."""
    own = [x.name for x in loss.operands]
    own += ["class_weight"] * static.class_weighted + ["weight"] * static.weighted + ["mask"] * static.masked
    return tuple(own)


class Regions:
    """A call with its arrays and numbers by name: how checks and formulas see it."""

    def __init__(self, call: Call) -> None:
        loss: Any = call.loss
        self.loss: RegionLoss = loss
        self.static: Static = call.static
        self.normalizer = call.normalizer
        self.names = names(loss, call.static)
        self.arrays = dict(zip(self.names, call.arrays, strict=False))
        self.input, self.target = call.arrays[:2]
        self.class_weight, self.weight, self.mask = (self.arrays.get(x) for x in ("class_weight", "weight", "mask"))
        numbers = call.scalars or default_numbers(loss)
        self.numbers = dict(zip(NUMBERS, numbers, strict=False))
        #: The parameters of the loss of a voxel.
        self.of_voxels = dict(zip([x.name for x in loss.of_voxels], numbers[len(NUMBERS) :], strict=True))

    @property
    def voxels(self) -> tuple[int, ...]:
        """The shape of the voxels of all samples."""
        return without(tuple(self.input.shape), self.static.class_dim)

    @property
    def classes(self) -> int:
        """The number of classes."""
        return int(self.input.shape[self.static.class_dim])

    @property
    def groups(self) -> tuple[int, ...]:
        """The shape of the groups."""
        return shape_of_groups(self.static, self.voxels[0], self.classes)


def default_numbers(loss: RegionLoss) -> tuple[float, ...]:
    """The numbers of a call that gives none."""
    own = {x.name: x.default for x in loss.parameters}
    first = [loss.fixed.get(x, own.get(x, spec.default)) for x, spec in PARAMETERS.items()]
    shares = [own[x] for x in loss.share] or [1.0, 0.0]
    return (*first, nan, *shares, *(x.default for x in loss.of_voxels))


def shape_of_groups(static: Static, samples: int, classes: int) -> tuple[int, ...]:
    """The shape of the groups of cells."""
    regions = classes if static.background else classes - 1
    return (*([] if static.pools_batch else [samples]), *([] if static.pools_classes else [regions]))


def without(x: Sequence[Any], dim: int) -> tuple[Any, ...]:
    """A sequence without one of its entries."""
    return (*x[:dim], *x[dim + 1 :])

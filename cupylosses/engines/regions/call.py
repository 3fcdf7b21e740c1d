"""A call of a region loss: its static part, and its arrays and numbers by name."""

from __future__ import annotations

from collections.abc import Sequence
from math import nan
from typing import Any, NamedTuple

from cupylosses.call import Call
from cupylosses.engines.regions.definition import PARAMETERS, RegionLoss

#: Names of the leading scalars of a call: the parameters of the formula, `empty` (NaN for None), and the shares of the
#: region loss and of the voxel loss. The parameters of the voxel loss follow them.
NUMBERS = (*PARAMETERS, "empty", "share", "voxel_share")


class Static(NamedTuple):
    """Settings of a call that plans specialise on.

    Attributes:
        kind: "labels" for class indices, "dense" for dense targets (a value per class).
        class_dim: Class dimension of the input, counted from 0.
        activation, overlap, pool, absent, weighting, weight_in, average, gamma_over: Options of the call.
        log_loss, mean_of_weights: Options of the call.
        background: True if class 0 has a region.
        power: True if `gamma` differs from 1.
        voxel: Name of the expression of the voxel loss: "row", "term" or "element"; "" without a voxel loss.
        smoothed: True if labels are smoothed; kernels are compiled for it.
        class_weighted, weighted, masked: True if the arrays include `class_weight`, `weight`, `mask`.
        ignore_index: Label of voxels that do not count.
        reduction, out_dtype: Options of the call.
        check: Time at which an invalid label raises: the value of `check_targets`.
        normalized: True if a normalizer is given. It replaces the divisor of a mean.
        has_tangent: One flag per array, True if it has a tangent. The call is then the derivative along these tangents.
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
        """Class dimensions of the input and of the target; None for a target of labels."""
        return self.class_dim, None if self.kind == "labels" else self.class_dim

    @property
    def label_apart(self) -> bool:
        """True if kernels can handle the label's class apart from the others (``kLabelApart``)."""
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
    """Returns the names of a call's arrays, without tangents."""
    array_names = [x.name for x in loss.operands]
    array_names += ["class_weight"] * static.class_weighted + ["weight"] * static.weighted + ["mask"] * static.masked
    return tuple(array_names)


class Regions:
    """A call with its arrays and numbers by name, as checks and reference formulas use it."""

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
        #: Parameters of the voxel loss, by name.
        self.of_voxels = dict(zip([x.name for x in loss.of_voxels], numbers[len(NUMBERS) :], strict=True))

    @property
    def voxels(self) -> tuple[int, ...]:
        """Shape of the voxels: that of the input without its class dimension."""
        return without(tuple(self.input.shape), self.static.class_dim)

    @property
    def classes(self) -> int:
        """Number of classes."""
        return int(self.input.shape[self.static.class_dim])

    @property
    def groups(self) -> tuple[int, ...]:
        """Shape of the groups of cells."""
        return shape_of_groups(self.static, self.voxels[0], self.classes)


def default_numbers(loss: RegionLoss) -> tuple[float, ...]:
    """Returns the default numbers, for a call without scalars."""
    defaults = {x.name: x.default for x in loss.parameters}
    first = [loss.fixed.get(x, defaults.get(x, spec.default)) for x, spec in PARAMETERS.items()]
    shares = [defaults[x] for x in loss.share] or [1.0, 0.0]
    return (*first, nan, *shares, *(x.default for x in loss.of_voxels))


def shape_of_groups(static: Static, samples: int, classes: int) -> tuple[int, ...]:
    """Returns the shape of the groups: samples and classes with a region, except pooled dimensions."""
    regions = classes if static.background else classes - 1
    return (*([] if static.pools_batch else [samples]), *([] if static.pools_classes else [regions]))


def without(x: Sequence[Any], dim: int) -> tuple[Any, ...]:
    """Returns a sequence without entry `dim`."""
    return (*x[:dim], *x[dim + 1 :])

"""The engine of region losses, as the rest of the library sees it (:mod:`cupylosses.engines.base`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import nan, prod
from typing import Any, ClassVar

from cupylosses import checks, interop
from cupylosses.adoption import common_library
from cupylosses.call import Call, Parts
from cupylosses.engines.base import Apart, Engine, Machine, Plan, TensorSpec, Wanted
from cupylosses.engines.cache import SettingsCache
from cupylosses.engines.device import Device
from cupylosses.engines.regions import checks as region_checks
from cupylosses.engines.regions import reference as region_reference
from cupylosses.engines.regions.call import Regions, Static, names, shape_of_groups, without
from cupylosses.engines.regions.definition import PARAMETERS, RegionLoss
from cupylosses.engines.regions.plan import RegionPlan, residual_shape
from cupylosses.engines.regions.second import RegionHvpPlan, voxels_far_apart
from cupylosses.engines.softmax import checks as softmax_checks
from cupylosses.engines.softmax import labels
from cupylosses.engines.softmax.engine import row_major
from cupylosses.engines.strides import dense_strides

#: Images whose samples lie between each other's voxels are copied from this distance of neighbouring voxels on, in
#: elements and, where the classes of a voxel are next to each other, in voxels; and from so many elements on.
INTERLEAVED_STEP = 4
INTERLEAVED_VOXELS = 2
INTERLEAVED_ELEMENTS = 1 << 16
#: Elements from which on targets per class, and labels, are copied whose neighbouring voxels lie apart though those of
#: the input are next to each other, as are targets per class whose samples lie between each other's voxels; from which
#: on they are for a value alone, which reads them once; and of inputs that are copied instead, less than these.
SCATTERED_TARGET = 1 << 14
SCATTERED_LABELS = 1 << 12
SCATTERED_OF_VALUES = 1 << 22
REORDERED_INPUT = 1 << 16
#: Classes of planes with gaps between their rows that are copied where gradients are written: threads would read little
#: but single elements.
PADDED_CLASSES = 2
#: Elements from which on operands are copied of which a thread would read an element of each sector: classes that lie
#: side by side where lanes share voxels, and inputs in second derivatives if their voxels are read one by one in
#: another order than the targets: both launches compute their offsets.
SCATTERED_ELEMENTS = 1 << 20
#: Bytes of an element up to which as many that are differentiated are copied if lanes share voxels whose classes lie
#: side by side, which they would read one by one.
SIDE_BY_SIDE_ITEMSIZE = 4
#: Settings that were checked before.
_SETTINGS = SettingsCache()


class RegionEngine(Engine):
    """Losses of regions: one per class, predicted and true."""

    name = "regions"
    needs_chip = True
    Definition: ClassVar[Any] = RegionLoss
    Static: ClassVar[Any] = Static

    # Arguments

    def bind(
        self, loss: RegionLoss, arrays: tuple[Any, ...], settings: tuple[Any, ...], legacy: tuple[Any, ...] = ()
    ) -> Parts:
        given = dict(zip(loss.array_names, arrays, strict=True))
        normalizer = given.pop("normalizer", None)
        given = {name: x for name, x in given.items() if x is not None and name != "None"}
        _, present = common_library(loss, list(given), tuple(given.values()))
        named = dict(zip(given, present, strict=True))
        first, second = (x.name for x in loss.operands)
        x, t = named[first], named[second]
        # Found by the identities of settings, which are mostly defaults.
        static, scalars, change = _SETTINGS.find(
            (loss, tuple(x.shape), tuple(t.shape), t.dtype, tuple(given), normalizer is None),
            settings,
            lambda: checked_settings(loss, dict(zip(loss.setting_names, settings, strict=True)), named, normalizer),
        )
        named[second] = _changed(named[second], change, static.class_dim)
        if normalizer is not None:
            normalizer = checks.normalizer(loss, normalizer, static.reduction)
        return loss, tuple([named[x] for x in names(loss, static)]), static, scalars, normalizer

    def names(self, call: Call) -> list[str]:
        loss: Any = call.loss
        return list(names(loss, call.static))

    def check(self, call: Call) -> None:
        region_checks.arrays(Regions(call))

    def promoted(self, call: Call, zero_d_widens: bool = False) -> str:
        return checks.promote([checks.dtype_name(x) for x in call.arrays[:2]])

    # Plans

    def plan(self, call: Call, tensors: tuple[TensorSpec, ...], promoted: str, machine: Machine) -> Plan:
        made = RegionHvpPlan if any(call.static.has_tangent) else RegionPlan
        return made(self, call, tensors, promoted, machine)

    def copies(
        self, call: Call, tensors: tuple[TensorSpec, ...], machine: Machine, writes: int
    ) -> Mapping[int, tuple[int, ...]]:
        """Class weights with gaps; input and target whose samples lie between the voxels of each other, or whose
        classes lie side by side where lanes share voxels; an input of two planes with gaps; a scattered target; of
        second derivatives all that have gaps, an input whose samples lie between the voxels of each other, a tangent
        that does not lie as the gradient of the input does, and both where the voxels of many classes lie apart and no
        tile of them is in shared memory, or where the offset of each voxel takes divisions.
        """
        last, found = 2 + call.static.class_weighted + call.static.weighted, {}
        if not any(call.static.has_tangent):
            found = in_other_orders(call.static, tensors[0], tensors[1], writes)
            dims = call.static.class_dims
            apart = [i for i in (0, 1) if i not in found and writes and are_side_by_side(tensors[i], dims[i])]
            if apart and RegionPlan(self, call, tensors, self.promoted(call), machine).layout.lanes > 1:
                found |= {i: planes(tensors[i].shape, call.static.class_dim) for i in apart}
        if any(call.static.has_tangent[:1]):
            x, strides = tensors[0], tensors[0].gradient.strides
            in_order = dense_strides(x.shape, (0,) * x.ndim)
            far, large = voxels_far_apart(x, call.static.class_dim), prod(x.shape) >= SCATTERED_ELEMENTS
            t = tensors[1]
            if has_gaps(t, call.static.class_dims[1]):
                found[1] = dense_strides(t.shape, (0,) * t.ndim)
            if is_interleaved(x, call.static.class_dim, INTERLEAVED_ELEMENTS) or has_gaps(x, call.static.class_dim):
                found[0] = strides = in_order
            elif (far or large) and not x.lies_as(in_order):
                at = RegionHvpPlan(self, call, tensors, self.promoted(call), machine).layout
                if (far and not at.word) or (large and at.many and at.vec_size == 1):
                    found[0] = strides = in_order
            if not tensors[-1].lies_as(strides):
                found[len(tensors) - 1] = strides
        return found | {i: (1,) for i in range(2, last) if tensors[i].strides != (1,) and tensors[i].shape[0] > 1}

    def raise_reported(self, device: Device) -> None:
        labels.raise_reported(device)

    def waits(self, call: Call) -> bool:
        return bool(call.static.check == "sync" and call.static.kind == "labels")

    # Formulas

    def reference(self, call: Call, promoted: str, readable: bool = True) -> Any:
        return region_reference.evaluate(call, promoted, readable)

    def floating(self, call: Call) -> Wanted:
        return tuple([i < 2 and checks.dtype_name(x) in checks.FLOATING for i, x in enumerate(call.arrays)])

    # Transforms

    def has_residual(self, call: Call) -> bool:
        return not any(call.static.has_tangent)

    def outputs(self, call: Call, strides: Sequence[tuple[int, ...]], promoted: str) -> list[TensorSpec]:
        static, shape = call.static, tuple(call.arrays[0].shape)
        samples, classes = without(shape, static.class_dim)[0], shape[static.class_dim]
        groups = shape_of_groups(static, samples, classes) if static.reduction == "none" else ()
        found = [row_major(static.out_dtype or promoted, groups)]
        return found + ([row_major("float64", residual_shape(samples, classes))] if self.has_residual(call) else [])

    def apart(self, call: Call, promoted: str, wanted: Wanted, traced: bool) -> Apart | None:
        """One operator: samples are coupled, so a batch is the formula's."""
        return None

    def divided_by(self, call: Call, divisor: Any, grad_output: Any) -> tuple[Call, Any]:
        """The sum in place of a mean that a normalizer divides."""
        xp = interop.namespace(grad_output)
        static, upstream = call.static._replace(out_dtype="float64", check="off"), xp.astype(grad_output, xp.float64)
        if static.normalized:
            static = static._replace(reduction="sum", normalized=False)
            if isinstance(divisor, (int, float)):
                upstream = upstream * (1.0 / divisor if divisor else 0.0)
            else:
                empty = divisor == 0
                upstream = xp.where(empty, 0.0, upstream) * (1.0 / xp.where(empty, xp.ones_like(divisor), divisor))
        return call._replace(static=static, normalizer=None), upstream

    def jvp(self, call: Call, moving: Wanted, tangents: tuple[Any, ...]) -> Call:
        static = call.static._replace(has_tangent=tuple(moving))
        return call._replace(static=static, arrays=(*call.arrays, *tangents))

    def primal(self, call: Call) -> tuple[Call, Wanted, tuple[Any, ...]]:
        moving = tuple([bool(x) for x in call.static.has_tangent])
        count = len(call.arrays) - sum(moving)
        base = call._replace(arrays=call.arrays[:count], static=call.static._replace(has_tangent=()))
        return base, moving, call.arrays[count:]

    def batched(self, call: Call, dims: Sequence[int | None], size: int) -> Call | None:
        return None

    # Warm-up

    def placeholders(
        self, loss: RegionLoss, dtypes: Sequence[str], shapes: Sequence[tuple[int, ...]], options: Mapping[str, Any]
    ) -> dict[str, tuple[str, tuple[int, ...]]]:
        """A target has labels of int64 unless a dtype is named for it, and a value per class if that is floating."""
        full = tuple(shapes[0])
        dim = region_dimension(loss, options.get("class_dim", 1), full)
        dtype = dtypes[-1] if len(dtypes) > 1 else "int64"
        voxels = without(full, dim)
        target = (
            tuple(shapes[-1]) if len(shapes) > 1 else full if dtype in checks.FLOATING or full[dim] == 1 else voxels
        )
        first, second = (x.name for x in loss.operands)
        found = {first: (dtypes[0], full), second: (dtype, target), "mask": ("bool", voxels)}
        found |= dict.fromkeys(("class_weight", "weight"), (dtypes[0], full[dim : dim + 1]))
        return found | {"normalizer": ("float64", ())}

    def trained(self, call: Call) -> Wanted:
        return tuple([i == 0 for i in range(len(call.arrays))])


def region_dimension(loss: RegionLoss, value: Any, shape: Sequence[int]) -> int:
    """The class dimension counted from 0, of an input that has one of samples besides."""
    if len(shape) < 2:
        raise ValueError(
            f"{loss.name}: `{loss.operands[0].name}` needs a dimension of samples and one of classes, got shape "
            f"{tuple(shape)}. Pass shape (N, C, ...), with N = 1 for a single sample."
        )
    return softmax_checks.class_dimension(loss, value, shape)  # type: ignore[arg-type]


def _changed(x: Any, change: str, dim: int) -> Any:
    """An array without its class dimension of size 1, or with one."""
    if not change:
        return x
    at = (*[slice(None)] * dim, 0 if change == "drop" else None)
    return x[at]


def checked_settings(
    loss: RegionLoss, given: Mapping[str, Any], arrays: Mapping[str, Any], normalizer: Any
) -> tuple[Static, tuple[float, ...], str]:
    """The static part and the numbers of a call, and how the target changes. Dtypes and shapes of arrays are
    checked where plans are made.
    """
    first, second = (x.name for x in loss.operands)
    found = region_checks.settings(loss, given)
    region_checks.combination(loss, found, arrays.get("class_weight"))
    shape = tuple(arrays[first].shape)
    dim = region_dimension(loss, given["class_dim"], shape)
    kind, change = region_checks.kind(loss, shape, dim, arrays[second])
    voxel = ""
    if loss.has_voxels:
        softmax = found[loss.chosen_by] == "softmax"
        dense = kind == "dense" and "term" in loss.expressions
        voxel = "element" if not softmax else "term" if dense else "row"
    static = Static(
        kind=kind,
        class_dim=dim,
        **{x: found[x] for x in ("activation", "overlap", "pool", "absent", "weighting", "weight_in", "average")},
        gamma_over=found["gamma_over"],
        log_loss=found["log_loss"],
        power=found["gamma"] != 1.0,
        mean_of_weights=found["mean_of_weights"],
        background=found["include_background"],
        voxel=voxel,
        smoothed=bool(voxel == "row" and loss.smoothing and found[loss.smoothing]),
        class_weighted="class_weight" in arrays,
        weighted="weight" in arrays,
        masked="mask" in arrays,
        ignore_index=softmax_checks.ignore_index(loss, given["ignore_index"], "indices"),  # type: ignore[arg-type]
        reduction=checks.reduction(loss, given["reduction"]),
        out_dtype=None if given["out_dtype"] is None else checks.out_dtype(loss, given["out_dtype"]),
        check=softmax_checks.check_of_targets(loss, given["check_targets"]),  # type: ignore[arg-type]
        normalized=normalizer is not None,
    )
    shares = [found[x] for x in loss.share] or [1.0, 0.0]
    empty = nan if found["empty"] is None else found["empty"]
    own = [found[x.name] for x in loss.of_voxels]
    return static, (*[found[x] for x in PARAMETERS], empty, *shares, *own), change


REGIONS = RegionEngine()


def are_side_by_side(x: TensorSpec, class_dim: int | None) -> bool:
    """True if the classes of voxels are neighbours in a large array of small elements, and voxels are not."""
    if class_dim is None or interop.ITEMSIZE[x.dtype] > SIDE_BY_SIDE_ITEMSIZE or prod(x.shape) < SCATTERED_ELEMENTS:
        return False
    _, *voxels = without(x.shape, class_dim)
    return x.strides[class_dim] == 1 and x.shape[class_dim] > 1 and prod(voxels) > 1


def planes(shape: tuple[int, ...], class_dim: int) -> tuple[int, ...]:
    """Strides with the voxels of a class of a sample next to each other."""
    samples, *voxels = without(range(len(shape)), class_dim)
    order = samples, class_dim, *voxels
    return dense_strides(shape, [len(shape) - order.index(d) for d in range(len(shape))])


def is_interleaved(x: TensorSpec, class_dim: int | None, least: int) -> bool:
    """True of ``least`` elements if samples lie between the voxels of each other, so that a block uses a small part of
    what it reads.
    """
    if prod(x.shape) < least:
        return False
    dims = [d for d in range(x.ndim) if d != class_dim]
    step = min([abs(x.strides[d]) for d in dims[1:] if x.shape[d] > 1], default=1)
    if class_dim is None or abs(x.strides[class_dim]) >= step:
        return step >= INTERLEAVED_STEP
    return step >= INTERLEAVED_VOXELS * x.shape[class_dim]


def has_gaps(x: TensorSpec, class_dim: int | None) -> bool:
    """True of planes of voxels with gaps between their rows."""
    innermost = max([d for d in range(x.ndim) if d != class_dim and x.shape[d] > 1], default=0)
    return x.strides[innermost] == 1 and 0 not in x.strides and not x.lies_as(x.gradient.strides)


def in_other_orders(static: Static, x: TensorSpec, target: TensorSpec, writes: int) -> dict[int, tuple[int, ...]]:
    """The copies of an input and a target that lie in other orders than voxels are taken in, where gradients are
    written: samples between voxels, two planes with gaps, and a target whose voxels lie in another order than those of
    the input. It is copied to the input's order, for a large value alone, too; an input of few elements is copied to
    that of the shape first.
    """
    found, (dim, target_dim) = dict[int, tuple[int, ...]](), static.class_dims
    in_order, dense = dense_strides(x.shape, (0,) * x.ndim), target_dim is not None
    if writes:
        planes_with_gaps = x.shape[static.class_dim] == PADDED_CLASSES and has_gaps(x, static.class_dim)
        if planes_with_gaps or is_interleaved(x, dim, INTERLEAVED_ELEMENTS):
            found[0] = in_order
        if is_interleaved(target, target_dim, SCATTERED_TARGET if dense else INTERLEAVED_ELEMENTS):
            found[1] = dense_strides(target.shape, (0,) * target.ndim)
    least = (SCATTERED_TARGET if dense else SCATTERED_LABELS) if writes else SCATTERED_OF_VALUES
    lies = found.get(0, x.strides)
    if 1 in found or prod(target.shape) < least or not is_scattered(target, static.class_dims, lies):
        return found
    if writes and dense and prod(x.shape) < REORDERED_INPUT and is_scattered(x, (dim, dim), in_order):
        found[0] = lies = in_order
    if is_scattered(target, static.class_dims, lies):
        found[1] = in_order_of(lies, target.shape, static.class_dims)
    return found


def is_scattered(target: TensorSpec, dims: tuple[int, int | None], lies: Sequence[int]) -> bool:
    """True of a target whose neighbouring voxels, in the order of an input with strides ``lies``, lie apart, as do the
    classes of a voxel. ``dims`` are the class dimensions of both.
    """
    if 0 in target.strides or 1 not in target.strides:
        return False
    pairs = zip(dims_without_classes(lies, dims[0])[1:], dims_without_classes(target.shape, dims[1])[1:], strict=True)
    steps = [(abs(lies[d]), abs(target.strides[e])) for d, e in pairs if target.shape[e] > 1 and lies[d]]
    _, step = min(steps, default=(1, 1))
    return step >= INTERLEAVED_STEP if dims[1] is None else 1 not in (step, target.strides[dims[1]])


def in_order_of(lies: Sequence[int], shape: tuple[int, ...], dims: tuple[int, int | None]) -> tuple[int, ...]:
    """Strides of a target without gaps: samples, classes, and voxels in the order of an input with strides ``lies``."""
    samples, *voxels = zip(dims_without_classes(lies, dims[0]), dims_without_classes(shape, dims[1]), strict=True)
    classes = [] if dims[1] is None else [dims[1]]
    order = [samples[1], *classes, *(e for _, e in sorted(voxels, key=lambda x: -abs(lies[x[0]])))]
    return dense_strides(shape, [len(shape) - order.index(d) for d in range(len(shape))])


def dims_without_classes(x: Sequence[int], class_dim: int | None) -> list[int]:
    """The dimensions of an array without that of the classes: samples, and voxels behind them."""
    return [d for d in range(len(x)) if d != class_dim]

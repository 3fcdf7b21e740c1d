"""Engine of region losses, an implementation of the protocol of :mod:`cupylosses.engines.base`."""

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

#: Minimum distance of neighbouring voxels, in elements, for copying an array with interleaved samples: each sample is
#: stored between the voxels of others.
INTERLEAVED_STEP = 4
#: Minimum distance in voxels instead, if the classes of a voxel are next to each other.
INTERLEAVED_VOXELS = 2
#: Minimum number of elements of such an array.
INTERLEAVED_ELEMENTS = 1 << 16
#: Minimum number of elements for copying a scattered dense target, whose neighbouring voxels are not next to each other
#: although those of the input are. Also for copying a dense target with interleaved samples.
SCATTERED_TARGET = 1 << 14
#: Minimum number of scattered labels for copying them.
SCATTERED_LABELS = 1 << 12
#: Minimum number of elements of a scattered target if only the value is computed, which reads the target once.
SCATTERED_OF_VALUES = 1 << 22
#: An input with fewer elements is copied instead of a scattered dense target.
REORDERED_INPUT = 1 << 16
#: Number of classes of an input that is copied for gaps between the rows of its planes, if gradients are written:
#: threads would read little but single elements.
PADDED_CLASSES = 2
#: Minimum number of elements for copying an operand of which a thread would read a single element of each sector: one
#: with contiguous classes where lanes share voxels; or, in second derivatives, an input whose voxels are read one by
#: one in another order than the target's, since both launches compute their offsets.
SCATTERED_ELEMENTS = 1 << 20
#: Maximum number of bytes per element for copying operands with contiguous classes where lanes share voxels, if
#: gradients are written: lanes would read the classes one by one.
SIDE_BY_SIDE_ITEMSIZE = 4
#: Cache of checked settings.
_SETTINGS = SettingsCache()


class RegionEngine(Engine):
    """Losses of the overlap of predicted and true regions, one region per class."""

    name = "regions"
    needs_chip = True
    Definition: ClassVar[Any] = RegionLoss
    Static: ClassVar[Any] = Static

    # Arguments

    def bind(
        self, loss: RegionLoss, arrays: tuple[Any, ...], settings: tuple[Any, ...], legacy: tuple[Any, ...] = ()
    ) -> Parts:
        arguments = dict(zip(loss.array_names, arrays, strict=True))
        normalizer = arguments.pop("normalizer", None)
        arguments = {name: x for name, x in arguments.items() if x is not None and name != "None"}
        _, present = common_library(loss, list(arguments), tuple(arguments.values()))
        named = dict(zip(arguments, present, strict=True))
        first, second = (x.name for x in loss.operands)
        x, t = named[first], named[second]
        # The cache compares settings by identity, since most of them are defaults.
        static, scalars, change = _SETTINGS.find(
            (loss, tuple(x.shape), tuple(t.shape), t.dtype, tuple(arguments), normalizer is None),
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
        plan_type = RegionHvpPlan if any(call.static.has_tangent) else RegionPlan
        return plan_type(self, call, tensors, promoted, machine)

    def copies(
        self, call: Call, tensors: tuple[TensorSpec, ...], machine: Machine, writes: int
    ) -> Mapping[int, tuple[int, ...]]:
        """Returns the arrays that kernels read from copies, with the strides of the copies.

        Weights of classes with gaps are always copied. First derivatives copy an input or target with interleaved
        samples, or with contiguous classes where lanes share voxels; an input of two planes with gaps; and a scattered
        target. Second derivatives copy an input or target with gaps; an input with interleaved samples; a tangent whose
        layout differs from that of the input's gradient; and input and tangent if neighbouring voxels of many classes
        are far apart and no tile of them is in shared memory, or if the offset of each voxel takes divisions.
        """
        last, copies = 2 + call.static.class_weighted + call.static.weighted, {}
        if not any(call.static.has_tangent):
            copies = in_other_orders(call.static, tensors[0], tensors[1], writes)
            dims = call.static.class_dims
            apart = [i for i in (0, 1) if i not in copies and writes and are_side_by_side(tensors[i], dims[i])]
            if apart and RegionPlan(self, call, tensors, self.promoted(call), machine).layout.lanes > 1:
                copies |= {i: planes(tensors[i].shape, call.static.class_dim) for i in apart}
        if any(call.static.has_tangent[:1]):
            x, strides = tensors[0], tensors[0].gradient.strides
            in_order = dense_strides(x.shape, (0,) * x.ndim)
            far, large = voxels_far_apart(x, call.static.class_dim), prod(x.shape) >= SCATTERED_ELEMENTS
            t = tensors[1]
            if has_gaps(t, call.static.class_dims[1]):
                copies[1] = dense_strides(t.shape, (0,) * t.ndim)
            if is_interleaved(x, call.static.class_dim, INTERLEAVED_ELEMENTS) or has_gaps(x, call.static.class_dim):
                copies[0] = strides = in_order
            elif (far or large) and not x.lies_as(in_order):
                at = RegionHvpPlan(self, call, tensors, self.promoted(call), machine).layout
                if (far and not at.word) or (large and at.many and at.vec_size == 1):
                    copies[0] = strides = in_order
            if not tensors[-1].lies_as(strides):
                copies[len(tensors) - 1] = strides
        return copies | {i: (1,) for i in range(2, last) if tensors[i].strides != (1,) and tensors[i].shape[0] > 1}

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
        specs = [row_major(static.out_dtype or promoted, groups)]
        return specs + ([row_major("float64", residual_shape(samples, classes))] if self.has_residual(call) else [])

    def apart(self, call: Call, promoted: str, wanted: Wanted, traced: bool) -> Apart | None:
        """Returns None: a call is a single operator. Samples are coupled, so batches use the formula."""
        return None

    def divided_by(self, call: Call, divisor: Any, grad_output: Any) -> tuple[Call, Any]:
        """Returns a float64 call without a normalizer, and the ``grad_output`` for it.

        A mean with a normalizer becomes a sum, and ``grad_output`` is divided by the normalizer; it is 0 if that is 0.
        """
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
        """Returns dtype and shape of every array argument of a warm-up.

        The target holds int64 labels unless its dtype is given. It is dense if that dtype is floating-point.
        """
        full = tuple(shapes[0])
        dim = region_dimension(loss, options.get("class_dim", 1), full)
        dtype = dtypes[-1] if len(dtypes) > 1 else "int64"
        voxels = without(full, dim)
        target = (
            tuple(shapes[-1]) if len(shapes) > 1 else full if dtype in checks.FLOATING or full[dim] == 1 else voxels
        )
        first, second = (x.name for x in loss.operands)
        placeholders = {first: (dtypes[0], full), second: (dtype, target), "mask": ("bool", voxels)}
        placeholders |= dict.fromkeys(("class_weight", "weight"), (dtypes[0], full[dim : dim + 1]))
        return placeholders | {"normalizer": ("float64", ())}

    def trained(self, call: Call) -> Wanted:
        return tuple([i == 0 for i in range(len(call.arrays))])


def region_dimension(loss: RegionLoss, value: Any, shape: Sequence[int]) -> int:
    """Returns the class dimension counted from 0. Raises for an input without a dimension of samples besides."""
    if len(shape) < 2:
        raise ValueError(
            f"{loss.name}: `{loss.operands[0].name}` needs a dimension of samples and one of classes, got shape "
            f"{tuple(shape)}. Pass shape (N, C, ...), with N = 1 for a single sample."
        )
    return softmax_checks.class_dimension(loss, value, shape)  # type: ignore[arg-type]


def _changed(x: Any, change: str, dim: int) -> Any:
    """Returns an array without its class dimension of size 1, or with one added, or unchanged."""
    if not change:
        return x
    at = (*[slice(None)] * dim, 0 if change == "drop" else None)
    return x[at]


def checked_settings(
    loss: RegionLoss, arguments: Mapping[str, Any], arrays: Mapping[str, Any], normalizer: Any
) -> tuple[Static, tuple[float, ...], str]:
    """Returns the static part and the numbers of a call, and the change to the target's class dimension.

    Dtypes and shapes of arrays are checked when plans are made.
    """
    first, second = (x.name for x in loss.operands)
    options = region_checks.settings(loss, arguments)
    region_checks.combination(loss, options, arrays.get("class_weight"))
    shape = tuple(arrays[first].shape)
    dim = region_dimension(loss, arguments["class_dim"], shape)
    kind, change = region_checks.kind(loss, shape, dim, arrays[second])
    voxel = ""
    if loss.has_voxels:
        softmax = options[loss.chosen_by] == "softmax"
        dense = kind == "dense" and "term" in loss.expressions
        voxel = "element" if not softmax else "term" if dense else "row"
    static = Static(
        kind=kind,
        class_dim=dim,
        **{x: options[x] for x in ("activation", "overlap", "pool", "absent", "weighting", "weight_in", "average")},
        gamma_over=options["gamma_over"],
        log_loss=options["log_loss"],
        power=options["gamma"] != 1.0,
        mean_of_weights=options["mean_of_weights"],
        background=options["include_background"],
        voxel=voxel,
        smoothed=bool(voxel == "row" and loss.smoothing and options[loss.smoothing]),
        class_weighted="class_weight" in arrays,
        weighted="weight" in arrays,
        masked="mask" in arrays,
        ignore_index=softmax_checks.ignore_index(loss, arguments["ignore_index"], "indices"),  # type: ignore[arg-type]
        reduction=checks.reduction(loss, arguments["reduction"]),
        out_dtype=None if arguments["out_dtype"] is None else checks.out_dtype(loss, arguments["out_dtype"]),
        check=softmax_checks.check_of_targets(loss, arguments["check_targets"]),  # type: ignore[arg-type]
        normalized=normalizer is not None,
    )
    shares = [options[x] for x in loss.share] or [1.0, 0.0]
    empty = nan if options["empty"] is None else options["empty"]
    of_voxels = [options[x.name] for x in loss.of_voxels]
    return static, (*[options[x] for x in PARAMETERS], empty, *shares, *of_voxels), change


REGIONS = RegionEngine()


def are_side_by_side(x: TensorSpec, class_dim: int | None) -> bool:
    """True if the classes of a voxel are contiguous, and voxels are not, in a large array of small elements."""
    if class_dim is None or interop.ITEMSIZE[x.dtype] > SIDE_BY_SIDE_ITEMSIZE or prod(x.shape) < SCATTERED_ELEMENTS:
        return False
    _, *voxels = without(x.shape, class_dim)
    return x.strides[class_dim] == 1 and x.shape[class_dim] > 1 and prod(voxels) > 1


def planes(shape: tuple[int, ...], class_dim: int) -> tuple[int, ...]:
    """Returns strides in which the voxels of each class of a sample are contiguous."""
    samples, *voxels = without(range(len(shape)), class_dim)
    order = samples, class_dim, *voxels
    return dense_strides(shape, [len(shape) - order.index(d) for d in range(len(shape))])


def is_interleaved(x: TensorSpec, class_dim: int | None, least: int) -> bool:
    """True if an array of at least ``least`` elements has interleaved samples: each between the voxels of others.

    A block would use only a small part of what it reads.
    """
    if prod(x.shape) < least:
        return False
    dims = [d for d in range(x.ndim) if d != class_dim]
    step = min([abs(x.strides[d]) for d in dims[1:] if x.shape[d] > 1], default=1)
    if class_dim is None or abs(x.strides[class_dim]) >= step:
        return step >= INTERLEAVED_STEP
    return step >= INTERLEAVED_VOXELS * x.shape[class_dim]


def has_gaps(x: TensorSpec, class_dim: int | None) -> bool:
    """True if rows of voxels are contiguous, but have gaps between them."""
    innermost = max([d for d in range(x.ndim) if d != class_dim and x.shape[d] > 1], default=0)
    return x.strides[innermost] == 1 and 0 not in x.strides and not x.lies_as(x.gradient.strides)


def in_other_orders(static: Static, x: TensorSpec, target: TensorSpec, writes: int) -> dict[int, tuple[int, ...]]:
    """Returns strides for copies of an input and target that are not stored in the order in which voxels are processed.

    If gradients are written, these are arrays with interleaved samples, an input of two planes with gaps, and a target
    whose voxels are stored in another order than the input's. Such a target is copied to the input's order; if it is
    large, also for the value alone. An input of few elements is first copied to the order of its shape.
    """
    copies, (dim, target_dim) = dict[int, tuple[int, ...]](), static.class_dims
    in_order, dense = dense_strides(x.shape, (0,) * x.ndim), target_dim is not None
    if writes:
        planes_with_gaps = x.shape[static.class_dim] == PADDED_CLASSES and has_gaps(x, static.class_dim)
        if planes_with_gaps or is_interleaved(x, dim, INTERLEAVED_ELEMENTS):
            copies[0] = in_order
        if is_interleaved(target, target_dim, SCATTERED_TARGET if dense else INTERLEAVED_ELEMENTS):
            copies[1] = dense_strides(target.shape, (0,) * target.ndim)
    least = (SCATTERED_TARGET if dense else SCATTERED_LABELS) if writes else SCATTERED_OF_VALUES
    lies = copies.get(0, x.strides)
    if 1 in copies or prod(target.shape) < least or not is_scattered(target, static.class_dims, lies):
        return copies
    if writes and dense and prod(x.shape) < REORDERED_INPUT and is_scattered(x, (dim, dim), in_order):
        copies[0] = lies = in_order
    if is_scattered(target, static.class_dims, lies):
        copies[1] = in_order_of(lies, target.shape, static.class_dims)
    return copies


def is_scattered(target: TensorSpec, dims: tuple[int, int | None], lies: Sequence[int]) -> bool:
    """True if neighbouring voxels of a target are not contiguous, and neither are the classes of a voxel.

    Neighbours are those of an input with strides ``lies``. ``dims`` are the class dimensions of input and target.
    """
    if 0 in target.strides or 1 not in target.strides:
        return False
    pairs = zip(dims_without_classes(lies, dims[0])[1:], dims_without_classes(target.shape, dims[1])[1:], strict=True)
    steps = [(abs(lies[d]), abs(target.strides[e])) for d, e in pairs if target.shape[e] > 1 and lies[d]]
    _, step = min(steps, default=(1, 1))
    return step >= INTERLEAVED_STEP if dims[1] is None else 1 not in (step, target.strides[dims[1]])


def in_order_of(lies: Sequence[int], shape: tuple[int, ...], dims: tuple[int, int | None]) -> tuple[int, ...]:
    """Returns dense strides of a target: samples, classes, then voxels in the order of an input of strides ``lies``."""
    samples, *voxels = zip(dims_without_classes(lies, dims[0]), dims_without_classes(shape, dims[1]), strict=True)
    classes = [] if dims[1] is None else [dims[1]]
    order = [samples[1], *classes, *(e for _, e in sorted(voxels, key=lambda x: -abs(lies[x[0]])))]
    return dense_strides(shape, [len(shape) - order.index(d) for d in range(len(shape))])


def dims_without_classes(x: Sequence[int], class_dim: int | None) -> list[int]:
    """Returns the dimensions of an array except that of the classes: samples, followed by voxels."""
    return [d for d in range(len(x)) if d != class_dim]

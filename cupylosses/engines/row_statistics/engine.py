"""The row-statistics engine: implements the protocol of :mod:`cupylosses.engines.base`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from typing import Any, ClassVar

from cupylosses import checks, interop
from cupylosses.adoption import common_library
from cupylosses.call import Call, Parts
from cupylosses.engines import relayout
from cupylosses.engines.base import (
    ARGUMENTS,
    DTYPE,
    SHAPES,
    Apart,
    Engine,
    Machine,
    Plan,
    Question,
    TensorSpec,
    Wanted,
    contiguous,
)
from cupylosses.engines.cache import SettingsCache
from cupylosses.engines.pointwise import checks as pointwise_checks
from cupylosses.engines.pointwise.definition import counting
from cupylosses.engines.pointwise.reduction import Static as PointwiseStatic
from cupylosses.engines.row_statistics import checks as row_checks
from cupylosses.engines.row_statistics import reference as row_reference
from cupylosses.engines.row_statistics.call import Static, constant_divisor, has_features, names
from cupylosses.engines.row_statistics.definition import StatisticsLoss
from cupylosses.engines.row_statistics.layout import ALONG_OPERANDS, MAX_PARTS, PAIRED_BYTES
from cupylosses.engines.row_statistics.plan import StatisticsPlan
from cupylosses.engines.softmax.layout import classes_last
from cupylosses.interop import ITEMSIZE
from cupylosses.jit.gpu import SECTOR_BYTES
from cupylosses.reference_math import divide

#: Minimum feature stride and number of elements for which an operand that would be read twice is copied first.
SPARSE_STEP = 3
SPARSE_ELEMENTS = 1 << 20
#: Maximum number of operands, and of vectors per row, for which lanes that process a short row each still find their
#: sectors in L1 when they read the next element.
FEW_OPERANDS, FEW_VECTORS = 2, 2
#: Operands that consist of few interleaved long rows (a stride of 1 between rows) are copied if they have at least
#: SHORT_ELEMENTS elements and a feature stride of at least SHORT_STEP. In second derivatives the feature stride must
#: instead be at least SHORT_STEP_ALONG elements and SHORT_BYTES_ALONG bytes. If gradients are written, the first
#: operand is copied from SPARSE_ELEMENTS elements and a stride of SHORT_STEP_WRITTEN on, because its gradient is
#: usually wanted: scattered stores cost more than the copy, scattered loads less.
SHORT_STEP, SHORT_STEP_WRITTEN = 8, 4
SHORT_ELEMENTS = 1 << 18
SHORT_STEP_ALONG = 4
SHORT_BYTES_ALONG = 16
#: Minimum bytes of a side of the tiles for which a copy by tiles is always worthwhile.
TILED_BYTES = 32
#: Settings that have already been checked.
_SETTINGS = SettingsCache()


def _checked_settings(
    loss: StatisticsLoss, rank: int, weight: str, masked: bool, normalized: bool, settings: tuple[Any, ...]
) -> tuple[Static, tuple[float, ...]]:
    """Checks the settings of a call whose operands with features have ``rank`` dimensions. Returns its static part and
    its scalars.
    """
    reduction, *options, feature_dim, out_dtype = settings
    reduction = checks.reduction(loss, reduction)
    scalars = tuple([checks.parameter(loss, s, x) for s, x in zip(loss.parameters, options, strict=False)])
    choices = options[len(loss.parameters) :]
    static = Static(
        reduction,
        row_checks.feature_dimension(loss, feature_dim, rank),
        weight,
        masked,
        None if out_dtype is None else checks.out_dtype(loss, out_dtype),
        normalized,
        tuple([checks.flag(loss, s, x) for s, x in zip(loss.flags, choices, strict=True)]),
        loss.norm_of(scalars),
        any([x.name == "keepdim" and bool(choice) for x, choice in zip(loss.flags, choices, strict=True)]),
    )
    return static, scalars


class StatisticsEngine(Engine):
    """Engine of losses that are formulas of sums over the features of each row."""

    name = "row_statistics"
    needs_chip = True
    Definition: ClassVar[Any] = StatisticsLoss
    Static: ClassVar[Any] = Static

    # Arguments

    def bind(
        self, loss: StatisticsLoss, arrays: tuple[Any, ...], settings: tuple[Any, ...], legacy: tuple[Any, ...] = ()
    ) -> Parts:
        served, arrays, settings = loss.chosen(arrays, settings)
        if served is not loss:
            return served.engine.bind(served, arrays, settings)
        return self.bind_rows(loss, arrays, settings, legacy)

    def bind_rows(
        self, loss: StatisticsLoss, arrays: tuple[Any, ...], settings: tuple[Any, ...], legacy: tuple[Any, ...]
    ) -> Parts:
        """Binds a call that ``loss`` computes itself, without delegating to another definition."""
        weight, mask, normalizer = arrays[-3:]
        if legacy and (legacy[0] is not None or legacy[1] is not None):
            settings = (checks.legacy_reduction(loss, *legacy), *settings[1:])
        kind, present, named = "", arrays[:-3], loss.array_names[:-3]
        if weight is not None:
            kind = "number" if interop.kind(weight) == "unknown" else "array"
        if kind == "array":
            present, named = (*present, weight), (*named, "weight")
        if mask is not None:
            present, named = (*present, mask), (*named, "mask")
        _, present = common_library(loss, named, present)
        rank = max([present[i].ndim for i in loss.vector_slots])
        static, scalars = _SETTINGS.find(
            (loss, rank, kind, mask is None, normalizer is None),
            settings,
            lambda: _checked_settings(loss, rank, kind, mask is not None, normalizer is not None, settings),
            loss.default_settings,
        )
        if kind == "number":
            scalars = (*scalars, checks.number(loss, "weight", weight))
        if normalizer is not None:
            normalizer = checks.normalizer(loss, normalizer, static.reduction)
        return loss, present, static, scalars, normalizer

    def names(self, call: Call) -> list[str]:
        loss: Any = call.loss
        return list(names(loss, call.static))

    def check(self, call: Call) -> None:
        loss: Any = call.loss
        row_checks.dtypes(loss, call.static, call.arrays)
        self._shapes(call)

    def _shapes(self, call: Call) -> tuple[tuple[int, ...], tuple[int, ...]]:
        loss: Any = call.loss
        count = len(names(loss, call.static))
        return row_checks.shapes(loss, call.static, [tuple(x.shape) for x in call.arrays[:count]])

    def promoted(self, call: Call, zero_d_widens: bool = False) -> str:
        dtypes = [checks.dtype_name(x) for x in call.arrays]
        return checks.promote(dtypes, None if zero_d_widens else [x.ndim for x in call.arrays])

    def unpacked(self, static: Static, packed: Any) -> Any:
        return packed[..., None] if static.keepdim else packed

    # Plans

    def plan(self, call: Call, tensors: tuple[TensorSpec, ...], promoted: str, machine: Machine) -> Plan:
        return StatisticsPlan(self, call, tensors, promoted, machine)

    def copies(
        self, call: Call, tensors: tuple[TensorSpec, ...], machine: Machine, writes: int
    ) -> Mapping[int, tuple[int, ...]]:
        """Returns the operands that kernels read from copies, with the strides of the copies.

        Operands are copied (1) by tiles, if their rows instead of their features are contiguous, or without tiles if
        there are few rows; (2) if they are large, at most a third of each of their sectors is used, and they would be
        read twice, or by lanes that process a short row each. In second derivatives, operands and tangents are copied
        (1) if they consist of few interleaved long rows; (2) if they have 16-bit elements, very long rows and strided
        features.

        Operands are still read in place if the lanes of a warp process neighbouring rows and together read a whole
        sector at once, or half a sector if there are few operands: then L1 has the rest for other lanes. If no
        gradients are written, half of that is enough.
        """
        if call.static.has_tangent:
            copies = _copies_along(call, tensors) | self._sparse_along(call, tensors, machine)
        else:
            copies = self._copies_apart(call, tensors, machine, writes)
        if not copies:
            return copies
        plan = StatisticsPlan(self, call, tensors, self.promoted(call), machine)
        few = ALONG_OPERANDS if call.static.has_tangent else FEW_OPERANDS
        least = SECTOR_BYTES if plan.read > few else SECTOR_BYTES // 2
        if not (writes or call.static.has_tangent):
            least //= 2
        return {i: strides for i, strides in copies.items() if plan.bytes_at_once(i) < least}

    def _copies_apart(
        self, call: Call, tensors: tuple[TensorSpec, ...], machine: Machine, writes: int
    ) -> dict[int, tuple[int, ...]]:
        """Returns the operands with strided features for which a copy is faster than reading single elements."""
        loss: Any = call.loss
        copies, twice = dict[int, tuple[int, ...]](), writes and call.static.reduction == "none"
        alone = writes and self._takes_rows_alone(call, tensors, machine)
        for i in loss.vector_slots:
            x = tensors[i]
            dim = call.static.feature_dim + x.ndim
            if dim < 0 or x.strides[dim] <= 1 or 0 in x.strides:
                continue
            strides = classes_last(x.shape, dim)
            elements, step = prod(x.shape), x.strides[dim]
            sparse = (twice or alone) and step >= SPARSE_STEP and elements >= SPARSE_ELEMENTS
            short = 1 in x.strides and step >= SHORT_STEP and elements >= SHORT_ELEMENTS
            written = 1 in x.strides and writes and i == loss.vector_slots[0]
            written = written and step >= SHORT_STEP_WRITTEN and elements >= SPARSE_ELEMENTS
            tiles = relayout.tiles(x.shape, x.strides, strides, ITEMSIZE[x.dtype], x.misalignment)
            tiled = tiles is not None and min(tiles.sides) * ITEMSIZE[x.dtype] >= TILED_BYTES
            if sparse or short or written or tiled:
                copies[i] = strides
        return copies

    def _sparse_along(
        self, call: Call, tensors: tuple[TensorSpec, ...], machine: Machine
    ) -> dict[int, tuple[int, ...]]:
        """Returns the 16-bit operands and tangents with strided features whose rows are too long for a cluster, and
        therefore are read twice. With shorter rows or wider elements, a copy is slower.
        """
        copies = {}
        for i, dim in _vectors_along(call, tensors):
            x = tensors[i]
            sparse = x.strides[dim] >= SPARSE_STEP and 0 not in x.strides and 1 not in x.strides
            if ITEMSIZE[x.dtype] == PAIRED_BYTES and sparse and prod(x.shape) >= SPARSE_ELEMENTS:
                copies[i] = classes_last(x.shape, dim)
        if not copies:
            return {}
        plan = StatisticsPlan(self, call, tensors, self.promoted(call), machine)
        return copies if plan.has_kernels and plan.layout.parts > MAX_PARTS else {}

    def _takes_rows_alone(self, call: Call, tensors: tuple[TensorSpec, ...], machine: Machine) -> bool:
        """True if one lane (or two, with 16-bit elements) processes a row of more than FEW_VECTORS vectors, of more
        than FEW_OPERANDS operands, some with strided features. Each lane then reads one element at a time, and L1 has
        no room for the sectors of all lanes.
        """
        loss: Any = call.loss
        vectors = [tensors[i] for i in loss.vector_slots]
        if len(vectors) <= FEW_OPERANDS or any(-x.ndim > call.static.feature_dim for x in vectors):
            return False
        if max([x.strides[call.static.feature_dim] for x in vectors]) < SPARSE_STEP:
            return False
        plan = StatisticsPlan(self, call, tensors, self.promoted(call), machine)
        lanes = 2 if max([ITEMSIZE[x.dtype] for x in vectors]) == 2 else 1
        at = plan.layout
        short = at.kind == "lanes" and at.width <= lanes
        return short and at.vec_size > 1 and plan.features > FEW_VECTORS * at.vec_size

    # Formulas

    def reference(self, call: Call, promoted: str, readable: bool = True) -> Any:
        return row_reference.evaluate(call, promoted)

    def floating(self, call: Call) -> Wanted:
        return tuple([checks.dtype_name(x) in checks.FLOATING for x in call.arrays])

    # Transforms

    def outputs(self, call: Call, strides: Sequence[tuple[int, ...]], promoted: str) -> list[TensorSpec]:
        shape = self._shapes(call)[1] if call.static.reduction == "none" else ()
        return [contiguous(call.static.out_dtype or promoted, shape)]

    def apart(self, call: Call, promoted: str, wanted: Wanted, traced: bool) -> Apart | None:
        """Splits a reduced loss into a call that returns a float64 value per row, and a quotient that the array library
        computes. For values per row, a batch dimension is one more dimension of rows; and there are few of them to sum.
        """
        static = call.static
        weight = len(call.loss.operands)
        differentiated = static.weighs_mean and static.weight == "array" and wanted[weight]
        if static.reduction == "none" or (traced and not differentiated):
            return None
        per_row = call._replace(
            static=static._replace(reduction="none", out_dtype="float64", normalized=False), normalizer=None
        )
        calls, rows, factor = [per_row], self._shapes(call)[1], 1.0
        if static.counted:
            # The divisor is summed over weight and mask before they broadcast to the rows. ``factor`` accounts for the
            # number of rows that share an element.
            weighs = static.weighs_mean and static.weight == "array"
            operands = [*[call.arrays[weight]] * weighs, *[call.arrays[-1]] * static.masked]
            counted = counting(weighs, static.masked)
            size = prod(pointwise_checks.broadcast(counted, [tuple(x.shape) for x in operands]))
            factor = (prod(rows) / size if size else 1.0) * (
                call.scalars[-1] if static.weighs_mean and not weighs else 1.0
            )
            calls.append(Call(counted, tuple(operands), PointwiseStatic("sum", None, "float64")))

        def below(values: list[Any]) -> Any:
            if len(values) > 1:
                return values[1] * factor
            if call.normalizer is not None:
                return call.normalizer
            return constant_divisor(static, rows) * (call.scalars[-1] if static.weighs_mean else 1.0)

        def finish(xp: Any, values: list[Any]) -> Any:
            quotient = divide(xp, xp.sum(values[0]), below(values))
            return xp.astype(quotient, getattr(xp, static.out_dtype or promoted))

        return Apart(tuple(calls), finish, below, factor)

    def divided_by(self, call: Call, divisor: Any, grad_output: Any) -> tuple[Call, Any]:
        """Returns the call that computes a value per row, and the ``grad_output`` of each row."""
        xp = interop.namespace(grad_output)
        static = call.static._replace(reduction="none", out_dtype="float64", normalized=False)
        upstream = xp.astype(grad_output, xp.float64)
        if call.static.reduction != "none":
            # With a divisor of 0, no row has a gradient, and neither has that gradient itself: 0 * inf must not occur.
            # The reciprocal is multiplied, as in the kernels.
            if isinstance(divisor, (int, float)):
                upstream = upstream * (1.0 / divisor if divisor else 0.0)
            else:
                empty = divisor == 0
                upstream = xp.where(empty, 0.0, upstream) * (1.0 / xp.where(empty, xp.ones_like(divisor), divisor))
            upstream = xp.broadcast_to(upstream, self._shapes(call)[1])
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
        """Makes the batch the first dimension of the rows. To align the batch dimensions, dimensions of size 1 are
        inserted after them, until all samples have as many dimensions as the rows (and one more with features).
        """
        if call.static.reduction != "none":
            return None
        loss: Any = call.loss
        arrays, has = list(call.arrays), has_features(loss, call.static)
        ranks = [x.ndim - (d is not None) for x, d in zip(arrays, dims, strict=True)]
        rank = max([r for r, h in zip(ranks, has, strict=False) if h])
        moving = [i for i, x in enumerate(call.static.has_tangent) if x]
        for i, (x, d) in enumerate(zip(call.arrays, dims, strict=True)):
            if d is None:
                continue
            of = i if i < len(has) else moving[i - len(has)]
            x = x.movedim(d, 0)
            arrays[i] = x.reshape(size, *(1,) * (rank - (not has[of]) - x.ndim + 1), *x.shape[1:])
        if moving:
            for i in moving:
                # A tangent has the shape of its array.
                tangent = arrays[len(has) + moving.index(i)]
                if tangent.ndim > arrays[i].ndim:
                    arrays[i] = arrays[i].expand(tangent.shape)
                elif tangent.ndim < arrays[i].ndim:
                    arrays[len(has) + moving.index(i)] = tangent.expand(arrays[i].shape)
        return call._replace(arrays=tuple(arrays))

    # Warm-up

    def placeholders(
        self, loss: StatisticsLoss, dtypes: Sequence[str], shapes: Sequence[tuple[int, ...]], options: Mapping[str, Any]
    ) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Returns dtypes and shapes of all arrays. Labels have the shape of the rows, and the dtype that is named for
        them, otherwise the last one.
        """
        vectors = [x.name for x in loss.operands if x.name not in loss.row_operands]
        full = tuple(shapes[0])
        dim = row_checks.feature_dimension(loss, options.get("feature_dim", -1), len(full))
        rows = row_checks.without(full, dim)
        arrays = {"weight": (dtypes[0], rows), "mask": ("bool", rows), "normalizer": ("float64", ())}
        for i, x in enumerate(loss.operands):
            dtype = dtypes[min(i, len(dtypes) - 1)]
            arrays[x.name] = dtype, tuple(shapes[min(i, len(shapes) - 1)]) if x.name in vectors else rows
        return arrays

    def trained(self, call: Call) -> Wanted:
        """True for the operands with features; labels, weight and mask are not trained."""
        loss: Any = call.loss
        return tuple([i < len(loss.operands) - len(loss.row_operands) for i in range(len(call.arrays))])

    # Standing in for torch's functions

    def differs(
        self, loss: StatisticsLoss, call: Call, takes: Callable[[Question], str | None], autocast: bool
    ) -> str | None:
        if call.loss.engine is not self:
            # An element-wise loss of distances that the caller's function has computed: torch has the same formula.
            alike = len({(tuple(x.shape), checks.dtype_name(x)) for x in call.arrays}) == 1
            return None if alike and 0 not in call.arrays[0].shape else SHAPES
        # Another definition may compute the loss (`StatisticsLoss.chosen`).
        loss, static = call.loss, call.static  # type: ignore[assignment]
        if static.weight or static.masked or static.normalized or static.feature_dim != -1:
            return ARGUMENTS
        small = tuple([(x.name, (1,) if x.name in loss.row_operands else (1, 1), "float32") for x in loss.operands])
        if takes(Question(small, (("reduction", static.reduction),))) is None:
            return ARGUMENTS
        features = {tuple(x.shape) for x, has in zip(call.arrays, has_features(loss, static), strict=True) if has}
        labels = {tuple(x.shape) for x, has in zip(call.arrays, has_features(loss, static), strict=True) if not has}
        full, rows = self._shapes(call)
        if features != {full} or not labels <= {rows} or 0 in full or len(full) > 2:
            return SHAPES
        dtypes = [checks.dtype_name(x) for x in call.arrays]
        vectors = dtypes[: len(loss.operands) - len(loss.row_operands)]
        if any(x not in checks.FLOATING for x in vectors) or (len(set(vectors)) > 1 and not autocast):
            return DTYPE
        if call.arrays[len(vectors) :]:
            arrays = tuple([(n, s, d) for (n, s, _), d in zip(small, dtypes, strict=True)])
            if not autocast and takes(Question(arrays)) != vectors[0]:
                return DTYPE
        return None


ROW_STATISTICS = StatisticsEngine()


def _vectors_along(call: Call, tensors: tuple[TensorSpec, ...]) -> Iterator[tuple[int, int]]:
    """Yields the position and the feature dimension of each operand with features, and of each tangent of one."""
    loss: Any = call.loss
    moving = [i for i, x in enumerate(call.static.has_tangent) if x]
    slots = [*range(len(tensors) - len(moving)), *moving]
    for i, (x, slot) in enumerate(zip(tensors, slots, strict=True)):
        dim = call.static.feature_dim + x.ndim
        if slot in loss.vector_slots and dim >= 0:
            yield i, dim


def _copies_along(call: Call, tensors: tuple[TensorSpec, ...]) -> dict[int, tuple[int, ...]]:
    """Returns the operands and tangents of a derivative along tangents that consist of interleaved long rows and are
    read from copies, with the strides of these.
    """
    copies = {}
    for i, dim in _vectors_along(call, tensors):
        x = tensors[i]
        if 1 not in x.strides or 0 in x.strides or prod(x.shape) < SHORT_ELEMENTS:
            continue
        step = x.strides[dim]
        if step >= SHORT_STEP_ALONG and step * ITEMSIZE[x.dtype] >= SHORT_BYTES_ALONG:
            copies[i] = classes_last(x.shape, dim)
    return copies

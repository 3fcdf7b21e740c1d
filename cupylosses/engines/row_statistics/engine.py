"""The engine of row statistics, as the rest of the library sees it (:mod:`cupylosses.engines.base`)."""

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

#: Distance of the features of a vector, and its elements, from which on a copy is read where it would be read twice.
SPARSE_STEP = 3
SPARSE_ELEMENTS = 1 << 20
#: Operands, and vectors of a row, of which lanes that take short rows find their sectors in L1 again, at most.
FEW_OPERANDS, FEW_VECTORS = 2, 2
#: Few long vectors next to each other are copied from this distance of neighbouring features on, and from so many
#: elements on; for second derivatives, from another distance on, in elements and in bytes. The first vector, whose
#: gradient is wanted as a rule, is copied from a shorter distance on where gradients are written, and from
#: SPARSE_ELEMENTS on: scattered stores cost more than the copy, scattered loads less.
SHORT_STEP, SHORT_STEP_WRITTEN = 8, 4
SHORT_ELEMENTS = 1 << 18
SHORT_STEP_ALONG = 4
SHORT_BYTES_ALONG = 16
#: Bytes of neighbours on both sides from which on any copy by tiles is worth while.
TILED_BYTES = 32
#: Settings that were checked before.
_SETTINGS = SettingsCache()


def _checked_settings(
    loss: StatisticsLoss, rank: int, weight: str, masked: bool, normalized: bool, settings: tuple[Any, ...]
) -> tuple[Static, tuple[float, ...]]:
    """The static part of a call, and its scalars, for vectors of so many dimensions."""
    reduction, *options, feature_dim, out_dtype = settings
    reduction = checks.reduction(loss, reduction)
    scalars = tuple([checks.parameter(loss, s, x) for s, x in zip(loss.parameters, options, strict=False)])
    chosen = options[len(loss.parameters) :]
    static = Static(
        reduction,
        row_checks.feature_dimension(loss, feature_dim, rank),
        weight,
        masked,
        None if out_dtype is None else checks.out_dtype(loss, out_dtype),
        normalized,
        tuple([checks.flag(loss, s, x) for s, x in zip(loss.flags, chosen, strict=True)]),
        loss.norm_of(scalars),
        any([x.name == "keepdim" and bool(given) for x, given in zip(loss.flags, chosen, strict=True)]),
    )
    return static, scalars


class StatisticsEngine(Engine):
    """Losses of rows from sums over their features."""

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
        """:meth:`bind` of a loss that serves itself."""
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
        """Vectors whose rows are next to each other in place of their features are read from copies by tiles, or from
        plain ones if there are few rows; so are large ones of whose sectors a third or less is used, if they would be
        read twice, or by lanes that take short rows alone. Of second derivatives, vectors and tangents are copied that
        lie like few long vectors next to each other, and those of 16 bits in very long rows whose features lie apart.

        Vectors are read where they lie if the lanes of a warp have neighbouring rows, of which they read a sector at
        once, or half of one if operands are few: other lanes then find the rest in L1. Where no gradients are written,
        half as much will do.
        """
        if call.static.has_tangent:
            found = _copies_along(call, tensors) | self._sparse_along(call, tensors, machine)
        else:
            found = self._copies_apart(call, tensors, machine, writes)
        if not found:
            return found
        plan = StatisticsPlan(self, call, tensors, self.promoted(call), machine)
        few = ALONG_OPERANDS if call.static.has_tangent else FEW_OPERANDS
        least = SECTOR_BYTES if plan.read > few else SECTOR_BYTES // 2
        if not (writes or call.static.has_tangent):
            least //= 2
        return {i: strides for i, strides in found.items() if plan.bytes_at_once(i) < least}

    def _copies_apart(
        self, call: Call, tensors: tuple[TensorSpec, ...], machine: Machine, writes: int
    ) -> dict[int, tuple[int, ...]]:
        """The vectors whose features lie apart, of which a copy is faster than one element after another."""
        loss: Any = call.loss
        found, twice = dict[int, tuple[int, ...]](), writes and call.static.reduction == "none"
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
                found[i] = strides
        return found

    def _sparse_along(
        self, call: Call, tensors: tuple[TensorSpec, ...], machine: Machine
    ) -> dict[int, tuple[int, ...]]:
        """The vectors and tangents of 16 bits whose features lie apart, of rows that are too long for a cluster, and so
        are read twice. Shorter rows, and wider elements, lose by a copy.
        """
        found = {}
        for i, dim in _vectors_along(call, tensors):
            x = tensors[i]
            sparse = x.strides[dim] >= SPARSE_STEP and 0 not in x.strides and 1 not in x.strides
            if ITEMSIZE[x.dtype] == PAIRED_BYTES and sparse and prod(x.shape) >= SPARSE_ELEMENTS:
                found[i] = classes_last(x.shape, dim)
        if not found:
            return {}
        plan = StatisticsPlan(self, call, tensors, self.promoted(call), machine)
        return found if plan.has_kernels and plan.layout.parts > MAX_PARTS else {}

    def _takes_rows_alone(self, call: Call, tensors: tuple[TensorSpec, ...], machine: Machine) -> bool:
        """True of several operands whose rows of some vectors have a lane each, or two in 16 bits: L1 has no room for
        the sectors of all lanes, of which each reads one element at a time.
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
        """A float64 value per row, for which a batch is one more dimension of rows. The rows' values are few: the array
        library adds them up and divides.
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
            # The divisor has dimensions of size 1: what is broadcast is read once, and counted as often as it is used.
            weighs = static.weighs_mean and static.weight == "array"
            chosen = [*[call.arrays[weight]] * weighs, *[call.arrays[-1]] * static.masked]
            counted = counting(weighs, static.masked)
            size = prod(pointwise_checks.broadcast(counted, [tuple(x.shape) for x in chosen]))
            factor = (prod(rows) / size if size else 1.0) * (
                call.scalars[-1] if static.weighs_mean and not weighs else 1.0
            )
            calls.append(Call(counted, tuple(chosen), PointwiseStatic("sum", None, "float64")))

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
        """The values of the rows, and a ``grad_output`` for each of them."""
        xp = interop.namespace(grad_output)
        static = call.static._replace(reduction="none", out_dtype="float64", normalized=False)
        upstream = xp.astype(grad_output, xp.float64)
        if call.static.reduction != "none":
            # With nothing to divide by no row has a gradient, nor has that gradient one: 0 * inf must not arise. The
            # reciprocal is what kernels multiply by.
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
        """A batch is the first dimension of rows, of which every array has as many as the rows of a sample."""
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
        """Labels have the shape of the rows, and the dtype that is named for them, or that of the vectors."""
        vectors = [x.name for x in loss.operands if x.name not in loss.row_operands]
        full = tuple(shapes[0])
        dim = row_checks.feature_dimension(loss, options.get("feature_dim", -1), len(full))
        rows = row_checks.without(full, dim)
        found = {"weight": (dtypes[0], rows), "mask": ("bool", rows), "normalizer": ("float64", ())}
        for i, x in enumerate(loss.operands):
            dtype = dtypes[min(i, len(dtypes) - 1)]
            found[x.name] = dtype, tuple(shapes[min(i, len(shapes) - 1)]) if x.name in vectors else rows
        return found

    def trained(self, call: Call) -> Wanted:
        """The vectors; neither labels, nor weight, nor mask."""
        loss: Any = call.loss
        return tuple([i < len(loss.operands) - len(loss.row_operands) for i in range(len(call.arrays))])

    # Standing in for torch's functions

    def differs(
        self, loss: StatisticsLoss, call: Call, takes: Callable[[Question], str | None], autocast: bool
    ) -> str | None:
        if call.loss.engine is not self:
            # Of distances that a function of the caller's has computed: torch's formula of them is the same.
            alike = len({(tuple(x.shape), checks.dtype_name(x)) for x in call.arrays}) == 1
            return None if alike and 0 not in call.arrays[0].shape else SHAPES
        # A loss may be served by the definition of another.
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
    """The positions of vectors and tangents of vectors, and of the dimension of their features."""
    loss: Any = call.loss
    moving = [i for i, x in enumerate(call.static.has_tangent) if x]
    slots = [*range(len(tensors) - len(moving)), *moving]
    for i, (x, slot) in enumerate(zip(tensors, slots, strict=True)):
        dim = call.static.feature_dim + x.ndim
        if slot in loss.vector_slots and dim >= 0:
            yield i, dim


def _copies_along(call: Call, tensors: tuple[TensorSpec, ...]) -> dict[int, tuple[int, ...]]:
    """The vectors and tangents of a derivative along tangents that lie next to each other and are read from copies."""
    found = {}
    for i, dim in _vectors_along(call, tensors):
        x = tensors[i]
        if 1 not in x.strides or 0 in x.strides or prod(x.shape) < SHORT_ELEMENTS:
            continue
        step = x.strides[dim]
        if step >= SHORT_STEP_ALONG and step * ITEMSIZE[x.dtype] >= SHORT_BYTES_ALONG:
            found[i] = classes_last(x.shape, dim)
    return found

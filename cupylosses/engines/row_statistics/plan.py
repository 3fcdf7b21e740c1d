"""Plans of row statistics: the kernels that compute a value and its gradients, and their launch geometry.

One launch over all rows computes the value and the gradients of operands that have the full shape. The gradient of a
broadcast operand is a sum over rows or features, which takes up to three launches: the first stores the coefficients of
each row, the second sums slices, and the third adds the sums of slices.

A derivative along tangents is a row-statistics loss again, whose operands are those of the loss followed by the
tangents. The same launches compute its value (the JVP), and its gradients (products of the second derivatives with the
tangents).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from math import prod
from typing import Any

from cupylosses import checks
from cupylosses.call import Call
from cupylosses.definition.curvature import Pairs, vanishing
from cupylosses.engines.base import Engine, Machine, Plan, Step, TensorSpec, Wanted, contiguous
from cupylosses.engines.device import EXPECTATIONS
from cupylosses.engines.pointwise import layout as pointwise_layout
from cupylosses.engines.pointwise.definition import counting
from cupylosses.engines.pointwise.plan import PointwisePlan
from cupylosses.engines.pointwise.reduction import Static as PointwiseStatic
from cupylosses.engines.row_statistics import checks as row_checks
from cupylosses.engines.row_statistics import layout as row_layout
from cupylosses.engines.row_statistics.call import Static, constant_divisor, has_features, names
from cupylosses.engines.row_statistics.codegen import (
    MOST_VECTORS,
    ROOMY_THREADS,
    RowKernel,
    SumKernel,
    statistics_of,
    stored_per_row,
)
from cupylosses.engines.row_statistics.curvature import curved_pairs
from cupylosses.engines.row_statistics.definition import MAX_SLOTS, StatisticsLoss
from cupylosses.engines.strides import broadcast_strides
from cupylosses.interop import ITEMSIZE
from cupylosses.jit import compiler
from cupylosses.jit.gpu import WARP

#: Stages whose kernels write gradients of whole rows.
WRITING = ("value_and_gradient", "verify_gradient", "gradient")
#: Stages in which several blocks share a row if there are few rows (`Layout.split`).
SPLIT = ("value", "sums_for_values", "values_of_sums", "sums_for_gradients", "gradients_of_sums")


class StatisticsPlan(Plan):
    """Plan of a row-statistics loss."""

    static: Static
    loss: StatisticsLoss

    def __init__(
        self, engine: Engine, call: Call, tensors: tuple[TensorSpec, ...], promoted: str, machine: Machine
    ) -> None:
        super().__init__(engine, call, tensors, promoted, machine)
        static = self.static
        self.result = static.out_dtype or promoted
        named = names(self.loss, static)
        moving = [i for i, x in enumerate(static.has_tangent) if x]
        has = has_features(self.loss, static)
        #: For each array, tangents included, True if it has the feature dimension.
        self._has_features = (*has, *[has[i] for i in moving])
        self.full_shape, self.rows_shape = row_checks.shapes(
            self.loss, static, [x.shape for x in tensors[: len(named)]]
        )
        self.features, self.rows = self.full_shape[static.feature_dim], prod(self.rows_shape)
        self._operands = len(named) - static.masked
        #: For each operand, True if it has a tangent; empty unless the call is a derivative along tangents.
        self._has_tangent = tuple([bool(x) for x in static.has_tangent[: self._operands]])
        #: Positions of the arrays in the order of the kernel's streams: operands with features, followed by their
        #: tangents; then labels, followed by theirs.
        slots = [*range(self._operands), *range(len(named), len(tensors))]
        self._streams = [i for i in slots if self._has_features[i]] + [i for i in slots if not self._has_features[i]]
        self.empty = prod(self.full_shape) == 0 or not self.has_kernels
        self.scalar = static.reduction != "none"
        spec = contiguous(self.result, () if self.scalar else self.rows_shape)
        self.shape, self.strides = spec.shape, spec.strides
        self.divisor = constant_divisor(static, self.rows_shape)
        self.weighted = static.weighs_mean and static.weight == "number"
        self.counted = static.counted
        self.differentiable = tuple([x.dtype in checks.FLOATING and i < len(named) for i, x in enumerate(tensors)])
        sizes = [prod(self.full_shape) if has else self.rows for has in self._has_features]
        self.speculative = tuple([prod(x.shape) == n for x, n in zip(tensors, sizes, strict=True)])
        if self._has_tangent:
            others = (False,) * (len(tensors) - self._operands)
            self.vanishing = (*vanishing(named[: self._operands], self._has_tangent, self.curved), *others)
        if static.weighs_mean and static.weight == "array":
            self.divides_by = (self._operands - 1,)
        storage = tuple([x.dtype for x in tensors])
        self.slot = hash((self.loss.name, static, self.full_shape, storage, self.result)) % EXPECTATIONS
        self._launchers: dict[Any, compiler.Launcher] = {}
        self._steps: dict[tuple[int, bool], Step] = {}

    @cached_property
    def curved(self) -> Pairs:
        """Pairs of operands whose mixed second derivatives may be nonzero."""
        static = self.static
        return curved_pairs(self.loss, static.flags, static.norm, static.weight == "array")

    @cached_property
    def statistics(self) -> int:
        """Number of statistics of a row, including their derivatives along tangents."""
        return statistics_of(self.loss, self.static.flags, self._has_tangent)

    @cached_property
    def norm(self) -> str:
        """Kernels' name for the degree of the norms. With float64 operands, powers other than squares are summed
        relative to a scale, because they may overflow.
        """
        norm, wide = self.static.norm, "float64" in [self.tensors[i].dtype for i in self.loss.vector_slots]
        return "shifted" if wide and norm not in ("", "1", "2", "scaled", "inf") else norm

    @property
    def has_kernels(self) -> bool:
        """False for derivatives along tangents with more statistics and labels than dual numbers have slots."""
        labels = sum([not self._has_features[i] for i in self._streams])
        return not self._has_tangent or self.statistics + labels <= MAX_SLOTS

    @cached_property
    def layout(self) -> row_layout.Layout:
        """Geometry of the launches over all rows."""
        dim = self.static.feature_dim
        operands: list[row_layout.RowStream] = []
        others: list[row_layout.RowStream] = []
        for i in [*self._streams, *[self._operands] * self.static.masked]:
            x = self.tensors[i]
            for written in (False, True):
                lies = x.gradient if written else x
                if written and not (self.speculative[i] and self.differentiable[i]):
                    strides: Sequence[int] = (0,) * len(self.full_shape if self._has_features[i] else self.rows_shape)
                else:
                    full = self.full_shape if self._has_features[i] else self.rows_shape
                    strides = broadcast_strides(lies.shape, lies.strides, full)
                stream = row_layout.RowStream(tuple(strides))
                if self._has_features[i]:
                    stream = row_layout.RowStream(
                        row_checks.without(strides, dim), strides[dim], ITEMSIZE[x.dtype], lies.misalignment
                    )
                (others if written else operands).append(stream)
        mask = operands.pop() if self.static.masked else row_layout.RowStream((0,) * len(self.rows_shape))
        result = row_layout.RowStream(contiguous("float64", self.rows_shape).strides)
        gradients = others[: len(operands)]
        vectors: list[row_layout.RowStream | None] = [x for x in operands if x.itemsize]
        read, room = len(vectors), self.machine.chip.shared - row_layout.DECLARED_BYTES
        # Gradients that are not written do not restrict the layout.
        written_to = [self.speculative[i] and self.differentiable[i] for i in self._streams]
        vectors += [x if s else None for x, s in zip(gradients, written_to, strict=True) if x.itemsize]
        return row_layout.layout(
            self.rows_shape, self.features, vectors, [*operands, *gradients, mask, result], read,
            bool(self._has_tangent), room, self.machine.chip.clusters,
        )  # fmt: skip

    @property
    def read(self) -> int:
        """Number of arrays with features that kernels read, tangents included."""
        return sum(self._has_features)

    def bytes_at_once(self, slot: int) -> int:
        """Returns the number of contiguous bytes of an array that the lanes of a warp read at the same time, if its
        rows are neighbours in memory.
        """
        return self.layout.rows_at_once(self._streams.index(slot)) * ITEMSIZE[self.tensors[slot].dtype]

    def _is_apart(self, wanted: Wanted) -> bool:
        """True if each part of a row has a block in the kernel that computes the value and its gradients."""
        if self.layout.apart is None:
            return False
        writes = any([w and has for w, has in zip(wanted, self._has_features, strict=False)])
        return writes and self.layout.parts_meet(self.machine.processors, self._threads_of_parts(wanted))

    def _written(self, wanted: Wanted) -> int:
        """Returns the number of wanted gradients that have features."""
        return sum([w and has for w, has in zip(wanted, self._has_features, strict=False)])

    def _threads_of_parts(self, wanted: Wanted) -> int:
        """Returns how many threads of a kernel of parts of rows a multiprocessor runs, limited by its registers."""
        if self._has_tangent:
            return ROOMY_THREADS if self.read > MOST_VECTORS else row_layout.MAX_BLOCK_THREADS
        written = self._written(wanted)
        narrow = min([ITEMSIZE[x.dtype] for x, has in zip(self.tensors, self._has_features, strict=False) if has]) < 4
        if written > 1 or self.static.masked or (self.loss.first and narrow):
            return row_layout.MAX_BLOCK_THREADS
        return row_layout.RESIDENT_THREADS

    def checks_apart(self, wanted: Wanted) -> bool:
        return self._is_apart(self.writable(wanted))

    def recorded(self, wanted: Wanted) -> int:
        if self._is_apart(self.writable(wanted)):
            return self.layout.part_memory(self.rows, self.statistics)
        return self.records

    def zeroed(self, wanted: Wanted) -> bool:
        return self._is_apart(self.writable(wanted))

    @cached_property
    def partials(self) -> int:  # type: ignore[override]
        return self.layout.chunks + (self._part_sums if self.layout.split else 0)

    @property
    def _part_sums(self) -> int:
        """Number of doubles that the statistics of all parts of all rows take."""
        return self.rows * self.layout.parts * row_layout.part_numbers(self.statistics)

    @cached_property
    def records(self) -> int:  # type: ignore[override]
        return self.layout.records

    def launcher(self, stage: str, wanted: Wanted, counted: bool) -> compiler.Launcher:
        return self._launcher(stage, wanted, counted, False)

    def check(self, wanted: Wanted, counted: bool) -> compiler.Launcher:
        return self._launcher(self.check_stage(wanted), wanted, counted, True)

    def _launcher(self, stage: str, wanted: Wanted, counted: bool, checks: bool) -> compiler.Launcher:
        """Returns the launcher of a stage: with ``checks``, the launch that checks its gradients in backward."""
        launcher = self._launchers.get((stage, wanted, counted, checks))
        if launcher is None:
            x = self.layout
            kernel = self._kernel(stage, wanted, counted)
            fixed = (x.chunks, x.rows_per_chunk, x.words)
            keeps = True in wanted and stage in WRITING
            blocks = x.blocks_of_check if checks else x.blocks
            grid, threads, shared = blocks(self.machine.processors), x.threads, x.shared if keeps else 0
            if kernel.staged:
                shared += x.staging * self._written(wanted)
            if kernel.layout == row_layout.PART:
                assert x.apart is not None
                grid, threads, shared = self.rows * x.parts, x.apart.threads, 0
                if stage == "value_and_gradient":
                    at_once = self.machine.processors * kernel.resident
                    fixed = (x.chunks, at_once, x.words_of_parts(kernel.resident))
                    shared = x.apart.shared(kernel.resident)
                if stage == "values_of_sums":
                    grid, threads = self.rows, WARP
            launcher = self.machine.launcher(kernel, grid, threads, fixed, shared)
            self._launchers[stage, wanted, counted, checks] = launcher
        return launcher

    def _kernel(self, stage: str, wanted: Wanted, counted: bool) -> RowKernel:
        x = self.layout
        waits = self._is_apart(wanted)
        apart = stage in ("value_and_gradient", "verify_gradient") and waits
        writes = True in wanted and not stage.startswith("sums")
        layout = x.kind, x.vec_size, x.wide, x.held, x.copied and True in wanted
        widths = x.width if x.kind == "lanes" else 0, x.threads, x.ahead if writes else x.value_ahead
        rows, resident = (x.parts, x.rounds, x.cluster), 0
        if x.apart and ((stage == "value_and_gradient" and waits) or (x.split and stage in SPLIT)):
            rows, resident = (x.parts, 1, 1), x.apart.resident(self._threads_of_parts(wanted))
            held = stage == "value_and_gradient" and x.apart.held(resident)
            layout = row_layout.PART, x.vec_size, x.wide, held, held and x.apart.whole
            widths = 0, x.apart.threads, x.apart.ahead if writes else x.value_ahead
        static = self.static
        return RowKernel(
            self.loss, static.flags, self.norm, stage, tuple([t.dtype for t in self.tensors[: self._operands]]),
            self.result, static.weight, static.masked, tuple(wanted[: self._operands]), *layout, x.many, *widths, *rows,
            counted, not self.scalar, apart, self._has_tangent, resident, x.paired, x.in_registers,
            stage in WRITING and x.stages(self._written(wanted)),
        )  # fmt: skip

    def unreduced_step(self, counted: bool) -> Step:
        if not self.layout.split:
            return Step((self.launcher("unreduced", self.nothing, counted),))
        stages = "sums_for_values", "values_of_sums"
        return Step(tuple([self.launcher(x, self.nothing, counted) for x in stages]), partials=self._part_sums)

    def gradient_steps(
        self, wanted: Wanted, upstream: tuple[tuple[int, ...], int] | None, counted: bool
    ) -> Sequence[Step]:
        writable, steps = self.writable(wanted), []
        if upstream is not None and True in writable:
            slots = tuple([i for i, w in enumerate(writable) if w])
            if self.layout.split:
                stages = "sums_for_gradients", "gradients_of_sums"
                launchers = tuple([self.launcher(x, writable, counted) for x in stages])
                steps.append(Step(launchers, slots, self._part_sums))
            else:
                steps.append(Step((self.launcher("gradient", writable, counted),), slots))
        return steps + [self._sum(i, counted) for i, w in enumerate(wanted) if w and not writable[i]]

    def upstream_strides(self) -> tuple[int, ...] | None:
        return None if self.scalar else self.strides

    def _sum(self, slot: int, counted: bool) -> Step:
        """Returns the launches that sum the gradient of the broadcast operand in ``slot``."""
        step = self._steps.get((slot, counted))
        if step is None:
            step = self._steps[slot, counted] = self._summed(slot, counted)
        return step

    def _summed(self, slot: int, counted: bool) -> Step:
        dim, x = self.static.feature_dim, self.tensors[slot]
        shape = self.full_shape if self._has_features[slot] else self.rows_shape
        rows = list(contiguous("float64", self.rows_shape).strides)
        if self._has_features[slot]:
            streams = [
                pointwise_layout.Stream(
                    broadcast_strides(t.shape, t.strides, shape), ITEMSIZE[t.dtype], t.misalignment, read=True
                )
                for t in [self.tensors[i] for i in self._streams if self._has_features[i]]
            ]
            rows.insert(len(shape) + dim, 0)
            numbers = stored_per_row(self.loss, self.static.flags, self.norm, 0, self._has_tangent)
            streams += [pointwise_layout.Stream(tuple(rows), 8, 8, read=True)] * numbers
        else:
            streams = [pointwise_layout.Stream(tuple(rows), 8, 8, read=True)]
        # Each array of stored coefficients begins at a multiple of 8 bytes, not of 16: hence the misalignment of 8.
        target = pointwise_layout.Stream(broadcast_strides(x.shape, x.gradient.strides, shape), ITEMSIZE[x.dtype])
        none = pointwise_layout.Stream((0,) * len(shape), 8)
        layout = pointwise_layout.sum_layout(shape, [*(s.strides for s in streams), none.strides], target.strides)
        layout = pointwise_layout.sum_in_vectors(layout, [*streams, none], target)
        many = max(len(layout.kept), len(layout.reduced)) > 1
        rank = pointwise_layout.max_rank(len(streams)) if many else 1
        fixed = (self.rows, *layout.arguments(rank, rank))
        static = self.static
        kernel = SumKernel(
            self.loss, static.flags, self.norm, "slices", tuple([t.dtype for t in self.tensors[: self._operands]]),
            self.result, static.weight, static.masked, slot, layout.columns, layout.vec_size,
            layout.access[: len(streams)], many, counted, self._has_tangent,
        )  # fmt: skip
        kinds = {"slices": layout.tasks * layout.warps, "combine": layout.outputs}
        if layout.slices == 1:
            del kinds["combine"]
        of_rows = tuple([i == slot for i in range(len(self.tensors))])
        launchers = [self.launcher("coefficients", of_rows, counted)]
        for kind, count in kinds.items():
            grid = pointwise_layout.sum_grid(count, self.machine.processors)
            launchers.append(
                self.machine.launcher(replace(kernel, kind=kind), grid, pointwise_layout.MAX_THREADS, fixed)
            )
        labels = sum([not self._has_features[i] for i in self._streams])
        numbers = stored_per_row(self.loss, static.flags, self.norm, labels, self._has_tangent)
        partials = numbers * self.rows + layout.slices * layout.outputs
        return Step(tuple(launchers), (slot,), partials)

    def denominator(self) -> tuple[Plan, tuple[int, ...], float]:
        """Returns the plan that computes the divisor: the sum of the weights, or the number of rows, that the mask
        keeps.
        """
        return self._denominator

    @cached_property
    def _denominator(self) -> tuple[Plan, tuple[int, ...], float]:
        static = self.static
        weighs = static.weighs_mean and static.weight == "array"
        positions = (*[self._operands - 1] * weighs, *[self._operands] * static.masked)
        tensors = tuple([self.tensors[i] for i in positions])
        loss = counting(weighs, static.masked)
        compute = "float64" if "float64" in [x.dtype for x in tensors] else "float32"
        call = Call(loss, (), PointwiseStatic("sum", None, "float64"))
        plan = PointwisePlan(loss.engine, call, tensors, compute, self.machine)
        # Each element of a broadcast array counts once for every row that shares it.
        return plan, positions, self.rows / plan.elements

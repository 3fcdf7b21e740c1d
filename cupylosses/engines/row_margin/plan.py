"""Plans of margin losses: one kernel reads each row once, and computes the value, the gradients, or both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from math import prod

from cupylosses.call import Call
from cupylosses.engines.base import Engine, Machine, Plan, Step, TensorSpec, Wanted
from cupylosses.engines.device import EXPECTATIONS
from cupylosses.engines.pointwise.definition import counting
from cupylosses.engines.pointwise.plan import PointwisePlan
from cupylosses.engines.pointwise.reduction import Static as PointwiseStatic
from cupylosses.engines.row_margin import checks as margin_checks
from cupylosses.engines.row_margin import layout as margin_layout
from cupylosses.engines.row_margin.call import Static, constant_divisor, without
from cupylosses.engines.row_margin.codegen import WRITING, MarginKernel
from cupylosses.engines.row_margin.definition import MarginLoss
from cupylosses.engines.softmax.codegen import SELF_COUNTING_STAGES, TALLYING_STAGES
from cupylosses.engines.softmax.labels import site_of
from cupylosses.engines.softmax.layout import SELF_COUNTING_ROWS, RowStrides
from cupylosses.engines.strides import broadcast_strides, dense_strides
from cupylosses.interop import ITEMSIZE
from cupylosses.jit import compiler, gpu


class MarginPlan(Plan):
    """Plan of a margin loss."""

    static: Static
    loss: MarginLoss

    def __init__(
        self,
        engine: Engine,
        call: Call,
        tensors: tuple[TensorSpec, ...],
        promoted: str,
        machine: Machine,
        aligns_gradients: bool = False,
    ) -> None:
        super().__init__(engine, call, tensors, promoted, machine)
        static, loss, dim = self.static, self.loss, self.static.class_dim
        self.input, self.target = tensors[:2]
        self._mask = tensors[2 + static.weighted] if static.masked else None
        self.rows_shape, self.classes = without(self.input.shape, dim), self.input.shape[dim]
        self.rows = prod(self.rows_shape)
        self.result = static.out_dtype or promoted
        self.labels = self.target.shape[dim] if loss.several else 1
        self.scalar = static.reduction != "none"
        self.empty = self.rows == 0 or self.labels == 0
        if static.has_tangent:
            # Kernels compute second derivatives of values per row only (`MarginEngine.apart`). Those of lists of labels
            # with a hinge that is not linear are left to the reference formula.
            self.contracts, linear = True, loss.is_linear(static.flags)
            self.vanishing = tuple([linear and i == 0 for i in range(len(tensors))])
            self.empty = self.empty or self.scalar or (loss.several and not linear)
        self.shape = () if self.scalar else self.rows_shape
        self.strides = dense_strides(self.shape, (0,) * len(self.shape))
        known = constant_divisor(loss.several, static, self.rows_shape)
        self.divisor = 1.0 if known is None else known
        few = not loss.several and self.rows <= SELF_COUNTING_ROWS
        self.counted, self.self_counting = known is None and not few, known is None and few
        # Gradients that assume that all rows count are checked in backward. That is cheap if there are few scores.
        self.assumes = self.self_counting and prod(self.input.shape) <= margin_layout.ASSUMED_ELEMENTS
        self.tallies = self.counted and not (loss.several or static.has_tangent) and self.rows < 1 << 32
        self.differentiable = self.speculative = tuple([i == 0 for i in range(len(tensors))])
        self.takes_status = True
        self.reports = static.check != "off"
        self.waits = static.check == "sync"
        storage = tuple([x.dtype for x in tensors])
        self.slot = hash((loss.name, static, self.input.shape, storage, self.result)) % EXPECTATIONS
        self.site = site_of(loss, self.target.shape, error=margin_checks.bad_label)
        self._launchers: dict[tuple[str, Wanted, bool], compiler.Launcher] = {}
        if self.input.misalignment and not (aligns_gradients or static.has_tangent or self.empty):
            # With the misalignment of their operand, gradients are written by the same vectors that read the scores.
            self.misalignment, self.misaligned = self.input.misalignment, 1
            # With short lists, aligned gradients have fewer vectors per row if vectors divide the classes.
            fewer = self.layout.kind == "short_lists" and self.classes % self.layout.vec_size == 0
            if self.layout.vec_size == 1 or self.layout.scores not in ("whole", "alike") or fewer:
                del self.layout
                self.misalignment = self.misaligned = 0

    @cached_property
    def with_aligned_gradients(self) -> Plan:
        if not self.misaligned:
            return self
        call = Call(self.loss, (), self.static)
        return MarginPlan(self.engine, call, self.tensors, self.promoted, self.machine, aligns_gradients=True)

    @cached_property
    def layout(self) -> margin_layout.Layout:
        """Geometry of all launches."""
        dim, x = self.static.class_dim, self.input
        masks: tuple[int, ...] = (0,) * len(self.rows_shape)
        if self._mask is not None:
            masks = broadcast_strides(self._mask.shape, self._mask.strides, self.rows_shape)
        scores, gradients = (
            rows_of(y, dim, misalignment) for y, misalignment in ((x, x.misalignment), (x.gradient, self.misalignment))
        )
        several = self.loss.several
        if self.static.has_tangent:
            tangent = rows_of(self.tensors[-1], dim, self.tensors[-1].misalignment)
            results = dense_strides(self.rows_shape, (0,) * len(self.rows_shape))
            return margin_layout.second_layout(
                self.rows_shape, self.classes, scores, gradients, tangent, (self.target.strides, masks, results),
                self.machine.chip,
            )  # fmt: skip
        labels = without(self.target.strides, dim) if several else self.target.strides
        results = dense_strides(self.rows_shape, (0,) * len(self.rows_shape))
        return margin_layout.layout(
            self.rows_shape, self.classes, scores, gradients, (labels, masks, results),
            self.target.strides[dim] if several else 0, self.labels if several else None,
            self.loss.is_linear(self.static.flags), self.machine.chip,
        )  # fmt: skip

    @cached_property
    def partials(self) -> int:  # type: ignore[override]
        return self.layout.chunks

    @cached_property
    def records(self) -> int:  # type: ignore[override]
        # One more record for the divisor.
        return self.layout.records + (self.tallies or self.assumes)

    def launcher(self, stage: str, wanted: Wanted, counted: bool) -> compiler.Launcher:
        launcher = self._launchers.get((stage, wanted, counted))
        if launcher is None:
            launcher = self._launchers[stage, wanted, counted] = self._load(stage, counted)
        return launcher

    def unreduced_step(self, counted: bool) -> Step:
        return Step((self.launcher("unreduced", self.nothing, False),))

    def gradient_steps(
        self, wanted: Wanted, upstream: tuple[tuple[int, ...], int] | None, counted: bool
    ) -> Sequence[Step]:
        stage = "hvp" if self.static.has_tangent else "gradient"
        return [Step((self.launcher(stage, wanted, False),), (0,))] if wanted[0] else []

    def upstream_strides(self) -> tuple[int, ...] | None:
        return self.strides

    def denominator(self) -> tuple[Plan, tuple[int, ...], float]:
        """Returns the plan that counts the rows: by their labels, or, if rows have lists of labels, by the mask."""
        return self._denominator

    @cached_property
    def _denominator(self) -> tuple[Plan, tuple[int, ...], float]:
        mask = 2 + self.static.weighted
        if not self.loss.several:
            return CountingPlan(self), (1, *[mask] * self.static.masked), 1.0
        assert self._mask is not None
        call = Call(counting(False, True), (), PointwiseStatic("sum", None, "float64"))
        plan = PointwisePlan(call.loss.engine, call, (self._mask,), "float32", self.machine)
        # Each element of a broadcast mask counts once for every row that shares it.
        return plan, (mask,), self.rows / plan.elements

    def _load(self, stage: str, counted: bool) -> compiler.Launcher:
        x, static, loss = self.layout, self.static, self.loss
        unreduced = stage == "unreduced" and x.kind == "subwarp"
        alone = unreduced and not loss.several
        if alone:
            x = x.without_sums(self.rows)
        elif unreduced and x.chunks <= margin_layout.ONE_BLOCK_CHUNKS and not x.shared:
            # Without a sum over blocks, one large block has no advantage over several.
            x = replace(x, threads=margin_layout.SUBWARP_THREADS)
        kind, width, threads, shared = x.kind, x.width, x.threads, x.shared
        most = margin_layout.RESIDENT_OF_VALUES if alone else margin_layout.RESIDENT_THREADS
        chunks, blocks, cluster = x.chunks, x.blocks(self.machine.processors, most), x.cluster
        if stage == "denominator":
            scores, together, edges = "alike", x.together, 1
            kind, width, threads, shared, chunks = "subwarp", 1, margin_layout.SUBWARP_THREADS, 0, self.count_chunks
            cluster = 1
            blocks = min(-(-chunks // (threads // gpu.WARP)), 8 * self.machine.processors)
        else:
            (scores, together), edges = x.reader(stage in WRITING, ITEMSIZE[self.input.dtype], alone), x.edges
            if stage in WRITING and not loss.is_linear(static.flags):
                together = min(together, margin_layout.CURVED_TOGETHER)
        weight = self.tensors[2].dtype if static.weighted and stage != "denominator" else ""
        kernel = MarginKernel(
            loss, stage, static.flags, kind, threads, x.vec_size, together, self.input.dtype, self.target.dtype,
            weight, static.masked, self.result, x.rank, counted,
            self.self_counting and not counted and stage in SELF_COUNTING_STAGES,
            self._tallies(stage) and not counted, scores, edges, most, cluster,
        )  # fmt: skip
        inner = prod(self.rows_shape[static.class_dim :])
        fixed = (static.ignore_index, self.site, self.labels, inner, x.capacity, x.mask_words, chunks, width, x.words)
        return self.machine.launcher(kernel, blocks, threads, fixed, shared)

    def _tallies(self, stage: str) -> bool:
        """True if the kernel of a stage takes no divisor and counts the rows while it evaluates them."""
        if self.self_counting and stage == "value":
            return True
        return (self.tallies or self.assumes) and stage in TALLYING_STAGES

    @cached_property
    def count_chunks(self) -> int:
        """Number of partial sums of the count of rows."""
        return max(1, min(-(-self.rows // (4 * gpu.WARP)), margin_layout.CHUNKS_OF_WARPS))


def rows_of(x: TensorSpec, dim: int, misalignment: int) -> RowStrides:
    """Returns the strides of a tensor, divided into those of its rows and that of its classes."""
    return RowStrides(without(x.strides, dim), x.strides[dim], ITEMSIZE[x.dtype], misalignment)


class CountingPlan(Plan):
    """Plan of the divisor of a mean: the number of rows whose label counts."""

    def __init__(self, plan: MarginPlan) -> None:
        super().__init__(plan.engine, Call(plan.loss, (), plan.static), plan.tensors, plan.promoted, plan.machine)
        self._plan = plan
        self.result, self.shape, self.strides, self.scalar = "float64", (), (), True
        self.differentiable = self.speculative = self.nothing
        self.partials, self.records, self.slot = plan.count_chunks, 0, 0

    def launcher(self, stage: str, wanted: Wanted, counted: bool) -> compiler.Launcher:
        return self._plan.launcher("denominator", wanted, False)

    def unreduced_step(self, counted: bool) -> Step:
        raise NotImplementedError

    def gradient_steps(
        self, wanted: Wanted, upstream: tuple[tuple[int, ...], int] | None, counted: bool
    ) -> Sequence[Step]:
        raise NotImplementedError

"""Plans of log-probabilities.

Forward has one kernel, for the values and for coefficients of each row. Backward has another one, which computes the
gradient from these coefficients. Derivatives along tangents have a kernel of their own, for those of values and
gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from cupylosses.call import Call
from cupylosses.engines.base import Engine, Machine, Plan, Step, TensorSpec, Wanted, contiguous
from cupylosses.engines.log_probs import layout as rows_layout
from cupylosses.engines.log_probs.call import Static, positions, value_shape
from cupylosses.engines.log_probs.codegen import LogProbKernel
from cupylosses.engines.softmax.labels import site_of
from cupylosses.engines.softmax.layout import RowStrides
from cupylosses.engines.strides import broadcast_strides, dense_strides
from cupylosses.interop import ITEMSIZE
from cupylosses.jit import compiler


class LogProbPlan(Plan):
    """Plan of log-probabilities of given logits.

    ``site`` locates a plan of some rows within the whole call: the shape of all labels, and the index of the first
    label of the plan.
    """

    static: Static

    def __init__(
        self,
        engine: Engine,
        call: Call,
        tensors: tuple[TensorSpec, ...],
        promoted: str,
        machine: Machine,
        site: tuple[tuple[int, ...], int] | None = None,
    ) -> None:
        static: Static = call.static
        self.input, self.index = tensors[:2]
        *rows, self.classes = self.input.shape
        self.rows_shape, self.rows = tuple(rows), prod(rows)
        compute = "float64" if promoted == "float64" else "float32"
        self.residual = contiguous(compute, (*self.rows_shape, 4))
        self.auxiliary = () if any(static.has_tangent) else (self.residual,)
        super().__init__(engine, call, tensors, promoted, machine)
        self.result = static.out_dtype or compute
        self.labels = self.index.shape[-1] if static.several else 1
        self.empty = not (self.rows and self.classes and self.labels + static.entropy)
        self.scalar = False
        spec = contiguous(self.result, value_shape(static, self.rows_shape, self.index.shape))
        self.shape, self.strides = spec.shape, spec.strides
        self.differentiable = tuple([i == 0 for i in range(len(tensors))])
        self.speculative = self.nothing
        self.fused_hvp = self.has_product = any(static.has_tangent)
        self.partials = self.records = self.slot = 0
        self.takes_status = True
        self.reports = static.check != "off"
        self.waits = static.check == "sync"
        self.site = site_of(self.loss, *(site or (self.index.shape, 0)))
        self._launchers: dict[tuple[str, bool], compiler.Launcher] = {}

    def launcher(self, stage: str, wanted: Wanted, counted: bool) -> compiler.Launcher:
        key = stage, stage == "from_residual" or wanted[0]
        launcher = self._launchers.get(key)
        if launcher is None:
            launcher = self._launchers[key] = self._load(*key)
        return launcher

    def unreduced_step(self, counted: bool) -> Step:
        return Step((self.launcher("unreduced", self.nothing, False),))

    def gradient_steps(
        self, wanted: Wanted, upstream: tuple[tuple[int, ...], int] | None, counted: bool
    ) -> Sequence[Step]:
        raise NotImplementedError("gradients are written from the residual of forward")

    def upstream_strides(self) -> tuple[int, ...] | None:
        return self.strides

    def _load(self, stage: str, writes: bool) -> compiler.Launcher:
        static, processors = self.static, self.machine.processors
        kind = "hvp" if stage == "product" else stage
        x = self._layout(kind, writes)
        resident = rows_layout.resident_threads(x.kind, self.compute, kind == "hvp", static.capped)
        slices, blocks = 1, rows_layout.blocks(x, processors, self.machine.chip, resident)
        if kind == "from_residual" and x.kind != "thread_per_row":
            slices = rows_layout.slices(x, processors)
            units = -(-self.rows * slices // x.rows_at_once)
            blocks = max(1, min(units, processors * (2048 // x.threads)))
        mask = self.tensors[positions(static)["mask"]].dtype if static.masked else ""
        kernel = LogProbKernel(
            self.loss, kind, x.kind, x.vec_size, self.input.dtype, self.index.dtype, mask, self.compute,
            gradient=self.input.gradient.dtype if writes else "", rank=x.rank, capped=static.capped,
            entropy=static.entropy, cluster=x.cluster, edges=x.edges, valued=stage != "product",
        )  # fmt: skip
        step = self.index.strides[-1] if static.several else 0
        fixed = (static.ignore_index, self.site, self.labels, step, slices, x.width, x.words)
        return self.machine.launcher(kernel, blocks, x.threads, fixed, x.shared)

    def _layout(self, kind: str, writes: bool) -> rows_layout.Layout:
        rank, input, gradient = len(self.rows_shape), self.input, self.input.gradient
        masks: tuple[int, ...] = (0,) * rank
        if self.static.masked:
            mask = self.tensors[positions(self.static)["mask"]]
            masks = broadcast_strides(mask.shape, mask.strides, self.rows_shape)
        logits, gradients = _rows_of(input, input.misalignment), _rows_of(gradient, 0)
        others = (self.index.strides[:rank], masks, dense_strides(self.rows_shape, (0,) * rank))
        arguments, chip = (self.rows_shape, self.classes, logits), self.machine.chip
        if kind == "hvp":
            tangents = _rows_of(self.tensors[-1], self.tensors[-1].misalignment)
            return rows_layout.second_layout(*arguments, gradients if writes else logits, others, tangents, chip)
        return rows_layout.layout(*arguments, gradients, others, chip, kind == "unreduced")


def _rows_of(x: TensorSpec, misalignment: int) -> RowStrides:
    return RowStrides(x.strides[:-1], x.strides[-1] if x.shape[-1] > 1 else 1, ITEMSIZE[x.dtype], misalignment)

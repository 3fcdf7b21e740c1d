"""Plans of log-probabilities.

Forward has one kernel, for the values and for coefficients of each row. Backward has another one, which computes the
gradient from these coefficients.
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
        # The reference formula computes derivatives along tangents.
        self.empty = not (self.rows and self.classes and self.labels + static.entropy) or any(static.has_tangent)
        self.scalar = False
        spec = contiguous(self.result, value_shape(static, self.rows_shape, self.index.shape))
        self.shape, self.strides = spec.shape, spec.strides
        self.differentiable = tuple([i == 0 for i in range(len(tensors))])
        self.speculative = self.nothing
        self.partials = self.records = self.slot = 0
        self.takes_status = True
        self.reports = static.check != "off"
        self.waits = static.check == "sync"
        self.site = site_of(self.loss, *(site or (self.index.shape, 0)))
        self._launchers: dict[str, compiler.Launcher] = {}

    def launcher(self, stage: str, wanted: Wanted, counted: bool) -> compiler.Launcher:
        launcher = self._launchers.get(stage)
        if launcher is None:
            launcher = self._launchers[stage] = self._load(stage)
        return launcher

    def unreduced_step(self, counted: bool) -> Step:
        return Step((self.launcher("unreduced", self.nothing, False),))

    def gradient_steps(
        self, wanted: Wanted, upstream: tuple[tuple[int, ...], int] | None, counted: bool
    ) -> Sequence[Step]:
        raise NotImplementedError("gradients are written from the residual of forward")

    def upstream_strides(self) -> tuple[int, ...] | None:
        return self.strides

    def _load(self, stage: str) -> compiler.Launcher:
        static, forward, processors = self.static, stage == "unreduced", self.machine.processors
        x = self._layout(forward)
        slices, blocks = 1, rows_layout.blocks(x, self.machine.chip, processors, self.compute)
        if not forward and x.kind != "thread_per_row":
            slices = rows_layout.slices(x, processors)
            units = -(-self.rows * slices // x.rows_at_once)
            blocks = max(1, min(units, processors * (2048 // x.threads)))
        mask = self.tensors[positions(static)["mask"]].dtype if static.masked else ""
        kernel = LogProbKernel(
            self.loss, stage, x.kind, x.vec_size, self.input.dtype, self.index.dtype, mask, self.compute,
            gradient="" if forward else self.input.gradient.dtype, rank=x.rank, capped=static.capped,
            entropy=static.entropy, cluster=x.cluster, edges=x.edges,
        )  # fmt: skip
        step = self.index.strides[-1] if static.several else 0
        fixed = (static.ignore_index, self.site, self.labels, step, slices, x.width, x.words)
        return self.machine.launcher(kernel, blocks, x.threads, fixed, x.shared)

    def _layout(self, forward: bool) -> rows_layout.Layout:
        rank, input, gradient = len(self.rows_shape), self.input, self.input.gradient
        masks: tuple[int, ...] = (0,) * rank
        if self.static.masked:
            mask = self.tensors[positions(self.static)["mask"]]
            masks = broadcast_strides(mask.shape, mask.strides, self.rows_shape)
        logits, gradients = (
            RowStrides(x.strides[:-1], 1, ITEMSIZE[x.dtype], misalignment)
            for x, misalignment in ((input, input.misalignment), (gradient, 0))
        )
        others = (self.index.strides[:rank], masks, dense_strides(self.rows_shape, (0,) * rank))
        return rows_layout.layout(self.rows_shape, self.classes, logits, gradients, others, self.machine.chip, forward)

"""Plans of softmax losses: kernels and layouts for the rows of a call. This module names no array library.

Class indices and dense targets have separate kernels but share one plan class. They differ in the arrays that have a
gradient, in the layout, and in the residual. For a row with a class index, four coefficients suffice to write its
gradient from the logits; for a row with a dense target, backward computes the gradients again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from math import prod
from typing import Any

from cupylosses.call import Call
from cupylosses.engines.base import Engine, Machine, Plan, Step, TensorSpec, Wanted, contiguous
from cupylosses.engines.device import EXPECTATIONS
from cupylosses.engines.softmax import layout as softmax_layout
from cupylosses.engines.softmax.call import Static, constant_divisor
from cupylosses.engines.softmax.codegen import SELF_COUNTING_STAGES, TALLYING_STAGES, SoftmaxKernel
from cupylosses.engines.softmax.definition import SoftmaxLoss
from cupylosses.engines.softmax.labels import site_of
from cupylosses.engines.strides import broadcast_strides, dense_strides
from cupylosses.interop import ITEMSIZE
from cupylosses.jit import compiler, gpu


class SoftmaxPlan(Plan):
    """Plan of a softmax loss, or of its derivative along tangents."""

    static: Static
    loss: SoftmaxLoss

    def __init__(
        self,
        engine: Engine,
        call: Call,
        tensors: tuple[TensorSpec, ...],
        promoted: str,
        machine: Machine,
        site: tuple[tuple[int, ...], int] | None = None,
        aligns_gradients: bool = False,
    ) -> None:
        static, dim = call.static, call.static.class_dim
        self.indices = static.kind == "indices"
        #: Specs of the operands. Those of class weights, mask and tangents follow, if there are any.
        self.input, self.target, *others = tensors
        remaining = iter(others)
        weight, mask = next(remaining) if static.weighted else None, next(remaining) if static.masked else None
        self._tangents = tuple(remaining)
        compute = "float64" if promoted == "float64" else "float32"
        self.rows_shape, self.classes = without(self.input.shape, dim), self.input.shape[dim]
        self.rows = prod(self.rows_shape)
        per_row = contiguous(compute, self.rows_shape)
        correct = contiguous("uint8", self.rows_shape)
        self.residual = contiguous(compute, (*self.rows_shape, 4)) if self.indices else None
        if static.has_tangent:
            self.auxiliary = ()
        else:
            of_indices = (correct if static.accuracy else None, self.residual) if self.indices else ()
            self.auxiliary = (per_row if static.lse else None, *of_indices)
        super().__init__(engine, call, tensors, promoted, machine)
        loss = self.loss
        self.result = static.out_dtype or promoted
        self.empty = self.rows == 0 or self.classes == 0
        self.scalar = static.reduction != "none"
        self.shape = () if self.scalar else self.rows_shape
        self.strides = dense_strides(self.shape, (0,) * len(self.shape))
        self.differentiable = tuple([i < (1 if self.indices else 2) for i in range(len(tensors))])
        self.speculative = self.differentiable
        self.fused_hvp = bool(static.has_tangent)
        self.has_product = self.fused_hvp and not self.indices
        if static.has_tangent and self.loss.affine and not self.loss.softmax:
            self.vanishing = self.differentiable
        # The kernel for class indices has no variant without the gradient.
        self.always_written = tuple([self.indices and i == 0 for i in range(len(tensors))])
        self.single_use = static.inplace and self.indices
        self.takes_one_upstream = True
        self.takes_status = self.indices
        self.reports = self.indices and static.check != "off"
        self.waits = self.indices and static.check == "sync"
        self._dtypes = (
            self.input.dtype,
            self.target.dtype,
            weight.dtype if weight else "",
            mask.dtype if mask else "",
        )
        #: True if rows that one warp processes keep products: ``kKeepsProducts`` of ``kernels/softmax/rows.cuh``.
        self._once = self.indices and static.capped and not static.smoothed
        results = dense_strides(self.rows_shape, (0,) * len(self.rows_shape))
        masks = (0,) * len(self.rows_shape)
        if mask:
            masks = broadcast_strides(mask.shape, mask.strides, self.rows_shape)
        self.misalignment = 0 if aligns_gradients else self._shared_misalignment()
        #: Layout of second derivatives with respect to the logits only, if these have kernels of their own.
        self._second_by_logits: softmax_layout.RowLayout | None = None
        lay_out = self._index_layout if self.indices else self._dense_layout
        self.layout = lay_out(masks, results)
        if self.misalignment and not self._gains_by_sharing():
            self.misalignment = 0
            self.layout = lay_out(masks, results)
        self.misaligned = (1 if self.indices else 2) if self.misalignment else 0
        #: True if several blocks compute the sums of a row: `verify_gradient` reads those of the value's kernel.
        self._sliced = self.layout.kind == "column_slices"
        self._find_divisor()
        dense = self.input.lies_as(self.input.gradient.strides)
        self.overwrites = self.single_use and dense and self.input.misalignment == self.misalignment
        recomputed = self.layout.kind in (*softmax_layout.RECOMPUTED, *softmax_layout.RECOMPUTED_LABELS)
        self.recomputes = recomputed and not self.single_use
        self.clears = self.layout.kind == "label_only_sparse"
        self.partials = self.layout.chunks
        # One record per chunk and block of a cluster, and one of the divisor if kernels tally.
        self.records = self.layout.chunks * self.layout.cluster + self.tallies
        if self._sliced:
            number = ITEMSIZE[self.compute]
            self.partials = softmax_layout.slice_memory(self.layout, number, static.smoothed)
            self.records = softmax_layout.slice_records(self.layout, self.rows, number)
        key = (loss.name, static.kind, self.rows_shape, self.classes, self._dtypes, self.result)
        self.slot = hash(key) % EXPECTATIONS
        self._place = site or (self.rows_shape, 0)
        self.site = site_of(loss, *self._place)
        self._launchers: dict[tuple[str, Wanted, bool], compiler.Launcher] = {}

    def _find_divisor(self) -> None:
        """Sets `divisor`, `counted`, `self_counting` and `tallies`."""
        static = self.static
        known = constant_divisor(static, self.rows_shape)
        self.divisor = 1.0 if known is None else known
        # A count has the same bits in any order of additions; a sum of weights does not.
        weighs = self.indices and static.weighted and self.loss.mean_of_weights
        most = softmax_layout.COUNTED_AT_ONCE
        if not weighs:
            # Each block that shares rows would wait for the labels of all rows.
            most = 0 if self._sliced else softmax_layout.SELF_COUNTING_ROWS
        few = self.rows <= most and not static.has_tangent
        self.counted, self.self_counting = known is None and not few, known is None and few
        # Kernels that tally count inactive rows, in 32 bits, while they evaluate the others.
        self.tallies = self.counted and self.indices and not (weighs or static.has_tangent) and self.rows < 1 << 32

    def _index_layout(self, masks: tuple[int, ...], results: tuple[int, ...]) -> softmax_layout.RowLayout:
        x, static, chip = self.input, self.static, self.machine.chip
        size = ITEMSIZE[x.dtype]
        arguments = (
            self.rows_shape,
            self.classes,
            rows_of(x.strides, static.class_dim, size, x.misalignment),
            rows_of(x.gradient.strides, static.class_dim, size, self.misalignment),
            (self.target.strides, masks, results),
        )
        self._labels = self.target.strides, masks
        if static.has_tangent:
            (tangent,) = self._tangents
            along = rows_of(tangent.strides, static.class_dim, size, tangent.misalignment)
            options = self.loss.softmax, static.smoothed, static.capped
            return softmax_layout.second_layout(*arguments, along, *options, chip)
        if not self.loss.softmax:
            return softmax_layout.label_only_layout(*arguments, chip)
        kept = ITEMSIZE[self.compute] if self._once else 0
        heavy, shifts = static.smoothed or static.capped, not x.in_place
        return softmax_layout.row_layout(*arguments, chip, kept, heavy, shifts, static.capped)

    def _dense_layout(self, masks: tuple[int, ...], results: tuple[int, ...]) -> softmax_layout.RowLayout:
        tensors = [
            rows_of(strides, self.static.class_dim, ITEMSIZE[x.dtype], misalignment)
            for x in (self.input, self.target)
            for strides, misalignment in ((x.strides, x.misalignment), (x.gradient.strides, self.misalignment))
        ]
        arguments = self.rows_shape, self.classes, tensors, (masks, results)
        self._labels = (0,) * len(masks), masks
        if self.static.has_tangent:
            along, size = iter(self._tangents), (ITEMSIZE[self.input.dtype], ITEMSIZE[self.target.dtype])
            directions = [
                rows_of(x.strides, self.static.class_dim, n, x.misalignment) if moves and (x := next(along)) else None
                for n, moves in zip(size, self.static.has_tangent, strict=True)
            ]
            second = *arguments, directions, self.machine.chip
            if second_by_logits(self.loss, self.static) and directions[0]:
                in_registers = softmax_layout.register_second_layout(*arguments, directions[0])
                self._second_by_logits = in_registers or softmax_layout.dense_second_layout(*second, by_logits=True)
            return softmax_layout.dense_second_layout(*second)
        affine, capped, shifts = self.loss.affine, self.static.capped, not self.input.in_place
        heavy_terms = has_heavy_terms(self.loss, self.static)
        return softmax_layout.dense_layout(*arguments, self.machine.chip, affine, capped, shifts, heavy_terms)

    def _shared_misalignment(self) -> int:
        """Misalignment that gradients share with the operands; 0 if sharing it does not help.

        One split of a row into vectors and edge elements then serves both.
        """
        operands, dim = self.tensors[: 1 if self.indices else 2], self.static.class_dim
        if not self.loss.softmax or self.static.has_tangent:
            return 0
        if len({(x.misalignment, ITEMSIZE[x.dtype]) for x in operands}) > 1 or any(x.in_place for x in operands):
            return 0
        whole = self.input.misalignment % ITEMSIZE[self.input.dtype] == 0
        together = self.classes > softmax_layout.FEW_CLASSES and all(x.strides[dim] == 1 for x in operands)
        columns = self.indices and self.classes > 1 and 1 in without(self.input.strides, dim)
        return self.input.misalignment if whole and (together or columns) else 0

    def _gains_by_sharing(self) -> bool:
        """True if rows have vectors because gradients share the misalignment of the operands.

        Strided classes in other layouts than staggered tiles would take longer with it (measured).
        """
        if self.input.strides[self.static.class_dim] == 1:
            return self.layout.vec_size > 1 and not self.layout.shifted
        return self.layout.staggered

    @cached_property
    def with_aligned_gradients(self) -> Plan:
        if not self.misalignment:
            return self
        call = Call(self.loss, (), self.static)
        arguments = self.engine, call, self.tensors, self.promoted, self.machine, self._place
        return SoftmaxPlan(*arguments, aligns_gradients=True)

    # Launches

    def launcher(self, stage: str, wanted: Wanted, counted: bool) -> compiler.Launcher:
        wanted = wanted[:2]
        launcher = self._launchers.get((stage, wanted, counted))
        if launcher is None:
            launcher = self._launchers[stage, wanted, counted] = self._load(stage, wanted, counted)
        return launcher

    def unreduced_step(self, counted: bool) -> Step:
        return Step((self.launcher("unreduced", self.nothing, False),), workspace=self.partials if self._sliced else 0)

    def follows_value(self, wanted: Wanted) -> bool:
        return self._sliced and True in self.writable(wanted)

    def gradient_steps(
        self, wanted: Wanted, upstream: tuple[tuple[int, ...], int] | None, counted: bool
    ) -> Sequence[Step]:
        slots = tuple([i for i, w in enumerate(wanted) if w])
        return [Step((self.launcher("gradient", wanted, False),), slots)]

    def upstream_strides(self) -> tuple[int, ...] | None:
        return self.strides

    def denominator(self) -> tuple[Plan, tuple[int, ...], float]:
        """Returns the plan of the divisor, the positions of the arrays that it reads, and the factor of its value.

        The divisor is the sum of the label weights of active rows, or their number.
        """
        return self._denominator

    @cached_property
    def _denominator(self) -> tuple[Plan, tuple[int, ...], float]:
        read = [self.indices and i == 1 for i in range(2)]
        read += [self.indices and self.loss.mean_of_weights] if self.static.weighted else []
        read += [True] if self.static.masked else []
        return CountingPlan(self), tuple([i for i, x in enumerate(read) if x]), 1.0

    def _load(self, stage: str, wanted: Wanted, counted: bool) -> compiler.Launcher:
        x, processors = self.layout, self.machine.processors
        if wanted == (True, False) and self._second_by_logits and (self.loss.affine or stage == "product"):
            x = self._second_by_logits
        layout, width, threads, chunks, shared = x.kind, x.width, x.threads, x.chunks, x.shared
        cluster, rank, words, vec_size, per_thread = x.cluster, x.rank, x.words, x.vec_size, x.per_thread
        blocks = softmax_layout.blocks(x, chunks, processors)
        forward, warps, lanes = stage in ("value", "unreduced"), 1, 0
        valued, stage = stage != "product", "hvp" if stage == "product" else stage
        if forward and x.streamed:
            layout, threads, shared, cluster, warps = "streamed", x.streamed, 0, 1, x.streamed // gpu.WARP
            width = x.threads * x.cluster
            per_thread = x.streamed_vectors
            blocks = min(chunks, processors * (softmax_layout.STREAMED_THREADS[per_thread] // threads))
        elif forward and x.turns and self.compute == "float32":
            layout, shared, lanes, warps = "pipelined", 0, width, threads // gpu.WARP
            width = x.turns
            per_block = 1 if lanes > gpu.WARP else warps
            blocks = min(-(-chunks // per_block), processors * (softmax_layout.pipelined_threads(lanes) // threads))
        elif stage == "value" and layout == "label_only_few":
            # One warp adds up the losses. Idle blocks would take longer than this warp.
            blocks, threads = 1, gpu.WARP
        elif stage == "unreduced" and layout in softmax_layout.IN_TILES:
            # Without gradients, only the label and one element of each row are read.
            layout, vec_size, chunks = "label_only", 1, max(1, -(-self.rows // gpu.WARP))
            width, threads, shared = 1, softmax_layout.THREADS, 0
            blocks = max(1, min(-(-chunks // (threads // gpu.WARP)), 8 * processors))
        elif forward:
            lanes, blocks = x.lanes, softmax_layout.blocks(x, chunks, processors, gradient=False)
        elif layout == "register_rows":
            lanes = width
        elif self._sliced and stage != "denominator":
            lanes = x.lanes
        elif stage == "denominator":
            layout, threads, shared, cluster = "subwarp", softmax_layout.THREADS, 0, 1
            chunks = self.count_chunks
            if self.indices:
                rank, words = softmax_layout.label_words(self.rows_shape, self.classes, *self._labels)
            blocks = min(-(-chunks // (threads // gpu.WARP)), 8 * processors)
        elif stage == "from_residual":
            shared, cluster = shared if layout in softmax_layout.IN_TILES else 0, 1
            vec_size = 1 if x.gathered else vec_size
            if layout in softmax_layout.IN_THREADS:
                if layout not in ("thread_per_row", "thread_per_row_packed"):
                    threads = softmax_layout.THREADS
                    vec_size = 1 if x.staggered or layout in ("packed_rows", "interleaved_rows") else vec_size
                    blocks = max(1, min(-(-self.rows // (threads * vec_size)), 8 * processors))
                layout, per_thread = "thread_per_row", 0
            elif layout not in ("label_only", *softmax_layout.IN_TILES):
                # Rows are cut into pieces if there are too few to fill a GPU.
                layout = "block" if layout == "two_pass" else layout
                vectors = -(-self.classes // vec_size)
                # Lanes exchange nothing, so a row gets as many lanes as its vectors keep busy.
                lanes_of_row = softmax_layout.power_of_two(-(-vectors // softmax_layout.TWO_PASS_VECTORS))
                # Each lane processes at most one edge element.
                lanes_of_ends = softmax_layout.power_of_two(max(1, 2 * (vec_size - 1))) if x.edges else 1
                width, threads = max(x.width, lanes_of_ends, min(gpu.WARP, lanes_of_row)), x.threads
                if layout != "subwarp":
                    width, threads = x.width, min(x.threads, 512)
                per = threads // width if layout == "subwarp" else 1
                most = max(1, vectors // (threads * softmax_layout.TWO_PASS_VECTORS))
                chunks = max(1, min(most, -(-4 * processors // max(1, self.rows))))  # pieces of a row
                blocks = max(1, min(-(-self.rows * chunks // per), processors * (2048 // threads)))
        input, target, weight, mask = self._dtypes
        if stage == "denominator" and not (self.indices and self.loss.mean_of_weights):
            weight = ""
        # Kernels with another layout than the plan's read logits in place, or one by one, without shift or gather.
        of_layout = layout == x.kind and stage != "denominator" and not (stage == "from_residual" and x.gathered)
        kernel = SoftmaxKernel(
            self.loss, stage, self.indices, layout, vec_size, input, target, weight, mask, self.result, self.compute,
            flags=() if self.indices else self.static.flags, gradients=wanted[: 1 if self.indices else 2],
            has_tangent=self.static.has_tangent, valued=valued, rank=rank,
            smoothed=self.indices and self.static.smoothed, capped=self.static.capped,
            plain=self.static.plain and stage != "denominator",
            limit=self.static.limit if stage != "denominator" else 0, counted=counted,
            self_counting=self.self_counting and not counted and stage in SELF_COUNTING_STAGES,
            tallies=self.tallies and not counted and stage in TALLYING_STAGES,
            cluster=cluster, prefetch=x.prefetch and "gradient" in stage,
            in_place=self.input.gradient.dtype if self.input.in_place and wanted[0] else "",
            shifted=x.shifted and of_layout, gathered=x.gathered and of_layout,
            per_thread=per_thread if layout in (x.kind, "streamed") else 0,
            edges=x.edges if layout == x.kind and stage != "from_residual" else 0, partial=x.partial,
            step=x.step if layout == x.kind else 0, padded=x.padded and layout == x.kind,
            staggered=x.staggered and layout == x.kind,
            warps=x.warps if layout == x.kind else warps, lanes=lanes,
        )  # fmt: skip
        fixed: tuple[Any, ...] = (chunks, width, words)
        if self.indices:
            fixed = (self.static.ignore_index, self.site, *fixed)
        return self.machine.launcher(kernel, blocks, threads, fixed, shared)

    @cached_property
    def count_chunks(self) -> int:
        """Number of partial sums of the divisor."""
        return max(1, min(-(-self.rows // softmax_layout.COUNTED_AT_ONCE), softmax_layout.COUNT_CHUNKS))


class CountingPlan(Plan):
    """Plan of the divisor of a mean: the label weights of active rows, or their number, summed in float64."""

    def __init__(self, plan: SoftmaxPlan) -> None:
        call = Call(plan.loss, (), plan.static)
        super().__init__(plan.engine, call, plan.tensors, plan.promoted, plan.machine)
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


def without(x: Sequence[int], dim: int) -> tuple[int, ...]:
    """Returns a sequence without one of its entries."""
    return (*x[:dim], *x[dim + 1 :])


def rows_of(strides: Sequence[int], dim: int, itemsize: int, misalignment: int) -> softmax_layout.RowStrides:
    """Returns the strides of a tensor, split into those of its rows and that of its classes."""
    return softmax_layout.RowStrides(without(strides, dim), strides[dim], itemsize, misalignment)


def second_by_logits(loss: SoftmaxLoss, static: Static) -> bool:
    """True if second derivatives with respect to the logits only have kernels of their own.

    The term must be affine, or its derivatives must sum to 0.
    """
    alike = loss.affine or (loss.balanced and static.plain)
    return alike and static.has_tangent == (True, False) and not static.capped


def copies(
    static: Static, tensors: Sequence[TensorSpec], loss: SoftmaxLoss, chip: gpu.Chip, writes: bool
) -> Mapping[int, tuple[int, ...]]:
    """Returns the operands that kernels read from copies, with the strides of the copies.

    Copies have no gaps. They keep the order of dimensions of the operand, or take that of the first operand or of the
    shape, if kernels process rows with such strides; otherwise their classes are contiguous. ``writes`` is False if no
    gradients are written.
    """
    operands, dim = tensors[: 1 if static.kind == "indices" else 2], static.class_dim

    def reads(laid_out: Sequence[TensorSpec]) -> bool:
        return not copied(static, laid_out, loss, chip, writes)

    if reads(operands):
        return {}

    first = operands[0]
    orders = [[first.gradient.strides], [contiguous("", first.shape).strides]]
    # Results are stored in the order of the shape, so neighbouring rows should be neighbours in the shape too.
    rows = without(first.strides, dim)
    if [*rows] != sorted(rows, reverse=True):
        orders.reverse()
    # Lanes share rows of contiguous classes, which one operand already has; one thread per row is slower.
    together = [[x.gradient.strides] for x in operands if x.gradient.strides[dim] == 1]
    count, size = prod(without(first.shape, dim)), max([ITEMSIZE[x.dtype] for x in operands])
    shared = has_heavy_terms(loss, static) and softmax_layout.lanes_share(count, size)
    if len(operands) > 1 and (first.shape[dim] > softmax_layout.FEW_CLASSES or shared):
        orders = [*together, *orders]
    for order in ([x.gradient.strides for x in operands], *orders):
        strides = order if len(order) > 1 else [*order] * len(operands)
        laid_out = [TensorSpec(x.dtype, x.shape, s) for x, s in zip(operands, strides, strict=True)]
        if not reads(laid_out):
            continue
        for i, x in enumerate(operands):
            if reads(kept := [*laid_out[:i], x, *laid_out[i + 1 :]]):
                laid_out = kept
        pairs = zip(operands, laid_out, strict=True)
        return {i: y.strides for i, (x, y) in enumerate(pairs) if not x.lies_as(y.strides)}
    return {
        i: softmax_layout.classes_last(x.shape, dim)
        for i, x in enumerate(operands)
        if not x.strides[dim] == x.gradient.strides[dim] == 1
    }


def has_heavy_terms(loss: SoftmaxLoss, static: Static) -> bool:
    """True if a term may take many instructions: it is neither affine nor evaluated by its plain expression.

    False for second derivatives, which have layouts of their own.
    """
    return not (loss.affine or static.plain or static.has_tangent)


def copied(static: Static, tensors: Sequence[TensorSpec], loss: SoftmaxLoss, chip: gpu.Chip, writes: bool) -> bool:
    """True if kernels read the rows from a copy.

    ``writes`` is True for kernels that write gradients, and False for those that compute only a value.
    """
    operands = tensors[: 1 if static.kind == "indices" else 2]
    dim = static.class_dim
    strides = [x.strides for x in operands] + [x.gradient.strides for x in operands]
    sizes = [ITEMSIZE[x.dtype] for x in operands] * 2
    rows = [rows_of(x, dim, size, 0) for x, size in zip(strides, sizes, strict=True)]
    shape = tensors[0].shape
    # A single thread computes the second derivatives of a row, or its gradients from a residual.
    second = bool(static.has_tangent)
    # Rows that backward reads again would be gathered twice.
    unreduced = static.reduction == "none"
    again, gathers = unreduced and writes, None if unreduced else chip
    shares, room = not (second or static.inplace), softmax_layout.room_of_rows(chip)
    arguments = without(shape, dim), shape[dim], rows, len(operands), loss.softmax
    registers = second_by_logits(loss, static)
    columns = registers or (second and static.kind == "indices" and not static.capped)
    tile = softmax_layout.room_of_tiles(chip)
    lane = 0 if second else softmax_layout.dense_register_classes("columns", loss.affine, static.capped)
    heavy_terms, heavy = has_heavy_terms(loss, static), static.smoothed or static.capped
    return softmax_layout.copied(
        *arguments, shares, gathers, second, room, registers, columns, tile, lane, again, heavy_terms, writes, heavy
    )

"""Plans of element-wise losses: which kernels compute a value and its gradients, with which geometry.

One launch over all elements computes the value and the gradients of operands of the full shape. A value that keeps some
dimensions, and the gradient of a broadcast operand, are sums over the other dimensions. The same launch adds up the
gradient of a broadcast operand if its layout allows that; all other sums are launches of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from math import prod

from cupylosses import checks, interop
from cupylosses.call import Call
from cupylosses.definition.base import MASK, WEIGHT
from cupylosses.definition.curvature import vanishing
from cupylosses.engines.base import Engine, Machine, Plan, Step, TensorSpec, Wanted
from cupylosses.engines.device import EXPECTATIONS
from cupylosses.engines.pointwise import checks as pointwise_checks
from cupylosses.engines.pointwise import layout as pointwise_layout
from cupylosses.engines.pointwise.codegen import COMBINED, PRODUCT, PointwiseKernel, title
from cupylosses.engines.pointwise.curvature import curved_pairs
from cupylosses.engines.pointwise.definition import Loss, counting
from cupylosses.engines.pointwise.jvp import TangentLoss
from cupylosses.engines.pointwise.reduction import Static, resolve
from cupylosses.engines.strides import broadcast_strides, dense_strides, result_strides, row_major
from cupylosses.jit import compiler, gpu


class ElementLaunch:
    """One launch over all elements: layout, chunks and grid, and the kernels for it.

    If nothing is added up, neither values (``adds``) nor gradients of ``broadcast`` operands, each warp processes one
    batch, or a few small ones: blocks that end make room for others, which keeps more loads in flight than warps that
    process batch after batch.
    """

    def __init__(
        self,
        plan: PointwisePlan,
        streams: Sequence[pointwise_layout.Stream],
        processors: int,
        broadcast: Sequence[int] = (),
        spread: bool = False,
        adds: bool = False,
    ) -> None:
        self.plan = plan
        layout = plan.layout_of(streams)
        summed = {slot: len(plan.tensors) + slot for slot in broadcast}
        strips = None
        if broadcast:
            gradients = [*summed.values()]
            strips = pointwise_layout.in_ragged_strips(layout, streams, gradients, plan.loss.heavy)
            strips = strips or pointwise_layout.in_strips(layout, gradients)
        layout = strips or pointwise_layout.gathered(layout, streams) or layout
        wide = (
            pointwise_layout.spread(plan.full_shape, streams, layout, plan.spills, plan.micro_tile) if spread else None
        )
        self.layout = wide or pointwise_layout.in_short_batches(layout, plan.scalar, plan.shifts_one_by_one)
        self.chunks = pointwise_layout.chunks_of(self.layout)
        self.threads = pointwise_layout.SPREAD_THREADS if wide else pointwise_layout.threads(self.chunks)
        self.threads = min(self.threads, pointwise_layout.staged_threads(self.layout, streams))
        self.blocks = pointwise_layout.grid(self.chunks, self.threads, processors)
        if not (adds or broadcast) and self.layout.batches > self.chunks:
            self.layout = pointwise_layout.in_light_batches(self.layout, plan.loss.heavy)
            self.chunks = pointwise_layout.spread_chunks(self.layout) if wide and plan.spills else self.layout.batches
            self.threads = min(self.threads, pointwise_layout.BATCH_THREADS)
            self.blocks = -(-self.chunks * gpu.WARP // self.threads)
        self.warps = self.blocks * self.threads // gpu.WARP
        #: Partial sums of the gradients of ``broadcast`` operands, by slot, and where they start, after the records.
        self.sums: dict[int, pointwise_layout.PartialSums] = {}
        self.first_sums: dict[int, int] = {}
        end = self.warps
        for slot, stream in summed.items():
            sums = pointwise_layout.partial_sums(self.layout, self.chunks, self.layout.strides[stream])
            if sums is not None:
                self.sums[slot], self.first_sums[slot] = sums, end
                end += sums.count
        self.end = end
        self._launchers: dict[tuple[str, Wanted, bool], compiler.Launcher] = {}

    def launcher(self, kind: str, gradients: Wanted, counted: bool = False) -> compiler.Launcher:
        """Returns the launcher of an entry point."""
        launcher = self._launchers.get((kind, gradients, counted))
        if launcher is None:
            variant = self.variant(kind, gradients, counted)
            where = self.layout.elements if self.layout.kind == "flat" else self.layout.words()
            fixed: list[int | Sequence[int]] = [] if kind == COMBINED else [self.chunks, where]
            summed = [i for i, x in enumerate(variant.sums) if x]
            for slot in summed:
                fixed.append(self.first_sums[slot])
                if kind in ("verify_gradient", COMBINED):
                    fixed.append(self.sums[slot].words())
            blocks, threads = self.blocks, self.threads
            if kind == COMBINED:
                warps = max(self.sums[i].tasks for i in summed)
                threads = pointwise_layout.MAX_THREADS
                blocks = pointwise_layout.sum_grid(warps, self.plan.machine.processors)
            shared = threads // gpu.WARP * sum(variant.staged.values())
            launcher = self.plan.machine.launcher(variant, blocks, threads, fixed, shared)
            self._launchers[kind, gradients, counted] = launcher
        return launcher

    def variant(self, kind: str, gradients: Wanted, counted: bool = False) -> PointwiseKernel:
        """Returns the kernel of an entry point."""
        plan, operands = self.plan, len(self.plan.tensors)
        access = self.layout.access
        element = access[2 * operands] if kind == "elements_gradient" else "none"
        micro_tiles = self.layout.tile != pointwise_layout.Tile()
        summed = [self.sums[i] if w and i in self.sums else None for i, w in enumerate(gradients)]
        return PointwiseKernel(
            plan.loss,
            plan.static.flags,
            kind,
            plan.storage,
            plan.result,
            self.layout.kind,
            self.layout.vec_size,
            (*access[:operands], element),
            gradients,
            compute=plan.compute,
            counted=counted,
            tile=self.layout.tile if micro_tiles else None,
            sinks=access[operands:] if micro_tiles or self.layout.kind in pointwise_layout.GATHERED else (),
            strip=(self.layout.across, self.layout.steps, self.layout.joined > 0),
            sums=tuple([(x.kind, x.rank) if x else None for x in summed]) if any(summed) else (),
            unroll=self.layout.unroll,
            whole_batches=self.layout.whole_batches and kind != COMBINED,
            long_rows=self.layout.long_rows and kind != COMBINED,
        )


def sum_step(
    plan: PointwisePlan, slot: int | None, grad_output: pointwise_layout.Stream | None, counted: bool = False
) -> Step:
    """Returns the launches that sum over some dimensions.

    They compute the gradient of the broadcast operand in ``slot`` or, if ``slot`` is None, the value of a loss that
    keeps dimensions.
    """
    operands = len(plan.tensors)
    if slot is None:
        dtype = plan.result
        result = plan.keep(plan.strides)
    else:
        tensor = plan.tensors[slot]
        dtype = tensor.dtype
        result = broadcast_strides(tensor.shape, plan.gradient_strides(slot), plan.full_shape)
    none = (0,) * len(plan.full_shape)
    read = [x.strides for x in plan.streams[:operands]]
    x = pointwise_layout.sum_layout(plan.full_shape, [*read, grad_output.strides if grad_output else none], result)
    streams = [
        *plan.streams[:operands],
        grad_output or pointwise_layout.Stream(none, interop.ITEMSIZE[plan.result]),
    ]
    to = pointwise_layout.Stream(result, interop.ITEMSIZE[dtype])
    x = pointwise_layout.sum_in_vectors(x, streams, to, unaligned=True, heavy=plan.loss.heavy)
    partials = x.slices * x.places if x.slices > 1 else 0
    kept_rank, reduced_rank = (pointwise_layout.sum_rank(len(sizes), operands) for sizes in (x.kept, x.reduced))
    first, second = ("sum_over", "combine_sums") if slot is None else ("broadcast_gradient", "combine_slices")
    kinds = {first: x.tasks * x.warps, second: x.places}
    if not partials:
        del kinds[second]
    variant = PointwiseKernel(
        plan.loss,
        plan.static.flags,
        first,
        plan.storage,
        plan.result,
        pointwise_layout.OF_ROWS[min(len(x.kept), 3) - 1] if x.kept else "matrix",
        x.vec_size,
        (*x.access[:operands], x.access[operands] if grad_output else "none"),
        tuple(i == slot for i in range(operands)),
        x.columns,
        plan.compute,
        counted,
        reduced_rank,
        x.shared,
    )
    launchers = [
        plan.machine.launcher(
            replace(variant, kind=kind),
            pointwise_layout.sum_grid(count, plan.machine.processors),
            pointwise_layout.MAX_THREADS,
            x.arguments(kept_rank, reduced_rank),
        )
        for kind, count in kinds.items()
    ]
    return Step(tuple(launchers), () if slot is None else (slot,), partials)


def _is_expanded(x: TensorSpec) -> bool:
    return any([n != 1 and s == 0 for n, s in zip(x.shape, x.strides, strict=True)])


class PointwisePlan(Plan):
    """The plan of an element-wise loss."""

    static: Static
    loss: Loss
    #: True if every gradient has the dimension order of its operand, even if the operand has gaps.
    keeps_order = False

    def __init__(
        self, engine: Engine, call: Call, tensors: tuple[TensorSpec, ...], promoted: str, machine: Machine
    ) -> None:
        super().__init__(engine, call, tensors, promoted, machine)
        loss, static = self.loss, call.static
        self.result = static.out_dtype or promoted
        shapes = [x.shape for x in tensors]
        #: Broadcast shape of the operands.
        self.full_shape = pointwise_checks.broadcast(loss, shapes)
        self.elements = prod(self.full_shape)
        self.empty = self.elements == 0
        self.warning = pointwise_checks.broadcast_warning(loss, shapes)
        self.resolved = resolve(loss, static, self.full_shape)
        self.shape = self.resolved.shape
        #: True if every element has a result of its own.
        self.elementwise = self.resolved.dims == ()
        self.scalar = self.resolved.dims is None
        if self.elementwise:
            self.strides = result_strides(self.full_shape, [(x.shape, x.strides) for x in tensors])
        else:
            self.strides = dense_strides(self.shape, (0,) * len(self.shape))
        self.divisor, self.weighted = self.resolved.divisor, self.resolved.weighted
        self.counted = self.resolved.counted
        weights = self.resolved.weights
        self.divides_by = tuple([i for i, x in enumerate(loss.operands) if weights and x is WEIGHT])
        self.storage = tuple(x.dtype for x in tensors)
        self.differentiable = tuple(x.dtype in checks.FLOATING for x in tensors)
        # The launch over all elements writes the gradients of operands that are read once per element.
        self.speculative = tuple(prod(x.shape) == self.elements for x in tensors)
        if isinstance(loss, TangentLoss) and loss.base is not None:
            directions = (False,) * sum(loss.has_tangent)
            curved, named = curved_pairs(loss.base, static.flags), [x.name for x in loss.base.operands]
            self.vanishing = (*vanishing(named, loss.has_tangent, curved), *directions)
        self.has_product = isinstance(loss, TangentLoss)
        self.slot = hash((title(loss), static, self.full_shape, self.storage, self.result)) % EXPECTATIONS
        self._gradient_launches: dict[pointwise_layout.Stream, ElementLaunch] = {}
        self._summing_launches: dict[pointwise_layout.Stream, ElementLaunch | None] = {}
        self._steps: dict[tuple[int | None, pointwise_layout.Stream | None, bool], Step] = {}

    def keep(self, strides: Sequence[int]) -> tuple[int, ...]:
        """Returns strides of the result, extended by 0 for the reduced dimensions."""
        dims = self.resolved.dims
        if dims is None:
            return (0,) * len(self.full_shape)
        kept = iter(strides)
        return tuple(0 if d in dims else next(kept) for d in range(len(self.full_shape)))

    def gradient_strides(self, slot: int) -> tuple[int, ...]:
        """Returns the strides of the gradient of an operand.

        They are those of the operand, or row-major if the operand has gaps: autograd copies the gradient of a leaf with
        gaps into that order. An expanded operand has no dimension order of its own; its gradient takes that of another
        operand. So does a gradient that kernels would scatter.
        """
        x = self.tensors[slot]
        if not _is_expanded(x) and slot not in self._scattered:
            return self._own[slot]
        others = [y for i, y in enumerate(self.tensors) if not _is_expanded(y) and i not in self._scattered]
        return result_strides(x.shape, [(y.shape, y.strides) for y in others])

    @cached_property
    def _own(self) -> list[tuple[int, ...]]:
        """Strides of each gradient, as far as they depend on its operand alone.

        They are row-major for operands with gaps, unless kernels would take longer to write that order than autograd to
        copy into it.
        """
        strides = [x.gradient.strides for x in self.tensors]
        if self.keeps_order:
            return strides
        rows = [y if x.lies_as(y) else row_major(x.shape) for x, y in zip(self.tensors, strides, strict=True)]
        if rows == strides:
            return strides
        streams = self._streams_of(rows)
        order = self.layout_of(streams)
        sinks = enumerate(streams[len(strides) :], len(strides))
        out = [
            pointwise_layout.is_out_of_order(order, i, x.itemsize)
            or pointwise_layout.has_narrow_tiles(order, x.itemsize)
            for i, x in sinks
        ]
        return [y if o else x for x, y, o in zip(rows, strides, out, strict=True)]

    @cached_property
    def with_aligned_gradients(self) -> PointwisePlan:
        """Plan whose gradients have the dimension order of their operands, as graph operators guarantee."""
        if all([x.gradient.strides == self._own[i] for i, x in enumerate(self.tensors)]):
            return self
        plan = PointwisePlan(self.engine, Call(self.loss, (), self.static), self.tensors, self.promoted, self.machine)
        plan.keeps_order = True
        return plan

    @cached_property
    def _scattered(self) -> frozenset[int]:
        """Operands whose gradients would be scattered if they had the operands' strides.

        Kernels would write only a small part of each sector of these gradients at a time.
        """
        if self.elements < pointwise_layout.ORDERED_ELEMENTS:
            return frozenset()
        streams = self._streams_of(self._own)
        order = self.layout_of(streams)
        scattered: set[int] = set()
        for i, x in enumerate(self.tensors):
            stream = len(self.tensors) + i
            before = [y for j, y in enumerate(self.tensors[:i]) if j not in scattered and not _is_expanded(y)]
            written = any(streams[stream].strides) and any([y.shape == x.shape for y in before])
            if written and pointwise_layout.is_out_of_order(order, stream, streams[stream].itemsize):
                scattered.add(i)
        return frozenset(scattered)

    @property
    def spills(self) -> bool:
        """True for second derivatives in 16 bits that fit into 128 registers only with at most four elements at a time.

        Those of heavier losses still fit, and took 8 % longer four elements at a time. In float32, spills cost less
        than that.
        """
        narrow = all([interop.ITEMSIZE[x] == 2 for x in self.storage])
        return isinstance(self.loss, TangentLoss) and self.loss.heavy == 3 and narrow

    @property
    def shifts_one_by_one(self) -> bool:
        """True for losses that have one shifted vector in flight for any number of elements: heavy ones in float32.

        Lighter ones, and elements of 16 bits, gain or lose a few percent by it.
        """
        wide = all([interop.ITEMSIZE[x] == 4 for x in self.storage])
        return not isinstance(self.loss, TangentLoss) and self.loss.heavy > 1 and wide

    @property
    def micro_tile(self) -> int:
        """Number of elements that a lane processes at a time if streams disagree about the innermost dimension.

        A heavy loss, or one of several operands, has registers for fewer. Second derivatives of a heavier one, with a
        thousand instructions and more, would take seconds to compile.
        """
        if isinstance(self.loss, TangentLoss) and self.loss.heavy > 2:
            return 4
        return 16 if self.loss.heavy or len(self.tensors) > 2 else 32

    def layout_of(self, streams: Sequence[pointwise_layout.Stream]) -> pointwise_layout.Layout:
        """Returns the layout of the index space.

        Tiles of 16-bit elements of a heavy loss are not staged in shared memory: its arithmetic takes longer than
        staging saves.
        """
        base = (isinstance(self.loss, TangentLoss) and self.loss.base) or self.loss
        return pointwise_layout.layout(self.full_shape, streams, self.micro_tile, stages_16_bits=not base.heavy)

    def summed(self, wanted: Wanted) -> Wanted:
        if not self.scalar or self.empty:
            return self.nothing
        sums = self.elements_launch.sums
        return tuple([w and i in sums for i, w in enumerate(wanted)])

    def recorded(self, wanted: Wanted) -> int:
        launch = self.elements_launch
        ends = [launch.first_sums[i] + launch.sums[i].count for i, w in enumerate(self.summed(wanted)) if w]
        return max([self.records, *ends])

    @cached_property
    def partials(self) -> int:  # type: ignore[override]
        return self.elements_launch.chunks

    @cached_property
    def records(self) -> int:  # type: ignore[override]
        return self.elements_launch.warps

    @cached_property
    def _denominator(self) -> tuple[PointwisePlan, tuple[int, ...], float]:
        weighted, masked = self.resolved.weights, self.resolved.masked
        positions = tuple(i for i, x in enumerate(self.loss.operands) if (x is WEIGHT and weighted) or x is MASK)
        tensors = tuple(self.tensors[i] for i in positions)
        compute = "float64" if "float64" in [x.dtype for x in tensors] else "float32"
        call = Call(counting(weighted, masked), (), Static("sum", None, "float64"))
        plan = PointwisePlan(self.engine, call, tensors, compute, self.machine)
        # Elements of broadcast arrays are read once, and count as often as they are used.
        return plan, positions, self.elements / plan.elements

    def denominator(self) -> tuple[PointwisePlan, tuple[int, ...], float]:
        """Returns the plan that sums the weights, or counts the elements, that the mask keeps."""
        return self._denominator

    @cached_property
    def streams(self) -> list[pointwise_layout.Stream]:
        """The operands and, for each, its gradient (with strides 0 if the launch over all elements does not write it).

        Gradients take part in the layout whether they are wanted or not. So the order of additions, and with it the
        bits of the value, do not depend on which are wanted.
        """
        return self._streams_of([self.gradient_strides(i) for i in range(len(self.tensors))])

    def _streams_of(self, gradients: Sequence[tuple[int, ...]]) -> list[pointwise_layout.Stream]:
        streams = [
            pointwise_layout.Stream(
                broadcast_strides(x.shape, x.strides, self.full_shape),
                interop.ITEMSIZE[x.dtype],
                x.misalignment,
                read=True,
            )
            for x in self.tensors
        ]
        for slot, x in enumerate(self.tensors):
            strides = (0,) * len(self.full_shape)
            if self.speculative[slot] and self.differentiable[slot]:
                strides = broadcast_strides(x.shape, gradients[slot], self.full_shape)
            streams.append(pointwise_layout.Stream(strides, interop.ITEMSIZE[x.dtype]))
        return streams

    @cached_property
    def _broadcast(self) -> list[int]:
        """Broadcast operands whose gradients are summed beside the value.

        Weights are left out, since their gradients are rarely wanted. Second derivatives have no registers to spare, so
        they sum none.
        """
        if isinstance(self.loss, TangentLoss):
            return []
        kinds = zip(self.loss.operands, self.speculative, self.differentiable, strict=True)
        return [i for i, (x, full, floating) in enumerate(kinds) if floating and not full and x is not WEIGHT]

    def _summing_launch(self, last: pointwise_layout.Stream) -> ElementLaunch | None:
        """Returns the launch that also leaves partial sums of the gradients of broadcast operands, or None.

        None if there are no such operands, if their sums cannot be left, or if wider vectors without the sums save
        more. ``last`` is the stream of a ``grad_output`` per element, or of none.
        """
        if not self._broadcast:
            return None
        streams = [*self.streams, last]
        for slot in self._broadcast:
            x = self.tensors[slot]
            strides = broadcast_strides(x.shape, self.gradient_strides(slot), self.full_shape)
            streams[len(self.tensors) + slot] = pointwise_layout.Stream(strides, interop.ITEMSIZE[x.dtype])
        launch = ElementLaunch(self, streams, self.machine.processors, self._broadcast)
        itemsize = min([x.itemsize for x in streams if any(x.strides)], default=1)
        narrow = not launch.layout.joined and launch.layout.vec_size * itemsize < 16
        if narrow and launch.layout.kind in pointwise_layout.STRIPS:
            # Wider vectors save more than a separate launch for the sums costs.
            plain = [*self.streams, last]
            gathered = pointwise_layout.gathered(self.layout_of(plain), plain)
            if gathered and gathered.vec_size > launch.layout.vec_size:
                return None
        return launch if launch.sums else None

    @cached_property
    def elements_launch(self) -> ElementLaunch:
        """Launch that computes the value."""
        none = pointwise_layout.Stream((0,) * len(self.full_shape), interop.ITEMSIZE[self.result])
        if self.scalar and (launch := self._summing_launch(none)):
            return launch
        if not self.elementwise:
            return ElementLaunch(self, [*self.streams, none], self.machine.processors, adds=True)
        absent = [pointwise_layout.Stream(none.strides, x.itemsize) for x in self.streams[len(self.tensors) :]]
        values = pointwise_layout.Stream(self.strides, none.itemsize)
        streams = [*self.streams[: len(self.tensors)], *absent, values]
        return ElementLaunch(self, streams, self.machine.processors)

    def launcher(self, stage: str, wanted: Wanted, counted: bool) -> compiler.Launcher:
        if stage == PRODUCT:
            return self.product_launch.launcher(stage, wanted, counted)
        return self.elements_launch.launcher(stage, wanted, counted)

    @cached_property
    def product_launch(self) -> ElementLaunch:
        """Launch that computes the gradients for one ``grad_output``, without a value."""
        return self.gradient_launch(pointwise_layout.Stream((0,) * len(self.full_shape), interop.ITEMSIZE[self.result]))

    def unreduced_step(self, counted: bool) -> Step:
        if self.elementwise:
            return Step((self.elements_launch.launcher("elements", self.nothing, counted),))
        return self.sum_step(None, None, counted)

    def gradient_steps(
        self, wanted: Wanted, upstream: tuple[tuple[int, ...], int] | None, counted: bool
    ) -> Sequence[Step]:
        written, per_element, steps = self.writable(wanted), None, []
        if upstream is not None:
            per_element = self.upstream_stream(*upstream)
            summing = self._summing_launch_of(per_element) if written != wanted else None
            summed = [i for i, w in enumerate(wanted) if w and i in summing.sums] if summing else []
            written = tuple([w or i in summed for i, w in enumerate(written)])
            slots = tuple([i for i, w in enumerate(written) if w])
            if summing and summed:
                kinds = ("elements_gradient", COMBINED)
                steps.append(Step(tuple([summing.launcher(x, written, counted) for x in kinds]), slots, summing.end))
            elif slots:
                launcher = self.gradient_launch(per_element).launcher("elements_gradient", written, counted)
                steps.append(Step((launcher,), slots))
        for slot, (w, done) in enumerate(zip(wanted, written, strict=True)):
            if w and not done:
                steps.append(self.sum_step(slot, per_element, counted))
        return steps

    def gradient_launch(self, grad_output: pointwise_layout.Stream) -> ElementLaunch:
        """Returns the launch that computes the gradients for a ``grad_output`` per element."""
        launch = self._gradient_launches.get(grad_output)
        if launch is None:
            launch = ElementLaunch(self, [*self.streams, grad_output], self.machine.processors, spread=self.has_product)
            self._gradient_launches[grad_output] = launch
        return launch

    def _summing_launch_of(self, grad_output: pointwise_layout.Stream) -> ElementLaunch | None:
        """Returns a launch of gradients that leaves partial sums for those of broadcast operands, or None."""
        if grad_output not in self._summing_launches:
            self._summing_launches[grad_output] = self._summing_launch(grad_output)
        return self._summing_launches[grad_output]

    def sum_step(
        self, slot: int | None, grad_output: pointwise_layout.Stream | None = None, counted: bool = False
    ) -> Step:
        """Returns the launches that sum the gradient of a broadcast operand, or the value over some dimensions."""
        step = self._steps.get((slot, grad_output, counted))
        if step is None:
            step = self._steps[slot, grad_output, counted] = sum_step(self, slot, grad_output, counted)
        return step

    def upstream_stream(self, strides: Sequence[int], misalignment: int) -> pointwise_layout.Stream:
        """Returns a ``grad_output`` per index of the result as the layout sees it."""
        return pointwise_layout.Stream(
            self.keep(strides) if not self.elementwise else tuple(strides),
            interop.ITEMSIZE[self.result],
            misalignment,
            read=True,
        )

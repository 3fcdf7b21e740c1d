"""Plans of box losses: the kernels that compute a value and its gradients, and their launch geometry.

A box is one element of four components. Layouts are those of the pointwise engine, with strides in boxes. One launch
over all boxes computes the value and the gradients of operands that have the full shape. The gradient of a broadcast
operand is a sum, which has launches of its own; their outputs are the components of the operand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import cast

from cupylosses.call import Call
from cupylosses.definition.curvature import Pairs
from cupylosses.engines.base import Engine, Machine, Step, TensorSpec, Wanted
from cupylosses.engines.boxes.call import boxes_of
from cupylosses.engines.boxes.codegen import SECOND_THREADS, BoxKernel, unroll_of
from cupylosses.engines.boxes.definition import COMPONENTS, BoxLoss
from cupylosses.engines.pointwise import layout as pointwise_layout
from cupylosses.engines.pointwise.layout import Stream
from cupylosses.engines.row_statistics.call import names
from cupylosses.engines.row_statistics.plan import StatisticsPlan
from cupylosses.engines.strides import broadcast_strides
from cupylosses.interop import ITEMSIZE
from cupylosses.jit import compiler, gpu

#: Maps stages of the protocol to entry points, if the pointwise kernels have another name for them.
KINDS = {"unreduced": "elements", "gradient": "elements_gradient"}


def has_words(x: TensorSpec) -> bool:
    """True if kernels load each box as one word: its components are contiguous and aligned."""
    if x.strides[-1] != 1:
        return False
    word = min(16, COMPONENTS * ITEMSIZE[x.dtype])
    apart = [s for n, s in zip(x.shape[:-1], x.strides, strict=False) if n != 1]
    return all([s % COMPONENTS == 0 for s in apart]) and x.misalignment % word == 0


class BoxLaunch:
    """A launch over all boxes: layout, chunks and grid, and the launchers of its kernels."""

    def __init__(self, plan: BoxPlan, streams: Sequence[Stream]) -> None:
        self.plan = plan
        self.layout = pointwise_layout.layout(plan.rows_shape, streams, micro_tile=1)
        self.chunks = pointwise_layout.chunks(
            self.layout.vectors, self.layout.vec_size, unroll_of(self.layout.vec_size)
        )
        self.threads = pointwise_layout.threads(self.chunks)
        if True in plan.static.has_tangent:
            self.threads = min(self.threads, SECOND_THREADS)
        self.blocks = pointwise_layout.grid(self.chunks, self.threads, plan.machine.processors)
        self.warps = self.blocks * self.threads // gpu.WARP
        self._launchers: dict[tuple[str, Wanted, bool], compiler.Launcher] = {}

    def launcher(self, stage: str, wanted: Wanted, counted: bool) -> compiler.Launcher:
        """Returns the launcher of a stage."""
        launcher = self._launchers.get((stage, wanted, counted))
        if launcher is None:
            arrays, kind = len(self.plan.tensors), KINDS.get(stage, stage)
            element = self.layout.access[2 * arrays] if stage == "gradient" else "none"
            kernel = replace(
                self.plan.kernel(kind, wanted, counted),
                apart=self.plan.gradients_apart,
                layout=self.layout.kind,
                vec_size=self.layout.vec_size,
                access=(*self.plan.access(self.layout.access[:arrays]), element),
            )
            where = self.layout.elements if self.layout.kind == "flat" else self.layout.words()
            launcher = self.plan.machine.launcher(
                kernel, self.blocks, self.threads, (*self.plan.steps(kernel), self.chunks, where)
            )
            self._launchers[stage, wanted, counted] = launcher
        return launcher


class BoxPlan(StatisticsPlan):
    """Plan of a box loss."""

    def __init__(
        self, engine: Engine, call: Call, tensors: tuple[TensorSpec, ...], promoted: str, machine: Machine
    ) -> None:
        super().__init__(engine, call, tensors, promoted, machine)
        self._launches: dict[Stream | None, BoxLaunch] = {}
        self._sums: dict[tuple[int, Stream | None, bool], Step] = {}

    def kernel(self, kind: str, wanted: Wanted, counted: bool) -> BoxKernel:
        """Returns the kernel of an entry point, without its layout."""
        static, loss = self.static, cast(BoxLoss, self.loss)
        return BoxKernel(
            loss,
            static.flags,
            kind,
            tuple([x.dtype for x in self.tensors]),
            self.result,
            static.weight,
            static.masked,
            wanted,
            compute=self.compute,
            counted=counted,
            has_tangent=tuple(static.has_tangent),
        )

    @property
    def has_kernels(self) -> bool:
        """False for second derivatives of a reduced loss. Kernels only compute those of values per box, from which
        `BoxEngine.apart` composes a reduced loss.
        """
        return not (any(self.static.has_tangent) and self.static.reduction != "none")

    @cached_property
    def curved(self) -> Pairs:
        """All pairs of operands: the second derivatives of boxes may all be nonzero."""
        named = names(self.loss, self.static)
        return frozenset([(x, y) for x in named for y in named])

    @cached_property
    def _are_boxes(self) -> tuple[bool, ...]:
        return boxes_of(self.loss, self.static)

    def _stream(self, slot: int, x: TensorSpec, read: bool) -> Stream:
        """Returns the stream of an array or its gradient: strides over the shape of the rows, in boxes."""
        if not self._are_boxes[slot]:
            strides = broadcast_strides(x.shape, x.strides, self.rows_shape)
            return Stream(strides, ITEMSIZE[x.dtype], x.misalignment, read)
        strides = broadcast_strides(x.shape[:-1], x.strides[:-1], self.rows_shape)
        if not has_words(x):
            # Strides are in components. A size larger than any vector makes each lane process one box at a time.
            return Stream(strides, 64)
        size = COMPONENTS * ITEMSIZE[x.dtype]
        if True in self.static.has_tangent:
            size = 64  # larger than any vector: lanes compute second derivatives of one box at a time
        return Stream(tuple([s // COMPONENTS for s in strides]), size, x.misalignment, read)

    def access(self, chosen: Sequence[str]) -> tuple[str, ...]:
        """Returns the access of each array: the one ``chosen`` by the layout, or by components."""
        words = [not boxes or has_words(x) for boxes, x in zip(self._are_boxes, self.tensors, strict=True)]
        return tuple([x if w else "scalars" for x, w in zip(chosen, words, strict=True)])

    @cached_property
    def gradients_apart(self) -> tuple[bool, ...]:
        """True for each array whose gradient has boxes that kernels cannot store as words."""
        pairs = zip(self._are_boxes, self.tensors, strict=True)
        return tuple([boxes and not has_words(x.gradient) for boxes, x in pairs])

    def steps(self, kernel: BoxKernel) -> tuple[int, ...]:
        """Returns the component strides that ``kernel.steps`` names."""
        read = [x.strides[-1] for x, a in zip(self.tensors, kernel.access, strict=False) if a == "scalars"]
        written = zip(self.tensors, kernel.gradients, kernel.apart, strict=False)
        return (*read, *(x.gradient.strides[-1] for x, wanted, apart in written if wanted and apart))

    @cached_property
    def _sources(self) -> list[Stream]:
        return [self._stream(i, x, read=True) for i, x in enumerate(self.tensors)]

    @cached_property
    def _sinks(self) -> list[Stream]:
        """Streams of the gradients that the launch over all boxes can write, with strides of 0 for the others. They do
        not depend on which gradients are wanted, and so neither does the order of additions.
        """
        sinks = []
        for i, x in enumerate(self.tensors):
            stream = self._stream(i, x.gradient, read=False)
            written = self.speculative[i] and self.differentiable[i]
            sinks.append(stream if written else replace(stream, strides=(0,) * len(self.rows_shape)))
        return sinks

    def _launch(self, per_element: Stream | None) -> BoxLaunch:
        """Returns the launch of the value, or, with ``per_element``, of the gradients for a ``grad_output`` per box."""
        launch = self._launches.get(per_element)
        if launch is None:
            none = (0,) * len(self.rows_shape)
            last = per_element or Stream(none if self.scalar else self.strides, ITEMSIZE[self.result])
            gradients = self._sinks
            if not self.scalar and per_element is None:
                gradients = [replace(x, strides=none) for x in gradients]
            launch = self._launches[per_element] = BoxLaunch(self, [*self._sources, *gradients, last])
        return launch

    @cached_property
    def partials(self) -> int:  # type: ignore[override]
        return self._launch(None).chunks

    @cached_property
    def records(self) -> int:  # type: ignore[override]
        return self._launch(None).warps

    def launcher(self, stage: str, wanted: Wanted, counted: bool) -> compiler.Launcher:
        return self._launch(None).launcher(stage, wanted, counted)

    def check(self, wanted: Wanted, counted: bool) -> compiler.Launcher:
        return self.launcher("value_and_gradient", wanted, counted)

    def gradient_steps(
        self, wanted: Wanted, upstream: tuple[tuple[int, ...], int] | None, counted: bool
    ) -> Sequence[Step]:
        writable, steps, per_element = self.writable(wanted), [], None
        if upstream is not None:
            strides, misalignment = upstream
            per_element = Stream(tuple(strides), ITEMSIZE[self.result], misalignment, read=True)
            # Second derivatives have a launch per operand: those of two boxes do not fit into registers.
            apart = True in self.static.has_tangent
            slots = [i for i, w in enumerate(writable) if w]
            for together in [[i] for i in slots] if apart else [slots] * bool(slots):
                chosen = tuple([i in together for i in range(len(writable))])
                steps.append(Step((self._launch(per_element).launcher("gradient", chosen, counted),), tuple(together)))
        for slot, (w, written) in enumerate(zip(wanted, writable, strict=True)):
            if w and not written:
                key = slot, per_element, counted
                if key not in self._sums:
                    self._sums[key] = self._sum_of(slot, per_element, counted)
                steps.append(self._sums[key])
        return steps

    def upstream_strides(self) -> tuple[int, ...] | None:
        return None

    def _sum_of(self, slot: int, grad_output: Stream | None, counted: bool) -> Step:
        """Returns the launches that sum the gradient of the broadcast operand in ``slot``."""
        x, several = self.tensors[slot], self._are_boxes[slot]
        shape = (*self.rows_shape, *[COMPONENTS] * several)
        none = Stream((0,) * len(self.rows_shape), ITEMSIZE[self.result])
        streams = [replace(s, strides=(*s.strides, *[0] * several)) for s in (*self._sources, grad_output or none)]
        if several:
            # The index of the component, as a stream. Its size is that of two words, so that a lane has one component.
            streams.append(Stream((*none.strides, 1), 32))
        result = broadcast_strides(x.shape, x.gradient.strides, shape)
        layout = pointwise_layout.sum_layout(shape, [s.strides for s in streams], result)
        layout = pointwise_layout.sum_in_vectors(layout, streams, Stream(result, ITEMSIZE[x.dtype]))
        arrays = len(self.tensors)
        most = pointwise_layout.max_rank(arrays)
        kept_rank, reduced_rank = (1 if len(sizes) <= 1 else most for sizes in (layout.kept, layout.reduced))
        kernel = replace(
            self.kernel("broadcast_gradient", tuple([i == slot for i in range(arrays)]), counted),
            layout="matrix" if kept_rank == 1 else "rows",
            vec_size=layout.vec_size,
            access=(*self.access(layout.access[:arrays]), layout.access[arrays] if grad_output else "none"),
            columns=layout.columns,
            outer=reduced_rank > 1,
            shared=layout.shared,
        )
        fixed = (*self.steps(kernel), *layout.arguments(kept_rank, reduced_rank))
        kinds = {"broadcast_gradient": layout.tasks * layout.warps, "combine_slices": layout.outputs}
        if layout.slices == 1:
            del kinds["combine_slices"]
        launchers = [
            self.machine.launcher(
                replace(kernel, kind=kind),
                pointwise_layout.sum_grid(count, self.machine.processors),
                pointwise_layout.MAX_THREADS,
                fixed,
            )
            for kind, count in kinds.items()
        ]
        return Step(tuple(launchers), (slot,), layout.slices * layout.outputs if layout.slices > 1 else 0)

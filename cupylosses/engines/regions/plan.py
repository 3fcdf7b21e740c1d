"""Plans of region losses: the kernels that compute a value and its gradients, and their launch geometry.

Forward is one launch (two for a value per group), which reads the operands. Besides the value it writes the residual:
the derivatives with respect to the sums of each sample and class. Backward is one more launch, which reads the operands
again and writes the gradients from the residual. Speculative gradients would gain nothing: memory traffic is the same
without them, and one gradient less is in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from math import prod

from cupylosses import checks
from cupylosses.call import Call
from cupylosses.engines.base import Engine, Machine, Plan, Step, TensorSpec, Wanted, contiguous
from cupylosses.engines.regions import layout as region_layout
from cupylosses.engines.regions.call import Static, shape_of_groups, without
from cupylosses.engines.regions.codegen import RegionKernel
from cupylosses.engines.regions.definition import RegionLoss
from cupylosses.engines.softmax.labels import site_of
from cupylosses.engines.strides import broadcast_strides
from cupylosses.interop import ITEMSIZE
from cupylosses.jit import compiler


def residual_shape(samples: int, classes: int) -> tuple[int]:
    """Returns the shape of the residual: three derivatives per sample and class, and the factor of voxel gradients."""
    return (3 * samples * classes + 1,)


def _of_kernel(static: Static, stage: str) -> Static:
    """Returns the static part with defaults for all settings that the source of a kernel does not depend on."""
    settings = static._replace(class_dim=0, ignore_index=0, out_dtype=None, check="", has_tangent=())
    if stage in ("value", "groups", "hvp_groups"):
        return settings
    pool = static.pool if stage in ("from_residual", "hvp") else "none"
    return settings._replace(
        pool=pool, absent="skip", weighting="uniform", weight_in="loss", average="groups", gamma_over="group",
        log_loss=False, power=False, mean_of_weights=False, reduction="none", normalized=False,
    )  # fmt: skip


class RegionPlan(Plan):
    """Plan of a region loss."""

    static: Static
    loss: RegionLoss
    keeps_residual = True

    def __init__(
        self, engine: Engine, call: Call, tensors: tuple[TensorSpec, ...], promoted: str, machine: Machine
    ) -> None:
        static: Static = call.static
        self.input, self.target, *rest = tensors
        dim = static.class_dim
        self.voxels_shape, self.classes = without(self.input.shape, dim), self.input.shape[dim]
        self.samples = self.voxels_shape[0]
        tangents = any(static.has_tangent)
        if not tangents:
            self.residual = contiguous("float64", residual_shape(self.samples, self.classes))
            self.auxiliary = (self.residual,)
        super().__init__(engine, call, tensors, promoted, machine)
        others = iter(rest)
        self.class_weight = next(others) if static.class_weighted else None
        self.weight = next(others) if static.weighted else None
        self.mask = next(others) if static.masked else None
        self.result = static.out_dtype or promoted
        room = machine.chip.shared - region_layout.DECLARED_BYTES
        # The reference formula computes calls whose classes do not fit in the shared memory of a block.
        self.empty = prod(self.input.shape) == 0 or 24 * (1 + tangents) * self.classes > room
        self.scalar = static.reduction != "none"
        groups = shape_of_groups(static, self.samples, self.classes)
        self.groups = prod(groups)
        spec = contiguous(self.result, () if self.scalar else groups)
        self.shape, self.strides = spec.shape, spec.strides
        self.differentiable = tuple([i < 2 and x.dtype in checks.FLOATING for i, x in enumerate(tensors)])
        self.speculative = self.nothing
        self.records = self.slot = 0
        labels = static.kind == "labels"
        self.takes_status = labels
        self.reports = labels and static.check != "off"
        self.waits = labels and static.check == "sync"
        self.site = site_of(self.loss, self.voxels_shape) if labels else 0
        self._launchers: dict[tuple[str, Wanted, bool], compiler.Launcher] = {}

    @cached_property
    def layout(self) -> region_layout.Layout:
        """Geometry of all launches."""
        dim, rank = self.static.class_dim, len(self.voxels_shape)
        dense = self.static.kind == "dense"
        none = region_layout.VoxelStream((0,) * rank, vector=False)
        streams = []
        for i, x in enumerate((self.input, self.target)):
            for lies, misalignment in ((x, x.misalignment), (x.gradient, 0)):
                if i == 1 and not dense:
                    streams.append(region_layout.VoxelStream(x.strides, 0, ITEMSIZE[x.dtype], misalignment))
                else:
                    fields = without(lies.strides, dim), lies.strides[dim], ITEMSIZE[x.dtype], misalignment
                    streams.append(region_layout.VoxelStream(*fields))
        input, of_input, target, of_target = streams
        if not (dense and self.differentiable[1]):
            of_target = none
        second, number, apart = 0, ITEMSIZE[self.compute], self.static.label_apart
        heavy = self.static.smoothed or self.static.voxel in ("term", "element")
        most = region_layout.classes_in_registers(number, dense, apart, heavy, self.machine.chip.shared)
        if any(self.static.has_tangent):
            of_labels = 1 if heavy or not apart else 0
            most = region_layout.SECOND_IN_REGISTERS[number][2 if dense else of_labels]
            second = region_layout.SECOND_VECTOR_REGISTERS[bool(self.static.voxel)]
            of_input = replace(of_input, misalignment=self.tensors[-1].misalignment)
        mask = none
        if self.mask is not None:
            strides = broadcast_strides(self.mask.shape, self.mask.strides, self.voxels_shape)
            mask = region_layout.VoxelStream(strides, vector=False)
        room = self.machine.chip.shared - region_layout.DECLARED_BYTES
        streams = [input, target, mask, of_input, of_target]
        # Tiles have no room for more than the softmax and the label of a voxel.
        in_tiles = apart and not heavy
        stored = in_tiles and (second > 0 or ITEMSIZE[self.input.dtype] == 2)
        shared = not in_tiles or not (stored or self.classes <= region_layout.TILED_CLASSES)
        return region_layout.layout(
            self.voxels_shape, self.classes, streams, number, dense, room, most, heavy, second, stored, shared, apart
        )

    @cached_property
    def partials(self) -> int:  # type: ignore[override]
        x = self.layout
        return x.samples * (x.chunks + 1) * x.numbers + self.groups * region_layout.RECORD + x.samples

    def launcher(self, stage: str, wanted: Wanted, counted: bool) -> compiler.Launcher:
        key = stage, wanted[:2], counted
        launcher = self._launchers.get(key)
        if launcher is None:
            launcher = self._launchers[key] = self._load(stage, wanted, counted)
        return launcher

    @property
    def label_apart(self) -> bool:
        """True if kernels with classes in registers handle the label's class apart from others (``kLabelApart``)."""
        return self.static.label_apart and self.layout.lanes == 1

    @property
    def _is_staged(self) -> bool:
        """True if logits and labels pass through shared memory, one vector ahead of their use (``StagedVectors``).

        This holds for 16-bit logits of 11 classes and more, which threads process in pairs of voxels. Others were not
        faster, or not timed. The label's logit is replaced in shared memory, so no other voxel loss may read it.
        """
        x, static = self.layout, self.static
        alone = static.voxel in ("", "row") and not static.smoothed
        pairs = x.wide and not any(x.packed) and x.vec_size == 2 and ITEMSIZE[self.input.dtype] == 2
        if not (self.label_apart and alone and pairs):
            return False
        columns = region_layout.columns_of_sums(x.held, True) * ITEMSIZE[self.compute]
        return region_layout.has_room(columns, self._staged_bytes, self.machine.chip.shared)

    @property
    def by_warps(self) -> bool:
        """True if the lanes of a warp move packed vectors together, through shared memory (``PackedStretch``)."""
        x, itemsize, second = self.layout, ITEMSIZE[self.input.dtype], any(self.static.has_tangent)
        if not (x.held and all(x.packed)):
            return False
        words, _ = region_layout.packed_words(x.held, x.vec_size, itemsize)
        least = (region_layout.SECOND_PACKED_WORDS if second else region_layout.PACKED_WORDS).get(itemsize)
        if least is None or words < least:
            return False
        columns = region_layout.columns_of_sums(x.held, self.static.label_apart, x.lanes) * ITEMSIZE[self.compute]
        return region_layout.has_room(columns * (1 + second), self.packed_bytes, self.machine.chip.shared)

    @property
    def packed_bytes(self) -> int:
        """Bytes of shared memory per thread for packed vectors of the input and of its tangent."""
        x = self.layout
        of_vector = region_layout.packed_bytes(x.held, x.vec_size, ITEMSIZE[self.input.dtype])
        return of_vector * (1 + any(self.static.has_tangent))

    @property
    def _staged_bytes(self) -> int:
        """Bytes of shared memory per thread for two staged vectors."""
        x = self.layout
        return region_layout.staged_bytes(x.held, x.vec_size, ITEMSIZE[self.input.dtype], ITEMSIZE[self.target.dtype])

    def _shared(self, stage: str, staged: bool) -> int:
        """Returns the bytes of dynamic shared memory per block."""
        x, number = self.layout, ITEMSIZE[self.compute]
        threads, shared = region_layout.THREADS, 0
        stored = x.classes, ITEMSIZE[self.input.dtype], number, False
        if stage == "from_residual":
            threads, shared = region_layout.GRADIENT_THREADS, x.coefficients * number
            if x.word:
                shared = region_layout.stored_gradient_bytes(*stored, x.gradient_tile)
            elif x.tile:
                shared = region_layout.tile_gradient_bytes(x.classes, number)
        elif stage != "groups":
            columns = region_layout.columns_of_sums(x.held, self.static.label_apart, x.lanes)
            shared = columns * threads * number if x.held else 24 * x.classes
            if x.word:
                shared = region_layout.stored_sums_bytes(*stored, x.tile)
            elif x.tile:
                shared = region_layout.sums_bytes(x.classes, number, x.tile)
        if staged or (self.by_warps and stage != "groups"):
            return -(-shared // 16) * 16 + threads * (self._staged_bytes if staged else self.packed_bytes)
        return shared

    def _tile(self, stage: str) -> int:
        """Returns the number of voxels per tile in shared memory of a stage, or 0."""
        if stage in ("groups", "hvp_groups"):
            return 0
        return self.layout.gradient_tile if stage in ("from_residual", "hvp") else self.layout.tile

    def _load(self, stage: str, wanted: Wanted, counted: bool) -> compiler.Launcher:
        x, static = self.layout, self.static
        staged = stage != "groups" and self._is_staged
        kernel = self.kernel(stage, wanted, staged, counted)
        blocks, threads = 1, region_layout.THREADS
        piece: tuple[int, ...] = ()
        chunks, per_chunk = x.chunks, x.per_chunk
        if stage in ("value", "sums"):
            blocks = min(x.samples * x.chunks, 32 * self.machine.processors)
        if stage == "from_residual":
            threads = region_layout.GRADIENT_THREADS
            if staged:
                per_piece = region_layout.gradient_piece(x, self.machine.processors)
                blocks, piece = x.samples * chunks * -(-per_chunk // per_piece), (per_piece,)
            else:
                chunks, per_chunk = region_layout.gradient_chunks(x, self.machine.processors)
                blocks = x.samples * chunks
        shared = self._shared(stage, staged)
        if stage == "value":
            piece = x.per_segment, shared // 8
        fixed = (static.ignore_index, self.site, chunks, per_chunk, *piece, x.words)
        return self.machine.launcher(kernel, blocks, threads, fixed, shared)

    def kernel(self, stage: str, wanted: Wanted, staged: bool, counted: bool) -> RegionKernel:
        """Returns the kernel of a stage."""
        x, static = self.layout, self.static
        of_voxels = stage not in ("groups", "hvp_groups")
        return RegionKernel(
            self.loss, stage, self.input.dtype, self.target.dtype,
            "" if self.class_weight is None else self.class_weight.dtype,
            "" if self.weight is None else self.weight.dtype, static.masked, self.result, self.compute,
            _of_kernel(static, stage),
            tuple(wanted[:2]), x.held, x.vec_size, x.wide, x.many, staged, counted,
            self._tile(stage), x.packed if of_voxels else (False, False), of_voxels and self.by_warps,
            x.word if self._tile(stage) else 0, x.lanes if of_voxels else 1,
        )  # fmt: skip

    def unreduced_step(self, counted: bool) -> Step:
        launchers = self.launcher("sums", self.nothing, False), self.launcher("groups", self.nothing, False)
        return Step(launchers, partials=self.partials)

    def gradient_steps(
        self, wanted: Wanted, upstream: tuple[tuple[int, ...], int] | None, counted: bool
    ) -> Sequence[Step]:
        raise NotImplementedError("gradients are written from the residual of forward")

    def upstream_strides(self) -> tuple[int, ...] | None:
        return None if self.scalar else self.strides

"""Plan of second derivatives of region losses (Hessian-vector products): three launches.

    launch        result
    hvp_sums      the sums of each sample and class, with their tangents
    hvp_groups    the derivative of the value along the tangent, and the derivatives by the sums, with their tangents
    hvp           the tangent of the gradient of each voxel

The kernels are in ``kernels/regions/region_hvp.cuh``.
"""

from __future__ import annotations

from typing import Any

from cupylosses.call import Call
from cupylosses.engines.base import Engine, Machine, TensorSpec, Wanted
from cupylosses.engines.composite import Inputs
from cupylosses.engines.regions import layout as region_layout
from cupylosses.engines.regions.plan import RegionPlan
from cupylosses.interop import ITEMSIZE
from cupylosses.jit import compiler

#: Maximum number of contiguous classes of an input that is read without a copy in which its voxels are contiguous. With
#: more classes, each lane of a warp would read its own cache line, many times.
FAR_CLASSES = 16
#: Minimum number of bytes of a logit for that copy.
FAR_ITEMSIZE = 4


def voxels_far_apart(x: TensorSpec, class_dim: int) -> bool:
    """True if neighbouring voxels are so far apart that second derivatives read a copy."""
    many = x.shape[class_dim] > FAR_CLASSES and ITEMSIZE[x.dtype] >= FAR_ITEMSIZE
    return many and 0 not in x.shape and x.strides[class_dim] == 1


class RegionHvpPlan(RegionPlan):
    """Composite plan of the derivative of a region loss along a tangent of the input."""

    composite = True
    keeps_residual = False

    def __init__(
        self, engine: Engine, call: Call, tensors: tuple[TensorSpec, ...], promoted: str, machine: Machine
    ) -> None:
        super().__init__(engine, call, tensors, promoted, machine)
        # The reference formula handles tangents of dense targets, and normalizers.
        self.empty = self.empty or any(call.static.has_tangent[1:]) or call.static.normalized

    def _load(self, stage: str, wanted: Wanted, counted: bool) -> compiler.Launcher:
        x = self.layout
        blocks, threads, shared = 1, region_layout.THREADS, 0
        chunks, per_chunk = x.chunks, x.per_chunk
        stored = x.classes, ITEMSIZE[self.input.dtype], ITEMSIZE[self.compute], True
        if stage == "hvp_sums":
            blocks = min(x.samples * x.chunks, 32 * self.machine.processors)
            columns = 2 * x.held * self.label_apart
            shared = columns * threads * 2 * ITEMSIZE[self.compute] if x.held else 48 * x.classes
            if x.word:
                shared = region_layout.stored_sums_bytes(*stored, x.tile)
        elif stage == "hvp":
            threads, shared = region_layout.GRADIENT_THREADS, 2 * x.coefficients * ITEMSIZE[self.compute]
            if x.word:
                shared = region_layout.stored_gradient_bytes(*stored, x.gradient_tile)
            chunks, per_chunk = region_layout.gradient_chunks(x, self.machine.processors)
            blocks = x.samples * chunks
        else:
            threads = region_layout.GROUP_THREADS
            if self._kept_by_groups <= self.machine.chip.shared - region_layout.DECLARED_BYTES:
                shared = self._kept_by_groups
        if self.by_warps and stage != "hvp_groups":
            shared = -(-shared // 16) * 16 + threads * self.packed_bytes
        segments = (x.per_segment, shared // 8) if stage == "hvp_groups" else (x.per_segment,) * (stage == "hvp_sums")
        fixed = (self.static.ignore_index, self.site, chunks, per_chunk, *segments, x.words)
        return self.machine.launcher(self.kernel(stage, wanted, False, counted), blocks, threads, fixed, shared)

    @property
    def _kept_by_groups(self) -> int:
        """Bytes that the second kernel keeps between its steps."""
        x = self.layout
        return 8 * (x.samples * (2 * x.numbers + 1) + self.groups * region_layout.SECOND_RECORD)

    def run_hvp(self, inputs: Inputs, wanted: Wanted, grad_output: int) -> tuple[Any, list[Any]]:
        """Returns the derivative along the tangent, and the products of the second derivatives with it."""
        device, arrays, scalars, _ = inputs
        x, stream = self.layout, device.stream()
        count = x.samples * x.chunks * 2 * x.numbers + self._kept_by_groups // 8
        _memory, workspace = device.workspace(stream, count, stream != 0 and device.capturing())
        coefficients = device.empty((2 * (3 * x.samples * x.classes + 1),), (1,), "float64")
        value = device.empty(self.shape, self.strides, self.result)
        buffers = workspace, device.address(coefficients), device.address(value), grad_output
        rest = *buffers, int(not self.scalar), *scalars, *self.constant.arguments
        pointers = [device.address(array) for array in arrays]
        for stage in ("hvp_sums", "hvp_groups"):
            self.launcher(stage, self.nothing, False)(stream, *pointers, *rest)
        products: list[Any] = [None] * len(wanted)
        if not any(wanted):
            return value, products
        addresses = []
        for slot, w in enumerate(wanted):
            if w:
                products[slot] = device.empty(*self.allocation(slot))
                addresses.append(device.address(products[slot]))
        self.launcher("hvp", wanted, False)(stream, *pointers, *addresses, *rest)
        return value, products

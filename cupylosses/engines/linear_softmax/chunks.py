"""Chunk loop of a linear layer: row kernels between matrix products, one chunk of logits at a time.

With inputs X (N, D), weight W (C, D), bias b (C,) and logits Z (N, C), for each chunk of rows:

    Z = X W^T + b      a row kernel reads Z or writes its gradient G      dX = G W      dW += G^T X      db += sum_n G

If not all logits fit in a chunk, they never exist as a whole. cuBLAS takes several times as long for 16-bit products
with a size that is not a multiple of eight:

- Features D: rows of X and W are then unaligned. Large layers read copies of X and W whose features are padded with
  zeros, and the gradients are copied out of buffers with padded rows (`pads_features`).
- Classes C: cuBLAS chooses by the size, so padded rows of Z do not help. The gradient of W is written with extra rows
  for classes past the last one, computed from whatever G holds there, and returned without these rows. Large layers
  also read a copy of W padded with rows of zeros, and dX reads zeros in the padding of G (`pads_classes`).

A :class:`ChunkedPlan` chooses the chunks, allocates their workspace and multiplies. Its subclasses supply the row
kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from math import prod
from typing import Any

from cupylosses.call import Call
from cupylosses.engines.base import Engine, Machine, TensorSpec, Wanted
from cupylosses.engines.composite import CompositePlan
from cupylosses.engines.device import Device
from cupylosses.engines.execute import gradient_buffers
from cupylosses.engines.linear_softmax import codegen
from cupylosses.engines.linear_softmax.codegen import ChunkKernel
from cupylosses.interop import ITEMSIZE
from cupylosses.jit import compiler

#: Default limit on the bytes of a chunk of logits. If the weight is larger, its size is the limit, since backward needs
#: as much memory for the weight's gradient anyway.
LEAST_MEMORY = 256 << 20
#: Maximum number of chunks for which the weight's gradient is accumulated in the dtype of the weight. With more chunks,
#: rounding after each one adds a tenth of the error that rounding the logits causes.
MAX_ROUNDED = 4
#: The number of rows of a chunk is a multiple of this, which fills the tiles of matrix products on 132 multiprocessors.
ROWS = 1024
#: The number of rows of a chunk that is kept for backward is a multiple of this, the tile size of matrix products.
KEPT_ROWS = 128
#: Sizes of 16-bit products are padded to a multiple of this if the products gain more time than the copies cost.
PADDED = 8
#: Thresholds for padding features: minimum number of multiplications of a product whose features are a multiple of
#: four, which lose less; the same for other features; and minimum harmonic mean of rows and classes.
LEAST_BY_FOUR, LEAST_PADDED, LEAST_MEAN = 2 * 10**9, 1 << 29, 768
#: Thresholds for padding an odd number of classes: minimum number of rows, and minimum number of elements of the inputs
#: or of multiplications of a product. An even number of classes loses less: its thresholds are larger by these factors.
LEAST_ROWS, LEAST_INPUTS, LEAST_PRODUCT = 8, 1 << 22, 1 << 26
MORE_ROWS, MORE_WORK = 32, 4
#: Minimum number of rows of the weight's gradient if features are not a multiple of `PADDED`, and the range of row
#: counts of a layer in which cuBLAS takes up to four times as long with fewer.
WEIGHT_ROWS, SLOW_ROWS = 32, (1536, 1 << 14)
#: Each row of logits starts at a multiple of this many bytes, whatever the number of classes, so that matrix products
#: and the vector accesses of row kernels are aligned.
PITCH_BYTES = 64

#: Launches the row kernel of a chunk. Arguments: index of the chunk, first row, address of the logits, address of their
#: gradient.
Launch = Callable[[int, int, int, int], None]


def chunk_memory(static: Any, weight: int) -> int:
    """Returns the maximum number of bytes of a chunk of logits, for a weight of ``weight`` bytes."""
    return int(static.max_memory or max(LEAST_MEMORY, weight))


def most_rows(static: Any, row: int, weight: int) -> int:
    """Returns the maximum number of rows of a chunk, for rows of ``row`` bytes and a weight of ``weight`` bytes."""
    return max(1, chunk_memory(static, weight) // row)


def pads_features(rows: int, features: int, classes: int, dtype: str) -> bool:
    """True if the products of a layer read copies of its inputs and weight with padded features."""
    if ITEMSIZE[dtype] != 2 or features % PADDED == 0:
        return False
    least = LEAST_PADDED if features % 4 else LEAST_BY_FOUR
    return rows * features * classes >= least and 2 * rows * classes >= LEAST_MEAN * (rows + classes)


def pads_classes(rows: int, features: int, classes: int, dtype: str) -> bool:
    """True if the products of a layer read a copy of its weight with padded classes."""
    if ITEMSIZE[dtype] != 2 or classes % PADDED == 0:
        return False
    if features % PADDED != 0 and not pads_features(rows, features, classes, dtype):
        return False
    more_rows, more = (1, 1) if classes % 2 else (MORE_ROWS, MORE_WORK)
    if rows < LEAST_ROWS * more_rows:
        return False
    return rows * features >= LEAST_INPUTS * more or rows * features * classes >= LEAST_PRODUCT * more


def _padded(size: int) -> int:
    return -(-size // PADDED) * PADDED


class LogitsSpec(TensorSpec):
    """A chunk of logits whose gradient, of the same dtype, overwrites it."""

    in_place = True

    @property
    def gradient(self) -> TensorSpec:
        """Spec of the gradient, which has the strides of the logits."""
        return TensorSpec(self.dtype, self.shape, self.strides)


class ChunkedPlan(CompositePlan):
    """A plan that computes logits in chunks of rows. ``at`` maps the names of a call's arrays to their positions."""

    #: Storage of the 16-bit gradient of float32 logits. ``overlays`` is True if it overwrites the logits, ``separate``
    #: if the row kernel writes it to a buffer of its own. If both are False, a conversion kernel writes it.
    overlays = False
    separate = False
    #: Number of buffers of a chunk's size that exist at the same time.
    chunk_buffers = 1

    def __init__(
        self,
        engine: Engine,
        call: Call,
        tensors: tuple[TensorSpec, ...],
        promoted: str,
        machine: Machine,
        at: Mapping[str, int],
    ) -> None:
        self.at = at
        self.input, self.weight = tensors[:2]
        *rows, self.depth = self.input.shape
        self.rows_shape, self.rows, self.classes = tuple(rows), prod(rows), self.weight.shape[0]
        self.logits = call.static.logits_dtype or self.input.dtype
        # Rows of logits are ``pitch`` elements apart.
        step = PITCH_BYTES // ITEMSIZE[self.logits]
        self.pitch = -(-self.classes // step) * step
        sizes = self.rows, self.depth, self.classes, self.input.dtype
        self.pads = pads_features(*sizes)
        #: Number of features in products: that of the layer, or the padded number.
        self.features = _padded(self.depth) if self.pads else self.depth
        #: Number of classes in products, that of the layer or a padded number: ``logit_columns`` in the products for
        #: logits and for the inputs' gradient, ``weight_rows`` in the product for the weight's gradient, where padding
        #: costs no copies.
        self.logit_columns = _padded(self.classes) if pads_classes(*sizes) else self.classes
        self.weight_rows = self.logit_columns
        #: True if the features of the weight's gradient are contiguous; otherwise its classes are.
        self.by_rows = self.weight.gradient.strides[-1] == 1
        if self.by_rows and ITEMSIZE[self.input.dtype] == 2:
            if self.features % PADDED == 0:
                self.weight_rows = _padded(self.classes)
            elif SLOW_ROWS[0] <= self.rows < SLOW_ROWS[1]:
                self.weight_rows = max(self.classes, min(self.pitch, WEIGHT_ROWS))
        #: True if backward adds the weight's gradient to a `main_grad`.
        self.adds = "main_grad" in at
        self.updated = int(self.adds)
        self._small: dict[tuple[Any, ...], compiler.Launcher] = {}
        super().__init__(engine, call, tensors, promoted, machine)

    def divide(self) -> None:
        """Chooses the chunks. Precondition: the numbers of rows, classes and features are positive."""
        self.chunk_rows = self._rows_of_chunk()
        count = -(-self.rows // self.chunk_rows)
        rounded = self.static.accumulate_dtype or (self.weight.dtype if count <= MAX_ROUNDED else "float32")
        #: Dtype in which the chunks accumulate the weight's gradient.
        self.accumulated = self.weight.dtype if count == 1 or self.compute == "float64" else rounded
        if self.adds:
            self.accumulated = self.static.accumulate_dtype or self.tensors[self.at["main_grad"]].dtype

    def _rows_of_chunk(self) -> int:
        """Returns the rows of a chunk: all rows if they fit, otherwise a multiple of `ROWS` if memory allows."""
        of_weight = self.classes * self.depth * ITEMSIZE[self.weight.dtype]
        most = most_rows(self.static, self.chunk_buffers * self.pitch * ITEMSIZE[self.logits], of_weight)
        if self.rows <= most:
            return self.rows
        count = -(-self.rows // most)
        if self.consumes_residual:
            # The chunk that is kept for backward is as large as memory allows.
            whole = most // KEPT_ROWS * KEPT_ROWS or most
            if -(-self.rows // whole) == count:
                return whole
        # Chunks of equal size, without a small remainder.
        even = -(-self.rows // count)
        for step in (ROWS, 128, 8):
            rounded = -(-even // step) * step
            if rounded <= most:
                return rounded
        return most

    @cached_property
    def spans(self) -> list[tuple[int, int]]:
        """First row and number of rows of each chunk."""
        return [(i, min(self.chunk_rows, self.rows - i)) for i in range(0, self.rows, self.chunk_rows)]

    def kernel(
        self, kind: str, dtype: str, result: str, blocks: int = 1, fixed: tuple[int, ...] = ()
    ) -> compiler.Launcher:
        """Returns the launcher of a kernel that runs between matrix products (`.codegen.ChunkKernel`)."""
        key = kind, dtype, result, blocks, fixed
        launcher = self._small.get(key)
        if launcher is None:
            kernel = ChunkKernel(self.loss, kind, dtype, result)
            threads = codegen.THREADS.get(kind, 32)
            launcher = self._small[key] = self.machine.launcher(kernel, blocks, threads, fixed)
        return launcher

    def grid(self, count: int) -> int:
        """Returns the number of blocks for ``count`` elements, limited to those that run at once."""
        return max(1, min(-(-count // (4 * codegen.THREADS["rescale"])), 8 * self.machine.processors))

    def allocation(self, slot: int) -> tuple[Any, ...]:
        arguments = super().allocation(slot)
        return ((self.weight_rows, self.depth), *arguments[1:]) if slot == 1 and self._extends else arguments

    @property
    def _extends(self) -> bool:
        """True if the weight's gradient is written with rows for more classes than the layer has."""
        return self.by_rows and self.weight_rows > self.classes

    def buffers_onto(self, device: Device, arrays: Sequence[Any], wanted: Wanted) -> list[Any]:
        """Allocates the wanted gradients. If there is a `main_grad`, it takes the place of the weight's gradient."""
        if not (self.adds and wanted[1]):
            return gradient_buffers(self, device, wanted)[0]
        gradients, _ = gradient_buffers(self, device, (wanted[0], False, *wanted[2:]))
        gradients[1] = arrays[self.at["main_grad"]]
        return gradients

    def handed_out(self, device: Device, gradients: Sequence[Any]) -> list[Any]:
        """Returns the gradients for autograd.

        The weight's gradient loses its padded rows, and is None if it is added to `main_grad`.
        """
        results = list(gradients)
        if self.adds:
            results[1] = None
        elif results[1] is not None and self._extends:
            results[1] = device.rows(results[1], 0, self.classes)
        return results

    def padded_weight(self, device: Device, weight: Any) -> Any:
        """Returns the weight, or a tangent of it, padded as products read it."""
        if self.pads or self.logit_columns > self.classes:
            return device.padded(weight, self.logit_columns, self.features)
        return weight

    def padded_bias(self, device: Device, bias: Any) -> Any:
        """Returns the bias, or a tangent of it, padded as products add it; None stays None."""
        if bias is None or self.logit_columns == self.classes:
            return bias
        return device.padded(device.matrix(bias, 1, self.classes), 1, self.logit_columns)

    def clear(self, device: Device, of_logits: Any) -> None:
        """Sets the gradients of padded logits to 0.

        Padded logits are NaN if an input of their row is not finite, even in rows that do not count.
        """
        if self.logit_columns > self.classes:
            device.clear_columns(of_logits, self.classes)

    def padded_inputs(self, device: Device, part: Any) -> Any:
        """Returns rows of the inputs, or of a tangent of them, padded as products read them."""
        return device.padded(part, part.shape[0], self.features) if self.pads else part

    def weight_sums(self, device: Device, of_weight: Any) -> tuple[Any, Callable[[], None]]:
        """Returns the matrix that accumulates the weight's gradient, and a function that finishes the gradient.

        The matrix is the gradient itself unless it is padded or has a wider dtype; the function then narrows it and
        copies it to the gradient. A `main_grad` is neither padded nor widened.
        """
        if of_weight is None or self.adds:
            return of_weight, lambda: None
        total = rounded = of_weight
        shape = self.weight_rows, self.features
        copied = self.pads or (self.weight_rows > self.classes and not self.by_rows)
        if copied:
            total = rounded = device.empty(shape, (self.features, 1), self.weight.dtype)
        widened = self.accumulated != self.weight.dtype
        if widened:
            total = device.empty(shape, device.strides(rounded), self.accumulated)

        def finish() -> None:
            if widened:
                count = self.weight_rows * self.features
                narrow = self.kernel("narrow", self.accumulated, self.weight.dtype, self.grid(count))
                narrow(device.stream(), device.address(total), device.address(rounded), count)
            if copied:
                unpadded = device.corner(rounded, self.classes, self.depth)
                device.assign(device.rows(of_weight, 0, self.classes), unpadded)

        return total, finish

    def sweep(
        self,
        device: Device,
        arrays: Sequence[Any],
        gradients: Sequence[Any],
        launch: Launch,
        onto: bool = False,
        kept: Any = None,
    ) -> None:
        """Runs all chunks: computes their logits, calls ``launch``, and multiplies for ``gradients``.

        ``gradients`` has an array or None for each array of the call; it is empty if the row kernel writes no gradient.
        With ``onto`` the weight's gradient is added to the contents of its array.

        ``kept`` holds the logits of the first chunk from forward to backward. Forward computes this chunk last, so that
        the other chunks may use the memory before; backward reads it first.
        """
        at, biased = self.at, "linear_bias" in self.at
        inputs = device.matrix(device.detached(arrays[0]), self.rows, self.depth)
        weight, columns = self.padded_weight(device, device.detached(arrays[1])), self.logit_columns
        bias = device.detached(arrays[at["linear_bias"]]) if biased else None
        if bias is not None and self.logits != self.input.dtype:
            bias = device.converted(bias, self.logits)
        bias = self.padded_bias(device, bias)
        of_input, of_weight = gradients[:2] if gradients else (None, None)
        of_bias = gradients[at["linear_bias"]] if gradients and biased else None
        parts, of_parts = device.parts(inputs, self.rows, self.chunk_rows), None
        if of_input is not None:
            of_parts = device.parts(device.matrix(of_input, self.rows, self.depth), self.rows, self.chunk_rows)
        total, finish = self.weight_sums(device, of_weight)
        height = self.classes if onto else self.weight_rows
        moved = None
        if self.pads and of_parts is not None:
            moved = device.empty((self.chunk_rows, self.features), (self.features, 1), self.input.dtype)
        sums = device.empty((self.classes,), (1,), "float64") if of_bias is not None else None
        reads_kept = kept is not None and bool(gradients)
        workspace = kept
        if kept is None or (reads_kept and not (self.consumes_residual and not device.captures())):
            workspace = device.empty((self.chunk_rows, self.pitch), (self.pitch, 1), self.logits)
        narrowed, pitch = workspace, self.pitch
        differs = bool(gradients) and self.logits != self.input.dtype
        if differs and self.overlays:
            narrowed, pitch = device.viewed(workspace, self.input.dtype), 2 * self.pitch
        elif differs:
            narrowed = device.empty((self.chunk_rows, self.pitch), (self.pitch, 1), self.input.dtype)
        transposed, stream, seen = device.transposed(weight), device.stream(), 0
        place, apart = device.address(workspace), device.address(narrowed)
        of_place = apart if differs and self.separate else place
        narrows = differs and not (self.overlays or self.separate)
        if sums is not None:
            blocks = -(-self.classes // codegen.BIAS_COLUMNS)
            add_bias = self.kernel("bias", self.input.dtype, self.input.dtype, blocks, (self.classes, pitch))
        order = list(enumerate(self.spans))
        with device.untracked():
            for i, (first, rows) in order if kept is None or reads_kept else reversed(order):
                part = self.padded_inputs(device, parts[i])
                if rows != seen:
                    # A view costs the host as much time as a launch. Every chunk but the last has the same size.
                    seen, logits = rows, device.corner(workspace, rows, columns)
                    of_logits = logits if narrowed is workspace else device.corner(narrowed, rows, columns)
                    turned = None if total is None else device.transposed(device.corner(narrowed, rows, height))
                    of_part = None if moved is None else device.rows(moved, 0, rows)
                if reads_kept and i == 0:
                    launch(i, first, device.address(kept), of_place)
                else:
                    device.matmul(part, transposed, logits, bias)
                    launch(i, first, place, of_place)
                if narrows:
                    count = rows * self.pitch
                    self.kernel("narrow", self.logits, self.input.dtype, self.grid(count))(stream, place, apart, count)
                if of_parts is not None:
                    self.clear(device, of_logits)
                    device.matmul(of_logits, weight, of_parts[i] if of_part is None else of_part)
                    if of_part is not None:
                        device.assign(of_parts[i], device.corner(of_part, rows, self.depth))
                if total is not None:
                    device.matmul(turned, parts[i] if self.adds else part, total, total if i or onto else None)
                if sums is not None:
                    add_bias(stream, device.address(of_logits), device.address(sums), device.address(of_bias), rows,
                             int(i == 0), int(i == len(order) - 1))  # fmt: skip
        finish()

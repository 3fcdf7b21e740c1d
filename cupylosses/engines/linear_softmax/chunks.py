"""The chunk loop of a linear layer whose logits never exist as a whole: plans of several launches with matrix products
between them.

    Z = X W^T + b      a row kernel reads Z, or writes its gradient G      dX = G W      dW += G^T X      db += sum_n G

cuBLAS takes several times as long for products of 16 bits whose sizes are no multiples of eight:

- Features, as no row of X or W is aligned then. Large layers read copies of X and W with zeros behind their features,
  and gradients are copied from such rows (`pads_features`).
- Classes, though rows of Z are padded: it goes by the size. The gradient of W is written with rows for classes behind
  the last one, from whatever G has there, and handed out without them. Large layers also read a copy of W with zeros
  behind its rows, and dX zeros behind those of G (`pads_classes`).

A :class:`ChunkedPlan` chooses the chunks, owns their workspace and multiplies; what the row kernel is, its subclasses
say.
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

#: Bytes of a chunk of logits, at least, where nothing else is asked for; a chunk of the weight's size is taken if that
#: is more, since backward needs as much for the weight's gradient anyway.
LEAST_MEMORY = 256 << 20
#: Chunks whose products are added up in the dtype of the weight: with more of them the rounding of each is a tenth of
#: the error that the rounding of logits makes.
MAX_ROUNDED = 4
#: Rows of a chunk are a multiple of this: it fills the tiles of matrix products on 132 multiprocessors.
ROWS = 1024
#: Rows of a chunk that is kept for backward are a multiple of this: a tile of matrix products.
KEPT_ROWS = 128
#: Sizes of products of 16 bits are padded to a multiple of this where products are large enough to gain more than
#: copies take.
PADDED = 8
#: Of features: multiplications of a product, at least, of features that are multiples of four, which lose less, and of
#: others; and rows and classes, in the harmonic mean.
LEAST_BY_FOUR, LEAST_PADDED, LEAST_MEAN = 2 * 10**9, 1 << 29, 768
#: Of odd numbers of classes: rows, at least, and elements of the inputs or multiplications of a product; and how many
#: times as many of even numbers, which lose less.
LEAST_ROWS, LEAST_INPUTS, LEAST_PRODUCT = 8, 1 << 22, 1 << 26
MORE_ROWS, MORE_WORK = 32, 4
#: Rows of the gradient of a weight whose features are no multiple of `PADDED`, and the range of a layer's rows for
#: which cuBLAS takes up to four times as long if there are fewer.
WEIGHT_ROWS, SLOW_ROWS = 32, (1536, 1 << 14)
#: A row of logits begins at a multiple of so many bytes, whatever the number of classes, so that matrix products and
#: vectors of the row kernels are aligned.
PITCH_BYTES = 64

#: Launches the row kernel of a chunk: its number, first row, number of rows, and the addresses of its logits and of
#: their gradient.
Launch = Callable[[int, int, int, int, int], None]


def chunk_memory(static: Any, weight: int) -> int:
    """Bytes that a chunk of logits may take beside a weight of so many bytes."""
    return int(static.max_memory or max(LEAST_MEMORY, weight))


def most_rows(static: Any, row: int, weight: int) -> int:
    """Rows that a chunk may have, at ``row`` bytes of logits each, beside a weight of so many bytes."""
    return max(1, chunk_memory(static, weight) // row)


def pads_features(rows: int, features: int, classes: int, dtype: str) -> bool:
    """True of a layer whose products read copies of its factors with more features."""
    if ITEMSIZE[dtype] != 2 or features % PADDED == 0:
        return False
    least = LEAST_PADDED if features % 4 else LEAST_BY_FOUR
    return rows * features * classes >= least and 2 * rows * classes >= LEAST_MEAN * (rows + classes)


def pads_classes(rows: int, features: int, classes: int, dtype: str) -> bool:
    """True of a layer whose products read a copy of its weight with more classes."""
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
    """A chunk of logits, over which their gradient is written in the same dtype."""

    in_place = True

    @property
    def gradient(self) -> TensorSpec:
        """The gradient's place."""
        return TensorSpec(self.dtype, self.shape, self.strides)


class ChunkedPlan(CompositePlan):
    """A plan whose logits exist in chunks of rows. ``at`` is where each array of a call is, by name."""

    #: True if gradients of 16 bits are written over float32 logits, and if they are written to memory of their own;
    #: otherwise a kernel copies them.
    overlays = False
    separate = False
    #: Chunks of logits that exist at the same time.
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
        #: Elements from a row of logits to the next one.
        step = PITCH_BYTES // ITEMSIZE[self.logits]
        self.pitch = -(-self.classes // step) * step
        sizes = self.rows, self.depth, self.classes, self.input.dtype
        self.pads = pads_features(*sizes)
        #: Features of products: those of the layer, or more.
        self.features = _padded(self.depth) if self.pads else self.depth
        #: Classes of the products for logits and for the gradient of the inputs, and of that for the gradient of the
        #: weight, which costs no copies: those of the layer, or more.
        self.logit_columns = _padded(self.classes) if pads_classes(*sizes) else self.classes
        self.weight_rows = self.logit_columns
        #: True of a gradient of the weight whose features are neighbours; otherwise its classes are.
        self.by_rows = self.weight.gradient.strides[-1] == 1
        if self.by_rows and ITEMSIZE[self.input.dtype] == 2:
            if self.features % PADDED == 0:
                self.weight_rows = _padded(self.classes)
            elif SLOW_ROWS[0] <= self.rows < SLOW_ROWS[1]:
                self.weight_rows = max(self.classes, min(self.pitch, WEIGHT_ROWS))
        #: True if backward adds the gradient of the weight to a `main_grad`.
        self.adds = "main_grad" in at
        self.updated = int(self.adds)
        self._small: dict[tuple[Any, ...], compiler.Launcher] = {}
        super().__init__(engine, call, tensors, promoted, machine)

    def divide(self) -> None:
        """Chooses the chunks. Precondition: there are rows, classes and features."""
        self.chunk_rows = self._rows_of_chunk()
        count = -(-self.rows // self.chunk_rows)
        rounded = self.static.accumulate_dtype or (self.weight.dtype if count <= MAX_ROUNDED else "float32")
        #: The dtype in which chunks add up the gradient of the weight.
        self.accumulated = self.weight.dtype if count == 1 or self.compute == "float64" else rounded
        if self.adds:
            self.accumulated = self.static.accumulate_dtype or self.tensors[self.at["main_grad"]].dtype

    def _rows_of_chunk(self) -> int:
        """Rows of a chunk: all, if they fit; otherwise a multiple of `ROWS` as far as memory allows."""
        of_weight = self.classes * self.depth * ITEMSIZE[self.weight.dtype]
        most = most_rows(self.static, self.chunk_buffers * self.pitch * ITEMSIZE[self.logits], of_weight)
        if self.rows <= most:
            return self.rows
        count = -(-self.rows // most)
        if self.consumes_residual:
            # The chunk that is kept is as large as it may be.
            whole = most // KEPT_ROWS * KEPT_ROWS or most
            if -(-self.rows // whole) == count:
                return whole
        # Equal chunks, none of which is a small rest.
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
        """A kernel that lies between matrix products (`.codegen.ChunkKernel`)."""
        key = kind, dtype, result, blocks, fixed
        found = self._small.get(key)
        if found is None:
            kernel = ChunkKernel(self.loss, kind, dtype, result)
            threads = codegen.THREADS.get(kind, 32)
            found = self._small[key] = self.machine.launcher(kernel, blocks, threads, fixed)
        return found

    def grid(self, count: int) -> int:
        """Blocks for so many elements: no more than run at once."""
        return max(1, min(-(-count // (4 * codegen.THREADS["rescale"])), 8 * self.machine.processors))

    def allocation(self, slot: int) -> tuple[Any, ...]:
        found = super().allocation(slot)
        return ((self.weight_rows, self.depth), *found[1:]) if slot == 1 and self._extends else found

    @property
    def _extends(self) -> bool:
        """True if the gradient of the weight is written with more classes than it has."""
        return self.by_rows and self.weight_rows > self.classes

    def buffers_onto(self, device: Device, arrays: Sequence[Any], wanted: Wanted) -> list[Any]:
        """New arrays for the wanted gradients, but `main_grad`, if there is one, for that of the weight."""
        if not (self.adds and wanted[1]):
            return gradient_buffers(self, device, wanted)[0]
        gradients, _ = gradient_buffers(self, device, (wanted[0], False, *wanted[2:]))
        gradients[1] = arrays[self.at["main_grad"]]
        return gradients

    def handed_out(self, device: Device, gradients: Sequence[Any]) -> list[Any]:
        """The gradients that autograd gets: that of the weight without the classes that it has not, and not if it is
        added to `main_grad`.
        """
        found = list(gradients)
        if self.adds:
            found[1] = None
        elif found[1] is not None and self._extends:
            found[1] = device.rows(found[1], 0, self.classes)
        return found

    def padded_weight(self, device: Device, weight: Any) -> Any:
        """The weight, or a tangent of it, as products read it."""
        if self.pads or self.logit_columns > self.classes:
            return device.padded(weight, self.logit_columns, self.features)
        return weight

    def padded_bias(self, device: Device, bias: Any) -> Any:
        """The bias, or a tangent of it, as products add it; None stays None."""
        if bias is None or self.logit_columns == self.classes:
            return bias
        return device.padded(device.matrix(bias, 1, self.classes), 1, self.logit_columns)

    def clear(self, device: Device, of_logits: Any) -> None:
        """Sets gradients of logits that are padded to 0. Logits of inputs that are not finite are NaN there, too, even
        of rows that do not count.
        """
        if self.logit_columns > self.classes:
            device.clear_columns(of_logits, self.classes)

    def padded_inputs(self, device: Device, part: Any) -> Any:
        """Rows of the inputs, or of a tangent of them, as products read them."""
        return device.padded(part, part.shape[0], self.features) if self.pads else part

    def weight_sums(self, device: Device, of_weight: Any) -> tuple[Any, Callable[[], None]]:
        """The matrix to which products add up the gradient of the weight, and what turns it into that gradient. It is
        the gradient itself unless it is larger or wider, which a `main_grad` never is.
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
                own = device.corner(rounded, self.classes, self.depth)
                device.assign(device.rows(of_weight, 0, self.classes), own)

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
        """All chunks: their logits, ``launch``, and the products for ``gradients``, of which there is one per array or
        None; empty if the row kernel writes no gradient. That of the weight is added ``onto`` what is there.

        The logits of the first chunk are left in ``kept``, from which gradients are written. They are the last that
        forward computes, so that the others may take this memory before, and the first that backward reads.
        """
        at, biased = self.at, "linear_bias" in self.at
        inputs = device.matrix(arrays[0], self.rows, self.depth)
        weight, columns = self.padded_weight(device, arrays[1]), self.logit_columns
        bias = arrays[at["linear_bias"]] if biased else None
        if bias is not None and self.logits != self.input.dtype:
            bias = device.converted(bias, self.logits)
        bias = self.padded_bias(device, bias)
        of_input, of_weight = gradients[:2] if gradients else (None, None)
        of_bias = gradients[at["linear_bias"]] if gradients and biased else None
        if of_input is not None:
            of_input = device.matrix(of_input, self.rows, self.depth)
        total, finish = self.weight_sums(device, of_weight)
        height = self.classes if onto else self.weight_rows
        moved = None
        if self.pads and of_input is not None:
            moved = device.empty((self.chunk_rows, self.features), (self.features, 1), self.input.dtype)
        sums = device.empty((self.classes,), (1,), "float64") if of_bias is not None else None
        found = kept is not None and bool(gradients)
        workspace = kept
        if kept is None or (found and not (self.consumes_residual and not device.captures())):
            workspace = device.empty((self.chunk_rows, self.pitch), (self.pitch, 1), self.logits)
        narrowed, pitch = workspace, self.pitch
        differs = bool(gradients) and self.logits != self.input.dtype
        if differs and self.overlays:
            narrowed, pitch = device.viewed(workspace, self.input.dtype), 2 * self.pitch
        elif differs:
            narrowed = device.empty((self.chunk_rows, self.pitch), (self.pitch, 1), self.input.dtype)
        transposed, stream, seen = device.transposed(weight), device.stream(), 0
        place, apart = device.address(workspace), device.address(narrowed)
        order = list(enumerate(self.spans))
        for i, (first, rows) in order if kept is None or found else reversed(order):
            unpadded = device.rows(inputs, first, rows)
            part = self.padded_inputs(device, unpadded)
            if rows != seen:
                # Views take the host as long as launches; all chunks but the last are alike.
                seen, logits = rows, device.corner(workspace, rows, columns)
                of_logits = logits if narrowed is workspace else device.corner(narrowed, rows, columns)
                turned = device.transposed(device.corner(narrowed, rows, height))
            ready = found and i == 0
            if not ready:
                device.matmul(part, transposed, logits, bias)
            read = device.address(kept) if ready else place
            launch(i, first, rows, read, apart if differs and self.separate else place)
            if differs and not self.overlays and not self.separate:
                count = rows * self.pitch
                self.kernel("narrow", self.logits, self.input.dtype, self.grid(count))(stream, place, apart, count)
            if of_input is not None:
                self.clear(device, of_logits)
            if moved is not None:
                device.matmul(of_logits, weight, device.rows(moved, 0, rows))
                device.assign(device.rows(of_input, first, rows), device.corner(moved, rows, self.depth))
            elif of_input is not None:
                device.matmul(of_logits, weight, device.rows(of_input, first, rows))
            if total is not None:
                device.matmul(turned, unpadded if self.adds else part, total, total if i or onto else None)
            if sums is not None:
                blocks = -(-self.classes // codegen.BIAS_COLUMNS)
                add = self.kernel("bias", self.input.dtype, self.input.dtype, blocks, (self.classes, pitch))
                add(stream, device.address(of_logits), device.address(sums), device.address(of_bias), rows, int(i == 0),
                    int(i == len(self.spans) - 1))  # fmt: skip
        finish()

"""Second derivatives of linear softmax losses, in chunks of rows.

For tangents X', W', b' of the layer and one grad_output g per row:

    Z = X W^T + b      Z' = X' W^T + X W'^T + b'      G = g dL/dZ      H = the derivative of G along Z'

    along = sum over classes of Z' dL/dZ      d/dX = H W + G W'      d/dW = H^T X + G^T X'      d/db = sum_n H

A row kernel of the softmax loss reads Z and Z' and writes H. If a gradient needs G, a second row kernel writes G over
Z. H does not overwrite Z', because every thread of a row reads the tangent of the label. A chunk takes two or three
matrix products for Z and Z', and one or two for each gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cupylosses.call import Call
from cupylosses.engines.base import Engine, Machine, TensorSpec, Wanted, contiguous
from cupylosses.engines.composite import Inputs
from cupylosses.engines.device import Device
from cupylosses.engines.execute import gradient_buffers
from cupylosses.engines.linear_softmax.chunks import LogitsSpec
from cupylosses.engines.linear_softmax.codegen import BIAS_COLUMNS
from cupylosses.engines.linear_softmax.plan import LinearPlan
from cupylosses.engines.softmax import SOFTMAX
from cupylosses.engines.softmax.plan import SoftmaxPlan
from cupylosses.interop import ITEMSIZE


class TangentSpec(LogitsSpec):
    """A chunk of logits whose gradient's derivative is written to another buffer of the same layout."""

    in_place = False


class LinearHvpPlan(LinearPlan):
    """Plan of a derivative along tangents.

    It covers values per row, class indices, and logits in the dtype of the operands. The reference formula computes
    all other cases.
    """

    chunk_buffers = 3

    def __init__(
        self, engine: Engine, call: Call, tensors: tuple[TensorSpec, ...], promoted: str, machine: Machine
    ) -> None:
        super().__init__(engine, call, tensors, promoted, machine)
        static = self.static
        positions = iter(range(len(tensors) - sum(static.has_tangent), len(tensors)))
        #: Positions of the tangents, by the positions of their arrays.
        self._tangents = {i: next(positions) for i, moves in enumerate(static.has_tangent) if moves}
        layer = {0, 1, self.at.get("linear_bias")}
        self.empty = not (
            self.rows and self.classes and self.depth and self.weight.ndim == 2
            and self.indices and not self.scalar and not self.asks and self.logits == self.input.dtype
            and {*self._tangents} <= layer and {0, 1} & {*self._tangents}
            and {tensors[i].dtype for i in self._tangents.values()} == {self.input.dtype}
        )  # fmt: skip
        self._second: list[SoftmaxPlan] = []
        if not self.empty:
            self.divide()

    def _row_plans(self) -> list[SoftmaxPlan]:
        """Returns the plan of each chunk's row kernel."""
        if not self._second:
            self._second = [self._along(first, rows) for first, rows in self.spans]
        return self._second

    def _along(self, first: int, rows: int) -> SoftmaxPlan:
        static, at = self.static, self.at
        logits = TangentSpec(self.logits, (rows, self.classes), (self.pitch, 1))
        arrays = [contiguous(self.target.dtype, (rows,))]
        arrays += [self.tensors[at["weight"]]] if static.weighted else []
        arrays += [contiguous("bool", (rows,))] if static.masked else []
        settings = static.softmax._replace(
            reduction="none", out_dtype=self._per_row, class_dim=1, inplace=False, has_tangent=(True,)
        )
        tensors = (logits, *arrays, logits)
        site = (self.rows_shape, first)
        return SoftmaxPlan(SOFTMAX, Call(self.loss.inner, (), settings), tensors, self.promoted, self.machine, site)

    @property
    def _per_row(self) -> str:
        """Dtype of the values and grad_outputs of row kernels."""
        return self.result if self.token_weights is None else self.compute

    def run_hvp(self, inputs: Inputs, wanted: Wanted, grad_output: int) -> tuple[Any, list[Any]]:
        """Returns the derivative of the values along the tangents, and its wanted gradients.

        They are the gradients of the sum of this derivative weighted by ``grad_output``.
        """
        device, arrays, scalars, _ = inputs
        stream = device.stream()
        along = losses = device.empty(self.shape, self.strides, self.result)
        weights, kept = self.token_weights, None
        if weights is not None:
            losses = device.empty((self.rows,), (1,), self.compute)
            kept = weights.weigh(device, arrays, grad_output, 1, (self.result, self.compute))
            grad_output = device.address(kept)
        gradients, _ = gradient_buffers(self, device, (*wanted, *[False] * (len(self.tensors) - len(wanted))))
        first_order = bool((wanted[0] and 1 in self._tangents) or (wanted[1] and 0 in self._tangents))
        read = [(device.address(arrays[i]), step) for i, step in self.read_per_row]
        size, values = ITEMSIZE[self._per_row], device.address(losses)
        writes, number = (True, False), (1.0, 1.0)
        base = self.chunks("none", self._per_row) if first_order else []

        def launch(i: int, first: int, place: int, tangent: int, change: int) -> None:
            rows = [x + step * first for x, step in read]
            upstream = grad_output + size * first
            second = self._row_plans()[i].launcher("hvp", writes, False)
            second(stream, place, *rows, tangent, change, values + size * first, upstream, *scalars, *number)
            if first_order:
                gradient = base[i].plan.launcher("gradient", writes, False)
                gradient(stream, place, *rows, place, upstream, *scalars, *number)

        self._multiply(device, arrays, gradients, first_order, launch)
        if weights is not None:
            weights.weigh(device, arrays, values, 1, (self.compute, self.result), to=along)
        return along, self.handed_out(device, gradients[: len(wanted)])

    def _multiply(
        self, device: Device, arrays: Sequence[Any], gradients: Sequence[Any], first_order: bool, launch: Any
    ) -> None:
        """Runs all chunks: computes logits and their tangents, calls ``launch``, and multiplies for ``gradients``."""
        arrays = [*map(device.detached, arrays)]
        moving = {i: arrays[j] for i, j in self._tangents.items()}
        bias_at, stream = self.at.get("linear_bias", -1), device.stream()
        inputs = device.matrix(arrays[0], self.rows, self.depth)
        along_inputs = device.matrix(moving[0], self.rows, self.depth) if 0 in moving else None
        weight = self.padded_weight(device, arrays[1])
        along_weight = self.padded_weight(device, moving[1]) if 1 in moving else None
        bias = self.padded_bias(device, arrays[bias_at] if bias_at >= 0 else None)
        along_bias = self.padded_bias(device, moving.get(bias_at))
        of_input, of_weight = gradients[:2]
        of_bias = gradients[bias_at] if bias_at >= 0 else None
        if of_input is not None:
            of_input = device.matrix(of_input, self.rows, self.depth)
        (total, finish), moved = self.weight_sums(device, of_weight), None
        if self.pads and of_input is not None:
            moved = device.empty((self.chunk_rows, self.features), (self.features, 1), self.input.dtype)
        sums = device.empty((self.classes,), (1,), "float64") if of_bias is not None else None
        spaces = [device.empty((self.chunk_rows, self.pitch), (self.pitch, 1), self.logits) for _ in range(3)]
        for i, (first, rows) in enumerate(self.spans):
            part = self.padded_inputs(device, device.rows(inputs, first, rows))
            z, along, change = (device.corner(x, rows, self.logit_columns) for x in spaces)
            device.matmul(part, device.transposed(weight), z, bias)
            added = along_bias
            if along_inputs is not None:
                along_part = self.padded_inputs(device, device.rows(along_inputs, first, rows))
                device.matmul(along_part, device.transposed(weight), along, added)
                added = along
            if along_weight is not None:
                device.matmul(part, device.transposed(along_weight), along, added)
            launch(i, first, *map(device.address, spaces))
            if of_input is not None:
                to = of_part = device.rows(of_input, first, rows)
                if moved is not None:
                    to = device.rows(moved, 0, rows)
                self.clear(device, change)
                device.matmul(change, weight, to)
                if along_weight is not None:
                    self.clear(device, z)
                    device.matmul(z, along_weight, to, to)
                if moved is not None:
                    device.assign(of_part, device.corner(to, rows, self.depth))
            if total is not None:
                of_change, of_z = (device.transposed(device.corner(spaces[j], rows, self.weight_rows)) for j in (2, 0))
                device.matmul(of_change, part, total, total if i else None)
                if along_inputs is not None:
                    device.matmul(of_z, along_part, total, total)
            if sums is not None:
                blocks = -(-self.classes // BIAS_COLUMNS)
                add = self.kernel("bias", self.input.dtype, self.input.dtype, blocks, (self.classes, self.pitch))
                places = device.address(change), device.address(sums), device.address(of_bias)
                add(stream, *places, rows, int(i == 0), int(i == len(self.spans) - 1))
        finish()

    def run_value(self, inputs: Inputs, auxiliary: Sequence[int]) -> Any:
        # The row kernel has no variant without H. H is discarded, so the grad_outputs may be uninitialized.
        device = inputs.device
        unused = device.empty((self.rows,), (1,), self.result)
        return self.run_hvp(inputs, (False, False, False), device.address(unused))[0]

    def run_gradients(self, *_: Any) -> list[Any]:
        raise NotImplementedError("gradients of a derivative come with it")

"""Plans of log-probabilities of a linear layer's output, computed in chunks of rows.

Each chunk takes a matrix product for its logits and a row kernel. Backward recomputes the logits of a chunk, and
overwrites them with their gradient, which follows from the coefficients that forward stored for each row.

    stage      products per chunk      row kernel writes
    value      1                       log-probabilities, entropies, and four coefficients per row for backward
    gradients  2 or 3                  the gradient of the logits

Besides the results and these coefficients, a call allocates only the workspace of one chunk and the accumulator of the
weight's gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from cupylosses.call import Call
from cupylosses.engines.base import Engine, Machine, TensorSpec, Wanted, contiguous
from cupylosses.engines.composite import Inputs
from cupylosses.engines.linear_softmax.chunks import ChunkedPlan, LogitsSpec
from cupylosses.engines.log_probs.call import LinearStatic, linear_positions, value_shape
from cupylosses.engines.log_probs.plan import LogProbPlan
from cupylosses.interop import ITEMSIZE


class SeparateSpec(TensorSpec):
    """A chunk of float32 logits whose 16-bit gradient is stored in a separate buffer of the same strides.

    Written over the logits, the gradient would overwrite some that another thread has yet to read.
    """

    #: Dtype of the gradient.
    narrow = ""

    @property
    def gradient(self) -> TensorSpec:
        return TensorSpec(self.narrow, self.shape, self.strides)


class HalfGradients(SeparateSpec):
    """Logits with a float16 gradient in a separate buffer."""

    narrow = "float16"


class Bfloat16Gradients(SeparateSpec):
    """Logits with a bfloat16 gradient in a separate buffer."""

    narrow = "bfloat16"


_SEPARATE = {"float16": HalfGradients, "bfloat16": Bfloat16Gradients}


class LinearLogProbPlan(ChunkedPlan):
    """Plan of log-probabilities of a linear layer's output."""

    static: LinearStatic
    separate = True

    def __init__(
        self, engine: Engine, call: Call, tensors: tuple[TensorSpec, ...], promoted: str, machine: Machine
    ) -> None:
        static: LinearStatic = call.static
        self.index, rows = tensors[2], tensors[0].shape[:-1]
        compute = "float64" if promoted == "float64" else "float32"
        self.residual = contiguous(compute, (*rows, 4))
        self.auxiliary = () if any(static.has_tangent) else (self.residual,)
        super().__init__(engine, call, tensors, promoted, machine, linear_positions(static))
        self.result = static.out_dtype or compute
        #: Number of labels of a row, and number of its values (`columns`).
        self.labels = self.index.shape[-1] if static.several else 1
        self.columns = self.labels + static.entropy
        # The reference formula computes derivatives along tangents.
        self.empty = not (self.rows and self.classes and self.depth and self.columns) or any(static.has_tangent)
        self.scalar = False
        spec = contiguous(self.result, value_shape(static, self.rows_shape, self.index.shape))
        self.shape, self.strides = spec.shape, spec.strides
        self.differentiable = tuple([i in (0, 1, self.at.get("linear_bias")) for i in range(len(tensors))])
        self.speculative = self.nothing
        self.partials = self.records = self.slot = 0
        self.takes_status = True
        self.reports = static.check != "off"
        self.waits = static.check == "sync"
        if not self.empty:
            self.divide()

    def upstream_strides(self) -> tuple[int, ...] | None:
        return self.strides

    @cached_property
    def row_plans(self) -> list[LogProbPlan]:
        """Plan of the rows of each chunk."""
        return [self._rows(first, rows) for first, rows in self.spans]

    def _rows(self, first: int, rows: int) -> LogProbPlan:
        static = self.static
        kind = LogitsSpec if self.logits == self.input.dtype else _SEPARATE[self.input.dtype]
        logits = kind(self.logits, (rows, self.classes), (self.pitch, 1))
        shape = (rows, self.labels) if static.several else (rows,)
        arrays = [contiguous(self.index.dtype, shape), *[contiguous("bool", (rows,))] * static.masked]
        call = Call(self.loss, (), static.of_rows._replace(has_tangent=()))
        # Bad labels are reported by their position in the whole call.
        site = (self.index.shape, first * self.labels)
        return LogProbPlan(self.engine, call, (logits, *arrays), self.promoted, self.machine, site)

    # Runs

    def run_value(self, inputs: Inputs, auxiliary: Sequence[Any]) -> Any:
        device = inputs.device
        value = device.empty(self.shape, self.strides, self.result)
        left = next(iter(auxiliary), 0)
        place, residual = device.address(value), left if type(left) is int else device.address(left)
        self._run(inputs, "unreduced", (), lambda first: (residual and residual + self._left * first,
                                                                           place + self._stored * first))  # fmt: skip
        return value

    def run_from_residual(
        self,
        inputs: Inputs,
        wanted: Wanted,
        residual: Any,
        grad_output: int,
        per_row: bool,
    ) -> list[Any]:
        device, arrays, *_ = inputs
        gradients = self.buffers_onto(device, arrays, wanted)
        step, left = self._stored if per_row else 0, device.address(residual)
        self._run(
            inputs, "from_residual", gradients,
            lambda first: (left + self._left * first, grad_output + step * first, int(per_row)),
        )  # fmt: skip
        return self.handed_out(device, gradients)

    @property
    def _left(self) -> int:
        """Number of bytes that forward stores per row for backward."""
        return 4 * ITEMSIZE[self.compute]

    @property
    def _stored(self) -> int:
        """Number of bytes of the values of a row."""
        return self.columns * ITEMSIZE[self.result]

    def _run(self, inputs: Inputs, stage: str, gradients: Sequence[Any], arguments: Any) -> None:
        """Runs all chunks with the row kernel of ``stage``, which takes ``arguments(first)`` for the first row."""
        device, arrays, scalars, _ = inputs
        labels, step = device.address(arrays[2]), self.labels * ITEMSIZE[self.index.dtype]
        masks = [device.address(arrays[self.at["mask"]])] if self.static.masked else []
        stream = device.stream()

        def launch(i: int, first: int, logits: int, of_logits: int) -> None:
            written = [of_logits] if gradients else []
            read = logits, labels + step * first, *[x + first for x in masks]
            self.row_plans[i].launcher(stage, self.nothing, False)(
                stream, *read, *written, *arguments(first), *scalars, 1.0, 1.0
            )

        self.sweep(device, arrays, gradients, launch, self.adds)

    def run_value_and_gradients(self, *_: Any) -> tuple[Any, Any]:
        raise NotImplementedError("a value per label is not reduced")

    def run_gradients(self, *_: Any) -> list[Any]:
        raise NotImplementedError("gradients are written from the residual of forward")

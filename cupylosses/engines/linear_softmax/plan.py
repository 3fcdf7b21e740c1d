"""Plans of linear softmax losses, computed in chunks of rows.

Each chunk takes a matrix product for its logits Z, a row kernel that overwrites them with their gradient G, and a
matrix product for each wanted gradient:

    Z = X W^T + b      G = d loss / d Z, over Z      dX = G W      dW += G^T X      db += sum_n G

    stage                products per chunk      when
    value                1                       forward without gradients, or with one value per row
    value and gradients  1 to 3                  forward of a reduced loss, or of one value per row if a sum of the
                                                 values is expected; speculative, for the expected grad_output
    from residual        0 to 2                  backward, if forward kept the logits
    rescale              0                       backward, if the true grad_output is not the expected one
    gradients            1 to 3                  backward with one grad_output per row, and every repeated backward

With weights of rows, the row kernels compute one value per row. Forward then launches two row kernels per chunk: one
for the values, and one for the gradients, which reads one grad_output per row.

Besides the results, a call allocates only the workspace of one chunk and the accumulator of the weight's gradient. The
order of additions depends on the sizes alone.

In small layers launches take most of the time. If all logits fit in ``KEPT_BYTES``, forward keeps them as its residual.
As for logits that a user computed, the row kernels then read the true ``grad_output``, add the losses and divide the
sum, so that neither the divisor nor the expected ``grad_output`` takes a launch. With many rows the divisor takes a
launch, unless only the value is wanted.

Gradients of a value per row cannot be written in forward for an arbitrary ``grad_output``, and computing the logits
again is one product of four. Forward therefore keeps all logits if they and their gradient fit in the memory of a
chunk. Otherwise it keeps one chunk of them; backward first overwrites this chunk with its gradient, and then computes
the other chunks in the same memory. A sum or a mean of the values has one ``grad_output`` for all rows, which backward
recognizes by its strides. From then on forward writes the gradients speculatively, as for a reduced loss, until the
speculation is wrong once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from math import prod
from typing import Any, ClassVar, NamedTuple

from cupylosses.call import Call
from cupylosses.engines.base import Engine, Machine, Plan, TensorSpec, Wanted, contiguous
from cupylosses.engines.composite import Inputs
from cupylosses.engines.device import EXPECTATIONS, UNDIVIDED, Device, Divisor
from cupylosses.engines.execute import check_arguments, gradient_buffers
from cupylosses.engines.linear_softmax.call import Static, inner_arrays, positions
from cupylosses.engines.linear_softmax.chunks import ChunkedPlan, LogitsSpec, chunk_memory
from cupylosses.engines.linear_softmax.definition import LinearSoftmaxLoss
from cupylosses.engines.linear_softmax.row_weights import RowWeights, WeightSumPlan
from cupylosses.engines.softmax import SOFTMAX
from cupylosses.engines.softmax.call import constant_divisor
from cupylosses.engines.softmax.plan import CountingPlan, SoftmaxPlan
from cupylosses.interop import ITEMSIZE
from cupylosses.jit import compiler

#: Maximum number of bytes of logits that forward keeps for backward if it could write speculative gradients instead.
KEPT_BYTES = 4 << 20
#: Positions in the memory of a call: the grad_output that gradients were written for, then the partial sums of chunks.
_USED, _SHARES = 0, 1
#: Stage of a sweep that writes gradients with the kernel that checks speculative gradients in backward.
CHECK = "check"
#: Stages whose row kernels store a value per row or a sum of them, and auxiliary outputs.
_VALUED = "value", "value_and_gradient", "unreduced"


class Chunk(NamedTuple):
    """Consecutive rows, and the plan of their softmax loss."""

    first: int
    rows: int
    plan: SoftmaxPlan


def _checked(grad_output: int) -> Callable[[int, Chunk], tuple[int, ...]]:
    """Returns the arguments with which `CHECK` writes the gradients of a chunk for one ``grad_output``."""
    return lambda i, chunk: check_arguments(chunk.plan, chunk.plan.speculative, grad_output, 0)


class WideLogitsSpec(LogitsSpec):
    """A chunk of float32 logits whose 16-bit gradient overwrites the first half of each row.

    Only kernels that read the whole row before they write may use it.
    """

    kinds = "subwarp", "block"
    #: Dtype of the gradient.
    narrow: ClassVar[str]

    @property
    def gradient(self) -> TensorSpec:
        rows, step = self.strides
        return TensorSpec(self.narrow, self.shape, (rows * ITEMSIZE[self.dtype] // ITEMSIZE[self.narrow], step))


class HalfOverFloat(WideLogitsSpec):
    """Gradient in float16 over logits in float32."""

    narrow = "float16"


class Bfloat16OverFloat(WideLogitsSpec):
    """Gradient in bfloat16 over logits in float32."""

    narrow = "bfloat16"


_OVERLAYS = {"float16": HalfOverFloat, "bfloat16": Bfloat16OverFloat}


class ScaledGradients:
    """Speculative gradients for an expected grad_output, and the launches that rescale them to the true one."""

    complete: bool
    #: True, because the gradients are final if the expected grad_output is the true one.
    written = True

    def __init__(
        self,
        plan: LinearPlan,
        device: Device,
        arrays: Sequence[Any],
        buffers: Sequence[Any],
        used: Any,
        complete: bool,
    ) -> None:
        stream = device.stream()
        self.device, self.complete, self.strides = device, complete, plan.operand_strides
        self.pointers = [device.address(x) for x in arrays]
        #: The gradients if the weight's is added to `main_grad`: it is not returned, so it must be kept alive here.
        self._buffers = buffers if plan.adds else None
        self._captured = stream != 0 and device.capturing()
        self._used, self._expected = used, device.expectation(plan.slot)
        added = [device.address(arrays[plan.at["main_grad"]])] if plan.adds else []
        self._launches = [
            (plan.rescaler(slot), [device.address(x), *(added if slot == 1 else [])])
            for slot, x in enumerate(buffers)
            if x is not None
        ]

    def run(self, grad_output: int, pointers: Sequence[int]) -> bool:
        """Rescales the gradients to the true ``grad_output``.

        Returns False and launches nothing under capture of a graph that does not contain the forward that wrote them.
        """
        device = self.device
        stream = device.stream()
        if stream != 0 and not self._captured and device.capturing():
            return False
        expected = self._expected
        for launcher, addresses in self._launches:
            launcher(stream, grad_output, device.address(self._used), expected, *addresses)
            expected = 0
        return True

    def release(self) -> None:
        """Does nothing: no state is kept for a later call."""


class LinearPlan(ChunkedPlan):
    """Plan of a linear softmax loss."""

    loss: LinearSoftmaxLoss
    static: Static
    #: False for plans whose divisor comes from another plan: these keep no logits.
    may_keep: ClassVar[bool] = True

    def __init__(
        self, engine: Engine, call: Call, tensors: tuple[TensorSpec, ...], promoted: str, machine: Machine
    ) -> None:
        static: Static = call.static
        self.target, self.indices = tensors[2], static.kind == "indices"
        compute, rows = "float64" if promoted == "float64" else "float32", tensors[0].shape[:-1]
        lse = contiguous(compute, rows) if static.lse else None
        correct = contiguous("uint8", rows) if static.accuracy else None
        self.auxiliary = (lse, correct) if self.indices else (lse,)
        super().__init__(engine, call, tensors, promoted, machine, positions(static))
        self.result = static.out_dtype or promoted
        # The reference formula computes derivatives along tangents and K-dimensional weights.
        self.empty = not (self.rows and self.classes and self.depth) or bool(static.has_tangent) or self.weight.ndim > 2
        self.scalar = static.reduction != "none"
        spec = contiguous(self.result, () if self.scalar else self.rows_shape)
        self.shape, self.strides = spec.shape, spec.strides
        differentiable = [0, 1, *[2] * (not self.indices), self.at.get("linear_bias")]
        self.differentiable = tuple([i in differentiable for i in range(len(tensors))])
        self.speculative = self.differentiable
        known = constant_divisor(static.softmax, self.rows_shape)
        token_weight = self.at.get("token_weight")
        #: Weights of the rows; None without.
        self.token_weights = None if token_weight is None else RowWeights(self, token_weight, self.rows)
        if self.token_weights is not None and static.reduction == "mean" and not static.normalized:
            known = None
        self.divisor, self.counted = (1.0, True) if known is None else (known, False)
        self.partials = self.records = 0
        self.takes_status = self.indices
        self.reports = self.indices and static.check != "off"
        self.waits = self.indices and static.check == "sync"
        key = (self.loss.name, static.kind, self.rows_shape, self.classes, self.input.dtype, self.result, self.scalar)
        self.slot = hash(key) % EXPECTATIONS
        self.takes_one_upstream = not self.scalar
        #: True once backward got one grad_output per row after forward wrote the gradients for a single one.
        self._was_wrong = False
        self._chunks: dict[tuple[str, str], list[Chunk]] = {}
        self._row_launchers: dict[tuple[Any, ...], list[compiler.Launcher]] = {}
        self._rescalers: dict[int, compiler.Launcher] = {}
        # A float16 gradient for a grad_output of 1 may underflow, and rescaling it to 65536 cannot recover it. It is
        # written speculatively only after a backward has shown which grad_output to expect.
        self._expects = self.input.dtype != "float16"
        if not self.empty:
            keeps = self.may_keep and self.token_weights is None and self.logits == self.input.dtype
            weight = self.classes * self.depth * ITEMSIZE[self.weight.dtype]
            memory, logits = chunk_memory(static, weight), self.rows * self.pitch * ITEMSIZE[self.logits]
            fits = 2 * logits <= memory and (logits <= KEPT_BYTES or not self.scalar)
            self.consumes_residual = keeps and not (self.scalar or fits)
            self.divide()
            #: True if 16-bit gradients overwrite float32 logits; otherwise a kernel converts them.
            self.overlays = self.logits != self.input.dtype
            if self.overlays:
                layout = self._inner(0, self.chunk_rows, "sum", "float64").layout
                self.overlays = layout.kind in WideLogitsSpec.kinds
            if keeps and (fits or self.consumes_residual):
                self._keep()

    def _keep(self) -> None:
        self.residual, self.keeps_residual = contiguous(self.logits, (self.chunk_rows, self.pitch)), True
        self.auxiliary = (*self.auxiliary, self.residual)
        self.no_auxiliary = (0,) * len(self.auxiliary)
        rows = self._inner(0, self.rows, self.static.reduction, self.result)
        self.counted, self.self_counting, self.tallies = rows.counted, rows.self_counting, rows.tallies

    # Plans of the chunks

    def chunks(self, reduction: str, result: str) -> list[Chunk]:
        """Returns the chunks, with plans for this reduction and dtype of the value."""
        chunks = self._chunks.get((reduction, result))
        if chunks is None:
            chunks = [Chunk(first, rows, self._inner(first, rows, reduction, result)) for first, rows in self.spans]
            self._chunks[reduction, result] = chunks
        return chunks

    def _inner(self, first: int, rows: int, reduction: str, result: str) -> SoftmaxPlan:
        static, at = self.static, self.at
        kind = _OVERLAYS[self.input.dtype] if self.overlays else LogitsSpec
        logits = kind(self.logits, (rows, self.classes), (self.pitch, 1))
        shape = (rows,) if self.indices else (rows, self.classes)
        arrays = [contiguous(self.target.dtype, shape)]
        arrays += [self.tensors[at["weight"]]] if static.weighted else []
        arrays += [contiguous("bool", (rows,))] if static.masked else []
        settings = static.softmax._replace(
            reduction=reduction, out_dtype=result, class_dim=1, inplace=False, has_tangent=()
        )
        call = Call(self.loss.inner, (), settings)
        # Bad labels are reported by their row in the whole call.
        site = (self.rows_shape, first)
        return SoftmaxPlan(SOFTMAX, call, (logits, *arrays), self.promoted, self.machine, site)

    def denominator(self) -> tuple[Plan, tuple[int, ...], float]:
        """Returns the plan that counts all rows, or sums their weights."""
        return self._denominator

    @cached_property
    def _denominator(self) -> tuple[Plan, tuple[int, ...], float]:
        positions_of_call = tuple(range(len(self.tensors)))
        if self.token_weights is not None:
            return WeightSumPlan(self, self.token_weights), positions_of_call, 1.0
        counting, read, factor = self._inner(0, self.rows, self.static.reduction, self.result).denominator()
        assert isinstance(counting, CountingPlan)
        outer = inner_arrays(self.static, -1, positions_of_call)
        return counting, tuple([outer[i] for i in read]), factor

    def upstream_strides(self) -> tuple[int, ...] | None:
        return self.strides

    def rescaler(self, slot: int) -> compiler.Launcher:
        """Returns the launcher that rescales the gradient of an array, or adds the rescaled gradient to `main_grad`."""
        launcher = self._rescalers.get(slot)
        if launcher is None:
            x = self.tensors[slot]
            kind, dtype, count = "rescale", x.dtype, prod(x.shape)
            if slot == 1 and self.adds:
                misaligned = self.tensors[self.at["main_grad"]].misalignment
                kind, dtype = "add_unaligned" if misaligned else "add", self.accumulated
            launcher = self._rescalers[slot] = self.kernel(kind, dtype, self.result, self.grid(count), (count,))
        return launcher

    # Runs

    def run_value(self, inputs: Inputs, auxiliary: Sequence[int]) -> Any:
        device, arrays, _, divisor = inputs
        value = device.empty(self.shape, self.strides, self.result)
        if self.residual is not None:
            self._run_kept(inputs, value, auxiliary)
            return value
        if self.token_weights is not None:
            losses = device.empty((self.rows,), (1,), self.compute)
            self._sweep(
                inputs, "unreduced", "none", self.compute, self._stored_at(losses, device),
                auxiliary,
            )  # fmt: skip
            self._weigh(device, arrays, losses, divisor, value)
            return value
        if self.scalar:
            memory = self._memory(device)
            shares = device.address(memory) + 8 * _SHARES
            _kept, workspace = self._workspace(device, self._sum_sizes[0])

            def own(i: int, chunk: Chunk) -> tuple[int, ...]:
                return workspace, shares + 8 * i

            self._sweep(inputs, "value", "sum", "float64", own, auxiliary)
            self._finish(device, shares, value)
            return value
        own = self._stored_at(value, device)
        self._sweep(inputs, "unreduced", "none", self.result, own, auxiliary)
        return value

    def _weigh(self, device: Device, arrays: Sequence[Any], losses: Any, divisor: Divisor, value: Any) -> None:
        """Stores the weighted losses of the rows, or their sum, in ``value``."""
        weights, dtypes = self.token_weights, (self.compute, self.result)
        assert weights is not None
        if self.scalar:
            weights.sum(device, arrays, losses, dtypes, divisor, value)
        else:
            weights.weigh(device, arrays, device.address(losses), 1, dtypes, to=value)

    def _run_kept(self, inputs: Inputs, value: Any, auxiliary: Sequence[Any]) -> None:
        device = inputs.device
        *asked, kept = auxiliary or self.no_auxiliary
        stage, stage_arguments = "unreduced", self._stored_at(value, device)
        if self.scalar:
            # Logits that are kept for a reduced loss are one chunk.
            partials = self.chunks(self.static.reduction, self.result)[0].plan.partials
            _kept, workspace = self._workspace(device, partials)
            stage, place = "value", device.address(value)
            stage_arguments = lambda i, chunk: (workspace, place)  # noqa: E731
        self._sweep(
            inputs, stage, self.static.reduction, self.result, stage_arguments, asked,
            kept=None if type(kept) is int else kept,
        )  # fmt: skip

    def run_from_residual(
        self,
        inputs: Inputs,
        wanted: Wanted,
        residual: Any,
        grad_output: int,
        per_row: bool,
    ) -> list[Any]:
        self._learn(per_row, None)
        return self.compute_gradients(inputs, wanted, grad_output, per_row, residual)

    def _learn(self, per_row: bool, speculation: Any) -> None:
        """Decides if the next forward of values per row writes gradients speculatively.

        It does after a backward with one ``grad_output`` for all rows, unless such a speculation was wrong before. If
        forward keeps all logits, there is nothing to gain by it.
        """
        self._was_wrong |= per_row and speculation is not None
        self.expects_sum = not (self.scalar or per_row or self._was_wrong or self._keeps_all)

    @property
    def _keeps_all(self) -> bool:
        """True if forward keeps all logits for backward."""
        return self.residual is not None and self.chunk_rows == self.rows

    def _stored_at(self, losses: Any, device: Device) -> Any:
        """Returns the address argument of a chunk's row kernel: its first row in ``losses``, an array of all rows."""
        first, size = device.address(losses), ITEMSIZE[self.compute if self.token_weights else self.result]
        return lambda i, chunk: (first + size * chunk.first,)

    def run_value_and_gradients(self, inputs: Inputs, wanted: Wanted, auxiliary: Sequence[int]) -> tuple[Any, Any]:
        device, arrays, *_ = inputs
        written = self.writable(wanted)
        if True not in written or (self.scalar and (self.residual is not None or not self._expects)):
            return self.run_value(inputs, auxiliary), None
        value, gradients, memory = self.write_ahead(inputs, written, auxiliary)
        check = ScaledGradients(self, device, arrays, gradients, memory, written == wanted)
        return value, (check, self.handed_out(device, gradients))

    def write_ahead(self, inputs: Inputs, written: Wanted, auxiliary: Sequence[int]) -> tuple[Any, list[Any], Any]:
        """Returns the value, speculative gradients, and the memory that begins with the expected ``grad_output``.

        The gradients are those for this ``grad_output``, one number for all rows.
        """
        device, arrays, _, divisor = inputs
        value = device.empty(self.shape, self.strides, self.result)
        auxiliary = auxiliary[:-1] if self.residual is not None else auxiliary
        ahead = self.adds and written[1]
        gradients, _ = gradient_buffers(self, device, (written[0], written[1] and not ahead, *written[2:]))
        if ahead:
            gradients[1] = device.empty((self.weight_rows, self.depth), (self.depth, 1), self.accumulated)
        memory = self._memory(device)
        used = device.address(memory)
        expected = device.expectation(self.slot)
        self.kernel("snapshot", self.input.dtype, self.result)(device.stream(), expected, used)
        if self.token_weights is not None:
            losses = device.empty((self.rows,), (1,), self.compute)
            dtypes = "float64", self.compute
            upstream = self.token_weights.weigh(device, arrays, used, 0, dtypes, divisor)
            self._sweep(
                inputs, "unreduced", "none", self.compute, self._stored_at(losses, device),
                auxiliary, gradients, then=("gradient", self._stored_at(upstream, device), "none", self.compute),
            )  # fmt: skip
            self._weigh(device, arrays, losses, divisor, value)
            return value, gradients, memory
        if not self.scalar:
            self._sweep(
                inputs, "unreduced", "none", self.result, self._stored_at(value, device),
                auxiliary, gradients, then=(CHECK, _checked(used), "sum", "float64"),
            )  # fmt: skip
            return value, gradients, memory

        shares, (partials, count) = used + 8 * _SHARES, self._sum_sizes
        _kept, workspace = self._workspace(device, partials)
        # All chunks write to the same records, because nothing reads them.
        records = device.empty((count,), (1,), "float64")
        unread = device.address(records)

        def own(i: int, chunk: Chunk) -> tuple[int, ...]:
            return workspace, shares + 8 * i, 0, used, unread

        self._sweep(inputs, "value_and_gradient", "sum", "float64", own, auxiliary, gradients)
        self._finish(device, shares, value)
        return value, gradients, memory

    def run_gradients(
        self,
        inputs: Inputs,
        wanted: Wanted,
        grad_output: int,
        per_row: bool,
        speculation: Any,
    ) -> list[Any]:
        self._learn(per_row, speculation)
        if speculation is not None and not per_row:
            check, gradients = speculation
            if check.complete and check.run(grad_output, check.pointers):
                return gradients
        return self.compute_gradients(inputs, wanted, grad_output, per_row)

    def compute_gradients(
        self,
        inputs: Inputs,
        wanted: Wanted,
        grad_output: int,
        per_row: bool,
        kept: Any = None,
    ) -> list[Any]:
        """Computes the gradients for a ``grad_output``, from logits that forward ``kept`` or from recomputed ones."""
        device, arrays, _, divisor = inputs
        gradients = self.buffers_onto(device, arrays, wanted)
        if self._keeps_all and not per_row:
            self._sweep(
                inputs, CHECK, self.static.reduction, self.result,
                _checked(grad_output), (), gradients, onto=self.adds, kept=kept,
            )  # fmt: skip
            return self.handed_out(device, gradients)
        memory = self._memory(device)
        used = device.address(memory)
        if not per_row:
            expected = device.expectation(self.slot)
            self.kernel("widen", self.input.dtype, self.result)(device.stream(), grad_output, expected, used)
            self._expects = True
        if self.token_weights is not None:
            read = (grad_output, 1, (self.result, self.compute)) if per_row else (used, 0, ("float64", self.compute))
            upstream = self.token_weights.weigh(device, arrays, *read, UNDIVIDED if per_row else divisor)
            self._sweep(
                inputs, "gradient", "none", self.compute, self._stored_at(upstream, device),
                (), gradients, onto=self.adds,
            )  # fmt: skip
            return self.handed_out(device, gradients)
        if per_row:
            size = ITEMSIZE[self.result]
            self._sweep(
                inputs, "gradient", "none", self.result,
                lambda i, chunk: (grad_output + size * chunk.first,), (), gradients, onto=self.adds, kept=kept,
            )  # fmt: skip
            return self.handed_out(device, gradients)
        self._sweep(
            inputs, CHECK, "sum", "float64",
            _checked(used), (), gradients, onto=self.adds, kept=kept,
        )  # fmt: skip
        return self.handed_out(device, gradients)

    def _memory(self, device: Device) -> Any:
        """Allocates the doubles of a call: one for the expected ``grad_output``, then the partial sums of chunks."""
        return device.empty((_SHARES + len(self.spans),), (1,), "float64")

    def _workspace(self, device: Device, partials: int) -> tuple[Any, int]:
        """Returns a workspace for the row kernels of all chunks, which run one after another, and its address.

        ``partials`` is the number of partial sums of the largest chunk. The workspace must be kept until the last
        launch.
        """
        stream = device.stream()
        return device.workspace(stream, partials, stream != 0 and device.capturing())

    @cached_property
    def _sum_sizes(self) -> tuple[int, int]:
        """Numbers of partial sums and of records of the row kernel of the chunk that has most, for sums in float64."""
        plans = [x.plan for x in self.chunks("sum", "float64")]
        return max([x.partials for x in plans]), max([x.records for x in plans])

    def _finish(self, device: Device, shares: int, value: Any) -> None:
        launcher = self.kernel("finish", self.input.dtype, self.result, fixed=(len(self.chunks("sum", "float64")),))
        launcher(device.stream(), shares, device.address(value))

    def _sweep(
        self,
        inputs: Inputs,
        stage: str,
        reduction: str,
        result: str,
        stage_arguments: Any,
        auxiliary: Sequence[int],
        gradients: Sequence[Any] = (),
        then: tuple[str, Any, str, str] | None = None,
        onto: bool = False,
        kept: Any = None,
    ) -> None:
        """Runs all chunks with the row kernel of ``stage``, and multiplies for ``gradients``.

        ``stage_arguments`` returns the stage's own arguments for a chunk. With ``then``, a second row kernel writes the
        gradients of the logits instead: its stage, arguments, reduction, and dtype of the value.
        """
        device, arrays, scalars, divisor = inputs
        of_target, counted = (gradients[2] if gradients else None), divisor.counted and reduction != "none"
        wanted = bool(gradients), of_target is not None
        scale = divisor.arguments if reduction != "none" else (1.0, 1.0)
        # Addresses of the arrays that row kernels read, and of those that they write besides the logits, each with the
        # bytes of a row.
        read = [(device.address(arrays[i]), step) for i, step in self.read_per_row]
        of_rows = [] if of_target is None else [(device.address(of_target), ITEMSIZE[self.target.dtype] * self.classes)]
        stages = [(stage, stage_arguments, reduction, result)]
        if then is not None:
            stages.append(then)
        row_kernels: list[tuple[Any, ...]] = []
        for name, arguments, summed, dtype in stages:
            writes = wanted if len(row_kernels) == len(stages) - 1 else (False, False)
            written = of_rows if writes[0] else []
            if name in _VALUED:
                written = written + self._stored_per_row(auxiliary)
            launchers = self._launchers_of_rows(name, summed, dtype, writes, counted)
            row_kernels.append((launchers, self.chunks(summed, dtype), arguments, writes[0], written))
        stream = device.stream()

        def launch(i: int, first: int, place: int, of_logits: int) -> None:
            read_at = [x + step * first for x, step in read]
            for launchers, chunks, arguments, writes, written in row_kernels:
                written_at = [*((of_logits,) if writes else ()), *[x + step * first for x, step in written]]
                launchers[i](stream, place, *read_at, *written_at, *arguments(i, chunks[i]), *scalars, *scale)

        self.sweep(device, arrays, gradients, launch, onto, kept)

    @cached_property
    def read_per_row(self) -> list[tuple[int, int]]:
        """Positions of the arrays that row kernels read besides the logits, and the bytes of a row of each."""
        widths = {"target": 1 if self.indices else self.classes, "weight": 0, "mask": 1}
        at = self.at
        return [(at[x], n * ITEMSIZE[self.tensors[at[x]].dtype]) for x, n in widths.items() if x in at]

    def _stored_per_row(self, auxiliary: Sequence[int]) -> list[tuple[int, int]]:
        """Returns the addresses of the auxiliary outputs as row kernels take them, and the bytes of a row of each."""
        stored = [(0, 0)] * (3 if self.indices else 1)
        for i, (spec, address) in enumerate(zip(self.auxiliary, auxiliary, strict=False)):
            if spec is not None and address:
                stored[i] = address, ITEMSIZE[spec.dtype]
        return stored

    def _launchers_of_rows(
        self, stage: str, reduction: str, result: str, writes: tuple[bool, bool], counted: bool
    ) -> list[compiler.Launcher]:
        """Returns the launcher of the row kernel of each chunk."""
        key = stage, reduction, result, writes, counted
        launchers = self._row_launchers.get(key)
        if launchers is None:
            plans = [x.plan for x in self.chunks(reduction, result)]
            launchers = [x.check(writes, counted) if stage == CHECK else x.launcher(stage, writes, counted)
                         for x in plans]  # fmt: skip
            self._row_launchers[key] = launchers
        return launchers


class _PackedRows(LinearPlan):
    """Plan of the packed rows, all of which count."""

    may_keep = False


class PackedPlan(LinearPlan):
    """Plan of a call that excludes the rows that do not count from the matrix products.

    The other rows are packed into copies, and their gradients are scattered into zeros. The host waits for the number
    of rows that count.
    """

    may_keep = False

    def _packed(self, inputs: Inputs) -> tuple[Any, LinearPlan, Inputs] | None:
        """Returns the indices of the rows that count, their plan and its inputs; None if all or no rows count."""
        device, arrays, *_ = inputs
        static, at = self.static, self.at
        ignored = static.ignore_index if self.indices else None
        mask = arrays[at["mask"]] if static.masked else None
        index = device.counted(arrays[2], ignored, mask)
        rows = int(index.shape[0])
        if rows in (0, self.rows):
            return None
        packed, tensors = list(arrays), list(self.tensors)
        shapes = {"input": (rows, self.depth), "mask": (rows,), "token_weight": (rows,)}
        shapes["target"] = (rows,) if self.indices else (rows, self.classes)
        for name, shape in shapes.items():
            if name in at:
                whole = arrays[at[name]].reshape(self.rows, *shape[1:])
                packed[at[name]] = device.taken(whole, index)
                tensors[at[name]] = contiguous(self.tensors[at[name]].dtype, shape)
        call = Call(self.loss, (), static._replace(skip_ignored=False, class_dim=1))
        plan = _PackedRows(self.engine, call, tuple(tensors), self.promoted, self.machine)
        return index, plan, inputs._replace(arrays=packed)

    def _spread(self, device: Device, gradients: list[Any], index: Any) -> list[Any]:
        """Scatters the gradients of the packed rows into gradients of all rows."""
        for i, x in enumerate(gradients):
            if x is not None and (i == 0 or i == 2):
                gradients[i] = device.spread(x, index, self.rows).reshape(self.tensors[i].shape)
        return gradients

    def _spread_value(self, device: Device, value: Any, index: Any) -> Any:
        return value if self.scalar else device.spread(value, index, self.rows).reshape(self.rows_shape)

    def run_value(self, inputs: Inputs, auxiliary: Sequence[int]) -> Any:
        packing = self._packed(inputs)
        if packing is None:
            return super().run_value(inputs, auxiliary)
        index, plan, packed = packing
        return self._spread_value(inputs.device, plan.run_value(packed, auxiliary), index)

    def write_ahead(self, inputs: Inputs, written: Wanted, auxiliary: Sequence[int]) -> tuple[Any, list[Any], Any]:
        packing = self._packed(inputs)
        if packing is None:
            return super().write_ahead(inputs, written, auxiliary)
        index, plan, packed = packing
        plan.slot = self.slot
        value, gradients, memory = plan.write_ahead(packed, written, auxiliary)
        return self._spread_value(inputs.device, value, index), self._spread(inputs.device, gradients, index), memory

    def compute_gradients(
        self,
        inputs: Inputs,
        wanted: Wanted,
        grad_output: int,
        per_row: bool,
        kept: Any = None,
    ) -> list[Any]:
        # One grad_output per row is read in place, hence by all rows.
        packing = None if per_row else self._packed(inputs)
        if packing is None:
            return super().compute_gradients(inputs, wanted, grad_output, per_row)
        index, plan, packed = packing
        gradients = plan.compute_gradients(packed, wanted, grad_output, per_row)
        return self._spread(inputs.device, gradients, index)

"""Plans of sequence losses: launches of the two halves of the recursion, and those before and after them.

    launch      task
    prepare     reads lengths and labels; omitted if each block of the next launch does this for itself
    first       the first halves of alpha and beta, up to the meeting; beside them, log-sum-exps of frames
    second      with gradients: the second halves, which leave posteriors in the lattice; beside them, links of labels,
                and the log-sum-exps that the first launch has left out
    finish      without gradients: losses, and their sum; with gradients only after a ``gradient`` that computes
                log-sum-exps (`SequencePlan.in_parts`)
    gradient    with gradients: losses, their sum, and the gradient of each frame

Forward of a reduced loss writes the gradient for the expected ``grad_output``. Backward launches ``gradient`` again,
which exits at once if the expectation was right. Otherwise it writes the gradient again from the posteriors, which are
kept until then.

The memory of a call depends on shapes only. By far the largest part is the lattice: one word for each state of each
frame, which finally holds the posterior, and exponents, which live only during forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from cupylosses.call import Call
from cupylosses.engines.base import Engine, Machine, Plan, TensorSpec, Wanted, contiguous
from cupylosses.engines.composite import CompositePlan, Inputs
from cupylosses.engines.device import EXPECTATIONS, Device, Divisor
from cupylosses.engines.pointwise.definition import counting
from cupylosses.engines.pointwise.plan import PointwisePlan
from cupylosses.engines.pointwise.reduction import Static as PointwiseStatic
from cupylosses.engines.sequence import checks as sequence_checks
from cupylosses.engines.sequence.call import Static, constant_divisor, names, sizes
from cupylosses.engines.sequence.codegen import (
    BAND,
    BLOCKS,
    CHUNK,
    GROUP_BYTES,
    MOST_SPLIT,
    OF_LOGITS,
    PLAIN,
    ROLES,
    SOFTMAX,
    THREADS,
    SequenceKernel,
)
from cupylosses.engines.softmax.labels import sites_of
from cupylosses.interop import ITEMSIZE
from cupylosses.jit import compiler
from cupylosses.jit.gpu import WARP

#: Frames per block that writes posteriors of positions (``kFrames``).
FRAMES = 16
#: Number of parts of all frames that the two halves divide between them to compute log-sum-exps (``kShares``).
SHARES = 8
#: Bytes of logits above which log-sum-exps are computed beside both halves.
SPLIT_BYTES = 1 << 25
#: Maximum number of blocks per multiprocessor that compute these log-sum-exps: more would delay the walks.
MOST_READING = 2
#: Maximum number of frames per block that writes gradients of many classes.
MOST_FRAMES = 2
#: Maximum number of classes that are few (``kShortClasses``).
SHORT_CLASSES = 1024
#: Minimum number of classes for which the gradient's kernel computes log-sum-exps, and maximum number of bytes of
#: shared memory for a frame and its posteriors there.
FRAME_LEAST, FRAME_BYTES = 3000, 48000
#: Maximum number of frames per block there, by bytes of a logit.
FRAMES_IN_PARTS = {2: 4, 4: 2, 8: 2}
#: Maximum bytes of shared memory for a window. Frames of more classes are written in windows (``kWindow``).
WINDOW_BYTES = 32768
#: Frames that a lane processes at once if classes are few (``kAtOnce``; where that is less, blocks need more rounds).
AT_ONCE = 2
#: Bytes of posteriors that a warp keeps in shared memory there, and shared memory of a block (``ShortFrames``).
SHORT_ROW, SHORT_BYTES = 4096, 19520
#: Bytes before the buffers of a call: `used`, `ticket` and `started` with its ``kClaims`` (``Buffers``).
HEADER = 1072
#: Dtype codes by which kernels read integers and weights (``load_integer``, ``load_weight``).
_INTEGERS = {"int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": -1}
_WEIGHTS = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 3}


class Speculation:
    """Gradients written for an expected ``grad_output``, with all that is needed to write them for the true one."""

    complete = True
    #: Gradients for the expected ``grad_output`` are complete: no launch is left.
    written = True

    def __init__(
        self, plan: SequencePlan, device: Device, arrays: Sequence[Any], memory: Any, divisor: Divisor
    ) -> None:
        stream = device.stream()
        self.device, self.strides = device, plan.operand_strides
        self.pointers = [device.address(x) for x in arrays]
        self._plan, self._memory, self._divisor = plan, memory, divisor
        self.lattice: Any = None
        self._captured = stream != 0 and device.capturing()
        self.gradient: Any = None

    def run(self, grad_output: int, pointers: Sequence[int]) -> bool:
        """Writes the gradient again unless the true ``grad_output`` was expected.

        Returns False, and launches nothing, under the capture of a graph that will run without the forward that wrote
        the gradient.
        """
        device = self.device
        stream = device.stream()
        if stream != 0 and not self._captured and device.capturing():
            return False
        expected = device.expectation(self._plan.slot)
        self._plan.write(
            device, pointers[0], self._memory, self.lattice, self._divisor, self.gradient, grad_output, 0, expected
        )
        return True

    def release(self) -> None:
        """Does nothing, since nothing is kept for a later call."""


class SequencePlan(CompositePlan):
    """Plan of a sequence loss."""

    static: Static

    def __init__(
        self, engine: Engine, call: Call, tensors: tuple[TensorSpec, ...], promoted: str, machine: Machine
    ) -> None:
        super().__init__(engine, call, tensors, promoted, machine)
        static: Static = call.static
        loss: Any = call.loss
        self.at = {name: i for i, name in enumerate(names(loss, static))}
        self.input = tensors[0]
        #: Array whose strides become the gradient strides of ``Sequences``.
        self.written = self.input.gradient
        self.sizes = sizes(static, tensors[0].shape, tensors[1].shape)
        self.scalar = static.reduction != "none"
        self.result = static.out_dtype or promoted
        spec = contiguous(self.result, () if self.scalar else self.sizes.samples)
        self.shape, self.strides = spec.shape, spec.strides
        self.differentiable = self.speculative = tuple([i == 0 for i in range(len(tensors))])
        self.divisor, self.counted = constant_divisor(static, self.sizes.samples), static.counted
        self.partials = self.records = 0
        self.slot = hash((loss.name, self.input.shape, self.input.dtype, self.result)) % EXPECTATIONS
        self.takes_status = True
        self.reports, self.waits = static.check != "off", static.check == "sync"
        self.compute = "float64" if self.input.dtype == "float64" else "float32"
        self.added = SOFTMAX if loss.logits else OF_LOGITS if static.of_logits else PLAIN
        call_sizes = self.sizes
        #: Number of positions of all samples, and maximum of one: a target longer than its frames has no alignment.
        self.positions = call_sizes.every * (call_sizes.labels + 1)
        if static.concatenated:
            self.positions = call_sizes.groups * (call_sizes.labels + call_sizes.inner)
        self.most = min(call_sizes.labels, call_sizes.frames) + 1
        #: Number of blocks that share a direction of a sample, and of numbers that each passes to the next.
        self.bands, self.column = -(-self.most // BAND), call_sizes.frames // 2 + 32
        # A block writes gradients of at least one frame per warp.
        blocks = call_sizes.every * (2 * self.bands + -(-call_sizes.frames * WARP // THREADS["gradient"]) + 1)
        fits = max(call_sizes.classes, call_sizes.frames, call_sizes.labels, blocks) < 2**31
        self.empty = not (call_sizes.every and call_sizes.frames and fits) or any(static.has_tangent)
        self._launchers: dict[Any, compiler.Launcher] = {}

    # Memory

    @cached_property
    def _layout(self) -> tuple[list[int], int]:
        """Byte offsets of the buffers in a call's memory, in the order of ``Buffers``, and the size of the memory."""
        wide = ITEMSIZE[self.compute]
        call_sizes, count = self.sizes, self.positions
        sums = call_sizes.every * call_sizes.frames * (2 * wide + 8) if self.added == SOFTMAX else 0
        columns = 2 * call_sizes.every * (self.bands - 1) * self.column * 2 * wide
        sized = [
            32 * call_sizes.every,
            4 * count,
            4 * count,
            16 * call_sizes.every,
            8 * wide * count,
            sums,
            8 * call_sizes.every,
            columns,
        ]
        starts, end = [], HEADER
        for size in sized:
            starts.append(end)
            end += -(-size // 16) * 16
        return starts, end

    def _lattice(self, device: Device) -> Any:
        """Allocates a word for each state of each frame, and 16 bytes that prefetches and copies may read past them."""
        size = 2 * self.positions * self.sizes.frames * ITEMSIZE[self.compute] + 16
        return device.empty((-(-size // 8),), (1,), "float64")

    def _exponents(self, device: Device) -> Any:
        """Allocates an exponent for each state of each frame, and for each state of each chunk of frames (`Lattice`).

        Kept elements follow them.
        """
        frames = self.sizes.frames
        count = 2 * self.positions * (frames + frames // CHUNK[self.compute] + 2)
        count += self.keeps * (ITEMSIZE[self.compute] // 4 * self.positions * frames + 4)
        return device.empty((count,), (1,), "int32")

    # Launches

    @cached_property
    def shape_words(self) -> list[int]:
        """Words of ``Sequences``."""
        static, call_sizes, loss = self.static, self.sizes, self.loss
        first, *others = [self.strides_of(x.strides) for x in (self.input, self.written)]
        kinds = [_INTEGERS[self.tensors[1].dtype]]
        kinds += [
            _INTEGERS[self.tensors[self.at[x]].dtype] if x in self.at else 0
            for x in ("input_lengths", "target_lengths")
        ]
        kinds += [_WEIGHTS[self.tensors[self.at["weight"]].dtype] if "weight" in self.at else 0]
        return [
            call_sizes.every, max(call_sizes.inner, 1), call_sizes.frames, call_sizes.classes, call_sizes.labels,
            static.blank, int(static.concatenated), self.positions, *first, *others[0], *kinds,
            int(static.averages_labels), int(static.zero_infinity), self._site(loss), self.bands, self.column,
            *self._layout[0],
        ]  # fmt: skip

    def _site(self, loss: Any) -> int:
        call_sizes, concatenated, batched = self.sizes, self.static.concatenated, self.static.batched
        key = loss.name, call_sizes, concatenated, batched

        def label(place: int, value: int, classes: int) -> Exception:
            position = divmod(place, call_sizes.labels) if batched and not concatenated else (place,)
            return sequence_checks.bad_label(loss, position, value, classes)

        def length(name: str) -> Any:
            return lambda place, value, most: sequence_checks.bad_length(loss, name, place, value, most)

        kinds = ("input_lengths", "target_lengths", "sum")
        return sites_of(loss, [((key, "label"), label), *[((key, x), length(x)) for x in kinds]])

    def strides_of(self, strides: Sequence[int]) -> tuple[int, int, int, int]:
        """Returns the strides of batches, samples, frames and classes of an array like the first operand."""
        static, batches = self.static, self.static.batches
        inner = strides[batches:]
        outer = strides[batches - 1] if batches else 0
        if not static.batched:
            return outer, 0, inner[0], inner[1]
        frame, sample = (inner[1], inner[0]) if static.batch_first else (inner[0], inner[1])
        return outer, sample, frame, inner[2]

    def _launch(
        self, kind: str, stores: bool = False, finishes: bool = False, verifies: bool = False
    ) -> compiler.Launcher:
        """Returns the launcher of a kernel. With ``verifies`` it most likely exits at once, and has few blocks."""
        key = kind, stores, finishes, verifies
        launcher = self._launchers.get(key)
        if launcher is None:
            launcher = self._launchers[key] = self._make(*key)
        return launcher

    def _make(self, kind: str, stores: bool, finishes: bool, verifies: bool) -> compiler.Launcher:
        call_sizes = self.sizes
        fixed: list[Any] = [self.shape_words]
        blocks, threads, shared, roles = call_sizes.every, THREADS[kind], 0, ROLES["first"]
        if kind == "prepare":
            words = 2 * call_sizes.every * (self.bands - 1) * self.column * (ITEMSIZE[self.compute] // 4)
            blocks += min(-(-words // (4 * threads)), 4 * self.machine.processors)
            fixed += [words]
        if kind in ("first", "second"):
            positions = min(-(-self.most // WARP) * WARP, BAND)
            blocks = 2 * call_sizes.every * self.bands
            # A warp for each kind of posteriors shortens rounds. Many blocks per multiprocessor hide long rounds.
            if kind == "second" and blocks <= MOST_SPLIT * self.machine.processors:
                roles = ROLES[kind]
            threads, shared = roles * positions, GROUP_BYTES[kind][self.compute] * positions // WARP
        added = PLAIN if kind == "prepare" else self.added
        if kind in ("first", "second", "finish"):
            added = SOFTMAX if self.added == SOFTMAX else PLAIN
        if kind in ("first", "second"):
            share = self.share if stores or kind == "second" else SHARES
            part = share if kind == "first" else SHARES - share
            # With `in_parts`, the gradient's kernel computes the log-sum-exps instead.
            part *= not self.in_parts or not (stores or kind == "second")
            added = added if part else PLAIN
            readers = self._reading_blocks(threads, part) * (added == SOFTMAX)
            # Walks are spread evenly over multiprocessors if they leave room for the other blocks, and leave fewer than
            # half of all multiprocessors idle.
            processors, resident = self.machine.processors, BLOCKS["first"][self.compute == "float64"]
            spreads = processors < 2 * blocks <= 2 * (resident - 1) * processors
            fixed += [blocks, -(-blocks // processors) * spreads if kind == "first" else call_sizes.every, share]
            blocks += readers + call_sizes.every * (kind == "second")
        if kind == "gradient":
            frames = self.gradient_frames(self.input.dtype)
            finishing = finishes and not self.in_parts
            blocks = call_sizes.every * (self.windows * -(-call_sizes.frames // frames) + finishing)
            fixed += [call_sizes.every * finishing, frames, int(verifies or not self.in_parts)]
            shared = self.gradient_shared
        in_parts = self.in_parts and added == SOFTMAX and (kind in ("first", "gradient") or finishes)
        if kind == "finish" and finishes:
            shares = max(self.machine.processors // call_sizes.every, 1)
            blocks *= shares
            fixed += [shares]
        dtype = "float32" if kind == "prepare" and self.compute == "float32" else self.input.dtype
        result = self.result if stores or kind not in ("prepare", "first") else "float32"
        many = kind == "gradient" and self.many
        prepares = kind == "first" and stores and self.prepares
        keeps = (stores or kind == "second") and self.keeps
        kernel = SequenceKernel(self.loss, kind, dtype, result, added, stores, roles, many, prepares, keeps, in_parts)
        if kind == "gradient" and verifies:
            blocks = min(blocks, kernel.resident * self.machine.processors)
        return self.machine.launcher(kernel, blocks, threads, fixed, shared)

    @cached_property
    def splits(self) -> bool:
        """True if log-sum-exps take so long that they are computed beside both halves."""
        read = self.sizes.every * self.sizes.frames * self.sizes.classes * ITEMSIZE[self.input.dtype]
        return self.added == SOFTMAX and read > SPLIT_BYTES

    @property
    def share(self) -> int:
        """Number of parts of all frames whose log-sum-exps are computed beside the first half, and not the second."""
        return 0 if self.prepares else SHARES // 2 if self.splits else SHARES

    @property
    def keeps(self) -> bool:
        """True if the first half keeps the elements that it reads, each of which is in a sector of its own."""
        return self.sizes.classes > SHORT_CLASSES

    @property
    def prepares(self) -> bool:
        """True if the first half prepares the samples, so that no separate launch does.

        If targets were concatenated, or several blocks shared a direction of a sample, its blocks would have to wait
        for each other.
        """
        return self.bands == 1 and not self.static.concatenated and not (self.splits and not self.in_parts)

    def _reading_blocks(self, threads: int, part: int) -> int:
        """Returns the number of blocks that compute log-sum-exps of ``part`` parts of all frames (``read_frames``)."""
        vectors = self.sizes.classes * ITEMSIZE[self.input.dtype] // 16
        lanes = next((x for x in (32, 16, 8, 4, 2) if vectors >= 4 * x), 1)
        runs = -(-self.sizes.frames * lanes // WARP)
        blocks = -(-self.sizes.every * runs * part * WARP // (SHARES * threads))
        return min(blocks, MOST_READING * self.machine.processors) if self.splits and part < SHARES else blocks

    @property
    def gradient_shared(self) -> int:
        """Bytes of dynamic shared memory per block that writes gradients (``ShortFrames``, ``write_long_frames``)."""
        if not self.many:
            return SHORT_BYTES
        # Windows need memory for whole vectors, and for one more.
        window = (-(-self.sizes.classes // self.windows) + 7) // 8 * 8
        return (window + 8) * ITEMSIZE[self.compute] + window * ITEMSIZE[self.input.dtype] * self.in_parts

    @property
    def in_parts(self) -> bool:
        """True if the gradient's kernel computes log-sum-exps: of frames of many classes that fit in shared memory."""
        count, stored = self.sizes.classes, ITEMSIZE[self.input.dtype]
        fits = count >= FRAME_LEAST and count * (ITEMSIZE[self.compute] + stored) <= FRAME_BYTES
        return self.splits and self.many and fits

    @property
    def many(self) -> bool:
        """True if frames have more classes, or samples more positions, than fit in ``ShortFrames``."""
        return self.sizes.classes > SHORT_CLASSES or 2 * self.most * ITEMSIZE[self.compute] > SHORT_ROW

    @property
    def windows(self) -> int:
        """Number of windows in which a frame of many classes is written (``windows_of``)."""
        return -(-self.sizes.classes * ITEMSIZE[self.compute] // WINDOW_BYTES)

    def gradient_frames(self, dtype: str) -> int:
        """Returns the number of frames per block that writes gradients of this dtype."""
        call_sizes = self.sizes
        resident = SequenceKernel(self.loss, "gradient", many=self.many, dtype=dtype).resident * self.machine.processors
        if self.many:
            return min(
                max(call_sizes.every * self.windows * call_sizes.frames // resident, 1),
                FRAMES_IN_PARTS[ITEMSIZE[dtype]] if self.in_parts else MOST_FRAMES,
            )
        # A block has the number of rounds for which all waves of blocks take the least time, if starting a block takes
        # as long as a round. In each round, a warp processes several frames of few classes (``write_short_frames``).
        vectors = call_sizes.classes * ITEMSIZE[dtype] // 16
        lanes = 8 if vectors <= 16 else 16 if vectors <= 32 else WARP
        frames = min(AT_ONCE * WARP // lanes, SHORT_ROW // ITEMSIZE[self.compute] // (2 * self.most))
        together = THREADS["gradient"] // WARP * max(frames, 1)

        def time(rounds: int) -> int:
            blocks = call_sizes.every * -(-call_sizes.frames // (together * rounds))
            return -(-blocks // resident) * (rounds + 1)

        return together * min(range(1, 33), key=time)

    def _given(self, device: Device, arrays: Sequence[Any], expected: int, status: int) -> list[int]:
        """Returns addresses: arrays besides the first operand, the expected ``grad_output``, and the status."""
        array_names = "targets", "input_lengths", "target_lengths", "weight", "mask"
        return [*[device.address(arrays[self.at[x]]) if x in self.at else 0 for x in array_names], expected, status]

    def _memory(self, device: Device) -> Any:
        return device.empty((self._layout[1] // 8,), (1,), "float64")

    def prepared(self, device: Device, arrays: Sequence[Any], expected: int, status: int) -> Any:
        """Allocates the memory of a call, and prepares its samples."""
        memory = self._memory(device)
        addresses = self._given(device, arrays, expected, status)
        self._launch("prepare")(device.stream(), *addresses, device.address(memory))
        return memory

    def walk(self, device: Device, arrays: Sequence[Any], expected: int, status: int) -> tuple[Any, Any]:
        """Launches both halves of the recursion. Returns the memory of the call and the lattice of posteriors."""
        addresses = self._given(device, arrays, expected, status) if self.prepares else []
        memory = self._memory(device) if self.prepares else self.prepared(device, arrays, expected, status)
        lattice, exponents = self._lattice(device), self._exponents(device)
        stream = device.stream()
        at = [device.address(x) for x in (arrays[0], memory, lattice, exponents)]
        self._launch("first", True)(stream, *addresses, *at)
        self._launch("second")(stream, *at)
        return memory, lattice

    def denominator(self) -> tuple[Plan, tuple[int, ...], float]:
        """Returns the plan that counts the samples that the mask keeps, the array that it reads, and a factor."""
        return self._counting, (self.at["mask"],), 1.0

    @cached_property
    def _counting(self) -> Plan:
        loss = counting(False, True)
        call = Call(loss, (), PointwiseStatic("sum", None, "float64"))
        mask = contiguous("bool", self.sizes.samples)
        return PointwisePlan(loss.engine, call, (mask,), "float32", self.machine)

    def upstream_strides(self) -> tuple[int, ...] | None:
        return self.strides

    # Runs

    def run_value(self, inputs: Inputs, auxiliary: Sequence[int]) -> Any:
        device, arrays, scalars, divisor = inputs
        value = device.empty(self.shape, self.strides, self.result)
        memory = self.prepared(device, arrays, 0, int(scalars[-1]))
        self._launch("first")(device.stream(), device.address(arrays[0]), device.address(memory), 0, 0)
        to = (0, device.address(value)) if self.scalar else (device.address(value), 0)
        self._launch("finish")(device.stream(), device.address(memory), *to, *divisor.number_and_count)
        return value

    def run_value_and_gradients(self, inputs: Inputs, wanted: Wanted, auxiliary: Sequence[int]) -> tuple[Any, Any]:
        device, arrays, scalars, divisor = inputs
        if not wanted[0]:
            return self.run_value(inputs, auxiliary), None
        value = device.empty(self.shape, self.strides, self.result)
        memory, lattice = self.walk(device, arrays, device.expectation(self.slot), int(scalars[-1]))
        check = Speculation(self, device, arrays, memory, divisor)
        gradients = [device.empty(*self.allocation(0)), *[None] * (len(wanted) - 1)]
        check.gradient, check.lattice = gradients[0], lattice
        at = [device.address(x) for x in (arrays[0], value)]
        self.write(device, at[0], memory, lattice, divisor, gradients[0], value=at[1])
        return value, (check, gradients)

    def write(
        self,
        device: Device,
        x: int,
        memory: Any,
        lattice: Any,
        divisor: Divisor,
        gradient: Any,
        grad_output: int = 0,
        per_sample: int = 0,
        expected: int = 0,
        value: int = 0,
    ) -> None:
        """Writes the gradient from a call's memory and posteriors, and the value if that has an address.

        Without ``grad_output``, the gradient is for the expected one. With ``expected``, the gradient was written
        before, and is written again only if that was for another ``grad_output``. The true one is then expected from
        now on.
        """
        at = [device.address(y) for y in (gradient, memory, lattice)]
        self._launch("gradient", finishes=value != 0, verifies=expected != 0)(
            device.stream(), x, *at, grad_output, per_sample, expected, value, *divisor.number_and_count
        )
        if self.in_parts and not expected:
            self._launch("finish", finishes=True)(device.stream(), at[1], at[0], 0, value, *divisor.number_and_count)

    def run_gradients(
        self,
        inputs: Inputs,
        wanted: Wanted,
        grad_output: int,
        per_row: bool,
        speculation: Any,
    ) -> list[Any]:
        device, arrays, _, divisor = inputs
        pointers = [device.address(x) for x in arrays]
        if speculation is not None and speculation[0].run(grad_output, pointers):
            return speculation[1]
        gradients = [device.empty(*self.allocation(0)), *[None] * (len(wanted) - 1)]
        memory, lattice = self.walk(device, arrays, 0, 0)
        self.write(device, pointers[0], memory, lattice, divisor, gradients[0], grad_output, int(per_row))
        return gradients

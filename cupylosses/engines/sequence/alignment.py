"""The most probable alignment of targets to frames: definition, formula, plan and kernel of a function that is no loss.

    score = max over alignments c of the target of sum_t log p(t, n, c_t)

A call has the arrays and the static part of a CTC loss that is not reduced.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf, nan
from typing import Any, ClassVar, NamedTuple

from cupylosses import interop
from cupylosses.call import Call, Parts
from cupylosses.definition.base import Definition
from cupylosses.definition.registry import define_function
from cupylosses.engines.base import Apart, Engine, Machine, Plan, TensorSpec, Wanted, contiguous
from cupylosses.engines.composite import CompositePlan
from cupylosses.engines.device import Device, Divisor
from cupylosses.engines.sequence import checks as sequence_checks
from cupylosses.engines.sequence import reference as sequence_reference
from cupylosses.engines.sequence.call import Static, sizes, sizes_of
from cupylosses.engines.sequence.definition import SequenceLoss
from cupylosses.engines.sequence.engine import SequenceEngine
from cupylosses.engines.softmax.engine import row_major
from cupylosses.jit.glue import STORAGE
from cupylosses.jit.gpu import WARP
from cupylosses.jit.kernel import Kernel

#: Frames between two barriers, and ballots of a frame: `kChunk` and `kBallots` of ``alignment.cuh``.
CHUNK = 8
BALLOTS = 3
#: Positions that a block takes at once. More are taken in sweeps.
MAX_THREADS = 1024


class CtcAlignment(NamedTuple):
    """An alignment of each sample: the sum of its log-probabilities; and of each frame the class, the position of its
    label in the target (-1 for the blank), and the log-probability. Frames behind the end, and all of samples without
    an alignment, have -1, -1 and 0.
    """

    score: Any
    labels: Any
    positions: Any
    log_probs: Any


@dataclass(frozen=True, eq=False, kw_only=True)
class AlignmentFunction(SequenceLoss):
    """A function with the operands of a CTC loss whose results are an alignment."""

    EXTRA: ClassVar[tuple[str, ...]] = ("input_lengths", "target_lengths")
    result_type: ClassVar[str] = "CtcAlignment"

    @cached_property
    def common(self) -> Mapping[str, Any]:
        lengths = dict.fromkeys(self.EXTRA)
        return {**lengths, "blank": 0, "batch_first": False, "check_targets": "lazy"}

    @cached_property
    def kept(self) -> dict[str, Any]:
        return {}

    @property
    def reductions(self) -> tuple[str, ...]:
        return ("none",)

    @property
    def common_texts(self) -> Mapping[str, str]:
        return {
            **super().common_texts,
            "input_lengths": "Number of frames of each sample, at most T: integers in a tensor or an array on any "
            "device, of shape (N,) or (N, 1), in a tuple or a list; one for one sample. Frames behind it are not read. "
            "Default None, all T.",
            "target_lengths": "Number of labels of each sample, likewise, at most S. Default None, all S.",
        }

    @property
    def result_text(self) -> str:
        return (
            "A named tuple (score, labels, positions, log_probs): for each sample the sum along its alignment, of "
            "shape (N,) or (); for each frame the class, the position of its label in the target, -1 for the blank, "
            "and the log-probability of that class, of shape (T, N), (N, T) with `batch_first`, (T,) for one sample. "
            "Classes and positions are int64, the others float32 (float64 for float64 input). Sums are float64. Of "
            "alignments with equal sums it is the one that, seen from the last frame, ends in the last label, stays "
            "longest in each label and blank, and goes through the blank between two labels. A target without "
            "alignment has score -inf, one for which NaN or +inf counts has score NaN; their frames, and those behind "
            "`input_lengths`, have class -1, position -1 and log-probability 0."
        )

    @property
    def gradient_text(self) -> str:
        return (
            "None of the results is differentiable. For a loss of the best path gather `log_probs` by the labels: "
            "``log_probs.gather(-1, labels.clamp(min=0)[..., None])``."
        )


class AlignmentEngine(SequenceEngine):
    """The most probable alignment of targets to frames."""

    name = "alignment"
    needs_chip = False
    contracts = False
    Definition: ClassVar[Any] = AlignmentFunction

    # Arguments

    def bind(
        self, loss: Any, arrays: tuple[Any, ...], settings: tuple[Any, ...], legacy: tuple[Any, ...] = ()
    ) -> Parts:
        parts = super().bind(loss, (*arrays, None, None, None), settings)
        first, *others = parts[1]
        if interop.kind(first) == "torch":
            first = first.detach()
        return (parts[0], (first, *others), *parts[2:])

    def checked(self, loss: Any, settings: tuple[Any, ...]) -> Static:
        given = dict(zip(loss.setting_names, settings, strict=True))
        return Static(
            reduction="none",
            blank=sequence_checks.integer(loss, "blank", given["blank"]),
            batch_first=sequence_checks.switch(loss, "batch_first", given["batch_first"]),
            check=sequence_checks.choice(loss, "check_targets", given["check_targets"]),
        )

    def promoted(self, call: Call, zero_d_widens: bool = False) -> str:
        return _compute(super().promoted(call))

    # Plans

    def plan(self, call: Call, tensors: tuple[TensorSpec, ...], promoted: str, machine: Machine) -> Plan:
        return AlignmentPlan(self, call, tensors, promoted, machine)

    def auxiliary_results(self, xp: Any, call: Call, stored: Sequence[Any]) -> list[Any]:
        return list(stored)

    def result(self, call: Call, outputs: Sequence[Any]) -> Any:
        return CtcAlignment(*outputs)

    # Formulas

    def reference(self, call: Call, promoted: str, readable: bool = True) -> Any:
        xp = interop.namespace(call.arrays[0])
        samples = sequence_reference.samples(xp, call, readable and call.static.check != "off")
        labels, positions, log_probs, score = _best_paths(xp, samples, call.static.blank)
        shape, static, kind = _frame_shape(call.static, call.arrays[0].shape), call.static, getattr(xp, promoted)

        def of_frames(x: Any) -> Any:
            first = static.batches + int(static.batched and static.batch_first)
            order = (*range(1, first + 1), 0, *range(first + 1, len(shape)))
            sizes = (shape[first], *[n for d, n in enumerate(shape) if d != first])
            return xp.permute_dims(xp.reshape(x, sizes), order)

        score = xp.reshape(score, sizes_of(call).samples)
        return CtcAlignment(
            xp.astype(score, kind), of_frames(labels), of_frames(positions), xp.astype(of_frames(log_probs), kind)
        )

    def floating(self, call: Call) -> Wanted:
        return (False,) * len(call.arrays)

    # Transforms

    def outputs(self, call: Call, strides: Sequence[tuple[int, ...]], promoted: str) -> list[TensorSpec]:
        dtype, of_frames = self.promoted(call), _frame_shape(call.static, call.arrays[0].shape)
        found = [row_major(dtype, sizes_of(call).samples)]
        return found + [row_major(x, of_frames) for x in ("int64", "int64", dtype)]

    def apart(self, call: Call, promoted: str, wanted: Wanted, traced: bool) -> Apart | None:
        return None


def _compute(dtype: str) -> str:
    return "float64" if dtype == "float64" else "float32"


def _frame_shape(static: Static, shape: Sequence[Any]) -> tuple[Any, ...]:
    """The shape of results with a number per frame."""
    return tuple(shape[:-1])


def _best_paths(xp: Any, samples: sequence_reference.Samples, blank: int) -> tuple[Any, Any, Any, Any]:
    """Classes, positions and log-probabilities of frames, of shape (T, N), and the score of each sample."""
    x, inside, lengths = samples.x, samples.inside, samples.lengths
    states, skips = sequence_reference.states_of(xp, samples.labels, lengths, blank)
    s, last = xp.cumulative_sum(xp.ones_like(states), axis=1) - 1, 2 * lengths[:, None]
    score = xp.where(s == 0, 0.0, xp.zeros_like(states, dtype=x.dtype) - inf)
    nothing = xp.full_like(score, -inf)
    x = xp.where(x == inf, xp.full_like(x, nan), x)

    def better(a: Any, b: Any) -> Any:
        return (a > b) | xp.isnan(a)

    came = []
    for t in range(x.shape[0]):
        best, steps = score, xp.zeros_like(states)
        for by in (1, 2):
            arriving = xp.where(s < by, nothing, xp.roll(score, by, axis=1))
            arriving = arriving if by == 1 else xp.where(skips, arriving, nothing)
            taken = better(arriving, best)
            best, steps = xp.where(taken, arriving, best), xp.where(taken, xp.full_like(steps, by), steps)
        now = inside[t, ...][:, None]
        emission = xp.take_along_axis(x[t, ...], states, axis=1)
        reached = xp.where((best == -inf) | (emission == -inf), nothing, best + emission)
        score = xp.where(now, reached, score)
        came.append(xp.where(now, steps, xp.zeros_like(steps)))
    blanks = xp.take_along_axis(score, last, axis=1)
    at = xp.where(last > 0, last - 1, last)
    ends = xp.take_along_axis(score, at, axis=1)
    at = xp.where(better(blanks, ends), last, at)
    total = xp.where(better(blanks, ends), blanks, ends)[:, 0]
    total = xp.where(samples.too_long, xp.full_like(total, -inf), total)
    total = xp.where(samples.used & samples.bad, xp.full_like(total, nan), total)
    found = inside & (total > -inf)[None, :]
    path = []
    for steps in reversed(came):
        path.append(at[:, 0])
        at = at - xp.take_along_axis(steps, at, axis=1)
    if not path:
        empty = xp.reshape(xp.zeros_like(x[..., :1]), inside.shape)
        return xp.astype(empty, xp.int64), xp.astype(empty, xp.int64), empty, total
    along = xp.stack(path[::-1])
    classes = xp.stack([xp.take_along_axis(states, p[:, None], axis=1)[:, 0] for p in along])
    log_probs = xp.take_along_axis(x, classes[..., None], axis=2)[..., 0]
    none = xp.full_like(along, -1)
    labels = xp.where(found, classes, none)
    positions = xp.where(found & (along % 2 == 1), along // 2, none)
    return labels, positions, xp.where(found, log_probs, xp.zeros_like(log_probs)), total


# ----------------------------------------------------------------------------------------------------------------------
# Kernels


@dataclass(frozen=True)
class AlignmentKernel(Kernel):
    """A compiled module of this function. Lengths have a dtype, or "" if all are full."""

    loss: Definition
    input: str
    labels: str
    input_lengths: str
    target_lengths: str
    bounds: int

    narrow = False
    files = ("sequence/alignment.cuh",)
    vec_size = 1
    storage = property(lambda self: (self.input, self.labels))
    compute = property(lambda self: _compute(self.input))

    @property
    def title(self) -> str:
        """The kernel in words, for error messages and file names."""
        names = (self.input, self.labels, self.input_lengths, self.target_lengths)
        return "_".join([self.loss.name, "-".join([STORAGE[x][1] if x else "full" for x in names])])

    @property
    def entry(self) -> str:
        """The name of the kernel."""
        return f"{self.loss.name}_{STORAGE[self.input][1]}"

    @property
    def arguments(self) -> list[str]:
        input, labels, frames, lengths, compute = self._types
        read = [f"const {input}* input", f"const {labels}* targets"]
        read += [f"const {frames}* input_lengths", f"const {lengths}* target_lengths"]
        written = ["int64* labels", "int64* positions", f"{compute}* log_probs", f"{compute}* scores"]
        return [*read, *written, "unsigned* came_from", "double* columns"]

    @property
    def _types(self) -> tuple[str, ...]:
        names = (self.input, self.labels, self.input_lengths, self.target_lengths, self.compute)
        return tuple([STORAGE[x or "int64"][0] for x in names])

    def glue(self) -> str:
        names = [x.rpartition(" ")[2] for x in self.arguments]
        return (
            f'extern "C" __global__ void __launch_bounds__({self.bounds})\n'
            f"{self.entry}({', '.join(self.arguments)}, int64 blank, const __grid_constant__ SequencePlace place) {{\n"
            f"  align(AlignmentProgram<{', '.join(self._types)}>{{{', '.join(names)}, blank, place}});\n"
            "}\n"
        )


class AlignmentPlan(CompositePlan):
    """One launch, a block per sample, whose workspace says where each state came from."""

    static: Static

    def __init__(
        self, engine: Engine, call: Call, tensors: tuple[TensorSpec, ...], promoted: str, machine: Machine
    ) -> None:
        static: Static = call.static
        of_frames = _frame_shape(static, tensors[0].shape)
        self.result = _compute(promoted)
        self.auxiliary = tuple([contiguous(x, of_frames) for x in ("int64", "int64", self.result)])
        super().__init__(engine, call, tensors, promoted, machine)
        self.sizes = sizes(static, tensors[0].shape, tensors[1].shape)
        spec = contiguous(self.result, self.sizes.samples)
        self.shape, self.strides, self.scalar = spec.shape, spec.strides, False
        self.differentiable = self.speculative = self.nothing
        self.partials = self.records = 0
        # Batches of vmap are the formula's, and what has no frames.
        self.empty = static.batches > 0 or 0 in of_frames
        #: Positions of a target that has an alignment.
        self.positions = 1 + min(self.sizes.labels, self.sizes.frames)
        self._launcher: Any = None

    def _load(self) -> Any:
        static, dtypes = self.static, [x.dtype for x in self.tensors]
        rest = iter(range(2, len(dtypes)))
        lengths = [next(rest) if has else None for has in (static.input_lengths, static.target_lengths)]
        named = ["" if i is None else dtypes[i] for i in lengths]
        bounds = MAX_THREADS // (2 if self.compute == "float64" else 1)
        kernel = AlignmentKernel(self.loss, dtypes[0], dtypes[1], *named, bounds)
        threads = min(bounds, -(-self.positions // WARP) * WARP)
        words = [static.blank, self._place([self.tensors[i].strides if i is not None else () for i in lengths])]
        self.sweeps = self.positions > threads
        return self.machine.launcher(kernel, self.sizes.every, threads, tuple(words), 0)

    def _place(self, lengths: Sequence[tuple[int, ...]]) -> list[int]:
        """``SequencePlace`` of the kernel."""
        static, found = self.static, self.sizes
        *outer, of_class = self.tensors[0].strides
        out = list(self.auxiliary[0].strides) if self.auxiliary[0] else []
        frame = 1 if static.batched and static.batch_first else 0
        sample = 1 - frame
        of_samples = [x[sample] if static.batched else 0 for x in (outer, out)]
        *targets, of_label = self.tensors[1].strides
        padded = static.batched and not static.concatenated
        strides = [x[0] if x else 0 for x in lengths]
        return [
            found.frames, found.classes, found.labels, int(static.concatenated),
            outer[frame], of_samples[0], of_class,
            targets[0] if padded else 0, of_label, *strides,
            out[frame], of_samples[1],
        ]  # fmt: skip

    def run_value(
        self,
        device: Device,
        arrays: Sequence[Any],
        scalars: Sequence[float],
        divisor: Divisor,
        auxiliary: Sequence[int],
    ) -> Any:
        """The scores; the other results are written to the addresses in ``auxiliary``."""
        if self._launcher is None:
            self._launcher = self._load()
        static, found = self.static, self.sizes
        addresses = iter([device.address(x) for x in arrays])
        read = [next(addresses), next(addresses)]
        read += [next(addresses) if has else 0 for has in (static.input_lengths, static.target_lengths)]
        score = device.empty(self.shape, self.strides, self.result)
        chunks = -(-found.frames // CHUNK)
        words = found.every * -(-self.positions // WARP) * chunks * CHUNK * BALLOTS
        came_from = device.empty((words,), (1,), "int32")
        columns = device.empty((2 * found.every * found.frames,), (1,), "float64") if self.sweeps else None
        workspace = device.address(came_from), 0 if columns is None else device.address(columns)
        self._launcher(device.stream(), *read, *auxiliary, device.address(score), *workspace)
        return score

    def run_value_and_gradients(self, *_: Any) -> tuple[Any, Any]:
        raise NotImplementedError("an alignment has no gradient")

    def run_gradients(self, *_: Any) -> list[Any]:
        raise NotImplementedError("an alignment has no gradient")


def define_alignment(**fields: Any) -> AlignmentFunction:
    """Makes a definition and enters it in the registry, from which the public function is built."""
    return define_function(AlignmentFunction(**fields))


ALIGNMENT = AlignmentEngine()

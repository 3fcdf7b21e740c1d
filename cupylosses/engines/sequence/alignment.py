"""Most probable alignment of targets to frames, a function that is not a loss: definition, formula, plan and kernel.

score = max over alignments c of the target of sum_t log p(t, n, c_t)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, nan
from typing import Any, ClassVar, NamedTuple

from cupylosses import interop
from cupylosses.call import Call, Parts
from cupylosses.definition.base import Definition
from cupylosses.definition.registry import define_function
from cupylosses.engines.base import Engine, Machine, Plan, TensorSpec, Wanted, contiguous
from cupylosses.engines.composite import Inputs
from cupylosses.engines.sequence import reference as sequence_reference
from cupylosses.engines.sequence.call import sizes_of
from cupylosses.engines.sequence.functions import SequenceFunction, SequenceFunctionEngine, in_order, wide_dtype
from cupylosses.engines.sequence.plan import SequencePlan
from cupylosses.engines.softmax.engine import row_major
from cupylosses.jit.glue import STORAGE
from cupylosses.jit.gpu import WARP
from cupylosses.jit.kernel import Kernel

#: Number of frames between two barriers, and of ballots per frame: `kChunk` and `kBallots` of ``alignment.cuh``.
CHUNK = 8
BALLOTS = 3
#: Maximum number of positions that a block processes at once. More are processed in sweeps.
MAX_THREADS = 512


class CtcAlignment(NamedTuple):
    """An alignment of each sample.

    ``score`` is the sum of its log-probabilities. For each frame, ``labels`` has the class, ``positions`` the position
    of its label in the target (-1 for the blank), and ``log_probs`` the log-probability. Frames past the end, and all
    frames of samples without an alignment, have -1, -1 and 0.
    """

    score: Any
    labels: Any
    positions: Any
    log_probs: Any


@dataclass(frozen=True, eq=False, kw_only=True)
class AlignmentFunction(SequenceFunction):
    """Definition of a function whose results are an alignment."""

    result_type: ClassVar[str] = "CtcAlignment"

    @property
    def result_text(self) -> str:
        return (
            "A named tuple (score, labels, positions, log_probs): for each sample the sum along its alignment, of "
            "shape (N,) or (); for each frame the class, the position of its label in the target, -1 for the blank, "
            "and the log-probability of that class, of shape (T, N), (N, T) with `batch_first`, (T,) for one sample. "
            "Classes and positions are int64, the others float32 (float64 for float64 input). Sums are float64. Of "
            "alignments with equal sums it is the one that, seen from the last frame, ends in the last label, stays "
            "longest in each label and blank, and goes through the blank between two labels. A target without "
            "alignment has score -inf; one for which NaN or +inf counts, or of which a label or a length is out of "
            "range, has score NaN. Their frames, and those behind `input_lengths`, have class -1, position -1 and "
            "log-probability 0."
        )

    @property
    def gradient_text(self) -> str:
        return (
            "None of the results is differentiable. For a loss of the best path gather `log_probs` by the labels: "
            "``log_probs.gather(-1, labels.clamp(min=0)[..., None])``."
        )


class AlignmentEngine(SequenceFunctionEngine):
    """Engine of the most probable alignment of targets to frames."""

    name = "alignment"
    Definition: ClassVar[Any] = AlignmentFunction

    def bind(
        self, loss: Any, arrays: tuple[Any, ...], settings: tuple[Any, ...], legacy: tuple[Any, ...] = ()
    ) -> Parts:
        parts = super().bind(loss, arrays, settings)
        first, *others = parts[1]
        if interop.kind(first) == "torch":
            first = first.detach()
        return (parts[0], (first, *others), *parts[2:])

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
        shape, kind = tuple(call.arrays[0].shape[:-1]), getattr(xp, promoted)
        labels, positions, log_probs = (in_order(xp, call.static, shape, x) for x in (labels, positions, log_probs))
        score = xp.reshape(score, sizes_of(call).samples)
        return CtcAlignment(xp.astype(score, kind), labels, positions, xp.astype(log_probs, kind))

    def floating(self, call: Call) -> Wanted:
        return (False,) * len(call.arrays)

    # Transforms

    def outputs(self, call: Call, strides: Sequence[tuple[int, ...]], promoted: str) -> list[TensorSpec]:
        dtype, of_frames = self.promoted(call), tuple(call.arrays[0].shape[:-1])
        scores = [row_major(dtype, sizes_of(call).samples)]
        return scores + [row_major(x, of_frames) for x in ("int64", "int64", dtype)]


def _best_paths(xp: Any, samples: sequence_reference.Samples, blank: int) -> tuple[Any, Any, Any, Any]:
    """Returns classes, positions and log-probabilities of frames, of shape (T, N), and the score of each sample."""
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
            improves = better(arriving, best)
            best, steps = xp.where(improves, arriving, best), xp.where(improves, xp.full_like(steps, by), steps)
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
    aligned = inside & (total > -inf)[None, :]
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
    labels = xp.where(aligned, classes, none)
    positions = xp.where(aligned & (along % 2 == 1), along // 2, none)
    return labels, positions, xp.where(aligned, log_probs, xp.zeros_like(log_probs)), total


# ----------------------------------------------------------------------------------------------------------------------
# Kernels


@dataclass(frozen=True)
class AlignmentKernel(Kernel):
    """The kernel of this function. Precondition: the kernel "prepare" of the losses has prepared the samples."""

    loss: Definition
    dtype: str

    kind = "align"
    narrow = False
    files = ("sequence/alignment.cuh",)
    vec_size = 1
    storage = property(lambda self: (self.dtype,))
    compute = property(lambda self: wide_dtype(self.dtype))

    @property
    def title(self) -> str:
        """Description of the kernel, for error messages and file names."""
        return f"{self.loss.name}_{STORAGE[self.dtype][1]}"

    @property
    def entry(self) -> str:
        """Name of the kernel function."""
        return self.title

    @property
    def arguments(self) -> list[str]:
        compute = STORAGE[self.compute][0]
        written = ["int64* labels", "int64* positions", f"{compute}* log_probs", f"{compute}* scores"]
        return [
            f"const {STORAGE[self.dtype][0]}* x",
            "char* memory",
            *written,
            "unsigned* came_from",
            "double* columns",
        ]

    def glue(self) -> str:
        names = ["labels", "positions", "log_probs", "scores", "came_from", "columns"]
        compute = STORAGE[self.compute][0]
        program = f"AlignmentProgram<{STORAGE[self.dtype][0]}, {compute}>"
        return (
            f'extern "C" __global__ void __launch_bounds__({MAX_THREADS})\n'
            f"{self.entry}({', '.join(self.arguments)}, const __grid_constant__ Sequences shape) {{\n"
            f"  const Buffers<{compute}> at(memory, shape);\n"
            f"  align({program}{{x, at.samples, at.labels, {', '.join(names)}, shape}});\n"
            "}\n"
        )


class AlignmentPlan(SequencePlan):
    """Two launches: the kernel that prepares the samples of a loss, and the alignment with a block per sample.

    The workspace of the alignment records the state from which each state was entered.
    """

    def __init__(
        self, engine: Engine, call: Call, tensors: tuple[TensorSpec, ...], promoted: str, machine: Machine
    ) -> None:
        frames, dtype = tuple(tensors[0].shape[:-1]), wide_dtype(promoted)
        self.auxiliary = tuple([contiguous(x, frames) for x in ("int64", "int64", dtype)])
        super().__init__(engine, call, tensors, promoted, machine)
        self.result = dtype
        self.differentiable = self.speculative = self.nothing
        # Per-frame results have the layout of a gradient with a single class.
        of_frames = contiguous(dtype, frames)
        self.written = TensorSpec(dtype, (*frames, 1), (*of_frames.strides, 0))
        fits = max(self.sizes.classes, self.sizes.frames, self.sizes.labels) < 2**31
        self.empty = not (self.sizes.every and self.sizes.frames and fits)
        self._align: Any = None

    def _load(self) -> Any:
        kernel = AlignmentKernel(self.loss, self.input.dtype)
        threads = min(MAX_THREADS, -(-self.most // WARP) * WARP)
        return self.machine.launcher(kernel, self.sizes.every, threads, (self.shape_words,)), self.most > threads

    def run_value(self, inputs: Inputs, auxiliary: Sequence[int]) -> Any:
        """Returns the scores, and writes the other results to the addresses in ``auxiliary``."""
        device, arrays, scalars, _ = inputs
        if self._align is None:
            self._align = self._load()
        launch, sweeps = self._align
        score = device.empty(self.shape, self.strides, self.result)
        memory = self.prepared(device, arrays, 0, int(scalars[-1]))
        chunks, groups, samples = -(-self.sizes.frames // CHUNK), -(-self.most // WARP), self.sizes.every
        came_from = device.empty((samples * groups * chunks * CHUNK * BALLOTS,), (1,), "int32")
        columns = device.empty((2 * samples * self.sizes.frames,), (1,), "float64") if sweeps else None
        workspace = device.address(came_from), 0 if columns is None else device.address(columns)
        read = device.address(arrays[0]), device.address(memory)
        launch(device.stream(), *read, *(auxiliary or self.no_auxiliary), device.address(score), *workspace)
        return score

    def run_value_and_gradients(self, *_: Any) -> tuple[Any, Any]:
        raise NotImplementedError("an alignment has no gradient")

    def run_gradients(self, *_: Any) -> list[Any]:
        raise NotImplementedError("an alignment has no gradient")


def define_alignment(**fields: Any) -> AlignmentFunction:
    """Makes a definition and enters it in the registry, from which the public function is built."""
    return define_function(AlignmentFunction(**fields))


ALIGNMENT = AlignmentEngine()

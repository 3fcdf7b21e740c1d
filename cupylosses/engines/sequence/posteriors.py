"""Posteriors of the alignments of targets, a function that is not a loss: definition, formula, plan and kernel.

occ[t, n, c] = sum over alignments c_1 .. c_T with c_t = c of prod_t p(t, n, c_t) / the same over all alignments
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf, nan
from typing import Any, ClassVar

from cupylosses import interop
from cupylosses.call import Call, Parts
from cupylosses.definition.base import Definition
from cupylosses.definition.registry import define_function
from cupylosses.engines.base import Engine, Machine, Plan, TensorSpec, Wanted, contiguous
from cupylosses.engines.composite import Inputs
from cupylosses.engines.sequence import checks as sequence_checks
from cupylosses.engines.sequence import reference as sequence_reference
from cupylosses.engines.sequence.call import Static, sizes_of
from cupylosses.engines.sequence.codegen import THREADS
from cupylosses.engines.sequence.functions import SequenceFunction, SequenceFunctionEngine, in_order, wide_dtype
from cupylosses.engines.sequence.plan import FRAMES, SequencePlan
from cupylosses.engines.softmax.engine import row_major
from cupylosses.jit.glue import STORAGE
from cupylosses.jit.kernel import Kernel
from cupylosses.reference_math import detached

#: Number of blocks that a multiprocessor is to hold. Without a bound the compiler spills registers.
RESIDENT = 5
#: Values of the option `of`.
OF = ("classes", "positions")


@dataclass(frozen=True, eq=False, kw_only=True)
class PosteriorFunction(SequenceFunction):
    """Definition of a function whose results are posteriors."""

    @cached_property
    def common(self) -> Mapping[str, Any]:
        defaults = dict(super().common)
        check = defaults.pop("check_targets")
        return {**defaults, "of": OF[0], "check_targets": check}

    @property
    def common_texts(self) -> Mapping[str, str]:
        return {
            **super().common_texts,
            "of": "'classes', or 'positions' for a posterior of each label of the target, which tells repeated labels "
            "apart, and of the blank, which comes last.",
        }

    @property
    def result_text(self) -> str:
        return (
            "The posteriors. For classes they have the shape of `log_probs`; for positions C is replaced by S + 1, "
            "the blank is the last position, and positions past `target_lengths` are 0. Float32 (float64 for float64 "
            "input), on the device and of the library of `log_probs`. The posteriors of a frame add up to 1. They are "
            "0 in frames past `input_lengths`, and in all frames of a target without alignment or with a label or a "
            "length out of range; they are NaN in all frames of a target for which NaN or +inf counts."
        )

    @property
    def gradient_text(self) -> str:
        return f"`log_probs` is differentiable. {self.convention}"


class PosteriorEngine(SequenceFunctionEngine):
    """Engine of posteriors of the alignments of targets to frames."""

    name = "posteriors"
    Definition: ClassVar[Any] = PosteriorFunction

    # Arguments

    def bind(
        self, loss: Any, arrays: tuple[Any, ...], settings: tuple[Any, ...], legacy: tuple[Any, ...] = ()
    ) -> Parts:
        parts = super().bind(loss, arrays, settings)
        static = parts[2]
        if static.by_position and static.concatenated:
            raise sequence_checks.needs_padding(loss, tuple(parts[1][1].shape))
        return parts

    def checked(self, loss: Any, settings: tuple[Any, ...]) -> Static:
        of = dict(zip(loss.setting_names, settings, strict=True))["of"]
        if of not in OF:
            raise ValueError(f"{loss.name}: `of` must be one of {', '.join(map(repr, OF))}, got {of!r}.")
        return super().checked(loss, settings)._replace(by_position=of == OF[1])

    # Plans

    def plan(self, call: Call, tensors: tuple[TensorSpec, ...], promoted: str, machine: Machine) -> Plan:
        return PosteriorPlan(self, call, tensors, promoted, machine)

    # Formulas

    def reference(self, call: Call, promoted: str, readable: bool = True) -> Any:
        xp = interop.namespace(call.arrays[0])
        samples = sequence_reference.samples(xp, call, readable and call.static.check != "off")
        posteriors = _posteriors(xp, samples, call.static, sizes_of(call).labels)
        shape = result_shape(call.static, tuple(call.arrays[0].shape), sizes_of(call).labels)
        return xp.astype(in_order(xp, call.static, shape, posteriors), getattr(xp, promoted), copy=False)

    def floating(self, call: Call) -> Wanted:
        return tuple([i == 0 for i in range(len(call.arrays))])

    # Transforms

    def outputs(self, call: Call, strides: Sequence[tuple[int, ...]], promoted: str) -> list[TensorSpec]:
        shape = result_shape(call.static, tuple(call.arrays[0].shape), sizes_of(call).labels)
        return [row_major(self.promoted(call), shape)]


def result_shape(static: Static, first: tuple[Any, ...], labels: Any) -> tuple[Any, ...]:
    """Returns the shape of the posteriors, from that of the first operand."""
    return (*first[:-1], labels + 1) if static.by_position else first


def _posteriors(xp: Any, samples: sequence_reference.Samples, static: Static, room: int) -> Any:
    """Returns posteriors of shape (T, N, C), or (T, N, room + 1), by the forward-backward recursion in logarithms."""
    x, inside, lengths = samples.x, samples.inside, samples.lengths
    states, skips = sequence_reference.states_of(xp, samples.labels, lengths, static.blank)
    s, last = xp.cumulative_sum(xp.ones_like(states), axis=1) - 1, 2 * lengths[:, None]
    # Large numbers count as infinite, as in the loss.
    low, high = x < -sequence_reference.LARGEST, x > sequence_reference.LARGEST
    x = xp.where(low, xp.full_like(x, -inf), xp.where(high, xp.full_like(x, nan), x))
    nothing = xp.zeros_like(states, dtype=x.dtype) - inf

    def moved(a: Any, by: int) -> Any:
        """Returns for each state the entry ``by`` places before it, or after it if ``by`` is negative."""
        outside = s < by if by > 0 else s >= s.shape[1] + by
        return xp.where(outside, nothing, xp.roll(a, by, axis=1))

    def with_emission(sums: Any, emission: Any) -> Any:
        # A class with log-probability -inf ends a path, even one whose sum is NaN.
        return xp.where((sums == -inf) | (emission == -inf), nothing, sums + emission)

    emissions = [xp.take_along_axis(x[t, ...], states, axis=1) for t in range(x.shape[0])]
    within = [inside[t, ...][:, None] for t in range(x.shape[0])]
    alpha, alphas = xp.where(s == 0, xp.zeros_like(nothing), nothing), []
    for emission, now in zip(emissions, within, strict=True):
        terms = [alpha, moved(alpha, 1), xp.where(skips, moved(alpha, 2), nothing)]
        reached = sequence_reference.log_sum(xp, xp.stack(terms))
        alpha = xp.where(now, with_emission(reached, emission), alpha)
        alphas.append(alpha)
    final = (s == last) | ((s == last - 1) & (last > 0))
    log_z = sequence_reference.log_sum(xp, xp.where(final, alpha, nothing).T)
    beta, posteriors = xp.where(final, xp.zeros_like(nothing), nothing), []
    for alpha, emission, now in zip(alphas[::-1], emissions[::-1], within[::-1], strict=True):
        total = xp.where((alpha == -inf) | (beta == -inf), nothing, alpha + beta)
        none = (total == -inf) | (log_z == -inf)[:, None]
        gamma = xp.exp(xp.where(none, xp.zeros_like(total), total - log_z[:, None]))
        posteriors.append(xp.where(none | ~now, xp.zeros_like(gamma), gamma))
        arriving = with_emission(beta, emission)
        terms = [arriving, moved(arriving, -1), moved(xp.where(skips, arriving, nothing), -2)]
        beta = xp.where(now, sequence_reference.log_sum(xp, xp.stack(terms)), beta)
    if not posteriors:
        return xp.zeros((0, x.shape[1], room + 1), dtype=x.dtype) if static.by_position else x
    gamma = xp.stack(posteriors[::-1])
    broken = inside & (xp.isnan(detached(log_z)) & ~samples.too_long)[None, :]
    broken = broken[..., None]
    spoilt = xp.sum(xp.where(broken, samples.x, xp.zeros_like(x)), axis=(0, 2)) * nan
    gamma = xp.where(broken, spoilt[:, None], gamma)
    if static.by_position:
        pairs = xp.reshape(gamma[..., 1:], (*gamma.shape[:2], -1, 2))[..., 0]
        missing = xp.zeros((*gamma.shape[:2], room - pairs.shape[-1]), dtype=gamma.dtype, **_device(x))
        blanks = xp.sum(xp.where(s % 2 == 0, gamma, xp.zeros_like(gamma)), axis=-1, keepdims=True)
        return xp.concat([pairs, missing, xp.where(broken, gamma[..., :1], blanks)], axis=-1)
    classes = xp.arange(x.shape[-1], dtype=states.dtype, **_device(x))
    one_hot = xp.astype(states[..., None] == classes, x.dtype)
    return xp.stack([xp.matmul(y[:, None, :], one_hot)[:, 0, :] for y in gamma])


def _device(x: Any) -> dict[str, Any]:
    return {"device": x.device} if interop.kind(x) == "torch" else {}


# ----------------------------------------------------------------------------------------------------------------------
# Kernels


@dataclass(frozen=True)
class PosteriorKernel(Kernel):
    """The kernel of this function, which reads the lattice that the recursion of the losses has left.

    ``dtype`` is that of the arithmetic and of the result.
    """

    loss: Definition
    dtype: str
    by_position: bool
    #: True for posteriors of many classes or labels.
    many: bool = False

    kind = "posteriors"
    narrow = False
    files = ("sequence/posteriors.cuh",)
    vec_size = 1
    storage = property(lambda self: (self.dtype,))
    compute = property(lambda self: self.dtype)

    @property
    def title(self) -> str:
        """Description of the kernel, for error messages and file names."""
        return f"{self.loss.name}_{STORAGE[self.dtype][1]}_of_{OF[self.by_position]}{'_many' * self.many}"

    @property
    def entry(self) -> str:
        """Name of the kernel function."""
        return self.title

    @property
    def arguments(self) -> list[str]:
        compute = STORAGE[self.compute][0]
        return ["char* memory", f"const {compute}* lattice", f"{compute}* out"]

    def glue(self) -> str:
        compute = STORAGE[self.compute][0]
        if self.by_position:
            call = "write_positions(shape, out, at.samples, lattice, at.broken, blockIdx.x);"
        else:
            # Posteriors of classes are the negated gradient of the loss.
            nothing = f"static_cast<const {compute}*>(nullptr)"
            call = (
                f"write_gradient<kPlain, {str(self.many).lower()}, false>(shape, {nothing}, out, at.samples, "
                "at.labels, at.links, lattice, at.sums, at.broken, static_cast<const double*>(nullptr), at.used, 0, "
                "-1.0, nullptr, static_cast<int>(frames), false, blockIdx.x);"
            )
        return (
            f'extern "C" __global__ void __launch_bounds__({THREADS["gradient"]}, {RESIDENT})\n'
            f"{self.entry}({', '.join(self.arguments)}, const Sequences shape, int64 frames) {{\n"
            f"  const Buffers<{compute}> at(memory, shape);\n  {call}\n}}\n"
        )


class PosteriorPlan(SequencePlan):
    """The launches of the recursion of the loss, and one that reads its lattice."""

    def __init__(
        self, engine: Engine, call: Call, tensors: tuple[TensorSpec, ...], promoted: str, machine: Machine
    ) -> None:
        super().__init__(engine, call, tensors, promoted, machine)
        self.result = wide_dtype(promoted)
        spec = contiguous(self.result, result_shape(call.static, tensors[0].shape, self.sizes.labels))
        self.shape, self.strides, self.written = spec.shape, spec.strides, spec
        # The reference formula computes derivatives.
        self.differentiable = self.speculative = self.nothing
        self._write: Any = None

    def run_value(self, inputs: Inputs, auxiliary: Sequence[int]) -> Any:
        device, arrays, scalars, _ = inputs
        if self._write is None:
            of_many = self.many and not self.static.by_position
            kernel = PosteriorKernel(self.loss, self.result, self.static.by_position, of_many)
            frames = FRAMES if self.static.by_position else self.gradient_frames(self.result)
            blocks = self.sizes.every * -(-self.sizes.frames // frames)
            shared = 0
            if not self.static.by_position:
                blocks, shared = blocks * self.windows, self.gradient_shared
            self._write = self.machine.launcher(kernel, blocks, THREADS["gradient"], (self.shape_words, frames), shared)
        posteriors = device.empty(self.shape, self.strides, self.result)
        memory, lattice = self.walk(device, arrays, 0, int(scalars[-1]))
        self._write(device.stream(), *[device.address(x) for x in (memory, lattice, posteriors)])
        return posteriors

    def run_value_and_gradients(self, *_: Any) -> tuple[Any, Any]:
        raise NotImplementedError("derivatives are the formula's")

    def run_gradients(self, *_: Any) -> list[Any]:
        raise NotImplementedError("derivatives are the formula's")


def define_posteriors(**fields: Any) -> PosteriorFunction:
    """Makes a definition and enters it in the registry, from which the public function is built."""
    return define_function(PosteriorFunction(**fields))


POSTERIORS = PosteriorEngine()

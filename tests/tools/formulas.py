"""Formulas without the kernels around them: the functor of a loss, compiled alone and evaluated at given points.

Kernels of one loss differ in layout, access and reduction; their functor is always the same. One translation unit
evaluates it, with every gradient, in two dtypes, so a few small units check a formula instead of hundreds of kernels.
:func:`function` is the loss computed that way, with the signature of the public function:

    formula = formulas.function(F.huber_loss.loss)
    formula(input=x, target=y, delta=0.5, reduction="none").sum().backward()

CPU tensors run the unit on the host, CUDA tensors on the GPU. It lacks everything that a kernel adds: loads, layouts,
mixtures of dtypes, sums and the one-pass protocol.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import Function

from cupylosses.definition.base import MASK
from cupylosses.engines.pointwise import codegen as pointwise_codegen
from cupylosses.engines.pointwise.codegen import PointwiseKernel
from cupylosses.engines.pointwise.definition import Loss, modified
from cupylosses.engines.pointwise.jvp import TangentLoss, along_tangents
from cupylosses.jit import compiler
from cupylosses.jit.glue import STORAGE
from cupylosses.jit.kernel import Kernel
from cupylosses.jit.sources import FUNCTOR, nested
from cupylosses.testing.host import run_source
from cupylosses.testing.tolerance import dtype_name

if TYPE_CHECKING:
    from torch import Tensor

#: Dtypes of one unit. Arithmetic for 16-bit results keeps fewer terms; one constant selects it for a whole unit.
WIDE, NARROW = ("float32", "float64"), ("float16", "bfloat16")

#: Numbers of blocks and threads on a GPU, whatever the number of points.
GRID, BLOCK = 64, 128


@dataclass(frozen=True)
class Unit(Kernel):
    """A translation unit: the functor of a loss with these flags, for operands that all have one of two dtypes.

    Its kernel writes values and gradients per element. A null ``grad_output`` means an upstream gradient of 1.
    """

    loss: Loss
    flags: tuple[int, ...]
    dtypes: tuple[str, ...]

    @property
    def storage(self) -> tuple[str, ...]:
        return (self.dtypes[0],) * len(self.loss.operands)

    @property
    def compute(self) -> str:
        return "float32"

    @property
    def title(self) -> str:
        flags = "".join(map(str, self.flags))
        return "_".join(
            [pointwise_codegen.title(self.loss), "formula", *self.dtypes, *([f"flags{flags}"] if flags else [])]
        )

    @property
    def entry(self) -> str:
        return f"{self.loss.name}_formula"

    @property
    def differentiated(self) -> tuple[bool, ...]:
        """True for each operand with a gradient: all except masks."""
        return tuple(x is not MASK for x in self.loss.operands)

    @property
    def pointers(self) -> list[str]:
        """Declarations of the kernel's pointers."""
        names = [x.name for x in self.loss.operands]
        gradients = [f"void* {x}_gradients" for x, w in zip(names, self.differentiated, strict=True) if w]
        return [*(f"const void* {x}_" for x in names), *gradients, "void* values", "const void* grad_output"]

    @property
    def files(self) -> tuple[str, ...]:
        return nested(FUNCTOR) if isinstance(self.loss, TangentLoss) else FUNCTOR

    @property
    def narrow(self) -> bool:
        return self.dtypes == NARROW and not isinstance(self.loss, TangentLoss)

    @property
    def arguments(self) -> list[str]:
        """The pointers, the dtype, the number of points, and the loss's parameters."""
        return [*self.pointers, "int64 dtype", "int64 count", *(f"double {x.name}_" for x in self.loss.parameters)]

    def glue(self) -> str:
        return _glue(self)

    def launch(
        self, dtype: str, count: int, addresses: Sequence[int], parameters: Sequence[float], on_gpu: bool
    ) -> None:
        """Evaluates ``count`` points; ``addresses`` are those of :attr:`pointers`."""
        arguments = (*addresses, self.dtypes.index(dtype), count, *map(float, parameters))
        if on_gpu:
            _launcher(self)(torch.cuda.current_stream().cuda_stream, *arguments)
        else:
            text = self.source()
            run_source(self.entry, text, arguments, 1, 1, dtype != "float64", check_races=False, sanitize=())


def _glue(unit: Unit) -> str:
    arithmetic = {x: "float64" if x == "float64" else "float32" for x in unit.dtypes}
    names = [x.split()[-1].lstrip("*") for x in unit.pointers]
    parameters = [f"{x.name}_" for x in unit.loss.parameters]
    lines = []
    for compute in dict.fromkeys(arithmetic.values()):
        lines += [f"namespace in_{compute} {{", *_evaluation(unit, compute), "}"]
    lines += [
        'extern "C" __global__ void',
        f"{unit.entry}({', '.join(unit.arguments)}) {{",
        "  const int64 first = blockIdx.x * static_cast<int64>(blockDim.x) + threadIdx.x;",
        "  for (int64 i = first; i < count; i += gridDim.x * static_cast<int64>(blockDim.x)) {",
    ]
    for index, dtype in enumerate(unit.dtypes):
        call = f"in_{arithmetic[dtype]}::evaluate<{STORAGE[dtype][0]}>({', '.join(['i', *names, *parameters])});"
        lines.append(f"    if (dtype == {index}) {call}")
    return "\n".join([*lines, "  }", "}", ""])


def _evaluation(unit: Unit, compute: str) -> list[str]:
    """Returns the functor in one arithmetic type, and its evaluation at point ``i``."""
    operands = unit.loss.operands
    access = ("stream",) * len(operands) + ("none",)
    variant = PointwiseKernel(
        unit.loss, unit.flags, "elements", unit.storage, compute, "flat", 1, access, unit.differentiated, False, compute
    )
    mask = sum(1 << i for i, wanted in enumerate(unit.differentiated) if wanted)
    kinds = ["Storage" if wanted else "bool" for wanted in unit.differentiated]
    points = [
        f"variable<{mask}u, {i}>(widen<Compute>(static_cast<const {kind}*>({operand.name}_)[i]))"
        for i, (operand, kind) in enumerate(zip(operands, kinds, strict=True))
    ]
    declared = ["int64 i", *unit.pointers, *(f"double {x.name}_" for x in unit.loss.parameters)]
    lines = [
        pointwise_codegen.functor(variant),
        "template <class Storage>",
        f"__device__ __forceinline__ void evaluate({', '.join(declared)}) {{",
        "  using Compute = Loss::Compute;",
        f"  const Loss loss = {pointwise_codegen.loss_argument(variant)};",
        f"  const auto y = loss({', '.join(points)});",
        "  const Compute upstream = grad_output ? widen<Compute>(static_cast<const Storage*>(grad_output)[i]) : 1;",
        "  static_cast<Storage*>(values)[i] = Narrow<Storage>::from(y.value);",
    ]
    for i, (operand, wanted) in enumerate(zip(operands, unit.differentiated, strict=True)):
        # As in the kernels (pointwise.cuh): a loss that is NaN has gradients of NaN.
        gradient = f"y.value != y.value ? y.value : tangent_or_zero(y, {i}) * upstream"
        if wanted:
            lines.append(f"  static_cast<Storage*>({operand.name}_gradients)[i] = Narrow<Storage>::from({gradient});")
    return [*lines, "}"]


@cache
def _launcher(unit: Unit) -> compiler.Launcher:
    return compiler.Launcher(unit, GRID, BLOCK, ())


# ----------------------------------------------------------------------------------------------------------------------
# Tensors


@dataclass(frozen=True)
class Formula:
    """A loss, modified or not, with its options, for use by autograd."""

    loss: Loss
    flags: tuple[int, ...]
    parameters: tuple[float, ...]

    def evaluate(
        self, operands: Sequence[Tensor], grad_output: Tensor | None = None
    ) -> tuple[Tensor, list[Tensor | None]]:
        """Returns value and gradients of every element.

        Operands are contiguous and have one shape and, except for masks, one dtype.
        """
        kinds = {x.dtype for o, x in zip(self.loss.operands, operands, strict=True) if o is not MASK}
        if len(kinds) != 1 or len({x.shape for x in operands}) != 1:
            raise ValueError(f"{self.loss.name}: a formula takes operands of one dtype and shape, got {kinds}")
        (kind,) = kinds
        dtype = dtype_name(kind)
        unit = Unit(self.loss, self.flags, NARROW if dtype in NARROW else WIDE)
        value = torch.empty_like(operands[0])
        gradients = [torch.empty_like(x) if w else None for x, w in zip(operands, unit.differentiated, strict=True)]
        given = [x.contiguous() for x in operands]
        upstream = None if grad_output is None else grad_output.to(kind).contiguous()
        arrays = [*given, *(x for x in gradients if x is not None), value]
        addresses = [*(x.data_ptr() for x in arrays), 0 if upstream is None else upstream.data_ptr()]
        unit.launch(dtype, value.numel(), addresses, self.parameters, value.is_cuda)
        return value, gradients


class _Elements(Function):
    """The loss of every element."""

    @staticmethod
    def forward(ctx: Any, formula: Formula, *operands: Tensor) -> Tensor:
        ctx.formula = formula
        ctx.save_for_backward(*operands)
        return formula.evaluate(operands)[0]

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        return None, *_Gradients.apply(ctx.formula, grad_output, *ctx.saved_tensors)


class _Gradients(Function):
    """The gradients of every element; their own derivatives are directional derivatives of the loss."""

    @staticmethod
    def forward(ctx: Any, formula: Formula, grad_output: Tensor, *operands: Tensor) -> Any:
        ctx.formula = formula
        ctx.save_for_backward(grad_output, *operands)
        return tuple(formula.evaluate(operands, grad_output)[1])

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> Any:
        grad_output, *operands = ctx.saved_tensors
        loss, along = ctx.formula.loss, tuple(x is not MASK for x in ctx.formula.loss.operands)
        zero = torch.zeros_like(grad_output)
        directions = [zero if c is None else c for c, moves in zip(cotangents, along, strict=True) if moves]
        moved = replace(ctx.formula, loss=along_tangents(loss, along))
        value, gradients = moved.evaluate([*operands, *directions], grad_output)
        return None, value, *gradients[: len(operands)]


def function(loss: Loss) -> Callable[..., Tensor]:
    """Returns a loss as a function of torch tensors, computed by its formula alone and differentiable twice.

    It takes operands, ``weight``, ``mask`` and options by name, like the public function, and the reductions "none" and
    "sum". Rows are not averaged: for a loss whose elements are means of rows, "none" returns the terms of the means.
    """

    def call(*, reduction: str = "none", **given: Any) -> Tensor:
        if reduction not in ("none", "sum"):
            raise ValueError(f"{loss.name}: a formula alone is reduced by 'none' or 'sum', got {reduction!r}")
        numbers = frozenset(x.name for x in loss.operands if given.get(x.name) is None)
        weight = "array" if given.get("weight") is not None else None
        formed = modified(loss, numbers, weight, given.get("mask") is not None)
        arrays = [given.pop(x.name) for x in formed.operands]
        values = loss.values({name: x for name, x in given.items() if x is not None})
        own = [float(values[x.name]) for x in loss.parameters]
        defaults = [float(x.default) for x in loss.operands if x.name in numbers]
        formula = Formula(formed, loss.choose(values), (*own, *defaults))
        elements = _Elements.apply(formula, *(x.contiguous() for x in torch.broadcast_tensors(*arrays)))
        return elements if reduction == "none" else elements.double().sum().to(elements.dtype)

    return call

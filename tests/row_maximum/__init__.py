"""Engine of the tests: the largest absolute value of each row. This folder contains all of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from cupylosses import checks, interop
from cupylosses.adoption import adopted
from cupylosses.build import function_of
from cupylosses.call import Call, Parts
from cupylosses.definition.base import Definition, Operand
from cupylosses.engines.base import Apart, Engine, Machine, Plan, Step, TensorSpec, Wanted, contiguous
from cupylosses.engines.device import EXPECTATIONS
from cupylosses.interop import ITEMSIZE
from cupylosses.jit import compiler
from cupylosses.jit.glue import STORAGE
from cupylosses.jit.kernel import Kernel

# ----------------------------------------------------------------------------------------------------------------------
# Definition


@dataclass(frozen=True, eq=False, kw_only=True)
class RowLoss(Definition):
    """Row loss without parameters."""

    @property
    def identity(self) -> tuple[Any, ...]:
        return (self.operands,)

    @property
    def common(self) -> Mapping[str, Any]:
        return {"reduction": "mean"}

    @property
    def keywords(self) -> tuple[str, ...]:
        return ()

    @property
    def reductions(self) -> tuple[str, ...]:
        return ("none", "mean", "sum")

    @property
    def array_names(self) -> tuple[str, ...]:
        return tuple([x.name for x in self.operands])

    @property
    def setting_names(self) -> tuple[str, ...]:
        return ("reduction",)


class Static(NamedTuple):
    """Reduction and dtype of the result; ``moving`` is True if the call is a derivative along a tangent."""

    reduction: str
    out_dtype: str | None = None
    moving: bool = False


# ----------------------------------------------------------------------------------------------------------------------
# Code generator


@dataclass(frozen=True)
class RowKernel(Kernel):
    """Kernel of one stage."""

    loss: RowLoss
    kind: str
    dtype: str
    result: str
    compute: str
    gradient: bool

    @property
    def storage(self) -> tuple[str, ...]:
        return (self.dtype,)

    @property
    def title(self) -> str:
        return "_".join([self.loss.name, self.kind, self.dtype, self.result, "grad" * self.gradient])

    @property
    def entry(self) -> str:
        return f"{self.loss.name}_{self.kind}"

    @property
    def files(self) -> tuple[str, ...]:
        return (str(Path(__file__).with_name("row_maximum.cuh")),)

    @property
    def narrow(self) -> bool:
        return False

    @property
    def arguments(self) -> list[str]:
        storage, result = STORAGE[self.dtype][0], STORAGE[self.result][0]
        own = {
            "value": ["double* memory", f"{result}* value"],
            "value_and_gradient": [
                "double* memory",
                f"{result}* value",
                f"const {result}* grad_output",
                "double* expected_grad_output",
                "double* used_grad_output",
            ],
            "unreduced": [f"{result}* values"],
            "gradient": [f"const {result}* grad_output"],
        }[self.kind]
        gradients = [f"{storage}* gradients"] if self.gradient else []
        return [f"const {storage}* input", *gradients, *own, "double divisor", "double scale"]

    def glue(self) -> str:
        result = STORAGE[self.result][0]
        values = "values" if self.kind == "unreduced" else f"static_cast<{result}*>(nullptr)"
        gradients = "gradients" if self.gradient else f"static_cast<{STORAGE[self.dtype][0]}*>(nullptr)"
        scale = "[&](int64 r) { return FACTOR; }"
        call = f"take_rows(input, {gradients}, {values}, rows, columns, {scale});"
        total = (
            f"const double total = {call}\n  if (threadIdx.x == 0) *value = Narrow<{result}>::from(total / divisor);"
        )
        body = {
            "value": total.replace("FACTOR", "1.0"),
            "value_and_gradient": "const bool backward = grad_output != nullptr;\n"
            "  const double given = given_or_expected(grad_output, expected_grad_output);\n"
            "  if (backward && !grad_scale_is_stale(given, used_grad_output, expected_grad_output)) return;\n"
            "  SpeculativeScale<double> known(grad_output, expected_grad_output, used_grad_output, scale);\n"
            "  known.factor();\n"
            f"  const double total = {call.replace('FACTOR', 'known.factor()')}\n"
            f"  if (!backward && threadIdx.x == 0) *value = Narrow<{result}>::from(total / divisor);",
            "unreduced": call.replace("FACTOR", "1.0"),
            "gradient": call.replace("FACTOR", "widen<double>(grad_output[r]) * scale"),
        }[self.kind]
        arguments = ", ".join([*self.arguments, "int64 rows", "int64 columns"])
        return f'extern "C" __global__ void {self.entry}({arguments}) {{\n  {body}\n}}\n'


# ----------------------------------------------------------------------------------------------------------------------
# Plan


class RowPlan(Plan):
    """Plan with a single warp, which processes all rows."""

    def __init__(
        self, engine: Engine, call: Call, tensors: tuple[TensorSpec, ...], promoted: str, machine: Machine
    ) -> None:
        super().__init__(engine, call, tensors, promoted, machine)
        first = tensors[0]
        self.result = call.static.out_dtype or promoted
        *rows, self.columns = first.shape
        self.rows = prod(rows)
        # Derivatives along a tangent run no kernel: the reference formula computes them.
        self.empty = prod(first.shape) == 0 or call.static.moving
        self.scalar = call.static.reduction != "none"
        spec = contiguous(self.result, () if self.scalar else tuple(rows))
        self.shape, self.strides = spec.shape, spec.strides
        self.divisor = float(self.rows) if call.static.reduction == "mean" else 1.0
        self.differentiable = self.speculative = (True,) * len(tensors)
        self.partials, self.records, self.slot = 0, 1, hash((self.loss.name, first.shape)) % EXPECTATIONS
        self._launchers: dict[tuple[str, bool], compiler.Launcher] = {}

    def launcher(self, stage: str, wanted: Wanted, counted: bool) -> compiler.Launcher:
        found = self._launchers.get((stage, wanted[0]))
        if found is None:
            loss: Any = self.loss
            kernel = RowKernel(loss, stage, self.tensors[0].dtype, self.result, self.compute, wanted[0])
            found = self.machine.launcher(kernel, 1, 32, (self.rows, self.columns))
            self._launchers[stage, wanted[0]] = found
        return found

    def unreduced_step(self, counted: bool) -> Step:
        return Step((self.launcher("unreduced", self.nothing, counted),))

    def gradient_steps(
        self, wanted: Wanted, upstream: tuple[tuple[int, ...], int] | None, counted: bool
    ) -> Sequence[Step]:
        return [Step((self.launcher("gradient", wanted, counted),), (0,))]

    def upstream_strides(self) -> tuple[int, ...] | None:
        return self.strides


# ----------------------------------------------------------------------------------------------------------------------
# Engine and reference


class RowEngine(Engine):
    """Engine for contiguous rows; other layouts are copied."""

    name = "row maximum"
    Definition = RowLoss
    Static = Static

    def bind(
        self, loss: RowLoss, arrays: tuple[Any, ...], settings: tuple[Any, ...], legacy: tuple[Any, ...] = ()
    ) -> Parts:
        _, arrays = adopted(loss, loss.array_names, arrays)
        return loss, arrays, Static(checks.reduction(loss, settings[0])), (), None

    def names(self, call: Call) -> list[str]:
        return [x.name for x in call.loss.operands]

    def check(self, call: Call) -> None:
        x, name = call.arrays[0], call.loss.name
        if checks.dtype_name(x) not in checks.FLOATING:
            raise TypeError(f"{name}: `input` must be floating, got {checks.dtype_name(x)}. Convert it.")
        if len(x.shape) < 1:
            raise ValueError(f"{name}: `input` must have rows, got no dimensions. Pass shape (1, C).")

    def promoted(self, call: Call, zero_d_widens: bool = False) -> str:
        return checks.dtype_name(call.arrays[0])

    def plan(self, call: Call, tensors: tuple[TensorSpec, ...], promoted: str, machine: Machine) -> RowPlan:
        return RowPlan(self, call, tensors, promoted, machine)

    def copies(
        self, call: Call, tensors: tuple[TensorSpec, ...], machine: Machine, writes: bool
    ) -> Mapping[int, tuple[int, ...]]:
        wanted = contiguous(tensors[0].dtype, tensors[0].shape).strides
        aligned = tensors[0].misalignment % ITEMSIZE[tensors[0].dtype] == 0
        return {} if tensors[0].strides == wanted and aligned else {0: wanted}

    def reference(self, call: Call, promoted: str, readable: bool = True) -> Any:
        x = call.arrays[0]
        xp = interop.namespace(x)
        size = xp.abs(x)
        # A running count instead of `arange`, so that the indices are on the device of the row.
        classes = xp.cumulative_sum(xp.ones_like(size, dtype=xp.int64), axis=-1) - 1
        first = xp.argmax(size, axis=-1)[..., None] == classes
        found = xp.sum(xp.where(first, size, xp.zeros_like(size)), axis=-1, dtype=xp.float64)
        if call.static.reduction != "none":
            found = xp.sum(found) / (prod(x.shape[:-1]) if call.static.reduction == "mean" else 1)
        return xp.astype(found, getattr(xp, call.static.out_dtype or promoted))

    def floating(self, call: Call) -> Wanted:
        return (True,) * len(call.arrays)

    def outputs(self, call: Call, strides: Sequence[tuple[int, ...]], promoted: str) -> list[TensorSpec]:
        shape = tuple(call.arrays[0].shape[:-1]) if call.static.reduction == "none" else ()
        return [contiguous(call.static.out_dtype or promoted, shape)]

    def apart(self, call: Call, promoted: str, wanted: Wanted, traced: bool) -> Apart | None:
        """Computes values row by row, for which a batch is one more dimension of rows."""
        if traced or call.static.reduction == "none":
            return None
        per_row = call._replace(static=call.static._replace(reduction="none", out_dtype="float64"))
        divisor = prod(call.arrays[0].shape[:-1]) if call.static.reduction == "mean" else 1

        def finish(xp: Any, values: list[Any]) -> Any:
            return xp.astype(xp.sum(values[0]) / divisor, getattr(xp, promoted))

        return Apart((per_row,), finish)

    def divided_by(self, call: Call, divisor: Any, grad_output: Any) -> tuple[Call, Any]:
        xp = interop.namespace(grad_output)
        upstream = xp.astype(grad_output, xp.float64) / divisor
        static = Static("none", "float64")
        return call._replace(static=static), xp.broadcast_to(upstream, tuple(call.arrays[0].shape[:-1]))

    def jvp(self, call: Call, moving: Wanted, tangents: tuple[Any, ...]) -> Call:
        return call._replace(static=call.static._replace(moving=True), arrays=(*call.arrays, *tangents))

    def primal(self, call: Call) -> tuple[Call, Wanted, tuple[Any, ...]]:
        base = call._replace(static=call.static._replace(moving=False), arrays=call.arrays[:1])
        return base, (True,), call.arrays[1:]

    def batched(self, call: Call, dims: Sequence[int | None], size: int) -> Call | None:
        pairs = zip(call.arrays, dims, strict=True)
        arrays = [x.expand(size, *x.shape) if d is None else x.movedim(d, 0) for x, d in pairs]
        return call._replace(arrays=tuple(arrays))

    def placeholders(
        self, loss: RowLoss, dtypes: Sequence[str], shapes: Sequence[tuple[int, ...]], options: Mapping[str, Any]
    ) -> dict[str, tuple[str, tuple[int, ...]]]:
        return {"input": (dtypes[0], tuple(shapes[0]))}


ENGINE = RowEngine()

row_maximum = function_of(
    RowLoss(
        name="row_maximum",
        summary="Largest absolute value of each row.",
        formula="max_c |input_c|",
        operands=(Operand("input", "The rows, in the last dimension."),),
        convention="Of several largest values the first has the gradient; that of 0 is 0.",
    ),
    __name__,
)

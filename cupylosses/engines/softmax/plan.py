"""Plans of the row engine and their execution, as ``engine.py`` is for the pointwise one: which kernels run for a call
of a loss of rows, with which arguments. No array library is named here.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, ClassVar, NamedTuple

from cupylosses.engines.device import EXPECTATIONS, Device, Divisor
from cupylosses.engines.softmax import layout as softmax_layout
from cupylosses.engines.softmax.codegen import RowVariant
from cupylosses.engines.softmax.definition import RowLoss
from cupylosses.engines.strides import broadcast_strides, dense_strides
from cupylosses.interop import ITEMSIZE
from cupylosses.jit import compiler, gpu


@dataclass(frozen=True)
class RowTensor:
    """What a plan needs to know of an array; ``misalignment`` is its address modulo 16."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    misalignment: int = 0


class Status(ctypes.Structure):
    """``RowStatus`` of ``kernels/softmax/rows.cuh``."""

    _fields_ = (
        ("code", ctypes.c_uint),
        ("unused", ctypes.c_uint),
        ("row", ctypes.c_longlong),
        ("label", ctypes.c_longlong),
        ("classes", ctypes.c_longlong),
        ("site", ctypes.c_longlong),
    )


class Arguments(NamedTuple):
    """What of a call is not in its plan: addresses, of which some are 0, and numbers."""

    input: int
    target: int
    weight: int
    mask: int
    ignored: int
    scale: float
    softcap: float
    parameters: tuple[float, ...]
    #: Whether labels out of range are reported.
    checked: bool


@dataclass
class Outputs:
    """Addresses of what is stored per row, 0 for what is not."""

    values: int = 0
    lse: int = 0
    correct: int = 0
    slopes: int = 0

    @property
    def any(self) -> int:
        """Not 0 if any of them is wanted."""
        return self.values | self.lse | self.correct | self.slopes


class RowPlan:
    """Everything about a call but addresses and numbers. With ``directions``, of its second derivatives along these."""

    #: Where labels are met, for messages: the losses and shapes of rows that plans were made for, each once.
    sites: ClassVar[list[tuple[RowLoss, tuple[int, ...]]]] = []
    _numbers: ClassVar[dict[tuple[RowLoss, tuple[int, ...]], int]] = {}
    _numbering: ClassVar[Any] = threading.Lock()

    def __init__(
        self,
        loss: RowLoss,
        input: RowTensor,
        target: RowTensor,
        weight: RowTensor | None,
        mask: RowTensor | None,
        class_dim: int,
        promoted: str,
        out_dtype: str | None,
        smoothed: bool,
        capped: bool,
        processors: int,
        launcher: Callable[..., Any] | None = None,
        chip: gpu.Chip | None = None,
        directions: RowTensor | None = None,
    ) -> None:
        self.loss, self.input, self.class_dim = loss, input, class_dim
        self.promoted, self.result = promoted, out_dtype or promoted
        self.compute = "float64" if promoted == "float64" else "float32"
        self.classes = input.shape[class_dim]
        self.shape = without(input.shape, class_dim)
        self.rows = prod(self.shape)
        self.processors, self.launcher = processors, launcher or compiler.Launcher
        self.gradient_strides = dense_strides(input.shape, input.strides)
        self.result_strides = dense_strides(self.shape, (0,) * len(self.shape))
        #: Whether the gradient can be written over the logits.
        self.without_gaps = input.strides == self.gradient_strides and input.misalignment == 0
        self._dtypes = (input.dtype, target.dtype, weight.dtype if weight else "", mask.dtype if mask else "")
        self._smoothed, self._capped = smoothed, capped
        #: As ``kOnce`` of ``kernels/softmax/rows.cuh``.
        self._once = capped and not smoothed
        masks = broadcast_strides(mask.shape, mask.strides, self.shape) if mask else (0,) * len(self.shape)
        size = ITEMSIZE[input.dtype]
        given = (
            self.shape,
            self.classes,
            rows_of(input.strides, class_dim, size, input.misalignment),
            rows_of(self.gradient_strides, class_dim, size, 0),
            (target.strides, masks, self.result_strides),
        )
        self._labels = target.strides, masks
        if directions is not None:
            along = rows_of(directions.strides, class_dim, size, directions.misalignment)
            self.layout = softmax_layout.second_layout(*given, along, loss.softmax)
        else:
            if not loss.softmax:
                self.layout = softmax_layout.gather_layout(*given, chip or gpu.Chip())
            else:
                kept = ITEMSIZE[self.compute] if self._once else 0
                self.layout = softmax_layout.row_layout(*given, chip or gpu.Chip(), kept, smoothed or capped)
        self.slot = hash((loss.name, self.shape, self.classes, self._dtypes, self.result)) % EXPECTATIONS
        with self._numbering:  # plans are made in a warm-up's thread, too
            self.site = self._numbers.setdefault((loss, self.shape), len(self.sites))
            if self.site == len(self.sites):
                self.sites.append((loss, self.shape))
        self._launchers: dict[tuple[str, bool], Any] = {}

    @cached_property
    def blocks(self) -> int:
        return softmax_layout.blocks(self.layout, self.layout.groups, self.processors)

    @property
    def notes(self) -> int:
        """How many notes are left of the grad_output that was expected: one for each group by each of its blocks."""
        return self.layout.groups * self.layout.cluster

    def run(
        self,
        kind: str,
        device: Device,
        stream: int,
        given: Arguments,
        divisor: Divisor,
        own: Sequence[int | float],
        gradients: int = 0,
        outputs: Outputs | None = None,
    ) -> None:
        """Launches a kernel; ``own`` are the arguments of its entry point alone."""
        out = outputs or Outputs()
        launcher = self._launchers.get((kind, divisor.counted))
        if launcher is None:
            launcher = self._launchers[kind, divisor.counted] = self._load(kind, divisor.counted)
        status = device.status() if given.checked else 0
        launcher(
            stream, given.input, gradients, given.target, given.weight, given.mask, given.ignored, status,
            self.site, out.values, out.lse, out.correct, out.slopes, out.any, *own, given.scale, given.softcap,
            *given.parameters, *divisor.arguments,
        )  # fmt: skip

    def _load(self, kind: str, counted: bool) -> Any:
        x, (input, label, weight, mask) = self.layout, self._dtypes
        layout, width, threads, groups, shared = x.kind, x.width, x.threads, x.groups, x.shared
        blocks, cluster, many, words = self.blocks, x.cluster, x.many, x.words
        if kind in ("count", "apply"):
            shared, cluster = 0, 1
        if kind in ("value", "values") and x.streamed and not self._once:
            layout, threads, shared, cluster = "streamed", x.streamed, 0, 1
            width = x.threads * x.cluster
            blocks = min(groups, self.processors * (softmax_layout.STREAMED_THREADS // threads))
        elif kind in ("value", "values"):
            blocks = softmax_layout.blocks(x, x.groups, self.processors, gradient=False)
        elif kind == "count":
            layout, threads = "lanes", softmax_layout.THREADS
            weight = weight if self.loss.mean_of_weights else ""
            groups = self.count_groups
            many, words = softmax_layout.label_words(self.shape, self.classes, *self._labels)
            blocks = min(-(-groups // (threads // gpu.WARP)), 8 * self.processors)
        elif kind == "apply" and layout not in ("columns", "short", "gather"):
            # Rows are cut into pieces where there are too few to fill a GPU.
            layout = "block" if layout == "long" else layout
            width, threads = (x.width, x.threads) if layout == "lanes" else (x.width, min(x.threads, 512))
            per = threads // x.width if layout == "lanes" else 1
            vectors = -(-self.classes // x.lanes)
            most = max(1, vectors // (threads * softmax_layout.LONG_VECTORS))
            groups = max(1, min(most, -(-4 * self.processors // max(1, self.rows))))  # pieces
            blocks = max(1, min(-(-self.rows * groups // per), self.processors * (2048 // threads)))
        variant = RowVariant(
            self.loss, kind, layout, x.lanes, input, label, weight, mask, self.result, self.compute,
            many, self._smoothed, self._capped, counted, cluster, x.ahead and "gradient" in kind,
        )  # fmt: skip
        return self.launcher(variant, blocks, threads, (groups, width, words), shared)

    @cached_property
    def count_groups(self) -> int:
        """The partial sums of the count."""
        return max(1, min(-(-self.rows // (4 * gpu.WARP)), softmax_layout.MAX_GROUPS))


def without(x: Sequence[int], dim: int) -> tuple[int, ...]:
    return (*x[:dim], *x[dim + 1 :])


def rows_of(strides: Sequence[int], dim: int, itemsize: int, misalignment: int) -> softmax_layout.Rows:
    return softmax_layout.Rows(without(strides, dim), strides[dim], itemsize, misalignment)


class Promise:
    """A gradient that the forward kernel wrote for an expected grad_output."""

    __slots__ = ("address", "captured", "gradient", "notes")

    def __init__(self, gradient: Any, notes: Any, address: int, captured: bool) -> None:
        self.gradient, self.notes, self.address, self.captured = gradient, notes, address, captured


def count(plan: RowPlan, device: Device, given: Arguments) -> Divisor:
    """The sum of the weights of the labels that count, or their number, on the device."""
    stream = device.stream()
    array = device.empty((), (), "float64")
    _memory, memory = device.workspace(stream, plan.count_groups, stream != 0 and device.capturing())
    plan.run("count", device, stream, given, Divisor(1.0), (memory, device.address(array)))
    return Divisor(1.0, array, device.address(array))


def reduce(plan: RowPlan, device: Device, given: Arguments, divisor: Divisor, outputs: Outputs) -> Any:
    """The reduced value."""
    stream = device.stream()
    value = device.empty((), (), plan.result)
    _memory, memory = device.workspace(stream, plan.layout.groups, stream != 0 and device.capturing())
    own = (memory, device.address(value))
    plan.run("value", device, stream, given, divisor, own, outputs=outputs)
    return value


def reduce_with_gradient(
    plan: RowPlan, device: Device, given: Arguments, divisor: Divisor, outputs: Outputs
) -> tuple[Any, Promise]:
    """The reduced value, and the gradient for the expected grad_output."""
    stream = device.stream()
    capturing = stream != 0 and device.capturing()
    value = device.empty((), (), plan.result)
    gradient = new_gradient(plan, device)
    notes = device.empty((plan.notes,), (1,), "float64")
    _memory, memory = device.workspace(stream, plan.layout.groups, capturing)
    noted = device.address(notes)
    own = (memory, device.address(value), device.expectation(plan.slot), noted)
    plan.run("value_and_gradient", device, stream, given, divisor, own, device.address(gradient), outputs)
    return value, Promise(gradient, notes, noted, capturing)


def verified_gradient(
    plan: RowPlan, device: Device, given: Arguments, divisor: Divisor, grad_output: int, promise: Promise | None
) -> Any:
    """The gradient for the true grad_output: the promised one if it was expected, computed now otherwise."""
    stream = device.stream()
    if promise is not None and not promise.captured and stream != 0 and device.capturing():
        promise = None  # the graph will run without the forward that made the promise
    gradient = promise.gradient if promise else new_gradient(plan, device)
    own = (grad_output, promise.address if promise else 0, device.expectation(plan.slot))
    plan.run("verify_gradient", device, stream, given, divisor, own, device.address(gradient))
    return gradient


def values(plan: RowPlan, device: Device, given: Arguments, outputs: Outputs) -> Any:
    """A value per row."""
    found = device.empty(plan.shape, plan.result_strides, plan.result)
    outputs.values = device.address(found)
    plan.run("values", device, device.stream(), given, Divisor(1.0), (), outputs=outputs)
    return found


def apply(
    plan: RowPlan,
    device: Device,
    given: Arguments,
    divisor: Divisor,
    slopes: int,
    grad_output: int,
    per_row: bool,
    gradient: int,
) -> None:
    """Writes the gradient from the slopes of each row, for a grad_output per row or one for all."""
    own = (grad_output, int(per_row))
    plan.run("apply", device, device.stream(), given, divisor, own, gradient, Outputs(slopes=slopes))


def second(plan: RowPlan, device: Device, given: Arguments, directions: int, grad_output: int) -> tuple[Any, Any]:
    """The derivatives along directions of a value per row, and of its gradient for a grad_output per row."""
    along = device.empty(plan.shape, plan.result_strides, plan.result)
    changed = new_gradient(plan, device)
    outputs = Outputs(values=device.address(along))
    own = (directions, grad_output)
    plan.run("second", device, device.stream(), given, Divisor(1.0), own, device.address(changed), outputs)
    return along, changed


def new_gradient(plan: RowPlan, device: Device) -> Any:
    return device.empty(plan.input.shape, plan.gradient_strides, plan.input.dtype)


def new_slopes(plan: RowPlan, device: Device) -> Any:
    """Room for what `apply` needs of each row."""
    return device.empty((4 * plan.rows,), (1,), plan.compute)

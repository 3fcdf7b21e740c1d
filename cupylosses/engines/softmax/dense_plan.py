"""Plans of the row engine for a target per class, and their execution (``kernels/softmax/row_terms.cuh``)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

from cupylosses.engines.device import EXPECTATIONS, Device, Divisor
from cupylosses.engines.softmax import layout as softmax_layout
from cupylosses.engines.softmax.definition import RowLoss
from cupylosses.engines.softmax.dense_codegen import TermVariant
from cupylosses.engines.softmax.plan import RowTensor, rows_of, without
from cupylosses.engines.strides import broadcast_strides, dense_strides
from cupylosses.interop import ITEMSIZE
from cupylosses.jit import compiler, gpu

#: One entry per operand: what is wanted, or written.
Pair = tuple[Any, Any]


class TermArguments(NamedTuple):
    """What of a call is not in its plan: addresses, of which some are 0, and numbers."""

    input: int
    target: int
    weight: int
    mask: int
    scale: float
    softcap: float
    parameters: tuple[float, ...]


class TermPlan:
    """Everything about a call but addresses and numbers; ``moving`` along directions, of its second derivatives."""

    def __init__(
        self,
        loss: RowLoss,
        flags: tuple[int, ...],
        operands: tuple[RowTensor, RowTensor],
        weight: RowTensor | None,
        mask: RowTensor | None,
        class_dim: int,
        promoted: str,
        out_dtype: str | None,
        capped: bool,
        processors: int,
        launcher: Callable[..., Any] | None = None,
        chip: gpu.Chip | None = None,
        moving: bool = False,
    ) -> None:
        self.loss, self.operands, self.class_dim = loss, operands, class_dim
        self.promoted, self.result = promoted, out_dtype or promoted
        self.compute = "float64" if promoted == "float64" else "float32"
        self.shape = without(operands[0].shape, class_dim)
        self.rows, self.classes = prod(self.shape), operands[0].shape[class_dim]
        self.processors, self.launcher = processors, launcher or compiler.Launcher
        self.gradient_strides = tuple(dense_strides(x.shape, x.strides) for x in operands)
        self.result_strides = dense_strides(self.shape, (0,) * len(self.shape))
        self._flags, self._capped = flags, capped
        self._dtypes = (*(x.dtype for x in operands), weight.dtype if weight else "", mask.dtype if mask else "")
        masks = broadcast_strides(mask.shape, mask.strides, self.shape) if mask else (0,) * len(self.shape)
        tensors = [
            rows_of(strides, class_dim, ITEMSIZE[x.dtype], misalignment)
            for x, gradient in zip(operands, self.gradient_strides, strict=True)
            for strides, misalignment in ((x.strides, x.misalignment), (gradient, 0))
        ]
        layout = self.shape, self.classes, tensors, (masks, self.result_strides)
        if moving:
            self.layout = softmax_layout.second_term_layout(*layout)
        else:
            self.layout = softmax_layout.term_layout(*layout, chip or gpu.Chip())
        self.slot = hash((loss.name, "terms", self.shape, self.classes, self._dtypes, self.result)) % EXPECTATIONS
        self._launchers: dict[Any, Any] = {}

    @cached_property
    def blocks(self) -> int:
        """Those of every launch but the count's."""
        return softmax_layout.blocks(self.layout, self.layout.groups, self.processors)

    @property
    def notes(self) -> int:
        """As that of a :class:`RowPlan`."""
        return self.layout.groups * self.layout.cluster

    @cached_property
    def count_groups(self) -> int:
        """The partial sums of the count."""
        return max(1, min(-(-self.rows // (4 * gpu.WARP)), softmax_layout.MAX_GROUPS))

    def run(
        self,
        kind: str,
        device: Device,
        given: TermArguments,
        divisor: Divisor,
        own: Sequence[int],
        gradients: Pair = (0, 0),
        values: int = 0,
        lse: int = 0,
    ) -> None:
        """Launches a kernel; ``own`` are the arguments of its entry point alone."""
        wanted = (bool(gradients[0]), bool(gradients[1]))
        key = kind, wanted, divisor.counted
        launcher = self._launchers.get(key)
        if launcher is None:
            launcher = self._launchers[key] = self._load(kind, wanted, divisor.counted)
        launcher(
            device.stream(), given.input, given.target, *gradients, given.weight, given.mask, values, lse, *own,
            given.scale, given.softcap, *given.parameters, *divisor.arguments,
        )  # fmt: skip

    def _load(self, kind: str, wanted: tuple[bool, bool], counted: bool) -> Any:
        x, (input, target, weight, mask) = self.layout, self._dtypes
        layout, threads, groups, blocks, shared, cluster = x.kind, x.threads, x.groups, self.blocks, x.shared, x.cluster
        if kind == "count":
            layout, threads, groups, shared, cluster = "lanes", softmax_layout.THREADS, self.count_groups, 0, 1
            blocks = min(-(-groups // (threads // gpu.WARP)), 8 * self.processors)
        variant = TermVariant(
            self.loss, self._flags, kind, layout, x.lanes, input, target, weight, mask, self.result, self.compute,
            wanted, x.many, self._capped, counted, cluster,
        )  # fmt: skip
        return self.launcher(variant, blocks, threads, (groups, x.width, x.words), shared)


class TermPromise:
    """Gradients that the forward kernel wrote for an expected grad_output."""

    __slots__ = ("address", "captured", "gradients", "notes")

    def __init__(self, gradients: Pair, notes: Any, address: int, captured: bool) -> None:
        self.gradients, self.notes, self.address, self.captured = gradients, notes, address, captured


def count(plan: TermPlan, device: Device, given: TermArguments) -> Divisor:
    """How many rows the mask leaves, on the device."""
    array = device.empty((), (), "float64")
    stream = device.stream()
    _memory, memory = device.workspace(stream, plan.count_groups, stream != 0 and device.capturing())
    plan.run("count", device, given, Divisor(1.0), (memory, device.address(array)))
    return Divisor(1.0, array, device.address(array))


def reduce(plan: TermPlan, device: Device, given: TermArguments, divisor: Divisor, lse: int = 0) -> Any:
    """The reduced value."""
    value = device.empty((), (), plan.result)
    stream = device.stream()
    _memory, memory = device.workspace(stream, plan.layout.groups, stream != 0 and device.capturing())
    plan.run("value", device, given, divisor, (memory, device.address(value)), lse=lse)
    return value


def reduce_with_gradients(
    plan: TermPlan, device: Device, given: TermArguments, divisor: Divisor, wanted: tuple[bool, bool], lse: int = 0
) -> tuple[Any, TermPromise]:
    """The reduced value, and the gradients for the expected grad_output."""
    stream = device.stream()
    capturing = stream != 0 and device.capturing()
    value = device.empty((), (), plan.result)
    gradients = _new(plan, device, wanted)
    notes = device.empty((plan.notes,), (1,), "float64")
    _memory, memory = device.workspace(stream, plan.layout.groups, capturing)
    noted = device.address(notes)
    own = (memory, device.address(value), device.expectation(plan.slot), noted)
    plan.run("value_and_gradient", device, given, divisor, own, _addresses(device, gradients), lse=lse)
    return value, TermPromise(gradients, notes, noted, capturing)


def verified_gradients(
    plan: TermPlan,
    device: Device,
    given: TermArguments,
    divisor: Divisor,
    wanted: tuple[bool, bool],
    grad_output: int,
    promise: TermPromise | None,
) -> Pair:
    """The gradients for the true grad_output: the promised ones if it was expected, computed now otherwise."""
    if promise is not None and not promise.captured and device.stream() != 0 and device.capturing():
        promise = None  # the graph will run without the forward that made the promise
    gradients = promise.gradients if promise else _new(plan, device, wanted)
    own = (grad_output, promise.address if promise else 0, device.expectation(plan.slot))
    plan.run("verify_gradient", device, given, divisor, own, _addresses(device, gradients))
    return gradients


def values(plan: TermPlan, device: Device, given: TermArguments, lse: int = 0) -> Any:
    """A value per row."""
    found = device.empty(plan.shape, plan.result_strides, plan.result)
    plan.run("values", device, given, Divisor(1.0), (), values=device.address(found), lse=lse)
    return found


def gradients(
    plan: TermPlan, device: Device, given: TermArguments, wanted: tuple[bool, bool], grad_output: int
) -> Pair:
    """The gradients for a grad_output per row, laid out as the values are."""
    found = _new(plan, device, wanted)
    plan.run("gradient", device, given, Divisor(1.0), (grad_output,), _addresses(device, found))
    return found


def second(
    plan: TermPlan,
    device: Device,
    given: TermArguments,
    wanted: tuple[bool, bool],
    directions: tuple[int, int],
    grad_output: int,
) -> tuple[Any, Pair]:
    """The derivatives along directions, which lie as gradients do or are not there (0), of a value per row and of the
    gradients that are wanted for a grad_output per row.
    """
    along, changed = device.empty(plan.shape, plan.result_strides, plan.result), _new(plan, device, wanted)
    own = (*directions, grad_output)
    plan.run("second", device, given, Divisor(1.0), own, _addresses(device, changed), device.address(along))
    return along, changed


def _new(plan: TermPlan, device: Device, wanted: tuple[bool, bool]) -> Pair:
    first, second = (
        device.empty(x.shape, strides, x.dtype) if w else None
        for x, strides, w in zip(plan.operands, plan.gradient_strides, wanted, strict=True)
    )
    return first, second


def _addresses(device: Device, arrays: Pair) -> Pair:
    first, second = (0 if x is None else device.address(x) for x in arrays)
    return first, second

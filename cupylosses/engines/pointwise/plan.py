"""Plans and their execution: which kernels run for a call, with which arguments. No array library is named here.

A :class:`Plan` is everything about a call that depends neither on addresses nor on parameter values: it is made once
per combination of loss, dtypes, shapes and strides, and looked up afterwards. A :class:`Device` is what an array
library offers on one GPU: allocation, the current stream, addresses. The functions below join the two.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from math import prod
from typing import Any

from cupylosses import checks, interop
from cupylosses.definition.base import MASK, WEIGHT
from cupylosses.engines.device import EXPECTATIONS, Device, Divisor, Tensor
from cupylosses.engines.pointwise import checks as pointwise_checks
from cupylosses.engines.pointwise import layout as pointwise_layout
from cupylosses.engines.pointwise.codegen import KINDS, Variant, title
from cupylosses.engines.pointwise.definition import Loss, counting
from cupylosses.engines.pointwise.reduction import Reduction, resolve
from cupylosses.engines.strides import broadcast_strides, dense_strides, dimension_words, result_strides
from cupylosses.jit import compiler, gpu


class Part:
    """One launch of the pointwise engine: layout, groups and grid, and the kernels for it."""

    def __init__(self, plan: Plan, streams: Sequence[pointwise_layout.Stream], processors: int) -> None:
        self.plan = plan
        self.layout = pointwise_layout.layout(plan.shape, streams)
        self.groups = pointwise_layout.groups(self.layout.vectors, self.layout.lanes)
        self.threads = pointwise_layout.threads(self.groups)
        self.blocks = pointwise_layout.grid(self.groups, self.threads, processors)
        self.warps = self.blocks * self.threads // gpu.WARP
        self._launchers: dict[str, dict[tuple[tuple[bool, ...], bool], compiler.Launcher]] = {x: {} for x in KINDS}

    def launcher(self, kind: str, gradients: tuple[bool, ...], counted: bool = False) -> compiler.Launcher:
        """The kernel for an entry point, with everything that this plan fixes."""
        known = self._launchers[kind]
        found = known.get((gradients, counted))
        if found is None:
            variant = self.variant(kind, gradients, counted)
            where = self.layout.elements if self.layout.kind == "flat" else self.layout.words()
            fixed = (self.groups, where)
            found = known[gradients, counted] = self.plan.launcher(variant, self.blocks, self.threads, fixed)
        return found

    def variant(self, kind: str, gradients: tuple[bool, ...], counted: bool = False) -> Variant:
        """What is compiled for this launch."""
        plan, operands = self.plan, len(self.plan.tensors)
        element = self.layout.access[2 * operands] if kind == "elements_gradient" else "none"
        return Variant(
            plan.loss,
            plan.flags,
            kind,
            plan.storage,
            plan.result,
            self.layout.kind,
            self.layout.lanes,
            (*self.layout.access[:operands], element),
            gradients,
            compute=plan.compute,
            counted=counted,
        )


class SumPart:
    """Sums over some dimensions: the gradient of the broadcast operand in ``slot``, or with None the value of a loss
    that keeps dimensions. Layout and launches.
    """

    def __init__(
        self, plan: Plan, slot: int | None, grad_output: pointwise_layout.Stream | None, counted: bool = False
    ) -> None:
        operands = len(plan.tensors)
        if slot is None:
            self.shape, self.dtype = plan.resolved.shape, plan.result
            self.strides = dense_strides(self.shape, (0,) * len(self.shape))
            result = plan.keep(self.strides)
        else:
            tensor = plan.tensors[slot]
            self.shape, self.dtype = tensor.shape, tensor.dtype
            self.strides = dense_strides(tensor.shape, tensor.strides)
            result = broadcast_strides(tensor.shape, self.strides, plan.shape)
        none = (0,) * len(plan.shape)
        read = [x.strides for x in plan.streams[:operands]]
        x = pointwise_layout.sum_layout(plan.shape, [*read, grad_output.strides if grad_output else none], result)
        streams = [
            *plan.streams[:operands],
            grad_output or pointwise_layout.Stream(none, interop.ITEMSIZE[plan.result]),
        ]
        x = pointwise_layout.sum_in_vectors(x, streams, pointwise_layout.Stream(result, interop.ITEMSIZE[self.dtype]))
        self.partials = x.slices * x.outputs if x.slices > 1 else 0
        rank = 1 if max(len(x.kept), len(x.reduced)) <= 1 else pointwise_layout.max_rank(operands)
        fixed = (
            x.outputs,
            x.length,
            x.slices,
            x.slice_length,
            dimension_words(x.kept, x.kept_strides, rank),
            dimension_words(x.reduced, x.reduced_strides, rank),
        )
        first, second = ("sum_over", "combine_sums") if slot is None else ("broadcast_gradient", "combine_slices")
        kinds = {first: x.warps, second: x.outputs}
        if not self.partials:
            del kinds[second]
        variant = Variant(
            plan.loss,
            plan.flags,
            first,
            plan.storage,
            plan.result,
            "matrix" if rank == 1 else "rows",
            x.lanes,
            (*x.access[:operands], x.access[operands] if grad_output else "none"),
            tuple(i == slot for i in range(operands)),
            x.columns,
            plan.compute,
            counted,
        )
        self.launchers = [
            plan.launcher(
                replace(variant, kind=kind),
                pointwise_layout.grid(count, pointwise_layout.MAX_THREADS, plan.processors),
                pointwise_layout.MAX_THREADS,
                fixed,
            )
            for kind, count in kinds.items()
        ]


class Plan:
    """Everything about a call but addresses and parameter values."""

    def __init__(
        self,
        loss: Loss,
        flags: tuple[int, ...],
        reduction: Reduction,
        tensors: tuple[Tensor, ...],
        promoted: str,
        processors: int,
        launcher: Callable[..., Any] | None = None,
    ) -> None:
        shapes = [x.shape for x in tensors]
        self.loss, self.flags, self.reduction, self.tensors = loss, flags, reduction, tensors
        #: The dtype that the operands promote to, that of the result, and that of the arithmetic.
        self.promoted, self.result = promoted, reduction.out_dtype or promoted
        self.compute = "float64" if promoted == "float64" else "float32"
        self.processors = processors
        #: What makes a launcher; another than the compiler's own where kernels run elsewhere than on a GPU.
        self.launcher = launcher or compiler.Launcher
        self.shape = pointwise_checks.broadcast(loss, shapes)
        self.warning = pointwise_checks.broadcast_warning(loss, shapes)
        self.elements = prod(self.shape)
        self.resolved = resolve(loss, reduction, self.shape)
        #: Whether the divisor depends on more than shapes.
        self.found = self.resolved.found
        #: Whether every element is a result; whether all of them make one number; neither if dimensions are kept.
        self.elementwise = self.resolved.dims == ()
        self.scalar = self.resolved.dims is None
        self.divisor = Divisor(self.resolved.divisor)
        self.storage = tuple(x.dtype for x in tensors)
        self.strides = [x.strides for x in tensors]
        self.floating = tuple(x.dtype in checks.FLOATING for x in tensors)
        #: Operands that are read once per element: their gradient is written by the pointwise engine.
        self.full = tuple(prod(x.shape) == self.elements for x in tensors)
        self.slot = hash((title(loss), flags, reduction, self.shape, self.storage, self.result)) % EXPECTATIONS
        self.no_gradients = (False,) * len(tensors)
        #: By the gradients that are wanted, and whether the divisor is counted; None where nothing is written ahead.
        self.one_pass: dict[tuple[tuple[bool, ...], bool], OnePass | None] = {}
        self._written: dict[tuple[bool, ...], tuple[bool, ...]] = {}
        self._buffers: dict[tuple[bool, ...], list[tuple[int, tuple[int, ...], tuple[int, ...], str]]] = {}
        self._gradient_parts: dict[pointwise_layout.Stream, Part] = {}
        self._sum_parts: dict[tuple[int | None, pointwise_layout.Stream | None, bool], SumPart] = {}

    def keep(self, strides: Sequence[int]) -> tuple[int, ...]:
        """The strides of something that has the dimensions of the result, in those of the loss: 0 where it has none."""
        dims = self.resolved.dims
        if dims is None:
            return (0,) * len(self.shape)
        rest = iter(strides)
        return tuple(0 if d in dims else next(rest) for d in range(len(self.shape)))

    @cached_property
    def count(self) -> tuple[Plan, tuple[int, ...]]:
        """The plan that finds the divisor of a counted mean, and the operands that it takes: weight and mask, so far as
        they are arrays. Of what is broadcast it reads as much as there is.
        """
        weighted, masked = self.resolved.weights, self.resolved.masked
        positions = tuple(i for i, x in enumerate(self.loss.operands) if (x is WEIGHT and weighted) or x is MASK)
        tensors = tuple(self.tensors[i] for i in positions)
        compute = "float64" if "float64" in [x.dtype for x in tensors] else "float32"
        how = Reduction("sum", None, "float64")
        return Plan(counting(weighted, masked), (), how, tensors, compute, self.processors, self.launcher), positions

    @cached_property
    def gradient_strides(self) -> tuple[tuple[int, ...], ...]:
        """The strides of each operand's gradient."""
        return tuple(dense_strides(x.shape, x.strides) for x in self.tensors)

    @cached_property
    def result_strides(self) -> tuple[int, ...]:
        """The strides of a value per element."""
        return result_strides(self.shape, [(x.shape, x.strides) for x in self.tensors])

    @cached_property
    def streams(self) -> list[pointwise_layout.Stream]:
        """The operands and, for each, its gradient (nothing where the pointwise engine writes none).

        Gradients take part in the layout whether they are wanted or not, so that the order of additions, and with it
        the value's bits, do not depend on it.
        """
        streams = [
            pointwise_layout.Stream(
                broadcast_strides(x.shape, x.strides, self.shape), interop.ITEMSIZE[x.dtype], x.misalignment
            )
            for x in self.tensors
        ]
        for i, x in enumerate(self.tensors):
            strides = (0,) * len(self.shape)
            if self.full[i] and self.floating[i]:
                strides = broadcast_strides(x.shape, self.gradient_strides[i], self.shape)
            streams.append(pointwise_layout.Stream(strides, interop.ITEMSIZE[x.dtype]))
        return streams

    @cached_property
    def part(self) -> Part:
        """The launch that computes the value."""
        none = pointwise_layout.Stream((0,) * len(self.shape), interop.ITEMSIZE[self.result])
        if not self.elementwise:
            return Part(self, [*self.streams, none], self.processors)
        absent = [pointwise_layout.Stream(none.strides, x.itemsize) for x in self.streams[len(self.tensors) :]]
        values = pointwise_layout.Stream(self.result_strides, none.itemsize)
        return Part(self, [*self.streams[: len(self.tensors)], *absent, values], self.processors)

    def gradient_part(self, grad_output: pointwise_layout.Stream) -> Part:
        """The launch that computes the gradients for a grad_output per element."""
        found = self._gradient_parts.get(grad_output)
        if found is None:
            found = self._gradient_parts[grad_output] = Part(self, [*self.streams, grad_output], self.processors)
        return found

    def sum_part(
        self, slot: int | None, grad_output: pointwise_layout.Stream | None = None, counted: bool = False
    ) -> SumPart:
        """The launch that sums the gradient of a broadcast operand, or the value over some dimensions."""
        found = self._sum_parts.get((slot, grad_output, counted))
        if found is None:
            found = self._sum_parts[slot, grad_output, counted] = SumPart(self, slot, grad_output, counted)
        return found

    def aligned(self, addresses: Sequence[int]) -> bool:
        """Whether operands at these addresses can be read as this plan does."""
        return all([p % 16 in (0, x.misalignment) for p, x in zip(addresses, self.tensors)])

    def written(self, wanted: tuple[bool, ...]) -> tuple[bool, ...]:
        """Which of the wanted gradients the pointwise engine writes."""
        found = self._written.get(wanted)
        if found is None:
            found = self._written[wanted] = tuple(w and f for w, f in zip(wanted, self.full, strict=True))
        return found

    def write_ahead(self, device: Device, wanted: tuple[bool, ...], counted: bool) -> OnePass | None:
        """The launches that write gradients of ``wanted`` ahead, if they can write any."""
        found = OnePass(self, device, wanted, counted) if any(self.written(wanted)) else None
        self.one_pass[wanted, counted] = found
        return found

    def buffers(self, wanted: tuple[bool, ...]) -> list[tuple[int, tuple[int, ...], tuple[int, ...], str]]:
        """Slot, shape, strides and dtype of each wanted gradient."""
        found = self._buffers.get(wanted)
        if found is None:
            found = self._buffers[wanted] = [
                (slot, x.shape, self.gradient_strides[slot], x.dtype)
                for slot, x in enumerate(self.tensors)
                if wanted[slot]
            ]
        return found

    def grad_output_stream(self, strides: Sequence[int], misalignment: int) -> pointwise_layout.Stream:
        """A grad_output per element of the result as the layout sees it."""
        return pointwise_layout.Stream(
            self.keep(strides) if not self.elementwise else tuple(strides), interop.ITEMSIZE[self.result], misalignment
        )


class OnePass:
    """The launches of a loss that writes gradients ahead, where those in ``wanted`` are."""

    __slots__ = (
        "buffers",
        "check",
        "complete",
        "device",
        "first",
        "groups",
        "launches",
        "nothing",
        "place",
        "slot",
        "spare",
        "warps",
    )

    def __init__(self, plan: Plan, device: Device, wanted: tuple[bool, ...], counted: bool) -> None:
        part, written = plan.part, plan.written(wanted)
        self.device, self.slot = device, plan.slot
        #: Whether no other gradient is wanted.
        self.complete = written == wanted
        self.buffers, self.nothing = plan.buffers(written), [None] * len(written)
        self.groups, self.warps = part.groups, part.warps
        self.first = part.launcher("value_and_gradient", written, counted)
        self.check = part.launcher("verify_gradient", written, counted)
        # Both take their arguments from one buffer, where grad_output, which only the second has, stands last.
        tensors, place = len(written) + len(self.buffers), len(self.first.format)
        check = (*range(tensors), place, tensors + 3, tensors + 2, *range(tensors + 4, place))
        self.launches, self.place = [(self.first, range(place)), (self.check, check)], place
        #: By stream, what backward is done with.
        self.spare: defaultdict[int, list[Check]] = defaultdict(list)


class Check:
    """Each warp's note of the grad_output that forward expected, and the launch that holds it against the true one. Its
    arguments are written in forward but for this, because backward runs in another thread: every object has to come to
    it from the cache of another processor.

    Backward gives it back for the next forward of the same launch on the same stream, where the notes are free by then.
    That spares allocations; a graph under capture keeps its own.
    """

    __slots__ = (
        "addresses",
        "arguments",
        "complete",
        "device",
        "first",
        "launcher",
        "notes",
        "place",
        "pointers",
        "second",
        "spare",
        "stream",
        "strides",
        "workspace",
    )

    def __init__(self, plan: Plan, found: OnePass, stream: int, capturing: bool) -> None:
        # Whatever backward needs is in this one object, for the same reason.
        device = self.device = found.device
        self.stream, self.spare = None if capturing else stream, found.spare[stream]
        self.complete, self.launcher, self.place, self.strides = found.complete, found.check, found.place, plan.strides
        self.notes = device.empty((found.warps,), (1,), "float64")
        self.workspace, workspace = device.workspace(stream, found.groups, capturing)
        self.addresses = workspace, device.expectation(found.slot), device.address(self.notes)
        #: Where the operands lie.
        self.pointers: Sequence[int] = ()
        self.arguments, (self.first, self.second) = compiler.arguments(found.place + 1, found.launches)

    def run(self, grad_output: int, pointers: Sequence[int]) -> bool:
        """Makes the gradients those for the true grad_output. False, and nothing is launched, under the capture of a
        graph that will run without the forward that wrote them.
        """
        device = self.device
        stream = device.stream()
        if stream != 0 and self.stream is not None and device.capturing():
            return False
        arguments = self.arguments
        if pointers != self.pointers:
            arguments[: len(pointers)] = pointers
        arguments[self.place] = grad_output
        self.launcher.launch(stream, self.second)
        if stream == self.stream:
            self.spare.append(self)
        return True

    def release(self, stream: int) -> None:
        """Leaves it to the next forward on a stream, where it is not needed any more."""
        if stream == self.stream:
            self.spare.append(self)


#: Gradients that the forward kernel wrote for an expected grad_output, and what makes sure of it.
Promise = tuple[Check, list[Any]]


def gradient_buffers(plan: Plan, device: Device, wanted: tuple[bool, ...]) -> tuple[list[Any], list[int]]:
    """New arrays for the gradients that are wanted, None for the others; and the addresses of the arrays."""
    gradients: list[Any] = [None] * len(wanted)
    addresses = []
    for slot, shape, strides, dtype in plan.buffers(wanted):
        array = gradients[slot] = device.empty(shape, strides, dtype)
        addresses.append(device.address(array))
    return gradients, addresses


def count(
    plan: Plan, device: Device, pointers: Sequence[int], parameters: Sequence[float], normalizer: Any = None
) -> Divisor:
    """What the sum is divided by. ``normalizer`` is a number, or a double on the device: its array and its address."""
    resolved = plan.resolved
    if normalizer is not None:
        if isinstance(normalizer, float):
            return Divisor(resolved.divisor * normalizer)
        return Divisor(resolved.divisor, *normalizer)
    divisor = resolved.divisor * parameters[-1] if resolved.weighted else resolved.divisor
    if not resolved.counted:
        return Divisor(divisor)
    counting, positions = plan.count
    array = reduce(counting, device, [pointers[i] for i in positions], (), counting.divisor)
    return Divisor(divisor * (plan.elements / counting.elements), array, device.address(array))


def reduce(plan: Plan, device: Device, pointers: Sequence[int], parameters: Sequence[float], divisor: Divisor) -> Any:
    """The reduced value."""
    part, stream = plan.part, device.stream()
    value = device.empty((), (), plan.result)
    _memory, address = device.workspace(stream, part.groups, stream != 0 and device.capturing())
    launcher = part.launcher("value", plan.no_gradients, divisor.counted)
    launcher(stream, *pointers, address, device.address(value), *parameters, *divisor.arguments)
    return value


def reduce_with_gradient(
    plan: Plan,
    device: Device,
    pointers: Sequence[int],
    parameters: Sequence[float],
    divisor: Divisor,
    wanted: tuple[bool, ...],
) -> tuple[Any, Promise | None]:
    """The reduced value and, for the expected grad_output, the gradients that the pointwise engine writes, if it writes
    any.
    """
    try:
        found = plan.one_pass[wanted, divisor.counted]
    except KeyError:
        found = plan.write_ahead(device, wanted, divisor.counted)
    if found is None:
        return reduce(plan, device, pointers, parameters, divisor), None
    stream = device.stream()
    if stream != 0 and device.capturing():
        check = Check(plan, found, stream, True)
    else:
        try:
            check = found.spare[stream].pop()
        except IndexError:
            check = Check(plan, found, stream, False)
    check.pointers = pointers
    value = device.empty((), (), plan.result)
    gradients: list[Any] = found.nothing.copy()
    addresses = []
    for slot, shape, strides, dtype in found.buffers:
        array = gradients[slot] = device.empty(shape, strides, dtype)
        addresses.append(device.address(array))
    memory, expectation, notes = check.addresses
    found.first.pack(
        check.arguments,
        0,
        *pointers,
        *addresses,
        memory,
        device.address(value),
        expectation,
        notes,
        *parameters,
        *divisor.arguments,
    )
    found.first.launch(stream, check.first)
    return value, (check, gradients)


def verified_gradient(
    plan: Plan,
    device: Device,
    pointers: Sequence[int],
    parameters: Sequence[float],
    divisor: Divisor,
    wanted: tuple[bool, ...],
    grad_output: int,
    promise: Promise | None,
) -> list[Any]:
    """The gradients for the true grad_output: the promised ones if it was expected, computed now otherwise."""
    if promise is not None and promise[0].run(grad_output, pointers):
        return promise[1]
    gradients, addresses = gradient_buffers(plan, device, wanted)
    launcher = plan.part.launcher("verify_gradient", wanted, divisor.counted)
    expectation = device.expectation(plan.slot)
    last = (*parameters, *divisor.arguments)
    launcher(device.stream(), *pointers, *addresses, grad_output, 0, expectation, *last)
    return gradients


def elements(plan: Plan, device: Device, pointers: Sequence[int], parameters: Sequence[float], divisor: Divisor) -> Any:
    """A value per element, or per index of the dimensions that are kept."""
    stream = device.stream()
    if plan.elementwise:
        values = device.empty(plan.shape, plan.result_strides, plan.result)
        launcher = plan.part.launcher("elements", plan.no_gradients)
        launcher(stream, *pointers, device.address(values), *parameters, *divisor.arguments)
        return values
    return _sums(plan.sum_part(None, None, divisor.counted), device, stream, pointers, 0, parameters, divisor)


def elements_gradient(
    plan: Plan,
    device: Device,
    pointers: Sequence[int],
    parameters: Sequence[float],
    divisor: Divisor,
    wanted: tuple[bool, ...],
    grad_output: int,
    grad_output_strides: Sequence[int],
) -> list[Any]:
    """The gradients that the pointwise engine writes, for a grad_output of any strides that is no single number."""
    part = plan.gradient_part(plan.grad_output_stream(grad_output_strides, grad_output % 16))
    gradients, addresses = gradient_buffers(plan, device, wanted)
    launcher = part.launcher("elements_gradient", wanted, divisor.counted)
    launcher(device.stream(), *pointers, *addresses, grad_output, *parameters, *divisor.arguments)
    return gradients


def broadcast_gradient(
    plan: Plan,
    device: Device,
    pointers: Sequence[int],
    parameters: Sequence[float],
    divisor: Divisor,
    slot: int,
    grad_output: int,
    grad_output_strides: Sequence[int] | None,
) -> Any:
    """The gradient of a broadcast operand, summed; ``grad_output_strides`` is None for one grad_output for all."""
    per_element = None
    if grad_output_strides is not None:
        per_element = plan.grad_output_stream(grad_output_strides, grad_output % 16)
    part = plan.sum_part(slot, per_element, divisor.counted)
    return _sums(part, device, device.stream(), pointers, grad_output, parameters, divisor)


def _sums(
    part: SumPart,
    device: Device,
    stream: int,
    pointers: Sequence[int],
    grad_output: int,
    parameters: Sequence[float],
    divisor: Divisor,
) -> Any:
    sums = device.empty(part.shape, part.strides, part.dtype)
    partials = device.empty((part.partials,), (1,), "float64") if part.partials else None
    memory = device.address(partials) if partials is not None else 0
    for launcher in part.launchers:
        launcher(stream, *pointers, device.address(sums), grad_output, memory, *parameters, *divisor.arguments)
    return sums


def gradients(
    plan: Plan,
    device: Device,
    pointers: Sequence[int],
    parameters: Sequence[float],
    divisor: Divisor,
    wanted: tuple[bool, ...],
    grad_output: int,
    grad_output_strides: Sequence[int] | None,
    promise: Promise | None = None,
) -> list[Any]:
    """Every wanted gradient, whichever kernels it takes; None for the others."""
    written = plan.written(wanted)
    if grad_output_strides is not None and True in written:
        result = elements_gradient(
            plan, device, pointers, parameters, divisor, written, grad_output, grad_output_strides
        )
    elif True in written:
        result = verified_gradient(plan, device, pointers, parameters, divisor, written, grad_output, promise)
    else:
        result = [None] * len(wanted)
    if written != wanted:
        for slot, (w, f) in enumerate(zip(wanted, plan.full, strict=True)):
            if w and not f:
                result[slot] = broadcast_gradient(
                    plan, device, pointers, parameters, divisor, slot, grad_output, grad_output_strides
                )
    return result

"""Execution of plans: the only module that allocates results, binds addresses to kernels and launches them.

The same five values describe a launch everywhere: the plan, the device, the addresses of the plan's arrays, the
scalars, and the divisor of the sum. ``auxiliary`` are the addresses of the outputs besides the value, 0 for outputs
that are not wanted.

Speculative gradients: the kernel of a reduced value also writes the gradients, for the ``grad_output`` of the previous
backward. The next backward launches a check, in most cases the same kernel. If the true ``grad_output`` differs, the
check writes the gradients again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

from cupylosses import options
from cupylosses.engines.base import Plan, Step, Wanted
from cupylosses.engines.composite import Inputs
from cupylosses.engines.device import Device, Divisor
from cupylosses.jit import compiler


def _compiles_at_once(device: Device) -> bool:
    """True if kernels that are not compiled yet may be compiled in background threads."""
    stream = device.stream()
    return device.launcher is None and not (stream != 0 and device.capturing())


def begin(plan: Plan, device: Device, wanted: Wanted) -> None:
    """Compiles all kernels of a first call with gradients concurrently, including the kernel of a divisor."""
    one_pass = options.one_pass_enabled() and not (plan.composite or plan.single_use)
    if one_pass and (wanted, True) not in plan.one_pass and any(plan.ahead(wanted)) and _compiles_at_once(device):
        counting = plan.denominator()[0]
        with compiler.background():
            counting.launcher("value", counting.nothing, False)
        plan.one_pass[wanted, True] = OnePass(plan, device, wanted, True)


class OnePass:
    """The two launches of a speculative gradient: the kernel of the value in forward, and the check in backward."""

    __slots__ = (
        "absent",
        "buffers",
        "check",
        "complete",
        "device",
        "first",
        "launches",
        "nothing",
        "partials",
        "place",
        "records",
        "slot",
        "spare",
        "written",
        "zeroed",
    )

    def __init__(self, plan: Plan, device: Device, wanted: Wanted, counted: bool) -> None:
        written = plan.ahead(wanted)
        self.device, self.slot = device, plan.slot
        #: ``complete`` is True if no other gradient is wanted, ``written`` if the gradients are final for the expected
        #: grad_output.
        self.complete, self.written = written == wanted, not (plan.assumes or True in plan.summed(wanted))
        self.buffers, self.nothing = plan.buffers(written), [None] * len(written)
        self.partials, self.records, self.zeroed = plan.partials, plan.recorded(wanted), plan.zeroed(wanted)
        with compiler.background() if _compiles_at_once(device) else nullcontext():
            self.first = plan.launcher("value_and_gradient", written, counted)
            self.check = plan.check(written, counted)
        # Both launches read their arguments from one buffer. The true grad_output, which only the check takes, is last.
        tensors, place = len(written) + len(self.buffers), len(self.first.format)
        own = tensors + len(plan.auxiliary)
        if plan.checks_apart(written):
            self.absent: tuple[int, ...] = ()
            check = (*range(tensors), place, own + 3, own + 2, *range(own + 4, place))
        else:
            # Forward passes a null grad_output; the check passes null workspace, value and auxiliary outputs.
            self.absent = (0,)
            null = own + 2
            check = (*range(tensors), *[null] * (len(plan.auxiliary) + 2), place, *range(null + 1, place))
        self.launches, self.place = [(self.first, range(place)), (self.check, check)], place
        #: Checks that no graph needs any more, by stream. The next forward reuses them.
        self.spare: defaultdict[int, list[GradScaleCheck]] = defaultdict(list)


class GradScaleCheck:
    """The recorded ``grad_output`` of a speculative gradient, and the launch that compares it with the true one.

    Forward writes all arguments except the true ``grad_output``. Backward runs in another thread, and every object that
    it touches must come from the cache of another processor.

    After backward, or when the graph is dropped without one, the next forward of the same launch on the same stream
    reuses the object, since creating one takes 5 µs. The order of launches on the stream ensures that its records are
    free by then. A graph under capture keeps its own. The memory of the records, kept with the object, also holds
    partial sums of gradients: up to 8 MiB, or a 64th of the elements.
    """

    __slots__ = (
        "addresses",
        "arguments",
        "complete",
        "device",
        "first",
        "launcher",
        "place",
        "pointers",
        "records",
        "second",
        "spare",
        "stream",
        "strides",
        "workspace",
        "written",
    )

    def __init__(self, plan: Plan, one_pass: OnePass, stream: int, capturing: bool) -> None:
        # Everything that backward needs is in this object.
        device = self.device = one_pass.device
        self.stream, self.spare = None if capturing else stream, one_pass.spare[stream]
        self.complete, self.launcher, self.place = one_pass.complete, one_pass.check, one_pass.place
        self.written = one_pass.written
        self.strides = plan.operand_strides
        count = one_pass.records
        self.records = device.full(count, 0.0) if one_pass.zeroed else device.empty((count,), (1,), "float64")
        self.workspace, workspace = device.workspace(stream, one_pass.partials, capturing)
        self.addresses = workspace, device.expectation(one_pass.slot), device.address(self.records)
        #: Addresses of the arrays.
        self.pointers: Sequence[int] = ()
        self.arguments, (self.first, self.second) = compiler.arguments(one_pass.place + 1, one_pass.launches)

    def run(self, grad_output: int, pointers: Sequence[int]) -> bool:
        """Launches the check, which corrects the gradients if the true ``grad_output`` is not the recorded one.

        Returns False and launches nothing under capture of a graph that does not contain the forward that wrote them.
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

    def release(self) -> None:
        """Leaves a check that will not run to the next forward on its stream."""
        if self.stream is not None:
            self.spare.append(self)


class Pending(list["Speculation"]):
    """The speculation of a graph until its backward takes it.

    It is a list of at most one element, because ``pop`` is atomic and two threads may run backward at once. A graph
    that is dropped without backward releases its check.
    """

    __slots__ = ()

    def __del__(self) -> None:
        if self:
            self.pop()[0].release()


#: Description of a launch: plan, device, addresses of the arrays, scalars, divisor.
Bound = tuple[Plan, Device, Sequence[int], Sequence[float], Divisor]

#: Divisor of a forward without gradients whose kernel counts while it computes the value.
TALLIED = Divisor(None)

#: Check of speculative gradients, and the gradients.
Speculation = tuple[GradScaleCheck, list[Any]]


def gradient_buffers(plan: Plan, device: Device, wanted: Wanted) -> tuple[list[Any], list[int]]:
    """Allocates the wanted gradients, with None for the others. Also returns the addresses of the arrays."""
    gradients: list[Any] = [None] * len(wanted)
    addresses = []
    allocate = device.zeros if plan.clears else device.empty
    for slot, allocation in plan.buffers(wanted):
        array = gradients[slot] = allocate(*allocation)
        addresses.append(device.address(array))
    return gradients, addresses


def denominator(
    plan: Plan,
    device: Device,
    pointers: Sequence[int],
    scalars: Sequence[float],
    normalizer: Any = None,
    found: bool = False,
) -> Divisor:
    """Returns the divisor of the sum.

    ``normalizer`` is None, a float, or a 0-d float64 array on the device. With ``found`` the divisor is computed even
    if the kernels of the plan compute their own.
    """
    if normalizer is not None:
        if type(normalizer) is float:
            return Divisor(plan.divisor * normalizer)
        return Divisor(plan.divisor, normalizer, device.address(normalizer))
    if plan.self_counting and not found:
        return plan.constant
    divisor = plan.divisor * scalars[-1] if plan.weighted else plan.divisor
    if not (plan.counted or plan.self_counting):
        return Divisor(divisor)
    counting, positions, factor = plan.denominator()
    read = [device.address(pointers[i]) if plan.composite else pointers[i] for i in positions]
    array = value(counting, device, read, (), Divisor(counting.divisor))
    return Divisor(divisor * factor, array, device.address(array))


def tallied(plan: Plan, device: Device, differentiated: bool) -> Divisor | None:
    """Returns the divisor of a plan whose kernels count while they evaluate; None if an earlier launch must count."""
    if not (plan.tallies and plan.scalar) or (differentiated and plan.keeps_residual):
        return None
    if not differentiated:
        return TALLIED
    return device.assumption(plan.slot) if options.one_pass_enabled() and not plan.single_use else None


def value(
    plan: Plan,
    device: Device,
    pointers: Sequence[int],
    scalars: Sequence[float],
    divisor: Divisor,
    auxiliary: Sequence[int] = (),
) -> Any:
    """Computes the reduced value."""
    if plan.composite:
        return plan.run_value(Inputs(device, pointers, scalars, divisor), auxiliary)
    stream = device.stream()
    value = device.empty((), (), plan.result)
    _memory, workspace = device.workspace(stream, plan.partials, stream != 0 and device.capturing())
    launcher = plan.launcher("value", plan.nothing, divisor.counted)
    auxiliary = auxiliary or plan.no_auxiliary
    launcher(stream, *pointers, *auxiliary, workspace, device.address(value), *scalars, *divisor.arguments)
    return value


def value_and_gradients(
    plan: Plan,
    device: Device,
    pointers: Sequence[int],
    scalars: Sequence[float],
    divisor: Divisor,
    wanted: Wanted,
    auxiliary: Sequence[int] = (),
) -> tuple[Any, Speculation | None]:
    """Computes the reduced value and speculative gradients, for the expected ``grad_output``.

    These are the wanted gradients that the kernel of the value can write. For gradients that are sums, it writes
    partial sums.
    """
    if plan.composite:
        return plan.run_value_and_gradients(Inputs(device, pointers, scalars, divisor), wanted, auxiliary)
    try:
        one_pass = plan.one_pass[wanted, divisor.counted]
    except KeyError:
        one_pass = OnePass(plan, device, wanted, divisor.counted) if any(plan.ahead(wanted)) else None
        plan.one_pass[wanted, divisor.counted] = one_pass
    if one_pass is None:
        return value(plan, device, pointers, scalars, divisor, auxiliary), None
    stream = device.stream()
    if stream != 0 and device.capturing():
        check = GradScaleCheck(plan, one_pass, stream, True)
    else:
        try:
            check = one_pass.spare[stream].pop()
        except IndexError:
            check = GradScaleCheck(plan, one_pass, stream, False)
    check.pointers = pointers
    result = device.empty((), (), plan.result)
    gradients: list[Any] = one_pass.nothing.copy()
    addresses = []
    allocate = device.zeros if plan.clears else device.empty
    for slot, allocation in one_pass.buffers:
        array = gradients[slot] = allocate(*allocation)
        addresses.append(device.address(array))
    workspace, expected, records = check.addresses
    one_pass.first.pack(
        check.arguments,
        0,
        *pointers,
        *addresses,
        *(auxiliary or plan.no_auxiliary),
        workspace,
        device.address(result),
        *one_pass.absent,
        expected,
        records,
        *scalars,
        *divisor.arguments,
    )
    one_pass.first.launch(stream, check.first)
    return result, (check, gradients)


def verified_gradients(
    plan: Plan,
    device: Device,
    pointers: Sequence[int],
    scalars: Sequence[float],
    divisor: Divisor,
    wanted: Wanted,
    grad_output: int,
) -> list[Any]:
    """Computes the gradients that the value's kernel can write, for the true ``grad_output``."""
    if plan.tallies and not divisor.known:
        divisor = denominator(plan, device, pointers, scalars, found=True)
    gradients, addresses = gradient_buffers(plan, device, wanted)
    if plan.has_product:
        launcher = plan.launcher("product", wanted, divisor.counted)
        launcher(device.stream(), *pointers, *addresses, grad_output, *scalars, *divisor.arguments)
        return gradients
    launcher = plan.check(wanted, divisor.counted)
    # The grad_output of a sum of values per row does not predict that of a mean. It does not become the expected one.
    expected = device.expectation(plan.slot) if plan.scalar else 0
    stage_arguments = check_arguments(plan, wanted, grad_output, expected)
    launcher(device.stream(), *pointers, *addresses, *stage_arguments, *scalars, *divisor.arguments)
    return gradients


def check_arguments(plan: Plan, wanted: Wanted, grad_output: int, expected: int) -> tuple[int, ...]:
    """Returns the arguments of `Plan.check` between gradients and scalars, without records: it then always writes."""
    if plan.checks_apart(wanted):
        return grad_output, 0, expected
    return *plan.no_auxiliary, 0, 0, grad_output, expected, 0


def _without_upstream(launch: Bound, wanted: Wanted, grad_output: int, speculation: Speculation | None) -> list[Any]:
    """Returns the gradients that the value's kernel can write or sum, for a ``grad_output`` that is one number.

    They are the speculative ones, or are computed now. The bits are the same.
    """
    plan, _, pointers, _, _ = launch
    if speculation is not None and speculation[0].run(grad_output, pointers):
        return speculation[1]
    if plan.follows_value(wanted):
        _, new_speculation = value_and_gradients(*launch, wanted)
        assert new_speculation is not None, "there are gradients"
        check, gradients = new_speculation
        check.run(grad_output, pointers)
        return gradients
    if True in (writable := plan.writable(wanted)):
        return verified_gradients(*launch, writable, grad_output)
    return [None] * len(wanted)


def unreduced(
    plan: Plan,
    device: Device,
    pointers: Sequence[int],
    scalars: Sequence[float],
    divisor: Divisor,
    auxiliary: Sequence[int] = (),
) -> Any:
    """Computes a value with dimensions: one number per element, per row, or per index of the kept dimensions."""
    if plan.composite:
        return plan.run_value(Inputs(device, pointers, scalars, divisor), auxiliary)
    step = plan.unreduced_step(divisor.counted)
    values = device.empty(plan.shape, plan.strides, plan.result)
    stage_arguments = (*(auxiliary or plan.no_auxiliary), device.address(values))
    _run(step, device, pointers, stage_arguments, scalars, divisor)
    return values


def gradients(
    plan: Plan,
    device: Device,
    pointers: Sequence[int],
    scalars: Sequence[float],
    divisor: Divisor,
    wanted: Wanted,
    grad_output: int,
    grad_output_strides: tuple[int, ...] | None,
    speculation: Speculation | None = None,
) -> list[Any]:
    """Computes every wanted gradient, with as many kernels as it takes; None for the others.

    ``grad_output_strides`` is None for a ``grad_output`` that is one number.
    """
    if plan.composite:
        per_row = grad_output_strides is not None
        inputs = Inputs(device, pointers, scalars, divisor)
        return plan.run_gradients(inputs, wanted, grad_output, per_row, speculation)
    upstream = None
    result: list[Any] = [None] * len(wanted)
    if grad_output_strides is not None:
        upstream = grad_output_strides, grad_output % 16
    else:
        result = _without_upstream((plan, device, pointers, scalars, divisor), wanted, grad_output, speculation)
        if plan.ahead(wanted) == wanted:
            return result
    for step in plan.gradient_steps(wanted, upstream, divisor.counted):
        addresses = []
        allocate = device.zeros if plan.clears else device.empty
        for slot in step.slots:
            array = result[slot] = allocate(*plan.allocation(slot))
            addresses.append(device.address(array))
        _run(step, device, pointers, (*addresses, grad_output), scalars, divisor)
    return result


def _run(
    step: Step,
    device: Device,
    pointers: Sequence[int],
    stage_arguments: Sequence[int],
    scalars: Sequence[float],
    divisor: Divisor,
) -> None:
    partials = device.empty((step.partials,), (1,), "float64") if step.partials else None
    if step.partials is not None:
        stage_arguments = (*stage_arguments, 0 if partials is None else device.address(partials))
    stream = device.stream()
    if step.workspace:
        # The array stays alive until the launch; a graph that captures the launch owns it afterwards.
        _kept, workspace = device.workspace(stream, step.workspace, stream != 0 and device.capturing())
        stage_arguments = (*stage_arguments, workspace)
    for launcher in step.launchers:
        launcher(stream, *pointers, *stage_arguments, *scalars, *divisor.arguments)


def residual(plan: Plan, device: Device) -> Any:
    """Allocates the residual, which forward stores for `from_residual`."""
    assert plan.residual is not None
    return device.empty(plan.residual.shape, plan.residual.strides, plan.residual.dtype)


def residual_argument(plan: Plan, device: Device, residual: Any) -> Any:
    """Returns the residual as the plan takes it: the array for a composite plan, otherwise its address."""
    return residual if plan.composite else device.address(residual)


def from_residual(
    plan: Plan,
    device: Device,
    pointers: Sequence[int],
    scalars: Sequence[float],
    divisor: Divisor,
    wanted: Wanted,
    residual: Any,
    grad_output: int,
    per_row: bool,
    over: Any = None,
) -> list[Any]:
    """Computes the gradients from the residual of forward.

    ``grad_output`` has one number per row if ``per_row``; otherwise it is one number. The first gradient is written to
    ``over`` if it is given.
    """
    if plan.composite:
        inputs = Inputs(device, pointers, scalars, divisor)
        return plan.run_from_residual(inputs, wanted, residual, grad_output, per_row)
    if over is None:
        gradients, addresses = gradient_buffers(plan, device, wanted)
    else:
        gradients, addresses = [over, *[None] * (len(wanted) - 1)], [device.address(over)]
    launcher = plan.launcher("from_residual", wanted, divisor.counted)
    stage_arguments = residual, grad_output, int(per_row)
    launcher(device.stream(), *pointers, *addresses, *stage_arguments, *scalars, *divisor.arguments)
    return gradients


def hvp(
    plan: Plan,
    device: Device,
    pointers: Sequence[int],
    scalars: Sequence[float],
    divisor: Divisor,
    wanted: Wanted,
    grad_output: int,
    grad_output_strides: tuple[int, ...] | None,
    has_value: bool = True,
) -> tuple[Any, list[Any]]:
    """Computes value and gradients of a plan of a derivative along tangents.

    The gradients, for a ``grad_output``, are the product of the second derivatives with the tangents. This takes one
    launch if the engine has a kernel for both. Otherwise the kernel of a reduced value writes the gradients
    speculatively. Without ``has_value`` the value is not computed.
    """
    if plan.composite:
        return plan.run_hvp(Inputs(device, pointers, scalars, divisor), wanted, grad_output)
    if plan.fused_hvp:
        value, stage_arguments = None, [grad_output]
        alone = plan.has_product and not has_value
        if not alone:
            value = device.empty(plan.shape, plan.strides, plan.result)
            stage_arguments = [device.address(value), grad_output]
        wanted = tuple([w or a for w, a in zip(wanted, plan.always_written, strict=True)])
        changed, addresses = gradient_buffers(plan, device, wanted)
        launcher = plan.launcher("product" if alone else "hvp", wanted, divisor.counted)
        launcher(device.stream(), *pointers, *addresses, *stage_arguments, *scalars, *divisor.arguments)
        return value, changed
    launch = plan, device, pointers, scalars, divisor
    vanishing = tuple([w and v for w, v in zip(wanted, plan.vanishing, strict=True)])
    wanted = tuple([w and not v for w, v in zip(wanted, plan.vanishing, strict=True)])
    along, speculation = None, None
    if has_value and plan.scalar and True in wanted and options.one_pass_enabled():
        # Value and gradients read the same arrays. Two passes took 1.8 times the traffic.
        along, speculation = value_and_gradients(*launch, wanted)
    elif has_value:
        along = reduced_or_not(*launch)
    products: list[Any] = [None] * len(wanted)
    if True in wanted:
        products = gradients(*launch, wanted, grad_output, grad_output_strides, speculation)
    return along, [x if z is None else z for x, z in zip(products, zeros(plan, device, vanishing), strict=True)]


def zeros(plan: Plan, device: Device, wanted: Wanted) -> list[Any]:
    """Returns zeros for the wanted gradients, None for the others."""
    return [device.zeros(*plan.allocation(slot)[:3]) if w else None for slot, w in enumerate(wanted)]


def reduced_or_not(
    plan: Plan,
    device: Device,
    pointers: Sequence[int],
    scalars: Sequence[float],
    divisor: Divisor,
    auxiliary: Sequence[int] = (),
) -> Any:
    """Computes the value, reduced or not."""
    return (value if plan.scalar else unreduced)(plan, device, pointers, scalars, divisor, auxiliary)

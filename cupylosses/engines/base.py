"""The protocol of an engine: how a call of one of its losses becomes a plan, and how a plan's kernels are launched.

An engine is one folder: a definition class, a plan, a code generator, a reference and kernel files. Nothing outside of
the folder knows it: backends, transforms, warm-up and documentation work on the classes below.

Every kernel takes its arguments in one order, so that a launch is one concatenation of tuples:

    arrays of the call | gradients it writes | auxiliary outputs | the stage's own | scalars | divisor | fixed

    stage                own arguments                          auxiliary outputs
    value                workspace, value                       yes
    value_and_gradient   workspace, value, [grad_output,]       yes
                         expected, used
    verify_gradient      grad_output, used, expected            no
    unreduced            value [, partials]                     yes
    gradient             grad_output [, partials]               no
    from_residual        residual, grad_output, stride          no
    hvp                  value, grad_output                     no
    product              grad_output                            no

"Used" is the address of the recorded values of ``grad_output``. Backward launches ``value_and_gradient`` again, with a
``grad_output``, which is null in forward, and without workspace, value and auxiliary outputs: the kernel compares the
records with the true one, and writes the gradients again if they are for another. Only a plan that `checks_apart` has a
second kernel for that, ``verify_gradient``, and no ``grad_output`` in the first. There the value's kernel leaves more
behind the records, such as the partial sums of gradients that are summed beside the value (`Plan.summed`), which
``verify_gradient`` combines: both kernels take the addresses of these gradients, too.

The divisor of a sum is two arguments or none: a constant and its reciprocal; a constant and the address of a number
that a launch before has found (`Plan.counted`); nothing where the kernels find it themselves (`Plan.self_counting`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

from cupylosses.call import Call, Parts
from cupylosses.definition.base import Definition
from cupylosses.engines.device import Device, Divisor
from cupylosses.engines.strides import dense_strides
from cupylosses.jit import compiler
from cupylosses.jit.gpu import Chip

#: Which arrays require a gradient, or have a tangent: one entry per array of a call.
Wanted = tuple[bool, ...]


@dataclass(frozen=True)
class TensorSpec:
    """Dtype, shape, strides in elements, and address modulo 16 of an array, as a plan sees it."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    misalignment: int = 0

    #: True if the gradient is written over the array.
    in_place: ClassVar[bool] = False

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    def lies_as(self, strides: Sequence[int]) -> bool:
        """True if these strides place every element where it is: those of dimensions of size 1 say nothing."""
        return all([n == 1 or s == t for n, s, t in zip(self.shape, self.strides, strides, strict=True)])

    @cached_property
    def gradient(self) -> TensorSpec:
        """A dense tensor of the same shape and dtype, with the dimensions in the same order: the gradient's."""
        return TensorSpec(self.dtype, self.shape, dense_strides(self.shape, self.strides))


def contiguous(dtype: str, shape: Sequence[int]) -> TensorSpec:
    """A contiguous, aligned array."""
    return TensorSpec(dtype, tuple(shape), dense_strides(shape, (0,) * len(shape)))


class Step(NamedTuple):
    """Launches that share their arguments and run one after another.

    ``slots`` are the arrays whose gradients they write. ``partials`` is the number of doubles that the first leaves for
    the second, or None if the kernels take none; ``workspace`` that of a `Device.workspace`, 0 if they take none.
    """

    launchers: tuple[compiler.Launcher, ...]
    slots: tuple[int, ...] = ()
    partials: int | None = None
    workspace: int = 0


class Machine(NamedTuple):
    """The GPU that a plan is made for: multiprocessors, limits of the chip, and the class of launchers."""

    processors: int
    chip: Chip
    launcher: Callable[..., Any] = compiler.Launcher

    @classmethod
    def of(cls, device: Device) -> Machine:
        """The machine that a device is."""
        return cls(device.processors, device.chip, device.launcher or compiler.Launcher)


class Plan(ABC):
    """Everything about a call but addresses and numbers. Plans are cached by dtypes, shapes, strides and alignment.

    Attributes:
        tensors: The arrays of the call.
        promoted: The dtype that the operands promote to.
        result: The dtype of the value.
        compute: The dtype of the arithmetic, ``"float32"`` or ``"float64"``.
        shape, strides: Those of the value.
        scalar: True if the value is one number.
        differentiable: The arrays whose gradients kernels can write.
        speculative: The arrays whose gradients the value's kernel can write ahead of backward.
        divisor: The constant part of the divisor of a sum; times the last scalar if ``weighted``; times a sum that a
            launch before finds if ``counted``, or that every kernel finds itself if ``self_counting``: these kernels
            take no divisor.
        tallies: True of a ``counted`` plan whose kernels can also count while they evaluate: for a value alone, and for
            speculative gradients, which then assume that everything counts, if there are any.
        assumes: True of a ``self_counting`` plan whose speculative gradients assume that everything counts, until they
            are verified.
        partials: Doubles of workspace that the reduction of the value takes.
        records: Recorded values of the ``grad_output`` that a speculative gradient was written for.
        slot: The entry for it in the table of expected values.
        auxiliary: The outputs besides the value, in the kernels' order; None for those that this call leaves out.
        residual: What forward leaves for backward to write gradients from, such as coefficients of each row; None for
            plans that recompute.
        keeps_residual: True if backward of one number, too, writes gradients from the residual; forward writes none.
        consumes_residual: True if backward writes over the residual, and computes without it if it is repeated; but not
            under the capture of a graph, which may run again without forward.
        expects_sum: True if forward of a value with dimensions writes the gradients ahead, for one ``grad_output`` of
            all rows.
        recomputes: True if backward of a value with dimensions leaves the residual out, because its gradients are found
            as fast from the operands.
        empty: True if there is nothing to compute, which is the reference's to do.
        takes_status: True if kernels take the address of the device's status words as the last scalar, to report bad
            data (labels out of range) there; ``reports`` if they do for this call, ``waits`` if the call waits for it.
        fused_hvp: True if one kernel computes the value and the gradients of a derivative along tangents.
        has_product: True if a kernel of such a derivative computes gradients without the value.
        contracts: True if the value of a derivative along tangents has no kernel: it is `Engine.contracted`.
        always_written: The gradients that this kernel writes whether they are wanted or not.
        vanishing: The gradients of a derivative along tangents that are 0 wherever they exist, without a kernel.
        divides_by: The positions of the arrays that a ``counted`` divisor depends on differentiably.
        overwrites: True if the gradient of the first array is written over it; ``single_use`` if a second backward is
            refused, whether or not the array could be written over.
        clears: True if kernels write only what differs from 0 in gradients that are zeros before.
        misalignment, misaligned: Bytes behind a multiple of 16 at which gradients begin as their operands do, and how
            many of the first arrays that concerns.
        takes_one_upstream: True if a value per row has kernels for one ``grad_output`` of all rows, that of a sum.
        warning: A warning for the user about these shapes.
    """

    engine: Engine
    loss: Definition
    static: Any
    tensors: tuple[TensorSpec, ...]
    machine: Machine
    promoted: str
    result: str
    compute: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    scalar: bool
    differentiable: Wanted
    speculative: Wanted
    divisor: float = 1.0
    weighted: bool = False
    counted: bool = False
    self_counting: bool = False
    tallies: bool = False
    assumes: bool = False
    partials: int
    records: int
    slot: int
    auxiliary: tuple[TensorSpec | None, ...] = ()
    residual: TensorSpec | None = None
    keeps_residual: bool = False
    consumes_residual: bool = False
    expects_sum: bool = False
    recomputes: bool = False
    empty: bool = False
    takes_status: bool = False
    reports: bool = False
    waits: bool = False
    fused_hvp: bool = False
    has_product: bool = False
    contracts: bool = False
    always_written: Wanted
    vanishing: Wanted
    divides_by: tuple[int, ...] = ()
    overwrites: bool = False
    single_use: bool = False
    clears: bool = False
    misalignment: int = 0
    misaligned: int = 0
    takes_one_upstream: bool = False
    warning: str | None = None
    #: True if it runs itself (`.composite.CompositePlan`), on arrays in place of addresses.
    composite: bool = False
    #: Number of arrays, the last ones, that backward adds to: autograd neither saves nor compares them.
    updated: int = 0
    run_value: Callable[..., Any]
    run_value_and_gradients: Callable[..., Any]
    run_gradients: Callable[..., Any]
    run_from_residual: Callable[..., Any]
    run_hvp: Callable[..., Any]

    def __init__(
        self, engine: Engine, call: Call, tensors: tuple[TensorSpec, ...], promoted: str, machine: Machine
    ) -> None:
        self.engine, self.loss, self.static = engine, call.loss, call.static
        self.tensors, self.promoted, self.machine = tensors, promoted, machine
        self.compute = "float64" if promoted == "float64" else "float32"
        self.nothing = self.always_written = self.vanishing = (False,) * len(tensors)
        #: True if the call asks for auxiliary outputs.
        self.asks = any([x is not None and x is not self.residual for x in self.auxiliary])
        #: No auxiliary outputs, as addresses.
        self.no_auxiliary = (0,) * len(self.auxiliary)
        self.operand_strides = [x.strides for x in tensors]
        #: The launches that write gradients speculatively, by what is wanted and whether the divisor is on the device.
        self.one_pass: dict[tuple[Wanted, bool], Any] = {}
        self._writable: dict[Wanted, Wanted] = {}
        self._ahead: dict[Wanted, Wanted] = {}
        self._buffers: dict[Wanted, list[tuple[int, tuple[Any, ...]]]] = {}

    # What an engine supplies

    @abstractmethod
    def launcher(self, stage: str, wanted: Wanted, counted: bool) -> compiler.Launcher:
        """The launcher of a stage that is one kernel."""

    @abstractmethod
    def unreduced_step(self, counted: bool) -> Step:
        """The launches that compute a value with dimensions."""

    @abstractmethod
    def gradient_steps(
        self, wanted: Wanted, upstream: tuple[tuple[int, ...], int] | None, counted: bool
    ) -> Sequence[Step]:
        """The launches that write gradients for a ``grad_output`` of these strides and misalignment; None stands for
        one number, for which gradients that the check writes are left out.
        """

    def denominator(self) -> tuple[Plan, tuple[int, ...], float]:
        """The plan whose value is the divisor of a ``counted`` or ``self_counting`` one; the arrays that it reads; and
        a factor.
        """
        raise NotImplementedError

    def upstream_strides(self) -> tuple[int, ...] | None:
        """The strides that ``grad_output`` must have in `gradient_steps`; None if any will do."""
        return None

    # What every plan has

    @cached_property
    def constant(self) -> Divisor:
        """The divisor if nothing but its constant part counts, or the kernels find it."""
        return Divisor(None if self.self_counting else self.divisor)

    def writable(self, wanted: Wanted) -> Wanted:
        """The wanted gradients that the value's kernel can write."""
        found = self._writable.get(wanted)
        if found is None:
            found = self._writable[wanted] = tuple([w and s for w, s in zip(wanted, self.speculative, strict=True)])
        return found

    def summed(self, wanted: Wanted) -> Wanted:
        """The wanted gradients that are sums of what the value's kernel has at hand: it leaves partial sums, which
        `verify_gradient` combines.
        """
        return self.nothing

    def ahead(self, wanted: Wanted) -> Wanted:
        """The wanted gradients for which the value's kernel does all that takes a pass over the arrays."""
        found = self._ahead.get(wanted)
        if found is None:
            pairs = zip(self.writable(wanted), self.summed(wanted), strict=True)
            found = self._ahead[wanted] = tuple([w or s for w, s in pairs])
        return found

    def follows_value(self, wanted: Wanted) -> bool:
        """True if the check goes on from what the value's kernel leaves, such as partial sums: it cannot write the
        gradients without that.
        """
        return True in self.summed(wanted)

    def checks_apart(self, wanted: Wanted) -> bool:
        """True if the check of backward is a kernel of its own, and not that of the value."""
        return self.follows_value(wanted)

    def check_stage(self, wanted: Wanted) -> str:
        """The stage whose kernel is the check of backward."""
        return "verify_gradient" if self.checks_apart(wanted) else "value_and_gradient"

    def check(self, wanted: Wanted, counted: bool) -> compiler.Launcher:
        """The launcher of the check of backward, which also writes gradients that nobody has written."""
        return self.launcher(self.check_stage(wanted), wanted, counted)

    def recorded(self, wanted: Wanted) -> int:
        """The doubles that the value's kernel leaves for the check: `records`, and partial sums."""
        return self.records

    def zeroed(self, wanted: Wanted) -> bool:
        """True if these doubles begin as zeros. The kernel leaves zeros where it wants them the next time."""
        return False

    def allocation(self, slot: int) -> tuple[Any, ...]:
        """The arguments of `Device.empty` for the gradient of an array."""
        x = self.tensors[slot]
        found = x.shape, self.gradient_strides(slot), x.dtype
        return (*found, self.misalignment) if slot < self.misaligned else found

    def gradient_strides(self, slot: int) -> tuple[int, ...]:
        """The strides of the gradient of an array."""
        return self.tensors[slot].gradient.strides

    def buffers(self, wanted: Wanted) -> list[tuple[int, tuple[Any, ...]]]:
        """Slot and `allocation` of each wanted gradient."""
        found = self._buffers.get(wanted)
        if found is None:
            found = self._buffers[wanted] = [(slot, self.allocation(slot)) for slot, w in enumerate(wanted) if w]
        return found

    @property
    def with_aligned_gradients(self) -> Plan:
        """The plan of the same call whose gradients begin at 16 bytes, which graph compilers rely on."""
        return self

    def aligned(self, addresses: Sequence[int]) -> bool:
        """True if arrays at these addresses can be read by this plan's kernels."""
        # Gradients have been laid out as the operands were.
        alike = all([p % 16 == self.misalignment for p in addresses[: self.misaligned]])
        return alike and all([p % 16 in (0, x.misalignment) for p, x in zip(addresses, self.tensors)])

    def relocated(self, tensors: tuple[TensorSpec, ...]) -> Plan:
        """The plan of the same call for arrays that lie elsewhere or have other strides."""
        call = Call(self.loss, (), self.static)
        return type(self)(self.engine, call, tensors, self.promoted, self.machine)


class Apart(NamedTuple):
    """A call as calls of which each has one kernel, and the way from their values to the result.

    ``finish(xp, values)`` works on arrays of one library through the array API. Of a quotient ``below(values)`` is the
    divisor, which is ``factor`` times the value of the second call if there is one.
    """

    calls: tuple[Call, ...]
    finish: Callable[[Any, list[Any]], Any]
    below: Callable[[list[Any]], Any] = lambda values: 1.0
    factor: float = 1.0


class Question(NamedTuple):
    """A small call of another library's function, which is asked whether it takes such arguments: names, shapes and
    dtypes of arrays, all ones, and options.
    """

    arrays: tuple[tuple[str, tuple[int, ...], str], ...]
    options: tuple[tuple[str, Any], ...] = ()


#: Why a call is not one that a drop-in may take over.
ARGUMENTS = "arguments that are torch's to take or to refuse"
SHAPES = "operands of different shapes, or empty ones"
DTYPE = "dtypes that not both take"


class Engine(ABC):
    """What the rest of the library asks of an engine. An instance makes itself the engine of its definitions."""

    name: ClassVar[str]
    #: True if plans depend on the chip: its shared memory, and clusters.
    needs_chip: ClassVar[bool] = False
    Definition: ClassVar[type[Definition]]
    #: The named tuple that calls have for ``static``.
    Static: ClassVar[Any]

    def __init__(self) -> None:
        self.Definition.engine = self

    # Arguments

    @abstractmethod
    def bind(
        self, loss: Any, arrays: tuple[Any, ...], settings: tuple[Any, ...], legacy: tuple[Any, ...] = ()
    ) -> Parts:
        """Checks what needs no array: ``arrays`` in the order of ``loss.array_names``, ``settings`` in that of
        ``loss.setting_names``, and torch's deprecated ``size_average`` and ``reduce``.
        """

    @abstractmethod
    def names(self, call: Call) -> list[str]:
        """The names of a call's arrays."""

    @abstractmethod
    def check(self, call: Call) -> None:
        """Checks dtypes and shapes of a call's arrays, which may be of any library."""

    @abstractmethod
    def promoted(self, call: Call, zero_d_widens: bool = False) -> str:
        """The dtype that the operands promote to: by torch's rule, in which tensors without dimensions do not widen
        others, unless ``zero_d_widens``.
        """

    def warning(self, call: Call) -> str | None:
        """A warning for the user about the shapes of a call."""
        return None

    # Plans

    @abstractmethod
    def plan(self, call: Call, tensors: tuple[TensorSpec, ...], promoted: str, machine: Machine) -> Plan:
        """The plan of a call."""

    def copies(
        self, call: Call, tensors: tuple[TensorSpec, ...], machine: Machine, writes: int
    ) -> Mapping[int, tuple[int, ...]]:
        """The arrays that kernels read from copies, with the strides of these; so many gradients are written."""
        return {}

    def auxiliary_results(self, xp: Any, call: Call, stored: Sequence[Any]) -> list[Any]:
        """The results besides the value that the call asks for, from the auxiliary outputs of kernels (None for those
        that were not stored).
        """
        return []

    def result(self, call: Call, outputs: Sequence[Any]) -> Any:
        """The result of the public function, from the value and the results besides."""
        return outputs[0]

    def unpacked(self, static: Any, packed: Any) -> Any:
        """The result of the public function, from the array that backends return: of definitions that pack several
        differentiable results into one (`Definition.packs`).
        """
        return packed

    def raise_reported(self, device: Device) -> None:  # noqa: B027  (only engines whose kernels report have it)
        """Raises what kernels have reported since the last time."""

    def overwrites(self, call: Call) -> bool:
        """True if the gradient of the first array may be written over it."""
        return False

    def waits(self, call: Call) -> bool:
        """True if a call waits for what its kernels report."""
        return False

    # Formulas

    @abstractmethod
    def reference(self, call: Call, promoted: str, readable: bool = True) -> Any:
        """The result by the reference formula through the array API. Values that would have to be read by the host are
        checked only if they are ``readable``.
        """

    # Transforms

    def modified(self, loss: Any, modification: str) -> Any:
        """The loss of a key, "~" and a modification, which the keys of this engine's modified losses end in."""
        raise LookupError(f"{loss.name}: the {self.name} engine has no modified losses, got {modification!r}")

    @abstractmethod
    def floating(self, call: Call) -> Wanted:
        """The arrays that formulas can be differentiated by."""

    def has_residual(self, call: Call) -> bool:
        """True if backward takes a residual of forward."""
        return False

    @abstractmethod
    def outputs(self, call: Call, strides: Sequence[tuple[int, ...]], promoted: str) -> list[TensorSpec]:
        """The specs of value, residual and auxiliary results for arrays of these strides; sizes may be symbols."""

    @abstractmethod
    def apart(self, call: Call, promoted: str, wanted: Wanted, traced: bool) -> Apart | None:
        """The call as ones that transforms can take apart, of which those arrays that are ``wanted`` require a
        gradient; None if it is one itself. ``traced`` is True where a compiler only needs an operator.
        """

    @abstractmethod
    def divided_by(self, call: Call, divisor: Any, grad_output: Any) -> tuple[Call, Any]:
        """A call without a divisor of its own, and the ``grad_output`` for it, whose gradients are those of the call
        with this divisor, a float or an array.
        """

    @abstractmethod
    def jvp(self, call: Call, moving: Wanted, tangents: tuple[Any, ...]) -> Call:
        """The derivative of a call along tangents of the arrays that are ``moving``: a call with these appended."""

    #: True if `contracted` gives the derivative of a value along tangents.
    contracts: ClassVar[bool] = False

    def contracted(self, xp: Any, call: Call, gradients: Sequence[Any], tangents: Sequence[Any]) -> Any:
        """The derivative of the value along tangents, from the gradients of its sum; None if it does not follow from
        these, but from the kernel of the derivative.
        """
        return None

    @abstractmethod
    def primal(self, call: Call) -> tuple[Call, Wanted, tuple[Any, ...]]:
        """The arguments of `jvp` that a call was made from."""

    @abstractmethod
    def batched(self, call: Call, dims: Sequence[int | None], size: int) -> Call | None:
        """One call for a batch whose dimension is ``dims`` of each array (None: the array is shared), with the batch
        first in the result; None if only the formula can take such a batch.
        """

    # Warm-up

    @abstractmethod
    def placeholders(
        self, loss: Any, dtypes: Sequence[str], shapes: Sequence[tuple[int, ...]], options: Mapping[str, Any]
    ) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Dtype and shape of every argument that may be an array, by name, for a warm-up with these dtypes and shapes
        of the operands, of which the last serves the rest.
        """

    def trained(self, call: Call) -> Wanted:
        """The arrays that require a gradient in training, unless a warm-up names others: the first."""
        return tuple([i == 0 for i in range(len(call.arrays))])

    # Standing in for torch's functions

    def differs(self, loss: Any, call: Call, takes: Callable[[Question], str | None], autocast: bool) -> str | None:
        """Why torch's own function would not return the result of a call, but for rounding; None if it would.

        ``takes`` asks torch's function, once for equal questions: the dtype of what it returns, None if it refuses.
        """
        return ARGUMENTS

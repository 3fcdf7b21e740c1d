"""Protocol of an engine: an engine turns a call into a plan, and a plan has the launchers of its kernels.

An engine is one folder with a definition class, a plan, a code generator and a reference formula, and its kernel files.
Backends, transforms, warm-up and documentation depend on no particular engine; they use the classes below.

All kernels take their arguments in the same order, so that a launch is one concatenation of tuples:

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

``expected`` is the address of the expected ``grad_output``, ``used`` the address of the values that forward recorded.
Backward launches ``value_and_gradient`` again with the true ``grad_output``, which is null in forward, and with null
pointers for workspace, value and auxiliary outputs. The kernel compares the records with the true ``grad_output`` and
writes the gradients again if they differ.

Only a plan with `Plan.checks_apart` has a second kernel for this check, ``verify_gradient``; its first kernel takes no
``grad_output``. The value's kernel may then store more data after the records, such as partial sums of the gradients
that are summed in its pass (`Plan.summed`). ``verify_gradient`` combines them, so both kernels also take the addresses
of these gradients.

The divisor of a sum is two arguments or none: a constant and its reciprocal; a constant and the address of a number
that an earlier launch computes (`Plan.counted`); or nothing if the kernels compute it themselves
(`Plan.self_counting`).
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

#: One entry per array of a call: True if it requires a gradient, or has a tangent.
Wanted = tuple[bool, ...]


@dataclass(frozen=True)
class TensorSpec:
    """Dtype, shape, strides in elements, and address modulo 16 (``misalignment``) of an array, as a plan sees it."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    misalignment: int = 0

    #: True if the gradient overwrites the array.
    in_place: ClassVar[bool] = False

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    def lies_as(self, strides: Sequence[int]) -> bool:
        """True if these strides address every element where it is stored. Dimensions of size 1 are ignored."""
        return all([n == 1 or s == t for n, s, t in zip(self.shape, self.strides, strides, strict=True)])

    @cached_property
    def gradient(self) -> TensorSpec:
        """Spec of the gradient: dense, of the same shape and dtype, with the dimensions in the same order."""
        return TensorSpec(self.dtype, self.shape, dense_strides(self.shape, self.strides))


def contiguous(dtype: str, shape: Sequence[int]) -> TensorSpec:
    """Returns the spec of a contiguous, aligned array."""
    return TensorSpec(dtype, tuple(shape), dense_strides(shape, (0,) * len(shape)))


class Step(NamedTuple):
    """Launches that share their arguments and run one after another.

    ``slots`` are the positions of the arrays whose gradients they write. ``partials`` is the number of doubles that the
    first kernel stores for the second, or None if the kernels take no such buffer. ``workspace`` is the number of
    partial sums in a `Device.workspace`, 0 if the kernels take none.
    """

    launchers: tuple[compiler.Launcher, ...]
    slots: tuple[int, ...] = ()
    partials: int | None = None
    workspace: int = 0


class Machine(NamedTuple):
    """GPU that a plan is made for: number of multiprocessors, limits of the chip, and the class of launchers."""

    processors: int
    chip: Chip
    launcher: Callable[..., Any] = compiler.Launcher

    @classmethod
    def of(cls, device: Device) -> Machine:
        """Returns the machine of a device."""
        return cls(device.processors, device.chip, device.launcher or compiler.Launcher)


class Plan(ABC):
    """A call without its addresses and numbers. Plans are cached by dtypes, shapes, strides and alignment.

    Attributes:
        tensors: Specs of the arrays of the call.
        promoted: Dtype that the operands promote to.
        result: Dtype of the value.
        compute: Dtype of the arithmetic, ``"float32"`` or ``"float64"``.
        shape, strides: Shape and strides of the value.
        scalar: True if the value is one number.
        differentiable: True for each array whose gradient kernels can write.
        speculative: True for each array whose gradient the value's kernel can write speculatively.
        divisor: Constant factor of the divisor of a sum. Further factors are the last scalar if ``weighted``, and a sum
            that an earlier launch computes if ``counted``, or that every kernel computes itself if ``self_counting``.
            Kernels of a ``self_counting`` plan take no divisor.
        tallies: True for a ``counted`` plan whose kernels can also count while they evaluate, for forward only and for
            speculative gradients. The gradients then assume that everything counts.
        assumes: True for a ``self_counting`` plan whose speculative gradients assume that everything counts until they
            are verified.
        partials: Number of doubles of workspace for the reduction of the value.
        records: Number of recorded values of the ``grad_output`` that a speculative gradient was written for.
        slot: Index of this plan's ``grad_output`` in the table of expected values.
        auxiliary: Specs of the outputs besides the value, in the kernels' order; None for outputs that this call omits.
        residual: Spec of the data that forward stores for backward to compute gradients from, such as coefficients of
            each row; None for plans that recompute.
        keeps_residual: True if a reduced loss, too, computes its gradients from the residual in backward. Forward then
            writes no gradients.
        consumes_residual: True if backward overwrites the residual. A repeated backward computes without it. A captured
            backward does not overwrite it, because the graph may run again without forward.
        expects_sum: True if forward of a value with dimensions writes speculative gradients, for one ``grad_output``
            of all rows.
        recomputes: True if backward of a value with dimensions does not use the residual, because its gradients are
            computed as fast from the operands.
        empty: True if no kernel computes this call, for instance because it has no elements; the reference formula
            computes it.
        takes_status: True if the last scalar of the kernels is the address of the device's status words, to which they
            report bad data (labels out of range).
        reports: True if the kernels report bad data for this call.
        waits: True if the call waits for these reports.
        fused_hvp: True if one kernel computes the value and the gradients of a derivative along tangents.
        has_product: True if a kernel of such a derivative computes the gradients without the value.
        contracts: True if the value of a derivative along tangents has no kernel; `Engine.contracted` computes it.
        always_written: True for each array whose gradient the ``fused_hvp`` kernel writes even if it is not wanted.
        vanishing: True for each array with respect to which a derivative along tangents has a gradient of 0 wherever
            this gradient exists. No kernel computes these gradients.
        divides_by: Positions of the arrays that a ``counted`` divisor depends on differentiably.
        overwrites: True if the gradient of the first array overwrites it.
        single_use: True if a second backward is refused, even if the array could not be overwritten.
        clears: True if kernels store only nonzero elements of gradients, which must be allocated as zeros.
        misalignment: Address modulo 16, in bytes, of the gradients of the first ``misaligned`` arrays; it is that of
            their operands.
        misaligned: Number of arrays, the first ones, whose gradients are allocated with ``misalignment``.
        takes_one_upstream: True if a value per row has kernels for one ``grad_output`` of all rows, as a sum gives it.
        warning: Warning for the user about these shapes.
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
    #: True if the plan runs itself (`.composite.CompositePlan`), on arrays instead of addresses.
    composite: bool = False
    #: Number of arrays, the last ones, that backward adds to. Autograd neither saves them nor checks their versions.
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
        #: True if the call wants auxiliary outputs.
        self.asks = any([x is not None and x is not self.residual for x in self.auxiliary])
        #: Null addresses in place of the auxiliary outputs.
        self.no_auxiliary = (0,) * len(self.auxiliary)
        self.operand_strides = [x.strides for x in tensors]
        #: Launches of speculative gradients, by the wanted gradients and a flag: True if the divisor is on the device.
        self.one_pass: dict[tuple[Wanted, bool], Any] = {}
        self._writable: dict[Wanted, Wanted] = {}
        self._ahead: dict[Wanted, Wanted] = {}
        self._buffers: dict[Wanted, list[tuple[int, tuple[Any, ...]]]] = {}

    # Methods that an engine supplies

    @abstractmethod
    def launcher(self, stage: str, wanted: Wanted, counted: bool) -> compiler.Launcher:
        """Returns the launcher of a stage that is a single kernel."""

    @abstractmethod
    def unreduced_step(self, counted: bool) -> Step:
        """Returns the launches that compute a value with dimensions."""

    @abstractmethod
    def gradient_steps(
        self, wanted: Wanted, upstream: tuple[tuple[int, ...], int] | None, counted: bool
    ) -> Sequence[Step]:
        """Returns the launches that write gradients for a ``grad_output`` of these strides and misalignment.

        An ``upstream`` of None stands for one number. Gradients that the check of backward writes are then left out.
        """

    def denominator(self) -> tuple[Plan, tuple[int, ...], float]:
        """Returns the plan that computes the divisor of a ``counted`` or ``self_counting`` plan.

        Also returns the positions of the arrays that it reads, and a factor of its value.
        """
        raise NotImplementedError

    def upstream_strides(self) -> tuple[int, ...] | None:
        """Returns the strides that `gradient_steps` needs of ``grad_output``; None if it takes any."""
        return None

    # Attributes of every plan

    @cached_property
    def constant(self) -> Divisor:
        """Divisor of a sum that has no factor besides the constant, or whose kernels compute their own."""
        return Divisor(None if self.self_counting else self.divisor)

    def writable(self, wanted: Wanted) -> Wanted:
        """Returns the wanted gradients that the value's kernel can write."""
        writable = self._writable.get(wanted)
        if writable is None:
            writable = self._writable[wanted] = tuple([w and s for w, s in zip(wanted, self.speculative, strict=True)])
        return writable

    def summed(self, wanted: Wanted) -> Wanted:
        """Returns the wanted gradients that the value's kernel can sum up in its own pass.

        It stores partial sums, which ``verify_gradient`` combines.
        """
        return self.nothing

    def ahead(self, wanted: Wanted) -> Wanted:
        """Returns the wanted gradients that need no pass over the arrays besides the one of the value's kernel."""
        ahead = self._ahead.get(wanted)
        if ahead is None:
            pairs = zip(self.writable(wanted), self.summed(wanted), strict=True)
            ahead = self._ahead[wanted] = tuple([w or s for w, s in pairs])
        return ahead

    def follows_value(self, wanted: Wanted) -> bool:
        """True if the check needs data that the value's kernel stores, such as partial sums.

        Without them it cannot write the gradients.
        """
        return True in self.summed(wanted)

    def checks_apart(self, wanted: Wanted) -> bool:
        """True if the check of backward is a separate kernel, not the value's kernel."""
        return self.follows_value(wanted)

    def check_stage(self, wanted: Wanted) -> str:
        """Returns the stage whose kernel is the check of backward."""
        return "verify_gradient" if self.checks_apart(wanted) else "value_and_gradient"

    def check(self, wanted: Wanted, counted: bool) -> compiler.Launcher:
        """Returns the launcher of the check of backward. It can also write gradients that forward did not write."""
        return self.launcher(self.check_stage(wanted), wanted, counted)

    def recorded(self, wanted: Wanted) -> int:
        """Returns the number of doubles that the value's kernel stores for the check: `records`, and partial sums."""
        return self.records

    def zeroed(self, wanted: Wanted) -> bool:
        """True if these doubles must start as zeros. The kernel resets those that it needs to be zero the next time."""
        return False

    def allocation(self, slot: int) -> tuple[Any, ...]:
        """Returns the arguments of `Device.empty` for the gradient of an array."""
        x = self.tensors[slot]
        arguments = x.shape, self.gradient_strides(slot), x.dtype
        return (*arguments, self.misalignment) if slot < self.misaligned else arguments

    def gradient_strides(self, slot: int) -> tuple[int, ...]:
        """Returns the strides of the gradient of an array."""
        return self.tensors[slot].gradient.strides

    def buffers(self, wanted: Wanted) -> list[tuple[int, tuple[Any, ...]]]:
        """Returns the slot and `allocation` of each wanted gradient."""
        buffers = self._buffers.get(wanted)
        if buffers is None:
            buffers = self._buffers[wanted] = [(slot, self.allocation(slot)) for slot, w in enumerate(wanted) if w]
        return buffers

    @property
    def with_aligned_gradients(self) -> Plan:
        """Plan of the same call whose gradients are aligned to 16 bytes, which graph compilers rely on."""
        return self

    def aligned(self, addresses: Sequence[int]) -> bool:
        """True if this plan's kernels can read arrays at these addresses."""
        # Gradients are allocated with the misalignment of the operands that the plan was made for.
        alike = all([p % 16 == self.misalignment for p in addresses[: self.misaligned]])
        return alike and all([p % 16 in (0, x.misalignment) for p, x in zip(addresses, self.tensors)])

    def relocated(self, tensors: tuple[TensorSpec, ...]) -> Plan:
        """Returns the plan of the same call for arrays of other alignment or strides."""
        call = Call(self.loss, (), self.static)
        return type(self)(self.engine, call, tensors, self.promoted, self.machine)


class Apart(NamedTuple):
    """A call split into calls of one kernel each, and the functions that combine their values.

    ``finish(xp, values)`` computes the result from arrays of one library through the array API. For a quotient,
    ``below(values)`` is the divisor: ``factor`` times the value of the second call if there is one.
    """

    calls: tuple[Call, ...]
    finish: Callable[[Any, list[Any]], Any]
    below: Callable[[list[Any]], Any] = lambda values: 1.0
    factor: float = 1.0


class Question(NamedTuple):
    """A small test call of another library's function, to find out if the function accepts such arguments.

    ``arrays`` are names, shapes and dtypes of arrays of ones; ``options`` are other arguments.
    """

    arrays: tuple[tuple[str, tuple[int, ...], str], ...]
    options: tuple[tuple[str, Any], ...] = ()


#: Reasons for which a drop-in does not take a call over.
ARGUMENTS = "arguments that are torch's to take or to refuse"
SHAPES = "operands of different shapes, or empty ones"
DTYPE = "dtypes that not both take"


class Engine(ABC):
    """Interface of an engine to the rest of the library. An instance registers itself with its class of definitions."""

    name: ClassVar[str]
    #: True if plans depend on the chip: on its shared memory and on clusters.
    needs_chip: ClassVar[bool] = False
    Definition: ClassVar[type[Definition]]
    #: Class of the named tuple ``Call.static``.
    Static: ClassVar[Any]

    def __init__(self) -> None:
        self.Definition.engine = self

    # Arguments

    @abstractmethod
    def bind(
        self, loss: Any, arrays: tuple[Any, ...], settings: tuple[Any, ...], legacy: tuple[Any, ...] = ()
    ) -> Parts:
        """Checks all that `check` does not, and returns the parts of a call.

        ``arrays`` are in the order of ``loss.array_names``, ``settings`` in the order of ``loss.setting_names``.
        ``legacy`` holds torch's deprecated ``size_average`` and ``reduce``.
        """

    @abstractmethod
    def names(self, call: Call) -> list[str]:
        """Returns the names of a call's arrays."""

    @abstractmethod
    def check(self, call: Call) -> None:
        """Checks the dtypes and shapes of a call's arrays, which may be of any library."""

    @abstractmethod
    def promoted(self, call: Call, zero_d_widens: bool = False) -> str:
        """Returns the dtype that the operands promote to.

        By torch's rule, tensors without dimensions do not widen others, unless ``zero_d_widens`` is set.
        """

    def warning(self, call: Call) -> str | None:
        """Returns a warning for the user about the shapes of a call, or None."""
        return None

    # Plans

    @abstractmethod
    def plan(self, call: Call, tensors: tuple[TensorSpec, ...], promoted: str, machine: Machine) -> Plan:
        """Returns the plan of a call."""

    def copies(
        self, call: Call, tensors: tuple[TensorSpec, ...], machine: Machine, writes: int
    ) -> Mapping[int, tuple[int, ...]]:
        """Returns the arrays that kernels read from copies, with the strides of the copies.

        ``writes`` is the number of gradients that are written.
        """
        return {}

    def auxiliary_results(self, xp: Any, call: Call, stored: Sequence[Any]) -> list[Any]:
        """Returns the results besides the value that the call wants.

        ``stored`` are the auxiliary outputs of kernels, None for those that were not stored.
        """
        return []

    def result(self, call: Call, outputs: Sequence[Any]) -> Any:
        """Returns the result of the public function, from the value and the auxiliary results."""
        return outputs[0]

    def unpacked(self, static: Any, packed: Any) -> Any:
        """Returns the result of the public function, from the array that backends return.

        Definitions with `Definition.packs` pack several differentiable results into one array.
        """
        return packed

    def raise_reported(self, device: Device) -> None:  # noqa: B027  (only engines whose kernels report have it)
        """Raises the error that kernels have reported since the last call, if there is one."""

    def overwrites(self, call: Call) -> bool:
        """True if the gradient of the first array may overwrite it."""
        return False

    def waits(self, call: Call) -> bool:
        """True if a call waits for the reports of its kernels."""
        return False

    # Formulas

    @abstractmethod
    def reference(self, call: Call, promoted: str, readable: bool = True) -> Any:
        """Returns the result of the reference formula through the array API.

        Checks that need the host to read values run only if the values are ``readable``.
        """

    # Transforms

    def modified(self, loss: Any, modification: str) -> Any:
        """Returns a modified loss. Its key is that of ``loss``, followed by "~" and the modification."""
        raise LookupError(f"{loss.name}: the {self.name} engine has no modified losses, got {modification!r}")

    @abstractmethod
    def floating(self, call: Call) -> Wanted:
        """Returns True for each array with respect to which the reference formula can be differentiated."""

    def has_residual(self, call: Call) -> bool:
        """True if backward reads a residual of forward."""
        return False

    @abstractmethod
    def outputs(self, call: Call, strides: Sequence[tuple[int, ...]], promoted: str) -> list[TensorSpec]:
        """Returns the specs of value, residual and auxiliary results for arrays of these strides.

        Sizes may be symbols.
        """

    @abstractmethod
    def apart(self, call: Call, promoted: str, wanted: Wanted, traced: bool) -> Apart | None:
        """Splits a call into calls that transforms can handle; returns None if it is one already.

        The ``wanted`` arrays require a gradient. ``traced`` is True if a compiler only needs an operator.
        """

    @abstractmethod
    def divided_by(self, call: Call, divisor: Any, grad_output: Any) -> tuple[Call, Any]:
        """Replaces a call's own divisor by ``divisor``, a float or an array.

        Returns a call without a divisor, and the ``grad_output`` with which it has the same gradients.
        """

    @abstractmethod
    def jvp(self, call: Call, moving: Wanted, tangents: tuple[Any, ...]) -> Call:
        """Returns the derivative of a call along tangents of the ``moving`` arrays: a call with these appended."""

    #: True if `contracted` computes the derivative of a value along tangents.
    contracts: ClassVar[bool] = False

    def contracted(self, xp: Any, call: Call, gradients: Sequence[Any], tangents: Sequence[Any]) -> Any:
        """Returns the derivative of the value along tangents, computed from the gradients of its sum.

        Returns None if it does not follow from these gradients; the kernel of the derivative computes it then.
        """
        return None

    @abstractmethod
    def primal(self, call: Call) -> tuple[Call, Wanted, tuple[Any, ...]]:
        """Returns the arguments with which `jvp` created a call."""

    @abstractmethod
    def batched(self, call: Call, dims: Sequence[int | None], size: int) -> Call | None:
        """Returns one call for a batch, with the batch dimension first in the result.

        ``dims`` has the batch dimension of each array, None if the array is shared. Returns None if only the reference
        formula can compute such a batch.
        """

    # Warm-up

    @abstractmethod
    def placeholders(
        self, loss: Any, dtypes: Sequence[str], shapes: Sequence[tuple[int, ...]], options: Mapping[str, Any]
    ) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Returns the dtype and shape of every argument that may be an array, by name, for a warm-up.

        ``dtypes`` and ``shapes`` are those of the operands; the last one holds for all further operands.
        """

    def trained(self, call: Call) -> Wanted:
        """Returns True for each array that requires a gradient in training, unless a warm-up names others.

        By default this is only the first array.
        """
        return tuple([i == 0 for i in range(len(call.arrays))])

    # Standing in for torch's functions

    def differs(self, loss: Any, call: Call, takes: Callable[[Question], str | None], autocast: bool) -> str | None:
        """Returns the reason why torch's own function would not return the result of a call, up to rounding.

        Returns None if it would. ``takes`` calls torch's function, once for equal questions, and returns the dtype of
        its result, or None if the function raises.
        """
        return ARGUMENTS

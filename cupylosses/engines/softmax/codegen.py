"""Translation of a softmax loss's definition to CUDA source: the glue of ``kernels/softmax/``.

Class indices and dense targets differ in the functors of the loss, in the program (row data and gradient formulas), in
the readers that move rows, and in launch bounds. :class:`_Indices` and :class:`_Dense` provide these four; entry points
and arguments are common.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cupylosses.definition.expressions import cuda, in_double, names_in
from cupylosses.engines.softmax.definition import SoftmaxLoss
from cupylosses.engines.softmax.layout import (
    BLOCK_THREADS,
    COLUMN_THREADS,
    COUNT_BLOCKS,
    DENSE_ALONE_BLOCKS,
    DENSE_REGISTER_RESIDENT,
    DENSE_SUBWARP_BLOCKS,
    HEAVY_SUBWARP_BLOCKS,
    LABEL_ONLY_RESIDENT,
    LABEL_ONLY_TILE_RESIDENT,
    PACKED_BLOCKS,
    PACKED_THREADS,
    ROLLED_RESIDENT,
    SECOND_CLASSES,
    SECOND_REGISTER_THREADS,
    SLICE_RESIDENT,
    STREAMED_THREADS,
    STRIDED,
    SUBWARP_BLOCK_THREADS,
    THREADS,
    TILE_RESIDENT,
    TWO_PASS_DENSE_VECTORS,
    TWO_PASS_VECTORS,
    VECTORS,
    block_blocks,
    column_resident,
    dense_column_blocks,
    dense_register_classes,
    interleaved_bytes,
    interleaved_threads,
    packed_buffers,
    packed_rows_of_lane,
    pipelined_threads,
    rolled,
    second_column_blocks,
    second_resident,
    subwarp_blocks,
    thread_per_row_blocks,
    thread_per_row_threads,
    windowed_blocks,
)
from cupylosses.engines.strides import MAX_RANK
from cupylosses.interop import ITEMSIZE
from cupylosses.jit.glue import STORAGE, call_signature, choice_constant, counted_divisor, written_at
from cupylosses.jit.gpu import MAX_THREADS, WARP
from cupylosses.jit.kernel import Kernel
from cupylosses.jit.sources import FUNCTOR, nested

#: File of ``kernels/softmax/`` that moves rows with class indices, by layout.
FILES = {
    "subwarp": "resident_rows",
    "block": "resident_rows",
    "two_pass": "rows",
    "streamed": "streamed_rows",
    "pipelined": "pipelined_rows",
    "thread_per_row": "thread_per_row",
    "interleaved_rows": "thread_per_row",
    "thread_per_row_packed": "thread_per_row_packed",
    "thread_per_row_two_pass": "rows",
    "packed_rows": "packed_rows",
    "columns": "columns",
    "column_tiles": "column_tiles",
    "column_slices": "column_slices",
    "label_only": "label_only",
    "label_only_tiles": "label_only_tiles",
    "label_only_few": "label_only_tiles",
    "label_only_sparse": "label_only_rows",
    "label_only_rows": "label_only_rows",
    "label_only_columns": "label_only_rows",
}
#: File that moves rows with dense targets, by layout.
DENSE_FILES = {
    "subwarp": "resident_dense_rows",
    "block": "resident_dense_rows",
    "windowed": "windowed_dense_rows",
    "thread_per_row": "dense_thread_per_row",
    "packed_rows": "packed_dense_rows",
    "columns": "dense_columns",
    "thread_per_row_two_pass": "dense_thread_per_row",
}

#: Layouts of log-probabilities in which a lane processes several rows.
LANES_OF_LABELS = ("label_only_sparse", "label_only_rows", "label_only_columns")
#: Layouts of second derivatives whose rows are staged in shared memory.
STAGED_SECOND = ("staged_thread_per_row", "staged_packed_rows")

#: Entry points, with a description of each. The keys are the kinds of :class:`SoftmaxKernel`.
KINDS = {
    "value": "the reduced value",
    "value_and_gradient": "the reduced value and the gradients for the expected grad_output, in backward the true one",
    "verify_gradient": "the gradients for the true grad_output, where blocks share rows by their classes",
    "unreduced": "a value per row",
    "from_residual": "the gradient from the coefficients that an earlier kernel left of each row (class indices)",
    "gradient": "the gradients for a grad_output per row (dense targets)",
    "denominator": "the divisor of a mean",
    "hvp": "the derivatives along tangents of a value per row, and of the gradients",
}

#: Kinds with auxiliary outputs.
_FORWARD = ("value", "value_and_gradient", "unreduced")


@dataclass(frozen=True)
class SoftmaxKernel(Kernel):
    """A compiled module of the softmax engine. Equal instances have equal source.

    Attributes:
        indices: True for class indices, False for dense targets.
        layout: Mapping of threads to rows, as in :mod:`cupylosses.engines.softmax.layout`, or "streamed" or
            "pipelined".
        weight, mask: Dtypes, or "" if the kernel reads none.
        gradients, has_tangent: One entry per operand: True if its gradient is written, or if it has a tangent.
        valued: False if a kernel of second derivatives does not compute the value.
        counted: True if the divisor of the sum is on the device; otherwise it is an argument, unless one of the next
            two is set.
        self_counting: True if the kernel counts active rows itself, before it evaluates them.
        tallies: True if the kernel counts active rows while it evaluates them.
        cluster: Number of blocks of a cluster that share a row.
        prefetch: True if the next row is prefetched into L2.
        shifted, gathered: True if logits are aligned differently from their gradients, or gathered because their
            classes are strided; for interleaved rows as in `RowLayout`.
        in_place: Dtype of gradients that overwrite the logits, or "".
        per_thread: Classes per thread, or vectors of a row, if their number is a compile-time constant; or vectors, or
            rows, of a tile of log-probabilities per lane; or vectors that a thread has in flight, in slices and in
            streamed rows.
        warps: Warps that share a tile of columns, or warps of a block of pipelined or streamed rows, or of long rows of
            second derivatives.
        lanes: Lanes that share a row in pipelined rows and in second derivatives in registers; threads that read a
            class, in slices.
        edges: Maximum number of edge elements of a row per thread.
        partial: True if a row has fewer vectors than all its lanes can hold, in second derivatives in registers.
        step: Class stride, in elements, of logits that warps copy together with small gaps; 0 otherwise.
        padded: True if such rows are padded in shared memory.
        staggered: As in `RowLayout`.
    """

    loss: SoftmaxLoss
    kind: str
    indices: bool
    layout: str
    vec_size: int
    input: str
    target: str
    weight: str
    mask: str
    result: str
    compute: str
    flags: tuple[int, ...] = ()
    gradients: tuple[bool, ...] = ()
    has_tangent: tuple[bool, ...] = ()
    valued: bool = True
    rank: int = 1
    smoothed: bool = False
    capped: bool = False
    plain: bool = False
    limit: int = 0
    counted: bool = False
    self_counting: bool = False
    tallies: bool = False
    cluster: int = 1
    prefetch: bool = False
    shifted: bool = False
    gathered: bool = False
    in_place: str = ""
    per_thread: int = 0
    warps: int = 1
    lanes: int = 0
    edges: int = 0
    partial: bool = False
    step: int = 0
    padded: bool = False
    staggered: bool = False

    @property
    def companions(self) -> tuple[str, ...]:
        return ("value_and_gradient", "verify_gradient") if self.sliced else ()

    @property
    def storage(self) -> tuple[str, ...]:
        """Dtypes of the operands, for error messages."""
        return (self.input, self.target)

    @property
    def title(self) -> str:
        """Description of the kernel, for error messages and file names."""
        names = (self.input, self.target, self.weight, self.mask)
        dtypes = "-".join([STORAGE[x][1] if x else "none" for x in names])
        result, layout = STORAGE[self.result][1], self.layout.replace(" ", "-")
        parts = [self.loss.name, *([] if self.indices else ["dense"]), self.kind, dtypes, result, layout]
        parts += [f"x{self.vec_size}"]
        for name, choices in (("grad", () if self.indices else self.gradients), ("tangent", self.has_tangent)):
            parts += [name + "".join([str(int(x)) for x in choices])] if choices else []
        parts += ["flags" + "".join([str(x) for x in self.flags])] if self.flags else []
        parts += [f"rank{self.rank}"] if self.rank > 1 else []
        switches = (
            "smoothed",
            "capped",
            "plain",
            "counted",
            "self_counting",
            "tallies",
            "prefetch",
            "shifted",
            "gathered",
            "staggered",
            "partial",
            "padded",
        )
        parts += [x.replace("_", "-") for x in switches if getattr(self, x)]
        parts += [f"limit{self.limit}"] if self.limit else []
        parts += [] if self.valued else ["no-value"]
        parts += [f"{self.warps}-warps"] if self.warps > 1 else []
        parts += [f"{self.per_thread}-per-thread"] if self.per_thread else []
        parts += [f"{self.lanes}-lanes"] if self.lanes else []
        parts += [f"{self.edges}-edges"] if self.edges else []
        parts += [f"step-{self.step}"] if self.step else []
        parts += [f"in-place-{STORAGE[self.in_place][1]}"] if self.in_place else []
        return "_".join([*parts, *([f"cluster{self.cluster}"] if self.cluster > 1 else [])])

    @property
    def number(self) -> str:
        """Type of the arithmetic. For second derivatives it is a number with a tangent."""
        return f"NestedDual<{STORAGE[self.compute][0]}>" if self.kind == "hvp" else STORAGE[self.compute][0]

    def grid(self, planned: int, at_once: Callable[[], int]) -> int:
        """Limits the grid to the blocks that run at once, for kernels whose warps or blocks claim chunks of rows.

        A block that waits for its turn would start when only its own chunks are left to claim. Some kernels gain by
        such blocks (measured): rows that a lane reads from columns, rows that a lane processes alone without adding up
        losses, and second derivatives of divergences. Clusters are planned by the number that fits.
        """
        gains_by_waiting = self.layout == "columns" or (
            self.layout == "packed_rows" and self.kind in ("gradient", "hvp")
        )
        gains_by_waiting |= self.kind == "hvp" and not (self.indices or self.loss.affine)
        claims = self.kind in CLAIMING_STAGES and not (self.sliced or self.cluster > 1)
        return min(planned, at_once()) if claims and not gains_by_waiting else planned

    @property
    def entry(self) -> str:
        """Name of the entry point."""
        dense = "" if self.indices else "dense_"
        return f"{self.loss.name}_{dense}{self.kind}_{STORAGE[self.input][1]}"

    @property
    def _target(self) -> type[_Indices | _Dense]:
        return _Indices if self.indices else _Dense

    @property
    def sliced(self) -> bool:
        """True if blocks share rows by their classes."""
        return self.layout == "column_slices"

    @property
    def evaluates_hvp(self) -> bool:
        """True if the second derivatives of exponentials are written out (``hvp_rows.cuh``)."""
        return self.indices and self.kind == "hvp" and not self.capped and self.layout != "label_only"

    @property
    def evaluates_hvp_by_logits(self) -> bool:
        """True if those of dense targets are (``dense_hvp_rows.cuh``): only the logits have tangents and gradients."""
        if self.indices or self.kind != "hvp" or self.capped or self.layout not in ("subwarp", "block"):
            return False
        alone = self.has_tangent == self.gradients == (True, False)
        return alone and (self.loss.affine or (self.loss.balanced and self.plain and not self.valued))

    @property
    def files(self) -> tuple[str, ...]:
        target = self._target
        if in_registers(self):
            return (*FUNCTOR, "softmax/dense_register_rows.cuh", *(["softmax/count_rows.cuh"] * self.self_counting))
        if self.kind == "hvp":
            base, second = target.second_files
            files = base.get(self.layout, base[""])
            if self.layout == "register_rows":
                second = "register_hvp" if self.indices else "register_dense_hvp"
            elif self.evaluates_hvp:
                second = "hvp_rows"
            elif self.evaluates_hvp_by_logits:
                files, second = "dense_rows", "dense_hvp_rows"
            elif self.layout == "staged_packed_rows":
                second = "packed_dense_hvp"
            return (*nested((*FUNCTOR, f"softmax/{files}.cuh")), f"softmax/{second}.cuh")
        if self.kind == "denominator":
            return (*FUNCTOR, "softmax/count_rows.cuh", *([] if self.indices else ["softmax/dense_rows.cuh"]))
        count = ["softmax/count_rows.cuh"] if self.self_counting else []
        file = "paired_rows" if self.paired else target.files[self.layout]
        return (*FUNCTOR, f"softmax/{file}.cuh", *count)

    @property
    def paired(self) -> bool:
        """True if each thread processes interleaved rows as pairs of neighbours."""
        return self.layout == "interleaved_rows" and ITEMSIZE[self.input] == 2

    @property
    def narrow(self) -> bool:
        names = (self.input, self.result) if self.indices else (self.input, self.target, self.result)
        if self.layout == "register_rows" or self.evaluates_hvp_by_logits:
            # The derivative along the tangents is a double, but no more accurate than the operands.
            names = (self.input, self.target)
        return all(ITEMSIZE[x] == 2 for x in names) and self.compute == "float32"

    @property
    def arguments(self) -> list[str]:
        input, target, result = (STORAGE[x][0] for x in (self.input, self.target, self.result))
        arrays = [f"const {input}* input", f"const {target}* target"]
        if self.kind == "denominator":
            arrays = arrays[1:] if self.indices else []
        arrays += [f"const {STORAGE[self.weight][0]}* weights"] if self.weight else []
        arrays += [f"const {STORAGE[self.mask][0]}* mask"] if self.mask else []
        tangents = (f"const {input}* input_tangent", f"const {target}* target_tangent")
        arrays += [x for x, moves in zip(tangents, self.has_tangent, strict=False) if moves]
        gradient = STORAGE[self.in_place][0] if self.in_place else input
        written = zip((f"{gradient}* input_gradients", f"{target}* target_gradients"), self.gradients, strict=False)
        gradients = [x for x, w in written if w]
        auxiliary = []
        if self.kind in _FORWARD:
            auxiliary = [f"{self.number}* lse"]
            if self.indices:
                auxiliary += ["unsigned char* correct", f"GradCoeffs<{self.number}>* residual"]
        of_kind = {
            "value": ["double* memory", f"{result}* value"],
            "value_and_gradient": [
                "double* memory",
                f"{result}* value",
                *([] if self.sliced else [f"const {result}* grad_output"]),
                "double* expected_grad_output",
                "double* used_grad_output",
            ],
            "verify_gradient": [
                f"const {result}* grad_output",
                "double* used_grad_output",
                "double* expected_grad_output",
            ],
            "unreduced": [f"{result}* values", *["double* memory"] * self.sliced],
            "from_residual": [
                f"GradCoeffs<{self.number}>* residual",
                f"const {result}* grad_output",
                "int64 result_stride",
            ],
            "gradient": [f"const {result}* grad_output"],
            "denominator": ["double* memory", "double* value"],
            "hvp": [*[f"{result}* values"] * self.valued, f"const {result}* grad_output"],
        }[self.kind]
        scalars = []
        if self.kind != "denominator":
            scalars = [*(f"double {x.name}_" for x in self.loss.parameters), "double logit_scale", "double softcap"]
            scalars += ["RowStatus* status"] if self.indices else []
        divisor = ["double multiple", "const double* count"] if self.counted else ["double divisor", "double scale"]
        if self.self_counting or self.tallies:
            divisor = []
        if self.tallies and self.kind != "value":
            divisor = ["unsigned* missed"]
        return [*arrays, *gradients, *auxiliary, *of_kind, *scalars, *divisor]

    def given(self, name: str) -> str:
        """Returns the name of an argument of the entry point, or ``nullptr`` if there is none of this name."""
        return name if any(x.endswith(f" {name}") for x in self.arguments) else "nullptr"

    def glue(self) -> str:
        target = self._target
        return f"{target.functors(self)}\n{_entry(self, target)}"


def in_registers(kernel: SoftmaxKernel) -> bool:
    """True if a lane holds the classes of both operands of its rows in registers."""
    if kernel.indices or kernel.layout not in ("packed_rows", "columns"):
        return False
    return 0 < kernel.per_thread <= dense_register_classes(kernel.layout, kernel.loss.affine, kernel.capped)


_CALLS = {
    "value": "row_value<Reader>(program, group, chunks, memory, divisor, value)",
    "value_and_gradient": (
        "row_value_and_gradient<Reader>(program, group, chunks, memory, divisor, scale, value, grad_output, "
        "expected_grad_output, used_grad_output)"
    ),
    "unreduced": "row_values<Reader>(program, group, chunks)",
    "gradient": "row_gradient<Reader>(program, group, chunks, grad_output)",
    "denominator": "count_rows(program, chunks, memory, value)",
    "hvp": "row_gradient<Reader>(program, group, chunks, grad_output)",
}


#: Lines that compute the divisor, or its reciprocal, in a self-counting kernel.
SELF_COUNTED = {
    "value": ["  const SelfCount<Program> divisor{program};"],
    "value_and_gradient": [
        "  const double divisor = self_count(program), scale = reciprocal_or_zero(divisor);",
    ],
    "verify_gradient": ["  const SelfCountedScale<Program> scale{program};"],
    "from_residual": ["  const double scale = reciprocal_or_zero(self_count(program));"],
}

#: SELF_COUNTED for kernels that add the weights of labels instead.
_SELF_WEIGHED = {
    kind: [x.replace("<Program>", "<Program, true>").replace("self_count(", "self_count<true>(") for x in lines]
    for kind, lines in SELF_COUNTED.items()
}


#: Calls of the gradient kernels that tally.
TALLIED = {
    "value_and_gradient": (
        "row_value_and_assumed_gradient<Reader>(program, group, chunks, memory, missed, value, grad_output, "
        "expected_grad_output, used_grad_output)"
    ),
}

#: Early return, in backward, of a worker that has no gradient to correct.
RETURN_IN_PLACE = (
    "  if (worker_gradient_is_in_place(group, chunks, grad_output, used_grad_output, expected_grad_output)) return;"
)

#: Calls that differ in kernels whose blocks share rows by their classes, by kind and ``tallies``. These have a separate
#: kernel for backward.
_SLICED = {
    **{
        ("value_and_gradient", tallies): calls["value_and_gradient"].replace(
            " grad_output,", " static_cast<const Result*>(nullptr),"
        )
        for tallies, calls in ((False, _CALLS), (True, TALLIED))
    },
    ("unreduced", False): "sliced_row_values<Reader>(program, group, chunks, memory)",
    ("verify_gradient", False): (
        "verify_sliced_gradient<Reader>(program, group, chunks, scale, grad_output, used_grad_output, "
        "expected_grad_output)"
    ),
    ("verify_gradient", True): (
        "verify_assumed_sliced_gradient<Reader>(program, group, chunks, grad_output, used_grad_output, "
        "expected_grad_output)"
    ),
    ("from_residual", False): (
        "apply_grad_coeffs_in_slices<Reader>(program, group, chunks, result_stride, scale, grad_output)"
    ),
}

#: Kinds of kernels that can tally.
TALLYING_STAGES = frozenset(("value", "value_and_gradient", "verify_gradient"))

#: Kinds of kernels that can count active rows themselves: all that divide.
SELF_COUNTING_STAGES = frozenset(SELF_COUNTED)
#: Kinds of kernels whose warps or blocks claim chunks of rows until none is left.
CLAIMING_STAGES = frozenset(("value", "unreduced", "value_and_gradient", "gradient", "hvp"))


def _entry(kernel: SoftmaxKernel, target: type[_Indices | _Dense]) -> str:
    fixed = ["int64 chunks", "int width", "const __grid_constant__ Space space"]
    fixed = [*(["int64 ignored", "int64 site"] if kernel.indices else []), *fixed]
    program, construct = target.program(kernel)
    group, reader = target.reader(kernel)
    call = (kernel.tallies and TALLIED.get(kernel.kind)) or _CALLS.get(kernel.kind) or target.from_residual(kernel)
    if kernel.sliced:
        call = _SLICED.get((kernel.kind, kernel.tallies), call)
    cluster = f" CLUSTER_DIMS({kernel.cluster})" if kernel.cluster > 1 else ""
    weighs = kernel.indices and bool(kernel.weight) and kernel.loss.mean_of_weights
    lines = [
        f"using Result = {STORAGE[kernel.result][0]};",
        f"using Space = RowSpace<{space_rank_name(kernel.rank)}>;",
        f"using Program = {program};",
        "using Compute = Program::Compute;",
        *([f"using Reader = {reader};"] if "Reader" in call else []),
        "",
        f'extern "C" __global__ void __launch_bounds__({target.bounds(kernel)}){cluster}',
        f"{kernel.entry}({', '.join([*kernel.arguments, *fixed])}) {{",
        *counted_divisor(kernel.counted, kernel.kind != "value"),
        *construct,
        *([f"  const {group};"] if "group" in call else []),
        *([RETURN_IN_PLACE] if kernel.kind == "value_and_gradient" and not (kernel.tallies or kernel.sliced) else []),
        *((_SELF_WEIGHED if weighs else SELF_COUNTED)[kernel.kind] if kernel.self_counting else []),
        *(["  const Tally<Program> divisor{program};"] if kernel.tallies and kernel.kind == "value" else []),
        f"  {call};",
        "}",
    ]
    return "\n".join(lines) + "\n"


def space_rank_name(rank: int) -> str:
    """Template argument of ``RowSpace`` for this number of dimensions."""
    return "kMaxRank" if rank == MAX_RANK else str(rank)


def _dtype(name: str) -> str:
    return STORAGE[name][0] if name else "Absent"


def _bool(x: object) -> str:
    return str(bool(x)).lower()


def _in_place(kernel: SoftmaxKernel) -> list[str]:
    """Template arguments for gradients that overwrite the logits."""
    return [STORAGE[kernel.in_place][0], "true"] if kernel.in_place else []


def _parameters(kernel: SoftmaxKernel) -> str:
    # The divisor of a mean does not depend on parameters.
    return ", ".join(["0.0" if kernel.kind == "denominator" else f"{x.name}_" for x in kernel.loss.parameters])


def _logit(kernel: SoftmaxKernel) -> str:
    return "{1.0, 0.0}" if kernel.kind == "denominator" else "{logit_scale, softcap}"


def _functor(name: str, kernel: SoftmaxKernel, numbers: Sequence[str]) -> list[str]:
    """Head of a functor, whose constructor rounds parameters and constants of the loss once, not per row or class."""
    loss, scalar = kernel.loss, STORAGE[kernel.compute][0]
    fixed = _fixed(kernel)
    numbers = [x for x in numbers if x not in fixed]
    lines = [f"struct {name} {{", f"  using Compute = {kernel.number};"]
    lines += [*(f"  {scalar} {x}_kept;" for x in numbers), ""]
    parameters = ", ".join([f"double {x.name}_" for x in loss.parameters])
    lines += [f"  __device__ __forceinline__ explicit {name}({parameters}) {{"]
    for constant, expression in loss.constants.items():
        if constant in numbers:
            lines += [*written_at(loss, constant), f"    const double {constant}_ = {in_double(expression)};"]
    return [*lines, *(f"    {x}_kept = opaque(static_cast<{scalar}>({x}_));" for x in numbers), "  }", ""]


def _constants(kernel: SoftmaxKernel, numbers: Sequence[str]) -> list[str]:
    """Declarations of the numbers that a functor's call operator uses: stored ones and compile-time constants."""
    fixed, scalar = _fixed(kernel), STORAGE[kernel.compute][0]
    used = [x for x in fixed if x in numbers]
    lines = [f"    constexpr double {x}_ = {in_double(fixed[x])};" for x in fixed if used]
    lines += [f"    const auto {x} = ::constant<{kernel.number}>(static_cast<{scalar}>({x}_));" for x in used]
    return lines + [f"    const auto {x} = ::constant<{kernel.number}>({x}_kept);" for x in numbers if x not in fixed]


def _fixed(kernel: SoftmaxKernel) -> dict[str, str]:
    """Parameters and constants of a loss that are compile-time constants: without smoothing, its parameter is 0.

    Products with 1 and sums with 0 would take three of about a hundred instructions for a short row.
    """
    loss = kernel.loss
    smoothing = loss.specialize.get("smoothed")
    if smoothing is None or kernel.smoothed or not kernel.indices:
        return {}
    names = {x.name for x in loss.parameters} - {smoothing}
    constants = {k: x for k, x in loss.constants.items() if not names & names_in(x)}
    return {smoothing: "0", **constants}


def _strided_threads(kernel: SoftmaxKernel) -> int:
    """Threads of a block that keep strided rows in shared memory."""
    threads = interleaved_threads if kernel.layout == "interleaved_rows" else thread_per_row_threads
    return threads(kernel.per_thread, kernel.vec_size, ITEMSIZE[kernel.input])


def _cluster_group(kernel: SoftmaxKernel) -> str:
    """Declaration of the blocks that share a row.

    Most blocks of second derivatives have fewer warps, which leaves shared memory for the numbers with tangents that
    they exchange.
    """
    warps = f", {_second_threads(kernel) // WARP}" if kernel.kind == "hvp" else ""
    return f"ClusterGroup<{kernel.cluster}{warps}> group"


def _second_threads(kernel: SoftmaxKernel) -> int:
    """Maximum number of threads of a block that shares a row for second derivatives."""
    return max(THREADS, kernel.warps * WARP)


def _second_vectors(kernel: SoftmaxKernel) -> int:
    """Number of vectors that a thread loads together for second derivatives.

    More classes with tangents would not fit into its registers.
    """
    if kernel.evaluates_hvp and kernel.vec_size * ITEMSIZE[kernel.input] == 16:
        # Two vectors leave registers for fewer threads, and took up to 1.3 times as long.
        return 1
    return max(1, SECOND_CLASSES // (4 if kernel.compute == "float64" else 1) // kernel.vec_size)


def _lane_vectors(kernel: SoftmaxKernel) -> str:
    """Template arguments for second derivatives of rows in registers."""
    ways = ", ".join(map(_bool, (kernel.edges, kernel.partial, kernel.shifted)))
    return f"{kernel.vec_size}, {kernel.per_thread}, {ways}"


def _row_group(kernel: SoftmaxKernel) -> str:
    """Declaration of the lanes that share a row, or of the warps that share rows of strided classes."""
    return (
        f"ColumnWarps<{kernel.warps}> group{{{{{{1}}}}}}"
        if kernel.warps > 1
        else f"SubwarpGroup group{{{kernel.lanes}}}"
    )


def _register_bounds(kernel: SoftmaxKernel) -> str:
    """Launch bounds for second derivatives of rows in registers."""
    size = max(ITEMSIZE[x] for x in (kernel.input, *(() if kernel.indices else (kernel.target,))))
    if kernel.warps > 1:
        heavy = kernel.smoothed or not kernel.indices
        blocks = second_column_blocks(kernel.warps, kernel.per_thread, size, heavy)
        return f"{kernel.warps * WARP}, {blocks}"
    resident = second_resident(kernel.per_thread, kernel.vec_size, size)
    return f"{SECOND_REGISTER_THREADS}, {resident // SECOND_REGISTER_THREADS}"


class _Indices:
    """Class indices: the loss of a row is a function of four numbers (nll, rest, lse, smooth) and its class weight."""

    files = FILES
    second_files = {"": "rows", "label_only": "label_only"}, "second_derivatives"

    @staticmethod
    def functors(kernel: SoftmaxKernel) -> str:
        loss, compute = kernel.loss, kernel.number
        part, penalty = ("plain", None) if kernel.plain else ("row", loss.penalty)
        expression = (kernel.plain and loss.plain.get("row")) or loss.expressions["row"]
        names = ["nll", "rest", "lse", "smooth", "weight"] if loss.softmax else [*loss.sees("row")]
        parameters = [x.name for x in loss.parameters]
        used = names_in(f"{expression} {penalty or ''}")
        numbers = [x for x in [*parameters, *loss.constants] if not kernel.plain or x in used]
        lines = [*_functor("Loss", kernel, numbers), *call_signature(names), *_constants(kernel, numbers)]
        lines += [*written_at(loss, part), f"    const auto _row = ::lift<{compute}>({cuda(expression)});"]
        if penalty is None:
            lines += ["    return _row;"]
        else:
            lines += [*written_at(loss, "penalty"), f"    return _row + ::lift<{compute}>({cuda(penalty)});"]
        return "\n".join([*lines, f'#line 1 "<{kernel.title}>.entries"', "  }", "};"]) + "\n"

    @staticmethod
    def program(kernel: SoftmaxKernel) -> tuple[str, list[str]]:
        types = [_dtype(x) for x in (kernel.input, kernel.target, kernel.weight, kernel.mask, kernel.result)]
        types += [_bool(kernel.smoothed), _bool(kernel.capped), *_in_place(kernel)]
        program = f"RowProgram<Loss, Space, {', '.join(types)}>"
        second, argument = kernel.kind == "hvp", kernel.given
        values, lse, correct, residual = (argument(x) for x in ("values", "lse", "correct", "residual"))
        stored = [x for x in (values, lse, correct, residual) if x != "nullptr"]
        per_row = " || ".join([f"{x} != nullptr" for x in stored]) or "0"
        rows = [
            f"Loss{{{_parameters(kernel)}}}, space, {argument('input')}, {argument('input_gradients')}, target,",
            f"                        {'weights' if kernel.weight else 'nullptr'},",
            f"                        {'mask' if kernel.mask else 'nullptr'}, {_logit(kernel)},",
            f"                        ignored, {argument('status')}, site, {values}, {lse}, {correct}, {residual},",
            f"                        {per_row}",
        ]
        if second:
            rows = [f"{{{rows[0]}", *rows[1:-1], f"{rows[-1]}}}, input_tangent"]
            program = f"HvpProgram<{program}>"
        return program, [f"  const Program program{{{rows[0]}", *(f"  {x}" for x in rows[1:-1]), f"  {rows[-1]}}};"]

    @staticmethod
    def reader(kernel: SoftmaxKernel) -> tuple[str, str]:
        """Declaration of the threads that share rows, and the type that moves the rows."""
        second = kernel.kind == "hvp"
        if kernel.layout == "label_only":
            return "SubwarpGroup group{width}", "LabelOnlyReader"
        if kernel.layout in ("label_only_tiles", "label_only_few"):
            few = _bool(kernel.layout == "label_only_few")
            return "SubwarpGroup group{width}", f"LabelOnlyTilesReader<{kernel.vec_size}, {kernel.per_thread}, {few}>"
        if kernel.layout in LANES_OF_LABELS:
            return "SlicedRows group{{1}, width}", f"LabelOnlyRowsReader<{_Indices._labels(kernel)}>"
        if kernel.layout == "thread_per_row_packed":
            return "SubwarpGroup group{1}", "PackedThreadPerRowReader"
        if kernel.layout in STRIDED:
            if kernel.paired:
                halves = ", ".join(map(_bool, (kernel.step == 2, not kernel.shifted, not kernel.gathered)))
                return "SubwarpGroup group{1}", f"PairedRowsReader<{kernel.vec_size}, {kernel.per_thread}, {halves}>"
            reader = "ThreadPerRowReader" if kernel.layout == "thread_per_row" else "InterleavedRowsReader"
            threads = _strided_threads(kernel) if kernel.per_thread else 0
            return "SubwarpGroup group{1}", f"{reader}<{kernel.vec_size}, {kernel.per_thread}, {threads}>"
        if kernel.layout == "packed_rows":
            word = kernel.vec_size * ITEMSIZE[kernel.input]
            each = packed_rows_of_lane(kernel.per_thread)
            words = f"{word}, true" if kernel.shifted else f"{word}"
            words += f", {kernel.step}, {_bool(kernel.padded)}" * (kernel.step > 0)
            ahead = _bool(packed_buffers(kernel.per_thread) > 1)
            return "SubwarpGroup group{1}", f"PackedReader<{kernel.per_thread}, {each}, {ahead}, {words}>"
        if kernel.layout == "columns":
            return (
                "SubwarpGroup group{1}",
                f"ColumnReader<{kernel.vec_size}, {kernel.per_thread}, {_bool(kernel.staggered)}>",
            )
        if kernel.layout == "column_tiles":
            shape = f"{kernel.vec_size}, {kernel.warps}, {_bool(kernel.staggered)}"
            return f"ClusterGroup<{kernel.cluster}> group", f"TileReader<{shape}>"
        if kernel.layout == "column_slices":
            shape = f"{kernel.vec_size}, {kernel.lanes}, {kernel.warps}, {kernel.per_thread}"
            return "ColumnSlices group{{}, width}", f"ColumnSliceReader<{shape}>"
        if kernel.layout == "pipelined":
            parts = max(1, kernel.lanes // WARP)
            group = "PipelinedWarp group{{{32}}, width}" if parts == 1 else "PipelinedBlock group{{}, width}"
            shape = f"{min(kernel.lanes, WARP)}, {parts}, {kernel.warps if parts == 1 else 1}"
            return group, f"PipelinedReader<{kernel.vec_size}, {VECTORS}, {shape}>"
        # The width is a constant if one thread processes a row alone: nothing is exchanged.
        alone = kernel.layout in ("thread_per_row_two_pass", *STAGED_SECOND)
        group = f"SubwarpGroup group{{{'1' if alone else 'width'}}}"
        if kernel.layout == "register_rows":
            return _row_group(kernel), f"RegisterHvpReader<{_lane_vectors(kernel)}>"
        if kernel.layout == "subwarp" and kernel.kind not in ("from_residual", "hvp"):
            group = "BlockOfSubwarps group{{width}}"
        elif kernel.layout == "streamed":
            group = "StreamingBlock group{{}, width}"
        elif kernel.layout in ("block", "two_pass"):
            group = _cluster_group(kernel)
        if kernel.layout in STAGED_SECOND:
            source = "StagedHvpColumn<Program::Storage>"
            if kernel.layout == "staged_packed_rows":
                word = kernel.vec_size * ITEMSIZE[kernel.input]
                source = f"PackedHvpRows<Program::Storage, {kernel.per_thread}, {word}>"
            return group, f"StagedHvpReader<{source}>"
        if kernel.evaluates_hvp:
            return group, f"HvpReader<{_Indices._size(kernel)}, {_bool(kernel.shifted)}>"
        if second or kernel.layout == "two_pass":
            return group, f"TwoPassReader<{_Indices._size(kernel)}>"
        if kernel.layout == "streamed":
            return group, f"StreamedReader<{kernel.vec_size}, {kernel.per_thread}>"
        switches = ", ".join(map(_bool, (kernel.prefetch, kernel.shifted, kernel.gathered)))
        return group, f"ResidentReader<{kernel.vec_size}, {kernel.edges}, {switches}>"

    @staticmethod
    def _size(kernel: SoftmaxKernel) -> str:
        vectors = _second_vectors(kernel) if kernel.kind == "hvp" else TWO_PASS_VECTORS
        if kernel.kind == "hvp" and not kernel.evaluates_hvp:
            vectors = max(TWO_PASS_DENSE_VECTORS, vectors)
        return f"{kernel.vec_size}, {vectors}"

    @staticmethod
    def _labels(kernel: SoftmaxKernel) -> str:
        if kernel.layout == "label_only_columns":
            return f"LabelOnlyColumns<{kernel.vec_size}>"
        if kernel.layout == "label_only_sparse":
            return f"LabelOnlySparse<{kernel.per_thread}>"
        return f"LabelOnlyShort<{kernel.vec_size}, {kernel.per_thread}>"

    @staticmethod
    def from_residual(kernel: SoftmaxKernel) -> str:
        if kernel.layout == "label_only":
            return "apply_grad_coeffs_label_only(program, group, result_stride, scale, grad_output)"
        if kernel.layout in ("label_only_tiles", "label_only_few"):
            call = f"apply_grad_coeffs_label_only_tiles<{kernel.vec_size}, {kernel.per_thread}>"
            return f"{call}(program, group, chunks, result_stride, scale, grad_output)"
        if kernel.layout in LANES_OF_LABELS:
            call = f"apply_grad_coeffs_label_only_rows<{_Indices._labels(kernel)}>"
            return f"{call}(program, group, chunks, result_stride, scale, grad_output)"
        if kernel.layout == "thread_per_row":
            return f"apply_grad_coeffs_thread_per_row<{kernel.vec_size}>(program, result_stride, scale, grad_output)"
        size = _Indices._size(kernel)
        size += ", true" if kernel.shifted else ""
        return f"apply_grad_coeffs<{size}>(program, group, chunks, result_stride, scale, grad_output)"

    @staticmethod
    def bounds(kernel: SoftmaxKernel) -> str:
        """Launch bounds: threads of a block, and blocks of a multiprocessor."""
        layout, second = kernel.layout, kernel.kind == "hvp"
        bounds = f"{MAX_THREADS}" if layout in ("block", "two_pass") and not second else f"{_second_threads(kernel)}"
        if layout == "register_rows":
            return _register_bounds(kernel)
        if kernel.kind == "denominator":
            return f"{THREADS}, {COUNT_BLOCKS}"
        # Numbers of 8 bytes take two registers, and the class weights of smoothed labels take some more. With a cap,
        # fewer classes are in flight, and spilled values are used once per row.
        more = kernel.smoothed and not kernel.capped and ITEMSIZE[kernel.input] == 4 and layout == "block"
        fewer = 2 if kernel.compute == "float64" else 1.5 if more else 1
        if layout == "subwarp" and kernel.kind != "denominator" and not second:
            return f"{SUBWARP_BLOCK_THREADS}, {int(subwarp_blocks(kernel.edges) / fewer)}"
        if layout == "block" and kernel.kind != "from_residual" and not second:
            crowded = kernel.capped or (kernel.gathered and ITEMSIZE[kernel.input] < 4)
            of_block = block_blocks(kernel.cluster, kernel.smoothed or kernel.capped, crowded)
            return f"{BLOCK_THREADS}, {int(of_block / fewer)}"
        if layout in STRIDED and not second:
            classes, vec_size, size = kernel.per_thread, kernel.vec_size, ITEMSIZE[kernel.input]
            if not classes or vec_size == 1:
                return f"{bounds}, 3"
            threads, of_warp = _strided_threads(kernel), classes * vec_size * size * WARP
            if layout == "interleaved_rows":
                of_warp = interleaved_bytes(classes, vec_size, size)
            # Pairs of rows take more registers; with smoothing or a cap they would spill.
            crowded = kernel.paired and (kernel.smoothed or kernel.capped)
            return f"{threads}, {thread_per_row_blocks(threads, threads // WARP * of_warp, crowded)}"
        if layout == "packed_rows":
            if rolled(kernel.per_thread, kernel.smoothed or kernel.capped, kernel.shifted):
                return f"{PACKED_THREADS}, {int(ROLLED_RESIDENT / PACKED_THREADS / fewer)}"
            if packed_rows_of_lane(kernel.per_thread) > 1 and fewer == 1:
                return f"{PACKED_THREADS}, {PACKED_BLOCKS}"
            return f"{PACKED_THREADS}"
        if layout == "columns":
            resident = column_resident(kernel.per_thread, kernel.vec_size, ITEMSIZE[kernel.input])
            return f"{COLUMN_THREADS}, {resident // COLUMN_THREADS}"
        if layout == "column_slices":
            return f"{kernel.warps * WARP}, {int(SLICE_RESIDENT / kernel.warps / WARP / fewer)}"
        if layout == "column_tiles" and not second:
            threads = kernel.warps * WARP
            return f"{threads}, {max(1, int(TILE_RESIDENT / threads / fewer))}"
        if layout in ("label_only_tiles", "label_only_few") and not second:
            return f"{bounds}, {LABEL_ONLY_TILE_RESIDENT // THREADS}"
        if layout in LANES_OF_LABELS and not second:
            return f"{bounds}, {LABEL_ONLY_RESIDENT // THREADS}"
        if layout == "pipelined":
            return f"{kernel.warps * WARP}, {pipelined_threads(kernel.lanes) // (kernel.warps * WARP)}"
        if layout == "streamed":
            threads = kernel.warps * WARP
            return f"{threads}, {STREAMED_THREADS[kernel.per_thread] // threads}"
        return bounds


class _Dense:
    """Dense targets: each class adds a term, a function of its log-probability and its target."""

    files = DENSE_FILES
    second_files = (
        {
            "": "two_pass_dense",
            "thread_per_row_two_pass": "dense_thread_per_row",
            "staged_packed_rows": "dense_rows",
            "register_rows": "dense_rows",
        },
        "dense_second_derivatives",
    )

    @staticmethod
    def functors(kernel: SoftmaxKernel) -> str:
        loss, compute = kernel.loss, kernel.number
        second = "log_q" if loss.dense == "logits" else "target"
        functors = {"Term": ("term", ["log_p", second, "weight", "classes"]), "Penalty": ("penalty", ["lse"])}
        lines = []
        for functor, (part, names) in functors.items():
            expression = loss.expressions.get(part, "0")
            if kernel.plain:
                part, expression = ("plain", loss.plain[part]) if part == "term" else (part, "0")
            elif kernel.limit and part == "term":
                part, expression = "limits", [*loss.limits.values()][kernel.limit - 1]
            used = names_in(expression)
            numbers = [x for x in [*(x.name for x in loss.parameters), *loss.constants] if x in used]
            lines += _functor(functor, kernel, numbers)
            if functor == "Term":
                lines += [f"  static constexpr bool kAffine = {_bool(loss.affine)};"]
                lines += [f"  static constexpr bool kBalanced = {_bool(loss.balanced and kernel.plain)};", ""]
            lines += call_signature(names)
            # The penalty gets no flags, because the compiler would warn about unused ones.
            flags = zip(loss.flags, kernel.flags, strict=True) if part != "penalty" else ()
            lines += [f"    constexpr {choice_constant(x, i)};" for x, i in flags]
            lines += _constants(kernel, numbers)
            lines += [*written_at(loss, part), f"    return ::lift<{compute}>({cuda(expression)});"]
            lines += [f'#line 1 "<{kernel.title}>.entries"', "  }", "};", ""]
        return "\n".join(lines)

    @staticmethod
    def program(kernel: SoftmaxKernel) -> tuple[str, list[str]]:
        types = [_dtype(x) for x in (kernel.input, kernel.target, kernel.weight, kernel.mask, kernel.result)]
        flags = [_bool(x) for x in (kernel.loss.dense == "logits", kernel.capped, *kernel.gradients)]
        program = f"DenseRowProgram<Term, Penalty, Space, {', '.join([*types, *flags, *_in_place(kernel)])}>"
        second, argument, parameters = kernel.kind == "hvp", kernel.given, _parameters(kernel)
        tangents = f"}}, {argument('input_tangent')}, {argument('target_tangent')}"
        construct = [
            f"  const Program program{{{'{' * second}Term{{{parameters}}}, Penalty{{{parameters}}}, space,",
            f"                        {argument('input')}, {argument('target')},",
            f"                        {argument('input_gradients')}, {argument('target_gradients')},",
            f"                        {'weights' if kernel.weight else 'nullptr'},",
            f"                        {'mask' if kernel.mask else 'nullptr'}, {_logit(kernel)},",
            f"                        {argument('values')}, {argument('lse')}{tangents * second}}};",
        ]
        moves = ", ".join([_bool(x) for x in (*kernel.has_tangent, kernel.valued)])
        return f"DenseHvpProgram<{program}, {moves}>" if second else program, construct

    @staticmethod
    def reader(kernel: SoftmaxKernel) -> tuple[str, str]:
        """Declaration of the threads that share rows, and the type that moves the rows."""
        block = kernel.layout in ("block", "windowed", "two_pass")
        # A constant width if one thread processes a row alone, as for class indices.
        width = "width" if kernel.layout == "subwarp" else str(max(1, kernel.lanes))
        group = _cluster_group(kernel) if block else f"SubwarpGroup group{{{width}}}"
        if kernel.layout == "register_rows" or (kernel.warps > 1 and kernel.layout == "columns"):
            group = _row_group(kernel)
        vectors = _second_vectors(kernel) if kernel.kind == "hvp" else TWO_PASS_DENSE_VECTORS
        long = f"DenseReader<TwoPassDense<{kernel.vec_size}, {vectors}>>"
        registers, word = in_registers(kernel), kernel.vec_size * ITEMSIZE[kernel.input]
        if kernel.evaluates_hvp_by_logits:
            return group, f"DenseHvpReader<{kernel.vec_size}>"
        return group, {
            "two_pass": long,
            "windowed": f"WindowedDenseReader<{kernel.vec_size}, {kernel.per_thread}>",
            "thread_per_row": "DenseReader<DenseThreadPerRow<true>>",
            "thread_per_row_two_pass": "DenseReader<DenseThreadPerRow<false>>",
            "staged_packed_rows": f"PackedDenseHvpReader<{kernel.per_thread}, {word}>",
            "register_rows": f"RegisterDenseHvpReader<{_lane_vectors(kernel)}>",
            "columns": (
                f"ColumnDenseRegisterReader<{kernel.per_thread}, {kernel.vec_size}>"
                if registers
                else f"DenseColumnReader<{kernel.vec_size}, {_bool(kernel.shifted)}>"
            ),
            "packed_rows": (
                f"PackedDenseRegisterReader<{kernel.per_thread}, {packed_rows_of_lane(kernel.per_thread)}, {word}>"
                if registers
                else f"PackedDenseReader<{kernel.per_thread}, {word}>"
            ),
        }.get(
            kernel.layout,
            long if kernel.kind == "hvp" else f"ResidentDenseReader<{kernel.vec_size}, {_bool(kernel.shifted)}>",
        )

    @staticmethod
    def from_residual(kernel: SoftmaxKernel) -> str:
        raise NotImplementedError("dense targets leave no residual")

    @staticmethod
    def bounds(kernel: SoftmaxKernel) -> str:
        """Launch bounds: threads of a block, and blocks of a multiprocessor if the compiler would choose otherwise."""
        block = kernel.layout in ("block", "two_pass")
        if in_registers(kernel):
            return f"{PACKED_THREADS}, {DENSE_REGISTER_RESIDENT // PACKED_THREADS}"
        if kernel.layout == "columns" and kernel.warps > 1:
            size = max(ITEMSIZE[kernel.input], ITEMSIZE[kernel.target])
            return f"{kernel.warps * WARP}, {dense_column_blocks(kernel.warps, size)}"
        alone = kernel.layout in ("columns", "packed_rows") and kernel.kind != "hvp"
        light = kernel.loss.balanced and kernel.plain and kernel.gradients != (True, True)
        light = light and ITEMSIZE[kernel.input] == 2
        if alone and light:
            return f"{THREADS}, {DENSE_ALONE_BLOCKS}"
        if kernel.layout == "windowed":
            # The 80 registers that three blocks leave make light terms slower.
            return f"{MAX_THREADS}" if light else f"{kernel.warps * WARP}, {windowed_blocks(kernel.warps)}"
        if kernel.layout == "register_rows":
            return _register_bounds(kernel)
        # Other kernels need more registers than this bound leaves, and would spill.
        light = kernel.loss.affine and not (kernel.capped or kernel.counted)
        if light and kernel.layout == "subwarp" and kernel.kind == "value_and_gradient" and ITEMSIZE[kernel.input] == 2:
            return f"{THREADS}, {DENSE_SUBWARP_BLOCKS}"
        heavy = not (kernel.loss.affine or kernel.plain) and ITEMSIZE[kernel.input] == 2
        if heavy and kernel.layout == "subwarp" and kernel.kind == "value_and_gradient":
            return f"{THREADS}, {HEAVY_SUBWARP_BLOCKS}"
        return f"{MAX_THREADS if block and kernel.kind != 'hvp' else _second_threads(kernel)}"

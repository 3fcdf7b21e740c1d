"""From the definition of a loss of rows to CUDA source: the glue of the row engine (``kernels/softmax/rows.cuh``), as
``codegen.py`` is that of the pointwise one.
"""

from __future__ import annotations

from dataclasses import dataclass

from cupylosses.definition.expressions import cuda, in_double
from cupylosses.engines.softmax.definition import RowLoss
from cupylosses.engines.softmax.layout import (
    BLOCK_THREADS,
    LANE_BLOCKS,
    LANE_THREADS,
    LONG_TERM_VECTORS,
    LONG_VECTORS,
    STREAMED_THREADS,
    THREADS,
    block_blocks,
)
from cupylosses.interop import ITEMSIZE
from cupylosses.jit.glue import STORAGE, call_signature, counted_divisor, written_at
from cupylosses.jit.gpu import MAX_THREADS
from cupylosses.jit.kernel import Kernel
from cupylosses.jit.sources import FUNCTOR, nested

#: The files of ``kernels/`` in the order of their needs.
FILES = (
    *FUNCTOR,
    "softmax/resident_rows.cuh",
    "softmax/streamed_rows.cuh",
    "softmax/row_count.cuh",
    "softmax/columns.cuh",
    "softmax/short_rows.cuh",
    "softmax/row_gather.cuh",
)
#: Those of second derivatives.
SECOND_FILES = (*nested(FILES), "softmax/row_second.cuh")

#: Entry points: what each computes. The keys are the kinds of :class:`RowVariant`.
ROW_KINDS = {
    "value": "the reduced value",
    "value_and_gradient": "the reduced value, and the gradient for the expected grad_output",
    "verify_gradient": "the gradient again, if grad_output was not the expected one",
    "values": "a value per row",
    "apply": "the gradient from what an earlier kernel left of each row",
    "count": "what a mean is divided by",
    "second": "the derivatives along directions of a value per row, and of the gradient",
}


@dataclass(frozen=True)
class RowVariant(Kernel):
    """What distinguishes one compiled module of the softmax engine from another, as the pointwise `Variant`.

    ``layout`` says how threads take rows: "lanes" of a warp or a "block" with the row in shared memory, one that reads
    rows twice ("long") or in parts ("streamed"), or a thread per row, with classes in shared memory ("columns" and
    "short"); of log-probabilities only the label's is read ("gather"). For second derivatives all rows are read twice,
    in "lanes", by a "block" or by a thread each ("long columns"). A row takes a ``cluster`` of blocks, or has the next
    one brought to the cache ``ahead`` of its turn.
    ``weight`` and ``mask`` are dtypes, or "".
    """

    loss: RowLoss
    kind: str
    layout: str
    lanes: int
    input: str
    label: str
    weight: str
    mask: str
    result: str
    compute: str
    many: bool = False
    smoothed: bool = False
    capped: bool = False
    counted: bool = False
    cluster: int = 1
    ahead: bool = False

    @property
    def storage(self) -> tuple[str, ...]:
        """The dtypes of the operands, for error messages."""
        return (self.input, self.label)

    @property
    def title(self) -> str:
        """The variant in words, for error messages and file names."""
        dtypes = "-".join(STORAGE[x][1] if x else "none" for x in (self.input, self.label, self.weight, self.mask))
        parts = [self.loss.name, self.kind, dtypes, STORAGE[self.result][1], self.layout.replace(" ", "-")]
        flags = ("many", "smoothed", "capped", "counted", "ahead")
        parts += [f"x{self.lanes}", *(x for x in flags if getattr(self, x))]
        parts += [f"cluster{self.cluster}"] if self.cluster > 1 else []
        return "_".join(parts)

    @property
    def number(self) -> str:
        """What is computed with."""
        return number_of(self.kind, self.compute)

    @property
    def entry(self) -> str:
        """The name of the kernel."""
        return f"{self.loss.name}_{self.kind}_{STORAGE[self.input][1]}"

    @property
    def files(self) -> tuple[str, ...]:
        return SECOND_FILES if self.kind == "second" else FILES

    @property
    def narrow(self) -> bool:
        return all(ITEMSIZE[x] == 2 for x in (self.input, self.result)) and self.compute == "float32"

    @property
    def arguments(self) -> list[str]:
        return varying_arguments(self)

    def glue(self) -> str:
        return f"{_functor(self)}\n{_entry(self)}"


def varying_arguments(variant: RowVariant) -> list[str]:
    """The declarations of the arguments that differ from call to call, which stand first."""
    storage, result = STORAGE[variant.input][0], STORAGE[variant.result][0]
    arguments = [f"const {storage}* input", f"{storage}* gradients", f"const {STORAGE[variant.label][0]}* labels"]
    arguments += [
        f"const {STORAGE[variant.weight][0] if variant.weight else 'unsigned char'}* weights",
        f"const {STORAGE[variant.mask][0] if variant.mask else 'unsigned char'}* mask",
        "int64 ignored",
        "RowStatus* status",
        "int64 site",
        f"{result}* values",
        f"{variant.number}* lse",
        "unsigned char* correct",
        f"RowSlopes<{variant.number}>* slopes",
        "int64 per_row",
    ]
    arguments += {
        "value": ["double* memory", f"{result}* value"],
        "value_and_gradient": ["double* memory", f"{result}* value", "const double* expected", "double* used"],
        "verify_gradient": [f"const {result}* grad_output", "const double* used", "double* expected"],
        "values": [],
        "apply": [f"const {result}* grad_output", "int64 result_stride"],
        "count": ["double* memory", "double* value"],
        "second": [f"const {storage}* directions", f"const {result}* grad_output"],
    }[variant.kind]
    arguments += ["double logit_scale", "double softcap", *(f"double {x.name}_" for x in variant.loss.parameters)]
    return [*arguments, *divisor_arguments(variant.counted)]


def number_of(kind: str, compute: str) -> str:
    """The type that an entry point computes with: of second derivatives, numbers that carry a derivative."""
    return f"Nest<{STORAGE[compute][0]}>" if kind == "second" else STORAGE[compute][0]


def divisor_arguments(counted: bool) -> list[str]:
    """What the sum is divided by: found on the device, or given."""
    return ["double multiple", "const double* count"] if counted else ["double divisor", "double scale"]


def _functor(variant: RowVariant) -> str:
    """The loss of a row as a functor on dual numbers."""
    loss, compute = variant.loss, variant.number
    names = ["nll", "rest", "lse", "smooth", "weight"] if loss.softmax else [*loss.sees("row")]
    # Rounded once, not for every row.
    parameters = [x.name for x in loss.parameters]
    numbers, scalar = [*parameters, *loss.constants], STORAGE[variant.compute][0]
    lines = ["struct Loss {", f"  using Compute = {compute};", *(f"  {scalar} {x}_kept;" for x in numbers), ""]
    lines += [f"  __device__ __forceinline__ explicit Loss({', '.join(f'double {x}_' for x in parameters)}) {{"]
    for name, expression in loss.constants.items():
        lines += [*written_at(loss, name), f"    const double {name}_ = {in_double(expression)};"]
    lines += [*(f"    {x}_kept = kept(static_cast<{scalar}>({x}_));" for x in numbers), "  }", ""]
    lines += call_signature(names)
    lines += [f"    const auto {x} = ::constant<{compute}>({x}_kept);" for x in numbers]
    row = cuda(loss.expressions["row"])
    lines += [*written_at(loss, "row"), f"    const auto _row = ::lift<{compute}>({row});"]
    if loss.penalty is None:
        lines += ["    return _row;"]
    else:
        lines += [*written_at(loss, "penalty"), f"    return _row + ::lift<{compute}>({cuda(loss.penalty)});"]
    return "\n".join([*lines, f'#line 1 "<{variant.title}>.entries"', "  }", "};"]) + "\n"


def _entry(variant: RowVariant) -> str:
    def dtype(name: str) -> str:
        return STORAGE[name][0] if name else "Absent"

    second = variant.kind == "second"
    columns = variant.layout in ("columns", "short")
    again = second or variant.layout == "long"
    size = f"{variant.lanes}, {LONG_TERM_VECTORS if second else LONG_VECTORS}"
    rank = "kMaxRank" if variant.many else "1"
    flags = f"{str(variant.smoothed).lower()}, {str(variant.capped).lower()}"
    types = [
        dtype(variant.input),
        dtype(variant.label),
        dtype(variant.weight),
        dtype(variant.mask),
        dtype(variant.result),
    ]
    parameters = ", ".join(f"{x.name}_" for x in variant.loss.parameters)
    program = f"RowProgram<Loss, Space, {', '.join(types)}, {flags}>"
    lines = [
        f"using Result = {dtype(variant.result)};",
        f"using Space = RowSpace<{rank}>;",
        f"using Program = {f'MovingProgram<{program}>' if second else program};",
        "using Compute = Program::Compute;",
    ]
    if variant.layout == "gather":
        unit = "const LaneUnit unit{width};"
        lines += ["using Reader = GatherReader;"]
    elif columns:
        unit = "const LaneUnit unit{width};"
        reader = "ShortReader" if variant.layout == "short" else f"ColumnReader<{variant.lanes}>"
        lines += [f"using Reader = {reader};"]
    else:
        unit = "const LaneUnit unit{width};"
        if variant.layout == "lanes" and variant.kind not in ("apply", "second"):
            unit = "const LanesUnit unit{{width}};"
        elif variant.layout == "streamed":
            unit = "const StandingUnit unit{{}, width};"
        elif variant.layout in ("block", "long"):
            unit = f"const BlocksUnit<{variant.cluster}> unit;"
        resident = f"ResidentReader<{variant.lanes}, {str(variant.ahead).lower()}>"
        reader = f"StreamedReader<{variant.lanes}>" if variant.layout == "streamed" else resident
        lines += [f"using Reader = {f'LongReader<{size}>' if again else reader};"]
    call = {
        "value": "row_value<Reader>(program, unit, groups, memory, divisor, value)",
        "value_and_gradient": (
            "row_value_and_gradient<Reader>(program, unit, groups, memory, divisor, scale, value, expected, used)"
        ),
        "verify_gradient": "verify_row_gradient<Reader>(program, unit, groups, scale, grad_output, used, expected)",
        "values": "row_values<Reader>(program, unit, groups)",
        "apply": (
            "apply_gathered_slopes(program, unit, result_stride, scale, grad_output)"
            if variant.layout == "gather"
            else f"apply_column_slopes<{variant.lanes}>(program, result_stride, scale, grad_output)"
            if columns
            else f"apply_row_slopes<{size}>(program, unit, groups, result_stride, scale, grad_output)"
        ),
        "count": "count_rows(program, groups, memory, value)",
        "second": "row_gradient<Reader>(program, unit, groups, grad_output)",
    }[variant.kind]
    bounds = f"{MAX_THREADS}" if variant.layout in ("block", "long") and not second else f"{THREADS}"
    # Numbers of 8 bytes take two registers, and a cap some more, as weights of classes that are smoothed over.
    more = variant.capped or (variant.smoothed and ITEMSIZE[variant.input] == 4 and variant.layout == "block")
    fewer = 2 if variant.compute == "float64" else 1.5 if more else 1
    if variant.layout == "lanes" and variant.kind != "count" and not second:
        bounds = f"{LANE_THREADS}, {int(LANE_BLOCKS / fewer)}"
    elif variant.layout == "block" and variant.kind != "apply" and not second:
        of_block = block_blocks(variant.cluster, variant.smoothed or variant.capped)
        bounds = f"{BLOCK_THREADS}, {int(of_block / fewer)}"
    elif variant.layout == "columns" and not second:
        bounds += ", 3"
    elif variant.layout == "streamed":
        bounds = f"{LANE_THREADS}, {STREAMED_THREADS // LANE_THREADS}"
    cluster = f" CLUSTER_OF({variant.cluster})" if variant.cluster > 1 else ""
    arguments = [*varying_arguments(variant), "int64 groups", "int width", "const __grid_constant__ Space space"]
    weights = "weights" if variant.weight else "nullptr"
    mask = "mask" if variant.mask else "nullptr"
    rows = [
        f"Loss{{{parameters}}}, space, input, gradients, labels, {weights}, {mask},",
        "                        {logit_scale, softcap},",
        "                        ignored, status, site, values, lse, correct, slopes, per_row",
    ]
    if second:
        rows = [f"{{{rows[0]}", *rows[1:-1], f"{rows[-1]}}}, directions"]
    lines += [
        "",
        f'extern "C" __global__ void __launch_bounds__({bounds}){cluster}',
        f"{variant.entry}({', '.join(arguments)}) {{",
        *counted_divisor(variant.counted, variant.kind != "value"),
        f"  const Program program{{{rows[0]}",
        *rows[1:-1],
        f"{rows[-1]}}};",
        *([] if variant.kind == "count" or (columns and variant.kind == "apply") else [f"  {unit}"]),
        f"  {call};",
        "}",
    ]
    return "\n".join(lines) + "\n"

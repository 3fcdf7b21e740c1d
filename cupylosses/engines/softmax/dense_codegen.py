"""From the definition of a loss of rows to CUDA source, for a target per class (``kernels/softmax/row_terms.cuh``)."""

from __future__ import annotations

from dataclasses import dataclass

from cupylosses.definition.expressions import cuda, in_double
from cupylosses.engines.softmax import codegen as softmax_codegen
from cupylosses.engines.softmax.definition import RowLoss
from cupylosses.engines.softmax.layout import LONG_TERM_VECTORS, THREADS
from cupylosses.interop import ITEMSIZE
from cupylosses.jit.glue import STORAGE, call_signature, choice_constant, counted_divisor, written_at
from cupylosses.jit.gpu import MAX_THREADS
from cupylosses.jit.kernel import Kernel
from cupylosses.jit.sources import nested

_FILES = (
    *softmax_codegen.FILES,
    "softmax/resident_terms.cuh",
    "softmax/long_terms.cuh",
    "softmax/term_columns.cuh",
)

#: Those of second derivatives.
_SECOND_FILES = (*nested(_FILES), "softmax/term_second.cuh")

#: Entry points: what each computes. The keys are the kinds of :class:`TermVariant`.
TERM_KINDS = {
    "value": "the reduced value",
    "value_and_gradient": "the reduced value, and the gradients for the expected grad_output",
    "verify_gradient": "the gradients again, if grad_output was not the expected one",
    "values": "a value per row",
    "gradient": "the gradients for a grad_output per row",
    "count": "how many rows the mask leaves",
    "second": "the derivatives along directions of a value per row, and of the gradients",
}


@dataclass(frozen=True)
class TermVariant(Kernel):
    """What distinguishes one compiled module from another, as :class:`cupylosses.engines.softmax.codegen.RowVariant`.

    ``gradients`` says of which operands gradients are written.
    """

    loss: RowLoss
    flags: tuple[int, ...]
    kind: str
    layout: str
    lanes: int
    input: str
    target: str
    weight: str
    mask: str
    result: str
    compute: str
    gradients: tuple[bool, bool]
    many: bool = False
    capped: bool = False
    counted: bool = False
    cluster: int = 1

    @property
    def storage(self) -> tuple[str, ...]:
        """The dtypes of the operands, for error messages."""
        return (self.input, self.target)

    @property
    def title(self) -> str:
        """The variant in words, for error messages and file names."""
        dtypes = "-".join(STORAGE[x][1] if x else "none" for x in (self.input, self.target, self.weight, self.mask))
        flags = "".join(str(x) for x in self.flags)
        parts = [self.loss.name, "terms", self.kind, dtypes, STORAGE[self.result][1], self.layout.replace(" ", "-")]
        parts += [f"x{self.lanes}", "grad" + "".join(str(int(x)) for x in self.gradients)]
        parts += [f"flags{flags}"] if flags else []
        parts += [x for x in ("many", "capped", "counted") if getattr(self, x)]
        return "_".join([*parts, *([f"cluster{self.cluster}"] if self.cluster > 1 else [])])

    @property
    def number(self) -> str:
        """What is computed with, as that of :class:`cupylosses.engines.softmax.codegen.RowVariant`."""
        return softmax_codegen.number_of(self.kind, self.compute)

    @property
    def entry(self) -> str:
        """The name of the kernel."""
        return f"{self.loss.name}_terms_{self.kind}_{STORAGE[self.input][1]}"

    @property
    def files(self) -> tuple[str, ...]:
        return _SECOND_FILES if self.kind == "second" else _FILES

    @property
    def narrow(self) -> bool:
        return all(ITEMSIZE[x] == 2 for x in (self.input, self.target, self.result)) and self.compute == "float32"

    @property
    def arguments(self) -> list[str]:
        return varying_arguments(self)

    def glue(self) -> str:
        return f"{_functors(self)}\n{_entry(self)}"


def varying_arguments(variant: TermVariant) -> list[str]:
    """The declarations of the arguments that differ from call to call, which stand first."""
    input, target, result = (STORAGE[x][0] for x in (variant.input, variant.target, variant.result))
    arguments = [
        f"const {input}* input",
        f"const {target}* target",
        f"{input}* gradients",
        f"{target}* target_gradients",
        f"const {STORAGE[variant.weight][0] if variant.weight else 'unsigned char'}* weights",
        f"const {STORAGE[variant.mask][0] if variant.mask else 'unsigned char'}* mask",
        f"{result}* values",
        f"{variant.number}* lse",
    ]
    arguments += {
        "value": ["double* memory", f"{result}* value"],
        "value_and_gradient": ["double* memory", f"{result}* value", "const double* expected", "double* used"],
        "verify_gradient": [f"const {result}* grad_output", "const double* used", "double* expected"],
        "values": [],
        "gradient": [f"const {result}* grad_output"],
        "count": ["double* memory", "double* value"],
        "second": [
            f"const {input}* directions",
            f"const {target}* target_directions",
            f"const {result}* grad_output",
        ],
    }[variant.kind]
    arguments += ["double logit_scale", "double softcap", *(f"double {x.name}_" for x in variant.loss.parameters)]
    return [*arguments, *softmax_codegen.divisor_arguments(variant.counted)]


def _functors(variant: TermVariant) -> str:
    """The term, and the penalty, as functors on dual numbers."""
    loss, compute = variant.loss, variant.number
    second = "log_q" if loss.dense == "logits" else "target"
    given = {"Term": ("term", ["log_p", second, "weight", "classes"]), "Penalty": ("penalty", ["lse"])}
    lines = []
    for functor, (part, names) in given.items():
        lines += [f"struct {functor} {{", f"  using Compute = {compute};"]
        lines += [*(f"  double {x.name}_;" for x in loss.parameters), "", *call_signature(names)]
        # Those that the penalty does not use, the compiler would remark on.
        flags = zip(loss.flags, variant.flags, strict=True) if part == "term" else ()
        lines += [f"    constexpr {choice_constant(x, i)};" for x, i in flags]
        lines += [f"    const auto {x.name} = ::constant<{compute}>({x.name}_);" for x in loss.parameters]
        for name, expression in loss.constants.items():
            lines += [*written_at(loss, name), f"    const double {name}_ = {in_double(expression)};"]
            lines += [f"    const auto {name} = ::constant<{compute}>({name}_);"]
        expression = cuda(loss.expressions[part]) if part in loss.expressions else "0"
        lines += [*written_at(loss, part), f"    return ::lift<{compute}>({expression});"]
        lines += [f'#line 1 "<{variant.title}>.entries"', "  }", "};", ""]
    return "\n".join(lines)


def _entry(variant: TermVariant) -> str:
    def dtype(name: str) -> str:
        return STORAGE[name][0] if name else "Absent"

    types = [variant.input, variant.target, variant.weight, variant.mask, variant.result]
    flags = [variant.loss.dense == "logits", variant.capped, *variant.gradients]
    parameters = ", ".join(f"{x.name}_" for x in variant.loss.parameters)
    block, again = variant.layout in ("block", "long"), variant.kind == "second"
    long = f"TermReader<LongTerms<{variant.lanes}, {LONG_TERM_VECTORS}>>"
    unit = f"BlocksUnit<{variant.cluster}> unit" if block else "LaneUnit unit{width}"
    reader = {
        "long": long,
        "columns": "TermReader<TermColumns<true>>",
        "long columns": "TermReader<TermColumns<false>>",
    }.get(variant.layout, long if again else f"ResidentTermReader<{variant.lanes}>")
    program = f"TermProgram<Term, Penalty, Space, {', '.join(map(dtype, types))}, "
    program += f"{', '.join(str(x).lower() for x in flags)}>"
    cluster = f" CLUSTER_OF({variant.cluster})" if variant.cluster > 1 else ""
    call = {
        "value": "row_value<Reader>(program, unit, groups, memory, divisor, value)",
        "value_and_gradient": (
            "row_value_and_gradient<Reader>(program, unit, groups, memory, divisor, scale, value, expected, used)"
        ),
        "verify_gradient": "verify_row_gradient<Reader>(program, unit, groups, scale, grad_output, used, expected)",
        "values": "row_values<Reader>(program, unit, groups)",
        "gradient": "row_gradient<Reader>(program, unit, groups, grad_output)",
        "count": "count_rows(program, groups, memory, value)",
        "second": "row_gradient<Reader>(program, unit, groups, grad_output)",
    }[variant.kind]
    arguments = [*varying_arguments(variant), "int64 groups", "int width", "const __grid_constant__ Space space"]
    lines = [
        f"using Result = {dtype(variant.result)};",
        f"using Space = RowSpace<{'kMaxRank' if variant.many else '1'}>;",
        f"using Program = {f'MovingTermProgram<{program}>' if again else program};",
        "using Compute = Program::Compute;",
        f"using Reader = {reader};",
        "",
        f'extern "C" __global__ void __launch_bounds__({MAX_THREADS if block and not again else THREADS}){cluster}',
        f"{variant.entry}({', '.join(arguments)}) {{",
        *counted_divisor(variant.counted, variant.kind != "value"),
        f"  const Program program{{{'{' * again}Term{{{parameters}}}, Penalty{{{parameters}}}, space, input, target,",
        f"                        gradients, target_gradients, {'weights' if variant.weight else 'nullptr'},",
        f"                        {'mask' if variant.mask else 'nullptr'},",
        f"                        {{logit_scale, softcap}}, values, lse{'}, directions, target_directions' * again}}};",
        *([] if variant.kind == "count" else [f"  const {unit};"]),
        f"  {call};",
        "}",
    ]
    return "\n".join(lines) + "\n"

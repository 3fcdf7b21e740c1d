"""Generates the glue of ``kernels/row_margin/``: the hinge as a functor on dual numbers, and the entry points."""

from __future__ import annotations

from dataclasses import dataclass

from cupylosses.definition.expressions import cuda, in_double, names_in
from cupylosses.engines.row_margin.definition import MarginLoss
from cupylosses.engines.row_margin.layout import RESIDENT_OF_WARPS, RESIDENT_THREADS, resident
from cupylosses.engines.softmax.codegen import RETURN_IN_PLACE, SELF_COUNTED, TALLIED, space_rank_name
from cupylosses.jit import gpu
from cupylosses.jit.glue import STORAGE, call_signature, choice_constant, counted_divisor, written_at
from cupylosses.jit.kernel import Kernel
from cupylosses.jit.sources import FUNCTOR, nested

#: Entry points, by the stage that launches them.
KINDS = {
    "value": "the reduced value",
    "value_and_gradient": "the reduced value and the gradients for the expected grad_output, in backward the true one",
    "unreduced": "a value per row",
    "gradient": "the gradients for a grad_output per row",
    "denominator": "the number of rows that count",
    "hvp": "the products of the second derivatives with a tangent, for a grad_output per row",
}
#: Group of threads that shares a row, by layout. Others use SubwarpGroup, or ClusterGroup for layout "block".
_GROUPS = {
    "warp": "BlockOfSubwarps group{{width}}",
    "shared_rows": "WarpsShareRows group{{{width}}}",
}
#: Entry points that write gradients.
WRITING = ("value_and_gradient", "gradient", "hvp")
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


@dataclass(frozen=True)
class MarginKernel(Kernel):
    """A compiled module of this engine. Equal instances have equal source.

    ``layout`` is a kind of :mod:`.layout`, with blocks of ``threads`` threads; ``scores`` is the placement of scores
    there. A thread has ``ahead`` vectors in flight, and processes at most ``edges`` of the single elements at the ends
    of a row that vectors do not divide. A multiprocessor runs ``most`` threads, except in layouts with a number of
    their own. ``cluster`` is the number of blocks that share a row in layout "block". ``weight`` is the dtype of class
    weights, or "".

    The divisor of the sum is one of three things: an argument; a number on the device (``counted``); or the number of
    rows that count, which the kernel computes first (``self_counting``), or while it evaluates the rows (``tallies``).
    With both of the latter, gradients assume that all rows count, and only a check without records counts rows first.
    """

    loss: MarginLoss
    kind: str
    flags: tuple[int, ...]
    layout: str
    threads: int
    vec_size: int
    ahead: int
    input: str
    target: str
    weight: str
    mask: bool
    result: str
    rank: int = 1
    counted: bool = False
    self_counting: bool = False
    tallies: bool = False
    scores: str = "alike"
    edges: int = 1
    most: int = RESIDENT_THREADS
    cluster: int = 1
    compute: str = "float64"

    narrow = False
    storage = property(lambda self: (self.input, self.target))

    @property
    def resident(self) -> int:
        """Number of blocks per multiprocessor."""
        return resident(self.layout, self.threads, self.most)

    @property
    def files(self) -> tuple[str, ...]:
        counts = self.self_counting and not (self.tallies and self.kind == "value")
        counts = counts or self.kind == "denominator"
        if self.kind == "hvp":
            return nested((*FUNCTOR, "row_margin/margin_hvp.cuh"))
        header = "thread_per_list" if self.layout in RESIDENT_OF_WARPS else "row_margin"
        header = "short_lists" if self.layout == "short_lists" else header
        return (*FUNCTOR, f"row_margin/{header}.cuh", *(["softmax/count_rows.cuh"] if counts else []))

    @property
    def title(self) -> str:
        """Description of the kernel, for error messages and file names."""
        names = (self.input, self.target, self.weight, "bool" if self.mask else "")
        dtypes = "-".join([STORAGE[x][1] if x else "none" for x in names])
        parts = [self.loss.name, self.kind, dtypes, STORAGE[self.result][1], self.layout, f"x{self.vec_size}"]
        parts += [self.scores] if self.scores != "alike" else []
        parts += [f"{self.edges}-edges"] if self.edges > 1 else []
        parts += [f"{self.ahead}-ahead", f"{self.threads}-threads"]
        parts += [f"cluster{self.cluster}"] if self.cluster > 1 else []
        parts += [x.replace("_", "-") for x in ("counted", "self_counting", "tallies") if getattr(self, x)]
        parts += [f"rank{self.rank}"] if self.rank > 1 else []
        return "_".join([*parts, *([f"flags{''.join(map(str, self.flags))}"] if self.flags else [])])

    @property
    def entry(self) -> str:
        """Name of the kernel."""
        return f"{self.loss.name}_{self.kind}_{STORAGE[self.input][1]}"

    @property
    def arguments(self) -> list[str]:
        input, target, result = (STORAGE[x][0] for x in (self.input, self.target, self.result))
        arrays = [f"const {input}* input"] if self.kind != "denominator" else []
        arrays += [f"const {target}* target"]
        arrays += [f"const {STORAGE[self.weight][0]}* weights"] if self.weight else []
        arrays += ["const bool* mask"] if self.mask else []
        arrays += [f"const {input}* tangents"] if self.kind == "hvp" else []
        gradients = [f"{input}* input_gradients"] if self.kind in WRITING else []
        of_kind = {
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
            "hvp": [f"const {result}* grad_output"],
            "denominator": ["double* memory", "double* value"],
        }[self.kind]
        scalars = []
        if self.kind != "denominator":
            scalars = [*(f"double {x.name}_" for x in self.loss.parameters), "RowStatus* status"]
        divisor = ["double multiple", "const double* count"] if self.counted else ["double divisor", "double scale"]
        if self.self_counting or self.tallies:
            divisor = ["unsigned* missed"] if not self.self_counting and self.kind != "value" else []
        return [*arrays, *gradients, *of_kind, *scalars, *divisor]

    def glue(self) -> str:
        return "\n".join([*_hinge(self), *_entry(self)]) + "\n"


def _hinge(kernel: MarginKernel) -> list[str]:
    """Returns the source of the functor ``Hinge``."""
    loss = kernel.loss
    names, number = [x.name for x in loss.parameters], "_number" if kernel.kind == "hvp" else "double"
    used = names_in(" ".join([loss.hinge, *loss.constants.values()]))
    lines = ["struct Hinge {", "  using Compute = double;"]
    lines += [f"  static constexpr bool kLinear = {str(loss.is_linear(kernel.flags)).lower()};"]
    lines += [f"  double {x}_;" for x in names]
    lines += ["", "  __device__ __forceinline__ double margin() const {", "    return margin_;", "  }"]
    lines += call_signature(["excess"])
    if number == "_number":
        lines.append("    using _number = typename excess_::Scalar;")
    for flag, index in zip(loss.flags, kernel.flags, strict=True):
        if flag.name in used:
            lines.append(f"    constexpr {choice_constant(flag, index)};")
    lines += [f"    const auto {x} = ::constant<{number}>({x}_);" for x in names if x in used]
    for name, expression in loss.constants.items():
        lines += [*written_at(loss, name), f"    const auto {name} = ::constant<{number}>({in_double(expression)});"]
    lines += [*written_at(loss, "hinge"), f"    return ::lift<{number}>({cuda(loss.hinge)});"]
    return [*lines, f'#line 1 "<{kernel.title}>.entries"', "  }", "};"]


def _call(kernel: MarginKernel) -> str:
    """Returns the call in the entry point that does the work of the kernel."""
    if not kernel.tallies or kernel.kind not in TALLIED:
        return _CALLS[kernel.kind]
    call = TALLIED[kernel.kind]
    # A self-counting kernel counts rows itself if there is no record: it needs no count of an earlier launch.
    return call.replace("<Reader>", "<Reader, true>").replace("missed", "nullptr") if kernel.self_counting else call


def _group(kernel: MarginKernel) -> str:
    """Returns the declaration of ``group``, the threads that share a row."""
    if kernel.layout == "block":
        return f"ClusterGroup<{kernel.cluster}> group{{}}"
    return _GROUPS.get(kernel.layout, "SubwarpGroup group{width}")


def _entry(kernel: MarginKernel) -> list[str]:
    several, kind = kernel.loss.several, kernel.kind
    types = [STORAGE[kernel.input][0], STORAGE[kernel.target][0]]
    types += [STORAGE[kernel.weight][0] if kernel.weight else "Absent", "bool" if kernel.mask else "Absent"]
    types += [STORAGE[kernel.result][0], "false", "false"]
    names = {x.rpartition(" ")[2] for x in kernel.arguments}

    def argument(name: str) -> str:
        return name if name in names else "nullptr"

    lie = f"ScoresOfRows::k{kernel.scores.capitalize()}"
    reader = f"OneLabelReader<{kernel.vec_size}, {kernel.ahead}, {kernel.edges}, {lie}>"
    if several:
        reader = f"ListReader<{kernel.vec_size}, {kernel.ahead}, {lie}>"
    if kernel.layout == "thread_per_row":
        reader = f"ThreadPerRowReader<{kernel.ahead}>"
    if kernel.layout == "shared_rows":
        reader = f"SharedRowReader<{kernel.ahead}, {kernel.threads // gpu.WARP}>"
    if kernel.layout.startswith("thread_per_list"):
        reader = f"ThreadPerListReader<{str(kernel.layout.endswith('apart')).lower()}>"
    if kernel.layout == "short_lists":
        reader = f"ShortListReader<{kernel.vec_size}, {kernel.ahead}, {lie}>"
    if kernel.layout == "thread_per_label":
        reader = "ThreadPerLabelReader"
    program, made = "MarginProgram<RowProgram<Hinge, Space, {}>>", "const Program program{{"
    end = ";"
    if kind == "hvp":
        reader = f"HvpReader<{kernel.vec_size}>"
        program, made, end = f"MarginHvpProgram<{program}>", f"{made}{{", ", tangents};"
    fixed = ["int64 ignored", "int64 site", "int64 labels", "int64 inner", "int64 capacity", "int64 mask_words"]
    fixed += ["int64 chunks", "int width", "const __grid_constant__ Space space"]
    cluster = f" CLUSTER_DIMS({kernel.cluster})" if kernel.cluster > 1 else ""
    parameters = ", ".join(["0.0" if kind == "denominator" else f"{x.name}_" for x in kernel.loss.parameters])
    return [
        f"using Result = {STORAGE[kernel.result][0]};",
        f"using Space = RowSpace<{space_rank_name(kernel.rank)}>;",
        f"using Program = {program.format(', '.join(types))};",
        *([f"using Reader = {reader};"] if kind != "denominator" else []),
        "",
        f'extern "C" __global__ void __launch_bounds__({kernel.threads}, {kernel.resident}){cluster}',
        f"{kernel.entry}({', '.join([*kernel.arguments, *fixed])}) {{",
        *counted_divisor(kernel.counted, kind != "value"),
        f"  {made}Hinge{{{parameters}}}, space, {argument('input')}, {argument('input_gradients')},",
        f"                         target, {argument('weights')}, {argument('mask')}, {{1.0, 0.0}}, ignored,",
        f"                         {argument('status')}, site, {argument('values')}, nullptr, nullptr, nullptr, 0}},",
        f"                        1.0 / static_cast<double>(space.classes), labels, inner, capacity, mask_words}}{end}",
        *([f"  const {_group(kernel)};"] * (kind != "denominator")),
        *([RETURN_IN_PLACE] if kind == "value_and_gradient" and not kernel.tallies else []),
        *(SELF_COUNTED[kind] if kernel.self_counting and not kernel.tallies else []),
        *(["  const Tally<Program> divisor{program};"] if kernel.tallies and kind == "value" else []),
        f"  {_call(kernel)};",
        "}",
    ]

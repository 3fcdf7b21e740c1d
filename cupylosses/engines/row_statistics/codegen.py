"""Generates the glue of ``kernels/row_statistics/``: a loss's expressions as functors on dual numbers, entry points."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from cupylosses.checks import FLOATING
from cupylosses.definition.expressions import cuda, factors, in_double, names_in
from cupylosses.engines.pointwise.codegen import ACCESS
from cupylosses.engines.pointwise.layout import MAX_THREADS, max_rank
from cupylosses.engines.row_statistics.definition import DEGREE, StatisticsLoss
from cupylosses.engines.row_statistics.layout import MAX_BLOCK_THREADS, MAX_PARTS, PART, RESIDENT_THREADS, part_numbers
from cupylosses.jit.glue import STORAGE, call_signature, choice_constant, counted_divisor, loss_head, written_at
from cupylosses.jit.kernel import Kernel
from cupylosses.jit.sources import FUNCTOR, nested

#: Maximum number of elements, over one vector of each operand, that fit into 85 registers with their gradients.
FEW_NUMBERS = 16
#: Maximum number of words of a row in registers (`RowKernel.in_registers`) with which a kernel fits into 85 registers.
FEW_WORDS = 24
#: Maximum number of elements of a 16-byte vector; and threads per multiprocessor that leave 168 registers to each.
MOST_ELEMENTS = 8
ROOMY_THREADS = 384
#: Maximum number of vectors, with one of each operand and a second one of each paired operand, for which kernels with
#: paired operands read all ``ahead`` vectors at once.
MOST_WORDS = 4
#: Maximum number of operands with features, tangents included, for which a derivative along tangents fits into 128
#: registers.
MOST_VECTORS = 3

FILES = (*FUNCTOR, "row_statistics/row_statistics.cuh")
#: Files of derivatives along tangents.
FILES_ALONG = (*nested(FILES), "row_statistics/derivative.cuh")

#: Entry points. The first three belong to a reduced loss. For a broadcast operand ``coefficients``, ``slices`` and
#: ``combine`` are launched one after another. The four kernels with sums are for rows that several blocks share.
KINDS = {
    "value": "the reduced value",
    "value_and_gradient": "the reduced value and the gradients for the expected grad_output, in backward the true one",
    "verify_gradient": "the gradients for the true grad_output, where each part of a row had a block in forward",
    "unreduced": "a value per row",
    "gradient": "the gradients for a grad_output per row",
    "coefficients": "the coefficients of each row",
    "sums_for_values": "the statistics of parts of rows, before `values_of_sums`",
    "values_of_sums": "a value per row from these",
    "sums_for_gradients": "the statistics of parts of rows, before `gradients_of_sums`",
    "gradients_of_sums": "the gradients for a grad_output per row from these",
    "slices": "the gradient of one broadcast operand from the coefficients, or slices of it",
    "combine": "the gradient of one broadcast operand from its slices",
}
#: Forms of statistics in row_statistics.cuh, by the name of the degree. A small integer is its own form.
FORMS = {
    "": "kSum",
    "p": "kPowers",
    "inf": "kMaximum",
    "scaled": "kScaledPowers",
    "shifted": "kShiftedPowers",
    "narrow": "kNarrowPowers",
}
#: Degrees for which the derivative at a feature depends on the norm or its scale by more than a factor that is common
#: to all features of the row.
NORM_IN_DERIVATIVES = ("inf", "scaled", "shifted", "narrow")


@dataclass(frozen=True)
class RowKernel(Kernel):
    """A kernel that reads rows. Equal instances have equal source.

    ``dtypes`` and ``gradients`` have an entry for each operand and for an array of weights, and so has ``has_tangent``
    in a derivative along tangents: True if the operand has a tangent. ``mask`` and ``weight`` are those of the call.
    ``per_row`` is True if each row has a grad_output of its own. ``resident`` is the number of blocks per
    multiprocessor if each part of a row has a block, otherwise 0. ``apart`` is True if each part has a block in
    forward. ``counted`` is True if the divisor is on the device. The other fields are those of `Layout`.
    """

    loss: StatisticsLoss
    flags: tuple[int, ...]
    norm: str
    kind: str
    dtypes: tuple[str, ...]
    result: str
    weight: str
    mask: bool
    gradients: tuple[bool, ...]
    layout: str
    vec_size: int
    wide: int
    held: bool
    copied: bool
    many: bool
    width: int
    threads: int
    ahead: int
    parts: int
    rounds: int
    cluster: int
    counted: bool = False
    per_row: bool = True
    apart: bool = False
    has_tangent: tuple[bool, ...] = ()
    resident: int = 0
    paired: int = 0
    in_registers: int = 0
    staged: bool = False
    compute: str = "float64"

    narrow = False

    @property
    def files(self) -> tuple[str, ...]:
        return FILES_ALONG if self.has_tangent else FILES

    @property
    def storage(self) -> tuple[str, ...]:
        return (*self.dtypes, *["bool"] * self.mask)

    @property
    def all_wide(self) -> bool:
        """True if kernels load and store whole vectors of all operands with features and of their gradients."""
        return bool(self.wide + 1 == 1 << (2 * len(_with_tangents(self, _vectors(self.loss)))))

    @property
    def title(self) -> str:
        """Description of the kernel, for error messages and file names."""
        dtypes = "-".join([STORAGE[x][1] for x in self.storage])
        wanted = "".join("1" if x else "0" for x in self.gradients)
        parts = [self.loss.name, self.kind, dtypes, STORAGE[self.result][1], self.layout, f"x{self.vec_size}"]
        parts += [f"grad{wanted}", *(["number"] if self.weight == "number" else [])]
        parts += _tangents_in_title(self)
        parts += ["wide" if self.all_wide else f"wide{self.wide}"] if self.wide else []
        parts += [f"paired{self.paired}"] if self.paired else []
        parts += [x for x in ("held", "copied", "many", "counted", "apart") if getattr(self, x)]
        parts += [f"{self.width}-lanes"] if self.layout == "lanes" else []
        parts += [f"{self.in_registers}-in-registers"] if self.in_registers else []
        parts += ["staged"] if self.staged else []
        parts += [f"norm-{self.norm}"] if self.norm else []
        parts += [f"flags{''.join(map(str, self.flags))}"] if self.flags else []
        parts += [] if self.per_row else ["one"]
        parts += [f"{self.parts}-parts", f"{self.rounds}-rounds"] if self.parts > 1 else []
        parts += [f"cluster{self.cluster}"] if self.cluster > 1 else []
        return "_".join([*parts, f"{self.ahead}-ahead", f"{self.threads}-threads"])

    def grid(self, planned: int, at_once: Callable[[], int]) -> int:
        """Returns the number of blocks to launch. If losses are summed, no more blocks are launched than run at once:
        each block draws a ticket at its end, and holds its registers until it has one.

        Kernels that only write gradients draw no ticket, and are faster with more blocks (measured), except second
        derivatives of rows that one lane processes alone. Kernels whose lanes first copy their rows are faster with
        more blocks, too. The blocks of clusters and of parts of rows are already planned by what fits.
        """
        adds = self.kind in ("value", "value_and_gradient") or (self.has_tangent and self.width == 1)
        gains_by_waiting = self.layout == "lanes" and self.copied
        fits = self.layout == PART or self.cluster > 1
        return min(planned, at_once()) if adds and not (gains_by_waiting or fits) else planned

    @property
    def entry(self) -> str:
        """Name of the kernel."""
        return f"{self.loss.name}_{self.kind}_{'_'.join(dict.fromkeys(STORAGE[x][1] for x in self.dtypes))}"

    @property
    def arguments(self) -> list[str]:
        return _arguments(self, self.kind, self.apart)

    def glue(self) -> str:
        return "\n".join([*_functors(self), *_entry(self)]) + "\n"


def operand_names(loss: StatisticsLoss, weight: str) -> tuple[str, ...]:
    """Returns the names of the arrays that enter the formula: those of the call without the mask and the tangents."""
    return (*(x.name for x in loss.operands), *["weight"] * (weight == "array"))


def statistics_of(loss: StatisticsLoss, flags: tuple[int, ...], has_tangent: tuple[bool, ...] = ()) -> int:
    """Returns the number of statistics of a row. A derivative along tangents also has the derivative of each."""
    return len(loss.terms(flags)) * (1 + bool(has_tangent))


def stored_per_row(
    loss: StatisticsLoss, flags: tuple[int, ...], norm: str, labels: int, has_tangent: tuple[bool, ...] = ()
) -> int:
    """Returns the number of doubles that the kernel ``coefficients`` stores per row."""
    count = statistics_of(loss, flags, has_tangent)
    firsts = len(_firsts(loss)) + sum(has_tangent[: len(_vectors(loss))]) * bool(loss.first)
    return count + labels + count * (norm in NORM_IN_DERIVATIVES) + firsts


def _tangent_name(name: str) -> str:
    """Returns the name of an operand's tangent. It is unique: names of operands have no two underscores in a row."""
    return f"{name}__direction"


def _tangents_in_title(kernel: RowKernel | SumKernel) -> list[str]:
    return [f"tangent{''.join(str(int(x)) for x in kernel.has_tangent)}"] if kernel.has_tangent else []


def _types(kernel: RowKernel | SumKernel) -> dict[str, str]:
    """Returns the CUDA types of operands, weight and their tangents, by name."""
    types = {n: STORAGE[d][0] for n, d in zip(operand_names(kernel.loss, kernel.weight), kernel.dtypes, strict=True)}
    return types | {_tangent_name(n): types[n] for n in _moving(kernel, types)}


def _moving(kernel: RowKernel | SumKernel, operands: Iterable[str]) -> list[str]:
    """Returns those of the ``operands`` that have a tangent."""
    if not kernel.has_tangent:
        return []
    moves = dict(zip(operand_names(kernel.loss, kernel.weight), kernel.has_tangent, strict=True))
    return [x for x in operands if moves[x]]


def _with_tangents(kernel: RowKernel | SumKernel, operands: Sequence[str]) -> list[str]:
    """Returns the operands, followed by the names of their tangents."""
    return [*operands, *map(_tangent_name, _moving(kernel, operands))]


def _labels(loss: StatisticsLoss, weight: str) -> list[str]:
    return [x for x in operand_names(loss, weight) if x in loss.row_operands or x == "weight"]


def _vectors(loss: StatisticsLoss) -> list[str]:
    return [x.name for x in loss.operands if x.name not in loss.row_operands]


def _firsts(loss: StatisticsLoss) -> list[str]:
    """Returns the names of the first elements of a row: one for each operand with features, or none if the loss uses no
    first element.
    """
    names = {operand: name for name, operand in loss.first.items()}
    return [names.get(x, f"{x}__first") for x in _vectors(loss)] if loss.first else []


def _parameters(kernel: RowKernel | SumKernel) -> list[str]:
    return [*(x.name for x in kernel.loss.parameters), *["weight"] * (kernel.weight == "number")]


def _arguments(kernel: RowKernel | SumKernel, kind: str, apart: bool = False) -> list[str]:
    """Returns the declarations of the arguments that differ from call to call."""
    names, result = operand_names(kernel.loss, kernel.weight), STORAGE[kernel.result][0]
    tensors = list(zip(names, kernel.dtypes, kernel.gradients, strict=True))
    of_kind = {
        "value": ["double* memory", f"{result}* value"],
        "value_and_gradient": [
            "double* memory",
            f"{result}* value",
            *([] if apart else [f"const {result}* grad_output"]),
            "double* expected_grad_output",
            "double* used_grad_output",
        ],
        "verify_gradient": [
            f"const {result}* grad_output",
            "const double* used_grad_output",
            "double* expected_grad_output",
        ],
        "unreduced": [f"{result}* values"],
        "sums_for_values": [f"{result}* values", "double* partials"],
        "values_of_sums": [f"{result}* values", "double* partials"],
        "gradient": [f"const {result}* grad_output"],
    }.get(kind, [f"const {result}* grad_output", "double* partials"])
    return [
        *(f"const {STORAGE[dtype][0]}* {name}_" for name, dtype, _ in tensors),
        *(["const bool* mask_"] if kernel.mask else []),
        *(f"const {_types(kernel)[x]}* {x}_" for x in map(_tangent_name, _moving(kernel, names))),
        *(f"{STORAGE[dtype][0]}* {name}_gradients" for name, dtype, wanted in tensors if wanted),
        *of_kind,
        *(f"double {x}_" for x in _parameters(kernel)),
        *(["double multiple", "const double* count"] if kernel.counted else ["double divisor", "double scale"]),
    ]


def _options(kernel: RowKernel | SumKernel, expressions: Iterable[str], first: str) -> Iterator[str]:
    """Declares flags, parameters and constants in a functor's operator. Only those that the expressions mention are
    declared, because compilers warn about unused names. They have the number type of the argument ``first``: nested
    dual numbers in derivatives along tangents.
    """
    loss = kernel.loss
    yield f"    using Number__ = typename {first}_::Scalar;"
    used = names_in(" ".join(expressions))
    for flag, index in zip(loss.flags, kernel.flags, strict=True):
        if flag.name in used:
            yield f"    constexpr {choice_constant(flag, index)};"
    for name in _parameters(kernel):
        if name in used:
            yield f"    const auto {name} = ::constant<Number__>({name}_);"
    for name, expression in loss.constants.items():
        if name in used:
            yield from written_at(loss, name)
            yield f"    const auto {name} = ::constant<Number__>({in_double(expression)});"
    if "count" in used:
        yield "    const auto count = ::constant<Number__>(count_);"


def _exponent(kernel: RowKernel | SumKernel) -> Iterator[str]:
    yield ""
    yield "  __device__ __forceinline__ double exponent() const {"
    yield f"    return {f'{DEGREE}_' if DEGREE in _parameters(kernel) else '2.0'};"
    yield "  }"


def _summands(kernel: RowKernel | SumKernel) -> Iterator[str]:
    """Generates the functor ``Summands``: the terms of all statistics and norms, from the elements of one feature."""
    loss = kernel.loss
    terms = loss.terms(kernel.flags)
    yield f"struct {'OwnSummands' if kernel.has_tangent else 'Summands'} {{"
    yield f"  static constexpr int kStatistics = {len(terms)};"
    yield f"  static constexpr unsigned kNorms = {sum(1 << k for k, x in enumerate(terms) if x in loss.norms)}u;"
    yield f"  static constexpr int kForm = {FORMS.get(kernel.norm, kernel.norm)};"
    yield f"  static constexpr bool kFirsts = {str(bool(loss.first)).lower()};"
    yield from (f"  double {x}_;" for x in _parameters(kernel))
    yield from _exponent(kernel)
    yield from call_signature([*_vectors(loss), *_firsts(loss)])
    yield from _options(kernel, terms.values(), _vectors(loss)[0])
    for name, expression in terms.items():
        yield from written_at(loss, name)
        pair = factors(expression) if name in loss.statistics else None
        if pair is None:
            yield f"    const auto {name} = ::lift<Number__>({cuda(expression)});"
        else:
            yield f"    const auto {name} = ::product_of({', '.join(f'::lift<Number__>({cuda(x)})' for x in pair)});"
    yield f"    return ::make_tuple({', '.join(terms)});"
    yield f'#line 1 "<{kernel.title}>.summands"'
    yield "  }"
    yield "};"
    if kernel.has_tangent:
        moves = _bits(kernel, _vectors(loss))
        yield f"using Summands = SummandsAlong<OwnSummands, {len(_vectors(loss))}, {moves}u>;"


def _bits(kernel: RowKernel | SumKernel, operands: Sequence[str]) -> int:
    """Returns a mask with a bit for each of the ``operands`` that has a tangent."""
    moving = _moving(kernel, operands)
    return sum(1 << i for i, x in enumerate(operands) if x in moving)


def _functors(kernel: RowKernel) -> Iterator[str]:
    """Generates ``Summands``, and ``Value``: the value of a row as a functor of statistics and labels.

    Names of the definition may hide those of the kernels, which are therefore qualified with ``::``. All other names in
    the functors contain an underscore in a place where names of a definition have none.
    """
    loss = kernel.loss
    yield from _summands(kernel)
    terms, labels = loss.terms(kernel.flags), _labels(loss, kernel.weight)
    yield f"struct {'OwnValue' if kernel.has_tangent else 'Value'} {{"
    yield from (f"  double {x}_;" for x in [*_parameters(kernel), "count"])
    yield from _exponent(kernel) if kernel.has_tangent else [""]
    yield from call_signature([*terms, *labels, *_firsts(loss)])
    weighted = ["weight"] if kernel.weight == "number" else []
    yield from _options(kernel, [*loss.let.values(), loss.value, *weighted], next(iter(terms)))
    for name in loss.only_with.keys() - terms.keys():
        yield f"    const auto {name} = ::constant<Number__>(0.0);"
    for name, expression in loss.let.items():
        yield from written_at(loss, name)
        yield f"    const auto {name} = {cuda(expression)};"
    yield from written_at(loss, "value")
    yield f"    const auto unweighted = ::lift<Number__>({cuda(loss.value)});"
    yield f"    return {'::weighted(weight, unweighted)' if kernel.weight else 'unweighted'};"
    yield f'#line 1 "<{kernel.title}>.entries"'
    yield "  }"
    yield "};"
    if kernel.has_tangent:
        arguments = f"OwnValue, OwnSummands, {len(_vectors(loss))}, {_bits(kernel, _vectors(loss))}u"
        yield f"using Value = ValueAlong<{arguments}, {len(labels)}, {_bits(kernel, labels)}u>;"


def _entry(kernel: RowKernel) -> Iterator[str]:
    loss, kind = kernel.loss, kernel.kind
    names = operand_names(loss, kernel.weight)
    types, wanted = _types(kernel), dict(zip(names, kernel.gradients, strict=True))
    own_vectors, own_labels = _vectors(loss), _labels(loss, kernel.weight)
    vectors, labels = _with_tangents(kernel, own_vectors), _with_tangents(kernel, own_labels)
    writes = kind in ("value_and_gradient", "verify_gradient", "gradient", "gradients_of_sums")
    floating = [d in FLOATING for n, d in zip(names, kernel.dtypes, strict=True) if n in labels]
    mask = sum(
        1 << i for i, n in enumerate(own_labels) if (writes and wanted[n]) or (kind == "coefficients" and floating[i])
    )
    of_statistics = kind == "coefficients" or (writes and any(wanted[x] for x in own_vectors))

    def sinks(operands: Sequence[str], typed: bool) -> str:
        if typed:
            return ", ".join(f"{types[x]}*" if writes and wanted.get(x) else "Absent" for x in operands)
        return ", ".join(f"{x}_gradients" if writes and wanted.get(x) else "Absent{}" for x in operands)

    def sources(operands: Sequence[str], typed: bool) -> str:
        return ", ".join(f"const {types[x]}*" if typed else f"{x}_" for x in operands)

    streams = 2 * len(vectors + labels) + 2
    numbers = ", ".join(f"{x}_" for x in _parameters(kernel))
    group = f"LanesOfRow<{kernel.width}, {kernel.threads}> group{{}}"
    if kernel.layout == "block":
        clustered = str(kernel.cluster > 1).lower()
        records = f", {kernel.parts}" if kernel.apart else ""
        group = f"BlocksOfRow<{kernel.parts}, {kernel.rounds}, {clustered}, {kernel.threads}{records}> group{{}}"
    rows = "program, group, chunks, rows_per_chunk"
    per_row = str(kernel.per_row).lower()
    call = {
        "value": f"reduce_rows<false>({rows}, memory, divisor, value, 1.0, NoRecord{{}})",
        "value_and_gradient": f"speculate({rows}, memory, divisor, scale, value, grad_output, expected_grad_output, "
        "used_grad_output)",
        "verify_gradient": f"verify({rows}, scale, grad_output, used_grad_output, expected_grad_output)",
        "unreduced": f"value_of_rows({rows}, scale, values)",
        "gradient": f"gradients_of_rows<{per_row}>({rows}, scale, grad_output)",
        "coefficients": f"write_coefficients<{per_row}>({rows}, scale, grad_output, partials)",
    }.get(kind)
    if kernel.layout == PART:
        group, call = "", _call_of_parts(kernel)
    yield f"using Vectors = Tuple<{sources(vectors, True)}>;"
    yield f"using Labels = Tuple<{sources(labels, True)}>;"
    yield f"using VectorSinks = Tuple<{sinks(vectors, True)}>;"
    yield f"using LabelSinks = Tuple<{sinks(labels, True)}>;"
    # An operand that is read element by element keeps an address in registers for each element. A paired operand takes
    # the registers of two vectors.
    read, words = (1 << len(vectors)) - 1, len(vectors) + kernel.paired.bit_count()
    at_once = (kernel.wide | kernel.paired) & read == read and words <= MOST_WORDS
    ahead = kernel.ahead if at_once or kernel.wide & read == read else max(1, kernel.ahead // 2)
    yield f"using Layout = RowsOfFeatures<{streams}, {'kMaxRank' if kernel.many else '1'}>;"
    yield (
        f"using Program = RowStatistics<Summands, Value, Vectors, Labels, VectorSinks, LabelSinks, "
        f"{'const bool*' if kernel.mask else 'Absent'}, Layout, {str(of_statistics).lower()}, {mask}u, "
        f"{kernel.vec_size}, {kernel.wide}u, {kernel.paired}u, {str(kernel.held).lower()}, "
        f"{str(kernel.copied).lower()}, {ahead}, {kernel.threads}, {kernel.in_registers}, "
        f"{str(kernel.staged).lower()}>;"
    )
    last = "resident" if kernel.layout == PART else "rows_per_chunk"
    fixed = ["int64 chunks", f"int64 {last}", "const __grid_constant__ Layout layout"]
    yield ""
    # Registers per thread. 128 by default, for vectors of all operands and their arithmetic in double. 85 if vectors
    # have few elements, so that another block fits; not with a mask, with which ccc_loss would spill. 168 with a mask
    # and vectors of eight elements, which are kept as words.
    few = kernel.layout == "block" and not kernel.mask and len(vectors) * kernel.vec_size <= FEW_NUMBERS
    # Rows of many parts are read with more vectors in flight, which takes registers.
    few = few and (kernel.held or kernel.parts <= MAX_PARTS)
    # If a row stays in registers, all its vectors are live until its sums are complete.
    words = kernel.in_registers * len(vectors) * (2 if "float64" in kernel.dtypes else 1)
    few = few or 0 < words <= FEW_WORDS
    together = RESIDENT_THREADS if few and kind != "coefficients" else MAX_BLOCK_THREADS
    if kernel.has_tangent:
        together = ROOMY_THREADS if len(vectors) > MOST_VECTORS else MAX_BLOCK_THREADS
    if kernel.mask and kernel.vec_size == MOST_ELEMENTS:
        together = ROOMY_THREADS
    bounds = f"{kernel.threads}, {kernel.resident or max(1, together // kernel.threads)}"
    cluster = f" CLUSTER_DIMS({kernel.cluster})" if kernel.cluster > 1 else ""
    yield f'extern "C" __global__ void __launch_bounds__({bounds}){cluster}'
    yield f"{kernel.entry}({', '.join([*kernel.arguments, *fixed])}) {{"
    yield from counted_divisor(kernel.counted, kind != "value")
    yield from [f"  const {group};"] * bool(group)
    counts = ", ".join([*([numbers] if numbers else []), "static_cast<double>(layout.features)"])
    functors = [f"{{{numbers}}}", f"{{{counts}}}"]
    if kernel.has_tangent:
        functors = [f"{{Own{x}{y}}}" for x, y in zip(("Summands", "Value"), functors, strict=True)]
    yield f"  const Program program{{Summands{functors[0]}, Value{functors[1]},"
    yield f"                        make_tuple({sources(vectors, False)}), make_tuple({sources(labels, False)}),"
    yield f"                        make_tuple({sinks(vectors, False)}), make_tuple({sinks(labels, False)}),"
    yield f"                        {'mask_' if kernel.mask else 'Absent{}'}, layout}};"
    yield f"  {call};"
    yield "}"


def _call_of_parts(kernel: RowKernel) -> str:
    """Returns the call in the entry point of a kernel of rows that several blocks share."""
    parts, threads, per_row = kernel.parts, kernel.threads, str(kernel.per_row).lower()
    numbers = part_numbers(statistics_of(kernel.loss, kernel.flags, kernel.has_tangent))
    sums = "reinterpret_cast<Program::Statistics*>(partials)"
    return {
        "value": f"value_of_parts<{parts}, {threads}>(program, memory, divisor, value)",
        "value_and_gradient": f"speculate_apart<{parts}, {threads}>(program, resident, memory, divisor, scale, value, "
        f"expected_grad_output, used_grad_output, {numbers})",
        "sums_for_values": f"sum_parts<{parts}, {threads}>(program, {sums})",
        "values_of_sums": f"values_of_sums<{parts}>(program, {sums}, scale, values)",
        "sums_for_gradients": f"sum_parts<{parts}, {threads}>(program, {sums})",
        "gradients_of_sums": f"gradients_of_sums<{per_row}, {parts}, {threads}>(program, {sums}, scale, grad_output)",
    }[kernel.kind]


@dataclass(frozen=True)
class SumKernel(Kernel):
    """A kernel that sums the gradient of the broadcast operand ``slot`` from the coefficients of the rows.

    ``access`` tells how each operand of the sum is read. For an operand with features, these are all operands with
    features, followed by what ``coefficients`` stored per row. For a label, the only operand is its stored derivative.
    """

    loss: StatisticsLoss
    flags: tuple[int, ...]
    norm: str
    kind: str
    dtypes: tuple[str, ...]
    result: str
    weight: str
    mask: bool
    slot: int
    columns: bool
    vec_size: int
    access: tuple[str, ...]
    many: bool
    counted: bool = False
    has_tangent: tuple[bool, ...] = ()
    compute: str = "float64"

    narrow = False

    @property
    def files(self) -> tuple[str, ...]:
        return FILES_ALONG if self.has_tangent else FILES

    @property
    def storage(self) -> tuple[str, ...]:
        return (*self.dtypes, *["bool"] * self.mask)

    @property
    def gradients(self) -> tuple[bool, ...]:
        """For each operand, True if its gradient is written."""
        return tuple(i == self.slot for i in range(len(self.dtypes)))

    @property
    def title(self) -> str:
        """Description of the kernel, for error messages and file names."""
        dtypes = "-".join([STORAGE[x][1] for x in self.storage])
        parts = [self.loss.name, self.kind, dtypes, STORAGE[self.result][1], f"x{self.vec_size}", f"of{self.slot}"]
        parts += ["-".join(self.access), *(["number"] if self.weight == "number" else [])]
        parts += _tangents_in_title(self)
        parts += [x for x in ("columns", "many", "counted") if getattr(self, x)]
        parts += [f"norm-{self.norm}"] if self.norm else []
        return "_".join([*parts, *([f"flags{''.join(map(str, self.flags))}"] if self.flags else [])])

    @property
    def entry(self) -> str:
        """Name of the kernel."""
        return f"{self.loss.name}_{self.kind}_{STORAGE[self.dtypes[self.slot]][1]}"

    @property
    def arguments(self) -> list[str]:
        return _arguments(self, self.kind)

    def glue(self) -> str:
        return "\n".join(_sum_entry(self)) + "\n"


def _sum_entry(kernel: SumKernel) -> Iterator[str]:
    loss = kernel.loss
    names = operand_names(loss, kernel.weight)
    name, types, count = names[kernel.slot], _types(kernel), statistics_of(loss, kernel.flags, kernel.has_tangent)
    vectors, labels = _with_tangents(kernel, _vectors(loss)), _with_tangents(kernel, _labels(loss, kernel.weight))
    if name in vectors:
        coefficients = [f"coefficient__{k}" for k in range(count)]
        norms = [f"norm__{k}" for k in range(count)] if kernel.norm in NORM_IN_DERIVATIVES else []
        firsts = [f"{x}__first" for x in vectors] if loss.first else []
        operands, slot = [*vectors, *coefficients, *norms, *firsts], vectors.index(name)
        yield from _summands(kernel)
        yield f"using Statistics = StatisticsOf<Summands, MakeIndices<{count}>::type>;"
        yield from loss_head("double")
        yield "  Summands summands;"
        yield ""
        yield from call_signature(operands)
        yield f"    const auto terms = summands({', '.join([*vectors, *firsts])});"
        kept = ", ".join(f"{x}.value" for x in norms)
        yield f"    const double kept[{count}] = {{{kept}}};"
        yield "    const auto parts = Statistics::own_parts(terms, kept, summands.exponent());"
        products = [f"::weighted({x}, get<{k}>(parts))" for k, x in enumerate(coefficients)]
        yield f"    return {' + '.join(products)};"
        yield "  }"
        yield "};"
        summands = f"{{{', '.join(f'{x}_' for x in _parameters(kernel))}}}"
        functor = f"Loss{{Summands{f'{{OwnSummands{summands}}}' if kernel.has_tangent else summands}}}"
        after_labels = count + len(labels)
        others = range(after_labels, after_labels + len(norms) + len(firsts))
        pointers = [f"{x}_" for x in vectors]
        pointers += [f"partials + {k} * rows" for k in (*range(count), *others)]
        stored = [types[x] for x in vectors] + ["double"] * (len(operands) - len(vectors))
    else:
        operands, first, slot = ["slope"], count + labels.index(name), -1
        yield from loss_head("double")
        yield ""
        yield from call_signature(operands)
        yield "    return slope;"
        yield "  }"
        yield "};"
        functor, pointers, stored = "Loss{}", [f"partials + {first} * rows"], ["double"]
    sources = [f"Source<{t}, Access::{ACCESS[a]}>" for t, a in zip(stored, kernel.access, strict=True)]
    made = ", ".join(f"{t}{{{p}}}" for t, p in zip(sources, pointers, strict=True))
    rank = max_rank(len(operands)) if kernel.many else 1
    dimensions = f"Dimensions<{len(operands) + 2}, {rank}>"
    fixed = [f"int64 {x}" for x in ("rows", "outputs", "length", "slices", "slice_length", "lanes", "warps")]
    fixed += [f"const __grid_constant__ {dimensions} {x}" for x in ("kept", "reduced")]
    stored_numbers = stored_per_row(loss, kernel.flags, kernel.norm, len(labels), kernel.has_tangent)
    after = f"partials + {stored_numbers} * rows"
    yield f"using Sources = Tuple<{', '.join(sources)}>;"
    yield ""
    # Terms with tangents take 166 registers. Without the bound the compiler targets two blocks per multiprocessor, and
    # spills.
    bounds = f"{MAX_THREADS}, 1" if kernel.has_tangent else f"{MAX_THREADS}"
    yield f'extern "C" __global__ void __launch_bounds__({bounds})'
    yield f"{kernel.entry}({', '.join([*kernel.arguments, *fixed])}) {{"
    yield f"  const SumOver<Loss, Sources, Absent, {slot}, {rank}, {rank}, {kernel.vec_size}> program{{"
    yield f"      {functor}, make_tuple({made}), Absent{{}}, kept, reduced, Rows<{len(operands) + 2}, false>{{}}}};"
    storage, result = types[name], STORAGE[kernel.result][0]
    yield f"  const Deposit<{storage}, {result}> deposit{{{name}_gradients, nullptr, 1.0, 1.0}};"
    columns = str(kernel.columns).lower()
    if kernel.kind == "slices":
        yield f"  sum_slices<{columns}, true>("
        yield f"      program, deposit, outputs, length, slices, slice_length, lanes, warps, {after});"
    else:
        yield f"  combine_slices<{columns}>(program, deposit, outputs, slices, {after});"
    yield "}"

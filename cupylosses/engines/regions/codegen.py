"""Generates CUDA source from the definition of a region loss: the glue code of ``kernels/regions/``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from cupylosses.definition.expressions import cuda, in_double, names_in
from cupylosses.engines.regions.call import NUMBERS, Static
from cupylosses.engines.regions.definition import RegionLoss
from cupylosses.engines.regions.layout import (
    GRADIENT_THREADS,
    GROUP_THREADS,
    SECOND_BLOCKS,
    STORED_BLOCKS,
    THREADS,
    columns_of_sums,
    resident,
    second_resident,
    staged_gradient_blocks,
)
from cupylosses.interop import ITEMSIZE
from cupylosses.jit.glue import STORAGE, call_signature, counted_divisor, written_at
from cupylosses.jit.kernel import Kernel
from cupylosses.jit.sources import FUNCTOR, nested

FILES = (*FUNCTOR, "regions/tiles.cuh")
SECOND_FILES = nested((*FUNCTOR, "regions/region_hvp.cuh"))

#: Results of each kind of kernel.
KINDS = {
    "value": "the reduced value, and the residual",
    "sums": "the sums of chunks, for values of groups",
    "groups": "the values of groups from these, and the residual",
    "from_residual": "the gradients",
    "hvp_sums": "the sums of chunks with their tangents",
    "hvp_groups": "the derivative along a tangent, and the coefficients with their tangents",
    "hvp": "the products of the second derivatives with a tangent",
}
SECOND = ("hvp_sums", "hvp_groups", "hvp")

#: Names of the settings in kernels.
_ACTIVATION = {"softmax": "kSoftmax", "sigmoid": "kSigmoid", "none": "kProbabilities"}
_OVERLAP = {"product": "kProduct", "min": "kMinimum", "squared": "kSquared"}
_VOXEL = {"": "kNoVoxelLoss", "row": "kRow", "term": "kTerm", "element": "kElement"}
_POOL = {"none": "kPoolNone", "batch": "kPoolBatch", "class": "kPoolClass", "both": "kPoolBoth"}
_ABSENT = {"skip": "kSkipAbsent", "zero": "kZeroAbsent", "keep": "kKeepAbsent"}
_WEIGHTING = {"uniform": "kUniform", "simple": "kSimple", "square": "kSquare"}

#: Arguments of the functor, by expression of the voxel loss.
_CALLED_WITH = {
    "row": ("nll", "rest", "lse", "smooth", "weight"),
    "term": ("log_p", "target", "weight", "classes"),
    "element": ("input", "target", "weight", "classes"),
}
#: Number of partial sums that a thread of the last block loads at a time, limited by registers: with up to two blocks
#: per multiprocessor, and with more.
PARTIALS_AHEAD = (36, 16)


@dataclass(frozen=True)
class RegionKernel(Kernel):
    """A kernel of this engine. Equal instances have equal source.

    ``class_weight`` and ``weight`` are the dtypes of these arrays, or "" without them. ``static`` is the static part of
    the call without what kernels take as arguments. ``held`` is the number of classes that each of ``lanes`` threads
    keeps in registers, or 0. With ``wide``, a vector is one load. ``many`` is True if voxels have several
    dimensions. With ``staged``, logits and labels pass through shared memory (``StagedVectors``). With ``counted``, the
    divisor is read from memory. ``tile`` is the number of voxels whose logits are in shared memory, or 0. ``packed``
    and ``word`` are those of the layout. With ``by_warps``, the lanes of a warp move packed vectors together.
    """

    loss: RegionLoss
    kind: str
    input: str
    target: str
    class_weight: str
    weight: str
    mask: bool
    result: str
    compute: str
    static: Static
    gradients: tuple[bool, ...]
    held: int
    vec_size: int
    wide: bool
    many: bool
    staged: bool = False
    counted: bool = False
    tile: int = 0
    packed: tuple[bool, bool] = (False, False)
    by_warps: bool = False
    word: int = 0
    lanes: int = 1

    @property
    def files(self) -> tuple[str, ...]:
        return SECOND_FILES if self.kind in SECOND else FILES

    @property
    def narrow(self) -> bool:
        if self.kind in SECOND:
            return False
        # Gradients do not depend on the dtype of the value.
        arrays = [self.input, *([] if self.kind == "from_residual" else [self.result])]
        arrays += [self.target] if self.static.kind == "dense" else []
        return self.compute == "float32" and all([ITEMSIZE[x] <= 2 for x in arrays])

    @property
    def storage(self) -> tuple[str, ...]:
        return (self.input, self.target)

    @property
    def title(self) -> str:
        """Description of the kernel, for error messages and file names."""
        names = (self.input, self.target, self.class_weight, self.weight, "bool" if self.mask else "")
        dtypes = "-".join([STORAGE[x][1] if x else "none" for x in names])
        parts = [self.loss.name, self.kind, dtypes, STORAGE[self.result][1], STORAGE[self.compute][1]]
        s = self.static
        parts += [s.kind, s.activation, s.overlap, f"x{self.vec_size}", f"{self.held or 'many'}-classes"]
        if self.kind in ("value", "groups", "hvp_groups"):
            parts += [f"pool-{s.pool}", s.absent, s.weighting, s.weight_in, f"over-{s.average}", s.reduction]
            parts += [
                x.replace("_", "-") for x in ("log_loss", "mean_of_weights", "power", "normalized") if getattr(s, x)
            ]
            parts += [] if s.background else ["foreground"]
            parts += [f"power-of-{s.gamma_over}"] if s.power else []
        parts += [s.voxel] if s.voxel else []
        parts += (
            ["smoothed"] * s.smoothed
            + ["wide"] * self.wide
            + ["apart"] * self.many
            + ["staged"] * self.staged
            + ["counted"] * self.counted
            + [f"{self.lanes}-lanes"] * (self.lanes > 1)
            + [f"tiles-of-{self.tile}"] * bool(self.tile)
            + [f"words-of-{self.word}"] * bool(self.word)
            + [f"packed{''.join([str(int(x)) for x in self.packed])}"] * any(self.packed)
            + ["by-warps"] * self.by_warps
        )
        if self.kind in ("from_residual", "hvp"):
            parts += ["grad" + "".join([str(int(x)) for x in self.gradients])]
        return "_".join(parts)

    @property
    def entry(self) -> str:
        """Name of the kernel function."""
        return f"{self.loss.name}_{self.kind}_{STORAGE[self.input][1]}"

    @property
    def arguments(self) -> list[str]:
        input, target, result = (STORAGE[x][0] for x in (self.input, self.target, self.result))
        arrays = [f"const {input}* input", f"const {target}* target"]
        arrays += [f"const {STORAGE[self.class_weight][0]}* class_weights"] if self.class_weight else []
        arrays += [f"const {STORAGE[self.weight][0]}* weights"] if self.weight else []
        arrays += ["const bool* mask"] if self.mask else []
        arrays += [f"const {input}* tangents"] if self.kind in SECOND else []
        if self.kind in ("from_residual", "hvp"):
            written = zip((input, target), ("input", "target"), self.gradients, strict=True)
            arrays += [f"{kind}* {name}_gradients" for kind, name, wanted in written if wanted]
        if self.kind in SECOND:
            of_kind = ["double* memory", "double* coefficients", f"{result}* value"]
            of_kind += [f"const {result}* grad_output", "int64 per_group"]
        elif self.kind == "from_residual":
            of_kind = ["const double* residual", f"const {result}* grad_output", "int64 per_group"]
        elif self.kind == "value":
            of_kind = ["double* residual", "double* memory", f"{result}* value"]
        else:
            of_kind = ["double* residual", f"{result}* values", "double* partials"]
        numbers = [f"double {x}" for x in NUMBERS] + [f"double {x.name}_" for x in self.loss.of_voxels]
        status = ["RowStatus* status"] if self.static.kind == "labels" else []
        divisor = ["double multiple", "const double* count"] if self.counted else ["double divisor", "double scale"]
        return [*arrays, *of_kind, *numbers, *status, *divisor]

    def glue(self) -> str:
        return "\n".join([*_functor(self), *_entry(self)]) + "\n"


def number_of(kernel: RegionKernel) -> str:
    """Returns the C++ type in which the voxel loss is evaluated."""
    compute = STORAGE[kernel.compute][0]
    return f"NestedDual<{compute}>" if kernel.kind in SECOND else compute


def _functor(kernel: RegionKernel) -> Iterator[str]:
    """Yields the functor ``Loss``, which evaluates the voxel loss."""
    loss, part, compute = kernel.loss, kernel.static.voxel, STORAGE[kernel.compute][0]
    parameters = [x.name for x in loss.of_voxels] if part else []
    expression = loss.expressions[part] if part else ""
    used = names_in(expression)
    tries = part == "element" and kernel.compute == "float32"
    tried = loss.tentative if tries else ""
    used |= names_in(tried)
    numbers = [x for x in [*parameters, *(loss.constants if part else ())] if x in used]
    yield "struct Loss {"
    yield f"  using Compute = {number_of(kernel)};"
    yield f"  static constexpr bool kOfWeights = {str(loss.of_weights).lower()};"
    yield f"  static constexpr bool kTriedFirst = {str(bool(tried)).lower()};"
    if part:
        yield from (f"  {compute} {x}_kept;" for x in numbers)
        yield ""
        declared = ", ".join([f"double {x}_" for x in parameters])
        yield f"  __device__ __forceinline__ explicit Loss({declared}) {{"
        for name, constant in loss.constants.items():
            if name in numbers:
                yield from written_at(loss, name)
                yield f"    const double {name}_ = {in_double(constant)};"
        yield from (f"    {x}_kept = static_cast<{compute}>({x}_);" for x in numbers)
        yield "  }"
        yield ""
        if tried:
            yield "  __device__ __forceinline__ bool usual() const {"
            yield from (f"    const double {x}_ = {x}_kept;" for x in numbers if x in names_in(tried))
            yield from written_at(loss, "tentative")
            yield f"    return {in_double(tried)};"
            yield "  }"
        yield from call_signature(_CALLED_WITH[part])
        yield f"    using _number = typename {_CALLED_WITH[part][0]}_::Scalar;"
        yield from (f"    const auto {x} = ::constant<_number>({x}_kept);" for x in numbers)
        yield from written_at(loss, part)
        yield f"    return ::lift<_number>({cuda(expression)});"
        yield f'#line 1 "<{kernel.title}>.entries"'
        yield "  }"
    yield "};"


def _bool(x: object) -> str:
    return str(bool(x)).lower()


def _entry(kernel: RegionKernel) -> Iterator[str]:
    static, kind = kernel.static, kernel.kind
    input, target = STORAGE[kernel.input][0], STORAGE[kernel.target][0]
    weight = STORAGE[kernel.weight][0] if kernel.weight else "Absent"
    class_weight = STORAGE[kernel.class_weight][0] if kernel.class_weight else "Absent"
    labels = static.kind == "labels"
    choices = [_bool(kernel.mask), _bool(not labels), _ACTIVATION[static.activation], _OVERLAP[static.overlap]]
    choices += [_VOXEL[static.voxel], _bool(static.smoothed), str(kernel.held), str(kernel.lanes)]
    choices += [str(kernel.vec_size)]
    yield f"using Space = VoxelSpace<{'kMaxRank' if kernel.many else '1'}>;"
    second = kind in SECOND
    yield (
        f"using {'Base' if second else 'Program'} = RegionProgram<Loss, Space, {input}, {target}, {weight}, "
        f"{', '.join(choices)}, {_bool(kernel.wide)}, {kernel.tile}, {kernel.word}, "
        f"{', '.join(map(_bool, (*kernel.packed, kernel.by_warps)))}>;"
    )
    yield from ["using Program = RegionHvpProgram<Base>;"] * second
    rules = [_POOL[static.pool], _ABSENT[static.absent], _WEIGHTING[static.weighting]]
    switches = (
        static.log_loss,
        static.power and static.gamma_over == "group",
        static.power and static.gamma_over == "mean",
        # Without a reduction there is no mean over samples, and its divisors would never be written.
        static.average == "samples" and static.reduction != "none",
        static.weight_in == "score",
        static.mean_of_weights,
        static.background,
        static.normalized,
        static.reduction == "sum",
    )
    yield f"using Rules = GroupRules<{', '.join([*rules, *map(_bool, switches)])}>;"
    blocks = resident(kernel.held, ITEMSIZE[kernel.compute], bool(static.voxel)) if kind != "groups" else 1
    if second:
        heavy = static.smoothed or static.voxel in ("term", "element")
        logits = kernel.held * kernel.vec_size
        blocks = 1 if kind == "hvp_groups" else second_resident(logits, ITEMSIZE[kernel.compute], heavy)
    if kernel.word:
        blocks = STORED_BLOCKS if kernel.compute == "float32" else 2
    of_groups = f", NestedDual<double>, {GROUP_THREADS}" if second else ""
    yield f"using Groups = GroupProgram<Rules, {class_weight}, {PARTIALS_AHEAD[blocks > 2]}{of_groups}>;"
    fixed = ["int64 ignored", "int64 site", "int64 chunks", "int64 per_chunk"]
    fixed += ["int64 per_piece"] * (kind == "from_residual" and kernel.staged)
    fixed += ["int64 per_segment"] * (kind in ("value", "hvp_sums", "hvp_groups"))
    fixed += ["int64 room"] * (kind in ("value", "hvp_groups"))
    fixed += ["const __grid_constant__ Space space"]
    yield ""
    threads = GROUP_THREADS if kind == "hvp_groups" else THREADS
    if kind == "hvp":
        threads, products = GRADIENT_THREADS, SECOND_BLOCKS if kernel.compute == "float32" else 2
        blocks = blocks * THREADS // GRADIENT_THREADS if kernel.word else products
    if kind == "from_residual":
        threads, blocks = GRADIENT_THREADS, blocks * THREADS // GRADIENT_THREADS
        if kernel.staged:
            blocks = staged_gradient_blocks(kernel.held)
    yield f'extern "C" __global__ void __launch_bounds__({threads}, {blocks})'
    yield f"{kernel.entry}({', '.join([*kernel.arguments, *fixed])}) {{"
    if kind == "value":
        yield from counted_divisor(kernel.counted, False)
    if kind in ("value", "hvp_sums", "hvp_groups"):
        yield "  const Workspace work = workspace(memory);"
        yield "  double* const partials = work.partials;"
    if kind in ("value", "sums", "from_residual", "hvp_sums", "hvp"):
        parameters = ", ".join([f"{x.name}_" for x in kernel.loss.of_voxels]) if static.voxel else ""
        yield f"  const Program program{{{'{' * second}Loss{{{parameters}}}, space, input, target,"
        arguments = ["weights" if kernel.weight else "nullptr", "mask" if kernel.mask else "nullptr", "ignored"]
        arguments += ["status" if labels else "nullptr", "site"]
        yield f"                        {', '.join(arguments)}{'}, tangents' * second}}};"
    if kind == "hvp_sums":
        yield "  extern __shared__ uint4 staged[];"
        yield "  NestedDual<double>* const sums = reinterpret_cast<NestedDual<double>*>(partials);"
        if kernel.held:
            columns = "reinterpret_cast<Program::Compute*>(staged)"
            yield f"  sum_with_tangents(program, chunks, per_chunk, sums, {columns});"
        elif kernel.word:
            yield "  sum_in_stored_tiles(program, chunks, per_chunk, per_segment, work.counters, sums, staged);"
        else:
            yield "  sum_in_tiles<Program, ClassesWithTangents<Program>>("
            yield "      program, chunks, per_chunk, sums, reinterpret_cast<NestedDual<double>*>(staged));"
    if kind in ("value", "sums"):
        yield "  extern __shared__ uint4 staged[];"
        if kernel.held:
            columns = "reinterpret_cast<Program::Compute*>(staged)"
            at = columns_of_sums(kernel.held, static.label_apart, kernel.lanes)
            yield f"  sum_in_registers<{_bool(kernel.staged)}>(program, chunks, per_chunk, partials, {columns}, {at});"
        elif kernel.word:
            segments = "per_segment, work.counters" if kind == "value" else "1, nullptr"
            yield f"  sum_in_stored_tiles(program, chunks, per_chunk, {segments}, partials, staged);"
        elif kernel.tile:
            yield "  sum_in_shared_tiles(program, chunks, per_chunk, partials, reinterpret_cast<double*>(staged));"
        else:
            yield "  sum_in_tiles(program, chunks, per_chunk, partials, reinterpret_cast<double*>(staged));"
    if kind == "value":
        yield "  if (!arrive_last(work.ticket)) return;"
    weights = "class_weights" if kernel.class_weight else "nullptr"
    if kind in ("value", "groups", "from_residual", "hvp_groups", "hvp"):
        numbers = ", ".join(NUMBERS)
        partials = "nullptr" if kind in ("from_residual", "hvp") else "partials"
        per_segment = "per_segment" if kind in ("value", "hvp_groups") else "1"
        yield f"  Groups groups{{{{{numbers}}}, {weights}, space.samples, space.classes, chunks, {per_segment},"
        yield f"                {partials}, nullptr, nullptr, nullptr}};"
        if kind == "groups":
            yield "  groups.keep(nullptr, -1);"
        elif kind == "hvp_groups":
            yield "  extern __shared__ uint4 staged[];"
            yield "  groups.keep(reinterpret_cast<double*>(staged), room);"
        elif kind == "value":
            # Nothing reads the shared memory of the sums any more.
            yield "  groups.keep(reinterpret_cast<double*>(staged), room);"
    if kind == "value":
        yield f"  finish_value<{_bool(static.voxel)}>(groups, divisor, value, residual);"
    elif kind == "groups":
        yield "  finish_groups(groups, values, residual);"
    elif kind == "hvp_groups":
        results = "reinterpret_cast<NestedDual<double>*>(coefficients)"
        if static.reduction == "none":
            yield f"  finish_groups(groups, value, {results});"
        else:
            yield f"  finish_value<{_bool(static.voxel)}>(groups, 1.0, value, {results});"
    elif kind == "hvp":
        names = ("input_gradients", "target_gradients")
        arguments = [n if w else "nullptr" for n, w in zip(names, kernel.gradients, strict=True)]
        yield "  extern __shared__ uint4 staged[];"
        yield "  const NestedDual<double>* const of_cells = reinterpret_cast<NestedDual<double>*>(coefficients);"
        writer = f"write_products<{', '.join(map(_bool, kernel.gradients))}>"
        if kernel.word:
            writer, arguments = "write_stored_tiles", arguments[:1]
        yield f"  {writer}("
        yield "      program, groups, of_cells, grad_output, per_group, chunks, per_chunk,"
        yield f"      {', '.join(arguments)}, reinterpret_cast<Program::Compute*>(staged));"
    elif kind == "from_residual":
        names = ("input_gradients", "target_gradients")
        arguments = [n if w else "nullptr" for n, w in zip(names, kernel.gradients, strict=True)]
        yield "  extern __shared__ uint4 staged[];"
        coeffs = "reinterpret_cast<Program::Compute*>(staged)"
        common = "program, groups, residual, grad_output, per_group, chunks, per_chunk"
        if kernel.staged:
            yield f"  write_staged_gradients({common}, per_piece,"
            yield f"                         {arguments[0]}, {coeffs});"
        else:
            writer = f"write_gradients<{', '.join(map(_bool, kernel.gradients))}>"
            if kernel.tile:
                writer, arguments = "write_stored_tiles" if kernel.word else "write_tile_gradients", arguments[:1]
            yield f"  {writer}("
            yield f"      {common}, {', '.join(arguments)}, {coeffs});"
    yield "}"

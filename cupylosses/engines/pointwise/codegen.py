"""Generation of CUDA source from a definition.

The kernels under ``kernels/`` are complete except for types and the loss itself. This module generates the glue: the
loss as a functor on dual numbers, and ``extern "C"`` entry points that fill in types and call the skeleton. Every part
of the source carries its own ``#line``, so the compiler reports an error in a loss's expression at ``<loss>.<name>``,
and one in the skeleton at ``kernels/<file>``.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass

from cupylosses.checks import FLOATING
from cupylosses.definition.expressions import cuda, in_double, names_in
from cupylosses.engines.pointwise.definition import Loss, ModifiedLoss
from cupylosses.engines.pointwise.jvp import TangentLoss
from cupylosses.engines.pointwise.layout import (
    BLOCKS_PER_SM,
    BLOCKS_PER_SM_OTHERS,
    GATHERED,
    LINEAR,
    MAX_THREADS,
    PLANES,
    STAGED,
    STRIPS,
    TILED,
    UNROLL,
    Tile,
    outer_rank,
    staged_bytes,
)
from cupylosses.interop import ITEMSIZE
from cupylosses.jit.glue import (
    STORAGE,
    call_signature,
    choice_constant,
    counted_divisor,
    loss_head,
    written_at,
)
from cupylosses.jit.kernel import Kernel
from cupylosses.jit.sources import FUNCTOR, nested

#: Kernel files of the entry points of pointwise losses: in general, with staged tiles, and for sums.
POINTWISE = (*FUNCTOR, "pointwise/pointwise.cuh")
STAGING = (*FUNCTOR, "pointwise/staged_tiles.cuh")
SUMMING = (*FUNCTOR, "pointwise/sum_over.cuh")

#: Entry points of every loss. The first three belong to a reduced loss, the next two to `reduction="none"`.
KINDS = {
    "value": "the reduced value",
    "value_and_gradient": "the reduced value and the gradients for the expected grad_output, in backward the true one",
    "verify_gradient": "the gradients for the true grad_output, from the sums that were accumulated beside the value",
    "elements": "a value per element",
    "elements_gradient": "the gradients for a grad_output per element, or partial sums of them",
    "combine_gradients": "the gradients of broadcast operands from these partial sums",
    "broadcast_gradient": "the gradient of one broadcast operand, or slices of it",
    "combine_slices": "the gradient of one broadcast operand from its slices",
    "sum_over": "the value summed over some dimensions, or slices of it",
    "combine_sums": "the value summed over some dimensions from its slices",
}
COMBINED = "combine_gradients"
#: Additional entry point of a derivative along tangents: its gradients for one grad_output, without the value.
PRODUCT = "product"
REDUCED = frozenset({"value", "value_and_gradient"})
SUMS_OF_VALUES = frozenset({"sum_over", "combine_sums"})
SUMS = frozenset({"broadcast_gradient", "combine_slices"}) | SUMS_OF_VALUES

#: CUDA spelling of the accesses of a layout (``Access``).
ACCESS = {
    "stream": "kStream", "splat": "kSplat", "shifted": "kShifted", "singles": "kSingles", "scalars": "kScalars",
    "gather": "kGather",
    "gather_row": "kGatherRow",
    "gather_shifted": "kGatherShifted",
    "ragged": "kRagged",
    "periodic": "kPeriodic",
}  # fmt: skip

#: CUDA spelling of the accesses of micro-tiles (``Along``).
ALONG = {"along_a": "kA", "along_b": "kB", "packed": "kBoth", "elements": "kNeither"}


#: CUDA spelling of the direction of staged tiles.
STAGED_ALONG = dict(zip(STAGED, ("kA", "kB"), strict=True))


@dataclass(frozen=True)
class PointwiseKernel(Kernel):
    """Everything that distinguishes one compiled module from another.

    Hashable and complete: equal variants have equal source.

    Attributes:
        kind: Name of the entry point: one of :data:`KINDS`, or :data:`PRODUCT`.
        access: One entry per operand, and a last one for a grad_output per element (``"none"`` without).
        columns: True if the lanes of a sum run along its outputs.
        compute: Dtype of the arithmetic.
        counted: True if the divisor is in device memory.
        outer: Number of reduced dimensions that the kernel of a sum has room for.
        shared: True if arguments tell how many lanes and warps of a sum share an output. Otherwise an output has one
            lane (``columns``) or one warp.
        tile: Shape of tiles of micro-tiles.
        sinks: Accesses of gradients and result, if there are micro-tiles or gathered streams; otherwise empty.
        strip: Number of vectors of a row of strips that a warp processes in one step, number of steps along the row,
            and True if no vector divides the rows.
        sums: For each wanted gradient that is summed beside the value, the kind of its partial sums and the number of
            dimensions of their combination.
        unroll: Number of vectors per lane in a batch, if it is not the layout's default.
        whole_batches: True if the elements fill whole batches.
        long_rows: True if rows beside which streams are gathered have at least one vector.
    """

    loss: Loss
    flags: tuple[int, ...]
    kind: str
    storage: tuple[str, ...]
    result: str
    layout: str
    vec_size: int
    access: tuple[str, ...]
    gradients: tuple[bool, ...]
    columns: bool = False
    compute: str = "float32"
    counted: bool = False
    outer: int = 1
    shared: bool = False
    tile: Tile | None = None
    sinks: tuple[str, ...] = ()
    strip: tuple[int, int, bool] = (0, 1, False)
    sums: tuple[tuple[str, int] | None, ...] = ()
    unroll: int = 0
    whole_batches: bool = False
    long_rows: bool = False

    @property
    def companions(self) -> tuple[str, ...]:
        return ("value_and_gradient", "verify_gradient") if self.summed else ()

    @property
    def title(self) -> str:
        """The variant in words, for error messages and file names."""
        dtypes = "-".join(STORAGE[x][1] for x in self.storage)
        wanted = "".join("1" if x else "0" for x in self.gradients)
        access = "-".join(self.access)
        flags = "".join(str(int(x)) for x in self.flags)
        parts = [title(self.loss), self.kind, dtypes, STORAGE[self.result][1], self.layout, f"x{self.vec_size}", access]
        parts += [f"grad{wanted}"] + ([f"flags{flags}"] if flags else []) + (["columns"] if self.columns else [])
        parts += ([f"outer{self.outer}"] if self.outer > 1 else []) + (["shared"] if self.shared else [])
        if self.compute != ("float64" if self.result == "float64" else "float32"):
            parts.append(f"in-{STORAGE[self.compute][1]}")
        parts += ["counted"] if self.counted else []
        if self.tile:
            parts += ["tile-" + "-".join(map(str, astuple(self.tile)))]
        if self.sinks:
            parts += [x for x, written in zip(self.sinks, self._written, strict=True) if written]
        parts += [f"strip-{self.strip[0]}-{self.strip[1]}{'-ragged' * self.strip[2]}"] if self.layout in STRIPS else []
        parts += ["sums-" + "-".join(f"{x[0]}{x[1]}" if x else "0" for x in self.sums)] if self.sums else []
        parts += [f"unroll-{self.unroll}"] if self.unroll else []
        parts += ["whole"] if self.whole_batches else []
        parts += ["long-rows"] if self.long_rows else []
        return "_".join(parts)

    @property
    def summed(self) -> list[tuple[int, str, int]]:
        """Slot, kind of sum and dimensions of the combination, for each gradient that is summed."""
        return [(i, *x) for i, x in enumerate(self.sums) if x]

    @property
    def stored(self) -> tuple[bool, ...]:
        """True for each gradient that is stored element by element."""
        summed = [i for i, _, _ in self.summed]
        return tuple([w and i not in summed for i, w in enumerate(self.gradients)])

    @property
    def _written(self) -> tuple[bool, ...]:
        """True for each gradient that is written; the last entry stands for the values."""
        return (*self.stored, self.kind == "elements")

    @property
    def staged(self) -> dict[int, int]:
        """Bytes of each tile that a warp has in shared memory, by stream.

        A gradient without a tile of its own uses that of its operand.
        """
        if not self.tile:
            return {}
        accesses = {i: x for i, x in enumerate(self.access) if x in STAGED}
        count = len(self.storage)
        for i, (x, written) in enumerate(zip(self.sinks, self._written, strict=True)):
            if written and x in STAGED and accesses.get(i) != x:
                accesses[count + 1 + i] = x
        dtypes = (*self.storage, self.result, *self.storage, self.result)
        return {i: staged_bytes(ITEMSIZE[dtypes[i]], self.tile, x) for i, x in accesses.items()}

    @property
    def entry(self) -> str:
        """Name of the kernel."""
        dtypes = "_".join(dict.fromkeys(STORAGE[x][1] for x in self.storage))
        return f"{self.loss.name}_{self.kind}_{dtypes}"

    @property
    def files(self) -> tuple[str, ...]:
        files: tuple[str, ...] = SUMMING if self.kind in SUMS else STAGING if self.staged else POINTWISE
        return nested(files) if isinstance(self.loss, TangentLoss) else files

    @property
    def of_16_bits(self) -> bool:
        """True if all floating operands and the result have 16 bits, and the arithmetic is float32."""
        floats = [x for x in (*self.storage, self.result) if x in FLOATING]
        return all(ITEMSIZE[x] == 2 for x in floats) and self.compute == "float32"

    @property
    def narrow(self) -> bool:
        return self.of_16_bits and not isinstance(self.loss, TangentLoss)  # parts of which are differentiated twice

    @property
    def arguments(self) -> list[str]:
        return _varying_arguments(self)

    def glue(self) -> str:
        return generated(self)


def title(loss: Loss) -> str:
    """Returns the name of a loss, with a suffix that distinguishes a modified loss from others."""
    return f"{loss.name}_{loss.suffix}" if isinstance(loss, ModifiedLoss) else loss.name


#: Arguments of each entry point between the tensors and the parameters.
OWN_ARGUMENTS = {
    "value": ["double* memory", "Result* value"],
    "value_and_gradient": [
        "double* memory",
        "Result* value",
        "const Result* grad_output",
        "double* expected_grad_output",
        "double* used_grad_output",
    ],
    "verify_gradient": ["const Result* grad_output", "const double* used_grad_output", "double* expected_grad_output"],
    PRODUCT: ["const Result* grad_output"],
    "elements": ["Result* values"],
    "elements_gradient": ["const Result* grad_output"],
    COMBINED: ["const Result* grad_output"],
} | {
    kind: ["Result* sums" if kind in SUMS_OF_VALUES else "const Result* grad_output", "double* partials"]
    for kind in SUMS
}


def _varying_arguments(variant: PointwiseKernel) -> list[str]:
    """Returns the declarations of the arguments that differ from call to call.

    They come first in every entry point. Arguments that a plan fixes come last, and are packed once. Names from a
    definition end in an underscore, as no other name does, or in `_gradients`, as no name of the kernels does.
    """
    tensors = list(zip(variant.loss.operands, variant.storage, variant.gradients, strict=True))
    partials = ["double* partials"] if variant.kind in ("elements_gradient", COMBINED) and variant.summed else []
    kind_arguments = OWN_ARGUMENTS[variant.kind]
    if variant.kind == "value_and_gradient" and variant.summed:
        kind_arguments = [x for x in kind_arguments if x != "const Result* grad_output"]
    return [
        *(f"const {STORAGE[dtype][0]}* {operand.name}_" for operand, dtype, _ in tensors),
        *(f"{STORAGE[dtype][0]}* {operand.name}_gradients" for operand, dtype, wanted in tensors if wanted),
        *kind_arguments,
        *partials,
        *(f"double {x.name}_" for x in variant.loss.parameters),
        *(["double multiple", "const double* count"] if variant.counted else ["double divisor", "double scale"]),
    ]


def generated(variant: PointwiseKernel) -> str:
    """Returns the part of the source that is generated for this variant."""
    if variant.kind == COMBINED:
        body = _combine_entry(variant)
    else:
        body = _sum_entry(variant) if variant.kind in SUMS else _pointwise_entry(variant)
    return f"{functor(variant)}\n{body}"


def functor(variant: PointwiseKernel) -> str:
    """Returns the loss as a functor on dual numbers.

    Names of the definition hide those of the kernels, which are therefore qualified with ``::`` here. All other names
    have an underscore where names of the definition have none.
    """
    loss, compute = variant.loss, STORAGE[variant.compute][0]
    if isinstance(loss, TangentLoss):
        # Takes any type of number: the arithmetic type, or nested dual numbers.
        lines = ["struct Base {", f"  using Compute = {compute};"]
        base = loss.base or loss
        lines += [
            *_operator(variant, base, "_number"),
            *_tentative(variant, base),
            "};",
            "",
            *_direction(variant, loss),
        ]
    else:
        lines = ["struct Loss {", f"  using Compute = {compute};", f"  static constexpr int kHeavy = {loss.heavy};"]
        lines += [*_operator(variant, loss, compute), *_tentative(variant, loss), "};"]
    return "\n".join(lines) + "\n"


def _operator(variant: PointwiseKernel, loss: Loss, number: str) -> list[str]:
    """Returns the parameters of the functor, and its call operator on dual numbers over type ``number``."""
    operands = [x.name for x in loss.operands]
    lines = [f"  double {x.name}_;" for x in loss.parameters]
    lines += ["", *call_signature(operands)]
    if number == "_number":
        lines += [f"    using _number = typename {operands[0]}_::Scalar;"]
    lines += [f"    constexpr {choice_constant(x, i)};" for x, i in zip(loss.flags, variant.flags, strict=True)]
    lines += [f"    const auto {x.name} = ::constant<{number}>({x.name}_);" for x in loss.parameters]
    for name, expression in loss.constants.items():
        lines += [*written_at(loss, name), f"    const double {name}_ = {in_double(expression)};"]
        lines += [f"    const auto {name} = ::constant<{number}>({name}_);"]
    for name, expression in loss.let.items():
        lines += [*written_at(loss, name), f"    const auto {name} = {cuda(expression)};"]
    form = loss if isinstance(loss, ModifiedLoss) else None
    if form is None and not loss.derivatives:
        lines += [*written_at(loss, "value"), f"    return ::lift<{number}>({cuda(loss.value)});"]
    else:
        result = "unweighted"
        lines += [*written_at(loss, "value"), f"    const auto unweighted = ::lift<{number}>({cuda(loss.value)});"]
        for name, expression in loss.derivatives.items():
            lines += [*written_at(loss, f"derivatives.{name}")]
            lines += [f"    const auto _{name}_slope = ::lift<{number}>({cuda(expression)});"]
            result = f"::with_derivative({result}, {name}, _{name}_slope)"
        if loss.derivatives and number == "_number":
            result = f"::with_tangents({', '.join([result, *operands])})"
        if form and form.weight:
            result = f"::weighted(weight, {result})"
        lines += [f"    return {f'::where(mask != 0, {result}, 0)' if form and form.mask else result};"]
    return [*lines, f'#line 1 "<{variant.title}>.entries"', "  }"]


def _tried_first(variant: PointwiseKernel, loss: Loss) -> bool:
    """True if elements are evaluated tentatively first.

    That takes a condition on numbers only: one on operands that are arrays is not known before the elements are read.
    """
    return bool(loss.tentative) and variant.of_16_bits and names_in(loss.tentative) <= {x.name for x in loss.parameters}


def _tentative(variant: PointwiseKernel, loss: Loss) -> list[str]:
    """Returns the condition under which elements are evaluated tentatively first."""
    tried = _tried_first(variant, loss)
    lines = [f"  static constexpr bool kTriedFirst = {str(tried).lower()};"]
    if tried:
        lines += ["  __device__ __forceinline__ bool usual() const {", *written_at(loss, "tentative")]
        lines += [f"    return {in_double(loss.tentative)};", f'#line 1 "<{variant.title}>.entries"', "  }"]
    return lines


def _direction(variant: PointwiseKernel, loss: TangentLoss) -> list[str]:
    """Returns the functor of the derivative of `Base` along tangents, which are the last operands."""
    operands = [x.name for x in loss.operands]
    tangents = sum(1 << i for i, moves in enumerate(loss.has_tangent) if moves)
    counts = ["mask != 0"] if loss.mask else []
    counts += [{"array": "weight != 0", "number": "_base.weight_ != 0"}[loss.weight]] if loss.weight else []
    usual = "_base.usual()" if _tried_first(variant, loss.base or loss) else ""
    return [
        *loss_head(STORAGE[variant.compute][0], loss.heavy, usual),
        "  Base _base;",
        "",
        *call_signature(operands),
        f"    const bool _active = {' && '.join(counts) or 'true'};",
        f"    return ::jvp<{tangents}u>(_base, _active, {', '.join(operands)});",
        "  }",
        "};",
    ]


def _source_type(variant: PointwiseKernel, dtype: str, access: str) -> str:
    if access in STAGED:
        return f"StagedSource<{STORAGE[dtype][0]}, Along::{STAGED_ALONG[access]}>"
    if access in ALONG:
        return _tile_type(variant, "TileSource", dtype, access)
    return f"Source<{STORAGE[dtype][0]}, Access::{ACCESS[access]}>"


def _sink_type(variant: PointwiseKernel, dtype: str, stream: int) -> str:
    """Returns the type of the sink of a gradient or, for the last stream, of the values."""
    if variant.sinks and variant.sinks[stream] in STAGED:
        return f"StagedSink<{STORAGE[dtype][0]}>"
    if variant.tile:
        return _tile_type(variant, "TileSink", dtype, variant.sinks[stream])
    if variant.sinks and variant.sinks[stream] == "gather":
        return f"ScatteredSink<{STORAGE[dtype][0]}>"
    return f"Sink<{STORAGE[dtype][0]}>"


def _tile_type(variant: PointwiseKernel, kind: str, dtype: str, access: str) -> str:
    assert variant.tile is not None
    return f"{kind}<{STORAGE[dtype][0]}, Along::{ALONG[access]}, {variant.tile.a}, {variant.tile.b}>"


def _initializer(variant: PointwiseKernel, stream: int, access: str, dtype: str, pointer: str) -> str:
    """Returns the initializer of a source or sink, including its tile if it is staged."""
    if access not in STAGED:
        return f"{{{pointer}}}"
    bytes_of, place = variant.staged, 0
    owner = stream if stream in bytes_of else stream - len(variant.storage) - 1
    for i, x in bytes_of.items():
        if i == owner:
            break
        place += x
    return f"{{{pointer}, staged_tile<{STORAGE[dtype][0]}>({place}, {sum(bytes_of.values())})}}"


def _source_types(variant: PointwiseKernel) -> list[str]:
    return [_source_type(variant, d, a) for d, a in zip(variant.storage, variant.access[:-1], strict=True)]


def _sinks(variant: PointwiseKernel) -> tuple[list[str], list[str]]:
    """Returns the types of the sinks of gradients, and their initializers."""
    names = [x.name for x in variant.loss.operands]
    types, fields = ["Absent"] * len(names), ["{}"] * len(names)
    for i, (name, dtype) in enumerate(zip(names, variant.storage, strict=True)):
        if variant.stored[i]:
            access = variant.sinks[i] if variant.sinks else ""
            types[i] = _sink_type(variant, dtype, i)
            fields[i] = _initializer(variant, len(names) + 1 + i, access, dtype, f"{name}_gradients")
    partials = {"value_and_gradient": "used_grad_output", "elements_gradient": "partials"}.get(variant.kind)
    for i, kind, _ in variant.summed if partials else ():
        types[i] = f"SummedSink<{STORAGE[variant.storage[i]][0]}, SumOf::k{kind.capitalize()}>"
        fields[i] = f"{{{partials} + {names[i]}_sums}}"
    return types, fields


def _types(variant: PointwiseKernel) -> list[str]:
    element = "Absent"
    if variant.kind == "elements":
        element = _sink_type(variant, variant.result, len(variant.storage))
    elif variant.access[-1] != "none":
        element = _source_type(variant, variant.result, variant.access[-1])
    return [
        f"using Result = {STORAGE[variant.result][0]};",
        f"using Sources = Tuple<{', '.join(_source_types(variant))}>;",
        f"using Sinks = Tuple<{', '.join(_sinks(variant)[0])}>;",
        f"using Element = {element};",
    ]


def loss_argument(variant: PointwiseKernel) -> str:
    """Returns the functor, constructed from the parameters of an entry point."""
    parameters = f"{{{', '.join(f'{x.name}_' for x in variant.loss.parameters)}}}"
    return f"Loss{{Base{parameters}}}" if isinstance(variant.loss, TangentLoss) else f"Loss{parameters}"


def _sources_argument(variant: PointwiseKernel) -> str:
    sources = [
        f"{kind}{_initializer(variant, i, variant.access[i], variant.storage[i], f'{x.name}_')}"
        for i, (kind, x) in enumerate(zip(_source_types(variant), variant.loss.operands, strict=True))
    ]
    return f"make_tuple({', '.join(sources)})"


def _blocks_per_sm(variant: PointwiseKernel) -> int:
    """Returns the number of blocks per SM that a kernel is compiled for (``__launch_bounds__``).

    BLOCKS_PER_SM, the number that grids are sized for, if no register is spilled then (`scripts/compile_kernels.py`
    checks):

    - Forward kernels of a reduced loss whose operands have one width, with at most 8 elements of gradients at a time.
      In layouts that are not flat, where streams have offsets of their own, there are also at most 8 elements of
      operands at a time, and at most one operand is shifted. Heavy losses qualify only in float32 with a flat layout;
      the heaviest only if, in addition, no operand is one number for the whole vector: what depends on such an operand
      alone is kept in registers.
    - Two dense operands of 16 bits: the second gradient or a sum fits beside the first gradient.
    - Rows with two outer dimensions and one gradient; in float32, light losses with two. In double, a few losses spill
      up to 200 bytes this way, which costs less than giving up a block.
    - Gathered streams in float32, unless many elements are gathered.

    One block, for the kernels that take the most registers:

    - The heaviest losses in layouts that are not flat, with more than 8 elements of gradients at a time.
    - Tiles of the heaviest losses, or of heavy ones in double, with the gradients of two operands.
    - Still heavier losses in tiles, or with sums along columns beside another gradient.
    - Second derivatives of the heaviest losses in double, in tiles or with many gradients.

    BLOCKS_PER_SM_OTHERS for all other kernels, such as other tiles, other sums of gradients and other second
    derivatives.
    """
    if isinstance(variant.loss, TangentLoss):
        heaviest = variant.loss.heavy > 2 and variant.compute == "float64"
        return 1 if heaviest and (variant.layout in TILED or sum(variant.stored) > 2) else BLOCKS_PER_SM_OTHERS
    stored, tiled, wide = variant.vec_size * sum(variant.stored), variant.layout in TILED, variant.compute == "float64"
    most = 8 if not tiled else 16
    if tiled and wide:
        # Two gradients of tiles in shared memory spill up to 132 bytes with 128 registers.
        most = 1 if variant.staged else 4
    if variant.loss.heavy > (0 if tiled and wide else 1) and variant.layout != "flat" and stored > most:
        return 1
    if variant.loss.heavy > 2 and (tiled or (stored and any(kind == "column" for _, kind, _ in variant.summed))):
        return 1
    # Three operands of a heavy loss with a gradient in float32 spill 76 bytes with 128 registers.
    if (
        tiled
        and variant.loss.heavy
        and variant.kind == "value_and_gradient"
        and len(variant.storage) > 2
        and stored > 8
    ):
        return 1
    widths = {ITEMSIZE[x] for x in variant.storage}
    dense = variant.layout == "flat" and variant.kind in REDUCED and variant.compute == "float32"
    several = len(variant.storage) == 2 and (variant.summed or stored > 8) and "shifted" not in variant.access
    if dense and several and widths == {2} and stored <= 16 and variant.loss.heavy < 2:
        return BLOCKS_PER_SM
    # Sums of columns of two operands beside a gradient spill 272 bytes with 128 registers.
    if variant.kind == "elements_gradient" and len(variant.summed) > 1:
        return 1
    if variant.summed or tiled:
        return BLOCKS_PER_SM_OTHERS
    if variant.layout in GATHERED:
        places = (*variant.access, *variant.sinks).count("gather") * variant.vec_size
        # Three operands of a heavy loss, over four dimensions, spill 20 to 40 bytes with 80 registers.
        most = 5 if variant.layout == GATHERED[-1] and variant.kind == "value_and_gradient" else 7
        few = places <= (most if variant.loss.heavy else 8)
        return BLOCKS_PER_SM if few and variant.compute == "float32" else BLOCKS_PER_SM_OTHERS
    small = len(widths) == 1 and stored <= 8
    shifted = variant.access.count("shifted")
    simple = variant.layout == "flat" or (variant.vec_size * len(variant.storage) <= 8 and shifted < 2)
    if variant.loss.heavy:
        simple = variant.layout == "flat" and variant.compute == "float32"
    if variant.loss.heavy > 1:
        simple &= "splat" not in variant.access[:-1]
    if variant.layout == PLANES:
        simple = len(variant.storage) == 2 and not shifted and variant.loss.heavy < 2
        small = len(widths) == 1 and sum(variant.stored) <= (1 if variant.loss.heavy or wide else 2)
    return BLOCKS_PER_SM if variant.kind in REDUCED and small and simple else BLOCKS_PER_SM_OTHERS


def _rank(variant: PointwiseKernel) -> int:
    """Returns the number of outer dimensions that a kernel has room for."""
    return outer_rank(variant.layout, len(variant.loss.operands))


def _tile_shape(tile: Tile | None) -> str:
    return f", TileShape<{', '.join(map(str, astuple(tile)))}>" if tile else ""


def skeleton_call(kind: str, unroll: int, checks_apart: bool = False) -> tuple[str, str]:
    """Returns the initializer of a program's ``element``, and the call of the skeleton for a launch over all elements.

    A batch has ``unroll`` vectors per lane. If backward ``checks_apart``, in a kernel of its own, forward has no
    ``grad_output``.
    """
    grad_output = "static_cast<const Result*>(nullptr)" if checks_apart else "grad_output"
    element = {"elements": "Element{values}", "elements_gradient": "Element{grad_output}"}.get(kind, "Absent{}")
    function, arguments = {
        "value": ("reduce_value", "chunks, memory, divisor, scale, value"),
        "value_and_gradient": (
            "reduce_value_and_gradient",
            f"chunks, memory, divisor, scale, value, {grad_output}, expected_grad_output, used_grad_output",
        ),
        "verify_gradient": ("verify_gradient", "chunks, scale, grad_output, used_grad_output, expected_grad_output"),
        PRODUCT: ("write_gradients", "chunks, scale, grad_output"),
        "elements": ("map_elements", "chunks, scale"),
        "elements_gradient": ("map_elements", "chunks, scale"),
    }[kind]
    return element, f"{function}<{unroll}>(program, {arguments})"


def _pointwise_entry(variant: PointwiseKernel) -> str:
    operands = variant.loss.operands
    sinks = ", ".join(map("".join, zip(*_sinks(variant), strict=True)))
    if variant.layout == "flat":
        whole = ", true" * variant.whole_batches
        layout_type, layout_parameter = f"FlatLayout<{variant.vec_size}{whole}>", "int64 elements"
        layout_local = ["  const Layout layout{elements};"]
    else:
        rank = _rank(variant)
        streams = 2 * len(operands) + 1
        layout_type = f"StridedLayout<{variant.vec_size}, {streams}, {rank}>"
        if variant.layout == LINEAR:
            layout_type = f"LinearLayout<{streams}>"
        if variant.layout in TILED:
            layout_type = f"TiledLayout<{streams}, {rank}{_tile_shape(variant.tile)}>"
        if variant.layout in GATHERED:
            places = GATHERED.index(variant.layout) + 1
            long_rows = ", true" * variant.long_rows
            layout_type = f"GatheredLayout<{variant.vec_size}, {streams}, {places}{long_rows}>"
        if variant.layout in STRIPS:
            across, steps, ragged = variant.strip
            ends = ", true" * ragged
            layout_type = f"StripLayout<{variant.vec_size}, {across}, {steps}, {streams}, {rank}{ends}>"
        layout_parameter, layout_local = "const __grid_constant__ Layout layout", []
    steps = variant.tile.steps_a * variant.tile.steps_b if variant.tile else UNROLL[variant.vec_size]
    element, call = skeleton_call(variant.kind, variant.unroll or steps, bool(variant.summed))
    if variant.access[-1] in STAGED:
        element = f"Element{_initializer(variant, len(operands), variant.access[-1], variant.result, 'grad_output')}"
    if variant.kind == "elements" and variant.sinks:
        stream = 2 * len(operands) + 1
        element = f"Element{_initializer(variant, stream, variant.sinks[-1], variant.result, 'values')}"
    fixed, combined = ["int64 chunks", layout_parameter], list[str]()
    if variant.kind == "verify_gradient":
        parameters, combined = _combinations(variant, "used_grad_output", "scale * widen<double>(*grad_output)")
        fixed += parameters
    else:
        fixed += [f"int64 {operands[i].name}_sums" for i, _, _ in variant.summed]
    lines = [
        *_types(variant),
        f"using Layout = {layout_type};",
        "",
        f'extern "C" __global__ void __launch_bounds__({MAX_THREADS}, {_blocks_per_sm(variant)})',
        f"{variant.entry}({', '.join([*_varying_arguments(variant), *fixed])}) {{",
        *layout_local,
        *counted_divisor(variant.counted),
        f"  const Pointwise<Loss, Layout, {variant.vec_size}, Sources, Sinks, Element> program{{",
        f"      {loss_argument(variant)}, layout, {_sources_argument(variant)},",
        f"      make_tuple({sinks}), {element}}};",
        *combined,
        f"  {call};",
        "}",
    ]
    return "\n".join(lines) + "\n"


def _combinations(variant: PointwiseKernel, partials: str, factor: str) -> tuple[list[str], list[str]]:
    """Returns the fixed parameters and the statements that combine the partial sums of gradients."""
    parameters, statements = [], []
    for i, _, dimensions in variant.summed:
        name = variant.loss.operands[i].name
        combination = f"const __grid_constant__ Combination<{dimensions}> {name}_combination"
        parameters += [f"int64 {name}_sums", combination]
        statements += [
            f"  combine_sums({name}_combination, {partials} + {name}_sums, {name}_gradients,",
            f"               {factor});",
        ]
    return parameters, statements


def _combine_entry(variant: PointwiseKernel) -> str:
    parameters, statements = _combinations(variant, "partials", "scale")
    lines = [
        f"using Result = {STORAGE[variant.result][0]};",
        "",
        f'extern "C" __global__ void __launch_bounds__({MAX_THREADS})',
        f"{variant.entry}({', '.join([*_varying_arguments(variant), *parameters])}) {{",
        *counted_divisor(variant.counted, True),
        *statements,
        "}",
    ]
    return "\n".join(lines) + "\n"


def _sum_entry(variant: PointwiseKernel) -> str:
    of_values = variant.kind in SUMS_OF_VALUES
    slot = None if of_values else variant.gradients.index(True)
    storage = "Result" if slot is None else STORAGE[variant.storage[slot]][0]
    sums = "sums" if slot is None else f"{variant.loss.operands[slot].name}_gradients"
    per_element = variant.access[-1] != "none"
    rank = _rank(variant)
    reduced_rank = variant.outer
    ragged = "ragged" in variant.access
    streams = len(variant.loss.operands) + 2 + ragged
    fixed = [
        "int64 outputs",
        "int64 length",
        "int64 slices",
        "int64 slice_length",
        "int64 lanes",
        "int64 warps",
        f"const __grid_constant__ Dimensions<{streams}, {rank}> kept",
        f"const __grid_constant__ Dimensions<{streams}, {reduced_rank}> reduced",
        *[f"const __grid_constant__ Rows<{streams}, true> rows"] * ragged,
    ]
    term = "kValue" if slot is None else str(slot)
    factors = "divisor, 1.0" if of_values else "1.0, scale"
    types = f"Loss, Sources, Element, {term}, {rank}, {reduced_rank}, {variant.vec_size}{', true' * ragged}"
    # More warps hide more of the latency of vector loads. Columns, a grad_output or second derivatives would spill
    # registers.
    few_registers = ragged and not (variant.columns or per_element or isinstance(variant.loss, TangentLoss))
    blocks = BLOCKS_PER_SM if few_registers else BLOCKS_PER_SM_OTHERS
    rows = "rows" if ragged else f"Rows<{streams}, false>{{}}"
    columns = str(variant.columns).lower()
    mapping = f"<{columns}, {str(variant.shared).lower()}>"
    slices = f"sum_slices{mapping}(program, deposit, outputs, length, slices, slice_length, lanes, warps, partials)"
    combine = f"combine_slices<{columns}>(program, deposit, outputs, slices, partials)"
    call = combine if "combine" in variant.kind else slices
    lines = [
        *_types(variant),
        "",
        f'extern "C" __global__ void __launch_bounds__({MAX_THREADS}, {blocks})',
        f"{variant.entry}({', '.join([*_varying_arguments(variant), *fixed])}) {{",
        *counted_divisor(variant.counted, variant.kind not in ("value", *SUMS_OF_VALUES)),
        f"  const SumOver<{types}> program{{",
        f"      {loss_argument(variant)}, {_sources_argument(variant)},",
        f"      {'Element{grad_output}' if per_element else 'Element{}'}, kept, reduced, {rows}}};",
        f"  const Deposit<{storage}, Result> deposit{{",
        f"      {sums}, {'nullptr' if per_element or of_values else 'grad_output'}, {factors}}};",
        f"  {call};",
        "}",
    ]
    return "\n".join(lines) + "\n"

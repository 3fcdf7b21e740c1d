"""Generates the CUDA source of a box loss: the loss as a functor of the components of boxes, and the entry points.

The kernels are those of the pointwise engine (``kernels/pointwise/``), with elements of several components.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest

from cupylosses.definition.expressions import cuda, in_double, names_in
from cupylosses.engines.boxes.definition import BOX_FORMAT, COMPONENTS, FORMATS, BoxLoss
from cupylosses.engines.pointwise.codegen import ACCESS, OWN_ARGUMENTS, skeleton_call
from cupylosses.engines.pointwise.layout import (
    BLOCKS_PER_SM,
    BLOCKS_PER_SM_OTHERS,
    LINEAR,
    MAX_THREADS,
    TILED,
    max_rank,
    outer_rank,
)
from cupylosses.jit.glue import STORAGE, call_signature, choice_constant, counted_divisor, loss_head, written_at
from cupylosses.jit.kernel import Kernel
from cupylosses.jit.sources import FUNCTOR, nested

#: Entry points. The first two belong to a reduced loss, the last two to a broadcast operand.
KINDS = {
    "value": "the reduced value",
    "value_and_gradient": "the reduced value and the gradients for the expected grad_output, in backward the true one",
    "elements": "a value per box",
    "elements_gradient": "the gradients for a grad_output per box",
    "broadcast_gradient": "the gradient of one broadcast operand, or slices of it",
    "combine_slices": "the gradient of one broadcast operand from its slices",
}
SUMS = frozenset({"broadcast_gradient", "combine_slices"})

#: Vectors in a lane's batch. With few of them, warps have nearly equal numbers of batches even of millions of boxes.
#: Pairs of 16-bit boxes get more, because they are bound by instructions, some of which each batch costs.
UNROLL = 4
UNROLL_OF_PAIRS = 8
#: Second derivatives: threads of a block, and blocks per multiprocessor in dense layouts and in others. These leave 168
#: registers per thread, as four derivatives with their tangents need, or 255, as sums have, too.
SECOND_THREADS = 128
SECOND_BLOCKS = 3
SECOND_BLOCKS_OTHERS = 2


def unroll_of(vec_size: int) -> int:
    """Returns the number of vectors in a lane's batch, by the number of boxes of a vector."""
    return UNROLL_OF_PAIRS if vec_size == 2 else UNROLL


@dataclass(frozen=True)
class BoxKernel(Kernel):
    """A kernel of boxes. Equal instances have equal source.

    ``storage``, ``gradients`` and ``access`` have an entry for each operand, the weight, the mask, and the tangent of
    each array that has one (``has_tangent``). ``access`` has one more entry, for a grad_output per box (``"none"`` if
    there is none). With tangents, the loss is the derivative along them. ``apart`` is True for arrays whose gradients
    are written component by component. The other fields are those of a pointwise kernel.
    """

    loss: BoxLoss
    flags: tuple[int, ...]
    kind: str
    storage: tuple[str, ...]
    result: str
    weight: str
    mask: bool
    gradients: tuple[bool, ...]
    layout: str = "flat"
    vec_size: int = 1
    access: tuple[str, ...] = ()
    columns: bool = False
    compute: str = "float32"
    counted: bool = False
    outer: bool = False
    shared: bool = False
    has_tangent: tuple[bool, ...] = ()
    apart: tuple[bool, ...] = ()

    narrow = False

    @property
    def files(self) -> tuple[str, ...]:
        files = (*FUNCTOR, "pointwise/sum_over.cuh" if self.kind in SUMS else "pointwise/pointwise.cuh")
        return nested(files) if True in self.has_tangent else files

    @property
    def title(self) -> str:
        """Description of the kernel, for error messages and file names."""
        dtypes = "-".join(STORAGE[x][1] for x in self.storage)
        wanted = "".join("1" if x else "0" for x in self.gradients)
        parts = [self.loss.name, self.kind, dtypes, STORAGE[self.result][1], self.layout, f"x{self.vec_size}"]
        parts += ["-".join(self.access), f"grad{wanted}", f"flags{''.join(map(str, self.flags))}"]
        parts += [x for x in ("columns", "outer", "shared", "counted") if getattr(self, x)]
        parts += [f"tangent{''.join(str(int(x)) for x in self.has_tangent)}"] * (True in self.has_tangent)
        parts += ["apart" + "".join([str(int(x)) for x in self.apart])] * any(self.apart)
        return "_".join([*parts, *(["number"] if self.weight == "number" else []), f"in-{STORAGE[self.compute][1]}"])

    @property
    def entry(self) -> str:
        """Name of the kernel."""
        return f"{self.loss.name}_{self.kind}_{'_'.join(dict.fromkeys(STORAGE[x][1] for x in self.storage))}"

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the arrays."""
        return (*self.primals, *[x for x in self.tangents if x])

    @property
    def primals(self) -> tuple[str, ...]:
        """Names of the arrays without the tangents."""
        operands = tuple(x.name for x in self.loss.operands)
        return (*operands, *["weight"] * (self.weight == "array"), *["mask"] * self.mask)

    @property
    def tangents(self) -> tuple[str, ...]:
        """Name of the tangent of each of these arrays, or "". Names of operands have no two underscores in a row."""
        return tuple([f"{x}__tangent" if moves else "" for x, moves in zip(self.primals, self.has_tangent)])

    @property
    def numbers(self) -> tuple[str, ...]:
        """Names of the scalars."""
        return (*(x.name for x in self.loss.parameters), *["weight"] * (self.weight == "number"))

    @property
    def elements(self) -> list[str]:
        """CUDA type of an element of each array."""
        boxes = {x.name for x in self.loss.operands}
        boxes |= {tangent for name, tangent in zip(self.primals, self.tangents, strict=False) if name in boxes}
        scalars = zip(self.names, [STORAGE[x][0] for x in self.storage], strict=True)
        return [f"Components<{x}, {COMPONENTS}>" if name in boxes else x for name, x in scalars]

    @property
    def arguments(self) -> list[str]:
        # Pointers are to components, as in other engines, not to boxes.
        tensors = list(zip(self.names, self.storage, self.gradients, strict=True))
        return [
            *(f"const {STORAGE[dtype][0]}* {name}_" for name, dtype, _ in tensors),
            *(f"{STORAGE[dtype][0]}* {name}_gradients" for name, dtype, wanted in tensors if wanted),
            *OWN_ARGUMENTS[self.kind],
            *(f"double {x}_" for x in self.numbers),
            *(["double multiple", "const double* count"] if self.counted else ["double divisor", "double scale"]),
        ]

    @property
    def steps(self) -> list[str]:
        """Names of the component strides of the arrays whose boxes are read or written component by component."""
        read = [f"{n}_step" for n, x in zip(self.names, self.access, strict=False) if x == "scalars"]
        written = zip(self.names, self.gradients, self.apart, strict=False)
        return [*read, *(f"{name}_gradients_step" for name, wanted, apart in written if wanted and apart)]

    def glue(self) -> str:
        entry = _sum_entry(self) if self.kind in SUMS else _entry(self)
        return "\n".join([*_functor(self), *entry]) + "\n"


def _functor(kernel: BoxKernel) -> Iterator[str]:
    """Generates the loss as a functor of boxes (tuples of dual numbers), weight and mask."""
    loss, compute = kernel.loss, STORAGE[kernel.compute][0]
    usual = "true" if loss.tentative and kernel.compute == "float32" else ""
    if True not in kernel.has_tangent:
        yield from loss_head(compute, loss.heavy, usual)
        yield from _operator(kernel, compute)
        yield "};"
        return
    # ``Base`` is the loss itself, generic in its number type: it is evaluated on nested dual numbers.
    yield "struct Base {"
    yield from _operator(kernel, "_number")
    yield "};"
    yield ""
    yield from loss_head(compute, 3, usual)
    yield "  Base _base;"
    yield ""
    yield from call_signature(kernel.names)
    pairs = zip_longest(kernel.primals, kernel.tangents, fillvalue="")
    nested_arrays = [f"::nest({', '.join([x for x in pair if x])})" for pair in pairs]
    yield f"    return ::along_direction(_base({', '.join(nested_arrays)}));"
    yield "  }"
    yield "};"


def _operator(kernel: BoxKernel, compute: str) -> Iterator[str]:
    """Generates the members of the functor, and its operator, which computes with numbers of type ``compute``."""
    loss = kernel.loss
    used = names_in(" ".join([*loss.let.values(), loss.value]))
    yield from (f"  double {x}_;" for x in kernel.numbers)
    yield ""
    yield from call_signature(kernel.primals)
    if compute == "_number":
        yield f"    using _number = typename ::NumberOf<{kernel.primals[0]}_>::type;"
    for flag, index in zip(loss.flags, kernel.flags, strict=True):
        if flag.name in used:
            yield f"    constexpr {choice_constant(flag, index)};"
    for name in kernel.numbers:
        if name in used or name == "weight":
            yield f"    const auto {name} = ::constant<{compute}>({name}_);"
    for name, expression in loss.constants.items():
        if name in used:
            yield from written_at(loss, name)
            yield f"    const auto {name} = ::constant<{compute}>({in_double(expression)});"
    box_format = dict(zip(loss.flags, kernel.flags, strict=True))[BOX_FORMAT]
    for operand in loss.operands:
        for part, expression in FORMATS[BOX_FORMAT.choices[box_format]].items():
            if f"{operand.name}_{part}" in used:
                text = expression.format(*[f"::get<{i}>({operand.name})" for i in range(COMPONENTS)])
                yield f"    const auto {operand.name}_{part} = {text};"
    for name, expression in loss.let.items():
        yield from written_at(loss, name)
        yield f"    const auto {name} = {cuda(expression)};"
    yield from written_at(loss, "value")
    yield f"    const auto unweighted = ::lift<{compute}>({cuda(loss.value)});"
    result = "::weighted(weight, unweighted)" if kernel.weight else "unweighted"
    yield f"    return {f'::where(mask != 0, {result}, 0)' if kernel.mask else result};"
    yield f'#line 1 "<{kernel.title}>.entries"'
    yield "  }"


def _sources(kernel: BoxKernel) -> list[str]:
    accesses = zip(kernel.elements, kernel.access[:-1], strict=True)
    return [f"Source<{element}, Access::{ACCESS[access]}>" for element, access in accesses]


def _made_sources(kernel: BoxKernel) -> str:
    pointers = [
        f"{t}{{reinterpret_cast<const {e}*>({n}_){f', {n}_step' if access == 'scalars' else ''}}}"
        for t, e, n, access in zip(_sources(kernel), kernel.elements, kernel.names, kernel.access[:-1], strict=True)
    ]
    return f"make_tuple({', '.join(pointers)})"


def _element(kernel: BoxKernel) -> str:
    """Returns the type of the array with one number per box besides the operands: the values, or grad_output."""
    result = STORAGE[kernel.result][0]
    if kernel.kind == "elements":
        return f"Sink<{result}>"
    return "Absent" if kernel.access[-1] == "none" else f"Source<{result}, Access::{ACCESS[kernel.access[-1]]}>"


def _types(kernel: BoxKernel) -> Iterator[str]:
    yield f"using Result = {STORAGE[kernel.result][0]};"
    yield f"using Sources = Tuple<{', '.join(_sources(kernel))}>;"
    yield f"using Element = {_element(kernel)};"


def _loss(kernel: BoxKernel) -> str:
    numbers = ", ".join(f"{x}_" for x in kernel.numbers)
    return f"Loss{{Base{{{numbers}}}}}" if True in kernel.has_tangent else f"Loss{{{numbers}}}"


def _steps(kernel: BoxKernel) -> list[str]:
    return [f"int64 {x}" for x in kernel.steps]


def _sink(element: str, name: str, apart: bool) -> tuple[str, str]:
    """Returns the type of a sink of boxes, and its initializer."""
    pointer = f"reinterpret_cast<{element}*>({name}_gradients)"
    if apart:
        return f"ScalarSink<{element}>", f"{{{pointer}, {name}_gradients_step}}"
    return f"Sink<{element}>", f"{{{pointer}}}"


def _entry(kernel: BoxKernel) -> Iterator[str]:
    sinks = [
        _sink(element, name, apart) if wanted else ("Absent", "{}")
        for name, element, wanted, apart in zip(
            kernel.names, kernel.elements, kernel.gradients, kernel.apart, strict=True
        )
    ]
    streams = 2 * len(kernel.names) + 1
    if kernel.layout == "flat":
        layout, parameter = f"FlatLayout<{kernel.vec_size}>", "int64 elements"
        local = ["  const Layout layout{elements};"]
    else:
        rank = outer_rank(kernel.layout, len(kernel.names))
        layout = f"StridedLayout<{kernel.vec_size}, {streams}, {rank}>"
        if kernel.layout == LINEAR:
            layout = f"LinearLayout<{streams}>"
        if kernel.layout in TILED:
            layout = f"TiledLayout<{streams}, {rank}>"
        parameter, local = "const __grid_constant__ Layout layout", []
    element, call = skeleton_call(kernel.kind, unroll_of(kernel.vec_size))
    yield from _types(kernel)
    yield f"using Sinks = Tuple<{', '.join(t for t, _ in sinks)}>;"
    yield f"using Layout = {layout};"
    yield ""
    # 128 registers per thread, for the eight derivatives of each intermediate result. With dense operands and boxes
    # given by corners, four derivatives take 80 registers or fewer, so that a third block fits.
    few = kernel.layout == "flat" and kernel.compute == "float32"
    threads, blocks = MAX_THREADS, BLOCKS_PER_SM if few else BLOCKS_PER_SM_OTHERS
    if True in kernel.has_tangent:
        threads, blocks = SECOND_THREADS, SECOND_BLOCKS if kernel.layout == "flat" else SECOND_BLOCKS_OTHERS
    yield f'extern "C" __global__ void __launch_bounds__({threads}, {blocks})'
    yield f"{kernel.entry}({', '.join([*kernel.arguments, *_steps(kernel), 'int64 chunks', parameter])}) {{"
    yield from local
    yield from counted_divisor(kernel.counted, kernel.kind != "value")
    yield f"  const Pointwise<Loss, Layout, {kernel.vec_size}, Sources, Sinks, Element> program{{"
    yield f"      {_loss(kernel)}, layout, {_made_sources(kernel)},"
    yield f"      make_tuple({', '.join(t + made for t, made in sinks)}), {element}}};"
    yield f"  {call};"
    yield "}"


def _sum_entry(kernel: BoxKernel) -> Iterator[str]:
    slot, arrays = kernel.gradients.index(True), len(kernel.names)
    streams = arrays + 2 + (slot < len(kernel.loss.operands))
    most = max_rank(arrays)
    rank, reduced_rank = 1 if kernel.layout == "matrix" else most, most if kernel.outer else 1
    per_element = kernel.access[-1] != "none"
    fixed = [f"int64 {x}" for x in ("outputs", "length", "slices", "slice_length", "lanes", "warps")]
    fixed += [
        f"const __grid_constant__ Dimensions<{streams}, {rank}> kept",
        f"const __grid_constant__ Dimensions<{streams}, {reduced_rank}> reduced",
    ]
    columns = str(kernel.columns).lower()
    mapping = f"<{columns}, {str(kernel.shared).lower()}>"
    slices = f"sum_slices{mapping}(program, deposit, outputs, length, slices, slice_length, lanes, warps, partials)"
    yield from _types(kernel)
    yield ""
    blocks = 1 if True in kernel.has_tangent else BLOCKS_PER_SM_OTHERS
    yield f'extern "C" __global__ void __launch_bounds__({MAX_THREADS}, {blocks})'
    yield f"{kernel.entry}({', '.join([*kernel.arguments, *_steps(kernel), *fixed])}) {{"
    yield from counted_divisor(kernel.counted)
    yield f"  const SumOver<Loss, Sources, Element, {slot}, {rank}, {reduced_rank}, {kernel.vec_size}> program{{"
    yield f"      {_loss(kernel)}, {_made_sources(kernel)},"
    element = "Element{grad_output}" if per_element else "Element{}"
    yield f"      {element}, kept, reduced, Rows<{streams}, false>{{}}}};"
    yield f"  const Deposit<{STORAGE[kernel.storage[slot]][0]}, Result> deposit{{"
    yield f"      {kernel.names[slot]}_gradients, {'nullptr' if per_element else 'grad_output'}, 1.0, scale}};"
    combine = f"combine_slices<{columns}>(program, deposit, outputs, slices, partials)"
    yield f"  {combine if kernel.kind == 'combine_slices' else slices};"
    yield "}"

"""Kernels of losses of rows, taken from plans."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from itertools import product
from types import MappingProxyType
from typing import Any, ClassVar

from cupylosses import checks, interop
from cupylosses.call import Call
from cupylosses.engines.base import Machine, Plan, TensorSpec, contiguous
from cupylosses.engines.softmax import codegen as softmax_codegen
from cupylosses.engines.softmax import layout as softmax_layout
from cupylosses.engines.softmax.call import Static
from cupylosses.engines.softmax.codegen import SoftmaxKernel
from cupylosses.engines.softmax.definition import SoftmaxLoss
from cupylosses.engines.softmax.plan import rows_of, without
from cupylosses.jit.gpu import Chip
from tools.gate_subsets import BROADEST, cover, one_of_each
from tools.variants import Compiled, Variants

#: Logits for each row layout: shape, strides if not contiguous, class dimension. The first of each kind is contiguous.
_SHAPES: Sequence[tuple[tuple[int, ...], tuple[int, ...] | None, int]] = (
    ((4096, 1000), None, 1),
    ((4096, 4000), None, 1),  # prefetched
    ((4096, 32000), None, 1),  # in parts, without gradients
    ((16384, 1000), None, 1),  # in registers, without gradients
    ((16384, 4000), None, 1),
    ((4096, 10), None, 1),
    ((64, 8000), None, 1),
    ((64, 128256), None, 1),
    ((4096, 1000000), None, 1),
    ((8, 19, 64, 64), None, 1),
    ((16384, 10), None, 1),
    ((8, 5, 64, 64), None, 1),
    ((8, 300, 64, 64), None, 1),  # shared by warps
    ((4, 32000, 32, 32), None, 1),  # too long for shared memory
    ((16, 64, 1000), (100 * 1024, 1024, 1), 2),  # dimensions that do not merge
    ((8, 19, 65, 67), None, 1),  # interleaved
    ((8, 300, 65, 67), None, 1),  # shared by warps, staggered
    ((16384, 10), (16, 1), 1),  # with small gaps, and padding
    ((4096, 1000), (1001, 1), 1),  # shifted
    ((8, 19, 64, 63), None, 1),
    ((8, 19, 64, 64), (19 * 80 * 64, 80 * 64, 80, 1), 1),
    ((4096, 1000), (2000, 2), 1),  # gathered
    ((16384, 2), (3, 1), 1),
    ((16384, 31), (62, 2), 1),
)

#: A GPU with every feature that kernels can use, and one with none of them.
_CHIPS = (Chip(227 << 10, clusters=True), Chip())

#: The shapes of the fast subset.
_FEW = 18


class SoftmaxVariants(Variants):
    """Kernels for each entry point, layout, dtype and choice of options of a loss of rows.

    Kernels that hold a row in registers run out of them, or are bounded by the threads of a block; the table shows
    their spills, and benchmarks their cost.
    """

    Definition: ClassVar = SoftmaxLoss
    spills = float("inf")

    def kernels(self, fast: bool = False) -> list[SoftmaxKernel]:
        found: dict[SoftmaxKernel, None] = {}

        def note(variant: SoftmaxKernel, *_: Any) -> Any:
            found[variant] = None

        loss, shapes = self.loss, _SHAPES[:_FEW] if fast else _SHAPES
        for dtype, (shape, strides, dim) in product(("float32", "bfloat16") if fast else checks.FLOATING, shapes):
            logits = _tensor(dtype, shape, strides)
            if loss.row:
                for (label, options), chip in product(_options(loss, fast), _CHIPS[: 1 if fast else 2]):
                    _of_indices(loss, logits, dim, label, options, chip, note)
            if loss.term and not _copied_with_targets(logits, dim):
                for chip in _CHIPS[: 1 if fast else 2]:
                    _of_terms(loss, logits, dim, fast, chip, note)
        return list(found)

    def broad(self, architecture: str, whole: bool = True) -> list[SoftmaxKernel]:
        """Returns each kernel in each layout for BROADEST, and forward with gradients for others."""
        usual = self.kernels(fast=True)
        forward = [x for x in usual if x.kind == "value_and_gradient"]
        if architecture == BROADEST:
            each = [
                *one_of_each(usual, "__class__", "kind", "layout"),
                *one_of_each(forward, "__class__", "layout", "input"),
            ]
            # Some layouts occur only with wide dtypes.
            known = {(x.kind, x.layout) for x in each}
            each += [x for x in one_of_each(self.kernels(), "kind", "layout") if (x.kind, x.layout) not in known]
            return list(dict.fromkeys(each))
        return one_of_each(forward, "__class__", "layout")

    @classmethod
    def newest(
        cls, losses: Sequence[SoftmaxLoss], whole: Collection[Any], broadest: str, others: Iterator[str]
    ) -> Iterator[Compiled]:
        """Yields each kernel, layout and option; forward with gradients also for the others in turn."""
        kernels = cls.fast(losses)
        for variant in cover(kernels, structure):
            yield variant, broadest
        forward = [x for x in kernels if x.kind == "value_and_gradient" and x.input == "bfloat16"]
        for variant in cover(forward, row_layout):
            yield variant, next(others)

    @classmethod
    def older(
        cls, losses: Sequence[SoftmaxLoss], whole: Collection[Any], broadest: str, others: Iterator[str]
    ) -> Iterator[Compiled]:
        """Yields each layout and option."""
        kernels = cls.fast(losses)
        yield from (
            (x, broadest) for x in cover([x for x in kernels if x.kind == "value_and_gradient"], compiled_options)
        )
        yield from ((x, broadest) for x in cover([x for x in kernels if x.kind == "hvp"], entry_point))

    @staticmethod
    def wide_accesses(variant: SoftmaxKernel) -> tuple[int, int]:
        """Returns the wide loads and stores of a kernel that moves neighbouring classes, or rows."""
        size = interop.ITEMSIZE[variant.input]
        if variant.kind == "denominator" or variant.layout in ("label_only", "interleaved_rows"):
            return 0, 0
        # Logits that are laid out otherwise than their gradients, or of which one per row is read, are moved one by
        # one.
        alone = variant.gathered or (variant.shifted and size >= 4) or variant.layout.startswith("label_only")
        words = variant.vec_size * size // 16 * (not alone)
        written = variant.vec_size * interop.ITEMSIZE[variant.in_place or variant.input] // 16
        return words, written * (variant.kind in ("value_and_gradient", "verify_gradient", "from_residual", "gradient"))

    @staticmethod
    def described(variant: SoftmaxKernel) -> Mapping[str, str]:
        target, wanted = variant.target, (*variant.gradients, False)[:2]
        flags = [x.name for x, on in zip(variant.loss.flags, variant.flags, strict=False) if on]
        flags += ["smoothed"] * variant.smoothed + ["prefetch"] * variant.prefetch + ["shifted"] * variant.shifted
        flags += ["gathered"] * variant.gathered + ["without the value"] * (not variant.valued)
        flags += ["counts its rows"] * variant.self_counting + ["tallies"] * variant.tallies
        flags += [f"cluster of {variant.cluster}"] if variant.cluster > 1 else []
        flags += ["plain"] * variant.plain + ["staggered"] * variant.staggered
        flags += [f"limit {variant.limit}"] if variant.limit else []
        flags += [f"{variant.per_thread} per thread"] if variant.per_thread else []
        flags += [f"{variant.warps} warps"] if variant.warps > 1 else []
        flags += [f"{variant.lanes} lanes"] if variant.lanes else []
        flags += [f"{variant.edges} edges"] if variant.edges else []
        flags += [f"step {variant.step}"] if variant.step else []
        dtypes = [variant.input, target, variant.weight and f"weight:{variant.weight}", variant.mask and "mask"]
        names = [x.name for x, on in zip(variant.loss.operands, wanted, strict=True) if on]
        return {
            "dtypes": " ".join(x for x in dtypes if x),
            "layout": f"{variant.layout}, rank {variant.rank}" if variant.rank > 1 else variant.layout,
            "access": "",
            "gradients": " ".join(names),
            "flags": " ".join([*flags, *["capped"] * variant.capped]),
        }


def _tensor(dtype: str, shape: Sequence[int], strides: Sequence[int] | None = None) -> TensorSpec:
    return TensorSpec(dtype, tuple(shape), tuple(strides)) if strides else contiguous(dtype, shape)


def _options(loss: SoftmaxLoss, fast: bool) -> Iterator[tuple[str, tuple[bool, bool, bool, bool]]]:
    """Yields dtypes of labels, and the presence of class weights, a mask, smoothing and a softcap."""
    every = (loss.weights is not None, True, any(x.name == "label_smoothing" for x in loss.parameters))
    capped = loss.scale == "logit_scale"
    yield "int64", (False, False, False, False)
    yield "int64", (*every, capped)
    if not fast:
        for label in checks.INTEGER:
            yield label, (False, False, False, False)
        for i, on in enumerate((*every, capped)):
            if on:
                yield "int64", (i == 0, i == 1, i == 2, i == 3)


def _plan(
    loss: SoftmaxLoss,
    operands: Sequence[TensorSpec],
    dim: int,
    options: tuple[bool, bool, bool, bool],
    machine: Machine,
    flags: tuple[int, ...] = (),
    has_tangent: tuple[bool, ...] = (),
    reduction: str = "mean",
    case: Mapping[str, Any] = MappingProxyType({}),
) -> Plan:
    """Returns the plan of a call, or of its derivative along tangents if some operands are ``has_tangent``.

    ``case`` has parameters by name.
    """
    weighted, masked, smoothed, capped = options
    logits, target = operands
    kind = "indices" if target.dtype in checks.INTEGER else str(loss.dense)
    static = Static(
        kind=kind,
        weighted=weighted,
        masked=masked,
        class_dim=dim,
        ignore_index=-100,
        reduction="none" if has_tangent else reduction,
        out_dtype="float64" if has_tangent else None,
        flags=flags,
        smoothed=smoothed,
        plain=loss.has_plain(kind) and not (capped or any(case.get(x) for x in loss.left_out[kind])),
        limit=loss.limit(kind, {x.name: case.get(x.name, x.default) for x in loss.parameters}),
        capped=capped,
        lse=False,
        accuracy=False,
        inplace=False,
        check="off",
        has_tangent=has_tangent,
    )
    rows = (*logits.shape[:dim], *logits.shape[dim + 1 :])
    others = [_tensor(logits.dtype, logits.shape[dim : dim + 1])] if weighted else []
    others += [_tensor("bool", rows)] if masked else []
    tangents = [x for x, moves in zip(operands, has_tangent, strict=False) if moves]
    call = Call(loss, (), static)
    return loss.engine.plan(call, (*operands, *others, *tangents), logits.dtype, machine)


def _copied_with_targets(logits: TensorSpec, dim: int) -> bool:
    """True if plans of dense targets are those of copies of both operands."""
    rows = [rows_of(logits.strides, dim, interop.ITEMSIZE[logits.dtype], 0)] * 4
    return softmax_layout.copied(without(logits.shape, dim), logits.shape[dim], rows, 2, True)


#: Kernel of the check in backward, which a plan requests if it has one.
CHECK = "verify_gradient"


def _launch(plan: Plan, stage: str, wanted: Sequence[bool], counted: bool) -> None:
    of_arrays = *wanted, *plan.nothing[len(wanted) :]
    plan.launcher(stage, of_arrays, counted)
    if stage == "value_and_gradient":
        plan.check(of_arrays, counted)


def _of_indices(
    loss: SoftmaxLoss,
    logits: TensorSpec,
    dim: int,
    label: str,
    options: tuple[bool, bool, bool, bool],
    chip: Chip,
    note: Any,
) -> None:
    machine = Machine(1, chip, note)
    rows = (*logits.shape[:dim], *logits.shape[dim + 1 :])
    operands = logits, _tensor(label, rows)
    plan = _plan(loss, operands, dim, options, machine)
    _launch(_plan(loss, operands, dim, options, machine, has_tangent=(True,)), "hvp", (True,), False)
    _launch(plan, "value", (False,), True)
    _launch(plan, "value_and_gradient", (True,), True)
    _launch(plan, "unreduced", (False,), False)
    _launch(plan, "denominator", (False,), False)
    _launch(plan, "from_residual", (True,), True)
    total = _plan(loss, operands, dim, options, machine, reduction="sum")
    _launch(total, "from_residual", (True,), False)
    if options == (False, False, False, False):
        _launch(total, "value_and_gradient", (True,), False)
        if logits.shape[0] > 64 and logits == contiguous(logits.dtype, logits.shape):
            operands = [contiguous(x.dtype, (64, *x.shape[1:])) for x in operands]
        for stage in sorted(softmax_codegen.TALLYING_STAGES - {CHECK}) if plan.tallies else ():
            _launch(plan, stage, (stage != "value",), False)
        few = _plan(loss, operands, dim, options, machine)
        for stage in sorted(softmax_codegen.SELF_COUNTING_STAGES - {CHECK}) if few.self_counting else ():
            _launch(few, stage, (stage != "value",), False)


def _cases_of_terms(loss: SoftmaxLoss) -> list[Mapping[str, Any]]:
    """Returns a case of the loss for each expression of its term. With a cap, which it may have, no term is plain."""
    if loss.scale == "logit_scale":
        return [{}]
    kind, found = str(loss.dense), dict[tuple[bool, int], Mapping[str, Any]]()
    for case in loss.cases:
        values = {x.name: case.get(x.name, x.default) for x in loss.parameters}
        found.setdefault((any(values[x] for x in loss.left_out[kind]), loss.limit(kind, values)), case)
    return list(found.values())


def _of_terms(loss: SoftmaxLoss, logits: TensorSpec, dim: int, fast: bool, chip: Chip, note: Any) -> None:
    machine = Machine(1, chip, note)
    flags = list(dict.fromkeys(loss.choose(loss.values(case)) for case in loss.cases))
    weighted = loss.weights is not None and "probabilities" in loss.targets
    for setting, every, case in product(flags, (False, True), _cases_of_terms(loss)):
        options = (weighted and every, every, False, every and loss.scale == "logit_scale")
        plan = _plan(loss, (logits, logits), dim, options, machine, setting, case=case)
        choices = [(True, False), (True, True)][: 1 if fast else 2]
        for wanted in choices:
            moved = _plan(loss, (logits, logits), dim, options, machine, setting, wanted, case=case)
            _launch(moved, "hvp", wanted, False)
            if not every:
                _launch(moved, "product", wanted, False)
            _launch(plan, "gradient", wanted, False)
            _launch(plan, "value_and_gradient", wanted, every)
        _launch(plan, "value", (False, False), every)
        _launch(plan, "unreduced", (False, False), False)
        if every:
            _launch(plan, "denominator", (False, False), False)


# ----------------------------------------------------------------------------------------------------------------------
# Subsets


def row_layout(variant: SoftmaxKernel) -> Iterator[Hashable]:
    """Traits: class indices or dense targets, and the row layout."""
    yield variant.indices, variant.layout


def kernel_and_layout(variant: SoftmaxKernel) -> Iterator[Hashable]:
    """Traits: the entry point in its row layout.

    Kernels of unreduced values have no trait per layout, since their code is a part of another kernel in each layout.
    """
    yield variant.indices, variant.kind
    if variant.kind != "unreduced":
        yield variant.indices, variant.kind, variant.layout


def entry_point(variant: SoftmaxKernel) -> Iterator[Hashable]:
    """Traits: the entry point of a kernel of rows."""
    yield variant.indices, variant.kind


def compiled_options(variant: SoftmaxKernel) -> Iterator[Hashable]:
    """Traits: parts of the row engine with their compiled-in options."""
    yield from row_layout(variant)
    for name in ("input", "cluster", "prefetch", "shifted", "staggered", "step", "capped", "smoothed"):
        if hasattr(variant, name):
            yield variant.indices, name, getattr(variant, name)
    if not variant.indices and variant.kind == "value_and_gradient":
        yield variant.loss.name, variant.plain, variant.limit, variant.input


def structure(variant: SoftmaxKernel) -> Iterator[Hashable]:
    """Traits of a kernel of rows that do not depend on its formula, and each formula."""
    yield from kernel_and_layout(variant)
    yield from compiled_options(variant)
    yield variant.loss.name, variant.indices, variant.kind == "hvp"
    yield from (
        (variant.indices, x, bool(getattr(variant, x))) for x in ("weight", "mask", "counted", "tallies", "valued")
    )

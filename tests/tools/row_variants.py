"""Kernels of losses of rows for the compile gate, taken from plans; :mod:`tools.variants` has those of element-wise
losses.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

from cupylosses import checks
from cupylosses.engines.softmax.codegen import ROW_KINDS, RowVariant
from cupylosses.engines.softmax.definition import RowLoss
from cupylosses.engines.softmax.dense_codegen import TERM_KINDS, TermVariant
from cupylosses.engines.softmax.dense_plan import TermPlan
from cupylosses.engines.softmax.plan import RowPlan, RowTensor
from cupylosses.engines.strides import dense_strides
from cupylosses.jit.gpu import Chip

AnyRowVariant = RowVariant | TermVariant

#: Logits for each row layout: shape, strides if not contiguous, class dimension. The first of each kind is contiguous.
_SHAPES: Sequence[tuple[tuple[int, ...], tuple[int, ...] | None, int]] = (
    ((4096, 1000), None, 1),
    ((4096, 4000), None, 1),  # prefetched
    ((4096, 32000), None, 1),  # in parts, without gradients
    ((4096, 10), None, 1),
    ((64, 8000), None, 1),
    ((64, 128256), None, 1),
    ((4096, 1000000), None, 1),
    ((8, 19, 64, 64), None, 1),
    ((4096, 1000), (1001, 1), 1),  # without vectors
    ((16, 64, 1000), (100 * 1024, 1024, 1), 2),  # dimensions that do not merge
    ((8, 19, 64, 63), None, 1),
    ((8, 19, 64, 64), (19 * 80 * 64, 80 * 64, 80, 1), 1),
)

#: A GPU with everything that kernels can use, and one with nothing of it.
_CHIPS = (Chip(227 << 10, clusters=True), Chip())

#: The shapes of the fast subset.
_FEW = 8


def row_variants(loss: RowLoss, fast: bool = False) -> list[AnyRowVariant]:
    """The kernels behind a loss of rows: each entry point, layout, dtype and choice of options.

    ``fast`` keeps two dtypes of logits and contiguous ones.
    """
    found: dict[AnyRowVariant, None] = {}

    def note(variant: AnyRowVariant, *_: Any) -> Any:
        found[variant] = None

    shapes = _SHAPES[:_FEW] if fast else _SHAPES
    for dtype, (shape, strides, dim) in product(("float32", "bfloat16") if fast else checks.FLOATING, shapes):
        logits = _tensor(dtype, shape, strides)
        if loss.row:
            for (label, options), chip in product(_options(loss, fast), _CHIPS[: 1 if fast else 2]):
                _of_indices(loss, logits, dim, label, options, chip, note)
        if loss.term:
            for chip in _CHIPS[: 1 if fast else 2]:
                _of_terms(loss, logits, dim, fast, chip, note)
    return list(found)


def _tensor(dtype: str, shape: Sequence[int], strides: Sequence[int] | None = None) -> RowTensor:
    return RowTensor(dtype, tuple(shape), tuple(strides or dense_strides(shape, (0,) * len(shape))))


def _options(loss: RowLoss, fast: bool) -> Iterator[tuple[str, tuple[bool, bool, bool, bool]]]:
    """Dtypes of labels, and the presence of class weights, a mask, smoothing and a softcap."""
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


def _of_indices(
    loss: RowLoss,
    logits: RowTensor,
    dim: int,
    label: str,
    options: tuple[bool, bool, bool, bool],
    chip: Chip,
    note: Any,
) -> None:
    weighted, masked, smoothed, capped = options
    rows = (*logits.shape[:dim], *logits.shape[dim + 1 :])
    given = (
        loss, logits, _tensor(label, rows), _tensor(logits.dtype, logits.shape[dim : dim + 1]) if weighted else None,
        _tensor("bool", rows) if masked else None, dim, logits.dtype,
    )  # fmt: skip
    plan = RowPlan(*given, None, smoothed, capped, 1, note, chip)
    RowPlan(*given, "float64", smoothed, capped, 1, note, chip, logits)._load("second", False)
    for kind in (x for x in ROW_KINDS if x != "second"):
        for counted in {"values": (False,), "count": (False,), "apply": (False, True)}.get(kind, (True,)):
            plan._load(kind, counted)
    if options == (False, False, False, False):
        plan._load("value_and_gradient", False)


def _of_terms(loss: RowLoss, logits: RowTensor, dim: int, fast: bool, chip: Chip, note: Any) -> None:
    flags = list(dict.fromkeys(loss.choose(loss.values(case)) for case in loss.cases))
    weighted = loss.weights is not None and "probabilities" in loss.targets
    for setting, every in product(flags, (False, True)):
        rows = (*logits.shape[:dim], *logits.shape[dim + 1 :])
        given = (
            loss, setting, (logits, logits), _tensor(logits.dtype, logits.shape[dim : dim + 1])
            if weighted and every else None, _tensor("bool", rows) if every else None, dim, logits.dtype,
        )  # fmt: skip
        capped = every and loss.scale == "logit_scale"
        plan = TermPlan(*given, None, capped, 1, note, chip)
        for wanted in [(True, False), (True, True)][: 1 if fast else 2]:
            TermPlan(*given, "float64", capped, 1, note, chip, True)._load("second", wanted, False)
        for kind in TERM_KINDS:
            if kind == "second" or (kind == "count" and not every):
                continue
            written = "gradient" in kind
            for wanted in [(True, False), (True, True)][: 1 if fast else 2] if written else [(False, False)]:
                plan._load(kind, wanted, every and kind not in ("values", "count", "gradient"))


def spills_allowed(variant: Any) -> float:
    """The bytes of registers that a kernel may spill. Kernels that hold a row in registers run out of them, or are
    bounded by the threads of a block; the table shows their spills, and benchmarks their cost.
    """
    return float("inf") if isinstance(variant, (RowVariant, TermVariant)) else 0


def described(variant: AnyRowVariant) -> dict[str, str]:
    """Traits of a variant for a column of the gate's table beyond its name."""
    if isinstance(variant, TermVariant):
        target, wanted = variant.target, variant.gradients
        flags = [x.name for x, on in zip(variant.loss.flags, variant.flags, strict=True) if on]
    else:
        target, wanted = (
            variant.label,
            (variant.kind in ("value_and_gradient", "verify_gradient", "apply", "second"), False),
        )
        flags = ["smoothed"] * variant.smoothed + ["ahead"] * variant.ahead
    flags += [f"cluster of {variant.cluster}"] if variant.cluster > 1 else []
    dtypes = [variant.input, target, variant.weight and f"weight:{variant.weight}", variant.mask and "mask"]
    names = [x.name for x, on in zip(variant.loss.operands, wanted, strict=True) if on]
    return {
        "dtypes": " ".join(x for x in dtypes if x),
        "layout": f"{variant.layout}, many dimensions" if variant.many else variant.layout,
        "gradients": " ".join(names),
        "flags": " ".join([*flags, *["capped"] * variant.capped]),
    }

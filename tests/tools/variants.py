"""Every kernel that calls of a loss can reach, found by rehearsing the calls (`cupylosses.engines.record`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

from cupylosses import checks, interop
from cupylosses.call import Call
from cupylosses.engines.pointwise.codegen import PointwiseKernel
from cupylosses.engines.pointwise.definition import Loss, modified
from cupylosses.engines.pointwise.reduction import Static
from cupylosses.engines.record import KernelRecorder, Placeholder, placeholder
from tools.nvrtc import Resources
from tools.row_variants import SoftmaxKernel, spills_allowed

#: Every kind of layout occurs only with this many elements in both directions.
ROWS, COLUMNS = 4096, 4096


def variants(loss: Loss, fast: bool = False) -> list[PointwiseKernel]:
    """The kernels behind a loss: each setting of its flags, dtype, layout, reduction and choice of gradients.

    ``fast`` keeps two dtypes, all gradients together, and the common layouts.
    """
    recorder = KernelRecorder()
    for flags, dtypes in product(flag_settings(loss), dtype_settings(loss, fast)):
        for tensors in layout_settings(dtypes, fast):
            _call(recorder, loss, flags, tensors, fast)
        _call_forms(recorder, loss, flags, tuple(placeholder(x, (ROWS, COLUMNS)) for x in dtypes), fast)
    return list(recorder.kernels)


def flag_settings(loss: Loss) -> list[tuple[int, ...]]:
    """The settings of the flags that the cases of the definition contain."""
    return list(dict.fromkeys(loss.choose(loss.values(case)) for case in loss.cases))


def dtype_settings(loss: Loss, fast: bool) -> Iterator[tuple[str, ...]]:
    """Operands of one dtype, of mixed floating dtypes, and integers where the definition takes them."""
    count = len(loss.operands)
    for dtype in ("float32", "bfloat16") if fast else checks.FLOATING:
        yield (dtype,) * count
    if not fast:
        yield ("float32", *("bfloat16",) * (count - 1))
        for dtype in checks.INTEGER:
            mixed = ("float32", *(dtype if x.integer else "float32" for x in loss.operands[1:]))
            if dtype in mixed:
                yield mixed


def layout_settings(dtypes: Sequence[str], fast: bool) -> Iterator[tuple[Placeholder, ...]]:
    """Contiguous operands; each broadcast along rows, along columns, to all; misaligned; and permuted."""
    contiguous = tuple(placeholder(x, (ROWS, COLUMNS)) for x in dtypes)
    yield contiguous
    for i, dtype in enumerate(dtypes):
        for shape in [(COLUMNS,)] if fast else [(COLUMNS,), (ROWS, 1), ()]:
            yield (*contiguous[:i], placeholder(dtype, shape), *contiguous[i + 1 :])
    if fast:
        return
    first, *others = contiguous
    itemsize = interop.ITEMSIZE[first.dtype]
    yield Placeholder(first.dtype, first.shape, first.strides, itemsize % 16), *others
    yield Placeholder(first.dtype, first.shape, first.strides[::-1], 0), *others
    for step in (COLUMNS + 1, 2 * COLUMNS):  # Rows of a larger matrix, odd and even: without and with vectors.
        yield Placeholder(first.dtype, first.shape, (step, 1), 0), *others
    yield tuple(Placeholder(x, (16, 32, 64), (1, 16 * 65, 16), 0) for x in dtypes)
    for step in (64 + 1, 64 + 16):  # No two dimensions merge, again without and with vectors.
        yield tuple(Placeholder(x, (16, 32, 64), (33 * step, step, 1), 0) for x in dtypes)


def _call(
    recorder: KernelRecorder, loss: Loss, flags: tuple[int, ...], tensors: tuple[Placeholder, ...], fast: bool
) -> None:
    """Forward and backward of one call, reduced and unreduced, for each choice of gradients."""
    floating = [x.dtype in checks.FLOATING for x in tensors]
    choices = [c for c in product(*((False, True) if x else (False,) for x in floating)) if any(c)]
    for kind in ("mean", "none"):
        _rehearse(recorder, loss, flags, tensors, Static(kind), choices[-1:] if fast else choices)


def _rehearse(
    recorder: KernelRecorder,
    loss: Loss,
    flags: tuple[int, ...],
    tensors: tuple[Placeholder, ...],
    how: Static,
    choices: Sequence[tuple[bool, ...]],
) -> None:
    parameters = tuple(x.default for x in loss.parameters)
    recorder.call(Call(loss, tensors, how._replace(flags=flags), parameters), choices)


def _call_forms(
    recorder: KernelRecorder, loss: Loss, flags: tuple[int, ...], tensors: tuple[Placeholder, ...], fast: bool
) -> None:
    """Kernels for a weight, a mask, numbers and dimensions, for contiguous operands of one dtype."""
    dtype = tensors[0].dtype
    every = tuple(x.dtype in checks.FLOATING for x in tensors)
    row, full = placeholder(dtype, (COLUMNS,)), placeholder("bool", (ROWS, COLUMNS))
    both = modified(loss, weight="array", mask=True)
    _rehearse(recorder, both, flags, (*tensors, row, full), Static("mean"), [(*every, False, False)])
    for dim in (0, 1):
        _rehearse(recorder, loss, flags, tensors, Static("mean", (dim,)), [every])
    numbers = frozenset(x.name for x in loss.operands if x.number or x.default is not None)
    if numbers:
        arrays = [x.name not in numbers for x in loss.operands]
        chosen = [tuple(v for v, a in zip(values, arrays, strict=True) if a) for values in (tensors, every)]
        _rehearse(recorder, modified(loss, numbers), flags, chosen[0], Static("mean"), [chosen[1]])
    if fast:
        return
    apart = [Placeholder(x.dtype, (64, 64, 16), (65 * 17, 17, 1), 0) for x in tensors]  # No two dimensions merge.
    _rehearse(recorder, loss, flags, tuple(apart), Static("mean", (0, 1)), [every])
    for weight, mask, kind in (("array", False, "mean"), ("array", True, "weighted_mean"), ("number", True, "mean")):
        added = [row] * (weight == "array") + [full] * mask
        wanted = (*every, *(x.dtype in checks.FLOATING for x in added))
        _rehearse(recorder, modified(loss, weight=weight, mask=mask), flags, (*tensors, *added), Static(kind), [wanted])


def complaints(variant: PointwiseKernel | SoftmaxKernel, found: Resources, spills: int = 0) -> tuple[str, ...]:
    """Defects of a compiled kernel: warnings, spills beyond the allowed bytes, and narrow accesses to contiguous
    operands.
    """
    wrong = list(found.warnings)
    if found.entries != (variant.entry,):
        wrong.append(f"the entry points are {found.entries}, expected {variant.entry}")
    if found.spills > max(spills, spills_allowed(variant)):
        wrong.append(f"{found.spills} bytes of registers spilled")
    loads, stores = wide_accesses(variant)
    if found.wide_loads < loads:
        wrong.append(f"{found.wide_loads} 16-byte loads in the kernel, expected at least {loads}")
    if found.wide_stores < stores:
        wrong.append(f"{found.wide_stores} 16-byte stores in the kernel, expected at least {stores}")
    return tuple(wrong)


def wide_accesses(variant: PointwiseKernel | SoftmaxKernel) -> tuple[int, int]:
    """The minimum of 16-byte loads and stores that one vector of a contiguous variant takes."""

    def words(dtype: str) -> int:
        return variant.vec_size * interop.ITEMSIZE[dtype] // 16

    if not isinstance(variant, PointwiseKernel):
        return _wide_accesses_of_rows(variant)
    if variant.layout != "flat":
        return 0, 0
    read = [*variant.storage, variant.result]
    loads = sum(words(x) for x, access in zip(read, variant.access, strict=True) if access not in ("splat", "none"))
    stores = sum(words(x) for x, wanted in zip(variant.storage, variant.gradients, strict=True) if wanted)
    return loads, stores + (words(variant.result) if variant.kind == "elements" else 0)


def _wide_accesses_of_rows(variant: SoftmaxKernel) -> tuple[int, int]:
    """The minimum of 16-byte loads and stores of a kernel that moves neighbouring classes, or rows."""
    words = variant.vec_size * interop.ITEMSIZE[variant.input] // 16
    if variant.kind == "denominator" or variant.layout == "label_only":
        return 0, 0
    return words, words * (variant.kind in ("value_and_gradient", "verify_gradient", "from_residual", "gradient"))

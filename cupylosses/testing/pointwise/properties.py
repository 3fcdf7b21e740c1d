"""Properties of element-wise losses, re-exported by :mod:`cupylosses.testing.properties`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any

from cupylosses.definition.base import REDUCTIONS
from cupylosses.engines.pointwise import reference as pointwise_reference
from cupylosses.engines.pointwise.definition import Loss, modified
from cupylosses.testing import samples
from cupylosses.testing.check import bind, run
from cupylosses.testing.layouts import LAYOUTS
from cupylosses.testing.pointwise import eager
from cupylosses.testing.pointwise.check import SMALL, PointwiseCheck
from cupylosses.testing.pointwise.truth import truth
from cupylosses.testing.tolerance import Expected, compare, equal_bits, require, same_bits

if TYPE_CHECKING:
    from torch import Tensor

Function = Callable[..., "Tensor"]

ROWS, COLUMNS = SMALL


def _bind(function: Function, loss: Loss, case: Mapping[str, Any], reduction: str) -> Function:
    return bind(function, loss, loss.values(case), reduction)


def _draw(
    loss: Loss, case: Mapping[str, Any], dtype: str, device: str, shapes: Sequence[Sequence[int]] | None = None
) -> list[Tensor]:
    count = len(loss.operands)
    shapes = [(ROWS, COLUMNS)] * count if shapes is None else shapes
    dtypes = PointwiseCheck(loss, dtypes=(dtype,)).operand_dtypes
    return samples.operands(loss, loss.values(case), dtypes, shapes, device)


# ----------------------------------------------------------------------------------------------------------------------
# Values and gradients


def agrees_with_torch(
    function: Function,
    loss: Loss,
    case: Mapping[str, Any] | None = None,
    dtype: str = "float32",
    reduction: str = "mean",
    device: str = "cpu",
) -> None:
    """Value and gradients match torch's function in float64, where torch has gradients and they are not NaN.

    This check is independent of the definition's own formula.
    """
    case = case or {}
    twin = eager.twin(loss, case, reduction)
    if twin is None:
        return
    operands = _draw(loss, case, dtype, device)
    wide = [x.cpu().double() for x in operands]
    wanted = tuple(_has_gradient(twin, wide, i) for i in range(len(wide)))
    require(wanted[0], "torch's twin has no gradient")
    theirs = run(twin, wide, wanted, 1.0)
    sizes = truth(loss, wide, loss.values(case), reduction)
    ours = run(_bind(function, loss, case, reduction), operands, wanted, 1.0)
    _require_close("value", ours.value, theirs.value, sizes.value)
    for operand, w, gradient, exact, size in zip(
        loss.operands, wanted, ours.gradients, theirs.gradients, sizes.gradients, strict=True
    ):
        if w:
            _require_close(f"gradient of {operand.name}", gradient, exact, size)


def _has_gradient(function: Function, operands: Sequence[Tensor], position: int) -> bool:
    try:
        run(function, operands, [i == position for i in range(len(operands))], 1.0)
    except RuntimeError:
        return False
    return True


def _require_close(name: str, ours: Tensor | None, exact: Tensor | None, size: Expected | None) -> None:
    require(ours is not None and exact is not None and size is not None, f"{name} is missing")
    # If torch's formula is 0 * inf, only the truth is right.
    numbers = ~exact.isnan()
    compared = compare(ours.cpu()[numbers], Expected(exact[numbers], size.rms[numbers], size.total[numbers]))
    require(compared.ok, f"{name}: {compared}")


def follows_declared_kinks(
    function: Function, loss: Loss, case: Mapping[str, Any] | None = None, dtype: str = "float32", device: str = "cpu"
) -> None:
    """At each declared kink, every kernel returns the declared value and gradients.

    Kinks are declared at numbers that every dtype represents. Gradients must be exact, and so must a value of 0; any
    other value may be rounded.
    """
    import torch

    case = case or {}
    kind = getattr(torch, dtype)
    for kink, reduction in product(loss.kinks(**loss.values(case)), ("none", "sum")):
        # A single element runs the tail of a kernel; more than a vector also run its body.
        for count in (1, 33):
            operands = [torch.full((count,), x, dtype=kind, device=device) for x in kink.operands]
            result = run(_bind(function, loss, case, reduction), operands, (True,) * len(operands), 1.0)
            scale = count if reduction == "sum" else 1
            where = f"at {kink.operands}, reduction {reduction}"
            error = (result.value.double() - kink.value * scale).abs()
            accepted = error <= 4 * torch.finfo(kind).eps * abs(kink.value * scale)
            require(bool(accepted.all()), "value {}: {}, not {}", where, result.value, kink.value)
            for operand, gradient, declared in zip(loss.operands, result.gradients, kink.gradient, strict=True):
                require(
                    gradient is not None and bool((gradient == declared).all()),
                    "gradient of {} {}: {}, not {}",
                    operand.name,
                    where,
                    gradient,
                    declared,
                )


def propagates_nan(
    function: Function,
    loss: Loss,
    case: Mapping[str, Any] | None = None,
    dtype: str = "float32",
    device: str = "cpu",
    layouts: Sequence[str] = ("contiguous", "row"),
    reductions: Sequence[str] = REDUCTIONS,
) -> None:
    """A NaN in any operand makes exactly its own elements NaN, in value and all gradients, broadcast or not."""
    import torch

    case = case or {}
    for layout, position, reduction in product(layouts, range(len(loss.operands)), reductions):
        operands = _draw(loss, case, dtype, device, LAYOUTS[layout].shapes_of(loss, (ROWS, COLUMNS)))
        spoiled = operands[position]
        at = [min(i, n - 1) for i, n in zip((ROWS // 2, COLUMNS - 1)[-spoiled.dim() :], spoiled.shape, strict=True)]
        spoiled[tuple(at)] = float("nan")
        only = spoiled.isnan().expand(ROWS, COLUMNS)
        result = run(_bind(function, loss, case, reduction), operands, (True,) * len(operands), 1.0)
        where = f"with a NaN in {loss.operands[position].name}, {layout}, reduction {reduction}"
        elements = only.any(-1) if loss.mean_of_rows else only
        expected = elements if reduction == "none" else torch.tensor(True, device=device)
        require(torch.equal(result.value.isnan(), expected), "value {}: {}", where, result.value)
        for operand, x, gradient in zip(loss.operands, operands, result.gradients, strict=True):
            # The gradient of a broadcast operand is a sum, which is NaN if one of its terms is.
            reached = only.double().sum_to_size(x.shape) > 0
            require(
                gradient is not None and torch.equal(gradient.isnan(), reached),
                "gradient of {} {}: {}",
                operand.name,
                where,
                gradient,
            )


def reads_beyond_32_bits(
    function: Function, loss: Loss, case: Mapping[str, Any] | None = None, device: str = "cpu"
) -> None:
    """Elements 2^32 apart are read at their full 64-bit offsets.

    Uses 4 GiB of address space, of which only two pages are touched on the CPU. Proves nothing for a loss without an
    integer operand, since other dtypes are wider.
    """
    import torch

    case = case or {}
    count = len(loss.operands)
    position = next((i for i, x in enumerate(loss.operands) if i and x.integer), 0)
    if position == 0:
        return
    step = (1 << 32) + COLUMNS
    # The other operands are full, or broadcast with gradients that are sums. There is one outer dimension, or two that
    # do not merge.
    layouts = (((2, COLUMNS), (step, 1)), ((2, 3, COLUMNS), (step, 2 * COLUMNS, 1)))
    for (full, strides), (lead, reduction) in product(layouts, ((0, "none"), (1, "sum"))):
        shapes = [full if i == position else full[lead:] for i in range(count)]
        dtypes = ["int8" if i == position else "float32" for i in range(count)]
        near = samples.operands(loss, loss.values(case), dtypes, shapes, device)
        memory = torch.empty(step + 6 * COLUMNS, dtype=torch.int8, device=device)
        memory[: 6 * COLUMNS] = 0
        far = list(near)
        far[position] = memory.as_strided(full, strides).copy_(near[position])
        wanted = tuple(i != position for i in range(len(near)))
        a, b = (run(_bind(function, loss, case, reduction), operands, wanted, 1.5) for operands in (near, far))
        # The order in which elements are summed depends on their strides.
        close = partial(torch.allclose, rtol=1e-5, atol=1e-5)
        same: Callable[..., bool] = equal_bits if reduction == "none" else close
        require(same(a.value, b.value), f"value, reduction {reduction}: {b.value}, not {a.value}")
        for operand, w, x, y in zip(loss.operands, wanted, a.gradients, b.gradients, strict=True):
            require(not w or same(x, y), f"gradient of {operand.name}, reduction {reduction}: {y}, not {x}")


# ----------------------------------------------------------------------------------------------------------------------
# Gradients


def is_differentiable(
    function: Function,
    loss: Loss,
    case: Mapping[str, Any] | None = None,
    reduction: str = "mean",
    device: str = "cpu",
    second: bool = False,
) -> None:
    """In float64 and away from kinks, gradients match finite differences, also for broadcast operands.

    With ``second``, second derivatives match finite differences of the gradients.
    """
    import torch

    case = case or {}
    check = torch.autograd.gradgradcheck if second else torch.autograd.gradcheck
    for shapes in ([(3, 2)] * len(loss.operands), [(3, 2), *[(1, 2)] * (len(loss.operands) - 1)]):
        operands = [x.requires_grad_() for x in _draw(loss, case, "float64", device, shapes)]
        # Finite differences are accurate to about 1e-9, but torch's default tolerances would accept an error of 1e-3.
        # Second derivatives are checked along random directions, which takes half the time of all entries. Undefined
        # gradients are not checked: they would need more kernels, and nothing in a loss depends on them.
        bound, tolerances = _bind(function, loss, case, reduction), {"rtol": 1e-5, "atol": 1e-6}
        check(bound, operands, **tolerances, fast_mode=second, check_undefined_grad=False)


# ----------------------------------------------------------------------------------------------------------------------
# Reductions and bits


def reduces_consistently(
    function: Function, loss: Loss, case: Mapping[str, Any] | None = None, dtype: str = "float32", device: str = "cpu"
) -> None:
    """The sum is that of the elements, and each mean is the sum divided by its count; so are the gradients."""
    import torch

    case = case or {}
    operands = _draw(loss, case, dtype, device)
    everything = (True,) * len(operands)
    results = {r: run(_bind(function, loss, case, r), operands, everything, 1.0) for r in loss.reductions}
    values = {r: x.value.double() for r, x in results.items()}
    info = torch.finfo(getattr(torch, dtype))
    size = float(values["none"].abs().sum())
    count = values["none"].numel()
    divisors = {"sum": 1, "mean": count, "weighted_mean": count, "batchmean": ROWS}
    for reduction in loss.reductions[1:]:
        divisor = divisors[reduction]
        difference = abs(float(values[reduction] * divisor - values["none"].sum()))
        require(
            difference <= 4 * info.eps * size, f"{reduction}: {values[reduction]}, not the elements' sum / {divisor}"
        )
        for operand, one, reduced in zip(
            loss.operands, results["none"].gradients, results[reduction].gradients, strict=True
        ):
            require(one is not None and reduced is not None, f"no gradient of {operand.name}")
            error = (reduced.double() * divisor - one.double()).abs()
            # The division may make a float16 number subnormal, which rounds it.
            bound = 4 * info.eps * one.double().abs() + divisor * info.tiny * info.eps
            require(
                bool((error <= bound).all()), f"gradient of {operand.name}, {reduction}: not that of none / {divisor}"
            )


def composed(
    elements: Tensor,
    loss: Loss,
    reduction: str,
    weight: Tensor | float | None = None,
    mask: Tensor | None = None,
    normalizer: Tensor | float | None = None,
    dim: tuple[int, ...] | None = None,
) -> Tensor:
    """Computes a reduction by torch's operations on the elements of a loss."""
    import torch

    counted = torch.as_tensor(1.0 if weight is None else weight, dtype=elements.dtype, device=elements.device)
    used = torch.ones_like(elements, dtype=torch.bool) if mask is None else mask
    elements, counted, used = torch.broadcast_tensors(elements, counted, used)
    terms, weights = torch.where(used, counted * elements, 0.0), torch.where(used, counted, 0.0)
    divisor = 1.0
    if loss.mean_of_rows and dim is None and reduction in ("none", "sum", "batchmean"):
        # The elements of this loss are means of rows.
        divisor = 1.0 if reduction == "none" else terms.shape[-1]
        reduction, dim = ("mean", (-1,)) if reduction == "none" else (reduction, None)
    if reduction == "none":
        return terms
    dims = tuple(range(terms.dim())) if dim is None else dim
    total = terms.sum(dims) / divisor
    if reduction == "sum":
        return total
    if normalizer is not None:
        return total / normalizer
    if reduction == "batchmean":
        return total / terms.shape[0]
    by_weight = reduction == "weighted_mean" or (loss.mean_of_weights and weight is not None)
    count = weights.sum(dims) if by_weight else used.double().sum(dims)
    # A mean over no elements is NaN, and has no gradient.
    return torch.where(count == 0, float("nan"), total / torch.where(count == 0, 1.0, count))


def weighs_masks_and_reduces(
    function: Function,
    loss: Loss,
    case: Mapping[str, Any] | None = None,
    reduction: str = "mean",
    device: str = "cpu",
    dim: tuple[int, ...] | None = None,
    normalizer: float | None = None,
) -> None:
    """With a weight per column and a mask, value and gradients match torch's operations on the formula."""
    import torch

    values = loss.values(case)
    both, operands = _weighted_and_masked(loss, values, "float64", device)
    wanted = (True,) * (len(operands) - 1) + (False,)

    def exact(*tensors: Tensor) -> Tensor:
        *inputs, weight, mask = tensors
        return composed(
            pointwise_reference.elements(loss, inputs, values), loss, reduction, weight, mask, normalizer, dim
        )

    size = exact(*operands).shape
    # At least 1/4: a gradient times 0 proves nothing.
    upstream = torch.linspace(0.25, 2.0, size.numel(), dtype=torch.float64).reshape(size)
    expected = run(exact, [x.cpu() for x in operands], wanted, upstream)
    options = values | ({} if normalizer is None else {"normalizer": normalizer})
    result = run(bind(function, both, options, reduction, dim), operands, wanted, upstream.to(device))
    names = ["value", *(f"gradient of {x.name}" for x in both.operands[:-1])]
    for name, a, b in zip(
        names, (result.value, *result.gradients), (expected.value, *expected.gradients), strict=False
    ):
        torch.testing.assert_close(
            a.cpu(),
            b,
            rtol=1e-9,
            atol=1e-11,
            equal_nan=True,
            msg=lambda text, name=name: f"{name}, reduction {reduction}: {text}",
        )


def shields_what_does_not_count(
    function: Function,
    loss: Loss,
    case: Mapping[str, Any] | None = None,
    reduction: str = "mean",
    device: str = "cpu",
) -> None:
    """An element that is masked or has weight 0 changes no bit of value and gradients, whatever it holds.

    Its own gradients are 0. If no element counts, all gradients are 0.
    """
    import torch

    values = loss.values(case)
    both, operands = _weighted_and_masked(loss, values, "float64", device)
    *inputs, weight, mask = operands
    wanted = (True,) * (len(operands) - 1) + (False,)
    bound = bind(function, both, values, reduction)
    unused = (weight == 0) | ~mask
    clean = run(bound, operands, wanted, -1.75)
    for content in (float("nan"), float("inf"), -float("inf")):
        where = f"{content} where nothing counts, reduction {reduction}"
        spoiled = [torch.where(unused, content, x) for x in inputs]
        result = run(bound, [*spoiled, weight, mask], wanted, -1.75)
        require(same_bits(result.value, clean.value), f"value with {where}: {result.value}, not {clean.value}")
        if reduction == "none":
            empty = result.value[unused.all(-1) if loss.mean_of_rows else unused]
            require(not empty.any(), f"value with {where}: {empty}")
        for operand, a, b in zip(both.operands, result.gradients, clean.gradients, strict=True):
            if a is None or b is None or operand.name == "weight":
                continue
            require(same_bits(a, b), f"gradient of {operand.name} with {where}: {a}, not {b}")
            require(not a[unused].any(), f"gradient of {operand.name} with {where}: {a[unused]}")
        a, b = result.gradients[len(inputs)], clean.gradients[len(inputs)]
        require(a is not None and b is not None, "no gradient of weight")
        # An element of weight 0 still contributes to the gradient of its weight, if it is finite.
        kept = weight != 0
        require(same_bits(a[kept], b[kept]), f"gradient of weight with {where}: {a[kept]}, not {b[kept]}")
        require(bool(a.isfinite().all()), f"gradient of weight with {where}: {a}")
    spoiled = [torch.full_like(x, float("nan")) for x in inputs]
    for operand, a in zip(both.operands, run(bound, [*spoiled, weight, mask & False], wanted, -1.75).gradients):
        require(a is None or not a.any(), f"gradient of {operand.name} where nothing counts: {a}")


def _weighted_and_masked(loss: Loss, values: Mapping[str, Any], dtype: str, device: str) -> tuple[Loss, list[Tensor]]:
    """Returns a loss with a weight per column and a mask, and its operands; some weights and masks are 0."""
    both, count = modified(loss, weight="array", mask=True), len(loss.operands)
    shapes = [*[(ROWS, COLUMNS)] * count, (COLUMNS,), (ROWS, COLUMNS)]
    operands = _draw(both, values, dtype, device, shapes)
    operands[count][::4] = 0
    return both, operands

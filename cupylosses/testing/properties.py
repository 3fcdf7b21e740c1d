"""What every loss must satisfy, one property per function, which raises AssertionError where it does not hold.

Each takes the function under test beside the definition that it is held against, so that functions that are wrong on
purpose can be shown to fail; a property that no wrong function violates would prove nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

from cupylosses.definition import Loss
from cupylosses.testing import eager, samples
from cupylosses.testing.check import Check, Result, perform, run
from cupylosses.testing.layouts import LAYOUTS
from cupylosses.testing.tolerance import Comparison, Expected, compare, same_bits
from cupylosses.testing.truth import flushes, truth

if TYPE_CHECKING:
    from torch import Tensor

Function = Callable[..., "Tensor"]

#: Rows and columns of small operands: different, and both powers of two, so that a division by them is exact.
ROWS, COLUMNS = 8, 16


def require(condition: bool, message: str) -> None:
    """Raises AssertionError with the message, also under ``python -O``."""
    if not condition:
        raise AssertionError(message)


@dataclass(frozen=True)
class Trial(Check):
    """A check of any function that claims to be the loss."""

    function: Function | None = None

    def ours(self) -> Function:
        """The function under test with the parameters and the reduction."""
        if self.function is None:
            return super().ours()
        return _bind(self.function, self.case, self.reduction)


def _bind(function: Function, case: Mapping[str, Any], reduction: str) -> Function:
    return lambda *operands: function(*operands, reduction=reduction, **case)


def _draw(
    loss: Loss, case: Mapping[str, Any], dtype: str, device: str, shapes: Sequence[Sequence[int]] | None = None
) -> list[Tensor]:
    count = len(loss.operands)
    shapes = [(ROWS, COLUMNS)] * count if shapes is None else shapes
    return samples.operands(loss, loss.values(case), (dtype,) * count, shapes, device)


def _require_close(what: str, found: Comparison) -> None:
    require(found.ok, f"{what}: {found}")


# ----------------------------------------------------------------------------------------------------------------------
# Values and gradients


def agrees_with_truth(function: Function, loss: Loss, **setting: Any) -> None:
    """Value, gradients, shapes, dtypes and devices are those of the float64 truth; settings are the fields of Check."""
    outcome = perform(Trial(loss, function=function, **setting))
    require(outcome.ok, "\n".join(outcome.problems))


def agrees_with_torch(
    function: Function,
    loss: Loss,
    case: Mapping[str, Any] | None = None,
    dtype: str = "float32",
    reduction: str = "mean",
    device: str = "cpu",
) -> None:
    """Value and gradients are those of torch's twin in float64. Independent of the definition's own formula."""
    case = case or {}
    twin = eager.twin(loss, case, reduction)
    if twin is None:
        return
    operands = _draw(loss, case, dtype, device)
    everything = (True,) * len(operands)
    wide = [x.cpu().double() for x in operands]
    theirs = run(twin, wide, everything, 1.0)
    sizes = truth(loss, wide, loss.values(case), reduction)
    ours = run(_bind(function, case, reduction), operands, everything, 1.0)
    _require_close("value", _held_against(ours.value, theirs.value, sizes.value))
    for operand, found, exact, size in zip(
        loss.operands, ours.gradients, theirs.gradients, sizes.gradients, strict=True
    ):
        _require_close(f"gradient of {operand.name}", _held_against(found, exact, size))


def _held_against(found: Tensor | None, exact: Tensor | None, size: Expected | None) -> Comparison:
    if found is None or exact is None or size is None:
        raise AssertionError("a gradient is missing")
    return compare(found.cpu(), Expected(exact, size.rms, size.total))


def follows_declared_kinks(
    function: Function, loss: Loss, case: Mapping[str, Any] | None = None, dtype: str = "float32", device: str = "cpu"
) -> None:
    """At each declared kink, value and gradients are the declared ones, exactly, by every kernel that computes them.

    Kinks are declared at numbers that every dtype holds.
    """
    import torch

    case = case or {}
    kind = getattr(torch, dtype)
    for kink, reduction in product(loss.kinks(**loss.values(case)), ("none", "sum")):
        # One element is a kernel's tail; more than a vector reaches its body.
        for count in (1, 33):
            operands = [torch.full((count,), x, dtype=kind, device=device) for x in kink.operands]
            found = run(_bind(function, case, reduction), operands, (True,) * len(operands), 1.0)
            scale = count if reduction == "sum" else 1
            where = f"at {kink.operands}, reduction {reduction}"
            require(bool((found.value == kink.value * scale).all()), f"value {where}: {found.value}, not {kink.value}")
            for operand, gradient, declared in zip(loss.operands, found.gradients, kink.gradient, strict=True):
                require(
                    gradient is not None and bool((gradient == declared).all()),
                    f"gradient of {operand.name} {where}: {gradient}, not {declared}",
                )


def propagates_nan(
    function: Function, loss: Loss, case: Mapping[str, Any] | None = None, dtype: str = "float32", device: str = "cpu"
) -> None:
    """A NaN in any operand makes its element NaN, in value and all gradients, and no other element."""
    import torch

    case = case or {}
    for position, reduction in product(range(len(loss.operands)), loss.reductions):
        operands = _draw(loss, case, dtype, device)
        at = (ROWS // 2, COLUMNS - 1)
        operands[position][at] = float("nan")
        only = torch.zeros(ROWS, COLUMNS, dtype=torch.bool, device=device)
        only[at] = True
        found = run(_bind(function, case, reduction), operands, (True,) * len(operands), 1.0)
        where = f"with a NaN in {loss.operands[position].name}, reduction {reduction}"
        expected = only if reduction == "none" else torch.tensor(True, device=device)
        require(torch.equal(found.value.isnan(), expected), f"value {where}: {found.value}")
        for operand, gradient in zip(loss.operands, found.gradients, strict=True):
            require(
                gradient is not None and torch.equal(gradient.isnan(), only),
                f"gradient of {operand.name} {where}: {gradient}",
            )


# ----------------------------------------------------------------------------------------------------------------------
# Gradients


def upstream_gradients(x: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Upstream gradients for values like ``x``, two-dimensional, in every kind of storage."""
    import torch

    generator = torch.Generator().manual_seed(7)

    def draw(*shape: int) -> Tensor:
        # No smaller than 1/4: a gradient times 0 says nothing.
        return (torch.rand(shape, generator=generator) * 2 + 0.25).to(x.device, x.dtype)

    rows, columns = x.shape
    yield "contiguous", draw(rows, columns)
    yield "transposed", draw(columns, rows).T
    yield "sliced", draw(rows + 2, columns + 2)[1:-1, 1:-1]
    yield "strided", draw(rows, 2 * columns)[:, ::2]
    yield "misaligned", draw(rows * columns + 1)[1:].view(rows, columns)
    yield "expanded along rows", draw(columns).expand(rows, columns)
    yield "expanded along columns", draw(rows, 1).expand(rows, columns)
    yield "one number for all", draw(1, 1).expand(rows, columns)


def reads_any_upstream_gradient(
    function: Function,
    loss: Loss,
    case: Mapping[str, Any] | None = None,
    dtype: str = "float32",
    layout: str = "contiguous",
    device: str = "cpu",
) -> None:
    """With reduction "none" the upstream gradient may be stored in any way: what counts is its elements."""
    case = case or {}
    shapes = LAYOUTS[layout].shapes((ROWS, COLUMNS), len(loss.operands))
    operands = LAYOUTS[layout].place(_draw(loss, case, dtype, device, shapes))
    everything = (True,) * len(operands)
    bound = _bind(function, case, "none")
    host = [x.cpu() for x in operands]
    for name, grad_output in upstream_gradients(bound(*operands)):
        found = run(bound, operands, everything, grad_output)
        expected = truth(loss, host, loss.values(case), "none", grad_output.cpu(), flush=flushes(operands))
        for operand, gradient, exact in zip(loss.operands, found.gradients, expected.gradients, strict=True):
            require(gradient is not None and exact is not None, f"no gradient of {operand.name}")
            _require_close(f"gradient of {operand.name}, grad_output {name}", compare(gradient.cpu(), exact))


def differentiates_operands_alone_and_together(
    function: Function,
    loss: Loss,
    case: Mapping[str, Any] | None = None,
    dtype: str = "float32",
    reduction: str = "mean",
    layout: str = "contiguous",
    device: str = "cpu",
) -> None:
    """Whichever operands require grad, value and gradients have the same bits."""
    case = case or {}
    shapes = LAYOUTS[layout].shapes((ROWS, COLUMNS), len(loss.operands))
    operands = LAYOUTS[layout].place(_draw(loss, case, dtype, device, shapes))
    bound = _bind(function, case, reduction)
    together = run(bound, operands, (True,) * len(operands), -1.5)
    for wanted in product((False, True), repeat=len(operands)):
        found = run(bound, operands, wanted, -1.5)
        names = "+".join(x.name for x, w in zip(loss.operands, wanted, strict=True) if w) or "none"
        require(same_bits(found.value, together.value), f"value with gradients of {names} has other bits")
        for operand, w, a, b in zip(loss.operands, wanted, found.gradients, together.gradients, strict=True):
            if w:
                require(
                    a is not None and b is not None and same_bits(a, b),
                    f"gradient of {operand.name} among gradients of {names} has other bits than among all",
                )


def is_differentiable(
    function: Function,
    loss: Loss,
    case: Mapping[str, Any] | None = None,
    reduction: str = "mean",
    device: str = "cpu",
    second: bool = False,
) -> None:
    """In float64 and away from kinks the gradient is the slope of the value, or the second derivative that of the
    gradient; also where an operand is broadcast."""
    import torch

    case = case or {}
    check = torch.autograd.gradgradcheck if second else torch.autograd.gradcheck
    for shapes in ([(3, 2)] * len(loss.operands), [(3, 2), *[(2,)] * (len(loss.operands) - 1)]):
        operands = [x.requires_grad_() for x in _draw(loss, case, "float64", device, shapes)]
        # The differences are good to about 1e-9: torch's defaults would let an error of 1e-3 pass.
        check(_bind(function, case, reduction), operands, rtol=1e-5, atol=1e-6)


# ----------------------------------------------------------------------------------------------------------------------
# Reductions and bits


def reduces_consistently(
    function: Function, loss: Loss, case: Mapping[str, Any] | None = None, dtype: str = "float32", device: str = "cpu"
) -> None:
    """The sum is that of the elements, the means are the sum over their counts; and so are the gradients."""
    import torch

    case = case or {}
    operands = _draw(loss, case, dtype, device)
    everything = (True,) * len(operands)
    results = {r: run(_bind(function, case, r), operands, everything, 1.0) for r in loss.reductions}
    values = {r: x.value.double() for r, x in results.items()}
    info = torch.finfo(getattr(torch, dtype))
    size = float(values["none"].abs().sum())
    divisors = {"sum": 1, "mean": ROWS * COLUMNS, "batchmean": ROWS}
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
            # The division may round a half number that it makes subnormal.
            bound = 4 * info.eps * one.double().abs() + divisor * info.tiny * info.eps
            require(
                bool((error <= bound).all()), f"gradient of {operand.name}, {reduction}: not that of none / {divisor}"
            )


def repeats_bit_by_bit(
    function: Function,
    loss: Loss,
    case: Mapping[str, Any] | None = None,
    dtype: str = "float32",
    reduction: str = "mean",
    layout: str = "contiguous",
    device: str = "cpu",
    shape: tuple[int, ...] = (ROWS, COLUMNS),
    times: int = 3,
) -> None:
    """Called again, and without gradients, the loss has the same bits; and it leaves its operands alone."""
    case = case or {}
    shapes = LAYOUTS[layout].shapes(shape, len(loss.operands))
    operands = LAYOUTS[layout].place(_draw(loss, case, dtype, device, shapes))
    before = [x.clone() for x in operands]
    bound = _bind(function, case, reduction)
    everything, nothing = (True,) * len(operands), (False,) * len(operands)
    first = run(bound, operands, everything, -1.5)
    for _ in range(times):
        require(_same(run(bound, operands, everything, -1.5), first), "a second call has other bits")
        require(same_bits(run(bound, operands, nothing, -1.5).value, first.value), "without gradients: other bits")
    for operand, x, y in zip(loss.operands, operands, before, strict=True):
        require(same_bits(x, y), f"{operand.name} was changed")


def _same(a: Result, b: Result) -> bool:
    pairs = zip((a.value, *a.gradients), (b.value, *b.gradients), strict=True)
    return all(x is not None and y is not None and same_bits(x, y) for x, y in pairs)

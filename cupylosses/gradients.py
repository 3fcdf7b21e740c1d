"""Value and gradients in one call, for arrays of any library."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from cupylosses import checks
from cupylosses.definition import Loss, registry
from cupylosses.functional import backend, common_library


def value_and_grad(
    loss: Callable[..., Any] | str, *operands: Any, argnums: int | Sequence[int] = 0, **options: Any
) -> tuple[Any, Any]:
    """The value of a loss and its gradients, computed together.

    Args:
        loss: A function of ``cupylosses.functional``, or its name.
        operands: The tensors of the loss, in its order: torch, CuPy, NumPy, or anything with ``__dlpack__``.
        argnums: Which operands to differentiate: a position, or several.
        options: What the function takes by name (``reduction``, ``beta``, ...).

    Returns:
        ``(value, gradient)``, or ``(value, (gradient, ...))`` when ``argnums`` is a sequence. A gradient has its
        operand's shape, dtype and library. With ``reduction="none"`` it is the gradient of the sum of the values.

    Raises:
        TypeError: no loss of this library; an operand without a gradient (integers).
        ValueError: a position that the loss has not.

    NumPy arrays are differentiated by torch, zero-copy, and need it to be installed.
    """
    definition = _definition(loss)
    count = len(definition.operands)
    if len(operands) != count:
        names = ", ".join(x.name for x in definition.operands)
        raise TypeError(
            f"{definition.name}: value_and_grad takes the operands {names} by position, got {len(operands)}."
        )
    positions = (argnums,) if isinstance(argnums, int) else tuple(argnums)
    for position in positions:
        if not -count <= position < count:
            raise ValueError(
                f"{definition.name}: `argnums` must be within 0 to {count - 1}, got {position}; "
                "it counts the operands from 0."
            )
    wanted = tuple(i in {p % count for p in positions} for i in range(count))
    library, arrays = common_library(definition, operands)
    _check_floating(definition, arrays, wanted)
    run = {"cupy": _cupy, "torch": _torch, "numpy": _numpy}[library]
    value, gradients = run(definition, arrays, wanted, options)
    chosen = tuple(gradients[p % count] for p in positions)
    return value, chosen[0] if isinstance(argnums, int) else chosen


def _definition(loss: Callable[..., Any] | str) -> Loss:
    found = registry().get(loss) if isinstance(loss, str) else getattr(loss, "loss", None)
    if not isinstance(found, Loss):
        raise TypeError(
            f"value_and_grad: `loss` must be a function of cupylosses.functional or its name, got {loss!r}; "
            f"there are {', '.join(registry())}."
        )
    return found


def _check_floating(loss: Loss, arrays: Sequence[Any], wanted: Sequence[bool]) -> None:
    for operand, x, w in zip(loss.operands, arrays, wanted, strict=True):
        name = str(x.dtype).removeprefix("torch.")
        if w and name not in checks.FLOATING:
            raise TypeError(
                f"{loss.name}: `{operand.name}` of {name} has no gradient; leave it out of `argnums` or convert it to "
                "a floating dtype."
            )


def _call(loss: Loss, arrays: Sequence[Any], options: dict[str, Any]) -> Any:
    from cupylosses import functional

    return getattr(functional, loss.name)(*arrays, **options)


def _torch(loss: Loss, arrays: Sequence[Any], wanted: Sequence[bool], options: dict[str, Any]) -> tuple[Any, list[Any]]:
    import torch

    leaves = [x.detach().requires_grad_(w) for x, w in zip(arrays, wanted, strict=True)]
    with torch.enable_grad():
        value = _call(loss, leaves, options)
    inputs = [x for x, w in zip(leaves, wanted, strict=True) if w]
    if not inputs:
        return value, [None] * len(wanted)
    grad_output = torch.ones((), dtype=value.dtype, device=value.device).expand(value.shape)
    found = iter(torch.autograd.grad(value, inputs, grad_output))
    return value.detach(), [next(found) if w else None for w in wanted]


def _numpy(loss: Loss, arrays: Sequence[Any], wanted: Sequence[bool], options: dict[str, Any]) -> tuple[Any, list[Any]]:
    try:
        import torch
    except ImportError as error:
        raise ImportError(
            f'{loss.name}: gradients of NumPy arrays need torch: `pip install "cupylosses[torch]"`.'
        ) from error
    # torch has neither negative strides nor read-only memory: such arrays are copied, no others.
    arrays = [x if x.flags.writeable and all(s >= 0 for s in x.strides) else x.copy() for x in arrays]
    value, gradients = _torch(loss, [torch.from_numpy(x) for x in arrays], wanted, options)
    return value.numpy()[()], [None if g is None else g.numpy() for g in gradients]


def _cupy(
    loss: Loss, arrays: tuple[Any, ...], wanted: tuple[bool, ...], options: dict[str, Any]
) -> tuple[Any, list[Any]]:
    values = loss.values()
    reduction = checks.reduction(loss, options.pop("reduction", "mean"))
    unknown = set(options) - set(values)
    if unknown:
        raise TypeError(f"{loss.name}: got an unexpected argument `{unknown.pop()}`; it takes {', '.join(values)}.")
    values |= options
    parameters = tuple(checks.parameter(loss, x, values[x.name]) for x in loss.parameters)
    flags = tuple(checks.flag(loss, x.name, values[x.name]) for x in loss.flags)
    return backend("cupy").value_and_gradients(loss, arrays, reduction, parameters, flags, wanted)

"""Value and gradients in one call, for arrays of any library."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from cupylosses import checks
from cupylosses.call import Call
from cupylosses.definition import Loss, registry
from cupylosses.forms import Form
from cupylosses.functional import backend, common_library, evaluate


def value_and_grad(
    loss: Callable[..., Any] | str, *operands: Any, argnums: int | str | Sequence[int | str] = 0, **options: Any
) -> tuple[Any, Any]:
    """The value of a loss and its gradients, computed together.

    Args:
        loss: A function of ``cupylosses.functional``, one of ``define_loss``, or the name of one of the first.
        operands: The tensors of the loss, in its order: torch, CuPy, NumPy, or anything with ``__dlpack__``.
        argnums: Which operands to differentiate: a position or a name, or several; ``"weight"`` is a name too.
        options: What the function takes by name (``reduction``, ``beta``, ``weight``, ...).

    Returns:
        ``(value, gradient)``, or ``(value, (gradient, ...))`` when ``argnums`` is a sequence. A gradient has its
        operand's shape, dtype and library. Where the value is no single number it is the gradient of its sum.

    Raises:
        TypeError: no loss of this library; an operand without a gradient (integers, numbers).
        ValueError: a position that the loss has not.

    NumPy arrays are differentiated by torch, zero-copy, and need it to be installed.
    """
    function = _function(loss)
    definition: Loss = function.loss
    if len(operands) > len(definition.operands):
        names = ", ".join(x.name for x in definition.operands)
        raise TypeError(
            f"{definition.name}: value_and_grad takes the operands {names}, got {len(operands)} by position."
        )
    given = dict(zip([x.name for x in definition.operands], operands, strict=False))
    call: Call = function.prepare(**given, **options)
    library, arrays = common_library(call.loss, call.operands)
    call = call._replace(operands=arrays)
    slots = [slot_of(call, x) for x in ((argnums,) if isinstance(argnums, (int, str)) else argnums)]
    wanted = tuple(i in slots for i in range(len(arrays)))
    value, gradients = {"cupy": _cupy, "torch": _torch, "numpy": _numpy}[library](call, wanted)
    chosen = tuple(gradients[i] for i in slots)
    return value, chosen[0] if isinstance(argnums, (int, str)) else chosen


def _function(loss: Callable[..., Any] | str) -> Any:
    from cupylosses import functional

    found = getattr(functional, loss, None) if isinstance(loss, str) and loss in registry() else loss
    if not isinstance(getattr(found, "loss", None), Loss):
        raise TypeError(
            f"value_and_grad: `loss` must be a function of cupylosses.functional or its name, got {loss!r}; "
            f"there are {', '.join(registry())}."
        )
    return found


def slot_of(call: Call, argument: int | str) -> int:
    """The position among the arrays of a call of an operand that is differentiated."""
    loss = call.loss.base if isinstance(call.loss, Form) else call.loss
    assert loss is not None
    count = len(loss.operands)
    if isinstance(argument, int):
        if not -count <= argument < count:
            raise ValueError(
                f"{loss.name}: `argnums` must be within 0 to {count - 1}, got {argument}; "
                "it counts the operands from 0."
            )
        argument = loss.operands[argument].name
    names = [x.name for x in call.loss.operands]
    if argument not in names:
        raise TypeError(
            f"{loss.name}: `{argument}` is no array in this call, and has no gradient; there are {', '.join(names)}."
        )
    slot = names.index(argument)
    dtype = str(call.operands[slot].dtype).removeprefix("torch.")
    if dtype not in checks.FLOATING:
        raise TypeError(
            f"{loss.name}: `{argument}` of {dtype} has no gradient; leave it out of `argnums` or convert it to "
            "a floating dtype."
        )
    return slot


def _torch(call: Call, wanted: Sequence[bool]) -> tuple[Any, list[Any]]:
    import torch

    leaves = tuple(x.detach().requires_grad_(w) for x, w in zip(call.operands, wanted, strict=True))
    with torch.enable_grad():
        value = evaluate(call._replace(operands=leaves))
    inputs = [x for x, w in zip(leaves, wanted, strict=True) if w]
    if not inputs:
        return value, [None] * len(wanted)
    grad_output = torch.ones((), dtype=value.dtype, device=value.device).expand(value.shape)
    found = iter(torch.autograd.grad(value, inputs, grad_output))
    return value.detach(), [next(found) if w else None for w in wanted]


def _numpy(call: Call, wanted: Sequence[bool]) -> tuple[Any, list[Any]]:
    try:
        import torch
    except ImportError as error:
        raise ImportError(
            f'{call.loss.name}: gradients of NumPy arrays need torch: `pip install "cupylosses[torch]"`.'
        ) from error
    # torch has neither negative strides nor read-only memory: such arrays are copied, no others.
    arrays = [x if x.flags.writeable and all(s >= 0 for s in x.strides) else x.copy() for x in call.operands]
    value, gradients = _torch(call._replace(operands=tuple(torch.from_numpy(x) for x in arrays)), wanted)
    return value.numpy()[()], [None if g is None else g.numpy() for g in gradients]


def _cupy(call: Call, wanted: tuple[bool, ...]) -> tuple[Any, list[Any]]:
    return backend("cupy").value_and_gradients(call, wanted)

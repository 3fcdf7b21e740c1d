"""Value and gradients in one call, for arrays of any library."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cupylosses import checks, interop
from cupylosses.definition.base import Definition
from cupylosses.dispatch import backend, common_library, evaluate, evaluate_rows
from cupylosses.engines.pointwise.call import Call
from cupylosses.engines.pointwise.definition import Form, registry
from cupylosses.engines.softmax.call import RowCall, RowResult
from cupylosses.engines.softmax.definition import RowLoss, row_registry


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
        operand's shape, dtype and library. Where the value is no single number it is the gradient of its sum. A loss
        of rows that is asked for more returns its named tuple for the value.

    Raises:
        TypeError: no loss of this library; an operand without a gradient (integers, numbers).
        ValueError: a position that the loss has not.

    NumPy arrays are differentiated by torch, zero-copy, and need it to be installed.
    """
    function = _function(loss)
    definition: Definition = function.loss
    if len(operands) > len(definition.operands):
        names = ", ".join(x.name for x in definition.operands)
        raise TypeError(
            f"{definition.name}: value_and_grad takes the operands {names}, got {len(operands)} by position."
        )
    given = dict(zip([x.name for x in definition.operands], operands, strict=False))
    chosen, several = _chosen(definition, argnums)
    if isinstance(definition, RowLoss):
        value, found = _rows(function.prepare(**given, **options), chosen)
        return value, found if several else found[0]
    call: Call = function.prepare(**given, **options)
    library, arrays = common_library(call.loss, call.operands)
    call = call._replace(operands=arrays)
    slots = [slot_of(call, x) for x in chosen]
    wanted = tuple(i in slots for i in range(len(arrays)))
    value, gradients = {"cupy": _cupy, "torch": _torch, "numpy": _numpy}[library](call, wanted)
    found = tuple(gradients[i] for i in slots)
    return value, found if several else found[0]


def _chosen(loss: Definition, argnums: Any) -> tuple[tuple[int | str, ...], bool]:
    """The operands that ``argnums`` names, and whether it is a sequence."""
    several = isinstance(argnums, Sequence) and not isinstance(argnums, str)
    for x in argnums if several else (argnums,):
        if not isinstance(x, str) and (isinstance(x, bool) or not isinstance(x, numbers.Integral)):
            raise TypeError(
                f"{loss.name}: `argnums` must be a position, a name or a sequence of these, got {argnums!r}; there are "
                f"{', '.join([f'{i} or {y.name!r}' for i, y in enumerate(loss.operands)])}."
            )
    chosen = tuple([x if isinstance(x, str) else int(x) for x in (argnums if several else (argnums,))])
    return chosen, several


def _function(loss: Callable[..., Any] | str) -> Any:
    from cupylosses import functional

    names = (*registry(), *row_registry())
    found = getattr(functional, loss, None) if isinstance(loss, str) and loss in names else loss
    if not isinstance(getattr(found, "loss", None), Definition):
        raise TypeError(
            f"value_and_grad: `loss` must be a function of cupylosses.functional or its name, got {loss!r}; "
            f"there are {', '.join(names)}."
        )
    return found


def slot_of(call: Call | RowCall, argument: int | str) -> int:
    """The position among the arrays of a call of an operand that is differentiated."""
    if isinstance(call, RowCall):
        return _slot(call.loss, call.arrays, argument)
    loss = call.loss.base if isinstance(call.loss, Form) else call.loss
    assert loss is not None
    return _slot(loss, {x.name: a for x, a in zip(call.loss.operands, call.operands, strict=True)}, argument)


def _slot(loss: Definition, arrays: Mapping[str, Any], argument: int | str) -> int:
    count = len(loss.operands)
    if isinstance(argument, int):
        if not -count <= argument < count:
            raise ValueError(
                f"{loss.name}: `argnums` must be within 0 to {count - 1}, got {argument}; "
                "it counts the operands from 0."
            )
        argument = loss.operands[argument].name
    names = list(arrays)
    if argument not in names:
        raise TypeError(
            f"{loss.name}: `{argument}` is no array in this call, and has no gradient; there are {', '.join(names)}."
        )
    dtype = str(arrays[argument].dtype).removeprefix("torch.")
    if dtype not in checks.FLOATING:
        raise TypeError(
            f"{loss.name}: `{argument}` of {dtype} has no gradient; leave it out of `argnums` or convert it to "
            "a floating dtype."
        )
    return names.index(argument)


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
    tensors = tuple(_tensor(call.loss, x) for x in call.operands)
    value, gradients = _torch(call._replace(operands=tensors), wanted)
    return value.numpy()[()], [None if g is None else g.numpy() for g in gradients]


def _tensor(loss: Definition, x: Any) -> Any:
    """An array of NumPy's as a tensor of torch's, zero-copy."""
    try:
        import torch
    except ImportError as error:
        raise ImportError(
            f'{loss.name}: gradients of NumPy arrays need torch: `pip install "cupylosses[torch]"`.'
        ) from error
    # torch has neither negative strides nor read-only memory: such arrays are copied, no others.
    return torch.from_numpy(x if x.flags.writeable and all(s >= 0 for s in x.strides) else x.copy())


def _rows(call: RowCall, chosen: Sequence[int | str]) -> tuple[Any, tuple[Any, ...]]:
    """Value and gradients of a loss of rows."""
    names = [list(call.arrays)[slot_of(call, x)] for x in chosen]
    operands = [x.name for x in call.loss.operands]
    for name in names:
        if name not in operands:
            raise TypeError(f"{call.loss.name}: `{name}` has no gradient; leave it out of `argnums`.")
    wanted = operands[0] in names, operands[1] in names
    by_library = {"cupy": _cupy_rows, "torch": _torch_rows, "numpy": _numpy_rows}
    value, gradients = by_library[interop.kind(call.operands[0])](call, wanted)
    return value, tuple(gradients[operands.index(x)] for x in names)


def _torch_rows(call: RowCall, wanted: tuple[bool, bool]) -> tuple[Any, Sequence[Any]]:
    import torch

    call = call.with_arrays({name: x.detach() for name, x in call.arrays.items()})
    inputs = [x.requires_grad_() for x, w in zip(call.operands, wanted, strict=True) if w]
    with torch.enable_grad():
        found = evaluate_rows(call)
    value = found.loss if isinstance(found, RowResult) else found
    grad_output = torch.ones((), dtype=value.dtype, device=value.device).expand(value.shape)
    gradients = iter(torch.autograd.grad(value, inputs, grad_output) if inputs else ())
    value = found._replace(loss=value.detach()) if isinstance(found, RowResult) else value.detach()
    return value, [next(gradients) if w else None for w in wanted]


def _numpy_rows(call: RowCall, wanted: tuple[bool, bool]) -> tuple[Any, Sequence[Any]]:
    tensors = call.with_arrays({n: _tensor(call.loss, x) for n, x in call.arrays.items()})
    value, gradients = _torch_rows(tensors, wanted)
    several = isinstance(value, RowResult)
    parts = [None if x is None else x.numpy()[()] for x in (value if several else [value])]
    return RowResult(*parts) if several else parts[0], [None if g is None else g.numpy() for g in gradients]


def _cupy_rows(call: RowCall, wanted: tuple[bool, bool]) -> tuple[Any, Sequence[Any]]:
    return backend("cupy").rows_and_gradients(call, wanted)


def _cupy(call: Call, wanted: tuple[bool, ...]) -> tuple[Any, list[Any]]:
    return backend("cupy").value_and_gradients(call, wanted)

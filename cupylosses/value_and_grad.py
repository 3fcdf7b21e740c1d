"""Value and gradients in one call, for arrays of any library."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cupylosses import checks
from cupylosses.adoption import common_library
from cupylosses.call import Call
from cupylosses.definition.base import Definition
from cupylosses.definition.registry import functions, registry
from cupylosses.dispatch import backend


def value_and_grad(
    loss: Callable[..., Any] | str, *operands: Any, argnums: int | str | Sequence[int | str] = 0, **options: Any
) -> tuple[Any, Any]:
    """Computes the value of a loss and its gradients together.

    Torch differentiates NumPy arrays, zero-copy, and must be installed for that.

    Args:
        loss: A function of ``cupylosses.functional``, or its name, or a function made by ``define_loss`` or
            ``define_statistics``.
        operands: The tensors of the loss, in its order: torch, CuPy, NumPy, or any object with ``__dlpack__``.
        argnums: The operands to differentiate: a position or a name, or a sequence of these; ``"weight"`` is a name
            too.
        options: Other arguments of the function, by name (``reduction``, ``beta``, ``weight``, ...).

    Returns:
        ``(value, gradient)``, or ``(value, (gradient, ...))`` if ``argnums`` is a sequence. A gradient has the shape,
        dtype and library of its operand. If the value is not a single number, it is the gradient of the sum of the
        values. A loss of rows that is asked for further results returns its named tuple as the value.

    Raises:
        TypeError: ``loss`` is not a loss of this library, or an operand has no gradient (integers, numbers).
        ValueError: ``argnums`` has a position that the loss lacks.
    """
    function = _function(loss)
    definition: Definition = function.loss
    if len(operands) > len(definition.operands):
        names = ", ".join(x.name for x in definition.operands)
        raise TypeError(
            f"{definition.name}: value_and_grad takes the operands {names}, got {len(operands)} by position."
        )
    by_name = dict(zip([x.name for x in definition.operands], operands, strict=False))
    chosen, several = _chosen(definition, argnums)
    call: Call = function.prepare(**by_name, **options)
    engine = call.loss.engine
    library, arrays = common_library(call.loss, engine.names(call), call.arrays)
    call = call._replace(arrays=arrays)
    slots = [slot_of(call, x) for x in chosen]
    wanted = tuple(i in slots for i in range(len(arrays)))
    value, gradients = backend(library).evaluate_with_gradients(call, wanted)
    selected = tuple(gradients[i] for i in slots)
    return engine.unpacked(call.static, value), selected if several else selected[0]


def _chosen(loss: Definition, argnums: Any) -> tuple[tuple[int | str, ...], bool]:
    """Operands that ``argnums`` names, as a tuple; and True if ``argnums`` is a sequence."""
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

    names = (*registry(), *functions())
    function = getattr(functional, loss, None) if isinstance(loss, str) and loss in names else loss
    if not isinstance(getattr(function, "loss", None), Definition):
        raise TypeError(
            f"value_and_grad: `loss` must be a function of cupylosses.functional or its name, got {loss!r}; "
            f"there are {', '.join(names)}."
        )
    return function


def slot_of(call: Call, argument: int | str) -> int:
    """Index of a differentiated argument among the arrays of a call; raises if it has no gradient."""
    definition: Definition = getattr(call.loss, "base", None) or call.loss
    engine = call.loss.engine
    slot = _slot(definition, dict(zip(engine.names(call), call.arrays, strict=True)), argument)
    if not engine.floating(call)[slot]:
        name = engine.names(call)[slot]
        raise TypeError(f"{definition.name}: `{name}` has no gradient; leave it out of `argnums`.")
    return slot


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

"""The functions: one per definition, with torch's names, arguments and results where torch has the loss.

Each takes torch tensors, CuPy arrays, NumPy arrays or anything with ``__dlpack__`` and returns what it was given. They
are built from the definitions when this module is imported; ``functional.pyi`` spells them out for editors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cupylosses import checks, interop
from cupylosses.call import Call
from cupylosses.definition import Loss, registry, remember
from cupylosses.documentation import docstring
from cupylosses.reduction import Reduction
from cupylosses.signatures import compiled

#: What every loss takes besides, in the order in which the functions hand it on.
_ADDED = ("weight", "mask", "normalizer", "dim", "out_dtype")

_PLAIN = {kind: Reduction(kind) for kind in ("none", "mean", "sum", "batchmean", "weighted_mean")}


def prepare(
    loss: Loss,
    operands: tuple[Any, ...],
    reduction: str,
    parameters: tuple[Any, ...],
    flags: tuple[Any, ...],
    added: tuple[Any, ...] | None = None,
    size_average: bool | None = None,
    reduce: bool | None = None,
) -> Call:
    """Checks what is not an array, and finds the form of the loss."""
    if size_average is not None or reduce is not None:
        reduction = checks.legacy_reduction(loss, size_average, reduce)
    how = _PLAIN.get(reduction) if type(reduction) is str else None
    if how is None:
        checks.reduction(loss, reduction)
    if parameters:
        parameters = tuple([checks.parameter(loss, s, x) for s, x in zip(loss.parameters, parameters)])
    if flags:
        flags = tuple([checks.flag(loss, s, x) for s, x in zip(loss.flags, flags)])
    if added is None and not loss.takes_numbers:
        return Call(loss, operands, how, parameters, flags)
    weight, mask, normalizer, dim, out_dtype = added or (None,) * 5
    loss, operands, parameters = _with_numbers(loss, operands, parameters, weight, mask)
    if normalizer is not None:
        normalizer = checks.normalizer(loss, normalizer, reduction)
    if dim is not None:
        dim = checks.dimensions(loss, dim, reduction)
    if out_dtype is not None:
        out_dtype = checks.out_dtype(loss, out_dtype)
    how = Reduction(reduction, dim, out_dtype, normalizer is not None)
    return Call(loss, operands, how, parameters, flags, normalizer)


def _with_numbers(
    loss: Loss, operands: tuple[Any, ...], parameters: tuple[float, ...], weight: Any, mask: Any
) -> tuple[Loss, tuple[Any, ...], tuple[float, ...]]:
    """The form of the loss for these arguments: numbers become parameters, weight and mask the last operands."""
    arrays, numbers = [], {}
    for operand, x in zip(loss.operands, operands, strict=True):
        if x is None and operand.default is not None:
            numbers[operand.name] = operand.default
        elif operand.number and interop.kind(x) == "unknown":
            numbers[operand.name] = checks.number(loss, operand.name, x)
        else:
            arrays.append(x)
    kind = None
    if weight is not None:
        kind = "number" if interop.kind(weight) == "unknown" else "array"
        if kind == "array":
            arrays.append(weight)
        else:
            numbers["weight"] = checks.number(loss, "weight", weight)
    if mask is not None:
        arrays.append(mask)
    given = tuple([x for x in numbers if x != "weight"])
    return loss.forms[given, kind, mask is not None], tuple(arrays), (*parameters, *numbers.values())


def evaluate(call: Call) -> Any:
    """Finds the library that owns the arrays, and hands over."""
    operands, known = call.operands, interop.known_kinds
    library = known.get(type(operands[0]))
    if library not in _BACKENDS or not all([known.get(type(x)) == library for x in operands]):
        library, operands = common_library(call.loss, operands)
        call = call._replace(operands=operands)
    return (_BACKENDS[library] or backend(library)).evaluate(call)


def _evaluate(*arguments: Any) -> Any:
    return evaluate(prepare(*arguments))


def common_library(loss: Loss, operands: tuple[Any, ...]) -> tuple[str, tuple[Any, ...]]:
    """The library that owns all operands, after taking over, zero-copy, those of another on the same device."""
    known = interop.known_kinds
    first = known.get(type(operands[0]))
    if first in _BACKENDS and all([known.get(type(x)) == first for x in operands]):
        return first, operands
    kinds = [interop.kind(x) for x in operands]
    for operand, kind, x in zip(loss.operands, kinds, operands, strict=True):
        if kind == "unknown":
            raise checks.not_an_array(loss, operand.name, x)
    owners = set(kinds) - {"dlpack"}
    if owners == {"torch", "cupy"}:
        owners = {"torch"}
    if len(owners) > 1:
        checks.libraries(loss, kinds)
    owner = owners.pop() if owners else None
    operands = tuple(x if k == owner else interop.adopt(x, owner) for x, k in zip(operands, kinds, strict=True))
    return interop.kind(operands[0]), operands


_BACKENDS: dict[str, Any] = {"torch": None, "cupy": None, "numpy": None}


def backend(library: str) -> Any:
    """The module that evaluates losses of a library's arrays, imported on first use."""
    found = _BACKENDS[library]
    if found is None:
        if library == "torch":
            from cupylosses import autograd as found
        elif library == "cupy":
            from cupylosses import cupy_arrays as found
        else:
            from cupylosses import numpy_arrays as found
        _BACKENDS[library] = found
    return found


def function_of(loss: Loss, module: str = __name__) -> Callable[..., Any]:
    """The public function of a definition; ``function.prepare`` checks the same arguments and returns the call."""

    def names(items: Any) -> str:
        return "".join(f"{x.name}, " for x in items)

    added = f"None if {' is '.join(_ADDED)} is None else ({', '.join(_ADDED)})"
    body = (
        f"return _then(_loss, ({names(loss.operands)}), reduction, ({names(loss.parameters)}), "
        f"({names(loss.flags)}), {added}{', size_average, reduce' if loss.legacy else ''})"
    )
    function: Any = compiled(loss.name, loss.arguments, body, module, _then=_evaluate, _loss=loss)
    function.__doc__ = docstring(loss)
    remember(loss)
    # Found out here: torch.compile cannot look into the lock that a cached property takes the first time.
    _ = loss.takes_numbers, loss.key, loss.forms
    function.loss = loss
    function.prepare = compiled(loss.name, loss.arguments, body, module, _then=prepare, _loss=loss)
    return function


__all__ = list(registry())

globals().update({loss.name: function_of(loss) for loss in registry().values()})

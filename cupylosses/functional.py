"""The functions: one per definition, with torch's names, arguments and results where torch has the loss.

Each takes torch tensors, CuPy arrays, NumPy arrays or anything with ``__dlpack__`` and returns what it was given. They
are built from the definitions when this module is imported; ``functional.pyi`` spells them out for editors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cupylosses import checks, interop
from cupylosses.definition import Loss, registry


def _evaluate(
    loss: Loss,
    operands: tuple[Any, ...],
    reduction: str,
    parameters: tuple[Any, ...],
    flags: tuple[Any, ...],
    size_average: bool | None = None,
    reduce: bool | None = None,
) -> Any:
    """Checks what is not an array, finds the library that owns the arrays, and hands over."""
    if size_average is not None or reduce is not None:
        reduction = checks.legacy_reduction(loss, size_average, reduce)
    elif reduction not in loss.reductions:
        checks.reduction(loss, reduction)
    if parameters:
        parameters = tuple([checks.parameter(loss, s, x) for s, x in zip(loss.parameters, parameters)])
    if flags:
        flags = tuple([checks.flag(loss, s.name, x) for s, x in zip(loss.flags, flags)])
    library, operands = common_library(loss, operands)
    return (_BACKENDS[library] or backend(library)).evaluate(loss, operands, reduction, parameters, flags)


def common_library(loss: Loss, operands: tuple[Any, ...]) -> tuple[str, tuple[Any, ...]]:
    """The library that owns all operands, after taking over, zero-copy, those of another on the same device."""
    known = interop.known_kind
    first = known(type(operands[0]))
    if first in _BACKENDS and all([known(type(x)) == first for x in operands]):
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


def _function(loss: Loss) -> Callable[..., Any]:
    """The public function of a definition. Written as source, so that Python itself parses the arguments: binding a
    signature object costs more than the launch."""

    def spell(default: Any) -> str:
        return "" if default is ... else f"={default!r}"

    def names(items: Any) -> str:
        return "".join(f"{x.name}, " for x in items)

    signature = ", ".join(f"{name}{spell(default)}" for name, default in loss.arguments)
    legacy = ", size_average, reduce" if loss.legacy else ""
    text = (
        f"def {loss.name}({signature}):\n"
        f"    return _evaluate(_loss, ({names(loss.operands)}), reduction, ({names(loss.parameters)}), "
        f"({names(loss.flags)}){legacy})\n"
    )
    scope: dict[str, Any] = {"_evaluate": _evaluate, "_loss": loss}
    exec(compile(text, f"<cupylosses.functional.{loss.name}>", "exec"), scope)
    function = scope[loss.name]
    function.__module__ = __name__
    function.__doc__ = docstring(loss)
    function.loss = loss
    return function


def docstring(loss: Loss) -> str:
    """Meaning, formula, arguments, result, gradient convention, errors, source."""
    lines = [loss.summary, "", f"    {loss.formula}", "", "Args:"]
    shape = "(*), floating" + (" or integer" if any(x.integer for x in loss.operands) else "")
    for operand in loss.operands:
        domain = (
            operand.domain
            if isinstance(operand.domain, str)
            else " or ".join(dict.fromkeys(operand.domain[1].values()))
        )
        lines.append(f"    {operand.name}: {operand.doc} Shape {shape}; operands broadcast. Domain: {domain}.")
    for parameter in loss.parameters:
        lines.append(
            f"    {parameter.name}: {parameter.doc} Must be {parameter.requirement}. Default {parameter.default!r}."
        )
    for flag in loss.flags:
        lines.append(f"    {flag.name}: {flag.doc} Default {flag.default!r}.")
    choices = ", ".join(repr(x) for x in loss.reductions)
    lines.append(f"    reduction: One of {choices}. Default 'mean'.")
    if loss.legacy:
        lines.append("    size_average, reduce: torch's deprecated arguments; they warn and decide the reduction.")
    lines += [
        "",
        "Returns:",
        "    The broadcast shape for 'none', a 0-d array otherwise, in the promoted dtype of the operands, on their",
        "    device.",
        "",
        "Gradient:",
        f"    Every floating operand is differentiable. {loss.convention} Where the loss is NaN the gradient is NaN.",
        "",
        "Raises:",
        "    TypeError: an operand that is no array, has another dtype, or belongs to another library.",
        "    ValueError: shapes that do not broadcast, another device, a parameter or reduction out of range.",
    ]
    if loss.notes:
        lines += ["", loss.notes]
    if loss.torch:
        lines += ["", f"Drop-in for ``torch.nn.functional.{loss.torch}``."]
    if loss.source:
        lines += ["", f"Source: {loss.source}"]
    return "\n".join(lines) + "\n"


__all__ = list(registry())

globals().update({loss.name: _function(loss) for loss in registry().values()})

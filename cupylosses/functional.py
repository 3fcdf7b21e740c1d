"""The functions: one per definition, with torch's names, arguments and results where torch has the loss.

Each takes torch tensors, CuPy arrays, NumPy arrays or anything with ``__dlpack__`` and returns what it was given. They
are built from the definitions when this module is imported; ``functional.pyi`` spells them out for editors.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import cupylosses.losses  # noqa: F401  (importing it makes the definitions)
from cupylosses import checks, interop
from cupylosses.definition.base import Definition, remember
from cupylosses.definition.signature import compiled
from cupylosses.docstring import docstring
from cupylosses.engines.pointwise import checks as pointwise_checks
from cupylosses.engines.pointwise.call import Call, Parts
from cupylosses.engines.pointwise.definition import Loss, registry
from cupylosses.engines.pointwise.reduction import Reduction
from cupylosses.engines.softmax import checks as softmax_checks
from cupylosses.engines.softmax.call import RowCall
from cupylosses.engines.softmax.definition import IGNORED, RowLoss, row_registry

#: What every loss takes besides, in the order in which the functions hand it on.
_ADDED = ("weight", "mask", "normalizer", "dim", "out_dtype")

_PLAIN = {kind: Reduction(kind) for kind in ("none", "mean", "sum", "batchmean", "weighted_mean")}


def prepare(*arguments: Any) -> Call:
    """The call of what `checked` takes."""
    return Call(*checked(*arguments))


def checked(
    loss: Loss,
    operands: tuple[Any, ...],
    reduction: str,
    parameters: tuple[Any, ...],
    flags: tuple[Any, ...],
    added: tuple[Any, ...] | None = None,
    size_average: bool | None = None,
    reduce: bool | None = None,
) -> Parts:
    """Checks what is not an array, and finds the form of the loss."""
    if size_average is not None or reduce is not None:
        reduction = checks.legacy_reduction(loss, size_average, reduce)
    how = _PLAIN.get(reduction) if type(reduction) is str else None
    if how is None:
        reduction = checks.reduction(loss, reduction)
        how = _PLAIN[reduction]
    if parameters:
        parameters = tuple([checks.parameter(loss, s, x) for s, x in zip(loss.parameters, parameters)])
    if flags:
        flags = tuple([checks.flag(loss, s, x) for s, x in zip(loss.flags, flags)])
    if added is None and not loss.takes_numbers:
        return loss, operands, how, parameters, flags, None
    weight, mask, normalizer, dim, out_dtype = added or (None,) * 5
    loss, operands, parameters = _with_numbers(loss, operands, parameters, weight, mask)
    if normalizer is not None:
        normalizer = checks.normalizer(loss, normalizer, reduction)
    if dim is not None:
        dim = pointwise_checks.dimensions(loss, dim, reduction)
    if out_dtype is not None:
        out_dtype = checks.out_dtype(loss, out_dtype)
    how = Reduction(reduction, dim, out_dtype, normalizer is not None)
    return loss, operands, how, parameters, flags, normalizer


def _with_numbers(
    loss: Loss, operands: tuple[Any, ...], parameters: tuple[float, ...], weight: Any, mask: Any
) -> tuple[Loss, tuple[Any, ...], tuple[float, ...]]:
    """The form of the loss for these arguments: numbers become parameters, weight and mask the last operands."""
    arrays, numbers = [], {}
    for i, (operand, x) in enumerate(zip(loss.operands, operands, strict=True)):
        if x is None and operand.default is not None:
            numbers[operand.name] = operand.default
        elif operand.number and interop.kind(x) == "unknown":
            numbers[operand.name] = checks.number(loss, operand.name, x)
        else:
            arrays.append(_per_row(loss, operand.name, x, operands[:i]) if operand.per_row else x)
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


def _per_row(loss: Loss, name: str, x: Any, before: tuple[Any, ...]) -> Any:
    """An operand that may have one value per row of those ``before`` it, viewed so that it broadcasts with them."""
    arrays = (x, *before)
    kinds = [interop.kind(y) for y in arrays]
    if "unknown" in kinds:
        return x  # refused where all operands are
    owner = next((k for k in kinds if k != "dlpack"), None)
    arrays = [interop.adopt(y, owner) if k == "dlpack" else y for y, k in zip(arrays, kinds, strict=True)]
    shapes = [tuple(y.shape) for y in arrays[1:]]
    common = pointwise_checks.broadcast(loss, [*shapes, *[()] * (len(loss.operands) - len(shapes))])
    return pointwise_checks.per_row(loss, name, arrays[0], shapes[0], common)


def evaluate(call: Parts) -> Any:
    """Finds the library that owns the arrays, and hands over."""
    loss, operands, *rest = call
    library, operands = common_library(loss, operands)
    return backend(library).evaluate(Call(loss, operands, *rest))


def common_library(loss: Loss, operands: tuple[Any, ...]) -> tuple[str, tuple[Any, ...]]:
    """The library that owns all operands, after taking over, zero-copy, those of another on the same device."""
    known = interop.known_kinds
    first = known.get(type(operands[0]))
    if first in _BACKENDS and all([known.get(type(x)) == first for x in operands]):
        return first, operands
    names = [x.name for x in loss.operands]
    return adopted(loss, names, operands)


def adopted(loss: Definition, names: Sequence[str], arrays: Sequence[Any]) -> tuple[str, tuple[Any, ...]]:
    """The library that owns all arrays, after taking over those of another."""
    kinds = [interop.kind(x) for x in arrays]
    for name, kind, x in zip(names, kinds, arrays, strict=True):
        if kind == "unknown":
            raise checks.not_an_array(loss, name, x)
    owners = set(kinds) - {"dlpack"}
    if owners == {"torch", "cupy"}:
        owners = {"torch"}
    if len(owners) > 1:
        checks.libraries(loss, kinds, names)
    owner = owners.pop() if owners else None
    arrays = tuple(x if k == owner else interop.adopt(x, owner) for x, k in zip(arrays, kinds, strict=True))
    return interop.kind(arrays[0]), arrays


_BACKENDS: dict[str, Any] = {"torch": None, "cupy": None, "numpy": None}

#: What evaluates losses of operands that all are of one type, where that says whose they are: that of torch's tensors.
_SHORTCUTS: dict[type, Any] = {}


def backend(library: str) -> Any:
    """The module that evaluates losses of a library's arrays, imported on first use."""
    found = _BACKENDS[library]
    if found is None:
        if library == "torch":
            from cupylosses.backends.torch import autograd as found

            _SHORTCUTS.update(dict.fromkeys((found.torch.Tensor, found.torch.nn.Parameter), found))
        elif library == "cupy":
            from cupylosses.backends import cupy as found
        else:
            from cupylosses.backends import numpy as found
        _BACKENDS[library] = found
    return found


def function_of(loss: Loss, module: str = __name__) -> Callable[..., Any]:
    """The public function of a definition; ``function.prepare`` checks the same arguments and returns the call."""

    def names(items: Any) -> str:
        return "".join(f"{x.name}, " for x in items)

    arguments = (
        f"_loss, ({names(loss.operands)}), reduction, ({names(loss.parameters)}), ({names(loss.flags)}), _added"
        f"{', size_average, reduce' if loss.legacy else ''}"
    )
    first, *others = [f"_type({x.name})" for x in loss.operands]
    alike = " and ".join(["_added is None", *(f"{first} is {x}" for x in others)])
    added = f"_added = None if {' is '.join(_ADDED)} is None else ({', '.join(_ADDED)})"
    library = f"_library = _shortcuts.get({first}, _any) if {alike} else _any"
    hand_over = _hand_over("_library is _any", loss)
    scope = {"_loss": loss, "_checked": checked, "_prepare": prepare, "_type": type, "_shortcuts": _SHORTCUTS}
    scope["_any"] = sys.modules[__name__]
    function: Any = compiled(
        loss.name,
        loss.arguments,
        [added, library, hand_over, f"return _library.evaluate(_checked({arguments}))"],
        module,
        _overridden=_overridden,
        _self=(itself := []),
        **scope,
    )
    itself.append(function)
    _describe(function, loss)
    # Found out here: torch.compile cannot look into the lock that a cached property takes the first time.
    _ = loss.takes_numbers, loss.key, loss.forms
    function.prepare = compiled(loss.name, loss.arguments, [added, f"return _prepare({arguments})"], module, **scope)
    return function


def _describe(function: Any, loss: Definition) -> None:
    """Attaches the docstring, the definition and the refusal of torch.jit.script to a public function."""
    function.__doc__ = docstring(loss)
    function.__prepare_scriptable__ = partial(checks.refuse_script, loss.name)
    function.loss = loss
    remember(loss)


def _hand_over(condition: str, loss: Definition) -> str:
    """Source line that, under a condition, lets an operand with torch's override protocol take the call."""
    operands = ", ".join(x.name for x in loss.operands)
    return f"if ({condition}) and (_others := _overridden({operands})): return _others(_self[0], locals())"


def _overridden(*operands: Any) -> Callable[..., Any] | None:
    """A caller of the public function through torch's override protocol, or None if no operand has the protocol."""
    others = [x for x in operands if interop.stands_for_a_tensor(x)]
    if not others:
        return None

    def call(function: Callable[..., Any], given: Mapping[str, Any]) -> Any:
        from torch.overrides import handle_torch_function

        arguments = inspect.signature(function).parameters.values()
        chosen = {x.name: given[x.name] for x in arguments if given[x.name] is not x.default}
        return handle_torch_function(function, others, **chosen)

    return call


def row_function_of(loss: RowLoss, module: str = __name__) -> Callable[..., Any]:
    """The public function of a loss of rows; ``function.prepare`` checks the same arguments and returns the call."""
    arrays = [x.name for x in loss.operands] + [loss.weights or "None", "mask", "normalizer"]
    settings = "".join(f"{x}, " for x in _settings_of(loss))
    body = [f"return _then(_loss, {', '.join(arrays)}, ({settings}){', size_average, reduce' if loss.legacy else ''})"]
    unusual = " or ".join(f"type({x.name}) not in _shortcuts" for x in loss.operands)
    function: Any = compiled(
        loss.name,
        loss.arguments,
        [_hand_over(unusual, loss), *body],
        module,
        _then=_evaluate_rows,
        _loss=loss,
        _shortcuts=_SHORTCUTS,
        _overridden=_overridden,
        _self=(itself := []),
    )
    itself.append(function)
    _describe(function, loss)
    # As in function_of.
    _ = loss.dense, loss.only_of_indices, loss.expressions, loss.common, loss.key
    function.prepare = compiled(loss.name, loss.arguments, body, module, _then=prepare_rows, _loss=loss)
    return function


def _settings_of(loss: RowLoss) -> list[str]:
    """The names of the arguments that are no arrays: the options, and what losses of rows have in common."""
    arrays = {loss.weights, "mask", "normalizer"}
    return [*(x.name for x in loss.options), *(x for x in loss.common if x not in arrays)]


def prepare_rows(
    loss: RowLoss,
    first: Any,
    second: Any,
    weight: Any,
    mask: Any,
    normalizer: Any,
    settings: tuple[Any, ...],
    size_average: bool | None = None,
    reduce: bool | None = None,
) -> RowCall:
    """Checks what is no array of a call of a loss of rows; dtypes and shapes are left to the backends."""
    count = len(loss.options)
    options, common = settings[:count], dict(zip(_settings_of(loss)[count:], settings[count:], strict=True))
    reduction = common["reduction"]
    if size_average is not None or reduce is not None:
        reduction = checks.legacy_reduction(loss, size_average, reduce)
    reduction = checks.reduction(loss, reduction)
    given = {x.name: array for x, array in zip(loss.operands, (first, second), strict=True)}
    given |= {} if weight is None else {str(loss.weights): weight}
    given |= {} if mask is None else {"mask": mask}
    known = interop.known_kinds
    library = known.get(type(first))
    if library not in _BACKENDS or not all([known.get(type(x)) == library for x in given.values()]):
        given = dict(zip(given, adopted(loss, list(given), list(given.values()))[1], strict=True))
        weight, mask = given.get(str(loss.weights)), given.get("mask")
        first, second = (given[x.name] for x in loss.operands)
    kind = softmax_checks.kind(loss, second)
    count = len(loss.parameters)
    parameters = tuple([checks.parameter(loss, s, x) for s, x in zip(loss.parameters, options[:count], strict=True)])
    accuracy = softmax_checks.switch(loss, "return_accuracy", common.get("return_accuracy", False))
    softmax_checks.without_probabilities(loss, kind, parameters, accuracy)
    out_dtype = common["out_dtype"]
    scale = softmax_checks.scale(loss, loss.scale, common[loss.scale]) if loss.scale else 1.0
    return RowCall(
        operands=(first, second),
        weight=weight,
        mask=mask,
        normalizer=None if normalizer is None else checks.normalizer(loss, normalizer, reduction),
        loss=loss,
        kind=kind,
        class_dim=softmax_checks.class_dimension(loss, common["class_dim"], first.shape),
        ignore_index=softmax_checks.ignore_index(loss, common.get("ignore_index", IGNORED), kind),
        reduction=reduction,
        out_dtype=None if out_dtype is None else checks.out_dtype(loss, out_dtype),
        parameters=parameters,
        flags=tuple([checks.flag(loss, s, x) for s, x in zip(loss.flags, options[count:], strict=True)]),
        scale=1.0 / scale if loss.scale == "temperature" else scale,
        softcap=softmax_checks.softcap(loss, common.get("softcap")),
        lse=softmax_checks.switch(loss, "return_lse", common.get("return_lse", False)),
        accuracy=accuracy,
        inplace=softmax_checks.switch(loss, "inplace_backward", common.get("inplace_backward", False)),
        check=softmax_checks.check_of_targets(loss, common.get("check_targets", "off")),
    )


#: Settings that have been checked, by the identities of what was given: the call but its arrays, and what was given,
#: which keeps the identities its own.
_ROW_SETTINGS: dict[tuple[Any, ...], tuple[tuple[Any, ...], tuple[Any, ...]]] = {}
_MAX_SETTINGS = 1024

#: Of these types nothing changes unnoticed.
_CONSTANT = frozenset({int, float, bool, str, type(None)})


def _evaluate_rows(
    loss: RowLoss,
    first: Any,
    second: Any,
    weight: Any,
    mask: Any,
    normalizer: Any,
    settings: tuple[Any, ...],
    *legacy: bool | None,
) -> Any:
    """A loss of rows of these arguments. What has been checked is not checked again: where the tensors are torch's, a
    call is found by its settings.
    """
    known = interop.known_kinds
    library = _SHORTCUTS.get(type(first))
    alike = library and all([x is None or known.get(type(x)) == "torch" for x in (first, second, weight, mask)])
    if not alike or library.is_tracing() or normalizer is not None or any([x is not None for x in legacy]):
        return evaluate_rows(prepare_rows(loss, first, second, weight, mask, normalizer, settings, *legacy))
    key = (loss, second.dtype, first.dim(), *map(id, settings))
    found = _ROW_SETTINGS.get(key)
    if found is None:
        call = prepare_rows(loss, first, second, weight, mask, None, settings)
        if all([type(x) in _CONSTANT for x in settings]):
            if len(_ROW_SETTINGS) >= _MAX_SETTINGS:
                _ROW_SETTINGS.clear()
            _ROW_SETTINGS[key] = call[4:], settings
    else:
        call = RowCall((first, second), weight, mask, None, *found[0])
    return library.evaluate_rows(call)


def evaluate_rows(call: RowCall) -> Any:
    """Hands a call over to the library that owns its arrays."""
    return backend(interop.kind(call.operands[0])).evaluate_rows(call)


__all__ = [*registry(), *row_registry()]

globals().update({loss.name: function_of(loss) for loss in registry().values()})
globals().update({loss.name: row_function_of(loss) for loss in row_registry().values()})

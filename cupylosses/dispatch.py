"""From the arguments of a public function to the library that owns its arrays: checks, the form of the loss, the call.

Arrays of another library on the same device are taken over, zero-copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cupylosses import checks, interop
from cupylosses.definition.base import Definition
from cupylosses.engines.pointwise import checks as pointwise_checks
from cupylosses.engines.pointwise.call import Call, Parts
from cupylosses.engines.pointwise.definition import Loss
from cupylosses.engines.pointwise.reduction import Reduction
from cupylosses.engines.softmax import checks as softmax_checks
from cupylosses.engines.softmax.call import RowCall
from cupylosses.engines.softmax.definition import IGNORED, RowLoss

#: What every loss takes besides, in the order in which the functions hand it on.
ADDED = ("weight", "mask", "normalizer", "dim", "out_dtype")

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
    arrays: Sequence[Any] = (x, *before)
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
SHORTCUTS: dict[type, Any] = {}


def backend(library: str) -> Any:
    """The module that evaluates losses of a library's arrays, imported on first use."""
    if _BACKENDS[library] is None:
        # Statements, which Dynamo traces; it breaks the graph at import_module.
        if library == "torch":
            from cupylosses.backends.torch import autograd

            _BACKENDS[library] = autograd
            SHORTCUTS.update(dict.fromkeys(autograd.PLAIN, autograd))
        elif library == "cupy":
            from cupylosses.backends import cupy

            _BACKENDS[library] = cupy
        else:
            from cupylosses.backends import numpy

            _BACKENDS[library] = numpy
    return _BACKENDS[library]


def settings_of(loss: RowLoss) -> list[str]:
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
    options, common = settings[:count], dict(zip(settings_of(loss)[count:], settings[count:], strict=True))
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


def evaluate_rows_of(
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
    library = SHORTCUTS.get(type(first))
    alike = all([x is None or known.get(type(x)) == "torch" for x in (first, second, weight, mask)])
    if (
        library is None
        or not alike
        or library.is_tracing()
        or normalizer is not None
        or any([x is not None for x in legacy])
    ):
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

"""What stands in the place of torch's losses after ``patch_torch``: this library where torch's result is well defined
and the kernels run, torch's own function otherwise.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Sequence
from functools import cache, wraps
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.overrides import handle_torch_function, has_torch_function
from torch.utils._device import DeviceContext

from cupylosses import checks, interop, torch_compat
from cupylosses.backends.torch import autograd
from cupylosses.definition.base import WEIGHT, Definition
from cupylosses.engines.pointwise.call import Call
from cupylosses.engines.pointwise.definition import Form, Loss, registry
from cupylosses.engines.softmax.call import RowCall
from cupylosses.engines.softmax.definition import RowLoss, row_registry

#: Why a call is passed on to torch.
CPU = "a tensor that is not on a GPU"
DEVICES = "several devices"
OVERRIDDEN = "a subclass or a torch function mode"
TRANSFORMED = "torch.func or forward-mode differentiation"
TRACED = "torch.jit.trace or a dispatch mode"
ARGUMENTS = "arguments that are torch's to take or to refuse"
SHAPES = "operands of different shapes, or empty ones"
LAYOUT = "a tensor without strides, or a view with a sign"
DTYPE = "dtypes that not both take"
AUTOCAST = "torch refuses it under autocast"

#: What torch refuses under autocast, which it only does on a GPU: it cannot be found out by asking.
_REFUSED_UNDER_AUTOCAST = (torch.nn.functional.binary_cross_entropy,)


def replacements(
    functions: Any, reports: Callable[[], Sequence[Any]]
) -> dict[str, tuple[Callable[..., Any], Callable[..., Any]]]:
    """By name, torch's functions as they are now, and what takes their place: ``functions`` of the same names, of which
    the calls are added to the ``reports`` that are open. With none open they are torch's.
    """
    found = {}
    for loss in (*registry().values(), *row_registry().values()):
        if loss.torch:
            theirs = getattr(torch.nn.functional, loss.torch)
            found[loss.torch] = theirs, _replacement(loss, theirs, functions, reports)
    return found


def _replacement(
    loss: Definition, theirs: Callable[..., Any], functions: Any, reports: Callable[[], Sequence[Any]]
) -> Callable[..., Any]:
    known = tuple(inspect.signature(theirs).parameters)
    prepare, name, first = getattr(functions, loss.name).prepare, theirs.__name__, loss.operands[0].name
    plain = autograd.PLAIN
    obstacle: Any = _obstacle
    evaluate: Callable[[Any], Any] = autograd.evaluate
    if isinstance(loss, RowLoss):
        prepare, obstacle, evaluate = _of_tensors(prepare), _row_obstacle, autograd.evaluate_rows

    @wraps(theirs)
    def function(*arguments: Any, **named: Any) -> Any:
        if torch_compat.is_compiling():
            # Inductor fuses torch's functions with what is around them; ours is one operator by itself.
            return theirs(*arguments, **named)
        opened = reports()
        if not opened:
            return theirs(*arguments, **named)
        given = (*arguments, *named.values()) if named else arguments
        overridden = has_torch_function(given)
        x: Any = arguments[0] if arguments else named.get(first)
        call = None
        if overridden and not _only_a_default_device(given):
            reason: str | None = OVERRIDDEN
        elif type(x) in plain and x.is_cpu and autograd.host is None:
            reason = CPU
        elif len(arguments) > len(known) or not named.keys() <= set(known):
            reason = ARGUMENTS
        else:
            try:
                call = prepare(*arguments, **named)
            except (TypeError, ValueError):
                reason = ARGUMENTS
            else:
                reason = obstacle(loss, theirs, call)
        dtype = getattr(x, "dtype", None)
        for report in opened:
            report.add(name, dtype, reason)
        if call is not None and reason is None:
            return evaluate(call)
        if overridden:
            # As torch's function does, but with itself for what is called: handlers know it by its identity.
            return handle_torch_function(theirs, given, *arguments, **named)
        return theirs(*arguments, **named)

    function.__prepare_scriptable__ = lambda: theirs  # type: ignore[attr-defined]  # what torch.jit.script compiles
    return function


def _of_tensors(prepare: Callable[..., RowCall]) -> Callable[..., RowCall]:
    """``prepare`` without taking over arrays of other libraries, which torch does not."""

    def prepared(*arguments: Any, **named: Any) -> RowCall:
        if any([interop.kind(x) not in ("torch", "unknown") for x in (*arguments, *named.values())]):
            raise TypeError
        return prepare(*arguments, **named)

    return prepared


def _only_a_default_device(given: Sequence[Any]) -> bool:
    """Whether there are plain tensors and no mode but that of ``torch.set_default_device``, which losses ignore."""
    modes = [torch_compat.function_mode_at(i) for i in range(torch_compat.function_mode_count())]
    tensors = [type(x) for x in given if isinstance(x, torch.Tensor)]
    return bool(modes) and all(isinstance(x, DeviceContext) for x in modes) and set(tensors) <= set(autograd.PLAIN)


def _obstacle(loss: Loss, theirs: Callable[..., Any], call: Call) -> str | None:
    """Why a call is torch's; None if the kernels serve it and torch would return the same, but for rounding."""
    form, operands = call.loss, call.operands
    reason = _unserved(operands)
    if reason is not None:
        return reason
    if _is_only_ours(loss, theirs, call):
        return ARGUMENTS
    shape = operands[0].shape
    for operand, x in zip(form.operands, operands, strict=True):
        if x.shape != shape and not _is_within(theirs, operand, x.shape, shape):
            return SHAPES
    if operands[0].numel() == 0:
        return SHAPES
    if call.reduction.kind == "batchmean" and not shape:
        return ARGUMENTS
    dtypes = [autograd.DTYPE_NAMES[x.dtype] for x in operands]
    if dtypes[0] not in checks.FLOATING:
        return DTYPE
    if autograd.has_autocast(operands[0]):
        if theirs in _REFUSED_UNDER_AUTOCAST:
            return AUTOCAST
        return None if all(x in checks.FLOATING for x in dtypes) else DTYPE
    numbers = _numbers(form)
    if len(set(dtypes)) > 1 or numbers:
        names = tuple(x.name for x in form.operands)
        return None if _torch_takes(theirs, names, tuple(dtypes), numbers) else DTYPE
    return None


def _row_obstacle(loss: RowLoss, theirs: Callable[..., Any], call: RowCall) -> str | None:
    """The same of a loss of rows."""
    arrays = list(call.arrays.values())
    reason = _unserved(arrays)
    if reason is not None:
        return reason
    first, second = call.operands
    # In torch a target holds probabilities if it has the shape of the logits, and labels otherwise; here by its dtype.
    if tuple(second.shape) != (call.row_shape if call.kind == "indices" else tuple(first.shape)) or first.numel() == 0:
        return SHAPES
    weight = call.weight
    if weight is not None and (weight.requires_grad or tuple(weight.shape) != (call.classes,)):
        return ARGUMENTS
    dtypes = [autograd.DTYPE_NAMES[x.dtype] for x in arrays]
    if autograd.has_autocast(first):
        dtypes = ["float32" if x in checks.FLOATING and x != "float64" else x for x in dtypes]
    changed = tuple(s.name for s, x in zip(loss.parameters, call.parameters, strict=True) if x != s.default)
    kind, names, reduction = call.kind, tuple(call.arrays), call.reduction
    if _torch_takes_rows(theirs, first.dim(), kind, names, tuple(dtypes), changed, reduction):
        return None
    plain = _torch_takes_rows(theirs, 2, "indices", names[:2], ("float32", "int64"), (), reduction)
    return DTYPE if plain else ARGUMENTS


def _unserved(arrays: Sequence[Any]) -> str | None:
    """Why no kernel serves a call of these arrays now, whatever loss it is of."""
    if torch_compat.transforms_active() or forward_ad._current_level >= 0:
        return TRANSFORMED
    if torch_compat.tracing_state() is not None or torch_compat.dispatch_mode_count():
        return TRACED
    plain, names, strided, host = autograd.PLAIN, autograd.DTYPE_NAMES, torch.strided, autograd.host is not None
    device = getattr(arrays[0], "device", None)
    for x in arrays:
        if type(x) not in plain:
            return ARGUMENTS
        if not (x.is_cuda or (host and x.is_cpu)):
            return CPU
        if x.device != device:
            return DEVICES
        if x.layout is not strided or x.is_neg():
            return LAYOUT
        if x.dtype not in names:
            return DTYPE
    return None


def _is_only_ours(loss: Loss, theirs: Callable[..., Any], call: Call) -> bool:
    """Whether torch's function does not know what was given: reductions, choices, numbers."""
    form = call.loss
    if not _torch_reduces(theirs, sum(x.default is None for x in loss.operands), call.reduction.kind):
        return True
    if any(x > 1 for x in call.flags):
        return True
    if isinstance(form, Form):
        own = [x for x in loss.operands if x.name in form.numbers]
        values = call.parameters[len(loss.parameters) :]
        changed = any(x.default not in (None, value) for x, value in zip(own, values, strict=False))
        return changed or form.weight == "number"
    return False


def _numbers(form: Loss) -> tuple[str, ...]:
    """The operands that were given as numbers."""
    if not isinstance(form, Form) or form.base is None:
        return ()
    return tuple(x.name for x in form.base.operands if x.name in form.numbers and x.default is None)


def _is_within(theirs: Callable[..., Any], operand: Any, small: Sequence[int], shape: Sequence[int]) -> bool:
    """Whether an operand of another shape means in torch what it means here: weights that do not enlarge the result."""
    if operand is WEIGHT and not _torch_broadcasts_weights(theirs):
        return False
    if operand is not WEIGHT and operand.default is None:
        return False
    pairs = zip(reversed(small), reversed(shape), strict=False)
    return len(small) <= len(shape) and all(n in (1, m) for n, m in pairs)


# ----------------------------------------------------------------------------------------------------------------------
# What torch takes: it is asked, once, with operands of few elements


@cache
def _torch_reduces(theirs: Callable[..., Any], operands: int, kind: str) -> bool:
    """Whether torch knows a reduction."""
    return _asked(theirs, *[_ones(1, 1)] * operands, reduction=kind) is not None


@cache
def _torch_broadcasts_weights(theirs: Callable[..., Any]) -> bool:
    """Whether weights may be of another shape than the input."""
    return _asked(theirs, _ones(2, 2), _ones(2, 2), weight=_ones(1, 2)) is not None


@cache
def _torch_takes(
    theirs: Callable[..., Any], names: tuple[str, ...], dtypes: tuple[str, ...], numbers: tuple[str, ...]
) -> bool:
    """Whether torch takes operands of these dtypes, which are not one, and has a result of the dtype that ours has."""
    given: dict[str, Any] = {n: _ones(1, 1, dtype=autograd.DTYPES[x]) for n, x in zip(names, dtypes, strict=True)}
    found = _asked(theirs, **given, **dict.fromkeys(numbers, 1.0))
    return found is not None and found.dtype is autograd.DTYPES[checks.promote(dtypes)]


@cache
def _torch_takes_rows(
    theirs: Callable[..., Any],
    rank: int,
    kind: str,
    names: tuple[str, ...],
    dtypes: tuple[str, ...],
    changed: tuple[str, ...],
    reduction: str,
) -> bool:
    """The same of a loss of rows, with logits of so many dimensions and parameters of which some are ``changed``."""
    rows = (1,) * (rank - 1)
    logits = (*rows[:1], 2, *rows[1:])
    shapes = (logits, rows if kind == "indices" else logits, (2,))
    given = {n: _ones(*s, dtype=autograd.DTYPES[x]) for n, x, s in zip(names, dtypes, shapes, strict=False)}
    found = _asked(theirs, **given, **dict.fromkeys(changed, 1.0), reduction=reduction)
    return found is not None and found.dtype is autograd.DTYPES[checks.promote(dtypes[:2])]


def _ones(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    # On the CPU whatever the default device is: autocast for another refuses nothing there.
    return torch.ones(shape, dtype=dtype, device="cpu")


def _asked(theirs: Callable[..., Any], *arguments: Any, **named: Any) -> torch.Tensor | None:
    """What torch's function returns; None if it refuses."""
    # A mode would get torch's function by its name, under which ours stands, and the question would be counted.
    without_modes = torch_compat.without_torch_function()
    with without_modes, torch.no_grad(), torch.autocast("cpu", enabled=False), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return theirs(*arguments, **named)
        except Exception:
            return None

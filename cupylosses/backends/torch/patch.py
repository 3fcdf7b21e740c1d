"""Replacements of torch's losses under ``patch_torch``.

A replacement calls this library where torch's result is well defined and kernels can run, and torch's own function
otherwise.
"""

from __future__ import annotations

import inspect
import threading
import warnings
from collections.abc import Callable, Sequence
from functools import cache, partial, wraps
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.overrides import handle_torch_function, has_torch_function
from torch.utils._device import DeviceContext

from cupylosses import interop, torch_compat
from cupylosses.backends.torch import device as torch_device
from cupylosses.backends.torch import evaluation
from cupylosses.call import Call
from cupylosses.definition.base import Definition
from cupylosses.definition.registry import registry
from cupylosses.engines.base import ARGUMENTS, DTYPE, Question

#: Reasons for which a call is passed on to torch.
CPU = "a tensor that is not on a GPU"
DEVICES = "several devices"
OVERRIDDEN = "a subclass or a torch function mode"
TRANSFORMED = "torch.func or forward-mode differentiation"
TRACED = "torch.jit.trace or a dispatch mode"
LAYOUT = "a tensor without strides, or a view with a sign"
AUTOCAST = "torch refuses it under autocast"

#: Functions that torch refuses under autocast. It does so on a GPU only; the trial calls of `_taken` run on the CPU and
#: cannot find out.
_REFUSED_UNDER_AUTOCAST = (torch.nn.functional.binary_cross_entropy,)


class _Torchs(threading.local):
    """Thread-local flag: ``here`` is True while this thread runs a function of torch.

    The losses that it calls in turn stay torch's, too.
    """

    here = False


_torchs = _Torchs()


def replacements(
    functions: Any, reports: Callable[[], Sequence[Any]]
) -> dict[str, tuple[Callable[..., Any], Callable[..., Any]]]:
    """Returns pairs of torch's current function and its replacement, by torch's name.

    A replacement computes the loss of the same name in ``functions``, and adds each call to all open ``reports()``.
    While none is open, it calls torch's function.
    """
    pairs: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {}
    loss: Definition
    for loss in registry().values():
        # An older torch may lack the function.
        theirs: Any = getattr(torch.nn.functional, loss.torch, None) if loss.torch else None
        if theirs is not None:
            pairs[loss.torch] = theirs, _replacement(loss, theirs, functions, reports)
    return pairs


def _replacement(
    loss: Definition, theirs: Callable[..., Any], functions: Any, reports: Callable[[], Sequence[Any]]
) -> Callable[..., Any]:
    known = tuple(inspect.signature(theirs).parameters)
    prepare, name, first = getattr(functions, loss.name).prepare, theirs.__name__, loss.operands[0].name
    plain = torch_device.PLAIN
    prepare = _of_tensors(prepare)

    @wraps(theirs)
    def function(*arguments: Any, **named: Any) -> Any:
        if torch_compat.is_compiling():
            # Inductor fuses torch's functions with the operations around them; ours is one opaque operator.
            return theirs(*arguments, **named)
        opened = reports()
        if not opened or _torchs.here:
            return theirs(*arguments, **named)
        all_arguments = (*arguments, *named.values()) if named else arguments
        overridden = has_torch_function(all_arguments)
        x: Any = arguments[0] if arguments else named.get(first)
        call = None
        if overridden and not _only_a_default_device(all_arguments):
            reason: str | None = OVERRIDDEN
        elif type(x) in plain and x.is_cpu and torch_device.host is None:
            reason = CPU
        elif len(arguments) > len(known) or not named.keys() <= set(known):
            reason = ARGUMENTS
        else:
            try:
                call = prepare(*arguments, **named)
            except (TypeError, ValueError):
                reason = ARGUMENTS
            else:
                reason = _obstacle(loss, theirs, call)
        dtype = getattr(x, "dtype", None)
        for report in opened:
            report.add(name, dtype, reason)
        if call is not None and reason is None:
            return evaluation.evaluate(call)
        if overridden:
            # Dispatched as torch's function does it, with torch's function as the callee: handlers compare identities.
            return handle_torch_function(theirs, all_arguments, *arguments, **named)
        _torchs.here = True
        try:
            return theirs(*arguments, **named)
        finally:
            _torchs.here = False

    function.__prepare_scriptable__ = lambda: theirs  # type: ignore[attr-defined]  # what torch.jit.script compiles
    return function


def _of_tensors(prepare: Callable[..., Call]) -> Callable[..., Call]:
    """Wraps ``prepare`` to raise TypeError for arrays of other libraries, which torch does not accept."""

    def prepared(*arguments: Any, **named: Any) -> Call:
        if any([interop.kind(x) not in ("torch", "unknown") for x in (*arguments, *named.values())]):
            raise TypeError
        return prepare(*arguments, **named)

    return prepared


def _only_a_default_device(arguments: Sequence[Any]) -> bool:
    """True if all tensors are plain and the only modes are ``torch.set_default_device``'s, which losses ignore."""
    modes = [torch_compat.function_mode_at(i) for i in range(torch_compat.function_mode_count())]
    tensors = [type(x) for x in arguments if isinstance(x, torch.Tensor)]
    return bool(modes) and all(isinstance(x, DeviceContext) for x in modes) and set(tensors) <= set(torch_device.PLAIN)


def _obstacle(loss: Definition, theirs: Callable[..., Any], call: Call) -> str | None:
    """Returns why a call is left to torch; None if kernels run it and torch's result differs at most by rounding."""
    reason = _unserved(call.arrays)
    if reason is not None:
        return reason
    autocast = torch_device.has_autocast(call.arrays[0])
    reason = loss.engine.differs(loss, call, partial(_taken, theirs), autocast)
    if reason is None and autocast and theirs in _REFUSED_UNDER_AUTOCAST:
        return AUTOCAST
    return reason


def _unserved(arrays: Sequence[Any]) -> str | None:
    """Returns why no kernel can run on these arrays now, whatever the loss; None if one can."""
    if torch_compat.transforms_active() or forward_ad._current_level >= 0:
        return TRANSFORMED
    if torch_compat.tracing_state() is not None or torch_compat.dispatch_mode_count():
        return TRACED
    plain, names, strided, host = (
        torch_device.PLAIN,
        torch_device.DTYPE_NAMES,
        torch.strided,
        torch_device.host is not None,
    )
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


@cache
def _taken(theirs: Callable[..., Any], question: Question) -> str | None:
    """Returns the dtype of the result of torch's function; None if torch refuses the arguments.

    Each question is answered by one trial call on arrays of few elements.
    """
    arrays: dict[str, Any] = {name: _ones(*shape, dtype=torch_device.DTYPES[d]) for name, shape, d in question.arrays}
    result = _asked(theirs, **arrays, **dict(question.options))
    return None if result is None else torch_device.DTYPE_NAMES[result.dtype]


def _ones(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    # On the CPU, whatever the default device is: autocast for another device refuses nothing there.
    return torch.ones(shape, dtype=dtype, device="cpu")


def _asked(theirs: Callable[..., Any], *arguments: Any, **named: Any) -> torch.Tensor | None:
    """Returns the result of torch's function; None if it raises."""
    # A torch function mode would look the function up by name, find its replacement, and so count the trial call.
    without_modes = torch_compat.without_torch_function()
    with without_modes, torch.no_grad(), torch.autocast("cpu", enabled=False), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _torchs.here = True
        try:
            return theirs(*arguments, **named)
        except Exception:
            return None
        finally:
            _torchs.here = False

"""From a definition to the class of its Modules."""

from __future__ import annotations

import numbers
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch

from cupylosses import checks
from cupylosses.build import HOME
from cupylosses.definition.base import Definition
from cupylosses.definition.signature import compiled


@cache
def module_of(function: Callable[..., Any]) -> type[torch.nn.Module]:
    """The class of modules of a function of this library, or of ``define_loss``; the same for the same function.

    An instance of the latter can be pickled if the class is kept under its own name in the module that defined the
    loss: ``TukeyLoss = module_of(tukey_loss)``.

    Raises:
        TypeError: no function of a loss.
        ValueError: an option whose name every Module has for something else, such as ``half`` or ``training``.
    """
    loss = getattr(function, "loss", None)
    if not isinstance(loss, Definition):
        raise TypeError(f"module_of: expected a function of cupylosses.functional or define_loss, got {function!r}.")
    taken = [x for x in loss.kept if hasattr(torch.nn.Module(), x)]
    if taken:
        raise ValueError(f"{loss.name}: every Module has a `{taken[0]}` already; a Module needs another name for it.")
    twin = getattr(torch.nn, loss.class_name, None) if loss.torch else None
    ours = function.__module__ == HOME
    members = {
        "__doc__": _docstring(loss, f"{function.__module__}.{loss.name}", twin),
        "__module__": "cupylosses.nn" if ours else function.__module__,
        "forward": _forward(function, loss),
        "__prepare_scriptable__": partial(checks.refuse_script, loss.class_name),
    }
    if twin is None:
        members["__init__"], members["extra_repr"] = _constructor(loss), _extra_repr(loss)
    return type(loss.class_name, (twin or torch.nn.Module,), members)


def _forward(function: Callable[..., Any], loss: Definition) -> Callable[..., Any]:
    """``forward`` with the operands as its arguments. A twin in torch keeps its options as attributes of the same
    names, some of which it may lack.
    """
    operands = [x.name for x in loss.operands if x.default is None]
    names = list(loss.kept)

    def call(self: torch.nn.Module, given: tuple[Any, ...], added: tuple[Any, ...]) -> Any:
        options = {x: getattr(self, x) for x in names if hasattr(self, x)}
        options |= {x: value for x, value in zip(loss.keywords, added, strict=True) if value is not None}
        return function(**dict(zip(operands, given, strict=True)), **options)

    signature = [*((x, ...) for x in ("self", *operands, "*")), *((x, None) for x in loss.keywords)]
    body = [f"return _call(self, ({', '.join(operands)},), ({', '.join(loss.keywords)}))"]
    forward: Any = compiled("forward", signature, body, function.__module__, _call=call)
    forward.function = function
    return forward


def _constructor(loss: Definition) -> Callable[..., None]:
    """``__init__`` with the options as its arguments; what a call takes by keyword, by keyword."""

    def initialise(self: torch.nn.Module, values: tuple[Any, ...]) -> None:
        torch.nn.Module.__init__(self)
        for name, value in zip(loss.kept, values, strict=True):
            if isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter):
                self.register_buffer(name, value)  # moved and saved with the module, as torch's losses do
            else:
                setattr(self, name, value)

    first = [(n, x) for n, x in loss.kept.items() if n not in loss.keywords]
    rest = [(n, x) for n, x in loss.kept.items() if n in loss.keywords]
    body = [f"_initialise(self, ({', '.join(loss.kept)},))"]
    return compiled("__init__", [("self", ...), *first, ("*", ...), *rest], body, __name__, _initialise=initialise)


def _extra_repr(loss: Definition) -> Callable[[Any], str]:
    """The options of the loss, and what every loss takes where it is not the default."""
    own = {x.name for x in loss.options}

    def extra_repr(self: Any) -> str:
        parts = []
        for name, default in loss.kept.items():
            value = getattr(self, name)
            if hasattr(value, "shape") and not isinstance(value, numbers.Number):
                parts.append(f"{name}={type(value).__name__}{tuple(value.shape)}")
            elif name in own or value != default:
                parts.append(f"{name}={value!r}")
        return ", ".join(parts)

    return extra_repr


def _docstring(loss: Definition, function: str, twin: Any) -> str:
    like = f" A ``torch.nn.{twin.__name__}``." if twin else ""
    return (
        f"{loss.summary}{like}\n\n    {loss.formula}\n\n"
        f"Keeps the options of ``{function}``, which describes them. A call takes the operands\n"
        f"and, by keyword, {', '.join(loss.keywords)}.\n"
    )

"""A Module for each loss: a subclass of torch's where torch has one, with its constructor, repr and state.

The modules are built from the definitions; ``nn.pyi`` spells them out for editors. Calls take ``weight``, ``mask``,
``normalizer``, ``dim`` and ``out_dtype`` by keyword beside the operands.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from cupylosses import functional
from cupylosses.definition import COMMON, PER_CALL, PER_MODULE, Loss, registry


def module_of(function: Callable[..., Any]) -> type[torch.nn.Module]:
    """The class of modules of a function of this library, or of ``define_loss``.

    An instance of the latter can be pickled if the class is kept under its own name in the module that defined the
    loss: ``TukeyLoss = module_of(tukey_loss)``.
    """
    loss: Loss = function.loss  # type: ignore[attr-defined]
    twin = getattr(torch.nn, loss.class_name, None) if loss.torch else None
    ours = function.__module__ == functional.__name__
    members = {
        "__doc__": _docstring(loss, twin),
        "__module__": __name__ if ours else function.__module__,
        "forward": _forward(function, loss),
    }
    if twin is None:
        members["__init__"], members["extra_repr"] = _constructor(loss), _extra_repr(loss)
    return type(loss.class_name, (twin or torch.nn.Module,), members)


def _forward(function: Callable[..., Any], loss: Loss) -> Callable[..., Any]:
    """``forward`` with the operands as its arguments. A twin in torch keeps its options as attributes of the same
    names, some of which it may lack.
    """
    operands = [x.name for x in loss.operands if x.default is None]
    keywords = [*PER_MODULE[:1], *PER_CALL, *PER_MODULE[1:]]
    names = [n for n in loss.kept if n not in PER_MODULE]

    text = (
        f"def forward(self, {', '.join(operands)}, *, {', '.join(f'{x}=None' for x in keywords)}):\n"
        f"    options = _options(self)\n"
        + "".join(f"    if {x} is not None:\n        options[{x!r}] = {x}\n" for x in keywords)
        + f"    return _function({', '.join(f'{x}={x}' for x in operands)}, **options)\n"
    )

    def options(self: torch.nn.Module) -> dict[str, Any]:
        found = {n: getattr(self, n) for n in names if hasattr(self, n)}
        return found | {n: x for n in PER_MODULE if (x := getattr(self, n, None)) is not None}

    scope: dict[str, Any] = {"_options": options, "_function": function}
    exec(compile(text, f"<{__name__}.{loss.class_name}.forward>", "exec"), scope)
    return scope["forward"]


def _constructor(loss: Loss) -> Callable[..., None]:
    defaults = loss.kept
    first = [n for n in defaults if n not in COMMON or n == "reduction"]
    rest = [n for n in defaults if n not in first]
    signature = [f"{n}={defaults[n]!r}" for n in first] + ["*"] + [f"{n}={defaults[n]!r}" for n in rest]
    values = ", ".join(f"{n!r}: {n}" for n in defaults)
    text = f"def __init__(self, {', '.join(signature)}):\n    _initialise(self, {{{values}}})\n"

    def initialise(self: torch.nn.Module, values: dict[str, Any]) -> None:
        torch.nn.Module.__init__(self)
        for name, value in values.items():
            if isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter):
                self.register_buffer(name, value)  # moved and saved with the module, as torch's losses do
            else:
                setattr(self, name, value)

    scope: dict[str, Any] = {"_initialise": initialise}
    exec(compile(text, f"<{__name__}.{loss.class_name}>", "exec"), scope)
    return scope["__init__"]


def _extra_repr(loss: Loss) -> Callable[[Any], str]:
    defaults = loss.kept
    own = {x.name for x in loss.options}

    def extra_repr(self: Any) -> str:
        shown = {n: getattr(self, n) for n in defaults}
        parts = [
            f"{n}={x!r}" if not isinstance(x, torch.Tensor) else f"{n}=Tensor{tuple(x.shape)}"
            for n, x in shown.items()
            if n in own or (x is not defaults[n] and x != defaults[n])
        ]
        return ", ".join(parts)

    return extra_repr


def _docstring(loss: Loss, twin: Any) -> str:
    like = f" A ``torch.nn.{twin.__name__}``." if twin else ""
    return (
        f"{loss.summary}{like}\n\n    {loss.formula}\n\n"
        f"Keeps the options of ``cupylosses.functional.{loss.name}``, which describes them. A call takes the operands\n"
        f"and, by keyword, {', '.join((*PER_MODULE[:1], *PER_CALL, *PER_MODULE[1:]))}.\n"
    )


_CLASSES = {x.class_name: module_of(getattr(functional, x.name)) for x in registry().values()}
globals().update(_CLASSES)

__all__ = [*_CLASSES, "module_of"]

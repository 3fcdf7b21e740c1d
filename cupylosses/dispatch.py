"""From a checked call to the backend of the library that owns its arrays."""

from __future__ import annotations

from typing import Any

from cupylosses.adoption import common_library
from cupylosses.call import Call, Parts
from cupylosses.definition.base import Definition

_BACKENDS: dict[str, Any] = {"torch": None, "cupy": None, "numpy": None}

#: Backends by the type of a call's operands, where the type tells: torch's tensors.
SHORTCUTS: dict[type, Any] = {}


def prepare(loss: Definition, *arguments: Any) -> Call:
    """The call of what the engine binds."""
    return Call(*loss.engine.bind(loss, *arguments))


def evaluate(call: Parts) -> Any:
    """Finds the library that owns the arrays, and hands over."""
    loss, arrays, static, *rest = call
    found = Call(loss, arrays, static)
    library, arrays = common_library(loss, loss.engine.names(found) if len(arrays) > 1 else [], arrays)
    return backend(library).evaluate(Call(loss, arrays, static, *rest))


def backend(library: str) -> Any:
    """The module that evaluates losses of a library's arrays, imported on first use."""
    if _BACKENDS[library] is None:
        # Statements, which Dynamo traces; it breaks the graph at import_module.
        if library == "torch":
            from cupylosses.backends.torch import evaluation

            _BACKENDS[library] = evaluation
            SHORTCUTS.update(dict.fromkeys(evaluation.PLAIN, evaluation))
        elif library == "cupy":
            from cupylosses.backends import cupy

            _BACKENDS[library] = cupy
        else:
            from cupylosses.backends import numpy

            _BACKENDS[library] = numpy
    return _BACKENDS[library]

"""Dispatches a checked call to the backend of the library that owns its arrays."""

from __future__ import annotations

from typing import Any

from cupylosses.adoption import common_library
from cupylosses.call import Call, Parts
from cupylosses.definition.base import Definition

_BACKENDS: dict[str, Any] = {"torch": None, "cupy": None, "numpy": None}

#: Backends by type of a call's operands, for the types that determine the backend: torch's plain tensors.
SHORTCUTS: dict[type, Any] = {}


def prepare(loss: Definition, *arguments: Any) -> Call:
    """Checks and binds arguments with the loss's engine, and returns the call."""
    return Call(*loss.engine.bind(loss, *arguments))


def evaluate(call: Parts) -> Any:
    """Evaluates a call with the backend of the library that owns its arrays."""
    loss, arrays, static, *rest = call
    bare_call = Call(loss, arrays, static)
    library, arrays = common_library(loss, loss.engine.names(bare_call) if len(arrays) > 1 else [], arrays)
    return backend(library).evaluate(Call(loss, arrays, static, *rest))


def backend(library: str) -> Any:
    """The module that evaluates losses of a library's arrays, imported on first use."""
    if _BACKENDS[library] is None:
        # Import statements, because Dynamo traces these but breaks the graph at `import_module`.
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

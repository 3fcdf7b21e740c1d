"""Registry of the definitions of this process: the library's own by name, and all of them by key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from cupylosses.definition.base import Definition

_Kind = TypeVar("_Kind", bound=Definition)

_registry: dict[str, Any] = {}
#: Definitions of functions that are not losses: they have no reduction and no Module.
_functions: dict[str, Any] = {}
#: All definitions, including users' losses, by key: their name in a graph that outlives the process.
_named: dict[str, Any] = {}


def define(loss: _Kind) -> _Kind:
    """Registers a definition of this library, from which its public function and Module are built.

    Raises:
        ValueError: The name is taken.
    """
    if loss.name in _registry:
        raise ValueError(f"a loss named {loss.name!r} is defined already")
    object.__setattr__(loss, "shipped", True)
    _registry[loss.name] = loss
    return loss


def define_function(definition: _Kind) -> _Kind:
    """Registers a definition of this library whose function is not a loss; only its public function is built.

    Raises:
        ValueError: The name is taken.
    """
    if definition.name in (*_registry, *_functions):
        raise ValueError(f"a function named {definition.name!r} is defined already")
    object.__setattr__(definition, "shipped", True)
    _functions[definition.name] = definition
    return definition


def functions() -> Mapping[str, Any]:
    """Definitions of this library whose functions are not losses, by name, in the order of definition."""
    return _functions


def registry(kind: type[_Kind] = Definition) -> Mapping[str, _Kind]:  # type: ignore[assignment]
    """Definitions of this library's losses by name, in the order of definition; only those of class ``kind``."""
    if kind is Definition:
        return _registry
    return {name: x for name, x in _registry.items() if isinstance(x, kind)}


def remember(loss: Definition) -> None:
    """Registers a definition under its key, replacing an earlier one."""
    _named[loss.key] = loss


def named(key: str) -> Any:
    """Returns the definition of a key. The key of a modified loss is that of the loss, "~" and the modification.

    Raises:
        LookupError: No loss of that key has been defined in this process.
    """
    key, _, modification = key.partition("~")
    definition = _named.get(key)
    if definition is None:
        name = key.partition("-")[0]
        raise LookupError(
            f"cupylosses: a graph needs the loss {name!r} ({key}), which this process has not defined. Import what "
            "calls `define_loss` or `define_statistics` for it, with the same expressions, before the graph runs."
        )
    return definition.engine.modified(definition, modification) if modification else definition

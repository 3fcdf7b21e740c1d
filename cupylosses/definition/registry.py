"""The definitions that this process knows: those of the library by name, and all others by key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from cupylosses.definition.base import Definition

_Kind = TypeVar("_Kind", bound=Definition)

_registry: dict[str, Any] = {}
#: Those whose functions are no losses: they have no reduction and no Module.
_functions: dict[str, Any] = {}
#: By key, which names a definition in a graph that outlives the process; users' losses too.
_named: dict[str, Any] = {}


def define(loss: _Kind) -> _Kind:
    """Enters a definition of this library, from which its public function and Module are built.

    Raises:
        ValueError: the name is taken.
    """
    if loss.name in _registry:
        raise ValueError(f"a loss named {loss.name!r} is defined already")
    object.__setattr__(loss, "shipped", True)
    _registry[loss.name] = loss
    return loss


def define_function(definition: _Kind) -> _Kind:
    """Enters a definition of this library whose function is no loss, from which only its public function is built.

    Raises:
        ValueError: the name is taken.
    """
    if definition.name in (*_registry, *_functions):
        raise ValueError(f"a function named {definition.name!r} is defined already")
    object.__setattr__(definition, "shipped", True)
    _functions[definition.name] = definition
    return definition


def functions() -> Mapping[str, Any]:
    """The definitions of this library whose functions are no losses, by name, in the order of definition."""
    return _functions


def registry(kind: type[_Kind] = Definition) -> Mapping[str, _Kind]:  # type: ignore[assignment]
    """The definitions of this library by name, in the order of definition; those of one class if that is given."""
    if kind is Definition:
        return _registry
    return {name: x for name, x in _registry.items() if isinstance(x, kind)}


def remember(loss: Definition) -> None:
    """Makes a definition known by its key; the newest of that key."""
    _named[loss.key] = loss


def named(key: str) -> Any:
    """The definition of a key; of a modified loss, whose key is that of the loss, "~" and the modification.

    Raises:
        LookupError: no loss of that key has been defined in this process.
    """
    key, _, modification = key.partition("~")
    found = _named.get(key)
    if found is None:
        name = key.partition("-")[0]
        raise LookupError(
            f"cupylosses: a graph needs the loss {name!r} ({key}), which this process has not defined. Import what "
            "calls `define_loss` or `define_statistics` for it, with the same expressions, before the graph runs."
        )
    return found.engine.modified(found, modification) if modification else found

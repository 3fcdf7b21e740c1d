"""Finds the library that owns a call's arrays, and adopts arrays of others on the same device without copying them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cupylosses import checks, interop
from cupylosses.definition.base import Definition

#: The libraries that have a backend.
LIBRARIES = ("torch", "cupy", "numpy")


def common_library(loss: Definition, names: Sequence[str], arrays: tuple[Any, ...]) -> tuple[str, tuple[Any, ...]]:
    """Returns the library that owns the arrays, and these as its own. CuPy arrays next to tensors become tensors."""
    known = interop.known_kinds
    first = known.get(type(arrays[0]))
    if first in LIBRARIES and all([known.get(type(x)) == first for x in arrays]):
        return first, arrays
    return adopted(loss, names, arrays)


def adopted(loss: Definition, names: Sequence[str], arrays: Sequence[Any]) -> tuple[str, tuple[Any, ...]]:
    """The general case of :func:`common_library`, for arrays of any types.

    Raises:
        TypeError: An argument is not an array, or the arrays belong to libraries that do not share memory.
    """
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

"""One call of a loss, after its arguments were checked and before a backend takes it."""

from __future__ import annotations

from typing import Any, NamedTuple

from cupylosses.definition.base import Definition


class Call(NamedTuple):
    """A call of a loss of any engine.

    Attributes:
        loss: The definition, or a modification of one (a weight, a mask, a tangent).
        arrays: The operands, then the other arrays that kernels read, in the order of the engine. All are present:
            optional arrays that a call leaves out are missing here, and ``static`` says so.
        static: Everything that a plan specialises on, as a hashable named tuple of the engine's.
        scalars: The numbers that kernels take at run time.
        normalizer: None, a float, or a 0-d array of any library that a mean divides by.
    """

    loss: Definition
    arrays: tuple[Any, ...]
    static: Any
    scalars: tuple[float, ...] = ()
    normalizer: Any = None


#: A call as a plain tuple, which is built in a fifth of the time.
Parts = tuple[Any, tuple[Any, ...], Any, tuple[float, ...], Any]

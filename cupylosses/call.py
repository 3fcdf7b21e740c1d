"""One call of a loss: its checked arguments, in the form in which engines pass them to backends."""

from __future__ import annotations

from typing import Any, NamedTuple

from cupylosses.definition.base import Definition


class Call(NamedTuple):
    """A call of a loss of any engine.

    Attributes:
        loss: The definition, or a modification of one (a weight, a mask, a tangent).
        arrays: The operands, then the other arrays that kernels read, in the engine's order. An optional array that the
            call omits has no entry here, and ``static`` records that.
        static: Everything that a plan specialises on, as a hashable named tuple that the engine defines.
        scalars: The numbers that kernels receive at run time.
        normalizer: Replacement for the divisor of a mean: None, a float, or an array of one number of any library.
    """

    loss: Definition
    arrays: tuple[Any, ...]
    static: Any
    scalars: tuple[float, ...] = ()
    normalizer: Any = None


#: A call as a plain tuple, which takes a fifth of the time to build.
Parts = tuple[Any, tuple[Any, ...], Any, tuple[float, ...], Any]

"""The functions: one per definition, with torch's names, arguments and results where torch has the loss.

Each takes torch tensors, CuPy arrays, NumPy arrays or anything with ``__dlpack__`` and returns what it was given. They
are built from the definitions when this module is imported; ``functional.pyi`` spells them out for editors.
"""

import cupylosses.losses  # noqa: F401  (importing it makes the definitions)
from cupylosses.build import function_of
from cupylosses.definition.registry import functions, registry

__all__ = [*registry(), *functions()]

globals().update({loss.name: function_of(loss) for loss in (*registry().values(), *functions().values())})

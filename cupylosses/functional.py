"""The public functions: one per definition, with torch's names, arguments and results where torch has the loss.

Each accepts torch tensors, CuPy arrays, NumPy arrays or any object with ``__dlpack__``, and returns arrays of the same
library. The functions are built from the definitions when this module is imported; ``functional.pyi`` spells them out
for editors.
"""

import cupylosses.losses  # noqa: F401  (importing it makes the definitions)
from cupylosses.build import function_of
from cupylosses.definition.registry import functions, registry

__all__ = [*registry(), *functions()]

globals().update({loss.name: function_of(loss) for loss in (*registry().values(), *functions().values())})

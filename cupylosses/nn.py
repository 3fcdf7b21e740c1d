"""A Module for each loss: a subclass of torch's where torch has one, with its constructor, repr and state.

The modules are built from the definitions; ``nn.pyi`` spells them out for editors. Calls take by keyword, beside the
operands, what every loss takes (``weight``, ``mask``, ``normalizer``, ``dim``, ``out_dtype``), and of losses of rows
what their functions take by keyword.
"""

from cupylosses import functional
from cupylosses.definition.registry import registry
from cupylosses.modules import module_of

_CLASSES = {x.class_name: module_of(getattr(functional, x.name)) for x in registry().values()}
globals().update(_CLASSES)

__all__ = [*_CLASSES, "module_of"]

"""A Module for each loss: a subclass of torch's where torch has one, with its constructor, repr and state.

The Modules are built from the definitions; ``nn.pyi`` spells them out for editors. Besides the operands, a call accepts
as keywords the arguments that every loss takes (``weight``, ``mask``, ``normalizer``, ``dim``, ``out_dtype``), or, for
losses of rows, the keyword arguments of their functions.
"""

from cupylosses import functional
from cupylosses.definition.registry import registry
from cupylosses.modules import module_of

_CLASSES = {x.class_name: module_of(getattr(functional, x.name)) for x in registry().values()}
globals().update(_CLASSES)

__all__ = [*_CLASSES, "module_of"]

"""Base class of kernels: a translation unit made of files of ``kernels/`` and the generated glue of one loss."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from cupylosses.definition.base import Definition
from cupylosses.jit import sources


class Kernel(ABC):
    """Kernel with a translation unit of its own. Subclasses are frozen dataclasses; equal instances have equal source.

    ``loss`` is the definition, for error messages; ``storage`` the dtypes of its operands; ``compute`` the dtype of the
    arithmetic; ``title`` a description of the kernel, for messages and file names; ``entry`` the name of its function.
    Each may be a field or a property.
    """

    if TYPE_CHECKING:

        @property
        def loss(self) -> Definition: ...
        @property
        def storage(self) -> tuple[str, ...]: ...
        @property
        def compute(self) -> str: ...
        @property
        def title(self) -> str: ...
        @property
        def entry(self) -> str: ...

    @property
    @abstractmethod
    def files(self) -> tuple[str, ...]:
        """Files of ``kernels/`` that the glue needs."""

    @property
    @abstractmethod
    def narrow(self) -> bool:
        """True if no array has more than 16 bits per element, so that the arithmetic need not be more accurate."""

    @property
    @abstractmethod
    def arguments(self) -> list[str]:
        """Declarations of the variable arguments, which come first in the signature."""

    @abstractmethod
    def glue(self) -> str:
        """Generated source: the loss as a functor, types, and the entry point."""

    def source(self) -> str:
        """Source of the translation unit."""
        precision = f"#define NARROW {str(self.narrow).lower()}\n"
        glue = self.glue()
        files = sources.without_unused_primitives(self.files, glue)
        return f'{precision}{sources.expand(files)}#line 1 "<{self.title}>"\n{glue}'

    @property
    def companions(self) -> tuple[str, ...]:
        """Kinds of kernels that a call always launches together."""
        return ()

    @property
    def together(self) -> tuple[Kernel, ...]:
        """This kernel and its companions, in a fixed order."""
        this: Any = self
        companions = self.companions
        if companions and this.kind in companions:
            return tuple([replace(this, kind=x) for x in companions])
        return (self,)

    def grid(self, planned: int, at_once: Callable[[], int]) -> int:
        """Returns the number of blocks to launch of ``planned``. ``at_once`` queries how many the GPU runs at once."""
        return planned

    @property
    def argument_format(self) -> str:
        """Format of the variable arguments for :mod:`struct`: "q" for an address or integer, "d" for a number."""
        return "".join("d" if x.startswith("double ") else "q" for x in self.arguments)

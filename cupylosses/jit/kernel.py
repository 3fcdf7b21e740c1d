"""A kernel as the compiler takes it: a translation unit of files of ``kernels/`` and the glue of one loss."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from cupylosses.definition.base import Definition
from cupylosses.jit import sources


class Kernel(ABC):
    """A kernel that is compiled by itself. Subclasses are frozen dataclasses: equal ones have equal source.

    ``loss`` is named in errors, ``storage`` are the dtypes of its operands and ``compute`` that of the arithmetic.
    ``title`` is the kernel in words, for messages and file names; ``entry`` the name of its function. Each may be a
    field or a property.
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
        """The files of ``kernels/`` that the glue needs."""

    @property
    @abstractmethod
    def narrow(self) -> bool:
        """True where nothing that is read or written has more than 16 bits: the arithmetic then keeps no more."""

    @property
    @abstractmethod
    def arguments(self) -> list[str]:
        """Declarations of the arguments that differ from call to call, which stand first."""

    @abstractmethod
    def glue(self) -> str:
        """The generated text: the loss as a functor, types, and the entry point."""

    def source(self) -> str:
        """The whole translation unit."""
        precision = f"#define NARROW {str(self.narrow).lower()}\n"
        return f'{precision}{sources.expand(self.files)}#line 1 "<{self.title}>"\n{self.glue()}'

    @property
    def argument_format(self) -> str:
        """The arguments that differ from call to call, for :mod:`struct`: "q" an address or integer, "d" a number."""
        return "".join("d" if x.startswith("double ") else "q" for x in self.arguments)

"""Abstract classes with one subclass per engine, which is selected by the definition that an instance is made for."""

from __future__ import annotations

from importlib import import_module
from typing import Any, ClassVar, TypeVar

from cupylosses.definition.base import Definition
from cupylosses.definition.registry import registry

_Kind = TypeVar("_Kind", bound="ByEngine")


class ByEngine:
    """Base of abstract classes with one subclass per engine; calling the abstract class creates the right subclass.

    ``class Check(ByEngine, modules="cupylosses.testing.{}.check")`` names the modules of the subclasses by the name of
    the engine. A module is imported when a definition of its engine first needs it. A subclass registers itself for its
    ``Definition``, the class of the engine's definitions.
    """

    Definition: ClassVar[type[Definition]]
    _modules: ClassVar[str]
    _classes: ClassVar[dict[type[Definition], Any]]

    def __init_subclass__(cls, modules: str | None = None, **options: Any) -> None:
        super().__init_subclass__(**options)
        if modules:
            cls._modules, cls._classes = modules, {}
        elif "Definition" in vars(cls):
            cls._classes[cls.Definition] = cls

    def __new__(cls, loss: Any = None, *_: Any, **__: Any) -> Any:
        return super().__new__(cls.of(loss) if "_modules" in vars(cls) else cls)

    @classmethod
    def of(cls: type[_Kind], loss: Definition) -> type[_Kind]:
        """Returns the subclass for a definition."""
        kind = loss.engine.Definition
        if kind not in cls._classes:
            import_module(cls._modules.format(loss.engine.name))
        return cls._classes[kind]

    @classmethod
    def classes(cls: type[_Kind]) -> list[type[_Kind]]:
        """Returns the subclasses of all engines that the library has losses of."""
        return list(dict.fromkeys(cls.of(loss) for loss in registry().values()))

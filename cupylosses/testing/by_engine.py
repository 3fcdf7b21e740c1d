"""Classes of which every engine has its own, found by the definition that they are made for."""

from __future__ import annotations

from importlib import import_module
from typing import Any, ClassVar, TypeVar

from cupylosses.definition.base import Definition
from cupylosses.definition.registry import registry

_Kind = TypeVar("_Kind", bound="ByEngine")


class ByEngine:
    """Base of abstract classes of which each engine has one subclass; calling the abstract class makes one of that.

    ``class Check(ByEngine, modules="cupylosses.testing.{}.check")`` says where the subclasses stand, by the name of the
    engine; the module is imported when a definition of that engine first asks for it. A subclass registers itself as
    that of its ``Definition``, the class of definitions that the engine has.
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
        """The subclass for a definition."""
        kind = loss.engine.Definition
        if kind not in cls._classes:
            import_module(cls._modules.format(loss.engine.name))
        return cls._classes[kind]

    @classmethod
    def classes(cls: type[_Kind]) -> list[type[_Kind]]:
        """The subclasses of all engines that the library has losses of."""
        return list(dict.fromkeys(cls.of(loss) for loss in registry().values()))

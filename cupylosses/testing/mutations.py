"""Seeded defects: the library with one line changed, to show that its checks would notice.

A mutant is a replacement in the text of a kernel file or of a module; text that is no longer there is an error, so that
a list of mutants cannot go stale unnoticed.
"""

from __future__ import annotations

import importlib
import inspect
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from cupylosses import codegen


class StaleMutant(Exception):
    """The text that a mutant replaces does not occur exactly once."""


@dataclass(frozen=True)
class Mutant:
    """One defect: ``old`` becomes ``new`` in ``file``, which is ``kernels/<name>.cuh`` or ``cupylosses/<name>.py``.

    ``caught_by`` names the checks that must fail.
    """

    name: str
    file: str
    old: str
    new: str
    caught_by: tuple[str, ...]

    @property
    def path(self) -> Path:
        """The file that is changed."""
        directory, _, name = self.file.partition("/")
        return codegen.kernel_directory() / name if directory == "kernels" else Path(codegen.__file__).parent / name

    def text(self) -> str:
        """The changed text.

        Raises:
            StaleMutant: ``old`` does not occur exactly once.
        """
        original = self.path.read_text(encoding="utf-8")
        if original.count(self.old) != 1:
            raise StaleMutant(f"{self.name}: {self.file} contains {original.count(self.old)} times: {self.old}")
        return original.replace(self.old, self.new)


@contextmanager
def applied(mutant: Mutant) -> Iterator[None]:
    """Within it the library has the defect. Enter host execution inside, not around it: plans must be new."""
    change = _changed_kernel if mutant.file.startswith("kernels/") else _changed_module
    with change(mutant.path, mutant.text()):
        yield


@contextmanager
def _changed_kernel(path: Path, text: str) -> Iterator[None]:
    with tempfile.TemporaryDirectory() as temporary:
        kernels = Path(shutil.copytree(path.parent, Path(temporary) / "kernels"))
        (kernels / path.name).write_text(text, encoding="utf-8")
        with mock.patch.object(codegen, "kernel_directory", lambda: kernels):
            codegen.skeleton.cache_clear()
            try:
                yield
            finally:
                codegen.skeleton.cache_clear()


def _dispatch_as_before(before: Any, now: Any, names: dict[str, Any]) -> None:
    """Gives a function that dispatches on a class those of before: the text has made its own anew, which nobody has an
    object of, and what other modules added is not in it.
    """
    for kind, function in getattr(before, "registry", {}).items():
        if kind is not object:
            now.register(kind, now.registry.get(names.get(kind.__name__), function))


@contextmanager
def _changed_module(path: Path, text: str) -> Iterator[None]:
    """Executes the text in the module that is there, and exchanges functions that other modules imported by name.
    Classes that they imported or inherited from stay as they were."""
    module = importlib.import_module(f"cupylosses.{path.stem}")
    before = {name: x for name, x in vars(module).items() if inspect.isfunction(x)}
    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(vars(module)))
        exec(compile(text, str(path), "exec"), vars(module))
        for name, function in before.items():
            _dispatch_as_before(function, vars(module)[name], vars(module))
        for other in [x for name, x in sys.modules.items() if name.startswith("cupylosses.") and x is not module]:
            changed = {n: vars(module)[n] for n, x in vars(other).items() if x is not None and before.get(n) is x}
            stack.enter_context(mock.patch.dict(vars(other), changed))
        yield

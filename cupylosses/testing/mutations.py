"""Seeded defects: the library with one line changed, to show that its checks would notice.

A mutant is a replacement in the text of a kernel file or of a module; text that is no longer there is an error, so that
a list of mutants cannot go stale unnoticed.
"""

from __future__ import annotations

import importlib
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
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
            codegen._skeleton.cache_clear()
            try:
                yield
            finally:
                codegen._skeleton.cache_clear()


@contextmanager
def _changed_module(path: Path, text: str) -> Iterator[None]:
    """Executes the text in the module that is there, for those who look names up in it at each call, as engine,
    launch and autograd are used. What other modules imported by name, or inherited from, stays as it was."""
    module = importlib.import_module(f"cupylosses.{path.stem}")
    with mock.patch.dict(vars(module)):
        exec(compile(text, str(path), "exec"), vars(module))
        yield

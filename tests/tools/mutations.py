"""Seeded defects: changes one line of the library, to show that its checks notice.

A mutant names the function that it changes, and a regular expression for the line that becomes wrong. Other lines,
their formatting and their order are free to change. If the expression does not match exactly once, the mutant is stale
and raises, so a list of mutants cannot lose its meaning unnoticed.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import cupylosses
from cupylosses.definition import kernel_sources
from cupylosses.definition.base import Definition
from cupylosses.jit import sources
from cupylosses.jit.sources import expand

PACKAGE = Path(cupylosses.__file__).parent


class StaleMutant(Exception):
    """The expression of a mutant does not match exactly once in its function."""


@dataclass(frozen=True)
class Mutant:
    """One defect: in ``function`` of ``file``, the match of ``pattern`` becomes ``new``.

    Attributes:
        name: The defect in words.
        file: ``kernels/<name>.cuh`` or ``cupylosses/<name>.py``.
        function: A function or class; if the file has several of that name, the pattern matches in one of them.
        pattern: A regular expression, in which a space matches any white space.
        new: The replacement, which may refer to groups of the pattern.
        caught_by: The checks that must fail.
        races: True if only the search for races notices it; without it, mutants compile in two thirds of the time.
    """

    name: str
    file: str
    function: str
    pattern: str
    new: str
    caught_by: tuple[str, ...]
    races: bool = False

    @property
    def path(self) -> Path:
        """The changed file."""
        directory, _, name = self.file.partition("/")
        return (kernel_sources.kernel_directory() if directory == "kernels" else PACKAGE) / name

    def text(self) -> str:
        """Returns the changed text.

        Raises:
            StaleMutant: The pattern does not match exactly once.
        """
        original = self.path.read_text(encoding="utf-8")
        bodies = python_bodies if self.path.suffix == ".py" else cuda_bodies
        pattern = re.compile(self.pattern.replace(" ", r"\s+"))
        # Keyed by position, since a struct contains its constructor, which has the same name.
        found = {
            match.start(): match
            for start, end in bodies(original, self.function)
            for match in pattern.finditer(original, start, end)
        }
        if len(found) != 1:
            where = f"`{self.function}` of {self.file}"
            raise StaleMutant(f"{self.name}: {where} matches {len(found)} times, expected once: {self.pattern}")
        (match,) = found.values()
        return original[: match.start()] + match.expand(self.new) + original[match.end() :]


def python_bodies(text: str, name: str) -> Iterator[tuple[int, int]]:
    """Yields the begin and end of each function or class of that name."""
    lines = [0]
    for line in text.splitlines(keepends=True):
        lines.append(lines[-1] + len(line))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name == name:
            yield lines[node.lineno - 1], lines[node.end_lineno or node.lineno]


def cuda_bodies(text: str, name: str) -> Iterator[tuple[int, int]]:
    """Yields the begin and end of the body of each function or struct of that name."""
    # A call has no brace after its arguments; constructors have initializers in between.
    head = re.compile(rf"\b(?:struct {name}\b[^;{{]*|{name}\((?:[^()]|\([^()]*\))*\)\s*(?:const\s*)?(?::[^;{{]*)?){{")
    for match in head.finditer(text):
        depth, end = 1, match.end()
        while depth:
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            end += 1
        yield match.end(), end


@contextmanager
def applied(mutant: Mutant) -> Iterator[None]:
    """Seeds the defect within this context. Enter host execution inside, not around it: plans must be new."""
    change = _changed_kernel if mutant.file.startswith("kernels/") else _changed_module
    with change(mutant.path, mutant.text()):
        yield


@contextmanager
def _changed_kernel(path: Path, text: str) -> Iterator[None]:
    with tempfile.TemporaryDirectory() as temporary:
        original = kernel_sources.kernel_directory()
        kernels = Path(shutil.copytree(original, Path(temporary) / "kernels"))
        (kernels / path.relative_to(original)).write_text(text, encoding="utf-8")
        with mock.patch.object(sources, "kernel_directory", lambda: kernels):
            expand.cache_clear()
            try:
                yield
            finally:
                expand.cache_clear()


@contextmanager
def _changed_module(path: Path, text: str) -> Iterator[None]:
    """Executes the text in the existing module.

    Functions and classes that other modules imported by name are replaced there, too. Classes that inherited from them
    keep the original.
    """
    module = importlib.import_module(".".join(["cupylosses", *path.relative_to(PACKAGE).with_suffix("").parts]))
    own = [(name, x) for name, x in vars(module).items() if inspect.isfunction(x) or inspect.isclass(x)]
    before = {name: x for name, x in own if x.__module__ == module.__name__}
    # A module of an engine creates a new engine, which becomes that of the definitions.
    engines = {x: x.engine for x in Definition.__subclasses__()}
    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(vars(module)))
        exec(compile(text, str(path), "exec"), vars(module))
        for other in [x for name, x in sys.modules.items() if name.startswith("cupylosses.") and x is not module]:
            changed = {n: vars(module)[n] for n, x in vars(other).items() if x is not None and before.get(n) is x}
            stack.enter_context(mock.patch.dict(vars(other), changed))
        try:
            yield
        finally:
            for kind, engine in engines.items():
                kind.engine = engine

"""Assembly of kernel sources: files of ``kernels/`` in one text, with their includes expanded."""

from __future__ import annotations

import re
from functools import cache

from cupylosses.definition.expressions import primitives
from cupylosses.definition.kernel_sources import kernel_directory

_INCLUDE = re.compile(r'#include "([^"]+)"')
_WORD = re.compile(r"\w+")

_PRIMITIVES, _OPERATORS = "primitives/primitives.cuh", "primitives/math.cuh"

#: Files that functors need: the primitives of expressions, on dual numbers.
FUNCTOR = ("core/types.cuh", "core/tuple.cuh", _PRIMITIVES)

_NESTED = "core/nested.cuh"


def nested(files: tuple[str, ...]) -> tuple[str, ...]:
    """Returns ``files`` for second derivatives: primitives are followed by overloads for nested dual numbers."""
    return (_NESTED, *files)


def without_unused_primitives(files: tuple[str, ...], glue: str) -> tuple[str, ...]:
    """Returns ``files`` without the files of primitives that the generated ``glue`` does not call.

    They would take a twentieth of the compile time of the gradient of ``mse_loss``.
    """
    words = set(_WORD.findall(glue))
    used = dict.fromkeys([_OPERATORS, *(x.file for x in primitives().values() if x.name in words)])
    return tuple([y for x in files for y in (used if x == _PRIMITIVES else (x,))])


@cache
def expand(files: tuple[str, ...]) -> str:
    """Returns the text of these files and all their includes, each file once, before the first one that includes it.

    CuPy compiles a string, so NVRTC has no directory to search. ``#line`` directives make the compiler report errors at
    their line of ``kernels/<file>``.
    """
    directory, text, seen = kernel_directory(), [], set()

    def add(name: str) -> None:
        if name in seen:
            return
        seen.add(name)
        located = False
        for number, line in enumerate((directory / name).read_text(encoding="utf-8").splitlines(), 1):
            include = _INCLUDE.fullmatch(line)
            if include:
                add(include[1])
                located = False
            elif line == "#pragma once" or (not line and not located):
                located = False
            else:
                if not located:
                    text.append(f'#line {number} "{name if name.startswith("/") else f"kernels/{name}"}"')
                text.append(line)
                located = True

    for name in files:
        add(name)
    return "\n".join([*text, ""])

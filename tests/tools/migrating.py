"""Pairs of calls in ``docs/migrating.md``: losses of other libraries, and those that replace them.

    python tests/tools/migrating.py    rewrites the numbers of the page; needs the libraries

The first code block of the page makes the operands, the code block of a section imports its library, and the first two
columns of a section's table are expressions of the operands.
"""

from __future__ import annotations

import importlib.util
import re
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

PAGE = Path(__file__).resolve().parents[2] / "docs" / "migrating.md"

#: Operands with respect to which libraries differentiate.
LEAVES = ("z", "p", "a", "b", "u", "v")

_ROW = re.compile(r"(?m)^\| `([^`]+)` \| `([^`]+)` \| *(\S*) *\| *(\S*) *\|$")


class Pair(NamedTuple):
    """Expressions of a loss in another library and in this one, and their printed values."""

    section: str
    there: str
    here: str
    returns: str
    returned: str


class Section(NamedTuple):
    """A library, the source that imports it, and its pairs."""

    title: str
    imports: str
    pairs: tuple[Pair, ...]


def sections(text: str | None = None) -> list[Section]:
    """Returns the sections of the page that have pairs."""
    _, *parts = re.split(r"(?m)^## ", text if text is not None else PAGE.read_text(encoding="utf-8"))
    found = []
    for part in parts:
        title = part.splitlines()[0]
        pairs = tuple([Pair(title, *x) for x in _ROW.findall(part)])
        block = re.search(r"(?s)```python\n(.*?)```", part)
        if pairs:
            found.append(Section(title, block[1] if block else "", pairs))
    return found


def operands() -> dict[str, Any]:
    """Returns the names that the first code block of the page defines, with floating operands as leaves."""
    namespace: dict[str, Any] = {}
    exec(PAGE.read_text(encoding="utf-8").split("```python\n")[1].split("```")[0], namespace)
    return as_leaves(namespace)


def random_operands(seed: int) -> dict[str, Any]:
    """Returns random operands with the same names: more classes and voxels, an absent class, ignored voxels."""
    generator = torch.Generator().manual_seed(seed)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, dtype=torch.float64)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    z = 2 * normal(3, 4, 6, 5)
    y = torch.randint(0, 4, (3, 6, 5), generator=generator)
    y[1][y[1] == 3] = 0
    boxes = [torch.cat((x, x + 0.1 + uniform(7, 2)), -1) for x in (uniform(7, 2), uniform(7, 2))]
    u = normal(5, 8)
    made = {
        "z": z,
        "p": z.softmax(1),
        "y": y,
        "i": torch.where(uniform(3, 6, 5) < 0.2, 255, y),
        "h": torch.nn.functional.one_hot(y, 4).movedim(-1, 1).double(),
        "t": (uniform(3, 4, 6, 5) < 0.4).double(),
        "q": (2 * normal(3, 4, 6, 5)).softmax(1),
        "w": 0.5 + uniform(4),
        "a": boxes[0],
        "b": boxes[1],
        "u": u,
        "v": u + normal(5, 8),
    }
    return as_leaves({**operands(), **made})


def as_leaves(namespace: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the names, with those in :data:`LEAVES` as tensors of their own that require gradients."""
    return {**namespace, **{x: namespace[x].detach().clone().requires_grad_() for x in LEAVES}}


def evaluate(expression: str, namespace: Mapping[str, Any]) -> tuple[float, dict[str, Tensor]]:
    """Returns the value of an expression of the page, and the gradients of the operands that it names."""
    value = eval(expression, dict(namespace))
    named = [x for x in LEAVES if re.search(rf"\b{x}\b", expression)]
    gradients = torch.autograd.grad(value, [namespace[x] for x in named])
    return value.item(), dict(zip(named, gradients, strict=True))


def library(section: Section) -> dict[str, Any]:
    """Returns the names that the section imports. Raises ImportError if the library is not installed."""
    declare_operators_of_torchvision()
    namespace: dict[str, Any] = {"torch": torch}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(section.imports, namespace)
    return namespace


_declared: list[torch.library.Library] = []


def declare_operators_of_torchvision() -> None:
    """Makes a torchvision that is built for CUDA importable next to a torch that is not.

    Its compiled operators cannot be loaded there, although its Python code registers more for two of them: this
    declares the two. Losses need no operators, and other libraries only import torchvision.
    """
    found = importlib.util.find_spec("torchvision")
    if found is None or found.origin is None or _declared or "torchvision" in sys.modules:
        return
    try:
        torch.ops.load_library(next(Path(found.origin).parent.glob("_C*")))
    except (OSError, StopIteration):
        _declared.append(torch.library.Library("torchvision", "DEF"))
        for name in ("nms", "qnms"):
            _declared[0].define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def main() -> None:
    """Rewrites the numbers of all sections whose library is installed."""
    text = PAGE.read_text(encoding="utf-8")
    for section in sections(text):
        try:
            names = {**operands(), **library(section)}
        except ImportError as error:
            print(f"{section.title}: {error}")
            continue
        for pair in section.pairs:
            values = [f"{evaluate(x, names)[0]:.12f}" for x in (pair.there, pair.here)]
            line = f"| `{pair.there}` | `{pair.here}` | {values[0]} | {values[1]} |"
            text = _ROW.sub(lambda x, p=pair, new=line: new if x.group(1, 2) == (p.there, p.here) else x[0], text)
    PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    sys.path.insert(0, str(PAGE.parents[1]))
    main()

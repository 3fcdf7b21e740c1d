"""The expressions of a definition: what they may contain, checked before a compiler sees them.

An expression is one in C++, of the operands, parameters, flags and named parts of its loss, of numbers, operators and
the primitives in ``kernels/math.cuh``. It is executed on the GPU as it stands. So nothing else may stand in it, and
what is wrong is reported at the line where it was written.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from typing import NamedTuple

from cupylosses.kernel_sources import kernel_directory

_TOKEN = re.compile(
    r"(?P<space>\s+)"
    r"|(?P<number>(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)"
    r"|(?P<name>[A-Za-z_]\w*)"
    r"|(?P<operator>\*\*|<=|>=|==|!=|&&|\|\||[-+*/<>!(),])"
    r"|(?P<other>.)"
)

#: What people write who think of Python or C, and what to write instead.
_INSTEAD = {
    "**": "square(x) or pow(x, y)",
    "^": "square(x) or pow(x, y)",
    "?": "where(condition, a, b)",
    ":": "where(condition, a, b)",
    "&": "&&",
    "|": "||",
    "=": "==, or a name in `let`",
    "and": "&&",
    "or": "||",
    "not": "!",
    "if": "where(condition, a, b)",
    "else": "where(condition, a, b)",
    "max": "where(a > b, a, b)",
    "min": "where(a < b, a, b)",
}

_CONSTANTS = ("true", "false")


class Primitive(NamedTuple):
    """A function that expressions may call: its parameters, and the comment that stands above it."""

    name: str
    parameters: tuple[str, ...]
    comment: str


class ExpressionError(ValueError):
    """An expression of a loss is wrong; the message says where it stands, what is wrong, and what is meant perhaps."""


_PRIMITIVE = re.compile(
    r"(?P<comment>(?://.*\n)*)"
    r"template <[^\n]*>\n"
    r"__device__ __forceinline__ (?:auto|Dual<[^\n]*>) (?P<name>\w+)\((?P<parameters>[^)]*)\)"
)


@cache
def primitives() -> Mapping[str, Primitive]:
    """The primitives by name, in the order of ``kernels/math.cuh``."""
    found = {}
    for match in _PRIMITIVE.finditer((kernel_directory() / "math.cuh").read_text(encoding="utf-8")):
        names = [x.split()[-1].lstrip("&") for x in match["parameters"].split(",") if not x.rstrip().endswith(">")]
        comment = " ".join(line.strip("/ ") for line in match["comment"].splitlines())
        found[match["name"]] = Primitive(match["name"], tuple(x for x in names if x.isidentifier()), comment)
    return found


class _Token(NamedTuple):
    kind: str
    text: str
    position: int


def _tokens(expression: str) -> Iterator[_Token]:
    for match in _TOKEN.finditer(expression):
        if match.lastgroup != "space":
            yield _Token(str(match.lastgroup), match[0], match.start())


def check(expression: str, names: Collection[str], where: str) -> None:
    """Raises :class:`ExpressionError` if an expression contains anything but these names, numbers, operators and
    primitives; ``where`` says whose it is.
    """
    tokens = list(_tokens(expression))
    if not tokens:
        raise ExpressionError(f"{where} is empty; an expression of {', '.join(names)} is needed.")
    known = {*names, *primitives()}
    for token, after in zip(tokens, [*tokens[1:], _Token("end", "", len(expression))], strict=True):
        line = expression[: token.position].count("\n")
        at = f"{where}" if not line else f"{where}, line {line + 1}"
        called = after.text == "("
        if token.kind == "other" or token.text == "**" or (token.text in _INSTEAD and token.text not in known):
            hint = f"; write {_INSTEAD[token.text]}" if token.text in _INSTEAD else ""
            raise ExpressionError(f"{at}: `{token.text}` cannot stand in an expression{hint}.")
        if token.kind != "name" or (not called and (token.text in names or token.text in _CONSTANTS)):
            continue
        if called and token.text in primitives():
            _check_call(tokens, tokens.index(token), at)
            continue
        raise ExpressionError(f"{at}: {_unknown(token.text, called, names)}")
    _check_parentheses(tokens, where)


def _unknown(name: str, called: bool, names: Collection[str]) -> str:
    known = list(primitives()) if called else [*names, *_CONSTANTS]
    kind = "function" if called else "name"
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    if called and name in names:
        return f"`{name}` is no function; there is an operator missing before the parenthesis."
    if not called and name in primitives():
        return f"`{name}` is a function: `{name}({', '.join(primitives()[name].parameters)})`."
    hint = f"did you mean `{near[0]}`?" if near else f"there are {', '.join(known)}."
    return f"the {kind} `{name}` is unknown; {hint}"


def _check_call(tokens: list[_Token], at: int, where: str) -> None:
    depth, arguments = 0, 1
    for token in tokens[at + 1 :]:
        depth += (token.text == "(") - (token.text == ")")
        if depth == 0:
            break
        arguments += token.text == "," and depth == 1
    if tokens[at + 2 : at + 3] and tokens[at + 2].text == ")":
        arguments = 0
    wanted = primitives()[tokens[at].text]
    if arguments != len(wanted.parameters):
        call = f"{wanted.name}({', '.join(wanted.parameters)})"
        raise ExpressionError(f"{where}: `{call}` takes {len(wanted.parameters)} arguments, got {arguments}.")


def _check_parentheses(tokens: list[_Token], where: str) -> None:
    depth = 0
    for token in tokens:
        depth += (token.text == "(") - (token.text == ")")
        if depth < 0:
            break
    if depth:
        raise ExpressionError(f"{where}: the parentheses do not match.")


def cuda(expression: str) -> str:
    """The expression as the compiler gets it: ``1`` is ``1.0``, so that ``1 / 2`` is a half."""
    return "".join(
        f"{m[0]}.0" if m.lastgroup == "number" and m[0].isdigit() else m[0] for m in _TOKEN.finditer(expression)
    )

"""Grammar of the expressions of a definition, checked before a compiler sees them.

An expression is a C++ expression of the operands, parameters, flags and named parts of its loss, of numbers, operators
and the primitives in ``kernels/``. The GPU executes it verbatim, so nothing else is accepted, and errors are reported
at the line where the expression was written.
"""

from __future__ import annotations

import ast
import difflib
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple, NoReturn

from cupylosses.definition.kernel_sources import PRIMITIVES, kernel_directory

_TWO_MINUSES = re.compile(r"-(?=-)")
_TOKEN = re.compile(
    r"(?P<space>[ \t\r\n]+)"
    r"|(?P<number>(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)"
    r"|(?P<name>[A-Za-z_]\w*)"
    r"|(?P<operator>\*\*|<=|>=|==|!=|&&|\|\||[-+*/<>!(),])"
    r"|(?P<other>.)",
    re.ASCII | re.DOTALL,
)

#: Tokens of Python and C that expressions do not support, and their replacements.
_INSTEAD = {
    "**": "square(x), or a product",
    "^": "square(x), or a product",
    "?": "where(condition, a, b)",
    ":": "where(condition, a, b)",
    "if": "where(condition, a, b)",
    "else": "where(condition, a, b)",
    "max": "where(a > b, a, b)",
    "min": "where(a < b, a, b)",
    "&": "&&",
    "|": "||",
    "and": "&&",
    "or": "||",
    "not": "!",
    "=": "==, or a name in `let`",
    "True": "true",
    "False": "false",
}

_CONSTANTS = ("true", "false")
_COMPARISONS = frozenset({"<", "<=", ">", ">=", "==", "!="})

#: Tokens of lower precedence than comparisons: a comparison after one of them does not chain to an earlier one.
_LOOSER = frozenset({"&&", "||", ","})


class Primitive(NamedTuple):
    """A function that expressions may call.

    ``comment`` is the comment above its definition, ``file`` the file of ``kernels/`` that defines it.
    """

    name: str
    parameters: tuple[str, ...]
    comment: str
    file: str

    @property
    def call(self) -> str:
        """Source text of a call, with the names of the parameters as arguments."""
        return f"{self.name}({', '.join(self.parameters)})"


class ExpressionError(ValueError):
    """Raised for an invalid expression of a loss. The message has its file and line, the problem, and a suggestion."""


_PRIMITIVE = re.compile(
    r"(?P<comment>(?://.*\n)*)"
    r"template <[^\n]*>\n"
    r"__device__ __forceinline__ (?:auto|Dual<[^\n]*>) (?P<name>\w+)\((?P<parameters>[^)]*)\)"
)


@cache
def primitives() -> Mapping[str, Primitive]:
    """The primitives by name, in the order of their files."""
    by_name = {}
    for file in PRIMITIVES:
        for match in _PRIMITIVE.finditer((kernel_directory() / file).read_text(encoding="utf-8")):
            names = [x.split()[-1].lstrip("&") for x in match["parameters"].split(",") if not x.rstrip().endswith(">")]
            comment = " ".join(line.strip("/ ") for line in match["comment"].splitlines())
            by_name[match["name"]] = Primitive(
                match["name"], tuple(x for x in names if x.isidentifier()), comment, file
            )
    return by_name


class Part(NamedTuple):
    """Location of an expression: the loss, the field or name, and the file and line of its first line, if known."""

    loss: str
    name: str
    place: tuple[str, int] | None = None

    def line(self, number: int) -> str:
        """Text that locates a line of the expression in messages; lines are counted from 0."""
        if self.place:
            file, first = self.place
            return f"{self.loss}: {self.name}, {file}:{first + number}"
        return f"{self.loss}: {self.name}, line {number + 1}" if number else f"{self.loss}: {self.name}"


class _Token(NamedTuple):
    kind: str
    text: str
    position: int


@dataclass
class _Level:
    """State of one level of parentheses, or of the outermost level.

    ``opened`` is the token that opened it; ``function`` is the primitive if the level is a call; ``arguments`` is the
    number of arguments so far; ``compared`` is True after a comparison that another one would chain to.
    """

    opened: _Token | None = None
    function: Primitive | None = None
    arguments: int = 1
    compared: bool = False


def check(
    expression: str, names: Collection[str], part: Part, functions: Mapping[str, Primitive] | None = None
) -> None:
    """Raises :class:`ExpressionError` unless ``expression`` is well formed and uses only these names and functions.

    ``functions`` are the primitives by default.
    """
    if not isinstance(expression, str):
        raise TypeError(f"{part.line(0)}: an expression is a string, got {type(expression).__name__}.")
    _Checker(expression, names, part, primitives() if functions is None else functions).run()


class _Checker:
    """Token-by-token checker with two states: either a term (number, name, call) or an operator must follow."""

    def __init__(self, expression: str, names: Collection[str], part: Part, functions: Mapping[str, Primitive]) -> None:
        self.expression, self.names, self.part, self.functions = expression, names, part, functions
        self.levels = [_Level()]

    def run(self) -> None:
        matches = [x for x in _TOKEN.finditer(self.expression) if x.lastgroup != "space"]
        tokens = [_Token(str(x.lastgroup), x[0], x.start()) for x in matches]
        if not tokens:
            raise ExpressionError(f"{self.part.line(0)}: the expression is empty; there are {', '.join(self.names)}.")
        before, complete = None, False
        for token, following in zip(tokens, [*tokens[1:], None], strict=True):
            self.check_token(token, following is not None and following.text == "(")
            complete = self.go_on(token) if complete else self.begin(token, before)
            before = token
        if not complete:
            self.fail(tokens[-1], f"something is missing after `{tokens[-1].text}`.")
        if self.levels[-1].opened:
            self.fail(self.levels[-1].opened, "the parentheses do not match: this one is not closed.")

    def check_token(self, token: _Token, called: bool) -> None:
        """Raises if the token is invalid anywhere in an expression."""
        text = token.text
        if token.kind == "other" or text == "**" or (text in _INSTEAD and text not in {*self.names, *self.functions}):
            hint = f"; write {_INSTEAD[text]}" if text in _INSTEAD else ""
            shown = text if text.isprintable() else ascii(text)[1:-1]
            self.fail(token, f"`{shown}` cannot stand in an expression{hint}.")
        if token.kind == "number" and math.isinf(float(text)):
            self.fail(token, f"`{text}` is beyond the largest number, 1.8e308.")
        if token.kind == "name" and text not in (self.functions if called else (*self.names, *_CONSTANTS)):
            self.fail(token, self.unknown(text, called))

    def begin(self, token: _Token, before: _Token | None) -> bool:
        """Consumes a token where a term must begin; returns True if the token completes the term."""
        if token.text == "(":
            function = self.functions.get(before.text) if before else None
            self.levels.append(_Level(before if function else token, function))
            return False
        if token.text == ")" and self.levels[-1].function and before and before.text == "(":
            self.levels[-1].arguments = 0
            self.close(token)
            return True
        if token.kind == "operator" and token.text not in ("-", "!"):
            side = f"between `{before.text}` and `{token.text}`" if before else f"before `{token.text}`"
            self.fail(token, f"something is missing {side}.")
        return token.kind != "operator" and token.text not in self.functions

    def go_on(self, token: _Token) -> bool:
        """Consumes a token after a complete term; returns True if the term is still complete."""
        level = self.levels[-1]
        if token.kind != "operator" or token.text in ("(", "!"):
            self.fail(token, f"an operator is missing before `{token.text}`.")
        if token.text == ")":
            self.close(token)
            return True
        if token.text == ",":
            if not level.function:
                self.fail(token, "a comma separates the arguments of a call, and stands nowhere else.")
            level.arguments += 1
        if token.text in _COMPARISONS:
            if level.compared:
                self.fail(token, "comparisons do not chain; write `a < b && b < c`.")
            level.compared = True
        elif token.text in _LOOSER:
            level.compared = False
        return False

    def close(self, token: _Token) -> None:
        """Consumes a closing parenthesis, and checks the number of arguments if it ends a call."""
        level = self.levels.pop()
        if not level.opened:
            self.fail(token, "the parentheses do not match: this one closes none.")
        if level.function and level.arguments != (count := len(level.function.parameters)):
            takes = f"takes {count} argument{'s' * (count != 1)}, got {level.arguments}"
            self.fail(level.opened, f"`{level.function.call}` {takes}.")

    def unknown(self, name: str, called: bool) -> str:
        """Error message for a name that does not exist, or cannot be used in this role."""
        if called and name in self.names:
            return f"`{name}` is no function; an operator is missing before the parenthesis."
        if not called and name in self.functions:
            return f"`{name}` is a function: `{self.functions[name].call}`."
        if called and not self.functions:
            return f"`{name}` cannot be called here: a constant is arithmetic on parameters."
        known = list(self.functions) if called else [*self.names, *_CONSTANTS]
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        hint = f"did you mean `{near[0]}`?" if near else f"there are {', '.join(known)}."
        return f"the {'function' if called else 'name'} `{name}` is unknown; {hint}"

    def fail(self, token: _Token, message: str) -> NoReturn:
        """Raises the error, with the line of the token and a marker below it."""
        start = self.expression.rfind("\n", 0, token.position) + 1
        line = self.expression[start:].partition("\n")[0].rstrip()
        margin = len(line) - len(line.lstrip())
        mark = " " * (token.position - start - margin) + "^" * len(token.text)
        where = self.part.line(self.expression.count("\n", 0, token.position))
        raise ExpressionError(f"{where}: {message}\n    {line.strip()}\n    {mark}")


def cuda(expression: str) -> str:
    """CUDA source of an expression. ``1`` becomes ``1.0``, so that ``1 / 2`` is a half; ``a--b`` becomes ``a- -b``."""
    pieces = (f"{m[0]}.0" if m.lastgroup == "number" and m[0].isdigit() else m[0] for m in _TOKEN.finditer(expression))
    return _TWO_MINUSES.sub("- ", "".join(pieces)).replace("\r", " ")


def factors(expression: str) -> tuple[str, str] | None:
    """Splits an expression that is written as a product (or a square) into two factors; None if it is not one."""
    tokens, depth, split, other = [x for x in _TOKEN.finditer(expression) if x.lastgroup != "space"], 0, None, False
    closed = 0
    for i, m in enumerate(tokens):
        depth += (m[0] == "(") - (m[0] == ")")
        if depth == 0 and m.lastgroup == "operator" and m[0] not in ("(", ")"):
            split, other = (m.start(), other) if m[0] == "*" else (split, True)
        if depth == 0 and m[0] == ")":
            closed = closed or i
    if split is not None and not other:
        return expression[:split], expression[split + 1 :]
    if tokens[0][0] == "square" and closed == len(tokens) - 1:
        inner = expression[tokens[1].end() : tokens[-1].start()]
        return inner, inner
    return None


def in_double(expression: str) -> str:
    """CUDA source of a constant in terms of double-precision values, whose names end in an underscore."""
    tokens = _TOKEN.finditer(cuda(expression))
    return "".join(f"{m[0]}_" if m.lastgroup == "name" and m[0] not in _CONSTANTS else m[0] for m in tokens)


def names_in(expression: str) -> set[str]:
    """The names that an expression uses."""
    return {m[0] for m in _TOKEN.finditer(expression) if m.lastgroup == "name" and m[0] not in _CONSTANTS}


_IN_PYTHON = {"&&": "and", "||": "or", "!": "~"}


@cache
def tree(expression: str) -> ast.expr:
    """Syntax tree of a checked expression as Python, which has the same precedence; ``!`` becomes ``~``."""
    pieces = [" " if m.lastgroup == "space" else f" {_IN_PYTHON.get(m[0], m[0])} " for m in _TOKEN.finditer(expression)]
    return ast.parse("".join(pieces).strip(), mode="eval").body

"""The second derivatives of a loss that are zero wherever they exist, read off its expression.

An expression is evaluated on operands that know nothing but their names: each step adds up what its result depends on,
and the pairs of operands along which the result is curved. A sum is curved as its terms are, a product along the pairs
of its factors too, and a primitive along all pairs of what it depends on, unless it is piecewise linear.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from cupylosses.definition.base import Flag
from cupylosses.definition.expressions import tree

Pairs = frozenset[tuple[str, str]]

#: Pairs of arguments along which a primitive is curved, where these are not all; conditions are no arguments of it.
_CURVED: Mapping[str, tuple[tuple[int, int], ...]] = {
    "abs": (),
    "at_least": (),
    "kl_term": ((0, 0), (0, 1)),
    "kl_term_of_log": ((0, 0), (0, 1)),
    "larger": (),
    "nan_unless": (),
    "percentage_error": ((0, 1), (1, 1)),
    "relu_active": (),
    "relu_inactive": (),
    "smaller": (),
    "times_log": ((0, 0), (0, 1)),
    "where": (),
    "zero_unless_nan": (),
}


class Dependence(NamedTuple):
    """The operands that a number depends on, the pairs of them along which it is curved, in both orders, and its value
    if it is a flag's.
    """

    operands: frozenset[str] = frozenset()
    curved: Pairs = frozenset()
    flag: bool | None = None


def _pairs(a: Dependence, b: Dependence) -> Pairs:
    return frozenset(pair for x in a.operands for y in b.operands for pair in ((x, y), (y, x)))


def joined(parts: Sequence[Dependence], curved: Sequence[tuple[int, int]]) -> Dependence:
    """A function of numbers that is curved along these pairs of them, by position."""
    operands = frozenset[str]().union(*(x.operands for x in parts))
    own = (_pairs(parts[i], parts[j]) for i, j in curved)
    return Dependence(operands, frozenset[tuple[str, str]]().union(*(x.curved for x in parts), *own))


def evaluate(expression: str, known: Mapping[str, Dependence]) -> Dependence:
    """The operands that an expression depends on, and is curved along; ``known`` are its names, but for numbers."""
    found: Dependence = _Evaluation(known).visit(tree(expression))
    return found


def of_names(names: Sequence[str]) -> dict[str, Dependence]:
    """Operands of these names."""
    return {x: Dependence(frozenset([x])) for x in names}


def of_flags(flags: Sequence[Flag], choices: Sequence[int]) -> dict[str, Dependence]:
    """Flags and what was chosen, by name."""
    chosen = zip(flags, choices, strict=True)
    return {x.name: Dependence(flag=bool(i) if len(x.choices) == 2 else None) for x, i in chosen}


def vanishing(names: Sequence[str], moving: Sequence[bool], curved: Pairs) -> tuple[bool, ...]:
    """True for each operand by which the derivative along tangents of the ``moving`` operands has a derivative of 0."""
    along = [x for x, moves in zip(names, moving, strict=True) if moves]
    return tuple([not any((x, y) in curved for y in along) for x in names])


class _Evaluation(ast.NodeVisitor):
    def __init__(self, known: Mapping[str, Dependence]) -> None:
        self.known = known

    def visit_Constant(self, node: ast.Constant) -> Dependence:
        return Dependence()

    def visit_Name(self, node: ast.Name) -> Dependence:
        if node.id in ("true", "false"):
            return Dependence(flag=node.id == "true")
        return self.known.get(node.id, Dependence())

    def visit_Compare(self, node: ast.Compare) -> Dependence:
        return Dependence()

    def visit_BoolOp(self, node: ast.BoolOp) -> Dependence:
        flags = [self.visit(x).flag for x in node.values]
        decisive = isinstance(node.op, ast.Or)
        if decisive in flags:
            return Dependence(flag=decisive)
        return Dependence(flag=None if None in flags else not decisive)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> Dependence:
        found: Dependence = self.visit(node.operand)
        if isinstance(node.op, ast.USub):
            return found._replace(flag=None)
        return Dependence(flag=None if found.flag is None else not found.flag)

    def visit_BinOp(self, node: ast.BinOp) -> Dependence:
        parts = [self.visit(node.left), self.visit(node.right)]
        curved = {ast.Mult: ((0, 1),), ast.Div: ((0, 1), (1, 1))}.get(type(node.op), ())
        return joined(parts, curved)

    def visit_Call(self, node: ast.Call) -> Dependence:
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        parts: list[Dependence] = [self.visit(x) for x in node.args]
        if name == "where":
            if parts[0].flag is not None:
                return parts[1 if parts[0].flag else 2]
            parts = parts[1:]
        every = [(i, j) for i in range(len(parts)) for j in range(i + 1)]
        found = joined(parts, _CURVED.get(name, every))
        return Dependence() if name == "zero_unless_nan" else found

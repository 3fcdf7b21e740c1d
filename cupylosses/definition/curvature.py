"""Static analysis of an expression: the second derivatives that are zero wherever they exist.

An abstract interpretation propagates, instead of numbers, the operands that a result depends on and the pairs of
operands with respect to which its second derivative may be nonzero: the result is called curved along these pairs. A
sum is curved along the pairs of its terms. A product is also curved along each pair of an operand of one factor and an
operand of the other. A primitive is curved along all pairs of operands that its arguments depend on, except for those
in ``_CURVED``; the piecewise linear ones add no pairs.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from cupylosses.definition.base import Flag
from cupylosses.definition.expressions import tree

Pairs = frozenset[tuple[str, str]]

#: Pairs of arguments, by position, along which a primitive is curved, for primitives that are not curved along all
#: pairs. The condition of ``where`` is not counted as an argument.
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
    """Abstract value of a subexpression.

    ``operands`` are those that it depends on, ``curved`` the pairs of them along which it is curved, in both orders.
    ``flag`` is its truth value if flags determine it, otherwise None.
    """

    operands: frozenset[str] = frozenset()
    curved: Pairs = frozenset()
    flag: bool | None = None


def _pairs(a: Dependence, b: Dependence) -> Pairs:
    return frozenset(pair for x in a.operands for y in b.operands for pair in ((x, y), (y, x)))


def joined(parts: Sequence[Dependence], curved: Sequence[tuple[int, int]]) -> Dependence:
    """Abstract value of a function of ``parts`` that is curved along the given pairs of arguments, by position."""
    operands = frozenset[str]().union(*(x.operands for x in parts))
    pairs = (_pairs(parts[i], parts[j]) for i, j in curved)
    return Dependence(operands, frozenset[tuple[str, str]]().union(*(x.curved for x in parts), *pairs))


def evaluate(expression: str, known: Mapping[str, Dependence]) -> Dependence:
    """Abstract value of an expression; ``known`` holds the values of its names, except for plain numbers."""
    value: Dependence = _Evaluation(known).visit(tree(expression))
    return value


def of_names(names: Sequence[str]) -> dict[str, Dependence]:
    """Abstract values of operands, by name."""
    return {x: Dependence(frozenset([x])) for x in names}


def of_flags(flags: Sequence[Flag], choices: Sequence[int]) -> dict[str, Dependence]:
    """Abstract values of flags, by name; the truth value is known if a flag has two choices."""
    pairs = zip(flags, choices, strict=True)
    return {x.name: Dependence(flag=bool(i) if len(x.choices) == 2 else None) for x, i in pairs}


def vanishing(names: Sequence[str], moving: Sequence[bool], curved: Pairs) -> tuple[bool, ...]:
    """True for each operand with respect to which the JVP along tangents of the ``moving`` operands has gradient 0."""
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
        operand: Dependence = self.visit(node.operand)
        if isinstance(node.op, ast.USub):
            return operand._replace(flag=None)
        return Dependence(flag=None if operand.flag is None else not operand.flag)

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
        all_pairs = [(i, j) for i in range(len(parts)) for j in range(i + 1)]
        value = joined(parts, _CURVED.get(name, all_pairs))
        return Dependence() if name == "zero_unless_nan" else value

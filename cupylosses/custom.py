"""Losses of users: defined as those of the library are, with everything that these have."""

from __future__ import annotations

import ast
import linecache
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from cupylosses.build import function_of
from cupylosses.definition.base import Flag, Kink, Operand, Parameter
from cupylosses.engines.pointwise.definition import Loss


def define_loss(
    name: str,
    value: str,
    operands: Sequence[str | Operand] = ("input", "target"),
    parameters: Mapping[str, float] | Sequence[Parameter] = (),
    *,
    let: Mapping[str, str] | None = None,
    constants: Mapping[str, str] | None = None,
    derivatives: Mapping[str, str] | None = None,
    reference: Callable[..., Any] | None = None,
    flags: Mapping[str, bool] | Sequence[Flag] = (),
    summary: str = "",
    formula: str = "",
    kinks: Callable[..., Sequence[Kink]] | None = None,
    convention: str | None = None,
    cases: Sequence[Mapping[str, Any]] = ({},),
    notes: str = "",
    source: str = "",
) -> Callable[..., Any]:
    """Makes a loss of your own from one expression.

        tukey_loss = define_loss(
            "tukey_loss",
            "where(abs(d) < c, c * c / 6 * (1 - cube), c * c / 6)",
            parameters={"c": 4.685},
            let={"d": "input - target", "inside": "1 - square(d / c)", "cube": "inside * square(inside)"},
        )
        tukey_loss(prediction, target, c=3.0).backward()

    The function has what the library's have: gradients of every floating operand in one pass, reductions, weights,
    masks, normalizers, dimensions, CuPy arrays, ``value_and_grad``, and a Module
    (``cupylosses.nn.module_of(tukey_loss)``). docs/own-losses.md is a tutorial.

    The expression is compiled and executed on the GPU: it is code, to be trusted like code. What may stand in it is
    checked, and parameters and tensors reach the kernel as numbers and addresses, never as text.

    Args:
        name: The function's name, an identifier. Several losses may have the same.
        value: The value of an element: an expression of the operands, the parameters, the flags and the names in
            ``let``, with numbers, ``+ - * /``, comparisons, ``&& || !`` and the primitives of docs/adding-a-loss.md.
            Nothing has to be differentiated.
        operands: The tensor arguments in their order: names, or :class:`Operand`.
        parameters: The numbers that the kernel takes: names with defaults, or :class:`Parameter`.
        let: Named parts of the expression, each of which sees those before it.
        constants: Named numbers that follow from the parameters by arithmetic, ``{"rest": "1 - alpha"}``; each sees
            those before it. They are computed in float64 and rounded once.
        derivatives: The derivative of the value with respect to an operand by hand, where the one of the expression
            loses digits.
        reference: The same loss by the array API, ``reference(xp, *operands, **parameters)``. What does not run kernels
            takes it: CPU arrays, empty operands, tensor subclasses, third derivatives. Without it these raise.
        flags: Bools that select a variant of the kernel: names with defaults, or :class:`Flag`.
        summary, formula, convention, notes, source: For the docstring.
        kinks, cases: For tests; see docs/adding-a-loss.md.

    Returns:
        The function.

    Raises:
        ExpressionError: an expression that contains something else, at its file and line. What only the compiler finds
            is reported there too, when the kernel is first needed.
        TypeError: an expression that is no string.
        ValueError: names that collide or are none, defaults out of range.
    """
    frame = sys._getframe(1)
    let, constants, derivatives = dict(let or {}), dict(constants or {}), dict(derivatives or {})
    parts = {**constants, **let, "value": value, **{f"derivatives.{n}": x for n, x in derivatives.items()}}
    given: dict[str, Any] = {} if kinks is None else {"kinks": kinks}
    loss = Loss(
        name=name,
        summary=summary or f"The loss {name}.",
        formula=formula or " ".join(str(value).split()),
        operands=_operands(name, operands),
        value=value,
        reference=reference,
        let=let,
        constants=constants,
        derivatives=derivatives,
        parameters=_specified(name, "parameters", parameters, Parameter, lambda n, x: Parameter(n, x, "A number.")),
        flags=_specified(name, "flags", flags, Flag, lambda n, x: Flag(n, x, "A choice.")),
        cases=tuple(cases),
        notes=notes,
        source=source,
        places=_places(parts, frame.f_code.co_filename, frame.f_lineno),
        convention=convention or "At kinks it is what the primitives have there.",
        **given,
    )
    module = str(frame.f_globals.get("__name__", "__main__"))
    return function_of(loss, module)


def _operands(loss: str, given: Sequence[str | Operand]) -> tuple[Operand, ...]:
    if isinstance(given, str):
        raise TypeError(
            f"define_loss: the `operands` of {loss} must be a sequence of names or of Operand, got {given!r}; for "
            'example operands=("input", "target").'
        )
    # Labels may be integers; the first operand is what is predicted.
    named = [x if isinstance(x, Operand) else Operand(x, "A tensor.", integer=i > 0) for i, x in enumerate(given)]
    return tuple(named)


def _specified(loss: str, what: str, given: Any, kind: type, make: Callable[[str, Any], Any]) -> tuple[Any, ...]:
    if isinstance(given, Mapping):
        return tuple([make(n, x) for n, x in given.items()])
    if isinstance(given, str) or not all([isinstance(x, kind) for x in given]):
        raise TypeError(
            f"define_loss: the `{what}` of {loss} must be a mapping from names to defaults or a sequence of "
            f"{kind.__name__}, got {given!r}; for example {what}={{{next(iter(given), 'c')!r}: "
            f"{'1.0' if kind is Parameter else 'False'}}}."
        )
    return tuple(given)


def _places(parts: Mapping[str, str], file: str, line: int) -> dict[str, tuple[str, int]]:
    """The file and line where each expression begins: that of the same string in the statement that calls, or else of
    the nearest in the file. If there is none (it was computed, or typed into an interpreter), the line of the call.
    """
    linecache.checkcache(file)
    nodes = _parsed("".join(linecache.getlines(file)))
    around = [x for x in nodes if isinstance(x, ast.stmt) and x.lineno <= line <= (x.end_lineno or x.lineno)]
    statement = min(around, key=lambda x: (x.end_lineno or x.lineno) - x.lineno, default=None)
    inside = set(ast.walk(statement)) if statement else set()

    def place(expression: str) -> tuple[str, int]:
        same = [x for x in nodes if isinstance(x, ast.Constant) and _same(x.value, expression)]
        found = min(same, key=lambda x: (x not in inside, abs(x.lineno - line)), default=None)
        if found is None:
            return file, line
        text, first, last = str(found.value), found.lineno, found.end_lineno or found.lineno
        if "\n" in text:  # It may begin behind a backslash, a line later.
            first = max(first, last - text.count("\n"))
        return file, first + _blank_lines(text) - _blank_lines(expression)

    return {name: place(expression) for name, expression in parts.items() if isinstance(expression, str)}


@lru_cache(maxsize=4)
def _parsed(text: str) -> list[ast.AST]:
    try:
        return list(ast.walk(ast.parse(text)))
    except (SyntaxError, ValueError):  # what an interpreter shows may be no file of Python
        return []


def _same(value: Any, expression: str) -> bool:
    """Whether they have the same words: an expression may have been dedented."""
    return isinstance(value, str) and value.split() == expression.split()


def _blank_lines(text: str) -> int:
    """Lines in front of the first that is not blank."""
    return text[: len(text) - len(text.lstrip())].count("\n")

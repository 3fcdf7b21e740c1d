"""``define_loss`` and ``define_statistics``: users' losses, with all features of the library's own."""

from __future__ import annotations

import ast
import linecache
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from cupylosses.build import function_of
from cupylosses.definition.base import Definition, Flag, Kink, Operand, Parameter
from cupylosses.engines.pointwise.definition import Loss
from cupylosses.engines.row_statistics.definition import StatisticsLoss


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
    example: str = "",
    source: str = "",
) -> Callable[..., Any]:
    """Defines a loss by one expression.

        tukey_loss = define_loss(
            "tukey_loss",
            "where(abs(d) < c, c * c / 6 * (1 - cube), c * c / 6)",
            parameters={"c": 4.685},
            let={"d": "input - target", "inside": "1 - square(d / c)", "cube": "inside * square(inside)"},
        )
        tukey_loss(prediction, target, c=3.0).backward()

    The function has the features of the library's own: gradients of every floating operand in one pass, reductions,
    weights, masks, normalizers, dimensions, CuPy arrays, ``value_and_grad``, and a Module
    (``cupylosses.nn.module_of(tukey_loss)``). docs/own-losses.md is a tutorial.

    The expression is compiled and executed on the GPU: it is code, to be trusted like code. Its tokens are checked, and
    parameters and tensors reach the kernel as numbers and addresses, never as text.

    Args:
        name: Name of the function, an identifier. Several losses may share a name.
        value: Value of an element: an expression of the operands, the parameters, the flags and the names in ``let``
            and ``constants``, with numbers, ``+ - * /``, comparisons, ``&& || !`` and the primitives of
            docs/adding-a-loss.md. Its derivatives are found automatically.
        operands: Tensor arguments in order: names, or :class:`Operand`. All but the first also take integers and bools
            if given by name.
        parameters: Numbers that the kernel takes at run time: names with defaults, or :class:`Parameter`.
        let: Named parts of the expression; each sees those before it.
        constants: Named numbers that follow from the parameters by arithmetic, such as ``{"rest": "1 - alpha"}``; each
            sees those before it. They are computed in float64 and rounded once.
        derivatives: Hand-written derivatives of the value, by name of the operand, where cancellation spoils the
            automatic one.
        reference: The loss through the array API, ``reference(xp, *operands, **parameters)``. It serves CPU arrays,
            empty operands, tensor subclasses and third derivatives, which raise without it.
        flags: Bools that select a variant of the kernel: names with defaults, or :class:`Flag`.
        summary: First line of the docstring.
        formula: Formula in the docstring; by default the expression.
        kinks: Function of the parameters and flags that returns the points without a derivative, as :class:`Kink`; for
            tests.
        convention: Sentence on the gradient at these points, for the docstring.
        cases: Settings of parameters and flags that tests should cover, as mappings.
        notes: Further remarks for the docstring.
        example: Example for the docstring, as lines of a doctest; by default a call with small operands.
        source: Publication of the loss, for the docstring.

    Returns:
        The function of the loss. Its docstring describes the arguments.

    Raises:
        ExpressionError: An expression contains an unknown name or other tokens; the message shows its file and line.
            Errors that only the compiler finds are reported there too, when the kernel is first needed.
        TypeError: An expression is not a string.
        ValueError: Names collide or are not identifiers, or a default is out of range.

    Example:
        >>> import torch
        >>> from cupylosses import define_loss
        >>> log_error = define_loss(
        ...     "log_error",
        ...     "log1p(square(input - target) / width)",
        ...     parameters={"width": 1.0},
        ...     reference=lambda xp, input, target, width: xp.log1p((input - target) ** 2 / width),
        ... )
        >>> prediction = torch.tensor([0.5, -1.25, 2.0], requires_grad=True)
        >>> loss = log_error(prediction, torch.tensor([1.0, -1.0, 0.25]), width=2.0)
        >>> round(loss.item(), 3)
        0.359
        >>> loss.backward()
    """
    parts = {"let": dict(let or {}), "constants": dict(constants or {}), "derivatives": dict(derivatives or {})}
    return _defined(
        Loss,
        define_loss.__name__,
        name,
        value,
        parts,
        operands=_operands(define_loss.__name__, name, operands),
        parameters=parameters,
        flags=flags,
        summary=summary,
        formula=formula,
        convention=convention,
        reference=reference,
        cases=tuple(cases),
        notes=notes,
        example=example,
        source=source,
        **({} if kinks is None else {"kinks": kinks}),
    )


def define_statistics(
    name: str,
    value: str,
    statistics: Mapping[str, str],
    operands: Sequence[str | Operand] = ("input", "target"),
    parameters: Mapping[str, float] | Sequence[Parameter] = (),
    *,
    row_operands: Sequence[str | Operand] = (),
    norms: Mapping[str, str] | None = None,
    first: Mapping[str, str] | None = None,
    only_with: Mapping[str, str] | None = None,
    let: Mapping[str, str] | None = None,
    constants: Mapping[str, str] | None = None,
    reference: Callable[..., Any] | None = None,
    flags: Mapping[str, bool] | Sequence[Flag] = (),
    summary: str = "",
    formula: str = "",
    convention: str | None = None,
    cases: Sequence[Mapping[str, Any]] = ({},),
    notes: str = "",
    example: str = "",
    source: str = "",
) -> Callable[..., Any]:
    """Defines a loss of vectors: one expression of sums over the features of a row.

        scale_invariant_log_loss = define_statistics(
            "scale_invariant_log_loss",
            "squares / count - balance * square(total / count)",
            statistics={"total": "log(input) - log(target)", "squares": "square(log(input) - log(target))"},
            parameters={"balance": 0.5},
        )
        scale_invariant_log_loss(depth, true_depth, balance=0.85).backward()

    A statistic is the sum of its expression over the features, the last dimension or ``feature_dim``. The value of a
    row is an expression of the statistics, computed once per row in float64. Derivatives follow by the chain rule, and
    kernels read a row once if it fits on chip. The function has the features of the library's own losses of vectors:
    gradients of every floating operand in one pass, reductions, weights and masks of rows, normalizers, any strides,
    CuPy arrays, ``value_and_grad``, and a Module (``cupylosses.nn.module_of``). docs/own-losses.md is a tutorial.

    The expressions are compiled and executed on the GPU: they are code, to be trusted like code. Their tokens are
    checked, and parameters and tensors reach the kernel as numbers and addresses, never as text.

    Args:
        name: Name of the function, an identifier. Several losses may share a name.
        value: Value of a row: an expression of the statistics, the norms, the row operands, the parameters, the flags,
            the names in ``let`` and ``constants``, and ``count``, the number of features. Its derivatives are found
            automatically.
        statistics: Summand of each statistic, an expression of the operands, the parameters, the flags and the names in
            ``first`` and ``constants``, by name.
        operands: Tensor arguments with features, in order: names, or :class:`Operand`.
        parameters: Numbers that the kernel takes at run time: names with defaults, or :class:`Parameter`.
        row_operands: Tensor arguments with one value per row, such as labels, which follow the operands: names, or
            :class:`Operand`. They also take integers and bools if given by name.
        norms: Component of each norm, an expression like those of ``statistics``, by name. The norm is
            ``(sum |component|^p)^(1/p)``, or the largest ``|component|`` for an infinite degree. The degree is the
            parameter ``p``, which must be > 0; it is 2 without such a parameter.
        first: Operand by name, where the name stands for the operand's first element in the row, a constant without a
            derivative. Subtracting it in statistics preserves digits of sums of squares; the value of a row must not
            otherwise depend on it.
        only_with: Flag by name of a statistic or norm that is needed only if that flag is set and is 0 otherwise.
        let: Named parts of ``value``; each sees those before it.
        constants: Named numbers that follow from the parameters by arithmetic, such as ``{"rest": "1 - alpha"}``; each
            sees those before it. They are computed in float64 and rounded once.
        reference: The loss through the array API: ``reference(xp, *operands, **parameters)`` returns the value of each
            row of operands in float64 with the features last. It serves CPU arrays, empty operands, tensor subclasses
            and third derivatives, and with many statistics also second ones; all of these raise without it.
        flags: Bools that select a variant of the kernel: names with defaults, or :class:`Flag`.
        summary: First line of the docstring.
        formula: Formula in the docstring; by default the expression.
        convention: Sentence on the gradient at points without a derivative, for the docstring.
        cases: Settings of parameters and flags that tests should cover, as mappings.
        notes: Further remarks for the docstring.
        example: Example for the docstring, as lines of a doctest; by default a call with small operands.
        source: Publication of the loss, for the docstring.

    Returns:
        The function of the loss. Its docstring describes the arguments.

    Raises:
        ExpressionError: An expression contains an unknown name or other tokens; the message shows its file and line.
            Errors that only the compiler finds are reported there too, when the kernel is first needed.
        TypeError: An expression is not a string.
        ValueError: Names collide or are not identifiers, a default is out of range, there are too many statistics, or
            ``first`` or ``only_with`` names something that does not exist.

    Example:
        >>> import torch
        >>> from cupylosses import define_statistics
        >>> spread_loss = define_statistics(
        ...     "spread_loss",
        ...     "squares / count - square(total / count)",
        ...     statistics={"total": "input - target", "squares": "square(input - target)"},
        ...     reference=lambda xp, input, target: xp.var(input - target, axis=-1),
        ... )
        >>> prediction = torch.tensor([[0.5, -1.0, 2.0], [1.0, 1.0, 4.0]], requires_grad=True)
        >>> loss = spread_loss(prediction, torch.zeros(2, 3))
        >>> round(loss.item(), 3)
        1.75
        >>> loss.backward()
    """
    parts = {
        "constants": dict(constants or {}),
        "statistics": dict(statistics),
        "norms": dict(norms or {}),
        "let": dict(let or {}),
    }
    rows = _operands(define_statistics.__name__, name, row_operands, labels=True)
    return _defined(
        StatisticsLoss,
        define_statistics.__name__,
        name,
        value,
        parts,
        operands=(*_operands(define_statistics.__name__, name, operands, labels=False), *rows),
        row_operands=tuple([x.name for x in rows]),
        first=dict(first or {}),
        only_with=dict(only_with or {}),
        parameters=parameters,
        flags=flags,
        summary=summary,
        formula=formula,
        convention=convention,
        reference=reference,
        cases=tuple(cases),
        notes=notes,
        example=example,
        source=source,
    )


def _defined(
    kind: Callable[..., Definition],
    caller: str,
    name: str,
    value: str,
    parts: Mapping[str, Mapping[str, str]],
    *,
    parameters: Any,
    flags: Any,
    summary: str,
    formula: str,
    convention: str | None,
    **fields: Any,
) -> Callable[..., Any]:
    """Builds the function of a loss. The code that defines it is two frames up, the caller of ``caller``.

    ``parts`` are the expressions besides ``value``, by field and name.
    """
    frame = sys._getframe(2)
    expressions = {f"{'derivatives.' * (of == 'derivatives')}{n}": x for of, xs in parts.items() for n, x in xs.items()}
    loss = kind(
        name=name,
        value=value,
        summary=summary or f"The loss {name}.",
        formula=formula or " ".join(str(value).split()),
        parameters=_specified(
            caller, name, "parameters", parameters, Parameter, lambda n, x: Parameter(n, x, "A number.")
        ),
        flags=_specified(caller, name, "flags", flags, Flag, lambda n, x: Flag(n, x, "A choice.")),
        convention=convention or "At kinks it is that of the primitives.",
        places=_places({**expressions, "value": value}, frame.f_code.co_filename, frame.f_lineno),
        **parts,
        **fields,
    )
    return function_of(loss, str(frame.f_globals.get("__name__", "__main__")))


def _operands(
    caller: str, loss: str, operands: Sequence[str | Operand], labels: bool | None = None
) -> tuple[Operand, ...]:
    """Operands of a definition.

    An operand given by name accepts integers if it may be a label: all or none by ``labels``; by default all but the
    first, which is the prediction.
    """
    if isinstance(operands, str):
        raise TypeError(
            f"{caller}: the `operands` of {loss} must be a sequence of names or of Operand, got {operands!r}; for "
            'example operands=("input", "target").'
        )
    return tuple(
        [
            x if isinstance(x, Operand) else Operand(x, "A tensor.", integer=i > 0 if labels is None else labels)
            for i, x in enumerate(operands)
        ]
    )


def _specified(
    caller: str, loss: str, argument: str, options: Any, kind: type, make: Callable[[str, Any], Any]
) -> tuple[Any, ...]:
    if isinstance(options, Mapping):
        return tuple([make(n, x) for n, x in options.items()])
    if isinstance(options, str) or not all([isinstance(x, kind) for x in options]):
        raise TypeError(
            f"{caller}: the `{argument}` of {loss} must be a mapping from names to defaults or a sequence of "
            f"{kind.__name__}, got {options!r}; for example {argument}={{{next(iter(options), 'c')!r}: "
            f"{'1.0' if kind is Parameter else 'False'}}}."
        )
    return tuple(options)


def _places(parts: Mapping[str, str], file: str, line: int) -> dict[str, tuple[str, int]]:
    """File and line where each expression begins.

    That is the line of an equal string in the calling statement, or else of the nearest equal string in the file. An
    expression that was computed, or typed into an interpreter, is in no file, and gets the line of the call.
    """
    linecache.checkcache(file)
    nodes = _parsed("".join(linecache.getlines(file)))
    around = [x for x in nodes if isinstance(x, ast.stmt) and x.lineno <= line <= (x.end_lineno or x.lineno)]
    statement = min(around, key=lambda x: (x.end_lineno or x.lineno) - x.lineno, default=None)
    inside = set(ast.walk(statement)) if statement else set()

    def place(expression: str) -> tuple[str, int]:
        same = [x for x in nodes if isinstance(x, ast.Constant) and _same(x.value, expression)]
        literal = min(same, key=lambda x: (x not in inside, abs(x.lineno - line)), default=None)
        if literal is None:
            return file, line
        text, first, last = str(literal.value), literal.lineno, literal.end_lineno or literal.lineno
        if "\n" in text:  # the text may begin after a backslash, one line later
            first = max(first, last - text.count("\n"))
        return file, first + _blank_lines(text) - _blank_lines(expression)

    return {name: place(expression) for name, expression in parts.items() if isinstance(expression, str)}


@lru_cache(maxsize=4)
def _parsed(text: str) -> list[ast.AST]:
    try:
        return list(ast.walk(ast.parse(text)))
    except (SyntaxError, ValueError):  # the lines that an interpreter provides may not be a Python file
        return []


def _same(value: Any, expression: str) -> bool:
    """True if both consist of the same words: an expression may have been dedented."""
    return isinstance(value, str) and value.split() == expression.split()


def _blank_lines(text: str) -> int:
    """Number of leading blank lines."""
    return text[: len(text) - len(text.lstrip())].count("\n")

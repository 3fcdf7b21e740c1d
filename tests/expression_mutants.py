"""Mutants of loss definitions: common mistakes in expressions, one at a time.

Each mutant differs from the correct definition in one token of one expression, and is named after its mistake.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from cupylosses.engines.pointwise.definition import Loss

_TOKENS = re.compile(r"[A-Za-z_]\w*|\d+\.?\d*|<=|>=|==|!=|&&|\|\||\S")

#: Replacements, by the kind of mistake.
_INSTEAD = {
    "sign": {"+": "-", "-": "+"},
    "operation": {"*": "/", "/": "*", "&&": "||"},
    "branch": {"<": ">", ">": "<", "==": "!="},
    "kink": {"<": "<=", "<=": "<", ">": ">="},
    "function": {
        "relu_active": "abs",
        "abs": "square",
        "square": "half_square",
        "half_square": "square",
        "exp": "log1p",
        "log": "log1p",
        "log1p": "log",
        "at_least": "half_square_over",
        "softplus": "relu_active",
        "log_cosh": "abs",
        "hypotenuse_minus_one": "log1p_half_square",
        "log1p_half_square": "geman_mcclure",
        "geman_mcclure": "one_minus_gaussian",
        "one_minus_gaussian": "geman_mcclure",
        "times_log": "times_log_ratio",
        "times_log_ratio": "times_log",
        "exp_difference": "squared_log_error",
        "relative_entropy": "itakura_saito",
        "itakura_saito": "relative_entropy",
        "log_loss": "generalized_log_loss",
        "zero_unless_nan": "square",
    },
}


def mutants(loss: Loss) -> Iterator[tuple[str, str, Loss]]:
    """Yields the kind of each mistake, its place, and the definition that contains it."""
    for part, index in _parts(loss):
        expression = getattr(loss, part)[index] if index else getattr(loss, part)
        for token in _TOKENS.finditer(expression):
            for kind, instead in _mistakes(loss, token.group(), expression[token.end() : token.end() + 1]):
                written = expression[: token.start()] + instead + expression[token.end() :]
                changed = {**getattr(loss, part), index: written} if index else written
                try:
                    wrong = replace(loss, **{part: changed})
                except ValueError:  # not a valid expression
                    continue
                yield kind, f"{loss.name}.{index or part}: {expression} became {written}", wrong


def _parts(loss: Loss) -> Iterator[tuple[str, str]]:
    for part in ("constants", "let", "derivatives"):
        yield from ((part, name) for name in getattr(loss, part))
    yield "value", ""


def _mistakes(loss: Loss, token: str, behind: str) -> Iterator[tuple[str, str]]:
    """Yields the kinds of mistakes at a token, each with its replacement."""
    for kind, pairs in _INSTEAD.items():
        if token in pairs:
            yield kind, pairs[token]
    operands = [x.name for x in loss.operands]
    if token in operands:
        yield "operand", operands[(operands.index(token) + 1) % len(operands)]
    parameters = [x.name for x in loss.parameters]
    if token in parameters:
        yield "parameter", f"({token} * 1.001)"
    if token in [x.name for x in loss.flags if len(x.choices) == 2]:
        yield "flag", f"(!{token})"
    if re.fullmatch(r"\d+\.?\d*", token):
        yield "constant", f"{float(token) * 1.001 or 0.001!r}"

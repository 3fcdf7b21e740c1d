"""What a function says of itself: its docstring, from the definition."""

from __future__ import annotations

from textwrap import wrap

from cupylosses.definition import Loss, Operand

#: What every loss takes besides its own arguments.
ADDED = {
    "weight": "What each element is multiplied by: a number, or an array that broadcasts with the operands, and is\n"
    "        differentiable. An element of weight 0 counts for nothing, whatever it holds.",
    "mask": "Bool, broadcasts with the operands: True where an element counts. Others are skipped\n"
    "        whatever they hold: their gradients are 0, and a mean does not count them.",
    "normalizer": "A number, or an array without dimensions, that a mean divides by instead: tokens, accumulated rows.",
    "dim": "The dimension of the broadcast shape, or several, to reduce over; the others are kept. All by default.",
    "out_dtype": "The floating dtype of the result; the promoted dtype of the operands by default.",
}


def docstring(loss: Loss) -> str:
    """Meaning, formula, arguments, result, gradient convention, errors, source."""
    own = {x.name: _operand(x) for x in loss.operands}
    own |= {x.name: f"{x.doc} Must be {x.requirement}. Default {x.default!r}." for x in loss.parameters}
    for flag in loss.flags:
        choices = "" if flag.choices == (False, True) else f" One of {', '.join(map(repr, flag.choices))}."
        own[flag.name] = f"{flag.doc}{choices} Default {flag.default!r}."
    own["reduction"] = f"One of {', '.join(map(repr, loss.reductions))}. Default 'mean'."
    lines = [loss.summary, "", f"    {loss.formula}", "", "Args:"]
    for name, _ in loss.arguments:
        text = (own | ADDED).get(name)
        if text is not None:
            lines.append(f"    {name}: {text}")
    if loss.legacy:
        lines.append("    size_average, reduce: torch's deprecated arguments; they warn and decide the reduction.")
    lines += ["", "Returns:", *_result(loss), "", "Gradient:"]
    lines += [
        *_wrapped(
            f"Every floating operand is differentiable. {loss.convention} Where the loss is NaN so is the gradient."
        ),
        "",
        "Raises:",
        "    TypeError: an operand that is no array, has another dtype, or belongs to another library.",
        "    ValueError: shapes that do not broadcast, another device, a parameter or reduction out of range.",
    ]
    if loss.notes:
        lines += ["", *_wrapped(loss.notes, indent="")]
    if loss.torch:
        lines += ["", f"Drop-in for ``torch.nn.functional.{loss.torch}``."]
    if loss.source:
        lines += ["", f"Source: {loss.source}"]
    return "\n".join(lines) + "\n"


def _wrapped(text: str, indent: str = "    ") -> list[str]:
    return wrap(text, 112, initial_indent=indent, subsequent_indent=indent)


def _operand(operand: Operand) -> str:
    if isinstance(operand.domain, str):
        domain = operand.domain
    else:
        domain = " or ".join(dict.fromkeys(operand.domain[1].values()))
    kinds = "floating" + (" or integer" if operand.integer else "") + (", or a number" if operand.number else "")
    default = "" if operand.default is None else f" Default {operand.default:g}."
    return f"{operand.doc} Shape (*), {kinds}; operands broadcast. Domain: {domain.replace('_', '-')}.{default}"


def _result(loss: Loss) -> list[str]:
    lines = [
        "    With 'none' the broadcast shape; otherwise one number, or with `dim` one per index of the dimensions",
        "    that are kept. `mean` divides the sum by the number of elements that the mask leaves, `weighted_mean`",
        "    by the sum of their weights, `batchmean` by the size of the first dimension.",
    ]
    if loss.mean_of_weights:
        lines += ["    As in torch, `mean` with a weight is `weighted_mean` here; other losses divide by the count."]
    if loss.mean_of_rows:
        lines = [
            "    With 'none' the mean over the last dimension, per row; with 'sum' the sum of these, with 'mean'",
            "    their mean. `weighted_mean` divides the sum of all elements by the sum of the weights, `batchmean`",
            "    the sum of the rows by the size of the first dimension. With `dim`, elements are reduced.",
        ]
    return [*lines, "    In the promoted dtype of the operands, on their device."]

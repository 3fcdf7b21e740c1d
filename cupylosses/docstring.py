"""What a function says of itself: its docstring, from the definition."""

from __future__ import annotations

from textwrap import wrap

from cupylosses.definition.base import Definition, Operand
from cupylosses.engines.pointwise.definition import Loss
from cupylosses.engines.softmax.definition import RowLoss

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


#: What losses of rows take.
ADDED_TO_ROWS = {
    "weight": "A weight w_c per class, floating, of shape (C,), and without a gradient. What a weight of 0 multiplies\n"
    "        counts for nothing, whatever it is.",
    "alpha": "A weight per class, floating, of shape (C,), and without a gradient.",
    "ignore_index": "The label of rows that do not count: they are not read, whatever they hold, and their gradients\n"
    "        are 0.",
    "class_dim": "The dimension of the classes, from either end; {class_dim}.",
    "softcap": "Logits become softcap tanh(logits / softcap), after they are scaled. A number > 0; none by default.",
    "logit_scale": "What logits are multiplied by. A finite number > 0. Default 1.0.",
    "temperature": "What logits are divided by. A finite number > 0. Default 1.0.",
    "mask": "Bool, broadcasts to the shape of the rows: True where a row counts. Others are not read, whatever they\n"
    "        hold: their gradients are 0, and a mean does not count them.",
    "normalizer": ADDED["normalizer"],
    "out_dtype": "The floating dtype of the result; that of the operands by default.",
    "return_lse": "Whether the log-partition function of each row is returned too. It has no gradient.",
    "return_accuracy": "Whether the share of the rows that count is returned too in which no logit is larger than the\n"
    "        label's.",
    "inplace_backward": "Whether backward may write the gradient over the logits, which must not be used afterwards.\n"
    "        Autograd raises where another operation, such as `tanh`, has saved them for its own backward. CPU arrays\n"
    "        are left as they are.",
    "check_targets": "When a label that is neither a class nor `ignore_index` raises: 'sync' now, which waits for the\n"
    "        GPU, 'lazy' at the next call after it was found, 'off' never. The loss is NaN then, and the gradient of\n"
    "        the row is 0. On CPU arrays 'lazy' is 'sync'. Default 'lazy'.",
}


def docstring(loss: Definition) -> str:
    """Meaning, formula, arguments, result, gradient convention, errors, source."""
    rows = isinstance(loss, RowLoss)
    own = {x.name: _row_operand(loss, x) if isinstance(loss, RowLoss) else _operand(x) for x in loss.operands}
    own |= {x.name: f"{x.doc} Must be {x.requirement}. Default {x.default!r}." for x in loss.parameters}
    for flag in loss.flags:
        choices = "" if flag.choices == (False, True) else f" One of {', '.join(map(repr, flag.choices))}."
        own[flag.name] = f"{flag.doc}{choices} Default {flag.default!r}."
    own["reduction"] = f"One of {', '.join(map(repr, loss.reductions))}. Default {dict(loss.arguments)['reduction']!r}."
    own |= _added_to_rows(loss) if isinstance(loss, RowLoss) else ADDED
    formula = [*_wrapped(loss.formula), "", *_wrapped(_symbols(loss), "")] if isinstance(loss, RowLoss) else []
    lines = [loss.summary, "", *(formula or [f"    {loss.formula}"]), "", "Args:"]
    for name, _ in loss.arguments:
        text = own.get(name)
        if text is not None:
            lines.append(f"    {name}: {text}")
    if loss.legacy:
        lines.append("    size_average, reduce: torch's deprecated arguments; they warn and decide the reduction.")
    fit = "fit" if rows else "broadcast"
    result = _row_result(loss) if isinstance(loss, RowLoss) else _result(loss)
    lines += ["", "Returns:", *result, "", "Gradient:"]
    lines += [
        *_wrapped(
            f"Every floating operand is differentiable. {loss.convention} Where the loss is NaN so is the gradient"
            f"{' of the row' if rows else ''}."
        ),
        "",
        "Raises:",
        "    TypeError: an operand that is no array, has another dtype, or belongs to another library.",
        f"    ValueError: shapes that do not {fit}, another device, a parameter or reduction out of range.",
    ]
    if isinstance(loss, RowLoss) and loss.row:
        lines += ["    IndexError: a label that is neither a class nor `ignore_index`; see `check_targets`."]
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


def _row_operand(loss: RowLoss, operand: Operand) -> str:
    if operand is not loss.operands[0]:
        return operand.doc
    domain = "" if operand.domain == "real" else f" Domain: {str(operand.domain).replace('_', '-')}."
    return f"{operand.doc} Shape (N, C), (C,), or any with the classes in `class_dim`; floating.{domain}"


def _symbols(loss: RowLoss) -> str:
    """What the letters of a formula stand for."""
    first = loss.operands[0].name
    scaled = f"logit_scale {first}" if loss.scale == "logit_scale" else f"{first} / temperature"
    said = [f"z = {scaled}" + (", kept below `softcap`" if "softcap" in loss.common else "")] if loss.scale else []
    said += ["p = softmax(z)"] if loss.softmax else []
    if loss.dense == "logits":
        said.append(f"q = softmax({loss.operands[1].name} / temperature)")
    if loss.row:
        said.append("y the label")
    if loss.softmax and loss.row:
        weights = "w" if loss.weights == "weight" else loss.weights
        smooth = f"smooth = -(1 / C) sum_c {weights}_c log p_c"
        said += ["nll = -log p_y", "rest = 1 - p_y", "lse = log sum_c exp z_c", f"{smooth} over the C classes"]
    if loss.dense == "probabilities":
        said.append("t the target")
    return f"with {', '.join(said)}."


def _added_to_rows(loss: RowLoss) -> dict[str, str]:
    where = "1 by default, or 0 of a single row" if loss.class_dim is None else f"{loss.class_dim} by default"
    return {name: text.format(class_dim=where) for name, text in ADDED_TO_ROWS.items() if name in loss.common}


def _row_result(loss: RowLoss) -> list[str]:
    counted = "the number of rows that count"
    if loss.mean_of_weights:
        counted = "the sum of the weights of the labels of rows that count"
        if loss.dense:
            counted += ", of probabilities by their number"
    return _wrapped(
        "With 'none' one number per row, of the shape of the rows; otherwise one number. `mean` divides the sum by "
        f"{counted}, `batchmean` by the size of the first dimension of the rows. A mean of nothing is NaN, with "
        "gradients of 0. In the promoted dtype of the floating operands, on their device; float32 under autocast."
        + (
            " With `return_lse` or `return_accuracy` a named tuple (loss, lse, accuracy), None for what was not asked "
            "for: `lse` of the shape of the rows, 0 where these do not count, and `accuracy` one number."
            if "return_lse" in loss.common
            else ""
        )
    )


def _result(loss: Definition) -> list[str]:
    lines = [
        "    With 'none' the broadcast shape; otherwise one number, or with `dim` one per index of the dimensions",
        "    that are kept. `mean` divides the sum by the number of elements that the mask leaves, `weighted_mean`",
        "    by the sum of their weights, `batchmean` by the size of the first dimension.",
    ]
    if loss.mean_of_weights:
        lines += ["    As in torch, `mean` with a weight is `weighted_mean` here; other losses divide by the count."]
    if isinstance(loss, Loss) and loss.mean_of_rows:
        lines = [
            "    With 'none' the mean over the last dimension, per row; with 'sum' the sum of these, with 'mean'",
            "    their mean. `weighted_mean` divides the sum of all elements by the sum of the weights, `batchmean`",
            "    the sum of the rows by the size of the first dimension. With `dim`, elements are reduced.",
        ]
    return [*lines, "    In the promoted dtype of the operands, on their device."]

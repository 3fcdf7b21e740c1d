"""The checks of calls of sequence losses, with their messages, in the manner of :mod:`cupylosses.checks`.

Lengths that the host knows are checked before anything is launched; those on a GPU by kernels.
"""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import Any

from cupylosses.checks import FLOATING, INTEGER, dtype_name
from cupylosses.definition.base import Definition
from cupylosses.engines.sequence.definition import CHECKS, GRADIENTS, SequenceLoss

#: Dtypes of labels and lengths: a bool is neither.
COUNTS = tuple([x for x in INTEGER if x != "bool"])


def switch(loss: SequenceLoss, name: str, value: Any) -> bool:
    """A bool; torch takes anything for `zero_infinity`, and so do we where it is 0 or 1."""
    if value not in (False, True):
        raise TypeError(f"{loss.name}: `{name}` must be True or False, got {value!r}.")
    return bool(value)


def choice(loss: SequenceLoss, name: str, value: Any) -> str:
    """One of the names that an argument may have."""
    allowed = CHECKS if name == "check_targets" else GRADIENTS
    if value not in allowed:
        expected = ", ".join(map(repr, allowed))
        raise ValueError(f"{loss.name}: `{name}` must be one of {expected}, got {value!r}.")
    return str(value)


def integer(loss: SequenceLoss, name: str, value: Any) -> int:
    """An integer of Python's or NumPy's."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{loss.name}: `{name}` must be an integer, got {value!r}.")
    return int(value)


def blank(loss: SequenceLoss, value: int, classes: int) -> None:
    """The blank is a class."""
    if not 0 <= value < classes:
        raise ValueError(
            f"{loss.name}: `blank` must be a class, 0 to {classes - 1} for `{loss.operands[0].name}` of {classes} "
            f"classes, got {value}."
        )


def rank(loss: SequenceLoss, shape: Sequence[int], batch_first: bool) -> None:
    """The first operand has frames, samples and classes, or frames and classes of one sample."""
    if len(shape) not in (2, 3):
        order = "(N, T, C)" if batch_first else "(T, N, C)"
        raise ValueError(
            f"{loss.name}: `{loss.operands[0].name}` must have the shape {order}, or (T, C) for one sample, got "
            f"{tuple(shape)}."
        )


def counts(loss: SequenceLoss, name: str, x: Any) -> None:
    """Labels and lengths are integers."""
    given = dtype_name(x)
    if given not in COUNTS:
        what = "Labels" if name == "targets" else "Lengths"
        raise TypeError(
            f"{loss.name}: `{name}` must have one of the dtypes {', '.join(COUNTS)}, got {given}. {what} are integers: "
            "convert them with `.long()` or `.astype('int64')`."
        )


def targets(loss: SequenceLoss, shape: Sequence[int], samples: int, batched: bool) -> None:
    """The targets are padded, concatenated, or those of one sample."""
    shape = tuple(shape)
    if not batched:
        if len(shape) == 1 or (len(shape) == 2 and shape[0] == 1):
            return
        raise ValueError(
            f"{loss.name}: `targets` must have the shape (S,) or (1, S) for one sample, `{loss.operands[0].name}` of "
            f"shape (T, C), got {shape}."
        )
    if len(shape) not in (1, 2) or (len(shape) == 2 and shape[0] != samples):
        raise ValueError(
            f"{loss.name}: `targets` must have the shape (N, S) with N = {samples}, or hold all labels one after "
            f"another in the shape (sum of target_lengths,), got {shape}."
        )


def lengths(loss: SequenceLoss, name: str, shape: Sequence[int], samples: int, batched: bool) -> None:
    """There is a length per sample."""
    shape = tuple(shape)
    accepted = ((samples,), (samples, 1)) if batched else ((), (1,), (1, 1))
    if shape not in accepted:
        expected = f"({samples},), a length per sample" if batched else "() or (1,) for one sample"
        raise ValueError(f"{loss.name}: `{name}` must have the shape {expected}, got {shape}.")


def needs_lengths(loss: SequenceLoss) -> ValueError:
    """Error for labels one after another of which nobody knows where a target ends."""
    return ValueError(
        f"{loss.name}: `target_lengths` must be given with `targets` of one dimension, got None. Pass the number of "
        "labels of each sample, or targets of shape (N, S)."
    )


def not_integers(loss: SequenceLoss, name: str, value: Any) -> TypeError:
    """Error for lengths that are nothing like integers."""
    return TypeError(
        f"{loss.name}: `{name}` must be an integer array, integers, or None where all are full, got {value!r}."
    )


def known_lengths(
    loss: SequenceLoss,
    name: str,
    values: Sequence[int],
    most: int,
    total: int | None = None,
) -> None:
    """Lengths that the host knows are within range; those of concatenated targets add up to ``total``."""
    of = "labels" if name == "target_lengths" else "frames"
    for n, value in enumerate(values):
        if not 0 <= value <= most:
            raise ValueError(
                f"{loss.name}: `{name}` must be within 0 to {most}, the number of {of} there is room for, got {value} "
                f"for sample {n}."
            )
    if total is not None and sum(values) != total:
        raise ValueError(
            f"{loss.name}: `target_lengths` must add up to the number of `targets` of one dimension, {total}, got "
            f"{sum(values)}."
        )


def per_sample(loss: SequenceLoss, name: str, x: Any, samples: Sequence[int]) -> None:
    """A weight or a mask broadcasts to the samples, and is a constant."""
    shape, given = tuple(x.shape), dtype_name(x)
    if name == "mask" and given != "bool":
        raise TypeError(f"{loss.name}: `mask` must be bool, True where a sample counts, got {given}. Pass `mask != 0`.")
    if name == "weight" and given not in FLOATING:
        raise TypeError(
            f"{loss.name}: `weight` must have one of the dtypes {', '.join(FLOATING)}, got {given}. Convert it with "
            "`.to(torch.float32)` or `.astype('float32')`."
        )
    if getattr(x, "requires_grad", False):
        raise ValueError(f"{loss.name}: `{name}` has no gradient, but requires one; pass `{name}.detach()`.")
    pairs = zip(reversed(shape), reversed(tuple(samples)), strict=False)
    if len(shape) > len(samples) or not all([a in (1, b) for a, b in pairs]):
        raise ValueError(
            f"{loss.name}: `{name}` must broadcast to the samples, of shape {tuple(samples)}, got {shape}."
        )


def dtypes(loss: SequenceLoss, named: Sequence[tuple[str, Any]]) -> None:
    """The first operand is floating."""
    name, x = named[0]
    if dtype_name(x) not in FLOATING:
        raise TypeError(
            f"{loss.name}: `{name}` must have one of the dtypes {', '.join(FLOATING)}, got {dtype_name(x)}. Convert it "
            "with `.to(torch.float32)` or `.astype('float32')`."
        )


def bad_label(loss: SequenceLoss, position: Sequence[int], value: int, classes: int) -> IndexError:
    """Error for a label that is no class, or the blank."""
    at = ", ".join(map(str, position))
    return IndexError(
        f"{loss.name}: `targets[{at}]` must be a class, 0 to {classes - 1}, other than `blank`, got {value}. Labels "
        "behind `target_lengths` are not read; check_targets='off' turns this check off."
    )


def bad_length(loss: SequenceLoss, name: str, sample: int, value: int, most: int) -> ValueError:
    """Error for a length that a kernel has found out of range."""
    if name == "sum":
        return ValueError(
            f"{loss.name}: `target_lengths` must add up to the number of `targets` of one dimension, {most}, got "
            f"{value}."
        )
    return ValueError(
        f"{loss.name}: `{name}` must be within 0 to {most}, got {value} for sample {sample}. check_targets='off' turns "
        "this check off."
    )


def no_derivative(loss: Definition, what: str) -> NotImplementedError:
    """Error for derivatives of a gradient that is not the one of the value."""
    return NotImplementedError(
        f"{loss.name}: gradient='logits' has no {what}, since it is not the gradient of the loss. Use "
        "gradient='log_probs', or `ctc_loss_with_logits`."
    )


def needs_padding(loss: SequenceLoss, shape: Sequence[int]) -> ValueError:
    """Error for labels one after another where results have a place for each label of a sample."""
    return ValueError(
        f"{loss.name}: `targets` must have the shape (N, S) with of='positions', got {tuple(shape)}. Pad the targets: "
        "results have one number for each of S labels."
    )

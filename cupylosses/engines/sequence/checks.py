"""Checks of sequence loss calls, and their error messages, in the style of :mod:`cupylosses.checks`.

Lengths in host memory are checked before any launch. Kernels check lengths on a GPU.
"""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import Any

from cupylosses.checks import FLOATING, INTEGER, dtype_name
from cupylosses.definition.base import Definition
from cupylosses.engines.sequence.definition import CHECKS, GRADIENTS, SequenceLoss

#: Dtypes of labels and lengths: all integers, but not bool.
COUNTS = tuple([x for x in INTEGER if x != "bool"])


def switch(loss: SequenceLoss, name: str, value: Any) -> bool:
    """Returns an option as a bool. Accepts 0 and 1 too, since torch takes anything for `zero_infinity`."""
    if value not in (False, True):
        raise TypeError(f"{loss.name}: `{name}` must be True or False, got {value!r}.")
    return bool(value)


def choice(loss: SequenceLoss, name: str, value: Any) -> str:
    """Returns the value of an argument if it is one of the allowed names, and raises otherwise."""
    allowed = CHECKS if name == "check_targets" else GRADIENTS
    if value not in allowed:
        expected = ", ".join(map(repr, allowed))
        raise ValueError(f"{loss.name}: `{name}` must be one of {expected}, got {value!r}.")
    return str(value)


def integer(loss: SequenceLoss, name: str, value: Any) -> int:
    """Returns an integer of Python or NumPy as an int, and raises for anything else."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{loss.name}: `{name}` must be an integer, got {value!r}.")
    return int(value)


def blank(loss: SequenceLoss, value: int, classes: int) -> None:
    """Checks that the blank is a class."""
    if not 0 <= value < classes:
        raise ValueError(
            f"{loss.name}: `blank` must be a class, 0 to {classes - 1} for `{loss.operands[0].name}` of {classes} "
            f"classes, got {value}."
        )


def rank(loss: SequenceLoss, shape: Sequence[int], batch_first: bool) -> None:
    """Checks that the first operand has frames, samples and classes, or frames and classes of one sample."""
    if len(shape) not in (2, 3):
        order = "(N, T, C)" if batch_first else "(T, N, C)"
        raise ValueError(
            f"{loss.name}: `{loss.operands[0].name}` must have the shape {order}, or (T, C) for one sample, got "
            f"{tuple(shape)}."
        )


def counts(loss: SequenceLoss, name: str, x: Any) -> None:
    """Checks that labels or lengths are integers."""
    dtype = dtype_name(x)
    if dtype not in COUNTS:
        noun = "Labels" if name == "targets" else "Lengths"
        raise TypeError(
            f"{loss.name}: `{name}` must have one of the dtypes {', '.join(COUNTS)}, got {dtype}. {noun} are integers: "
            "convert them with `.long()` or `.astype('int64')`."
        )


def targets(loss: SequenceLoss, shape: Sequence[int], samples: int, batched: bool) -> None:
    """Checks that targets are padded, concatenated, or those of one sample."""
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
    """Checks that there is one length per sample."""
    shape = tuple(shape)
    accepted = ((samples,), (samples, 1)) if batched else ((), (1,), (1, 1))
    if shape not in accepted:
        expected = f"({samples},), a length per sample" if batched else "() or (1,) for one sample"
        raise ValueError(f"{loss.name}: `{name}` must have the shape {expected}, got {shape}.")


def needs_lengths(loss: SequenceLoss) -> ValueError:
    """Returns the error for concatenated targets without lengths."""
    return ValueError(
        f"{loss.name}: `target_lengths` must be given with `targets` of one dimension, got None. Pass the number of "
        "labels of each sample, or targets of shape (N, S)."
    )


def not_integers(loss: SequenceLoss, name: str, value: Any) -> TypeError:
    """Returns the error for lengths that are not integers."""
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
    """Checks the range of lengths in host memory. Those of concatenated targets must add up to ``total``."""
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
    """Checks the dtype of a weight or mask, that it broadcasts to the samples, and that it is a constant."""
    shape, dtype = tuple(x.shape), dtype_name(x)
    if name == "mask" and dtype != "bool":
        raise TypeError(f"{loss.name}: `mask` must be bool, True where a sample counts, got {dtype}. Pass `mask != 0`.")
    if name == "weight" and dtype not in FLOATING:
        raise TypeError(
            f"{loss.name}: `weight` must have one of the dtypes {', '.join(FLOATING)}, got {dtype}. Convert it with "
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
    """Checks that the first operand is floating-point."""
    name, x = named[0]
    if dtype_name(x) not in FLOATING:
        raise TypeError(
            f"{loss.name}: `{name}` must have one of the dtypes {', '.join(FLOATING)}, got {dtype_name(x)}. Convert it "
            "with `.to(torch.float32)` or `.astype('float32')`."
        )


def bad_label(loss: SequenceLoss, position: Sequence[int], value: int, classes: int) -> IndexError:
    """Returns the error for a label that is not a class, or that is the blank."""
    at = ", ".join(map(str, position))
    return IndexError(
        f"{loss.name}: `targets[{at}]` must be a class, 0 to {classes - 1}, other than `blank`, got {value}. Labels "
        "past `target_lengths` are not read; check_targets='off' turns this check off."
    )


def bad_length(loss: SequenceLoss, name: str, sample: int, value: int, most: int) -> ValueError:
    """Returns the error for a length, or a sum of lengths, that is out of range."""
    if name == "sum":
        return ValueError(
            f"{loss.name}: `target_lengths` must add up to the number of `targets` of one dimension, {most}, got "
            f"{value}."
        )
    return ValueError(
        f"{loss.name}: `{name}` must be within 0 to {most}, got {value} for sample {sample}. check_targets='off' turns "
        "this check off."
    )


def no_derivative(loss: Definition, derivatives: str) -> NotImplementedError:
    """Returns the error for derivatives of a gradient that is not the gradient of the loss."""
    return NotImplementedError(
        f"{loss.name}: gradient='logits' has no {derivatives}, since it is not the gradient of the loss. Use "
        "gradient='log_probs', or `ctc_loss_with_logits`."
    )


def needs_padding(loss: SequenceLoss, shape: Sequence[int]) -> ValueError:
    """Returns the error for concatenated targets if results have an entry for each label of a sample."""
    return ValueError(
        f"{loss.name}: `targets` must have the shape (N, S) with of='positions', got {tuple(shape)}. Pad the targets: "
        "results have one number for each of S labels."
    )

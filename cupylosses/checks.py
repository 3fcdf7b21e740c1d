"""Every check of user input and its message: function, argument, got, expected, the way out.

``TypeError`` for types and dtypes, ``ValueError`` for shapes and values. All of them run before anything is launched.
"""

from __future__ import annotations

import difflib
import numbers
import sys
import warnings
from collections.abc import Sequence
from types import FrameType
from typing import Any

from cupylosses import interop
from cupylosses.definition.base import MASK, WEIGHT, Definition, Flag, Parameter
from cupylosses.engines.pointwise.definition import Loss

#: What an operand may hold, beside integers where the definition accepts them.
FLOATING = ("float16", "bfloat16", "float32", "float64")
INTEGER = ("bool", "int8", "uint8", "int16", "int32", "int64")


def _is_inside(frame: FrameType) -> bool:
    # Functions made from text have no module: with one, torch.compile would look for their globals there.
    return frame.f_globals.get("__name__", frame.f_code.co_filename.lstrip("<")).startswith(_INSIDE)


def warn(message: str) -> None:
    """Warns at the line that called the library, whichever way through it, and through a Module, the call took."""
    frame, level = sys._getframe(1), 2
    while frame.f_back and _is_inside(frame):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, UserWarning, stacklevel=level)


#: Modules between the user's line and a warning: torch's call a Module, or compile the function that the user called.
_INSIDE = ("cupylosses.", "torch.", "contextlib")


def reduction(loss: Definition, value: Any) -> str:
    """The reduction as a plain string, if there is one of that name; ``value`` may be an enumeration's member."""
    if isinstance(value, str) and value in loss.reductions:
        return str.__str__(value)
    expected = ", ".join(repr(x) for x in loss.reductions)
    near = difflib.get_close_matches(str(value), loss.reductions, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    raise ValueError(f"{loss.name}: `reduction` must be one of {expected}, got {value!r}{hint}")


def dimensions(loss: Loss, value: Any, reduction: str) -> tuple[int, ...]:
    """The dimensions to reduce over, as they were given."""
    dims = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    if not all(isinstance(d, numbers.Integral) and not isinstance(d, bool) for d in dims):
        raise TypeError(f"{loss.name}: `dim` must be an integer or a tuple of integers, got {value!r}.")
    if reduction in ("none", "batchmean"):
        raise ValueError(
            f"{loss.name}: `dim` needs the reduction 'mean', 'sum' or 'weighted_mean', got {reduction!r}. Leave `dim` "
            "out, or choose one of these."
        )
    return tuple(int(d) for d in dims)


def reduced_dimensions(loss: Loss, dims: Sequence[int], shape: Sequence[int]) -> tuple[int, ...]:
    """The dimensions counted from 0, each once, in order; no dimensions are all of them, as in torch."""
    rank = len(shape)
    for d in dims:
        if not -rank <= d < rank:
            raise ValueError(
                f"{loss.name}: `dim` must be within {-rank} to {rank - 1} for the shape {tuple(shape)}, got {d}."
            )
    found = [d % rank for d in dims]
    if len(set(found)) != len(found):
        raise ValueError(f"{loss.name}: `dim` must name each dimension once, got {tuple(dims)}.")
    return tuple(sorted(found)) if found else tuple(range(rank))


def out_dtype(loss: Definition, value: Any) -> str:
    """The name of a floating dtype, given as a dtype of torch or NumPy, or by name."""
    name = getattr(value, "__name__", None) or getattr(value, "name", None) or str(value).removeprefix("torch.")
    if name not in FLOATING:
        raise TypeError(
            f"{loss.name}: `out_dtype` must be one of the dtypes {', '.join(FLOATING)}, of torch, of NumPy or by name, "
            f"got {value!r}."
        )
    return name


def normalizer(loss: Definition, value: Any, reduction: str) -> Any:
    """What replaces the count of a mean: a number, or an array of NumPy's, as a float; others are left as they are."""
    if reduction in ("none", "sum"):
        raise ValueError(
            f"{loss.name}: `normalizer` replaces what a mean is divided by, got reduction={reduction!r}. Use "
            "reduction='mean', or divide the result."
        )
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        return _float(loss, "normalizer", value)
    if interop.kind(value) == "unknown":
        raise TypeError(
            f"{loss.name}: `normalizer` must be a number or an array without dimensions, got {type(value).__name__}."
        )
    if getattr(value, "requires_grad", False):
        raise ValueError(f"{loss.name}: `normalizer` has no gradient, but requires one; pass `normalizer.detach()`.")
    if tuple(value.shape) not in ((), (1,)):
        raise ValueError(f"{loss.name}: `normalizer` must be one number, got an array of shape {tuple(value.shape)}.")
    return float(value.reshape(())) if interop.kind(value) == "numpy" else value


def number(loss: Definition, name: str, value: Any) -> float:
    """A number in place of an operand."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise not_an_array(loss, name, value)
    return _float(loss, name, value)


def _float(loss: Definition, name: str, value: Any) -> float:
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{loss.name}: `{name}` must be a number up to 1.8e308, got a larger integer.") from None


def legacy_reduction(loss: Definition, size_average: bool | None, reduce: bool | None) -> str:
    """The reduction that torch's old arguments mean, with one warning that names it."""
    average = True if size_average is None else size_average
    result = "none" if reduce is not None and not reduce else "mean" if average else "sum"
    warn(f"{loss.name}: `size_average` and `reduce` are deprecated; use reduction={result!r}.")
    return result


def parameter(loss: Definition, spec: Parameter, value: Any) -> float:
    """A parameter as a float, in range."""
    if type(value) is not float:
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            hint = " Take it off the device with `.item()` first." if hasattr(value, "item") else ""
            raise TypeError(f"{loss.name}: `{spec.name}` must be {spec.requirement}, got {type(value).__name__}.{hint}")
        value = _float(loss, spec.name, value)
    if not spec.accepts(value):
        raise ValueError(f"{loss.name}: `{spec.name}` must be {spec.requirement}, got {value!r}.")
    return value


def flag(loss: Definition, spec: Flag, value: Any) -> int:
    """The position of a flag's value among its choices."""
    for i, choice in enumerate(spec.choices):
        if value is choice or (isinstance(choice, str) and value == choice):
            return i
    raise TypeError(f"{loss.name}: `{spec.name}` must be {' or '.join(map(repr, spec.choices))}, got {value!r}.")


def not_an_array(loss: Definition, name: str, value: Any) -> TypeError:
    """The error for an operand that no array library owns."""
    kind = type(value).__name__
    hint = "; wrap it with `torch.as_tensor(...)` or `numpy.asarray(...)`"
    if hasattr(value, "filled"):
        hint = "; pass its `.data`, and `mask=~numpy.ma.getmaskarray(...)`"
    return TypeError(
        f"{loss.name}: `{name}` must be a torch.Tensor, a cupy.ndarray, a numpy.ndarray or an object with "
        f"`__dlpack__`, got {kind}{hint}."
    )


def no_reference(loss: Loss) -> NotImplementedError:
    """The error for what takes a reference formula, of a loss that was defined without one."""
    return NotImplementedError(
        f"{loss.name}: this loss was defined without a `reference`, which CPU arrays, empty operands, tensor "
        "subclasses and third derivatives take. Give define_loss one, or move the operands to a GPU."
    )


def reduced_reference(loss: Loss, found: Any, shape: Sequence[int]) -> ValueError:
    """The error for a reference formula that gives another shape than that of the elements."""
    got = "no array" if found is None else f"an array of shape {tuple(found)}"
    return ValueError(
        f"{loss.name}: `reference` must return one value per element, of shape {tuple(shape)}, got {got}. Leave sums "
        "and means to `reduction`, and broadcast a formula that ignores an operand with `xp.broadcast_to`."
    )


def no_bfloat16(loss: Definition) -> TypeError:
    """The error for a result that NumPy cannot hold."""
    return TypeError(
        f"{loss.name}: the result would be bfloat16, which NumPy has not. Choose another dtype with `out_dtype`, or "
        "pass torch tensors."
    )


def not_dense(loss: Definition, name: str, layout: Any) -> TypeError:
    """The error for a tensor without strides."""
    return TypeError(f"{loss.name}: `{name}` must be a dense tensor, got {layout}. Convert it with `.to_dense()`.")


def libraries(loss: Definition, kinds: Sequence[str], names: Sequence[str] | None = None) -> None:
    """Operands must live in one array library, or cross zero-copy; ``names`` of others than those of the loss."""
    found = [f"`{name}` from {kind}" for name, kind in zip(names or _names(loss), kinds, strict=True)]
    raise TypeError(
        f"{loss.name}: operands must come from one array library, got {' and '.join(found)}. "
        "Convert with `torch.from_numpy(x)`, `x.numpy()` or `cupy.asarray(x)`; "
        "torch and CuPy tensors on a GPU mix freely."
    )


def devices(loss: Definition, found: Sequence[Any], names: Sequence[str] | None = None) -> None:
    """Operands must be on one device; ``names`` of others than those of the loss."""
    where = [f"`{name}` on {device}" for name, device in zip(names or _names(loss), found, strict=True)]
    raise ValueError(
        f"{loss.name}: operands must be on one device, got {' and '.join(where)}. Move one with `.to(device)`."
    )


def _names(loss: Definition) -> list[str]:
    return [x.name for x in loss.operands]


def dtypes(loss: Loss, names: Sequence[str]) -> None:
    """Each operand's dtype must be one that it accepts, and one of them must be floating."""
    for operand, name in zip(loss.operands, names, strict=True):
        if operand is MASK and name != "bool":
            raise TypeError(
                f"{loss.name}: `mask` must be bool, True where an element counts, got {name}. Pass `mask != 0`."
            )
        allowed = (*FLOATING, *INTEGER) if operand.integer else FLOATING
        if name not in allowed:
            raise TypeError(
                f"{loss.name}: `{operand.name}` must have one of the dtypes {', '.join(allowed)}, got {name}. "
                "Convert it with `.to(torch.float32)` or `.astype('float32')`."
            )
    if not any(name in FLOATING for name in names) and any(x is not MASK for x in loss.operands):
        got = " and ".join(f"`{x.name}` of {name}" for x, name in zip(loss.operands, names, strict=True))
        raise TypeError(
            f"{loss.name}: at least one operand must be floating, got {got}. "
            "Convert the prediction with `.float()` or `.astype('float32')`."
        )


def broadcast(loss: Loss, shapes: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The broadcast shape by NumPy's rules."""
    rank = max(len(s) for s in shapes)
    result = []
    for d in range(-rank, 0):
        # Compared, not put into a set: where torch.compile traces, sizes may be symbols.
        sizes = [s[d] for s in shapes if -d <= len(s) and s[d] != 1]
        if any([n != sizes[0] for n in sizes]):
            raise ValueError(_broadcast_message(loss, shapes))
        result.append(sizes[0] if sizes else 1)
    return tuple(result)


def _broadcast_message(loss: Loss, shapes: Sequence[Sequence[int]]) -> str:
    got = " and ".join(f"`{x.name}` of shape {tuple(s)}" for x, s in zip(loss.operands, shapes, strict=True))
    hint = "Shapes are aligned at the last dimension; reshape one with `.reshape(...)` or `[:, None]`."
    first = shapes[0]
    row = next((x.name for x, s in zip(loss.operands, shapes, strict=True) if len(s) == 1 and s[0] == first[0]), None)
    if row is not None and len(first) > 1:
        name, index = row, ", ".join([":", *["None"] * (len(first) - 1)])
        hint = f"A 1-d `{name}` belongs to the last dimension; for one value per row use `{name}[{index}]`."
    return f"{loss.name}: the shapes do not broadcast, got {got}. {hint}"


def broadcast_warning(loss: Loss, shapes: Sequence[Sequence[int]]) -> str | None:
    """A warning about operands that broadcast, or None.

    Every loss warns where no operand has the shape of the result, as of (N, 1) and (N,), which is mostly a mistake.
    Losses whose twins in torch warn of any difference between two operands do so too.
    """
    own = [(x.name, tuple(s)) for x, s in zip(loss.operands, shapes, strict=True) if x is not WEIGHT and x is not MASK]
    if all([s == own[0][1] for _, s in own]):
        return None
    (first, shape), *others = own
    result = broadcast(loss, [*[s for _, s in own], *[()] * (len(shapes) - len(own))])
    if all([s != result for _, s in own]):
        got = " and ".join([f"`{name}` of shape {s}" for name, s in own])
        return (
            f"{loss.name}: no operand has the shape {result} of the result, got {got}, which may not be what you want; "
            "reshape or expand one to silence this."
        )
    if not loss.warn_broadcast or others[0][1] == shape:
        return None
    second, other = others[0]
    return (
        f"{loss.name}: `{second}` of shape {other} is broadcast against `{first}` of shape {shape}, which may not be "
        "what you want; reshape or expand one to silence this."
    )


def per_row(loss: Loss, name: str, x: Any, shape: Sequence[int], common: Sequence[int]) -> Any:
    """An operand that may have one value per row, viewed so that it broadcasts with the first, which has ``shape``.

    As torch documents its variance: the same shape, dimensions of size 1, or one dimension fewer, which is the last.
    """
    own, shape = tuple(x.shape), tuple(shape)
    if own in ((), shape):
        return x
    if own == shape[:-1]:
        return x[..., None]
    if len(own) == len(common) and all([n == m or n == 1 for n, m in zip(own, common, strict=True)]):
        return x
    raise ValueError(
        f"{loss.name}: `{name}` must have the shape {shape} of `{loss.operands[0].name}`, with 1 for "
        f"dimensions that share a value, or {shape[:-1]} for one value per row, got {own}. Reshape it with "
        "`.reshape(...)` or `[None]`."
    )


def promote(names: Sequence[str], ranks: Sequence[int] | None = None) -> str:
    """The dtype of the result. With ``ranks``, by torch's rule: a 0-d tensor does not widen tensors with dimensions."""
    floating = [i for i, name in enumerate(names) if name in FLOATING]
    if ranks is not None and any(ranks[i] > 0 for i in floating):
        floating = [i for i in floating if ranks[i] > 0]
    found = {names[i] for i in floating}
    if found == {"float16", "bfloat16"}:
        return "float32"
    return max(found, key=FLOATING.index, default="float32")


def refuse_script(name: str, *_: Any) -> None:
    """Raises for `torch.jit.script`, which asks an object for what it should compile in its place."""
    raise NotImplementedError(
        f"{name}: torch.jit.script cannot compile a loss whose kernels are compiled at run time. Use torch.jit.trace, "
        "torch.compile or torch.export, or call it in a function marked @torch.jit.ignore."
    )

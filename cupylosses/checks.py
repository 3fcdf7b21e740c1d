"""Argument checks that all engines share.

Each message names the function, the argument, what it got, what it expects, and a way out. The checks raise
``TypeError`` for types and dtypes and ``ValueError`` for shapes and values, before any kernel is launched.
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
from cupylosses.definition.base import Definition, Flag, Parameter

#: Dtypes of operands, and the dtypes that are accepted too if the definition allows integers.
FLOATING = ("float16", "bfloat16", "float32", "float64")
INTEGER = ("bool", "int8", "uint8", "int16", "int32", "int64")


def _is_inside(frame: FrameType) -> bool:
    # Functions compiled from source are recognized by their file name. They have no `__name__`, because torch.compile
    # would look up their globals in that module.
    return frame.f_globals.get("__name__", frame.f_code.co_filename.lstrip("<")).startswith(_INSIDE)


def warn(message: str) -> None:
    """Issues a warning located at the user's line that called the library, directly or through a Module."""
    frame, level = sys._getframe(1), 2
    while frame.f_back and _is_inside(frame):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, UserWarning, stacklevel=level)


#: Modules that may be between the user's line and a warning: torch calls a Module, or compiles the user's function.
_INSIDE = ("cupylosses.", "torch.", "contextlib")


def reduction(loss: Definition, value: Any) -> str:
    """The reduction as a plain string; ``value`` may be a member of a string enumeration."""
    if isinstance(value, str) and value in loss.reductions:
        return str.__str__(value)
    expected = ", ".join(repr(x) for x in loss.reductions)
    near = difflib.get_close_matches(str(value), loss.reductions, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    raise ValueError(f"{loss.name}: `reduction` must be one of {expected}, got {value!r}{hint}")


def out_dtype(loss: Definition, value: Any) -> str:
    """Name of a floating dtype that is given as a dtype of torch or NumPy, or by name."""
    name = getattr(value, "__name__", None) or getattr(value, "name", None) or str(value).removeprefix("torch.")
    if name not in FLOATING:
        raise TypeError(
            f"{loss.name}: `out_dtype` must be one of the dtypes {', '.join(FLOATING)}, of torch, of NumPy or by name, "
            f"got {value!r}."
        )
    return name


def normalizer(loss: Definition, value: Any, reduction: str) -> Any:
    """Replacement for the divisor of a mean: a float for a number or a NumPy array; other arrays are returned as is."""
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
    """Converts a number that replaces an operand to a float."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise not_an_array(loss, name, value)
    return _float(loss, name, value)


def _float(loss: Definition, name: str, value: Any) -> float:
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{loss.name}: `{name}` must be a number up to 1.8e308, got a larger integer.") from None


def legacy_reduction(loss: Definition, size_average: bool | None, reduce: bool | None) -> str:
    """Reduction equivalent to torch's deprecated arguments; issues one warning that names it."""
    average = True if size_average is None else size_average
    result = "none" if reduce is not None and not reduce else "mean" if average else "sum"
    warn(f"{loss.name}: `size_average` and `reduce` are deprecated; use reduction={result!r}.")
    return result


def parameter(loss: Definition, spec: Parameter, value: Any) -> float:
    """Converts the value of a parameter to a float and checks its range."""
    if type(value) is not float:
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            hint = " Take it off the device with `.item()` first." if hasattr(value, "item") else ""
            raise TypeError(f"{loss.name}: `{spec.name}` must be {spec.requirement}, got {type(value).__name__}.{hint}")
        value = _float(loss, spec.name, value)
    if not spec.accepts(value):
        raise ValueError(f"{loss.name}: `{spec.name}` must be {spec.requirement}, got {value!r}.")
    return value


def flag(loss: Definition, spec: Flag, value: Any) -> int:
    """Index of a flag's value among its choices."""
    for i, choice in enumerate(spec.choices):
        if value is choice or (isinstance(choice, str) and value == choice):
            return i
    raise TypeError(f"{loss.name}: `{spec.name}` must be {' or '.join(map(repr, spec.choices))}, got {value!r}.")


def not_an_array(loss: Definition, name: str, value: Any) -> TypeError:
    """Error for an operand that is not an array."""
    kind = type(value).__name__
    hint = "; wrap it with `torch.as_tensor(...)` or `numpy.asarray(...)`"
    if hasattr(value, "filled"):
        hint = "; pass its `.data`, and `mask=~numpy.ma.getmaskarray(...)`"
    return TypeError(
        f"{loss.name}: `{name}` must be a torch.Tensor, a cupy.ndarray, a numpy.ndarray or an object with "
        f"`__dlpack__`, got {kind}{hint}."
    )


def no_bfloat16(loss: Definition) -> TypeError:
    """Error for a bfloat16 result of NumPy arrays."""
    return TypeError(
        f"{loss.name}: the result would be bfloat16, which NumPy has not. Choose another dtype with `out_dtype`, or "
        "pass torch tensors."
    )


def not_dense(loss: Definition, name: str, layout: Any) -> TypeError:
    """Error for a tensor without strides."""
    return TypeError(f"{loss.name}: `{name}` must be a dense tensor, got {layout}. Convert it with `.to_dense()`.")


def libraries(loss: Definition, kinds: Sequence[str], names: Sequence[str] | None = None) -> None:
    """Raises for operands of several array libraries; ``names`` default to those of the loss's operands."""
    origins = [f"`{name}` from {kind}" for name, kind in zip(names or _names(loss), kinds, strict=True)]
    raise TypeError(
        f"{loss.name}: operands must come from one array library, got {' and '.join(origins)}. "
        "Convert with `torch.from_numpy(x)`, `x.numpy()` or `cupy.asarray(x)`; "
        "torch and CuPy tensors on a GPU mix freely."
    )


def used_up(loss: Definition) -> RuntimeError:
    """Error for a second backward through a loss whose gradient was written over its logits."""
    return RuntimeError(
        f"{loss.name}: a second backward, but the first one wrote the gradient over `{loss.operands[0].name}`. "
        "Leave out inplace_backward=True to go backward more than once."
    )


def devices(loss: Definition, places: Sequence[Any], names: Sequence[str] | None = None) -> None:
    """Raises for operands on several devices; ``names`` default to those of the loss's operands."""
    where = [f"`{name}` on {device}" for name, device in zip(names or _names(loss), places, strict=True)]
    raise ValueError(
        f"{loss.name}: operands must be on one device, got {' and '.join(where)}. Move one with `.to(device)`."
    )


def _names(loss: Definition) -> list[str]:
    return [x.name for x in loss.operands]


def dtype_name(x: Any) -> str:
    """Name of an array's dtype, the same for every library."""
    # Not cached in a dictionary: torch.compile would guard on the absence of the key, which tracing then adds.
    name = str(x.dtype)
    if name.startswith("torch."):
        return name.removeprefix("torch.")
    return str(getattr(x.dtype, "name", name))  # NumPy's `name` omits the byte order


def promote(names: Sequence[str], ranks: Sequence[int] | None = None) -> str:
    """Dtype of the result. With ``ranks``, torch's rule holds: a 0-d tensor does not widen tensors with dimensions."""
    floating = [i for i, name in enumerate(names) if name in FLOATING]
    if ranks is not None and any(ranks[i] > 0 for i in floating):
        floating = [i for i in floating if ranks[i] > 0]
    dtypes = {names[i] for i in floating}
    if dtypes == {"float16", "bfloat16"}:
        return "float32"
    return max(dtypes, key=FLOATING.index, default="float32")


def no_reference(loss: Definition) -> NotImplementedError:
    """Error for a call that needs the reference formula of a loss that was defined without one."""
    return NotImplementedError(
        f"{loss.name}: this loss was defined without a `reference`, which CPU arrays, empty operands, tensor "
        f"subclasses and {loss.derivatives_by_formula} take. Give its definition one, or move the operands to a GPU."
    )


def wrong_shape_of_reference(loss: Definition, got: Any, expected: Sequence[int], each: str) -> ValueError:
    """Error for a reference formula that does not return one value for ``each`` element or row."""
    returned = "no array" if got is None else f"an array of shape {tuple(got)}"
    return ValueError(
        f"{loss.name}: `reference` must return one value per {each}, of shape {tuple(expected)}, got {returned}. Leave "
        "sums and means to `reduction`, and broadcast a formula that ignores an operand with `xp.broadcast_to`."
    )


def refuse_script(name: str, *_: Any) -> None:
    """Raises for ``torch.jit.script``, which calls this hook to ask an object for a scriptable replacement."""
    raise NotImplementedError(
        f"{name}: torch.jit.script cannot compile a loss whose kernels are compiled at run time. Use torch.jit.trace, "
        "torch.compile or torch.export, or call it in a function marked @torch.jit.ignore."
    )

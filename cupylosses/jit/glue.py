"""Source text that kernels of every engine share: dtype spellings, functors, `#line` directives."""

from __future__ import annotations

from collections.abc import Sequence

from cupylosses.definition.base import Definition, Flag

#: How a dtype is spelled in CUDA, and its short name in entry points.
STORAGE = {
    "float16": ("half_t", "f16"),
    "bfloat16": ("bfloat16_t", "bf16"),
    "float32": ("float", "f32"),
    "float64": ("double", "f64"),
    "bool": ("bool", "bool"),
    "int8": ("signed char", "i8"),
    "uint8": ("unsigned char", "u8"),
    "int16": ("short", "i16"),
    "int32": ("int", "i32"),
    "int64": ("int64", "i64"),
}


def counted_divisor(counted: bool, scaled: bool = True) -> list[str]:
    """The divisor of a sum, where it is not an argument, and its inverse if gradients are ``scaled`` by it.

    A mean of nothing has no gradient: the scale is 0, not inf.
    """
    if not counted:
        return []
    lines = ["  const double divisor = multiple * __ldcg(count);"]
    if scaled:
        lines.append("  const double scale = divisor == 0.0 ? 0.0 : 1.0 / divisor;")
    return lines


def call_signature(operands: Sequence[str]) -> list[str]:
    return [
        f"  template <{', '.join(f'class {x}_' for x in operands)}>",
        "  __device__ __forceinline__ auto",
        f"  operator()({', '.join(f'const {x}_& {x}' for x in operands)}) const {{",
    ]


def written_at(loss: Definition, part: str) -> list[str]:
    """What makes the compiler report an error in an expression where the expression was written."""
    file, line = loss.places.get(part, (f"{loss.name}.{part}", 1))
    # Nothing in a file's name ends the string or the line.
    name = "".join(x if x.isprintable() and x not in '"?' else "_" for x in file.replace("\\", "/"))
    return [f'#line {max(1, line)} "{name}"']


def choice_constant(flag: Flag, index: int) -> str:
    if len(flag.choices) == 2:
        return f"bool {flag.name} = {str(bool(index)).lower()}"
    return f"int {flag.name} = {int(index)}"

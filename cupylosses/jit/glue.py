"""Source text shared by the kernels of all engines: dtype spellings, functors, ``#line`` directives."""

from __future__ import annotations

from collections.abc import Sequence

from cupylosses.definition.base import Definition, Flag

#: CUDA spelling of each dtype, and its short name in entry points.
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
    """Returns lines that compute the divisor of a mean from a count on the device, and its inverse if ``scaled``.

    Gradients need the inverse, ``scale``. In a mean over no elements it is 0, not inf, so that the gradients are 0.
    """
    if not counted:
        return []
    lines = ["  const double divisor = multiple * __ldcg(count);"]
    if scaled:
        lines.append("  const double scale = divisor == 0.0 ? 0.0 : 1.0 / divisor;")
    return lines


def call_signature(operands: Sequence[str]) -> list[str]:
    """Returns the head of a functor's call operator, a template over the types of the operands."""
    return [
        f"  template <{', '.join(f'class {x}_' for x in operands)}>",
        "  __device__ __forceinline__ auto",
        f"  operator()({', '.join(f'const {x}_& {x}' for x in operands)}) const {{",
    ]


def loss_head(compute: str, heavy: int = 0, usual: str = "") -> list[str]:
    """Returns the first lines of a functor ``Loss`` for ``pointwise/``.

    ``usual`` is an expression of the functor, or empty: if it is true, elements are evaluated tentatively first.
    """
    condition = [f"  __device__ __forceinline__ bool usual() const {{ return {usual}; }}"]
    return [
        "struct Loss {",
        f"  using Compute = {compute};",
        f"  static constexpr int kHeavy = {heavy};",
        f"  static constexpr bool kTriedFirst = {str(bool(usual)).lower()};",
        *condition * bool(usual),
    ]


def written_at(loss: Definition, part: str) -> list[str]:
    """Returns the ``#line`` directive that makes the compiler report errors where the expression was written."""
    file, line = loss.places.get(part, (f"{loss.name}.{part}", 1))
    # Replaces characters of the file name that would end the string literal or the line.
    name = "".join(x if x.isprintable() and x not in '"?' else "_" for x in file.replace("\\", "/"))
    return [f'#line {max(1, line)} "{name}"']


def choice_constant(flag: Flag, index: int) -> str:
    """Returns the declaration of a flag as a constant: a bool, or an index if it has more than two choices."""
    if len(flag.choices) == 2:
        return f"bool {flag.name} = {str(bool(index)).lower()}"
    return f"int {flag.name} = {int(index)}"

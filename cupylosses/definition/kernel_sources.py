"""Location of the kernel sources."""

from __future__ import annotations

from pathlib import Path

#: Files of ``kernels/`` with the primitives that expressions may call.
PRIMITIVES = tuple(
    f"primitives/{x}.cuh"
    for x in ("math", "logistic", "focal", "divergence", "likelihood", "robust", "vectors", "boxes")
)


def kernel_directory() -> Path:
    """Path of ``kernels/``: inside the package if installed from a wheel, beside it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    for candidate in (package / "kernels", package.parent / "kernels"):
        if (candidate / "pointwise" / "pointwise.cuh").is_file():
            return candidate
    raise RuntimeError(
        f"cupylosses: the kernel sources are missing; looked in {package / 'kernels'} and "
        f"{package.parent / 'kernels'}. Install the package again: `pip install --force-reinstall cupylosses`."
    )

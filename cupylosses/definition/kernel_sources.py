"""Where the kernel sources lie."""

from __future__ import annotations

from pathlib import Path

#: The files of ``kernels/`` with the primitives of which expressions are made.
PRIMITIVES = tuple(f"primitives/{x}.cuh" for x in ("math", "logistic", "focal", "divergence", "likelihood", "robust"))


def kernel_directory() -> Path:
    """``kernels/``: inside the package when it was installed from a wheel, beside it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    for candidate in (package / "kernels", package.parent / "kernels"):
        if (candidate / "pointwise" / "pointwise.cuh").is_file():
            return candidate
    raise RuntimeError(
        f"cupylosses: the kernel sources are missing; looked in {package / 'kernels'} and "
        f"{package.parent / 'kernels'}. Install the package again: `pip install --force-reinstall cupylosses`."
    )

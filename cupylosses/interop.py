"""Array libraries: whose an array is, and taking it over through DLPack.

Neither torch nor CuPy is imported here before the user has imported it (an array of theirs proves that they did), with
one exception: kernels are launched by CuPy, so a CUDA tensor of torch's imports it.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from glob import escape, glob
from types import ModuleType
from typing import Any

ITEMSIZE = {
    "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8,
    "bool": 1, "int8": 1, "uint8": 1, "int16": 2, "int32": 4, "int64": 8,
}  # fmt: skip


@cache
def cupy() -> ModuleType:
    """CuPy, or an error that says how to get the one that fits."""
    try:
        return importlib.import_module("cupy")
    except ImportError as error:
        raise ImportError(
            "cupylosses: tensors on a GPU need CuPy, which is not installed or does not load "
            f'({error}). Install the wheel of your CUDA version: `pip install "cupylosses[cuda13x]"`, '
            '`"cupylosses[cuda12x]"` or `"cupylosses[cuda11x]"`. Only one of them may be installed.'
        ) from error
    except OSError as error:
        raise ImportError(
            f"cupylosses: CuPy cannot create its kernel cache ({error}). Set CUPY_CACHE_DIR to a writable directory."
        ) from error


#: Libraries of CUDA 11's wheels that CuPy 13 opens by their bare names, in the order of their needs.
_CUDA11 = (
    ("cuda_runtime", "libcudart.so.11"),
    ("cuda_nvrtc", "libnvrtc-builtins.so.11"),
    ("cuda_nvrtc", "libnvrtc.so.11"),
)


def load_cuda11_compiler() -> None:
    """Loads CUDA 11's run-time compiler from its wheel where CuPy for CUDA 11 is installed, without importing CuPy.

    CuPy 13 opens the compiler by its bare name, which the loader finds in no wheel, but knows once it is loaded: so
    every kernel of CuPy compiles on a machine without a toolkit. Elsewhere this costs some microseconds: a look
    into each directory of `sys.path`.
    """
    wheels = [x for x in sys.path if os.path.isdir(os.path.join(x, "nvidia", "cuda_nvrtc"))]
    homes = [x for x in sys.path if wheels and os.path.isdir(os.path.join(x, "cupy"))]
    if not any(glob(os.path.join(escape(x), "cupy_cuda11x-*.dist-info")) for x in homes):
        return
    for folder, name in _CUDA11:
        for wheel in wheels:
            for path in sorted(glob(os.path.join(escape(wheel), "nvidia", folder, "lib", f"{name}*"))):
                with suppress(OSError):  # CuPy says what is missing, where it is needed
                    ctypes.CDLL(path)


@contextmanager
def kept_locale() -> Iterator[None]:
    """Restores the thread's locale. NVRTC 11 leaves that of C behind, in which Python reads files as ASCII."""
    try:
        use = ctypes.CDLL(None).uselocale
    except (AttributeError, OSError, TypeError):  # a system that has locales for processes alone
        yield
        return
    use.argtypes, use.restype = [ctypes.c_void_p], ctypes.c_void_p
    before = use(None)
    try:
        yield
    finally:
        use(before)


# ----------------------------------------------------------------------------------------------------------------------
# Whose an array is

#: The kinds of the types that were seen before. A dictionary, not its ``get``: Dynamo traces the method of a
#: dictionary that it knows, but torch 2.11's breaks the graph at one that is bound already.
known_kinds: dict[type, str] = {}


def kind(x: Any) -> str:
    """``torch``, ``cupy``, ``numpy``, ``dlpack`` or ``unknown``, remembered by type."""
    found = known_kinds.get(type(x))
    if found is None:
        found = known_kinds[type(x)] = _find_kind(x)
    return found


def _find_kind(x: Any) -> str:
    import numpy

    torch, loaded_cupy = sys.modules.get("torch"), sys.modules.get("cupy")
    if torch is not None and isinstance(x, torch.Tensor):
        return "torch"
    if loaded_cupy is not None and isinstance(x, loaded_cupy.ndarray):
        return "cupy"
    if isinstance(x, (numpy.matrix, numpy.ma.MaskedArray)):
        return "unknown"  # whose operators mean something else, or skip elements
    if isinstance(x, numpy.ndarray):
        return "numpy"
    return "dlpack" if hasattr(x, "__dlpack__") and hasattr(x, "__dlpack_device__") else "unknown"


def stands_for_a_tensor(x: Any) -> bool:
    """True of an object that implements torch's override protocol without being a tensor, such as a torch.fx proxy."""
    return hasattr(type(x), "__torch_function__") and kind(x) != "torch"


def namespace(x: Any) -> Any:
    """The array API of an array's library. array-api-compat would look for it through all loaded modules, which Dynamo
    guards while it goes on loading more; imports it traces.
    """
    match kind(x):
        case "torch":
            import array_api_compat.torch

            return array_api_compat.torch
        case "cupy":
            import array_api_compat.cupy

            return array_api_compat.cupy
        case _:
            import array_api_compat.numpy

            return array_api_compat.numpy


#: Device types of DLPack that the libraries share.
DLPACK_CPU = 1


def adopt(x: Any, to: str | None) -> Any:
    """An array of another library as one of ``to`` (or of the library that fits its device), sharing the memory."""
    if to == "torch":
        import torch

        return torch.from_dlpack(x)
    if to == "cupy" or (to is None and x.__dlpack_device__()[0] != DLPACK_CPU):
        return cupy().from_dlpack(x)
    import numpy

    return numpy.from_dlpack(x)

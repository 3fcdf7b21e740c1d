"""Array libraries: whose an array is, and taking it over through DLPack.

Neither torch nor CuPy is imported here before the user has imported it (an array of theirs proves that they did), with
one exception: kernels are launched by CuPy, so a CUDA tensor of torch's imports it.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from cupylosses import architectures
from cupylosses.row_launch import Chip

ITEMSIZE = {
    "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8,
    "bool": 1, "int8": 1, "uint8": 1, "int16": 2, "int32": 4, "int64": 8,
}  # fmt: skip


@cache
def cupy() -> ModuleType:
    """CuPy, or an error that says how to get the one that fits."""
    _preload_cuda11()
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


def gpu(index: int) -> tuple[int, Chip]:
    """What of a GPU decides launches: how many multiprocessors it has, and what losses of rows can make use of."""
    found = cupy().cuda.Device(index)
    shared = found.attributes["MaxSharedMemoryPerBlockOptin"]
    return found.attributes["MultiProcessorCount"], architectures.chip(int(found.compute_capability), shared)


def _preload_cuda11() -> None:
    """Loads CUDA 11's run-time compiler from its wheel: CuPy 13 opens it by name alone and would not find it there."""
    wheels = importlib.util.find_spec("nvidia")
    if wheels is None or not _installed("cupy-cuda11x"):
        return
    for folder in wheels.submodule_search_locations or ():
        for pattern in ("cuda_runtime/lib/libcudart.so.11*", "cuda_nvrtc/lib/libnvrtc-builtins.so.11*",
                        "cuda_nvrtc/lib/libnvrtc.so.11*"):  # fmt: skip
            for path in sorted(Path(folder).glob(pattern)):
                ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)


def _installed(distribution: str) -> bool:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


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
    if isinstance(x, numpy.ndarray):
        return "numpy"
    return "dlpack" if hasattr(x, "__dlpack__") and hasattr(x, "__dlpack_device__") else "unknown"


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

"""Ownership of arrays by array libraries, and zero-copy exchange through DLPack.

Neither torch nor CuPy is imported before the user has imported it, which an array of theirs proves. There is one
exception: CuPy launches the kernels, so a CUDA tensor of torch imports it.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
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
    """Imports ``cupy``; if that fails, the error names the wheel to install."""
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


#: Libraries of CUDA 11's wheels that CuPy 13 opens by their bare names, dependencies first.
_CUDA11_COMPILER = (
    ("cuda_runtime", "libcudart.so.11"),
    ("cuda_nvrtc", "libnvrtc-builtins.so.11"),
    ("cuda_nvrtc", "libnvrtc.so.11"),
)
_CUDA11_CUBLAS = (("cublas", "libcublasLt.so.11"), ("cublas", "libcublas.so.11"))


def load_cuda11_compiler() -> None:
    """Preloads CUDA 11's run-time compiler from its wheel if CuPy for CUDA 11 is installed, without importing CuPy.

    CuPy 13 opens the compiler by its bare name. The loader does not search wheels, but finds a library that is already
    loaded, so that CuPy compiles kernels on a machine without a CUDA toolkit. On other machines this costs a few
    microseconds, to look into each directory of ``sys.path``.
    """
    _load_cuda11("cuda_nvrtc", _CUDA11_COMPILER)


def cublas() -> Any:
    """Imports CuPy's binding of cuBLAS; for CUDA 11, preloads cuBLAS from its wheel if the loader does not find it.

    Raises:
        ImportError: CuPy finds no cuBLAS of its version of CUDA.
    """
    name = "cupy_backends.cuda.libs.cublas"
    with suppress(ImportError):
        return importlib.import_module(name)
    _load_cuda11("cublas", _CUDA11_CUBLAS)
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(
            "cupylosses: losses of a linear layer multiply CuPy arrays by cuBLAS, which is not installed for CuPy's "
            f"version of CUDA or does not load ({error}). Install it: `pip install nvidia-cublas-cu11` for CUDA 11, "
            "`nvidia-cublas-cu12` for CUDA 12, `nvidia-cublas` for CUDA 13; or pass tensors of torch."
        ) from error


def _load_cuda11(package: str, libraries: Sequence[tuple[str, str]]) -> None:
    """Opens libraries of CUDA 11's wheels if ``package`` is among them and CuPy for CUDA 11 is installed."""
    wheels = [x for x in sys.path if os.path.isdir(os.path.join(x, "nvidia", package))]
    homes = [x for x in sys.path if wheels and os.path.isdir(os.path.join(x, "cupy"))]
    if not any(glob(os.path.join(escape(x), "cupy_cuda11x-*.dist-info")) for x in homes):
        return
    for folder, name in libraries:
        for wheel in wheels:
            for path in sorted(glob(os.path.join(escape(wheel), "nvidia", folder, "lib", f"{name}*"))):
                with suppress(OSError):  # CuPy reports a missing library when it needs it
                    ctypes.CDLL(path)


@contextmanager
def kept_locale() -> Iterator[None]:
    """Restores the thread's locale. NVRTC 11 leaves the C locale set, in which Python decodes files as ASCII."""
    try:
        use = ctypes.CDLL(None).uselocale
    except (AttributeError, OSError, TypeError):  # a system without per-thread locales
        yield
        return
    use.argtypes, use.restype = [ctypes.c_void_p], ctypes.c_void_p
    before = use(None)
    try:
        yield
    finally:
        use(before)


# ----------------------------------------------------------------------------------------------------------------------
# Ownership of arrays

#: Cache of :func:`kind`: library by type of array. Callers use the dictionary, not a bound ``get``: Dynamo traces a
#: method of a dictionary that it knows, but that of torch 2.11 breaks the graph at a bound method.
known_kinds: dict[type, str] = {}


def kind(x: Any) -> str:
    """Library that owns ``x``: ``torch``, ``cupy``, ``numpy``, ``dlpack`` or ``unknown``; cached by type."""
    library = known_kinds.get(type(x))
    if library is None:
        library = known_kinds[type(x)] = _find_kind(x)
    return library


def _find_kind(x: Any) -> str:
    import numpy

    torch, loaded_cupy = sys.modules.get("torch"), sys.modules.get("cupy")
    if torch is not None and isinstance(x, torch.Tensor):
        return "torch"
    if loaded_cupy is not None and isinstance(x, loaded_cupy.ndarray):
        return "cupy"
    if isinstance(x, (numpy.matrix, numpy.ma.MaskedArray)):
        return "unknown"  # their operators mean something else, or skip elements
    if isinstance(x, numpy.ndarray):
        return "numpy"
    return "dlpack" if hasattr(x, "__dlpack__") and hasattr(x, "__dlpack_device__") else "unknown"


#: At most one predicate, added when torch's backend is imported: True while a compiler traces a call, which must then
#: use nothing cached from an earlier one. The first call of a process may itself be traced and import the backend, so
#: this is a list: Dynamo cannot guard a name that is None when it starts to trace and a function when it ends.
tracers: list[Callable[[], bool]] = []


def stands_for_a_tensor(x: Any) -> bool:
    """True for an object with torch's override protocol that is not a tensor, such as a torch.fx proxy."""
    return hasattr(type(x), "__torch_function__") and kind(x) != "torch"


def namespace(x: Any) -> Any:
    """Array API namespace of the library that owns ``x``.

    ``array_api_compat.array_namespace`` would search all loaded modules, on which Dynamo guards while it loads more of
    them. Dynamo can trace a plain import.
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


#: Device type of the CPU in DLPack.
DLPACK_CPU = 1


def adopt(x: Any, to: str | None) -> Any:
    """Converts an array without copying to the library ``to``; if None, to CuPy or NumPy, whichever fits its device."""
    if to == "torch":
        import torch

        return torch.from_dlpack(x)
    if to == "cupy" or (to is None and x.__dlpack_device__()[0] != DLPACK_CPU):
        return cupy().from_dlpack(x)
    import numpy

    return numpy.from_dlpack(x)


# ----------------------------------------------------------------------------------------------------------------------
# Values that the host has, used together with arrays on a device


def integers(values: Sequence[int], shape: tuple[int, ...]) -> Any:
    """Converts integers of the host to a NumPy array of dtype int64."""
    import numpy

    return numpy.asarray(values, dtype=numpy.int64).reshape(shape)


def number(value: float) -> Any:
    """Converts a number to a 0-d NumPy array of dtype float64."""
    import numpy

    return numpy.asarray(value, dtype=numpy.float64)


def host_values(x: Any, beside: Any) -> list[int] | None:
    """Elements of an integer array in host memory that is used together with the device array ``beside``, or None.

    None means that reading the array would wait for a device, that it has no values because a compiler or a transform
    made it, or that a formula or a kernel reads it anyway.
    """
    if kind(x) == "numpy":
        return [int(v) for v in x.reshape(-1)] if kind(beside) != "numpy" else None
    if kind(x) != "torch" or kind(beside) != "torch" or x.device == beside.device or x.device.type != "cpu":
        return None
    import torch

    if type(x) is not torch.Tensor or any(tracer() for tracer in tracers):
        return None
    values: list[int] = x.reshape(-1).tolist()
    return values


#: Pinned buffers that captured CUDA graphs copy from at every replay, kept alive here.
_captured: list[Any] = []


def placed(beside: Any, arrays: Sequence[Any]) -> list[Any]:
    """Converts arrays to the library and the device of ``beside``.

    If ``beside`` is a CUDA tensor of torch, all host arrays share one asynchronous copy from pinned memory. A CUDA
    graph under capture keeps their values.
    """
    owner = kind(beside)
    if owner == "torch":
        return _placed_by_torch(beside, arrays)
    if owner == "cupy":
        return [cupy().asarray(x) if kind(x) == "numpy" else x if kind(x) == owner else adopt(x, owner) for x in arrays]
    return [x if kind(x) in (owner, "unknown") else adopt(x, owner) for x in arrays]


def _placed_by_torch(beside: Any, arrays: Sequence[Any]) -> list[Any]:
    import torch

    tensors = [torch.from_numpy(x) if kind(x) == "numpy" else x if kind(x) == "torch" else adopt(x, "torch")
             for x in arrays]  # fmt: skip
    device = beside.device
    away = [i for i, x in enumerate(tensors) if x.device != device and x.device.type == "cpu"]
    if not away or not beside.is_cuda or any(tracer() for tracer in tracers):
        return [x if x.device == device or x.device.type != "cpu" else x.to(device) for x in tensors]
    # The widest elements come first, so that every array is aligned in the buffer.
    away.sort(key=lambda i: -tensors[i].element_size())
    sizes = [tensors[i].numel() * tensors[i].element_size() for i in away]
    staged = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=True)
    for i, part in zip(away, staged.split(sizes), strict=True):
        part.view(tensors[i].dtype).copy_(tensors[i].reshape(-1))
    if torch.cuda.is_current_stream_capturing():
        _captured.append(staged)
    for i, part in zip(away, staged.to(device, non_blocking=True).split(sizes), strict=True):
        tensors[i] = part.view(tensors[i].dtype).view(tensors[i].shape)
    return tensors

"""cuBLAS matrix products of CuPy arrays, for dtypes and strides that ``cupy.matmul`` copies or rejects."""

from __future__ import annotations

from typing import Any

from cupylosses import interop

#: ``cudaDataType`` by dtype name.
_DATA_TYPES = {"float16": 2, "bfloat16": 14, "float32": 0, "float64": 1}
#: ``CUBLAS_COMPUTE_32F`` and ``CUBLAS_COMPUTE_64F``.
_COMPUTE = {"float32": 68, "float64": 70}
_DEFAULT_ALGORITHM = -1


def gemm(a: Any, b: Any, out: Any, accumulate: bool) -> None:
    """Computes ``out (+)= a @ b``.

    Precondition: one dimension of each matrix has stride 1. The dtype of ``out`` may be wider than that of ``a`` and
    ``b``. cuBLAS is column-major, so it computes the transposed product of the transposed matrices.
    """
    import numpy

    cupy, cublas = interop.cupy(), interop.cublas()
    if _is_by_columns(out) and not _is_by_rows(out):
        a, b, out = b.T, a.T, out.T
    rows, columns = out.shape
    wide = numpy.float64 if out.dtype == numpy.float64 else numpy.float32
    one, beta = numpy.array(1, wide), numpy.array(int(accumulate), wide)
    handle = cupy.cuda.device.get_cublas_handle()
    cublas.setStream(handle, cupy.cuda.get_current_stream().ptr)
    (of_b, step_b), (of_a, step_a) = _operation(b), _operation(a)
    cublas.gemmEx(
        handle, of_b, of_a, columns, rows, a.shape[1], one.ctypes.data, b.data.ptr, _DATA_TYPES[b.dtype.name], step_b,
        a.data.ptr, _DATA_TYPES[a.dtype.name], step_a, beta.ctypes.data, out.data.ptr, _DATA_TYPES[out.dtype.name],
        _step(out, 0), _COMPUTE[numpy.dtype(wide).name], _DEFAULT_ALGORITHM,
    )  # fmt: skip


def _is_by_rows(x: Any) -> bool:
    return x.strides[1] == x.itemsize or x.shape[1] == 1


def _is_by_columns(x: Any) -> bool:
    return x.strides[0] == x.itemsize or x.shape[0] == 1


def _step(x: Any, dim: int) -> int:
    """Leading dimension: elements from one row (or column) to the next, at least the minimum that cuBLAS accepts."""
    return max(x.strides[dim] // x.itemsize, x.shape[1 - dim], 1)


def _operation(x: Any) -> tuple[int, int]:
    """Operation (0: as stored, 1: transposed) and leading dimension of one factor of the transposed product."""
    return (0, _step(x, 0)) if _is_by_rows(x) else (1, _step(x, 1))

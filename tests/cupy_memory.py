"""Memory shared by tensors and arrays of CuPy or its stand-in."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch
from devices import GPU

#: Dtypes that not every version of both libraries exchanges, and integers of the same size.
_AS_INTEGERS = {torch.bool: torch.uint8, torch.bfloat16: torch.int16}


def array(cupy: Any, x: torch.Tensor) -> Any:
    """Returns an array that shares a tensor's memory."""
    if x.dtype not in _AS_INTEGERS:
        return cupy.from_dlpack(x)
    dtype: Any = "bool"
    if x.dtype == torch.bfloat16:
        dtype = pytest.importorskip("ml_dtypes").bfloat16
        if GPU and int(cupy.__version__.partition(".")[0]) < 14:
            pytest.skip("CuPy knows bfloat16 from 14 on")
    return cupy.from_dlpack(x.view(_AS_INTEGERS[x.dtype])).view(dtype)


def tensor(x: Any) -> torch.Tensor:
    """Returns a tensor that shares an array's memory."""
    if x.dtype.name == "bfloat16":
        return tensor(x.view("int16")).view(torch.bfloat16)
    return torch.from_dlpack(x) if GPU else torch.from_numpy(numpy.asarray(x))

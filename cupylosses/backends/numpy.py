"""NumPy backend: reference formulas for NumPy arrays, and for CPU arrays of other libraries adopted by NumPy."""

from __future__ import annotations

from typing import Any

import numpy

from cupylosses import checks
from cupylosses.call import Call


def evaluate(call: Call) -> Any:
    """Evaluates a loss on NumPy arrays."""
    loss, engine = call.loss, call.loss.engine
    engine.check(call)
    warning = engine.warning(call)
    if warning:
        checks.warn(warning)
    if call.normalizer is not None and type(call.normalizer) is not float:
        call = call._replace(normalizer=numpy.asarray(call.normalizer, dtype=numpy.float64).reshape(()))
    promoted = engine.promoted(call, zero_d_widens=True)
    if (call.static.out_dtype or promoted) == "bfloat16":
        raise checks.no_bfloat16(loss)
    # Silences NumPy's warnings: results for empty sums and infinities are well defined.
    with numpy.errstate(divide="ignore", invalid="ignore", over="ignore"):
        result = engine.reference(call, promoted)
    # Some NumPy operations return 0-d arrays, most return NumPy scalars; `[()]` turns both into scalars.
    return result if isinstance(result, tuple) else result[()]


def evaluate_with_gradients(call: Call, wanted: tuple[bool, ...]) -> tuple[Any, list[Any]]:
    """Evaluates a loss and the wanted gradients of its sum through torch, zero-copy."""
    try:
        from cupylosses.backends.torch import evaluation
    except ImportError as error:
        raise ImportError(
            f'{call.loss.name}: gradients of NumPy arrays need torch: `pip install "cupylosses[torch]"`.'
        ) from error
    tensors = tuple([_tensor(x) for x in call.arrays])
    result, gradients = evaluation.evaluate_with_gradients(call._replace(arrays=tensors), wanted)
    if isinstance(result, tuple):
        parts: list[Any] = [None if x is None else x.numpy()[()] for x in result]
        value: Any = type(result)(*parts)
    else:
        value = result.numpy()[()]
    return value, [None if g is None else g.numpy() for g in gradients]


def _tensor(x: Any) -> Any:
    """Returns a NumPy array as a torch tensor, zero-copy where torch allows it."""
    import torch

    # torch supports neither negative strides nor read-only memory: only such arrays are copied.
    return torch.from_numpy(x if x.flags.writeable and all(s >= 0 for s in x.strides) else x.copy())

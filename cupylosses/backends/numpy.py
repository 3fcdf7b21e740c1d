"""NumPy arrays, and CPU arrays of other libraries taken over by NumPy: the reference formulas."""

from __future__ import annotations

from typing import Any

import numpy

from cupylosses import checks
from cupylosses.call import Call


def evaluate(call: Call) -> Any:
    """The loss of NumPy arrays."""
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
    # Empty sums and infinities have their results without NumPy's remarks.
    with numpy.errstate(divide="ignore", invalid="ignore", over="ignore"):
        found = engine.reference(call, promoted)
    # NumPy makes arrays without dimensions of some operations, and its own numbers of most.
    return found if isinstance(found, tuple) else found[()]


def evaluate_with_gradients(call: Call, wanted: tuple[bool, ...]) -> tuple[Any, list[Any]]:
    """The loss, and the gradients of its sum that are wanted: torch's, zero-copy."""
    try:
        from cupylosses.backends.torch import evaluation
    except ImportError as error:
        raise ImportError(
            f'{call.loss.name}: gradients of NumPy arrays need torch: `pip install "cupylosses[torch]"`.'
        ) from error
    tensors = tuple([_tensor(x) for x in call.arrays])
    found, gradients = evaluation.evaluate_with_gradients(call._replace(arrays=tensors), wanted)
    if isinstance(found, tuple):
        parts: list[Any] = [None if x is None else x.numpy()[()] for x in found]
        value: Any = type(found)(*parts)
    else:
        value = found.numpy()[()]
    return value, [None if g is None else g.numpy() for g in gradients]


def _tensor(x: Any) -> Any:
    """An array of NumPy's as a tensor of torch's, zero-copy."""
    import torch

    # torch has neither negative strides nor read-only memory: such arrays are copied, no others.
    return torch.from_numpy(x if x.flags.writeable and all(s >= 0 for s in x.strides) else x.copy())

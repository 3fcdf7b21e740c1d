"""Linear softmax losses through the array API: the logits as a whole, and the softmax loss's own formula.

Products are taken in the arithmetic type (float32; float64 for float64 operands and NumPy arrays), so the logits are
not rounded to 16 bits.
"""

from __future__ import annotations

from typing import Any

from cupylosses import interop
from cupylosses.call import Call
from cupylosses.engines.linear_softmax.call import inner_arrays, inner_loss, logits_shape, positions
from cupylosses.engines.softmax import reference as softmax_reference
from cupylosses.engines.softmax.call import Rows


def evaluate(call: Call, promoted: str, readable: bool = True) -> Any:
    """The loss of a call whose logits and target promote to dtype ``promoted``."""
    static, at = call.static, positions(call.static)
    xp = interop.namespace(call.arrays[0])
    narrow = promoted != "float64" and interop.kind(call.arrays[0]) != "numpy"
    wide = xp.float32 if narrow else xp.float64
    input, weight = (xp.astype(x, wide, copy=False) for x in call.arrays[:2])
    shape = logits_shape(tuple(input.shape), tuple(weight.shape))
    flat = xp.reshape(weight, (-1, weight.shape[-1]))
    logits = xp.matmul(input, xp.matrix_transpose(flat))
    if "linear_bias" in at:
        logits = logits + xp.reshape(xp.astype(call.arrays[at["linear_bias"]], wide, copy=False), (-1,))
    logits = xp.reshape(logits, shape)
    arrays = inner_arrays(static, logits, call.arrays[: len(at)])
    rows = Rows(Call(inner_loss(call), arrays, static.softmax._replace(has_tangent=()), call.scalars, call.normalizer))
    return softmax_reference.evaluate(rows, promoted, readable)

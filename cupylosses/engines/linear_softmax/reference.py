"""Reference formula of linear softmax losses through the array API: all logits, then the softmax loss's formula.

Matrix products are computed in the arithmetic dtype (float32; float64 for float64 operands and NumPy arrays), so the
logits are not rounded to 16 bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cupylosses import interop
from cupylosses.call import Call
from cupylosses.engines.linear_softmax import checks as linear_checks
from cupylosses.engines.linear_softmax.call import inner_arrays, inner_loss, logits_shape, positions
from cupylosses.engines.softmax import reference as softmax_reference
from cupylosses.engines.softmax.call import Rows
from cupylosses.reference_math import divide


def evaluate(call: Call, promoted: str, readable: bool = True) -> Any:
    """Returns the loss of a call whose logits and target promote to dtype ``promoted``."""
    static, at = call.static, positions(call.static)
    narrow = promoted != "float64" and interop.kind(call.arrays[0]) != "numpy"
    bias = call.arrays[at["linear_bias"]] if "linear_bias" in at else None
    logits = logits_of_layer(call.arrays[0], weight_of(call, at), bias, narrow)
    arrays = inner_arrays(static, logits, call.arrays[: len(at)])
    softmax = static.softmax._replace(has_tangent=())
    inner = Call(inner_loss(call), arrays, softmax, call.scalars, call.normalizer)
    if not static.token_weighted:
        return softmax_reference.evaluate(Rows(inner), promoted, readable)
    per_row = softmax._replace(reduction="none", out_dtype="float64", normalized=False)
    result = softmax_reference.evaluate(Rows(inner._replace(static=per_row, normalizer=None)), promoted, readable)
    xp = interop.namespace(logits)
    cost = (result.loss if static.lse or static.accuracy else result) * call.arrays[at["token_weight"]]
    if static.reduction != "none":
        cost = divide(xp, xp.sum(cost), divisor(xp, call, Rows(inner)))
    cost = xp.astype(cost, getattr(xp, static.out_dtype or promoted))
    return result._replace(loss=cost) if static.lse or static.accuracy else cost


def divisor(xp: Any, call: Call, rows: Rows) -> Any:
    """Returns the divisor of the sum over rows."""
    at = positions(call.static)
    weights = call.arrays[at["token_weight"]] if "token_weight" in at else None
    return softmax_reference.divisor(xp, rows, softmax_reference.counted_rows(xp, rows), weights)


def weight_of(call: Call, at: Mapping[str, int]) -> Any:
    """Returns the weight. If there is a `main_grad`, backward through the result adds the weight's gradient to it."""
    if "main_grad" not in at:
        return call.arrays[1]
    from cupylosses.torch_compat import adding_to, is_compiling, transforms_active

    if transforms_active() or is_compiling():
        linear_checks.not_transformed(call.loss, call.static)
    return adding_to(call.arrays[1], call.arrays[at["main_grad"]])


def logits_of_layer(input: Any, weight: Any, bias: Any, narrow: bool) -> Any:
    """Returns all logits of the layer, in float32 if ``narrow``, otherwise in float64."""
    xp = interop.namespace(input)
    wide = xp.float32 if narrow else xp.float64
    input, weight = (xp.astype(x, wide, copy=False) for x in (input, weight))
    flat = xp.reshape(weight, (-1, weight.shape[-1]))
    logits = xp.matmul(input, xp.matrix_transpose(flat))
    if bias is not None:
        logits = logits + xp.reshape(xp.astype(bias, wide, copy=False), (-1,))
    return xp.reshape(logits, logits_shape(tuple(input.shape), tuple(weight.shape)))

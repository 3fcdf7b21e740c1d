"""Truth of softmax losses of a linear layer: logits in float64, the truth of their loss, and the chain rule.

A result has the sizes of the loss's truth (:mod:`cupylosses.testing.softmax.truth`), enlarged where logits and their
gradients are less accurate than the arithmetic: they are rounded to their dtype, and each logit is a sum whose terms
cancel.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from cupylosses.testing.eager import promoted
from cupylosses.testing.softmax.truth import truth as of_logits
from cupylosses.testing.tolerance import TABLE, Expected, arithmetic, dtype_name
from cupylosses.testing.truth import Truth

if TYPE_CHECKING:
    from torch import Tensor, dtype

#: Arguments of this engine alone. They do not change the exact results; ``logits_dtype`` affects the sizes.
OWN = ("logits_dtype", "accumulate_dtype", "max_memory", "skip_ignored")


def logits_dtype(input: Tensor, arguments: Mapping[str, Any]) -> dtype:
    """Returns the dtype of the logits of a call."""
    import torch

    name = arguments.get("logits_dtype")
    return input.dtype if name is None else getattr(torch, name)


def truth(name: str, names: list[str], arguments: Mapping[str, Any], grad_output: Any, where: str) -> Truth:
    """Computes the truth of a call of the softmax loss ``name`` of a linear layer.

    The input has two dimensions. The truth has an entry for the gradient of each of ``names``.
    """
    import torch

    x, w = (arguments[n].detach().to(where, torch.float64) for n in ("input", "linear_weight"))
    bias = arguments.get("linear_bias")
    logits, terms = x @ w.T, x.abs() @ w.abs().T
    if bias is not None:
        bias = bias.detach().to(where, torch.float64)
        logits, terms = logits + bias, terms + bias.abs()
    others = {k: v for k, v in arguments.items() if k not in ("input", "linear_weight", "linear_bias", *OWN)}
    expected = of_logits(name, {**others, "input": logits, "class_dim": 1}, grad_output, where)
    cancel = float((terms.amax(-1) / (1 + logits.abs().amax(-1))).max().clamp_min(1)) if terms.numel() else 1.0
    narrow, target = arguments["input"].dtype, arguments["target"]
    computed = logits_dtype(arguments["input"], arguments)
    result = promoted([torch.empty(1, dtype=computed), *([target] if target.is_floating_point() else [])])
    g = _enlarged(expected.gradients["input"], cancel * _coarse(narrow, narrow))
    gradients = {
        "input": Expected(g.exact @ w, (g.rms**2 @ w**2).sqrt(), g.total @ w.abs()),
        "linear_weight": Expected(g.exact.T @ x, (g.rms.T**2 @ x**2).sqrt(), g.total.T @ x.abs()),
        "linear_bias": Expected(g.exact.sum(0), (g.rms**2).sum(0).sqrt(), g.total.sum(0)),
    }
    if "target" in expected.gradients:
        # The gradient is rounded twice if backward rescales it.
        coarse = max(_coarse(x, target.dtype) for x in (computed, target.dtype))
        gradients["target"] = _enlarged(expected.gradients["target"], cancel * coarse)
    return Truth(_enlarged(expected.value, cancel * _coarse(computed, result)), tuple(gradients.get(n) for n in names))


def _coarse(kind: dtype, result: dtype) -> float:
    """Returns the epsilon of a dtype in multiples of the error that the table allows a result; at least 1."""
    import torch

    name = dtype_name(result)
    accepted = TABLE[name].element * torch.finfo(getattr(torch, arithmetic(name))).eps
    return max(1.0, torch.finfo(kind).eps / accepted)


def _enlarged(expected: Expected, factor: float) -> Expected:
    return Expected(expected.exact, expected.rms * factor, expected.total * factor)

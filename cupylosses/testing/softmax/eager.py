"""torch's ways to compute a loss of rows.

These are torch's function if it has every option, and otherwise the operations that users write around it.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from cupylosses.engines.softmax.definition import SoftmaxLoss
from cupylosses.testing.eager import Call

if TYPE_CHECKING:
    from torch import Tensor


def twin(loss: SoftmaxLoss, options: Mapping[str, Any], reduction: str, class_dim: int | None = None) -> Call | None:
    """Returns torch's way to compute a loss with these parameters, flags and further arguments; None if there is none.

    The returned function takes the first operand, the target and, if there are any, class weights.
    """
    from torch.nn import functional

    expression = EXPRESSIONS.get(loss.name)
    values = {**loss.common, **loss.values(), **options, "reduction": reduction}
    if expression is None or values["mask"] is not None or values["normalizer"] is not None:
        return None
    values.pop(str(loss.weights), None)
    if class_dim is None and loss.torch is not None:
        # The bare function if it has all options, because wrappers take time.
        function = getattr(functional, loss.torch)
        default = {**loss.common, **loss.values()}
        changed = {name: value for name, value in options.items() if value != default[name]}
        if changed.keys() <= inspect.signature(function).parameters.keys() and reduction != "batchmean":
            return lambda first, second, weight=None: function(first, second, weight, reduction=reduction, **changed)

    def call(first: Tensor, second: Tensor, weight: Tensor | None = None) -> Tensor:
        dim = class_dim if class_dim is not None else min(1, first.dim() - 1)
        if first.dim() > 1 and dim % first.dim() != 1:
            # torch's functions expect the classes in dimension 1.
            first = first.movedim(dim, 1)
            second = second.movedim(dim, 1) if second.dim() == first.dim() else second
        return expression(first, second, weight, **values)

    return call


def _cross_entropy(
    input: Tensor, target: Tensor, weight: Tensor | None,
    reduction: str, softcap: float | None, logit_scale: float, label_smoothing: float, z_loss: float, gamma: float,
    poly: float, ignore_index: int, **_: Any,
) -> Tensor:  # fmt: skip
    from torch.nn.functional import cross_entropy

    dim = min(1, input.dim() - 1)
    z = input if logit_scale == 1 else input * logit_scale
    z = z if softcap is None else softcap * (z / softcap).tanh()
    if gamma == poly == z_loss == 0 and reduction != "batchmean":
        known = {"ignore_index": ignore_index, "reduction": reduction, "label_smoothing": label_smoothing}
        return cross_entropy(z, target, weight, **known)
    hard = not target.is_floating_point()
    label_weight = weight[target.clamp(0, len(weight) - 1)] if hard and weight is not None else 1.0
    rows = {"ignore_index": ignore_index, "reduction": "none"}
    if gamma == poly == 0:
        cost = cross_entropy(z, target, weight, label_smoothing=label_smoothing, **rows)
    else:
        nll = cross_entropy(z, target, **rows)
        complement = 1 - (-nll).exp()
        cost = (1 - label_smoothing) * label_weight * (complement**gamma * nll + poly * complement)
        if label_smoothing:
            cost = cost + label_smoothing * cross_entropy(z, target, weight, label_smoothing=1.0, **rows)
    if z_loss:
        penalty = z_loss * z.logsumexp(dim) ** 2
        cost = cost + (penalty.where(target != ignore_index, 0) if hard else penalty)
    if not hard or reduction != "mean":
        return _reduced(cost, reduction)
    return cost.sum() / ((target != ignore_index) * label_weight).sum()


def _softmax_focal_loss(input: Tensor, target: Tensor, weight: Tensor | None, reduction: str, **values: Any) -> Tensor:
    cost = _cross_entropy(input, target, weight, "none", **values)
    return cost.sum() / (target != values["ignore_index"]).sum() if reduction == "mean" else _reduced(cost, reduction)


def _nll_loss(
    input: Tensor, target: Tensor, weight: Tensor | None, reduction: str, ignore_index: int, **_: Any
) -> Tensor:
    from torch.nn.functional import nll_loss

    known = reduction if reduction != "batchmean" else "none"
    value = nll_loss(input, target, weight, ignore_index=ignore_index, reduction=known)
    return value if known == reduction else _reduced(value, reduction)


def _kl_div_with_logits(
    input: Tensor, target: Tensor, _: None, reduction: str, temperature: float, log_target: bool, **__: Any
) -> Tensor:
    dim = min(1, input.dim() - 1)
    return _divergence(_log_softmax(input, temperature, dim), target, log_target, reduction, dim)


def _distillation_loss(
    student: Tensor, teacher: Tensor, _: None, reduction: str, temperature: float, beta: float, **__: Any
) -> Tensor:
    import torch

    dim = min(1, student.dim() - 1)
    log_p, log_q = (_log_softmax(x, temperature, dim) for x in (student, teacher))
    if beta == 0:
        return _divergence(log_p, log_q, True, reduction, dim)
    if beta == 1:
        return _divergence(log_q, log_p, True, reduction, dim)
    log_m = torch.log(beta * log_q.exp() + (1 - beta) * log_p.exp())
    of_q, of_p = (_divergence(log_m, x, True, reduction, dim) for x in (log_q, log_p))
    return beta * of_q + (1 - beta) * of_p


def _log_softmax(logits: Tensor, temperature: float, dim: int) -> Tensor:
    return (logits if temperature == 1 else logits / temperature).log_softmax(dim)


def _divergence(log_p: Tensor, target: Tensor, log_target: bool, reduction: str, dim: int) -> Tensor:
    from torch.nn.functional import kl_div

    if reduction in ("sum", "batchmean") and log_p.dim() > 1:
        return kl_div(log_p, target, reduction=reduction, log_target=log_target)
    return _reduced(kl_div(log_p, target, reduction="none", log_target=log_target).sum(dim), reduction)


def _reduced(rows: Tensor, reduction: str) -> Tensor:
    if reduction == "none":
        return rows
    if reduction == "batchmean":
        return rows.sum() / (len(rows) if rows.dim() else 1)
    return rows.mean() if reduction == "mean" else rows.sum()


#: torch's expression of each loss, by name.
EXPRESSIONS: Mapping[str, Call] = {
    "cross_entropy": _cross_entropy,
    "softmax_focal_loss": _softmax_focal_loss,
    "nll_loss": _nll_loss,
    "kl_div_with_logits": _kl_div_with_logits,
    "distillation_loss": _distillation_loss,
}

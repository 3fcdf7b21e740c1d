"""Truth of losses of rows: an independent, naive implementation of their formulas on the arguments of the functions.

:func:`truth` selects the rows that count, computes in float64, and lets torch differentiate; it calls no code of the
library. In the tails, where float64 loses digits, :func:`exact_row` computes value and gradient of one row with mpmath,
by difference quotients of many digits.

Each number has a size (:class:`cupylosses.testing.tolerance.Expected`): the size of the terms that it sums, times the
distance by which a rounding error of the logits moves them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING, Any

from cupylosses.testing.tolerance import Expected

if TYPE_CHECKING:
    from torch import Tensor

#: Names of the operands and of the class weights, by loss.
NAMES = {
    "cross_entropy": ("input", "target", "weight"),
    "softmax_focal_loss": ("input", "target", "alpha"),
    "nll_loss": ("input", "target", "weight"),
    "kl_div_with_logits": ("input", "target", None),
    "distillation_loss": ("student_logits", "teacher_logits", None),
}

#: Defaults that differ from those of cross entropy.
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "cross_entropy": {},
    "nll_loss": {},
    "softmax_focal_loss": {"gamma": 2.0},
    "kl_div_with_logits": {"reduction": "batchmean", "class_dim": -1},
    "distillation_loss": {"reduction": "batchmean", "class_dim": -1},
}

_COMMON = {
    "reduction": "mean", "class_dim": None, "ignore_index": -100, "mask": None, "normalizer": None, "softcap": None,
    "logit_scale": 1.0, "temperature": 1.0, "label_smoothing": 0.0, "z_loss": 0.0, "gamma": 0.0, "poly": 0.0,
    "log_target": False, "beta": 0.0, "out_dtype": None,
}  # fmt: skip


@dataclass(frozen=True)
class SoftmaxTruth:
    """Value, gradients by operand, lse per row (0 for rows that do not count) and accuracy.

    With directions, ``along`` and ``changed`` are the directional derivatives of the value and of the gradients.
    """

    value: Expected
    gradients: Mapping[str, Expected] = field(default_factory=dict)
    lse: Tensor | None = None
    accuracy: float | None = None
    along: Expected | None = None
    changed: Mapping[str, Expected] = field(default_factory=dict)


def truth(
    name: str,
    arguments: Mapping[str, Any],
    grad_output: Tensor | float = 1.0,
    device: str = "cpu",
    directions: Mapping[str, Tensor] | None = None,
) -> SoftmaxTruth:
    """Computes the truth of a call of the loss ``name`` on a device.

    ``directions`` are directions for operands by name. Precondition: each label is a class or ignored.
    """
    import torch

    first, second, weights = NAMES[name]
    values = {**_COMMON, **DEFAULTS[name], **arguments}
    x, target = (values[n].detach().to(device) for n in (first, second))
    dim = values["class_dim"] if values["class_dim"] is not None else min(1, x.dim() - 1)
    hard = not target.is_floating_point()
    rows_shape = x.movedim(dim, -1).shape[:-1]
    classes = x.shape[dim]
    logits = x.double().movedim(dim, -1).reshape(-1, classes)
    labels = target.long().reshape(-1) if hard else target.double().movedim(dim, -1).reshape(-1, classes)
    used = torch.ones(rows_shape, dtype=torch.bool, device=device)
    if values["mask"] is not None:
        used = used & values["mask"].to(device)
    used = used.reshape(-1)
    if hard:
        used = used & (labels != values["ignore_index"])
    w = values.get(weights) if weights else None
    wide: dict[str, Any] = {"dtype": torch.float64, "device": device}
    w = torch.ones(classes, **wide) if w is None else w.detach().to(**wide)

    z, t = logits[used].requires_grad_(), labels[used]
    if not hard:
        t.requires_grad_()
    options = {k: values[k] for k in ("label_smoothing", "z_loss", "gamma", "poly", "log_target", "beta")}
    scale = values["logit_scale"] / values["temperature"]
    cost, size, size_of_z, size_of_t, lse = _rows(name, z, t, w, options, scale, values["softcap"])

    divisor = 1.0
    reduction = values["reduction"]
    if reduction == "mean":
        weighted = hard and name in ("cross_entropy", "nll_loss")
        divisor = float(w[t].sum()) if weighted else float(used.sum())
    elif reduction == "batchmean":
        divisor = float(rows_shape[0]) if rows_shape else 1.0
    if values["normalizer"] is not None and reduction in ("mean", "batchmean"):
        divisor = float(values["normalizer"])

    upstream = torch.as_tensor(grad_output, **wide)
    per_row = upstream.expand(rows_shape).reshape(-1)[used] if reduction == "none" else upstream / (divisor or inf)
    per_row = per_row.expand(len(z))
    leaves = [z] if hard else [z, t]
    leaf_grads: Sequence[Tensor] = [torch.zeros_like(a) for a in leaves]
    if len(z):
        leaf_grads = torch.autograd.grad(cost, leaves, per_row, create_graph=bool(directions))
    gradients = {}
    for n, g, s in zip((first, second), leaf_grads, (size_of_z, size_of_t), strict=False):
        full, total = torch.zeros_like(logits), torch.zeros_like(logits)
        full[used], total[used] = g.detach(), s * per_row.abs()[:, None]
        back = [a.reshape(*rows_shape, classes).movedim(-1, dim) for a in (full, total)]
        gradients[n] = Expected(back[0], back[1], back[1])

    def reduced(row: Tensor, size: Tensor, divisor: float) -> Expected:
        if reduction != "none":
            return Expected(*(a / divisor for a in (row.sum(), (size**2).sum().sqrt(), size.sum())))
        value, total = torch.zeros(len(logits), **wide), torch.zeros(len(logits), **wide)
        value[used], total[used] = row, size
        return Expected(*(a.reshape(rows_shape) for a in (value, total, total)))

    along, changed = None, {}
    if directions:
        moved = {n: v.detach().to(**wide).movedim(dim, -1).reshape(-1, classes)[used] for n, v in directions.items()}
        of_leaves = dict(zip((first, second), leaves, strict=False))
        slopes = torch.autograd.grad(cost.sum(), leaves, retain_graph=True) if len(z) else leaf_grads
        sizes = (size_of_z, size_of_t)
        terms = {n: (g, s) for n, g, s in zip(of_leaves, slopes, sizes, strict=False)}
        rows = [sum((terms[n][0] * v).sum(-1) for n, v in moved.items())]
        rows += [sum((terms[n][1] * v.abs()).sum(-1) for n, v in moved.items())]
        along = reduced(*rows, divisor or inf)
        curved = [(g, moved[n]) for n, g in zip(of_leaves, leaf_grads, strict=True) if n in moved and g.requires_grad]
        bent: Sequence[Any] = [None] * len(leaves)
        if curved:
            outputs, cotangents = zip(*curved, strict=True)
            bent = torch.autograd.grad(outputs, leaves, cotangents, allow_unused=True)
        for n, h in zip(of_leaves, bent, strict=True):
            full, total = torch.zeros_like(logits), torch.zeros_like(logits)
            if h is not None:
                full[used] = h
                # With two operands, the error is measured against the largest derivative of the row.
                total[used] = 64 * (h.abs() + h.abs().amax(-1, keepdim=True))
                if hard:
                    total[used] = per_row.abs()[:, None] * _bent(
                        z.detach(), moved[n], size_of_z, x.dtype, scale, values
                    )
            back = [a.reshape(*rows_shape, classes).movedim(-1, dim) for a in (full, total)]
            changed[n] = Expected(back[0], back[1], back[1])

    cost = cost.detach()
    expected = reduced(cost, size, divisor)
    full_lse = torch.zeros(len(logits), **wide)
    full_lse[used] = lse.detach()
    right = (z.detach().argmax(-1) == t).double().sum().item() if hard and len(z) else 0.0
    accuracy = right / float(used.sum()) if bool(used.any()) else float("nan")
    return SoftmaxTruth(expected, gradients, full_lse.reshape(rows_shape), accuracy, along, changed)


def _bent(z: Tensor, v: Tensor, size: Tensor, kind: Any, scale: float, values: Mapping[str, Any]) -> Tensor:
    """Returns the size of the derivative along v of a gradient of the given size, for class indices."""
    import torch

    p = torch.softmax(z * scale, -1)
    # A shift of all logits changes only a softcap and lse; but the truth is no more accurate than float64.
    apart = (v - v.gather(-1, z.argmax(-1, keepdim=True))).abs()
    if values["softcap"] is not None or values["z_loss"]:
        apart = v.abs()
    apart = apart + v.abs() * (1.0 if kind == torch.float64 else 1e-8)
    factor = (1 + values["gamma"]) ** 2 * (scale + (2.0 * scale / values["softcap"] if values["softcap"] else 0.0))
    each = size * (apart + (p * apart).sum(-1, keepdim=True))
    return factor * (each + p * (size * apart).sum(-1, keepdim=True))


def _rows(
    name: str, x: Tensor, t: Tensor, w: Tensor, options: Mapping[str, Any], scale: float, softcap: float | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Returns cost, its size, the sizes of both gradients, and lse, for each row."""
    import torch

    def logits(a: Tensor) -> Tensor:
        return scale * a if softcap is None else softcap * torch.tanh(scale * a / softcap)

    z = logits(x)
    lse = torch.logsumexp(z, -1)
    if name == "nll_loss":
        cost = -w[t] * x.gather(-1, t[:, None])[:, 0]
        hot = torch.zeros_like(x).scatter(-1, t[:, None], w[t].abs()[:, None])
        return cost, cost.detach().abs(), hot, hot, lse
    log_p = z - lse[:, None]
    with torch.no_grad():
        # As a difference of two large numbers, the log-probability of a sure class would have no correct digits.
        top = torch.nn.functional.one_hot(z.argmax(-1), z.shape[-1]).bool()
        others = torch.where(top, 0.0, torch.exp(z - z.amax(-1, keepdim=True))).sum(-1, keepdim=True)
        digits = torch.where(top & others.isfinite(), -torch.log1p(others) - log_p, 0.0)
    log_p = log_p + digits
    target = torch.log_softmax(logits(t), -1) if name == "distillation_loss" else t
    terms = _terms(name, log_p, target, w, **options)
    cost = terms.sum(-1) + options["z_loss"] * lse**2

    with torch.no_grad():
        moved = 1 + z.abs().amax(-1, keepdim=True) + torch.where(log_p.isfinite(), log_p.abs(), 0.0)
        if name == "distillation_loss":
            moved = moved + target.abs()
    free = log_p.detach().requires_grad_()
    of_target = target.detach()
    leaves = [free]
    if of_target.is_floating_point():
        leaves.append(of_target.requires_grad_())
    by = torch.autograd.grad(_terms(name, free, of_target, w, **options).sum(), leaves)
    h = by[0].abs() + _moves(name, free, of_target, w, options)
    p = log_p.detach().exp()
    total = h.sum(-1, keepdim=True) + 2 * options["z_loss"] * lse.detach().abs()[:, None]
    size_of_z = scale * (h + p * total) * moved
    size_of_t = size_of_z
    if len(by) > 1:
        # The derivative of a divergence with respect to a probability is a difference of logarithms.
        size_of_t = (by[1].abs() + float(name == "kl_div_with_logits")) * moved
        if name == "distillation_loss":
            q = of_target.detach().exp()
            size_of_t = scale * (by[1].abs() + q * (by[1].abs() + h).sum(-1, keepdim=True)) * moved
    size = (terms.detach().abs() * moved).sum(-1) + (h * moved * p).sum(-1) + options["z_loss"] * lse.detach() ** 2
    return cost, size, size_of_z, size_of_t, lse


def _moves(name: str, log_p: Tensor, target: Tensor, w: Tensor, options: Mapping[str, Any]) -> Tensor:
    """Returns the size of the terms that cancel in a derivative."""
    import torch

    if name == "kl_div_with_logits":
        return target.detach().exp() if options["log_target"] else target.detach().abs()
    if name == "distillation_loss":
        return log_p.detach().exp() + target.detach().exp()
    return torch.zeros_like(log_p).detach()


def _terms(
    name: str, log_p: Tensor, t: Tensor, w: Tensor,
    label_smoothing: float, z_loss: float, gamma: float, poly: float, log_target: bool, beta: float,
) -> Tensor:  # fmt: skip
    """Returns the contribution of each class to the cost of its row, without the penalty."""
    import torch

    classes = log_p.shape[-1]
    if name == "kl_div_with_logits":
        log_t = t if log_target else t.log()
        return log_t.exp() * (log_t - log_p)
    if name == "distillation_loss":
        p, q = log_p.exp(), t.exp()
        if beta == 0.0:
            return q * (t - log_p)
        if beta == 1.0:
            return p * (log_p - t)
        m = beta * q + (1 - beta) * p
        return beta * q * (t - m.log()) + (1 - beta) * p * (log_p - m.log())
    if t.is_floating_point():
        return -w * ((1 - label_smoothing) * t + label_smoothing / classes) * log_p
    hot = torch.zeros_like(log_p).scatter(-1, t[:, None], 1.0)
    complement = 1 - log_p.exp()
    # If 1 - p is 0, its power has no derivative.
    power = torch.where(complement > 0, torch.where(complement > 0, complement, 1.0) ** gamma, float(gamma == 0))
    label_cost = (1 - label_smoothing) * (power * -log_p + poly * complement)
    return w * (torch.where(hot > 0, label_cost, 0.0) - label_smoothing / classes * log_p)


# ----------------------------------------------------------------------------------------------------------------------
# One row with many digits


def exact_row(
    name: str,
    x: Sequence[float],
    target: int | Sequence[float],
    weight: Sequence[float] | None = None,
    softcap: float | None = None,
    scale: float = 1.0,
    **options: Any,
) -> tuple[float, list[float]]:
    """Returns the cost of a row of finite logits and its gradient with respect to them, rounded to float64."""
    cost, gradient, _ = exact_gradients(name, x, target, weight, softcap, scale, **options)
    return float(cost), [float(g) for g in gradient]


def exact_gradients(
    name: str,
    x: Sequence[float],
    target: int | Sequence[float],
    weight: Sequence[float] | None = None,
    softcap: float | None = None,
    scale: float = 1.0,
    digits: int = 220,
    **options: Any,
) -> tuple[Any, list[Any], list[Any]]:
    """Returns the cost of a row of finite logits, and its gradients, as mpmath numbers.

    The gradients are those with respect to the logits and to dense targets (empty for a class index). They are
    difference quotients, with an error of ``10 ** (70 - digits)`` of the cost.
    """
    from mpmath import mp

    with mp.workdps(digits):
        cost = _exactly(name, len(x), weight, softcap, scale, options)
        step = mp.mpf(10) ** -70
        point = [mp.mpf(a) for a in x]
        dense = None if isinstance(target, int) else [mp.mpf(a) for a in target]

        def moved(at: Sequence[Any], c: int, by: Any) -> list[Any]:
            return [b + by * (i == c) for i, b in enumerate(at)]

        gradient = []
        for c in range(len(x)):
            ahead, behind = (cost(moved(point, c, s), target if dense is None else dense) for s in (step, -step))
            gradient.append((ahead - behind) / (2 * step))
        of_target = []
        for c in range(len(dense or ())):
            ahead, behind = (cost(point, moved(dense, c, s)) for s in (step, -step))
            of_target.append((ahead - behind) / (2 * step))
        return cost(point, target if dense is None else dense), gradient, of_target


def exact_second(
    name: str,
    x: Sequence[float],
    target: int | Sequence[float],
    directions: Sequence[float],
    softcap: float | None = None,
    **options: Any,
) -> tuple[float, list[float]]:
    """Returns the directional derivatives of the cost of a row of finite logits and of its gradient."""
    from mpmath import mp

    with mp.workdps(220):
        cost = _exactly(name, len(x), None, softcap, 1.0, options)
        step = mp.mpf(10) ** -50

        def moved(along: int, of: int, c: int) -> Any:
            at = [mp.mpf(a) + step * (along * v + of * (i == c)) for i, (a, v) in enumerate(zip(x, directions))]
            return cost(at, target)

        value = (moved(1, 0, 0) - moved(-1, 0, 0)) / (2 * step)
        corners = [[moved(i, j, c) * i * j for i in (1, -1) for j in (1, -1)] for c in range(len(x))]
        return float(value), [float(mp.fsum(a) / (4 * step**2)) for a in corners]


def _exactly(
    name: str,
    classes: int,
    weight: Sequence[float] | None,
    softcap: float | None,
    scale: float,
    options: Mapping[str, Any],
) -> Callable[[Sequence[Any], int | Sequence[Any]], Any]:
    """Returns the cost as a function of logits and a target with many digits."""
    from mpmath import mp

    w = [mp.mpf(1)] * classes if weight is None else [mp.mpf(a) for a in weight]
    parameters = {"label_smoothing": 0.0, "z_loss": 0.0, "gamma": 0.0, "poly": 0.0, "log_target": False, "beta": 0.0}
    parameters = {k: v if isinstance(v, bool) else mp.mpf(v) for k, v in {**parameters, **options}.items()}

    def logits(a: Sequence[Any]) -> list[Any]:
        return [softcap * mp.tanh(scale * b / softcap) if softcap else scale * b for b in a]

    def cost(a: Sequence[Any], target: int | Sequence[Any]) -> Any:
        return _exact_cost(name, logits(a), target, w, logits, **parameters)

    return cost


def _exact_cost(
    name: str, z: Sequence[Any], target: Any, w: Sequence[Any], logits: Callable[[Sequence[Any]], list[Any]],
    label_smoothing: Any, z_loss: Any, gamma: Any, poly: Any, log_target: bool, beta: Any,
) -> Any:  # fmt: skip
    from mpmath import mp

    if name == "nll_loss":
        return -w[target] * z[target]

    def log_softmax(a: Sequence[Any]) -> list[Any]:
        lse = mp.log(mp.fsum(map(mp.exp, a)))
        return [b - lse for b in a]

    log_p = log_softmax(z)
    lse = z[0] - log_p[0]
    if name == "kl_div_with_logits":
        t = [mp.exp(mp.mpf(a)) if log_target else mp.mpf(a) for a in target]
        return mp.fsum(a * (mp.log(a) - b) for a, b in zip(t, log_p, strict=True) if a)
    if name == "distillation_loss":
        log_q = log_softmax(logits([mp.mpf(a) for a in target]))
        p, q = [mp.exp(a) for a in log_p], [mp.exp(a) for a in log_q]
        forward = mp.fsum(b * (d - c) for b, c, d in zip(q, log_p, log_q, strict=True))
        reverse = mp.fsum(a * (c - d) for a, c, d in zip(p, log_p, log_q, strict=True))
        if beta in (0, 1):
            return reverse if beta else forward
        m = [beta * b + (1 - beta) * a for a, b in zip(p, q, strict=True)]
        of_q = mp.fsum(b * mp.log(b / c) for b, c in zip(q, m, strict=True))
        of_p = mp.fsum(a * mp.log(a / c) for a, c in zip(p, m, strict=True))
        return beta * of_q + (1 - beta) * of_p
    smooth = -mp.fsum(a * b for a, b in zip(w, log_p, strict=True)) / len(z)
    if isinstance(target, int):
        complement = 1 - mp.exp(log_p[target])
        hard = w[target] * (complement**gamma * -log_p[target] + poly * complement)
    else:
        hard = -mp.fsum(a * mp.mpf(t) * b for a, t, b in zip(w, target, log_p, strict=True))
    return (1 - label_smoothing) * hard + label_smoothing * smooth + z_loss * lse**2

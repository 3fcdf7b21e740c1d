"""torch's ways to compute losses of rows of scores."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from cupylosses.engines.row_margin.definition import END, MarginLoss
from cupylosses.testing.eager import Call

if TYPE_CHECKING:
    from torch import Tensor


def twin(
    loss: MarginLoss,
    values: Mapping[str, Any],
    reduction: str,
    class_dim: int | None = None,
    ignore_index: int | None = None,
) -> Call | None:
    """Returns torch's way to compute a loss with these parameters and flags; None if there is none.

    The returned function takes the operands, and class weights if there are any. With ``ignore_index`` it leaves out
    rows with that label.
    """
    expression = EXPRESSIONS.get(loss.name)
    if expression is None or reduction not in ("none", "mean", "sum"):
        return None
    alone = class_dim is not None and ignore_index is not None and not loss.several
    call = expression({**values, "reduction": "none" if alone else reduction})
    if call is None or class_dim is None:
        return call

    def of_rows(input: Tensor, target: Tensor, *weight: Tensor) -> Tensor:
        """Reshapes operands for torch's functions, which accept matrices with the classes in the last dimension."""
        rows = input.movedim(class_dim, -1)
        labels = target.movedim(class_dim, -1) if loss.several else target
        shape = rows.shape[:-1]
        flat = labels.reshape(-1, labels.shape[-1]) if loss.several else labels.reshape(-1)
        if alone:
            # torch's function has no ignored label: on a GPU it asserts, which ends all work there.
            used = flat != ignore_index
            result = call(rows.reshape(-1, rows.shape[-1]), flat.where(used, 0), *weight).where(used, 0)
            if reduction != "none":
                return result.sum() / (used.sum() if reduction == "mean" else 1)
            return result.reshape(shape)
        result = call(rows.reshape(-1, rows.shape[-1]), flat, *weight)
        return result.reshape(shape) if reduction == "none" else result

    return of_rows


def _multi_margin(options: Mapping[str, Any]) -> Call | None:
    def call(input: Tensor, target: Tensor, weight: Tensor | None = None) -> Tensor:
        from torch.nn.functional import multi_margin_loss

        return multi_margin_loss(input, target, weight=weight, **options)

    return call


def _multilabel_margin(options: Mapping[str, Any]) -> Call | None:
    if options["margin"] != 1:
        return None

    def call(input: Tensor, target: Tensor) -> Tensor:
        from torch.nn.functional import multilabel_margin_loss, pad

        # torch expects as many places as classes.
        missing = input.shape[-1] - target.shape[-1]
        filled = pad(target, (0, missing), value=END) if missing else target
        return multilabel_margin_loss(input, filled, reduction=options["reduction"])

    return call


#: By name of the loss, a function from the values of parameters, flags and reduction to torch's call.
EXPRESSIONS: Mapping[str, Callable[[Mapping[str, Any]], Call | None]] = {
    "multi_margin_loss": _multi_margin,
    "multilabel_margin_loss": _multilabel_margin,
}

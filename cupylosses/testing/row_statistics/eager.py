"""torch's ways to compute losses of row statistics."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from cupylosses.engines.row_statistics.definition import StatisticsLoss
from cupylosses.testing.eager import Call

if TYPE_CHECKING:
    from torch import Tensor


def twin(loss: StatisticsLoss, values: Mapping[str, Any], reduction: str) -> Call | None:
    """Returns torch's way to compute a loss with these parameters and flags; None if there is none."""
    expression = EXPRESSIONS.get(loss.name)
    if expression is None or reduction not in ("none", "mean", "sum"):
        return None
    return expression({**values, "reduction": reduction})


def _cosine_embedding(options: Mapping[str, Any]) -> Call | None:
    if options["eps"] != 1e-12:
        return None

    def call(input1: Tensor, input2: Tensor, target: Tensor) -> Tensor:
        from torch.nn.functional import cosine_embedding_loss

        shape = target.shape
        rows = [x.expand(*shape, -1).reshape(-1, x.shape[-1]) for x in (input1, input2)]
        keywords = {"margin": options["margin"], "reduction": options["reduction"]}
        values = cosine_embedding_loss(*rows, target.reshape(-1), **keywords)
        return values.reshape(shape) if options["reduction"] == "none" else values

    return call


def _cosine(options: Mapping[str, Any]) -> Call | None:
    def call(input: Tensor, target: Tensor) -> Tensor:
        from torch.nn.functional import cosine_similarity

        return _reduced(1 - cosine_similarity(input, target, -1, options["eps"]), options)

    return call


def _triplet(options: Mapping[str, Any]) -> Call | None:
    def call(anchor: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
        from torch.nn.functional import triplet_margin_loss

        return triplet_margin_loss(anchor, positive, negative, **options)

    return call


def _triplet_with_distance(options: Mapping[str, Any]) -> Call | None:
    def call(anchor: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
        from torch.nn.functional import triplet_margin_with_distance_loss

        return triplet_margin_with_distance_loss(anchor, positive, negative, **options)

    return call


def _pearson(options: Mapping[str, Any]) -> Call | None:
    def call(input: Tensor, target: Tensor) -> Tensor:
        from torch.nn.functional import cosine_similarity

        centred = [x - x.mean(-1, keepdim=True) for x in (input, target)]
        return _reduced(1 - cosine_similarity(*centred, -1, 0.0), options)

    return call


def _ccc(options: Mapping[str, Any]) -> Call | None:
    def call(input: Tensor, target: Tensor) -> Tensor:
        x, y = (z - z.mean(-1, keepdim=True) for z in (input, target))
        count = input.shape[-1] - options["unbiased"]
        spread = (x.square().sum(-1) + y.square().sum(-1)) / count + (input.mean(-1) - target.mean(-1)).square()
        return _reduced(1 - 2 * (x * y).sum(-1) / count / spread, options)

    return call


def _reduced(rows: Tensor, options: Mapping[str, Any]) -> Tensor:
    return rows if options["reduction"] == "none" else getattr(rows, options["reduction"])()


#: By name of the loss, a function from the values of parameters, flags and reduction to torch's call; it returns None
#: for values that torch does not support.
EXPRESSIONS: Mapping[str, Callable[[Mapping[str, Any]], Call | None]] = {
    "cosine_embedding_loss": _cosine_embedding,
    "cosine_loss": _cosine,
    "triplet_margin_loss": _triplet,
    "triplet_margin_with_distance_loss": _triplet_with_distance,
    "pearson_loss": _pearson,
    "ccc_loss": _ccc,
}

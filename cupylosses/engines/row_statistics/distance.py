"""Losses of distances, with a distance function that the caller chooses.

If the library knows the function, one definition computes both the distances and the loss in a single pass. Any other
function is called, and the distances it returns are the operands of an element-wise loss.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from cupylosses import interop
from cupylosses.definition.base import Definition
from cupylosses.engines.row_statistics.definition import StatisticsFunction, StatisticsLoss

#: Options of a known distance function that its fused definition accepts too.
_OPTIONS = ("p", "eps")


@dataclass(frozen=True, eq=False, kw_only=True)
class DistanceLoss(StatisticsLoss):
    """A triplet loss. Its own expressions compute the default distance.

    ``fused``     Pairs of a known distance function and the definition that computes it together with the loss.
    ``composed``  Two element-wise losses of distances. The first takes the distances to positives and negatives; the
                  second, for `swap`, also takes the distances between positives and negatives.
    """

    fused: tuple[tuple[StatisticsFunction, StatisticsLoss], ...] = ()
    composed: tuple[Definition, ...] = ()

    @property
    def common(self) -> Mapping[str, Any]:
        return {"distance_function": None, **super().common}

    @cached_property
    def setting_names(self) -> tuple[str, ...]:
        return ("distance_function", "reduction", *(x.name for x in self.options), "feature_dim", "out_dtype")

    @property
    def common_texts(self) -> Mapping[str, str]:
        return {**super().common_texts, "distance_function": _FUNCTION}

    def chosen(
        self, arrays: tuple[Any, ...], settings: tuple[Any, ...]
    ) -> tuple[Definition, tuple[Any, ...], tuple[Any, ...]]:
        function = settings[0]
        if function is None:
            return self, arrays, settings[1:]
        if not callable(function):
            raise TypeError(
                f"{self.name}: `distance_function` must be a function of two arrays, or None for the Euclidean "
                f"distance, got {function!r}."
            )
        arguments = dict(zip(self.setting_names[1:], settings[1:], strict=True))
        served: Definition
        known = self._known(function, arrays[0])
        if known is not None:
            served, options = known
            arguments |= options
        else:
            swap = bool(arguments["swap"])
            served = self.composed[1 if swap else 0]
            if arguments["feature_dim"] != -1:
                raise ValueError(
                    f"{self.name}: `feature_dim` must be -1 with a `distance_function` of your own, got "
                    f"{arguments['feature_dim']}. The function decides which dimension it sums over."
                )
            arrays = (*self._distances(function, arrays[:3], swap), *arrays[3:])
        return served, arrays, tuple([arguments.get(x, default) for x, default in _defaults(served)])

    def _distances(self, function: Callable[..., Any], vectors: tuple[Any, ...], swap: bool) -> list[Any]:
        anchor, positive, negative = vectors
        pairs = [(anchor, positive), (anchor, negative), *[(positive, negative)] * swap]
        distances = [function(x, y) for x, y in pairs]
        for x in distances:
            if interop.kind(x) == "unknown":
                raise TypeError(
                    f"{self.name}: `distance_function` must return an array, got {type(x).__name__}. Return one "
                    "distance per pair."
                )
        return distances

    def _known(self, function: Any, array: Any) -> tuple[StatisticsLoss, dict[str, Any]] | None:
        """Returns the fused definition and the options of a function, or None if the function is unknown. Functions are
        recognized by identity or type, also inside a `functools.partial`. ``array`` is any operand.
        """
        options: dict[str, Any] = {}
        if type(function) is partial:
            if function.args or not set(function.keywords) <= set(_OPTIONS):
                return None
            function, options = function.func, dict(function.keywords)
        torch = _loaded_torch(array)
        module = torch and torch.nn.PairwiseDistance
        for known, served in self.fused:
            if getattr(function, "loss", None) is known:
                return served, options
            twin = torch and known.torch and getattr(torch.nn.functional, known.torch)
            if twin is None or known.torch != "pairwise_distance":
                continue
            if function is twin:
                return served, options
            plain = type(function) is module and not (function.keepdim or _has_hooks(function))
            if plain and not options:
                return served, {"p": function.norm, "eps": function.eps}
        return None


def _loaded_torch(array: Any) -> Any:
    """Returns torch, or None if it is not loaded, so that no argument can be its object. A torch array takes the
    import, because Dynamo can trace an import, but not a look-up in ``sys.modules``.
    """
    if interop.kind(array) == "torch":
        import torch

        return torch
    return sys.modules.get("torch")


def _has_hooks(module: Any) -> bool:
    return any([module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks])


def _defaults(loss: Definition) -> list[tuple[str, Any]]:
    return list(zip(loss.setting_names, loss.default_settings, strict=True))


_FUNCTION = (
    "Function of two arrays that returns the distance of each pair. Default None, the Euclidean distance of torch's "
    "`PairwiseDistance`. That, `pairwise_distance` of torch or of this library, a `functools.partial` of these with "
    "`p` or `eps`, and `cosine_distance` are computed in one pass with the loss. Any other is called for each kind of "
    "pair, and its results may have any shape."
)

"""The modules as editors and type checkers see them. Written by scripts/generate.py; do not edit."""

from collections.abc import Callable
from typing import Any, Literal, overload

import torch

from cupylosses.engines.softmax.call import RowResult

_Reduction = Literal["none", "mean", "sum", "batchmean", "weighted_mean"]
_RowReduction = Literal["none", "mean", "sum", "batchmean"]
_Check = Literal["lazy", "sync", "off"]

__all__: list[str]

def module_of(function: Callable[..., Any]) -> type[torch.nn.Module]: ...

class BCELoss(torch.nn.BCELoss):
    """Cross entropy of predicted probabilities and labels of 0 and 1, element by element."""

    def forward(
        self,
        input: torch.Tensor,
        target: torch.Tensor,
        *,
        weight: torch.Tensor | float | None = None,
        mask: torch.Tensor | None = None,
        normalizer: torch.Tensor | float | None = None,
        dim: int | tuple[int, ...] | None = None,
        out_dtype: Any = None,
    ) -> torch.Tensor: ...

class BCEWithLogitsLoss(torch.nn.BCEWithLogitsLoss):
    """Cross entropy of logits and labels of 0 and 1, element by element."""

    def forward(
        self,
        input: torch.Tensor,
        target: torch.Tensor,
        *,
        weight: torch.Tensor | float | None = None,
        mask: torch.Tensor | None = None,
        normalizer: torch.Tensor | float | None = None,
        dim: int | tuple[int, ...] | None = None,
        out_dtype: Any = None,
    ) -> torch.Tensor: ...

class MultiLabelSoftMarginLoss(torch.nn.MultiLabelSoftMarginLoss):
    """Cross entropy of logits and labels of 0 and 1, averaged over the classes in the last dimension."""

    def forward(
        self,
        input: torch.Tensor,
        target: torch.Tensor,
        *,
        weight: torch.Tensor | float | None = None,
        mask: torch.Tensor | None = None,
        normalizer: torch.Tensor | float | None = None,
        dim: int | tuple[int, ...] | None = None,
        out_dtype: Any = None,
    ) -> torch.Tensor: ...

class SoftMarginLoss(torch.nn.SoftMarginLoss):
    """Logistic loss of a score against a label of -1 or +1, element by element."""

    def forward(
        self,
        input: torch.Tensor,
        target: torch.Tensor,
        *,
        weight: torch.Tensor | float | None = None,
        mask: torch.Tensor | None = None,
        normalizer: torch.Tensor | float | None = None,
        dim: int | tuple[int, ...] | None = None,
        out_dtype: Any = None,
    ) -> torch.Tensor: ...

class KLDivLoss(torch.nn.KLDivLoss):
    """Kullback-Leibler divergence of the prediction from the target, element by element."""

    def forward(
        self,
        input: torch.Tensor,
        target: torch.Tensor,
        *,
        weight: torch.Tensor | float | None = None,
        mask: torch.Tensor | None = None,
        normalizer: torch.Tensor | float | None = None,
        dim: int | tuple[int, ...] | None = None,
        out_dtype: Any = None,
    ) -> torch.Tensor: ...

class GeneralizedKlDivLoss(torch.nn.Module):
    """Kullback-Leibler divergence of measures that need not sum to 1, of which no term is negative."""

    def __init__(
        self,
        reduction: _Reduction = "mean",
        *,
        weight: torch.Tensor | float | None = None,
        dim: int | tuple[int, ...] | None = None,
        out_dtype: Any = None,
    ) -> None: ...
    def forward(
        self,
        input: torch.Tensor,
        target: torch.Tensor,
        *,
        weight: torch.Tensor | float | None = None,
        mask: torch.Tensor | None = None,
        normalizer: torch.Tensor | float | None = None,
        dim: int | tuple[int, ...] | None = None,
        out_dtype: Any = None,
    ) -> torch.Tensor: ...

class ItakuraSaitoLoss(torch.nn.Module):
    """Itakura-Saito divergence of power spectra, which asks for their ratio alone."""

    def __init__(
        self,
        reduction: _Reduction = "mean",
        *,
        weight: torch.Tensor | float | None = None,
        dim: int | tuple[int, ...] | None = None,
        out_dtype: Any = None,
    ) -> None: ...
    def forward(
        self,
        input: torch.Tensor,
        target: torch.Tensor,
        *,
        weight: torch.Tensor | float | None = None,
        mask: torch.Tensor | None = None,
        normalizer: torch.Tensor | float | None = None,
        dim: int | tuple[int, ...] | None = None,
        out_dtype: Any = None,
    ) -> torch.Tensor: ...

class JsDivLoss(torch.nn.Module):
    """Jensen-Shannon divergence of prediction and target, element by element."""

    def __init__(
        self,
        beta: float = 0.5,
        log_target: bool = False,
        log_input: bool = True,
        reduction: _Reduction = "mean",
        *,
        weight: torch.Tensor | float | None = None,
        dim: int | tuple[int, ...] | None = None,
        out_dtype: Any = None,
    ) -> None: ...
    def forward(
        self,
        input: torch.Tensor,
        target: torch.Tensor,
        *,
        weight: torch.Tensor | float | None = None,
        mask: torch.Tensor | None = None,
        normalizer: torch.Tensor | float | None = None,
        dim: int | tuple[int, ...] | None = None,
        out_dtype: Any = None,
    ) -> torch.Tensor: ...

class TvDistanceLoss(torch.nn.Module):
    """Total variation distance between distributions, element by element."""

    def __init__(
        self,
        reduction: _Reduction = "mean",
        *,
        weight: torch.Tensor | float | None = None,
        dim: int | tuple[int, ...] | None = None,
        out_dtype: Any = None,
    ) -> None: ...
    def forward(
        self,
        input: torch.Tensor,
        target: torch.Tensor,
        *,
        weight: torch.Tensor | float | None = None,
        mask: torch.Tensor | None = None,
        normalizer: torch.Tensor | float | None = None,
        dim: int | tuple[int, ...] | None = None,
        out_dtype: Any = None,
    ) -> torch.Tensor: ...

class SigmoidFocalLoss(torch.nn.Module):
    """Focal loss of logits and labels of 0 and 1: cross entropy that counts less what is decided well."""

    def __init__(
        self,
        alpha: float = 0.25,
        gamma: float = 2.0,
        reduction: _Reduction = "mean",
        *,
        weight: torch.Tensor | float | None = None,
        dim: int | tuple[int, ...] | None = None,
        out_dtype: Any = None,
    ) -> None: ...
    def forward(
        self,
        input: torch.Tensor,
        target: torch.Tensor,
        *,
        weight: torch.Tensor | float | None = None,
        mask: torch.Tensor | None = None,
        normalizer: torch.Tensor | float | None = None,
        dim: int | tuple[int, ...] | None = None,
        out_dtype: Any = None,
    ) -> torch.Tensor: ...

class AsymmetricLoss(torch.nn.Module):
    """Asymmetric loss of logits and labels of 0 and 1: focal loss that forgives easy negatives most."""

    def __init__(
        self,
        gamma_neg: float = 4.0,
        gamma_pos: float = 1.0,
        clip: float = 0.05,
        reduction: _Reduction = "mean",
        *,
        weight: torch.Tensor | float | None = None,
        dim: int | tuple[int, ...] | None = None,
        out_dtype: Any = None,
    ) -> None: ...
    def forward(
        self,
        input: torch.Tensor,
        target: torch.Tensor,
        *,
        weight: torch.Tensor | float | None = None,
        mask: torch.Tensor | None = None,
        normalizer: torch.Tensor | float | None = None,
        dim: int | tuple[int, ...] | None = None,
        out_dtype: Any = None,
    ) -> torch.Tensor: ...

class Poly1Loss(torch.nn.Module):
    """Poly-1 loss of logits and labels of 0 and 1: cross entropy plus a multiple of the probability of error."""

    def __init__(
        self,
        epsilon: float = 2.0,
        reduction: _Reduction = "mean",
        *,
        weight: torch.Tensor | float | None = None,
        dim: int | tuple[int, ...] | None = None,
        out_dtype: Any = None,
    ) -> None: ...
    def forward(
        self,
        input: torch.Tensor,
        target: torch.Tensor,
        *,
        weight: torch.Tensor | float | None = None,
        mask: torch.Tensor | None = None,
        normalizer: torch.Tensor | float | None = None,
        dim: int | tuple[int, ...] | None = None,
        out_dtype: Any = None,
    ) -> torch.Tensor: ...

class GeneralizedCrossEntropyLoss(torch.nn.Module):
    """Generalized cross entropy of logits and labels of 0 and 1, which mislabelled elements pull on less."""

    def __init__(
        self,
        q: float = 0.7,
        reduction: _Reduction = "mean",
        *,
        weight: torch.Tensor | float | None = None,
        dim: int | tuple[int, ...] | None = None,
        out_dtype: Any = None,
    ) -> None: ...
    def forward(
        self,
        input: torch.Tensor,
        target: torch.Tensor,
        *,
        weight: torch.Tensor | float | None = None,
        mask: torch.Tensor | None = None,
        normalizer: torch.Tensor | float | None = None,
        dim: int | tuple[int, ...] | None = None,
        out_dtype: Any = None,
    ) -> torch.Tensor: ...

class PoissonNLLLoss(torch.nn.PoissonNLLLoss):
    """Negative log-likelihood of counts, given the rates of their Poisson distributions."""

    def forward(
        self,
        input: torch.Tensor,
        target: torch.Tensor,
        *,
        weight: torch.Tensor | float | None = None,
        mask: torch.Tensor | None = None,
        normalizer: torch.Tensor | float | None = None,
        dim: int | tuple[int, ...] | None = None,
        out_dtype: Any = None,
    ) -> torch.Tensor: ...

class GaussianNLLLoss(torch.nn.GaussianNLLLoss):
    """Negative log-likelihood of a target, given mean and variance of its normal distribution."""

    def forward(
        self,
        input: torch.Tensor,
        target: torch.Tensor,
        var: torch.Tensor | float,
        *,
        weight: torch.Tensor | float | None = None,
        mask: torch.Tensor | None = None,
        normalizer: torch.Tensor | float | None = None,
        dim: int | tuple[int, ...] | None = None,
        out_dtype: Any = None,
    ) -> torch.Tensor: ...

class HingeLoss(torch.nn.Module):
    """Hinge loss of a margin classifier, element by element, with broadcasting."""

    def __init__(
        self,
        margin: float = 1.0,
        reduction: _Reduction = "mean",
        *,
        weight: torch.Tensor | float | None = None,
        dim: int | tuple[int, ...] | None = None,
        out_dtype: Any = None,
    ) -> None: ...
    def forward(
        self,
        input: torch.Tensor,
        target: torch.Tensor,
        *,
        weight: torch.Tensor | float | None = None,
        mask: torch.Tensor | None = None,
        normalizer: torch.Tensor | float | None = None,
        dim: int | tuple[int, ...] | None = None,
        out_dtype: Any = None,
    ) -> torch.Tensor: ...

class HingeEmbeddingLoss(torch.nn.HingeEmbeddingLoss):
    """Distance of a similar pair, or what a dissimilar pair lacks of the margin, element by element."""

    def forward(
        self,
        input: torch.Tensor,
        target: torch.Tensor,
        *,
        weight: torch.Tensor | float | None = None,
        mask: torch.Tensor | None = None,
        normalizer: torch.Tensor | float | None = None,
        dim: int | tuple[int, ...] | None = None,
        out_dtype: Any = None,
    ) -> torch.Tensor: ...

class MarginRankingLoss(torch.nn.MarginRankingLoss):
    """Hinge loss of the order of two scores, element by element."""

    def forward(
        self,
        input1: torch.Tensor,
        input2: torch.Tensor,
        target: torch.Tensor,
        *,
        weight: torch.Tensor | float | None = None,
        mask: torch.Tensor | None = None,
        normalizer: torch.Tensor | float | None = None,
        dim: int | tuple[int, ...] | None = None,
        out_dtype: Any = None,
    ) -> torch.Tensor: ...

class SquaredHingeLoss(torch.nn.Module):
    """Squared hinge loss of a margin classifier, element by element."""

    def __init__(
        self,
        margin: float = 1.0,
        reduction: _Reduction = "mean",
        *,
        weight: torch.Tensor | float | None = None,
        dim: int | tuple[int, ...] | None = None,
        out_dtype: Any = None,
    ) -> None: ...
    def forward(
        self,
        input: torch.Tensor,
        target: torch.Tensor,
        *,
        weight: torch.Tensor | float | None = None,
        mask: torch.Tensor | None = None,
        normalizer: torch.Tensor | float | None = None,
        dim: int | tuple[int, ...] | None = None,
        out_dtype: Any = None,
    ) -> torch.Tensor: ...

class LogisticLoss(torch.nn.Module):
    """Logistic loss of a score against a label of -1 or +1, element by element."""

    def __init__(
        self,
        reduction: _Reduction = "mean",
        *,
        weight: torch.Tensor | float | None = None,
        dim: int | tuple[int, ...] | None = None,
        out_dtype: Any = None,
    ) -> None: ...
    def forward(
        self,
        input: torch.Tensor,
        target: torch.Tensor,
        *,
        weight: torch.Tensor | float | None = None,
        mask: torch.Tensor | None = None,
        normalizer: torch.Tensor | float | None = None,
        dim: int | tuple[int, ...] | None = None,
        out_dtype: Any = None,
    ) -> torch.Tensor: ...

class ExponentialLoss(torch.nn.Module):
    """Exponential loss of a score against a label of -1 or +1, that of AdaBoost, element by element."""

    def __init__(
        self,
        reduction: _Reduction = "mean",
        *,
        weight: torch.Tensor | float | None = None,
        dim: int | tuple[int, ...] | None = None,
        out_dtype: Any = None,
    ) -> None: ...
    def forward(
        self,
        input: torch.Tensor,
        target: torch.Tensor,
        *,
        weight: torch.Tensor | float | None = None,
        mask: torch.Tensor | None = None,
        normalizer: torch.Tensor | float | None = None,
        dim: int | tuple[int, ...] | None = None,
        out_dtype: Any = None,
    ) -> torch.Tensor: ...

class MSELoss(torch.nn.MSELoss):
    """Squared error."""

    def forward(
        self,
        input: torch.Tensor,
        target: torch.Tensor,
        *,
        weight: torch.Tensor | float | None = None,
        mask: torch.Tensor | None = None,
        normalizer: torch.Tensor | float | None = None,
        dim: int | tuple[int, ...] | None = None,
        out_dtype: Any = None,
    ) -> torch.Tensor: ...

class L1Loss(torch.nn.L1Loss):
    """Absolute error."""

    def forward(
        self,
        input: torch.Tensor,
        target: torch.Tensor,
        *,
        weight: torch.Tensor | float | None = None,
        mask: torch.Tensor | None = None,
        normalizer: torch.Tensor | float | None = None,
        dim: int | tuple[int, ...] | None = None,
        out_dtype: Any = None,
    ) -> torch.Tensor: ...

class SmoothL1Loss(torch.nn.SmoothL1Loss):
    """Squared error for small differences, absolute error for large ones."""

    def forward(
        self,
        input: torch.Tensor,
        target: torch.Tensor,
        *,
        weight: torch.Tensor | float | None = None,
        mask: torch.Tensor | None = None,
        normalizer: torch.Tensor | float | None = None,
        dim: int | tuple[int, ...] | None = None,
        out_dtype: Any = None,
    ) -> torch.Tensor: ...

class HuberLoss(torch.nn.HuberLoss):
    """Squared error for small differences, absolute error scaled by delta for large ones."""

    def forward(
        self,
        input: torch.Tensor,
        target: torch.Tensor,
        *,
        weight: torch.Tensor | float | None = None,
        mask: torch.Tensor | None = None,
        normalizer: torch.Tensor | float | None = None,
        dim: int | tuple[int, ...] | None = None,
        out_dtype: Any = None,
    ) -> torch.Tensor: ...

class MsleLoss(torch.nn.Module):
    """Squared error of the logarithms, each of 1 plus a number: mean squared logarithmic error."""

    def __init__(
        self,
        reduction: _Reduction = "mean",
        *,
        weight: torch.Tensor | float | None = None,
        dim: int | tuple[int, ...] | None = None,
        out_dtype: Any = None,
    ) -> None: ...
    def forward(
        self,
        input: torch.Tensor,
        target: torch.Tensor,
        *,
        weight: torch.Tensor | float | None = None,
        mask: torch.Tensor | None = None,
        normalizer: torch.Tensor | float | None = None,
        dim: int | tuple[int, ...] | None = None,
        out_dtype: Any = None,
    ) -> torch.Tensor: ...

class MapeLoss(torch.nn.Module):
    """Absolute error relative to the target, in percent: mean absolute percentage error."""

    def __init__(
        self,
        epsilon: float = 1e-07,
        reduction: _Reduction = "mean",
        *,
        weight: torch.Tensor | float | None = None,
        dim: int | tuple[int, ...] | None = None,
        out_dtype: Any = None,
    ) -> None: ...
    def forward(
        self,
        input: torch.Tensor,
        target: torch.Tensor,
        *,
        weight: torch.Tensor | float | None = None,
        mask: torch.Tensor | None = None,
        normalizer: torch.Tensor | float | None = None,
        dim: int | tuple[int, ...] | None = None,
        out_dtype: Any = None,
    ) -> torch.Tensor: ...

class LogCoshLoss(torch.nn.Module):
    """Logarithm of the hyperbolic cosine: half the squared error for small differences, the absolute for large."""

    def __init__(
        self,
        reduction: _Reduction = "mean",
        *,
        weight: torch.Tensor | float | None = None,
        dim: int | tuple[int, ...] | None = None,
        out_dtype: Any = None,
    ) -> None: ...
    def forward(
        self,
        input: torch.Tensor,
        target: torch.Tensor,
        *,
        weight: torch.Tensor | float | None = None,
        mask: torch.Tensor | None = None,
        normalizer: torch.Tensor | float | None = None,
        dim: int | tuple[int, ...] | None = None,
        out_dtype: Any = None,
    ) -> torch.Tensor: ...

class CharbonnierLoss(torch.nn.Module):
    """Charbonnier loss, a smooth absolute error, also known as pseudo-Huber."""

    def __init__(
        self,
        scale: float = 1.0,
        reduction: _Reduction = "mean",
        *,
        weight: torch.Tensor | float | None = None,
        dim: int | tuple[int, ...] | None = None,
        out_dtype: Any = None,
    ) -> None: ...
    def forward(
        self,
        input: torch.Tensor,
        target: torch.Tensor,
        *,
        weight: torch.Tensor | float | None = None,
        mask: torch.Tensor | None = None,
        normalizer: torch.Tensor | float | None = None,
        dim: int | tuple[int, ...] | None = None,
        out_dtype: Any = None,
    ) -> torch.Tensor: ...

class CauchyLoss(torch.nn.Module):
    """Cauchy loss, the negative log-likelihood of a Cauchy distribution; also known as Lorentzian."""

    def __init__(
        self,
        scale: float = 1.0,
        reduction: _Reduction = "mean",
        *,
        weight: torch.Tensor | float | None = None,
        dim: int | tuple[int, ...] | None = None,
        out_dtype: Any = None,
    ) -> None: ...
    def forward(
        self,
        input: torch.Tensor,
        target: torch.Tensor,
        *,
        weight: torch.Tensor | float | None = None,
        mask: torch.Tensor | None = None,
        normalizer: torch.Tensor | float | None = None,
        dim: int | tuple[int, ...] | None = None,
        out_dtype: Any = None,
    ) -> torch.Tensor: ...

class WelschLoss(torch.nn.Module):
    """Welsch loss, an upside-down Gaussian; also known as Leclerc."""

    def __init__(
        self,
        scale: float = 1.0,
        reduction: _Reduction = "mean",
        *,
        weight: torch.Tensor | float | None = None,
        dim: int | tuple[int, ...] | None = None,
        out_dtype: Any = None,
    ) -> None: ...
    def forward(
        self,
        input: torch.Tensor,
        target: torch.Tensor,
        *,
        weight: torch.Tensor | float | None = None,
        mask: torch.Tensor | None = None,
        normalizer: torch.Tensor | float | None = None,
        dim: int | tuple[int, ...] | None = None,
        out_dtype: Any = None,
    ) -> torch.Tensor: ...

class GemanMcclureLoss(torch.nn.Module):
    """Geman-McClure loss, which is never more than 2."""

    def __init__(
        self,
        scale: float = 1.0,
        reduction: _Reduction = "mean",
        *,
        weight: torch.Tensor | float | None = None,
        dim: int | tuple[int, ...] | None = None,
        out_dtype: Any = None,
    ) -> None: ...
    def forward(
        self,
        input: torch.Tensor,
        target: torch.Tensor,
        *,
        weight: torch.Tensor | float | None = None,
        mask: torch.Tensor | None = None,
        normalizer: torch.Tensor | float | None = None,
        dim: int | tuple[int, ...] | None = None,
        out_dtype: Any = None,
    ) -> torch.Tensor: ...

class WingLoss(torch.nn.Module):
    """Wing loss: logarithmic, and so steep, for small differences, absolute error for large ones."""

    def __init__(
        self,
        width: float = 5.0,
        epsilon: float = 0.5,
        reduction: _Reduction = "mean",
        *,
        weight: torch.Tensor | float | None = None,
        dim: int | tuple[int, ...] | None = None,
        out_dtype: Any = None,
    ) -> None: ...
    def forward(
        self,
        input: torch.Tensor,
        target: torch.Tensor,
        *,
        weight: torch.Tensor | float | None = None,
        mask: torch.Tensor | None = None,
        normalizer: torch.Tensor | float | None = None,
        dim: int | tuple[int, ...] | None = None,
        out_dtype: Any = None,
    ) -> torch.Tensor: ...

class QuantileLoss(torch.nn.Module):
    """Quantile loss, also known as pinball: absolute error with one weight below the target and one above."""

    def __init__(
        self,
        quantile: float = 0.5,
        reduction: _Reduction = "mean",
        *,
        weight: torch.Tensor | float | None = None,
        dim: int | tuple[int, ...] | None = None,
        out_dtype: Any = None,
    ) -> None: ...
    def forward(
        self,
        input: torch.Tensor,
        target: torch.Tensor,
        *,
        weight: torch.Tensor | float | None = None,
        mask: torch.Tensor | None = None,
        normalizer: torch.Tensor | float | None = None,
        dim: int | tuple[int, ...] | None = None,
        out_dtype: Any = None,
    ) -> torch.Tensor: ...

class GeneralRobustLoss(torch.nn.Module):
    """Barron's general robust loss, of which `alpha` sets how little an outlier counts."""

    def __init__(
        self,
        alpha: torch.Tensor | float | None = None,
        scale: torch.Tensor | float | None = None,
        reduction: _Reduction = "mean",
        *,
        weight: torch.Tensor | float | None = None,
        dim: int | tuple[int, ...] | None = None,
        out_dtype: Any = None,
    ) -> None: ...
    def forward(
        self,
        input: torch.Tensor,
        target: torch.Tensor,
        *,
        weight: torch.Tensor | float | None = None,
        mask: torch.Tensor | None = None,
        normalizer: torch.Tensor | float | None = None,
        dim: int | tuple[int, ...] | None = None,
        out_dtype: Any = None,
    ) -> torch.Tensor: ...

class CrossEntropyLoss(torch.nn.CrossEntropyLoss):
    """Cross entropy of logits against class indices, or against a probability per class."""

    @overload
    def forward(
        self,
        input: torch.Tensor,
        target: torch.Tensor,
        *,
        z_loss: float | None = None,
        gamma: float | None = None,
        poly: float | None = None,
        class_dim: int | None = None,
        softcap: float | None = None,
        logit_scale: float | None = None,
        mask: torch.Tensor | None = None,
        normalizer: torch.Tensor | float | None = None,
        out_dtype: Any = None,
        return_lse: Literal[False] | None = None,
        return_accuracy: Literal[False] | None = None,
        inplace_backward: bool | None = None,
        check_targets: _Check | None = None,
    ) -> torch.Tensor: ...
    @overload
    def forward(
        self,
        input: torch.Tensor,
        target: torch.Tensor,
        *,
        z_loss: float | None = None,
        gamma: float | None = None,
        poly: float | None = None,
        class_dim: int | None = None,
        softcap: float | None = None,
        logit_scale: float | None = None,
        mask: torch.Tensor | None = None,
        normalizer: torch.Tensor | float | None = None,
        out_dtype: Any = None,
        return_lse: Literal[True],
        return_accuracy: bool | None = None,
        inplace_backward: bool | None = None,
        check_targets: _Check | None = None,
    ) -> RowResult: ...
    @overload
    def forward(
        self,
        input: torch.Tensor,
        target: torch.Tensor,
        *,
        z_loss: float | None = None,
        gamma: float | None = None,
        poly: float | None = None,
        class_dim: int | None = None,
        softcap: float | None = None,
        logit_scale: float | None = None,
        mask: torch.Tensor | None = None,
        normalizer: torch.Tensor | float | None = None,
        out_dtype: Any = None,
        return_lse: bool | None = None,
        return_accuracy: Literal[True],
        inplace_backward: bool | None = None,
        check_targets: _Check | None = None,
    ) -> RowResult: ...
    @overload
    def forward(
        self,
        input: torch.Tensor,
        target: torch.Tensor,
        *,
        z_loss: float | None = None,
        gamma: float | None = None,
        poly: float | None = None,
        class_dim: int | None = None,
        softcap: float | None = None,
        logit_scale: float | None = None,
        mask: torch.Tensor | None = None,
        normalizer: torch.Tensor | float | None = None,
        out_dtype: Any = None,
        return_lse: bool | None = None,
        return_accuracy: bool | None = None,
        inplace_backward: bool | None = None,
        check_targets: _Check | None = None,
    ) -> torch.Tensor | RowResult: ...

class SoftmaxFocalLoss(torch.nn.Module):
    """Cross entropy of logits against class indices in which rows that are decided well count less."""

    def __init__(
        self,
        alpha: torch.Tensor | None = None,
        gamma: float = 2.0,
        ignore_index: int = -100,
        reduction: _RowReduction = "mean",
        *,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        poly: float = 0.0,
        class_dim: int | None = None,
        softcap: float | None = None,
        logit_scale: float = 1.0,
        out_dtype: Any = None,
        return_lse: bool = False,
        return_accuracy: bool = False,
        inplace_backward: bool = False,
        check_targets: _Check = "lazy",
    ) -> None: ...
    @overload
    def forward(
        self,
        input: torch.Tensor,
        target: torch.Tensor,
        *,
        label_smoothing: float | None = None,
        z_loss: float | None = None,
        poly: float | None = None,
        class_dim: int | None = None,
        softcap: float | None = None,
        logit_scale: float | None = None,
        mask: torch.Tensor | None = None,
        normalizer: torch.Tensor | float | None = None,
        out_dtype: Any = None,
        return_lse: Literal[False],
        return_accuracy: Literal[False],
        inplace_backward: bool | None = None,
        check_targets: _Check | None = None,
    ) -> torch.Tensor: ...
    @overload
    def forward(
        self,
        input: torch.Tensor,
        target: torch.Tensor,
        *,
        label_smoothing: float | None = None,
        z_loss: float | None = None,
        poly: float | None = None,
        class_dim: int | None = None,
        softcap: float | None = None,
        logit_scale: float | None = None,
        mask: torch.Tensor | None = None,
        normalizer: torch.Tensor | float | None = None,
        out_dtype: Any = None,
        return_lse: Literal[True],
        return_accuracy: bool | None = None,
        inplace_backward: bool | None = None,
        check_targets: _Check | None = None,
    ) -> RowResult: ...
    @overload
    def forward(
        self,
        input: torch.Tensor,
        target: torch.Tensor,
        *,
        label_smoothing: float | None = None,
        z_loss: float | None = None,
        poly: float | None = None,
        class_dim: int | None = None,
        softcap: float | None = None,
        logit_scale: float | None = None,
        mask: torch.Tensor | None = None,
        normalizer: torch.Tensor | float | None = None,
        out_dtype: Any = None,
        return_lse: bool | None = None,
        return_accuracy: Literal[True],
        inplace_backward: bool | None = None,
        check_targets: _Check | None = None,
    ) -> RowResult: ...
    @overload
    def forward(
        self,
        input: torch.Tensor,
        target: torch.Tensor,
        *,
        label_smoothing: float | None = None,
        z_loss: float | None = None,
        poly: float | None = None,
        class_dim: int | None = None,
        softcap: float | None = None,
        logit_scale: float | None = None,
        mask: torch.Tensor | None = None,
        normalizer: torch.Tensor | float | None = None,
        out_dtype: Any = None,
        return_lse: bool | None = None,
        return_accuracy: bool | None = None,
        inplace_backward: bool | None = None,
        check_targets: _Check | None = None,
    ) -> torch.Tensor | RowResult: ...

class NLLLoss(torch.nn.NLLLoss):
    """Negative log-likelihood of class indices under log-probabilities."""

    def forward(
        self,
        input: torch.Tensor,
        target: torch.Tensor,
        *,
        class_dim: int | None = None,
        mask: torch.Tensor | None = None,
        normalizer: torch.Tensor | float | None = None,
        out_dtype: Any = None,
        check_targets: _Check | None = None,
    ) -> torch.Tensor: ...

class KLDivWithLogitsLoss(torch.nn.Module):
    """Kullback-Leibler divergence of the distribution that logits are of from the target."""

    def __init__(
        self,
        reduction: _RowReduction = "batchmean",
        log_target: bool = False,
        *,
        class_dim: int = -1,
        temperature: float = 1.0,
        out_dtype: Any = None,
        inplace_backward: bool = False,
    ) -> None: ...
    def forward(
        self,
        input: torch.Tensor,
        target: torch.Tensor,
        *,
        class_dim: int | None = None,
        temperature: float | None = None,
        mask: torch.Tensor | None = None,
        normalizer: torch.Tensor | float | None = None,
        out_dtype: Any = None,
        inplace_backward: bool | None = None,
    ) -> torch.Tensor: ...

class DistillationLoss(torch.nn.Module):
    """Divergence between the distributions of a student's and a teacher's logits."""

    def __init__(
        self,
        temperature: float = 1.0,
        beta: float = 0.0,
        reduction: _RowReduction = "batchmean",
        *,
        class_dim: int = -1,
        out_dtype: Any = None,
        inplace_backward: bool = False,
    ) -> None: ...
    def forward(
        self,
        student_logits: torch.Tensor,
        teacher_logits: torch.Tensor,
        *,
        class_dim: int | None = None,
        mask: torch.Tensor | None = None,
        normalizer: torch.Tensor | float | None = None,
        out_dtype: Any = None,
        inplace_backward: bool | None = None,
    ) -> torch.Tensor: ...

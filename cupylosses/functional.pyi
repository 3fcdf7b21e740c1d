"""The functions as editors and type checkers see them. Written by scripts/generate.py; do not edit."""

from typing import Any, Literal, Protocol, TypeVar, overload

from cupylosses.engines.softmax.call import RowResult

class _Exchangeable(Protocol):
    """A torch tensor, a CuPy array, a NumPy array, or what else gives its memory through DLPack."""

    def __dlpack__(self, *, stream: Any = ...) -> Any: ...

_Array = TypeVar("_Array", bound=_Exchangeable)

__all__: list[str]

_Reduction = Literal["none", "mean", "sum", "batchmean", "weighted_mean"]
_RowReduction = Literal["none", "mean", "sum", "batchmean"]
_Check = Literal["lazy", "sync", "off"]

def binary_cross_entropy(
    input: _Array,
    target: _Exchangeable,
    weight: _Exchangeable | float | None = None,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: _Reduction = "mean",
    *,
    mask: _Exchangeable | None = None,
    normalizer: _Exchangeable | float | None = None,
    dim: int | tuple[int, ...] | None = None,
    out_dtype: Any = None,
) -> _Array:
    """Cross entropy of predicted probabilities and labels of 0 and 1, element by element.

        -(target log(input) + (1 - target) log(1 - input)), each logarithm at least -100

    Args:
        input: The predicted probability. Shape (*), floating; operands broadcast. Domain: probability.
        target: The label: 0, 1, or a probability. Shape (*), floating or integer; operands broadcast. Domain: probability.
        weight: What each element is multiplied by: a number, or an array that broadcasts with the operands, and is
            differentiable. An element of weight 0 counts for nothing, whatever it holds.
        reduction: One of 'none', 'mean', 'sum', 'batchmean', 'weighted_mean'. Default 'mean'.
        mask: Bool, broadcasts with the operands: True where an element counts. Others are skipped
            whatever they hold: their gradients are 0, and a mean does not count them.
        normalizer: A number, or an array without dimensions, that a mean divides by instead: tokens, accumulated rows.
        dim: The dimension of the broadcast shape, or several, to reduce over; the others are kept. All by default.
        out_dtype: The floating dtype of the result; the promoted dtype of the operands by default.
        size_average, reduce: torch's deprecated arguments; they warn and decide the reduction.

    Returns:
        With 'none' the broadcast shape; otherwise one number, or with `dim` one per index of the dimensions
        that are kept. `mean` divides the sum by the number of elements that the mask leaves, `weighted_mean`
        by the sum of their weights, `batchmean` by the size of the first dimension.
        In the promoted dtype of the operands, on their device.

    Gradient:
        Every floating operand is differentiable. The derivative is (1 - target) / (1 - input) - target / input,
        where neither 1 / input nor 1 / (1 - input) exceeds 1e12, and for the target the difference of the bounded
        logarithms. Where the loss is NaN so is the gradient.

    Raises:
        TypeError: an operand that is no array, has another dtype, or belongs to another library.
        ValueError: shapes that do not broadcast, another device, a parameter or reduction out of range.

    The loss is NaN where input or target is no probability. Logits keep more digits: a sigmoid rounds to 1 what
    `binary_cross_entropy_with_logits` still tells apart.

    Drop-in for ``torch.nn.functional.binary_cross_entropy``.

    Source: I. J. Good, Rational decisions, Journal of the Royal Statistical Society B 14, 1952.
    """

def binary_cross_entropy_with_logits(
    input: _Array,
    target: _Exchangeable,
    weight: _Exchangeable | float | None = None,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: _Reduction = "mean",
    pos_weight: _Exchangeable | float | None = None,
    *,
    mask: _Exchangeable | None = None,
    normalizer: _Exchangeable | float | None = None,
    dim: int | tuple[int, ...] | None = None,
    out_dtype: Any = None,
) -> _Array:
    """Cross entropy of logits and labels of 0 and 1, element by element.

        pos_weight target log(1 + exp(-input)) + (1 - target) log(1 + exp(input))

    Args:
        input: The logit of the prediction. Shape (*), floating; operands broadcast. Domain: real.
        target: The label: 0, 1, or a probability. Shape (*), floating or integer; operands broadcast. Domain: probability.
        weight: What each element is multiplied by: a number, or an array that broadcasts with the operands, and is
            differentiable. An element of weight 0 counts for nothing, whatever it holds.
        reduction: One of 'none', 'mean', 'sum', 'batchmean', 'weighted_mean'. Default 'mean'.
        pos_weight: The weight of the label 1; finite. Shape (*), floating or integer, or a number; operands broadcast. Domain: nonnegative. Default 1.
        mask: Bool, broadcasts with the operands: True where an element counts. Others are skipped
            whatever they hold: their gradients are 0, and a mean does not count them.
        normalizer: A number, or an array without dimensions, that a mean divides by instead: tokens, accumulated rows.
        dim: The dimension of the broadcast shape, or several, to reduce over; the others are kept. All by default.
        out_dtype: The floating dtype of the result; the promoted dtype of the operands by default.
        size_average, reduce: torch's deprecated arguments; they warn and decide the reduction.

    Returns:
        With 'none' the broadcast shape; otherwise one number, or with `dim` one per index of the dimensions
        that are kept. `mean` divides the sum by the number of elements that the mask leaves, `weighted_mean`
        by the sum of their weights, `batchmean` by the size of the first dimension.
        In the promoted dtype of the operands, on their device.

    Gradient:
        Every floating operand is differentiable. An infinite logit for the right label costs nothing, with gradient
        0. Where the loss is NaN so is the gradient.

    Raises:
        TypeError: an operand that is no array, has another dtype, or belongs to another library.
        ValueError: shapes that do not broadcast, another device, a parameter or reduction out of range.

    Value and gradient keep their digits where the prediction is right and confident: neither becomes 0.

    Drop-in for ``torch.nn.functional.binary_cross_entropy_with_logits``.

    Source: D. R. Cox, The regression analysis of binary sequences, Journal of the Royal Statistical Society B 20, 1958.
    """

def multilabel_soft_margin_loss(
    input: _Array,
    target: _Exchangeable,
    weight: _Exchangeable | float | None = None,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: _Reduction = "mean",
    *,
    mask: _Exchangeable | None = None,
    normalizer: _Exchangeable | float | None = None,
    dim: int | tuple[int, ...] | None = None,
    out_dtype: Any = None,
) -> _Array:
    """Cross entropy of logits and labels of 0 and 1, averaged over the classes in the last dimension.

        target log(1 + exp(-input)) + (1 - target) log(1 + exp(input))

    Args:
        input: The logit of the prediction. Shape (*), floating; operands broadcast. Domain: real.
        target: The label: 0, 1, or a probability. Shape (*), floating or integer; operands broadcast. Domain: probability.
        weight: What each element is multiplied by: a number, or an array that broadcasts with the operands, and is
            differentiable. An element of weight 0 counts for nothing, whatever it holds.
        reduction: One of 'none', 'mean', 'sum', 'batchmean', 'weighted_mean'. Default 'mean'.
        mask: Bool, broadcasts with the operands: True where an element counts. Others are skipped
            whatever they hold: their gradients are 0, and a mean does not count them.
        normalizer: A number, or an array without dimensions, that a mean divides by instead: tokens, accumulated rows.
        dim: The dimension of the broadcast shape, or several, to reduce over; the others are kept. All by default.
        out_dtype: The floating dtype of the result; the promoted dtype of the operands by default.
        size_average, reduce: torch's deprecated arguments; they warn and decide the reduction.

    Returns:
        With 'none' the mean over the last dimension, per row; with 'sum' the sum of these, with 'mean'
        their mean. `weighted_mean` divides the sum of all elements by the sum of the weights, `batchmean`
        the sum of the rows by the size of the first dimension. With `dim`, elements are reduced.
        In the promoted dtype of the operands, on their device.

    Gradient:
        Every floating operand is differentiable. An infinite logit for the right label costs nothing, with gradient
        0. Where the loss is NaN so is the gradient.

    Raises:
        TypeError: an operand that is no array, has another dtype, or belongs to another library.
        ValueError: shapes that do not broadcast, another device, a parameter or reduction out of range.

    Drop-in for ``torch.nn.functional.multilabel_soft_margin_loss``.

    Source: G. Tsoumakas, I. Katakis, Multi-label classification: an overview, International Journal of Data Warehousing and Mining 3, 2007.
    """

def soft_margin_loss(
    input: _Array,
    target: _Exchangeable,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: _Reduction = "mean",
    *,
    weight: _Exchangeable | float | None = None,
    mask: _Exchangeable | None = None,
    normalizer: _Exchangeable | float | None = None,
    dim: int | tuple[int, ...] | None = None,
    out_dtype: Any = None,
) -> _Array:
    """Logistic loss of a score against a label of -1 or +1, element by element.

        log(1 + exp(-input target))

    Args:
        input: The score. Shape (*), floating; operands broadcast. Domain: real.
        target: The label, -1 or +1; NaN is the loss of 0. Shape (*), floating or integer; operands broadcast. Domain: sign.
        reduction: One of 'none', 'mean', 'sum', 'batchmean', 'weighted_mean'. Default 'mean'.
        weight: What each element is multiplied by: a number, or an array that broadcasts with the operands, and is
            differentiable. An element of weight 0 counts for nothing, whatever it holds.
        mask: Bool, broadcasts with the operands: True where an element counts. Others are skipped
            whatever they hold: their gradients are 0, and a mean does not count them.
        normalizer: A number, or an array without dimensions, that a mean divides by instead: tokens, accumulated rows.
        dim: The dimension of the broadcast shape, or several, to reduce over; the others are kept. All by default.
        out_dtype: The floating dtype of the result; the promoted dtype of the operands by default.
        size_average, reduce: torch's deprecated arguments; they warn and decide the reduction.

    Returns:
        With 'none' the broadcast shape; otherwise one number, or with `dim` one per index of the dimensions
        that are kept. `mean` divides the sum by the number of elements that the mask leaves, `weighted_mean`
        by the sum of their weights, `batchmean` by the size of the first dimension.
        In the promoted dtype of the operands, on their device.

    Gradient:
        Every floating operand is differentiable. An infinite score of the right sign costs nothing, with gradient
        0. Where the loss is NaN so is the gradient.

    Raises:
        TypeError: an operand that is no array, has another dtype, or belongs to another library.
        ValueError: shapes that do not broadcast, another device, a parameter or reduction out of range.

    Drop-in for ``torch.nn.functional.soft_margin_loss``.

    Source: J. Friedman, T. Hastie, R. Tibshirani, Additive logistic regression: a statistical view of boosting, Annals of Statistics 28, 2000.
    """

def kl_div(
    input: _Array,
    target: _Exchangeable,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: _Reduction = "mean",
    log_target: bool = False,
    *,
    log_input: bool = True,
    weight: _Exchangeable | float | None = None,
    mask: _Exchangeable | None = None,
    normalizer: _Exchangeable | float | None = None,
    dim: int | tuple[int, ...] | None = None,
    out_dtype: Any = None,
) -> _Array:
    """Kullback-Leibler divergence of the prediction from the target, element by element.

        target (log target - input), with input = log of the predicted probability

    Args:
        input: The predicted distribution as log-probabilities, or as probabilities with `log_input=False`. Shape (*), floating; operands broadcast. Domain: log-probability or probability.
        target: The true distribution as probabilities, or as log-probabilities with `log_target=True`. Shape (*), floating; operands broadcast. Domain: log-probability or probability.
        reduction: One of 'none', 'mean', 'sum', 'batchmean', 'weighted_mean'. Default 'mean'.
        log_target: Whether `target` holds log-probabilities. Default False.
        log_input: Whether `input` holds log-probabilities; False fuses the logarithm in. Default True.
        weight: What each element is multiplied by: a number, or an array that broadcasts with the operands, and is
            differentiable. An element of weight 0 counts for nothing, whatever it holds.
        mask: Bool, broadcasts with the operands: True where an element counts. Others are skipped
            whatever they hold: their gradients are 0, and a mean does not count them.
        normalizer: A number, or an array without dimensions, that a mean divides by instead: tokens, accumulated rows.
        dim: The dimension of the broadcast shape, or several, to reduce over; the others are kept. All by default.
        out_dtype: The floating dtype of the result; the promoted dtype of the operands by default.
        size_average, reduce: torch's deprecated arguments; they warn and decide the reduction.

    Returns:
        With 'none' the broadcast shape; otherwise one number, or with `dim` one per index of the dimensions
        that are kept. `mean` divides the sum by the number of elements that the mask leaves, `weighted_mean`
        by the sum of their weights, `batchmean` by the size of the first dimension.
        In the promoted dtype of the operands, on their device.

    Gradient:
        Every floating operand is differentiable. Where the target has no mass, value and both gradients are 0, also
        against an impossible prediction. Where the loss is NaN so is the gradient.

    Raises:
        TypeError: an operand that is no array, has another dtype, or belongs to another library.
        ValueError: shapes that do not broadcast, another device, a parameter or reduction out of range.

    `mean` divides by the number of elements, as torch does; `batchmean`, which divides by the size of the first
    dimension of the broadcast shape, is the divergence itself.

    Drop-in for ``torch.nn.functional.kl_div``.

    Source: S. Kullback, R. A. Leibler, On information and sufficiency, Annals of Mathematical Statistics 22, 1951.
    """

def generalized_kl_div(
    input: _Array,
    target: _Exchangeable,
    reduction: _Reduction = "mean",
    *,
    weight: _Exchangeable | float | None = None,
    mask: _Exchangeable | None = None,
    normalizer: _Exchangeable | float | None = None,
    dim: int | tuple[int, ...] | None = None,
    out_dtype: Any = None,
) -> _Array:
    """Kullback-Leibler divergence of measures that need not sum to 1, of which no term is negative.

        target log(target / input) - target + input

    Args:
        input: The prediction, such as an intensity. Shape (*), floating; operands broadcast. Domain: positive.
        target: The ground truth, such as a count. Shape (*), floating or integer; operands broadcast. Domain: nonnegative.
        reduction: One of 'none', 'mean', 'sum', 'batchmean', 'weighted_mean'. Default 'mean'.
        weight: What each element is multiplied by: a number, or an array that broadcasts with the operands, and is
            differentiable. An element of weight 0 counts for nothing, whatever it holds.
        mask: Bool, broadcasts with the operands: True where an element counts. Others are skipped
            whatever they hold: their gradients are 0, and a mean does not count them.
        normalizer: A number, or an array without dimensions, that a mean divides by instead: tokens, accumulated rows.
        dim: The dimension of the broadcast shape, or several, to reduce over; the others are kept. All by default.
        out_dtype: The floating dtype of the result; the promoted dtype of the operands by default.

    Returns:
        With 'none' the broadcast shape; otherwise one number, or with `dim` one per index of the dimensions
        that are kept. `mean` divides the sum by the number of elements that the mask leaves, `weighted_mean`
        by the sum of their weights, `batchmean` by the size of the first dimension.
        In the promoted dtype of the operands, on their device.

    Gradient:
        Every floating operand is differentiable. Where the target is 0, the gradient with respect to it is 0;
        against an input of 0 and a target above, the loss is infinite. Where the loss is NaN so is the gradient.

    Raises:
        TypeError: an operand that is no array, has another dtype, or belongs to another library.
        ValueError: shapes that do not broadcast, another device, a parameter or reduction out of range.

    Also known as I-divergence, and half the deviance of a Poisson distribution. An infinite or negative operand
    gives NaN. For distributions the sum is that of `kl_div`, whose terms have both signs and round to sums below 0.
    As optax has it, but of the prediction, not of its logarithm.

    Source: I. Csiszar, Why least squares and maximum entropy? Annals of Statistics 19, 1991.
    """

def itakura_saito_loss(
    input: _Array,
    target: _Exchangeable,
    reduction: _Reduction = "mean",
    *,
    weight: _Exchangeable | float | None = None,
    mask: _Exchangeable | None = None,
    normalizer: _Exchangeable | float | None = None,
    dim: int | tuple[int, ...] | None = None,
    out_dtype: Any = None,
) -> _Array:
    """Itakura-Saito divergence of power spectra, which asks for their ratio alone.

        target / input - log(target / input) - 1

    Args:
        input: The predicted power. Shape (*), floating; operands broadcast. Domain: positive.
        target: The true power. Shape (*), floating or integer; operands broadcast. Domain: positive.
        reduction: One of 'none', 'mean', 'sum', 'batchmean', 'weighted_mean'. Default 'mean'.
        weight: What each element is multiplied by: a number, or an array that broadcasts with the operands, and is
            differentiable. An element of weight 0 counts for nothing, whatever it holds.
        mask: Bool, broadcasts with the operands: True where an element counts. Others are skipped
            whatever they hold: their gradients are 0, and a mean does not count them.
        normalizer: A number, or an array without dimensions, that a mean divides by instead: tokens, accumulated rows.
        dim: The dimension of the broadcast shape, or several, to reduce over; the others are kept. All by default.
        out_dtype: The floating dtype of the result; the promoted dtype of the operands by default.

    Returns:
        With 'none' the broadcast shape; otherwise one number, or with `dim` one per index of the dimensions
        that are kept. `mean` divides the sum by the number of elements that the mask leaves, `weighted_mean`
        by the sum of their weights, `batchmean` by the size of the first dimension.
        In the promoted dtype of the operands, on their device.

    Gradient:
        Every floating operand is differentiable. The loss is differentiable everywhere. Where the loss is NaN so is
        the gradient.

    Raises:
        TypeError: an operand that is no array, has another dtype, or belongs to another library.
        ValueError: shapes that do not broadcast, another device, a parameter or reduction out of range.

    It is infinite where one of both is 0, and NaN where both are or one is negative or infinite.

    Source: F. Itakura, S. Saito, Analysis synthesis telephony based on the maximum likelihood method, 6th International Congress on Acoustics, 1968.
    """

def js_div(
    input: _Array,
    target: _Exchangeable,
    beta: float = 0.5,
    log_target: bool = False,
    log_input: bool = True,
    reduction: _Reduction = "mean",
    *,
    weight: _Exchangeable | float | None = None,
    mask: _Exchangeable | None = None,
    normalizer: _Exchangeable | float | None = None,
    dim: int | tuple[int, ...] | None = None,
    out_dtype: Any = None,
) -> _Array:
    """Jensen-Shannon divergence of prediction and target, element by element.

        beta p log(p / m) + (1 - beta) q log(q / m), with m = beta p + (1 - beta) q, q = exp(input) and p = target; with beta = 0 p log(p / q), with beta = 1 q log(q / p)

    Args:
        input: The predicted distribution q as log-probabilities, or as probabilities with `log_input=False`. Shape (*), floating; operands broadcast. Domain: log-probability or probability.
        target: The true distribution p as probabilities, or as log-probabilities with `log_target=True`. Shape (*), floating; operands broadcast. Domain: log-probability or probability.
        beta: The weight of the target in the mixture m. Must be a number >= 0 and <= 1. Default 0.5.
        log_target: Whether `target` holds log-probabilities. Default False.
        log_input: Whether `input` holds log-probabilities; False fuses the logarithm in. Default True.
        reduction: One of 'none', 'mean', 'sum', 'batchmean', 'weighted_mean'. Default 'mean'.
        weight: What each element is multiplied by: a number, or an array that broadcasts with the operands, and is
            differentiable. An element of weight 0 counts for nothing, whatever it holds.
        mask: Bool, broadcasts with the operands: True where an element counts. Others are skipped
            whatever they hold: their gradients are 0, and a mean does not count them.
        normalizer: A number, or an array without dimensions, that a mean divides by instead: tokens, accumulated rows.
        dim: The dimension of the broadcast shape, or several, to reduce over; the others are kept. All by default.
        out_dtype: The floating dtype of the result; the promoted dtype of the operands by default.

    Returns:
        With 'none' the broadcast shape; otherwise one number, or with `dim` one per index of the dimensions
        that are kept. `mean` divides the sum by the number of elements that the mask leaves, `weighted_mean`
        by the sum of their weights, `batchmean` by the size of the first dimension.
        In the promoted dtype of the operands, on their device.

    Gradient:
        Every floating operand is differentiable. Where the target, or the prediction, has no mass, the gradient
        with respect to it is 0. Where the loss is NaN so is the gradient.

    Raises:
        TypeError: an operand that is no array, has another dtype, or belongs to another library.
        ValueError: shapes that do not broadcast, another device, a parameter or reduction out of range.

    No term is negative for beta between 0 and 1. The divergence itself is the sum over a distribution, so the mean
    over a batch is `reduction="batchmean"`. As Liger has it, beta = 0 and 1 are the Kullback-Leibler divergences,
    and not the limits, which are 0.

    Source: J. Lin, Divergence measures based on the Shannon entropy, IEEE Transactions on Information Theory 37, 1991.
    """

def tv_distance(
    input: _Array,
    target: _Exchangeable,
    reduction: _Reduction = "mean",
    *,
    weight: _Exchangeable | float | None = None,
    mask: _Exchangeable | None = None,
    normalizer: _Exchangeable | float | None = None,
    dim: int | tuple[int, ...] | None = None,
    out_dtype: Any = None,
) -> _Array:
    """Total variation distance between distributions, element by element.

        |input - target| / 2

    Args:
        input: The predicted probabilities. Shape (*), floating; operands broadcast. Domain: probability.
        target: The true probabilities. Shape (*), floating; operands broadcast. Domain: probability.
        reduction: One of 'none', 'mean', 'sum', 'batchmean', 'weighted_mean'. Default 'mean'.
        weight: What each element is multiplied by: a number, or an array that broadcasts with the operands, and is
            differentiable. An element of weight 0 counts for nothing, whatever it holds.
        mask: Bool, broadcasts with the operands: True where an element counts. Others are skipped
            whatever they hold: their gradients are 0, and a mean does not count them.
        normalizer: A number, or an array without dimensions, that a mean divides by instead: tokens, accumulated rows.
        dim: The dimension of the broadcast shape, or several, to reduce over; the others are kept. All by default.
        out_dtype: The floating dtype of the result; the promoted dtype of the operands by default.

    Returns:
        With 'none' the broadcast shape; otherwise one number, or with `dim` one per index of the dimensions
        that are kept. `mean` divides the sum by the number of elements that the mask leaves, `weighted_mean`
        by the sum of their weights, `batchmean` by the size of the first dimension.
        In the promoted dtype of the operands, on their device.

    Gradient:
        Every floating operand is differentiable. At input = target the gradient is 0. Where the loss is NaN so is
        the gradient.

    Raises:
        TypeError: an operand that is no array, has another dtype, or belongs to another library.
        ValueError: shapes that do not broadcast, another device, a parameter or reduction out of range.

    The distance itself is the sum over a distribution, so the mean over a batch is `reduction="batchmean"`.

    Source: A. L. Gibbs, F. E. Su, On choosing and bounding probability metrics, International Statistical Review 70, 2002.
    """

def sigmoid_focal_loss(
    input: _Array,
    target: _Exchangeable,
    alpha: float = 0.25,
    gamma: float = 2.0,
    reduction: _Reduction = "mean",
    *,
    weight: _Exchangeable | float | None = None,
    mask: _Exchangeable | None = None,
    normalizer: _Exchangeable | float | None = None,
    dim: int | tuple[int, ...] | None = None,
    out_dtype: Any = None,
) -> _Array:
    """Focal loss of logits and labels of 0 and 1: cross entropy that counts less what is decided well.

        a (1 - p)^gamma (-log p), with p = sigmoid(input) and a = alpha where target = 1, and p = 1 - sigmoid(input) and a = 1 - alpha where target = 0; a = 1 if alpha < 0

    Args:
        input: The logit of the prediction. Shape (*), floating; operands broadcast. Domain: real.
        target: The label: 0, 1, or a probability. Shape (*), floating or integer; operands broadcast. Domain: probability.
        alpha: The weight of the label 1, that of 0 being 1 - alpha; -1 for none. Must be a number <= 1. Default 0.25.
        gamma: How much less; 0 gives the cross entropy. Must be a number >= 0. Default 2.0.
        reduction: One of 'none', 'mean', 'sum', 'batchmean', 'weighted_mean'. Default 'mean'.
        weight: What each element is multiplied by: a number, or an array that broadcasts with the operands, and is
            differentiable. An element of weight 0 counts for nothing, whatever it holds.
        mask: Bool, broadcasts with the operands: True where an element counts. Others are skipped
            whatever they hold: their gradients are 0, and a mean does not count them.
        normalizer: A number, or an array without dimensions, that a mean divides by instead: tokens, accumulated rows.
        dim: The dimension of the broadcast shape, or several, to reduce over; the others are kept. All by default.
        out_dtype: The floating dtype of the result; the promoted dtype of the operands by default.

    Returns:
        With 'none' the broadcast shape; otherwise one number, or with `dim` one per index of the dimensions
        that are kept. `mean` divides the sum by the number of elements that the mask leaves, `weighted_mean`
        by the sum of their weights, `batchmean` by the size of the first dimension.
        In the promoted dtype of the operands, on their device.

    Gradient:
        Every floating operand is differentiable. An infinite logit for the right label costs nothing, with gradient
        0; against an infinite logit, the label has gradient 0. Where the loss is NaN so is the gradient.

    Raises:
        TypeError: an operand that is no array, has another dtype, or belongs to another library.
        ValueError: shapes that do not broadcast, another device, a parameter or reduction out of range.

    As torchvision and fvcore have it: of a label between 0 and 1, a, 1 - p and the cross entropy are each the mean
    for the two labels; the loss of any other is NaN. Keras has the same defaults; optax, MONAI and kornia have no
    alpha by default.

    Source: T.-Y. Lin, P. Goyal, R. Girshick, K. He, P. Dollar, Focal loss for dense object detection, ICCV 2017.
    """

def asymmetric_loss(
    input: _Array,
    target: _Exchangeable,
    gamma_neg: float = 4.0,
    gamma_pos: float = 1.0,
    clip: float = 0.05,
    reduction: _Reduction = "mean",
    *,
    weight: _Exchangeable | float | None = None,
    mask: _Exchangeable | None = None,
    normalizer: _Exchangeable | float | None = None,
    dim: int | tuple[int, ...] | None = None,
    out_dtype: Any = None,
) -> _Array:
    """Asymmetric loss of logits and labels of 0 and 1: focal loss that forgives easy negatives most.

        target (1 - p)^gamma_pos (-log p) + (1 - target) q^gamma_neg (-log(1 - q)), with p = sigmoid(input) and q = max(p - clip, 0)

    Args:
        input: The logit of the prediction. Shape (*), floating; operands broadcast. Domain: real.
        target: The label: 0, 1, or a probability. Shape (*), floating or integer; operands broadcast. Domain: probability.
        gamma_neg: How much less a negative counts that is decided well. Must be a number >= 0. Default 4.0.
        gamma_pos: How much less a positive counts that is decided well. Must be a number >= 0. Default 1.0.
        clip: The probability up to which a negative costs nothing. Must be a number >= 0 and <= 1. Default 0.05.
        reduction: One of 'none', 'mean', 'sum', 'batchmean', 'weighted_mean'. Default 'mean'.
        weight: What each element is multiplied by: a number, or an array that broadcasts with the operands, and is
            differentiable. An element of weight 0 counts for nothing, whatever it holds.
        mask: Bool, broadcasts with the operands: True where an element counts. Others are skipped
            whatever they hold: their gradients are 0, and a mean does not count them.
        normalizer: A number, or an array without dimensions, that a mean divides by instead: tokens, accumulated rows.
        dim: The dimension of the broadcast shape, or several, to reduce over; the others are kept. All by default.
        out_dtype: The floating dtype of the result; the promoted dtype of the operands by default.

    Returns:
        With 'none' the broadcast shape; otherwise one number, or with `dim` one per index of the dimensions
        that are kept. `mean` divides the sum by the number of elements that the mask leaves, `weighted_mean`
        by the sum of their weights, `batchmean` by the size of the first dimension.
        In the promoted dtype of the operands, on their device.

    Gradient:
        Every floating operand is differentiable. Where p <= clip a negative costs nothing, with gradient 0; so does
        an infinite logit for the right label. Where the loss is NaN so is the gradient.

    Raises:
        TypeError: an operand that is no array, has another dtype, or belongs to another library.
        ValueError: shapes that do not broadcast, another device, a parameter or reduction out of range.

    The defaults are those of the authors and of timm, who bound the logarithms by that of 1e-8; here they are
    exact. The factors are differentiated, which their code can switch off.

    Source: T. Ridnik, E. Ben-Baruch, N. Zamir, A. Noy, I. Friedman, M. Protter, L. Zelnik-Manor, Asymmetric loss for multi-label classification, ICCV 2021.
    """

def poly1_loss(
    input: _Array,
    target: _Exchangeable,
    epsilon: float = 2.0,
    reduction: _Reduction = "mean",
    *,
    weight: _Exchangeable | float | None = None,
    mask: _Exchangeable | None = None,
    normalizer: _Exchangeable | float | None = None,
    dim: int | tuple[int, ...] | None = None,
    out_dtype: Any = None,
) -> _Array:
    """Poly-1 loss of logits and labels of 0 and 1: cross entropy plus a multiple of the probability of error.

        -log p + epsilon (1 - p), with p = sigmoid(input) where target = 1, and p = 1 - sigmoid(input) where target = 0

    Args:
        input: The logit of the prediction. Shape (*), floating; operands broadcast. Domain: real.
        target: The label: 0, 1, or a probability. Shape (*), floating or integer; operands broadcast. Domain: probability.
        epsilon: The weight of 1 - p; 0 gives the cross entropy. Must be a number >= -1. Default 2.0.
        reduction: One of 'none', 'mean', 'sum', 'batchmean', 'weighted_mean'. Default 'mean'.
        weight: What each element is multiplied by: a number, or an array that broadcasts with the operands, and is
            differentiable. An element of weight 0 counts for nothing, whatever it holds.
        mask: Bool, broadcasts with the operands: True where an element counts. Others are skipped
            whatever they hold: their gradients are 0, and a mean does not count them.
        normalizer: A number, or an array without dimensions, that a mean divides by instead: tokens, accumulated rows.
        dim: The dimension of the broadcast shape, or several, to reduce over; the others are kept. All by default.
        out_dtype: The floating dtype of the result; the promoted dtype of the operands by default.

    Returns:
        With 'none' the broadcast shape; otherwise one number, or with `dim` one per index of the dimensions
        that are kept. `mean` divides the sum by the number of elements that the mask leaves, `weighted_mean`
        by the sum of their weights, `batchmean` by the size of the first dimension.
        In the promoted dtype of the operands, on their device.

    Gradient:
        Every floating operand is differentiable. An infinite logit for the right label costs nothing, with gradient
        0; against an infinite logit, the label has gradient 0. Where the loss is NaN so is the gradient.

    Raises:
        TypeError: an operand that is no array, has another dtype, or belongs to another library.
        ValueError: shapes that do not broadcast, another device, a parameter or reduction out of range.

    The default is that of optax, which has the loss for classes. Of a label between 0 and 1, both terms are the
    mean for the two labels.

    Source: Z. Leng, M. Tan, C. Liu, E. D. Cubuk, X. Shi, S. Cheng, D. Anguelov, PolyLoss: a polynomial expansion perspective of classification loss functions, ICLR 2022.
    """

def generalized_cross_entropy(
    input: _Array,
    target: _Exchangeable,
    q: float = 0.7,
    reduction: _Reduction = "mean",
    *,
    weight: _Exchangeable | float | None = None,
    mask: _Exchangeable | None = None,
    normalizer: _Exchangeable | float | None = None,
    dim: int | tuple[int, ...] | None = None,
    out_dtype: Any = None,
) -> _Array:
    """Generalized cross entropy of logits and labels of 0 and 1, which mislabelled elements pull on less.

        (1 - p^q) / q, with p = sigmoid(input) where target = 1, and p = 1 - sigmoid(input) where target = 0

    Args:
        input: The logit of the prediction. Shape (*), floating; operands broadcast. Domain: real.
        target: The label: 0, 1, or a probability. Shape (*), floating or integer; operands broadcast. Domain: probability.
        q: Between 0, which gives the cross entropy, and 1, which gives the absolute error of the probability. Must be a number >= 0 and <= 1. Default 0.7.
        reduction: One of 'none', 'mean', 'sum', 'batchmean', 'weighted_mean'. Default 'mean'.
        weight: What each element is multiplied by: a number, or an array that broadcasts with the operands, and is
            differentiable. An element of weight 0 counts for nothing, whatever it holds.
        mask: Bool, broadcasts with the operands: True where an element counts. Others are skipped
            whatever they hold: their gradients are 0, and a mean does not count them.
        normalizer: A number, or an array without dimensions, that a mean divides by instead: tokens, accumulated rows.
        dim: The dimension of the broadcast shape, or several, to reduce over; the others are kept. All by default.
        out_dtype: The floating dtype of the result; the promoted dtype of the operands by default.

    Returns:
        With 'none' the broadcast shape; otherwise one number, or with `dim` one per index of the dimensions
        that are kept. `mean` divides the sum by the number of elements that the mask leaves, `weighted_mean`
        by the sum of their weights, `batchmean` by the size of the first dimension.
        In the promoted dtype of the operands, on their device.

    Gradient:
        Every floating operand is differentiable. The loss is differentiable everywhere. Where the loss is NaN so is
        the gradient.

    Raises:
        TypeError: an operand that is no array, has another dtype, or belongs to another library.
        ValueError: shapes that do not broadcast, another device, a parameter or reduction out of range.

    Between 0 and 1 a label counts in proportion, as in the cross entropy; Keras, which has the loss for classes,
    takes the power of the mean probability instead. An infinite logit costs 1 / q against the wrong label.

    Source: Z. Zhang, M. R. Sabuncu, Generalized cross entropy loss for training deep neural networks with noisy labels, NeurIPS 2018.
    """

def poisson_nll_loss(
    input: _Array,
    target: _Exchangeable,
    log_input: bool = True,
    full: bool | Literal["exact"] = False,
    size_average: bool | None = None,
    eps: float = 1e-08,
    reduce: bool | None = None,
    reduction: _Reduction = "mean",
    *,
    weight: _Exchangeable | float | None = None,
    mask: _Exchangeable | None = None,
    normalizer: _Exchangeable | float | None = None,
    dim: int | tuple[int, ...] | None = None,
    out_dtype: Any = None,
) -> _Array:
    """Negative log-likelihood of counts, given the rates of their Poisson distributions.

        exp(input) - target input, or input - target log(input + eps), plus log(target!) if full

    Args:
        input: The logarithm of the rate, or with `log_input=False` the rate, whose loss is NaN where it is negative. Shape (*), floating; operands broadcast. Domain: real or positive.
        target: The count; any number from 0 is taken as it is. Shape (*), floating or integer; operands broadcast. Domain: nonnegative or positive.
        log_input: Whether `input` is the logarithm of the rate. Default True.
        full: Whether log(target!) is added: True adds Stirling's approximation of it where target > 1, as torch does, "exact" the term itself, log Gamma(1 + target). One of False, True, 'exact'. Default False.
        eps: Added to the rate before the logarithm if `log_input=False`. Must be a number >= 0. Default 1e-08.
        reduction: One of 'none', 'mean', 'sum', 'batchmean', 'weighted_mean'. Default 'mean'.
        weight: What each element is multiplied by: a number, or an array that broadcasts with the operands, and is
            differentiable. An element of weight 0 counts for nothing, whatever it holds.
        mask: Bool, broadcasts with the operands: True where an element counts. Others are skipped
            whatever they hold: their gradients are 0, and a mean does not count them.
        normalizer: A number, or an array without dimensions, that a mean divides by instead: tokens, accumulated rows.
        dim: The dimension of the broadcast shape, or several, to reduce over; the others are kept. All by default.
        out_dtype: The floating dtype of the result; the promoted dtype of the operands by default.
        size_average, reduce: torch's deprecated arguments; they warn and decide the reduction.

    Returns:
        With 'none' the broadcast shape; otherwise one number, or with `dim` one per index of the dimensions
        that are kept. `mean` divides the sum by the number of elements that the mask leaves, `weighted_mean`
        by the sum of their weights, `batchmean` by the size of the first dimension.
        In the promoted dtype of the operands, on their device.

    Gradient:
        Every floating operand is differentiable. Where target is 0, target log(rate) is 0 for any rate, with
        derivatives 0 where the logarithm is infinite. At target = 1 the gradient is that without Stirling's term.
        Where the loss is NaN so is the gradient.

    Raises:
        TypeError: an operand that is no array, has another dtype, or belongs to another library.
        ValueError: shapes that do not broadcast, another device, a parameter or reduction out of range.

    Drop-in for ``torch.nn.functional.poisson_nll_loss``.

    Source: P. McCullagh, J. A. Nelder, Generalized Linear Models, second edition, 1989.
    """

def gaussian_nll_loss(
    input: _Array,
    target: _Exchangeable,
    var: _Exchangeable | float,
    full: bool = False,
    eps: float = 1e-06,
    reduction: _Reduction = "mean",
    *,
    weight: _Exchangeable | float | None = None,
    mask: _Exchangeable | None = None,
    normalizer: _Exchangeable | float | None = None,
    dim: int | tuple[int, ...] | None = None,
    out_dtype: Any = None,
) -> _Array:
    """Negative log-likelihood of a target, given mean and variance of its normal distribution.

        (log v + (input - target)^2 / v) / 2, plus log(2 pi) / 2 if full, with v = max(var, eps)

    Args:
        input: The mean. Shape (*), floating or integer; operands broadcast. Domain: real.
        target: The ground truth. Shape (*), floating or integer; operands broadcast. Domain: real.
        var: The variance; the loss is NaN where it is negative. One dimension fewer than `input` is one per row. Shape (*), floating or integer, or a number; operands broadcast. Domain: positive.
        full: Whether the constant log(2 pi) / 2 is added. Default False.
        eps: The least variance. Must be a number >= 0. Default 1e-06.
        reduction: One of 'none', 'mean', 'sum', 'batchmean', 'weighted_mean'. Default 'mean'.
        weight: What each element is multiplied by: a number, or an array that broadcasts with the operands, and is
            differentiable. An element of weight 0 counts for nothing, whatever it holds.
        mask: Bool, broadcasts with the operands: True where an element counts. Others are skipped
            whatever they hold: their gradients are 0, and a mean does not count them.
        normalizer: A number, or an array without dimensions, that a mean divides by instead: tokens, accumulated rows.
        dim: The dimension of the broadcast shape, or several, to reduce over; the others are kept. All by default.
        out_dtype: The floating dtype of the result; the promoted dtype of the operands by default.

    Returns:
        With 'none' the broadcast shape; otherwise one number, or with `dim` one per index of the dimensions
        that are kept. `mean` divides the sum by the number of elements that the mask leaves, `weighted_mean`
        by the sum of their weights, `batchmean` by the size of the first dimension.
        In the promoted dtype of the operands, on their device.

    Gradient:
        Every floating operand is differentiable. Where var < eps the gradient is that at v = eps, for var as well,
        which so can grow again. Where the loss is NaN so is the gradient.

    Raises:
        TypeError: an operand that is no array, has another dtype, or belongs to another library.
        ValueError: shapes that do not broadcast, another device, a parameter or reduction out of range.

    `var` is checked where it is, on the GPU, so the host does not wait for it.

    Drop-in for ``torch.nn.functional.gaussian_nll_loss``.

    Source: D. A. Nix, A. S. Weigend, Estimating the mean and variance of the target probability distribution, IEEE International Conference on Neural Networks, 1994.
    """

def hinge_loss(
    input: _Array,
    target: _Exchangeable,
    margin: float = 1.0,
    reduction: _Reduction = "mean",
    *,
    weight: _Exchangeable | float | None = None,
    mask: _Exchangeable | None = None,
    normalizer: _Exchangeable | float | None = None,
    dim: int | tuple[int, ...] | None = None,
    out_dtype: Any = None,
) -> _Array:
    """Hinge loss of a margin classifier, element by element, with broadcasting.

        max(0, margin - input * target)

    Args:
        input: The score. Shape (*), floating; operands broadcast. Domain: real.
        target: The label, -1 or +1; any number is taken as it is. Shape (*), floating or integer; operands broadcast. Domain: sign.
        margin: The product above which an element costs nothing. Must be a number, not NaN. Default 1.0.
        reduction: One of 'none', 'mean', 'sum', 'batchmean', 'weighted_mean'. Default 'mean'.
        weight: What each element is multiplied by: a number, or an array that broadcasts with the operands, and is
            differentiable. An element of weight 0 counts for nothing, whatever it holds.
        mask: Bool, broadcasts with the operands: True where an element counts. Others are skipped
            whatever they hold: their gradients are 0, and a mean does not count them.
        normalizer: A number, or an array without dimensions, that a mean divides by instead: tokens, accumulated rows.
        dim: The dimension of the broadcast shape, or several, to reduce over; the others are kept. All by default.
        out_dtype: The floating dtype of the result; the promoted dtype of the operands by default.

    Returns:
        With 'none' the broadcast shape; otherwise one number, or with `dim` one per index of the dimensions
        that are kept. `mean` divides the sum by the number of elements that the mask leaves, `weighted_mean`
        by the sum of their weights, `batchmean` by the size of the first dimension.
        In the promoted dtype of the operands, on their device.

    Gradient:
        Every floating operand is differentiable. At input * target = margin the element counts as active: the
        gradient is (-target, -input). Where the loss is NaN so is the gradient.

    Raises:
        TypeError: an operand that is no array, has another dtype, or belongs to another library.
        ValueError: shapes that do not broadcast, another device, a parameter or reduction out of range.

    A target of shape (D,) belongs to the columns of an input (N, D), as everywhere in NumPy and torch; one target
    per row is `target[:, None]`.

    Source: C. Cortes, V. Vapnik, Support-vector networks, Machine Learning 20, 1995.
    """

def hinge_embedding_loss(
    input: _Array,
    target: _Exchangeable,
    margin: float = 1.0,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: _Reduction = "mean",
    *,
    weight: _Exchangeable | float | None = None,
    mask: _Exchangeable | None = None,
    normalizer: _Exchangeable | float | None = None,
    dim: int | tuple[int, ...] | None = None,
    out_dtype: Any = None,
) -> _Array:
    """Distance of a similar pair, or what a dissimilar pair lacks of the margin, element by element.

        input where target > 0, max(0, margin - input) where target < 0

    Args:
        input: The distance. Shape (*), floating; operands broadcast. Domain: real.
        target: The label, -1 or +1, of which the sign counts; NaN is the loss of 0. Shape (*), floating or integer; operands broadcast. Domain: sign.
        margin: The distance at which a dissimilar pair costs nothing. Must be a number, not NaN. Default 1.0.
        reduction: One of 'none', 'mean', 'sum', 'batchmean', 'weighted_mean'. Default 'mean'.
        weight: What each element is multiplied by: a number, or an array that broadcasts with the operands, and is
            differentiable. An element of weight 0 counts for nothing, whatever it holds.
        mask: Bool, broadcasts with the operands: True where an element counts. Others are skipped
            whatever they hold: their gradients are 0, and a mean does not count them.
        normalizer: A number, or an array without dimensions, that a mean divides by instead: tokens, accumulated rows.
        dim: The dimension of the broadcast shape, or several, to reduce over; the others are kept. All by default.
        out_dtype: The floating dtype of the result; the promoted dtype of the operands by default.
        size_average, reduce: torch's deprecated arguments; they warn and decide the reduction.

    Returns:
        With 'none' the broadcast shape; otherwise one number, or with `dim` one per index of the dimensions
        that are kept. `mean` divides the sum by the number of elements that the mask leaves, `weighted_mean`
        by the sum of their weights, `batchmean` by the size of the first dimension.
        In the promoted dtype of the operands, on their device.

    Gradient:
        Every floating operand is differentiable. At input = margin a dissimilar pair counts as active, with
        gradient -1; the label has gradient 0. Where the loss is NaN so is the gradient.

    Raises:
        TypeError: an operand that is no array, has another dtype, or belongs to another library.
        ValueError: shapes that do not broadcast, another device, a parameter or reduction out of range.

    Drop-in for ``torch.nn.functional.hinge_embedding_loss``.

    Source: R. Hadsell, S. Chopra, Y. LeCun, Dimensionality reduction by learning an invariant mapping, CVPR 2006.
    """

def margin_ranking_loss(
    input1: _Array,
    input2: _Exchangeable,
    target: _Exchangeable,
    margin: float = 0.0,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: _Reduction = "mean",
    *,
    weight: _Exchangeable | float | None = None,
    mask: _Exchangeable | None = None,
    normalizer: _Exchangeable | float | None = None,
    dim: int | tuple[int, ...] | None = None,
    out_dtype: Any = None,
) -> _Array:
    """Hinge loss of the order of two scores, element by element.

        max(0, margin - target (input1 - input2))

    Args:
        input1: The score of the first. Shape (*), floating; operands broadcast. Domain: real.
        input2: The score of the second. Shape (*), floating; operands broadcast. Domain: real.
        target: +1 where the first should have the higher score, -1 where the second; any number is taken as it is. Shape (*), floating or integer; operands broadcast. Domain: sign.
        margin: The difference of scores beyond which a pair costs nothing. Must be a number, not NaN. Default 0.0.
        reduction: One of 'none', 'mean', 'sum', 'batchmean', 'weighted_mean'. Default 'mean'.
        weight: What each element is multiplied by: a number, or an array that broadcasts with the operands, and is
            differentiable. An element of weight 0 counts for nothing, whatever it holds.
        mask: Bool, broadcasts with the operands: True where an element counts. Others are skipped
            whatever they hold: their gradients are 0, and a mean does not count them.
        normalizer: A number, or an array without dimensions, that a mean divides by instead: tokens, accumulated rows.
        dim: The dimension of the broadcast shape, or several, to reduce over; the others are kept. All by default.
        out_dtype: The floating dtype of the result; the promoted dtype of the operands by default.
        size_average, reduce: torch's deprecated arguments; they warn and decide the reduction.

    Returns:
        With 'none' the broadcast shape; otherwise one number, or with `dim` one per index of the dimensions
        that are kept. `mean` divides the sum by the number of elements that the mask leaves, `weighted_mean`
        by the sum of their weights, `batchmean` by the size of the first dimension.
        In the promoted dtype of the operands, on their device.

    Gradient:
        Every floating operand is differentiable. At target (input1 - input2) = margin a pair counts as active:
        (-target, target, input2 - input1). Where the loss is NaN so is the gradient.

    Raises:
        TypeError: an operand that is no array, has another dtype, or belongs to another library.
        ValueError: shapes that do not broadcast, another device, a parameter or reduction out of range.

    Drop-in for ``torch.nn.functional.margin_ranking_loss``.

    Source: R. Herbrich, T. Graepel, K. Obermayer, Large margin rank boundaries for ordinal regression, Advances in Large Margin Classifiers, 2000.
    """

def squared_hinge_loss(
    input: _Array,
    target: _Exchangeable,
    margin: float = 1.0,
    reduction: _Reduction = "mean",
    *,
    weight: _Exchangeable | float | None = None,
    mask: _Exchangeable | None = None,
    normalizer: _Exchangeable | float | None = None,
    dim: int | tuple[int, ...] | None = None,
    out_dtype: Any = None,
) -> _Array:
    """Squared hinge loss of a margin classifier, element by element.

        max(0, margin - input target)^2

    Args:
        input: The score. Shape (*), floating; operands broadcast. Domain: real.
        target: The label, -1 or +1; any number is taken as it is. Shape (*), floating or integer; operands broadcast. Domain: sign.
        margin: The product above which an element costs nothing. Must be a number, not NaN. Default 1.0.
        reduction: One of 'none', 'mean', 'sum', 'batchmean', 'weighted_mean'. Default 'mean'.
        weight: What each element is multiplied by: a number, or an array that broadcasts with the operands, and is
            differentiable. An element of weight 0 counts for nothing, whatever it holds.
        mask: Bool, broadcasts with the operands: True where an element counts. Others are skipped
            whatever they hold: their gradients are 0, and a mean does not count them.
        normalizer: A number, or an array without dimensions, that a mean divides by instead: tokens, accumulated rows.
        dim: The dimension of the broadcast shape, or several, to reduce over; the others are kept. All by default.
        out_dtype: The floating dtype of the result; the promoted dtype of the operands by default.

    Returns:
        With 'none' the broadcast shape; otherwise one number, or with `dim` one per index of the dimensions
        that are kept. `mean` divides the sum by the number of elements that the mask leaves, `weighted_mean`
        by the sum of their weights, `batchmean` by the size of the first dimension.
        In the promoted dtype of the operands, on their device.

    Gradient:
        Every floating operand is differentiable. The loss is differentiable everywhere. Where the loss is NaN so is
        the gradient.

    Raises:
        TypeError: an operand that is no array, has another dtype, or belongs to another library.
        ValueError: shapes that do not broadcast, another device, a parameter or reduction out of range.

    Keras takes labels of 0 for -1; here they are taken as they are.

    Source: C. Cortes, V. Vapnik, Support-vector networks, Machine Learning 20, 1995.
    """

def logistic_loss(
    input: _Array,
    target: _Exchangeable,
    reduction: _Reduction = "mean",
    *,
    weight: _Exchangeable | float | None = None,
    mask: _Exchangeable | None = None,
    normalizer: _Exchangeable | float | None = None,
    dim: int | tuple[int, ...] | None = None,
    out_dtype: Any = None,
) -> _Array:
    """Logistic loss of a score against a label of -1 or +1, element by element.

        log(1 + exp(-input target))

    Args:
        input: The score, which is the logit of the label +1. Shape (*), floating; operands broadcast. Domain: real.
        target: The label, -1 or +1; any number is taken as it is. Shape (*), floating or integer; operands broadcast. Domain: sign.
        reduction: One of 'none', 'mean', 'sum', 'batchmean', 'weighted_mean'. Default 'mean'.
        weight: What each element is multiplied by: a number, or an array that broadcasts with the operands, and is
            differentiable. An element of weight 0 counts for nothing, whatever it holds.
        mask: Bool, broadcasts with the operands: True where an element counts. Others are skipped
            whatever they hold: their gradients are 0, and a mean does not count them.
        normalizer: A number, or an array without dimensions, that a mean divides by instead: tokens, accumulated rows.
        dim: The dimension of the broadcast shape, or several, to reduce over; the others are kept. All by default.
        out_dtype: The floating dtype of the result; the promoted dtype of the operands by default.

    Returns:
        With 'none' the broadcast shape; otherwise one number, or with `dim` one per index of the dimensions
        that are kept. `mean` divides the sum by the number of elements that the mask leaves, `weighted_mean`
        by the sum of their weights, `batchmean` by the size of the first dimension.
        In the promoted dtype of the operands, on their device.

    Gradient:
        Every floating operand is differentiable. An infinite score of the right sign costs nothing, with gradient
        0. Where the loss is NaN so is the gradient.

    Raises:
        TypeError: an operand that is no array, has another dtype, or belongs to another library.
        ValueError: shapes that do not broadcast, another device, a parameter or reduction out of range.

    `soft_margin_loss` is the same but for a label of 0, where it is NaN and this log(2). With labels of 0 and 1 it
    is `binary_cross_entropy_with_logits`.

    Source: D. R. Cox, The regression analysis of binary sequences, Journal of the Royal Statistical Society B 20, 1958.
    """

def exponential_loss(
    input: _Array,
    target: _Exchangeable,
    reduction: _Reduction = "mean",
    *,
    weight: _Exchangeable | float | None = None,
    mask: _Exchangeable | None = None,
    normalizer: _Exchangeable | float | None = None,
    dim: int | tuple[int, ...] | None = None,
    out_dtype: Any = None,
) -> _Array:
    """Exponential loss of a score against a label of -1 or +1, that of AdaBoost, element by element.

        exp(-input target)

    Args:
        input: The score. Shape (*), floating; operands broadcast. Domain: real.
        target: The label, -1 or +1; any number is taken as it is. Shape (*), floating or integer; operands broadcast. Domain: sign.
        reduction: One of 'none', 'mean', 'sum', 'batchmean', 'weighted_mean'. Default 'mean'.
        weight: What each element is multiplied by: a number, or an array that broadcasts with the operands, and is
            differentiable. An element of weight 0 counts for nothing, whatever it holds.
        mask: Bool, broadcasts with the operands: True where an element counts. Others are skipped
            whatever they hold: their gradients are 0, and a mean does not count them.
        normalizer: A number, or an array without dimensions, that a mean divides by instead: tokens, accumulated rows.
        dim: The dimension of the broadcast shape, or several, to reduce over; the others are kept. All by default.
        out_dtype: The floating dtype of the result; the promoted dtype of the operands by default.

    Returns:
        With 'none' the broadcast shape; otherwise one number, or with `dim` one per index of the dimensions
        that are kept. `mean` divides the sum by the number of elements that the mask leaves, `weighted_mean`
        by the sum of their weights, `batchmean` by the size of the first dimension.
        In the promoted dtype of the operands, on their device.

    Gradient:
        Every floating operand is differentiable. An infinite score of the right sign costs nothing, with gradient
        0. Where the loss is NaN so is the gradient.

    Raises:
        TypeError: an operand that is no array, has another dtype, or belongs to another library.
        ValueError: shapes that do not broadcast, another device, a parameter or reduction out of range.

    Source: Y. Freund, R. E. Schapire, A decision-theoretic generalization of on-line learning and an application to boosting, Journal of Computer and System Sciences 55, 1997.
    """

def mse_loss(
    input: _Array,
    target: _Exchangeable,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: _Reduction = "mean",
    weight: _Exchangeable | float | None = None,
    *,
    mask: _Exchangeable | None = None,
    normalizer: _Exchangeable | float | None = None,
    dim: int | tuple[int, ...] | None = None,
    out_dtype: Any = None,
) -> _Array:
    """Squared error.

        (input - target)^2

    Args:
        input: The prediction. Shape (*), floating or integer; operands broadcast. Domain: real.
        target: The ground truth. Shape (*), floating or integer; operands broadcast. Domain: real.
        reduction: One of 'none', 'mean', 'sum', 'batchmean', 'weighted_mean'. Default 'mean'.
        weight: What each element is multiplied by: a number, or an array that broadcasts with the operands, and is
            differentiable. An element of weight 0 counts for nothing, whatever it holds.
        mask: Bool, broadcasts with the operands: True where an element counts. Others are skipped
            whatever they hold: their gradients are 0, and a mean does not count them.
        normalizer: A number, or an array without dimensions, that a mean divides by instead: tokens, accumulated rows.
        dim: The dimension of the broadcast shape, or several, to reduce over; the others are kept. All by default.
        out_dtype: The floating dtype of the result; the promoted dtype of the operands by default.
        size_average, reduce: torch's deprecated arguments; they warn and decide the reduction.

    Returns:
        With 'none' the broadcast shape; otherwise one number, or with `dim` one per index of the dimensions
        that are kept. `mean` divides the sum by the number of elements that the mask leaves, `weighted_mean`
        by the sum of their weights, `batchmean` by the size of the first dimension.
        As in torch, `mean` with a weight is `weighted_mean` here; other losses divide by the count.
        In the promoted dtype of the operands, on their device.

    Gradient:
        Every floating operand is differentiable. The loss is differentiable everywhere. Where the loss is NaN so is
        the gradient.

    Raises:
        TypeError: an operand that is no array, has another dtype, or belongs to another library.
        ValueError: shapes that do not broadcast, another device, a parameter or reduction out of range.

    Drop-in for ``torch.nn.functional.mse_loss``.

    Source: C. F. Gauss, Theoria combinationis observationum, 1823.
    """

def l1_loss(
    input: _Array,
    target: _Exchangeable,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: _Reduction = "mean",
    weight: _Exchangeable | float | None = None,
    *,
    mask: _Exchangeable | None = None,
    normalizer: _Exchangeable | float | None = None,
    dim: int | tuple[int, ...] | None = None,
    out_dtype: Any = None,
) -> _Array:
    """Absolute error.

        |input - target|

    Args:
        input: The prediction. Shape (*), floating or integer; operands broadcast. Domain: real.
        target: The ground truth. Shape (*), floating or integer; operands broadcast. Domain: real.
        reduction: One of 'none', 'mean', 'sum', 'batchmean', 'weighted_mean'. Default 'mean'.
        weight: What each element is multiplied by: a number, or an array that broadcasts with the operands, and is
            differentiable. An element of weight 0 counts for nothing, whatever it holds.
        mask: Bool, broadcasts with the operands: True where an element counts. Others are skipped
            whatever they hold: their gradients are 0, and a mean does not count them.
        normalizer: A number, or an array without dimensions, that a mean divides by instead: tokens, accumulated rows.
        dim: The dimension of the broadcast shape, or several, to reduce over; the others are kept. All by default.
        out_dtype: The floating dtype of the result; the promoted dtype of the operands by default.
        size_average, reduce: torch's deprecated arguments; they warn and decide the reduction.

    Returns:
        With 'none' the broadcast shape; otherwise one number, or with `dim` one per index of the dimensions
        that are kept. `mean` divides the sum by the number of elements that the mask leaves, `weighted_mean`
        by the sum of their weights, `batchmean` by the size of the first dimension.
        As in torch, `mean` with a weight is `weighted_mean` here; other losses divide by the count.
        In the promoted dtype of the operands, on their device.

    Gradient:
        Every floating operand is differentiable. At input = target the gradient is 0. Where the loss is NaN so is
        the gradient.

    Raises:
        TypeError: an operand that is no array, has another dtype, or belongs to another library.
        ValueError: shapes that do not broadcast, another device, a parameter or reduction out of range.

    Drop-in for ``torch.nn.functional.l1_loss``.

    Source: P. S. Laplace, Theorie analytique des probabilites, 1812.
    """

def smooth_l1_loss(
    input: _Array,
    target: _Exchangeable,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: _Reduction = "mean",
    beta: float = 1.0,
    *,
    weight: _Exchangeable | float | None = None,
    mask: _Exchangeable | None = None,
    normalizer: _Exchangeable | float | None = None,
    dim: int | tuple[int, ...] | None = None,
    out_dtype: Any = None,
) -> _Array:
    """Squared error for small differences, absolute error for large ones.

        d^2 / (2 beta) where d < beta, else d - beta / 2, with d = |input - target|

    Args:
        input: The prediction. Shape (*), floating or integer; operands broadcast. Domain: real.
        target: The ground truth. Shape (*), floating or integer; operands broadcast. Domain: real.
        reduction: One of 'none', 'mean', 'sum', 'batchmean', 'weighted_mean'. Default 'mean'.
        beta: Where the two branches meet; 0 gives `l1_loss`. Must be a number >= 0. Default 1.0.
        weight: What each element is multiplied by: a number, or an array that broadcasts with the operands, and is
            differentiable. An element of weight 0 counts for nothing, whatever it holds.
        mask: Bool, broadcasts with the operands: True where an element counts. Others are skipped
            whatever they hold: their gradients are 0, and a mean does not count them.
        normalizer: A number, or an array without dimensions, that a mean divides by instead: tokens, accumulated rows.
        dim: The dimension of the broadcast shape, or several, to reduce over; the others are kept. All by default.
        out_dtype: The floating dtype of the result; the promoted dtype of the operands by default.
        size_average, reduce: torch's deprecated arguments; they warn and decide the reduction.

    Returns:
        With 'none' the broadcast shape; otherwise one number, or with `dim` one per index of the dimensions
        that are kept. `mean` divides the sum by the number of elements that the mask leaves, `weighted_mean`
        by the sum of their weights, `batchmean` by the size of the first dimension.
        In the promoted dtype of the operands, on their device.

    Gradient:
        Every floating operand is differentiable. At d = beta both branches have slope 1; with beta = 0 the gradient
        at input = target is 0. Where the loss is NaN so is the gradient.

    Raises:
        TypeError: an operand that is no array, has another dtype, or belongs to another library.
        ValueError: shapes that do not broadcast, another device, a parameter or reduction out of range.

    Drop-in for ``torch.nn.functional.smooth_l1_loss``.

    Source: R. Girshick, Fast R-CNN, ICCV 2015.
    """

def huber_loss(
    input: _Array,
    target: _Exchangeable,
    reduction: _Reduction = "mean",
    delta: float = 1.0,
    weight: _Exchangeable | float | None = None,
    *,
    mask: _Exchangeable | None = None,
    normalizer: _Exchangeable | float | None = None,
    dim: int | tuple[int, ...] | None = None,
    out_dtype: Any = None,
) -> _Array:
    """Squared error for small differences, absolute error scaled by delta for large ones.

        d^2 / 2 where d <= delta, else delta (d - delta / 2), with d = |input - target|

    Args:
        input: The prediction. Shape (*), floating or integer; operands broadcast. Domain: real.
        target: The ground truth. Shape (*), floating or integer; operands broadcast. Domain: real.
        reduction: One of 'none', 'mean', 'sum', 'batchmean', 'weighted_mean'. Default 'mean'.
        delta: Where the two branches meet. Must be a number > 0. Default 1.0.
        weight: What each element is multiplied by: a number, or an array that broadcasts with the operands, and is
            differentiable. An element of weight 0 counts for nothing, whatever it holds.
        mask: Bool, broadcasts with the operands: True where an element counts. Others are skipped
            whatever they hold: their gradients are 0, and a mean does not count them.
        normalizer: A number, or an array without dimensions, that a mean divides by instead: tokens, accumulated rows.
        dim: The dimension of the broadcast shape, or several, to reduce over; the others are kept. All by default.
        out_dtype: The floating dtype of the result; the promoted dtype of the operands by default.

    Returns:
        With 'none' the broadcast shape; otherwise one number, or with `dim` one per index of the dimensions
        that are kept. `mean` divides the sum by the number of elements that the mask leaves, `weighted_mean`
        by the sum of their weights, `batchmean` by the size of the first dimension.
        In the promoted dtype of the operands, on their device.

    Gradient:
        Every floating operand is differentiable. At d = delta both branches have slope delta. Where the loss is NaN
        so is the gradient.

    Raises:
        TypeError: an operand that is no array, has another dtype, or belongs to another library.
        ValueError: shapes that do not broadcast, another device, a parameter or reduction out of range.

    Drop-in for ``torch.nn.functional.huber_loss``.

    Source: P. J. Huber, Robust estimation of a location parameter, Annals of Mathematical Statistics 35, 1964.
    """

def msle_loss(
    input: _Array,
    target: _Exchangeable,
    reduction: _Reduction = "mean",
    *,
    weight: _Exchangeable | float | None = None,
    mask: _Exchangeable | None = None,
    normalizer: _Exchangeable | float | None = None,
    dim: int | tuple[int, ...] | None = None,
    out_dtype: Any = None,
) -> _Array:
    """Squared error of the logarithms, each of 1 plus a number: mean squared logarithmic error.

        (log(1 + input) - log(1 + target))^2

    Args:
        input: The prediction, more than -1. Shape (*), floating or integer; operands broadcast. Domain: nonnegative.
        target: The ground truth, more than -1. Shape (*), floating or integer; operands broadcast. Domain: nonnegative.
        reduction: One of 'none', 'mean', 'sum', 'batchmean', 'weighted_mean'. Default 'mean'.
        weight: What each element is multiplied by: a number, or an array that broadcasts with the operands, and is
            differentiable. An element of weight 0 counts for nothing, whatever it holds.
        mask: Bool, broadcasts with the operands: True where an element counts. Others are skipped
            whatever they hold: their gradients are 0, and a mean does not count them.
        normalizer: A number, or an array without dimensions, that a mean divides by instead: tokens, accumulated rows.
        dim: The dimension of the broadcast shape, or several, to reduce over; the others are kept. All by default.
        out_dtype: The floating dtype of the result; the promoted dtype of the operands by default.

    Returns:
        With 'none' the broadcast shape; otherwise one number, or with `dim` one per index of the dimensions
        that are kept. `mean` divides the sum by the number of elements that the mask leaves, `weighted_mean`
        by the sum of their weights, `batchmean` by the size of the first dimension.
        In the promoted dtype of the operands, on their device.

    Gradient:
        Every floating operand is differentiable. The loss is differentiable everywhere. Where the loss is NaN so is
        the gradient.

    Raises:
        TypeError: an operand that is no array, has another dtype, or belongs to another library.
        ValueError: shapes that do not broadcast, another device, a parameter or reduction out of range.

    Keras raises either operand to 1e-7 first, which hides a negative prediction and takes its gradient away; here
    numbers between -1 and 0 are taken as they are, and smaller ones give NaN.

    Source: J. W. Tukey, Exploratory Data Analysis, 1977, for the started logarithm.
    """

def mape_loss(
    input: _Array,
    target: _Exchangeable,
    epsilon: float = 1e-07,
    reduction: _Reduction = "mean",
    *,
    weight: _Exchangeable | float | None = None,
    mask: _Exchangeable | None = None,
    normalizer: _Exchangeable | float | None = None,
    dim: int | tuple[int, ...] | None = None,
    out_dtype: Any = None,
) -> _Array:
    """Absolute error relative to the target, in percent: mean absolute percentage error.

        100 |target - input| / max(|target|, epsilon)

    Args:
        input: The prediction. Shape (*), floating or integer; operands broadcast. Domain: real.
        target: The ground truth. Shape (*), floating or integer; operands broadcast. Domain: real.
        epsilon: What a smaller target counts as in the denominator. Must be a number > 0. Default 1e-07.
        reduction: One of 'none', 'mean', 'sum', 'batchmean', 'weighted_mean'. Default 'mean'.
        weight: What each element is multiplied by: a number, or an array that broadcasts with the operands, and is
            differentiable. An element of weight 0 counts for nothing, whatever it holds.
        mask: Bool, broadcasts with the operands: True where an element counts. Others are skipped
            whatever they hold: their gradients are 0, and a mean does not count them.
        normalizer: A number, or an array without dimensions, that a mean divides by instead: tokens, accumulated rows.
        dim: The dimension of the broadcast shape, or several, to reduce over; the others are kept. All by default.
        out_dtype: The floating dtype of the result; the promoted dtype of the operands by default.

    Returns:
        With 'none' the broadcast shape; otherwise one number, or with `dim` one per index of the dimensions
        that are kept. `mean` divides the sum by the number of elements that the mask leaves, `weighted_mean`
        by the sum of their weights, `batchmean` by the size of the first dimension.
        In the promoted dtype of the operands, on their device.

    Gradient:
        Every floating operand is differentiable. At input = target the gradient is 0; at |target| = epsilon the
        denominator counts as constant. Where the loss is NaN so is the gradient.

    Raises:
        TypeError: an operand that is no array, has another dtype, or belongs to another library.
        ValueError: shapes that do not broadcast, another device, a parameter or reduction out of range.

    The defaults are those of Keras.

    Source: S. Makridakis, Accuracy measures: theoretical and practical concerns, International Journal of Forecasting 9, 1993.
    """

def log_cosh_loss(
    input: _Array,
    target: _Exchangeable,
    reduction: _Reduction = "mean",
    *,
    weight: _Exchangeable | float | None = None,
    mask: _Exchangeable | None = None,
    normalizer: _Exchangeable | float | None = None,
    dim: int | tuple[int, ...] | None = None,
    out_dtype: Any = None,
) -> _Array:
    """Logarithm of the hyperbolic cosine: half the squared error for small differences, the absolute for large.

        log(cosh(input - target))

    Args:
        input: The prediction. Shape (*), floating or integer; operands broadcast. Domain: real.
        target: The ground truth. Shape (*), floating or integer; operands broadcast. Domain: real.
        reduction: One of 'none', 'mean', 'sum', 'batchmean', 'weighted_mean'. Default 'mean'.
        weight: What each element is multiplied by: a number, or an array that broadcasts with the operands, and is
            differentiable. An element of weight 0 counts for nothing, whatever it holds.
        mask: Bool, broadcasts with the operands: True where an element counts. Others are skipped
            whatever they hold: their gradients are 0, and a mean does not count them.
        normalizer: A number, or an array without dimensions, that a mean divides by instead: tokens, accumulated rows.
        dim: The dimension of the broadcast shape, or several, to reduce over; the others are kept. All by default.
        out_dtype: The floating dtype of the result; the promoted dtype of the operands by default.

    Returns:
        With 'none' the broadcast shape; otherwise one number, or with `dim` one per index of the dimensions
        that are kept. `mean` divides the sum by the number of elements that the mask leaves, `weighted_mean`
        by the sum of their weights, `batchmean` by the size of the first dimension.
        In the promoted dtype of the operands, on their device.

    Gradient:
        Every floating operand is differentiable. The loss is differentiable everywhere. Where the loss is NaN so is
        the gradient.

    Raises:
        TypeError: an operand that is no array, has another dtype, or belongs to another library.
        ValueError: shapes that do not broadcast, another device, a parameter or reduction out of range.

    Source: P. J. Green, Bayesian reconstructions from emission tomography data using a modified EM algorithm, IEEE Transactions on Medical Imaging 9, 1990.
    """

def charbonnier_loss(
    input: _Array,
    target: _Exchangeable,
    scale: float = 1.0,
    reduction: _Reduction = "mean",
    *,
    weight: _Exchangeable | float | None = None,
    mask: _Exchangeable | None = None,
    normalizer: _Exchangeable | float | None = None,
    dim: int | tuple[int, ...] | None = None,
    out_dtype: Any = None,
) -> _Array:
    """Charbonnier loss, a smooth absolute error, also known as pseudo-Huber.

        sqrt(r^2 + 1) - 1, with r = (input - target) / scale

    Args:
        input: The prediction. Shape (*), floating or integer; operands broadcast. Domain: real.
        target: The ground truth. Shape (*), floating or integer; operands broadcast. Domain: real.
        scale: The residual around which errors begin to count as outliers. Must be a number > 0. Default 1.0.
        reduction: One of 'none', 'mean', 'sum', 'batchmean', 'weighted_mean'. Default 'mean'.
        weight: What each element is multiplied by: a number, or an array that broadcasts with the operands, and is
            differentiable. An element of weight 0 counts for nothing, whatever it holds.
        mask: Bool, broadcasts with the operands: True where an element counts. Others are skipped
            whatever they hold: their gradients are 0, and a mean does not count them.
        normalizer: A number, or an array without dimensions, that a mean divides by instead: tokens, accumulated rows.
        dim: The dimension of the broadcast shape, or several, to reduce over; the others are kept. All by default.
        out_dtype: The floating dtype of the result; the promoted dtype of the operands by default.

    Returns:
        With 'none' the broadcast shape; otherwise one number, or with `dim` one per index of the dimensions
        that are kept. `mean` divides the sum by the number of elements that the mask leaves, `weighted_mean`
        by the sum of their weights, `batchmean` by the size of the first dimension.
        In the promoted dtype of the operands, on their device.

    Gradient:
        Every floating operand is differentiable. The loss is differentiable everywhere. Where the loss is NaN so is
        the gradient.

    Raises:
        TypeError: an operand that is no array, has another dtype, or belongs to another library.
        ValueError: shapes that do not broadcast, another device, a parameter or reduction out of range.

    As kornia has it: without the 1 taken off, and as sqrt(d^2 + epsilon^2), it is `epsilon` times this plus
    `epsilon`, with scale = epsilon. It is `general_robust_loss` with alpha = 1.

    Source: P. Charbonnier, L. Blanc-Feraud, G. Aubert, M. Barlaud, Two deterministic half-quadratic regularization algorithms for computed imaging, ICIP 1994.
    """

def cauchy_loss(
    input: _Array,
    target: _Exchangeable,
    scale: float = 1.0,
    reduction: _Reduction = "mean",
    *,
    weight: _Exchangeable | float | None = None,
    mask: _Exchangeable | None = None,
    normalizer: _Exchangeable | float | None = None,
    dim: int | tuple[int, ...] | None = None,
    out_dtype: Any = None,
) -> _Array:
    """Cauchy loss, the negative log-likelihood of a Cauchy distribution; also known as Lorentzian.

        log(1 + r^2 / 2), with r = (input - target) / scale

    Args:
        input: The prediction. Shape (*), floating or integer; operands broadcast. Domain: real.
        target: The ground truth. Shape (*), floating or integer; operands broadcast. Domain: real.
        scale: The residual around which errors begin to count as outliers. Must be a number > 0. Default 1.0.
        reduction: One of 'none', 'mean', 'sum', 'batchmean', 'weighted_mean'. Default 'mean'.
        weight: What each element is multiplied by: a number, or an array that broadcasts with the operands, and is
            differentiable. An element of weight 0 counts for nothing, whatever it holds.
        mask: Bool, broadcasts with the operands: True where an element counts. Others are skipped
            whatever they hold: their gradients are 0, and a mean does not count them.
        normalizer: A number, or an array without dimensions, that a mean divides by instead: tokens, accumulated rows.
        dim: The dimension of the broadcast shape, or several, to reduce over; the others are kept. All by default.
        out_dtype: The floating dtype of the result; the promoted dtype of the operands by default.

    Returns:
        With 'none' the broadcast shape; otherwise one number, or with `dim` one per index of the dimensions
        that are kept. `mean` divides the sum by the number of elements that the mask leaves, `weighted_mean`
        by the sum of their weights, `batchmean` by the size of the first dimension.
        In the promoted dtype of the operands, on their device.

    Gradient:
        Every floating operand is differentiable. The loss is differentiable everywhere. Where the loss is NaN so is
        the gradient.

    Raises:
        TypeError: an operand that is no array, has another dtype, or belongs to another library.
        ValueError: shapes that do not broadcast, another device, a parameter or reduction out of range.

    As kornia and Barron have it; it is `general_robust_loss` with alpha = 0.

    Source: M. J. Black, P. Anandan, The robust estimation of multiple motions: parametric and piecewise-smooth flow fields, Computer Vision and Image Understanding 63, 1996.
    """

def welsch_loss(
    input: _Array,
    target: _Exchangeable,
    scale: float = 1.0,
    reduction: _Reduction = "mean",
    *,
    weight: _Exchangeable | float | None = None,
    mask: _Exchangeable | None = None,
    normalizer: _Exchangeable | float | None = None,
    dim: int | tuple[int, ...] | None = None,
    out_dtype: Any = None,
) -> _Array:
    """Welsch loss, an upside-down Gaussian; also known as Leclerc.

        1 - exp(-r^2 / 2), with r = (input - target) / scale

    Args:
        input: The prediction. Shape (*), floating or integer; operands broadcast. Domain: real.
        target: The ground truth. Shape (*), floating or integer; operands broadcast. Domain: real.
        scale: The residual around which errors begin to count as outliers. Must be a number > 0. Default 1.0.
        reduction: One of 'none', 'mean', 'sum', 'batchmean', 'weighted_mean'. Default 'mean'.
        weight: What each element is multiplied by: a number, or an array that broadcasts with the operands, and is
            differentiable. An element of weight 0 counts for nothing, whatever it holds.
        mask: Bool, broadcasts with the operands: True where an element counts. Others are skipped
            whatever they hold: their gradients are 0, and a mean does not count them.
        normalizer: A number, or an array without dimensions, that a mean divides by instead: tokens, accumulated rows.
        dim: The dimension of the broadcast shape, or several, to reduce over; the others are kept. All by default.
        out_dtype: The floating dtype of the result; the promoted dtype of the operands by default.

    Returns:
        With 'none' the broadcast shape; otherwise one number, or with `dim` one per index of the dimensions
        that are kept. `mean` divides the sum by the number of elements that the mask leaves, `weighted_mean`
        by the sum of their weights, `batchmean` by the size of the first dimension.
        In the promoted dtype of the operands, on their device.

    Gradient:
        Every floating operand is differentiable. The loss is differentiable everywhere. Where the loss is NaN so is
        the gradient.

    Raises:
        TypeError: an operand that is no array, has another dtype, or belongs to another library.
        ValueError: shapes that do not broadcast, another device, a parameter or reduction out of range.

    As kornia and Barron have it; it is the limit of `general_robust_loss` for alpha to -inf.

    Source: J. E. Dennis, R. E. Welsch, Techniques for nonlinear least squares and robust regression, Communications in Statistics 7, 1978.
    """

def geman_mcclure_loss(
    input: _Array,
    target: _Exchangeable,
    scale: float = 1.0,
    reduction: _Reduction = "mean",
    *,
    weight: _Exchangeable | float | None = None,
    mask: _Exchangeable | None = None,
    normalizer: _Exchangeable | float | None = None,
    dim: int | tuple[int, ...] | None = None,
    out_dtype: Any = None,
) -> _Array:
    """Geman-McClure loss, which is never more than 2.

        2 r^2 / (r^2 + 4), with r = (input - target) / scale

    Args:
        input: The prediction. Shape (*), floating or integer; operands broadcast. Domain: real.
        target: The ground truth. Shape (*), floating or integer; operands broadcast. Domain: real.
        scale: The residual around which errors begin to count as outliers. Must be a number > 0. Default 1.0.
        reduction: One of 'none', 'mean', 'sum', 'batchmean', 'weighted_mean'. Default 'mean'.
        weight: What each element is multiplied by: a number, or an array that broadcasts with the operands, and is
            differentiable. An element of weight 0 counts for nothing, whatever it holds.
        mask: Bool, broadcasts with the operands: True where an element counts. Others are skipped
            whatever they hold: their gradients are 0, and a mean does not count them.
        normalizer: A number, or an array without dimensions, that a mean divides by instead: tokens, accumulated rows.
        dim: The dimension of the broadcast shape, or several, to reduce over; the others are kept. All by default.
        out_dtype: The floating dtype of the result; the promoted dtype of the operands by default.

    Returns:
        With 'none' the broadcast shape; otherwise one number, or with `dim` one per index of the dimensions
        that are kept. `mean` divides the sum by the number of elements that the mask leaves, `weighted_mean`
        by the sum of their weights, `batchmean` by the size of the first dimension.
        In the promoted dtype of the operands, on their device.

    Gradient:
        Every floating operand is differentiable. The loss is differentiable everywhere. Where the loss is NaN so is
        the gradient.

    Raises:
        TypeError: an operand that is no array, has another dtype, or belongs to another library.
        ValueError: shapes that do not broadcast, another device, a parameter or reduction out of range.

    As kornia and Barron have it; r^2 / (r^2 + 1), which is common too, is half of it with twice the scale. It is
    `general_robust_loss` with alpha = -2.

    Source: S. Geman, D. E. McClure, Bayesian image analysis: an application to single photon emission tomography, Proceedings of the Statistical Computing Section of the American Statistical Association, 1985.
    """

def wing_loss(
    input: _Array,
    target: _Exchangeable,
    width: float = 5.0,
    epsilon: float = 0.5,
    reduction: _Reduction = "mean",
    *,
    weight: _Exchangeable | float | None = None,
    mask: _Exchangeable | None = None,
    normalizer: _Exchangeable | float | None = None,
    dim: int | tuple[int, ...] | None = None,
    out_dtype: Any = None,
) -> _Array:
    """Wing loss: logarithmic, and so steep, for small differences, absolute error for large ones.

        width log(1 + d / epsilon) where d < width, else d - width + width log(1 + width / epsilon), with d = |input - target|

    Args:
        input: The prediction. Shape (*), floating or integer; operands broadcast. Domain: real.
        target: The ground truth. Shape (*), floating or integer; operands broadcast. Domain: real.
        width: Where the two branches meet. Must be a number > 0. Default 5.0.
        epsilon: How flat the logarithm is around 0. Must be a number > 0. Default 0.5.
        reduction: One of 'none', 'mean', 'sum', 'batchmean', 'weighted_mean'. Default 'mean'.
        weight: What each element is multiplied by: a number, or an array that broadcasts with the operands, and is
            differentiable. An element of weight 0 counts for nothing, whatever it holds.
        mask: Bool, broadcasts with the operands: True where an element counts. Others are skipped
            whatever they hold: their gradients are 0, and a mean does not count them.
        normalizer: A number, or an array without dimensions, that a mean divides by instead: tokens, accumulated rows.
        dim: The dimension of the broadcast shape, or several, to reduce over; the others are kept. All by default.
        out_dtype: The floating dtype of the result; the promoted dtype of the operands by default.

    Returns:
        With 'none' the broadcast shape; otherwise one number, or with `dim` one per index of the dimensions
        that are kept. `mean` divides the sum by the number of elements that the mask leaves, `weighted_mean`
        by the sum of their weights, `batchmean` by the size of the first dimension.
        In the promoted dtype of the operands, on their device.

    Gradient:
        Every floating operand is differentiable. At input = target the gradient is 0; at d = width it is that of
        the absolute error. Where the loss is NaN so is the gradient.

    Raises:
        TypeError: an operand that is no array, has another dtype, or belongs to another library.
        ValueError: shapes that do not broadcast, another device, a parameter or reduction out of range.

    The defaults are those of segmentation-models-pytorch; the paper has width 10 and epsilon 2.

    Source: Z.-H. Feng, J. Kittler, M. Awais, P. Huber, X.-J. Wu, Wing loss for robust facial landmark localisation with convolutional neural networks, CVPR 2018.
    """

def quantile_loss(
    input: _Array,
    target: _Exchangeable,
    quantile: float = 0.5,
    reduction: _Reduction = "mean",
    *,
    weight: _Exchangeable | float | None = None,
    mask: _Exchangeable | None = None,
    normalizer: _Exchangeable | float | None = None,
    dim: int | tuple[int, ...] | None = None,
    out_dtype: Any = None,
) -> _Array:
    """Quantile loss, also known as pinball: absolute error with one weight below the target and one above.

        quantile (target - input) where input < target, else (1 - quantile) (input - target)

    Args:
        input: The prediction. Shape (*), floating or integer; operands broadcast. Domain: real.
        target: The ground truth. Shape (*), floating or integer; operands broadcast. Domain: real.
        quantile: The quantile to predict, between 0 and 1. Must be a number > 0 and < 1. Default 0.5.
        reduction: One of 'none', 'mean', 'sum', 'batchmean', 'weighted_mean'. Default 'mean'.
        weight: What each element is multiplied by: a number, or an array that broadcasts with the operands, and is
            differentiable. An element of weight 0 counts for nothing, whatever it holds.
        mask: Bool, broadcasts with the operands: True where an element counts. Others are skipped
            whatever they hold: their gradients are 0, and a mean does not count them.
        normalizer: A number, or an array without dimensions, that a mean divides by instead: tokens, accumulated rows.
        dim: The dimension of the broadcast shape, or several, to reduce over; the others are kept. All by default.
        out_dtype: The floating dtype of the result; the promoted dtype of the operands by default.

    Returns:
        With 'none' the broadcast shape; otherwise one number, or with `dim` one per index of the dimensions
        that are kept. `mean` divides the sum by the number of elements that the mask leaves, `weighted_mean`
        by the sum of their weights, `batchmean` by the size of the first dimension.
        In the promoted dtype of the operands, on their device.

    Gradient:
        Every floating operand is differentiable. At input = target the gradient is 0. Where the loss is NaN so is
        the gradient.

    Raises:
        TypeError: an operand that is no array, has another dtype, or belongs to another library.
        ValueError: shapes that do not broadcast, another device, a parameter or reduction out of range.

    Source: R. Koenker, G. Bassett, Regression quantiles, Econometrica 46, 1978.
    """

def general_robust_loss(
    input: _Array,
    target: _Exchangeable,
    alpha: _Exchangeable | float | None = None,
    scale: _Exchangeable | float | None = None,
    reduction: _Reduction = "mean",
    *,
    weight: _Exchangeable | float | None = None,
    mask: _Exchangeable | None = None,
    normalizer: _Exchangeable | float | None = None,
    dim: int | tuple[int, ...] | None = None,
    out_dtype: Any = None,
) -> _Array:
    """Barron's general robust loss, of which `alpha` sets how little an outlier counts.

        (b / alpha) ((r^2 / b + 1)^(alpha / 2) - 1), with b = |alpha - 2| and r = (input - target) / scale

    Args:
        input: The prediction. Shape (*), floating or integer; operands broadcast. Domain: real.
        target: The ground truth. Shape (*), floating or integer; operands broadcast. Domain: real.
        alpha: The shape: any number, infinities included. Shape (*), floating or integer, or a number; operands broadcast. Domain: real. Default 1.
        scale: The residual around which errors begin to count as outliers. Shape (*), floating, or a number; operands broadcast. Domain: positive. Default 1.
        reduction: One of 'none', 'mean', 'sum', 'batchmean', 'weighted_mean'. Default 'mean'.
        weight: What each element is multiplied by: a number, or an array that broadcasts with the operands, and is
            differentiable. An element of weight 0 counts for nothing, whatever it holds.
        mask: Bool, broadcasts with the operands: True where an element counts. Others are skipped
            whatever they hold: their gradients are 0, and a mean does not count them.
        normalizer: A number, or an array without dimensions, that a mean divides by instead: tokens, accumulated rows.
        dim: The dimension of the broadcast shape, or several, to reduce over; the others are kept. All by default.
        out_dtype: The floating dtype of the result; the promoted dtype of the operands by default.

    Returns:
        With 'none' the broadcast shape; otherwise one number, or with `dim` one per index of the dimensions
        that are kept. `mean` divides the sum by the number of elements that the mask leaves, `weighted_mean`
        by the sum of their weights, `batchmean` by the size of the first dimension.
        In the promoted dtype of the operands, on their device.

    Gradient:
        Every floating operand is differentiable. The derivative with respect to alpha is 0 at alpha = 2, where it
        is infinite, and beyond 2^60 either way, which counts as infinite. Where the loss is NaN so is the gradient.

    Raises:
        TypeError: an operand that is no array, has another dtype, or belongs to another library.
        ValueError: shapes that do not broadcast, another device, a parameter or reduction out of range.

    alpha = 2 is half the squared error, 1 `charbonnier_loss`, 0 `cauchy_loss`, -2 `geman_mcclure_loss`, -inf
    `welsch_loss`. The limits are exact, and values and derivatives near them as accurate as elsewhere. The loss is
    NaN for an infinite difference and for a scale that is not positive. To learn alpha and scale, add log(scale)
    and the logarithm of the partition function, which is a function of alpha.

    Source: J. T. Barron, A general and adaptive robust loss function, CVPR 2019.
    """

@overload
def cross_entropy(
    input: _Array,
    target: _Exchangeable,
    weight: _Exchangeable | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: _RowReduction = "mean",
    label_smoothing: float = 0.0,
    *,
    z_loss: float = 0.0,
    gamma: float = 0.0,
    poly: float = 0.0,
    class_dim: int | None = None,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    mask: _Exchangeable | None = None,
    normalizer: _Exchangeable | float | None = None,
    out_dtype: Any = None,
    return_lse: Literal[False] = False,
    return_accuracy: Literal[False] = False,
    inplace_backward: bool = False,
    check_targets: _Check = "lazy",
) -> _Array:
    """Cross entropy of logits against class indices, or against a probability per class.

        (1 - label_smoothing) w_y (rest^gamma nll + poly rest) + label_smoothing smooth + z_loss lse^2, or sum_c
        -w_c ((1 - label_smoothing) t_c + label_smoothing / C) log p_c + z_loss lse^2

    with z = logit_scale input, kept below `softcap`, p = softmax(z), y the label, nll = -log p_y, rest = 1 - p_y,
    lse = log sum_c exp z_c, smooth = -(1 / C) sum_c w_c log p_c over the C classes, t the target.

    Args:
        input: The logits. Shape (N, C), (C,), or any with the classes in `class_dim`; floating.
        target: Class indices of any integer dtype, of the shape of `input` without its class dimension; or a probability per class, floating and of the shape of `input`.
        weight: A weight w_c per class, floating, of shape (C,), and without a gradient. What a weight of 0 multiplies
            counts for nothing, whatever it is.
        ignore_index: The label of rows that do not count: they are not read, whatever they hold, and their gradients
            are 0.
        reduction: One of 'none', 'mean', 'sum', 'batchmean'. Default 'mean'.
        label_smoothing: The share of the target that all classes have alike. Must be a number >= 0 and <= 1. Default 0.0.
        z_loss: The weight of the square of the log-partition function, lse^2. Must be a number >= 0. Default 0.0.
        gamma: How much less a row counts that is decided well. Must be a number >= 0. Default 0.0.
        poly: The weight of 1 - p, the first term of the polynomial that the cross entropy is. Must be a number >= -1. Default 0.0.
        class_dim: The dimension of the classes, from either end; 1 by default, or 0 of a single row.
        softcap: Logits become softcap tanh(logits / softcap), after they are scaled. A number > 0; none by default.
        logit_scale: What logits are multiplied by. A finite number > 0. Default 1.0.
        mask: Bool, broadcasts to the shape of the rows: True where a row counts. Others are not read, whatever they
            hold: their gradients are 0, and a mean does not count them.
        normalizer: A number, or an array without dimensions, that a mean divides by instead: tokens, accumulated rows.
        out_dtype: The floating dtype of the result; that of the operands by default.
        return_lse: Whether the log-partition function of each row is returned too. It has no gradient.
        return_accuracy: Whether the share of the rows that count is returned too in which no logit is larger than the
            label's.
        inplace_backward: Whether backward may write the gradient over the logits, which must not be used afterwards.
            Autograd raises where another operation, such as `tanh`, has saved them for its own backward. CPU arrays
            are left as they are.
        check_targets: When a label that is neither a class nor `ignore_index` raises: 'sync' now, which waits for the
            GPU, 'lazy' at the next call after it was found, 'off' never. The loss is NaN then, and the gradient of
            the row is 0. On CPU arrays 'lazy' is 'sync'. Default 'lazy'.
        size_average, reduce: torch's deprecated arguments; they warn and decide the reduction.

    Returns:
        With 'none' one number per row, of the shape of the rows; otherwise one number. `mean` divides the sum by
        the sum of the weights of the labels of rows that count, of probabilities by their number, `batchmean` by
        the size of the first dimension of the rows. A mean of nothing is NaN, with gradients of 0. In the promoted
        dtype of the floating operands, on their device; float32 under autocast. With `return_lse` or
        `return_accuracy` a named tuple (loss, lse, accuracy), None for what was not asked for: `lse` of the shape
        of the rows, 0 where these do not count, and `accuracy` one number.

    Gradient:
        Every floating operand is differentiable. A label of log-probability -inf costs inf, with a finite gradient.
        Rows that are ignored or masked have gradient 0. Where the loss is NaN so is the gradient of the row.

    Raises:
        TypeError: an operand that is no array, has another dtype, or belongs to another library.
        ValueError: shapes that do not fit, another device, a parameter or reduction out of range.
        IndexError: a label that is neither a class nor `ignore_index`; see `check_targets`.

    A floating target holds probabilities, an integer one class indices; shapes do not decide, as they do in torch.
    Class weights multiply the terms of their classes; the weight of the label alone multiplies the rest.

    Drop-in for ``torch.nn.functional.cross_entropy``.

    Source: I. J. Good, Rational decisions, Journal of the Royal Statistical Society B 14, 1952; label smoothing: C. Szegedy et al., Rethinking the Inception architecture for computer vision, CVPR 2016; gamma: T.-Y. Lin et al., Focal loss for dense object detection, ICCV 2017; poly: Z. Leng et al., PolyLoss, ICLR 2022.
    """

@overload
def cross_entropy(
    input: _Array,
    target: _Exchangeable,
    weight: _Exchangeable | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: _RowReduction = "mean",
    label_smoothing: float = 0.0,
    *,
    z_loss: float = 0.0,
    gamma: float = 0.0,
    poly: float = 0.0,
    class_dim: int | None = None,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    mask: _Exchangeable | None = None,
    normalizer: _Exchangeable | float | None = None,
    out_dtype: Any = None,
    return_lse: Literal[True],
    return_accuracy: bool = False,
    inplace_backward: bool = False,
    check_targets: _Check = "lazy",
) -> RowResult: ...
@overload
def cross_entropy(
    input: _Array,
    target: _Exchangeable,
    weight: _Exchangeable | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: _RowReduction = "mean",
    label_smoothing: float = 0.0,
    *,
    z_loss: float = 0.0,
    gamma: float = 0.0,
    poly: float = 0.0,
    class_dim: int | None = None,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    mask: _Exchangeable | None = None,
    normalizer: _Exchangeable | float | None = None,
    out_dtype: Any = None,
    return_lse: bool = False,
    return_accuracy: Literal[True],
    inplace_backward: bool = False,
    check_targets: _Check = "lazy",
) -> RowResult: ...
@overload
def cross_entropy(
    input: _Array,
    target: _Exchangeable,
    weight: _Exchangeable | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: _RowReduction = "mean",
    label_smoothing: float = 0.0,
    *,
    z_loss: float = 0.0,
    gamma: float = 0.0,
    poly: float = 0.0,
    class_dim: int | None = None,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    mask: _Exchangeable | None = None,
    normalizer: _Exchangeable | float | None = None,
    out_dtype: Any = None,
    return_lse: bool = False,
    return_accuracy: bool = False,
    inplace_backward: bool = False,
    check_targets: _Check = "lazy",
) -> _Array | RowResult: ...
@overload
def softmax_focal_loss(
    input: _Array,
    target: _Exchangeable,
    alpha: _Exchangeable | None = None,
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
    mask: _Exchangeable | None = None,
    normalizer: _Exchangeable | float | None = None,
    out_dtype: Any = None,
    return_lse: Literal[False] = False,
    return_accuracy: Literal[False] = False,
    inplace_backward: bool = False,
    check_targets: _Check = "lazy",
) -> _Array:
    """Cross entropy of logits against class indices in which rows that are decided well count less.

        (1 - label_smoothing) alpha_y (rest^gamma nll + poly rest) + label_smoothing smooth + z_loss lse^2

    with z = logit_scale input, kept below `softcap`, p = softmax(z), y the label, nll = -log p_y, rest = 1 - p_y,
    lse = log sum_c exp z_c, smooth = -(1 / C) sum_c alpha_c log p_c over the C classes.

    Args:
        input: The logits. Shape (N, C), (C,), or any with the classes in `class_dim`; floating.
        target: Class indices of any integer dtype, of the shape of `input` without its class dimension.
        alpha: A weight per class, floating, of shape (C,), and without a gradient.
        gamma: How much less; 0 gives the cross entropy. Must be a number >= 0. Default 2.0.
        ignore_index: The label of rows that do not count: they are not read, whatever they hold, and their gradients
            are 0.
        reduction: One of 'none', 'mean', 'sum', 'batchmean'. Default 'mean'.
        label_smoothing: The share of the target that all classes have alike. Must be a number >= 0 and <= 1. Default 0.0.
        z_loss: The weight of the square of the log-partition function, lse^2. Must be a number >= 0. Default 0.0.
        poly: The weight of 1 - p, the first term of the polynomial that the cross entropy is. Must be a number >= -1. Default 0.0.
        class_dim: The dimension of the classes, from either end; 1 by default, or 0 of a single row.
        softcap: Logits become softcap tanh(logits / softcap), after they are scaled. A number > 0; none by default.
        logit_scale: What logits are multiplied by. A finite number > 0. Default 1.0.
        mask: Bool, broadcasts to the shape of the rows: True where a row counts. Others are not read, whatever they
            hold: their gradients are 0, and a mean does not count them.
        normalizer: A number, or an array without dimensions, that a mean divides by instead: tokens, accumulated rows.
        out_dtype: The floating dtype of the result; that of the operands by default.
        return_lse: Whether the log-partition function of each row is returned too. It has no gradient.
        return_accuracy: Whether the share of the rows that count is returned too in which no logit is larger than the
            label's.
        inplace_backward: Whether backward may write the gradient over the logits, which must not be used afterwards.
            Autograd raises where another operation, such as `tanh`, has saved them for its own backward. CPU arrays
            are left as they are.
        check_targets: When a label that is neither a class nor `ignore_index` raises: 'sync' now, which waits for the
            GPU, 'lazy' at the next call after it was found, 'off' never. The loss is NaN then, and the gradient of
            the row is 0. On CPU arrays 'lazy' is 'sync'. Default 'lazy'.

    Returns:
        With 'none' one number per row, of the shape of the rows; otherwise one number. `mean` divides the sum by
        the number of rows that count, `batchmean` by the size of the first dimension of the rows. A mean of nothing
        is NaN, with gradients of 0. In the promoted dtype of the floating operands, on their device; float32 under
        autocast. With `return_lse` or `return_accuracy` a named tuple (loss, lse, accuracy), None for what was not
        asked for: `lse` of the shape of the rows, 0 where these do not count, and `accuracy` one number.

    Gradient:
        Every floating operand is differentiable. A label of log-probability -inf costs inf, with a finite gradient.
        Rows that are ignored or masked have gradient 0. Where the loss is NaN so is the gradient of the row.

    Raises:
        TypeError: an operand that is no array, has another dtype, or belongs to another library.
        ValueError: shapes that do not fit, another device, a parameter or reduction out of range.
        IndexError: a label that is neither a class nor `ignore_index`; see `check_targets`.

    `mean` divides by the number of rows that count, as that of `sigmoid_focal_loss` does by the elements.

    Source: T.-Y. Lin, P. Goyal, R. Girshick, K. He, P. Dollár, Focal loss for dense object detection, ICCV 2017.
    """

@overload
def softmax_focal_loss(
    input: _Array,
    target: _Exchangeable,
    alpha: _Exchangeable | None = None,
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
    mask: _Exchangeable | None = None,
    normalizer: _Exchangeable | float | None = None,
    out_dtype: Any = None,
    return_lse: Literal[True],
    return_accuracy: bool = False,
    inplace_backward: bool = False,
    check_targets: _Check = "lazy",
) -> RowResult: ...
@overload
def softmax_focal_loss(
    input: _Array,
    target: _Exchangeable,
    alpha: _Exchangeable | None = None,
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
    mask: _Exchangeable | None = None,
    normalizer: _Exchangeable | float | None = None,
    out_dtype: Any = None,
    return_lse: bool = False,
    return_accuracy: Literal[True],
    inplace_backward: bool = False,
    check_targets: _Check = "lazy",
) -> RowResult: ...
@overload
def softmax_focal_loss(
    input: _Array,
    target: _Exchangeable,
    alpha: _Exchangeable | None = None,
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
    mask: _Exchangeable | None = None,
    normalizer: _Exchangeable | float | None = None,
    out_dtype: Any = None,
    return_lse: bool = False,
    return_accuracy: bool = False,
    inplace_backward: bool = False,
    check_targets: _Check = "lazy",
) -> _Array | RowResult: ...
def nll_loss(
    input: _Array,
    target: _Exchangeable,
    weight: _Exchangeable | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: _RowReduction = "mean",
    *,
    class_dim: int | None = None,
    mask: _Exchangeable | None = None,
    normalizer: _Exchangeable | float | None = None,
    out_dtype: Any = None,
    check_targets: _Check = "lazy",
) -> _Array:
    """Negative log-likelihood of class indices under log-probabilities.

        -w_y input_y

    with y the label.

    Args:
        input: The log-probabilities. Shape (N, C), (C,), or any with the classes in `class_dim`; floating. Domain: log-probability.
        target: Class indices of any integer dtype, of the shape of `input` without its class dimension.
        weight: A weight w_c per class, floating, of shape (C,), and without a gradient. What a weight of 0 multiplies
            counts for nothing, whatever it is.
        ignore_index: The label of rows that do not count: they are not read, whatever they hold, and their gradients
            are 0.
        reduction: One of 'none', 'mean', 'sum', 'batchmean'. Default 'mean'.
        class_dim: The dimension of the classes, from either end; 1 by default, or 0 of a single row.
        mask: Bool, broadcasts to the shape of the rows: True where a row counts. Others are not read, whatever they
            hold: their gradients are 0, and a mean does not count them.
        normalizer: A number, or an array without dimensions, that a mean divides by instead: tokens, accumulated rows.
        out_dtype: The floating dtype of the result; that of the operands by default.
        check_targets: When a label that is neither a class nor `ignore_index` raises: 'sync' now, which waits for the
            GPU, 'lazy' at the next call after it was found, 'off' never. The loss is NaN then, and the gradient of
            the row is 0. On CPU arrays 'lazy' is 'sync'. Default 'lazy'.
        size_average, reduce: torch's deprecated arguments; they warn and decide the reduction.

    Returns:
        With 'none' one number per row, of the shape of the rows; otherwise one number. `mean` divides the sum by
        the sum of the weights of the labels of rows that count, `batchmean` by the size of the first dimension of
        the rows. A mean of nothing is NaN, with gradients of 0. In the promoted dtype of the floating operands, on
        their device; float32 under autocast.

    Gradient:
        Every floating operand is differentiable. Only the log-probability of the label has a gradient that is not
        0. Where the loss is NaN so is the gradient of the row.

    Raises:
        TypeError: an operand that is no array, has another dtype, or belongs to another library.
        ValueError: shapes that do not fit, another device, a parameter or reduction out of range.
        IndexError: a label that is neither a class nor `ignore_index`; see `check_targets`.

    `cross_entropy` of the logits reads them once, and keeps the digits of sure predictions.

    Drop-in for ``torch.nn.functional.nll_loss``.

    Source: R. A. Fisher, On the mathematical foundations of theoretical statistics, Philosophical Transactions of the Royal Society A 222, 1922.
    """

def kl_div_with_logits(
    input: _Array,
    target: _Exchangeable,
    reduction: _RowReduction = "batchmean",
    log_target: bool = False,
    *,
    class_dim: int = -1,
    temperature: float = 1.0,
    mask: _Exchangeable | None = None,
    normalizer: _Exchangeable | float | None = None,
    out_dtype: Any = None,
    inplace_backward: bool = False,
) -> _Array:
    """Kullback-Leibler divergence of the distribution that logits are of from the target.

        sum_c t_c (log t_c - log p_c)

    with z = input / temperature, p = softmax(z), t the target.

    Args:
        input: The logits. Shape (N, C), (C,), or any with the classes in `class_dim`; floating.
        target: The true distribution as probabilities, or as log-probabilities with `log_target=True`; of the shape of `input`.
        reduction: One of 'none', 'mean', 'sum', 'batchmean'. Default 'batchmean'.
        log_target: Whether `target` holds log-probabilities. Default False.
        class_dim: The dimension of the classes, from either end; -1 by default.
        temperature: What logits are divided by. A finite number > 0. Default 1.0.
        mask: Bool, broadcasts to the shape of the rows: True where a row counts. Others are not read, whatever they
            hold: their gradients are 0, and a mean does not count them.
        normalizer: A number, or an array without dimensions, that a mean divides by instead: tokens, accumulated rows.
        out_dtype: The floating dtype of the result; that of the operands by default.
        inplace_backward: Whether backward may write the gradient over the logits, which must not be used afterwards.
            Autograd raises where another operation, such as `tanh`, has saved them for its own backward. CPU arrays
            are left as they are.

    Returns:
        With 'none' one number per row, of the shape of the rows; otherwise one number. `mean` divides the sum by
        the number of rows that count, `batchmean` by the size of the first dimension of the rows. A mean of nothing
        is NaN, with gradients of 0. In the promoted dtype of the floating operands, on their device; float32 under
        autocast.

    Gradient:
        Every floating operand is differentiable. Where the target has no mass, the term and its gradients are 0,
        also against an impossible prediction. Where the loss is NaN so is the gradient of the row.

    Raises:
        TypeError: an operand that is no array, has another dtype, or belongs to another library.
        ValueError: shapes that do not fit, another device, a parameter or reduction out of range.

    It is `kl_div` of the log-softmax, in one pass. `mean` divides by the number of rows, `batchmean` by the size of
    the first dimension. Not multiplied by the square of the temperature.

    Source: S. Kullback, R. A. Leibler, On information and sufficiency, Annals of Mathematical Statistics 22, 1951.
    """

def distillation_loss(
    student_logits: _Array,
    teacher_logits: _Exchangeable,
    temperature: float = 1.0,
    beta: float = 0.0,
    reduction: _RowReduction = "batchmean",
    *,
    class_dim: int = -1,
    mask: _Exchangeable | None = None,
    normalizer: _Exchangeable | float | None = None,
    out_dtype: Any = None,
    inplace_backward: bool = False,
) -> _Array:
    """Divergence between the distributions of a student's and a teacher's logits.

        beta KL(q || m) + (1 - beta) KL(p || m), where m = beta q + (1 - beta) p; with beta = 0 KL(q || p), with
        beta = 1 KL(p || q)

    with z = student_logits / temperature, p = softmax(z), q = softmax(teacher_logits / temperature).

    Args:
        student_logits: The logits that are trained. Shape (N, C), (C,), or any with the classes in `class_dim`; floating.
        teacher_logits: The logits to come near to, of the same shape; differentiable too.
        temperature: What logits are divided by. A finite number > 0. Default 1.0.
        beta: The weight of the teacher in the mixture m; 0 is the forward, 1 the reverse divergence. Must be a number >= 0 and <= 1. Default 0.0.
        reduction: One of 'none', 'mean', 'sum', 'batchmean'. Default 'batchmean'.
        class_dim: The dimension of the classes, from either end; -1 by default.
        mask: Bool, broadcasts to the shape of the rows: True where a row counts. Others are not read, whatever they
            hold: their gradients are 0, and a mean does not count them.
        normalizer: A number, or an array without dimensions, that a mean divides by instead: tokens, accumulated rows.
        out_dtype: The floating dtype of the result; that of the operands by default.
        inplace_backward: Whether backward may write the gradient over the logits, which must not be used afterwards.
            Autograd raises where another operation, such as `tanh`, has saved them for its own backward. CPU arrays
            are left as they are.

    Returns:
        With 'none' one number per row, of the shape of the rows; otherwise one number. `mean` divides the sum by
        the number of rows that count, `batchmean` by the size of the first dimension of the rows. A mean of nothing
        is NaN, with gradients of 0. In the promoted dtype of the floating operands, on their device; float32 under
        autocast.

    Gradient:
        Every floating operand is differentiable. A class without mass on one side has gradient 0 there. Where the
        loss is NaN so is the gradient of the row.

    Raises:
        TypeError: an operand that is no array, has another dtype, or belongs to another library.
        ValueError: shapes that do not fit, another device, a parameter or reduction out of range.

    No row is below 0, and students that are near their teacher keep their digits. As Liger has it, beta = 0 and 1
    are the Kullback-Leibler divergences, and not the limits, which are 0. The gradient falls with the square of the
    temperature; multiply the loss by it, as G. Hinton et al. do (Distilling the knowledge in a neural network,
    2015), to keep its size. `mean` divides by the number of rows, `batchmean` by the size of the first dimension.

    Source: R. Agarwal et al., On-policy distillation of language models: learning from self-generated mistakes, ICLR 2024.
    """

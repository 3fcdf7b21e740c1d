"""The functions as editors and type checkers see them. Written by scripts/generate.py; do not edit."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol, TypeVar, overload

from cupylosses.engines.log_probs.call import TokenLogProbs
from cupylosses.engines.sequence.alignment import CtcAlignment
from cupylosses.engines.softmax.call import RowResult

class _Exchangeable(Protocol):
    """A torch tensor, a CuPy array, a NumPy array, or what else gives its memory through DLPack."""

    def __dlpack__(self, *, stream: Any = ...) -> Any: ...

_Array = TypeVar("_Array", bound=_Exchangeable)

__all__: list[str]

_Reduction = Literal["none", "mean", "sum", "batchmean", "weighted_mean"]
_RowReduction = Literal["none", "mean", "sum", "batchmean"]
_SequenceReduction = Literal["none", "mean", "sum", "batchmean"]
_Check = Literal["lazy", "sync", "off"]

def iou_loss(
    boxes1: _Array,
    boxes2: _Exchangeable,
    reduction: _Reduction = "none",
    eps: float = 1e-06,
    *,
    mode: Literal["linear", "square", "log"] = "log",
    box_format: Literal["xyxy", "xywh", "cxcywh"] = "xyxy",
    weight: _Exchangeable | float | None = None,
    mask: _Exchangeable | None = None,
    normalizer: _Exchangeable | float | None = None,
    out_dtype: Any = None,
) -> _Array:
    """IoU loss: a function of the intersection over union of two boxes.

        1 - IoU (linear), 1 - IoU^2 (square) or -log IoU (log), with IoU = max(I / max(U, eps), eps), the area I of the
        intersection and the area U of the union

    Boxes that do not overlap have a gradient of 0; other losses of boxes pull them together.

    Args:
        boxes1: The predicted boxes. Shape (N, 4), (4,), or any shape (..., 4) whose leading dimensions broadcast with
            those of the others; floating. Domain: any number.
        boxes2: The boxes to compare with. Shape (N, 4), (4,), or any shape (..., 4) whose leading dimensions broadcast
            with those of the others; floating. Domain: any number.
        reduction: One of 'none', 'mean', 'sum', 'batchmean', 'weighted_mean'; see Returns. Default 'none'.
        eps: Smallest union and smallest IoU. Must be a number >= 0. Default 1e-06.
        mode: The function of the IoU. One of 'linear', 'square', 'log'. Default 'log'.
        box_format: Components of a box: 'xyxy' for left, top, right and bottom edge, 'xywh' for left and top edge,
            width and height, 'cxcywh' for centre, width and height. One of 'xyxy', 'xywh', 'cxcywh'. Default 'xyxy'.
        weight: Factor of each box: a number, or an array that broadcasts to the shape of the boxes without their
            components; differentiable. A box of weight 0 contributes nothing to the value and the gradients of the
            operands, even if it is NaN. Default None, no weights.
        mask: Bool array that broadcasts to the shape of the boxes without their components, True where a box counts.
            The gradients of the others are 0, and a mean does not count them. Default None, no mask.
        normalizer: Number, or array of one number without a gradient, that replaces the divisor of a mean, such as the
            number of tokens of all accumulated batches. Default None.
        out_dtype: Floating dtype of the result, of torch, of NumPy or by name. Default None, the promoted dtype of the
            operands, at least float32.

    Returns:
        With reduction 'none' one value per pair of boxes, in the broadcast shape of the leading dimensions; otherwise
        an array without dimensions. 'mean' divides the sum by the number of boxes that the mask keeps, 'weighted_mean'
        by the sum of their weights, 'batchmean' by the size of the first dimension. A mean of no boxes is 0; if a mask
        leaves none, it is NaN with gradients of 0. Boxes of 16 bits are computed in float32, and so is their result. It
        belongs to the library and the device of the first operand, and has the promoted dtype of all operands, at least
        float32, unless `out_dtype` is given.

    Gradient:
        Every operand is differentiable. Where edges coincide, each box has half of the derivative. Boxes that touch do
        not overlap: their intersection is 0 with gradient 0. Below eps the derivative of union and IoU is 0. Where the
        loss of a box is NaN, so is the gradient of the whole box.

    Raises:
        TypeError: An operand is not an array, or has a dtype that the loss does not take (floating ones are float16,
            bfloat16, float32 and float64); operands come from several libraries, other than torch and CuPy on a GPU; an
            option has the wrong type.
        ValueError: Shapes do not fit, operands are on different devices, or an option is out of range.
        ImportError: The operands are on a GPU, and CuPy is not installed.
        cupylosses.KernelError: A kernel cannot be compiled or loaded.

    Example:
        >>> import torch
        >>> import cupylosses.functional as F
        >>> boxes1 = torch.tensor([0.0, 0.0, 4.0, 2.0], requires_grad=True)
        >>> boxes2 = torch.tensor([1.0, 0.0, 3.0, 4.0])
        >>> loss = F.iou_loss(boxes1, boxes2)
        >>> round(loss.item(), 3)
        1.099
        >>> loss.backward()  # boxes1.grad holds the gradient

    References:
        J. Yu et al., UnitBox: An advanced object detection network, ACM Multimedia 2016.
    """

def generalized_box_iou_loss(
    boxes1: _Array,
    boxes2: _Exchangeable,
    reduction: _Reduction = "none",
    eps: float = 1e-07,
    *,
    box_format: Literal["xyxy", "xywh", "cxcywh"] = "xyxy",
    weight: _Exchangeable | float | None = None,
    mask: _Exchangeable | None = None,
    normalizer: _Exchangeable | float | None = None,
    out_dtype: Any = None,
) -> _Array:
    """Generalized IoU loss: 1 - IoU plus the share of the enclosing box that neither box covers.

        1 - IoU + (C - U) / (C + eps), where IoU is the area I of the intersection over the area U of the union plus
        eps, C the area of the smallest box that encloses both

    Values and gradients are those of torchvision's function. Edges are not checked: a box whose right edge lies left of
    its left edge has the value that the formula gives.

    Args:
        boxes1: The predicted boxes. Shape (N, 4), (4,), or any shape (..., 4) whose leading dimensions broadcast with
            those of the others; floating. Domain: any number.
        boxes2: The boxes to compare with. Shape (N, 4), (4,), or any shape (..., 4) whose leading dimensions broadcast
            with those of the others; floating. Domain: any number.
        reduction: One of 'none', 'mean', 'sum', 'batchmean', 'weighted_mean'; see Returns. Default 'none'.
        eps: Added to divisors, in the square of the unit of the boxes. Must be a number >= 0. Default 1e-07.
        box_format: Components of a box: 'xyxy' for left, top, right and bottom edge, 'xywh' for left and top edge,
            width and height, 'cxcywh' for centre, width and height. One of 'xyxy', 'xywh', 'cxcywh'. Default 'xyxy'.
        weight: Factor of each box: a number, or an array that broadcasts to the shape of the boxes without their
            components; differentiable. A box of weight 0 contributes nothing to the value and the gradients of the
            operands, even if it is NaN. Default None, no weights.
        mask: Bool array that broadcasts to the shape of the boxes without their components, True where a box counts.
            The gradients of the others are 0, and a mean does not count them. Default None, no mask.
        normalizer: Number, or array of one number without a gradient, that replaces the divisor of a mean, such as the
            number of tokens of all accumulated batches. Default None.
        out_dtype: Floating dtype of the result, of torch, of NumPy or by name. Default None, the promoted dtype of the
            operands, at least float32.

    Returns:
        With reduction 'none' one value per pair of boxes, in the broadcast shape of the leading dimensions; otherwise
        an array without dimensions. 'mean' divides the sum by the number of boxes that the mask keeps, 'weighted_mean'
        by the sum of their weights, 'batchmean' by the size of the first dimension. A mean of no boxes is 0; if a mask
        leaves none, it is NaN with gradients of 0. Boxes of 16 bits are computed in float32, and so is their result. It
        belongs to the library and the device of the first operand, and has the promoted dtype of all operands, at least
        float32, unless `out_dtype` is given.

    Gradient:
        Every operand is differentiable. Where edges coincide, each box has half of the derivative. Boxes that touch do
        not overlap: their intersection is 0 with gradient 0. Where the loss of a box is NaN, so is the gradient of the
        whole box.

    Raises:
        TypeError: An operand is not an array, or has a dtype that the loss does not take (floating ones are float16,
            bfloat16, float32 and float64); operands come from several libraries, other than torch and CuPy on a GPU; an
            option has the wrong type.
        ValueError: Shapes do not fit, operands are on different devices, or an option is out of range.
        ImportError: The operands are on a GPU, and CuPy is not installed.
        cupylosses.KernelError: A kernel cannot be compiled or loaded.

    Example:
        >>> import torch
        >>> import cupylosses.functional as F
        >>> boxes1 = torch.tensor([0.0, 0.0, 4.0, 2.0], requires_grad=True)
        >>> boxes2 = torch.tensor([1.0, 0.0, 3.0, 4.0])
        >>> loss = F.generalized_box_iou_loss(boxes1, boxes2)
        >>> round(loss.item(), 3)
        0.917
        >>> loss.backward()  # boxes1.grad holds the gradient

    References:
        H. Rezatofighi et al., Generalized intersection over union, CVPR 2019.
    """

def distance_box_iou_loss(
    boxes1: _Array,
    boxes2: _Exchangeable,
    reduction: _Reduction = "none",
    eps: float = 1e-07,
    *,
    box_format: Literal["xyxy", "xywh", "cxcywh"] = "xyxy",
    weight: _Exchangeable | float | None = None,
    mask: _Exchangeable | None = None,
    normalizer: _Exchangeable | float | None = None,
    out_dtype: Any = None,
) -> _Array:
    """Distance IoU loss: 1 - IoU plus a penalty for the distance of the centres.

        1 - IoU + r^2 / (c^2 + eps), where IoU is the area of the intersection over the area of the union plus eps, r
        the distance of the centres, c the diagonal of the smallest box that encloses both

    Values and gradients are those of torchvision's function. Edges are not checked: a box whose right edge lies left of
    its left edge has the value that the formula gives.

    Args:
        boxes1: The predicted boxes. Shape (N, 4), (4,), or any shape (..., 4) whose leading dimensions broadcast with
            those of the others; floating. Domain: any number.
        boxes2: The boxes to compare with. Shape (N, 4), (4,), or any shape (..., 4) whose leading dimensions broadcast
            with those of the others; floating. Domain: any number.
        reduction: One of 'none', 'mean', 'sum', 'batchmean', 'weighted_mean'; see Returns. Default 'none'.
        eps: Added to divisors, in the square of the unit of the boxes. Must be a number >= 0. Default 1e-07.
        box_format: Components of a box: 'xyxy' for left, top, right and bottom edge, 'xywh' for left and top edge,
            width and height, 'cxcywh' for centre, width and height. One of 'xyxy', 'xywh', 'cxcywh'. Default 'xyxy'.
        weight: Factor of each box: a number, or an array that broadcasts to the shape of the boxes without their
            components; differentiable. A box of weight 0 contributes nothing to the value and the gradients of the
            operands, even if it is NaN. Default None, no weights.
        mask: Bool array that broadcasts to the shape of the boxes without their components, True where a box counts.
            The gradients of the others are 0, and a mean does not count them. Default None, no mask.
        normalizer: Number, or array of one number without a gradient, that replaces the divisor of a mean, such as the
            number of tokens of all accumulated batches. Default None.
        out_dtype: Floating dtype of the result, of torch, of NumPy or by name. Default None, the promoted dtype of the
            operands, at least float32.

    Returns:
        With reduction 'none' one value per pair of boxes, in the broadcast shape of the leading dimensions; otherwise
        an array without dimensions. 'mean' divides the sum by the number of boxes that the mask keeps, 'weighted_mean'
        by the sum of their weights, 'batchmean' by the size of the first dimension. A mean of no boxes is 0; if a mask
        leaves none, it is NaN with gradients of 0. Boxes of 16 bits are computed in float32, and so is their result. It
        belongs to the library and the device of the first operand, and has the promoted dtype of all operands, at least
        float32, unless `out_dtype` is given.

    Gradient:
        Every operand is differentiable. Where edges coincide, each box has half of the derivative. Boxes that touch do
        not overlap: their intersection is 0 with gradient 0. Where the loss of a box is NaN, so is the gradient of the
        whole box.

    Raises:
        TypeError: An operand is not an array, or has a dtype that the loss does not take (floating ones are float16,
            bfloat16, float32 and float64); operands come from several libraries, other than torch and CuPy on a GPU; an
            option has the wrong type.
        ValueError: Shapes do not fit, operands are on different devices, or an option is out of range.
        ImportError: The operands are on a GPU, and CuPy is not installed.
        cupylosses.KernelError: A kernel cannot be compiled or loaded.

    Example:
        >>> import torch
        >>> import cupylosses.functional as F
        >>> boxes1 = torch.tensor([0.0, 0.0, 4.0, 2.0], requires_grad=True)
        >>> boxes2 = torch.tensor([1.0, 0.0, 3.0, 4.0])
        >>> loss = F.distance_box_iou_loss(boxes1, boxes2)
        >>> round(loss.item(), 3)
        0.698
        >>> loss.backward()  # boxes1.grad holds the gradient

    References:
        Z. Zheng et al., Distance-IoU loss, AAAI 2020.
    """

def complete_box_iou_loss(
    boxes1: _Array,
    boxes2: _Exchangeable,
    reduction: _Reduction = "none",
    eps: float = 1e-07,
    *,
    box_format: Literal["xyxy", "xywh", "cxcywh"] = "xyxy",
    weight: _Exchangeable | float | None = None,
    mask: _Exchangeable | None = None,
    normalizer: _Exchangeable | float | None = None,
    out_dtype: Any = None,
) -> _Array:
    """Complete IoU loss: the distance IoU loss plus a penalty for different aspect ratios.

        1 - IoU + r^2 / (c^2 + eps) + a v, with v = (4 / pi^2) (atan(w2 / h2) - atan(w1 / h1))^2 of widths and heights,
        a = v / (1 - IoU + v + eps), where IoU is the area of the intersection over the area of the union plus eps, r
        the distance of the centres, c the diagonal of the smallest box that encloses both

    Values and gradients are those of torchvision's function. Edges are not checked: a box whose right edge lies left of
    its left edge has the value that the formula gives. There are two exceptions: torchvision uses `eps` only in a, and
    its gradient is NaN for boxes of height 0.

    Args:
        boxes1: The predicted boxes. Shape (N, 4), (4,), or any shape (..., 4) whose leading dimensions broadcast with
            those of the others; floating. Domain: any number.
        boxes2: The boxes to compare with. Shape (N, 4), (4,), or any shape (..., 4) whose leading dimensions broadcast
            with those of the others; floating. Domain: any number.
        reduction: One of 'none', 'mean', 'sum', 'batchmean', 'weighted_mean'; see Returns. Default 'none'.
        eps: Added to divisors, in the square of the unit of the boxes. Must be a number >= 0. Default 1e-07.
        box_format: Components of a box: 'xyxy' for left, top, right and bottom edge, 'xywh' for left and top edge,
            width and height, 'cxcywh' for centre, width and height. One of 'xyxy', 'xywh', 'cxcywh'. Default 'xyxy'.
        weight: Factor of each box: a number, or an array that broadcasts to the shape of the boxes without their
            components; differentiable. A box of weight 0 contributes nothing to the value and the gradients of the
            operands, even if it is NaN. Default None, no weights.
        mask: Bool array that broadcasts to the shape of the boxes without their components, True where a box counts.
            The gradients of the others are 0, and a mean does not count them. Default None, no mask.
        normalizer: Number, or array of one number without a gradient, that replaces the divisor of a mean, such as the
            number of tokens of all accumulated batches. Default None.
        out_dtype: Floating dtype of the result, of torch, of NumPy or by name. Default None, the promoted dtype of the
            operands, at least float32.

    Returns:
        With reduction 'none' one value per pair of boxes, in the broadcast shape of the leading dimensions; otherwise
        an array without dimensions. 'mean' divides the sum by the number of boxes that the mask keeps, 'weighted_mean'
        by the sum of their weights, 'batchmean' by the size of the first dimension. A mean of no boxes is 0; if a mask
        leaves none, it is NaN with gradients of 0. Boxes of 16 bits are computed in float32, and so is their result. It
        belongs to the library and the device of the first operand, and has the promoted dtype of all operands, at least
        float32, unless `out_dtype` is given.

    Gradient:
        Every operand is differentiable. Where edges coincide, each box has half of the derivative. Boxes that touch do
        not overlap: their intersection is 0 with gradient 0. a is a constant in every derivative, as in the
        publication. A box without width and height has the angle 0, with gradient 0. Where the loss of a box is NaN, so
        is the gradient of the whole box.

    Raises:
        TypeError: An operand is not an array, or has a dtype that the loss does not take (floating ones are float16,
            bfloat16, float32 and float64); operands come from several libraries, other than torch and CuPy on a GPU; an
            option has the wrong type.
        ValueError: Shapes do not fit, operands are on different devices, or an option is out of range.
        ImportError: The operands are on a GPU, and CuPy is not installed.
        cupylosses.KernelError: A kernel cannot be compiled or loaded.

    Example:
        >>> import torch
        >>> import cupylosses.functional as F
        >>> boxes1 = torch.tensor([0.0, 0.0, 4.0, 2.0], requires_grad=True)
        >>> boxes2 = torch.tensor([1.0, 0.0, 3.0, 4.0])
        >>> loss = F.complete_box_iou_loss(boxes1, boxes2)
        >>> round(loss.item(), 3)
        0.732
        >>> loss.backward()  # boxes1.grad holds the gradient

    References:
        Z. Zheng et al., Distance-IoU loss, AAAI 2020.
    """

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
    """Binary cross entropy of predicted probabilities.

        -(target log(input) + (1 - target) log(1 - input)), with each logarithm clamped to at least -100

    The loss is NaN where `input` or `target` is outside of [0, 1]. `binary_cross_entropy_with_logits` is more accurate:
    the sigmoid of a large logit rounds to 1.

    Drop-in replacement for ``torch.nn.functional.binary_cross_entropy``.

    Args:
        input: The predicted probability. Any shape that broadcasts with the other operands; floating. Domain: [0, 1].
        target: The label, 0 or 1, or a probability between them. Any shape that broadcasts with the other operands;
            floating, integer or bool. Domain: [0, 1].
        weight: Factor of each element: a number, or an array that broadcasts with the operands; differentiable. An
            element of weight 0 contributes nothing to the value and the gradients of the operands, even if it is NaN.
            Default None, no weights.
        reduction: One of 'none', 'mean', 'sum', 'batchmean', 'weighted_mean'; see Returns. Default 'mean'.
        mask: Bool array that broadcasts with the operands, True where an element counts. The others contribute nothing
            to value, gradients and the count of a mean, even if they are NaN. Default None, no mask.
        normalizer: Number, or array of one number without a gradient, that replaces the divisor of a mean, such as the
            number of tokens of all accumulated batches. Default None.
        dim: Dimension of the broadcast shape, or tuple of dimensions, to reduce over with 'mean', 'sum' or
            'weighted_mean'; the others are kept. Default None, all dimensions.
        out_dtype: Floating dtype of the result, of torch, of NumPy or by name. Default None, the promoted dtype of the
            operands.
        size_average, reduce: torch's deprecated arguments; they warn and decide the reduction.

    Returns:
        With reduction 'none' an array of the broadcast shape. Otherwise an array without dimensions, or with `dim` of
        the dimensions that are kept. 'mean' divides the sum by the number of elements that the mask keeps,
        'weighted_mean' by the sum of their weights, 'batchmean' by the size of the first dimension. A mean of nothing
        is NaN, with gradients of 0. The result belongs to the library and the device of the first operand, and has the
        promoted dtype of all operands unless `out_dtype` is given.

    Gradient:
        Every floating operand is differentiable. The derivative with respect to `input` is (1 - target) / (1 - input) -
        target / input, in which 1 / input and 1 / (1 - input) are clamped to at most 1e12. That with respect to
        `target` is the difference of the clamped logarithms. Where the loss is NaN, so is the gradient.

    Raises:
        TypeError: An operand is not an array, or has a dtype that the loss does not take (floating ones are float16,
            bfloat16, float32 and float64); operands come from several libraries, other than torch and CuPy on a GPU; an
            option has the wrong type.
        ValueError: Shapes do not broadcast, operands are on different devices, or an option is out of range.
        ImportError: The operands are on a GPU, and CuPy is not installed.
        cupylosses.KernelError: A kernel cannot be compiled or loaded.

    Example:
        >>> import torch
        >>> import cupylosses.functional as F
        >>> input = torch.tensor([0.7, 0.2, 0.1], requires_grad=True)
        >>> target = torch.tensor([1.0, 0.0, 1.0])
        >>> loss = F.binary_cross_entropy(input, target)
        >>> round(loss.item(), 3)
        0.961
        >>> loss.backward()  # input.grad holds the gradient

    References:
        I. J. Good, Rational decisions, Journal of the Royal Statistical Society B 14, 1952.
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
    """Binary cross entropy of logits.

        pos_weight target log(1 + exp(-input)) + (1 - target) log(1 + exp(input))

    Value and gradient stay accurate for confident correct predictions: neither underflows to 0 early.

    Drop-in replacement for ``torch.nn.functional.binary_cross_entropy_with_logits``.

    Args:
        input: The predicted logit. Any shape that broadcasts with the other operands; floating. Domain: any number.
        target: The label, 0 or 1, or a probability between them. Any shape that broadcasts with the other operands;
            floating, integer or bool. Domain: [0, 1].
        weight: Factor of each element: a number, or an array that broadcasts with the operands; differentiable. An
            element of weight 0 contributes nothing to the value and the gradients of the operands, even if it is NaN.
            Default None, no weights.
        reduction: One of 'none', 'mean', 'sum', 'batchmean', 'weighted_mean'; see Returns. Default 'mean'.
        pos_weight: The weight of positive examples; finite. Any shape that broadcasts with the other operands;
            floating, integer or bool, or a number. Domain: [0, inf). Default 1.
        mask: Bool array that broadcasts with the operands, True where an element counts. The others contribute nothing
            to value, gradients and the count of a mean, even if they are NaN. Default None, no mask.
        normalizer: Number, or array of one number without a gradient, that replaces the divisor of a mean, such as the
            number of tokens of all accumulated batches. Default None.
        dim: Dimension of the broadcast shape, or tuple of dimensions, to reduce over with 'mean', 'sum' or
            'weighted_mean'; the others are kept. Default None, all dimensions.
        out_dtype: Floating dtype of the result, of torch, of NumPy or by name. Default None, the promoted dtype of the
            operands.
        size_average, reduce: torch's deprecated arguments; they warn and decide the reduction.

    Returns:
        With reduction 'none' an array of the broadcast shape. Otherwise an array without dimensions, or with `dim` of
        the dimensions that are kept. 'mean' divides the sum by the number of elements that the mask keeps,
        'weighted_mean' by the sum of their weights, 'batchmean' by the size of the first dimension. A mean of nothing
        is NaN, with gradients of 0. The result belongs to the library and the device of the first operand, and has the
        promoted dtype of all operands unless `out_dtype` is given.

    Gradient:
        Every floating operand is differentiable. An infinite logit of the correct sign has loss 0 and gradient 0. Where
        the loss is NaN, so is the gradient.

    Raises:
        TypeError: An operand is not an array, or has a dtype that the loss does not take (floating ones are float16,
            bfloat16, float32 and float64); operands come from several libraries, other than torch and CuPy on a GPU; an
            option has the wrong type.
        ValueError: Shapes do not broadcast, operands are on different devices, or an option is out of range.
        ImportError: The operands are on a GPU, and CuPy is not installed.
        cupylosses.KernelError: A kernel cannot be compiled or loaded.

    Example:
        >>> import torch
        >>> import cupylosses.functional as F
        >>> input = torch.tensor([0.5, -1.25, 2.0], requires_grad=True)
        >>> target = torch.tensor([1.0, 0.0, 1.0])
        >>> loss = F.binary_cross_entropy_with_logits(input, target)
        >>> round(loss.item(), 3)
        0.284
        >>> loss.backward()  # input.grad holds the gradient

    References:
        D. R. Cox, The regression analysis of binary sequences, Journal of the Royal Statistical Society B 20, 1958.
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
    """Multi-label binary cross entropy of logits, averaged over the classes in the last dimension.

        target log(1 + exp(-input)) + (1 - target) log(1 + exp(input))

    Drop-in replacement for ``torch.nn.functional.multilabel_soft_margin_loss``.

    Args:
        input: The predicted logit. Any shape that broadcasts with the other operands; floating. Domain: any number.
        target: The label, 0 or 1, or a probability between them. Any shape that broadcasts with the other operands;
            floating, integer or bool. Domain: [0, 1].
        weight: Factor of each element: a number, or an array that broadcasts with the operands; differentiable. An
            element of weight 0 contributes nothing to the value and the gradients of the operands, even if it is NaN.
            Default None, no weights.
        reduction: One of 'none', 'mean', 'sum', 'batchmean', 'weighted_mean'; see Returns. Default 'mean'.
        mask: Bool array that broadcasts with the operands, True where an element counts. The others contribute nothing
            to value, gradients and the count of a mean, even if they are NaN. Default None, no mask.
        normalizer: Number, or array of one number without a gradient, that replaces the divisor of a mean, such as the
            number of tokens of all accumulated batches. Default None.
        dim: Dimension of the broadcast shape, or tuple of dimensions, to reduce over with 'mean', 'sum' or
            'weighted_mean'; the others are kept. Default None, all dimensions.
        out_dtype: Floating dtype of the result, of torch, of NumPy or by name. Default None, the promoted dtype of the
            operands.
        size_average, reduce: torch's deprecated arguments; they warn and decide the reduction.

    Returns:
        With reduction 'none' the mean over the last dimension, one value per row; 'sum' adds these, 'mean' averages
        them. 'weighted_mean' divides the sum of all elements by the sum of their weights, 'batchmean' divides the sum
        of the rows by the size of the first dimension. With `dim`, elements are reduced, not rows. A mean of nothing is
        NaN, with gradients of 0. The result belongs to the library and the device of the first operand, and has the
        promoted dtype of all operands unless `out_dtype` is given.

    Gradient:
        Every floating operand is differentiable. An infinite logit of the correct sign has loss 0 and gradient 0. Where
        the loss is NaN, so is the gradient.

    Raises:
        TypeError: An operand is not an array, or has a dtype that the loss does not take (floating ones are float16,
            bfloat16, float32 and float64); operands come from several libraries, other than torch and CuPy on a GPU; an
            option has the wrong type.
        ValueError: Shapes do not broadcast, operands are on different devices, or an option is out of range.
        ImportError: The operands are on a GPU, and CuPy is not installed.
        cupylosses.KernelError: A kernel cannot be compiled or loaded.

    Example:
        >>> import torch
        >>> import cupylosses.functional as F
        >>> input = torch.tensor([0.5, -1.25, 2.0], requires_grad=True)
        >>> target = torch.tensor([1.0, 0.0, 1.0])
        >>> loss = F.multilabel_soft_margin_loss(input, target)
        >>> round(loss.item(), 3)
        0.284
        >>> loss.backward()  # input.grad holds the gradient

    References:
        G. Tsoumakas, I. Katakis, Multi-label classification: an overview, International Journal of Data Warehousing and
            Mining 3, 2007.
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
    """Logistic loss of a score, for labels -1 and +1.

        log(1 + exp(-input target))

    Drop-in replacement for ``torch.nn.functional.soft_margin_loss``.

    Args:
        input: The predicted score. Any shape that broadcasts with the other operands; floating. Domain: any number.
        target: The label; the loss is NaN where it is 0. Any shape that broadcasts with the other operands; floating,
            integer or bool. Domain: -1 or +1.
        reduction: One of 'none', 'mean', 'sum', 'batchmean', 'weighted_mean'; see Returns. Default 'mean'.
        weight: Factor of each element: a number, or an array that broadcasts with the operands; differentiable. An
            element of weight 0 contributes nothing to the value and the gradients of the operands, even if it is NaN.
            Default None, no weights.
        mask: Bool array that broadcasts with the operands, True where an element counts. The others contribute nothing
            to value, gradients and the count of a mean, even if they are NaN. Default None, no mask.
        normalizer: Number, or array of one number without a gradient, that replaces the divisor of a mean, such as the
            number of tokens of all accumulated batches. Default None.
        dim: Dimension of the broadcast shape, or tuple of dimensions, to reduce over with 'mean', 'sum' or
            'weighted_mean'; the others are kept. Default None, all dimensions.
        out_dtype: Floating dtype of the result, of torch, of NumPy or by name. Default None, the promoted dtype of the
            operands.
        size_average, reduce: torch's deprecated arguments; they warn and decide the reduction.

    Returns:
        With reduction 'none' an array of the broadcast shape. Otherwise an array without dimensions, or with `dim` of
        the dimensions that are kept. 'mean' divides the sum by the number of elements that the mask keeps,
        'weighted_mean' by the sum of their weights, 'batchmean' by the size of the first dimension. A mean of nothing
        is NaN, with gradients of 0. The result belongs to the library and the device of the first operand, and has the
        promoted dtype of all operands unless `out_dtype` is given.

    Gradient:
        Every floating operand is differentiable. An infinite score of the correct sign has loss 0 and gradient 0. Where
        the loss is NaN, so is the gradient.

    Raises:
        TypeError: An operand is not an array, or has a dtype that the loss does not take (floating ones are float16,
            bfloat16, float32 and float64); operands come from several libraries, other than torch and CuPy on a GPU; an
            option has the wrong type.
        ValueError: Shapes do not broadcast, operands are on different devices, or an option is out of range.
        ImportError: The operands are on a GPU, and CuPy is not installed.
        cupylosses.KernelError: A kernel cannot be compiled or loaded.

    Example:
        >>> import torch
        >>> import cupylosses.functional as F
        >>> input = torch.tensor([0.5, -1.25, 2.0], requires_grad=True)
        >>> target = torch.tensor([1.0, -1.0, -1.0])
        >>> loss = F.soft_margin_loss(input, target)
        >>> round(loss.item(), 3)
        0.951
        >>> loss.backward()  # input.grad holds the gradient

    References:
        J. Friedman, T. Hastie, R. Tibshirani, Additive logistic regression: a statistical view of boosting, Annals of
            Statistics 28, 2000.
    """

def pearson_loss(
    input: _Array,
    target: _Exchangeable,
    reduction: _Reduction = "mean",
    *,
    weight: _Exchangeable | float | None = None,
    mask: _Exchangeable | None = None,
    normalizer: _Exchangeable | float | None = None,
    feature_dim: int = -1,
    out_dtype: Any = None,
) -> _Array:
    """One minus Pearson's correlation of two rows.

        1 - sum (x - mean x) (y - mean y) / sqrt(sum (x - mean x)^2 sum (y - mean y)^2), with x = input, y = target

    The loss is invariant to shift and scale of either row. Differences from the first element of each row are summed in
    float64, so that a large mean costs no digits.

    Args:
        input: The predictions. Shape (N, D), (D,), or any shape that broadcasts with the others, with the features in
            `feature_dim`; floating. Domain: any number.
        target: The values to agree with. Shape (N, D), (D,), or any shape that broadcasts with the others, with the
            features in `feature_dim`; floating. Domain: any number.
        reduction: One of 'none', 'mean', 'sum', 'batchmean', 'weighted_mean'; see Returns. Default 'mean'.
        weight: Factor of each row: a number, or an array that broadcasts to the shape of the rows; differentiable. A
            row of weight 0 contributes nothing to the value and the gradients of the operands, even if it is NaN.
            Default None, no weights.
        mask: Bool array that broadcasts to the shape of the rows, True where a row counts. The others are not read,
            their gradients are 0, and a mean does not count them. Default None, no mask.
        normalizer: Number, or array of one number without a gradient, that replaces the divisor of a mean, such as the
            number of tokens of all accumulated batches. Default None.
        feature_dim: Dimension of the features in the broadcast shape, from either end. Default -1.
        out_dtype: Floating dtype of the result, of torch, of NumPy or by name. Default None, the promoted dtype of the
            operands.

    Returns:
        With reduction 'none' one value per row, in the broadcast shape without `feature_dim`; otherwise an array
        without dimensions. 'mean' divides the sum by the number of rows that the mask keeps, 'weighted_mean' by the sum
        of their weights, 'batchmean' by the size of the first dimension of the rows. A mean of nothing is NaN, with
        gradients of 0. Sums over rows and their formula are computed in float64. The result belongs to the library and
        the device of the first operand, and has the promoted dtype of all operands unless `out_dtype` is given.

    Gradient:
        Every floating operand is differentiable. A constant row correlates with nothing: the loss is 1, with gradient 0
        with respect to both rows. Where the loss of a row is NaN, so is the gradient of the whole row.

    Raises:
        TypeError: An operand is not an array, or has a dtype that the loss does not take (floating ones are float16,
            bfloat16, float32 and float64); operands come from several libraries, other than torch and CuPy on a GPU; an
            option has the wrong type.
        ValueError: Shapes do not fit, operands are on different devices, or an option is out of range.
        ImportError: The operands are on a GPU, and CuPy is not installed.
        cupylosses.KernelError: A kernel cannot be compiled or loaded.

    Example:
        >>> import torch
        >>> import cupylosses.functional as F
        >>> input = torch.tensor([[1.0, 2.0, 2.0], [0.5, -1.0, 0.0]], requires_grad=True)
        >>> target = torch.tensor([[2.0, 0.0, 1.0], [1.0, -2.0, 0.5]])
        >>> loss = F.pearson_loss(input, target)
        >>> round(loss.item(), 3)
        0.941
        >>> loss.backward()  # input.grad holds the gradient

    References:
        K. Pearson, Notes on regression and inheritance in the case of two parents, Proceedings of the Royal Society of
            London 58, 1895.
    """

def ccc_loss(
    input: _Array,
    target: _Exchangeable,
    unbiased: bool = False,
    reduction: _Reduction = "mean",
    *,
    weight: _Exchangeable | float | None = None,
    mask: _Exchangeable | None = None,
    normalizer: _Exchangeable | float | None = None,
    feature_dim: int = -1,
    out_dtype: Any = None,
) -> _Array:
    """One minus Lin's concordance correlation coefficient of two rows.

        1 - 2 s_xy / (s_xx + s_yy + (mean x - mean y)^2), with the covariances s, x = input, y = target

    Unlike Pearson's correlation, the coefficient is 1 only if the rows are equal: shift and scale cost. Differences are
    summed in float64, so that neither a large mean nor nearly equal rows cost digits.

    Args:
        input: The predictions. Shape (N, D), (D,), or any shape that broadcasts with the others, with the features in
            `feature_dim`; floating. Domain: any number.
        target: The values to agree with. Shape (N, D), (D,), or any shape that broadcasts with the others, with the
            features in `feature_dim`; floating. Domain: any number.
        unbiased: If True, covariances are divided by D - 1 instead of D, the number of features. Default False.
        reduction: One of 'none', 'mean', 'sum', 'batchmean', 'weighted_mean'; see Returns. Default 'mean'.
        weight: Factor of each row: a number, or an array that broadcasts to the shape of the rows; differentiable. A
            row of weight 0 contributes nothing to the value and the gradients of the operands, even if it is NaN.
            Default None, no weights.
        mask: Bool array that broadcasts to the shape of the rows, True where a row counts. The others are not read,
            their gradients are 0, and a mean does not count them. Default None, no mask.
        normalizer: Number, or array of one number without a gradient, that replaces the divisor of a mean, such as the
            number of tokens of all accumulated batches. Default None.
        feature_dim: Dimension of the features in the broadcast shape, from either end. Default -1.
        out_dtype: Floating dtype of the result, of torch, of NumPy or by name. Default None, the promoted dtype of the
            operands.

    Returns:
        With reduction 'none' one value per row, in the broadcast shape without `feature_dim`; otherwise an array
        without dimensions. 'mean' divides the sum by the number of rows that the mask keeps, 'weighted_mean' by the sum
        of their weights, 'batchmean' by the size of the first dimension of the rows. A mean of nothing is NaN, with
        gradients of 0. Sums over rows and their formula are computed in float64. The result belongs to the library and
        the device of the first operand, and has the promoted dtype of all operands unless `out_dtype` is given.

    Gradient:
        Every floating operand is differentiable. Two equal constant rows have loss and gradient 0. Where the loss of a
        row is NaN, so is the gradient of the whole row.

    Raises:
        TypeError: An operand is not an array, or has a dtype that the loss does not take (floating ones are float16,
            bfloat16, float32 and float64); operands come from several libraries, other than torch and CuPy on a GPU; an
            option has the wrong type.
        ValueError: Shapes do not fit, operands are on different devices, or an option is out of range.
        ImportError: The operands are on a GPU, and CuPy is not installed.
        cupylosses.KernelError: A kernel cannot be compiled or loaded.

    Example:
        >>> import torch
        >>> import cupylosses.functional as F
        >>> input = torch.tensor([[1.0, 2.0, 2.0], [0.5, -1.0, 0.0]], requires_grad=True)
        >>> target = torch.tensor([[2.0, 0.0, 1.0], [1.0, -2.0, 0.5]])
        >>> loss = F.ccc_loss(input, target)
        >>> round(loss.item(), 3)
        0.868
        >>> loss.backward()  # input.grad holds the gradient

    References:
        L. I. Lin, A concordance correlation coefficient to evaluate reproducibility, Biometrics 45, 1989.
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
    """Kullback-Leibler divergence KL(target || prediction).

        target (log(target) - input), with the log-probability input

    Reduction 'mean' divides by the number of elements, as in torch. 'batchmean', which divides by the size of the first
    dimension, is the divergence averaged over the batch.

    Drop-in replacement for ``torch.nn.functional.kl_div``.

    Args:
        input: The predicted distribution as log-probabilities, or as probabilities with `log_input=False`. Any shape
            that broadcasts with the other operands; floating. Domain: [-inf, 0] if `log_input` is True, [0, 1] if
            `log_input` is False.
        target: The true distribution as probabilities, or as log-probabilities with `log_target=True`. Any shape that
            broadcasts with the other operands; floating. Domain: [-inf, 0] if `log_target` is True, [0, 1] if
            `log_target` is False.
        reduction: One of 'none', 'mean', 'sum', 'batchmean', 'weighted_mean'; see Returns. Default 'mean'.
        log_target: If True, `target` holds log-probabilities; otherwise it holds probabilities. Default False.
        log_input: If True, `input` holds log-probabilities; otherwise it holds probabilities, and the kernel takes the
            logarithm. Default True.
        weight: Factor of each element: a number, or an array that broadcasts with the operands; differentiable. An
            element of weight 0 contributes nothing to the value and the gradients of the operands, even if it is NaN.
            Default None, no weights.
        mask: Bool array that broadcasts with the operands, True where an element counts. The others contribute nothing
            to value, gradients and the count of a mean, even if they are NaN. Default None, no mask.
        normalizer: Number, or array of one number without a gradient, that replaces the divisor of a mean, such as the
            number of tokens of all accumulated batches. Default None.
        dim: Dimension of the broadcast shape, or tuple of dimensions, to reduce over with 'mean', 'sum' or
            'weighted_mean'; the others are kept. Default None, all dimensions.
        out_dtype: Floating dtype of the result, of torch, of NumPy or by name. Default None, the promoted dtype of the
            operands.
        size_average, reduce: torch's deprecated arguments; they warn and decide the reduction.

    Returns:
        With reduction 'none' an array of the broadcast shape. Otherwise an array without dimensions, or with `dim` of
        the dimensions that are kept. 'mean' divides the sum by the number of elements that the mask keeps,
        'weighted_mean' by the sum of their weights, 'batchmean' by the size of the first dimension. A mean of nothing
        is NaN, with gradients of 0. The result belongs to the library and the device of the first operand, and has the
        promoted dtype of all operands unless `out_dtype` is given.

    Gradient:
        Every floating operand is differentiable. Where the target probability is 0, value and gradients are 0, even if
        the predicted one is 0 too. Where the loss is NaN, so is the gradient.

    Raises:
        TypeError: An operand is not an array, or has a dtype that the loss does not take (floating ones are float16,
            bfloat16, float32 and float64); operands come from several libraries, other than torch and CuPy on a GPU; an
            option has the wrong type.
        ValueError: Shapes do not broadcast, operands are on different devices, or an option is out of range.
        ImportError: The operands are on a GPU, and CuPy is not installed.
        cupylosses.KernelError: A kernel cannot be compiled or loaded.

    Example:
        >>> import torch
        >>> import cupylosses.functional as F
        >>> input = torch.tensor([-0.3567, -1.6094, -2.3026], requires_grad=True)
        >>> target = torch.tensor([0.5, 0.25, 0.25])
        >>> loss = F.kl_div(input, target)
        >>> round(loss.item(), 3)
        0.039
        >>> loss.backward()  # input.grad holds the gradient

    References:
        S. Kullback, R. A. Leibler, On information and sufficiency, Annals of Mathematical Statistics 22, 1951.
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
    """Generalized Kullback-Leibler divergence, for measures that need not sum to 1; no element is negative.

        target log(target / input) - target + input

    Also known as I-divergence, and as half the deviance of a Poisson distribution. An infinite or negative operand
    gives NaN. For distributions the sum equals that of `kl_div`, whose elements have both signs, so that rounding can
    make its sum negative. Equals the loss of optax, except that `input` is the prediction, not its logarithm.

    Args:
        input: The prediction, for example an intensity. Any shape that broadcasts with the other operands; floating.
            Domain: (0, inf).
        target: The ground truth, for example a count. Any shape that broadcasts with the other operands; floating,
            integer or bool. Domain: [0, inf).
        reduction: One of 'none', 'mean', 'sum', 'batchmean', 'weighted_mean'; see Returns. Default 'mean'.
        weight: Factor of each element: a number, or an array that broadcasts with the operands; differentiable. An
            element of weight 0 contributes nothing to the value and the gradients of the operands, even if it is NaN.
            Default None, no weights.
        mask: Bool array that broadcasts with the operands, True where an element counts. The others contribute nothing
            to value, gradients and the count of a mean, even if they are NaN. Default None, no mask.
        normalizer: Number, or array of one number without a gradient, that replaces the divisor of a mean, such as the
            number of tokens of all accumulated batches. Default None.
        dim: Dimension of the broadcast shape, or tuple of dimensions, to reduce over with 'mean', 'sum' or
            'weighted_mean'; the others are kept. Default None, all dimensions.
        out_dtype: Floating dtype of the result, of torch, of NumPy or by name. Default None, the promoted dtype of the
            operands.

    Returns:
        With reduction 'none' an array of the broadcast shape. Otherwise an array without dimensions, or with `dim` of
        the dimensions that are kept. 'mean' divides the sum by the number of elements that the mask keeps,
        'weighted_mean' by the sum of their weights, 'batchmean' by the size of the first dimension. A mean of nothing
        is NaN, with gradients of 0. The result belongs to the library and the device of the first operand, and has the
        promoted dtype of all operands unless `out_dtype` is given.

    Gradient:
        Every floating operand is differentiable. Where `target` is 0, the gradient with respect to it is 0. Where
        `input` is 0 and `target` is positive, the loss is infinite. Where the loss is NaN, so is the gradient.

    Raises:
        TypeError: An operand is not an array, or has a dtype that the loss does not take (floating ones are float16,
            bfloat16, float32 and float64); operands come from several libraries, other than torch and CuPy on a GPU; an
            option has the wrong type.
        ValueError: Shapes do not broadcast, operands are on different devices, or an option is out of range.
        ImportError: The operands are on a GPU, and CuPy is not installed.
        cupylosses.KernelError: A kernel cannot be compiled or loaded.

    Example:
        >>> import torch
        >>> import cupylosses.functional as F
        >>> input = torch.tensor([0.5, 1.5, 3.0], requires_grad=True)
        >>> target = torch.tensor([1.0, 0.0, 4.0])
        >>> loss = F.generalized_kl_div(input, target)
        >>> round(loss.item(), 3)
        0.615
        >>> loss.backward()  # input.grad holds the gradient

    References:
        I. Csiszar, Why least squares and maximum entropy? Annals of Statistics 19, 1991.
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
    """Itakura-Saito divergence of power spectra, which depends on their ratio only.

        target / input - log(target / input) - 1

    The loss is infinite where one operand is 0, and NaN where both are 0 or one is negative or infinite.

    Args:
        input: The predicted power. Any shape that broadcasts with the other operands; floating. Domain: (0, inf).
        target: The true power. Any shape that broadcasts with the other operands; floating, integer or bool. Domain:
            (0, inf).
        reduction: One of 'none', 'mean', 'sum', 'batchmean', 'weighted_mean'; see Returns. Default 'mean'.
        weight: Factor of each element: a number, or an array that broadcasts with the operands; differentiable. An
            element of weight 0 contributes nothing to the value and the gradients of the operands, even if it is NaN.
            Default None, no weights.
        mask: Bool array that broadcasts with the operands, True where an element counts. The others contribute nothing
            to value, gradients and the count of a mean, even if they are NaN. Default None, no mask.
        normalizer: Number, or array of one number without a gradient, that replaces the divisor of a mean, such as the
            number of tokens of all accumulated batches. Default None.
        dim: Dimension of the broadcast shape, or tuple of dimensions, to reduce over with 'mean', 'sum' or
            'weighted_mean'; the others are kept. Default None, all dimensions.
        out_dtype: Floating dtype of the result, of torch, of NumPy or by name. Default None, the promoted dtype of the
            operands.

    Returns:
        With reduction 'none' an array of the broadcast shape. Otherwise an array without dimensions, or with `dim` of
        the dimensions that are kept. 'mean' divides the sum by the number of elements that the mask keeps,
        'weighted_mean' by the sum of their weights, 'batchmean' by the size of the first dimension. A mean of nothing
        is NaN, with gradients of 0. The result belongs to the library and the device of the first operand, and has the
        promoted dtype of all operands unless `out_dtype` is given.

    Gradient:
        Every floating operand is differentiable. The loss is differentiable everywhere. Where the loss is NaN, so is
        the gradient.

    Raises:
        TypeError: An operand is not an array, or has a dtype that the loss does not take (floating ones are float16,
            bfloat16, float32 and float64); operands come from several libraries, other than torch and CuPy on a GPU; an
            option has the wrong type.
        ValueError: Shapes do not broadcast, operands are on different devices, or an option is out of range.
        ImportError: The operands are on a GPU, and CuPy is not installed.
        cupylosses.KernelError: A kernel cannot be compiled or loaded.

    Example:
        >>> import torch
        >>> import cupylosses.functional as F
        >>> input = torch.tensor([0.5, 1.5, 3.0], requires_grad=True)
        >>> target = torch.tensor([1.0, 1.25, 2.5])
        >>> loss = F.itakura_saito_loss(input, target)
        >>> round(loss.item(), 3)
        0.113
        >>> loss.backward()  # input.grad holds the gradient

    References:
        F. Itakura, S. Saito, Analysis synthesis telephony based on the maximum likelihood method, 6th International
            Congress on Acoustics, 1968.
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
    """Generalized Jensen-Shannon divergence of prediction and target.

        beta p log(p / m) + (1 - beta) q log(q / m), with m = beta p + (1 - beta) q, p = target and q = exp(input); p
        log(p / q) if beta = 0, and q log(q / p) if beta = 1

    No element is negative for beta strictly between 0 and 1. The divergence is the sum over a distribution, so its
    average over the batch is reduction 'batchmean'. As in Liger Kernel, beta = 0 and beta = 1 give the Kullback-Leibler
    divergences instead of the limits, which are 0.

    Args:
        input: The predicted distribution q as log-probabilities, or as probabilities with `log_input=False`. Any shape
            that broadcasts with the other operands; floating. Domain: [-inf, 0] if `log_input` is True, [0, 1] if
            `log_input` is False.
        target: The true distribution p as probabilities, or as log-probabilities with `log_target=True`. Any shape that
            broadcasts with the other operands; floating. Domain: [-inf, 0] if `log_target` is True, [0, 1] if
            `log_target` is False.
        beta: Weight of the target in the mixture m. Must be a number >= 0 and <= 1. Default 0.5.
        log_target: If True, `target` holds log-probabilities; otherwise it holds probabilities. Default False.
        log_input: If True, `input` holds log-probabilities; otherwise it holds probabilities, and the kernel takes the
            logarithm. Default True.
        reduction: One of 'none', 'mean', 'sum', 'batchmean', 'weighted_mean'; see Returns. Default 'mean'.
        weight: Factor of each element: a number, or an array that broadcasts with the operands; differentiable. An
            element of weight 0 contributes nothing to the value and the gradients of the operands, even if it is NaN.
            Default None, no weights.
        mask: Bool array that broadcasts with the operands, True where an element counts. The others contribute nothing
            to value, gradients and the count of a mean, even if they are NaN. Default None, no mask.
        normalizer: Number, or array of one number without a gradient, that replaces the divisor of a mean, such as the
            number of tokens of all accumulated batches. Default None.
        dim: Dimension of the broadcast shape, or tuple of dimensions, to reduce over with 'mean', 'sum' or
            'weighted_mean'; the others are kept. Default None, all dimensions.
        out_dtype: Floating dtype of the result, of torch, of NumPy or by name. Default None, the promoted dtype of the
            operands.

    Returns:
        With reduction 'none' an array of the broadcast shape. Otherwise an array without dimensions, or with `dim` of
        the dimensions that are kept. 'mean' divides the sum by the number of elements that the mask keeps,
        'weighted_mean' by the sum of their weights, 'batchmean' by the size of the first dimension. A mean of nothing
        is NaN, with gradients of 0. The result belongs to the library and the device of the first operand, and has the
        promoted dtype of all operands unless `out_dtype` is given.

    Gradient:
        Every floating operand is differentiable. Where p or q is 0, the gradient with respect to it is 0. Where the
        loss is NaN, so is the gradient.

    Raises:
        TypeError: An operand is not an array, or has a dtype that the loss does not take (floating ones are float16,
            bfloat16, float32 and float64); operands come from several libraries, other than torch and CuPy on a GPU; an
            option has the wrong type.
        ValueError: Shapes do not broadcast, operands are on different devices, or an option is out of range.
        ImportError: The operands are on a GPU, and CuPy is not installed.
        cupylosses.KernelError: A kernel cannot be compiled or loaded.

    Example:
        >>> import torch
        >>> import cupylosses.functional as F
        >>> input = torch.tensor([-0.3567, -1.6094, -2.3026], requires_grad=True)
        >>> target = torch.tensor([0.5, 0.25, 0.25])
        >>> loss = F.js_div(input, target)
        >>> round(loss.item(), 3)
        0.009
        >>> loss.backward()  # input.grad holds the gradient

    References:
        J. Lin, Divergence measures based on the Shannon entropy, IEEE Transactions on Information Theory 37, 1991.
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
    """Total variation distance between distributions.

        |input - target| / 2

    The distance is the sum over a distribution, so its average over the batch is reduction 'batchmean'.

    Args:
        input: The predicted probabilities. Any shape that broadcasts with the other operands; floating. Domain: [0, 1].
        target: The true probabilities. Any shape that broadcasts with the other operands; floating. Domain: [0, 1].
        reduction: One of 'none', 'mean', 'sum', 'batchmean', 'weighted_mean'; see Returns. Default 'mean'.
        weight: Factor of each element: a number, or an array that broadcasts with the operands; differentiable. An
            element of weight 0 contributes nothing to the value and the gradients of the operands, even if it is NaN.
            Default None, no weights.
        mask: Bool array that broadcasts with the operands, True where an element counts. The others contribute nothing
            to value, gradients and the count of a mean, even if they are NaN. Default None, no mask.
        normalizer: Number, or array of one number without a gradient, that replaces the divisor of a mean, such as the
            number of tokens of all accumulated batches. Default None.
        dim: Dimension of the broadcast shape, or tuple of dimensions, to reduce over with 'mean', 'sum' or
            'weighted_mean'; the others are kept. Default None, all dimensions.
        out_dtype: Floating dtype of the result, of torch, of NumPy or by name. Default None, the promoted dtype of the
            operands.

    Returns:
        With reduction 'none' an array of the broadcast shape. Otherwise an array without dimensions, or with `dim` of
        the dimensions that are kept. 'mean' divides the sum by the number of elements that the mask keeps,
        'weighted_mean' by the sum of their weights, 'batchmean' by the size of the first dimension. A mean of nothing
        is NaN, with gradients of 0. The result belongs to the library and the device of the first operand, and has the
        promoted dtype of all operands unless `out_dtype` is given.

    Gradient:
        Every floating operand is differentiable. At input = target the gradient is 0. Where the loss is NaN, so is the
        gradient.

    Raises:
        TypeError: An operand is not an array, or has a dtype that the loss does not take (floating ones are float16,
            bfloat16, float32 and float64); operands come from several libraries, other than torch and CuPy on a GPU; an
            option has the wrong type.
        ValueError: Shapes do not broadcast, operands are on different devices, or an option is out of range.
        ImportError: The operands are on a GPU, and CuPy is not installed.
        cupylosses.KernelError: A kernel cannot be compiled or loaded.

    Example:
        >>> import torch
        >>> import cupylosses.functional as F
        >>> input = torch.tensor([0.7, 0.2, 0.1], requires_grad=True)
        >>> target = torch.tensor([0.5, 0.25, 0.25])
        >>> loss = F.tv_distance(input, target)
        >>> round(loss.item(), 3)
        0.067
        >>> loss.backward()  # input.grad holds the gradient

    References:
        A. L. Gibbs, F. E. Su, On choosing and bounding probability metrics, International Statistical Review 70, 2002.
    """

def cosine_embedding_loss(
    input1: _Array,
    input2: _Exchangeable,
    target: _Exchangeable,
    margin: float = 0.0,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: _Reduction = "mean",
    *,
    eps: float = 1e-12,
    weight: _Exchangeable | float | None = None,
    mask: _Exchangeable | None = None,
    normalizer: _Exchangeable | float | None = None,
    feature_dim: int = -1,
    out_dtype: Any = None,
) -> _Array:
    """Cosine embedding loss: one minus the cosine of similar pairs, and the hinge of that of dissimilar pairs.

        1 - c where target > 0, max(0, c - margin) where target < 0, with c = <input1, input2> / sqrt((|input1|^2 + eps)
        (|input2|^2 + eps))

    Drop-in replacement for ``torch.nn.functional.cosine_embedding_loss``.

    Args:
        input1: The first vectors. Shape (N, D), (D,), or any shape that broadcasts with the others, with the features
            in `feature_dim`; floating. Domain: any number.
        input2: The vectors to compare with. Shape (N, D), (D,), or any shape that broadcasts with the others, with the
            features in `feature_dim`; floating. Domain: any number.
        target: The label: +1 for similar pairs, -1 for dissimilar ones. Only its sign matters; the loss is NaN where it
            is 0. The shape of the rows, or one that broadcasts to it; floating, integer or bool. Domain: -1 or +1.
        margin: Cosine up to which a dissimilar pair has loss 0. Must be a number, not NaN. Default 0.0.
        reduction: One of 'none', 'mean', 'sum', 'batchmean', 'weighted_mean'; see Returns. Default 'mean'.
        eps: Added to each squared length; 0 for the exact cosine. Must be a number >= 0. Default 1e-12.
        weight: Factor of each row: a number, or an array that broadcasts to the shape of the rows; differentiable. A
            row of weight 0 contributes nothing to the value and the gradients of the operands, even if it is NaN.
            Default None, no weights.
        mask: Bool array that broadcasts to the shape of the rows, True where a row counts. The others are not read,
            their gradients are 0, and a mean does not count them. Default None, no mask.
        normalizer: Number, or array of one number without a gradient, that replaces the divisor of a mean, such as the
            number of tokens of all accumulated batches. Default None.
        feature_dim: Dimension of the features in the broadcast shape, from either end. Default -1.
        out_dtype: Floating dtype of the result, of torch, of NumPy or by name. Default None, the promoted dtype of the
            operands.
        size_average, reduce: torch's deprecated arguments; they warn and decide the reduction.

    Returns:
        With reduction 'none' one value per row, in the broadcast shape without `feature_dim`; otherwise an array
        without dimensions. 'mean' divides the sum by the number of rows that the mask keeps, 'weighted_mean' by the sum
        of their weights, 'batchmean' by the size of the first dimension of the rows. A mean of nothing is NaN, with
        gradients of 0. Sums over rows and their formula are computed in float64. The result belongs to the library and
        the device of the first operand, and has the promoted dtype of all operands unless `out_dtype` is given.

    Gradient:
        Every floating operand is differentiable. At c = margin a dissimilar pair is active. A vector of zeros has no
        direction: c is 0, with gradient 0 with respect to both vectors. The label has gradient 0. Where the loss of a
        row is NaN, so is the gradient of the whole row.

    Raises:
        TypeError: An operand is not an array, or has a dtype that the loss does not take (floating ones are float16,
            bfloat16, float32 and float64); operands come from several libraries, other than torch and CuPy on a GPU; an
            option has the wrong type.
        ValueError: Shapes do not fit, operands are on different devices, or an option is out of range.
        ImportError: The operands are on a GPU, and CuPy is not installed.
        cupylosses.KernelError: A kernel cannot be compiled or loaded.

    Example:
        >>> import torch
        >>> import cupylosses.functional as F
        >>> input1 = torch.tensor([[1.0, 2.0, 2.0], [0.5, -1.0, 0.0]], requires_grad=True)
        >>> input2 = torch.tensor([[2.0, 0.0, 1.0], [1.0, -2.0, 0.5]])
        >>> target = torch.tensor([1.0, -1.0])
        >>> loss = F.cosine_embedding_loss(input1, input2, target)
        >>> round(loss.item(), 3)
        0.69
        >>> loss.backward()  # input1.grad holds the gradient

    References:
        R. Hadsell, S. Chopra, Y. LeCun, Dimensionality reduction by learning an invariant mapping, CVPR 2006.
    """

def cosine_loss(
    input: _Array,
    target: _Exchangeable,
    eps: float = 1e-08,
    reduction: _Reduction = "mean",
    *,
    weight: _Exchangeable | float | None = None,
    mask: _Exchangeable | None = None,
    normalizer: _Exchangeable | float | None = None,
    feature_dim: int = -1,
    out_dtype: Any = None,
) -> _Array:
    """One minus the cosine of two vectors.

        1 - <input, target> / (max(|input|, eps) max(|target|, eps))

    The cosine is that of `torch.nn.functional.cosine_similarity`, without its values beyond 1. Gradients of vectors
    shorter than `eps` are those of the value, which torch's are not.

    Args:
        input: The predicted vectors. Shape (N, D), (D,), or any shape that broadcasts with the others, with the
            features in `feature_dim`; floating. Domain: any number.
        target: The vectors to point along. Shape (N, D), (D,), or any shape that broadcasts with the others, with the
            features in `feature_dim`; floating. Domain: any number.
        eps: Length that shorter vectors count as; 0 for the exact cosine. Must be a number >= 0. Default 1e-08.
        reduction: One of 'none', 'mean', 'sum', 'batchmean', 'weighted_mean'; see Returns. Default 'mean'.
        weight: Factor of each row: a number, or an array that broadcasts to the shape of the rows; differentiable. A
            row of weight 0 contributes nothing to the value and the gradients of the operands, even if it is NaN.
            Default None, no weights.
        mask: Bool array that broadcasts to the shape of the rows, True where a row counts. The others are not read,
            their gradients are 0, and a mean does not count them. Default None, no mask.
        normalizer: Number, or array of one number without a gradient, that replaces the divisor of a mean, such as the
            number of tokens of all accumulated batches. Default None.
        feature_dim: Dimension of the features in the broadcast shape, from either end. Default -1.
        out_dtype: Floating dtype of the result, of torch, of NumPy or by name. Default None, the promoted dtype of the
            operands.

    Returns:
        With reduction 'none' one value per row, in the broadcast shape without `feature_dim`; otherwise an array
        without dimensions. 'mean' divides the sum by the number of rows that the mask keeps, 'weighted_mean' by the sum
        of their weights, 'batchmean' by the size of the first dimension of the rows. A mean of nothing is NaN, with
        gradients of 0. Sums over rows and their formula are computed in float64. The result belongs to the library and
        the device of the first operand, and has the promoted dtype of all operands unless `out_dtype` is given.

    Gradient:
        Every floating operand is differentiable. A vector of zeros has no direction: the cosine is 0, with gradient 0
        with respect to both vectors. The length of a vector shorter than `eps` is a constant. Where the loss of a row
        is NaN, so is the gradient of the whole row.

    Raises:
        TypeError: An operand is not an array, or has a dtype that the loss does not take (floating ones are float16,
            bfloat16, float32 and float64); operands come from several libraries, other than torch and CuPy on a GPU; an
            option has the wrong type.
        ValueError: Shapes do not fit, operands are on different devices, or an option is out of range.
        ImportError: The operands are on a GPU, and CuPy is not installed.
        cupylosses.KernelError: A kernel cannot be compiled or loaded.

    Example:
        >>> import torch
        >>> import cupylosses.functional as F
        >>> input = torch.tensor([[1.0, 2.0, 2.0], [0.5, -1.0, 0.0]], requires_grad=True)
        >>> target = torch.tensor([[2.0, 0.0, 1.0], [1.0, -2.0, 0.5]])
        >>> loss = F.cosine_loss(input, target)
        >>> round(loss.item(), 3)
        0.214
        >>> loss.backward()  # input.grad holds the gradient

    References:
        J. Bromley et al., Signature verification using a Siamese time delay neural network, NIPS 1993.
    """

def triplet_margin_loss(
    anchor: _Array,
    positive: _Exchangeable,
    negative: _Exchangeable,
    margin: float = 1.0,
    p: float = 2.0,
    eps: float = 1e-06,
    swap: bool = False,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: _Reduction = "mean",
    *,
    weight: _Exchangeable | float | None = None,
    mask: _Exchangeable | None = None,
    normalizer: _Exchangeable | float | None = None,
    feature_dim: int = -1,
    out_dtype: Any = None,
) -> _Array:
    """Triplet margin loss: an anchor should be nearer to a positive than to a negative, by a margin.

        max(0, margin + d(anchor, positive) - d(anchor, negative)), with swap the smaller one of d(anchor, negative) and
        d(positive, negative); d(x, y) = (sum |x - y + eps|^p)^(1/p)

    Distances are computed in float64, and powers do not overflow for any degree. The second derivative of a distance of
    0 is 0, where torch's is NaN.

    Drop-in replacement for ``torch.nn.functional.triplet_margin_loss``.

    Args:
        anchor: The vectors to compare. Shape (N, D), (D,), or any shape that broadcasts with the others, with the
            features in `feature_dim`; floating. Domain: any number.
        positive: Vectors that each anchor should be near to. Shape (N, D), (D,), or any shape that broadcasts with the
            others, with the features in `feature_dim`; floating. Domain: any number.
        negative: Vectors that each anchor should be far from. Shape (N, D), (D,), or any shape that broadcasts with the
            others, with the features in `feature_dim`; floating. Domain: any number.
        margin: Distance by which the negative should be farther away. Must be a number > 0. Default 1.0.
        p: Degree of the distance, > 0: 1 sums absolute differences, 2 is Euclidean, infinity takes the largest
            difference. Must be a number > 0. Default 2.0.
        eps: Added to each difference, as torch does: equal vectors have the distance eps D^(1/p). With 0 it is a
            metric. Must be a number, not NaN. Default 1e-06.
        swap: If True, the distance from the positive to the negative counts where it is the smaller. Default False.
        reduction: One of 'none', 'mean', 'sum', 'batchmean', 'weighted_mean'; see Returns. Default 'mean'.
        weight: Factor of each row: a number, or an array that broadcasts to the shape of the rows; differentiable. A
            row of weight 0 contributes nothing to the value and the gradients of the operands, even if it is NaN.
            Default None, no weights.
        mask: Bool array that broadcasts to the shape of the rows, True where a row counts. The others are not read,
            their gradients are 0, and a mean does not count them. Default None, no mask.
        normalizer: Number, or array of one number without a gradient, that replaces the divisor of a mean, such as the
            number of tokens of all accumulated batches. Default None.
        feature_dim: Dimension of the features in the broadcast shape, from either end. Default -1.
        out_dtype: Floating dtype of the result, of torch, of NumPy or by name. Default None, the promoted dtype of the
            operands.
        size_average, reduce: torch's deprecated arguments; they warn and decide the reduction.

    Returns:
        With reduction 'none' one value per row, in the broadcast shape without `feature_dim`; otherwise an array
        without dimensions. 'mean' divides the sum by the number of rows that the mask keeps, 'weighted_mean' by the sum
        of their weights, 'batchmean' by the size of the first dimension of the rows. A mean of nothing is NaN, with
        gradients of 0. Sums over rows and their formula are computed in float64. The result belongs to the library and
        the device of the first operand, and has the promoted dtype of all operands unless `out_dtype` is given.

    Gradient:
        Every floating operand is differentiable. At a value of 0 on the boundary the row is active. A distance of 0,
        and an infinite one, has gradient 0; of equal distances under `swap`, and of equal largest differences, each has
        its share. Where the loss of a row is NaN, so is the gradient of the whole row.

    Raises:
        TypeError: An operand is not an array, or has a dtype that the loss does not take (floating ones are float16,
            bfloat16, float32 and float64); operands come from several libraries, other than torch and CuPy on a GPU; an
            option has the wrong type.
        ValueError: Shapes do not fit, operands are on different devices, or an option is out of range.
        ImportError: The operands are on a GPU, and CuPy is not installed.
        cupylosses.KernelError: A kernel cannot be compiled or loaded.

    Example:
        >>> import torch
        >>> import cupylosses.functional as F
        >>> anchor = torch.tensor([[1.0, 2.0, 2.0], [0.5, -1.0, 0.0]], requires_grad=True)
        >>> positive = torch.tensor([[2.0, 0.0, 1.0], [1.0, -2.0, 0.5]])
        >>> negative = torch.tensor([[0.0, 1.0, 4.0], [-1.0, 1.0, 1.0]])
        >>> loss = F.triplet_margin_loss(anchor, positive, negative)
        >>> round(loss.item(), 3)
        0.5
        >>> loss.backward()  # anchor.grad holds the gradient

    References:
        V. Balntas et al., Learning local feature descriptors with triplets and shallow convolutional neural networks,
            BMVC 2016.
    """

def triplet_margin_with_distance_loss(
    anchor: _Array,
    positive: _Exchangeable,
    negative: _Exchangeable,
    *,
    margin: float = 1.0,
    swap: bool = False,
    distance_function: Callable[[Any, Any], Any] | None = None,
    reduction: _Reduction = "mean",
    weight: _Exchangeable | float | None = None,
    mask: _Exchangeable | None = None,
    normalizer: _Exchangeable | float | None = None,
    feature_dim: int = -1,
    out_dtype: Any = None,
) -> _Array:
    """Triplet margin loss of any distance: an anchor should be nearer to a positive than to a negative.

        max(0, margin + d(anchor, positive) - d(anchor, negative)), with swap the smaller one of d(anchor, negative) and
        d(positive, negative)

    With a `distance_function` of your own, gradients are those of your function, and the operands of `value_and_grad`
    are the distances, not the vectors.

    Drop-in replacement for ``torch.nn.functional.triplet_margin_with_distance_loss``.

    Args:
        anchor: The vectors to compare. Shape (N, D), (D,), or any shape that broadcasts with the others, with the
            features in `feature_dim`; floating. Domain: any number.
        positive: Vectors that each anchor should be near to. Shape (N, D), (D,), or any shape that broadcasts with the
            others, with the features in `feature_dim`; floating. Domain: any number.
        negative: Vectors that each anchor should be far from. Shape (N, D), (D,), or any shape that broadcasts with the
            others, with the features in `feature_dim`; floating. Domain: any number.
        margin: Distance by which the negative should be farther away. Must be a number > 0. Default 1.0.
        swap: If True, the distance from the positive to the negative counts where it is the smaller. Default False.
        distance_function: Function of two arrays that returns the distance of each pair. Default None, the Euclidean
            distance of torch's `PairwiseDistance`. That, `pairwise_distance` of torch or of this library, a
            `functools.partial` of these with `p` or `eps`, and `cosine_distance` are computed in one pass with the
            loss. Any other is called for each kind of pair, and its results may have any shape.
        reduction: One of 'none', 'mean', 'sum', 'batchmean', 'weighted_mean'; see Returns. Default 'mean'.
        weight: Factor of each row: a number, or an array that broadcasts to the shape of the rows; differentiable. A
            row of weight 0 contributes nothing to the value and the gradients of the operands, even if it is NaN.
            Default None, no weights.
        mask: Bool array that broadcasts to the shape of the rows, True where a row counts. The others are not read,
            their gradients are 0, and a mean does not count them. Default None, no mask.
        normalizer: Number, or array of one number without a gradient, that replaces the divisor of a mean, such as the
            number of tokens of all accumulated batches. Default None.
        feature_dim: Dimension of the features in the broadcast shape, from either end. Default -1.
        out_dtype: Floating dtype of the result, of torch, of NumPy or by name. Default None, the promoted dtype of the
            operands.

    Returns:
        With reduction 'none' one value per row, in the broadcast shape without `feature_dim`; otherwise an array
        without dimensions. 'mean' divides the sum by the number of rows that the mask keeps, 'weighted_mean' by the sum
        of their weights, 'batchmean' by the size of the first dimension of the rows. A mean of nothing is NaN, with
        gradients of 0. Sums over rows and their formula are computed in float64. The result belongs to the library and
        the device of the first operand, and has the promoted dtype of all operands unless `out_dtype` is given.

    Gradient:
        Every floating operand is differentiable. At a value of 0 on the boundary the row is active. A distance of 0,
        and an infinite one, has gradient 0; of equal distances under `swap`, and of equal largest differences, each has
        its share. Where the loss of a row is NaN, so is the gradient of the whole row.

    Raises:
        TypeError: An operand is not an array, or has a dtype that the loss does not take (floating ones are float16,
            bfloat16, float32 and float64); operands come from several libraries, other than torch and CuPy on a GPU; an
            option has the wrong type.
        ValueError: Shapes do not fit, operands are on different devices, or an option is out of range.
        ImportError: The operands are on a GPU, and CuPy is not installed.
        cupylosses.KernelError: A kernel cannot be compiled or loaded.

    Example:
        >>> import torch
        >>> import cupylosses.functional as F
        >>> anchor = torch.tensor([[1.0, 2.0, 2.0], [0.5, -1.0, 0.0]], requires_grad=True)
        >>> positive = torch.tensor([[2.0, 0.0, 1.0], [1.0, -2.0, 0.5]])
        >>> negative = torch.tensor([[0.0, 1.0, 4.0], [-1.0, 1.0, 1.0]])
        >>> loss = F.triplet_margin_with_distance_loss(anchor, positive, negative)
        >>> round(loss.item(), 3)
        0.5
        >>> loss.backward()  # anchor.grad holds the gradient

    References:
        V. Balntas et al., Learning local feature descriptors with triplets and shallow convolutional neural networks,
            BMVC 2016.
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
    """Sigmoid focal loss: binary cross entropy of logits that down-weights well-classified elements.

        -a (1 - p)^gamma log(p), with p = sigmoid(input) and a = alpha where target = 1, and p = 1 - sigmoid(input) and
        a = 1 - alpha where target = 0; a = 1 if alpha < 0

    Equals the loss of torchvision and fvcore: for a target between 0 and 1, a, 1 - p and the cross entropy are each
    interpolated linearly between the two labels. Other targets give NaN. Keras has the same defaults; optax, MONAI and
    kornia use no alpha by default.

    Args:
        input: The predicted logit. Any shape that broadcasts with the other operands; floating. Domain: any number.
        target: The label, 0 or 1, or a probability between them. Any shape that broadcasts with the other operands;
            floating, integer or bool. Domain: [0, 1].
        alpha: Weight of positive examples; negative ones have 1 - alpha. A negative alpha turns the weights off. Must
            be a number <= 1. Default 0.25.
        gamma: Focusing exponent: an element of probability p is weighted by (1 - p)^gamma. 0 gives the cross entropy.
            Must be a number >= 0. Default 2.0.
        reduction: One of 'none', 'mean', 'sum', 'batchmean', 'weighted_mean'; see Returns. Default 'mean'.
        weight: Factor of each element: a number, or an array that broadcasts with the operands; differentiable. An
            element of weight 0 contributes nothing to the value and the gradients of the operands, even if it is NaN.
            Default None, no weights.
        mask: Bool array that broadcasts with the operands, True where an element counts. The others contribute nothing
            to value, gradients and the count of a mean, even if they are NaN. Default None, no mask.
        normalizer: Number, or array of one number without a gradient, that replaces the divisor of a mean, such as the
            number of tokens of all accumulated batches. Default None.
        dim: Dimension of the broadcast shape, or tuple of dimensions, to reduce over with 'mean', 'sum' or
            'weighted_mean'; the others are kept. Default None, all dimensions.
        out_dtype: Floating dtype of the result, of torch, of NumPy or by name. Default None, the promoted dtype of the
            operands.

    Returns:
        With reduction 'none' an array of the broadcast shape. Otherwise an array without dimensions, or with `dim` of
        the dimensions that are kept. 'mean' divides the sum by the number of elements that the mask keeps,
        'weighted_mean' by the sum of their weights, 'batchmean' by the size of the first dimension. A mean of nothing
        is NaN, with gradients of 0. The result belongs to the library and the device of the first operand, and has the
        promoted dtype of all operands unless `out_dtype` is given.

    Gradient:
        Every floating operand is differentiable. An infinite logit of the correct sign has loss 0 and gradient 0. At
        any infinite logit, the gradient with respect to `target` is 0. Where the loss is NaN, so is the gradient.

    Raises:
        TypeError: An operand is not an array, or has a dtype that the loss does not take (floating ones are float16,
            bfloat16, float32 and float64); operands come from several libraries, other than torch and CuPy on a GPU; an
            option has the wrong type.
        ValueError: Shapes do not broadcast, operands are on different devices, or an option is out of range.
        ImportError: The operands are on a GPU, and CuPy is not installed.
        cupylosses.KernelError: A kernel cannot be compiled or loaded.

    Example:
        >>> import torch
        >>> import cupylosses.functional as F
        >>> input = torch.tensor([0.5, -1.25, 2.0], requires_grad=True)
        >>> target = torch.tensor([1.0, 0.0, 1.0])
        >>> loss = F.sigmoid_focal_loss(input, target)
        >>> round(loss.item(), 3)
        0.009
        >>> loss.backward()  # input.grad holds the gradient

    References:
        T.-Y. Lin, P. Goyal, R. Girshick, K. He, P. Dollar, Focal loss for dense object detection, ICCV 2017.
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
    """Asymmetric multi-label loss: focal loss with a stronger focus and a margin for negatives.

        -target (1 - p)^gamma_pos log(p) - (1 - target) q^gamma_neg log(1 - q), with p = sigmoid(input) and q = max(p -
        clip, 0)

    The defaults are those of the authors' code and of timm, which clamp the logarithms at log(1e-8); here they are
    exact. The focusing factors are differentiated, which their code can turn off.

    Args:
        input: The predicted logit. Any shape that broadcasts with the other operands; floating. Domain: any number.
        target: The label, 0 or 1, or a probability between them. Any shape that broadcasts with the other operands;
            floating, integer or bool. Domain: [0, 1].
        gamma_neg: Focusing exponent of negatives, weighted by q^gamma_neg. Must be a number >= 0. Default 4.0.
        gamma_pos: Focusing exponent of positives, weighted by (1 - p)^gamma_pos. Must be a number >= 0. Default 1.0.
        clip: Probability up to which a negative has loss 0. Must be a number >= 0 and <= 1. Default 0.05.
        reduction: One of 'none', 'mean', 'sum', 'batchmean', 'weighted_mean'; see Returns. Default 'mean'.
        weight: Factor of each element: a number, or an array that broadcasts with the operands; differentiable. An
            element of weight 0 contributes nothing to the value and the gradients of the operands, even if it is NaN.
            Default None, no weights.
        mask: Bool array that broadcasts with the operands, True where an element counts. The others contribute nothing
            to value, gradients and the count of a mean, even if they are NaN. Default None, no mask.
        normalizer: Number, or array of one number without a gradient, that replaces the divisor of a mean, such as the
            number of tokens of all accumulated batches. Default None.
        dim: Dimension of the broadcast shape, or tuple of dimensions, to reduce over with 'mean', 'sum' or
            'weighted_mean'; the others are kept. Default None, all dimensions.
        out_dtype: Floating dtype of the result, of torch, of NumPy or by name. Default None, the promoted dtype of the
            operands.

    Returns:
        With reduction 'none' an array of the broadcast shape. Otherwise an array without dimensions, or with `dim` of
        the dimensions that are kept. 'mean' divides the sum by the number of elements that the mask keeps,
        'weighted_mean' by the sum of their weights, 'batchmean' by the size of the first dimension. A mean of nothing
        is NaN, with gradients of 0. The result belongs to the library and the device of the first operand, and has the
        promoted dtype of all operands unless `out_dtype` is given.

    Gradient:
        Every floating operand is differentiable. Where p <= clip, a negative has loss 0 and gradient 0. So has an
        infinite logit of the correct sign. Where the loss is NaN, so is the gradient.

    Raises:
        TypeError: An operand is not an array, or has a dtype that the loss does not take (floating ones are float16,
            bfloat16, float32 and float64); operands come from several libraries, other than torch and CuPy on a GPU; an
            option has the wrong type.
        ValueError: Shapes do not broadcast, operands are on different devices, or an option is out of range.
        ImportError: The operands are on a GPU, and CuPy is not installed.
        cupylosses.KernelError: A kernel cannot be compiled or loaded.

    Example:
        >>> import torch
        >>> import cupylosses.functional as F
        >>> input = torch.tensor([0.5, -1.25, 2.0], requires_grad=True)
        >>> target = torch.tensor([1.0, 0.0, 1.0])
        >>> loss = F.asymmetric_loss(input, target)
        >>> round(loss.item(), 3)
        0.065
        >>> loss.backward()  # input.grad holds the gradient

    References:
        T. Ridnik, E. Ben-Baruch, N. Zamir, A. Noy, I. Friedman, M. Protter, L. Zelnik-Manor, Asymmetric loss for
            multi-label classification, ICCV 2021.
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
    """Poly-1 loss: binary cross entropy of logits plus a multiple of the probability of error.

        -log(p) + epsilon (1 - p), with p = sigmoid(input) where target = 1, and p = 1 - sigmoid(input) where target = 0

    The default is that of optax, whose loss is of softmax probabilities. For a target between 0 and 1, both terms are
    interpolated linearly between the two labels.

    Args:
        input: The predicted logit. Any shape that broadcasts with the other operands; floating. Domain: any number.
        target: The label, 0 or 1, or a probability between them. Any shape that broadcasts with the other operands;
            floating, integer or bool. Domain: [0, 1].
        epsilon: Weight of 1 - p; 0 gives the cross entropy. Must be a number >= -1. Default 2.0.
        reduction: One of 'none', 'mean', 'sum', 'batchmean', 'weighted_mean'; see Returns. Default 'mean'.
        weight: Factor of each element: a number, or an array that broadcasts with the operands; differentiable. An
            element of weight 0 contributes nothing to the value and the gradients of the operands, even if it is NaN.
            Default None, no weights.
        mask: Bool array that broadcasts with the operands, True where an element counts. The others contribute nothing
            to value, gradients and the count of a mean, even if they are NaN. Default None, no mask.
        normalizer: Number, or array of one number without a gradient, that replaces the divisor of a mean, such as the
            number of tokens of all accumulated batches. Default None.
        dim: Dimension of the broadcast shape, or tuple of dimensions, to reduce over with 'mean', 'sum' or
            'weighted_mean'; the others are kept. Default None, all dimensions.
        out_dtype: Floating dtype of the result, of torch, of NumPy or by name. Default None, the promoted dtype of the
            operands.

    Returns:
        With reduction 'none' an array of the broadcast shape. Otherwise an array without dimensions, or with `dim` of
        the dimensions that are kept. 'mean' divides the sum by the number of elements that the mask keeps,
        'weighted_mean' by the sum of their weights, 'batchmean' by the size of the first dimension. A mean of nothing
        is NaN, with gradients of 0. The result belongs to the library and the device of the first operand, and has the
        promoted dtype of all operands unless `out_dtype` is given.

    Gradient:
        Every floating operand is differentiable. An infinite logit of the correct sign has loss 0 and gradient 0. At
        any infinite logit, the gradient with respect to `target` is 0. Where the loss is NaN, so is the gradient.

    Raises:
        TypeError: An operand is not an array, or has a dtype that the loss does not take (floating ones are float16,
            bfloat16, float32 and float64); operands come from several libraries, other than torch and CuPy on a GPU; an
            option has the wrong type.
        ValueError: Shapes do not broadcast, operands are on different devices, or an option is out of range.
        ImportError: The operands are on a GPU, and CuPy is not installed.
        cupylosses.KernelError: A kernel cannot be compiled or loaded.

    Example:
        >>> import torch
        >>> import cupylosses.functional as F
        >>> input = torch.tensor([0.5, -1.25, 2.0], requires_grad=True)
        >>> target = torch.tensor([1.0, 0.0, 1.0])
        >>> loss = F.poly1_loss(input, target)
        >>> round(loss.item(), 3)
        0.764
        >>> loss.backward()  # input.grad holds the gradient

    References:
        Z. Leng, M. Tan, C. Liu, E. D. Cubuk, X. Shi, S. Cheng, D. Anguelov, PolyLoss: a polynomial expansion
            perspective of classification loss functions, ICLR 2022.
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
    """Generalized binary cross entropy of logits, robust to label noise.

        (1 - p^q) / q, with p = sigmoid(input) where target = 1, and p = 1 - sigmoid(input) where target = 0

    For a target between 0 and 1, the loss is interpolated linearly between the two labels, as the cross entropy is;
    Keras, whose loss is of softmax probabilities, takes the power of the mean probability instead. An infinite logit of
    the wrong sign has loss 1 / q.

    Args:
        input: The predicted logit. Any shape that broadcasts with the other operands; floating. Domain: any number.
        target: The label, 0 or 1, or a probability between them. Any shape that broadcasts with the other operands;
            floating, integer or bool. Domain: [0, 1].
        q: Robustness: 0 gives the cross entropy, 1 the absolute error of the probability. Must be a number >= 0 and <=
            1. Default 0.7.
        reduction: One of 'none', 'mean', 'sum', 'batchmean', 'weighted_mean'; see Returns. Default 'mean'.
        weight: Factor of each element: a number, or an array that broadcasts with the operands; differentiable. An
            element of weight 0 contributes nothing to the value and the gradients of the operands, even if it is NaN.
            Default None, no weights.
        mask: Bool array that broadcasts with the operands, True where an element counts. The others contribute nothing
            to value, gradients and the count of a mean, even if they are NaN. Default None, no mask.
        normalizer: Number, or array of one number without a gradient, that replaces the divisor of a mean, such as the
            number of tokens of all accumulated batches. Default None.
        dim: Dimension of the broadcast shape, or tuple of dimensions, to reduce over with 'mean', 'sum' or
            'weighted_mean'; the others are kept. Default None, all dimensions.
        out_dtype: Floating dtype of the result, of torch, of NumPy or by name. Default None, the promoted dtype of the
            operands.

    Returns:
        With reduction 'none' an array of the broadcast shape. Otherwise an array without dimensions, or with `dim` of
        the dimensions that are kept. 'mean' divides the sum by the number of elements that the mask keeps,
        'weighted_mean' by the sum of their weights, 'batchmean' by the size of the first dimension. A mean of nothing
        is NaN, with gradients of 0. The result belongs to the library and the device of the first operand, and has the
        promoted dtype of all operands unless `out_dtype` is given.

    Gradient:
        Every floating operand is differentiable. The loss is differentiable everywhere. Where the loss is NaN, so is
        the gradient.

    Raises:
        TypeError: An operand is not an array, or has a dtype that the loss does not take (floating ones are float16,
            bfloat16, float32 and float64); operands come from several libraries, other than torch and CuPy on a GPU; an
            option has the wrong type.
        ValueError: Shapes do not broadcast, operands are on different devices, or an option is out of range.
        ImportError: The operands are on a GPU, and CuPy is not installed.
        cupylosses.KernelError: A kernel cannot be compiled or loaded.

    Example:
        >>> import torch
        >>> import cupylosses.functional as F
        >>> input = torch.tensor([0.5, -1.25, 2.0], requires_grad=True)
        >>> target = torch.tensor([1.0, 0.0, 1.0])
        >>> loss = F.generalized_cross_entropy(input, target)
        >>> round(loss.item(), 3)
        0.252
        >>> loss.backward()  # input.grad holds the gradient

    References:
        Z. Zhang, M. R. Sabuncu, Generalized cross entropy loss for training deep neural networks with noisy labels,
            NeurIPS 2018.
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
    """Poisson negative log-likelihood of counts, given the rate or its logarithm.

        exp(input) - target input if log_input, else input - target log(input + eps); plus log(target!) if full

    Drop-in replacement for ``torch.nn.functional.poisson_nll_loss``.

    Args:
        input: The logarithm of the rate, or with `log_input=False` the rate; the loss is NaN where a rate is negative.
            Any shape that broadcasts with the other operands; floating. Domain: any number if `log_input` is True, (0,
            inf) if `log_input` is False.
        target: The count; it need not be an integer. Any shape that broadcasts with the other operands; floating,
            integer or bool. Domain: [0, inf) if `full` is False or True, (0, inf) if `full` is 'exact'.
        log_input: If True, `input` is the logarithm of the rate; otherwise it is the rate. Default True.
        full: Adds the term log(target!): if True, Stirling's approximation where target > 1, as in torch; if 'exact',
            the term itself, log Gamma(1 + target). One of False, True, 'exact'. Default False.
        eps: Added to the rate before the logarithm, if `log_input=False`. Must be a number >= 0. Default 1e-08.
        reduction: One of 'none', 'mean', 'sum', 'batchmean', 'weighted_mean'; see Returns. Default 'mean'.
        weight: Factor of each element: a number, or an array that broadcasts with the operands; differentiable. An
            element of weight 0 contributes nothing to the value and the gradients of the operands, even if it is NaN.
            Default None, no weights.
        mask: Bool array that broadcasts with the operands, True where an element counts. The others contribute nothing
            to value, gradients and the count of a mean, even if they are NaN. Default None, no mask.
        normalizer: Number, or array of one number without a gradient, that replaces the divisor of a mean, such as the
            number of tokens of all accumulated batches. Default None.
        dim: Dimension of the broadcast shape, or tuple of dimensions, to reduce over with 'mean', 'sum' or
            'weighted_mean'; the others are kept. Default None, all dimensions.
        out_dtype: Floating dtype of the result, of torch, of NumPy or by name. Default None, the promoted dtype of the
            operands.
        size_average, reduce: torch's deprecated arguments; they warn and decide the reduction.

    Returns:
        With reduction 'none' an array of the broadcast shape. Otherwise an array without dimensions, or with `dim` of
        the dimensions that are kept. 'mean' divides the sum by the number of elements that the mask keeps,
        'weighted_mean' by the sum of their weights, 'batchmean' by the size of the first dimension. A mean of nothing
        is NaN, with gradients of 0. The result belongs to the library and the device of the first operand, and has the
        promoted dtype of all operands unless `out_dtype` is given.

    Gradient:
        Every floating operand is differentiable. Where `target` is 0, target log(rate) is 0 for any rate, with
        derivatives of 0 where the logarithm is infinite. At target = 1 the gradient is that without Stirling's
        approximation. Where the loss is NaN, so is the gradient.

    Raises:
        TypeError: An operand is not an array, or has a dtype that the loss does not take (floating ones are float16,
            bfloat16, float32 and float64); operands come from several libraries, other than torch and CuPy on a GPU; an
            option has the wrong type.
        ValueError: Shapes do not broadcast, operands are on different devices, or an option is out of range.
        ImportError: The operands are on a GPU, and CuPy is not installed.
        cupylosses.KernelError: A kernel cannot be compiled or loaded.

    Example:
        >>> import torch
        >>> import cupylosses.functional as F
        >>> input = torch.tensor([0.5, -1.25, 2.0], requires_grad=True)
        >>> target = torch.tensor([1.0, 0.0, 4.0])
        >>> loss = F.poisson_nll_loss(input, target)
        >>> round(loss.item(), 3)
        0.275
        >>> loss.backward()  # input.grad holds the gradient

    References:
        P. McCullagh, J. A. Nelder, Generalized Linear Models, second edition, 1989.
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
    """Gaussian negative log-likelihood of a target, given mean and variance.

        (log(v) + (input - target)^2 / v) / 2, with v = max(var, eps); plus log(2 pi) / 2 if full

    A negative `var` gives NaN instead of an error, so that the host does not wait for the GPU.

    Drop-in replacement for ``torch.nn.functional.gaussian_nll_loss``.

    Args:
        input: The predicted mean. Any shape that broadcasts with the other operands; floating, integer or bool. Domain:
            any number.
        target: The ground truth. Any shape that broadcasts with the other operands; floating, integer or bool. Domain:
            any number.
        var: The predicted variance; the loss is NaN where it is negative. The shape of `input`, or with 1 for
            dimensions that share a value, or without the last dimension for one value per row; floating, integer or
            bool, or a number. Domain: (0, inf).
        full: If True, adds the constant log(2 pi) / 2. Default False.
        eps: Lower bound of the variance. Must be a number >= 0. Default 1e-06.
        reduction: One of 'none', 'mean', 'sum', 'batchmean', 'weighted_mean'; see Returns. Default 'mean'.
        weight: Factor of each element: a number, or an array that broadcasts with the operands; differentiable. An
            element of weight 0 contributes nothing to the value and the gradients of the operands, even if it is NaN.
            Default None, no weights.
        mask: Bool array that broadcasts with the operands, True where an element counts. The others contribute nothing
            to value, gradients and the count of a mean, even if they are NaN. Default None, no mask.
        normalizer: Number, or array of one number without a gradient, that replaces the divisor of a mean, such as the
            number of tokens of all accumulated batches. Default None.
        dim: Dimension of the broadcast shape, or tuple of dimensions, to reduce over with 'mean', 'sum' or
            'weighted_mean'; the others are kept. Default None, all dimensions.
        out_dtype: Floating dtype of the result, of torch, of NumPy or by name. Default None, the promoted dtype of the
            operands.

    Returns:
        With reduction 'none' an array of the broadcast shape. Otherwise an array without dimensions, or with `dim` of
        the dimensions that are kept. 'mean' divides the sum by the number of elements that the mask keeps,
        'weighted_mean' by the sum of their weights, 'batchmean' by the size of the first dimension. A mean of nothing
        is NaN, with gradients of 0. The result belongs to the library and the device of the first operand, and has the
        promoted dtype of all operands unless `out_dtype` is given.

    Gradient:
        Every floating operand is differentiable. Where var < eps, the gradients are those at v = eps, with respect to
        `var` too, so that it can recover. Where the loss is NaN, so is the gradient.

    Raises:
        TypeError: An operand is not an array, or has a dtype that the loss does not take (floating ones are float16,
            bfloat16, float32 and float64); operands come from several libraries, other than torch and CuPy on a GPU; an
            option has the wrong type.
        ValueError: Shapes do not broadcast, operands are on different devices, or an option is out of range.
        ImportError: The operands are on a GPU, and CuPy is not installed.
        cupylosses.KernelError: A kernel cannot be compiled or loaded.

    Example:
        >>> import torch
        >>> import cupylosses.functional as F
        >>> input = torch.tensor([0.5, -1.25, 2.0], requires_grad=True)
        >>> target = torch.tensor([1.0, -1.0, 0.25])
        >>> var = torch.tensor([1.0, 1.25, 2.5])
        >>> loss = F.gaussian_nll_loss(input, target, var)
        >>> round(loss.item(), 3)
        0.444
        >>> loss.backward()  # input.grad holds the gradient

    References:
        D. A. Nix, A. S. Weigend, Estimating the mean and variance of the target probability distribution, IEEE
            International Conference on Neural Networks, 1994.
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
    """Softmax cross entropy of logits, for class indices or class probabilities.

        (1 - label_smoothing) w_y (poly (1 - p_y) - (1 - p_y)^gamma log p_y) - label_smoothing / C sum_c w_c log p_c +
        z_loss lse^2 for a class index y; -sum_c w_c ((1 - label_smoothing) t_c + label_smoothing / C) log p_c + z_loss
        lse^2 for probabilities t

    with z = logit_scale input, or softcap tanh(logit_scale input / softcap) with a softcap; p = softmax(z); lse = log
    sum_c exp z_c; y the label; t the target probabilities; w_c the class weights, 1 by default; C the number of
    classes.

    The dtype of the target decides: floating ones hold probabilities, integer ones class indices. (In torch, the shape
    decides.) `gamma` and `poly` need class indices.

    Drop-in replacement for ``torch.nn.functional.cross_entropy``.

    Args:
        input: The predicted logits. Shape (N, C), (C,), or any shape with the classes in `class_dim`; floating. Domain:
            any number.
        target: Class indices of any integer dtype, in the shape of `input` without its class dimension, or class
            probabilities, floating and in the shape of `input`.
        weight: Weight w_c of each class, floating, of shape (C,), differentiable for class probabilities only. A
            product with a weight of 0 is 0, even if the other factor is infinite or NaN. Default None, no weights.
        ignore_index: Label of rows that do not count. Their logits are not read, and their gradients are 0. Default
            -100.
        reduction: One of 'none', 'mean', 'sum', 'batchmean'; see Returns. Default 'mean'.
        label_smoothing: Share of the target that is spread evenly over all classes. Must be a number >= 0 and <= 1.
            Default 0.0.
        z_loss: Weight of the z-loss: the square of the log-partition function, lse^2. Must be a number >= 0. Default
            0.0.
        gamma: Focusing exponent: a row of probability p_y is weighted by (1 - p_y)^gamma. Must be a number >= 0.
            Default 0.0.
        poly: Weight of 1 - p_y, by which PolyLoss adjusts the first term of the cross entropy. Must be a number >= -1.
            Default 0.0.
        class_dim: Dimension of the classes, from either end. Default None: 1, or 0 for a single row.
        softcap: Bound of the scaled logits: softcap tanh(logits / softcap) replaces them. A number > 0. Default None,
            no bound.
        logit_scale: Factor of the logits. A finite number > 0. Default 1.0.
        mask: Bool array that broadcasts to the shape of the rows, True where a row counts. The logits of the others are
            not read, their gradients are 0, and a mean does not count them. Default None, no mask.
        normalizer: Number, or array of one number without a gradient, that replaces the divisor of a mean, such as the
            number of tokens of all accumulated batches. Default None.
        out_dtype: Floating dtype of the result, of torch, of NumPy or by name. Default None, the promoted dtype of the
            operands.
        return_lse: If True, the log-partition function lse of each row is returned too, without a gradient. Default
            False.
        return_accuracy: If True, the accuracy is returned too: the share of the rows that count in which no logit is
            larger than the label's. Default False.
        inplace_backward: If True, backward may overwrite the logits with their gradient; they must not be used
            afterwards. Autograd raises if another operation, such as `tanh`, has saved them for its own backward. CPU
            arrays are never overwritten. Default False.
        check_targets: When a label that is neither a class nor `ignore_index` raises: 'sync' at once, which waits for
            the GPU; 'lazy' at the next call after a kernel has found it; 'off' never. The loss is NaN meanwhile, and
            the gradient of the row 0. On CPU arrays 'lazy' is 'sync'. Default 'lazy'.
        size_average, reduce: torch's deprecated arguments; they warn and decide the reduction.

    Returns:
        With reduction 'none' one value per row, in the shape of the rows; otherwise an array without dimensions. 'mean'
        divides the sum by the sum of the weights of the labels of the rows that count (for probabilities, by the number
        of these rows), 'batchmean' by the size of the first dimension of the rows. A mean of nothing is NaN, with
        gradients of 0. The result belongs to the library and the device of the first operand, and has the promoted
        dtype of the operands (float32 under autocast) unless `out_dtype` is given. With `return_lse` or
        `return_accuracy` a named tuple (loss, lse, accuracy), with None for what was not asked for: `lse` has the shape
        of the rows, and is 0 for rows that do not count; `accuracy` is one number.

    Gradient:
        Every floating operand is differentiable. A label of log-probability -inf has an infinite loss with a finite
        gradient. Ignored and masked rows have gradient 0. Where the loss of a row is NaN, so is its gradient.

    Raises:
        TypeError: An operand is not an array, or has a dtype that the loss does not take (floating ones are float16,
            bfloat16, float32 and float64); operands come from several libraries, other than torch and CuPy on a GPU; an
            option has the wrong type.
        ValueError: Shapes do not fit, operands are on different devices, or an option is out of range.
        ImportError: The operands are on a GPU, and CuPy is not installed.
        cupylosses.KernelError: A kernel cannot be compiled or loaded.
        IndexError: A label is neither a class nor `ignore_index`; see `check_targets`.

    Example:
        >>> import torch
        >>> import cupylosses.functional as F
        >>> input = torch.tensor([[2.0, 0.5, -1.0], [0.0, 1.5, 0.5]], requires_grad=True)
        >>> target = torch.tensor([0, 2])
        >>> loss = F.cross_entropy(input, target)
        >>> round(loss.item(), 3)
        0.853
        >>> loss.backward()  # input.grad holds the gradient

    References:
        I. J. Good, Rational decisions, Journal of the Royal Statistical Society B 14, 1952.
        label smoothing: C. Szegedy et al., Rethinking the Inception architecture for computer vision, CVPR 2016.
        gamma: T.-Y. Lin et al., Focal loss for dense object detection, ICCV 2017.
        poly: Z. Leng et al., PolyLoss, ICLR 2022.
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
    """Softmax focal loss: cross entropy of logits that down-weights well-classified rows.

        (1 - label_smoothing) alpha_y (poly (1 - p_y) - (1 - p_y)^gamma log p_y) - label_smoothing / C sum_c alpha_c log
        p_c + z_loss lse^2

    with z = logit_scale input, or softcap tanh(logit_scale input / softcap) with a softcap; p = softmax(z); lse = log
    sum_c exp z_c; y the label; alpha_c the class weights, 1 by default; C the number of classes.

    Unlike that of `cross_entropy`, a mean does not divide by the sum of the weights.

    Args:
        input: The predicted logits. Shape (N, C), (C,), or any shape with the classes in `class_dim`; floating. Domain:
            any number.
        target: Class indices of any integer dtype, in the shape of `input` without its class dimension.
        alpha: Weight alpha_c of each class, floating, of shape (C,), without a gradient. A product with a weight of 0
            is 0, even if the other factor is infinite or NaN. Default None, no weights.
        gamma: Focusing exponent: a row of probability p_y is weighted by (1 - p_y)^gamma. 0 gives the cross entropy.
            Must be a number >= 0. Default 2.0.
        ignore_index: Label of rows that do not count. Their logits are not read, and their gradients are 0. Default
            -100.
        reduction: One of 'none', 'mean', 'sum', 'batchmean'; see Returns. Default 'mean'.
        label_smoothing: Share of the target that is spread evenly over all classes. Must be a number >= 0 and <= 1.
            Default 0.0.
        z_loss: Weight of the z-loss: the square of the log-partition function, lse^2. Must be a number >= 0. Default
            0.0.
        poly: Weight of 1 - p_y, by which PolyLoss adjusts the first term of the cross entropy. Must be a number >= -1.
            Default 0.0.
        class_dim: Dimension of the classes, from either end. Default None: 1, or 0 for a single row.
        softcap: Bound of the scaled logits: softcap tanh(logits / softcap) replaces them. A number > 0. Default None,
            no bound.
        logit_scale: Factor of the logits. A finite number > 0. Default 1.0.
        mask: Bool array that broadcasts to the shape of the rows, True where a row counts. The logits of the others are
            not read, their gradients are 0, and a mean does not count them. Default None, no mask.
        normalizer: Number, or array of one number without a gradient, that replaces the divisor of a mean, such as the
            number of tokens of all accumulated batches. Default None.
        out_dtype: Floating dtype of the result, of torch, of NumPy or by name. Default None, the promoted dtype of the
            operands.
        return_lse: If True, the log-partition function lse of each row is returned too, without a gradient. Default
            False.
        return_accuracy: If True, the accuracy is returned too: the share of the rows that count in which no logit is
            larger than the label's. Default False.
        inplace_backward: If True, backward may overwrite the logits with their gradient; they must not be used
            afterwards. Autograd raises if another operation, such as `tanh`, has saved them for its own backward. CPU
            arrays are never overwritten. Default False.
        check_targets: When a label that is neither a class nor `ignore_index` raises: 'sync' at once, which waits for
            the GPU; 'lazy' at the next call after a kernel has found it; 'off' never. The loss is NaN meanwhile, and
            the gradient of the row 0. On CPU arrays 'lazy' is 'sync'. Default 'lazy'.

    Returns:
        With reduction 'none' one value per row, in the shape of the rows; otherwise an array without dimensions. 'mean'
        divides the sum by the number of rows that count, 'batchmean' by the size of the first dimension of the rows. A
        mean of nothing is NaN, with gradients of 0. The result belongs to the library and the device of the first
        operand, and has the promoted dtype of the operands (float32 under autocast) unless `out_dtype` is given. With
        `return_lse` or `return_accuracy` a named tuple (loss, lse, accuracy), with None for what was not asked for:
        `lse` has the shape of the rows, and is 0 for rows that do not count; `accuracy` is one number.

    Gradient:
        Every floating operand is differentiable. A label of log-probability -inf has an infinite loss with a finite
        gradient. Ignored and masked rows have gradient 0. Where the loss of a row is NaN, so is its gradient.

    Raises:
        TypeError: An operand is not an array, or has a dtype that the loss does not take (floating ones are float16,
            bfloat16, float32 and float64); operands come from several libraries, other than torch and CuPy on a GPU; an
            option has the wrong type.
        ValueError: Shapes do not fit, operands are on different devices, or an option is out of range.
        ImportError: The operands are on a GPU, and CuPy is not installed.
        cupylosses.KernelError: A kernel cannot be compiled or loaded.
        IndexError: A label is neither a class nor `ignore_index`; see `check_targets`.

    Example:
        >>> import torch
        >>> import cupylosses.functional as F
        >>> input = torch.tensor([[2.0, 0.5, -1.0], [0.0, 1.5, 0.5]], requires_grad=True)
        >>> target = torch.tensor([0, 2])
        >>> loss = F.softmax_focal_loss(input, target)
        >>> round(loss.item(), 3)
        0.438
        >>> loss.backward()  # input.grad holds the gradient

    References:
        T.-Y. Lin, P. Goyal, R. Girshick, K. He, P. Dollár, Focal loss for dense object detection, ICCV 2017.
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
    """Negative log-likelihood of class indices, given log-probabilities.

        -w_y input_y

    with y the label; w_c the class weights, 1 by default.

    `cross_entropy` of the logits is faster, since it reads them once, and more accurate for confident predictions.

    Drop-in replacement for ``torch.nn.functional.nll_loss``.

    Args:
        input: The predicted log-probabilities. Shape (N, C), (C,), or any shape with the classes in `class_dim`;
            floating. Domain: [-inf, 0].
        target: Class indices of any integer dtype, in the shape of `input` without its class dimension.
        weight: Weight w_c of each class, floating, of shape (C,), without a gradient. A product with a weight of 0 is
            0, even if the other factor is infinite or NaN. Default None, no weights.
        ignore_index: Label of rows that do not count. Their logits are not read, and their gradients are 0. Default
            -100.
        reduction: One of 'none', 'mean', 'sum', 'batchmean'; see Returns. Default 'mean'.
        class_dim: Dimension of the classes, from either end. Default None: 1, or 0 for a single row.
        mask: Bool array that broadcasts to the shape of the rows, True where a row counts. The logits of the others are
            not read, their gradients are 0, and a mean does not count them. Default None, no mask.
        normalizer: Number, or array of one number without a gradient, that replaces the divisor of a mean, such as the
            number of tokens of all accumulated batches. Default None.
        out_dtype: Floating dtype of the result, of torch, of NumPy or by name. Default None, the promoted dtype of the
            operands.
        check_targets: When a label that is neither a class nor `ignore_index` raises: 'sync' at once, which waits for
            the GPU; 'lazy' at the next call after a kernel has found it; 'off' never. The loss is NaN meanwhile, and
            the gradient of the row 0. On CPU arrays 'lazy' is 'sync'. Default 'lazy'.
        size_average, reduce: torch's deprecated arguments; they warn and decide the reduction.

    Returns:
        With reduction 'none' one value per row, in the shape of the rows; otherwise an array without dimensions. 'mean'
        divides the sum by the sum of the weights of the labels of the rows that count, 'batchmean' by the size of the
        first dimension of the rows. A mean of nothing is NaN, with gradients of 0. The result belongs to the library
        and the device of the first operand, and has the promoted dtype of the operands (float32 under autocast) unless
        `out_dtype` is given.

    Gradient:
        Every floating operand is differentiable. Only the log-probability of the label has a nonzero gradient. Where
        the loss of a row is NaN, so is its gradient.

    Raises:
        TypeError: An operand is not an array, or has a dtype that the loss does not take (floating ones are float16,
            bfloat16, float32 and float64); operands come from several libraries, other than torch and CuPy on a GPU; an
            option has the wrong type.
        ValueError: Shapes do not fit, operands are on different devices, or an option is out of range.
        ImportError: The operands are on a GPU, and CuPy is not installed.
        cupylosses.KernelError: A kernel cannot be compiled or loaded.
        IndexError: A label is neither a class nor `ignore_index`; see `check_targets`.

    Example:
        >>> import torch
        >>> import cupylosses.functional as F
        >>> input = torch.tensor([[-0.3567, -1.6094, -2.3026], [-0.6931, -1.3863, -1.3863]], requires_grad=True)
        >>> target = torch.tensor([0, 2])
        >>> loss = F.nll_loss(input, target)
        >>> round(loss.item(), 3)
        0.872
        >>> loss.backward()  # input.grad holds the gradient

    References:
        R. A. Fisher, On the mathematical foundations of theoretical statistics, Philosophical Transactions of the Royal
            Society A 222, 1922.
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
    """Kullback-Leibler divergence KL(target || softmax(input)), in one pass over the logits.

        sum_c t_c (log t_c - log p_c)

    with z = input / temperature; p = softmax(z); t the target probabilities.

    Equals `kl_div` of the log-softmax, summed over the classes. It is not multiplied by the square of the temperature.

    Args:
        input: The predicted logits. Shape (N, C), (C,), or any shape with the classes in `class_dim`; floating. Domain:
            any number.
        target: The true distribution as probabilities, or as log-probabilities with `log_target=True`; floating, in the
            shape of `input`.
        reduction: One of 'none', 'mean', 'sum', 'batchmean'; see Returns. Default 'batchmean'.
        log_target: If True, `target` holds log-probabilities; otherwise it holds probabilities. Default False.
        class_dim: Dimension of the classes, from either end. Default -1.
        temperature: Divisor of the logits. A finite number > 0. Default 1.0.
        mask: Bool array that broadcasts to the shape of the rows, True where a row counts. The logits of the others are
            not read, their gradients are 0, and a mean does not count them. Default None, no mask.
        normalizer: Number, or array of one number without a gradient, that replaces the divisor of a mean, such as the
            number of tokens of all accumulated batches. Default None.
        out_dtype: Floating dtype of the result, of torch, of NumPy or by name. Default None, the promoted dtype of the
            operands.
        inplace_backward: If True, backward may overwrite the logits with their gradient; they must not be used
            afterwards. Autograd raises if another operation, such as `tanh`, has saved them for its own backward. CPU
            arrays are never overwritten. Default False.

    Returns:
        With reduction 'none' one value per row, in the shape of the rows; otherwise an array without dimensions. 'mean'
        divides the sum by the number of rows that count, 'batchmean' by the size of the first dimension of the rows. A
        mean of nothing is NaN, with gradients of 0. The result belongs to the library and the device of the first
        operand, and has the promoted dtype of the operands (float32 under autocast) unless `out_dtype` is given.

    Gradient:
        Every floating operand is differentiable. Where a target probability is 0, its term and gradients are 0, even if
        the predicted one is 0 too. Where the loss of a row is NaN, so is its gradient.

    Raises:
        TypeError: An operand is not an array, or has a dtype that the loss does not take (floating ones are float16,
            bfloat16, float32 and float64); operands come from several libraries, other than torch and CuPy on a GPU; an
            option has the wrong type.
        ValueError: Shapes do not fit, operands are on different devices, or an option is out of range.
        ImportError: The operands are on a GPU, and CuPy is not installed.
        cupylosses.KernelError: A kernel cannot be compiled or loaded.

    Example:
        >>> import torch
        >>> import cupylosses.functional as F
        >>> input = torch.tensor([[2.0, 0.5, -1.0], [0.0, 1.5, 0.5]], requires_grad=True)
        >>> target = torch.tensor([[0.7, 0.2, 0.1], [0.5, 0.25, 0.25]])
        >>> loss = F.kl_div_with_logits(input, target)
        >>> round(loss.item(), 3)
        0.232
        >>> loss.backward()  # input.grad holds the gradient

    References:
        S. Kullback, R. A. Leibler, On information and sufficiency, Annals of Mathematical Statistics 22, 1951.
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
    """Distillation loss: generalized Jensen-Shannon divergence between the logits of student and teacher.

        beta KL(q || m) + (1 - beta) KL(p || m), with m = beta q + (1 - beta) p; KL(q || p) if beta = 0, and KL(p || q)
        if beta = 1

    with z = student_logits / temperature; p = softmax(z); q = softmax(teacher_logits / temperature).

    No row is negative, and the loss is accurate for a student close to its teacher. As in Liger Kernel, beta = 0 and
    beta = 1 give the Kullback-Leibler divergences instead of the limits, which are 0. The gradient decreases with the
    square of the temperature; multiply the loss by that square to compensate, as G. Hinton et al. do (Distilling the
    knowledge in a neural network, 2015).

    Args:
        student_logits: The logits of the student. Shape (N, C), (C,), or any shape with the classes in `class_dim`;
            floating. Domain: any number.
        teacher_logits: The logits of the teacher, floating, in the shape of `student_logits`; differentiable too.
        temperature: Divisor of the logits. A finite number > 0. Default 1.0.
        beta: Weight of the teacher in the mixture m; 0 gives the forward, 1 the reverse divergence. Must be a number >=
            0 and <= 1. Default 0.0.
        reduction: One of 'none', 'mean', 'sum', 'batchmean'; see Returns. Default 'batchmean'.
        class_dim: Dimension of the classes, from either end. Default -1.
        mask: Bool array that broadcasts to the shape of the rows, True where a row counts. The logits of the others are
            not read, their gradients are 0, and a mean does not count them. Default None, no mask.
        normalizer: Number, or array of one number without a gradient, that replaces the divisor of a mean, such as the
            number of tokens of all accumulated batches. Default None.
        out_dtype: Floating dtype of the result, of torch, of NumPy or by name. Default None, the promoted dtype of the
            operands.
        inplace_backward: If True, backward may overwrite the logits with their gradient; they must not be used
            afterwards. Autograd raises if another operation, such as `tanh`, has saved them for its own backward. CPU
            arrays are never overwritten. Default False.

    Returns:
        With reduction 'none' one value per row, in the shape of the rows; otherwise an array without dimensions. 'mean'
        divides the sum by the number of rows that count, 'batchmean' by the size of the first dimension of the rows. A
        mean of nothing is NaN, with gradients of 0. The result belongs to the library and the device of the first
        operand, and has the promoted dtype of the operands (float32 under autocast) unless `out_dtype` is given.

    Gradient:
        Every floating operand is differentiable. Where p_c or q_c is 0, the gradient with respect to its logit is 0.
        Where the loss of a row is NaN, so is its gradient.

    Raises:
        TypeError: An operand is not an array, or has a dtype that the loss does not take (floating ones are float16,
            bfloat16, float32 and float64); operands come from several libraries, other than torch and CuPy on a GPU; an
            option has the wrong type.
        ValueError: Shapes do not fit, operands are on different devices, or an option is out of range.
        ImportError: The operands are on a GPU, and CuPy is not installed.
        cupylosses.KernelError: A kernel cannot be compiled or loaded.

    Example:
        >>> import torch
        >>> import cupylosses.functional as F
        >>> student_logits = torch.tensor([[2.0, 0.5, -1.0], [0.0, 1.5, 0.5]], requires_grad=True)
        >>> teacher_logits = torch.tensor([[1.0, 1.0, -1.0], [0.5, 1.0, 0.0]])
        >>> loss = F.distillation_loss(student_logits, teacher_logits)
        >>> round(loss.item(), 3)
        0.17
        >>> loss.backward()  # student_logits.grad holds the gradient

    References:
        R. Agarwal et al., On-policy distillation of language models: learning from self-generated mistakes, ICLR 2024.
    """

@overload
def linear_cross_entropy(
    input: _Array,
    linear_weight: _Exchangeable,
    target: _Exchangeable,
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    gamma: float = 0.0,
    poly: float = 0.0,
    linear_bias: _Exchangeable | None = None,
    weight: _Exchangeable | None = None,
    ignore_index: int | None = None,
    reduction: _RowReduction = "mean",
    softcap: float | None = None,
    logit_scale: float = 1.0,
    mask: _Exchangeable | None = None,
    normalizer: _Exchangeable | float | None = None,
    out_dtype: Any = None,
    return_lse: Literal[False] = False,
    return_accuracy: Literal[False] = False,
    check_targets: _Check = "lazy",
    logits_dtype: Any = None,
    accumulate_dtype: Any = None,
    max_memory: int | None = None,
    skip_ignored: bool = False,
    token_weight: _Exchangeable | None = None,
    main_grad: _Exchangeable | None = None,
    options: Any = None,
) -> _Array:
    """Softmax cross entropy of the output of a linear layer, without its logits as a whole.

        cross_entropy(input @ linear_weight.T + linear_bias, target)

    with z = logit_scale input, or softcap tanh(logit_scale input / softcap) with a softcap; p = softmax(z); lse = log
    sum_c exp z_c; y the label; t the target probabilities; w_c the class weights, 1 by default; C the number of
    classes; and the logits input @ linear_weight.T + linear_bias instead of `input`.

    The logits exist in chunks of rows, and their gradient is written over them; backward recomputes nothing unless it
    is called twice or without a reduction. `max_memory` bounds the chunks. Logits of up to 4 MiB and half of
    `max_memory` are kept for backward instead. For large layers of 16 bits whose number of features or classes is not a
    multiple of eight, the weight is copied to sizes that are (and, for such features, its gradient too): products then
    take a half to a quarter of the time.

    Drop-in replacement for ``torch.nn.functional.linear_cross_entropy``.

    Args:
        input: The features, floating, of shape (N, D), (D,) or (..., D).
        linear_weight: The weight of the layer, of shape (C, D), in the dtype of `input`; or (C, d_1, ..., d_K, D), for
            which all logits are computed at once.
        target: Class indices of any integer dtype, in the shape of `input` without its last dimension, or class
            probabilities, floating and in the shape of the logits.
        label_smoothing: Share of the target that is spread evenly over all classes. Must be a number >= 0 and <= 1.
            Default 0.0.
        z_loss: Weight of the z-loss: the square of the log-partition function, lse^2. Must be a number >= 0. Default
            0.0.
        gamma: Focusing exponent: a row of probability p_y is weighted by (1 - p_y)^gamma. Must be a number >= 0.
            Default 0.0.
        poly: Weight of 1 - p_y, by which PolyLoss adjusts the first term of the cross entropy. Must be a number >= -1.
            Default 0.0.
        linear_bias: Bias of the layer, of shape (C,), in the dtype of `input`. Default None, no bias.
        weight: Weight w_c of each class, floating, of shape (C,), differentiable for class probabilities only. A
            product with a weight of 0 is 0, even if the other factor is infinite or NaN. Default None, no weights.
        ignore_index: Label of rows that do not count; None is -100. Their gradients are 0.
        reduction: One of 'none', 'mean', 'sum', 'batchmean'; see Returns. Default 'mean'.
        softcap: Bound of the scaled logits: softcap tanh(logits / softcap) replaces them. A number > 0. Default None,
            no bound.
        logit_scale: Factor of the logits. A finite number > 0. Default 1.0.
        mask: Bool array that broadcasts to the shape of the rows, True where a row counts. The logits of the others are
            not read, their gradients are 0, and a mean does not count them. Default None, no mask.
        normalizer: Number, or array of one number without a gradient, that replaces the divisor of a mean, such as the
            number of tokens of all accumulated batches. Default None.
        out_dtype: Floating dtype of the result, of torch, of NumPy or by name. Default None, the promoted dtype of the
            operands.
        return_lse: If True, the log-partition function lse of each row is returned too, without a gradient. Default
            False.
        return_accuracy: If True, the accuracy is returned too: the share of the rows that count in which no logit is
            larger than the label's. Default False.
        check_targets: When a label that is neither a class nor `ignore_index` raises: 'sync' at once, which waits for
            the GPU; 'lazy' at the next call after a kernel has found it; 'off' never. The loss is NaN meanwhile, and
            the gradient of the row 0. On CPU arrays 'lazy' is 'sync'. Default 'lazy'.
        logits_dtype: Dtype of the logits: None for that of `input`, or 'float32' for logits of half or bfloat16
            operands that are not rounded, which takes twice the memory and a few percent of time. Default None.
        accumulate_dtype: Dtype in which chunks add up the gradient of `linear_weight`: 'float32', which takes a buffer
            of that dtype, or that of the weight, which is rounded once per chunk. Default None: that of the weight for
            up to four chunks, float32 for more.
        max_memory: Bytes that a chunk of logits may take; a chunk has one row at least. Less memory means more chunks,
            and products of fewer than some 2000 rows are slower. With room for all logits, they are kept for backward
            where there is no reduction. Default None: the size of the weight, at least 256 MiB.
        skip_ignored: If True, rows that do not count are left out of the matrix products too. Their number is read by
            the host, which waits for the GPU. Default False.
        token_weight: Weight of each row, floating, which broadcasts to the shape of the rows: a factor of its loss,
            without a gradient of its own. A mean divides by the sum of the weights of the rows that count, times their
            class weights if there are any. Forward then reads the logits of a chunk twice. Default None, weights of 1.
        main_grad: Contiguous tensor in the shape of `linear_weight`, of float32 (float64 for float64 operands), to
            which backward adds the gradient of `linear_weight`, not rounded to 16 bits; `linear_weight.grad` stays as
            it is. A buffer of that size, in `accumulate_dtype` or that of `main_grad`, holds the gradient from forward
            to backward, which takes one pass over both. DistributedDataParallel does not reduce it: leave the weight
            out with `_set_params_and_buffers_to_ignore_for_model`, and reduce `main_grad` after backward. For eager
            backward of torch only. Default None.
        options: Accepted for torch's signature. Its chunking is replaced by that of `max_memory`.

    Returns:
        With reduction 'none' one value per row, in the shape of the rows; otherwise an array without dimensions. 'mean'
        divides the sum by the sum of the weights of the labels of the rows that count (for probabilities, by the number
        of these rows), 'batchmean' by the size of the first dimension of the rows. A mean of nothing is NaN, with
        gradients of 0. The result belongs to the library and the device of the first operand, and has the promoted
        dtype of the operands (float32 under autocast) unless `out_dtype` is given. With `return_lse` or
        `return_accuracy` a named tuple (loss, lse, accuracy), with None for what was not asked for: `lse` has the shape
        of the rows, and is 0 for rows that do not count; `accuracy` is one number.

    Gradient:
        `input`, `linear_weight`, `linear_bias` and class probabilities are differentiable; a product of matrices is
        computed only for those that require a gradient. A label of log-probability -inf has an infinite loss with a
        finite gradient. Ignored and masked rows have gradient 0. Where the loss of a row is NaN, so is its gradient.

    Raises:
        TypeError: An operand is not an array, or has a dtype that the loss does not take (floating ones are float16,
            bfloat16, float32 and float64); operands come from several libraries, other than torch and CuPy on a GPU; an
            option has the wrong type.
        ValueError: Shapes do not fit, operands are on different devices, or an option is out of range.
        ImportError: The operands are on a GPU, and CuPy is not installed.
        cupylosses.KernelError: A kernel cannot be compiled or loaded.
        IndexError: A label is neither a class nor `ignore_index`; see `check_targets`.

    Example:
        >>> import torch
        >>> import cupylosses.functional as F
        >>> input = torch.tensor([[1.0, 0.5], [0.0, -1.0]], requires_grad=True)
        >>> linear_weight = torch.tensor([[2.0, 0.0], [0.5, 1.0], [-1.0, 0.5]])
        >>> target = torch.tensor([0, 2])
        >>> loss = F.linear_cross_entropy(input, linear_weight, target)
        >>> round(loss.item(), 3)
        0.77
        >>> loss.backward()  # input.grad holds the gradient

    References:
        E. Wijmans et al., Cut your losses in large-vocabulary language models, ICLR 2025.
    """

@overload
def linear_cross_entropy(
    input: _Array,
    linear_weight: _Exchangeable,
    target: _Exchangeable,
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    gamma: float = 0.0,
    poly: float = 0.0,
    linear_bias: _Exchangeable | None = None,
    weight: _Exchangeable | None = None,
    ignore_index: int | None = None,
    reduction: _RowReduction = "mean",
    softcap: float | None = None,
    logit_scale: float = 1.0,
    mask: _Exchangeable | None = None,
    normalizer: _Exchangeable | float | None = None,
    out_dtype: Any = None,
    return_lse: Literal[True],
    return_accuracy: bool = False,
    check_targets: _Check = "lazy",
    logits_dtype: Any = None,
    accumulate_dtype: Any = None,
    max_memory: int | None = None,
    skip_ignored: bool = False,
    token_weight: _Exchangeable | None = None,
    main_grad: _Exchangeable | None = None,
    options: Any = None,
) -> RowResult: ...
@overload
def linear_cross_entropy(
    input: _Array,
    linear_weight: _Exchangeable,
    target: _Exchangeable,
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    gamma: float = 0.0,
    poly: float = 0.0,
    linear_bias: _Exchangeable | None = None,
    weight: _Exchangeable | None = None,
    ignore_index: int | None = None,
    reduction: _RowReduction = "mean",
    softcap: float | None = None,
    logit_scale: float = 1.0,
    mask: _Exchangeable | None = None,
    normalizer: _Exchangeable | float | None = None,
    out_dtype: Any = None,
    return_lse: bool = False,
    return_accuracy: Literal[True],
    check_targets: _Check = "lazy",
    logits_dtype: Any = None,
    accumulate_dtype: Any = None,
    max_memory: int | None = None,
    skip_ignored: bool = False,
    token_weight: _Exchangeable | None = None,
    main_grad: _Exchangeable | None = None,
    options: Any = None,
) -> RowResult: ...
@overload
def linear_cross_entropy(
    input: _Array,
    linear_weight: _Exchangeable,
    target: _Exchangeable,
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    gamma: float = 0.0,
    poly: float = 0.0,
    linear_bias: _Exchangeable | None = None,
    weight: _Exchangeable | None = None,
    ignore_index: int | None = None,
    reduction: _RowReduction = "mean",
    softcap: float | None = None,
    logit_scale: float = 1.0,
    mask: _Exchangeable | None = None,
    normalizer: _Exchangeable | float | None = None,
    out_dtype: Any = None,
    return_lse: bool = False,
    return_accuracy: bool = False,
    check_targets: _Check = "lazy",
    logits_dtype: Any = None,
    accumulate_dtype: Any = None,
    max_memory: int | None = None,
    skip_ignored: bool = False,
    token_weight: _Exchangeable | None = None,
    main_grad: _Exchangeable | None = None,
    options: Any = None,
) -> _Array | RowResult: ...
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
    """Hinge loss of a binary classifier, for labels -1 and +1.

        max(0, margin - input target)

    A target of shape (D,) broadcasts along the rows of an input of shape (N, D), as in NumPy and torch. For one target
    per row, pass `target[:, None]`.

    Args:
        input: The predicted score. Any shape that broadcasts with the other operands; floating. Domain: any number.
        target: The label; other numbers scale the score. Any shape that broadcasts with the other operands; floating,
            integer or bool. Domain: -1 or +1.
        margin: Product of score and label from which an element has loss 0. Must be a number, not NaN. Default 1.0.
        reduction: One of 'none', 'mean', 'sum', 'batchmean', 'weighted_mean'; see Returns. Default 'mean'.
        weight: Factor of each element: a number, or an array that broadcasts with the operands; differentiable. An
            element of weight 0 contributes nothing to the value and the gradients of the operands, even if it is NaN.
            Default None, no weights.
        mask: Bool array that broadcasts with the operands, True where an element counts. The others contribute nothing
            to value, gradients and the count of a mean, even if they are NaN. Default None, no mask.
        normalizer: Number, or array of one number without a gradient, that replaces the divisor of a mean, such as the
            number of tokens of all accumulated batches. Default None.
        dim: Dimension of the broadcast shape, or tuple of dimensions, to reduce over with 'mean', 'sum' or
            'weighted_mean'; the others are kept. Default None, all dimensions.
        out_dtype: Floating dtype of the result, of torch, of NumPy or by name. Default None, the promoted dtype of the
            operands.

    Returns:
        With reduction 'none' an array of the broadcast shape. Otherwise an array without dimensions, or with `dim` of
        the dimensions that are kept. 'mean' divides the sum by the number of elements that the mask keeps,
        'weighted_mean' by the sum of their weights, 'batchmean' by the size of the first dimension. A mean of nothing
        is NaN, with gradients of 0. The result belongs to the library and the device of the first operand, and has the
        promoted dtype of all operands unless `out_dtype` is given.

    Gradient:
        Every floating operand is differentiable. At input target = margin the element is active: the gradient is
        (-target, -input). Where the loss is NaN, so is the gradient.

    Raises:
        TypeError: An operand is not an array, or has a dtype that the loss does not take (floating ones are float16,
            bfloat16, float32 and float64); operands come from several libraries, other than torch and CuPy on a GPU; an
            option has the wrong type.
        ValueError: Shapes do not broadcast, operands are on different devices, or an option is out of range.
        ImportError: The operands are on a GPU, and CuPy is not installed.
        cupylosses.KernelError: A kernel cannot be compiled or loaded.

    Example:
        >>> import torch
        >>> import cupylosses.functional as F
        >>> input = torch.tensor([0.5, -1.25, 2.0], requires_grad=True)
        >>> target = torch.tensor([1.0, -1.0, -1.0])
        >>> loss = F.hinge_loss(input, target)
        >>> round(loss.item(), 3)
        1.167
        >>> loss.backward()  # input.grad holds the gradient

    References:
        C. Cortes, V. Vapnik, Support-vector networks, Machine Learning 20, 1995.
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
    """Hinge embedding loss: the distance of similar pairs, and the hinge of that of dissimilar pairs.

        input where target > 0, max(0, margin - input) where target < 0

    Drop-in replacement for ``torch.nn.functional.hinge_embedding_loss``.

    Args:
        input: The distance of a pair. Any shape that broadcasts with the other operands; floating. Domain: any number.
        target: The label: +1 for similar pairs, -1 for dissimilar ones. Only its sign matters; the loss is NaN where it
            is 0. Any shape that broadcasts with the other operands; floating, integer or bool. Domain: -1 or +1.
        margin: Distance from which a dissimilar pair has loss 0. Must be a number, not NaN. Default 1.0.
        reduction: One of 'none', 'mean', 'sum', 'batchmean', 'weighted_mean'; see Returns. Default 'mean'.
        weight: Factor of each element: a number, or an array that broadcasts with the operands; differentiable. An
            element of weight 0 contributes nothing to the value and the gradients of the operands, even if it is NaN.
            Default None, no weights.
        mask: Bool array that broadcasts with the operands, True where an element counts. The others contribute nothing
            to value, gradients and the count of a mean, even if they are NaN. Default None, no mask.
        normalizer: Number, or array of one number without a gradient, that replaces the divisor of a mean, such as the
            number of tokens of all accumulated batches. Default None.
        dim: Dimension of the broadcast shape, or tuple of dimensions, to reduce over with 'mean', 'sum' or
            'weighted_mean'; the others are kept. Default None, all dimensions.
        out_dtype: Floating dtype of the result, of torch, of NumPy or by name. Default None, the promoted dtype of the
            operands.
        size_average, reduce: torch's deprecated arguments; they warn and decide the reduction.

    Returns:
        With reduction 'none' an array of the broadcast shape. Otherwise an array without dimensions, or with `dim` of
        the dimensions that are kept. 'mean' divides the sum by the number of elements that the mask keeps,
        'weighted_mean' by the sum of their weights, 'batchmean' by the size of the first dimension. A mean of nothing
        is NaN, with gradients of 0. The result belongs to the library and the device of the first operand, and has the
        promoted dtype of all operands unless `out_dtype` is given.

    Gradient:
        Every floating operand is differentiable. At input = margin a dissimilar pair is active, with gradient -1. The
        label has gradient 0. Where the loss is NaN, so is the gradient.

    Raises:
        TypeError: An operand is not an array, or has a dtype that the loss does not take (floating ones are float16,
            bfloat16, float32 and float64); operands come from several libraries, other than torch and CuPy on a GPU; an
            option has the wrong type.
        ValueError: Shapes do not broadcast, operands are on different devices, or an option is out of range.
        ImportError: The operands are on a GPU, and CuPy is not installed.
        cupylosses.KernelError: A kernel cannot be compiled or loaded.

    Example:
        >>> import torch
        >>> import cupylosses.functional as F
        >>> input = torch.tensor([0.5, -1.25, 2.0], requires_grad=True)
        >>> target = torch.tensor([1.0, -1.0, -1.0])
        >>> loss = F.hinge_embedding_loss(input, target)
        >>> round(loss.item(), 3)
        0.917
        >>> loss.backward()  # input.grad holds the gradient

    References:
        R. Hadsell, S. Chopra, Y. LeCun, Dimensionality reduction by learning an invariant mapping, CVPR 2006.
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
    """Margin ranking loss: hinge loss of the difference of two scores.

        max(0, margin - target (input1 - input2))

    Drop-in replacement for ``torch.nn.functional.margin_ranking_loss``.

    Args:
        input1: The score of the first item. Any shape that broadcasts with the other operands; floating. Domain: any
            number.
        input2: The score of the second item. Any shape that broadcasts with the other operands; floating. Domain: any
            number.
        target: +1 where the first item should have the higher score, -1 where the second; other numbers scale the
            difference. Any shape that broadcasts with the other operands; floating, integer or bool. Domain: -1 or +1.
        margin: Difference of the scores from which a pair has loss 0. Must be a number, not NaN. Default 0.0.
        reduction: One of 'none', 'mean', 'sum', 'batchmean', 'weighted_mean'; see Returns. Default 'mean'.
        weight: Factor of each element: a number, or an array that broadcasts with the operands; differentiable. An
            element of weight 0 contributes nothing to the value and the gradients of the operands, even if it is NaN.
            Default None, no weights.
        mask: Bool array that broadcasts with the operands, True where an element counts. The others contribute nothing
            to value, gradients and the count of a mean, even if they are NaN. Default None, no mask.
        normalizer: Number, or array of one number without a gradient, that replaces the divisor of a mean, such as the
            number of tokens of all accumulated batches. Default None.
        dim: Dimension of the broadcast shape, or tuple of dimensions, to reduce over with 'mean', 'sum' or
            'weighted_mean'; the others are kept. Default None, all dimensions.
        out_dtype: Floating dtype of the result, of torch, of NumPy or by name. Default None, the promoted dtype of the
            operands.
        size_average, reduce: torch's deprecated arguments; they warn and decide the reduction.

    Returns:
        With reduction 'none' an array of the broadcast shape. Otherwise an array without dimensions, or with `dim` of
        the dimensions that are kept. 'mean' divides the sum by the number of elements that the mask keeps,
        'weighted_mean' by the sum of their weights, 'batchmean' by the size of the first dimension. A mean of nothing
        is NaN, with gradients of 0. The result belongs to the library and the device of the first operand, and has the
        promoted dtype of all operands unless `out_dtype` is given.

    Gradient:
        Every floating operand is differentiable. At target (input1 - input2) = margin the pair is active: the gradient
        is (-target, target, input2 - input1). Where the loss is NaN, so is the gradient.

    Raises:
        TypeError: An operand is not an array, or has a dtype that the loss does not take (floating ones are float16,
            bfloat16, float32 and float64); operands come from several libraries, other than torch and CuPy on a GPU; an
            option has the wrong type.
        ValueError: Shapes do not broadcast, operands are on different devices, or an option is out of range.
        ImportError: The operands are on a GPU, and CuPy is not installed.
        cupylosses.KernelError: A kernel cannot be compiled or loaded.

    Example:
        >>> import torch
        >>> import cupylosses.functional as F
        >>> input1 = torch.tensor([0.5, -1.25, 2.0], requires_grad=True)
        >>> input2 = torch.tensor([1.0, -1.0, 0.25])
        >>> target = torch.tensor([1.0, -1.0, -1.0])
        >>> loss = F.margin_ranking_loss(input1, input2, target)
        >>> round(loss.item(), 3)
        0.75
        >>> loss.backward()  # input1.grad holds the gradient

    References:
        R. Herbrich, T. Graepel, K. Obermayer, Large margin rank boundaries for ordinal regression, Advances in Large
            Margin Classifiers, 2000.
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
    """Squared hinge loss of a binary classifier, for labels -1 and +1.

        max(0, margin - input target)^2

    Keras converts labels 0 to -1; here, a label of 0 is used as it is.

    Args:
        input: The predicted score. Any shape that broadcasts with the other operands; floating. Domain: any number.
        target: The label; other numbers scale the score. Any shape that broadcasts with the other operands; floating,
            integer or bool. Domain: -1 or +1.
        margin: Product of score and label from which an element has loss 0. Must be a number, not NaN. Default 1.0.
        reduction: One of 'none', 'mean', 'sum', 'batchmean', 'weighted_mean'; see Returns. Default 'mean'.
        weight: Factor of each element: a number, or an array that broadcasts with the operands; differentiable. An
            element of weight 0 contributes nothing to the value and the gradients of the operands, even if it is NaN.
            Default None, no weights.
        mask: Bool array that broadcasts with the operands, True where an element counts. The others contribute nothing
            to value, gradients and the count of a mean, even if they are NaN. Default None, no mask.
        normalizer: Number, or array of one number without a gradient, that replaces the divisor of a mean, such as the
            number of tokens of all accumulated batches. Default None.
        dim: Dimension of the broadcast shape, or tuple of dimensions, to reduce over with 'mean', 'sum' or
            'weighted_mean'; the others are kept. Default None, all dimensions.
        out_dtype: Floating dtype of the result, of torch, of NumPy or by name. Default None, the promoted dtype of the
            operands.

    Returns:
        With reduction 'none' an array of the broadcast shape. Otherwise an array without dimensions, or with `dim` of
        the dimensions that are kept. 'mean' divides the sum by the number of elements that the mask keeps,
        'weighted_mean' by the sum of their weights, 'batchmean' by the size of the first dimension. A mean of nothing
        is NaN, with gradients of 0. The result belongs to the library and the device of the first operand, and has the
        promoted dtype of all operands unless `out_dtype` is given.

    Gradient:
        Every floating operand is differentiable. The loss is differentiable everywhere. Where the loss is NaN, so is
        the gradient.

    Raises:
        TypeError: An operand is not an array, or has a dtype that the loss does not take (floating ones are float16,
            bfloat16, float32 and float64); operands come from several libraries, other than torch and CuPy on a GPU; an
            option has the wrong type.
        ValueError: Shapes do not broadcast, operands are on different devices, or an option is out of range.
        ImportError: The operands are on a GPU, and CuPy is not installed.
        cupylosses.KernelError: A kernel cannot be compiled or loaded.

    Example:
        >>> import torch
        >>> import cupylosses.functional as F
        >>> input = torch.tensor([0.5, -1.25, 2.0], requires_grad=True)
        >>> target = torch.tensor([1.0, -1.0, -1.0])
        >>> loss = F.squared_hinge_loss(input, target)
        >>> round(loss.item(), 3)
        3.083
        >>> loss.backward()  # input.grad holds the gradient

    References:
        C. Cortes, V. Vapnik, Support-vector networks, Machine Learning 20, 1995.
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
    """Logistic loss of a score, for labels -1 and +1.

        log(1 + exp(-input target))

    Equals `soft_margin_loss` except at a label of 0, where that is NaN and this is log(2). For labels 0 and 1, use
    `binary_cross_entropy_with_logits`.

    Args:
        input: The predicted score: the logit of label +1. Any shape that broadcasts with the other operands; floating.
            Domain: any number.
        target: The label; other numbers scale the score. Any shape that broadcasts with the other operands; floating,
            integer or bool. Domain: -1 or +1.
        reduction: One of 'none', 'mean', 'sum', 'batchmean', 'weighted_mean'; see Returns. Default 'mean'.
        weight: Factor of each element: a number, or an array that broadcasts with the operands; differentiable. An
            element of weight 0 contributes nothing to the value and the gradients of the operands, even if it is NaN.
            Default None, no weights.
        mask: Bool array that broadcasts with the operands, True where an element counts. The others contribute nothing
            to value, gradients and the count of a mean, even if they are NaN. Default None, no mask.
        normalizer: Number, or array of one number without a gradient, that replaces the divisor of a mean, such as the
            number of tokens of all accumulated batches. Default None.
        dim: Dimension of the broadcast shape, or tuple of dimensions, to reduce over with 'mean', 'sum' or
            'weighted_mean'; the others are kept. Default None, all dimensions.
        out_dtype: Floating dtype of the result, of torch, of NumPy or by name. Default None, the promoted dtype of the
            operands.

    Returns:
        With reduction 'none' an array of the broadcast shape. Otherwise an array without dimensions, or with `dim` of
        the dimensions that are kept. 'mean' divides the sum by the number of elements that the mask keeps,
        'weighted_mean' by the sum of their weights, 'batchmean' by the size of the first dimension. A mean of nothing
        is NaN, with gradients of 0. The result belongs to the library and the device of the first operand, and has the
        promoted dtype of all operands unless `out_dtype` is given.

    Gradient:
        Every floating operand is differentiable. An infinite score of the correct sign has loss 0 and gradient 0. Where
        the loss is NaN, so is the gradient.

    Raises:
        TypeError: An operand is not an array, or has a dtype that the loss does not take (floating ones are float16,
            bfloat16, float32 and float64); operands come from several libraries, other than torch and CuPy on a GPU; an
            option has the wrong type.
        ValueError: Shapes do not broadcast, operands are on different devices, or an option is out of range.
        ImportError: The operands are on a GPU, and CuPy is not installed.
        cupylosses.KernelError: A kernel cannot be compiled or loaded.

    Example:
        >>> import torch
        >>> import cupylosses.functional as F
        >>> input = torch.tensor([0.5, -1.25, 2.0], requires_grad=True)
        >>> target = torch.tensor([1.0, -1.0, -1.0])
        >>> loss = F.logistic_loss(input, target)
        >>> round(loss.item(), 3)
        0.951
        >>> loss.backward()  # input.grad holds the gradient

    References:
        D. R. Cox, The regression analysis of binary sequences, Journal of the Royal Statistical Society B 20, 1958.
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
    """Exponential loss of a score, for labels -1 and +1, as in AdaBoost.

        exp(-input target)

    Args:
        input: The predicted score. Any shape that broadcasts with the other operands; floating. Domain: any number.
        target: The label; other numbers scale the score. Any shape that broadcasts with the other operands; floating,
            integer or bool. Domain: -1 or +1.
        reduction: One of 'none', 'mean', 'sum', 'batchmean', 'weighted_mean'; see Returns. Default 'mean'.
        weight: Factor of each element: a number, or an array that broadcasts with the operands; differentiable. An
            element of weight 0 contributes nothing to the value and the gradients of the operands, even if it is NaN.
            Default None, no weights.
        mask: Bool array that broadcasts with the operands, True where an element counts. The others contribute nothing
            to value, gradients and the count of a mean, even if they are NaN. Default None, no mask.
        normalizer: Number, or array of one number without a gradient, that replaces the divisor of a mean, such as the
            number of tokens of all accumulated batches. Default None.
        dim: Dimension of the broadcast shape, or tuple of dimensions, to reduce over with 'mean', 'sum' or
            'weighted_mean'; the others are kept. Default None, all dimensions.
        out_dtype: Floating dtype of the result, of torch, of NumPy or by name. Default None, the promoted dtype of the
            operands.

    Returns:
        With reduction 'none' an array of the broadcast shape. Otherwise an array without dimensions, or with `dim` of
        the dimensions that are kept. 'mean' divides the sum by the number of elements that the mask keeps,
        'weighted_mean' by the sum of their weights, 'batchmean' by the size of the first dimension. A mean of nothing
        is NaN, with gradients of 0. The result belongs to the library and the device of the first operand, and has the
        promoted dtype of all operands unless `out_dtype` is given.

    Gradient:
        Every floating operand is differentiable. An infinite score of the correct sign has loss 0 and gradient 0. Where
        the loss is NaN, so is the gradient.

    Raises:
        TypeError: An operand is not an array, or has a dtype that the loss does not take (floating ones are float16,
            bfloat16, float32 and float64); operands come from several libraries, other than torch and CuPy on a GPU; an
            option has the wrong type.
        ValueError: Shapes do not broadcast, operands are on different devices, or an option is out of range.
        ImportError: The operands are on a GPU, and CuPy is not installed.
        cupylosses.KernelError: A kernel cannot be compiled or loaded.

    Example:
        >>> import torch
        >>> import cupylosses.functional as F
        >>> input = torch.tensor([0.5, -1.25, 2.0], requires_grad=True)
        >>> target = torch.tensor([1.0, -1.0, -1.0])
        >>> loss = F.exponential_loss(input, target)
        >>> round(loss.item(), 3)
        2.761
        >>> loss.backward()  # input.grad holds the gradient

    References:
        Y. Freund, R. E. Schapire, A decision-theoretic generalization of on-line learning and an application to
            boosting, Journal of Computer and System Sciences 55, 1997.
    """

def dice_loss(
    input: _Array,
    target: _Exchangeable,
    *,
    smooth_nr: float | None = None,
    smooth_dr: float | None = None,
    floor: float | None = None,
    gamma: float = 1.0,
    log_floor: float = 1e-07,
    offset: float | None = None,
    activation: Literal["softmax", "sigmoid", "none"] | None = None,
    pool: Literal["none", "batch", "class", "both"] | tuple[str, ...] | None = None,
    overlap: Literal["product", "min", "squared"] | None = None,
    gamma_over: Literal["group", "mean"] = "group",
    log_loss: bool = False,
    absent: Literal["skip", "zero", "keep"] | None = None,
    weight_in: Literal["loss", "score"] | None = None,
    weighting: Literal["uniform", "simple", "square"] = "uniform",
    mean_of_weights: bool | None = None,
    average: Literal["groups", "samples"] | None = None,
    include_background: bool | None = None,
    empty: float | None = None,
    class_weight: _Exchangeable | None = None,
    ignore_index: int = -100,
    class_dim: int = 1,
    mask: _Exchangeable | None = None,
    preset: str | None = None,
    reduction: Literal["none", "mean", "sum"] = "mean",
    normalizer: _Exchangeable | float | None = None,
    out_dtype: Any = None,
    check_targets: _Check = "lazy",
) -> _Array:
    """Dice loss: one minus the Dice coefficient of predicted and true regions.

        1 - (I + smooth_nr) / max(I + FP / 2 + FN / 2 + smooth_dr, floor), averaged over the regions of samples and
        classes

    with p = softmax(input), sigmoid(input) or input; t = [target = c], or a target per class; I = sum p t, FP = sum p
    (1 - t), FN = sum (1 - p) t over the voxels of a group that count.

    I + FP / 2 + FN / 2 is half of sum p + sum t. Nearly perfect predictions keep their digits, since I, FP and FN are
    summed apart. The presets are those of MONAI 1.6, segmentation_models_pytorch 0.6 (smp), nnU-Net 2.8, kornia 0.9 and
    Keras 3.16. Unlike these libraries, voxels that do not count are never used, whatever they hold.

    Args:
        input: The predicted logits, or probabilities with activation='none'. Shape (N, C, ...), any number of
            dimensions, with the classes in `class_dim`; floating.
        target: Labels of any integer dtype, in the shape of `input` without its class dimension or with one of size 1,
            which are read in their own width; or a value per class, floating (differentiable) or integer, in the shape
            of `input`. With one class it has a value per voxel, 0 or 1.
        smooth_nr: Added to the numerator of the score S. A constant that a library adds to 2 I is twice this one. Must
            be a number >= 0. Default None: what `preset` sets, or 0.0.
        smooth_dr: Added to the denominator of S. A constant that a library adds to sum p + sum t is twice this one.
            Must be a number >= 0. Default None: what `preset` sets, or 0.0.
        floor: Lower bound of the denominator. Below it the denominator is a constant, with derivatives 0. Must be a
            number >= 0. Default None: what `preset` sets, or 0.0.
        gamma: Exponent of the loss. Below 1 it makes regions that overlap well count more, and at a loss of 0 its
            gradient is 0. Must be a number > 0. Default 1.0.
        log_floor: Lower bound of S under the logarithm of `log_loss`, below which the gradient is 0. Must be a number >
            0. Default 1e-07.
        offset: Number that S is subtracted from: 1, or 0 for the loss -S. Must be a number, not NaN. Default None: what
            `preset` sets, or 1.0.
        activation: Function of `input` that gives probabilities; 'none' if it holds them already. One of 'softmax',
            'sigmoid', 'none'. Default None: what `preset` sets, or 'softmax'.
        pool: Cells whose overlap is summed before the score is taken: 'none' has a group per sample and class, 'batch'
            one per class over all samples, 'class' one per sample over all classes, 'both' a single one. One of 'none',
            'batch', 'class', 'both'. Default None: what `preset` sets, or 'none'.
        overlap: Overlap of p and t. 'product': I = sum p t, FP = sum p (1 - t), FN = sum (1 - p) t. 'min': I = sum
            min(p, t), FP = sum max(p - t, 0), FN = sum max(t - p, 0), which is 0 loss for soft targets that are met;
            equal ones share the derivative. 'squared': FP = sum p (p - t), FN = sum t (t - p), so that dice has (sum
            p^2 + sum t^2) / 2 for denominator. One of 'product', 'min', 'squared'. Default None: what `preset` sets, or
            'product'.
        gamma_over: Base of the exponent `gamma`: the loss of each 'group', or their 'mean'. One of 'group', 'mean'.
            Default 'group'.
        log_loss: If True, the loss of a group is -log max(S, log_floor) instead of offset - S. Default False.
        absent: Groups without a true voxel. 'skip': neither in the sum nor in its divisor. 'zero': their loss is 0, and
            counts. 'keep': the formula, in which smoothing decides. One of 'skip', 'zero', 'keep'. Default None: what
            `preset` sets, or 'skip'.
        weight_in: Place of `class_weight`: the 'loss' of a class's group; or the 'score', in which I, FP and FN of each
            class are multiplied before classes are pooled. One of 'loss', 'score'. Default None: what `preset` sets, or
            'loss'.
        weighting: Weights of classes that are pooled, by the number T of true voxels: 'square' 1 / T^2, 'simple' 1 / T,
            'uniform' none. A class with T = 0 has the largest weight among the others of its group. Weights have no
            gradient. One of 'uniform', 'simple', 'square'. Default 'uniform'.
        mean_of_weights: If True, a mean divides by the sum of the class weights of the groups in it, not by their
            number. Default None: what `preset` sets, or False.
        average: Order of a mean: over all 'groups' at once; or over those of each sample, then over the 'samples' that
            have a group. One of 'groups', 'samples'. Default None: what `preset` sets, or 'groups'.
        include_background: If False, class 0 has no region; it stays in the softmax. Default None: what `preset` sets,
            or True.
        empty: Loss of a sample without a group that counts, with average='samples'. Default None: such a sample is left
            out.
        class_weight: Weight of each class, of shape (C,), whether or not the background has a region; without a
            gradient. A group of weight 0 counts for nothing, even if it is NaN. Default None, no weights.
        ignore_index: Label of voxels that do not count. Their logits are not used, and their gradients are 0, even if
            they are NaN. Default -100.
        class_dim: Dimension of the classes, from either end. Of the others the first is that of samples. Default 1.
        mask: Bool array that broadcasts to the shape of the voxels, (N, ...), True where a voxel counts. Default None,
            no mask.
        preset: Settings of a library or paper, one of 'monai', 'smp', 'nnunet', 'nnunet_soft', 'kornia',
            'kornia_micro', 'kornia_macro', 'keras', 'maskformer'; arguments that are passed as well take precedence.
            Default None, the defaults listed here.
        reduction: One of 'none', 'mean', 'sum'; see Returns. Default 'mean'.
        normalizer: Number, or array of one number without a gradient, that replaces the divisor of a mean, such as the
            number of masks of all processes. Default None.
        out_dtype: Floating dtype of the result, of torch, of NumPy or by name. Default None, the promoted dtype of the
            operands.
        check_targets: When a label that is neither a class nor `ignore_index` raises: 'lazy' at a later call of a loss
            (at once on the CPU), 'sync' at once, for which the call waits for the GPU, 'off' never. The loss of its
            sample is NaN in any case, and memory is not read out of bounds. Default 'lazy'.

    Returns:
        With reduction 'none' the loss of each group, of shape (N, C), (C,), (N,) or () as classes or samples are
        pooled, 0 for groups that do not count; otherwise one number. 'mean' divides the sum by the number of groups
        that count. A mean of nothing is NaN, with gradients of 0. The result belongs to the library and the device of
        `input`, and has the promoted dtype of the operands (float32 under autocast) unless `out_dtype` is given.

    Gradient:
        `input` and a floating `target` are differentiable; class weights are constants. A denominator of 0 has gradient
        0, and S = 1 if no voxel is true, 0 otherwise. At the bound `floor` the denominator follows the operands; a base
        of 0 under an exponent below 1 has gradient 0. Where the loss of a group is NaN, so is the gradient of all of
        its voxels.

    Raises:
        TypeError: An operand is not an array, or has a dtype that the loss does not take (floating ones are float16,
            bfloat16, float32 and float64); operands come from several libraries, other than torch and CuPy on a GPU; an
            option has the wrong type.
        ValueError: Shapes do not fit, operands are on different devices, or an option is out of range.
        ImportError: The operands are on a GPU, and CuPy is not installed.
        cupylosses.KernelError: A kernel cannot be compiled or loaded.
        IndexError: A label is neither a class nor `ignore_index`; see `check_targets`.

    Example:
        >>> import torch
        >>> import cupylosses.functional as F
        >>> input = torch.tensor([[[2.0, 1.0, -1.0, 0.5], [0.0, 1.5, 0.5, -0.5]]], requires_grad=True)
        >>> target = torch.tensor([[0, 1, 1, 0]])
        >>> loss = F.dice_loss(input, target)
        >>> round(loss.item(), 3)
        0.237
        >>> loss.backward()  # input.grad holds the gradient

    References:
        F. Milletari, N. Navab, S.-A. Ahmadi, V-Net: fully convolutional neural networks for volumetric medical image
            segmentation, 3DV 2016.
    """

def jaccard_loss(
    input: _Array,
    target: _Exchangeable,
    *,
    smooth_nr: float | None = None,
    smooth_dr: float | None = None,
    floor: float | None = None,
    gamma: float = 1.0,
    log_floor: float = 1e-07,
    offset: float = 1.0,
    activation: Literal["softmax", "sigmoid", "none"] = "softmax",
    pool: Literal["none", "batch", "class", "both"] | tuple[str, ...] | None = None,
    overlap: Literal["product", "min", "squared"] | None = None,
    gamma_over: Literal["group", "mean"] = "group",
    log_loss: bool = False,
    absent: Literal["skip", "zero", "keep"] | None = None,
    weight_in: Literal["loss", "score"] = "loss",
    weighting: Literal["uniform", "simple", "square"] = "uniform",
    mean_of_weights: bool | None = None,
    average: Literal["groups", "samples"] = "groups",
    include_background: bool = True,
    empty: float | None = None,
    class_weight: _Exchangeable | None = None,
    ignore_index: int = -100,
    class_dim: int = 1,
    mask: _Exchangeable | None = None,
    preset: str | None = None,
    reduction: Literal["none", "mean", "sum"] = "mean",
    normalizer: _Exchangeable | float | None = None,
    out_dtype: Any = None,
    check_targets: _Check = "lazy",
) -> _Array:
    """Jaccard loss: one minus the intersection over the union of predicted and true regions.

        1 - (I + smooth_nr) / max(I + FP + FN + smooth_dr, floor), averaged over the regions of samples and classes

    with p = softmax(input), sigmoid(input) or input; t = [target = c], or a target per class; I = sum p t, FP = sum p
    (1 - t), FN = sum (1 - p) t over the voxels of a group that count.

    The presets are those of MONAI 1.6, segmentation_models_pytorch 0.6 (smp), nnU-Net 2.8, kornia 0.9 and Keras 3.16.
    Unlike these libraries, voxels that do not count are never used, whatever they hold.

    Args:
        input: The predicted logits, or probabilities with activation='none'. Shape (N, C, ...), any number of
            dimensions, with the classes in `class_dim`; floating.
        target: Labels of any integer dtype, in the shape of `input` without its class dimension or with one of size 1,
            which are read in their own width; or a value per class, floating (differentiable) or integer, in the shape
            of `input`. With one class it has a value per voxel, 0 or 1.
        smooth_nr: Added to the numerator of the score S. A constant that a library adds to 2 I is twice this one. Must
            be a number >= 0. Default None: what `preset` sets, or 0.0.
        smooth_dr: Added to the denominator of S. A constant that a library adds to sum p + sum t is twice this one.
            Must be a number >= 0. Default None: what `preset` sets, or 0.0.
        floor: Lower bound of the denominator. Below it the denominator is a constant, with derivatives 0. Must be a
            number >= 0. Default None: what `preset` sets, or 0.0.
        gamma: Exponent of the loss. Below 1 it makes regions that overlap well count more, and at a loss of 0 its
            gradient is 0. Must be a number > 0. Default 1.0.
        log_floor: Lower bound of S under the logarithm of `log_loss`, below which the gradient is 0. Must be a number >
            0. Default 1e-07.
        offset: Number that S is subtracted from: 1, or 0 for the loss -S. Must be a number, not NaN. Default 1.0.
        activation: Function of `input` that gives probabilities; 'none' if it holds them already. One of 'softmax',
            'sigmoid', 'none'. Default 'softmax'.
        pool: Cells whose overlap is summed before the score is taken: 'none' has a group per sample and class, 'batch'
            one per class over all samples, 'class' one per sample over all classes, 'both' a single one. One of 'none',
            'batch', 'class', 'both'. Default None: what `preset` sets, or 'none'.
        overlap: Overlap of p and t. 'product': I = sum p t, FP = sum p (1 - t), FN = sum (1 - p) t. 'min': I = sum
            min(p, t), FP = sum max(p - t, 0), FN = sum max(t - p, 0), which is 0 loss for soft targets that are met;
            equal ones share the derivative. 'squared': FP = sum p (p - t), FN = sum t (t - p), so that dice has (sum
            p^2 + sum t^2) / 2 for denominator. One of 'product', 'min', 'squared'. Default None: what `preset` sets, or
            'product'.
        gamma_over: Base of the exponent `gamma`: the loss of each 'group', or their 'mean'. One of 'group', 'mean'.
            Default 'group'.
        log_loss: If True, the loss of a group is -log max(S, log_floor) instead of offset - S. Default False.
        absent: Groups without a true voxel. 'skip': neither in the sum nor in its divisor. 'zero': their loss is 0, and
            counts. 'keep': the formula, in which smoothing decides. One of 'skip', 'zero', 'keep'. Default None: what
            `preset` sets, or 'skip'.
        weight_in: Place of `class_weight`: the 'loss' of a class's group; or the 'score', in which I, FP and FN of each
            class are multiplied before classes are pooled. One of 'loss', 'score'. Default 'loss'.
        weighting: Weights of classes that are pooled, by the number T of true voxels: 'square' 1 / T^2, 'simple' 1 / T,
            'uniform' none. A class with T = 0 has the largest weight among the others of its group. Weights have no
            gradient. One of 'uniform', 'simple', 'square'. Default 'uniform'.
        mean_of_weights: If True, a mean divides by the sum of the class weights of the groups in it, not by their
            number. Default None: what `preset` sets, or False.
        average: Order of a mean: over all 'groups' at once; or over those of each sample, then over the 'samples' that
            have a group. One of 'groups', 'samples'. Default 'groups'.
        include_background: If False, class 0 has no region; it stays in the softmax. Default True.
        empty: Loss of a sample without a group that counts, with average='samples'. Default None: such a sample is left
            out.
        class_weight: Weight of each class, of shape (C,), whether or not the background has a region; without a
            gradient. A group of weight 0 counts for nothing, even if it is NaN. Default None, no weights.
        ignore_index: Label of voxels that do not count. Their logits are not used, and their gradients are 0, even if
            they are NaN. Default -100.
        class_dim: Dimension of the classes, from either end. Of the others the first is that of samples. Default 1.
        mask: Bool array that broadcasts to the shape of the voxels, (N, ...), True where a voxel counts. Default None,
            no mask.
        preset: Settings of a library or paper, one of 'monai', 'smp'; arguments that are passed as well take
            precedence. Default None, the defaults listed here.
        reduction: One of 'none', 'mean', 'sum'; see Returns. Default 'mean'.
        normalizer: Number, or array of one number without a gradient, that replaces the divisor of a mean, such as the
            number of masks of all processes. Default None.
        out_dtype: Floating dtype of the result, of torch, of NumPy or by name. Default None, the promoted dtype of the
            operands.
        check_targets: When a label that is neither a class nor `ignore_index` raises: 'lazy' at a later call of a loss
            (at once on the CPU), 'sync' at once, for which the call waits for the GPU, 'off' never. The loss of its
            sample is NaN in any case, and memory is not read out of bounds. Default 'lazy'.

    Returns:
        With reduction 'none' the loss of each group, of shape (N, C), (C,), (N,) or () as classes or samples are
        pooled, 0 for groups that do not count; otherwise one number. 'mean' divides the sum by the number of groups
        that count. A mean of nothing is NaN, with gradients of 0. The result belongs to the library and the device of
        `input`, and has the promoted dtype of the operands (float32 under autocast) unless `out_dtype` is given.

    Gradient:
        `input` and a floating `target` are differentiable; class weights are constants. A denominator of 0 has gradient
        0, and S = 1 if no voxel is true, 0 otherwise. At the bound `floor` the denominator follows the operands; a base
        of 0 under an exponent below 1 has gradient 0. Where the loss of a group is NaN, so is the gradient of all of
        its voxels.

    Raises:
        TypeError: An operand is not an array, or has a dtype that the loss does not take (floating ones are float16,
            bfloat16, float32 and float64); operands come from several libraries, other than torch and CuPy on a GPU; an
            option has the wrong type.
        ValueError: Shapes do not fit, operands are on different devices, or an option is out of range.
        ImportError: The operands are on a GPU, and CuPy is not installed.
        cupylosses.KernelError: A kernel cannot be compiled or loaded.
        IndexError: A label is neither a class nor `ignore_index`; see `check_targets`.

    Example:
        >>> import torch
        >>> import cupylosses.functional as F
        >>> input = torch.tensor([[[2.0, 1.0, -1.0, 0.5], [0.0, 1.5, 0.5, -0.5]]], requires_grad=True)
        >>> target = torch.tensor([[0, 1, 1, 0]])
        >>> loss = F.jaccard_loss(input, target)
        >>> round(loss.item(), 3)
        0.384
        >>> loss.backward()  # input.grad holds the gradient

    References:
        M. A. Rahman, Y. Wang, Optimizing intersection-over-union in deep neural networks for image segmentation, ISVC
            2016.
    """

def tversky_loss(
    input: _Array,
    target: _Exchangeable,
    alpha: float = 0.5,
    beta: float = 0.5,
    *,
    smooth_nr: float | None = None,
    smooth_dr: float | None = None,
    floor: float | None = None,
    gamma: float = 1.0,
    log_floor: float = 1e-07,
    offset: float = 1.0,
    activation: Literal["softmax", "sigmoid", "none"] | None = None,
    pool: Literal["none", "batch", "class", "both"] | tuple[str, ...] | None = None,
    overlap: Literal["product", "min", "squared"] | None = None,
    gamma_over: Literal["group", "mean"] | None = None,
    log_loss: bool = False,
    absent: Literal["skip", "zero", "keep"] | None = None,
    weight_in: Literal["loss", "score"] = "loss",
    weighting: Literal["uniform", "simple", "square"] = "uniform",
    mean_of_weights: bool | None = None,
    average: Literal["groups", "samples"] | None = None,
    include_background: bool = True,
    empty: float | None = None,
    class_weight: _Exchangeable | None = None,
    ignore_index: int = -100,
    class_dim: int = 1,
    mask: _Exchangeable | None = None,
    preset: str | None = None,
    reduction: Literal["none", "mean", "sum"] = "mean",
    normalizer: _Exchangeable | float | None = None,
    out_dtype: Any = None,
    check_targets: _Check = "lazy",
) -> _Array:
    """Tversky loss: a Dice loss that weighs false positives and false negatives differently.

        1 - (I + smooth_nr) / max(I + alpha FP + beta FN + smooth_dr, floor), averaged over the regions of samples and
        classes

    with p = softmax(input), sigmoid(input) or input; t = [target = c], or a target per class; I = sum p t, FP = sum p
    (1 - t), FN = sum (1 - p) t over the voxels of a group that count.

    alpha = beta = 1/2 is `dice_loss`, alpha = beta = 1 `jaccard_loss`. Keras up to 3.15 swaps alpha and beta relative
    to its documentation and to this function. The presets are those of MONAI 1.6, segmentation_models_pytorch 0.6
    (smp), nnU-Net 2.8, kornia 0.9 and Keras 3.16. Unlike these libraries, voxels that do not count are never used,
    whatever they hold.

    Args:
        input: The predicted logits, or probabilities with activation='none'. Shape (N, C, ...), any number of
            dimensions, with the classes in `class_dim`; floating.
        target: Labels of any integer dtype, in the shape of `input` without its class dimension or with one of size 1,
            which are read in their own width; or a value per class, floating (differentiable) or integer, in the shape
            of `input`. With one class it has a value per voxel, 0 or 1.
        alpha: Weight of false positives in the denominator. Must be a number >= 0. Default 0.5.
        beta: Weight of false negatives in the denominator. Must be a number >= 0. Default 0.5.
        smooth_nr: Added to the numerator of the score S. A constant that a library adds to 2 I is twice this one. Must
            be a number >= 0. Default None: what `preset` sets, or 0.0.
        smooth_dr: Added to the denominator of S. A constant that a library adds to sum p + sum t is twice this one.
            Must be a number >= 0. Default None: what `preset` sets, or 0.0.
        floor: Lower bound of the denominator. Below it the denominator is a constant, with derivatives 0. Must be a
            number >= 0. Default None: what `preset` sets, or 0.0.
        gamma: Exponent of the loss. Below 1 it makes regions that overlap well count more, and at a loss of 0 its
            gradient is 0. Must be a number > 0. Default 1.0.
        log_floor: Lower bound of S under the logarithm of `log_loss`, below which the gradient is 0. Must be a number >
            0. Default 1e-07.
        offset: Number that S is subtracted from: 1, or 0 for the loss -S. Must be a number, not NaN. Default 1.0.
        activation: Function of `input` that gives probabilities; 'none' if it holds them already. One of 'softmax',
            'sigmoid', 'none'. Default None: what `preset` sets, or 'softmax'.
        pool: Cells whose overlap is summed before the score is taken: 'none' has a group per sample and class, 'batch'
            one per class over all samples, 'class' one per sample over all classes, 'both' a single one. One of 'none',
            'batch', 'class', 'both'. Default None: what `preset` sets, or 'none'.
        overlap: Overlap of p and t. 'product': I = sum p t, FP = sum p (1 - t), FN = sum (1 - p) t. 'min': I = sum
            min(p, t), FP = sum max(p - t, 0), FN = sum max(t - p, 0), which is 0 loss for soft targets that are met;
            equal ones share the derivative. 'squared': FP = sum p (p - t), FN = sum t (t - p), so that dice has (sum
            p^2 + sum t^2) / 2 for denominator. One of 'product', 'min', 'squared'. Default None: what `preset` sets, or
            'product'.
        gamma_over: Base of the exponent `gamma`: the loss of each 'group', or their 'mean'. One of 'group', 'mean'.
            Default None: what `preset` sets, or 'group'.
        log_loss: If True, the loss of a group is -log max(S, log_floor) instead of offset - S. Default False.
        absent: Groups without a true voxel. 'skip': neither in the sum nor in its divisor. 'zero': their loss is 0, and
            counts. 'keep': the formula, in which smoothing decides. One of 'skip', 'zero', 'keep'. Default None: what
            `preset` sets, or 'skip'.
        weight_in: Place of `class_weight`: the 'loss' of a class's group; or the 'score', in which I, FP and FN of each
            class are multiplied before classes are pooled. One of 'loss', 'score'. Default 'loss'.
        weighting: Weights of classes that are pooled, by the number T of true voxels: 'square' 1 / T^2, 'simple' 1 / T,
            'uniform' none. A class with T = 0 has the largest weight among the others of its group. Weights have no
            gradient. One of 'uniform', 'simple', 'square'. Default 'uniform'.
        mean_of_weights: If True, a mean divides by the sum of the class weights of the groups in it, not by their
            number. Default None: what `preset` sets, or False.
        average: Order of a mean: over all 'groups' at once; or over those of each sample, then over the 'samples' that
            have a group. One of 'groups', 'samples'. Default None: what `preset` sets, or 'groups'.
        include_background: If False, class 0 has no region; it stays in the softmax. Default True.
        empty: Loss of a sample without a group that counts, with average='samples'. Default None: such a sample is left
            out.
        class_weight: Weight of each class, of shape (C,), whether or not the background has a region; without a
            gradient. A group of weight 0 counts for nothing, even if it is NaN. Default None, no weights.
        ignore_index: Label of voxels that do not count. Their logits are not used, and their gradients are 0, even if
            they are NaN. Default -100.
        class_dim: Dimension of the classes, from either end. Of the others the first is that of samples. Default 1.
        mask: Bool array that broadcasts to the shape of the voxels, (N, ...), True where a voxel counts. Default None,
            no mask.
        preset: Settings of a library or paper, one of 'monai', 'smp', 'kornia', 'keras'; arguments that are passed as
            well take precedence. Default None, the defaults listed here.
        reduction: One of 'none', 'mean', 'sum'; see Returns. Default 'mean'.
        normalizer: Number, or array of one number without a gradient, that replaces the divisor of a mean, such as the
            number of masks of all processes. Default None.
        out_dtype: Floating dtype of the result, of torch, of NumPy or by name. Default None, the promoted dtype of the
            operands.
        check_targets: When a label that is neither a class nor `ignore_index` raises: 'lazy' at a later call of a loss
            (at once on the CPU), 'sync' at once, for which the call waits for the GPU, 'off' never. The loss of its
            sample is NaN in any case, and memory is not read out of bounds. Default 'lazy'.

    Returns:
        With reduction 'none' the loss of each group, of shape (N, C), (C,), (N,) or () as classes or samples are
        pooled, 0 for groups that do not count; otherwise one number. 'mean' divides the sum by the number of groups
        that count. A mean of nothing is NaN, with gradients of 0. The result belongs to the library and the device of
        `input`, and has the promoted dtype of the operands (float32 under autocast) unless `out_dtype` is given.

    Gradient:
        `input` and a floating `target` are differentiable; class weights are constants. A denominator of 0 has gradient
        0, and S = 1 if no voxel is true, 0 otherwise. At the bound `floor` the denominator follows the operands; a base
        of 0 under an exponent below 1 has gradient 0. Where the loss of a group is NaN, so is the gradient of all of
        its voxels.

    Raises:
        TypeError: An operand is not an array, or has a dtype that the loss does not take (floating ones are float16,
            bfloat16, float32 and float64); operands come from several libraries, other than torch and CuPy on a GPU; an
            option has the wrong type.
        ValueError: Shapes do not fit, operands are on different devices, or an option is out of range.
        ImportError: The operands are on a GPU, and CuPy is not installed.
        cupylosses.KernelError: A kernel cannot be compiled or loaded.
        IndexError: A label is neither a class nor `ignore_index`; see `check_targets`.

    Example:
        >>> import torch
        >>> import cupylosses.functional as F
        >>> input = torch.tensor([[[2.0, 1.0, -1.0, 0.5], [0.0, 1.5, 0.5, -0.5]]], requires_grad=True)
        >>> target = torch.tensor([[0, 1, 1, 0]])
        >>> loss = F.tversky_loss(input, target)
        >>> round(loss.item(), 3)
        0.237
        >>> loss.backward()  # input.grad holds the gradient

    References:
        S. S. M. Salehi, D. Erdogmus, A. Gholipour, Tversky loss function for image segmentation using 3D fully
            convolutional deep networks, MLMI 2017.
    """

def focal_tversky_loss(
    input: _Array,
    target: _Exchangeable,
    alpha: float = 0.3,
    beta: float = 0.7,
    gamma: float = 0.75,
    *,
    smooth_nr: float | None = None,
    smooth_dr: float | None = None,
    floor: float | None = None,
    log_floor: float = 1e-07,
    offset: float = 1.0,
    activation: Literal["softmax", "sigmoid", "none"] | None = None,
    pool: Literal["none", "batch", "class", "both"] | tuple[str, ...] | None = None,
    overlap: Literal["product", "min", "squared"] | None = None,
    gamma_over: Literal["group", "mean"] | None = None,
    log_loss: bool = False,
    absent: Literal["skip", "zero", "keep"] | None = None,
    weight_in: Literal["loss", "score"] = "loss",
    weighting: Literal["uniform", "simple", "square"] = "uniform",
    mean_of_weights: bool | None = None,
    average: Literal["groups", "samples"] | None = None,
    include_background: bool = True,
    empty: float | None = None,
    class_weight: _Exchangeable | None = None,
    ignore_index: int = -100,
    class_dim: int = 1,
    mask: _Exchangeable | None = None,
    preset: str | None = None,
    reduction: Literal["none", "mean", "sum"] = "mean",
    normalizer: _Exchangeable | float | None = None,
    out_dtype: Any = None,
    check_targets: _Check = "lazy",
) -> _Array:
    """Focal Tversky loss: a power of the Tversky loss that gives more weight to regions that overlap well.

        (1 - S)^gamma with 1 - S = 1 - (I + smooth_nr) / max(I + alpha FP + beta FN + smooth_dr, floor), averaged over
        the regions of samples and classes

    with p = softmax(input), sigmoid(input) or input; t = [target = c], or a target per class; I = sum p t, FP = sum p
    (1 - t), FN = sum (1 - p) t over the voxels of a group that count.

    `gamma` is the inverse of the paper's, which is 4/3. smp raises the mean, the others each region's loss. The presets
    are those of MONAI 1.6, segmentation_models_pytorch 0.6 (smp), nnU-Net 2.8, kornia 0.9 and Keras 3.16. Unlike these
    libraries, voxels that do not count are never used, whatever they hold.

    Args:
        input: The predicted logits, or probabilities with activation='none'. Shape (N, C, ...), any number of
            dimensions, with the classes in `class_dim`; floating.
        target: Labels of any integer dtype, in the shape of `input` without its class dimension or with one of size 1,
            which are read in their own width; or a value per class, floating (differentiable) or integer, in the shape
            of `input`. With one class it has a value per voxel, 0 or 1.
        alpha: Weight of false positives in the denominator. Must be a number >= 0. Default 0.3.
        beta: Weight of false negatives in the denominator. Must be a number >= 0. Default 0.7.
        gamma: Exponent of the loss. Below 1 it makes regions that overlap well count more, and at a loss of 0 its
            gradient is 0. Must be a number > 0. Default 0.75.
        smooth_nr: Added to the numerator of the score S. A constant that a library adds to 2 I is twice this one. Must
            be a number >= 0. Default None: what `preset` sets, or 0.0.
        smooth_dr: Added to the denominator of S. A constant that a library adds to sum p + sum t is twice this one.
            Must be a number >= 0. Default None: what `preset` sets, or 0.0.
        floor: Lower bound of the denominator. Below it the denominator is a constant, with derivatives 0. Must be a
            number >= 0. Default None: what `preset` sets, or 0.0.
        log_floor: Lower bound of S under the logarithm of `log_loss`, below which the gradient is 0. Must be a number >
            0. Default 1e-07.
        offset: Number that S is subtracted from: 1, or 0 for the loss -S. Must be a number, not NaN. Default 1.0.
        activation: Function of `input` that gives probabilities; 'none' if it holds them already. One of 'softmax',
            'sigmoid', 'none'. Default None: what `preset` sets, or 'softmax'.
        pool: Cells whose overlap is summed before the score is taken: 'none' has a group per sample and class, 'batch'
            one per class over all samples, 'class' one per sample over all classes, 'both' a single one. One of 'none',
            'batch', 'class', 'both'. Default None: what `preset` sets, or 'none'.
        overlap: Overlap of p and t. 'product': I = sum p t, FP = sum p (1 - t), FN = sum (1 - p) t. 'min': I = sum
            min(p, t), FP = sum max(p - t, 0), FN = sum max(t - p, 0), which is 0 loss for soft targets that are met;
            equal ones share the derivative. 'squared': FP = sum p (p - t), FN = sum t (t - p), so that dice has (sum
            p^2 + sum t^2) / 2 for denominator. One of 'product', 'min', 'squared'. Default None: what `preset` sets, or
            'product'.
        gamma_over: Base of the exponent `gamma`: the loss of each 'group', or their 'mean'. One of 'group', 'mean'.
            Default None: what `preset` sets, or 'group'.
        log_loss: If True, the loss of a group is -log max(S, log_floor) instead of offset - S. Default False.
        absent: Groups without a true voxel. 'skip': neither in the sum nor in its divisor. 'zero': their loss is 0, and
            counts. 'keep': the formula, in which smoothing decides. One of 'skip', 'zero', 'keep'. Default None: what
            `preset` sets, or 'skip'.
        weight_in: Place of `class_weight`: the 'loss' of a class's group; or the 'score', in which I, FP and FN of each
            class are multiplied before classes are pooled. One of 'loss', 'score'. Default 'loss'.
        weighting: Weights of classes that are pooled, by the number T of true voxels: 'square' 1 / T^2, 'simple' 1 / T,
            'uniform' none. A class with T = 0 has the largest weight among the others of its group. Weights have no
            gradient. One of 'uniform', 'simple', 'square'. Default 'uniform'.
        mean_of_weights: If True, a mean divides by the sum of the class weights of the groups in it, not by their
            number. Default None: what `preset` sets, or False.
        average: Order of a mean: over all 'groups' at once; or over those of each sample, then over the 'samples' that
            have a group. One of 'groups', 'samples'. Default None: what `preset` sets, or 'groups'.
        include_background: If False, class 0 has no region; it stays in the softmax. Default True.
        empty: Loss of a sample without a group that counts, with average='samples'. Default None: such a sample is left
            out.
        class_weight: Weight of each class, of shape (C,), whether or not the background has a region; without a
            gradient. A group of weight 0 counts for nothing, even if it is NaN. Default None, no weights.
        ignore_index: Label of voxels that do not count. Their logits are not used, and their gradients are 0, even if
            they are NaN. Default -100.
        class_dim: Dimension of the classes, from either end. Of the others the first is that of samples. Default 1.
        mask: Bool array that broadcasts to the shape of the voxels, (N, ...), True where a voxel counts. Default None,
            no mask.
        preset: Settings of a library or paper, one of 'monai', 'smp', 'kornia', 'keras'; arguments that are passed as
            well take precedence. Default None, the defaults listed here.
        reduction: One of 'none', 'mean', 'sum'; see Returns. Default 'mean'.
        normalizer: Number, or array of one number without a gradient, that replaces the divisor of a mean, such as the
            number of masks of all processes. Default None.
        out_dtype: Floating dtype of the result, of torch, of NumPy or by name. Default None, the promoted dtype of the
            operands.
        check_targets: When a label that is neither a class nor `ignore_index` raises: 'lazy' at a later call of a loss
            (at once on the CPU), 'sync' at once, for which the call waits for the GPU, 'off' never. The loss of its
            sample is NaN in any case, and memory is not read out of bounds. Default 'lazy'.

    Returns:
        With reduction 'none' the loss of each group, of shape (N, C), (C,), (N,) or () as classes or samples are
        pooled, 0 for groups that do not count; otherwise one number. 'mean' divides the sum by the number of groups
        that count. A mean of nothing is NaN, with gradients of 0. The result belongs to the library and the device of
        `input`, and has the promoted dtype of the operands (float32 under autocast) unless `out_dtype` is given.

    Gradient:
        `input` and a floating `target` are differentiable; class weights are constants. A denominator of 0 has gradient
        0, and S = 1 if no voxel is true, 0 otherwise. At the bound `floor` the denominator follows the operands; a base
        of 0 under an exponent below 1 has gradient 0. Where the loss of a group is NaN, so is the gradient of all of
        its voxels.

    Raises:
        TypeError: An operand is not an array, or has a dtype that the loss does not take (floating ones are float16,
            bfloat16, float32 and float64); operands come from several libraries, other than torch and CuPy on a GPU; an
            option has the wrong type.
        ValueError: Shapes do not fit, operands are on different devices, or an option is out of range.
        ImportError: The operands are on a GPU, and CuPy is not installed.
        cupylosses.KernelError: A kernel cannot be compiled or loaded.
        IndexError: A label is neither a class nor `ignore_index`; see `check_targets`.

    Example:
        >>> import torch
        >>> import cupylosses.functional as F
        >>> input = torch.tensor([[[2.0, 1.0, -1.0, 0.5], [0.0, 1.5, 0.5, -0.5]]], requires_grad=True)
        >>> target = torch.tensor([[0, 1, 1, 0]])
        >>> loss = F.focal_tversky_loss(input, target)
        >>> round(loss.item(), 3)
        0.34
        >>> loss.backward()  # input.grad holds the gradient

    References:
        N. Abraham, N. M. Khan, A novel focal Tversky loss function with improved attention U-Net for lesion
            segmentation, ISBI 2019.
    """

def generalized_dice_loss(
    input: _Array,
    target: _Exchangeable,
    *,
    smooth_nr: float | None = None,
    smooth_dr: float | None = None,
    floor: float = 0.0,
    gamma: float = 1.0,
    log_floor: float = 1e-07,
    offset: float = 1.0,
    activation: Literal["softmax", "sigmoid", "none"] = "softmax",
    pool: Literal["none", "batch", "class", "both"] | tuple[str, ...] = "class",
    overlap: Literal["product", "min", "squared"] = "product",
    gamma_over: Literal["group", "mean"] = "group",
    log_loss: bool = False,
    absent: Literal["skip", "zero", "keep"] | None = None,
    weight_in: Literal["loss", "score"] = "loss",
    weighting: Literal["uniform", "simple", "square"] = "square",
    mean_of_weights: bool = False,
    average: Literal["groups", "samples"] = "groups",
    include_background: bool = True,
    empty: float | None = None,
    class_weight: _Exchangeable | None = None,
    ignore_index: int = -100,
    class_dim: int = 1,
    mask: _Exchangeable | None = None,
    preset: str | None = None,
    reduction: Literal["none", "mean", "sum"] = "mean",
    normalizer: _Exchangeable | float | None = None,
    out_dtype: Any = None,
    check_targets: _Check = "lazy",
) -> _Array:
    """Generalized Dice loss: the Dice loss of all classes together, weighted by the inverse of their sizes.

        1 - (sum_c w_c I_c + smooth_nr) / max(sum_c w_c (I_c + FP_c / 2 + FN_c / 2) + smooth_dr, floor) for each sample,
        with w_c = 1 / T_c^2 and T_c = I_c + FN_c

    with p = softmax(input), sigmoid(input) or input; t = [target = c], or a target per class; I = sum p t, FP = sum p
    (1 - t), FN = sum (1 - p) t over the voxels of a group that count.

    With pool='both' sizes are those over all samples. A class without true voxels has the largest weight of the others.
    The presets are those of MONAI 1.6, segmentation_models_pytorch 0.6 (smp), nnU-Net 2.8, kornia 0.9 and Keras 3.16.
    Unlike these libraries, voxels that do not count are never used, whatever they hold.

    Args:
        input: The predicted logits, or probabilities with activation='none'. Shape (N, C, ...), any number of
            dimensions, with the classes in `class_dim`; floating.
        target: Labels of any integer dtype, in the shape of `input` without its class dimension or with one of size 1,
            which are read in their own width; or a value per class, floating (differentiable) or integer, in the shape
            of `input`. With one class it has a value per voxel, 0 or 1.
        smooth_nr: Added to the numerator of the score S. A constant that a library adds to 2 I is twice this one. Must
            be a number >= 0. Default None: what `preset` sets, or 0.0.
        smooth_dr: Added to the denominator of S. A constant that a library adds to sum p + sum t is twice this one.
            Must be a number >= 0. Default None: what `preset` sets, or 0.0.
        floor: Lower bound of the denominator. Below it the denominator is a constant, with derivatives 0. Must be a
            number >= 0. Default 0.0.
        gamma: Exponent of the loss. Below 1 it makes regions that overlap well count more, and at a loss of 0 its
            gradient is 0. Must be a number > 0. Default 1.0.
        log_floor: Lower bound of S under the logarithm of `log_loss`, below which the gradient is 0. Must be a number >
            0. Default 1e-07.
        offset: Number that S is subtracted from: 1, or 0 for the loss -S. Must be a number, not NaN. Default 1.0.
        activation: Function of `input` that gives probabilities; 'none' if it holds them already. One of 'softmax',
            'sigmoid', 'none'. Default 'softmax'.
        pool: Cells whose overlap is summed before the score is taken: 'none' has a group per sample and class, 'batch'
            one per class over all samples, 'class' one per sample over all classes, 'both' a single one. One of 'none',
            'batch', 'class', 'both'. Default 'class'.
        overlap: Overlap of p and t. 'product': I = sum p t, FP = sum p (1 - t), FN = sum (1 - p) t. 'min': I = sum
            min(p, t), FP = sum max(p - t, 0), FN = sum max(t - p, 0), which is 0 loss for soft targets that are met;
            equal ones share the derivative. 'squared': FP = sum p (p - t), FN = sum t (t - p), so that dice has (sum
            p^2 + sum t^2) / 2 for denominator. One of 'product', 'min', 'squared'. Default 'product'.
        gamma_over: Base of the exponent `gamma`: the loss of each 'group', or their 'mean'. One of 'group', 'mean'.
            Default 'group'.
        log_loss: If True, the loss of a group is -log max(S, log_floor) instead of offset - S. Default False.
        absent: Groups without a true voxel. 'skip': neither in the sum nor in its divisor. 'zero': their loss is 0, and
            counts. 'keep': the formula, in which smoothing decides. One of 'skip', 'zero', 'keep'. Default None: what
            `preset` sets, or 'skip'.
        weight_in: Place of `class_weight`: the 'loss' of a class's group; or the 'score', in which I, FP and FN of each
            class are multiplied before classes are pooled. One of 'loss', 'score'. Default 'loss'.
        weighting: Weights of classes that are pooled, by the number T of true voxels: 'square' 1 / T^2, 'simple' 1 / T,
            'uniform' none. A class with T = 0 has the largest weight among the others of its group. Weights have no
            gradient. One of 'uniform', 'simple', 'square'. Default 'square'.
        mean_of_weights: If True, a mean divides by the sum of the class weights of the groups in it, not by their
            number. Default False.
        average: Order of a mean: over all 'groups' at once; or over those of each sample, then over the 'samples' that
            have a group. One of 'groups', 'samples'. Default 'groups'.
        include_background: If False, class 0 has no region; it stays in the softmax. Default True.
        empty: Loss of a sample without a group that counts, with average='samples'. Default None: such a sample is left
            out.
        class_weight: Weight of each class, of shape (C,), whether or not the background has a region; without a
            gradient. A group of weight 0 counts for nothing, even if it is NaN. Default None, no weights.
        ignore_index: Label of voxels that do not count. Their logits are not used, and their gradients are 0, even if
            they are NaN. Default -100.
        class_dim: Dimension of the classes, from either end. Of the others the first is that of samples. Default 1.
        mask: Bool array that broadcasts to the shape of the voxels, (N, ...), True where a voxel counts. Default None,
            no mask.
        preset: Settings of a library or paper, one of 'monai'; arguments that are passed as well take precedence.
            Default None, the defaults listed here.
        reduction: One of 'none', 'mean', 'sum'; see Returns. Default 'mean'.
        normalizer: Number, or array of one number without a gradient, that replaces the divisor of a mean, such as the
            number of masks of all processes. Default None.
        out_dtype: Floating dtype of the result, of torch, of NumPy or by name. Default None, the promoted dtype of the
            operands.
        check_targets: When a label that is neither a class nor `ignore_index` raises: 'lazy' at a later call of a loss
            (at once on the CPU), 'sync' at once, for which the call waits for the GPU, 'off' never. The loss of its
            sample is NaN in any case, and memory is not read out of bounds. Default 'lazy'.

    Returns:
        With reduction 'none' the loss of each group, of shape (N, C), (C,), (N,) or () as classes or samples are
        pooled, 0 for groups that do not count; otherwise one number. 'mean' divides the sum by the number of groups
        that count. A mean of nothing is NaN, with gradients of 0. The result belongs to the library and the device of
        `input`, and has the promoted dtype of the operands (float32 under autocast) unless `out_dtype` is given.

    Gradient:
        `input` and a floating `target` are differentiable; class weights are constants. A denominator of 0 has gradient
        0, and S = 1 if no voxel is true, 0 otherwise. At the bound `floor` the denominator follows the operands; a base
        of 0 under an exponent below 1 has gradient 0. Where the loss of a group is NaN, so is the gradient of all of
        its voxels.

    Raises:
        TypeError: An operand is not an array, or has a dtype that the loss does not take (floating ones are float16,
            bfloat16, float32 and float64); operands come from several libraries, other than torch and CuPy on a GPU; an
            option has the wrong type.
        ValueError: Shapes do not fit, operands are on different devices, or an option is out of range.
        ImportError: The operands are on a GPU, and CuPy is not installed.
        cupylosses.KernelError: A kernel cannot be compiled or loaded.
        IndexError: A label is neither a class nor `ignore_index`; see `check_targets`.

    Example:
        >>> import torch
        >>> import cupylosses.functional as F
        >>> input = torch.tensor([[[2.0, 1.0, -1.0, 0.5], [0.0, 1.5, 0.5, -0.5]]], requires_grad=True)
        >>> target = torch.tensor([[0, 1, 1, 0]])
        >>> loss = F.generalized_dice_loss(input, target)
        >>> round(loss.item(), 3)
        0.237
        >>> loss.backward()  # input.grad holds the gradient

    References:
        C. H. Sudre, W. Li, T. Vercauteren, S. Ourselin, M. J. Cardoso, Generalised Dice overlap as a deep learning loss
            function for highly unbalanced segmentations, DLMIA 2017.
    """

def dice_ce_loss(
    input: _Array,
    target: _Exchangeable,
    *,
    smooth_nr: float | None = None,
    smooth_dr: float | None = None,
    floor: float | None = None,
    gamma: float = 1.0,
    log_floor: float = 1e-07,
    offset: float | None = None,
    lambda_dice: float = 1.0,
    lambda_ce: float = 1.0,
    label_smoothing: float = 0.0,
    activation: Literal["softmax", "sigmoid", "none"] = "softmax",
    pool: Literal["none", "batch", "class", "both"] | tuple[str, ...] = "none",
    overlap: Literal["product", "min", "squared"] = "product",
    gamma_over: Literal["group", "mean"] = "group",
    log_loss: bool = False,
    absent: Literal["skip", "zero", "keep"] | None = None,
    weight_in: Literal["loss", "score"] = "loss",
    weighting: Literal["uniform", "simple", "square"] = "uniform",
    mean_of_weights: bool = False,
    average: Literal["groups", "samples"] = "groups",
    include_background: bool | None = None,
    empty: float | None = None,
    class_weight: _Exchangeable | None = None,
    weight: _Exchangeable | None = None,
    ignore_index: int = -100,
    class_dim: int = 1,
    mask: _Exchangeable | None = None,
    preset: str | None = None,
    reduction: Literal["mean"] = "mean",
    out_dtype: Any = None,
    check_targets: _Check = "lazy",
) -> _Array:
    """Sum of the Dice loss and the cross entropy, in the same two reads of the logits.

        lambda_dice dice_loss + lambda_ce mean of -w_y log p_y over the voxels; of the binary cross entropy of each
        class with activation='sigmoid'

    with p = softmax(input), sigmoid(input) or input; t = [target = c], or a target per class; I = sum p t, FP = sum p
    (1 - t), FN = sum (1 - p) t over the voxels of a group that count.

    For labels the cross entropy is divided by the sum of the weights of the labels, as `cross_entropy` is; for a target
    per class by the number of voxels, and under a sigmoid by that of voxels and classes. `class_weight` weighs the Dice
    loss: pass MONAI's `weight` as both. The presets are those of MONAI 1.6, segmentation_models_pytorch 0.6 (smp),
    nnU-Net 2.8, kornia 0.9 and Keras 3.16. Unlike these libraries, voxels that do not count are never used, whatever
    they hold.

    Args:
        input: The predicted logits, or probabilities with activation='none'. Shape (N, C, ...), any number of
            dimensions, with the classes in `class_dim`; floating.
        target: Labels of any integer dtype, in the shape of `input` without its class dimension or with one of size 1,
            which are read in their own width; or a value per class, floating (differentiable) or integer, in the shape
            of `input`. With one class it has a value per voxel, 0 or 1.
        smooth_nr: Added to the numerator of the score S. A constant that a library adds to 2 I is twice this one. Must
            be a number >= 0. Default None: what `preset` sets, or 0.0.
        smooth_dr: Added to the denominator of S. A constant that a library adds to sum p + sum t is twice this one.
            Must be a number >= 0. Default None: what `preset` sets, or 0.0.
        floor: Lower bound of the denominator. Below it the denominator is a constant, with derivatives 0. Must be a
            number >= 0. Default None: what `preset` sets, or 0.0.
        gamma: Exponent of the loss. Below 1 it makes regions that overlap well count more, and at a loss of 0 its
            gradient is 0. Must be a number > 0. Default 1.0.
        log_floor: Lower bound of S under the logarithm of `log_loss`, below which the gradient is 0. Must be a number >
            0. Default 1e-07.
        offset: Number that S is subtracted from: 1, or 0 for the loss -S. Must be a number, not NaN. Default None: what
            `preset` sets, or 1.0.
        lambda_dice: Factor of the Dice loss. Must be a number, not NaN. Default 1.0.
        lambda_ce: Factor of the cross-entropy loss. Must be a number, not NaN. Default 1.0.
        label_smoothing: Share of the target that is spread evenly over all classes, in the cross entropy under a
            softmax. Must be a number >= 0 and <= 1. Default 0.0.
        activation: Function of `input` that gives probabilities; 'none' if it holds them already. One of 'softmax',
            'sigmoid', 'none'. Default 'softmax'.
        pool: Cells whose overlap is summed before the score is taken: 'none' has a group per sample and class, 'batch'
            one per class over all samples, 'class' one per sample over all classes, 'both' a single one. One of 'none',
            'batch', 'class', 'both'. Default 'none'.
        overlap: Overlap of p and t. 'product': I = sum p t, FP = sum p (1 - t), FN = sum (1 - p) t. 'min': I = sum
            min(p, t), FP = sum max(p - t, 0), FN = sum max(t - p, 0), which is 0 loss for soft targets that are met;
            equal ones share the derivative. 'squared': FP = sum p (p - t), FN = sum t (t - p), so that dice has (sum
            p^2 + sum t^2) / 2 for denominator. One of 'product', 'min', 'squared'. Default 'product'.
        gamma_over: Base of the exponent `gamma`: the loss of each 'group', or their 'mean'. One of 'group', 'mean'.
            Default 'group'.
        log_loss: If True, the loss of a group is -log max(S, log_floor) instead of offset - S. Default False.
        absent: Groups without a true voxel. 'skip': neither in the sum nor in its divisor. 'zero': their loss is 0, and
            counts. 'keep': the formula, in which smoothing decides. One of 'skip', 'zero', 'keep'. Default None: what
            `preset` sets, or 'skip'.
        weight_in: Place of `class_weight`: the 'loss' of a class's group; or the 'score', in which I, FP and FN of each
            class are multiplied before classes are pooled. One of 'loss', 'score'. Default 'loss'.
        weighting: Weights of classes that are pooled, by the number T of true voxels: 'square' 1 / T^2, 'simple' 1 / T,
            'uniform' none. A class with T = 0 has the largest weight among the others of its group. Weights have no
            gradient. One of 'uniform', 'simple', 'square'. Default 'uniform'.
        mean_of_weights: If True, a mean divides by the sum of the class weights of the groups in it, not by their
            number. Default False.
        average: Order of a mean: over all 'groups' at once; or over those of each sample, then over the 'samples' that
            have a group. One of 'groups', 'samples'. Default 'groups'.
        include_background: If False, class 0 has no region; it stays in the softmax. Default None: what `preset` sets,
            or True.
        empty: Loss of a sample without a group that counts, with average='samples'. Default None: such a sample is left
            out.
        class_weight: Weight of each class, of shape (C,), whether or not the background has a region; without a
            gradient. A group of weight 0 counts for nothing, even if it is NaN. Default None, no weights.
        weight: Weight of each class in the loss of voxels, of shape (C,), without a gradient. Default None, no weights.
        ignore_index: Label of voxels that do not count. Their logits are not used, and their gradients are 0, even if
            they are NaN. Default -100.
        class_dim: Dimension of the classes, from either end. Of the others the first is that of samples. Default 1.
        mask: Bool array that broadcasts to the shape of the voxels, (N, ...), True where a voxel counts. Default None,
            no mask.
        preset: Settings of a library or paper, one of 'monai', 'nnunet'; arguments that are passed as well take
            precedence. Default None, the defaults listed here.
        reduction: One of 'mean'; see Returns. Default 'mean'.
        out_dtype: Floating dtype of the result, of torch, of NumPy or by name. Default None, the promoted dtype of the
            operands.
        check_targets: When a label that is neither a class nor `ignore_index` raises: 'lazy' at a later call of a loss
            (at once on the CPU), 'sync' at once, for which the call waits for the GPU, 'off' never. The loss of its
            sample is NaN in any case, and memory is not read out of bounds. Default 'lazy'.

    Returns:
        One number, of the library and on the device of `input`, in the promoted dtype of the operands (float32 under
        autocast) unless `out_dtype` is given. The loss of regions is averaged over the groups that count, that of
        voxels over the voxels that do (divided by the sum of the weights of their labels). A mean of nothing is NaN,
        with gradients of 0.

    Gradient:
        `input` and a floating `target` are differentiable; class weights are constants. A denominator of 0 has gradient
        0, and S = 1 if no voxel is true, 0 otherwise. At the bound `floor` the denominator follows the operands; a base
        of 0 under an exponent below 1 has gradient 0. Where the loss of a group is NaN, so is the gradient of all of
        its voxels.

    Raises:
        TypeError: An operand is not an array, or has a dtype that the loss does not take (floating ones are float16,
            bfloat16, float32 and float64); operands come from several libraries, other than torch and CuPy on a GPU; an
            option has the wrong type.
        ValueError: Shapes do not fit, operands are on different devices, or an option is out of range.
        ImportError: The operands are on a GPU, and CuPy is not installed.
        cupylosses.KernelError: A kernel cannot be compiled or loaded.
        IndexError: A label is neither a class nor `ignore_index`; see `check_targets`.

    Example:
        >>> import torch
        >>> import cupylosses.functional as F
        >>> input = torch.tensor([[[2.0, 1.0, -1.0, 0.5], [0.0, 1.5, 0.5, -0.5]]], requires_grad=True)
        >>> target = torch.tensor([[0, 1, 1, 0]])
        >>> loss = F.dice_ce_loss(input, target)
        >>> round(loss.item(), 3)
        0.516
        >>> loss.backward()  # input.grad holds the gradient

    References:
        F. Milletari, N. Navab, S.-A. Ahmadi, V-Net: fully convolutional neural networks for volumetric medical image
            segmentation, 3DV 2016.
        F. Isensee et al., nnU-Net: a self-configuring method for deep learning-based biomedical image segmentation,
            Nature Methods 18, 2021.
    """

def dice_focal_loss(
    input: _Array,
    target: _Exchangeable,
    *,
    smooth_nr: float | None = None,
    smooth_dr: float | None = None,
    floor: float = 0.0,
    gamma: float = 1.0,
    log_floor: float = 1e-07,
    offset: float = 1.0,
    lambda_dice: float = 1.0,
    lambda_focal: float = 1.0,
    gamma_focal: float = 2.0,
    alpha_focal: float = -1.0,
    activation: Literal["softmax", "sigmoid", "none"] = "softmax",
    pool: Literal["none", "batch", "class", "both"] | tuple[str, ...] = "none",
    overlap: Literal["product", "min", "squared"] = "product",
    gamma_over: Literal["group", "mean"] = "group",
    log_loss: bool = False,
    absent: Literal["skip", "zero", "keep"] | None = None,
    weight_in: Literal["loss", "score"] = "loss",
    weighting: Literal["uniform", "simple", "square"] = "uniform",
    mean_of_weights: bool = False,
    average: Literal["groups", "samples"] = "groups",
    include_background: bool = True,
    focal_over: Literal["sigmoid", "softmax"] = "sigmoid",
    empty: float | None = None,
    class_weight: _Exchangeable | None = None,
    weight: _Exchangeable | None = None,
    ignore_index: int = -100,
    class_dim: int = 1,
    mask: _Exchangeable | None = None,
    preset: str | None = None,
    reduction: Literal["mean"] = "mean",
    out_dtype: Any = None,
    check_targets: _Check = "lazy",
) -> _Array:
    """Sum of the Dice loss and the focal loss, in the same two reads of the logits.

        lambda_dice dice_loss + lambda_focal mean of the focal loss: of each class's logit with focal_over='sigmoid',
        -w_y (1 - p_y)^gamma_focal log p_y of each voxel with 'softmax'

    with p = softmax(input), sigmoid(input) or input; t = [target = c], or a target per class; I = sum p t, FP = sum p
    (1 - t), FN = sum (1 - p) t over the voxels of a group that count.

    As in MONAI, the focal loss is that of every class's logit even where the Dice loss has a softmax. Under a sigmoid
    the focal loss is averaged over voxels and classes, under a softmax over voxels. `class_weight` weighs the Dice
    loss, `weight` the focal loss. The presets are those of MONAI 1.6, segmentation_models_pytorch 0.6 (smp), nnU-Net
    2.8, kornia 0.9 and Keras 3.16. Unlike these libraries, voxels that do not count are never used, whatever they hold.

    Args:
        input: The predicted logits, or probabilities with activation='none'. Shape (N, C, ...), any number of
            dimensions, with the classes in `class_dim`; floating.
        target: Labels of any integer dtype, in the shape of `input` without its class dimension or with one of size 1,
            which are read in their own width; or a value per class, floating (differentiable) or integer, in the shape
            of `input`. With one class it has a value per voxel, 0 or 1.
        smooth_nr: Added to the numerator of the score S. A constant that a library adds to 2 I is twice this one. Must
            be a number >= 0. Default None: what `preset` sets, or 0.0.
        smooth_dr: Added to the denominator of S. A constant that a library adds to sum p + sum t is twice this one.
            Must be a number >= 0. Default None: what `preset` sets, or 0.0.
        floor: Lower bound of the denominator. Below it the denominator is a constant, with derivatives 0. Must be a
            number >= 0. Default 0.0.
        gamma: Exponent of the loss. Below 1 it makes regions that overlap well count more, and at a loss of 0 its
            gradient is 0. Must be a number > 0. Default 1.0.
        log_floor: Lower bound of S under the logarithm of `log_loss`, below which the gradient is 0. Must be a number >
            0. Default 1e-07.
        offset: Number that S is subtracted from: 1, or 0 for the loss -S. Must be a number, not NaN. Default 1.0.
        lambda_dice: Factor of the Dice loss. Must be a number, not NaN. Default 1.0.
        lambda_focal: Factor of the focal loss. Must be a number, not NaN. Default 1.0.
        gamma_focal: Exponent of the focal loss. Must be a number >= 0. Default 2.0.
        alpha_focal: Weight of positive elements under a sigmoid, negative ones having 1 - alpha_focal. A negative one
            turns these weights off. Must be a number <= 1. Default -1.0.
        activation: Function of `input` that gives probabilities; 'none' if it holds them already. One of 'softmax',
            'sigmoid', 'none'. Default 'softmax'.
        pool: Cells whose overlap is summed before the score is taken: 'none' has a group per sample and class, 'batch'
            one per class over all samples, 'class' one per sample over all classes, 'both' a single one. One of 'none',
            'batch', 'class', 'both'. Default 'none'.
        overlap: Overlap of p and t. 'product': I = sum p t, FP = sum p (1 - t), FN = sum (1 - p) t. 'min': I = sum
            min(p, t), FP = sum max(p - t, 0), FN = sum max(t - p, 0), which is 0 loss for soft targets that are met;
            equal ones share the derivative. 'squared': FP = sum p (p - t), FN = sum t (t - p), so that dice has (sum
            p^2 + sum t^2) / 2 for denominator. One of 'product', 'min', 'squared'. Default 'product'.
        gamma_over: Base of the exponent `gamma`: the loss of each 'group', or their 'mean'. One of 'group', 'mean'.
            Default 'group'.
        log_loss: If True, the loss of a group is -log max(S, log_floor) instead of offset - S. Default False.
        absent: Groups without a true voxel. 'skip': neither in the sum nor in its divisor. 'zero': their loss is 0, and
            counts. 'keep': the formula, in which smoothing decides. One of 'skip', 'zero', 'keep'. Default None: what
            `preset` sets, or 'skip'.
        weight_in: Place of `class_weight`: the 'loss' of a class's group; or the 'score', in which I, FP and FN of each
            class are multiplied before classes are pooled. One of 'loss', 'score'. Default 'loss'.
        weighting: Weights of classes that are pooled, by the number T of true voxels: 'square' 1 / T^2, 'simple' 1 / T,
            'uniform' none. A class with T = 0 has the largest weight among the others of its group. Weights have no
            gradient. One of 'uniform', 'simple', 'square'. Default 'uniform'.
        mean_of_weights: If True, a mean divides by the sum of the class weights of the groups in it, not by their
            number. Default False.
        average: Order of a mean: over all 'groups' at once; or over those of each sample, then over the 'samples' that
            have a group. One of 'groups', 'samples'. Default 'groups'.
        include_background: If False, class 0 has no region; it stays in the softmax. Default True.
        focal_over: The focal loss of every class's logit alone, or that of the label's probability under a softmax. One
            of 'sigmoid', 'softmax'. Default 'sigmoid'.
        empty: Loss of a sample without a group that counts, with average='samples'. Default None: such a sample is left
            out.
        class_weight: Weight of each class, of shape (C,), whether or not the background has a region; without a
            gradient. A group of weight 0 counts for nothing, even if it is NaN. Default None, no weights.
        weight: Weight of each class in the loss of voxels, of shape (C,), without a gradient. Default None, no weights.
        ignore_index: Label of voxels that do not count. Their logits are not used, and their gradients are 0, even if
            they are NaN. Default -100.
        class_dim: Dimension of the classes, from either end. Of the others the first is that of samples. Default 1.
        mask: Bool array that broadcasts to the shape of the voxels, (N, ...), True where a voxel counts. Default None,
            no mask.
        preset: Settings of a library or paper, one of 'monai'; arguments that are passed as well take precedence.
            Default None, the defaults listed here.
        reduction: One of 'mean'; see Returns. Default 'mean'.
        out_dtype: Floating dtype of the result, of torch, of NumPy or by name. Default None, the promoted dtype of the
            operands.
        check_targets: When a label that is neither a class nor `ignore_index` raises: 'lazy' at a later call of a loss
            (at once on the CPU), 'sync' at once, for which the call waits for the GPU, 'off' never. The loss of its
            sample is NaN in any case, and memory is not read out of bounds. Default 'lazy'.

    Returns:
        One number, of the library and on the device of `input`, in the promoted dtype of the operands (float32 under
        autocast) unless `out_dtype` is given. The loss of regions is averaged over the groups that count, that of
        voxels over the voxels that do. A mean of nothing is NaN, with gradients of 0.

    Gradient:
        `input` and a floating `target` are differentiable; class weights are constants. A denominator of 0 has gradient
        0, and S = 1 if no voxel is true, 0 otherwise. At the bound `floor` the denominator follows the operands; a base
        of 0 under an exponent below 1 has gradient 0. Where the loss of a group is NaN, so is the gradient of all of
        its voxels.

    Raises:
        TypeError: An operand is not an array, or has a dtype that the loss does not take (floating ones are float16,
            bfloat16, float32 and float64); operands come from several libraries, other than torch and CuPy on a GPU; an
            option has the wrong type.
        ValueError: Shapes do not fit, operands are on different devices, or an option is out of range.
        ImportError: The operands are on a GPU, and CuPy is not installed.
        cupylosses.KernelError: A kernel cannot be compiled or loaded.
        IndexError: A label is neither a class nor `ignore_index`; see `check_targets`.

    Example:
        >>> import torch
        >>> import cupylosses.functional as F
        >>> input = torch.tensor([[[2.0, 1.0, -1.0, 0.5], [0.0, 1.5, 0.5, -0.5]]], requires_grad=True)
        >>> target = torch.tensor([[0, 1, 1, 0]])
        >>> loss = F.dice_focal_loss(input, target)
        >>> round(loss.item(), 3)
        0.376
        >>> loss.backward()  # input.grad holds the gradient

    References:
        F. Milletari, N. Navab, S.-A. Ahmadi, V-Net: fully convolutional neural networks for volumetric medical image
            segmentation, 3DV 2016.
        T.-Y. Lin, P. Goyal, R. Girshick, K. He, P. Dollár, Focal loss for dense object detection, ICCV 2017.
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
    """Squared error; mean squared error with the default reduction.

        (input - target)^2

    Drop-in replacement for ``torch.nn.functional.mse_loss``.

    Args:
        input: The prediction. Any shape that broadcasts with the other operands; floating, integer or bool. Domain: any
            number.
        target: The ground truth. Any shape that broadcasts with the other operands; floating, integer or bool. Domain:
            any number.
        reduction: One of 'none', 'mean', 'sum', 'batchmean', 'weighted_mean'; see Returns. Default 'mean'.
        weight: Factor of each element: a number, or an array that broadcasts with the operands; differentiable. An
            element of weight 0 contributes nothing to the value and the gradients of the operands, even if it is NaN.
            Default None, no weights.
        mask: Bool array that broadcasts with the operands, True where an element counts. The others contribute nothing
            to value, gradients and the count of a mean, even if they are NaN. Default None, no mask.
        normalizer: Number, or array of one number without a gradient, that replaces the divisor of a mean, such as the
            number of tokens of all accumulated batches. Default None.
        dim: Dimension of the broadcast shape, or tuple of dimensions, to reduce over with 'mean', 'sum' or
            'weighted_mean'; the others are kept. Default None, all dimensions.
        out_dtype: Floating dtype of the result, of torch, of NumPy or by name. Default None, the promoted dtype of the
            operands.
        size_average, reduce: torch's deprecated arguments; they warn and decide the reduction.

    Returns:
        With reduction 'none' an array of the broadcast shape. Otherwise an array without dimensions, or with `dim` of
        the dimensions that are kept. 'mean' divides the sum by the number of elements that the mask keeps,
        'weighted_mean' by the sum of their weights, 'batchmean' by the size of the first dimension. As in torch, and
        unlike in other losses, 'mean' with a weight is 'weighted_mean'. A mean of nothing is NaN, with gradients of 0.
        The result belongs to the library and the device of the first operand, and has the promoted dtype of all
        operands unless `out_dtype` is given.

    Gradient:
        Every floating operand is differentiable. The loss is differentiable everywhere. Where the loss is NaN, so is
        the gradient.

    Raises:
        TypeError: An operand is not an array, or has a dtype that the loss does not take (floating ones are float16,
            bfloat16, float32 and float64); operands come from several libraries, other than torch and CuPy on a GPU; an
            option has the wrong type.
        ValueError: Shapes do not broadcast, operands are on different devices, or an option is out of range.
        ImportError: The operands are on a GPU, and CuPy is not installed.
        cupylosses.KernelError: A kernel cannot be compiled or loaded.

    Example:
        >>> import torch
        >>> import cupylosses.functional as F
        >>> input = torch.tensor([0.5, -1.25, 2.0], requires_grad=True)
        >>> target = torch.tensor([1.0, -1.0, 0.25])
        >>> loss = F.mse_loss(input, target)
        >>> round(loss.item(), 3)
        1.125
        >>> loss.backward()  # input.grad holds the gradient

    References:
        C. F. Gauss, Theoria combinationis observationum, 1823.
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
    """Absolute error; mean absolute error with the default reduction.

        |input - target|

    Drop-in replacement for ``torch.nn.functional.l1_loss``.

    Args:
        input: The prediction. Any shape that broadcasts with the other operands; floating, integer or bool. Domain: any
            number.
        target: The ground truth. Any shape that broadcasts with the other operands; floating, integer or bool. Domain:
            any number.
        reduction: One of 'none', 'mean', 'sum', 'batchmean', 'weighted_mean'; see Returns. Default 'mean'.
        weight: Factor of each element: a number, or an array that broadcasts with the operands; differentiable. An
            element of weight 0 contributes nothing to the value and the gradients of the operands, even if it is NaN.
            Default None, no weights.
        mask: Bool array that broadcasts with the operands, True where an element counts. The others contribute nothing
            to value, gradients and the count of a mean, even if they are NaN. Default None, no mask.
        normalizer: Number, or array of one number without a gradient, that replaces the divisor of a mean, such as the
            number of tokens of all accumulated batches. Default None.
        dim: Dimension of the broadcast shape, or tuple of dimensions, to reduce over with 'mean', 'sum' or
            'weighted_mean'; the others are kept. Default None, all dimensions.
        out_dtype: Floating dtype of the result, of torch, of NumPy or by name. Default None, the promoted dtype of the
            operands.
        size_average, reduce: torch's deprecated arguments; they warn and decide the reduction.

    Returns:
        With reduction 'none' an array of the broadcast shape. Otherwise an array without dimensions, or with `dim` of
        the dimensions that are kept. 'mean' divides the sum by the number of elements that the mask keeps,
        'weighted_mean' by the sum of their weights, 'batchmean' by the size of the first dimension. As in torch, and
        unlike in other losses, 'mean' with a weight is 'weighted_mean'. A mean of nothing is NaN, with gradients of 0.
        The result belongs to the library and the device of the first operand, and has the promoted dtype of all
        operands unless `out_dtype` is given.

    Gradient:
        Every floating operand is differentiable. At input = target the gradient is 0. Where the loss is NaN, so is the
        gradient.

    Raises:
        TypeError: An operand is not an array, or has a dtype that the loss does not take (floating ones are float16,
            bfloat16, float32 and float64); operands come from several libraries, other than torch and CuPy on a GPU; an
            option has the wrong type.
        ValueError: Shapes do not broadcast, operands are on different devices, or an option is out of range.
        ImportError: The operands are on a GPU, and CuPy is not installed.
        cupylosses.KernelError: A kernel cannot be compiled or loaded.

    Example:
        >>> import torch
        >>> import cupylosses.functional as F
        >>> input = torch.tensor([0.5, -1.25, 2.0], requires_grad=True)
        >>> target = torch.tensor([1.0, -1.0, 0.25])
        >>> loss = F.l1_loss(input, target)
        >>> round(loss.item(), 3)
        0.833
        >>> loss.backward()  # input.grad holds the gradient

    References:
        P. S. Laplace, Theorie analytique des probabilites, 1812.
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
    """Smooth L1 loss: squared error for small differences, absolute error for large ones.

        d^2 / (2 beta) where d < beta, else d - beta / 2, with d = |input - target|

    Drop-in replacement for ``torch.nn.functional.smooth_l1_loss``.

    Args:
        input: The prediction. Any shape that broadcasts with the other operands; floating, integer or bool. Domain: any
            number.
        target: The ground truth. Any shape that broadcasts with the other operands; floating, integer or bool. Domain:
            any number.
        reduction: One of 'none', 'mean', 'sum', 'batchmean', 'weighted_mean'; see Returns. Default 'mean'.
        beta: Difference at which the two branches meet; 0 gives `l1_loss`. Must be a number >= 0. Default 1.0.
        weight: Factor of each element: a number, or an array that broadcasts with the operands; differentiable. An
            element of weight 0 contributes nothing to the value and the gradients of the operands, even if it is NaN.
            Default None, no weights.
        mask: Bool array that broadcasts with the operands, True where an element counts. The others contribute nothing
            to value, gradients and the count of a mean, even if they are NaN. Default None, no mask.
        normalizer: Number, or array of one number without a gradient, that replaces the divisor of a mean, such as the
            number of tokens of all accumulated batches. Default None.
        dim: Dimension of the broadcast shape, or tuple of dimensions, to reduce over with 'mean', 'sum' or
            'weighted_mean'; the others are kept. Default None, all dimensions.
        out_dtype: Floating dtype of the result, of torch, of NumPy or by name. Default None, the promoted dtype of the
            operands.
        size_average, reduce: torch's deprecated arguments; they warn and decide the reduction.

    Returns:
        With reduction 'none' an array of the broadcast shape. Otherwise an array without dimensions, or with `dim` of
        the dimensions that are kept. 'mean' divides the sum by the number of elements that the mask keeps,
        'weighted_mean' by the sum of their weights, 'batchmean' by the size of the first dimension. A mean of nothing
        is NaN, with gradients of 0. The result belongs to the library and the device of the first operand, and has the
        promoted dtype of all operands unless `out_dtype` is given.

    Gradient:
        Every floating operand is differentiable. At d = beta both branches have slope 1. With beta = 0, the gradient at
        input = target is 0. Where the loss is NaN, so is the gradient.

    Raises:
        TypeError: An operand is not an array, or has a dtype that the loss does not take (floating ones are float16,
            bfloat16, float32 and float64); operands come from several libraries, other than torch and CuPy on a GPU; an
            option has the wrong type.
        ValueError: Shapes do not broadcast, operands are on different devices, or an option is out of range.
        ImportError: The operands are on a GPU, and CuPy is not installed.
        cupylosses.KernelError: A kernel cannot be compiled or loaded.

    Example:
        >>> import torch
        >>> import cupylosses.functional as F
        >>> input = torch.tensor([0.5, -1.25, 2.0], requires_grad=True)
        >>> target = torch.tensor([1.0, -1.0, 0.25])
        >>> loss = F.smooth_l1_loss(input, target)
        >>> round(loss.item(), 3)
        0.469
        >>> loss.backward()  # input.grad holds the gradient

    References:
        R. Girshick, Fast R-CNN, ICCV 2015.
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
    """Huber loss: squared error for small differences, absolute error scaled by delta for large ones.

        d^2 / 2 where d <= delta, else delta (d - delta / 2), with d = |input - target|

    Drop-in replacement for ``torch.nn.functional.huber_loss``.

    Args:
        input: The prediction. Any shape that broadcasts with the other operands; floating, integer or bool. Domain: any
            number.
        target: The ground truth. Any shape that broadcasts with the other operands; floating, integer or bool. Domain:
            any number.
        reduction: One of 'none', 'mean', 'sum', 'batchmean', 'weighted_mean'; see Returns. Default 'mean'.
        delta: Difference at which the two branches meet. Must be a number > 0. Default 1.0.
        weight: Factor of each element: a number, or an array that broadcasts with the operands; differentiable. An
            element of weight 0 contributes nothing to the value and the gradients of the operands, even if it is NaN.
            Default None, no weights.
        mask: Bool array that broadcasts with the operands, True where an element counts. The others contribute nothing
            to value, gradients and the count of a mean, even if they are NaN. Default None, no mask.
        normalizer: Number, or array of one number without a gradient, that replaces the divisor of a mean, such as the
            number of tokens of all accumulated batches. Default None.
        dim: Dimension of the broadcast shape, or tuple of dimensions, to reduce over with 'mean', 'sum' or
            'weighted_mean'; the others are kept. Default None, all dimensions.
        out_dtype: Floating dtype of the result, of torch, of NumPy or by name. Default None, the promoted dtype of the
            operands.

    Returns:
        With reduction 'none' an array of the broadcast shape. Otherwise an array without dimensions, or with `dim` of
        the dimensions that are kept. 'mean' divides the sum by the number of elements that the mask keeps,
        'weighted_mean' by the sum of their weights, 'batchmean' by the size of the first dimension. A mean of nothing
        is NaN, with gradients of 0. The result belongs to the library and the device of the first operand, and has the
        promoted dtype of all operands unless `out_dtype` is given.

    Gradient:
        Every floating operand is differentiable. At d = delta both branches have slope delta. Where the loss is NaN, so
        is the gradient.

    Raises:
        TypeError: An operand is not an array, or has a dtype that the loss does not take (floating ones are float16,
            bfloat16, float32 and float64); operands come from several libraries, other than torch and CuPy on a GPU; an
            option has the wrong type.
        ValueError: Shapes do not broadcast, operands are on different devices, or an option is out of range.
        ImportError: The operands are on a GPU, and CuPy is not installed.
        cupylosses.KernelError: A kernel cannot be compiled or loaded.

    Example:
        >>> import torch
        >>> import cupylosses.functional as F
        >>> input = torch.tensor([0.5, -1.25, 2.0], requires_grad=True)
        >>> target = torch.tensor([1.0, -1.0, 0.25])
        >>> loss = F.huber_loss(input, target)
        >>> round(loss.item(), 3)
        0.469
        >>> loss.backward()  # input.grad holds the gradient

    References:
        P. J. Huber, Robust estimation of a location parameter, Annals of Mathematical Statistics 35, 1964.
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
    """Squared logarithmic error; mean squared logarithmic error (MSLE) with the default reduction.

        (log(1 + input) - log(1 + target))^2

    Keras clamps both operands to at least 1e-7, which hides negative predictions and gives them no gradient. Here,
    numbers between -1 and 0 are used as they are, and smaller ones give NaN.

    Args:
        input: The prediction; the loss is NaN below -1. Any shape that broadcasts with the other operands; floating,
            integer or bool. Domain: [0, inf).
        target: The ground truth; the loss is NaN below -1. Any shape that broadcasts with the other operands; floating,
            integer or bool. Domain: [0, inf).
        reduction: One of 'none', 'mean', 'sum', 'batchmean', 'weighted_mean'; see Returns. Default 'mean'.
        weight: Factor of each element: a number, or an array that broadcasts with the operands; differentiable. An
            element of weight 0 contributes nothing to the value and the gradients of the operands, even if it is NaN.
            Default None, no weights.
        mask: Bool array that broadcasts with the operands, True where an element counts. The others contribute nothing
            to value, gradients and the count of a mean, even if they are NaN. Default None, no mask.
        normalizer: Number, or array of one number without a gradient, that replaces the divisor of a mean, such as the
            number of tokens of all accumulated batches. Default None.
        dim: Dimension of the broadcast shape, or tuple of dimensions, to reduce over with 'mean', 'sum' or
            'weighted_mean'; the others are kept. Default None, all dimensions.
        out_dtype: Floating dtype of the result, of torch, of NumPy or by name. Default None, the promoted dtype of the
            operands.

    Returns:
        With reduction 'none' an array of the broadcast shape. Otherwise an array without dimensions, or with `dim` of
        the dimensions that are kept. 'mean' divides the sum by the number of elements that the mask keeps,
        'weighted_mean' by the sum of their weights, 'batchmean' by the size of the first dimension. A mean of nothing
        is NaN, with gradients of 0. The result belongs to the library and the device of the first operand, and has the
        promoted dtype of all operands unless `out_dtype` is given.

    Gradient:
        Every floating operand is differentiable. The loss is differentiable everywhere. Where the loss is NaN, so is
        the gradient.

    Raises:
        TypeError: An operand is not an array, or has a dtype that the loss does not take (floating ones are float16,
            bfloat16, float32 and float64); operands come from several libraries, other than torch and CuPy on a GPU; an
            option has the wrong type.
        ValueError: Shapes do not broadcast, operands are on different devices, or an option is out of range.
        ImportError: The operands are on a GPU, and CuPy is not installed.
        cupylosses.KernelError: A kernel cannot be compiled or loaded.

    Example:
        >>> import torch
        >>> import cupylosses.functional as F
        >>> input = torch.tensor([0.5, 1.0, 3.0], requires_grad=True)
        >>> target = torch.tensor([1.0, 0.0, 4.0])
        >>> loss = F.msle_loss(input, target)
        >>> round(loss.item(), 3)
        0.204
        >>> loss.backward()  # input.grad holds the gradient

    References:
        J. W. Tukey, Exploratory Data Analysis, 1977, for the started logarithm.
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
    """Absolute percentage error; mean absolute percentage error (MAPE) with the default reduction.

        100 |target - input| / max(|target|, epsilon)

    The default of epsilon is that of Keras.

    Args:
        input: The prediction. Any shape that broadcasts with the other operands; floating, integer or bool. Domain: any
            number.
        target: The ground truth. Any shape that broadcasts with the other operands; floating, integer or bool. Domain:
            any number.
        epsilon: Lower bound of the denominator. Must be a number > 0. Default 1e-07.
        reduction: One of 'none', 'mean', 'sum', 'batchmean', 'weighted_mean'; see Returns. Default 'mean'.
        weight: Factor of each element: a number, or an array that broadcasts with the operands; differentiable. An
            element of weight 0 contributes nothing to the value and the gradients of the operands, even if it is NaN.
            Default None, no weights.
        mask: Bool array that broadcasts with the operands, True where an element counts. The others contribute nothing
            to value, gradients and the count of a mean, even if they are NaN. Default None, no mask.
        normalizer: Number, or array of one number without a gradient, that replaces the divisor of a mean, such as the
            number of tokens of all accumulated batches. Default None.
        dim: Dimension of the broadcast shape, or tuple of dimensions, to reduce over with 'mean', 'sum' or
            'weighted_mean'; the others are kept. Default None, all dimensions.
        out_dtype: Floating dtype of the result, of torch, of NumPy or by name. Default None, the promoted dtype of the
            operands.

    Returns:
        With reduction 'none' an array of the broadcast shape. Otherwise an array without dimensions, or with `dim` of
        the dimensions that are kept. 'mean' divides the sum by the number of elements that the mask keeps,
        'weighted_mean' by the sum of their weights, 'batchmean' by the size of the first dimension. A mean of nothing
        is NaN, with gradients of 0. The result belongs to the library and the device of the first operand, and has the
        promoted dtype of all operands unless `out_dtype` is given.

    Gradient:
        Every floating operand is differentiable. At input = target the gradient is 0. At |target| = epsilon the
        denominator is treated as constant. Where the loss is NaN, so is the gradient.

    Raises:
        TypeError: An operand is not an array, or has a dtype that the loss does not take (floating ones are float16,
            bfloat16, float32 and float64); operands come from several libraries, other than torch and CuPy on a GPU; an
            option has the wrong type.
        ValueError: Shapes do not broadcast, operands are on different devices, or an option is out of range.
        ImportError: The operands are on a GPU, and CuPy is not installed.
        cupylosses.KernelError: A kernel cannot be compiled or loaded.

    Example:
        >>> import torch
        >>> import cupylosses.functional as F
        >>> input = torch.tensor([0.5, -1.25, 2.0], requires_grad=True)
        >>> target = torch.tensor([1.0, -1.0, 0.25])
        >>> loss = F.mape_loss(input, target)
        >>> round(loss.item(), 3)
        258.333
        >>> loss.backward()  # input.grad holds the gradient

    References:
        S. Makridakis, Accuracy measures: theoretical and practical concerns, International Journal of Forecasting 9,
            1993.
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
    """Log-cosh loss: half the squared error for small differences, the absolute error for large ones.

        log(cosh(input - target))

    Args:
        input: The prediction. Any shape that broadcasts with the other operands; floating, integer or bool. Domain: any
            number.
        target: The ground truth. Any shape that broadcasts with the other operands; floating, integer or bool. Domain:
            any number.
        reduction: One of 'none', 'mean', 'sum', 'batchmean', 'weighted_mean'; see Returns. Default 'mean'.
        weight: Factor of each element: a number, or an array that broadcasts with the operands; differentiable. An
            element of weight 0 contributes nothing to the value and the gradients of the operands, even if it is NaN.
            Default None, no weights.
        mask: Bool array that broadcasts with the operands, True where an element counts. The others contribute nothing
            to value, gradients and the count of a mean, even if they are NaN. Default None, no mask.
        normalizer: Number, or array of one number without a gradient, that replaces the divisor of a mean, such as the
            number of tokens of all accumulated batches. Default None.
        dim: Dimension of the broadcast shape, or tuple of dimensions, to reduce over with 'mean', 'sum' or
            'weighted_mean'; the others are kept. Default None, all dimensions.
        out_dtype: Floating dtype of the result, of torch, of NumPy or by name. Default None, the promoted dtype of the
            operands.

    Returns:
        With reduction 'none' an array of the broadcast shape. Otherwise an array without dimensions, or with `dim` of
        the dimensions that are kept. 'mean' divides the sum by the number of elements that the mask keeps,
        'weighted_mean' by the sum of their weights, 'batchmean' by the size of the first dimension. A mean of nothing
        is NaN, with gradients of 0. The result belongs to the library and the device of the first operand, and has the
        promoted dtype of all operands unless `out_dtype` is given.

    Gradient:
        Every floating operand is differentiable. The loss is differentiable everywhere. Where the loss is NaN, so is
        the gradient.

    Raises:
        TypeError: An operand is not an array, or has a dtype that the loss does not take (floating ones are float16,
            bfloat16, float32 and float64); operands come from several libraries, other than torch and CuPy on a GPU; an
            option has the wrong type.
        ValueError: Shapes do not broadcast, operands are on different devices, or an option is out of range.
        ImportError: The operands are on a GPU, and CuPy is not installed.
        cupylosses.KernelError: A kernel cannot be compiled or loaded.

    Example:
        >>> import torch
        >>> import cupylosses.functional as F
        >>> input = torch.tensor([0.5, -1.25, 2.0], requires_grad=True)
        >>> target = torch.tensor([1.0, -1.0, 0.25])
        >>> loss = F.log_cosh_loss(input, target)
        >>> round(loss.item(), 3)
        0.413
        >>> loss.backward()  # input.grad holds the gradient

    References:
        P. J. Green, Bayesian reconstructions from emission tomography data using a modified EM algorithm, IEEE
            Transactions on Medical Imaging 9, 1990.
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
    """Charbonnier loss, a smooth absolute error, also known as the pseudo-Huber loss.

        sqrt(r^2 + 1) - 1, with r = (input - target) / scale

    Scaled as by kornia. The common form sqrt(d^2 + epsilon^2) is epsilon times this loss, plus epsilon, with scale =
    epsilon. Equals `general_robust_loss` with alpha = 1.

    Args:
        input: The prediction. Any shape that broadcasts with the other operands; floating, integer or bool. Domain: any
            number.
        target: The ground truth. Any shape that broadcasts with the other operands; floating, integer or bool. Domain:
            any number.
        scale: Scale of the residual, around which differences become outliers. Must be a number > 0. Default 1.0.
        reduction: One of 'none', 'mean', 'sum', 'batchmean', 'weighted_mean'; see Returns. Default 'mean'.
        weight: Factor of each element: a number, or an array that broadcasts with the operands; differentiable. An
            element of weight 0 contributes nothing to the value and the gradients of the operands, even if it is NaN.
            Default None, no weights.
        mask: Bool array that broadcasts with the operands, True where an element counts. The others contribute nothing
            to value, gradients and the count of a mean, even if they are NaN. Default None, no mask.
        normalizer: Number, or array of one number without a gradient, that replaces the divisor of a mean, such as the
            number of tokens of all accumulated batches. Default None.
        dim: Dimension of the broadcast shape, or tuple of dimensions, to reduce over with 'mean', 'sum' or
            'weighted_mean'; the others are kept. Default None, all dimensions.
        out_dtype: Floating dtype of the result, of torch, of NumPy or by name. Default None, the promoted dtype of the
            operands.

    Returns:
        With reduction 'none' an array of the broadcast shape. Otherwise an array without dimensions, or with `dim` of
        the dimensions that are kept. 'mean' divides the sum by the number of elements that the mask keeps,
        'weighted_mean' by the sum of their weights, 'batchmean' by the size of the first dimension. A mean of nothing
        is NaN, with gradients of 0. The result belongs to the library and the device of the first operand, and has the
        promoted dtype of all operands unless `out_dtype` is given.

    Gradient:
        Every floating operand is differentiable. The loss is differentiable everywhere. Where the loss is NaN, so is
        the gradient.

    Raises:
        TypeError: An operand is not an array, or has a dtype that the loss does not take (floating ones are float16,
            bfloat16, float32 and float64); operands come from several libraries, other than torch and CuPy on a GPU; an
            option has the wrong type.
        ValueError: Shapes do not broadcast, operands are on different devices, or an option is out of range.
        ImportError: The operands are on a GPU, and CuPy is not installed.
        cupylosses.KernelError: A kernel cannot be compiled or loaded.

    Example:
        >>> import torch
        >>> import cupylosses.functional as F
        >>> input = torch.tensor([0.5, -1.25, 2.0], requires_grad=True)
        >>> target = torch.tensor([1.0, -1.0, 0.25])
        >>> loss = F.charbonnier_loss(input, target)
        >>> round(loss.item(), 3)
        0.388
        >>> loss.backward()  # input.grad holds the gradient

    References:
        P. Charbonnier, L. Blanc-Feraud, G. Aubert, M. Barlaud, Two deterministic half-quadratic regularization
            algorithms for computed imaging, ICIP 1994.
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
    """Cauchy loss, the negative log-likelihood of a Cauchy distribution; also known as the Lorentzian loss.

        log(1 + r^2 / 2), with r = (input - target) / scale

    Scaled as by kornia and Barron. Equals `general_robust_loss` with alpha = 0.

    Args:
        input: The prediction. Any shape that broadcasts with the other operands; floating, integer or bool. Domain: any
            number.
        target: The ground truth. Any shape that broadcasts with the other operands; floating, integer or bool. Domain:
            any number.
        scale: Scale of the residual, around which differences become outliers. Must be a number > 0. Default 1.0.
        reduction: One of 'none', 'mean', 'sum', 'batchmean', 'weighted_mean'; see Returns. Default 'mean'.
        weight: Factor of each element: a number, or an array that broadcasts with the operands; differentiable. An
            element of weight 0 contributes nothing to the value and the gradients of the operands, even if it is NaN.
            Default None, no weights.
        mask: Bool array that broadcasts with the operands, True where an element counts. The others contribute nothing
            to value, gradients and the count of a mean, even if they are NaN. Default None, no mask.
        normalizer: Number, or array of one number without a gradient, that replaces the divisor of a mean, such as the
            number of tokens of all accumulated batches. Default None.
        dim: Dimension of the broadcast shape, or tuple of dimensions, to reduce over with 'mean', 'sum' or
            'weighted_mean'; the others are kept. Default None, all dimensions.
        out_dtype: Floating dtype of the result, of torch, of NumPy or by name. Default None, the promoted dtype of the
            operands.

    Returns:
        With reduction 'none' an array of the broadcast shape. Otherwise an array without dimensions, or with `dim` of
        the dimensions that are kept. 'mean' divides the sum by the number of elements that the mask keeps,
        'weighted_mean' by the sum of their weights, 'batchmean' by the size of the first dimension. A mean of nothing
        is NaN, with gradients of 0. The result belongs to the library and the device of the first operand, and has the
        promoted dtype of all operands unless `out_dtype` is given.

    Gradient:
        Every floating operand is differentiable. The loss is differentiable everywhere. Where the loss is NaN, so is
        the gradient.

    Raises:
        TypeError: An operand is not an array, or has a dtype that the loss does not take (floating ones are float16,
            bfloat16, float32 and float64); operands come from several libraries, other than torch and CuPy on a GPU; an
            option has the wrong type.
        ValueError: Shapes do not broadcast, operands are on different devices, or an option is out of range.
        ImportError: The operands are on a GPU, and CuPy is not installed.
        cupylosses.KernelError: A kernel cannot be compiled or loaded.

    Example:
        >>> import torch
        >>> import cupylosses.functional as F
        >>> input = torch.tensor([0.5, -1.25, 2.0], requires_grad=True)
        >>> target = torch.tensor([1.0, -1.0, 0.25])
        >>> loss = F.cauchy_loss(input, target)
        >>> round(loss.item(), 3)
        0.359
        >>> loss.backward()  # input.grad holds the gradient

    References:
        M. J. Black, P. Anandan, The robust estimation of multiple motions: parametric and piecewise-smooth flow fields,
            Computer Vision and Image Understanding 63, 1996.
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
    """Welsch loss, an inverted Gaussian; also known as the Leclerc loss.

        1 - exp(-r^2 / 2), with r = (input - target) / scale

    Scaled as by kornia and Barron. Equals `general_robust_loss` with alpha = -inf.

    Args:
        input: The prediction. Any shape that broadcasts with the other operands; floating, integer or bool. Domain: any
            number.
        target: The ground truth. Any shape that broadcasts with the other operands; floating, integer or bool. Domain:
            any number.
        scale: Scale of the residual, around which differences become outliers. Must be a number > 0. Default 1.0.
        reduction: One of 'none', 'mean', 'sum', 'batchmean', 'weighted_mean'; see Returns. Default 'mean'.
        weight: Factor of each element: a number, or an array that broadcasts with the operands; differentiable. An
            element of weight 0 contributes nothing to the value and the gradients of the operands, even if it is NaN.
            Default None, no weights.
        mask: Bool array that broadcasts with the operands, True where an element counts. The others contribute nothing
            to value, gradients and the count of a mean, even if they are NaN. Default None, no mask.
        normalizer: Number, or array of one number without a gradient, that replaces the divisor of a mean, such as the
            number of tokens of all accumulated batches. Default None.
        dim: Dimension of the broadcast shape, or tuple of dimensions, to reduce over with 'mean', 'sum' or
            'weighted_mean'; the others are kept. Default None, all dimensions.
        out_dtype: Floating dtype of the result, of torch, of NumPy or by name. Default None, the promoted dtype of the
            operands.

    Returns:
        With reduction 'none' an array of the broadcast shape. Otherwise an array without dimensions, or with `dim` of
        the dimensions that are kept. 'mean' divides the sum by the number of elements that the mask keeps,
        'weighted_mean' by the sum of their weights, 'batchmean' by the size of the first dimension. A mean of nothing
        is NaN, with gradients of 0. The result belongs to the library and the device of the first operand, and has the
        promoted dtype of all operands unless `out_dtype` is given.

    Gradient:
        Every floating operand is differentiable. The loss is differentiable everywhere. Where the loss is NaN, so is
        the gradient.

    Raises:
        TypeError: An operand is not an array, or has a dtype that the loss does not take (floating ones are float16,
            bfloat16, float32 and float64); operands come from several libraries, other than torch and CuPy on a GPU; an
            option has the wrong type.
        ValueError: Shapes do not broadcast, operands are on different devices, or an option is out of range.
        ImportError: The operands are on a GPU, and CuPy is not installed.
        cupylosses.KernelError: A kernel cannot be compiled or loaded.

    Example:
        >>> import torch
        >>> import cupylosses.functional as F
        >>> input = torch.tensor([0.5, -1.25, 2.0], requires_grad=True)
        >>> target = torch.tensor([1.0, -1.0, 0.25])
        >>> loss = F.welsch_loss(input, target)
        >>> round(loss.item(), 3)
        0.311
        >>> loss.backward()  # input.grad holds the gradient

    References:
        J. E. Dennis, R. E. Welsch, Techniques for nonlinear least squares and robust regression, Communications in
            Statistics 7, 1978.
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
    """Geman-McClure loss, bounded by 2.

        2 r^2 / (r^2 + 4), with r = (input - target) / scale

    Scaled as by kornia and Barron. The other common form, r^2 / (r^2 + 1), is half of this loss at half the scale.
    Equals `general_robust_loss` with alpha = -2.

    Args:
        input: The prediction. Any shape that broadcasts with the other operands; floating, integer or bool. Domain: any
            number.
        target: The ground truth. Any shape that broadcasts with the other operands; floating, integer or bool. Domain:
            any number.
        scale: Scale of the residual, around which differences become outliers. Must be a number > 0. Default 1.0.
        reduction: One of 'none', 'mean', 'sum', 'batchmean', 'weighted_mean'; see Returns. Default 'mean'.
        weight: Factor of each element: a number, or an array that broadcasts with the operands; differentiable. An
            element of weight 0 contributes nothing to the value and the gradients of the operands, even if it is NaN.
            Default None, no weights.
        mask: Bool array that broadcasts with the operands, True where an element counts. The others contribute nothing
            to value, gradients and the count of a mean, even if they are NaN. Default None, no mask.
        normalizer: Number, or array of one number without a gradient, that replaces the divisor of a mean, such as the
            number of tokens of all accumulated batches. Default None.
        dim: Dimension of the broadcast shape, or tuple of dimensions, to reduce over with 'mean', 'sum' or
            'weighted_mean'; the others are kept. Default None, all dimensions.
        out_dtype: Floating dtype of the result, of torch, of NumPy or by name. Default None, the promoted dtype of the
            operands.

    Returns:
        With reduction 'none' an array of the broadcast shape. Otherwise an array without dimensions, or with `dim` of
        the dimensions that are kept. 'mean' divides the sum by the number of elements that the mask keeps,
        'weighted_mean' by the sum of their weights, 'batchmean' by the size of the first dimension. A mean of nothing
        is NaN, with gradients of 0. The result belongs to the library and the device of the first operand, and has the
        promoted dtype of all operands unless `out_dtype` is given.

    Gradient:
        Every floating operand is differentiable. The loss is differentiable everywhere. Where the loss is NaN, so is
        the gradient.

    Raises:
        TypeError: An operand is not an array, or has a dtype that the loss does not take (floating ones are float16,
            bfloat16, float32 and float64); operands come from several libraries, other than torch and CuPy on a GPU; an
            option has the wrong type.
        ValueError: Shapes do not broadcast, operands are on different devices, or an option is out of range.
        ImportError: The operands are on a GPU, and CuPy is not installed.
        cupylosses.KernelError: A kernel cannot be compiled or loaded.

    Example:
        >>> import torch
        >>> import cupylosses.functional as F
        >>> input = torch.tensor([0.5, -1.25, 2.0], requires_grad=True)
        >>> target = torch.tensor([1.0, -1.0, 0.25])
        >>> loss = F.geman_mcclure_loss(input, target)
        >>> round(loss.item(), 3)
        0.339
        >>> loss.backward()  # input.grad holds the gradient

    References:
        S. Geman, D. E. McClure, Bayesian image analysis: an application to single photon emission tomography,
            Proceedings of the Statistical Computing Section of the American Statistical Association, 1985.
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
    """Wing loss: logarithmic and steep for small differences, absolute error for large ones.

        width log(1 + d / epsilon) where d < width, else d - width + width log(1 + width / epsilon), with d = |input -
        target|

    The defaults are those of segmentation-models-pytorch; the paper uses width 10 and epsilon 2.

    Args:
        input: The prediction. Any shape that broadcasts with the other operands; floating, integer or bool. Domain: any
            number.
        target: The ground truth. Any shape that broadcasts with the other operands; floating, integer or bool. Domain:
            any number.
        width: Difference at which the two branches meet. Must be a number > 0. Default 5.0.
        epsilon: Curvature of the logarithm: the slope at 0 is width / epsilon. Must be a number > 0. Default 0.5.
        reduction: One of 'none', 'mean', 'sum', 'batchmean', 'weighted_mean'; see Returns. Default 'mean'.
        weight: Factor of each element: a number, or an array that broadcasts with the operands; differentiable. An
            element of weight 0 contributes nothing to the value and the gradients of the operands, even if it is NaN.
            Default None, no weights.
        mask: Bool array that broadcasts with the operands, True where an element counts. The others contribute nothing
            to value, gradients and the count of a mean, even if they are NaN. Default None, no mask.
        normalizer: Number, or array of one number without a gradient, that replaces the divisor of a mean, such as the
            number of tokens of all accumulated batches. Default None.
        dim: Dimension of the broadcast shape, or tuple of dimensions, to reduce over with 'mean', 'sum' or
            'weighted_mean'; the others are kept. Default None, all dimensions.
        out_dtype: Floating dtype of the result, of torch, of NumPy or by name. Default None, the promoted dtype of the
            operands.

    Returns:
        With reduction 'none' an array of the broadcast shape. Otherwise an array without dimensions, or with `dim` of
        the dimensions that are kept. 'mean' divides the sum by the number of elements that the mask keeps,
        'weighted_mean' by the sum of their weights, 'batchmean' by the size of the first dimension. A mean of nothing
        is NaN, with gradients of 0. The result belongs to the library and the device of the first operand, and has the
        promoted dtype of all operands unless `out_dtype` is given.

    Gradient:
        Every floating operand is differentiable. At input = target the gradient is 0. At d = width it is that of the
        absolute error. Where the loss is NaN, so is the gradient.

    Raises:
        TypeError: An operand is not an array, or has a dtype that the loss does not take (floating ones are float16,
            bfloat16, float32 and float64); operands come from several libraries, other than torch and CuPy on a GPU; an
            option has the wrong type.
        ValueError: Shapes do not broadcast, operands are on different devices, or an option is out of range.
        ImportError: The operands are on a GPU, and CuPy is not installed.
        cupylosses.KernelError: A kernel cannot be compiled or loaded.

    Example:
        >>> import torch
        >>> import cupylosses.functional as F
        >>> input = torch.tensor([0.5, -1.25, 2.0], requires_grad=True)
        >>> target = torch.tensor([1.0, -1.0, 0.25])
        >>> loss = F.wing_loss(input, target)
        >>> round(loss.item(), 3)
        4.338
        >>> loss.backward()  # input.grad holds the gradient

    References:
        Z.-H. Feng, J. Kittler, M. Awais, P. Huber, X.-J. Wu, Wing loss for robust facial landmark localisation with
            convolutional neural networks, CVPR 2018.
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
    """Quantile (pinball) loss: absolute error weighted differently below and above the target.

        quantile (target - input) where input < target, else (1 - quantile) (input - target)

    Args:
        input: The prediction. Any shape that broadcasts with the other operands; floating, integer or bool. Domain: any
            number.
        target: The ground truth. Any shape that broadcasts with the other operands; floating, integer or bool. Domain:
            any number.
        quantile: The quantile to predict. Must be a number > 0 and < 1. Default 0.5.
        reduction: One of 'none', 'mean', 'sum', 'batchmean', 'weighted_mean'; see Returns. Default 'mean'.
        weight: Factor of each element: a number, or an array that broadcasts with the operands; differentiable. An
            element of weight 0 contributes nothing to the value and the gradients of the operands, even if it is NaN.
            Default None, no weights.
        mask: Bool array that broadcasts with the operands, True where an element counts. The others contribute nothing
            to value, gradients and the count of a mean, even if they are NaN. Default None, no mask.
        normalizer: Number, or array of one number without a gradient, that replaces the divisor of a mean, such as the
            number of tokens of all accumulated batches. Default None.
        dim: Dimension of the broadcast shape, or tuple of dimensions, to reduce over with 'mean', 'sum' or
            'weighted_mean'; the others are kept. Default None, all dimensions.
        out_dtype: Floating dtype of the result, of torch, of NumPy or by name. Default None, the promoted dtype of the
            operands.

    Returns:
        With reduction 'none' an array of the broadcast shape. Otherwise an array without dimensions, or with `dim` of
        the dimensions that are kept. 'mean' divides the sum by the number of elements that the mask keeps,
        'weighted_mean' by the sum of their weights, 'batchmean' by the size of the first dimension. A mean of nothing
        is NaN, with gradients of 0. The result belongs to the library and the device of the first operand, and has the
        promoted dtype of all operands unless `out_dtype` is given.

    Gradient:
        Every floating operand is differentiable. At input = target the gradient is 0. Where the loss is NaN, so is the
        gradient.

    Raises:
        TypeError: An operand is not an array, or has a dtype that the loss does not take (floating ones are float16,
            bfloat16, float32 and float64); operands come from several libraries, other than torch and CuPy on a GPU; an
            option has the wrong type.
        ValueError: Shapes do not broadcast, operands are on different devices, or an option is out of range.
        ImportError: The operands are on a GPU, and CuPy is not installed.
        cupylosses.KernelError: A kernel cannot be compiled or loaded.

    Example:
        >>> import torch
        >>> import cupylosses.functional as F
        >>> input = torch.tensor([0.5, -1.25, 2.0], requires_grad=True)
        >>> target = torch.tensor([1.0, -1.0, 0.25])
        >>> loss = F.quantile_loss(input, target)
        >>> round(loss.item(), 3)
        0.417
        >>> loss.backward()  # input.grad holds the gradient

    References:
        R. Koenker, G. Bassett, Regression quantiles, Econometrica 46, 1978.
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
    """Barron's general and adaptive robust loss; the smaller `alpha`, the less an outlier matters.

        (b / alpha) ((r^2 / b + 1)^(alpha / 2) - 1), with b = |alpha - 2| and r = (input - target) / scale

    alpha = 2 gives half the squared error, 1 `charbonnier_loss`, 0 `cauchy_loss`, -2 `geman_mcclure_loss` and -inf
    `welsch_loss`. These limits are exact, and values and derivatives near them are as accurate as elsewhere. The loss
    is NaN for an infinite difference and for a scale that is not positive. To learn `alpha` and `scale`, add log(scale)
    and the logarithm of the partition function, which depends on `alpha`.

    Args:
        input: The prediction. Any shape that broadcasts with the other operands; floating, integer or bool. Domain: any
            number.
        target: The ground truth. Any shape that broadcasts with the other operands; floating, integer or bool. Domain:
            any number.
        alpha: The shape; infinities are allowed. Any shape that broadcasts with the other operands; floating, integer
            or bool, or a number. Domain: any number. Default 1.
        scale: The scale of the residual, around which differences become outliers. Any shape that broadcasts with the
            other operands; floating, or a number. Domain: (0, inf). Default 1.
        reduction: One of 'none', 'mean', 'sum', 'batchmean', 'weighted_mean'; see Returns. Default 'mean'.
        weight: Factor of each element: a number, or an array that broadcasts with the operands; differentiable. An
            element of weight 0 contributes nothing to the value and the gradients of the operands, even if it is NaN.
            Default None, no weights.
        mask: Bool array that broadcasts with the operands, True where an element counts. The others contribute nothing
            to value, gradients and the count of a mean, even if they are NaN. Default None, no mask.
        normalizer: Number, or array of one number without a gradient, that replaces the divisor of a mean, such as the
            number of tokens of all accumulated batches. Default None.
        dim: Dimension of the broadcast shape, or tuple of dimensions, to reduce over with 'mean', 'sum' or
            'weighted_mean'; the others are kept. Default None, all dimensions.
        out_dtype: Floating dtype of the result, of torch, of NumPy or by name. Default None, the promoted dtype of the
            operands.

    Returns:
        With reduction 'none' an array of the broadcast shape. Otherwise an array without dimensions, or with `dim` of
        the dimensions that are kept. 'mean' divides the sum by the number of elements that the mask keeps,
        'weighted_mean' by the sum of their weights, 'batchmean' by the size of the first dimension. A mean of nothing
        is NaN, with gradients of 0. The result belongs to the library and the device of the first operand, and has the
        promoted dtype of all operands unless `out_dtype` is given.

    Gradient:
        Every floating operand is differentiable. The derivative with respect to `alpha` is 0 at alpha = 2, where the
        true one is infinite, and where |alpha| exceeds 2^60, which is treated as infinite. Where the loss is NaN, so is
        the gradient.

    Raises:
        TypeError: An operand is not an array, or has a dtype that the loss does not take (floating ones are float16,
            bfloat16, float32 and float64); operands come from several libraries, other than torch and CuPy on a GPU; an
            option has the wrong type.
        ValueError: Shapes do not broadcast, operands are on different devices, or an option is out of range.
        ImportError: The operands are on a GPU, and CuPy is not installed.
        cupylosses.KernelError: A kernel cannot be compiled or loaded.

    Example:
        >>> import torch
        >>> import cupylosses.functional as F
        >>> input = torch.tensor([0.5, -1.25, 2.0], requires_grad=True)
        >>> target = torch.tensor([1.0, -1.0, 0.25])
        >>> loss = F.general_robust_loss(input, target)
        >>> round(loss.item(), 3)
        0.388
        >>> loss.backward()  # input.grad holds the gradient

    References:
        J. T. Barron, A general and adaptive robust loss function, CVPR 2019.
    """

def multi_margin_loss(
    input: _Array,
    target: _Exchangeable,
    p: Literal[1, 2] = 1,
    margin: float = 1.0,
    weight: _Exchangeable | None = None,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: _RowReduction = "mean",
    *,
    ignore_index: int = -100,
    class_dim: int | None = None,
    mask: _Exchangeable | None = None,
    normalizer: _Exchangeable | float | None = None,
    out_dtype: Any = None,
    check_targets: _Check = "lazy",
) -> _Array:
    """Multi-class hinge loss: the score of the label should exceed every other score by a margin.

        (w_y / C) sum_{i != y} max(0, margin + input_i - input_y)^p

    with y the label, w_c the class weights, 1 by default, and C the number of classes.

    The margin is added to the difference of two scores, so that large scores do not swallow it, as they do in torch.

    Drop-in replacement for ``torch.nn.functional.multi_margin_loss``.

    Args:
        input: The predicted scores of the classes. Shape (N, C), (C,), or any shape with the classes in `class_dim`;
            floating. Domain: any number.
        target: Class indices of any integer dtype, in the shape of `input` without its class dimension.
        p: Power of each hinge. One of 1, 2. Default 1.
        margin: Amount by which a label should exceed each other class. Must be a number, not NaN. Default 1.0.
        weight: Weight w_c of each class, floating, of shape (C,), without a gradient. It multiplies the loss of the
            row, which with a weight of 0 is 0 whatever the row holds. Default None, no weights.
        reduction: One of 'none', 'mean', 'sum', 'batchmean'; see Returns. Default 'mean'.
        ignore_index: Label of rows that do not count. Their scores are not read, and their gradients are 0. Default
            -100.
        class_dim: Dimension of the classes, from either end. Default None: 1, or 0 for a single row.
        mask: Bool array that broadcasts to the shape of the rows, True where a row counts. The scores of the others are
            not read, their gradients are 0, and a mean does not count them. Default None, no mask.
        normalizer: Number, or array of one number without a gradient, that replaces the divisor of a mean, such as the
            number of tokens of all accumulated batches. Default None.
        out_dtype: Floating dtype of the result, of torch, of NumPy or by name. Default None, the promoted dtype of the
            operands.
        check_targets: When a label that is neither a class nor `ignore_index` raises: 'sync' at once, which waits for
            the GPU; 'lazy' at the next call after a kernel has found it; 'off' never. The loss is NaN meanwhile, and
            the gradient of the row 0. On CPU arrays 'lazy' is 'sync'. Default 'lazy'.
        size_average, reduce: torch's deprecated arguments; they warn and decide the reduction.

    Returns:
        With reduction 'none' one value per row, in the shape of the rows; otherwise an array without dimensions. 'mean'
        divides the sum by the number of rows that count, whatever their class weights, 'batchmean' by the size of the
        first dimension of the rows. A mean of nothing is NaN, with gradients of 0. Differences and sums are computed in
        float64. The result belongs to the library and the device of the first operand, and has its dtype (float32 under
        autocast) unless `out_dtype` is given.

    Gradient:
        `input` is differentiable. A pair of scores that are exactly the margin apart is inactive, with gradient 0, as
        in torch. A row with equal infinite scores is NaN, as their difference is. A row of one class has no pairs and
        has loss 0. Where the loss of a row is NaN, so is the gradient of the whole row.

    Raises:
        TypeError: An operand is not an array, or has a dtype that the loss does not take (floating ones are float16,
            bfloat16, float32 and float64); operands come from several libraries, other than torch and CuPy on a GPU; an
            option has the wrong type.
        ValueError: Shapes do not fit, operands are on different devices, or an option is out of range.
        ImportError: The operands are on a GPU, and CuPy is not installed.
        cupylosses.KernelError: A kernel cannot be compiled or loaded.
        IndexError: A label is neither a class nor `ignore_index`; see `check_targets`.

    Example:
        >>> import torch
        >>> import cupylosses.functional as F
        >>> input = torch.tensor([[0.1, 0.2, 0.4, 0.8], [0.5, -0.25, 1.0, 0.0]], requires_grad=True)
        >>> target = torch.tensor([3, 0])
        >>> loss = F.multi_margin_loss(input, target)
        >>> round(loss.item(), 3)
        0.444
        >>> loss.backward()  # input.grad holds the gradient

    References:
        K. Crammer, Y. Singer, On the algorithmic implementation of multiclass kernel-based vector machines, JMLR 2,
            2001.
    """

def multilabel_margin_loss(
    input: _Array,
    target: _Exchangeable,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: _RowReduction = "mean",
    *,
    margin: float = 1.0,
    class_dim: int | None = None,
    mask: _Exchangeable | None = None,
    normalizer: _Exchangeable | float | None = None,
    out_dtype: Any = None,
    check_targets: _Check = "lazy",
) -> _Array:
    """Multi-label hinge loss: the scores of all labels should exceed the scores of all other classes by a margin.

        (1 / C) sum_{j in T} sum_{i not in T} max(0, margin + input_i - input_j)

    with T the labels of the row, and C the number of classes.

    Torch's margin is 1. Rows with many labels are sorted on chip, so that a row takes time proportional to C log |T|.

    Drop-in replacement for ``torch.nn.functional.multilabel_margin_loss``.

    Args:
        input: The predicted scores of the classes. Shape (N, C), (C,), or any shape with the classes in `class_dim`;
            floating. Domain: any number.
        target: Lists of labels: class indices of any integer dtype, in the shape of `input` except that the class
            dimension holds the labels of a row. A list ends before the first -1, and entries after that are ignored. A
            label that is listed twice counts twice.
        reduction: One of 'none', 'mean', 'sum', 'batchmean'; see Returns. Default 'mean'.
        margin: Amount by which a label should exceed each other class. Must be a number, not NaN. Default 1.0.
        class_dim: Dimension of the classes, from either end. Default None: 1, or 0 for a single row.
        mask: Bool array that broadcasts to the shape of the rows, True where a row counts. The scores of the others are
            not read, their gradients are 0, and a mean does not count them. Default None, no mask.
        normalizer: Number, or array of one number without a gradient, that replaces the divisor of a mean, such as the
            number of tokens of all accumulated batches. Default None.
        out_dtype: Floating dtype of the result, of torch, of NumPy or by name. Default None, the promoted dtype of the
            operands.
        check_targets: When a label that is not a class, before the first -1 raises: 'sync' at once, which waits for the
            GPU; 'lazy' at the next call after a kernel has found it; 'off' never. The loss is NaN meanwhile, and the
            gradient of the row 0. On CPU arrays 'lazy' is 'sync'. Default 'lazy'.
        size_average, reduce: torch's deprecated arguments; they warn and decide the reduction.

    Returns:
        With reduction 'none' one value per row, in the shape of the rows; otherwise an array without dimensions. 'mean'
        divides the sum by the number of rows that count, 'batchmean' by the size of the first dimension of the rows. A
        mean of nothing is NaN, with gradients of 0. Differences and sums are computed in float64. The result belongs to
        the library and the device of the first operand, and has its dtype (float32 under autocast) unless `out_dtype`
        is given.

    Gradient:
        `input` is differentiable. A pair of scores that are exactly the margin apart is inactive, with gradient 0, as
        in torch. A row with equal infinite scores is NaN, as their difference is. A row without labels, and one in
        which every class is a label, has no pairs and has loss 0. Where the loss of a row is NaN, so is the gradient of
        the whole row.

    Raises:
        TypeError: An operand is not an array, or has a dtype that the loss does not take (floating ones are float16,
            bfloat16, float32 and float64); operands come from several libraries, other than torch and CuPy on a GPU; an
            option has the wrong type.
        ValueError: Shapes do not fit, operands are on different devices, or an option is out of range.
        ImportError: The operands are on a GPU, and CuPy is not installed.
        cupylosses.KernelError: A kernel cannot be compiled or loaded.
        IndexError: A label is not a class; see `check_targets`.

    Example:
        >>> import torch
        >>> import cupylosses.functional as F
        >>> input = torch.tensor([[0.1, 0.2, 0.4, 0.8], [0.5, -0.25, 1.0, 0.0]], requires_grad=True)
        >>> target = torch.tensor([[3, 0, -1, -1], [2, -1, -1, -1]])
        >>> loss = F.multilabel_margin_loss(input, target)
        >>> round(loss.item(), 3)
        0.488
        >>> loss.backward()  # input.grad holds the gradient

    References:
        J. Weston, C. Watkins, Support vector machines for multi-class pattern recognition, ESANN 1999, for several
            labels.
    """

def ctc_loss(
    log_probs: _Array,
    targets: _Exchangeable,
    input_lengths: _Exchangeable | Sequence[int] | int | None,
    target_lengths: _Exchangeable | Sequence[int] | int | None,
    blank: int = 0,
    reduction: _SequenceReduction = "mean",
    zero_infinity: bool = False,
    *,
    batch_first: bool = False,
    weight: _Exchangeable | float | None = None,
    mask: _Exchangeable | None = None,
    normalizer: _Exchangeable | float | None = None,
    out_dtype: Any = None,
    gradient: Literal["log_probs", "logits"] = "log_probs",
    check_targets: _Check = "lazy",
) -> _Array:
    """CTC loss of sequences of labels that are not aligned to the frames of the input.

        L_n = -log sum over alignments c of prod_t p(t, n, c_t)

    with p the exponential of `log_probs`; the sum is over all sequences c_1 ... c_T of classes that give the target
    when repeats are collapsed and then blanks dropped.

    Drop-in replacement for ``torch.nn.functional.ctc_loss``.

    Args:
        log_probs: Log-probabilities of shape (T, N, C), (N, T, C) with `batch_first`, or (T, C) for one sample;
            floating, of any strides. They need not be normalized.
        targets: Labels of any integer dtype: of shape (N, S), padded with anything; or all labels one after another, of
            shape (sum of `target_lengths`,); of shape (S,) or (1, S) for one sample. Labels are classes other than
            `blank`.
        input_lengths: Number of frames of each sample, at most T: integers in a tensor or an array on any device, of
            shape (N,) or (N, 1), in a tuple or a list; one for one sample. Later frames are not read. None if all are
            T.
        target_lengths: Number of labels of each sample, at most S, in the same form. None if all are S.
        blank: Class of the blank, 0 to C - 1. Default 0.
        reduction: One of 'none', 'mean', 'sum', 'batchmean'; see Returns. Default 'mean'.
        zero_infinity: If True, samples whose target has no alignment have loss 0 instead of inf. Their gradient is 0
            either way. Default False.
        batch_first: If True, the first operand has shape (N, T, C). Default False.
        weight: Factor of each sample's loss, a constant that broadcasts to (N,). A sample of weight 0 is not read, and
            its loss and gradient are 0. Default None, no weights.
        mask: Bool array that broadcasts to (N,), True where a sample counts. The others are not read, their losses and
            gradients are 0, and 'mean' does not count them. Default None, no mask.
        normalizer: Number, or array of one number without a gradient, in the place of whatever a mean divides by,
            numbers of labels included: the result is the sum of the losses over `normalizer`. Default None.
        out_dtype: Floating dtype of the result, of torch, of NumPy or by name. Default None, the promoted dtype of the
            operands.
        gradient: 'log_probs' for the gradient with respect to `log_probs`; 'logits' for the one that
            ``torch.nn.functional.ctc_loss`` returns, that with respect to the logits of a log-softmax: exp(log_probs)
            is added in frames that count. The latter has no second derivatives, forward mode or vmap. Default
            'log_probs'.
        check_targets: When labels that are no class, and lengths out of range, raise: 'sync' at once, which waits for
            the GPU; 'lazy' at the next call after a kernel has found one; 'off' never. The loss of the sample is NaN
            meanwhile, with a gradient of 0. What the host knows is checked at once. Default 'lazy'.

    Returns:
        With 'none' one value per sample, of shape (N,), or () for one sample without that dimension; otherwise an array
        without dimensions. 'mean' divides the loss of each sample by its number of labels, at least 1, and the sum by
        the number of samples that the mask keeps; 'batchmean' divides the sum by N; no mean divides by weights. A mean
        of nothing is NaN, with gradients of 0. Sums over frames and samples are computed in float64. The result belongs
        to the library and the device of the first operand, and has its dtype unless `out_dtype` is given.

    Gradient:
        The first operand is differentiable. The gradient is that with respect to `log_probs`, minus the probability
        that the frame emits the class given the target, where torch's is that of the logits of a log-softmax; after
        ``log_softmax`` both lead to the same. A class of log-probability -inf has gradient 0. A target that has no
        alignment, because it is too long or every alignment has a log-probability of -inf, has loss inf, or 0 with
        `zero_infinity`, and a gradient of 0. Where the loss of a sample is NaN, so is its gradient in all frames that
        count. Frames after `input_lengths` have gradient 0. Log-probabilities beyond 2^26 in size count as infinite,
        and alignments below -3.7e8 as impossible.

    Raises:
        TypeError: An operand is not an array, or has a dtype that the loss does not take (floating ones are float16,
            bfloat16, float32 and float64); operands come from several libraries, other than torch and CuPy on a GPU; an
            option has the wrong type.
        ValueError: Shapes do not fit, arrays are on different devices, an option is out of range, or a length is; see
            `check_targets` for lengths on a GPU.
        ImportError: The operands are on a GPU, and CuPy is not installed.
        cupylosses.KernelError: A kernel cannot be compiled or loaded.
        IndexError: A label is no class, or is the blank; see `check_targets`.

    Example:
        >>> import torch
        >>> import cupylosses.functional as F
        >>> log_probs = torch.tensor([[[-0.7, -1.4, -1.4]], [[-1.4, -0.7, -1.4]]], requires_grad=True)
        >>> targets = torch.tensor([[1]])
        >>> input_lengths = torch.tensor([2])
        >>> target_lengths = torch.tensor([1])
        >>> loss = F.ctc_loss(log_probs, targets, input_lengths, target_lengths)
        >>> round(loss.item(), 3)
        0.844
        >>> loss.backward()  # log_probs.grad holds the gradient

    References:
        A. Graves, S. Fernández, F. Gomez, J. Schmidhuber, Connectionist temporal classification: labelling unsegmented
            sequence data with recurrent neural networks, ICML 2006.
    """

def ctc_loss_with_logits(
    input: _Array,
    targets: _Exchangeable,
    input_lengths: _Exchangeable | Sequence[int] | int | None,
    target_lengths: _Exchangeable | Sequence[int] | int | None,
    blank: int = 0,
    reduction: _SequenceReduction = "mean",
    zero_infinity: bool = False,
    *,
    batch_first: bool = False,
    weight: _Exchangeable | float | None = None,
    mask: _Exchangeable | None = None,
    normalizer: _Exchangeable | float | None = None,
    out_dtype: Any = None,
    inplace_backward: bool = False,
    check_targets: _Check = "lazy",
) -> _Array:
    """CTC loss of logits, with the log-softmax fused.

        L_n = -log sum over alignments c of prod_t softmax(input)(t, n, c_t)

    with p the softmax of `input`; the sum is over all sequences c_1 ... c_T of classes that give the target when
    repeats are collapsed and then blanks dropped.

    Args:
        input: Logits of shape (T, N, C), (N, T, C) with `batch_first`, or (T, C) for one sample; floating, of any
            strides.
        targets: Labels of any integer dtype: of shape (N, S), padded with anything; or all labels one after another, of
            shape (sum of `target_lengths`,); of shape (S,) or (1, S) for one sample. Labels are classes other than
            `blank`.
        input_lengths: Number of frames of each sample, at most T: integers in a tensor or an array on any device, of
            shape (N,) or (N, 1), in a tuple or a list; one for one sample. Later frames are not read. None if all are
            T.
        target_lengths: Number of labels of each sample, at most S, in the same form. None if all are S.
        blank: Class of the blank, 0 to C - 1. Default 0.
        reduction: One of 'none', 'mean', 'sum', 'batchmean'; see Returns. Default 'mean'.
        zero_infinity: If True, samples whose target has no alignment have loss 0 instead of inf. Their gradient is 0
            either way. Default False.
        batch_first: If True, the first operand has shape (N, T, C). Default False.
        weight: Factor of each sample's loss, a constant that broadcasts to (N,). A sample of weight 0 is not read, and
            its loss and gradient are 0. Default None, no weights.
        mask: Bool array that broadcasts to (N,), True where a sample counts. The others are not read, their losses and
            gradients are 0, and 'mean' does not count them. Default None, no mask.
        normalizer: Number, or array of one number without a gradient, in the place of whatever a mean divides by,
            numbers of labels included: the result is the sum of the losses over `normalizer`. Default None.
        out_dtype: Floating dtype of the result, of torch, of NumPy or by name. Default None, the promoted dtype of the
            operands.
        inplace_backward: If True, backward may write the gradient over `input`, for which a second backward raises.
            Default False.
        check_targets: When labels that are no class, and lengths out of range, raise: 'sync' at once, which waits for
            the GPU; 'lazy' at the next call after a kernel has found one; 'off' never. The loss of the sample is NaN
            meanwhile, with a gradient of 0. What the host knows is checked at once. Default 'lazy'.

    Returns:
        With 'none' one value per sample, of shape (N,), or () for one sample without that dimension; otherwise an array
        without dimensions. 'mean' divides the loss of each sample by its number of labels, at least 1, and the sum by
        the number of samples that the mask keeps; 'batchmean' divides the sum by N; no mean divides by weights. A mean
        of nothing is NaN, with gradients of 0. Sums over frames and samples are computed in float64. The result belongs
        to the library and the device of the first operand, and has its dtype unless `out_dtype` is given.

    Gradient:
        The first operand is differentiable. The gradient is softmax(input) minus the probability that the frame emits
        the class given the target. A class of log-probability -inf has gradient 0. A target that has no alignment,
        because it is too long or every alignment has a log-probability of -inf, has loss inf, or 0 with
        `zero_infinity`, and a gradient of 0. Where the loss of a sample is NaN, so is its gradient in all frames that
        count. Frames after `input_lengths` have gradient 0. Log-probabilities beyond 2^26 in size count as infinite,
        and alignments below -3.7e8 as impossible.

    Raises:
        TypeError: An operand is not an array, or has a dtype that the loss does not take (floating ones are float16,
            bfloat16, float32 and float64); operands come from several libraries, other than torch and CuPy on a GPU; an
            option has the wrong type.
        ValueError: Shapes do not fit, arrays are on different devices, an option is out of range, or a length is; see
            `check_targets` for lengths on a GPU.
        ImportError: The operands are on a GPU, and CuPy is not installed.
        cupylosses.KernelError: A kernel cannot be compiled or loaded.
        IndexError: A label is no class, or is the blank; see `check_targets`.

    Example:
        >>> import torch
        >>> import cupylosses.functional as F
        >>> input = torch.tensor([[[0.5, -1.0, 1.5]], [[1.0, 2.0, 0.0]]], requires_grad=True)
        >>> targets = torch.tensor([[1]])
        >>> input_lengths = torch.tensor([2])
        >>> target_lengths = torch.tensor([1])
        >>> loss = F.ctc_loss_with_logits(input, targets, input_lengths, target_lengths)
        >>> round(loss.item(), 3)
        1.513
        >>> loss.backward()  # input.grad holds the gradient

    References:
        A. Graves, S. Fernández, F. Gomez, J. Schmidhuber, Connectionist temporal classification: labelling unsegmented
            sequence data with recurrent neural networks, ICML 2006.
    """

def cosine_similarity(
    x1: _Array,
    x2: _Exchangeable,
    dim: int = 1,
    eps: float = 1e-08,
    *,
    out_dtype: Any = None,
) -> _Array:
    """Cosine of each pair of vectors, from -1 to 1.

        <x1, x2> / (max(|x1|, eps) max(|x2|, eps))

    As `torch.nn.functional.cosine_similarity`, without its values beyond 1, its overflow in float16 and float32, and
    its gradients of vectors shorter than `eps`, which are not those of the value.

    Drop-in replacement for ``torch.nn.functional.cosine_similarity``.

    Args:
        x1: The first vectors. Any shape that broadcasts with the other, with the features in `dim`; floating.
        x2: The second vectors. Any shape that broadcasts with the other, with the features in `dim`; floating.
        dim: Dimension of the features in the broadcast shape, from either end. Default 1.
        eps: Length that shorter vectors count as; 0 for the exact cosine. Must be a number >= 0. Default 1e-08.
        out_dtype: Floating dtype of the result, of torch, of NumPy or by name. Default None, the promoted dtype of the
            operands.

    Returns:
        One value per row, in the broadcast shape without the dimension of the features, of the library and on the
        device of the first operand, in the promoted dtype of the operands unless `out_dtype` is given. Sums over rows
        and their formula are computed in float64.

    Gradient:
        Both operands are differentiable. A vector of zeros has no direction: the cosine is 0, with gradient 0 with
        respect to both vectors. The length of a vector shorter than `eps` is a constant.

    Raises:
        TypeError: An operand is not an array, or has a dtype that the loss does not take (floating ones are float16,
            bfloat16, float32 and float64); operands come from several libraries, other than torch and CuPy on a GPU; an
            option has the wrong type.
        ValueError: Shapes do not fit, operands are on different devices, or an option is out of range.
        ImportError: The operands are on a GPU, and CuPy is not installed.
        cupylosses.KernelError: A kernel cannot be compiled or loaded.

    Example:
        >>> import torch
        >>> import cupylosses.functional as F
        >>> x1, x2 = torch.tensor([[1.0, 2.0, 2.0]]), torch.tensor([[2.0, 0.0, 1.0]])
        >>> [round(x, 4) for x in F.cosine_similarity(x1, x2).tolist()]
        [0.5963]

    References:
        G. Salton, A. Wong, C. S. Yang, A vector space model for automatic indexing, Communications of the ACM 18, 1975.
    """

def cosine_distance(
    x1: _Array,
    x2: _Exchangeable,
    dim: int = -1,
    eps: float = 1e-08,
    *,
    out_dtype: Any = None,
) -> _Array:
    """One minus the cosine of each pair of vectors.

        1 - <x1, x2> / (max(|x1|, eps) max(|x2|, eps))

    It is never below 0, and keeps its digits where vectors are similar: cosine and difference are computed in float64.
    `triplet_margin_with_distance_loss` recognizes it, and computes both distances and the loss in one pass.

    Args:
        x1: The first vectors. Any shape that broadcasts with the other, with the features in `dim`; floating.
        x2: The second vectors. Any shape that broadcasts with the other, with the features in `dim`; floating.
        dim: Dimension of the features in the broadcast shape, from either end. Default -1.
        eps: Length that shorter vectors count as; 0 for the exact cosine. Must be a number >= 0. Default 1e-08.
        out_dtype: Floating dtype of the result, of torch, of NumPy or by name. Default None, the promoted dtype of the
            operands.

    Returns:
        One value per row, in the broadcast shape without the dimension of the features, of the library and on the
        device of the first operand, in the promoted dtype of the operands unless `out_dtype` is given. Sums over rows
        and their formula are computed in float64.

    Gradient:
        Both operands are differentiable. A vector of zeros has no direction: the cosine is 0, with gradient 0 with
        respect to both vectors. The length of a vector shorter than `eps` is a constant.

    Raises:
        TypeError: An operand is not an array, or has a dtype that the loss does not take (floating ones are float16,
            bfloat16, float32 and float64); operands come from several libraries, other than torch and CuPy on a GPU; an
            option has the wrong type.
        ValueError: Shapes do not fit, operands are on different devices, or an option is out of range.
        ImportError: The operands are on a GPU, and CuPy is not installed.
        cupylosses.KernelError: A kernel cannot be compiled or loaded.

    Example:
        >>> import torch
        >>> import cupylosses.functional as F
        >>> x1, x2 = torch.tensor([1.0, 2.0, 2.0]), torch.tensor([2.0, 0.0, 1.0])
        >>> round(F.cosine_distance(x1, x2).item(), 4)
        0.4037

    References:
        G. Salton, A. Wong, C. S. Yang, A vector space model for automatic indexing, Communications of the ACM 18, 1975.
    """

def pairwise_distance(
    x1: _Array,
    x2: _Exchangeable,
    p: float = 2.0,
    eps: float = 1e-06,
    keepdim: bool = False,
    *,
    out_dtype: Any = None,
) -> _Array:
    """Distance of degree p between each pair of vectors.

        (sum |x1 - x2 + eps|^p)^(1/p)

    As `torch.nn.functional.pairwise_distance`; powers and squares do not overflow for float32 vectors.

    Drop-in replacement for ``torch.nn.functional.pairwise_distance``.

    Args:
        x1: The first vectors. Any shape that broadcasts with the other, with the features last; floating.
        x2: The second vectors. Any shape that broadcasts with the other, with the features last; floating.
        p: Degree of the distance, > 0: 1 sums absolute differences, 2 is Euclidean, infinity takes the largest
            difference. Must be a number > 0. Default 2.0.
        eps: Added to each difference, as torch does: equal vectors have the distance eps D^(1/p). With 0 it is a
            metric. Must be a number, not NaN. Default 1e-06.
        keepdim: If True, the result has a last dimension of size 1. Default False.
        out_dtype: Floating dtype of the result, of torch, of NumPy or by name. Default None, the promoted dtype of the
            operands.

    Returns:
        One value per row, in the broadcast shape without the dimension of the features, of the library and on the
        device of the first operand, in the promoted dtype of the operands unless `out_dtype` is given. Sums over rows
        and their formula are computed in float64.

    Gradient:
        Both operands are differentiable. A distance of 0, and an infinite one, has gradient 0; equal largest
        differences share theirs.

    Raises:
        TypeError: An operand is not an array, or has a dtype that the loss does not take (floating ones are float16,
            bfloat16, float32 and float64); operands come from several libraries, other than torch and CuPy on a GPU; an
            option has the wrong type.
        ValueError: Shapes do not fit, operands are on different devices, or an option is out of range.
        ImportError: The operands are on a GPU, and CuPy is not installed.
        cupylosses.KernelError: A kernel cannot be compiled or loaded.

    Example:
        >>> import torch
        >>> import cupylosses.functional as F
        >>> x1, x2 = torch.tensor([[3.0, 4.0]]), torch.tensor([[0.0, 0.0]])
        >>> F.pairwise_distance(x1, x2, p=1.0, eps=0.0).tolist()
        [7.0]

    References:
        H. Minkowski, Geometrie der Zahlen, Teubner, 1896.
    """

@overload
def token_log_probs(
    logits: _Array,
    index: _Exchangeable,
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    return_entropy: Literal[False] = False,
    mask: _Exchangeable | None = None,
    ignore_index: int = -100,
    check_targets: _Check = "lazy",
) -> _Array:
    """Log-probabilities of labels under the softmax of logits and, from the same pass, the entropy.

        z_y - log sum_c exp(z_c), and H = -sum_c p_c log p_c

    with z = logit_scale logits / temperature, or softcap tanh(logit_scale logits / softcap) / temperature with a
    softcap; p = softmax(z); y an index; H the entropy.

    The logits are read once in forward and once in backward, in their own dtype; the only allocation of their size is
    their gradient.

    Args:
        logits: The logits, floating, of shape (..., C).
        index: Labels of any integer dtype, one per row, in the shape of the first operand without its last dimension;
            or several per row, of shape (..., K), such as the K labels that a teacher keeps.
        temperature: Divisor of the logits, after scale and softcap. A finite number > 0. Default 1.0.
        softcap: Bound of the scaled logits: softcap tanh(logits / softcap) replaces them. A number > 0. Default None,
            no bound.
        logit_scale: Factor of the logits. A finite number > 0. Default 1.0.
        return_entropy: If True, the entropy of each row is returned too, from the same pass. An `index` of shape (...,
            0) gives entropies alone. Default False.
        mask: Bool array that broadcasts to the shape of the rows, True where a row counts. The logits of the others are
            not read. Default None, no mask.
        ignore_index: Label that does not count. Default -100.
        check_targets: When a label that is neither a class nor `ignore_index` raises: 'sync' at once, which waits for
            the GPU; 'lazy' at the next call after a kernel has found it; 'off' never. Its log-probability is NaN
            meanwhile, with a gradient of 0. On CPU arrays 'lazy' is 'sync'. Default 'lazy'.

    Returns:
        The log-probabilities, in the shape of `index`, in float32 (float64 for float64 logits), on the device and of
        the library of the first operand. None is above 0. With `return_entropy` a named tuple (log_probs, entropy); the
        entropy of each row has the shape of the logits without their last dimension. Masked rows, rows whose labels are
        all ignored, and ignored labels have values of 0.

    Gradient:
        Log-probabilities and entropy are both differentiable, with respect to every floating operand. A label of
        log-probability -inf has a finite gradient. Entries that do not count have gradient 0. Where a value is NaN
        because of the logits, so is its gradient.

    Raises:
        TypeError: An operand is not an array, or has a dtype that the loss does not take (floating ones are float16,
            bfloat16, float32 and float64); operands come from several libraries, other than torch and CuPy on a GPU; an
            option has the wrong type.
        ValueError: Shapes do not fit, operands are on different devices, or an option is out of range.
        ImportError: The operands are on a GPU, and CuPy is not installed.
        cupylosses.KernelError: A kernel cannot be compiled or loaded.
        IndexError: A label is neither a class nor `ignore_index`; see `check_targets`.

    Example:
        >>> import torch
        >>> import cupylosses.functional as F
        >>> logits = torch.tensor([[2.0, 0.5, -1.0], [0.0, 1.5, 0.5]], requires_grad=True)
        >>> index = torch.tensor([0, 2])
        >>> [round(x, 3) for x in F.token_log_probs(logits, index).tolist()]
        [-0.241, -1.464]
        >>> log_probs, entropy = F.token_log_probs(logits, index, temperature=0.5, return_entropy=True)
        >>> (log_probs.sum() + 0.01 * entropy.sum()).backward()  # logits.grad holds the gradient

    References:
        R. J. Williams, Simple statistical gradient-following algorithms for connectionist reinforcement learning,
            Machine Learning 8, 1992.
        online softmax: M. Milakov, N. Gimelshein, Online normalizer calculation for softmax, arXiv 1805.02867, 2018.
    """

@overload
def token_log_probs(
    logits: _Array,
    index: _Exchangeable,
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    return_entropy: Literal[True],
    mask: _Exchangeable | None = None,
    ignore_index: int = -100,
    check_targets: _Check = "lazy",
) -> TokenLogProbs: ...
@overload
def token_log_probs(
    logits: _Array,
    index: _Exchangeable,
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    return_entropy: bool = False,
    mask: _Exchangeable | None = None,
    ignore_index: int = -100,
    check_targets: _Check = "lazy",
) -> _Array | TokenLogProbs: ...
@overload
def linear_token_log_probs(
    input: _Array,
    linear_weight: _Exchangeable,
    index: _Exchangeable,
    *,
    linear_bias: _Exchangeable | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    return_entropy: Literal[False] = False,
    mask: _Exchangeable | None = None,
    ignore_index: int = -100,
    check_targets: _Check = "lazy",
    logits_dtype: Any = None,
    accumulate_dtype: Any = None,
    max_memory: int | None = None,
    main_grad: _Exchangeable | None = None,
) -> _Array:
    """Log-probabilities of labels under the output of a linear layer, without its logits as a whole.

        token_log_probs(input @ linear_weight.T + linear_bias, index)

    with the logits input @ linear_weight.T + linear_bias; z = logit_scale logits / temperature, or softcap
    tanh(logit_scale logits / softcap) / temperature with a softcap; p = softmax(z); y an index; H the entropy.

    The logits exist in chunks of rows, which `max_memory` bounds. Forward keeps four numbers per row; backward
    recomputes the logits of each chunk and writes their gradient over them, so that forward and backward together take
    four matrix products.

    Args:
        input: The features, floating, of shape (..., D).
        linear_weight: The weight of the layer, of shape (C, D), in the dtype of `input`.
        index: Labels of any integer dtype, one per row, in the shape of the first operand without its last dimension;
            or several per row, of shape (..., K), such as the K labels that a teacher keeps.
        linear_bias: Bias of the layer, of shape (C,), in the dtype of `input`. Default None, no bias.
        temperature: Divisor of the logits, after scale and softcap. A finite number > 0. Default 1.0.
        softcap: Bound of the scaled logits: softcap tanh(logits / softcap) replaces them. A number > 0. Default None,
            no bound.
        logit_scale: Factor of the logits. A finite number > 0. Default 1.0.
        return_entropy: If True, the entropy of each row is returned too, from the same pass. An `index` of shape (...,
            0) gives entropies alone. Default False.
        mask: Bool array that broadcasts to the shape of the rows, True where a row counts. The logits of the others are
            not read. Default None, no mask.
        ignore_index: Label that does not count. Default -100.
        check_targets: When a label that is neither a class nor `ignore_index` raises: 'sync' at once, which waits for
            the GPU; 'lazy' at the next call after a kernel has found it; 'off' never. Its log-probability is NaN
            meanwhile, with a gradient of 0. On CPU arrays 'lazy' is 'sync'. Default 'lazy'.
        logits_dtype: Dtype of the logits: None for that of `input`, or 'float32' for logits of half or bfloat16
            operands that are not rounded, which takes twice the memory and a few percent of time. Default None.
        accumulate_dtype: Dtype in which chunks add up the gradient of `linear_weight`: 'float32', which takes a buffer
            of that dtype, or that of the weight, which is rounded once per chunk. Default None: that of the weight for
            up to four chunks, float32 for more.
        max_memory: Bytes that a chunk of logits may take; a chunk has one row at least. Less memory means more chunks,
            and products of fewer than some 2000 rows are slower. With room for all logits, they are kept for backward
            where there is no reduction. Default None: the size of the weight, at least 256 MiB.
        main_grad: Contiguous tensor in the shape of `linear_weight`, of float32 (float64 for float64 operands), to
            which the matrix products of backward add the gradient of `linear_weight` instead of allocating it;
            `linear_weight.grad` stays as it is. DistributedDataParallel does not reduce it: leave the weight out with
            `_set_params_and_buffers_to_ignore_for_model`, and reduce `main_grad` after backward. For eager backward of
            torch only. Default None.

    Returns:
        The log-probabilities, in the shape of `index`, in float32 (float64 for float64 logits), on the device and of
        the library of the first operand. None is above 0. With `return_entropy` a named tuple (log_probs, entropy); the
        entropy of each row has the shape of the logits without their last dimension. Masked rows, rows whose labels are
        all ignored, and ignored labels have values of 0.

    Gradient:
        Log-probabilities and entropy are both differentiable, with respect to every floating operand. A label of
        log-probability -inf has a finite gradient. Entries that do not count have gradient 0. Where a value is NaN
        because of the logits, so is its gradient.

    Raises:
        TypeError: An operand is not an array, or has a dtype that the loss does not take (floating ones are float16,
            bfloat16, float32 and float64); operands come from several libraries, other than torch and CuPy on a GPU; an
            option has the wrong type.
        ValueError: Shapes do not fit, operands are on different devices, or an option is out of range.
        ImportError: The operands are on a GPU, and CuPy is not installed.
        cupylosses.KernelError: A kernel cannot be compiled or loaded.
        IndexError: A label is neither a class nor `ignore_index`; see `check_targets`.

    Example:
        >>> import torch
        >>> import cupylosses.functional as F
        >>> hidden = torch.tensor([[1.0, 0.5], [0.0, -1.0]], requires_grad=True)
        >>> weight = torch.tensor([[2.0, 0.0], [0.5, 1.0], [-1.0, 0.5]], requires_grad=True)
        >>> index = torch.tensor([0, 2])
        >>> [round(x, 3) for x in F.linear_token_log_probs(hidden, weight, index).tolist()]
        [-0.359, -1.18]
        >>> log_probs, entropy = F.linear_token_log_probs(hidden, weight, index, return_entropy=True)
        >>> (log_probs.sum() + 0.01 * entropy.sum()).backward()  # weight.grad holds the gradient

    References:
        E. Wijmans et al., Cut your losses in large-vocabulary language models, ICLR 2025.
    """

@overload
def linear_token_log_probs(
    input: _Array,
    linear_weight: _Exchangeable,
    index: _Exchangeable,
    *,
    linear_bias: _Exchangeable | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    return_entropy: Literal[True],
    mask: _Exchangeable | None = None,
    ignore_index: int = -100,
    check_targets: _Check = "lazy",
    logits_dtype: Any = None,
    accumulate_dtype: Any = None,
    max_memory: int | None = None,
    main_grad: _Exchangeable | None = None,
) -> TokenLogProbs: ...
@overload
def linear_token_log_probs(
    input: _Array,
    linear_weight: _Exchangeable,
    index: _Exchangeable,
    *,
    linear_bias: _Exchangeable | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    return_entropy: bool = False,
    mask: _Exchangeable | None = None,
    ignore_index: int = -100,
    check_targets: _Check = "lazy",
    logits_dtype: Any = None,
    accumulate_dtype: Any = None,
    max_memory: int | None = None,
    main_grad: _Exchangeable | None = None,
) -> _Array | TokenLogProbs: ...
def ctc_forced_alignment(
    log_probs: _Array,
    targets: _Exchangeable,
    input_lengths: _Exchangeable | Sequence[int] | int | None = None,
    target_lengths: _Exchangeable | Sequence[int] | int | None = None,
    blank: int = 0,
    *,
    batch_first: bool = False,
    check_targets: _Check = "lazy",
) -> CtcAlignment:
    """The most probable alignment of sequences of labels to the frames of the input.

        score_n = max over alignments c of sum_t log_probs(t, n, c_t)

    with alignments c_1 ... c_T, sequences of classes that give the target when repeats are collapsed and then blanks
    dropped.

    Args:
        log_probs: Log-probabilities of shape (T, N, C), (N, T, C) with `batch_first`, or (T, C) for one sample;
            floating, of any strides. They need not be normalized.
        targets: Labels of any integer dtype: of shape (N, S), padded with anything; or all labels one after another, of
            shape (sum of `target_lengths`,); of shape (S,) or (1, S) for one sample. Labels are classes other than
            `blank`.
        input_lengths: Number of frames of each sample, at most T: integers in a tensor or an array on any device, of
            shape (N,) or (N, 1), in a tuple or a list; one for one sample. Later frames are not read. Default None, all
            T.
        target_lengths: Number of labels of each sample, at most S, in the same form. Default None, all S.
        blank: Class of the blank, 0 to C - 1. Default 0.
        batch_first: If True, the first operand has shape (N, T, C). Default False.
        check_targets: When labels that are no class, and lengths out of range, raise: 'sync' at once, which waits for
            the GPU; 'lazy' at the next call after a kernel has found one; 'off' never. What the host knows is checked
            at once. Default 'lazy'.

    Returns:
        A named tuple (score, labels, positions, log_probs): for each sample the sum along its alignment, of shape (N,)
        or (); for each frame the class, the position of its label in the target, -1 for the blank, and the
        log-probability of that class, of shape (T, N), (N, T) with `batch_first`, (T,) for one sample. Classes and
        positions are int64, the others float32 (float64 for float64 input). Sums are float64. Of alignments with equal
        sums it is the one that, seen from the last frame, ends in the last label, stays longest in each label and
        blank, and goes through the blank between two labels. A target without alignment has score -inf; one for which
        NaN or +inf counts, or of which a label or a length is out of range, has score NaN. Their frames, and those
        behind `input_lengths`, have class -1, position -1 and log-probability 0.

    Gradient:
        None of the results is differentiable. For a loss of the best path gather `log_probs` by the labels:
        ``log_probs.gather(-1, labels.clamp(min=0)[..., None])``.

    Raises:
        TypeError: An operand is not an array, or has a dtype that the loss does not take (floating ones are float16,
            bfloat16, float32 and float64); operands come from several libraries, other than torch and CuPy on a GPU; an
            option has the wrong type.
        ValueError: Shapes do not fit, arrays are on different devices, an option is out of range, or a length is; see
            `check_targets` for lengths on a GPU.
        ImportError: The operands are on a GPU, and CuPy is not installed.
        cupylosses.KernelError: A kernel cannot be compiled or loaded.
        IndexError: A label is no class, or is the blank; see `check_targets`.

    Example:
        >>> import torch
        >>> import cupylosses.functional as F
        >>> log_probs = torch.tensor([[0.5, 0.25, 0.25], [0.25, 0.5, 0.25], [0.25, 0.25, 0.5]]).log()
        >>> found = F.ctc_forced_alignment(log_probs, torch.tensor([1, 2]))
        >>> found.labels.tolist(), found.positions.tolist(), round(found.score.exp().item(), 3)
        ([0, 1, 2], [-1, 0, 1], 0.125)

    References:
        A. J. Viterbi, Error bounds for convolutional codes and an asymptotically optimum decoding algorithm, IEEE
            Transactions on Information Theory 13, 1967.
        A. Graves, S. Fernández, F. Gomez, J. Schmidhuber, Connectionist temporal classification: labelling unsegmented
            sequence data with recurrent neural networks, ICML 2006.
    """

def ctc_posteriors(
    log_probs: _Array,
    targets: _Exchangeable,
    input_lengths: _Exchangeable | Sequence[int] | int | None = None,
    target_lengths: _Exchangeable | Sequence[int] | int | None = None,
    blank: int = 0,
    *,
    batch_first: bool = False,
    of: Literal["classes", "positions"] = "classes",
    check_targets: _Check = "lazy",
) -> _Array:
    """Probabilities that a frame belongs to each class, or to each label of its target, given the target.

        occ(t, n, c) = P(c_t = c | target of n)

    with alignments c_1 ... c_T, sequences of classes that give the target when repeats are collapsed and then blanks
    dropped.

    Posteriors of classes are the gradient of `ctc_loss` with the other sign.

    Args:
        log_probs: Log-probabilities of shape (T, N, C), (N, T, C) with `batch_first`, or (T, C) for one sample;
            floating, of any strides. They need not be normalized.
        targets: Labels of any integer dtype: of shape (N, S), padded with anything; or all labels one after another, of
            shape (sum of `target_lengths`,); of shape (S,) or (1, S) for one sample. Labels are classes other than
            `blank`.
        input_lengths: Number of frames of each sample, at most T: integers in a tensor or an array on any device, of
            shape (N,) or (N, 1), in a tuple or a list; one for one sample. Later frames are not read. Default None, all
            T.
        target_lengths: Number of labels of each sample, at most S, in the same form. Default None, all S.
        blank: Class of the blank, 0 to C - 1. Default 0.
        batch_first: If True, the first operand has shape (N, T, C). Default False.
        of: 'classes', or 'positions' for a posterior of each label of the target, which tells repeated labels apart,
            and of the blank, which comes last. Default 'classes'.
        check_targets: When labels that are no class, and lengths out of range, raise: 'sync' at once, which waits for
            the GPU; 'lazy' at the next call after a kernel has found one; 'off' never. What the host knows is checked
            at once. Default 'lazy'.

    Returns:
        The posteriors. For classes they have the shape of `log_probs`; for positions C is replaced by S + 1, the blank
        is the last position, and positions past `target_lengths` are 0. Float32 (float64 for float64 input), on the
        device and of the library of `log_probs`. The posteriors of a frame add up to 1. They are 0 in frames past
        `input_lengths`, and in all frames of a target without alignment or with a label or a length out of range; they
        are NaN in all frames of a target for which NaN or +inf counts.

    Gradient:
        `log_probs` is differentiable. A class of log-probability -inf has gradient 0. Derivatives are those of the
        reference formula, which takes a step per frame.

    Raises:
        TypeError: An operand is not an array, or has a dtype that the loss does not take (floating ones are float16,
            bfloat16, float32 and float64); operands come from several libraries, other than torch and CuPy on a GPU; an
            option has the wrong type.
        ValueError: Shapes do not fit, arrays are on different devices, an option is out of range, or a length is; see
            `check_targets` for lengths on a GPU.
        ImportError: The operands are on a GPU, and CuPy is not installed.
        cupylosses.KernelError: A kernel cannot be compiled or loaded.
        IndexError: A label is no class, or is the blank; see `check_targets`.

    Example:
        >>> import torch
        >>> import cupylosses.functional as F
        >>> log_probs = torch.tensor([[0.5, 0.25, 0.25], [0.25, 0.5, 0.25], [0.25, 0.25, 0.5]]).log()
        >>> occ = F.ctc_posteriors(log_probs, torch.tensor([1, 2]))
        >>> (17 * occ).round().int().tolist()
        [[8, 9, 0], [2, 12, 3], [1, 0, 16]]

    References:
        A. Graves, S. Fernández, F. Gomez, J. Schmidhuber, Connectionist temporal classification: labelling unsegmented
            sequence data with recurrent neural networks, ICML 2006.
    """

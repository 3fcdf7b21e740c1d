"""Softmax losses of a linear layer's output, such as the logits of a language model's vocabulary."""

from cupylosses.definition.base import Operand
from cupylosses.engines.linear_softmax.definition import define_linear
from cupylosses.losses.softmax import cross_entropy

linear_cross_entropy = define_linear(
    cross_entropy,
    name="linear_cross_entropy",
    summary="Softmax cross entropy of the output of a linear layer, without its logits as a whole.",
    formula="cross_entropy(input @ linear_weight.T + linear_bias, target)",
    operands=(
        Operand("input", "The features, floating, of shape (N, D), (D,) or (..., D)."),
        Operand(
            "linear_weight",
            "The weight of the layer, of shape (C, D), in the dtype of `input`; or (C, d_1, ..., d_K, D), for which "
            "all logits are computed at once.",
        ),
        Operand(
            "target",
            "Class indices of any integer dtype, in the shape of `input` without its last dimension, or class "
            "probabilities, floating and in the shape of the logits.",
            integer=True,
        ),
    ),
    torch="linear_cross_entropy",
    module="LinearCrossEntropyLoss",
    notes=(
        "The logits exist in chunks of rows, and their gradient is written over them; backward recomputes nothing "
        "unless it is called twice or without a reduction. `max_memory` bounds the chunks. Logits of up to 4 MiB and "
        "half of `max_memory` are kept for backward instead. For large layers of 16 bits whose number of features or "
        "classes is not a multiple of eight, the weight is copied to sizes that are (and, for such features, its "
        "gradient too): products then take a half to a quarter of the time."
    ),
    source="E. Wijmans et al., Cut your losses in large-vocabulary language models, ICLR 2025.",
)

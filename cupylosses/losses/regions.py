"""Region losses: the overlap of predicted and true regions, alone or added to a loss of every voxel."""

from cupylosses.definition.base import Flag, Operand, Parameter
from cupylosses.engines.regions.definition import define_regions
from cupylosses.losses.classification import binary_cross_entropy_with_logits
from cupylosses.losses.focal import sigmoid_focal_loss
from cupylosses.reference_math import power, weighted

_OPERANDS = (
    Operand("input", "The predicted logits, or probabilities with activation='none'."),
    Operand(
        "target",
        "Labels of any integer dtype, in the shape of `input` without its class dimension or with one of size 1, which "
        "are read in their own width; or a value per class, floating (differentiable) or integer, in the shape of "
        "`input`. With one class it has a value per voxel, 0 or 1.",
        integer=True,
    ),
)
_DICE = {"alpha": 0.5, "beta": 0.5}
_CONVENTION = (
    "At the bound `floor` the denominator follows the operands; a base of 0 under an exponent below 1 has gradient 0."
)

#: Settings by library, in the normalization of this formula: constants that a library adds to 2 I are halved.
_MONAI = {"absent": "keep", "smooth_nr": 5e-6, "smooth_dr": 5e-6}
_SMP = {"absent": "zero", "pool": "batch", "overlap": "min", "floor": 1e-7, "mean_of_weights": True}
_NNUNET = {
    "absent": "keep",
    "smooth_nr": 5e-6,
    "smooth_dr": 5e-6,
    "floor": 5e-9,
    "offset": 0.0,
    "include_background": False,
}
_KORNIA_MACRO = {
    "absent": "skip",
    "smooth_dr": 5e-9,
    "mean_of_weights": True,
    "average": "samples",
    "empty": 1.0,
}
_DICE_PRESETS = {
    "monai": _MONAI,
    "smp": _SMP,
    "nnunet": _NNUNET,
    "nnunet_soft": {"absent": "keep", "smooth_nr": 0.5, "smooth_dr": 0.5, "floor": 5e-9, "offset": 0.0},
    "kornia": {"absent": "keep", "pool": "class", "smooth_dr": 5e-9, "weight_in": "score"},
    "kornia_micro": {"absent": "keep", "pool": "class", "smooth_dr": 5e-9, "weight_in": "score"},
    "kornia_macro": _KORNIA_MACRO,
    "keras": {"absent": "keep", "activation": "none", "pool": "both", "smooth_dr": 5e-8},
    "maskformer": {"absent": "keep", "activation": "sigmoid", "smooth_nr": 0.5, "smooth_dr": 0.5},
}
_TVERSKY_PRESETS = {
    "monai": {"absent": "keep", "smooth_nr": 1e-5, "smooth_dr": 1e-5},
    "smp": {**_SMP, "gamma_over": "mean"},
    "kornia": {"absent": "skip", "smooth_dr": 1e-8, "average": "samples", "empty": 1.0},
    "keras": {"absent": "keep", "activation": "none", "pool": "both", "smooth_dr": 1e-7},
}
_OF_PRESETS = (
    "The presets are those of MONAI 1.6, segmentation_models_pytorch 0.6 (smp), nnU-Net 2.8, kornia 0.9 and Keras "
    "3.16. Unlike these libraries, voxels that do not count are never used, whatever they hold."
)
_MILLETARI = (
    "F. Milletari, N. Navab, S.-A. Ahmadi, V-Net: fully convolutional neural networks for volumetric medical "
    "image segmentation, 3DV 2016"
)

dice_loss = define_regions(
    name="dice_loss",
    summary="Dice loss: one minus the Dice coefficient of predicted and true regions.",
    formula="1 - (I + smooth_nr) / max(I + FP / 2 + FN / 2 + smooth_dr, floor), averaged over the regions of samples "
    "and classes",
    operands=_OPERANDS,
    fixed=_DICE,
    presets=_DICE_PRESETS,
    positional="input target",
    convention=_CONVENTION,
    cases=(
        {},
        {"activation": "sigmoid", "pool": "batch", "overlap": "squared", "smooth_nr": 0.5, "smooth_dr": 0.5},
        {"pool": "class", "overlap": "min", "log_loss": True},
        {"include_background": False, "absent": "keep", "floor": 0.25, "offset": 0.0},
        {"average": "samples", "gamma": 1.5, "absent": "zero"},
    ),
    notes=f"I + FP / 2 + FN / 2 is half of sum p + sum t. Nearly perfect predictions keep their digits, since I, FP "
    f"and FN are summed apart. {_OF_PRESETS}",
    source=_MILLETARI,
)

jaccard_loss = define_regions(
    name="jaccard_loss",
    summary="Jaccard loss: one minus the intersection over the union of predicted and true regions.",
    formula="1 - (I + smooth_nr) / max(I + FP + FN + smooth_dr, floor), averaged over the regions of samples and "
    "classes",
    operands=_OPERANDS,
    fixed={"alpha": 1.0, "beta": 1.0},
    presets={"monai": _MONAI, "smp": _SMP},
    positional="input target",
    convention=_CONVENTION,
    cases=({}, {"pool": "both", "activation": "sigmoid"}),
    notes=_OF_PRESETS,
    source="M. A. Rahman, Y. Wang, Optimizing intersection-over-union in deep neural networks for image segmentation, "
    "ISVC 2016",
)

_TVERSKY = (
    "1 - (I + smooth_nr) / max(I + alpha FP + beta FN + smooth_dr, floor), averaged over the regions of samples and "
    "classes"
)
_SALEHI = (
    "S. S. M. Salehi, D. Erdogmus, A. Gholipour, Tversky loss function for image segmentation using 3D fully "
    "convolutional deep networks, MLMI 2017"
)

tversky_loss = define_regions(
    name="tversky_loss",
    summary="Tversky loss: a Dice loss that weighs false positives and false negatives differently.",
    formula=_TVERSKY,
    operands=_OPERANDS,
    presets=_TVERSKY_PRESETS,
    positional="input target alpha beta",
    convention=_CONVENTION,
    cases=({}, {"alpha": 0.3, "beta": 0.7, "pool": "batch"}),
    notes="alpha = beta = 1/2 is `dice_loss`, alpha = beta = 1 `jaccard_loss`. Keras up to 3.15 swaps alpha and beta "
    f"relative to its documentation and to this function. {_OF_PRESETS}",
    source=_SALEHI,
)

focal_tversky_loss = define_regions(
    name="focal_tversky_loss",
    summary="Focal Tversky loss: a power of the Tversky loss that gives more weight to regions that overlap well.",
    formula=f"(1 - S)^gamma with 1 - S = {_TVERSKY.split(', averaged')[0]}, averaged over the regions of samples and "
    "classes",
    operands=_OPERANDS,
    defaults={"alpha": 0.3, "beta": 0.7, "gamma": 0.75},
    presets=_TVERSKY_PRESETS,
    positional="input target alpha beta gamma",
    convention=_CONVENTION,
    cases=({}, {"gamma": 2.0, "gamma_over": "mean"}),
    notes="`gamma` is the inverse of the paper's, which is 4/3. smp raises the mean, the others each region's loss. "
    f"{_OF_PRESETS}",
    source="N. Abraham, N. M. Khan, A novel focal Tversky loss function with improved attention U-Net for lesion "
    "segmentation, ISBI 2019",
)

generalized_dice_loss = define_regions(
    name="generalized_dice_loss",
    summary="Generalized Dice loss: the Dice loss of all classes together, weighted by the inverse of their sizes.",
    formula="1 - (sum_c w_c I_c + smooth_nr) / max(sum_c w_c (I_c + FP_c / 2 + FN_c / 2) + smooth_dr, floor) for each "
    "sample, with w_c = 1 / T_c^2 and T_c = I_c + FN_c",
    operands=_OPERANDS,
    fixed=_DICE,
    defaults={"pool": "class", "weighting": "square"},
    presets={"monai": {"absent": "keep", "smooth_nr": 5e-6, "smooth_dr": 5e-6}},
    positional="input target",
    convention=_CONVENTION,
    cases=({}, {"pool": "both", "weighting": "simple"}),
    notes="With pool='both' sizes are those over all samples. A class without true voxels has the largest weight of "
    f"the others. {_OF_PRESETS}",
    source="C. H. Sudre, W. Li, T. Vercauteren, S. Ourselin, M. J. Cardoso, Generalised Dice overlap as a deep "
    "learning loss function for highly unbalanced segmentations, DLMIA 2017",
)

#: Reference formulas of the losses of single logits, which serve as losses of voxels.
_BINARY = {
    name: x.reference
    for name, x in {"cross_entropy": binary_cross_entropy_with_logits, "focal": sigmoid_focal_loss}.items()
    if x.reference is not None
}
_SHARE = "Factor of the {} loss."


def _cross_entropy_row(xp, nll, rest, smooth, weight, label_smoothing):
    cost = weighted(xp, (1 - label_smoothing) * weight, nll)
    return cost + label_smoothing * smooth if label_smoothing else cost


def _cross_entropy_term(xp, log_p, target, weight, classes, label_smoothing):
    return weighted(xp, weight * ((1 - label_smoothing) * target + label_smoothing / classes), -log_p)


def _cross_entropy_element(xp, input, target, weight, label_smoothing):
    return weighted(xp, weight, _BINARY["cross_entropy"](xp, input, target, xp.ones_like(target)))


dice_ce_loss = define_regions(
    name="dice_ce_loss",
    module="DiceCELoss",
    summary="Sum of the Dice loss and the cross entropy, in the same two reads of the logits.",
    formula="lambda_dice dice_loss + lambda_ce mean of -w_y log p_y over the voxels; of the binary cross entropy of "
    "each class with activation='sigmoid'",
    operands=_OPERANDS,
    fixed=_DICE,
    parameters=(
        Parameter("lambda_dice", 1.0, _SHARE.format("Dice")),
        Parameter("lambda_ce", 1.0, _SHARE.format("cross-entropy")),
        Parameter(
            "label_smoothing",
            0.0,
            "Share of the target that is spread evenly over all classes, in the cross entropy under a softmax.",
            minimum=0.0,
            maximum=1.0,
        ),
    ),
    share=("lambda_dice", "lambda_ce"),
    smoothing="label_smoothing",
    of_weights=True,
    constants={"hard": "1 - label_smoothing", "one": "1"},
    row="weighted(hard * weight, nll) + weighted(label_smoothing, smooth)",
    term="weighted(weight * (-hard * target - label_smoothing / classes), log_p)",
    element="weighted(weight, log_loss_of_logit(input, target, one))",
    references={"row": _cross_entropy_row, "term": _cross_entropy_term, "element": _cross_entropy_element},
    presets={"monai": _MONAI, "nnunet": _NNUNET},
    positional="input target",
    convention=_CONVENTION,
    cases=({}, {"activation": "sigmoid", "lambda_ce": 0.5}, {"label_smoothing": 0.1, "lambda_dice": 2.0}),
    notes="For labels the cross entropy is divided by the sum of the weights of the labels, as `cross_entropy` is; for "
    "a target per class by the number of voxels, and under a sigmoid by that of voxels and classes. `class_weight` "
    f"weighs the Dice loss: pass MONAI's `weight` as both. {_OF_PRESETS}",
    source=f"{_MILLETARI}; F. Isensee et al., nnU-Net: a self-configuring method for deep learning-based biomedical "
    "image segmentation, Nature Methods 18, 2021",
)


def _focal_row(xp, nll, rest, smooth, weight, gamma_focal, alpha_focal):
    infinite = xp.isinf(nll)
    safe = xp.where(infinite, xp.zeros_like(nll), nll)
    return weighted(xp, weight, xp.where(infinite, nll, power(xp, rest, gamma_focal) * safe))


def _focal_element(xp, input, target, weight, gamma_focal, alpha_focal):
    return weighted(xp, weight, _BINARY["focal"](xp, input, target, alpha_focal, gamma_focal))


dice_focal_loss = define_regions(
    name="dice_focal_loss",
    summary="Sum of the Dice loss and the focal loss, in the same two reads of the logits.",
    formula="lambda_dice dice_loss + lambda_focal mean of the focal loss: of each class's logit with "
    "focal_over='sigmoid', -w_y (1 - p_y)^gamma_focal log p_y of each voxel with 'softmax'",
    operands=_OPERANDS,
    fixed=_DICE,
    parameters=(
        Parameter("lambda_dice", 1.0, _SHARE.format("Dice")),
        Parameter("lambda_focal", 1.0, _SHARE.format("focal")),
        Parameter("gamma_focal", 2.0, "Exponent of the focal loss.", minimum=0.0),
        Parameter(
            "alpha_focal",
            -1.0,
            "Weight of positive elements under a sigmoid, negative ones having 1 - alpha_focal. A negative one turns "
            "these weights off.",
            maximum=1.0,
        ),
    ),
    flags=(
        Flag(
            "focal_over",
            "sigmoid",
            "The focal loss of every class's logit alone, or that of the label's probability under a softmax.",
            ("sigmoid", "softmax"),
        ),
    ),
    share=("lambda_dice", "lambda_focal"),
    chosen_by="focal_over",
    constants={"negatives": "1 - alpha_focal"},
    row="weighted(weight, focused(nll, rest, gamma_focal))",
    element="weighted(weight, focal(input, target, alpha_focal, negatives, gamma_focal))",
    tentative="gamma_focal == 2",
    references={"row": _focal_row, "element": _focal_element},
    presets={"monai": _MONAI},
    positional="input target",
    convention=_CONVENTION,
    cases=({}, {"focal_over": "softmax", "gamma_focal": 1.5}, {"activation": "sigmoid", "alpha_focal": 0.25}),
    notes="As in MONAI, the focal loss is that of every class's logit even where the Dice loss has a softmax. Under a "
    "sigmoid the focal loss is averaged over voxels and classes, under a softmax over voxels. `class_weight` weighs "
    f"the Dice loss, `weight` the focal loss. {_OF_PRESETS}",
    source=f"{_MILLETARI}; T.-Y. Lin, P. Goyal, R. Girshick, K. He, P. Dollár, Focal loss for dense object detection, "
    "ICCV 2017",
)

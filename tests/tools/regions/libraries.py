"""Region losses of other libraries: their settings as options of :func:`region_loss`, and numbers that they return.

The numbers are those of one example, ``LOGITS`` with ``LABELS`` or ``IGNORED``, in float64. They were computed from the
published formulas and agree with the libraries, which ``tests/test_migrating.py`` runs where they are installed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

#: (sample, class, row, column).
PROBABILITIES = torch.tensor(
    [
        [[[0.7, 0.2], [0.1, 0.5]], [[0.2, 0.6], [0.3, 0.3]], [[0.1, 0.2], [0.6, 0.2]]],
        [[[0.8, 0.4], [0.3, 0.6]], [[0.1, 0.5], [0.6, 0.1]], [[0.1, 0.1], [0.1, 0.3]]],
    ],
    dtype=torch.float64,
)
LOGITS = PROBABILITIES.log()
#: Class 2 is absent from the second sample.
LABELS = torch.tensor([[[0, 1], [2, 0]], [[0, 1], [1, 0]]])
IGNORE = 255
#: One voxel is ignored.
IGNORED = LABELS.clone()
IGNORED[0, 1, 1] = IGNORE
WEIGHTS = (1.0, 2.0, 3.0)

_MONAI = {"smooth_nr": 5e-6, "smooth_dr": 5e-6, "absent": "keep"}
_SMP = {"pool": "batch", "overlap": "min", "floor": 1e-7, "absent": "zero", "mean_of_weights": True}
_NNUNET = {"floor": 5e-9, "offset": 0.0, "absent": "keep"}
_TRAINER = {**_NNUNET, "smooth_nr": 5e-6, "smooth_dr": 5e-6, "include_background": False}
_MICRO = {"pool": "class", "smooth_dr": 5e-9, "weight_in": "score", "absent": "keep"}
_KORNIA = {"average": "samples", "empty": 1.0}
_KERAS = {"pool": "both", "activation": "none", "absent": "keep"}
_MASKS = {"smooth_nr": 0.5, "smooth_dr": 0.5}
_JACCARD = {"alpha": 1.0, "beta": 1.0}
_FOCAL = {"alpha": 0.3, "beta": 0.7, "gamma": 0.75}
_TVERSKY: Mapping[str, Mapping[str, Any]] = {
    "monai": {"smooth_nr": 1e-5, "smooth_dr": 1e-5, "absent": "keep"},
    "smp": {**_SMP, "gamma_over": "mean"},
    "kornia": {**_KORNIA, "smooth_dr": 1e-8},
    "keras": {**_KERAS, "smooth_dr": 1e-7},
}

#: Options of the formula for each function and preset, and for its defaults.
PRESETS: Mapping[tuple[str, str | None], Mapping[str, Any]] = {
    ("dice_loss", None): {},
    ("dice_loss", "monai"): _MONAI,
    ("dice_loss", "smp"): _SMP,
    ("dice_loss", "nnunet"): _TRAINER,
    ("dice_loss", "nnunet_soft"): {**_NNUNET, **_MASKS},
    ("dice_loss", "kornia"): _MICRO,
    ("dice_loss", "kornia_micro"): _MICRO,
    ("dice_loss", "kornia_macro"): {**_KORNIA, "smooth_dr": 5e-9, "mean_of_weights": True},
    ("dice_loss", "keras"): {**_KERAS, "smooth_dr": 5e-8},
    ("dice_loss", "maskformer"): {**_MASKS, "activation": "sigmoid", "absent": "keep"},
    ("jaccard_loss", None): _JACCARD,
    ("jaccard_loss", "monai"): {**_MONAI, **_JACCARD},
    ("jaccard_loss", "smp"): {**_SMP, **_JACCARD},
    ("generalized_dice_loss", None): {"pool": "class", "weighting": "square"},
    ("generalized_dice_loss", "monai"): {**_MONAI, "pool": "class", "weighting": "square"},
    **{("tversky_loss", name): settings for name, settings in {None: {}, **_TVERSKY}.items()},
    **{("focal_tversky_loss", name): {**_FOCAL, **settings} for name, settings in {None: {}, **_TVERSKY}.items()},
    ("dice_ce_loss", None): {},
    ("dice_ce_loss", "monai"): _MONAI,
    ("dice_ce_loss", "nnunet"): _TRAINER,
    ("dice_focal_loss", None): {},
    ("dice_focal_loss", "monai"): _MONAI,
}


class Row(NamedTuple):
    """One call: function, preset and options, the value without and with an ignored voxel, and two gradients.

    ``slopes`` are the derivatives with respect to ``LOGITS[0, 1, 0, 0]`` and ``LOGITS[1, 2, 0, 1]``.
    """

    function: str
    preset: str | None
    options: Mapping[str, Any]
    value: float
    ignored: float
    slopes: tuple[float, float]

    @property
    def settings(self) -> dict[str, Any]:
        """Options of the formula."""
        return {**PRESETS[self.function, self.preset], **self.options}


_ASYMMETRIC = {"alpha": 0.3, "beta": 0.7}
_BATCH = {"pool": "batch"}
_SQUARED = {"overlap": "squared"}
_WEIGHTED = {"class_weight": WEIGHTS}
_FOREGROUND = {"include_background": False}
_DICE, _GDL = "dice_loss", "generalized_dice_loss"

ROWS: Sequence[Row] = (
    Row(_DICE, None, {}, 0.378652729384, 0.349479797054, (0.0160925170, 0.0027078639)),
    Row(_DICE, "monai", {}, 0.482206695833, 0.457895842598, (0.0134104009, 0.0022569586)),
    Row("jaccard_loss", "monai", {}, 0.621065627487, 0.596910879016, (0.0141943004, 0.0025077860)),
    Row(_DICE, "monai", _SQUARED, 0.309096186572, 0.289391407335, (0.0114014250, 0.0022748866)),
    Row(_DICE, "monai", _BATCH, 0.424950206714, 0.400614167910, (0.0125632025, 0.0078417252)),
    Row(_DICE, "monai", _FOREGROUND, 0.565470740322, 0.532576039549, (0.0069727907, 0.0050511109)),
    Row(_DICE, "monai", _WEIGHTED, 1.097279309610, 1.041013610163, (0.0171518997, 0.0056247825)),
    Row("tversky_loss", "monai", _ASYMMETRIC, 0.488143858217, 0.465778082476, (0.0134191743, 0.0031191213)),
    Row(_GDL, "monai", {}, 0.408428884031, 0.370832090283, (0.0119632091, 0.0062499688)),
    Row(_GDL, "monai", {"pool": "both"}, 0.500363383437, 0.458822314882, (0.0031556703, 0.0136682939)),
    Row(_DICE, "smp", {}, 0.424951267057, 0.400615260069, (0.0125632198, 0.0078417291)),
    Row(_DICE, "smp", {"log_loss": True}, 0.569036860380, 0.523265647639, (0.0186959564, 0.0162366701)),
    Row("jaccard_loss", "smp", {}, 0.589761904762, 0.566583688952, (0.0140929705, 0.0068616327)),
    Row("focal_tversky_loss", "smp", {"gamma": 1.5}, 0.268904473292, 0.247422836709, (0.0116201586, 0.0074753905)),
    Row(_DICE, "nnunet_soft", {}, -0.704429314028, -0.730430365790, (0.0107645521, 0.0073191386)),
    Row(_DICE, "nnunet", _BATCH, -0.520469219015, -0.554816197746, (0.0067257099, 0.0135631406)),
    Row(_DICE, "nnunet", {}, -0.434529259678, -0.467423960451, (0.0069727907, 0.0050511109)),
    Row(_DICE, "kornia_micro", {}, 0.387500000766, 0.370833334252, (0.0175000000, 0.0062500000)),
    Row(_DICE, "kornia_micro", _WEIGHTED, 0.424328767551, 0.401075630744, (0.0119534622, 0.0109952000)),
    Row(_DICE, "kornia_macro", {}, 0.369744485208, 0.345433708729, (0.0134104308, 0.0033848299)),
    Row(_DICE, "kornia_macro", _WEIGHTED, 0.380623308375, 0.352490476680, (0.0085759637, 0.0056235566)),
    Row("tversky_loss", "kornia", _ASYMMETRIC, 0.379473724978, 0.357108098047, (0.0134192393, 0.0046766324)),
)

#: Cross entropy of the example: plain, with the ignored voxel, with WEIGHTS, and its sum with the dice of MONAI for
#: label smoothing of 0.1.
CROSS_ENTROPY = 0.501176918930
CROSS_ENTROPY_IGNORED = 0.473752595840
CROSS_ENTROPY_WEIGHTED = 0.518912694389
MONAI_DICE_CE = 0.983383614763
MONAI_DICE_CE_WEIGHTED = 1.616192004000
MONAI_DICE_CE_SMOOTHED = 1.067838608709
NNUNET_DC_CE = -0.019292300085
NNUNET_DC_CE_IGNORED = -0.081063601906
MONAI_FOCAL = 0.132313730210
#: Defaults of dice_loss and jaccard_loss with other parameters.
FOCAL_TVERSKY = 0.488638383655
JACCARD = 0.545281803543


def masks() -> tuple[Tensor, Tensor]:
    """Probabilities and targets (sample, 1, row, column) of the example in Keras's documentation."""
    p = torch.tensor([[[[0.0, 1.0], [0.0, 1.0]]], [[[0.4, 0.0], [0.0, 0.9]]]], dtype=torch.float64)
    t = torch.tensor([[[[1.0, 1.0], [0.0, 0.0]]]] * 2, dtype=torch.float64)
    return p, t


#: Results for :func:`masks`.
KERAS_DICE = 0.616438361419
KERAS_DICE_OF_SAMPLES = (0.500000012500, 0.757575764922)
KERAS_TVERSKY = 0.630606869905
#: Keras 3.15.1 swaps alpha and beta.
KERAS_TVERSKY_SWAPPED = 0.601139612503
MASKFORMER = (0.4, 0.581395348837)

"""Other libraries' losses: the call pairs of docs/migrating.md return the same, and presets the published values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from math import isnan, nan
from typing import Any

import pytest
import torch
from tools import migrating
from tools.migrating import PAGE, Pair, Section
from tools.regions import libraries
from tools.regions.libraries import IGNORE, IGNORED, LABELS, LOGITS, PRESETS, Row
from tools.regions.truth import cross_entropy, focal, region_loss
from torch import Tensor

from cupylosses import functional as F
from cupylosses.definition.registry import registry
from cupylosses.engines.regions.definition import RegionLoss

#: Accepted error of a value, and of a gradient relative to its largest element. Some libraries compute in float32.
TOLERANCE = 1e-6

every_pair = pytest.mark.parametrize(
    ("section", "pair"),
    [
        pytest.param(section, pair, id=f"{section.title}-{number}")
        for section in migrating.sections()
        for number, pair in enumerate(section.pairs)
    ],
)


@pytest.fixture(scope="module")
def operands() -> Mapping[str, Any]:
    return migrating.operands()


@every_pair
def test_the_page_has_our_number(section: Section, pair: Pair, operands: Mapping[str, Any]) -> None:
    value, _ = migrating.evaluate(pair.here, operands)
    assert f"{value:.10f}" == f"{float(pair.returned):.10f}"
    assert abs(value - float(pair.returns)) < TOLERANCE


@every_pair
def test_the_library_returns_the_same(section: Section, pair: Pair, operands: Mapping[str, Any]) -> None:
    try:
        library = migrating.library(section)
    except ImportError as error:
        pytest.skip(str(error))
    value, _ = migrating.evaluate(pair.there, {**operands, **library})
    assert abs(value - float(pair.returns)) < TOLERANCE
    for names in (operands, migrating.random_operands(0)):
        value, gradients = migrating.evaluate(pair.there, {**names, **library})
        ours, ours_gradients = migrating.evaluate(pair.here, {**names, **library})
        assert abs(value - ours) < TOLERANCE
        assert gradients.keys() == ours_gradients.keys() and gradients
        for name, gradient in gradients.items():
            scale = gradient.abs().max().item()
            torch.testing.assert_close(ours_gradients[name], gradient, rtol=0, atol=TOLERANCE * scale, msg=name)


#: Section, the library's call, and ours, for labels some of which are ignored.
IGNORING = [
    (
        "MONAI",
        "DiceLoss(**o, ignore_index=255)(z, i[:, None])",
        'F.dice_loss(z, i, preset="monai", ignore_index=255)',
    ),
    (
        "segmentation_models_pytorch",
        "DiceLoss(m, ignore_index=255)(z, i)",
        'F.dice_loss(z, i, preset="smp", ignore_index=255)',
    ),
    (
        "nnU-Net",
        "DC_and_CE_loss(batch, {}, ignore_label=255, **efficient)(z, i[:, None])",
        'F.dice_ce_loss(z, i, preset="nnunet", pool="batch", ignore_index=255)',
    ),
    (
        "kornia",
        "dice_loss(z, i, ignore_index=255)",
        'F.dice_loss(z, i, preset="kornia_micro", ignore_index=255)',
    ),
]


@pytest.mark.parametrize(("title", "there", "here"), IGNORING, ids=[x[0] for x in IGNORING])
def test_nan_under_an_ignored_label_is_used_there_only(title: str, there: str, here: str) -> None:
    names, spoilt = migrating.operands(), migrating.operands()
    with torch.no_grad():
        spoilt["z"][0, 0, 1, 1] = nan
    (value, gradients), (clean, expected) = (migrating.evaluate(here, x) for x in (spoilt, names))
    assert value == clean and torch.equal(gradients["z"], expected["z"])
    try:
        library = migrating.library(next(x for x in migrating.sections() if x.title == title))
    except ImportError as error:
        pytest.skip(str(error))
    value, gradients = migrating.evaluate(there, {**spoilt, **library})
    assert isnan(value) and gradients["z"].isnan().double().mean() >= 0.5


def test_the_page_names_every_preset() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for name, loss in registry(RegionLoss).items():
        missing = [x for x in loss.presets if f'preset="{x}"' not in text]
        assert not missing, (name, missing)


# ----------------------------------------------------------------------------------------------------------------------
# Published values

every_row = pytest.mark.parametrize(
    "row", libraries.ROWS, ids=[f"{x.function}-{x.preset}-{i}" for i, x in enumerate(libraries.ROWS)]
)


def shipped(function: str, preset: str | None, options: Mapping[str, Any]) -> Callable[..., Tensor]:
    """Returns a function of this library, bound to a preset and options."""
    given = dict(options)
    for name in {"class_weight", "weight"} & given.keys():
        given[name] = torch.tensor(given[name], dtype=torch.float64)
    return partial(getattr(F, function), preset=preset, **given)


def check_row(function: Callable[..., Tensor], row: Row) -> None:
    logits = LOGITS.clone().requires_grad_()
    value = function(logits, LABELS)
    (gradient,) = torch.autograd.grad(value, logits)
    ignored = function(LOGITS, IGNORED, ignore_index=IGNORE)
    assert value.item() == pytest.approx(row.value, rel=0, abs=1e-11)
    assert ignored.item() == pytest.approx(row.ignored, rel=0, abs=1e-11)
    slopes = gradient[0, 1, 0, 0].item(), gradient[1, 2, 0, 1].item()
    assert slopes == pytest.approx(row.slopes, rel=0, abs=1e-10)


@every_row
def test_the_truth_has_the_published_numbers(row: Row) -> None:
    check_row(partial(region_loss, **row.settings), row)


@every_row
def test_presets_have_the_published_numbers(row: Row) -> None:
    check_row(shipped(row.function, row.preset, row.options), row)


@pytest.mark.parametrize(
    ("function", "preset", "options", "expected"),
    [
        ("dice_ce_loss", "monai", {}, libraries.MONAI_DICE_CE),
        (
            "dice_ce_loss",
            "monai",
            {"class_weight": libraries.WEIGHTS, "weight": libraries.WEIGHTS},
            libraries.MONAI_DICE_CE_WEIGHTED,
        ),
        ("dice_ce_loss", "monai", {"label_smoothing": 0.1}, libraries.MONAI_DICE_CE_SMOOTHED),
        ("dice_ce_loss", "nnunet", {"pool": "batch"}, libraries.NNUNET_DC_CE),
        ("dice_ce_loss", None, {"lambda_dice": 0.0}, libraries.CROSS_ENTROPY),
        ("dice_focal_loss", None, {"lambda_dice": 0.0}, libraries.MONAI_FOCAL),
        ("focal_tversky_loss", None, {}, libraries.FOCAL_TVERSKY),
        ("jaccard_loss", None, {}, libraries.JACCARD),
    ],
)
def test_sums_have_the_published_numbers(
    function: str, preset: str | None, options: Mapping[str, Any], expected: float
) -> None:
    value = shipped(function, preset, options)(LOGITS, LABELS)
    assert value.item() == pytest.approx(expected, rel=0, abs=1e-11)


def test_ignored_voxels_are_in_neither_part_of_a_sum() -> None:
    value = F.dice_ce_loss(LOGITS, IGNORED, preset="nnunet", pool="batch", ignore_index=IGNORE)
    assert value.item() == pytest.approx(libraries.NNUNET_DC_CE_IGNORED, rel=0, abs=1e-11)


def test_keras_and_maskformer_have_the_published_numbers() -> None:
    p, t = libraries.masks()
    assert F.dice_loss(p, t, preset="keras").item() == pytest.approx(libraries.KERAS_DICE, rel=0, abs=1e-11)
    each = F.dice_loss(p, t, preset="keras", pool="class", reduction="none")
    assert each.flatten().tolist() == pytest.approx(libraries.KERAS_DICE_OF_SAMPLES, rel=0, abs=1e-11)
    for alpha, expected in ((0.3, libraries.KERAS_TVERSKY), (0.7, libraries.KERAS_TVERSKY_SWAPPED)):
        value = F.tversky_loss(p, t, alpha, 1 - alpha, preset="keras")
        assert value.item() == pytest.approx(expected, rel=0, abs=1e-11)
    masks = F.dice_loss(p, t, preset="maskformer", activation="none", reduction="none")
    assert masks.flatten().tolist() == pytest.approx(libraries.MASKFORMER, rel=0, abs=1e-11)


# ----------------------------------------------------------------------------------------------------------------------
# Presets against the formula


def test_every_preset_is_in_the_truth() -> None:
    losses = registry(RegionLoss).items()
    assert PRESETS.keys() == {(name, preset) for name, loss in losses for preset in (None, *loss.presets)}


@pytest.mark.parametrize(("function", "preset"), PRESETS, ids=[f"{x}-{y}" for x, y in PRESETS])
@pytest.mark.parametrize("kind", ["labels", "ignored", "dense", "weighted"])
def test_presets_are_the_formula_on_random_operands(function: str, preset: str | None, kind: str) -> None:
    made, settings = migrating.random_operands(1), PRESETS[function, preset]
    target = made[{"labels": "y", "ignored": "i", "dense": "q", "weighted": "y"}[kind]]
    options: dict[str, Any] = {"ignore_index": IGNORE} if kind == "ignored" else {}
    weights: dict[str, Any] = {}
    pools_classes = settings.get("pool") in ("class", "both") and settings.get("weight_in") != "score"
    if kind == "weighted" and not pools_classes:
        weights["class_weight"] = made["w"].tolist()
    operand = made["z"] if settings.get("activation") != "none" else made["p"]

    def truth(x: Tensor) -> Tensor:
        value = region_loss(x, target, **settings, **options, **weights)
        if function == "dice_ce_loss":
            value = value + cross_entropy(x, target, **options)
        if function == "dice_focal_loss":
            value = value + focal(x, target, **options)
        return value

    value, right = shipped(function, preset, {**options, **weights})(operand, target), truth(operand)
    assert value.item() == pytest.approx(right.item(), rel=1e-12, abs=1e-12)
    slopes, expected = (torch.autograd.grad(x, operand)[0] for x in (value, right))
    torch.testing.assert_close(slopes, expected, rtol=0, atol=1e-12 * expected.abs().max().item())

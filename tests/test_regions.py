"""Region losses: reference numbers that pin presets and conventions, and properties that only these losses have."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
import pytest
import torch
from devices import HOST, KERNELS
from grids import in_turn, short_or_full
from tools import cupy_stand_in as stand_in

import cupylosses
import cupylosses.functional as F
from cupylosses import nn
from cupylosses.backends.torch import formulas, plans
from cupylosses.call import Call
from cupylosses.definition.registry import registry
from cupylosses.engines.base import Machine, TensorSpec
from cupylosses.engines.record import KernelRecorder, placeholder
from cupylosses.engines.regions import engine as regions_engine
from cupylosses.engines.regions.definition import RegionLoss
from cupylosses.engines.regions.layout import (
    GRADIENT_THREADS,
    TILE_BYTES,
    VoxelStream,
    classes_in_registers,
    gradient_chunks,
    gradient_piece,
    layout,
    shared_tile,
    sums_bytes,
)
from cupylosses.jit.gpu import Chip
from cupylosses.testing import host
from cupylosses.testing.check import Check, perform
from cupylosses.testing.regions.check import LAYOUTS
from cupylosses.testing.tolerance import same_bits

#: Probabilities of three classes in two samples of 2 x 2 voxels, and labels; class 2 is absent from sample 1.
P = (
    (((0.7, 0.2), (0.1, 0.5)), ((0.2, 0.6), (0.3, 0.3)), ((0.1, 0.2), (0.6, 0.2))),
    (((0.8, 0.4), (0.3, 0.6)), ((0.1, 0.5), (0.6, 0.1)), ((0.1, 0.1), (0.1, 0.3))),
)
Y = (((0, 1), (2, 0)), ((0, 1), (1, 0)))
WEIGHTS = torch.tensor((1.0, 2.0, 3.0), dtype=torch.float64)
CROSS_ENTROPY, FOCAL = 0.501176918930, 0.132313730210

#: Function, options, value, value with one voxel ignored, and two entries of the gradient with respect to the logits.
PRESETS = {
    "defaults": ("dice", {}, 0.378652729384, 0.349479797054, 0.0160925170, 0.0027078639),
    "monai": ("dice", {"preset": "monai"}, 0.482206695833, 0.457895842598, 0.0134104009, 0.0022569586),
    "monai jaccard": ("jaccard", {"preset": "monai"}, 0.621065627487, 0.596910879016, 0.0141943004, 0.0025077860),
    "monai squared": (
        "dice",
        {"preset": "monai", "overlap": "squared"},
        0.309096186572,
        0.289391407335,
        0.0114014250,
        0.0022748866,
    ),
    "monai batch": (
        "dice",
        {"preset": "monai", "pool": "batch"},
        0.424950206714,
        0.400614167910,
        0.0125632025,
        0.0078417252,
    ),
    "monai foreground": (
        "dice",
        {"preset": "monai", "include_background": False},
        0.565470740322,
        0.532576039549,
        0.0069727907,
        0.0050511109,
    ),
    "monai weights": (
        "dice",
        {"preset": "monai", "class_weight": WEIGHTS},
        1.097279309610,
        1.041013610163,
        0.0171518997,
        0.0056247825,
    ),
    "monai tversky": (
        "tversky",
        {"preset": "monai", "alpha": 0.3, "beta": 0.7},
        0.488143858217,
        0.465778082476,
        0.0134191743,
        0.0031191213,
    ),
    "monai gdl": (
        "generalized_dice",
        {"preset": "monai"},
        0.408428884031,
        0.370832090283,
        0.0119632091,
        0.0062499688,
    ),
    "monai gdl batch": (
        "generalized_dice",
        {"preset": "monai", "pool": ("batch", "class")},
        0.500363383437,
        0.458822314882,
        0.0031556703,
        0.0136682939,
    ),
    "smp": ("dice", {"preset": "smp"}, 0.424951267057, 0.400615260069, 0.0125632198, 0.0078417291),
    "smp log": (
        "dice",
        {"preset": "smp", "log_loss": True},
        0.569036860380,
        0.523265647639,
        0.0186959564,
        0.0162366701,
    ),
    "smp jaccard": ("jaccard", {"preset": "smp"}, 0.589761904762, 0.566583688952, 0.0140929705, 0.0068616327),
    "smp tversky": (
        "focal_tversky",
        {"preset": "smp", "alpha": 0.3, "beta": 0.7, "gamma": 1.5},
        0.268904473292,
        0.247422836709,
        0.0116201586,
        0.0074753905,
    ),
    "nnunet soft": ("dice", {"preset": "nnunet_soft"}, -0.704429314028, -0.730430365790, 0.0107645521, 0.0073191386),
    "nnunet batch": (
        "dice",
        {"preset": "nnunet", "pool": "batch"},
        -0.520469219015,
        -0.554816197746,
        0.0067257099,
        0.0135631406,
    ),
    "nnunet": ("dice", {"preset": "nnunet"}, -0.434529259678, -0.467423960451, 0.0069727907, 0.0050511109),
    "kornia": ("dice", {"preset": "kornia"}, 0.387500000766, 0.370833334252, 0.0175000000, 0.0062500000),
    "kornia weights": (
        "dice",
        {"preset": "kornia_micro", "class_weight": WEIGHTS},
        0.424328767551,
        0.401075630744,
        0.0119534622,
        0.0109952000,
    ),
    "kornia macro": ("dice", {"preset": "kornia_macro"}, 0.369744485208, 0.345433708729, 0.0134104308, 0.0033848299),
    "kornia macro weights": (
        "dice",
        {"preset": "kornia_macro", "class_weight": WEIGHTS},
        0.380623308375,
        0.352490476680,
        0.0085759637,
        0.0056235566,
    ),
    "kornia tversky": (
        "tversky",
        {"preset": "kornia", "alpha": 0.3, "beta": 0.7},
        0.379473724978,
        0.357108098047,
        0.0134192393,
        0.0046766324,
    ),
    "focal tversky": ("focal_tversky", {}, 0.488638383655, None, None, None),
    "jaccard": ("jaccard", {}, 0.545281803543, None, None, None),
    "monai dice ce": ("dice_ce", {"preset": "monai"}, 0.482206695833 + CROSS_ENTROPY, None, None, None),
    "monai dice ce weights": (
        "dice_ce",
        {"preset": "monai", "class_weight": WEIGHTS, "weight": WEIGHTS},
        1.616192004000,
        None,
        None,
        None,
    ),
    "monai dice ce smoothed": (
        "dice_ce",
        {"preset": "monai", "label_smoothing": 0.1},
        1.067838608709,
        None,
        None,
        None,
    ),
    "nnunet dc ce": (
        "dice_ce",
        {"preset": "nnunet", "pool": "batch"},
        -0.019292300085,
        -0.081063601906,
        None,
        None,
    ),
    "monai dice focal": ("dice_focal", {"preset": "monai"}, 0.482206695833 + FOCAL, None, None, None),
}


def logits():
    return torch.tensor(P, dtype=torch.float64).log()


def labels(dtype=torch.int64):
    return torch.tensor(Y).to(dtype)


def function(name):
    return getattr(F, f"{name}_loss")


#: Presets whose settings need kernels of their own.
IN_KERNELS = (
    "monai squared",
    "monai weights",
    "monai gdl batch",
    "smp log",
    "smp tversky",
    "nnunet batch",
    "kornia weights",
    "kornia macro weights",
    "monai dice ce smoothed",
    "monai dice focal",
)


@pytest.mark.kernels
@pytest.mark.parametrize("case", short_or_full(IN_KERNELS, tuple(PRESETS)))
def test_kernels_give_the_number_of_each_preset(case):
    check_preset(case, KERNELS)


@pytest.mark.parametrize("case", PRESETS)
def test_each_preset_gives_its_librarys_number(case):
    check_preset(case, "cpu")


def check_preset(case: str, device: str) -> None:
    name, options, value, ignored, *derivatives = PRESETS[case]
    options = {x: y.to(device) if isinstance(y, torch.Tensor) else y for x, y in options.items()}
    z = logits().to(device).requires_grad_()
    found = function(name)(z, labels().to(device), **options)
    assert found.item() == pytest.approx(value, abs=2e-12)
    if derivatives[0] is not None:
        (gradient,) = torch.autograd.grad(found, z)
        assert gradient[0, 1, 0, 0].item() == pytest.approx(derivatives[0], abs=6e-11)
        assert gradient[1, 2, 0, 1].item() == pytest.approx(derivatives[1], abs=6e-11)
    if ignored is not None:
        with torch.no_grad():
            z[0, :, 1, 1] = float("nan")
        y = labels().to(device)
        y[0, 1, 1] = 255
        found = function(name)(z, y, ignore_index=255, **options)
        assert found.item() == pytest.approx(ignored, abs=2e-12)
        (gradient,) = torch.autograd.grad(found, z)
        assert not gradient[0, :, 1, 1].any() and gradient.isfinite().all()


def test_probabilities_give_the_numbers_of_keras_and_maskformer():
    t = torch.tensor((((1.0, 1.0), (0.0, 0.0)),) * 2, dtype=torch.float64)
    p = torch.tensor((((0.0, 1.0), (0.0, 1.0)), ((0.4, 0.0), (0.0, 0.9))), dtype=torch.float64)
    assert float(F.dice_loss(p, t, preset="keras")) == pytest.approx(0.616438361419, abs=1e-12)
    each = F.dice_loss(p, t, preset="keras", pool="class", reduction="none")
    assert each.tolist() == pytest.approx([0.500000012500, 0.757575764922], abs=1e-12)
    tversky = [F.tversky_loss(p, t, a, b, preset="keras").item() for a, b in ((0.3, 0.7), (0.7, 0.3))]
    assert tversky == pytest.approx([0.630606869905, 0.601139612503], abs=1e-12)
    masks = F.dice_loss(
        p.reshape(2, 1, 4), t.reshape(2, 1, 4), preset="maskformer", activation="none", reduction="none"
    )
    assert masks.flatten().tolist() == pytest.approx([0.4, 0.581395348837], abs=1e-12)
    total = F.dice_loss(p.reshape(2, 1, 4), t.reshape(2, 4), preset="maskformer", activation="none", normalizer=4)
    assert float(total) == pytest.approx((0.4 + 0.581395348837) / 4, abs=1e-12)


def test_soft_targets_that_are_met_cost_nothing_by_their_minimum():
    p = torch.tensor([[[0.5, 0.25]]], dtype=torch.float64)
    t = torch.tensor([[[0.5, 1.0]]], dtype=torch.float64)
    options = {"activation": "none"}
    assert float(F.dice_loss(p, t, overlap="min", **options)) == pytest.approx(1 / 3)
    assert float(F.dice_loss(p, t, **options)) == pytest.approx(5 / 9)
    met = torch.tensor([[[1.0, 0.5]]], dtype=torch.float64, requires_grad=True)
    (of_min,) = torch.autograd.grad(F.dice_loss(met, t.flip(-1), overlap="min", **options), met)
    met = torch.tensor([[[1.0, 0.5]]], dtype=torch.float64, requires_grad=True)
    t = torch.tensor([[[1.0, 0.0]]], dtype=torch.float64)
    (of_min,) = torch.autograd.grad(F.dice_loss(met, t, overlap="min", **options), met)
    (of_product,) = torch.autograd.grad(F.dice_loss(met, t, **options), met)
    assert of_min[0, 0, 0].item() == pytest.approx(-0.08) and of_product[0, 0, 0].item() == pytest.approx(-0.48)


def test_nearly_perfect_predictions_keep_their_digits():
    z = torch.full((1, 2, 64), 20.0, dtype=torch.float64)
    z[:, 0] = 0.0
    y = torch.ones(1, 64, dtype=torch.int64)
    miss = 1 / (1 + np.exp(20.0))
    value = float(F.dice_loss(z, y))
    assert value == pytest.approx(miss / 2 / (1 - miss / 2), rel=1e-12)
    p = torch.full((1, 1, 64), 1 - 1e-12, dtype=torch.float64)
    found = float(F.dice_loss(p, torch.ones_like(p), activation="none"))
    assert found == pytest.approx((1 - (1 - 1e-12)) / 2, rel=1e-9)


def test_nothing_that_counts_is_no_number_or_what_a_preset_says():
    z = logits().requires_grad_()
    y = torch.full((2, 2, 2), -100)
    found = F.dice_loss(z, y)
    (gradient,) = torch.autograd.grad(found, z)
    assert found.isnan() and not gradient.any()
    for preset, value in {"monai": 0.0, "smp": 0.0, "nnunet": -1.0, "kornia": 1.0, "kornia_macro": 1.0}.items():
        assert float(F.dice_loss(z, y, preset=preset)) == pytest.approx(value, abs=1e-12)
    assert float(F.generalized_dice_loss(z, y, preset="monai")) == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("name", ["dice_loss", "dice_ce_loss", "dice_focal_loss"])
@pytest.mark.parametrize("shape", [(2, 3, 0), (0, 3, 4)])
def test_no_voxels_are_nothing_that_counts(name, shape):
    z = torch.randn(shape).requires_grad_()
    found = getattr(F, name)(z, torch.zeros(shape[0], shape[2], dtype=torch.int64))
    (gradient,) = torch.autograd.grad(found, z)
    assert found.isnan() and gradient.shape == shape


def test_a_label_out_of_range_spoils_its_sample_and_is_reported():
    z = logits().requires_grad_()
    y = labels()
    y[0, 0, 0] = 7
    with pytest.raises(IndexError, match=r"target\[0, 0, 0\].*got 7 for 3 classes"):
        F.dice_loss(z, y)
    each = F.dice_loss(z, y, reduction="none", check_targets="off")
    assert each[0].isnan().all() and each[1].isfinite().all()
    found = F.dice_loss(z, y, check_targets="off")
    (gradient,) = torch.autograd.grad(found, z)
    assert found.isnan() and not gradient[0, :, 0, 0].any() and gradient.isfinite().all()


@pytest.mark.parametrize("name", ["bool", "int8", "uint8", "int16", "int32", "int64"])
def test_labels_of_every_width_and_shape_are_the_same(name):
    dtype = getattr(torch, name)
    z, y = (logits(), labels(dtype)) if name != "bool" else (logits()[:, :2], labels() == 1)
    expected = float(F.dice_loss(z, y.long()))
    assert float(F.dice_loss(z, y)) == expected
    assert float(F.dice_loss(z, y[:, None])) == expected
    last = z.movedim(1, -1).contiguous()
    assert float(F.dice_loss(last, y, class_dim=-1)) == expected
    hot = torch.nn.functional.one_hot(y.long(), z.shape[1]).movedim(-1, 1)
    assert float(F.dice_loss(z, hot.to(dtype))) == pytest.approx(expected, abs=1e-15)


def test_numpy_arrays_have_values_and_gradients():
    from cupylosses import value_and_grad

    z, y = logits().numpy(), labels().numpy()
    value, gradient = value_and_grad(F.dice_loss, z, y)
    assert value == pytest.approx(0.378652729384, abs=2e-12)
    assert gradient[0, 1, 0, 0] == pytest.approx(0.0160925170, abs=6e-11)


def test_a_target_per_class_is_differentiable():
    torch.manual_seed(0)
    z = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True)
    t = torch.rand(2, 3, 5, dtype=torch.float64, requires_grad=True)
    for overlap in ("product", "min", "squared"):
        for activation in ("softmax", "sigmoid"):
            options = {"overlap": overlap, "activation": activation, "smooth_nr": 0.1, "smooth_dr": 0.2}
            assert torch.autograd.gradcheck(lambda x, y, o=options: F.dice_loss(x, y, **o), (z, t))
    assert torch.autograd.gradcheck(lambda x, y: F.dice_ce_loss(x, y), (z, t))
    assert torch.autograd.gradgradcheck(lambda x, y: F.focal_tversky_loss(x, y, preset="monai"), (z, t))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"preset": "mona"}, ValueError, r"`preset` must be one of 'monai', .* got 'mona'; did you mean 'monai'\?"),
        ({"weighting": "square"}, ValueError, r"`weighting` needs classes that are pooled"),
        ({"pool": "class", "class_weight": WEIGHTS}, ValueError, r"Pass weight_in='score'"),
        ({"average": "samples", "pool": "batch"}, ValueError, r"average='samples' needs groups of each sample"),
        ({"offset": 0.0, "gamma": 2.0}, ValueError, r"`gamma` needs a loss that is not negative"),
        ({"pool": "voxels"}, TypeError, r"`pool` must be 'none' or 'batch'"),
        ({"smooth_nr": -1.0}, ValueError, r"`smooth_nr` must be a number >= 0"),
        ({"class_weight": WEIGHTS[:2]}, ValueError, r"`class_weight` must have one number per class, shape \(3,\)"),
        ({"mask": torch.ones(3, 2, dtype=torch.bool)}, ValueError, r"`mask` must broadcast"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, error, message):
    with pytest.raises(error, match=message):
        F.dice_loss(logits(), labels(), **options)


def test_targets_that_do_not_fit_are_refused():
    z, y = logits(), labels()
    with pytest.raises(ValueError, match=r"a floating `target` has a value per class"):
        F.dice_loss(z, y.double())
    with pytest.raises(ValueError, match=r"holds labels and must have shape \(2, 2, 2\)"):
        F.dice_loss(z, y[:, 0])
    with pytest.raises(ValueError, match=r"softmax of one class is 1 everywhere"):
        F.dice_loss(z[:, :1], y)
    with pytest.raises(ValueError, match=r"needs logits, got activation='none'"):
        F.dice_ce_loss(z, y, activation="none")
    with pytest.raises(ValueError, match=r"focal_over='softmax' needs labels"):
        F.dice_focal_loss(z, torch.rand(z.shape), focal_over="softmax")


# ----------------------------------------------------------------------------------------------------------------------
# Kernels

#: Losses that together cover every per-voxel expression, and settings that change the arithmetic.
SETTINGS: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("dice_loss", {}, "mean"),
    ("dice_loss", {"overlap": "squared", "activation": "sigmoid", "pool": "batch"}, "none"),
    ("dice_loss", {"overlap": "min", "average": "samples"}, "mean"),
    ("dice_loss", {"average": "samples"}, "none"),
    ("focal_tversky_loss", {"pool": "class", "absent": "keep", "smooth_nr": 0.1}, "sum"),
    ("dice_ce_loss", {"label_smoothing": 0.1}, "mean"),
    ("dice_ce_loss", {"activation": "sigmoid"}, "mean"),
    ("dice_focal_loss", {"focal_over": "softmax"}, "mean"),
)
#: Dtypes of logits and targets.
DTYPES = (
    ("float32", "int64"),
    ("bfloat16", "uint8"),
    ("float64", "int32"),
    ("float16", "int16"),
    ("float32", "float32"),
    ("bfloat16", "bfloat16"),
)


@pytest.mark.kernels
@pytest.mark.parametrize(("setting", "dtypes", "lies"), in_turn(range(len(SETTINGS)), DTYPES, tuple(LAYOUTS)), ids=str)
def test_kernels_agree_with_the_formula(setting, dtypes, lies):
    name, case, reduction = SETTINGS[setting]
    check = Check(getattr(F, name).loss, case, dtypes, reduction, lies, KERNELS)
    if not check.possible:
        check = replace(check, dtypes=(dtypes[0], "int64"))
    assert perform(check).problems == ()


@pytest.mark.kernels
def test_more_classes_than_registers_hold():
    for dtypes in (("float32", "uint8"), ("float64", "float64")):
        check = Check(F.dice_ce_loss.loss, {}, dtypes, "mean", "many", KERNELS)
        assert perform(check).problems == ()


@pytest.mark.skipif(not HOST, reason="no C++ compiler on Linux")
@pytest.mark.parametrize(
    ("name", "case", "dtypes", "lies"),
    [
        ("dice_ce_loss", {}, ("bfloat16", "uint8"), "many, channels_last"),
        ("dice_focal_loss", {}, ("float32", "int64"), "many, channels_last"),
        ("tversky_loss", {"overlap": "squared"}, ("float64", "float64"), "many"),
    ],
    ids=str,
)
def test_tiles_in_shared_memory(name, case, dtypes, lies):
    with host.execution() as device:
        device.chip = Chip(99 << 10)
        assert perform(Check(getattr(F, name).loss, case, dtypes, "mean", lies, "cpu")).problems == ()


@pytest.mark.parametrize(
    ("strides", "dim", "copied"),
    [
        ((1, 5, 10, 30), 1, True),  # samples last
        ((2, 1, 80, 10), 1, True),  # samples before the classes, which are last
        ((42, 1, 14, 2), 1, False),  # channels last
        ((42, 21, 7, 1), 1, False),
        ((42, 21, 1, 3), 1, False),
        ((1, 5, 35), None, True),
        ((21, 7, 1), None, False),
        ((0, 7, 1), None, False),
    ],
)
def test_samples_between_voxels(strides, dim, copied):
    shape = (5, 2, 3, 7) if dim else (5, 3, 7)
    assert regions_engine.is_interleaved(TensorSpec("float32", shape, strides), dim, 1) == copied
    assert not regions_engine.is_interleaved(TensorSpec("float32", shape, strides), dim, prod(shape) + 1)
    assert not regions_engine.is_interleaved(TensorSpec("float32", (0, *shape[1:]), strides), dim, 1)


def test_two_samples_between_voxels_whose_classes_are_side_by_side():
    assert regions_engine.is_interleaved(TensorSpec("float32", (2, 3, 64), (3, 1, 6)), 1, 1)
    assert not regions_engine.is_interleaved(TensorSpec("float32", (2, 64), (1, 2)), None, 1)


@pytest.mark.parametrize(("classes", "written"), [(2, True), (3, False)])
def test_planes_with_gaps_are_copied(classes, written):
    """First derivatives copy an input of two planes with gaps; second derivatives copy any number of such planes."""
    shape, dense = (5, classes, 3, 7), (21 * classes, 21, 7, 1)
    x, y = TensorSpec("bfloat16", shape, (33 * classes, 33, 11, 1)), TensorSpec("int64", (5, 3, 7), (21, 7, 1))
    call, machine = call_of("dice_loss", (x, y)), Machine(132, Chip())
    tangent = TensorSpec("bfloat16", shape, dense)
    along = call.loss.engine.jvp(call, (True, False), (tangent,))
    assert call.loss.engine.copies(call, (x, y), machine, 1) == ({0: dense} if written else {})
    assert call.loss.engine.copies(call, (x, y), machine, 0) == {}
    assert call.loss.engine.copies(along, (x, y, tangent), machine, 1) == {0: dense}
    assert call.loss.engine.copies(call, (tangent, y), machine, 1) == {}
    labels = TensorSpec("int64", (5, 3, 7), (24, 8, 1))
    assert call.loss.engine.copies(along, (tangent, labels, tangent), machine, 1) == {1: (21, 7, 1)}


def test_copies_are_made_for_gradients(monkeypatch):
    monkeypatch.setattr(regions_engine, "INTERLEAVED_ELEMENTS", 1)
    tensors = TensorSpec("float32", (5, 2, 3, 7), (1, 5, 10, 30)), TensorSpec("int64", (5, 3, 7), (1, 5, 15))
    call = call_of("dice_loss", tensors)
    for writes, copies in ((True, {0: (42, 21, 7, 1), 1: (21, 7, 1)}), (False, {})):
        assert call.loss.engine.copies(call, tensors, Machine(132, Chip()), writes) == copies


@pytest.mark.parametrize(
    ("shape", "dim", "dtype", "copied"),
    [
        ((2, 64, 1 << 14), 1, "bfloat16", True),
        ((2, 1 << 14, 64), 2, "bfloat16", True),
        ((2, 64, 1 << 14), 1, "float64", False),  # wide elements
        ((2, 16, 1 << 14), 1, "bfloat16", False),  # no lanes share a voxel
        ((1 << 14, 64, 1), 1, "bfloat16", False),  # one voxel per sample
    ],
)
def test_classes_side_by_side_are_copied_where_lanes_share_voxels(shape, dim, dtype, copied):
    classes, strides = shape[dim], {1: (shape[1] * shape[2], 1, shape[1]), 2: (shape[1] * shape[2], shape[2], 1)}
    voxels = prod(shape[1:]) // classes
    planes = {1: (classes * voxels, voxels, 1), 2: (classes * voxels, 1, voxels)}[dim]
    tensors = TensorSpec(dtype, shape, planes), TensorSpec(dtype, shape, strides[dim])
    call = call_of("dice_loss", tensors, class_dim=dim)
    assert call.loss.engine.copies(call, tensors, Machine(132, Chip()), True) == ({1: planes} if copied else {})


@pytest.mark.parametrize(
    ("classes", "target", "copied"),
    [
        (32, (32 * 4096, 64, 32 * 64, 1), False),  # neighbouring voxels are next to each other
        (400, (400 * 4096, 1, 400 * 64, 400), False),  # classes are next to each other, and no lanes share them
        (32, (32 * 4096, 64, 1, 32 * 64), True),
        (4, (4 * 4096, 64, 1, 4 * 64), True),  # registers hold all classes
    ],
)
def test_scattered_targets_are_copied(classes, target, copied, monkeypatch):
    """Scattered targets are copied if gradients are written; large ones are copied in forward-only calls, too."""
    shape = (8, classes, 64, 64)
    tensors = TensorSpec("float32", shape, (classes * 4096, 4096, 64, 1)), TensorSpec("float32", shape, target)
    call = call_of("dice_loss", tensors)

    def copies(writes):
        return call.loss.engine.copies(call, tensors, Machine(132, Chip()), writes)

    expected = {1: tensors[0].strides} if copied else {}
    assert copies(True) == expected
    monkeypatch.setattr(regions_engine, "SCATTERED_OF_VALUES", 8 * classes * 4096)
    assert copies(False) == expected
    monkeypatch.setattr(regions_engine, "SCATTERED_OF_VALUES", 8 * classes * 4096 + 1)
    assert copies(False) == {}


@pytest.mark.parametrize(
    ("x", "target", "copy"),
    [
        ((80, 20, 1, 4), (80, 20, 5, 1), (80, 20, 1, 4)),  # copied to the order of the input
        ((80, 20, 1, 4), (80, 20, 1, 4), None),
        ((80, 1, 4, 20), (80, 20, 1, 4), None),  # classes of the input are next to each other
        ((80, 20, 5, 1), (20, 5, 1), None),
        ((80, 20, 5, 1), (20, 1, 4), (20, 5, 1)),
        ((80, 20, 1, 4), (20, 5, 1), (20, 1, 4)),
        ((80, 20, 5, 1), (1, 10, 2), None),  # labels of two samples are interleaved
    ],
)
def test_targets_are_copied_to_the_order_of_the_input(x, target, copy, monkeypatch):
    monkeypatch.setattr(regions_engine, "SCATTERED_TARGET", 1)
    monkeypatch.setattr(regions_engine, "SCATTERED_LABELS", 1)
    tensors = TensorSpec("float32", (2, 4, 4, 5), x), TensorSpec("float32", (2, 4, 4, 5), target)
    if len(target) == 3:
        tensors = tensors[0], TensorSpec("int64", (2, 4, 5), target)
    call = call_of("dice_loss", tensors)
    monkeypatch.setattr(regions_engine, "REORDERED_INPUT", 0)
    assert call.loss.engine.copies(call, tensors, Machine(132, Chip()), True) == ({1: copy} if copy else {})
    # A small input is copied first if its voxels are not stored in the order of the shape.
    monkeypatch.setattr(regions_engine, "REORDERED_INPUT", 161)
    found = call.loss.engine.copies(call, tensors, Machine(132, Chip()), True)
    few = copy is not None and len(target) == 4
    assert found == ({0: (80, 20, 5, 1)} if few else {1: copy} if copy else {})


@pytest.mark.kernels
@pytest.mark.parametrize("kind", ["labels", "dense"])
def test_copies_of_interleaved_samples_have_the_bits_of_contiguous_ones(kind, monkeypatch, fresh_plans):
    monkeypatch.setattr(regions_engine, "INTERLEAVED_ELEMENTS", 1)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 2, 3, 7, generator=generator).to(KERNELS)
    y = torch.randint(2, (5, 3, 7), generator=generator).to(KERNELS)
    if kind == "dense":
        y = torch.nn.functional.one_hot(y, 2).movedim(-1, 1).float()
    last = x.movedim(0, -1).contiguous().movedim(-1, 0)
    other = y.movedim(0, -1).contiguous().movedim(-1, 0)
    found = []
    for one, target in ((x, y), (last, y), (last, other)):
        leaf = one.clone(memory_format=torch.preserve_format).requires_grad_()
        value = F.dice_loss(leaf, target)
        (gradient,) = torch.autograd.grad(value, leaf)
        found.append((value.detach(), gradient))
        assert gradient.stride() == leaf.stride()
    for value, gradient in found[1:]:
        assert same_bits(value, found[0][0]) and same_bits(gradient, found[0][1])


@pytest.mark.skipif(not HOST, reason="no C++ compiler on Linux")
@pytest.mark.parametrize(
    ("dtype", "shape", "second"),
    [
        ("float32", (2, 5, 9, 12), False),  # 16-byte words, and a partial warp
        ("float32", (1, 12, 9, 10), False),  # an even number of words
        ("bfloat16", (2, 13, 7, 5), False),  # words of one number, at odd offsets
        ("float32", (1, 9, 9, 11), True),
    ],
    ids=str,
)
def test_vectors_that_warps_move_have_the_bits_of_others(dtype, shape, second):
    classes, generator = shape[1], torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator).to(getattr(torch, dtype))
    y = torch.randint(classes, (shape[0], *shape[2:]), generator=generator)
    spec = TensorSpec(dtype, shape, x.contiguous(memory_format=torch.channels_last).stride())
    found = []
    with host.execution() as device:
        device.chip = Chip(227 << 10)
        tensors = spec, TensorSpec("int64", tuple(y.shape), y.stride())
        call = call_of("dice_loss", tensors)
        plan = call.loss.engine.plan(call, tensors, dtype, Machine(132, device.chip))
        assert plan.kernel("value", (True, False), False, False).by_warps
        for memory_format in (torch.contiguous_format, torch.channels_last):
            leaf = x.clone(memory_format=memory_format).requires_grad_()
            value = F.dice_loss(leaf, y)
            (result,) = torch.autograd.grad(value, leaf, create_graph=second)
            if second:
                (result,) = torch.autograd.grad(result, leaf, torch.ones_like(leaf))
            found.append((value.detach(), result))
    assert all(same_bits(a, b) for a, b in zip(*found, strict=True))


def call_of(name, tensors, **changed):
    """Returns the call of a region loss for such arrays, with default settings except ``changed``."""
    loss = registry()[name]
    arrays = [torch.empty(x.shape, dtype=getattr(torch, x.dtype)) for x in tensors]
    names = [dict(zip(("input", "target"), arrays, strict=True)).get(x) for x in loss.array_names]
    settings = dict(zip(loss.setting_names, loss.default_settings, strict=True)) | changed
    return Call(*loss.engine.bind(loss, tuple(names), tuple(settings.values())))


def test_tiles_are_as_large_as_shared_memory_allows():
    for classes, number, tile in ((21, 4, 256), (42, 4, 256), (43, 4, 128), (113, 4, 32), (114, 4, 0), (30, 8, 128)):
        assert shared_tile(classes, number, 75 << 10) == tile
        assert not tile or sums_bytes(classes, number, tile) <= TILE_BYTES
    assert shared_tile(30, 4, 4 << 10) == 0


@pytest.mark.kernels
def test_the_bits_of_a_value_depend_on_no_layout_grid_or_gradient():
    found = []
    for lies in ("vectors", "channels_last", "strided", "odd"):
        x, y = Check(F.dice_ce_loss.loss, {}, ("float32", "int64"), "mean", lies, KERNELS).operands()
        found.append(F.dice_ce_loss(x, y))
        leaf = x.clone(memory_format=torch.preserve_format).requires_grad_()
        found.append(F.dice_ce_loss(leaf, y).detach())
    assert all(same_bits(x, found[0]) for x in found)


@pytest.mark.skipif(not HOST, reason="no C++ compiler on Linux")
def test_every_grid_and_order_of_threads_gives_the_same_bits():
    shape = (2, 3, 90, 100)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator).requires_grad_()
    y = torch.randint(0, 3, (2, 90, 100), generator=generator)
    found = []
    for processors, seed in ((1, 1), (4, 2)):
        with host.execution(processors=processors, seed=seed):
            value = F.dice_loss(x, y)
            found.append((value.detach(), torch.autograd.grad(value, x)[0]))
    assert all(same_bits(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.kernels
def test_backward_runs_twice_and_follows_its_grad_output():
    x = logits().to(KERNELS).requires_grad_()
    value = F.dice_loss(x, labels().to(KERNELS))
    (first,) = torch.autograd.grad(value, x, retain_graph=True)
    (second,) = torch.autograd.grad(-3 * value, x)
    assert torch.allclose(second, -3 * first, rtol=1e-15, atol=0)


@pytest.mark.kernels
def test_infinite_logits_of_a_focal_loss():
    """The form that is tried first is not finite for infinite logits, so the voxel is evaluated again."""
    z = torch.randn(1, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    y = torch.randint(3, (1, 4, 4), generator=torch.Generator().manual_seed(1))
    z[0, :, 0, 0] = -torch.inf
    z[0, y[0, 0, 0], 0, 0] = torch.inf
    results = []
    for x in (z.to(KERNELS), z.double()):
        x.requires_grad_()
        value = F.dice_focal_loss(x, y.to(x.device), activation="sigmoid", alpha_focal=0.25)
        results.append([value.detach().cpu().double(), torch.autograd.grad(value, x)[0].cpu().double()])
    torch.testing.assert_close(*results, rtol=2e-6, atol=1e-7)


@pytest.mark.kernels
def test_other_classes_keep_their_digits_beside_a_rare_label():
    """The rare label's weight, the inverse square of its number of voxels, is some 20,000 times that of the others."""
    z = torch.randn(1, 8, 32, 32, generator=torch.Generator().manual_seed(0))
    y = torch.randint(7, (1, 32, 32), generator=torch.Generator().manual_seed(1))
    y[0, 5, 6] = 7
    z[0, 7, 5, 6] -= 4
    of_voxel = []
    for x in (z.to(KERNELS), z.double()):
        x.requires_grad_()
        (gradient,) = torch.autograd.grad(F.generalized_dice_loss(x, y.to(x.device)), x)
        of_voxel.append(gradient[0, :, 5, 6].cpu().double())
    torch.testing.assert_close(*of_voxel, rtol=4e-6, atol=0.0)


@pytest.mark.kernels
def test_a_mask_and_bad_labels_in_kernels():
    z, y = logits().to(KERNELS), labels(torch.uint8).to(KERNELS)
    mask = torch.ones(2, 2, 2, dtype=torch.bool, device=KERNELS)
    mask[0, 1, 1] = False
    z[0, :, 1, 1] = float("inf")
    z.requires_grad_()
    value = F.dice_loss(z, y, mask=mask)
    (gradient,) = torch.autograd.grad(value, z)
    assert value.item() == pytest.approx(0.349479797054, abs=2e-12)
    assert not gradient[0, :, 1, 1].any() and gradient.isfinite().all()
    y[1, 0, 0] = 200
    each = F.dice_loss(z, y, mask=mask, reduction="none", check_targets="off")
    (gradient,) = torch.autograd.grad(each.sum(), z)
    assert each[0].isfinite().all() and each[1].isnan().all()
    assert not gradient[1, :, 0, 0].any() and gradient.isfinite().all()
    with pytest.raises(IndexError, match=r"target\[1, 0, 0\].*got 200 for 3 classes"):
        F.dice_loss(z, y, mask=mask, check_targets="sync")


@pytest.mark.kernels
@pytest.mark.parametrize(
    ("classes", "width", "last"), [(50, 16, False), (50, 17, False), (50, 16, True), (5, 17, True)]
)
def test_tiles_of_logits_as_they_are_stored(classes, width, last, monkeypatch, fresh_plans):
    """Tiles hold 16-bit logits if registers cannot hold all classes: words of a class that start anywhere, or
    contiguous classes. The last case has contiguous classes in registers, an odd number that no word divides.
    """
    # With this bound, a tile fits into a block's shared memory on the host, too.
    monkeypatch.setattr("cupylosses.engines.regions.layout.DECLARED_BYTES", 4 << 10)
    fresh_plans()
    generator = torch.Generator().manual_seed(5)
    z = (4 * torch.randn(2, classes, 21, width, generator=generator)).bfloat16()
    y = torch.randint(0, classes, (2, 21, width), generator=generator)
    z[0, :, 3, 3], y[0, 3, 3] = float("nan"), 3
    y[y == 3] = 0
    y[0, 3, 3], y[1, 0, :5] = 3, 3
    results = []
    for x in (z.to(KERNELS), z.double()):
        x = (x.movedim(1, -1).contiguous().movedim(-1, 1) if last else x).requires_grad_()
        value = F.dice_ce_loss(x, y.to(x.device), ignore_index=3, out_dtype="float64")
        results.append([value.detach().cpu(), torch.autograd.grad(value, x)[0].cpu().double()])
    (value, gradient), (right, slopes) = results
    torch.testing.assert_close(value, right, rtol=1e-5, atol=0)
    torch.testing.assert_close(gradient, slopes, rtol=1e-2, atol=1e-3 * float(slopes.abs().max()))
    y[1, 2, 2] = classes
    x = z.to(KERNELS).requires_grad_()
    value = F.dice_ce_loss(x, y.to(KERNELS), ignore_index=3, check_targets="off")
    (gradient,) = torch.autograd.grad(value, x)
    assert value.isnan() and gradient.isfinite().all() and not gradient[1, :, 2, 2].any()
    with pytest.raises(IndexError, match=rf"target\[1, 2, 2\].*got {classes} for {classes} classes"):
        F.dice_ce_loss(x, y.to(KERNELS), ignore_index=3, check_targets="sync")


@pytest.mark.kernels
@pytest.mark.parametrize(
    ("function", "classes", "dtype", "dense", "options"),
    [
        (F.dice_ce_loss, 41, torch.float32, True, {}),
        (F.dice_focal_loss, 230, torch.float32, False, {}),
        (F.dice_loss, 31, torch.float64, True, {"activation": "sigmoid", "overlap": "min"}),
        (F.dice_ce_loss, 42, torch.bfloat16, False, {"label_smoothing": 0.1}),
        (F.dice_ce_loss, 66, torch.float32, False, {"ignore_index": 1}),
    ],
)
def test_lanes_that_share_the_classes_of_a_voxel(function, classes, dtype, dense, options, monkeypatch, fresh_plans):
    """Groups of 2 to 16 lanes share a voxel; some of the lanes have one class less than the others."""
    # With this bound, the sums of so many classes fit into shared memory on the host, too.
    monkeypatch.setattr("cupylosses.engines.regions.layout.DECLARED_BYTES", 4 << 10)
    fresh_plans()
    generator = torch.Generator().manual_seed(4)
    z, v, t = (torch.randn(2, classes, 5, 7, generator=generator) for _ in range(3))
    z[0, :, 1, 1], z[0, classes - 1, 2, 2] = 0, 40
    mask = torch.rand(2, 5, 7, generator=generator) < 0.8
    y = t.sigmoid() if dense else t.argmax(1)
    z, v = z.to(dtype), v.to(dtype)
    if not dense:
        options = {**options, "class_weight": torch.rand(classes, generator=generator).to(dtype)}

    def results(device, dtype):
        x, target = z.to(device, dtype).requires_grad_(), y.to(device, dtype if dense else None)
        own = {k: a.to(device, dtype) if isinstance(a, torch.Tensor) else a for k, a in options.items()}
        wanted = [x, target.requires_grad_()] if dense else [x]
        value = function(x, target, mask=mask.to(device), out_dtype="float64", **own)
        first = torch.autograd.grad(value, wanted, create_graph=True)
        (second,) = torch.autograd.grad(first[0], x, v.to(device, dtype))
        return value, *first, second

    before = plans.use_host(None)
    right = results("cpu", torch.float64)
    plans.use_host(before)
    monkeypatch.setattr(formulas, "hvp", None)
    near = {torch.float32: 2e-5, torch.float64: 1e-11, torch.bfloat16: 2e-2}[dtype]
    for a, b in zip(results(KERNELS, dtype), right, strict=True):
        torch.testing.assert_close(
            a.detach().cpu().double(), b.detach(), rtol=near, atol=near / 10 * float(b.abs().nan_to_num(0).max())
        )
    if not dense:
        y[1, 2, 2], mask[1, 2, 2] = classes, True
        with pytest.raises(IndexError, match=rf"target\[1, 2, 2\].*got {classes} for {classes} classes"):
            function(z.to(KERNELS, dtype), y.to(KERNELS), mask=mask.to(KERNELS), check_targets="sync")


@pytest.mark.plain
@pytest.mark.skipif(not HOST, reason="no C++ compiler on Linux")
@pytest.mark.parametrize(
    ("function", "classes", "dtype"), [(F.dice_loss, 33, torch.float32), (F.dice_ce_loss, 48, torch.bfloat16)]
)
def test_more_classes_in_registers_than_a_word_has_bits(function, classes, dtype):
    """A GPU with much shared memory holds as many classes in registers. Labels are compared by bits of two words."""
    generator = torch.Generator().manual_seed(6)
    z = torch.randn(2, classes, 9, 8, generator=generator).to(dtype)
    y = torch.arange(2 * 9 * 8).view(2, 9, 8) % classes
    results = []
    for wide in (dtype, torch.float64):
        x = z.to(wide).requires_grad_()
        with host.execution() if wide == dtype else nullcontext() as device:
            if device:
                device.chip = Chip(227 << 10, clusters=True)
            value = function(x, y, out_dtype="float64")
            results.append([value.detach(), torch.autograd.grad(value, x)[0].double()])
    (value, gradient), (right, slopes) = results
    torch.testing.assert_close(value, right, rtol=1e-5, atol=0)
    torch.testing.assert_close(gradient, slopes, rtol=1e-2, atol=1e-3 * float(slopes.abs().max()))


@pytest.mark.parametrize(
    ("classes", "heavy", "voxels"), [(20, False, 2), (33, False, 2), (34, False, 1), (33, True, 1)]
)
def test_pairs_of_voxels_in_registers(classes, heavy, voxels):
    """Voxels of a vector, for logits of 16 bits and labels."""
    logits, none = VoxelStream((classes * 64, 1), 64, 2), VoxelStream((0, 0), vector=False)
    streams = (logits, VoxelStream((64, 1), 0, 8), none, logits, none)
    x = layout((2, 64), classes, streams, 4, False, 200 << 10, 40, heavy, stored=not heavy, apart=True)
    assert (x.held, x.vec_size) == (classes, voxels)


@pytest.mark.parametrize(
    ("classes", "width", "options", "expected"),
    [
        (48, 64, {"apart": True}, (48, 1, 1)),
        (49, 64, {"apart": True}, (25, 2, 1)),
        (105, 64, {"apart": True}, (27, 4, 1)),
        (150, 64, {"apart": True}, (19, 8, 2)),
        (150, 65, {"apart": True}, (19, 8, 1)),
        (224, 64, {"apart": True}, (28, 8, 2)),
        (225, 64, {"apart": True}, (15, 16, 2)),
        (41, 64, {"apart": True, "heavy": True}, (11, 4, 2)),
        (160, 64, {"apart": True, "heavy": True}, (20, 8, 2)),
        (161, 64, {"apart": True, "heavy": True}, (21, 8, 1)),
        (41, 64, {}, (11, 4, 2)),
        (161, 64, {}, (11, 16, 2)),
    ],
)
def test_lanes_and_vectors_of_many_classes(classes, width, options, expected):
    """Classes of a lane, lanes, and voxels of a vector, for float32 logits and labels."""
    logits, none = VoxelStream((classes * width, 1), width, 4), VoxelStream((0, 0), vector=False)
    streams = (logits, VoxelStream((width, 1), 0, 8), none, logits, none)
    apart, heavy = options.get("apart", False), options.get("heavy", False)
    most = classes_in_registers(4, False, apart, heavy, 227 << 10)
    x = layout((2, width), classes, streams, 4, False, 200 << 10, most, shared=True, **options)
    assert (x.held, x.lanes, x.vec_size) == expected


def test_classes_in_registers_depend_on_shared_memory():
    found = {
        (apart, heavy): [classes_in_registers(4, False, apart, heavy, x << 10) for x in (64, 99, 163, 227)]
        for apart, heavy in ((False, False), (True, False), (True, True))
    }
    assert found == {
        (False, False): [20, 20, 20, 20],
        (True, False): [20, 21, 37, 48],
        (True, True): [20, 21, 37, 40],
    }
    assert [classes_in_registers(8, dense, not dense, False, 227 << 10) for dense in (False, True)] == [6, 4]


@pytest.mark.kernels
def test_a_normalizer_on_the_device_divides_the_sum():
    z, y = logits().to(KERNELS).requires_grad_(), labels().to(KERNELS)
    total = F.dice_loss(z, y, reduction="sum")
    for normalizer in (4.0, torch.tensor(4.0, device=KERNELS)):
        value = F.dice_loss(z, y, normalizer=normalizer)
        assert value.item() == pytest.approx(total.item() / 4, rel=1e-14)
        slopes = [torch.autograd.grad(v, z, retain_graph=True)[0] for v in (value, total)]
        assert torch.allclose(slopes[0], slopes[1] / 4, rtol=1e-13, atol=0)


@pytest.mark.kernels
@pytest.mark.parametrize(
    ("function", "classes", "layout", "options"),
    [
        (F.dice_ce_loss, 15, "", {"ignore_index": 1, "label_smoothing": 0.1}),
        (F.dice_focal_loss, 4, "last", {"activation": "sigmoid", "alpha_focal": 0.25}),
        (F.generalized_dice_loss, 9, "tangent", {}),
        (F.dice_ce_loss, 22, "", {"ignore_index": 1}),
        (F.dice_loss, 22, "double", {}),
        (F.focal_tversky_loss, 17, "last", {"preset": "monai", "reduction": "none"}),
        (F.dice_loss, 3, "dense", {"activation": "sigmoid", "overlap": "squared", "log_loss": True}),
        (F.dice_ce_loss, 22, "", {"label_smoothing": 0.1}),
        (F.dice_focal_loss, 7, "dense", {}),
        (F.dice_ce_loss, 18, "dense", {}),
    ],
)
def test_products_of_second_derivatives(function, classes, layout, options, monkeypatch, fresh_plans):
    """Few and many classes, any strides, a mask of voxels; dense targets add derivatives that mix input and target."""
    if layout == "double":
        # With this bound, a tile fits into a block's shared memory on the host, too, with words of two logits.
        monkeypatch.setattr("cupylosses.engines.regions.layout.DECLARED_BYTES", 4 << 10)
        fresh_plans()
    generator = torch.Generator().manual_seed(3)
    shape = (2, classes, 20, 14)
    z, v, t = (torch.randn(shape, generator=generator) for _ in range(3))
    mask = torch.rand(2, 20, 14, generator=generator) < 0.8
    y = t.sigmoid() if layout == "dense" else t.argmax(1)
    if layout == "last":
        z = z.movedim(1, -1).contiguous().movedim(-1, 1)
    if layout in ("last", "tangent"):
        v = v.movedim(1, -1).contiguous().movedim(-1, 1)

    def second(device, dtype):
        x, target = z.to(device, dtype).requires_grad_(), y.to(device)
        if layout == "dense":
            target = target.to(dtype).requires_grad_()
        value = function(x, target, mask=mask.to(device), **options)
        upstream = torch.linspace(0.5, 2, value.numel(), dtype=value.dtype, device=device).reshape(value.shape)
        upstream.requires_grad_()
        (slope,) = torch.autograd.grad(value, x, upstream, create_graph=True)
        return torch.autograd.grad(slope, [x, upstream, *[target] * (layout == "dense")], v.to(device, dtype))

    before = plans.use_host(None)
    right = second("cpu", torch.float64)
    plans.use_host(before)
    monkeypatch.setattr(formulas, "hvp", None)
    found = second(KERNELS, torch.float64 if layout == "double" else torch.float32)
    for a, b in zip(found, right, strict=True):
        torch.testing.assert_close(a.cpu().double(), b, rtol=2e-5, atol=2e-6 * float(b.abs().max()))


@pytest.mark.kernels
def test_second_derivatives_that_are_tried_first_are_those_of_another_exponent():
    """With a focal exponent of 2, products are first computed without guards; 0 times infinity must be noticed."""
    generator = torch.Generator().manual_seed(6)
    z, v = (3 * torch.randn(2, 4, 5, 8, generator=generator).to(KERNELS) for _ in range(2))
    y = torch.randint(0, 4, (2, 5, 8), generator=generator).to(KERNELS)
    # Every class of this voxel is predicted correctly, with certainty.
    z[0, :, 1, 1] = -torch.inf
    z[0, y[0, 1, 1], 1, 1] = torch.inf
    z[1, :, 2] *= 100
    found = []
    for exponent in (2.0, 2.00001):
        x = z.clone().requires_grad_()
        value = F.dice_focal_loss(x, y, activation="sigmoid", gamma_focal=exponent)
        (slope,) = torch.autograd.grad(value, x, create_graph=True)
        found.append(torch.autograd.grad(slope, x, v)[0])
    assert found[0].isfinite().all() and not found[0][0, :, 1, 1].any()
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-6)


@pytest.mark.kernels
def test_a_value_per_group_has_second_derivatives():
    z = logits().to(KERNELS).requires_grad_()
    y = labels().to(KERNELS)
    assert torch.autograd.gradgradcheck(lambda x: F.jaccard_loss(x, y, reduction="none"), (z,))


@pytest.mark.skipif(not HOST, reason="no C++ compiler on Linux")
def test_cupy():
    z = logits().requires_grad_()
    value = F.dice_loss(z, labels())
    (slope,) = torch.autograd.grad(value, z)
    with stand_in.cupy() as cupy:
        arrays = [cupy.asarray(x.detach().numpy()) for x in (z, labels())]
        found, gradient = cupylosses.value_and_grad(F.dice_loss, *arrays)
        np.testing.assert_allclose(np.asarray(found), value.item(), rtol=1e-13)
        np.testing.assert_allclose(np.asarray(gradient), slope.numpy(), rtol=1e-11, atol=1e-15)


def test_a_module_keeps_its_options():
    module = nn.DiceCELoss(preset="monai", label_smoothing=0.1)
    assert module(logits(), labels()).item() == pytest.approx(1.067838608709, abs=2e-12)
    assert "preset='monai'" in repr(module)


def test_a_value_with_its_gradient_takes_two_kernels():
    """Forward and backward run one kernel each; the residual is three numbers per sample and class."""
    recorder = KernelRecorder(Chip(227 << 10))
    call = F.dice_ce_loss.prepare(placeholder("float32", (2, 4, 64, 64)), placeholder("int64", (2, 64, 64)))
    recorder.call(call, [(True, False)])
    assert [x.kind for x in recorder.kernels] == ["value", "from_residual"]


def test_vectors_follow_from_sizes_and_strides_decide_only_how_they_are_read():
    dense = VoxelStream((64, 1), 16, 4)
    apart = VoxelStream((64, 2), 16, 4)
    packed = VoxelStream((48, 3), 1, 4)
    none = VoxelStream((0, 0), vector=False)
    first = layout((2, 16), 3, (dense, VoxelStream((16, 1), 0, 8), none, dense, none), 4, False, 1 << 16, 20)
    second = layout((2, 16), 3, (apart, VoxelStream((16, 1), 0, 8), none, dense, none), 4, False, 1 << 16, 20)
    assert (first.vec_size, first.wide) == (4, True) and (second.vec_size, second.wide) == (4, False)
    third = layout((2, 16), 3, (packed, VoxelStream((16, 1), 0, 8), none, packed, none), 4, False, 1 << 16, 20)
    assert (third.vec_size, third.wide, third.packed) == (4, True, (True, True))
    assert not any((*first.packed, *second.packed))
    assert len({(x.chunks, x.per_chunk) for x in (first, second, third)}) == 1


@pytest.mark.parametrize(
    ("itemsize", "classes", "heavy", "vec_size", "most"),
    [
        (4, 14, False, 2, 264),
        (4, 14, True, 1, 264),
        (2, 14, False, 2, 264),
        (2, 4, False, 4, 264),
        (4, 2, False, 4, 396),
    ],
)
def test_chunks_of_a_few_samples_are_one_wave_of_blocks(itemsize, classes, heavy, vec_size, most):
    """A wave is two blocks on each of 132 multiprocessors, or three with one or two classes, whatever the GPU has."""
    samples, voxels = 2, 96**3
    logits = VoxelStream((classes * voxels, 1), voxels, itemsize)
    none = VoxelStream((0, 0), vector=False)
    streams = (logits, VoxelStream((voxels, 1), 0, 8), none, logits, none)
    x = layout((samples, voxels), classes, streams, 4, dense=False, room=1 << 16, most=20, heavy=heavy)
    assert x.vec_size == vec_size
    assert 0.95 * most <= samples * x.chunks <= most
    assert (x.chunks - 1) * x.per_chunk < voxels // vec_size <= x.chunks * x.per_chunk
    # Gradients: at least 28 numbers per thread, and chunks that occupy whole blocks.
    chunks, per_chunk = gradient_chunks(x, 132)
    assert per_chunk % 128 == 0 and per_chunk // 128 * vec_size * classes >= 28
    assert (chunks - 1) * per_chunk < voxels // vec_size <= chunks * per_chunk
    # With logits in shared memory: pieces of the value's chunks, in two waves of up to six blocks per multiprocessor.
    piece = gradient_piece(x, 132)
    assert piece % GRADIENT_THREADS == 0
    assert samples * x.chunks * -(-x.per_chunk // piece) <= 2 * 6 * 132


def test_every_preset_is_documented():
    for loss in registry(RegionLoss).values():
        text = getattr(F, loss.name).__doc__
        assert all(f"'{x}'" in text for x in loss.presets), loss.name


@pytest.mark.parametrize(("dtype", "labels"), in_turn([torch.bfloat16, torch.float16], [torch.int64, torch.uint8]))
def test_logits_that_come_through_shared_memory_give_the_same_bits(dtype, labels):
    """GPUs with enough shared memory stage logits there; on others, threads load their logits directly."""
    classes = 14
    x = 4 * torch.randn(2, classes, 31, 64, generator=torch.Generator().manual_seed(0))
    y = torch.randint(0, classes, (2, 31, 64), generator=torch.Generator().manual_seed(1)).to(labels)
    x[0, 1], x[0, 2, 3], x[1, :, 7, 5], y[1, 7, 5] = float("-inf"), 80.0, float("nan"), 3
    y[0][y[0] == 1] = 2  # a class whose logits are finite
    results = []
    for shared in (48 << 10, 227 << 10):
        with host.execution() as device:
            device.chip = Chip(shared, clusters=True)
            z = x.to(dtype).requires_grad_()
            value = F.dice_ce_loss(z, y, ignore_index=3)
            (gradient,) = torch.autograd.grad(value, z)
        results.append((value, gradient))
    for of_plain, of_staged in zip(*results, strict=True):
        assert torch.isfinite(of_plain).all()
        assert torch.equal(of_plain, of_staged)

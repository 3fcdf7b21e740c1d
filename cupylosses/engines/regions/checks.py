"""Checks of region loss calls, and their error messages, in the style of :mod:`cupylosses.checks`."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from cupylosses import checks
from cupylosses.checks import FLOATING, INTEGER, dtype_name
from cupylosses.engines.regions.call import Regions, without
from cupylosses.engines.regions.definition import RegionLoss

#: Value of `pool` for each sequence of dimensions that a caller may pass instead.
_POOLS = {(): "none", ("batch",): "batch", ("class",): "class", ("batch", "class"): "both", ("class", "batch"): "both"}


def settings(loss: RegionLoss, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the checked options of a call: those passed, else those of the preset, else their defaults."""
    preset = preset_of(loss, arguments["preset"])
    options: dict[str, Any] = dict(loss.fixed)
    for spec in loss.options:
        value = arguments[spec.name]
        if value is None and spec.name in loss.of_presets:
            value = preset.get(spec.name, spec.default)
        if spec.name == "pool" and isinstance(value, (tuple, list)) and tuple(value) in _POOLS:
            value = _POOLS[tuple(value)]
        if spec in loss.parameters:
            options[spec.name] = checks.parameter(loss, spec, value)
        else:
            choice: Any = spec
            options[spec.name] = choice.choices[checks.flag(loss, choice, value)]
    empty = arguments["empty"]
    empty = preset.get("empty") if empty is None else empty
    options["empty"] = None if empty is None else checks.number(loss, "empty", empty)
    return options


def preset_of(loss: RegionLoss, name: Any) -> Mapping[str, Any]:
    """Returns the settings of a preset. Raises ValueError for an unknown name."""
    if name is None:
        return {}
    if not isinstance(name, str) or name not in loss.presets:
        expected = ", ".join(map(repr, loss.presets)) or "None"
        near = difflib.get_close_matches(str(name), loss.presets, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else "."
        raise ValueError(f"{loss.name}: `preset` must be one of {expected}, got {name!r}{hint}")
    return loss.presets[name]


def combination(loss: RegionLoss, options: Mapping[str, Any], class_weight: Any) -> None:
    """Raises ValueError for options that exclude each other."""

    def refuse(problem: str, hint: str) -> None:
        raise ValueError(f"{loss.name}: {problem} {hint}")

    pools_classes = options["pool"] in ("class", "both")
    if options["weighting"] != "uniform" and not pools_classes:
        refuse(
            f"`weighting` needs classes that are pooled, got weighting={options['weighting']!r} and "
            f"pool={options['pool']!r}.",
            "Pass pool='class' or 'both'.",
        )
    if class_weight is not None and pools_classes and options["weight_in"] == "loss":
        refuse(
            f"`class_weight` weighs the losses of classes, which pool={options['pool']!r} has summed.",
            "Pass weight_in='score'.",
        )
    if options["average"] == "samples" and options["pool"] in ("batch", "both"):
        refuse(
            f"average='samples' needs groups of each sample, got pool={options['pool']!r}.",
            "Pass pool='none' or 'class', or average='groups'.",
        )
    if options["gamma"] != 1.0 and options["offset"] < 1.0 and not options["log_loss"]:
        refuse(
            f"`gamma` needs a loss that is not negative, got gamma={options['gamma']} and offset={options['offset']}.",
            "Pass offset=1.",
        )
    if loss.has_voxels and options["activation"] == "none":
        refuse(
            "the loss of voxels needs logits, got activation='none'.",
            "Pass logits, or add the losses of regions and of voxels.",
        )
    if loss.smoothing and options[loss.smoothing] and options[loss.chosen_by] == "sigmoid":
        refuse(f"`{loss.smoothing}` needs a softmax, got {loss.chosen_by}='sigmoid'.", f"Pass {loss.smoothing}=0.")


def kind(loss: RegionLoss, input_shape: tuple[int, ...], dim: int, target: Any) -> tuple[str, str]:
    """Returns the kind of a target, "labels" or "dense", and the change to its class dimension: "", "drop" or "add".

    Targets of the input's shape are dense: they have a value per class. Integer targets hold labels if they have no
    class dimension, or one of size 1 although there are several classes. With a single class, a target without a class
    dimension is dense.
    """
    shape, classes = tuple(target.shape), input_shape[dim]
    voxels = without(input_shape, dim)
    floating = dtype_name(target) in FLOATING
    if len(shape) == len(input_shape) and (shape[dim] != 1 or classes == 1):
        return "dense", ""
    if shape == voxels and classes == 1:
        return "dense", "add"
    if floating:
        raise ValueError(
            f"{loss.name}: a floating `{loss.operands[1].name}` has a value per class, and must have the shape of "
            f"`{loss.operands[0].name}`, {input_shape}, got {shape}. Convert labels with `.long()` or "
            "`.astype('int64')`."
        )
    return "labels", "drop" if len(shape) == len(input_shape) else ""


def dtypes(call: Regions) -> None:
    """Raises TypeError for dtypes that kernels and formulas do not read."""
    loss = call.loss
    for name, x in call.arrays.items():
        dtype = dtype_name(x)
        if name == "mask":
            if dtype != "bool":
                raise TypeError(
                    f"{loss.name}: `mask` must be bool, True where a voxel counts, got {dtype}. Pass `mask != 0`."
                )
            continue
        allowed = (*FLOATING, *INTEGER) if name == loss.operands[1].name else FLOATING
        if dtype not in allowed:
            raise TypeError(
                f"{loss.name}: `{name}` must have one of the dtypes {', '.join(allowed)}, got {dtype}. "
                "Convert it with `.to(torch.float32)` or `.astype('float32')`."
            )


def shapes(call: Regions) -> None:
    """Checks the shapes of target, class weights and mask against that of the input.

    Also raises for weights that require a gradient, and for dense targets of a voxel loss that needs labels.
    """
    loss, static, classes, voxels = call.loss, call.static, call.classes, call.voxels
    first, second = (x.name for x in loss.operands)
    shape, target_shape = tuple(call.input.shape), tuple(call.target.shape)
    expected = shape if static.kind == "dense" else voxels
    if target_shape != expected:
        contents = "a value per class" if static.kind == "dense" else "labels"
        raise ValueError(
            f"{loss.name}: `{second}` holds {contents} and must have shape {expected} for `{first}` of shape {shape} "
            f"and class dimension {static.class_dim}, got {target_shape}. Set `class_dim` to the dimension of the "
            "classes."
        )
    if classes == 1 and static.activation == "softmax":
        raise ValueError(
            f"{loss.name}: the softmax of one class is 1 everywhere, got `{first}` of shape {shape} and class "
            f"dimension {static.class_dim}. Pass activation='sigmoid'."
        )
    if classes == 0 or (classes == 1 and not static.background):
        raise ValueError(
            f"{loss.name}: `{first}` must have a class with a region, got shape {shape}, class dimension "
            f"{static.class_dim} and include_background={static.background}."
        )
    for name in ("class_weight", "weight"):
        x = call.arrays.get(name)
        if x is not None and tuple(x.shape) != (classes,):
            raise ValueError(
                f"{loss.name}: `{name}` must have one number per class, shape ({classes},), got {tuple(x.shape)}."
            )
        if getattr(x, "requires_grad", False):
            raise ValueError(f"{loss.name}: `{name}` has no gradient, but requires one; pass `{name}.detach()`.")
    if call.mask is not None and not _broadcasts(tuple(call.mask.shape), voxels):
        raise ValueError(
            f"{loss.name}: `mask` must broadcast to the shape of the voxels, {voxels}, got {tuple(call.mask.shape)}. "
            "It has one element per voxel, and no class dimension."
        )
    if static.voxel == "row" and static.kind == "dense":
        raise ValueError(
            f"{loss.name}: {loss.chosen_by}='softmax' needs labels, got a `{second}` with a value per class."
        )


def _broadcasts(shape: tuple[int, ...], to: tuple[int, ...]) -> bool:
    return len(shape) <= len(to) and all(a in (1, b) for a, b in zip(reversed(shape), reversed(to), strict=False))


def arrays(call: Regions) -> None:
    """Checks the dtypes and shapes of all arrays."""
    dtypes(call)
    shapes(call)

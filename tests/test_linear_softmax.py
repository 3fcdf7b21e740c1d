"""Softmax losses of a linear layer: computed in chunks of rows, with the results of the layer followed by the loss."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from random import Random
from typing import Any

import numpy
import pytest
import torch
from cupy_memory import array, tensor
from devices import KERNELS
from grids import in_turn
from tools.linear_softmax.padding import pad_all
from torch.utils._python_dispatch import TorchDispatchMode

import cupylosses.functional
from cupylosses import interop, nn
from cupylosses.backends.torch import device as torch_device
from cupylosses.backends.torch import evaluation, formulas, plans
from cupylosses.call import Call
from cupylosses.engines.base import Machine, TensorSpec, contiguous
from cupylosses.engines.linear_softmax import LINEAR_SOFTMAX, chunks
from cupylosses.engines.linear_softmax.engine import contiguous_copies
from cupylosses.engines.linear_softmax.plan import LinearPlan
from cupylosses.jit import compiler
from cupylosses.jit.gpu import Chip
from cupylosses.testing import host

F: Any = cupylosses.functional
T: Any = torch.nn.functional

kernels = pytest.mark.kernels

#: Size in bytes of a chunk of 16 rows of 320 classes in 16 bits, or of 8 rows in float32.
SMALL = 16 * 320 * 2

#: Accepted error of a gradient relative to its norm, by the dtype to which logits and results are rounded.
TOLERANCE = {"float32": 1e-6, "bfloat16": 8e-3, "float16": 1e-3, "float64": 1e-13}


def operands(
    rows: tuple[int, ...] = (41,), features: int = 24, classes: int = 300, dtype: str = "float32", seed: int = 0
) -> dict[str, torch.Tensor]:
    """Features, weight and bias that require a gradient, and labels, every fifth of which is ignored."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        x = torch.randn(shape, generator=generator, dtype=torch.float64)
        return x.to(getattr(torch, dtype)).to(KERNELS).requires_grad_()

    labels = torch.randint(classes, rows, generator=generator)
    labels.view(-1)[::5] = -100
    weight = (draw(classes, features).detach() * 0.3).requires_grad_()
    return {
        "input": draw(*rows, features),
        "linear_weight": weight,
        "target": labels.to(KERNELS),
        "linear_bias": draw(classes),
    }


def truth(given: dict[str, Any], upstream: Any, **options: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Value and gradients in float64, by the formula of the loss on all logits at once."""
    wide = {k: x.detach().cpu().double() if x.is_floating_point() else x.cpu() for k, x in given.items()}
    leaves = {k: x.requires_grad_() for k, x in wide.items() if given[k].requires_grad}
    logits = T.linear(wide["input"], wide["linear_weight"], wide.get("linear_bias"))
    options = {k: x.cpu() if isinstance(x, torch.Tensor) else x for k, x in options.items()}
    with torch.device("cpu"):
        value = formula(logits, wide["target"], **options)
    gradients = torch.autograd.grad(value, list(leaves.values()), upstream_of(value, upstream))
    return value.detach(), dict(zip(leaves, gradients, strict=True))


def formula(logits: torch.Tensor, target: torch.Tensor, **options: Any) -> torch.Tensor:
    """The reference formula of `cross_entropy`, without kernels."""
    before = torch_device.set_host(None)
    try:
        return F.cross_entropy(logits, target, class_dim=-1, **options)
    finally:
        torch_device.set_host(before)


def upstream_of(value: torch.Tensor, upstream: Any) -> torch.Tensor:
    """A ``grad_output`` of the value's shape: the number ``upstream``, or a ramp from it to twice as much."""
    if value.dim() == 0:
        return torch.full_like(value, upstream)
    ramp = torch.linspace(upstream, 2 * upstream, value.numel(), dtype=torch.float64).reshape(value.shape)
    return ramp.to(value.dtype).to(value.device)


def run(given: dict[str, Any], upstream: Any = 1.0, **options: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The library's value and gradients."""
    value = F.linear_cross_entropy(**given, **options)
    leaves = {k: x for k, x in given.items() if x.requires_grad}
    gradients = torch.autograd.grad(value, list(leaves.values()), upstream_of(value, upstream))
    return value.detach(), dict(zip(leaves, gradients, strict=True))


def agrees(
    given: dict[str, Any], upstream: float = 1.0, dtype: str = "float32", slack: float = 1.0, **options: Any
) -> None:
    """Checks value and gradients against the truth, for expected and unexpected values of ``grad_output``.

    ``slack`` multiplies the accepted errors.
    """
    allowed = slack * TOLERANCE[dtype]
    engine = {k: options.pop(k) for k in [*options] if k in LAYER_OPTIONS}
    for scale in (upstream, -1.75 * upstream, -1.75 * upstream):
        value, gradients = run(given, scale, **options, **engine)
        expected, slopes = truth(given, scale, **options)
        error = float((value.cpu().double() - expected).abs().max() / expected.abs().max())
        assert error <= allowed, error
        for name, exact in slopes.items():
            found = gradients[name].cpu().double()
            assert found.shape == exact.shape and gradients[name].dtype == given[name].dtype
            wrong = float((found - exact).norm() / exact.norm())
            assert wrong <= 2 * allowed, (name, scale, wrong)


def plan(rows: int, features: int, classes: int, **options: Any) -> LinearPlan:
    """The plan of a layer in bfloat16 for an H100."""
    shapes = {"input": (rows, features), "linear_weight": (classes, features)}
    given = {k: torch.empty(1, dtype=torch.bfloat16).expand(shape) for k, shape in shapes.items()}
    labels = torch.empty(1, dtype=torch.int64).expand(rows)
    call = F.linear_cross_entropy.prepare(**given, target=labels, **options)
    tensors = tuple(contiguous(str(x.dtype).removeprefix("torch."), tuple(x.shape)) for x in call.arrays)
    return LinearPlan(LINEAR_SOFTMAX, Call(*call), tensors, "bfloat16", Machine(132, Chip()))


LAYER_OPTIONS = ("max_memory", "logits_dtype", "accumulate_dtype", "skip_ignored")


# ----------------------------------------------------------------------------------------------------------------------
# Results


@kernels
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_chunks_agree_with_the_loss_of_the_logits(dtype: str) -> None:
    agrees(operands(dtype=dtype), dtype=dtype, max_memory=SMALL)


@kernels
@pytest.mark.parametrize("gap", [0, 8, 3])
def test_weight_with_gaps(gap: int) -> None:
    """A weight may have gaps between its rows or its columns."""
    given = operands(dtype="bfloat16")
    weight = torch.nn.functional.pad(given["linear_weight"].detach(), (0, gap))[:, :24]
    agrees(given | {"linear_weight": weight.requires_grad_()}, dtype="bfloat16", max_memory=SMALL)
    columns = torch.nn.functional.pad(weight.detach().t(), (0, gap))[:, :300].t()
    agrees(given | {"linear_weight": columns.requires_grad_()}, dtype="bfloat16", max_memory=SMALL)


@kernels
def test_transposed_weight_in_many_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient has the strides of the weight, and so do the float32 sums that are rounded to it."""
    given = operands(classes=304, dtype="bfloat16")
    turned = given["linear_weight"].detach().t().contiguous().t()
    options = {"max_memory": SMALL, "accumulate_dtype": "float32"}
    agrees(given | {"linear_weight": turned.requires_grad_()}, dtype="bfloat16", **options)
    x, w = given["input"].detach(), given["linear_weight"].detach()
    along = torch.randn_like(x), torch.randn_like(w)

    def gradients(x: torch.Tensor, w: torch.Tensor) -> Any:
        loss = lambda x, w: F.linear_cross_entropy(x, w, given["target"], max_memory=SMALL)  # noqa: E731
        return torch.func.grad(loss, (0, 1))(x, w)

    expected = torch.func.jvp(gradients, (x, w), along)[1]
    monkeypatch.setattr(formulas, "hvp", None)
    found = torch.func.jvp(gradients, (x, turned.detach()), (along[0], along[1].t().contiguous().t()))[1]
    for a, b in zip(found, expected, strict=True):
        assert float((a - b).norm() / b.norm()) <= 1e-2


@kernels
@pytest.mark.parametrize(("gap", "reduction"), in_turn([0, 8, 3], ["mean", "none"]))
def test_inputs_with_gaps(gap: int, reduction: str) -> None:
    """Like a weight, inputs may have gaps between rows or columns, in several chunks."""
    given = operands((40,), dtype="bfloat16")
    rows = torch.nn.functional.pad(given["input"].detach(), (0, gap))[:, :24]
    columns = torch.nn.functional.pad(rows.detach().t(), (0, gap))[:, :40].t()
    for inputs in (rows, columns):
        given = given | {"input": inputs.requires_grad_()}
        agrees(given, reduction=reduction, dtype="bfloat16", max_memory=SMALL)


@pytest.fixture
def padded(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, int, int, int]]]:
    """Pads layers of any size. The list collects the sizes of each padded matrix, before and after padding."""
    pad_all(monkeypatch)
    found, pad = [], torch_device.TorchDevice.padded

    def noted(device: Any, matrix: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
        found.append((*matrix.shape, rows, columns))
        return pad(device, matrix, rows, columns)

    monkeypatch.setattr(torch_device.TorchDevice, "padded", noted)
    plans.forget()
    yield found
    plans.forget()


@kernels
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"reduction": "none"},
        {"max_memory": SMALL},
        {"max_memory": SMALL, "reduction": "none"},
        {"max_memory": SMALL, "logits_dtype": "float32", "accumulate_dtype": "float32"},
    ],
    ids=str,
)
@pytest.mark.parametrize(("features", "classes"), [(21, 300), (21, 304), (24, 299)])
def test_sizes_that_are_padded(
    dtype: str, options: dict[str, Any], features: int, classes: int, padded: list[tuple[int, int, int, int]]
) -> None:
    """Weights and inputs may have any layout."""
    given = operands(features=features, classes=classes, dtype=dtype)
    agrees(given, dtype=dtype, **options)
    assert (classes, features, -(-classes // 8) * 8, 24) in padded
    if features % 8:
        assert sum([n for n, width, *_ in padded if width == features and n != classes]) % 41 == 0
    turned = {x: given[x].detach().t().contiguous().t().requires_grad_() for x in ("input", "linear_weight")}
    agrees(given | turned, dtype=dtype, **options)


@kernels
@pytest.mark.parametrize(("features", "classes"), [(21, 304), (24, 299)])
def test_a_padded_layer_adds_to_main_grad(features: int, classes: int, padded: list[tuple[int, int, int, int]]) -> None:
    given = operands(features=features, classes=classes, dtype="bfloat16")
    exact = truth(given, 3.0)[1]["linear_weight"]
    found = added(F.linear_cross_entropy, given, max_memory=SMALL).cpu().double()
    assert padded and float((found - exact).norm() / exact.norm()) <= 4e-3


@kernels
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_infinite_inputs_of_padded_layers_stay_in_their_rows(
    reduction: str, padded: list[tuple[int, int, int, int]]
) -> None:
    """The logits of the infinite row are NaN, including the padding, but the row is ignored."""
    given = operands(classes=299, dtype="bfloat16")
    assert int(given["target"][0]) == -100
    with torch.no_grad():
        given["input"][0] = float("inf")
    value, gradients = run(given, 1.0, reduction=reduction)
    assert padded and value.isfinite().all()
    assert not gradients["input"][0].any() and gradients["input"][1:].isfinite().all()


@pytest.mark.parametrize(
    ("rows", "features", "classes", "dtype", "is_padded"),
    [
        (4096, 1022, 32000, "bfloat16", True),
        (1024, 1001, 1000, "float16", True),
        (4096, 1024, 32000, "bfloat16", False),
        (4096, 1022, 32000, "float32", False),
        (64, 1022, 32000, "bfloat16", False),
        (4096, 100, 5000, "bfloat16", True),
        (2048, 884, 512, "bfloat16", False),
        (4808, 20, 1000, "bfloat16", False),
    ],
)
def test_features_of_large_layers_are_padded(
    rows: int, features: int, classes: int, dtype: str, is_padded: bool
) -> None:
    """Features are padded if products gain more time than copies take. Padded copies are made from any layout."""
    assert chunks.pads_features(rows, features, classes, dtype) == is_padded
    inputs = TensorSpec(dtype, (rows, features), (1, rows + 1))
    weight = TensorSpec(dtype, (classes, features), (1, classes + 1))
    tensors = (inputs, weight, TensorSpec("int64", (rows,), (1,)))
    assert not (is_padded and contiguous_copies(tensors))


@pytest.mark.parametrize(
    ("rows", "features", "classes", "dtype", "is_padded"),
    [
        (4096, 1024, 50257, "bfloat16", True),
        (1024, 256, 1001, "float16", True),
        (1024, 256, 1002, "float16", False),
        (16, 4096, 50257, "bfloat16", True),
        (4, 4096, 50257, "bfloat16", False),
        (16, 4096, 30522, "bfloat16", False),
        (16384, 768, 9, "bfloat16", True),
        (1024, 768, 10, "bfloat16", False),
        (4096, 1024, 50256, "bfloat16", False),
        (4096, 1024, 50257, "float32", False),
        (4096, 1023, 50257, "bfloat16", True),
        (16384, 1023, 9, "bfloat16", False),
    ],
)
def test_classes_of_large_layers_are_padded(
    rows: int, features: int, classes: int, dtype: str, is_padded: bool
) -> None:
    """Classes are padded if products gain more time than the copy takes; the weight may then have any layout."""
    assert chunks.pads_classes(rows, features, classes, dtype) == is_padded
    weight = TensorSpec(dtype, (classes, features), (features + 1, 1))
    inputs, target = contiguous(dtype, (rows, features)), contiguous("int64", (rows,))
    assert not (is_padded and contiguous_copies((inputs, weight, target)))


def test_large_weights_are_copied_where_products_would_take_longer() -> None:
    """Products of a weight whose rows are unaligned, because of gaps, take longer."""
    rows, labels = TensorSpec("bfloat16", (8, 1024), (1024, 1)), TensorSpec("int64", (8,), (1,))

    def is_copied(
        shape: tuple[int, int], strides: tuple[int, int], misalignment: int = 0, dtype: str = "bfloat16"
    ) -> bool:
        return 1 in contiguous_copies((rows, TensorSpec(dtype, shape, strides, misalignment), labels))

    large = (4096, 1024)
    assert not is_copied(large, (1032, 1)) and not is_copied(large, (1, 4104)) and not is_copied(large, (1, 4096))
    assert is_copied(large, (1025, 1)) and is_copied(large, (1, 4097)) and is_copied(large, (1032, 1), 2)
    assert is_copied(large, (2048, 2)) and is_copied(large, (0, 1))
    assert not is_copied((128, 1024), (1025, 1), dtype="float32") and not is_copied((128, 1024), (1024, 1), 2)
    # Small 16-bit weights are copied if only the copy is aligned, large ones if the copy is better aligned.
    assert is_copied((128, 1024), (1025, 1)) and not is_copied((128, 1020), (1021, 1))
    assert is_copied((512, 884), (1, 512), 2) and not is_copied((512, 884), (1, 512))
    assert not is_copied((512, 882), (1, 512), 2) and not is_copied((512, 884), (1, 512), 4, "float32")


@pytest.mark.parametrize(
    ("dtype", "strides", "misalignment", "most"),
    [
        ("bfloat16", (1, 4096), 0, 1 << 20),
        ("bfloat16", (1, 4097), 0, 128),
        ("bfloat16", (1032, 1), 0, 1 << 20),
        ("float32", (1, 4096), 0, 1024),
        ("float32", (1, 4096), 4, 1024),
        ("bfloat16", (1, 4096), 2, 128),
        ("bfloat16", (1025, 1), 0, 128),
        ("bfloat16", (1024, 1), 2, 1 << 20),  # contiguous
        ("bfloat16", (2048, 2), 0, 0),
    ],
)
def test_inputs_are_copied_where_products_of_many_classes_would_take_longer(
    dtype: str, strides: tuple[int, int], misalignment: int, most: int
) -> None:
    inputs, labels = TensorSpec(dtype, (4096, 1024), strides, misalignment), TensorSpec("int64", (4096,), (1,))
    for classes in (1, 128, 1024, 1 << 20):
        weight = TensorSpec(dtype, (classes, 1024), (1024, 1))
        assert (0 in contiguous_copies((inputs, weight, labels))) == (classes > most)


@pytest.mark.parametrize(("depth", "copied"), [(1021, False), (1022, False), (1020, True)])
def test_inputs_are_copied_where_the_copy_has_more_alignment(depth: int, copied: bool) -> None:
    inputs = TensorSpec("bfloat16", (493, depth), (1, 493))
    weight = TensorSpec("bfloat16", (1000, depth), (depth, 1))
    assert (0 in contiguous_copies((inputs, weight, TensorSpec("int64", (493,), (1,))))) == copied


@pytest.mark.parametrize(("dtype", "copied"), [("bfloat16", True), ("float32", False)])
def test_small_inputs_are_copied_where_only_the_copy_is_aligned(dtype: str, copied: bool) -> None:
    inputs, weight = TensorSpec(dtype, (2048, 8), (9, 1)), TensorSpec(dtype, (2000, 8), (8, 1))
    assert (0 in contiguous_copies((inputs, weight, TensorSpec("int64", (2048,), (1,))))) == copied


@kernels
@pytest.mark.parametrize(("classes", "reduction"), in_turn([5, 30, 301, 2050, 9001], ["mean", "none"]))
def test_rows_of_any_length(classes: int, reduction: str) -> None:
    """Rows for one thread, one warp and one block, and rows too long for a block; some lengths are odd."""
    given = operands((6 if classes < 1000 else 4,), 7, classes)  # two rows per chunk
    if classes > 4096:
        del given["linear_bias"]  # its sums would take most of the threads, and do not depend on the row length
    agrees(given, reduction=reduction, max_memory=2 * classes * 4)


@kernels
@pytest.mark.parametrize("classes", [30, 301, 2050])
def test_gradients_of_16_bits_over_float32_logits(classes: int) -> None:
    given = operands((13,), 16, classes, "bfloat16")
    agrees(
        given, dtype="bfloat16", logits_dtype="float32", max_memory=6 * (classes + 16) * 4, accumulate_dtype="float32"
    )
    value, _ = run(given, logits_dtype="float32")
    assert value.dtype == torch.float32
    torch.testing.assert_close(value.double().cpu(), truth(given, 1.0)[0], rtol=1e-6, atol=0)


@kernels
@pytest.mark.parametrize(
    "options",
    [
        {"label_smoothing": 0.1, "z_loss": 1e-2},
        {"softcap": 5.0, "logit_scale": 0.5},
        {"gamma": 1.5, "poly": 0.5},
        {"reduction": "sum", "ignore_index": 3},
        {"reduction": "batchmean"},
        {"normalizer": 7.0},
    ],
    ids=lambda x: "-".join(x),
)
def test_options_of_cross_entropy(options: dict[str, Any]) -> None:
    given = operands()
    given["target"].masked_fill_(given["target"] == -100, options.get("ignore_index", -100))
    agrees(given, max_memory=SMALL, **options)


@kernels
def test_class_weights_and_masks() -> None:
    weight, mask = torch.rand(300).to(KERNELS), (torch.arange(12) % 3 > 0).reshape(1, 12).to(KERNELS)
    agrees(operands((4, 12)), max_memory=SMALL, weight=weight, mask=mask)


@kernels
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_class_probabilities(reduction: str) -> None:
    """The gradient of the probabilities is computed, too, chunk by chunk."""
    given = operands()
    given["target"] = torch.randn(41, 300).softmax(-1).to(KERNELS).requires_grad_()
    agrees(given, max_memory=SMALL, reduction=reduction)


@kernels
def test_further_results() -> None:
    given = operands()
    found = F.linear_cross_entropy(**given, max_memory=SMALL, return_lse=True, return_accuracy=True)
    logits = T.linear(*[given[x].detach().double() for x in ("input", "linear_weight", "linear_bias")])
    counts = given["target"] != -100
    torch.testing.assert_close(found.lse.double(), logits.logsumexp(-1) * counts, rtol=1e-6, atol=1e-6)
    right = ((logits.argmax(-1) == given["target"]) & counts).sum() / counts.sum()
    torch.testing.assert_close(found.accuracy, right.float())


@kernels
@pytest.mark.parametrize(
    "frozen", [("linear_weight",), ("input",), ("input", "linear_weight"), ("linear_bias", "input")]
)
def test_only_wanted_gradients_are_computed(frozen: tuple[str, ...]) -> None:
    """Each chunk takes one matrix product for the logits, and one for each wanted gradient of a factor."""
    given = {k: x.detach().requires_grad_(x.requires_grad and k not in frozen) for k, x in operands().items()}
    with products() as shapes:
        run(given, max_memory=SMALL)
    chunks = -(-41 // 8)
    assert len(shapes) == chunks * (1 + sum(given[x].requires_grad for x in ("input", "linear_weight")))
    agrees(given, max_memory=SMALL)


@kernels
def test_gradients_are_written_again_for_a_second_backward() -> None:
    given = operands()
    leaves = [x for x in given.values() if x.requires_grad]
    value = F.linear_cross_entropy(**given, max_memory=SMALL)
    first = torch.autograd.grad(value, leaves, torch.tensor(2.0, device=KERNELS), retain_graph=True)
    second = torch.autograd.grad(value, leaves, torch.tensor(2.0, device=KERNELS))
    for x, y in zip(first, second, strict=True):
        assert x.data_ptr() != y.data_ptr()
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-7)


@kernels
def test_a_gradient_of_zero_is_no_expectation() -> None:
    """Gradients written for a ``grad_output`` of 0 could not be rescaled to another one."""
    given = operands()
    _, gradients = run(given, 0.0, max_memory=SMALL)
    assert not any(x.any() for x in gradients.values())
    agrees(given, max_memory=SMALL)


@kernels
def test_small_gradients_of_float16_do_not_vanish() -> None:
    """A large ``grad_output``, as loss scaling uses, is handled from the first step on."""
    given, scale = operands((2000,), 16, 64, "float16"), 2.0**15
    _, gradients = run(given, scale)
    found, exact = gradients["input"].cpu().double(), truth(given, scale)[1]["input"]
    assert float((found - exact).norm() / exact.norm()) < 2e-3


@kernels
def test_skipped_rows() -> None:
    """Products leave ignored rows out; the results stay the same."""
    given = operands()
    with products() as shapes:
        run(given, skip_ignored=True)
    assert {shape[0] for shape in shapes[:1]} == {int((given["target"] != -100).sum())}
    agrees(given, skip_ignored=True, max_memory=SMALL)
    agrees(given, skip_ignored=True, reduction="none")


# ----------------------------------------------------------------------------------------------------------------------
# Weights of rows


def weighted(given: dict[str, Any], weights: torch.Tensor, **options: Any) -> torch.Tensor:
    """The weighted loss of all logits at once, in float64; class weights and masks enter the divisor of a mean."""
    reduction = options.pop("reduction", "mean")
    logits = T.linear(given["input"], given["linear_weight"], given.get("linear_bias"))
    value = weights.double() * formula(logits, given["target"], reduction="none", **options)
    if reduction == "none":
        return value
    counts = (given["target"] != -100) & options.get("mask", torch.tensor(True))
    share = weights.double() * counts * options.get("weight", torch.ones(300)).double()[given["target"].clamp(min=0)]
    return value.sum() / (share.sum() if reduction == "mean" else 1.0)


def named(x: Any) -> str:
    """A dtype, a size, or the names of options."""
    return str(x) if isinstance(x, str | int) else "-".join(x) or "defaults"


@kernels
@pytest.mark.parametrize(
    ("options", "dtype"),
    in_turn(
        [
            {},
            {"reduction": "none", "label_smoothing": 0.1},
            {"reduction": "sum", "skip_ignored": True},
            {"weight": torch.rand(300), "mask": torch.arange(41) % 3 > 0, "max_memory": SMALL},
        ],
        ["float32", "bfloat16"],
    ),
    ids=named,
)
def test_token_weights(dtype: str, options: dict[str, Any]) -> None:
    """Weights may be negative, as advantages are. Checks an expected ``grad_output`` and another one."""
    given, weights = operands(dtype=dtype), torch.rand(41) - 0.2
    chosen = {k: x.to(KERNELS) if isinstance(x, torch.Tensor) else x for k, x in options.items()}
    wide = {k: x.detach().cpu().double() if x.is_floating_point() else x.cpu() for k, x in given.items()}
    leaves = [x.requires_grad_() for x in wide.values() if x.is_floating_point()]
    exact = weighted(wide, weights, **{k: x for k, x in options.items() if k not in LAYER_OPTIONS})
    for scale in (1.0, -1.75):
        right = torch.autograd.grad(exact, leaves, upstream_of(exact, scale), retain_graph=True)
        value, gradients = run(given, scale, token_weight=weights.to(KERNELS), **chosen)
        assert float((value.cpu().double() - exact).detach().norm() / exact.detach().norm()) <= TOLERANCE[dtype]
        for x, y in zip(gradients.values(), right, strict=True):
            assert float((x.cpu().double() - y).norm() / y.norm()) <= 2 * TOLERANCE[dtype]


@kernels
def test_token_weights_of_probabilities() -> None:
    given = operands()
    given["target"] = torch.randn(41, 300).softmax(-1).to(KERNELS)
    weights = torch.rand(41).to(KERNELS)
    with torch.no_grad():
        found = F.linear_cross_entropy(**given, token_weight=weights, max_memory=SMALL)
        rows = F.linear_cross_entropy(**given, reduction="none")
    torch.testing.assert_close(found, (rows * weights).sum() / weights.sum())


@kernels
def test_transforms_of_token_weights() -> None:
    """Under vmap each sample has its own token weights; second derivatives and compiled graphs include them, too."""
    given = {k: x.detach() for k, x in operands((3, 5), 8, 40).items()}
    x, w, y, b = given.values()
    weights = torch.rand(3, 5, device=KERNELS)

    def ours(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.linear_cross_entropy(x, w, y, linear_bias=b, token_weight=v, max_memory=4 * 48 * 4)

    def theirs(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        rows = T.cross_entropy(T.linear(x, w, b).flatten(0, -2), y.flatten(), reduction="none").view(y.shape)
        return (rows * v).sum() / (v * (y >= 0)).sum()

    def hvp(f: Any) -> Any:
        return torch.func.jvp(lambda x: torch.func.grad(f)(x, w, y, weights), (x,), (torch.ones_like(x),))[1]

    def close(found: Any, expected: Any) -> None:
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)

    each = [torch.func.vmap(torch.func.grad(f, (0, 1)), (0, None, 0, 0))(x, w, y, weights) for f in (ours, theirs)]
    close(*each)
    close(hvp(ours), hvp(theirs))
    leaves = [z.clone().requires_grad_() for z in (x, w)]
    value = torch.compile(ours, fullgraph=True, backend="aot_eager")(*leaves, y, weights)
    close(value, theirs(*leaves, y, weights))
    close(torch.autograd.grad(value, leaves), torch.autograd.grad(theirs(*leaves, y, weights), leaves))


# ----------------------------------------------------------------------------------------------------------------------
# Accumulated gradients of the weight


def added(function: Any, given: dict[str, Any], offset: int = 0, **options: Any) -> torch.Tensor:
    """Returns the gradient that backward of 3 times a sum adds to `main_grad`; a second backward must add it again."""
    shape = given["linear_weight"].shape
    dtype = torch.float64 if given["input"].dtype == torch.float64 else torch.float32
    main_grad = torch.zeros(shape.numel() + offset, dtype=dtype, device=given["input"].device)[offset:].view(shape)
    value = function(**given, main_grad=main_grad, **options).sum()
    assert not main_grad.any()
    main_grad += 0.0  # bumps the version, which autograd would refuse for a saved tensor
    version = main_grad._version
    (3.0 * value).backward(retain_graph=True)
    first = main_grad.clone()
    assert main_grad._version > version and given["linear_weight"].grad is None
    (3.0 * value).backward()
    assert float((main_grad - 2 * first).norm() / first.norm()) <= (
        8e-3 if given["input"].dtype.itemsize == 2 else 1e-5
    )
    return first


@kernels
@pytest.mark.parametrize(
    ("dtype", "options"),
    in_turn(["float32", "bfloat16", "float16", "float64"], [{}, {"reduction": "none"}, {"skip_ignored": True}]),
    ids=str,
)
def test_main_grad(dtype: str, options: dict[str, Any]) -> None:
    """Only the logits and their gradient are rounded to 16 bits."""
    given = operands(dtype=dtype)
    exact = truth(given, 3.0, reduction="sum" if "reduction" in options else "mean")[1]["linear_weight"]
    for offset, memory in ((0, SMALL), (1, None)):
        found = added(F.linear_cross_entropy, given, offset, max_memory=memory, **options).cpu().double()
        assert float((found - exact).norm() / exact.norm()) <= {"bfloat16": 4e-3, "float16": 5e-4}.get(dtype, 2e-6)


@kernels
def test_main_grad_of_a_frozen_weight_and_of_formulas() -> None:
    given = operands(dtype="bfloat16")
    frozen = given | {"linear_weight": given["linear_weight"].detach()}
    main_grad = torch.zeros(300, 24, device=KERNELS)
    F.linear_cross_entropy(**frozen, main_grad=main_grad).backward()
    assert not main_grad.any()
    before = torch_device.set_host(None)
    try:
        found = added(
            F.linear_cross_entropy, {k: x.detach().cpu().requires_grad_(x.requires_grad) for k, x in given.items()}
        )
    finally:
        torch_device.set_host(before)
    exact = truth(given, 3.0)[1]["linear_weight"]
    assert float((found.cpu().double() - exact).norm() / exact.norm()) <= 2e-6


@kernels
def test_main_grad_is_no_saved_tensor() -> None:
    """If hooks offloaded it, it would come back as a copy, and the gradient added to that copy would be lost."""
    given, main_grad = operands(), torch.zeros(300, 24, device=KERNELS)
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone):
        value = F.linear_cross_entropy(**given, main_grad=main_grad, max_memory=SMALL)
    value.backward()
    torch.testing.assert_close(main_grad.cpu().double(), truth(given, 1.0)[1]["linear_weight"], rtol=1e-4, atol=1e-7)


@kernels
def test_main_grad_without_a_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    """If forward writes no gradient, products add to ``main_grad``.

    This takes one more product per chunk, and no buffer of the weight's size.
    """
    given, main_grad, shapes = operands(), torch.zeros(300, 24, device=KERNELS), []
    kind = type(torch_device.device_of(given["input"]))
    empty = kind.empty
    monkeypatch.setattr(kind, "empty", lambda *x: shapes.append(tuple(x[1])) or empty(*x))
    module = nn.LinearCrossEntropyLoss(24, 300, device=KERNELS, max_memory=SMALL)
    for one_pass, products_of_chunk in ((True, 3), (False, 4)):
        shapes.clear()
        main_grad.zero_()
        with cupylosses.set_one_pass(one_pass), products() as found:
            module(given["input"], given["target"], main_grad=main_grad).backward()
        assert len(found) == products_of_chunk * -(-41 // 8) and ((300, 24) in shapes) == one_pass
        weight = module.linear.weight.detach().requires_grad_()
        exact = truth({**given, "linear_weight": weight} | {"linear_bias": torch.zeros(300).to(KERNELS)}, 1.0)[1]
        torch.testing.assert_close(main_grad.cpu().double(), exact["linear_weight"], rtol=1e-4, atol=1e-7)


@kernels
def test_main_grad_is_for_backward_alone() -> None:
    given = {k: x.detach() for k, x in operands().items()} | {"main_grad": torch.zeros(300, 24, device=KERNELS)}
    message = "linear_cross_entropy: `main_grad` is for backward in eager mode"

    def value(w: torch.Tensor) -> torch.Tensor:
        return F.linear_cross_entropy(**given | {"linear_weight": w})

    with pytest.raises(NotImplementedError, match=message):
        torch.func.grad(value)(given["linear_weight"])
    leaf = given["linear_weight"].clone().requires_grad_()
    with pytest.raises(NotImplementedError, match=message):
        torch.autograd.grad(value(leaf), leaf, create_graph=True)


# ----------------------------------------------------------------------------------------------------------------------
# Edges


@kernels
def test_nothing_but_ignored_rows() -> None:
    given = operands()
    given["target"] = torch.full_like(given["target"], -100)
    for skip in (False, True):
        value, gradients = run(given, max_memory=SMALL, skip_ignored=skip)
        assert value.isnan() and not any(x.any() for x in gradients.values())


@pytest.mark.parametrize("rows", [0, 1])
def test_few_rows(rows: int) -> None:
    given = operands((rows,))
    given["target"] = given["target"].abs() % 300
    value, gradients = run(given, reduction="sum")
    expected, exact = truth(given, 1.0, reduction="sum")
    torch.testing.assert_close(value.double().cpu(), expected, rtol=1e-5, atol=0)
    torch.testing.assert_close(gradients["linear_weight"].cpu().double(), exact["linear_weight"], rtol=1e-4, atol=1e-6)


@kernels
def test_label_out_of_range() -> None:
    """The error names the row among all rows, not within its chunk."""
    given = operands()
    given["target"][33] = 300
    with pytest.raises(IndexError, match=r"linear_cross_entropy: `target\[33\]` must be .* got 300 for 300 classes"):
        F.linear_cross_entropy(**given, max_memory=SMALL, check_targets="sync")
    value, gradients = run(given, max_memory=SMALL, check_targets="off", reduction="none")
    assert value.isnan().nonzero().tolist() == [[33]] and not gradients["input"][33].any()
    assert all(x.isfinite().all() for x in gradients.values())


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"linear_weight": torch.ones(300, 23)}, ValueError, "the same last dimension, got .*24.* and .*23"),
        ({"linear_weight": torch.ones(24, 300)}, ValueError, "Is it transposed"),
        ({"linear_weight": torch.ones(300, 24).bfloat16()}, TypeError, "one dtype, got `input` of float32, .*autocast"),
        ({"linear_bias": torch.ones(299)}, ValueError, "`linear_bias` must have the shape"),
        ({"target": torch.zeros(40, dtype=torch.int64)}, ValueError, "`target` must have the shape of `input`"),
        ({"max_memory": 0}, ValueError, "`max_memory` must be a number of bytes > 0, got 0"),
        ({"max_memory": 0.5}, TypeError, "`max_memory` must be a number of bytes or None, got 0.5"),
        ({"logits_dtype": "float16"}, ValueError, "`logits_dtype` must be 'float32' for operands of float32"),
        ({"skip_ignored": 1}, TypeError, "`skip_ignored` must be True or False, got 1"),
        (
            {"main_grad": torch.ones(300, 24).bfloat16()},
            TypeError,
            "`main_grad` must be float32 for operands of float32",
        ),
        ({"main_grad": torch.ones(24, 300)}, ValueError, "`main_grad` must have the shape of `linear_weight`"),
        ({"main_grad": torch.ones(24, 300).T}, ValueError, "`main_grad` must be contiguous"),
        ({"main_grad": torch.ones(300, 24).requires_grad_()}, ValueError, "`main_grad` has no gradient"),
        ({"token_weight": torch.ones(40)}, ValueError, r"`token_weight` must broadcast .* \(41,\), got \(40,\)"),
        ({"token_weight": torch.ones(41).bool()}, TypeError, "`token_weight` must have one of the dtypes"),
        ({"token_weight": torch.ones(41).requires_grad_()}, ValueError, "`token_weight` has no gradient"),
        ({"skip_ignored": True, "return_lse": True}, ValueError, "`return_lse` needs all rows, got skip_ignored=True"),
    ],
)
def test_errors(changed: dict[str, Any], error: type[Exception], message: str) -> None:
    given = {k: x.detach().cpu() for k, x in operands().items()}
    with pytest.raises(error, match=f"^linear_cross_entropy: .*{message}"):
        F.linear_cross_entropy(**(given | changed))


# ----------------------------------------------------------------------------------------------------------------------
# Memory


@contextmanager
def products() -> Iterator[list[tuple[int, int]]]:
    """Collects the shapes of the results of matrix products."""
    shapes: list[tuple[int, int]] = []
    kind = type(torch_device.device_of(torch.empty(1, device=KERNELS)))
    original = kind.matmul

    def matmul(self: Any, a: Any, b: Any, out: Any, add: Any = None) -> None:
        shapes.append(tuple(out.shape))
        original(self, a, b, out, add)

    kind.matmul = matmul
    try:
        yield shapes
    finally:
        kind.matmul = original


@kernels
@pytest.mark.parametrize(("memory", "reduction"), [(SMALL, "mean"), (3 * SMALL, "mean"), (3 * SMALL, "none")])
def test_chunks_keep_to_the_memory(memory: int, reduction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing larger than a chunk is allocated, except the gradients."""
    given, sizes = operands(dtype="bfloat16"), []
    device = torch_device.device_of(given["input"])
    kind = type(device)
    original = kind.empty

    def empty(self: Any, shape: Any, strides: Any, dtype: str) -> Any:
        found = original(self, shape, strides, dtype)
        sizes.append((tuple(shape), found.numel() * found.element_size()))
        return found

    # Patched on the class: undoing a patch of the object would leave an attribute that hides the class's method.
    monkeypatch.setattr(kind, "empty", empty)
    run(given, max_memory=memory, accumulate_dtype="bfloat16", reduction=reduction)
    results = {(41, 24), (304, 24), (300,)}
    assert max(size for shape, size in sizes if shape not in results) <= memory
    assert sum(len(shape) == 2 and shape not in results for shape, _ in sizes) == 1


def test_host_work_of_four_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward makes three matrix products and one launch per chunk, and few other torch operations or launches.

    The host takes as long for a view as for a launch, so views are made once per call, not once per product.
    """
    operations, launched, workspaces = Counter[str](), [], []

    class Operations(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            operations[function._schema.name.removeprefix("aten::")] += 1
            return function(*args, **(kwargs or {}))

    given = {k: x.detach().cpu() for k, x in operands((64,), 32, 128, dtype="bfloat16").items() if k != "linear_bias"}
    for name in ("input", "linear_weight"):
        given[name].requires_grad_()
    call = partial(F.linear_cross_entropy, **given, max_memory=16 * 128 * 2)
    with host.recording():
        kind = type(torch_device.device_of(given["input"]))
        workspace = kind.workspace
        # A GPU's allocations fill nothing, and its products copy nothing.
        monkeypatch.setattr(kind, "empty", lambda self, *x: torch.empty_strided(*x[:2], dtype=getattr(torch, x[2])))
        monkeypatch.setattr(kind, "matmul", torch_device.TorchDevice.matmul)
        monkeypatch.setattr(kind, "workspace", lambda self, *x: workspaces.append(x) or workspace(self, *x))
        call().backward()
        # The mode would turn the call into operators.
        monkeypatch.setattr(evaluation, "dispatch_mode_count", lambda: 0)
        monkeypatch.setattr(compiler.Launcher, "launch", lambda self, *_: launched.append(self))
        workspaces.clear()
        with Operations():
            call()
    del operations["empty_strided"]
    products = operations.pop("mm") + operations.pop("addmm")
    # Two leaves are detached, two matrices split, and two transposed. Besides the rows of four chunks, kernels count
    # the labels, read the expected grad_output, and add the sums of the chunks.
    assert (products, len(launched), len(workspaces)) == (12, 7, 2)
    assert sum(operations.values()) == 6, operations


@kernels
@pytest.mark.parametrize("options", [{}, {"reduction": "none"}, {"reduction": "sum", "mask": torch.arange(41) % 3 > 0}])
def test_few_logits_are_kept(options: dict[str, Any]) -> None:
    """Forward keeps the logits if there are few. Backward does not recompute them, and may be repeated."""
    given = operands()
    if "mask" in options:
        options = {**options, "mask": options["mask"].to(KERNELS)}
    leaves = [x for x in given.values() if x.requires_grad]
    with products() as shapes:
        value = F.linear_cross_entropy(**given, **options).sum()
        first, second = (torch.autograd.grad(value, leaves, retain_graph=True) for _ in range(2))
    assert len(shapes) == 5
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    agrees(given, **options)


@kernels
def test_rows_are_counted_with_their_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """The value of many rows without gradients needs no separate launch for its divisor."""
    given = operands((2000,), classes=32)
    mean = F.linear_cross_entropy(**given).detach()
    monkeypatch.setattr("cupylosses.engines.execute.denominator", None)
    found = F.linear_cross_entropy(**{k: x.detach() for k, x in given.items()})
    torch.testing.assert_close(found, mean, rtol=1e-6, atol=0)


@kernels
@pytest.mark.parametrize("options", [{}, {"token_weight": True}])
def test_gradients_of_values_per_row(options: dict[str, Any]) -> None:
    """Backward of several chunks reuses the logits of the one chunk that forward keeps.

    After the backward of a sum, the next forward writes the gradients speculatively, until each row gets a
    ``grad_output`` of its own.
    """
    given, rows = operands(dtype="bfloat16"), 13
    given["target"] = torch.arange(41, device=KERNELS) * 7
    chunks, kept = -(-41 // rows), not options
    memory = rows * 320 * 2
    weights = torch.linspace(0.5, 2.0, 41, device=KERNELS)
    options = {x: weights if x == "token_weight" else given for x, given in options.items()}
    leaves = [x for x in given.values() if x.requires_grad]

    def both(upstream: torch.Tensor) -> tuple[int, int, int, list[torch.Tensor]]:
        with products() as shapes:
            value = F.linear_cross_entropy(**given, **options, max_memory=memory, reduction="none")
            before = len(shapes)
            found = [*torch.autograd.grad(value, leaves, upstream, retain_graph=True)]
            after = len(shapes)
            again = torch.autograd.grad(value, leaves, upstream)
        assert all(torch.equal(x, y) for x, y in zip(found, again, strict=True))
        return before, after - before, len(shapes) - after, found

    def of_sum(scale: float) -> torch.Tensor:
        return torch.tensor(scale, dtype=torch.bfloat16, device=KERNELS).expand(41)

    own, again = of_sum(1.0).contiguous(), 3 * chunks
    *counts, right = both(own)
    assert counts == [chunks, again - kept, again]
    for scale, expected in ((1.0, [chunks, again - kept, again]), (1.0, [again, 0, again]), (-2.0, [again, 0, again])):
        *counts, found = both(of_sum(scale))
        assert counts == expected
        for x, y in zip(found, right, strict=True):
            assert float((x - scale * y).double().norm() / y.double().norm()) <= 8e-3
    assert both(own)[:3] == (again, again, again)
    both(of_sum(1.0))
    assert both(of_sum(1.0))[:3] == (chunks, again - kept, again), "a wrong guess is not repeated"


@kernels
@pytest.mark.parametrize(("dtype", "options"), [("float16", {}), ("float32", {"skip_ignored": True}), ("float32", {})])
def test_a_sum_of_values_per_row(dtype: str, options: dict[str, Any]) -> None:
    """From the second step on, forward writes the gradients speculatively."""
    given = operands(dtype=dtype)
    leaves = {k: x for k, x in given.items() if x.requires_grad}
    buffer = {} if options or dtype != "float32" else {"main_grad": torch.zeros(300, 24, device=KERNELS)}
    values, exact = truth(given, 3.0, reduction="none")[0], truth(given, 3.0, reduction="sum")[1]
    for turn in range(3):
        value = F.linear_cross_entropy(**given, **options, **buffer, reduction="none", max_memory=SMALL)
        found = dict(
            zip(leaves, torch.autograd.grad(3.0 * value.sum(), [*leaves.values()], allow_unused=True), strict=True)
        )
        torch.testing.assert_close(value.cpu().double(), values, rtol=2e-3, atol=2e-3)
        if buffer:
            found["linear_weight"] = buffer["main_grad"] / (turn + 1)
        for name, x in exact.items():
            error = (found[name].cpu().double() - x).norm() / x.norm()
            assert float(error) <= 2 * TOLERANCE[dtype], (turn, name)


def test_rows_of_a_chunk() -> None:
    """A chunk has a multiple of 1024 rows if there are that many, and chunks are of equal size.

    Without a reduction, all logits are kept if their gradient fits beside them; otherwise one chunk is kept, as large
    as allowed.
    """

    def chunk(*sizes: int, **options: Any) -> int:
        return plan(*sizes, **options).chunk_rows

    assert chunk(8192, 4096, 128256) == 4096
    assert chunk(8192, 4096, 128256, max_memory=550_000_000) == 2048
    assert chunk(16384, 2048, 32000) == 4096
    assert chunk(1000, 4096, 128256) == 1000
    assert chunk(9000, 4096, 128256) == 3072
    assert chunk(9000, 16, 128256, max_memory=1) == 1
    assert plan(4096, 1024, 8192, reduction="none").keeps_residual and not plan(4096, 1024, 8192).keeps_residual
    assert not plan(4096, 1024, 8192, reduction="none").consumes_residual
    for sizes, rows in (((4096, 1024, 16384 + 32), 4096), ((1744, 136, 2 * 50896), 1280), ((5000, 136, 50896), 2560)):
        found = plan(*sizes, reduction="none")
        assert found.chunk_rows == rows and found.consumes_residual and found.residual.shape[0] == rows


def test_gradients_of_weights_have_more_rows() -> None:
    """The weight's gradient has as many rows as cuBLAS writes fast. The input's gradient has no extra rows."""
    for sizes, rows in (
        ((1024, 768, 10), 16),
        ((1024, 768, 16), 16),
        ((4808, 20, 16), 32),
        ((4808, 20, 50), 50),
        ((1024, 20, 10), 10),
        ((16384, 250, 5), 5),
    ):
        found = plan(*sizes)
        assert found.weight_rows == rows and found.allocation(1)[0] == (rows, sizes[1])
        assert found.allocation(0)[0] == sizes[:2]


# ----------------------------------------------------------------------------------------------------------------------
# Higher derivatives, transforms, autocast, NumPy and Modules


@kernels
def test_second_derivatives() -> None:
    given = operands((5,), 4, 7, "float64")
    given["target"] = given["target"].abs() % 7

    def value(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return F.linear_cross_entropy(x, w, given["target"], linear_bias=b)

    inputs = [given[x] for x in ("input", "linear_weight", "linear_bias")]
    torch.autograd.gradgradcheck(value, inputs, check_undefined_grad=False)


MOVING = [
    (("input",), {}),
    (("linear_weight", "linear_bias"), {"label_smoothing": 0.1, "softcap": 5.0}),
    (("input", "linear_weight", "linear_bias"), {"weight": torch.rand(300), "mask": torch.arange(41) % 3 > 0}),
    (("input", "linear_weight"), {"token_weight": torch.rand(41)}),
]


def hessian_product(loss: Any, given: dict[str, torch.Tensor], tangents: dict[str, torch.Tensor]) -> Any:
    """Gradients of the sum of a loss with respect to its floating operands, and their derivatives along tangents."""
    names = [k for k, x in given.items() if x.is_floating_point()]

    def gradients(*moved: torch.Tensor) -> Any:
        now = given | dict(zip(tangents, moved, strict=True))
        of_operands = lambda *x: loss(now | dict(zip(names, x, strict=True))).sum()  # noqa: E731
        return torch.func.grad(of_operands, tuple(range(len(names))))(*[now[k] for k in names])

    return torch.func.jvp(gradients, tuple(given[k] for k in tangents), tuple(tangents.values()))


@kernels
@pytest.mark.parametrize(
    ("moving", "options", "dtype", "features", "classes"),
    [(*x, dtype, 24, 300) for x, dtype in in_turn(MOVING, ["float32", "bfloat16"])]
    + [(*MOVING[i], "bfloat16", features, 299) for i in (1, 2) for features in (21, 24)],
    ids=named,
)
def test_hessian_vector_products_in_chunks(
    moving: tuple[str, ...],
    options: dict[str, Any],
    dtype: str,
    features: int,
    classes: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Kernels differentiate all gradients along tangents of some operands, within the memory allowed for logits.

    Layers of 299 classes are padded.
    """
    if classes == 299:
        pad_all(monkeypatch)
        assert chunks.pads_classes(41, features, classes, dtype)
    if "weight" in options:
        options = options | {"weight": options["weight"][:classes]}
    given = {k: x.detach() for k, x in operands(features=features, classes=classes, dtype=dtype).items()}
    tangents = {k: torch.randn_like(given[k]) for k in moving}
    wide = {k: x.cpu().double() if x.is_floating_point() else x.cpu() for k, x in given.items()}
    chosen = {k: x.to(KERNELS) if isinstance(x, torch.Tensor) else x for k, x in options.items()}

    def exact(given: dict[str, Any]) -> torch.Tensor:
        logits = T.linear(given["input"], given["linear_weight"], given["linear_bias"])
        of_logits = {k: x for k, x in options.items() if k != "token_weight"}
        value = F.cross_entropy(logits, given["target"], class_dim=-1, reduction="none", **of_logits)
        counts = (given["target"] != -100) & options.get("mask", torch.tensor(True))
        share = counts * options.get("weight", torch.ones(classes)).double()[given["target"].clamp(min=0)]
        weights = options.get("token_weight", torch.ones(41)).double()
        return (value * weights).sum() / (share * weights).sum()

    before = torch_device.set_host(None)
    try:
        with torch.device("cpu"):
            expected = hessian_product(exact, wide, {k: x.cpu().double() for k, x in tangents.items()})
    finally:
        torch_device.set_host(before)
    device, sizes = torch_device.device_of(given["input"]), []
    kind = type(device)
    empty = kind.empty
    monkeypatch.setattr(formulas, "hvp", None)
    monkeypatch.setattr(kind, "empty", lambda *x: sizes.append((tuple(x[1]), x[3])) or empty(*x))
    found = hessian_product(lambda x: F.linear_cross_entropy(**x, **chosen, max_memory=3 * SMALL // 2), given, tangents)
    for a, b in zip((*found[0], *found[1]), (*expected[0], *expected[1]), strict=True):
        assert float((a.cpu().double() - b).norm() / b.norm()) <= (3e-2 if dtype == "bfloat16" else 2e-6)
    rows = 8 if dtype == "bfloat16" else 4
    assert {shape[0] for shape, _ in sizes if shape[1:] in ((304,), (320,))} <= {rows, 3 * rows}


def laid_out(x: torch.Tensor, layout: str, gap: int) -> torch.Tensor:
    """A copy of a matrix in another layout."""
    rows, columns = x.shape
    if layout == "transposed":
        return x.t().contiguous().t()
    if layout == "gaps between rows":
        return torch.nn.functional.pad(x, (0, gap))[:, :columns]
    if layout == "gaps between columns":
        return torch.nn.functional.pad(x.t(), (0, gap))[:, :rows].t()
    if layout == "step":
        return x.repeat_interleave(2, 1)[:, ::2]
    memory = x.new_empty(x.numel() + gap)
    memory[gap:] = x.reshape(-1)
    return memory[gap:].view(x.shape)


LAYOUTS = ("transposed", "gaps between rows", "gaps between columns", "step", "offset")


@pytest.mark.thorough
@kernels
@pytest.mark.parametrize("seed", range(6))
def test_random_layers(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Value, gradients and Hessian-vector products for random combinations of sizes, layouts and options.

    Tolerances are wide, to find results that are far off; other tests bound the rounding errors of cancelling terms.
    """
    draw, wrong = Random(seed), []
    for number in range(100):
        dtype = draw.choice(["float32", "bfloat16", "bfloat16", "float16", "float64"])
        rows, features = draw.choice([1, 2, 7, 8, 41, 60]), draw.choice([3, 8, 12, 21, 24, 32])
        given = operands((rows,), features, draw.choice([5, 8, 10, 31, 64, 299, 300, 304]), dtype, number)
        given["target"][-1].clamp_(min=0)
        if draw.random() < 0.4:
            del given["linear_bias"]
        layouts = {x: draw.choice(LAYOUTS) for x in ("input", "linear_weight") if draw.random() < 0.8}
        for name, layout in layouts.items():
            moved = laid_out(given[name].detach(), layout, draw.choice([1, 3, 8]))
            given[name] = moved.requires_grad_()
        options: dict[str, Any] = {"reduction": draw.choice(["mean", "sum", "none"])}
        if draw.random() < 0.8:
            options["max_memory"] = draw.choice([1, 1500, 5000, 20000, 60000])
        if dtype.endswith("16") and draw.random() < 0.3:
            options["logits_dtype"] = "float32"
        if dtype.endswith("16") and draw.random() < 0.4:
            options["accumulate_dtype"] = draw.choice(["float32", dtype])
        if draw.random() < 0.2:
            options["label_smoothing"] = 0.1
        if draw.random() < 0.2 and options["reduction"] != "none":
            options["skip_ignored"] = True
        with monkeypatch.context() as patch:
            if draw.random() < 0.6:
                pad_all(patch)
            plans.forget()
            title = number, {k: (tuple(x.shape), layouts.get(k)) for k, x in given.items()}, dtype, options
            try:
                agrees(given, dtype=dtype, slack=4.0, **options)
                if draw.random() < 0.4 and "skip_ignored" not in options:
                    moving = [k for k, x in given.items() if x.requires_grad and draw.random() < 0.7]
                    hessian_product_agrees(given, moving or ["linear_weight"], dtype, options)
            except AssertionError as error:
                wrong.append((title, str(error)))
    plans.forget()
    assert wrong == []


def hessian_product_agrees(
    given: dict[str, torch.Tensor], moving: list[str], dtype: str, options: dict[str, Any]
) -> None:
    """Checks a Hessian-vector product against that of the formula in float64."""
    own = {k: x.detach() for k, x in given.items()}
    tangents = {k: torch.randn_like(own[k]) for k in moving}
    found = hessian_product(lambda x: F.linear_cross_entropy(**x, **options), own, tangents)[1]
    wide = {k: x.cpu().double() if x.is_floating_point() else x.cpu() for k, x in own.items()}
    of_logits = {k: x for k, x in options.items() if k not in LAYER_OPTIONS}

    def exact(x: dict[str, torch.Tensor]) -> torch.Tensor:
        logits = T.linear(x["input"], x["linear_weight"], x.get("linear_bias"))
        return F.cross_entropy(logits, x["target"], class_dim=-1, **of_logits)

    before = torch_device.set_host(None)
    try:
        with torch.device("cpu"):
            expected = hessian_product(exact, wide, {k: x.cpu().double() for k, x in tangents.items()})[1]
    finally:
        torch_device.set_host(before)
    for a, b in zip(found, expected, strict=True):
        wrong = float((a.cpu().double() - b).norm() / b.norm())
        assert not wrong > {"bfloat16": 5e-2, "float16": 2e-2, "float32": 1e-5, "float64": 1e-12}[dtype], (
            moving,
            wrong,
        )


@kernels
def test_transforms() -> None:
    given = {k: x.detach() for k, x in operands((3, 5), 8, 40).items()}
    x, w, y, b = given.values()

    def ours(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor = y) -> torch.Tensor:
        return F.linear_cross_entropy(x, w, y, linear_bias=b)

    def theirs(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor = y) -> torch.Tensor:
        return T.cross_entropy(T.linear(x, w, b).flatten(0, -2), y.flatten())

    def close(found: Any, expected: Any) -> None:
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)

    close(torch.func.grad(ours, (0, 1))(x, w), torch.func.grad(theirs, (0, 1))(x, w))
    close(torch.func.vmap(ours, (0, None, 0))(x, w, y), torch.func.vmap(theirs, (0, None, 0))(x, w, y))
    per_sample = torch.func.vmap(torch.func.grad(ours, (0, 1)), (0, None, 0))
    close(per_sample(x, w, y), torch.func.vmap(torch.func.grad(theirs, (0, 1)), (0, None, 0))(x, w, y))
    tangents = torch.randn_like(x), torch.randn_like(w)
    close(torch.func.jvp(ours, (x, w), tangents), torch.func.jvp(theirs, (x, w), tangents))


@kernels
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_compiled_graphs(dtype: str) -> None:
    """Includes a gradient that is written with extra rows."""
    given = operands(dtype=dtype)

    def step(**given: torch.Tensor) -> torch.Tensor:
        return F.linear_cross_entropy(**given, max_memory=SMALL) * 2

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    leaves = [x for x in given.values() if x.requires_grad]
    found, expected = compiled(**given), step(**given)
    torch.testing.assert_close(found, expected)
    for a, b in zip(torch.autograd.grad(found, leaves), torch.autograd.grad(expected, leaves), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


@kernels
def test_autocast_computes_as_a_layer_would() -> None:
    given = operands()
    with torch.autocast(given["input"].device.type, dtype=torch.bfloat16), products() as shapes:
        value, gradients = run(given, max_memory=SMALL)
    assert shapes and value.dtype == torch.float32
    assert all(x.dtype == torch.float32 for x in gradients.values())
    exact = truth(given, 1.0)
    torch.testing.assert_close(value.double().cpu(), exact[0], rtol=1e-2, atol=0)
    wrong = (gradients["linear_weight"].cpu().double() - exact[1]["linear_weight"]).norm()
    assert float(wrong / exact[1]["linear_weight"].norm()) < 2e-2


def test_weights_of_several_dimensions() -> None:
    """torch's K-dimensional loss: logits of shape (N, C, d_1, ..., d_K)."""
    x, w = torch.randn(6, 5).to(KERNELS), torch.randn(4, 2, 3, 5).to(KERNELS)
    y, b = torch.randint(4, (6, 2, 3)).to(KERNELS), torch.randn(4, 2, 3).to(KERNELS)
    logits = (x @ w.reshape(-1, 5).T + b.reshape(-1)).reshape(6, 4, 2, 3)
    torch.testing.assert_close(F.linear_cross_entropy(x, w, y, linear_bias=b), T.cross_entropy(logits, y))
    single = F.linear_cross_entropy(x[0], w[:, 0, 0], y[0, 0, 0])
    torch.testing.assert_close(single, T.cross_entropy(w[:, 0, 0] @ x[0], y[0, 0, 0]))


def test_numpy_arrays() -> None:
    given = {k: x.detach().cpu().numpy() for k, x in operands().items()}
    found = F.linear_cross_entropy(**given)
    expected = truth({k: torch.from_numpy(x).requires_grad_(x.dtype.kind == "f") for k, x in given.items()}, 1.0)[0]
    assert isinstance(found, numpy.float32) and abs(found - float(expected)) < 1e-5


@kernels
def test_module() -> None:
    module = nn.LinearCrossEntropyLoss(24, 300, bias=True, device=KERNELS, label_smoothing=0.1, max_memory=SMALL)
    assert set(dict(module.named_parameters())) == {"linear.weight", "linear.bias"}
    given = operands()
    found = module(given["input"], given["target"])
    logits = module.linear(given["input"])
    torch.testing.assert_close(found, T.cross_entropy(logits, given["target"], label_smoothing=0.1), rtol=1e-5, atol=0)
    found.backward()
    assert module.linear.weight.grad is not None
    other = nn.LinearCrossEntropyLoss(24, 300, bias=True, device=KERNELS)
    other.load_state_dict(module.state_dict())
    assert "in_features=24, num_classes=300, bias=True, label_smoothing=0.1" in repr(module)


@pytest.mark.skipif(not hasattr(torch.nn, "LinearCrossEntropyLoss"), reason="torch 2.13 or newer has it")
def test_module_of_torch() -> None:
    module = nn.LinearCrossEntropyLoss(5, 10, out_features=(4, 3))
    theirs = torch.nn.LinearCrossEntropyLoss(5, 10, out_features=(4, 3))
    theirs.load_state_dict(module.state_dict())
    x, y = torch.randn(2, 5), torch.randint(10, (2, 4, 3))
    assert isinstance(module, torch.nn.LinearCrossEntropyLoss)
    torch.testing.assert_close(module(x, y), theirs(x, y))


# ----------------------------------------------------------------------------------------------------------------------
# Instead of torch's function

needs_torchs = pytest.mark.skipif(not hasattr(T, "linear_cross_entropy"), reason="torch 2.13 or newer has it")


def calls_of_torch() -> dict[str, dict[str, Any]]:
    """Arguments that torch's function takes, too."""
    probabilities = torch.randn(41, 300).softmax(-1).to(KERNELS)
    return {
        "plain": {},
        "no bias": {"linear_bias": None},
        "class weights": {"weight": torch.rand(300).to(KERNELS)},
        "options": {"label_smoothing": 0.1, "reduction": "sum", "ignore_index": 3},
        "a value per row": {"reduction": "none"},
        "probabilities": {"target": probabilities},
        "one row": {"input": operands()["input"][1].detach(), "target": torch.tensor(7).to(KERNELS)},
    }


@kernels
@needs_torchs
@pytest.mark.parametrize("name", calls_of_torch())
def test_served_in_place_of_torchs_function(name: str) -> None:
    given = {k: x.detach() for k, x in operands().items()}
    if name == "options":
        given["target"].masked_fill_(given["target"] == -100, 3)
    given |= calls_of_torch()[name]
    leaves = [x for x in given.values() if isinstance(x, torch.Tensor) and x.shape[-1:] == (24,)]
    for x in leaves:
        x.requires_grad_()
    expected = T.linear_cross_entropy(**given)
    with cupylosses.patch_torch() as report:
        found = T.linear_cross_entropy(**given)
    assert (report.served.total(), report.passed_on.total()) == (1, 0), report
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    upstream = torch.full_like(expected, 0.5)
    of_ours, of_torch = (torch.autograd.grad(x, leaves, upstream) for x in (found, expected))
    for a, b in zip(of_ours, of_torch, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@kernels
@needs_torchs
@pytest.mark.parametrize(
    "changed",
    [
        pytest.param({"input": torch.ones(2, 4, 24), "target": torch.zeros(2, 300, dtype=torch.int64)}, id="three"),
        pytest.param({"target": torch.zeros(41, dtype=torch.int32)}, id="narrow labels"),
        pytest.param({"linear_weight": torch.ones(300, 23)}, id="shapes"),
        pytest.param({"reduction": "batchmean"}, id="reduction"),
        pytest.param({"mask": torch.ones(41) > 0}, id="mask"),
    ],
)
def test_other_calls_are_torchs(changed: dict[str, Any]) -> None:
    """Calls that are passed on return torch's result or raise its error."""
    given = {k: x.detach() for k, x in operands().items()} | changed
    given = {k: x.to(KERNELS) if isinstance(x, torch.Tensor) else x for k, x in given.items()}

    def outcome() -> Any:
        try:
            return T.linear_cross_entropy(**given)
        except Exception as error:
            return type(error), str(error)

    expected = outcome()
    with cupylosses.patch_torch() as report:
        found = outcome()
    assert not report.served
    assert {name for name, *_ in report.passed_on} == {"linear_cross_entropy"}, report
    assert torch.equal(found, expected) if isinstance(expected, torch.Tensor) else found == expected


@needs_torchs
def test_autocast_in_place() -> None:
    given = {k: x.detach() for k, x in operands().items()}
    if KERNELS == "cpu":
        pytest.skip("torch autocasts its function on a GPU")
    with torch.autocast("cuda", torch.bfloat16), cupylosses.patch_torch() as report:
        assert T.linear_cross_entropy(**given).dtype == torch.float32
    assert report.served.total() == 1


# ----------------------------------------------------------------------------------------------------------------------
# value_and_grad


@pytest.mark.parametrize("argnums", [(0, 1), ("input", "linear_weight", "linear_bias"), "linear_weight"])
def test_value_and_grad(argnums: Any) -> None:
    given = operands()
    value, gradients = cupylosses.value_and_grad(F.linear_cross_entropy, **given, argnums=argnums)
    expected, exact = truth(given, 1.0)
    torch.testing.assert_close(value.double().cpu(), expected, rtol=1e-5, atol=0)
    names = [
        ["input", "linear_weight"][x] if isinstance(x, int) else x
        for x in ([argnums] if isinstance(argnums, str) else argnums)
    ]
    for name, x in zip(names, [gradients] if isinstance(argnums, str) else gradients, strict=True):
        torch.testing.assert_close(x.double().cpu(), exact[name], rtol=1e-4, atol=1e-6)


def test_value_and_grad_of_numpy_arrays() -> None:
    given = {k: x.detach().cpu().numpy() for k, x in operands().items()}
    value, gradients = cupylosses.value_and_grad("linear_cross_entropy", **given, argnums=(0, 1))
    tensors = {k: torch.from_numpy(x).requires_grad_(x.dtype.kind == "f") for k, x in given.items()}
    expected, exact = truth(tensors, 1.0)
    assert abs(float(value) - float(expected)) < 1e-5
    for name, x in zip(("input", "linear_weight"), gradients, strict=True):
        assert isinstance(x, numpy.ndarray)
        numpy.testing.assert_allclose(x, exact[name].numpy(), rtol=1e-5, atol=1e-7)


def test_labels_have_no_gradient() -> None:
    with pytest.raises(TypeError, match="linear_cross_entropy: `target` of int64 has no gradient"):
        cupylosses.value_and_grad(F.linear_cross_entropy, **operands(), argnums=2)


# ----------------------------------------------------------------------------------------------------------------------
# CuPy arrays, for which NumPy stands in without a GPU (`tools.cupy_stand_in`)


def as_arrays(cupy: Any, given: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {k: array(cupy, x.detach()) for k, x in given.items()}


@kernels
@pytest.mark.parametrize(
    ("options", "dtype"),
    in_turn(
        [
            {},
            {"accumulate_dtype": "float32", "softcap": 5.0},
            {"max_memory": 8 * 320 * 2},
            {"reduction": "sum", "label_smoothing": 0.1, "max_memory": 8 * 320 * 2},
            {"normalizer": 7.0},
            {"skip_ignored": True},
        ],
        ["float32", "float16", "float64"],
    ),
    ids=named,
)
def test_cupy_arrays(cupy: Any, dtype: str, options: dict[str, Any]) -> None:
    if dtype == "float64":
        options = {k: x for k, x in options.items() if k != "accumulate_dtype"}
    arrays_agree(cupy, operands(dtype=dtype), dtype, options)


@kernels
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(("features", "classes"), [(19, 304), (16, 298)])
def test_cupy_arrays_that_are_padded(
    cupy: Any, dtype: str, features: int, classes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pad_all(monkeypatch)
    # No other test may have these sizes, because plans are cached.
    assert chunks.pads_features(41, features, classes, dtype) == (features == 19)
    assert chunks.pads_classes(41, features, classes, dtype) == (classes == 298)
    for options in ({}, {"max_memory": SMALL, "accumulate_dtype": "float32"}):
        arrays_agree(cupy, operands(features=features, classes=classes, dtype=dtype), dtype, options)


def arrays_agree(cupy: Any, given: dict[str, torch.Tensor], dtype: str, options: dict[str, Any]) -> None:
    names = ("input", "linear_weight", "linear_bias")
    found = cupylosses.value_and_grad(F.linear_cross_entropy, **as_arrays(cupy, given), argnums=names, **options)
    exact = {k: x for k, x in options.items() if k not in LAYER_OPTIONS}
    expected, slopes = truth(given, 1.0, **exact)
    assert interop.kind(found[0]) == "cupy"
    assert float((tensor(found[0]).cpu().double() - expected).abs() / expected.abs()) <= TOLERANCE[dtype]
    for name, x in zip(names, found[1], strict=True):
        assert x.dtype.name == dtype
        wrong = tensor(x).cpu().double() - slopes[name]
        assert float(wrong.norm() / slopes[name].norm()) <= 2 * TOLERANCE[dtype], name


@kernels
def test_cupy_arrays_without_gradients_or_reduction(cupy: Any) -> None:
    given = operands()
    arrays = as_arrays(cupy, given)
    found = F.linear_cross_entropy(**arrays, reduction="none", max_memory=SMALL)
    expected = truth(given, 1.0, reduction="none")[0]
    torch.testing.assert_close(tensor(found).cpu().double(), expected, rtol=1e-5, atol=1e-6)
    value = F.linear_cross_entropy(**arrays, max_memory=SMALL)
    torch.testing.assert_close(tensor(value).cpu().double(), truth(given, 1.0)[0], rtol=1e-6, atol=0)

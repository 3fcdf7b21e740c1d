"""Calls that row losses refuse, and their messages: function, argument, expected, got, and a way out."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch

import cupylosses.functional as F
from cupylosses.definition.registry import registry
from cupylosses.engines.cache import SettingsCache
from cupylosses.engines.softmax import checks as softmax_checks
from cupylosses.engines.softmax import engine as softmax_engine
from cupylosses.engines.softmax.definition import SoftmaxLoss, define_softmax

X, Y = torch.zeros(4, 5), torch.zeros(4, dtype=torch.int64)
P = X.softmax(-1)

LOSSES = registry(SoftmaxLoss)
each_loss = pytest.mark.parametrize("row_loss", LOSSES.values(), ids=list(LOSSES))


def call(name: str, *operands: Any, **options: Any) -> Callable[[], Any]:
    """A deferred call."""
    return lambda: getattr(F, name)(*operands, **options)


CASES: list[tuple[type[Exception], str, Callable[[], Any]]] = [
    # Shapes
    (
        ValueError,
        "cross_entropy: `target` must have the shape of `input` without its class dimension 1, (2, 7), got `input` of "
        "shape (2, 3, 7) and `target` of shape (2, 3). If the classes are in dimension -1, pass class_dim=-1.",
        call("cross_entropy", torch.zeros(2, 3, 7), torch.zeros(2, 3, dtype=torch.int64)),
    ),
    (
        ValueError,
        "If the classes are in dimension 0, pass class_dim=0.",
        call("cross_entropy", torch.zeros(2, 3, 7), torch.zeros(3, 7, dtype=torch.int64)),
    ),
    (
        ValueError,
        "got `input` of shape (4, 5) and `target` of shape (4, 1). Drop its dimension of size 1 with `.squeeze(1)`.",
        call("cross_entropy", X, Y[:, None]),
    ),
    (
        ValueError,
        "Class indices have no class dimension; pass `target.argmax(1)`, or convert probabilities with `.float()`.",
        call("cross_entropy", X, X.long()),
    ),
    (ValueError, "Class indices have no class dimension; pass `target.argmax(1)`.", call("nll_loss", X, X.long())),
    (ValueError, "There is one label per row.", call("softmax_focal_loss", X, Y[:3])),
    (
        ValueError,
        "cross_entropy: `target` must have the shape of `input`, (4, 5), got (4,). A floating target holds "
        "probabilities; convert class indices with `.long()` or `.astype('int64')`.",
        call("cross_entropy", X, Y.float()),
    ),
    (
        ValueError,
        "kl_div_with_logits: `target` must have the shape of `input`, (4, 5), got (5,). Expand or reshape one",
        call("kl_div_with_logits", X, P[0]),
    ),
    (
        ValueError,
        "distillation_loss: `teacher_logits` must have the shape of `student_logits`, (4, 5), got (4, 6).",
        call("distillation_loss", X, torch.zeros(4, 6)),
    ),
    (
        ValueError,
        "cross_entropy: `weight` must have one number per class, shape (5,) for `input` of shape (4, 5) and class "
        "dimension 1, got (4,).",
        call("cross_entropy", X, Y, torch.ones(4)),
    ),
    (
        ValueError,
        "softmax_focal_loss: `alpha` must have one number per class, shape (5,)",
        call("softmax_focal_loss", X, Y, torch.ones(5, 1)),
    ),
    (
        ValueError,
        "cross_entropy: `mask` must broadcast to the shape of the rows, (4,), got (4, 5). It has one element per row",
        call("cross_entropy", X, Y, mask=X > 0),
    ),
    (
        ValueError,
        "`mask` must broadcast to the shape of the rows, (4,), got (3,)",
        call("nll_loss", X, Y, mask=Y[:3] > 0),
    ),
    (ValueError, "`input` needs a class dimension, got no dimensions.", call("cross_entropy", X[0, 0], Y[0])),
    (
        ValueError,
        "`class_dim` must be within -2 to 1 for `input` of shape (4, 5), got 2.",
        call("cross_entropy", X, Y, class_dim=2),
    ),
    (TypeError, "cross_entropy: `class_dim` must be an integer, got 1.0.", call("cross_entropy", X, Y, class_dim=1.0)),
    (TypeError, "nll_loss: `class_dim` must be an integer, got True.", call("nll_loss", X, Y, class_dim=True)),
    # Dtypes and libraries
    (
        TypeError,
        "cross_entropy: `input` must have one of the dtypes float16, bfloat16, float32, float64, got int64. Convert it "
        "with `.to(torch.float32)`",
        call("cross_entropy", X.long(), Y),
    ),
    (TypeError, "got int64. Are `input` and `target` swapped?", call("cross_entropy", Y, X, class_dim=0)),
    (TypeError, "cross_entropy: `input` must have one of the dtypes", call("cross_entropy", X.to(torch.complex64), Y)),
    (
        TypeError,
        "nll_loss: `target` must have one of the dtypes bool, int8, uint8, int16, int32, int64, got float32. Class "
        "indices are integers: convert them with `.long()` or `.astype('int64')`.",
        call("nll_loss", X, Y.float()),
    ),
    (
        TypeError,
        "kl_div_with_logits: `target` must have one of the dtypes float16, bfloat16, float32, float64, got int64.",
        call("kl_div_with_logits", X, X.long()),
    ),
    (
        TypeError,
        "cross_entropy: `weight` must have one of the dtypes",
        call("cross_entropy", X, Y, torch.ones(5).long()),
    ),
    (
        TypeError,
        "cross_entropy: `mask` must be bool, True where a row counts, got int64. Pass `mask != 0`.",
        call("cross_entropy", X, Y, mask=Y),
    ),
    (
        TypeError,
        "cross_entropy: `target` must be a torch.Tensor, a cupy.ndarray, a numpy.ndarray or an object with "
        "`__dlpack__`, got list",
        call("cross_entropy", X, [0, 1, 2, 3]),
    ),
    (TypeError, "cross_entropy: `weight` must be a torch.Tensor", call("cross_entropy", X, Y, 2.0)),
    (
        TypeError,
        "cross_entropy: operands must come from one array library, got `input` from torch and `target` from numpy and "
        "`weight` from torch.",
        call("cross_entropy", X, Y.numpy(), torch.ones(5)),
    ),
    (
        ValueError,
        "cross_entropy: operands must be on one device, got `input` on cpu and `target` on cpu and `weight` on meta.",
        call("cross_entropy", X, Y, torch.ones(5, device="meta")),
    ),
    (TypeError, "cross_entropy: `input` must be a dense tensor", call("cross_entropy", X.to_sparse(), Y)),
    (
        ValueError,
        "cross_entropy: `weight` has no gradient, but requires one; pass `weight.detach()`.",
        call("cross_entropy", X, Y, torch.ones(5, requires_grad=True)),
    ),
    (TypeError, "the result would be bfloat16", call("cross_entropy", X.numpy(), Y.numpy(), out_dtype="bfloat16")),
    # Numbers and choices
    (
        ValueError,
        "cross_entropy: `label_smoothing` must be a number >= 0 and <= 1, got 1.1.",
        call("cross_entropy", X, Y, label_smoothing=1.1),
    ),
    (ValueError, "`label_smoothing` must be a number >= 0", call("cross_entropy", X, Y, label_smoothing=float("nan"))),
    (ValueError, "`label_smoothing` must be a number >= 0", call("cross_entropy", X, Y, label_smoothing=-0.1)),
    (TypeError, "`label_smoothing` must be a number", call("cross_entropy", X, Y, label_smoothing="0.1")),
    (ValueError, "`gamma` must be a number >= 0, got -1.0.", call("softmax_focal_loss", X, Y, gamma=-1)),
    (ValueError, "`z_loss` must be a number >= 0, got -1e-06.", call("cross_entropy", X, Y, z_loss=-1e-6)),
    (ValueError, "`poly` must be a number >= -1, got -2.0.", call("cross_entropy", X, Y, poly=-2.0)),
    (ValueError, "`softcap` must be a number > 0, got 0.0.", call("cross_entropy", X, Y, softcap=0.0)),
    (ValueError, "`softcap` must be finite, got inf.", call("cross_entropy", X, Y, softcap=float("inf"))),
    (TypeError, "`softcap` must be a number > 0, got str.", call("cross_entropy", X, Y, softcap="30")),
    (ValueError, "`logit_scale` must be a number > 0, got -1.0.", call("cross_entropy", X, Y, logit_scale=-1.0)),
    (ValueError, "`temperature` must be a number > 0, got 0.0.", call("distillation_loss", X, X, temperature=0.0)),
    (
        ValueError,
        "`temperature` must be a number > 0, got nan.",
        call("kl_div_with_logits", X, P, temperature=float("nan")),
    ),
    (ValueError, "`beta` must be a number >= 0 and <= 1, got 2.0.", call("distillation_loss", X, X, beta=2.0)),
    (TypeError, "`log_target` must be False or True, got 1.", call("kl_div_with_logits", X, P, log_target=1)),
    (TypeError, "`ignore_index` must be an integer, got 1.5.", call("cross_entropy", X, Y, ignore_index=1.5)),
    (TypeError, "`ignore_index` must be an integer, got None.", call("nll_loss", X, Y, ignore_index=None)),
    (ValueError, "nll_loss: `ignore_index` must fit into 64 bits", call("nll_loss", X, Y, ignore_index=2**63)),
    (
        ValueError,
        "cross_entropy: `ignore_index` needs class indices, got a floating target, which holds probabilities. Leave "
        "rows out with `mask`.",
        call("cross_entropy", X, P, ignore_index=0),
    ),
    (
        ValueError,
        "cross_entropy: `gamma` needs class indices, got 2.0 and a floating target, which holds probabilities. Leave "
        "it at 0.0, or pass `target.argmax(class_dim)`.",
        call("cross_entropy", X, P, gamma=2.0),
    ),
    (ValueError, "`poly` needs class indices", call("cross_entropy", X, P, poly=1.0)),
    (ValueError, "`return_accuracy` needs class indices", call("cross_entropy", X, P, return_accuracy=True)),
    (TypeError, "`return_lse` must be True or False, got 1.", call("cross_entropy", X, Y, return_lse=1)),
    (TypeError, "`return_accuracy` must be True or False", call("cross_entropy", X, Y, return_accuracy="yes")),
    (TypeError, "`inplace_backward` must be True or False", call("distillation_loss", X, X, inplace_backward=None)),
    (
        ValueError,
        "cross_entropy: `check_targets` must be one of 'lazy', 'sync', 'off', got 'never'.",
        call("cross_entropy", X, Y, check_targets="never"),
    ),
    (
        ValueError,
        "`check_targets` must be one of 'lazy', 'sync', 'off', got True.",
        call("nll_loss", X, Y, check_targets=True),
    ),
    (
        ValueError,
        "cross_entropy: `reduction` must be one of 'none', 'mean', 'sum', 'batchmean', got 'avg'.",
        call("cross_entropy", X, Y, reduction="avg"),
    ),
    (ValueError, "got 'means'; did you mean 'mean'?", call("nll_loss", X, Y, reduction="means")),
    (
        ValueError,
        "`reduction` must be one of 'none', 'mean'",
        call("distillation_loss", X, X, reduction="weighted_mean"),
    ),
    (
        ValueError,
        "`normalizer` replaces what a mean is divided by",
        call("cross_entropy", X, Y, reduction="sum", normalizer=2),
    ),
    (
        ValueError,
        "`normalizer` must be one number, got an array of shape (4,)",
        call("cross_entropy", X, Y, normalizer=Y),
    ),
    (TypeError, "`out_dtype` must be one of the dtypes", call("cross_entropy", X, Y, out_dtype="int32")),
]


@pytest.mark.parametrize(("kind", "message", "made"), CASES, ids=[x[1][:60] for x in CASES])
def test_refused(kind: type[Exception], message: str, made: Callable[[], Any]) -> None:
    with pytest.raises(kind) as error:
        made()
    assert type(error.value) is kind
    assert message in str(error.value)
    assert re.match(rf"({'|'.join(LOSSES)}): ", str(error.value))


@each_loss
def test_unknown_arguments(row_loss: SoftmaxLoss) -> None:
    second = P if row_loss.dense else Y
    with pytest.raises(TypeError, match="unexpected keyword argument 'dim'"):
        getattr(F, row_loss.name)(X, second, dim=1)


def test_deprecated_arguments_warn_at_the_line_that_gives_them() -> None:
    with pytest.warns(UserWarning, match=r"^cross_entropy: `size_average` and `reduce` are deprecated") as found:
        value = F.cross_entropy(X, Y, size_average=False)
    assert found[0].filename == __file__
    torch.testing.assert_close(value, F.cross_entropy(X, Y, reduction="sum"))
    with pytest.warns(UserWarning, match=r"use reduction='none'"):
        assert F.nll_loss(X, Y, reduce=False).shape == (4,)


# ----------------------------------------------------------------------------------------------------------------------
# Labels out of range


@pytest.mark.parametrize("array", [torch.as_tensor, numpy.asarray], ids=["torch", "numpy"])
@pytest.mark.parametrize("check", ["lazy", "sync"])
def test_labels_out_of_range_are_named(array: Callable[[Any], Any], check: str) -> None:
    x, y = numpy.zeros((3, 19, 8), dtype="float32"), numpy.zeros((3, 8), dtype="int64")
    y[1, 7] = y[2, 0] = 255
    with pytest.raises(IndexError) as error:
        F.cross_entropy(array(x), array(y), check_targets=check)
    assert str(error.value) == (
        "cross_entropy: `target[1, 7]` must be a class index, 0 to 18, or `ignore_index`, got 255 for 19 classes; did "
        "you mean ignore_index=255?"
    )
    y[2, 0] = -1
    with pytest.raises(IndexError, match=r"`target\[1, 7\]` must be .*, got 255 for 19 classes\.$"):
        F.cross_entropy(array(x), array(y), check_targets=check)


def test_labels_out_of_range_of_one_row_and_one_class() -> None:
    with pytest.raises(
        IndexError, match=r"^nll_loss: `target` must be a class index, 0 to 4, .* got -1 for 5 classes;"
    ):
        F.nll_loss(X[0], torch.tensor(-1))
    with pytest.raises(IndexError, match=r"0 to 0, or `ignore_index`, got 1 for 1 class;"):
        F.nll_loss(X[:, :1], torch.ones(4, dtype=torch.int64))


def test_labels_out_of_range_are_let_pass() -> None:
    assert F.cross_entropy(X, Y + 7, check_targets="off").isnan()
    assert not F.cross_entropy(X, Y + 7, mask=Y > 0, check_targets="sync", normalizer=1.0)
    assert not F.cross_entropy(X, Y + 7, ignore_index=7, check_targets="sync", normalizer=1.0)


# ----------------------------------------------------------------------------------------------------------------------
# Definitions


def made(**changes: Any) -> SoftmaxLoss:
    loss = LOSSES["nll_loss"]
    fields = {
        "name": "example", "summary": "S.", "formula": "-x_y", "operands": loss.operands, "targets": ("indices",),
        "row": "nll", "references": {"row": lambda xp, nll, weight: nll}, "softmax": True,
    }  # fmt: skip
    return SoftmaxLoss(**{**fields, **changes})


def test_the_example_is_valid() -> None:
    assert made().keywords[0] == "ignore_index"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"targets": ("labels",)}, "`targets` must be some of"),
        ({"targets": ("probabilities",)}, "class indices need a `row`"),
        ({"targets": ("indices", "probabilities")}, "a target per class needs a `term`"),
        ({"term": "log_p"}, "a target per class needs a `term`, and a `term` such a target"),
        ({"softmax": False, "penalty": "lse"}, "`term`, `penalty` and `scale` need a softmax"),
        ({"references": {}}, "`references` must be of"),
        ({"row": "nil"}, "row: the name `nil` is unknown; did you mean `nll`"),
        ({"row": "log_p"}, "row: the name `log_p` is unknown"),
        ({"penalty": "nll", "references": {"row": abs, "penalty": abs}}, "penalty: the name `nll` is unknown"),
        ({"softmax": False, "row": "rest"}, "row: the name `rest` is unknown"),
        ({"limits": {("beta", 1.0): "log_p"}}, "`limits` must be of its parameters, got 'beta'"),
        ({"positional": "input target weights"}, "`positional` names the unknown argument 'weights'"),
        ({"constants": {"lse": "1"}}, "the name 'lse' is taken"),
        ({"constants": {"mask": "1"}}, "the name 'mask' is taken"),
    ],
)
def test_invalid_definitions_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        made(**changes)
    assert str(error.value).startswith("example: ")


def test_a_name_is_defined_once() -> None:
    fields = {name: getattr(LOSSES["nll_loss"], name) for name in [x.name for x in dataclasses.fields(SoftmaxLoss)]}
    with pytest.raises(ValueError, match="'nll_loss' is defined already"):
        define_softmax(**fields)


def test_the_message_of_a_label_is_also_that_of_kernels() -> None:
    found = softmax_checks.bad_label(LOSSES["cross_entropy"], (12, 7), 255, 19, alike=True)
    assert isinstance(found, IndexError) and "`target[12, 7]`" in str(found) and "ignore_index=255?" in str(found)


# ----------------------------------------------------------------------------------------------------------------------
# Checked settings are cached


def test_settings_that_are_equal_are_not_the_same() -> None:
    """True equals 1.0, but only 1.0 is a valid label smoothing, so the cache must tell them apart."""
    x, y = torch.randn(4, 5), torch.tensor([0, 1, 2, 3])
    for _ in range(3):
        F.cross_entropy(x, y, label_smoothing=1.0)
        with pytest.raises(TypeError, match="label_smoothing"):
            F.cross_entropy(x, y, label_smoothing=True)
        with pytest.raises(ValueError, match="label_smoothing"):
            F.cross_entropy(x, y, label_smoothing=1.5)


def test_settings_of_operands_of_other_kinds() -> None:
    """For other operands the same settings mean another class dimension, or another kind of target."""
    x = torch.randn(6, 5)
    for _ in range(2):
        alone = [F.cross_entropy(row, y) for row, y in zip(x, torch.arange(5), strict=False)]
        together = F.cross_entropy(x[:5], torch.arange(5), reduction="none")
        torch.testing.assert_close(torch.stack(alone), together)
        dense = F.cross_entropy(x, x.softmax(-1), reduction="none")
        torch.testing.assert_close(dense, torch.distributions.Categorical(logits=x).entropy())
        image = F.cross_entropy(x[:5].T[None], torch.arange(5)[None], reduction="none")
        torch.testing.assert_close(image[0], together)


def test_settings_that_change_are_looked_at_each_time() -> None:
    x, y = torch.randn(4, 5), torch.tensor([0, 1, 2, 3])
    share = numpy.full((), 0.5)
    first = F.cross_entropy(x, y, label_smoothing=share[()])
    share[()] = 0.0
    assert F.cross_entropy(x, y, label_smoothing=share[()]) != first
    normalizer = torch.tensor(2.0)
    values = []
    for n in (2.0, 4.0):
        normalizer.fill_(n)
        values.append(F.cross_entropy(x, y, normalizer=normalizer))
    torch.testing.assert_close(values[0], 2 * values[1])


def test_settings_are_not_kept_forever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(softmax_engine, "_SETTINGS", SettingsCache(5))
    x, y = torch.randn(4, 5), torch.tensor([0, 1, 2, 3])
    for n in range(12):
        value = F.cross_entropy(x, y, z_loss=0.1 * n)
        torch.testing.assert_close(
            value, torch.nn.functional.cross_entropy(x, y) + 0.1 * n * x.logsumexp(-1).square().mean()
        )
        assert 1 <= len(softmax_engine._SETTINGS) <= 5

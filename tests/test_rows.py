"""Row losses: value and gradients against the float64 truth, over all their options."""

from __future__ import annotations

import inspect
import pickle
import zlib
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, product
from typing import Any

import numpy
import pytest
import torch
from grids import short_or_full, thorough
from tools.pairwise import covering_settings
from torch import Tensor

import cupylosses.functional as F
from cupylosses import nn, value_and_grad
from cupylosses.definition.docstring import docstring
from cupylosses.definition.registry import registry
from cupylosses.engines.softmax.call import RowResult
from cupylosses.engines.softmax.definition import SoftmaxLoss
from cupylosses.testing import host
from cupylosses.testing.softmax.eager import twin
from cupylosses.testing.softmax.truth import NAMES, exact_gradients, exact_row, truth
from cupylosses.testing.tolerance import compare, same_bits

LOSSES = registry(SoftmaxLoss)
each_loss = pytest.mark.parametrize("row_loss", LOSSES.values(), ids=list(LOSSES))

#: Shape and class dimension; None is torch's default.
SHAPES = {
    "single": ((7,), None),
    "rows": ((6, 5), None),
    "classes last": ((3, 4, 5), -1),
    "image": ((2, 5, 3, 2), None),
    "classes first": ((5, 6), 0),
    "one class": ((4, 1), None),
    "no rows": ((0, 5), None),
    "strided": ((6, 5), None),
    "expanded": ((6, 5), None),
}

FLOATING = ("float32", "float16", "bfloat16", "float64")

COMMON: Mapping[str, tuple[Any, ...]] = {
    "shape": tuple(SHAPES),
    "dtype": FLOATING,
    "reduction": ("mean", "none", "sum", "batchmean"),
    "mask": (None, "full", "broadcast"),
    "normalizer": (None, 7.0, "array"),
    "out_dtype": (None, "float32", "float64"),
}
LABELS: Mapping[str, tuple[Any, ...]] = {
    "labels": ("int64", "int32", "uint8", "int16", "int8", "bool"),
    "ignored": ("none", "some", "a class", "all"),
    "weight": (None, "float32", "float64", "bfloat16"),
}
ROW: Mapping[str, tuple[Any, ...]] = {
    "label_smoothing": (0.0, 0.1, 1.0),
    "z_loss": (0.0, 0.01),
    "softcap": (None, 2.5),
    "logit_scale": (1.0, 0.5),
    "gamma": (0.0, 1.0, 2.0, 0.5),
    "poly": (0.0, 1.0, -1.0),
}

#: The options of each loss, and for cross entropy also those with probabilities.
OPTIONS: Mapping[str, Mapping[str, tuple[Any, ...]]] = {
    "cross_entropy": {**COMMON, **LABELS, **ROW},
    "cross_entropy of probabilities": {
        **COMMON,
        "target_dtype": FLOATING,
        "weight": (None, "float32", "float64"),
        **{k: ROW[k] for k in ("label_smoothing", "z_loss", "softcap", "logit_scale")},
    },
    "softmax_focal_loss": {**COMMON, **LABELS, **ROW},
    "nll_loss": {**COMMON, **LABELS},
    "kl_div_with_logits": {
        **COMMON,
        "target_dtype": FLOATING,
        "log_target": (False, True),
        "temperature": (1.0, 2.0, 0.5),
    },
    "distillation_loss": {
        **COMMON,
        "target_dtype": FLOATING,
        "temperature": (1.0, 2.0),
        "beta": (0.0, 0.1, 0.5, 1.0),
    },
}

#: Options that kernels are compiled for. The others are numbers, passed to a kernel or to its launch.
COMPILED = (
    "shape", "dtype", "reduction", "mask", "out_dtype", "labels", "weight", "target_dtype", "label_smoothing",
    "softcap", "log_target",
)  # fmt: skip

#: Options that :func:`build` turns into arrays; others are passed unchanged.
MADE = ("shape", "dtype", "mask", "normalizer", "labels", "ignored", "weight", "target_dtype")


def build(what: str, setting: Mapping[str, Any], device: str = "cpu") -> tuple[str, dict[str, Any]]:
    """Returns the name of the loss, and the arguments of a call with these options."""
    name = what.partition(" ")[0]
    first, second, weights = NAMES[name]
    generator = torch.Generator().manual_seed(zlib.crc32(repr((what, sorted(setting.items(), key=str))).encode()))
    shape, dim = SHAPES[setting["shape"]]
    at = dim if dim is not None else min(1, len(shape) - 1)
    dtype = getattr(torch, setting["dtype"])
    rows = torch.empty(shape).movedim(at, -1).shape[:-1]
    x = 3 * torch.randn(shape, generator=generator, dtype=torch.float64)
    if name == "nll_loss":
        x = x.log_softmax(at)
    given: dict[str, Any] = {first: x.to(dtype).to(device)}
    if setting["shape"] == "strided":
        given[first] = given[first].repeat(2, 2)[::2, 1::2]
    if setting["shape"] == "expanded":
        given[first] = given[first][:1].expand(shape)
    if "labels" in setting:
        classes = min(shape[at], 2) if setting["labels"] == "bool" else shape[at]
        labels = torch.randint(0, classes, rows, generator=generator).to(getattr(torch, setting["labels"]))
        if setting["ignored"] == "some" and labels.dtype.is_signed:
            labels = torch.where(torch.rand(rows, generator=generator) < 0.4, -100, labels).to(labels.dtype)
        if setting["ignored"] == "a class":
            given["ignore_index"] = 1
        if setting["ignored"] == "all":
            labels, given["ignore_index"] = torch.zeros_like(labels), 0
        given[second] = labels.to(device)
    else:
        y = torch.randn(shape, generator=generator, dtype=torch.float64)
        if name != "distillation_loss":
            y = y.log_softmax(at) if setting.get("log_target") else y.softmax(at)
        given[second] = y.to(getattr(torch, setting["target_dtype"])).to(device)
    if setting.get("weight"):
        w = torch.rand(shape[at], generator=generator) + 0.25
        w[torch.rand(shape[at], generator=generator) < 0.2] = 0.0
        given[str(weights)] = w.to(getattr(torch, setting["weight"])).to(device)
    if setting["mask"]:
        mask = torch.rand(rows, generator=generator) < 0.7
        given["mask"] = (mask[..., :1] if setting["mask"] == "broadcast" and rows else mask).to(device)
    if setting["normalizer"] and setting["reduction"] in ("mean", "batchmean"):
        given["normalizer"] = torch.tensor(3.0, device=device) if setting["normalizer"] == "array" else 7.0
    if dim is not None or name in ("kl_div_with_logits", "distillation_loss"):
        given["class_dim"] = at
    return name, given | {k: v for k, v in setting.items() if k not in MADE}


def cases(strength: int) -> list[Any]:
    """Returns settings of each loss that cover its options."""
    return [
        pytest.param(what, setting, id=f"{what}-{i}")
        for what, options in OPTIONS.items()
        for i, setting in enumerate(covering_settings(options, strength))
    ]


#: Compiled options that determine how operands are read. Losses with the same kind of target read them alike.
READING = ("shape", "labels")


def kind_of_target(what: str) -> tuple[bool, bool]:
    """Returns two booleans, True for a loss of logits and for dense targets. If equal, losses read operands alike."""
    return LOSSES[what.partition(" ")[0]].softmax, "target_dtype" in OPTIONS[what]


def compiled_options(what: str) -> dict[str, Sequence[Any]]:
    """Returns the choices of compiled options that a loss needs in kernels.

    These are all choices, except that the options in :data:`READING` have only four choices, different ones per loss,
    if an earlier loss of the same kind has all.
    """
    earlier = [x for x in list(OPTIONS)[: list(OPTIONS).index(what)] if kind_of_target(x) == kind_of_target(what)]
    found = {k: x for k, x in OPTIONS[what].items() if k in COMPILED}
    if earlier:
        start = 4 * len(earlier)
        found |= {k: [x[(start + i) % len(x)] for i in range(4)] for k, x in found.items() if k in READING}
    return found


def kernel_cases() -> list[Any]:
    """Returns settings of each loss for kernels.

    Every choice that the loss needs of each compiled option occurs, and every pair of choices of any two other options.
    With ``--thorough``, every pair of choices of any two options occurs, and three kernels in four serve a single
    setting.
    """
    if thorough():
        return cases(2)
    found = []
    for what, options in OPTIONS.items():
        compiled = covering_settings(compiled_options(what), 1)
        others = covering_settings({k: x for k, x in options.items() if k not in COMPILED}, 2)
        for i in range(max(len(compiled), len(others))):
            setting = {**compiled[i % len(compiled)], **others[i % len(others)]}
            found.append(pytest.param(what, setting, id=f"{what}-{i}"))
    return found


def few_cases(every: Sequence[Any]) -> list[Any]:
    """Returns some of these cases, for tests that are not about formulas.

    Each loss occurs, and each choice of each option occurs with some loss.
    """
    found: list[Any] = []
    missing = {x for case in every for x in choices(case)}
    while missing:
        found.append(max(every, key=lambda case: len(missing.intersection(choices(case)))))
        missing.difference_update(choices(found[-1]))
    return found


def choices(case: Any) -> list[tuple[str, Any]]:
    """Returns the loss of a case, and its options."""
    what, setting = case.values
    return [("loss", what), *setting.items()]


def holds(name: str, arguments: Mapping[str, Any]) -> None:
    """Asserts that value, gradients, lse and accuracy of a call match the truth."""
    function = getattr(F, name)
    operands = {n: arguments[n] for n in NAMES[name][:2]}
    leaves = {n: x.detach().requires_grad_() for n, x in operands.items() if x.is_floating_point()}
    more = {x: True for x in ("return_lse", "return_accuracy") if x in LOSSES[name].common}
    if not all(x in leaves or x == NAMES[name][0] for x in operands):
        found = function(**{**arguments, **leaves}, **more)
    else:
        found = function(**{**arguments, **leaves})
    value = found.loss if isinstance(found, RowResult) else found
    upstream = (torch.rand(value.shape, dtype=torch.float64) + 0.25).to(value.dtype)
    exact = truth(name, arguments, upstream)

    wide = torch.float32
    for x in leaves.values():
        wide = torch.promote_types(wide, x.dtype)
    promoted = leaves[NAMES[name][0]].dtype
    for x in leaves.values():
        promoted = torch.promote_types(promoted, x.dtype)
    result = arguments.get("out_dtype")
    assert value.dtype == (getattr(torch, result) if result else promoted)
    _close("value", value.detach(), exact.value, wide)
    gradients = torch.autograd.grad(value, list(leaves.values()), upstream.to(value.device))
    for (n, x), found_gradient in zip(leaves.items(), gradients, strict=True):
        assert found_gradient.dtype == x.dtype and found_gradient.shape == x.shape
        _close(f"gradient of {n}", found_gradient, exact.gradients[n], wide)
    if isinstance(found, RowResult):
        assert found.lse.dtype == wide and not found.lse.requires_grad
        torch.testing.assert_close(found.lse.cpu().double(), exact.lse, rtol=1e-5, atol=1e-5)
        assert found.accuracy.item() == pytest.approx(exact.accuracy, rel=1e-6, nan_ok=True)


def _close(what: str, found: Tensor, expected: Any, wide: torch.dtype) -> None:
    if found.dtype == torch.float64 and wide == torch.float32:
        found = found.float()  # Compare in the precision in which it was computed.
    comparison = compare(found.cpu(), expected)
    assert comparison.ok, f"{what}: {comparison}"


# ----------------------------------------------------------------------------------------------------------------------
# Values and gradients


@pytest.mark.parametrize(("what", "setting"), cases(short_or_full(2, 3)))
def test_formulas(what: str, setting: Mapping[str, Any]) -> None:
    """Every pair of choices of any two options occurs, and of any three options with ``--thorough``."""
    holds(*build(what, setting))


@pytest.mark.plain
@pytest.mark.kernels
@pytest.mark.formulas
@pytest.mark.parametrize(("what", "setting"), kernel_cases())
def test_kernels(what: str, setting: Mapping[str, Any]) -> None:
    holds(*build(what, setting, "cpu" if host.active() else "cuda"))


SMOOTH = {
    "cross_entropy": {"label_smoothing": 0.2, "gamma": 1.5, "poly": 0.5, "z_loss": 0.1, "softcap": 3.0},
    "softmax_focal_loss": {"gamma": 0.5},
    "nll_loss": {},
    "kl_div_with_logits": {"temperature": 2.0},
    "distillation_loss": {"beta": 0.3},
}


@each_loss
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_second_derivatives(row_loss: SoftmaxLoss, reduction: str) -> None:
    setting = {"shape": "rows", "dtype": "float64", "reduction": reduction, "mask": "full", "normalizer": None}
    setting |= {"labels": "int64", "ignored": "some"} if row_loss.row else {"target_dtype": "float64"}
    _, arguments = build(row_loss.name, setting)
    names = [x for x in NAMES[row_loss.name][:2] if arguments[x].is_floating_point()]

    def function(*operands: Tensor) -> Tensor:
        given = {**arguments, **dict(zip(names, operands, strict=True)), **SMOOTH[row_loss.name]}
        return getattr(F, row_loss.name)(**given)

    leaves = [arguments[n].clone().requires_grad_() for n in names]
    assert torch.autograd.gradcheck(function, leaves)
    assert torch.autograd.gradgradcheck(function, leaves, fast_mode=True)


@pytest.mark.parametrize(
    ("what", "setting"), [c for x in OPTIONS for c in cases(1) if c.values[0] == x], ids=lambda x: str(x)[:30]
)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_numpy(what: str, setting: Mapping[str, Any], dtype: str) -> None:
    """NumPy arrays give the values and gradients of the truth, in the dtype of the operands."""
    setting = dict(setting) | {"dtype": dtype, "out_dtype": None}
    setting |= {k: dtype for k in ("weight", "target_dtype") if setting.get(k)}
    name, given = build(what, setting)
    arrays = {k: x.numpy() if isinstance(x, Tensor) else x for k, x in given.items()}
    value = getattr(F, name)(**arrays)
    expected = truth(name, given).value.exact
    assert isinstance(value, (numpy.ndarray, numpy.generic)) and value.dtype == dtype
    torch.testing.assert_close(torch.as_tensor(value).double(), expected, rtol=1e-6, atol=1e-6, equal_nan=True)
    options = {k: x for k, x in arrays.items() if k not in NAMES[name][:2]}
    again, gradient = value_and_grad(name, *(arrays[k] for k in NAMES[name][:2]), **options)
    torch.testing.assert_close(torch.as_tensor(again), torch.as_tensor(value), equal_nan=True)
    exact = truth(name, given).gradients[NAMES[name][0]].exact
    torch.testing.assert_close(torch.as_tensor(gradient).double(), exact, rtol=1e-5, atol=1e-5)
    assert gradient.dtype == dtype and isinstance(gradient, numpy.ndarray)


def test_value_and_grad_of_tensors() -> None:
    x, y = torch.randn(4, 3), torch.tensor([0, 1, 2, -100])
    result, gradient = value_and_grad(F.cross_entropy, x, y, return_lse=True, reduction="none")
    leaf = x.clone().requires_grad_()
    expected = F.cross_entropy(leaf, y, return_lse=True, reduction="none")
    assert isinstance(result, RowResult) and result.accuracy is None
    assert same_bits(result.loss, expected.loss.detach()) and same_bits(result.lse, expected.lse)
    assert same_bits(gradient, torch.autograd.grad(expected.loss.sum(), leaf)[0])
    value, pair = value_and_grad("distillation_loss", x, x.flip(0), argnums=("teacher_logits", 0))
    assert value.dim() == 0 and [g.shape for g in pair] == [x.shape, x.shape]
    with pytest.raises(TypeError, match=r"^cross_entropy: `target` of int64 has no gradient"):
        value_and_grad("cross_entropy", x, y, argnums=1)
    with pytest.raises(ValueError, match=r"^cross_entropy: `argnums` must be within 0 to 1, got 2"):
        value_and_grad("cross_entropy", x, y, argnums=2)


# ----------------------------------------------------------------------------------------------------------------------
# The truth itself


@pytest.mark.parametrize(
    ("name", "target", "options"),
    [
        ("cross_entropy", 1, {"label_smoothing": 0.2, "gamma": 1.5, "poly": 0.5, "z_loss": 0.1}),
        ("cross_entropy", [0.5, 0.25, 0.25], {"label_smoothing": 0.2, "z_loss": 0.1}),
        ("softmax_focal_loss", 2, {"gamma": 2.0}),
        ("nll_loss", 2, {}),
        ("kl_div_with_logits", [0.5, 0.25, 0.25], {}),
        ("kl_div_with_logits", [-0.5, -1.25, -3.0], {"log_target": True}),
        ("distillation_loss", [0.5, 2.0, -1.0], {"beta": 0.0}),
        ("distillation_loss", [0.5, 2.0, -1.0], {"beta": 1.0}),
        ("distillation_loss", [0.5, 2.0, -1.0], {"beta": 0.3}),
    ],
)
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_truths_agree(name: str, target: Any, options: dict[str, Any], softcap: float | None) -> None:
    x, w = [0.25, -1.5, 2.0], [1.0, 0.5, 2.0] if name == "cross_entropy" else None
    if name in ("kl_div_with_logits", "distillation_loss", "nll_loss"):
        softcap = None
    value, gradient = exact_row(name, x, target, w, softcap, **options)
    first, second, weights = NAMES[name]
    y = torch.tensor(target) if isinstance(target, int) else torch.tensor(target, dtype=torch.float64)
    given = {first: torch.tensor(x, dtype=torch.float64), second: y, "reduction": "sum", **options}
    given |= {"softcap": softcap} if softcap else {}
    given |= {str(weights): torch.tensor(w, dtype=torch.float64)} if w else {}
    found = truth(name, given)
    torch.testing.assert_close(found.value.exact.item(), value, rtol=1e-14, atol=1e-15)
    torch.testing.assert_close(found.gradients[first].exact.tolist(), gradient, rtol=1e-13, atol=1e-15)
    _, _, of_target = exact_gradients(name, x, target, w, softcap, **options)
    expected = [] if isinstance(target, int) else found.gradients[second].exact.tolist()
    torch.testing.assert_close([float(a) for a in of_target], expected, rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("what", OPTIONS)
def test_settings_for_kernels_have_every_choice(what: str) -> None:
    every = {(name, x) for name, options in OPTIONS[what].items() for x in options}
    settings = [set(choices(case)) for case in kernel_cases() if case.values[0] == what]
    assert {x for x in every if x[0] not in READING} <= set().union(*settings)
    alike = [set(choices(x)) for x in kernel_cases() if kind_of_target(x.values[0]) == kind_of_target(what)]
    assert every <= set().union(*alike)
    others = [name for name in OPTIONS[what] if name not in COMPILED]
    for a, b in combinations(others, 2):
        for pair in product(*([(name, x) for x in OPTIONS[what][name]] for name in (a, b))):
            assert any(x.issuperset(pair) for x in settings), pair


def test_few_settings_have_every_choice_of_some_loss() -> None:
    every = kernel_cases()
    few = few_cases(every)
    assert {x for case in few for x in choices(case)} == {x for case in every for x in choices(case)}
    assert len(few) < len(every) / 3


@pytest.mark.parametrize(("what", "setting"), cases(short_or_full(1, 2)))
def test_torchs_way_is_the_same(what: str, setting: Mapping[str, Any]) -> None:
    """The torch implementations that the scripts compare with compute the same loss."""
    wide = {k: "float64" for k in ("dtype", "weight", "target_dtype") if setting.get(k)}
    setting = {**setting, **wide, "mask": None, "normalizer": None, "out_dtype": None}
    setting |= {"labels": "int64"} if "labels" in setting else {}
    name, arguments = build(what, setting)
    operands = [arguments.pop(n) for n in NAMES[name] if n in arguments]
    reduction, dim = arguments.pop("reduction"), arguments.pop("class_dim", None)
    call = twin(LOSSES[name], arguments, reduction, dim)
    assert call is not None and twin(LOSSES[name], {"mask": torch.ones(())}, reduction) is None
    given = dict(zip(NAMES[name], operands, strict=False)) | arguments | {"reduction": reduction, "class_dim": dim}
    if dim is None:
        del given["class_dim"]
    exact = truth(name, given).value.exact
    if operands[0].numel():
        torch.testing.assert_close(call(*operands), exact, rtol=1e-9, atol=1e-9, equal_nan=True)


@pytest.mark.programs
@pytest.mark.parametrize(
    "spoil",
    [
        lambda v: 1.0001 * v,
        lambda v: v + 1e-4 * v.detach(),
        lambda v: 1.0001 * v - 0.0001 * v.detach(),
    ],
    ids=["value and gradient", "value", "gradient"],
)
def test_a_wrong_loss_is_caught(spoil: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    setting = {"shape": "rows", "dtype": "float32", "reduction": "mean", "mask": None, "normalizer": None}
    setting |= {"labels": "int64", "ignored": "some"}
    right = F.cross_entropy

    def wrong(**arguments: Any) -> Any:
        found = right(**arguments)
        return found._replace(loss=spoil(found.loss)) if isinstance(found, RowResult) else spoil(found)

    monkeypatch.setattr(F, "cross_entropy", wrong)
    with pytest.raises(AssertionError, match=r"^(value|gradient of input): "):
        holds(*build("cross_entropy", setting))


# ----------------------------------------------------------------------------------------------------------------------
# Functions and Modules


@each_loss
def test_signature_is_the_definitions(row_loss: SoftmaxLoss) -> None:
    found = inspect.signature(getattr(F, row_loss.name)).parameters
    assert {n: ... if x.default is x.empty else x.default for n, x in found.items()} == {
        n: x for n, x in row_loss.arguments if n != "*"
    }
    assert tuple(n for n, x in found.items() if x.kind is x.KEYWORD_ONLY) == row_loss.keywords
    if row_loss.torch:
        theirs = inspect.signature(getattr(torch.nn.functional, row_loss.torch)).parameters
        assert {n: x.default for n, x in theirs.items()} == {n: found[n].default for n in theirs}
        assert list(theirs) == [n for n, x in found.items() if x.kind is not x.KEYWORD_ONLY]


@each_loss
def test_docstring_says_everything(row_loss: SoftmaxLoss) -> None:
    text = str(inspect.getdoc(getattr(F, row_loss.name)))
    assert text == inspect.cleandoc(docstring(row_loss))
    words = " ".join(text.split())
    for part in (row_loss.summary, row_loss.formula, row_loss.convention, row_loss.notes, row_loss.source):
        assert part and all(" ".join(x.split()) in words for x in part.split("; "))


def settings_of_torchs_module(row_loss: SoftmaxLoss) -> list[dict[str, Any]]:
    given: list[dict[str, Any]] = [{}, {"reduction": "sum"}, {"weight": torch.rand(5) + 0.5, "ignore_index": 2}]
    return [*given, {"label_smoothing": 0.25}] if row_loss.name == "cross_entropy" else given


twins = pytest.mark.parametrize(
    "row_loss", [x for x in LOSSES.values() if x.torch], ids=[x.name for x in LOSSES.values() if x.torch]
)


@twins
def test_modules_are_torchs(row_loss: SoftmaxLoss, device: str) -> None:
    ours, theirs = getattr(nn, row_loss.class_name), getattr(torch.nn, row_loss.class_name)
    assert issubclass(ours, theirs) and ours.__init__ is theirs.__init__
    x, y = torch.randn(6, 5).log_softmax(-1), torch.tensor([0, 1, 2, 3, 4, 0])
    for options in settings_of_torchs_module(row_loss):
        made, expected = ours(**options).to(device), theirs(**options)
        assert repr(made) == repr(expected)
        assert made.state_dict().keys() == expected.state_dict().keys()
        made.load_state_dict(expected.state_dict())
        back = pickle.loads(pickle.dumps(made))
        for module in (made, back):
            torch.testing.assert_close(module(x.to(device), y.to(device)).cpu(), expected(x, y))


@each_loss
def test_modules_hand_on_what_they_keep_and_are_given(row_loss: SoftmaxLoss) -> None:
    cls, function = getattr(nn, row_loss.class_name), getattr(F, row_loss.name)
    setting = {"shape": "rows", "dtype": "float32", "reduction": "mean", "mask": "full", "normalizer": None}
    setting |= {"labels": "int64", "ignored": "none"} if row_loss.row else {"target_dtype": "float32"}
    _, given = build(row_loss.name, setting)
    operands, options = [given.pop(n) for n in NAMES[row_loss.name][:2]], {"mask": given["mask"], "class_dim": -1}
    assert same_bits(cls()(*operands, **options), function(*operands, **options))
    kept = {"out_dtype": "float64"} if not row_loss.torch else {}
    kept |= {"reduction": "sum"}
    if row_loss.weights and not row_loss.torch:
        kept |= {row_loss.weights: torch.rand(5), "gamma": 3.0, "return_lse": True}
    found, expected = cls(**kept)(*operands), function(*operands, **kept)
    for a, b in zip(*(x if isinstance(x, tuple) else (x,) for x in (found, expected)), strict=True):
        assert a is b is None or same_bits(a, b)


@each_loss
def test_modules_without_a_twin_show_their_options(row_loss: SoftmaxLoss) -> None:
    if row_loss.torch:
        pytest.skip("torch's repr is tested above")
    module = getattr(nn, row_loss.class_name)(reduction="sum", class_dim=2)
    assert "reduction='sum'" in repr(module) and "class_dim=2" in repr(module)
    signature = inspect.signature(type(module)).parameters
    assert {n: x.default for n, x in signature.items()} == row_loss.kept


def test_class_weights_are_buffers() -> None:
    module = nn.SoftmaxFocalLoss(alpha=torch.ones(5))
    assert list(module.state_dict()) == ["alpha"]
    assert module.to("meta").alpha.device.type == "meta"

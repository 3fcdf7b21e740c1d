"""``patch_torch``: programs run unchanged; calls that the kernels do not serve return torch's result, bit for bit."""

from __future__ import annotations

import io
import pickle
import runpy
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import opinfo
import pytest
import test_row_opinfo
import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from devices import KERNELS
from grids import in_turn
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import cupylosses
from cupylosses import patch, patch_torch, unpatch_torch
from cupylosses.backends.torch import patch as torch_patch
from cupylosses.definition.registry import registry
from cupylosses.engines import base as engine_base
from cupylosses.engines.pointwise.definition import Loss
from cupylosses.engines.softmax.definition import SoftmaxLoss
from cupylosses.testing import samples
from cupylosses.testing.tolerance import same_bits

SCRIPT = Path(__file__).with_name("training_script.py")
#: Pointwise losses that torch has, too.
TWINS = [x for x in registry(Loss).values() if x.torch]
ROW_TWINS = [x for x in registry(SoftmaxLoss).values() if x.torch]
ORIGINALS = {x.torch: getattr(F, x.torch) for x in registry().values() if x.torch and hasattr(F, x.torch)}

pytestmark = [pytest.mark.plain, pytest.mark.filterwarnings("ignore:.*(broadcast|batchmean|size_average|target size)")]


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    yield
    unpatch_torch()
    assert {name: getattr(F, name) for name in ORIGINALS} == ORIGINALS


def draw(*shape: int, seed: int = 0, device: str = KERNELS) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(*(shape or (6, 5)), generator=generator, device="cpu") * 0.8 + 0.1).to(device)


# ----------------------------------------------------------------------------------------------------------------------
# A whole program


@pytest.mark.kernels
def test_an_unmodified_training_script() -> None:
    expected = runpy.run_path(str(SCRIPT))
    with patch_torch() as report:
        found = runpy.run_path(str(SCRIPT))
    assert not report.passed_on, f"\n{report}"
    assert report.served.total() == found["calls"] == 15 * found["STEPS"]
    assert {name for name, _ in report.served} >= {
        "mse_loss",
        "kl_div",
        "gaussian_nll_loss",
        "cross_entropy",
        "nll_loss",
    }
    torch.testing.assert_close(found["history"], expected["history"], rtol=1e-5, atol=0)
    assert found["history"] != expected["history"], "the same bits would be torch's"
    assert "cupylosses" not in SCRIPT.read_text()


# ----------------------------------------------------------------------------------------------------------------------
# The switch


def test_every_loss_of_torch_is_replaced_and_restored() -> None:
    with patch_torch() as report:
        for name, theirs in ORIGINALS.items():
            ours = getattr(F, name)
            assert ours is not theirs and ours.__name__ == name and ours.__wrapped__ is theirs
            assert ours.__doc__ == theirs.__doc__
    assert {name: getattr(F, name) for name in ORIGINALS} == ORIGINALS
    report.restore()
    assert {name: getattr(F, name) for name in ORIGINALS} == ORIGINALS
    assert not report.served and not report.passed_on


def test_several_reports_count_and_the_last_restores() -> None:
    x, y = draw(device="cpu"), draw(seed=1, device="cpu")
    first = patch_torch()
    F.mse_loss(x, y)
    with patch_torch() as second:
        F.mse_loss(x, y)
        first.restore()
        assert F.mse_loss is not ORIGINALS["mse_loss"]
        F.mse_loss(x, y)
    assert F.mse_loss is ORIGINALS["mse_loss"]
    assert (first.passed_on.total(), second.passed_on.total()) == (2, 2)
    patch_torch(), patch_torch()
    unpatch_torch()
    assert F.mse_loss is ORIGINALS["mse_loss"] and patch._reports == ()
    unpatch_torch()


def test_an_error_restores() -> None:
    with pytest.raises(ZeroDivisionError), patch_torch():
        raise ZeroDivisionError
    assert F.mse_loss is ORIGINALS["mse_loss"]


def test_what_was_taken_out_before_is_torchs_and_what_was_kept_is_too_in_the_end() -> None:
    taken, x, y = F.mse_loss, draw(device="cpu"), draw(seed=1, device="cpu")
    with patch_torch() as report:
        kept = F.mse_loss
        taken(x, y)
        assert not report.passed_on
    assert same_bits(kept(x, y), taken(x, y)) and not report.passed_on


def test_what_somebody_else_has_put_there_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        with patch_torch():
            patch.setattr(F, "mse_loss", theirs := lambda *_: None)
        assert F.mse_loss is theirs and F.l1_loss is ORIGINALS["l1_loss"]
        with patch_torch():
            assert F.mse_loss is not theirs
        assert F.mse_loss is theirs
    F.mse_loss = ORIGINALS["mse_loss"]


def test_it_wants_cupy_where_there_is_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise ImportError("needs CuPy")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(cupylosses.interop, "cupy", missing)
    with pytest.raises(ImportError, match="needs CuPy"):
        patch_torch()
    assert F.mse_loss is ORIGINALS["mse_loss"]


def test_the_package_imports_no_torch_for_it(python: Callable[..., str]) -> None:
    program = (
        "import sys, cupylosses; cupylosses.patch_torch, cupylosses.unpatch_torch(); print('torch' in sys.modules)"
    )
    assert python(program) == "False"


# ----------------------------------------------------------------------------------------------------------------------
# Calls that are served


@pytest.mark.kernels
@pytest.mark.parametrize(("twin", "reduction"), in_turn(TWINS, ["mean", "none"]))
def test_served_calls_are_this_librarys(twin: Loss, reduction: str) -> None:
    drawn = samples.operands(
        twin, twin.values(), ("float32",) * len(twin.operands), [(6, 5)] * len(twin.operands), KERNELS
    )
    operands = [(x.name, tensor) for x, tensor in zip(twin.operands, drawn, strict=True) if x.default is None]
    names, drawn = map(list, zip(*operands, strict=True))
    leaves = [x.requires_grad_(n != "target") for x, n in zip(drawn, names, strict=True)]
    inputs = [x for x in leaves if x.requires_grad]
    ours = getattr(cupylosses.functional, twin.name)
    with patch_torch() as report:
        value = getattr(F, twin.torch)(*leaves, reduction=reduction)
        module = getattr(torch.nn, twin.class_name)(reduction=reduction)(*leaves)
    expected = ours(**dict(zip(names, leaves, strict=True)), reduction=reduction)
    assert report.served == {(twin.torch, "float32"): 2} and not report.passed_on
    for x in (value, module):
        assert same_bits(x, expected)
        for a, b in zip(*(torch.autograd.grad(v.sum(), inputs, retain_graph=True) for v in (x, expected)), strict=True):
            assert same_bits(a, b)
    torch.testing.assert_close(value, ORIGINALS[twin.torch](*leaves, reduction=reduction))


@pytest.mark.kernels
@pytest.mark.parametrize("kind", ["indices", "dense"])
@pytest.mark.parametrize("twin", ROW_TWINS, ids=lambda x: x.name)
def test_served_calls_of_rows_are_this_librarys(twin: SoftmaxLoss, kind: str) -> None:
    if kind == "dense" and not twin.dense:
        pytest.skip("takes class indices alone")
    x = draw(6, 5).log_softmax(1).requires_grad_()
    target = labels() if kind == "indices" else draw(6, 5, seed=1).softmax(1).requires_grad_()
    inputs = [t for t in (x, target) if t.requires_grad]
    ours, weight = getattr(cupylosses.functional, twin.name), draw(5, seed=2)
    for reduction in ("mean", "none"):
        with patch_torch() as report:
            value = getattr(F, twin.torch)(x, target, weight, reduction=reduction)
            module = getattr(torch.nn, twin.class_name)(weight, reduction=reduction)(x, target)
        expected = ours(x, target, weight, reduction=reduction)
        assert report.served == {(twin.torch, "float32"): 2} and not report.passed_on
        for found in (value, module):
            assert same_bits(found, expected)
            for a, b in zip(
                *(torch.autograd.grad(v.sum(), inputs, retain_graph=True) for v in (found, expected)), strict=True
            ):
                assert same_bits(a, b)
        torch.testing.assert_close(value, ORIGINALS[twin.torch](x, target, weight, reduction=reduction))


def graded(function: Callable[..., Tensor], sample: opinfo.Sample) -> list[Tensor]:
    """The value of a sample, and the gradients of its weighted sum; zeros for operands that do not affect it."""
    leaves = {n: x.detach().requires_grad_() for n, x in sample.differentiated.items() if x.requires_grad}
    value = sample.call(function, **leaves)
    weights = torch.linspace(0.25, 1.25, value.numel(), device=value.device).reshape(value.shape)
    return [value.detach(), *torch.autograd.grad(value, list(leaves.values()), weights, materialize_grads=True)]


def agree(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """Checks a value, then gradients. The value's tolerance is torch's error where the terms of a sum cancel."""
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5 if i else 5e-5, equal_nan=True)


@pytest.mark.kernels
@pytest.mark.every_loss
@pytest.mark.parametrize("loss", TWINS, ids=lambda x: x.name)
def test_torchs_own_samples(loss: Loss) -> None:
    """Calls from torch's test data return torch's value and gradients, served or not, except for known differences.

    They run the same kernels as test_opinfo.py.
    """
    served = 0
    for sample in opinfo.samples(loss, KERNELS, torch.float32):
        expected = opinfo.model(sample)
        if not sample.has_torchs_tensors or expected is None:
            continue
        with patch_torch() as report:
            found = graded(getattr(F, loss.torch), sample)
        agree(found, graded(expected, sample))
        served += report.served.total()
    assert served


@pytest.mark.kernels
@pytest.mark.parametrize("twin", ROW_TWINS, ids=lambda x: x.name)
def test_torchs_own_samples_of_rows(twin: SoftmaxLoss) -> None:
    """Calls from torch's test data run the same kernels as test_row_opinfo.py."""
    served = 0
    for given in test_row_opinfo.samples(twin, KERNELS, torch.float32):
        with patch_torch() as report:
            value, found = test_row_opinfo.graded(getattr(F, twin.torch), given)
        expected, exact = test_row_opinfo.graded(ORIGINALS[twin.torch], given)
        agree([value, *found], [expected, *exact])
        served += report.served.total()
    assert served


@pytest.mark.kernels
@pytest.mark.parametrize("twin", ROW_TWINS, ids=lambda x: x.name)
def test_torchs_own_modules(twin: SoftmaxLoss) -> None:
    """Modules from torch's test data that were created before the patch return torch's value.

    They run the same kernels as test_row_opinfo.py.
    """
    info = opinfo.databases()[1][twin.class_name]
    options = {"device": KERNELS, "dtype": torch.float32, "requires_grad": False, "training": True}
    served = 0
    for given in test_row_opinfo.few(info.module_inputs_func(info, **options)):
        module = info.module_cls(*given.constructor_input.args, **given.constructor_input.kwargs).to(KERNELS)
        expected = module(*given.forward_input.args)
        with patch_torch() as report:
            torch.testing.assert_close(module(*given.forward_input.args), expected, rtol=1e-5, atol=5e-5)
        served += report.served.total()
    assert served


@pytest.mark.kernels
@pytest.mark.parametrize("twin", ROW_TWINS, ids=lambda x: x.name)
def test_errors_of_torchs_own_modules(twin: SoftmaxLoss) -> None:
    info = opinfo.databases()[1][twin.class_name]
    if info.module_error_inputs_func is None:
        pytest.skip("torch has no error inputs")
    options = {"device": KERNELS, "dtype": torch.float32, "requires_grad": False, "training": True}
    for given in info.module_error_inputs_func(info, **options):
        made, called = given.module_error_input.constructor_input, given.module_error_input.forward_input
        errors_are_torchs(lambda m=made, c=called: info.module_cls(*m.args, **m.kwargs)(*c.args, **c.kwargs))


def labels(*shape: int, classes: int = 5, dtype: torch.dtype = torch.int64) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(classes, shape or (6,), generator=generator).to(KERNELS, dtype)


def ints(*values: int) -> Tensor:
    return torch.tensor(values or [1, -1, 1, -1, 1] * 6, device=KERNELS).reshape(-1, 5)


SERVED: dict[str, Callable[[], Tensor]] = {
    "keywords": lambda: F.mse_loss(target=draw(seed=1), input=draw(), reduction="sum"),
    "legacy": lambda: F.mse_loss(draw(), draw(seed=1), True, False),
    "parameter": lambda: F.l1_loss(torch.nn.Parameter(draw()), draw(seed=1)),
    "strides": lambda: F.mse_loss(draw().T, draw(5, 6)),
    "0-d": lambda: F.mse_loss(draw()[0, 0], draw()[1, 1]),
    "weight": lambda: F.binary_cross_entropy(draw(), draw(seed=1), draw(5, seed=2)),
    "same weight": lambda: F.mse_loss(draw(), draw(seed=1), weight=draw(seed=2)),
    "column weight": lambda: F.binary_cross_entropy_with_logits(draw(), draw(seed=1), draw(6, 1)),
    "pos_weight": lambda: F.binary_cross_entropy_with_logits(draw(), draw(seed=1), pos_weight=draw(5)),
    "module weight": lambda: torch.nn.MultiLabelSoftMarginLoss(draw(5))(draw(), draw(seed=1).round()),
    "integer labels": lambda: F.hinge_embedding_loss(draw(), ints(), margin=2.0),
    "number": lambda: F.gaussian_nll_loss(draw(), draw(seed=1), 0.5),
    "full": lambda: F.poisson_nll_loss(draw(), draw(seed=1) * 9, False, True),
    "batchmean": lambda: F.kl_div(draw().log(), draw(seed=1), reduction="batchmean"),
    "half": lambda: F.huber_loss(draw().bfloat16(), draw(seed=1).bfloat16()),
    "mixed": lambda: F.mse_loss(draw(), draw(seed=1).double()),
    "labels": lambda: F.cross_entropy(draw(), labels(), label_smoothing=0.1, ignore_index=1),
    "labels by keyword": lambda: F.cross_entropy(target=labels(), input=draw(), weight=draw(5), reduction="sum"),
    "legacy labels": lambda: F.nll_loss(draw(), labels(), draw(5), False, -100, True),
    "legacy module of labels": lambda: torch.nn.CrossEntropyLoss(draw(5), reduce=False)(draw(), labels()),
    "labels in bytes": lambda: F.cross_entropy(draw(), labels(dtype=torch.uint8)),
    "one row": lambda: F.cross_entropy(draw(5), labels(5)[0], reduction="none"),
    "one row of probabilities": lambda: F.cross_entropy(draw(5), draw(5, seed=1)),
    "images": lambda: torch.nn.NLLLoss(ignore_index=2)(draw(2, 5, 3, 4), labels(2, 3, 4)),
    "volumes": lambda: F.cross_entropy(draw(2, 5, 1, 3, 4), labels(2, 1, 3, 4), reduction="none"),
    "probabilities": lambda: F.cross_entropy(draw(), draw(seed=1), draw(5), label_smoothing=0.3),
    "probabilities of images": lambda: F.cross_entropy(draw(2, 5, 3), draw(2, 5, 3, seed=1), reduction="none"),
    "narrower probabilities": lambda: F.cross_entropy(draw(), draw(seed=1).bfloat16()),
    "half logits": lambda: F.cross_entropy(draw().bfloat16(), labels(), draw(5).bfloat16()),
    "strided logits": lambda: F.cross_entropy(draw(5, 6).T, labels(12)[::2]),
    "default device": lambda: within(torch.device(KERNELS), lambda: F.mse_loss(draw(), draw(seed=1))),
}  # fmt: skip


def within(context: Any, call: Callable[[], Any]) -> Any:
    with context:
        return call()


@pytest.mark.kernels
@pytest.mark.parametrize("name", SERVED)
def test_served(name: str) -> None:
    expected = SERVED[name]()
    # Repeats the trial calls that find out which arguments torch accepts; the report must not count them.
    torch_patch._taken.cache_clear()
    with patch_torch() as report:
        value = SERVED[name]()
    assert report.served.total() == 1 and not report.passed_on, f"\n{report}"
    assert value.dtype == expected.dtype
    torch.testing.assert_close(value, expected)


@pytest.mark.kernels
def test_autocast() -> None:
    x, y = draw(), draw(seed=1)

    def calls() -> list[Tensor]:
        half = x.bfloat16()
        with torch.autocast(KERNELS, torch.bfloat16):
            return [
                F.mse_loss(half, y),
                F.smooth_l1_loss(half, y.bfloat16()),
                F.nll_loss(half, labels(), draw(5, seed=2)),
                F.cross_entropy(x, labels(), draw(5, seed=2).bfloat16()),
                F.cross_entropy(x, y.bfloat16(), draw(5, seed=2)),
            ]

    expected = calls()
    with patch_torch() as report:
        found = calls()
    assert report.served.total() == 5, f"\n{report}"
    torch.testing.assert_close(found, expected)


@pytest.mark.kernels
def test_autocast_widens_no_doubles() -> None:
    """Class weights of a dtype other than the autocast logits' are left to torch, which refuses or promotes them."""
    wide = draw(5, seed=2).double()
    with torch.autocast(KERNELS, torch.bfloat16):
        expected = F.cross_entropy(draw(), draw(seed=1), wide)
        with patch_torch() as report:
            assert same_bits(F.cross_entropy(draw(), draw(seed=1), wide), expected)
            errors_are_torchs(lambda: F.cross_entropy(draw(), labels(), wide))
    assert {x for *_, x in report.passed_on} == {engine_base.DTYPE} and not report.served


# ----------------------------------------------------------------------------------------------------------------------
# Calls that are passed on to torch


class Subclass(Tensor):
    pass


class Mode(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


class DispatchMode(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


def dual() -> Tensor:
    with forward_ad.dual_level():
        value = F.mse_loss(forward_ad.make_dual(draw(), draw(seed=2)), draw(seed=1))
        return forward_ad.unpack_dual(value).tangent


#: Successful calls by the reason for which they are passed on; results have torch's bits.
PASSED_ON: dict[str, list[Callable[[], Any]]] = {
    torch_patch.OVERRIDDEN: [
        lambda: F.mse_loss(draw().as_subclass(Subclass), draw(seed=1)).as_subclass(Tensor),
        lambda: F.mse_loss(draw(), draw(seed=1).as_subclass(Subclass)).as_subclass(Tensor),
        lambda: within(Mode(), lambda: F.mse_loss(draw(), target=draw(seed=1))),
        lambda: F.cross_entropy(draw(), labels(), draw(5).as_subclass(Subclass)).as_subclass(Tensor),
    ],
    torch_patch.TRANSFORMED: [
        lambda: torch.func.grad(lambda x: F.mse_loss(x, draw(seed=1)))(draw()),
        lambda: torch.func.vmap(F.l1_loss)(draw(), draw(seed=1)),
        lambda: torch.func.grad(F.cross_entropy)(draw(), labels()),
        dual,
    ],
    torch_patch.TRACED: [
        lambda: within(DispatchMode(), lambda: F.mse_loss(draw(), draw(seed=1))),
        lambda: within(DispatchMode(), lambda: F.nll_loss(draw(), labels())),
        lambda: torch.jit.trace(lambda x, y: F.mse_loss(x, y), (draw(), draw(seed=1)), check_trace=False)(
            draw(), draw(seed=1)
        ),
    ],
    engine_base.SHAPES: [
        lambda: F.mse_loss(draw(), draw(5)),
        lambda: F.kl_div(draw().log(), draw(5), reduction="batchmean"),
        lambda: F.gaussian_nll_loss(draw(5, 5), draw(5, 5, seed=1), draw(5)),
        lambda: F.mse_loss(draw()[:0], draw()[:0]),
        lambda: F.cross_entropy(draw()[:0], labels()[:0]),
        lambda: F.cross_entropy(draw(2, 5, 0), labels(2, 0), reduction="none"),
        lambda: F.cross_entropy(draw(5), labels(1)),
    ],
    engine_base.DTYPE: [
        lambda: F.l1_loss(draw() + 1j, draw() * 1j),
        lambda: F.l1_loss(draw() + 0j, draw()),
        lambda: F.cross_entropy(draw(), draw(seed=1), draw(5).double()),
    ],
    engine_base.ARGUMENTS: [
        lambda: F.kl_div(draw()[0, 0].log(), draw()[0, 0], reduction="batchmean"),
        lambda: F.cross_entropy(draw(), labels(), label_smoothing=-1.0),
        lambda: F.cross_entropy(draw(), labels(), label_smoothing=float("nan")),
        lambda: F.cross_entropy(draw(), draw(seed=1), ignore_index=-1),
        lambda: F.cross_entropy(draw(), draw(seed=1), draw(5).requires_grad_()).detach(),
        lambda: F.nll_loss(draw(2, 5, 3, 4), labels(2, 3, 4), draw(1, 5)),
    ],
    torch_patch.LAYOUT: [
        lambda: F.mse_loss(torch._neg_view(draw()), draw(seed=1)),
        lambda: F.cross_entropy(torch._neg_view(draw()), labels()),
    ],
}  # fmt: skip


@pytest.mark.kernels
@pytest.mark.parametrize(("reason", "i"), [(x, i) for x, calls in PASSED_ON.items() for i in range(len(calls))])
def test_passed_on(reason: str, i: int) -> None:
    call = PASSED_ON[reason][i]
    expected = call()
    with patch_torch() as report:
        found = call()
    assert not report.served and {x for *_, x in report.passed_on} == {reason}, f"\n{report}"
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.kernels
def test_what_torch_refuses_under_autocast_it_is_asked_for() -> None:
    with torch.autocast(KERNELS, torch.bfloat16), patch_torch() as report:
        try:
            F.binary_cross_entropy(draw(), draw(seed=1))
        except RuntimeError as error:
            assert "unsafe to autocast" in str(error)
    assert report.passed_on == {("binary_cross_entropy", "float32", torch_patch.AUTOCAST): 1}


@pytest.mark.gpu
def test_several_devices_are_torchs_matter() -> None:
    with patch_torch() as report, pytest.raises(RuntimeError, match="same device"):
        F.mse_loss(draw(), draw(seed=1, device="cpu"))
    assert report.passed_on == {("mse_loss", "float32", torch_patch.CPU): 1}


def test_the_cpu_is_torchs() -> None:
    x, y = draw(device="cpu").requires_grad_(), draw(seed=1, device="cpu")
    with patch_torch() as report:
        found = F.huber_loss(x, y, delta=0.3), F.cross_entropy(x, y)
    assert same_bits(found[0], F.huber_loss(x, y, delta=0.3)) and same_bits(found[1], F.cross_entropy(x, y))
    assert report.passed_on == {(name, "float32", torch_patch.CPU): 1 for name in ("huber_loss", "cross_entropy")}
    assert not report.served


class Foreign:
    """An array of another library."""

    def __init__(self, array: Tensor) -> None:
        self.__dlpack__, self.__dlpack_device__ = array.__dlpack__, array.__dlpack_device__


#: Calls that torch refuses. The error must be torch's, even where this library would accept the call.
WRONG: list[Callable[[], Any]] = [
    lambda: F.mse_loss(),
    lambda: F.mse_loss(draw()),
    lambda: F.mse_loss(draw(), 3.0),
    lambda: F.mse_loss(draw().cpu().numpy(), draw().cpu().numpy()),
    lambda: F.mse_loss(draw(), draw(), reduction="avg"),
    lambda: F.mse_loss(draw(), draw(), reduction="weighted_mean"),
    lambda: F.mse_loss(draw(), draw(), mask=draw() > 0.5),
    lambda: F.mse_loss(draw(), draw(), None, None, "mean", None, 1),
    lambda: F.mse_loss(draw(), draw(4, 3)),
    lambda: F.mse_loss(draw(), draw(), weight=2.0),
    lambda: F.mse_loss(draw(), draw(), weight=draw(5)),
    lambda: F.mse_loss(ints(), ints()),
    lambda: F.smooth_l1_loss(draw(), draw(), beta=-1.0),
    lambda: F.huber_loss(draw(), draw(), delta=0.0),
    lambda: F.binary_cross_entropy(draw(), draw(5)),
    lambda: F.binary_cross_entropy(draw(), ints()),
    lambda: F.binary_cross_entropy(draw(), draw().double()),
    lambda: F.binary_cross_entropy_with_logits(draw(), draw(), pos_weight=2.0),
    lambda: F.gaussian_nll_loss(draw(), draw(), draw(), reduction="sums"),
    lambda: F.margin_ranking_loss(draw(), draw(), draw(5)),
    lambda: torch.nn.MSELoss(reduction="batchmean")(draw(), draw()),
    lambda: F.cross_entropy(draw()),
    lambda: F.cross_entropy(draw(), 1),
    lambda: F.cross_entropy(draw(), labels().cpu().numpy()),
    lambda: F.cross_entropy(draw(), Foreign(labels())),
    lambda: F.cross_entropy(draw(), labels(5)),
    lambda: F.cross_entropy(draw(), labels(6, 1)),
    lambda: F.cross_entropy(draw(), labels(6, 5)),
    lambda: F.cross_entropy(draw(), draw(6)),
    lambda: F.cross_entropy(draw()[0, 0], labels()[0]),
    lambda: F.cross_entropy(draw(5), labels(5)),
    lambda: F.cross_entropy(draw(2, 5, 3), labels(2, 4)),
    lambda: F.cross_entropy(draw(), labels().float()),
    lambda: F.cross_entropy(draw(), labels(dtype=torch.int32)),
    lambda: F.cross_entropy(draw(), labels(classes=2).bool(), label_smoothing=0.1),
    lambda: F.cross_entropy(draw(2, 5, 3), labels(2, 3, dtype=torch.uint8)),
    lambda: F.cross_entropy(draw().long(), labels()),
    lambda: F.cross_entropy(draw().half(), labels(), draw(5)),
    lambda: F.cross_entropy(draw(), labels(), draw(4)),
    lambda: F.cross_entropy(draw(), labels(), draw(1, 5)),
    lambda: F.cross_entropy(draw(), draw(), draw(6, 5)),
    lambda: F.cross_entropy(draw(), labels(), draw(5).requires_grad_()),
    lambda: F.cross_entropy(draw(), labels(), label_smoothing=1.5),
    lambda: F.cross_entropy(draw(), labels(), label_smoothing="0.1"),
    lambda: F.cross_entropy(draw(), draw(), ignore_index=1),
    lambda: F.cross_entropy(draw(), labels(), ignore_index=0.5),
    lambda: F.cross_entropy(draw(), labels(), ignore_index=2**63),
    lambda: F.cross_entropy(draw(), labels(), reduction="batchmean"),
    lambda: F.cross_entropy(draw(), draw(), reduction="avg"),
    lambda: F.cross_entropy(draw(), labels(), mask=labels() > 1),
    lambda: F.cross_entropy(draw(), labels(), gamma=2.0),
    lambda: F.cross_entropy(draw(), labels(), class_dim=1),
    lambda: F.nll_loss(draw(), draw()),
    lambda: F.nll_loss(draw(), labels(), None, None, -100, None, "mean", 0.1),
    lambda: F.nll_loss(draw(), labels(), reduction="batchmean"),
    lambda: torch.nn.CrossEntropyLoss(reduction="batchmean")(draw(), labels()),
]


def errors_are_torchs(call: Callable[[], Any]) -> None:
    with pytest.raises(Exception) as expected:
        call()
    with patch_torch() as report, pytest.raises(Exception) as found:
        call()
    assert (found.type, str(found.value)) == (expected.type, str(expected.value))
    assert not report.served and report.passed_on.total() == 1


@pytest.mark.kernels
@pytest.mark.parametrize("i", range(len(WRONG)))
def test_errors_are_torchs(i: int) -> None:
    errors_are_torchs(WRONG[i])


@pytest.mark.kernels
def test_labels_out_of_range_are_reported_by_a_later_call() -> None:
    """In torch, such a label ends the CUDA context. On the host, the call itself reports it."""
    call: Callable[[], Tensor] = lambda: F.cross_entropy(draw(), labels(classes=2) + 4)  # noqa: E731
    with patch_torch() as report, pytest.raises(IndexError, match=r"`target\[\d\]` must be a class index, 0 to 4"):
        assert call().isnan()
        torch.cuda.synchronize()
        F.cross_entropy(draw(), labels())
    assert report.served.total() == 1 + (KERNELS == "cuda") and not report.passed_on


def test_handlers_are_asked_for_torchs_own_function() -> None:
    """Handlers look up torch's function by identity."""
    seen: list[Any] = []

    class Handled(Tensor):
        @classmethod
        def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function in ORIGINALS.values():
                seen.append(function)
            return super().__torch_function__(function, types, args, kwargs or {})

    x = draw(device="cpu").as_subclass(Handled)
    with patch_torch():
        F.mse_loss(x, x)
        F.l1_loss(input=x, target=x)
        F.cross_entropy(x, target=x)
    assert seen == [ORIGINALS[name] for name in ("mse_loss", "l1_loss", "cross_entropy")]


@pytest.mark.kernels
@pytest.mark.parametrize(("backend", "traced"), in_turn(["aot_eager", "eager"], ["before", "while"]))
def test_torch_compile(backend: str, traced: str) -> None:
    """Compiles to one graph. Code that was compiled before the patch, or runs after it, stays correct, too."""
    torch.compiler.reset()
    x, y = draw().requires_grad_(), draw(seed=1)
    module = torch.nn.HuberLoss()
    function: Callable[..., Tensor] = lambda a, b: F.mse_loss(a, b) * 2 + module(a, b) + F.cross_entropy(a, b)  # noqa: E731
    step = torch.compile(function, backend=backend, fullgraph=True)
    expected = function(x, y)
    (gradient,) = torch.autograd.grad(expected, x)
    values = [step(x, y)] if traced == "before" else []
    with patch_torch():
        values += [step(x, y), step(x, y)]
    values.append(step(x, y))
    for value in values:
        torch.testing.assert_close(value, expected)
        torch.testing.assert_close(torch.autograd.grad(value, x)[0], gradient)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_scripting_compiles_torchs_function() -> None:
    x, y = draw(device="cpu"), draw(seed=1, device="cpu")
    with patch_torch() as report:
        scripted = torch.jit.script(torch.nn.SmoothL1Loss(beta=0.5))
        function = torch.jit.script(F.mse_loss)
        assert same_bits(scripted(x, y), ORIGINALS["smooth_l1_loss"](x, y, beta=0.5))
        assert same_bits(function(x, y), ORIGINALS["mse_loss"](x, y))
        rows = torch.jit.script(torch.nn.CrossEntropyLoss(label_smoothing=0.1))
        assert same_bits(rows(x, y), ORIGINALS["cross_entropy"](x, y, label_smoothing=0.1))
    assert not report.served and not report.passed_on


# ----------------------------------------------------------------------------------------------------------------------
# The report


def test_threads_are_all_counted() -> None:
    x, y = draw(device="cpu"), draw(seed=1, device="cpu")
    with patch_torch() as report:
        threads = [threading.Thread(target=lambda: [F.mse_loss(x, y) for _ in range(200)]) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert report.passed_on == {("mse_loss", "float32", torch_patch.CPU): 800}


def test_patching_while_others_call() -> None:
    x, y = draw(device="cpu"), draw(seed=1, device="cpu")
    expected, done, wrong = F.mse_loss(x, y), threading.Event(), []

    def work() -> None:
        while not done.is_set():
            if not same_bits(F.mse_loss(x, y), expected):
                wrong.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    for _ in range(50):
        with patch_torch(), patch_torch():
            pass
    done.set()
    thread.join()
    assert not wrong


def test_the_report_is_printed_and_pickled() -> None:
    report = patch.Report()
    for reason in (None, None, torch_patch.CPU):
        report.add("mse_loss", torch.bfloat16, reason)
    assert report.served == Counter({("mse_loss", "bfloat16"): 2})
    assert [line.split() for line in str(report).splitlines()] == [
        ["function", "dtype", "by", "calls"],
        ["mse_loss", "bfloat16", "served", "2"],
        ["mse_loss", "bfloat16", "torch:", *torch_patch.CPU.split(), "1"],
    ]
    console = pytest.importorskip("rich.console").Console(width=120, file=io.StringIO())
    console.print(report)
    assert "bfloat16" in console.file.getvalue() and torch_patch.CPU in console.file.getvalue()
    copy = pickle.loads(pickle.dumps(report))
    assert (copy.served, copy.passed_on, str(copy)) == (report.served, report.passed_on, str(report))
    copy.add("mse_loss", torch.bfloat16, None)
    assert copy.served.total() == 3

"""``warmup`` prepares exactly the kernels that calls then load, each once; without a GPU, it fills the cache."""

from __future__ import annotations

import os
import pickle
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count, product
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from devices import KERNELS
from grids import in_turn
from tools.nvrtc import find_library

import cupylosses
import cupylosses.functional as F
from cupylosses import nn, options, warmup
from cupylosses.definition.registry import registry
from cupylosses.engines.base import Machine, contiguous
from cupylosses.engines.pointwise.codegen import PointwiseKernel
from cupylosses.engines.pointwise.definition import Loss
from cupylosses.engines.record import placeholder
from cupylosses.engines.softmax import labels
from cupylosses.engines.softmax.definition import SoftmaxLoss
from cupylosses.jit import compiler, gpu, processors
from cupylosses.jit.gpu import SHARED_BYTES, Chip
from cupylosses.jit.kernel import Kernel
from cupylosses.testing import host, samples
from cupylosses.testing.check import by_position
from cupylosses.testing.host.execution import HostDevice
from cupylosses.testing.host.launch import Launcher
from cupylosses.warmup import Warmup, _dtype, _functions, in_threads

pytestmark = pytest.mark.filterwarnings("ignore:.* is broadcast against:UserWarning")

SHAPE = (33, 64)


@contextmanager
def loading(monkeypatch: pytest.MonkeyPatch, chip: Chip | None = None) -> Iterator[list[Any]]:
    """Records the kernels that plans and warm-ups load on the host, for a given chip, without running them."""
    loaded: list[Any] = []

    class Loading(Launcher):
        @classmethod
        def load(cls, variant: Kernel, shared: int = 0) -> tuple[Callable[..., Any], Any]:
            loaded.append(variant)
            return (lambda *_: None), None

    with monkeypatch.context() as patch, host.execution() as device:
        patch.setattr(HostDevice, "launcher", Loading)
        device.chip = chip or device.chip
        yield loaded


def train(function: Callable[..., Any], operands: list[torch.Tensor], wanted: list[bool], **options: Any) -> None:
    """Runs forward alone, and forward with backward for an upstream gradient per element and for a common one."""
    with torch.no_grad():
        function(*operands, **options)
    leaves = [x.detach().requires_grad_(w) for x, w in zip(operands, wanted, strict=True)]
    inputs = [x for x in leaves if x.requires_grad]
    for upstream, one_pass in product((torch.ones_like, lambda x: x.new_ones(()).expand_as(x)), (True, False)):
        with cupylosses.set_one_pass(one_pass):
            value = function(*leaves, **options)
            torch.autograd.grad(value, inputs, upstream(value.detach()))


# ----------------------------------------------------------------------------------------------------------------------
# Selection of kernels


@pytest.mark.representatives
@pytest.mark.parametrize(("dtype", "reduction"), in_turn(["float32", "bfloat16"], ["mean", "none"]))
def test_what_is_warmed_up_is_what_calls_load(
    loss: Loss, dtype: str, reduction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    operands = [x for x in loss.operands if x.default is None]
    shapes = [SHAPE, *[(SHAPE[0], 1) if x.per_row else SHAPE[1:] for x in operands[1:]]]
    drawn = samples.operands(loss, loss.values(), (dtype,) * len(loss.operands), [SHAPE] * len(loss.operands))
    arrays = [x.expand(SHAPE).flatten()[: prod(s)].reshape(s) for x, s in zip(drawn, shapes, strict=False)]
    with loading(monkeypatch) as loaded:
        done = warmup(loss.name, getattr(torch, dtype), tuple(shapes), reduction=reduction)
        expected = set(loaded)
        assert done.kernels == len(expected) == len(loaded) and done.device == "cpu"
        loaded.clear()
        names = [x.name for x in operands]
        wanted = [x != "target" for x in names]
        function = getattr(F, loss.name)
        train(lambda *x, **o: function(**dict(zip(names, x, strict=True)), **o), arrays, wanted, reduction=reduction)
    assert set(loaded) == expected


OPTIONS: list[dict[str, Any]] = [
    {"weight": True},
    {"weight": SHAPE[1:], "reduction": "weighted_mean"},
    {"weight": 2.0, "mask": True},
    {"mask": True, "dim": 0},
    {"mask": True, "weight": True, "dim": 1, "reduction": "weighted_mean"},
    {"weight": SHAPE[1:], "reduction": "weighted_mean", "argnums": ("input", "weight")},
    {"normalizer": True},
    {"normalizer": True, "dim": -1},
    {"normalizer": 7, "out_dtype": "float64"},
    {"dim": 0, "reduction": "sum"},
    {"mask": (33, 1), "reduction": "none"},
    {"backward": False},
    {"argnums": (0, 1)},
    {"autocast": True, "dtypes": "bfloat16"},
    {"dtypes": ("float32", "int64")},
    {"dtypes": (numpy.float64, torch.float16)},
]


@pytest.mark.parametrize("options", OPTIONS, ids=repr)
def test_options(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = {
        "weight": lambda x: torch.rand(SHAPE if x is True else x),
        "mask": lambda x: torch.rand(SHAPE if x is True else x) > 0.5,
        "normalizer": lambda x: torch.tensor(7.0),
    }
    options = dict(options)
    dtypes = options.pop("dtypes", "float32")
    with loading(monkeypatch) as loaded:
        warmup(F.mse_loss, dtypes, SHAPE, **options)
        expected = set(loaded)
        loaded.clear()
        names = options.pop("argnums", ("input",))
        wanted = [("input", "target")[x] if isinstance(x, int) else x for x in names]
        autocast, backward = options.pop("autocast", False), options.pop("backward", True)
        given = {n: arrays[n](x) if (n in arrays and not isinstance(x, (int, float))) or x is True else x
                 for n, x in options.items()}  # fmt: skip
        first, second = dtypes if isinstance(dtypes, tuple) else (dtypes, dtypes)
        given |= {
            "input": torch.rand(SHAPE).to(getattr(torch, _dtype(first))),
            "target": torch.rand(SHAPE).to(getattr(torch, _dtype(second))),
        }
        tensors = [n for n, x in given.items() if isinstance(x, torch.Tensor)]
        plain = {n: x for n, x in given.items() if n not in tensors}

        def call(*operands: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                return F.mse_loss(**dict(zip(tensors, operands, strict=True)), **plain)

        if backward:
            train(call, [given[n] for n in tensors], [n in wanted for n in tensors])
        else:
            call(*(given[n] for n in tensors))
    assert set(loaded) == expected


#: Row losses with each kind of target that they accept. (A parameter named `loss` would be an element-wise loss.)
KINDS = [(x, kind) for x in registry(SoftmaxLoss).values() for kind in x.targets]
each_kind = pytest.mark.parametrize(("row_loss", "kind"), KINDS, ids=lambda x: getattr(x, "name", x))

#: Shapes of logits, and their class dimension, with different row layouts on the host's small chip.
ROW_SHAPES = {
    "subwarp": ((33, 64), -1), "block": ((5, 1031), -1), "cluster": ((3, 4501), -1), "two_pass": ((2, 32783), -1),
    "thread_per_row": ((3, 5, 4, 8), 1), "copied": ((2, 399, 5, 3), 1),
}  # fmt: skip


def rows_of(shape: tuple[int, ...], dim: int) -> tuple[int, ...]:
    return tuple(n for d, n in enumerate(shape) if d != dim % len(shape))


def row_operands(kind: str, shape: tuple[int, ...], dim: int, *dtypes: str) -> list[torch.Tensor]:
    """Returns logits, and a target of a kind, of these dtypes."""
    first, second = (getattr(torch, x) for x in (*dtypes, "int64")[:2])
    x = torch.rand(shape).to(first)
    return [x, torch.zeros(rows_of(shape, dim), dtype=second) if kind == "indices" else torch.rand(shape).to(second)]


def train_rows(call: Callable[..., torch.Tensor], operands: list[torch.Tensor], wanted: tuple[bool, bool]) -> None:
    """Runs forward without gradients, then forward and backward; for a value per row, also backward of the sum."""
    with torch.no_grad():
        value = call(*operands)
    leaves = [x.detach().clone().requires_grad_(w) for x, w in zip(operands, wanted, strict=True)]
    differentiated = [x for x in leaves if x.requires_grad]
    torch.autograd.grad(call(*leaves), differentiated, torch.ones_like(value))
    if value.dim():
        torch.autograd.grad(call(*leaves).sum(), differentiated)


@each_kind
@pytest.mark.parametrize(("layout", "reduction"), in_turn(list(ROW_SHAPES), ["mean", "none"]))
def test_what_is_warmed_up_is_what_calls_of_rows_load(
    row_loss: SoftmaxLoss, kind: str, layout: str, reduction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape, dim = ROW_SHAPES[layout]
    dtypes = ("bfloat16", "int64" if kind == "indices" else "bfloat16")
    given = {"reduction": reduction, "class_dim": dim}
    with loading(monkeypatch) as loaded:
        done = warmup(row_loss.name, dtypes, shape, **given)
        expected = set(loaded)
        assert done.kernels == len(expected) == len(loaded) and done.by_loss == {row_loss.name: len(loaded)}
        if kind == "indices" and row_loss.softmax:
            kinds = {
                (x.layout, x.cluster > 1) for x in loaded if x.kind in ("value", "value_and_gradient", "unreduced")
            }
            kernel = {"cluster": "block", "copied": "subwarp"}.get(layout, layout)
            assert kinds == {(kernel, layout in ("cluster", "two_pass"))}
        loaded.clear()
        function = getattr(F, row_loss.name)
        train_rows(lambda *x: function(*x, **given), row_operands(kind, shape, dim, *dtypes), (True, False))
    assert set(loaded) == expected


#: Options of calls; the dtypes of the operands are float32 and int64 by default.
ROW_OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("cross_entropy", {"weight": True}),
    ("cross_entropy", {"weight": True, "label_smoothing": 0.1, "reduction": "sum"}),
    ("cross_entropy", {"mask": True, "softcap": 30.0, "return_lse": True, "return_accuracy": True}),
    ("cross_entropy", {"mask": (33,), "normalizer": True, "z_loss": 1e-3}),
    ("cross_entropy", {"normalizer": 7.0, "out_dtype": "float64"}),
    ("cross_entropy", {"normalizer": True, "reduction": "batchmean"}),
    ("cross_entropy", {"class_dim": 0}),
    ("cross_entropy", {"inplace_backward": True}),
    ("cross_entropy", {"one_pass": False}),
    ("cross_entropy", {"backward": False}),
    ("cross_entropy", {"dtypes": ("float16", "uint8")}),
    ("cross_entropy", {"dtypes": ("float32", "int32"), "reduction": "none", "weight": True}),
    ("cross_entropy", {"dtypes": ("bfloat16", "float32"), "weight": True, "mask": True}),
    ("cross_entropy", {"dtypes": ("float32", "float32"), "argnums": (0, 1), "one_pass": False}),
    ("cross_entropy", {"dtypes": ("float32", "float32"), "argnums": "target", "reduction": "none"}),
    ("cross_entropy", {"dtypes": ("float32", "float32"), "inplace_backward": True}),
    ("cross_entropy", {"dtypes": "bfloat16", "autocast": True, "weight": True}),
    ("nll_loss", {"weight": True, "reduction": "none"}),
    ("softmax_focal_loss", {"alpha": True}),
    ("kl_div_with_logits", {"dtypes": "float16", "log_target": True, "temperature": 2.0, "mask": True}),
    ("distillation_loss", {"dtypes": "float64", "argnums": ("student_logits", "teacher_logits"), "beta": 0.5}),
    ("distillation_loss", {"dtypes": ("bfloat16", "float32"), "reduction": "mean", "mask": True}),
]


@pytest.mark.parametrize(("name", "given"), ROW_OPTIONS, ids=repr)
def test_options_of_rows(name: str, given: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    row_loss, given = registry(SoftmaxLoss)[name], dict(given)
    dtypes, one_pass = given.pop("dtypes", "float32"), given.pop("one_pass", True)
    dim = given.get("class_dim", -1)
    first, *others = dtypes if isinstance(dtypes, tuple) else (dtypes,)
    second = others[0] if others else "int64" if row_loss.row else first
    kind = "indices" if "int" in second else "dense"
    with loading(monkeypatch) as loaded, options.set_one_pass(one_pass):
        warmup(name, dtypes, SHAPE, **given)
        expected = set(loaded)
        loaded.clear()
        arrays = {
            str(row_loss.weights): torch.rand(SHAPE[dim]).to(getattr(torch, first)),
            "mask": torch.rand(rows_of(SHAPE, dim)) > 0.5,
            "normalizer": torch.tensor(7.0),
        }
        autocast, backward = given.pop("autocast", False), given.pop("backward", True)
        chosen = given.pop("argnums", 0)
        names = [x.name for x in row_loss.operands]
        places = [
            names.index(x) if isinstance(x, str) else x for x in (chosen if isinstance(chosen, tuple) else [chosen])
        ]
        called = {n: arrays[n] if n in arrays and isinstance(x, (bool, tuple)) else x for n, x in given.items()}

        def call(*operands: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                found = getattr(F, name)(*operands, **called)
            return getattr(found, "loss", found)

        operands = row_operands(kind, SHAPE, dim, first, second)
        if backward:
            train_rows(call, operands, (0 in places, 1 in places))
        else:
            call(*operands)
    assert set(loaded) == expected


def test_modules_of_rows_bring_their_options(monkeypatch: pytest.MonkeyPatch) -> None:
    module = nn.CrossEntropyLoss(weight=torch.rand(64), label_smoothing=0.1, reduction="none")
    with loading(monkeypatch) as loaded:
        warmup(module, "float32", SHAPE, backward=False)
        (found,) = loaded
    assert (found.kind, found.weight, found.smoothed) == ("unreduced", "float32", True)


def test_labels_and_probabilities_in_one_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    with loading(monkeypatch) as loaded:
        dtypes = ["float32", ("float32", "float32")]
        warmup(["cross_entropy", "mse_loss"], dtypes, SHAPE, backward=False)
    assert {type(x).__name__ for x in loaded} == {"PointwiseKernel", "SoftmaxKernel"}


def test_nothing_is_planned_for_no_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    with loading(monkeypatch) as loaded:
        assert warmup(["cross_entropy", "kl_div_with_logits"], "float32", (0, 3)).kernels == 0 == len(loaded)


def test_rows_are_numbered_once_whoever_plans_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A label outside the classes is reported for the loss and the shape of its own call."""

    class Slow(list[Any]):
        def __len__(self) -> int:
            found = super().__len__()
            time.sleep(1e-3)  # Lets other threads run meanwhile.
            return found

    monkeypatch.setattr(labels, "sites", Slow())
    monkeypatch.setattr(labels, "_numbers", {})
    losses, found = [x for x in registry(SoftmaxLoss).values() if x.row], []

    def plan(row_loss: SoftmaxLoss) -> None:
        for n in range(5):
            tensors = contiguous("float32", (n, 3)), contiguous("int64", (n,))
            call = getattr(cupylosses.functional, row_loss.name).prepare(
                *[placeholder(x.dtype, x.shape) for x in tensors]
            )
            found.append((row_loss, row_loss.engine.plan(call, tensors, "float32", Machine(1, Chip()))))

    threads = [threading.Thread(target=plan, args=[x]) for x in (*losses, *losses)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sites = list(labels.sites)
    places: list[Any] = [x.args[:3] for x in sites]
    assert all(places[x.site] == (row_loss, x.rows_shape, 0) for row_loss, x in found)
    assert len(places) == len(set(places)) == 5 * len(losses)


def test_losses_are_named_in_many_ways() -> None:
    own = cupylosses.define_loss("own_loss", "square(input - target)")
    given = ["mse_loss", F.l1_loss, own, nn.KLDivLoss, nn.HuberLoss(reduction="none", delta=2.0)]
    found = [list(_functions(x)) for x in (*given, given, None)]
    functions = [F.mse_loss, F.l1_loss, own, F.kl_div, F.huber_loss]
    assert [x[0][0] for x in found[:5]] == functions and [f for f, _ in found[5]] == functions
    assert [f.loss for f, _ in found[6]] == list(registry().values())
    assert [x for _, x in found[5]][:4] == [{}] * 4
    assert found[4][0][1] == {"reduction": "none", "delta": 2.0}


def test_modules_bring_their_options(monkeypatch: pytest.MonkeyPatch) -> None:
    module = nn.HingeLoss(reduction="none", weight=torch.rand(64))
    with loading(monkeypatch) as loaded:
        warmup(module, "float32", SHAPE, backward=False)
        (found,) = loaded
        loaded.clear()
        warmup("hinge_loss", "float32", SHAPE, backward=False, reduction="none", weight=(64,))
        assert loaded == [found] and found.kind == "elements"
        loaded.clear()
        warmup(module, "float32", SHAPE, backward=False, reduction=["sum", "none"])
        assert found in loaded and len(loaded) == 2


def test_several_of_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    with loading(monkeypatch) as loaded:
        for losses, dtypes, shapes in (
            (["mse_loss", "l1_loss"], "float32", SHAPE),
            ("mse_loss", ["float32", "float64"], SHAPE),
            ("mse_loss", "float32", [SHAPE, (SHAPE, SHAPE[1:])]),
        ):
            loaded.clear()
            done = warmup(losses, dtypes, shapes)
            assert done.kernels == len(loaded) == len(set(loaded)) > 3
            assert sum(done.by_loss.values()) == done.kernels and set(done.by_loss) <= {"mse_loss", "l1_loss"}
        loaded.clear()
        assert warmup("mse_loss", "float32", (0, 3)).kernels == 0 == len(loaded)


def test_options_go_to_the_losses_that_take_them(monkeypatch: pytest.MonkeyPatch) -> None:
    with loading(monkeypatch) as loaded:
        warmup(["kl_div", "mse_loss"], "float32", SHAPE, log_target=True, backward=False)
        assert [x.flags for x in loaded if x.loss.name == "kl_div"] == [F.kl_div.loss.choose(
            F.kl_div.loss.values({"log_target": True})
        )]  # fmt: skip


def test_result_is_printed_and_pickled() -> None:
    done = Warmup(3, {"mse_loss": 1, "kl_div": 2}, 1.25, "cuda:0")
    assert str(done) == "3 kernels ready on cuda:0 after 1.2 s: 1 of mse_loss, 2 of kl_div"
    assert pickle.loads(pickle.dumps(done)) == done


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        (("mse", "float32", SHAPE), {}, TypeError, "warmup: `losses` must be .* got 'mse'; there are .*mse_loss"),
        ((torch.nn.MSELoss(), "float32", SHAPE), {}, TypeError, r"got MSELoss\(\)"),
        (("mse_loss", "float8", SHAPE), {}, TypeError, "warmup: `dtypes` must be among .*bfloat16.*, got 'float8'"),
        (("mse_loss", "int64", SHAPE), {}, TypeError, "mse_loss: at least one operand must be floating"),
        (("kl_div", ("float32", "int64"), SHAPE), {}, TypeError, "kl_div: `target` must have one of the dtypes"),
        (("mse_loss", "float32", ((3, 4), (5,))), {}, ValueError, "mse_loss: the shapes do not broadcast"),
        (("mse_loss", "float32", [3, 4]), {}, TypeError, "a shape is a tuple, and a list has several of them; got 3"),
        ((["mse_loss", "kl_div"], "float32", SHAPE), {"beta": 1.0}, TypeError, "`beta` is .* none of mse_loss, kl_d"),
        (("mse_loss", "float32", SHAPE), {"reduction": "avg"}, ValueError, "`reduction` must be one of"),
        (("huber_loss", "float32", SHAPE), {"delta": -1.0}, ValueError, "`delta` must be a number > 0"),
        (("mse_loss", "float32", SHAPE), {"argnums": 2}, ValueError, "within 0 to 1, got 2"),
        (("mse_loss", "float32", SHAPE), {"argnums": "weight"}, TypeError, "`weight` is no array in this call"),
        (("cross_entropy", "int64", SHAPE), {}, TypeError, "cross_entropy: `input` must have one of the dtypes"),
        (("cross_entropy", "float32", ()), {}, ValueError, "cross_entropy: `input` needs a class dimension"),
        (("cross_entropy", "float32", (SHAPE, SHAPE)), {}, ValueError, "`target` must have the shape of `input` w"),
        (("cross_entropy", "float32", SHAPE), {"weight": (3,)}, ValueError, "must have one number per class"),
        (("cross_entropy", "float32", SHAPE), {"dim": 0}, TypeError, "`dim` is an argument of none of cross_entropy"),
        (("cross_entropy", "float32", SHAPE), {"argnums": 1}, TypeError, "`target` of int64 has no gradient"),
        (("nll_loss", "float32", SHAPE), {"weight": True, "argnums": "weight"}, TypeError, "`weight` has no gradient"),
        (("mse_loss", "float32", SHAPE), {"device": "meta"}, ValueError, "`device` must be a GPU, such as 'cuda:0'"),
        (("mse_loss", "float32", SHAPE), {"architecture": "90"}, ValueError, "one such as 'sm_90', got '90'"),
        (("mse_loss", "float32", SHAPE), {"architecture": "sm_90", "device": 0}, ValueError, "either `device` or"),
    ],
)  # fmt: skip
def test_errors(arguments: Any, options: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        warmup(*arguments, **options)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets the number of GPUs of the machine."""
    return lambda number: monkeypatch.setattr(sys.modules["cupylosses.warmup"], "_gpus", lambda: number)


def test_where_there_is_no_gpu_and_where_there_is_one(gpus: Callable[[int], None]) -> None:
    pytest.importorskip("cupy")
    gpus(0)
    with pytest.raises(RuntimeError, match=r'there is no GPU.*architecture="sm_90"'):
        warmup("mse_loss", "float32", SHAPE)
    gpus(2)
    with pytest.raises(ValueError, match=r"no device 'cuda:2', but 2 of them"):
        warmup("mse_loss", "float32", SHAPE, device="cuda:2")
    with pytest.raises(RuntimeError, match='hide it with CUDA_VISIBLE_DEVICES=""'):
        warmup("mse_loss", "float32", SHAPE, architecture="sm_90")


# ----------------------------------------------------------------------------------------------------------------------
# Compilation


@pytest.mark.kernels
@pytest.mark.representatives
@pytest.mark.in_turn
def test_calls_after_a_warm_up_load_nothing(loss: Loss) -> None:
    count = len(loss.operands)
    operands = samples.operands(loss, loss.values(), ("float32",) * count, [SHAPE] * count, KERNELS)
    given = {x.name: True for x in loss.operands if x.default is not None}
    done = warmup(loss.name, "float32", SHAPE, argnums=range(count), device=KERNELS, **given)
    loaded = dict(compiler._kernels), host.counters.kernels
    train(by_position(loss), operands, [True] * count)
    assert (compiler._kernels, host.counters.kernels) == loaded and done.kernels >= 2


@pytest.mark.kernels
@pytest.mark.parametrize(
    ("row_loss", "kind", "reduction"), [(*x, reduction) for x, reduction in in_turn(KINDS, ["mean", "none"])]
)
def test_calls_of_rows_after_a_warm_up_load_nothing(row_loss: SoftmaxLoss, kind: str, reduction: str) -> None:
    dtypes = ("float32", "int64" if kind == "indices" else "float32")
    given: dict[str, Any] = {"class_dim": -1, "reduction": reduction}
    if row_loss.weights:
        given[row_loss.weights] = True
    done = warmup(row_loss.name, dtypes, SHAPE, device=KERNELS, **given)
    loaded = dict(compiler._kernels), host.counters.kernels
    if row_loss.weights:
        given[row_loss.weights] = torch.rand(SHAPE[-1]).to(KERNELS)
    function = getattr(F, row_loss.name)
    operands = [x.to(KERNELS) for x in row_operands(kind, SHAPE, -1, *dtypes)]
    train_rows(lambda *x: function(*x, **given), operands, (True, False))
    assert (compiler._kernels, host.counters.kernels) == loaded and done.kernels >= 2


@pytest.mark.gpu
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_graph_capture_of_rows_after_a_warm_up(
    reduction: str, kernel_cache: Path, fresh_plans: Callable[[], None]
) -> None:
    x = torch.randn(64, 32000, device="cuda", requires_grad=True)
    y = torch.randint(32000, (64,), device="cuda")
    torch.ones((), device="cuda", requires_grad=True).square().backward()
    warmup("cross_entropy", "float32", (64, 32000), reduction=reduction)
    kernels = dict(compiler._kernels)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        value = F.cross_entropy(x, y, reduction=reduction)
        (found,) = torch.autograd.grad(value, x, torch.ones_like(value))
    assert compiler._kernels == kernels
    graph.replay()
    torch.cuda.synchronize()
    again = F.cross_entropy(x, y, reduction=reduction)
    assert torch.equal(value, again) and torch.equal(found, torch.autograd.grad(again, x, torch.ones_like(again))[0])


@pytest.mark.gpu
@pytest.mark.in_turn
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_graph_capture_after_a_warm_up(
    loss: Loss, reduction: str, kernel_cache: Path, fresh_plans: Callable[[], None]
) -> None:
    """Forward and backward are captured although neither was ever called with this dtype and shape."""
    operands = samples.operands(loss, loss.values(), ("float32",) * len(loss.operands), [SHAPE] * len(loss.operands))
    leaves = [x.to("cuda").requires_grad_() for x in operands]
    given = {x.name: True for x in loss.operands if x.default is not None}
    torch.ones((), device="cuda", requires_grad=True).square().backward()  # Autograd's own first use of the device.
    done = warmup(loss.name, "float32", SHAPE, argnums=range(len(leaves)), reduction=reduction, **given)
    kernels = dict(compiler._kernels)
    assert len(kernels) == done.kernels
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        value = by_position(loss)(*leaves, reduction=reduction)
        found = torch.autograd.grad(value, leaves, torch.ones_like(value))
    assert compiler._kernels == kernels
    graph.replay()
    torch.cuda.synchronize()
    again = by_position(loss)(*leaves, reduction=reduction)
    assert torch.equal(value.isnan(), again.isnan()) and torch.equal(value.nan_to_num(), again.nan_to_num())
    for x, y in zip(found, torch.autograd.grad(again, leaves, torch.ones_like(again)), strict=True):
        assert torch.equal(x.nan_to_num(), y.nan_to_num())


@pytest.fixture
def slow_compiler(kernel_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """A stand-in for CuPy that counts how often a source is compiled, and how many are compiled at once."""
    cupy = pytest.importorskip("cupy")
    seen: Counter[str] = Counter()
    now, pointers = [0], count(1)

    class Module:
        def __init__(self, code: str, options: tuple[str, ...]) -> None:
            self.code = code

        def compile(self) -> None:
            now[0] += 1
            seen["at once"] = max(seen["at once"], now[0])
            time.sleep(0.02)
            now[0] -= 1
            seen[self.code] += 1

        def get_function(self, name: str) -> Any:
            return SimpleNamespace(
                kernel=SimpleNamespace(ptr=next(pointers)), max_dynamic_shared_size_bytes=SHARED_BYTES
            )

    # As if a kernel had been compiled: while the first one is, others wait for it.
    compiled = threading.Event()
    compiled.set()
    monkeypatch.setattr(compiler, "first_compiled", compiled)
    monkeypatch.setattr(cupy, "RawModule", Module)
    monkeypatch.setattr(compiler, "_ensure_context", lambda: None)
    return seen


def test_threads_compile_each_kernel_once_and_others_meanwhile(slow_compiler: Counter[str]) -> None:
    with host.recording() as kernels:
        for loss in (F.mse_loss, F.l1_loss):
            x = torch.rand(SHAPE, requires_grad=True)
            loss(x, torch.rand(SHAPE)).backward()
    pointers: list[list[int]] = []

    def load() -> None:
        in_threads(compiler.Launcher.load, kernels, 4)
        pointers.append([compiler.Launcher.load(x)[1] for x in kernels])

    threads = [threading.Thread(target=load) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert slow_compiler.pop("at once") > 1
    assert slow_compiler == dict.fromkeys((x.source() for x in kernels), 1)
    assert len(pointers) == 3 and pointers[0] == pointers[1] == pointers[2]


def test_equal_losses_have_one_lock(slow_compiler: Counter[str]) -> None:
    """Definitions of one source share a lock: CuPy keeps one module, and would drop that of the slower thread."""
    losses = [cupylosses.define_loss("twice", "square(input - target)") for _ in range(2)]
    with host.recording() as kernels:
        for loss in losses:
            loss(torch.rand(3), torch.rand(3))
    assert len(kernels) == 2 and len({x.source() for x in kernels}) == 1
    in_threads(compiler.Launcher.load, kernels, 2)
    assert slow_compiler["at once"] == 1


def test_a_kernel_keeps_the_shared_memory_that_it_was_allowed(slow_compiler: Counter[str]) -> None:
    """Launches that need less shared memory do not lower the limit for later ones that need the most."""
    with host.recording() as kernels:
        F.cross_entropy(torch.rand(3, 64), torch.zeros(3, dtype=torch.int64))
    (variant, *_) = (x for x in kernels if x.kind == "value")
    for asked, allowed in ((1 << 10, SHARED_BYTES), (200 << 10, 200 << 10), (100 << 10, 200 << 10)):
        compiler.Launcher.load(variant, asked)
        assert compiler.kernel(variant).max_dynamic_shared_size_bytes == allowed


def test_the_first_error_ends_it() -> None:
    with host.recording() as kernels:
        F.mse_loss(torch.rand(3), torch.rand(3))

    def fail(variant: PointwiseKernel) -> None:
        raise cupylosses.KernelError("does not compile")

    seen: list[None] = []
    with pytest.raises(cupylosses.KernelError, match="does not compile"):
        in_threads(fail, kernels, advance=lambda: seen.append(None))
    assert not seen


def test_cache_is_filled_with_the_options_of_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """CuPy names the file by them. A stand-in for CuPy sees the same ones, and is unpatched afterwards."""
    with host.recording() as kernels:
        F.mse_loss(torch.rand(SHAPE), torch.rand(SHAPE))
    (variant,) = kernels
    calls: list[Any] = []
    core = SimpleNamespace(compile_with_cache=lambda *positional, **named: calls.append((positional, named)))
    query, function = SimpleNamespace(__wrapped__=object()), SimpleNamespace(Module=type("Module", (), {}))
    refusal = type("CompileException", (Exception,), {})
    cupys = SimpleNamespace(function=function, _get_arch_for_options_for_nvrtc=query, CompileException=refusal)
    modules = {"cupy": SimpleNamespace(), "cupy._core": SimpleNamespace(core=core), "cupy.cuda.compiler": cupys}
    modules["cupy.cuda"] = SimpleNamespace(compiler=cupys, function=function)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(compiler, "options", lambda: ("-an-option",))
    with compiler.without_gpu() as fill:
        assert cupys._get_arch_for_options_for_nvrtc is query.__wrapped__ and cupys.function is not function
        fill(variant, "90")
    assert cupys._get_arch_for_options_for_nvrtc is query and cupys.function is function
    assert calls == [((variant.source(), ("-an-option",)), {"arch": "90", "prepend_cupy_headers": False})]


# ----------------------------------------------------------------------------------------------------------------------
# The cache, without a GPU

ARCHITECTURE = "sm_80"


@pytest.fixture
def no_gpu(kernel_cache: Path, gpus: Callable[[int], None], monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with CuPy, its compiler and an empty cache, but without a GPU."""
    pytest.importorskip("cupy")
    if find_library() is None:
        pytest.skip("there is no NVRTC")
    from cupy.cuda import compiler as cupys

    gpus(0)
    if hasattr(cupys, "_kernel_cache_backend"):  # From CuPy 14 on, it reads CUPY_CACHE_DIR when it is imported.
        monkeypatch.setattr(cupys, "_kernel_cache_backend", cupys._DiskKernelCacheBackend(str(kernel_cache)))
    return kernel_cache


def test_cache_is_filled_without_a_gpu(no_gpu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from cupy._core import core
    from cupy.cuda import compiler as cupys

    before = cupys._get_arch_for_options_for_nvrtc, cupys.function
    done = warmup("mse_loss", "float32", SHAPE, backward=False, reduction=["mean", "none"], architecture=ARCHITECTURE)
    assert (done.kernels, done.device) == (2, ARCHITECTURE)
    assert (cupys._get_arch_for_options_for_nvrtc, cupys.function) == before
    files = {x: x.read_bytes() for x in no_gpu.glob("*.cubin")}
    assert len(files) == 2 and all(x[40:44] == b"\x7fELF" for x in files.values())
    warmup("mse_loss", "float32", SHAPE, backward=False, reduction=["mean", "none"], architecture=ARCHITECTURE)
    assert {x: x.read_bytes() for x in no_gpu.glob("*.cubin")} == files

    # On a GPU of that architecture, CuPy finds all kernels and compiles nothing.
    loaded: list[bytes] = []

    class Module(cupys.function.Module):
        def load(self, cubin: bytes) -> None:
            loaded.append(cubin)

    def compile(*_: Any, **__: Any) -> None:
        raise AssertionError("compiled again")

    with host.recording() as kernels:
        for reduction in ("mean", "none"):
            F.mse_loss(torch.rand(SHAPE), torch.rand(SHAPE), reduction=reduction)
    monkeypatch.setattr(cupys, "_get_arch", lambda: ARCHITECTURE.removeprefix("sm_"))
    monkeypatch.setattr(cupys, "_get_arch_for_options_for_nvrtc", before[0].__wrapped__)
    monkeypatch.setattr(cupys, "function", SimpleNamespace(Module=Module))
    monkeypatch.setattr(cupys, "_compile_using_nvrtc_no_warning", compile, raising=False)
    for variant in kernels:
        core.compile_with_cache(variant.source(), compiler.options(), prepend_cupy_headers=False)
    assert sorted(loaded) == sorted(x[40:] for x in files.values())


def test_the_cache_is_filled_with_kernels_of_rows(no_gpu: Path) -> None:
    done = warmup("cross_entropy", "bfloat16", (8, 128256), backward=False, architecture="sm_90")
    files = [x.read_bytes() for x in no_gpu.glob("*.cubin")]
    assert (done.kernels, done.device) == (1, "sm_90") and len(files) == 1
    assert all(x[40:44] == b"\x7fELF" for x in files)


@pytest.mark.parametrize("architecture", ["sm_75", "sm_80", "sm_90", "sm_120"])
@pytest.mark.parametrize("shape", [(8, 128256), (300, 50257), (300, 1000)], ids=str)
def test_rows_are_planned_for_the_architecture(
    architecture: str, shape: tuple[int, int], gpus: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels compiled for an absent GPU are those that calls load on a GPU with that much shared memory."""
    gpus(0)
    filled: list[Any] = []

    @contextmanager
    def without_gpu() -> Iterator[Callable[..., None]]:
        yield lambda variant, number: filled.append((variant, number))

    monkeypatch.setattr(compiler, "without_gpu", without_gpu)
    warmup("cross_entropy", "float32", shape, architecture=architecture)
    chip = Chip(*{"sm_75": (64 << 10, False), "sm_80": (163 << 10, False), "sm_90": (227 << 10, True),
                  "sm_120": (99 << 10, True)}[architecture])  # fmt: skip
    with loading(monkeypatch, chip) as loaded:
        train_rows(F.cross_entropy, row_operands("indices", shape, -1, "float32"), (True, False))
    assert {x for x, _ in filled} == set(loaded) and {x for _, x in filled} == {architecture.removeprefix("sm_")}


def test_an_architecture_of_which_too_little_is_known(gpus: Callable[[int], None]) -> None:
    pytest.importorskip("cupy")
    gpus(0)
    with pytest.raises(ValueError, match=r"how much shared memory sm_20 has is not known here.* sm_90"):
        warmup("cross_entropy", "float32", SHAPE, architecture="sm_20")


@pytest.mark.gpu
def test_a_gpu_is_what_is_known_of_its_architecture() -> None:
    major, minor = torch.cuda.get_device_capability()
    assert cupylosses.jit.gpu.gpu(torch.cuda.current_device())[1] == gpu.chip(10 * major + minor)


@pytest.mark.gpu
def test_a_gpu_finds_what_was_compiled_without_one(python: Callable[..., str], kernel_cache: Path) -> None:
    call = "cupylosses.warmup(['mse_loss', 'kl_div', 'cross_entropy'], 'float32', (33, 64)"
    major, minor = torch.cuda.get_device_capability()
    cache = {"CUPY_CACHE_DIR": str(kernel_cache)}
    program = f"import cupylosses; print({call}, architecture='sm_{major}{minor}').kernels)"
    count = int(python(program, CUDA_VISIBLE_DEVICES="", **cache))
    files = sorted(kernel_cache.glob("*.cubin"))
    assert len(files) == count
    assert int(python(f"import cupylosses; print({call}).kernels)", **cache)) == count
    assert sorted(kernel_cache.glob("*.cubin")) == files


def test_a_cache_in_memory_cannot_be_filled(no_gpu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUPY_CACHE_IN_MEMORY", "1")
    with pytest.raises(RuntimeError, match="no cache on disk to fill"):
        warmup("mse_loss", "float32", SHAPE, architecture=ARCHITECTURE)


def test_an_architecture_that_the_compiler_does_not_know(no_gpu: Path) -> None:
    with pytest.raises(cupylosses.KernelError, match=r"mse_loss: the kernel .* did not compile"):
        warmup("mse_loss", "float32", SHAPE, backward=False, architecture="sm_20")


def test_neither_torch_nor_cupy_is_imported_by_a_rehearsal(python: Callable[..., str]) -> None:
    program = """
import sys
from cupylosses.warmup import _call, _functions, _wanted
from cupylosses.engines.record import KernelRecorder
calls = KernelRecorder()
for function, _ in _functions(None):
    call = _call(function, "float32", (33, 64), {"reduction": "mean"})
    calls.call(call, [_wanted(call, None)])
assert "torch" not in sys.modules and "cupy" not in sys.modules
print(len(calls.kernels))
"""
    assert int(python(program)) > 2 * len(registry())


@pytest.mark.parametrize(
    ("quota", "period", "expected"), [("max", "100000", 8), ("250000", "100000", 3), ("-1", "100000", 8), ("1", "2", 1)]
)
def test_a_container_has_fewer_processors(
    quota: str, period: str, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control group limits the processors, in either version of its files."""
    (tmp_path / "both").write_text(f"{quota} {period}\n")
    (tmp_path / "quota").write_text(f"{quota}\n")
    (tmp_path / "period").write_text(f"{period}\n")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8), raising=False)
    for names in (("both",), ("quota", "period")):
        monkeypatch.setattr(processors, "QUOTAS", (tuple(str(tmp_path / x) for x in names), ("/no/such/file",)))
        assert processors.usable() == expected

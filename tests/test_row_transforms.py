"""Row losses under torch's transforms, by kernels except for third derivatives and batches of grad_output."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from devices import GPU, HOST, KERNELS
from grids import in_turn, short_or_full
from tools.transforms import TRANSFORMS, Subject, Transform, close, suits
from torch import Tensor

import cupylosses.functional as F
from cupylosses.backends.torch import device as torch_device
from cupylosses.backends.torch import evaluation, formulas, ops
from cupylosses.call import Call
from cupylosses.definition.registry import registry
from cupylosses.engines.softmax.definition import SoftmaxLoss
from cupylosses.testing.tolerance import same_bits

pytestmark = [pytest.mark.plain, pytest.mark.filterwarnings("ignore"), pytest.mark.formulas]

#: Transforms that use the formulas.
BY_FORMULA = ("third derivatives", "`is_grads_batched=True`")

#: The loss that has all options, and the others.
FIRST, *OTHERS = registry(SoftmaxLoss).values()


def chosen(i: int, transform: Transform) -> SoftmaxLoss:
    """Returns a loss for transform number ``i``: in turn the first loss and, if the transform suits it, another one."""
    other = OTHERS[i % len(OTHERS)]
    return other if i % 2 and suits(transform, other) else FIRST


WORKING = [
    pytest.param(x, t, id=f"{t.name}-{x.name}")
    for i, t in enumerate(TRANSFORMS.values())
    for x in short_or_full((chosen(i, t),), (FIRST, *OTHERS))
    if suits(t, x)
]


@pytest.mark.parametrize(("row_loss", "transform"), WORKING)
@pytest.mark.kernels
def test_works(row_loss: SoftmaxLoss, transform: Transform, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels compute all results but third derivatives and batches of grad_output, which use the formula."""

    def never(*_: object, **__: object) -> Tensor:
        raise AssertionError("the formula was taken")

    if transform.name not in BY_FORMULA:
        monkeypatch.setattr(formulas, "evaluate", never)
    error = transform.outcome(Subject(row_loss, KERNELS))
    if error is not None:
        raise error


@pytest.mark.parametrize("row_loss", short_or_full([FIRST], [FIRST, *OTHERS]), ids=lambda x: x.name)
def test_one_graph(row_loss: SoftmaxLoss) -> None:
    """``torch.compile`` makes one graph for all sizes, even on the CPU, where the operators use the formulas."""
    torch.compiler.reset()
    subject = Subject(row_loss, "cpu")
    compiled = torch.compile(subject.function, fullgraph=True, backend="aot_eager")
    for rows in (3, 5):
        operands = [x.requires_grad_() for x in subject.draw((rows, 4))]
        value, expected = compiled(*operands), subject.truth(*operands)
        torch.testing.assert_close(value, expected)
        torch.testing.assert_close(torch.autograd.grad(value, operands), torch.autograd.grad(expected, operands))


# ----------------------------------------------------------------------------------------------------------------------
# Options

#: Calls by the name of the loss and options; True stands for a random array.
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("cross_entropy", {}),
    ("cross_entropy", {"weight": True, "ignored": True}),
    ("cross_entropy", {"mask": True, "label_smoothing": 0.2, "z_loss": 0.1, "softcap": 3.0, "reduction": "sum"}),
    ("cross_entropy", {"gamma": 1.5, "poly": 0.5, "logit_scale": 0.5, "normalizer": 7.0, "mask": True}),
    ("cross_entropy", {"normalizer": True, "reduction": "batchmean", "weight": True, "class_dim": 0}),
    ("cross_entropy", {"reduction": "none", "weight": True, "mask": True, "ignored": True, "class_dim": 1}),
    ("cross_entropy", {"probabilities": True, "weight": True, "label_smoothing": 0.1, "mask": True}),
    ("cross_entropy", {"probabilities": True, "reduction": "none", "class_dim": 1}),
    ("softmax_focal_loss", {"alpha": True, "gamma": 3.0, "mask": True}),
    ("nll_loss", {"weight": True, "ignored": True}),
    ("nll_loss", {"reduction": "none", "class_dim": 0}),
    ("kl_div_with_logits", {"temperature": 2.0, "mask": True, "reduction": "mean"}),
    ("distillation_loss", {"temperature": 0.5, "mask": True}),
    ("distillation_loss", {"reduction": "none", "class_dim": 1}),
]
#: The calls with the most arguments, for labels, probabilities and log-probabilities; with each class dimension.
FEW_CALLS = [CALLS[i] for i in (4, 5, 6, 10)]
each_call = pytest.mark.parametrize(("name", "options"), short_or_full(FEW_CALLS, CALLS), ids=str)

SHAPE = (4, 3, 5)


def drawn(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(KERNELS, dtype)


def called(
    name: str, options: Mapping[str, Any], dtype: torch.dtype = torch.float64
) -> tuple[Callable[..., Any], list[Tensor], dict[str, Tensor]]:
    """Returns a loss with these options as a function of tensors and, by name, of labels and mask; the tensors; and the
    named arguments.
    """
    given = {"class_dim": -1, **options}
    dim = given["class_dim"]
    x = drawn(*SHAPE, dtype=dtype, seed=0)
    rows, classes = x.movedim(dim, -1).shape[:-1], x.shape[dim]
    tensors, others = [x.log_softmax(dim) if name == "nll_loss" else x], {}
    if given.pop("probabilities", False) or name in ("kl_div_with_logits", "distillation_loss"):
        tensors.append(drawn(*SHAPE, dtype=dtype, seed=1))
        if name != "distillation_loss":
            tensors[1] = tensors[1].softmax(dim)
    else:
        labels = (torch.arange(rows.numel(), device=KERNELS) * 7 % classes).reshape(rows)
        others["target"] = torch.where(labels == 2, -100, labels) if given.pop("ignored", False) else labels
    if given.pop("mask", False):
        others["mask"] = drawn(*rows, dtype=dtype, seed=2) > -0.5
    for weight in ("weight", "alpha"):
        if weight in given:
            given[weight] = drawn(classes, dtype=dtype, seed=3).abs() + 0.5
    if given.get("normalizer") is True:
        given["normalizer"] = torch.tensor(2.5, dtype=torch.float64, device=KERNELS)

    def function(*tensors: Tensor, **others: Tensor) -> Any:
        operands = [*tensors, *([others["target"]] if "target" in others else [])]
        more = {"mask": others["mask"]} if "mask" in others else {}
        return getattr(F, name)(*operands, **given, **more)

    return function, tensors, others


def gradients(function: Callable[..., Tensor], tensors: Sequence[Tensor], **others: Tensor) -> list[Tensor]:
    """Returns the value, and the gradients for a grad_output of 1.5."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    value = function(*leaves, **others)
    return [value.detach(), *torch.autograd.grad(value, leaves, torch.full_like(value, 1.5))]


@pytest.mark.kernels
@each_call
def test_options_in_a_graph(name: str, options: dict[str, Any]) -> None:
    """Value and gradients in a full graph have the bits of eager mode."""
    torch.compiler.reset()
    function, tensors, others = called(name, options, torch.float32)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for a, b in zip(gradients(compiled, tensors, **others), gradients(function, tensors, **others), strict=True):
        assert same_bits(a, b)
    with torch.no_grad():
        assert same_bits(compiled(*tensors, **others), function(*tensors, **others))


@pytest.mark.kernels
@pytest.mark.parametrize(("name", "options"), short_or_full([CALLS[i] for i in (4, 6, 10)], CALLS), ids=str)
def test_derivatives_with_options(name: str, options: dict[str, Any]) -> None:
    """Covers first and second derivatives, and forward mode. test_row_second.py has those with dense targets."""
    function, tensors, others = called(name, options)
    fixed = partial(function, **others)
    leaves = [x.requires_grad_() for x in tensors]
    torch.autograd.gradcheck(fixed, leaves, fast_mode=True, check_forward_ad=True)
    torch.autograd.gradgradcheck(fixed, leaves, fast_mode=True)


@pytest.mark.kernels
@pytest.mark.parametrize(("name", "options"), short_or_full([CALLS[i] for i in (4, 5, 12)], CALLS), ids=str)
def test_options_per_sample(name: str, options: dict[str, Any]) -> None:
    """``vmap`` gives the values and gradients of samples, which are in different dimensions, for every reduction. In a
    second call, all samples share every tensor but the first.
    """
    function, plain, others = called(name, options)
    stacked = [torch.stack([x, x.flip(0), x * 0.5], dim=1 if i == 0 else 0) for i, x in enumerate(plain)]
    moved = {k: torch.stack([x, x.flip(0), x.flip(1)], dim=-1) for k, x in others.items()}
    if name == "nll_loss":
        stacked[0] = stacked[0].log_softmax(options.get("class_dim", -1))
    where = (1, *[0] * (len(stacked) - 1))

    def summed(x: list[Tensor], y: dict[str, Tensor]) -> Tensor:
        return function(*x, **y).sum()

    def sample(i: int) -> tuple[list[Tensor], dict[str, Tensor]]:
        return [x.select(d, i) for x, d in zip(stacked, where, strict=True)], {k: x[..., i] for k, x in moved.items()}

    every = [sample(i) for i in range(3)]
    for f in (lambda x, y: function(*x, **y), torch.func.grad(summed)):
        found = torch.func.vmap(f, in_dims=(list(where), -1))(stacked, moved)
        close(_leaves(found), [torch.stack(x) for x in zip(*[_leaves(f(*x)) for x in every], strict=True)])
        found = torch.func.vmap(f, in_dims=([1, *[None] * (len(plain) - 1)], None))([stacked[0], *plain[1:]], others)
        rows = [_leaves(f([x, *plain[1:]], others)) for x in stacked[0].unbind(1)]
        close(_leaves(found), [torch.stack(x) for x in zip(*rows, strict=True)])
    if others:
        found = torch.func.vmap(summed, in_dims=(None, -1))(plain, moved)
        close(found, torch.stack([summed(plain, y) for _, y in every]))


def _leaves(x: Tensor | list[Tensor]) -> list[Tensor]:
    return [x] if isinstance(x, Tensor) else list(x)


@pytest.mark.races
@pytest.mark.kernels
@pytest.mark.parametrize(
    ("call", "dtype"), in_turn(short_or_full(FEW_CALLS, CALLS), [torch.float16, torch.float32]), ids=str
)
def test_gradients_are_those_of_autograd(call: tuple[str, dict[str, Any]], dtype: torch.dtype) -> None:
    """``torch.func.grad`` and ``create_graph=True`` give the same bits: no intermediate result is narrow."""
    name, options = call
    function, tensors, others = called(name, options, dtype)
    _, *expected = gradients(function, tensors, **others)

    def weighted(*x: Tensor) -> Tensor:
        value = function(*x, **others)
        return (value.double() * 1.5).sum()

    by_func = torch.func.grad(weighted, tuple(range(len(tensors))))(*tensors)
    leaves = [x.detach().requires_grad_() for x in tensors]
    value = function(*leaves, **others)
    twice = torch.autograd.grad(value, leaves, torch.full_like(value, 1.5), create_graph=True)
    for a, b, c in zip(by_func, twice, expected, strict=True):
        assert b.requires_grad
        assert same_bits(a, c) and same_bits(b.detach(), c)


@pytest.mark.kernels
def test_tangents_of_narrow_logits() -> None:
    """In a row of many classes, 16-bit gradients have few digits, but the tangent has all of its digits."""
    classes = 70_000
    x = torch.zeros(1, classes, dtype=torch.float16, device=KERNELS)
    y = torch.zeros(1, dtype=torch.int64, device=KERNELS)
    along = torch.ones_like(x)
    along[0, 0] = 0.0
    _, tangent = torch.func.jvp(lambda x: F.cross_entropy(x, y, out_dtype="float32"), (x,), (along,))
    assert tangent.item() == pytest.approx(1 - 1 / classes, rel=1e-6)


@pytest.mark.kernels
def test_samples_with_class_weights_of_their_own() -> None:
    """Kernels do not support class weights per sample."""
    function = partial(F.cross_entropy, target=torch.tensor([0, 1, 2, 0], device=KERNELS))
    x, w = drawn(2, 4, 3, dtype=torch.float64, seed=0), drawn(2, 3, dtype=torch.float64, seed=1).abs()
    for f in (lambda x, w: function(x, weight=w), torch.func.grad(lambda x, w: function(x, weight=w))):
        close(torch.func.vmap(f)(x, w), torch.stack([f(*each) for each in zip(x, w, strict=True)]))


@pytest.mark.kernels
def test_what_is_asked_for_besides() -> None:
    """Covers lse per row and accuracy, in a graph and per sample."""
    torch.compiler.reset()
    x, y = drawn(3, 6, 5, dtype=torch.float32, seed=0), torch.randint(0, 5, (3, 6), device=KERNELS)
    y[0, 0] = -100
    y[1] = x[1].argmax(-1)

    def function(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return tuple(F.cross_entropy(x, y, softcap=2.0, return_lse=True, return_accuracy=True))

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    rows = [function(*each) for each in zip(x, y, strict=True)]
    for each, expected in zip(zip(x, y, strict=True), rows, strict=True):
        leaf = each[0].clone().requires_grad_()
        found = compiled(leaf, each[1])
        assert [a.requires_grad for a in found] == [True, False, False]
        assert all(same_bits(a.detach(), b) for a, b in zip(found, expected, strict=True))
    found = torch.func.vmap(function)(x, y)
    close(found, tuple(torch.stack(a) for a in zip(*rows, strict=True)), 1e-6)
    assert found[2][1] == 1.0


@pytest.mark.kernels
@pytest.mark.parametrize("labels", short_or_full(["int64"], ["int64", "int32", "int16", "int8", "uint8"]))
def test_one_graph_for_all_sizes(labels: str) -> None:
    """Batches and vocabularies of any size use the graph that was compiled for the second size."""
    torch.compiler.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(F.cross_entropy, fullgraph=True, backend=counter)
    for rows, classes in ((4, 6), (7, 9), (5, 33), (33, 120), (2, 3)):
        x = drawn(rows, classes, dtype=torch.float32, seed=rows)
        y = (torch.arange(rows, device=KERNELS) % classes).to(getattr(torch, labels))
        for a, b in zip(*[gradients(f, [x], target=y) for f in (compiled, F.cross_entropy)], strict=True):
            assert same_bits(a, b)
    assert counter.frame_count <= 2


@pytest.mark.kernels
@pytest.mark.parametrize(("target", "reduction"), in_turn(["labels", "probabilities"], ["mean", "none"]))
def test_no_rows(target: str, reduction: str) -> None:
    """A batch without rows gives the results of eager mode in a graph and under transforms."""
    torch.compiler.reset()
    x = torch.zeros(0, 3, device=KERNELS)
    y = x if target == "probabilities" else torch.zeros(0, dtype=torch.int64, device=KERNELS)
    function = partial(F.cross_entropy, reduction=reduction)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for a, b in zip(*[gradients(f, [x], target=y) for f in (compiled, function)], strict=True):
        assert same_bits(a, b)
    assert torch.func.grad(lambda x: function(x, y).sum())(x).shape == x.shape
    assert same_bits(torch.func.vmap(function)(x[None], y[None])[0], function(x, y))


@pytest.mark.kernels
def test_one_read_for_the_value_and_one_for_the_gradient(ran: list[str]) -> None:
    """With class indices, backward of a graph or under ``vmap`` gets the row results of forward."""
    torch.compiler.reset()
    x, y = drawn(4, 5, dtype=torch.float32, seed=0), torch.tensor([0, 1, 2, 3], device=KERNELS)
    compiled = torch.compile(F.cross_entropy, fullgraph=True, backend="aot_eager")
    gradients(compiled, [x], target=y)
    assert ran == ["value", "from_residual"]
    ran.clear()
    torch.func.vmap(torch.func.grad(F.cross_entropy))(torch.stack([x] * 8), torch.stack([y] * 8))
    assert ran == ["unreduced", "from_residual"]


@pytest.mark.parametrize("check", ["lazy", "sync", "off"])
def test_a_label_that_is_no_class(check: str, device: str) -> None:
    """A graph reports a label out of range as eager mode does."""
    torch.compiler.reset()
    x, y = drawn(4, 3, dtype=torch.float32, seed=0), torch.tensor([0, 1, 7, 2], device=KERNELS)
    compiled = torch.compile(
        lambda x, y: F.cross_entropy(x, y, check_targets=check), fullgraph=True, backend="aot_eager"
    )
    if check == "off":
        assert compiled(x, y).isnan()
        return
    with pytest.raises(IndexError, match=r"^cross_entropy: `target\[2\]` must be a class index, 0 to 2"):
        compiled(x, y)
        torch.cuda.synchronize() if GPU else None
        compiled(x, y)


@pytest.mark.kernels
@pytest.mark.parametrize("take", short_or_full(["grad", "vmap"], ["grad", "jacrev", "hessian", "vmap"]))
def test_transforms_inside_of_a_graph(take: str) -> None:
    """Transforms inside a graph use the formulas."""
    torch.compiler.reset()
    x, y = drawn(4, 3, dtype=torch.float32, seed=0), torch.tensor([0, 1, 2, 0], device=KERNELS)
    function = getattr(torch.func, take)(partial(F.cross_entropy, reduction="none" if take == "jacrev" else "mean"))
    if take == "vmap":
        x, y = x[:, None], y[:, None]
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    close(compiled(x, y), function(x, y), 1e-5)


# ----------------------------------------------------------------------------------------------------------------------
# Operators


@pytest.mark.kernels
@pytest.mark.parametrize(("call", "where"), in_turn(short_or_full(FEW_CALLS, CALLS), ["kernels", "formula"]), ids=str)
def test_operators_keep_their_promises(
    call: tuple[str, dict[str, Any]], where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs torch's own checks of an operator: schema, fake tensors, compilation."""
    name, options = call
    if where == "formula":
        monkeypatch.setattr(torch_device, "host", None)
    function, tensors, others = called(name, options, torch.float32)
    if where == "formula":
        tensors, others = [x.cpu() for x in tensors], {k: x.cpu() for k, x in others.items()}
        function, *_ = called(name, {k: x for k, x in options.items() if x is not True or k in others}, torch.float32)
    calls = []

    def noted(call: Any, *_: Any) -> Any:
        calls.append(Call(*call))
        return torch.zeros(())

    with monkeypatch.context() as m:
        m.setattr(evaluation, "evaluate", noted)
        function(*tensors, **others)
    (asked,) = calls
    if asked.normalizer is not None and type(asked.normalizer) is not float:
        asked = asked._replace(normalizer=asked.normalizer.double().to(tensors[0].device))
    softmax = name != "nll_loss"
    static = asked.static._replace(
        out_dtype="float64", lse=softmax, accuracy=softmax and asked.static.kind == "indices", inplace=False
    )
    indices = static.kind == "indices"
    spec = ops.Spec.of(asked._replace(static=static), residual=indices)
    first, second, *rest = asked.arrays
    across = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (first, second)]
    for operands in ((first, second), across):
        given = [*operands, *rest]
        torch.library.opcheck(ops.value, (given, *spec))
        value, *more = ops.value(given, *spec)
        upstream = torch.randn_like(value).T.contiguous().T if value.ndim else torch.randn_like(value)
        wanted = [True, not indices, *[False] * len(rest)]
        plain = spec.without_residual()
        torch.library.opcheck(ops.gradients, (upstream, more[0] if indices else None, wanted, given, *plain))
        if static.reduction == "none":
            call = plain.call(given)
            tangents = tuple([torch.randn_like(x) for x, w in zip(given, wanted, strict=True) if w])
            moved = call.loss.engine.jvp(call, tuple(wanted), tangents)
            asked_of = [*wanted, *[False] * len(tangents)]
            torch.library.opcheck(ops.hvp, (upstream, asked_of, list(moved.arrays), *ops.Spec.of(moved)))


def test_calls_are_found_by_text() -> None:
    x, y = torch.zeros(2, 3), torch.tensor([0, 1])
    for row_loss in registry(SoftmaxLoss).values():
        function: Any = getattr(F, row_loss.name)
        for second in ([y] if row_loss.row else []) + ([x] if row_loss.dense else []):
            call = function.prepare(x, second, reduction="sum", class_dim=-1)
            spec = ops.Spec.of(call, residual=True)
            found = spec.call((x, second))
            assert found._replace(arrays=()) == call._replace(arrays=()) and spec.residual
            assert all(a is b for a, b in zip(found.arrays, call.arrays, strict=True))


def test_a_loss_of_rows_of_ones_own_is_another() -> None:
    """A definition under the name of a library loss has a key of its own, which depends on its expressions."""
    found = registry(SoftmaxLoss)["softmax_focal_loss"]
    own, other = replace(found), replace(found, row="weight * nll * nll")
    assert own.key != found.name and own.key.startswith(f"{found.name}-")
    assert own.key != other.key and own.key == replace(found).key


@pytest.mark.programs
@pytest.mark.skipif(not HOST, reason="no C++ compiler on Linux")
def test_inductor() -> None:
    """Code that Inductor generates around the operators gives the bits of eager mode."""
    torch.compiler.reset()
    x, y = torch.randn(6, 5), torch.tensor([0, 1, 2, 3, 4, 0])

    def function(x: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(x * 2, target, z_loss=0.1)

    found = gradients(torch.compile(function, fullgraph=True), [x], target=y)
    for a, b in zip(found, gradients(function, [x], target=y), strict=True):
        assert same_bits(a, b)

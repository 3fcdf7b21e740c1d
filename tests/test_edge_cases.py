"""Edge cases of arguments: shapes, types, empty rows, switches used from several threads."""

from __future__ import annotations

import enum
import threading
import warnings
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

import cupylosses
import cupylosses.functional as F
from cupylosses import options, set_one_pass, value_and_grad
from cupylosses.definition.registry import registry
from cupylosses.engines.pointwise.definition import Loss
from cupylosses.engines.softmax.definition import SoftmaxLoss

pytestmark = pytest.mark.plain

TORCH = torch.nn.functional


def draw(*shape: int, device: str = "cpu", seed: int = 0) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)).to(device) + 0.25


# ----------------------------------------------------------------------------------------------------------------------
# Shapes


@pytest.mark.parametrize(
    ("shape", "of_variance"),
    [
        ((5, 1), (5,)),
        ((4, 4), (4,)),
        ((3, 4), (3,)),
        ((3, 4), (3, 1)),
        ((3, 4), (1, 4)),
        ((3, 4), (3, 4)),
        ((3, 4), ()),
    ],
)
def test_variance_has_the_shapes_that_torch_documents(
    shape: tuple[int, ...], of_variance: tuple[int, ...], device: str
) -> None:
    """A variance with one dimension fewer has a value per row, though it would broadcast along the columns."""
    x, y, v = (draw(*s, device=device, seed=i) for i, s in enumerate((shape, shape, of_variance)))
    found = F.gaussian_nll_loss(x, y, v, reduction="none")
    if of_variance == ():  # torch refuses this.
        v = v.expand(shape)
    torch.testing.assert_close(found, TORCH.gaussian_nll_loss(x, y, v, reduction="none"))
    ours, theirs = (
        torch.autograd.grad(f(x, y, v.requires_grad_(), reduction="sum"), v)[0]
        for f in (F.gaussian_nll_loss, TORCH.gaussian_nll_loss)
    )
    torch.testing.assert_close(ours, theirs)
    assert F.gaussian_nll_loss(*[t.detach().cpu().numpy() for t in (x, y, v)], reduction="none").shape == shape


@pytest.mark.parametrize(("shape", "of_variance"), [((3, 4), (4,)), ((3, 4), (2, 4)), ((2, 3, 4), (2,))])
def test_variance_of_another_shape_raises(shape: tuple[int, ...], of_variance: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"gaussian_nll_loss: .*`var` .*got"):
        F.gaussian_nll_loss(draw(*shape), draw(*shape), draw(*of_variance))


@pytest.mark.parametrize(
    "name", ["binary_cross_entropy", "binary_cross_entropy_with_logits", "soft_margin_loss", "margin_ranking_loss"]
)
def test_operands_that_both_broadcast_warn(name: str, device: str) -> None:
    function = getattr(F, name)
    count = len(registry(Loss)[name].operands) - (name == "binary_cross_entropy_with_logits")
    first = [draw(5, 1, device=device).clamp(max=1)] * (count - 1)
    with pytest.warns(UserWarning, match=rf"{name}: no operand has the shape \(5, 5\)") as caught:
        function(*first, draw(5, device=device).clamp(max=1))
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        function(*first, draw(1, device=device).clamp(max=1))
        function(*first, draw(5, 1, device=device).clamp(max=1), weight=draw(5, device=device))


@pytest.mark.parametrize("order", [0, 1])
def test_elements_lie_as_on_a_gpu(order: int, device: str) -> None:
    """Results of the reference formula, too, have the strides of its first operand."""
    dense, transposed = draw(4, 5, device=device), draw(5, 4, device=device).t()
    first, weight = (dense, transposed)[:: 1 - 2 * order]
    found = F.mse_loss(first, first + 1, weight=weight, reduction="none")
    assert found.stride() == first.stride()
    weighted = (weight * TORCH.mse_loss(first, first + 1, reduction="none")).detach()
    torch.testing.assert_close(found, weighted)
    x = first.clone(memory_format=torch.preserve_format).requires_grad_()
    ours = torch.autograd.grad(F.mse_loss(x, first + 1, weight=weight, reduction="none"), x, weight)[0]
    torch.testing.assert_close(ours, -2 * weight * weight)


# ----------------------------------------------------------------------------------------------------------------------
# Types


class Kind(str, enum.Enum):
    MEAN = "mean"
    NONE = "none"


@pytest.mark.parametrize("reduction", [Kind.MEAN, Kind.NONE, numpy.str_("sum")])
def test_reduction_by_a_subclass_of_str(reduction: Any, device: str) -> None:
    x, y, labels = draw(3, 4, device=device), draw(3, 4, device=device, seed=1), torch.tensor([0, 3, 1]).to(device)
    plain = reduction.value if isinstance(reduction, Kind) else str(reduction)
    assert torch.equal(F.mse_loss(x, y, reduction=reduction), F.mse_loss(x, y, reduction=plain))
    found = F.cross_entropy(x, labels, reduction=reduction)
    assert torch.equal(found, F.cross_entropy(x, labels, reduction=plain))


def test_every_function_takes_a_subclass_of_str() -> None:
    for loss in registry(Loss).values():
        arrays = [numpy.full(2, 0.5)] * sum(x.default is None for x in loss.operands)
        call = getattr(F, loss.name).prepare(*arrays, reduction=numpy.str_("mean"))
        assert type(call.static.kind) is str
    for loss in registry(SoftmaxLoss).values():
        target = numpy.zeros(2, int) if "indices" in loss.targets else numpy.ones((2, 3))
        call = getattr(F, loss.name).prepare(numpy.ones((2, 3)), target, reduction=numpy.str_("mean"))
        assert type(call.static.reduction) is str


@pytest.mark.filterwarnings("ignore:the matrix subclass:PendingDeprecationWarning")
def test_arrays_whose_operators_mean_something_else_are_refused() -> None:
    plain = numpy.ones((2, 2))
    masked = numpy.ma.masked_array(plain, mask=[[True, False], [False, False]])
    with pytest.raises(TypeError, match=r"mse_loss: `target` .*MaskedArray; pass its `.data`, and `mask=~"):
        F.mse_loss(plain, masked)
    for given in (masked, numpy.matrix(plain)):
        for call in (
            lambda x: F.mse_loss(x, plain),
            lambda x: F.mse_loss(torch.ones(2, 2), x),
            lambda x: F.mse_loss(plain, plain, weight=x),
            lambda x: F.mse_loss(plain, plain, mask=x),
            lambda x: F.gaussian_nll_loss(plain, plain, x),
            lambda x: F.cross_entropy(x, numpy.zeros(2, int)),
        ):
            with pytest.raises(TypeError, match=type(given).__name__):
                call(given)


@pytest.mark.parametrize("argnums", [1.5, True, None, (0, 1.0), {0}])
def test_argnums_of_other_types(argnums: Any) -> None:
    for call in (lambda: value_and_grad(F.mse_loss, draw(3), draw(3), argnums=argnums),):
        with pytest.raises(TypeError, match=r"mse_loss: `argnums` must be a position, a name or a sequence"):
            call()
    with pytest.raises(TypeError, match=r"cross_entropy: `argnums`"):
        value_and_grad(F.cross_entropy, draw(2, 3), torch.tensor([0, 1]), argnums=argnums)


def test_argnums_by_an_integer_of_numpy() -> None:
    _, gradient = value_and_grad(F.mse_loss, draw(3), draw(3, seed=1), argnums=numpy.int64(1))
    assert torch.equal(gradient, value_and_grad(F.mse_loss, draw(3), draw(3, seed=1), argnums=1)[1])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"parameters": ["c"]},
            r"`parameters` of bad must be a mapping .* got \['c'\]; for example parameters={'c': 1.0}",
        ),
        ({"parameters": "c"}, "`parameters` of bad must be a mapping"),
        ({"flags": ["full"]}, "`flags` of bad must be a mapping .* flags={'full': False}"),
        ({"operands": "input"}, "`operands` of bad must be a sequence"),
    ],
)
def test_define_loss_of_wrong_types(given: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        cupylosses.define_loss("bad", "input", **given)


@pytest.mark.parametrize("reference", [lambda xp, a, b: xp.mean(a - b), lambda xp, a, b: 1.0])
def test_a_reference_that_reduces_raises(reference: Callable[..., Any]) -> None:
    """Its mean would be a mean of one number, whatever the reduction."""
    function = cupylosses.define_loss("reducing", "input - target", reference=reference)
    for x in (draw(3, 4), draw(3, 4).numpy()):
        with pytest.raises(ValueError, match=r"reducing: `reference` must return one value per element, .*\(3, 4\)"):
            function(x, x)


# ----------------------------------------------------------------------------------------------------------------------
# Empty rows


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("rows", [0, 3])
@pytest.mark.parametrize("kind", ["ignored labels", "probabilities", "log-probabilities"])
def test_rows_without_classes(kind: str, rows: int, reduction: str, device: str) -> None:
    name = "nll_loss" if kind == "log-probabilities" else "cross_entropy"
    x = torch.zeros(rows, 0, device=device, requires_grad=True)
    target = torch.zeros(rows, 0, device=device)
    if kind != "probabilities":
        target = torch.full((rows,), -100, device=device)
    found, expected = (getattr(f, name)(x, target, reduction=reduction) for f in (F, TORCH))
    torch.testing.assert_close(found, expected, equal_nan=True)
    assert torch.autograd.grad(found.sum(), x)[0].shape == (rows, 0)


def test_a_label_where_there_are_no_classes_raises() -> None:
    with pytest.raises(IndexError, match="must be `ignore_index`, as there are no classes"):
        F.cross_entropy(torch.zeros(3, 0), torch.zeros(3, dtype=torch.long))


@pytest.mark.parametrize("options", [{}, {"dim": 0}], ids=["all", "dim"])
def test_second_derivative_of_a_mean_of_nothing(options: dict[str, Any], device: str) -> None:
    """The derivative is an empty sum, as in torch, whichever way it is computed."""
    x, y = torch.zeros(0, 4, device=device, requires_grad=True), torch.zeros(0, 4, device=device)
    value = F.mse_loss(x, y, **options)
    upstream = torch.ones_like(value).requires_grad_()
    (gradient,) = torch.autograd.grad(value, x, upstream, create_graph=True)
    (found,) = torch.autograd.grad(gradient, upstream, torch.ones_like(gradient))
    assert torch.equal(found, torch.zeros_like(found))

    def pulled(upstream: Tensor) -> Tensor:
        return torch.func.vjp(lambda z: F.mse_loss(z, y, **options), x.detach())[1](upstream)[0]

    _, pull = torch.func.vjp(pulled, upstream.detach())
    assert torch.equal(pull(torch.ones_like(x))[0], torch.zeros_like(value))


def test_class_weights_have_a_gradient_against_probabilities(device: str) -> None:
    x, target, weight = draw(3, 4, device=device), draw(3, 4, device=device, seed=1), draw(4, device=device, seed=2)
    results = []
    for function in (F.cross_entropy, TORCH.cross_entropy):
        leaves = [t.detach().clone().requires_grad_() for t in (x, weight)]
        value = function(leaves[0], target, weight=leaves[1], label_smoothing=0.1)
        results.append(torch.autograd.grad(value, leaves))
        results.append(torch.func.grad(lambda w, f=function: f(x, target, weight=w, label_smoothing=0.1))(weight))
    for ours, theirs in zip(results[0], results[2], strict=True):
        torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(results[1], results[3])
    with pytest.raises(ValueError, match="`weight` has no gradient"):  # As in torch.
        F.cross_entropy(x, torch.tensor([0, 1, 2], device=device), weight=weight.requires_grad_())


# ----------------------------------------------------------------------------------------------------------------------
# The one-pass switch


def test_blocks_left_out_of_order() -> None:
    first, second = set_one_pass(False), set_one_pass(False)
    first.__enter__(), second.__enter__()
    first.__exit__(None, None, None)
    assert not options.one_pass_enabled()
    second.__exit__(None, None, None)
    assert options.one_pass_enabled()


def test_blocks_of_two_threads() -> None:
    """The thread that enters last leaves last, after the other's setting has ended."""
    entered, left = threading.Event(), threading.Event()

    def other() -> None:
        with set_one_pass(False):
            entered.set()
            left.wait(10)

    with set_one_pass(False):
        thread = threading.Thread(target=other)
        thread.start()
        assert entered.wait(10)
    left.set()
    thread.join()
    assert options.one_pass_enabled()


def test_a_block_ends_with_what_a_call_had_set() -> None:
    set_one_pass(False)
    try:
        with set_one_pass(True):
            assert options.one_pass_enabled()
        assert not options.one_pass_enabled()
        for _ in range(1000):
            set_one_pass(False)
        assert len(options._settings) < 100
    finally:
        set_one_pass(True)
    assert options.one_pass_enabled()

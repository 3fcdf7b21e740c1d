"""The Modules: subclasses of torch's where it has them, and of users' own losses."""

from __future__ import annotations

import copy
import inspect
import pickle

import pytest
import torch
from devices import KERNELS

import cupylosses.functional as F
import cupylosses.nn
from cupylosses.definition import Loss, registry
from cupylosses.testing import samples

LOSSES = pytest.mark.parametrize("loss", registry().values(), ids=list(registry()))


def operands(loss: Loss) -> list[torch.Tensor]:
    count = len(loss.operands)
    return samples.operands(loss, loss.values(), ("float32",) * count, [(4, 3)] * count)


@LOSSES
def test_a_module_is_torchs_where_there_is_one(loss: Loss) -> None:
    module = getattr(cupylosses.nn, loss.class_name)
    twin = getattr(torch.nn, loss.class_name, None)
    assert (twin is not None) == (loss.torch is not None)
    if twin:
        assert issubclass(module, twin)
        assert inspect.signature(module) == inspect.signature(twin)
        assert repr(module()) == repr(twin())
        assert torch.equal(module()(*operands(loss)), getattr(F, loss.name)(*operands(loss)))
        torch.testing.assert_close(module()(*operands(loss)), twin()(*operands(loss)))


@LOSSES
def test_a_module_keeps_the_options_of_its_loss(loss: Loss) -> None:
    for case in loss.cases:
        known = inspect.signature(getattr(cupylosses.nn, loss.class_name)).parameters
        if not case.keys() <= known.keys():
            continue
        module = getattr(cupylosses.nn, loss.class_name)(reduction="sum", **case)
        expected = getattr(F, loss.name)(*operands(loss), reduction="sum", **case)
        for same in (module, copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
            assert torch.equal(same(*operands(loss)), expected)


def test_a_call_takes_what_differs_by_call() -> None:
    input, target = torch.rand(4, 3), torch.rand(4, 3)
    weight, mask = torch.rand(3), torch.rand(4, 3) > 0.5
    module = cupylosses.nn.HuberLoss(delta=0.5)
    found = module(input, target, weight=weight, mask=mask, normalizer=7, dim=1, out_dtype="float64")
    options = {"weight": weight, "mask": mask, "normalizer": 7, "dim": 1, "out_dtype": "float64"}
    assert torch.equal(found, F.huber_loss(input, target, delta=0.5, **options))


def test_tensors_are_buffers_and_parameters_are_trained() -> None:
    module = cupylosses.nn.HingeLoss(margin=0.5, weight=torch.tensor([0.5, 2.0, 1.0]))
    assert repr(module) == "HingeLoss(margin=0.5, weight=Tensor(3,))"
    assert list(module.state_dict()) == ["weight"]
    assert module.double().weight.dtype == torch.float64
    trained = cupylosses.nn.HingeLoss(weight=torch.nn.Parameter(torch.ones(3)), dim=0)
    trained(torch.rand(4, 3), torch.ones(4, 3)).sum().backward()
    assert [x.grad.shape for x in trained.parameters()] == [(3,)]


# ----------------------------------------------------------------------------------------------------------------------
# Users' own losses

tukey_loss = cupylosses.define_loss(
    "tukey_loss",
    "where(abs(d) < c, c * c / 6 * (1 - cube), c * c / 6)",
    parameters={"c": 4.685},
    let={"d": "input - target", "inside": "1 - square(d / c)", "cube": "inside * square(inside)"},
)
TukeyLoss = cupylosses.nn.module_of(tukey_loss)


@pytest.mark.kernels
def test_a_loss_of_ones_own_runs_in_kernels() -> None:
    input = torch.linspace(-4, 4, 33, device=KERNELS, requires_grad=True)
    target = torch.zeros(33, device=KERNELS)
    module = pickle.loads(pickle.dumps(TukeyLoss(c=3.0)))
    value = module(input, target)
    value.backward()
    d = input.detach().double()
    inside = (1 - (d / 3) ** 2).clamp(min=0)
    torch.testing.assert_close(value.double(), (1.5 * (1 - inside**3)).mean())
    torch.testing.assert_close(input.grad.double(), d * inside**2 / 33)
    assert repr(module) == "TukeyLoss(c=3.0)"


def test_without_a_reference_the_cpu_says_what_is_missing() -> None:
    with pytest.raises(NotImplementedError, match=r"^tukey_loss: .*without a `reference`.*define_loss"):
        tukey_loss(torch.rand(3), torch.rand(3))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("sqare(input - target)", "the function `sqare` is unknown; did you mean `square`"),
        ("square(input - tagret)", "the name `tagret` is unknown; did you mean `target`"),
        ("square(input, target)", r"`square\(x\)` takes 1 arguments, got 2"),
        ("(input - target) ** 2", r"`\*\*` cannot stand in an expression; write square"),
        ("input; exit(0)", "`;` cannot stand"),
        ("(input - target", "parentheses do not match"),
        ("abs", r"`abs` is a function: `abs\(x\)`"),
        ("input(target)", "`input` is no function"),
        (" ", "is empty"),
    ],
)
def test_mistakes_are_reported_where_they_were_written(value: str, message: str) -> None:
    with pytest.raises(cupylosses.ExpressionError, match=rf"^mine: value, in .*test_modules\.py:\d+.*{message}"):
        cupylosses.define_loss("mine", value)

"""CTC losses judged by torch's own test data, and under torch's transforms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import opinfo
import pytest
import torch
from devices import KERNELS
from grids import short_or_full
from tools.transforms import TRANSFORMS, Subject, Transform, suits
from torch import Tensor

import cupylosses.functional as F
from cupylosses import nn

pytestmark = pytest.mark.filterwarnings("ignore")
kernels = pytest.mark.kernels
devices = pytest.mark.parametrize("device", ["cpu", pytest.param(KERNELS, marks=kernels, id="kernels")])


def graded(function: Callable[..., Tensor], x: Tensor, *others: Any, **options: Any) -> list[Tensor]:
    """The value, and the gradient of its weighted sum."""
    leaf = x.detach().clone().requires_grad_()
    value = function(leaf, *others, **options)
    upstream = torch.linspace(0.25, 1.25, max(1, value.numel()), dtype=torch.float64)[: value.numel()]
    return [value.detach(), *torch.autograd.grad(value, leaf, upstream.reshape(value.shape).to(value))]


def on_cpu(x: Any) -> Any:
    return x.cpu() if isinstance(x, Tensor) else x


def agree(found: list[Tensor], right: list[Tensor]) -> None:
    """Asserts that shapes are torch's, and numbers those that torch computes in float64."""
    for a, b in zip(found, right, strict=True):
        assert a.shape == b.shape
        eps = 1e-11 if a.dtype == torch.float64 else 1e-5
        torch.testing.assert_close(a.cpu().double(), b.cpu().double(), rtol=eps, atol=eps)


@devices
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_samples_of_torchs_function(device: str, dtype: torch.dtype) -> None:
    """With torch's gradient convention, also for torch's samples of log-probabilities that are not normalized."""
    info = opinfo.databases()[0]["ctc_loss"]
    given = list(info.sample_inputs(device, dtype, requires_grad=False))
    assert given
    for sample in given:
        assert sample.input.dtype == dtype
        expected = graded(torch.nn.functional.ctc_loss, sample.input.cpu().double(), *map(on_cpu, sample.args),
                          **{k: on_cpu(x) for k, x in sample.kwargs.items()})  # fmt: skip
        found = graded(F.ctc_loss, sample.input, *sample.args, **sample.kwargs, gradient="logits")
        assert found[0].dtype == dtype
        agree(found, expected)


@devices
def test_samples_of_torchs_module(device: str) -> None:
    info = opinfo.databases()[1]["CTCLoss"]
    given = list(info.module_inputs_func(info, device, torch.float64, False, training=False))
    assert given
    for sample in given:
        made, call = sample.constructor_input, sample.forward_input
        ours, theirs = (x.CTCLoss(*made.args, **made.kwargs) for x in (nn, torch.nn))
        found = ours(*call.args, **call.kwargs)
        right = theirs(*map(on_cpu, call.args), **{k: on_cpu(x) for k, x in call.kwargs.items()})
        torch.testing.assert_close(found.cpu(), right, rtol=1e-11, atol=1e-11)


WORKING = [
    pytest.param(x, t, id=f"{t.name}-{x.name}")
    for i, t in enumerate(TRANSFORMS.values())
    for x in short_or_full((F.ctc_loss_with_logits.loss,), (F.ctc_loss.loss, F.ctc_loss_with_logits.loss))
    if suits(t, x)
]


@pytest.mark.parametrize(("definition", "transform"), WORKING)
@kernels
def test_transforms_work(definition: Any, transform: Transform) -> None:
    error = transform.outcome(Subject(definition, KERNELS))
    if error is not None:
        raise error

"""Margin losses of rows of scores, judged by torch's own test data: OpInfos and ModuleInfos."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import opinfo
import pytest
import torch
from devices import KERNELS
from grids import short_or_full
from torch import Tensor

import cupylosses.functional as F
from cupylosses import nn
from cupylosses.checks import FLOATING
from cupylosses.definition.registry import registry
from cupylosses.engines.row_margin.definition import MarginLoss
from cupylosses.testing import host
from cupylosses.testing.tolerance import same_bits

pytestmark = [pytest.mark.plain, pytest.mark.filterwarnings("ignore:.*size_average")]

TWINS = dict(registry(MarginLoss))
each_twin = pytest.mark.parametrize("definition", TWINS.values(), ids=list(TWINS))
devices = pytest.mark.parametrize("device", ["cpu", pytest.param(KERNELS, marks=pytest.mark.kernels, id="kernels")])

Arguments = dict[str, Any]


def twin(definition: MarginLoss) -> Callable[..., Tensor]:
    return getattr(torch.nn.functional, str(definition.torch))


def samples(definition: MarginLoss, device: str, dtype: torch.dtype) -> Iterator[Arguments]:
    """The arguments of torch's samples, by name."""
    info = opinfo.databases()[0][str(definition.torch)]
    for given in info.reference_inputs(device, dtype, requires_grad=False):
        values = (given.input, *given.args)
        yield dict(zip(inspect.signature(twin(definition)).parameters, values, strict=False)) | given.kwargs


def graded(function: Callable[..., Tensor], given: Arguments) -> tuple[Tensor, Tensor]:
    """The value, and the gradient of its weighted sum with respect to the scores."""
    leaf = given["input"].detach().clone().requires_grad_()
    value = function(**{**given, "input": leaf})
    upstream = torch.linspace(0.25, 1.25, value.numel(), dtype=torch.float64).reshape(value.shape).to(value)
    return value.detach(), torch.autograd.grad(value, leaf, upstream)[0]


def _floating(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def holds(ours: Callable[..., Tensor], theirs: Callable[..., Tensor], given: Arguments) -> None:
    """Checks value and gradient against torch's function in float64: torch has no 16-bit kernels on the CPU."""
    found = graded(ours, given)
    expected = graded(theirs, {n: x.cpu().double() if _floating(x) else _on_cpu(x) for n, x in given.items()})
    assert found[0].dtype == given["input"].dtype
    for a, b in zip(found, expected, strict=True):
        assert a.shape == b.shape
        # In float64, torch's own errors are no smaller, so the default tolerances apply.
        eps = {} if a.dtype == torch.float64 else dict.fromkeys(("rtol", "atol"), 4 * torch.finfo(a.dtype).eps)
        torch.testing.assert_close(a.double().cpu(), b, equal_nan=True, **eps)


def _on_cpu(x: Any) -> Any:
    return x.cpu() if isinstance(x, Tensor) else x


@each_twin
@devices
@pytest.mark.parametrize("dtype", FLOATING)
def test_functions(definition: MarginLoss, dtype: str, device: str) -> None:
    """Formulas run every sample; kernels run a few, because they are compiled for each setting."""
    found = list(samples(definition, device, getattr(torch, dtype)))
    assert found
    # Each dtype gets other samples.
    step = max(1, len(found) // (6 if dtype == "float32" else 2))
    some = found[FLOATING.index(dtype) :: step]
    for given in short_or_full(some if host.active() or device == "cuda" else found, found):
        single = given["input"].dim() == 1 and given["target"].shape == (1,) and given.get("reduction") == "none"
        if given["input"].dim() == 0 or (single and not definition.several):
            # Listed in docs/differences.md.
            with pytest.raises(ValueError, match=r"needs a class dimension|`target` must have the shape"):
                getattr(F, definition.name)(**given)
        else:
            holds(getattr(F, definition.name), twin(definition), given)


def modules(definition: MarginLoss) -> Iterator[tuple[torch.nn.Module, torch.nn.Module, Any, Any]]:
    """Our Module and torch's with the same arguments, the operands of a call, and torch's reference for it."""
    info = opinfo.databases()[1][definition.class_name]
    torch.manual_seed(0)
    for given in info.module_inputs_func(info, device="cpu", dtype=torch.float32, requires_grad=False, training=True):
        made = given.constructor_input
        pair = (cls(*made.args, **made.kwargs) for cls in (getattr(nn, definition.class_name), info.module_cls))
        yield *pair, given.forward_input.args, given.reference_fn


@each_twin
def test_modules(definition: MarginLoss) -> None:
    """Results, text, state and pickles match torch's Module."""
    for ours, theirs, operands, reference in modules(definition):
        value, expected = ours(*operands), theirs(*operands)
        torch.testing.assert_close(value, expected)
        if reference is not None:
            torch.testing.assert_close(value, reference(ours, *operands))
        assert isinstance(ours, type(theirs)) and repr(ours) == repr(theirs)
        back = pickle.loads(pickle.dumps(ours))
        assert type(back) is type(ours) and same_bits(back(*operands), value)
        assert ours.state_dict().keys() == theirs.state_dict().keys()


@each_twin
def test_errors(definition: MarginLoss) -> None:
    """Arguments that torch refuses are refused."""
    info = opinfo.databases()[0][str(definition.torch)]
    if info.error_inputs_func is None:
        pytest.skip("torch has no error inputs")
    for given in info.error_inputs("cpu"):
        sample = given.sample_input
        values = (sample.input, *sample.args)
        arguments = dict(zip(inspect.signature(twin(definition)).parameters, values, strict=False)) | sample.kwargs
        with pytest.raises((TypeError, ValueError, IndexError), match=f"^{definition.name}: "):
            getattr(F, definition.name)(**arguments)

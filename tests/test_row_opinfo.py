"""Row losses that torch has, too, on torch's own test data: OpInfos and ModuleInfos."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import opinfo
import pytest
import torch
from grids import short_or_full
from torch import Tensor

import cupylosses.functional as F
from cupylosses import nn
from cupylosses.checks import FLOATING
from cupylosses.definition.registry import registry
from cupylosses.engines.softmax.definition import SoftmaxLoss
from cupylosses.testing import host
from cupylosses.testing.tolerance import same_bits

pytestmark = [pytest.mark.plain, pytest.mark.filterwarnings("ignore:.*size_average")]

TWINS = {x.name: x for x in registry(SoftmaxLoss).values() if x.torch}
each_twin = pytest.mark.parametrize("row_loss", TWINS.values(), ids=list(TWINS))

Arguments = dict[str, Any]
T = TypeVar("T")


def twin(row_loss: SoftmaxLoss) -> Callable[..., Tensor]:
    return getattr(torch.nn.functional, str(row_loss.torch))


def samples(row_loss: SoftmaxLoss, device: str, dtype: torch.dtype) -> Iterator[Arguments]:
    """Yields the arguments of torch's samples, by name."""
    info = opinfo.databases()[0][str(row_loss.torch)]
    for given in info.reference_inputs(device, dtype, requires_grad=False):
        values = (given.input, *given.args)
        yield dict(zip(inspect.signature(twin(row_loss)).parameters, values)) | given.kwargs


def graded(function: Callable[..., Tensor], given: Arguments) -> tuple[Tensor, list[Tensor]]:
    """Returns the value, and the gradients of its weighted sum with respect to the floating operands."""
    leaves = {n: given[n].detach().clone().requires_grad_() for n in ("input", "target") if _floating(given[n])}
    value = function(**{**given, **leaves})
    upstream = torch.linspace(0.25, 1.25, value.numel(), dtype=torch.float64).reshape(value.shape).to(value)
    return value.detach(), list(torch.autograd.grad(value, list(leaves.values()), upstream))


def _floating(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def holds(ours: Callable[..., Tensor], theirs: Callable[..., Tensor], given: Arguments) -> None:
    """Asserts that dtype and shape match torch's result, and value and gradients torch's function in float64."""
    value, gradients = graded(ours, given)
    native = theirs(**given)
    assert (value.dtype, value.shape) == (native.dtype, native.shape)
    wide = {n: x.double() if _floating(x) else x for n, x in given.items()}
    expected, slopes = graded(theirs, wide)
    for found, exact in zip([value, *gradients], [expected, *slopes], strict=True):
        # In float64 torch's own errors are as large, so default tolerances apply.
        eps = {} if found.dtype == torch.float64 else dict.fromkeys(("rtol", "atol"), 4 * torch.finfo(found.dtype).eps)
        torch.testing.assert_close(found.double().cpu(), exact.cpu(), equal_nan=True, **eps)


@each_twin
@pytest.mark.parametrize("dtype", FLOATING)
def test_functions(row_loss: SoftmaxLoss, dtype: str, device: str) -> None:
    """Covers every sample, except that kernels, which are compiled for each setting, get only a few in each dtype other
    than float32, different ones per dtype.
    """
    found = list(samples(row_loss, device, getattr(torch, dtype)))
    assert found
    few = dtype != "float32" and (host.active() or device == "cuda")
    for given in short_or_full(found[FLOATING.index(dtype) :: 16] if few else found, found):
        holds(getattr(F, row_loss.name), twin(row_loss), given)


def few(inputs: Sequence[T]) -> Sequence[T]:
    """Returns some ModuleInputs, for kernels: a Module calls the function, which has more samples."""
    return short_or_full(inputs[::5], inputs)


def modules(row_loss: SoftmaxLoss, device: str) -> Iterator[tuple[torch.nn.Module, torch.nn.Module, Any, Any]]:
    """Yields our Module and torch's with the same arguments, the operands of a call, and torch's reference for it."""
    info = opinfo.databases()[1][row_loss.class_name]
    torch.manual_seed(0)
    every = info.module_inputs_func(info, device=device, dtype=torch.float32, requires_grad=False, training=True)
    for given in few(every) if device == "cuda" or host.active() else every:
        made = given.constructor_input
        pair = (
            cls(*made.args, **made.kwargs).to(device) for cls in (getattr(nn, row_loss.class_name), info.module_cls)
        )
        yield *pair, given.forward_input.args, given.reference_fn


@each_twin
def test_modules(row_loss: SoftmaxLoss, device: str) -> None:
    """Results, text, state and pickles match torch's Module."""
    for ours, theirs, operands, reference in modules(row_loss, device):
        value, expected = ours(*operands), theirs(*operands)
        torch.testing.assert_close(value, expected, equal_nan=True)
        if reference is not None:
            torch.testing.assert_close(value, reference(ours, *operands), equal_nan=True)
        assert isinstance(ours, type(theirs)) and repr(ours) == repr(theirs)
        back = pickle.loads(pickle.dumps(ours))
        assert type(back) is type(ours) and same_bits(back(*operands), value)
        assert ours.state_dict().keys() == theirs.state_dict().keys()
        assert all(same_bits(x, theirs.state_dict()[n]) for n, x in back.state_dict().items())


@each_twin
def test_errors_of_modules(row_loss: SoftmaxLoss) -> None:
    info = opinfo.databases()[1][row_loss.class_name]
    if info.module_error_inputs_func is None:
        pytest.skip("torch has no error inputs")
    options = {"device": "cpu", "dtype": torch.float32, "requires_grad": False, "training": True}
    found = info.module_error_inputs_func(info, **options)
    assert found
    for given in found:
        made, called = given.module_error_input.constructor_input, given.module_error_input.forward_input
        weight = made.kwargs.get("weight")
        if weight is not None and weight.dtype != called.args[0].dtype:
            continue  # Our losses allow mixed dtypes.
        with pytest.raises(opinfo.RAISED.get(given.error_type, given.error_type), match=f"^{row_loss.name}: "):
            getattr(nn, row_loss.class_name)(*made.args, **made.kwargs)(*called.args, **called.kwargs)


MISTAKES: dict[str, Callable[[Arguments], Arguments]] = {
    "fewer rows": lambda given: {"target": given["target"][:-1]},
    "another reduction": lambda given: {"reduction": "other"},
    "no tensor": lambda given: {"target": "1"},
    "labels that are no class": lambda given: {"target": torch.full_like(given["target"], given["input"].shape[1])},
    "integer logits": lambda given: {"input": given["input"].long()},
    "weights of another size": lambda given: {"weight": torch.ones(given["input"].shape[1] + 1)},
    "weights of another shape": lambda given: {"weight": torch.ones(given["input"].shape)},
}


@each_twin
@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_torch_refuses_is_refused(row_loss: SoftmaxLoss, mistake: str) -> None:
    found = (x for x in samples(row_loss, "cpu", torch.float32) if x["input"].dim() == 2 and not _floating(x["target"]))
    given = next(found)
    wrong = given | MISTAKES[mistake](given)
    with pytest.raises(Exception, match=r"\w"):
        twin(row_loss)(**wrong)
    with pytest.raises((TypeError, ValueError, IndexError), match=f"^{row_loss.name}: "):
        getattr(F, row_loss.name)(**wrong)


@pytest.mark.programs
@each_twin
@pytest.mark.parametrize(
    "spoil",
    [
        lambda value: 1.001 * value,
        lambda value: value.double() if value.dtype != torch.float64 else value.float(),
        lambda value: value + 0.01 * (value - value.detach()),
    ],
    ids=["value", "dtype", "gradient"],
)
def test_wrong_functions_are_caught(row_loss: SoftmaxLoss, spoil: Callable[[Tensor], Tensor]) -> None:
    def wrong(**arguments: Any) -> Tensor:
        return spoil(getattr(F, row_loss.name)(**arguments))

    def caught(given: Arguments) -> bool:
        try:
            holds(wrong, twin(row_loss), given)
        except AssertionError:
            return True
        return False

    assert any(map(caught, samples(row_loss, "cpu", torch.float32)))

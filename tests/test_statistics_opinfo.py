"""Losses and functions of row statistics with a torch counterpart, on torch's own OpInfos and ModuleInfos."""

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
from cupylosses.definition.registry import functions, registry
from cupylosses.engines.row_statistics.definition import StatisticsLoss
from cupylosses.testing import host
from cupylosses.testing.tolerance import same_bits

pytestmark = pytest.mark.filterwarnings("ignore:.*size_average", "ignore:.*broadcast")

KNOWN = (*registry(StatisticsLoss).values(), *(x for x in functions().values() if isinstance(x, StatisticsLoss)))
TWINS = {x.name: x for x in KNOWN if x.torch}
each_twin = pytest.mark.parametrize("definition", TWINS.values(), ids=list(TWINS))
#: Modules for which torch has no data.
WITHOUT_DATA = {"TripletMarginLoss", "TripletMarginWithDistanceLoss"}
MODULES = {name: x for name, x in TWINS.items() if x.module and x.module not in WITHOUT_DATA}
each_module = pytest.mark.parametrize("definition", MODULES.values(), ids=list(MODULES))
devices = pytest.mark.parametrize("device", ["cpu", pytest.param(KERNELS, marks=pytest.mark.kernels, id="kernels")])

Arguments = dict[str, Any]
#: Error messages of functions that reject some of torch's samples.
REFUSED = {"cosine_similarity": "needs a dimension of features", "pairwise_distance": "`p` must be a number > 0"}
#: Parameters of torch's built-in functions, which have no signature.
PARAMETERS = {"cosine_similarity": ("x1", "x2", "dim", "eps"), "pairwise_distance": ("x1", "x2", "p", "eps", "keepdim")}


def twin(definition: StatisticsLoss) -> Callable[..., Tensor]:
    return getattr(torch.nn.functional, str(definition.torch))


def named(definition: StatisticsLoss, given: Any) -> Arguments:
    """Returns the arguments of a sample by name."""
    known = PARAMETERS.get(definition.name) or tuple(inspect.signature(twin(definition)).parameters)
    return dict(zip(known, (given.input, *given.args), strict=False)) | given.kwargs


def samples(definition: StatisticsLoss, device: str, dtype: torch.dtype) -> Iterator[Arguments]:
    info = opinfo.databases()[0][str(definition.torch)]
    if dtype in info.supported_dtypes(torch.device(device).type):
        for given in info.reference_inputs(device, dtype, requires_grad=False):
            yield named(definition, given)


def graded(function: Callable[..., Tensor], given: Arguments) -> tuple[Tensor, list[Tensor]]:
    """Returns the value, and the gradients of its weighted sum with respect to the floating vectors."""
    leaves = {n: x.detach().clone().requires_grad_() for n, x in given.items() if n != "target" and _floating(x)}
    value = function(**{**given, **leaves})
    upstream = torch.linspace(0.25, 1.25, value.numel(), dtype=torch.float64).reshape(value.shape).to(value)
    return value.detach(), list(torch.autograd.grad(value, list(leaves.values()), upstream))


def _floating(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def holds(ours: Callable[..., Tensor], theirs: Callable[..., Tensor], given: Arguments) -> None:
    """Dtype and shape match torch's result; value and gradients match torch's function in float64."""
    value, gradients = graded(ours, given)
    native = theirs(**given)
    assert (value.dtype, value.shape) == (native.dtype, native.shape)
    wide = {n: x.double() if _floating(x) else x for n, x in given.items()}
    expected, slopes = graded(theirs, wide)
    for found, exact in zip([value, *gradients], [expected, *slopes], strict=True):
        # The default tolerances apply in float64, where torch's own errors are no smaller.
        eps = {} if found.dtype == torch.float64 else dict.fromkeys(("rtol", "atol"), 4 * torch.finfo(found.dtype).eps)
        torch.testing.assert_close(found.double().cpu(), exact.cpu(), equal_nan=True, **eps)


def refused(given: Arguments) -> bool:
    """True if our function raises: samples without a feature dimension, or with a degree that defines no distance."""
    return given.get("p", 1.0) <= 0 or any(x.dim() == 0 for x in given.values() if isinstance(x, Tensor))


def is_known_difference(definition: StatisticsLoss, given: Arguments) -> bool:
    """True for samples that docs/differences.md lists: broadcast vectors, which have the broadcast length here."""
    shapes = {tuple(x.shape) for n, x in given.items() if isinstance(x, Tensor) and n != "target"}
    return definition.name == "cosine_embedding_loss" and len(shapes) > 1


@pytest.mark.plain
@each_twin
@devices
@pytest.mark.parametrize("dtype", FLOATING)
def test_functions(definition: StatisticsLoss, dtype: str, device: str) -> None:
    """Checks every sample by the formula, but few in kernels, which are compiled again for each setting."""
    found = [x for x in samples(definition, device, getattr(torch, dtype)) if not is_known_difference(definition, x)]
    if not found:
        pytest.skip(f"torch has no samples of {dtype}")
    few = host.active() or device == "cuda"
    for given in short_or_full(
        found[FLOATING.index(dtype) :: 8 if dtype == "float32" else 16] if few else found, found
    ):
        if definition.name in REFUSED and refused(given):
            with pytest.raises(ValueError, match=REFUSED[definition.name]):
                getattr(F, definition.name)(**given)
        else:
            holds(getattr(F, definition.name), twin(definition), given)


def modules(definition: StatisticsLoss, device: str) -> Iterator[tuple[torch.nn.Module, torch.nn.Module, Any, Any]]:
    """Yields our Module and torch's, made alike, with the operands of a call and torch's reference for it."""
    info = opinfo.databases()[1][definition.class_name]
    torch.manual_seed(0)
    for given in info.module_inputs_func(info, device=device, dtype=torch.float32, requires_grad=False, training=True):
        made = given.constructor_input
        pair = (
            cls(*made.args, **made.kwargs).to(device) for cls in (getattr(nn, definition.class_name), info.module_cls)
        )
        yield *pair, given.forward_input.args, given.reference_fn


def test_modules_without_data() -> None:
    operators, classes = opinfo.databases()
    assert {x.module for x in TWINS.values() if x.module and x.module not in classes} == WITHOUT_DATA
    assert all(x.torch in operators for x in TWINS.values())


@pytest.mark.parametrize("name", sorted(WITHOUT_DATA))
def test_modules_with_their_constructors(name: str) -> None:
    vectors = [torch.randn(4, 6, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    for options in ({}, {"margin": 0.5, "swap": True, "reduction": "sum"}):
        ours, theirs = (getattr(x, name)(**options) for x in (nn, torch.nn))
        torch.testing.assert_close(ours(*vectors), theirs(*vectors))
        assert isinstance(ours, type(theirs)) and repr(ours) == repr(theirs)
        assert same_bits(pickle.loads(pickle.dumps(ours))(*vectors), ours(*vectors))


@each_module
def test_modules(definition: StatisticsLoss) -> None:
    """Results, text, state and pickles match torch's Module."""
    for ours, theirs, operands, reference in modules(definition, "cpu"):
        value, expected = ours(*operands), theirs(*operands)
        torch.testing.assert_close(value, expected, equal_nan=True)
        if reference is not None:
            torch.testing.assert_close(value, reference(ours, *operands), equal_nan=True)
        assert isinstance(ours, type(theirs)) and repr(ours) == repr(theirs)
        back = pickle.loads(pickle.dumps(ours))
        assert type(back) is type(ours) and same_bits(back(*operands), value)


@each_twin
def test_errors(definition: StatisticsLoss) -> None:
    """Inputs that torch rejects are rejected here, except for shapes that broadcast."""
    info = opinfo.databases()[0][str(definition.torch)]
    if info.error_inputs_func is None:
        pytest.skip("torch has no error inputs")
    for given in info.error_inputs("cpu"):
        arguments = named(definition, given.sample_input)
        ranks = {x.dim() for x in arguments.values() if isinstance(x, Tensor)}
        if definition.name in ("triplet_margin_loss", "cosine_embedding_loss") and len(ranks) > 1:
            continue
        with pytest.raises((TypeError, ValueError), match=f"^{definition.name}: "):
            getattr(F, definition.name)(**arguments)

"""PyTorch's test data for its own losses, and the comparison of our functions with torch's on that data.

An OpInfo and a ModuleInfo are found by the names of a definition's torch counterparts, so a new loss is tested without
a new line. Each intentional difference is a row of :data:`DIFFERENCES`.
"""

from __future__ import annotations

import copy
import inspect
import pickle
import random
import sys
import unittest
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice
from math import prod
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from grids import REPRESENTATIVES, thorough
from hypothesis import settings
from torch import Tensor

import cupylosses.functional as F
from cupylosses import nn
from cupylosses.engines.pointwise.definition import Loss
from cupylosses.testing import host
from cupylosses.testing.pointwise.truth import truth
from cupylosses.testing.tolerance import SUMMED_BY_TORCH, Expected, compare, same_bits
from cupylosses.testing.truth import common_shape, flushes, runs_kernels

Function = Callable[..., Tensor]

#: Losses for whose torch counterparts torch has no OpInfo or no ModuleInfo, each with the reason.
WITHOUT_DATA: dict[str, str] = {}

#: Arguments whose effect torch's samples do not exercise, each with the reason.
UNSEEN = {("gaussian_nll_loss", "eps"): "All variances are larger."}

#: Losses that are NaN for a label of 0, which torch's data contains.
ZERO_IS_NO_LABEL = {"soft_margin_loss", "hinge_embedding_loss"}

#: Deprecated arguments, their values, and the reductions that they mean.
LEGACY = (("size_average", False, "sum"), ("reduce", False, "none"))

#: Our exception for each of torch's: bad shapes and values raise ValueError, bad types TypeError.
RAISED: dict[type[Exception], type[Exception]] = {RuntimeError: ValueError, AttributeError: TypeError}


def _seed(seed: int = 1234) -> None:
    """Seeds the generators of the CPU; torch's tests seed those of all devices before each sample."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed)


@cache
def databases() -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Returns OpInfos by function name, and ModuleInfos by class name."""
    # torch's TestCase derives from a class of expecttest, which the test data does not need.
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "expecttest", SimpleNamespace(TestCase=unittest.TestCase))
        from torch.testing._internal import common_utils
        from torch.testing._internal.common_methods_invocations import op_db
        from torch.testing._internal.common_modules import module_db
        from torch.testing._internal.opinfo import core
    for module in (common_utils, core):
        # The original looks for a TestCase in every frame of the stack, which takes longer than drawing the samples.
        setattr(module, "extract_test_fn", lambda: None)  # noqa: B010 -- mypy knows it as a function
    if not torch.cuda.is_available():
        # torch.manual_seed, called before each sample, formats a traceback for each absent kind of device: a third of
        # the time of these tests.
        common_utils.set_rng_seed = _seed
    # The import changes these for the whole process.
    settings.load_profile("cupylosses")
    torch.backends.__allow_nonbracketed_mutation_flag = True
    of_functions = [x for x in op_db if x.name.startswith("nn.functional.") and not x.variant_test_name]
    operators = {x.name.removeprefix("nn.functional."): x for x in of_functions}
    return operators, {x.module_cls.__name__: x for x in module_db}


# ----------------------------------------------------------------------------------------------------------------------
# Samples


@dataclass(frozen=True)
class Sample:
    """Call of a loss: its arguments by name, of which the first ``positional`` ones are passed by position.

    Gradients are taken with respect to the floating tensors among ``operands``, or among all arguments if it is None. A
    tensor that requires grad is one for which torch's data claims a gradient.
    """

    loss: Loss
    arguments: Mapping[str, Any]
    positional: int = 0
    operands: tuple[str, ...] | None = None
    kind: str = "as given"

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors among the arguments."""
        return {name: x for name, x in self.arguments.items() if isinstance(x, Tensor)}

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the first tensor."""
        return next(iter(self.tensors.values())).dtype

    @property
    def differentiated(self) -> dict[str, Tensor]:
        """The tensors with respect to which gradients are taken."""
        return {n: x for n, x in self.tensors.items() if x.is_floating_point() and n in (self.operands or self.tensors)}

    @property
    def has_torchs_tensors(self) -> bool:
        """True if torch's own tensors are unchanged."""
        return self.kind == "as given" or self.kind.startswith("with ")

    @property
    def reduction(self) -> str:
        """The requested reduction, under its present or a deprecated name."""
        legacy = [meaning for name, value, meaning in LEGACY if self.arguments.get(name) is value]
        return legacy[0] if legacy else self.arguments.get("reduction", "mean")

    def call(self, function: Callable[..., Any], **tensors: Any) -> Any:
        """Calls the function, with replacements for some of the tensors."""
        given = list({**self.arguments, **tensors}.items())
        return function(*(x for _, x in given[: self.positional]), **dict(given[self.positional :]))

    def change(self, kind: str, **changes: Callable[[Tensor], Tensor]) -> Sample:
        """The sample with some of its tensors changed; they require grad as before."""
        with torch.no_grad():
            changed = {name: change(self.tensors[name]) for name, change in changes.items()}
        for name, x in changed.items():
            x.requires_grad_(self.tensors[name].requires_grad)
        return replace(self, arguments={**self.arguments, **changed}, kind=kind)

    def __str__(self) -> str:
        said = (f"{n}={tuple(x.shape)}" if isinstance(x, Tensor) else f"{n}={x}" for n, x in self.arguments.items())
        return f"{self.loss.name}({', '.join(said)}), {self.kind}, {self.dtype}"


def twin(loss: Loss) -> Function:
    """Returns torch's function."""
    return getattr(torch.nn.functional, str(loss.torch))


def needed(loss: Loss) -> tuple[str, ...]:
    """Returns the names of the operands without a default."""
    return tuple(x.name for x in loss.operands if x.default is None)


def samples(loss: Loss, device: str, dtype: torch.dtype) -> Iterator[Sample]:
    """Yields the samples of the OpInfo, and in float32 their variants.

    Without ``--thorough``, kernels run few samples, since each has to be compiled, and the formula runs one sample in
    three of dtypes other than float32. There are no samples of a dtype that torch's function does not support.
    """
    found = _samples(loss, device, dtype)
    if thorough():
        return found
    if not (host.active() or device == "cuda"):
        return found if dtype == torch.float32 else islice(found, 0, None, 3)
    # The layout of tensors does not depend on the loss.
    return (x for x in few(found) if x.has_torchs_tensors or loss in REPRESENTATIVES)


def _samples(loss: Loss, device: str, dtype: torch.dtype) -> Iterator[Sample]:
    # Cached on the CPU, since many tests use the float32 samples.
    return iter(_drawn(loss, device, dtype)) if device == "cpu" else _draw(loss, device, dtype)


@cache
def _drawn(loss: Loss, device: str, dtype: torch.dtype) -> tuple[Sample, ...]:
    return tuple(_draw(loss, device, dtype))


def _draw(loss: Loss, device: str, dtype: torch.dtype) -> Iterator[Sample]:
    info = databases()[0][str(loss.torch)]
    if dtype not in info.supported_dtypes(torch.device(device).type):
        return
    for given in info.reference_inputs(device, dtype, requires_grad=dtype.is_floating_point or dtype.is_complex):
        sample = as_sample(loss, given)
        yield sample
        if dtype == torch.float32:
            yield from variants(sample)


def as_sample(loss: Loss, given: Any) -> Sample:
    """Converts torch's SampleInput."""
    values = (given.input, *given.args)
    sample = Sample(loss, dict(zip(inspect.signature(twin(loss)).parameters, values)) | given.kwargs, len(values))
    # torch's generators continue to write into some tensors that they have yielded.
    return sample.change(sample.kind, **dict.fromkeys(sample.tensors, Tensor.clone))


def variants(sample: Sample) -> Iterator[Sample]:
    """Yields variants that torch's data leaves out."""
    from torch.testing._internal.common_utils import noncontiguous_like

    first, *others = sample.tensors
    shapes = {x.shape for x in sample.tensors.values()}
    if shapes != {()}:
        yield sample.change("noncontiguous", **dict.fromkeys(sample.tensors, noncontiguous_like))
    if len(shapes) == 1 and shapes != {()}:
        yield sample.change(f"broadcast {first}", **{first: lambda x: x[:1].clone()})
        yield sample.change("broadcast others", **dict.fromkeys(others, lambda x: x[:1].clone()))
    if sample.loss.torch in ZERO_IS_NO_LABEL and not any(x.isnan().any() for x in sample.tensors.values()):
        yield sample.change("label of 0", target=lambda x: torch.where(torch.ones_like(x).cumsum(0) == 1, 0, x))
    known = inspect.signature(twin(sample.loss)).parameters
    if "weight" in known and "weight" not in sample.arguments and sample.differentiated.keys() == sample.tensors.keys():
        weight = torch.rand_like(sample.tensors[first], requires_grad=False)
        yield replace(sample, arguments={**sample.arguments, "weight": weight}, kind="weighted")
    rest = {name: x for name, x in sample.arguments.items() if name != "reduction"}
    for name, value, instead_of in (*LEGACY, ("reduction", "sum", None), ("reduction", "none", None)):
        if name in known and sample.arguments.get("reduction") in (None, instead_of):
            yield replace(sample, arguments={**rest, name: value}, kind=f"with {name}")


def few(found: Iterator[Sample]) -> Iterator[Sample]:
    """Selects, among matrices and larger, each reduction, choice of flags and way to change the tensors once."""
    seen: set[Any] = set()
    for sample in found:
        key = {sample.kind.split()[0]}
        if sample.has_torchs_tensors:
            key = {sample.reduction, tuple(x for x in sample.arguments.values() if isinstance(x, bool))}
        if min(x.dim() for x in sample.tensors.values()) > 1 and not key <= seen:
            seen |= key
            yield sample


def errors(loss: Loss, device: str) -> Iterator[tuple[type[Exception], Sample]]:
    """Yields torch's exceptions for the error inputs of the OpInfo, and for mistakes that apply to any loss."""
    info = databases()[0][str(loss.torch)]
    for given in info.error_inputs(device) if info.error_inputs_func else ():
        yield given.error_type, as_sample(loss, given.sample_input)
    usual = next(few(_samples(loss, device, torch.float32)))
    last = needed(loss)[-1]
    longer = usual.change("another shape", **{last: lambda x: torch.cat([x, x], -1)})
    changes = {"another reduction": {"reduction": "other"}, "no tensor": {last: "1"}}
    for sample in (longer, *(replace(usual, arguments={**usual.arguments, **x}, kind=k) for k, x in changes.items())):
        try:
            sample.call(twin(loss))
        except Exception as error:
            yield type(error), sample
        else:
            raise AssertionError(f"{sample}: torch raises nothing")


@dataclass(frozen=True)
class Modules:
    """The Modules that a ModuleInput makes, ours and torch's, and the equivalent call of the loss."""

    given: Any
    ours: torch.nn.Module
    theirs: torch.nn.Module
    sample: Sample


def modules(loss: Loss, device: str, dtype: torch.dtype) -> Iterator[Modules]:
    """Yields the ModuleInputs of the ModuleInfo; only the first for kernels, which Modules share with the functions."""
    info = databases()[1][loss.class_name]
    torch.manual_seed(0)
    options = {"device": device, "dtype": dtype, "requires_grad": False, "training": True}
    few = (host.active() or device == "cuda") and not thorough()
    for given in info.module_inputs_func(info, **options)[: 1 if few else None]:
        made = given.constructor_input
        ours, theirs = (x(*made.args, **made.kwargs) for x in (getattr(nn, loss.class_name), info.module_cls))
        operands = needed(loss)
        known = inspect.signature(twin(loss)).parameters
        kept = {n: getattr(theirs, n) for n in loss.kept if n in known and hasattr(theirs, n)}
        arguments = dict(zip(operands, given.forward_input.args, strict=True)) | kept
        yield Modules(given, ours, theirs, Sample(loss, arguments, 0, operands, f"module {given.desc}"))


def through(module: torch.nn.Module, sample: Sample) -> Function:
    """Makes a Module a function of the loss's arguments, in the dtype and on the device of the first operand."""
    assert sample.operands is not None

    def function(**arguments: Any) -> Tensor:
        operands = [arguments[name] for name in sample.operands]
        return copy.deepcopy(module).to(operands[0])(*operands)

    return function


# ----------------------------------------------------------------------------------------------------------------------
# Known differences


@dataclass(frozen=True)
class Difference:
    """Samples whose result differs from torch's. The reason quotes docs/differences.md, word for word.

    Every such sample must fail the check. ``instead`` changes torch's function to the intended behaviour, and the check
    must then pass; the changed function always gets the reduction explicitly. Without ``instead``, ours must raise
    ``raises``.
    """

    losses: tuple[str, ...]
    where: Callable[[Sample], bool]
    reason: str
    instead: Callable[[Function], Function] | None = None
    raises: type[Exception] = AssertionError

    def concerns(self, sample: Sample) -> bool:
        """True if the result of the sample differs from torch's for this reason."""
        return sample.loss.name in self.losses and self.where(sample)


def told(function: Function, reduction: str) -> Function:
    """Wraps a function so that it gets the reduction under its present name."""

    def modern(*operands: Tensor, **options: Any) -> Tensor:
        for name, _, _ in LEGACY:
            options.pop(name, None)
        return function(*operands, **options | {"reduction": reduction})

    return modern


def expanded(theirs: Function) -> Function:
    """Wraps torch's function: operands are broadcast beforehand."""

    def function(*operands: Tensor, **options: Any) -> Tensor:
        return theirs(*torch.broadcast_tensors(*operands), **options)

    return function


def nan_gradients(theirs: Function) -> Function:
    """Wraps torch's function: gradients are NaN wherever an element is NaN."""

    def function(*operands: Any, **options: Any) -> Tensor:
        elements = theirs(*operands, **options | {"reduction": "none"})
        bad, zero = elements.isnan(), torch.zeros_like(elements)
        reached = sum(torch.where(bad, x, zero) for x in (*operands, *options.values()) if isinstance(x, Tensor))
        return reduced(elements + reached * torch.where(bad, elements.detach(), zero), options)

    return function


def reduced(elements: Tensor, options: Mapping[str, Any]) -> Tensor:
    """Reduces elements as a call requests."""
    reductions = {"none": lambda x: x, "mean": Tensor.mean, "sum": Tensor.sum}
    reductions["batchmean"] = lambda x: x.sum() / (x.shape[0] if x.dim() else 1)
    return reductions[options["reduction"]](elements)


def inactive_replaced(theirs: Function) -> Function:
    """Wraps torch's function: operands are 0 where an element is 0, so that no gradient multiplies their infinities."""

    def function(*operands: Tensor, **options: Any) -> Tensor:
        elementwise = options | {"reduction": "none"}
        inactive = theirs(*operands, **elementwise) == 0
        used = theirs(*(torch.where(inactive, 0.0, x) for x in operands), **elementwise)
        return reduced(torch.where(inactive, 0.0, used), options)

    return function


def stirling_apart(theirs: Function) -> Function:
    """Wraps torch's Poisson loss: Stirling's formula applies only to targets above 1."""

    def function(input: Tensor, target: Tensor, **options: Any) -> Tensor:
        elementwise = options | {"reduction": "none"}
        large = target > 1
        full = theirs(input, torch.where(large, target, 2.0), **elementwise)
        return reduced(torch.where(large, full, theirs(input, target, **elementwise | {"full": False})), options)

    return function


def nan_of_zero(theirs: Function) -> Function:
    """Wraps torch's function: elements with a label of 0 are NaN."""

    def function(input: Tensor, target: Tensor, **options: Any) -> Tensor:
        elements = theirs(input, target, **options | {"reduction": "none"})
        bad = target == 0
        return reduced(torch.where(bad, torch.where(bad, input + target, 0.0) * torch.nan, elements), options)

    return function


def signs(theirs: Function) -> Function:
    """Wraps torch's function: it sees only the signs of the labels."""
    return nan_of_zero(lambda input, target, **options: theirs(input, target.sign(), **options))


def shapes_differ(sample: Sample) -> bool:
    """True if the operands have different shapes."""
    return len({sample.tensors[name].shape for name in needed(sample.loss)}) > 1


def inactive_at_infinity(sample: Sample) -> bool:
    """True if some pair of scores costs nothing although the scores are infinitely far apart."""
    first, second, target = (sample.tensors[name].detach().double() for name in needed(sample.loss))
    apart = first - second
    return bool((apart.isinf() & (target * apart > 0)).any())


def stirling_of_nothing(sample: Sample) -> bool:
    """True if torch takes the logarithm of a target of 0, and then discards it."""
    target = sample.tensors["target"]
    return target.is_floating_point() and bool(sample.arguments.get("full")) and bool((target == 0).any())


def loses_nan(sample: Sample) -> bool:
    """True if an element is NaN but one of torch's gradients is not."""
    theirs, sample = twin(sample.loss), sample.change(sample.kind, **dict.fromkeys(sample.tensors, _double))
    ones, honestly = torch.ones_like(sample.call(theirs)), told(nan_gradients(theirs), sample.reduction)
    for name in sample.differentiated:
        found, honest = (torch_gradient(f, sample, name, ones) for f in (theirs, honestly))
        if found is not None and honest is not None and not torch.equal(found.isnan(), honest.isnan()):
            return True
    return False


DIFFERENCES = (
    Difference(
        ("binary_cross_entropy", "binary_cross_entropy_with_logits"),
        shapes_differ,
        "`binary_cross_entropy` and `binary_cross_entropy_with_logits` broadcast their operands; torch raises.",
        expanded,
    ),
    Difference(
        ("soft_margin_loss", "gaussian_nll_loss"),
        lambda s: s.kind == "broadcast input",
        "Operands of different shapes broadcast, whichever of them has the dimensions.",
        expanded,
    ),
    Difference(
        ("multilabel_soft_margin_loss",),
        lambda s: s.tensors["input"].shape[-1:] < s.tensors["target"].shape[-1:],
        "averages over the classes of the broadcast shape; torch divides by those of `input`.",
        expanded,
    ),
    Difference(
        ("poisson_nll_loss", "margin_ranking_loss"),
        lambda s: not any(x.is_floating_point() for x in s.tensors.values()),
        "at least one operand must be floating",
        raises=TypeError,
    ),
    Difference(
        ("poisson_nll_loss",),
        stirling_of_nothing,
        "With `full=True`, torch's derivative with respect to a target of 0 is NaN; here it is that of the",
        stirling_apart,
    ),
    Difference(
        ("soft_margin_loss",),
        lambda s: bool((s.tensors["target"] == 0).any()),
        "`soft_margin_loss` and `hinge_embedding_loss` are NaN for a label of 0",
        nan_of_zero,
    ),
    Difference(
        ("hinge_embedding_loss",),
        lambda s: bool((s.tensors["target"].abs() != 1).any()),
        "`hinge_embedding_loss` uses only the sign of a label; torch returns that sum for every label other than",
        signs,
    ),
    Difference(
        ("margin_ranking_loss",),
        inactive_at_infinity,
        "a pair that costs nothing has gradient 0, even where a score is infinite",
        inactive_replaced,
    ),
    Difference(
        ("l1_loss",),
        lambda s: any(x.is_complex() for x in s.tensors.values()),
        "Complex tensors are refused; torch's `l1_loss` takes them.",
        raises=TypeError,
    ),
    Difference(
        ("kl_div",),
        lambda s: s.kind == "broadcast input" and s.reduction == "batchmean",
        "`batchmean` divides by the first dimension of the **broadcast** shape; torch's `kl_div` divides by that of",
        expanded,
    ),
    Difference(
        ("kl_div", "hinge_embedding_loss", "margin_ranking_loss"),
        loses_nan,
        "**Where a loss is NaN, its gradient is NaN**, for every operand.",
        nan_gradients,
    ),
)


def difference(sample: Sample) -> Difference | None:
    """Returns the difference that concerns a sample, if there is one."""
    found = [x for x in DIFFERENCES if x.concerns(sample)]
    assert len(found) <= 1, f"{sample}: {len(found)} differences"
    return found[0] if found else None


def model(sample: Sample) -> Function | None:
    """Returns the function that ours must agree with: torch's, or its changed version; None if ours must raise."""
    known, theirs = difference(sample), twin(sample.loss)
    return theirs if known is None else known.instead and told(known.instead(theirs), sample.reduction)


def holds(ours: Function, theirs: Function, sample: Sample) -> None:
    """Ours must agree with torch's function, except for known differences, which must differ."""
    known = difference(sample)
    if known is None:
        agrees(ours, theirs, sample)
        return
    with pytest.raises(known.raises):
        agrees(ours, theirs, sample)
    if instead := model(sample):
        agrees(ours, instead, sample)


# ----------------------------------------------------------------------------------------------------------------------
# The check


def agrees(ours: Function, theirs: Function, sample: Sample) -> None:
    """Checks that dtype and shape match torch's result, and value and gradients torch's function in float64.

    Where torch has no gradient, that of the reference formula is expected.
    """
    try:
        native = sample.call(theirs)
    except (RuntimeError, ValueError) as error:
        raise AssertionError(f"{sample}: torch refuses it: {error}") from error
    leaves = {name: x.detach().requires_grad_() for name, x in sample.differentiated.items()}
    value = sample.call(ours, **leaves)
    got, expected = (value.dtype, value.shape), (native.dtype, native.shape)
    assert got == expected, f"{sample}: the result is {got}, not {expected}"
    # At least 1/4: a gradient times 0 proves nothing.
    upstream = (torch.rand(native.shape, dtype=torch.float64) + 0.25).to(native)
    found = torch.autograd.grad(value, list(leaves.values()), upstream, allow_unused=True)
    gradients = dict(zip(leaves, found, strict=True))
    assert None not in found, f"{sample}: no gradient of {[name for name, x in gradients.items() if x is None]}"

    upstream = upstream.cpu().double()
    double = sample.change(sample.kind, **dict.fromkeys(sample.tensors, _double))
    call = sample.call(getattr(F, sample.loss.name).prepare)
    # Operands have the shapes that the loss sees: a variance with one dimension fewer belongs to the rows.
    operands = {x.name: sample.tensors[x.name].detach() for x in call.loss.operands}
    operands = {name: x.reshape(y.shape) for (name, x), y in zip(operands.items(), call.arrays, strict=False)}
    sizes = truth(
        call.loss,
        [x.cpu() for x in operands.values()],
        call.loss.bind(call.scalars, call.static.flags),
        call.static.kind,
        upstream,
        [name in leaves for name in operands],
        flush=flushes(list(operands.values())),
    )
    _close(f"{sample}: value", value, double.call(theirs).detach(), sizes.value)
    elements = prod(common_shape(list(operands.values())))
    for (name, x), size in zip(operands.items(), sizes.gradients, strict=True):
        if size is not None:
            exact = torch_gradient(theirs, double, name, upstream)
            bias = SUMMED_BY_TORCH if x.numel() < elements and not runs_kernels(x) else None
            found = gradients[name].reshape(x.shape)
            exact = size.exact if exact is None else exact.reshape(x.shape)
            _close(f"{sample}: gradient of {name}", found, exact, size, bias)


def module_holds(ours: torch.nn.Module, made: Modules) -> None:
    """Checks that a Module computes the result of torch's Module, and of torch's reference for it."""
    holds(through(ours, made.sample), through(made.theirs, made.sample), made.sample)
    operands = made.given.forward_input.args
    expected = made.given.reference_fn(ours, *operands)
    torch.testing.assert_close(ours(*operands), expected, equal_nan=True, msg=lambda x: f"{made.sample}: {x}")


def is_torchs_module(ours: torch.nn.Module, made: Modules) -> None:
    """Checks that a Module can replace torch's: class, text and state match, and it survives a pickle."""
    assert isinstance(ours, type(made.theirs))
    assert repr(ours) == repr(made.theirs)
    back = pickle.loads(pickle.dumps(ours))
    assert type(back) is type(ours)
    for module in (ours, back):
        found, expected = module.state_dict(), made.theirs.state_dict()
        assert found.keys() == expected.keys()
        assert all(same_bits(found[name], expected[name]) for name in expected)
    operands = made.given.forward_input.args
    assert same_bits(back(*operands), ours(*operands))


def torch_gradient(theirs: Function, sample: Sample, name: str, upstream: Tensor) -> Tensor | None:
    """Returns torch's gradient with respect to an argument; None if torch has none, and its data claims none."""
    leaf = sample.tensors[name].detach().requires_grad_()
    try:
        value = sample.call(theirs, **{name: leaf})
        return torch.autograd.grad(value, leaf, upstream, materialize_grads=True)[0]
    except RuntimeError:
        if sample.tensors[name].requires_grad:
            raise
        return None


def _double(x: Tensor) -> Tensor:
    return x.detach().cpu().double() if x.is_floating_point() else x.detach().cpu()


def _close(what: str, found: Tensor, exact: Tensor, size: Expected, bias: float | None = None) -> None:
    found = found.detach().cpu()
    if found.dtype == torch.float64:
        # The default tolerances apply in float64, where torch's own errors are no smaller.
        torch.testing.assert_close(found, exact, equal_nan=True, msg=lambda x: f"{what}: {x}")
        return
    comparison = compare(found, Expected(exact, size.rms, size.total), bias=bias)
    assert comparison.ok, f"{what}: {comparison}"

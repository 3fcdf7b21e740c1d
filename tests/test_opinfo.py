"""Every loss that torch has, judged by torch's own test data: OpInfos and ModuleInfos.

Without ``--thorough``, reference formulas get all samples in float32 and a third of them in every other dtype; kernels
get a part in float32, and on a GPU in one more dtype. ``test_functions`` takes every third of these, except those of
kernels in float32.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from itertools import chain, islice, permutations
from typing import Any

import opinfo
import pytest
import torch
from checkout import ROOT
from devices import KERNELS
from grids import in_turn, short_or_full
from opinfo import Sample, few, modules, samples, twin
from test_wrong_losses import assumes_contiguity, divides_half_way, gradient, loses_the_tail, sums_one_row, value

import cupylosses.functional as F
from cupylosses import nn
from cupylosses.build import function_of
from cupylosses.checks import FLOATING
from cupylosses.definition.registry import registry
from cupylosses.engines.pointwise.definition import Loss
from cupylosses.testing import host
from cupylosses.testing.tolerance import dtype_name

pytestmark = [
    pytest.mark.plain,
    pytest.mark.filterwarnings("ignore:.*broadcast", "ignore:.*size_average", "ignore:Using a target size"),
]

#: Text of docs/differences.md, in one line.
DIFFERENCES = " ".join((ROOT / "docs" / "differences.md").read_text(encoding="utf-8").split())

TWINS = {x.name: x for x in registry(Loss).values() if x.torch}

#: Every definition with a counterpart in torch.
each_twin = pytest.mark.parametrize("loss", TWINS.values(), ids=TWINS)

#: "others" are integers and complex numbers.
DTYPES = (*FLOATING, "others")


def everywhere(*dtypes: str) -> Any:
    """Parametrizes a test over every loss: formulas in these dtypes, kernels in float32, GPUs in the others in turn.

    The arithmetic of each formula in each dtype is tested in test_formulas.py.
    """
    twins, others = list(TWINS.values()), [x for x in dtypes if x != "float32"]
    cases = [
        *(pytest.param(x, "cpu", dtype, id=f"reference-{dtype}-{x.name}") for dtype in dtypes for x in twins),
        *(pytest.param(x, KERNELS, "float32", id=f"kernels-{x.name}", marks=pytest.mark.kernels) for x in twins),
        *(
            pytest.param(x, "cuda", dtype, id=f"cuda-{dtype}-{x.name}", marks=pytest.mark.gpu)
            for x, dtype in in_turn(twins, others)
        ),
    ]
    return lambda test: pytest.mark.every_loss(pytest.mark.parametrize(("loss", "device", "dtype"), cases)(test))


def given(loss: Loss, device: str, dtype: str = "float32") -> Iterator[Sample]:
    """The samples of a dtype, or of all non-floating ones."""
    if dtype != "others":
        return samples(loss, device, getattr(torch, dtype))
    every = opinfo.databases()[0][str(loss.torch)].supported_dtypes(device)
    others = sorted((x for x in every if dtype_name(x) not in FLOATING), key=str)
    return (sample for x in others for sample in samples(loss, device, x))


def test_torch_has_data() -> None:
    operators, classes = opinfo.databases()
    without = {x.name for x in TWINS.values() if x.torch not in operators or x.module not in classes}
    assert without == set(opinfo.WITHOUT_DATA)


@everywhere(*DTYPES)
def test_functions(loss: Loss, device: str, dtype: str) -> None:
    by_formula = device == "cpu" and not host.active()
    sample, every = None, short_or_full(3 if by_formula or dtype != "float32" else 1, 1)
    for sample in islice(given(loss, device, dtype), None, None, every):
        opinfo.holds(getattr(F, loss.name), twin(loss), sample)
    if sample is None:
        pytest.skip(f"torch has no samples of {dtype}")


@each_twin
def test_gradients_that_torch_lacks(loss: Loss) -> None:
    """Gradients that torch lacks match finite differences of the value."""
    checked = set()
    for sample in given(loss, "cpu", "float64"):
        theirs = opinfo.model(sample)
        ones = torch.ones_like(sample.call(theirs))
        missing = [x for x in sample.differentiated if opinfo.torch_gradient(theirs, sample, x, ones) is None]
        for name in missing:
            leaf = sample.tensors[name].detach().requires_grad_()
            slope = lambda x: sample.call(getattr(F, loss.name), **{name: x})  # noqa: E731, B023
            torch.autograd.gradcheck(slope, leaf, rtol=1e-5, atol=1e-6)
        checked.update(missing)
    if not checked:
        pytest.skip("torch has all gradients")


@each_twin
def test_numpy_references(loss: Loss) -> None:
    """Values match torch's references in NumPy, for torch tensors and for NumPy arrays."""
    reference = opinfo.databases()[0][str(loss.torch)].ref
    if reference is None:
        pytest.skip("torch has no reference in NumPy")
    for dtype in ("float32", "float64"):
        for sample in given(loss, "cpu", dtype):
            if sample.kind != "as given":
                continue
            tensors = {name: x.detach() for name, x in sample.tensors.items()}
            arrays = {name: x.numpy() for name, x in tensors.items()}
            expected = sample.call(reference, **arrays)
            for operands in (tensors, arrays):
                found = sample.call(getattr(F, loss.name), **operands)
                torch.testing.assert_close(torch.as_tensor(found), torch.as_tensor(expected), check_dtype=False)


# ----------------------------------------------------------------------------------------------------------------------
# Modules


@everywhere("float32", "float64")
def test_modules(loss: Loss, device: str, dtype: str) -> None:
    """The results match torch's Module, and torch's reference for it."""
    for made in modules(loss, device, getattr(torch, dtype)):
        opinfo.module_holds(made.ours, made)


@each_twin
def test_modules_in_state_and_text(loss: Loss) -> None:
    for made in modules(loss, "cpu", torch.float32):
        opinfo.is_torchs_module(made.ours, made)


# ----------------------------------------------------------------------------------------------------------------------
# Errors


@each_twin
@pytest.mark.every_loss
def test_errors(loss: Loss, device: str) -> None:
    for error, sample in opinfo.errors(loss, device):
        with pytest.raises(opinfo.RAISED.get(error, error), match=f"^{loss.name}: "):
            sample.call(getattr(F, loss.name))


def test_errors_differ_as_listed() -> None:
    assert {error for loss in TWINS.values() for error, _ in opinfo.errors(loss, "cpu")} > set(opinfo.RAISED)


@each_twin
def test_errors_of_modules(loss: Loss) -> None:
    info = opinfo.databases()[1][loss.class_name]
    if info.module_error_inputs_func is None:
        pytest.skip("torch has no error inputs")
    options = {"device": "cpu", "dtype": torch.float32, "requires_grad": False, "training": True}
    for given in info.module_error_inputs_func(info, **options):
        made, called = given.module_error_input.constructor_input, given.module_error_input.forward_input
        with pytest.raises(opinfo.RAISED.get(given.error_type, given.error_type)):
            module = getattr(nn, loss.class_name)(*made.args, **made.kwargs)
            module(*called.args, **called.kwargs)


# ----------------------------------------------------------------------------------------------------------------------
# Differences


@pytest.mark.parametrize("known", opinfo.DIFFERENCES, ids=lambda x: x.reason)
def test_listed_difference(known: opinfo.Difference) -> None:
    """Each named loss has a sample that the difference concerns, and docs/differences.md lists the difference."""
    assert known.reason in DIFFERENCES, "docs/differences.md says otherwise"
    for name in known.losses:
        loss = TWINS[name]
        of_modules = (made.sample for made in modules(loss, "cpu", torch.float32))
        of_functions = chain(given(loss, "cpu"), given(loss, "cpu", "others"))
        assert any(map(known.concerns, chain(of_functions, of_modules))), f"{name} differs in no sample"


def test_a_difference_that_is_none_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    loss = TWINS["mse_loss"]
    none = opinfo.Difference((loss.name,), lambda _: True, "", lambda theirs: theirs)
    monkeypatch.setattr(opinfo, "DIFFERENCES", (none,))
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        opinfo.holds(F.mse_loss, twin(loss), next(given(loss, "cpu")))


# ----------------------------------------------------------------------------------------------------------------------
# Wrong functions are caught


def caught(wrong: opinfo.Function, found: Iterator[Sample]) -> bool:
    """True if a sample distinguishes a function from the loss."""
    for sample in found:
        try:
            opinfo.agrees(wrong, opinfo.model(sample), sample)
        except AssertionError:
            return True
    return False


#: Pairs of different losses with the same number of operands.
PAIRS = [
    pytest.param(a, b, id=f"{a.name}-{b.name}")
    for a, b in permutations(TWINS.values(), 2)
    if len(opinfo.needed(a)) == len(opinfo.needed(b))
]


@pytest.mark.parametrize(("right", "other"), PAIRS)
def test_another_loss_is_caught(right: Loss, other: Loss) -> None:
    """The other loss may, for example, lack a square or take another branch."""
    known = {name for name, _ in other.arguments}

    def wrong(*operands: Any, **options: Any) -> Any:
        return getattr(F, other.name)(*operands, **{n: x for n, x in options.items() if n in known})

    assert caught(wrong, few(given(right, "cpu")))


@each_twin
def test_an_argument_that_is_ignored_is_caught(loss: Loss) -> None:
    found = [x for x in given(loss, "cpu") if x.has_torchs_tensors]
    for name in {name for sample in found for name in list(sample.arguments)[sample.positional :]}:

        def wrong(*operands: Any, _name: str = name, **options: Any) -> Any:
            options.pop(_name, None)
            return getattr(F, loss.name)(*operands, **options)

        having = (x for x in found if name in x.arguments)
        assert caught(wrong, having) == ((loss.name, name) not in opinfo.UNSEEN), name


@pytest.mark.programs
@each_twin
@pytest.mark.parametrize(
    "spoil",
    [
        value(lambda y: 1.001 * y),
        value(lambda y: y.double() if y.dtype != torch.float64 else y.float()),
        value(lambda y: y.reshape(1) if y.dim() == 0 else y),
        gradient(0, lambda g: 2 * g),
        gradient(0, torch.zeros_like),
        gradient(1, lambda g: g + 0.01),
        divides_half_way,
        loses_the_tail,
        assumes_contiguity,
        sums_one_row,
    ],
    ids=["value", "dtype", "shape", "gradient", "no gradient", "second gradient", "divisor", "tail", "strides", "row"],
)
def test_wrong_function_is_caught(loss: Loss, spoil: Callable[..., opinfo.Function]) -> None:
    """The few samples that kernels run on the host are enough to notice each defect."""
    assert caught(spoil(getattr(F, loss.name), loss), few(given(loss, "cpu")))


@pytest.mark.programs
@pytest.mark.kernels
def test_wrong_kernel_is_caught() -> None:
    """Samples notice a defect of the kernels that the reference formula does not have."""
    loss = TWINS["huber_loss"]
    wrong = function_of(dataclasses.replace(loss, value=f"1.001 * ({loss.value})"))
    assert caught(wrong, given(loss, KERNELS))


@pytest.mark.programs
@each_twin
def test_wrong_modules_are_caught(loss: Loss) -> None:
    class Wrong(getattr(nn, loss.class_name)):  # type: ignore[misc]
        def forward(self, *operands: Any) -> Any:
            return 1.001 * super().forward(*operands)

    made = next(modules(loss, "cpu", torch.float32))
    with pytest.raises(AssertionError):
        opinfo.module_holds(Wrong(), made)
    with pytest.raises(AssertionError):
        opinfo.is_torchs_module(Wrong(), made)

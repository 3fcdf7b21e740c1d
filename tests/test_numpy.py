"""NumPy arrays: the same functions, the reference formulas, no torch unless gradients are requested."""

from __future__ import annotations

import warnings
from typing import Any

import numpy
import pytest
import torch
from grids import CASES, MIXED

import cupylosses
import cupylosses.functional as F
from cupylosses.engines.pointwise.definition import Loss
from cupylosses.testing import samples
from cupylosses.testing.check import by_position

pytestmark = pytest.mark.filterwarnings("ignore:.*broadcast")


def draw(loss: Loss, case: Any = None, dtype: str = "float32", shape: tuple[int, ...] = (5, 7)) -> list[numpy.ndarray]:
    count = len(loss.operands)
    return [x.numpy() for x in samples.operands(loss, loss.values(case), (dtype,) * count, [shape] * count)]


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize(("loss", "case"), CASES)
def test_values_are_those_of_tensors(loss: Loss, case: Any, dtype: str) -> None:
    function = by_position(loss)
    operands = draw(loss, case, dtype)
    for reduction in loss.reductions:
        found = function(*operands, reduction=reduction, **case)
        expected = function(*map(torch.from_numpy, operands), reduction=reduction, **case).numpy()
        assert found.dtype == expected.dtype == dtype
        assert found.shape == expected.shape
        numpy.testing.assert_allclose(found, expected, rtol=2e-3 if dtype == "float16" else 1e-6, atol=1e-6)


@pytest.mark.parametrize(("loss", "case"), CASES)
def test_gradients_are_those_of_tensors(loss: Loss, case: Any) -> None:
    function = by_position(loss)
    operands = draw(loss, case, "float64")
    everything = tuple(range(len(operands)))
    for reduction in loss.reductions:
        value, gradients = cupylosses.value_and_grad(
            function, *operands, argnums=everything, reduction=reduction, **case
        )
        leaves = [torch.from_numpy(x).requires_grad_() for x in operands]
        expected = function(*leaves, reduction=reduction, **case)
        numpy.testing.assert_array_equal(value, expected.detach().numpy())
        for g, exact, x in zip(gradients, torch.autograd.grad(expected.sum(), leaves), operands, strict=True):
            assert isinstance(g, numpy.ndarray) and g.dtype == x.dtype and g.shape == x.shape
            numpy.testing.assert_array_equal(g, exact.numpy())


@pytest.mark.representatives
@pytest.mark.parametrize("dtypes", [x for x in MIXED if "bfloat16" not in x], ids="-".join)
def test_promotion(loss: Loss, dtypes: tuple[str, ...]) -> None:
    count = len(loss.operands)
    given = [dtypes[min(i, len(dtypes) - 1)] for i in range(count)]
    if any(not x.integer and not d.startswith("float") for x, d in zip(loss.operands, given, strict=True)):
        pytest.skip(f"{loss.name} takes no {' and '.join(dtypes)}")
    operands = [x.astype(d) for x, d in zip(draw(loss), given, strict=True)]
    assert by_position(loss)(*operands).dtype == MIXED[dtypes]


@pytest.mark.representatives
@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.T,
        lambda x: x[::-1, ::-1],
        lambda x: x[1:4, ::2],
        numpy.asfortranarray,
        lambda x: x.astype(x.dtype.newbyteorder()),
        lambda x: numpy.broadcast_to(x[0], (3, 7)),
    ],
    ids=["transposed", "reversed", "sliced", "fortran", "other byte order", "broadcast"],
)
def test_any_storage(loss: Loss, view: Any) -> None:
    operands = list(map(view, draw(loss)))
    native = [numpy.ascontiguousarray(x, numpy.float32) for x in operands]
    function = by_position(loss)
    numpy.testing.assert_array_equal(function(*operands, reduction="none"), function(*native, reduction="none"))


@pytest.mark.representatives
def test_gradients_of_reversed_arrays(loss: Loss) -> None:
    operands = [x[::-1] for x in draw(loss)]
    _, found = cupylosses.value_and_grad(loss.name, *operands)
    _, expected = cupylosses.value_and_grad(loss.name, *map(numpy.ascontiguousarray, operands))
    numpy.testing.assert_array_equal(found, expected)


@pytest.mark.representatives
def test_operands_without_dimensions(loss: Loss) -> None:
    operands = [numpy.array(0.25) for _ in loss.operands]
    for reduction in loss.reductions:
        assert numpy.shape(by_position(loss)(*operands, reduction=reduction)) == ()


@pytest.mark.representatives
def test_operands_are_left_alone(loss: Loss) -> None:
    operands = draw(loss)
    for x in operands:
        x.flags.writeable = False
    copies = [x.copy() for x in operands]
    for reduction in loss.reductions:
        by_position(loss)(*operands, reduction=reduction)
    for x, y in zip(operands, copies, strict=True):
        numpy.testing.assert_array_equal(x, y)


@pytest.mark.representatives
def test_gradients_share_no_memory_with_operands(loss: Loss) -> None:
    operands = draw(loss)
    _, gradient = cupylosses.value_and_grad(loss.name, *operands)
    assert not any(numpy.shares_memory(gradient, x) for x in operands)


def test_ordinary_operands_do_not_warn(loss: Loss) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for case in loss.cases:
            by_position(loss)(*draw(loss, case), **case)


@pytest.mark.representatives
@pytest.mark.parametrize("argnums", [0, 1, -1, (0,), (1, 0), (-1, 0)], ids=str)
def test_argnums(loss: Loss, argnums: Any) -> None:
    """For a position, one gradient is returned; for a sequence, several in its order."""
    operands = draw(loss)
    _, everything = cupylosses.value_and_grad(loss.name, *operands, argnums=tuple(range(len(operands))))
    _, found = cupylosses.value_and_grad(loss.name, *operands, argnums=argnums)
    if isinstance(argnums, int):
        numpy.testing.assert_array_equal(found, everything[argnums])
    else:
        assert len(found) == len(argnums)
        for g, i in zip(found, argnums, strict=True):
            numpy.testing.assert_array_equal(g, everything[i])


def test_hand_computed() -> None:
    a, b = numpy.array([0.0, 2.0, -4.0]), numpy.array([0.5, 0.0, 0.0])
    assert F.mse_loss(a, b) == (0.25 + 4 + 16) / 3
    assert F.l1_loss(a, b, reduction="sum") == 6.5
    assert F.smooth_l1_loss(a, b, reduction="none").tolist() == [0.125, 1.5, 3.5]
    assert F.huber_loss(a, b, delta=2.0, reduction="none").tolist() == [0.125, 2.0, 6.0]
    assert F.hinge_loss(a, numpy.array([1, -1, 1]), reduction="none").tolist() == [1.0, 3.0, 5.0]
    half = numpy.array([[0.5, 0.5]])
    assert F.kl_div(half, numpy.array([[1.0, 0.0]]), log_input=False, reduction="batchmean") == numpy.log(2)


@pytest.mark.representatives
@pytest.mark.filterwarnings("error")
def test_gradients_of_read_only_arrays(loss: Loss) -> None:
    arrays = [numpy.full((3, 5), 0.25 * (i + 1), dtype=numpy.float32) for i in range(len(loss.operands))]
    expected = cupylosses.value_and_grad(loss.name, *arrays)
    for x in arrays:
        x.flags.writeable = False
    value, gradient = cupylosses.value_and_grad(loss.name, *arrays)
    assert value == expected[0]
    assert (gradient == expected[1]).all()

"""Exchange without copies: detection of array libraries, and operands of several libraries in one call."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch
from devices import KERNELS

import cupylosses
from cupylosses import interop
from cupylosses.engines.pointwise.definition import Loss
from cupylosses.testing.check import by_position

pytestmark = [pytest.mark.representatives, pytest.mark.in_turn]

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.uint8, torch.int64, torch.bool]


class Foreign:
    """An array of an unknown library that offers only DLPack."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __dlpack__(self, *arguments: Any, **options: Any) -> Any:
        return self.array.__dlpack__(*arguments, **options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()


class Halfway:
    """An object with one of the two methods of the protocol."""

    def __dlpack__(self) -> Any:
        raise AssertionError("not to be called")


def test_whose_an_array_is() -> None:
    assert interop.kind(torch.zeros(1)) == "torch"
    assert interop.kind(torch.nn.Parameter(torch.zeros(1))) == "torch"
    assert interop.kind(numpy.zeros(1)) == "numpy"
    assert interop.kind(Foreign(torch.zeros(1))) == "dlpack"
    assert interop.kind(Halfway()) == "unknown"
    assert interop.kind(numpy.ma.zeros(1)) == interop.kind(numpy.matrix([0.0])) == "unknown"
    assert interop.kind([1.0]) == interop.kind(1.0) == interop.kind(None) == "unknown"


def test_sizes_of_dtypes(device: str) -> None:
    for dtype in DTYPES:
        name = str(dtype).removeprefix("torch.")
        assert interop.ITEMSIZE[name] == torch.empty((), dtype=dtype, device=device).element_size()


# ----------------------------------------------------------------------------------------------------------------------
# On the host


def test_adoption_copies_nothing() -> None:
    x = torch.arange(6.0)
    assert interop.adopt(Foreign(x), None).ctypes.data == x.data_ptr()
    assert interop.adopt(Foreign(x), "numpy").ctypes.data == x.data_ptr()
    y = numpy.arange(6.0)
    assert interop.adopt(Foreign(y), "torch").data_ptr() == y.ctypes.data


def test_foreign_operands_become_numpys(loss: Loss) -> None:
    arrays = [numpy.random.default_rng(i).random((4, 3)) for i in range(len(loss.operands))]
    found = by_position(loss)(*map(Foreign, arrays))
    assert isinstance(found, numpy.floating)
    assert found == by_position(loss)(*arrays)


def test_foreign_operands_beside_tensors_become_torchs(loss: Loss) -> None:
    first, *rest = (torch.rand(4, 3, requires_grad=i == 0) for i in range(len(loss.operands)))
    found = by_position(loss)(first, *map(Foreign, rest))
    expected = by_position(loss)(first, *rest)
    assert torch.equal(found, expected)
    assert torch.equal(*(torch.autograd.grad(x, first)[0] for x in (found, expected)))


def test_foreign_operands_beside_numpys(loss: Loss) -> None:
    first, *rest = (numpy.random.default_rng(i).random((4, 3)) for i in range(len(loss.operands)))
    assert by_position(loss)(Foreign(first), *rest) == by_position(loss)(first, *rest)


def test_gradients_of_foreign_operands(loss: Loss) -> None:
    arrays = [numpy.random.default_rng(i).random((4, 3)) for i in range(len(loss.operands))]
    value, gradient = cupylosses.value_and_grad(loss.name, *map(Foreign, arrays))
    expected, exact = cupylosses.value_and_grad(loss.name, *arrays)
    assert value == expected
    numpy.testing.assert_array_equal(gradient, exact)


def test_half_a_protocol_is_no_array(loss: Loss) -> None:
    with pytest.raises(TypeError, match=r"must be a torch.Tensor, .* or an object with `__dlpack__`, got Halfway"):
        by_position(loss)(*[Halfway()] * len(loss.operands))


# ----------------------------------------------------------------------------------------------------------------------
# On a GPU


@pytest.mark.gpu
def test_tensor_to_array_keeps_the_address() -> None:
    for x in (torch.rand(20, device="cuda"), torch.rand(20, device="cuda")[3:], torch.rand(4, 5, device="cuda").T):
        array = interop.adopt(x, "cupy")
        assert array.data.ptr == x.data_ptr()
        assert array.shape == tuple(x.shape)
        assert tuple(s // array.itemsize for s in array.strides) == x.stride()


@pytest.mark.gpu
def test_array_to_tensor_keeps_the_address() -> None:
    import cupy

    for array in (cupy.arange(20.0), cupy.arange(20.0)[3:], cupy.arange(20.0).reshape(4, 5).T):
        x = interop.adopt(array, "torch")
        assert x.data_ptr() == array.data.ptr
        assert tuple(x.shape) == array.shape


@pytest.mark.gpu
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_tensors_and_arrays_mix(loss: Loss, reduction: str) -> None:
    """The result and the gradients are torch tensors."""
    import cupy

    first, *rest = (torch.rand(33, 17, device="cuda", requires_grad=i == 0) for i in range(len(loss.operands)))
    function = by_position(loss)
    expected = function(first, *rest, reduction=reduction)
    exact = torch.autograd.grad(expected.sum(), first)[0]
    for others in ([cupy.from_dlpack(x) for x in rest], list(map(Foreign, rest))):
        found = function(first, *others, reduction=reduction)
        assert isinstance(found, torch.Tensor) and torch.equal(found, expected)
        assert torch.equal(torch.autograd.grad(found.sum(), first)[0], exact)


@pytest.mark.gpu
def test_foreign_operands_on_a_gpu_become_cupys(loss: Loss) -> None:
    import cupy

    tensors = [torch.rand(33, 17, device="cuda") for _ in loss.operands]
    found = by_position(loss)(*map(Foreign, tensors))
    assert isinstance(found, cupy.ndarray)
    assert torch.equal(torch.from_dlpack(found), by_position(loss)(*tensors))


@pytest.mark.kernels
def test_array_on_the_host_beside_one_on_a_gpu(loss: Loss) -> None:
    first = torch.rand(3, device=KERNELS)
    with pytest.raises((TypeError, ValueError), match=f"^{loss.name}: operands must "):
        by_position(loss)(first, *[numpy.zeros(3, numpy.float32)] * (len(loss.operands) - 1))


@pytest.mark.kernels
def test_bfloat16_tensors_need_no_bfloat16_of_cupys(loss: Loss) -> None:
    """Kernels read 16-bit words, which every CuPy has, and receive only the address."""
    operands = [torch.rand(33, 17, device=KERNELS).bfloat16().requires_grad_() for _ in loss.operands]
    value = by_position(loss)(*operands)
    assert value.dtype == torch.bfloat16
    gradients = torch.autograd.grad(value, operands)
    assert {g.dtype for g in gradients} == {torch.bfloat16}

"""CuPy arrays: the same functions and bits as with torch, on CuPy's current stream, with or without torch installed."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from devices import WAIT
from grids import CASES, REPRESENTATIVES, in_turn
from tools.covering import OWN

import cupylosses
from cupylosses.definition.base import REDUCTIONS
from cupylosses.engines.pointwise.definition import Loss
from cupylosses.testing import samples
from cupylosses.testing.check import by_position
from cupylosses.testing.layouts import LAYOUTS
from cupylosses.testing.tolerance import same_bits

cupy = pytest.importorskip("cupy")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.representatives,
    pytest.mark.in_turn,
    pytest.mark.filterwarnings("ignore:.*broadcast"),
]


def draw(loss: Loss, case: Any = None, dtype: str = "float32", layout: str = "contiguous") -> list[torch.Tensor]:
    """Operands as torch tensors on the GPU."""
    shapes = LAYOUTS[layout].shapes_of(loss, (67, 129))
    drawn = samples.operands(loss, loss.values(case), (dtype,) * len(shapes), shapes, "cuda")
    return LAYOUTS[layout].place(drawn)


def uniform(*shape: int, seed: int = 0) -> Any:
    """Random numbers that use no CUDA library."""
    return cupy.asarray(numpy.random.default_rng(seed).random(shape, dtype=numpy.float32))


def everything(loss: Loss) -> tuple[int, ...]:
    return tuple(range(len(loss.operands)))


def as_tensor(x: Any) -> torch.Tensor:
    return torch.from_dlpack(x)


def equal(a: Any, b: Any) -> bool:
    """True if arrays have the same elements; compared on the host, because CuPy would compile kernels for seconds."""
    return numpy.array_equal(cupy.asnumpy(a), cupy.asnumpy(b))


@pytest.mark.parametrize(
    ("loss", "case", "dtype", "reduction"),
    [
        (*case, dtype, reduction)
        for case, dtype, reduction in in_turn(
            [x for x in CASES if x[0] in REPRESENTATIVES], ["float32", "float16", "float64"], REDUCTIONS
        )
    ],
)
def test_bits_are_those_of_tensors(loss: Loss, case: Any, dtype: str, reduction: str) -> None:
    """Values and gradients have the same bits; the arrays share the tensors' memory."""
    tensors = draw(loss, case, dtype)
    arrays = [cupy.from_dlpack(x) for x in tensors]
    options = {"reduction": reduction, **case}
    alone = by_position(loss)(*arrays, **options)
    value, gradients = cupylosses.value_and_grad(loss.name, *arrays, argnums=everything(loss), **options)
    expected, exact = cupylosses.value_and_grad(loss.name, *tensors, argnums=everything(loss), **options)
    for x in (alone, value, *gradients):
        assert isinstance(x, cupy.ndarray)
    assert same_bits(as_tensor(alone), expected)
    assert same_bits(as_tensor(value), expected)
    for a, b in zip(gradients, exact, strict=True):
        assert same_bits(as_tensor(a), b)


@pytest.mark.parametrize(("layout", "reduction"), in_turn([*OWN, "transposed"], ["none", "mean"]))
def test_layouts(loss: Loss, layout: str, reduction: str) -> None:
    tensors = draw(loss, layout=layout)
    arrays = [cupy.from_dlpack(x) for x in tensors]
    options = {"argnums": everything(loss), "reduction": reduction}
    value, gradients = cupylosses.value_and_grad(loss.name, *arrays, **options)
    expected, exact = cupylosses.value_and_grad(loss.name, *tensors, **options)
    assert same_bits(as_tensor(value), expected)
    for a, b in zip(gradients, exact, strict=True):
        assert same_bits(as_tensor(a), b)


def test_reversed_arrays(loss: Loss) -> None:
    """Reversed arrays have negative strides, which torch lacks."""
    arrays = [uniform(65, 33, seed=i)[::-1, ::-1] for i in everything(loss)]
    dense = [cupy.ascontiguousarray(x) for x in arrays]
    function = by_position(loss)
    assert equal(function(*arrays, reduction="none"), function(*dense, reduction="none"))
    _, found = cupylosses.value_and_grad(function, *arrays, argnums=everything(loss))
    _, expected = cupylosses.value_and_grad(function, *dense, argnums=everything(loss))
    for a, b in zip(found, expected, strict=True):
        assert equal(a, b)


def test_values_are_those_of_numpy(loss: Loss) -> None:
    arrays = [numpy.random.default_rng(i).random((67, 129)) for i in range(len(loss.operands))]
    found = by_position(loss)(*map(cupy.asarray, arrays))
    numpy.testing.assert_allclose(cupy.asnumpy(found), by_position(loss)(*arrays), rtol=1e-12)


def test_bfloat16(loss: Loss) -> None:
    """CuPy 14 supports bfloat16 through ml_dtypes; CuPy 13 lacks it."""
    ml_dtypes = pytest.importorskip("ml_dtypes")
    if int(cupy.__version__.partition(".")[0]) < 14:
        pytest.skip("CuPy knows bfloat16 from 14 on")
    tensors = draw(loss, dtype="bfloat16")
    arrays = [cupy.asarray(x.float().cpu().numpy()).astype(ml_dtypes.bfloat16) for x in tensors]
    value, gradients = cupylosses.value_and_grad(loss.name, *arrays, argnums=everything(loss))
    expected, exact = cupylosses.value_and_grad(loss.name, *tensors, argnums=everything(loss))
    for a, b in zip((value, *gradients), (expected, *exact), strict=True):
        assert a.dtype == ml_dtypes.bfloat16
        assert same_bits(as_tensor(a.view(cupy.int16)), b.view(torch.int16))


def test_one_gradient_and_several(loss: Loss) -> None:
    arrays = [cupy.from_dlpack(x) for x in draw(loss)]
    _, all_of_them = cupylosses.value_and_grad(loss.name, *arrays, argnums=everything(loss))
    for i in everything(loss):
        _, one = cupylosses.value_and_grad(loss.name, *arrays, argnums=i)
        assert equal(one, all_of_them[i])
    value, none = cupylosses.value_and_grad(loss.name, *arrays, argnums=())
    assert none == () and equal(value, by_position(loss)(*arrays))


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1,)])
def test_degenerate_shapes(loss: Loss, shape: tuple[int, ...]) -> None:
    arrays = [cupy.full(shape, 0.25) for _ in loss.operands]
    for reduction in loss.reductions:
        value, gradients = cupylosses.value_and_grad(loss.name, *arrays, argnums=everything(loss), reduction=reduction)
        kept = shape[:-1] if loss.mean_of_rows else shape
        assert value.shape == (kept if reduction == "none" else ())
        assert [g.shape for g in gradients] == [shape] * len(arrays)
        if reduction == "sum" and 0 in shape:
            # The mean of a row without elements is not 0.
            assert math.isnan(float(value)) if loss.mean_of_rows else float(value) == 0


def test_current_stream_is_waited_for(loss: Loss) -> None:
    """The operands are still being produced, slowly, on CuPy's current stream."""
    arrays = [uniform(1031, 1031, seed=i) for i in everything(loss)]
    expected = cupylosses.value_and_grad(loss.name, *arrays)
    stream = cupy.cuda.Stream(non_blocking=True)
    slow = cupy.RawKernel(WAIT, "wait")
    cupy.cuda.Device().synchronize()
    with stream:
        late = [cupy.zeros_like(x) for x in arrays]
        slow((1,), (1,), ())
        for x, y in zip(late, arrays, strict=True):
            x[...] = y
        found = cupylosses.value_and_grad(loss.name, *late)
    stream.synchronize()
    for a, b in zip(found, expected, strict=True):
        assert equal(a, b)


def test_two_streams_at_first_use(loss: Loss, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second stream must not rely on anything that the first call sets up on its own stream.

    Work on the second stream may run long before that.
    """
    from cupylosses.backends import cupy_device

    arrays = [uniform(1031, 1031, seed=i) for i in everything(loss)]
    expected = cupylosses.value_and_grad(loss.name, *arrays)
    monkeypatch.setattr(cupy_device, "devices", {})
    busy, free = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with busy:
        # The pool's next allocations on this stream hold anything but the expected 1.
        for count in (2, 1024, 4096):
            cupy.full(count, 7.0)
        cupy.RawKernel(WAIT, "wait")((1,), (1,), ())
        late = cupylosses.value_and_grad(loss.name, *arrays)
    with free:
        early = cupylosses.value_and_grad(loss.name, *arrays)
        free.synchronize()
        for a, b in zip(early, expected, strict=True):
            assert equal(a, b)
    busy.synchronize()
    for a, b in zip(late, expected, strict=True):
        assert equal(a, b)


@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("layout", ["contiguous", "row"])
def test_captured_graph_keeps_its_memory(loss: Loss, layout: str, reduction: str) -> None:
    """Arrays allocated after the capture have other memory: replays neither write into them nor read from them."""
    arrays = [cupy.from_dlpack(x) for x in draw(loss, layout=layout)]
    fresh = [cupy.from_dlpack(x * 0.5) for x in draw(loss, layout=layout)]
    options = {"argnums": everything(loss), "reduction": reduction}
    expected_value, expected = cupylosses.value_and_grad(loss.name, *fresh, **options)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        cupylosses.value_and_grad(loss.name, *arrays, **options)
        stream.begin_capture()
        value, gradients = cupylosses.value_and_grad(loss.name, *arrays, **options)
        graph = stream.end_capture()
        sizes = [1 << n for n in range(15)]
        foreign = [cupy.full(n, float("nan")) for n in sizes for _ in range(16)]
        for x, y in zip(arrays, fresh, strict=True):
            x[...] = y
        for x in (value, *gradients):
            x.fill(float("nan"))
        for _ in range(2):
            graph.launch(stream)
        stream.synchronize()
        for a, b in zip((value, *gradients), (expected_value, *expected), strict=True):
            assert equal(a, b)
        assert all(bool(as_tensor(x).isnan().all()) for x in foreign)


def test_expectation_of_torch_does_not_reach_cupy(loss: Loss) -> None:
    """torch's calls may have changed the expected upstream gradient; with CuPy it is always 1."""
    tensors = draw(loss)
    arrays = [cupy.from_dlpack(x) for x in tensors]
    _, expected = cupylosses.value_and_grad(loss.name, *arrays)
    leaves = [x.clone().requires_grad_() for x in tensors]
    for _ in range(2):
        (by_position(loss)(*leaves) * 100).backward()
    _, found = cupylosses.value_and_grad(loss.name, *arrays)
    assert equal(found, expected)


def test_repeated_calls_have_the_same_bits(loss: Loss) -> None:
    arrays = [uniform(1031, 1031, seed=i) for i in everything(loss)]
    values = {float(by_position(loss)(*arrays)).hex() for _ in range(20)}
    values |= {float(cupylosses.value_and_grad(loss.name, *arrays)[0]).hex()}
    assert len(values) == 1


def test_several_devices_are_an_error(loss: Loss) -> None:
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two GPUs")
    first, *rest = [cupy.from_dlpack(x) for x in draw(loss)]
    with cupy.cuda.Device(1):
        others = [cupy.zeros_like(x) for x in rest]
    with pytest.raises(ValueError, match=r"one device, got .*cuda:0.*cuda:1"):
        by_position(loss)(first, *others)


def test_numpy_beside_cupy_is_an_error(loss: Loss) -> None:
    first, *rest = [cupy.from_dlpack(x) for x in draw(loss)]
    with pytest.raises(TypeError, match=r"must come from one array library, got .* from cupy and .* from numpy"):
        by_position(loss)(first, *map(cupy.asnumpy, rest))


@pytest.mark.parametrize(
    ("dtype", "message"), [("complex64", "got complex64"), ("uint32", "got uint32")], ids=["complex", "uint32"]
)
def test_unsupported_dtypes(loss: Loss, dtype: str, message: str) -> None:
    arrays = [cupy.zeros(3, dtype) for _ in loss.operands]
    with pytest.raises(TypeError, match=message):
        by_position(loss)(*arrays)


def test_without_torch(python: Callable[..., str], loss: Loss) -> None:
    """Value and gradients work in an environment without torch."""
    program = f"""
import sys
import cupy, cupylosses
arrays = [cupy.full((33,), 0.25 * (i + 1)) for i in range({len(loss.operands)})]
value, gradients = cupylosses.value_and_grad("{loss.name}", *arrays, argnums=tuple(range(len(arrays))))
print(float(value), [float(g[7]) for g in gradients], "torch" in sys.modules)
"""
    tensors = [torch.full((33,), 0.25 * (i + 1), dtype=torch.float64, device="cuda") for i in everything(loss)]
    value, gradients = cupylosses.value_and_grad(loss.name, *tensors, argnums=everything(loss))
    expected = f"{value.item()} {[g[7].item() for g in gradients]} False"
    assert python(program, without=("torch",)) == expected

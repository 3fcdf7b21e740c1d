"""CuPy arrays through element-wise losses; without a GPU, NumPy stands in for CuPy (``tools.cupy_stand_in``).

``test_cupy.py`` tests what needs a GPU: streams and graphs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from cupy_memory import array, tensor
from devices import GPU, KERNELS
from grids import in_turn

import cupylosses
from cupylosses import interop
from cupylosses.definition.registry import registry
from cupylosses.engines.pointwise.definition import Loss
from cupylosses.testing import samples
from cupylosses.testing.layouts import LAYOUTS
from cupylosses.testing.tolerance import same_bits

pytestmark = [pytest.mark.kernels, pytest.mark.filterwarnings("ignore:.*broadcast")]

#: The path does not depend on the loss, so one loss is enough.
LOSS = registry(Loss)["mse_loss"]

#: Arguments that send a call along different paths; True stands for an array.
WAYS: Mapping[str, Mapping[str, Any]] = {
    "per element": {"reduction": "none"},
    "reduced": {},
    "masked": {"mask": True},
    "weighted": {"weight": True, "mask": True, "reduction": "weighted_mean"},
    "over a dimension": {"dim": (0,)},
    "weighted over a dimension": {"dim": (1,), "weight": True, "reduction": "weighted_mean"},
    "normalized": {"normalizer": True},
    "normalized over a dimension": {"normalizer": True, "dim": (1,)},
}


def draw(layout: str, way: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The arguments of a call, and the differentiated ones among them."""
    shapes = LAYOUTS[layout].shapes((17, 33), len(LOSS.operands))
    operands = LAYOUTS[layout].place(
        samples.operands(LOSS, LOSS.values({}), ("float32",) * len(shapes), shapes, KERNELS)
    )
    given = dict(zip([x.name for x in LOSS.operands], operands, strict=True)) | dict(WAYS[way])
    wanted = tuple(x.name for x in LOSS.operands)
    generator = torch.Generator().manual_seed(0)
    if "mask" in given:
        given["mask"] = (torch.rand(17, 33, generator=generator) < 0.7).to(KERNELS)
    if "weight" in given:
        given["weight"] = torch.rand(1, 33, generator=generator).to(KERNELS)
        wanted += ("weight",)
    if "normalizer" in given:
        given["normalizer"] = torch.tensor(3.0, device=KERNELS)
    return given, wanted


@pytest.mark.parametrize(("way", "layout"), in_turn(list(WAYS), ["contiguous", "row"]))
def test_results_are_those_of_tensors(cupy: Any, layout: str, way: str) -> None:
    given, wanted = draw(layout, way)
    arrays = {n: array(cupy, x) if isinstance(x, torch.Tensor) else x for n, x in given.items()}
    value, gradients = cupylosses.value_and_grad(LOSS.name, **arrays, argnums=wanted)
    exact, expected = cupylosses.value_and_grad(LOSS.name, **given, argnums=wanted)
    for a, b in zip((value, *gradients), (exact, *expected), strict=True):
        assert interop.kind(a) == "cupy"
        # torch and CuPy order the operations of a differentiable quotient differently.
        if "weight" in given or ("normalizer" in given and "dim" in given):
            torch.testing.assert_close(tensor(a), b, rtol=1e-6, atol=1e-7)
        else:
            assert same_bits(tensor(a), b)


def test_nothing_to_sum(cupy: Any) -> None:
    arrays = [cupy.zeros((0, 3)) for _ in LOSS.operands]
    value, gradients = cupylosses.value_and_grad(LOSS.name, *arrays, argnums=tuple(range(len(arrays))))
    assert tensor(value).isnan().all() and [g.shape for g in gradients] == [(0, 3)] * len(arrays)


@pytest.mark.skipif(GPU, reason="the stand-in says that it captures")
@pytest.mark.parametrize("way", ["per element", "reduced"])
@pytest.mark.parametrize("layout", ["contiguous", "row"])
def test_memory_of_a_capture_is_kept(cupy: Any, layout: str, way: str) -> None:
    from cupylosses.backends import cupy_device

    given, wanted = draw(layout, way)
    arrays = {n: array(cupy, x) if isinstance(x, torch.Tensor) else x for n, x in given.items()}
    expected = cupylosses.value_and_grad(LOSS.name, **arrays, argnums=wanted)
    cupy.cuda.get_current_stream().capturing = True
    value, gradients = cupylosses.value_and_grad(LOSS.name, **arrays, argnums=wanted)
    kept = {x.memory.ctypes.data for x in cupy_device.devices[0]._captured}
    assert kept > {x.data.ptr for x in (value, *gradients)}
    for a, b in zip((value, *gradients), (expected[0], *expected[1]), strict=True):
        assert same_bits(tensor(a), tensor(b))

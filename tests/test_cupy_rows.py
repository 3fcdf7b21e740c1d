"""Losses of rows with CuPy arrays: the bits of tensors, labels that are no class, memory, streams and graphs.

Without a GPU, NumPy stands in for CuPy (``tools.cupy_stand_in``); streams and graphs need a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy
import pytest
import torch
from cupy_memory import array, tensor
from devices import GPU, KERNELS, WAIT
from grids import in_turn, short_or_full
from test_rows import build, cases, few_cases, kernel_cases
from torch import Tensor

import cupylosses.functional as F
from cupylosses import value_and_grad
from cupylosses.definition.registry import registry
from cupylosses.engines.softmax.call import RowResult
from cupylosses.engines.softmax.definition import SoftmaxLoss
from cupylosses.testing.softmax.properties import LAYOUTS, PLACES, SOFTMAX_LAYOUTS, draw, of_layout, some_rows_are_many
from cupylosses.testing.softmax.truth import NAMES
from cupylosses.testing.tolerance import same_bits

pytestmark = pytest.mark.kernels

LOSSES = registry(SoftmaxLoss)
each_loss = pytest.mark.parametrize("row_loss", LOSSES.values(), ids=list(LOSSES))
#: Loss for each kind of target; each kind has its own kernels.
KINDS = {"indices": "cross_entropy", "probabilities": "cross_entropy", "log-probabilities": "nll_loss"}
each_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(autouse=True)
def fewer_rows(fresh_plans: Callable[[], None]) -> Iterator[None]:
    """Makes plans treat the smaller shapes of LAYOUTS as many rows."""
    with some_rows_are_many():
        yield


def arrays(cupy: Any, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call with arrays instead of tensors."""
    return {n: array(cupy, x) if isinstance(x, Tensor) else x for n, x in arguments.items()}


def agree(found: Any, expected: Any) -> None:
    """Asserts that results have the same bits, and are arrays where the expected ones are tensors."""
    parts = zip(*((x if isinstance(x, (tuple, list)) else (x,)) for x in (found, expected)), strict=True)
    assert isinstance(found, RowResult) == isinstance(expected, RowResult)
    for a, b in parts:
        assert (a is None) == (b is None)
        if a is not None:
            assert not isinstance(a, Tensor) and alike(tensor(a), b.detach())


def alike(a: Tensor, b: Tensor) -> bool:
    """True if the bits agree. Without rows, the libraries compute the NaN, which may have either sign."""
    return same_bits(a, b) or (a.dim() == b.dim() == 0 and a.dtype == b.dtype and bool(a.isnan() and b.isnan()))


def everything(name: str, arguments: Mapping[str, Any]) -> tuple[str, ...]:
    """The operands that have a gradient."""
    return tuple(x for x in NAMES[name][:2] if arguments[x].is_floating_point())


def drawn(kind: str, reduction: str = "mean", rows: int = 37, classes: int = 43) -> tuple[str, dict[str, Any]]:
    """A loss, and the arguments of a call."""
    given = draw((rows, classes), 1, device=KERNELS).arguments | {"reduction": reduction}
    if kind == "probabilities":
        given["target"] = given["input"].flip(0).softmax(1)
    if kind == "log-probabilities":
        given["input"] = given["input"].log_softmax(1)
    return KINDS[kind], given


# ----------------------------------------------------------------------------------------------------------------------
# The bits of tensors


@pytest.mark.plain
@pytest.mark.parametrize(
    ("what", "setting", "turn"),
    [
        pytest.param(*x.values, i, id=str(x.id))
        for i, x in enumerate(short_or_full(few_cases(kernel_cases()), cases(1)))
    ],
)
def test_bits_are_those_of_tensors(cupy: Any, what: str, setting: Mapping[str, Any], turn: int) -> None:
    """Every choice of every option, with some loss; with each loss under ``--thorough``.

    Gradients of each operand alone, or of none, are requested in turn. The arrays share the tensors' memory.
    """
    name, given = build(what, setting, KERNELS)
    more = {x: True for x in ("return_lse", "return_accuracy") if x in LOSSES[name].common}
    if "target_dtype" in setting:
        more.pop("return_accuracy", None)
    agree(getattr(F, name)(**arrays(cupy, given)), getattr(F, name)(**given))
    agree(getattr(F, name)(**arrays(cupy, given), **more), getattr(F, name)(**given, **more))
    wanted = everything(name, given)
    fewer = (*wanted, ())
    for argnums in (wanted, *short_or_full(fewer[turn % len(fewer) :][:1], fewer)):
        found = value_and_grad(name, **arrays(cupy, given), argnums=argnums)
        expected = value_and_grad(name, **given, argnums=argnums)
        agree(found[0], expected[0])
        agree(found[1], expected[1])


@pytest.mark.parametrize(("layout", "reduction"), in_turn(list(LAYOUTS), ["mean", "none"]))
def test_layouts(cupy: Any, layout: str, reduction: str) -> None:
    x = of_layout(layout, device=KERNELS)
    given = x.arguments | {"reduction": reduction}
    for a, b in zip(value_and_grad(x.loss, **arrays(cupy, given)), value_and_grad(x.loss, **given), strict=True):
        agree(a, b)


@each_kind
@pytest.mark.parametrize("place", PLACES)
def test_places(cupy: Any, place: str, kind: str) -> None:
    name, given = drawn(kind, "none")
    given["input"] = draw((37, 43), 1, device=KERNELS, place=place).input
    for a, b in zip(value_and_grad(name, **arrays(cupy, given)), value_and_grad(name, **given), strict=True):
        agree(a, b)


@each_kind
@pytest.mark.parametrize(
    "at", [(slice(None, None, -1), slice(None)), (slice(None), slice(None, None, -1))], ids=["rows", "classes"]
)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_reversed_arrays(cupy: Any, kind: str, at: tuple[slice, slice], reduction: str) -> None:
    """Reversed arrays have negative strides, which torch lacks."""
    name, given = drawn(kind, reduction)
    dense = arrays(cupy, given)
    turned = {**dense, "input": cupy.ascontiguousarray(dense["input"][at])[at]}
    assert min(turned["input"].strides) < 0
    found, expected = value_and_grad(name, **turned), value_and_grad(name, **dense)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(tensor(a), tensor(b), rtol=1e-6, atol=1e-6)


@each_loss
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_no_rows(cupy: Any, row_loss: SoftmaxLoss, reduction: str) -> None:
    first, second, _ = NAMES[row_loss.name]
    target = cupy.zeros((0,), "int64") if "indices" in row_loss.targets else cupy.zeros((0, 3))
    given = {first: cupy.zeros((0, 3)), second: target, "reduction": reduction}
    if reduction == "mean":
        given["normalizer"] = cupy.full((), 2.0)
    value, gradient = value_and_grad(row_loss.name, **given)
    assert value.shape == ((0,) if reduction == "none" else ()) and gradient.shape == (0, 3)
    assert reduction == "none" or float(value) == 0


def test_weights_with_gaps(cupy: Any) -> None:
    name, given = drawn("indices")
    w = torch.rand(86, device=KERNELS)[::2]
    found = value_and_grad(name, **arrays(cupy, given), weight=array(cupy, w))
    for a, b in zip(found, value_and_grad(name, **given, weight=w), strict=True):
        agree(a, b)


@each_kind
def test_normalizers_of_any_library(cupy: Any, kind: str) -> None:
    name, given = drawn(kind)
    expected = getattr(F, name)(**given, normalizer=3.0)
    for normalizer in (3.0, cupy.full((), 3.0), cupy.full((1,), 3.0, "float32"), numpy.float64(3.0), numpy.full((), 3)):
        agree(getattr(F, name)(**arrays(cupy, given), normalizer=normalizer), expected)


def test_labels_without_a_sign_are_none_that_is_ignored(cupy: Any) -> None:
    """-100 is 156 in uint8, which is a class here, so its row must count."""
    x = torch.zeros(2, 200, device=KERNELS)
    x[0, 156] = x[1, 3] = 1.0
    given = {"input": x, "target": torch.tensor([156, 4], dtype=torch.uint8, device=KERNELS), "return_accuracy": True}
    found = F.cross_entropy(**arrays(cupy, given))
    assert float(found.accuracy) == 0.5
    agree(found, F.cross_entropy(**given))


# ----------------------------------------------------------------------------------------------------------------------
# Memory


@pytest.mark.parametrize(
    ("layout", "reduction"),
    in_turn([x for x in SOFTMAX_LAYOUTS if LAYOUTS[x].place == "contiguous"], ["mean", "none"]),
)
def test_gradient_over_the_logits(cupy: Any, layout: str, reduction: str) -> None:
    given = arrays(cupy, of_layout(layout, device=KERNELS).arguments) | {"reduction": reduction}
    value, expected = value_and_grad("cross_entropy", **given)
    found, gradient = value_and_grad("cross_entropy", **given, inplace_backward=True)
    assert gradient.data.ptr == given["input"].data.ptr
    if layout == "column_tiles":
        # In place, a thread processes a row alone, and sums in another order than the warps that otherwise share it.
        torch.testing.assert_close(tensor(gradient), tensor(expected), rtol=1e-5, atol=1e-9)
        torch.testing.assert_close(tensor(found), tensor(value), rtol=1e-6, atol=0)
    else:
        assert same_bits(tensor(gradient), tensor(expected)) and same_bits(tensor(found), tensor(value))


@pytest.mark.parametrize(("place", "over"), [("misaligned", True), ("sliced", False)])
def test_gradient_over_logits_with_gaps_is_a_new_one(cupy: Any, place: str, over: bool) -> None:
    x = draw((37, 43), 1, device=KERNELS, place=place)
    given, before = arrays(cupy, x.arguments), x.input.clone()
    _, expected = value_and_grad("cross_entropy", **given)
    _, gradient = value_and_grad("cross_entropy", **given, inplace_backward=True)
    assert same_bits(tensor(gradient), tensor(expected))
    assert (gradient.data.ptr == given["input"].data.ptr) == over and same_bits(x.input, before) != over


@contextmanager
def recorded_sizes(cupy: Any) -> Any:
    """Records the sizes of allocations in bytes, within the context."""
    sizes: list[int] = []
    allocate = cupy.cuda.get_allocator()

    def note(size: int) -> Any:
        sizes.append(size)
        return allocate(size)

    with cupy.cuda.using_allocator(note):
        yield sizes


@each_kind
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_no_memory_of_the_size_of_the_logits_but_the_gradient(cupy: Any, kind: str, reduction: str) -> None:
    name, given = drawn(kind, reduction, 64, 1024)
    given = arrays(cupy, given)
    value_and_grad(name, **given)
    full = given["input"].nbytes
    with recorded_sizes(cupy) as sizes:
        value_and_grad(name, **given)
    assert full in sizes and sum(sizes) < 1.25 * full
    with recorded_sizes(cupy) as sizes:
        getattr(F, name)(**given)
        if kind == "indices":
            value_and_grad(name, **given, inplace_backward=True)
    assert sum(sizes) < 0.25 * full


# ----------------------------------------------------------------------------------------------------------------------
# Labels, errors


def wait(cupy: Any) -> None:
    cupy.cuda.get_current_stream().synchronize()


@pytest.mark.parametrize("name", ["cross_entropy", "nll_loss"])
def test_labels_are_checked(cupy: Any, name: str, fresh_plans: Callable[[], None]) -> None:
    given = draw((37, 43), 1, device=KERNELS).arguments
    target = given["target"].clone()
    target[5] = 99
    text = rf"{name}: `target\[5\]` must be a class index, 0 to 42.*got 99"
    right, wrong = arrays(cupy, given), arrays(cupy, {**given, "target": target})
    expected = getattr(F, name)(**right)

    with pytest.raises(IndexError, match=text):
        getattr(F, name)(**wrong, check_targets="sync")
    agree(getattr(F, name)(**right), tensor(expected))

    assert tensor(getattr(F, name)(**wrong)).isnan()
    wait(cupy)
    with pytest.raises(IndexError, match=text):
        value_and_grad(name, **right)
    agree(getattr(F, name)(**right), tensor(expected))

    value, gradient = value_and_grad(name, **wrong, check_targets="off")
    wait(cupy)
    assert tensor(value).isnan() and bool((tensor(gradient)[5] == 0).all())
    agree(getattr(F, name)(**right), tensor(expected))


@pytest.mark.skipif(GPU, reason="the stand-in counts how often the host waits")
@each_kind
def test_the_host_waits_where_it_is_told_to(cupy: Any, kind: str) -> None:
    name, given = drawn(kind)
    stream = cupy.cuda.get_current_stream()
    for reduction in ("mean", "none"):
        options = arrays(cupy, given) | {"reduction": reduction}
        value_and_grad(name, **options)
        if "return_lse" in LOSSES[name].common:
            value_and_grad(name, **options, return_lse=True, return_accuracy=kind == "indices")
    assert stream.waits == 0
    getattr(F, name)(**options, check_targets="sync")
    assert stream.waits == (kind != "probabilities")


def test_class_weights_have_no_gradient(cupy: Any) -> None:
    name, given = drawn("indices")
    weight = torch.ones(43, device=KERNELS)
    for call in (given | {"weight": weight}, arrays(cupy, given | {"weight": weight})):
        with pytest.raises(TypeError, match=r"^cross_entropy: `weight` has no gradient; leave it out of `argnums`"):
            value_and_grad(name, **call, argnums="weight")


def test_what_is_refused(cupy: Any) -> None:
    _, given = drawn("indices")
    x, y = arrays(cupy, {n: given[n] for n in ("input", "target")}).values()
    with pytest.raises(ValueError, match=r"`target` must have the shape of `input` without its class dimension"):
        F.cross_entropy(x, y[:-1])
    with pytest.raises(ValueError, match=r"`weight` must have one number per class, shape \(43,\).*got \(\)"):
        F.cross_entropy(x, y, weight=cupy.full((), 1.0))
    with pytest.raises(TypeError, match=r"`input` must have one of the dtypes .*, got complex64"):
        F.cross_entropy(x.astype("complex64"), y)
    with pytest.raises(TypeError, match=r"must come from one array library, got .* from cupy and .* from numpy"):
        F.cross_entropy(x, numpy.zeros(37, "int64"))


def test_several_devices_are_an_error(cupy: Any) -> None:
    _, given = drawn("indices")
    given = arrays(cupy, given)
    if GPU:
        if cupy.cuda.runtime.getDeviceCount() < 2:
            pytest.skip("needs two GPUs")
        with cupy.cuda.Device(1):
            given["mask"] = cupy.zeros(37, "bool")
    else:
        given["mask"] = cupy.zeros(37, "bool")
        given["mask"].index = 1
    with pytest.raises(ValueError, match=r"one device, got `input` on cuda:0.* and `mask` on cuda:1"):
        F.cross_entropy(**given)


# ----------------------------------------------------------------------------------------------------------------------
# Graphs and streams


@pytest.mark.skipif(GPU, reason="the stand-in says that it captures")
@each_kind
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_memory_of_a_capture_is_kept(cupy: Any, kind: str, reduction: str, fresh_plans: Callable[[], None]) -> None:
    """A capture keeps exactly the allocations made during it."""
    name, given = drawn(kind, reduction)
    from cupylosses.backends import cupy_device

    given, stream = arrays(cupy, given), cupy.cuda.get_current_stream()
    if kind == "indices":
        given["return_accuracy"] = True
    expected = value_and_grad(name, **given)
    (device,) = cupy_device.devices.values()
    assert not device._captured
    stream.capturing = True
    with recorded_sizes(cupy) as sizes:
        found = value_and_grad(name, **given)
    assert [x.memory.size for x in device._captured] == sizes and sizes
    for a, b in zip(found, expected, strict=True):
        parts = zip(*(x if isinstance(x, tuple) else (x,) for x in (a, b)), strict=True)
        assert all(x is y or same_bits(tensor(x), tensor(y)) for x, y in parts)


@pytest.mark.gpu
@each_kind
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_captured_graph_keeps_its_memory(cupy: Any, kind: str, reduction: str) -> None:
    """Arrays allocated after the capture have other memory: replays neither write into them nor read from them."""
    name, given = drawn(kind, reduction)
    given = arrays(cupy, given)
    if kind == "indices":
        given |= {"return_lse": True, "return_accuracy": True}
    fresh = {n: x[::-1].copy() if n in NAMES[name][:2] else x for n, x in given.items()}
    expected = value_and_grad(name, **fresh)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        value_and_grad(name, **given)
        stream.begin_capture()
        found = value_and_grad(name, **given)
        graph = stream.end_capture()
        foreign = [cupy.full(1 << n, float("nan")) for n in range(15) for _ in range(16)]
        for n in NAMES[name][:2]:
            given[n][...] = fresh[n]
        results = [x for part in found for x in (part if isinstance(part, tuple) else (part,))]
        for x in results:
            x.fill(float("nan"))
        for _ in range(2):
            graph.launch(stream)
        stream.synchronize()
        for a, b in zip(results, [x for p in expected for x in (p if isinstance(p, tuple) else (p,))], strict=True):
            assert same_bits(tensor(a), tensor(b))
        # CuPy would compile its own kernels for this comparison, each for seconds.
        assert all(bool(tensor(x).isnan().all()) for x in foreign)


@pytest.mark.gpu
@each_kind
def test_current_stream_is_waited_for(cupy: Any, kind: str) -> None:
    """The operands are still being produced, slowly, on CuPy's current stream."""
    name, given = drawn(kind, rows=1031)
    given = arrays(cupy, given)
    expected = value_and_grad(name, **given)
    stream = cupy.cuda.Stream(non_blocking=True)
    slow = cupy.RawKernel(WAIT, "wait")
    cupy.cuda.Device().synchronize()
    with stream:
        late = {n: cupy.zeros_like(x) if n in NAMES[name][:2] else x for n, x in given.items()}
        slow((1,), (1,), ())
        for n in NAMES[name][:2]:
            late[n][...] = given[n]
        found = value_and_grad(name, **late)
    stream.synchronize()
    for a, b in zip(found, expected, strict=True):
        assert same_bits(tensor(a), tensor(b))


@pytest.mark.gpu
@each_kind
def test_no_call_waits_for_the_gpu(cupy: Any, kind: str) -> None:
    """A kernel launched before the call is still running when the call has returned."""
    name, given = drawn(kind)
    given = arrays(cupy, given)
    stream, slow = cupy.cuda.Stream(non_blocking=True), cupy.RawKernel(WAIT, "wait")
    cupy.cuda.Device().synchronize()
    with stream:
        value_and_grad(name, **given)
        slow((1,), (1,), ())
        stream.synchronize()
        for _ in range(8):
            slow((1,), (1,), ())
        value_and_grad(name, **given)
        running = not stream.done
    stream.synchronize()
    assert running


@pytest.mark.gpu
def test_expectation_of_torch_does_not_reach_cupy(cupy: Any) -> None:
    """torch's calls may have changed the expected upstream gradient; with CuPy it is always 1."""
    name, given = drawn("indices")
    _, expected = value_and_grad(name, **arrays(cupy, given))
    leaf = given["input"].clone().requires_grad_()
    for _ in range(2):
        (F.cross_entropy(**{**given, "input": leaf}) * 100).backward()
    _, found = value_and_grad(name, **arrays(cupy, given))
    assert same_bits(tensor(found), tensor(expected))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "row_loss",
    # One loss with labels and one with distributions.
    short_or_full([LOSSES["cross_entropy"], LOSSES["kl_div_with_logits"]], list(LOSSES.values())),
    ids=lambda x: x.name,
)
def test_without_torch(cupy: Any, python: Callable[..., str], row_loss: SoftmaxLoss) -> None:
    """Value and gradients work in an environment without torch."""
    labels = "indices" in row_loss.targets
    program = f"""
import sys
import cupy, cupylosses
x = cupy.arange(12.0).reshape(3, 4) / 16
y = cupy.asarray([3, 0, -100]) if {labels} else x[::-1] / 2
value, gradient = cupylosses.value_and_grad("{row_loss.name}", x, y)
print(float(value), gradient.ravel().tolist(), "torch" in sys.modules)
"""
    # Divides by a power of two, since torch multiplies by the reciprocal, which is rounded for other numbers.
    x = torch.arange(12.0, dtype=torch.float64, device="cuda").view(3, 4) / 16
    y = torch.tensor([3, 0, -100], device="cuda") if labels else x.flip(0) / 2
    value, gradient = value_and_grad(row_loss.name, x, y)
    assert python(program, without=("torch",)) == f"{value.item()} {gradient.view(-1).tolist()} False"

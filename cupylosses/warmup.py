"""Compiling before the first call: `warmup`."""

from __future__ import annotations

import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import product
from time import perf_counter
from typing import Any

from cupylosses import functional, interop
from cupylosses.call import Call
from cupylosses.definition.base import Definition
from cupylosses.definition.registry import functions, registry
from cupylosses.engines.base import Wanted
from cupylosses.engines.record import KernelRecorder, placeholder
from cupylosses.jit import compiler, gpu, processors
from cupylosses.jit.gpu import Chip
from cupylosses.jit.kernel import Kernel
from cupylosses.value_and_grad import slot_of

_ARCHITECTURE = re.compile(r"sm_(\d+)")


@dataclass(frozen=True)
class Warmup:
    """What a warm-up did: the ``kernels`` that the calls need, all of them ready now, and how many of each loss; the
    ``seconds`` that it took, nearly none where they were ready before; and the ``device``, or architecture, they are
    for.
    """

    kernels: int
    by_loss: Mapping[str, int]
    seconds: float
    device: str

    def __str__(self) -> str:
        of_losses = ", ".join(f"{count} of {name}" for name, count in self.by_loss.items())
        return f"{self.kernels} kernels ready on {self.device} after {self.seconds:.1f} s: {of_losses or 'none'}"


def warmup(
    losses: Any,
    dtypes: Any,
    shapes: Any,
    *,
    backward: bool = True,
    argnums: int | str | Sequence[int | str] | None = None,
    autocast: bool = False,
    device: Any = None,
    architecture: str | None = None,
    max_workers: int | None = None,
    **options: Any,
) -> Warmup:
    """Compiles and loads every kernel that calls of losses will need, on all processors, before the first call.

        cupylosses.warmup(["mse_loss", "kl_div"], torch.bfloat16, (8192, 4096), reduction=["mean", "none"])

    Afterwards such calls, and their backward, compile nothing and load nothing: they can be captured in a CUDA graph,
    and no first step waits for them. What was compiled lies in CuPy's cache on disk (``CUPY_CACHE_DIR``), so that a
    container that was built with it finds it there (docs/warmup.md).

    Nothing is launched and no memory of tensors is taken: the calls are planned for contiguous operands of these
    dtypes and shapes. Which kernels they take depends on dtypes, on options, on which operands are broadcast, on
    whether sizes are multiples of a vector's, on whether there are few elements, and on whether their number is a
    multiple of 1024; those of losses of rows on the number of classes, on whether there are few rows, and on the GPU.
    Operands in other layouts have kernels of their own, which are compiled by the first call that has them.

    Args:
        losses: A name, a function of ``cupylosses.functional``, ``define_loss`` or ``define_statistics``, or a Module
            of ``cupylosses.nn`` (with its options), or several of these; None for all of the library.
        dtypes: A dtype of all operands, by name or as torch's or NumPy's; a tuple for a dtype of each, the last of
            which serves the rest; a list for several of these. A target of class indices is int64 if it is not named:
            ``"bfloat16"`` are logits and indices for ``cross_entropy``, ``("bfloat16", "float32")`` logits and
            probabilities.
        shapes: A shape of all operands; a tuple of shapes for one of each, the last of which serves the rest; a list
            for several of these. Of losses of rows it is that of the logits; class indices have it without the class
            dimension.
        backward: Whether there will be a backward.
        argnums: Which operands require grad: a position or a name, or several at once; by default all that are
            floating but ``target``; the logits alone of losses of rows.
        autocast: Whether the calls will be made under torch's autocast.
        device: The GPU: a number, ``"cuda:1"`` or a ``torch.device``; the current one by default.
        architecture: ``"sm_90"``, on a machine without a GPU: fills the cache for GPUs of this architecture, which then
            find there what the same versions of CuPy and of the run-time compiler, at the same paths, look for. Losses
            of rows are planned for such a GPU. Where there is one, hide it with ``CUDA_VISIBLE_DEVICES=""``.
        max_workers: Threads that compile; as many as this process may use processors by default.
        options: What the functions take by name, for those losses that take it: parameters, flags, ``dim``,
            ``out_dtype``, ``reduction`` (a list for several). For arrays (``weight``, ``mask``, ``normalizer``, and
            operands such as ``pos_weight``): True for one of the full shape (class weights have a number per class, a
            mask of rows one per row), or a shape, or an array like it; numbers are numbers.

    Returns:
        How many kernels are ready, and how long it took.

    Raises:
        TypeError: no loss of this library; a dtype that a loss does not take; an option that none takes.
        ValueError: shapes that do not broadcast, options out of range, as the calls would raise; no such device; losses
            of rows for an architecture of which too little is known.
        KernelError: a kernel did not compile; the message says why.
        RuntimeError: no GPU and no ``architecture``, or both.

    In a thread of one's own it warms up beside other work; kernels are compiled once, whoever asks first.
    """
    begin = perf_counter()
    calls: list[tuple[Any, list[Any], str]] = []
    chosen = list(_functions(losses))
    for name in options:
        if not any(name in dict(function.loss.arguments) for function, _ in chosen):
            raise TypeError(f"warmup: `{name}` is an argument of none of {', '.join(x.loss.name for x, _ in chosen)}.")
    for function, kept in chosen:
        own = {n: x for n, x in options.items() if n in dict(function.loss.arguments)}
        given = kept | own
        reductions = _reductions(function.loss, given.pop("reduction", None))
        for types, sizes, reduction in product(_several(dtypes), _several(shapes), reductions):
            call = _call(function, types, sizes, given | reduction)
            calls.append((call, [_wanted(call, argnums)] if backward else [], _promoted(call, autocast)))
    place = _gpu(device) if architecture is None else _elsewhere(architecture, device)
    recorder = KernelRecorder(place.chip() if any(x.loss.engine.needs_chip for x, _, _ in calls) else None)
    for call, wanted, promoted in calls:
        recorder.call(call, wanted, promoted)
    kernels: Mapping[Kernel, int] = recorder.kernels
    with place.compiling() as ready:
        in_threads(lambda x: ready(x, kernels[x]), kernels, max_workers)
    by_loss = Counter(x.loss.name for x in kernels)
    return Warmup(len(kernels), dict(by_loss), perf_counter() - begin, place.name)


def in_threads(
    work: Callable[[Any], object],
    kernels: Iterable[Any],
    max_workers: int | None = None,
    advance: Callable[[], object] = lambda: None,
) -> None:
    """``work`` on each kernel, in threads: compilers do not hold the GIL. ``advance`` is called after each; the first
    error ends it.
    """
    with ThreadPoolExecutor(max_workers or processors.usable()) as pool:
        pending = [pool.submit(work, x) for x in kernels]
        try:
            for done in as_completed(pending):
                done.result()
                advance()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


# ----------------------------------------------------------------------------------------------------------------------
# The calls


def _functions(losses: Any) -> Iterable[tuple[Any, dict[str, Any]]]:
    """The functions that are meant, each with the options that a Module keeps."""
    names = tuple(registry())
    if losses is None:
        losses = names
    for x in [losses] if isinstance(losses, str) or not isinstance(losses, Iterable) else losses:
        function = getattr(functional, x) if isinstance(x, str) and x in (*names, *functions()) else x
        # Of a Module, or of its class.
        function = getattr(getattr(function, "forward", None), "function", function)
        loss = getattr(function, "loss", None)
        if not isinstance(loss, Definition):
            raise TypeError(
                "warmup: `losses` must be names, functions of cupylosses.functional, define_loss or define_statistics, "
                f"or Modules of cupylosses.nn, got {x!r}; there are {', '.join(names)}."
            )
        kept = {} if function is x or isinstance(x, (str, type)) else {n: getattr(x, n, None) for n in loss.kept}
        # What torch's Module lacks, or what is not set, is the function's default.
        yield function, {n: value for n, value in kept.items() if value is not None}


def _reductions(loss: Definition, given: Any) -> list[dict[str, Any]]:
    """The reductions of the calls as their arguments: those given, or the default; of a function without any, none."""
    default = dict(loss.arguments).get("reduction")
    if default is None:
        return [{}]
    given = default if given is None else given
    return [{"reduction": x} for x in ([given] if isinstance(given, str) else given)]


def _several(given: Any) -> list[Any]:
    return given if isinstance(given, list) else [given]


def _call(function: Any, dtypes: Any, shapes: Any, options: Mapping[str, Any]) -> Call:
    """The call, checked as any other, with placeholders for arrays."""
    if isinstance(shapes, int):
        raise TypeError(f"warmup: a shape is a tuple, and a list has several of them; got {shapes!r} for one.")
    loss = function.loss
    names = [_dtype(x) for x in (dtypes if isinstance(dtypes, tuple) else (dtypes,))]
    sizes = [shapes] if _is_single(shapes) else list(shapes)
    #: What an argument that is an array is if it is given as True: its dtype and shape, by its name.
    arrays = loss.engine.placeholders(loss, names, sizes, options)
    needed = [x.name for x in loss.operands if x.default is None and x.name not in options]
    given = {n: placeholder(*arrays[n]) for n in needed}
    for name, value in options.items():
        given[name] = _array(value, *arrays[name]) if name in arrays else value
    return function.prepare(**given)


def _is_single(shapes: Any) -> bool:
    """Whether it is one shape, not one of each operand."""
    return all(isinstance(n, int) for n in shapes)


def _array(value: Any, dtype: str, shape: tuple[int, ...]) -> Any:
    """What stands for an argument that may be an array: True, a shape, an array, a number or nothing."""
    if value is None or value is False:
        return None
    if value is True:
        return placeholder(dtype, shape)
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return placeholder(_dtype(value.dtype), value.shape)
    return placeholder(dtype, value) if isinstance(value, (tuple, list)) else value


def _dtype(given: Any) -> str:
    """The name of a dtype, given by name or as one of torch or NumPy."""
    name = getattr(given, "__name__", None) or getattr(given, "name", None) or str(given).removeprefix("torch.")
    if name not in interop.ITEMSIZE:
        raise TypeError(f"warmup: `dtypes` must be among {', '.join(interop.ITEMSIZE)}, got {given!r}.")
    return name


def _promoted(call: Call, autocast: bool) -> str:
    engine = call.loss.engine
    engine.check(call)
    result: str = engine.promoted(call)
    return "float32" if autocast and result != "float64" else result


def _wanted(call: Call, argnums: int | str | Sequence[int | str] | None) -> Wanted:
    """The arrays that require a gradient."""
    if argnums is None:
        return call.loss.engine.trained(call)
    slots = [slot_of(call, x) for x in ((argnums,) if isinstance(argnums, (int, str)) else argnums)]
    return tuple(i in slots for i in range(len(call.arrays)))


# ----------------------------------------------------------------------------------------------------------------------
# Compilers


@dataclass(frozen=True)
class _Place:
    """What kernels are made ready for: its name, what losses of rows can make use of there, and, within a context, what
    makes a kernel ready whose launches need so many bytes of shared memory.
    """

    name: str
    chip: Callable[[], Chip]
    compiling: Callable[[], AbstractContextManager[Callable[[Kernel, int], object]]]


def _gpu(device: Any) -> _Place:
    """The GPU that is meant, where kernels are loaded."""
    torch_device = sys.modules.get("cupylosses.backends.torch.device")
    host = torch_device and torch_device.host
    if host is not None and str(device or "cpu") == "cpu":
        return _Place("cpu", lambda: host.chip, lambda: nullcontext(host.launcher.load))
    kind, _, number = str(f"cuda:{device}" if isinstance(device, int) else device or "cuda").partition(":")
    if kind != "cuda" or not (number.isdecimal() or not number):
        raise ValueError(f"warmup: `device` must be a GPU, such as 'cuda:0', got {device!r}; others compile nothing.")
    count = _gpus()
    if not count:
        raise RuntimeError(
            "warmup: there is no GPU. To fill the kernel cache for GPUs elsewhere, name their architecture: "
            'architecture="sm_90".'
        )
    cuda = interop.cupy().cuda
    index = int(number) if number else cuda.runtime.getDevice()
    if index >= count:
        raise ValueError(f"warmup: there is no device {device!r}, but {count} of them, counted from 0.")

    def load(variant: Kernel, shared: int) -> None:
        with cuda.Device(index):
            compiler.Launcher.load(variant, shared)

    return _Place(f"cuda:{index}", lambda: gpu.gpu(index)[1], lambda: nullcontext(load))


def _elsewhere(architecture: str, device: Any) -> _Place:
    """A GPU that is not here, for which kernels are compiled into CuPy's cache on disk."""
    found = _ARCHITECTURE.fullmatch(architecture)
    if not found:
        raise ValueError(f"warmup: `architecture` must be one such as 'sm_90', got {architecture!r}.")
    if device is not None:
        raise ValueError(f"warmup: either `device` or `architecture`, got {device!r} and {architecture!r}.")
    if os.environ.get("CUPY_CACHE_IN_MEMORY", "0") == "1":
        raise RuntimeError("warmup: with CUPY_CACHE_IN_MEMORY=1 CuPy has no cache on disk to fill.")
    if _gpus():
        raise RuntimeError(
            "warmup: `architecture` is for processes without a GPU, and this one has one. Leave it out to compile for "
            'that GPU, or hide it with CUDA_VISIBLE_DEVICES="".'
        )

    @contextmanager
    def filling() -> Iterator[Callable[[Kernel, int], object]]:
        with compiler.without_gpu() as fill:
            yield lambda variant, _: fill(variant, found[1])

    return _Place(architecture, partial(gpu.chip, int(found[1])), filling)


def _gpus() -> int:
    """The number of GPUs, none where there is no driver."""
    runtime = interop.cupy().cuda.runtime
    try:
        return runtime.getDeviceCount()
    except runtime.CUDARuntimeError:
        return 0

"""Compilation of kernels before the first call: `warmup`."""

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
    """Result of a warm-up.

    Attributes:
        kernels: Number of kernels that the calls need, all of them ready now.
        by_loss: Number of these kernels by name of the loss.
        seconds: Time that the warm-up took, nearly 0 if the kernels were ready before.
        device: The device, or architecture, that the kernels are for.
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

    Afterwards, such calls and their backward neither compile nor load anything: they can be captured in a CUDA graph,
    and no first step waits for a compiler. Compiled kernels are stored in CuPy's cache on disk (``CUPY_CACHE_DIR``), so
    that a container that was built with this cache finds them there (docs/warmup.md).

    Nothing is launched and no memory of tensors is allocated: the calls are planned for contiguous operands of these
    dtypes and shapes. The choice of kernels depends on dtypes, on options, on which operands are broadcast, on whether
    sizes are multiples of a vector's, on whether there are few elements, and on whether their number is a multiple of
    1024; for losses of rows, it depends on the number of classes, on whether there are few rows, and on the GPU.
    Operands in other layouts have kernels of their own, which the first call with such operands compiles.

    A warm-up may run in a thread of its own beside other work: each kernel is compiled once, whichever thread needs it
    first.

    Args:
        losses: A name, a function of ``cupylosses.functional``, ``define_loss`` or ``define_statistics``, or a Module
            of ``cupylosses.nn`` (with its options), or several of these; None for all losses of the library.
        dtypes: One dtype for all operands, by name or as a dtype of torch or NumPy; or a tuple with a dtype per
            operand, the last of which serves all further operands; or a list of several of these. A target of class
            indices is int64 unless its dtype is given: for ``cross_entropy``, ``"bfloat16"`` means logits and class
            indices, ``("bfloat16", "float32")`` means logits and class probabilities.
        shapes: One shape for all operands; or a tuple with a shape per operand, the last of which serves all further
            operands; or a list of several of these. For losses of rows, it is the shape of the logits; class indices
            have it without the class dimension.
        backward: True if backward will run, too.
        argnums: The operands that require grad: a position or a name, or several at once. By default all floating
            operands but ``target``; for losses of rows only the logits.
        autocast: True if the calls will be made under torch's autocast.
        device: The GPU: a number, ``"cuda:1"`` or a ``torch.device``; the current one by default.
        architecture: Architecture of GPUs to fill the cache for, such as ``"sm_90"``, on a machine without a GPU. A
            machine with such a GPU finds the kernels in the cache if it has the same versions of CuPy and of the
            run-time compiler, at the same paths. Losses of rows are planned for such a GPU. If this machine has a GPU,
            hide it with ``CUDA_VISIBLE_DEVICES=""``.
        max_workers: Number of threads that compile; by default the number of processors that this process may use.
        options: Further arguments of the functions, by name; each is passed to those losses that accept it. They are
            parameters, flags, ``dim``, ``out_dtype`` and ``reduction`` (a list for several). An array (``weight``,
            ``mask``, ``normalizer``, and operands such as ``pos_weight``) is given as True for one of the full shape
            (class weights have a number per class, a mask of rows has one per row), as a shape, or as an array like
            it. Numbers are passed as numbers.

    Returns:
        A :class:`Warmup`: the number of kernels that are ready, and how long it took.

    Raises:
        TypeError: Something is not a loss of this library, a loss does not take a dtype, or no loss takes an option.
        ValueError: Shapes do not broadcast or options are out of range, as in the calls themselves; there is no such
            device; ``device`` and ``architecture`` are both given; or too little is known of an architecture to plan
            losses of rows for it.
        KernelError: A kernel did not compile; the message says why.
        RuntimeError: There is no GPU and no ``architecture`` is given; or there is a GPU and ``architecture`` is given;
            or ``architecture`` is given and CuPy keeps its cache in memory.
    """
    begin = perf_counter()
    calls: list[tuple[Any, list[Any], str]] = []
    entries = list(_functions(losses))
    for name in options:
        if not any(name in dict(function.loss.arguments) for function, _ in entries):
            raise TypeError(f"warmup: `{name}` is an argument of none of {', '.join(x.loss.name for x, _ in entries)}.")
    for function, kept in entries:
        accepted = {n: x for n, x in options.items() if n in dict(function.loss.arguments)}
        arguments = kept | accepted
        reductions = _reductions(function.loss, arguments.pop("reduction", None))
        for types, sizes, reduction in product(_several(dtypes), _several(shapes), reductions):
            call = _call(function, types, sizes, arguments | reduction)
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
    """Calls ``work`` on each kernel, in threads: compilers do not hold the GIL.

    ``advance`` is called after each kernel. The first error cancels the kernels that have not begun, and is raised.
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
    """Functions that ``losses`` selects, each with the options that a Module stores."""
    names = tuple(registry())
    if losses is None:
        losses = names
    for x in [losses] if isinstance(losses, str) or not isinstance(losses, Iterable) else losses:
        function = getattr(functional, x) if isinstance(x, str) and x in (*names, *functions()) else x
        # The function of a Module, or of its class.
        function = getattr(getattr(function, "forward", None), "function", function)
        loss = getattr(function, "loss", None)
        if not isinstance(loss, Definition):
            raise TypeError(
                "warmup: `losses` must be names, functions of cupylosses.functional, define_loss or define_statistics, "
                f"or Modules of cupylosses.nn, got {x!r}; there are {', '.join(names)}."
            )
        kept = {} if function is x or isinstance(x, (str, type)) else {n: getattr(x, n, None) for n in loss.kept}
        # An option that torch's Module lacks, or that is not set, has the function's default.
        yield function, {n: value for n, value in kept.items() if value is not None}


def _reductions(loss: Definition, requested: Any) -> list[dict[str, Any]]:
    """Reductions as keyword arguments: those given or the default; no argument if the function has none."""
    default = dict(loss.arguments).get("reduction")
    if default is None:
        return [{}]
    requested = default if requested is None else requested
    return [{"reduction": x} for x in ([requested] if isinstance(requested, str) else requested)]


def _several(values: Any) -> list[Any]:
    return values if isinstance(values, list) else [values]


def _call(function: Any, dtypes: Any, shapes: Any, options: Mapping[str, Any]) -> Call:
    """Prepares a call, checked like any other, with placeholders for arrays."""
    if isinstance(shapes, int):
        raise TypeError(f"warmup: a shape is a tuple, and a list has several of them; got {shapes!r} for one.")
    loss = function.loss
    names = [_dtype(x) for x in (dtypes if isinstance(dtypes, tuple) else (dtypes,))]
    sizes = [shapes] if _is_single(shapes) else list(shapes)
    #: Dtype and shape of each array argument if it is given as True, by name.
    arrays = loss.engine.placeholders(loss, names, sizes, options)
    needed = [x.name for x in loss.operands if x.default is None and x.name not in options]
    arguments = {n: placeholder(*arrays[n]) for n in needed}
    for name, value in options.items():
        arguments[name] = _array(value, *arrays[name]) if name in arrays else value
    return function.prepare(**arguments)


def _is_single(shapes: Any) -> bool:
    """True if ``shapes`` is one shape, not a shape per operand."""
    return all(isinstance(n, int) for n in shapes)


def _array(value: Any, dtype: str, shape: tuple[int, ...]) -> Any:
    """Placeholder for an array that is given as True, as a shape or as an array; a number or None stays as it is."""
    if value is None or value is False:
        return None
    if value is True:
        return placeholder(dtype, shape)
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return placeholder(_dtype(value.dtype), value.shape)
    return placeholder(dtype, value) if isinstance(value, (tuple, list)) else value


def _dtype(dtype: Any) -> str:
    """Name of a dtype that is given by name, or as a dtype of torch or NumPy."""
    name = getattr(dtype, "__name__", None) or getattr(dtype, "name", None) or str(dtype).removeprefix("torch.")
    if name not in interop.ITEMSIZE:
        raise TypeError(f"warmup: `dtypes` must be among {', '.join(interop.ITEMSIZE)}, got {dtype!r}.")
    return name


def _promoted(call: Call, autocast: bool) -> str:
    engine = call.loss.engine
    engine.check(call)
    result: str = engine.promoted(call)
    return "float32" if autocast and result != "float64" else result


def _wanted(call: Call, argnums: int | str | Sequence[int | str] | None) -> Wanted:
    """True for each array of the call that requires a gradient."""
    if argnums is None:
        return call.loss.engine.trained(call)
    slots = [slot_of(call, x) for x in ((argnums,) if isinstance(argnums, (int, str)) else argnums)]
    return tuple(i in slots for i in range(len(call.arrays)))


# ----------------------------------------------------------------------------------------------------------------------
# Compilers


@dataclass(frozen=True)
class _Place:
    """Target that kernels are made ready for.

    ``name`` is the device or architecture. ``chip`` returns the limits that losses of rows are planned for. The context
    ``compiling`` yields a function that makes a kernel ready, given the bytes of shared memory that its launches need.
    """

    name: str
    chip: Callable[[], Chip]
    compiling: Callable[[], AbstractContextManager[Callable[[Kernel, int], object]]]


def _gpu(device: Any) -> _Place:
    """The GPU that ``device`` selects, on which kernels are compiled and loaded."""
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
    """An absent GPU of this architecture, for which kernels are compiled into CuPy's cache on disk."""
    match = _ARCHITECTURE.fullmatch(architecture)
    if not match:
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
            yield lambda variant, _: fill(variant, match[1])

    return _Place(architecture, partial(gpu.chip, int(match[1])), filling)


def _gpus() -> int:
    """Number of GPUs; 0 if there is no driver."""
    runtime = interop.cupy().cuda.runtime
    try:
        return runtime.getDeviceCount()
    except runtime.CUDARuntimeError:
        return 0

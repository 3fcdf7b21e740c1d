"""Providers of a loss: this library, several ways to compute it with torch, and Liger and QuACK if installed."""

from __future__ import annotations

import gc
import inspect
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from typing import Any, TypeVar

import torch
from rich.text import Text

from benchmarking import workloads
from benchmarking.figures import COMPILE, EAGER, LIGER, NAIVE, OURS, QUACK, QUACK_OP, RIVALS
from benchmarking.workloads import Workload
from cupylosses.testing.eager import Call

OK = "ok"

Result = TypeVar("Result")


def ours(workload: Workload) -> Call:
    """This library's function."""
    return workload.ours()


def naive(workload: Workload) -> Call | None:
    """The formula, one torch operation at a time."""
    return workload.naive()


def eager(workload: Workload) -> Call | None:
    """The call that users of torch make; None if that is the naive formula."""
    return workload.torchs()


def compiled(workload: Workload) -> Call:
    """`torch.compile` of the eager expression."""
    function = expressions(workload)[EAGER]

    def call(*operands: torch.Tensor) -> torch.Tensor:
        return function(*operands)

    # torch identifies compiled functions by their code object, and runs them uncompiled after a few variants.
    torch.compiler.reset()
    return torch.compile(call, dynamic=False, fullgraph=True)


class Absent(Exception):
    """Raised with the reason why a peer does not compute a workload."""


def _liger_kl(workload: Workload, mode: str) -> Call | None:
    # Liger requires operands of the same shape and differentiates only the first.
    if workload.differentiated(mode) > 1 or len(set(workload.shapes)) > 1:
        return None
    from liger_kernel.transformers import LigerKLDIVLoss

    values = workload.loss.values(workload.case)
    module = LigerKLDIVLoss(reduction=workload.reduction, log_target=values["log_target"])
    return module if values["log_input"] else lambda input, target: module(torch.log(input), target)


def _liger_cross_entropy(workload: Workload, mode: str) -> Call | None:
    from liger_kernel.transformers.functional import liger_cross_entropy

    return _with_options(liger_cross_entropy, workload, {"z_loss": "lse_square_scale"})


def _quack_cross_entropy(workload: Workload, mode: str) -> Call | None:
    from quack.cross_entropy import cross_entropy

    return _with_options(cross_entropy, workload, {})


def _quack_one_pass(workload: Workload, mode: str) -> Call | None:
    from quack.cross_entropy import cross_entropy_fwd

    call = _with_options(cross_entropy_fwd, workload, {}, return_dx=True)
    if call is None or mode != "forward+backward":
        return None

    def values(*operands: torch.Tensor) -> torch.Tensor:
        # The operator bypasses autograd: the gradient is complete when it returns.
        with torch.no_grad():
            return call(*(x.detach() for x in operands))[0]

    return values


def _with_options(
    function: Callable[..., Any], workload: Workload, theirs: Mapping[str, str], **more: Any
) -> Call | None:
    """A peer's loss of rows of logits with the options of a workload; None if the peer lacks one of them.

    ``theirs`` maps our option names to the peer's where they differ.
    """
    if workload.kind != "indices":
        return None
    known = inspect.signature(function).parameters
    options = {theirs.get(name, name): value for name, value in workload.options.items()}
    if not {*options, *workload.names[2:]} <= known.keys():
        return None
    if len(workload.shape) != 2:
        return _raising(Absent("takes logits of two dimensions"))
    if "reduction" in known:
        more["reduction"] = workload.reduction

    def call(*operands: torch.Tensor) -> Any:
        return function(*operands[:2], **dict(zip(workload.names[2:], operands[2:], strict=True)), **options, **more)

    return call


def _raising(error: Exception) -> Call:
    def call(*_: torch.Tensor) -> torch.Tensor:
        raise error

    return call


#: For each peer and loss, a function that makes the call for a workload and a mode, or returns None if the peer
#: computes something else.
PEERS: Mapping[str, Mapping[str, Callable[[Workload, str], Call | None]]] = {
    LIGER: {"kl_div": _liger_kl, "cross_entropy": _liger_cross_entropy},
    QUACK: {"cross_entropy": _quack_cross_entropy},
    QUACK_OP: {"cross_entropy": _quack_one_pass},
}

#: The module that each peer is imported from.
MODULES = {LIGER: "liger_kernel", QUACK: "quack", QUACK_OP: "quack"}

#: Peers that overwrite the operand with its gradient.
OVERWRITING = frozenset({(LIGER, "cross_entropy")})


def peers(workload: Workload, mode: str) -> dict[str, Call]:
    """The calls of the installed peers that compute the same loss."""
    found: dict[str, Call] = {}
    for name, makers in PEERS.items():
        make = makers.get(workload.loss.name)
        try:
            call = make(workload, mode) if make else None
        except ImportError as error:
            call = _raising(error) if name not in not_installed([name]) else None
        except Exception as error:
            call = _raising(error)
        if call:
            found[name] = call
    return found


def not_installed(names: Collection[str]) -> dict[str, str]:
    """The requested providers that are not installed, with the reason."""
    found = {name: module for name, module in MODULES.items() if name in names and sys.modules.get(module) is None}
    return {name: f"no package {module}" for name, module in found.items() if find_spec(module) is None}


def expressions(workload: Workload) -> dict[str, Call]:
    """The calls of ours, eager and naive. If eager and naive are the same expression, it is listed as eager."""
    found = [x for x in (eager(workload), naive(workload)) if x is not None]
    return {OURS: ours(workload), **dict(zip((EAGER, NAIVE), found, strict=False))}


def rivals(workload: Workload) -> dict[str, Call]:
    """The calls of ours and eager."""
    found = expressions(workload)
    return {name: found[name] for name in (OURS, EAGER)}


def providers(workload: Workload, mode: str, compile: bool, wanted: Sequence[str] = RIVALS) -> dict[str, Call]:
    """The calls of ours and of each wanted provider that computes this workload, by name."""
    found = expressions(workload)
    if compile and COMPILE in wanted:
        found[COMPILE] = compiled(workload)
    if {*wanted} & PEERS.keys():
        # Only on request, because importing peers takes seconds.
        found |= peers(workload, mode)
    return {name: call for name, call in found.items() if name == OURS or name in wanted}


def attempt(run: Callable[[], Result], times: int = 1) -> tuple[str, Result | None]:
    """Calls ``run`` and returns the status and the last result; cleans up after a failure.

    Raises errors that leave the GPU unusable, because nothing measured after them would mean anything.
    """
    result = None
    try:
        for _ in range(times):
            result = run()
        torch.cuda.synchronize()
        return OK, result
    except torch.cuda.OutOfMemoryError:
        status = "out of memory"
    except Absent as reason:
        status = f"absent: {reason}"
    except Exception as error:
        # Some providers colour their messages with ANSI codes.
        first = (Text.from_ansi(str(error).strip()).plain.splitlines() or [""])[0]
        status = f"failed: {type(error).__name__}: {first[:200]}"
    del result
    # CUDA reports a non-fatal error again at the next launch: clear it before the next provider runs.
    with suppress(RuntimeError):
        torch.ones(1, device=workloads.DEVICE).add_(1)
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    return status, None


def attempts(calls: Mapping[str, Callable[[], object]]) -> dict[str, str]:
    """Warms up each call and returns its status by name.

    Raises:
        RuntimeError: a call left the GPU unusable.
    """
    found = {}
    for name, call in calls.items():
        try:
            found[name], _ = attempt(call, times=2)
        except RuntimeError as error:
            raise RuntimeError(f"the GPU does not outlive {name}; see --providers") from error
    return found

"""Who computes a loss: this library, torch in its several ways, and Liger where it is installed."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import torch

import cupylosses.functional
from benchmarking.figures import COMPILE, EAGER, LIGER, NAIVE, OURS
from benchmarking.workloads import Workload
from cupylosses.forms import Form
from cupylosses.testing.check import bind
from cupylosses.testing.eager import Call, formula, twin

OK = "ok"

Result = TypeVar("Result")


def _kl(xp: Any, input: torch.Tensor, target: torch.Tensor, log_target: bool, log_input: bool) -> torch.Tensor:
    log_t = target if log_target else torch.log(target)
    return (torch.exp(target) if log_target else target) * (log_t - (input if log_input else torch.log(input)))


def _hinge(xp: Any, input: torch.Tensor, target: torch.Tensor, margin: float) -> torch.Tensor:
    return torch.clamp(margin - input * target, min=0)


#: Formulas as people write them, by loss, where the reference guards edges that they would not: timing those guards
#: would flatter this library.
FORMULAS: dict[str, Callable[..., torch.Tensor]] = {"hinge_loss": _hinge, "kl_div": _kl}


def ours(workload: Workload) -> Call:
    """This library's function."""
    function = getattr(cupylosses.functional, workload.loss.name)
    return bind(function, workload.loss, workload.loss.values(workload.case), workload.reduction, workload.dim)


def naive(workload: Workload) -> Call | None:
    """The formula, one torch operation at a time, and the mean of it (or the reduction asked for); None where that is
    for the workload to say.
    """
    loss = workload.loss
    if isinstance(loss, Form) or workload.dim is not None:
        return None
    written = replace(loss, reference=FORMULAS.get(loss.name, loss.reference))
    return formula(written, loss.values(workload.case), workload.reduction)


def eager(workload: Workload) -> Call | None:
    """What users of torch call: the twin, or the expression that the workload names; None where it is the naive one."""
    return workload.eager or twin(workload.loss, workload.case, workload.reduction)


def compiled(workload: Workload) -> Call:
    """`torch.compile` of the eager expression."""
    function = expressions(workload)[EAGER]

    def call(*operands: torch.Tensor) -> torch.Tensor:
        return function(*operands)

    # Compiled functions are told apart by their code, and after a few variants of it torch runs them uncompiled.
    torch.compiler.reset()
    return torch.compile(call, dynamic=False, fullgraph=True)


def _liger_kl(workload: Workload) -> Call:
    from liger_kernel.transformers import LigerKLDIVLoss

    values = workload.loss.values(workload.case)
    module = LigerKLDIVLoss(reduction=workload.reduction, log_target=values["log_target"])
    return module if values["log_input"] else lambda input, target: module(torch.log(input), target)


#: Liger's kernels by loss. They want operands of one shape and differentiate the first alone.
LIGER_LOSSES: dict[str, Callable[[Workload], Call]] = {"kl_div": _liger_kl}


def liger(workload: Workload, mode: str) -> Call | None:
    """Liger's kernel, where it is installed and computes the same."""
    make = LIGER_LOSSES.get(workload.loss.name)
    if make is None or workload.differentiated(mode) > 1 or len(set(workload.shapes)) > 1:
        return None
    try:
        return make(workload)
    except ImportError:
        return None


def expressions(workload: Workload) -> dict[str, Call]:
    """Ours, eager and naive. Where the last two are one expression, it is listed as eager."""
    found = [x for x in (eager(workload), naive(workload)) if x is not None]
    return {OURS: ours(workload), **dict(zip((EAGER, NAIVE), found, strict=False))}


def rivals(workload: Workload) -> dict[str, Call]:
    """Ours and eager."""
    found = expressions(workload)
    return {name: found[name] for name in (OURS, EAGER)}


def providers(workload: Workload, mode: str, compile: bool) -> dict[str, Call]:
    """Everyone who computes this workload, by name."""
    found = expressions(workload)
    if compile:
        found[COMPILE] = compiled(workload)
    other = liger(workload, mode)
    if other:
        found[LIGER] = other
    return found


def attempt(run: Callable[[], Result], times: int = 1) -> tuple[str, Result | None]:
    """Runs something and says how it went, with what it returned; what is left of a failure is cleared away.

    An error that leaves the GPU unusable is raised: nothing measured after it would mean anything.
    """
    result = None
    try:
        for _ in range(times):
            result = run()
        torch.cuda.synchronize()
        return OK, result
    except torch.cuda.OutOfMemoryError:
        status = "out of memory"
    except Exception as error:
        first = (str(error).strip().splitlines() or [""])[0]
        status = f"failed: {type(error).__name__}: {first[:200]}"
    del result
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    return status, None


def attempts(calls: Mapping[str, Callable[[], object]]) -> dict[str, str]:
    """Warms each call up and says how it went."""
    return {name: attempt(call, times=2)[0] for name, call in calls.items()}

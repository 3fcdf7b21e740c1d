"""One row of the table: the errors, times and problems of a check."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from benchmarking import timing
from cupylosses.testing.check import Check, Outcome, perform, run
from cupylosses.testing.tolerance import Comparison

#: Seconds of GPU time to spend on timing one function.
TARGET = 0.005

COMPILE = "compile"


@dataclass(frozen=True)
class Row:
    """One check as printed and written. Errors are in ulp, times in milliseconds; None means "not measured".

    Fields ``..._ulp`` are in plain ulp, fields ``..._error`` in conditioned units
    (:mod:`cupylosses.testing.tolerance`).
    """

    section: str
    loss: str
    case: str
    dtype: str
    reduction: str
    layout: str
    gradients: str
    value_ulp: float | None = None
    torch_value_ulp: float | None = None
    gradient_ulp: float | None = None
    torch_gradient_ulp: float | None = None
    value_error: float | None = None
    torch_value_error: float | None = None
    gradient_error: float | None = None
    torch_gradient_error: float | None = None
    ms: float | None = None
    torch_ms: float | None = None
    compile_ms: float | None = None
    problems: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """True if the check passed."""
        return not self.problems

    @property
    def speed_up(self) -> float | None:
        """torch's time divided by ours."""
        return self.torch_ms / self.ms if self.ms and self.torch_ms else None

    def record(self) -> dict[str, Any]:
        """The row as written to the JSON file."""
        return {**asdict(self), "speed_up": self.speed_up, "ok": self.ok}


def row(section: str, check: Check, **fields: Any) -> Row:
    """A row for a check, with these results."""
    case, dtype, reduction, layout, gradients = check.words
    return Row(section, check.loss.name, case, dtype, reduction, layout, gradients, **fields)


def guarded(section: str, check: Check, measure: Callable[[Check], Row]) -> Row:
    """Measures a check and returns its row; an exception becomes a failed row, unless the GPU does not survive it.

    Raises:
        RuntimeError: the GPU reports an error after which no kernel can run.
    """
    try:
        return measure(check)
    except Exception as error:
        if check.device != "cpu":
            _still_alive(error)
        return row(section, check, problems=(f"{type(error).__name__}: {first_line_of(error)}",))


def _still_alive(error: Exception) -> None:
    if isinstance(error, torch.cuda.OutOfMemoryError):
        torch.cuda.empty_cache()
    try:
        torch.cuda.synchronize()
    except RuntimeError as dead:
        raise RuntimeError(f"the GPU does not answer any more: {first_line_of(dead)}") from error


def first_line_of(error: BaseException) -> str:
    """The first line of an error's message."""
    return (str(error).strip().splitlines() or ["no message"])[0]


def accuracy_and_time(check: Check, compile: bool = False, time: bool = True, section: str = "losses") -> Row:
    """Compares the library with the truth and torch; on a GPU, with ``time``, also measures forward and backward."""
    operands = check.operands()
    outcome = perform(check, operands)
    # Without a GPU, the formula runs, or the kernels with checks on the CPU; neither is built for speed.
    timed = time and outcome.ok and check.device != "cpu"
    times = measured(check, operands, functions(check, outcome, compile)) if timed else {}
    return row(
        section,
        check,
        value_ulp=outcome.value and outcome.value.ulps,
        torch_value_ulp=outcome.value and outcome.value.other_ulps,
        gradient_ulp=worst(outcome.gradients, lambda c: c.ulps),
        torch_gradient_ulp=worst(outcome.gradients, lambda c: c.other_ulps),
        value_error=outcome.value and outcome.value.conditioned,
        torch_value_error=outcome.value and outcome.value.other_conditioned,
        gradient_error=worst(outcome.gradients, lambda c: c.conditioned),
        torch_gradient_error=worst(outcome.gradients, lambda c: c.other_conditioned),
        ms=times.get("ours"),
        torch_ms=times.get("torch"),
        compile_ms=times.get(COMPILE),
        problems=outcome.problems,
    )


def rehearse(check: Check) -> None:
    """Makes the library calls of `perform` and nothing else, to find the kernels that it needs."""
    operands = check.operands()
    for grad_output in check.upstream(operands):
        run(check.ours(), operands, check.gradients_of, grad_output)


def worst(comparisons: Sequence[Comparison], of: Callable[[Comparison], float | None]) -> float | None:
    """The largest value of ``of`` over the comparisons, ignoring None; None if there is no value."""
    return max((x for x in map(of, comparisons) if x is not None), default=None)


def functions(check: Check, outcome: Outcome, compile: bool) -> dict[str, Callable[..., torch.Tensor]]:
    """The functions to time, by name."""
    found = {"ours": check.ours()}
    if outcome.torch:
        found["torch"] = eager = outcome.torch
        if compile:
            # torch identifies compiled functions by their code object and keeps only a few variants of each.
            torch.compiler.reset()
            found[COMPILE] = torch.compile(lambda *operands: eager(*operands), dynamic=False, fullgraph=True)
    return found


def measured(
    check: Check, operands: Sequence[torch.Tensor], found: Mapping[str, Callable[..., torch.Tensor]]
) -> dict[str, float]:
    """Median milliseconds of forward and backward by function, interleaved; forward only if nothing requires grad."""
    upstream = check.upstream(operands)[0]

    def step(function: Callable[..., torch.Tensor]) -> Callable[..., object]:
        return lambda number=0: run(function, operands, check.gradients_of, upstream)

    calls = {name: step(function) for name, function in found.items()}
    for name in list(calls):
        try:
            calls[name]()
        except Exception:
            # torch.compile does not support every function; that is no failure of this library.
            if name != COMPILE:
                raise
            del calls[name]
    return {name: x.median for name, x in timing.interleaved(calls, TARGET).items()}

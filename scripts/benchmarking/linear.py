"""Softmax losses of a linear layer beside the bare matrix products: time as a ratio to the products, and peak memory.

Each provider alternates with the matrix products that any implementation needs, computed by `torch.mm` into
preallocated buffers: one for the logits, two with the gradient of one factor, three with both gradients, and four for
log-probabilities, whose backward computes the logits again. Log-probabilities of given logits alternate with a copy of
the logits. A measurement covers several calls, so that the host runs ahead of the GPU. The clock rate of a GPU depends
on its recent load, so compare ratios, and milliseconds only within a pair.

The rival eager includes torch's own chunked function (torch 2.13), and the rival Liger includes Cut Cross Entropy; of
QuACK, the chunked function is measured. Rivals that are not installed are recorded as absent.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from benchmarking import figures, memory, timing, workloads
from benchmarking.figures import EAGER, LAYERS, LIGER, OURS, QUACK, spell_case, spell_shape
from benchmarking.linear_softmax import LinearSoftmaxWorkload, layer
from benchmarking.providers import OK, Absent, attempt
from benchmarking.records import Row
from benchmarking.selection import Run
from benchmarking.workloads import Inputs, step
from cupylosses import functional
from cupylosses.testing.eager import Call

#: Rivals that only this section has.
CHUNKED, CUT = "torch chunked", "cut cross entropy"

DTYPE = "bfloat16"

GB = 1e9

COLUMNS = (
    "loss", "shape", "dtype", "variant", "provider", "status", "ms", "ms_low", "ms_high", "rounds", "products",
    "products_ms", "ratio", "passes", "copy_ms", "copy_fraction", "peak_gb",
)  # fmt: skip


@dataclass(frozen=True)
class Variant:
    """A measured call.

    Attributes:
        name: Name of the variant, as in `figures.LAYERS`.
        case: Options of our function.
        differentiated: Number of operands, from the first, that require grad.
        ignored: True if every second label is ignored.
        rivals: True if rivals are measured, too.
    """

    name: str
    case: Mapping[str, Any] = field(default_factory=dict)
    differentiated: int = 2
    ignored: bool = False
    rivals: bool = False

    @property
    def products(self) -> int:
        """Least number of matrix products that the call needs."""
        return 1 + self.differentiated


def option(**case: Any) -> Variant:
    """A variant with these options, named after them."""
    return Variant(spell_case(case), case)


#: The variants by the names that `figures.LAYERS` uses.
VARIANTS: Mapping[str, Variant] = {
    x.name: x
    for x in (
        Variant("default", rivals=True),
        option(max_memory=550_000_000),
        option(logits_dtype="float32"),
        option(accumulate_dtype="bfloat16"),
        Variant("half ignored, skip_ignored=True", {"skip_ignored": True}, ignored=True),
        Variant("frozen weight", differentiated=1),
        Variant("forward", differentiated=0),
    )
}


def measure(run: Run) -> Iterator[Row]:
    """Yields the rows of all shapes, variants and providers, and then those of log-probabilities.

    A quick run has only the first shape, without options.
    """
    for loss in run.losses_of(LinearSoftmaxWorkload):
        for sizes, names in LAYERS[: 1 if run.quick else None]:
            products = None
            for variant in [VARIANTS[x] for x in [*names][: 1 if run.quick else None]]:
                workload = layer(loss, sizes, DTYPE, case=variant.case, ignored=variant.ignored)
                if run.begin(f"{workload}: {variant.name}"):
                    products = products or Products(sizes)
                    yield from _measure(workload, variant, products, run)
            del products
            gc.collect()
            torch.cuda.empty_cache()
        if not run.quick:
            yield from _log_probs(run)
            yield from _linear_log_probs(run)


class Products:
    """Computes up to four matrix products of a layer, into its own buffers; the fourth repeats the first."""

    def __init__(self, sizes: Sequence[int]) -> None:
        rows, features, classes = sizes
        self._buffers: list[torch.Tensor] = []
        self._shapes = (rows, features), (classes, features), (rows, classes)

    def __call__(self, count: int) -> None:
        if not self._buffers:
            # Allocate here, not in the constructor, so that only this measurement fails if memory runs out.
            kind = getattr(torch, DTYPE)
            self._buffers = [torch.randn(x, dtype=kind, device=workloads.DEVICE) for x in self._shapes]
            self._buffers += [torch.empty_like(x) for x in self._buffers[:2]]
        x, w, logits, of_x, of_w = self._buffers
        for _ in range(2 if count > 3 else 1):
            torch.mm(x, w.T, out=logits)
        if count > 1:
            torch.mm(logits, w, out=of_x)
        if count > 2:
            torch.mm(logits.T, x, out=of_w)


def _measure(workload: LinearSoftmaxWorkload, variant: Variant, products: Products, run: Run) -> Iterator[Row]:
    made, inputs = attempt(lambda: Inputs(workload))
    describe = {
        "loss": workload.loss.name,
        "shape": spell_shape((*workload.shapes[0], workload.shapes[1][0])),
        "dtype": workload.dtype,
        "variant": variant.name,
        "products": variant.products,
    }
    if inputs is None:
        yield {**describe, "provider": OURS, "status": f"inputs: {made}"}
        return
    inputs.differentiate(variant.differentiated)
    calls = {OURS: workload.ours(), **(rivals(workload, run.providers) if variant.rivals else {})}
    yield from _paired(describe, inputs[0], calls, partial(products, variant.products), _beside_products, run)


def _log_probs(run: Run) -> Iterator[Row]:
    """Measures log-probabilities and entropies of given logits, beside copies of the logits."""
    shape, modes = figures.LOG_PROBS
    for mode, (passes, _) in modes.items():
        describe = {"loss": "token_log_probs", "shape": spell_shape(shape), "dtype": DTYPE, "variant": mode}
        if not run.begin(" ".join(describe.values())):
            continue
        status, drawn = attempt(lambda: (*_drawn(shape), _labels(*shape)))
        if drawn is None:
            yield {**describe, "passes": passes, "provider": OURS, "status": f"inputs: {status}"}
            continue
        logits, labels = drawn
        other = torch.empty_like(logits)
        logits.requires_grad_(mode != "forward")
        calls = {OURS: _mean_of(functional.token_log_probs)}
        calls |= {EAGER: _eager_log_probs} if EAGER in run.providers else {}
        described, copy = {**describe, "passes": passes}, partial(other.copy_, logits.detach())
        yield from _paired(described, (logits, labels), calls, copy, partial(_beside_copies, passes), run)
        del logits, other, drawn, copy
        gc.collect()
        torch.cuda.empty_cache()


def _linear_log_probs(run: Run) -> Iterator[Row]:
    """Measures forward and backward of log-probabilities and entropies of a layer's output."""
    sizes, _ = figures.LINEAR_LOG_PROBS
    rows, features, classes = sizes
    describe = {"loss": "linear_token_log_probs", "shape": spell_shape(sizes), "dtype": DTYPE}
    describe["variant"] = "forward+backward"
    if run.begin(" ".join(describe.values())):
        status, drawn = attempt(lambda: (*_drawn((rows, features), (classes, features)), _labels(rows, classes)))
        if drawn is None:
            yield {**describe, "products": 4, "provider": OURS, "status": f"inputs: {status}"}
            return
        x, w, labels = drawn
        with torch.no_grad():
            w.mul_(features**-0.5)
        operands = x.requires_grad_(), w.requires_grad_(), labels
        calls = {OURS: _mean_of(functional.linear_token_log_probs)}
        if EAGER in run.providers:
            calls[EAGER] = lambda x, w, labels: _eager_log_probs(torch.nn.functional.linear(x, w), labels)
        baseline = partial(Products(sizes), 4)
        yield from _paired({**describe, "products": 4}, operands, calls, baseline, _beside_products, run)


def _drawn(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    return [torch.randn(x, dtype=getattr(torch, DTYPE), device=workloads.DEVICE) for x in shapes]


def _labels(rows: int, classes: int) -> torch.Tensor:
    return torch.randint(classes, (rows,), device=workloads.DEVICE)


def _mean_of(function: Callable[..., Any]) -> Call:
    """A call that returns one number from all log-probabilities and entropies, as policy losses do."""

    def call(*operands: torch.Tensor) -> torch.Tensor:
        log_probs, entropy = function(*operands, return_entropy=True)
        mean: torch.Tensor = log_probs.mean() + 0.01 * entropy.mean()
        return mean

    return call


def _eager_log_probs(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    log_p = torch.log_softmax(logits, -1, dtype=torch.float32)
    entropy = -(log_p.exp() * log_p).sum(-1)
    return log_p.gather(-1, labels[:, None]).mean() + 0.01 * entropy.mean()


def _paired(
    describe: Row,
    operands: tuple[torch.Tensor, ...],
    calls: Mapping[str, Call],
    baseline: Callable[[], object],
    times: Callable[[timing.Timing, timing.Timing], Row],
    run: Run,
) -> Iterator[Row]:
    """Yields a row per provider; each provider alternates with the baseline."""
    for name, call in calls.items():
        row: dict[str, Any] = {**describe, "provider": name}
        status, sizes = attempt(partial(_peak, call, operands))
        if status == OK and sizes is not None:
            row["peak_gb"] = sizes / GB
            candidate = partial(step, call, operands)
            status, found = attempt(partial(timing.paired, baseline, candidate, run.target))
            row |= times(*found) if found else {}
        if status != OK:
            run.say(f"{describe['loss']} {describe['shape']}, {describe['variant']}: {name} {status}")
        for x in operands:
            x.grad = None
        yield {**row, "status": status}


def _peak(call: Call, operands: tuple[torch.Tensor, ...]) -> int:
    """Peak bytes of a second call beyond operands, value and gradients.

    Memory that is kept across calls does not count, because the first call has allocated it.
    """
    step(call, operands)
    outputs, most = memory.peak(call, operands)
    return most - outputs


def _times(found: timing.Timing) -> Row:
    return {"ms": found.median, "ms_low": found.low, "ms_high": found.high, "rounds": found.repetitions}


def _beside_products(products: timing.Timing, found: timing.Timing) -> Row:
    return {**_times(found), "products_ms": products.median, "ratio": found.median / products.median}


def _beside_copies(passes: int, copy: timing.Timing, found: timing.Timing) -> Row:
    """Columns beside a copy, which reads the logits once and writes them once: two passes."""
    fraction = passes / 2 * copy.median / found.median
    return {**_times(found), "copy_ms": copy.median, "copy_fraction": fraction}


# ----------------------------------------------------------------------------------------------------------------------
# Rivals


def rivals(workload: LinearSoftmaxWorkload, wanted: Sequence[str]) -> dict[str, Call]:
    """The calls of the wanted rivals. A rival that is not installed raises `Absent` when it is called."""
    found: dict[str, Call] = {}
    eager = workload.torchs()
    if EAGER in wanted and eager is not None:
        found |= {EAGER: eager, CHUNKED: _found_when_called(_chunked)}
    if LIGER in wanted:
        found |= {LIGER: _found_when_called(_liger), CUT: _found_when_called(_cut)}
    if QUACK in wanted:
        found[QUACK] = _found_when_called(_quack)
    return found


def _found_when_called(find: Callable[[], Call]) -> Call:
    kept: list[Call] = []

    def call(*operands: torch.Tensor) -> torch.Tensor:
        if not kept:
            try:
                kept.append(find())
            except (ImportError, AttributeError) as error:
                raise Absent(str(error)) from error
        return kept[0](*operands)

    return call


def _chunked() -> Call:
    function, options = torch.nn.functional.linear_cross_entropy, torch.nn.LinearCrossEntropyOptions()
    return lambda input, weight, target: function(input, weight, target, options=options)


def _liger() -> Call:
    from liger_kernel.transformers.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyLoss

    loss = LigerFusedLinearCrossEntropyLoss()
    return lambda input, weight, target: loss(weight, input, target)


def _cut() -> Call:
    from cut_cross_entropy import linear_cross_entropy

    return lambda input, weight, target: linear_cross_entropy(input, weight, target)


def _quack() -> Call:
    from quack.linear_cross_entropy import chunked_linear_cross_entropy

    return lambda input, weight, target: chunked_linear_cross_entropy(input, weight, target)

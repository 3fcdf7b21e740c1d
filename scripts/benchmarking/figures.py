"""The figures that the project promises, and the comparison of a run with them. Needs neither torch nor a GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from benchmarking.records import Row
from cupylosses.definition.registry import registry
from cupylosses.engines.pointwise.definition import Loss

#: Losses and dtypes of most figures, whose sizes are in `SIZES`, as powers of two.
LOSSES = ("mse_loss", "smooth_l1_loss", "huber_loss", "l1_loss")
DTYPES = ("float32", "bfloat16")
#: The losses of a quick run.
QUICK_LOSSES = (*LOSSES, "cross_entropy")
SIZES = (28, 30)

#: Modes of computation, with the number of operands that require grad (None: all).
MODES: Mapping[str, int | None] = {"forward": 0, "forward+backward": 1, "all gradients": None}

#: Mode that only the section `cliffs` has: a Hessian-vector product (HVP). The forward and backward before it are not
#: timed.
HVP = "hvp"

#: Titles of element-wise workloads: the generic one, and those with particular shapes or options.
SWEEP, KL_PROBABILITIES, HINGE_COLUMNS = "sweep", "kl_div on probabilities", "hinge_loss, targets by column"
MASKED, WEIGHTED, BY_ROW = "mse_loss, masked", "huber_loss, a weight per column", "mse_loss, a mean per row"

#: Titles of workloads of losses of rows of logits.
ROWS, IMAGES, EXTREMES, OPTIONS = "rows", "images", "very short, few or long rows", "options of rows"

#: Title of workloads of losses of a linear layer.
LINEAR = "linear layer"

#: Providers of a loss: ours, and the rivals.
OURS, COMPILE, EAGER, NAIVE, LIGER = "ours", "compile", "eager", "naive", "liger"
QUACK, QUACK_OP, PLAIN, COPY = "quack", "quack one pass", "plain", "copy"
RIVALS = (COMPILE, EAGER, NAIVE, LIGER, QUACK, QUACK_OP)
PROVIDERS = (OURS, *RIVALS, PLAIN, COPY)
#: The rivals in the project's figures.
BAR_RIVALS = (COMPILE, EAGER, NAIVE)

#: Title of workloads of vectors, and their shapes: embeddings, and vectors as long as rows of logits.
VECTOR_ROWS = "vectors"
VECTORS: Sequence[tuple[tuple[int, int], str]] = (
    ((65536, 1024), "float32"),
    ((65536, 1024), "bfloat16"),
    ((1048576, 128), "float32"),
    ((32768, 8192), "float32"),
)

#: Title of workloads of vectors of many lengths, their shapes, and their losses (`LENGTH_LOSSES`).
VECTOR_LENGTHS = "vectors, few to many features"
LENGTHS: Sequence[tuple[tuple[int, int], str]] = (
    ((16384, 16384), "float32"),
    ((32768, 8192), "bfloat16"),
    ((1048576, 64), "float32"),
    ((65536, 1023), "float32"),
    ((1024, 65536), "float32"),
    ((64, 1048576), "float32"),
)
LENGTH_LOSSES = ("cosine_embedding_loss", "triplet_margin_loss")

#: Title of workloads of margin losses; the rows and classes of the scores; and the number of labels in a list of them.
SCORE_ROWS = "scores"
SCORES: Sequence[tuple[tuple[int, int], str]] = (
    ((65536, 1000), "float32"),
    ((8192, 32000), "bfloat16"),
    ((1048576, 20), "float32"),
    ((524288, 48), "float32"),
    ((65536, 1000), "bfloat16"),
)
LABELS = 5

#: Title of workloads of boxes, and their numbers of pairs and dtypes.
BOX_PAIRS = "boxes"
BOXES: Sequence[tuple[int, str]] = ((1 << 22, "float32"), (1 << 25, "float32"), (1 << 22, "bfloat16"))

#: Title of workloads of region losses; the shape and dtype of their logits, and the dtype of their labels, for a batch
#: of volumes and a batch of street scenes.
REGION_VOXELS = "voxels"
REGIONS: Sequence[tuple[tuple[int, ...], str, str]] = tuple(
    (shape, dtype, label)
    for shape in ((2, 14, 96, 96, 96), (16, 19, 512, 512))
    for dtype in ("float32", "bfloat16")
    for label in ("int64", "uint8")
)

#: Title of random workloads, and the reductions to draw from; repeated entries are drawn more often.
RANDOM = "random"
REDUCTIONS = ("mean", "mean", "sum", "none")

#: Columns that together identify a throughput measurement.
KEY = ("workload", "loss", "case", "reduction", "shape", "elements", "dtype", "mode", "provider")

MIB = 1 << 20

#: Shapes of the logits of cross entropy by workload, with the dtype and the bar for value and gradient in ms, if there
#: is one. The class dimension is the second; some labels of images are ignored.
LOGITS: Mapping[str, Sequence[tuple[tuple[int, ...], str, float | None]]] = {
    ROWS: (
        ((8192, 32000), "bfloat16", 0.272),
        ((8192, 128256), "bfloat16", 1.15),
        ((65536, 1024), "float32", 0.146),
        ((32768, 4096), "float32", 0.278),
        ((8192, 32000), "float32", 0.520),
        ((4096, 262144), "bfloat16", 1.20),
        ((8192, 50257), "bfloat16", None),
    ),
    IMAGES: (((8, 19, 1024, 2048), "float32", None), ((8, 19, 1024, 2048), "bfloat16", None)),
    EXTREMES: (
        ((1000000, 10), "float32", None),
        ((16, 1048576), "float32", None),
        ((1, 128256), "bfloat16", None),
    ),
}

#: The logits for measurements of options, and of other losses beside plain cross entropy.
PLAIN_LOGITS = ((8192, 32000), "bfloat16")
#: Logits whose number of classes is not a multiple of any vector width.
ODD = (8192, 50257)
#: The logits for peak memory, and those for host time.
LARGE_LOGITS, TINY_LOGITS = ((8192, 128256), "bfloat16"), ((64, 10), "float32")

#: Rows, features and classes of linear layers, with the variants (`linear.VARIANTS`) that are measured and their bars:
#: the ratio of the time to that of the matrix products, and peak memory in GB.
LAYERS: Sequence[tuple[tuple[int, int, int], Mapping[str, tuple[float, float | None]]]] = (
    (
        (8192, 4096, 128256),
        {
            "default": (1.05, 1.1),
            "max_memory=550000000": (1.08, 0.55),
            "logits_dtype=float32": (1.12, 2.2),
            "half ignored, skip_ignored=True": (0.58, None),
            "frozen weight": (1.06, 1.1),
            "forward": (1.05, 1.1),
        },
    ),
    ((16384, 2048, 32000), {"default": (1.10, 0.3)}),
    ((32768, 4096, 128256), {"accumulate_dtype=bfloat16": (1.06, 1.1)}),
)
#: Log-probabilities with entropies: the shape of the logits and, for each mode, the number of times that it reads or
#: writes them and its bar as a fraction of copy bandwidth. For the linear form: rows, features and classes of the
#: layer, and the bars of forward and backward (ratio to the matrix products, peak GB).
LOG_PROBS: tuple[tuple[int, int], Mapping[str, tuple[int, float]]] = (
    (8192, 128256), {"forward": (1, 0.85), "forward+backward": (3, 0.8)}
)  # fmt: skip
LINEAR_LOG_PROBS: tuple[tuple[int, int, int], tuple[float, float]] = (8192, 4096, 128256), (1.06, 1.1)
#: Title of workloads of sequences; their frames, samples, classes and labels, with the bar in ms of forward and
#: backward of `ctc_loss_with_logits`, if there is one.
OF_SEQUENCES = "sequences"
SEQUENCES: Mapping[tuple[int, int, int, int], float | None] = {
    (256, 32, 64, 40): 0.045,
    (1000, 32, 128, 120): 0.13,
    (1500, 16, 5000, 100): 0.45,
    (512, 256, 32, 60): 0.15,
    (50000, 1, 64, 2000): None,
}
#: The sequences for peak memory, and for host time.
LARGE_SEQUENCES, TINY_SEQUENCES = ((1000, 32, 128, 120), "float32"), ((16, 2, 8, 4), "float32")

#: The layers for peak memory, and for host time.
LARGE_LAYER, TINY_LAYER = ((8192, 4096, 128256), "bfloat16"), ((64, 16, 10), "float32")

#: Options of cross entropy, one at a time and finally all together. A `weight` of True stands for class weights.
ROW_OPTIONS: tuple[Mapping[str, Any], ...] = (
    {"weight": True},
    {"label_smoothing": 0.1},
    {"z_loss": 1e-4},
    {"softcap": 30.0},
    {"gamma": 2.0},
    {"weight": True, "label_smoothing": 0.1, "z_loss": 1e-4, "softcap": 30.0, "gamma": 2.0},
)


@dataclass(frozen=True)
class Bar:
    """A bar: in every row of ``section`` that ``where`` selects, ``column`` must be on the right side of ``limit``.

    The value may be at most ``limit``, or at least ``limit`` if ``at_least``. ``where`` lists all expected values of
    each column, so that missing measurements are noticed. Printed values are divided by ``scale`` and end in ``unit``.
    """

    what: str
    section: str
    column: str
    limit: float
    where: Mapping[str, tuple[Any, ...]]
    at_least: bool = False
    unit: str = ""
    scale: float = 1.0

    @property
    def expected(self) -> int:
        """Number of rows that a complete run has."""
        return prod(len(values) for values in self.where.values())

    def selects(self, row: Row) -> bool:
        """True if the bar applies to a row."""
        return all(row.get(column) in values for column, values in self.where.items())

    def spell(self, value: float) -> str:
        """A value of the column as text, in the bar's unit."""
        return f"{value / self.scale:.3g}{self.unit}"


@dataclass(frozen=True)
class Verdict:
    """The result of a bar: the worst row, the number of rows within the bar, and the number of rows found."""

    bar: Bar
    worst: Row | None
    within: int
    found: int

    @property
    def met(self) -> str:
        """The verdict in one or two words; "so far" if all measured rows are within the bar but some are missing."""
        if self.found == 0:
            return "not measured"
        if self.within < self.found:
            return "no"
        return "yes" if self.found == self.bar.expected else "so far"

    @property
    def limit(self) -> str:
        """The bar as text: a comparison sign, the limit and the unit."""
        return f"{'≥' if self.bar.at_least else '≤'} {self.bar.spell(self.bar.limit)}"

    @property
    def measured(self) -> str:
        """The worst value, with the words that identify its row."""
        if self.worst is None:
            return ""
        names = [str(self.worst[c]) for c in self.bar.where if len(self.bar.where[c]) > 1 and c != "elements"]
        if len(self.bar.where.get("elements", ())) > 1:
            names.append(power(self.worst["elements"]))
        where = f" ({' '.join(names)})" if names else ""
        return f"{self.bar.spell(self.worst[self.bar.column])}{where}"

    @property
    def count(self) -> str:
        """The numbers of rows within the bar, of rows measured and, if some are missing, of rows expected."""
        missing = "" if self.found == self.bar.expected else f", {self.bar.expected} asked for"
        return f"{self.within} of {self.found}{missing}"


def power(elements: int) -> str:
    """A size as a power of two."""
    return f"2^{elements.bit_length() - 1}"


def _elements(*exponents: int) -> tuple[int, ...]:
    return tuple(1 << n for n in exponents)


def _throughput(what: str, column: str, limit: float, **where: tuple[Any, ...]) -> Bar:
    sweep = {"workload": (SWEEP,), "loss": LOSSES, "dtype": DTYPES, "elements": _elements(*SIZES)}
    return Bar(what, "throughput", column, limit, {**sweep, **where}, at_least=True, unit=" x")


def _rival(name: str, provider: str, limit: float, **where: tuple[Any, ...]) -> Bar:
    where = {"mode": ("forward+backward",), "provider": (provider,), **where}
    return _throughput(f"forward+backward, faster than {name}", "speedup_of_ours", limit, **where)


def _every(what: str, column: str, limit: float, provider: str) -> Bar:
    everything = {"loss": tuple(registry(Loss)), "elements": _elements(28), "mode": ("forward+backward",)}
    return _throughput(what, column, limit, provider=(provider,), **everything)


def _graph(exponent: int, limit: float) -> Bar:
    where = {"loss": LOSSES, "elements": _elements(exponent), "provider": (OURS,)}
    return Bar(f"CUDA graph, forward+backward, 2^{exponent}, of eager", "graph", "eager_ratio", limit, where, unit=" x")


def _host(what: str, limit: float) -> Bar:
    where = {"loss": LOSSES, "what": (what,), "provider": (OURS,)}
    return Bar(f"host time, tiny, {what}, of eager", "host", "eager_ratio", limit, where, unit=" x")


def spell_shape(shape: Sequence[int]) -> str:
    """A shape as a table cell."""
    return "x".join(str(n) for n in shape)


def spell_case(case: Mapping[str, Any]) -> str:
    """Options as a table cell."""
    return " ".join(f"{k}={v}" for k, v in case.items())


def _rows(
    what: str, column: str, limit: float, workload: str, mode: str = "forward+backward", provider: str = OURS,
    at_least: bool = True, unit: str = " x", **where: tuple[Any, ...],
) -> Bar:  # fmt: skip
    where = {"workload": (workload,), "loss": ("cross_entropy",), "mode": (mode,), "provider": (provider,), **where}
    return Bar(f"cross_entropy, {what}", "rows", column, limit, where, at_least, unit)


def _shapes(workload: str, dtype: str | None = None) -> tuple[str, ...]:
    found = [spell_shape(shape) for shape, kind, _ in LOGITS[workload] if dtype in (None, kind)]
    return tuple(dict.fromkeys(found))


def _times() -> list[Bar]:
    return [
        _rows(
            f"{spell_shape(shape)} {dtype}, forward+backward", "ms", limit, ROWS, at_least=False, unit=" ms",
            shape=(spell_shape(shape),), dtype=(dtype,),
        )
        for shape, dtype, limit in LOGITS[ROWS]
        if limit
    ]  # fmt: skip


def _forward(dtype: str) -> Bar:
    where = {"shape": _shapes(ROWS, dtype), "dtype": (dtype,)}
    return _rows(f"{dtype}, forward, of copy bandwidth", "copy_fraction", 0.95, ROWS, "forward", **where)


def _layers() -> list[Bar]:
    """Bars of losses of linear layers and of log-probabilities, relative to matrix products or copies."""
    bars = [("linear_cross_entropy", sizes, x, *bar) for sizes, found in LAYERS for x, bar in found.items()]
    sizes, bar = LINEAR_LOG_PROBS
    found = []
    for loss, shape, variant, ratio, peak in [*bars, ("linear_token_log_probs", sizes, "forward+backward", *bar)]:
        where = {"loss": (loss,), "shape": (spell_shape(shape),), "variant": (variant,), **_OURS}
        what = f"{loss}, {spell_shape(shape)}, {variant}"
        found.append(Bar(f"{what}, of the products", "linear", "ratio", ratio, where, unit=" x"))
        if peak:
            found.append(Bar(f"{what}, peak memory", "linear", "peak_gb", peak, where, unit=" GB"))
    shape, modes = LOG_PROBS
    for mode, (_, fraction) in modes.items():
        where = {"loss": ("token_log_probs",), "shape": (spell_shape(shape),), "variant": (mode,), **_OURS}
        what = f"token_log_probs with entropy, {spell_shape(shape)}, {mode}, of copy bandwidth"
        found.append(Bar(what, "linear", "copy_fraction", fraction, where, at_least=True, unit=" x"))
    return found


def _sequences() -> list[Bar]:
    """Bars of losses of sequences, in milliseconds."""
    where = {"loss": ("ctc_loss_with_logits",), "mode": ("forward+backward",), **_OURS}
    return [
        Bar(
            f"ctc_loss_with_logits, {spell_shape(shape)}, forward+backward", "sequences", "ms", limit,
            {**where, "shape": (spell_shape(shape),)}, unit=" ms",
        )
        for shape, limit in SEQUENCES.items()
        if limit
    ]  # fmt: skip


def _startup(loss: str, cache: str, limit: float) -> Bar:
    what = f"{loss}, first call with backward in a process, {cache} kernel cache"
    return Bar(what, "startup", "call_s", limit, {"loss": (loss,), "cache": (cache,)}, unit=" s")


_OURS = {"provider": (OURS,)}

BARS = (
    _throughput("forward, of copy bandwidth", "copy_fraction", 0.97, mode=("forward",), **_OURS),
    _throughput("forward+backward, of copy bandwidth", "copy_fraction", 0.90, mode=("forward+backward",), **_OURS),
    _rival("torch.compile", COMPILE, 1.6),
    _rival("eager", EAGER, 2.5),
    _rival("torch.mean((p - t) ** 2)", NAIVE, 4.5, loss=("mse_loss",), dtype=("float32",)),
    _throughput("all gradients, of copy bandwidth", "copy_fraction", 0.88, mode=("all gradients",), **_OURS),
    Bar(
        "kl_div on probabilities and hinge_loss, forward+backward, of copy bandwidth",
        "throughput",
        "copy_fraction",
        0.85,
        {"workload": (KL_PROBABILITIES, HINGE_COLUMNS), "mode": ("forward+backward",), **_OURS},
        at_least=True,
        unit=" x",
    ),
    _every("every loss, forward+backward, of copy bandwidth", "copy_fraction", 0.85, OURS),
    _every("every loss, forward+backward, faster than torch.compile", "speedup_of_ours", 1.4, COMPILE),
    _graph(10, 0.8),
    _graph(17, 0.5),
    _graph(20, 0.5),
    _host("forward", 2.0),
    _host("forward+backward", 1.15),
    _startup("mse_loss", "empty", 0.4),
    _startup("cross_entropy", "empty", 0.6),
    _startup("mse_loss", "warm", 0.15),
    Bar(
        "value, float32, 2^30, error",
        "accuracy",
        "ulp",
        1.0,
        {"loss": LOSSES, "elements": _elements(30), **_OURS},
        unit=" ulp",
    ),
    Bar(
        "peak memory beyond the outputs, float32, 2^28",
        "memory",
        "beyond_outputs",
        8 * MIB,
        {"loss": LOSSES, "mode": tuple(MODES), **_OURS},
        unit=" MiB",
        scale=MIB,
    ),
    *_times(),
    *(_forward(dtype) for dtype in DTYPES),
    _rows(
        "an odd number of classes, time per byte of that of an even one", "plain_ratio", 1.25, ROWS, at_least=False,
        shape=(spell_shape(ODD),),
    ),
    _rows("images, forward+backward, of copy bandwidth", "copy_fraction", 0.85, IMAGES, dtype=DTYPES),
    _rows("images, forward+backward, faster than eager", "speedup_of_ours", 4.0, IMAGES, provider=EAGER, dtype=DTYPES),
    _rows(
        "very short, few or long rows, faster than eager", "speedup_of_ours", 2.0, EXTREMES, provider=EAGER,
        shape=_shapes(EXTREMES),
    ),
    _rows(
        "very short, few or long rows, faster than torch.compile", "speedup_of_ours", 1.0, EXTREMES, provider=COMPILE,
        shape=_shapes(EXTREMES),
    ),
    _rows(
        "each option and all, time of the plain case", "plain_ratio", 1.1, OPTIONS, at_least=False,
        case=tuple(map(spell_case, ROW_OPTIONS)),
    ),
    Bar(
        f"cross_entropy, peak memory beyond the outputs, {spell_shape(LARGE_LOGITS[0])} {LARGE_LOGITS[1]}",
        "memory",
        "beyond_outputs",
        16 * MIB,
        {"loss": ("cross_entropy",), "elements": (prod(LARGE_LOGITS[0]),), "mode": tuple(MODES)[:2], **_OURS},
        unit=" MiB",
        scale=MIB,
    ),
    *_layers(),
    *_sequences(),
)  # fmt: skip


def verdict(bar: Bar, sections: Mapping[str, Sequence[Row]]) -> Verdict:
    """Compares the rows of a run with a bar."""
    rows = [r for r in sections.get(bar.section, ()) if bar.selects(r) and isinstance(r.get(bar.column), (int, float))]
    if not rows:
        return Verdict(bar, None, 0, 0)

    def value(row: Row) -> float:
        return row[bar.column]

    # Compare with >= and <= rather than negate < and >, so that NaN is never within the bar.
    within = [r for r in rows if (value(r) >= bar.limit if bar.at_least else value(r) <= bar.limit)]
    outside = [r for r in rows if r not in within]
    candidates = outside or rows
    worst = min(candidates, key=value) if bar.at_least else max(candidates, key=value)
    return Verdict(bar, worst, len(within), len(rows))

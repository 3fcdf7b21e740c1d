"""Properties of the softmax engine in each of its layouts.

As in :mod:`cupylosses.testing.properties`, each function checks one property and raises AssertionError if it fails. All
run kernels: on a GPU, or on the host within :func:`cupylosses.testing.host.execution`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest import mock

import cupylosses.functional as F
from cupylosses import options
from cupylosses.definition.registry import registry
from cupylosses.engines.softmax import layout as softmax_layout
from cupylosses.engines.softmax.codegen import SoftmaxKernel
from cupylosses.engines.softmax.definition import SoftmaxLoss
from cupylosses.testing.softmax.truth import NAMES, truth
from cupylosses.testing.tolerance import compare, require, same_bits

if TYPE_CHECKING:
    from torch import Generator, Tensor

INF, NAN = float("inf"), float("nan")


class Layout(NamedTuple):
    """Shape and class dimension of logits or log-probabilities, and a loss of them.

    ``fewer`` is a shape with fewer rows that has this layout within :func:`some_rows_are_many`; ``place`` is the
    storage of the logits, one of :data:`PLACES`.
    """

    shape: tuple[int, ...]
    class_dim: int = 1
    loss: str = "cross_entropy"
    fewer: tuple[int, ...] | None = None
    place: str = "contiguous"


#: Number of rows that counts as many within :func:`some_rows_are_many`: more than self-counting kernels process.
SOME_ROWS = softmax_layout.SELF_COUNTING_ROWS + 1

#: For each layout, a float32 shape for which it is chosen on the simulated GPU.
LAYOUTS: Mapping[str, Layout] = {
    "subwarp": Layout((37, 43)),
    "block": Layout((5, 1031)),
    "block, cluster": Layout((3, 4501)),
    "two_pass": Layout((2, 16391)),
    "thread_per_row_packed": Layout((37, 4)),
    "thread_per_row": Layout((3, 5, 4, 8)),
    "packed_rows": Layout((16400, 5), fewer=(1031, 5)),
    "packed_rows, with gaps": Layout((16400, 5), fewer=(1031, 5), place="sliced"),
    "columns": Layout((2, 5, 8200), fewer=(2, 5, 516)),
    "column_tiles": Layout((2, 53, 516)),
    "column_slices": Layout((2, 31001, 17), fewer=(2, 1025, 17)),
    "interleaved_rows": Layout((2, 9, 8209), fewer=(2, 9, 521)),
    "subwarp, copied": Layout((2, 199, 5, 3)),
    "label_only_rows": Layout((37, 43), loss="nll_loss"),
    "label_only_tiles": Layout((67, 163), loss="nll_loss"),
    "label_only_few": Layout((3, 4501), loss="nll_loss"),
    "label_only_columns": Layout((3, 43, 5, 4), loss="nll_loss"),
}

#: Names of the layouts of logits, whose losses have more options.
SOFTMAX_LAYOUTS = tuple(name for name, x in LAYOUTS.items() if x.loss == "cross_entropy")

#: Storage of logits: contiguous, one element past an aligned address, part of a larger tensor, or strided.
PLACES = ("contiguous", "misaligned", "sliced", "apart")


class SoftmaxCall(NamedTuple):
    """Call of a loss, with the name of the loss and its arguments by name."""

    loss: str
    arguments: Mapping[str, Any]

    @property
    def call(self) -> SoftmaxCall:
        """The call itself, so that it can stand for `Drawn`."""
        return self

    @property
    def operands(self) -> list[str]:
        """Names of the operands that have a gradient."""
        return [x for x in NAMES[self.loss][:2] if x and self.arguments[x].is_floating_point()]

    def with_(self, **arguments: Any) -> SoftmaxCall:
        """Returns a copy with other arguments."""
        return SoftmaxCall(self.loss, {**self.arguments, **arguments})

    def differentiable(self, both: bool = True) -> tuple[list[Tensor], SoftmaxCall]:
        """Returns operands that require gradients (only the logits if not ``both``), and the call on them."""
        leaves = {x: self.arguments[x].detach().requires_grad_() for x in self.operands[: 2 if both else 1]}
        return list(leaves.values()), self.with_(**leaves)

    def __call__(self) -> Any:
        return getattr(F, self.loss)(**self.arguments)


class Drawn(NamedTuple):
    """Logits, labels (some of them ignored), class dimension, and the name of the loss."""

    input: Tensor
    target: Tensor
    class_dim: int
    loss: str = "cross_entropy"

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of a call, by name."""
        return {"input": self.input, "target": self.target, "class_dim": self.class_dim}

    @property
    def call(self) -> SoftmaxCall:
        """Call on these operands."""
        return SoftmaxCall(self.loss, self.arguments)

    @property
    def function(self) -> Callable[..., Any]:
        """Function of the loss."""
        return getattr(F, self.loss)


#: Operands that were drawn, or a call.
Given = Drawn | SoftmaxCall


def of_layout(layout: str, **arguments: Any) -> Drawn:
    """Draws the operands for one of :data:`LAYOUTS`."""
    x = LAYOUTS[layout]
    shape = x.fewer if x.fewer and softmax_layout.MANY_ROWS == SOME_ROWS else x.shape
    return draw(shape, x.class_dim, **{"loss": x.loss, "place": x.place, **arguments})


def draw(
    shape: Sequence[int],
    class_dim: int,
    dtype: str = "float32",
    device: str = "cpu",
    place: str = "contiguous",
    labels: str = "int64",
    seed: int = 0,
    loss: str = "cross_entropy",
) -> Drawn:
    """Draws random logits (or log-probabilities, if the loss takes them) and labels.

    About one label in eight is ignored, unless there is only one row.
    """
    import torch

    generator = torch.Generator().manual_seed(seed)
    numbers = 3 * torch.randn(tuple(shape), generator=generator)
    if not registry(SoftmaxLoss)[loss].softmax:
        numbers = numbers.log_softmax(class_dim)
    x = placed(numbers.to(getattr(torch, dtype)).to(device), place)
    rows = (*shape[:class_dim], *shape[class_dim + 1 :])
    y = torch.randint(0, shape[class_dim], rows, generator=generator)
    if y.numel() > 1 and getattr(torch, labels).is_signed:
        y[torch.rand(rows, generator=generator) < 0.125] = -100
    return Drawn(x, y.to(getattr(torch, labels)).to(device), class_dim, loss)


def placed(x: Tensor, place: str) -> Tensor:
    """Copies the numbers to memory that holds NaN around them, in one of :data:`PLACES`."""
    import torch

    if place == "contiguous":
        return x
    if place == "misaligned":
        return torch.full((x.numel() + 1,), float("nan"), dtype=x.dtype, device=x.device)[1:].view(x.shape).copy_(x)
    # Sliced: each row is padded by 2 elements. Apart: all dimensions are padded, so that no two of them merge.
    more = [n + (2 if d == x.dim() - 1 else 0 if place == "sliced" else 1) for d, n in enumerate(x.shape)]
    around = torch.full(more, float("nan"), dtype=x.dtype, device=x.device)
    return around[tuple(slice(0, n) for n in x.shape)].copy_(x)


@contextmanager
def noted_layouts() -> Iterator[list[softmax_layout.RowLayout]]:
    """Records the layouts of new plans within the context."""
    layouts: list[softmax_layout.RowLayout] = []

    def recording(layout: Callable[..., softmax_layout.RowLayout]) -> Callable[..., softmax_layout.RowLayout]:
        def note(*arguments: Any) -> softmax_layout.RowLayout:
            layouts.append(layout(*arguments))
            return layouts[-1]

        return note

    names = ("row_layout", "label_only_layout", "dense_layout")
    with mock.patch.multiple(softmax_layout, **{x: recording(getattr(softmax_layout, x)) for x in names}):
        yield layouts


@contextmanager
def blocks(count: int, device: str) -> Iterator[None]:
    """Within this context, kernels run with this many blocks, or clusters; on the host also in another order."""
    from cupylosses.testing import host

    in_order = host.execution(seed=count) if device == "cpu" else nullcontext()
    planned = mock.patch.object(softmax_layout, "blocks", lambda layout, *_, **__: count * layout.cluster)
    launched = mock.patch.object(SoftmaxKernel, "grid", lambda _, planned, __: planned)
    with planned, launched, in_order:
        yield


@contextmanager
def some_rows_are_many() -> Iterator[None]:
    """Within this context, new plans keep as many rows as the smaller shapes have in registers, or slice them."""
    with mock.patch.multiple(softmax_layout, MANY_ROWS=SOME_ROWS, TILE_ROWS=SOME_ROWS, SLICE_ELEMENTS=0):
        yield


@contextmanager
def few_rows_are_many() -> Iterator[None]:
    """Within this context, new plans keep rows in registers, or stage them, however few there are."""
    staged = dict.fromkeys(softmax_layout.SECOND_STAGED_LABEL_ROWS, 1)
    every = {"MANY_ROWS": 1, "TILE_ROWS": 1, "INTERLEAVED_ROWS": 1, "SECOND_STAGED_LABEL_ROWS": staged}
    with mock.patch.multiple(softmax_layout, **every):
        yield


@contextmanager
def few_rows_have_threads() -> Iterator[None]:
    """Within this context, new plans assign one thread to each row of few classes, however few rows there are."""
    with mock.patch.object(softmax_layout, "LANE_ROWS", 0):
        yield


@contextmanager
def few_lanes_share_rows() -> Iterator[None]:
    """Within this context, new plans let as few lanes share a row as plans for many rows do."""
    with mock.patch.multiple(softmax_layout, FEW_LANES=0, MANY_LANES=0):
        yield


@contextmanager
def few_slices(count: int, ahead: int = 16) -> Iterator[None]:
    """Within this context, new plans cut columns into ``count`` slices, or one per tile if there are more tiles.

    Threads have ``ahead`` vectors in flight.
    """
    constants = {"SLICES": count, "SLICE_AHEAD": ((ahead, 1),), "SLICE_ELEMENTS": 0, "SLICE_TILES": 1}
    with mock.patch.multiple(softmax_layout, **constants):
        yield


def upstream(value: Tensor) -> Tensor:
    """Returns an upstream gradient that differs between rows."""
    import torch

    if value.dim() == 0:
        return torch.full_like(value, -3.0)
    return torch.linspace(-1.5, 2.0, value.numel(), device=value.device).view(value.shape).to(value.dtype)


def gradients(value: Tensor, leaves: Sequence[Tensor], grad_output: Tensor | float = 1.0, **more: Any) -> list[Tensor]:
    """Returns the gradients of the leaves."""
    import torch

    if not isinstance(grad_output, torch.Tensor):
        grad_output = torch.full_like(value, grad_output)
    return list(torch.autograd.grad(value, leaves, grad_output, **more))


def gradient(value: Tensor, x: Tensor, grad_output: Tensor | float = 1.0, **more: Any) -> Tensor:
    """Returns the gradient of the logits."""
    return gradients(value, [x], grad_output, **more)[0]


def agrees_with_truth(sample: Given, reduction: str | None = None, both: bool = True, **overrides: Any) -> None:
    """Value and gradients match float64, for the upstream gradient that forward expects and for another one."""
    if reduction:
        overrides["reduction"] = reduction
    leaves, call = sample.call.with_(**overrides).differentiable(both)
    value = call()
    for grad_output in (upstream(value.detach()), value.detach() * 0 + 1) if value.numel() else ():
        exact = truth(call.loss, call.arguments, grad_output, str(value.device))
        compared = compare(value.detach(), exact.value)
        require(compared.ok, f"value: {compared}")
        for name, x in zip(call.operands, gradients(value, leaves, grad_output, retain_graph=True), strict=False):
            compared = compare(x, exact.gradients[name])
            require(compared.ok, f"gradient of {name}: {compared}")


@contextmanager
def parts() -> Iterator[None]:
    """Within this context, blocks compute the values of rows in parts, however few and short the rows are."""
    with mock.patch.multiple(softmax_layout, STREAMED_ROWS=0, STREAMED_FEW_ROWS=0, STREAMED_WIDTH=0):
        yield


@contextmanager
def pipelined(chunks: int = 10) -> Iterator[None]:
    """Within this context, forward-only plans keep short rows in registers, however few there are.

    They have at most ``chunks`` chunks.
    """
    changed = {"PIPELINED_ROWS": 0, "MANY_BLOCKS": 1, "MAX_CHUNKS": chunks}
    with mock.patch.multiple(softmax_layout, **changed):
        yield


def value_agrees_with_truth(sample: Drawn, **overrides: Any) -> None:
    """Without gradients, the value matches float64 and has the same bits as with gradients."""
    import torch

    with torch.no_grad():
        alone = sample.function(**{**sample.arguments, **overrides})
    where = str(sample.input.device)
    compared = compare(alone, truth(sample.loss, {**sample.arguments, **overrides}, device=where).value)
    require(compared.ok, f"value alone: {compared}")
    x = sample.input.detach().requires_grad_()
    together = sample.function(**{**sample.arguments, "input": x, **overrides}).detach()
    require(same_bits(alone, together), f"value alone {alone}, with gradients {together}")


#: Storage of directions: like the logits, broadcast over classes or rows, or with permuted dimensions.
DIRECTIONS = ("alike", "one", "of a class", "of a row", "transposed")


def directions(sample: Given, how: str, operand: str | None = None, generator: Generator | None = None) -> Tensor:
    """Returns a direction for an operand, by default the logits."""
    import torch

    call = sample.call
    x, dim = call.arguments[operand or call.operands[0]], call.arguments["class_dim"]
    drawn = torch.randn(x.shape, generator=generator or torch.Generator().manual_seed(2)).to(x.device, x.dtype)
    if how == "alike":
        return drawn
    if how == "one":
        return drawn.flatten()[0].expand(x.shape)
    if how == "of a row":
        return drawn.narrow(dim, 0, 1).expand(x.shape)
    if how == "of a class":
        return drawn.movedim(dim, -1).flatten(0, -2)[0].expand(*x.movedim(dim, -1).shape).movedim(-1, dim)
    return drawn.permute(*reversed(range(x.dim()))).contiguous().permute(*reversed(range(x.dim())))


def second(
    sample: Given, along: Tensor | Mapping[str, Tensor], grad_output: Tensor, **overrides: Any
) -> tuple[Tensor, ...]:
    """Returns the derivatives of the gradients times directions, with respect to grad_output and the operands.

    ``along`` is a direction of the logits, or directions of operands by name.
    """
    import torch

    leaves, call = sample.call.with_(**overrides).differentiable()
    if isinstance(along, torch.Tensor):
        along = {call.operands[0]: along}
    g = grad_output.detach().requires_grad_()
    first = torch.autograd.grad(call(), [call.arguments[x] for x in along], g, create_graph=True)
    return torch.autograd.grad(first, [g, *leaves], list(along.values()), materialize_grads=True)


def second_agrees_with_truth(
    sample: Given,
    how: str = "alike",
    reduction: str | None = None,
    moving: Sequence[bool] = (True, True),
    **overrides: Any,
) -> None:
    """Second derivatives along directions of the ``moving`` operands match float64."""
    import torch

    if reduction:
        overrides["reduction"] = reduction
    call = sample.call.with_(**overrides)
    names = [x for x, m in zip(call.operands, moving, strict=False) if m]
    generator = torch.Generator().manual_seed(1 + len(call.operands))
    along = {x: directions(call, how, x, generator) for x in names}
    grad_output = upstream(call())
    exact = truth(call.loss, call.arguments, grad_output, directions=along)
    assert exact.along is not None
    expected = {"grad_output": exact.along, **exact.changed}
    for (name, x), derivative in zip(expected.items(), second(call, along, grad_output), strict=True):
        compared = compare(derivative.cpu(), x)
        require(compared.ok, f"derivative of the gradients with respect to {name}: {compared}")


def second_by_logits_agrees_with_truth(call: SoftmaxCall, valued: bool = False) -> None:
    """Second derivatives with respect to the first operand only match float64.

    If ``valued``, those with respect to ``grad_output`` do too.
    """
    import torch

    name = call.operands[0]
    x = call.arguments[name].detach().requires_grad_()
    along = torch.randn(x.shape, generator=torch.Generator().manual_seed(1)).to(x)
    value = call.with_(**{name: x})()
    grad_output = upstream(value.detach()).requires_grad_(valued)
    exact = truth(call.loss, call.arguments, grad_output.detach(), directions={name: along})
    gradient = torch.autograd.grad(value, x, grad_output, create_graph=True)[0]
    found = torch.autograd.grad(gradient, (x, grad_output) if valued else x, along)
    expected = {name: exact.changed[name], "grad_output": exact.along}
    for (of, derivative), a in zip(expected.items(), found, strict=False):
        compared = compare(a.cpu(), derivative)
        require(compared.ok, f"derivative of the gradient with respect to {of}: {compared}")


def second_of_equal_logits(sample: Drawn, **overrides: Any) -> None:
    """Second derivatives match float64 if several logits share the maximum, the label's among them or not."""
    import torch

    x = sample.input.clamp(-4.0, 1.0).round()
    largest = torch.where(sample.target < 0, sample.target, x.argmax(sample.class_dim))
    for target in (sample.target, largest, x.flip(sample.class_dim).argmax(sample.class_dim)):
        second_agrees_with_truth(sample._replace(input=x, target=target), reduction="none", **overrides)


def writes_one_gradient_in_one_pass_or_two(sample: Given, **overrides: Any) -> None:
    """Gradients have the bits of a two-pass gradient, whatever forward expects.

    The gradients of a second backward have the same bits, in memory of their own.
    """
    leaves, call = sample.call.with_(**overrides).differentiable()

    def two_passes(grad_output: float) -> list[Tensor]:
        with options.set_one_pass(False):
            return gradients(call(), leaves, grad_output)

    def same(found: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
        return all(map(same_bits, found, expected))

    expected = {grad_output: two_passes(grad_output) for grad_output in (1.0, -3.0, NAN)}
    for grad_output in (1.0, -3.0, -3.0, NAN, 1.0):
        value = call()
        first = gradients(value, leaves, grad_output, retain_graph=True)
        require(same(first, expected[grad_output]), f"other bits for {grad_output}")
    kept = [x.clone() for x in first]
    second = gradients(value, leaves, 1.0, retain_graph=True)
    apart = all(a.data_ptr() != b.data_ptr() for a, b in zip(first, second, strict=True))
    require(same(second, first) and apart, "another second gradient")
    require(same(gradients(value, leaves, -3.0), expected[-3.0]), "other bits in a third gradient")
    require(same(first, kept), "the first gradient was written again")


def is_the_same_with_and_without_gradient(sample: Drawn, **overrides: Any) -> None:
    """A value has the same bits with and without a gradient."""
    import torch

    x = sample.input.detach()
    for reduction in ("mean", "none"):
        arguments = {**sample.arguments, **overrides, "reduction": reduction}
        alone = sample.function(**{**arguments, "input": x})
        together = sample.function(
            **{**arguments, "input": x.clone(memory_format=torch.preserve_format).requires_grad_()}
        )
        require(same_bits(alone, together.detach()), f"another value with a gradient, {reduction}")


def results(sample: Drawn, **overrides: Any) -> list[Tensor]:
    """Returns the values and gradients of all entry points."""
    x = sample.input.detach().requires_grad_()
    tensors = []
    for reduction, grad_outputs in (("mean", (1.0, 1.0, -3.0)), ("none", (2.0,))):
        for grad_output in grad_outputs:
            value = sample.function(**{**sample.arguments, "input": x, "reduction": reduction, **overrides})
            tensors += [value.detach(), gradient(value, x, grad_output)]
    return tensors


def keeps_its_bits(sample: Drawn, executions: Mapping[str, Callable[[], Any]], **overrides: Any) -> None:
    """Results have the same bits within every context of ``executions``: another grid, another order of threads."""
    expected = results(sample, **overrides)
    for name, execution in executions.items():
        with execution():
            same = [same_bits(a, b) for a, b in zip(results(sample, **overrides), expected, strict=True)]
        require(all(same), f"{name}: other bits")


#: Values that rows hold that do not count.
BAD_ROWS = (NAN, INF, -INF)


def leaves_rows_out(
    sample: Given,
    reductions: Sequence[str] = ("mean", "none"),
    bad_rows: Sequence[float] = BAD_ROWS,
    both: bool = True,
    **overrides: Any,
) -> None:
    """Ignored or masked rows affect neither value nor gradients, whatever they hold, for any upstream gradient."""
    import torch

    call = sample.call.with_(**overrides)
    dim = call.arguments["class_dim"]
    clean = {x: call.arguments[x].detach() for x in call.operands}
    first, target = (call.arguments[str(x)] for x in NAMES[call.loss][:2])
    rows = first.movedim(dim, -1).shape[:-1]
    mask = (torch.rand(rows, generator=torch.Generator().manual_seed(1)) < 0.7).to(first.device)
    out = ~mask if target.is_floating_point() else ~mask | (target == -100)
    for reduction in reductions:
        expected = None
        for bad in (0.0, *bad_rows):
            spoiled = {x: torch.where(out.unsqueeze(dim), bad, v.contiguous()) for x, v in clean.items()}
            leaves, spoilt = call.with_(**spoiled, mask=mask, reduction=reduction).differentiable(both)
            value = spoilt()
            outputs = [value.detach(), *gradients(value, leaves), *gradients(spoilt(), leaves, -3.0)]
            expected = expected or outputs
            require(all(map(same_bits, outputs, expected)), f"rows of {bad} that do not count, {reduction}")
            for grad_output in (INF, NAN):
                written = gradients(spoilt(), leaves, grad_output)
                none = all(bool((x.movedim(dim, -1)[out] == 0).all()) for x in written)
                require(none, f"they have a gradient for {grad_output}")


#: Out-of-range labels by name, as functions of the number of classes.
BAD_LABELS: Mapping[str, Callable[[int], int]] = {
    "classes": lambda classes: classes,
    "negative": lambda _: -1,
    "beyond 32 bits": lambda _: 1 << 40,
    "far below": lambda _: -(1 << 62),
}


def survives_labels_out_of_range(
    sample: Drawn, bad_labels: Sequence[str] = tuple(BAD_LABELS), **overrides: Any
) -> None:
    """An out-of-range label makes the value of its row NaN and the gradient 0, and does not affect other rows."""
    dim, classes = sample.class_dim, sample.input.shape[sample.class_dim]
    x = sample.input.detach().requires_grad_()
    arguments = {**sample.arguments, "input": x, "reduction": "none", "check_targets": "off", **overrides}
    value = sample.function(**arguments)
    expected = value.detach(), gradient(value, x, 2.0)
    for label in (BAD_LABELS[x](classes) for x in bad_labels):
        target = sample.target.clone()
        at = (target != -100).nonzero()[-1]
        target[tuple(at)] = label
        bad = target == label
        value = sample.function(**{**arguments, "target": target})
        require(bool(value.detach()[bad].isnan().all()), f"a label of {label} has a value")
        require(same_bits(value.detach()[~bad], expected[0][~bad]), f"a label of {label} changes other rows")
        row_gradients = gradient(value, x, 2.0).movedim(dim, -1)
        require(bool((row_gradients[bad] == 0).all()), f"a label of {label} has a gradient")
        require(same_bits(row_gradients[~bad], expected[1].movedim(dim, -1)[~bad]), f"{label}: gradients of other rows")
        for grad_output in (1.0, -3.0):
            mean = sample.function(**{**arguments, "target": target, "reduction": "mean"})
            require(bool(mean.isnan()), f"a label of {label}: {mean}")
            row_gradients = gradient(mean, x, grad_output).movedim(dim, -1)
            require(
                bool((row_gradients[bad] == 0).all() and row_gradients[~bad].isfinite().all()),
                f"{label}: gradient of a mean",
            )


class Edge(NamedTuple):
    """Row of logits, its label, and the expected results in float64."""

    logits: tuple[float, ...]
    label: int
    value: float
    gradient: tuple[float, ...]


EDGES: Mapping[str, Edge] = {
    "confident": Edge(
        (18.0, 0.0, 0.0, 0.0), 0, 4.568993918012331e-08, (-4.568993813629e-08, *(1.522997937876e-08,) * 3)
    ),
    "confidently wrong": Edge(
        (18.0, 0.0, 0.0, 0.0), 1, 18.000000045689939, (0.99999995431006, -0.99999998477002, *(1.522997937876e-08,) * 2)
    ),
    "equal": Edge((2.0, 2.0, 2.0, 2.0), 3, 1.3862943611198906, (0.25, 0.25, 0.25, -0.75)),
    "impossible others": Edge((1.0, -INF, -INF, -INF), 0, 0.0, (0.0, 0.0, 0.0, 0.0)),
    "impossible label": Edge((1.0, -INF, 1.0, -INF), 1, INF, (0.5, -1.0, 0.5, 0.0)),
    "all impossible": Edge((-INF,) * 4, 1, NAN, (NAN,) * 4),
    "infinite": Edge((INF, 0.0, 0.0, 0.0), 0, NAN, (NAN,) * 4),
    "not a number": Edge((0.0, NAN, 0.0, 0.0), 0, NAN, (NAN,) * 4),
    "huge": Edge((3e38, 3e38, -3e38, 0.0), 0, 0.6931471805599453, (-0.5, 0.5, 0.0, 0.0)),
    "huge and wrong": Edge((1e38, 3e38, 0.0, 0.0), 0, 2e38, (-1.0, 1.0, 0.0, 0.0)),
}


def keeps_edges(shape: Sequence[int], class_dim: int, device: str = "cpu") -> None:
    """The edges of the domain have the expected results, in rows padded with impossible classes."""
    import torch

    rows = (*shape[:class_dim], *shape[class_dim + 1 :])
    x = torch.full((*rows, shape[class_dim]), -INF)
    flat, y = x.view(-1, shape[class_dim]), torch.zeros(rows, dtype=torch.int64)
    edges = list(EDGES.items())
    row_edges = [edges[i % len(edges)] for i in range(len(flat))]
    for i, (_, edge) in enumerate(row_edges):
        # Alternates between the start and the end of a row.
        place = slice(0, 4) if i // len(edges) % 2 == 0 else slice(shape[class_dim] - 4, shape[class_dim])
        flat[i, place] = torch.tensor(edge.logits)
        y.view(-1)[i] = edge.label + (place.start or 0)
    operand = x.movedim(-1, class_dim).contiguous().to(device).requires_grad_()
    value = F.cross_entropy(operand, y.to(device), class_dim=class_dim, reduction="none")
    row_gradients = gradient(value, operand).movedim(class_dim, -1).reshape(flat.shape).cpu()
    for i, (name, edge) in enumerate(row_edges):
        exact = torch.full((shape[class_dim],), 0.0 if edge.value == edge.value else NAN, dtype=torch.float64)
        start = int(y.view(-1)[i]) - edge.label
        exact[start : start + 4] = torch.tensor(edge.gradient, dtype=torch.float64)
        torch.testing.assert_close(
            value.detach().cpu().view(-1)[i].double(), torch.tensor(edge.value).double(), rtol=1e-6, atol=0.0,
            equal_nan=True, msg=lambda m, name=name: f"value, {name}: {m}",
        )  # fmt: skip
        torch.testing.assert_close(
            row_gradients[i].double(), exact, rtol=1e-6, atol=1e-12, equal_nan=True,
            msg=lambda m, name=name: f"gradient, {name}: {m}",
        )  # fmt: skip
    sure = [i for i, (name, _) in enumerate(row_edges) if name.startswith("confident")]
    require(
        bool((row_gradients[sure].double().sum(-1).abs() < 1e-7 * row_gradients[sure].abs().sum(-1)).all()),
        "gradients add up to 0",
    )

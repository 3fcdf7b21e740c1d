"""One check of a loss of rows, as :mod:`cupylosses.testing.check` has them of the others, and performed by the same.

Rows are laid out by the engine, not by the tensor: a layout is a shape that threads take in some way
(:mod:`cupylosses.engines.softmax.layout`), which depends on the dtype and on the GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

from cupylosses import checks, functional
from cupylosses.engines.softmax import layout as softmax_layout
from cupylosses.engines.softmax.definition import IGNORED, RowLoss
from cupylosses.engines.softmax.plan import rows_of, without
from cupylosses.engines.strides import dense_strides
from cupylosses.interop import ITEMSIZE
from cupylosses.jit.gpu import Chip
from cupylosses.testing import eager, row_eager, row_truth
from cupylosses.testing.check import GRAD_OUTPUTS, drawn_upstream
from cupylosses.testing.host.execution import SMALL
from cupylosses.testing.row_properties import LAYOUTS
from cupylosses.testing.truth import Truth

if TYPE_CHECKING:
    from torch import Tensor, dtype

#: Arguments that are operands too where they are True: class weights, by the name that the loss has for them, and this.
MASK = "mask"

#: So many arguments are printed with their values.
MANY = 4

#: Instead of a layout: a shape that was asked for.
GIVEN = "given"

#: Shapes, each with its class dimension, of which each layout is the first that is taken so: those for little shared
#: memory, and such as are long for the most that a GPU has.
SHAPES = (
    *((x.shape, x.class_dim) for x in LAYOUTS.values()),
    *(((2, classes), 1) for classes in (66001, 140001, 270007, 540013, 1080041)),
)

#: Every layout by name.
ROW_LAYOUTS = ("lanes", "block", "cluster", "long", "short", "columns", "copied", "gather")

Laid = tuple[tuple[int, ...], int]


@cache
def layouts(loss: RowLoss, kind: str, dtypes: tuple[str, ...], chip: Chip) -> Mapping[str, Laid]:
    """Every way in which threads take rows of these dtypes, with the shape that stands for it."""
    found: dict[str, Laid] = {}
    for shape, dim in SHAPES:
        found.setdefault(_layout(loss, kind, dtypes, shape, dim, chip), (shape, dim))
    return found


def _layout(loss: RowLoss, kind: str, dtypes: tuple[str, ...], shape: tuple[int, ...], dim: int, chip: Chip) -> str:
    def rows(of: tuple[int, ...], name: str) -> softmax_layout.Rows:
        return rows_of(dense_strides(of, (0,) * len(of)), dim, ITEMSIZE[name], 0)

    outer = without(shape, dim)
    logits, target = rows(shape, dtypes[0]), rows(shape, dtypes[-1])
    results = [dense_strides(outer, (0,) * len(outer))] * 3
    tensors = (logits, target)[: 1 if kind == "indices" else 2]
    if softmax_layout.copied(outer, shape[dim], tensors * 2, len(tensors), loss.softmax):
        return "copied"
    if kind != "indices":
        found = softmax_layout.term_layout(outer, shape[dim], (logits, logits, target, target), results[1:], chip)
    else:
        lay_out = softmax_layout.row_layout if loss.softmax else softmax_layout.gather_layout
        found = lay_out(outer, shape[dim], logits, logits, results, chip)
    return "cluster" if found.cluster > 1 and found.kind == "block" else found.kind


@cache
def chip_of(device: str) -> Chip:
    """What decides layouts on a device; on the host, what the host's GPU has."""
    if device == "cpu":
        return SMALL
    import torch

    from cupylosses.backends.torch import autograd

    return autograd.TorchDevice(torch.cuda.current_device()).chip


@dataclass(frozen=True)
class RowCheck:
    """A loss of rows with a kind of target, arguments, dtypes, reduction and layout.

    ``case`` has parameters, flags and other arguments by name; of those that are arrays it says that they are there.
    ``dtypes`` are of the logits and of a target per class; ``shape`` is one that was asked for, with the classes in the
    second dimension.
    """

    loss: RowLoss
    kind: str
    case: Mapping[str, Any] = field(default_factory=dict, hash=False)
    dtypes: tuple[str, ...] = ("float32",)
    reduction: str = "mean"
    layout: str = "lanes"
    shape: tuple[int, ...] | None = None
    device: str = "cpu"
    seed: int = 0

    @property
    def possible(self) -> bool:
        """Whether the loss takes these dtypes and arguments, and rows can be taken so."""
        floating = all(x in checks.FLOATING for x in self.dtypes)
        meant = self.kind == "indices" or not {*self.case} & {*self.loss.only_of_indices, "ignore_index"}
        one = len(self.dtypes) == 1 or self.kind != "indices"
        return floating and meant and one and (self.layout == GIVEN or self.layout in self._layouts)

    @property
    def has_edges(self) -> bool:
        """Whether the operands are such as some of torch's losses stop at."""
        return False

    @property
    def _layouts(self) -> Mapping[str, Laid]:
        return layouts(self.loss, self.kind, self.dtypes, chip_of(self.device))

    @cached_property
    def laid(self) -> Laid:
        """The shape of the logits, and their class dimension."""
        if self.shape is not None:
            return self.shape, min(1, len(self.shape) - 1)
        return self._layouts[self.layout]

    @cached_property
    def names(self) -> list[str]:
        """What the operands are called."""
        more = (str(self.loss.weights), MASK)
        return [*(x.name for x in self.loss.operands), *(x for x in more if self.case.get(x))]

    @cached_property
    def options(self) -> dict[str, Any]:
        """The arguments that are no operands."""
        chosen = {k: v for k, v in self.case.items() if k not in self.names}
        return {**chosen, "reduction": self.reduction, "class_dim": self.laid[1]}

    @cached_property
    def gradients_of(self) -> tuple[bool, ...]:
        """Which operands require grad: all that a loss differentiates."""
        return (True, self.kind != "indices", *(False for _ in self.names[2:]))

    @cached_property
    def id(self) -> str:
        """The check in words, for messages."""
        return "-".join((self.loss.name, *self.words))

    @property
    def words(self) -> tuple[str, str, str, str, str]:
        """Case (of many arguments their names), dtypes, reduction, layout and the operands that require grad, as tables
        print them.
        """
        brief = len(self.case) > MANY
        case = [k if v is True or brief else f"{k}={v}" for k, v in self.case.items()]
        if len(self.loss.targets) > 1 and self.kind != "indices":
            case.insert(0, self.kind)
        wanted = "all" if self.gradients_of[1] else self.names[0]
        return " ".join(case) or "defaults", "+".join(self.dtypes), self.reduction, self.layout, wanted

    def small(self) -> RowCheck:
        """The same on a small shape."""
        return replace(self, layout=next(iter(self._layouts)), shape=None)

    def operands(self) -> list[Tensor]:
        """Logits, the target, and arrays of further arguments, on the device."""
        return [x.to(self.device) for x in self._draw()]

    def _draw(self) -> Iterator[Tensor]:
        import torch

        shape, dim = self.laid
        rows = without(shape, dim)
        generator = torch.Generator().manual_seed(self.seed)
        values = self.loss.values({k: v for k, v in self.options.items() if k in self.loss.values()})

        def scores(position: int) -> Tensor:
            x = 3 * torch.randn(shape, generator=generator, dtype=torch.float64)
            domain = self.loss.operands[position].domain_for(values)
            if domain == "log_probability":
                x = x.log_softmax(dim)
            kind = getattr(torch, self.dtypes[-position])
            if position and self.kind == "probabilities" and domain != "log_probability":
                # A naive formula has no logarithm of 0.
                x = x.softmax(dim).clamp_min(torch.finfo(kind).tiny)
            return x.to(kind)

        yield scores(0)
        if self.kind == "indices":
            labels = torch.randint(shape[dim], rows, generator=generator)
            if labels.numel() > 1:
                out = torch.rand(rows, generator=generator) < 0.125
                labels[out] = self.case.get("ignore_index", IGNORED)
            yield labels
        else:
            yield scores(1)
        if self.names[2:3] == [self.loss.weights]:
            weights = torch.rand(shape[dim], generator=generator) + 0.25
            weights[::5] = 0
            yield weights.to(getattr(torch, self.dtypes[0]))
        if MASK in self.names:
            yield torch.rand(rows, generator=generator) < 0.75

    def ours(self) -> Callable[..., Tensor]:
        """The library's function with these arguments."""
        function, names, options = getattr(functional, self.loss.name), self.names, self.options
        return lambda *operands: function(**dict(zip(names, operands, strict=True)), **options)

    def torch(self) -> list[Callable[..., Tensor]]:
        """Torch's way to compute the same, if there is one."""
        given = {k: v for k, v in self.case.items() if k != self.loss.weights}
        found = row_eager.eager(self.loss, given, self.reduction, self.laid[1])
        return [] if found is None else [found]

    def upstream(self, operands: Sequence[Tensor]) -> list[Any]:
        """The upstream gradients to try: numbers for a reduced loss, one random tensor otherwise."""
        if self.reduction != "none":
            return list(GRAD_OUTPUTS)
        return [drawn_upstream(*self.result(operands), self.device, self.seed)]

    def result(self, operands: Sequence[Tensor]) -> tuple[tuple[int, ...], dtype]:
        """The shape and the dtype of the value."""
        floating = [x for x in operands[:2] if x.is_floating_point()]
        return without(*self.laid) if self.reduction == "none" else (), eager.promoted(floating)

    def truth(self, operands: Sequence[Tensor], grad_output: Any, where: str) -> Truth:
        """Value and gradients in float64, computed on the device ``where``."""
        arguments = {**dict(zip(self.names, operands, strict=True)), **self.options}
        found = row_truth.truth(self.loss.name, arguments, grad_output, where)
        return Truth(found.value, tuple(found.gradients.get(x) for x in self.names))

    def biases(self, operands: Sequence[Tensor]) -> Sequence[float | None]:
        """What gradients may be off by beyond the table."""
        return [None] * len(operands)

"""Checks of losses of rows of logits or log-probabilities.

The engine, not the storage of a tensor, determines how threads process rows. So a layout here is a shape for which the
engine chooses a certain row layout (:mod:`cupylosses.engines.softmax.layout`), which depends on the dtype and the GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from cupylosses import checks
from cupylosses.engines.softmax import layout as softmax_layout
from cupylosses.engines.softmax.definition import IGNORED, SoftmaxLoss
from cupylosses.engines.softmax.plan import rows_of, without
from cupylosses.engines.strides import dense_strides
from cupylosses.interop import ITEMSIZE
from cupylosses.jit.gpu import Chip
from cupylosses.testing.check import GIVEN, Check
from cupylosses.testing.eager import promoted
from cupylosses.testing.host.execution import SMALL
from cupylosses.testing.softmax import eager, truth
from cupylosses.testing.softmax.properties import LAYOUTS
from cupylosses.testing.truth import Truth

if TYPE_CHECKING:
    from torch import Tensor, dtype

#: An argument that is an array if it is True. So are class weights, whose name depends on the loss.
MASK = "mask"

#: Number of arguments beyond which their values are not printed.
MANY = 4


#: Shapes with their class dimension. Each layout uses the first shape for which the engine chooses it. Some shapes are
#: for little shared memory, and some are long even for the GPU with the most.
SHAPES = (
    *((x.shape, x.class_dim) for x in LAYOUTS.values()),
    *(((2, classes), 1) for classes in (66001, 140001, 270007, 540013, 1080041)),
)

#: Names of all layouts.
ROW_LAYOUTS = (
    "subwarp",
    "block",
    "cluster",
    "two_pass",
    "windowed",
    "thread_per_row_packed",
    "thread_per_row",
    "packed_rows",
    "columns",
    "interleaved_rows",
    "copied",
    "label_only_rows",
    "label_only_tiles",
    "label_only_few",
    "label_only_columns",
)

Laid = tuple[tuple[int, ...], int]


@cache
def layouts(loss: SoftmaxLoss, kind: str, dtypes: tuple[str, ...], chip: Chip) -> Mapping[str, Laid]:
    """Returns every layout of rows of these dtypes, with the shape that produces it."""
    shapes: dict[str, Laid] = {}
    for shape, dim in SHAPES:
        shapes.setdefault(_layout(loss, kind, dtypes, shape, dim, chip), (shape, dim))
    return shapes


def _layout(loss: SoftmaxLoss, kind: str, dtypes: tuple[str, ...], shape: tuple[int, ...], dim: int, chip: Chip) -> str:
    def rows(of: tuple[int, ...], name: str) -> softmax_layout.Rows:
        return rows_of(dense_strides(of, (0,) * len(of)), dim, ITEMSIZE[name], 0)

    outer = without(shape, dim)
    logits, target = rows(shape, dtypes[0]), rows(shape, dtypes[-1])
    results = [dense_strides(outer, (0,) * len(outer))] * 3
    tensors = (logits, target)[: 1 if kind == "indices" else 2]
    if softmax_layout.copied(outer, shape[dim], tensors * 2, len(tensors), loss.softmax):
        return "copied"
    if kind != "indices":
        layout = softmax_layout.dense_layout(outer, shape[dim], (logits, logits, target, target), results[1:], chip)
    else:
        lay_out = softmax_layout.row_layout if loss.softmax else softmax_layout.label_only_layout
        layout = lay_out(outer, shape[dim], logits, logits, results, chip)
    return "cluster" if layout.cluster > 1 and layout.kind == "block" else layout.kind


@cache
def chip_of(device: str) -> Chip:
    """Returns the GPU limits that determine layouts on a device; for the CPU, those of the simulated GPU."""
    if device == "cpu":
        return SMALL
    import torch

    from cupylosses.backends.torch import device as torch_device

    return torch_device.TorchDevice(torch.cuda.current_device()).chip


@dataclass(frozen=True)
class SoftmaxCheck(Check):
    """Check of a loss of rows with a kind of target, by default its first.

    ``case`` has parameters, flags and other arguments by name; True stands for an argument that is an array. ``dtypes``
    are those of the logits and of dense targets. ``shape`` is a requested shape, with the classes in dimension 1.
    """

    Definition: ClassVar = SoftmaxLoss

    loss: SoftmaxLoss
    layout: str = "subwarp"
    kind: str = ""
    shape: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "kind", self.kind or self.loss.targets[0])

    @property
    def possible(self) -> bool:
        floating = all(x in checks.FLOATING for x in self.dtypes)
        meant = self.kind == "indices" or not {*self.case} & {*self.loss.only_of_indices, "ignore_index"}
        one = len(self.dtypes) == 1 or self.kind != "indices"
        return floating and meant and one and (self.layout == GIVEN or self.layout in self._layouts)

    @property
    def _layouts(self) -> Mapping[str, Laid]:
        return layouts(self.loss, self.kind, self.dtypes, chip_of(self.device))

    @cached_property
    def laid(self) -> Laid:
        """Shape and class dimension of the logits."""
        if self.shape is not None:
            return self.shape, min(1, len(self.shape) - 1)
        return self._layouts[self.layout]

    @cached_property
    def names(self) -> list[str]:
        more = (str(self.loss.weights), MASK)
        return [*(x.name for x in self.loss.operands), *(x for x in more if self.case.get(x))]

    @cached_property
    def options(self) -> dict[str, Any]:
        options = {k: v for k, v in self.case.items() if k not in self.names}
        return {**options, "reduction": self.reduction, "class_dim": self.laid[1]}

    @cached_property
    def gradients_of(self) -> tuple[bool, ...]:
        return (True, self.kind != "indices", *(False for _ in self.names[2:]))

    @property
    def case_words(self) -> str:
        # If there are many arguments, prints their names only.
        brief = len(self.case) > MANY
        words = [k if v is True or brief else f"{k}={v}" for k, v in self.case.items()]
        if len(self.loss.targets) > 1 and self.kind != "indices":
            words.insert(0, self.kind)
        return " ".join(words)

    def small(self, layout: str | None = None) -> SoftmaxCheck:
        return replace(self, layout=layout or next(iter(self._layouts)), shape=None)

    def operands(self) -> list[Tensor]:
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
                # A naive formula cannot take the logarithm of 0.
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

    def torch(self) -> list[Callable[..., Tensor]]:
        options = {k: v for k, v in self.case.items() if k != self.loss.weights}
        twin = eager.twin(self.loss, options, self.reduction, self.laid[1])
        return [] if twin is None else [twin]

    def result(self, operands: Sequence[Tensor]) -> tuple[tuple[int, ...], dtype]:
        floating = [x for x in operands[:2] if x.is_floating_point()]
        return without(*self.laid) if self.reduction == "none" else (), promoted(floating)

    def truth(self, operands: Sequence[Tensor], grad_output: Any, where: str) -> Truth:
        arguments = {**dict(zip(self.names, operands, strict=True)), **self.options}
        expected = truth.truth(self.loss.name, arguments, grad_output, where)
        return Truth(expected.value, tuple(expected.gradients.get(x) for x in self.names))

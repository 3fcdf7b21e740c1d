"""One check of a loss of rows, the counterpart of :mod:`cupylosses.testing.check`, and performed by the same code.

The engine determines how threads take rows, not the tensor. So a layout here is a shape that the engine takes in a
certain way (:mod:`cupylosses.engines.softmax.layout`), which depends on the dtype and on the GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

from cupylosses import checks, functional
from cupylosses.engines.softmax import layout as softmax_layout
from cupylosses.engines.softmax.definition import IGNORED, SoftmaxLoss
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

#: Arguments that are arrays if they are True: this one, and class weights under the loss's own name.
MASK = "mask"

#: Beyond this number of arguments, their values are not printed.
MANY = 4

#: In place of a layout: a shape that the user requested.
GIVEN = "given"

#: Shapes with their class dimension. Each layout uses the first shape that the engine takes in its way: some for little
#: shared memory, and some that are long even for the most that a GPU has.
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
    "thread_per_row_packed",
    "thread_per_row",
    "copied",
    "label_only",
)

Laid = tuple[tuple[int, ...], int]


@cache
def layouts(loss: SoftmaxLoss, kind: str, dtypes: tuple[str, ...], chip: Chip) -> Mapping[str, Laid]:
    """Every layout of rows of these dtypes, with the shape that produces it."""
    found: dict[str, Laid] = {}
    for shape, dim in SHAPES:
        found.setdefault(_layout(loss, kind, dtypes, shape, dim, chip), (shape, dim))
    return found


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
        found = softmax_layout.term_layout(outer, shape[dim], (logits, logits, target, target), results[1:], chip)
    else:
        lay_out = softmax_layout.row_layout if loss.softmax else softmax_layout.gather_layout
        found = lay_out(outer, shape[dim], logits, logits, results, chip)
    return "cluster" if found.cluster > 1 and found.kind == "block" else found.kind


@cache
def chip_of(device: str) -> Chip:
    """The GPU facts that determine layouts on a device; on the host, those of the host's GPU."""
    if device == "cpu":
        return SMALL
    import torch

    from cupylosses.backends.torch import device as torch_device

    return torch_device.TorchDevice(torch.cuda.current_device()).chip


@dataclass(frozen=True)
class RowCheck:
    """A loss of rows with a kind of target, arguments, dtypes, reduction and layout.

    ``case`` has parameters, flags and other arguments by name; True for an argument that is an array. ``dtypes`` are
    those of the logits and of dense targets. ``shape`` is a requested shape, with the classes in the second dimension.
    """

    loss: SoftmaxLoss
    kind: str
    case: Mapping[str, Any] = field(default_factory=dict, hash=False)
    dtypes: tuple[str, ...] = ("float32",)
    reduction: str = "mean"
    layout: str = "subwarp"
    shape: tuple[int, ...] | None = None
    device: str = "cpu"
    seed: int = 0

    @property
    def possible(self) -> bool:
        """True if the loss takes these dtypes and arguments, and some shape has this layout."""
        floating = all(x in checks.FLOATING for x in self.dtypes)
        meant = self.kind == "indices" or not {*self.case} & {*self.loss.only_of_indices, "ignore_index"}
        one = len(self.dtypes) == 1 or self.kind != "indices"
        return floating and meant and one and (self.layout == GIVEN or self.layout in self._layouts)

    @property
    def has_edges(self) -> bool:
        """True if the operands have edges, at which some of torch's losses assert."""
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
        """The names of the operands."""
        more = (str(self.loss.weights), MASK)
        return [*(x.name for x in self.loss.operands), *(x for x in more if self.case.get(x))]

    @cached_property
    def options(self) -> dict[str, Any]:
        """The arguments that are not operands."""
        chosen = {k: v for k, v in self.case.items() if k not in self.names}
        return {**chosen, "reduction": self.reduction, "class_dim": self.laid[1]}

    @cached_property
    def gradients_of(self) -> tuple[bool, ...]:
        """For each operand, True if it requires grad: all that the loss differentiates."""
        return (True, self.kind != "indices", *(False for _ in self.names[2:]))

    @cached_property
    def id(self) -> str:
        """The check as text, for messages."""
        return "-".join((self.loss.name, *self.words))

    @property
    def words(self) -> tuple[str, str, str, str, str]:
        """Case (only the names, if there are many arguments), dtypes, reduction, layout and the operands that require
        grad, as printed in tables.
        """
        brief = len(self.case) > MANY
        case = [k if v is True or brief else f"{k}={v}" for k, v in self.case.items()]
        if len(self.loss.targets) > 1 and self.kind != "indices":
            case.insert(0, self.kind)
        wanted = "all" if self.gradients_of[1] else self.names[0]
        return " ".join(case) or "defaults", "+".join(self.dtypes), self.reduction, self.layout, wanted

    def small(self) -> RowCheck:
        """A copy on a small shape."""
        return replace(self, layout=next(iter(self._layouts)), shape=None)

    def operands(self) -> list[Tensor]:
        """Logits, the target, and the arrays among further arguments, on the device."""
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
        """torch's way to compute this loss, if there is one."""
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
        """The error that gradients may have beyond the table."""
        return [None] * len(operands)

"""Losses of rows under torch's transforms. What no kernel has goes by the formulas there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from devices import KERNELS
from torch import Tensor

import cupylosses.functional as F
from cupylosses.row_definition import RowLoss, row_registry
from cupylosses.testing.transforms import TRANSFORMS, Subject, Transform

pytestmark = pytest.mark.filterwarnings("ignore")

#: What asks for the bits of the kernels, for an operator in the graph, or for strides that only kernels promise: a
#: graph has the formulas.
OF_POINTWISE = ("`torch.compile`", "`torch.export`", "autocast", "`FakeTensor`", "copies of a Module")


#: What takes a gradient of a gradient that is constant: torch refuses that of its own ``nll_loss`` too.
OF_CURVED = ("`create_graph=True`", "third derivatives")


class RowSubject(Subject):
    """A loss of rows as a function of its floating operands alone."""

    def __init__(self, loss: Any, device: str) -> None:
        self.loss, self.device, self.seed = _Mean(loss), device, 0
        self.rows: RowLoss = loss
        self.function = self._call

    def draw(self, *shapes: tuple[int, ...], dtype: str = "float64", seed: int = 0) -> list[Tensor]:
        generator = torch.Generator().manual_seed(seed)
        count = 2 if self.rows.dense and self.rows.row is None else 1
        drawn = [torch.randn(shapes[0], generator=generator, dtype=torch.float64) for _ in range(count)]
        if not self.rows.softmax:
            drawn[0] = torch.log_softmax(drawn[0], -1)
        if self.rows.dense == "probabilities" and count == 2:
            drawn[1] = torch.softmax(drawn[1], -1)
        return [x.to(self.device, getattr(torch, dtype)) for x in drawn]

    def _call(self, x: Tensor, *others: Tensor, reduction: str = "mean") -> Tensor:
        return getattr(F, self.rows.name)(x, *(others or [self._labels(x)]), reduction=reduction, class_dim=-1)

    def truth(self, *operands: Tensor) -> Tensor:
        """The mean by torch's own functions."""
        x, *others = operands
        name = self.rows.name
        if name == "distillation_loss":
            p, q = (torch.log_softmax(y, -1) for y in (x, others[0]))
            return (q.exp() * (q - p)).sum(-1).mean()
        if name == "kl_div_with_logits":
            return (torch.xlogy(others[0], others[0]) - others[0] * torch.log_softmax(x, -1)).sum(-1).mean()
        log_p = x if name == "nll_loss" else torch.log_softmax(x, -1)
        own = log_p.gather(-1, self._labels(x).long()[..., None])[..., 0]
        return (-own * (1 - own.exp()) ** 2 if name == "softmax_focal_loss" else -own).mean()

    def _labels(self, x: Tensor) -> Tensor:
        """The same for every sample of a batch."""
        count = x[..., 0].numel()
        return (torch.arange(count, device=x.device) * 7 % x.shape[-1]).reshape(x.shape[:-1])


class _Mean:
    """What the transforms ask of a definition."""

    warn_broadcast = True
    mean_of_rows = True

    def __init__(self, loss: RowLoss) -> None:
        self.operands, self.class_name, self.name = loss.operands, loss.class_name, loss.name


@pytest.mark.parametrize("row_loss", row_registry().values(), ids=lambda x: x.name)
@pytest.mark.parametrize(
    "transform",
    [pytest.param(t, id=t.name) for t in TRANSFORMS.values() if not t.gpu and t.name not in OF_POINTWISE],
)
@pytest.mark.kernels
def test_works(row_loss: RowLoss, transform: Transform) -> None:
    if transform.name in OF_CURVED and not row_loss.softmax:
        pytest.skip("the loss is linear")
    error = transform.outcome(RowSubject(row_loss, KERNELS))
    if error is not None:
        raise error


@pytest.mark.parametrize("row_loss", row_registry().values(), ids=lambda x: x.name)
def test_one_graph(row_loss: RowLoss) -> None:
    """``torch.compile`` traces the formulas without a break, at the first call too, and its gradients are theirs."""
    torch.compiler.reset()
    subject = RowSubject(row_loss, "cpu")
    compiled = torch.compile(subject.function, fullgraph=True, backend="aot_eager")
    for rows in (3, 5, 6):
        operands = [x.requires_grad_() for x in subject.draw((rows, 4))]
        value, expected = compiled(*operands), subject.truth(*operands)
        torch.testing.assert_close(value, expected)
        torch.testing.assert_close(torch.autograd.grad(value, operands), torch.autograd.grad(expected, operands))

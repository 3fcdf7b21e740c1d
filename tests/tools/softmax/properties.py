"""Calls with dense targets in every row layout, and properties of dense targets only.

The properties of :mod:`cupylosses.testing.softmax.properties` accept these calls, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from itertools import product
from typing import TYPE_CHECKING, Any
from unittest import mock

import cupylosses.functional as F
from cupylosses.definition.registry import registry
from cupylosses.engines.softmax import layout
from cupylosses.engines.softmax.definition import SoftmaxLoss
from cupylosses.jit.gpu import DECLARED_BYTES, Chip
from cupylosses.testing.softmax.properties import SoftmaxCall, gradients, placed, second_agrees_with_truth
from cupylosses.testing.softmax.truth import NAMES, truth

if TYPE_CHECKING:
    from torch import Tensor

#: Losses with dense targets, with options that change the formula.
TERM_LOSSES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    **{name: (name, {}) for name, x in registry(SoftmaxLoss).items() if x.term},
    "cross_entropy with everything": ("cross_entropy", {"label_smoothing": 0.2, "z_loss": 0.1, "softcap": 4.0}),
    "kl_div_with_logits of logarithms": ("kl_div_with_logits", {"log_target": True, "temperature": 2.0}),
    "distillation_loss, mixed": ("distillation_loss", {"beta": 0.3, "temperature": 2.0}),
}

#: A GPU with so little shared memory per block that even short rows count as long, and a number of rows that counts as
#: many. Both are small because the host is slow: its threads take turns at each memory access.
TERM_CHIP = Chip(DECLARED_BYTES + (4 << 10), clusters=True, threads=512)
TERM_MANY_ROWS = 320
#: With this number of tiles, warps of a block share rows of seven classes.
TERM_COLUMN_TILES = 48

#: Operand shapes for which such a GPU uses each layout, in float32, with the classes in dimension 1.
TERM_LAYOUTS: Mapping[str, tuple[int, ...]] = {
    "subwarp": (37, 43),
    "block": (3, 301),
    "block, cluster": (3, 803),
    "windowed": (9, 4103),
    "thread_per_row": (3, 4, 5, 7),
    "columns": (3, 5, 4, 8),
    "columns, in registers": (3, 5, 8, 16),
    "columns, shared by warps": (3, 7, 4, 8),
    "packed_rows": (333, 5),
    "packed_rows, of many classes": (333, 17),
    "subwarp, copied": (2, 199, 5, 3),
}


@contextmanager
def term_chip() -> Iterator[None]:
    """Within this context, host execution simulates such a GPU, and few rows count as many."""
    # Imported by its full name, since the package also has a function of that name.
    execution = import_module("cupylosses.testing.host.execution")
    with (
        mock.patch.object(execution, "SMALL", TERM_CHIP),
        mock.patch.object(layout, "MANY_ROWS", TERM_MANY_ROWS),
        mock.patch.object(layout, "DENSE_COLUMN_TILES", TERM_COLUMN_TILES),
    ):
        yield


def draw_terms(
    row_loss: str,
    shape: Sequence[int],
    device: str = "cpu",
    dtypes: Sequence[str] = ("float32", "float32"),
    places: Sequence[str] = ("contiguous", "contiguous"),
    class_dim: int = 1,
    seed: int = 0,
    sure: Sequence[bool] = (False, False),
    **chosen: Any,
) -> SoftmaxCall:
    """Returns a call of one of :data:`TERM_LOSSES` with random operands, reduced to a mean.

    Operands that are ``sure`` have a class with a probability near 1 in each row.
    """
    import torch

    name, given = TERM_LOSSES[row_loss]
    chosen = {"reduction": "mean", **given, **chosen}
    generator = torch.Generator().manual_seed(seed)
    x, y = 3 * torch.randn(2, *shape, generator=generator)
    x, y = (_surely(z, class_dim) if s else z for z, s in zip((x, y), sure, strict=True))
    if registry(SoftmaxLoss)[name].dense == "probabilities":
        y = y.log_softmax(class_dim) if chosen.get("log_target") else y.softmax(class_dim)
    operands = {
        operand: placed(value.to(getattr(torch, dtype)).to(device), place)
        for operand, value, dtype, place in zip(NAMES[name][:2], (x, y), dtypes, places, strict=True)
    }
    return SoftmaxCall(name, {**operands, "class_dim": class_dim, **chosen})


def _surely(x: Tensor, class_dim: int) -> Tensor:
    """Returns a copy of the logits in which one class exceeds all others of its row by 12.

    It is the first class in some row, and the last one in another.
    """
    import torch

    rows = x.movedim(class_dim, -1)
    places = torch.linspace(0, rows.shape[-1] - 1, rows[..., 0].numel()).round().long().view(*rows.shape[:-1], 1)
    return rows.scatter(-1, places, rows.amax(-1, keepdim=True) + 12.0).movedim(-1, class_dim).contiguous()


def terms_second_of_equal_logits(call: SoftmaxCall) -> None:
    """Second derivatives match float64 if several logits are the largest."""
    first, other = NAMES[call.loss][:2]
    chosen = [x for x in (first, other) if x == first or registry(SoftmaxLoss)[call.loss].dense == "logits"]
    equal = {n: call.arguments[n].clamp(-4.0, 1.0).round() for n in chosen if n}
    second_agrees_with_truth(call.with_(**equal, reduction="none"))


def terms_keep_sure_rows(shape: Sequence[int], device: str = "cpu") -> None:
    """1 minus the largest probability keeps its digits, wherever its class is in dimension 1.

    Classes of -inf cost nothing where the target has no mass.
    """
    import torch

    classes, rest = shape[1], 2.0611536e-09
    for at in (0, 1, classes // 2, classes - 1):
        other = (at + classes // 2 + 1) % classes
        x = torch.full(tuple(shape), -float("inf"))
        x.select(1, at).fill_(20.0)
        x.select(1, other).fill_(0.0)
        target = torch.zeros(tuple(shape))
        target.select(1, at).fill_(1.0)
        leaf = x.to(device).requires_grad_()
        value = F.cross_entropy(leaf, target.to(device), reduction="none")
        torch.testing.assert_close(value.detach().cpu(), torch.full(value.shape, rest), rtol=2e-6, atol=0.0)
        expected = torch.zeros(tuple(shape))
        expected.select(1, at).fill_(-rest)
        expected.select(1, other).fill_(rest)
        torch.testing.assert_close(gradients(value, [leaf], 1.0)[0].cpu(), expected, rtol=2e-6, atol=0.0)


def terms_keep_sure_teachers(shape: Sequence[int], device: str = "cpu") -> None:
    """A student and a teacher that are sure of one class keep the digits of the others' losses and gradients.

    They do so wherever the class is, and also next to a class that is impossible for one of them, or for both.
    """
    import torch

    classes, none = shape[1], -float("inf")
    for at, beta in product((0, classes // 2, classes - 1), (0.0, 0.5)):
        x, t = (torch.randn(tuple(shape), generator=torch.Generator().manual_seed(i)) for i in range(2))
        x.select(1, at).fill_(19.0)
        t.select(1, at).fill_(21.0)
        for impossible in ((), (t,), (x, t)):
            for operand in impossible:
                operand.select(1, (at + 1) % classes).fill_(none)
            options = {"beta": beta, "temperature": 1.0, "class_dim": 1, "reduction": "none"}
            leaf = x.clone().to(device).requires_grad_()
            value = F.distillation_loss(leaf, t.to(device), **options)
            # The truth gets finite logits, with which impossible classes have a probability of about 1e-304.
            finite = {"student_logits": x.clamp_min(-700.0), "teacher_logits": t.clamp_min(-700.0)}
            exact = truth("distillation_loss", {**finite, **options})
            (gradient,) = gradients(value, [leaf], 1.0)
            for found, right in ((value.detach(), exact.value), (gradient, exact.gradients["student_logits"])):
                torch.testing.assert_close(found.cpu().double(), right.exact.view(found.shape), rtol=1e-4, atol=1e-13)


def terms_read_teachers_again(shape: Sequence[int], device: str = "cpu") -> None:
    """The gradient is right where known logarithms do not cover the values, after they replaced the teacher's logits.

    They do not cover a mixture with a beta that is 0 in float32.
    """
    import torch

    x, t = (y.bfloat16() for y in 2 * torch.randn(2, *shape, generator=torch.Generator().manual_seed(0)))
    options = {"temperature": 1.0, "reduction": "none"}
    exact = truth("distillation_loss", {"student_logits": x.double(), "teacher_logits": t.double(), **options})
    leaf = x.to(device).requires_grad_()
    (gradient,) = gradients(F.distillation_loss(leaf, t.to(device), beta=1e-50, **options), [leaf], 1.0)
    right = exact.gradients["student_logits"].exact.view(gradient.shape)
    torch.testing.assert_close(gradient.cpu().double(), right, rtol=2**-7, atol=2**-12 * float(right.abs().max()))


def terms_share_equal_logits(shape: Sequence[int], device: str = "cpu") -> None:
    """If all classes have the largest logit, each gets an equal share."""
    import torch

    classes = shape[1]
    x = torch.full(tuple(shape), 3.0, device=device).requires_grad_()
    target = torch.zeros(tuple(shape), device=device)
    target.select(1, classes // 3).fill_(1.0)
    value = F.cross_entropy(x, target, reduction="none")
    exact = torch.full(value.shape, float(classes), dtype=torch.float64).log()
    torch.testing.assert_close(value.detach().cpu().double(), exact, rtol=1e-6, atol=0.0)
    expected = 1.0 / classes - target.cpu().double()
    torch.testing.assert_close(gradients(value, [x], 1.0)[0].cpu().double(), expected, rtol=1e-5, atol=0.0)

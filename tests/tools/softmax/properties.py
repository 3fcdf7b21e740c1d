"""Properties of the row engine for dense targets, in every row layout; :mod:`cupylosses.testing.softmax.properties` has
those for class indices.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest import mock

import cupylosses.functional as F
from cupylosses import options
from cupylosses.definition.registry import registry
from cupylosses.engines.softmax import layout as softmax_layout
from cupylosses.engines.softmax.definition import SoftmaxLoss
from cupylosses.jit.gpu import DECLARED_BYTES, Chip
from cupylosses.testing.properties import require
from cupylosses.testing.softmax.properties import placed, upstream
from cupylosses.testing.softmax.truth import NAMES, truth
from cupylosses.testing.tolerance import compare, same_bits

if TYPE_CHECKING:
    from torch import Tensor

#: Losses with dense targets, with options that change the formula.
TERM_LOSSES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    **{name: (name, {}) for name, x in registry(SoftmaxLoss).items() if x.term},
    "cross_entropy with everything": ("cross_entropy", {"label_smoothing": 0.2, "z_loss": 0.1, "softcap": 4.0}),
    "kl_div_with_logits of logarithms": ("kl_div_with_logits", {"log_target": True, "temperature": 2.0}),
    "distillation_loss, mixed": ("distillation_loss", {"beta": 0.3, "temperature": 2.0}),
}

#: A GPU with so little shared memory per block that even short rows count as long: threads that take turns at each
#: memory access are slow.
TERM_CHIP = Chip(DECLARED_BYTES + (4 << 10), clusters=True, threads=512)

#: Operand shapes that such a GPU takes in each layout, in float32, with the classes in dimension 1.
TERM_LAYOUTS: Mapping[str, tuple[int, ...]] = {
    "subwarp": (37, 43),
    "block": (3, 301),
    "block, cluster": (3, 803),
    "two_pass": (2, 4103),
    "thread_per_row": (3, 5, 4, 8),
    "subwarp, copied": (2, 199, 5, 3),
}


@contextmanager
def term_chip() -> Iterator[None]:
    """Within this context, executions on the host have such a GPU."""
    # By name: the package has a function of that name.
    with mock.patch.object(import_module("cupylosses.testing.host.execution"), "SMALL", TERM_CHIP):
        yield


class TermCall(NamedTuple):
    """A function by name, and arguments by name."""

    name: str
    arguments: Mapping[str, Any]

    def with_(self, **arguments: Any) -> TermCall:
        """A copy with other arguments."""
        return TermCall(self.name, {**self.arguments, **arguments})

    def differentiable(self, both: bool = True) -> tuple[list[Tensor], TermCall]:
        """The operands that require gradients (the logits alone if not ``both``), and the call of them."""
        leaves = {x: self.arguments[x].detach().requires_grad_() for x in NAMES[self.name][: 2 if both else 1]}
        return list(leaves.values()), self.with_(**leaves)

    def __call__(self) -> Any:
        return getattr(F, self.name)(**self.arguments)


def draw_terms(
    row_loss: str,
    shape: Sequence[int],
    device: str = "cpu",
    dtypes: Sequence[str] = ("float32", "float32"),
    places: Sequence[str] = ("contiguous", "contiguous"),
    class_dim: int = 1,
    seed: int = 0,
    **chosen: Any,
) -> TermCall:
    """A call of one of :data:`TERM_LOSSES` with random operands, reduced to a mean."""
    import torch

    name, given = TERM_LOSSES[row_loss]
    chosen = {"reduction": "mean", **given, **chosen}
    generator = torch.Generator().manual_seed(seed)
    x, y = 3 * torch.randn(2, *shape, generator=generator)
    if registry(SoftmaxLoss)[name].dense == "probabilities":
        y = y.log_softmax(class_dim) if chosen.get("log_target") else y.softmax(class_dim)
    operands = {
        operand: placed(value.to(getattr(torch, dtype)).to(device), place)
        for operand, value, dtype, place in zip(NAMES[name][:2], (x, y), dtypes, places, strict=True)
    }
    return TermCall(name, {**operands, "class_dim": class_dim, **chosen})


@contextmanager
def noted_term_layouts() -> Iterator[list[softmax_layout.RowLayout]]:
    """Records the layouts of new plans within the context."""
    found: list[softmax_layout.RowLayout] = []
    layout = softmax_layout.dense_layout

    def note(*arguments: Any) -> softmax_layout.RowLayout:
        found.append(layout(*arguments))
        return found[-1]

    with mock.patch.object(softmax_layout, "dense_layout", note):
        yield found


def gradients(value: Tensor, leaves: Sequence[Tensor], grad_output: Tensor | float, **more: Any) -> list[Tensor]:
    """The gradients of the leaves."""
    import torch

    if not isinstance(grad_output, torch.Tensor):
        grad_output = torch.full_like(value, grad_output)
    return list(torch.autograd.grad(value, leaves, grad_output, **more))


def terms_agree_with_truth(call: TermCall, both: bool = True) -> None:
    """Value and gradients match float64, for the upstream gradient that forward expects and for another one."""
    leaves, call = call.differentiable(both)
    value = call()
    for grad_output in (upstream(value.detach()), value.detach() * 0 + 1):
        exact = truth(call.name, call.arguments, grad_output, str(value.device))
        found = compare(value.detach(), exact.value)
        require(found.ok, f"value: {found}")
        for operand, gradient in zip(
            NAMES[call.name], gradients(value, leaves, grad_output, retain_graph=True), strict=False
        ):
            found = compare(gradient, exact.gradients[operand])
            require(found.ok, f"gradient of {operand}: {found}")


def terms_second_agree_with_truth(call: TermCall, moving: tuple[bool, bool] = (True, True)) -> None:
    """The derivatives of the gradients along directions match float64."""
    import torch

    leaves, call = call.differentiable()
    names = [n for n, m in zip(NAMES[call.name], moving, strict=False) if m]
    generator = torch.Generator().manual_seed(3)
    along = {n: torch.randn(leaves[0].shape, generator=generator).to(call.arguments[n]) for n in names}
    value = call()
    grad_output = upstream(value.detach()).requires_grad_()
    exact = truth(call.name, call.arguments, grad_output.detach(), directions=along)
    assert exact.along is not None
    inputs = [call.arguments[n] for n in names]
    first = torch.autograd.grad(value, inputs, grad_output, create_graph=True)
    found = torch.autograd.grad(first, [grad_output, *leaves], list(along.values()), materialize_grads=True)
    expected = {"grad_output": exact.along, **exact.changed}
    for (name, x), result in zip(expected.items(), found, strict=True):
        compared = compare(result.cpu(), x)
        require(compared.ok, f"derivative of the gradients with respect to {name}: {compared}")


def terms_second_of_equal_logits(call: TermCall) -> None:
    """Second derivatives match float64 if several logits are the largest."""
    first, other = NAMES[call.name][:2]
    chosen = [x for x in (first, other) if x == first or registry(SoftmaxLoss)[call.name].dense == "logits"]
    equal = {n: call.arguments[n].clamp(-4.0, 1.0).round() for n in chosen if n}
    terms_second_agree_with_truth(call.with_(**equal, reduction="none"))


def terms_write_one_gradient_in_one_pass_or_two(call: TermCall) -> None:
    """Gradients have the bits of those that backward computes alone, whatever forward expects; so have those of a
    second backward, in their own memory.
    """
    leaves, call = call.differentiable()
    expected = {}
    for grad_output in (1.0, -3.0):
        with options.set_one_pass(False):
            expected[grad_output] = gradients(call(), leaves, grad_output)
    for grad_output in (1.0, -3.0, -3.0, 1.0):
        value = call()
        first = gradients(value, leaves, grad_output, retain_graph=True)
        require(all(map(same_bits, first, expected[grad_output])), f"other bits for {grad_output}")
    second = gradients(value, leaves, 1.0)
    require(all(map(same_bits, second, first)), "other bits in a second gradient")
    require(all(a.data_ptr() != b.data_ptr() for a, b in zip(first, second, strict=True)), "the same memory")


def terms_leave_masked_rows_out(call: TermCall) -> None:
    """Masked rows affect neither value nor gradients, whatever they hold, for any upstream gradient."""
    import torch

    first = call.arguments[NAMES[call.name][0]]
    out = torch.zeros((first.shape[0], *first.shape[2:]), dtype=torch.bool, device=first.device)
    out.view(-1)[1::2] = True
    for reduction in ("mean", "none"):
        expected = None
        for bad in (0.0, float("nan"), float("inf"), -float("inf")):
            spoiled = {x: torch.where(out.unsqueeze(1), bad, call.arguments[x]) for x in NAMES[call.name][:2]}
            leaves, spoilt = call.with_(mask=~out, reduction=reduction, **spoiled).differentiable()
            value = spoilt()
            found = [value.detach()]
            for grad_output in (1.0, -3.0, float("inf")):
                written = gradients(value, leaves, grad_output, retain_graph=True)
                require(
                    all(bool((x.movedim(1, -1)[out] == 0).all()) for x in written),
                    f"they have a gradient for {grad_output}",
                )
                found += written if grad_output < 2 else []
            expected = expected or found
            require(all(map(same_bits, found, expected)), f"rows of {bad} that do not count, {reduction}")


def terms_keep_sure_rows(shape: Sequence[int], device: str = "cpu") -> None:
    """1 minus the largest probability keeps its digits, wherever its class is in dimension 1; classes of -inf cost
    nothing where the target has no mass.
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


def terms_share_equal_logits(shape: Sequence[int], device: str = "cpu") -> None:
    """If all classes have the largest logit, each gets its share."""
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

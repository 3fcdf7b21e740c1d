"""Properties of losses of rows of scores, on CPU tensors."""

from __future__ import annotations

import torch

from cupylosses import functional
from cupylosses.testing.row_margin.truth import truth
from cupylosses.testing.tolerance import compare, require


def agrees_with_formula(name: str, rows: int, classes: int, labels: int = 4) -> None:
    """Values and gradients of rows match the truth.

    Scores are multiples of 1/2, so that pairs lie on the boundary, and the first label is listed twice.
    """
    function = getattr(functional, name)
    generator = torch.Generator().manual_seed(0)
    scores = (2 * torch.randn(rows, classes, generator=generator)).round() / 2
    target = torch.randint(classes, (rows, labels), generator=generator)
    target[:, -1] = target[:, 0]
    target = target if function.loss.several else target[:, 0].contiguous()
    leaf = scores.requires_grad_()
    value = function(leaf, target, reduction="none")
    upstream = torch.linspace(0.5, 1.5, rows)
    (slope,) = torch.autograd.grad(value, leaf, upstream)
    options = {"reduction": "none", "class_dim": 1, "ignore_index": -100}
    expected = truth(
        {"input": scores, "target": target}, function.loss.values(), options, function.loss.several, upstream
    )
    for found, exact in ((value.detach(), expected.value), (slope, expected.gradients[0])):
        compared = compare(found, exact)
        require(compared.ok, str(compared))


def second_agrees_with_differences() -> None:
    """A product with the second derivatives agrees with central differences of gradients."""
    generator = torch.Generator().manual_seed(0)
    scores, tangent = (torch.randn(5, 43, generator=generator, dtype=torch.float64) for _ in range(2))
    target = torch.arange(5)

    def slope(x: torch.Tensor, again: bool = False) -> torch.Tensor:
        x = x.detach().requires_grad_()
        (found,) = torch.autograd.grad(functional.multi_margin_loss(x, target, p=2), x, create_graph=again)
        return torch.autograd.grad(found, x, tangent)[0] if again else found

    expected = (slope(scores + 1e-6 * tangent) - slope(scores - 1e-6 * tangent)) / 2e-6
    torch.testing.assert_close(slope(scores, True), expected, rtol=1e-6, atol=1e-8)

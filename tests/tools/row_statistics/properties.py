"""Properties of losses of row statistics, on CPU tensors."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import array_api_compat.torch as xp
import torch

from cupylosses import functional
from cupylosses.engines.row_statistics import layout
from cupylosses.testing import host


def agrees_with_formula(name: str, rows: int, features: int, **options: Any) -> None:
    """Values and gradients of rows match the reference formula; vectors of integers have many equal components."""
    function = getattr(functional, name)
    generator = torch.Generator().manual_seed(0)
    vectors = [
        (3 * torch.randn(rows, features, generator=generator, dtype=torch.float64)).round().requires_grad_()
        for _ in function.loss.operands
    ]
    found = function(*vectors, **options, reduction="none")
    exact = function.loss.reference(xp, *vectors, **function.loss.values(options))
    upstream = torch.linspace(0.5, 1.5, rows, dtype=torch.float64)
    slopes = (torch.autograd.grad(x, vectors, upstream) for x in (found, exact))
    for a, b in ((found, exact), *zip(*slopes, strict=True)):
        assert float((a - b).detach().norm()) <= 1e-12 * float(b.detach().norm())


def agrees_in_registers(name: str, rows: int, features: int) -> None:
    """As :func:`agrees_with_formula`, for rows that lanes hold in registers."""
    with patch.object(layout, "REGISTER_ROWS", 1):
        agrees_with_formula(name, rows, features)


def agrees_where_warps_stage_gradients(name: str, rows: int, features: int) -> None:
    """As :func:`agrees_with_formula`, with the shared memory of a large GPU, in which warps stage short gradients."""
    chosen, staged = layout.layout, []

    def with_room(*arguments: Any) -> layout.Layout:
        found = chosen(*arguments[:-2], 64 << 10, arguments[-1])
        staged.append(found.staging > 0)
        return found

    with patch.object(layout, "layout", with_room):
        agrees_with_formula(name, rows, features)
    assert all(staged)


def agrees_where_parts_have_blocks(name: str, rows: int, features: int) -> None:
    """The mean and its gradients match the formula if each part of a row has a block, of which few run at once."""
    function = getattr(functional, name)
    generator = torch.Generator().manual_seed(0)
    vectors = [
        (3 * torch.randn(rows, features, generator=generator)).round().requires_grad_() for _ in function.loss.operands
    ]
    with patch.object(layout, "LONG_PART_BYTES", 1 << 10), host.execution(200, seed=1):
        found = function(*vectors)
        slopes = torch.autograd.grad(found, vectors)
    exact = function.loss.reference(xp, *[x.double() for x in vectors], **function.loss.values({})).mean()
    for a, b in ((found, exact), *zip(slopes, torch.autograd.grad(exact, vectors), strict=True)):
        assert float((a - b).detach().norm()) <= 1e-6 * float(b.detach().norm())

"""Cases of the section ``cliffs``: a workload, the layouts of its operands, a mode, and the bars that apply."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch

from benchmarking.figures import HVP, spell_case, spell_shape
from benchmarking.reasons import reason
from benchmarking.workloads import Inputs, Workload, step
from cupylosses.testing.eager import Call


@dataclass(frozen=True)
class Layout:
    """Placement of an operand in memory.

    Attributes:
        order: Dimensions from the outermost to the innermost; by default in the order of the shape.
        step: Distance between neighbours in the innermost dimension, in elements.
        padding: Unused elements after each row of the innermost dimension.
        offset: Distance of the first element from an address that is a multiple of 256 bytes, in elements.
    """

    order: tuple[int, ...] = ()
    step: int = 1
    padding: int = 0
    offset: int = 0

    def strides(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The strides of an operand of this shape, in elements."""
        found, distance = [0] * len(shape), self.step
        order = self.order or tuple(range(len(shape)))
        for d in reversed(order):
            found[d] = distance
            distance = distance * shape[d] + (self.padding if d == order[-1] else 0)
        return tuple(found)

    def place(self, x: torch.Tensor) -> torch.Tensor:
        """A copy of ``x`` in this layout."""
        strides = self.strides(x.shape)
        span = 1 + sum((n - 1) * s for n, s in zip(x.shape, strides, strict=True))
        storage = torch.empty(self.offset + span, dtype=x.dtype, device=x.device)
        return storage.as_strided(x.shape, strides, self.offset).copy_(x)

    def __str__(self) -> str:
        words = [f"order {spell_shape(self.order)}"] if self.order else []
        words += [f"step {self.step}"] if self.step > 1 else []
        words += [f"padding {self.padding}"] if self.padding else []
        words += [f"offset {self.offset}"] if self.offset else []
        return ", ".join(words)


@dataclass(frozen=True)
class Case:
    """One measurement of ours, beside eager and a copy with the minimal traffic.

    Attributes:
        group: Kind of case.
        workload: The loss, its options and the shapes of its operands.
        mode: A mode of `figures.MODES`, or `figures.HVP`.
        layouts: Layouts of operands by position; the others are contiguous.
        copy_bar: Least fraction of a copy's speed; None without such a bar.
        beside: Another case to compare with, if any.
        beside_bar: Greatest ratio of the time to that of ``beside``; None without such a bar.
        quick: True if a quick run includes the case.
    """

    group: str
    workload: Workload
    mode: str = "forward+backward"
    layouts: Mapping[int, Layout] = field(default_factory=dict)
    copy_bar: float | None = None
    beside: Case | None = None
    beside_bar: float | None = None
    quick: bool = False

    @property
    def title(self) -> str:
        """A name that distinguishes the case from all others."""
        w = self.workload
        shapes = dict.fromkeys(map(spell_shape, w.shapes))
        words = [self.group, f"{w.loss.name} {w.spelled_dtype} {' '.join(shapes)}", self.mode]
        words += [w.reduction] if w.reduction != "mean" else []
        words += filter(None, [w.variant, spell_case(w.case)])
        words += [f"{w.loss.operands[i].name}: {layout}" for i, layout in self.layouts.items()]
        return ", ".join(words)

    @property
    def traffic(self) -> int:
        """Minimal memory traffic in bytes.

        Without a reduction, the value is written and then read by torch's sum, and backward reads the operands again.
        A Hessian-vector product reads the operands and a vector and writes a vector; if a gradient must read the
        operands twice, the product reads the operands and the vector twice.
        """
        w = self.workload
        if self.mode == HVP:
            vector = w.operand_bytes[0]
            return (w.least_read + vector) * (2 if w.reads_again else 1) + vector
        found = w.traffic(self.mode)
        if w.reduction == "none":
            found += 2 * w.values * getattr(torch, w.promoted).itemsize
            found += w.least_read if w.differentiated(self.mode) else 0
        return found

    @property
    def contiguous(self) -> bool:
        """True if all operands are contiguous, whatever their alignment."""
        return all(x == Layout(offset=x.offset) for x in self.layouts.values())

    def operands(self) -> tuple[torch.Tensor, ...]:
        """Random operands in their layouts; those that the mode differentiates require grad."""
        found = list(Inputs(self.workload)[0])
        for i, layout in self.layouts.items():
            found[i] = layout.place(found[i])
        count = 1 if self.mode == HVP else self.workload.differentiated(self.mode)
        for x in found[:count]:
            x.requires_grad_()
        return tuple(found)

    def steps(self, call: Call, operands: tuple[torch.Tensor, ...], copied: bool = False) -> Callable[[], object]:
        """The function to time: forward and backward, or only a Hessian-vector product.

        With ``copied``, the loss gets contiguous copies of the operands, and the time includes making them. The vector
        of a Hessian-vector product has the layout of the first operand in either case.
        """

        def contiguous(operands: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            return [x.contiguous() for x in operands]

        apply = (lambda *x: call(*contiguous(x))) if copied else call
        if self.mode != HVP:
            return lambda: step(apply, operands)
        value = apply(*operands)
        value = value.sum() if value.dim() else value
        (gradient,) = torch.autograd.grad(value, operands[0], create_graph=True)
        vector = torch.randn_like(operands[0])

        def product() -> None:
            if copied:
                contiguous(operands)
            torch.autograd.grad(gradient, operands[0], vector, retain_graph=True)

        return product

    def eager(self) -> Call | None:
        """torch's way to compute the loss, or else the formula, one torch operation at a time.

        Operands of different dtypes are promoted first, because few of torch's functions do that.
        """
        w = self.workload
        call = w.torchs() or w.naive()
        if call is None or not w.others:
            return call
        wide = getattr(torch, w.promoted)
        return lambda *operands: call(*(x.to(wide) if x.is_floating_point() else x for x in operands))

    def describe(self) -> dict[str, Any]:
        """The columns that identify the case and its bars."""
        w = self.workload
        return {
            "group": self.group,
            "case": self.title,
            "loss": w.loss.name,
            "shape": spell_shape(w.shape),
            "elements": w.elements,
            "dtype": w.spelled_dtype,
            "reduction": w.reduction,
            "mode": self.mode,
            "bytes": self.traffic,
            "copy_bar": self.copy_bar,
            "beside": self.beside.title if self.beside else None,
            "beside_bar": self.beside_bar,
            "reason": reason(self.title),
        }


def case(
    group: str,
    workload: Workload,
    layouts: Mapping[int, Layout] | None = None,
    reduction: str = "mean",
    **fields: Any,
) -> Case:
    """A case of the workload with this reduction."""
    return Case(group, replace(workload, reduction=reduction), layouts=layouts or {}, **fields)


def transposed(dims: int, first: int = -2, second: int = -1) -> Layout:
    """A layout with two dimensions exchanged."""
    order = list(range(dims))
    order[first], order[second] = order[second], order[first]
    return Layout(tuple(order))


def channels_last(dims: int) -> Layout:
    """The layout of images or volumes with the channels as the innermost dimension."""
    return Layout((0, *range(2, dims), 1))


def from_elements(limit: int, shape: Sequence[int], bar: float) -> float | None:
    """The bar, or None if the shape has fewer than ``limit`` elements."""
    return bar if prod(shape) >= limit else None

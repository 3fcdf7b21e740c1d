"""Region losses as workloads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from benchmarking import figures, workloads
from benchmarking.draw import Draw
from benchmarking.figures import MODES, REGIONS
from benchmarking.selection import Run
from benchmarking.workloads import Workload
from cupylosses import functional
from cupylosses.checks import FLOATING
from cupylosses.engines.regions.definition import RegionLoss
from cupylosses.testing.eager import Call
from cupylosses.testing.regions.eager import twin

#: Operands that may be added, and the fraction of the voxels that a mask keeps.
CLASS_WEIGHT, MASK, KEPT = "class_weight", "mask", 0.75


@dataclass(frozen=True)
class RegionWorkload(Workload):
    """A region loss.

    ``shapes`` are those of the logits, with the classes in dimension 1, of the target (labels or dense targets), and of
    the operands that ``added`` names: class weights, a mask, or both. ``label`` is the dtype of the target.
    """

    Definition: ClassVar = RegionLoss
    section = "throughput"
    cliffs = "regions_cliffs"

    loss: RegionLoss
    label: str = "int64"
    added: tuple[str, ...] = ()

    @property
    def drawn(self) -> tuple[str, ...]:
        return (self.dtype, self.label, *("bool" if x == MASK else self.dtype for x in self.added))

    @property
    def variant(self) -> str:
        return " ".join(self.added)

    @property
    def modes(self) -> tuple[str, ...]:
        # "all gradients" would count floating operands among the added ones, too, although they get no gradient.
        return tuple(MODES)[:2] if self.added else tuple(MODES)

    @property
    def values(self) -> int:
        return 1

    @property
    def reads_again(self) -> bool:
        """True: the gradient needs the sums over whole samples, so backward reads the operands again."""
        return True

    def draw(self, shapes: Sequence[Sequence[int]], seed: int) -> Sequence[torch.Tensor]:
        generator = torch.Generator(workloads.DEVICE).manual_seed(seed)
        where = {"generator": generator, "device": workloads.DEVICE}
        found = [torch.randn(tuple(shapes[0]), **where)]
        if self.label in FLOATING:
            found.append(torch.rand(tuple(shapes[1]), **where))
        else:
            found.append(torch.randint(0, self.shape[1], tuple(shapes[1]), **where))
        for name, shape in zip(self.added, shapes[2:], strict=True):
            x = torch.rand(tuple(shape), **where)
            found.append(x < KEPT if name == MASK else x + 0.25)
        return [x.to(getattr(torch, dtype)) for x, dtype in zip(found, self.drawn, strict=True)]

    def ours(self) -> Call:
        function, options, added = getattr(functional, self.loss.name), dict(self.case), self.added
        return lambda input, target, *more: function(input, target, **dict(zip(added, more, strict=True)), **options)

    def torchs(self) -> Call | None:
        call, added = twin(self.loss, self.loss.values(self.case), "mean", 1, None), self.added
        if call is None or not added:
            return call
        return lambda input, target, *more: call(input, target, **dict(zip(added, more, strict=True)))

    def compiled_in(self, modes: Sequence[str], quick: bool) -> list[str]:
        return [x for x in modes if x == "forward+backward" and not quick]

    @classmethod
    def chosen(cls, run: Run) -> list[RegionWorkload]:
        if run.quick:
            return []
        found = [regions(loss, *x) for loss in run.losses_of(cls) for x in REGIONS]
        return [x for x in found if x.dtype in run.dtypes]

    @classmethod
    def tiny(cls, loss: RegionLoss) -> RegionWorkload:
        return regions(loss, (2, 4, 8, 8), "float32", "int64")

    @classmethod
    def large(cls, loss: RegionLoss) -> RegionWorkload:
        return regions(loss, *REGIONS[0])

    @classmethod
    def fitting(cls, loss: RegionLoss, free: int) -> RegionWorkload:
        (samples, *rest), dtype, label = REGIONS[0]
        each = getattr(torch, dtype).itemsize
        for n in rest:
            each *= n
        return regions(loss, (max(1, min(samples, free // each)), *rest), dtype, label)

    @classmethod
    def random(cls, loss: RegionLoss, draw: Draw) -> RegionWorkload:
        elements, classes, samples = draw.size(1 << 12, 1 << 26), draw.size(2, 64), draw.size(1, 16)
        pixels = draw.pixels(max(1, elements // classes // samples))
        dtype, case = draw.dtype(), draw.options(loss.cases)
        of_labels = case.get(loss.chosen_by) == "softmax"
        label = draw.choice(("int64", "uint8") if of_labels else ("int64", "uint8", dtype))
        found = replace(regions(loss, (samples, classes, *pixels), dtype, label), title=figures.RANDOM, case=case)
        shapes = {CLASS_WEIGHT: (classes,), MASK: (samples, *pixels)}
        added = tuple(name for name in shapes if draw.random() < 0.15)
        if loss.values(case)["pool"] in ("class", "both"):
            added = tuple(x for x in added if x != CLASS_WEIGHT)
        return replace(found, added=added, shapes=(*found.shapes, *(shapes[x] for x in added)))

    def __str__(self) -> str:
        return f"{super().__str__()} {self.label}"


def regions(loss: RegionLoss, shape: Sequence[int], dtype: str, label: str) -> RegionWorkload:
    """A workload with logits of this shape, and labels, or dense targets if ``label`` is a floating dtype."""
    dense = label in FLOATING
    shapes = tuple(shape), tuple(shape) if dense else (*shape[:1], *shape[2:])
    title = f"{figures.REGION_VOXELS}, {label} {'targets per class' if dense else 'labels'}"
    return RegionWorkload(loss, shapes, dtype, title, label=label)

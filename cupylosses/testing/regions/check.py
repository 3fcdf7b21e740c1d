"""Checks of region losses. A layout is a shape that the engine processes in a certain way, or a storage of operands."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from cupylosses import checks
from cupylosses.engines.regions.call import shape_of_groups
from cupylosses.engines.regions.definition import RegionLoss
from cupylosses.testing.check import GIVEN, Check, function_for
from cupylosses.testing.regions import eager
from cupylosses.testing.regions.truth import truth
from cupylosses.testing.truth import Truth

if TYPE_CHECKING:
    from torch import Tensor, dtype


#: Label of the voxels that do not count, in layouts that have such voxels.
LEFT_OUT = 255


class Layout(NamedTuple):
    """Shape with the classes in dimension 1, and the storage of operands.

    ``lies`` is "" (contiguous), "last" (channels-last), "strided", or "odd" (an address that is not a multiple of the
    vector size). ``ignored`` is True if some voxels are ignored; these hold NaN.
    """

    shape: tuple[int, ...]
    lies: str = ""
    ignored: bool = False


LAYOUTS: Mapping[str, Layout] = {
    "vectors": Layout((2, 3, 16, 64)),
    "volume": Layout((2, 5, 3, 5, 7)),
    "many": Layout((2, 27, 5, 7)),
    "many, channels_last": Layout((2, 27, 5, 7), "last"),
    "channels_last": Layout((2, 3, 16, 64), "last"),
    "strided": Layout((2, 3, 16, 64), "strided"),
    "odd": Layout((2, 3, 16, 64), "odd"),
    "ignored": Layout((2, 3, 16, 64), ignored=True),
}


@dataclass(frozen=True)
class RegionCheck(Check):
    """Check of a region loss.

    ``shape`` is a requested shape of the input, with the classes in dimension 1. The second dtype is that of the
    target, by default int64; targets of integer dtype are labels.
    """

    Definition: ClassVar = RegionLoss

    loss: RegionLoss
    layout: str = "vectors"
    shape: tuple[int, ...] | None = None

    @cached_property
    def values(self) -> dict[str, Any]:
        """All parameters and flags by name."""
        return self.loss.values(self.case)

    @cached_property
    def operand_dtypes(self) -> tuple[str, ...]:
        """Dtype of each operand."""
        return (self.dtypes[0], self.dtypes[1] if len(self.dtypes) > 1 else "int64")

    @cached_property
    def laid(self) -> Layout:
        """Shape and storage."""
        return Layout(tuple(self.shape)) if self.shape else LAYOUTS[self.layout]

    @cached_property
    def gradients_of(self) -> tuple[bool, ...]:
        return tuple(x in checks.FLOATING for x in self.operand_dtypes)

    @property
    def possible(self) -> bool:
        known = self.layout in LAYOUTS or (self.layout == GIVEN and bool(self.shape) and len(self.shape) > 1)
        floating = self.operand_dtypes[0] in checks.FLOATING
        dense = self.operand_dtypes[1] in checks.FLOATING
        # A softmax over the classes of a voxel and ignored voxels both need labels.
        of_labels = self.values.get("focal_over") == "softmax" or (dense and self.laid.ignored)
        return known and floating and self.reduction in self.loss.reductions and not (dense and of_labels)

    @property
    def options(self) -> dict[str, Any]:
        ignored = {"ignore_index": LEFT_OUT} if self.laid.ignored else {}
        return {**self.values, "reduction": self.reduction, **ignored}

    def small(self, layout: str | None = None) -> RegionCheck:
        return replace(self, layout=layout or next(iter(LAYOUTS)), shape=None)

    def operands(self) -> list[Tensor]:
        import torch

        shape, lies, ignored = self.laid
        generator = torch.Generator().manual_seed(self.seed)
        x = 2 * torch.randn(shape, generator=generator, dtype=torch.float64)
        if self.values["activation"] == "none":
            x = x.sigmoid()
        name = self.operand_dtypes[1]
        voxels = (shape[0], *shape[2:])
        if name in checks.FLOATING:
            target = torch.rand(shape, generator=generator, dtype=torch.float64)
        else:
            target = torch.randint(0, shape[1], voxels, generator=generator)
            if ignored:
                left_out = torch.rand(voxels, generator=generator) < 0.2
                target[left_out] = LEFT_OUT
                x[left_out[:, None].expand(shape)] = float("nan")
        x = _laid(x.to(self.device, getattr(torch, self.operand_dtypes[0])), lies)
        target = target.to(self.device, getattr(torch, name))
        return [x, _laid(target, lies) if target.dim() == x.dim() else target]

    def torch(self) -> list[Callable[..., Tensor]]:
        twin = eager.twin(self.loss, self.values, self.reduction, 1, LEFT_OUT if self.laid.ignored else None)
        return [] if twin is None else [twin]

    def result(self, operands: Sequence[Tensor]) -> tuple[tuple[int, ...], dtype]:
        import torch

        kind = operands[0].dtype
        if operands[1].is_floating_point():
            kind = torch.promote_types(kind, operands[1].dtype)
        if self.reduction != "none":
            return (), kind
        return shape_of_groups(self._static, *self.laid.shape[:2]), kind

    def truth(self, operands: Sequence[Tensor], grad_output: Any, where: str) -> Truth:
        moved = [x.detach().to(where) for x in operands]
        prepare = function_for(self.loss).prepare
        return truth(lambda *x: prepare(*x, **self.options), moved, grad_output, self.gradients_of)

    @property
    def _static(self) -> Any:
        return function_for(self.loss).prepare(*self.operands(), **self.options).static


def _laid(x: Tensor, lies: str) -> Tensor:
    import torch

    if lies == "last":
        return x.movedim(1, -1).contiguous().movedim(-1, 1)
    if lies == "strided":
        return x.transpose(2, 3).contiguous().transpose(2, 3)
    if lies == "odd":
        return torch.cat((x.flatten()[:1], x.flatten()))[1:].view(x.shape)
    return x

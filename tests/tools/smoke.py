"""Launches every kernel of a loss where out-of-bounds accesses are likeliest, under tools that watch memory.

    python -m tools.smoke --loss mse_loss

Nothing is compared: the tool around it (``scripts/sanitize.py``) reports the errors. It needs torch and CuPy, and uses
small operands, since such tools slow kernels down by orders of magnitude.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, Any

from cupylosses import checks, value_and_grad
from cupylosses.definition.registry import registry
from cupylosses.engines.pointwise.codegen import KINDS
from cupylosses.engines.pointwise.definition import Loss, ModifiedLoss, modified
from cupylosses.jit import compiler
from cupylosses.testing import check as checking
from cupylosses.testing.check import Check
from cupylosses.testing.layouts import LAYOUTS, WIDEST, Shape

if TYPE_CHECKING:
    from torch import Tensor

#: One element; one element less and more than a vector, and than a warp takes at once.
TAILS = (1, WIDEST - 1, WIDEST + 1, 32 * 4 * 4 - 1, 32 * 4 * 4 + 1, 32 * 4 * WIDEST + 3)

#: Many blocks; and enough elements that there are fewer partial sums than batches, so that a warp processes several.
BLOCKS: Shape = (515, 517)
BATCHES: Shape = ((1 << 21) + 3,)
#: Whole tiles of vectors of 16-bit operands along both dimensions: with few elements, and with so many that lanes use
#: the widest vectors.
TILES: tuple[Shape, ...] = ((64, 64), (1 << 10, 1 << 11))
#: Rows with two outer dimensions, if they are sliced.
PLANES: Shape = (3, 5, 64)
#: Short dimensions, each one side of a tile, next to a long one of whole vectors.
SHORT = (3, 5, 7)
LONG = 1 << 10

REDUCTIONS = ("mean", "none")

#: Layouts that are launched in every dtype: whole vectors with a tail, no vectors, gaps, and both kinds of broadcast.
LAYOUTS_OF_DTYPES = ("contiguous", "misaligned", "sliced", "row", "row_aligned", "column_aligned")

#: Layouts that are launched with CuPy arrays too, because CuPy's own code runs between the operands and the launch.
LAYOUTS_OF_CUPY = ("contiguous", "strided", "row")


def selection(loss: Loss, device: str) -> Iterator[Check]:
    """Yields the checks that are launched for a loss."""
    base = Check(loss, device=device)
    for reduction in REDUCTIONS:
        some = replace(base, reduction=reduction)
        yield from (replace(some, case=x) for x in loss.cases)
        yield from (replace(some, layout=x) for x in LAYOUTS if x != "empty")
        for dtype, layout in product(checks.FLOATING, LAYOUTS_OF_DTYPES):
            yield replace(some, dtypes=(dtype,), layout=layout)
        yield from (replace(some, dtypes=("float32", x)) for x in ("bfloat16", *checks.INTEGER))
        yield from (replace(some, shape=(x,), dtypes=(y,)) for x, y in product(TAILS, ("float32", "bfloat16")))
        yield replace(some, shape=(2, WIDEST + 1))
        yield from (replace(some, shape=x, dtypes=("bfloat16",), layout="mixed") for x in TILES)
        yield replace(some, shape=PLANES, layout="sliced")
        for short, dtype in product(SHORT, ("float32", "float64", "bfloat16")):
            yield replace(some, shape=(LONG, short), dtypes=(dtype,), layout="mixed")
        yield from (replace(some, shape=BLOCKS, layout=x) for x in ("contiguous", "row", "column", "scalar"))
        yield replace(some, shape=BATCHES)
    yield replace(base, loss=modified(loss, mask=True))
    both = modified(loss, weight="array", mask=True)
    for reduction, layout in product(("none", "mean", "weighted_mean"), ("contiguous", "row", "row_aligned", "column")):
        yield replace(base, loss=both, reduction=reduction, layout=layout)
    yield replace(base, loss=both, shape=(4, 5), layout="row")
    for dim, layout in product(((0,), (1,)), ("contiguous", "row", "column")):
        yield replace(base, dim=dim, layout=layout)
        yield replace(base, dim=dim, layout=layout, loss=both)
    for dim, shape in (((0,), (1 << 15, 5)), ((1,), (5, 1 << 15)), ((0,), BLOCKS), ((1,), BLOCKS)):
        yield replace(base, dim=dim, shape=shape, reduction="sum")
    # Rows of so few columns that the gradient of a row has a kernel of its own, of one block or two.
    yield from (replace(base, shape=(1 << 15, x), layout="row") for x in (5, 9))
    yield replace(base, dim=tuple(range(1, 8)), shape=BLOCKS, layout="eight_d", reduction="sum")


def launch(check: Check) -> None:
    """Launches forward only, then value and gradients.

    There is a launch for each upstream gradient that takes another path through the kernels.
    """
    import torch

    operands, function = check.operands(), check.ours()
    with torch.no_grad():
        function(*operands)
    upstream = check.upstream(operands)
    if isinstance(upstream[0], torch.Tensor):
        upstream.append(upstream[0].new_ones(()).expand_as(upstream[0]))
    for grad_output in upstream:
        checking.run(function, operands, check.gradients_of, grad_output)
    if check.reduction == "mean" and check.dim is None:
        launch_product(check, operands)


def launch_product(check: Check, operands: Sequence[Tensor]) -> None:
    """Launches the product of the second derivatives with a tangent of the first operand, by each wanted operand."""
    import torch

    wanted = [w and x.is_floating_point() for x, w in zip(operands, check.gradients_of, strict=True)]
    leaves = [x.detach().requires_grad_(w) for x, w in zip(operands, wanted, strict=True)]
    inputs = [x for x in leaves if x.requires_grad]
    if not leaves[0].requires_grad:
        return
    (gradient,) = torch.autograd.grad(check.ours()(*leaves), leaves[:1], create_graph=True)
    if gradient.requires_grad:
        torch.autograd.grad(gradient, inputs, torch.ones_like(gradient), allow_unused=True)


def launch_cupy(check: Check) -> None:
    """Launches the check with its operands as CuPy arrays."""
    import cupy

    names = [x.name for x in check.loss.operands]
    wanted = [x for x, w in zip(names, check.gradients_of, strict=True) if w]
    arrays = dict(zip(names, [cupy.from_dlpack(x) for x in check.operands()], strict=True))
    options = dict(reduction=check.reduction, dim=check.dim, **check.values)
    value_and_grad(checking.function_for(check.loss), argnums=wanted, **arrays, **options)


def run(losses: Sequence[Loss], device: str) -> int:
    """Launches everything, and waits for each, so that an error appears at its origin; returns the number of checks."""
    import torch

    done = 0
    for loss in losses:
        for check in dict.fromkeys(x for x in selection(loss, device) if x.possible):
            uses = [launch]
            if device == "cuda" and check.layout in LAYOUTS_OF_CUPY and check.dtypes == ("float32",):
                uses.append(launch_cupy)
            for use in uses:
                use(check)
                done += 1
            if device == "cuda":
                torch.cuda.synchronize()
    return done


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loss", nargs="+", choices=list(registry(Loss)), required=True, metavar="NAME")
    losses = [registry(Loss)[x] for x in parser.parse_args().loss]

    import cupy

    warnings.simplefilter("ignore", UserWarning)  # About broadcast operands, which are intended.
    # Each array is its own allocation, so that the byte after it belongs to no other. PYTORCH_NO_CUDA_MEMORY_CACHING
    # disables torch's allocator before this program starts.
    cupy.cuda.set_allocator(None)
    cupy.cuda.set_pinned_memory_allocator(None)
    launches = count_launches()
    done = run(losses, "cuda")
    print(f"smoke: {done} checks, {len(compiler._kernels)} kernels, {launches[0]} launches")
    missing = {(x.name, kind) for x, kind in product(losses, KINDS)} - {
        (x.loss.name, x.kind) for x in compiler._kernels if not isinstance(x.loss, ModifiedLoss)
    }
    if missing:
        print(f"smoke: never launched: {', '.join(map(' '.join, sorted(missing)))}")
    return 1 if missing else 0


def count_launches() -> list[int]:
    """Counts all launches from now on, in a list of one number."""
    count, launch = [0], compiler.Launcher.launch

    def counted(self: compiler.Launcher, *arguments: Any) -> None:
        count[0] += 1
        launch(self, *arguments)

    compiler.Launcher.launch = counted  # type: ignore[method-assign]
    return count


if __name__ == "__main__":
    sys.exit(main())

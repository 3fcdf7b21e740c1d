"""Two processes train a small model, by DistributedDataParallel and by FSDP2, and compute losses of rows of DTensors.
test_distributed.py runs them.

python distributed_training.py LOSSES BACKEND    with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import cupylosses.functional as F
from cupylosses.definition.registry import registry
from cupylosses.engines.pointwise.definition import Loss
from cupylosses.testing import host, samples
from cupylosses.testing.check import by_position

ROWS, COLUMNS, STEPS = 8, 6, 3


def batch(loss: Loss, step: int, device: str) -> list[Tensor]:
    """Operands of one step, equal in every process; the model adds to the first of them."""
    count = len(loss.operands)
    shapes = [(ROWS, COLUMNS)] * count
    return samples.operands(loss, loss.values(), ("float32",) * count, shapes, device, seed=step)


class Model(nn.Module):
    """Moves the first operand a little, within its domain."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Linear(COLUMNS, COLUMNS)
        self.rest = nn.Linear(COLUMNS, COLUMNS)

    def forward(self, x: Tensor) -> Tensor:
        return x * (1 - 0.1 * torch.sigmoid(self.rest(torch.tanh(self.scale(x.detach().nan_to_num(0, 0, 0))))))


def train(
    loss: Loss, model: nn.Module, part: slice, device: str, function: Callable[..., Tensor]
) -> tuple[list[float], list[Tensor]]:
    """Losses and last gradients of a few steps on the rows of this process."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    values = []
    for step in range(STEPS):
        optimizer.zero_grad()
        first, *others = (x[part] for x in batch(loss, step, device))
        value = function(model(first), *others)
        value.backward()
        optimizer.step()
        values.append(value.item())
    gradients = [x.grad for x in model.parameters() if x.grad is not None]
    return values, [g.full_tensor() if isinstance(g, DTensor) else g for g in gradients]


def make(device: str) -> Model:
    """Builds the model, with equal parameters in every process."""
    torch.manual_seed(0)
    return Model().to(device)


def compare_rows(mesh: DeviceMesh, device: str) -> None:
    """Compares losses of rows of DTensors with those of plain tensors; the batch is no multiple of the processes."""
    generator = torch.Generator().manual_seed(0)
    logits, soft = torch.randn(2, 7, 5, generator=generator)
    labels, weight = torch.randint(5, (7,), generator=generator), torch.rand(5, generator=generator)
    labels[2] = -100

    def sharded(x: Tensor, dim: int = 0) -> DTensor:
        return distribute_tensor(x.to(device), mesh, [Shard(dim)])

    whole = distribute_tensor(weight.to(device), mesh, [Replicate()])
    cases: list[tuple[Callable[..., Tensor], Tensor, Tensor, dict[str, Tensor], dict[str, Tensor]]] = [
        (F.cross_entropy, logits, labels, {}, {}),
        (F.cross_entropy, logits, labels, {"weight": weight}, {"weight": whole}),
        (F.cross_entropy, logits, soft.softmax(1), {}, {}),
        (F.nll_loss, logits.log_softmax(1), labels, {"weight": weight}, {"weight": weight.to(device)}),
        (F.distillation_loss, logits, soft, {}, {}),
    ]
    for function, first, second, given, placed in cases:
        for reduction in ("mean", "none"):
            x, y = first.clone().requires_grad_(), sharded(first).requires_grad_()
            expected = function(x, second, **given, reduction=reduction)
            found = function(y, sharded(second), **placed, reduction=reduction)
            expected.sum().backward()
            found.sum().backward()
            name = f"{function.__name__} of DTensors, {reduction}"
            for a, b in ((found, expected), (y.grad, x.grad)):
                torch.testing.assert_close(a.full_tensor().cpu(), b, msg=f"{name}: {a} is not {b}")
            assert y.grad.placements == y.placements, name
    wrong = labels.clone()
    wrong[5] = 9
    try:
        F.cross_entropy(sharded(logits), sharded(wrong), check_targets="sync")
    except IndexError as error:
        assert "`target[5]`" in str(error) and "got 9" in str(error)
    else:
        raise AssertionError("every process raises for a label of one")


def main(names: list[str], backend: str) -> None:
    """Runs in both processes; the first one reports."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = f"cuda:{rank}" if backend == "nccl" else "cpu"
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(backend)
    mesh = init_device_mesh(device.partition(":")[0], (size,))
    rows = ROWS // size
    mine = slice(rank * rows, (rank + 1) * rows)
    for name in names:
        loss = registry(Loss)[name]
        function = by_position(loss)
        # One process with the whole batch: the mean of the means of equal parts.
        _, expected = train(loss, make(device), slice(None), device, function)
        models = {
            "DDP": DistributedDataParallel(make(device), device_ids=[rank] if backend == "nccl" else None),
            "FSDP2": fully_shard(make(device), mesh=mesh),
        }
        for kind, model in models.items():
            _, found = train(loss, model, mine, device, function)
            for a, b in zip(found, expected, strict=True):
                torch.testing.assert_close(a, b, rtol=2e-4, atol=1e-6, msg=f"{name}, {kind}: {a} is not {b}")
        if rank == 0:
            print(f"{name}: DDP and FSDP2 agree with one process", flush=True)
    compare_rows(mesh, device)
    if rank == 0:
        print("losses of rows of DTensors agree with plain tensors", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    with nullcontext() if sys.argv[2] == "nccl" else host.execution():
        main(sys.argv[1].split(","), sys.argv[2])

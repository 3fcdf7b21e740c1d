"""Two processes train a small model, by DistributedDataParallel and by FSDP2; run by test_distributed.py.

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
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from cupylosses.definition import Loss, registry
from cupylosses.testing import host, samples
from cupylosses.testing.check import by_position

ROWS, COLUMNS, STEPS = 8, 6, 3


def batch(loss: Loss, step: int, device: str) -> list[Tensor]:
    """Operands of one step, the same in every process; the model adds to the first of them."""
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
    """The same parameters in every process."""
    torch.manual_seed(0)
    return Model().to(device)


def main(names: list[str], backend: str) -> None:
    """Both processes come here; the first one reports."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = f"cuda:{rank}" if backend == "nccl" else "cpu"
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(backend)
    mesh = init_device_mesh(device.partition(":")[0], (size,))
    rows = ROWS // size
    mine = slice(rank * rows, (rank + 1) * rows)
    for name in names:
        loss = registry()[name]
        function = by_position(loss)
        # One process with the whole batch: the mean of the means of parts of equal size.
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
    dist.destroy_process_group()


if __name__ == "__main__":
    with nullcontext() if sys.argv[2] == "nccl" else host.execution():
        main(sys.argv[1].split(","), sys.argv[2])

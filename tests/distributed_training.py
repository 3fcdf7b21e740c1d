"""Training in two processes, by DistributedDataParallel and FSDP2, and losses of rows of DTensors.

test_distributed.py runs this program:

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
    """Returns the operands of one step, equal in every process; the model changes the first of them."""
    count = len(loss.operands)
    shapes = [(ROWS, COLUMNS)] * count
    return samples.operands(loss, loss.values(), ("float32",) * count, shapes, device, seed=step)


class Model(nn.Module):
    """Changes the first operand slightly, within its domain."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Linear(COLUMNS, COLUMNS)
        self.rest = nn.Linear(COLUMNS, COLUMNS)

    def forward(self, x: Tensor) -> Tensor:
        return x * (1 - 0.1 * torch.sigmoid(self.rest(torch.tanh(self.scale(x.detach().nan_to_num(0, 0, 0))))))


def train(
    loss: Loss, model: nn.Module, part: slice, device: str, function: Callable[..., Tensor]
) -> tuple[list[float], list[Tensor]]:
    """Returns the losses of a few steps, and the last gradients, on the rows of this process."""
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
    """Compares losses of rows of DTensors with those of plain tensors.

    The number of rows is not a multiple of the number of processes.
    """
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


class LanguageModel(nn.Module):
    """A layer, and a linear head whose weight only the loss reads."""

    def __init__(self, function: Callable[..., Tensor], **options: object) -> None:
        super().__init__()
        self.trunk, self.head = nn.Linear(COLUMNS, COLUMNS), nn.Linear(COLUMNS, 40)
        self.function, self.options = function, options

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden, head = torch.tanh(self.trunk(x)), self.head
        return self.function(hidden, head.weight, y, linear_bias=head.bias, max_memory=3 * 48 * 4, **self.options)


def log_probs(*operands: Tensor, **options: object) -> Tensor:
    """Returns a loss of the log-probabilities of a linear layer's output."""
    return -F.linear_token_log_probs(*operands, **options).mean()


def language_model(function: Callable[..., Tensor], device: str, **options: object) -> LanguageModel:
    """Builds the model, with equal parameters in every process."""
    torch.manual_seed(0)
    return LanguageModel(function, **options).to(device)


def tokens(device: str) -> tuple[Tensor, Tensor]:
    """Returns features and labels of the whole batch."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(ROWS, COLUMNS, generator=generator), torch.randint(40, (ROWS,), generator=generator)
    return x.to(device), y.to(device)


def compare_layers(mesh: DeviceMesh, device: str, mine: slice) -> None:
    """Compares losses of a linear layer, in models of DDP and FSDP2, with those of one process.

    In FSDP2 the weight is gathered before the model runs, or is the DTensor of a head that is sharded on its own.
    """
    x, y = tokens(device)
    for function in (F.linear_cross_entropy, log_probs):
        expected = language_model(function, device)
        expected(x, y).backward()
        apart = language_model(function, device)
        fully_shard(apart.head, mesh=mesh)
        models = {
            "DDP": DistributedDataParallel(language_model(function, device)),
            "FSDP2": fully_shard(language_model(function, device), mesh=mesh),
            "FSDP2 of the head": fully_shard(apart, mesh=mesh),
        }
        for kind, model in models.items():
            model(x[mine], y[mine]).backward()
            for (name, a), b in zip(model.named_parameters(), expected.parameters(), strict=True):
                assert a.grad is not None, f"{function.__name__}, {kind}: no gradient of {name}"
                found = a.grad.full_tensor() if isinstance(a.grad, DTensor) else a.grad
                message = f"{function.__name__}, {kind}, {name}: {found} is not {b.grad}"
                torch.testing.assert_close(found, b.grad, rtol=2e-4, atol=1e-6, msg=message)


def compare_main_grads(device: str, mine: slice) -> None:
    """Trains with a `main_grad` under DDP.

    DDP reduces every other gradient but not this one, and gives the weight a gradient of 0 unless it looks for unused
    parameters or is told to ignore the weight. Reduced afterwards, the `main_grad` is that of one process.
    """
    x, y = tokens(device)
    for function in (F.linear_cross_entropy, log_probs):
        expected = language_model(function, device)
        expected(x, y).backward()
        alone = language_model(function, device)
        alone(x[mine], y[mine]).backward()
        whole, own = expected.head.weight.grad, alone.head.weight.grad
        for ignored, find in (([], False), ([], True), (["head.weight"], False)):
            main_grad = torch.zeros_like(whole)
            model = language_model(function, device, main_grad=main_grad)
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
            parallel = DistributedDataParallel(model, find_unused_parameters=find)
            # The second forward would fail if a bucket waited for the weight's gradient.
            for step in range(1, 3):
                model.zero_grad()
                parallel(x[mine], y[mine]).backward()
                torch.testing.assert_close(main_grad, step * own, rtol=2e-4, atol=1e-6)
            weight = model.head.weight.grad
            assert weight is None if ignored or find else not weight.any(), f"{function.__name__}: {weight}"
            for a, b in zip(model.parameters(), expected.parameters(), strict=True):
                if a is not model.head.weight:
                    torch.testing.assert_close(a.grad, b.grad, rtol=2e-4, atol=1e-6)
            dist.all_reduce(main_grad)
            main_grad /= 2 * dist.get_world_size()
            torch.testing.assert_close(main_grad, whole, rtol=2e-4, atol=1e-6)


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
        # Expected: one process with the whole batch, whose mean is the mean of the means of equal parts.
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
    compare_layers(mesh, device, mine)
    compare_main_grads(device, mine)
    if rank == 0:
        print("losses of a linear layer agree with one process", flush=True)
        print("a main_grad that is reduced apart agrees with one process", flush=True)
        print("losses of rows of DTensors agree with plain tensors", flush=True)
    dist.barrier()  # The first process hosts the store, which others may still need.
    dist.destroy_process_group()


if __name__ == "__main__":
    with nullcontext() if sys.argv[2] == "nccl" else host.execution():
        main(sys.argv[1].split(","), sys.argv[2])
    # A thread of torch may be alive when torch's destructors run, which then terminate the process with an error.
    sys.stdout.flush()
    os._exit(0)

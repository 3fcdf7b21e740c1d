#!/usr/bin/env python3
"""Train a small U-Net twice from one seed, with a dice and cross entropy loss of plain PyTorch and with
`dice_ce_loss`, and compare.

    python examples/train_segmentation.py                    on a GPU about a minute; on the CPU smaller, a minute too
    python examples/train_segmentation.py --plot curve.png   draws curves, memory, time and a slice of a prediction

The volumes are synthetic: ellipsoids and boxes in four modalities, in each of which half of the classes stand out from
the background by less than the noise. All runs see the same batches and start from the same parameters, and gradients
of both losses are as near to the exact ones. Yet training amplifies rounding. A third run, of PyTorch again, with
initial parameters that differ in the last bit, shows how far apart runs of one loss end.
"""

from __future__ import annotations

import argparse
import csv
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch
from torch import Tensor, nn
from torch.nn import functional as T

import cupylosses.functional as F

Loss = Callable[[Tensor, Tensor], Tensor]


def eager(logits: Tensor, labels: Tensor) -> Tensor:
    """Softmax, one-hot labels, their overlap in each class of each volume, and torch's cross entropy."""
    logits, labels = logits.float(), labels.long()
    probabilities = logits.softmax(1)
    target = T.one_hot(labels, logits.shape[1]).movedim(-1, 1).to(probabilities.dtype)
    axes = tuple(range(2, logits.dim()))
    overlap = (probabilities * target).sum(axes)
    total = probabilities.sum(axes) + target.sum(axes)
    dice = 1 - (2 * overlap + 1e-5) / (total + 1e-5)
    return dice.mean() + T.cross_entropy(logits, labels)


def fused(logits: Tensor, labels: Tensor) -> Tensor:
    """The loss as one function: logits are read twice, and labels as the bytes that they are. Its value is a float32,
    as that of PyTorch under autocast.
    """
    return F.dice_ce_loss(logits, labels, preset="monai", out_dtype="float32")


@dataclass(frozen=True)
class Size:
    """Sizes of the volumes, of the model and of a batch."""

    edge: int
    classes: int
    widths: tuple[int, ...]
    volumes: int
    batch: int
    steps: int


GPU = Size(edge=128, classes=16, widths=(16, 32, 64, 128), volumes=32, batch=2, steps=120)
CPU = Size(edge=24, classes=5, widths=(8, 16, 32), volumes=32, batch=2, steps=60)

#: The names of the runs.
EAGER, FUSED, PERTURBED = "PyTorch", "cupylosses", "PyTorch, perturbed"

#: A class stands out in the modalities that are the bits of its label.
MODALITIES = 4
#: Standard deviation of the noise, where the contrast is 1.
NOISE = 1.2
#: Volumes behind those of the training, to judge the networks by.
UNSEEN = 2


@dataclass(frozen=True)
class Volumes:
    """Images (volume, modality, depth, height, width), and labels without the second dimension, one byte each."""

    images: Tensor
    labels: Tensor


def draw(size: Size, device: torch.device) -> Volumes:
    """Volumes with two shapes of each class but 0, which is the background. Later shapes cover earlier ones."""
    generator = torch.Generator().manual_seed(0)
    steps = torch.arange(size.edge, device=device) / size.edge
    place = torch.stack(torch.meshgrid(steps, steps, steps, indexing="ij"))
    labels = torch.zeros((size.volumes + UNSEEN, *place.shape[1:]), dtype=torch.uint8, device=device)
    for volume in labels:
        for number in torch.randperm(2 * (size.classes - 1), generator=generator).tolist():
            label = 1 + number // 2
            center, radius = torch.rand((2, 3, 1, 1, 1), generator=generator).to(device)
            distance = (place - center).abs() / (0.08 + 0.14 * radius)
            inside = distance.square().sum(0) < 1 if label % 2 else distance.amax(0) < 0.8
            volume[inside] = label
    images = NOISE * torch.randn((len(labels), MODALITIES, *place.shape[1:]), generator=generator).to(device)
    for bit in range(MODALITIES):
        images[:, bit] += labels >> bit & 1
    return Volumes(images, labels)


class Convolutions(nn.Sequential):
    """Two convolutions, each with a normalization behind it. The first may halve the resolution."""

    def __init__(self, inputs: int, width: int, stride: int = 1) -> None:
        layers: list[nn.Module] = []
        for channels, step in ((inputs, stride), (width, 1)):
            layers += [nn.Conv3d(channels, width, 3, step, 1, bias=False), nn.InstanceNorm3d(width, affine=True)]
            layers += [nn.LeakyReLU(0.01)]
        super().__init__(*layers)


class UNet(nn.Module):
    """An encoder that halves the resolution at each level, and a decoder that sees the encoder's levels."""

    def __init__(self, classes: int, widths: tuple[int, ...]) -> None:
        super().__init__()
        first, *deeper = widths
        pairs = list(zip(widths, deeper))
        self.first = Convolutions(MODALITIES, first)
        self.down = nn.ModuleList([Convolutions(a, b, 2) for a, b in pairs])
        self.up = nn.ModuleList([nn.ConvTranspose3d(b, a, 2, 2) for a, b in reversed(pairs)])
        self.merge = nn.ModuleList([Convolutions(2 * a, a) for a, _ in reversed(pairs)])
        self.head = nn.Conv3d(first, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of the classes."""
        levels = [self.first(x)]
        for down in self.down:
            levels.append(down(levels[-1]))
        x = levels.pop()
        for up, merge in zip(self.up, self.merge):
            x = merge(torch.cat((up(x), levels.pop()), 1))
        return self.head(x)


@dataclass
class Run:
    """The losses of a training run, the mean time of a step in ms, the time of its loss and the loss's gradient alone,
    the peak memory beyond the data in MiB (0 on a CPU), the mean dice score of the unseen volumes, and the prediction
    of the last.
    """

    losses: list[float]
    step: float
    alone: float
    memory: float
    score: float
    prediction: Tensor


def arithmetic(device: torch.device) -> AbstractContextManager[object]:
    """Convolutions in 16 bits on a GPU."""
    return torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else nullcontext()


def train(loss: Loss, size: Size, volumes: Volumes, perturbed: bool = False) -> Run:
    """Trains a fresh model, whose initial parameters may be perturbed in their last bit."""
    torch.manual_seed(0)
    device = volumes.images.device
    data = 0
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        data = torch.cuda.memory_allocated()
    model = UNet(size.classes, size.widths).to(device)
    if perturbed:
        with torch.no_grad():
            for x in model.parameters():
                x.mul_(1 + torch.finfo(x.dtype).eps)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, size.steps)
    generator = torch.Generator().manual_seed(1)
    losses: list[Tensor] = []
    timed = size.steps // 4  # the steps behind it
    begin = 0.0
    for step in range(size.steps):
        if step == timed:
            synchronize(device)
            begin = time.perf_counter()
        chosen = torch.randint(size.volumes, (size.batch,), generator=generator).to(device)
        with arithmetic(device):
            logits = model(volumes.images[chosen])
        value = loss(logits, volumes.labels[chosen])
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        scheduler.step()
        losses.append(value.detach())
    synchronize(device)
    each = 1e3 * (time.perf_counter() - begin) / (size.steps - timed)
    memory = (torch.cuda.max_memory_allocated() - data) / 2**20 if device.type == "cuda" else 0.0
    alone = time_of(loss, logits.detach().requires_grad_(), volumes.labels[chosen])
    predictions = predict(model, volumes.images[-UNSEEN:])
    score = dice_score(predictions, volumes.labels[-UNSEEN:], size.classes)
    return Run(torch.stack(losses).tolist(), each, alone, memory, score, predictions[-1].cpu())


def time_of(loss: Loss, logits: Tensor, labels: Tensor) -> float:
    """Median time of the loss and its gradient, in ms."""
    times = []
    for _ in range(15):
        logits.grad = None
        synchronize(logits.device)
        begin = time.perf_counter()
        loss(logits, labels).backward()
        synchronize(logits.device)
        times.append(1e3 * (time.perf_counter() - begin))
    return median(times)


@torch.no_grad()
def predict(model: nn.Module, images: Tensor) -> Tensor:
    """The likeliest class of each voxel, one volume at a time."""
    with arithmetic(images.device):
        return torch.stack([model(x[None])[0].argmax(0) for x in images])


def dice_score(predictions: Tensor, labels: Tensor, classes: int) -> float:
    """Mean dice of the classes but the background, over those that occur."""
    scores = []
    for label in range(1, classes):
        found, right = predictions == label, labels == label
        if right.any():
            scores.append(2 * (found & right).sum() / (found.sum() + right.sum()))
    return torch.stack(scores).mean().item()


def synchronize(device: torch.device) -> None:
    """Waits for the GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def plot(runs: dict[str, Run], volumes: Volumes, path: Path) -> None:
    """Draws the curves, bars of memory and time, and the middle slice of the last volume."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    gpu = any(x.memory for x in runs.values())
    panels = {"curves": 3.0, **({"memory": 1.0} if gpu else {}), "step": 1.0, "alone": 1.0}
    panels |= {"image": 1.5, "labels": 1.5, "prediction": 1.5}
    figure, axes = pyplot.subplot_mosaic([list(panels)], figsize=(16, 3.2), width_ratios=list(panels.values()))
    for (name, run), style, color in zip(runs.items(), ("-", "--", ":"), ("C0", "C1", "C0")):
        axes["curves"].plot(run.losses, style, color=color, label=name, linewidth=2)
    axes["curves"].set(xlabel="step", ylabel="dice + cross entropy", title="Loss, from one seed")
    axes["curves"].legend()
    compared = [runs[x] for x in (EAGER, FUSED)]
    bars = {
        "memory": ("Peak memory, GiB", [x.memory / 1024 for x in compared]),
        "step": ("Step, ms", [x.step for x in compared]),
        "alone": ("Its loss, ms", [x.alone for x in compared]),
    }
    for name in panels.keys() & bars.keys():
        title, heights = bars[name]
        axes[name].bar(["eager", "fused"], heights, color=["C0", "C1"])
        axes[name].set_title(title)
    middle = len(volumes.labels[-1]) // 2
    labels = volumes.labels[-1, middle].cpu()
    highest = int(volumes.labels.max())
    axes["image"].imshow(volumes.images[-1, :, middle].mean(0).cpu(), cmap="gray")
    axes["labels"].imshow(labels, cmap="nipy_spectral", vmin=0, vmax=highest, interpolation="nearest")
    prediction = runs[FUSED].prediction[middle]
    axes["prediction"].imshow(prediction, cmap="nipy_spectral", vmin=0, vmax=highest, interpolation="nearest")
    for name, title in (("image", "Unseen volume"), ("labels", "Its labels"), ("prediction", "Prediction")):
        axes[name].set(title=title, xticks=[], yticks=[])
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def write(runs: dict[str, Run], path: Path) -> None:
    """Writes the summary of each run and its losses, a row for each run."""
    with path.open("w", encoding="utf-8", newline="") as out:
        rows = csv.writer(out)
        rows.writerow(["run", "step_ms", "loss_ms", "peak_mib", "dice_score", "losses"])
        for name, run in runs.items():
            losses = " ".join(f"{x:.6g}" for x in run.losses)
            times = f"{run.step:.2f}", f"{run.alone:.3f}"
            rows.writerow([name, *times, f"{run.memory:.0f}", f"{run.score:.4f}", losses])


def main() -> int:
    """Trains three times, prints a table, and returns 1 if curves part before training could have amplified rounding,
    or if predictions differ in quality.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    size = GPU if device.type == "cuda" else CPU
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=size.steps)
    parser.add_argument("--edge", type=int, default=size.edge, help="voxels along each edge of a volume")
    parser.add_argument("--classes", type=int, default=size.classes, help="with the background")
    parser.add_argument("--plot", type=Path, metavar="FILE")
    parser.add_argument("--csv", type=Path, metavar="FILE")
    options = parser.parse_args()
    changed = {"steps": options.steps, "edge": options.edge, "classes": options.classes}
    size = Size(**{**vars(size), **changed})
    volumes = draw(size, device)
    for loss in (eager, fused):  # kernels are compiled, and libraries loaded
        train(loss, Size(**{**vars(size), "steps": 2}), volumes)
    runs = {EAGER: train(eager, size, volumes), FUSED: train(fused, size, volumes)}
    runs[PERTURBED] = train(eager, size, volumes, perturbed=True)
    print(f"{size.steps} steps of {size.batch} x {size.edge}³ voxels, {size.classes} classes, on {device.type}")
    for name, run in runs.items():
        memory = f", {run.memory:.0f} MiB at most" if run.memory else ""
        curve = f"loss {run.losses[0]:.3f} to {run.losses[-1]:.3f}, dice score {run.score:.3f} of unseen volumes"
        print(f"{name:>18}: {curve}, {run.step:.1f} ms per step, of which the loss {run.alone:.2f}{memory}")
    quarter = max(1, size.steps // 4)
    early = {x: apart(runs[EAGER].losses[:quarter], runs[x].losses[:quarter]) for x in (FUSED, PERTURBED)}
    print(f"Apart from {EAGER}, at most in the first quarter and in all, and the mean of the last quarter:")
    for name, run in runs.items():
        far = f"{early[name]:.2%}, {apart(runs[EAGER].losses, run.losses):.2%}, " if name != EAGER else ""
        print(f"{name:>18}: {far}{mean(run.losses[-quarter:]):.4f}")
    if options.plot:
        plot(runs, volumes, options.plot)
    if options.csv:
        write(runs, options.csv)
    scores = abs(runs[EAGER].score - runs[FUSED].score)
    return int(early[FUSED] > 0.01 + 2 * early[PERTURBED] or scores > 0.05)


def apart(first: list[float], second: list[float]) -> float:
    """The largest relative difference of two curves."""
    return max(abs(a - b) / a for a, b in zip(first, second))


if __name__ == "__main__":
    sys.exit(main())

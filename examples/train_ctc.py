#!/usr/bin/env python3
"""Train a small reader of digits twice from one seed, with the CTC loss of PyTorch and with `ctc_loss_with_logits`.

    python examples/train_ctc.py                        on a GPU a minute; without one a smaller task on the CPU
    python examples/train_ctc.py --plot alignment.png   draws the loss curves, step times, and an alignment

A strip shows digits of different widths, heights and distances, under noise; the labels say which digits, not where.
Both runs see the same strips and start from the same parameters, so their curves differ by rounding alone until that
has grown: training is chaotic. Afterwards `ctc_forced_alignment` says in which frames the second model sees each digit.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as T

import cupylosses.functional as F

#: Class of the blank; digit d is class d + 1.
BLANK = 0
CLASSES = 11

#: The digits as seven rows of five pixels, a bit each.
FONT = (
    (14, 17, 19, 21, 25, 17, 14),
    (4, 12, 4, 4, 4, 4, 14),
    (14, 17, 1, 2, 4, 8, 31),
    (31, 2, 4, 2, 1, 17, 14),
    (2, 6, 10, 18, 31, 2, 2),
    (31, 16, 30, 1, 1, 17, 14),
    (6, 8, 16, 30, 17, 17, 14),
    (31, 1, 2, 4, 8, 8, 8),
    (14, 17, 17, 14, 17, 17, 14),
    (14, 17, 17, 15, 1, 2, 12),
)


@dataclass(frozen=True)
class Size:
    """Sizes of the strips, of a batch, and of the model, and the number of steps."""

    digits: int
    width: int
    height: int
    batch: int
    channels: int
    hidden: int
    steps: int


GPU = Size(digits=40, width=512, height=16, batch=64, channels=32, hidden=256, steps=400)
CPU = Size(digits=6, width=96, height=12, batch=16, channels=16, hidden=64, steps=400)

#: The largest learning rate of a run.
RATE = 1e-2

#: Logits, targets, lengths of frames and of targets to the loss.
Loss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def eager(logits: Tensor, targets: Tensor, frames: Tensor, lengths: Tensor) -> Tensor:
    """A log-softmax, and PyTorch's loss."""
    return T.ctc_loss(logits.log_softmax(-1), targets, frames, lengths, BLANK)


def fused(logits: Tensor, targets: Tensor, frames: Tensor, lengths: Tensor) -> Tensor:
    """The loss of the logits."""
    return F.ctc_loss_with_logits(logits, targets, frames, lengths, BLANK)


class Strips:
    """Batches of strips, one after another from a seed."""

    def __init__(self, size: Size, seed: int, device: torch.device) -> None:
        self.size, self.device = size, device
        self.random = random.Random(seed)
        self.generator = torch.Generator(device).manual_seed(seed)
        rows = torch.tensor(FONT)
        self.glyphs = (rows[..., None] >> torch.arange(4, -1, -1) & 1).float()[:, None]
        self.stretched: dict[tuple[int, int], np.ndarray] = {}

    def _draw(self, strip: np.ndarray) -> tuple[int, list[int]]:
        """Draws a strip without noise; returns its width and its digits: as many as fit, if not fewer are drawn."""
        size, number, digits = self.size, self.random.randint, []
        end, x = size.width - number(0, size.width // 2), number(1, 6)
        while len(digits) < size.digits:
            digit, wide, high = number(0, 9), number(5, 9), number(8, size.height - 1)
            if x + wide >= end:
                break
            if (high, wide) not in self.stretched:
                self.stretched[high, wide] = T.interpolate(self.glyphs, (high, wide), mode="bilinear")[:, 0].numpy()
            top = number(0, size.height - high)
            strip[top : top + high, x : x + wide] = self.stretched[high, wide][digit]
            digits.append(digit)
            x += wide + number(1, 5)
        return x + 2, digits

    def batch(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Strips (N, 1, height, width), labels (N, S), and the lengths of both, in frames of two columns."""
        size = self.size
        strips = np.zeros((size.batch, 1, size.height, size.width), np.float32)
        labels = np.zeros((size.batch, size.digits), np.int64)
        frames, lengths = np.zeros(size.batch, np.int64), np.zeros(size.batch, np.int64)
        for n in range(size.batch):
            width, digits = self._draw(strips[n, 0])
            labels[n, : len(digits)] = np.array(digits) + 1
            frames[n], lengths[n] = -(-min(width, size.width) // 2), len(digits)
        images, *others = [torch.from_numpy(x).to(self.device) for x in (strips, labels, frames, lengths)]
        images += 0.3 * torch.randn(images.shape, generator=self.generator, device=self.device)
        return images, others[0], others[1], others[2]


class Reader(nn.Module):
    """Convolutions over a strip, then along it, and logits per frame."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        wide, hidden = size.channels, size.hidden
        self.look = nn.Sequential(
            nn.Conv2d(1, wide, 3, stride=2, padding=1), nn.BatchNorm2d(wide), nn.ReLU(),
            nn.Conv2d(wide, 2 * wide, 3, stride=(2, 1), padding=1), nn.BatchNorm2d(2 * wide), nn.ReLU(),
        )  # fmt: skip
        self.read = nn.Sequential(
            nn.Conv1d(2 * wide * (size.height // 4), hidden, 3, padding=1), nn.BatchNorm1d(hidden), nn.ReLU(),
            nn.Conv1d(hidden, hidden, 3, padding=1), nn.BatchNorm1d(hidden), nn.ReLU(),
            nn.Conv1d(hidden, CLASSES, 1),
        )  # fmt: skip

    def forward(self, strips: Tensor) -> Tensor:
        """Logits of shape (T, N, classes)."""
        return self.read(self.look(strips).flatten(1, 2)).permute(2, 0, 1)


@dataclass
class Run:
    """The losses of a training run, the mean time of a step and of its loss in ms, the fraction of strips that are read
    without a mistake, and the model.
    """

    losses: list[float]
    step: float
    of_loss: float
    right: float
    model: Reader


class Clock:
    """Sums of times between calls, of the GPU if there is one."""

    def __init__(self, device: torch.device) -> None:
        self.is_gpu = device.type == "cuda"
        self.pairs: list[tuple[object, object]] = []

    def now(self) -> object:
        """The time, or an event of the GPU that will know it."""
        if not self.is_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def mean(self) -> float:
        """The mean time between the pairs, in ms."""
        if self.is_gpu:
            torch.cuda.synchronize()
        times = [a.elapsed_time(b) if self.is_gpu else 1e3 * (b - a) for a, b in self.pairs]
        return sum(times) / max(1, len(times))


def decoded(logits: Tensor, frames: Tensor) -> list[list[int]]:
    """The labels of the most likely class of each frame: repeats are one, blanks none."""
    found = []
    for path, length in zip(logits.argmax(-1).T.tolist(), frames.tolist(), strict=True):
        kept = path[:length]
        found.append([c for t, c in enumerate(kept) if c != BLANK and (t == 0 or c != kept[t - 1])])
    return found


def accuracy(model: Reader, size: Size, device: torch.device, batches: int = 4) -> float:
    """The fraction of new strips that are read without a mistake."""
    strips, right = Strips(size, 2, device), 0
    model.eval()
    with torch.no_grad():
        for _ in range(batches):
            images, labels, frames, lengths = strips.batch()
            expected = [x[:n] for x, n in zip(labels.tolist(), lengths.tolist(), strict=True)]
            right += sum(a == b for a, b in zip(decoded(model(images), frames), expected, strict=True))
    return right / (batches * size.batch)


def train(loss: Loss, size: Size, device: torch.device, batches: list[tuple[Tensor, ...]]) -> Run:
    """Trains a fresh model on these batches."""
    torch.manual_seed(0)
    model = Reader(size).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=max(2, len(batches)))
    steps, of_loss = Clock(device), Clock(device)
    losses: list[Tensor] = []
    for images, labels, frames, lengths in batches:
        begin = steps.now()
        logits = model(images)
        # The loss is timed apart, with its own backward, and the model's goes on from there.
        leaf = logits.detach().requires_grad_()
        between = of_loss.now()
        value = loss(leaf, labels, frames, lengths)
        value.backward()
        of_loss.pairs.append((between, of_loss.now()))
        optimizer.zero_grad()
        logits.backward(leaf.grad)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        steps.pairs.append((begin, steps.now()))
        losses.append(value.detach())
    behind = len(batches) // 4
    steps.pairs, of_loss.pairs = steps.pairs[behind:], of_loss.pairs[behind:]
    return Run(torch.stack(losses).tolist(), steps.mean(), of_loss.mean(), accuracy(model, size, device), model)


def plot(runs: dict[str, Run], size: Size, device: torch.device, path: Path) -> None:
    """Draws the curves, bars of times, and a strip with the frames in which the model sees its digits."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    images, labels, frames, lengths = Strips(replace(size, batch=1), 3, device).batch()
    with torch.no_grad():
        log_probs = runs["cupylosses"].model(images).log_softmax(-1)
    found = F.ctc_forced_alignment(log_probs, labels, frames, lengths, BLANK)
    figure, axes = pyplot.subplot_mosaic(
        [["curve", "time"], ["strip", "strip"]], figsize=(11, 5.6), width_ratios=(4, 1)
    )
    for (name, run), style in zip(runs.items(), ("-", "--"), strict=True):
        axes["curve"].plot(run.losses, style, label=name, linewidth=1.5)
    axes["curve"].set(xlabel="step", ylabel="loss", title="Loss, from one seed")
    axes["curve"].legend()
    axes["time"].bar(["PyTorch", "cupylosses"], [x.of_loss for x in runs.values()], color=["C0", "C1"])
    axes["time"].set_title("Loss, ms")
    axes["strip"].imshow(images[0, 0].cpu(), cmap="gray_r", aspect="auto")
    positions = found.positions[:, 0].tolist()
    for j in range(int(lengths[0])):
        seen = [t for t, x in enumerate(positions) if x == j]
        axes["strip"].axvspan(2 * seen[0] - 0.5, 2 * seen[-1] + 1.5, color=f"C{j % 10}", alpha=0.35)
        axes["strip"].text(seen[0] + seen[-1], -1, str(int(labels[0, j]) - 1), ha="center", va="bottom")
    axes["strip"].set(xlim=(0, 2 * int(frames[0])), xlabel="column", yticks=[])
    axes["strip"].set_title("Frames of each digit on the best path", pad=24)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> int:
    """Trains twice, prints a table, and returns 1 if the curves part before rounding can grow, or ours does worse."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    size = GPU if device.type == "cuda" else CPU
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=size.steps)
    parser.add_argument("--plot", type=Path, metavar="FILE")
    options = parser.parse_args()
    size = replace(size, steps=options.steps)
    strips = Strips(size, 1, device)
    batches = [strips.batch() for _ in range(size.steps)]
    train(fused, size, device, batches[:2])  # kernels are compiled, and libraries loaded
    runs = {"PyTorch": train(eager, size, device, batches), "cupylosses": train(fused, size, device, batches)}
    frames = size.width // 2
    print(f"{size.steps} steps of {size.batch} strips, {frames} frames, at most {size.digits} digits, on {device.type}")
    for name, run in runs.items():
        print(
            f"{name:>10}: loss {run.losses[0]:.3f} to {run.losses[-1]:.4f}, {100 * run.right:.1f} % of new strips "
            f"without a mistake, {run.step:.2f} ms per step, of which the loss takes {run.of_loss:.2f} ms"
        )
    first, second = runs.values()
    early = slice(0, min(20, size.steps))
    apart = max(abs(a - b) / a for a, b in zip(first.losses[early], second.losses[early], strict=True))
    print(f"The first {early.stop} losses are at most {100 * apart:.4f} % apart.")
    if options.plot:
        plot(runs, size, device, options.plot)
    return int(apart > 0.01 or second.right < first.right - 0.1)


if __name__ == "__main__":
    sys.exit(main())

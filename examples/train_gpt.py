#!/usr/bin/env python3
"""Train a small GPT twice from one seed, with the loss of eager PyTorch and with `linear_cross_entropy`, and compare.

    python examples/train_gpt.py                    on a GPU about a minute; without one a smaller model on the CPU
    python examples/train_gpt.py --plot curve.png   draws the loss curves, peak memory and step time

The text is this repository's documentation, split into words. Both runs see the same batches and start from the same
parameters, so their curves differ by rounding alone. The vocabulary is padded to `--vocabulary` words: the logits,
which eager PyTorch stores as a whole, are the largest tensor of the step, as in every language model.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch
from torch import Tensor, nn
from torch.nn import functional as T

import cupylosses.functional as F

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def eager(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Logits as a whole, and torch's loss."""
    return T.cross_entropy(T.linear(hidden, weight), labels)


def fused(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Loss of the hidden states, in chunks of logits."""
    return F.linear_cross_entropy(hidden, weight, labels)


@dataclass(frozen=True)
class Size:
    """Sizes of the model and of a batch."""

    layers: int
    width: int
    heads: int
    context: int
    batch: int
    vocabulary: int
    steps: int


GPU = Size(layers=4, width=512, heads=8, context=512, batch=16, vocabulary=50304, steps=300)
CPU = Size(layers=2, width=64, heads=4, context=64, batch=4, vocabulary=4096, steps=40)


class Block(nn.Module):
    """Causal self-attention and a feed-forward network, each behind a normalization."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.feed_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = T.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.feed(self.feed_norm(x))


class GPT(nn.Module):
    """Embeddings, blocks, and a head whose product with the hidden states is left to the loss."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.words = nn.Embedding(size.vocabulary, size.width)
        self.places = nn.Embedding(size.context, size.width)
        self.blocks = nn.Sequential(*[Block(size.width, size.heads) for _ in range(size.layers)])
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)

    def forward(self, words: Tensor) -> Tensor:
        """The hidden states in front of the head."""
        places = torch.arange(words.shape[1], device=words.device)
        return self.norm(self.blocks(self.words(words) + self.places(places)))


def corpus(vocabulary: int) -> Tensor:
    """The documentation as numbers of words; rare ones beyond the vocabulary share the last number."""
    files = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
    words = re.findall(r"\w+|[^\w\s]|\n", "\n".join(x.read_text(encoding="utf-8") for x in files))
    numbers: dict[str, int] = {}
    return torch.tensor([min(numbers.setdefault(x, len(numbers)), vocabulary - 1) for x in words])


@dataclass
class Run:
    """The losses of a training run, the mean time of a step in ms, and the peak memory in MiB (0 on a CPU)."""

    losses: list[float]
    step: float
    memory: float


def train(loss: Loss, size: Size, device: torch.device, dtype: torch.dtype) -> Run:
    """Trains a fresh model."""
    torch.manual_seed(0)
    text = corpus(size.vocabulary)
    model = GPT(size).to(device, dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    generator = torch.Generator().manual_seed(1)
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    losses: list[Tensor] = []
    timed = size.steps // 4  # the steps behind it
    begin = 0.0
    for step in range(size.steps):
        if step == timed:
            synchronize(device)
            begin = time.perf_counter()
        start = torch.randint(len(text) - size.context - 1, (size.batch,), generator=generator)
        batch = torch.stack([text[i : i + size.context + 1] for i in start]).to(device)
        hidden = model(batch[:, :-1]).flatten(0, 1)
        value = loss(hidden, model.head.weight, batch[:, 1:].flatten())
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        losses.append(value.detach())
    synchronize(device)
    each = 1e3 * (time.perf_counter() - begin) / (size.steps - timed)
    memory = torch.cuda.max_memory_allocated() / 2**20 if device.type == "cuda" else 0.0
    return Run(torch.stack(losses).tolist(), each, memory)


def synchronize(device: torch.device) -> None:
    """Waits for the GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def plot(runs: dict[str, Run], path: Path) -> None:
    """Draws the curves, and bars of memory and time."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (curves, memory, step) = pyplot.subplots(1, 3, figsize=(11, 3.4), width_ratios=(3, 1, 1))
    for (name, run), style in zip(runs.items(), ("-", "--"), strict=True):
        curves.plot(run.losses, style, label=name, linewidth=2)
    curves.set(xlabel="step", ylabel="loss", title="Loss, from one seed")
    curves.legend()
    short = ["eager", "fused"]
    memory.bar(short, [x.memory / 1024 for x in runs.values()], color=["C0", "C1"])
    memory.set_title("Peak memory, GiB")
    step.bar(short, [x.step for x in runs.values()], color=["C0", "C1"])
    step.set_title("Step, ms")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> int:
    """Trains twice, prints a table, and returns 1 if the curves part."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    size = GPU if device.type == "cuda" else CPU
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=size.steps)
    parser.add_argument("--vocabulary", type=int, default=size.vocabulary)
    parser.add_argument("--plot", type=Path, metavar="FILE")
    options = parser.parse_args()
    size = Size(**{**vars(size), "steps": options.steps, "vocabulary": options.vocabulary})
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    train(fused, Size(**{**vars(size), "steps": 2}), device, dtype)  # kernels are compiled, and libraries loaded
    runs = {"PyTorch": train(eager, size, device, dtype), "cupylosses": train(fused, size, device, dtype)}
    print(f"{size.steps} steps of {size.batch * size.context} tokens, {size.vocabulary} words, on {device.type}")
    for name, run in runs.items():
        memory = f", {run.memory:.0f} MiB at most" if run.memory else ""
        print(f"{name:>10}: loss {run.losses[0]:.3f} to {run.losses[-1]:.3f}, {run.step:.1f} ms per step{memory}")
    first, second = (x.losses for x in runs.values())
    apart = max(abs(a - b) / a for a, b in zip(first, second, strict=True))
    print(f"The curves are at most {100 * apart:.2f} % apart.")
    if options.plot:
        plot(runs, options.plot)
    return int(apart > 0.05)


if __name__ == "__main__":
    sys.exit(main())

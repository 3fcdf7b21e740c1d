"""Try every transform of torch on every loss, and write the outcomes to docs/transforms.csv.

    python scripts/transforms.py    on the GPU, or on the host without the transforms that need a GPU
    python scripts/generate.py      then updates the table of docs/transforms.md

Exits with 1 if a transform does not work.
"""

from __future__ import annotations

import argparse
import csv
import sys
import warnings
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from functools import partial
from multiprocessing import get_context
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import torch
from tools.transforms import TRANSFORMS, Subject, suits

from cupylosses.definition.registry import registry
from cupylosses.testing import host

RECORD = ROOT / "docs" / "transforms.csv"

#: The device of this run; "host" executes the kernels on the CPU.
WHERE = "GPU" if torch.cuda.is_available() else "host"


def tried(name: str, transforms: list[str]) -> list[tuple[str, str, str, str]]:
    """Rows of a loss: its name, the transform, "GPU" or "host", and "works" or the error."""
    warnings.simplefilter("ignore")
    with nullcontext() if WHERE == "GPU" else host.execution(sanitize=("thread",)):
        return [(name, t, WHERE, outcome) for t, outcome in _outcomes(name, transforms)]


def _outcomes(name: str, transforms: list[str]) -> Iterator[tuple[str, str]]:
    loss = registry()[name]
    for t in TRANSFORMS.values():
        if t.name in transforms and suits(t, loss) and (WHERE == "GPU" or not t.gpu):
            error = t.outcome(Subject(loss, "cuda" if WHERE == "GPU" else "cpu"))
            yield t.name, "works" if error is None else f"{type(error).__name__}: {str(error).splitlines()[:1]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loss", default=",".join(list(registry())), help="names, separated by commas")
    parser.add_argument("--transform", default="", help="a part of the names of those to try")
    parser.add_argument("--workers", type=int, default=1, help="processes")
    parser.add_argument("--out", type=Path, default=RECORD, help="the file to write")
    chosen = parser.parse_args()
    names = chosen.loss.split(",")
    transforms = [x for x in TRANSFORMS if chosen.transform in x]
    # CUDA does not survive a fork once this process has queried the GPU, so workers are spawned.
    with ProcessPoolExecutor(chosen.workers, get_context("spawn")) as pool:
        rows = [row for rows in pool.map(partial(tried, transforms=transforms), names) for row in rows]
    before = []
    if chosen.out.is_file():
        # Rows of the other device, and of losses and transforms not tried here, are kept.
        with chosen.out.open(encoding="utf-8", newline="") as file:
            before = [tuple(x) for x in list(csv.reader(file))[1:]]
    done = {row[:3] for row in rows}
    with chosen.out.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("loss", "transform", "where", "outcome"))
        writer.writerows(sorted([*(x for x in before if x[:3] not in done), *rows]))
    wrong = [x for x in rows if x[3] != "works"]
    for x in wrong:
        print(": ".join(x))
    print(f"{len(rows) - len(wrong)} of {len(rows)} work")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

"""The programs of ``examples/`` run, and training with our loss has the same curve as training with PyTorch's."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"

#: Options of small runs, and patterns of the printed distance between the two curves, in percent.
RUNS = {
    "train_gpt": ("--steps 3 --vocabulary 512", r"at most ([\d.]+) % apart"),
    "train_ctc": ("--steps 3", r"at most ([\d.]+) % apart"),
    "train_segmentation": ("--steps 4 --edge 16", r"cupylosses: [\d.]+%, ([\d.]+)%"),
}


def test_every_example_runs() -> None:
    assert {*RUNS} == {x.stem for x in EXAMPLES.glob("*.py")}


@pytest.mark.programs
@pytest.mark.parametrize("name", RUNS)
def test_curves_of_both_losses_are_the_same(name: str, tmp_path: Path) -> None:
    options, pattern = RUNS[name]
    plot = tmp_path / "plot.png"
    command = [sys.executable, EXAMPLES / f"{name}.py", *options.split(), "--plot", plot]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    distance = re.search(pattern, done.stdout)
    assert distance and float(distance[1]) < 0.1, done.stdout
    assert plot.stat().st_size > 10_000

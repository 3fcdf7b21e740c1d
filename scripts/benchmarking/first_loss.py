"""A process that measures its own first loss, forward and backward, and prints seconds as JSON.

The clock starts after torch and CuPy are imported and both have done something small on the GPU, because every user of
either library pays for that. Usage: ``python -m benchmarking.first_loss LOSS``.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Mapping
from time import perf_counter

import cupy
import torch


def _pair() -> list[torch.Tensor]:
    return [torch.rand(1024, 1024, device="cuda") for _ in range(2)]


def _rows() -> list[torch.Tensor]:
    return [torch.rand(4096, 1000, device="cuda"), torch.arange(4096, device="cuda") % 1000]


#: The measured losses, with functions that make their operands.
OPERANDS: Mapping[str, Callable[[], list[torch.Tensor]]] = {"mse_loss": _pair, "cross_entropy": _rows}


def main(name: str) -> None:
    """Measures the first call of the loss called ``name``, and prints the seconds of each stage."""
    operands = OPERANDS[name]()
    operands[0].requires_grad_()
    cupy.empty(1)
    torch.cuda.synchronize()

    marks = [perf_counter()]
    functional = importlib.import_module("cupylosses.functional")
    marks.append(perf_counter())
    value = getattr(functional, name)(*operands)
    torch.cuda.synchronize()
    marks.append(perf_counter())
    value.backward()
    torch.cuda.synchronize()
    marks.append(perf_counter())

    seconds = {"call_s": marks[-1] - marks[1], "total_s": marks[-1] - marks[0]}
    for stage, begin, end in zip(("import_s", "forward_s", "backward_s"), marks[:-1], marks[1:], strict=True):
        seconds[stage] = end - begin
    print(json.dumps(seconds))


if __name__ == "__main__":
    main(sys.argv[1])

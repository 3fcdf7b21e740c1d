"""Losses in distributed training."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from devices import HOST
from grids import short_or_full
from tools.representatives import representatives

import cupylosses

SCRIPT = Path(__file__).parent / "distributed_training.py"


def run(names: list[str], backend: str) -> str:
    """The output of the first of two processes."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    path = os.pathsep.join([str(Path(cupylosses.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), ",".join(names), backend],
            env={**os.environ, **shared, "PYTHONPATH": path.rstrip(os.pathsep), "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [x.communicate(timeout=300)[0] for x in processes]
    finally:
        for x in processes:
            x.kill()
    assert [x.returncode for x in processes] == [0, 0], "\n".join(outputs)
    return outputs[0]


# Not marked ``kernels``: even with a GPU, its processes run kernels on the host.
@pytest.mark.programs
@pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="torch without gloo")
@pytest.mark.skipif(not HOST, reason="no C++ compiler on Linux")
def test_two_processes_on_the_host() -> None:
    """DistributedDataParallel and FSDP2 over gloo, with losses in host execution."""
    few = min(representatives(), key=lambda x: len(x.operands)), max(representatives(), key=lambda x: len(x.operands))
    names = [x.name for x in short_or_full(few, representatives())]
    printed = run(names, "gloo")
    assert all(f"{name}: DDP and FSDP2 agree" in printed for name in names)
    assert "losses of rows of DTensors agree" in printed and "losses of a linear layer agree" in printed
    assert "a main_grad that is reduced apart agrees" in printed


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus() -> None:
    """DistributedDataParallel and FSDP2 over NCCL."""
    names = [x.name for x in representatives()]
    printed = run(names, "nccl")
    assert all(f"{name}: DDP and FSDP2 agree" in printed for name in names)
    assert "losses of rows of DTensors agree" in printed and "losses of a linear layer agree" in printed
    assert "a main_grad that is reduced apart agrees" in printed

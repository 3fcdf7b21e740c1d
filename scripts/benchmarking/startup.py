"""Start-up: the first loss of a new process, with an empty kernel cache and again with the cache that it filled."""

from __future__ import annotations

import compileall
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator

from benchmarking.records import ROOT, Row
from benchmarking.selection import Run

#: The measured losses: one element-wise loss and one loss of rows. `first_loss` has their operands.
LOSSES = ("mse_loss", "cross_entropy")

#: Seconds after which a child process is killed.
TIMEOUT = 120

COLUMNS = ("loss", "cache", "status", "import_s", "forward_s", "backward_s", "call_s", "total_s")


def measure(run: Run) -> Iterator[Row]:
    """Yields one row with an empty and one with a warm cache for each measured loss."""
    for loss in run.section_losses:
        if loss.name not in LOSSES:
            continue
        with tempfile.TemporaryDirectory() as directory:
            for cache in ("empty", "warm"):
                if run.begin(f"{loss.name}: first call in a new process, {cache} kernel cache"):
                    yield {"loss": loss.name, "cache": cache, **_child(loss.name, directory)}


def _child(loss: str, cache: str) -> Row:
    path = os.pathsep.join([str(ROOT), str(ROOT / "scripts"), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    # The driver has a cache, too: sources in it compile in a third of the time.
    variables = {**os.environ, "CUPY_CACHE_DIR": cache, "CUDA_CACHE_PATH": f"{cache}/driver", "PYTHONPATH": path}
    variables.pop("CUPY_CACHE_IN_MEMORY", None)
    # Keep bytecode, as an installation by pip has it. Without it, each process would compile the library on import.
    variables.pop("PYTHONDONTWRITEBYTECODE", None)
    compileall.compile_dir(ROOT / "cupylosses", quiet=1)
    command = [sys.executable, "-m", "benchmarking.first_loss", loss]
    try:
        done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        return {"status": f"failed: more than {TIMEOUT} s"}
    return outcome(done.returncode, done.stdout, done.stderr)


def outcome(code: int, printed: str, errors: str) -> Row:
    """The columns measured by the child process, parsed from its output, or the reason why there are none."""
    if code != 0:
        last = (errors.strip().splitlines() or ["no message"])[-1]
        return {"status": f"failed: {last[:200]}"}
    return {"status": "ok", **json.loads(printed.strip().splitlines()[-1])}

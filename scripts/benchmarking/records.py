"""Measured rows in append-only CSV files: one file per section, one row per measurement, with its environment."""

from __future__ import annotations

import csv
import os
import subprocess
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

Row = Mapping[str, Any]

#: The last columns of every file: the environment of a measurement.
ENVIRONMENT = ("gpu", "driver", "cuda", "torch", "cupy", "cupylosses", "commit", "date")


def environment() -> dict[str, str]:
    """The machine and versions of this run."""
    import cupy
    import torch

    import cupylosses

    version = cupy.cuda.runtime.runtimeGetVersion()
    drivers = output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").splitlines()
    return {
        "gpu": torch.cuda.get_device_name(),
        "driver": drivers[0] if drivers else "unknown",
        "cuda": str(torch.version.cuda),
        "torch": torch.__version__,
        "cupy": f"{cupy.__version__} (CUDA {version // 1000}.{version % 1000 // 10})",
        "cupylosses": cupylosses.__version__,
        "commit": commit(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def commit() -> str:
    """The measured commit, marked `-dirty` if the library differs from it.

    The environment variable ``CUPYLOSSES_COMMIT`` names the commit if the files were copied without their history.
    """
    if given := os.environ.get("CUPYLOSSES_COMMIT"):
        return given
    name = output("git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD")
    changed = output("git", "-C", str(ROOT), "status", "--porcelain", "--", "cupylosses", "kernels")
    return (name or "unknown") + ("-dirty" if changed else "")


def output(*command: str) -> str:
    """The output of a command; empty if it fails or does not exist."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


class Writer:
    """Appends rows to ``<directory>/<section>.csv``; each row is on disk when :meth:`write` returns.

    Raises:
        ValueError: the file has other columns, so new cells would end up in the wrong ones.
    """

    def __init__(self, directory: Path, section: str, columns: Sequence[str], where: Mapping[str, str]) -> None:
        self._path, self._where = directory / f"{section}.csv", where
        self._columns = [*columns, *ENVIRONMENT]
        found = header(self._path)
        if found and found != self._columns:
            raise ValueError(
                f"{self._path} has the columns {', '.join(found)}; this version writes {', '.join(self._columns)}. "
                "Move the file away, or choose another directory with --out."
            )

    def write(self, row: Row) -> None:
        """Appends one row, after the header if the file is new. Columns that the row lacks stay empty.

        Raises:
            ValueError: the row has a column that the file lacks.
        """
        self._path.parent.mkdir(parents=True, exist_ok=True)
        new = not header(self._path)
        with self._path.open("a", newline="", encoding="utf-8") as file:
            rows = csv.DictWriter(file, self._columns, lineterminator="\n")
            if new:
                rows.writeheader()
            rows.writerow({name: spell(value) for name, value in {**row, **self._where}.items()})


def header(path: Path) -> list[str]:
    """The columns of a file; an empty list if it does not exist or is empty."""
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return next(csv.reader(file), [])


def spell(value: Any) -> str:
    """A value as a cell. Floats have six significant digits, more than any clock here resolves."""
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def read(path: Path) -> list[dict[str, Any]]:
    """The rows of a file, with numeric cells parsed; an empty list if it does not exist."""
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return [{k: number(v) for k, v in row.items()} for row in csv.DictReader(file)]


def number(cell: str) -> Any:
    """The number that a cell contains, or its text."""
    for kind in (int, float):
        try:
            return kind(cell)
        except ValueError:
            pass
    return cell


def latest(rows: Sequence[Row], key: Sequence[str], gpu: str | None = None) -> list[Row]:
    """The newest row for each combination of the columns ``key`` on one GPU model, by default that of the last row."""
    if not rows:
        return []
    gpu = gpu or rows[-1]["gpu"]
    newest: dict[tuple[Any, ...], Row] = {}
    for row in sorted((r for r in rows if r["gpu"] == gpu), key=lambda r: str(r["date"])):
        newest[tuple(row[column] for column in key)] = row
    return list(newest.values())

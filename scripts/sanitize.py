"""Run every kernel of the representative losses under NVIDIA's compute-sanitizer, on a GPU.

    python scripts/sanitize.py                                all tools
    python scripts/sanitize.py --tool racecheck --loss kl_div

    memcheck    out-of-bounds and misaligned accesses
    racecheck   data races in shared memory within a block
    initcheck   reads of uninitialised memory
    synccheck   barriers that some threads of a warp or block never reach

Exits with 1 if a tool reports an error or could not run. Needs torch, CuPy and compute-sanitizer, from a CUDA toolkit
or from `pip install nvidia-cuda-sanitizer-api`. Only the library's own kernels are checked.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import site
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from time import perf_counter

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from tools.representatives import representatives

from cupylosses.definition.registry import registry
from cupylosses.engines.pointwise.codegen import KINDS, PRODUCT
from cupylosses.engines.pointwise.definition import Loss, counting

INSTALLED_TOOLKIT = Path("/usr/local/cuda")

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")

#: Without this option, initcheck cannot be restricted to our kernels, because kernels of other libraries initialize the
#: memory that ours read. Releases that lack it check all kernels; `read` then discounts reports about other kernels.
TRACKS_OTHERS = "--initcheck-track-filtered-global-memory"


@dataclass(frozen=True)
class Finding:
    """Result of one tool.

    Attributes:
        errors: Number of errors in our kernels; None if the report has no summary.
        elsewhere: Number of errors in kernels of other libraries.
        ran: The smoke test's closing line; None if the program ended early.
    """

    errors: int | None
    elsewhere: int
    ran: str | None

    @property
    def ok(self) -> bool:
        """True if the whole smoke test ran and our kernels had no error."""
        return self.errors == 0 and self.ran is not None


def main() -> int:
    arguments = parse()
    sanitizer = arguments.sanitizer or find_sanitizer()
    if sanitizer is None:
        sys.exit("There is no compute-sanitizer: `pip install nvidia-cuda-sanitizer-api`, or set CUDA_PATH.")
    abilities = subprocess.run([str(sanitizer), "--help"], capture_output=True, text=True).stdout
    version = subprocess.run([str(sanitizer), "--version"], capture_output=True, text=True).stdout.strip()
    print(f"{sanitizer}: {version.splitlines()[-1] if version else 'no version'}", flush=True)
    arguments.logs.mkdir(parents=True, exist_ok=True)

    wrong = 0
    for tool in arguments.tool:
        log, begin = arguments.logs / f"{tool}.log", perf_counter()
        status = execute(command(sanitizer, tool, arguments.loss, abilities), log)
        found = read(log.read_text(encoding="utf-8", errors="replace"), arguments.loss)
        ok = found.ok and status == 0
        wrong += not ok
        print(line(tool, found, status, perf_counter() - begin), flush=True)
        if not ok:
            print(f"    the reports are in {log}", flush=True)
    return 1 if wrong else 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    some = [x.name for x in representatives()]
    parser.add_argument("--tool", nargs="+", choices=TOOLS, default=TOOLS, help="these tools only")
    parser.add_argument(
        "--loss",
        nargs="+",
        choices=list(registry(Loss)),
        default=some,
        metavar="NAME",
        help=f"default: {' '.join(some)}",
    )
    parser.add_argument("--sanitizer", type=Path, help="path of compute-sanitizer, if it is not found")
    parser.add_argument("--logs", type=Path, default=ROOT / "build" / "sanitize", help="directory of the reports")
    return parser.parse_args()


def find_sanitizer() -> Path | None:
    """Finds compute-sanitizer on the PATH, in a CUDA toolkit, or in a wheel of this environment."""
    on_path = shutil.which("compute-sanitizer")
    if on_path:
        return Path(on_path)
    return next(filter(Path.is_file, _candidates()), None)


def _candidates() -> Iterator[Path]:
    toolkits = [Path(os.environ[x]) for x in ("CUDA_PATH", "CUDA_HOME") if os.environ.get(x)]
    for root in (*toolkits, INSTALLED_TOOLKIT):
        yield root / "bin" / "compute-sanitizer"
        yield root / "compute-sanitizer" / "compute-sanitizer"
    for packages in dict.fromkeys([*site.getsitepackages(), site.getusersitepackages(), *sys.path]):
        # Wheels of CUDA 13 use nvidia/cu13/bin, those of CUDA 12 nvidia/cuda_sanitizer_api/bin.
        yield from sorted((Path(packages) / "nvidia").glob("*/bin/compute-sanitizer"), reverse=True)


def command(sanitizer: Path, tool: str, losses: Sequence[str], abilities: str) -> list[str]:
    """The command that runs the smoke test under one tool. ``abilities`` is the sanitizer's help text."""
    options = ["--tool", tool, "--target-processes", "application-only", "--print-limit", "0"]
    # A CUDA API error that matters raises in torch, CuPy or the library and ends the smoke test. torch and CuPy provoke
    # and handle others, which would only be noise.
    options += ["--report-api-errors", "no"] if tool == "memcheck" else []
    # Without padding, the bytes past the end of an array may belong to another array.
    options += ["--padding", "512"] if tool == "memcheck" else []
    if tool != "initcheck" or TRACKS_OTHERS in abilities:
        for name in kernels(losses):
            options += ["--kernel-name", f"kernel_substring={name}"]
    if tool == "initcheck" and TRACKS_OTHERS in abilities:
        options += [TRACKS_OTHERS, "yes"]
    return [str(sanitizer), *options, sys.executable, "-m", "tools.smoke", "--loss", *losses]


def kernels(losses: Sequence[str]) -> list[str]:
    """Name prefixes of our kernels; no kernel of another library contains one of them."""
    counts = [counting(weighted, masked).name for weighted, masked in ((True, False), (False, True), (True, True))]
    return [f"{loss}_{kind}_" for loss, kind in product([*losses, *counts], (*KINDS, PRODUCT))]


def execute(command: Sequence[str], log: Path) -> int:
    """Runs a command with its output redirected to ``log``, and returns its exit status."""
    with log.open("w", encoding="utf-8") as file:
        file.write(" ".join(command) + "\n")
        file.flush()
        return subprocess.call(command, cwd=ROOT, env=environment(os.environ), stdout=file, stderr=subprocess.STDOUT)


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Environment of the smoke test. torch's memory pool is off: it would also own the bytes past an array's end."""
    path = os.pathsep.join(filter(None, [str(ROOT), variables.get("PYTHONPATH")]))
    return {**variables, "PYTHONPATH": path, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONUNBUFFERED": "1"}


SUMMARY = re.compile(r"^=+ (?:ERROR|RACECHECK) SUMMARY: (\d+) (?:error|hazard)", re.MULTILINE)

#: The first line of a report, and the line that names the kernel.
REPORT = re.compile(r"^=+ (?! )(?!.*SUMMARY)(?P<what>.+)\n=+ {2,}(?:at|in kernel) (?P<kernel>\w+)", re.MULTILINE)


def read(output: str, losses: Sequence[str]) -> Finding:
    """Parses the output of one tool; errors in kernels of other libraries are counted apart."""
    totals = [int(x) for x in SUMMARY.findall(output)]
    ours = tuple(kernels(losses))
    elsewhere = sum(not x["kernel"].startswith(ours) for x in REPORT.finditer(output))
    ran = re.search(r"^smoke: (\d+ checks, .*)$", output, re.MULTILINE)
    return Finding(sum(totals) - elsewhere if totals else None, elsewhere, ran.group(1) if ran else None)


def line(tool: str, found: Finding, status: int, seconds: float) -> str:
    """One line that reports the result of a tool."""
    if found.errors is None:
        said = f"no summary, exit status {status}"
    elif found.ran is None:
        said = f"{found.errors} errors, and the program ended early with exit status {status}"
    else:
        said = f"{found.errors} errors in {found.ran}" + (f", exit status {status}" if status else "")
    others = f" ({found.elsewhere} in kernels of others)" if found.elsewhere else ""
    return f"{tool:<10} {said}{others}, {seconds:.0f} s"


if __name__ == "__main__":
    sys.exit(main())

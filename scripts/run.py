"""Try or test the library on a fresh machine: create a virtual environment, install into it, and run.

    python3 scripts/run.py compare [arguments of scripts/compare.py]
    python3 scripts/run.py test [arguments of pytest]
    python3 scripts/run.py test --thorough      exhaustive grids and coverage

The environment is `.venv` in the checkout; a second run reuses it. The GPU driver determines which CuPy and torch are
installed; without an NVIDIA GPU, CuPy is left out. Versions come from constraints.txt. `install.log` in the environment
keeps pip's output. Needs Python 3.10 or newer and nothing else: no compiler, no CUDA toolkit, no installed packages.
"""

import argparse
import configparser
import ctypes
import hashlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OLDEST = (3, 10)

#: For each command: the extras of setup.cfg that it needs, and the program that it runs.
COMMANDS = {
    "compare": (["torch", "scripts"], ["scripts/compare.py"]),
    "test": (["torch", "scripts", "test"], ["-m", "pytest"]),
}

#: pytest arguments for the whole suite: several processes, but few enough not to exhaust the GPU's memory.
PROCESSES = ["--numprocesses=auto", "--maxprocesses=8", "--dist=worksteal"]

#: Arguments added to exactly these command lines. Coverage costs half of Python's time.
WHOLE = {("test",): PROCESSES, ("test", "--thorough"): ["--cov", *PROCESSES]}

#: The extra that installs CuPy for each CUDA major version, newest first. A driver supports its own version of CUDA and
#: older ones.
CUPY = {13: "cuda13x", 12: "cuda12x", 11: "cuda11x"}

#: The torch release whose default build is for a CUDA major version, where that of constraints.txt is not.
TORCH = {12: "torch==2.7.1"}


def main() -> int:
    if sys.version_info < OLDEST:
        wanted, found = (".".join(map(str, x[:2])) for x in (OLDEST, sys.version_info))
        sys.exit(
            f"cupylosses needs Python {wanted} or newer, and {sys.executable} is {found}. "
            f"Run this with a newer one: `python{wanted} scripts/run.py ...`."
        )
    options = parse()
    rest = [*options.rest, *WHOLE.get((options.command, *options.rest), [])]
    extras, program = COMMANDS[options.command]
    driver = driver_cuda()
    cupy = choose_cupy(options.cupy, driver)
    extras = [*extras, *([cupy] if cupy else [])]
    # Bytecode is kept, in `__pycache__`; without it, each of the suite's many processes would compile the library and
    # the tests again.
    variables = {name: x for name, x in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    # Use huge pages for glibc's heaps where Linux grants them on request: NVRTC then needs 0.64 of the processor time,
    # Python and torch 0.88.
    variables.setdefault("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")
    if options.here:
        python = Path(sys.executable)
        check_requirements(extras)
        # Makes the library importable in a checkout where it is not installed.
        variables["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [variables.get("PYTHONPATH")])])
    else:
        if driver == 11:
            sys.exit(
                "run.py: pip's usual torch needs a newer driver than this one, which runs CUDA 11. Install a torch for "
                f"CUDA 11 as PyTorch's site says, `pip install -e '.[{','.join(extras)}]'`, and run this with --here."
            )
        # CuPy's CUDA 12 libraries conflict with a torch for CUDA 13; those of CUDA 11 coexist with any torch.
        cuda = 12 if cupy == CUPY[12] else driver
        python = prepare(ROOT / (options.environment or default_environment(options.cupy)), extras, cuda)
    if driver:
        warn_if_torch_sees_no_gpu(python, driver)
    say(f"{python} {' '.join([*program, *rest])}")
    return subprocess.call([str(python), *program, *rest], cwd=str(ROOT), env=variables)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--here", action="store_true", help="use the active environment; install nothing")
    parser.add_argument("--cupy", choices=["auto", "none", *CUPY.values()], default="auto", help="which CuPy, if any")
    parser.add_argument("--environment", metavar="DIRECTORY", help="environment (default: .venv)")
    parser.add_argument("command", choices=list(COMMANDS))
    parser.add_argument("rest", nargs=argparse.REMAINDER, metavar="...", help="arguments of the command")
    return parser.parse_args()


def say(text: str) -> None:
    print(f"run.py: {text}", flush=True)


def driver_cuda() -> int:
    """The newest CUDA major version that the driver supports; 0 without a driver or a GPU."""
    for name in ("libcuda.so.1", "nvcuda.dll"):
        try:
            driver = ctypes.CDLL(name)
        except OSError:
            continue
        version, count = ctypes.c_int(), ctypes.c_int()
        calls = (
            driver.cuInit(0),
            driver.cuDeviceGetCount(ctypes.byref(count)),
            driver.cuDriverGetVersion(ctypes.byref(version)),
        )
        if not any(calls) and count.value:
            return version.value // 1000
    return 0


def choose_cupy(wanted: str, driver: int) -> "str | None":
    """The extra that installs CuPy: the requested one, or the newest that the driver supports."""
    if wanted != "auto":
        return None if wanted == "none" else wanted
    return next((extra for cuda, extra in CUPY.items() if cuda <= driver), None)


def default_environment(cupy: str) -> str:
    """The environment's directory. An environment holds only one CuPy, so each requested CuPy has its own."""
    return ".venv" if cupy == "auto" else f".venv-{cupy}"


# ----------------------------------------------------------------------------------------------------------------------
# Installing


def prepare(environment: Path, extras: "list[str]", cuda: int) -> Path:
    """Creates or reuses an environment with the library and at least these extras; returns its Python interpreter."""
    python = environment / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
    record, fingerprint = environment / "installed.json", installation_fingerprint(cuda)
    installed = json.loads(record.read_text(encoding="utf-8")) if record.exists() else {}
    if python.exists() and installed.get("fingerprint") == fingerprint:
        if set(extras) <= set(installed["extras"]):
            return python
        extras = sorted({*extras, *installed["extras"]})
    environment.mkdir(parents=True, exist_ok=True)
    log = environment / "install.log"
    log.write_text("", encoding="utf-8")
    if not python.exists():
        create(environment, log)
    constraints = environment / "constraints.txt"
    constraints.write_text(constraint_text(cuda), encoding="utf-8")
    # Compiling every module of torch and sympy to bytecode takes half of the installation time, and few are ever
    # imported.
    install = [*pip(python), "install", "--no-compile", "--disable-pip-version-check", "--constraint", str(constraints)]
    step(f"installing cupylosses with {', '.join(extras)}", [*install, "--editable", f".[{','.join(extras)}]"], log)
    record.write_text(json.dumps({"fingerprint": fingerprint, "extras": extras}), encoding="utf-8")
    return python


def installation_fingerprint(cuda: int) -> str:
    """A hash of everything that determines the installation, except the extras."""
    digest = hashlib.sha256(repr((cuda, sys.version_info[:2])).encode())
    for name in ("setup.cfg", "pyproject.toml", "constraints.txt"):
        digest.update((ROOT / name).read_bytes())
    return digest.hexdigest()


def create(environment: Path, log: Path) -> None:
    """Creates a virtual environment, without pip if this Python lacks ensurepip (Debian); see `pip`."""
    command = [sys.executable, "-m", "venv", str(environment)]
    if importlib.util.find_spec("ensurepip") is None:
        if importlib.util.find_spec("venv") is None or importlib.util.find_spec("pip") is None:
            sys.exit(
                "This Python can make no virtual environment. Install the missing part (Debian, Ubuntu: "
                "`sudo apt install python3-venv`) and run the same command again."
            )
        command.append("--without-pip")
    step(f"creating {environment}", command, log)


def pip(python: Path) -> "list[str]":
    """The pip command that installs into the environment of ``python``: its own pip, or that of this Python."""
    own = [str(python), "-m", "pip"]
    if subprocess.call([*own, "--version"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) == 0:
        return own
    return [sys.executable, "-m", "pip", "--python", str(python)]


def constraint_text(cuda: int) -> str:
    """The text of constraints.txt, with a torch whose default build is for this CUDA major version."""
    text = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    return re.sub(r"(?m)^torch==.*$", TORCH[cuda], text) if cuda in TORCH else text


def step(what: str, command: "list[str]", log: Path) -> None:
    """Runs a command and prints one line about it; the command's own output is appended to ``log``."""
    print(f"run.py: {what} ...", end="", flush=True)
    begin = time.monotonic()
    with log.open("a", encoding="utf-8") as file:
        print(f"$ {' '.join(command)}", file=file, flush=True)
        status = subprocess.call(command, cwd=str(ROOT), stdout=file, stderr=subprocess.STDOUT)
    print(f" {'failed after ' if status else ''}{time.monotonic() - begin:.0f} s", flush=True)
    if status:
        sys.exit(f"run.py: `{' '.join(command)}` failed with status {status}; its output is in {log}.")


# ----------------------------------------------------------------------------------------------------------------------
# Checking


def requirements(extras: "list[str]") -> "list[str]":
    """Names of the distributions that setup.cfg lists for the library and the extras, except platform-specific ones."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg", encoding="utf-8")
    texts = [config["options"]["install_requires"], *(config["options.extras_require"][x] for x in extras)]
    lines = [line for text in texts for line in text.split("\n") if line.strip() and ";" not in line]
    return [re.match(r"[\w.-]+", line.strip()).group() for line in lines]


def check_requirements(extras: "list[str]") -> None:
    """Exits with a list of the missing distributions if there are any."""
    from importlib import metadata

    missing = []
    for name in requirements(extras):
        # CuPy has one distribution per CUDA version and finds CUDA libraries in many places, so only its module counts.
        if name.startswith(("cupy", "nvidia")):
            if name.startswith("cupy") and importlib.util.find_spec("cupy") is None:
                missing.append(name)
            continue
        try:
            metadata.distribution(name)
        except metadata.PackageNotFoundError:
            missing.append(name)
    if missing:
        sys.exit(
            f"run.py: {sys.executable} lacks {', '.join(missing)}. Leave out --here to create an environment, or "
            f"install them: `{sys.executable} -m pip install -c constraints.txt -e '.[{','.join(extras)}]'`."
        )


def warn_if_torch_sees_no_gpu(python: Path, driver: int) -> None:
    check = "import sys, torch; sys.exit(not torch.cuda.is_available())"
    if subprocess.call([str(python), "-W", "ignore", "-c", check], stderr=subprocess.DEVNULL):
        say(f"torch sees no GPU, although the driver has one for CUDA {driver}: its build does not fit the driver")


if __name__ == "__main__":
    sys.exit(main())

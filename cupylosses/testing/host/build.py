"""Compilation of kernel sources to shared objects for this machine, cached by content.

``CXX``                         compiler; by default the first of c++, g++ and clang++ that is found
``CUPYLOSSES_HOST_CACHE``       directory of the cache (see ``objects.py``)
``CUPYLOSSES_HOST_SANITIZE``    sanitizers, which override the settings; ``address,undefined`` needs
                                AddressSanitizer's library loaded before Python (see `sanitizer_library`)
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import shutil
import subprocess
import tempfile
import threading
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from cupylosses.testing.counters import counters
from cupylosses.testing.host import objects
from cupylosses.testing.host.settings import Settings

_HERE = Path(__file__).resolve().parent
_SHIM = ("shim.hpp", "interface.hpp")

#: No contraction, as with -fmad=false.
_OPTIONS = ("-std=c++17", "-fPIC", "-ffp-contract=off", "-w")
#: Hidden names, so that two kernels do not share their __shared__ variables; type punning is allowed, as in CUDA's
#: compiler. Kernels are linked without start files, so that they have no other writable memory.
_KERNEL = ("-fvisibility=hidden", "-fno-strict-aliasing")
_LINK_KERNEL = ("-nostartfiles", "-nodefaultlibs")
#: Linkers that take 5 ms less than the default one for an object as small as a kernel, the fastest first.
_LINKERS = ("lld", "gold")
#: GCC options without which a compilation takes a third longer. Most kernels run for a millisecond, once or twice.
_KERNEL_GCC = (
    "-fno-exceptions",
    "-fno-asynchronous-unwind-tables",
    # Passes over whole programs and over values.
    "-fno-ipa-modref",
    "-fno-ipa-profile",
    "-fno-ipa-pure-const",
    "-fno-ipa-reference",
    "-fno-guess-branch-probability",
    "-fno-thread-jumps",
    "-fno-tree-bit-ccp",
    "-fno-tree-dominator-opts",
    "-fno-tree-dse",
    "-fno-tree-pta",
    "-fno-tree-reassoc",
    "-fno-tree-sink",
    "-fno-tree-slsr",
    "-fno-tree-sra",
    # Passes over loops.
    "-fno-ivopts",
    "-fno-move-loop-invariants",
    "-fno-tree-ch",
    "-fno-tree-loop-optimize",
    # Passes over instructions.
    "-fno-combine-stack-adjustments",
    "-fno-compare-elim",
    "-fno-cprop-registers",
    "-fno-dse",
    "-fno-forward-propagate",
    "-fno-if-conversion",
    "-fno-if-conversion2",
    "-fno-reorder-blocks",
    "-fno-shrink-wrap",
    "-fno-split-wide-types",
    # Allocates registers for a whole function, not for each loop.
    "-fira-region=one",
)
#: The runtime (races.cpp) needs no calls at function entry and exit.
_THREAD_GCC = ("--param", "tsan-instrument-func-entry-exit=0")

#: Number of kernels that are compiled with the same files of ``kernels/`` before these files are precompiled.
#: Precompiling saves an eighth of each further compilation, and takes as long as four such savings.
_COMPILED_BEFORE_PRECOMPILING = 4
#: Start of the glue of one kernel, which follows the text of the files (`Kernel.source`).
_GLUE = '\n#line 1 "<'

#: Declaration of dynamic shared memory, with groups for its type and name. A pattern that starts with a letter takes a
#: sixteenth of the search time of a pattern that starts with a word boundary.
_DYNAMIC = re.compile(r"extern\s+__shared__\s+(?:(?:__align__|alignas)\([^)]*\)\s+)?([\w ]+?)\s+(\w+)\s*\[\s*\]")
_SHARED = re.compile(r"extern\s+__shared__")

#: Bytes of `extern __shared__` memory: more than any kernel requests on the GPUs that tests simulate.
DYNAMIC_SHARED_BYTES = 228 << 10


class HostCompileError(RuntimeError):
    """Rejection of a kernel by the host's compiler; the message is the compiler's output."""


@cache
def find_compiler() -> tuple[str, ...] | None:
    """Returns the C++ compiler as the start of a command, or None."""
    preferred = shlex.split(os.environ.get("CXX", ""))
    for command in ([preferred] if preferred else []) + [["c++"], ["g++"], ["clang++"]]:
        path = shutil.which(command[0])
        if path:
            return (path, *command[1:])
    return None


def compiler() -> tuple[str, ...]:
    """Returns the C++ compiler, or raises an error that says how to get one."""
    command = find_compiler()
    if command is None:
        raise HostCompileError("host execution needs a C++17 compiler: install g++ or clang++, or set CXX")
    return command


@cache
def _version() -> str:
    done = subprocess.run([*compiler(), "--version"], capture_output=True, text=True, check=True)
    return done.stdout


def sanitizers(default: tuple[str, ...] = Settings.sanitize) -> tuple[str, ...]:
    """Returns the sanitizers for kernels: those of the environment if it sets them, otherwise ``default``."""
    requested = os.environ.get("CUPYLOSSES_HOST_SANITIZE")
    names = default if requested is None else tuple(x for x in requested.split(",") if x)
    unknown = set(names) - {"thread", "address", "undefined"}
    if unknown or {"thread", "address"} <= set(names):
        raise ValueError(
            f"CUPYLOSSES_HOST_SANITIZE must name thread or address, and undefined, got {','.join(names)!r}: "
            "no compiler checks for thread and address at once"
        )
    return names


@cache
def _linker() -> tuple[str, ...]:
    """Returns the option for a faster linker, if one is installed."""
    linker = next((x for x in _LINKERS if shutil.which(f"ld.{x}")), None)
    return (f"-fuse-ld={linker}",) if linker else ()


@cache
def sanitizer_library() -> Path:
    """Returns the path of AddressSanitizer's library, which must be in LD_PRELOAD when Python starts."""
    for name in ("libasan.so", "libclang_rt.asan-x86_64.so", "libclang_rt.asan-aarch64.so"):
        command = [*compiler(), f"-print-file-name={name}"]
        path = Path(subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip())
        if path.is_absolute() and path.exists():
            return path.resolve()
    raise FileNotFoundError(f"{compiler()[0]} has no library of AddressSanitizer to load")


@cache
def _own(name: str) -> str:
    """Returns the text of a file of this directory."""
    return (_HERE / name).read_text(encoding="utf-8")


_precompiling = threading.Lock()
_requested: Counter[str] = Counter()
_found: set[Path] = set()


def _build(name: str, text: str, options: tuple[str, ...], link: tuple[str, ...], inputs: tuple[str, ...]) -> Path:
    """Compiles ``text`` unless the cache has the result; ``inputs`` are the files of this directory that it includes.

    Processes may do so concurrently: each writes a file of its own, and renames it when it is complete.
    """
    directory = objects.directory()
    target = directory / f"{name[:80]}-{_key(text, (*options, *link), inputs)}.so"
    counters.host_kernels.add(target.stem)
    if objects.find(target):
        return target
    files, mark, glue = text.partition(_GLUE)
    header = _precompiled(directory, files, options, inputs) if mark else None
    with tempfile.TemporaryDirectory(dir=directory) as work:
        built = Path(work) / "kernel.so"
        status = 1
        if header:
            including = (*options, "-include", str(header.with_suffix("")))
            status, message = _compile("c++", mark.lstrip() + glue, including, built, ("-shared", *link))
        # Without a header, with a damaged header, or to report errors of the whole text.
        if status:
            status, message = _compile("c++", text, options, built, ("-shared", *link))
        counters.count_compiled()
        if status:
            raise HostCompileError(f"{name} did not compile for the host:\n{message}")
        objects.keep(built, target)
    return target


def _precompiled(directory: Path, files: str, options: tuple[str, ...], inputs: tuple[str, ...]) -> Path | None:
    """Returns the precompiled header of the text before the glue of kernels.

    None if too few kernels have needed it, or if the compiler is Clang, whose options for precompiled headers differ.
    """
    if "clang" in _version():
        return None
    target = directory / f"{_key(files, options, inputs)}.hpp.gch"
    with _precompiling:  # Threads that need the same header wait for it together.
        if target in _found or objects.find(target):
            _found.add(target)
            return target
        _requested[target.name] += 1
        if _requested[target.name] <= _COMPILED_BEFORE_PRECOMPILING:
            return None
        with tempfile.TemporaryDirectory(dir=directory) as work:
            built = Path(work) / "header.gch"
            status, _ = _compile("c++-header", f"{files}\n", options, built)
            if status:
                return None
            objects.keep(built, target)
    return target


def _key(text: str, options: tuple[str, ...], inputs: tuple[str, ...]) -> str:
    key = hashlib.sha256()
    for part in (_version(), *compiler(), *_OPTIONS, *options, text, *map(_own, inputs)):
        key.update(part.encode() + b"\0")
    return key.hexdigest()[:24]


def _compile(
    language: str, text: str, options: tuple[str, ...], built: Path, link: tuple[str, ...] = ()
) -> tuple[int, str]:
    """Runs the compiler; returns its exit status and messages. ``built`` must be in a directory of its own."""
    source = built.with_name("kernel.cpp")
    source.write_text(text, encoding="utf-8")
    # Makes paths look like those of `#line` directives, without a directory.
    where = [f"-ffile-prefix-map={x}=." for x in (built.parent, Path.cwd())]
    command = [*compiler(), *_OPTIONS, *where, f"-I{_HERE}", *options, "-x", language, str(source), "-x", "none"]
    status, message, seconds = _run([*command, *link, "-o", str(built)])
    counters.count_compiling(seconds)
    return status, message


def _run(command: Sequence[str]) -> tuple[int, str, float]:
    """Runs a program to completion; returns its exit status, standard error and processor seconds."""
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        message = process.stderr.read()
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    return process.returncode, message, used.ru_utime + used.ru_stime


@cache
def runtime() -> Path:
    """Returns the shared object that executes kernels."""
    parts = tuple(sorted(x.name for x in _HERE.glob("*.[ch]pp")))
    # Kernels resolve the functions of both libraries through the runtime (`program`).
    return _build("runtime", _own("runtime.cpp"), ("-O2",), ("-Wl,--no-as-needed", "-lm", "-lc"), parts)


#: A kernel: the name of its entry point, and its source for NVRTC.
Source = tuple[str, str]


def of_source(entry: str, source: str, sanitize: tuple[str, ...] = Settings.sanitize) -> Path:
    """Returns the shared object of one kernel."""
    return program(((entry, source),), sanitize)


def program(kernels: Sequence[Source], sanitize: tuple[str, ...] = Settings.sanitize, debug: bool = False) -> Path:
    """Returns the shared object of kernels whose sources start with the same files of ``kernels/``.

    Two kernels compiled together take three quarters of the time that they take apart. ``debug`` adds line information.
    """
    sanitize, entry = sanitizers(sanitize), kernels[0][0]
    source = _joined(kernels)
    text = f'#include "shim.hpp"\n{source}\n{_dynamic_shared(source)}HOST_SHARED()\n'
    text = _SHARED.sub("extern __dynamic_shared__", text)
    checks = [f"-fsanitize={','.join(sanitize)}"] if sanitize else []
    # The runtime provides the C and math libraries. Searching these takes longer than the rest of linking.
    libraries = [str(sanitizer_library()), "-lm", "-lc", "-lgcc"] if "address" in sanitize else ["-lgcc"]
    trimmed = () if "clang" in _version() else (*_KERNEL_GCC, *(_THREAD_GCC if "thread" in sanitize else ()))
    # Optimization takes up to a third of a compilation, which pays off only if every access is checked.
    options = (*_KERNEL, "-O1" if sanitize else "-O0", *trimmed, *checks, *(["-gdwarf-4"] if debug else []))
    link = (*_linker(), *_LINK_KERNEL, *checks, str(runtime()), *libraries)
    return _build(entry, text, options, link, _SHIM)


def _joined(kernels: Sequence[Source]) -> str:
    """Returns the files that the kernels share, then the glue and entry point of each kernel in its own namespace."""
    (files, mark, _), *others = parts = [source.partition(_GLUE) for _, source in kernels]
    if not others:
        ((entry, source),) = kernels
        return f"{source}\nHOST_ENTRY({entry})"
    if any(x[0] != files for x in others):
        raise ValueError(f"{', '.join(entry for entry, _ in kernels)} begin with different files")
    glues = [
        f"namespace kernel_{i} {{{mark}{glue}\nHOST_ENTRY({entry})\n}}"
        for i, ((entry, _), (*_, glue)) in enumerate(zip(kernels, parts, strict=True))
    ]
    return f'{files}\n#line 1 "<together>"\n' + "\n".join(glues)


def _dynamic_shared(source: str) -> str:
    """Returns definitions of the ``extern __shared__`` array of a source and of a function that returns its address."""
    arrays = dict.fromkeys(_DYNAMIC.findall(source))
    if len(arrays) > 1:
        raise HostCompileError(f"more than one extern __shared__ array: {', '.join(name for _, name in arrays)}")
    text, address = "", "nullptr"
    for kind, name in arrays:
        text = f"alignas(128) __dynamic_shared__ {kind} {name}[{DYNAMIC_SHARED_BYTES} / sizeof({kind})];\n"
        address = name
    return f"{text}HOST_DYNAMIC_SHARED({address})\n"

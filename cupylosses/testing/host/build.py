"""Compiles the source of a kernel to a shared object for this machine, and caches it by content.

``CXX``                         the compiler; otherwise the first of c++, g++ and clang++ that is found
``CUPYLOSSES_HOST_CACHE``       the directory of the cache (see ``objects.py``)
``CUPYLOSSES_HOST_SANITIZE``    the sanitizers, overriding the settings; ``address,undefined`` needs
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

#: No contraction, as with -fmad=false. Type punning is no error, as in CUDA's compiler.
_OPTIONS = ("-std=c++17", "-fPIC", "-ffp-contract=off", "-w")
#: Hidden names, so that two kernels do not share their __shared__ variables; no start files, so that a kernel has no
#: other writable memory.
_KERNEL = ("-fvisibility=hidden", "-fno-strict-aliasing")
_LINK_KERNEL = ("-nostartfiles", "-nodefaultlibs")
#: Linkers that take 5 ms less than the default one for an object as small as a kernel's, the fastest first.
_LINKERS = ("lld", "gold")
#: Options of GCC without which a compilation takes a third longer: most kernels run for a millisecond, once or twice.
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
    # Registers are allocated for a whole function, not for each loop.
    "-fira-region=one",
)
#: The runtime needs no calls at the beginning and the end of each function (races.cpp).
_THREAD_GCC = ("--param", "tsan-instrument-func-entry-exit=0")

#: Kernels compiled with the same files of ``kernels/`` before these are precompiled. Precompiling saves an eighth of
#: each further compilation, and takes as long as four of these savings.
_COMPILED_BEFORE_PRECOMPILING = 4
#: The beginning of the glue of one kernel, behind the text of the files (`Kernel.source`).
_GLUE = '\n#line 1 "<'

#: The declaration of dynamic shared memory, its type and its name. A pattern that begins with a letter is found in a
#: sixteenth of the time that one takes which begins at the boundary of a word.
_DYNAMIC = re.compile(r"extern\s+__shared__\s+(?:(?:__align__|alignas)\([^)]*\)\s+)?([\w ]+?)\s+(\w+)\s*\[\s*\]")
_SHARED = re.compile(r"extern\s+__shared__")

#: Bytes of `extern __shared__` memory: more than any kernel asks for on the GPUs that tests pretend to have.
DYNAMIC_SHARED_BYTES = 228 << 10


class HostCompileError(RuntimeError):
    """The host's compiler refused a kernel; the message is the compiler's output."""


@cache
def find_compiler() -> tuple[str, ...] | None:
    """The C++ compiler as the beginning of a command, or None."""
    given = shlex.split(os.environ.get("CXX", ""))
    for command in ([given] if given else []) + [["c++"], ["g++"], ["clang++"]]:
        path = shutil.which(command[0])
        if path:
            return (path, *command[1:])
    return None


def compiler() -> tuple[str, ...]:
    """The C++ compiler, or an error that says how to get one."""
    found = find_compiler()
    if found is None:
        raise HostCompileError("host execution needs a C++17 compiler: install g++ or clang++, or set CXX")
    return found


@cache
def _version() -> str:
    done = subprocess.run([*compiler(), "--version"], capture_output=True, text=True, check=True)
    return done.stdout


def sanitizers(chosen: tuple[str, ...] = Settings.sanitize) -> tuple[str, ...]:
    """The sanitizers for kernels: those of the environment, or else ``chosen``."""
    given = os.environ.get("CUPYLOSSES_HOST_SANITIZE")
    names = chosen if given is None else tuple(x for x in given.split(",") if x)
    unknown = set(names) - {"thread", "address", "undefined"}
    if unknown or {"thread", "address"} <= set(names):
        raise ValueError(
            f"CUPYLOSSES_HOST_SANITIZE must name thread or address, and undefined, got {','.join(names)!r}: "
            "no compiler checks for thread and address at once"
        )
    return names


@cache
def _linker() -> tuple[str, ...]:
    """The option for a faster linker, if one is installed beside the default one."""
    found = next((x for x in _LINKERS if shutil.which(f"ld.{x}")), None)
    return (f"-fuse-ld={found}",) if found else ()


@cache
def sanitizer_library() -> Path:
    """AddressSanitizer's library, which has to be in LD_PRELOAD when Python starts."""
    for name in ("libasan.so", "libclang_rt.asan-x86_64.so", "libclang_rt.asan-aarch64.so"):
        command = [*compiler(), f"-print-file-name={name}"]
        path = Path(subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip())
        if path.is_absolute() and path.exists():
            return path.resolve()
    raise FileNotFoundError(f"{compiler()[0]} has no library of AddressSanitizer to load")


@cache
def _own(name: str) -> str:
    """The text of a file of this directory."""
    return (_HERE / name).read_text(encoding="utf-8")


_precompiling = threading.Lock()
_requested: Counter[str] = Counter()
_found: set[Path] = set()


def _build(name: str, text: str, options: tuple[str, ...], link: tuple[str, ...], inputs: tuple[str, ...]) -> Path:
    """Compiles ``text`` with ``inputs``, the files of this directory that it includes, unless the cache has the result.

    Any number of processes may do so at once: each writes its own file, and renames it when it is complete.
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
        # Without a header or with a damaged one, and for errors of the whole text.
        if status:
            status, message = _compile("c++", text, options, built, ("-shared", *link))
        counters.count_compiled()
        if status:
            raise HostCompileError(f"{name} did not compile for the host:\n{message}")
        objects.keep(built, target)
    return target


def _precompiled(directory: Path, files: str, options: tuple[str, ...], inputs: tuple[str, ...]) -> Path | None:
    """The precompiled header of the text in front of the glue of kernels; None if too few kernels have needed it, or
    the compiler is Clang, which has other options for one.
    """
    if "clang" in _version():
        return None
    target = directory / f"{_key(files, options, inputs)}.hpp.gch"
    with _precompiling:  # Kernels of several threads wait for their header together.
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
    """Exit status and messages of the compiler; ``built`` lies in a directory of its own."""
    source = built.with_name("kernel.cpp")
    source.write_text(text, encoding="utf-8")
    # Paths as in the `#line` directives, without a directory.
    where = [f"-ffile-prefix-map={x}=." for x in (built.parent, Path.cwd())]
    command = [*compiler(), *_OPTIONS, *where, f"-I{_HERE}", *options, "-x", language, str(source), "-x", "none"]
    status, message, seconds = _run([*command, *link, "-o", str(built)])
    counters.count_compiling(seconds)
    return status, message


def _run(command: Sequence[str]) -> tuple[int, str, float]:
    """Exit status, standard error and processor seconds of a completed program."""
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        message = process.stderr.read()
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    return process.returncode, message, used.ru_utime + used.ru_stime


@cache
def runtime() -> Path:
    """The shared object that executes kernels."""
    parts = tuple(sorted(x.name for x in _HERE.glob("*.[ch]pp")))
    # Kernels find the functions of both libraries through the runtime (`program`).
    return _build("runtime", _own("runtime.cpp"), ("-O2",), ("-Wl,--no-as-needed", "-lm", "-lc"), parts)


#: A kernel: the name of its entry point, and its source for NVRTC.
Source = tuple[str, str]


def of_source(entry: str, source: str, sanitize: tuple[str, ...] = Settings.sanitize) -> Path:
    """The shared object of one kernel."""
    return program(((entry, source),), sanitize)


def program(kernels: Sequence[Source], sanitize: tuple[str, ...] = Settings.sanitize, debug: bool = False) -> Path:
    """The shared object of kernels that begin with the same files of ``kernels/``: two of them compile together in
    three quarters of their time. ``debug`` adds line information.
    """
    sanitize, entry = sanitizers(sanitize), kernels[0][0]
    source = _joined(kernels)
    text = f'#include "shim.hpp"\n{source}\n{_dynamic_shared(source)}HOST_SHARED()\n'
    text = _SHARED.sub("extern __dynamic_shared__", text)
    checks = [f"-fsanitize={','.join(sanitize)}"] if sanitize else []
    # The runtime brings the C and the mathematical library. Searching them takes longer than all else of linking.
    libraries = [str(sanitizer_library()), "-lm", "-lc", "-lgcc"] if "address" in sanitize else ["-lgcc"]
    trimmed = () if "clang" in _version() else (*_KERNEL_GCC, *(_THREAD_GCC if "thread" in sanitize else ()))
    # Optimization takes up to a third of a compilation, which pays only where every access is checked.
    options = (*_KERNEL, "-O1" if sanitize else "-O0", *trimmed, *checks, *(["-gdwarf-4"] if debug else []))
    link = (*_linker(), *_LINK_KERNEL, *checks, str(runtime()), *libraries)
    return _build(entry, text, options, link, _SHIM)


def _joined(kernels: Sequence[Source]) -> str:
    """The files that the kernels share, and in a namespace for each kernel its glue and its entry point."""
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
    """The definition of the array that a source declares as ``extern __shared__``, and a function with its address."""
    arrays = dict.fromkeys(_DYNAMIC.findall(source))
    if len(arrays) > 1:
        raise HostCompileError(f"more than one extern __shared__ array: {', '.join(name for _, name in arrays)}")
    text, address = "", "nullptr"
    for kind, name in arrays:
        text = f"alignas(128) __dynamic_shared__ {kind} {name}[{DYNAMIC_SHARED_BYTES} / sizeof({kind})];\n"
        address = name
    return f"{text}HOST_DYNAMIC_SHARED({address})\n"

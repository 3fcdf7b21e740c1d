"""Cache of the shared objects that host execution loads, and of the precompiled headers that it builds them with.

A shared object is code: whoever can write to the cache can run code in every test process. So the directory must belong
to the user and be writable by nobody else. Each file ends in a checksum, which detects an object that a crash or a full
disk cut short; such an object is built again. Loaders and linkers do not read past the last section.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

#: Maximum size of the cache in bytes, and the share of it to which pruning cuts the cache: it removes the least
#: recently used objects.
MAX_BYTES = 2 << 30
KEPT = 0.75
#: Age in seconds after which no process can still be using a temporary directory.
ABANDONED = 24 * 3600

_MARK = b"cupylosses object "
_FOOTER = len(_MARK) + hashlib.blake2b().digest_size

_pruned: set[Path] = set()


class UnsafeCacheError(RuntimeError):
    """Error: other users can write to the cache."""


def directory() -> Path:
    """Returns the directory of the cache: CUPYLOSSES_HOST_CACHE, or cupylosses/host among the user's caches.

    Raises:
        UnsafeCacheError: The directory belongs to another user, or others can write to it.
    """
    named = os.environ.get("CUPYLOSSES_HOST_CACHE")
    caches = os.environ.get("XDG_CACHE_HOME")
    cache = Path(named) if named else (Path(caches) if caches else Path.home() / ".cache") / "cupylosses" / "host"
    if not cache.is_dir():
        cache.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):  # Another process created it first.
            cache.mkdir(mode=0o700)
    status = cache.stat()
    if status.st_uid not in (os.getuid(), 0) or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise UnsafeCacheError(
            f"host execution: the cache of compiled kernels, {cache}, belongs to user {status.st_uid} and has the mode "
            f"{stat.S_IMODE(status.st_mode):o}, expected user {os.getuid()} and nobody else who can write: what lies "
            f"there is loaded as code. `chmod go-w {cache}`, or set CUPYLOSSES_HOST_CACHE to a directory of your own."
        )
    return cache


def find(path: Path) -> bool:
    """True if the cache has this object, complete and owned by this user or root; marks it as used."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return False
    with open(handle, "rb") as file:
        status = os.fstat(handle)
        trusted = status.st_uid in (os.getuid(), 0) and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        if not (trusted and stat.S_ISREG(status.st_mode)):
            return False
        content = file.read()
        if content[-_FOOTER:] != _footer(content[:-_FOOTER]):
            return False
        with suppress(PermissionError):  # The object belongs to root.
            os.utime(handle)
    return True


def keep(built: Path, path: Path) -> None:
    """Moves an object that was built in the cache's file system to its place; processes may do so concurrently.

    Each process prunes the cache when it first does so.
    """
    with built.open("ab") as file:
        file.write(_footer(built.read_bytes()))
    built.chmod(0o700)
    built.replace(path)
    if path.parent not in _pruned:
        _pruned.add(path.parent)
        prune(path.parent)


def prune(cache: Path, most: int = MAX_BYTES) -> None:
    """Removes abandoned temporary directories and, beyond ``most`` bytes, the least recently used objects."""
    objects = []
    for path, status in _entries(cache):
        if stat.S_ISDIR(status.st_mode):
            if time.time() - status.st_mtime > ABANDONED:
                shutil.rmtree(path, ignore_errors=True)
        elif path.suffix in (".so", ".gch"):
            objects.append((status.st_mtime, status.st_size, path))
    total = sum(size for _, size, _ in objects)
    if total <= most:
        return
    for _, size, path in sorted(objects):
        if total <= KEPT * most:
            return
        with suppress(OSError):
            path.unlink()
            total -= size


def _entries(cache: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Yields the entries of the cache, while other processes may add and remove entries."""
    with os.scandir(cache) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):
                yield Path(entry.path), entry.stat(follow_symlinks=False)


def _footer(content: bytes) -> bytes:
    return _MARK + hashlib.blake2b(content).digest()

"""A persistent cache of results, keyed by the content that they were computed from: a changed input is another key."""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
from pathlib import Path
from typing import Any


def directory() -> Path:
    """Returns the directory of the cache: CUPYLOSSES_CACHE_DIR, or the user's cache. It may be deleted at any time."""
    named = os.environ.get("CUPYLOSSES_CACHE_DIR")
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cupylosses"


def key(*parts: str) -> str:
    """Returns the key of a result that depends on these texts and nothing else."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


class Cache:
    """A table of JSON values in a file of :func:`directory`, for use by one thread; other processes may use it too.

    If no file can be written, the table starts empty and is kept in memory. A damaged file is replaced by an empty one:
    everything in it can be computed again.
    """

    def __init__(self, name: str) -> None:
        self._path: Path | None = directory() / f"{name}.sqlite3"
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._database = _open(self._path)
        except (OSError, sqlite3.OperationalError):
            self._path = None
            self._database = _open(":memory:")
        except sqlite3.DatabaseError:
            self._replace()

    def __enter__(self) -> Cache:
        return self

    def __exit__(self, *_: object) -> None:
        self._database.close()

    def get(self, key: str) -> Any:
        """Returns the value, or None."""
        try:
            found = self._database.execute("SELECT value FROM results WHERE key = ?", (key,)).fetchone()
            return json.loads(found[0]) if found else None
        except sqlite3.OperationalError:
            return None
        except (sqlite3.DatabaseError, ValueError):
            self._replace()
            return None

    def put(self, key: str, value: Any) -> None:
        """Stores a value that JSON can represent."""
        text = json.dumps(value)
        try:
            self._insert(key, text)
        except sqlite3.OperationalError:
            pass
        except sqlite3.DatabaseError:
            self._replace()
            self._insert(key, text)

    def _insert(self, key: str, text: str) -> None:
        self._database.execute("INSERT OR REPLACE INTO results VALUES (?, ?)", (key, text))

    def _replace(self) -> None:
        """Starts with a new file. Processes that have the damaged one open keep it."""
        if hasattr(self, "_database"):
            self._database.close()
        path, self._path = self._path, None
        try:
            if path is not None:
                for beside in ("", "-journal"):
                    path.with_name(path.name + beside).unlink(missing_ok=True)
                self._database, self._path = _open(path), path
                return
        except (OSError, sqlite3.DatabaseError):
            pass
        self._database = _open(":memory:")


def _open(path: Path | str) -> sqlite3.Connection:
    # Each value is its own transaction, and need not survive a power failure.
    database = sqlite3.connect(path, timeout=60, isolation_level=None)
    try:
        database.execute("PRAGMA synchronous = OFF")
        database.execute("CREATE TABLE IF NOT EXISTS results (key TEXT PRIMARY KEY, value TEXT) WITHOUT ROWID")
    except sqlite3.DatabaseError:
        database.close()
        raise
    return database

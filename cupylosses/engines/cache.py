"""Cache of plans, the only one of the library, and caches of checked settings."""

from __future__ import annotations

from collections.abc import Callable
from operator import is_
from typing import Any

from cupylosses import interop

_MAX_PLANS = 4096


class PlanCache:
    """Cache of plans by the keys with which a backend distinguishes calls. It is cleared when it is full."""

    def __init__(self, size: int = _MAX_PLANS) -> None:
        self.size = size
        self._plans: dict[Any, Any] = {}
        self._listeners: list[Callable[[], object]] = []
        self.get = self._plans.get

    def __len__(self) -> int:
        return len(self._plans)

    def keep(self, key: Any, entry: Any) -> Any:
        """Stores ``entry`` under ``key`` and returns it."""
        if len(self._plans) >= self.size:
            self.clear()
        self._plans[key] = entry
        return entry

    def clear(self) -> None:
        """Drops all plans and calls the listeners."""
        self._plans.clear()
        for listener in self._listeners:
            listener()

    def on_clear(self, listener: Callable[[], object]) -> None:
        """Registers a function that is called whenever plans are dropped."""
        self._listeners.append(listener)


class SettingsCache:
    """Cache of values by the identities of the settings that they were made from.

    It keeps the settings alive, so that no other object gets their identities.
    """

    #: Names of immutable types.
    _constant = frozenset({"int", "float", "bool", "str", "NoneType", "dtype"})

    def __init__(self, size: int = 1024) -> None:
        self.size = size
        self._kept: dict[Any, tuple[Any, tuple[Any, ...]]] = {}
        #: Returns value and settings by a key that contains the identities of the settings, or None.
        self.get = self._kept.get

    def __len__(self) -> int:
        return len(self._kept)

    def find(
        self,
        key: tuple[Any, ...],
        settings: tuple[Any, ...],
        make: Callable[[], Any],
        defaults: tuple[Any, ...] | None = None,
    ) -> Any:
        """Returns the value that ``make`` returns for these settings and the rest of ``key``.

        Nothing is cached while torch traces, because it compares one trace with the next, nor before
        `interop.tracers` has a predicate that detects a trace.

        Settings that are all ``defaults``, the usual case, are found by the key alone.
        """
        if not interop.tracers or interop.tracers[0]():
            return make()
        if defaults is None or not all(map(is_, settings, defaults)):
            key = (*key, *map(id, settings))
        entry = self.get(key) or self.keep(key, make(), settings)
        return entry[0]

    def keep(self, key: Any, made: Any, settings: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
        """Caches ``made`` unless one of its settings is mutable. Returns ``made`` and the settings."""
        entry = made, settings
        if all([type(x).__name__ in self._constant for x in settings]):
            if len(self._kept) >= self.size:
                self._kept.clear()
            self._kept[key] = entry
        return entry


plans = PlanCache()

"""The one cache of plans, and checked settings of calls."""

from __future__ import annotations

from collections.abc import Callable
from operator import is_
from typing import Any

from cupylosses import interop

_MAX_PLANS = 4096


class PlanCache:
    """Plans by whatever a backend tells calls apart by. When it is full it starts anew."""

    def __init__(self, size: int = _MAX_PLANS) -> None:
        self.size = size
        self._plans: dict[Any, Any] = {}
        self._listeners: list[Callable[[], object]] = []
        self.get = self._plans.get

    def __len__(self) -> int:
        return len(self._plans)

    def keep(self, key: Any, found: Any) -> Any:
        """Keeps what was found, and returns it."""
        if len(self._plans) >= self.size:
            self.clear()
        self._plans[key] = found
        return found

    def clear(self) -> None:
        """Drops all plans."""
        self._plans.clear()
        for listener in self._listeners:
            listener()

    def on_clear(self, listener: Callable[[], object]) -> None:
        """Calls ``listener`` whenever plans are dropped."""
        self._listeners.append(listener)


class SettingsCache:
    """A cache of values by the identities of the settings that they were made of. It keeps the settings, so that no
    other object gets their identities.
    """

    #: Types of which nothing changes unnoticed.
    _constant = frozenset({"int", "float", "bool", "str", "NoneType", "dtype"})

    def __init__(self, size: int = 1024) -> None:
        self.size = size
        self._kept: dict[Any, tuple[Any, tuple[Any, ...]]] = {}
        #: Value and settings by a key that holds the identities of these; or None.
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
        """The value that ``make`` returns for these settings and whatever else is in ``key``. A recording of torch's is
        compared with the next one, so nothing is kept meanwhile, nor before it is known how to notice one.

        Settings that are all ``defaults``, as most are, are found by the key alone.
        """
        if not interop.tracers or interop.tracers[0]():
            return make()
        if defaults is None or not all(map(is_, settings, defaults)):
            key = (*key, *map(id, settings))
        found = self.get(key) or self.keep(key, make(), settings)
        return found[0]

    def keep(self, key: Any, made: Any, settings: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
        """Keeps what was made, unless of settings that may change; returns both."""
        found = made, settings
        if all([type(x).__name__ in self._constant for x in settings]):
            if len(self._kept) >= self.size:
                self._kept.clear()
            self._kept[key] = found
        return found


plans = PlanCache()

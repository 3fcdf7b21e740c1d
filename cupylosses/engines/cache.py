"""The one cache of plans."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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


plans = PlanCache()

"""Switches of the whole library."""

from __future__ import annotations

import threading
from typing import Any

_one_pass = True


def one_pass_enabled() -> bool:
    """Whether a reduced loss that needs gradients writes them while it computes the value."""
    return _one_pass


class set_one_pass:
    """Turns the one-pass gradient on or off, as a call or for the length of a ``with`` block.

    On (the default), the forward of a reduced loss also writes the gradients of operands that require them, and
    backward only checks them. Off, forward computes the value alone and backward the gradients: less memory between
    the two, and less work for those who call the loss with grad mode on and never go backward. Results are the same,
    bit for bit.
    """

    def __init__(self, enabled: bool) -> None:
        self._enabled, self._entered = bool(enabled), False
        with _lock:
            plain = [x for x in _settings if not x._entered]
            if len(plain) > _MAX_PLAIN:  # of calls only the last counts; the others may be blocks about to be entered
                _settings.remove(plain[0])
            _settings.append(self)
            _apply()

    def __enter__(self) -> None:
        self._entered = True

    def __exit__(self, *_: Any) -> None:
        with _lock:
            _settings.remove(self)
            _apply()


#: Settings in force, in the order in which they were made: calls, and blocks that have not been left. The last one
#: decides, so that blocks of several threads, or left out of order, end with what was set outside of all of them.
_settings: list[set_one_pass] = []
_MAX_PLAIN = 64
_lock = threading.Lock()


def _apply() -> None:
    global _one_pass
    _one_pass = _settings[-1]._enabled if _settings else True

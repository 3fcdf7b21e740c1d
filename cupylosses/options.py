"""Global options of the library."""

from __future__ import annotations

import threading
from typing import Any

_one_pass = True


def one_pass_enabled() -> bool:
    """True if the forward kernel of a reduced loss also writes the gradients that backward will need."""
    return _one_pass


class set_one_pass:
    """Turns the one-pass gradient on or off, as a plain call or for a ``with`` block.

    If on (the default), the forward pass of a reduced loss also writes the gradients of the operands that require them,
    speculating on a ``grad_output`` that backward then only checks. If off, forward computes only the value, backward
    the gradients. That takes less memory between the two, and less work in programs that call losses in grad mode but
    never run backward. Results are equal, bit for bit.

    Args:
        enabled: True turns the one-pass gradient on, False off.

    Example:
        >>> import cupylosses
        >>> with cupylosses.set_one_pass(False):
        ...     pass  # losses called here compute their gradients in backward
    """

    def __init__(self, enabled: bool) -> None:
        self._enabled, self._entered = bool(enabled), False
        with _lock:
            plain = [x for x in _settings if not x._entered]
            if len(plain) > _MAX_PLAIN:  # only the last plain call matters, but a block may be about to enter its own
                _settings.remove(plain[0])
            _settings.append(self)
            _apply()

    def __enter__(self) -> None:
        self._entered = True

    def __exit__(self, *_: Any) -> None:
        with _lock:
            _settings.remove(self)
            _apply()


#: Settings in force, in order of creation: plain calls, and blocks not yet left. The last one decides, so that after
#: blocks of several threads, or blocks left out of order, the setting made outside of all blocks is in force again.
_settings: list[set_one_pass] = []
_MAX_PLAIN = 64
_lock = threading.Lock()


def _apply() -> None:
    global _one_pass
    _one_pass = _settings[-1]._enabled if _settings else True

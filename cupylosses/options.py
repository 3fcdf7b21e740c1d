"""Switches of the whole library."""

from __future__ import annotations

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
        global _one_pass
        self._before = _one_pass
        _one_pass = bool(enabled)

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: Any) -> None:
        global _one_pass
        _one_pass = self._before

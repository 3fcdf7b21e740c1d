"""Losses of sequences whose alignment is unknown: connectionist temporal classification (CTC)."""

from cupylosses.engines.sequence.engine import SEQUENCE

__all__ = ["SEQUENCE"]

"""The definitions, one module per family. Importing this package enters them all in the registry."""

from cupylosses.losses import divergence, margin, regression

__all__ = ["divergence", "margin", "regression"]

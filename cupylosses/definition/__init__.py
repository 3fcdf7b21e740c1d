"""Definitions of losses: names, arguments, parameters, expressions. No array library, no CUDA, no compiler."""

"""Definitions of losses: names, arguments, expressions, documentation. No array library, CUDA or compiler."""

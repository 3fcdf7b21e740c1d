"""Losses of other libraries: the pairs of docs/migrating.md return the same, and presets have the published numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from tools import migrating
from tools.migrating import Pair, Section

SECTIONS = migrating.sections()
PAIRS = [
    pytest.param(section, pair, id=f"{section.title}-{number}")
    for section in SECTIONS
    for number, pair in enumerate(section.pairs)
]
#: Of a value, and of a gradient relative to its largest element. Some libraries compute in float32.
TOLERANCE = 1e-6


@pytest.fixture(scope="module")
def operands() -> Mapping[str, Any]:
    return migrating.operands()


@pytest.mark.parametrize(("section", "pair"), PAIRS)
def test_the_page_has_our_number(section: Section, pair: Pair, operands: Mapping[str, Any]) -> None:
    value, _ = migrating.evaluate(pair.here, operands)
    assert f"{value:.10f}" == f"{float(pair.returned):.10f}"
    assert abs(value - float(pair.returns)) < TOLERANCE


@pytest.mark.parametrize(("section", "pair"), PAIRS)
def test_the_library_returns_the_same(section: Section, pair: Pair, operands: Mapping[str, Any]) -> None:
    try:
        library = migrating.library(section)
    except ImportError as error:
        pytest.skip(str(error))
    value, _ = migrating.evaluate(pair.there, {**operands, **library})
    assert abs(value - float(pair.returns)) < TOLERANCE
    for names in (operands, migrating.random_operands(0)):
        value, gradients = migrating.evaluate(pair.there, {**names, **library})
        ours, ours_gradients = migrating.evaluate(pair.here, {**names, **library})
        assert abs(value - ours) < TOLERANCE
        assert gradients.keys() == ours_gradients.keys() and gradients
        for name, gradient in gradients.items():
            scale = gradient.abs().max().item()
            torch.testing.assert_close(ours_gradients[name], gradient, rtol=0, atol=TOLERANCE * scale, msg=name)

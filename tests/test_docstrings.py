"""Docstrings of functions and Modules: sections, arguments, and examples that run."""

from __future__ import annotations

import doctest
import inspect
import pydoc
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import cupylosses
import cupylosses.functional as F
from cupylosses import define_loss, nn
from cupylosses.definition.base import Definition, Operand, Parameter
from cupylosses.definition.docstring import WIDTH, docstring
from cupylosses.definition.example_results import RESULTS
from cupylosses.definition.registry import registry

FUNCTIONS = [getattr(F, name) for name in F.__all__]
LOSSES = [x for x in FUNCTIONS if x.__name__ in registry()]
MODULES = [nn.module_of(x) for x in LOSSES]
#: Public functions and classes whose docstrings are written by hand, with examples.
BY_HAND = [cupylosses.define_loss, cupylosses.patch_torch, cupylosses.set_one_pass, nn.module_of]

TITLES = ("Args", "Call", "Returns", "Gradient", "Raises", "Example", "References")

each_function = pytest.mark.parametrize("function", FUNCTIONS, ids=lambda x: x.__name__)
each_module = pytest.mark.parametrize("module", MODULES, ids=lambda x: x.__name__)


def sections(text: str) -> dict[str, list[str]]:
    """The lines of each section by title; the introduction has the title ""."""
    found: dict[str, list[str]] = {"": []}
    title = ""
    for line in inspect.cleandoc(text).splitlines():
        if re.fullmatch(r"[A-Z]\w+:", line):
            title = line[:-1]
            found[title] = []
        else:
            found[title].append(line)
    return found


def described(lines: list[str]) -> list[str]:
    """The names before the colons of a section's items; continuation lines are indented deeper."""
    items = [line for line in lines if re.match(r" {4}\S", line)]
    return [name for line in items for name in line.strip().partition(":")[0].split(", ")]


def arguments(function: Callable[..., Any]) -> set[str]:
    return set(inspect.signature(function).parameters) - {"self"}


def check_form(text: str, *, call: bool = False, references: bool = True) -> dict[str, list[str]]:
    """Checks the form of a docstring, and returns its sections.

    A summary of one line and an indented formula precede the sections, which are in order; no line is too long.
    """
    found = sections(text)
    absent = {"Call"} if not call else {"Args"} - set(found)  # a Module may have no options
    absent |= set() if references else {"References"}
    assert [*found] == ["", *(x for x in TITLES if x not in absent)]
    summary, empty, formula = found[""][:3]
    assert summary[0].isupper() and summary.endswith(".") and not empty and re.match(r" {4}\S", formula)
    assert all(len(line) <= WIDTH for line in text.splitlines())
    assert all(any(lines) for lines in found.values())
    assert not [line for line in text.splitlines() if line != line.rstrip()]
    return found


@each_function
def test_function_describes_its_arguments_and_nothing_else(function: Callable[..., Any]) -> None:
    names = described(check_form(function.__doc__)["Args"])
    assert len(names) == len(set(names)) and set(names) == arguments(function)


@each_module
def test_module_describes_its_arguments_and_nothing_else(module: type[torch.nn.Module]) -> None:
    found = check_form(module.__doc__, call=True)
    options, call = described(found.get("Args", [])), described(found["Call"])
    assert len(options) == len(set(options)) and set(options) == arguments(module)
    assert len(call) == len(set(call)) and set(call) == arguments(module.forward)


@each_function
def test_errors_are_exceptions(function: Callable[..., Any]) -> None:
    for name in described(sections(function.__doc__)["Raises"]):
        assert issubclass(pydoc.locate(name), Exception)


def run(text: str, name: str, scope: dict[str, Any] | None = None) -> int:
    """Runs the examples of a docstring, and returns how many statements there are."""
    test = doctest.DocTestParser().get_doctest(text, dict(scope or {}), name, None, 0)
    report: list[str] = []
    result = doctest.DocTestRunner().run(test, out=report.append)
    assert not result.failed, "".join(report)
    return result.attempted


@pytest.mark.parametrize("documented", [*FUNCTIONS, *MODULES, *BY_HAND], ids=lambda x: x.__name__)
def test_examples_run(documented: Any) -> None:
    assert run(documented.__doc__, documented.__name__) >= 2


@pytest.mark.parametrize("function", LOSSES, ids=lambda x: x.__name__)
def test_examples_show_the_value(function: Callable[..., Any]) -> None:
    assert f">>> round(loss.item(), 3)\n    {RESULTS[function.__name__]!r}\n" in function.__doc__
    assert set(RESULTS) == set(registry())


@pytest.mark.parametrize("documented", [*FUNCTIONS, *BY_HAND], ids=lambda x: x.__name__)
def test_summaries_name_their_subject(documented: Any) -> None:
    assert not re.match(r"(What|Whether|Where|Who|How|The same)\b", documented.__doc__)


# ----------------------------------------------------------------------------------------------------------------------
# Losses of users


def reference(xp: Any, input: Any, target: Any, gain: Any) -> Any:
    return gain * xp.abs(input - target)


def test_a_users_loss_has_the_same_form() -> None:
    loss = define_loss(
        "scaled_error",
        "gain * abs(input - target)",
        parameters=(Parameter("gain", 2.0, "Factor of the error.", minimum=0.0),),
        flags={"unused": False},
        reference=lambda xp, input, target, gain, unused: reference(xp, input, target, gain),
        convention="At input = target the gradient is 0.",
        source="An author, 1900.",
    )
    found = check_form(loss.__doc__)
    assert set(described(found["Args"])) == arguments(loss)
    assert "    gain: Factor of the error. Must be a number >= 0. Default 2.0." in found["Args"]
    assert run(loss.__doc__, "scaled_error", {"scaled_error": loss}) == 5
    module = nn.module_of(loss)
    found = check_form(module.__doc__, call=True)
    assert set(described(found["Args"])) == arguments(module)
    assert set(described(found["Call"])) == arguments(module.forward)
    assert run(module.__doc__, "ScaledErrorLoss", {"scaled_error": loss}) == 7


def test_without_a_reference_the_example_needs_a_gpu() -> None:
    found = check_form(define_loss("bare_error", "abs(input - target)").__doc__, references=False)
    assert 'device="cuda"' in "\n".join(found["Example"])
    assert "NotImplementedError" in described(found["Raises"])


def test_an_example_of_the_definition_is_taken() -> None:
    example = ">>> 1 + 1\n2\n"
    found = check_form(define_loss("two", "abs(input - target)", example=example).__doc__, references=False)
    assert [x.strip() for x in found["Example"] if x] == [">>> 1 + 1", "2"]


def test_domains_that_a_flag_decides_are_described() -> None:
    both = Operand("x", "A number.", domain=("log", {True: "log_probability", False: "probability"}))
    assert both.domain_text == "[-inf, 0] if `log` is True, [0, 1] if `log` is False"
    three = Operand("x", "A number.", domain=("full", {False: "real", True: "real", "exact": "positive"}))
    assert three.domain_text == "any number if `full` is False or True, (0, inf) if `full` is 'exact'"


def test_a_new_engine_is_documented_by_its_definition_alone() -> None:
    class Sequences(Definition):
        @property
        def errors(self) -> dict[str, str]:
            return {**super().errors, "IndexError": "A label is no token."}

    loss = Sequences(
        name="sequence_loss",
        summary="Loss of sequences.",
        formula="-log p",
        operands=(Operand("input", "The logits."), Operand("lengths", "The lengths.", domain="positive")),
        parameters=(Parameter("blank", 0.0, "Label of the blank."),),
        source="An author, 1900.",
    )
    # Common arguments without a text are an error of the engine's definition, not a gap in the docstring.
    with pytest.raises(KeyError, match="weight"):
        docstring(loss)

    class Complete(Sequences):
        @property
        def common(self) -> dict[str, Any]:
            return {"reduction": "mean", "normalizer": None, "out_dtype": None}

        shipped = False

    fields = ("name", "summary", "formula", "operands", "parameters", "source")
    complete = Complete(**{x: getattr(loss, x) for x in fields})
    found = check_form(docstring(complete))
    names = ["input", "lengths", "blank", "reduction", "normalizer", "out_dtype"]
    assert described(found["Args"]) == names
    assert described(found["Raises"])[-1] == "IndexError"

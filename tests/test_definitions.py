"""The rules for definitions, and the registry, signatures and docstrings derived from them."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

import cupylosses.functional as F
from cupylosses.definition import registry as definitions
from cupylosses.definition.base import COMMON, DOMAINS, MAX_OWN_OPERANDS, RESERVED, Flag, Kink, Operand, Parameter
from cupylosses.definition.docstring import docstring
from cupylosses.definition.registry import functions, registry
from cupylosses.engines.pointwise import definition as pointwise_definition
from cupylosses.engines.pointwise.definition import Loss

A, B = Operand("a", "First."), Operand("b", "Second.")


def make(**changes: Any) -> Loss:
    """A definition that is right except for ``changes``; it does not enter the registry."""
    fields: dict[str, Any] = {
        "name": "example",
        "summary": "An example.",
        "formula": "a - b",
        "operands": (A, B),
        "value": "a - b",
        "reference": lambda xp, a, b: a - b,
    }
    return Loss(**fields | changes)


def test_example_is_valid() -> None:
    common = [x for x in COMMON.items() if x[0] != "reduction"]
    assert make().arguments == (("a", ...), ("b", ...), ("reduction", "mean"), ("*", ...), *common)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "no-dash"}, "'no-dash' must be an identifier of Python and of C"),
        ({"name": "lambda"}, "'lambda' must be an identifier of Python and of C"),
        ({"name": "größe"}, "'größe' must be an identifier of Python and of C"),
        ({"operands": (Operand("1st", ""), B)}, "'1st' must be an identifier of Python and of C"),
        ({"let": {"in": "a"}}, "'in' must be an identifier of Python and of C"),
        ({"let": {"double": "a"}}, "'double' must be an identifier of Python and of C"),
        ({"let": {"a_": "a"}}, "the name 'a_' must not begin or end with an underscore"),
        ({"let": {"a__b": "a"}}, "the name 'a__b' must not .*, nor have two in a row"),
        ({"let": {"exp": "a"}}, "the name 'exp' is that of a primitive"),
        *[({"operands": (Operand(name, ""), B)}, f"the name '{name}' is taken") for name in sorted(RESERVED)],
        ({"parameters": (Parameter("reduction", 1.0, ""),)}, "the name 'reduction' is taken"),
        ({"operands": (A, A)}, "must differ"),
        ({"parameters": (Parameter("a", 1.0, ""),)}, "must differ"),
        ({"flags": (Flag("b", True, ""),)}, "must differ"),
        ({"let": {"a": "b"}}, "must differ"),
        ({"constants": {"a": "1"}}, "must differ"),
        ({"constants": {"c": "2 * a"}}, "c: the name `a` is unknown"),
        ({"constants": {"c": "exp(2)"}}, "`exp` cannot be called here"),
        ({"operands": ()}, f"1 to {MAX_OWN_OPERANDS} operands, got 0"),
        (
            {"operands": tuple(Operand(f"x{i}", "") for i in range(MAX_OWN_OPERANDS + 1))},
            f"1 to {MAX_OWN_OPERANDS} operands, got {MAX_OWN_OPERANDS + 1}",
        ),
        ({"operands": (Operand("a", "", default=1.0), B)}, "the first operand, `a`, must not have a default"),
        ({"parameters": (Parameter("p", -1.0, "", minimum=0.0),)}, "default of `p` must be a number >= 0, got -1.0"),
        (
            {"parameters": (Parameter("p", 0.0, "", minimum=0.0, exclusive=True),)},
            "default of `p` must be a number > 0, got 0.0",
        ),
        ({"parameters": (Parameter("p", float("nan"), ""),)}, "default of `p` must be a number, not NaN, got nan"),
        (
            {"parameters": (Parameter("p", 2.0, "", minimum=0.0, maximum=1.0),)},
            "default of `p` must be a number >= 0 and <= 1, got 2.0",
        ),
        ({"flags": (Flag("f", "full", "", (False, True)),)}, r"default of `f` must be one of \(False, True\)"),
        ({"operands": (Operand("a", "", domain="reals"), B)}, "domain of `a` must be one of .*, got 'reals'"),
        (
            {
                "operands": (Operand("a", "", domain=("f", {True: "real", False: "odd"})), B),
                "flags": (Flag("f", True, ""),),
            },
            "domain of `a` must be one of .*, got 'odd'",
        ),
        ({"cases": ({"beta": 1.0},)}, "a case names the unknown parameter 'beta'"),
        ({"derivatives": {"c": "1"}}, "a derivative for 'c', which is no operand"),
        ({"positional": "a b c"}, "`positional` names the unknown argument 'c'"),
    ],
    ids=lambda x: "" if isinstance(x, dict) else x[:40],
)
def test_invalid_definitions_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        make(**changes)
    assert str(error.value).startswith(changes.get("name", "example"))


def test_a_name_is_defined_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(definitions, "_registry", dict(registry()))
    fields = {"summary": "", "formula": "", "operands": (A,), "value": "a", "reference": lambda xp, a: a}
    made = pointwise_definition.define(name="brand_new", **fields)
    assert registry()["brand_new"] is made
    with pytest.raises(ValueError, match="'brand_new' is defined already"):
        pointwise_definition.define(name="brand_new", **fields)


def test_registry_is_by_name_and_public() -> None:
    assert all(name == loss.name for name, loss in registry(Loss).items())
    assert [*registry(), *functions()] == F.__all__
    assert all(getattr(F, name).loss is loss for name, loss in registry(Loss).items())


def test_the_founding_losses_are_there() -> None:
    assert {"mse_loss", "smooth_l1_loss", "kl_div", "hinge_loss", "l1_loss", "huber_loss"} <= set(registry(Loss))


# ----------------------------------------------------------------------------------------------------------------------
# Declarations of a definition


@pytest.mark.parametrize(
    ("parameter", "accepted", "refused"),
    [
        (Parameter("p", 1.0, ""), [-1e300, 0.0, float("inf"), -float("inf")], [float("nan")]),
        (Parameter("p", 1.0, "", minimum=0.0), [0.0, -0.0, 1e-300, float("inf")], [-1e-300, float("nan")]),
        (Parameter("p", 1.0, "", minimum=0.0, exclusive=True), [1e-300, float("inf")], [0.0, -1.0, float("nan")]),
        (Parameter("p", 1.0, "", maximum=1.0), [-float("inf"), 1.0], [1.0 + 1e-15, float("inf"), float("nan")]),
        (Parameter("p", 0.5, "", 0.0, 1.0, exclusive=True), [1e-300, 0.999], [0.0, 1.0, float("nan")]),
    ],
    ids=["any", "at least", "more than", "at most", "between"],
)
def test_parameter_ranges(parameter: Parameter, accepted: list[float], refused: list[float]) -> None:
    assert all(parameter.accepts(x) for x in accepted)
    assert not any(parameter.accepts(x) for x in refused)


def test_domain_follows_its_flag() -> None:
    operand = Operand("x", "", domain=("log", {True: "log_probability", False: "probability"}))
    assert operand.domain_for({"log": True}) == "log_probability"
    assert operand.domain_for({"log": False}) == "probability"
    assert A.domain_for({}) == "real"


def test_cases_are_complete_and_in_range(loss: Loss) -> None:
    assert loss.cases[0] == {}, "the defaults come first"
    for case in loss.cases:
        values = loss.values(case)
        assert set(values) == {x.name for x in (*loss.parameters, *loss.flags)}
        assert all(x.accepts(values[x.name]) for x in loss.parameters)
        for operand in loss.operands:
            assert operand.domain_for(values) in DOMAINS


def test_kinks_have_one_entry_per_operand(loss: Loss) -> None:
    for case in loss.cases:
        for kink in loss.kinks(**loss.values(case)):
            assert isinstance(kink, Kink)
            assert len(kink.operands) == len(kink.gradient) == len(loss.operands)


def test_definitions_explain_themselves(loss: Loss) -> None:
    assert loss.summary.endswith(".")
    assert loss.formula and loss.source and loss.convention.endswith(".")
    for x in (*loss.operands, *loss.parameters, *loss.flags):
        assert x.doc.endswith("."), x.name


# ----------------------------------------------------------------------------------------------------------------------
# The function


def test_signature_is_the_definitions(loss: Loss) -> None:
    found = list(inspect.signature(getattr(F, loss.name)).parameters.values())
    empty, keyword = inspect.Parameter.empty, inspect.Parameter.KEYWORD_ONLY
    names = [x for x, _ in loss.arguments]
    assert [(x.name, ... if x.default is empty else x.default) for x in found] == [
        x for x in loss.arguments if x[0] != "*"
    ]
    assert [x.name for x in found if x.kind is keyword] == names[names.index("*") + 1 :]
    assert set(COMMON) <= set(names)


def test_signature_is_torchs_for_twins(loss: Loss) -> None:
    """Names, order and defaults are torch's; older releases lack some weights, and our additions are keyword-only."""
    if not loss.torch:
        assert not hasattr(torch.nn.functional, loss.name), "torch has it: name the twin in the definition"
        return
    ours = inspect.signature(getattr(F, loss.name)).parameters
    torchs = inspect.signature(getattr(torch.nn.functional, loss.torch)).parameters
    positional = [x.name for x in ours.values() if x.kind is not inspect.Parameter.KEYWORD_ONLY]
    assert [name for name in positional if name in torchs] == list(torchs)
    assert set(positional) - set(torchs) <= {"weight"}
    for name in torchs:
        assert ours[name].default == torchs[name].default, name
        assert ours[name].kind == torchs[name].kind, name


def test_docstring_says_everything(loss: Loss) -> None:
    function = getattr(F, loss.name)
    text = inspect.getdoc(function)
    assert text == inspect.cleandoc(docstring(loss))
    assert text.startswith(loss.summary)
    words = " ".join(text.split())
    for part in (loss.formula, loss.convention, loss.notes, loss.source, *(repr(r) for r in loss.reductions)):
        assert " ".join(part.split()) in words
    assert function.__module__ == "cupylosses.functional"
    assert function.__name__ == function.__qualname__ == loss.name

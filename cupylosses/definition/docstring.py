"""Docstrings of functions and Modules from a definition, in Google style.

Summary, formula and notes come first, then the sections Args, Returns, Gradient, Raises, Example and References. A
Module has the section Call after Args. Texts that differ between engines are properties of the definitions.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from cupylosses.definition.base import LEGACY, Definition
from cupylosses.definition.example_results import RESULTS

#: Maximum number of characters of a line. The type stub indents functions by four more.
WIDTH = 116

_LEGACY_TEXT = "torch's deprecated arguments; they warn and decide the reduction."


def docstring(loss: Definition) -> str:
    """Docstring of the public function of a loss."""
    names = [name for name, _ in loss.arguments if name != "*"]
    twin = f"Drop-in replacement for ``torch.nn.functional.{loss.torch}``." if loss.torch else ""
    return _joined(
        [
            *_introduction(loss, twin),
            _section("Args", _arguments(loss, names)),
            *_shared_sections(loss, _function_example(loss)),
        ]
    )


def module_docstring(loss: Definition, function: str, options: Sequence[str], twin: str | None) -> str:
    """Docstring of the Module of a loss.

    Args:
        loss: The definition.
        function: Full name of the function that the Module calls.
        options: Names of the arguments of the constructor.
        twin: Full name of the class in torch that the Module inherits from, if there is one.
    """
    of_twin = f" A ``{twin}``, with its constructor." if twin else ""
    operands = loss.called_with
    overrides = [x for x in loss.keywords if x in options]
    call = _arguments(loss, [*operands, *(x for x in loss.keywords if x not in options)])
    for name in overrides:
        call += _item(name, "Overrides the option of the constructor for this call, unless None.")
    return _joined(
        [
            *_introduction(loss, f"Module of ``{function}``.{of_twin}"),
            *([_section("Args", _arguments(loss, options))] if options else []),
            _section("Call", call),
            *_shared_sections(loss, _module_example(loss)),
        ]
    )


def _introduction(loss: Definition, closing: str) -> Iterator[str]:
    """Summary, formula, symbols of the formula, notes and a closing paragraph."""
    yield loss.summary
    yield "\n".join(_wrapped(loss.formula, "    "))
    for text in (loss.symbols, loss.notes, closing):
        if text:
            yield "\n".join(_wrapped(text, ""))


def _shared_sections(loss: Definition, example: Iterable[str]) -> Iterator[str]:
    """The sections that a function and its Module share."""
    yield _section("Returns", _wrapped(loss.result_text, "    "))
    yield _section("Gradient", _wrapped(loss.gradient_text, "    "))
    yield _section("Raises", [line for error, text in loss.errors.items() for line in _item(error, text)])
    yield _section("Example", [f"    {line}".rstrip() for line in example])
    if loss.source:
        sources = [f"{x.rstrip('.')}." for x in loss.source.split("; ")]
        yield _section("References", [line for x in sources for line in _wrapped(x, "    ", "        ")])


def _section(title: str, lines: Iterable[str]) -> str:
    return "\n".join([f"{title}:", *lines])


def _joined(paragraphs: Iterable[str]) -> str:
    return "\n\n".join(paragraphs) + "\n"


def _item(name: str, text: str) -> list[str]:
    return _wrapped(f"{name}: {text}", "    ", "        ")


def _wrapped(text: str, first: str, following: str | None = None) -> list[str]:
    """Wraps a paragraph. Importing the library builds every docstring, and :mod:`textwrap` is ten times slower."""
    lines, line = [], first
    following = first if following is None else following
    margin = first
    for word in text.split():
        if len(line) + len(word) >= WIDTH and line != margin:
            lines.append(line)
            line = margin = following
        line += word if line == margin else f" {word}"
    return [*lines, line]


# ----------------------------------------------------------------------------------------------------------------------
# Arguments


def _arguments(loss: Definition, names: Collection[str]) -> list[str]:
    """Lines of one item per argument, in order; torch's deprecated arguments share the last item."""
    texts = _texts(loss)
    lines = [line for name in names if name not in LEGACY for line in _item(name, texts[name])]
    legacy = [name for name in names if name in LEGACY]
    return [*lines, *(_item(", ".join(legacy), _LEGACY_TEXT) if legacy else [])]


def _texts(loss: Definition) -> Mapping[str, str]:
    """Description of each argument by name, with its default."""
    arguments = (*loss.arguments, *loss.layer.items())
    defaults = {name: loss.default_text(name, x) for name, x in arguments}
    texts = {name: f"{text}{defaults.get(name, '')}" for name, text in loss.common_texts.items()}
    if "reduction" in defaults:
        accepted = f"One of {', '.join(map(repr, loss.reductions))}; see Returns."
        texts["reduction"] = f"{accepted}{defaults['reduction']}"
    texts |= {x.name: loss.describe_operand(x) for x in loss.operands}
    texts |= {x.name: f"{x.doc} Must be {x.requirement}.{defaults[x.name]}" for x in loss.parameters}
    for flag in loss.flags:
        choices = "" if flag.choices == (False, True) else f" One of {', '.join(map(repr, flag.choices))}."
        texts[flag.name] = f"{flag.doc}{choices}{defaults[flag.name]}"
    return texts


# ----------------------------------------------------------------------------------------------------------------------
# Examples


def _function_example(loss: Definition) -> list[str]:
    """Lines of an example call with small operands.

    Only the library's own losses show the result, which is computed in advance.
    """
    if loss.example:
        return loss.example.splitlines()
    name, library = loss.name, []
    if loss.shipped:
        name, library = f"F.{loss.name}", [">>> import cupylosses.functional as F"]
    return [">>> import torch", *library, *_evaluated(loss, name)]


def _module_example(loss: Definition) -> list[str]:
    """Lines of an example call through the Module, with the default options."""
    library, criterion = ">>> from cupylosses.nn import module_of", f"module_of({loss.name})"
    if loss.shipped:
        library, criterion = ">>> from cupylosses import nn", f"nn.{loss.class_name}"
    if loss.layer:
        return [
            ">>> import torch",
            library,
            f">>> criterion = {criterion}(in_features=16, num_classes=1000)",
            ">>> hidden, labels = torch.randn(8, 16), torch.randint(1000, (8,))",
            ">>> loss = criterion(hidden, labels)",
            ">>> loss.backward()  # criterion.linear.weight.grad holds the gradient",
        ]
    return [">>> import torch", library, f">>> criterion = {criterion}()", *_evaluated(loss, "criterion")]


def _evaluated(loss: Definition, function: str) -> list[str]:
    """Lines that create the operands, compute the value and run backward."""
    device = "" if loss.runs_on_cpu else ', device="cuda"'
    operands = loss.example_operands
    gradient = ", requires_grad=True"
    lines = []
    for name, x in operands.items():
        lines.append(f">>> {name} = torch.tensor({_listed(x)}{gradient}{device})")
        gradient = ""
    lines.append(f">>> loss = {function}({', '.join(operands)})")
    if loss.shipped and loss.name in RESULTS:
        lines += [">>> round(loss.item(), 3)", repr(RESULTS[loss.name])]
    return [*lines, f">>> loss.backward()  # {next(iter(operands))}.grad holds the gradient"]


def _listed(x: Any) -> str:
    """Source text of nested sequences of numbers, as lists."""
    return f"[{', '.join(map(_listed, x))}]" if isinstance(x, Sequence) else repr(x)

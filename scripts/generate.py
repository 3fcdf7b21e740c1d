"""Write the files that are derived from the definitions.

    python scripts/generate.py            writes them
    python scripts/generate.py --check    writes nothing, and exits with 1 if one of them is stale

They are the type stubs, the values of documented examples, the tables of the documents, and the generated parts of
example kernels (tests/golden), which show a reviewer what a change of the code generator does.
"""

from __future__ import annotations

import argparse
import ast
import csv
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from textwrap import indent
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import numpy
from tools.mutants import MUTANTS, OUTSIDE
from tools.variants import variants

from cupylosses import functional
from cupylosses.definition import expressions
from cupylosses.definition.base import REDUCTIONS, Definition
from cupylosses.definition.docstring import docstring, module_docstring
from cupylosses.definition.example_results import RESULTS
from cupylosses.definition.registry import functions, registry
from cupylosses.engines.boxes.definition import BoxLoss
from cupylosses.engines.linear_softmax.definition import LinearSoftmaxLoss
from cupylosses.engines.pointwise.codegen import PointwiseKernel
from cupylosses.engines.pointwise.definition import Loss
from cupylosses.engines.regions.definition import RegionLoss
from cupylosses.engines.row_margin.definition import MarginLoss
from cupylosses.engines.row_statistics.definition import StatisticsLoss
from cupylosses.engines.sequence import definition as sequence_definition
from cupylosses.engines.sequence.definition import SequenceLoss
from cupylosses.engines.softmax import definition as softmax_definition
from cupylosses.engines.softmax.definition import SoftmaxLoss
from cupylosses.jit.kernel import Kernel

RESULTS_HEAD = '''\
"""Values of the documented examples, by name of the loss. Written by scripts/generate.py; do not edit."""

RESULTS: dict[str, float] = {
'''


def example_results() -> str:
    """``example_results.py``: the value of each documented example, computed with NumPy so that torch is not needed.

    Updates ``RESULTS`` too, which the docstrings generated afterwards quote.
    """
    for loss in definitions():
        operands = [numpy.asarray(x, numpy.float32 if is_floating(x) else None) for x in loss.example_operands.values()]
        RESULTS[loss.name] = round(float(getattr(functional, loss.name)(*operands)), 3)
    return RESULTS_HEAD + "".join(f'    "{x.name}": {RESULTS[x.name]!r},\n' for x in definitions()) + "}\n"


def is_floating(x: Any) -> bool:
    """True if ``x`` is a float, or a nested sequence that contains one."""
    return any(map(is_floating, x)) if isinstance(x, Sequence) else isinstance(x, float)


STUB_HEAD = '''\
"""The functions as editors and type checkers see them. Written by scripts/generate.py; do not edit."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol, TypeVar, overload

from cupylosses.engines.log_probs.call import TokenLogProbs
from cupylosses.engines.sequence.alignment import CtcAlignment
from cupylosses.engines.softmax.call import RowResult

class _Exchangeable(Protocol):
    """A torch tensor, a CuPy array, a NumPy array, or what else gives its memory through DLPack."""

    def __dlpack__(self, *, stream: Any = ...) -> Any: ...

_Array = TypeVar("_Array", bound=_Exchangeable)

__all__: list[str]

_Reduction = Literal[REDUCTIONS]
_RowReduction = Literal[ROWS]
_SequenceReduction = Literal[SEQUENCES]
_Check = Literal[CHECKS]

'''


def stub() -> str:
    """``functional.pyi``: a typed signature and the docstring of each function."""
    head = with_literals(STUB_HEAD)
    return head + "".join(map(stub_function, (*definitions(), *functions().values()))).rstrip("\n") + "\n"


def with_literals(head: str) -> str:
    """Replaces each placeholder in ``head`` with the allowed string values of its argument."""
    for name, words in {
        "REDUCTIONS": REDUCTIONS,
        "ROWS": softmax_definition.REDUCTIONS,
        "SEQUENCES": sequence_definition.REDUCTIONS,
        "CHECKS": softmax_definition.CHECKS,
    }.items():
        head = head.replace(f"[{name}]", f"[{', '.join(map(quoted, words))}]")
    return head


def definitions() -> Iterator[Definition]:
    """The definitions, in the order of the public names."""
    yield from registry().values()


NN_HEAD = '''\
"""The modules as editors and type checkers see them. Written by scripts/generate.py; do not edit."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, overload

import torch

from cupylosses.engines.softmax.call import RowResult

_Reduction = Literal[REDUCTIONS]
_RowReduction = Literal[ROWS]
_SequenceReduction = Literal[SEQUENCES]
_Check = Literal[CHECKS]

__all__: list[str]

def module_of(function: Callable[..., Any]) -> type[torch.nn.Module]: ...
'''


def nn_stub() -> str:
    """``nn.pyi``: a class for each loss; subclasses of torch's loss Modules inherit their constructors."""
    head = with_literals(NN_HEAD)
    return head + "".join(f"\n{stub_class(x)}" for x in definitions())


def stub_class(loss: Definition) -> str:
    name = loss.class_name
    base = f"torch.nn.{name}" if loss.torch and loss.module and not loss.layer else "torch.nn.Module"
    if base != "torch.nn.Module":
        # torch's class declares the constructor. Its arguments cannot be read here: pre-commit runs this without torch.
        lines = [f"class {name}({base}):", f'    """{loss.summary}"""', ""]
    else:
        given = {**loss.layer, **loss.kept}
        text = indent(
            f'"""{module_docstring(loss, f"cupylosses.functional.{loss.name}", list(given), None)}"""', "    "
        )
        lines = [f"class {name}({base}):", text, ""]
        first = [x for x in given if (given[x] is ... if loss.layer else x not in loss.keywords)]
        rest = [x for x in given if x not in first]
        arguments = [*first, *["*"] * bool(rest), *rest]
        lines += ["    def __init__(", "        self,"]
        lines += [
            "        *," if x == "*" else f"        {x}: {of_torch(loss, x)}{default(given[x])}," for x in arguments
        ]
        lines += ["    ) -> None: ..."]
    return "\n".join([*lines, *stub_forward(loss, base)]) + "\n"


def stub_forward(loss: Definition, base: str) -> list[str]:
    """Lines of ``forward``, overloaded on the type of its result if options add results."""

    def signature(result: str, chosen: Mapping[str, str]) -> list[str]:
        operands = [f"        {x}: {of_torch(loss, x)}," for x in loss.called_with]
        keywords = {x: chosen.get(x, f"{or_none(of_torch(loss, x))} = None") for x in loss.keywords}
        rest = [f"        {name}: {kind}," for name, kind in keywords.items()]
        return ["    def forward(", "        self,", *operands, "        *,", *rest, f"    ) -> {result}: ..."]

    asked = [x for x in ASKED if x in loss.common]
    if not asked:
        return signature("torch.Tensor", {})
    # A call that omits an option uses the constructor's value.
    plain = "Literal[False]" if base == "torch.nn.Module" else "Literal[False] | None = None"
    variants = [("torch.Tensor", dict.fromkeys(asked, plain))]
    variants += [(ASKED[x], {x: "Literal[True]"}) for x in asked]
    variants += [("torch.Tensor | RowResult", {})]
    return [line for variant in variants for line in ("    @overload", *signature(*variant))]


def of_torch(loss: Definition, name: str) -> str:
    """The annotation of a Module's argument, with arrays as tensors."""
    return loss.annotation(name).replace("_Array", "torch.Tensor").replace("_Exchangeable", "torch.Tensor")


def or_none(kind: str) -> str:
    """The annotation of an optional argument."""
    return kind if kind == "Any" or kind.endswith("None") else f"{kind} | None"


#: Options that add results, and the named tuple that a loss returns with each of them.
ASKED = {"return_lse": "RowResult", "return_accuracy": "RowResult", "return_entropy": "TokenLogProbs"}


def stub_function(loss: Definition) -> str:
    """The stub of a function, overloaded on the type of its result if options add results.

    Only the first overload has the docstring. As a formatter requires, a blank line follows a docstring, and none
    follows an ellipsis.
    """
    text = indent(f'"""{docstring(loss)}"""', "    ") + "\n"
    asked = [x for x in ASKED if x in loss.common]
    if not asked:
        return f"{stub_signature(loss, loss.result_type, {})}:\n{text}\n"
    plain = stub_signature(loss, "_Array", dict.fromkeys(asked, "Literal[False] = False"))
    others = [stub_signature(loss, ASKED[x], {x: "Literal[True]"}) for x in asked]
    others.append(stub_signature(loss, f"_Array | {ASKED[asked[0]]}", {}))
    return f"@overload\n{plain}:\n{text}\n" + "".join(f"@overload\n{x}: ...\n" for x in others)


def stub_signature(loss: Definition, result: str, chosen: Mapping[str, str]) -> str:
    """The signature up to the colon; ``chosen`` overrides the annotation and default of some arguments."""
    arguments = [
        f"    {name}: {chosen.get(name, loss.annotation(name) + default(value))},\n" if name != "*" else "    *,\n"
        for name, value in loss.arguments
    ]
    return f"def {loss.name}(\n{''.join(arguments)}) -> {result}"


def default(value: Any) -> str:
    if value is ...:
        return ""
    return f" = {quoted(value) if isinstance(value, str) else repr(value)}"


def quoted(text: str) -> str:
    return f'"{text}"'


def losses() -> str:
    """The README's table of element-wise losses."""
    rows = []
    for loss in registry(Loss).values():
        own = [f"`{x.name}={x.default:g}`" for x in loss.operands if x.default is not None]
        own += [f"`{x.name}={x.default!r}`" for x in loss.options]
        twin = "yes" if loss.torch else ""
        rows.append([f"`{loss.name}`", f"`{loss.formula}`", " ".join(own), twin])
    return table(["function", "value of an element", "options of its own", "in torch"], rows)


def row_losses() -> str:
    """The README's table of losses of rows."""
    rows = []
    for loss in registry(SoftmaxLoss).values():
        plain = {"mask", "normalizer", "out_dtype", "reduction", "class_dim"}
        own = [f"`{x.name}={x.default!r}`" for x in loss.options]
        own += [f"`{name}={x!r}`" for name, x in loss.common.items() if name not in plain]
        rows.append([f"`{loss.name}`", f"`{loss.formula}`", " ".join(own), "yes" if loss.torch else ""])
    return table(["function", "value of a row", "options of its own", "in torch"], rows)


def vector_losses() -> str:
    """The README's table of losses of vectors."""
    rows = []
    for loss in registry(StatisticsLoss).values():
        own = [f"`{x.name}={x.default!r}`" for x in loss.options]
        rows.append([f"`{loss.name}`", f"`{loss.formula}`", " ".join(own), "yes" if loss.torch else ""])
    return table(["function", "value of a row", "options of its own", "in torch"], rows)


def sequence_losses() -> str:
    """The README's table of losses of sequences."""
    rows = []
    for loss in registry(SequenceLoss).values():
        plain = {"mask", "normalizer", "out_dtype", "reduction", "weight"}
        own = [f"`{name}={x!r}`" for name, x in loss.common.items() if name not in plain]
        rows.append([f"`{loss.name}`", f"`{loss.formula}`", " ".join(own), "yes" if loss.torch else ""])
    return table(["function", "value of a sample", "options of its own", "in torch"], rows)


def box_losses() -> str:
    """The README's table of losses of boxes."""
    rows = []
    for loss in registry(BoxLoss).values():
        own = [f"`{x.name}={x.default!r}`" for x in loss.options]
        rows.append([f"`{loss.name}`", f"`{loss.formula}`", " ".join(own)])
    return table(["function", "value of a pair of boxes", "options of its own"], rows)


def margin_losses() -> str:
    """The README's table of margin losses: losses of rows of scores that the labels' scores should exceed."""
    rows = []
    for loss in registry(MarginLoss).values():
        own = [f"`{x.name}={x.default!r}`" for x in loss.options]
        rows.append([f"`{loss.name}`", f"`{loss.formula}`", " ".join(own), "yes" if loss.torch else ""])
    return table(["function", "value of a row", "options of its own", "in torch"], rows)


def region_losses() -> str:
    """The README's table of losses of regions."""
    rows = []
    for loss in registry(RegionLoss).values():
        rows.append([f"`{loss.name}`", f"`{loss.formula}`", " ".join([f"`{x}`" for x in loss.presets])])
    return table(["function", "value", "presets"], rows)


def layer_losses() -> str:
    """The README's table of losses of a linear layer."""
    rows = []
    for loss in registry(LinearSoftmaxLoss).values():
        base = loss.of_logits.common
        own = [f"`{name}={x!r}`" for name, x in loss.common.items() if name not in base and name != "options"]
        rows.append([f"`{loss.name}`", f"`{loss.formula}`", " ".join(own), "yes" if loss.torch else ""])
    return table(["function", "value of a row", "options beside those of the logits' loss", "in torch"], rows)


def other_functions() -> str:
    """The README's table of functions that are not losses."""
    rows = [[f"`{x.name}`", f"`{x.formula}`", "yes" if x.torch else ""] for x in functions().values()]
    return table(["function", "value", "in torch"], rows)


def primitives() -> str:
    """The table of functions that a value expression may use, with the comments from their source."""
    rows = [
        [f"`{x.name}({', '.join(x.parameters)})`", x.comment or "differentiable wherever it is defined"]
        for x in expressions.primitives().values()
    ]
    return table(["primitive", "meaning, and the convention at kinks"], rows)


def mutants() -> str:
    """The table of seeded defects and the checks that must catch them."""
    where = {MUTANTS: "", OUTSIDE: " (AddressSanitizer)"}
    rows = [[x.name, f"`{x.file}`", "; ".join(x.caught_by) + tool] for xs, tool in where.items() for x in xs]
    return table(["defect", "in", "caught by"], rows)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


def between(text: str, name: str, content: str) -> str:
    """Replaces everything between the markers ``<!-- name -->`` and ``<!-- end of name -->`` by ``content``."""
    start, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
    if text.count(start) != 1 or text.count(end) != 1:
        raise ValueError(f"expected the markers {start.strip()} and {end} once each")
    head, rest = text.split(start)
    return f"{head}{start}\n{content}\n{end}{rest.split(end)[1]}"


#: The results of `scripts/transforms.py`, and the file that defines the transforms.
OUTCOMES = ROOT / "docs" / "transforms.csv"
TRANSFORMS = ROOT / "tests" / "tools" / "transforms.py"


#: The kinds of losses besides element-wise ones, as columns of the table of transforms.
KINDS: Mapping[str, type[Definition]] = {
    "Losses of rows": SoftmaxLoss,
    "Margin losses of rows": MarginLoss,
    "Losses of vectors": StatisticsLoss,
    "Losses of boxes": BoxLoss,
    "Losses of regions": RegionLoss,
    "Losses of sequences": SequenceLoss,
    "Losses of a linear layer": LinearSoftmaxLoss,
}


def transforms() -> str:
    """The table of docs/transforms.md: each transform, its summary, GPU or host, and the losses that it works with."""
    with OUTCOMES.open(encoding="utf-8", newline="") as file:
        found = list(csv.DictReader(file))
    rows = []
    for name, summary in tried():
        outcomes = [x for x in found if x["transform"] == name]
        where = " and ".join(sorted({x["where"] for x in outcomes if x["loss"] in registry(Loss)}))
        others = [
            works(outcomes, losses) if any(x["loss"] in losses for x in outcomes) else ""
            for losses in map(registry, KINDS.values())
        ]
        rows.append((name, summary, works(outcomes, registry(Loss)), where, *others))
    head = ("What", "Tried", "Losses", "Where", *KINDS)
    return table(head, rows)


def works(outcomes: Sequence[Mapping[str, str]], losses: Mapping[str, Definition]) -> str:
    """A table cell: `all`, or the losses without a successful outcome."""
    wrong = [x["loss"] for x in outcomes if x["loss"] in losses and x["outcome"] != "works"]
    wrong += [x for x in losses if x not in {y["loss"] for y in outcomes}]
    return f"all but {', '.join(f'`{x}`' for x in dict.fromkeys(wrong))}" if wrong else "all"


def tried() -> Iterator[tuple[str, str]]:
    """Names and summary lines of the transforms, parsed from the source because an import would need torch."""
    for node in ast.parse(TRANSFORMS.read_text(encoding="utf-8")).body:
        decorators = node.decorator_list if isinstance(node, ast.FunctionDef) else []
        for x in decorators:
            if isinstance(x, ast.Call) and ast.unparse(x.func) == "transform":
                yield ast.literal_eval(x.args[0]), (ast.get_docstring(node) or "").partition("\n")[0]


#: Documents with generated parts: for each pair of markers, the function that generates the text between them.
PARTS: Mapping[str, Mapping[str, Callable[[], str]]] = {
    "README.md": {
        "losses": losses,
        "losses of rows": row_losses,
        "losses of vectors": vector_losses,
        "losses of margins": margin_losses,
        "losses of boxes": box_losses,
        "losses of sequences": sequence_losses,
        "losses of regions": region_losses,
        "losses of layers": layer_losses,
        "other functions": other_functions,
    },
    "docs/adding-a-loss.md": {"primitives": primitives},
    "docs/mutations.md": {"mutants": mutants},
    "docs/transforms.md": {"transforms": transforms},
}


#: The element-wise losses of the example kernels: the shortest definition, and one with flags and helper expressions.
PLAIN, RICH = "mse_loss", "kl_div"


def examples() -> list[PointwiseKernel]:
    """One element-wise kernel per entry point: contiguous float32 for `PLAIN`, broadcast bfloat16 for `RICH`."""
    plain = {x.kind: x for x in reversed(variants(registry(Loss)[PLAIN], fast=True))}
    rich = {x.kind: x for x in variants(registry(Loss)[RICH], fast=True)}
    return [*plain.values(), *rich.values()]


#: The losses of rows of the example kernels: one with class indices, and one with dense targets.
INDICES, DENSE = "cross_entropy", "distillation_loss"


def row_examples() -> list[Kernel]:
    """One kernel of rows per entry point and one per row layout, for class indices and for dense targets."""
    found: dict[tuple[str, str, str], Kernel] = {}
    for name, indices in ((INDICES, True), (DENSE, False)):
        for x in variants(registry(SoftmaxLoss)[name]):
            if x.indices is indices:
                found.setdefault((name, "entry point", x.kind), x)
                found.setdefault((name, "layout", x.layout), x)
    return list(dict.fromkeys(found.values()))


def golden() -> Path:
    """The folder with the generated parts of the example kernels."""
    return ROOT / "tests" / "golden"


def generated() -> dict[Path, str]:
    """The expected content of each generated file, by path."""
    files = {ROOT / "cupylosses" / "definition" / "example_results.py": example_results()}
    files |= {ROOT / "cupylosses" / "functional.pyi": stub(), ROOT / "cupylosses" / "nn.pyi": nn_stub()}
    files |= {golden() / f"{x.title}.cu": x.glue() for x in (*examples(), *row_examples())}
    for name, parts in PARTS.items():
        text = (ROOT / name).read_text(encoding="utf-8")
        for marker, content in parts.items():
            text = between(text, marker, content())
        files[ROOT / name] = text
    return files


def stale(files: Mapping[Path, str]) -> list[Path]:
    """Paths of generated files that are outdated, missing or superfluous."""
    wrong = [p for p, text in files.items() if not p.is_file() or p.read_text(encoding="utf-8") != text]
    return wrong + sorted(set(golden().glob("*.cu")) - set(files))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a file is stale")
    check = parser.parse_args().check
    files = generated()
    outdated = stale(files)
    for path in outdated:
        if not check and path in files:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(files[path], encoding="utf-8")
        elif not check:
            path.unlink()
        done = "stale" if check else "wrote" if path in files else "removed"
        print(f"{done}: {path.relative_to(ROOT)}")
    if check and outdated:
        print("Run `python scripts/generate.py` and commit the result.")
    return 1 if check and outdated else 0


if __name__ == "__main__":
    sys.exit(main())

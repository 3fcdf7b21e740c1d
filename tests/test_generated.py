"""Files generated from the definitions are up to date and match the functions."""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from checkout import ROOT, load_script

import cupylosses.functional
import cupylosses.nn
from cupylosses.definition.registry import registry
from cupylosses.engines.pointwise import codegen as pointwise_codegen
from cupylosses.engines.pointwise.codegen import KINDS, PRODUCT
from cupylosses.engines.pointwise.definition import Loss
from cupylosses.engines.softmax import codegen as softmax_codegen
from cupylosses.engines.softmax.definition import SoftmaxLoss


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    return load_script("generate")


@pytest.fixture(scope="module")
def stub(generate: ModuleType) -> dict[str, ast.FunctionDef]:
    # The dictionary keeps the first overload of each function, which has the docstring.
    return {x.name: x for x in reversed(ast.parse(generate.stub()).body) if isinstance(x, ast.FunctionDef)}


def test_generated_files_are_fresh(generate: ModuleType) -> None:
    stale = [str(x.relative_to(ROOT)) for x in generate.stale(generate.generated())]
    assert not stale, f"run `python scripts/generate.py`: {', '.join(stale)}"


@pytest.mark.programs
def test_check_notices_a_stale_file(
    generate: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    contents = {tmp_path / path.relative_to(ROOT): text for path, text in generate.generated().items()}
    for path in contents:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text((ROOT / path.relative_to(tmp_path)).read_text(encoding="utf-8"), encoding="utf-8")
    monkeypatch.setattr(generate, "ROOT", tmp_path)
    monkeypatch.setattr(generate, "generated", lambda: contents)
    monkeypatch.setattr(sys, "argv", ["generate.py", "--check"])
    readme = tmp_path / "README.md"
    fresh = readme.read_text(encoding="utf-8")
    readme.write_text(fresh.replace("`hinge_loss`", "`hinge`"), encoding="utf-8")
    assert generate.main() == 1
    assert "stale: README.md" in capsys.readouterr().out
    example = next((tmp_path / "tests" / "golden").iterdir())
    example.rename(example.with_name("orphan.cu"))
    assert generate.main() == 1
    assert {x.name for x in generate.stale(generate.generated())} == {"README.md", example.name, "orphan.cu"}
    monkeypatch.setattr(sys, "argv", ["generate.py"])
    assert generate.main() == 0
    assert readme.read_text(encoding="utf-8") == fresh
    assert example.is_file() and not example.with_name("orphan.cu").exists()


def test_examples_show_every_entry_point_of_two_losses(generate: ModuleType) -> None:
    """A change of the generator changes files under tests/golden, which `python scripts/generate.py` writes."""
    examples = generate.examples()
    assert {(x.loss.name, x.kind) for x in examples} == set(product((generate.PLAIN, generate.RICH), {*KINDS, PRODUCT}))
    assert len({x.title for x in examples}) == len(examples)
    assert {x.layout for x in examples} == {"flat", "matrix", "strips", "tiles"}
    assert {x.result for x in examples} == {"float32", "bfloat16"}
    rich, plain = registry(Loss)[generate.RICH], registry(Loss)[generate.PLAIN]
    assert rich.flags and rich.let and not (plain.flags or plain.parameters)


def test_examples_show_every_entry_point_and_layout_of_rows(generate: ModuleType) -> None:
    entry_points = set(softmax_codegen.KINDS)
    for indices, others in ((True, {"gradient"}), (False, {"from_residual", "verify_gradient"})):
        examples = [x for x in generate.row_examples() if x.indices is indices]
        assert {x.kind for x in examples} == entry_points - others
        long = "two_pass" if indices else "windowed"
        assert {"subwarp", "block", long, "thread_per_row", "packed_rows"} <= {x.layout for x in examples}


@pytest.mark.programs
def test_a_change_of_the_generator_is_noticed(generate: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(pointwise_codegen.UNROLL, 4, 2)
    assert {x.parent.name for x in generate.stale(generate.generated())} == {"golden"}


@pytest.fixture(scope="module")
def nn_stub(generate: ModuleType) -> dict[str, ast.ClassDef]:
    return {x.name: x for x in ast.parse(generate.nn_stub()).body if isinstance(x, ast.ClassDef)}


def stub_signature(arguments: ast.arguments) -> list[tuple[str, Any, bool]]:
    """Name, default and keyword-only flag of each argument; asserts that all have types."""
    empty = [inspect.Parameter.empty] * (len(arguments.args) - len(arguments.defaults))
    defaults = empty + [ast.literal_eval(x) for x in (*arguments.defaults, *arguments.kw_defaults)]
    every = [*arguments.args, *arguments.kwonlyargs]
    assert all(x.annotation is not None for x in every if x.arg != "self")
    return [(x.arg, default, x in arguments.kwonlyargs) for x, default in zip(every, defaults, strict=True)]


def signature(function: Callable[..., Any]) -> list[tuple[str, Any, bool]]:
    """Name, default and keyword-only flag of each parameter of a function."""
    parameters = inspect.signature(function).parameters.values()
    return [(x.name, x.default, x.kind is inspect.Parameter.KEYWORD_ONLY) for x in parameters]


def test_stub_has_the_signature_of_the_function(loss: Loss, stub: dict[str, ast.FunctionDef]) -> None:
    function = getattr(cupylosses.functional, loss.name)
    assert stub_signature(stub[loss.name].args) == signature(function)
    assert inspect.cleandoc(ast.get_docstring(stub[loss.name], clean=False)) == inspect.cleandoc(function.__doc__)


@pytest.mark.parametrize("name", registry(SoftmaxLoss))
def test_stub_has_losses_of_rows(name: str, stub: dict[str, ast.FunctionDef], nn_stub: dict[str, ast.ClassDef]) -> None:
    function, row_loss = getattr(cupylosses.functional, name), registry(SoftmaxLoss)[name]
    assert stub_signature(stub[name].args) == signature(function)
    assert inspect.cleandoc(ast.get_docstring(stub[name], clean=False)) == inspect.cleandoc(function.__doc__)
    module, cls = getattr(cupylosses.nn, row_loss.class_name), nn_stub[row_loss.class_name]
    (base,) = module.__bases__
    assert [ast.unparse(x) for x in cls.bases] == [f"torch.nn.{base.__name__}"]
    # The last overload has every default.
    for method in {x.name: x for x in cls.body if isinstance(x, ast.FunctionDef)}.values():
        assert stub_signature(method.args) == signature(getattr(module, method.name))


def test_stub_of_a_module_that_may_be_asked_for_more(nn_stub: dict[str, ast.ClassDef]) -> None:
    """The overloads declare the type of the result for each choice of the options."""
    forward = [x for x in nn_stub["CrossEntropyLoss"].body if isinstance(x, ast.FunctionDef) and x.name == "forward"]
    results = [ast.unparse(x.returns) for x in forward]
    assert results == ["torch.Tensor", "RowResult", "RowResult", "torch.Tensor | RowResult"]


def test_stub_declares_all_public_functions(stub: dict[str, ast.FunctionDef]) -> None:
    public = {n for n, x in vars(cupylosses.functional).items() if inspect.isfunction(x) and not n.startswith("_")}
    own = {n for n in public if getattr(cupylosses.functional, n).__module__ == "cupylosses.functional"}
    assert own == set(stub)


def test_stub_has_the_modules(nn_stub: dict[str, ast.ClassDef]) -> None:
    assert [*nn_stub, "module_of"] == cupylosses.nn.__all__


def test_stub_has_the_signatures_of_the_module(loss: Loss, nn_stub: dict[str, ast.ClassDef]) -> None:
    module, stub = getattr(cupylosses.nn, loss.class_name), nn_stub[loss.class_name]
    (base,) = module.__bases__
    assert [ast.unparse(x) for x in stub.bases] == [f"torch.nn.{base.__name__}"]
    methods = {x.name: x for x in stub.body if isinstance(x, ast.FunctionDef)}
    assert set(methods) == {"forward"} | ({"__init__"} if base is torch.nn.Module else set())
    for name, method in methods.items():
        assert stub_signature(method.args) == signature(getattr(module, name))


PROGRAM = """
import numpy
import torch

import cupylosses.functional as F
from cupylosses import define_loss, nn
from cupylosses.engines.softmax.call import RowResult

loss = nn.HingeLoss(2.0, "sum", weight=torch.ones(3), dim=(0, 1), out_dtype=torch.float32)
value: torch.Tensor = loss(torch.ones(3), torch.ones(3), mask=torch.ones(3) > 0, normalizer=8)
nn.MSELoss(reduction="sum").forward(torch.ones(3), torch.ones(3), weight=2.0, dim=-1)
module: type[torch.nn.Module] = nn.module_of(define_loss("mine", "input"))
nn.HingeLoss(margin="wide")  # error
nn.HingeLoss(reduction="avg")  # error
nn.HingeLoss(1.0, "sum", 2.0)  # error
nn.HingeLoss(marign=1.0)  # error
nn.HingeLoss().forward(torch.ones(3))  # error
nn.HingeLoss().forward(torch.ones(3), torch.ones(3), dim="last")  # error
nn.MSELoss().forward(torch.ones(3), torch.ones(3), maks=None)  # error
nn.HingLoss()  # error
nn.CrossEntropyLoss(label_smoothing=0.1).forward(torch.ones(3, 2), torch.ones(3), class_dim=-1, softcap=30.0)
nn.CrossEntropyLoss().forward(torch.ones(3, 2), torch.ones(3), check_targets="never")  # error
nn.DistillationLoss(2.0, 0.5, class_dim="last")  # error

# Results of torch's functions are unknown here, where imports of torch are not followed; those of NumPy's are known.
x, y, asked = torch.ones(3, 2), torch.ones(3), bool(input())
array: numpy.ndarray = F.cross_entropy(numpy.ones(3), y)
plain: torch.Tensor = F.cross_entropy(x, y)
plain = F.softmax_focal_loss(x, y, return_lse=False)
tuples: list[RowResult] = [F.cross_entropy(x, y, return_lse=True), F.cross_entropy(x, y, return_accuracy=True)]
tuples = [F.softmax_focal_loss(x, y, return_lse=asked, return_accuracy=True)]
either: torch.Tensor | RowResult = F.cross_entropy(x, y, return_lse=asked)
plain = F.kl_div_with_logits(x, x)
F.cross_entropy(x, y, return_lse=True).lsee  # error
F.cross_entropy(x, y, return_lse=1.5)  # error
F.nll_loss(x, y, return_lse=True)  # error
wrong: RowResult = F.cross_entropy(numpy.ones(3), y)  # error
wrong = F.cross_entropy(numpy.ones(3), y, return_lse=asked)  # error
"""


@pytest.mark.programs
def test_a_type_checker_understands_the_stub(tmp_path: Path) -> None:
    api = pytest.importorskip("mypy.api")
    (tmp_path / "program.py").write_text(PROGRAM)
    # torch itself is not followed, as in setup.cfg: checking its annotations takes a minute.
    (tmp_path / "mypy.ini").write_text(f"[mypy]\nmypy_path = {ROOT}\n[mypy-torch.*]\nfollow_imports = skip\n")
    options = ["--config-file", str(tmp_path / "mypy.ini"), "--cache-dir", str(tmp_path / "cache")]
    output, problems, _ = api.run([*options, str(tmp_path / "program.py")])
    assert not problems
    found = {int(line.split("program.py:")[1].split(":")[0]) for line in output.splitlines() if ": error:" in line}
    assert found == {i for i, line in enumerate(PROGRAM.splitlines(), 1) if "# error" in line}, output


def test_readme_lists_every_loss(generate: ModuleType) -> None:
    rows = generate.losses().splitlines()[2:]
    assert [row.split("`")[1] for row in rows] == list(registry(Loss))
    of_rows = generate.row_losses().splitlines()[2:]
    assert [row.split("`")[1] for row in of_rows] == list(registry(SoftmaxLoss))


def test_every_primitive_of_the_definitions_is_listed(loss: Loss, generate: ModuleType) -> None:
    listed = set(re.findall(r"^\| `(\w+)\(", generate.primitives(), re.MULTILINE))
    used = set(re.findall(r"\b(\w+)\(", " ".join([loss.value, *loss.let.values()])))
    assert used and used <= listed

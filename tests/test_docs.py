"""The documents are correct: the example of a new loss works as printed, and every field and file is described."""

from __future__ import annotations

import dataclasses
import linecache
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from devices import KERNELS
from grids import short_or_full
from tools.nvrtc import CompileError, Nvrtc, find_library
from tools.variants import variants

import cupylosses
from cupylosses.build import function_of
from cupylosses.definition import base as definition_base
from cupylosses.definition.registry import registry
from cupylosses.engines.pointwise import definition as pointwise_definition
from cupylosses.engines.pointwise.definition import Loss

pytestmark = pytest.mark.plain

ROOT = Path(__file__).resolve().parents[1]
ADDING = (ROOT / "docs" / "adding-a-loss.md").read_text(encoding="utf-8")
EXAMPLE = ADDING.split("```python\n")[1].split("```")[0]
NEW = re.search(r'name="(\w+)"', EXAMPLE)[1]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the library with the documented change and no other. Its bytecode is kept from program to program."""
    tmp_path = tmp_path_factory.mktemp("checkout")
    ignore = shutil.ignore_patterns("__pycache__")
    for name in ("cupylosses", "kernels", "tests/tools"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=ignore)
    file = tmp_path / re.search(r"At the end of `(\S+)`", ADDING)[1]
    with file.open("a", encoding="utf-8") as out:
        out.write("\n\n" + EXAMPLE)
    return tmp_path


def run(checkout: Path, program: str) -> str:
    variables = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(checkout), str(checkout / "tests")]),
    }
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], cwd=checkout, env=variables, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.programs
def test_the_new_loss_has_the_value_and_gradient_of_its_closed_form(checkout: Path) -> None:
    program = """
import torch
import cupylosses
import cupylosses.functional as F

generator = torch.Generator().manual_seed(0)
prediction, target = torch.randn(2, 1000, dtype=torch.float64, generator=generator).mul(3)
prediction.requires_grad_()
target.requires_grad_()
difference = (prediction - target).detach()
for epsilon in (0.0, 0.5, 4.0):
    excess = difference.abs() - epsilon
    assert 0 < (excess > 0).sum() and (epsilon == 0 or (excess < 0).any())
    slope = difference.sign() * (excess > 0)
    loss = F.epsilon_insensitive_loss(prediction, target, epsilon=epsilon, reduction="sum")
    torch.testing.assert_close(loss.detach(), excess.clamp(min=0).sum())
    gradients = torch.autograd.grad(loss, (prediction, target))
    torch.testing.assert_close(gradients, (slope, -slope))

numbers = prediction.detach().numpy(), target.detach().numpy()
value, gradient = cupylosses.value_and_grad(F.epsilon_insensitive_loss, *numbers, reduction="sum")
assert abs(value - (abs(difference.numpy()) - 0.1).clip(0).sum()) < 1e-9
assert F.epsilon_insensitive_loss.__doc__.startswith("Epsilon-insensitive loss: ")
try:
    F.epsilon_insensitive_loss(prediction, target, epsilon=-1.0)
except ValueError as error:
    print(error)
"""
    assert "epsilon_insensitive_loss: `epsilon` must be a number >= 0, got -1.0" in run(checkout, program)


@pytest.mark.programs
def test_kinks_of_the_new_loss_are_as_declared(checkout: Path) -> None:
    program = f"""
import torch
import cupylosses.functional as F
from cupylosses.definition.registry import registry
from cupylosses.engines.pointwise.definition import Loss

loss = registry(Loss)["{NEW}"]
count = 0
for case in loss.cases:
    for kink in loss.kinks(**loss.values(case)):
        operands = [torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in kink.operands]
        value = F.{NEW}(*operands, **case)
        assert value.item() == kink.value
        assert tuple(x.item() for x in torch.autograd.grad(value, operands)) == kink.gradient, (case, kink)
        count += 1
print(count)
"""
    assert int(run(checkout, program)) >= 4


@pytest.mark.programs
def test_kernels_of_the_new_loss_are_derived(checkout: Path) -> None:
    program = f"""
from cupylosses.engines.pointwise.codegen import KINDS
from cupylosses.definition.registry import registry
from cupylosses.engines.pointwise.definition import Loss
from tools.nvrtc import Nvrtc, find_library
from tools.variants import variants

found = {{x.kind: x for x in variants(registry(Loss)["{NEW}"])}}
assert set(found) == set(KINDS)
for variant in found.values():
    text = variant.source()
    assert '#line 1 "{NEW}.value"' in text and "relu_active(abs(input - target) - epsilon)" in text
    if find_library():
        assert variant.entry in Nvrtc().compile(text, "sm_80").ptx
print("compiled" if find_library() else "generated")
"""
    assert run(checkout, program).strip() == ("compiled" if find_library() else "generated")


@pytest.mark.programs
def test_the_new_loss_reaches_the_generated_files(checkout: Path) -> None:
    for name in ("scripts", "docs"):
        (checkout / name).mkdir()
    documents = ("README.md", "docs/adding-a-loss.md", "docs/mutations.md", "docs/transforms.md", "docs/transforms.csv")
    for name in ("scripts/generate.py", *documents):
        shutil.copy(ROOT / name, checkout / name)
    shutil.copytree(ROOT / "tests" / "golden", checkout / "tests" / "golden")
    output = run(checkout, "import runpy; runpy.run_path('scripts/generate.py', run_name='__main__')")
    written = ["cupylosses/definition/example_results.py", "cupylosses/functional.pyi", "cupylosses/nn.pyi"]
    written += ["README.md", "docs/transforms.md"]
    assert output.splitlines() == [f"wrote: {x}" for x in written]
    assert f"def {NEW}(" in (checkout / "cupylosses" / "functional.pyi").read_text(encoding="utf-8")
    assert f"| `{NEW}` |" in (checkout / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("kind", ["Loss", "Operand", "Parameter", "Flag", "Kink"])
def test_every_field_of_a_definition_is_described(kind: str) -> None:
    section = ADDING.split(f"\n`{kind}`")[1].split("\n`")[0]
    for field in dataclasses.fields(getattr(pointwise_definition if kind == "Loss" else definition_base, kind)):
        assert f"`{field.name}`" in section, field.name


def test_domains_and_the_limit_of_operands_are_those_of_the_code() -> None:
    assert all(f"`{x}`" in ADDING for x in definition_base.DOMAINS)
    assert definition_base.MAX_OWN_OPERANDS == 4 and "at most four" in ADDING


def test_every_source_file_is_in_the_architecture() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    documented = [x for x in (ROOT / "cupylosses").rglob("*.py") if not {"losses", "testing"} & {*x.parts}]
    files = [*documented, *(ROOT / "kernels").rglob("*.cuh")]
    assert [x.name for x in files if f"`{x.name}`" not in text and x.name != "__init__.py"] == []


def test_every_kernel_file_is_in_the_contract_of_the_kernels() -> None:
    rows = re.findall(r"(?m)^\| (.*?) \|", (ROOT / "kernels" / "README.md").read_text(encoding="utf-8"))
    assert [x.name for x in (ROOT / "kernels").rglob("*.cuh") if f"`{x.name}`" not in rows] == []


def test_includes_of_the_kernels_are_as_their_readme_says() -> None:
    text = (ROOT / "kernels" / "README.md").read_text(encoding="utf-8")
    rows = {x[0]: re.findall(r"`([\w/]+)`", x[1]) for x in re.findall(r"(?m)^\| `(\w+\.cuh)` \| .* \| (.*) \|$", text)}
    for path in (ROOT / "kernels").rglob("*.cuh"):
        if path.name != "primitives.cuh":
            assert rows[path.name] == re.findall(r'#include "([\w/]+)\.cuh"', path.read_text(encoding="utf-8"))


def test_every_loss_is_in_the_differences() -> None:
    text = (ROOT / "docs" / "differences.md").read_text(encoding="utf-8")
    assert [x.name for x in registry(Loss).values() if x.torch and f"`{x.name}`" not in text] == []


def snippets() -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)


def test_the_readme_trains_with_torch() -> None:
    program = next(x for x in snippets() if "import torch" in x).replace(".cuda()", "")
    torch.manual_seed(0)
    batches = [(torch.randn(64, 256), torch.randn(64, 16))] * 5
    losses: list[float] = []
    scope = {"batches": batches, "keep": lambda x: losses.append(x.item())}
    exec(program.replace("    optimizer.step()", "    optimizer.step()\n    keep(loss)"), scope)
    assert len(losses) == 5
    assert losses == sorted(losses, reverse=True)


def test_the_readme_differentiates_without_torch() -> None:
    """NumPy stands in for CuPy: the functions used have the same names."""
    program = next(x for x in snippets() if "import cupy\n" in x).replace("import cupy\n", "import numpy as cupy\n")
    scope: dict[str, Any] = {}
    exec(program, scope)
    p, q = scope["p"].astype("float64"), scope["q"].astype("float64")
    assert scope["value"] == pytest.approx((q * np.log(q / p)).sum() / 4096, rel=1e-5)
    np.testing.assert_allclose(scope["gradient_p"], -q / p / 4096, rtol=1e-5)
    np.testing.assert_allclose(scope["gradient_q"], (np.log(q / p) + 1) / 4096, rtol=1e-4, atol=1e-9)


# ----------------------------------------------------------------------------------------------------------------------
# docs/own-losses.md: its code blocks are one program, except for the mistakes

OWN = (ROOT / "docs" / "own-losses.md").read_text(encoding="utf-8")
TUTORIAL, MISTAKES = OWN.split("## What is wrong, and where")


def tutorial() -> dict[str, Any]:
    """The names that the tutorial's program defines."""
    generator = torch.Generator().manual_seed(0)
    prediction, target, score = torch.randn(3, 64, 16, generator=generator)
    scope: dict[str, Any] = {
        "__name__": "tutorial",
        "prediction": prediction.to(KERNELS).requires_grad_(),
        "target": target.to(KERNELS),
        "score": score.to(KERNELS).requires_grad_(),
        "label": torch.randint(-1, 2, (64, 16), generator=generator).to(KERNELS),
        "class_weight": torch.rand(16, generator=generator).to(KERNELS),
        "depth": prediction.detach().exp().to(KERNELS).requires_grad_(),
        "true_depth": target.exp().to(KERNELS),
    }
    program = "".join(re.findall(r"```python\n(.*?)```", TUTORIAL, re.DOTALL)).replace('"cuda"', repr(KERNELS))
    dtypes = '("float16", "bfloat16", "float32", "float64")'
    assert program.count(dtypes) == 1
    exec(program.replace(dtypes, short_or_full('("bfloat16", "float32")', dtypes)), scope)
    return scope


@pytest.mark.kernels
def test_the_tutorials_losses_are_what_they_are_said_to_be() -> None:
    scope = tutorial()
    x, y = scope["prediction"].detach(), scope["target"]
    torch.testing.assert_close(scope["asymmetric_loss"](x, y), (torch.where(x > y, 3, 1) * (x - y) ** 2).mean())
    slope = torch.where(x > y, 6, 2) * (x - y) / x.numel()
    torch.testing.assert_close(scope["prediction"].grad, slope)

    logs = (scope["depth"].detach() / scope["true_depth"]).log()
    exact = (logs**2).mean(-1) - 0.85 * logs.mean(-1) ** 2
    torch.testing.assert_close(
        scope["scale_invariant_log_loss"](scope["depth"].detach(), scope["true_depth"], balance=0.85), exact.mean()
    )
    assert bool((scope["depth"].grad != 0).all())

    score, label = scope["score"].detach(), scope["label"]
    hinge = (0.5 - (2 * label - 1) * score).clamp(min=0) ** 2
    counts = label >= 0
    torch.testing.assert_close(scope["value"], (hinge * counts).sum() / counts.sum())
    torch.testing.assert_close(scope["loss"].detach(), (hinge * counts * scope["class_weight"]).sum() / counts.sum())
    assert bool((scope["gradient"][~counts] == 0).all() and (scope["score"].grad[counts & (hinge > 0)] != 0).all())
    assert repr(scope["criterion"]) == "SquaredHingeLoss(margin=0.5, weight=Tensor(16,))"


@pytest.mark.programs
@pytest.mark.kernels
def test_the_tutorials_check_holds_and_notices_what_it_is_said_to() -> None:
    scope = tutorial()
    scope["test_tukey_loss"]()
    right = scope["tukey_loss"].loss
    wrongs = (
        {"derivatives": {}},
        {"value": "c * c / 6 * where(s >= 1, 1, 1 - (1 - s) * square(1 - s))"},
        {"value": "c * c / 6 * where(s < 1, s * (3 - s * (3 - s)), 1)"},
    )
    # A GPU reveals nothing about formulas that the CPU does not.
    for wrong in wrongs if KERNELS == "cpu" else wrongs[:1]:
        scope["tukey_loss"] = function_of(dataclasses.replace(right, **wrong))
        with pytest.raises(AssertionError):
            scope["test_tukey_loss"]()


def mistakes() -> list[tuple[str, str]]:
    """The programs with mistakes, and their messages."""
    return re.findall(r"```python\n(.*?)```.*?```text\n(.*?)\n```", MISTAKES, re.DOTALL)


@pytest.mark.parametrize(("program", "message"), mistakes())
def test_the_tutorials_mistakes_are_reported_as_shown(program: str, message: str) -> None:
    scope = {"define_loss": cupylosses.define_loss}
    linecache.cache["train.py"] = (len(program), None, program.splitlines(keepends=True), "train.py")
    try:
        if ": error: " not in message:
            with pytest.raises(cupylosses.ExpressionError) as error:
                exec(compile(program, "train.py", "exec"), scope)
            assert str(error.value) == message
        else:
            exec(compile(program, "train.py", "exec"), scope)
    finally:
        del linecache.cache["train.py"]
    if ": error: " in message and find_library():
        kernel = next(x for x in variants(scope["choice_loss"].loss, fast=True) if x.kind == "elements")
        with pytest.raises(CompileError, match=re.escape(message)):
            Nvrtc().compile(kernel.source(), "sm_80")


def test_the_tutorial_shows_four_mistakes() -> None:
    assert len(mistakes()) == 4


@pytest.mark.kernels
def test_the_readmes_own_loss() -> None:
    program = next(x for x in snippets() if "define_loss" in x)
    x, y, weight = torch.rand(3, 9, 5, generator=torch.Generator().manual_seed(0)).to(KERNELS)
    scope = {"prediction": x.requires_grad_(), "target": y, "weight": weight, "mask": weight > 0.5}
    exec(program, scope)
    slope = torch.where(x > y, 6, 2) * (x - y) * weight * scope["mask"] / scope["mask"].sum()
    torch.testing.assert_close(x.grad, slope.detach())


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives the headings of a page."""
    headings = re.findall(r"(?m)^#+ (.*)$", page.read_text(encoding="utf-8"))
    return {re.sub(r"[^\w\- ]", "", x.lower()).strip().replace(" ", "-") for x in headings}


@pytest.mark.parametrize("path", ["README.md", "CONTRIBUTING.md", "docs", "kernels/README.md"])
def test_links_and_commands_name_what_exists(path: str) -> None:
    pages = sorted((ROOT / path).rglob("*.md")) if (ROOT / path).is_dir() else [ROOT / path]
    assert pages
    for page in pages:
        text = page.read_text(encoding="utf-8")
        for target, _, anchor in re.findall(r"\[[^\]]*\]\((?!https?:)([^)#]*)(#?)([^)]*)\)", text):
            file = page.parent / target if target else page
            assert file.exists(), f"{page.name}: {target}"
            assert not anchor or anchor in anchors(file), f"{page.name}: {target}#{anchor}"
        for script in re.findall(r"python3? (scripts/\w+\.py)", text):
            assert (ROOT / script).is_file(), f"{page.name}: {script}"

"""The generated source: deterministic, complete, and labelled so that a compiler error points at the right text."""

from __future__ import annotations

import dataclasses
import re
import subprocess
from functools import cache
from pathlib import Path

import pytest
from grids import short_or_full
from tools.variants import variants as all_variants

from cupylosses import checks, functional
from cupylosses.call import Call
from cupylosses.definition import kernel_sources
from cupylosses.definition.base import MAX_OPERANDS, Operand, Parameter
from cupylosses.definition.expressions import cuda, in_double, primitives
from cupylosses.definition.kernel_sources import kernel_directory
from cupylosses.definition.registry import registry
from cupylosses.engines.base import Machine, contiguous
from cupylosses.engines.pointwise import codegen as pointwise_codegen
from cupylosses.engines.pointwise.codegen import KINDS, PRODUCT, PointwiseKernel, generated
from cupylosses.engines.pointwise.definition import Loss, modified
from cupylosses.engines.pointwise.jvp import TangentLoss
from cupylosses.engines.pointwise.layout import TILED, UNROLL
from cupylosses.engines.pointwise.reduction import Static
from cupylosses.engines.softmax import codegen as softmax_codegen
from cupylosses.jit import sources
from cupylosses.jit.glue import STORAGE
from cupylosses.jit.gpu import Chip
from cupylosses.jit.sources import expand
from cupylosses.testing import host

pytestmark = pytest.mark.representatives

NARROW = "#define NARROW true\n"

ROOT = Path(__file__).resolve().parents[1]


@cache
def variants(loss: Loss) -> list[PointwiseKernel]:
    """Every kernel that calls of a loss can reach.

    Without ``--thorough``, more than 5000 are thinned to every seventh, since no axis has seven values, and one of each
    kind.
    """
    found = all_variants(loss)
    some = found[:: short_or_full(7 if len(found) > 5000 else 1, 1)]
    return list(dict.fromkeys([*some, *{x.kind: x for x in found if x.loss is loss}.values()]))


def one_of_kind(loss: Loss, kind: str) -> PointwiseKernel:
    """A variant with the given entry point, of the loss itself and not of its divisor."""
    found = next((v for v in variants(loss) if v.kind == kind and v.loss is loss), None)
    if found is None:
        assert loss.mean_of_rows and kind == "elements", f"no call of {loss.name} reaches {kind}"
        pytest.skip("its elements are means of rows")
    return found


def test_source_is_deterministic(loss: Loss) -> None:
    for variant in variants(loss)[:: short_or_full(400, 100)]:
        again = dataclasses.replace(variant)
        assert again == variant and hash(again) == hash(variant)
        assert generated(again) == generated(variant)
    first = variants(loss)[0].source()
    expand.cache_clear()
    assert variants(loss)[0].source() == first


def test_variants_differ_in_source_and_title(loss: Loss) -> None:
    """A variant is the key of the kernel cache, and its title the name of a dumped file: neither may collide."""
    found = variants(loss)
    assert len({generated(v) for v in found}) == len(found)
    assert len({v.title for v in found}) == len(found)


def test_arithmetic_is_narrow_only_where_nothing_keeps_more(loss: Loss) -> None:
    """Every digit of float32 counts if any operand or the result has 32 bits, and in second derivatives."""
    some = [x for x in variants(loss)[::10] if not isinstance(x.loss, TangentLoss)]
    found = {narrow: [v for v in some if (NARROW in v.source()) is narrow] for narrow in (False, True)}
    floats = {v: {x for x in (*v.storage, v.result) if x in checks.FLOATING} for v in some}
    assert all(floats[v] <= {"float16", "bfloat16"} and v.compute == "float32" for v in found[True])
    assert all(floats[v] & {"float32", "float64"} or v.compute == "float64" for v in found[False])
    assert found[True] and found[False]


@pytest.mark.parametrize("kind", KINDS)
def test_entry_point_has_a_readable_unmangled_name(loss: Loss, kind: str) -> None:
    variant = one_of_kind(loss, kind)
    text = variant.source()
    entries = re.findall(r'extern "C" __global__ void __launch_bounds__\([^)]*\)\n(\w+)\(', text)
    assert entries == [variant.entry]
    assert variant.entry.startswith(f"{loss.name}_{kind}_")


@pytest.mark.parametrize("kind", KINDS)
def test_every_part_carries_its_line_label(loss: Loss, kind: str) -> None:
    variant = one_of_kind(loss, kind)
    labels = re.findall(r'^#line 1 "((?!kernels/).*)"$', variant.source(), re.MULTILINE)
    expected = [
        f"<{variant.title}>",
        *(f"{loss.name}.{x}" for x in (*loss.constants, *loss.let, "value")),
        *(f"{loss.name}.derivatives.{x}" for x in loss.derivatives),
        f"<{variant.title}>.entries",
    ]
    if "kTriedFirst = true" in variant.source():
        expected += [f"{loss.name}.tentative", f"<{variant.title}>.entries"]
    assert labels == expected


#: Files of the softmax engine's kernels, including second derivatives.
SECOND_FILES = (
    *sources.nested(tuple(f"softmax/{x}.cuh" for x in dict.fromkeys(softmax_codegen.FILES.values()))),
    "softmax/hvp_rows.cuh",
)


@pytest.mark.parametrize("files", [pointwise_codegen.SUMMING, SECOND_FILES], ids=["pointwise", "softmax"])
def test_every_line_of_the_kernels_is_where_its_label_says(files: tuple[str, ...]) -> None:
    """Every line of code of every needed file occurs once."""
    left: dict[str, list[str]] = {}
    lines = iter(expand(files).splitlines())
    for line in lines:
        if match := re.fullmatch(r'#line (\d+) "kernels/(.*)"', line):
            number, name = int(match[1]), match[2]
            left.setdefault(name, (kernel_directory() / name).read_text(encoding="utf-8").splitlines())
            continue
        assert left[name][number - 1] == line
        left[name][number - 1], number = "", number + 1
    rest = {x for text in left.values() for x in text if x}
    assert all(x == "#pragma once" or x.startswith("#include") for x in rest), rest
    assert all(any(x.startswith(f"kernels/{name}") for x in [f"kernels/{y}" for y in left]) for name in files)


@pytest.mark.skipif(host.find_compiler() is None, reason="no C++ compiler")
@pytest.mark.programs
def test_every_kernel_file_includes_what_it_needs() -> None:
    """Editors parse each file by itself, with the flags of compile_flags.txt."""
    flags = (ROOT / "compile_flags.txt").read_text(encoding="utf-8").split()
    text = "".join(f'#include "{x.relative_to(kernel_directory())}"\n' for x in kernel_directory().rglob("*.cuh"))
    assert len(text.splitlines()) > 30
    for path in sorted(kernel_directory().rglob("*.cuh")):
        command = [*(host.find_compiler() or ()), *flags, "-w", "-fsyntax-only", str(path)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


def test_labels_point_at_the_expression(loss: Loss) -> None:
    """The line after a label is line 1 of the named text, so the compiler's line numbers count from there."""
    lines = generated(variants(loss)[0]).splitlines()
    parts = {x: in_double(e) for x, e in loss.constants.items()}
    parts |= {x: cuda(e) for x, e in (*loss.let.items(), ("value", loss.value))}
    for name, expression in parts.items():
        where = lines.index(f'#line 1 "{loss.name}.{name}"')
        assert expression in lines[where + 1]


def test_no_header_is_included(loss: Loss) -> None:
    """The source compiles the same on a machine without CUDA headers or with those of another version."""
    for variant in {x.kind: x for x in variants(loss)}.values():
        assert "#include" not in variant.source()


def test_sources_have_the_primitives_that_they_call(loss: Loss) -> None:
    """A source has the primitives that it calls and those that they include; others would take time to compile."""

    def with_includes(files: set[str]) -> set[str]:
        texts = [(kernel_directory() / x).read_text(encoding="utf-8") for x in files]
        found = files | {x for text in texts for x in re.findall(r'^#include "(primitives/.*)"$', text, re.MULTILINE)}
        return found if found == files else with_includes(found)

    for variant in {x.kind: x for x in variants(loss) if not isinstance(x.loss, TangentLoss)}.values():
        words = set(re.findall(r"\w+", variant.glue()))
        called = {x.file for x in primitives().values() if x.name in words}
        found = set(re.findall(r'^#line \d+ "kernels/(primitives/\w+\.cuh)"$', variant.source(), re.MULTILINE))
        assert found == with_includes({"primitives/math.cuh", *called})


def test_engines_know_no_loss() -> None:
    files = [x for x in kernel_directory().rglob("*.cuh") if x.parent.name != "primitives"]
    text = "".join(x.read_text(encoding="utf-8") for x in files)
    assert [name for name in functional.__all__ if name in text] == []


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_that_are_not_wanted_have_no_pointer(loss: Loss, kind: str) -> None:
    for variant in variants(loss):
        if variant.kind == kind:
            signature = re.search(rf"{variant.entry}\((.*)\) {{", generated(variant)).group(1)
            operands = variant.loss.operands
            found = [x.name for x in operands if f"* {x.name}_gradients" in signature]
            assert found == [x.name for x, w in zip(operands, variant.gradients, strict=True) if w]


def test_parameters_are_arguments_and_flags_are_constants(loss: Loss) -> None:
    """A new parameter value must not compile anything; a flag may."""
    for variant in variants(loss):
        text = generated(variant)
        for parameter in variant.loss.parameters:
            assert f"double {parameter.name}_," in text
            assert f"{parameter.name} = {parameter.default!r}" not in text
        for flag, choice in zip(variant.loss.flags, variant.flags, strict=True):
            value = f"bool {flag.name} = {str(bool(choice)).lower()}" if len(flag.choices) == 2 else None
            assert f"constexpr {value or f'int {flag.name} = {choice}'};" in text


@pytest.mark.parametrize("out_dtype", [None, *checks.FLOATING])
@pytest.mark.parametrize("promoted", checks.FLOATING)
def test_arithmetic_type_follows_the_operands(promoted: str, out_dtype: str | None) -> None:
    """The result's dtype, which the user may choose, does not change the arithmetic type."""
    x, loss = contiguous(promoted, (100,)), functional.mse_loss.loss
    call = Call(loss, (), Static("mean", None, out_dtype))
    plan = loss.engine.plan(call, (x, x), promoted, Machine(1, Chip()))
    variant = plan.elements_launch.variant("value", plan.nothing)
    text = generated(variant)
    assert f"using Compute = {'double' if promoted == 'float64' else 'float'};" in text
    assert f"using Result = {STORAGE[out_dtype or promoted][0]};" in text


def test_every_dtype_has_a_storage_type() -> None:
    assert set(STORAGE) == {*checks.FLOATING, *checks.INTEGER}


def test_every_vector_width_has_an_unroll() -> None:
    micro_tiles = {n * b for n in range(2, 8) for b in (2, 4, 8) if n * b <= 32}
    assert {1, 2, 4, 8, 16, 32} | micro_tiles == set(UNROLL)


@pytest.mark.parametrize(("name", "elements"), [("sigmoid_focal_loss", 4), ("binary_cross_entropy_with_logits", 16)])
def test_tiles_of_heavy_second_derivatives_are_small(name: str, elements: int) -> None:
    """Sixteen elements of a heavy loss take seconds to compile."""
    products = [x for x in variants(registry()[name]) if x.kind == PRODUCT and x.layout in TILED]
    assert max(x.vec_size for x in products) == elements


def test_no_loop_runs_over_the_slots_of_tangents() -> None:
    """A loop over slots in a primitive makes losses of boxes compile for five times as long."""
    files = {path.name: path.read_text(encoding="utf-8") for path in kernel_directory().glob("*/*.cuh")}
    assert [name for name, text in files.items() if re.search(r"\bfor \(.*< kMaxOperands;", text)] == ["dual.cuh"]
    assert files["dual.cuh"].count("< kMaxOperands;") == 1  # that of `slots_up_to_last`, at compile time


def test_as_many_operands_fit_as_kernels_have_tangents() -> None:
    """The glue is generic in the number of operands; the maximum is four of the loss, plus a weight and a mask."""
    dual = (kernel_directory() / "core" / "dual.cuh").read_text(encoding="utf-8")
    assert f"kMaxOperands = {2 * MAX_OPERANDS};" in dual
    loss = Loss(
        name="four",
        summary="",
        formula="",
        operands=tuple(Operand(n, "") for n in ("a", "b", "c", "d")),
        parameters=(Parameter("p", 1.0, ""), Parameter("q", 2.0, "")),
        value="a * b + c * d",
        reference=lambda xp, a, b, c, d, p, q: a * b + c * d,
    )
    text = generated(
        PointwiseKernel(
            modified(loss, weight="array", mask=True),
            flags=(),
            kind="value_and_gradient",
            storage=(*("float32",) * 5, "bool"),
            result="float32",
            layout="rows",
            vec_size=4,
            access=("stream", "stream", "stream", "splat", "stream", "stream", "none"),
            gradients=(True, False, False, True, True, False),
        )
    )
    assert "StridedLayout<4, 13, " in text
    assert "const float* d_" in text
    assert "Tuple<Sink<float>, Absent, Absent, Sink<float>, Sink<float>, Absent>" in text
    assert "Loss{p_, q_}" in text


def test_kernels_are_found_in_a_checkout() -> None:
    assert (kernel_directory() / "README.md").is_file()


def test_kernels_are_found_inside_an_installed_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = tmp_path / "cupylosses" / "kernels"
    (installed / "pointwise").mkdir(parents=True)
    (installed / "pointwise" / "pointwise.cuh").write_text("")
    monkeypatch.setattr(kernel_sources, "__file__", str(tmp_path / "cupylosses" / "definition" / "kernel_sources.py"))
    assert kernel_sources.kernel_directory() == installed


def test_missing_kernels_are_an_error_with_a_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_sources, "__file__", str(tmp_path / "cupylosses" / "definition" / "kernel_sources.py"))
    with pytest.raises(RuntimeError, match=r"kernel sources are missing; looked in .*pip install"):
        kernel_sources.kernel_directory()

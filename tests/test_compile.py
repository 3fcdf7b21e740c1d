"""The compile gate's fast subset, without a GPU, and proof that the gate notices defects."""

from __future__ import annotations

import csv
import dataclasses
import functools
import locale
import os
import platform
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from types import ModuleType

import pytest
from checkout import load_script
from grids import short_or_full, thorough
from tools import cache, gate
from tools import nvrtc as nvrtc_module
from tools.gate_subsets import (
    BROADEST,
    FAST,
    MATRIX,
    cover,
    fast_compilers,
)
from tools.nvrtc import Compiled, CompileError, Nvrtc, Resources, find_libraries, find_library
from tools.pointwise.variants import architectures as broad_architectures
from tools.pointwise.variants import flag_settings, kernel_or_layout, structure, training
from tools.representatives import representatives
from tools.softmax.variants import kernel_and_layout, row_layout
from tools.variants import Variants, complaints, variants, wide_accesses

from cupylosses import checks
from cupylosses.definition.registry import registry
from cupylosses.engines.pointwise.codegen import KINDS, PRODUCT, PointwiseKernel
from cupylosses.engines.pointwise.definition import Loss
from cupylosses.engines.softmax import codegen as softmax_codegen
from cupylosses.engines.softmax.codegen import SoftmaxKernel
from cupylosses.engines.softmax.definition import SoftmaxLoss
from cupylosses.interop import ITEMSIZE
from cupylosses.jit import compiler, processors

# On these platforms a missing NVRTC is an error, not a skip: the extra `test` installs it.
needs_nvrtc = pytest.mark.skipif(platform.system() == "Darwin", reason="there is no NVRTC for macOS")

FIRST = next(iter(registry(Loss).values()))

LOSSES = list(registry().values())

#: Number of tests that share the fast subset. Each process that runs one enumerates the kernels first, in 4 s.
PARTS = 2

OTHERS = [x for x in registry(Loss).values() if x not in representatives()]


@pytest.fixture(scope="module")
def nvrtc() -> Nvrtc:
    return Nvrtc()


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CUPYLOSSES_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("compile_kernels")


# ----------------------------------------------------------------------------------------------------------------------
# The gate


def passes(work: list[gate.Job], counts: Counter[str]) -> None:
    """Compiles these kernels; fails if the gate complains about any."""
    # Threads of NVRTC wait for each other; processes of pytest-xdist do not.
    assert work
    results = list(gate.run(work, 1 if "PYTEST_XDIST_WORKER" in os.environ else processors.usable()))
    counts["kernels compiled by NVRTC"] += len(results)
    counts["of them unchanged since an earlier run, and looked up"] += sum(x.cached for x in results)
    assert {x.job.title: x.complaints for x in results if x.complaints} == {}


#: Each run of the tests compiles one of this many kernels of the fast subset.
SAMPLED = 48


@functools.cache
def fast_jobs() -> list[gate.Job]:
    return gate.fast_jobs(LOSSES, fast_compilers())


@needs_nvrtc
def test_two_shifted_operands_with_offsets_of_their_own_spill_nothing() -> None:
    """They need more registers than the bound for other reduced losses leaves."""
    access = ("shifted", "shifted", "none")
    variant = PointwiseKernel(
        registry(Loss)["smooth_l1_loss"], (), "value_and_gradient", ("float64",) * 2, "float64", "matrix", 2, access,
        (True, True), compute="float64",
    )  # fmt: skip
    assert Nvrtc().compile(variant.source(), "sm_90").resources.spills == 0


@needs_nvrtc
@pytest.mark.parametrize("part", range(PARTS))
def test_kernels_pass_the_gate(part: int, counts: Counter[str]) -> None:
    """A sample of the fast subset passes, in parts that several processes may run.

    ``--thorough`` and `.ci/run` compile the other kernels, and those for compilers older than the newest.
    """
    newest = max(x.compiler.version for x in fast_jobs())
    work = fast_jobs() if thorough() else [x for x in fast_jobs() if x.compiler.version == newest][::SAMPLED]
    passes(work[part::PARTS], counts)


@needs_nvrtc
@pytest.mark.thorough
@pytest.mark.parametrize("loss", LOSSES, ids=lambda x: x.name)
@pytest.mark.parametrize("architecture", FAST)
def test_broad_subset_passes_the_gate(loss: Loss | SoftmaxLoss, architecture: str, counts: Counter[str]) -> None:
    compiler = next(iter(fast_compilers()))
    if architecture not in compiler.architectures:
        pytest.skip(f"NVRTC {compiler.version} does not know {architecture}")
    work = gate.broad_jobs([loss], {compiler: [architecture]})
    if not work and architecture != BROADEST:
        pytest.skip(f"losses take turns with {architecture}, and this one has another")
    passes(work, counts)


@needs_nvrtc
@pytest.mark.thorough
@pytest.mark.parametrize("row_loss", registry(SoftmaxLoss).values(), ids=list(registry(SoftmaxLoss)))
def test_broad_subset_of_rows_passes_the_gate_of_cuda_11(row_loss: SoftmaxLoss, counts: Counter[str]) -> None:
    passes(gate.broad_jobs([row_loss], {Nvrtc(find_libraries()[11]): ["sm_90"]}), counts)


@needs_nvrtc
def test_compilers_of_two_versions_work_in_one_process() -> None:
    """Their wheels coexist, and each compiler finds its own copy of the libraries that both ship."""
    variant = training(FIRST)[0]
    both = fast_compilers()
    assert {x.version[0] for x in both} >= {11, 13}
    found = {x.version[0]: x.compile(variant.source(), "sm_90").resources for x in (*both, *both)}
    assert all(complaints(variant, x) == () for x in found.values())


@needs_nvrtc
def test_fast_subset_notices_what_cuda_11_refuses_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next row was once prefetched by an instruction that the assembler of CUDA 11.8 lacks for 9.0."""
    ahead = [x for x in fast_jobs() if getattr(x.variant, "prefetch", False)]
    old, new = ([x for x in ahead if (x.compiler.version[0] == 11) == is_old][:1] for is_old in (True, False))
    condition = " && __CUDACC_VER_MAJOR__ >= 12"
    assert condition in old[0].variant.source()
    whole = SoftmaxKernel.source
    monkeypatch.setattr(SoftmaxKernel, "source", lambda x: whole(x).replace(condition, ""))
    (refused,) = gate.run(old, 1)
    assert refused.job.architecture == "sm_90" and "cp.async.bulk" in refused.complaints[0]
    (accepted,) = gate.run(new, 1)
    assert accepted.complaints == ()


# ----------------------------------------------------------------------------------------------------------------------
# The kernels that are compiled


class OfVersion:
    """A stand-in for an absent compiler."""

    def __init__(self, major: int) -> None:
        self.version = (major, 0)


@pytest.fixture(scope="module")
def fast() -> list[gate.Job]:
    """The fast subset with all compilers; stand-ins replace those that are not installed."""
    installed = {x.version[0]: tuple(y) for x, y in (fast_compilers() if find_libraries() else {}).items()}
    if installed == {13: FAST, 11: MATRIX[11]}:
        return fast_jobs()
    return gate.fast_jobs(LOSSES, {OfVersion(13): FAST, OfVersion(11): MATRIX[11]})


def test_fast_subset_is_small_and_has_no_kernel_twice(fast: list[gate.Job]) -> None:
    assert len(set(fast)) == len(fast)
    assert 150 < len(fast) < 540


def test_fast_subset_has_every_formula(fast: list[gate.Job]) -> None:
    """Every loss has each setting of its flags in one of two dtypes, and each dtype has half of the losses."""
    found = {"float32": 0, "bfloat16": 0}
    for loss in registry(Loss).values():
        own = [x for x in fast if x.variant.loss is loss and x.variant.kind == "value_and_gradient"]
        own = [x for x in own if all(x.variant.gradients) or any(y.integer for y in loss.operands)]
        float32 = {x.variant.flags for x in own if x.variant.storage[0] == "float32" and x.architecture == BROADEST}
        bfloat16 = [x for x in own if x.variant.storage[0] == "bfloat16" and x.architecture in (FAST[0], FAST[-1])]
        assert float32 | {x.variant.flags for x in bfloat16} == set(flag_settings(loss)), loss.name
        found["float32"] += bool(float32)
        found["bfloat16"] += bool(bfloat16)
    assert min(found.values()) >= len(registry(Loss)) // 2
    assert {x.variant.loss for x in fast} >= set(LOSSES)


def test_fast_subset_has_every_kernel_layout_and_access(fast: list[gate.Job]) -> None:
    everything = [x for loss in representatives() for x in variants(loss)]
    for version, traits in ((13, structure), (11, kernel_or_layout)):
        own = [x for x in fast if x.compiler.version[0] == version]
        assert BROADEST in {x.architecture for x in own}
        assert {x.architecture for x in own} == ({"sm_70", BROADEST} if version == 11 else set(FAST))
        found = {y for x in own if isinstance(x.variant, PointwiseKernel) for y in traits(x.variant)}
        assert found >= {y for x in everything for y in traits(x)}


def test_fast_subset_has_every_kernel_and_layout_of_rows(fast: list[gate.Job]) -> None:
    everything = [x for loss in registry(SoftmaxLoss).values() for x in variants(loss)]
    assert {x.kind for x in everything} == set(softmax_codegen.KINDS)
    assert {x.input for x in everything} == set(checks.FLOATING)
    own = [x for x in fast if isinstance(x.variant, SoftmaxKernel) and not x.variant.in_place]
    found = {y for x in own if x.architecture == BROADEST for y in kernel_and_layout(x.variant)}
    assert found == {y for x in everything for y in kernel_and_layout(x)}
    forward = {y for x in everything if x.kind == "value_and_gradient" for y in row_layout(x)}
    for version, architectures in ((13, {FAST[0], FAST[-1]}), (11, {BROADEST})):
        some = [x for x in own if x.compiler.version[0] == version and x.architecture in architectures]
        assert {x.architecture for x in some} == architectures
        assert {y for x in some if x.variant.kind == "value_and_gradient" for y in row_layout(x.variant)} == forward
    old = [x.variant for x in own if x.compiler.version[0] == 11]
    assert {x.indices for x in old if x.kind == "hvp"} == {False, True}
    assert any(getattr(x, "prefetch", False) for x in old) and any(x.cluster > 1 for x in old)


def test_subset_that_covers_traits_has_each_of_them() -> None:
    sets = {1: "ab", 2: "c", 3: "abc", 4: "cd", 5: "b"}
    assert cover(sets, lambda x: iter(sets[x])) == [3, 4]


@pytest.mark.parametrize("row_loss", registry(SoftmaxLoss).values(), ids=list(registry(SoftmaxLoss)))
def test_broad_subset_of_rows_has_every_kernel_and_layout(row_loss: SoftmaxLoss) -> None:
    everything = variants(row_loss)
    broad = {x: Variants(row_loss).broad(x) for x in FAST}
    assert all(set(x) < set(everything) and len(x) == len(set(x)) for x in broad.values())
    assert {(x.kind, x.layout) for x in broad[BROADEST]} == {(x.kind, x.layout) for x in everything}
    forward = {x.layout for x in everything if x.kind == "value_and_gradient"}
    assert all({x.layout for x in some if x.kind == "value_and_gradient"} == forward for some in broad.values())


@pytest.mark.skipif(11 not in find_libraries(), reason="needs NVRTC 11")
def test_compiling_leaves_the_locale_as_it_is() -> None:
    """NVRTC 11 sets the C locale for its thread, in which Python would then read files as ASCII."""
    before = locale.getpreferredencoding(False)
    Nvrtc(find_libraries()[11]).compile('extern "C" __global__ void empty() {}', BROADEST)
    assert locale.getpreferredencoding(False) == before != "ANSI_X3.4-1968"


def test_kernels_of_cuda_11_may_spill_a_little() -> None:
    variant = training(FIRST)[0]
    spills = Resources((variant.entry,), 64, gate.SPILLS_OF_CUDA_11, 0, 0, *wide_accesses(variant), ())
    assert gate.Job(variant, BROADEST, OfVersion(11)).complaints(spills) == ()
    assert len(gate.Job(variant, BROADEST, OfVersion(12)).complaints(spills)) == 1
    more = dataclasses.replace(spills, spills=gate.SPILLS_OF_CUDA_11 + 1)
    assert len(gate.Job(variant, BROADEST, OfVersion(11)).complaints(more)) == 1


def test_rows_may_spill_and_nothing_else_is_forgiven() -> None:
    variant = next(x for x in variants(next(iter(registry(SoftmaxLoss).values()))) if x.kind == "value_and_gradient")
    loads, stores = wide_accesses(variant)
    assert loads and stores
    good = Resources((variant.entry,), 255, 800, 800, 520, loads, stores, ())
    assert complaints(variant, good) == ()
    for defect in ({"warnings": ("x",)}, {"wide_loads": 0}, {"wide_stores": 0}, {"entries": ("another",)}):
        assert len(complaints(variant, dataclasses.replace(good, **defect))) == 1


def test_table_tells_kernels_of_rows_apart(tmp_path: Path) -> None:
    resources = Resources((), 32, 0, 0, 0, 0, 0, ())
    for row_loss in registry(SoftmaxLoss).values():
        work = gate.whole_jobs([row_loss], {OfVersion(13): ["sm_90"]})
        gate.write([gate.Result(x, resources, ()) for x in work], tmp_path / "rows.csv")
        rows = list(csv.DictReader((tmp_path / "rows.csv").open()))
        assert len({tuple(x[c] for c in gate.COLUMNS) for x in rows}) == len(rows) == len(work)


def test_matrix_is_what_is_supported() -> None:
    assert MATRIX[13] == tuple(f"sm_{x}" for x in (75, 80, 86, 89, 90, 100, 120))
    assert MATRIX[12] == MATRIX[11] == tuple(f"sm_{x}" for x in (70, 80, 90))
    assert FAST == ("sm_75", "sm_90", "sm_120")


@pytest.mark.parametrize("loss", short_or_full(representatives()[-1:], representatives()), ids=lambda x: x.name)
@pytest.mark.parametrize("architecture", FAST)
def test_broad_subset_has_every_kernel_layout_and_dtype(loss: Loss, architecture: str) -> None:
    everything, fast = variants(loss), Variants(loss).broad(architecture)
    assert set(fast) < set(everything) and len(fast) == len(set(fast)) < len(everything) / 10
    assert {x.kind for x in fast} == {x.kind for x in everything}
    assert {x.layout for x in fast} >= {"flat", "matrix"}
    assert set(checks.FLOATING) <= {x.result for x in fast}
    if architecture == BROADEST:
        own, all_own = ({x.storage for x in some if x.loss is loss} for some in (fast, everything))
        assert own == all_own
        assert {(x.kind, x.layout) for x in fast} == {(x.kind, x.layout) for x in everything}
        assert {x.flags for x in fast} == {x.flags for x in everything}


def test_broad_subset_of_other_losses_is_what_training_takes() -> None:
    for loss in OTHERS:
        found = {x: Variants(loss).broad(x, whole=False) for x in FAST}
        broadest, other = found.pop(BROADEST), [x for some in found.values() for x in some]
        forward = {(x.storage[0], x.flags) for x in broadest if x.kind == "value_and_gradient" and all(x.gradients)}
        assert forward == set(product(("float32", "bfloat16"), flag_settings(loss)))
        assert {x.kind for x in broadest} - {PRODUCT} == {"value_and_gradient", "elements", "elements_gradient"}
        # One in each dtype; none for losses without second derivatives.
        assert [x.storage[0] for x in broadest if x.kind == PRODUCT] in ([], ["float32", "bfloat16"])
        assert set(other) < set(broadest)
        assert (BROADEST, *(x for x, some in found.items() if some)) == broad_architectures(loss)
        assert {(x.kind, x.storage[0]) for x in other} == set(product(["value_and_gradient"], ("float32", "bfloat16")))
    work = gate.broad_jobs(OTHERS, {OfVersion(13): FAST})
    assert {x.architecture for x in work} == set(FAST)


def test_more_is_compiled_of_a_loss_that_is_named() -> None:
    compilers, some = {OfVersion(13): FAST}, OTHERS[:1]
    for jobs in (gate.broad_jobs, gate.fast_jobs):
        few, many = (jobs(some, compilers, whole=x) for x in (None, some))
        assert len(many) > 10 * len(few)


def test_whole_matrix_is_every_variant() -> None:
    loss = representatives()[-1]
    work = gate.whole_jobs([loss], {OfVersion(13): ["sm_80", "sm_90"]})
    assert [(x.variant, x.architecture) for x in work] == [(v, a) for a in ("sm_80", "sm_90") for v in variants(loss)]


@pytest.mark.representatives
def test_contiguous_kernels_are_expected_to_move_16_bytes(loss: Loss) -> None:
    """The condition that the gate checks is not vacuous."""
    for variant in variants(loss, fast=True):
        if variant.layout == "flat" and variant.kind != PRODUCT:
            loads, stores = wide_accesses(variant)
            assert loads >= sum(variant.vec_size * ITEMSIZE[x] >= 16 for x in variant.storage) > 0
            assert (stores > 0) == (variant.kind != "value")


# ----------------------------------------------------------------------------------------------------------------------
# Complaints

LOG = """x.cu(1): warning #177-D: something
ptxas warning : something else
ptxas info    : Compiling entry function 'f' for 'sm_90'
    16 bytes stack frame, 24 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 64 registers, used 1 barriers, 16 bytes stack, 520 bytes smem
"""


def test_resources_are_read_from_text() -> None:
    bad = Compiled(".visible .entry f(\nld.global.cs.b32 %r1, [%rd1];\nst.global.cs.v2.b32 [%rd1], {%r1, %r2};", LOG)
    found = bad.resources
    assert found == Resources(
        entries=("f",),
        registers=64,
        spills=32,
        stack=16,
        shared=520,
        wide_loads=0,
        wide_stores=0,
        warnings=("x.cu(1): warning #177-D: something", "ptxas warning : something else"),
    )
    wide = "ld.global.cs.v4.b32 {%r1, %r2, %r3, %r4}, [%rd1];\n" * 2 + "st.global.cs.v2.b64 [%rd1], {%rd2, %rd3};\n"
    found = Compiled(wide, LOG.replace(", 520 bytes smem", "")).resources
    assert (found.wide_loads, found.wide_stores, found.shared) == (2, 1, 0)
    with pytest.raises(ValueError, match="reported nothing like"):
        _ = Compiled("", "").resources


def test_a_remark_on_the_architecture_is_no_warning_of_the_kernel() -> None:
    remark = "nvrtc: warning: Architectures prior to '<compute/sm>_75' are deprecated and may be removed\n"
    assert Compiled("", remark + LOG).resources.warnings == Compiled("", LOG).resources.warnings


def test_every_defect_is_a_complaint() -> None:
    variant = training(FIRST)[0]
    loads, stores = wide_accesses(variant)
    good = Resources((variant.entry,), 64, 0, 16, 520, loads, stores, ())
    assert complaints(variant, good) == ()
    for defect, text in [
        ({"warnings": ("x.cu(1): warning",)}, "x.cu"),
        ({"spills": 8}, "8 bytes of registers spilled"),
        ({"wide_loads": loads - 1}, f"{loads - 1} 16-byte loads"),
        ({"wide_stores": stores - 1}, f"{stores - 1} 16-byte stores"),
        ({"entries": ("another",)}, "another"),
        ({"entries": (variant.entry, "another")}, "another"),
    ]:
        (found,) = complaints(variant, dataclasses.replace(good, **defect))
        assert text in found


@needs_nvrtc
def test_a_mistake_in_an_expression_is_reported_where_it_is(nvrtc: Nvrtc, empty_cache: Path) -> None:
    wrong = dataclasses.replace(FIRST, value="where(target, input, input)", let={})
    variant = dataclasses.replace(training(FIRST)[0], loss=wrong)
    with pytest.raises(CompileError, match=rf"{FIRST.name}\.value\(1\): error.*where"):
        nvrtc.compile(variant.source(), "sm_90")
    (result,) = gate.run([gate.Job(variant, "sm_90", nvrtc)], 1)
    assert result.resources is None and "where" in result.complaints[0]


@needs_nvrtc
def test_kernels_need_nothing_that_compilers_may_leave_out(nvrtc: Nvrtc) -> None:
    """Compilers that know an option by which they declare less get it, and it has the effect that it should have."""
    unsupported = compiler.options_for((12, 3))
    assert compiler.options_for((11, 8)) == unsupported and compiler.options_for((12, 4)) == (*unsupported, "-minimal")
    minimal = "-minimal" in nvrtc.options
    uses_texture = 'extern "C" __global__ void f(cudaTextureObject_t) {}'
    with pytest.raises(CompileError, match="cudaTextureObject_t") if minimal else nullcontext():
        nvrtc.compile(uses_texture, "sm_90")


@needs_nvrtc
@pytest.mark.parametrize(
    ("program", "what"),
    [
        pytest.param("int unused; x[threadIdx.x] = 0;", "warning", id="warning"),
        pytest.param(
            "float v[64]; x += threadIdx.x;\n#pragma unroll\nfor (int i = 0; i < 64; ++i) v[i] = x[i * 512];\n"
            "__syncthreads();\n#pragma unroll\nfor (int i = 0; i < 64; ++i) x[i * 512] = v[63 - i] * v[i];",
            "spilled",
            id="spill",
        ),
    ],
)
def test_compilers_say_what_the_gate_listens_for(program: str, what: str, nvrtc: Nvrtc) -> None:
    """The gate's patterns match the output of this NVRTC, for kernels with each defect."""
    variant = training(FIRST)[0]
    text = f'extern "C" __global__ void __launch_bounds__(1024, 2) {variant.entry}(float* x) {{ {program} }}'
    found = nvrtc.compile(text, "sm_90").resources
    assert any(what in x for x in complaints(variant, found)), found


# ----------------------------------------------------------------------------------------------------------------------
# Cached results


@needs_nvrtc
def test_what_was_compiled_is_looked_up(nvrtc: Nvrtc, empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = gate.Job(training(FIRST)[0], "sm_90", nvrtc)
    (first,) = gate.run([job], 1)
    assert not first.cached and (empty_cache / "kernels.sqlite3").is_file()
    compiled = []
    monkeypatch.setattr(Nvrtc, "compile", lambda self, text, architecture: compiled.append(architecture) or fake)
    fake = Compiled(f".entry {job.variant.entry}(", LOG)
    (second,) = gate.run([job], 1)
    assert second.cached and compiled == []
    assert (second.resources, second.complaints) == (first.resources, first.complaints)

    for other in (
        dataclasses.replace(job, architecture="sm_80"),
        dataclasses.replace(
            job, variant=dataclasses.replace(job.variant, loss=dataclasses.replace(FIRST, value="input"))
        ),
    ):
        (third,) = gate.run([other], 1)
        assert not third.cached
    monkeypatch.setitem(nvrtc.__dict__, "fingerprint", "another compiler")
    (fourth,) = gate.run([job], 1)
    assert not fourth.cached and len(compiled) == 3


def test_cache_keeps_values_and_works_without_a_file(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with cache.Cache("x") as one:
        assert one.get("a") is None
        one.put("a", {"b": [1]})
        with cache.Cache("x") as two:
            assert two.get("a") == {"b": [1]}
    (empty_cache / "file").touch()
    monkeypatch.setenv("CUPYLOSSES_CACHE_DIR", str(empty_cache / "file"))
    with cache.Cache("x") as memory:
        memory.put("a", 1)
        assert memory.get("a") == 1


def test_cache_lies_where_the_user_wants_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CUPYLOSSES_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache.directory() == tmp_path / "cupylosses"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache.directory() == Path.home() / ".cache" / "cupylosses"
    assert cache.key("a", "b") != cache.key("ab", "") != cache.key("", "ab")


# ----------------------------------------------------------------------------------------------------------------------
# The script


@pytest.fixture
def run_script(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    def run(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["compile_kernels.py", *arguments])
        return script.main()

    return run


@pytest.fixture
def three_compilers(monkeypatch: pytest.MonkeyPatch, script: ModuleType) -> None:
    """Stand-ins for NVRTC 11, 12 and 13 that compile nothing."""

    class Fake:
        def __init__(self, path: Path) -> None:
            self.path = path
            self.version = (int(path.name), 8)
            self.architectures = MATRIX[self.version[0]]

        def __hash__(self) -> int:
            return hash(self.path)

    monkeypatch.setattr(script, "Nvrtc", Fake)
    monkeypatch.setattr(script, "find_libraries", lambda: {x: Path(f"/{x}") for x in (11, 12, 13)})
    resources = Resources((), 32, 0, 0, 0, 0, 0, ())
    monkeypatch.setattr(gate, "run", lambda work, threads: (gate.Result(x, resources, ()) for x in work))


@pytest.mark.usefixtures("three_compilers")
def test_script_compiles_the_whole_matrix(run_script: Callable[..., int], tmp_path: Path) -> None:
    assert run_script("--matrix", "--loss", FIRST.name, "--out", str(tmp_path / "out.csv")) == 0
    rows = list(csv.DictReader((tmp_path / "out.csv").open()))
    count = Counter((x["nvrtc"], x["arch"]) for x in rows)
    assert set(count) == {(f"{cuda}.8", arch) for cuda, known in MATRIX.items() for arch in known}
    assert set(count.values()) == {len(variants(FIRST))}
    identity = [tuple(x[c] for c in gate.COLUMNS) for x in rows]
    assert len(set(identity)) == len(identity)


@pytest.mark.usefixtures("three_compilers")
def test_script_names_a_missing_compiler(
    run_script: Callable[..., int], script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "find_libraries", lambda: {13: Path("/13")})
    with pytest.raises(SystemExit, match=r"no NVRTC of CUDA 12, 11: `pip install -e \"\.\[nvrtc\]\"`"):
        run_script("--matrix")
    with pytest.raises(SystemExit, match="not for sm_70"):
        run_script("--nvrtc", "/13", "--arch", "sm_70")


@pytest.mark.usefixtures("three_compilers")
def test_script_fails_with_a_complaint(
    run_script: Callable[..., int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gate, "run", lambda work, threads: (gate.Result(x, None, ("it is wrong",)) for x in work))
    assert run_script("--nvrtc", "/13", "--arch", "sm_90", "--broad", "--loss", FIRST.name) == 1
    count = len(Variants(FIRST).broad("sm_90"))
    output = capsys.readouterr().out
    assert f"{count} kernels compiled (0 of them earlier), {count} with defects" in output
    assert output.count("by NVRTC 13.8: it is wrong") == count


@pytest.mark.usefixtures("three_compilers")
def test_table_has_a_row_per_group(
    run_script: Callable[..., int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(work: list[gate.Job], threads: int) -> Iterator[gate.Result]:
        for i, job in enumerate(work):
            yield gate.Result(job, Resources((), 100 + i, 0, 0, 0, 0, 0, ()), ())

    monkeypatch.setattr(gate, "run", run)
    assert run_script("--nvrtc", "/13", "--arch", "sm_80", "sm_90", "--broad", "--loss", FIRST.name) == 0
    rows = [x for x in capsys.readouterr().out.splitlines() if FIRST.name in x]
    assert len(rows) == 2 * len({*KINDS, PRODUCT})
    first = [i for i, x in enumerate(Variants(FIRST).broad("sm_80")) if x.kind == "value"]
    assert f" {100 + min(first)}-{100 + max(first)} " in rows[0]


# ----------------------------------------------------------------------------------------------------------------------
# Finding compilers


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An environment with the wheels of three versions."""
    for name in ("cuda_nvrtc/lib/libnvrtc.so.11.2", "cu13/lib/libnvrtc.so.13", "cuda_nvrtc/lib/libnvrtc.so.12"):
        path = tmp_path / "nvidia" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    monkeypatch.setattr(nvrtc_module.site, "getsitepackages", lambda: [str(tmp_path)])
    monkeypatch.setattr(nvrtc_module.site, "getusersitepackages", lambda: "")
    monkeypatch.setattr(nvrtc_module.sys, "path", [])
    monkeypatch.setenv("CUDA_PATH", str(tmp_path / "nowhere"))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    return tmp_path / "nvidia"


def test_all_versions_are_found_side_by_side(installed: Path) -> None:
    assert find_libraries() == {
        11: installed / "cuda_nvrtc/lib/libnvrtc.so.11.2",
        12: installed / "cuda_nvrtc/lib/libnvrtc.so.12",
        13: installed / "cu13/lib/libnvrtc.so.13",
    }


def test_the_newest_library_is_chosen(installed: Path) -> None:
    assert find_library.__wrapped__() == installed / "cu13/lib/libnvrtc.so.13"

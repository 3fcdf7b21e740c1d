"""The kernels compile, without a GPU: a part of what ``scripts/compile_kernels.py`` does for all of them."""

from __future__ import annotations

import dataclasses
from functools import cache
from pathlib import Path

import pytest

from cupylosses.codegen import KINDS, Variant, source
from cupylosses.definition import Loss, registry
from cupylosses.testing.nvrtc import Compiled, CompileError, Nvrtc, find_library
from cupylosses.testing.variants import complaints, variants, wide_accesses

pytestmark = pytest.mark.skipif(find_library() is None, reason="no NVRTC: `pip install nvidia-cuda-nvrtc`")

#: The oldest that CUDA 13 knows, whose 16-bit conversions are spelled out; the next, which has instructions for them.
ARCHITECTURES = ("sm_75", "sm_80", "sm_90")


@pytest.fixture(scope="module")
def nvrtc() -> Nvrtc:
    return Nvrtc()


@cache
def compiled(nvrtc: Nvrtc, variant: Variant, architecture: str) -> Compiled:
    return nvrtc.compile(source(variant), architecture)


def one_pass(loss: Loss, *dtypes: str) -> list[Variant]:
    """The kernels of training: contiguous operands of one dtype, the value and the gradient of the prediction."""
    count = len(loss.operands)
    return [
        x
        for x in variants(loss)
        if x.kind == "value_and_gradient"
        and (x.layout, x.gradients) == ("flat", (True,) + (False,) * (count - 1))
        and x.storage in [(dtype,) * count for dtype in dtypes]
        and x.lanes > 1
    ]


def chosen(loss: Loss, architecture: str) -> list[Variant]:
    """One dtype (bfloat16) and setting of the flags of each kernel and layout; on older GPUs, what differs there."""
    if architecture != ARCHITECTURES[-1]:
        return one_pass(loss, "float16", "bfloat16")
    return list({(x.kind, x.layout): x for x in variants(loss, fast=True)}.values())


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_kernels_compile_without_a_warning(loss: Loss, architecture: str, nvrtc: Nvrtc) -> None:
    if architecture not in nvrtc.architectures:
        pytest.skip(f"NVRTC {nvrtc.version} does not know {architecture}")
    for variant in chosen(loss, architecture):
        found = compiled(nvrtc, variant, architecture)
        assert f".entry {variant.entry}(" in found.ptx
        assert not found.warnings, variant.title
        loads, stores = wide_accesses(variant)
        assert found.wide_loads >= loads and found.wide_stores >= stores, variant.title


def test_one_pass_kernels_keep_everything_in_registers(loss: Loss, nvrtc: Nvrtc) -> None:
    for variant in one_pass(loss, "bfloat16", "float32"):
        assert complaints(variant, compiled(nvrtc, variant, ARCHITECTURES[-1])) == [], variant.title


def test_the_choice_covers_every_kernel(loss: Loss) -> None:
    assert {x.kind for x in chosen(loss, ARCHITECTURES[-1])} == set(KINDS)
    assert {x.kind for x in variants(loss)} == set(KINDS)


def test_contiguous_kernels_are_expected_to_move_16_bytes(loss: Loss) -> None:
    """The condition that the checks above rest on is not vacuous."""
    for variant in variants(loss, fast=True):
        if variant.layout == "flat":
            loads, stores = wide_accesses(variant)
            assert loads >= len(loss.operands)
            assert (stores > 0) == (variant.kind != "value")


def test_a_mistake_in_an_expression_is_reported_where_it_is(nvrtc: Nvrtc) -> None:
    loss = next(iter(registry().values()))
    wrong = dataclasses.replace(loss, value="no_such_primitive(0.0)", let={})
    variant = dataclasses.replace(variants(loss, fast=True)[0], loss=wrong)
    with pytest.raises(CompileError, match=rf"{loss.name}\.value\(1\): error.*no_such_primitive"):
        nvrtc.compile(source(variant), "sm_90")


def test_spills_narrow_accesses_and_warnings_are_complaints() -> None:
    loss = next(iter(registry().values()))
    variant = one_pass(loss, "float32")[0]
    log = "x.cu(1): warning #177-D\n16 bytes stack frame, 24 bytes spill stores, 8 bytes spill loads\nUsed 64 registers"
    bad = Compiled("ld.global.cs.b32 %r1, [%rd1];\nst.global.cs.v2.b32 [%rd1], {%r1, %r2};", log)
    assert (bad.registers, bad.spills, bad.stack, bad.wide_loads, bad.wide_stores) == (64, 32, 16, 0, 0)
    assert [x.split(" ")[0] for x in complaints(variant, bad)] == ["x.cu(1):", "32", "0", "0"]
    wide = "ld.global.cs.v4.b32 {%r1, %r2, %r3, %r4}, [%rd1];\n" * 2 + "st.global.cs.v2.b64 [%rd1], {%rd2, %rd3};\n"
    good = Compiled(wide, log.replace("24", "0").replace("8 bytes", "0 bytes").partition("\n")[2])
    assert complaints(variant, good) == []


def test_the_newest_library_is_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from cupylosses.testing import nvrtc as module

    for name in ("cuda_nvrtc/lib/libnvrtc.so.11.2", "cu13/lib/libnvrtc.so.13", "cuda_nvrtc/lib/libnvrtc.so.12"):
        path = tmp_path / "nvidia" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    monkeypatch.setattr(module.site, "getsitepackages", lambda: [str(tmp_path)])
    monkeypatch.setattr(module.site, "getusersitepackages", lambda: "")
    monkeypatch.setattr(module.sys, "path", [])
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.delenv("CUDA_HOME", raising=False)
    assert str(find_library.__wrapped__()).endswith("libnvrtc.so.13")

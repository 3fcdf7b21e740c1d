"""File safety: loaded code, written sources, cached results."""

from __future__ import annotations

import ctypes
import os
import sqlite3
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from devices import HOST
from tools import cache
from tools.variants import variants

import cupylosses
from cupylosses.definition.registry import registry
from cupylosses.engines.pointwise.codegen import PointwiseKernel
from cupylosses.engines.pointwise.definition import Loss
from cupylosses.jit import compiler
from cupylosses.testing.host import build, objects

needs_compiler = pytest.mark.skipif(not HOST, reason="needs a C++ compiler on Linux")


# ----------------------------------------------------------------------------------------------------------------------
# Source of a kernel that did not compile


@pytest.fixture
def variant() -> PointwiseKernel:
    return variants(registry(Loss)["mse_loss"], fast=True)[0]


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch, variant: PointwiseKernel) -> Callable[[], str]:
    """Compiles with a CuPy that rejects every kernel, and returns the error message."""

    class Refusal(Exception):
        """Stands in for CuPy's CompileException."""

    def raw_module(**_: Any) -> None:
        raise Refusal("expected a ;")

    names = ("cupy", "cupy.cuda", "cupy.cuda.compiler")
    modules: dict[str, Any] = {name: types.ModuleType(name) for name in names}
    modules["cupy"].RawModule, modules["cupy.cuda.compiler"].CompileException = raw_module, Refusal
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(compiler, "_kernels", {})
    monkeypatch.setattr(compiler, "options", tuple)

    def message() -> str:
        with pytest.raises(cupylosses.KernelError) as caught:
            compiler.kernel(variant)
        assert isinstance(caught.value.__cause__, Refusal)
        return str(caught.value)

    return message


def test_a_source_that_cannot_be_written_does_not_hide_the_compilers_error(
    refused: Callable[[], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("CUPYLOSSES_DUMP_DIR", str(tmp_path / "file" / "dump"))
    message = refused()
    assert "expected a ;" in message
    assert "could not be written" in message and "set CUPYLOSSES_DUMP_DIR" in message


def test_sources_are_written_where_nobody_else_can_read_or_plant_a_link(
    refused: Callable[[], str], monkeypatch: pytest.MonkeyPatch, variant: PointwiseKernel
) -> None:
    monkeypatch.delenv("CUPYLOSSES_DUMP_DIR", raising=False)
    path = compiler.dump(variant)
    assert str(path) in refused()
    assert path.parent.stat().st_mode & 0o077 == 0 and path.parent.stat().st_uid == os.getuid()
    assert compiler.dump(variant) == path and [*path.parent.iterdir()] == [path]
    path.unlink()
    path.parent.rmdir()
    compiler._dump_directory.cache_clear()


def test_a_link_in_the_place_of_a_source_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variant: PointwiseKernel
) -> None:
    monkeypatch.setenv("CUPYLOSSES_DUMP_DIR", str(tmp_path / "dump"))
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "dump").mkdir()
    (tmp_path / "dump" / f"{variant.title}.cu").symlink_to(victim)
    path = compiler.dump(variant, "the source")
    assert victim.read_text() == "precious"
    assert path.read_text() == "the source" and not path.is_symlink()


# ----------------------------------------------------------------------------------------------------------------------
# The cache of shared objects


@pytest.fixture
def host_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CUPYLOSSES_HOST_CACHE", str(tmp_path / "host"))
    return objects.directory()


def stored(directory: Path, name: str, content: bytes = b"code") -> Path:
    """Stores an object in the cache."""
    (directory / "built").write_bytes(content)
    objects.keep(directory / "built", directory / name)
    return directory / name


def test_a_new_cache_is_its_owners_alone(host_cache: Path) -> None:
    assert host_cache.stat().st_mode & 0o777 == 0o700
    assert objects.find(stored(host_cache, "x.so"))
    assert not objects.find(host_cache / "y.so")


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o1777])
def test_nothing_is_loaded_from_a_cache_that_others_can_write_to(host_cache: Path, mode: int) -> None:
    stored(host_cache, "x.so")
    host_cache.chmod(mode)
    with pytest.raises(objects.UnsafeCacheError, match=rf"{host_cache}.*mode {mode:o}.*`chmod go-w"):
        objects.directory()
    with pytest.raises(objects.UnsafeCacheError):
        build.runtime.__wrapped__()


def test_objects_of_others_and_links_are_not_loaded(host_cache: Path, tmp_path: Path) -> None:
    path = stored(host_cache, "x.so")
    path.chmod(0o777)
    assert not objects.find(path)
    path.chmod(0o755)
    assert objects.find(path)
    path.rename(tmp_path / "elsewhere.so")
    path.symlink_to(tmp_path / "elsewhere.so")
    assert not objects.find(path)
    path = stored(host_cache, "x.so")
    assert objects.find(path) and not path.is_symlink()


@pytest.mark.parametrize(
    "damage",
    [lambda x: x[:-1], lambda x: x[: len(x) // 2], lambda x: b"", lambda x: b"D" + x[1:]],
    ids=["a byte short", "truncated", "empty", "another byte"],
)
def test_a_damaged_object_is_not_loaded(host_cache: Path, damage: Callable[[bytes], bytes]) -> None:
    path = stored(host_cache, "x.so")
    path.write_bytes(damage(path.read_bytes()))
    assert not objects.find(path)


@needs_compiler
def test_a_truncated_object_is_built_again() -> None:
    source = 'extern "C" __global__ void truncated_probe(int* a) { *a = 1; }'
    path = build.of_source("truncated_probe", source)
    try:
        whole = path.read_bytes()
        path.write_bytes(whole[: len(whole) // 2])
        assert build.of_source("truncated_probe", source) == path
        assert path.read_bytes()[:4] == b"\x7fELF" and objects.find(path)
        ctypes.CDLL(str(path))
    finally:
        path.unlink()


def test_the_cache_is_pruned(host_cache: Path) -> None:
    paths = [stored(host_cache, f"{i}.so", b"x" * 1000) for i in range(8)]
    for age, path in enumerate(paths):
        os.utime(path, (10**9 - age, 10**9 - age))
    assert objects.find(paths[7]), "which is used now"
    old, young = host_cache / "tmpold", host_cache / "tmpyoung"
    for work in (old, young):
        work.mkdir()
        (work / "kernel.cpp").touch()
    os.utime(old, (10**9, 10**9))
    size = paths[0].stat().st_size
    objects.prune(host_cache, 10 * size)
    assert {*host_cache.iterdir()} == {*paths, young}
    objects.prune(host_cache, 4 * size)
    assert {*host_cache.iterdir()} == {paths[7], paths[0], paths[1], young}


def test_the_first_object_of_a_process_prunes(host_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pruned: list[Path] = []
    monkeypatch.setattr(objects, "prune", pruned.append)
    stored(host_cache, "x.so")
    stored(host_cache, "y.so")
    assert pruned == [host_cache]


# ----------------------------------------------------------------------------------------------------------------------
# Cached results


def break_value(path: Path) -> None:
    database = sqlite3.connect(path)
    database.execute("UPDATE results SET value = '{'")
    database.commit()
    database.close()


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(b"x" * 5000),
        lambda path: path.write_bytes(path.read_bytes()[:3000]),
        lambda path: path.write_bytes(path.read_bytes()[:100]),
        lambda path: path.write_bytes(path.read_bytes()[:4096] + b"\xff" * 8192 + path.read_bytes()[12288:]),
        break_value,
    ],
    ids=["garbage", "truncated", "header", "pages", "value"],
)
def test_a_damaged_database_is_replaced(
    damage: Callable[[Path], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUPYLOSSES_CACHE_DIR", str(tmp_path))
    with cache.Cache("x") as results:
        for i in range(300):
            results.put(f"key {i}", "value" * 20)
    damage(tmp_path / "x.sqlite3")
    with cache.Cache("x") as results:
        found = [results.get(f"key {i}") for i in range(300)]
        assert set(found) <= {None, "value" * 20} and None in found
        results.put("new", 1)
    with cache.Cache("x") as results:
        assert results.get("new") == 1, "kept in a file again"

"""The first call of a process: its kernels compile concurrently, and it does not import torch's graph compiler."""

from __future__ import annotations

import subprocess
import sys
import threading
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from tools.representatives import representatives
from tools.variants import variants

from cupylosses import torch_compat
from cupylosses.jit import compiler
from cupylosses.jit.kernel import Kernel


class Loads(compiler.Launcher):
    """A launcher whose load waits until another load has begun, and then fails if ``error`` is set."""

    both = threading.Barrier(2)
    error: Exception | None = None

    @classmethod
    def load(cls, variant: Kernel, shared: int = 0) -> Any:
        cls.both.wait(10)
        if cls.error is not None:
            raise cls.error
        return lambda *arguments: launched.append((threading.get_ident(), arguments)), 7

    def _enter(self) -> None:
        pass


launched: list[Any] = []


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    monkeypatch.setattr(compiler, "is_compiled", lambda variant: False)
    monkeypatch.setattr(compiler, "current_device", lambda: 3)
    monkeypatch.setattr(compiler, "use_device", lambda device: devices.append(device))
    devices.clear()
    launched.clear()
    return variants(representatives()[0], fast=True)[:2]


devices: list[int] = []


def test_kernels_of_one_call_compile_at_once(kernels: list[Any]) -> None:
    with compiler.background():
        second = Loads(kernels[1], 5, 32, ())
    Loads(kernels[0], 5, 32, ())
    second.launch(11, 13)
    second.launch(11, 13)
    assert launched == [(threading.get_ident(), (7, 5, 1, 1, 32, 1, 1, 0, 11, 13, 0))] * 2 and devices == [3]


def test_the_first_launch_raises_what_the_compilation_did(kernels: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Loads, "error", compiler.KernelError("no compiler"))
    with compiler.background():
        second = Loads(kernels[1], 5, 32, ())
    with pytest.raises(compiler.KernelError, match="no compiler"):
        Loads(kernels[0], 5, 32, ())
    with pytest.raises(compiler.KernelError, match="no compiler"):
        second.launch(11, 13)


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The state before the first kernel of a process: CuPy has not compiled its empty program."""
    cache: dict[str, str] = {}
    cuda: Any = SimpleNamespace(compiler=SimpleNamespace(_empty_file_preprocess_cache=cache))
    monkeypatch.setitem(sys.modules, "cupy", ModuleType("cupy"))
    monkeypatch.setitem(sys.modules, "cupy.cuda", cuda)
    monkeypatch.setattr(compiler, "first_begun", threading.Lock())
    monkeypatch.setattr(compiler, "first_compiled", threading.Event())
    return cache


def test_the_launch_that_a_call_waits_for_is_the_first_to_compile(kernels: list[Any], known: dict[str, str]) -> None:
    order: list[Any] = []
    waiting = threading.Event()

    class Compiles(Loads):
        @classmethod
        def load(cls, variant: Kernel, shared: int = 0) -> Any:
            if variant is kernels[0]:
                assert waiting.wait(10)
            waiting.set()
            with compiler.behind_the_first():
                order.append(variant)
                known["environment"] = "build of the compiler"
            return lambda *arguments: None, 7

    with compiler.background():
        both = [Compiles(x, 5, 32, ()) for x in kernels]
    for launcher in both:
        launcher.launch(11, 13)
    assert order == kernels


def test_later_kernels_wait_until_the_first_one_has_passed_the_empty_program(known: dict[str, str]) -> None:
    passed = threading.Event()

    def later() -> None:
        with compiler.behind_the_first():
            passed.set()

    with compiler.behind_the_first():
        thread = threading.Thread(target=later)
        thread.start()
        assert not passed.wait(0.05)
        known["environment"] = "build of the compiler"
        assert passed.wait(10)
    thread.join()
    known.clear()
    later()  # It does not wait if the first one has failed, either.


@pytest.mark.programs
def test_a_first_loss_imports_no_graph_compiler() -> None:
    """Dynamo and its imports take seconds, even for users who never compile a graph.

    So do lazy modules, which import themselves when one of their attributes is accessed.
    """
    code = (
        "import sys, types, torch, cupylosses.functional as F\n"
        "class Lazy(types.ModuleType):\n"
        "    def __getattr__(self, name):\n"
        "        print(name)\n"
        "sys.modules['lazy'] = Lazy('lazy')\n"
        "x = torch.ones(3, 4, requires_grad=True)\n"
        "(F.mse_loss(x, torch.zeros(3, 4)) + F.cross_entropy(x, torch.zeros(3, dtype=torch.int64))).backward()\n"
        "print(*[x for x in ('torch._dynamo', 'torch._inductor', 'sympy') if x in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_functions_are_marked_as_torch_marks_them() -> None:
    def ours() -> None: ...
    def theirs() -> None: ...

    torch_compat.assume_constant_result(ours)
    torch.compiler.assume_constant_result(theirs)
    assert vars(ours) == vars(theirs) != {}

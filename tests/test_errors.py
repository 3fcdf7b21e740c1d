"""Bad calls and broken installations: the exception, and a message with function, argument, got, expected, remedy."""

from __future__ import annotations

import contextlib
import numbers
import re
import sys
import warnings
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from tools.variants import variants

import cupylosses
import cupylosses.functional as F
import cupylosses.nn
from cupylosses import checks, interop
from cupylosses.definition.base import Operand
from cupylosses.engines.pointwise import checks as pointwise_checks
from cupylosses.engines.pointwise.codegen import PointwiseKernel
from cupylosses.engines.pointwise.definition import Loss
from cupylosses.jit import compiler
from cupylosses.testing.check import by_position
from cupylosses.testing.pointwise import eager

X, Y = torch.rand(4, 3), torch.rand(4, 3)

pytestmark = pytest.mark.in_turn


def required(loss: Loss) -> int:
    """The number of required operands."""
    return sum(x.default is None for x in loss.operands)


def call(loss: Loss, *operands: Any, **options: Any) -> Any:
    """Calls the function of a definition; valid operands replace missing ones."""
    missing = len(loss.operands) - len(operands)
    device = next((x.device for x in operands if isinstance(x, torch.Tensor)), "cpu")
    return by_position(loss)(*operands, *[X.to(device)] * missing, **options)


def with_operand(loss: Loss, position: int, value: Any) -> list[Any]:
    """Valid operands except for one."""
    return [value if i == position else X for i in range(len(loss.operands))]


def each_operand(loss: Loss) -> list[tuple[int, Operand]]:
    return list(enumerate(loss.operands))


# ----------------------------------------------------------------------------------------------------------------------
# For every loss


@pytest.mark.representatives
@pytest.mark.parametrize("value", [1.0, 2, None, [1.0, 2.0], "x", numpy.float32(1)], ids=lambda x: type(x).__name__)
def test_operand_that_is_no_array(loss: Loss, value: Any) -> None:
    for i, operand in each_operand(loss):
        if (operand.number and isinstance(value, numbers.Real)) or (operand.default is not None and value is None):
            call(loss, *with_operand(loss, i, value))
            continue
        expected = (
            rf"^{loss.name}: `{operand.name}` must be a torch.Tensor, .*, got {type(value).__name__}; "
            r"wrap it with `torch.as_tensor"
        )
        with pytest.raises(TypeError, match=expected):
            call(loss, *with_operand(loss, i, value))


@pytest.mark.representatives
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128, torch.float8_e4m3fn], ids=str)
def test_operand_of_an_unsupported_dtype(loss: Loss, dtype: torch.dtype, device: str) -> None:
    for i, operand in each_operand(loss):
        name = str(dtype).removeprefix("torch.")
        expected = rf"^{loss.name}: `{operand.name}` must have one of the dtypes float16, .*, got {name}\. Convert"
        operands = [x.to(device) for x in with_operand(loss, i, X.to(dtype))]
        with pytest.raises(TypeError, match=expected):
            call(loss, *operands)


@pytest.mark.representatives
def test_sparse_operand(loss: Loss, device: str) -> None:
    for i, operand in each_operand(loss):
        operands = [x.to(device) for x in with_operand(loss, i, X.to_sparse())]
        with pytest.raises(TypeError, match=rf"^{loss.name}: `{operand.name}` must be a dense tensor, got .*to_dense"):
            call(loss, *operands)


def test_integers_where_the_definition_takes_none(loss: Loss, device: str) -> None:
    for i, operand in each_operand(loss):
        operands = [x.to(device) for x in with_operand(loss, i, X.long())]
        if operand.integer:
            call(loss, *operands)
            continue
        with pytest.raises(
            TypeError, match=rf"^{loss.name}: `{operand.name}` must have one of .*, got int64\. Convert"
        ):
            call(loss, *operands)


def test_integers_alone(loss: Loss, device: str) -> None:
    if all(x.integer for x in loss.operands):
        operands = [X.int().to(device)] * len(loss.operands)
        with pytest.raises(TypeError, match=rf"^{loss.name}: at least one operand must be floating, got .* of int32"):
            call(loss, *operands)


@pytest.mark.representatives
def test_shapes_that_do_not_broadcast(loss: Loss, device: str) -> None:
    shapes = [(4, 3)] * (len(loss.operands) - 1) + [(4, 2)]
    got = " and ".join(re.escape(f"`{x.name}` of shape {s}") for x, s in zip(loss.operands, shapes, strict=True))
    message = f"the shapes do not broadcast, got {got}"
    if loss.operands[-1].per_row:
        message = rf"`{loss.operands[-1].name}` must have the shape \(4, 3\) .* got \(4, 2\)"
    with pytest.raises(ValueError, match=rf"^{loss.name}: {message}\. .*reshape"):
        call(loss, *(torch.rand(s, device=device) for s in shapes))


@pytest.mark.representatives
@pytest.mark.parametrize(("shape", "index"), [((4, 3), "[:, None]"), ((4, 2, 3), "[:, None, None]")])
def test_one_value_per_row_is_told_how(loss: Loss, shape: tuple[int, ...], index: str) -> None:
    """A 1-d target belongs to the last dimension; a user who meant the first is shown an expression, which works."""
    first, second = torch.rand(shape), torch.rand(shape[0])
    rest = [first] * (len(loss.operands) - 2)
    name = loss.operands[1].name
    with pytest.raises(ValueError, match=re.escape(f"for one value per row use `{name}{index}`.")):
        call(loss, first, second, *rest)
    with pytest.warns() if loss.warn_broadcast else _quiet():
        call(loss, first, eval(f"second{index}"), *rest)


class _quiet:
    def __enter__(self) -> None: ...
    def __exit__(self, *_: Any) -> None: ...


@pytest.mark.representatives
@pytest.mark.parametrize("value", ["avg", "", None, 1, True, ["mean"]], ids=repr)
def test_unknown_reduction(loss: Loss, value: Any) -> None:
    choices = ", ".join(repr(x) for x in loss.reductions)
    with pytest.raises(
        ValueError, match=re.escape(f"{loss.name}: `reduction` must be one of {choices}, got {value!r}")
    ):
        call(loss, reduction=value)


def test_parameters_out_of_range(loss: Loss) -> None:
    for parameter in loss.parameters:
        bad = [float("nan"), float("-inf")] if parameter.minimum > float("-inf") else [float("nan")]
        bad += [parameter.minimum] if parameter.exclusive else []
        for value in bad:
            expected = f"{loss.name}: `{parameter.name}` must be {parameter.requirement}, got {value!r}."
            with pytest.raises(ValueError, match=f"^{re.escape(expected)}$"):
                call(loss, **{parameter.name: value})


@pytest.mark.parametrize("value", ["1", None, True, 1j, [1.0]], ids=repr)
def test_parameters_of_another_type(loss: Loss, value: Any) -> None:
    for parameter in loss.parameters:
        expected = f"{loss.name}: `{parameter.name}` must be {parameter.requirement}, got {type(value).__name__}."
        with pytest.raises(TypeError, match=f"^{re.escape(expected)}$"):
            call(loss, **{parameter.name: value})


@pytest.mark.parametrize("value", [torch.tensor(1.0), numpy.array(1.0)], ids=lambda x: type(x).__name__)
def test_parameters_that_are_tensors(loss: Loss, value: Any) -> None:
    """A tensor would need a synchronization, which the user should choose."""
    for parameter in loss.parameters:
        with pytest.raises(TypeError, match=rf"`{parameter.name}` must be .*, got \w+\. Take it .* with `\.item\(\)`"):
            call(loss, **{parameter.name: value})


@pytest.mark.parametrize("value", [1, numpy.float32(1.0), numpy.int64(1)], ids=lambda x: type(x).__name__)
def test_parameters_may_be_any_real_number(loss: Loss, value: Any) -> None:
    for parameter in loss.parameters:
        if parameter.accepts(float(value)):
            assert torch.equal(call(loss, **{parameter.name: value}), call(loss, **{parameter.name: float(value)}))


@pytest.mark.parametrize("value", [1, 0, None, "yes", numpy.True_, torch.tensor(True)], ids=repr)
def test_flags_are_their_choices(loss: Loss, value: Any) -> None:
    for flag in loss.flags:
        choices = " or ".join(map(repr, flag.choices))
        with pytest.raises(TypeError, match=rf"^{loss.name}: `{flag.name}` must be {re.escape(choices)}, got .*\.$"):
            call(loss, **{flag.name: value})


@pytest.mark.representatives
def test_mixed_libraries(loss: Loss) -> None:
    for i, operand in each_operand(loss):
        expected = (
            rf"^{loss.name}: operands must come from one array library, got .*`{operand.name}` from numpy.*Convert"
        )
        with pytest.raises(TypeError, match=expected):
            call(loss, *with_operand(loss, i, X.numpy()))


@pytest.mark.representatives
@pytest.mark.gpu
def test_mixed_devices(loss: Loss) -> None:
    for i, operand in each_operand(loss):
        expected = rf"^{loss.name}: operands must be on one device, got .*`{operand.name}` on cuda:0.*\.to\(device\)"
        with pytest.raises(ValueError, match=expected):
            call(loss, *with_operand(loss, i, X.cuda()))


def test_missing_and_unknown_arguments(loss: Loss) -> None:
    function = getattr(F, loss.name)
    needed = [x.name for x in loss.operands if x.default is None]
    with pytest.raises(TypeError, match=rf"{loss.name}\(\) missing .*'{needed[-1]}'"):
        function(**dict.fromkeys(needed[:-1], X))
    with pytest.raises(TypeError, match=rf"{loss.name}\(\) got an unexpected keyword argument 'wieght'"):
        call(loss, wieght=X)


@pytest.mark.parametrize("size_average", [None, True, False])
@pytest.mark.parametrize("reduce", [None, True, False])
def test_legacy_arguments_warn_and_work(loss: Loss, size_average: bool | None, reduce: bool | None) -> None:
    if not loss.legacy or size_average is reduce is None:
        return
    meant = torch.nn._reduction.legacy_get_string(size_average, reduce, emit_warning=False)
    expected = f"{loss.name}: `size_average` and `reduce` are deprecated; use reduction={meant!r}."
    expected_value = getattr(F, loss.name)(*[X] * required(loss), reduction=meant)
    for name, function in ways(loss).items():
        with pytest.warns(UserWarning, match=re.escape(expected)) as caught:
            found = function(*[X] * required(loss), size_average=size_average, reduce=reduce)
        assert torch.equal(found, expected_value)
        assert len(caught) == 1
        assert Path(caught[0].filename) == Path(__file__), f"the warning points at the caller, {name}"


def ways(loss: Loss) -> dict[str, Callable[..., Any]]:
    """Several ways to call a loss from a line of a user's code."""
    function = getattr(F, loss.name)
    return {
        "function": lambda *operands, **options: function(*operands, **options),
        "value_and_grad": lambda *operands, **options: cupylosses.value_and_grad(function, *operands, **options)[0],
    }


def test_broadcast_warning_points_at_the_caller(loss: Loss, device: str) -> None:
    """There is one warning per call, even if the call computes two sums."""
    operands = [torch.rand(4, 3, device=device), *[torch.rand(1, 3, device=device)] * (required(loss) - 1)]
    mask = torch.rand(4, 3, device=device) < 0.5
    module = getattr(cupylosses.nn, loss.class_name)()
    calls = ways(loss) | {"module": lambda *operands, **options: module(*operands, **options)}
    for (name, function), options in product(calls.items(), ({}, {"mask": mask, "dim": 0})):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            function(*operands, **options)
        assert len(caught) == loss.warn_broadcast
        assert all(Path(w.filename) == Path(__file__) for w in caught), f"{name}, {options.keys()}"


def test_broadcast_warning_is_torchs(loss: Loss, device: str, recwarn: pytest.WarningsRecorder) -> None:
    """torch warns for some losses; we warn for the same."""
    operands = [torch.rand(4, 3, device=device), *[torch.rand(1, 3, device=device)] * (len(loss.operands) - 1)]
    call(loss, *operands)
    ours = [w for w in recwarn.list if "broadcast" in str(w.message)]
    recwarn.clear()
    theirs = eager.twin(loss, loss.values(), "mean")
    with contextlib.suppress(ValueError, RuntimeError):  # Some losses do not broadcast.
        if theirs:
            theirs(*operands)
    torchs = [w for w in recwarn.list if "broadcast" in str(w.message)]
    assert len(ours) == len(torchs) == loss.warn_broadcast
    for w in ours:
        assert re.match(
            rf"{loss.name}: `\w+` of shape \(1, 3\) is broadcast against `\w+` of shape \(4, 3\)", str(w.message)
        )


# ----------------------------------------------------------------------------------------------------------------------
# value_and_grad, as data


@pytest.mark.parametrize(
    ("bad_call", "exception", "message"),
    [
        (
            lambda: cupylosses.value_and_grad(torch.nn.functional.mse_loss, X, Y),
            TypeError,
            r"^value_and_grad: `loss` must be a function of cupylosses.functional or its name, got <function",
        ),
        (lambda: cupylosses.value_and_grad("mse", X, Y), TypeError, r"got 'mse'; there are .*mse_loss"),
        (lambda: cupylosses.value_and_grad(F.mse_loss, X), TypeError, r"^mse_loss\(\) missing .* argument: 'target'$"),
        (
            lambda: cupylosses.value_and_grad(F.mse_loss, X, Y, Y),
            TypeError,
            "operands input, target, got 3 by position",
        ),
        (lambda: cupylosses.value_and_grad(F.mse_loss, X, Y, argnums="weight"), TypeError, "`weight` is no array in"),
        (lambda: cupylosses.value_and_grad(F.mse_loss, X, Y, argnums=2), ValueError, "within 0 to 1, got 2"),
        (lambda: cupylosses.value_and_grad(F.mse_loss, X, Y, argnums=(0, -3)), ValueError, "within 0 to 1, got -3"),
        (
            lambda: cupylosses.value_and_grad(F.mse_loss, X, Y.int(), argnums=1),
            TypeError,
            "`target` of int32 has no gra",
        ),
        (
            lambda: cupylosses.value_and_grad(F.mse_loss, X, Y, beta=1.0),
            TypeError,
            r"^mse_loss\(\) got .*argument 'beta'",
        ),
        (lambda: cupylosses.value_and_grad(F.mse_loss, X, 3), TypeError, "`target` must be a torch.Tensor.*, got int"),
        (lambda: cupylosses.value_and_grad(F.mse_loss, X, Y.numpy()), TypeError, "must come from one array library"),
        (lambda: cupylosses.value_and_grad(F.mse_loss, X, Y, reduction="max"), ValueError, "one of .*, got 'max'"),
    ],
)
def test_bad_calls_of_value_and_grad(bad_call: Callable[[], Any], exception: type, message: str) -> None:
    with pytest.raises(exception, match=message):
        bad_call()


def test_no_arguments_no_gradients() -> None:
    value, gradients = cupylosses.value_and_grad(F.mse_loss, X, Y, argnums=())
    assert torch.equal(value, F.mse_loss(X, Y))
    assert gradients == ()


# ----------------------------------------------------------------------------------------------------------------------
# Kernels that do not compile. A stand-in replaces the compiler, so that this runs without a GPU.


def some_variant(loss: Loss = F.mse_loss.loss) -> PointwiseKernel:
    return next(v for v in variants(loss, fast=True) if v.kind == "value_and_gradient")


@pytest.fixture
def broken_cupy(kernel_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Exception], None]:
    """Makes CuPy raise when a module is compiled."""
    cupy = pytest.importorskip("cupy")

    def arrange(error: Exception) -> None:
        class Module:
            def __init__(self, **_: Any) -> None: ...

            def compile(self) -> None:
                raise error

        monkeypatch.setattr(cupy, "RawModule", Module)

    return arrange


@pytest.mark.representatives
def test_compile_error_says_what_and_where(broken_cupy: Callable[..., None], loss: Loss, kernel_cache: Path) -> None:
    from cupy.cuda.compiler import CompileException

    variant = some_variant(loss)
    log = f'{loss.name}.value(1): error: identifier "inptu" is undefined'
    broken_cupy(CompileException(log, "", "kernel.cu", ()))
    with pytest.raises(cupylosses.KernelError) as caught:
        compiler.kernel(variant)
    message = str(caught.value)
    assert message.startswith(f"{loss.name}: the kernel `{variant.entry}` for ")
    for operand, dtype in zip(loss.operands, variant.storage, strict=True):
        assert f"`{operand.name}` of {dtype}" in message
    assert log in message
    where = Path(re.search(r"The whole source is in (.*\.cu)\.$", message).group(1))
    assert where == kernel_cache / "dump" / f"{variant.title}.cu"
    assert where.read_text(encoding="utf-8") == variant.source()


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (
            RuntimeError("Failed to auto-detect CUDA root directory. Please specify ..."),
            r"pip install .*\[ctk\].*CUDA_PATH",
        ),
        (RuntimeError("CuPy failed to find the CUDA headers"), r"pip install .*\[ctk\]"),
        (RuntimeError("CuPy failed to load libnvrtc.so.12: cannot open shared object"), r"pip install .*nvrtc"),
        (RuntimeError("CUDA_ERROR_NO_BINARY_FOR_GPU: no kernel image is available"), "newer CUDA version"),
        (RuntimeError("something else"), "could not be loaded: something else"),
        (PermissionError(13, "Permission denied", "/cache"), "Set CUPY_CACHE_DIR to a writable directory"),
        (OSError(28, "No space left on device"), "CUPY_CACHE_IN_MEMORY=1"),
    ],
    ids=lambda x: str(x)[:30] if isinstance(x, Exception) else "",
)
def test_broken_installations_are_explained(broken_cupy: Callable[..., None], error: Exception, remedy: str) -> None:
    broken_cupy(error)
    with pytest.raises(cupylosses.KernelError, match=f"(?s)^mse_loss: .*{remedy}") as caught:
        compiler.kernel(some_variant())
    assert str(error) in str(caught.value)
    assert caught.value.__cause__ is error


def test_a_failure_is_not_remembered(broken_cupy: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    broken_cupy(RuntimeError("once"))
    variant = some_variant()
    with pytest.raises(cupylosses.KernelError, match="once"):
        compiler.kernel(variant)
    broken_cupy(RuntimeError("twice"))
    with pytest.raises(cupylosses.KernelError, match="twice"):
        compiler.kernel(variant)


@pytest.mark.gpu
def test_compiler_points_into_the_definition(kernel_cache: Path) -> None:
    """The log of the real compiler names the wrong expression, by the name of the loss."""
    wrong = Loss(
        name="misspelt",
        summary="",
        formula="",
        operands=(Operand("a", ""), Operand("b", "")),
        let={"d": "a - b"},
        value="where(d, a, b)",
        reference=lambda xp, a, b: (a - b) ** 2,
    )
    variant = some_variant(wrong)
    expected = r"(?s)misspelt\.value\(1\).*no instance of overloaded function .where"
    with pytest.raises(cupylosses.KernelError, match=expected):
        compiler.kernel(variant)
    assert (kernel_cache / "dump" / f"{variant.title}.cu").is_file()


@pytest.mark.gpu
def test_unwritable_kernel_cache(python: Callable[..., str], tmp_path: Path) -> None:
    """A file exists at the path of the cache directory."""
    blocked = tmp_path / "blocked"
    blocked.write_text("")
    program = """
import torch, cupylosses.functional as F
x = torch.rand(8, device="cuda")
try:
    F.mse_loss(x, x)
except (ImportError, RuntimeError) as error:
    print(error)
"""
    assert "CUPY_CACHE_DIR to a writable" in python(program, CUPY_CACHE_DIR=str(blocked))


# ----------------------------------------------------------------------------------------------------------------------
# Missing CuPy and torch


@pytest.fixture
def forget_cupy(monkeypatch: pytest.MonkeyPatch) -> Any:
    interop.cupy.cache_clear()
    yield monkeypatch
    interop.cupy.cache_clear()


def test_missing_cupy(forget_cupy: pytest.MonkeyPatch) -> None:
    forget_cupy.setitem(sys.modules, "cupy", None)
    with pytest.raises(ImportError, match=r"need CuPy, .*not installed.*cupylosses\[cuda13x\].*cuda12x.*cuda11x"):
        interop.cupy()


def test_cupy_for_another_cuda(forget_cupy: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> Any:
        raise ImportError("libcublas.so.11: cannot open shared object file")

    forget_cupy.setattr(interop.importlib, "import_module", broken)
    with pytest.raises(ImportError, match=r"does not load \(libcublas\.so\.11.*wheel of your CUDA version.*Only one"):
        interop.cupy()


def test_cupy_that_cannot_create_its_cache(forget_cupy: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> Any:
        raise PermissionError(13, "Permission denied", "/home/someone/.cupy")

    forget_cupy.setattr(interop.importlib, "import_module", broken)
    with pytest.raises(ImportError, match=r"kernel cache .*Permission denied.*CUPY_CACHE_DIR"):
        interop.cupy()


def test_import_touches_no_backend(python: Callable[..., str]) -> None:
    program = """
import sys
import cupylosses, cupylosses.functional
heavy = [x for x in ("torch", "cupy", "cuda", "matplotlib", "rich") if x in sys.modules]
print(heavy)
"""
    assert python(program) == "[]"


def test_numpy_arrays_load_neither_torch_nor_cupy(python: Callable[..., str]) -> None:
    program = """
import numpy, cupylosses.functional as F
print(F.mse_loss(numpy.array([1.0, 3.0]), numpy.array([0.0, 1.0])))
"""
    assert python(program, without=("torch", "cupy")) == "2.5"


@pytest.mark.programs
def test_cpu_tensors_load_no_cupy(python: Callable[..., str]) -> None:
    program = """
import torch, cupylosses.functional as F
x = torch.tensor([1.0, 3.0], requires_grad=True)
F.mse_loss(x, torch.tensor([0.0, 1.0])).backward()
print(x.grad.tolist(), torch.cuda.is_initialized())
"""
    assert python(program, without=("cupy",)) == "[1.0, 2.0] False"


def test_gradients_of_numpy_arrays_say_that_they_need_torch(python: Callable[..., str]) -> None:
    program = """
import numpy, cupylosses
try:
    cupylosses.value_and_grad("mse_loss", numpy.zeros(3), numpy.zeros(3))
except ImportError as error:
    print(error)
"""
    assert python(program, without=("torch",)) == (
        'mse_loss: gradients of NumPy arrays need torch: `pip install "cupylosses[torch]"`.'
    )


def test_every_check_names_the_function() -> None:
    """The messages of checks.py begin with the loss, whatever raises them."""
    loss = F.mse_loss.loss
    assert str(checks.not_an_array(loss, "input", 3)).startswith("mse_loss: ")
    for raising in (
        lambda: checks.devices(loss, ["cpu", "cuda:0"]),
        lambda: checks.libraries(loss, ["torch", "numpy"]),
        lambda: checks.reduction(loss, "x"),
        lambda: pointwise_checks.dtypes(loss, ["complex64", "float32"]),
        lambda: pointwise_checks.broadcast(loss, [(2,), (3,)]),
    ):
        with pytest.raises((TypeError, ValueError), match=r"^mse_loss: .*got .*"):
            raising()

"""Every loss under every torch transform, as in docs/transforms.md; in kernels, not by the formula."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from devices import HOST, KERNELS
from grids import LOSSES, REPRESENTATIVES, in_turn, short_or_full
from tools.transforms import TRANSFORMS, Subject, Transform, close, suits

import cupylosses.functional as F
from cupylosses.backends.torch import device as torch_device
from cupylosses.backends.torch import formulas, ops
from cupylosses.definition.registry import named, registry
from cupylosses.engines.pointwise.definition import Loss, modified
from cupylosses.engines.pointwise.jvp import along_tangents
from cupylosses.engines.pointwise.reduction import Static

RECORD = Path(__file__).parents[1] / "docs" / "transforms.csv"

pytestmark = [pytest.mark.plain, pytest.mark.filterwarnings("ignore")]


#: Transforms that use the reference formula: third derivatives, forward mode twice, and batches of grad_output.
BY_FORMULA = ("third derivatives", "`jacfwd(jacfwd)`", "`is_grads_batched=True`")


def chosen(gpu: bool, times: int = 1) -> Any:
    """Parametrizes transforms, each with this many of the representatives, and with ``--thorough`` with every loss."""
    transforms = [x for x in TRANSFORMS.values() if x.gpu == gpu]
    settings = in_turn(transforms, short_or_full(REPRESENTATIVES, LOSSES), times=times)
    return pytest.mark.parametrize(
        ("transform", "loss"), [pytest.param(t, loss, id=f"{loss.name}-{t.name}") for t, loss in settings]
    )


def recorded() -> dict[tuple[str, str], str]:
    """Returns the recorded outcomes, from which the table in the documentation is made."""
    with RECORD.open(encoding="utf-8", newline="") as file:
        rows = sorted(csv.DictReader(file), key=lambda x: x["outcome"] != "works")
    return {(x["loss"], x["transform"]): x["outcome"] for x in rows}


def test_the_table_is_complete() -> None:
    """Each loss and transform has a recorded outcome, which `python scripts/transforms.py` writes.

    Transforms that need a GPU may be left to a contributor who has one; the table then excepts the loss.
    """
    found, every = recorded().keys(), registry()
    possible = [(loss, x) for loss in every for x in TRANSFORMS.values() if suits(x, every[loss])]
    assert found <= {(loss, x.name) for loss, x in possible}
    assert found >= {(loss, x.name) for loss, x in possible if not x.gpu}


@chosen(gpu=False)
@pytest.mark.kernels
def test_works_as_recorded(loss: Loss, transform: Transform, monkeypatch: pytest.MonkeyPatch) -> None:
    """Transforms run in kernels: the formula, which would work as well, is not called."""

    def never(*_: object, **__: object) -> torch.Tensor:
        raise AssertionError("the formula was taken")

    if transform.name not in BY_FORMULA:
        monkeypatch.setattr(formulas, "evaluate", never)
    error = transform.outcome(Subject(loss, KERNELS))
    assert ("works" if error is None else "fails") == recorded()[loss.name, transform.name].partition(":")[0], error


@chosen(gpu=True)
@pytest.mark.gpu
def test_works_on_a_gpu(loss: Loss, transform: Transform) -> None:
    error = transform.outcome(Subject(loss, "cuda"))
    assert ("works" if error is None else "fails") == recorded()[loss.name, transform.name].partition(":")[0], error


#: Transforms that use directional derivatives.
ALONG = {
    "`torch.autograd.gradgradcheck`",
    "`create_graph=True`",
    "`torch.autograd.functional.hvp`",
    "third derivatives",
    "`torch.autograd.forward_ad`",
    "`torch.func.jvp`",
    "`torch.func.jacfwd`",
    "`torch.func.hessian`",
    "`jacfwd(jacfwd)`",
}


@pytest.mark.programs
@pytest.mark.kernels
def test_wrong_derivatives_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong directional derivative must make these transforms fail, and with ``--thorough`` no others."""
    from cupylosses.engines.pointwise import engine

    other = registry(Loss)["log_cosh_loss"]
    monkeypatch.setattr(engine, "along_tangents", lambda _, along: along_tangents(other, along))
    tried = [t for n, t in TRANSFORMS.items() if not t.gpu and n in short_or_full(ALONG, TRANSFORMS)]
    assert {t.name for t in tried if t.outcome(Subject(registry(Loss)["mse_loss"], KERNELS))} == ALONG


# ----------------------------------------------------------------------------------------------------------------------
# Weights, masks, normalizers, dimensions

#: Combinations of options; those in ``IMPLIED`` are implied by those in ``OPTIONS``.
OPTIONS = [
    {"weight": True, "mask": True, "reduction": "weighted_mean", "dim": 1},
    {"weight": 0.5, "mask": True, "reduction": "weighted_mean"},
    {"reduction": "batchmean", "normalizer": 3.0},
    {"mask": True, "normalizer": True, "dim": 0},
]
IMPLIED = [
    {},
    {"mask": True, "dim": 0},
    {"normalizer": True, "dim": 1},
    {"mask": True},
    {"weight": True, "reduction": "weighted_mean"},
    {"reduction": "batchmean", "weight": True},
    {"reduction": "none", "weight": True, "mask": True},
]


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(KERNELS)


def described(x: Any) -> str:
    """Returns the name of a function, or the text of anything else."""
    return getattr(x, "__name__", str(x))


def called(options: dict[str, Any]) -> tuple[Any, list[torch.Tensor]]:
    """Returns a loss with these options as a function of tensors, and the tensors: input, target, perhaps a weight."""
    tensors = [drawn(5, 4), drawn(5, 4, seed=1)]
    given = dict(options)
    if options.get("mask"):
        given["mask"] = drawn(5, 4, seed=2) > -0.5
    if options.get("normalizer") is True:
        given["normalizer"] = torch.tensor(2.5, dtype=torch.float64, device=KERNELS)
    if options.get("weight") is True:
        tensors.append(drawn(4, seed=3).abs() + 0.5)
        del given["weight"]
        return lambda x, y, w: F.log_cosh_loss(x, y, weight=w, **given), tensors
    return lambda x, y: F.log_cosh_loss(x, y, **given), tensors


def derivatives(function: Any, tensors: list[torch.Tensor]) -> None:
    """Checks first derivatives, also in forward mode, and second derivatives."""
    leaves = [x.requires_grad_() for x in tensors]
    torch.autograd.gradcheck(function, leaves, fast_mode=True, check_forward_ad=True)
    torch.autograd.gradgradcheck(function, leaves, fast_mode=True)


def samples(function: Any, plain: list[torch.Tensor]) -> None:
    """Checks values and gradients per sample."""
    batch = [torch.stack([x, x * 0.5, x + 1.0]) for x in plain]
    close(torch.func.vmap(function)(*batch), torch.stack([function(*x) for x in zip(*batch, strict=True)]))
    scalar = lambda *x: function(*x).sum()  # noqa: E731
    every = tuple(range(len(plain)))
    found = torch.func.vmap(torch.func.grad(scalar, every), in_dims=(0, None, *(0,) * (len(plain) - 2)))(
        batch[0], plain[1], *batch[2:]
    )
    rows = [torch.func.grad(scalar, every)(a, plain[1], *c) for a, *c in zip(batch[0], *batch[2:], strict=True)]
    close(found, [torch.stack(x) for x in zip(*rows, strict=True)])


@pytest.mark.kernels
@pytest.mark.parametrize(
    ("options", "hold"), in_turn(short_or_full(OPTIONS, OPTIONS + IMPLIED), [samples, derivatives]), ids=described
)
def test_options_under_transforms(options: dict[str, Any], hold: Any) -> None:
    """Covers every way to reduce; test_weights_and_masks.py has derivatives with respect to weights."""
    hold(*called(options))


@pytest.mark.kernels
@pytest.mark.parametrize("options", short_or_full([*OPTIONS, IMPLIED[-1]], OPTIONS + IMPLIED), ids=str)
def test_options_in_a_graph(options: dict[str, Any]) -> None:
    """Value and gradients in a full graph are bit-equal to those of eager mode."""
    torch.compiler.reset()
    function, tensors = called(options)
    leaves = [x.requires_grad_() for x in tensors]
    value = function(*leaves)
    expected = torch.autograd.grad(value, leaves, torch.full_like(value, 1.5))
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    again = compiled(*leaves)
    found = torch.autograd.grad(again, leaves, torch.full_like(again, 1.5))
    assert torch.equal(again, value)
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.kernels
@pytest.mark.parametrize("take", short_or_full(["grad", "vmap"], ["grad", "vmap", "jacrev", "hessian"]))
def test_transforms_inside_of_a_graph(take: str) -> None:
    """Transforms inside a compiled graph use the formula."""
    torch.compiler.reset()
    operands = [drawn(5, 4), drawn(5, 4, seed=1)]
    function = getattr(torch.func, take)(F.log_cosh_loss)
    close(torch.compile(function, fullgraph=True, backend="aot_eager")(*operands), function(*operands))


# ----------------------------------------------------------------------------------------------------------------------
# Operators


@pytest.mark.kernels
@pytest.mark.parametrize(("kind", "where"), in_turn(["none", "mean", "sum"], ["kernels", "formula"]))
def test_operators_keep_their_promises(kind: str, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs torch's own check of operators: schema, fake tensors, and unchanged results when compiled."""
    if where == "formula":
        monkeypatch.setattr(torch_device, "host", None)
    device = "cpu" if where == "formula" else KERNELS
    loss = modified(registry(Loss)["huber_loss"], frozenset(), "array", True)
    text = ops.encode(loss, Static(kind, None, "float32"))
    across = torch.randn(7, 5, device=device).T
    operands = [across, torch.randn(5, 7, device=device), torch.rand(7, device=device), across > 0]
    upstream = torch.randn(5, 7, device=device) if kind == "none" else torch.randn((), device=device)
    for inputs in (operands, [operands[0][:, ::2], *(x[..., ::2] for x in operands[1:])]):
        torch.library.opcheck(ops.value, (inputs, text, [0.7], None, None))
        go = upstream[..., ::2] if kind == "none" and inputs is not operands else upstream
        torch.library.opcheck(ops.gradients, (go, None, [True, False, True, False], inputs, text, [0.7], None, None))


def test_losses_are_found_by_text() -> None:
    for loss in registry(Loss).values():
        flags = tuple(0 for _ in loss.flags)
        number = frozenset(x.name for x in loss.operands if x.number)
        for weight in (None, "array", "number"):
            made = modified(loss, number, weight, True)
            along = along_tangents(made, tuple(i == 0 for i in range(len(made.operands))))
            for x in (loss, made, along):
                how = Static("sum", (0, 2), "float64", True)
                asked = how._replace(flags=flags)
                assert ops.decode(ops.encode(x, asked)) == (x, asked, False)


def test_a_loss_that_nobody_defined() -> None:
    with pytest.raises(LookupError, match=r"needs the loss 'mine' .* has not defined"):
        named("mine-0123456789abcdef")


@pytest.mark.programs
def test_a_program_is_loaded_in_a_new_process(tmp_path: Path, python: Any) -> None:
    """A process that loads an exported program only needs to import the operators.

    The program accepts any number of rows, also for a loss of rows.
    """

    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return F.huber_loss(x, y, delta=0.5) + F.cross_entropy(x, y.argmax(1), label_smoothing=0.1)

    x, y, rows = torch.randn(3, 4), torch.randn(3, 4), {0: torch.export.Dim("rows")}
    torch.export.save(torch.export.export(Model(), (x, y), dynamic_shapes=(rows, rows)), tmp_path / "loss.pt2")
    x, y = torch.randn(5, 4), torch.randn(5, 4)
    torch.save((x, y), tmp_path / "operands.pt")
    printed = python(
        "import torch, cupylosses.backends.torch.ops\n"
        f"x, y = torch.load({str(tmp_path / 'operands.pt')!r})\n"
        f"print(torch.export.load({str(tmp_path / 'loss.pt2')!r}).module()(x, y).item())"
    )
    assert float(printed) == Model()(x, y).item()


@pytest.mark.programs
@pytest.mark.parametrize("backend", short_or_full(["aot_eager"], ["eager", "aot_eager"]))
def test_the_first_call_of_a_process_may_be_compiled(backend: str, python: Any) -> None:
    """Compilation needs no earlier call: neither its import nor a table that only an eager call fills."""
    printed = python(
        "import torch\n"
        "import cupylosses.functional as F\n"
        "x, y = torch.randn(3, 4, requires_grad=True), torch.randn(3, 4)\n"
        "def f(x, y):\n"
        "    of_layer = F.linear_cross_entropy(x, y, y.argmax(1) % 3) + F.token_log_probs(x, y.argmax(1)).sum()\n"
        "    of_rows = F.cross_entropy(x, y.argmax(1), weight=x[0].detach(), mask=y[:, 0] > 0)\n"
        "    return of_layer + of_rows.nan_to_num() + F.huber_loss(x, y, weight=y, mask=y > 0)\n"
        f"value = torch.compile(f, fullgraph=True, backend={backend!r})(x, y)\n"
        "value.backward()\n"
        "print(torch.equal(value, f(x, y)))"
    )
    assert printed == "True"


@pytest.mark.programs
@pytest.mark.skipif(not HOST, reason="no C++ compiler on Linux")
def test_ahead_of_time(tmp_path: Path) -> None:
    """A package of AOTInductor calls the operators of the process that loads it."""

    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return F.huber_loss(x * 2, y, delta=0.5)

    x, y = torch.randn(3, 4), torch.randn(3, 4)
    program = torch.export.export(Model(), (x, y))
    package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "loss.pt2"))
    assert torch.equal(torch._inductor.aoti_load_package(package)(x, y), F.huber_loss(x * 2, y, delta=0.5))

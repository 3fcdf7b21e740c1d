"""Modules: derived from definitions, subclasses of torch's own Modules if torch has them, with all common arguments."""

from __future__ import annotations

import copy
import importlib
import inspect
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

import cupylosses.functional as F
from cupylosses import Operand, define_loss, nn
from cupylosses.definition.base import PER_CALL, PER_MODULE
from cupylosses.definition.registry import registry
from cupylosses.engines.pointwise.definition import Loss
from cupylosses.nn import module_of
from cupylosses.testing import samples
from cupylosses.testing.pointwise import eager
from cupylosses.testing.tolerance import same_bits

pytestmark = [
    pytest.mark.plain,
    pytest.mark.in_turn,
    pytest.mark.filterwarnings("ignore:.*broadcast"),
    pytest.mark.filterwarnings("ignore:.*batchmean"),
]

SHAPE = (6, 5)


def own(loss: Loss) -> type[torch.nn.Module]:
    return getattr(nn, loss.class_name)


def twin(loss: Loss) -> type[torch.nn.Module] | None:
    """torch's class of the same loss."""
    return getattr(torch.nn, loss.class_name, None) if loss.torch else None


def each(losses: Iterable[Loss]) -> pytest.MarkDecorator:
    losses = list(losses)
    return pytest.mark.parametrize("loss", losses, ids=[x.name for x in losses])


#: Losses with a Module in torch, and losses without one.
twins = each(x for x in registry(Loss).values() if twin(x))
alone = each(x for x in registry(Loss).values() if not twin(x))


def operands(loss: Loss, values: Mapping[str, Any] | None = None, device: str = "cpu") -> list[Tensor]:
    """The operands for a call of the Module, in float64."""
    drawn = samples.operands(
        loss, loss.values(values), ["float64"] * len(loss.operands), [SHAPE] * len(loss.operands), device
    )
    return [x for x, operand in zip(drawn, loss.operands, strict=True) if operand.default is None]


def rows(seed: int = 0, device: str = "cpu") -> Tensor:
    """A positive weight per column."""
    return (torch.rand(SHAPE[-1], dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) + 0.5).to(device)


def settings(loss: Loss) -> Iterator[dict[str, Any]]:
    """Arguments of torch's constructor: options that torch has, reductions, tensors."""
    known = inspect.signature(twin(loss).__init__).parameters
    for case, reduction in product(loss.cases, ("mean", "sum", "none")):
        if set(case) <= set(known) and eager.twin(loss, case, reduction):
            yield {**case, "reduction": reduction}
    yield from ({x: rows()} for x in known if x in ("weight", "pos_weight"))


def kept_tensors(loss: Loss) -> dict[str, Tensor]:
    """A tensor for each option of a Module that may be a tensor."""
    return {x: rows(i) for i, x in enumerate(loss.kept) if x == "weight" or x in {o.name for o in loss.operands}}


# ----------------------------------------------------------------------------------------------------------------------
# The classes


def test_there_is_a_module_for_each_loss_and_nothing_else() -> None:
    every = list(registry().values())
    assert sorted(nn.__all__) == sorted([*(x.class_name for x in every), "module_of"])
    assert len({own(x) for x in every}) == len(every)


def test_module_is_of_its_function(loss: Loss) -> None:
    module = own(loss)
    assert issubclass(module, twin(loss) or torch.nn.Module)
    assert module.__module__ == "cupylosses.nn" and module.__qualname__ == module.__name__ == loss.class_name
    assert module_of(getattr(F, loss.name)) is module
    for part in (loss.summary, loss.formula, f"cupylosses.functional.{loss.name}"):
        assert part in " ".join(module.__doc__.split())


def test_every_twin_is_found(loss: Loss) -> None:
    """If a torch Module calls torch's function of this loss, the definition names that Module."""
    if loss.torch:
        callers = [
            name
            for name, x in vars(torch.nn.modules.loss).items()
            if inspect.isclass(x) and "forward" in vars(x) and f"F.{loss.torch}(" in inspect.getsource(x.forward)
        ]
        assert callers == ([loss.class_name] if twin(loss) else [])


@twins
def test_constructor_is_torchs(loss: Loss) -> None:
    assert own(loss).__init__ is twin(loss).__init__


@alone
def test_constructor_without_a_twin_is_the_definitions(loss: Loss) -> None:
    found = list(inspect.signature(own(loss)).parameters.values())
    assert {x.name: x.default for x in found} == loss.kept
    options = [*(x.name for x in loss.operands if x.default is not None), *(x.name for x in loss.options)]
    assert [x.name for x in found if x.kind is x.POSITIONAL_OR_KEYWORD][:-1] == options
    assert [x.name for x in found if x.kind is x.KEYWORD_ONLY] == list(PER_MODULE)


def test_forward_takes_the_operands_and_what_every_loss_takes(loss: Loss) -> None:
    found = list(inspect.signature(own(loss)().forward).parameters.values())
    assert [x.name for x in found if x.kind is x.POSITIONAL_OR_KEYWORD] == [
        x.name for x in loss.operands if x.default is None
    ]
    keywords = {x.name: x.default for x in found if x.kind is x.KEYWORD_ONLY}
    assert keywords == dict.fromkeys((*PER_MODULE, *PER_CALL))


@twins
def test_repr_is_torchs(loss: Loss) -> None:
    for options in settings(loss):
        assert repr(own(loss)(**options)) == repr(twin(loss)(**options))


@alone
def test_repr_without_a_twin_shows_the_options(loss: Loss) -> None:
    shown = ", ".join(f"{x.name}={x.default!r}" for x in loss.options)
    assert repr(own(loss)()) == f"{loss.class_name}({shown})"
    module = own(loss)(reduction="sum", weight=rows(), dim=(0, 1))
    parts = [*([shown] if shown else []), "reduction='sum'", "weight=Tensor(5,)", "dim=(0, 1)"]
    assert repr(module) == f"{loss.class_name}({', '.join(parts)})"
    assert "weight=2.5" in repr(own(loss)(weight=2.5))
    assert "weight=ndarray(2, 3)" in repr(own(loss)(weight=numpy.ones((2, 3))))


# ----------------------------------------------------------------------------------------------------------------------
# State


def modules(loss: Loss) -> Iterator[torch.nn.Module]:
    """Modules of the loss with tensors among their options, and without."""
    yield own(loss)()
    if twin(loss) is None:
        yield own(loss)(**kept_tensors(loss), reduction="sum")
        yield own(loss)(weight=torch.nn.Parameter(rows()))
    else:
        yield from (own(loss)(**x) for x in settings(loss))


@twins
def test_state_is_torchs(loss: Loss) -> None:
    for options in settings(loss):
        ours, theirs = own(loss)(**options), twin(loss)(**options)
        other = {k: v + 1 for k, v in theirs.state_dict().items()}
        assert ours.state_dict().keys() == other.keys()
        ours.load_state_dict(other, strict=True)
        assert all(torch.equal(ours.state_dict()[k], v) for k, v in other.items())


@alone
def test_tensors_become_buffers(loss: Loss) -> None:
    given = kept_tensors(loss)
    assert "weight" in given
    module = own(loss)(**given)
    assert dict(module.named_buffers()).keys() == module.state_dict().keys() == given.keys()
    module.float()
    assert all(x.dtype == torch.float32 for x in module.buffers())
    assert all(x.device.type == "meta" for x in module.to("meta").buffers())
    assert all(getattr(module, x).device.type == "meta" for x in given)


@pytest.mark.representatives
def test_parameters_stay_parameters_and_are_trained(loss: Loss) -> None:
    if twin(loss) is None:
        module = own(loss)(weight=torch.nn.Parameter(rows()))
    else:
        module = own(loss)()
        module.weight = torch.nn.Parameter(rows())
    assert [name for name, _ in module.named_parameters()] == ["weight"]
    before = module.weight.detach().clone()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    module(*operands(loss)).backward()
    optimizer.step()
    assert (module.weight.detach() != before).any()


@pytest.mark.representatives
@pytest.mark.parametrize(
    "copied", [copy.deepcopy, copy.copy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deep", "shallow", "pickle"]
)
def test_copies(loss: Loss, copied: Callable[[Any], Any]) -> None:
    for module in modules(loss):
        other = copied(module)
        assert type(other) is type(module) and other is not module
        assert repr(other) == repr(module)
        assert all(torch.equal(x, module.state_dict()[k]) for k, x in other.state_dict().items())
        assert [type(x) for x in other.parameters()] == [type(x) for x in module.parameters()]
        assert same_bits(other(*operands(loss)), module(*operands(loss)))


@pytest.mark.representatives
def test_a_subclass_of_a_user(loss: Loss) -> None:
    class Mine(own(loss)):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(reduction="sum")

    assert same_bits(Mine()(*operands(loss)), own(loss)(reduction="sum")(*operands(loss)))


# ----------------------------------------------------------------------------------------------------------------------
# Results


@twins
def test_results_are_torchs(loss: Loss) -> None:
    """The formula is enough, since a Module only passes on its arguments."""
    for options in settings(loss):
        values = {k: v for k, v in options.items() if k in loss.values()}
        ours, theirs = own(loss)(**options), twin(loss)(**options)
        first, *rest = operands(loss, values)
        first.requires_grad_()
        value, expected = ours(first, *rest), theirs(first, *rest)
        assert value.shape == expected.shape
        torch.testing.assert_close(value, expected)
        torch.testing.assert_close(*(torch.autograd.grad(x.sum(), first) for x in (value, expected)))


@each(x for x in registry(Loss).values() if twin(x) and x.legacy)
@pytest.mark.representatives
@pytest.mark.parametrize(("size_average", "reduce"), [(False, None), (None, False), (False, True)])
def test_legacy_arguments(loss: Loss, size_average: bool, reduce: bool) -> None:
    legacy = {"size_average": size_average, "reduce": reduce}
    with pytest.warns(UserWarning, match="size_average and reduce args will be deprecated"):
        ours = own(loss)(**legacy)
    with pytest.warns(UserWarning, match="size_average and reduce args will be deprecated"):
        theirs = twin(loss)(**legacy)
    assert ours.reduction == theirs.reduction
    assert ours(*operands(loss)).shape == theirs(*operands(loss)).shape


@alone
def test_every_option_reaches_the_function(loss: Loss, device: str) -> None:
    """Options of the definition that the constructor takes, with each value in the cases."""
    known = inspect.signature(own(loss)).parameters
    for case in loss.cases:
        options = {k: v for k, v in case.items() if k in known}
        xs = operands(loss, options, device)
        assert same_bits(own(loss)(**options)(*xs), getattr(F, loss.name)(**named(loss, xs), **options))


def named(loss: Loss, xs: list[Tensor]) -> dict[str, Tensor]:
    return dict(zip((x.name for x in loss.operands if x.default is None), xs, strict=True))


def added(device: str) -> dict[str, dict[str, Any]]:
    mask = torch.arange(30, device=device).reshape(SHAPE) % 3 > 0
    return {
        "weight": {"weight": rows(device=device)},
        "number": {"weight": 2.5},
        "mask": {"mask": mask},
        "normalizer": {"normalizer": 7.0},
        "dim": {"dim": 0},
        "out_dtype": {"out_dtype": torch.float16},
        "all": {"weight": rows(device=device), "mask": mask, "dim": (-1,), "out_dtype": "float32"},
    }


@pytest.mark.representatives
@pytest.mark.parametrize("which", list(added("cpu")))
def test_keywords_of_a_call(loss: Loss, which: str, device: str) -> None:
    given, xs = added(device)[which], operands(loss, device=device)
    found = own(loss)()(*xs, **given)
    assert same_bits(found, getattr(F, loss.name)(**named(loss, xs), **given))
    # If torch's mean divides by the weights, a weight that is one number leaves it unchanged.
    changes = which not in ("out_dtype", *(["number"] if loss.mean_of_weights else []))
    assert not changes or not torch.equal(found.double(), own(loss)()(*xs).double())


@alone
@pytest.mark.representatives
@pytest.mark.parametrize("which", ["weight", "number", "dim", "out_dtype"])
def test_what_a_module_keeps(loss: Loss, which: str, device: str) -> None:
    """Tensors are on the Module's device; arguments of the call take precedence."""
    xs, function = operands(loss, device=device), getattr(F, loss.name)
    module = own(loss)(**added("cpu")[which]).to(device)
    assert same_bits(module(*xs), function(**named(loss, xs), **added(device)[which]))
    other = {"weight": 3.0, "dim": 1, "out_dtype": "float32"}
    assert same_bits(module(*xs, **other), function(**named(loss, xs), **other))


@pytest.mark.representatives
def test_operands_that_may_be_left_out_are_kept(loss: Loss, device: str) -> None:
    for operand in (x for x in loss.operands if x.default is not None):
        xs = operands(loss, device=device)
        module = own(loss)(**{operand.name: rows(device=device)})
        expected = getattr(F, loss.name)(**named(loss, xs), **{operand.name: rows(device=device)})
        assert same_bits(module(*xs), expected)


# ----------------------------------------------------------------------------------------------------------------------
# Modules of users' losses


@pytest.fixture
def pinball() -> Callable[..., Any]:
    return define_loss(
        "pinball_loss",
        "where(d > 0, q * d, (q - 1) * d) * scale",
        ("input", "target", Operand("scale", "S.", "positive", default=1.0)),
        {"q": 0.5},
        let={"d": "target - input"},
        reference=lambda xp, input, target, scale, q: (
            xp.where(target > input, q * (target - input), (q - 1) * (target - input)) * scale
        ),
    )


def test_module_of_a_users_loss(pinball: Callable[..., Any], device: str) -> None:
    module = module_of(pinball)
    assert module is module_of(pinball) and module.__name__ == "PinballLoss" and module.__module__ == __name__
    assert [*inspect.signature(module).parameters] == ["scale", "q", "reduction", "weight", "dim", "out_dtype"]
    made = module(rows(), q=0.9, reduction="sum").to(device)
    assert repr(made) == "PinballLoss(scale=Tensor(5,), q=0.9, reduction='sum')"
    x, y = rows(1, device).requires_grad_(), rows(2, device)
    torch.testing.assert_close(made(x, y), pinball(x, y, rows(device=device), 0.9, "sum"))
    made(x, y, weight=2.0).backward()
    assert x.grad.abs().min() > 0
    twice = made(x, y, weight=2.0)
    torch.testing.assert_close(twice, 2 * made(x, y))


PICKLED = """
from cupylosses import define_loss
from cupylosses.nn import module_of

scaled_loss = define_loss("scaled_loss", "gain * x", ["x"], {"gain": 1.0}, reference=lambda xp, x, gain: gain * x)
ScaledLoss = module_of(scaled_loss)
"""


@pytest.mark.programs
def test_modules_of_users_are_pickled_by_name(
    tmp_path: Path, python: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pickled in one process and loaded in another."""
    (tmp_path / "of_a_user.py").write_text(PICKLED)
    monkeypatch.syspath_prepend(tmp_path)
    mine = importlib.import_module("of_a_user")
    module = mine.ScaledLoss(gain=3.0, weight=torch.tensor([1.0, 2.0]))
    (tmp_path / "module.pkl").write_bytes(pickle.dumps((module, mine.scaled_loss)))
    torch.save(module.state_dict(), tmp_path / "state.pt")
    program = """
import pickle, torch
module, function = pickle.load(open("module.pkl", "rb"))
fresh = type(module)(weight=torch.zeros(2))
fresh.load_state_dict(torch.load("state.pt"))
print(module, module(torch.ones(2)).item(), function(torch.ones(2), gain=2.0).item(), fresh.weight.tolist())
"""
    assert python(program) == "ScaledLoss(gain=3.0, weight=Tensor(2,)) 4.5 2.0 [1.0, 2.0]"


@pytest.mark.parametrize("name", ["training", "half", "type", "to", "forward", "parameters"])
def test_options_that_every_module_has_otherwise(name: str) -> None:
    """The function has the option; a Module cannot."""
    loss = define_loss("l", f"input * {name}", ["input"], {name: 2.0}, reference=lambda xp, x, **o: x * o[name])
    assert loss(torch.ones(2)).item() == 2.0
    with pytest.raises(ValueError, match=rf"^l: every Module has a `{name}` already"):
        module_of(loss)


@pytest.mark.parametrize(
    "wrong",
    [torch.nn.functional.mse_loss, "mse_loss", None, F.mse_loss.loss],
    ids=["torch's", "name", "none", "definition"],
)
def test_module_of_something_else(wrong: Any) -> None:
    with pytest.raises(TypeError, match=r"^module_of: expected a function of cupylosses"):
        module_of(wrong)

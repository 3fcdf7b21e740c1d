"""Builds the public function of a loss from its definition, with a true signature and a docstring."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from cupylosses import checks, dispatch, interop
from cupylosses.definition.base import Definition, remember
from cupylosses.definition.docstring import docstring
from cupylosses.definition.signature import compiled
from cupylosses.engines.pointwise.definition import Loss
from cupylosses.engines.softmax.definition import RowLoss

#: Where the functions of this library's own losses are.
HOME = "cupylosses.functional"


def function_of(loss: Loss, module: str = HOME) -> Callable[..., Any]:
    """The public function of a definition; ``function.prepare`` checks the same arguments and returns the call."""

    def names(items: Any) -> str:
        return "".join(f"{x.name}, " for x in items)

    arguments = (
        f"_loss, ({names(loss.operands)}), reduction, ({names(loss.parameters)}), ({names(loss.flags)}), _added"
        f"{', size_average, reduce' if loss.legacy else ''}"
    )
    first, *others = [f"_type({x.name})" for x in loss.operands]
    alike = " and ".join(["_added is None", *(f"{first} is {x}" for x in others)])
    added = f"_added = None if {' is '.join(dispatch.ADDED)} is None else ({', '.join(dispatch.ADDED)})"
    library = f"_library = _shortcuts.get({first}, _any) if {alike} else _any"
    hand_over = _hand_over("_library is _any", loss)
    scope: dict[str, Any] = {"_loss": loss, "_checked": dispatch.checked, "_prepare": dispatch.prepare, "_type": type}
    scope |= {"_shortcuts": dispatch.SHORTCUTS, "_any": dispatch}
    function: Any = compiled(
        loss.name,
        loss.arguments,
        [added, library, hand_over, f"return _library.evaluate(_checked({arguments}))"],
        module,
        _overridden=_overridden,
        _self=(itself := []),
        **scope,
    )
    itself.append(function)
    _describe(function, loss)
    # Found out here: torch.compile cannot look into the lock that a cached property takes the first time.
    _ = loss.takes_numbers, loss.key, loss.forms
    function.prepare = compiled(loss.name, loss.arguments, [added, f"return _prepare({arguments})"], module, **scope)
    return function


def _describe(function: Any, loss: Definition) -> None:
    """Attaches the docstring, the definition and the refusal of torch.jit.script to a public function."""
    function.__doc__ = docstring(loss)
    function.__prepare_scriptable__ = partial(checks.refuse_script, loss.name)
    function.loss = loss
    remember(loss)


def _hand_over(condition: str, loss: Definition) -> str:
    """Source line that, under a condition, lets an operand with torch's override protocol take the call."""
    operands = ", ".join(x.name for x in loss.operands)
    return f"if ({condition}) and (_others := _overridden({operands})): return _others(_self[0], locals())"


def _overridden(*operands: Any) -> Callable[..., Any] | None:
    """A caller of the public function through torch's override protocol, or None if no operand has the protocol."""
    others = [x for x in operands if interop.stands_for_a_tensor(x)]
    if not others:
        return None

    def call(function: Callable[..., Any], given: Mapping[str, Any]) -> Any:
        from torch.overrides import handle_torch_function

        arguments = inspect.signature(function).parameters.values()
        chosen = {x.name: given[x.name] for x in arguments if given[x.name] is not x.default}
        return handle_torch_function(function, others, **chosen)

    return call


def row_function_of(loss: RowLoss, module: str = HOME) -> Callable[..., Any]:
    """The public function of a loss of rows; ``function.prepare`` checks the same arguments and returns the call."""
    arrays = [x.name for x in loss.operands] + [loss.weights or "None", "mask", "normalizer"]
    settings = "".join(f"{x}, " for x in dispatch.settings_of(loss))
    body = [f"return _then(_loss, {', '.join(arrays)}, ({settings}){', size_average, reduce' if loss.legacy else ''})"]
    unusual = " or ".join(f"type({x.name}) not in _shortcuts" for x in loss.operands)
    function: Any = compiled(
        loss.name,
        loss.arguments,
        [_hand_over(unusual, loss), *body],
        module,
        _then=dispatch.evaluate_rows_of,
        _loss=loss,
        _shortcuts=dispatch.SHORTCUTS,
        _overridden=_overridden,
        _self=(itself := []),
    )
    itself.append(function)
    _describe(function, loss)
    # As in function_of.
    _ = loss.dense, loss.only_of_indices, loss.expressions, loss.common, loss.key
    function.prepare = compiled(loss.name, loss.arguments, body, module, _then=dispatch.prepare_rows, _loss=loss)
    return function

"""Builds the public function of a loss from its definition, with a true signature and a docstring."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from cupylosses import checks, dispatch, interop
from cupylosses.definition.base import Definition
from cupylosses.definition.docstring import docstring
from cupylosses.definition.registry import remember
from cupylosses.definition.signature import compiled

#: Module of the public functions of this library's own losses.
HOME = "cupylosses.functional"


def function_of(loss: Definition, module: str = HOME) -> Callable[..., Any]:
    """Builds the public function of a definition; ``function.prepare`` checks the same arguments and returns the call.

    The function's body checks nothing itself: it selects the backend by the type of the operands, delegates to torch's
    override protocol if an operand implements it, and passes arrays and settings to the engine.
    """

    def names(items: Any) -> str:
        return "".join(f"{x}, " for x in items)

    legacy = ", (size_average, reduce)" if loss.legacy else ""
    bound = f"_loss, ({names(loss.array_names)}), ({names(loss.setting_names)}){legacy}"
    first, *others = [f"_type({x.name})" for x in loss.operands if x.default is None]
    library = [f"_library = _shortcuts.get({first}, _any)"]
    # A parameter next to another tensor has the same library.
    apart = " or ".join([f"({x} is not {first} and _shortcuts.get({x}) is not _library)" for x in others])
    library += [f"if {apart}: _library = _any"] if apart else []
    extra = [
        x for x in loss.array_names if x not in {y.name for y in loss.operands if y.default is None} and x != "None"
    ]
    # Optional operands, weights and masks may have other types: if one is given, the general path looks at them.
    hand_over = [f"if not ({' is '.join([*extra, 'None'])}): _library = _any"] if extra else []
    operands = names(x.name for x in loss.operands)
    overridden = f"if _library is _any and (_others := _overridden({operands})): return _others(_self[0], locals())"
    result = [f"return _library.evaluate(_bind({bound}))"]
    if loss.packs:
        result = [f"_call = _bind({bound})", "return _call[0].engine.unpacked(_call[2], _library.evaluate(_call))"]
    scope: dict[str, Any] = {"_loss": loss, "_bind": loss.engine.bind, "_type": type, "_any": dispatch}
    function: Any = compiled(
        loss.name,
        loss.arguments,
        [*library, *hand_over, overridden, *result],
        module,
        _shortcuts=dispatch.SHORTCUTS,
        _overridden=_overridden,
        _self=(itself := []),
        **scope,
    )
    itself.append(function)
    function.__doc__ = docstring(loss)
    function.__prepare_scriptable__ = partial(checks.refuse_script, loss.name)
    function.loss = loss
    remember(loss)
    # Resolved now: torch.compile cannot trace the lock that the first access to a cached property takes.
    loss.resolve()
    prepare = [f"return _prepare({bound})"]
    function.prepare = compiled(loss.name, loss.arguments, prepare, module, _prepare=dispatch.prepare, _loss=loss)
    return function


def _overridden(*operands: Any) -> Callable[..., Any] | None:
    """Returns a function that calls through torch's override protocol, or None if no operand implements it."""
    # None is skipped first: torch.compile does not trace the check for it.
    others = [x for x in operands if x is not None and interop.stands_for_a_tensor(x)]
    if not others:
        return None

    def call(function: Callable[..., Any], values: Mapping[str, Any]) -> Any:
        from torch.overrides import handle_torch_function

        arguments = inspect.signature(function).parameters.values()
        passed = {x.name: values[x.name] for x in arguments if values[x.name] is not x.default}
        return handle_torch_function(function, others, **passed)

    return call

"""Builds the Module class of a loss from its definition."""

from __future__ import annotations

import inspect
import math
import numbers
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch

from cupylosses import checks
from cupylosses.build import HOME
from cupylosses.definition.base import Definition
from cupylosses.definition.docstring import module_docstring
from cupylosses.definition.signature import compiled


@cache
def module_of(function: Callable[..., Any]) -> type[torch.nn.Module]:
    """Returns the Module class of a loss.

    Instances for users' losses can be pickled if the class is bound to its own name in the module that defines the
    loss: ``TukeyLoss = module_of(tukey_loss)``.

    Args:
        function: A function of ``cupylosses.functional``, or one made by ``define_loss`` or ``define_statistics``.

    Returns:
        A subclass of ``torch.nn.Module``, or of torch's class for the same loss; always the same class for a function.

    Raises:
        TypeError: ``function`` is not the function of a loss.
        ValueError: An option has the name of an attribute of every Module, such as ``half`` or ``training``.

    Example:
        >>> from cupylosses import functional, nn
        >>> nn.module_of(functional.hinge_loss)(margin=0.5)
        HingeLoss(margin=0.5)
    """
    loss = getattr(function, "loss", None)
    if not isinstance(loss, Definition):
        raise TypeError(f"module_of: expected a function of cupylosses.functional or define_loss, got {function!r}.")
    reserved = [x for x in loss.kept if hasattr(torch.nn.Module(), x)]
    if reserved:
        raise ValueError(
            f"{loss.name}: every Module has a `{reserved[0]}` already; a Module needs another name for it."
        )
    twin = getattr(torch.nn, loss.class_name, None) if loss.torch else None
    ours = function.__module__ == HOME
    members = {
        "__doc__": _docstring(loss, f"{function.__module__}.{loss.name}", twin),
        "__module__": "cupylosses.nn" if ours else function.__module__,
        "forward": _forward(function, loss),
        "__prepare_scriptable__": partial(checks.refuse_script, loss.class_name),
    }
    if loss.layer:
        members["__init__"], members["extra_repr"] = _layer_constructor(loss, twin), _layer_repr(loss)
    elif twin is None:
        members["__init__"], members["extra_repr"] = _constructor(loss), _extra_repr(loss)
    return type(loss.class_name, (twin or torch.nn.Module,), members)


def _forward(function: Callable[..., Any], loss: Definition) -> Callable[..., Any]:
    """Builds ``forward``, whose arguments are the operands.

    The options are attributes of the Module with the same names; a subclass of torch's class may lack some of them.
    """
    operands, names = loss.called_with, list(loss.kept)

    def call(self: torch.nn.Module, tensors: tuple[Any, ...], added: tuple[Any, ...]) -> Any:
        options = {x: getattr(self, x) for x in names if hasattr(self, x)}
        options |= {x: value for x, value in zip(loss.keywords, added, strict=True) if value is not None}
        if loss.layer:
            options |= _parameters(self)
        return function(**dict(zip(operands, tensors, strict=True)), **options)

    signature = [*((x, ...) for x in ("self", *operands, "*")), *((x, None) for x in loss.keywords)]
    body = [f"return _call(self, ({', '.join(operands)},), ({''.join(f'{x}, ' for x in loss.keywords)}))"]
    forward: Any = compiled("forward", signature, body, function.__module__, _call=call)
    forward.function = function
    return forward


def _constructor(loss: Definition) -> Callable[..., None]:
    """Builds ``__init__`` with the options as arguments; those that a call can override are keyword-only."""

    def initialise(self: torch.nn.Module, values: tuple[Any, ...]) -> None:
        torch.nn.Module.__init__(self)
        for name, value in zip(loss.kept, values, strict=True):
            if isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter):
                self.register_buffer(name, value)  # moved and saved with the Module, as in torch's losses
            else:
                setattr(self, name, value)

    first = [(n, x) for n, x in loss.kept.items() if n not in loss.keywords]
    keywords = [(n, x) for n, x in loss.kept.items() if n in loss.keywords]
    body = [f"_initialise(self, ({', '.join(loss.kept)},))"]
    return compiled("__init__", [("self", ...), *first, ("*", ...), *keywords], body, __name__, _initialise=initialise)


def _layer_constructor(loss: Definition, twin: Any) -> Callable[..., None]:
    """Builds ``__init__`` of a Module with a linear layer: torch's arguments, then the options as keywords."""

    def initialise(self: Any, layer: tuple[Any, ...], values: tuple[Any, ...]) -> None:
        in_features, num_classes, out_features, bias, device, dtype = layer
        options = dict(zip(loss.kept, values, strict=True))
        if twin is not None:
            known = {x: options[x] for x in inspect.signature(twin).parameters if x in options}
            twin.__init__(
                self,
                in_features,
                num_classes,
                out_features=out_features,
                bias=bias,
                device=device,
                dtype=dtype,
                **known,
            )
        else:
            torch.nn.Module.__init__(self)
            count = math.prod(out_features, start=num_classes)
            self.num_classes, self.out_features = num_classes, tuple(out_features)
            self.linear = torch.nn.Linear(in_features, count, bias=bias, device=device, dtype=dtype)
            self.register_buffer("weight", options["weight"])
        for name, value in options.items():
            if not hasattr(self, name):
                setattr(self, name, value)

    first = [(n, x) for n, x in loss.layer.items() if x is ...]
    optional = [(n, x) for n, x in loss.layer.items() if x is not ...]
    body = [f"_initialise(self, ({', '.join(loss.layer)},), ({', '.join(loss.kept)},))"]
    arguments = [("self", ...), *first, ("*", ...), *optional, *loss.kept.items()]
    return compiled("__init__", arguments, body, __name__, _initialise=initialise)


def _parameters(module: Any) -> dict[str, Any]:
    """Weight and bias of a Module's linear layer, in the shapes of the operands."""
    shape = (module.num_classes, *module.out_features)
    linear = module.linear
    bias = None if linear.bias is None else linear.bias.reshape(shape)
    weight = linear.weight.reshape(*shape, linear.in_features) if module.out_features else linear.weight
    return {"linear_weight": weight, "linear_bias": bias}


def _layer_repr(loss: Definition) -> Callable[[Any], str]:
    """Builds ``extra_repr`` with the sizes of the layer, then the options as in :func:`_extra_repr`."""
    of_options = _extra_repr(loss)

    def extra_repr(self: Any) -> str:
        parts = [f"in_features={self.linear.in_features}", f"num_classes={self.num_classes}"]
        parts += [f"out_features={self.out_features}"] if self.out_features else []
        parts += ["bias=True"] if self.linear.bias is not None else []
        return ", ".join([*parts, of_options(self)])

    return extra_repr


def _extra_repr(loss: Definition) -> Callable[[Any], str]:
    """Builds ``extra_repr`` with the loss's own options, and the common ones that differ from their defaults."""
    own_options = {x.name for x in loss.options}

    def extra_repr(self: Any) -> str:
        parts = []
        for name, default in loss.kept.items():
            value = getattr(self, name)
            if hasattr(value, "shape") and not isinstance(value, numbers.Number):
                parts.append(f"{name}={type(value).__name__}{tuple(value.shape)}")
            elif name in own_options or value != default:
                parts.append(f"{name}={value!r}")
        return ", ".join(parts)

    return extra_repr


def _docstring(loss: Definition, function: str, twin: Any) -> str:
    if loss.layer:
        return module_docstring(loss, function, [*loss.layer, *loss.kept], None)
    if twin is None:
        return module_docstring(loss, function, list(loss.kept), None)
    known = dict(loss.arguments)
    options = [x for x in inspect.signature(twin).parameters if x in known]
    return module_docstring(loss, function, options, f"torch.nn.{twin.__name__}")

"""Python functions with the signature of a definition.

The functions are compiled from source, so that the interpreter parses the arguments: binding an ``inspect.Signature``
costs more than a kernel launch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any


def compiled(
    name: str, arguments: Iterable[tuple[str, Any]], body: Sequence[str], module: str, **scope: Any
) -> Callable[..., Any]:
    """Compiles a function with these arguments and defaults (``...`` for none), whose body sees ``scope``.

    Definitions guarantee that the names are identifiers. Defaults are passed as objects, never as text. The globals
    have no ``__name__``, because torch.compile would look up the other globals in that module. The file name begins
    with that of this package, by which warnings recognize frames of the library.
    """
    arguments = list(arguments)
    if arguments and arguments[-1][0] == "*":
        arguments.pop()  # Python rejects a bare `*` without arguments after it
    signature = [x if default is ... else f"{x}=_defaults[{i}]" for i, (x, default) in enumerate(arguments)]
    scope["_defaults"] = [default for _, default in arguments]
    text = f"def {name}({', '.join(signature)}):\n" + "".join(f"    {line}\n" for line in body)
    exec(compile(text, f"<{__name__}: {module}.{name}>", "exec"), scope)
    function = scope[name]
    function.__module__ = module
    return function

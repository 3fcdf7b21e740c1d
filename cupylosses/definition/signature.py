"""Python functions with the signature of a definition, made from source, so that Python itself parses the arguments:
binding a signature object costs more than a launch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any


def compiled(
    name: str, arguments: Iterable[tuple[str, Any]], body: Sequence[str], module: str, **scope: Any
) -> Callable[..., Any]:
    """A function of these arguments and defaults (``...`` for none), whose lines see ``scope``.

    Names are identifiers, which definitions are checked for. Defaults are handed over as objects, never as text. There
    is no module among the globals, where torch.compile would look for the others; the file is one of the library.
    """
    arguments = list(arguments)
    signature = [x if default is ... else f"{x}=_defaults[{i}]" for i, (x, default) in enumerate(arguments)]
    scope["_defaults"] = [default for _, default in arguments]
    text = f"def {name}({', '.join(signature)}):\n" + "".join(f"    {line}\n" for line in body)
    exec(compile(text, f"<{__name__}: {module}.{name}>", "exec"), scope)
    function = scope[name]
    function.__module__ = module
    return function

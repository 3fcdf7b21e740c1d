"""Python functions with the signature of a definition.

They are compiled from source, so that the interpreter parses the arguments: binding an ``inspect.Signature`` costs more
than a kernel launch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any


def compiled(
    name: str, arguments: Iterable[tuple[str, Any]], body: Sequence[str], module: str, **scope: Any
) -> Callable[..., Any]:
    """Compiles a function with these arguments and defaults (``...`` for none), whose body sees ``scope``.

    Definitions guarantee that the names are identifiers. Defaults are passed as objects, never as text. The globals
    have no ``__name__``, because torch.compile would look up the other globals in that module. The file name counts as
    one of the library's, for warnings.
    """
    arguments = list(arguments)
    if arguments and arguments[-1][0] == "*":
        arguments.pop()  # Python takes none behind which nothing stands
    signature = [x if default is ... else f"{x}=_defaults[{i}]" for i, (x, default) in enumerate(arguments)]
    scope["_defaults"] = [default for _, default in arguments]
    text = f"def {name}({', '.join(signature)}):\n" + "".join(f"    {line}\n" for line in body)
    exec(compile(text, f"<{__name__}: {module}.{name}>", "exec"), scope)
    function = scope[name]
    function.__module__ = module
    return function

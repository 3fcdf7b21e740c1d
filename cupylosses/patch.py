"""The switch that puts the library in the place of torch's own losses, and the report of what it served.

The functions that stand there are in ``torch_functions.py``, which torch is imported for.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

_lock = threading.Lock()
#: Those that count now; while there are none, torch's functions are in their place.
_reports: tuple[Report, ...] = ()
#: By name: torch's function, and what stands in its place.
_replaced: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {}


class Report:
    """Which calls of torch's losses were served by this library's kernels, and which were passed on to torch, and why.

    It is what ``patch_torch`` returns, a context manager that restores torch's functions at its end, and what ``print``
    and ``rich.print`` show as a table. It counts until then; pickled, the counts are what it is.
    """

    def __init__(self) -> None:
        self._counts: dict[tuple[str, Any, str | None], int] = {}
        self._lock = threading.Lock()

    @property
    def served(self) -> Counter[tuple[str, str]]:
        """How many calls ran this library's kernels, by function and dtype of the first operand."""
        return Counter({(name, dtype): n for (name, dtype, reason), n in self._named().items() if reason is None})

    @property
    def passed_on(self) -> Counter[tuple[str, str, str]]:
        """How many calls ran torch's own function, by function, dtype of the first operand, and reason.

        What ``torch.compile`` traces and ``torch.jit.script`` compiles is torch's, and is not counted.
        """
        named = self._named().items()
        return Counter({(name, dtype, reason): n for (name, dtype, reason), n in named if reason is not None})

    def restore(self) -> None:
        """Ends the report, and with the last of several puts torch's functions back; nothing the second time."""
        global _reports
        with _lock:
            _reports = tuple(x for x in _reports if x is not self)
            _put_back()

    def add(self, name: str, dtype: Any, reason: str | None) -> None:
        """Counts a call; without a reason it was served."""
        key = name, dtype, reason
        with self._lock:
            self._counts[key] = self._counts.get(key, 0) + 1

    def _named(self) -> dict[tuple[str, str, str | None], int]:
        """By the names of dtypes, which a pickled report has in place of dtypes."""
        with self._lock:
            counts = list(self._counts.items())
        named: Counter[tuple[str, str, str | None]] = Counter()
        for (name, dtype, reason), n in counts:
            named[name, str(dtype).removeprefix("torch."), reason] += n
        return named

    def _rows(self) -> list[tuple[str, str, str, str]]:
        order = sorted(self._named().items(), key=lambda x: (x[0][0], x[0][1], x[0][2] or ""))
        return [(name, dtype, "served" if why is None else f"torch: {why}", str(n)) for (name, dtype, why), n in order]

    def __enter__(self) -> Report:
        return self

    def __exit__(self, *_: Any) -> None:
        self.restore()

    def __getstate__(self) -> dict[tuple[str, str, str | None], int]:
        return dict(self._named())

    def __setstate__(self, counts: dict[tuple[str, Any, str | None], int]) -> None:
        self.__init__()  # type: ignore[misc]
        self._counts = dict(counts)

    def __str__(self) -> str:
        rows = [("function", "dtype", "by", "calls"), *self._rows()]
        widths = [max(len(row[i]) for row in rows) for i in range(4)]
        return "\n".join("  ".join(x.ljust(w) for x, w in zip(row, widths, strict=True)).rstrip() for row in rows)

    def __rich__(self) -> Any:
        from rich.table import Table

        table = Table("function", "dtype", "by")
        table.add_column("calls", justify="right")
        for row in self._rows():
            table.add_row(*row, style=None if row[2] == "served" else "yellow")
        return table


def patch_torch() -> Report:
    """Puts this library's kernels in the place of torch's own losses, for programs that stay as they are.

        with cupylosses.patch_torch() as report:
            train()
        print(report)

    Every function of ``torch.nn.functional`` that this library has, and with it torch's Modules, also those that exist
    already, then runs these kernels for CUDA tensors, and torch's own code for whatever they are not for: tensors on
    the CPU, subclasses, torch function modes, ``torch.func``, forward-mode differentiation, ``torch.compile``,
    ``torch.jit``, operands of different shapes, dtypes that torch and this library do not both take. Wrong arguments
    get torch's errors. Results differ from torch's as docs/differences.md says; docs/in-place.md has the details. A
    label that is no class does not end the CUDA context, as it does in torch: the next call that is served raises.

    What was taken out of the module before, as by ``from torch.nn.functional import mse_loss``, is torch's still, and
    so is ``torch.kl_div`` with its like.

    Returns:
        The report of the calls from now on. As a context manager, or by ``report.restore()``, it puts torch's functions
        back, the very same objects. Several may be open, one inside of another or not: all of them count, and the last
        that ends puts the functions back. ``unpatch_torch`` ends all of them.

    Raises:
        ImportError: torch is not installed, or there is a GPU and CuPy is not.

    The switch is for the whole process, all threads included.
    """
    global _reports
    import torch

    from cupylosses import functional, interop
    from cupylosses.backends.torch import patch as torch_patch

    if torch.cuda.is_available():
        interop.cupy()
    report = Report()
    with _lock:
        if not _reports:
            _replaced.update(torch_patch.replacements(functional, lambda: _reports))
            for name, (_, ours) in _replaced.items():
                setattr(torch.nn.functional, name, ours)
        _reports += (report,)
    return report


def unpatch_torch() -> None:
    """Puts torch's functions back, however often ``patch_torch`` was called; nothing if it was not."""
    global _reports
    with _lock:
        _reports = ()
        _put_back()


def _put_back() -> None:
    """Puts torch's functions back if no report is left, but for those that somebody else has replaced since."""
    if _reports or not _replaced:
        return
    import torch

    for name, (theirs, ours) in _replaced.items():
        if getattr(torch.nn.functional, name) is ours:
            setattr(torch.nn.functional, name, theirs)
    _replaced.clear()

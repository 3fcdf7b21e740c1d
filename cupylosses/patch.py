"""``patch_torch``: replaces torch's losses with the library's kernels, and reports the calls that these served.

The replacements themselves need torch; they are in ``backends/torch/patch.py``.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

_lock = threading.Lock()
#: Open reports, which count calls. Torch's functions are replaced while there is at least one.
_reports: tuple[Report, ...] = ()
#: Torch's function and its replacement, by name.
_replaced: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {}


class Report:
    """Counts of the calls that this library's kernels served, and of those passed on to torch, with the reasons.

    ``patch_torch`` returns one. It is a context manager, which restores torch's functions at its end; until then it
    counts. ``print`` and ``rich.print`` show a table. Only the counts are pickled.
    """

    def __init__(self) -> None:
        self._counts: dict[tuple[str, Any, str | None], int] = {}
        self._lock = threading.Lock()

    @property
    def served(self) -> Counter[tuple[str, str]]:
        """Number of calls that ran this library's kernels, by function and dtype of the first operand."""
        return Counter({(name, dtype): n for (name, dtype, reason), n in self._named().items() if reason is None})

    @property
    def passed_on(self) -> Counter[tuple[str, str, str]]:
        """Number of calls that ran torch's own function, by function, dtype of the first operand, and reason.

        Calls that ``torch.compile`` traces or ``torch.jit.script`` compiles run torch's code, and are not counted.
        """
        named = self._named().items()
        return Counter({(name, dtype, reason): n for (name, dtype, reason), n in named if reason is not None})

    def restore(self) -> None:
        """Ends the report. The last open report puts torch's functions back. A second call does nothing."""
        global _reports
        with _lock:
            _reports = tuple(x for x in _reports if x is not self)
            _put_back()

    def add(self, name: str, dtype: Any, reason: str | None) -> None:
        """Counts a call. A reason of None means that this library's kernels served it."""
        key = name, dtype, reason
        with self._lock:
            self._counts[key] = self._counts.get(key, 0) + 1

    def _named(self) -> dict[tuple[str, str, str | None], int]:
        """Counts by names of dtypes. A report that was unpickled stores these names instead of dtypes."""
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
    """Replaces torch's losses with this library's kernels, for unmodified programs.

        with cupylosses.patch_torch() as report:
            train()
        print(report)

    Every function of ``torch.nn.functional`` that this library has then runs these kernels for CUDA tensors, and so do
    torch's Modules, existing instances included. Torch's own code still serves all other calls: tensors on the CPU,
    tensor subclasses, torch function modes, ``torch.func``, forward-mode differentiation, ``torch.compile``,
    ``torch.jit``, operands of different shapes, and dtypes that torch and this library do not both accept. Invalid
    arguments raise torch's errors.

    Results differ from torch's as described in docs/differences.md; docs/in-place.md has the details. A label that is
    not a class does not destroy the CUDA context, as it does in torch: the next call that is served raises.

    Functions imported before, as by ``from torch.nn.functional import mse_loss``, remain torch's, and so do
    ``torch.kl_div`` and similar functions of the module ``torch``. The replacement affects all threads of the process.

    Returns:
        A :class:`Report` of the calls from now on. As a context manager, or by ``report.restore()``, it puts torch's
        functions back, the very same objects. Several reports may be open, nested or not: all of them count, and the
        last one to end puts the functions back. ``unpatch_torch`` ends all of them.

    Raises:
        ImportError: torch is not installed, or there is a GPU and CuPy is not installed.

    Example:
        >>> import torch
        >>> import cupylosses
        >>> with cupylosses.patch_torch() as report:
        ...     loss = torch.nn.functional.mse_loss(torch.ones(3), torch.zeros(3))
        >>> sum(report.passed_on.values())  # on the CPU, torch serves the call
        1
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
    """Puts torch's functions back and ends all reports, however often ``patch_torch`` was called.

    Does nothing if torch is not patched.
    """
    global _reports
    with _lock:
        _reports = ()
        _put_back()


def _put_back() -> None:
    """Puts torch's functions back if no report is open, except those that somebody else has replaced meanwhile."""
    if _reports or not _replaced:
        return
    import torch

    for name, (theirs, ours) in _replaced.items():
        if getattr(torch.nn.functional, name) is ours:
            setattr(torch.nn.functional, name, theirs)
    _replaced.clear()

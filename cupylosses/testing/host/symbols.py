"""Translation of addresses in a kernel's machine code to lines of its source.

Kernels are compiled without debug information, which would take longer. After an error the kernel is compiled again
with it. That does not change the machine code, so addresses stay valid.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

_CODE = re.compile(r"\{code:([0-9a-f]+)\}")


def with_lines(message: str, debug: Path) -> str:
    """Returns the message with each ``{code:address}`` replaced by file and line, the innermost call first."""
    return _CODE.sub(lambda match: _line(debug, match.group(1)), message)


def _line(debug: Path, address: str) -> str:
    tool = shutil.which("addr2line") or shutil.which("llvm-addr2line")
    if tool is None:
        return f"code address 0x{address}"
    command = [tool, "-i", "-e", str(debug), f"0x{address}"]
    done = subprocess.run(command, capture_output=True, text=True)
    lines = [
        x.split(" (discriminator")[0].removeprefix("./") for x in done.stdout.split("\n") if x and not x.startswith("?")
    ]
    # Loads and stores are functions of the shim: reports their caller.
    calls = [x for x in lines if not x.split(":")[0].endswith("shim.hpp")]
    return " called from ".join((calls or lines)[:3]) or f"code address 0x{address}"

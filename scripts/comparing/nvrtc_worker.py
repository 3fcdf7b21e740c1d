"""Compile pickled source strings from stdin into CuPy's disk cache, and print a line after each.

    python scripts/comparing/nvrtc_worker.py 90

The argument is the compute capability. The process loads no kernel, so it uses no GPU memory. An error of compilation
is ignored here; the process that loads the kernel raises it.
"""

from __future__ import annotations

import pickle
import sys
from contextlib import suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from cupylosses.jit import compiler


def main() -> int:
    from cupy._core import core

    with compiler.without_gpu(), suppress(EOFError):
        while True:
            text = pickle.load(sys.stdin.buffer)
            with suppress(Exception):
                core.compile_with_cache(text, compiler.options(), arch=sys.argv[1], prepend_cupy_headers=False)
            print("done", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

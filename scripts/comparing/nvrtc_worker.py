"""Compile pickled source strings from stdin into CuPy's cache on disk, and answer each with a line.

    python scripts/comparing/nvrtc_worker.py 90

The argument is the compute capability. The process loads nothing, so it uses no GPU memory. A source that does not
compile raises later, in the process that loads it.
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
                core.compile_with_cache(text, compiler.OPTIONS, arch=sys.argv[1], prepend_cupy_headers=False)
            print("done", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

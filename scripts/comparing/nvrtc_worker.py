"""Compiles sources that arrive on stdin, as pickled strings, into CuPy's cache on disk, and answers each with a line.

    python scripts/comparing/nvrtc_worker.py 90

For GPUs of this compute capability. It loads nothing, so it takes no memory of a GPU. A source that does not compile is
left for whoever loads it to report.
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

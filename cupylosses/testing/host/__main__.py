"""Runs a Python program whose CPU tensors use the kernels.

    python -m cupylosses.testing.host -- -m pytest tests/test_values.py
    python -m cupylosses.testing.host --sanitize address,undefined -- -m pytest tests/test_values.py

The second command finds out-of-bounds accesses; AddressSanitizer must be loaded before Python itself.
"""

from __future__ import annotations

import argparse
import os
import sys

from cupylosses.testing.host.build import sanitizer_library


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sanitize", default="thread", help="what kernels are checked for")
    parser.add_argument("program", nargs="+", metavar="...", help="arguments for python, behind --")
    arguments = parser.parse_args()
    variables = {**os.environ, "CUPYLOSSES_HOST": "1", "CUPYLOSSES_HOST_SANITIZE": arguments.sanitize}
    if "address" in arguments.sanitize.split(","):
        # Also preloads the C++ runtime: the sanitizer must find its exception handling at start-up, or torch's first
        # exception would abort.
        variables["LD_PRELOAD"] = f"{sanitizer_library()} libstdc++.so.6"
        # Python does not free the objects that live until it exits, so leak detection is off.
        variables["ASAN_OPTIONS"] = "detect_leaks=0:" + os.environ.get("ASAN_OPTIONS", "")
    os.execve(sys.executable, [sys.executable, *arguments.program], variables)


if __name__ == "__main__":
    main()

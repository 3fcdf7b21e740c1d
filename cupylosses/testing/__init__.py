"""What tests and scripts need beyond the library itself; no part of it is imported by the library.

With ``CUPYLOSSES_HOST=1`` in the environment, importing it makes CPU tensors take the kernels for the rest of the
program (:mod:`cupylosses.testing.host`).
"""

import os

if os.environ.get("CUPYLOSSES_HOST", "0") not in ("", "0"):
    from cupylosses.testing.host.execution import switch_on

    switch_on()

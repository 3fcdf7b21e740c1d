"""Tools for tests and scripts, including users' tests of their own losses. The library itself imports none of them.

With ``CUPYLOSSES_HOST=1`` in the environment, importing this package makes CPU tensors run the kernels for the rest of
the program (:mod:`cupylosses.testing.host`).
"""

import os

if os.environ.get("CUPYLOSSES_HOST", "0") not in ("", "0"):
    from cupylosses.testing.host.execution import switch_on

    switch_on()

"""Modules of ``scripts/compare.py``.

``overview`` has the checks and the line of each loss, ``speed`` its time and memory on a GPU. For one line per check,
``matrix`` selects the checks of element-wise losses and ``row_matrix`` those of losses of rows. ``rows`` performs a
check, ``bits`` compares runs that must agree to the last bit, ``accuracy`` is the run over whole domains, ``hosted``
runs kernels on the CPU if there is no GPU, ``background`` compiles kernels for the next checks, ``report`` prints rows
and summary and writes the JSON file, ``files`` writes CSV and pictures.
"""

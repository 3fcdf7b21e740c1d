"""Modules of ``scripts/compare.py``.

``matrix`` selects the checks of a loss. One module per engine, such as ``pointwise`` or ``softmax``, supplies the axes
to vary; ``targets`` is shared by the engines with several kinds of target. ``overview`` makes the line of each loss,
and ``speed`` measures its time and memory on a GPU. ``table`` performs a check and makes its row, ``bits`` compares
runs that must agree to the last bit, and ``accuracy`` sweeps whole domains. ``hosted`` runs kernels on the CPU if there
is no GPU, and ``background`` compiles kernels for the next checks. ``report`` prints rows and the summary and writes
the JSON file; ``files`` writes CSV and pictures.
"""

"""Modules of ``scripts/compare.py``.

``matrix`` selects the checks of a loss, ``pointwise`` and ``softmax`` with the axes of their engines. ``overview`` has
the line of each loss, ``speed`` its time and memory on a GPU. ``table`` performs a check and makes its row, ``bits``
compares runs that must agree to the last bit, ``accuracy`` is the run over whole domains, ``hosted`` runs kernels on
the CPU if there is no GPU, ``background`` compiles kernels for the next checks, ``report`` prints rows and summary and
writes the JSON file, ``files`` writes CSV and pictures.
"""

"""The parts of ``scripts/compare.py``.

``overview`` has the checks and the line of each loss, ``speed`` its time and memory on a GPU. For a line per check,
``matrix`` says which checks run, and ``row_matrix`` which of losses of rows. ``rows`` performs them, ``bits`` holds
runs against each other that must agree to the last bit, ``accuracy`` is the run over whole domains, ``hosted`` runs
kernels on the CPU where there is no GPU, ``background`` compiles what the next checks need, ``report`` prints rows,
summary and the JSON file, ``files`` writes CSV and pictures.
"""

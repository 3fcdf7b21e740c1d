"""What ``scripts/compare.py`` is made of.

``matrix`` says which checks run, and ``row_matrix`` which of losses of rows; ``rows`` performs them and takes their
time, ``bits`` holds runs against each other that must agree to the last bit, ``accuracy`` is the run over whole
domains, ``hosted`` runs kernels on the CPU where there is no GPU, ``ahead`` compiles what all rows need, ``report``
prints the rows, the summary and the JSON file.
"""

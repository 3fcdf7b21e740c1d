"""What ``scripts/benchmark.py`` is made of.

``workloads`` and ``row_workloads`` say what is measured, ``providers`` who computes it, ``timing`` how time is taken.
Each section of the report (``throughput``, ``rows``, ``host``, ``graph``, ``startup``, ``memory``, ``accuracy``) is a
module that yields rows;
``records`` keeps them as CSV, ``report`` prints them, ``figures`` holds them against the bars and ``plot`` draws them.
"""

"""Modules of ``scripts/benchmark.py``.

``workloads`` defines the calls to measure, ``pointwise`` and ``softmax`` with the shapes and options of their engines,
``providers`` the libraries that compute them, ``timing`` the clocks. Each section of the report (``host``, ``graph``,
``startup``, ``memory``, ``accuracy``) is a module that yields rows; ``throughput`` is two, ``throughput`` and ``rows``.
``cliffs`` measures off-headline cases: ``pointwise_cliffs`` and ``softmax_cliffs`` list those of their engines, in the
terms of ``cases``. ``records`` stores the rows as CSV, ``report`` prints them, ``figures`` compares them with the bars
and ``plot`` draws them.
"""

"""Modules of ``scripts/benchmark.py``.

``workloads`` defines the calls to measure; one module per engine, such as ``pointwise`` or ``softmax``, adds its shapes
and options. ``providers`` has the libraries that compute them, and ``timing`` the clocks. Most sections of the report
are modules that yield rows (``startup``, ``memory``, ``host``, ``graph``, ``accuracy``, ``linear``, ``sequences``);
``throughput`` implements two, `throughput` and `rows`. ``cliffs`` measures off-headline cases; one module per engine,
such as ``pointwise_cliffs``, lists its cases in the terms of ``cases``, and ``reasons`` explains missed bars.
``random_cases`` measures random ones. ``records`` stores the rows as CSV, ``report`` prints them, ``figures`` compares
them with the bars, and ``plot`` draws them.
"""

"""Modules of ``scripts/benchmark.py``.

``workloads`` and ``row_workloads`` define the calls to measure, ``providers`` the libraries that compute them,
``timing`` the clocks. Each section of the report (``throughput``, ``rows``, ``host``, ``graph``, ``startup``,
``memory``, ``accuracy``) is a module that yields rows. ``records`` stores them as CSV, ``report`` prints them,
``figures`` compares them with the bars and ``plot`` draws them.
"""

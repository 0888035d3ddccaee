"""Measurements on this machine: ``hpctrain bench``.

Each of ``step``, ``data``, ``checkpoint`` and ``scaling`` is a benchmark with
``add_arguments(parser)`` and ``run(args)``; ``hpctrain.commands.bench`` finds them by name. The other files are the
programs that run on the ranks, and what the benchmarks share.
"""

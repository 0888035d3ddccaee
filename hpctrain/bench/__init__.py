"""Benchmarks of ``hpctrain bench``, run on this machine.

Each of ``step``, ``data``, ``checkpoint`` and ``scaling`` defines ``add_arguments(parser)`` and ``run(args)``;
``hpctrain.commands.bench`` finds them by name. ``ranks`` is shared by the benchmarks. Of ``scaling``, ``scaling_runs``
makes and starts the runs, and ``scaling_report`` is pure.
"""

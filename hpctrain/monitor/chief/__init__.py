"""Decides who is slow or hung; runs in the first node's agent.

``chief`` receives the nodes' reports. ``stragglers`` reports slow ranks: ``judge`` turns windows into findings
(``finding``), and ``sentence`` puts them into words. ``standstill`` reports ranks that have died or hang; ``hang``
decides which, and ``collectives`` names the rank that did not join one. The other modules are parts of the judge:
``slowness``, ``peers`` and ``baseline``.
"""

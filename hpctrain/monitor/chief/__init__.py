"""The deciding side of the monitor, on the first node.

``chief`` takes in the nodes' reports on the attempt that is watched. ``stragglers`` tells who is slow: ``judge``
turns windows into verdicts (``finding``), ``sentence`` says why. ``standstill`` tells who has died or does not move, as
``hang`` decides. The rest are the judge's parts: functions over arrays, and what is remembered of earlier windows.
"""

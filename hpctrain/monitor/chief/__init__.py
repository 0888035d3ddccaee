"""The deciding side of the monitor, on the first node.

``chief`` collects the nodes' reports, ``judge`` turns windows into verdicts (``finding``), ``hang`` tells whether the
run has stopped moving (``suspensions`` is time that does not count), ``heat`` keeps each rank's excess over time,
``exclude`` lists hosts that the next requeue leaves out. The rest are the judge's parts: pure functions over arrays,
with ``cause`` and ``sentence`` to say why.
"""

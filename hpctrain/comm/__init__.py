"""The ranks of a job and their communication on the host.

``world`` finds out which ranks there are, and ``group`` has their collectives; every wait has a timeout. mpi4py is
needed only if there are several ranks. ``launched`` names what launchers set. A rank is built without the others
among ``imagined`` ones. ``step_vote`` is what they agree on between steps. ``speeds`` judges measurements of their
links and devices.
"""

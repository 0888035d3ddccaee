"""The live view of a run, on any machine that can read its folder.

``terminal`` reads the run and Slurm's queue and redraws until the run has ended; ``view`` is the data shown at one
time, and ``screen`` formats it as text.
"""

"""The live view of a run, from any machine that sees its folder.

``terminal`` reads the run and Slurm's queue, and draws until the run has ended; ``view`` is what is shown at one
moment, and ``screen`` makes it lines of text.
"""

"""The live view of a run, from any machine that sees its folder.

``terminal`` draws until the run has ended, ``source`` reads the run and Slurm's queue, ``view`` is what is shown at one
moment, and ``screen`` makes it lines of text.
"""

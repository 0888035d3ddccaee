"""What is installed, what is wrong, how to fix it. Works without any framework and without MPI.

``machine``, ``ranks``, ``slurm`` and ``software`` each look at one thing and return lists of findings;
``probe`` says what one is; it and ``ranks`` use separate processes.
"""

"""The agent on each node: ``agent`` is the process, ``node`` reads the ranks' shared memory.

``host`` reads the host's counters, ``gpu_readings`` its GPUs; ``stacks`` dumps a hung rank's stacks, and
``death_watch`` notes deaths of ranks.
"""

"""One agent a node: ``agent`` is the process, ``node`` reads the ranks' memory.

``host`` reads the machine's own counters, and ``stacks`` what a hung rank is doing.
"""

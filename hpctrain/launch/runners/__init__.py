"""Nodes that no remote shell reaches (containers, pods): a process on each connects to the supervisor.

``runner`` is that process (`hpctrain node`), ``desk`` the supervisor's side, and ``ask`` the program that mpirun calls
in place of ssh. ``link`` is the protocol between them; ``ticket`` lets a node find and trust its supervisor.
"""

"""Processes, memory, files and terminals of this machine."""

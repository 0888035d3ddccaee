"""Processes, memory, files, addresses and terminals of this machine; knows nothing of runs.

files: writing where others may have been before (links, guessed names, torn files). safe_read, bounded_yaml and
json_shape: reading what others may have written. processes, signals, python: whom we start, and who is alive. cgroups:
what this process may use. heap: what malloc keeps. shared_memory: memory shared with other processes of this node.
address: where other hosts reach this one. object_store: stores by their URL. output, foreign_text: what a terminal
gets. quantities: bytes and seconds for people. Others import these modules.
"""

"""Processes, memory, files, addresses and terminals of this machine; independent of runs.

keras_backend: which backend Keras will use.
files: safe writes in folders that others may have tampered with (links, guessed names, torn files). safe_read,
bounded_yaml, json_shape: safe reads of files that others may have written. processes, signals, python: starting and
watching processes. cgroups: limits of this process. gpus: GPUs by the kernel. fabric: fast networks, and cores next
to devices. shared_memory: memory shared by processes of this node. address: addresses at which other hosts reach this
one. kernel: files of the kernel. channel: proof of a run's secret, and frames, between its processes. object_store:
object stores by URL. retry: the loop that tries again. output, foreign_text: terminal output. quantities: bytes and
seconds for people. array_types: names of array types. user_errors: messages for errors in users' code.
"""

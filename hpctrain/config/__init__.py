"""The run file: its keys, loading it, and their reference.

``sections`` holds the keys as frozen dataclasses, the only place of defaults; ``loading`` reads and writes run files,
``values`` converts what YAML says, ``kubernetes_pod`` checks fields of pods, ``reference`` tells the keys for error
messages, ``--help`` and the docs.
``combinations`` gathers what does not go together, in run files, tasks and models, from the rooms' ``refusals`` and the
list of strategies.
"""

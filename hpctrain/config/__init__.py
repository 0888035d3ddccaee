"""The run file: its keys, loading it, and their reference.

``sections`` holds the keys as frozen dataclasses, the only place of defaults; ``loading`` reads and writes run files,
``values`` converts what YAML says, ``kubernetes_pod`` checks fields of pods, ``reference`` tells the keys for error
messages, ``--help`` and the docs.
``features`` names what runs use, ``refusals`` has the combinations that do not work, and ``combinations`` refuses them,
in run files, tasks and models.
"""

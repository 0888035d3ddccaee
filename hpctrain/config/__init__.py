"""The run file: its keys, loading it, and their reference.

``section`` defines what a section is; ``training_keys``, ``exchange_keys``, ``storage_keys``, ``watching_keys`` and
``launch_keys`` hold the keys as frozen dataclasses, the only place of defaults, and ``sections`` is the whole file of
them, from which other rooms import. ``loading`` reads and writes run files,
``values`` converts what YAML says, ``reference`` tells the keys for error messages, ``--help`` and the docs.
``features`` names what runs use, ``refusals`` has the combinations that do not work, and ``combinations`` refuses them,
in run files, tasks and models.
"""

"""The format of a checkpoint, as docs/checkpoint-format.md describes it: layout, manifest, shards, durable files.

``manifest`` and ``shard_index`` tell what shards hold, in ``strict_json``; ``shard`` writes them, by ``paced_write``
and with a ``checksum`` of each part, and ``shard_reading`` reads parts of them.
"""

"""The checkpoint format described in docs/checkpoint-format.md: layout, manifest, shards, durable files.

``manifest`` and ``shard_index`` describe the shards' contents in ``strict_json``. ``shard`` writes shards, with
checksums, through ``paced_write``; ``shard_reading`` verifies and reads them. ``layout`` has the format's types,
``boxes`` their index arithmetic, and ``durable_files`` durable writes and safe reads.
"""

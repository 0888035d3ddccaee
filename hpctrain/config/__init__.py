"""The run file: its keys, loading it, and their reference."""

"""The format of a checkpoint."""

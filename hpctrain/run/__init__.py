"""The owner of the run folder."""

"""Runs on 2 ranks whose checkpoints of step 6 are of format 1, rows of tensors split between the two."""

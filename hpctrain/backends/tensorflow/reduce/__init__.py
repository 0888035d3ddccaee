"""Gradients summed over ranks: ``reducer``, in pieces; rows of tables go by ``sparse_sums``."""

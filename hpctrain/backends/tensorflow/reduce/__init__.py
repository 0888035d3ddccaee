"""Sums gradients over ranks: ``reducer`` in pieces, ``sparse_sums`` by rows of embedding tables."""

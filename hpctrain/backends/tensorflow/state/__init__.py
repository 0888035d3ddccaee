"""Variables as named ``tensors``, gathered by ``source``, and ``weights`` that models make late, to and from files."""

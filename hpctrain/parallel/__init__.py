"""Models that several ranks share out, and the exact sums that make of their parts what one process would compute.

Others use ``tensor_words``, what a task says of a layer, and ``torch_tensor``, layers of PyTorch that are cut.
"""

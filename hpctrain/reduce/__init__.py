"""How gradients are exchanged."""

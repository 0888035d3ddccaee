"""Model state: named ``tensors``, collected by ``source``; ``weights`` builds late weights and exports them."""

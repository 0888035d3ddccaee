"""Model state: named ``keras_tensors``, all of it in ``keras_state``; ``weights`` builds late weights, exports them."""

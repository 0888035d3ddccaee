"""Models, losses and data that the tests train."""

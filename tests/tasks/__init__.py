"""Models, losses and data that tests train on."""

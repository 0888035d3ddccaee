"""What one rank does, from its start to its last word."""

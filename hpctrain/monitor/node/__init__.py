"""One agent a node: reads the ranks' memory."""

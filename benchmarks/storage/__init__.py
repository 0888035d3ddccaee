"""How many emulated accelerators one node can feed with data, measured as MLPerf Storage does."""

"""The monitor inside a rank: its clock and its session."""

"""The deciding side of the monitor: statistics, verdicts."""

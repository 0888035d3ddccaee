"""Measures the cost of a killed rank: ``python -m benchmarks.recovery``. Each framework has its own program."""

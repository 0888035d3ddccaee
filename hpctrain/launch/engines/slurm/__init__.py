"""Slurm: job scripts as pure text, the commands around them, and what a job does before its ranks start."""

from pathlib import Path

FILES = Path(__file__).parent / "files"
"""Templates, profiles and examples: in a checkout a link to the top-level ``slurm/``, whose files a wheel carries."""

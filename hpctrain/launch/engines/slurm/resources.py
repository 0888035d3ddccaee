"""Files that travel with the package."""

from __future__ import annotations

from pathlib import Path


def template_dir() -> Path:
    """The folder of Slurm templates and site profiles.

    In a checkout `_slurm` is a link to the top-level `slurm/`; an installed wheel holds its files.
    """
    return Path(__file__).parents[3] / "_slurm"

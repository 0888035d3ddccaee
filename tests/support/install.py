"""Build and install hpctrain as users do: from a wheel, into a separate environment."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def build_wheel(room: Path) -> Path:
    """Build a wheel of this checkout as for an index: from the sdist of a copy."""
    sources = room / "sources"
    for name in ("hpctrain", "slurm", "examples/starters"):
        shutil.copytree(ROOT / name, sources / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.cfg", "pyproject.toml", "LICENSE", "README.md"):
        shutil.copy(ROOT / name, sources)
    build = f"from setuptools import build_meta; build_meta.build_sdist({str(room)!r})"
    done = subprocess.run([sys.executable, "-c", build], cwd=sources, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    shutil.rmtree(sources)
    (sdist,) = room.glob("hpctrain-*.tar.gz")
    pip(Path(sys.executable), "wheel", "--no-build-isolation", "--no-deps", "--wheel-dir", room, sdist)
    return next(room.glob("hpctrain-*.whl"))


def pip(python: Path, *words: object) -> None:
    """Run this environment's pip for another interpreter; a failure shows its output."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(python),
        "--disable-pip-version-check",
        "--quiet",
        *map(str, words),
    ]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"

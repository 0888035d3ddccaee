"""Build and install hpctrain as users do: from a wheel, into a separate environment."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

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


def link(python: Path, requirement: str) -> None:
    """Give another interpreter the distributions of this environment that pip would install for a requirement."""
    (packages,) = python.parents[1].glob("lib/python*/site-packages")
    for name in _closure([Requirement(requirement)]):
        for top in {file.parts[0] for file in metadata.files(name) or () if file.parts[0] not in ("..", "__pycache__")}:
            if not (packages / top).exists():
                (packages / top).symlink_to(metadata.distribution(name).locate_file(top))


def _closure(todo: Iterable[Requirement]) -> set[str]:
    """Names of distributions that a distribution's extras need, directly or not, without itself."""
    found: set[tuple[str, str]] = set()
    for needed in (queue := list(todo)):
        for extra in ("", *needed.extras):
            if (needed.name, extra) in found:
                continue
            found.add((needed.name, extra))
            more = map(Requirement, metadata.requires(needed.name) or ())
            queue += [each for each in more if each.marker is None or each.marker.evaluate({"extra": extra})]
    return {name for name, _ in found} - {"hpctrain"}

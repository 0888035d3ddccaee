"""What a run is made of: versions of the packages, state of the user's repository. Imports none of the packages."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess

import hpctrain

PACKAGES = ("numpy", "h5py", "mpi4py", "torch", "tensorflow", "tensorflow-cpu", "keras", "horovod")


def versions() -> dict[str, str]:
    """Version by name of Python, hpctrain and what is installed of the packages that shape results."""
    found = {"python": platform.python_version(), "hpctrain": hpctrain.__version__}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def git_commit() -> str | None:
    """Commit of the repository that the working directory lies in, with '+changes' if files differ from it."""
    commit = _git("rev-parse", "HEAD")
    if not commit:
        return None
    return commit + ("+changes" if _git("status", "--porcelain", "--untracked-files=no") else "")


def _git(*words: str) -> str:
    try:
        done = subprocess.run(["git", *words], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""

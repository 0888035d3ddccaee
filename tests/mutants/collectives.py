"""Removes each collective of each plan, one at a time: a test must fail.

`collectives.toml` lists them. Each is removed in a copy of the checkout in which ranks wait only WAIT_S for each other.
A removal that makes ranks hang counts as detected only if the program ends the wait itself, with its own message. A
hang that a test's timeout ends is not enough. Detected removals are recorded in a folder, and the next call with that
folder skips them.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hpctrain.system.processes import own_session
from tests.mutants.run import HERE, copy_of_checkout

WAIT_S = 20.0
"""Longest wait for another rank, in the copy of the checkout."""
PATIENCE_S = 400.0
"""Timeout of the tests of one collective."""
WAITS = ("hpctrain/comm/group.py", "TIMEOUT_S = 900.0", f"TIMEOUT_S = {WAIT_S}")
HANGS = "no end after"
"""Part of the message of a test that had to kill a program that hung."""


@dataclass(frozen=True)
class Collective:
    """A call that exchanges values or synchronizes ranks, and the code that replaces it."""

    name: str
    """Unique name: plan and exchange."""
    module: str
    """Path of the file, relative to the checkout."""
    call: str
    """Code of the call, which occurs once in the file."""
    without: str
    """Code in its place: values of this rank only, in the same shape."""
    tests: Sequence[str]
    """Arguments of pytest, fast tests first."""


def listed() -> list[Collective]:
    """All entries of collectives.toml."""
    found = tomllib.loads((HERE / "collectives.toml").read_text(encoding="utf-8"))["collective"]
    return [Collective(**one) for one in found]


def changed(text: str, before: str, after: str) -> str:
    """Replace ``before``. Raises ValueError unless it occurs exactly once."""
    if text.count(before) != 1:
        raise ValueError(f"is in the file {text.count(before)} times: {before}")
    return text.replace(before, after)


def outcome(tests: Sequence[str], copy: Path) -> str:
    """``passes``, ``fails`` or ``hangs``: result of tests in a copy of the checkout."""
    # Without .pyc files: if a change kept a file's size and second of modification, the old one would be loaded.
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(copy)}
    words = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--hypothesis-profile", "ci", *tests]
    with own_session(environment) as session:
        try:
            done = subprocess.run(
                words, cwd=copy, env=session, timeout=PATIENCE_S, capture_output=True, text=True, check=False
            )
        except subprocess.TimeoutExpired:
            return "hangs"
    if done.returncode not in (0, 1):
        sys.exit(f"pytest cannot run {' '.join(tests)}:\n{done.stdout}{done.stderr}")
    return "passes" if done.returncode == 0 else "hangs" if HANGS in done.stdout else "fails"


def tried(one: Collective, copy: Path) -> str:
    """The outcome of the tests without this collective."""
    path = copy / one.module
    before = path.read_text(encoding="utf-8")
    path.write_text(changed(before, one.call, one.without), encoding="utf-8")
    try:
        return outcome(one.tests, copy)
    finally:
        path.write_text(before, encoding="utf-8")


def main() -> int:
    """Try all that are left; return 0 if each removal was detected."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where it is noted which were seen")
    parser.add_argument("--only", default="", help="part of a name")
    chosen = parser.parse_args()
    chosen.folder.mkdir(parents=True, exist_ok=True)
    left = [one for one in listed() if chosen.only in one.name and not (chosen.folder / one.name).exists()]
    survivors = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = copy_of_checkout(Path(folder) / "copy")
        module, before, after = WAITS
        (copy / module).write_text(changed((copy / module).read_text(encoding="utf-8"), before, after), "utf-8")
        for one in left:
            found = tried(one, copy)
            print(f"{found}: {one.name}", flush=True)
            if found == "fails":
                (chosen.folder / one.name).touch()
            else:
                survivors += 1
    print(f"{len(left) - survivors} of {len(left)} collectives cannot be left out unseen")
    return min(survivors, 1)


if __name__ == "__main__":
    sys.exit(main())

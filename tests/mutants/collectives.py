"""Takes each collective of each plan away, one at a time: a test has to see it.

`collectives.toml` lists them. Each is tried in a copy of the checkout, in which ranks wait WAIT_S for each other: a
change that leaves ranks waiting is seen if the program itself ends the wait, with its own message, and not if a test
does. What has been seen is noted in a folder, and not tried again by the next call with that folder.
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
"""Longest wait for another rank, in the copy."""
PATIENCE_S = 400.0
"""For the tests of one collective."""
WAITS = ("hpctrain/comm/group.py", "TIMEOUT_S = 900.0", f"TIMEOUT_S = {WAIT_S}")
HANGS = "no end after"
"""What a test says that has ended a program itself."""


@dataclass(frozen=True)
class Collective:
    """A call that exchanges values, or meets, and the code that leaves it out."""

    name: str
    """Of the plan and the exchange, unique."""
    module: str
    """Its file, from the checkout's root."""
    call: str
    """Its text, which is in the file once."""
    without: str
    """In its place: values of this rank alone, in the same shape."""
    tests: Sequence[str]
    """Words for pytest, fast ones first."""


def listed() -> list[Collective]:
    """All of them."""
    found = tomllib.loads((HERE / "collectives.toml").read_text(encoding="utf-8"))["collective"]
    return [Collective(**one) for one in found]


def changed(text: str, before: str, after: str) -> str:
    """Raises ValueError if what is to be changed is not there exactly once."""
    if text.count(before) != 1:
        raise ValueError(f"is in the file {text.count(before)} times: {before}")
    return text.replace(before, after)


def outcome(tests: Sequence[str], copy: Path) -> str:
    """``passes``, ``fails``, or ``hangs``: of tests in a copy of the checkout."""
    # Without compiled files: a change that keeps size and second of a file would load the code before.
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
    """What becomes of its tests without it."""
    path = copy / one.module
    before = path.read_text(encoding="utf-8")
    path.write_text(changed(before, one.call, one.without), encoding="utf-8")
    try:
        return outcome(one.tests, copy)
    finally:
        path.write_text(before, encoding="utf-8")


def main() -> int:
    """The exit code says whether all were seen."""
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

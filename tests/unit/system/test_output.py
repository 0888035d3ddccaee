"""Output that a full disk does not take."""

from __future__ import annotations

import subprocess
import sys

LOUD = """
import os, sys
from hpctrain.system.output import say
said = say("of a full disk" * 9999)
full = os.dup(2)
os.dup2(1, 2)
print(said, say("there is room again"), flush=True)
os.dup2(full, 2)
say("full again")
"""


def test_what_a_full_disk_does_not_take_is_dropped_and_ends_nothing() -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-c", LOUD], stdout=subprocess.PIPE, stderr=full, text=True, timeout=60, check=False
        )
    assert done.returncode == 0, "Python exits with 120 where its last output cannot be written"
    assert done.stdout == "hpctrain: there is room again\nFalse True\n"

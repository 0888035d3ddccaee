"""Output that a full disk or a paused terminal does not take."""

import os
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


def test_what_a_full_disk_does_not_take_is_dropped_and_ends_nothing():
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-c", LOUD], stdout=subprocess.PIPE, stderr=full, text=True, timeout=60, check=False
        )
    assert done.returncode == 0, "Python exits with 120 where its last output cannot be written"
    assert done.stdout == "hpctrain: there is room again\nFalse True\n"


PAUSED = """
import os, sys
from hpctrain.system.output import say
os.set_blocking(2, False)
while True:
    try:
        os.write(2, b"x" * 4096)
    except BlockingIOError:
        break
os.set_blocking(2, True)
print(say("nobody sees it", most_s=0.0))
"""


def test_a_terminal_that_shows_nothing_does_not_hold_up_who_has_others_to_watch():
    reader, writer = os.pipe()  # as of a pager that is not read on
    done = subprocess.run(
        [sys.executable, "-c", PAUSED], stdout=subprocess.PIPE, stderr=writer, text=True, timeout=60, check=True
    )
    os.close(reader)
    os.close(writer)
    assert done.stdout == "False\n"

"""A program without hpctrain whose last rank hangs in its third step, in a function that its stack names."""

import os
import time

import hpctrain


def waits_for_godot() -> None:
    """Never return."""
    time.sleep(600)


for number in range(4):
    if number == 3:
        waits_for_godot()
    hpctrain.heartbeat()
print("rank", os.environ["RANK"])

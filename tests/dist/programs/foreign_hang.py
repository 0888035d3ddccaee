"""A program of somebody else's whose last rank hangs in its third step, in a function whose name its stack shows."""

import os
import time

import hpctrain


def waits_for_godot() -> None:
    """Never ends by itself."""
    time.sleep(600)


for number in range(4):
    if number == 3:
        waits_for_godot()
    hpctrain.heartbeat()
print("rank", os.environ["RANK"])

"""Attempts of a run, each killed while it uploads checkpoints: store_kills.py FOLDER URL SERVER KILLS SEED."""

from __future__ import annotations

import os
import random
import signal
import sys
from pathlib import Path

import numpy as np

from hpctrain.checkpoint.policy import Retention
from hpctrain.checkpoint.remote import open_remote
from hpctrain.checkpoint.store import CheckpointStore
from hpctrain.comm.group import Group
from hpctrain.config.sections import StoreTierConfig
from hpctrain.run.events import CheckpointStored
from tests.support.object_store import ObjectStore

VALUES = 1_500_000
"""Number of 8-byte values, so that a shard is uploaded in two parts."""
MOST_REQUESTS = 40
"""Largest number of requests before an attempt is killed: enough for a few checkpoints."""


def weight(step: int) -> np.ndarray:
    """Values in the checkpoint of a step."""
    return np.random.default_rng(step).random(VALUES)


def attempt(folder: Path, url: str, announced: Path, server: ObjectStore, request: int) -> None:
    """Resume from the store, as if the run folder were lost, and save until killed; only check if ``request`` is 0."""
    keep = Retention(2)
    remote = open_remote(StoreTierConfig(url), folder, Group("alone"), keep, lambda: None)
    assert remote
    newest = next(iter(remote.found(has_other=False)), None)
    step, loaded = 0, None
    if newest is not None:
        remote.fetch(newest)
        loaded = CheckpointStore(newest.parent).load()
        step = loaded.step
        assert np.array_equal(loaded.arrays["model/weight"], weight(step)), f"step {step} has other values"
    promised = [int(line) for line in announced.read_text().split()]
    assert step >= max(promised, default=0), f"the newest is {step}, and {promised[-1]} was announced"
    if not request:
        remote.close()
        return
    server.kill(os.getpid(), request)
    remote.take_over(loaded)
    store = CheckpointStore(folder, keep)
    while True:
        step += 1
        path = store.save({"model/weight": weight(step)}, step=step)
        for event in remote.finish(step, path, 60.0):
            assert isinstance(event, CheckpointStored), event
            with announced.open("a") as file:
                file.write(f"{event.step}\n")


def main(folder: Path, url: str, server: ObjectStore, kills: int, seed: int) -> None:
    """Run the attempts. Raises AssertionError if one ends other than expected."""
    announced = folder / "announced"
    announced.touch()
    chance = random.Random(seed)
    for number, request in enumerate([*(chance.randint(1, MOST_REQUESTS) for _ in range(kills)), 0]):
        pid = os.fork()
        if not pid:
            attempt(folder / str(number), url, announced, server, request)
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert status == (-signal.SIGKILL if request else 0), f"attempt {number} of seed {seed} ended with {status}"
    print(f"announced {len(announced.read_text().split())}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], ObjectStore(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]))

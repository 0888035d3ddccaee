"""A worker process: reads and transforms the parts that its parent names. Started by ``hpctrain.data.workers``."""

from __future__ import annotations

import json
import signal
import socket
import sys
from typing import Any

import numpy as np

from hpctrain.data.dataset_spec import follow
from hpctrain.data.reference import resolve
from hpctrain.data.samples import describe
from hpctrain.data.transform import load
from hpctrain.errors import HpctrainError
from hpctrain.system.anonymous_memory import SharedMemory, put, views


def main(channel: int, payload: int, slots: list[int]) -> None:
    """Answers requests until the parent closes the channel, or dies.

    Args:
        channel: descriptor of the socket to the parent: one JSON object a line.
        payload: descriptor of the memory that holds the dataset's arrays, if it has any.
        slots: descriptors of the memory that results go to.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # schedulers and terminals signal every process: the parent decides
    results = [SharedMemory(descriptor) for descriptor in slots]
    with socket.socket(fileno=channel) as parent, parent.makefile("rb") as lines:
        answer: dict[str, Any] = {}
        try:
            setup = json.loads(lines.readline())
            sys.path[:] = setup["path"]  # for the user's functions; all that is ours has been imported
            dataset = follow(setup["dataset"], views(setup["arrays"], SharedMemory(payload)))
            transform = resolve(setup["transform"]) if setup["transform"] else None
        except Exception as error:
            answer = failure(error)
        for line in lines:
            request = json.loads(line)
            if "what" not in answer:
                try:
                    ids = np.array(request["ids"], dtype=np.int64)
                    samples = load(dataset, transform, setup["seed"], request["epoch"], ids)
                    answer = {"arrays": put(samples, results[request["slot"]])}
                except Exception as error:
                    answer = failure(error)
            try:
                parent.sendall(json.dumps(answer).encode() + b"\n")
            except OSError:
                return  # nobody waits for it


def failure(error: Exception) -> dict[str, str]:
    """What the parent raises."""
    if isinstance(error, HpctrainError):
        return {"what": error.what, "fix": error.fix}
    return {"what": f"a data worker failed: {describe(error)}", "fix": "correct the dataset or the transform"}


if __name__ == "__main__":
    first, second, *rest = map(int, sys.argv[1:])
    main(first, second, rest)

"""Main program of a worker process in ``hpctrain.data.worker_pool``: reads and transforms samples on request."""

from __future__ import annotations

import itertools
import json
import signal
import socket
import sys
from collections.abc import Iterator
from typing import Any, BinaryIO

import numpy as np

from hpctrain.data.dataset import with_place
from hpctrain.data.order import Drawn
from hpctrain.data.samples import make_batch
from hpctrain.data.worker_setup import recipe_of, reopen
from hpctrain.errors import GENERAL, Code, HpctrainError, code_of
from hpctrain.system.shared_memory import AnonymousMemory


def main(channel: int, payload: int, results: list[int]) -> None:
    """Answer requests until the parent closes the channel or dies.

    Args:
        channel: descriptor of the socket to the parent, which carries one JSON object per line.
        payload: descriptor of the shared memory with the dataset's arrays, if it has any.
        results: descriptors of the shared memories for results, used in turn.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # schedulers and terminals signal all processes; the parent decides
    with socket.socket(fileno=channel) as parent, parent.makefile("rb") as lines:
        try:
            for answer in answers(lines, AnonymousMemory(payload), [AnonymousMemory(result) for result in results]):
                parent.sendall(json.dumps(answer).encode() + b"\n")
            lines.read()  # stay until the parent has read the last answer and closes the channel
        except OSError:
            pass  # the parent is gone


def answers(lines: BinaryIO, payload: AnonymousMemory, results: list[AnonymousMemory]) -> Iterator[dict[str, Any]]:
    """Where each request's samples are in shared memory; ends with an error after the first failure, also in set-up."""
    turns = itertools.cycle(results)
    try:
        setup = json.loads(lines.readline())
        sys.path[:] = setup["path"]  # to find the user's functions; hpctrain's modules are imported already
        dataset = reopen(setup["dataset"], payload)
        recipe = recipe_of(setup["recipe"])
        for line in lines:
            request = json.loads(line)
            drawn = Drawn(request["epoch"], *(np.array(request[name], np.int64) for name in ("ids", "repeats")))
            yield {"arrays": next(turns).put(make_batch(dataset, recipe, drawn))}
    except HpctrainError as error:
        yield {"what": error.what, "fix": error.fix, "code": code_of(error)}
    except Exception as error:
        what = f"a data worker failed: {with_place(error)}"
        code = Code.USER_ERROR if code_of(error) in GENERAL else code_of(error)
        yield {"what": what, "fix": "correct the dataset, the transform or collate", "code": code}


if __name__ == "__main__":
    first, second, *rest = map(int, sys.argv[1:])
    main(first, second, rest)

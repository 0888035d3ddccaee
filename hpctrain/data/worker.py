"""A worker process: reads and transforms the parts that its parent names. Started by ``hpctrain.data.workers``."""

from __future__ import annotations

import importlib.util
import json
import pickle
import signal
import socket
import sys
from typing import Any

import numpy as np

from hpctrain.data.dataset import Samples
from hpctrain.data.samples import describe
from hpctrain.data.shared_memory import SharedMemory
from hpctrain.data.transform import load
from hpctrain.errors import HpctrainError

ALIGNMENT = 64


def main(channel: int, payload: int, slots: list[int]) -> None:
    """Answers requests until the parent closes the channel, or dies.

    Args:
        channel: descriptor of the socket to the parent: one JSON object a line.
        payload: descriptor of the memory that holds the dataset and the transform.
        slots: descriptors of the memory that results go to.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # schedulers and terminals signal every process: the parent decides
    results = [SharedMemory(descriptor) for descriptor in slots]
    with socket.socket(fileno=channel) as parent, parent.makefile("rb") as lines:
        answer: dict[str, Any] = {}
        try:
            setup = json.loads(lines.readline())
            for module, path in setup["modules"]:
                import_file(module, path)
            dataset, transform, seed = unpack(SharedMemory(payload), setup["sizes"])
        except Exception as error:
            answer = failure(error)
        for line in lines:
            request = json.loads(line)
            if "what" not in answer:
                try:
                    ids = np.array(request["ids"], dtype=np.int64)
                    samples = load(dataset, transform, seed, request["epoch"], ids)
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


def put(samples: Samples, slot: SharedMemory) -> list[tuple[str, str, tuple[int, ...], int]]:
    """Copies the arrays into shared memory; returns name, dtype, shape and offset of each."""
    offsets = np.cumsum([0] + [-(-array.nbytes // ALIGNMENT) * ALIGNMENT for array in samples.values()]).tolist()
    memory = slot.view(max(1, offsets[-1]))
    described = []
    for (name, array), offset in zip(samples.items(), offsets, strict=False):
        np.ndarray(array.shape, array.dtype, memory, offset)[...] = array
        described.append((name, array.dtype.str, array.shape, offset))
    return described


def unpack(memory: SharedMemory, sizes: list[int]) -> Any:
    """What the parent packed: the pickle, then the arrays in it, which stay in the shared memory."""
    views = []
    begin = 0
    everything = memory.view(sum(sizes)).toreadonly()
    for size in sizes:
        views.append(everything[begin : begin + size])
        begin += size
    return pickle.loads(views[0], buffers=views[1:])  # noqa: S301  written by our own parent process


def import_file(name: str, path: str) -> None:
    """Makes a module that was loaded from a file, or as the main program, known under its name here."""
    spec = importlib.util.spec_from_file_location("__mp_main__" if name == "__main__" else name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot import {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = sys.modules[spec.name] = module
    spec.loader.exec_module(module)


if __name__ == "__main__":
    first, second, *rest = map(int, sys.argv[1:])
    main(first, second, rest)

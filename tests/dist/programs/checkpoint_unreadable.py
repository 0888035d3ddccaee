"""Ranks that load while some get I/O errors: checkpoint_unreadable.py <folder> <rank, or all> <part of the paths>"""

import errno
import math
import sys

import pytest

from hpctrain.checkpoint import read_retry
from hpctrain.checkpoint.store import CheckpointStore
from hpctrain.comm.world import connect
from hpctrain.errors import HpctrainError
from tests.support.faults import FileServer

if __name__ == "__main__":
    folder, rank, where = sys.argv[1:]
    world = connect()
    read_retry.PAUSES_S = (0.01, 0.01)
    if rank in ("all", str(world.rank)):
        FileServer(errno.EIO, where, "open", times=math.inf).install(pytest.MonkeyPatch())
    try:
        store = CheckpointStore(folder, group=world.everyone)
        loaded = store.load()
        parts = store.load_into(lambda one: {"rows": one.arrays.part("model/large", (world.rank, 0), (2998, 1))})
        assert (parts.arrays["rows"] == loaded.arrays["model/large"][world.rank :][:2998, :1]).all()
        print(f"rank {world.rank} loaded {loaded.step} {len(loaded.rejected)}", flush=True)
    except HpctrainError as error:
        print(f"rank {world.rank} ends with {error.exit_code:d}: {error.what}", flush=True)

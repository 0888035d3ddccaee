"""Keeps PyTorch's flight recorder on, and writes the collectives in which a rank waits once no phase of a step ends.

The recorder is of PyTorch (docs.pytorch.org/tutorials/unstable/flight_recorder_tutorial.html). Its files would be
pickles; here its JSON is written.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Any

from torch._C import _distributed_c10d as c10d

from hpctrain.config.sections import MonitorConfig
from hpctrain.errors import RunFailed
from hpctrain.monitor.ring_clock import RingClock
from hpctrain.monitor.shared import MARKED_AT
from hpctrain.run.folder import RunDir
from hpctrain.run.rank_environment import current_attempt
from hpctrain.system.files import write_atomically

RECORDED = "500"
"""Collectives that the recorder keeps."""
RECORDERS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")
"""What reads the recorder of gloo (torch 2.8 and newer), and that of NCCL (builds that have it)."""
SILENCE_S = 60.0
"""Longest silence until collectives are written; half as long as the monitor waits at least."""
CLOSE_S = 5.0
"""Longest wait for a file that is being written at the end."""


def record(folder: Path) -> None:
    """Turns the recorder on; what torch itself dumps goes to ``folder``."""
    for name in ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"):  # PyTorch 2.6 and 2.7 know the second one
        os.environ.setdefault(name, RECORDED)
    os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", str(folder / "torch-trace-"))
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")


class CollectiveWatch:
    """A thread that writes the unfinished collectives of this rank, once in each silence of its clock.

    It works while the main thread waits for a GPU, which releases the interpreter. A rank that waits in no collective
    writes nothing: that is why it is missing.

    Args:
        clock: the clock on which this rank marks the phases of its steps.
        run: the run folder.
        path: the file to write.
        silence_s: seconds without a mark.
    """

    def __init__(self, clock: RingClock, run: RunDir, path: Path, silence_s: float) -> None:
        self.clock = clock
        self.run_dir = run
        self.path = path
        self.silence_s = silence_s
        self.over = threading.Event()
        self.thread = threading.Thread(target=self.watch, name="collective watch", daemon=True)
        self.thread.start()

    def watch(self) -> None:
        """Runs until ``close``."""
        written_at = 0.0
        while not self.over.wait(self.silence_s / 8):
            marked_at = self.clock.head[MARKED_AT]
            if marked_at != written_at and monotonic() - marked_at > self.silence_s:
                written_at = marked_at
                self.write()

    def write(self) -> None:
        """Writes the unfinished collectives, if there are any."""
        dumps = [getattr(c10d, name) for name in RECORDERS if hasattr(c10d, name)]
        found = merged([json.loads(dump(includeCollectives=True, onlyActive=True)) for dump in dumps])
        if found["entries"]:
            with suppress(RunFailed):  # a full disk: the hang is reported without it
                write_atomically(self.path, json.dumps(found).encode(), self.run_dir.path)

    def close(self) -> None:
        """Ends the thread, unless a file server holds it: then it ends with the process."""
        self.over.set()
        self.thread.join(CLOSE_S)


def merged(dumps: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Joins the groups and unfinished collectives of several recorders; gloo's never count as completed. Pure."""
    entries = [one for dump in dumps for one in dump.get("entries", ()) if not one["retired"]]
    groups = [(name, group) for dump in dumps for name, group in dump.get("pg_config", {}).items()]
    return {"pg_config": dict(groups), "entries": entries}


def watch_collectives(clock: RingClock, run: RunDir, rank: int, config: MonitorConfig) -> CollectiveWatch:
    """Records the collectives of process groups that are opened from now on, for ``monitor.chief.collectives``."""
    record(run.monitor)
    attempt = current_attempt()
    return CollectiveWatch(clock, run, run.collectives(attempt, rank), min(SILENCE_S, (config.hang_s or SILENCE_S) / 2))

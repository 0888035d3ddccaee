"""The run folder: paths of its files, and names of checkpoints."""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from hpctrain.errors import UserError
from hpctrain.system.files import Diverted, make_folder
from hpctrain.system.retry import retry_files
from hpctrain.system.safe_read import NotPlain, head


@dataclass(frozen=True)
class Inside:
    """Descriptor for the path of a file or folder inside a RunDir."""

    place: str

    def __get__(self, run: RunDir, kind: type[RunDir]) -> Path:
        return run.path / self.place


@dataclass(frozen=True)
class RunDir:
    """A run folder. Making the object does not touch the file system; ``create`` makes the folders."""

    path: Path

    run_yaml = Inside("run.yaml")
    """The resolved run file."""
    run_json = Inside("run.json")
    """The run's identity and attempts, for readers. Rewritten from the attempts' own files at each change."""
    attempts = Inside("attempts")
    """The attempts' own files; see ``Attempts``."""
    lock_file = Inside("run.lock")
    """Names the process that uses the folder."""
    events = Inside("events.jsonl")
    """Events, appended by rank 0."""
    monitor = Inside("monitor")
    """The monitor's folder."""
    monitor_events = Inside("monitor/events.jsonl")
    """Events, appended by the first node agent."""
    figures = Inside("figures.json")
    """Curves and matrices of the newest evaluation."""
    live_view = Inside("monitor/live.json")
    """The monitor's newest window."""
    heat_map = Inside("monitor/heat.npz")
    """The monitor's heat map of ranks and windows."""
    ranks = Inside("ranks")
    """Last words."""
    checkpoints = Inside("checkpoints")
    """Checkpoints."""
    saved_step = Inside("checkpoints/saved-step")
    """Step of the newest checkpoint that an unmodified program says it has saved, wherever it is; see ``own_loop``."""
    logs = Inside("logs")
    """Output of ranks and launchers."""
    stop_file = Inside("STOP")
    """Stop request: anyone may create it to make the run save a checkpoint and stop."""

    @classmethod
    def of(cls, name: str, run_dir: str | None = None) -> RunDir:
        """Returns the folder of a run as an absolute path: ``run_dir``, or runs/<name> in the working directory."""
        return cls(Path(run_dir or Path("runs") / name).expanduser().absolute())

    def words(self, attempt: int) -> Path:
        """File of an attempt's merged last words."""
        return self.ranks / f"{attempt}.json"

    def log(self, rank: int | str, attempt: int) -> Path:
        """Log file of a rank, or of the launcher, in an attempt: logs/<job>-<attempt>-<rank>.out."""
        return self.logs / f"{os.environ.get('SLURM_JOB_ID', 'local')}-{attempt}-{rank}.out"

    def collectives(self, attempt: int, rank: int) -> Path:
        """File of the collectives in which a rank waits while the run hangs."""
        return self.monitor / f"collectives-{attempt}-{rank}.json"

    def full_memory(self, attempt: int, rank: int) -> Path:
        """File of PyTorch's memory blocks at the moment when a rank's GPU was full."""
        return self.monitor / f"memory-{attempt}-{rank}.pickle"

    def create(self) -> None:
        """Makes the folder and its subfolders.

        Raises:
            UserError: one cannot be made.
            StoreDown: the file server does not answer.
        """
        try:
            for folder in (self.monitor, self.ranks, self.checkpoints, self.logs):
                retry_files(partial(make_folder, folder, self.path))
        except Diverted as error:
            fix = "remove it, or set run_dir to another folder; for more space, put the whole run folder elsewhere"
            raise UserError(f"{error.strerror}", fix) from error
        except OSError as error:
            fix = "set run_dir to a folder that you may write and that has free space"
            raise UserError(f"the run folder {self.path} cannot be made: {error.strerror}", fix) from error

    @property
    def has_begun(self) -> bool:
        """Whether there has been an attempt."""
        return self.run_json.exists() or self.attempts.exists()

    def newest_checkpoint_step(self) -> int | None:
        """Returns the step of the newest checkpoint: one with a manifest, or a program's own; None if there is none."""

        def steps() -> list[int | None]:
            found = [step_named(path.parent.name) for path in self.checkpoints.glob("step-*/manifest.json")]
            with contextlib.suppress(FileNotFoundError, ValueError, NotPlain):
                found.append(int(head(self.saved_step, 32)))
            return found

        return max((step for step in retry_files(steps) if step is not None), default=None)


PARTIAL = ".partial-"
"""Prefix of a checkpoint folder that is still being written."""
BEGUN_AGAIN = ".begun-again"
"""File that each run with ``--fresh`` replaces: unless it contains CLAIMED, checkpoints in the store do not count."""
CLAIMED = b"claimed"
PATTERN = re.compile(r"step-(\d{9,18})")


def name_of_step(step: int) -> str:
    """Returns the name of a step's checkpoint folder."""
    return f"step-{step:09d}"


def step_named(name: str) -> int | None:
    """Returns the step of a checkpoint folder's name, or None: numbers longer than 9 digits have no leading zeros."""
    match = PATTERN.fullmatch(name)
    return int(match[1]) if match and name == name_of_step(int(match[1])) else None


def bytes_in_flight(checkpoints: Path) -> int:
    """Returns the bytes written so far to unfinished checkpoints in a folder; 0 if there are none."""
    total = 0
    try:
        for partial in os.scandir(checkpoints):
            if partial.name.startswith(PARTIAL) and partial.is_dir(follow_symlinks=False):
                total += sum(entry.stat(follow_symlinks=False).st_size for entry in os.scandir(partial))
    except OSError:  # it was committed or removed in the meantime
        return 0
    return total

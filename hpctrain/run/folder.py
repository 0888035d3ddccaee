"""The run folder: where its files are, and how they are written."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from hpctrain.errors import UserError
from hpctrain.system.files import Diverted, make_folder


@dataclass(frozen=True)
class Inside:
    """What is at a place in each run folder: the path, of an object that has the folder's."""

    place: str

    def __get__(self, run: RunDir, kind: type[RunDir]) -> Path:
        return run.path / self.place


@dataclass(frozen=True)
class RunDir:
    """One run folder. Making the object touches nothing; ``create`` makes the folders."""

    path: Path

    run_yaml = Inside("run.yaml")
    """The resolved run file."""
    run_json = Inside("run.json")
    """Identity and attempts: what to read. Put together from the attempts' own files at each change."""
    attempts = Inside("attempts")
    """One file for each attempt, and what it adds: see ``Attempts``."""
    lock_file = Inside("run.lock")
    """Names the live run that uses the folder."""
    events = Inside("events.jsonl")
    """Events, appended by rank 0."""
    monitor = Inside("monitor")
    """The monitor's folder."""
    monitor_events = Inside("monitor/events.jsonl")
    """Events, appended by the first node agent."""
    figures = Inside("figures.json")
    """Curves and matrices of the newest evaluation."""
    plans = Inside("plans.json")
    """What ``hpctrain plan`` found for the run."""
    live_view = Inside("monitor/live.json")
    """The monitor's last window."""
    heat_map = Inside("monitor/heat.npz")
    """The monitor's map of all ranks and windows."""
    ranks = Inside("ranks")
    """Last words."""
    checkpoints = Inside("checkpoints")
    """Checkpoints."""
    logs = Inside("logs")
    """Output of ranks and launchers."""
    stop_file = Inside("STOP")
    """Anyone may create it: checkpoint and stop."""

    @classmethod
    def of(cls, name: str, run_dir: str | None = None) -> RunDir:
        """The folder of a run: ``run_dir``, or runs/<name> in the working directory; absolute."""
        return cls(Path(run_dir or Path("runs") / name).expanduser().absolute())

    def words(self, attempt: int) -> Path:
        """The merged last words of an attempt."""
        return self.ranks / f"{attempt}.json"

    def log(self, rank: int | str, attempt: int) -> Path:
        """The log of one rank, or of the launcher, in an attempt: logs/<job>-<attempt>-<rank>.out."""
        return self.logs / f"{os.environ.get('SLURM_JOB_ID', 'local')}-{attempt}-{rank}.out"

    def create(self) -> None:
        """Makes the folder and those in it.

        Raises:
            UserError: it cannot be made or written.
        """
        try:
            for folder in (self.monitor, self.ranks, self.checkpoints, self.logs):
                make_folder(folder, self.path)
        except Diverted as error:
            fix = "remove it, or set run_dir to another folder; for more space, put the whole run folder elsewhere"
            raise UserError(f"{error.strerror}", fix) from error
        except OSError as error:
            raise UserError(
                f"the run folder {self.path} cannot be made: {error.strerror}",
                "set run_dir to a folder that you may write and that has free space",
            ) from error

    @property
    def has_begun(self) -> bool:
        """Whether there has been an attempt."""
        return self.run_json.exists() or self.attempts.exists()

    def newest_checkpoint_step(self) -> int | None:
        """Step of the newest committed checkpoint (one that has its manifest), none if there is none."""
        found = (step_named(path.parent.name) for path in self.checkpoints.glob("step-*/manifest.json"))
        return max((step for step in found if step is not None), default=None)


PARTIAL = ".partial-"
"""Prefix of a folder that is being written."""
BEGUN_AGAIN = ".begun-again"
"""A file that each run with ``--fresh`` replaces: unless ``CLAIMED`` is in it, no checkpoint in the store counts."""
CLAIMED = b"claimed"
PATTERN = re.compile(r"step-(\d{9,18})")


def name_of_step(step: int) -> str:
    """The folder of a step's checkpoint."""
    return f"step-{step:09d}"


def step_named(name: str) -> int | None:
    """The step whose folder has this name, or None: longer numbers have no zeros before them."""
    match = PATTERN.fullmatch(name)
    return int(match[1]) if match and name == name_of_step(int(match[1])) else None


def bytes_in_flight(checkpoints: Path) -> int:
    """Bytes so far of the checkpoints that are being written in a folder; 0 if nothing is to be seen."""
    total = 0
    try:
        for partial in os.scandir(checkpoints):
            if partial.name.startswith(PARTIAL) and partial.is_dir(follow_symlinks=False):
                total += sum(entry.stat(follow_symlinks=False).st_size for entry in os.scandir(partial))
    except OSError:  # it was committed, or cleared away, in between
        return 0
    return total

"""The run folder: where its files are, and how they are written."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from hpctrain.errors import UserError
from hpctrain.run import step_folder
from hpctrain.system.files import Diverted, make_folder


@dataclass(frozen=True)
class RunDir:
    """One run folder. Making the object touches nothing; ``create`` makes the folders."""

    path: Path

    @classmethod
    def of(cls, name: str, run_dir: str | None = None) -> RunDir:
        """The folder of a run: ``run_dir``, or runs/<name> in the working directory; absolute."""
        return cls(Path(run_dir or Path("runs") / name).expanduser().absolute())

    @property
    def run_yaml(self) -> Path:
        """The resolved run file."""
        return self.path / "run.yaml"

    @property
    def run_json(self) -> Path:
        """Identity and attempts: what to read. Put together from the attempts' own files at each change."""
        return self.path / "run.json"

    @property
    def attempts(self) -> Path:
        """One file for each attempt, and what it adds: see ``Attempts``."""
        return self.path / "attempts"

    @property
    def lock_file(self) -> Path:
        """Names the live run that uses the folder."""
        return self.path / "run.lock"

    @property
    def events(self) -> Path:
        """Events, appended by rank 0."""
        return self.path / "events.jsonl"

    @property
    def monitor(self) -> Path:
        """The monitor's folder."""
        return self.path / "monitor"

    @property
    def monitor_events(self) -> Path:
        """Events, appended by the first node agent."""
        return self.monitor / "events.jsonl"

    @property
    def figures(self) -> Path:
        """Curves and matrices of the newest evaluation."""
        return self.path / "figures.json"

    @property
    def plans(self) -> Path:
        """What ``hpctrain plan`` found for the run."""
        return self.path / "plans.json"

    @property
    def live_view(self) -> Path:
        """The monitor's last window."""
        return self.monitor / "live.json"

    @property
    def heat_map(self) -> Path:
        """The monitor's map of all ranks and windows."""
        return self.monitor / "heat.npz"

    @property
    def ranks(self) -> Path:
        """Last words."""
        return self.path / "ranks"

    @property
    def checkpoints(self) -> Path:
        """Checkpoints."""
        return self.path / "checkpoints"

    @property
    def logs(self) -> Path:
        """Output of ranks and launchers."""
        return self.path / "logs"

    @property
    def stop_file(self) -> Path:
        """Anyone may create it: checkpoint and stop."""
        return self.path / "STOP"

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
        found = (step_folder.step_of(path.parent.name) for path in self.checkpoints.glob("step-*/manifest.json"))
        return max((step for step in found if step is not None), default=None)

"""A run on the test cluster, as its user sees it, with helpers for tests."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from hpctrain.run import last_words
from hpctrain.run.attempts import Attempts
from hpctrain.run.folder import RunDir
from hpctrain.run.run_view import RunView
from tests.slurm.cluster import Cluster, until
from tests.support.mpi import LAUNCH_S, PATIENCE_S

STEPS = 48
"""Number of steps of the tests' training runs."""


@dataclass(frozen=True)
class Run:
    """A run file, its folder, and hpctrain commands on it."""

    cluster: Cluster
    file: Path
    folder: Path

    @classmethod
    def write(cls, cluster: Cluster, home: Path, **keys: Any) -> Run:
        """Write a run file for two nodes with two ranks each; ``launch`` and ``slurm`` are merged into its sections."""
        home.mkdir(parents=True)
        launch = {"nodes": 2, "ranks_per_node": 2, **keys.pop("launch", {})}
        launch["slurm"] = {"profile": "local-test", "signal_s": 20, **keys.pop("slurm", {})}
        content = {"name": "r", "run_dir": str(home / "run"), "launch": launch, **keys}
        (home / "run.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
        return cls(cluster, home / "run.yaml", home / "run")

    @property
    def marker(self) -> str:
        """Text in the command line or environment of this run's processes only."""
        return self.folder.parent.name

    @property
    def dir(self) -> RunDir:
        """The run folder."""
        return RunDir(self.folder)

    def hpctrain(
        self, *words: object, check: bool = True, timeout: float = LAUNCH_S
    ) -> subprocess.CompletedProcess[str]:
        """Run an hpctrain command on the login node."""
        return self.cluster.run("hpctrain", *map(str, words), check=check, timeout=timeout, cwd=self.file.parent)

    def submit(self, *options: object) -> str:
        """Submit the run, and return the job's id."""
        return self.hpctrain("submit", self.file, "--parsable", *options).stdout.strip()

    def status(self) -> dict[str, Any]:
        """Output of ``hpctrain status --json``."""
        return dict(json.loads(self.hpctrain("status", self.folder, "--json").stdout)[0])

    def watch(self) -> dict[str, Any]:
        """Output of ``hpctrain watch --json``."""
        return dict(json.loads(self.hpctrain("watch", self.folder, "--json").stdout))

    def may_be_named(self, rank: int) -> set[int]:
        """Ranks that the verdict on the first attempt may name after this one was killed.

        If Slurm ended the node's agent before it could note a death, nothing tells the node's two ranks apart.
        """
        both = {rank - rank % 2, rank - rank % 2 + 1}
        return {rank} if any(noted.rank in both for noted in last_words.noted_deaths(self.dir, 1)) else both

    def cause(self, attempt: int = 1) -> str:
        """The cause that ``hpctrain explain`` would have named right after an attempt, from the files of that time."""
        then = self.folder.with_name(f"after-{attempt}")
        shutil.copytree(self.folder, then)
        info = json.loads((then / "run.json").read_text())
        info["attempts"] = [each for each in info["attempts"] if each["attempt"] <= attempt]
        (then / "run.json").write_text(json.dumps(info))
        for path in (then / "events.jsonl", then / "monitor" / "events.jsonl"):
            lines = path.read_text().splitlines(keepends=True) if path.exists() else []
            path.write_text("".join(line for line in lines if json.loads(line)["attempt"] <= attempt))
        for later in range(attempt + 1, 20):
            (then / "ranks" / f"{later}.json").unlink(missing_ok=True)
        return str(json.loads(self.hpctrain("explain", then, "--json").stdout)["cause"])

    def events(self, name: str) -> list[dict[str, Any]]:
        """Events with this name."""
        return [event.to_json() for event in RunView(self.dir.path).events() if event.name == name]

    def computed(self) -> list[int]:
        """Steps reported by any attempt, including repeated ones."""
        lines = [json.loads(line) for line in self.dir.events.read_text().splitlines()]
        return [event["step"] for event in lines if event["event"] == "train"]

    def verdicts(self) -> list[str]:
        """Verdict on each attempt."""
        verdicts = [attempt.verdict for attempt in Attempts(self.dir).all()]
        return [verdict.action.value if verdict else "none" for verdict in verdicts]

    def codes(self) -> list[str]:
        """Machine-readable reason why each attempt ended."""
        verdicts = [attempt.verdict for attempt in Attempts(self.dir).all()]
        return [verdict.code.value if verdict else "none" for verdict in verdicts]

    def weights(self) -> str:
        """Hash of the last attempt's weights, which must be equal on all ranks."""
        words = last_words.read(self.dir, Attempts(self.dir).all()[-1].number)
        assert words is not None
        hashes = {word.weights_hash for word in words.ranks}
        assert len(words.ranks) == 4 and len(hashes) == 1, words
        return str(hashes.pop())

    def log(self) -> str:
        """Everything that the run printed."""
        return "\n".join(
            f"== {path.name}\n{path.read_text(errors='replace')}" for path in sorted(self.folder.glob("logs/*"))
        )

    def wait(self, job: str, *states: str, timeout: float = LAUNCH_S) -> str:
        """Wait until the job is in one of these states, and return it; a failure shows the logs."""
        try:
            return self.cluster.wait(job, *states, timeout=timeout)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.log()}") from None

    def wait_for(self, condition: Any, timeout: float = PATIENCE_S) -> Any:
        """Poll a condition; a failure shows the logs."""
        return until(condition, timeout, self.log)

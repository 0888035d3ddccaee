"""Ranks killed at random moments: every announced checkpoint is intact, every restart resumes, and results match.

``HPCTRAIN_KILLS`` sets the number of kills (10 by default); ``HPCTRAIN_SEED`` repeats their order of ranks and moments.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from hpctrain.checkpoint.store import CheckpointStore
from hpctrain.checkpoint.verify import verify_checkpoint
from hpctrain.run.folder import RunDir
from tests.support.command import events, gone, wait_for
from tests.support.mpi import PATIENCE_S, rank_command, rank_environment

ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).parent / "programs" / "checkpoint_training.py"
KILLS = int(os.environ.get("HPCTRAIN_KILLS", "10"))
SEED = int(os.environ.get("HPCTRAIN_SEED", int.from_bytes(os.urandom(4), "little")))
CASES = [("torch", 2, 0.5), ("torch", 4, 0.25), ("tensorflow", 2, 0.15), ("tensorflow", 4, 0.1)]
"""Framework, number of ranks, and share of the kills."""


def options(framework: str, **more: Any) -> str:
    """Options of a run that saves all the time and keeps two checkpoints."""
    task = f"{ROOT}/tests/tasks/{framework}_resume_task.py:task"
    return json.dumps({"task": task, "steps": 1_000_000, "every_steps": 1, **more})


class Attempt:
    """An attempt whose ranks run until they are killed."""

    def __init__(self, ranks: int, framework: str, folder: Path, records: Path) -> None:
        self.pid_files = [records / f"{rank}.pid" for rank in range(ranks)]
        for path in self.pid_files:
            path.unlink(missing_ok=True)
        command = rank_command(ranks, PROGRAM, folder, records, options(framework), warm=framework)
        self.log = open(records / "log", "ab")  # noqa: SIM115
        self.process = subprocess.Popen(
            command,
            env=rank_environment({"PYTHONPATH": str(ROOT)}),
            stdin=subprocess.DEVNULL,
            stdout=self.log,
            stderr=self.log,
            start_new_session=True,
        )

    def pids(self) -> list[int]:
        """Pids of all ranks, once all have started."""
        return [
            int(wait_for("start of the ranks", lambda path=path: path.exists() and path.read_text(), PATIENCE_S))
            for path in self.pid_files
        ]

    def alive(self) -> None:
        """Raise AssertionError with the ranks' output if they ended by themselves."""
        assert self.process.poll() is None, Path(self.log.name).read_text()[-5000:]

    def end(self) -> None:
        """Wait until launcher and ranks are gone."""
        try:
            self.process.wait(PATIENCE_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.log.close()


def start_and_kill(attempt: Attempt, run_dir: RunDir, luck: random.Random, saving: bool) -> None:
    """Kill a rank at a random moment; if ``saving``, after the attempt has started to save checkpoints."""
    try:
        pids = attempt.pids()
        before = len(announced(run_dir))
        if saving:
            wait_for("checkpoint", lambda: attempt.alive() or len(announced(run_dir)) > before + 1, PATIENCE_S)
        time.sleep(luck.uniform(0, 0.3))
        attempt.alive()
        os.kill(luck.choice(pids), signal.SIGKILL)
    finally:
        attempt.end()
    wait_for("end of the other ranks", lambda: all(map(gone, pids)), PATIENCE_S)


def announced(run_dir: RunDir) -> list[int]:
    """Steps of the checkpoints that were announced."""
    return [event["step"] for event in events(run_dir.path, "checkpoint_saved")]


def all_sound(run_dir: RunDir) -> None:
    """Check that listed checkpoints are intact, and that the last announced one or a newer one is there."""
    store = CheckpointStore(run_dir.checkpoints)
    steps = store.steps()
    for step in steps:
        assert verify_checkpoint(store, step).problems == ()
    said = announced(run_dir)
    assert not said or (steps and steps[-1] >= said[-1]), f"announced {said[-3:]}, there are {steps}"


@pytest.mark.timeout(60 + 60 * KILLS)
@pytest.mark.world_size(4)
@pytest.mark.parametrize(("framework", "ranks", "share"), CASES)
def test_kills_at_random_moments(mpirun, tmp_path, framework, ranks, share):
    luck = random.Random(f"{SEED} {framework} {ranks}")
    run_dir, records = RunDir(tmp_path / "run"), tmp_path / "records"
    run_dir.create()
    records.mkdir()
    resumes = 0
    for number in range(max(1, round(KILLS * share))):
        saving = number == 0 or luck.random() < 0.8
        start_and_kill(Attempt(ranks, framework, run_dir.path, records), run_dir, luck, saving)
        resumes += saving and number > 0
        all_sound(run_dir)
    resumed = [event["step"] for event in events(run_dir.path, "resumed")]
    assert len(resumed) >= resumes and resumed == sorted(resumed), f"seed {SEED}"

    last = CheckpointStore(run_dir.checkpoints).steps()[-1] + 5  # may exist unannounced, if all ranks died before that
    for folder, notes in ((run_dir.path, records), (tmp_path / "straight", tmp_path / "straight-records")):
        arguments = (PROGRAM, folder, notes, options(framework, stop_after=last))
        mpirun(ranks, *arguments, timeout=300, warm=framework)
    for rank in range(ranks):
        ends = [
            (one / f"{rank}.jsonl").read_text().splitlines()[-1] for one in (records, tmp_path / "straight-records")
        ]
        assert ends[0] == ends[1], f"seed {SEED}"

"""The programs of examples/programs reach two time limits, save each time, and end as a straight run does."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hpctrain.errors import Code
from tests.slurm.run import Run
from tests.support import foreign_programs as foreign
from tests.support.command import hpctrain

EXAMPLES = Path(__file__).parents[2] / "examples" / "programs"
STEPS = 90
KINDS = ("pytorch", "transformers", "lightning", "accelerate") if foreign.ALL else ("pytorch",)
"""Those after the first need env/foreign.txt."""
END = re.compile(r"^(?:step 90 loss|done at step 90 weights) \S+$", re.MULTILINE)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", KINDS)
def test_a_program_saves_at_each_limit(new_run: Callable[..., Run], tmp_path: Path, kind: str) -> None:
    """Slurm signals 22 to 52 s after a start; the steps take 90 s, and a start some seconds."""
    devices = {"lightning": (["2", "1"], ["1", "2"])}.get(kind, ([], []))
    launch = {"launcher": "srun" if kind == "lightning" else "auto", "ranks_per_node": 1}
    words = [sys.executable, "train.py", *devices[1], "--steps", str(STEPS), "--seconds-per-step", "1"]
    run = new_run(launch={"command": words, **launch}, slurm={"time": "1", "signal_s": 8})
    for folder in (tmp_path, run.folder.parent):
        shutil.copy(EXAMPLES / kind / "train.py", folder)
    job = run.submit()
    straight = hpctrain(
        "run", "-n", 2, "--", sys.executable, "train.py", *devices[0], "--steps", STEPS, cwd=tmp_path, timeout=240
    )
    assert run.wait(job, "COMPLETED", "FAILED", timeout=600) == "COMPLETED", run.log()
    *limits, last = run.verdicts()
    assert len(limits) >= 2 and set(limits) == {"requeue"} and last == "done", run.log()
    assert set(run.codes()[:-1]) == {Code.TIME_LIMIT.value}
    saved = [event["step"] for event in run.events("checkpoint_saved")]
    assert len(saved) >= 2 and saved == sorted(set(saved)) and 0 < saved[0] < STEPS
    assert END.findall(run.log())[-1] == END.findall(straight.stdout)[-1]

"""The programs of examples/programs reach two time limits, save each time, and end as a straight run does."""

import re

import pytest

from hpctrain.errors import Code
from tests.slurm.conftest import limited, program
from tests.support import foreign_programs as foreign
from tests.support.command import hpctrain

KINDS = ("pytorch", "transformers", "lightning", "accelerate") if foreign.ALL else ("pytorch",)
"""Those after the first need env/foreign.txt."""
END = re.compile(r"^(?:step 90 loss|done at step 90 weights) \S+$", re.MULTILINE)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", KINDS)
def test_a_program_saves_at_each_limit(limited_program, side_run, tmp_path, kind):
    job = limited_program if kind == KINDS[0] else side_run(**limited(kind))
    devices = ["2", "1"] if kind == "lightning" else []
    straight = hpctrain("run", "-n", 2, "--", *program(kind), *devices, "--steps", 90, cwd=tmp_path)
    run = job.end()
    *limits, last = run.verdicts()
    assert len(limits) >= 2 and set(limits) == {"requeue"} and last == "done", run.log()
    assert set(run.codes()[:-1]) == {Code.TIME_LIMIT.value}
    saved = [event["step"] for event in run.events("checkpoint_saved")]
    assert len(saved) >= 2 and saved == sorted(set(saved)) and 0 < saved[0] < 90
    assert END.findall(run.log())[-1] == END.findall(straight.stdout)[-1]

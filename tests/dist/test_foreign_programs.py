"""Programs for other launchers under hpctrain's supervisor: same variables and numbers as under their own launcher.

With HPCTRAIN_FOREIGN=all, each kind of program is compared with its own launcher, otherwise only Horovod with PyTorch.
"""

from __future__ import annotations

import re
import sys

import pytest

from tests.support import foreign_programs as foreign
from tests.support.command import endings, hpctrain

pytestmark = pytest.mark.world_size(2)


def weights(text: str) -> float:
    """What a program prints about its weights at its end."""
    found = re.search(r"weights (-?[\d.]+)", text)
    assert found, text
    return float(found[1])


@pytest.mark.timeout(foreign.LIMIT_S * 2)
@pytest.mark.parametrize("name", foreign.COMPARED)
def test_a_program_gives_the_numbers_of_its_own_launcher(name, tmp_path):
    program = foreign.KINDS[name]
    own = program.under_its_own_launcher(tmp_path)
    words = ("--launch.convention", program.convention, "--", sys.executable, *program.words())
    ours = hpctrain("run", "-n", 2, "--name", name, *words, cwd=tmp_path, timeout=foreign.LIMIT_S)
    assert len(foreign.losses(own.stdout)) == 5, own.output
    assert foreign.losses(ours.stdout) == foreign.losses(own.stdout)
    assert endings(tmp_path / "runs" / name) == ["completed", "completed"]


def test_a_script_for_tensorflow_finds_its_workers(tmp_path):
    script = foreign.PROGRAMS / "foreign_multiworker.py"
    words = ("--launch.convention", "tensorflow", "--", sys.executable, script)
    said = hpctrain("run", "-n", 2, "--name", "workers", *words, cwd=tmp_path)
    assert weights(said.stdout) == pytest.approx(2.767998, abs=1e-5), "what one process computes"
    run = tmp_path / "runs" / "workers"
    assert endings(run) == ["completed", "completed"] and not (run / "ranks" / "1").exists()


if foreign.ALL:  # it needs env/foreign.txt

    def test_a_trainer_that_keeps_its_best_checkpoint_only_keeps_that_of_a_stop(tmp_path):
        """The Trainer deleted it at its end, and the next attempt began at the best one."""
        words = ("run", "--name", "best", "--", sys.executable, foreign.PROGRAMS / "foreign_trainer.py")
        hpctrain(*words, cwd=tmp_path, code=75)
        said = hpctrain(*words, cwd=tmp_path).stdout
        assert "from out/checkpoint-13" in said and "done at 15, best out/checkpoint-5" in said


@pytest.mark.tour
def test_a_script_for_torchrun_gives_its_numbers_and_its_death_is_explained(tmp_path):
    program = (sys.executable, foreign.PROGRAMS / "foreign_ddp.py", "die")
    said = hpctrain("run", "-n", 2, "--name", "dies", "--", *program, cwd=tmp_path, code=70)
    assert weights(said.stdout) == -0.104762, "what torchrun --standalone --nproc-per-node 2 prints"
    how = r"(exit code 1|killed by SIGABRT)"  # gloo's threads may abort while the program exits
    assert re.search(rf"rank 1 on \S+: .*{how} \(.*the disk of the data is gone\)", said.stderr), said.stderr


def test_a_rank_that_is_killed_is_named(tmp_path):
    program = (sys.executable, foreign.PROGRAMS / "foreign_ddp.py", "kill")
    said = hpctrain("run", "-n", 2, "--name", "killed", "--", *program, cwd=tmp_path, code=70)
    explained = hpctrain("explain", "runs/killed", cwd=tmp_path).stdout
    for text in (said.stderr, explained):
        assert re.search(r"[Rr]ank 1 on \S+: \S*python\S*\s+was\s+killed\s+by\s+SIGKILL", text), text


def test_heartbeats_find_a_hang_and_keep_the_stacks(tmp_path):
    words = ("--monitor.hang_s", 6, "--", sys.executable, foreign.PROGRAMS / "foreign_hang.py")
    said = hpctrain("run", "-n", 2, "--name", "hangs", *words, cwd=tmp_path, code=70)
    stacks = "".join(path.read_text() for path in (tmp_path / "runs" / "hangs" / "monitor").glob("stack-1-*"))
    assert "waits_for_godot" in stacks
    assert "no step" in said.stderr and "waiting for data" not in said.stderr, said.stderr  # it marks no phases

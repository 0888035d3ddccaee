"""Tests of plain commands as Slurm jobs: nodes, signals, requeue and logs without hpctrain's trainer."""

import json
from pathlib import Path

import pytest

from hpctrain.run.attempts import Attempts


@pytest.mark.tour
@pytest.mark.parametrize("launcher", ["srun", "mpirun"])
def test_a_command_runs_once_a_rank_on_both_nodes(new_run, launcher):
    program = "echo $(hostname) $HPCTRAIN_ATTEMPT; "
    program += (
        "echo told $RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE $GROUP_RANK $MASTER_ADDR:$MASTER_PORT $TF_CONFIG"
    )
    run = new_run(launch={"command": ["bash", "-c", program], "launcher": launcher})
    job = run.submit()
    assert run.wait(job, "COMPLETED", "FAILED") == "COMPLETED", run.log()
    assert sorted(line for line in run.log().splitlines() if line.endswith(" 1")) == ["n1 1", "n1 1", "n2 1", "n2 1"]
    assert run.status()["state"] == "finished"
    told = sorted(line.split(maxsplit=5)[1:] for line in run.log().splitlines() if line.startswith("told "))
    assert [words[:3] for words in told] == [
        ["0/4", "0/2", "0"],
        ["1/4", "1/2", "0"],
        ["2/4", "0/2", "1"],
        ["3/4", "1/2", "1"],
    ]
    assert len({words[3] for words in told}) == 1 and told[0][3].startswith("n1:")
    configs = [json.loads(words[4]) for words in told]
    assert [config["task"]["index"] for config in configs] == [0, 1, 2, 3]
    assert [worker.partition(":")[0] for worker in configs[0]["cluster"]["worker"]] == ["n1", "n1", "n2", "n2"]


def test_a_script_for_torchrun_gives_its_numbers_on_two_nodes_and_its_death_is_explained(
    new_run,
):
    script = Path(__file__).parents[1] / "dist" / "programs" / "foreign_ddp.py"
    run = new_run(launch={"command": ["python", str(script), "die"], "ranks_per_node": 1, "max_failures": 1})
    job = run.submit()
    assert run.wait(job, "FAILED", "COMPLETED") == "FAILED", run.log()
    assert "weights -0.104762" in run.log(), "what torchrun --standalone --nproc-per-node 2 prints"
    verdict = Attempts(run.dir).info()["attempts"][-1]["verdict"]
    assert (verdict["rank"], verdict["host"]) == (1, "n2")
    assert "the disk of the data is gone" in verdict["reason"]


COUNTING = """\
import os, pathlib, signal, sys, time
# Counts to 8 and keeps the count in a file, one a rank; exits 75 when it is asked to stop.
state = pathlib.Path(sys.argv[1]) / f"count-{os.environ['SLURM_PROCID']}"
signal.signal(signal.SIGUSR2, lambda *_: sys.exit(75))
for count in range(int(state.read_text()) if state.exists() else 0, 8):
    print("count", count, flush=True)
    time.sleep(20 if os.environ["HPCTRAIN_ATTEMPT"] == "1" and count else 0.05)
    state.with_suffix(".new").write_text(str(count + 1))
    os.replace(state.with_suffix(".new"), state)
"""


@pytest.mark.tour
def test_a_command_that_needs_more_time_is_stopped_and_requeued(new_run, tmp_path):
    (tmp_path / "count.py").write_text(COUNTING)
    run = new_run(launch={"command": ["python", str(tmp_path / "count.py"), str(tmp_path)], "stop_signal": "USR2"})
    job = run.submit()
    run.wait_for(lambda: "count 1" in run.log())
    view = run.watch()
    assert (view["state"], view["attempt"], view["job"]) == ("running", 1, job) and view["limit_in_s"] > 0
    run.cluster.run("scancel", "--batch", "--signal=USR1", job)  # what --signal=B:USR1 does before the time limit
    assert run.wait(job, "PENDING")
    assert run.wait(job, "COMPLETED", "FAILED") == "COMPLETED", run.log()
    assert [(tmp_path / f"count-{rank}").read_text() for rank in range(4)] == ["8"] * 4
    assert [attempt["verdict"]["action"] for attempt in Attempts(run.dir).info()["attempts"]] == ["requeue", "done"]
    assert run.log().count("count 7") == 4
    view = run.watch()
    assert (view["state"], view["attempt"], view["requeues"]) == ("finished", 2, 1)


def test_a_command_that_fails_names_rank_and_code(new_run):
    program = "[ $SLURM_PROCID = 2 ] && exit 3; sleep 600"
    run = new_run(launch={"command": ["bash", "-c", program], "max_failures": 1})
    job = run.submit()
    assert run.wait(job, "FAILED", "COMPLETED") == "FAILED"
    verdict = Attempts(run.dir).info()["attempts"][-1]["verdict"]
    assert (verdict["rank"], verdict["host"]) == (2, "n2")
    assert "exit code 3" in verdict["reason"]

"""A Slurm job as the place of several attempts."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

import pytest

from hpctrain.config.sections import Config, LaunchConfig, ParallelConfig, SlurmConfig, TrainConfig
from hpctrain.errors import Code, ExitCode, RunFailed
from hpctrain.launch.attempt import Launch
from hpctrain.launch.engines.slurm import allocation, client, leave_out, preflight
from hpctrain.launch.engines.slurm.allocation import JobNodes
from hpctrain.launch.engines.slurm.job import Job
from hpctrain.launch.engines.slurm.launcher import Mpirun, Srun
from hpctrain.launch.mpi_library import Flavour, MpiRun
from hpctrain.launch.supervisor import choose, prepare
from hpctrain.run import bad_nodes
from hpctrain.run.attempts import Attempt, Attempts
from hpctrain.run.bad_nodes import BadNode
from hpctrain.run.folder import RunDir
from hpctrain.run.verdict import Action, RunVerdict, failed_with

CONFIG = Config("r", launch=LaunchConfig(nodes=2, ranks_per_node=2, command=("true",)))
JOB = Job("7", nodes=2, ranks=4, restarts=1, nodelist="n[1-2]")
SRUN = Srun(JOB, SlurmConfig(), "pmix")
KILLED = failed_with(Code.KILLED, "rank 3 on n2 was killed by SIGKILL", "", 3, "n2")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> JobNodes:
    """A job whose first attempt was prepared, and which runs on."""
    run = RunDir(tmp_path)
    run.create()
    monkeypatch.setattr(client, "job_fields", lambda job: {"JobState": "RUNNING"})
    monkeypatch.setattr(client, "hosts", lambda nodelist: ["n1", "n2"])
    monkeypatch.setattr(client, "unreached", lambda hosts: set())
    return JobNodes(CONFIG, run, JOB, JOB, allocation.PreparedRanks(SRUN, "python", {}, {}))


def test_what_was_prepared_once_holds_for_all_attempts(tmp_path, monkeypatch):
    prepared, asked = allocation.PreparedRanks(SRUN, "python", {"a": "b"}, {0: "n1"}), []
    monkeypatch.setattr(allocation, "prepare", lambda *args: asked.append(args) or prepared)
    place = JobNodes.of(CONFIG, RunDir(tmp_path), JOB)
    assert place.prepare() is prepared
    again = place.prepare()
    assert len(asked) == 1
    assert again == dataclasses.replace(prepared, launcher=dataclasses.replace(SRUN, again=True))
    assert place.prepare() == again


@pytest.mark.parametrize("launcher", [SRUN, Mpirun(JOB, SlurmConfig(), MpiRun("/usr/bin/mpirun", Flavour.OPEN_MPI_5))])
def test_a_step_after_a_failed_one_shares_what_that_may_still_hold(launcher):
    def how(launcher):
        return " ".join([*launcher.words(["true"], {}), *launcher.environment({})])

    assert "overlap" not in how(launcher).lower()
    assert "overlap" in how(launcher.after_failure(JOB)).lower()
    assert "--mem=0" not in how(launcher) and ("--mem=0" in how(launcher.after_failure(JOB))) is (launcher is SRUN)


def test_a_killed_rank_is_started_again_in_the_job(place):
    assert place.serves(KILLED)


@pytest.mark.parametrize(
    "fields",
    [
        {"JobState": "COMPLETING", "Reason": "TimeLimit"},
        {"JobState": "CANCELLED"},
        {"JobState": "RUNNING", "Restarts": "2"},
    ],
)
def test_a_job_that_ends_serves_no_longer(place, monkeypatch, fields):
    monkeypatch.setattr(client, "job_fields", lambda job: fields)
    assert not place.serves(KILLED)


def test_a_job_that_lost_a_node_or_has_one_to_leave_out_serves_no_longer(place):
    bad_nodes.of_run(place.run_dir).add(BadNode("n9", time.time() + 3600, 1, "slow", str(place.run_dir.path)))
    assert place.serves(KILLED), "it is not ours"
    bad_nodes.of_run(place.run_dir).add(BadNode("n2", time.time() + 3600, 1, "slow", str(place.run_dir.path)))
    assert not place.serves(KILLED)
    bad_nodes.of_run(place.run_dir).clear("n2", time.time())
    assert place.serves(KILLED)
    assert not place.serves(failed_with(Code.NODE, "n2 was lost", "", host="n2"))
    assert not place.serves(failed_with(Code.NODE, "a node was lost", "")), "nobody knows which"


@pytest.mark.parametrize(("min_nodes", "answers", "lost"), [(1, False, True), (1, True, False), (None, False, False)])
def test_a_node_that_the_monitor_cannot_reach_is_lost_if_slurm_cannot_either_and_others_are_left(
    place, monkeypatch, min_nodes, answers, lost
):
    launch = dataclasses.replace(place.config.launch, min_nodes=min_nodes)
    place.config = dataclasses.replace(place.config, launch=launch)
    monkeypatch.setattr(client, "unreached", lambda hosts: set() if answers else {"n2"} & set(hosts))
    assert place.can_lose("n2.cluster") is lost


def test_a_controller_that_is_away_leaves_it_to_requeueing(place, monkeypatch):
    def away(nodelist):
        raise client.Unanswered("Slurm does not answer", "wait")

    monkeypatch.setattr(client, "hosts", away)
    assert not place.serves(KILLED) and not place.can_lose("n2")


def config(min_nodes: int | None = None, spare_nodes: int = 0, pipeline: int = 1, **train: int) -> Config:
    """Two nodes of two ranks each."""
    launch = LaunchConfig(nodes=2, ranks_per_node=2, min_nodes=min_nodes, spare_nodes=spare_nodes)
    batch = train or {"global_batch": 8}
    return Config("r", "m:f", TrainConfig(steps=1, **batch), parallel=ParallelConfig(pipeline=pipeline), launch=launch)


@pytest.mark.parametrize(
    ("hosts", "out", "of", "chosen"),
    [
        (["n1", "n2"], [], config(), ["n1", "n2"]),
        (["n1", "n2"], ["n2"], config(), None),
        (["n1", "n2"], ["n2"], config(min_nodes=1), ["n1"]),
        (["n1", "n2"], ["n1", "n2"], config(min_nodes=1), None),
        (["n1", "n2", "n3"], ["n2"], config(spare_nodes=1), ["n1", "n3"]),
        (["n1", "n2", "n3"], ["n2", "n3"], config(spare_nodes=1), None),
        (["n1", "n2"], ["n2"], config(min_nodes=1, pipeline=2), ["n1"]),
        (["n1", "n2"], ["n2"], config(min_nodes=1, pipeline=4), None),
        (["n1", "n2"], ["n2"], config(min_nodes=1, batch_per_rank=4), None),
    ],
)
def test_what_is_left_of_a_job_serves_if_the_run_stays_the_same(hosts, out, of, chosen):
    assert choose(hosts, out, of) == chosen


def test_nodes_lost_together_are_left_together_unless_too_few_are_left(place, monkeypatch):
    place.config = config(min_nodes=1)
    monkeypatch.setattr(client, "hosts", lambda nodelist: ["n1", "n2", "n3"])
    monkeypatch.setattr(client, "unreached", lambda hosts: {"n2", "n3"} & set(hosts))
    assert place.serves(KILLED) and not place.lost, "no node was lost"
    assert place.serves(failed_with(Code.NODE, "n2 was lost", "", host="n2"))
    assert (place.facts.nodes, place.lost) == (1, {"n2", "n3"})
    place.lost.clear()
    monkeypatch.setattr(client, "unreached", set)
    assert place.serves(failed_with(Code.NODE, "n3 was lost", "", host="n3"))
    assert (place.facts.nodes, place.lost) == (2, {"n3"}), "none can be reached from here: that says nothing"


def test_a_run_that_allows_it_continues_on_the_nodes_that_are_left(place):
    place.config = config(min_nodes=1)
    assert place.serves(failed_with(Code.NODE, "n2.site.org was lost", "", host="n2.site.org"))
    assert (place.facts.nodes, place.facts.ranks) == (1, 2)
    words = place.prepare().launcher.words(["true"], {})
    assert {"--nodes=1", "--ntasks=2", "--nodelist=n1", "--overlap", "--mem=0"} <= set(words)
    assert place.serves(KILLED) and place.facts.nodes == 1, "a lost node stays lost"


def test_after_a_move_the_hosts_of_ranks_are_no_longer_known(place):
    place.config, place.prepared = config(min_nodes=1), allocation.PreparedRanks(SRUN, "python", {}, {0: "n1", 2: "n2"})
    assert place.serves(KILLED) and place.prepare().hosts == {0: "n1", 2: "n2"}
    bad_nodes.of_run(place.run_dir).add(BadNode("n1", time.time() + 3600, 1, "slow", str(place.run_dir.path)))
    assert place.serves(KILLED) and place.job.part == ("n2",) and place.prepare().hosts == {}


def test_spare_nodes_wait_until_one_is_lost(tmp_path, monkeypatch):
    monkeypatch.setattr(client, "job_fields", lambda job: {})
    monkeypatch.setattr(client, "hosts", lambda nodelist: ["n1", "n2", "n3"])
    run = RunDir(tmp_path)
    run.create()
    job = Job("7", nodes=3, ranks=6, restarts=0, nodelist="n[1-3]")
    place = JobNodes.of(config(spare_nodes=1), run, job)
    assert (place.job.part, place.facts.ranks) == (("n1", "n2"), 4)
    place.prepared = allocation.PreparedRanks(SRUN, "python", {}, {})
    assert place.serves(failed_with(Code.NODE, "n1 was lost", "", host="n1"))
    assert (place.job.part, place.facts.ranks) == (("n2", "n3"), 4)


def test_mpirun_is_told_the_nodes_that_are_left():
    mpirun = Mpirun(JOB, SlurmConfig(), MpiRun("mpirun", Flavour.OPEN_MPI_5)).after_failure(JOB.on(["n1"]))
    assert mpirun.words(["true"], {})[-3:] == ["--host", "n1:2", "true"]


def silent(host: str) -> preflight.Fault:
    """What the preflight says of a node none of whose ranks answered."""
    return preflight.Fault(f"no rank on {host} answered", "", host, launcher=True, code=Code.NODE)


@pytest.mark.parametrize(
    ("faults", "gone", "before", "tried", "code", "exit_code"),
    [
        ([silent("n2"), None], False, None, 2, None, None),  # its PMIx is broken: mpirun works
        ([silent("n2"), silent("n2")], True, None, 1, Code.NODE, 70),
        ([silent("n2"), silent("n2")], False, None, 2, Code.NODE, 70),
        ([silent("n2"), silent("n2")], False, Code.NODE, 2, Code.NODE, 64),  # another node last time
        ([silent("n2"), silent("n2")], True, Code.NODE, 1, Code.NODE, 70),
        ([preflight.Fault("singletons", "", launcher=True)] * 2, False, None, 2, Code.PREFLIGHT, 64),
    ],
)
def test_a_node_that_starts_no_rank_in_the_preflight_is_left_out_and_the_job_requeued(
    place,
    monkeypatch,
    faults,
    gone,
    before,
    tried,
    code,
    exit_code,
):
    mpirun = Mpirun(JOB, SlurmConfig(), MpiRun("/usr/bin/mpirun", Flavour.OPEN_MPI_5))
    left = list(faults)
    monkeypatch.setattr(allocation, "launchers", lambda config, job: [SRUN, mpirun])
    monkeypatch.setattr(allocation, "check", lambda *_: ([fault] if (fault := left.pop(0)) else [], {}))
    monkeypatch.setattr(allocation, "skip_steps", lambda *_: None)
    monkeypatch.setattr(client, "unreached", lambda hosts: set(hosts) if gone else set())
    if before is not None:
        number = Attempts(place.run_dir).begin(Attempt(job="7", nodes=2, ranks=4))
        verdict = RunVerdict(Action.REQUEUE, ExitCode.FAILURE, "preflight", code=before, before_ranks=True)
        Attempts(place.run_dir).end(number, verdict, [])
    Attempts(place.run_dir).begin(Attempt(job="7", nodes=2, ranks=4))
    place.prepared = None
    found = prepare(lambda number: Launch([], {}, place.prepare().launcher.job.ranks), 1)
    assert len(faults) - len(left) == tried
    if isinstance(found, Launch):
        assert code is None
        return
    assert (found.code, found.exit_code, found.before_ranks) == (code, exit_code, True)
    assert found.action is (Action.REQUEUE if exit_code == 70 else Action.FAIL)
    assert ("n2" in leave_out.avoided(place.config, place.run_dir)) is (exit_code == 70)


@pytest.mark.parametrize(("state", "excluded"), [("RUNNING", True), ("COMPLETING", False)])
def test_no_node_is_blamed_for_a_preflight_that_scancel_ended(place, monkeypatch, state, excluded):
    silent = preflight.Fault("no rank on n2 answered", "", "n2", launcher=True, code=Code.NODE)
    monkeypatch.setattr(allocation, "launchers", lambda config, job: [SRUN])
    monkeypatch.setattr(allocation, "check", lambda *_: ([silent], {}))
    monkeypatch.setattr(allocation, "skip_steps", lambda *_: None)
    monkeypatch.setattr(client, "job_fields", lambda job: {"JobState": state, "Restarts": "1"})
    Attempts(place.run_dir).begin(Attempt(job="7", nodes=2, ranks=4))
    place.prepared = None
    with pytest.raises(RunFailed, match="no rank on n2 answered"):
        place.prepare()
    assert ("n2" in leave_out.avoided(place.config, place.run_dir)) is excluded


def test_a_preflight_with_the_same_fault_on_every_node_says_so_in_a_few_lines(place, monkeypatch, capsys):
    faults = [preflight.Fault(f"2 ranks on n{node} share 1 cores", "", f"n{node}", fatal=False) for node in range(500)]
    monkeypatch.setattr(allocation, "launchers", lambda config, job: [SRUN])
    monkeypatch.setattr(allocation, "check", lambda *_: (faults, {}))
    monkeypatch.setattr(allocation, "skip_steps", lambda *_: None)
    place.prepared = None
    place.prepare()
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 9 and "492 more" in said[-1]

"""Runs in the queues of batch systems: scripts, and what their commands are asked, with commands that write it down."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from hpctrain.cli import main
from hpctrain.config.loading import load
from hpctrain.errors import ExitCode, RunFailed
from hpctrain.launch.engines import batch_jobs, schedulers
from hpctrain.launch.engines.batch_systems import SYSTEMS
from hpctrain.launch.engines.jobs import Submitted, record, submissions
from hpctrain.run.attempts import Attempts
from hpctrain.run.folder import RunDir
from hpctrain.run.rank_environment import JOB
from hpctrain.run.verdict import Action, RunVerdict
from tests.support.programs import write_programs

SAID = {
    "pbs": ("123.server", "Job id  Name  User  Time Use S Queue\n123.server  r  u  00:00:01 {} workq", "Q", "R"),
    "lsf": ("Job <123> is submitted to queue <normal>.", "123 {}", "PEND", "RUN"),
    "gridengine": ("123", "job-ID prior name user state\n----\n 123 0.5 r u {} 11/25/2026", "qw", "r"),
    "flux": ("\u01922gH7", "\u01922gH7 {}", "SCHED", "RUN"),
    "slurm": ("123", "123|r|{}|0:01|9:00|1|n1|now", "PENDING", "RUNNING"),
}
COMMANDS = ["qsub", "qstat", "qdel", "bsub", "bjobs", "bkill", "flux", "squeue", "sacct", "scontrol", "scancel"]
FAKE = """\
echo "$(basename $0) $*" >> {folder}/asked
case "$(basename $0) $*" in
*sub*|*batch*) cat > {folder}/script; cat {folder}/number ;;
*" -f "*|*" -j "*|*" -UF "*|*jobspec*) cat {folder}/details ;;
*qstat*|*bjobs*|*jobs*) cat {folder}/queue ;;
esac
"""


@pytest.fixture(params=SYSTEMS)
def engine(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A batch system; the current folder holds a run file, and what its commands say and were asked."""
    name = str(request.param)
    write_programs(tmp_path, **dict.fromkeys(COMMANDS, FAKE.format(folder=tmp_path)))
    (tmp_path / "run.yaml").write_text(
        f"name: r\nlaunch: {{engine: {name}, command: [train], nodes: 2, ranks_per_node: 3, directives: ['-x y']}}\n"
        if name in SYSTEMS
        else "name: r\nlaunch: {command: [train], nodes: 2}\n"
    )
    (tmp_path / "number").write_text(SAID[name][0] + "\n")
    (tmp_path / "details").write_text(f"output: {tmp_path}/runs/r/lo\n    gs/job.out")
    (tmp_path / "queue").touch()
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv(JOB, raising=False)
    monkeypatch.chdir(tmp_path)
    return name


def run_script(text: str, program: str) -> int:
    """The exit code of a script, by bash, with a program in place of hpctrain, in a process group as jobs have."""
    write_programs(Path(), hpctrain=program)
    lines = [line for line in text.splitlines() if not line.startswith("export PATH")]
    return subprocess.run(["bash", "-c", "\n".join(lines)], start_new_session=True, timeout=60).returncode


def asked() -> list[str]:
    return Path("asked").read_text().splitlines()


def test_a_run_is_submitted_followed_and_ended(engine, cli):
    _, line, waits, runs = SAID[engine]
    cli("submit", "run.yaml")
    job = submissions(RunDir(Path("runs/r").absolute()))[-1]
    assert (job.engine, job.job in SAID[engine][0]) == (engine, True)
    script = Path("script").read_text()
    assert script == Path("runs/r/job.sh").read_text() and f"{SYSTEMS[engine].prefix} -x y\n" in script
    assert subprocess.run(["sh", "-n", "script"]).returncode == 0
    for state, word in ((waits, "PENDING"), (runs, "RUNNING"), ("other", "UNKNOWN")):
        Path("queue").write_text(line.format(state) + "\n")
        assert f'"job_state": "{word}"' in cli("status", "run.yaml", "--json").out
    Path("queue").write_text(line.format(runs) + "\n")
    assert "is RUNNING already" in cli("submit", "run.yaml", code=64).err
    cli("cancel", "run.yaml")
    assert asked()[-1].endswith(job.job) and any(word in asked()[-1] for word in ("qdel", "bkill", "flux cancel"))


def test_a_job_of_somebody_else_is_left_alone(engine, cli):
    cli("submit", "run.yaml")
    Path("queue").write_text(SAID[engine][1].format(SAID[engine][3]) + "\n")
    Path("details").write_text("output: /elsewhere/logs")
    assert "is left alone" in cli("cancel", "run.yaml").out
    assert not any(word in each for each in asked() for word in ("qdel", "bkill", "flux cancel"))


@pytest.mark.parametrize("engine", ["pbs"], indirect=True)
def test_a_job_that_cannot_be_ended_keeps_no_other_and_hides_none(engine):
    write_programs(Path(), qdel='[ "$1" != 2 ] || { echo no permission >&2; exit 1; }')
    own, other = RunDir(Path("runs/r").absolute()), RunDir(Path("runs/other").absolute())
    with pytest.raises(RunFailed) as caught:
        schedulers.SCHEDULERS[engine].end([(own, ["1", "2", "3"]), (other, ["4"])])
    assert caught.value.what == (
        "job 2: qdel 2 refused: no permission; cancelled anyway: job 1, 3; "
        f"job 4 is left alone: it is not known to be of {other.path}"
    )


@pytest.mark.parametrize("engine", [*SYSTEMS, "slurm"], indirect=True)
def test_schedulers_are_asked_about_their_own_jobs_alone(engine):
    run = RunDir(Path("runs/r").absolute())
    run.create()
    run.run_yaml.write_bytes(Path("run.yaml").read_bytes())
    for number, other in enumerate(["slurm", *SYSTEMS, engine, "another"]):
        job = "123" if other == engine else f"4711{number}"
        record(run, Submitted(job, 0.0, str(run.path), engine=other))
    Path("queue").write_text(SAID[engine][1].format(SAID[engine][3]).replace("\u01922gH7", "123") + "\n")
    for command in ("status", "logs", "stop", "resume", "cancel"):
        main([command, "runs/r"])
    about = "\n".join(asked())
    assert "123" in about and "4711" not in about


def test_a_job_may_submit_the_next_one_of_its_run(engine, monkeypatch, cli):
    cli("submit", "run.yaml")
    run = RunDir(Path("runs/r").absolute())
    Path("queue").write_text(SAID[engine][1].format(SAID[engine][3]) + "\n")
    monkeypatch.setenv(JOB, submissions(run)[-1].job)
    run.run_yaml.write_text("name: r\nlaunch: {command: [train], hosts: [n1, n2]}\n")  # as the job leaves it
    cli("resume", "runs/r")
    assert len(submissions(run)) == 2


def test_a_job_that_starts_again_asks_for_its_hosts_again(engine, tmp_path, cli):
    cli("submit", "run.yaml")
    assert run_script(Path("script").read_text(), f'printf "%s\\n" "$@" > {tmp_path}/words') == 0
    _, run_file, *overrides = Path("words").read_text().splitlines()
    Path(run_file).write_text("name: r\nlaunch: {command: [train], hosts: [n1, n2]}\n")  # as the first start leaves it
    launch = load(run_file, overrides).launch
    assert (launch.engine, launch.hosts) == (engine, ())


def test_a_queue_that_is_silent_is_not_one_without_the_job(monkeypatch):
    def silent(*_, **__):
        raise subprocess.TimeoutExpired("qstat", 60.0)

    monkeypatch.setattr("shutil.which", str)
    monkeypatch.setattr("subprocess.run", silent)
    with pytest.raises(RunFailed, match="did not answer"):
        batch_jobs.state(SYSTEMS["pbs"], "123.server", 60.0)


def test_pbs_cuts_names_of_servers_off(monkeypatch):
    queue = "Job id  Name  User  Time Use S Queue\n123.batch-serv*  r  u  0 R workq\n"
    monkeypatch.setattr(batch_jobs, "ask", lambda *_, **__: queue)
    assert batch_jobs.state(SYSTEMS["pbs"], "123.batch-server.example.org", 60.0) == "RUNNING"
    assert batch_jobs.state(SYSTEMS["pbs"], "12.batch-server.example.org", 60.0) == ""


def test_who_waits_for_a_job_that_its_queue_forgets_asks_the_run(engine, monkeypatch, cli):
    cli("submit", "run.yaml", "--wait", code=ExitCode.FAILURE)
    run = RunDir(Path("runs/r").absolute())
    attempts = Attempts(run)
    for job, code in (("another", ExitCode.FAILURE), (submissions(run)[-1].job, ExitCode.DONE)):
        monkeypatch.setenv(JOB, job)
        attempts.end(attempts.begin(), RunVerdict(Action.DONE, ExitCode.DONE, "the program has finished"), [])
        cli("submit", "run.yaml", "--wait", code=code)


def test_what_scripts_cannot_hold_is_refused(engine, cli):
    for command, option, value, said in (
        ("render", "--launch.directives", '["-x\\ny"]', "launch.directives contains"),
        ("render", "--run_dir", "a folder", "a folder"),
        ("submit", "--chain", "2", f"jobs of {SYSTEMS[engine].title} take no --chain"),
    ):
        assert said in cli(command, "run.yaml", option, value, code=64).err


def test_exit_codes_of_the_script(engine, cli):
    """75 is requeued, as far as the script does that; others are the job's."""
    cli("submit", "run.yaml")
    for code, wanted in ((0, 0), (64, 64), (75, {"gridengine": 99}.get(engine, 75)), (76, 76)):
        program = f'[ "$1" = resume ] && echo "$@" >> again || exit {code}'
        assert run_script(Path("script").read_text(), program) == wanted
    assert Path("again").exists() == (engine in ("pbs", "flux"))


ENDS_AMONG_SIGNALS = """\
[ $1 = resume ] && exec touch again
trap : USR2
shell=$(cut -d' ' -f5 /proc/self/stat)
while kill -USR2 $shell; do :; done 2>/dev/null &
exit 75"""
"""The job's shell leads its process group."""


@pytest.mark.parametrize("engine", [*SYSTEMS, "slurm"], indirect=True)
def test_signals_do_not_hide_how_the_run_has_ended(engine, cli):
    assert run_script(cli("render", "run.yaml").out, ENDS_AMONG_SIGNALS) == {"gridengine": 99}.get(engine, 75)
    assert Path("again").exists() == (engine in ("pbs", "flux"))


@pytest.mark.parametrize(
    ("command", "launch", "said"),
    [
        ("submit", "engine: local", "launch.engine is local, which has no queue"),
        ("run", "engine: slurm", "launch.engine is slurm: its jobs run it"),
        ("run", "engine: hosts", "launch.engine is hosts, launch.hosts []"),
        ("run", "engine: local, hosts: [a]", "launch.engine is local, launch.hosts ['a']"),
    ],
)
def test_an_engine_that_does_not_fit_is_named(command, launch, said, tmp_path, cli):
    (tmp_path / "run.yaml").write_text(f"name: r\nlaunch: {{{launch}, command: [train]}}\n")
    assert said in cli(command, tmp_path / "run.yaml", code=64).err


def test_schedulers_are_those_of_engines_with_a_queue():
    assert set(schedulers.SCHEDULERS) == {"slurm", *SYSTEMS}

"""Tests of rendered and example job scripts with the real sbatch."""

import json
from pathlib import Path

import numpy as np
import yaml

from hpctrain.config.sections import Config, LaunchConfig, SlurmConfig
from hpctrain.launch.engines.slurm.render import job_script
from hpctrain.run.attempts import Attempts
from hpctrain.run.folder import RunDir

HOSTILE = [
    "it's \"so\" called", "$(touch owned) `id` ${HOME}", "back\\slash # hash a#b", "semi;colon & | > * ! {a,b}",
    "ünïcödé ☃", " leading", "100% %j %%", "\\\"'#", "--looks=like",
]  # fmt: skip


def test_sbatch_reads_comments_as_they_were_given(cluster, tmp_path):
    for value in HOSTILE:
        slurm = SlurmConfig(comment=value, begin="now+1hour")
        config = Config(name="r", launch=LaunchConfig(command=("true",), slurm=slurm))
        (tmp_path / "job.sbatch").write_text(job_script(config, tmp_path / "run.yaml", tmp_path, None, 20))
        job = cluster.run("sbatch", "--parsable", tmp_path / "job.sbatch").stdout.strip()
        found = cluster.run("squeue", "-h", "-j", job, "-o", "%k").stdout.rstrip("\n")
        cluster.run("scancel", job)
        assert found == value


def test_folders_with_hostile_names_work(new_run, tmp_path):
    folder = tmp_path / 'it\'s "100%" $(touch owned) ☃'
    run = new_run(launch={"command": ["echo", "$(touch owned) * 'x'"]}, run_dir=str(folder))
    job = run.submit()
    run.wait(job, "COMPLETED", "FAILED")
    logs = "".join(path.read_text() for path in folder.glob("logs/*"))
    assert logs.count("$(touch owned) * 'x'") == 4, logs
    assert not list(tmp_path.rglob("owned"))


def test_an_example_works_by_itself(new_run, digits):
    script = Path(__file__).parents[2] / "slurm" / "examples" / "cpu.sbatch"
    run = new_run(
        task="hpctrain.tasks.torch_digits:task", task_args={"data": str(digits)}, reduce={"kind": "mpi"},
        train={"steps": 10, "global_batch": 64},
    )  # fmt: skip
    shape = ["--ntasks-per-node=2", "--cpus-per-task=1", "--mem-per-cpu=500M"]
    done = run.cluster.run("sbatch", "--parsable", *shape, script, run.file, cwd=run.file.parent)
    job = done.stdout.strip()
    run.wait(job, "COMPLETED", "FAILED")
    assert (run.status()["state"], run.status()["job"]) == ("finished", job), run.log()
    started = run.events("run_started")[0]
    assert (started["ranks"], started["hosts"]) == (4, ["n1", "n2"])


def test_elements_of_an_array_are_runs_of_their_own_and_requeued_alone(new_run):
    program = "echo seed $SEED; [ $SLURM_ARRAY_TASK_ID = 1 ] && [ $HPCTRAIN_ATTEMPT = 1 ] && exit 75; exit 0"
    run = new_run(launch={"command": ["bash", "-c", program], "nodes": 1, "ranks_per_node": 1})
    sweep = run.file.parent / "sweep.txt"
    sweep.write_text("# seeds\n--launch.env '{\"SEED\": \"one $(id)\"}'\n--launch.env '{SEED: two}'\n")
    done = run.hpctrain("submit", run.file, "--array", sweep, "--at-once", 1, "--wait", "--json")
    job = json.loads(done.stdout.splitlines()[0])["jobs"][0]
    status = json.loads(run.hpctrain("status", run.folder, "--json").stdout)
    assert [(each["job"], each["state"]) for each in status] == [(f"{job}_0", "finished"), (f"{job}_1", "finished")]
    for element, seed in enumerate(("one $(id)", "two")):
        logs = "".join(path.read_text() for path in (run.folder / str(element)).glob("logs/*"))
        assert f"seed {seed}\n" in logs + "".join(path.read_text() for path in run.folder.glob(f"logs/*_{element}.out"))
    assert [len(Attempts(RunDir(run.folder / str(element))).all()) for element in range(2)] == [1, 2]


def test_a_sweep_is_one_array_whose_runs_are_compared(new_run, digits):
    run = new_run(
        task="hpctrain.tasks.torch_digits:task", task_args={"data": str(digits)}, reduce={"kind": "none"},
        train={"steps": 8, "global_batch": 64}, launch={"nodes": 1, "ranks_per_node": 1},
    )  # fmt: skip
    rates = ["--task_args.lr", "1e-6,1e-2"]
    run.hpctrain("sweep", run.file, *rates, "--submit", "--wait")
    table = json.loads(run.hpctrain("sweep", "--table", run.folder, "--json").stdout)
    assert [point["configuration"]["task_args.lr"] for point in table["points"]] == [0.01, 1e-06], "the best first"
    assert [point["results"]["steps"] for point in table["points"]] == [8, 8]
    again = run.hpctrain("sweep", run.file, *rates, "--dry-run")
    assert str(run.folder) not in again.stdout, "nothing is left to run"


def test_jobs_of_a_chain_go_on_where_the_last_one_stopped(new_run, tmp_path):
    program = f"echo x >> {tmp_path}/count; [ $(wc -l < {tmp_path}/count) -ge 2 ] || exit 75"
    run = new_run(launch={"command": ["bash", "-c", program], "nodes": 1, "ranks_per_node": 1})
    done = run.hpctrain("submit", run.file, "--chain", 4, "--json")
    first, second, third, fourth = json.loads(done.stdout)["jobs"]
    run.wait(first, "FAILED")
    run.wait(second, "COMPLETED")
    assert {run.wait(job, "CANCELLED") for job in (third, fourth)} == {"CANCELLED"}
    assert (tmp_path / "count").read_text() == "x\nx\n"


def test_a_pipeline_from_packing_to_export(new_run, digits, tmp_path):
    """The example script, with run files for the digits."""
    np.savez(tmp_path / "raw.npz", image=np.zeros((64, 8, 8), np.float32), label=np.zeros(64, np.int64))
    one = {"nodes": 1, "ranks_per_node": 1, "slurm": {"profile": "local-test", "signal_s": 20}}
    runs, folder = tmp_path / "pipe", tmp_path / "files"
    folder.mkdir()
    train = {
        "name": "train", "run_dir": str(runs / "train"), "task": "hpctrain.tasks.torch_digits:task", "launch": one,
        "task_args": {"data": str(digits)}, "train": {"steps": 8, "global_batch": 64}, "reduce": {"kind": "none"},
    }  # fmt: skip
    commands = {
        "pack": ["hpctrain", "data", "pack", "-o", tmp_path / "packed.h5", tmp_path / "raw.npz"],
        "evaluate": ["hpctrain", "evaluate", runs / "train" / "run.yaml", "--json"],
        "export": ["hpctrain", "ckpt", "export", "-o", tmp_path / "weights.safetensors", runs / "train"],
    }
    (folder / "train.yaml").write_text(yaml.safe_dump(train))
    for name, words in commands.items():
        launch = {**one, "command": [str(word) for word in words]}
        (folder / f"{name}.yaml").write_text(
            yaml.safe_dump({"name": name, "run_dir": str(runs / name), "launch": launch})
        )
    run = new_run(launch={"command": ["true"]})
    script = Path(__file__).parents[2] / "slurm" / "examples" / "pipeline.sh"
    done = run.cluster.run(script, folder, cwd=tmp_path)
    jobs = [line.split()[-1] for line in done.stdout.splitlines()]
    assert len(jobs) == 4
    try:
        run.cluster.wait(jobs[-1], "COMPLETED")
    except AssertionError as error:
        logs = "\n".join(path.read_text() for path in runs.glob("*/logs/*"))
        raise AssertionError(f"{error}\n{logs}") from None
    assert (tmp_path / "weights.safetensors").stat().st_size > 1000

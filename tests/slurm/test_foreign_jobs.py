"""For a run folder that names jobs of other runs, Slurm is asked which run a job belongs to."""

import json
import shutil

from hpctrain.launch.engines.jobs import submissions

SLEEPS = {"command": ["sleep", "120"]}


def test_cancel_ends_the_jobs_of_its_folder_only(cluster, new_run, tmp_path):
    mine, other = new_run(launch=SLEEPS), new_run(launch=SLEEPS)
    job, others = mine.submit(), other.submit()
    (tmp_path / "more.sh").write_text("#!/bin/sh\nsleep 120\n")
    third = cluster.run("sbatch", "--parsable", "--job-name=r", "more.sh", cwd=tmp_path).stdout.strip()
    with open(mine.folder / "jobs.jsonl", "a") as file:
        for forged in (others, third):
            file.write(json.dumps({"job": forged, "time": 0.0, "cwd": str(tmp_path)}) + "\n")
    said = json.loads(mine.hpctrain("cancel", mine.folder, "--json").stdout)
    assert said["cancelled"] == [job] and len(said["left_alone"]) == 2
    mine.wait(job, "CANCELLED")
    assert {cluster.state(each) for each in (others, third)} <= {"PENDING", "RUNNING", "CONFIGURING"}
    cluster.run("scancel", third)


def test_jobs_of_rendered_and_of_portable_scripts_are_cancelled(cluster, new_run, tmp_path):
    run = new_run(launch=SLEEPS)
    run.dir.create()
    shutil.copy(run.file, run.dir.run_yaml)  # which the rendered script names
    for options in ([], ["--portable"]):
        script = tmp_path / f"script{len(options)}.sbatch"
        script.write_text(run.hpctrain("render", run.file, *options).stdout)
        words = [str(run.file)] if options else []
        job = cluster.run("sbatch", "--parsable", str(script), *words, cwd=tmp_path).stdout.strip()
        run.wait_for(lambda job=job: job in [each.job for each in submissions(run.dir)])  # by its supervisor
        assert json.loads(run.hpctrain("cancel", run.folder, "--json").stdout)["cancelled"] == [job]
        run.wait(job, "CANCELLED", "COMPLETED", "FAILED")


def test_an_array_is_cancelled_as_a_whole_or_in_part(new_run):
    run = new_run(launch=SLEEPS)
    job = run.submit("--array", "seed=1,2,3")
    run.hpctrain("cancel", run.folder / "1")
    run.wait_for(lambda: run.cluster.state(f"{job}_1") not in ("PENDING", "RUNNING"))
    said = json.loads(run.hpctrain("cancel", run.folder, "--json").stdout)
    assert sorted(said["cancelled"]) == [f"{job}_0", f"{job}_2"] and not said["left_alone"]

"""The user's variables, and hpctrain inside an allocation."""

import dataclasses

from tests.support.mpi import LAUNCH_S


def test_variables_of_the_user_hide_no_job_and_alter_no_request(new_run):
    run = new_run(launch={"command": ["sleep", "600"]})
    hiding = {"SQUEUE_PARTITION": "scavenge", "SCANCEL_STATE": "RUNNING", "SBATCH_ARRAY_INX": "0-2"}
    cluster = run.cluster
    run = dataclasses.replace(run, cluster=dataclasses.replace(cluster, environment={**cluster.environment, **hiding}))
    job = run.submit("--launch.slurm.begin", "now+1hour")
    assert "_" not in job and run.status()["job_state"] == "PENDING"
    again = run.hpctrain("submit", run.file, check=False)
    assert again.returncode == 64 and f"job {job} of" in again.stderr
    for path in sorted(run.folder.glob("**/*"), reverse=True):  # whoever tidies up does not think of the queue
        path.rmdir() if path.is_dir() else path.unlink()
    run.folder.rmdir()
    assert f"job {job} PENDING" in run.hpctrain("status", run.folder).stdout
    assert run.hpctrain("cancel", run.folder).stdout == f"cancelled job {job}\n"
    assert cluster.state(job) == "CANCELLED"


def test_an_allocation_of_two_nodes_is_used_or_refused(new_run):
    run = new_run(launch={"command": ["hostname"], "ranks_per_node": 1})
    allocated = ("salloc", "--nodes=2", "--ntasks=2", "--ntasks-per-node=1")

    def inside(*words):
        done = run.cluster.run(*allocated, *map(str, words), check=False, timeout=LAUNCH_S, cwd=run.file.parent)
        return done.returncode, done.stdout + done.stderr

    code, said = inside("hpctrain", "run", run.file)
    assert code == 64 and "hpctrain run uses only this machine" in said and "n[1-2]" in said
    code, said = inside("srun", "--mpi=none", "hpctrain", "evaluate", run.file)
    assert code and "the launcher started 2 ranks but MPI sees 1" in said
    code, said = inside("hpctrain", "supervise", run.file)
    assert code == 0 and "attempt 1: 2 ranks on n[1-2]" in said, said

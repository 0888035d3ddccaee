"""Tests of ``hpctrain bench scaling --slurm``, which runs each size as a separate job."""

import json


def test_sizes_are_jobs(new_run):
    run = new_run(
        task="hpctrain.tasks.torch_digits:task",
        train={"epochs": 1, "global_batch": 64},
        reduce={"kind": "mpi"},
        launch={"ranks_per_node": 1},
    )
    options = ["--ranks", "1,2", "--mode", "weak", "--steps", "24", "--rounds", "1", "--slurm", "--json"]
    result = json.loads(run.hpctrain("bench", "scaling", run.file, *options).stdout)
    assert [(row["nodes"], row["ranks"]) for row in result["modes"]["weak"]["measured"]] == [(1, 1), (2, 2)]

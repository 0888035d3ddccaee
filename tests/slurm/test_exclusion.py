"""A requeued Slurm job excludes hosts that the monitor found to be slow."""

import time

from hpctrain.run import bad_nodes
from hpctrain.run.bad_nodes import BadNode
from tests.slurm.run import STEPS


def test_an_excluded_host_is_left_out_of_the_next_attempt(train, tmp_path):
    run = train(
        0.6, launch={"nodes": 1}, monitor={"action": "exclude_on_requeue"}, checkpoint={"every_steps": 4},
        fault="kill", rank=1, at=20, once=str(tmp_path / "once"),
    )  # fmt: skip
    first = run.submit()
    run.wait_for(lambda: run.events("run_started"))
    [slow] = run.events("run_started")[0]["hosts"]
    bad_nodes.of_run(run.dir).add(BadNode(slow, time.time() + 3600, 1, "computes slowly"))
    run.wait_for(lambda: len(run.events("run_started")) == 2)
    [other] = run.events("run_started")[1]["hosts"]
    second = run.status()["job"]
    run.wait(second, "COMPLETED", "FAILED")
    assert {slow, other} == {"n1", "n2"}, run.log()
    assert first != second, "Slurm excludes no host from a job that it runs again: another one goes on"
    assert f"ExcNodeList={slow}" in run.cluster.run("scontrol", "show", "job", second).stdout
    assert run.events("resumed")
    assert run.status()["progress"]["step"] == STEPS

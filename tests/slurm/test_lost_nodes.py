"""A job that loses one of three nodes, or two at once, continues on the rest. For spares: dist/test_engines.py.

A job that loses its first node, with the supervisor, is requeued from another one.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hpctrain.run.attempts import Attempts
from tests.slurm.cluster import THIRD, Cluster
from tests.slurm.run import STEPS


@pytest.fixture(scope="module")
def third_node(cluster: Cluster) -> Iterator[None]:
    """Keep n3 up for the tests in this file."""
    cluster.start_node(THIRD)
    yield
    cluster.kill_node(THIRD)


@pytest.mark.parametrize("lost", [["n2"], ["n2", THIRD]], ids=["one", "two"])
def test_a_run_survives_the_loss_of_nodes_of_three(
    train,
    cluster,
    alone,
    third_node,
    lost,
):
    run = train(
        0.5,
        launch={"ranks_per_node": 1, "nodes": 3, "min_nodes": 1},
        slurm={"partition": "three"},
        track={"every_steps": 1},
        train={"steps": STEPS, "global_batch": 48, "eval_every_epochs": None},
    )
    job = run.submit()
    run.wait_for(lambda: run.events("checkpoint_saved"))
    for name in lost:
        cluster.kill_node(name)
    try:
        run.wait_for(lambda: run.events("recovered") or cluster.state(job) != "RUNNING")
    finally:
        for name in lost:
            cluster.start_node(name)  # otherwise the job stays COMPLETING until Slurm gives up on the node
    run.wait(job, "COMPLETED", "FAILED", "PENDING")
    first, second = Attempts(run.dir).all()
    assert first.verdict is not None and first.verdict.code == "node" and first.verdict.host in lost, run.log()
    assert [first.ranks, second.ranks] == [3, 3 - len(lost)]
    assert (second.nodes, second.restarts, second.job) == (3 - len(lost), 0, job), run.log()
    assert second.verdict is not None and second.verdict.exit_code == 0
    assert [event["step"] for event in run.events("train")] == list(range(1, STEPS + 1))
    [recovered] = run.events("recovered")
    assert (recovered["code"], recovered["host"]) == ("node", first.verdict.host)
    assert set(run.events("run_started")[-1]["hosts"]) == {"n1", "n2", THIRD} - set(lost)


def test_a_run_survives_the_loss_of_its_supervisor(train, cluster, alone):
    run = train(0.3, launch={"min_nodes": 1}, track={"every_steps": 1})
    job = run.submit()
    run.wait_for(lambda: run.events("checkpoint_saved"))
    cluster.kill_node("n1")
    try:
        run.wait_for(lambda: run.status()["state"] == "unknown" and "no sign of life" in run.status()["why"])
        run.wait_for(lambda: run.verdicts() == ["requeue"])
    finally:
        cluster.start_node("n1")
    run.wait(job, "COMPLETED", "FAILED")
    first, second = Attempts(run.dir).all()
    assert first.verdict is not None and (first.verdict.code, first.verdict.host) == ("node", "n1"), run.log()
    assert (second.job, second.restarts) == (job, 1), run.log()
    assert run.verdicts() == ["requeue", "done"] and run.events("resumed"), run.log()

"""``hpctrain plan --check``: some ranks of a large run are built in one process, and say what would fail."""

from __future__ import annotations

import json
import resource
from pathlib import Path

import pytest

from hpctrain.comm.imagined import Call, Calls, imagine
from hpctrain.comm.world import in_grid
from hpctrain.errors import UserError
from hpctrain.rank.plan_check import RankPlan, check, ranks_to_check, require_same_calls
from hpctrain.run.resolve_run import configured
from tests.unit.backends.torch.test_plan import WHOLE

RUN = """
name: gpt
task: tests.tasks.pipeline_tasks:gpt
train: {steps: 3, global_batch: 256, accumulate: 2}
"""
GATHERED = "--parallel.shard gradients --task tests.tasks.pipeline_tasks:methods"
OWN_TASK = """
import numpy as np
from torch import nn, optim
from hpctrain import TorchTask

def task(world):
    model = nn.Linear(4, 1 + world.rank // 8)
    data = {"x": np.zeros((64, 4), np.float32), "y": np.zeros((64, 1), np.float32)}
    return TorchTask(model, "mse", optim.SGD(model.parameters(), lr=0.1), data)
"""


@pytest.fixture
def run(tmp_path: Path) -> str:
    """A run file of a GPT."""
    path = tmp_path / "run.yaml"
    path.write_text(RUN)
    return str(path)


def plans(run: str, ranks: int, words: str) -> list[RankPlan]:
    """Checks a run file with these options."""
    return check(configured(run, words.split())[0], ranks)


@pytest.mark.parametrize(
    ("ranks", "per_node", "found"),
    [(128, 8, [0, 7, 120, 127]), (8, 8, [0, 7]), (1, 1, [0]), (10, 8, [0, 7, 8, 9]), (3, 1, [0, 2])],
)
def test_ends_of_the_first_and_of_the_last_node_are_checked(ranks, per_node, found):
    assert ranks_to_check(ranks, per_node) == found


def test_each_stage_is_checked():
    assert ranks_to_check(16, 8, pipeline=4) == [0, 4, 7, 8, 12, 15]
    assert ranks_to_check(2, 8, pipeline=4) == [0, 1], "too few for the grid, which says so"


def test_an_imagined_rank_is_in_the_groups_of_a_real_one():
    world = in_grid(imagine(13, 16, 8), tensor=2, pipeline=2)
    groups = (world.data, world.tensor, world.pipeline, world.local)
    assert [one.ranks for one in groups] == [(9, 11, 13, 15), (12, 13), (5, 13), tuple(range(8, 16))]  # type: ignore[attr-defined]
    assert [one.rank for one in groups] == [2, 1, 1, 5]
    assert (world.node, world.nodes, world.nodes_of(world.pipeline)) == (1, 2, [0, 1])


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        "",
        "--parallel.shard optimizer",
        "--parallel.shard gradients",
        "--parallel.shard parameters --parallel.tensor 2",
        f"--parallel.pipeline 2 --parallel.tensor 2 --parallel.pipeline_chunks 3 {GATHERED}",
    ],
)
def test_128_ranks_can_be_built_by_one_process(run, words):
    found = plans(run, 128, words)
    second_stage = [(64, 8)] if "pipeline" in words else []
    assert [(one.rank, one.node) for one in found] == [(0, 0), (7, 0), *second_stage, (120, 15), (127, 15)]
    groups = 128 // (2 if "tensor" in words else 1) // (2 if "pipeline" in words else 1)
    assert {one.samples for one in found} == {256 // groups}


@pytest.mark.slow
def test_a_check_agrees_with_the_table(run, cli):
    """Which has trained a step of the whole model."""
    rows = ["--parallel.shard", "parameters"]
    staged = [*rows, "--parallel.pipeline", "2", "--task", "tests.tasks.pipeline_tasks:methods"]
    for words in ([], ["--parallel.tensor", "2"], rows, [*rows, "--parallel.shard_within", "node"], staged):
        words = [*words, "--launch.ranks_per_node", "2"]
        table = json.loads(cli("plan", run, "-n", "4", "--json", *words).out)["plans"]
        plan = {
            "tensor": 1 + ("--parallel.tensor" in words),
            "shard": "parameters" if "parameters" in words else "none",
            "pipeline": 1 + ("--parallel.pipeline" in words),
        }
        (row,) = (one for one in table if plan.items() <= one["plan"].items())
        first = json.loads(cli("plan", run, "-n", "4", "--check", "--json", *words).out)[0]
        for part in ("parameters", "gradients", "optimizer"):  # the table shares out bytes, a rank has whole rows
            assert first[part] == pytest.approx(row[part], rel=0.02), (words, part)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "words", "said"),
    [
        (512, "", "train.global_batch is 256 but there are 512 ranks"),
        (128, "--parallel.tensor 3", "128 ranks do not divide into groups of that size"),
        (128, "--parallel.tensor 16", "ranks 0 to 15, which would share layers, are on different nodes"),
        (128, "--parallel.tensor 8 --task tests.tasks.tensor_tasks:gpt", "4 heads"),
        (128, "--parallel.pipeline 64", "layers"),
        (12, "--parallel.shard parameters --parallel.shard_within node", "nodes have 4 or 8 of the ranks"),
        (128, "--sync.kind local --sync.every_steps 2", "sync.kind: local"),
    ],
)
def test_what_would_fail_on_the_ranks_fails_here(run, ranks, words, said):
    with pytest.raises(UserError, match=said):
        plans(run, ranks, words)


@pytest.mark.slow
def test_a_model_that_depends_on_the_rank_is_found(tmp_path):
    (tmp_path / "own.py").write_text(OWN_TASK)
    run = tmp_path / "run.yaml"
    run.write_text(f"name: own\ntask: {tmp_path}/own.py:task\ntrain: {{steps: 1, global_batch: 64}}\n")
    assert len(plans(str(run), 8, "")) == 2
    with pytest.raises(UserError, match="the model of rank 8 differs from that of rank 0"):
        plans(str(run), 16, "")


@pytest.mark.slow
def test_parameters_without_values_get_no_memory(tmp_path):
    run = tmp_path / "run.yaml"
    keys = "task_args: {width: 16384, meta: true}\ncheckpoint: {init_from: none.safetensors}\n"
    task = "task: tests.tasks.valueless_tasks:task\ntrain: {steps: 1, global_batch: 64}\n"
    run.write_text(f"name: large\n{task}{keys}")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for words in ("--parallel.shard parameters", "--parallel.tensor 2", "--task_args.optimizer Adafactor"):
        found = plans(str(run), 8, words)
        assert found[0].memory.parameters > (1 << 30), "one of 8 GiB, or all"
        assert found[0].memory.optimizer, "state of the biases"
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 1 << 19, "KiB; a rank's rows alone have 1 GiB"


def test_ranks_of_a_group_must_call_the_same():
    def plan(rank, *given):
        calls = Calls()
        for call in given:
            calls.add(("world", (0, 1)), call, None)
        return RankPlan(rank, "", 0, 1, WHOLE, calls)

    models, sums = Call("compare the models", ""), Call("add", "float64[2]")
    first = plan(0, models, sums)
    first.calls.add(("tensor", (0,)), Call("add", ""), None)
    require_same_calls(first, plan(1, models, sums))
    for others, said in (((sums,), "compare the models, while rank 1 would add float64"), ((models,), "be done")):
        with pytest.raises(UserError, match=said):
            require_same_calls(plan(0, models, sums), plan(1, *others))


@pytest.mark.slow
def test_a_rank_that_has_too_little_memory_is_named(run, cli):
    said = cli("plan", run, "-n", "16", "--check", "--memory", "64G", "--parallel.tensor", "2").out
    assert "rank 8 (data 4, tensor 0) on node 1: 32 samples, parameters" in said and "nodes of 8 ranks" in said
    assert "rank 0 needs" in cli("plan", run, "-n", "16", "--check", "--memory", "1M", code=64).err

"""What a rank needs under each plan: arithmetic, and models that are really weighed."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from hpctrain.backends.torch.strategies.memory_estimate import MemoryEstimate, ParallelLayout, cheapest, footprints
from hpctrain.cli import main
from hpctrain.commands.plan import memory_of, num_bytes
from hpctrain.config.sections import LaunchConfig, SlurmConfig
from tests.support.command import hpctrain

WHOLE = MemoryEstimate(parameters=100, gradients=100, optimizer=200, averages=0, activations=3.5, checkpoint=300)
HALF = dataclasses.replace(WHOLE, parameters=60, gradients=60, optimizer=120, activations=2.0)


def with_shard(model: MemoryEstimate, share: float) -> MemoryEstimate:
    """Whose optimizer can be sharded."""
    return dataclasses.replace(model, shards={"optimizer": model.scaled(optimizer=share)})


STEPS = "train: {steps: 3, global_batch: 16}\n"
KINDS = ("gradients", "none", "optimizer", "parameters")
RUN = """
name: gpt
task: tests.tasks.tensor_tasks:gpt
train: {steps: 3, global_batch: 16, accumulate: 2}
"""


def test_each_plan_leaves_a_rank_its_part():
    estimates = {1: with_shard(WHOLE, 0.25), 2: with_shard(HALF, 0.5)}
    found = footprints(estimates, ranks=4, samples={1: 2, 2: 4}, program=1000)
    plans = [(1, 4, "none"), (1, 4, "optimizer"), (2, 2, "none"), (2, 2, "optimizer")]
    assert [one.plan for one in found] == [ParallelLayout(*each) for each in plans]
    assert [one.optimizer for one in found] == [200, 50, 120, 60]
    assert [one.activations for one in found] == [7, 7, 8, 8], "of its micro-batch"
    assert {one.staging for one in found} == {75}, "each rank writes a part"
    assert found[0].total == 1000 + 100 + 100 + 200 + 7 + 75
    assert cheapest(found, found[0].total) is found[0]
    assert cheapest(found, found[0].total - 1) is found[1]
    assert cheapest(found, 100) is None


@pytest.mark.slow
def test_sharded_parameters_leave_a_rank_its_rows_and_a_layer():
    from hpctrain.backends.torch.strategies.fsdp.fsdp_memory import in_rows

    model = dataclasses.replace(WHOLE, averages=100)
    for gathered, new in ((30, 30), (30, 100), (100, 30)):
        rows = in_rows(model, 0.25, gathered, new)
        found = (rows.parameters, rows.gradients, rows.optimizer, rows.averages)
        assert found == (25 + gathered, 25 + new, 50, 25)
        assert (rows.activations, rows.checkpoint) == (model.activations, model.checkpoint)
        assert rows.late_gradients == rows.gradients
    # Gradients that wait for the last micro-batch are no late ones; rows are made as they are freed.
    waiting = in_rows(model, 0.25, 30, 40, 100, accumulates=True)
    assert (waiting.gradients, waiting.late_gradients) == (140, 40)
    on_host = in_rows(model, 0.25, 30, 40, 100, accumulates=True, offloads=True)
    assert (on_host.gradients, on_host.offloaded) == (165, 125)
    assert ParallelLayout(2, 4, "parameters").keys == "parallel: {tensor: 2, shard: parameters}"


@pytest.mark.slow
def test_copies_of_weights_that_autocast_keeps_are_no_activations():
    import torch
    from torch import nn

    from hpctrain.backends.torch.strategies.estimated import SavedForBackward

    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    kept = SavedForBackward(model.parameters())
    with kept.weighing(), torch.autocast("cpu", torch.bfloat16):
        model(torch.randn(2, 64, requires_grad=True)).sum()
    assert sum(kept.copies.values()) == 2 * 2 * 64 * 64, "two bytes of each element of both matrices"
    assert 0 < kept.num_bytes < 2 * 64 * 64
    (whole,) = footprints({1: dataclasses.replace(WHOLE, copies=50)}, 1, {1: 2}, 1000)
    assert whole.parameters == WHOLE.parameters + 50


def test_gradients_take_the_memory_of_activations():
    (plan,) = footprints({1: dataclasses.replace(WHOLE, late_gradients=5)}, 1, {1: 2}, 1000)
    assert plan.activations == 2, "two samples have 7 bytes"
    (plan,) = footprints({1: dataclasses.replace(WHOLE, late_gradients=100)}, 1, {1: 2}, 1000)
    assert plan.activations == 0


def test_a_shard_leaves_what_was_estimated():
    """With the micro-batch and the part of the checkpoint that any plan has."""
    model = dataclasses.replace(WHOLE, shards={"optimizer": dataclasses.replace(HALF, averages=7, activations=3.5)})
    whole, rows = footprints({1: model}, 4, {1: 2}, 1000)
    assert rows.plan == ParallelLayout(1, 4, "optimizer")
    assert (rows.parameters, rows.gradients, rows.optimizer, rows.averages) == (60, 60, 120, 7)
    assert (rows.activations, rows.staging, rows.program) == (whole.activations, whole.staging, 1000)


def test_shares_of_a_rank_are_rounded_up():
    assert WHOLE.scaled(optimizer=0.701, gradients=0.5) == dataclasses.replace(WHOLE, optimizer=141, gradients=50)


def test_one_rank_shares_nothing():
    assert [one.plan for one in footprints({2: HALF}, 2, {2: 2}, 0)] == [ParallelLayout(2, 1, "none")]
    assert [one.plan for one in footprints({1: WHOLE}, 1, {1: 2}, 0)] == [ParallelLayout(1, 1, "none")]


def test_the_largest_stage_counts():
    """After the plans without stages; with the micro-batch of fewer data ranks, and no word of a sharded optimizer."""
    whole = dataclasses.replace(with_shard(WHOLE, 0.5), stages={2: HALF})
    found = footprints({1: whole, 2: dataclasses.replace(HALF, stages={2: HALF})}, 8, {1: 1, 2: 2, 4: 4}, 0)
    staged = [one for one in found if one.plan.pipeline > 1]
    assert found[-2:] == staged
    assert [one.plan for one in staged] == [ParallelLayout(1, 4, "none", 2), ParallelLayout(2, 2, "none", 2)]
    assert [one.activations for one in staged] == [4, 8]
    assert ParallelLayout(2, 2, "none", 2).keys == "parallel: {tensor: 2, pipeline: 2}"
    shorter = footprints({1: dataclasses.replace(WHOLE, stages={2: HALF})}, 2, {1: 1, 2: 1}, 0, 2, 4)
    assert [(one.plan, one.bubble) for one in shorter] == [
        (ParallelLayout(1, 2, "none"), 0),
        (ParallelLayout(1, 1, "none", 2, 4), 1 / 9),
    ]
    assert shorter[1].plan.keys == "parallel: {pipeline: 2, pipeline_chunks: 4}"


def test_a_plan_is_written_as_the_run_file_has_it():
    assert ParallelLayout(2, 4, "none").keys == "parallel: {tensor: 2}"
    assert ParallelLayout(1, 4, "optimizer").keys == "parallel: {shard: optimizer}"


@pytest.mark.parametrize(
    ("text", "count"), [("512M", 512 << 20), ("1.5G", 3 << 29), ("80GiB", 80 << 30), ("2t", 2 << 40)]
)
def test_sizes_are_read_as_slurm_reads_them(text, count):
    assert num_bytes(text) == count


@pytest.mark.slow
def test_a_model_is_weighed_as_it_would_be_cut(tmp_path, cli):
    run = tmp_path / "run.yaml"
    run.write_text(RUN)
    told = json.loads(cli("plan", run, "-n", "8", "--json").out)
    plans = {(one["plan"]["tensor"], one["plan"]["shard"]): one for one in told["plans"]}
    assert sorted(plans) == [(size, shard) for size in (1, 2, 4) for shard in KINDS]
    assert list(told["not_possible"]) == ["8", "pipeline"] and "4 heads" in told["not_possible"]["8"]
    whole, half = plans[1, "none"], plans[2, "none"]
    # Two blocks of width 16, a table of 24 words that is the last layer too, 7 places; float64.
    cut = 2 * (3 * 16 * 16 + 3 * 16 + 16 * 16 + 4 * 16 * 16 + 4 * 16 + 4 * 16 * 16) + 24 * 16
    kept = 2 * (16 + 16 + 4 * 16) + 7 * 16 + 2 * 16
    assert whole["parameters"] == 8 * (cut + kept)
    assert half["parameters"] == 8 * (cut // 2 + kept)
    for one in (whole, half):
        slots = one["optimizer"] - 2 * one["parameters"]
        assert 0 < slots < 200, "AdamW has two values for each element, and a count of steps for each tensor"
        assert one["gradients"] == one["parameters"]
    row = 3 * 16 * 8 * 2
    for held in ("parameters", "optimizer"):
        assert plans[1, "gradients"][held] == plans[1, "parameters"][held], "two blocks, which are gathered at a time"
    new = plans[1, "parameters"]["gradients"] - whole["gradients"]
    assert new == whole["gradients"], "two blocks, whose gradients are made while those of earlier passes wait"
    assert abs(plans[1, "gradients"]["gradients"] - new - whole["gradients"] / 8) < row, "summed after each pass"
    assert abs(plans[1, "optimizer"]["optimizer"] - whole["optimizer"] / 8) < row, "to half a row at either end"
    assert abs(plans[2, "optimizer"]["optimizer"] - half["optimizer"] / 4) < row
    block = 8 * (12 * 16 * 16 + 13 * 16)
    assert plans[1, "parameters"]["parameters"] <= whole["parameters"] / 8 * 1.1 + whole["parameters"], "few blocks"
    assert plans[1, "parameters"]["parameters"] > whole["parameters"] / 8 + 2 * block
    assert abs(plans[1, "parameters"]["optimizer"] - whole["optimizer"] / 8) < whole["optimizer"] / 20
    assert whole["checkpoint"] == half["checkpoint"], "whoever wrote it"
    assert half["activations"] / 2 < whole["activations"], "of one sample; a group has two"


@pytest.mark.slow
def test_a_run_that_does_not_fit_is_told_what_would(tmp_path, cli):
    run = tmp_path / "run.yaml"
    run.write_text(RUN)
    plans = json.loads(cli("plan", run, "-n", "8", "--json").out)["plans"]
    assert "no plan above fits" in cli("plan", run, "-n", "8", "--memory", "1M", code=64).err
    assert plans[0]["total"] > plans[1]["total"]
    table = cli("plan", run, "-n", "8", "--memory", "64G").out
    assert table.count("yes") == len(plans) and "a checkpoint has" in table
    cli("plan", run, "-n", "8", "--memory", "much", code=64)


def plan(capsys: pytest.CaptureFixture[str], code: int, run: Path, *words: str) -> tuple[list[tuple[int, str]], str]:
    """The plans (tensor, shard) that it names, and what it says of what cannot be."""
    assert main(["plan", str(run), "--json", *words]) == code
    said = capsys.readouterr()
    told = json.loads(said.out)
    plans = [(one["plan"]["tensor"], one["plan"]["shard"]) for one in told["plans"]]
    return plans, f"{told['not_possible']} {said.err}"


@pytest.mark.slow
def test_a_run_file_with_a_plan_of_its_own(tmp_path, capsys):
    run = tmp_path / "run.yaml"
    run.write_text(RUN)
    both = [(1, "none"), (1, "optimizer"), (1, "gradients"), (1, "parameters"), (2, "none")]
    assert plan(capsys, 0, run, "-n", "2", "--parallel.shard", "optimizer")[0] == both, "beside it what it excludes"
    assert plan(capsys, 0, run, "-n", "2", "--parallel.tensor", "2")[0] == both
    own = ["--parallel.tensor", "2", "--parallel.shard", "optimizer"]
    assert plan(capsys, 0, run, "-n", "2", *own)[0] == both, "where nobody is left to share the state with"
    assert (2, "optimizer") in plan(capsys, 0, run, "-n", "4", *own)[0]
    assert "needs" in plan(capsys, 64, run, "-n", "1", "--parallel.shard", "optimizer", "--memory", "1M")[1]
    said = plan(capsys, 64, run, "-n", "3", "--parallel.tensor", "2", "--memory", "64G")[1]
    assert "parallel.tensor is 2, and 3 ranks do not divide into groups of that size" in said
    few = ["--train.global_batch", "4"]
    plans, said = plan(capsys, 0, run, "-n", "8", "--parallel.tensor", "2", *few)
    assert (
        plans == [(size, shard) for size in (2, 4) for shard in ("none", "optimizer", "gradients", "parameters")]
        and "train.global_batch is 4 but there are 8 ranks" in said
    )
    assert "train.global_batch is 4 but there are 8 ranks" in plan(capsys, 64, run, "-n", "8", *few)[1]
    assert main(["plan", str(run), "-n", "64", *few]) == 64
    assert "train.global_batch is 4 but there are 64 ranks" in capsys.readouterr().err


@pytest.mark.slow
def test_host_and_device_are_counted_apart(tmp_path, capsys):
    """With named layers, which are gathered one by one."""
    run = tmp_path / "run.yaml"
    run.write_text(RUN)
    words = ["plan", str(run), "-n", "4", "--parallel.shard", "parameters", "--train.accumulate", "1"]

    def own(*more):
        assert main([*words, "--json", *more]) == 0
        plans = json.loads(capsys.readouterr().out)["plans"]
        return next(one for one in plans if one["plan"]["shard"] == "parameters" and one["plan"]["tensor"] == 1)

    rows, offloaded = own(), own("--parallel.offload", "true")
    assert offloaded["device"] + offloaded["host"] == offloaded["total"]
    assert offloaded["host"] == offloaded["program"] + offloaded["staging"] + offloaded["offloaded"]
    assert 0 < offloaded["device"] == rows["device"] - offloaded["offloaded"] < rows["device"]
    assert own("--parallel.layers", "[Linear]")["parameters"] < rows["parameters"]
    limited = [*words, "--memory", f"{offloaded['device'] // 1024 + 1}K"]
    assert (main(limited), main([*limited, "--parallel.offload", "true"])) == (64, 0)
    assert "device" in capsys.readouterr().out


def test_memory_is_that_of_the_job_if_the_run_file_says_it():
    def memory(words, **more):
        return memory_of(LaunchConfig(slurm=SlurmConfig(memory=words, **more), ranks_per_node=4))

    assert memory("64G") == 16 << 30
    assert memory("4096") == 1 << 30, "megabytes"
    assert memory("2G/cpu", cpus_per_rank=3) == 6 << 30
    assert memory("2G/cpu") == 2 << 30
    assert memory("0") is None and memory("much") is None
    assert memory("64G", gpus_per_node=4) is None, "what must fit is a GPU's"
    assert memory_of(LaunchConfig()) is None


FAILS = """
import numpy as np, torch, hpctrain
def task():
    raise ValueError("width 5 has no halves")
"""


@pytest.mark.slow
def test_a_task_that_fails_is_told_in_a_sentence(tmp_path, cli):
    (tmp_path / "fails.py").write_text(FAILS)
    words = f"name: r\ntask: {tmp_path}/fails.py:task\ntrain: {{steps: 3, global_batch: 8}}\n"
    (tmp_path / "run.yaml").write_text(words)
    said = cli("plan", tmp_path / "run.yaml", "-n", "2", code=64).err
    assert "ValueError: width 5 has no halves (fails.py:4: `raise ValueError(" in said and "Traceback" not in said


@pytest.mark.parametrize("ranks", ["0", "-2", "1000000000"])
def test_a_strange_number_of_ranks_is_refused(ranks, cli):
    said = cli("plan", "run.yaml", "-n", ranks, code=64).err
    assert f"-n is {ranks}" in said and "from 1 to 100000" in said


def test_no_memory_is_refused(cli):
    assert "leaves a rank nothing" in cli("plan", "run.yaml", "-n", "2", "--memory", "0G", code=64).err


@pytest.mark.slow
def test_optimizers_that_cannot_be_sharded_are_told(tmp_path, capsys):
    run = tmp_path / "run.yaml"
    uses = "[NO_CUTS, UNKNOWN_OPTIMIZER, NO_VALIDATION]"
    run.write_text(f"name: run\ntask: tests.tasks.combined_tasks:task\ntask_args: {{uses: {uses}}}\n" + STEPS)
    plans, said = plan(capsys, 0, run, "-n", "2")
    assert plans == [(1, "none")] and "Coupled may update a parameter from others" in said
    plans, said = plan(capsys, 64, run, "-n", "2", "--parallel.shard", "optimizer")
    assert plans == [(1, "none")] and "Coupled may update a parameter" in said
    own = ["--task_args.uses", "[NO_CUTS, OWN_STEP, NO_VALIDATION]"]
    plans, said = plan(capsys, 0, run, "-n", "2", *own)
    assert plans == [(1, "none"), (1, "optimizer")] and "whose passes other ranks could not follow" in said
    plans, said = plan(capsys, 0, run, "-n", "2", "--reduce.kind", "horovod")
    assert plans == [(1, "none")] and "Horovod would send all gradients to all ranks" in said


TASKS = """
import numpy as np, torch, hpctrain

data = {"x": np.zeros((8, 3), np.float32)}
def linear():
    model = torch.nn.Linear(3, 1)
    return hpctrain.TorchTask(model, lambda out, batch: out.mean(), torch.optim.SGD(model.parameters(), 0.1), data)
def of_keras():
    import keras
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    return hpctrain.KerasTask(model, lambda out, batch: out, keras.optimizers.SGD(0.1), data)
"""


@pytest.mark.slow
def test_a_task_that_says_nothing_of_cuts_is_not_cut(tmp_path, cli, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tasks.py").write_text(TASKS)
    (tmp_path / "run.yaml").write_text("name: r\ntask: tasks.py:linear\ntrain: {steps: 3, global_batch: 8}\n")
    said = cli("plan", "run.yaml", "-n", "2").out
    assert "tensor 2 is not possible: the task does not say how its layers are split" in said
    told = hpctrain("plan", "run.yaml", "-n", 2, "--task", "tasks.py:of_keras", cwd=tmp_path, code=64)
    assert "is a KerasTask, whose model every rank holds whole" in told.stderr


@pytest.mark.slow
def test_stages_are_weighed(tmp_path, cli):
    """All of the model is on the stages together, and the largest has least if they are equal."""
    run = tmp_path / "run.yaml"
    run.write_text("name: r\ntask: tests.tasks.pipeline_tasks:gpt\ntrain: {steps: 3, global_batch: 8, accumulate: 4}\n")
    plans = [
        one
        for one in json.loads(cli("plan", run, "-n", "4", "--json", "--parallel.pipeline", "4").out)["plans"]
        if one["plan"]["tensor"] == 1
    ]
    by_stages = {one["plan"]["pipeline"]: one for one in plans if one["plan"]["shard"] == "none"}
    assert sorted(by_stages) == [1, 2, 4]
    for part in ("parameters", "gradients", "optimizer"):
        whole, two, four = (by_stages[stages][part] for stages in (1, 2, 4))
        assert whole / 2 <= two < 0.7 * whole and whole / 4 <= four < two
    assert by_stages[1]["checkpoint"] == by_stages[4]["checkpoint"]
    assert [by_stages[stages]["bubble"] for stages in (1, 2, 4)] == pytest.approx([0, 1 / 5, 3 / 7])
    widest = cli("plan", run, "-n", "4", "--memory", "64G").out
    assert "\u2026" not in widest, "cut short"
    assert all(word in widest for word in ("tensor", "pipeline", "optimizer", "activations", "fits"))
    table = cli("plan", run, "-n", "2").out.splitlines()
    last = [line.split()[-1] for line in table if line.strip()]
    assert "bubble" in last and [word for word in last if word.endswith("%")][-1] == "20%"
    assert (
        "train.compile and train.sync_batchnorm are both true"
        in cli("plan", run, "-n", "4", "--train.sync_batchnorm", "true", "--train.compile", "true", code=64).err
    )

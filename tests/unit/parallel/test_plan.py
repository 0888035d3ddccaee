"""What a rank needs under each plan: arithmetic, and models that are really weighed."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from hpctrain.cli import main
from hpctrain.commands.plan import num_bytes
from hpctrain.parallel.plan import Plan, Weighed, cheapest, footprints
from tests.support.command import hpctrain

WHOLE = Weighed(
    parameters=100, gradients=100, optimizer=200, averages=0, activations=3.5, checkpoint=300, largest_share=0.25
)
HALF = Weighed(parameters=60, gradients=60, optimizer=120, averages=0, activations=2.0, checkpoint=300)
STEPS = "train: {steps: 3, global_batch: 16}\n"
RUN = """
name: gpt
task: tests.support.tensor_tasks:gpt
train: {steps: 3, global_batch: 16, accumulate: 2}
"""


def test_each_plan_leaves_a_rank_its_part() -> None:
    found = footprints({1: WHOLE, 2: HALF}, ranks=4, samples={1: 2, 2: 4}, program=1000)
    assert [one.plan for one in found] == [Plan(1, 4, "none"), Plan(1, 4, "optimizer"), Plan(2, 2, "none")]
    assert [one.optimizer for one in found] == [200, 50, 120]
    assert [one.activations for one in found] == [7, 7, 8], "of its micro-batch"
    assert {one.staging for one in found} == {75}, "each rank writes a part"
    assert found[0].total == 1000 + 100 + 100 + 200 + 7 + 75
    assert cheapest(found, found[0].total) is found[0]
    assert cheapest(found, found[0].total - 1) is found[1]
    assert cheapest(found, 100) is None


def test_what_cannot_be_sharded_evenly_says_so() -> None:
    uneven, not_at_all = dataclasses.replace(WHOLE, largest_share=0.7), dataclasses.replace(WHOLE, largest_share=None)
    assert [one.optimizer for one in footprints({1: uneven}, 4, {1: 2}, 0)] == [200, 140]
    assert [one.plan for one in footprints({1: not_at_all}, 4, {1: 2}, 0)] == [Plan(1, 4, "none")]


def test_one_rank_shares_nothing() -> None:
    assert [one.plan for one in footprints({1: WHOLE}, 1, {1: 2}, 0)] == [Plan(1, 1, "none")]


def test_a_plan_is_written_as_the_run_file_has_it() -> None:
    assert Plan(2, 4, "none").keys == "parallel: {tensor: 2}"
    assert Plan(1, 4, "optimizer").keys == "parallel: {shard: optimizer}"


@pytest.mark.parametrize(
    ("text", "count"), [("512M", 512 << 20), ("1.5G", 3 << 29), ("80GiB", 80 << 30), ("2t", 2 << 40)]
)
def test_sizes_are_read_as_slurm_reads_them(text: str, count: int) -> None:
    assert num_bytes(text) == count


def test_a_model_is_weighed_as_it_would_be_cut(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run.yaml"
    run.write_text(RUN)
    assert main(["plan", str(run), "-n", "8", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    plans = {(one["plan"]["tensor"], one["plan"]["shard"]): one for one in told["plans"]}
    assert sorted(plans) == [(1, "none"), (1, "optimizer"), (2, "none"), (4, "none")]
    assert list(told["not_possible"]) == ["8"] and "4 heads" in told["not_possible"]["8"]
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
    assert abs(plans[1, "optimizer"]["optimizer"] - whole["optimizer"] / 8) < row, "to half a row at either end"
    assert whole["checkpoint"] == half["checkpoint"], "whoever wrote it"
    assert half["activations"] / 2 < whole["activations"], "of one sample; a group has two"


def test_a_run_that_does_not_fit_is_told_what_would(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run.yaml"
    run.write_text(RUN)
    assert main(["plan", str(run), "-n", "8", "--json"]) == 0
    plans = json.loads(capsys.readouterr().out)["plans"]
    assert main(["plan", str(run), "-n", "8", "--memory", "1M"]) == 64
    assert "no plan above fits" in capsys.readouterr().err
    assert plans[0]["total"] > plans[1]["total"]
    assert main(["plan", str(run), "-n", "8", "--memory", "64G"]) == 0
    table = capsys.readouterr().out
    assert table.count("yes") == len(plans) and "a checkpoint has" in table
    assert main(["plan", str(run), "-n", "8", "--memory", "much"]) == 64


def plan(capsys: pytest.CaptureFixture[str], code: int, run: Path, *words: str) -> tuple[list[tuple[int, str]], str]:
    """The plans (tensor, shard) that it names, and what it says of what cannot be."""
    assert main(["plan", str(run), "--json", *words]) == code
    said = capsys.readouterr()
    told = json.loads(said.out)
    plans = [(one["plan"]["tensor"], one["plan"]["shard"]) for one in told["plans"]]
    return plans, f"{told['not_possible']} {said.err}"


def test_a_run_file_with_a_plan_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run.yaml"
    run.write_text(RUN)
    both = [(1, "none"), (1, "optimizer"), (2, "none")]
    assert plan(capsys, 0, run, "-n", "2", "--parallel.shard", "optimizer")[0] == both, "beside it what it excludes"
    assert plan(capsys, 0, run, "-n", "2", "--parallel.tensor", "2")[0] == both
    assert "needs" in plan(capsys, 64, run, "-n", "1", "--parallel.shard", "optimizer", "--memory", "1M")[1]
    said = plan(capsys, 64, run, "-n", "3", "--parallel.tensor", "2", "--memory", "64G")[1]
    assert "parallel.tensor is 2, and 3 ranks do not divide into groups of that size" in said
    few = ["--train.global_batch", "4"]
    plans, said = plan(capsys, 0, run, "-n", "8", "--parallel.tensor", "2", *few)
    assert plans == [(2, "none"), (4, "none")] and "train.global_batch is 4 but there are 8 ranks" in said
    assert "train.global_batch is 4 but there are 8 ranks" in plan(capsys, 64, run, "-n", "8", *few)[1]
    assert main(["plan", str(run), "-n", "64", *few]) == 64
    assert "train.global_batch is 4 but there are 64 ranks" in capsys.readouterr().err


def test_optimizers_that_cannot_be_sharded_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run.yaml"
    uses = "[NO_CUTS, COUPLED, NO_VALIDATION]"
    run.write_text(f"name: run\ntask: tests.support.combined_tasks:task\ntask_args: {{uses: {uses}}}\n" + STEPS)
    plans, said = plan(capsys, 0, run, "-n", "2")
    assert plans == [(1, "none")] and "Coupled updates a parameter by what it finds in others" in said
    plans, said = plan(capsys, 64, run, "-n", "2", "--parallel.shard", "optimizer")
    assert plans == [(1, "none")] and "Coupled updates a parameter" in said
    own = ["--task_args.uses", "[NO_CUTS, OWN_STEP, NO_VALIDATION]"]
    assert plan(capsys, 0, run, "-n", "2", *own)[0] == [(1, "none"), (1, "optimizer")]
    plans, said = plan(capsys, 0, run, "-n", "2", "--reduce.kind", "horovod")
    assert plans == [(1, "none")] and "gradients would travel by Horovod" in said


TASKS = """
import numpy as np, torch, hpctrain
import keras

data = {"x": np.zeros((8, 3), np.float32)}
def linear():
    model = torch.nn.Linear(3, 1)
    return hpctrain.TorchTask(model, lambda out, batch: out.mean(), torch.optim.SGD(model.parameters(), 0.1), data)
def of_keras():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    return hpctrain.KerasTask(model, lambda out, batch: out, keras.optimizers.SGD(0.1), data)
"""


def test_a_task_that_says_nothing_of_cuts_is_not_cut(tmp_path: Path) -> None:
    (tmp_path / "tasks.py").write_text(TASKS)
    (tmp_path / "run.yaml").write_text("name: r\ntask: tasks.py:linear\ntrain: {steps: 3, global_batch: 8}\n")
    told = hpctrain("plan", "run.yaml", "-n", 2, cwd=tmp_path)
    assert "parallel.tensor is 2, and the task does not say how its layers are cut" in told.stdout
    told = hpctrain("plan", "run.yaml", "-n", 2, "--task", "tasks.py:of_keras", cwd=tmp_path, code=64)
    assert "is a KerasTask, of which each rank has all" in told.stderr

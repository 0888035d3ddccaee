"""The run files of the scaling benchmark."""

from __future__ import annotations

import numpy as np
import pytest

from hpctrain.bench import scaling
from hpctrain.bench import scaling_runs as runs
from hpctrain.bench.scaling_runs import Shape, batches, jobs, shapes
from hpctrain.config.loading import load
from hpctrain.config.sections import Config, LaunchConfig, TrainConfig
from hpctrain.errors import ExitCode, UserError
from hpctrain.run.event_log import EventWriter
from hpctrain.run.events import RunFinished, Train
from hpctrain.run.folder import RunDir


def config(**launch: int) -> Config:
    train = TrainConfig(epochs=3, global_batch=32)
    return Config(name="r", task="wave.py:task", train=train, launch=LaunchConfig(**launch))  # type: ignore[arg-type]


def test_weak_scaling_keeps_a_ranks_batch_and_strong_scaling_the_global_one():
    assert batches(config(), "weak", [1, 2, 4]) == [32, 64, 128]
    assert batches(config(), "strong", [1, 2, 4]) == [32, 32, 32]
    each = Config(name="r", task="wave.py:task", train=TrainConfig(steps=1, batch_per_rank=8))
    assert batches(each, "weak", [2, 4]) == [16, 32]
    assert batches(each, "strong", [2, 4]) == [16, 16]


def test_batches_that_cannot_be_are_refused():
    with pytest.raises(UserError, match="3 ranks cannot share"):
        batches(config(), "weak", [3, 6])
    with pytest.raises(UserError, match="without a sample"):
        batches(config(), "strong", [1, 64])


def test_slurm_fills_nodes():
    assert shapes(config(ranks_per_node=4), [1, 4, 8], slurm=True) == [Shape(1, 1), Shape(1, 4), Shape(2, 4)]
    assert shapes(config(ranks_per_node=4), [1, 4, 8], slurm=False) == [Shape(1, 1), Shape(1, 4), Shape(1, 8)]
    with pytest.raises(UserError, match="6 ranks do not fill nodes of 4"):
        shapes(config(ranks_per_node=4), [6], slurm=True)


def test_sizes_take_turns_and_what_modes_share_is_run_once(tmp_path):
    made = jobs(config(), ["weak", "strong"], [Shape(1, 1), Shape(1, 2)], 60, 2, 1, tmp_path)
    one = ["ranks-1-batch-32-round-1", "ranks-2-batch-64-round-1", "ranks-2-batch-32-round-1"]
    assert [job.name for job in made] == one + [name.replace("round-1", "round-2") for name in one]
    train = made[1].config.train
    assert (train.steps, train.epochs, train.global_batch, train.threads) == (60, None, 64, 1)
    assert not made[1].config.checkpoint.enabled


def test_the_run_files_are_valid_and_another_measurement_is_not_overwritten(tmp_path):
    made = jobs(config(), ["weak"], [Shape(1, 1), Shape(1, 2)], 60, 1, 1, tmp_path)
    runs.write(made, tmp_path)
    for job in made:
        assert load(runs.run_file(job)) == job.config
    runs.write(made, tmp_path)
    other = jobs(config(), ["weak"], [Shape(1, 1), Shape(1, 2)], 90, 1, 1, tmp_path)
    with pytest.raises(UserError, match="another run file"):
        runs.write(other, tmp_path)


def test_what_is_done_is_read_and_not_run_again(tmp_path):
    [training] = jobs(config(), ["weak"], [Shape(1, 2)], 60, 1, 1, tmp_path)
    assert not runs.is_done(training)
    RunDir.of(training.config.name, training.config.run_dir).create()
    events = EventWriter(RunDir.of(training.config.name, training.config.run_dir).events, print)
    for number in range(1, 6):
        seconds = {"data": 0.5, "forward": 1.0, "backward": 2.0, "exchange": number, "callbacks": 0.25}
        events.append(Train(step=5 * number, steps=5, seconds=seconds))
    events.append(RunFinished(step=25, reason="completed", steps=25, seconds=1.0))
    runs.run_here([training])
    [timing] = runs.timings([training]).values()
    expected = np.array([[3.0, 3.0, 0.5, 0.25], [3.0, 4.0, 0.5, 0.25]]) / 5  # two warm up, the last one evaluates
    assert np.allclose(timing.parts, expected)


@pytest.mark.parametrize("words", ["", "1,x", "0,2", "-1"])
def test_ranks_that_are_no_numbers(words):
    with pytest.raises(UserError):
        scaling.parse_ranks(words)


def test_several_nodes_of_a_job_want_slurm(monkeypatch, tmp_path, cli):
    """``hpctrain run``, which would measure there, uses one machine."""
    for name, value in {"JOB_ID": "7", "JOB_NODELIST": "n[1-2]", "JOB_NUM_NODES": "2", "NTASKS": "4"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    (tmp_path / "run.yaml").write_text("name: r\ntask: wave.py:task\ntrain: {epochs: 3, global_batch: 32}\n")
    said = cli("bench", "scaling", tmp_path / "run.yaml", code=ExitCode.USER_ERROR).err
    assert "job 7 has n[1-2]" in said and "give --slurm" in said

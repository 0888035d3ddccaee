"""From a run file to objects: what cannot work together."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from hpctrain.comm.world import alone
from hpctrain.config.combinations import refuse
from hpctrain.config.sections import (
    CheckpointConfig,
    Config,
    EarlyStopConfig,
    ReduceConfig,
    SyncConfig,
    TrainConfig,
)
from hpctrain.data.formats.sources import open_dataset
from hpctrain.data.order import Order
from hpctrain.data.samples import Recipe
from hpctrain.errors import UserError
from hpctrain.rank import wiring
from hpctrain.rank.batches import make_validation
from hpctrain.rank.problem import (
    Loading,
    Problem,
    make_problem,
    open_training_data,
    open_validation,
    task_features,
    validation_sets,
)
from hpctrain.rank.wiring import require_watched
from hpctrain.reduce.candidates import Surroundings, candidates
from hpctrain.reduce.reducer_choice import ReducerChoice
from hpctrain.tasks.definition import TorchTask
from hpctrain.train.clock import NO_CLOCK
from hpctrain.train.schedule import validation_batch

PLAIN = Config(name="a", task="m:f", train=TrainConfig(steps=3, global_batch=2))
STOPPING = dataclasses.replace(PLAIN.train, early_stop=EarlyStopConfig(metric="loss"))


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"train": STOPPING}, "train.early_stop.metric"),
        ({"checkpoint": CheckpointConfig(best_metric="loss")}, "checkpoint.best_metric"),
    ],
)
def test_a_watched_metric_needs_validation_data(change, key):
    config = dataclasses.replace(PLAIN, **change)
    without, judged = (task_features(PLAIN.task, task_with(given), Order(2, 2), 1) for given in (None, ARRAYS))
    with pytest.raises(UserError, match=f"{key} is 'loss', but task m:f has no validation data"):
        refuse(config.features() | without)
    refuse(config.features() | judged)
    refuse(PLAIN.features() | without)


def task_with(validation: Any, **metrics: Any) -> TorchTask:
    return TorchTask(None, None, None, None, validation=validation, metrics=metrics)


ARRAYS = {"x": np.zeros((6, 2)), "y": [0, 1, 0, 1, 0, 1]}


@pytest.mark.parametrize(
    ("validation", "names"),
    [
        (None, []),
        (ARRAYS, ["validation"]),
        ("validation.h5", ["validation"]),
        (lambda: ARRAYS, ["validation"]),
        ({"dev": ARRAYS, "hard-2": "hard.h5"}, ["dev", "hard-2"]),
        ({"dev": lambda: ARRAYS, "hard": ["a.h5", "b.h5"]}, ["dev", "hard"]),
        ({"x": [[1, 2], [3, 4]]}, ["validation"]),
    ],
)
def test_validation_is_one_set_or_several_by_name(validation, names):
    assert list(validation_sets(task_with(validation))) == names


@pytest.mark.parametrize(
    ("validation", "said"),
    [
        ({"dev": ARRAYS, "a/b": ARRAYS}, "'a/b': ...} of the task cannot name"),
        ({"dev": ARRAYS, "auc": ARRAYS}, "'auc': ...} of the task cannot name"),
        ({"dev": ARRAYS, "loss": ARRAYS}, "'loss': ...} of the task cannot name"),
        ({"dev": ARRAYS, "y": np.zeros(3)}, "holds both sets of data and arrays, such as 'y'"),
    ],
)
def test_names_that_cannot_stand_before_metrics_are_refused(validation, said):
    with pytest.raises(UserError, match=said):
        validation_sets(task_with(validation, auc=len))


def test_the_first_sets_metrics_are_watched_by_their_plain_names():
    for metric, fits in (("loss", True), ("hard/loss", True), ("dev/loss", False)):
        config = dataclasses.replace(PLAIN, checkpoint=CheckpointConfig(best_metric=metric))
        if fits:
            require_watched(config.features(), ["dev", "hard"], task_with(ARRAYS))
            continue
        with pytest.raises(UserError, match=r"metrics of the first set .* have plain names") as caught:
            require_watched(config.features(), ["dev", "hard"], task_with(ARRAYS))
        assert caught.value.fix == "write checkpoint.best_metric: loss"


def test_a_watched_metric_that_the_task_lacks_is_refused_before_the_first_step():
    """It was after the first evaluation: an epoch was trained for nothing."""
    for metric in ("acc", "hard/acc", "acc/0", "loss", "hard/loss"):
        watching = dataclasses.replace(PLAIN, checkpoint=CheckpointConfig(best_metric=metric)).features()
        require_watched(watching, ["dev", "hard"], task_with(ARRAYS, acc=len))
    stopping = dataclasses.replace(PLAIN.train, early_stop=EarlyStopConfig(metric="acc"))
    for watching in (
        dataclasses.replace(PLAIN, checkpoint=CheckpointConfig(best_metric="acc")).features(),
        dataclasses.replace(PLAIN, train=stopping).features(),
    ):
        with pytest.raises(UserError, match="'acc', which the task does not report") as caught:
            require_watched(watching, ["dev", "hard"], task_with(ARRAYS, f1=len))
        assert caught.value.fix == "name one of f1, loss"


def test_validation_has_a_batch_of_its_own():
    own = TrainConfig(steps=3, global_batch=2, eval_batch_per_rank=4)
    for train, batches in ((own, 2), (PLAIN.train, 3)):
        loading = Loading(Recipe(), 1, validation_batch(train, 1), 2, 0)
        dataset = open_dataset(ARRAYS)
        problem = Problem(task_with(ARRAYS), dataset, {"validation": dataset}, Order(6, 2), loading)
        assert len(make_validation(problem, alone(), dataset, dict)) == batches


@pytest.mark.slow
def test_each_set_is_opened_and_one_that_is_a_stream_is_named(tmp_path):
    (tmp_path / "task.py").write_text(
        "import hpctrain, torch\n"
        "def task(stream):\n"
        "    model, data = torch.nn.Linear(1, 1), {'x': [[1.0], [2.0]], 'y': [[1.0], [2.0]]}\n"
        "    hard = hpctrain.open_stream([data]) if stream else data\n"
        "    optimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        "    return hpctrain.TorchTask(model, 'mse', optimizer, data, {'dev': data, 'hard': hard})\n"
    )
    config = dataclasses.replace(PLAIN, task=f"{tmp_path}/task.py:task", task_args={"stream": False})
    assert list(make_problem(config, alone()).validation) == ["dev", "hard"]
    with pytest.raises(UserError, match=r"the validation data 'hard' of the task is a stream"):
        make_problem(dataclasses.replace(config, task_args={"stream": True}), alone())


@pytest.mark.parametrize("compression", ["none", "fp16", "auto"])
def test_nothing_is_measured_while_nodes_train_apart(compression, monkeypatch):
    choices: list[ReducerChoice] = []
    monkeypatch.setattr(wiring, "open_framework", lambda *given: choices.append(given[-1]))
    monkeypatch.setattr(wiring, "LocalFramework", lambda *given: None)
    sync, reduce = SyncConfig(kind="local", within="node"), ReduceConfig(compression=compression)
    config = dataclasses.replace(PLAIN, sync=sync, reduce=reduce)
    wiring.make_local_framework(config, alone(), task_with(None), NO_CLOCK, wiring.KeptReducer())
    around = Surroundings(ranks=2, nodes=1, shared_memory=True, horovod=True, gpu=False)
    assert [len(candidates(each.config, around)) for each in choices] == [1]


@pytest.mark.parametrize(
    ("validation", "field"),
    [(np.zeros((0, 2)), "validation"), ({"hard": {"x": np.zeros((0, 2))}}, r"validation\['hard'\]")],
)
def test_what_is_wrong_with_data_names_the_field(validation, field):
    task = task_with({"x": validation} if field == "validation" else validation)
    (name, given), *_ = validation_sets(task).items()
    with pytest.raises(UserError, match=f"^{field} of the task: the dict of arrays holds no samples"):
        open_validation(task, name, given)
    with pytest.raises(UserError, match=r"^train of the task: the dict of arrays holds no samples"):
        open_training_data(dataclasses.replace(task, train={"x": np.zeros((0, 2))}))

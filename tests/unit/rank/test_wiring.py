"""From a run file to objects: what cannot work together."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from hpctrain.config.sections import CheckpointConfig, Config, EarlyStopConfig, TrainConfig
from hpctrain.data import Order, open_dataset
from hpctrain.errors import UserError
from hpctrain.rank.problem import Problem
from hpctrain.rank.wiring import refuse_metrics_of_nothing

PLAIN = Config(name="a", task="m:f", train=TrainConfig(steps=3, global_batch=2))
STOPPING = dataclasses.replace(PLAIN.train, early_stop=EarlyStopConfig(metric="loss"))


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"train": STOPPING}, "train.early_stop.metric"),
        ({"checkpoint": CheckpointConfig(best_metric="loss")}, "checkpoint.best_metric"),
    ],
)
def test_a_watched_metric_needs_validation_data(change: dict[str, Any], key: str) -> None:
    data = open_dataset({"x": [1.0, 2.0]})
    config = dataclasses.replace(PLAIN, **change)
    with pytest.raises(UserError, match=f"{key} is 'loss', but task m:f has no validation data"):
        refuse_metrics_of_nothing(config, Problem(None, data, None, Order(2, 2)))  # type: ignore[arg-type]
    refuse_metrics_of_nothing(config, Problem(None, data, data, Order(2, 2)))  # type: ignore[arg-type]
    refuse_metrics_of_nothing(PLAIN, Problem(None, data, None, Order(2, 2)))  # type: ignore[arg-type]

"""Metrics of Keras in a KerasTask: all of its own add up, and one that does not is refused."""

from __future__ import annotations

import inspect
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from hpctrain import Selected, UserError
from hpctrain.backends.keras.keras_meter import KerasMeter
from hpctrain.tasks.meters import entries_of
from hpctrain.train.metrics import Seen

ARGUMENTS: dict[str, dict[str, Any]] = {
    "MeanIoU": {"num_classes": 3},
    "IoU": {"num_classes": 3, "target_class_ids": [0]},
    "OneHotIoU": {"num_classes": 3, "target_class_ids": [0]},
    "OneHotMeanIoU": {"num_classes": 3},
    "PrecisionAtRecall": {"recall": 0.5},
    "RecallAtPrecision": {"precision": 0.5},
    "SensitivityAtSpecificity": {"specificity": 0.5},
    "SpecificityAtSensitivity": {"sensitivity": 0.5},
    "MeanMetricWrapper": {"fn": keras.losses.mean_squared_error},
}
NAMES = [name for name, value in vars(keras.metrics).items() if inspect.isclass(value) and name not in ("Metric",)]


def meter_of(metric: Any, name: str = "") -> KerasMeter:
    def select(outputs: Any, batch: Any) -> Any:
        if name in ("MeanIoU", "IoU"):
            return tf.argmax(outputs, 1), tf.argmax(batch["y"], 1)
        if name in ("Mean", "Sum"):
            return None, outputs
        return outputs, tf.argmax(batch["y"], 1) if "Sparse" in name else batch["y"]

    return KerasMeter(entries_of({"it": Selected(metric, select)})["it"])


def seen(samples: int, seed: int) -> Seen:
    random = np.random.default_rng(seed)
    outputs = random.random((samples, 3)).astype(np.float32)
    batch = {"y": np.eye(3, dtype=np.float32)[random.integers(0, 3, samples)]}
    tensors = {name: tf.convert_to_tensor(array) for name, array in batch.items()}
    return Seen(tf.convert_to_tensor(outputs / outputs.sum(1, keepdims=True)), tensors, batch, np.asarray)


@pytest.mark.parametrize("name", NAMES)
def test_kerass_own_metrics_over_ranks_say_what_one_says(name):
    def made():
        return meter_of(vars(keras.metrics)[name](**ARGUMENTS.get(name, {})), name)

    whole, *parts = made(), made(), made(), made()
    for each, part in zip((seen(7, 0), seen(12, 1)), parts[1:], strict=True):
        whole.update(each)
        part.update(each)
    merged = parts[0].merge(parts[0].merge(parts[0].state(), parts[1].state()), parts[2].state())  # one saw nothing
    np.testing.assert_allclose(parts[1].compute(merged), whole.compute(whole.state()), rtol=1e-5)


class Largest(keras.metrics.Metric):
    """Not a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = self.add_variable((), "zeros", name="largest")

    def update_state(self, targets: Any, outputs: Any) -> None:
        self.largest.assign(keras.ops.maximum(self.largest, keras.ops.max(outputs)))

    def result(self) -> Any:
        return self.largest


def test_a_metric_whose_variables_do_not_add_up_is_refused_by_name():
    with pytest.raises(UserError, match=r"metrics\['it'\] of the task, Largest, keeps 'largest', which is not a sum"):
        meter_of(Largest()).update(seen(4, 0))


def test_a_wrong_argument_names_the_metric():
    metric = Selected(keras.metrics.F1Score(), lambda outputs, batch: (outputs, tf.argmax(batch["y"], 1)))
    with pytest.raises(UserError, match=r"metrics\['it'\] fails: ValueError") as caught:
        KerasMeter(entries_of({"it": metric})["it"]).update(seen(4, 0))
    assert "y [4, 3]" in caught.value.fix

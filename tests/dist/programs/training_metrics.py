"""Prints, as JSON, what runs report of their training batches: python training_metrics.py KERAS_BACKEND RUN_FILE..."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["KERAS_BACKEND"] = sys.argv[1]

import hpctrain
from hpctrain.run.events import Event, Train


class Means:
    """Keeps what is reported of training."""

    def __init__(self) -> None:
        self.found: list[dict[str, Any]] = []

    def event(self, event: Event) -> None:
        if isinstance(event, Train):
            self.found.append({"loss": event.loss, **event.more})

    def close(self) -> None:
        """Nothing to close."""


class Weights(hpctrain.BaseHook):
    """Reads the weights at the end."""

    found = ""

    def after_fit(self, training: hpctrain.Training, reason: hpctrain.StopReason) -> None:
        self.found = training.framework.weights_hash()


if __name__ == "__main__":
    results: dict[str, Any] = {}
    for path in map(Path, sys.argv[2:]):
        means, weights = Means(), Weights()
        hpctrain.fit(hpctrain.load_config(path), hooks=[weights], sinks=[means])
        results[path.stem] = {"means": means.found, "hash": weights.found}
    if hpctrain.connect().rank == 0:
        print(json.dumps(results))

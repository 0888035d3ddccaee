"""A sweep of four runs by Ray Tune on this machine; prints the number of reports and the last metrics of each.

python ray_tune.py FOLDER RUN: the run as JSON. Runs with the smallest rates would never end, and are stopped early.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import ray
from ray import tune

import hpctrain

RATES = (1e-5, 1e-4, 1e-3, 5e-3)


def train(values: dict[str, Any], folder: Path, base: dict[str, Any]) -> None:
    """Trainable of Ray Tune."""
    lr = values["lr"]
    own = {
        "run_dir": str(folder / str(lr)),
        "task_args": {**base["task_args"], "lr": lr},
        "train": {**base["train"], "steps": 10**6 if lr < 1e-3 else 60},
    }
    result = hpctrain.ray.fit({**base, **own}, placement="packed", report=tune.report)
    assert result.finished and result.checkpoint == result.run_dir / "checkpoints" / "step-000000060"


def main(folder: Path, base: dict[str, Any]) -> None:
    ray.init(address="local", num_cpus=4, include_dashboard=False, object_store_memory=80_000_000, log_to_driver=False)
    tuner = tune.Tuner(
        tune.with_resources(tune.with_parameters(train, folder=folder, base=base), {"cpu": 0.1}),
        param_space={"lr": tune.grid_search(list(RATES))},
        tune_config=tune.TuneConfig(max_concurrent_trials=2),
        run_config=tune.RunConfig(
            storage_path=str(folder / "tune"), verbose=0, stop=lambda trial, result: result["config"]["lr"] < 1e-3
        ),
    )
    found = tuner.fit()
    assert not found.errors, found.errors
    print(
        json.dumps(
            {each.config["lr"]: [each.metrics["training_iteration"], each.metrics] for each in found}, default=str
        )
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))

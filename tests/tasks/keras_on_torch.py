"""Keras models trained by hpctrain and by Keras' own ``fit``, on Keras' PyTorch backend, where TensorFlow is missing.

Run with KERAS_BACKEND=torch: prints, as JSON, the largest relative difference of all variables by case; with a folder
as its argument, those of a model that was trained there and of what reads its files.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import numpy as np

BATCH, STEPS = 32, 6
"""Samples of a batch; batches of an epoch."""


class NoTensorFlow(Loader):
    """Fails imports of TensorFlow."""

    def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name == "tensorflow" else None

    def create_module(self, spec: ModuleSpec) -> None:
        raise ImportError(f"{spec.name} is not there")


sys.meta_path.insert(0, NoTensorFlow())  # type: ignore[arg-type]

import keras  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from keras import layers  # noqa: E402
from torch.distributed.device_mesh import DeviceMesh  # noqa: E402

from hpctrain import KerasTask, fit  # noqa: E402
from hpctrain.backends.torch.device import Compute  # noqa: E402
from hpctrain.backends.torch.keras.keras_adapter import on_torch  # noqa: E402
from hpctrain.backends.torch.strategies.fsdp.sharded_model import ShardGroups, shard_model  # noqa: E402
from hpctrain.backends.torch.strategies.partition import uncut  # noqa: E402
from hpctrain.checkpoint.initial import load_initial  # noqa: E402
from hpctrain.checkpoint.initial_match import WeightSource  # noqa: E402
from hpctrain.cli import main as command  # noqa: E402
from hpctrain.comm.world import alone  # noqa: E402
from hpctrain.config.sections import Config, DataConfig, ParallelConfig, ScheduleConfig, TrainConfig  # noqa: E402
from hpctrain.errors import UserError  # noqa: E402
from hpctrain.rank.problem import make_problem  # noqa: E402
from hpctrain.rank.wiring import make_framework, make_trainer  # noqa: E402
from hpctrain.train.clock import IntervalClock  # noqa: E402
from hpctrain.train.hooks import BaseHook  # noqa: E402
from hpctrain.train.stateful import value_of  # noqa: E402

Model = Callable[[], keras.Model]


def data() -> dict[str, Any]:
    """Samples of two inputs' arrays, a class, a number, and a weight."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(BATCH * STEPS, 8))
    return {"x": x, "y": x[:, :3].argmax(1), "z": x.sum(1, keepdims=True), "w": rng.uniform(0.5, 2, len(x))}


def classes() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((8,)),
            layers.Dense(16, "tanh", kernel_regularizer="l2"),
            layers.GaussianNoise(1e-30),  # has a seed, and changes no bit
            layers.GaussianNoise(1e-30),
            layers.BatchNormalization(),
            layers.ActivityRegularization(l2=1e-2),
            layers.Dense(3, "softmax", kernel_constraint=keras.constraints.MaxNorm(1.0)),
        ]
    )


def two_outputs() -> keras.Model:
    given = keras.Input((8,))
    hidden = layers.Dense(16, "tanh")(given)
    return keras.Model(given, {"kind": layers.Dense(3)(hidden), "size": layers.Dense(1)(hidden)})


class Subclassed(keras.Model):
    """Builds its layers on the first call, and counts its calls."""

    def build(self, shape: Any) -> None:
        self.inner = layers.Dense(16, "relu")
        self.outer = layers.Dense(3, "softmax")
        self.calls = self.add_weight(shape=(), initializer="zeros", dtype="int32", trainable=False, name="calls")

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        if training:
            self.calls.assign_add(1)
        return self.outer(self.inner(inputs))


def labelled(batch: Any) -> Any:
    return batch["x"], batch["y"]


def weighted(batch: Any) -> Any:
    return batch["x"], batch["y"], batch["w"]


def named(batch: Any) -> Any:
    return batch["x"], {"kind": batch["y"], "size": batch["z"]}


def decayed() -> Any:
    schedule = keras.optimizers.schedules.ExponentialDecay(1e-2, 2, 0.9)
    return keras.optimizers.AdamW(schedule, weight_decay=0.1, clipnorm=0.5)


SPARSE = {"loss": "sparse_categorical_crossentropy", "metrics": ["accuracy"]}
CASES: dict[str, tuple[Model, Any, Any, dict[str, Any]]] = {
    "schedule, clipnorm, decay": (classes, labelled, decayed, SPARSE),
    "momentum, average": (classes, labelled, lambda: keras.optimizers.SGD(0.1, 0.9, use_ema=True), SPARSE),
    "global norm": (classes, labelled, lambda: keras.optimizers.RMSprop(1e-3, global_clipnorm=0.1), SPARSE),
    "nadam": (classes, labelled, lambda: keras.optimizers.Nadam(1e-2), SPARSE),
    "adafactor": (classes, labelled, lambda: keras.optimizers.Adafactor(1e-2), SPARSE),
    "accumulates": (classes, labelled, lambda: keras.optimizers.Adam(1e-2, gradient_accumulation_steps=2), SPARSE),
    "sample weights": (classes, weighted, lambda: keras.optimizers.Adam(1e-2), SPARSE),
    "subclass": (Subclassed, labelled, lambda: keras.optimizers.Adam(1e-2), SPARSE),
    "two outputs": (
        two_outputs,
        named,
        lambda: keras.optimizers.Lion(1e-3),
        {
            "loss": {"kind": keras.losses.SparseCategoricalCrossentropy(from_logits=True), "size": "mse"},
            "loss_weights": {"kind": 1.0, "size": 0.3},
            "metrics": {"size": ["mae"]},
        },
    ),
}


def compiled(case: str) -> tuple[keras.Model, Any]:
    """A new compiled model with equal weights each time, and its ``fit_data``."""
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(0)
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    make, fit_data, optimizer, settings = CASES[case]
    model, own = make(), optimizer()
    own.exclude_from_weight_decay(var_list=model.trainable_variables[:1], var_names=["bias"])
    model.compile(optimizer=own, **settings)
    return model, fit_data


def task(case: str) -> KerasTask:
    """The task of a case."""
    model, fit_data = compiled(case)
    return KerasTask(model=model, fit_data=fit_data, train=data(), validation=data())


def mixed() -> KerasTask:
    """A task whose layers compute in the precision of the run."""
    keras.config.set_floatx("float32")
    model, samples = keras.Sequential([keras.Input((8,)), layers.Dense(1)]), data()
    return KerasTask(model, "mse", keras.optimizers.SGD(0.1), {"x": samples["x"], "y": samples["z"]})


def by_hpctrain(case: str, **settings: Any) -> tuple[keras.Model, dict[str, float]]:
    """The model after two epochs, and its metrics; with other settings of the run file."""
    own = TrainConfig(epochs=2, global_batch=BATCH, **settings)
    name = "tests.tasks.keras_on_torch:task"
    config = Config(name="test", task=name, task_args={"case": case}, train=own, data=DataConfig(shuffle="none"))
    problem, world, clock = make_problem(config, alone()), alone(), IntervalClock()
    framework = make_framework(config, world, problem.task, clock)
    trainer = make_trainer(config, world, problem, framework, clock, [])
    metrics = trainer.fit().metrics
    scores = [one.func for one in problem.task.metrics.values() if isinstance(one, functools.partial)]
    assert [one.seen[0] for one in scores] == [0] * len(scores), "outputs of the last batch are free"
    model = problem.task.model.hidden[0]
    if model.optimizer.use_ema:  # fit ends with the averages
        model.optimizer.finalize_variable_values(model.trainable_variables)
    return model, {} if model.optimizer.use_ema else dict(metrics)


def by_keras(case: str) -> tuple[keras.Model, dict[str, float]]:
    """The same by ``fit``."""
    model, fit_data = compiled(case)
    given = fit_data(data())
    model.fit(*given[:2], sample_weight=(*given, None)[2], batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
    return model, model.evaluate(*given[:2], sample_weight=(*given, None)[2], verbose=0, return_dict=True)


def difference(first: keras.Model, second: keras.Model) -> float:
    """Largest difference of two models' weights, statistics and counters."""
    pairs = zip(first.weights, second.weights, strict=True)
    return max(float(np.abs(one.numpy() - other.numpy()).max()) for one, other in pairs)


def files(folder: Path) -> dict[str, float]:
    """Differences of outputs between a trained run and models from its exported files."""
    own, rates = TrainConfig(steps=3, global_batch=BATCH, ema_decay=0.5), ScheduleConfig(warmup_steps=2)
    name, case = "tests.tasks.keras_on_torch:task", {"case": "sample weights"}
    config = Config(name="run", task=name, task_args=case, train=own, schedule=rates)
    trained = fit(replace(config, run_dir=str(folder / "run")), hooks=[end := End()])
    assert trained.step == 3
    whole, weights = str(folder / "out.keras"), str(folder / "out.weights.h5")
    for output in (whole, weights):
        assert command(["ckpt", "export", str(folder / "run"), "--no-ema", "-o", output]) == 0
    framework = make_framework(config, alone(), make_problem(config, alone()).task, IntervalClock())
    match, _ = load_initial(WeightSource(weights), framework)
    state = {one.name: value_of(one) for one in framework.state()}
    averages = [
        np.abs(state[f"ema/{name}"] - state[f"model/{name}"]).max() for name in ("dense/kernel", "dense_1/bias")
    ]
    models = {"whole": keras.saving.load_model(whole), "initial": framework.keras_model}
    outputs = {name: model(data()["x"]).detach().numpy() for name, model in models.items()}
    found = {
        **{name: float(np.abs(one - end.outputs).max()) for name, one in outputs.items()},
        "averages": float(max(averages)),
        "left": len(match.missing + match.unexpected),
    }
    half = TrainConfig(steps=1, global_batch=BATCH, precision="bf16")
    name, run = "tests.tasks.keras_on_torch:mixed", str(folder / "half")
    fit(Config(name="half", task=name, train=half, run_dir=run))
    return found | {"half": command(["ckpt", "export", run, "-o", str(folder / "half.weights.h5")])}


class End(BaseHook):
    """Keeps the outputs at the end of a run."""

    outputs: Any = None

    def after_fit(self, training: Any, reason: Any) -> None:
        self.outputs = training.framework.keras_model(data()["x"]).detach().numpy()


def require_refusals() -> None:
    """Asserts what is said of an optimizer of PyTorch, and of a model without a weight to train."""
    given = task("sample weights")
    own = torch.optim.Adam(given.model.parameters())
    given.model.trainable = False
    for optimizer, what in ((own, "is a torch.optim.adam.Adam"), (keras.optimizers.Adam(), "no weight to train")):
        try:
            on_torch(replace(given, optimizer=optimizer), "fp32", data)
        except UserError as error:
            assert what in error.what, error.what
        else:
            raise AssertionError(f"not refused: {what}")


def require_gathered() -> None:
    """Asserts that a state dict is loaded, and that a weight outside its layer, which is freed, is an error."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    given = keras.Input((8,))
    layer = layers.Dense(8)
    model = keras.Model(given, layers.Dense(8)(layer(given)))
    own = on_torch(KerasTask(model, "mse", keras.optimizers.Adam(), data()), "fp32", data)
    own.model.load_state_dict(own.model.state_dict())
    groups = ShardGroups(alone().data, alone().data, 0, 1, DeviceMesh("cpu", [0]))
    shard_model(own.model, uncut(), groups, Compute(torch.device("cpu")), ParallelConfig(shard="parameters"))
    batch = {"x": torch.from_numpy(data()["x"])}
    try:
        own.model(batch, lambda model, batch: model(batch["x"]) @ layer.kernel.value)
    except RuntimeError as error:
        assert "DTensor" in str(error), error
    else:
        raise AssertionError("not refused")


def require_apart() -> None:
    """Asserts that a Keras model that forward finds by another name is not saved a second time."""
    name, case, own = (
        "tests.tasks.keras_on_torch:task",
        {"case": "sample weights"},
        TrainConfig(steps=1, global_batch=BATCH),
    )
    config = Config(name="test", task=name, task_args=case, train=own)
    given = make_problem(config, alone()).task
    model = given.model.hidden[0]
    given = replace(given, forward=lambda module, batch: module(batch, lambda *_: model(batch["x"])))
    framework = make_framework(config, alone(), given, IntervalClock())
    assert framework.source.task_state.modules_of_functions() == []


def main() -> None:
    """Prints what all cases give."""
    if sys.argv[1:] and Path(sys.argv[1]).is_dir():
        print(json.dumps(files(Path(sys.argv[1]))))
        return
    require_refusals()
    require_gathered()
    require_apart()
    found: dict[str, Any] = {}
    for case in sys.argv[1:] or CASES:
        (ours, our_metrics), (theirs, metrics) = by_hpctrain(case), by_keras(case)
        found[case] = {
            "weights": difference(ours, theirs),
            "metrics": {name: abs(our_metrics[name] - value) for name, value in metrics.items() if name in our_metrics},
            "names": sorted(our_metrics),
        }
    print(json.dumps(found))


if __name__ == "__main__":
    main()

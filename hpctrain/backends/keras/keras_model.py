"""What both backends read of a Keras model and its optimizers: own steps, names of variables, rates, modes."""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import keras
import numpy as np

from hpctrain.config.features import Feature, used
from hpctrain.errors import UserError
from hpctrain.tasks.definition import KerasTask
from hpctrain.train.hooks import rate_hook
from hpctrain.train.walk_objects import reached

POLICIES = {"fp32": "float32", "bf16": "mixed_bfloat16", "fp16": "mixed_float16"}
"""Keras dtype policy of each precision."""


def begin_keras(seed: int, precision: str) -> None:
    """Sets seed, names and precision before a task is made.

    Automatic names are reset, so that a second model in the process gets the same names as the first.
    """
    keras.utils.clear_session(free_memory=False)
    if "tensorflow" in sys.modules:  # or this would import it, which takes seconds; Python, NumPy and torch are seeded
        keras.utils.set_random_seed(seed % 2**32)
    keras.config.set_dtype_policy(POLICIES[precision])


def trains_itself(model: Any) -> bool:
    """Whether a model's class overrides a Keras step or a part of it; it is then trained by its own steps."""
    kind = type(model)
    return isinstance(model, keras.Model) and (
        kind.train_step is not keras.Model.train_step
        or kind.test_step is not keras.Model.test_step
        or kind.compute_loss is not keras.Model.compute_loss
        or kind.compute_metrics is not keras.Model.compute_metrics
    )


def evaluates_itself(model: keras.Model) -> bool:
    """Whether evaluations use the model's ``test_step``: a custom one, or Keras' if the model has a loss for it."""
    kind = type(model)
    if kind.test_step is not keras.Model.test_step:
        return True
    return trains_itself(model) and (
        model._compile_loss is not None or kind.compute_loss is not keras.Model.compute_loss
    )


def lacks_weights(model: keras.Model) -> bool:
    """Whether a layer, or a loss or metric of ``compile``, is not built, or a custom step may have to build it.

    ``model.built`` is not sufficient: ``build(shape)`` alone also sets it.
    """
    compiled = [model._compile_loss, model._compile_metrics] if isinstance(model, keras.Model) else []
    waiting = [one for one in [*model._flatten_layers(), *compiled] if one is not None and not one.built]
    return trains_itself(model) or bool(waiting)


class InMode(keras.Layer):
    """Calls a function as an outer layer would, so that every layer called in it gets ``training``."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__(dtype="float32", autocast=False)
        self.function = function

    def call(self, batch: Any, training: bool | None = None) -> Any:
        """Calls the function on the batch."""
        return self.function(batch)

    def _open_name_scope(self) -> contextlib.AbstractContextManager[None]:
        """Opens no scope, so that weights created inside have the same paths as without this layer."""
        return contextlib.nullcontext()


def optimizers_in(optimizer: Any) -> dict[str, keras.optimizers.Optimizer]:
    """Optimizers in an optimizer or a dict of them, including itself, by path; inner ones first."""

    def is_end(value: Any) -> bool:
        return isinstance(value, (keras.Variable, keras.Layer, keras.Metric, np.ndarray)) or keras.ops.is_tensor(value)

    places = list(reached(optimizer, is_end))
    return {path: value for path, value in reversed(places) if isinstance(value, keras.optimizers.Optimizer)}


def own_learning_rate(optimizer: keras.optimizers.Optimizer) -> float | None:
    """The optimizer's learning rate, or None if a Keras schedule, or a function, sets it."""
    is_fixed = isinstance(optimizer._learning_rate, keras.Variable)
    return float(optimizer.learning_rate) if is_fixed else None


def slots_of(optimizer: keras.optimizers.Optimizer, weights: Sequence[str]) -> list[tuple[keras.Variable, str, str]]:
    """(variable, slot, weight) of a built optimizer; (variable, name, "") for variables of no weight.

    Keras prefixes slot names with the path of the weight. Where all have the same name (Adafactor), the slot is the
    attribute in which the optimizer keeps one variable per weight.

    Args:
        optimizer: the built optimizer.
        weights: flat paths of its weights.
    """
    named = [(one, *slot_of(one.path, weights)) for one in optimizer.variables]
    count = Counter(slot for _, slot, weight in named if not weight)
    updated = optimizer._trainable_variables
    kept: dict[int, tuple[str, str]] = {}
    for name, value in vars(optimizer).items():
        if isinstance(value, list) and len(value) == len(updated):
            kept |= {id(one): (name.strip("_"), flat(weight.path)) for one, weight in zip(value, updated, strict=True)}
    found = []
    for one, slot, weight in named:
        if not weight and count[slot] > 1:
            slot, weight = kept.get(id(one), (slot, weight))
        found.append((one, slot, weight))
    return found


def slot_of(path: str, weights: Sequence[str]) -> tuple[str, str]:
    """Parses a path such as ``adam/model_dense_kernel_momentum`` into (slot, weight)."""
    own = path.split("/", 1)[-1]
    weight = max((each for each in weights if own.startswith(f"{each}_")), key=len, default="")
    return (own[len(weight) + 1 :], weight) if weight else (own, "")


def flat(path: str) -> str:
    """A weight's path in the form that optimizers use in slot names."""
    return path.replace("/", "_")


def path_in(model: keras.Model, variable: keras.Variable) -> str:
    """Path of a variable without the model's name, which Keras prepends to only some paths."""
    return str(variable.path).removeprefix(f"{model.name}/")


def is_seed(variable: keras.Variable) -> bool:
    """Whether a variable is the state of a keras.random.SeedGenerator."""
    return bool(variable.name == "seed_generator_state")


def optimizer_features(task: KerasTask, policy: str) -> dict[Feature, Any]:
    """Features of a task's optimizers, and of the precision of its layers.

    Args:
        task: the task, completed from its model.
        policy: dtype policy of layers that compute in the run's precision.

    Raises:
        UserError: the model computes in 16 bits, and the run in 32.
    """
    low = {name: key for key, name in POLICIES.items()}.get(task.model.dtype_policy.name, "fp32")
    if policy == POLICIES["fp32"] and low != "fp32":
        raise UserError(
            f"the dtype policy of the Keras model is {POLICIES[low]}, and train.precision is fp32",
            f"set train.precision: {low}, or leave keras.config.set_dtype_policy out",
        )
    optimizers = list(optimizers_in(task.optimizer).values())
    own = trains_itself(task.model)
    scaled = any(
        isinstance(one, keras.optimizers.LossScaleOptimizer) for one in (optimizers if own else [task.optimizer])
    )
    # its own step multiplies the loss by the factor by which the optimizer divides gradients
    scaled |= not own and any(one.loss_scale_factor for one in optimizers)
    follows = policy in {layer.dtype_policy.name for layer in task.model._flatten_layers()}
    given = {
        Feature.KERAS_SCHEDULE: any(own_learning_rate(one) is None for one in optimizers),
        Feature.LOSS_SCALE: scaled,
        Feature.OWN_PRECISION: not follows and "no layer of the Keras model computes in it",
        Feature.RATE_HOOK: rate_hook(task.hooks),
        Feature.TASK_SCHEDULE: task.schedule is not None,
    }
    return used(given)


def named_variables(model: keras.Model) -> Iterator[tuple[str, keras.Variable, bool]]:
    """(name, variable, whether it is a weight) of all that a model has, trained weights first.

    Names are ``model/<path>``, or ``rng/<path>`` for states of seed generators. A weight is trained or frozen; what
    else there is, the forward pass changes: BatchNorm statistics, counters, seeds.
    """
    frozen = {id(variable) for layer in model._flatten_layers() for variable in layer._trainable_variables}
    for variable in model.trainable_variables:
        yield f"model/{path_in(model, variable)}", variable, True
    for variable in model.non_trainable_variables:
        group = "rng" if is_seed(variable) else "model"
        yield f"{group}/{path_in(model, variable)}", variable, id(variable) in frozen
    yield from ((f"model/rnn_state/{index}", one, False) for index, one in enumerate(recurrent_states(model)))


def recurrent_states(model: keras.Model) -> list[keras.Variable]:
    """What layers with ``stateful=True`` carry from batch to batch, which Keras does not list as variables."""
    states = [getattr(layer, "states", None) for layer in model._flatten_layers() if getattr(layer, "stateful", False)]
    found = {id(one): one for one in keras.tree.flatten(states) if isinstance(one, keras.Variable)}
    return list(found.values())  # each once: Bidirectional has those of its layers, too


def save_keras(model: keras.Model, path: Path) -> None:
    """Writes a file for ``model.load_weights``, or for ``keras.saving.load_model`` if the path ends in ``.keras``.

    Raises:
        UserError: Keras cannot save the whole model.
        OSError: the file cannot be written.
    """
    model.built = True  # Keras does not count a model without ``call`` as built
    if path.suffix != ".keras":
        model.save_weights(path)
        return
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and not optimizer.built:
        optimizer.build(model.trainable_variables)  # otherwise loading warns of missing state
    try:
        model.save(path)
    except (NotImplementedError, TypeError, ValueError) as error:
        raise UserError(
            f"Keras cannot save {type(model).__name__} as a whole: {str(error).strip().splitlines()[0]}",
            "give its class a get_config, or export to a .weights.h5 file",
        ) from error


T = TypeVar("T")


def through_file(model: keras.Model, change: Callable[[Path], T]) -> T:
    """Saves a model's weights to a ``.weights.h5`` file, lets ``change`` edit it in place, and loads it.

    Returns what ``change`` returned.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "own.weights.h5"
        model.save_weights(path)
        found = change(path)
        model.load_weights(path)
    return found

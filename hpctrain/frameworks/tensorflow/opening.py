"""From a KerasTask to a framework: what it uses is checked, variables get names, and ranks the same model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from hpctrain.comm.world import World
from hpctrain.config.combinations import Feature, refuse, used
from hpctrain.config.sections import Config
from hpctrain.errors import UserError
from hpctrain.frameworks.named_state import require_same_model
from hpctrain.frameworks.tensorflow.compiled import holders
from hpctrain.frameworks.tensorflow.framework import KerasFramework, Named, ReadyTask, own_learning_rate
from hpctrain.frameworks.tensorflow.holdings import Holdings, optimizers_in
from hpctrain.frameworks.tensorflow.overrides import evaluates_itself, trains_itself
from hpctrain.frameworks.tensorflow.runtime import POLICIES, require_own_gpu
from hpctrain.frameworks.tensorflow.sharding import share_out
from hpctrain.frameworks.tensorflow.sparse import sparse_variables
from hpctrain.frameworks.tensorflow.state import OwnSlots, require_different_names
from hpctrain.frameworks.tensorflow.sync_batchnorm import SyncBatchNorm, joint_layers
from hpctrain.parallel.tensorflow_sharded import ShardedReducers
from hpctrain.reduce.reducer_choice import ReducerChoice
from hpctrain.reduce.tensorflow_reducer import KerasReducers, Reducer, broadcast
from hpctrain.reduce.tensorflow_sparse import Gradients
from hpctrain.tasks.definition import KerasTask, kept_objects
from hpctrain.train.clock import StepClock
from hpctrain.train.hooks import rate_hook


def open_keras(
    task: KerasTask, world: World, config: Config, clock: StepClock, choice: ReducerChoice
) -> KerasFramework:
    """A framework whose model and optimizer are equal on all ranks; noise is each rank's own. Collective.

    Args:
        task: its model has weights.
        world: the ranks.
        config: of the run.
        clock: marks where the time of a step goes.
        choice: how the reducer is chosen.

    Raises:
        UserError: Keras runs on another backend, TensorFlow began before this rank had chosen its GPU, the ranks'
            models differ, or the reducer that the configuration names cannot be used.
    """
    require_trainable(task)
    layers = joint_layers(task.model, config.train.sync_batchnorm)
    features = config.features() | model_features(task, POLICIES[config.train.precision], layers, world.data.size)
    refuse(features)
    joint = SyncBatchNorm(layers, world.data, clock) if layers and world.data.size > 1 else None
    require_own_gpu(world.local_size)
    variables = task.model.trainable_variables
    own = trains_itself(task.model)
    shards = Feature.SHARD in features and world.data.size > 1
    none = own or shards
    sparse = [] if none else sparse_variables(variables, task.model, task.optimizer, config, world.data.size)
    travelling = Gradients(variables, sparse, world.data)
    reducers: KerasReducers | ShardedReducers = KerasReducers(travelling.pieces)
    reducer: Reducer | None = None
    slots: OwnSlots | None = None
    if shards:
        sharded, slots = share_out(task.optimizer, variables, travelling.pieces, world.data, features)
        reducers = ShardedReducers(sharded)
        reducer = choice.known(reducers)
    elif not own:
        reducer = choice.known(reducers)
        task.optimizer.build(variables)
    noise = tf.random.get_global_generator()
    apart = [one.value for one in kept_objects(task)]
    parts = [one.value for one in sharded.updated] if shards else []
    held = Holdings(task.optimizer, holders(task), task.model, [noise.state, *parts], apart, slots)
    named = Named(task.model, held, noise, joint.variables if joint else ())
    tensors = named.tensors()
    require_different_names(tensors)
    if shards and any(tensor.name.startswith("held/optimizer/") for tensor in tensors):
        refuse(features | {Feature.OWN_OPTIMIZER_STATE: type(task.optimizer).__name__})
    everywhere = [tensor for tensor in tensors if tensor.cut is None]
    described = [(tensor.name, tensor.shape, tensor.dtype) for tensor in everywhere]
    require_same_model(world.data, described, "variables")
    broadcast(world.data, [tensor.variable for tensor in everywhere], "receive the model")
    averaged = variables if config.train.ema_decay is not None else []
    averages = [tf.Variable(tf.cast(variable.value, tf.float32)) for variable in averaged]
    ready = ReadyTask(task, named, averages, travelling, reducers, reducer, joint)
    framework = KerasFramework(ready, world, config, clock, choice)
    framework.reseed(0)
    return framework


def require_trainable(task: KerasTask) -> None:
    """Raises UserError if a model cannot be trained."""
    if keras.backend.backend() != "tensorflow":
        raise UserError(
            f"Keras runs on {keras.backend.backend()}, but Keras tasks train on TensorFlow",
            "set KERAS_BACKEND=tensorflow in the environment of the run, or leave it out",
        )
    if not trains_itself(task.model) and not task.model.built:
        raise UserError("the Keras model has no weights yet", "begin it with keras.Input(shape), or call it on a batch")
    if not task.model.trainable_variables:
        raise UserError("the Keras model has no weight to train", "leave some layers trainable")


def model_features(
    task: KerasTask, policy: str, layers: Sequence[keras.layers.Layer], ranks: int
) -> dict[Feature, Any]:
    """What a task's model and optimizer use.

    Args:
        task: with what its model brings along.
        policy: of layers that compute in the run's precision.
        layers: that normalise over all ranks.
        ranks: that the model is trained on.
    """
    model, trains, tests = task.model, trains_itself(task.model), evaluates_itself(task.model)
    optimizers = list(optimizers_in(task.optimizer).values())
    policies = {layer.dtype_policy.name for layer in model._flatten_layers()}
    scaled = [isinstance(one, keras.optimizers.LossScaleOptimizer) for one in (task.optimizer, *optimizers)]
    given = {
        Feature.BUILT_OPTIMIZER: any(one.built for one in optimizers) and type(optimizers[-1]).__name__,
        Feature.FP32_MODEL: policy not in policies,
        Feature.GLOBAL_CLIPNORM: next((type(one).__name__ for one in optimizers if one.global_clipnorm), None),
        Feature.JOINT_LAYERS: next((layer.path for layer in layers), None),
        Feature.KERAS: True,
        Feature.KERAS_SCHEDULE: any(own_learning_rate(one) is None for one in optimizers),
        Feature.LOSS_SCALE: any(scaled if trains else scaled[:1]),
        Feature.METRICS: bool(task.metrics),
        Feature.OWN_OPTIMIZER_STATE: not trains and len(optimizers) > 1 and type(task.optimizer).__name__,
        Feature.NO_JUDGE: task.loss is None and not tests,
        Feature.RANKS: ranks > 1 and ranks,
        Feature.RATE_HOOK: rate_hook(task.hooks),
        Feature.TASK_SCHEDULE: task.schedule is not None,
        Feature.TEST_STEP: tests,
        Feature.TRAIN_STEP: trains and type(model).__name__,
        Feature.VALIDATION: task.validation is not None,
    }
    return used(given)

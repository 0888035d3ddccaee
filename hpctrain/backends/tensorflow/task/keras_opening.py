"""Opens a KerasTask as a framework: checks its features, names its variables and makes the ranks' models equal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from hpctrain.backends.joint_statistics import BatchNorms
from hpctrain.backends.keras.keras_compiled import holders
from hpctrain.backends.keras.keras_meter import KerasMeter
from hpctrain.backends.keras.keras_model import POLICIES, evaluates_itself, optimizer_features, trains_itself
from hpctrain.backends.named_state import require_same_model
from hpctrain.backends.tensorflow.keras_framework import KerasEvaluator, KerasFramework
from hpctrain.backends.tensorflow.keras_reducer import KerasReducerFactory, broadcast
from hpctrain.backends.tensorflow.runtime import require_own_gpu
from hpctrain.backends.tensorflow.sparse_sums import Gradients, sparse_variables
from hpctrain.backends.tensorflow.state.keras_state import KerasState, Named, Rates
from hpctrain.backends.tensorflow.state.keras_tensors import require_different_names
from hpctrain.backends.tensorflow.steps.keras_own_step import TrainStepProgram
from hpctrain.backends.tensorflow.steps.loss_step import LossProgram
from hpctrain.backends.tensorflow.steps.passes import KerasOptimizerStep, KerasPasses, KerasStepContext, WeightUpdate
from hpctrain.backends.tensorflow.task.keras_sync_batchnorm import KerasSyncBatchNorm, joint_layers
from hpctrain.backends.tensorflow.task.keras_task_state import KerasLeaves, KerasTaskState
from hpctrain.backends.update import rule_of
from hpctrain.comm.world import World
from hpctrain.config.combinations import refuse
from hpctrain.config.features import Feature, used
from hpctrain.errors import UserError
from hpctrain.reduce.reducer_choice import ChosenReducer, ReducerChoice
from hpctrain.tasks.definition import KerasTask, kept_objects
from hpctrain.tasks.meters import KerasMetric, copy_of_metric, meters_of
from hpctrain.train.clock import StepClock
from hpctrain.train.framework import StepSettings
from hpctrain.train.stateful import Kept


def open_keras(
    task: KerasTask, world: World, config: StepSettings, clock: StepClock, choice: ReducerChoice
) -> KerasFramework:
    """Opens a framework whose model and optimizer are equal on all ranks; random state is per rank. Collective.

    Args:
        task: the task, whose model has been built.
        world: the ranks.
        config: settings of an update.
        clock: records the time of each phase.
        choice: chooses the reducer.

    Raises:
        UserError: Keras runs on another backend, TensorFlow was initialized before this rank chose its GPU, the ranks'
            models differ, or the configured reducer cannot be used.
    """
    require_trainable(task)
    if config.train.matmul is not None:
        tf.config.experimental.enable_tensor_float_32_execution(config.train.matmul == "tf32")
    layers = joint_layers(task.model, config.train.sync_batchnorm)
    refuse(config.features() | model_features(task, POLICIES[config.train.precision], layers))
    joint = KerasSyncBatchNorm(layers, world.data, clock) if layers and world.data.size > 1 else None
    require_own_gpu(world.local_size)
    context = KerasStepContext(task, world, config, clock, choice)
    packing = packing_of(context)
    noise = tf.random.get_global_generator()
    objects = kept_objects(task)
    apart = [one.value for one in objects]
    held = KerasTaskState(task.optimizer, holders(task), task.model, [noise.state], apart)
    named = Named(task.model, held, noise, joint.variables if joint else ())
    tensors = named.tensors()
    require_different_names(tensors)
    described = [(tensor.name, tensor.shape, tensor.dtype) for tensor in tensors]
    require_same_model(world.everyone, described, "variables")
    broadcast(world.everyone, [tensor.value for tensor in tensors], "receive the model")
    framework = assembled(context, packing, named, joint, objects)
    framework.reseed(0)
    return framework


def packing_of(context: KerasStepContext) -> Gradients:
    """How gradients are packed; builds the optimizer of a model without its own ``train_step``."""
    task = context.task
    data = context.world.data
    variables = context.variables
    if trains_itself(task.model):
        return Gradients(variables, [], data)
    task.optimizer.build(variables)
    sparse = sparse_variables(variables, task.model, task.optimizer, context.config, data.size)
    return Gradients(variables, sparse, data)


def assembled(
    context: KerasStepContext,
    packing: Gradients,
    named: Named,
    joint: KerasSyncBatchNorm | None,
    objects: Sequence[Kept],
) -> KerasFramework:
    """Assembles the framework of a model that is equal on all ranks. Collective."""
    task = context.task
    config = context.config
    group = context.world.data
    train, batch_norms = config.train, joint or BatchNorms()
    averaged = context.variables if train.ema_decay is not None else []
    averages = [tf.Variable(tf.cast(variable.value, tf.float32)) for variable in averaged]
    rule = rule_of(train)
    leaves = KerasLeaves()
    rates = Rates(task)
    factory = KerasReducerFactory(packing.pieces)
    reducer = None if trains_itself(task.model) else context.choice.known(factory)
    source = KerasState(named, averages, rule.loss_scale, rates, batch_norms, objects, leaves, group, config.seed)
    passes = KerasPasses(task, packing, config.reduce.sparse, train.compile, averages, joint, train.metrics)
    is_tried = trains_itself(task.model) and evaluates_itself(task.model)
    evaluator = KerasEvaluator(task, passes, meters_of(task.metrics, KerasMetric, "Keras", KerasMeter), is_tried)
    program: LossProgram | TrainStepProgram
    weight_update = WeightUpdate(train, averages)
    if trains_itself(task.model):
        program = TrainStepProgram(context, passes, weight_update, source.unchanged)
    else:
        optimizer_step = KerasOptimizerStep(task.optimizer, context.variables, packing, weight_update)
        reducers = ChosenReducer(factory, context.choice, source.unchanged, reducer)
        own = {name: copy_of_metric(metric) for name, metric in task.metrics.items() if name in train.metrics}
        meters = meters_of(own, KerasMetric, "Keras", KerasMeter)
        program = LossProgram(context, passes, reducers, optimizer_step, rule, batch_norms, meters)
    return KerasFramework(task, program, evaluator, source)


def require_trainable(task: KerasTask) -> None:
    """Raises UserError if a model cannot be trained."""
    if keras.backend.backend() != "tensorflow":
        raise UserError(
            f"Keras runs on {keras.backend.backend()}, but Keras tasks train on PyTorch or TensorFlow",
            "set KERAS_BACKEND to torch or tensorflow in the environment of the run, or leave it out",
        )
    if not trains_itself(task.model) and not task.model.built:
        raise UserError("the Keras model has no weights yet", "begin it with keras.Input(shape), or call it on a batch")
    if not task.model.trainable_variables:
        raise UserError("the Keras model has no weight to train", "leave some layers trainable")


def model_features(task: KerasTask, policy: str, layers: Sequence[keras.layers.Layer]) -> dict[Feature, Any]:
    """Features that a task's model and optimizer use.

    Args:
        task: the task, completed from its model.
        policy: dtype policy of layers that compute in the run's precision.
        layers: layers that normalise over all ranks.
    """
    model = task.model
    trains = trains_itself(task.model)
    tests = evaluates_itself(task.model)
    given = {
        Feature.JOINT_LAYERS: next((layer.path for layer in layers), None),
        Feature.KERAS: True,
        Feature.METRICS: bool(task.metrics),
        Feature.NO_EVAL_LOSS: task.loss is None and not tests,
        Feature.TEST_STEP: tests,
        Feature.TRAIN_STEP: trains and type(model).__name__,
        Feature.VALIDATION: task.validation is not None,
    }
    return used(given) | optimizer_features(task, policy)

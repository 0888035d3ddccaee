"""Steps of Keras models with each way of exchanging gradients, in turns, on the ranks that run this program."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import socket
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers
from numpy.typing import NDArray

from hpctrain.bench.ranks import write_rows
from hpctrain.bench.step import TABLES, Row, parser_of_ranks, rows
from hpctrain.bench.turns import Contender, take_turns
from hpctrain.comm.world import World, alone, connect
from hpctrain.config.sections import Config, ParallelConfig, ReduceConfig, TrainConfig
from hpctrain.frameworks.tensorflow.opening import open_keras
from hpctrain.frameworks.tensorflow.runtime import choose_gpu, set_environment
from hpctrain.reduce.candidates import Candidate
from hpctrain.reduce.reducer_choice import ReducerChoice
from hpctrain.tasks.definition import KerasTask
from hpctrain.train.clock import IntervalClock


def mlp() -> keras.Model:
    """784-2048-2048-10: 5.8 M parameters."""
    return keras.Sequential(
        [
            keras.Input((784,)),
            layers.Dense(2048, activation="relu"),
            layers.Dense(2048, activation="relu"),
            layers.Dense(10),
        ]
    )


def conv() -> keras.Model:
    """Four blocks of convolution, BatchNorm and ReLU; 0.4 M parameters."""
    model = keras.Sequential([keras.Input((32, 32, 3))])
    for stride, width in ((1, 32), (2, 64), (2, 128), (2, 256)):
        model.add(layers.Conv2D(width, 3, strides=stride, padding="same", use_bias=False))
        model.add(layers.BatchNormalization())
        model.add(layers.ReLU())
    model.add(layers.GlobalAveragePooling2D())
    model.add(layers.Dense(10))
    return model


def gpt() -> keras.Model:
    """Six blocks of width 256 over 64 steps, four heads: 4.9 M parameters."""
    inputs = keras.Input((64, 64))
    hidden = layers.Dense(256)(inputs)
    for _ in range(6):
        normal = layers.LayerNormalization()(hidden)
        hidden += layers.MultiHeadAttention(4, 64)(normal, normal, use_causal_mask=True)
        wide = layers.Dense(1024, activation="gelu")(layers.LayerNormalization()(hidden))
        hidden += layers.Dense(256)(wide)
    return keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling1D()(hidden)))


def lstm() -> keras.Model:
    """Two layers of 256 over 32 steps; 0.9 M parameters."""
    return keras.Sequential(
        [keras.Input((32, 64)), layers.LSTM(256, return_sequences=True), layers.LSTM(256), layers.Dense(10)]
    )


def small() -> keras.Model:
    """100 layers of width 32: 0.1 M parameters in 204 tensors."""
    inputs = keras.Input((32,))
    hidden = inputs
    for _ in range(100):
        hidden = layers.Dense(32, activation="tanh")(hidden)
    return keras.Model(inputs, layers.Dense(10)(hidden))


def wide() -> keras.Model:
    """256-4096-4096-10: 17.9 M parameters."""
    return keras.Sequential(
        [
            keras.Input((256,)),
            layers.Dense(4096, activation="relu"),
            layers.Dense(4096, activation="relu"),
            layers.Dense(10),
        ]
    )


def tables() -> keras.Model:
    """A table of 500,000 x 16, eight rows of which make a sample, and two layers."""
    return keras.Sequential(
        [
            keras.Input((8,), dtype="int64"),
            layers.Embedding(ROWS, 16),
            layers.GlobalAveragePooling1D(),
            layers.Dense(64, activation="relu"),
            layers.Dense(10),
        ]
    )


ROWS = 500_000
MODELS: dict[str, tuple[Callable[[], keras.Model], tuple[int, ...]]] = {
    "gpt": (gpt, (4, 64, 64)),
    "mlp": (mlp, (64, 784)),
    "conv": (conv, (16, 32, 32, 3)),
    "lstm": (lstm, (32, 32, 64)),
    "small": (small, (64, 32)),
    "wide": (wide, (64, 256)),
    **dict.fromkeys(TABLES, (tables, (512, 8))),
}
"""Each model, and the shape of one rank's batch."""
OPTIMIZERS: dict[str, Callable[[], keras.optimizers.Optimizer]] = {
    "tables-sgd": lambda: keras.optimizers.SGD(1e-3),
    "tables-adagrad": lambda: keras.optimizers.Adagrad(1e-3),
    "tables-adam": lambda: keras.optimizers.Adam(1e-3),
}
"""Of the others it is SGD with momentum."""


def cross_entropy(outputs: tf.Tensor, batch: Any) -> tf.Tensor:
    """Mean over the samples."""
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(batch["label"], outputs))


@dataclass(frozen=True)
class BenchModel:
    """A model on this rank's samples."""

    model: keras.Model
    optimizer: keras.optimizers.Optimizer
    batch: dict[str, NDArray[Any]]


def make_model(name: str, world: World) -> BenchModel:
    """The same weights on every rank, other samples."""
    keras.utils.set_random_seed(0)
    make, shape = MODELS[name]
    random = np.random.default_rng(1 + world.rank)
    inputs: NDArray[Any] = random.normal(size=shape).astype(np.float32)
    if name in TABLES:
        inputs = random.integers(0, ROWS, shape)
    optimizer = OPTIMIZERS.get(name, lambda: keras.optimizers.SGD(1e-3, momentum=0.9))()
    return BenchModel(make(), optimizer, {"input": inputs, "label": random.integers(0, 10, shape[0])})


class Ours:
    """hpctrain's own step, as the training loop calls it."""

    def __init__(
        self, problem: BenchModel, world: World, reduce: ReduceConfig, chosen: str | None, shard: bool = False
    ) -> None:
        task = KerasTask(problem.model, cross_entropy, problem.optimizer, None)
        samples = len(problem.batch["label"]) * world.size
        train = TrainConfig(steps=1, global_batch=samples)
        parallel = ParallelConfig(shard="optimizer" if shard else "none")
        config = Config(name="bench", task="bench:step", train=train, parallel=parallel, reduce=reduce)
        self.batch, self.samples = problem.batch, samples
        self.framework = open_keras(task, world, config, IntervalClock(), ReducerChoice(reduce, world, chosen))
        self.weights_hash, self.close = self.framework.weights_hash, self.framework.close

    def step(self) -> None:
        self.framework.step([self.batch], self.samples)


class Plain:
    """One function for all of a step, as the documentation of Keras shows it, around another's exchange."""

    def __init__(
        self,
        problem: BenchModel,
        tape_of: Callable[[tf.GradientTape], Any] = lambda tape: tape,
        run: Callable[..., Any] = lambda function, *args: function(*args),
        close: Callable[[], None] = lambda: None,
    ) -> None:
        self.model = problem.model
        batch = {name: tf.constant(value) for name, value in problem.batch.items()}
        variables = problem.model.trainable_variables
        problem.optimizer.build(variables)

        def update(batch: Any) -> tf.Tensor:
            with tf.GradientTape() as recorded:
                loss = cross_entropy(problem.model(batch["input"], training=True), batch)
            tape = tape_of(recorded)
            problem.optimizer.apply(tape.gradient(loss, [variable.value for variable in variables]), variables)
            return loss

        self.function = tf.function(lambda: run(update, batch))
        self.close = close

    def step(self) -> None:
        self.function()

    def weights_hash(self) -> str:
        return hashlib.sha256(b"".join(np.asarray(v).tobytes() for v in self.model.trainable_variables)).hexdigest()


def plain_horovod(problem: BenchModel) -> Plain:
    """Horovod's DistributedGradientTape at its defaults."""
    import horovod.tensorflow as hvd

    os.environ["HOROVOD_CYCLE_TIME"] = "1"  # its default; an earlier start in this process may have set another
    hvd.init()
    return Plain(problem, tape_of=hvd.DistributedGradientTape, close=hvd.shutdown)


def workers(world: World) -> tf.distribute.Strategy:
    """TensorFlow's MultiWorkerMirroredStrategy over the ranks; it must exist before anything else uses TensorFlow."""
    free = socket.create_server(("127.0.0.1", 0))
    ports = world.everyone.allgather(free.getsockname()[1], "find the workers")
    free.close()
    cluster = {"worker": [f"127.0.0.1:{port}" for port in ports]}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": {"type": "worker", "index": world.rank}})
    return tf.distribute.MultiWorkerMirroredStrategy()


def mirrored(strategy: Any, model: str, world: World) -> Plain:
    """The plain step under a strategy: Keras' optimizers sum gradients over its replicas."""
    with strategy.scope():
        return Plain(make_model(model, world), run=lambda function, *args: strategy.run(function, args=args))


class Choices:
    """Makes contenders by name; what ``auto`` chose for a model is kept for its later turns."""

    def __init__(self, world: World, compression: str, strategy: tf.distribute.Strategy | None) -> None:
        self.world, self.compression, self.strategy = world, compression, strategy
        self.chosen: dict[str, str | None] = {}

    def make(self, model: str, contender: str) -> Contender:
        """A contender with a fresh model."""
        os.environ.pop("HOROVOD_CYCLE_TIME", None)
        if contender == "mwms":
            return mirrored(self.strategy, model, self.world)
        problem = make_model(model, self.world)
        if contender == "plain":
            return Plain(problem)
        if contender == "horovod-plain":
            return plain_horovod(problem)
        if contender == "none":
            return Ours(problem, alone(), ReduceConfig(), None)
        if contender == "auto":
            config = ReduceConfig(kind="auto", compression=self.compression)  # type: ignore[arg-type]
            ours = Ours(problem, self.world, config, self.chosen.get(model))
            ours.step()
            self.chosen[model] = ours.framework.reducer_name
            return ours
        if contender == "sharded":
            return Ours(problem, self.world, ReduceConfig(), None, shard=True)
        if contender == "densify":
            return Ours(problem, self.world, ReduceConfig(kind="mpi", sparse="densify"), None)
        if contender in ("mpi", "horovod"):
            return Ours(problem, self.world, ReduceConfig(kind=contender), None)  # type: ignore[arg-type]
        return Ours(problem, self.world, ReduceConfig(), Candidate.parse(contender).name)


def main() -> None:
    """Rank 0 writes the rows."""
    args = parser_of_ranks().parse_args()
    set_environment(threads=None)
    world = connect()
    choose_gpu(world.local_rank)
    contenders = args.contenders.split(",")
    choices = Choices(world, args.compression, workers(world) if "mwms" in contenders else None)
    found: list[Row] = []
    for model in args.models.split(","):
        make = functools.partial(choices.make, model)
        times, equal = take_turns(contenders, make, args.rounds, args.steps, world.data)
        found += rows("tensorflow", model, times, equal, choices.chosen.get(model))
    if world.rank == 0:
        write_rows(args.out, [asdict(row) for row in found])


if __name__ == "__main__":
    main()

"""A script for horovodrun or mpirun that does not use hpctrain: a Keras 3 model in a loop with Horovod's tape."""

import sys

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

hvd.init()
keras.utils.set_random_seed(hvd.rank())  # the broadcast makes them equal
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(1)])
optimizer = keras.optimizers.SGD(0.05 * hvd.size(), momentum=0.9)
points = np.random.default_rng(1).normal(size=(16, 4)).astype("float32")[hvd.rank() :: hvd.size()]
data = tf.data.Dataset.from_tensor_slices((points, points.sum(1))).batch(4)


@tf.function
def training_step(inputs: tf.Tensor, targets: tf.Tensor) -> tf.Tensor:
    """Update once; return this rank's loss."""
    with tf.GradientTape() as plain:
        loss = tf.reduce_mean((model(inputs, training=True)[:, 0] - targets) ** 2)
    variables = [variable.value for variable in model.trainable_variables]
    gradients = hvd.DistributedGradientTape(plain).gradient(loss, variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    return loss


for variable in model.variables:
    variable.assign(hvd.broadcast(variable.value, root_rank=0))
for epoch in range(int(sys.argv[1]) if len(sys.argv) > 1 else 5):
    losses = [training_step(inputs, targets) for inputs, targets in data]
    mean = hvd.allreduce(losses[-1], name="mean of the losses")
    if hvd.rank() == 0:
        print(f"epoch {epoch} loss {float(mean)!r}", flush=True)
hvd.shutdown()

"""A custom Keras loop on MPI ranks: python own_loop_keras.py, or mpirun -n 4 python -m mpi4py own_loop_keras.py."""

import keras
import tensorflow as tf

from hpctrain import KerasGradients, ReduceConfig, connect, keras_broadcast, keras_reducer

BATCH, STEPS = 64, 200  # BATCH: samples per step over all ranks

world = connect()
keras.utils.set_random_seed(0)
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(64, activation="tanh"), keras.layers.Dense(1)])
optimizer = keras.optimizers.Adam(1e-2)
weights = model.trainable_variables
keras_broadcast(world.data, [weight.value for weight in weights], "receive the weights")
pieces = KerasGradients(weights)
points = tf.random.uniform((4096, 2), -2, 2)
values = tf.sin(points[:, :1] * points[:, 1:])


@tf.function
def gradients(mine):  # of this rank's share of the mean loss over the whole batch
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum((model(tf.gather(points, mine)) - tf.gather(values, mine)) ** 2) / BATCH
    return pieces.pack(tape.gradient(loss, [weight.value for weight in weights]), loss)


samples = [(tf.range(BATCH) + step * BATCH)[world.rank :: world.size] % len(points) for step in range(STEPS)]
reducer = keras_reducer(ReduceConfig(), world, pieces, rehearse=lambda reducer: reducer.sum(gradients(samples[0])))


@tf.function
def update(mine):
    sums = reducer.sum(gradients(mine))
    optimizer.apply(pieces.unpack(sums), weights)
    return pieces.mean_loss(sums)


for step in range(STEPS):
    loss = update(samples[step])
if world.rank == 0:
    print(f"{world.size} ranks, reducer {reducer.name}: loss {loss.numpy():.6f}")
reducer.close()

"""TensorFlow's process-wide settings, each in a process of its own."""

from __future__ import annotations

import functools
import os
import subprocess
import sys

import pytest

from tests.support.command import hpctrain, write_run

PREFIX = "from hpctrain.tasks.tf_environment import *; from hpctrain.backends.tensorflow.runtime import *; import os\n"


def run(program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A program in a fresh process, without the settings of this one."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("TF_", "KERAS_", "OMP_"))}
    return subprocess.run(
        [sys.executable, "-c", PREFIX + program], env=clean | environment, capture_output=True, text=True, timeout=120
    )


@functools.cache
def begun() -> list[str]:
    """What a task's process prints, whose standard error must have nothing but the program's own line."""
    ended = run(
        "import time\n"
        "set_environment(1)\n"
        "with without_chatter():\n"
        "    import keras, tensorflow as tf\n"
        "    os.write(2, b'mine\\n')\n"
        "begin_task(3)\n"
        "from tensorflow.python.eager import context\n"
        "print(context.context()._context_handle)\n"
        "for precision in ('fp32', 'bf16'):\n"
        "    begin_task(3, precision)\n"
        "    layer = keras.layers.Dense(2); layer.build((None, 2))\n"
        "    print(layer.name, layer.compute_dtype, float(keras.ops.sum(layer.kernel)))\n"
        "x = tf.random.normal((1500, 1500))\n"
        "wall, cpu = time.perf_counter(), time.process_time()\n"
        "for _ in range(5): x = tf.tanh(x @ x)\n"
        "x.numpy()\n"
        "print((time.process_time() - cpu) / (time.perf_counter() - wall))\n"
    )
    assert (ended.returncode, ended.stderr) == (0, "mine\n"), "start-up chatter is dropped, and all else is shown"
    return ended.stdout.splitlines()


def test_an_error_inside_is_shown():
    ended = run("with without_chatter():\n    os.write(2, b'before\\n')\n    raise KeyError('mine')\n")
    assert ended.returncode == 1
    assert ended.stderr.startswith("before\n") and "KeyError: 'mine'" in ended.stderr


@pytest.mark.slow
def test_verbose_leaves_everything(tmp_path):
    run_file = write_run(tmp_path, task="hpctrain.tasks.tensorflow_digits:task", train={"steps": 1, "global_batch": 8})
    speaks = {"TF_CPP_MIN_LOG_LEVEL": "0", "TF_ENABLE_ONEDNN_OPTS": "1"}  # by itself it does on some processors only
    assert "oneDNN" in hpctrain("train", run_file, "--verbose", cwd=tmp_path, env=speaks).stderr


def test_threads_come_from_the_run_file_or_the_launcher():
    show = "print(os.environ.get('TF_NUM_INTRAOP_THREADS'), os.environ.get('TF_NUM_INTEROP_THREADS'))\n"
    assert run("set_environment(3)\n" + show, OMP_NUM_THREADS="2").stdout == "3 1\n"
    assert run("set_environment(None)\n" + show, OMP_NUM_THREADS="2").stdout == "2 1\n"
    assert run("set_environment(None)\n" + show).stdout == "None None\n"


@pytest.mark.slow
def test_one_compute_thread_is_one():
    assert float(begun()[3]) < 1.3


@pytest.mark.slow
def test_a_task_gets_the_seed_and_precision_and_the_same_names_again_and_tensorflow_is_not_used_for_that():
    unused, first, second = map(str.split, begun()[:3])
    assert unused == ["None"]
    assert first[:2] == ["dense", "float32"] and second[:2] == ["dense", "bfloat16"]
    assert first[2] == second[2]


def test_memory_of_gpus_is_taken_as_it_is_needed_unless_the_user_says_otherwise():
    show = "set_environment(None)\nprint(os.environ['TF_FORCE_GPU_ALLOW_GROWTH'])\n"
    assert run(show).stdout == "true\n"
    assert run(show, TF_FORCE_GPU_ALLOW_GROWTH="false").stdout == "false\n"


GPUS = """
with without_chatter():
    import tensorflow as tf
from types import SimpleNamespace as N
tf.config.list_physical_devices = lambda kind: [N(name=f"{kind}:{n}", device_type=kind) for n in range(4)]
chosen = []
tf.config.set_visible_devices = lambda device, kind: chosen.append(device.name)
"""


@pytest.mark.slow
def test_each_rank_chooses_a_gpu_before_tensorflow_begins_or_is_refused_where_ranks_would_share_one():
    ended = run(
        GPUS + "begin_task(3, local_rank=1)\nbegin_task(3, local_rank=6)\nprint(*chosen)\n"
        "def refuse(device, kind):\n    raise RuntimeError('Visible devices cannot be modified')\n"
        "tf.config.set_visible_devices = refuse\n"
        "begin_task(3, local_rank=1)\n"
        "tf.config.list_logical_devices = tf.config.list_physical_devices\n"
        "require_own_gpu(1)\n"
        "print('one rank may see them all')\n"
        "require_own_gpu(2)\n"
    )
    assert ended.stdout == "GPU:1 GPU:2\none rank may see them all\n", ended.stderr
    assert "UserError: TensorFlow was used before this rank could choose one of the 4 GPUs that it sees" in ended.stderr
    assert "make tensors, layers and optimizers in the task function" in ended.stderr


def test_nothing_is_loaded_for_tasks_of_others():
    ended = run(
        "import sys\nset_environment(1)\nbegin_task(3)\nprint('keras' in sys.modules, 'tensorflow' in sys.modules)\n"
    )
    assert ended.stdout == "False False\n"


@pytest.mark.slow
def test_keras_on_torch_is_seeded_as_by_itself_without_tensorflow_whose_backend_refuses_it():
    ended = run(
        "import keras, sys\n"
        "from hpctrain.rank.problem import seed_task\n"
        "def drawn():\n"
        "    layer = keras.layers.Dense(2); layer.build((None, 2))\n"
        "    return float(keras.ops.sum(layer.kernel)), float(keras.random.uniform(()))\n"
        "seed_task(3, 'fp32', 0)\n"
        "mine = drawn()\n"
        "print('tensorflow' in sys.modules)\n"
        "sys.modules['tensorflow'] = None\n"
        "keras.utils.clear_session()\n"
        "keras.utils.set_random_seed(3)\n"
        "print(mine == drawn())\n"
        "del sys.modules['tensorflow']\n"
        "from types import SimpleNamespace as N\n"
        "from hpctrain.backends.tensorflow.task.keras_opening import require_trainable\n"
        "require_trainable(N())\n",
        KERAS_BACKEND="torch",
    )
    assert ended.stdout == "False\nTrue\n", ended.stderr
    assert "UserError: Keras runs on torch, but Keras tasks train on PyTorch or TensorFlow" in ended.stderr

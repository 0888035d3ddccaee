"""Worker processes: the same samples as without, and no death, error or signal goes unnoticed."""

import errno
import functools
import importlib.util
import os
import signal
import subprocess
import sys
import threading
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from hpctrain.data.dataset import Field
from hpctrain.data.formats.sources import open_dataset
from hpctrain.data.order import Order
from hpctrain.data.pipeline import Batch, TrainingData
from hpctrain.data.samples import Recipe
from hpctrain.data.worker_pool import IN_WORKER
from hpctrain.errors import Code, RunFailed, UserError, code_of
from tests.support.command import gone, wait_for

pytestmark = pytest.mark.slow

LENGTH = 53
DATASET = open_dataset({"x": np.random.default_rng(0).normal(size=(LENGTH, 4)), "y": np.arange(LENGTH)})
ORDER = Order(LENGTH, 12, 1)


def noise(sample, rng):
    return {"x": sample["x"] + rng.normal(size=4), "y": sample["y"], "worker": os.getpid()}


def fail(sample, rng):
    if sample["y"] == 17:
        raise ValueError("odd angle")
    return sample


def fill_disk(sample, rng):
    raise OSError(errno.ENOSPC, "no room")


def lose_server(sample, rng):
    raise OSError(errno.ESTALE, "no server")


def die(sample, rng):
    if sample["y"] == 17:
        os.kill(os.getpid(), signal.SIGKILL)
    return sample


def leave(sample, rng):
    os._exit(3)


def widen(sample, rng):
    return {"x": rng.normal(size=1000)}


class Scale:
    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, sample, rng):
        return {"x": sample["x"] * self.factor}

    @staticmethod
    def negate(sample, rng):
        return {"x": -sample["x"]}


def add(sample, rng, number, *, names):
    return {name: sample[name] + number for name in names}


def add_three(name):
    """A partial with attributes of its own, which CPython does not merge with one around it."""
    return functools.update_wrapper(functools.partial(add, number=3, names=[name]), add)


def drawn():
    """Data that depends on more than arguments."""
    return {"x": np.random.permutation(LENGTH)}


def ignore_words(sample, rng, words):
    return sample


class Squares:
    """A dataset of the user's own."""

    def __init__(self, length: int) -> None:
        self.fields = {"x": Field((), np.dtype(np.int64))}
        self.length = length

    def __len__(self) -> int:
        return self.length

    def read(self, indices):
        return {"x": indices**2}

    def fingerprint(self) -> str:
        return str(self.length)


def take(number, workers, transform=noise, size=2, rank=0, dataset=DATASET) -> list[Batch]:
    data = TrainingData(dataset, ORDER, rank, size, 2, workers=workers, recipe=Recipe(transform))
    try:
        return list(islice(data.starting_at(0, 4), number))
    finally:
        data.close()


@pytest.mark.parametrize("workers", [1, 3])
def test_results_do_not_depend_on_workers(workers):
    alone, helped = take(14, 0), take(14, workers)
    for one, other in zip(alone, helped, strict=True):
        assert (one.epoch, one.index, one.ends_epoch) == (other.epoch, other.index, other.ends_epoch)
        for mine, theirs in zip(one.micro_batches, other.micro_batches, strict=True):
            assert np.array_equal(mine["x"], theirs["x"]) and np.array_equal(mine["y"], theirs["y"])
    pids = {int(pid) for batch in helped for piece in batch.micro_batches for pid in piece["worker"]}
    assert len(pids) == workers and os.getpid() not in pids
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.parametrize(
    "transform",
    [
        functools.partial(add, number=3, names=["x"]),
        functools.partial(add_three("y"), names=["x"]),
        Scale.negate,
    ],
)
def test_a_transform_may_have_arguments_or_stand_in_a_class(transform):
    for one, other in zip(take(3, 0, transform), take(3, 1, transform), strict=True):
        for mine, theirs in zip(one.micro_batches, other.micro_batches, strict=True):
            assert mine.keys() == {"x"} and np.array_equal(mine["x"], theirs["x"])


def test_data_may_be_made_by_a_function(tmp_path):
    """Of the user's own kind, or of several files, whatever is in them."""
    data = open_dataset(functools.partial(Squares, LENGTH))
    for batch in take(2, 1, None, dataset=data):
        assert np.array_equal(np.concatenate([piece["x"] for piece in batch.micro_batches]), batch.sample_ids**2)


def test_data_that_a_worker_makes_differently_is_refused():
    np.random.seed(0)  # as a task may, which workers do not run
    with pytest.raises(UserError, match="a worker process reads other data than the rank") as caught:
        take(1, 1, None, dataset=open_dataset(drawn))
    assert "seed a Generator inside it" in caught.value.fix


def test_a_rank_without_samples_gets_empty_parts():
    batches = take(10, 2, size=30, rank=29)
    assert all(batch.micro_batches == () and batch.global_samples for batch in batches)


def test_files_are_read_by_the_workers(tmp_path):
    import h5py

    values = np.arange(LENGTH * 3.0).reshape(LENGTH, 3)
    for name, part in (("a.h5", slice(0, 20)), ("b.h5", slice(20, LENGTH))):
        with h5py.File(tmp_path / name, "w") as file:
            file.create_dataset("x", data=values[part], chunks=(8, 3), compression="gzip")
            file["y"] = np.arange(LENGTH)[part]
    for batch in take(8, 2, transform=None, dataset=open_dataset(tmp_path / "*.h5", fields=["x"])):
        assert [list(piece) for piece in batch.micro_batches] == [["x"]] * len(batch.micro_batches)
        assert np.array_equal(np.concatenate([piece["x"] for piece in batch.micro_batches]), values[batch.sample_ids])


def test_results_may_outgrow_the_first():
    """The first batch is the small last one of an epoch."""
    for one, other in zip(take(12, 0, widen), take(12, 1, widen), strict=True):
        for mine, theirs in zip(one.micro_batches, other.micro_batches, strict=True):
            assert np.array_equal(mine["x"], theirs["x"])


def test_an_error_names_the_sample():
    with pytest.raises(
        UserError, match=r"sample 17 in epoch \d: ValueError: odd angle \(test_worker_pool.py:\d+ in fail"
    ):
        take(20, 2, fail)


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_of_a_worker_is_of_the_kind_of_the_same_error_of_the_rank(workers):
    with pytest.raises(UserError, match="no room") as caught:
        take(20, workers, fill_disk)
    assert code_of(caught.value) is Code.DISK_FULL
    with pytest.raises(RunFailed, match="no server"):  # not the user's mistake: the run is started again
        take(20, workers, lose_server)


@pytest.mark.parametrize(("transform", "how"), [(die, "was killed by SIGKILL"), (leave, "ended with exit code 3")])
def test_a_death_is_reported(transform, how):
    with pytest.raises(RunFailed, match=rf"data worker \d \(process \d+\) {how} while it made samples \[\d+, "):
        take(20, 2, transform)


LONG_SET_UP = functools.partial(ignore_words, words=["word"] * 200_000)
"""More than a socket's buffer holds."""


def test_a_death_before_the_set_up_is_read_is_reported(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(RunFailed, match=r"data worker 0 \(process \d+\) ended with exit code 1 while it started"):
        take(1, 1, LONG_SET_UP)


def test_workers_start_side_by_side(tmp_path, monkeypatch):
    """Each of two ends unless the other has been started, too, before either reads its set-up."""
    os.mkfifo(tmp_path / "meet")
    meet = f"mkdir {tmp_path}/first 2> /dev/null && wait='cat meet' || wait='echo > meet'"
    wait = f'(cd {tmp_path} && timeout 120 sh -c "$wait" > /dev/null) || exit 7'
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\n{meet}\n{wait}\nexec {sys.executable} "$@"\n')
    python.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(python))
    assert len(take(3, 2, LONG_SET_UP)) == 3


def test_signals_to_all_processes_do_not_end_workers():
    data = TrainingData(DATASET, ORDER, 0, 1, workers=1, recipe=Recipe(noise))
    batches = data.starting_at(0, 0)
    worker = int(next(batches).micro_batches[0]["worker"][0])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        os.kill(worker, number)
    assert len(list(islice(batches, 10))) == 10
    data.close()


@pytest.mark.parametrize(
    ("transform", "why"),
    [
        (lambda sample, rng: sample, "not at the top level of a module"),
        (Scale(2.0), "not at the top level of a module"),
        (Scale(2.0).__call__, "not at the top level of a module"),
        (functools.partial(add, number=np.ones(4), names=["x"]), "arguments that are not plain values"),
        (functools.partial(add, number=3, names=("x",)), "arguments that are not plain values"),
    ],
)
def test_a_transform_that_a_worker_could_not_make_is_refused(transform, why):
    with pytest.raises(UserError, match=f"cannot be sent to worker processes: the transform .*{why}") as caught:
        take(1, 1, transform)
    assert "functools.partial" in caught.value.fix


def test_an_object_is_made_again_in_each_worker():
    alone, helped = (take(2, workers, None, dataset=Squares(LENGTH)) for workers in (0, 1))
    for one, other in zip(alone, helped, strict=True):
        assert [piece["x"].tolist() for piece in one.micro_batches] == [
            piece["x"].tolist() for piece in other.micro_batches
        ]


def test_data_that_a_worker_could_not_open_is_refused():
    squares = Squares(LENGTH)
    squares.lock = threading.Lock()  # type: ignore[attr-defined]
    what = "cannot be sent to worker processes: the data is an object of Squares, and its lock is _thread.lock"
    with pytest.raises(UserError, match=what):
        take(1, 1, None, dataset=squares)


def test_a_worker_starts_no_workers(monkeypatch):
    monkeypatch.setenv(IN_WORKER, "1")
    with pytest.raises(UserError, match="tried to start data workers: it"):
        take(1, 1)


PROGRAM = """
import os, sys
import numpy as np
from hpctrain.data.formats.sources import open_dataset
from hpctrain.data.order import Order
from hpctrain.data.pipeline import TrainingData
from hpctrain.data.samples import Recipe

def double(sample, rng):
    return {"x": sample["x"] * 2, "rank": "OMPI_COMM_WORLD_RANK" in os.environ}

if __name__ == "__main__":
    order = Order(10, 10, shuffle="none")
    data = TrainingData(open_dataset({"x": np.arange(10)}), order, 0, 1, workers=1, recipe=Recipe(double))
    batch = next(data.starting_at(0, 0))
    print(batch.micro_batches[0]["x"].tolist(), batch.micro_batches[0]["rank"].any(), flush=True)
    if sys.argv[1:] == ["die"]:
        print(data.pool.workers[0].process.pid, flush=True)
        os.kill(os.getpid(), 9)
    data.close()
"""


def run_program(tmp_path: Path, *args: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "my program.py").write_text(PROGRAM)
    root = str(Path(__file__).parents[3])
    environment = {**os.environ, "PYTHONPATH": root, "OMPI_COMM_WORLD_RANK": "0"}
    command = [sys.executable, str(tmp_path / "my program.py"), *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)


def test_a_transform_may_stand_in_the_main_program(tmp_path):
    """And the worker does not take itself for a rank."""
    done = run_program(tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[0, 2, 4, 6, 8, 10, 12, 14, 16, 18] False\n"
    assert not done.stderr


@pytest.mark.parametrize("name", ["pkg", "pkg.train"])
def test_a_transform_may_stand_in_a_main_program_within_a_package(tmp_path, name):
    """``python -m``: it may import its neighbours."""
    package = tmp_path / "pkg"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "neighbour.py").write_text("FACTOR = 2\n")
    program = "from .neighbour import FACTOR\n" + PROGRAM.replace("* 2", "* FACTOR")
    (package / ("__main__.py" if name == "pkg" else "train.py")).write_text(program)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    command = [sys.executable, "-m", name]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[0, 2, 4, 6, 8, 10, 12, 14, 16, 18] False\n"


def test_a_transform_may_stand_in_a_file_that_is_named_as_a_known_module_is(tmp_path, monkeypatch):
    """As in a task's file, ``task: path/queue.py:task``."""
    (tmp_path / "queue.py").write_text("def double(sample, rng):\n    return {'x': 2 * sample['x']}\n")
    spec = importlib.util.spec_from_file_location("queue", tmp_path / "queue.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "queue", module)
    spec.loader.exec_module(module)
    for batch in take(2, 1, module.double):
        values = np.concatenate([piece["x"] for piece in batch.micro_batches])
        assert np.array_equal(values, 2 * DATASET.arrays["x"][batch.sample_ids])


def test_workers_end_with_their_parent(tmp_path):
    done = run_program(tmp_path, "die")
    assert done.returncode == -signal.SIGKILL
    worker = int(done.stdout.splitlines()[-1])
    wait_for("the worker's end", lambda: gone(worker))

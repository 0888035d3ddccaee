"""Which array the model gets: never decided by the alphabet, in which HDF5 lists arrays unless told otherwise."""

import functools
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from hpctrain.data.formats.sources import open_dataset
from hpctrain.data.order import first_draw
from hpctrain.data.packing.read import open_source
from hpctrain.data.packing.write import write_hdf5
from hpctrain.data.samples import Recipe, make_batch
from hpctrain.errors import UserError
from hpctrain.rank.model_input import arrays_named, described, input_first
from hpctrain.tasks.definition import Task

TARGET = "later"
NAMES = ("later", "state")


def stored(path: Path, track_order: bool = False) -> Path:
    """A file whose model's input was written first, but is listed last unless the file keeps the order."""
    with h5py.File(path, "w", track_order=track_order) as file:
        file["state"], file["later"] = np.zeros((4, 2), np.float32), np.ones(4, np.float32)
    return path


def by_constant(outputs: Any, batch: Any) -> Any:
    return outputs - batch["later"]


def by_global(outputs: Any, batch: Any) -> Any:
    return by_constant(outputs, {"later": batch[TARGET]})


def by_argument(name: str, outputs: Any, batch: Any) -> Any:
    return outputs - batch[name]


class ByAttribute:
    def __init__(self) -> None:
        self.target = "later"

    def __call__(self, outputs: Any, batch: Any) -> Any:
        return outputs - batch[self.target]


LOSSES = [by_constant, by_global, functools.partial(by_argument, "later"), ByAttribute()]


def order(path: Path, fields: tuple[str, ...] | None = None, **given: Any) -> tuple[str, ...]:
    train = open_dataset(path, fields)
    return input_first(Task(model=None, **given), train, tuple(train.fields))


@pytest.mark.parametrize("loss", LOSSES)
def test_the_array_that_the_loss_does_not_use_is_the_input(tmp_path, loss):
    assert order(stored(tmp_path / "a.h5"), loss=loss) == ("state", "later")


@pytest.mark.parametrize("loss", ["mse", lambda outputs, batch: outputs - batch["later"] + batch["state"].mean()])
def test_an_undecided_input_is_refused_and_the_arrays_are_named(tmp_path, loss):
    with pytest.raises(UserError, match="which array the model gets: the data list later, state"):
        order(stored(tmp_path / "a.h5"), loss=loss)


def test_the_files_order_and_the_users_fields_decide(tmp_path):
    assert order(stored(tmp_path / "a.h5", track_order=True), loss="mse") == ("state", "later")
    assert order(stored(tmp_path / "b.h5"), fields=("state", "later"), loss="mse") == ("state", "later")


def test_a_forward_decides_what_a_named_loss_compares(tmp_path):
    path = stored(tmp_path / "a.h5")
    assert order(path, loss="mse", forward=lambda model, batch: model(batch["state"])) == ("state", "later")
    assert order(path, loss=by_constant, forward=lambda model, batch: model(*batch.values())) == NAMES  # all by name


def test_packing_does_not_turn_the_alphabet_into_an_order(tmp_path):
    packed = tmp_path / "packed.h5"
    write_hdf5(packed, open_source([str(stored(tmp_path / "a.h5"))]))
    with pytest.raises(UserError, match="which array the model gets"):
        order(packed, loss="mse")
    for name in ("later", "state"):
        np.save(tmp_path / f"{name}.npy", np.zeros(4))
    write_hdf5(packed, open_source([str(tmp_path / "later.npy"), str(tmp_path / "state.npy")]), overwrite=True)
    with pytest.raises(UserError, match="which array the model gets"):
        order(packed, loss="mse")
    write_hdf5(packed, open_source([str(tmp_path / "state.npy"), str(tmp_path / "later.npy")]), overwrite=True)
    assert order(packed, loss="mse") == ("state", "later")


def test_other_data_are_arranged_by_the_names_trained_on():
    other = open_dataset({"later": np.ones(4), "more": np.ones(4), "state": np.zeros((4, 2))})
    batch = make_batch(other, Recipe(names=("state", "later")), first_draw(np.arange(2)))
    assert list(batch) == ["state", "later", "more"]
    with pytest.raises(UserError, match="made for 'state', and these data have x"):
        make_batch(open_dataset({"x": np.ones(4)}), Recipe(names=("state",)), first_draw(np.arange(2)))


def test_the_line_says_what_model_and_loss_get():
    batch = {"state": np.zeros((3, 1, 24, 24)), "later": np.zeros(3)}
    task = Task(model=None, loss=by_constant)
    assert described(task, ("state", "later"), batch) == "model gets state [1, 24, 24], loss gets later"
    own = Task(model=None, loss=lambda outputs, batch: 0, forward=lambda model, batch: model(batch["later"]))
    assert described(own, (), batch) == "model gets later [], loss gets the batch"

    class OnTorch(Task):
        given_loss = object()  # as the loss of a compiled Keras model

    wrapped = OnTorch(model=None, loss=functools.partial(lambda *_: 0, OnTorch.given_loss))
    assert described(wrapped, ("state", "later"), batch) == "model gets state [1, 24, 24], loss gets later"


def test_texts_of_nested_functions_are_found():
    def outer(outputs, batch):
        return sum(part(batch) for part in [lambda batch: batch["later"]])

    assert arrays_named(outer, NAMES) == ["later"]

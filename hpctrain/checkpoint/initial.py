"""Loads initial weights, for fine-tuning, from checkpoints, folders of Hugging Face and DCP, and weight files."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

import h5py
import numpy as np

from hpctrain.checkpoint.export import AVERAGE
from hpctrain.checkpoint.format.durable_files import is_absent
from hpctrain.checkpoint.format.layout import ITEM_TYPES, convert_values
from hpctrain.checkpoint.frozen import FrozenRecord, FrozenWeight, checksum, is_common
from hpctrain.checkpoint.initial_match import Match, WeightSource, first_names, of_stages, renamed, require_meant
from hpctrain.checkpoint.lora import Weights, without_adapters
from hpctrain.checkpoint.mirror import locate_checkpoint
from hpctrain.checkpoint.reading import Loaded
from hpctrain.checkpoint.store import CheckpointStore
from hpctrain.checkpoint.weight_files import MODEL, join_weights, open_weight_files
from hpctrain.comm.group import Group
from hpctrain.errors import UserError, file_errors
from hpctrain.system.array_types import Array
from hpctrain.system.retry import retry_files
from hpctrain.train.framework import StateSource
from hpctrain.train.saved_arrays import DerivedArrays, Place, SavedArrays, lies_in, require_inside
from hpctrain.train.state import StateTensor
from hpctrain.train.stateful import value_of

T = TypeVar("T")

KERAS_FILE = ".weights.h5"


def load_initial(
    source: WeightSource,
    framework: StateSource,
    stages: Group | None = None,
    everyone: Group | None = None,
    record: bool = False,
) -> tuple[Match, FrozenRecord | None]:
    """Load a source's weights into the model wherever name and shape match; other state is unchanged.

    A moving average of the weights starts at the loaded weights. Collective over ``everyone``.

    Args:
        source: run folder, checkpoint folder, folder of Hugging Face or torch.distributed.checkpoint, or a file:
            .safetensors, .pt, .pth, .bin or .ckpt (names with or without ``model/``), or .weights.h5 for a Keras model.
        framework: holds the model, or a pipeline stage of it.
        stages: ranks of the pipeline stages, whose weights are matched as one model; by default only this rank.
        everyone: ranks that load the same checkpoint: if a rank finds it damaged, all load the previous one. By default
            only this process.
        record: whether to return which frozen weights were loaded, and from where.

    Raises:
        UserError: the source does not exist or holds more than weights, or it lacks weights of the model that
            ``source.missing`` does not list.
        DamagedCheckpoint: the source is damaged.
        UnreadableCheckpoint: the source cannot be read now.
    """
    framework.host.synchronize()
    if source.path.endswith(KERAS_FILE):
        return load_keras_file(source, framework), None
    alone = Group("alone")
    stages, everyone = stages or alone, everyone or alone
    state = framework.state()
    present = PresentState(state)
    own = {name.removeprefix(MODEL): present.shape_of(name) for name in present if name.startswith(MODEL)}
    wanted = of_stages(own, stages)
    kept = {it.name: it.dtype for it in state if record and not it.is_trained and is_common(it.name, it.placement)}
    of_every_stage = stages.allgather(kept, "list the frozen weights") if record else []
    frozen = dict(sorted(entry for each in of_every_stage for entry in each.items()))

    def load(weights: Weights, path: str) -> tuple[Match, str, dict[str, Any]]:
        match, old_names = load_weights(source, weights, framework, wanted)
        mine = [name for name in frozen if name.removeprefix(MODEL) in match.taken][everyone.rank :: everyone.size]
        found = {}
        for name in mine:
            old = old_names[name.removeprefix(MODEL)]
            shape = weights.arrays.shape_of(old)
            total = checksum(weights.arrays, old)
            found[name] = asdict(FrozenWeight(old, shape, frozen[name], total))
        return match, path, found

    match, path, found = with_weights(source.path, load, everyone)
    if not record:
        return match, None
    each = everyone.allgather(found, "record the frozen weights")
    weights = {name: FrozenWeight(**{**one, "shape": tuple(one["shape"])}) for of in each for name, one in of.items()}
    return match, FrozenRecord(source.path, path, weights)


def load_weights(
    source: WeightSource, weights: Weights, framework: StateSource, wanted: Mapping[str, tuple[int, ...]]
) -> tuple[Match, dict[str, str]]:
    """Load the weights that match into the model; also returns their names in the source.

    ``wanted`` has the shapes of the model's weights on all stages.
    """
    old_names = renamed({name: name for name in weights.arrays}, source.rename, source.path)
    for name, saved in framework.facts.other_names.items():  # an export has the names in ``state_dict``
        if name in old_names and saved and saved not in old_names:
            old_names[saved] = old_names.pop(name)
    old_names = with_adapters(old_names, wanted)
    state = framework.state()
    present = PresentState(state)
    shapes = {name: weights.arrays.shape_of(old) for name, old in old_names.items()}
    match = require_meant(source, wanted, shapes)
    if lost := [name for name in (*match.missing, *match.reshaped) if name in framework.facts.meta_init]:
        raise UserError(
            f"{source.path} has no values for {first_names(lost)}, and neither has the model: the task made them "
            "on the meta device",
            "make these layers with values, outside of torch.device('meta')",
        )
    taken = frozenset(match.taken)
    places: dict[str, Place] = {name: (present, name) for name in present}
    for name in present:
        prefix = next((prefix for prefix in (MODEL, AVERAGE) if name.startswith(prefix)), None)
        if prefix and name.removeprefix(prefix) in taken:
            places[name] = weights.arrays, old_names[name.removeprefix(prefix)]
    dtypes = {it.name: it.dtype for it in state}

    def fitting(name: str, array: Array) -> Array:
        where, old = places[name]
        return array if where is present else convert_values(array, weights.dtypes[old], dtypes[name])

    framework.host.synchronize()
    framework.load(DerivedArrays(places, fitting))
    return match, old_names


def with_adapters(old_names: Mapping[str, str], wanted: Iterable[str]) -> dict[str, str]:
    """Weights of a plain network under the names that they have in a model with adapters.

    Args:
        old_names: names in the source, by name.
        wanted: names of the model.
    """
    found = dict(old_names)
    for name in wanted:
        plain = without_adapters(name)
        if name not in old_names and plain in old_names:
            found[name] = old_names[plain]
            found.pop(plain, None)
    return found


def with_weights(path: str, use: Callable[[Weights, str], T], group: Group) -> T:
    """Call ``use`` with a source's weights, by name without ``model/``, which each rank reads on access, and the
    absolute path of the file, of the folder of Hugging Face or DCP, or of the checkpoint.

    Collective: for a checkpoint, one rank reads the manifest for all, and all use the same checkpoint.
    """
    if weights := open_weight_files(path):
        return use(weights, os.path.abspath(path))
    found: list[T] = []

    def take(loaded: Loaded) -> dict[str, Array]:
        found.append(use(join_weights([Weights(loaded.arrays, loaded.dtypes)], MODEL), os.path.abspath(loaded.path)))
        return {}

    store, step = retry_files(partial(locate_checkpoint, path))
    single = Group("alone")  # one process, so that rank-local state is averaged
    CheckpointStore(store.path, group=group, peers=single).load_into(take, step)
    return found[-1]


class PresentState(SavedArrays):
    """The current state of a framework as SavedArrays; of a partitioned tensor, only local parts can be read."""

    def __init__(self, state: Iterable[StateTensor]) -> None:
        self.state: dict[str, StateTensor] = {}
        super().__init__(self.state)
        self.parts: dict[str, list[StateTensor]] = {}
        for tensor in state:
            self.state[tensor.name] = tensor
            self.parts.setdefault(tensor.name, []).append(tensor)

    def __getitem__(self, name: str) -> Array:
        return value_of(self.state[name])

    def shape_of(self, name: str) -> tuple[int, ...]:
        tensor = self.state[name]
        return tensor.cut.shape if tensor.cut else tensor.shape

    def dtype_of(self, name: str) -> np.dtype[Any]:
        return ITEM_TYPES[self.state[name].dtype]

    def is_current(self, name: str) -> bool:
        return True

    def part(self, name: str, begin: tuple[int, ...], shape: tuple[int, ...]) -> Array:
        require_inside(name, begin, shape, self.shape_of(name))
        inner = [tuple(map(int.__sub__, begin, it.cut.begin)) if it.cut else begin for it in self.parts[name]]
        held = zip(self.parts[name], inner, strict=True)
        tensor, place = next((it, place) for it, place in held if lies_in(place, shape, it.shape))
        values = np.empty(shape, self.dtype_of(name))
        tensor.copy_into(values, place)
        return values


@runtime_checkable
class OfKeras(Protocol):
    """A framework whose model may be one of Keras."""

    @property
    def keras_model(self) -> Any:
        """That model; None if it is not one."""

    def begin_averages(self) -> None:
        """Sets the averages of the weights, if there are any, to the current weights."""


def load_keras_file(source: WeightSource, framework: StateSource) -> Match:
    """Load a ``.weights.h5`` file into a Keras model; names are paths in the file: ``layers/dense/vars/0``.

    The matching weights are copied into a file that Keras has saved from the model and then loads as a whole, since
    only Keras can map variables to the file's names.

    Raises:
        UserError: see ``load_initial``.
    """
    if not isinstance(framework, OfKeras) or (model := framework.keras_model) is None:
        raise UserError(f"{source.path} holds weights of a Keras model", "give a .safetensors or .pt file")
    if is_absent(source.path):
        raise UserError(f"{source.path} does not exist", "check checkpoint.init_from")
    from hpctrain.backends.keras.keras_model import through_file

    def filled(own: Path) -> Match:
        readable = file_errors(f"{source.path} cannot be read", "give a file of model.save_weights")
        with readable, h5py.File(source.path, "r") as theirs, h5py.File(own, "r+") as file:
            found = renamed({name: name for name in datasets(theirs)}, source.rename, source.path)
            shapes = {name: theirs[old].shape for name, old in found.items()}
            match = require_meant(source, {name: file[name].shape for name in datasets(file)}, shapes)
            for name in match.taken:
                del file[name]
                theirs.copy(theirs[found[name]], file, name)
        return match

    match = through_file(model, filled)
    framework.begin_averages()
    return match


def datasets(file: h5py.File) -> list[str]:
    """Paths of all datasets; soft and external links are not followed."""
    names: list[str] = []

    def note(name: str, item: Any) -> None:
        if isinstance(item, h5py.Dataset):
            names.append(name)

    file.visititems(note)
    return names

"""Initial weights from Keras files, in which weights are numbered by the model's layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py

from hpctrain.checkpoint.format.files import is_absent
from hpctrain.checkpoint.initial_match import Match, Source, renamed, require_meant
from hpctrain.errors import UserError
from hpctrain.train.framework import StateSource


def load_keras_file(source: Source, framework: StateSource) -> Match:
    """Gives a Keras model the weights of a ``.weights.h5`` file; names are the file's own: ``layers/dense/vars/0``.

    The rest of the model is filled in from itself, so that Keras, which alone knows which variable is which, can
    load a whole file.

    Raises:
        UserError: see ``load_initial``.
    """
    if framework.facts.name != "tensorflow":
        raise UserError(f"{source.path} holds weights of a Keras model", "give a .safetensors or .pt file")
    if is_absent(source.path):
        raise UserError(f"{source.path} does not exist", "check checkpoint.init_from")
    from hpctrain.backends.tensorflow.state.weights import through_file

    def filled(own: Path) -> Match:
        try:
            with h5py.File(source.path, "r") as theirs, h5py.File(own, "r+") as file:
                found = renamed({name: name for name in datasets(theirs)}, source.rename, source.path)
                shapes = {name: theirs[old].shape for name, old in found.items()}
                match = require_meant(source, {name: file[name].shape for name in datasets(file)}, shapes)
                for name in match.taken:
                    del file[name]
                    theirs.copy(theirs[found[name]], file, name)
        except OSError as error:
            raise UserError(f"{source.path} cannot be read: {error}", "give a file of model.save_weights") from error
        return match

    return through_file(framework, filled)


def datasets(file: h5py.File) -> list[str]:
    """Paths of all datasets; links to other files are not followed."""
    names: list[str] = []

    def note(name: str, item: Any) -> None:
        if isinstance(item, h5py.Dataset):
            names.append(name)

    file.visititems(note)
    return names

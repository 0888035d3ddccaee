"""Worker processes of ``hpctrain.data.worker_pool``: their main program, and how they get a rank's data and functions.

Nothing is pickled: JSON values say which data to open and which functions to import. A worker finds files and
functions, with their plain arguments, by name, and arrays in memory shared with its parent.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import itertools
import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib.machinery import PathFinder
from types import ModuleType
from typing import Any, BinaryIO

import numpy as np

from hpctrain.data.dataset import ArrayDataset, Dataset, from_arrays, ragged_rows, users_code
from hpctrain.data.formats.records import RecordDataset
from hpctrain.data.formats.sources import CalledDataset, ConcatDataset, open_dataset
from hpctrain.data.formats.table_dataset import TableDataset
from hpctrain.data.object_reference import Describer, Rebuilder, Unsuited
from hpctrain.data.order import Drawn
from hpctrain.data.samples import Recipe, make_batch
from hpctrain.errors import HpctrainError, UserError, code_of
from hpctrain.system.array_types import Array
from hpctrain.system.shared_memory import AnonymousMemory

RAGGED, SHAPES = "ragged/", "shapes/"
"""Prefixes of the two arrays that hold a ragged field in shared memory: values and shapes."""
Reference = dict[str, Any]
"""JSON values from which another process can find the same function or dataset."""


def refer_to_dataset(dataset: Dataset, memory: AnonymousMemory) -> Reference:
    """The reference that ``reopen`` needs. Arrays are copied into ``memory``.

    Raises:
        UserError: the dataset is an object that exists only in this process.
    """
    if isinstance(dataset, ArrayDataset):
        return {"arrays": memory.put(flattened(dataset))}
    if isinstance(dataset, CalledDataset):
        function = refer_to_function(dataset.function, "the data")
        return {"function": function, "how": sendable(dataset.how), "fingerprint": dataset.fingerprint()}
    from hpctrain.data.formats.hdf5 import Hdf5Dataset

    parts: Any = dataset.parts if isinstance(dataset, ConcatDataset) else [dataset]  # of one kind
    first = parts[0]
    how: dict[str, Any] = {"fields": list(dataset.fields)}
    if isinstance(first, TableDataset):
        addresses = [part.table.address for part in parts]
        return {"files": addresses, "how": how, "fingerprint": dataset.fingerprint()}
    if isinstance(first, RecordDataset):
        how |= {"ragged": first.ragged, "decode": first.decode}
        return {"files": [str(part.records.path) for part in parts], "how": sendable(how)}
    if isinstance(first, Hdf5Dataset):
        how |= {"cache_bytes": first.cache.limit_bytes, "decode": first.decode}
        return {"files": [str(part.path) for part in parts], "how": how}
    source = getattr(dataset, "source", dataset)  # the torch Dataset, not the wrapper
    describer = Describer(functools.partial(refer_to_function, what="a part of the data"))
    try:
        described = describer.describe(source)
    except Unsuited as error:
        raise _refusal(f"the data is an object of {type(source).__name__}, and {error}") from error
    how["ragged"] = any(field.is_ragged for field in dataset.fields.values())
    return {"object": described, "parts": memory.put(describer.arrays), "how": how}


def sendable(how: Mapping[str, Any]) -> Reference:
    """Arguments of ``open_dataset`` with a reference in place of the function that decodes."""
    decode = how["decode"]
    return {**how, "decode": refer_to_function(decode, "decode") if callable(decode) else decode}


def reopen(reference: Mapping[str, Any], memory: AnonymousMemory) -> Dataset:
    """Open the dataset of ``refer_to_dataset`` in another process.

    Raises:
        UserError: the data differ from those of the process that made the reference.
    """
    if "arrays" in reference:
        return from_arrays(unflattened(memory.views(reference["arrays"])))
    if "object" in reference:
        source = Rebuilder(memory.views(reference["parts"]), import_function).rebuild(reference["object"])
    else:
        source = reference["files"] if "files" in reference else import_function(reference["function"])
    how = dict(reference["how"])
    if isinstance(how.get("decode"), dict):
        how["decode"] = import_function(how["decode"])
    dataset = open_dataset(source, **how)
    if "fingerprint" in reference and dataset.fingerprint() != reference["fingerprint"]:
        fix = "make a data function depend on its arguments only: seed a Generator inside it, and do not change files"
        raise UserError("a worker process reads other data than the rank", fix)
    return dataset


def flattened(dataset: ArrayDataset) -> dict[str, Array]:
    """The dataset's arrays; a ragged field becomes two: the concatenated values of all samples, and their shapes."""
    flat: dict[str, Array] = {}
    for name, array in dataset.arrays.items():
        if dataset.fields[name].is_ragged:
            flat[f"{RAGGED}{name}"] = np.concatenate([item.ravel() for item in array])
            flat[f"{SHAPES}{name}"] = np.array([item.shape for item in array], np.int64)
        else:
            flat[name] = array
    return flat


def unflattened(flat: Mapping[str, Array]) -> dict[str, Array]:
    """The inverse of ``flattened``, without copies."""
    arrays: dict[str, Array] = {}
    for name, array in flat.items():
        if name.startswith(RAGGED):
            shapes = flat[SHAPES + name.removeprefix(RAGGED)]
            parts = np.split(array, np.cumsum(shapes.prod(axis=1))[:-1])
            rows = [part.reshape(shape) for part, shape in zip(parts, shapes.tolist(), strict=True)]
            arrays[name.removeprefix(RAGGED)] = ragged_rows(rows)
        elif not name.startswith(SHAPES):
            arrays[name] = array
    return arrays


def refer_to_recipe(recipe: Recipe) -> Reference:
    """The reference that ``recipe_of`` needs; raises UserError if a function cannot be imported."""
    return {
        "transform": recipe.transform and refer_to_function(recipe.transform, "the transform"),
        "collate": recipe.collate and refer_to_function(recipe.collate, "collate"),
        "seed": recipe.seed,
        "names": recipe.names,
        "draws": recipe.draws,
    }


def recipe_of(reference: Mapping[str, Any]) -> Recipe:
    """Rebuild the recipe of ``refer_to_recipe`` in another process."""
    transform, collate = (reference[name] and import_function(reference[name]) for name in ("transform", "collate"))
    return Recipe(transform, collate, reference["seed"], tuple(reference["names"]), reference["draws"])


def refer_to_function(function: Callable[..., Any], what: str) -> Reference:
    """The reference that ``import_function`` needs: module, name, and the arguments that a partial binds.

    Raises:
        UserError: another process could not find the function, or the arguments are not JSON values; the message calls
            it ``what``.
    """
    if isinstance(function, functools.partial):
        bound = {"args": list(function.args), "keywords": dict(function.keywords)}
        if not _survives_json(bound):
            raise _refusal(f"{what} has arguments that are not plain values: {function!r}")
        inner = refer_to_function(function.func, what)
        args = inner["args"] + bound["args"]
        keywords = inner["keywords"] | bound["keywords"]
        return {**inner, "args": args, "keywords": keywords}
    home = str(getattr(function, "__module__", None))
    name = getattr(function, "__qualname__", "")
    try:
        module = sys.modules[home]
        found = _attribute(module, name)
    except (AttributeError, KeyError):
        found = None
    if found is not function:
        raise _refusal(f"{what} is {function!r}, which is not at the top level of a module")
    if home == "__main__" and module.__spec__ is not None:
        home = module.__spec__.name  # started by `python -m`: relative imports need the real name
    return {"module": home, "file": _file_of(home, module), "name": name, "args": [], "keywords": {}}


def import_function(reference: Mapping[str, Any]) -> Callable[..., Any]:
    """Import the function of ``refer_to_function``."""
    function: Callable[..., Any] = _attribute(_import(reference["module"], reference["file"]), reference["name"])
    if reference["args"] or reference["keywords"]:
        return functools.partial(function, *reference["args"], **reference["keywords"])
    return function


def _refusal(why: str) -> UserError:
    return UserError(
        f"data cannot be sent to worker processes: {why}",
        "give a function at the top level of a module, its arguments by functools.partial as numbers, text, lists or "
        "dicts; or set data.workers to 0",
    )


def _survives_json(value: Any) -> bool:
    """Whether the value is unchanged by a round trip through JSON; a tuple, for example, becomes a list."""
    try:
        return bool(json.loads(json.dumps(value, allow_nan=False)) == value)
    except (TypeError, ValueError):
        return False


def _attribute(module: ModuleType, name: str) -> Any:
    return functools.reduce(getattr, name.split("."), module)


def _file_of(name: str, module: ModuleType) -> str | None:
    """The module's file if a new process cannot import it by name, such as the main program or a task's file."""
    path = getattr(module, "__file__", None)
    if not path or "." in name:
        return None
    found = PathFinder.find_spec(name)
    return None if found is not None and found.origin == path else os.path.abspath(path)


def _import(name: str, path: str | None) -> ModuleType:
    if path is None:
        return importlib.import_module(name)
    alias = "__mp_main__" if name == "__main__" else name  # code under `if __name__ == "__main__"` must not run here
    if getattr(sys.modules.get(alias), "__file__", None) == path:
        return sys.modules[alias]
    spec = importlib.util.spec_from_file_location(alias, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot import {path}")
    module = sys.modules[alias] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main(channel: int, payload: int, results: list[int]) -> None:
    """Answer requests until the parent closes the channel or dies.

    Args:
        channel: descriptor of the socket to the parent, which carries one JSON object per line.
        payload: descriptor of the shared memory with the dataset's arrays, if it has any.
        results: descriptors of the shared memories for results, used in turn.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # schedulers and terminals signal all processes; the parent decides
    with socket.socket(fileno=channel) as parent, parent.makefile("rb") as lines:
        try:
            for answer in answers(lines, AnonymousMemory(payload), [AnonymousMemory(result) for result in results]):
                parent.sendall(json.dumps(answer).encode() + b"\n")
            lines.read()  # stay until the parent has read the last answer and closes the channel
        except OSError:
            pass  # the parent is gone


def answers(lines: BinaryIO, payload: AnonymousMemory, results: list[AnonymousMemory]) -> Iterator[dict[str, Any]]:
    """Where each request's samples are in shared memory; ends with an error after the first failure, also in set-up."""
    turns = itertools.cycle(results)
    try:
        with users_code("a data worker failed", "correct the dataset, the transform or collate"):
            setup = json.loads(lines.readline())
            sys.path[:] = setup["path"]  # to find the user's functions; hpctrain's modules are imported already
            dataset = reopen(setup["dataset"], payload)
            recipe = recipe_of(setup["recipe"])
            for line in lines:
                request = json.loads(line)
                drawn = Drawn(request["epoch"], *(np.array(request[name], np.int64) for name in ("ids", "repeats")))
                yield {"arrays": next(turns).put(make_batch(dataset, recipe, drawn))}
    except HpctrainError as error:
        yield {"what": error.what, "fix": error.fix, "code": code_of(error), "passes": not isinstance(error, UserError)}


if __name__ == "__main__":
    first, second, *rest = map(int, sys.argv[1:])
    main(first, second, rest)

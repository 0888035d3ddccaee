"""Objects of a user's program as JSON values and arrays, from which a data worker makes equal ones. Nothing is pickled.

Classes and functions are named; attributes (or what ``__getstate__`` returns) are plain values, containers, arrays,
tensors, or such objects again.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import importlib
import inspect
import types
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path, PurePath
from typing import Any

import numpy as np

from hpctrain.system.array_types import Array

PLAIN = (bool, int, float, str, types.NoneType)
SEQUENCES: dict[str, Callable[[list[Any]], Any]] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
MAPPINGS: dict[str, type[dict[Any, Any]]] = {"dict": dict, "OrderedDict": OrderedDict}


class Unsuited(Exception):
    """A part of an object that cannot be described; says which."""


class Describer:
    """Describes one object. ``arrays`` then holds its arrays by name."""

    def __init__(self, name_of: Callable[[Any], Any]) -> None:
        self.name_of = name_of
        self.arrays: dict[str, Array] = {}
        self.seen: dict[int, int] = {}
        self.kept: list[Any] = []

    def describe(self, value: Any, path: str = "") -> Any:
        """JSON values that ``rebuild`` takes. Raises Unsuited; name_of(function) may raise a UserError."""
        if type(value) in PLAIN:
            return value
        if id(value) in self.seen:
            return {"same": self.seen[id(value)]}
        self.seen[id(value)] = len(self.kept)
        self.kept.append(value)  # so that no other object gets its id
        kind = type(value).__name__
        if type(value) in SEQUENCES.values():
            return {kind: [self.describe(each, f"{path}[{at}]") for at, each in enumerate(value)]}
        if type(value) in MAPPINGS.values():
            return {kind: [[self.describe(one, f"{path}[{key!r}]") for one in (key, value[key])] for key in value]}
        if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
            return {"array": self._put(value)}
        if hasattr(value, "detach") and hasattr(value, "numpy"):
            with contextlib.suppress(TypeError, RuntimeError):  # of a type or layout that NumPy lacks
                return {"tensor": [type(value).__module__.partition(".")[0], self._put(value.detach().cpu().numpy())]}
        if isinstance(value, np.generic) and value.dtype.kind in "biuf":
            return {"scalar": [value.dtype.str, value.item()]}
        if isinstance(value, np.dtype):
            return {"dtype": value.str}
        if isinstance(value, PurePath):
            return {"path": str(value)}
        if isinstance(value, enum.Enum):
            return {"enum": [self.name_of(type(value)), value.name]}
        if isinstance(value, functools.partial):
            parts = (value.func, value.args, dict(value.keywords))
            return {"partial": [self.describe(each, path) for each in parts]}
        if isinstance(value, types.MethodType):
            return {"method": [self.describe(value.__self__, path), value.__name__]}
        if inspect.isroutine(value) or isinstance(value, type):
            return {"function": self.name_of(value)}
        own: Any = type(value)
        is_plain = own.__reduce__ is object.__reduce__ and own.__reduce_ex__ is object.__reduce_ex__
        state = value.__getstate__() if is_plain else None
        if not isinstance(state, dict):
            raise Unsuited(f"its {path.lstrip('.') or 'class'} is {own.__module__}.{own.__qualname__}")
        held = {name: self.describe(each, f"{path}.{name}") for name, each in state.items()}
        return {"object": [self.name_of(own), held]}

    def _put(self, array: Array) -> str:
        name = str(len(self.arrays))
        self.arrays[name] = array
        return name


class Rebuilder:
    """Makes the object that a ``Describer`` described."""

    def __init__(self, arrays: Mapping[str, Array], find: Callable[[Any], Any]) -> None:
        self.arrays, self.find = arrays, find
        self.made: list[Any] = []

    def rebuild(self, given: Any) -> Any:
        """The object; parts that occur several times are one object again."""
        if not isinstance(given, dict):
            return given
        ((kind, of),) = given.items()
        if kind == "same":
            return self.made[of]
        place = len(self.made)
        self.made.append(None)
        if kind in MAPPINGS:
            made = self.made[place] = MAPPINGS[kind]()
            for key, value in of:
                found = self.rebuild(key)
                made[found] = self.rebuild(value)
            return made
        if kind == "object":
            own = self.find(of[0])
            built = self.made[place] = own.__new__(own)
            state = {name: self.rebuild(each) for name, each in of[1].items()}
            getattr(built, "__setstate__", vars(built).update)(state)
            return built
        self.made[place] = self._made(kind, of)
        return self.made[place]

    def _made(self, kind: str, of: Any) -> Any:
        if kind in SEQUENCES:
            return SEQUENCES[kind]([self.rebuild(each) for each in of])
        if kind == "partial":
            function, args, keywords = map(self.rebuild, of)
            return functools.partial(function, *args, **keywords)
        makers: dict[str, Callable[[], Any]] = {
            "array": lambda: np.array(self.arrays[of]),
            "tensor": lambda: importlib.import_module(of[0]).from_numpy(self.arrays[of[1]].copy()),
            "scalar": lambda: np.dtype(of[0]).type(of[1]),
            "dtype": lambda: np.dtype(of),
            "path": lambda: Path(of),
            "enum": lambda: self.find(of[0])[of[1]],
            "method": lambda: getattr(self.rebuild(of[0]), of[1]),
            "function": lambda: self.find(of),
        }
        return makers[kind]()

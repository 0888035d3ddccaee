"""What an object of the user's holds: attributes, items, closures, bound arguments, and the globals of functions."""

from __future__ import annotations

import functools
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

MOST_ITEMS = 1000
"""Of a container that is gone through: a longer one is data."""
INSTALLED = frozenset({"site-packages", "dist-packages"})
"""Folders of libraries."""
FRAMEWORKS = frozenset({"torch", "tensorflow", "keras", "numpy", __name__.partition(".")[0]})
"""Libraries whose objects are never gone into, wherever they are installed."""


@dataclass(frozen=True)
class Place:
    """Where a value is held."""

    path: str
    """Names from the root on, joined by dots; empty for the root itself."""
    value: Any
    put: Callable[[Any], None] | None = None
    """Puts another value there; None if nothing can be."""


def own_attributes(value: Any, own: bool) -> Iterable[str]:
    """All attributes of objects of the user's classes."""
    return vars(value) if hasattr(value, "__dict__") and (own or isinstance(value, types.SimpleNamespace)) else ()


def plain_key(key: Any) -> str | None:
    """Strings and whole numbers as they are."""
    return str(key) if type(key) in (str, int) else None


def nothing(value: Any) -> bool:
    """No value is an end."""
    return False


@dataclass(frozen=True)
class Reach:
    """How far to go."""

    is_end: Callable[[Any], bool] = nothing
    """Whether a value is given without going into it."""
    attributes: Callable[[Any, bool], Iterable[str]] = own_attributes
    """attributes(value, own): names of the attributes to go into; ``own`` says whether the class is the user's."""
    key_name: Callable[[Any], str | None] = plain_key
    """What a key of a dict is called in paths; None leaves the item out."""

    def places(self, root: Any) -> Iterator[Place]:
        """The root and everything that it holds, nearest first. Each object comes once, a number wherever it is."""
        home = package_of(root)
        seen: set[int] = set()
        waiting = deque([Place("", root)])
        while waiting:
            place = waiting.popleft()
            if isinstance(place.value, (bool, int, float)):
                yield place
            elif id(place.value) not in seen:
                seen.add(id(place.value))
                yield place
                if not self.is_end(place.value):
                    waiting.extend(self.inside(place.value, f"{place.path}." if place.path else "", home))

    def inside(self, value: Any, path: str, home: str) -> Iterator[Place]:
        """What a value holds itself."""
        if isinstance(value, (type, types.ModuleType)):
            return
        if isinstance(value, dict):
            names = ((key, self.key_name(key)) for key in value if len(value) <= MOST_ITEMS)
            yield from (item(f"{path}{name}", value, key) for key, name in names if name is not None)
        elif isinstance(value, (list, tuple, deque)):
            yield from (item(f"{path}{key}", value, key) for key in range(len(value)) if len(value) <= MOST_ITEMS)
        elif isinstance(value, functools.partial):
            bound = {
                "func": value.func,
                **{str(index): each for index, each in enumerate(value.args)},
                **value.keywords,
            }
            yield from (Place(f"{path}{name}", each) for name, each in bound.items())
        elif isinstance(value, types.MethodType):
            yield Place(path.rstrip("."), value.__self__)
        elif isinstance(value, types.FunctionType):
            yield from inside_function(value, path) if is_own(value, home) else ()
        else:
            yield from (item(path + name, vars(value), name) for name in self.attributes(value, is_own(value, home)))
            yield from (Place(path + name, function) for name, function in methods(value, home).items())


def package_of(value: Any) -> str:
    """Top-level package of a function, a class, or an object's class."""
    while isinstance(value, (functools.partial, types.MethodType)):
        value = value.func if isinstance(value, functools.partial) else value.__self__
    owner = value if isinstance(value, (types.FunctionType, type)) else type(value)
    return str(owner.__module__).partition(".")[0]


def is_own(value: Any, home: str) -> bool:
    """Whether a function, a class, or an object's class is the user's: of the root's package, or not a library's."""
    package = package_of(value)
    if package in sys.stdlib_module_names or package in FRAMEWORKS:
        return False
    module = sys.modules.get(package)
    place = PurePath(str(vars(module).get("__file__") or "")) if module else PurePath()
    return package == home or not INSTALLED.intersection(place.parts)


def item(path: str, container: Any, key: Any) -> Place:
    """An item of a container, or an attribute of an object whose ``vars`` the container is."""
    put = None if isinstance(container, tuple) else functools.partial(container.__setitem__, key)
    return Place(path, container[key], put)


def methods(value: Any, home: str) -> dict[str, types.FunctionType]:
    """Functions of those of an object's classes that are the user's."""
    own = [one for one in reversed(type(value).__mro__) if is_own(one, home)]
    return {name: each for one in own for name, each in vars(one).items() if isinstance(each, types.FunctionType)}


def inside_function(function: types.FunctionType, path: str) -> Iterator[Place]:
    """What a function closes over, default values of its arguments, and globals that it names."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        if cell != types.CellType():  # bound
            yield Place(f"{path}{name}", cell.cell_contents, functools.partial(setattr, cell, "cell_contents"))
    defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    yield from (Place(f"{path}default{index}", value) for index, value in enumerate(defaults))
    known = function.__globals__
    yield from (item(f"{path}{name}", known, name) for name in function.__code__.co_names if name in known)

"""Finds what a user's object holds: attributes, items, closures, bound arguments, and globals used by functions."""

from __future__ import annotations

import functools
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import PurePath
from typing import Any

from hpctrain.system.user_errors import INSTALLED

MOST_ITEMS = 1000
"""Longest container that is searched: anything longer is data."""
FRAMEWORKS = frozenset({"torch", "tensorflow", "keras", "numpy", __name__.partition(".")[0]})
"""Libraries whose objects are never searched, wherever they are installed."""
LIBRARIES = FRAMEWORKS | sys.stdlib_module_names
Held = Iterator[tuple[str, Any]]
"""Pairs of a name and a value."""


def own_attributes(value: Any, own: bool) -> Iterable[str]:
    """All attributes of an object of a user's class."""
    return vars(value) if hasattr(value, "__dict__") and (own or isinstance(value, types.SimpleNamespace)) else ()


def reached(
    root: Any,
    is_end: Callable[[Any], bool],
    attributes: Callable[[Any, bool], Iterable[str]] = own_attributes,
    names: Mapping[int, str] = types.MappingProxyType({}),
) -> Held:
    """Yields the root and everything it holds, breadth first, with dotted paths; the root's path is empty.

    Each object is yielded once, but numbers and bools wherever they occur.

    Args:
        root: the user's object.
        is_end: whether a value is yielded without searching it.
        attributes: attributes(value, own): names of attributes to search; ``own`` says whether the class is the user's.
        names: names by object id, used for dict keys that are such an object or its id.
    """
    home = package_of(root)
    seen: set[int] = set()
    waiting = deque([("", root)])
    while waiting:
        path, value = waiting.popleft()
        if isinstance(value, (bool, int, float)):
            yield path, value
        elif id(value) not in seen:
            seen.add(id(value))
            yield path, value
            if not is_end(value):
                inside = held_by(value, home, attributes, names)
                waiting.extend((f"{path}.{name}" if path and name else path or name, each) for name, each in inside)


def held_by(value: Any, home: str, attributes: Callable[[Any, bool], Iterable[str]], names: Mapping[int, str]) -> Held:
    """What a value holds directly; the object of a bound method has an empty name."""
    if isinstance(value, dict):
        if len(value) <= MOST_ITEMS:
            yield from zip(key_names(value, names), value.values(), strict=True)
    elif isinstance(value, (list, tuple, deque)):
        if len(value) <= MOST_ITEMS:
            yield from ((str(at), each) for at, each in enumerate(value))
    elif isinstance(value, functools.partial):
        yield from (("func", value.func), *((str(at), each) for at, each in enumerate(value.args)))
        yield from value.keywords.items()
    elif isinstance(value, types.MethodType):
        yield "", value.__self__
    elif isinstance(value, types.FunctionType):
        yield from held_by_function(value) if is_own(value, home) else ()
    elif not isinstance(value, (type, types.ModuleType)):
        yield from ((name, vars(value)[name]) for name in attributes(value, is_own(value, home)))
        members: dict[str, Any] = {}
        for kind in reversed(type(value).__mro__):
            if is_own(kind, home):
                members.update(vars(kind))
        yield from ((name, each) for name, each in members.items() if isinstance(each, types.FunctionType))


def key_names(keys: Iterable[Any], names: Mapping[int, str]) -> Iterator[str]:
    """Names dict keys: strings and ints as they are, objects (or their ids) by ``names``, others by position."""
    given: set[str] = set()
    for at, key in enumerate(keys):
        if type(key) is str:
            name = key
        elif type(key) is int:
            name = names.get(key, str(key))
        else:
            name = names.get(id(key), str(at))
        while name in given:
            name += "'"
        given.add(name)
        yield name


def held_by_function(function: types.FunctionType) -> Held:
    """What a function closes over, default values of its arguments, and globals that it uses."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    yield from ((name, cell.cell_contents) for name, cell in cells if cell != types.CellType())  # bound
    defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    yield from ((f"default{index}", value) for index, value in enumerate(defaults))
    known = function.__globals__
    yield from ((name, known[name]) for name in function.__code__.co_names if name in known)


def putting_back(
    root: Any,
    is_end: Callable[[Any], bool],
    attributes: Callable[[Any, bool], Iterable[str]],
    is_plain: Callable[[Any], bool],
) -> Iterator[Callable[[], object]]:
    """Yields functions that restore current plain values and delete ones added since; lists are restored whole.

    Args:
        root, is_end, attributes: as for ``reached``.
        is_plain: whether a value is restored; changes inside it are not undone.
    """
    home = package_of(root)
    for _, value in reached(root, is_end, attributes):
        is_long = isinstance(value, (dict, list, deque)) and len(value) > MOST_ITEMS
        if is_long or is_end(value) or isinstance(value, (type, types.ModuleType)):
            continue
        if isinstance(value, types.FunctionType):
            yield from putting_back_function(value, is_plain) if is_own(value, home) else ()
        elif isinstance(value, (list, deque)):
            yield functools.partial(refill, value, value.copy())
        elif isinstance(value, dict) or hasattr(value, "__dict__"):
            now = functools.partial(entries, value, attributes, is_own(value, home))
            yield functools.partial(put_plain, value, now, now(), is_plain)


def putting_back_function(
    function: types.FunctionType, is_plain: Callable[[Any], bool]
) -> Iterator[Callable[[], object]]:
    """Like ``putting_back``, for a function's closure and the globals that it uses."""
    for cell in function.__closure__ or ():
        if cell != types.CellType() and is_plain(cell.cell_contents):
            yield functools.partial(setattr, cell, "cell_contents", cell.cell_contents)
    known = function.__globals__
    held = {name: known[name] for name in function.__code__.co_names if name in known}
    yield functools.partial(known.update, {name: each for name, each in held.items() if is_plain(each)})


def refill(value: list[Any] | deque[Any], before: Iterable[Any]) -> None:
    """Restores the items of a list."""
    value.clear()
    value.extend(before)


def entries(value: Any, attributes: Callable[[Any, bool], Iterable[str]], own: bool) -> dict[Any, Any]:
    """A copy of a dict, or of an object's searched attributes."""
    if isinstance(value, dict):
        return dict(value)
    return {name: vars(value)[name] for name in attributes(value, own)}


def put_plain(
    value: Any, now: Callable[[], dict[Any, Any]], before: dict[Any, Any], is_plain: Callable[[Any], bool]
) -> None:
    """Restores plain values in a dict or object, and deletes ones that were not there before."""
    holder = value if isinstance(value, dict) else vars(value)
    for key, each in now().items():
        if key not in before and is_plain(each):
            del holder[key]
    holder.update({key: each for key, each in before.items() if is_plain(each)})


def package_of(value: Any) -> str:
    """Top-level package of a function, a class, or an object's class, from which a framework may derive another."""
    while isinstance(value, (functools.partial, types.MethodType)):
        value = value.func if isinstance(value, functools.partial) else value.__self__
    owners = (value,) if isinstance(value, (types.FunctionType, type)) else type(value).__mro__
    packages = [str(owner.__module__).partition(".")[0] for owner in owners]
    return next((one for one in packages if one not in LIBRARIES), packages[0])


def is_own(value: Any, home: str) -> bool:
    """Whether a function, a class, or an object's class is the user's: in the root's package, or not in a library."""
    return is_users(package_of(value), home)


@functools.cache
def is_users(package: str, home: str) -> bool:
    """Whether a package is the user's."""
    if package in LIBRARIES:
        return False
    module = sys.modules.get(package)
    place = PurePath(str(vars(module).get("__file__") or "")) if module else PurePath()
    return package == home or not INSTALLED.intersection(place.parts)

"""Functions by name: how a worker process gets the same function without anything being unpickled."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Mapping
from importlib.machinery import PathFinder
from types import ModuleType
from typing import Any

from hpctrain.errors import UserError

REMEDY = (
    "give a function at the top level of a module, its arguments by functools.partial as numbers, text, lists or "
    "dicts; or set data.workers to 0"
)


def refer(function: Callable[..., Any], what: str) -> dict[str, Any]:
    """The function as values that JSON holds: its module, its name there, and the arguments that a partial binds.

    Raises:
        UserError: another process could not find it, or the arguments are not values of JSON; names it as ``what``.
    """
    if isinstance(function, functools.partial):
        bound = {"args": list(function.args), "keywords": dict(function.keywords)}
        if not _survives(bound):
            raise refusal(f"{what} has arguments that are not plain values: {function!r}")
        inner = refer(function.func, what)
        args, keywords = inner["args"] + bound["args"], inner["keywords"] | bound["keywords"]
        return {**inner, "args": args, "keywords": keywords}
    home, name = str(getattr(function, "__module__", None)), getattr(function, "__qualname__", "")
    try:
        module = sys.modules[home]
        found = _attribute(module, name)
    except (AttributeError, KeyError):
        found = None
    if found is not function:
        raise refusal(f"{what} is {function!r}, which is not at the top level of a module")
    if home == "__main__" and module.__spec__ is not None:
        home = module.__spec__.name  # started by `python -m`: relative imports need its name
    return {"module": home, "file": _file_of(home, module), "name": name, "args": [], "keywords": {}}


def resolve(reference: Mapping[str, Any]) -> Callable[..., Any]:
    """The function of ``refer``, imported in this process."""
    module = _import(reference["module"], reference["file"])
    function: Callable[..., Any] = _attribute(module, reference["name"])
    if reference["args"] or reference["keywords"]:
        return functools.partial(function, *reference["args"], **reference["keywords"])
    return function


def refusal(why: str) -> UserError:
    """What cannot be made again in a worker process."""
    return UserError(f"data cannot be sent to worker processes: {why}", REMEDY)


def _survives(value: Any) -> bool:
    """Whether JSON gives back what it got: a tuple comes back as a list."""
    try:
        return bool(json.loads(json.dumps(value, allow_nan=False)) == value)
    except (TypeError, ValueError):
        return False


def _attribute(module: ModuleType, name: str) -> Any:
    return functools.reduce(getattr, name.split("."), module)


def _file_of(name: str, module: ModuleType) -> str | None:
    """The module's file where a new process would not find it under its name: the main program, a task's file."""
    path = getattr(module, "__file__", None)
    if not path or "." in name:
        return None
    found = PathFinder.find_spec(name)
    return None if found is not None and found.origin == path else os.path.abspath(path)


def _import(name: str, path: str | None) -> ModuleType:
    if path is None:
        return importlib.import_module(name)
    alias = "__mp_main__" if name == "__main__" else name  # what the program guards by its name must not run here
    if getattr(sys.modules.get(alias), "__file__", None) == path:
        return sys.modules[alias]
    spec = importlib.util.spec_from_file_location(alias, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot import {path}")
    module = sys.modules[alias] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

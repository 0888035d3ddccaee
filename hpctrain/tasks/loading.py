"""From ``package.module:function`` or ``path/file.py:function`` to the user's task."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hpctrain.comm.world import World
from hpctrain.errors import UserError
from hpctrain.tasks.definition import KerasTask, Task, TorchTask
from hpctrain.tasks.user_errors import no_such_field


def load_task(reference: str, arguments: Mapping[str, Any], world: World, seed: Callable[[], None]) -> Task:
    """Imports the task function and calls it with its arguments and, if it takes one, the world.

    Args:
        reference: ``package.module:function`` or ``path/file.py:function``.
        arguments: of the function, by name.
        world: given to a function that has a parameter of this name.
        seed: called once the module is imported and before the function runs; see ``backends.seeding.seed_task``.

    Raises:
        UserError: the module cannot be found or fails to import, it lacks the function, the arguments do not fit, or
            something else than a task comes back, or one of a framework that could not be seeded. Errors of the task
            itself pass through.
    """
    function = _function(reference)
    call = _bind(function, reference, arguments, world)
    seed()
    seeded = set(sys.modules)
    task = made(call)
    if not isinstance(task, (TorchTask, KerasTask)):
        raise UserError(
            f"task {reference} returned {type(task).__name__}",
            "return hpctrain.TorchTask(...) or hpctrain.KerasTask(...)",
        )
    framework = "torch" if isinstance(task, TorchTask) else "keras"
    if framework not in seeded:
        raise UserError(
            f"task {reference} imports {framework} inside the function, too late to be seeded",
            f"import {framework} at the top of the file",
        )
    return task


def made(call: Callable[[], Any]) -> Any:
    """What the task function returns. Raises UserError if it names a field that tasks do not have."""
    try:
        return call()
    except TypeError as error:
        if "Task.__init__()" not in str(error):
            raise
        line = traceback.extract_tb(error.__traceback__)[-1].line or ""
        kind = KerasTask if KerasTask.__name__ in line else TorchTask
        raise no_such_field(error, [field.name for field in dataclasses.fields(kind)]) from error


def _function(reference: str) -> Callable[..., Any]:
    where, _, name = reference.rpartition(":")
    module = _module_of_file(Path(where)) if where.endswith(".py") else _module(where)
    function: object = getattr(module, name, None)
    if not callable(function):
        raise UserError(f"task {reference}: {where} has no function {name!r}", "correct task: in the run file")
    return function


def _module(name: str) -> Any:
    sys.path.insert(0, "")  # a module in the working directory, as python -m finds it
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(error.name + ".")):
            raise UserError(
                f"task module {name!r} cannot be found",
                "correct task: in the run file, start in the folder that holds it, or write path/file.py:function",
            ) from error
        raise _import_failed(name, error) from error
    except (ImportError, SyntaxError) as error:
        raise _import_failed(name, error) from error
    finally:
        sys.path.remove("")
        if "" not in sys.path:
            sys.path.append("")  # behind what is installed, for imports that the task makes when it runs


def _module_of_file(path: Path) -> Any:
    if not path.is_file():
        fix = "correct task: in the run file; paths start at the working directory"
        raise UserError(f"task file {path} does not exist", fix)
    name = path.stem
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UserError(f"task file {path} cannot be imported", "give a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.insert(0, str(path.resolve().parent))  # files next to it can be imported, as in a script
    try:
        spec.loader.exec_module(module)
    except (ImportError, SyntaxError) as error:
        raise _import_failed(str(path), error) from error
    return module


def _import_failed(name: str, error: Exception) -> UserError:
    what = f"task {name} fails to import: {type(error).__name__}: {error}"
    return UserError(what, "install what is missing, or correct the import")


def _bind(
    function: Callable[..., Any], reference: str, arguments: Mapping[str, Any], world: World
) -> Callable[[], Any]:
    """The call, checked against the signature before anything runs."""
    signature = inspect.signature(function)
    given = dict(arguments)
    if "world" in signature.parameters:
        given["world"] = world
    try:
        bound = signature.bind(**given)
    except TypeError as error:
        raise UserError(
            f"task_args do not fit {reference}{signature}: {error}",
            "correct task_args: in the run file",
        ) from error
    return lambda: function(*bound.args, **bound.kwargs)

"""Loads the user's task from ``package.module:function`` or ``path/file.py:function`` and checks its fields."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import importlib.util
import inspect
import linecache
import os
import sys
import traceback
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hpctrain.comm.world import World
from hpctrain.errors import UserError, kind_of
from hpctrain.system.user_errors import no_such_field, own_line, words
from hpctrain.tasks.definition import KerasTask, Task, TorchScheduler, TorchTask

FRAMEWORKS = ("torch", "tensorflow", "keras")
FROM_FILES: set[str] = set()
"""Names of the modules that were made of task files."""


def code_of(reference: str) -> str | None:
    """SHA-256, in hexadecimal, of a task's file; None if it cannot be read."""
    where = reference.rpartition(":")[0]
    file = where if where.endswith(".py") else getattr(sys.modules.get(where), "__file__", None)
    try:
        return hashlib.sha256(Path(file).read_bytes()).hexdigest() if file else None
    except OSError:
        return None


def load_task(reference: str, arguments: Mapping[str, Any], world: World, seed: Callable[[], None]) -> Task:
    """Import the task function and call it.

    Args:
        reference: ``package.module:function`` or ``path/file.py:function``.
        arguments: the function's arguments by name.
        world: passed to the function if it has a parameter of this name.
        seed: called after the module is imported and before the function runs; see ``rank.problem.seed_task``.

    Raises:
        UserError: the module cannot be found or imported, it lacks the function, the arguments do not fit, the function
            does not return a task, or it imports the framework itself, too late to be seeded. Errors in the task's own
            code propagate.
    """
    function = _function(reference)
    call = _bind(function, reference, arguments, world)
    seed()
    seeded = set(sys.modules)
    try:
        task = made(call)
    except (TypeError, ValueError, AttributeError) as error:
        if wrong := _misfits(function, arguments):
            cause = f"{type(error).__name__}: {words(error)}{own_line(error)}"
            what = f"task {reference} fails: {cause}; {', '.join(wrong)}"
            raise UserError(what, "correct task_args: in the run file") from error
        raise
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
    """Call the task function. Raises UserError if it passes a field that tasks do not have, or passes one twice."""
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
    sys.path.insert(0, "")  # find modules in the working directory, like python -m
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
            sys.path.append("")  # after installed packages, for imports while the task runs


def _module_of_file(path: Path) -> Any:
    if not path.is_file():
        fix = "correct task: in the run file; paths start at the working directory"
        raise UserError(f"task file {path} does not exist", fix)
    name = path.stem
    known = getattr(sys.modules.get(name), "__file__", None) or ""
    is_other = name in sys.modules and name not in FROM_FILES and os.path.realpath(known) != os.path.realpath(path)
    if is_other or name in FRAMEWORKS:
        raise UserError(f"task file {path} has the name of a module that the run imports", "rename the file")
    FROM_FILES.add(name)
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UserError(f"task file {path} cannot be imported", "give a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.insert(0, str(path.resolve().parent))  # files next to it can be imported, like those of a script
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
    """Bind the arguments; raises UserError if they do not fit the function's signature."""
    signature = inspect.signature(function)
    given = dict(arguments)
    if "world" in signature.parameters:
        given["world"] = world
    try:
        bound = signature.bind(**given)
    except TypeError as error:
        raise UserError(
            f"task_args do not fit {reference}{signature}: {error}", "correct task_args: in the run file"
        ) from error
    return lambda: function(*bound.args, **bound.kwargs)


def _misfits(function: Callable[..., Any], arguments: Mapping[str, Any]) -> list[str]:
    """The numbers, texts and truth values among the arguments that the function's signature contradicts, in words."""
    found = []
    for name, parameter in inspect.signature(function).parameters.items():
        kinds = [getattr(parameter.annotation, "__name__", parameter.annotation), type(parameter.default).__name__]
        kind = next((kind for kind in kinds if kind in ("bool", "int", "float", "str")), None)
        given = type(arguments.get(name, parameter.default)).__name__
        if kind is not None and name in arguments and given != kind and (given, kind) != ("int", "float"):
            found.append(f"task_args.{name} is {arguments[name]!r}, and the function takes a value of type {kind}")
    return found


EXAMPLES = {
    "torch": {"model": "nn.Linear(4, 3)", "optimizer": "torch.optim.Adam(model.parameters(), lr=1e-3)"},
    "Keras": {"model": "keras.Sequential([...])", "optimizer": "keras.optimizers.Adam(1e-3)"},
}
"""Example values of fields, for messages."""


def named_objects(field: str, value: Any) -> dict[str, Any]:
    """A field's object, or the objects in its dict, by their names in messages, such as ``model['gan']``."""
    if not isinstance(value, Mapping) or not value:
        return {field: value or None} if isinstance(value, Mapping) else {field: value}
    return {f"{field}[{name!r}]": each for name, each in value.items()}


def require_callables(task: Any, framework: str, with_step: bool = False) -> None:
    """Check model, optimizer, loss, forward and metrics of a task.

    Args:
        task: the task to check.
        framework: name of the framework, for messages.
        with_step: whether the task has a custom step, which needs no loss and may train several models.

    Raises:
        UserError: a field is missing, is not a function where one is needed, or holds several objects without a step.
    """
    objects = {**named_objects("model", task.model), **named_objects("optimizer", task.optimizer)}
    for name, value in objects.items():
        if value is None or isinstance(value, (type, str, list, tuple, types.FunctionType)):
            fix = f"give an object: {name}={EXAMPLES[framework][name.partition('[')[0]]}"
            fix += ", or optimizer: {name: adam, lr: 1e-3} in the run file" if name == "optimizer" else ""
            raise UserError(f"{name} of the task is {described(value)}{place_of(value)}", fix)
        if any(str(getattr(each, "__module__", "")).startswith("horovod.") for each in vars(type(value)).values()):
            fix = "give the plain one: hpctrain averages gradients, by Horovod if reduce.kind is horovod"
            raise UserError(f"{name} of the task is Horovod's DistributedOptimizer", fix)
    several = [name for name in ("model", "optimizer") if isinstance(vars(task)[name], Mapping)]
    if several and not with_step:
        fix = "give step=, which says how each of them is trained, or one object"
        raise UserError(f"{several[0]} of the task is a dict, and the task has no step", fix)
    fields = {"loss": (task.loss, "(outputs, batch)"), "forward": (task.forward, "(model, batch)")}
    fields |= {f"metrics[{key!r}]": (value, "(outputs, batch)") for key, value in task.mean_metrics.items()}
    for name, (value, arguments) in fields.items():
        if value is not None or name != "loss" or not with_step:
            own = "torchmetrics" if framework == "torch" else framework
            more = f", or an object: a metric of {own}, or an hpctrain.Metric" if name.startswith("metrics") else ""
            require_function(name, value, arguments, f"{framework} tensors{more}")


def require_function(name: str, value: Any, arguments: str, of: str) -> None:
    """Raise UserError unless a field can be called with these arguments."""
    fix = f"give a function{arguments} over {of}"
    if isinstance(value, type) or not callable(value):
        raise UserError(f"{name} of the task is {described(value)}", fix)
    if isinstance(value, (types.FunctionType, types.MethodType)):
        signature = inspect.signature(value)
        try:
            signature.bind(*[None] * (arguments.count(",") + 1))
        except TypeError:
            raise UserError(f"{name} of the task takes {signature}, not {arguments}{place_of(value)}", fix) from None


def described(value: Any) -> str:
    """Describe a value of a wrong type, for a message."""
    if value is None:
        return "missing"
    if isinstance(value, types.FunctionType):
        return f"the function {value.__name__}"
    if isinstance(value, (str, int, float)):
        return f"{type(value).__name__} {value!r:.40}"
    if isinstance(value, (list, tuple)):
        kinds = ", ".join(kind.__name__ for kind in dict.fromkeys(map(type, value)))
        return f"{kind_of(value)} of {kinds}" if value else f"an empty {type(value).__name__}"
    return kind_of(value)


def place_of(value: Any) -> str:
    """Where a user's function is defined: ``' (task.py:12: `def loss(outputs):`)'``; empty for other values."""
    if not isinstance(value, (types.FunctionType, types.MethodType)):
        return ""
    code = value.__code__
    line = linecache.getline(code.co_filename, code.co_firstlineno).strip()
    return f" ({Path(code.co_filename).name}:{code.co_firstlineno}: `{line}`)"


def require_fields(task: Any) -> None:
    """Check the fields of a task about its data and the training loop; raises UserError if one is missing or wrong."""
    if task.train is None:
        fix = "give data: train={'x': ..., 'y': ...}, NumPy arrays whose first axis runs over the samples, or a path"
        raise UserError("train of the task is missing", fix)
    if isinstance(task.train, tuple) and all(hasattr(one, "shape") for one in task.train):
        fix = "name the arrays: train={'x': x, 'y': y}; the model gets the first one"
        raise UserError(f"train of the task is a tuple of {len(task.train)} arrays", fix)
    if not isinstance(task.metrics, Mapping):
        fix = "give functions by name: metrics={'accuracy': accuracy}"
        raise UserError(f"metrics= of the task is {described(task.metrics)}", fix)
    if not isinstance(task.hooks, (list, tuple)):
        raise UserError(f"hooks= of the task is {described(task.hooks)}", "give a list of hooks: hooks=[MyHook()]")
    fields = {
        "transform": (task.transform, "(sample, rng)", "dicts of NumPy arrays"),
        "collate": (task.collate, "(samples)", "lists of dicts of NumPy arrays"),
        "sampler": (task.sampler, "(epoch)", "hpctrain.Epoch"),
        "schedule": (task.schedule, "(step)", "whole numbers, or for PyTorch TorchScheduler(lambda optimizer: ...)"),
    }
    for name, (value, arguments, of) in fields.items():
        if value is not None and not isinstance(value, TorchScheduler):
            require_function(name, value, arguments, of)
    make: object = task.schedule.make if isinstance(task.schedule, TorchScheduler) else None
    if make is not None and not callable(make):
        fix = "give what makes it: TorchScheduler(lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 10))"
        raise UserError(f"schedule= of the task is a TorchScheduler of {described(make)}", fix)


def require_shares(tensor: Any, layers: Any) -> None:
    """Raise UserError if a task's ``tensor`` or ``layers`` has the wrong type."""
    if not isinstance(tensor, Mapping):
        fix = "give words by patterns of layers' names: tensor={'blocks.*.up': hpctrain.columns}"
        raise UserError(f"tensor= of the task is {described(tensor)}", fix)
    if layers is not None:
        require_function("layers", layers, "(model)", "the model, such as lambda model: [model.embed, *model.blocks]")

"""Fields of a task that are missing, or not what they should be, said before anything is called."""

from __future__ import annotations

import inspect
import linecache
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from hpctrain.errors import UserError
from hpctrain.tasks.definition import TorchScheduler

EXAMPLES = {
    "torch": {"model": "nn.Linear(4, 3)", "optimizer": "torch.optim.Adam(model.parameters(), lr=1e-3)"},
    "Keras": {"model": "keras.Sequential([...])", "optimizer": "keras.optimizers.Adam(1e-3)"},
}
"""How a field may be written."""


def named_objects(field: str, value: Any) -> dict[str, Any]:
    """A field's object, or several, by how a message calls it."""
    if not isinstance(value, Mapping) or not value:
        return {field: value or None} if isinstance(value, Mapping) else {field: value}
    return {f"{field}[{name!r}]": each for name, each in value.items()}


def require_callables(task: Any, framework: str, with_step: bool = False) -> None:
    """Raises UserError if a field of a task is missing, is not a function but should be one, or holds several objects.

    Args:
        task: looked at.
        framework: of its tensors, for people.
        with_step: the task has a custom step, which needs no loss and may train several models.
    """
    objects = {**named_objects("model", task.model), **named_objects("optimizer", task.optimizer)}
    for name, value in objects.items():
        if value is None or isinstance(value, (type, str, list, tuple, types.FunctionType)):
            fix = f"give an object: {name}={EXAMPLES[framework][name.partition('[')[0]]}"
            fix += ", or optimizer: {name: adam, lr: 1e-3} in the run file" if name == "optimizer" else ""
            raise UserError(f"{name} of the task is {spoken(value)}{place_of(value)}", fix)
    several = [name for name in ("model", "optimizer") if isinstance(vars(task)[name], Mapping)]
    if several and not with_step:
        fix = "give step=, which says how each of them is trained, or one object"
        raise UserError(f"{several[0]} of the task is a dict, and the task has no step", fix)
    fields = {"loss": (task.loss, "(outputs, batch)"), "forward": (task.forward, "(model, batch)")}
    fields |= {f"metrics[{key!r}]": (value, "(outputs, batch)") for key, value in task.mean_metrics.items()}
    for name, (value, arguments) in fields.items():
        if value is not None or name != "loss" or not with_step:
            more = ", or give an object: an hpctrain.Metric" if name.startswith("metrics") else ""
            require_function(name, value, arguments, f"{framework} tensors{more}")


def require_function(name: str, value: Any, arguments: str, of: str) -> None:
    """Raises UserError unless a field can be called with these arguments."""
    fix = f"give a function{arguments} over {of}"
    if isinstance(value, type) or not callable(value):
        raise UserError(f"{name} of the task is {spoken(value)}", fix)
    if isinstance(value, (types.FunctionType, types.MethodType)):
        signature = inspect.signature(value)
        try:
            signature.bind(*[None] * (arguments.count(",") + 1))
        except TypeError:
            raise UserError(f"{name} of the task takes {signature}, not {arguments}{place_of(value)}", fix) from None


def spoken(value: Any) -> str:
    """A value of a wrong type, for a message."""
    if value is None:
        return "missing"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if isinstance(value, types.FunctionType):
        return f"the function {value.__name__}"
    if isinstance(value, (str, int, float)):
        return f"{type(value).__name__} {value!r:.40}"
    if isinstance(value, (list, tuple)):
        kinds = ", ".join(kind.__name__ for kind in dict.fromkeys(map(type, value)))
        return f"a {type(value).__name__} of {kinds}" if value else f"an empty {type(value).__name__}"
    return f"a {type(value).__name__}"


def place_of(value: Any) -> str:
    """' (task.py:12: `def loss(outputs):`)': where a function of the user's begins."""
    if not isinstance(value, (types.FunctionType, types.MethodType)):
        return ""
    code = value.__code__
    line = linecache.getline(code.co_filename, code.co_firstlineno).strip()
    return f" ({Path(code.co_filename).name}:{code.co_firstlineno}: `{line}`)"


def require_fields(task: Any) -> None:
    """Raises UserError if what a task says of its data, or of the loop, is missing or not what it should be."""
    if task.train is None:
        fix = "give data: train={'x': ..., 'y': ...}, NumPy arrays whose first axis runs over the samples, or a path"
        raise UserError("train of the task is missing", fix)
    if isinstance(task.train, tuple) and all(map(is_array, task.train)):
        fix = "name the arrays: train={'x': x, 'y': y}; the model gets the first one"
        raise UserError(f"train of the task is a tuple of {len(task.train)} arrays", fix)
    if not isinstance(task.metrics, Mapping):
        fix = "give functions by name: metrics={'accuracy': accuracy}"
        raise UserError(f"metrics= of the task is {spoken(task.metrics)}", fix)
    if not isinstance(task.hooks, (list, tuple)):
        raise UserError(f"hooks= of the task is {spoken(task.hooks)}", "give a list of hooks: hooks=[MyHook()]")
    fields = {
        "transform": (task.transform, "(sample, rng)", "dicts of NumPy arrays"),
        "collate": (task.collate, "(samples)", "lists of dicts of NumPy arrays"),
        "sampler": (task.sampler, "(epoch)", "hpctrain.Epoch"),
        "schedule": (task.schedule, "(step)", "whole numbers, or a TorchScheduler for PyTorch"),
    }
    for name, (value, arguments, of) in fields.items():
        if value is not None and not isinstance(value, TorchScheduler):
            require_function(name, value, arguments, of)
    make: object = task.schedule.make if isinstance(task.schedule, TorchScheduler) else None
    if make is not None and not callable(make):
        fix = "give what makes it: TorchScheduler(lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 10))"
        raise UserError(f"schedule= of the task is a TorchScheduler of {spoken(make)}", fix)


def require_shares(tensor: Any, layers: Any) -> None:
    """Raises UserError if a task's tensor= or layers= has the wrong type."""
    if not isinstance(tensor, Mapping):
        fix = "give words by patterns of layers' names: tensor={'blocks.*.up': hpctrain.columns}"
        raise UserError(f"tensor= of the task is {spoken(tensor)}", fix)
    if layers is not None:
        require_function("layers", layers, "(model)", "the model, such as lambda model: [model.embed, *model.blocks]")


def is_array(value: Any) -> bool:
    """Whether a value has a shape, as arrays and tensors have."""
    return isinstance(value, np.ndarray) or hasattr(value, "shape")

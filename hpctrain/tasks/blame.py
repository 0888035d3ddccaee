"""Errors of a task's own code, in a sentence that names the part of the task and the line."""

from __future__ import annotations

import inspect
import linecache
import re
import traceback
import types
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from hpctrain.errors import HpctrainError, UserError
from hpctrain.tasks.definition import TorchScheduler

MOST_CHARACTERS = 400
"""Of what an error says."""
DUMPS = ("\n\nArguments received by", "\n\nCall arguments received by", "\n\nStack trace", "\nOriginal stack trace")
"""What begins those parts of Keras' and TensorFlow's messages that are not for users."""
PREFIX = re.compile(
    r"Exception encountered when calling [^\n]*\n+|Could not automatically infer [^\n]* Error encountered:"
    r"|\{\{[^}]*\}\}\s*|\x1b\[[0-9;]*m"
)
SUFFIX = re.compile(r"\s*\[Op:\w+\].*", re.S)

EXAMPLES = {
    "torch": {"model": "nn.Linear(4, 3)", "optimizer": "torch.optim.Adam(model.parameters(), lr=1e-3)"},
    "Keras": {"model": "keras.Sequential([...])", "optimizer": "keras.optimizers.Adam(1e-3)"},
}
"""How a field may be written."""


@contextmanager
def blamed(field: str, fix: str) -> Iterator[None]:
    """Errors in the body become UserErrors that name a field of the task, and the line; ours pass through."""
    try:
        yield
    except HpctrainError:
        raise
    except Exception as error:
        raise blame(field, fix, error) from error


def blame(field: str, fix: str, error: BaseException) -> UserError:
    """An error of a task's own code, in a sentence that names a field of the task, and the line."""
    return UserError(f"{field} fails on the first batch: {type(error).__name__}: {words(error)}{own_line(error)}", fix)


def words(error: BaseException) -> str:
    """What an error says, without dumps."""
    text = str(error)
    metadata = vars(error).get("ag_error_metadata")
    if metadata is not None:  # TensorFlow's AutoGraph has put its own account of the stack around the message
        text = metadata.cause_message
    for dump in DUMPS:
        text = text.partition(dump)[0]
    text = " ".join(SUFFIX.sub("", PREFIX.sub("", text)).split())
    return text if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS]} ..."


def own_line(error: BaseException) -> str:
    """' (task.py:12: `return loss`)': the innermost line of the user's own code, else the innermost at all."""
    frames = traceback.extract_tb(error.__traceback__)
    package = str(Path(__file__).parents[1])
    own = [frame for frame in frames if not any(part in frame.filename for part in ("site-packages", package))]
    found = (own or frames)[-1:]
    if not found:
        return ""
    code = f": `{found[0].line}`" if found[0].line and own else ""
    return f" ({Path(found[0].filename).name}:{found[0].lineno}{code})"


def shapes(batch: Mapping[str, Any]) -> str:
    """Names and shapes of a batch's arrays: ``x [32, 8], y [32]``."""
    return ", ".join(f"{name} {list(array.shape)}" for name, array in batch.items())


def target_of(fields: Sequence[str], loss: str) -> str:
    """The array that a stock loss compares outputs with: of two the one that the model does not get.

    Raises UserError if there are more, or fewer.
    """
    if len(fields) != 2:
        raise UserError(
            f"loss={loss} compares the outputs with the second of two arrays, and samples hold {', '.join(fields)}",
            "name the array yourself: loss=lambda outputs, batch: ...(outputs, batch['y'])",
        )
    return fields[1]


def no_such_loss(name: str, known: Sequence[str]) -> UserError:
    """A name that stands for no loss."""
    return UserError(f"loss={name!r} names no loss", f"write one of {', '.join(known)}, or a function(outputs, batch)")


def not_called(name: str) -> UserError:
    """A class in place of an object."""
    return UserError(f"loss={name} is a class", f"make an object of it: loss={name}()")


def no_mean(name: str) -> UserError:
    """A loss that is not the mean over the samples."""
    fix = (
        "leave the mean to it (no reduction, no class weights), or return (sum, weight) from a function(outputs, batch)"
    )
    return UserError(f"loss={name} is not the plain mean over the samples, so that ranks would average it wrongly", fix)


def require_callables(task: Any, framework: str, needs_loss: bool = True) -> None:
    """Raises UserError if a field of a task is missing, or not what it should be; not all tasks need a loss."""
    for name, value in (("model", task.model), ("optimizer", task.optimizer)):
        if value is None or isinstance(value, (type, str, types.FunctionType)):
            fix = f"give an object: {name}={EXAMPLES[framework][name]}"
            raise UserError(f"{name} of the task is {spoken(value)}{place_of(value)}", fix)
    fields = {"loss": (task.loss, "(outputs, batch)"), "forward": (task.forward, "(model, batch)")}
    fields |= {f"metrics[{key!r}]": (value, "(outputs, batch)") for key, value in task.metrics.items()}
    for name, (value, arguments) in fields.items():
        if value is not None or name != "loss" or needs_loss:
            require_function(name, value, arguments, f"{framework} tensors")


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
    return f"{type(value).__name__} {' '.join(repr(value).split()):.40}"


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


def is_array(value: Any) -> bool:
    """Whether a value has a shape, as arrays and tensors have."""
    return isinstance(value, np.ndarray) or hasattr(value, "shape")


def no_such_field(error: TypeError, fields: Sequence[str]) -> UserError:
    """A task that could not be made, since an argument has a name that no field has, or is given twice."""
    return UserError(f"the task cannot be made: {words(error)}{own_line(error)}", f"its fields are {', '.join(fields)}")


def of_float64(batch: Mapping[str, Any]) -> str:
    """What is added to a fix if arrays have NumPy's type of numbers, and not that of models."""
    wide = [name for name, array in batch.items() if str(array.dtype).rpartition(".")[2] == "float64"]
    return f". {', '.join(wide)} is float64 and models are float32: use array.astype(np.float32)" if wide else ""

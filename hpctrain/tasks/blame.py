"""Errors of a task's own code, in a sentence that names the part of the task and the line."""

from __future__ import annotations

import re
import traceback
import types
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hpctrain.errors import HpctrainError, UserError

MOST_CHARACTERS = 400
"""Of what an error says."""
DUMPS = ("\n\nArguments received by", "\n\nCall arguments received by", "\n\nStack trace", "\nOriginal stack trace")
"""What begins those parts of Keras' and TensorFlow's messages that are not for users."""
PREFIX = re.compile(r"Exception encountered when calling [^\n]*\n+|\{\{[^}]*\}\}\s*|\x1b\[[0-9;]*m")
SUFFIX = re.compile(r"\s*\[Op:\w+\].*", re.S)


@contextmanager
def blamed(field: str, fix: str) -> Iterator[None]:
    """Errors in the body become UserErrors that name a field of the task, and the line; ours pass through."""
    try:
        yield
    except HpctrainError:
        raise
    except Exception as error:
        what = f"{field} fails on the first batch: {type(error).__name__}: {words(error)}{own_line(error)}"
        raise UserError(what, fix) from error


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


def calling_line() -> str:
    """' (task.py:12: `ctx.update()`)': the line of the user's own code that is running, if there is one."""
    package = str(Path(__file__).parents[1])
    for frame in reversed(traceback.extract_stack()):
        if not any(part in frame.filename for part in ("site-packages", f"{package}/frameworks", __file__)):
            code = f": `{frame.line}`" if frame.line else ""
            return f" ({Path(frame.filename).name}:{frame.lineno}{code})"
    return ""


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


def named_objects(field: str, value: Any) -> dict[str, Any]:
    """A field's object, or several, by how a message calls it."""
    if not isinstance(value, Mapping) or not value:
        return {field: value or None} if isinstance(value, Mapping) else {field: value}
    return {f"{field}[{name!r}]": each for name, each in value.items()}


def require_callables(task: Any, framework: str, with_step: bool = False) -> None:
    """Raises UserError if a field of a task is not a function but should be one, or holds several objects.

    Args:
        task: looked at.
        framework: of its tensors, for people.
        with_step: the task has a step of its own, which needs no loss and may train several models.
    """
    objects = {**named_objects("model", task.model), **named_objects("optimizer", task.optimizer)}
    for name, value in objects.items():
        if isinstance(value, (type, str, types.FunctionType)) or value is None:
            kind = f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"
            raise UserError(f"{name} of the task is {kind}", f"give an object: {name}=..., with its arguments by name")
    metrics = {f"metrics[{name!r}]": metric for name, metric in task.mean_metrics.items()}
    fields = {"loss": task.loss, "forward": task.forward, **metrics}
    if with_step:
        fields = {name: value for name, value in fields.items() if name != "loss" or value is not None}
    elif several := [name for name in ("model", "optimizer") if isinstance(vars(task)[name], Mapping)]:
        fix = "give step=, which says how each of them is trained, or one object"
        raise UserError(f"{several[0]} of the task is a dict, and the task has no step", fix)
    for name, value in fields.items():
        if isinstance(value, type) or not callable(value):
            kind = f"the class {value.__name__}" if isinstance(value, type) else f"{type(value).__name__} {value!r:.40}"
            arguments = "(model, batch)" if name == "forward" else "(outputs, batch)"
            fix = f"give a function{arguments} over {framework} tensors"
            if name.startswith("metrics"):
                fix += f", or an object: {value.__name__}()" if isinstance(value, type) else ", or an hpctrain.Metric"
            raise UserError(f"{name} of the task is {kind}", fix)

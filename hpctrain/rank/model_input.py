"""Which array of a batch the model gets, and which the loss: by the task's names or the data's own order, never by the
alphabet."""

from __future__ import annotations

import types
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from hpctrain.data.dataset import Samples, is_ordered
from hpctrain.errors import UserError
from hpctrain.tasks.definition import Task, first_field, in_order
from hpctrain.train.walk_objects import reached


def takes_first(task: Task) -> bool:
    """Whether the model gets a batch's first array, or ``fit`` its arrays in order."""
    return task.forward is first_field and getattr(task, "fit_data", in_order) is in_order


def takes_second(judge: Any) -> bool:
    """Whether a loss or metric is an object, or a name, of a framework: it gets the second of two arrays."""
    home = getattr(judge, "__module__", "") if isinstance(judge, types.FunctionType) else type(judge).__module__
    return isinstance(judge, str) or home.partition(".")[0] in ("torch", "keras", "torchmetrics")


def arrays_named(function: Any, names: Sequence[str]) -> list[str]:
    """Those arrays that a user's function names: as constants of its code, or in what it holds and calls."""
    texts: set[str] = set()
    for _, value in reached(function, lambda value: False):
        texts.update([value] if isinstance(value, str) else texts_of(getattr(value, "__code__", None)))
    return [name for name in names if name in texts]


def texts_of(code: types.CodeType | None) -> Iterator[str]:
    """The text constants of code and the functions that it defines."""
    for value in code.co_consts if code else ():
        if isinstance(value, types.CodeType):
            yield from texts_of(value)
        elif isinstance(value, str):
            yield value


def input_first(task: Task, train: Any, names: Sequence[str]) -> tuple[str, ...]:
    """The names of a training batch's arrays, the model's input first, if that order matters.

    Args:
        task: as the user returned it, with its loss by name or as an object.
        train: the opened training data.
        names: the arrays of a training batch, in its order.

    Raises:
        UserError: nothing says which array is the input.
    """
    by_name = [one for one in (task.loss, *task.metrics.values()) if one is not None and not takes_second(one)]
    matters = takes_first(task) or len(by_name) < len(task.metrics) + (task.loss is not None)
    listed = [name for name in train.fields if name in names]
    if is_ordered(train) or not matters or len(names) < 2 or list(names) not in (listed, ["x", "y"]):
        return tuple(names)
    if set(names) == {"x", "y"}:
        return "x", "y"
    if takes_first(task):
        used = arrays_named(by_name, names)
        inputs = [name for name in names if used and name not in used]
    else:
        inputs = arrays_named(task.forward, names)
    if len(inputs) != 1:
        raise UserError(
            f"nothing says which array the model gets: the data list {', '.join(names)} alphabetically",
            "name them in order, the model's input first: train=hpctrain.open_dataset(..., fields=(...)); or give "
            f"forward=lambda model, batch: model(batch[{names[-1]!r}]) and loss=lambda outputs, batch: ...",
        )
    return inputs[0], *(name for name in names if name != inputs[0])


def described(task: Task, names: Sequence[str], batch: Samples) -> str:
    """Says which arrays of a batch the model and the loss get: ``model gets state [1, 24, 24], loss gets later``.

    Args:
        task: with its loss as a function.
        names: the batch's arrays, if the model gets the first; else empty.
        batch: a training batch.
    """
    inputs = names[:1] or arrays_named(task.forward, list(batch))
    shown = ", ".join(f"{name} {list(batch[name].shape[1:])}" for name in inputs if name in batch)
    loss = getattr(task, "given_loss", task.loss)
    own = isinstance(loss, (types.FunctionType, partial)) or not names
    compared = arrays_named(loss, list(batch)) if own else names[1:]
    return f"model gets {shown or 'the batch'}, loss gets {', '.join(compared) or 'the batch'}"

"""Finds the parts of a model that a layer uses. Of a method, these are the attributes of ``self`` that it reads."""

from __future__ import annotations

import dis
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor
from torch.nn import Module, Parameter

from hpctrain.errors import UserError
from hpctrain.train.walk_objects import reached

READS = ("LOAD_ATTR", "LOAD_METHOD")
"""Instructions that read an attribute of the value that the one before has loaded."""


def used_by(call: Any, model: Module, what: str) -> Iterator[Tensor]:
    """Yields parameters and buffers that a layer uses: those of a module, or of what a function holds.

    Raises UserError if it uses the whole model.
    """
    for value in parts_of(call):
        if value is model:
            raise UserError(
                f"{what} uses the whole model, so the parameters it needs are not known",
                "give modules of the model, a method that uses self only to read attributes of it (self.embed), or "
                "functools.partial(function, module) of a function that gets modules",
            )
        if isinstance(value, Module):
            yield from (*value.parameters(), *value.buffers())
        else:
            yield value


def parts_of(call: Any) -> Iterator[Module | Tensor]:
    """Yields the outermost modules and tensors that a layer uses; some perhaps more than once."""
    waiting = [call]
    known: set[tuple[int, Callable[..., Any]]] = set()
    while waiting:
        for _, value in reached(waiting.pop(), lambda one: isinstance(one, (Module, Tensor)) or is_method(one)):
            if isinstance(value, (Module, Tensor)):
                yield value
            elif is_method(value) and (id(value.__self__), value.__func__) not in known:
                known.add((id(value.__self__), value.__func__))
                waiting += (value.__func__, *read_by(value.__func__, value.__self__))


def held_by(call: Any) -> Parameter | None:
    """A parameter that a function holds itself, in place of the module that has it."""
    found = (value for _, value in reached(call, lambda one: isinstance(one, (Module, Tensor)) or is_method(one)))
    return next((value for value in found if isinstance(value, Parameter)), None)


def is_method(value: Any) -> bool:
    """Whether a value is a method of a module."""
    return isinstance(value, types.MethodType) and isinstance(value.__self__, Module)


def read_by(function: Any, module: Module) -> list[Any]:
    """What a method reads of its module: the values of attributes; the module itself if that is not all it does."""
    code = getattr(function, "__code__", None)
    if code is None or not code.co_argcount:
        return [module]
    own = code.co_varnames[0]
    found: list[Any] = []
    steps = [step for step in dis.get_instructions(code) if step.opname != "EXTENDED_ARG"]
    for number, step in enumerate(steps):
        is_variable = step.opcode in dis.haslocal or step.opcode in dis.hasfree
        names = step.argval if isinstance(step.argval, tuple) else (step.argval,)  # one instruction may load two
        if not is_variable or own not in names:
            continue
        following = steps[number + 1]
        if own in names[:-1] or following.opname not in READS:
            return [module]
        value: Any = module
        for read in steps[number + 1 :]:
            if read.opname not in READS or not isinstance(value, Module):
                break
            value = attribute(value, read.argval)
        found.append(value)
    return found


def attribute(module: Module, name: str) -> Any:
    """An attribute of a module, the getter of a property as a method; the module if only running code would tell."""
    kind = type(module)
    if kind.__getattr__ is not Module.__getattr__ or kind.__getattribute__ is not object.__getattribute__:
        return module
    shared = inspect.getattr_static(kind, name, None)
    if isinstance(shared, property):
        return types.MethodType(shared.fget, module) if shared.fget else module
    is_plain = not hasattr(shared, "__get__") or isinstance(shared, (types.FunctionType, staticmethod, classmethod))
    return getattr(module, name, module) if is_plain else module

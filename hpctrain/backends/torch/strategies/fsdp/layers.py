"""The layers of a model that are gathered, or compiled, one after the other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import torch
from torch.nn import Module, ModuleDict, ModuleList, ParameterDict, ParameterList, Sequential

from hpctrain.errors import UserError

LISTS = (ModuleList, ModuleDict, ParameterList, ParameterDict)
"""Containers, which are not called themselves, unless a subclass defines forward."""
REFUSED = (ModuleList, ModuleDict) if torch.__version__ < "2.12" else ()
"""Classes of which FSDP2 takes no subclass, even one that defines forward."""


def layers_of(model: Module, classes: Sequence[str] = ()) -> list[Module]:
    """The members of the model's lists and sequences, and attributes of one module that are blocks of one class; or the
    outermost modules of the named classes.

    Layers without parameters, that share one with others, or that FSDP2 refuses are left out: their parameters are
    gathered with the rest of the model. Raises UserError if no module is of a named class.
    """
    require_classes(model, classes)
    every = of_classes(model, classes) if classes else outermost(model)
    found = [layer for layer in every if not isinstance(layer, REFUSED)]
    below = {id(module) for layer in found for module in layer.modules()}
    users = Counter(id(one) for layer in found for one in layer.parameters())
    for module in model.modules():
        users.update(id(one) for one in module._parameters.values() if id(module) not in below)
    owned = [(layer, [id(one) for one in layer.parameters()]) for layer in found]
    return [layer for layer, own in owned if own and all(users[one] == 1 for one in own)]


def of_classes(module: Module, classes: Sequence[str]) -> Iterator[Module]:
    """Outermost modules of the named classes inside another."""
    for child in module.children():
        if type(child).__name__ in classes:
            yield child
        else:
            yield from of_classes(child, classes)


def require_classes(model: Module, classes: Sequence[str]) -> None:
    """Raises UserError if no module inside the model is of one of the classes."""
    known = {type(module).__name__ for module in model.modules() if module is not model}
    if unknown := [name for name in classes if name not in known]:
        raise UserError(
            f"parallel.layers: no module of the model is of the class {unknown[0]}",
            f"classes of its modules are: {', '.join(sorted(known)) or 'none'}",
        )


def outermost(module: Module) -> Iterator[Module]:
    """Outermost non-container modules in containers, or of a class that occurs several times, without such inside."""
    classes = Counter(type(child) for child in module.children() if any(child.children()))
    for child in module.children():
        is_block = classes[type(child)] > 1 and not any(outermost(child))
        if (is_container(module) or is_block) and not is_container(child):
            yield child
        else:
            yield from outermost(child)


def is_container(module: Module) -> bool:
    """Whether a module is only a container, not called itself."""
    return type(module) is Sequential or (isinstance(module, LISTS) and type(module).forward is Module.forward)

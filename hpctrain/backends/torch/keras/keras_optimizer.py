"""A Keras optimizer as one of PyTorch: its own update, on this rank's parameters or rows of them."""

from __future__ import annotations

import copy
from typing import Any

import keras
import torch
from torch import Tensor
from torch.optim import Optimizer

from hpctrain.backends.keras.keras_model import flat, own_learning_rate, slots_of
from hpctrain.backends.torch.keras.keras_module import KerasModule
from hpctrain.errors import UserError

ELEMENTWISE = {"SGD", "Adam", "AdamW", "Adamax", "Adagrad", "Adadelta", "RMSprop", "Lion", "Ftrl"}
"""Keras' optimizers that update each element from its own gradient and state."""
SEPARATE = {"Adafactor", "Lamb", "Muon"}
"""Those that update each parameter from its own."""


class KerasOptimizer(Optimizer):
    """See above. Slots are PyTorch's state of each parameter, under Keras' names; counters are in the group.

    Keras' variables are made by the first step, when the parameters, or rows of them, are those that this rank updates.

    Args:
        keras_optimizer: an optimizer that is not built.
        module: its model.

    Raises:
        UserError: it is built already.
    """

    __slots__ = ("rate",)
    """Not in ``vars``, so the search for undeclared state leaves it out: it repeats what Keras' variable holds."""

    def __init__(self, keras_optimizer: keras.optimizers.Optimizer, module: KerasModule) -> None:
        if keras_optimizer.built:
            raise UserError(
                f"the optimizer {type(keras_optimizer).__name__} is built already, for the weights that it then had",
                "make a new one in the task, and leave optimizer.build and fit out",
            )
        own_rate = own_learning_rate(keras_optimizer)
        self.rate = float(keras_optimizer.learning_rate) if own_rate is None else own_rate
        """The rate that Keras' variable holds."""
        trained = [one for one in module.parameters() if one.requires_grad]
        super().__init__(trained, {"lr": self.rate})
        self.keras_optimizer = keras_optimizer
        self.has_schedule = own_rate is None
        self.elementwise = separability(keras_optimizer, module)
        self.updated: list[keras.Variable] = []
        """Variables over this rank's parameters, in the group's order."""
        self.held: list[tuple[int | None, str, keras.Variable]] = []
        """(index of the parameter, slot, variable); (None, key of the group, variable) of what belongs to none."""
        self.hold(None, "iteration", keras_optimizer._iterations)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Applies the gradients as ``fit`` would."""
        own, group = self.keras_optimizer, self.param_groups[0]
        if not own.built:
            self.build(group["params"])
        self.follow()
        if not self.has_schedule and group["lr"] != self.rate:
            self.rate = group["lr"]
            own.learning_rate.assign(self.rate)
        if self.updated:
            own.apply([parameter.grad for parameter in group["params"]], self.updated)
        else:  # this rank has no rows, but counts
            own._iterations.assign_add(1)
        if self.has_schedule:
            group["lr"] = keras.ops.convert_to_tensor(own.learning_rate)

    def build(self, parameters: list[Tensor]) -> None:
        """Makes the optimizer's variables for the parameters that it has by now."""
        self.updated = [variable_over(parameter) for parameter in parameters]
        # Keras knows them by the ids of the module's variables.
        excluded: set[int] = getattr(self.keras_optimizer, "_exclude_from_weight_decay", set())
        pairs = zip(parameters, self.updated, strict=True)
        excluded |= {id(one) for parameter, one in pairs if id(vars(parameter)["keras_variable"]) in excluded}
        places = {flat(one.path): index for index, one in enumerate(self.updated)}
        self.keras_optimizer.build(self.updated)
        for variable, slot, weight in slots_of(self.keras_optimizer, list(places)):
            if slot not in ("iteration", "learning_rate"):
                self.hold(places.get(weight), slot, variable)

    def hold(self, index: int | None, slot: str, variable: keras.Variable) -> None:
        """Adds a variable to PyTorch's state, unless a value for it has been loaded there."""
        self.held.append((index, slot, variable))
        self.holder(index).setdefault(slot, variable._value.data)

    def holder(self, index: int | None) -> dict[str, Any]:
        """Where PyTorch keeps the state of a parameter, or of none."""
        group = self.param_groups[0]
        return group if index is None else self.state[group["params"][index]]

    def follow(self) -> None:
        """Takes over what was loaded, and puts the variables' own tensors in its place."""
        for index, slot, variable in self.held:
            holder = self.holder(index)
            if holder[slot].data_ptr() != variable._value.data_ptr():
                variable.assign(holder[slot])
                holder[slot] = variable._value.data


def variable_over(parameter: Tensor) -> keras.Variable:
    """A copy of the Keras variable of a parameter, or of rows of it, over that memory."""
    variable = copy.copy(vars(parameter)["keras_variable"])
    variable._value, variable._shape = parameter, tuple(parameter.shape)
    return variable


def separability(optimizer: keras.optimizers.Optimizer, module: KerasModule) -> bool | None:
    """Whether it updates each element by itself, or only each parameter (False); None if it may mix parameters."""
    names = {kind.__name__ for kind in type(optimizer).__mro__}
    if optimizer.global_clipnorm is not None:
        return None
    if type(optimizer).__module__.partition(".")[0] != "keras":
        return getattr(optimizer, "elementwise", None)
    if names & SEPARATE:
        return False
    whole = optimizer.clipnorm is not None or any(
        vars(one)["keras_variable"].constraint is not None for one in module.parameters()
    )
    return not whole if names & ELEMENTWISE else None

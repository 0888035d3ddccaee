"""A Keras model as a plain PyTorch module: weights are its parameters; statistics, counters and seeds its buffers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import keras
import torch
from torch import Tensor

from hpctrain.backends.keras.keras_model import InMode, named_variables
from hpctrain.backends.torch.torch_metrics import full_precision
from hpctrain.errors import UserError
from hpctrain.tasks.definition import first_field
from hpctrain.train.seeds import derive

SEED = "seed_generator_state"
"""End of the name of a seed generator's state."""


class KerasModule(torch.nn.Module):
    """See above. Names are those of a checkpoint of the TensorFlow backend: ``dense/kernel``.

    The model itself is not a submodule: Keras registers all variables of a layer as parameters, statistics included.

    Args:
        model: the built model.

    Raises:
        UserError: two variables have the same name.
    """

    def __init__(self, model: keras.Model) -> None:
        super().__init__()
        self.penalty: Any = 0.0
        """Sum of what layers gave to ``add_loss`` and of regularizers in the last pass."""
        self.variables: dict[str, keras.Variable] = {}
        self.function: Callable[[Any, Any], Any] = first_field
        """What ``forward`` applies to the model and a batch."""
        self.hidden = [model, InMode(lambda batch: self.function(model, batch))]
        for full, variable, is_weight in named_variables(model):
            name = full.partition("/")[2].replace(".", "_")
            if name in self.variables:
                raise UserError(
                    f"several variables of the Keras model are called {name}",
                    "give layers of the same model different names",
                )
            self.variables[name] = variable
            if is_weight:
                self.register_parameter(name, variable._value)
                variable._value.keras_variable = variable
            else:
                self.register_buffer(name, variable._value.data)
        for layer in model._flatten_layers():
            layer._modules.pop("_torch_params", None)  # it would keep the whole model alive, whatever a plan does
        self.follow()

    @property
    def keras_model(self) -> keras.Model:
        """The model, with the tensors that this module has now."""
        self.follow()
        return self.hidden[0]

    def follow(self) -> None:
        """Gives the model's variables the tensors that this module has now, which a device or a plan may replace."""
        for name, variable in self.variables.items():
            value = self._parameters[name] if name in self._parameters else self._buffers[name]
            if variable._value is not value:
                variable._value = value

    def forward(self, batch: Mapping[str, Tensor], function: Callable[[Any, Any], Any]) -> Any:
        """Outputs of ``function(model, batch)``, in full precision; dtype policies of layers replace autocast."""
        model, mode = self.hidden
        self.follow()
        model._clear_losses()  # InMode, the outermost layer, clears only its own
        self.function = function
        with torch.autocast(next(iter(batch.values())).device.type, enabled=False):
            outputs = mode(dict(batch), training=self.training)
            self.penalty = sum(one.float() if one.dtype.itemsize < 4 else one for one in model.losses)
        return full_precision(outputs)

    def reseed(self, seed: int) -> None:
        """Seeds the generators of random layers, whose state is of type int32."""
        generators = [buffer for name, buffer in self.named_buffers() if name.endswith(SEED)]
        for number, state in enumerate(generators):
            state.copy_(torch.tensor([derive(seed, number) % 2**31, 0], dtype=state.dtype))

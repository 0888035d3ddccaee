"""A Keras model as a PyTorch module: weights are parameters; statistics, counters and seeds are buffers."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.nn import Module, ModuleDict, Parameter

from hpctrain.backends.keras.keras_model import InMode, named_variables
from hpctrain.backends.torch.torch_metrics import full_precision
from hpctrain.errors import UserError
from hpctrain.tasks.definition import first_field
from hpctrain.train.seeds import derive

SEED = "seed_generator_state"
"""End of the name of a seed generator's state."""


class KerasPart(Module):
    """Has tensors of Keras variables, by the variables' names."""

    def __init__(self) -> None:
        super().__init__()
        self.variables: dict[str, keras.Variable] = {}

    def hold(self, name: str, variable: keras.Variable, is_weight: bool) -> None:
        """Makes a variable's tensor a parameter or buffer of this module."""
        self.variables[name] = variable
        if is_weight:
            self.register_parameter(name, variable._value)
            variable._value.keras_variable = variable
        else:
            self.register_buffer(name, variable._value.data)

    def __setattr__(self, name: str, value: Any) -> None:
        """Gives a variable its tensor when FSDP2 gathers it, and when it frees that memory again."""
        super().__setattr__(name, value)
        if name in vars(self).get("variables", ()):
            self.variables[name]._value = value

    def follow(self) -> None:
        """Gives the variables the tensors that this module has now, which a device may replace."""
        for name, variable in self.variables.items():
            value = self._parameters[name] if name in self._parameters else self._buffers[name]
            if variable._value is not value:
                variable._value = value

    def penalties(self) -> list[Any]:
        """What the regularizers of trained variables give."""
        trained = [one for one in self.variables.values() if one.regularizer is not None and one._value.requires_grad]
        return [one.regularizer(one._value) for one in trained]


class KerasLayer(KerasPart):
    """Has the tensors of a Keras layer and of those inside it, and computes it, so that a plan may gather them.

    The layer is not a submodule: Keras registers all variables of a layer as parameters, statistics included.

    Args:
        layer: the built layer.
    """

    def __init__(self, layer: keras.Layer) -> None:
        super().__init__()
        self.call, self.inner = functools.partial(type(layer).forward, layer), list(layer._flatten_layers())
        self.penalty: list[Any] | None = None
        """What the regularizers have given in this pass."""
        layer.forward = functools.partial(KerasLayer.called, self)

    def called(self, *args: Any, **kwargs: Any) -> Any:
        """What the layer computes."""
        if not isinstance(self, FSDPModule):
            return self.call(*args, **kwargs)
        # FSDP2 replaces inputs by others, which lack their masks.
        masks = [keras.src.backend.get_keras_mask(one) for one in keras.tree.flatten((args, kwargs))]
        return self(self.call, args, kwargs, masks)[0]

    def forward(self, call: Callable[..., Any], args: Any, kwargs: Any, masks: Any = ()) -> Any:
        """Also returns all that depends on weights and is added to the loss: FSDP2 gathers a layer for the backward
        pass of its outputs."""
        for one, mask in zip(keras.tree.flatten((args, kwargs)), masks, strict=False):
            if mask is not None:
                keras.src.backend.set_keras_mask(one, mask)
        outputs = call(*args, **kwargs)
        if self.penalty is None:
            self.penalty = self.penalties()
        return outputs, self.penalty, [one for layer in self.inner for one in layer._get_own_losses()]

    def begin(self) -> None:
        """Forgets the last pass, which may have failed."""
        self.penalty = None

    def end(self) -> list[Any]:
        """What the regularizers have given, at the end of a pass of the model."""
        if not isinstance(self, FSDPModule):
            return self.penalties()
        if self.penalty is None:  # a layer that was not called
            self(tuple, (), {})
        return self.penalty or []


class KerasModule(KerasPart):
    """See above. Names are those of a checkpoint of the TensorFlow backend: ``dense/kernel``.

    Args:
        model: the built model.

    Raises:
        UserError: two variables have the same name.
    """

    casts_weights = True
    """See sharded_model.gathering."""

    def __init__(self, model: keras.Model) -> None:
        super().__init__()
        self.penalty: Any = 0.0
        """Sum of what layers gave to ``add_loss`` and of regularizers in the last pass."""
        self.holders: dict[str, KerasPart] = {}
        """Which module has a variable, by its name."""
        self.function: Callable[[Any, Any], Any] = first_field
        """What ``forward`` applies to the model and a batch."""
        self.hidden = [model, InMode(lambda batch: self.function(model, batch))]
        layers = [layer for layer in outermost(model) if layer.variables]
        users = Counter(id(one) for layer in layers for one in layer.variables)
        self.layers: list[KerasLayer] = [type(type(layer).__name__, (KerasLayer,), {})(layer) for layer in layers]
        names = (f"{number}_{layer.name.replace('.', '_')}" for number, layer in enumerate(layers))
        self.inside = ModuleDict(dict(zip(names, self.layers, strict=True)))
        pairs = zip(layers, self.layers, strict=True)
        holder_of = {id(one): own for layer, own in pairs for one in layer.variables if users[id(one)] == 1}
        for full, variable, is_weight in named_variables(model):
            name = full.partition("/")[2].replace(".", "_")
            if name in self.holders:
                raise UserError(
                    f"several variables of the Keras model are called {name}",
                    "give layers of the same model different names",
                )
            self.holders[name] = holder_of.get(id(variable)) or self
            self.holders[name].hold(name, variable, is_weight)
        for layer in model._flatten_layers():
            layer._modules.pop("_torch_params", None)  # it would keep the whole model alive, whatever a plan does
        self.register_state_dict_post_hook(rename)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(renamed)  # type: ignore[no-untyped-call]
        self.trained = self.trainable()
        self.follow()

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Parameter]]:
        """Those of the variables, in their order, by their names."""
        if not recurse:
            return super().named_parameters(prefix, recurse, remove_duplicate)
        every = ((name, holder._parameters.get(name)) for name, holder in self.holders.items())
        return ((name, one) for name, one in every if one is not None)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """See named_parameters."""
        if not recurse:
            return super().named_buffers(prefix, recurse, remove_duplicate)
        every = ((name, holder._buffers.get(name)) for name, holder in self.holders.items())
        return ((name, one) for name, one in every if one is not None)

    def trainable(self) -> list[bool]:
        """Which variables are trained, in their order."""
        return [holder.variables[name].trainable for name, holder in self.holders.items()]

    @property
    def without_tensors(self) -> list[keras.Layer]:
        """Modules that compute with the tensors of this one, which are saved and moved with it."""
        return list(self.hidden[0]._flatten_layers())

    @property
    def keras_model(self) -> keras.Model:
        """The model, with the tensors that this module has now. Raises UserError if these are rows of whole ones."""
        if isinstance(self, FSDPModule):
            raise UserError(
                "a rank has only rows of the Keras model's weights under parallel.shard: parameters and gradients",
                "set parallel.shard: optimizer; checkpoint.init_from reads .safetensors under any plan",
            )
        self.follow()
        return self.hidden[0]

    def follow(self) -> None:
        """See KerasPart."""
        super().follow()
        for layer in self.layers:
            layer.follow()

    def forward(self, batch: Mapping[str, Tensor], function: Callable[[Any, Any], Any]) -> Any:
        """Outputs of ``function(model, batch)``, in full precision; dtype policies of layers replace autocast."""
        model, mode = self.hidden
        if isinstance(self, FSDPModule) and self.trainable() != self.trained:
            raise UserError(
                "layer.trainable of the Keras model has changed in training, and parallel.shard: parameters and "
                "gradients do not follow it",
                "freeze layers in the task, or set parallel.shard: optimizer",
            )
        self.follow()
        model._clear_losses()  # InMode, the outermost layer, clears only its own
        self.function = function
        for layer in self.layers:
            layer.begin()
        with torch.autocast(next(iter(batch.values())).device.type, enabled=False):
            outputs = mode(dict(batch), training=self.training)
            losses = [one for layer in model._flatten_layers() for one in layer._get_own_losses()]
            losses += [one for layer in self.layers for one in layer.end()] + self.penalties()
            self.penalty = sum(one.float() if one.dtype.itemsize < 4 else one for one in losses)
        return full_precision(outputs)

    def reseed(self, seed: int) -> None:
        """Seeds the generators of random layers, whose state is of type int32."""
        generators = [buffer for name, buffer in self.named_buffers() if name.endswith(SEED)]
        for number, state in enumerate(generators):
            state.copy_(torch.tensor([derive(seed, number) % 2**31, 0], dtype=state.dtype))


def outermost(layer: keras.Layer) -> list[keras.Layer]:
    """The layers of a model, each once: those of models inside it, but none inside another layer."""
    found: dict[int, keras.Layer] = {}
    for one in layer._layers:
        found |= {id(inner): inner for inner in (outermost(one) if isinstance(one, keras.Model) else [one])}
    return list(found.values())


def rename(module: Module, state: dict[str, Any], prefix: str, *ignored: Any) -> None:
    """Gives the values of a state dict the names of the variables."""
    for key in [key for key in state if key.startswith(f"{prefix}inside.")]:
        state[prefix + key.rpartition(".")[2]] = state.pop(key)


def renamed(module: KerasModule, state: dict[str, Any], prefix: str, *ignored: Any) -> None:
    """Undoes ``rename``."""
    for inner, layer in zip(module.inside, module.layers, strict=True):
        for name in layer.variables:
            if prefix + name in state:
                state[f"{prefix}inside.{inner}.{name}"] = state.pop(prefix + name)

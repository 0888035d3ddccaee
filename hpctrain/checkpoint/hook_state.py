"""State of hooks in a checkpoint: values of JSON are in the manifest, arrays among the tensors."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hpctrain.checkpoint.format.layout import TensorSpec, check_tensors
from hpctrain.checkpoint.reading import Loaded
from hpctrain.checkpoint.resume_compat import flat
from hpctrain.checkpoint.saver import host_array
from hpctrain.errors import UserError
from hpctrain.train.hooks import Hook
from hpctrain.train.state import ArrayTensor

PREFIX = "hooks/"


@dataclass(frozen=True)
class HookState:
    """State of all hooks that have some, at one step."""

    texts: Mapping[str, str]
    """JSON by hook, with Python's NaN and Infinity."""
    tensors: Sequence[ArrayTensor]
    """``hooks/<hook>/<key>``, over the hooks' own arrays."""

    def to_compare(self) -> list[ArrayTensor]:
        """All of it as tensors."""
        texts = [
            ArrayTensor(PREFIX + name, np.frombuffer(text.encode(), np.uint8)) for name, text in self.texts.items()
        ]
        return [*texts, *self.tensors]


def state_of(hooks: Sequence[Hook]) -> HookState:
    """Asks all hooks. Raises UserError if a checkpoint cannot keep what one of them returns."""
    texts: dict[str, str] = {}
    tensors: list[ArrayTensor] = []
    for hook in hooks:
        state = hook.state_dict()
        if not state:
            continue
        if hook.name in texts:
            raise UserError(f"two hooks are called {hook.name!r}, and both have state", "give each a name of its own")
        arrays = {key: value for key, value in state.items() if isinstance(value, np.ndarray)}
        try:
            texts[hook.name] = json.dumps({key: value for key, value in state.items() if key not in arrays})
        except (TypeError, ValueError) as error:
            fix = "return values of JSON and NumPy arrays of numbers"
            raise UserError(f"the state of hook {hook.name!r} cannot be saved: {error}", fix) from error
        tensors += [ArrayTensor(f"{PREFIX}{hook.name}/{key}", host_array(array)) for key, array in arrays.items()]
    check_tensors([TensorSpec(tensor.name, tensor.shape, tensor.dtype, None) for tensor in tensors])
    return HookState(texts, tensors)


def restore(hooks: Sequence[Hook], loaded: Loaded) -> list[str]:
    """Gives each hook its state from a checkpoint; the names of those that are not there to take theirs."""
    texts = saved_texts(loaded.meta)
    for hook in hooks:
        if hook.name in texts:
            prefix = f"{PREFIX}{hook.name}/"
            names = [name for name in loaded.arrays if name.startswith(prefix)]
            arrays = {name.removeprefix(prefix): np.array(loaded.arrays[name]) for name in names}
            hook.load_state_dict({**json.loads(texts[hook.name]), **arrays})
    return sorted(texts.keys() - {hook.name for hook in hooks})


def saved_texts(meta: Mapping[str, Any]) -> dict[str, str]:
    """JSON by hook. Version 0.1 kept what is now two hooks' state among the run's own."""
    if "hooks" in meta:
        return dict(meta["hooks"])
    state, config = meta["state"], flat(meta["identity"]["config"])
    states: dict[str, dict[str, Any]] = {}
    if config.get("train.early_stop.metric") is not None:
        states["early_stop"] = {
            "metric": config["train.early_stop.metric"],
            "mode": config["train.early_stop.mode"],
            "best": state["early_stop_best"],
            "evaluations_since_best": state["evaluations_since_best"],
        }
    if config.get("checkpoint.best_metric") is not None:
        states["checkpoint"] = {
            "metric": config["checkpoint.best_metric"],
            "mode": config["checkpoint.best_mode"],
            "best": state["checkpoint_best"],
        }
    return {name: json.dumps(value) for name, value in states.items()}

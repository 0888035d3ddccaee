"""The position in training data that is not found by its number, in checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpctrain.data import BatchSource
from hpctrain.train.hooks import BaseHook


class DataPosition(BaseHook):
    """Saves and restores where the data stands; no state if (epoch, batch) is enough."""

    name = "data"

    def __init__(self, data: BatchSource) -> None:
        self.data = data

    def state_dict(self) -> Mapping[str, Any]:
        return self.data.state_dict()

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        self.data.load_state_dict(saved)

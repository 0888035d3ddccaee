"""The numbers of an event under the names that trackers show them by."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpctrain.system.json_shape import is_number

COUNTED = ("time", "event", "step", "attempt", "steps", "total_steps", "epoch", "seconds")


def scalars(event: Mapping[str, Any]) -> dict[str, float]:
    """Such as ``train/loss``, ``phase/forward`` (seconds a step), ``validation/accuracy``, ``checkpoint/stall_s``."""
    kind = event["event"]
    if kind == "train":
        steps = max(int(event.get("steps") or 1), 1)
        found = {f"train/{name}": value for name, value in event.items() if name not in COUNTED}
        phases = {name: value for name, value in (event.get("seconds") or {}).items() if is_number(value)}
        found |= {f"phase/{name}": value / steps for name, value in phases.items()}
    elif kind == "eval":
        found = {f"validation/{name}": value for name, value in (event.get("metrics") or {}).items()}
    elif kind == "checkpoint_saved":
        found = {f"checkpoint/{name}": event.get(name) for name in ("stall_s", "write_s", "bytes")}
    else:
        return {}
    return {name: float(value) for name, value in found.items() if is_number(value)}

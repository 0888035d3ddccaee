"""Files that were copied to node-local scratch: the task gets the copies' paths, the run file stays as it is."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from hpctrain.run.rank_environment import STAGED


def staged_args(task_args: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """The task's arguments, each text that names a staged source replaced by its copy."""
    copies = json.loads(environ.get(STAGED) or "{}")
    return {key: _replaced(value, copies) for key, value in task_args.items()}


def _replaced(value: Any, copies: Mapping[str, str]) -> Any:
    if isinstance(value, dict):
        return {key: _replaced(item, copies) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_replaced(item, copies) for item in value]
    return copies.get(value, value) if isinstance(value, str) else value

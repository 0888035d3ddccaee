"""What a checkpoint says of the run that saved it."""

from __future__ import annotations

import dataclasses
import json
import math
import platform
from collections.abc import Mapping
from contextlib import suppress
from importlib import metadata
from typing import TYPE_CHECKING, Any

import hpctrain

if TYPE_CHECKING:
    from hpctrain.config.sections import Config

PACKAGES = ("numpy", "h5py", "torch", "tensorflow-cpu", "tensorflow", "keras", "horovod", "mpi4py")


def identity_of(config: Config, global_batch: int, fingerprint: str) -> dict[str, Any]:
    """What ``changes`` compares: run file, samples of one update, and training data, as JSON gives them back."""
    identity = {"config": dataclasses.asdict(config), "global_batch": global_batch, "data": fingerprint}
    plain: dict[str, Any] = json.loads(json.dumps(finite(identity, "not finite")))
    return plain


def finite(value: Any, instead: Any) -> Any:
    """A value without the numbers that JSON does not know."""
    if isinstance(value, Mapping):
        return {key: finite(item, instead) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item, instead) for item in value]
    return instead if isinstance(value, float) and not math.isfinite(value) else value


def versions() -> dict[str, str]:
    """Of what a resumed run's numbers depend on."""
    found = {"python": platform.python_version(), "hpctrain": hpctrain.__version__}
    for package in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found

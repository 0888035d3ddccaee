"""What identifies a wheel of Horovod: everything it was built from and against."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass

from hpctrain.horovod_wheel import patch


@dataclass(frozen=True)
class WheelRecipe:
    """All that a wheel depends on; equal recipes give equal wheels."""

    horovod: str
    patch: str
    python: str
    torch: str | None
    tensorflow: str | None
    compiler: str
    mpi: str
    mpi_rpath: str
    cuda: str | None

    @property
    def key(self) -> str:
        """Twelve hexadecimal digits that name the wheel."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:12]

    @property
    def version(self) -> str:
        """The wheel's version, with the key as its local part, so that pip distinguishes builds."""
        return f"{patch.VERSION}+{self.key}"

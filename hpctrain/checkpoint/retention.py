"""Which checkpoints are kept."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from hpctrain.config.sections import at_least


@dataclass(frozen=True)
class Retention:
    """Rules of what to keep; what no rule keeps is removed after a newer checkpoint was committed."""

    last: int | None = None
    """Newest checkpoints that are kept; all of them if None."""
    every_steps: int | None = None
    """Checkpoints at multiples of this are kept for ever."""

    def __post_init__(self) -> None:
        at_least("keep_last", self.last, 1)
        at_least("keep_every_steps", self.every_steps, 1)

    def removable(self, steps: Collection[int], protected: Collection[int]) -> list[int]:
        """Steps to remove, oldest first.

        Args:
            steps: all committed checkpoints.
            protected: those that must stay: the best one, and the newest known to be sound.
        """
        if self.last is None:
            return []
        newest = set(sorted(steps)[-self.last :])
        return [
            step
            for step in sorted(steps)
            if step not in newest and step not in protected and not (self.every_steps and step % self.every_steps == 0)
        ]

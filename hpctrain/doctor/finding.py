"""One line of the doctor's report."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any


class Status(StrEnum):
    """How good it is."""

    OK = "ok"
    NOTE = "note"
    """Works, or is not needed; could be better."""
    PROBLEM = "problem"
    """Runs will fail or give wrong speed until it is fixed."""


@dataclass(frozen=True)
class Finding:
    """What was looked at, what was found, and what to do about it."""

    topic: str
    value: str
    status: Status = Status.OK
    fix: str = ""

    def to_json(self) -> dict[str, Any]:
        """All fields."""
        return asdict(self)


def note(topic: str, value: str, fix: str = "") -> Finding:
    """Works, or is not needed."""
    return Finding(topic, value, Status.NOTE, fix)


def problem(topic: str, value: str, fix: str) -> Finding:
    """Has to be fixed."""
    return Finding(topic, value, Status.PROBLEM, fix)

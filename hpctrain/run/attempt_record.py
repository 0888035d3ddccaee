"""One attempt at a run, as run.json holds it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hpctrain.run.verdict import Verdict

ALWAYS = ("from_step", "job_id", "git_commit")
"""Fields that an entry of run.json has even if there is nothing to say."""


@dataclass(frozen=True)
class Attempt:
    """What is known of an attempt; None for what nobody has written."""

    number: int = 0
    """From 1; 0 for one that has not begun."""
    started: float | None = None
    """Unix seconds."""
    ended: float | None = None
    """Unix seconds. None while it runs, and of one that was killed with its supervisor."""
    from_step: int | None = None
    """Of the newest checkpoint when it began."""
    to_step: int | None = None
    """Of the newest checkpoint when it ended."""
    host: str | None = None
    """Of the supervisor, or of rank 0 if there is none."""
    hosts: Sequence[str] = ()
    """Of the ranks."""
    job: str | None = None
    """What scontrol takes: 123, or 120_4 for an element of an array."""
    job_id: str | None = None
    """SLURM_JOB_ID."""
    restarts: int | None = None
    """Times that Slurm had requeued the job."""
    ranks: int | None = None
    nodes: int | None = None
    versions: Mapping[str, str | None] = field(default_factory=dict)
    """Of packages that shape results."""
    git_commit: str | None = None
    verdict: Verdict | None = None

    @property
    def has_progressed(self) -> bool:
        """Whether it saved a checkpoint beyond the one that it began from."""
        return self.to_step is not None and (self.from_step is None or self.to_step > self.from_step)

    def to_json(self) -> dict[str, Any]:
        """For run.json: all that is known."""
        shown = dict(vars(self))
        number, verdict = shown.pop("number"), shown.pop("verdict")
        known = {name: value for name, value in shown.items() if value not in (None, (), {}) or name in ALWAYS}
        known |= {"verdict": verdict.to_json()} if verdict else {}
        return {"attempt": number, **known} if number else known

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> Attempt:
        """An entry of run.json whose fields are of the types that they should have; unknown ones are ignored."""
        names = {each.name for each in dataclasses.fields(cls)} - {"number", "verdict", "hosts", "versions"}
        return cls(
            saved["attempt"],
            hosts=tuple(saved.get("hosts") or ()),
            versions=saved.get("versions") or {},
            verdict=Verdict.from_json(saved.get("verdict") or {}),
            **{name: value for name, value in saved.items() if name in names},
        )

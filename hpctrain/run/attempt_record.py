"""One attempt at a run, as stored in run.json."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from hpctrain.config.sections import ParallelConfig
from hpctrain.errors import ExitCode
from hpctrain.run.grid import Grid, grid_of
from hpctrain.run.verdict import RunVerdict
from hpctrain.system.json_shape import fields_of, is_count, is_time, maker, sound, without_misfits

ALWAYS = ("from_step", "job_id", "git_commit")
"""Fields that an entry of run.json has even if they are null."""


@dataclasses.dataclass(frozen=True)
class Attempt:
    """The record of an attempt; None for what is not known."""

    number: int = 0
    """From 1; 0 for an attempt that has not begun."""
    started: float | None = None
    """Unix seconds."""
    ended: float | None = None
    """Unix seconds. None while it runs, or if it was killed together with its supervisor."""
    from_step: int | None = None
    """Step of the newest checkpoint when it began."""
    to_step: int | None = None
    """Step of the newest checkpoint when it ended."""
    host: str | None = None
    """Host of the supervisor, or of rank 0 if there is none."""
    hosts: Sequence[str] = ()
    """Hosts of the ranks."""
    job: str | None = None
    """Slurm job as scontrol takes it: 123, or 120_4 for an array element."""
    job_id: str | None = None
    """SLURM_JOB_ID, or the job ID of another scheduler."""
    restarts: int | None = None
    """How often Slurm had requeued the job."""
    ranks: int | None = None
    nodes: int | None = None
    tensor: int | None = None
    """Size of the tensor groups; None without tensor parallelism."""
    pipeline: int | None = None
    """Number of pipeline stages; None without a pipeline."""
    shard: str | None = None
    """Value of ``parallel.shard``; None if nothing is sharded."""
    versions: Mapping[str, str | None] = dataclasses.field(default_factory=dict)
    """Versions of packages that affect results."""
    git_commit: str | None = None
    verdict: RunVerdict | None = None

    @property
    def grid(self) -> Grid:
        """The grid of ranks."""
        return grid_of(self.ranks or 1, self.tensor, self.pipeline)

    @property
    def plan(self) -> str:
        """The parallel plan as text, such as "tensor 2 x data 4"; empty if each rank has the whole model."""
        return ", ".join([part for part in (str(self.grid), f"shard {self.shard}" if self.shard else "") if part])

    @property
    def has_progressed(self) -> bool:
        """Whether it saved a checkpoint newer than the one it began from."""
        return self.to_step is not None and (self.from_step is None or self.to_step > self.from_step)

    @property
    def found_complete(self) -> bool:
        """Whether there was nothing left to do, because the run had already finished."""
        is_done = self.verdict is not None and self.verdict.exit_code is ExitCode.DONE
        return is_done and self.from_step is not None and self.from_step == self.to_step

    def under(self, parallel: ParallelConfig) -> Attempt:
        """Returns a copy with the parallel plan of a run file."""
        shard = parallel.shard if parallel.shard != "none" else None
        tensor, pipeline = (size if size > 1 else None for size in (parallel.tensor, parallel.pipeline))
        return dataclasses.replace(self, tensor=tensor, pipeline=pipeline, shard=shard)

    def to_json(self) -> dict[str, Any]:
        """Returns the known fields for run.json."""
        shown = dict(vars(self))
        number, verdict = shown.pop("number"), shown.pop("verdict")
        known = {name: value for name, value in shown.items() if value not in (None, (), {}) or name in ALWAYS}
        known |= {"verdict": verdict.to_json()} if verdict else {}
        return {"attempt": number, **known} if number else known

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> Attempt:
        """Parses an entry of run.json; ignores unknown fields. Raises ValueError if a field has the wrong type."""
        return _attempt_of({**saved, "number": saved["attempt"]})


_OWN = {"started": sound(is_time), "ended": sound(is_time), "verdict": RunVerdict.from_json}
_attempt_of = maker(Attempt, **_OWN)
_sound_entry = without_misfits(fields_of(Attempt, **_OWN))
_info = sound({"fence": int, "attempts": [dict]})
_sound_info = without_misfits(
    {
        "id": sound(str),
        "created": sound(is_time),
        "trained": sound(is_count),
        "reducer": sound(dict),
        "stages": sound({"layers": [is_count]}),
    }
)


def info_of(value: Any) -> dict[str, Any]:
    """Validates the content of run.json, dropping fields of the wrong type. Raises ValueError if it is unusable."""
    info = _info(value)
    if not all(is_count(entry.get("attempt")) for entry in info.get("attempts", ())):
        raise ValueError("an attempt has no number")
    entries = {"attempts": [_sound_entry(entry) for entry in info["attempts"]]} if "attempts" in info else {}
    return {**_sound_info(info), **entries}

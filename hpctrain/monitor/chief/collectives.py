"""Names the collective that a hanging run waits in, and who did not join it, from what the ranks wrote. Pure, but for
``read``."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from hpctrain.monitor.chief import sentence
from hpctrain.run.folder import RunDir
from hpctrain.system import safe_read


@dataclass(frozen=True)
class Collective:
    """A collective in which a rank waits."""

    group: str
    members: tuple[int, ...]
    """The ranks of the group."""
    number: int
    """Its number among those of the group."""
    operation: str
    inputs: str
    """Types and sizes."""


def read(run: RunDir, attempt: int, ranks: Iterable[int]) -> dict[int, list[Collective]]:
    """Reads unfinished collectives by rank, as ``backends.torch.collective_watch`` writes; no damaged files."""
    found = {}
    for rank in ranks:
        try:
            found[rank] = list(collectives_in(safe_read.parse_json(safe_read.read(run.collectives(attempt, rank)))))
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            continue
    return found


def collectives_in(dump: Mapping[str, object]) -> Iterator[Collective]:
    """The unfinished collectives of a dump of torch's flight recorder (``_dump_fr_trace_json``), oldest first."""
    groups: Mapping[str, Mapping[str, str]] = dump["pg_config"]  # type: ignore[assignment]
    for entry in dump["entries"]:  # type: ignore[attr-defined]
        if not entry["retired"] and entry["state"] != "completed" and not entry["is_p2p"]:
            name = str(entry["process_group"][0])
            members = tuple(int(rank) for rank in json.loads(groups[name]["ranks"]))
            inputs = zip(entry["input_dtypes"], entry["input_sizes"], strict=False)
            shapes = ", ".join(f"{kind} {size}" for kind, size in inputs)
            operation = str(entry["profiling_name"]).rpartition(":")[2]
            yield Collective(name, members, int(entry["collective_seq_id"]), operation, shapes)


def who_is_missing(waiting: Mapping[int, Iterable[Collective]]) -> str:
    """A sentence on the collective that holds up the run; empty if all ranks that could join wait in the same ones.

    Where groups wait for one another, the ranks that wait nowhere are to blame, so their collective is named.
    """
    oldest: dict[str, Collective] = {}
    for one in (one for found in waiting.values() for one in found):
        if one.group not in oldest or one.number < oldest[one.group].number:
            oldest[one.group] = one
    cases = []
    for one in oldest.values():
        first = {rank: _first(waiting.get(rank, ()), one.group) for rank in one.members}
        inside = [rank for rank, number in first.items() if number == one.number]
        missing = [rank for rank, number in first.items() if number is None]  # who is further on did join
        elsewhere = sum(rank in waiting for rank in missing)
        if missing:
            cases.append((elsewhere, one, missing, inside))
    if not cases:
        return ""
    _, one, missing, inside = min(cases, key=lambda case: case[0])
    others = f"ranks {sentence.numbers(inside)} wait" if len(inside) > 1 else f"rank {inside[0]} waits"
    who = sentence.of_ranks(missing)
    return f"{who} did not join {one.operation} {one.number} of group {one.group} ({one.inputs}), in which {others}"


def _first(found: Iterable[Collective], group: str) -> int | None:
    return min((one.number for one in found if one.group == group), default=None)

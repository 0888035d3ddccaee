"""Logs of a run: which files there are, which of them says first what went wrong, and following one."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpctrain.run.folder import RunDir

NAME = re.compile(r"(?P<job>[^-]+(?:_\d+)?)-(?P<attempt>\d+)-(?P<rank>[\w]+)\.out")
OURS = (
    r"^hpctrain: .+(?: of the job script failed|\n  fix: (?!the same command|nothing to do)|(?:\n  fix: .*)?\n  logs: )"
)
"""How the script and the supervisor tell an error; ends in order have no logs to look at, and little to fix."""
ERROR = re.compile(
    rf"Traceback|\b\w*Error\b|{OURS}|Segmentation fault|Killed|oom-kill|Out of memory|MPI_ABORT", re.MULTILINE
)


@dataclass(frozen=True)
class Log:
    """One log file: of a rank in an attempt, or of a job's script and supervisor (rank 'job')."""

    path: Path
    job: str
    attempt: int
    rank: str


def find(run: RunDir, rank: str | None = None, attempt: int | None = None) -> list[Log]:
    """Logs by attempt and rank; all attempts where none is named and no rank either, else the last one."""
    found = []
    # Slurm makes the log of an array's element beside those of the others, before the element's folder is known.
    index = run.path.name if run.path.name.isdigit() else ""
    for path in [*run.logs.glob("*.out"), *(run.path.parent / "logs").glob(f"slurm-*_{index}.out")]:
        if match := NAME.fullmatch(path.name):
            found.append(Log(path, match["job"], int(match["attempt"]), match["rank"]))
        elif match := re.fullmatch(r"slurm-(.+)\.out", path.name):
            found.append(Log(path, match[1], 0, "job"))
    if rank is not None:
        found = [log for log in found if log.rank == rank]
    if attempt is None:
        attempt = max((log.attempt for log in found), default=0)
    found = [log for log in found if log.attempt in (attempt, 0)]
    return sorted(found, key=lambda log: (log.attempt, not log.rank.isdigit(), log.rank.zfill(9), log.path))


def first_error(logs: Sequence[Log]) -> tuple[Log, str] | None:
    """The log that fell silent first among those that show an error, and its lines from the error on."""
    candidates = []
    for log in logs:
        text = log.path.read_text(errors="replace")
        if match := ERROR.search(text):
            start = text.rfind("\n", 0, match.start()) + 1
            candidates.append((log.rank == "job", log.path.stat().st_mtime, log, text[start : start + 4000]))
    if not candidates:
        return None
    _, _, log, text = min(candidates, key=lambda each: each[:2])
    return log, text


def follow(path: Path, over: Callable[[], bool], pause_s: float = 0.5, ask_s: float = 10.0) -> Iterator[str]:
    """Text as it is appended, until ``over`` and nothing more comes; waits for the file to appear.

    ``over`` asks Slurm's controller, which serves all users: it is called every ``ask_s`` seconds only.
    """
    position, ended, asked = 0, False, float("-inf")
    while True:
        if not ended and time.monotonic() - asked >= ask_s:
            ended, asked = over(), time.monotonic()
        if path.exists():
            with open(path, errors="replace") as file:
                file.seek(position)
                text = file.read()
                position = file.tell()
            if text:
                yield text
                continue
        if ended:
            return
        time.sleep(pause_s)

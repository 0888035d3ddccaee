"""A run's logs: finds the files, finds the first error in them, and follows one as it grows."""

from __future__ import annotations

import codecs
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpctrain.errors import UserError
from hpctrain.run.attempts import Attempts
from hpctrain.run.folder import RunDir
from hpctrain.run.tail import read_at
from hpctrain.system import foreign_text, safe_read

PART_BYTES = 32 << 20
"""Of a log longer than twice this, only the first and the last part of this size are read."""
QUOTED = 400
"""Characters of a job's log that are quoted."""
NAME = re.compile(r"(?P<job>[^-]+(?:_\d+)?)-(?P<attempt>\d+)-(?P<rank>[\w]+)\.out")
FOREIGN = re.compile(r"Traceback|\b\w*Error\b|Segmentation fault|Killed|oom-kill|Out of memory|MPI_ABORT")
"""Matches errors printed by Python, the kernel, Slurm and MPI libraries."""
OURS = re.compile(r"^hpctrain: (?P<what>.+)\n  (?:fix|logs): ", re.MULTILINE)
"""Matches reports by the job script and the supervisor, of errors and of orderly ends."""


@dataclass(frozen=True)
class Log:
    """A log file of a rank in an attempt, or of a job's script and supervisor (rank 'job')."""

    path: Path
    job: str
    attempt: int
    rank: str


def find(run: RunDir, rank: str | None = None, attempt: int | None = None) -> list[Log]:
    """Finds logs, sorted by attempt and rank; by default those of the last attempt that has any, plus job logs."""
    found = []
    # --output is one pattern for a whole job array, so Slurm writes its elements' logs to the array's folder.
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


def places(run: RunDir, logs: Sequence[Log]) -> list[str]:
    """Returns the place of each log's rank in the grid, such as " (data 1, tensor 0)"; empty if the grid is plain."""
    grids = {attempt.number: attempt.grid for attempt in Attempts(run).all()}
    found = [grids.get(log.attempt) if log.rank.isdigit() else None for log in logs]
    return [
        grid.label(int(log.rank)) if grid is not None and int(log.rank) < grid.ranks else ""
        for log, grid in zip(logs, found, strict=True)
    ]


def first_error(run: RunDir, logs: Sequence[Log]) -> tuple[Log, str] | None:
    """Of the logs with an error, returns the one last written earliest, and its text from the error on.

    Logs of ranks come before those of jobs.
    """
    orderly = good_ends(run)
    candidates = []
    for log in logs:
        text = read(log.path)
        found = [match.start() for match in OURS.finditer(text) if match["what"] not in orderly]
        found += [match.start() for match in [FOREIGN.search(text)] if match]
        if found:
            start = text.rfind("\n", 0, min(found)) + 1
            candidates.append((log.rank == "job", log.path.stat().st_mtime, log, text[start : start + 4000]))
    if not candidates:
        return None
    _, _, log, text = min(candidates, key=lambda each: each[:2])
    return log, text


def said_last(run: RunDir, job: str) -> str:
    """Returns the last report in a job's own log with the line before it, else the log's last lines; as one line."""
    log = next((each for each in find(run, "job") if each.job == job), None)
    lines = read(log.path).splitlines() if log else []
    begin = max((index for index, line in enumerate(lines) if line.startswith("hpctrain: ")), default=len(lines) - 1)
    return foreign_text.line(" ".join(" ".join(lines[max(begin - 1, 0) :]).split()), QUOTED)


def good_ends(run: RunDir) -> set[str]:
    """Returns the reasons reported for attempts that did not fail."""
    try:
        verdicts = [attempt.verdict for attempt in Attempts(run).all()]
    except UserError:  # a damaged run.json must not hide logs
        return set()
    return {verdict.reason for verdict in verdicts if verdict and not verdict.is_failure}


def read(path: Path) -> str:
    """Reads a log's text; only the beginning and end if it is very long. Empty if there is no regular file."""
    try:
        handle = safe_read.open_plain(path)
    except (FileNotFoundError, safe_read.NotPlain):
        return ""
    with os.fdopen(handle, "rb") as file:
        size = os.fstat(handle).st_size
        if size <= 2 * PART_BYTES:
            return file.read(2 * PART_BYTES).decode(errors="replace")
        first = file.read(PART_BYTES)
        file.seek(size - PART_BYTES)
        middle = f"\n... {size - 2 * PART_BYTES} bytes are left out: see {path} ...\n"
        return first.decode(errors="replace") + middle + file.read(PART_BYTES).decode(errors="replace")


def follow(path: Path, over: Callable[[], bool], pause_s: float = 0.5, ask_s: float = 10.0) -> Iterator[str]:
    """Yields text as it is appended, until ``over`` returns true and nothing more comes; waits for the file to appear.

    ``over`` queries Slurm's controller, which serves all users, so it is called only every ``ask_s`` seconds.
    """
    position = 0
    ended = False
    asked = float("-inf")
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    while True:
        if not ended and time.monotonic() - asked >= ask_s:
            ended, asked = over(), time.monotonic()
        if content := read_at(path, position):
            position += len(content)
            yield decoder.decode(content)
            continue
        if ended:
            return
        time.sleep(pause_s)

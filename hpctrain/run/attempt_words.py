"""The last words of an attempt, typed."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hpctrain.errors import ExitCode
from hpctrain.run.folder import RunDir
from hpctrain.run.last_words import LastWord, collect
from hpctrain.run.verdict import Action, Verdict


@dataclass(frozen=True)
class AttemptWords:
    """The last words of an attempt's ranks, and what was concluded from them."""

    ranks: tuple[LastWord, ...]
    """By rank."""
    verdict: Verdict | None = None


def read(run_dir: RunDir, attempt: int) -> AttemptWords:
    """The words of an attempt: merged, or if nobody could merge them (full disk, dead supervisor) one by one."""
    saved = run_dir.read_words(attempt)
    if not saved:
        return AttemptWords(tuple(collect(run_dir, attempt)))
    words: list[LastWord] = []
    for each in saved.get("ranks", ()):
        with contextlib.suppress(ValueError, TypeError):
            words.append(LastWord.from_json(each))
    return AttemptWords(tuple(words), read_verdict(saved.get("verdict") or {}))


def read_verdict(saved: Mapping[str, Any]) -> Verdict | None:
    """What ``Verdict.to_json`` gave, with fields of the types that they should have; None if it says nothing."""
    action, code = saved.get("action"), saved.get("exit_code")
    if action not in set(Action):
        return None
    exit_code = ExitCode(code) if code in set(ExitCode) else ExitCode.FAILURE
    reason, fix = saved.get("reason") or "", saved.get("fix") or ""
    return Verdict(Action(action), exit_code, reason, fix, saved.get("rank"), saved.get("host"), saved.get("cause"))

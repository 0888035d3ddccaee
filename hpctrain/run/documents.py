"""The JSON documents of a run folder: the types that readers take for granted. No I/O here."""

from __future__ import annotations

from typing import Any

from hpctrain.system.json_shape import fits, is_count, is_time, without_misfits

TEXT = (str, None)
MOST_WORD_BYTES = 1 << 18
"""Of one rank's last word."""
NUMBERED = (is_count, None)
VERDICT = {
    **dict.fromkeys(("action", "reason", "fix", "host", "code", "cause"), TEXT),
    "exit_code": (int, None),
    "rank": NUMBERED,
}
ATTEMPT_ENTRY = {
    **dict.fromkeys(("started", "ended"), (is_time, None)),
    **dict.fromkeys(("from_step", "to_step", "ranks", "nodes", "restarts", "tensor", "pipeline"), NUMBERED),
    **dict.fromkeys(("host", "job", "job_id", "git_commit", "shard"), TEXT),
    "hosts": ([str], None),
    "verdict": (VERDICT, None),
    "versions": ({str: TEXT}, None),
}
ERROR = ("what", "fix", "type", "traceback")


def _is_error(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(key), str) for key in ERROR)


WORD = {
    **dict.fromkeys(("rank", "pid", "step", "oom_kills"), NUMBERED),
    **dict.fromkeys(("birth", "started", "ended"), (float, None)),
    **dict.fromkeys(("host", "ending", "weights_hash", "note", "code", "machine"), TEXT),
    "exit_code": (int, None),
    "error": (_is_error, None),
}
is_word = fits(WORD)
"""Whether a value can be a rank's last word."""
is_words = fits({"attempt": is_count, "verdict": VERDICT, "ranks": [is_word]})
"""Whether a value can be the last words of an attempt."""
_is_info = fits({"fence": int, "attempts": [dict]})
_sound_info = without_misfits(
    {"id": str, "created": is_time, "reducer": (dict, None), "stages": ({"layers": [is_count]}, None)}
)
_sound_entry = without_misfits(ATTEMPT_ENTRY)


def info_of(value: Any) -> dict[str, Any] | None:
    """The content of run.json, without what is not of its type; None if it cannot be such content."""
    if not _is_info(value) or not all(is_count(entry.get("attempt")) for entry in value.get("attempts", ())):
        return None
    entries = {"attempts": [_sound_entry(entry) for entry in value["attempts"]]} if "attempts" in value else {}
    return {**_sound_info(value), **entries}

"""The identity of the run that saved a checkpoint: what a resumed run may change, and what it may not."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hpctrain.config.sections import DECISIVE, PARTS
from hpctrain.errors import UserError
from hpctrain.system.json_shape import flat

LENGTH = ("train.epochs", "train.steps")
"""Keys that a longer run changes; decisive only if the learning rate depends on the run's end."""
DATA = ("global batch", "training data")
"""Keys that determine what a position in the data means; a change is never accepted."""
ENDLESS = ("constant", "step", "exponential", "restarts", "plateau")
"""Schedules that do not depend on the run's end."""
EARLIER = flat({name: dataclasses.asdict(section()) for name, section in PARTS.items()})
"""Keys that an earlier version may lack, with its behaviour."""


def identity_of(
    run_file: Mapping[str, Any], global_batch: int, fingerprint: str, sources: Sequence[Mapping[str, Any]] = ()
) -> dict[str, Any]:
    """What ``differences`` compares, as JSON gives it back.

    Args:
        run_file: all its values, nested by section.
        global_batch: samples of one update, as resolved for this number of ranks.
        fingerprint: of the training data.
        sources: tables that the training data are, or are a copy of; named if the data differ, but not compared.
    """
    identity = {"config": run_file, "global_batch": global_batch, "data": fingerprint, "data_sources": list(sources)}
    plain: dict[str, Any] = json.loads(json.dumps(finite(identity, "not finite")))
    return plain


def finite(value: Any, instead: Any) -> Any:
    """A value without numbers that JSON cannot represent."""
    if isinstance(value, Mapping):
        return {key: finite(item, instead) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item, instead) for item in value]
    return instead if isinstance(value, float) and not math.isfinite(value) else value


def decisive(identity: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a run's identity that a resumed run must share, by dotted key."""
    values = EARLIER | flat(identity["config"])
    keys = DECISIVE if values.get("schedule.kind") in ENDLESS else DECISIVE + LENGTH
    chosen = {key: values[key] for key in values if any(f"{key}.".startswith(f"{one}.") for one in keys)}
    if "task" in chosen:
        chosen["task"] = without_folder(chosen["task"])
    return chosen | {"global batch": identity["global_batch"], "training data": identity["data"]}


def without_folder(task: str) -> str:
    """A task by the name of its file: a job names that file by its full path, a shell by whatever leads to it."""
    module, colon, function = task.partition(":")
    return f"{Path(module).name}{colon}{function}" if module.endswith(".py") else task


def config_hash(identity: Mapping[str, Any]) -> str:
    """Short hash of what is decisive."""
    return hashlib.sha256(json.dumps(decisive(identity), sort_keys=True, default=str).encode()).hexdigest()[:16]


def differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """(key, saved value, value now) of what is decisive and differs; a key that one side lacks counts as None there."""
    before, after = decisive(saved), decisive(now)
    keys = sorted(before.keys() | after.keys())
    pairs = [(key, before.get(key), after.get(key)) for key in keys if before.get(key) != after.get(key)]
    return [pair for pair in pairs if pair[1:] not in (({}, None), (None, {}))]  # what was or is in it is a key as well


def in_words(found: Iterable[tuple[str, Any, Any]]) -> str:
    """Differences, for a message."""

    def said(value: Any) -> str:
        return "not given" if value is None else repr(value)

    return "; ".join(f"{key} was {said(before)} and is {said(after)}" for key, before, after in found)


def length_as_one(key: str) -> str:
    """Maps epochs and steps, two ways to give the run's length, to one key."""
    return LENGTH[0] if key in LENGTH else key


def is_accepted(key: str, accepted: Iterable[str]) -> bool:
    """Whether a difference in a key, or in the section that holds it, is one that the user accepts."""
    return key not in DATA and any(f"{length_as_one(key)}.".startswith(f"{length_as_one(one)}.") for one in accepted)


def refuse_changes(saved: Mapping[str, Any], now: Mapping[str, Any], where: str) -> None:
    """Raises UserError, showing the differences, if a run file asks for another run than the checkpoint's.

    Differences that the run file accepts (``checkpoint.accept``) are none.

    Args:
        saved, now: identities: ``config`` (the run file as a dict), ``global_batch``, ``data`` (fingerprint).
        where: the checkpoint, for the message.
    """
    accepted = (now["config"].get("checkpoint") or {}).get("accept") or ()
    found = [each for each in differences(saved, now) if not is_accepted(each[0], accepted)]
    if not found:
        return
    shown = in_words(found)
    fix = "restore the run file, give the run another name, or begin again with --fresh"
    if any(key in LENGTH for key, _, _ in found):
        kind = now["config"]["schedule"]["kind"]
        shown += f" (schedule.kind {kind} ends with the run, so that a longer one would have had other rates all along)"
    if any(key == "training data" for key, _, _ in found):
        before, after = (
            ", ".join(source["address"] for source in each.get("data_sources") or ()) for each in (saved, now)
        )
        shown += (
            f" (made from {before or 'other data'}, and now from {after or 'other data'})" if before != after else ""
        )
    if all(key not in DATA for key, _, _ in found):
        flags = " ".join(f"--accept {key}" for key in dict.fromkeys(length_as_one(key) for key, _, _ in found))
        fix += f"; to resume all the same, with what the run file says from here on: {flags}"
    if any(key == "global batch" for key, _, _ in found):
        old = saved["global_batch"]
        fix = f"set train.global_batch to {old}, which any number of ranks up to {old} can share; or begin with --fresh"
        per_rank = now["config"]["train"].get("batch_per_rank")
        parallel = now["config"].get("parallel") or {}
        if per_rank and old % per_rank == 0:
            ranks = old // per_rank * parallel.get("tensor", 1) * parallel.get("pipeline", 1)
            fix = f"run on {ranks} ranks; or {fix}"
    raise UserError(f"the run file is not that of {where}: {shown}", fix)

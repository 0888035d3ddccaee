"""Compares a run with the one that saved a checkpoint: what a resumed run may change and what it may not."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hpctrain.config.sections import DECISIVE, PARTS
from hpctrain.errors import UserError
from hpctrain.system.json_shape import finite, flat

LENGTH = ("train.epochs", "train.steps")
"""Keys that set the run's length; decisive only if the learning rate depends on it."""
DATA = ("global batch", "training data")
"""Keys that define positions in the data; a change is never accepted."""
ENDLESS = ("constant", "step", "exponential", "restarts", "plateau")
"""Schedules that do not depend on the run's length."""
EARLIER = flat({name: dataclasses.asdict(section()) for name, section in PARTS.items()})
"""Default values of keys that an identity saved by an earlier version may lack."""


def identity_of(
    run_file: Mapping[str, Any], global_batch: int, fingerprint: str, sources: Sequence[Mapping[str, Any]] = ()
) -> dict[str, Any]:
    """The identity of a run, which ``differences`` compares, after a round trip through JSON.

    Args:
        run_file: all values of the run file, nested by section.
        global_batch: samples per update, as resolved for this number of ranks.
        fingerprint: fingerprint of the training data.
        sources: source tables of the training data; named in messages if the data differ, but not compared.
    """
    identity = {"config": run_file, "global_batch": global_batch, "data": fingerprint, "data_sources": list(sources)}
    plain: dict[str, Any] = json.loads(json.dumps(finite(identity, "not finite")))
    return plain


def decisive(identity: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a run's identity that a resumed run must have in common, by dotted key."""
    values = EARLIER | flat(identity["config"])
    keys = DECISIVE if values.get("schedule.kind") in ENDLESS else DECISIVE + LENGTH
    chosen = {key: values[key] for key in values if any(f"{key}.".startswith(f"{one}.") for one in keys)}
    if "task" in chosen:
        chosen["task"] = without_folder(chosen["task"])
    return chosen | {"global batch": identity["global_batch"], "training data": identity["data"]}


def without_folder(task: str) -> str:
    """A task with its file's name only, since jobs give the full path and users may give a relative one."""
    module, colon, function = task.partition(":")
    return f"{Path(module).name}{colon}{function}" if module.endswith(".py") else task


def config_hash(identity: Mapping[str, Any]) -> str:
    """Short hash of the decisive part of an identity."""
    return hashlib.sha256(json.dumps(decisive(identity), sort_keys=True, default=str).encode()).hexdigest()[:16]


def differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """(key, saved value, current value) of decisive keys that differ; a missing key counts as None."""
    before, after = decisive(saved), decisive(now)
    keys = sorted(before.keys() | after.keys())
    pairs = [(key, before.get(key), after.get(key)) for key in keys if before.get(key) != after.get(key)]
    return [pair for pair in pairs if pair[1:] not in (({}, None), (None, {}))]  # entries of a dict are separate keys


def in_words(found: Iterable[tuple[str, Any, Any]]) -> str:
    """Format differences for a message."""

    def said(key: str, before: Any, after: Any) -> str:
        if key == "training data":
            old, new = (f"{value}".partition(" sampler ")[0] for value in (before, after))
            short = [value.rpartition(" ")[2][:8] for value in (old, new)]  # a table's address comes before its hash
            sums = "checksum {}, now {}".format(*(short if short[0] != short[1] else (old, new)))
            sums = sums if old != new else "the order of its sampler"
            return f"{key} has changed ({sums})"
        old, new = ("not given" if value is None else repr(value) for value in (before, after))
        return f"{key} was {old} and is {new}"

    return "; ".join(said(*each) for each in found)


def length_as_one(key: str) -> str:
    """Map epochs and steps, two ways to give the run's length, to one key."""
    return LENGTH[0] if key in LENGTH else key


def is_accepted(key: str, accepted: Iterable[str]) -> bool:
    """Whether the user accepts changes of a key or of a section that contains it."""
    return key not in DATA and any(f"{length_as_one(key)}.".startswith(f"{length_as_one(one)}.") for one in accepted)


def model_changes(saved: set[str], now: set[str], where: str, accepted: Sequence[str] = ()) -> list[str]:
    """Sentences about tensors that only the checkpoint's or only the task's model has, by name without ``model/``.

    Raises UserError unless they are accepted (``model``, or ``model.NAME``).
    """
    found = [f"{name} is in the checkpoint and not in the model" for name in sorted(saved - now)]
    found += [f"{name} is in the model and not in the checkpoint" for name in sorted(now - saved)]
    if not all(is_accepted(f"model.{name}", accepted) for name in saved ^ now):
        raise UserError(
            f"the model of the task is not that of {where}: {'; '.join(found[:5])}",
            "restore the task; or, to continue with what both have, and with what is new as the task makes it: "
            "--accept model",
        )
    return [f"{each}, as accepted" for each in found]


def refuse_changes(saved: Mapping[str, Any], now: Mapping[str, Any], where: str) -> None:
    """Raise UserError that lists the differences if the run file is not compatible with the checkpoint's run.

    Differences that the run file accepts (``checkpoint.accept``) are ignored.

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
        shown += f" (schedule.kind {kind} depends on the run's length: another one changes the rates from the start)"
    if any(key == "training data" for key, _, _ in found):
        before, after = (
            ", ".join(source["address"] for source in each.get("data_sources") or ()) for each in (saved, now)
        )
        shown += (
            f" (made from {before or 'other data'}, and now from {after or 'other data'})" if before != after else ""
        )
    if all(key not in DATA for key, _, _ in found):
        flags = " ".join(f"--accept {key}" for key in dict.fromkeys(length_as_one(key) for key, _, _ in found))
        fix += f"; to resume anyway, with the run file's values from here on: {flags}"
    if any(key == "global batch" for key, _, _ in found):
        old = saved["global_batch"]
        fix = f"set train.global_batch to {old}, which any number of ranks up to {old} can share; or begin with --fresh"
        per_rank = now["config"]["train"].get("batch_per_rank")
        parallel = now["config"].get("parallel") or {}
        if per_rank and old % per_rank == 0:
            ranks = old // per_rank * parallel.get("tensor", 1) * parallel.get("pipeline", 1)
            fix = f"run on {ranks} ranks; or {fix}"
    raise UserError(f"the run file differs from that of {where}: {shown}", fix)

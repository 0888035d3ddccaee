"""What must be true of a run after any faults; read from its files, without the package's code."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np


def lines_of(path: Path) -> Iterator[Any]:
    """Parsed JSON lines; a truncated last line is skipped."""
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            continue


def samples(folder: Path) -> dict[tuple[str, int], list[int]]:
    """Sample ids by journal file and step; of a repeated step, those of its last repetition."""
    found = {}
    for path in sorted(folder.glob("rank-*.ids")):
        for line in path.read_text().splitlines():
            step, *ids = map(int, line.split())
            found[path.name, step] = ids
    return found


def losses(run: Path) -> dict[int, float]:
    """Training loss by step; of a repeated step, that of its last repetition."""
    return {each["step"]: each["loss"] for each in lines_of(run / "events.jsonl") if each["event"] == "train"}


def weights(run: Path) -> dict[str, np.ndarray]:
    """All datasets of the newest checkpoint, by shard file and name."""
    newest = sorted((run / "checkpoints").glob("step-*"))[-1]
    found: dict[str, np.ndarray] = {}
    for path in sorted(newest.glob("*.h5")):
        with h5py.File(path) as file:
            file.visititems(
                lambda name, item, path=path: (
                    found.update({f"{path.name}/{name}": item[()]}) if isinstance(item, h5py.Dataset) else None
                )
            )
    return found


def differences(run: Path, noted: Path, reference: Path, reference_noted: Path, steps: int) -> list[str]:
    """How a finished run differs from an undisturbed one: sentences, empty if they are bitwise identical."""
    wrong = []
    finished = [each for each in lines_of(run / "events.jsonl") if each["event"] == "run_finished"]
    if not finished or (finished[-1]["reason"], finished[-1]["step"]) != ("completed", steps):
        wrong.append(f"the run did not complete at step {steps}: {finished[-1:]}")
    if samples(noted) != samples(reference_noted):
        wrong.append("a step had other samples")
    if losses(run) != losses(reference) or len(losses(run)) != steps:
        wrong.append("a step had another loss")
    own, other = weights(run), weights(reference)
    if own.keys() != other.keys():
        wrong.append(f"the last checkpoint holds other things: {sorted(own.keys() ^ other.keys())[:4]}")
    wrong += [f"{name} differs" for name in own.keys() & other.keys() if own[name].tobytes() != other[name].tobytes()]
    if left := [path.name for path in (run / "checkpoints").glob(".partial*")]:
        wrong.append(f"parts of checkpoints are left: {left}")
    return wrong


def explained(run: Path, fatal: list[dict[str, Any]]) -> list[str]:
    """Faults that ended an attempt and whose verdict does not name them; those that killed the supervisor have none."""
    attempts = json.loads((run / "run.json").read_text())["attempts"]
    verdicts = [each["verdict"] for each in attempts if each.get("verdict") and each["verdict"]["exit_code"] != 0]
    told = [fault for fault in fatal if fault["target"] != "supervisor"]
    if len(verdicts) != len(told):
        return [f"{len(told)} faults ended an attempt, {len(verdicts)} verdicts tell of one"]
    wrong = []
    for fault, verdict in zip(told, verdicts, strict=True):
        target, reason = fault["target"], verdict["reason"]
        named = "mpirun" in reason if target == "launcher" else verdict.get("rank") == fault["rank"]
        is_told = verdict["code"] == "out_of_memory" if target == "memory" else "SIGKILL" in reason
        if target == "daemon":
            named = is_told = verdict["code"] == "node"
        if not named or not is_told:
            wrong.append(f"{target} {fault['rank']} was befallen, and the verdict is: {reason}")
    return wrong

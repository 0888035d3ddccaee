"""State carried from batch to batch: the example matches a handwritten program, on 1, then 2, then 4 ranks."""

from __future__ import annotations

import pydoc_data.topics
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch import nn

from hpctrain.checkpoint.store import CheckpointStore
from hpctrain.rank.problem import seed_task
from tests.support.command import PROJECT, events, hpctrain, write_run

CHARACTERS, CONTEXT, UNITS, LR, LANES, STEPS = 2000, 8, 16, 0.02, 8, 80
LEAST_GAIN = 0.3
"""Improvement of validation below which the learning rate drops."""
PARTS = ((1, 10), (2, 37), (4, STEPS))
"""Ranks, and the step after which they evaluate and stop, always in the middle of an epoch."""


def by_hand() -> tuple[list[float], list[float], list[float]]:
    """Losses and rates after each step, and evaluation losses, of one process that uses only hpctrain's seed."""
    text = Path(pydoc_data.topics.__file__).read_text(encoding="utf-8")[:CHARACTERS]
    vocabulary, codes = np.unique(list(text), return_inverse=True)
    samples = (len(codes) - 1) // CONTEXT
    tokens = torch.from_numpy(codes[: samples * CONTEXT].reshape(samples, CONTEXT))
    following = torch.from_numpy(codes[1 : samples * CONTEXT + 1].reshape(samples, CONTEXT))
    held_out = samples // 10
    length = (samples - held_out) // LANES
    seed_task(0, "fp32", 0)
    embedding, lstm = nn.Embedding(len(vocabulary), UNITS), nn.LSTM(UNITS, UNITS, batch_first=True)
    head = nn.Linear(UNITS, len(vocabulary))
    parameters = [*embedding.parameters(), *lstm.parameters(), *head.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=LR)
    losses: list[float] = []
    rates: list[float] = []
    judged: list[float] = []
    hidden: Any = None
    best = float("inf")
    for step in range(STEPS):
        rows = torch.arange(LANES) * length + step % length
        outputs, hidden = lstm(embedding(tokens[rows]), hidden)
        hidden = tuple(each.detach() for each in hidden)
        loss = nn.functional.cross_entropy(head(outputs).flatten(0, 1), following[rows].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        losses.append(loss.item())
        if (step + 1) % length == 0:
            hidden = None
        if (step + 1) % length == 0 or step + 1 in dict(PARTS).values():
            with torch.no_grad():
                outputs = head(lstm(embedding(tokens[-held_out:]))[0])
                value = nn.functional.cross_entropy(outputs.flatten(0, 1), following[-held_out:].flatten()).item()
            if value >= best - LEAST_GAIN:
                optimizer.param_groups[0]["lr"] *= 0.5
            best = min(best, value) if value < best - LEAST_GAIN else best
            judged.append(value)
        rates.append(optimizer.param_groups[0]["lr"])
    return losses, rates, judged


@pytest.mark.world_size(4)
def test_the_example_agrees_with_the_same_program_by_hand_over_1_then_2_then_4_ranks(tmp_path):
    example = yaml.safe_load((PROJECT / "examples/lstm.yaml").read_text(encoding="utf-8"))
    del example["train"]["epochs"]
    example["train"]["steps"] = STEPS
    example["schedule"]["plateau"]["min_delta"] = LEAST_GAIN
    example |= {"name": "run", "run_dir": str(tmp_path / "run"), "task": f"{PROJECT}/{example['task']}"}
    arguments = {"characters": CHARACTERS, "context": CONTEXT, "units": UNITS, "lr": LR}
    more = {"task_args": arguments, "track": {"every_steps": 1}, "monitor": {"enabled": False}}
    run_file = write_run(tmp_path, **example, **more)
    said = [
        hpctrain("run", "-n", ranks, run_file, "--train.steps", last, timeout=150, warm="torch").output
        for ranks, last in PARTS
    ]
    assert "state 'lanes' of 1 ranks is split over 2" in said[1]
    assert "state 'lanes' of 2 ranks is split over 4" in said[2]
    losses, rates, judged = by_hand()
    run = tmp_path / "run"
    assert [one["step"] for one in events(run, "train")] == list(range(1, STEPS + 1))
    assert [one["loss"] for one in events(run, "train")] == pytest.approx(losses, rel=1e-4)
    assert [one["loss"] for one in events(run, "train")][:30] == pytest.approx(losses[:30], rel=1e-5)
    assert [one["metrics"]["loss"] for one in events(run, "eval")] == pytest.approx(judged, rel=1e-4)
    assert [one["lr"] * LR for one in events(run, "train")] == pytest.approx(rates)
    assert len(set(rates)) > 1, "the rate was lowered, once at least"
    loaded = CheckpointStore(run / "checkpoints").load()
    assert [lanes.shape for lanes in loaded.of_ranks["state/lanes/hidden.0"].values()] == [(1, LANES // 4, UNITS)] * 4

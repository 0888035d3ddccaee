"""One table of a sweep's results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hpctrain.report.compare import sweep_table
from hpctrain.run.history import RunHistory
from hpctrain.run.run_view import RunView


def run(folder: Path, lr: float, **metrics: float) -> RunHistory:
    folder.mkdir()
    (folder / "run.yaml").write_text(f"name: a-{folder.name}\nrun_dir: {folder}\noptimizer: {{lr: {lr}}}\n")
    events: list[dict[str, Any]] = [{"event": "eval", "metrics": metrics}] if metrics else []
    events.insert(0, {"event": "train", "steps": 1, "loss": lr, "samples_per_s": 1.0, "lr": lr})
    lines = [json.dumps({"time": 1.0 + at, "step": 1, "attempt": 1} | event) for at, event in enumerate(events)]
    (folder / "events.jsonl").write_text("\n".join(lines) + "\n")
    return RunView(folder).history()


@pytest.mark.parametrize(
    ("metric", "mode", "ranked", "order"),
    [
        (None, "min", "loss", "2013"),
        ("accuracy", "max", "accuracy", "0123"),
        ("accuracy", "min", "accuracy", "2103"),
        ("missing", "max", "loss", "2013"),
    ],
)
def test_the_best_comes_first(tmp_path, metric, mode, ranked, order):
    runs = [
        run(tmp_path / "0", 0.1, loss=0.5, accuracy=0.9),
        run(tmp_path / "1", 0.2, loss=0.7, accuracy=0.8),
        run(tmp_path / "2", 0.3, loss=0.2, accuracy=0.7),
        run(tmp_path / "3", 0.4),
    ]
    table = sweep_table(runs, metric, mode)
    assert table["ranked_by"] == ranked
    assert "".join(point["point"] for point in table["points"]) == order
    first = next(point for point in table["points"] if point["point"] == "0")
    assert first["configuration"] == {"optimizer.lr": 0.1}, "names and folders are those of any run"
    assert first["results"]["accuracy"] == 0.9
    json.dumps(table)


def test_without_validation_the_training_loss_counts(tmp_path):
    table = sweep_table([run(tmp_path / "0", 0.4), run(tmp_path / "1", 0.2)])
    assert table["ranked_by"] == "final_loss"
    assert [point["point"] for point in table["points"]] == ["1", "0"]

"""Ranks that share out a model, drawn by their places."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from hpctrain.report import grid_plot, page
from hpctrain.report.explain import explain
from hpctrain.report.summary import summarize
from hpctrain.run.folder import RunDir
from hpctrain.run.grid import Grid
from hpctrain.run.view import RunView


def cells(drawn: str) -> dict[int, dict[str, float]]:
    """x, y, strength and value of each rank's cell."""
    found = {}
    for cell in re.findall(r"<rect [^>]*>", drawn):
        told = {key: value for key, value in re.findall(r'([\w-]+)="([^"]*)"', cell)}
        if "data-rank" in told:
            names = ("x", "y", "fill-opacity", "data-value")
            found[int(told["data-rank"])] = {name: float(told[name]) for name in names if name in told}
    return found


def test_ranks_stand_by_data_index_and_part_and_slow_ones_are_strong() -> None:
    grid = Grid(8, tensor=2, pipeline=2)
    slowness = [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, np.nan, 60.0]
    chart = grid_plot.draw(grid, {0: "n0", 7: "n<1"}, slowness)
    found = cells(chart.body)
    assert sorted(found) == list(range(8))
    for rank in range(8):
        place = grid.place(rank)
        first = found[0]
        assert (found[rank]["x"] > first["x"]) == (place.data == 1)
        assert found[rank]["y"] - first["y"] == 34 * (2 * place.stage + place.tensor)
    assert found[7]["fill-opacity"] == 1.0 and found[7]["data-value"] == 60.0
    assert "data-value" not in found[6]
    assert "<title>rank 7 (stage 1, data 1, tensor 1) on n&lt;1: 60.0%</title>" in chart.body
    assert "stage 0, tensor 1" in chart.body


def test_small_differences_are_faint() -> None:
    found = cells(grid_plot.draw(Grid(2, tensor=2), {}, [0.5, -0.5]).body)
    assert max(cell["fill-opacity"] for cell in found.values()) < 0.2


@pytest.mark.parametrize(
    ("grid", "drawn"),
    [(Grid(8), False), (Grid(8, tensor=2), True), (Grid(258, tensor=2), False), (Grid(256, tensor=2), True)],
)
def test_grids_that_can_be_seen_are_drawn(grid: Grid, drawn: bool) -> None:
    assert grid_plot.is_drawn(grid) == drawn


def test_a_typical_window_counts() -> None:
    excess = np.array([[0.1, 0.3, np.nan], [np.nan, np.nan, np.nan]], np.float16)
    assert grid_plot.typical(excess, 3).tolist() == pytest.approx([20, np.nan, np.nan], abs=0.1, nan_ok=True)
    assert np.isnan(grid_plot.typical(None, 2)).all()


def test_the_report_of_a_run_that_shares_out_its_model_has_the_picture(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    run.create()
    attempt = {"attempt": 1, "started": 1.7e9, "ranks": 4, "tensor": 2, "shard": "optimizer"}
    run.run_json.write_text(json.dumps({"attempts": [attempt]}))
    live = [{"rank": rank, "host": f"n{rank // 2}", "busy_s": 0.1, "wait_s": 0.0, "excess": 0.0} for rank in range(4)]
    (run.monitor / "live.json").write_text(json.dumps({"attempt": 1, "step": 32, "num_ranks": 4, "ranks": live}))
    data = RunView(run.path).history()
    [section] = [each for each in page.make_sections(data, {}, None, None) if each.key == "grid"]
    places = [(0, 0, 0, 0), (1, 0, 0, 1), (2, 0, 1, 0), (3, 0, 1, 1)]
    assert section.rows == [(*place, f"n{place[0] // 2}", None) for place in places]
    assert summarize(data)["plan"] == "tensor 2 x data 2, shard optimizer"
    assert "tensor 2 x data 2, shard optimizer" in page.render(data, explain(data), [section])

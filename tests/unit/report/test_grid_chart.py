"""Ranks that share out a model, drawn by their places."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from hpctrain.report import charts, drawing, page
from hpctrain.report.explain import explain
from hpctrain.report.summary import summarize
from hpctrain.run.folder import RunDir
from hpctrain.run.grid import Grid
from hpctrain.run.run_view import RunView


def test_ranks_stand_by_data_index_and_part_and_slow_ones_are_strong() -> None:
    grid = Grid(8, tensor=2, pipeline=2)
    slowness = [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, np.nan, 60.0]
    (axes,) = drawing.figure_of([charts.grid_chart(grid, {0: "n0", 7: "n<1"}, slowness)], titles=False).axes
    texts = {text.get_text().split("\n")[0]: text for text in axes.texts}
    opacity = np.asarray(axes.images[0].get_array())[..., 3]
    assert sorted(texts) == [str(rank) for rank in range(8)]
    for rank in range(8):
        place = grid.place(rank)
        row = 2 * place.stage + place.tensor
        assert texts[str(rank)].get_position() == (place.data, row)
        assert opacity[row, place.data] == {7: 1.0, 6: 0.0}.get(rank, 0.05)
    assert texts["7"].get_text() == "7\nn<1"
    rows = [label.get_text() for label in axes.get_yticklabels()]
    assert rows == [f"stage {stage}, tensor {part}" for stage in range(2) for part in range(2)]


@pytest.mark.parametrize(
    ("grid", "drawn"),
    [(Grid(8), False), (Grid(8, tensor=2), True), (Grid(258, tensor=2), False), (Grid(256, tensor=2), True)],
)
def test_grids_that_can_be_seen_are_drawn(grid: Grid, drawn: bool) -> None:
    assert charts.is_drawn(grid) == drawn


def test_a_typical_window_counts() -> None:
    excess = np.array([[0.1, 0.3, np.nan], [np.nan, np.nan, np.nan]], np.float16)
    assert charts.typical(excess, 3).tolist() == pytest.approx([20, np.nan, np.nan], abs=0.1, nan_ok=True)
    assert np.isnan(charts.typical(None, 2)).all()


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

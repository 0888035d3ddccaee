"""Plans that share out a model, as a picture."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes

from hpctrain.report import drawing, page
from hpctrain.report.charts import plan_chart
from hpctrain.run.figures import Planned, Plans, read_plans, write_plans
from hpctrain.run.folder import RunDir
from hpctrain.run.run_view import RunView

MIB, GIB = 2**20, 2**30


def parts(*sizes: int) -> dict[str, int]:
    names = ("program", "parameters", "gradients", "optimizer", "averages", "activations", "staging")
    return dict(zip(names, sizes, strict=True))


LARGE = parts(GIB, 20 * GIB, 20 * GIB, 40 * GIB, 0, 9 * GIB, 10 * GIB)
SMALL = parts(GIB, 5 * GIB, 5 * GIB, 10 * GIB, 0, 9 * GIB, 3 * GIB)
PLANS = (
    Planned("data 64", LARGE),
    Planned("tensor 8 x data 2 x pipeline 4, shard optimizer", SMALL),
    Planned("tensor 8 x data 8", SMALL),
)


def axes_of(found: Plans, own: str | None = None) -> Axes:
    (axes,) = drawing.figure_of([plan_chart(found, own)], titles=False).axes
    return axes


def test_bars_are_as_long_as_what_they_stand_for() -> None:
    axes = axes_of(Plans(PLANS, 80 * GIB), own="data 64")
    widths = np.reshape([bar.get_width() for bar in axes.patches], (-1, len(PLANS)))  # type: ignore[attr-defined]
    assert widths.sum(0).tolist() == [one.total / GIB for one in PLANS]
    assert [text.get_text().strip() for text in axes.texts] == [f"{one.total / GIB:.4g}" for one in PLANS]
    (line,) = axes.lines
    assert line.get_xdata() == [80, 80] and "a rank has 80 GiB" in axes.get_xlabel()
    assert axes.get_yticklabels()[0].get_text() == "▸ data 64"
    assert axes.get_legend_handles_labels()[1] == [name for name in LARGE if name != "averages"]


def test_far_more_memory_than_needed_is_told_without_a_line() -> None:
    axes = axes_of(Plans(PLANS[2:], 1000 * GIB))
    assert "a rank has 1000 GiB" in axes.get_xlabel() and not axes.lines


@pytest.mark.parametrize("memory", [None, 20 * GIB, 99 * GIB, 1000 * GIB])
def test_nothing_of_the_picture_overlaps(memory: int | None) -> None:
    with drawing.own_settings():
        figure = drawing.figure_of([plan_chart(Plans(PLANS, memory))], titles=True)
        figure.draw_without_rendering()
        (axes,) = figure.axes
        texts = [*axes.texts, *axes.get_yticklabels(), axes.xaxis.label, axes.title]
        boxes = [text.get_window_extent() for text in texts if text.get_text()]
    assert not [one for place, one in enumerate(boxes) if any(one.overlaps(other) for other in boxes[:place])]
    assert all(figure.bbox.padded(1).contains(*corner) for box in boxes for corner in box.corners())


def test_the_report_of_a_run_shows_its_plans(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    run.create()
    attempt = {"attempt": 1, "started": 1.7e9, "ranks": 64, "tensor": 8}
    run.run_json.write_text(json.dumps({"attempts": [attempt]}))
    assert RunView(run.path).plans() is None
    write_plans(run.plans, Plans(PLANS, 80 * GIB), run.path)
    view = RunView(run.path)
    assert view.plans() == Plans(PLANS, 80 * GIB)
    [section] = [one for one in page.make_sections(view.history(), {}, plans=view.plans()) if one.key == "plans"]
    shown = drawing.inline(section.chart)
    assert "▸ tensor 8 x data 8<" in shown and shown.count(">▸") == 1
    assert section.rows[0] == ("data 64", *LARGE.values(), sum(LARGE.values()))
    assert len(section.header) == len(section.rows[0])


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        '{"plans": [], "memory": null}',
        '{"plans": [{"name": "data 1", "parts": {}, "step_s": null}], "memory": null}',
        '{"plans": [{"name": "data 1", "parts": {"program": -1}, "step_s": null}], "memory": null}',
        '{"plans": [{"name": "data \\u001b[31m", "parts": {"program": 1}, "step_s": 1}], "memory": null}',
        '{"plans": [{"name": "data 1", "parts": {"\\u0000": 1}, "step_s": 1}], "memory": null}',
    ],
)
def test_a_damaged_file_is_no_plans(tmp_path: Path, content: str) -> None:
    (tmp_path / "plans.json").write_text(content)
    assert read_plans(tmp_path / "plans.json") is None


def test_plans_kept_by_earlier_versions_are_read_without_their_seconds(tmp_path: Path) -> None:
    """Earlier files hold ``step_s``, a number or null, beside the memory."""
    every = [{"name": one.name, "parts": one.parts, "step_s": step_s} for one in PLANS for step_s in (1.5, None)]
    (tmp_path / "plans.json").write_text(json.dumps({"plans": every, "memory": 80 * GIB}))
    assert read_plans(tmp_path / "plans.json") == Plans(tuple(one for one in PLANS for _ in range(2)), 80 * GIB)


def test_all_plans_of_many_ranks_are_shown(tmp_path: Path) -> None:
    """840 ranks have eight sizes of groups, each with three ways to shard or seven numbers of stages."""
    every = Plans(tuple(Planned(f"plan {number}", SMALL) for number in range(80)))
    write_plans(tmp_path / "plans.json", every, tmp_path)
    assert read_plans(tmp_path / "plans.json") == every

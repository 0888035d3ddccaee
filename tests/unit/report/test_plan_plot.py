"""Plans that share out a model, as a picture."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from hpctrain.report import page, plan_plot
from hpctrain.report.chart import WIDTH, picture
from hpctrain.run.folder import RunDir
from hpctrain.run.plans import Planned, Plans, read_plans, write_plans
from hpctrain.run.view import RunView

MIB, GIB = 2**20, 2**30
SVG = "{http://www.w3.org/2000/svg}"
LETTER = 6.5


def parts(*sizes: int) -> dict[str, int]:
    names = ("program", "parameters", "gradients", "optimizer", "averages", "activations", "staging")
    return dict(zip(names, sizes, strict=True))


LARGE = parts(GIB, 20 * GIB, 20 * GIB, 40 * GIB, 0, 9 * GIB, 10 * GIB)
SMALL = parts(GIB, 5 * GIB, 5 * GIB, 10 * GIB, 0, 9 * GIB, 3 * GIB)
PLANS = (
    Planned("data 64", LARGE, 1.2345),
    Planned("tensor 8 x data 2 x pipeline 4, shard optimizer", SMALL, 0.5),
    Planned("tensor 8 x data 8", SMALL),
)


def drawn(found: Plans) -> ET.Element:
    """The picture's root; a legend and a title stand above the chart."""
    return ET.fromstring(picture([plan_plot.draw(found)]))


def spans(root: ET.Element) -> list[tuple[float, float, float, str]]:
    """(y, begin, end, text) of each text of the chart, ends from the widths of letters."""
    found = []
    for text in root.iter(f"{SVG}text"):
        words, kind = text.text or "", text.get("class") or ""
        if "x" in text.attrib and kind != "title" and "y" in text.attrib and text.get("x") != "19":
            x, width = float(text.attrib["x"]), LETTER * len(words)
            begin = x - width if "end" in kind else x - width / 2 if "middle" in kind else x
            found.append((float(text.attrib["y"]), begin, begin + width, words))
    return found


@pytest.mark.parametrize("memory", [None, 20 * GIB, 80 * GIB, 99 * GIB, 120 * GIB, 1000 * GIB])
@pytest.mark.parametrize("plans", [PLANS, PLANS[2:]])
def test_nothing_overlaps_or_leaves_the_picture(plans: tuple[Planned, ...], memory: int | None) -> None:
    root = drawn(Plans(plans, memory))
    height = float(root.attrib["height"])
    texts = spans(root)
    for y, begin, end, words in texts:
        assert begin >= 0 and end <= WIDTH and 0 < y < height, words
    for number, (y, begin, end, words) in enumerate(texts):
        for other_y, other_begin, other_end, other in texts[:number]:
            assert abs(y - other_y) >= 10 or begin >= other_end or other_begin >= end, f"{words} over {other}"
    for bar in (one for one in root.iter(f"{SVG}rect") if "data-value" in one.attrib):
        begin, width = float(bar.attrib["x"]), float(bar.attrib["width"])
        assert width >= 0 and begin >= plan_plot.NAMES and begin + width <= WIDTH - plan_plot.NUMBER


def test_bars_are_as_long_as_what_they_stand_for() -> None:
    chart = plan_plot.draw(Plans(PLANS, 80 * GIB), own="data 64")
    rects = [dict(re.findall(r'([\w-]+)="([^"]*)"', one)) for one in re.findall(r"<rect [^>]*>", chart.body)]
    found: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for one in rects:
        is_time = one["class"] == f"area c{plan_plot.GREY}"
        found[is_time].append((float(one["width"]), float(one["data-value"])))
    bars, times = found[False], found[True]
    scale = sum(width for width, _ in bars) / sum(value for _, value in bars)
    assert [width for width, _ in bars] == pytest.approx([scale * value for _, value in bars], abs=0.02)
    assert sum(value for _, value in bars) == sum(one.total for one in PLANS)
    assert [seconds for _, seconds in times] == [1.2345, 0.5]
    assert times[0][0] / times[1][0] == pytest.approx(1.2345 / 0.5, rel=1e-3)
    (line,) = re.findall(r'<line class="mark" x1="([\d.]+)"', chart.body)
    assert float(line) == pytest.approx(plan_plot.NAMES + 80 * GIB * scale, abs=0.1)
    assert "a rank has 80 GiB" in chart.body and "▸ data 64" in chart.body
    assert [key.name for key in chart.legend] == [name for name in LARGE if name != "averages"]
    far = plan_plot.draw(Plans(PLANS[2:], 1000 * GIB))
    assert "a rank has 1000 GiB →" in far.body and 'class="mark"' not in far.body and "ms a step" not in far.body


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
    assert "▸ tensor 8 x data 8<" in section.chart.body and section.chart.body.count("▸") == 1
    assert section.rows[0] == ("data 64", *LARGE.values(), sum(LARGE.values()), 1.2345)
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
        '{"plans": [{"name": "data 1", "parts": {"program": 1}}], "memory": null}',
        '{"plans": [{"name": "data 1", "parts": {"program": 1}, "step_s": 1e308}], "memory": null}',
        '{"plans": [{"name": "data 1", "parts": {"program": 1}, "step_s": -1}], "memory": null}',
        '{"plans": [{"name": "data \\u001b[31m", "parts": {"program": 1}, "step_s": 1}], "memory": null}',
        '{"plans": [{"name": "data 1", "parts": {"\\u0000": 1}, "step_s": 1}], "memory": null}',
    ],
)
def test_a_damaged_file_is_no_plans(tmp_path: Path, content: str) -> None:
    (tmp_path / "plans.json").write_text(content)
    assert read_plans(tmp_path / "plans.json") is None


def test_all_plans_of_many_ranks_are_shown(tmp_path: Path) -> None:
    """840 ranks have eight sizes of groups, each with three ways to shard or seven numbers of stages."""
    every = Plans(tuple(Planned(f"plan {number}", SMALL) for number in range(80)))
    write_plans(tmp_path / "plans.json", every, tmp_path)
    assert read_plans(tmp_path / "plans.json") == every

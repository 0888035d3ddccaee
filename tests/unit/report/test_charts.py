"""Charts: what they show of their values, and SVG that a page and a file can hold."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_hex

from hpctrain.errors import UserError
from hpctrain.report import charts, drawing
from hpctrain.report.charts import Bar, ChartLine
from hpctrain.report.drawing import LIGHT, Chart

SVG = "{http://www.w3.org/2000/svg}"


def axes_of(chart: Chart) -> Axes:
    (axes,) = drawing.figure_of([chart], titles=False).axes
    return axes


def every_chart() -> list[Chart]:
    looks = ("line", "dotted", "dashed", "points", "rings")
    lines = [ChartLine(look, [1, 2, 4], [1, 2, 3], look) for look in looks]
    other = ChartLine("other <&>", [1, 2, 4], [1, 3, 7], colour=3)
    return [
        charts.line_chart("lines <&>", [*lines, other], "step", {2.0: "mark"}),
        charts.line_chart("sizes", [other], "ranks", log_y=True, sizes=[1, 2, 4]),
        charts.stack_chart("stack", [1, 2], [ChartLine("a", [1, 2], [1, 2])]),
        charts.heat_chart("heat", np.array([[1.0, -1.0], [np.nan, 0.0]])),
        charts.confusion_chart("confusion", ["cat", "<dog>"], [[3, 1], [0, 5]]),
        charts.time_chart("attempts", [Bar("one </text>", 0, 1, True), Bar("two", 1, 2, False)], "seconds"),
    ]


def test_lines_and_marks_lie_where_their_values_are():
    chart = every_chart()[0]
    axes = axes_of(chart)
    found = {line.get_label(): np.transpose(line.get_data()).tolist() for line in axes.lines}
    assert found["dashed"] == [[1, 1], [2, 2], [4, 3]] and found["mark"] == [[2, 0], [2, 1]]
    assert to_hex(axes.lines[5].get_color()) == LIGHT["c3"]


def test_logarithmic_axes_have_the_sizes_as_ticks():
    axes = axes_of(every_chart()[1])
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["1", "2", "4"]
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    texts = {text.strip() for text in re.findall(r"<text[^>]*>([^<]*)</text>", drawing.inline(every_chart()[1]))}
    assert {"1", "2", "4", "5"} <= texts and not any("$" in text for text in texts)


def test_an_axis_from_zero_begins_there():
    chart = charts.line_chart("t", [ChartLine("a", [0, 1], [5, 6])], "x", from_zero=True)
    assert axes_of(chart).get_ylim()[0] == 0
    below = charts.line_chart("t", [ChartLine("a", [0, 1], [-5, -4])], "x", from_zero=True)
    low, high = axes_of(below).get_ylim()
    assert low < -5 and high == 0


@pytest.mark.parametrize("values", [[1e308, -1e308], [0.0, 5e-324], [3.0, 3.0], [7.0]])
def test_any_finite_values_are_drawn(values):
    chart = charts.line_chart("t", [ChartLine("a", range(len(values)), values)], "step", from_zero=True)
    assert "<path" in drawing.inline(chart)


def test_attempts_are_bars_as_long_as_they_took():
    axes = axes_of(every_chart()[5])
    bars: list[Any] = list(axes.patches)
    assert [(bar.get_x(), bar.get_width()) for bar in bars] == [(0, 1), (1, 1)]
    assert [to_hex(bar.get_facecolor()) for bar in bars] == [LIGHT["c2"], LIGHT["c4"]]


def test_shades_tell_sign_and_size_and_what_is_unknown():
    found = shades(charts.heat_chart("heat", np.array([[50.0, -25.0], [np.nan, 0.0]])))
    assert [to_hex(found[0, column, :3]) for column in (0, 1)] == [LIGHT["c1"], LIGHT["c0"]]
    assert found[..., 3].round(2).tolist() == [[1.0, pytest.approx(0.52, abs=0.01)], [0.0, 0.05]]
    assert shades(charts.heat_chart("heat", np.array([[0.5]])))[0, 0, 3] < 0.1, "noise is no finding"
    assert shades(charts.heat_chart("heat", np.full((2, 2), np.nan)))[..., 3].max() == 0
    right, wrong = shades(every_chart()[4])[0]
    assert (to_hex(right[:3]), to_hex(wrong[:3])) == (LIGHT["c0"], LIGHT["c1"]) and 0.8 > right[3] > wrong[3]


def shades(chart: Chart) -> Any:
    """Colour and opacity of a chart's cells."""
    image: Any = axes_of(chart).images[0]
    return image.to_rgba(image.get_array())


def test_a_picture_is_a_file_with_titles_and_legends_that_loads_nothing():
    text = drawing.picture(every_chart())
    found = {"".join(element.itertext()).strip() for element in ET.fromstring(text).iter(f"{SVG}text")}
    assert {"lines <&>", "sizes", "stack", "heat", "attempts", "dotted", "other <&>", "<dog>"} <= found
    assert not re.search(r'href="(?!#|data:)|url\((?!#)|@import|var\(', text)


def test_a_chart_in_a_page_takes_the_colours_of_the_page():
    for chart in every_chart():
        text = drawing.inline(chart)
        ET.fromstring(text.replace("<svg ", '<svg xmlns:xlink="x" ', 1))
        assert "var(--soft)" in text and not set(LIGHT.values()) & set(re.findall(r"#\w{6}", text))
        assert not re.search(r"https?://|<style|<metadata", text)
        assert "</text>" not in re.sub(r"<text[^>]*>[^<]*</text>", "", text), "names are escaped"


def test_no_two_charts_of_a_page_have_parts_of_the_same_name():
    text = "".join(map(drawing.inline, every_chart()))
    names = re.findall(r' id="([^"]+)"', text)
    assert len(names) == len(set(names)) > 6
    assert set(re.findall(r'(?:href="|url\()#([^")]+)', text)) == set(names)


def test_names_are_shown_as_they_are():
    chart = charts.line_chart("t", [ChartLine("_hidden $x$ \x00\x1b[31m" + 90 * "n", [0, 1], [0, 1])], "step")
    axes = axes_of(chart)
    (label,) = axes.get_legend_handles_labels()[1]
    assert label.strip().startswith("_hidden $x$") and label.isprintable() and len(label) <= 61
    assert "_hidden $x$" in drawing.inline(chart)


def test_without_matplotlib_there_is_no_chart_and_one_line_to_install_it(monkeypatch):
    monkeypatch.setattr(drawing, "can_draw", lambda: False)
    assert drawing.inline(every_chart()[0]) == ""
    with pytest.raises(UserError) as caught:
        drawing.picture(every_chart())
    assert caught.value.fix == "pip install 'hpctrain[report]'"

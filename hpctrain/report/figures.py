"""The plots of a report as PNG files, by matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain.errors import MissingExtra, UserError
from hpctrain.report.plots import LinePlot, StackPlot, line_plots, phase_plot
from hpctrain.report.summary import make_attempts
from hpctrain.run.history import RunData

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def save_figures(data: RunData, folder: Path) -> list[Path]:
    """Writes one PNG for each plot into a folder and returns their paths.

    Raises:
        MissingExtra: matplotlib is not installed.
        UserError: the folder cannot be made or written.
    """
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise MissingExtra("matplotlib", "report") from error
    drawn = [(plot.key, draw_lines(plot)) for plot in line_plots(data, make_attempts(data))]
    stack = phase_plot(data)
    if stack:
        drawn.append((stack.key, draw_stack(stack)))
    paths = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for key, figure in drawn:
            paths.append(folder / f"{key}.png")
            figure.savefig(paths[-1], dpi=120)
    except OSError as error:
        raise UserError(f"pictures cannot be written into {folder}: {error.strerror}", "name a folder") from error
    return paths


def draw_lines(plot: LinePlot) -> Figure:
    """A line chart."""
    figure, axes = _axes(plot.title, plot.x_label)
    for curve in plot.curves:
        axes.plot(curve.x, curve.y, label=curve.name, linewidth=1.4, marker="o" if len(curve.x) == 1 else None)
    for mark in plot.marks:
        axes.axvline(mark.x, color="gray", linestyle=":", linewidth=1)
    if plot.from_zero:
        axes.set_ylim(bottom=0)
    axes.legend(frameon=False, fontsize=8)
    return figure


def draw_stack(plot: StackPlot) -> Figure:
    """The phase breakdown."""
    figure, axes = _axes(plot.title, plot.x_label)
    axes.stackplot(plot.x, *(layer.y for layer in plot.layers), labels=[layer.name for layer in plot.layers], alpha=0.8)
    axes.set_ylabel("%")
    axes.legend(frameon=False, fontsize=8, ncols=2)
    return figure


def _axes(title: str, x_label: str):  # type: ignore[no-untyped-def]
    from matplotlib.figure import Figure  # not pyplot: no global state, no display

    figure = Figure(figsize=(7.2, 3.2), layout="constrained")
    axes = figure.subplots()
    axes.set_title(title, fontsize=10)
    axes.set_xlabel(x_label)
    axes.grid(alpha=0.3)
    return figure, axes

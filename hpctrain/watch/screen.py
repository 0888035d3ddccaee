"""Formats a view as coloured lines of text that fit the terminal. Pure."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from rich.text import Text

from hpctrain.run.events import RankDevice
from hpctrain.run.run_status import LiveRank, Word
from hpctrain.system.foreign_text import line as clean
from hpctrain.system.quantities import VISIBLE_MFU, duration, number, size
from hpctrain.watch.view import Measured, View

STALE_S = 30.0
"""Silence in seconds above which it is shown for a running run."""
LABEL = 19
"""Width of the names on the left."""
SPARK = 32
"""Maximum width of a curve."""
MOST_LINES = 6
"""Most lines of curves; if there are more, the last line shows only the values of the rest."""
LEAST_RANKS = 3
"""Fewest lines for ranks, however low the screen."""
COLOURS = ("blue", "green", "yellow", "magenta", "cyan", "red", "bright_black", "white")
STATE_COLOURS = {
    Word.RUNNING: "bold green",
    Word.FINISHED: "bold green",
    Word.FAILED: "bold red",
    Word.CANCELLED: "bold red",
    Word.UNKNOWN: "bold magenta",
}


LEVELS = "▁▂▃▄▅▆▇█"
"""Characters of a curve, from low to high."""


def draw(view: View, width: int, height: int) -> list[Text]:
    """Draws the view in at most ``width`` columns and ``height`` lines; ranks get the lines that are left."""
    head = [*_head(view, width), *_curves(view, width), *_checkpoint(view, width)]
    head += [*_phases(view, width), *_account(view, width)]
    foot = list(_foot(view, width))
    room = max(height - len(head) - len(foot), LEAST_RANKS + 1)
    body = [*head, *_ranks(view, width, room)]
    lines = [*body[: max(height - len(foot), 0)], *foot][:height]
    for line in lines:
        line.no_wrap = True
        line.truncate(width, overflow="ellipsis")
    return lines


def sparkline(values: Sequence[float], width: int) -> str:
    """Draws a curve of at most ``width`` columns, scaled from its lowest value to its highest."""
    if not values:
        return ""
    groups = np.array_split(np.asarray(values, dtype=np.float64), min(width, len(values)))
    means = np.array([group.mean() for group in groups])
    low, span = means.min(), np.ptp(means)
    top = len(LEVELS) - 1
    heights = np.rint((means - low) / span * top).astype(int) if span > 0 else np.full(len(means), top // 2)
    return "".join(LEVELS[height] for height in heights)


def age(seconds: float) -> str:
    """Formats an age: "40 s ago"."""
    return f"{duration(seconds) if seconds >= 60 else f'{seconds:.0f} s'} ago"


def _head(view: View, width: int) -> Iterator[Text]:
    first = Text().append(clean(view.run), "bold")
    first.append("  ").append(view.state.word.value, STATE_COLOURS.get(view.state.word, "bold yellow"))
    ranks = f"{view.num_ranks} rank{'' if view.num_ranks == 1 else 's'}" if view.num_ranks else ""
    hosts = f" on {view.num_hosts} host{'' if view.num_hosts == 1 else 's'}" if ranks and view.num_hosts else ""
    parts = [
        f"attempt {view.attempt}" if view.attempt else "",
        f"{view.requeues} requeue{'' if view.requeues == 1 else 's'}" if view.requeues else "",
        ranks + hosts,
        view.plan,
        view.framework or "",
        f"reducer {view.reducer}" if view.reducer else "",
        f"job {view.job}" if view.job else "",
    ]
    yield first.append("".join(f"  {clean(part)}" for part in parts if part))
    if view.state.why:
        yield Text(clean(view.state.why), style="italic")
    if view.is_behind:
        yield Text("reading what has happened so far ...", style="dim")
    if view.step is not None:
        yield _progress(view, width)
    yield from _rates(view, width)


def _progress(view: View, width: int) -> Text:
    assert view.step is not None
    share = min(view.step / view.total_steps, 1.0) if view.total_steps else None
    epoch = ""
    if view.epoch is not None:
        epoch = f"epoch {view.epoch}" + (f"/{view.epochs}" if view.epochs else "")
    line = Text(f"step {view.step:,}" + (f"/{view.total_steps:,}" if view.total_steps else ""))
    if share is not None:
        bar = max(8, min(60, width - len(line.plain) - len(epoch) - 12))
        done = int(share * bar)
        line.append("  ").append("━" * done, "green").append("─" * (bar - done), "dim")
        line.append(f"  {int(100 * share)}%")
    return line.append(f"  {epoch}" if epoch else "")


def _rates(view: View, width: int) -> Iterator[Text]:
    runs = view.state.word is Word.RUNNING
    late = view.end_in_s is not None and view.limit_in_s is not None and view.end_in_s > view.limit_in_s
    silence = view.silent_s if view.silent_s is not None and (not runs or view.silent_s > STALE_S) else None
    parts = [
        (f"{number(view.steps_per_s)} steps/s" if view.steps_per_s else "", ""),
        (f"{number(view.samples_per_s)} samples/s" if view.samples_per_s else "", ""),
        (f"{number(view.tokens_per_s)} tokens/s" if view.tokens_per_s else "", ""),
        (f"{100 * view.mfu:.3g}% MFU" if view.mfu is not None and view.mfu >= VISIBLE_MFU else "", ""),
        (f"ends in {duration(view.end_in_s)}" if view.end_in_s is not None else "", "yellow" if late else ""),
        (f"time limit in {duration(view.limit_in_s)}" if view.limit_in_s is not None else "", "yellow" if late else ""),
        (f"last event {age(silence)}" if silence is not None else "", "yellow" if runs else "dim"),
    ]
    if shown := [part for part in parts if part[0]]:
        yield from _flowing(Text(), shown, width, 2)


def _curves(view: View, width: int) -> Iterator[Text]:
    for line in view.lines[: MOST_LINES - 1] if len(view.lines) > MOST_LINES else view.lines:
        yield _curve(line, width)
    if len(view.lines) > MOST_LINES:
        rest = view.lines[MOST_LINES - 1 :]
        yield Text(f"{'':{LABEL}}" + "  ".join(f"{clean(line.name)} {number(line.value)}" for line in rest))


def _curve(line: Measured, width: int) -> Text:
    name = "learning rate" if line.name == "lr" else clean(line.name)
    value = f"x{number(line.value)}" if line.name == "lr" else number(line.value)
    text = Text(f"{name:<{LABEL}.{LABEL}} ").append(f"{value:>10}", "" if line.value is not None else "bold red")
    room = min(SPARK, width - LABEL - 36)
    if room > 4 and line.history:
        curve = sparkline(line.history, room)
        low = min(line.history)
        high = max(line.history)
        text.append("  ").append(curve, "cyan")
        text.append(f"{'':{room - len(curve)}}  {number(low)} to {number(high)}" if low != high else "", "dim")
    return text


def _checkpoint(view: View, width: int) -> Iterator[Text]:
    saved = view.checkpoint
    if saved is None:
        return
    parts = [
        f"step {saved.step:,}",
        age(saved.age_s) if saved.age_s is not None else "",
        size(saved.bytes) if saved.bytes is not None else "",
        f"written in {duration(saved.write_s)}" if saved.write_s is not None else "",
        f"stall {duration(saved.stall_s)}" if saved.stall_s is not None else "",
    ]
    yield from _wrapped(f"{'checkpoint':<{LABEL}} " + ", ".join(part for part in parts if part), width, "")


def _phases(view: View, width: int) -> Iterator[Text]:
    whole = sum(view.phases_s.values())
    if not whole:
        return
    words = [f"{clean(name)} {spent / whole:.0%}" for name, spent in view.phases_s.items() if spent >= 0.005 * whole]
    text = Text(f"{'time of a step':<{LABEL}} {1e3 * whole:.3g} ms: ")
    yield from _flowing(text, zip(words, itertools.cycle(COLOURS)), width, LABEL + 1)


def _account(view: View, width: int) -> Iterator[Text]:
    if view.account is not None and view.account.text:
        yield from _wrapped(f"{'goodput':<{LABEL}} {view.account.text}", width, "")


def _ranks(view: View, width: int, room: int) -> Iterator[Text]:
    """Busy and wait time of each rank; only the slowest, in order, if there is not a line for each."""
    if not view.ranks:
        return
    number_of = max(view.num_ranks or 0, len(view.ranks))
    shown: Sequence[LiveRank] = view.ranks
    if number_of > room - 1 or len(view.ranks) < number_of:
        shown = sorted(view.ranks, key=lambda rank: -rank.excess)[: room - 1]
    longest = max(rank.busy_s + rank.wait_s for rank in shown) or 1e-9
    host = min(max(4, *(len(rank.host) for rank in shown)), 24)
    devices = {device.rank: device for device in view.devices}
    heads = f" {'GiB':>6} {'GPU':>4} {'W':>4} {'MHz':>5}" if devices else ""
    bar = max(8, width - host - 34 - len(heads))
    title = f"{'rank':>5} {'host':<{host}} {'busy ms':>8} {'wait ms':>8} {'excess':>7}{heads}"
    which = f"  the {len(shown)} slowest of {number_of}" if len(shown) < number_of else ""
    yield Text(title + which + (f"  up to step {view.ranks_step:,}" if view.ranks_step else ""), style="dim")
    for rank in shown:
        busy = round(bar * rank.busy_s / longest)
        wait = round(bar * (rank.busy_s + rank.wait_s) / longest) - busy
        line = Text(f"{rank.rank:>5} {clean(rank.host):<{host}.{host}} ")
        line.append(f"{1e3 * rank.busy_s:>8.1f} {1e3 * rank.wait_s:>8.1f} {rank.excess:>+7.0%} ")
        if heads:
            slowed = bool(rank.rank in devices and devices[rank.rank].slowed)
            line.append(_device(devices.get(rank.rank)), "yellow" if slowed else "")
        yield line.append("█" * busy, "green").append("░" * wait, "dim")


def _device(device: RankDevice | None) -> str:
    """Peak memory, utilisation, power and clock of a GPU, in columns."""
    found = device or RankDevice()

    def shown(value: float | None, format: str, scale: float = 1.0) -> str:
        return format.format("–" if value is None else f"{scale * value:.0f}")

    gib = "–" if found.peak_bytes is None else f"{found.peak_bytes / 2**30:.1f}"
    return f"{gib:>6} {shown(found.busy, '{:>3}', 100)}% {shown(found.watts, '{:>4}')} {shown(found.mhz, '{:>5}')} "


def _foot(view: View, width: int) -> Iterator[Text]:
    """The monitor's findings and the last warnings, at most two lines each."""
    for verdict in view.verdicts[:4]:
        yield from _wrapped(clean(verdict), width, "bold yellow")
    if view.ranks and not view.verdicts and view.state.word is Word.RUNNING:
        yield Text("nothing stands out", style="dim")
    if view.left_out:
        yield from _wrapped(clean(view.left_out), width, "dim")
    said = {*view.verdicts, view.state.why}
    for warned in [warned for warned in view.warnings if warned.text not in said][-3:]:
        place = f"attempt {warned.attempt}" + (f", step {warned.step:,}" if warned.step is not None else "")
        text = f"{age(max(0.0, view.time - warned.time))}, {place}: {clean(warned.text)}"
        yield from _wrapped(text, width, "" if warned.is_orderly else "red")


def _flowing(line: Text, words: Iterable[tuple[str, str]], width: int, indent: int) -> Iterator[Text]:
    """The line with these words and their styles; continued on indented lines where it is full."""
    for word, style in words:
        if len(line.plain) + len(word) > width and len(line.plain) > indent:
            line.rstrip()
            yield line
            line = Text(" " * indent)
        line.append(word, style).append("  ")
    line.rstrip()
    yield line


def _wrapped(text: str, width: int, style: str) -> Iterator[Text]:
    lines = textwrap.wrap(text, width, subsequent_indent="  ")
    for line in itertools.islice(lines, 2):
        yield Text(line, style=style)

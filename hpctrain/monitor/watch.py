"""A run's live view as text: the last window, rank by rank, and what the monitor says."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

STALE_S = 30.0
"""Age from which on the view is called old."""


def read(monitor: Path) -> dict[str, Any] | None:
    """What the first node's agent wrote last; None where it has not written yet."""
    try:
        return dict(json.loads((monitor / "live.json").read_bytes()))
    except (OSError, ValueError):
        return None


def render(view: Mapping[str, Any], now: float, width: int = 80, most: int = 40) -> str:
    """The picture: one bar a rank, busy in full blocks and waiting in light ones, and the sentences below.

    Args:
        view: what ``read`` gave.
        now: Unix seconds.
        width: columns of the terminal.
        most: ranks that are shown, the slowest ones where there are more.
    """
    ranks: Sequence[Mapping[str, Any]] = sorted(view["ranks"], key=lambda rank: -rank["excess"])[:most]
    ranks = sorted(ranks, key=lambda rank: rank["rank"])
    longest = max((rank["busy_s"] + rank["wait_s"] for rank in ranks), default=0) or 1e-9
    host = max([len(rank["host"]) for rank in ranks], default=4)
    bar = max(10, width - host - 42)
    age = now - view["time"]
    lines = [
        f"step {view['step']}, attempt {view['attempt']}, {view['num_ranks']} ranks"
        + (f", the {len(ranks)} slowest shown" if len(ranks) < view["num_ranks"] else "")
        + (f", {age:.0f} s ago" if age > STALE_S else ""),
        f"{'rank':>5} {'host':<{host}} {'busy ms':>8} {'wait ms':>8} {'excess':>7}",
    ]
    for rank in ranks:
        busy = round(bar * rank["busy_s"] / longest)
        wait = round(bar * (rank["busy_s"] + rank["wait_s"]) / longest) - busy
        lines.append(
            f"{rank['rank']:>5} {rank['host']:<{host}} {1e3 * rank['busy_s']:>8.1f} {1e3 * rank['wait_s']:>8.1f} "
            f"{rank['excess']:>+7.0%} {'█' * busy}{'░' * wait}"
        )
    lines += ["", *(view["verdicts"] or ["nothing stands out"])]
    if view["dropped_windows"]:
        lines.append(f"{view['dropped_windows']} windows were dropped: the agents do not keep up")
    return "\n".join(lines)

"""Puts findings and hangs into plain sentences, one each."""

from __future__ import annotations

from collections.abc import Sequence

from hpctrain.monitor.chief.finding import Finding, FindingState, Kind
from hpctrain.monitor.chief.hang import Beat, HangFinding
from hpctrain.run.grid import Grid
from hpctrain.system.quantities import ranges

WORDS = {
    "data": "reading data",
    "to_device": "copying data to the device",
    "forward": "the forward pass",
    "backward": "the backward pass",
    "optimizer": "the optimizer",
    "callbacks": "callbacks (hooks, logging, evaluation)",
    "checkpoint": "checkpoints",
    "rest": "code outside the marked phases",
    "gc": "Python's garbage collection",
    "compute": "computing, all phases equally",
    "mixed": "several phases",
    "network": "the exchange",
    "": "no phase stands out",
}


def of_verdict(verdict: Finding) -> str:
    """Returns the sentence for the log."""
    text = BY_KIND[verdict.kind](verdict)
    if verdict.state is FindingState.CLEARED:
        be, whose = ("is", "its") if len(verdict.ranks) == 1 else ("are", "their")
        return CLEARED[verdict.kind].format(who=who(verdict), be=be, whose=whose)
    if verdict.evidence:
        text += f" ({'; '.join(verdict.evidence)})"
    return f"perhaps {text}" if verdict.state is FindingState.SUSPECT else text


def who(verdict: Finding) -> str:
    """Names the ranks and their host."""
    if verdict.kind is Kind.HOST:
        return f"host {verdict.hosts[0]} (ranks {numbers(verdict.ranks)})"
    where = f" on {verdict.hosts[0]}" if len(verdict.hosts) == 1 else ""
    return f"{of_ranks(verdict.ranks)}{verdict.place}{where}"


def numbers(ranks: Sequence[int]) -> str:
    """Formats ranks as ranges: 0-3, 7."""
    runs = ranges(ranks)
    return ", ".join(runs[:8]) + (", ..." if len(runs) > 8 else "")


def of_ranks(ranks: Sequence[int]) -> str:
    """Names ranks: rank 3, ranks 0-3, 7."""
    return f"rank{'s' if len(ranks) != 1 else ''} {numbers(ranks)}"


def costs(verdict: Finding) -> str:
    """Says what it costs."""
    return f"which costs {verdict.cost:.0%} of the time" + (f" {verdict.note}" if verdict.note else "")


def of_plan(verdict: Finding) -> str:
    """Names the slow stage or tensor index and the ranks that have it."""
    load = verdict.load
    what = "a part of the model" if load is None else f"{load.axis} {load.index}"
    return f"{what} ({of_ranks(verdict.ranks)})"


def of_work(verdict: Finding) -> str:
    """Says how ranks' work differs."""
    if verdict.ranks:
        return f"ranks have unequal work (most: {numbers(verdict.ranks)})"
    if verdict.power:
        return f"ranks have unequal work (time grows roughly as work^{verdict.power:g})"
    return "ranks take turns at being slowest, as if their batches were unequal"


def even_out(verdict: Finding) -> str:
    """Says how to even out work that changes from step to step, or how to find out whether it does."""
    if verdict.ranks:
        return ""
    if verdict.power:
        return "; bucket samples by length, for example with LengthGroupedSampler"
    told = "reported work does not explain it" if verdict.power == 0 else "report tokens as work to confirm it"
    return f"; if samples differ in length, bucket them by length (LengthGroupedSampler); {told}"


def no_rank(verdict: Finding) -> str:
    """Returns "no rank", or "no other rank" if some are already named."""
    return "no other rank" if verdict.has_named else "no rank"


BY_KIND = {
    Kind.RANK: lambda v: (
        f"{who(v)} {'is' if len(v.ranks) == 1 else 'are'} {v.slowdown:.0%} slower than "
        f"{'its' if len(v.ranks) == 1 else 'their'} peers: {WORDS[v.cause]}, {costs(v)}"
    ),
    Kind.HOST: lambda v: f"{who(v)} is {v.slowdown:.0%} slower than the others: {WORDS[v.cause]}, {costs(v)}",
    Kind.PAUSES: lambda v: f"{who(v)} holds up the others with long pauses in some steps: {WORDS[v.cause]}, {costs(v)}",
    Kind.MANY: lambda v: (
        f"{len(v.ranks)} ranks ({numbers(v.ranks)}) are {v.slowdown:.0%} slower than the others: "
        f"too many to single one out, {costs(v)}"
    ),
    Kind.UNEVEN: lambda v: (
        f"{who(v)} takes {v.slowdown:.0%} longer than its peers since the start: {WORDS[v.cause]}, {costs(v)}; "
        "with so few ranks there is no telling which is off"
    ),
    Kind.ROTATING: lambda v: (
        f"pauses on changing ranks ({WORDS[v.cause]}) cost {v.cost:.0%} of the time: {no_rank(v)} is the cause"
    ),
    Kind.IMBALANCE: lambda v: (
        f"{of_work(v)}, which costs {v.cost:.0%} of the time ({v.step_s:.2g} s per step): {no_rank(v)} is slow"
        f"{even_out(v)}"
    ),
    Kind.PLAN: lambda v: (
        f"{of_plan(v)} takes {v.slowdown:.0%} longer than the other{'s' if v.load else ' ranks'} on every rank that "
        f"has it: {WORDS[v.cause]}, which costs {v.cost:.0%} of the time: the layers are split unevenly, "
        f"{no_rank(v)} is slow"
    ),
    Kind.NETWORK: lambda v: (
        f"the exchange takes {1 + v.slowdown:.1f} times as long as at the start, {costs(v)}: "
        f"network, {no_rank(v)} is the cause"
    ),
    Kind.GLOBAL: lambda v: (
        f"all {'other ' if v.has_named else ''}ranks are {v.slowdown:.0%} slower than at the start, {costs(v)}: "
        f"{no_rank(v)} is the cause"
    ),
    Kind.ABSTAIN: lambda v: f"cannot compare ranks: {of_ranks(v.ranks)}: {v.note}",
}
CLEARED = {
    Kind.RANK: "{who} {be} as fast as {whose} peers again",
    Kind.HOST: "{who} is as fast as the others again",
    Kind.PAUSES: "{who} no longer holds up the others with pauses",
    Kind.MANY: "ranks are equally fast again",
    Kind.UNEVEN: "ranks are equally fast now",
    Kind.ROTATING: "pauses on changing ranks no longer cost much",
    Kind.IMBALANCE: "work is about equal again",
    Kind.PLAN: "stages and parts of layers take about the same time again",
    Kind.NETWORK: "the exchange is as fast as at the start again",
    Kind.GLOBAL: "ranks are as fast as at the start again",
    Kind.ABSTAIN: "ranks can be compared again",
}


def of_hang(hang: HangFinding, hosts: Sequence[str], action: str, grid: Grid | None = None) -> str:
    """Returns the sentence about a hang."""
    grid = grid or Grid(len(hosts))
    named = [described(beat, hosts, grid) for beat in hang.culprits[:4]]
    if len(hang.culprits) > 4:
        named.append(f"and {len(hang.culprits) - 4} more")
    ending = "ending this attempt, it can be resumed from the last checkpoint" if action == "abort" else "only reported"
    if hang.died:
        return f"{'; '.join(named)}: {ending}"
    if not named:
        return f"no step for {hang.silence_s:.0f} s: every rank {common_activity(hang.waiting)}: {ending}"
    return f"no step for {hang.silence_s:.0f} s: {'; '.join(named)}; {waiting_ranks(hang)}: {ending}"


def common_activity(beats: Sequence[Beat]) -> str:
    """Says what ranks do when none is to blame, by group if they differ."""
    doing: dict[str, list[int]] = {}
    for beat in beats:
        doing.setdefault(beat.doing, []).append(beat.rank)
    if len(doing) == 1:
        return next(iter(doing))
    return " or ".join(f"{what} ({of_ranks(ranks)})" for what, ranks in doing.items())


def waiting_ranks(hang: HangFinding) -> str:
    """Says how many ranks wait, and which of them wait for neighbours within a pass."""
    near = [beat.rank for beat in hang.waiting if beat.waits_for_neighbours]
    them = f" ({of_ranks(near)} in the middle of a pass)" if near else ""
    count = len(hang.waiting)
    return f"{count} rank{'s wait' if count != 1 else ' waits'}{them}"


def described(beat: Beat, hosts: Sequence[str], grid: Grid) -> str:
    """Describes one rank in a hang."""
    return f"rank {beat.rank}{grid.label(beat.rank)} on {hosts[beat.rank]} {beat.doing} after {beat.steps} steps"

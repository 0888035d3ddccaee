"""Judges windows: who is slow, why, and what it costs. Keeps the state between windows."""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from hpctrain.monitor.chief import slowness
from hpctrain.monitor.chief.baseline import RECENT, Baseline, Pauses
from hpctrain.monitor.chief.finding import Finding, FindingState, Kind, Suspicion
from hpctrain.monitor.chief.peers import Peers, heaviest
from hpctrain.monitor.window import CAUSES, GC, Window
from hpctrain.run.grid import Grid
from hpctrain.system.array_types import Bools, Ints, Reals


@dataclass(frozen=True)
class Rule:
    """Thresholds; docs/detection.md shows what they detect and miss."""

    slow: float = 0.07
    """Smallest excess over the median of its peers, as a fraction, at which a rank is slow."""
    z: float = 3.5
    """Smallest number of robust standard deviations at which a rank is slow; both limits must be reached."""
    calm: float = 0.04
    """Excess below which a rank is calm."""
    confirm_windows: int = 2
    """Slow windows in a row that confirm a finding."""
    clear_windows: int = 3
    """Calm windows in a row that clear it."""
    single_reports: int = 8
    """Ranks or hosts reported in separate sentences when a window names many; the others share one."""
    many: float = 1 / 3
    """Above this fraction of slow ranks, none is singled out."""
    few_ranks: int = 3
    """Up to this number of peers, their median is unreliable, and a rank must also be slower than its baseline."""
    pauses: float = 0.05
    """Fraction of the time that a rank's pauses must cost to be reported."""
    rotating: float = 0.10
    """Fraction of the time that all ranks' pauses together must cost to be reported."""
    imbalance: float = 0.10
    """Fraction of the time lost to unequal work from which it is reported."""
    shortest_turns: float = 0.02
    """Seconds of a step below which ranks that take turns are not reported: the system's own work looks the same."""
    uneven_plan: float = 0.07
    """Fraction of the time that equal stages or tensor indexes would save from which it is reported."""
    luck: float = 1e-6
    """A rank is blamed for its pauses if pauses hitting random ranks would look like that with a lower probability."""


@dataclass(frozen=True)
class Measures:
    """One window in numbers, for the live view and the heat map. Shares are fractions of 1."""

    window: Window
    medians: Reals
    """[R] median busy seconds per step, corrected for work."""
    raw: Reals
    """[R] fraction above the median of the others, without the correction for work."""
    excess: Reals
    """[R] the same with or without the correction, whichever is smaller."""
    cost: Reals
    """[R] fraction of the window that the job would save without this rank's delay."""
    slow: Bools
    """[R] slow in this window."""
    few: Bools
    """[R] with too few peers for their median to be a reference."""
    levelled: Reals
    """[R] medians as multiples of their peers' median."""
    chance: float = 0.0
    """Fraction by which a rank's median may differ by chance, because its steps differ."""


class Judge:
    """Judges one window at a time. Independent of processes, files and clocks.

    Args:
        hosts: [N] host of each rank.
        rule: thresholds.
        grid: places of the ranks; by default each rank holds the whole model.
    """

    def __init__(self, hosts: Sequence[str], rule: Rule | None = None, grid: Grid | None = None) -> None:
        self.hosts = tuple(hosts)
        self.rule = rule or Rule()
        self.peers = Peers(grid or Grid(len(hosts)), self.rule.few_ranks)
        self.baseline = Baseline(len(hosts), self.peers)
        self.ranks_of_host = Counter(self.hosts)
        standing = functools.partial(
            Suspicion, confirm_after=self.rule.confirm_windows, clear_after=self.rule.clear_windows
        )
        self.accused = standing(len(hosts))
        """Ranks whose typical step is slow."""
        self.extra = np.zeros((len(hosts), len(CAUSES)))
        """[N, len(CAUSES)] seconds by which phases of slow ranks exceeded their peers', summed while they are slow."""
        self.pausers = standing(len(hosts))
        """Ranks that hold up the others with pauses."""
        self.conditions = standing(len(Kind), growth=2)
        """Findings about more than one rank, in the order of ``Kind``; a busy machine makes them come and go."""
        self.pauses = Pauses(len(hosts))
        self.measures: Measures | None = None

    def judge(self, window: Window) -> list[Finding]:
        """Returns the findings that this window changes, most important first."""
        if len(window.ranks) < 2:
            zero = np.zeros(len(window.ranks))
            self.measures = Measures(window, np.median(window.busy, axis=1), zero, zero, zero, zero > 0, zero > 0, zero)
            return []
        silent = np.all(window.wait <= 0, axis=1)
        if silent.any():
            return self.abstain(window, silent)
        verdicts = self.condition(Kind.ABSTAIN, window, is_bad=False, is_calm=True)
        busy = window.busy - slowness.work_explains(window.busy, window.work)
        self.measures = now = self.measure(window, busy)
        self.pauses.add(window, busy)
        own = self.baseline.growth(window, now.medians)
        slow, are_many = self.slow_ranks(now, own)
        verdicts += self.ranks(now, slow, are_many)
        turns = self.turns(window, busy, slow | self.named()[window.ranks])
        verdicts += self.pausing(window, turns >= self.rule.imbalance) + self.imbalance(now, busy, turns)
        verdicts += self.uneven_plan(now, slow | self.named()[window.ranks])
        if own is not None:
            verdicts += self.change_of_all(now, own, slow | self.named()[window.ranks])
        self.baseline.learn(window, now.medians)
        return verdicts

    def measure(self, window: Window, busy: Reals) -> Measures:
        """Measures one window; compares ranks within it."""
        medians, ranks, past = np.median(busy, axis=1), window.ranks, self.baseline.busy
        raw = self.peers.excess(np.median(window.busy, axis=1), ranks, past)
        excess = np.minimum(raw, self.peers.excess(medians, ranks, past))
        z = self.peers.robust_z(medians, busy, ranks, past)
        return Measures(
            window,
            medians,
            raw,
            excess,
            cost=slowness.cost_of_each(window.busy, window.wait),
            slow=(excess >= self.rule.slow) & (z >= self.rule.z),
            few=self.peers.few(ranks),
            levelled=self.peers.levelled(medians, ranks, past),
            chance=slowness.chance_excess(busy, self.rule.z),
        )

    # --- ranks -------------------------------------------------------------------------------------------------------

    def slow_ranks(self, now: Measures, own: Reals | None) -> tuple[Bools, bool]:
        """Returns [R] ranks that are slower than their peers in the typical step, and whether they are too many."""
        window, slow = now.window, now.slow
        size, few = len(window.ranks), now.few
        if few.any():
            slow = slow & (~few | self.baseline.fell_behind(now.medians, own, self.rule.slow))
        many = slow.sum() > max(1, self.rule.many * size) and not self.is_one_host_that_changed(window, slow, own)
        if not few.all() and (group := self.slow_group(now.levelled, own, now.chance)) is not None:
            many, slow = not self.is_one_host_that_changed(window, group, own), slow | group
        return slow, bool(many and not slow.all())

    def ranks(self, now: Measures, slow: Bools, are_many: bool) -> list[Finding]:
        """Findings about slow ranks, or about too many of them."""
        window, levelled = now.window, now.levelled
        verdicts = self.uneven(now) if now.few.all() else []
        verdicts += self.condition(
            Kind.MANY,
            window,
            is_bad=are_many,
            is_calm=not are_many,
            ranks=tuple(window.ranks[slow].tolist()),
            slowdown=float(np.median(levelled[slow]) / np.median(levelled[~slow]) - 1) if are_many else 0.0,
            cost=slowness.cost_of_group(window.busy, window.wait, slow) if are_many else 0.0,
        )
        return verdicts + self.accuse(now, np.zeros_like(slow) if are_many else slow)

    def named(self) -> Bools:
        """[N] ranks confirmed as slow or pausing."""
        return np.asarray(self.accused.confirmed | self.pausers.confirmed)

    def slow_group(self, medians: Reals, own: Reals | None, chance: float) -> Bools | None:
        """[R] slow ranks, if they are numerous enough to distort the spread or even the median; otherwise None.

        Up to half of the ranks show as a gap between two groups; more than half, only against their own baseline.
        """
        size, least = len(medians), max(self.rule.slow, chance)
        upper = slowness.upper_group(medians, least)
        if self.rule.many * size < upper.sum() <= 0.5 * size:
            return upper
        if own is not None:
            risen = own >= 1 + least
            if 0.5 * size < risen.sum() < size and np.median(own[risen]) - np.median(own[~risen]) >= least:
                return risen
        return None

    def accuse(self, now: Measures, slow: Bools) -> list[Finding]:
        """Records the slow ranks of a window; returns findings about ranks whose state changes."""
        window = now.window
        self.extra[window.ranks[slow]] += self.extra_of(window, np.flatnonzero(slow))
        changes = self.accused.observe(window.ranks, slow, now.excess < self.rule.calm)
        self.extra[window.ranks[~self.accused.confirmed[window.ranks] & ~slow]] = 0
        return [finding for state, ranks in changes.items() for finding in self.findings_of(now, state, ranks)]

    def findings_of(self, now: Measures, state: FindingState, ranks: Ints) -> list[Finding]:
        """Returns one finding per rank, or one per host if all ranks of a host with several have this state.

        If there are more than ``single_reports``, the slowest are reported one by one and the others together.
        """
        if not len(ranks):
            return []
        place_of = np.full(len(self.hosts), -1)
        place_of[now.window.ranks] = np.arange(len(now.window.ranks))
        groups: list[tuple[Kind, list[int]]] = []
        for host, members in self.by_host(ranks.tolist()).items():
            if len(members) > 1 and len(members) == self.ranks_of_host[host]:
                groups.append((Kind.HOST, members))
            else:
                groups += [(Kind.RANK, [rank]) for rank in members]
        if len(groups) > self.rule.single_reports:
            excess, place = now.excess.tolist(), place_of.tolist()
            groups.sort(key=lambda group: -sum(excess[place[rank]] for rank in group[1]) / len(group[1]))
            rest = [rank for _, members in groups[self.rule.single_reports :] for rank in members]
            groups = [*groups[: self.rule.single_reports], (Kind.RANK, sorted(rest))]
        return [self.finding_of(now, state, kind, place_of[members]) for kind, members in groups]

    def finding_of(self, now: Measures, state: FindingState, kind: Kind, places: Ints) -> Finding:
        """Returns one finding about the ranks at ``places`` in the window."""
        window = now.window
        ranks = window.ranks[places]
        those = np.zeros(len(window.ranks), dtype=bool)
        those[places] = True
        extra = self.extra[ranks].sum(axis=0)
        peers = ~those & np.isin(self.peers.cohort[window.ranks], self.peers.cohort[ranks])
        others = window.typical[peers if peers.any() else places]
        if self.baseline.typical is not None and not peers.any():
            others = self.baseline.typical[ranks]
        normal = np.median(others, axis=0)
        together = those | self.accused.confirmed[window.ranks] if state is FindingState.CONFIRMED else those
        return Finding(
            kind=kind,
            state=state,
            window=window.index,
            ranks=tuple(ranks.tolist()),
            hosts=tuple(dict.fromkeys(self.hosts[rank] for rank in ranks.tolist())),
            cause=slowness.cause_of(extra, normal) if extra.any() else "",
            slowdown=float(now.excess[places].mean()),
            cost=slowness.cost_of_group(window.busy, window.wait, together),
            note="together with the other slow ranks" if together.sum() > len(ranks) else "",
        )

    def extra_of(self, window: Window, places: Ints) -> Reals:
        """[len(places), len(CAUSES)] seconds per step in each phase above the peers', or the baseline's if few."""
        usual, past = np.zeros(window.typical.shape), self.baseline.typical
        for group in self.peers.groups(window.ranks):
            if past is not None and (self.peers.by_own_past or len(group) <= self.rule.few_ranks):
                usual[group] = past[window.ranks[group]]
            elif len(group) > 1:
                columns = window.typical[group].T
                usual[group] = np.stack([slowness.median_of_others(column) for column in columns], axis=1)
        return np.asarray(window.typical[places] - usual[places])

    def uneven(self, now: Measures) -> list[Finding]:
        """Finding about two or three ranks that have differed since the start."""
        since_start = self.baseline.excess()
        if since_start is None or len(since_start) != len(now.window.ranks):
            return []
        worst = int(np.argmax(since_start))
        normal = np.median(np.delete(now.window.typical, worst, axis=0), axis=0)
        return self.condition(
            Kind.UNEVEN,
            now.window,
            is_bad=bool(since_start[worst] >= 0.1 and now.excess[worst] >= max(0.1, now.chance)),
            is_calm=bool(now.excess[worst] < self.rule.calm),
            ranks=(int(now.window.ranks[worst]),),
            cause=slowness.cause_of(now.window.typical[worst] - normal, normal),
            slowdown=float(now.excess[worst]),
            cost=float(now.cost[worst]),
        )

    def is_one_host_that_changed(self, window: Window, slow: Bools, own: Reals | None) -> bool:
        """Whether the slow ranks are exactly one host's, and only they have slowed down."""
        if own is None or not slow.any() or slow.all():
            return False
        hosts = {self.hosts[rank] for rank in window.ranks[slow].tolist()}
        others = {self.hosts[rank] for rank in window.ranks[~slow].tolist()}
        return (
            len(hosts) == 1
            and not hosts & others
            and len(window.ranks) > self.rule.few_ranks
            and bool((own[slow] >= 1 + self.rule.slow).all() and (own[~slow] < 1 + self.rule.calm).all())
        )

    # --- pauses ------------------------------------------------------------------------------------------------------

    def pausing(self, window: Window, take_turns: bool) -> list[Finding]:
        """Findings about pauses of one rank, or of changing ranks, unless those take turns because of their batches."""
        counts, cost = self.pauses.sums(RECENT)
        owners = self.pauses.owners(self.rule.pauses, self.rule.luck)
        normal = np.median(window.typical, axis=0)
        verdicts: list[Finding] = []
        for rank in sorted(owners | set(np.flatnonzero(self.pausers.confirmed | (self.pausers.bad > 0)).tolist())):
            goes_on = bool(cost[rank] >= 0.4 * self.rule.pauses)
            verdicts += self.condition(
                Kind.PAUSES,
                window,
                is_bad=rank in owners and goes_on and not bool(self.accused.confirmed[rank]),
                is_calm=not goes_on,
                ranks=(rank,),
                cause=slowness.cause_of(self.pauses.bursts[rank], normal),
                slowdown=float(cost[rank]),
                cost=float(cost[rank]),
            )
        lost = float(cost.sum())
        everyone = self.pauses.bursts.sum(axis=0)
        return verdicts + self.condition(
            Kind.ROTATING,
            window,
            is_bad=lost >= self.rule.rotating and not (owners or take_turns) and int((counts > 0).sum()) > 1,
            is_calm=lost < 0.5 * self.rule.rotating or bool(owners) or take_turns,
            cause="gc" if everyone[GC] >= 0.5 * everyone[:GC].sum() > 0 else slowness.cause_of(everyone, normal),
            cost=lost,
        )

    # --- all ranks ---------------------------------------------------------------------------------------------------

    def turns(self, window: Window, busy: Reals, blamed: Bools) -> float:
        """Fraction of the time lost because peers that are not blamed take turns at being slowest."""
        step_s = slowness.step_seconds(window.busy, window.wait) / window.steps
        if self.peers.by_own_past or step_s < self.rule.shortest_turns:
            return 0.0
        busy, wait = busy[~blamed], window.wait[~blamed]
        groups = [group for group in self.peers.groups(window.ranks[~blamed]) if len(group) > 1]
        return max((slowness.cost_of_turns(busy[group], wait[group]) for group in groups), default=0.0)

    def imbalance(self, now: Measures, busy: Reals, turns: float) -> list[Finding]:
        """Finding about unequal work: it varies from step to step, reported or not, or a rank always has more."""
        window = now.window
        least = max(self.rule.slow, slowness.chance_excess(window.busy, self.rule.z))
        loaded = (now.raw >= least) & (now.excess < self.rule.calm)
        lost = slowness.uneven_cost(window.busy, window.wait)
        left = slowness.uneven_cost(busy, window.wait)
        varying = lost >= self.rule.imbalance and left <= 0.5 * lost
        explained = bool(loaded.any() or varying)
        if varying and not loaded.any():
            cost = slowness.cost_of_spread(window.busy, window.wait) - slowness.cost_of_spread(busy, window.wait)
        else:
            cost = max(lost - left, 0.0) if explained else turns
        power = slowness.fit_work(window.busy, window.work)[0] if slowness.varies(window.work) else None
        return self.condition(
            Kind.IMBALANCE,
            window,
            is_bad=explained or turns >= self.rule.imbalance,
            is_calm=not explained and max(lost - left, turns) < 0.5 * self.rule.imbalance,
            ranks=tuple(window.ranks[loaded].tolist()),
            cost=cost,
            step_s=cost * slowness.step_seconds(window.busy, window.wait) / window.steps,
            power=power if explained or power is None else 0.0,
        )

    def uneven_plan(self, now: Measures, blamed: Bools) -> list[Finding]:
        """Finding about a pipeline stage or tensor index that takes longer on every rank that has it."""
        grid, window = self.peers.grid, now.window
        if grid.is_plain:
            return []
        steps = slowness.step_seconds(window.busy, window.wait) / window.steps
        load = heaviest(self.peers.levels(now.medians, window.ranks, ~blamed), grid, steps)
        if load is None:
            return self.condition(Kind.PLAN, window, is_bad=False, is_calm=True)
        those = self.peers.on(window.ranks, load.axis, load.index)
        normal = np.median(window.typical[~those], axis=0)
        return self.condition(
            Kind.PLAN,
            window,
            is_bad=load.cost >= self.rule.uneven_plan,
            is_calm=load.cost < 0.5 * self.rule.uneven_plan,
            ranks=tuple(window.ranks[those].tolist()),
            cause=slowness.cause_of(np.median(window.typical[those], axis=0) - normal, normal),
            slowdown=load.excess,
            cost=load.cost,
            load=load,
        )

    def change_of_all(self, now: Measures, own: Reals, blamed: Bools) -> list[Finding]:
        """Findings about a slower exchange, or about all ranks being slower than at the start.

        Ranks already blamed are left out: a global finding needs at least 80% of the others to be slower.
        """
        rest = own[~blamed] if not blamed.all() else np.ones(1)
        window, growth = now.window, float(np.median(rest))
        least = max(self.rule.slow, now.chance / np.sqrt(len(rest)))
        all_slower = bool((rest >= 1 + self.rule.calm).mean() >= 0.8 and growth >= 1 + least)
        verdicts = self.condition(
            Kind.GLOBAL,
            window,
            is_bad=all_slower,
            is_calm=growth < 1 + self.rule.calm,
            slowdown=growth - 1,
            cost=1 - 1 / max(growth, 1.0),
        )
        was, is_now, step = self.baseline.transfer, slowness.transfer_seconds(window.wait), self.baseline.step
        slower = is_now - was >= self.rule.slow * step and is_now >= 1.5 * was
        return verdicts + self.condition(
            Kind.NETWORK,
            window,
            is_bad=slower and growth < 1 + self.rule.slow,
            is_calm=is_now - was < self.rule.calm * step,
            cause=slowness.NETWORK,
            slowdown=is_now / max(was, 1e-9) - 1,
            cost=(is_now - was) / max(step + is_now - was, 1e-9),
        )

    def abstain(self, window: Window, silent: Bools) -> list[Finding]:
        """Finding that ranks without exchange marks cannot be compared: their busy time includes their waiting."""
        return self.condition(
            Kind.ABSTAIN,
            window,
            is_bad=True,
            is_calm=False,
            ranks=tuple(window.ranks[silent].tolist()),
            note="the program does not mark its gradient exchange on these ranks, so no verdict is possible",
        )

    def condition(
        self,
        kind: Kind,
        window: Window,
        *,
        is_bad: bool,
        is_calm: bool,
        ranks: tuple[int, ...] = (),
        **findings: object,
    ) -> list[Finding]:
        """Updates a condition, tracked by rank for pauses and by kind otherwise; returns a finding if it changed."""
        standing, place = self.conditions, list(Kind).index(kind)
        if kind is Kind.PAUSES:
            standing, place = self.pausers, ranks[0]
        changes = standing.observe(np.array([place]), np.array([is_bad]), np.array([is_calm]))
        state = next((state for state, changed in changes.items() if len(changed)), None)
        if state is None:
            return []
        hosts = tuple(dict.fromkeys(self.hosts[rank] for rank in ranks))
        has_named = bool(self.named().any())
        return [Finding(kind, state, window.index, ranks, hosts, has_named=has_named, **findings)]  # type: ignore[arg-type]

    def by_host(self, ranks: Iterable[int]) -> dict[str, list[int]]:
        """Ranks grouped by host, in rank order."""
        groups: dict[str, list[int]] = defaultdict(list)
        for rank in sorted(ranks):
            groups[self.hosts[rank]].append(rank)
        return groups

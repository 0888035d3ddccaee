"""Decides from the ranks' heartbeats whether the run hangs and which ranks never arrived. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hpctrain.monitor.shared import BETWEEN_BEATS, NO_PHASE
from hpctrain.run.grid import Grid
from hpctrain.train.clock import Neighbours, Phase

FIRST_STEP_S = 900.0
"""Silence allowed until the first step is done: compilation, first read of the data."""
OUTSIDE_STEP_S = 600.0
"""Minimum of the automatic limit where hooks, evaluation or data may take long."""
INSIDE_STEP_S = 120.0
"""Minimum of the automatic limit elsewhere in a step."""
TIMES_LONGEST = 10.0
"""The automatic limit as a multiple of the longest silence seen so far."""

ENDED, GONE, STOPPED, SILENT = "ended", "gone", "stopped", "silent"
"""States of a rank; any other value is the kernel's letter for a live process."""
LOST = (ENDED, GONE, STOPPED, SILENT)
"""States in which a rank cannot arrive at the exchange."""


@dataclass(frozen=True)
class Beat:
    """One rank's heartbeat."""

    rank: int
    steps: int
    """Steps done in this attempt."""
    phase: int
    """Phase that ended last in the current step, or -1."""
    age_s: float
    """Seconds since that mark."""
    state: str
    """ended (it closed its session), gone (it died), stopped, silent (its node's agent is), or the kernel's letter."""
    waits_for: int = Neighbours.NOBODY
    """Neighbours that it waits for within a phase."""

    @property
    def waits(self) -> bool:
        """Whether it has arrived at the exchange and not left it."""
        return self.phase == Phase.BACKWARD and self.state not in LOST and not self.waits_for

    @property
    def waits_for_neighbours(self) -> bool:
        """Whether it waits in a collective or a message that its neighbours have not joined."""
        return bool(self.waits_for) and self.state not in LOST

    @property
    def doing(self) -> str:
        """What the rank does, as a predicate of a sentence."""
        if self.state in STATES:
            return STATES[self.state]
        if self.waits_for_neighbours:
            return FOR_NEIGHBOURS.get(self.waits_for, "waits for its neighbours")
        if self.phase == Phase.BACKWARD:
            return "waits in the exchange"
        return f"is {self.place}"

    @property
    def place(self) -> str:
        """Where in the step it is."""
        if self.phase == NO_PHASE:
            return "waiting for data"
        if self.phase == BETWEEN_BEATS:
            return "between two heartbeats"
        return f"past {Phase(self.phase).name.lower()}" if self.phase < len(Phase) else "between two phases"


FOR_NEIGHBOURS: Mapping[int, str] = {
    Neighbours.TENSOR: "waits for other parts of a layer",
    Neighbours.PIPELINE: "waits for another stage",
}
STATES = {
    ENDED: "has ended",
    GONE: "has died without notice",
    STOPPED: "is stopped by a signal",
    SILENT: "is on a node whose agent does not answer",
}


@dataclass(frozen=True)
class HangFinding:
    """The run makes no progress, or a rank has died."""

    silence_s: float
    """Seconds since the last mark of any rank."""
    culprits: tuple[Beat, ...]
    """Ranks that never arrived; empty if all ranks are in the same place."""
    waiting: tuple[Beat, ...]
    """Live ranks other than the culprits."""
    died: bool
    """Whether the culprits' processes are gone."""


def who_never_arrived(beats: list[Beat], grid: Grid | None = None) -> list[Beat]:
    """Returns the ranks that the others wait for; none if all are in the same place.

    Ranks that cannot arrive, if there are any. Otherwise, if no rank waits for neighbours, all ranks that are not in
    the furthest exchange, or those that are behind in steps and phases if none is in an exchange. Otherwise the ranks
    that wait neither in the exchange nor for neighbours; if there are none, those in the exchange whose neighbours wait
    (``apart``).
    """
    if lost := [beat for beat in beats if beat.state in LOST]:
        return lost
    if any(beat.waits_for_neighbours for beat in beats):
        if moving := [beat for beat in beats if not (beat.waits or beat.waits_for_neighbours)]:
            return moving
        return apart(beats, grid) if grid is not None else []
    furthest = max((beat.steps for beat in beats if beat.waits), default=None)
    if furthest is not None:
        return [beat for beat in beats if not (beat.waits and beat.steps == furthest)]
    ahead = max((beat.steps, beat.phase) for beat in beats)
    return [beat for beat in beats if (beat.steps, beat.phase) < ahead]


def apart(beats: list[Beat], grid: Grid) -> list[Beat]:
    """Ranks in the exchange for which neighbours of their tensor group wait."""
    waiting_groups = {beat.rank // grid.tensor for beat in beats if beat.waits_for == Neighbours.TENSOR}
    return [beat for beat in beats if beat.waits and beat.rank // grid.tensor in waiting_groups]


class HangWatch:
    """Follows the heartbeats of all ranks.

    Args:
        hang_s: seconds of silence that count as a hang; None derives it from the longest silence seen so far.
        grid: places of the ranks.
    """

    def __init__(self, hang_s: float | None, grid: Grid | None = None) -> None:
        self.hang_s = hang_s
        self.grid = grid
        self.longest_s = 0.0
        self.last_steps = -1
        self.last_silence_s = 0.0
        self.reported = False
        self.reported_dead = False

    def observe(self, beats: list[Beat]) -> HangFinding | None:
        """Returns a hang once each time the run stops; ``beats`` holds one of each known rank."""
        alive = [beat for beat in beats if beat.state not in (ENDED, GONE)]
        dead = [beat for beat in beats if beat.state == GONE]
        has_ended = any(beat.state == ENDED for beat in beats)
        if dead and not self.reported_dead and not has_ended:
            self.reported_dead = True
            return HangFinding(min(beat.age_s for beat in dead), tuple(dead), tuple(alive), died=True)
        if not alive or dead:
            return None
        silence = min(beat.age_s for beat in alive)
        self.learn(alive, silence)
        if silence < self.limit(alive):
            self.reported = False
            return None
        if self.reported:
            return None
        self.reported = True
        culprits = who_never_arrived(beats, self.grid)
        waiting = [beat for beat in alive if beat not in culprits]
        return HangFinding(silence, tuple(culprits), tuple(waiting), died=False)

    def learn(self, alive: list[Beat], silence: float) -> None:
        """Records the longest silence after which the run continued, from the first finished step on."""
        steps = max(beat.steps for beat in alive)
        if steps > self.last_steps >= 1:
            self.longest_s = max(self.longest_s, self.last_silence_s)
        self.last_steps = steps
        self.last_silence_s = silence if silence >= self.last_silence_s else 0.0

    def limit(self, alive: list[Beat]) -> float:
        """Seconds of silence that currently count as a hang."""
        if max(beat.steps for beat in alive) < 1:
            return max(FIRST_STEP_S, self.hang_s or 0)
        if self.hang_s is not None:
            return self.hang_s
        inside = all(beat.phase in (Phase.TO_DEVICE, Phase.FORWARD, Phase.BACKWARD, Phase.DATA) for beat in alive)
        return max(INSIDE_STEP_S if inside else OUTSIDE_STEP_S, TIMES_LONGEST * self.longest_s)

"""One node's part of the monitor: reads its ranks' memory, summarizes windows, executes the first node's commands."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

import numpy as np
import psutil

from hpctrain.monitor import shared
from hpctrain.monitor.chief.hang import ENDED, GONE, STOPPED, Beat
from hpctrain.monitor.framing import Message
from hpctrain.monitor.node import host as host_counters
from hpctrain.monitor.node import stacks
from hpctrain.monitor.node.gpu_readings import AmdSmi, GpuReading, Nvml, open_gpus
from hpctrain.monitor.window import ARRAYS, Window, condense
from hpctrain.system import processes
from hpctrain.system.array_types import Floats

BEAT_S = 1.0
"""Seconds between reports of the heartbeats."""
SHORTEST_READING_S = 0.25
"""Shortest time between two readings of a host with a suspected rank: a suspect can be confirmed within a second, so
the evidence must not wait for the regular interval."""
KNOWN = ("busy", "watts", "mhz", "most_mhz", "celsius", "slowed")
"""What is reported of a GPU, besides its memory."""
RIVALS_S = 30.0
"""Seconds between searches for other processes on the ranks' processors."""


@dataclass(frozen=True)
class NodePlan:
    """One node's parameters."""

    node: int
    """Index of the node."""
    ranks: tuple[int, ...]
    """The node's ranks, in order of local rank."""
    window_steps: int
    host_interval_s: float


class Node:
    """The ranks of one node, observed from outside.

    Args:
        plan: the node's ranks and intervals.
        reader: the ranks' memory.
    """

    def __init__(self, plan: NodePlan, reader: shared.SlotReader) -> None:
        self.plan = plan
        self.reader = reader
        self.ranks = np.array(plan.ranks, dtype=np.int64)
        self.next_window = 0
        self.dropped = 0
        self.next_beat = 0.0
        self.next_reading = 0.0
        self.reading: host_counters.Reading | None = None
        self.joules: dict[str, float] = {}
        """Energy used so far, by ``cpu`` and ``gpu``."""
        self.next_rivals = 0.0
        self.alarmed = False
        """Whether the next poll reports at once: a rank has died, and the launcher will soon end the others."""
        self.lives: dict[int, int] = {}
        """Descriptors that become readable when a rank dies, by PID; -1 if there is none."""

    @functools.cached_property
    def gpus(self) -> Nvml | AmdSmi:
        """Opened in the first reading, since it takes a while."""
        return open_gpus()

    def new_lives(self) -> list[int]:
        """Opens descriptors of ranks that joined since the last call; select on them to notice deaths at once."""
        fresh = []
        for head in self.reader.heads():
            pid = int(head[shared.PID])
            if head[shared.STATE] != shared.JOINING and pid not in self.lives:
                self.lives[pid] = -1
                with contextlib.suppress(OSError, AttributeError):  # Linux before 5.3, or a Python built for it
                    self.lives[pid] = os.pidfd_open(pid)
                    fresh.append(self.lives[pid])
        return fresh

    def forget_life(self, descriptor: int) -> None:
        """Closes the descriptor of a rank that has died."""
        self.lives.update({pid: -1 for pid, life in self.lives.items() if life == descriptor})
        os.close(descriptor)

    def alarm(self) -> None:
        """Makes the next ``poll`` report heartbeats even if they are not due."""
        self.alarmed = True

    def poll(self, now: float) -> list[Message]:
        """Returns the messages that are due."""
        heads = self.reader.heads()
        messages = list(self.windows(heads))
        if self.alarmed or now >= self.next_beat:
            self.alarmed = False
            self.next_beat = now + BEAT_S
            messages.append(self.beat(heads, now))
        if now >= self.next_reading:
            self.next_reading = now + self.plan.host_interval_s
            messages += self.findings(heads, now)
        return messages

    def windows(self, heads: Floats) -> list[Message]:
        """Windows that all ranks of the node have completed."""
        steps, found = self.plan.window_steps, []
        while (self.next_window + 1) * steps <= heads[:, shared.STEPS].min():
            index = self.next_window
            self.next_window += 1
            rows = self.reader.totals(index * steps - 2, steps + 2)
            if rows is None:
                self.dropped += 1
                continue
            found.append(window_message(condense(index, self.ranks, rows)))
        return found

    def beat(self, heads: Floats, now: float) -> Message:
        """Makes the message with each rank's heartbeat."""
        beats = [
            Beat(
                rank,
                steps=int(head[shared.STEPS]),
                phase=int(head[shared.MARKED_PHASE]),
                age_s=round(now - head[shared.MARKED_AT], 3),
                state=self.state(head),
                waits_for=int(head[shared.WAITS_FOR]),
            )
            for rank, head in zip(self.plan.ranks, heads, strict=True)
            if head[shared.STATE] != shared.JOINING
        ]
        fields = {
            "node": self.plan.node,
            "beats": [astuple(beat) for beat in beats],
            "dropped": self.dropped,
            "first_step": int(heads[:, shared.FIRST_STEP].max()),
        }
        return Message("beat", fields)

    def state(self, head: Floats) -> str:
        """A rank's state: ended, gone, stopped, the kernel's letter, or a question mark if it cannot be read."""
        if head[shared.STATE] == shared.FINISHED:
            return ENDED
        letter = processes.look(int(head[shared.PID]), head[shared.STARTED])
        return {processes.GONE: GONE, "Z": GONE, "X": GONE, "T": STOPPED, "t": STOPPED}.get(letter, letter)

    def findings(self, heads: Floats, now: float) -> list[Message]:
        """Reads the host's counters and reports what stands out since the last reading."""
        pids = [int(head[shared.PID]) for head in heads if head[shared.STATE] != shared.JOINING]
        try:
            before, self.reading = self.reading, host_counters.read(pids, now, used(self.gpus.read(), heads))
        except OSError:  # out of descriptors: no evidence now
            return []
        if before is None:
            return []
        found = host_counters.compare(before, self.reading)
        by_rank = {str(self.ranks[pids.index(pid)]): list(lines) for pid, lines in found.by_pid.items()}
        if found.starved and now >= self.next_rivals:
            self.next_rivals = now + RIVALS_S
            self.add_rivals(by_rank, pids)
        messages = list(self.devices(heads, before, self.reading))
        if found.host or by_rank:
            fields = {"node": self.plan.node, "host": list(found.host), "ranks": by_rank}
            messages.append(Message("findings", fields))
        return messages

    def devices(self, heads: Floats, before: host_counters.Reading, now: host_counters.Reading) -> Iterator[Message]:
        """The energy used so far, the ranks' GPUs, and broken ones; nothing if nothing is known."""
        for part, joules in host_counters.energy(before, now).items():
            self.joules[part] = self.joules.get(part, 0.0) + joules
        gpus = {gpu.place: gpu for gpu in now.gpus}
        rows = []
        for rank, head in zip(self.plan.ranks, heads, strict=True):
            if place := int(head[shared.GPU_PLACE]):
                known = {key: vars(gpus[place])[key] for key in KNOWN} if place in gpus else {}
                memory = {"peak_bytes": head[shared.PEAK_BYTES], "reserved_bytes": head[shared.RESERVED_BYTES]}
                rows.append({"rank": rank, **memory, **known})
        broken = [gpu.broken for gpu in now.gpus if gpu.broken]
        if self.joules or rows or broken:
            yield Message("devices", {"node": self.plan.node, "joules": self.joules, "ranks": rows, "broken": broken})

    def add_rivals(self, by_rank: dict[str, list[str]], pids: Sequence[int]) -> None:
        """Adds other processes that use the ranks' processors."""
        ours = {*pids, os.getpid(), *(child for pid in pids for child in family(pid))}
        before, began = host_counters.processor_seconds(), time.monotonic()
        time.sleep(0.3)
        after = host_counters.processor_seconds()
        seconds = time.monotonic() - began
        for rank, lines in by_rank.items():
            with contextlib.suppress(OSError):
                cpus = os.sched_getaffinity(pids[self.plan.ranks.index(int(rank))])
                lines.extend(host_counters.rivals(cpus, ours, seconds, before, after))

    def answer(self, command: Message) -> list[Message]:
        """Executes a command of the first node's agent; returns the answers."""
        if command.kind == "kill":
            self.kill()
        if command.kind == "look":
            return self.look(time.monotonic())
        if command.kind != "dump":
            return []
        heads = self.reader.heads()
        answers = []
        for rank in command.fields["ranks"]:
            head = heads[self.plan.ranks.index(rank)]
            pid = int(head[shared.PID])
            try:
                text = stacks.dump(
                    pid, int(head[shared.DUMP_SIGNAL]), Path(f"/proc/{pid}/fd/{int(head[shared.DUMP_FILE])}")
                )
            except OSError as error:
                text = f"no stack: {error.strerror}\n"
            answers.append(Message("dumped", {"rank": rank, "text": text}))
        return answers

    def look(self, now: float) -> list[Message]:
        """Reads the host's counters at once, or as soon as SHORTEST_READING_S has passed since the last reading."""
        if self.reading is None:
            return []
        if now < self.reading.time + SHORTEST_READING_S:
            self.next_reading = min(self.next_reading, self.reading.time + SHORTEST_READING_S)
            return []
        self.next_reading = now + self.plan.host_interval_s
        return self.findings(self.reader.heads(), now)

    def kill(self) -> None:
        """Kills the node's ranks and their descendants, except for this agent.

        The death watch is spared on a node where a rank has died: it notes the death only once all of the rank's
        threads have ended. On other nodes it is killed first, so that no victim is noted.
        """
        heads = [head for head in self.reader.heads() if head[shared.STATE] != shared.JOINING]
        spared = {os.getpid(), *(family(os.getpid()) if any(self.state(head) == GONE for head in heads) else ())}
        for head in heads:
            pid = int(head[shared.PID])
            if processes.look(pid, head[shared.STARTED]) != processes.GONE:
                for member in [*family(pid), pid]:
                    if member not in spared:
                        with contextlib.suppress(OSError):
                            os.kill(member, signal.SIGKILL)

    def all_over(self) -> bool:
        """Whether every rank of the node has ended."""
        return all(
            self.state(head) in (ENDED, GONE) for head in self.reader.heads() if head[shared.STATE] != shared.JOINING
        )


def used(gpus: Sequence[GpuReading], heads: Floats) -> list[GpuReading]:
    """The GPUs that the node's ranks are on: others may be another job's. All, if the ranks do not know theirs."""
    places = {int(head[shared.GPU_PLACE]) for head in heads} - {0}
    return [gpu for gpu in gpus if not places or gpu.place in places]


def family(pid: int) -> list[int]:
    """PIDs of a process's descendants."""
    with contextlib.suppress(psutil.Error, OSError):
        return [child.pid for child in psutil.Process(pid).children(recursive=True)]
    return []


def window_message(window: Window) -> Message:
    """Packs a window into a message."""
    fields = {"index": window.index, "ranks": window.ranks.tolist()}
    return Message("window", fields, {name: getattr(window, name) for name in ARRAYS})


def window_of(message: Message) -> Window:
    """The inverse of ``window_message``."""
    return Window(
        index=int(message.fields["index"]), ranks=np.array(message.fields["ranks"], dtype=np.int64), **message.arrays
    )

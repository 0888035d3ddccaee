"""From messages to events, files and commands, without processes."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.straggler import traces
from hpctrain.config.sections import MonitorConfig
from hpctrain.monitor.chief.chief import Chief
from hpctrain.monitor.chief.finding import Finding, FindingState, Kind
from hpctrain.monitor.chief.stragglers import COLUMNS, Heat
from hpctrain.monitor.framing import Message
from hpctrain.monitor.node.node import window_message
from hpctrain.monitor.window import Window
from hpctrain.run import bad_nodes
from hpctrain.run.bad_nodes import BadNode
from hpctrain.run.events import CUT_OFF, RankDevice
from hpctrain.run.folder import RunDir
from hpctrain.run.rank_environment import ATTEMPT, RUN_DIR
from hpctrain.run.run_view import RunView
from hpctrain.train.clock import Phase

HOSTS = ["n0", "n0", "n1", "n1", "n2", "n2", "n3", "n3"]
NODES = [0, 0, 1, 1, 2, 2, 3, 3]


def chief_in(folder: Path, **config: Any) -> tuple[Chief, list[str]]:
    run = RunDir(folder)
    run.monitor.mkdir(parents=True)
    said: list[str] = []
    return Chief(HOSTS, NODES, run, 1, MonitorConfig(**config), lambda text, _: said.append(text)), said


def parts(window: Window) -> list[Message]:
    """The window as four nodes report it."""
    found = []
    for node in range(4):
        pick = slice(2 * node, 2 * node + 2)
        arrays = (getattr(window, name)[pick] for name in ("busy", "wait", "work", "typical", "mean"))
        found.append(window_message(Window(window.index, window.ranks[pick], *arrays)))
    return found


def events_of(folder: Path) -> list[dict[str, Any]]:
    path = folder / "monitor" / "events.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def slow_host(seed: int = 0) -> traces.Trace:
    trace = traces.simulated(8, 640, np.random.default_rng(seed))
    for rank in (4, 5):
        trace = traces.slowed_processor(trace, rank, 0.3, 200)
    return trace


def beat(node: int, phase: int, age: float, state: str = "S", steps: int = 50) -> Message:
    ranks = [rank for rank, where in enumerate(NODES) if where == node]
    beats = [[rank, steps, phase, age, state] for rank in ranks]
    return Message("beat", {"node": node, "beats": beats, "dropped": 0, "first_step": 1000})


def feed(chief: Chief, trace: traces.Trace) -> None:
    """All windows of a trace, by node."""
    for window in trace.windows():
        for message in parts(window):
            chief.receive(message, 0.0)


def hear(chief: Chief, age: float, now: float = 100.0, nodes: int = 4) -> None:
    """The first nodes' beats of ranks that wait in the exchange."""
    for node in range(nodes):
        chief.receive(beat(node, Phase.BACKWARD, age), now)


def test_a_slow_rank_becomes_a_sentence_and_an_event(tmp_path):
    chief, said = chief_in(tmp_path)
    trace = traces.slowed(traces.simulated(8, 640, np.random.default_rng(1)), 3, Phase.DATA, 0.3, 200)
    commands = [
        command for window in trace.windows() for message in parts(window) for command in chief.receive(message, 0.0)
    ]
    # A look at the host of the suspect, in time for the verdict.
    assert commands and {(command.node, command.message.kind) for command in commands} == {(1, "look")}
    [event] = events_of(tmp_path)
    assert said == [event["sentence"]]
    assert event["sentence"].startswith("rank 3 on n1 is 3")
    assert event["rank"] == 3 and event["host"] == "n1" and event["cause"] == "data" and event["state"] == "confirmed"
    assert {"time", "step", "attempt", "slowdown", "cost"} <= event.keys()


def test_the_end_of_a_finding_that_blames_no_rank_is_said_only_if_it_lasted(tmp_path, monkeypatch):
    """A run of 12 s was told that its ranks are equally fast now."""
    chief, said = chief_in(tmp_path)
    clock = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    for kind, ranks, lasts in ((Kind.UNEVEN, (1,), 29.0), (Kind.UNEVEN, (1,), 31.0), (Kind.RANK, (2,), 1.0)):
        chief.stragglers.tell(Finding(kind, FindingState.CONFIRMED, 1, ranks, ("n1",), slowdown=0.2, cost=0.1))
        clock[0] += lasts
        chief.stragglers.tell(Finding(kind, FindingState.CLEARED, 2, ranks, ("n1",)))
    ends = [sentence for sentence in said if "fast" in sentence]
    assert ends == ["ranks are equally fast now", "rank 2 on n1 is as fast as its peers again"]
    assert [event["state"] for event in events_of(tmp_path)] == ["confirmed", "cleared"] * 3


@pytest.mark.parametrize("kind", [Kind.ROTATING, Kind.IMBALANCE, Kind.GLOBAL, Kind.UNEVEN])
def test_what_the_first_minute_shows_by_chance_is_said_only_if_it_lasts(tmp_path, monkeypatch, kind):
    """A training of 1.2 s was told that pauses on changing ranks cost 11% of its time."""
    clock = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    chief, said = chief_in(tmp_path)
    window = next(iter(traces.simulated(8, 640, np.random.default_rng(1)).windows()))

    def judged(at, *found):
        clock[0], before = 1000.0 + at, len(said)
        monkeypatch.setattr(chief.stragglers.judge, "judge", lambda _: list(found))
        chief.stragglers.decide(window)
        return said[before:]

    ranks, hosts = ((1,), ("n1",)) if kind is Kind.UNEVEN else ((), ())
    confirmed = Finding(kind, FindingState.CONFIRMED, 1, ranks, hosts, cost=0.2, slowdown=0.2)
    cleared = Finding(kind, FindingState.CLEARED, 2, ranks, hosts)
    slow = Finding(Kind.RANK, FindingState.CONFIRMED, 1, (2,), ("n1",), slowdown=0.2, cost=0.1)
    assert judged(1.0, confirmed) == [] and judged(2.0, cleared) == [] and judged(61.0) == [], "it did not last"
    assert len(judged(62.0, confirmed, cleared)) == 1, "later, it is said at once"
    clock[0] = 1000.0
    chief, said = chief_in(tmp_path / "other")
    assert [text[:16] for text in judged(30.0, confirmed, slow)] == ["rank 2 on n1 is "]
    assert judged(59.0) == [] and len(judged(61.0)) == 1 and judged(70.0) == []


def test_a_silent_node_does_not_stop_the_judging(tmp_path):
    chief, _ = chief_in(tmp_path)
    trace = traces.slowed(traces.simulated(8, 960, np.random.default_rng(2)), 2, Phase.DATA, 0.3, 200)
    for window in trace.windows():
        for message in parts(window)[:3]:
            chief.receive(message, 0.0)
    assert [event["rank"] for event in events_of(tmp_path)] == [2]
    assert len(chief.stragglers.pending) <= 8


def test_a_slow_host_with_evidence_is_excluded_and_only_one_an_attempt(tmp_path):
    chief, said = chief_in(tmp_path, action="exclude_on_requeue")
    line = "processors throttled 12 times for heat"
    for window in slow_host().windows():
        chief.receive(Message("findings", {"node": 2, "host": [line], "ranks": {}}), time.monotonic())
        for message in parts(window):
            chief.receive(message, 0.0)
    [event] = events_of(tmp_path)
    assert (event["kind"], event["host"], event["cause"], event["excluded"]) == ("host", "n2", "compute", True)
    assert event["evidence"] == [line]
    assert any("n2 is excluded" in text for text in said)
    [entry] = bad_nodes.of_run(RunDir(tmp_path)).entries(0.0)
    assert entry.host == "n2"
    again = BadNode("n3", entry.until, 1, "another one")
    assert not bad_nodes.exclude(bad_nodes.of_run(RunDir(tmp_path)), again, 0.0)


@pytest.mark.parametrize("case", ["no evidence", "report", "data"])
def test_nothing_is_excluded_without_evidence_leave_or_a_cause_of_the_host(tmp_path, case):
    chief, _ = chief_in(tmp_path, action="report" if case == "report" else "exclude_on_requeue")
    trace = slow_host()
    if case == "data":
        trace = traces.simulated(8, 640, np.random.default_rng(3))
        for rank in (4, 5):
            trace = traces.slowed(trace, rank, Phase.DATA, 0.3, 200)
    for window in trace.windows():
        if case != "no evidence":
            found = Message("findings", {"node": 2, "host": ["the host swaps"], "ranks": {}})
            chief.receive(found, time.monotonic())
        for message in parts(window):
            chief.receive(message, 0.0)
    assert events_of(tmp_path)[0]["kind"] == "host"
    assert bad_nodes.of_run(RunDir(tmp_path)).entries(0.0) == []


def test_a_hang_asks_for_stacks_then_reports_and_ends_the_ranks(tmp_path):
    chief, said = chief_in(tmp_path, hang_s=10, on_hang="abort")
    hear(chief, 11, nodes=3)
    chief.receive(beat(3, Phase.FORWARD, 11, "R"), 100.0)
    commands = chief.tick(100.1)
    assert [(command.node, command.message.fields["ranks"]) for command in commands] == [(3, [6, 7]), (0, [0])]
    assert chief.receive(Message("dumped", {"rank": 6, "text": "stack of 6"}), 100.2) == []
    assert chief.receive(Message("dumped", {"rank": 0, "text": "stack of 0"}), 100.2) == []
    kills = chief.receive(Message("dumped", {"rank": 7, "text": "stack of 7"}), 100.2)
    assert [(command.node, command.message.kind) for command in kills] == [(node, "kill") for node in range(4)]
    [event] = events_of(tmp_path)
    assert event["event"] == "hang" and event["step"] == 1050
    assert [rank["rank"] for rank in event["ranks"]] == [6, 7]
    assert (tmp_path / event["ranks"][0]["stack"]).read_text() == "stack of 6"
    assert "ranks wait" in said[0]
    for node in range(4):
        chief.receive(beat(node, Phase.BACKWARD, 12, "gone"), 101.0)
    assert chief.tick(101.1) == []
    assert len(events_of(tmp_path)) == 1, "the ranks' end is the monitor's own doing"


@pytest.mark.parametrize(("noted", "at", "named"), [("1.0 7 -9\n", 100.3, [7]), ("", 102.2, [6, 7])])
def test_in_a_supervised_run_the_note_of_a_death_is_waited_for(tmp_path, monkeypatch, noted, at, named):
    monkeypatch.setenv(RUN_DIR, str(tmp_path))
    monkeypatch.setenv(ATTEMPT, "1")
    chief, _ = chief_in(tmp_path)
    hear(chief, 1, nodes=3)
    chief.receive(beat(3, Phase.FORWARD, 1, "gone"), 100.0)
    assert chief.tick(100.1) == [] == events_of(tmp_path)
    (tmp_path / "monitor" / "deaths-1-n1.txt").write_text(noted)
    chief.tick(at)
    [event] = events_of(tmp_path)
    assert (event["kind"], [rank["rank"] for rank in event["ranks"]]) == ("died", named)


@pytest.mark.parametrize(
    ("noted", "named"), [("2.0 6\n1.0 7\n", [7]), ("2.0 6\n1.0 7 -15\n", [6]), ("1.0 0\n", [6, 7]), ("", [6, 7])]
)
def test_of_ranks_that_are_found_dead_together_the_one_noted_first_is_named(tmp_path, noted, named):
    chief, said = chief_in(tmp_path)
    (tmp_path / "monitor" / "deaths-1-n1.txt").write_text(noted)
    hear(chief, 1, nodes=3)
    chief.receive(beat(3, Phase.FORWARD, 1, "gone"), 100.0)
    chief.tick(100.1)
    [event] = events_of(tmp_path)
    assert (event["kind"], [rank["rank"] for rank in event["ranks"]], event["waiting"]) == ("died", named, 6)
    assert said[0].count("has died without notice") == len(named)


def test_stacks_that_do_not_come_do_not_hold_up_the_report(tmp_path):
    chief, _ = chief_in(tmp_path, hang_s=10, on_hang="report")
    hear(chief, 11)
    assert chief.tick(100.1)
    assert chief.tick(130.0) == []
    [event] = events_of(tmp_path)
    assert event["ranks"] == []
    assert "every rank waits in the exchange" in event["sentence"]
    assert "did not answer" in (tmp_path / event["healthy"][0]["stack"]).read_text()


def test_the_live_view_holds_the_last_window_and_what_is_said(tmp_path):
    chief, _ = chief_in(tmp_path)
    feed(chief, slow_host())
    chief.close()
    view = json.loads((tmp_path / "monitor" / "live.json").read_bytes())
    assert [rank["rank"] for rank in view["ranks"]] == list(range(8)) and view["num_ranks"] == 8
    assert view["ranks"][0]["wait_s"] > view["ranks"][4]["wait_s"]
    assert any("host n2 (ranks 4-5) is" in verdict for verdict in view["verdicts"])


def test_the_heat_map_is_bounded_and_the_report_shows_it(tmp_path):
    picture = Heat(2000, 32)
    values = np.zeros(2000)
    for index in range(3000):
        values[7] = 0.3 if 1000 <= index < 1100 else 0.0
        picture.add(index, np.arange(2000), values)
    assert picture.values.shape == (2000, COLUMNS)
    assert np.nanmax(picture.values[7]) == pytest.approx(0.3, abs=0.01)
    assert np.nanmax(picture.values[8]) == 0
    (tmp_path / "monitor").mkdir()
    picture.save(tmp_path / "monitor" / "heat.npz")
    shown = RunView(tmp_path).heat_map()
    assert shown is not None and np.nanmax(shown) == pytest.approx(0.3, abs=0.01)


def test_a_full_disk_costs_events_not_the_monitor(tmp_path):
    chief, said = chief_in(tmp_path)
    (tmp_path / "monitor").rmdir()
    feed(chief, slow_host())
    chief.close()
    for what in ("monitor/events.jsonl cannot be written", "cannot write its live view", "cannot write its heat map"):
        assert any(what in text for text in said)


def test_a_full_disk_keeps_no_hung_rank_alive(tmp_path):
    chief, said = chief_in(tmp_path, hang_s=10, on_hang="abort")
    (tmp_path / "monitor").rmdir()
    hear(chief, 11)
    chief.tick(100.1)
    assert [command.message.kind for command in chief.tick(130.0)] == ["kill"] * 4
    assert any("cannot write stacks" in text for text in said)


def test_a_full_disk_excludes_nobody_and_ends_nothing(tmp_path):
    chief, said = chief_in(tmp_path, action="exclude_on_requeue")
    chief.receive(Message("findings", {"node": 2, "host": ["throttled"], "ranks": {}}), time.monotonic())
    (tmp_path / "monitor").rmdir()
    feed(chief, slow_host())
    assert any("cannot exclude n2" in text for text in said)


def test_a_node_that_falls_silent_is_the_culprit(tmp_path):
    chief, _ = chief_in(tmp_path, hang_s=20)
    hear(chief, 1)
    assert chief.tick(100.1) == []
    hear(chief, 25, 125.0, nodes=3)
    chief.tick(125.1)
    assert chief.open_hang is not None
    assert [(culprit.rank, culprit.state) for culprit in chief.open_hang.hang.culprits] == [
        (6, "silent"),
        (7, "silent"),
    ]


def test_a_host_that_cannot_be_reached_is_told_and_ends_nothing(tmp_path):
    chief, said = chief_in(tmp_path, hang_s=20)
    chief.cut_off(3)
    assert said == [], "nothing is known of its ranks yet"
    chief.receive(beat(3, Phase.BACKWARD, 1), 100.0)
    chief.cut_off(3)
    [event] = [each for each in events_of(tmp_path) if each["event"] == "hang"]
    assert (event["kind"], event["action"], [rank["rank"] for rank in event["ranks"]]) == (CUT_OFF, "report", [6, 7])
    assert said == [event["sentence"]] and "cannot be reached" in said[0]
    chief.receive(beat(3, Phase.BACKWARD, 1, "ended"), 101.0)
    chief.cut_off(3)
    assert len(said) == 1, "ranks that have ended are not missed"


def test_ranks_that_were_never_heard_of_do_not_stop_the_watching(tmp_path):
    chief, said = chief_in(tmp_path, hang_s=10)
    for now in (100.0, 130.0, 170.0):
        hear(chief, now - 90, now, nodes=3)
        chief.tick(now)
    assert said == ["the monitor has not heard from the agents of ranks 6-7: it cannot watch them"]
    assert chief.open_hang is not None


def look(chief: Chief, now: float, ages: dict[int, float], state: str = "S") -> None:
    """All nodes report at once, then the chief decides."""
    for node in range(4):
        chief.receive(beat(node, Phase.BACKWARD if node else Phase.FORWARD, ages.get(node, ages[0]), state), now)
    chief.tick(now)


def test_time_in_which_the_observer_was_stopped_is_no_silence(tmp_path):
    chief, _ = chief_in(tmp_path, hang_s=20)
    look(chief, 100.0, {0: 1.0})
    chief.observer_stopped(100.1, 226.0)
    chief.tick(226.0)  # before any agent has reported again
    assert chief.open_hang is None
    look(chief, 226.2, {0: 127.2})
    assert chief.open_hang is None, "the ranks' marks are older than the suspension"
    look(chief, 240.0, {0: 141.0})
    assert chief.open_hang is None
    look(chief, 246.0, {0: 147.0})
    assert chief.open_hang is not None and chief.open_hang.hang.silence_s == pytest.approx(147 - 125.9)


def test_a_run_whose_ranks_are_all_stopped_is_suspended_not_hung(tmp_path):
    chief, said = chief_in(tmp_path, hang_s=20)
    look(chief, 100.0, {0: 1.0})
    for second in range(101, 227):
        look(chief, float(second), {0: second - 99.0}, "stopped")
    look(chief, 227.0, {0: 128.0})
    assert chief.open_hang is None
    assert said == ["every rank is stopped by a signal: until they continue, time does not count"]
    look(chief, 250.0, {0: 151.0})
    assert chief.open_hang is not None, "it did not go on afterwards"


def test_what_lies_between_beats_and_looks_is_part_of_a_suspension(tmp_path):
    """Ranks stop at 100.0 and continue at 108.1; they are seen stopped from 101.8 on, and running at 108.8."""
    chief, _ = chief_in(tmp_path, hang_s=2.5)
    look(chief, 99.9, {0: 0.0})
    for second in range(7):
        for node in range(4):
            chief.receive(beat(node, Phase.BACKWARD, 0.9 + second, "stopped"), 100.9 + second)
        chief.tick(101.8 + second)
    look(chief, 108.8, {0: 8.8})
    assert chief.open_hang is None
    look(chief, 111.5, {0: 11.5})
    assert chief.open_hang is not None and chief.open_hang.hang.silence_s == pytest.approx(111.5 - 108.8)


def test_a_hang_is_found_between_suspensions(tmp_path):
    """The run hangs from 100.0 on, and gets each second half of ten seconds, as under gang scheduling."""
    chief, _ = chief_in(tmp_path, hang_s=12)
    for second in range(100, 160):
        look(chief, float(second), {0: second - 100.0}, "stopped" if second // 5 % 2 else "S")
        if chief.open_hang is not None:
            break
    assert chief.open_hang is not None and chief.open_hang.hang.silence_s < 15


def test_one_stopped_rank_is_a_hang_all_the_same(tmp_path):
    chief, _ = chief_in(tmp_path, hang_s=20)
    for second in range(100, 125):
        for node in range(4):
            state = "stopped" if node == 3 else "S"
            chief.receive(beat(node, Phase.BACKWARD, second - 100.0, state), float(second))
        chief.tick(float(second))
    assert chief.open_hang is not None and [one.rank for one in chief.open_hang.hang.culprits] == [6, 7]


def devices(node: int, *broken: str) -> Message:
    """A node's report on its GPUs: of its first rank only."""
    row = {"rank": 2 * node, "peak_bytes": 2.0**30, "watts": 640.0, "slowed": ["heat"]}
    return Message("devices", {"node": node, "joules": {"gpu": 100.0}, "ranks": [row], "broken": list(broken)})


def test_energy_and_gpus_become_an_event_and_part_of_the_live_view(tmp_path):
    chief, _ = chief_in(tmp_path)
    for node in (0, 1, 1):
        chief.receive(devices(node), 0.0)
    feed(chief, slow_host())
    chief.close()
    [event] = [event for event in events_of(tmp_path) if event["event"] == "devices"]
    assert (event["gpu_joules"], event["cpu_joules"]) == (200.0, None), (
        "a later report of a node replaces its earlier one"
    )
    assert [(one["rank"], one["host"], one["slowed"]) for one in event["ranks"]] == [
        (0, "n0", ["heat"]),
        (2, "n1", ["heat"]),
    ]
    live = json.loads((tmp_path / "monitor" / "live.json").read_text())
    assert [one["peak_bytes"] for one in live["devices"]] == [2**30, 2**30]


def test_a_host_whose_gpu_is_broken_is_excluded_whatever_the_action(tmp_path):
    chief, said = chief_in(tmp_path)
    chief.receive(devices(2, "GPU 3: fell off the bus (Xid 79)"), 0.0)
    [event] = events_of(tmp_path)
    assert (event["kind"], event["host"], event["cause"], event["excluded"]) == ("host", "n2", "gpu", True)
    assert said == ["GPU 3: fell off the bus (Xid 79) on n2; the host is excluded from the next requeue, for 24 h"]
    [entry] = bad_nodes.of_run(RunDir(tmp_path)).entries(0.0)
    assert (entry.host, entry.reason) == ("n2", "GPU 3: fell off the bus (Xid 79) on n2")


@pytest.mark.parametrize(("ranks", "events"), [(16, 6), (8000, 1)])
def test_rows_of_many_ranks_do_not_fill_the_disk(ranks, events, tmp_path):
    chief, _ = chief_in(tmp_path)
    chief.devices.ranks |= {rank: RankDevice(rank, "n0") for rank in range(ranks)}
    begin = chief.devices.next_event
    for minute in range(60):
        chief.devices.tick(begin + 60 * minute)
    assert len(events_of(tmp_path)) == events

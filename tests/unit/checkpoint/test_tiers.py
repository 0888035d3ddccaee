"""Snapshots on the node: what a resume may use, what it leaves, and what happens when there is no room."""

from __future__ import annotations

import errno
import itertools
import math
import os
import shutil
import socket
import stat
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpctrain.checkpoint import policy as policy_module
from hpctrain.checkpoint import replica, survivors
from hpctrain.checkpoint import saver as saver_module
from hpctrain.checkpoint import snapshots as snapshots_module
from hpctrain.checkpoint.snapshots import HEAD_FILE, PREFIX, STAGING, SnapshotStore, home_name, shards_here
from hpctrain.checkpoint.store import CheckpointStore
from hpctrain.checkpoint.tiers import Tiers, open_tiers
from hpctrain.comm.group import Group
from hpctrain.comm.world import World, alone
from hpctrain.config.sections import CheckpointConfig, TierConfig, TiersConfig
from hpctrain.errors import Replaced, RunFailed
from hpctrain.run.attempts import Attempts
from hpctrain.run.events import Resumed
from hpctrain.run.folder import RunDir
from hpctrain.system import retry
from hpctrain.train.hooks import BaseHook, Hook, StopReason
from hpctrain.train.loop import Trainer
from tests.support.faults import CALLS, FileServer, one_by_one
from tests.support.mpi import PATIENCE_S
from tests.support.thread_groups import ThreadGroup, in_threads
from tests.unit.checkpoint.test_hook import Counter, Interrupt, Lost, Run, lose


class Patience(BaseHook):
    """Lets what is written in the background end within a step."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def after_step(self, trainer: Trainer, result: Any) -> StopReason | None:
        hook = self.run.hook
        assert hook.tiers is not None
        for saver in (hook.saver, *(tier.saver for tier in hook.tiers.tiers)):
            if saver and saver.job:
                saver.job.future.exception(10)
        return None


class Node:
    """A run on a node whose memory and scratch are folders."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, **tiers: TierConfig) -> None:
        self.memory = folder / "memory"
        self.memory.mkdir(exist_ok=True)
        self.monkeypatch = monkeypatch
        self.run_dir = RunDir(folder / "run")
        self.run_dir.create()
        self.attempts = Attempts(self.run_dir)
        self.config = TiersConfig(memory=TierConfig(2, str(self.memory)), **tiers)
        self.run = Run(self.run_dir.checkpoints, every_steps=100)
        self.run.make_tiers = self.tiers

    def tiers(self) -> Tiers:
        """Of a new attempt."""
        self.number = self.attempts.begin()
        self.monkeypatch.setenv("HPCTRAIN_ATTEMPT", str(self.number))
        return open_tiers(
            CheckpointConfig(tiers=self.config), alone(), self.attempts, self.number, self.fence(self.number)
        )

    def fence(self, number: int) -> Callable[[], None]:
        return lambda: self.attempts.check_fence(number)

    @property
    def home(self) -> Path:
        return self.memory / str(home_name(self.attempts))

    def attempt(self, *hooks: Hook, **arguments: Any) -> Counter:
        return self.run.attempt(*hooks, Patience(self.run), **arguments)

    def loses_a_rank(self, step: int, **arguments: Any) -> None:
        with pytest.raises(Lost):
            self.attempt(Interrupt(step, lose), steps=200, **arguments)

    def newest(self) -> Path:
        return max(snapshots(self.home, 0), key=lambda folder: folder.name)

    def resumed(self) -> list[tuple[int, str | None]]:
        return [(each.step, each.tier) for each in self.run.of(Resumed)]


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    return Node(tmp_path, monkeypatch)


def snapshots(home: Path, trained: int) -> list[Path]:
    return [home / place for place in shards_here(home, trained)]


def damage(folder: Path) -> None:
    path = next(folder.glob("shard-*"))
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 1
    path.write_bytes(data)


def test_a_lost_rank_resumes_from_memory_and_nothing_stays(node):
    node.loses_a_rank(150)
    last = int(node.newest().name.removeprefix("step-"))
    assert 140 <= last < 150 and len(snapshots(node.home, 0)) <= 2
    assert node.attempt(steps=200).weight[0] == 200
    assert node.resumed() == [(last, "memory")]
    assert last + 1 in node.run.said("checkpoint_saved"), "the run folder gets what only the node had"
    assert list(node.memory.iterdir()) == []


def test_a_resume_that_fails_while_it_completes_a_snapshot_leaves_it(node, monkeypatch):
    node.loses_a_rank(5)
    before = snapshots(node.home, 0)
    with monkeypatch.context() as patched, suppress(RunFailed, OSError):
        FileServer(errno.ENOSPC, HEAD_FILE, "open").install(patched)
        survivors.make_folder(before[0], (before[0] / HEAD_FILE).read_bytes(), [])
    assert snapshots(node.home, 0) == before


def test_a_node_whose_disk_fails_once_still_has_its_snapshots(node, monkeypatch):
    monkeypatch.setattr(retry, "FILE_PAUSES_S", (0.0,))
    node.loses_a_rank(5)
    newest = node.newest()
    for _ in one_by_one(monkeypatch, str(node.home)):
        tiers = node.tiers()
        assert newest in tiers.found(has_other=False)
        tiers.fetch(newest)


def test_a_disk_that_fails_for_good_costs_a_node_its_snapshots_and_not_the_run(node, monkeypatch, capsys):
    monkeypatch.setattr(retry, "FILE_PAUSES_S", (0.0,))
    node.loses_a_rank(5)
    broken = FileServer(errno.EIO, str(node.memory), "", times=math.inf)
    for call in CALLS:
        monkeypatch.setattr(os, call, broken.in_front_of(getattr(os, call)))
    assert node.attempt(steps=8).weight[0] == 8 and node.resumed() == []
    assert "checkpoint.tiers.memory is not used: " in capsys.readouterr().out


def test_the_memory_tier_is_tried_before_scratch(tmp_path, monkeypatch):
    node = Node(tmp_path, monkeypatch, scratch=TierConfig(2, str(tmp_path / "scratch")))
    (tmp_path / "scratch").mkdir()
    node.loses_a_rank(50)
    for folder in snapshots(node.home, 0):
        damage(folder)
    node.attempt(Interrupt(60))
    ((step, tier),) = node.resumed()
    assert tier == "scratch" and step >= 40
    assert not list(node.memory.iterdir()) and not list((tmp_path / "scratch").iterdir())


def test_the_memory_tier_holds_one_copy_besides_the_one_that_is_filled(node):
    files: set[int] = set()

    def look():
        for folder, _, names in os.walk(node.home):  # which the saver's thread changes meanwhile
            for name in names:
                with suppress(FileNotFoundError):
                    if name.startswith((STAGING, "shard-")):
                        files.add(os.stat(os.path.join(folder, name)).st_ino)

    with pytest.raises(Lost):
        node.attempt(*(Interrupt(step, look) for step in range(20, 60)), Interrupt(60, lose), steps=200)
    assert len(files) == 2
    assert not list(node.home.rglob(f"{STAGING}*")) and len(snapshots(node.home, 0)) <= 2
    node.attempt(Interrupt(70))
    (event,) = node.run.of(Resumed)
    assert event.tier == "memory" and not event.rejected


def test_auto_takes_snapshots_by_the_clock(node, monkeypatch):
    node.config = TiersConfig(memory=TierConfig("auto", str(node.memory)))
    node.attempt(steps=20)
    assert node.run.said("snapshot_saved") == [], "the first one would be taken after a minute"
    monkeypatch.setattr(policy_module, "FIRST_S", 0.0)
    monkeypatch.setattr(policy_module, "automatic_interval_s", lambda cost, *_: 0.0 if cost.write_s else math.inf)
    node.loses_a_rank(50, fresh=True)
    assert len(node.run.said("snapshot_saved")) > 3
    node.attempt(steps=60)
    assert node.resumed()[-1][1] == "memory"


def test_a_damaged_one_is_not_used_and_the_run_folder_is(node):
    node.loses_a_rank(150)
    for folder in snapshots(node.home, 0):
        damage(folder)
    node.attempt(steps=200)
    assert node.resumed() == [(100, None)]
    (event,) = node.run.of(Resumed)
    assert event.rejected and all("memory" in (each.reason or "") for each in event.rejected)
    assert 100 in node.run.store.steps() and not list(node.run_dir.checkpoints.glob("damaged-*"))


def test_what_an_older_attempt_seals_late_is_not_used(node):
    node.loses_a_rank(50)
    late = node.newest()
    node.loses_a_rank(20, fresh=True)  # which trains again from the beginning
    assert late.parent.name == "attempt-000001" and not late.parent.exists()
    late.parent.mkdir()
    for folder in snapshots(node.home, 0):
        folder.rename(late.parent / folder.name)
    node.attempt(steps=30)
    assert node.resumed() == []


def test_a_newer_attempt_stops_an_older_one_that_takes_snapshots(node):
    def replaced():
        node.attempts.begin()

    with pytest.raises(Replaced):
        node.attempt(Interrupt(20, replaced), steps=10_000)
    assert not list(node.home.glob("*/.partial-*"))


def test_no_room_is_said_once_and_the_run_goes_on(node, monkeypatch, capsys):
    monkeypatch.setattr(SnapshotStore, "free_bytes", lambda *_: saver_module.LEAST_SPARE_BYTES)
    assert node.attempt(steps=200).weight[0] == 200
    assert capsys.readouterr().out.count("checkpoint.tiers.memory is not used any more: rank 0: No space left") == 1
    assert node.run.said("snapshot_saved") == [] and node.run.said("checkpoint_failed") == []
    assert 100 in node.run.said("checkpoint_saved") and list(node.memory.iterdir()) == []


def test_a_folder_of_somebody_else_is_neither_read_nor_written(node, capsys):
    node.loses_a_rank(50)
    elsewhere = node.memory / "elsewhere"
    node.home.rename(elsewhere)
    node.home.symlink_to(elsewhere)
    content = sorted(elsewhere.rglob("*"))
    node.attempt(steps=60)
    assert node.resumed() == [] and "checkpoint.tiers.memory is not used" in capsys.readouterr().out
    assert sorted(elsewhere.rglob("*")) == content


def test_dead_runs_are_swept(node, tmp_path, monkeypatch):
    ages = {"gone": 2 * snapshots_module.GONE_S, "just-gone": 1.0, "old": 2 * snapshots_module.OLD_S, "waits": 3600.0}
    for name, age_s in ages.items():
        home = node.memory / f"{PREFIX}{name}"
        home.mkdir(0o700)
        (home / "attempt-000001").mkdir()
        (home / snapshots_module.OWNER).write_text(str(tmp_path if name in ("old", "waits") else tmp_path / "none"))
        for folder in (home / "attempt-000001", home):
            os.utime(folder, (time.time() - age_s,) * 2)
    nodes = Nodes(tmp_path / "elsewhere", monkeypatch, 2)
    nodes.loses_a_rank(30)
    for name in ("moved", "complete"):
        shutil.copytree(nodes.home("n1"), node.memory / f"{PREFIX}{name}")
        nodes.attempt() if name == "complete" else nodes.loses_a_rank(40)
        home = nodes.home("n1")
        assert snapshots_module.is_dead(node.memory / f"{PREFIX}{name}", time.time())
        assert not home.exists() or not snapshots_module.is_dead(home, time.time())
    node.attempt()
    assert {each.name.removeprefix(PREFIX) for each in node.memory.iterdir()} == {"just-gone", "waits"}


def test_a_run_that_no_longer_keeps_snapshots_removes_them(node):
    node.loses_a_rank(50)
    node.config = TiersConfig(memory=TierConfig(None, str(node.memory)))
    node.attempt(Interrupt(60))
    assert node.resumed() == [] and list(node.memory.iterdir()) == []


class Nodes:
    """A run whose ranks, threads here, lie on a node each: they see the run folder, and their own node's memory."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, size: int, **memory: Any) -> None:
        self.folder = folder
        self.monkeypatch = monkeypatch
        self.run_dir = RunDir(folder / "run")
        self.run_dir.create()
        self.attempts = Attempts(self.run_dir)
        self.memory = memory
        self.names = [f"n{index + 1}" for index in range(size)]
        self.runs: list[Run] = []

    def home(self, name: str) -> Path:
        return self.folder / name / str(home_name(self.attempts))

    def lose(self, name: str) -> None:
        self.names.remove(name)

    def attempt(self, *make_hooks: Callable[[], Hook], steps: int = 100) -> list[np.ndarray]:
        """Trains on the nodes that are left; the weights of each."""
        number = self.attempts.begin()
        self.monkeypatch.setenv("HPCTRAIN_ATTEMPT", str(number))
        self.runs = []

        def on_a_node(everyone: ThreadGroup) -> np.ndarray:
            (place := self.folder / self.names[everyone.rank]).mkdir(exist_ok=True)
            world = World(everyone, everyone, Group("local"), everyone.rank, everyone.size, place.name)
            run = Run(self.run_dir.checkpoints, every_steps=30)
            config = TiersConfig(memory=TierConfig(5, str(place), **self.memory))
            fence = partial(self.attempts.check_fence, number)
            run.world, run.make_store = world, partial(CheckpointStore, group=everyone, peers=everyone)
            run.make_tiers = lambda: open_tiers(CheckpointConfig(tiers=config), world, self.attempts, number, fence)
            if everyone.rank == 0:
                self.runs.append(run)
            return run.attempt(*(make() for make in make_hooks), Patience(run), steps=steps).weight

        return in_threads(len(self.names), on_a_node)

    def loses_a_rank(self, step: int) -> None:
        with pytest.raises((Lost, threading.BrokenBarrierError)):
            self.attempt(lambda: Interrupt(step, lose))

    def resumed(self) -> Resumed:
        (event,) = self.runs[0].of(Resumed)
        return event


def test_a_snapshot_of_several_nodes_is_resumed_on_them_and_nothing_stays(tmp_path, monkeypatch):
    nodes = Nodes(tmp_path, monkeypatch, 3)
    nodes.loses_a_rank(48)
    held = [shards_here(nodes.home(name), 0) for name in nodes.names]
    assert {tuple(shards) for each in held for shards in each.values()} == {(3, 0), (3, 1), (3, 2)}, "only their own"
    assert {stat.S_IMODE(file.stat().st_mode) for file in nodes.home("n1").glob("*/step-*/*")} == {0o600}
    weights = nodes.attempt()
    assert [weight.tolist() for weight in weights] == [[100.0] * 3] * 3
    assert nodes.resumed().tier == "memory" and 40 <= nodes.resumed().step < 48
    assert [list((tmp_path / name).iterdir()) for name in nodes.names] == [[], [], []]


def test_what_a_lost_node_took_with_it_is_said(tmp_path, monkeypatch):
    nodes = Nodes(tmp_path, monkeypatch, 3)
    nodes.loses_a_rank(48)
    nodes.lose("n2")
    assert nodes.attempt()[0].tolist() == [100.0] * 3
    assert (nodes.resumed().tier, nodes.resumed().step) == (None, 30)
    reasons = {each.reason for each in nodes.resumed().rejected}
    assert reasons == {"memory: 1 of its 3 shards are not on the nodes of this attempt"}


def test_one_node_goes_on_with_what_two_others_left_and_they_with_what_it_left(tmp_path, monkeypatch):
    nodes = Nodes(tmp_path, monkeypatch, 1)
    nodes.loses_a_rank(28)
    nodes.names.append("n2")
    nodes.loses_a_rank(58)
    assert nodes.resumed().tier == "memory" and nodes.resumed().ranks == 1 and nodes.resumed().step >= 20
    shutil.copytree(nodes.home("n2"), nodes.home("n1"), dirs_exist_ok=True)
    nodes.lose("n2")
    nodes.attempt()
    assert nodes.resumed().tier == "memory" and nodes.resumed().ranks == 2 and nodes.resumed().step >= 50


def test_one_folder_for_several_nodes_is_not_used(tmp_path, monkeypatch, capsys):
    nodes = Nodes(tmp_path, monkeypatch, 2)
    nodes.names = ["same", "same"]
    nodes.attempt()
    assert "one folder on several nodes" in capsys.readouterr().out
    assert list((tmp_path / "same").iterdir()) == []


@pytest.mark.parametrize(("call", "code"), [("write_at", errno.ENOSPC), ("read_at", errno.EIO)])
def test_a_node_that_cannot_store_or_read_a_snapshot_passes_over_it(call, code, tmp_path, monkeypatch):
    """If it could not read, the others waited for it, an hour at most."""
    nodes = Nodes(tmp_path, monkeypatch, 2)
    nodes.loses_a_rank(48)

    def fails(*_):
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patched:
        patched.setattr(survivors, call, fails)
        nodes.attempt()
    reason = str(nodes.resumed().rejected[0].reason)
    assert nodes.resumed().step == 30 and os.strerror(code) in reason and "fix:" not in reason


def test_with_copies_a_lost_node_costs_no_snapshot_and_two_lost_at_once_are_said(tmp_path, monkeypatch, capsys):
    nodes = Nodes(tmp_path, monkeypatch, 4, copies=1)
    nodes.loses_a_rank(48)
    held = {tuple(shards) for name in nodes.names for shards in shards_here(nodes.home(name), 0).values()}
    assert held == {(4, 0, 3), (4, 0, 1), (4, 1, 2), (4, 2, 3)}
    assert {stat.S_IMODE(file.stat().st_mode) for file in nodes.home("n1").glob("*/step-*/*")} == {0o600}
    nodes.lose("n2")
    nodes.loses_a_rank(58)
    assert nodes.resumed().tier == "memory" and nodes.resumed().ranks == 4 and nodes.resumed().step >= 40
    nodes.lose("n1")
    nodes.lose("n3")
    nodes.attempt()
    assert nodes.resumed().tier is None and nodes.resumed().step >= 30
    reasons = {each.reason for each in nodes.resumed().rejected}
    assert reasons == {"memory: 1 of its 3 shards are not on the nodes of this attempt"}
    assert "checkpoint.tiers.memory has no copies: the ranks are on one node" in capsys.readouterr().out
    assert list((tmp_path / "n4").iterdir()) == []
    copying = [thread for thread in threading.enumerate() if thread.name == replica.THREAD]
    for thread in copying:
        thread.join(PATIENCE_S)
    assert not any(thread.is_alive() for thread in copying)


def test_a_partner_without_room_is_said_and_a_stranger_gets_nothing(tmp_path, monkeypatch, capsys):
    nodes = Nodes(tmp_path, monkeypatch, 2, copies=1)
    listening: list[socket.socket] = []

    def no_room(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    class Watched(replica.Replica):
        def start(self):
            listening.append(self.listener)
            super().start()

    def stranger():
        with socket.create_connection(listening[0].getsockname()) as stream, pytest.raises(ConnectionError):
            replica.shake_hands(stream, b"guessed", calls=True)

    monkeypatch.setattr(replica, "Replica", Watched)
    monkeypatch.setattr(replica, "write_at", no_room)
    nodes.attempt(lambda: Interrupt(3, stranger))
    said = capsys.readouterr().out
    assert said.count("checkpoint.tiers.memory is not used any more: ") == 1
    assert "the copy on the next node: [Errno 28] No space left" in said
    assert list((tmp_path / "n1").iterdir()) == []


@pytest.mark.parametrize("call", ["write_at", "hear"])
def test_a_copy_that_fails_once_costs_one_snapshot(call, tmp_path, monkeypatch, capsys):
    """Be it on the partner's disk, or that the connection breaks."""
    nodes = Nodes(tmp_path, monkeypatch, 2, copies=1)
    own, calls = getattr(replica, call), itertools.count()

    def fails_once(*given):
        if next(calls) == 0:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return own(*given)

    monkeypatch.setattr(replica, call, fails_once)
    nodes.loses_a_rank(48)
    said = capsys.readouterr().out
    assert "not used any more" not in said
    assert said.count("checkpoint.tiers.memory lacks the snapshot of step ") == 1
    nodes.lose("n2")
    nodes.attempt()
    assert nodes.resumed().tier == "memory" and nodes.resumed().step >= 40


def test_a_connection_whose_handshake_failed_is_not_used():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        partner = replica.Replica(None, listener, b"its token")  # type: ignore[arg-type]
        partner.start()
        own = replica.Replica(None, listener, b"another token")  # type: ignore[arg-type]
        with pytest.raises(ConnectionError):
            own.connect(*listener.getsockname())
        assert own.stream is None
        partner.close()


def test_a_copied_run_folder_has_snapshots_of_its_own(tmp_path):
    """It resumed from those of the original, and removed them."""
    original = Attempts(RunDir(tmp_path / "original"))
    original.begin()
    shutil.copytree(tmp_path / "original", tmp_path / "copy")
    (tmp_path / "link").symlink_to("original")
    copy, link = (Attempts(RunDir(tmp_path / name)) for name in ("copy", "link"))
    assert copy.info()["id"] == original.info()["id"]
    assert home_name(copy) != home_name(original) == home_name(link)

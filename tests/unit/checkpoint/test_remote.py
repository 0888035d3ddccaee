"""Checkpoints in an object store: what arrives there, what a resume takes, and what happens when the store does not."""

from __future__ import annotations

import errno
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hpctrain.checkpoint import objects as objects_module
from hpctrain.checkpoint import read_retry
from hpctrain.checkpoint import remote as remote_module
from hpctrain.checkpoint.format.layout import UnreadableCheckpoint
from hpctrain.checkpoint.objects import ObjectFolder
from hpctrain.checkpoint.policy import Retention
from hpctrain.checkpoint.remote import Remote, Sending, list_store, open_remote
from hpctrain.checkpoint.store import CheckpointStore
from hpctrain.cli import main
from hpctrain.comm.group import Group
from hpctrain.comm.step_vote import SaveVote, StepVote
from hpctrain.comm.world import World
from hpctrain.config.sections import CheckpointConfig, StoreTierConfig, TiersConfig
from hpctrain.errors import Replaced, UserError
from hpctrain.run.events import CheckpointStored, Resumed, StoreAway
from hpctrain.system import object_store as object_store_module
from hpctrain.system import retry
from hpctrain.train.hooks import BaseHook, Hook, StopReason
from hpctrain.train.loop import Trainer
from tests.support.faults import FileServer
from tests.support.object_store import REFUSALS, ObjectStore
from tests.support.thread_groups import in_threads
from tests.unit.checkpoint.test_hook import Counter, Interrupt, Lost, Run, lose

pytest.importorskip("obstore", reason="the extra lake is not installed")


EVERY = 8
"""Steps between checkpoints: enough to send one, for each stage of which there is a step."""


class Patience(BaseHook):
    """Lets what is sent in the background end within a step."""

    def __init__(self, site: Site) -> None:
        self.site = site

    def after_step(self, trainer: Trainer, result: Any) -> StopReason | None:
        if (job := self.site.remote.job) and not self.site.is_away:
            job.future.exception(30)
        return None


class Site:
    """A run whose checkpoints are copied to a store."""

    def __init__(self, folder: Path, url: str, wait_s: float = 60.0, **store: Any) -> None:
        self.folder = folder / "checkpoints"
        self.url = url
        self.store = StoreTierConfig(url, wait_s=wait_s, **store)
        self.run = Run(self.folder, every_steps=EVERY, mode="sync", keep_last=3, tiers=TiersConfig(store=self.store))
        self.run.make_remote = self.make_remote
        self.fence: Callable[[], None] = lambda: None
        self.is_away = False

    def make_remote(self) -> Remote:
        remote = open_remote(self.store, self.folder, Group("alone"), Retention(3), self.fence)
        assert remote
        self.remote = remote
        return remote

    def attempt(self, *hooks: Hook, **arguments: Any) -> Counter:
        self.run.events.clear()
        return self.run.attempt(*hooks, Patience(self), **arguments)

    def loses_all(self, step: int = 39) -> None:
        """Trains to a step, at which the process dies and the run folder goes with it."""
        with pytest.raises(Lost):
            self.attempt(Interrupt(step, lose), steps=200)
        shutil.rmtree(self.folder)

    def resumed(self) -> tuple[int, str | None]:
        (event,) = self.run.of(Resumed)
        return event.step, event.tier

    def steps(self) -> list[int]:
        """In the store."""
        return sorted(list_store(ObjectFolder(self.url)).folders)


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path, f"file://{tmp_path}/store")


@pytest.fixture
def there(tmp_path: Path, object_store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> Site:
    """On a server, of which the library gives up early."""
    monkeypatch.setattr(object_store_module, "RETRIES", 2)
    monkeypatch.setattr(remote_module, "FIRST_PAUSE_S", 0.02)
    return Site(tmp_path, f"{object_store.make_bucket(tmp_path.name.replace('_', '-'))}/runs/digits")


def test_a_run_whose_folder_is_lost_resumes_from_the_store_and_ends_the_same(there):
    there.loses_all()
    assert there.steps() == [16, 24, 32], "as many as the run folder keeps"
    assert there.attempt(steps=48).weight.tolist() == [48.0] * 3
    assert there.resumed() == (32, "store")
    assert there.steps() == there.run.store.steps() == [33, 40, 48]
    assert [path.name for path in there.folder.glob(".*")] == [], "what was fetched is gone"


def test_what_the_run_folder_has_is_not_fetched_and_what_the_store_lacks_is_sent(site):
    run, url = site.run, site.store
    site.store = StoreTierConfig(f"{site.url}/other")
    run.attempt(steps=10)
    site.store = url
    site.attempt(steps=10)
    assert site.resumed() == (10, None) and site.steps() == [10]


def test_every_steps_takes_the_first_at_or_after_and_the_last(tmp_path):
    site = Site(tmp_path, f"file://{tmp_path}/store", every_steps=20)
    site.attempt(steps=49)
    stored = [each.step for each in site.run.of(CheckpointStored)]
    assert stored == [8, 24, 40, 49]


def test_a_store_that_fails_three_calls_of_ten_loses_nothing(there, object_store, monkeypatch):
    monkeypatch.setattr(object_store_module, "RETRIES", 8)
    object_store.fail("all-flaky", 10**6)
    there.loses_all()
    assert there.attempt(steps=42).weight.tolist() == [42.0] * 3
    assert there.resumed() == (32, "store")
    object_store.fail("", 0)
    assert there.steps() == [33, 40, 42]


def test_a_file_server_that_fails_twice_while_a_checkpoint_is_sent_costs_nothing(site, monkeypatch):
    server = FileServer(errno.ESTALE, "step-000000008", "listdir", times=2).install(monkeypatch)
    monkeypatch.setattr(remote_module, "FIRST_PAUSE_S", 0.001)
    site.attempt(steps=16)
    assert server.failed == 2 and site.steps() == [8, 16]


@pytest.mark.parametrize(("where", "call"), [(".begun-again", "stat"), (".partial-store", "mkdir")])
def test_a_file_server_that_fails_once_costs_no_resume_from_the_store(site, monkeypatch, where, call):
    monkeypatch.setattr(retry, "FILE_PAUSES_S", (0.0,))
    monkeypatch.setattr(read_retry, "PAUSES_S", (0.0,))
    site.loses_all(12)
    server = FileServer(errno.ESTALE, where, call).install(monkeypatch)
    assert site.attempt(steps=13).weight[0] == 13
    assert server.failed == 1 and site.resumed() == (8, "store")


@pytest.mark.parametrize("how", ["expired", "busy", "skewed"])
def test_a_store_that_is_away_is_said_once_and_gets_what_it_missed(there, object_store, how, capsys):
    def leave():
        there.is_away = True
        object_store.fail(f"all-{how}", 10**6)

    def wait_until_said():
        while there.remote.problem is None:
            there.remote.stopped.wait(0.01)

    def come_back():
        there.is_away = False
        object_store.fail("", 0)

    there.attempt(Interrupt(4, leave), Interrupt(12, wait_until_said), Interrupt(20, come_back), steps=30)
    (away,) = there.run.of(StoreAway)
    assert REFUSALS[how][1] in str(away.error) and away.step > 4
    assert there.steps()[-1] == there.run.store.steps()[-1] == 30
    said = capsys.readouterr().out
    assert said.count("do not reach s3://") == 1 and "secret" not in said


def test_a_run_ends_without_the_store_and_says_what_is_missing(there, object_store):
    patient = there.run.config
    hasty = TiersConfig(store=StoreTierConfig(there.url, wait_s=0.2))
    there.run.config = CheckpointConfig(every_steps=EVERY, mode="sync", tiers=hasty)
    there.attempt(Interrupt(4, lambda: setattr(there, "is_away", True) or object_store.fail("all-busy", 10**6)))
    assert "the checkpoint of step 10 has not arrived" in str(there.run.of(StoreAway)[-1].error)
    object_store.fail("", 0)
    there.is_away, there.run.config = False, patient
    there.attempt()
    assert there.steps()[-1] == 10, "the next attempt sends it"


def test_a_store_that_cannot_be_asked_stops_only_a_run_that_has_nothing_else(there, object_store):
    there.attempt(steps=6)
    object_store.fail("all-expired", 2)
    there.attempt(steps=9)
    assert there.resumed() == (6, None) and there.steps()[-1] == 9
    shutil.rmtree(there.folder)
    object_store.fail("all-expired", 10**6)
    with pytest.raises(UnreadableCheckpoint, match=r"ExpiredToken.*whether the run has checkpoints there is not known"):
        there.attempt(steps=12)


def test_half_an_object_and_a_missing_one_are_passed_over(site):
    site.loses_all()
    folders = list_store(site.remote.objects).folders
    store = Path(site.url.removeprefix("file://"))
    (shard,) = (store / folders[32]).glob("*.h5")
    shard.write_bytes(shard.read_bytes()[: shard.stat().st_size // 2])
    next((store / folders[24]).glob("*.h5")).unlink()
    assert site.attempt(steps=20).weight.tolist() == [20.0] * 3
    assert site.resumed() == (16, "store")
    (event,) = site.run.of(Resumed)
    assert [each.step for each in event.rejected] == [32, 24]


def test_what_the_store_took_as_half_is_sent_again(site, monkeypatch):
    halves = []

    def send(self, path, name):
        half = path
        if not halves:
            half = path.parent.parent / "half"
            half.write_bytes(path.read_bytes()[:100])
            halves.append(name)
        whole(self, half, name)

    whole = ObjectFolder.send
    monkeypatch.setattr(ObjectFolder, "send", send)
    site.attempt(steps=3)
    assert halves and site.steps() == [3]
    shutil.rmtree(site.folder)
    site.attempt(steps=3)
    assert site.resumed() == (3, "store")


class Killed(BaseException):
    """In place of a kill: no code handles it."""


def test_killed_at_any_request_it_resumes_from_the_newest_that_is_whole(tmp_path, monkeypatch):
    """Each request of an attempt is the last one in turn; the run folder is lost every time."""
    asked = objects_module.opened
    left = 10**6

    def opened(url, writes=False):
        nonlocal left
        left -= 1
        if left < 0:
            raise Killed
        return asked(url, writes)

    monkeypatch.setattr(objects_module, "opened", opened)
    arrived = 0
    for last in range(15):
        site = Site(tmp_path / str(last), f"file://{tmp_path}/store{last}")
        left = last
        with suppress(Killed):
            site.attempt(steps=16)
        announced = [each.step for each in site.run.of(CheckpointStored)]
        shutil.rmtree(site.folder, ignore_errors=True)
        left = 10**6
        assert site.attempt(steps=17).weight.tolist() == [17.0] * 3
        resumed = [each.step for each in site.run.of(Resumed)]
        assert max(announced, default=0) <= max(resumed, default=0)
        arrived = max(arrived, *announced, 0)
    assert arrived == 16, "the last attempts end as they should"


@pytest.mark.slow
def test_killed_eight_times_while_it_sends_the_newest_whole_one_is_always_readable(tmp_path, object_store):
    """And the store fails three calls of ten."""
    url = object_store.make_bucket("killed")
    object_store.fail("all-flaky", 10**6)
    words = [sys.executable, "-m", "tests.support.store_kills", tmp_path, url, object_store.url, "8", "0"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=500)
    object_store.fail("", 0)
    assert done.returncode == 0 and int(done.stdout.split()[-1]) > 4, done.stdout + done.stderr
    there = list_store(ObjectFolder(url))
    assert len(there.folders) >= 2 and main(["ckpt", "verify", url]) == 0


def test_an_old_attempt_that_comes_back_writes_nothing_that_counts(site):
    site.loses_all(23)
    old = site.remote
    site.attempt(steps=17)
    old.stopped.clear()
    with pytest.raises(Replaced, match="another attempt"):
        old._commit(Sending(17, site.folder / "step-000000017"))
    old.objects.create(f"step-000000099-{old.token}/manifest.json", b"of an attempt that had asked just before")
    there = list_store(site.remote.objects)
    assert sorted(there.folders) == [8, 16, 17] and there.folders[17].endswith(site.remote.token)


def folders(site: Site) -> list[str]:
    """Names in the store, whatever they count."""
    return sorted(path.name for path in Path(site.url.removeprefix("file://")).glob("step-*"))


def test_what_an_older_attempt_has_that_does_not_count_goes_once_the_run_has_come_as_far(site):
    site.loses_all()
    stale = list_store(site.remote.objects).folders[32]
    (shard,) = Path(site.url.removeprefix("file://"), stale).glob("*.h5")
    shard.write_bytes(b"damaged")
    site.attempt(steps=28)
    assert site.resumed() == (24, "store") and site.steps() == [24, 25, 28] and stale in folders(site)
    site.attempt(steps=36)
    assert site.steps() == [28, 32, 36] and stale not in folders(site) and len(folders(site)) == 3


def test_what_could_not_be_removed_is_removed_with_the_next_one(site, monkeypatch):
    remove, failures = ObjectFolder.remove, []

    def refuse(self, names):
        if not failures and any(name.endswith(".h5") for name in names):
            failures.append(names)
            raise UnreadableCheckpoint("busy", "")
        remove(self, names)

    monkeypatch.setattr(ObjectFolder, "remove", refuse)
    site.attempt(steps=48)
    assert failures and len(folders(site)) == len(site.steps()) == 3


def test_an_old_attempt_removes_nothing_of_a_newer_one(site):
    site.loses_all(23)
    old = site.remote
    site.attempt(steps=17)
    name = f"step-000000024-{site.remote.token}/shard-00000-of-00001.h5"
    site.remote.objects.create(name, b"on its way")
    there = list_store(site.remote.objects)
    with pytest.raises(Replaced, match="another attempt"):
        old._clear(there, 17)
    assert list_store(site.remote.objects).sizes == there.sizes


def test_a_store_without_conditional_requests_is_used_as_far_as_it_goes(there, monkeypatch):
    monkeypatch.setenv("AWS_CONDITIONAL_PUT", "disabled")
    there.attempt(steps=9)
    assert there.steps() == [8, 9]
    name, objects = "attempts/000001.json", there.remote.objects
    assert objects.create(name, objects.get(name)) and not objects.create(name, b"{}")


def test_a_replaced_attempt_does_not_take_the_place_over(site):
    def fence():
        raise Replaced("a newer attempt has begun")

    site.fence = fence
    site.attempt(steps=9)
    assert site.steps() == [] and "a newer attempt has begun" in str(site.run.of(StoreAway)[0].error)


def test_begun_again_the_old_ones_do_not_count(site):
    site.loses_all()
    site.attempt(steps=16, fresh=True)
    assert site.steps() == [8, 16]
    shutil.rmtree(site.folder)
    site.attempt(steps=20)
    assert site.resumed() == (16, "store")


def test_begun_again_the_old_ones_do_not_count_even_if_the_store_was_not_told(site):
    site.loses_all()

    def refuse():
        raise Replaced("it is not told")

    site.fence = refuse
    site.attempt(steps=5, fresh=True)
    site.fence = lambda: None
    site.attempt(steps=9)
    assert site.resumed() == (5, None) and site.steps() == [8, 9]
    shutil.rmtree(site.run.folder / "step-000000009")
    shutil.rmtree(site.run.folder / "step-000000008")
    site.attempt(steps=12)
    assert site.resumed() == (9, "store")


def test_ranks_share_sending_and_fetching(tmp_path):
    config = StoreTierConfig(f"file://{tmp_path}/store")

    def train(everyone, steps):
        run = Run(tmp_path / "checkpoints", every_steps=5, tiers=TiersConfig(store=config))
        run.world = World(everyone, everyone, Group("local"), everyone.rank, everyone.size, "here")
        run.make_store = partial(CheckpointStore, group=everyone, peers=everyone)
        run.make_remote = lambda: open_remote(config, tmp_path / "checkpoints", everyone, Retention(2), lambda: None)
        return run.attempt(steps=steps).weight, run

    in_threads(3, partial(train, steps=20))
    there = list_store(ObjectFolder(str(config.url)))
    assert 20 in there.folders and len(there.files(20)) == 4
    shutil.rmtree(tmp_path / "checkpoints")
    ended = in_threads(3, partial(train, steps=30))
    assert [weight.tolist() for weight, _ in ended] == [[30.0] * 3] * 3
    (resumed,) = ended[0][1].of(Resumed)
    assert (resumed.step, resumed.tier, resumed.ranks) == (20, "store", 3)


def test_commands_read_the_store(there, tmp_path, capsys):
    there.attempt(steps=9)
    capsys.readouterr()
    assert main(["ckpt", "ls", there.url, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["step"] for row in rows] == [8, 9] and rows[0]["path"].startswith(f"{there.url}/step-000000008-")
    assert main(["ckpt", "verify", rows[0]["path"]]) == 0
    assert capsys.readouterr().out == f"{rows[0]['path']}: intact\n"
    assert main(["ckpt", "export", there.url, "-o", str(tmp_path / "x.safetensors"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step"] == 9
    there.remote.objects.send(Path(__file__), f"{rows[0]['path'].rpartition('/')[2]}/shard-00000-of-00001.h5")
    assert main(["ckpt", "verify", there.url]) == 70
    said = capsys.readouterr().out
    assert f"{rows[0]['path']}: {rows[0]['path']}/shard-00000" in said and said.count("intact\n") == 1


@pytest.mark.parametrize("url", ["s3://key:secret@bucket/x", "s3://bucket/x?sig=secret", "https://bucket/x", "s3://"])
def test_urls_with_credentials_or_of_no_store_are_refused(url):
    with pytest.raises(UserError) as caught:
        StoreTierConfig(url)
    assert "secret" not in caught.value.what + caught.value.fix


def test_what_has_arrived_ends_the_problems_of_ranks_that_had_nothing_to_send(site):
    remote = site.make_remote()
    remote.problem, remote.job = "the store does not answer", Sending(0, stage=1)
    remote.job.future.set_result(0)
    (away,) = remote.advance(StepVote(**remote.vote()), 0)
    vote = StepVote(**remote.vote())
    assert isinstance(away, StoreAway) and vote == StepVote(store=SaveVote(True, True)) and not remote.is_away

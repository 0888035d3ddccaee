"""What cannot be read now is tried again and never put aside; what is damaged is put aside at once."""

from __future__ import annotations

import errno
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from hpctrain.checkpoint import initial, read_retry
from hpctrain.checkpoint.format.layout import DamagedCheckpoint, UnreadableCheckpoint
from hpctrain.checkpoint.resume import resume
from hpctrain.checkpoint.safetensors import encode
from hpctrain.checkpoint.store import CheckpointStore, best_steps
from hpctrain.checkpoint.verify import verify_checkpoint
from hpctrain.comm.group import Group
from hpctrain.errors import ExitCode, RunFailed, UserError
from hpctrain.system import retry
from hpctrain.train.state import TrainState
from tests.support.faults import FileServer, one_by_one

IDENTITY = {"config": {"seed": 0, "train": {}}, "global_batch": 2, "data": "abc"}
SHARD, MANIFEST = "shard-00000-of-00001.h5", "manifest.json"
NEWEST = "step-000000002"
PLACES = [("open", SHARD), ("fstat", SHARD), ("preadv", SHARD), ("open", MANIFEST), ("read", MANIFEST)]


class Weights:
    """A framework that takes what it gets."""

    def load(self, arrays: dict[str, np.ndarray]) -> None:
        self.arrays = arrays


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[CheckpointStore]:
    """Checkpoints of steps 1 and 2, and no long waits."""
    monkeypatch.setattr(read_retry, "PAUSES_S", (0.001, 0.001))
    store = CheckpointStore(tmp_path / "checkpoints")
    for step in (1, 2):
        meta = {"identity": IDENTITY, "state": TrainState(step=step).to_json(), "best": step == 2}
        store.save({"model/weight": np.full((9, 5), step, np.float32)}, meta, step)
    yield store
    store.close()


def resumed_step(store: CheckpointStore) -> int:
    loaded = resume(store, Weights(), TrainState(), IDENTITY)  # type: ignore[arg-type]
    assert loaded is not None and loaded.rejected == ()
    return loaded.step


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE, errno.ENOMEM, errno.ETIMEDOUT, errno.EMFILE])
@pytest.mark.parametrize(("call", "where"), PLACES)
def test_an_error_that_passes_costs_nothing(
    store,
    monkeypatch,
    capsys,
    code,
    call,
    where,
):
    server = FileServer(code, f"{NEWEST}/{where}", call, times=2).install(monkeypatch)
    assert resumed_step(store) == 2 and server.failed == 2
    assert capsys.readouterr().err.count("; trying again for up to ") == 1
    assert sorted(os.listdir(store.path)) == ["step-000000001", NEWEST]


@pytest.mark.parametrize(("call", "where"), PLACES)
def test_an_error_that_stays_stops_the_run_and_moves_nothing(store, monkeypatch, call, where):
    FileServer(errno.EIO, f"{NEWEST}/{where}", call, times=math.inf).install(monkeypatch)
    with pytest.raises(UnreadableCheckpoint, match=rf"{where} cannot be read now: Input.* \(tried 3 ") as told:
        resumed_step(store)
    assert told.value.exit_code == ExitCode.FAILURE
    assert sorted(os.listdir(store.path)) == ["step-000000001", NEWEST]


def test_the_waits_outlast_a_failover_of_a_file_server():
    assert 60 <= sum(read_retry.PAUSES_S) <= 90


def test_a_folder_that_cannot_be_listed_is_not_an_empty_one(store, monkeypatch):
    server = FileServer(errno.ESTALE, str(store.path), "listdir").install(monkeypatch)
    assert resumed_step(store) == 2 and server.failed == 1
    server.left = math.inf
    with pytest.raises(UnreadableCheckpoint, match="Stale file handle"):
        resumed_step(store)


def test_a_file_that_the_server_denies_but_lists_is_not_missing(store, monkeypatch):
    server = FileServer(errno.ENOENT, f"{NEWEST}/{SHARD}", "open").install(monkeypatch)
    assert resumed_step(store) == 2 and server.failed == 1


def test_the_best_one_is_not_passed_over_for_an_older_one(store, monkeypatch):
    server = FileServer(errno.EIO, f"{NEWEST}/{MANIFEST}", "read").install(monkeypatch)
    assert store.best() == 2 and server.failed == 1
    server.left = math.inf
    with pytest.raises(UnreadableCheckpoint, match="Input/output error"):
        store.best()


def test_a_stale_handle_is_opened_again(store, monkeypatch):
    with store.opened(2) as loaded:
        assert loaded.arrays["model/weight"][0, 0] == 2  # the file stays open
        server, really_open = FileServer(errno.ESTALE, SHARD, "preadv", times=math.inf).install(monkeypatch), os.open

        def open_again(*given):
            server.left = 0
            return really_open(*given)

        monkeypatch.setattr(os, "open", open_again)
        assert loaded.arrays["model/weight"][0, 0] == 2 and server.failed == 1


def test_what_may_not_be_read_is_the_users_to_solve_and_said_at_once(store, monkeypatch):
    server = FileServer(errno.EACCES, SHARD, "open", times=math.inf).install(monkeypatch)
    with pytest.raises(UserError, match="Permission denied"):
        resumed_step(store)
    assert server.failed == 1
    assert sorted(os.listdir(store.path)) == ["step-000000001", NEWEST]


MEMORY = """
import resource, sys
from hpctrain.checkpoint import read_retry
from hpctrain.checkpoint.store import CheckpointStore
read_retry.PAUSES_S = (0.001,)
store = CheckpointStore(sys.argv[1])
store.load(1)
pages = int(open("/proc/self/statm").read().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (64 << 20),) * 2)
store.load()
"""


def test_no_memory_for_a_checkpoint_does_not_make_it_a_damaged_one(store):
    store.save({"model/weight": np.zeros(200 << 20, np.uint8)}, step=3)
    done = subprocess.run([sys.executable, "-c", MEMORY, store.path], capture_output=True, text=True, timeout=120)
    assert "UnreadableCheckpoint" in done.stderr and "does not fit into memory" in done.stderr, done.stderr


def test_damage_is_put_aside_without_a_second_attempt(store, monkeypatch):
    monkeypatch.setattr(read_retry, "PAUSES_S", (600.0,))
    path = store.folder(2) / SHARD
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    loaded = resume(store, Weights(), TrainState(), IDENTITY)  # type: ignore[arg-type]
    assert loaded and loaded.step == 1 and "is damaged" in loaded.rejected[0].reason
    assert [name for name in os.listdir(store.path) if name.startswith(f"damaged-{NEWEST}")]


def test_a_checkpoint_without_a_manifest_is_damage_and_is_told(store):
    os.unlink(store.folder(2) / MANIFEST)
    loaded = resume(store, Weights(), TrainState(), IDENTITY)  # type: ignore[arg-type]
    assert loaded and loaded.step == 1 and f"{NEWEST}/{MANIFEST} is missing" in loaded.rejected[0].reason
    assert [name for name in os.listdir(store.path) if name.startswith(f"damaged-{NEWEST}")]
    os.unlink(store.folder(1) / MANIFEST)
    with pytest.raises(DamagedCheckpoint, match=r"no intact checkpoint: .*is missing"):
        resume(store, Weights(), TrainState(), IDENTITY)  # type: ignore[arg-type]


def test_a_damaged_checkpoint_that_cannot_be_renamed_is_passed_over(store, monkeypatch):
    os.unlink(store.folder(2) / MANIFEST)
    monkeypatch.setattr(os, "rename", FileServer(errno.EIO, NEWEST, "rename").in_front_of(os.rename))
    loaded = resume(store, Weights(), TrainState(), IDENTITY)  # type: ignore[arg-type]
    assert loaded and loaded.step == 1 and NEWEST in os.listdir(store.path)


def test_the_best_checkpoint_is_kept_while_nobody_can_see_that_it_is_the_best(store, monkeypatch):
    assert best_steps(store) == {2}
    FileServer(errno.EIO, f"{NEWEST}/{MANIFEST}", "open").install(monkeypatch)
    assert best_steps(store) == {2}


def test_commands_tell_the_two_apart(store, monkeypatch, cli):
    FileServer(errno.EIO, f"{NEWEST}/{MANIFEST}", "open", times=math.inf).install(monkeypatch)
    run = str(store.path)
    assert "UNREADABLE: " in (output := cli("ckpt", "ls", run).out) and "DAMAGED" not in output
    assert not verify_checkpoint(store, 2).readable and verify_checkpoint(store, 1).readable
    rows = json.loads(cli("ckpt", "verify", run, "--json", code=ExitCode.FAILURE).out)
    assert [(row["sound"], row["readable"]) for row in rows] == [(True, True), (False, False)]
    for command in (["inspect", run], ["export", run, "-o", f"{run}/weights.safetensors"], ["diff", run, run]):
        assert "cannot be read now: Input/output error" in cli("ckpt", *command, code=ExitCode.FAILURE).err


def test_a_save_in_place_of_another_of_its_step_never_loses_that(store, monkeypatch):
    arrays = {"model/weight": np.full((9, 5), 2, np.float32)}
    for server in one_by_one(monkeypatch, str(store.path)):
        with suppress(RunFailed):
            store.save(arrays, {"identity": IDENTITY}, 2)
            assert not server.failed or not [name for name in os.listdir(store.path) if name.startswith(".partial")]
        assert store.steps() == [1, 2], "not even until the next start, which would put it back"
    assert store.load(2).arrays["model/weight"].tolist() == arrays["model/weight"].tolist()


ALONE = Group("alone")


def in_memory(weights: initial.Weights, _: str) -> dict[str, np.ndarray]:
    """All of them."""
    return {name: weights.arrays[name] for name in weights.arrays}


def test_initial_weights_wait_for_a_file_server_and_not_for_a_wrong_name(store, tmp_path, monkeypatch):
    path = tmp_path / "weights.safetensors"
    path.write_bytes(b"".join(encode({"weight": np.zeros(3)}, {"weight": "float64"}, {})))
    (tmp_path / "link.safetensors").symlink_to(path)
    for source in (path, tmp_path / "link.safetensors", store.path):
        server = FileServer(errno.EIO, path.name if source != store.path else SHARD, "open").install(monkeypatch)
        assert initial.with_weights(str(source), in_memory, ALONE).keys() == {"weight"} and server.failed == 1
    FileServer(errno.EIO, path.name, "open", times=math.inf).install(monkeypatch)
    with pytest.raises(UnreadableCheckpoint, match="Input/output error"):
        initial.with_weights(str(path), in_memory, ALONE)
    monkeypatch.setattr(read_retry, "PAUSES_S", (600.0,))
    for wrong in ("other.safetensors", "none/other.safetensors"):
        with pytest.raises(UserError, match="does not exist"):
            initial.with_weights(str(tmp_path / wrong), in_memory, ALONE)


def test_a_file_server_may_fail_while_initial_weights_are_looked_for(store, tmp_path, monkeypatch):
    monkeypatch.setattr(retry, "FILE_PAUSES_S", (0.0,))
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "part.safetensors").write_bytes(b"".join(encode({"weight": np.zeros(3)}, {"weight": "float64"}, {})))
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"weight": "part.safetensors"}}')
    for source in (folder, store.path):
        for _ in one_by_one(monkeypatch, str(source)):
            assert initial.with_weights(str(source), in_memory, ALONE).keys() == {"weight"}

"""The store by itself: no trainer, no MPI."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from hpctrain.checkpoint.format.layout import DamagedCheckpoint
from hpctrain.checkpoint.policy import Retention
from hpctrain.checkpoint.saver import Saver, array_tensors, spare_bytes
from hpctrain.checkpoint.store import CheckpointStore, open_saver
from hpctrain.checkpoint.verify import verify_checkpoint
from hpctrain.comm.group import Group
from hpctrain.errors import Replaced, RunFailed, UserError
from hpctrain.train.state import ArrayTensor, Cut, Placement

DOCS = "".join(
    (Path(__file__).parents[3] / "docs" / page).read_text(encoding="utf-8")
    for page in ("checkpoints.md", "checkpoint-format.md")
)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[CheckpointStore]:
    store = CheckpointStore(tmp_path / "checkpoints")
    yield store
    store.close()


def arrays(seed: float = 0) -> dict[str, np.ndarray]:
    return {"model/weight": np.full((40, 30), seed, np.float32), "model/bias": np.arange(5.0), "count": np.int64(7)}


def test_save_and_load(store):
    path = store.save(arrays(3), meta={"epoch": 2}, step=100, rank_arrays={"rng/state": np.arange(4, dtype=np.uint8)})
    assert path == store.path / "step-000000100"
    assert sorted(os.listdir(path)) == ["manifest.json", "shard-00000-of-00001.h5"]
    loaded = store.load()
    assert (loaded.step, loaded.meta, loaded.ranks, loaded.rejected) == (100, {"epoch": 2}, 1, ())
    assert set(loaded.arrays) == {*arrays(), "rng/state"}
    for name, array in arrays(3).items():
        np.testing.assert_array_equal(loaded.arrays[name], array)
        assert loaded.arrays[name].dtype == array.dtype


def test_a_rank_may_hold_several_parts_of_a_tensor(store):
    """Queries, keys and values in one matrix are cut each by itself: rows 0 and 1, 4 and 5, and so on."""
    whole = np.arange(24.0).reshape(12, 2)
    parts = [
        ArrayTensor("model/qkv", whole[begin : begin + 2], Placement.CUT, cut=Cut(whole.shape, (begin, 0)))
        for begin in range(0, 12, 2)
    ]
    saver = open_saver(store)
    saver.begin([*parts[::2], *parts[1::2], *array_tensors(arrays(), {})], 3, {})
    saver.finish().path_or_raise()
    saver.close()
    np.testing.assert_array_equal(store.load(3).arrays["model/qkv"], whole)
    assert verify_checkpoint(store, 3).problems == ()
    (example,) = [each for each in re.findall(r"```python\n(.*?)```", DOCS, re.S) if "import h5py" in each]
    example = example.replace("checkpoints/step-000000100", str(store.path / "step-000000003"))
    found: dict[str, dict[str, np.ndarray]] = {}
    exec(example.partition("assert")[0], found)  # noqa: S102  a program of ours, from the docs
    np.testing.assert_array_equal(found["arrays"]["model/qkv"], whole)


def test_steps_count_up_by_themselves(store):
    for _ in range(3):
        store.save(arrays())
    assert store.steps() == [0, 1, 2]
    assert store.load(1).step == 1


def test_nothing_there(store):
    assert store.steps() == []
    with pytest.raises(UserError, match="no checkpoint"):
        store.load()
    store.save(arrays(), step=5)
    with pytest.raises(UserError, match="step 4"):
        store.load(4)


def test_big_endian_strided_and_scalar_arrays(store):
    store.save({"big": np.arange(4, dtype=">i4"), "strided": np.arange(12.0).reshape(3, 4).T, "scalar": 2.5})
    loaded = store.load().arrays
    assert loaded["big"].tolist() == [0, 1, 2, 3]
    np.testing.assert_array_equal(loaded["strided"], np.arange(12.0).reshape(3, 4).T)
    assert loaded["scalar"] == 2.5


def test_a_damaged_checkpoint_is_passed_over_with_a_reason(store):
    store.save(arrays(1), step=1)
    path = store.save(arrays(2), step=2) / "shard-00000-of-00001.h5"
    path.write_bytes(path.read_bytes()[:-1])
    loaded = store.load()
    assert loaded.step == 1
    assert [one.step for one in loaded.rejected] == [2] and "bytes in place of" in loaded.rejected[0].reason
    with pytest.raises(DamagedCheckpoint, match="no intact checkpoint"):
        store.load(2)


def test_retention_removes_after_the_commit(tmp_path):
    store = CheckpointStore(tmp_path, keep=Retention(last=2, every_steps=3))
    for step in range(8):
        store.save(arrays(), step=step)
    assert store.steps() == [0, 3, 6, 7]
    assert sorted(os.listdir(tmp_path)) == [f"step-{step:09d}" for step in (0, 3, 6, 7)]
    store.close()


def test_saving_a_step_again_replaces_it(store):
    store.save(arrays(1), step=1)
    store.save(arrays(2), step=1)
    assert store.load().arrays["model/weight"][0, 0] == 2
    assert os.listdir(store.path) == ["step-000000001"]


def test_sweep_clears_leftovers_and_nothing_else(store, tmp_path):
    store.save(arrays(), step=1)
    store.save(arrays(), step=2)
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("x")
    (store.path / ".partial-link").symlink_to(outside)
    for name in (".partial-step-000000003-ab-1", ".trash-step-000000000-cd", "notes"):
        (store.path / name).mkdir()
        (store.path / name / "shard-00000-of-00001.h5").write_bytes(b"x")
    os.rename(store.folder(2), store.path / ".replaced-step-000000002-ab")
    store.sweep()
    assert sorted(os.listdir(store.path)) == [".partial-link", "notes", "step-000000001", "step-000000002"]
    assert (outside / "precious").exists()
    assert store.load().step == 2


def test_sweep_prefers_the_newer_of_two(store):
    old = store.save(arrays(1), step=1)
    os.rename(old, store.path / ".replaced-step-000000001-ab")
    store.save(arrays(2), step=1)
    store.sweep()
    assert store.load().arrays["model/weight"][0, 0] == 2
    assert os.listdir(store.path) == ["step-000000001"]


def test_a_fenced_process_neither_commits_nor_removes(tmp_path):
    fenced = False

    def fence():
        if fenced:
            raise Replaced("attempt 1 has been replaced by attempt 2")

    store = CheckpointStore(tmp_path, keep=Retention(last=1), fence=fence)
    store.save(arrays(), step=1)
    fenced = True
    with pytest.raises(Replaced, match="replaced by attempt 2"):
        store.save(arrays(), step=2)
    with pytest.raises(Replaced, match="replaced by attempt 2"):
        store.remove(1)
    assert os.listdir(tmp_path) == ["step-000000001"]
    store.close()


def test_a_swept_writer_cannot_commit(tmp_path):
    """An older attempt's process passed the fence, slept, and wakes after the newer attempt has swept."""
    newer = CheckpointStore(tmp_path)

    def sleep_here():
        newer.sweep()

    older = CheckpointStore(tmp_path, fence=sleep_here)
    with pytest.raises(RunFailed):
        older.save(arrays(), step=1)
    assert newer.steps() == [] and os.listdir(tmp_path) == []
    older.close()


def test_a_swept_writer_takes_no_checkpoint_of_the_newer_attempt_away(tmp_path):
    newer, slept = CheckpointStore(tmp_path), []

    def sleep_here():
        if not slept:
            slept.append(newer.sweep())
            newer.save(arrays(2), step=1)

    older = CheckpointStore(tmp_path, fence=sleep_here)
    with pytest.raises(RunFailed):
        older.save(arrays(1), step=1)
    assert newer.load().arrays["model/weight"][0, 0] == 2 and os.listdir(tmp_path) == ["step-000000001"]
    for store in (older, newer):
        store.close()


def test_a_writer_that_was_swept_before_its_commit_learns_why(tmp_path):
    def fence():
        raise Replaced("attempt 1 has been replaced by attempt 2")

    saver = open_saver(CheckpointStore(tmp_path, fence=fence))
    saver.begin(array_tensors(arrays(), {}), 1, {})
    saver.rest()
    assert CheckpointStore(tmp_path).sweep()
    with pytest.raises(Replaced, match=r"step 1 was not written: rank 0: attempt 1 has been replaced by attempt 2"):
        saver.finish().path_or_raise()
    saver.close()


def test_a_replaced_process_does_not_sweep(store):
    def fence():
        raise Replaced("attempt 1 has been replaced by attempt 2")

    partial = store.path / ".partial-step-000000003-ab-1"
    partial.mkdir(parents=True)
    with pytest.raises(Replaced):
        CheckpointStore(store.path, fence=fence).sweep()
    assert partial.exists()


def test_too_little_space_is_said_before_writing(store, monkeypatch):
    store.save(arrays(), step=1)
    from hpctrain.checkpoint import saver

    monkeypatch.setattr(saver, "LEAST_SPARE_BYTES", 1 << 60)
    with pytest.raises(RunFailed, match="MB are needed"):
        store.save(arrays(), step=2)
    assert os.listdir(store.path) == ["step-000000001"]


def test_a_small_checkpoint_needs_little_space():
    assert spare_bytes(230_000) < 230_000 and spare_bytes(10**12) < 17 << 20


def test_a_failed_save_leaves_the_store_usable(store):
    store.save(arrays(), step=1)
    blocker = store.partial(2, f"{store.saver.token}-{store.saver.count + 1}")
    blocker.write_text("a file where the folder should be")
    with pytest.raises(RunFailed, match="not written"):
        store.save(arrays(), step=2)
    blocker.unlink()
    store.save(arrays(), step=2)
    assert sorted(os.listdir(store.path)) == ["step-000000001", "step-000000002"]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("fits", [True, False])
def test_what_the_other_rank_has_written_already_is_not_asked_for_again(rank, fits, store, monkeypatch):
    share = 1 << 20  # bytes of each of two ranks; there is room for little more, and the other one was first
    room = 2 * share + spare_bytes(2 * share) + (1 << 16) - (0 if fits else 2 * share)
    group = Group("one of two")
    group.rank, group.size = rank, 2
    saver = Saver(CheckpointStore(store.path, group=group), [0, 1], "token")
    partial = store.partial(3, "token-1")
    store.prepare_folder(partial)
    (partial / f"shard-{1 - rank:05d}-of-00002.h5").write_bytes(bytes(share))
    free = os.statvfs(store.path)
    left = (room - share) // free.f_frsize
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=left, f_frsize=free.f_frsize))
    saver.begin(array_tensors({"model/weight": np.zeros((2, share // 4), np.float32)}, {}), 3, {})
    assert saver.job is not None
    error = saver.job.future.exception()
    saver.close()
    assert (error is None) is fits, error

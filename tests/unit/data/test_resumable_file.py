"""A pack that is killed at any moment: nothing, or the whole file; what was written is not written again."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from hpctrain.data.dataset import Field, Samples
from hpctrain.data.packing import resumable_file, write
from hpctrain.data.packing.pack_source import PackSource, Piece
from hpctrain.data.packing.resumable_file import alone
from hpctrain.data.packing.write import write_hdf5
from hpctrain.errors import UserError
from tests.support.thread_groups import ThreadGroup, in_threads

ROOT = Path(__file__).parents[3]
X = np.random.default_rng(0).normal(size=(60, 5))
KILLED = """
import os, random, signal, sys
from pathlib import Path
from tests.unit.data.test_resumable_file import resumable_file, source, write_hdf5

resumable_file.MARK_S = 0.0
path = Path("a.h5")
moments = 0

def child(last):
    \"\"\"Packs, and is killed at a moment: before it opens, writes, renames or removes a file.\"\"\"
    global moments
    def note(event, arguments):
        global moments
        if event.split(".")[0] in ("open", "os", "fcntl"):
            moments += 1
            if moments == last:
                os.kill(os.getpid(), signal.SIGKILL)
    if os.fork() == 0:
        sys.addaudithook(note)
        write_hdf5(path, source(lambda index: note("os", None)), overwrite=True)
        Path("moments").write_text(str(moments))
        os._exit(0)
    return os.wait()[1]

assert child(None) == 0
whole = path.read_bytes()
random.seed(0)
most = int(Path("moments").read_text())
killed = 0
for last in random.sample(range(1, most + 1), 40):
    if path.exists() and random.random() < 0.5:
        path.unlink()
    before = path.exists()
    killed += child(last) == signal.SIGKILL
    assert path.read_bytes() == whole if before or path.exists() else True, last
path.unlink(missing_ok=True)
assert killed > 20 and child(None) == 0 and path.read_bytes() == whole
assert {each.name for each in Path().iterdir()} == {"a.h5", "moments"}
"""


def source(on_read=lambda index: None, key: str = "") -> PackSource:
    """Of six pieces."""

    def blocks(index: int) -> Iterator[Samples]:
        for begin in range(10 * index, 10 * index + 10, 5):
            on_read(index)
            yield {"x": X[begin : begin + 5]}

    pieces = [Piece(f"{index} {key}", 10, lambda index=index: blocks(index)) for index in range(6)]
    return PackSource({"x": Field((5,), X.dtype)}, 60, lambda: iter(()), {"sources": []}, pieces)


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def interrupted(at: int, key: str = "") -> list[int]:
    """The pieces that were read by a pack that is stopped when it reads one."""
    read = []

    def note(index: int) -> None:
        read.append(index)
        if index == at:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_hdf5("a.h5", source(note, key))
    return sorted(set(read))


def rest(key: str = "") -> list[int]:
    """The pieces that the next call reads; its file is right."""
    read: list[int] = []
    write_hdf5("a.h5", source(read.append, key))
    write_hdf5("b.h5", source())
    assert Path("a.h5").read_bytes() == Path("b.h5").read_bytes()
    assert {each.name for each in Path().iterdir()} == {"a.h5", "b.h5"}
    return sorted(set(read))


@pytest.mark.slow
def test_killed_at_random_moments() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", KILLED], env=environment, timeout=120, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_next_pack_continues(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resumable_file, "MARK_S", 0.0)
    assert interrupted(at=3) == [0, 1, 2, 3] and not Path("a.h5").exists()
    assert interrupted(at=4) == [3, 4]
    assert rest() == [4, 5]


def test_a_changed_source_is_packed_from_its_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resumable_file, "MARK_S", 0.0)
    interrupted(at=3)
    assert rest("another ETag") == [0, 1, 2, 3, 4, 5]


def test_a_file_that_was_cut_is_packed_from_its_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resumable_file, "MARK_S", 0.0)
    interrupted(at=3)
    os.truncate(".a.h5.packing/file", 100)
    assert rest() == [0, 1, 2, 3, 4, 5]


def test_a_torn_mark_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resumable_file, "MARK_S", 0.0)
    interrupted(at=3)
    (marks,) = Path(".a.h5.packing").glob("marks-*")
    marks.write_text("0\n1\n5")
    assert rest() == [2, 3, 4, 5]


def test_a_short_pack_that_fails_leaves_nothing() -> None:
    interrupted(at=3)
    assert list(Path().iterdir()) == []


def test_two_at_once_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resumable_file, "MARK_S", 0.0)
    interrupted(at=3)
    with alone(Path(".a.h5.packing"), Path("a.h5")), pytest.raises(UserError, match=r"another process packs a\.h5"):
        write_hdf5("a.h5", source())
    assert rest() == [3, 4, 5]


def test_a_piece_that_gives_more_harms_no_other() -> None:
    piece = Piece("", 10, lambda: iter([{"x": X[:11]}]))
    with pytest.raises(UserError, match="gave 11 samples in place of 10"):
        write_hdf5("a.h5", PackSource({"x": Field((5,), X.dtype)}, 20, lambda: iter(()), {}, [piece, piece]))


@pytest.mark.parametrize("options", [{}, {"compression": "gzip"}])
def test_a_rank_that_comes_late_does_not_take_the_new_file_for_an_old_one(options: dict[str, str]) -> None:
    one = PackSource(
        {"x": Field((5,), X.dtype)}, 60, lambda: iter([{"x": X}]), {}, [Piece("", 60, lambda: iter([{"x": X}]))]
    )

    def pack(ranks: ThreadGroup) -> None:
        if ranks.rank == 1:
            time.sleep(0.3)  # as long as rank 0 would take to make the file
        write_hdf5("a.h5", one, ranks=ranks, **options)

    in_threads(2, pack)
    assert Path("a.h5").exists()


def test_ranks_write_without_reading(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"abcdef")
    with write.for_pieces(path) as raw:
        raw.seek(2)
        raw.write(b"XY")
        assert not raw.readable()
    assert path.read_bytes() == b"abXYef"
    with pytest.raises(FileNotFoundError):
        write.for_pieces(tmp_path / "missing")

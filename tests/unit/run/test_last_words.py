"""Files of last words: whole, in place, and merged."""

from __future__ import annotations

import dataclasses
import errno
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.errors import Code, ExitCode
from hpctrain.run import last_words
from hpctrain.run.folder import RunDir
from hpctrain.run.last_words import (
    FILE_BYTES,
    MOST_WORD_BYTES,
    Ending,
    ErrorWord,
    LastWord,
    WordFile,
    collect,
    first_word,
    merge,
    padded,
    pieces,
    word_of,
)
from hpctrain.run.verdict import Action, RunVerdict
from hpctrain.system import safe_read
from tests.support.faults import FileServer

DONE = RunVerdict(Action.DONE, ExitCode.DONE, "done after step 4", code=Code.COMPLETED)


def opened(tmp_path) -> RunDir:
    run_dir = RunDir(tmp_path)
    run_dir.create()
    return run_dir


@pytest.mark.parametrize("call", ["mkdir", "open"])
def test_a_last_word_is_not_lost_with_one_answer_of_the_file_server(tmp_path, monkeypatch, call):
    run_dir = opened(tmp_path)
    word = first_word(3)
    file = WordFile.of(run_dir, 1, word)
    file.begin(word)
    FileServer(errno.ESTALE, "ranks/1", call).install(monkeypatch)
    last = dataclasses.replace(word, ending=Ending.COMPLETED, ended=1.0, exit_code=0, step=4)
    file.end(last)
    FileServer(errno.EIO, ".json", "open").install(monkeypatch)
    assert collect(run_dir, 1) == [last]


def test_words_that_stay_unreadable_hide_no_others(tmp_path, monkeypatch):
    """Files of one server of a parallel file system; and a file that is none of ours."""
    run_dir = opened(tmp_path)
    monkeypatch.setattr("hpctrain.system.retry.FILE_PAUSES_S", (0.0,))
    words = [dataclasses.replace(first_word(rank), pid=1000 + rank) for rank in range(3)]
    for word in words:
        WordFile.of(run_dir, 1, word).begin(word)
    (pieces(run_dir, 1) / "x-1.json").write_bytes(b" " * (MOST_WORD_BYTES + 1))
    server = FileServer(errno.EIO, "-1001-", "open", 1000).install(monkeypatch)
    assert collect(run_dir, 1) == [words[0], words[2]] and server.failed == 2


def test_the_last_word_overwrites_the_first_in_place(tmp_path):
    run_dir = opened(tmp_path)
    word = first_word(3)
    file = WordFile.of(run_dir, 1, word)
    file.begin(word)
    inode = file.path.stat().st_ino
    assert collect(run_dir, 1) == [word]
    last = dataclasses.replace(word, ending=Ending.STOPPED, ended=1.0, exit_code=75, step=4)
    file.end(last)
    assert collect(run_dir, 1) == [last]
    assert (file.path.stat().st_ino, file.path.stat().st_size) == (inode, FILE_BYTES)


@given(st.text(max_size=30000), st.text(max_size=30000), st.text(max_size=100))
def test_a_word_fits_its_room_whatever_the_error(traceback, what, fix):
    error = ErrorWord(what, fix, "ValueError", traceback, Code.DISK_FULL)
    content = padded(LastWord(0, "n1", 1, 1.0, 1.0, Ending.FAILED, error=error))
    read = word_of(json.loads(content))
    assert read.error is not None
    assert read.error.fix == fix and read.error.code is Code.DISK_FULL
    if len(what.encode()) + len(traceback.encode()) < 1000:
        assert len(content) == FILE_BYTES
        assert read.error == error


def test_fields_of_a_later_version_are_ignored():
    assert word_of({**first_word(1).to_json(), "mood": "good"}).rank == 1


def test_words_are_merged_by_rank_and_their_pieces_removed(tmp_path):
    run_dir = opened(tmp_path)
    for rank, pid in ((1, 10), (0, 11)):
        word = dataclasses.replace(first_word(rank), pid=pid)
        WordFile.of(run_dir, 2, word).begin(word)
    merge(run_dir, 2, collect(run_dir, 2), DONE)
    saved = last_words.read(run_dir, 2)
    assert saved is not None and saved.verdict == DONE
    assert [word.rank for word in saved.ranks] == [0, 1]
    assert [path.name for path in run_dir.ranks.iterdir()] == ["2.json"]


def test_a_damaged_piece_is_left_out(tmp_path):
    run_dir = opened(tmp_path)
    word = first_word(0)
    WordFile.of(run_dir, 1, word).begin(word)
    (run_dir.ranks / "1" / "n1-7.json").write_text("{")
    assert collect(run_dir, 1) == [word]


def test_words_without_codes_have_none_that_is_known(tmp_path):
    """As an earlier version wrote them."""
    error = ErrorWord("No space left on device", "free space", "RunFailed", "", Code.DISK_FULL)
    saved = LastWord(0, "n1", 1, 1.0, 1.0, Ending.FAILED, error=error).to_json()
    del saved["error"]["code"]
    read = word_of(saved)
    assert read.error is not None and read.error.code is Code.UNKNOWN and read.code is None


def test_words_of_thousands_of_ranks_that_all_failed_can_be_read_again(tmp_path, monkeypatch):
    run_dir, error = (
        opened(tmp_path),
        ErrorWord("no such file", "name it", "OSError", "in frame\n" * 1000, Code.EXCEPTION),
    )
    words = [dataclasses.replace(first_word(rank), ending=Ending.FAILED, error=error) for rank in range(64)]
    monkeypatch.setattr(last_words, "MERGED_BYTES", last_words.MERGED_BYTES // 128)  # as with 8192 ranks
    merge(run_dir, 1, words, DONE)
    assert run_dir.words(1).stat().st_size < safe_read.MOST_BYTES // 128
    saved = last_words.read(run_dir, 1)
    assert saved is not None and [word.rank for word in saved.ranks] == list(range(64))
    assert {(word.error.what, word.error.traceback[:8]) for word in saved.ranks if word.error} == {
        (error.what, "in frame")
    }


def test_containers_that_number_their_processes_alike_keep_a_word_each(tmp_path):
    run_dir = opened(tmp_path)
    words = [dataclasses.replace(first_word(rank), pid=7, machine=f"boot pid:[{rank}]") for rank in range(2)]
    for word in words:
        WordFile.of(run_dir, 1, word).begin(word)
    assert collect(run_dir, 1) == words

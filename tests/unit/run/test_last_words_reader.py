"""Looks at thousands of last words: each file is read when it is new or has changed, and by its beginning only."""

from __future__ import annotations

import dataclasses
import os
import time
from pathlib import Path

import pytest

from hpctrain.run import last_words
from hpctrain.run.last_words import FILE_BYTES, HEAD_BYTES, Ending, ErrorWord, LastWord, WordFile, WordReader, padded


def word(rank: int) -> LastWord:
    return LastWord(rank, "n1", 1000 + rank, 5.0, 6.0)


def written(folder: Path, ranks: int, age_s: float = 60) -> None:
    for rank in range(ranks):
        write(folder, word(rank), age_s)


def write(folder: Path, which: LastWord, age_s: float = 60) -> None:
    path = folder / f"{which.host}-{which.pid}.json"
    path.write_bytes(padded(which))
    os.utime(path, (time.time() - age_s,) * 2)


@pytest.mark.parametrize("ranks", [10, 100])
def test_a_second_look_reads_nothing_and_the_first_no_blanks(tmp_path, ranks):
    written(tmp_path, ranks)
    reader = WordReader(tmp_path)
    assert [found.rank for found in reader.look()] == list(range(ranks))
    assert reader.bytes_read == ranks * HEAD_BYTES
    assert [found.rank for found in reader.look()] == list(range(ranks))
    assert reader.bytes_read == ranks * HEAD_BYTES


def test_a_word_that_changes_in_place_is_read_again(tmp_path):
    written(tmp_path, 20)
    reader = WordReader(tmp_path)
    reader.look()
    ended = dataclasses.replace(word(7), ending=Ending.FAILED, error=ErrorWord("what", "fix", "Error", "line\n" * 900))
    write(tmp_path, ended, age_s=50)
    before = reader.bytes_read
    assert [found.ending for found in reader.look()] == [
        Ending.FAILED if rank == 7 else Ending.RUNNING for rank in range(20)
    ]
    assert reader.bytes_read - before == HEAD_BYTES + FILE_BYTES
    assert reader.look()[7].error == ended.error


def test_a_word_written_just_now_may_change_within_its_time_stamp(tmp_path):
    write(tmp_path, word(0), age_s=0)
    reader = WordReader(tmp_path)
    assert reader.look()[0].ending is Ending.RUNNING
    path = tmp_path / "n1-1000.json"
    stamp = path.stat().st_mtime_ns
    WordFile(path, tmp_path).end(dataclasses.replace(word(0), ending=Ending.COMPLETED))
    os.utime(path, ns=(stamp, stamp))
    assert reader.look()[0].ending is Ending.COMPLETED


def test_one_look_reads_a_bounded_amount_and_the_next_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(last_words, "READ_BYTES_A_LOOK", 4 * HEAD_BYTES)
    written(tmp_path, 10)
    reader = WordReader(tmp_path)
    assert [len(reader.look()) for _ in range(3)] == [4, 8, 10]


def test_a_file_that_is_torn_keeps_the_earlier_word_and_is_read_again(tmp_path):
    write(tmp_path, word(0))
    reader = WordReader(tmp_path)
    assert len(reader.look()) == 1
    path = tmp_path / "n1-1000.json"
    path.write_bytes(b'{"rank": 0, "hos')
    assert [found.rank for found in reader.look()] == [0]
    write(tmp_path, dataclasses.replace(word(0), ending=Ending.STOPPED), age_s=30)
    assert reader.look()[0].ending is Ending.STOPPED


def test_no_folder_has_no_words(tmp_path):
    assert WordReader(tmp_path / "none").look() == []

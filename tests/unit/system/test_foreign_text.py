"""What a terminal would obey never reaches it."""

import io
from unicodedata import category

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.system.foreign_text import MOST_CHARACTERS, line, plain, show, table

PIECES = ["\x1b", "[", "]", "0;t", "31m", "\x9b", "\x9d", "\x07", "\x1b\\", "P", "\r", "\n", "a", " ", "\u202e", "\x08"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("step 3\tloss 0.5\n", "step 3\tloss 0.5\n"),
        ("\x1b[1;31mred\x1b[0m", "red"),
        ("\x1b]0;owned\x07title", "title"),
        ("\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("\x1bP1$r0m\x1b\\dcs", "dcs"),
        ("\x9b2Jcleared", "cleared"),
        ("\x1b\x1b[31m[32mnested", "[32mnested"),
        ("torn \x1b]0;no end", "torn 0;no end"),
        ("hidden\rseen\r\nnext", "hidden\nseen\nnext"),
        ("no\u00a0break, \u202egnp.exe", "no break, gnp.exe"),
        ("\ud800 half", "\ud800 half"),
        ("naïve 日本語 ▁▂▃", "naïve 日本語 ▁▂▃"),
    ],
)
def test_sequences_go_whole_and_the_text_stays(text, expected):
    assert plain(text) == expected


@given(st.text() | st.lists(st.sampled_from(PIECES)).map("".join))
def test_nothing_but_line_ends_and_tabs_moves_the_cursor(text):
    shown = plain(text)
    assert all(character.isprintable() or character in "\n\t" or category(character) == "Cs" for character in shown)
    assert plain(shown) == shown
    assert line(text).isprintable()


def test_a_line_is_one_and_ends():
    assert line("job done\n  last attempt: \x1b[32mfine\x1b[0m") == "job done last attempt: fine"
    assert len(line("x" * 10**6)) < MOST_CHARACTERS + 10


@pytest.mark.parametrize("hard", ["\x1b]" * 50_000, "\x9d" * 100_000, "\x1b[" + "0" * 100_000, "\x1b[0" * 50_000])
@pytest.mark.timeout(10)
def test_time_grows_with_the_text_only(hard):
    assert "\x1b" not in plain(hard)


def test_what_an_encoding_lacks_is_spelled_out():
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    show("é\x1b[2J", stream)
    stream.seek(0)
    assert stream.read() == "\\xe9\n"


def test_a_table_shows_every_character_of_a_name(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    table("Runs", ["run", "task_args.learning_rate", "state"], [["0" * 30, "0.1", "completed"]])
    shown = capsys.readouterr().out
    assert "…" not in shown and shown.count("0") == 31

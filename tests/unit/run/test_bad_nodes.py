"""The list of nodes that are left out, and which node gets on it."""

from __future__ import annotations

import dataclasses
import json
import os
import stat
import time

import pytest

from hpctrain.cli import dispatch
from hpctrain.errors import Code, ExitCode, RunFailed, UserError
from hpctrain.run import bad_nodes
from hpctrain.run.attempts import Attempt
from hpctrain.run.bad_nodes import BadNode, BadNodes, breaks_again
from hpctrain.run.folder import RunDir
from hpctrain.run.last_words import Ending, ErrorWord, LastWord
from hpctrain.run.verdict import Action, RunVerdict

NODE = BadNode("n2.cluster", 100.0, 1, "slow", "/runs/a")


def test_entries_expire_and_the_last_word_on_a_node_counts(tmp_path):
    nodes = BadNodes(tmp_path, tmp_path)
    nodes.add(NODE)
    nodes.add(dataclasses.replace(NODE, host="n3", until=50.0))
    assert [entry.node for entry in nodes.entries(49.0)] == ["n2", "n3"]
    assert nodes.entries(99.0) == [NODE]
    nodes.add(dataclasses.replace(NODE, host="n2", until=200.0))
    assert [entry.until for entry in nodes.entries(99.0)] == [200.0]
    assert nodes.entries(201.0) == []


@pytest.mark.parametrize(
    "line", ["{ damaged", '{"host": "n2"}', "[]", json.dumps({**dataclasses.asdict(NODE), "host": "--wrap=id"})]
)
def test_lines_of_others_are_no_entries(tmp_path, line):
    (tmp_path / bad_nodes.FILE).write_text(line)
    nodes = BadNodes(tmp_path, tmp_path)
    assert nodes.entries(0.0) == []
    nodes.add(NODE)
    assert nodes.entries(0.0) == [NODE]


def test_a_list_that_leads_elsewhere_is_not_written(tmp_path):
    (tmp_path / "thesis").write_text("mine")
    (tmp_path / bad_nodes.FILE).symlink_to("thesis")
    with pytest.raises(RunFailed, match="link"):
        BadNodes(tmp_path, tmp_path).add(NODE)
    assert (tmp_path / "thesis").read_text() == "mine"


def test_the_shared_list_is_the_users_own(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    bad_nodes.shared().add(NODE)
    assert bad_nodes.shared().entries(0.0) == [NODE]
    assert stat.S_IMODE(os.stat(tmp_path / "state" / "hpctrain").st_mode) == 0o700


def word(rank: int, host: str, what: str | None) -> LastWord:
    error = ErrorWord(what, "install it", "ModuleNotFoundError", "", Code.EXCEPTION) if what else None
    ending = Ending.FAILED if what else Ending.TAKEN_DOWN
    return LastWord(rank, host, 1, 1.0, 0.0, ending, 1.0, ExitCode.FAILURE, error=error)


BROKEN = RunVerdict(Action.REQUEUE, ExitCode.FAILURE, "no module named h5py", "", 2, "n2", Code.EXCEPTION)
ELSEWHERE = dataclasses.replace(BROKEN, host="n1")
ALONE = [word(0, "n1", None), word(1, "n1", "connection reset"), word(2, "n2", "no module named h5py")]
EVERYWHERE = [word(0, "n1", "no module named h5py"), word(2, "n2", "no module named h5py")]


@pytest.mark.parametrize(
    ("before", "words", "nodes", "to_step", "expected"),
    [
        (BROKEN, ALONE, 2, 0, "n2"),
        (BROKEN, EVERYWHERE, 2, 0, None),
        (BROKEN, ALONE, 1, 0, None),
        (BROKEN, ALONE, 2, 8, None),
        (ELSEWHERE, ALONE, 2, 0, None),
        (dataclasses.replace(BROKEN, code=Code.NAN), ALONE, 2, 0, None),
        (None, ALONE, 2, 0, None),
        (dataclasses.replace(BROKEN, code=Code.STOPPED, exit_code=ExitCode.STOPPED), ALONE, 2, 0, None),
    ],
)
def test_which_node_is_to_blame(before, words, nodes, to_step, expected):
    attempts = [
        Attempt(1, from_step=0, to_step=0, nodes=nodes, verdict=before),
        Attempt(2, from_step=0, to_step=to_step, nodes=nodes, verdict=BROKEN),
    ]
    assert breaks_again(attempts, words) == expected
    assert breaks_again(attempts[1:], words) is None, "once may be chance"


def program(rank: int, host: str, exit_code: int) -> LastWord:
    """The word of a program that ended with this code, above 128 by a signal."""
    error = ErrorWord(f"python ended with exit code {exit_code}", "", "exit", "", Code.EXCEPTION)
    return LastWord(rank, host, 1, 1.0, 0.0, Ending.FAILED, 1.0, exit_code, error=error)


NEIGHBOUR = word(3, "n2", None)
SAME_WAY = word(3, "n2", "no module named h5py")


@pytest.mark.parametrize(
    ("before", "last", "words", "expected"),
    [
        (BROKEN, BROKEN, ALONE, "n2"),  # its only rank: the next start tells
        (BROKEN, BROKEN, [*ALONE, NEIGHBOUR], None),
        (BROKEN, BROKEN, [*ALONE, SAME_WAY], "n2"),
        (dataclasses.replace(BROKEN, rank=3), BROKEN, [*ALONE, NEIGHBOUR], "n2"),
        (dataclasses.replace(BROKEN, code=Code.NODE), dataclasses.replace(BROKEN, code=Code.NODE), [], "n2"),
        (BROKEN, BROKEN, [word(0, "n1", None), program(2, "n2", 3)], None),
        (BROKEN, BROKEN, [word(0, "n1", None), program(2, "n2", 137)], "n2"),
    ],
)
def test_a_node_is_suspected_only_if_it_explains_more_than_the_rank(before, last, words, expected):
    attempts = [Attempt(1, from_step=0, to_step=0, nodes=2, verdict=each) for each in (before, last)]
    assert breaks_again(attempts, words) == expected


@pytest.mark.parametrize(
    ("before", "last", "expected"),
    [
        (ELSEWHERE, BROKEN, "n1"),
        (BROKEN, BROKEN, None),
        (dataclasses.replace(ELSEWHERE, rank=0), BROKEN, None),
        (dataclasses.replace(ELSEWHERE, code=Code.NODE), dataclasses.replace(BROKEN, code=Code.NODE), None),
        (None, BROKEN, None),
    ],
)
def test_a_failure_that_follows_its_rank_acquits_the_node_before(before, last, expected):
    attempts = [Attempt(number, verdict=each) for number, each in enumerate([before, last], 1)]
    assert bad_nodes.acquitted(attempts) == expected and bad_nodes.acquitted(attempts[1:]) is None


def test_the_command_shows_and_clears(tmp_path, cli):
    run = RunDir(tmp_path / "run")
    run.create()
    (run.path / "run.yaml").write_text("name: r\nlaunch: {command: [sh]}\n")
    until = time.time() + 7200
    bad_nodes.of_run(run).add(dataclasses.replace(NODE, until=until), dataclasses.replace(NODE, host="n3", until=until))
    bad_nodes.of_run(run).add(dataclasses.replace(NODE, host="n4", until=bad_nodes.in_hours(float("inf"))))
    assert [entry["host"] for entry in json.loads(cli("nodes", run.path, "--json").out)] == ["n2.cluster", "n3", "n4"]
    shown = (cli("nodes", run.path, "--clear", "n2").out + cli("nodes", run.path).out).splitlines()
    assert shown[0].startswith("n2: cleared") and shown[1].startswith("n3: excluded for 2.0 h more: slow")
    assert shown[2].startswith("n4: excluded until it is cleared: slow")
    cli("nodes", run.path, "--clear", "n2", code=ExitCode.USER_ERROR)
    cli("nodes", run.path, "--clear", "all")
    assert bad_nodes.of_run(run).entries(time.time()) == []


def test_a_node_that_is_not_on_the_list_cannot_be_cleared(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with pytest.raises(UserError, match="n9 is not excluded"):
        dispatch(["nodes", "--clear", "n9"])

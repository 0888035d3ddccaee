"""Run folders that somebody else has prepared: looked at by a user who is not root, in little memory and time."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from hpctrain.cli import main
from tests.support.hostile import event, look, sound_run, write_events
from tests.support.mpi import PATIENCE_S

pytestmark = pytest.mark.slow

VIEWS = (
    ("explain",),
    ("compare",),
    ("status",),
    ("watch", "--once"),
    ("report", "--json"),
    ("logs", "--first-error"),
)
"""Commands that look at a run folder."""

EVIL = "\x1b]0;title\x07\x1b[2J\x9b31m\x1b]52;c;Y3VybA==\x1b\\seen\x08\x7f\u202e\r"
"""Renames the window, clears it, fills the clipboard, hides what stands before."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run folder, sound so far."""
    return sound_run(tmp_path / "run")


def assert_plain(text: str) -> None:
    bad = {character for character in text if not character.isprintable() and character not in "\n\t"}
    assert not bad, text


def evil_run(folder: Path) -> None:
    """Puts control sequences wherever a run folder has text."""
    config = {"name": f"wave{EVIL}", "task": f"x{EVIL}:t", "task_args": {f"k{EVIL}": f"v{EVIL}"}}
    (folder / "run.yaml").write_text(json.dumps(config))  # JSON escapes them, YAML reads them
    verdict = {"action": "fail", "exit_code": 70, "reason": f"broken {EVIL}", "fix": f"mend {EVIL}", "rank": 0}
    entry = {"attempt": 1, "started": 100.0, "ended": 160.0, "ranks": 2, "verdict": verdict, "git_commit": f"c{EVIL}"}
    (folder / "run.json").write_text(json.dumps({"id": f"i{EVIL}", "fence": 1, "attempts": [entry]}))
    (folder / "events.jsonl").unlink()
    named = {"framework": f"torch{EVIL}", "reducer": f"mpi{EVIL}", "hosts": [f"n{EVIL}"], "versions": {f"v{EVIL}": "1"}}
    write_events(
        folder,
        event("run_started", 0, ranks=2, **named),
        event("eval", 5, metrics={f"m{EVIL}": 1.0}),
        event("stop_requested", 6, by=f"by {EVIL}"),
        event("checkpoint_failed", 7, path="", error=f"error {EVIL}"),
        event("straggler", 8, state="confirmed", kind="rank", rank=1, cost=0.5, sentence=f"slow {EVIL}"),
    )
    (folder / "STOP").write_text(f"me {EVIL}\n")
    (folder / "logs" / "local-1-0.out").write_text(f"{EVIL}\nRuntimeError: {EVIL}\n")
    live = {"attempt": 1, "ranks": [], "verdicts": [f"live {EVIL}"]}
    (folder / "monitor" / "live.json").write_text(json.dumps(live))


@pytest.mark.parametrize("view", [*VIEWS, ("logs",)])
def test_text_of_others_does_not_command_the_terminal(folder, view):
    evil_run(folder)
    said = look(*view, folder)
    assert said.returncode == 0, said.output
    assert_plain(said.output)
    assert said.stdout.strip()


def test_an_error_that_quotes_a_file_is_plain(tmp_path):
    (tmp_path / "run.yaml").write_text(json.dumps({f"key{EVIL}": 1}))
    said = look("status", tmp_path / "run.yaml")
    assert said.returncode == 64 and "unknown key" in said.stderr
    assert_plain(said.output)


FILES = (
    *("run.yaml", "run.json", "events.jsonl", "monitor/events.jsonl", "monitor/live.json", "monitor/heat.npz"),
    *("STOP", "run.lock", "jobs.jsonl", "mlflow.json", "ranks/1.json", "ranks/1/n1-1.json", "logs/local-1-1.out"),
    "checkpoints/step-000000010/manifest.json",
)
"""What is read of a run folder."""


@pytest.mark.parametrize("view", [*VIEWS, ("logs",), ("stop",)])
def test_pipes_in_the_place_of_files_keep_nobody_waiting(folder, view):
    for name in FILES:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        os.mkfifo(path)
    said = look(*view, folder, timeout=PATIENCE_S)
    assert said.returncode in (0, 64), said.output
    assert "Traceback" not in said.output


def test_a_pipe_in_the_place_of_a_run_file_is_named(tmp_path):
    os.mkfifo(tmp_path / "run.yaml")
    said = look("status", tmp_path / "run.yaml", timeout=PATIENCE_S)
    assert said.returncode == 64 and "it is a pipe, not a plain file" in said.stderr


BOMB = "a0: &a0 [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 10)
)
TASK_ARGS = "name: wave\ntask_args:\n" + "".join(f"  {line}\n" for line in BOMB.splitlines())
LONG_TEXTS = f"name: wave\ntask_args:\n  a: &a '{'x' * 100_000}'\n  b: [{','.join(['*a'] * 100_000)}]\n"
DEEP = f"name: wave\ntask_args: {'[' * 2000}\n"


@pytest.mark.parametrize("text", [TASK_ARGS, LONG_TEXTS, DEEP], ids=["aliases", "long texts", "nested"])
@pytest.mark.parametrize("view", [("compare",), ("report", "--json")])
def test_run_files_that_stand_for_gigabytes_are_not_read(folder, view, text):
    (folder / "run.yaml").write_text(text)
    other = sound_run(folder.parent / "other")
    said = look(*view, folder, other) if view == ("compare",) else look(*view, folder)
    assert said.returncode == 0, said.output
    assert len(said.output) < 100_000


def test_a_run_file_of_aliases_is_refused_with_its_line(tmp_path):
    (tmp_path / "run.yaml").write_text(TASK_ARGS)
    refused = look("render", tmp_path / "run.yaml")
    assert refused.returncode == 64 and "run.yaml:8 is not YAML: its aliases multiply to too much" in refused.stderr


def test_files_that_are_too_large_are_not_read(folder):
    for name in ("run.yaml", "run.json", "run.lock", "ranks/1.json", "monitor/live.json", "jobs.jsonl", "STOP"):
        with open(folder / name, "wb") as file:
            file.truncate(1 << 40)
    for view in VIEWS:
        said = look(*view, folder)
        assert "Traceback" not in said.output and said.returncode in (0, 64), (view, said.output)


def test_a_line_without_end_costs_neither_memory_nor_the_other_events(folder):
    before = (folder / "events.jsonl").read_bytes()
    with open(folder / "events.jsonl", "r+b") as file:
        file.seek(1 << 28)
        file.write(b"\n" + before)
    for view in (("report", "--json"), ("status", "--json"), ("watch", "--json")):
        said = look(*view, folder)
        assert said.returncode == 0, said.output
        assert '"attempt": 1' in said.stdout or '"steps": 20' in said.stdout


WRONG: tuple[dict[str, Any], ...] = (
    event("train", "ten", loss=1.0),
    event("train", 12, loss="low"),
    event("train", 13, seconds=[1]),
    event("train", 14, steps={}),
    event("train", 15, loss=10**400),
    event("train", 16, extra=10**400),
    event("eval", 17, metrics=[1, 2]),
    event("run_started", 0, hosts=5),
    event("run_finished", 20, reason=["x"]),
    event("resumed", 3, rejected=[7]),
    event("straggler", 8, state="confirmed", kind="rank", ranks=7, cost="much"),
    event("hang", 9, ranks=[1]),
    event("checkpoint_saved", 9, bytes="many"),
    {"time": "noon", "event": "train", "step": 1, "attempt": 1},
    {"time": 1e300, "event": "train", "step": 1, "attempt": 1},
    {"time": 100.0, "event": ["train"], "step": 1, "attempt": 1},
    {"time": 100.0, "event": "train", "step": 1, "attempt": None},
)


@pytest.mark.parametrize("view", VIEWS)
def test_events_of_wrong_types_are_left_out_and_told_once(folder, view, cli):
    write_events(folder, *WRONG)
    said = cli(*view, folder)
    if view[0] in ("explain", "compare", "report", "status", "watch"):
        told = " ".join((said.out + said.err).split())
        assert told.count("events are left out, for step of train is not of the type") == 1, said


ODD = [1, "x", None, [], {}, [[]], {"attempts": 5}, {"attempts": [7]}, {"ranks": [7], "verdict": 5}, {"pid": "x"}]
WRONG_INFO = {
    "fence": 1,
    "attempts": [
        {
            **{"attempt": 1, "started": "noon", "ended": [], "verdict": [1], "hosts": 5, "ranks": "two", "job": 5},
            **{"from_step": "x", "to_step": {}, "nodes": [], "git_commit": 7},
        }
    ],
}


@pytest.mark.parametrize("view", VIEWS)
def test_documents_of_wrong_types_end_nothing(folder, view, monkeypatch):
    monkeypatch.setenv("PATH", "")  # Slurm's commands
    for value in [*ODD, WRONG_INFO]:
        for name in ("run.json", "ranks/1.json", "monitor/live.json", "run.lock", "mlflow.json", "run.yaml"):
            (folder / name).write_text(json.dumps(value))
        (folder / "jobs.jsonl").write_text(json.dumps(value) + '\n{"job": "--user=me", "time": 0, "cwd": "/"}\n')
        assert main([*view, str(folder)]) in (0, 64), value

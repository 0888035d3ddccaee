"""Plain hosts: the shell that mpirun calls, the words that it gets, and what is left after a host was lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from hpctrain.config.sections import Config, LaunchConfig, TrainConfig
from hpctrain.errors import Code, UserError
from hpctrain.launch.engines.hosts import Hosts, require_separate_machines, write_shell
from hpctrain.launch.mpi_library import Flavour, MpiRun
from hpctrain.run.attempts import Attempt, Attempts
from hpctrain.run.events import CUT_OFF
from hpctrain.run.folder import RunDir
from hpctrain.run.last_words import WordFile, first_word
from hpctrain.run.verdict import failed_with

KILLED = failed_with(Code.KILLED, "rank 3 on b was killed by SIGKILL", "", 3, "b.site")


def hosts(folder: Path, flavour: Flavour = Flavour.OPEN_MPI_5, **launch: int) -> Hosts:
    """Two of three hosts, two ranks each."""
    of = LaunchConfig(nodes=2, ranks_per_node=2, hosts=("10.0.0.1", "10.0.0.2", "10.0.0.3"), **launch)
    run = RunDir(folder)
    run.create()
    Attempts(run).begin(Attempt(), None)
    for rank, host in enumerate(["a.site", "a.site", "b.site", "b.site"]):
        word = first_word(rank)
        word = type(word)(**{**vars(word), "host": host})
        WordFile.of(run, 1, word).begin(word)
    config = Config("r", "m:f", TrainConfig(steps=1, global_batch=8), launch=of)
    shell = write_shell(folder / "shell", f"test -e {folder}/up-{{host}} -o x = ")
    return Hosts(config, run, MpiRun("mpirun", flavour), shell, ("10.0.0.1", "10.0.0.2"))


@pytest.mark.parametrize("host", ["n1", "$(touch owned)", "a b'\""])
def test_the_shell_gets_host_and_command_as_one_word_each(tmp_path, host):
    shell = write_shell(tmp_path / "shell", "printf '%s|' on:{host} 'it''s {host}'")
    done = subprocess.run([shell, host, "PATH=x prted", "--a 'b'"], capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout == f"on:{host}|its {host}|PATH=x prted --a 'b'|"
    assert [path.name for path in tmp_path.iterdir()] == ["shell"]


@pytest.mark.parametrize("again", [False, True])
def test_the_command_reaches_what_runs_no_shell_and_what_runs_one_more(tmp_path, again):
    tool = tmp_path / "tool"
    tool.write_text('#!/bin/sh\nhost=$1\nshift\necho "on $host"\n' + ('exec sh -c "$*"\n' if again else 'exec "$@"\n'))
    tool.chmod(0o700)
    shell = write_shell(tmp_path / "shell", f"{tool} {{host}} {{command}}")
    line = """A='b  c' sh -c 'printf "%s|%s" "$A" "$0" "\\$HOME;"' 'd\\n'"""
    done = subprocess.run([shell, "n1", *line.split(" ", 1)], capture_output=True, text=True)
    assert done.stdout == "on n1\n" + subprocess.run(["sh", "-c", line], capture_output=True, text=True).stdout


@pytest.mark.parametrize(
    ("flavour", "agent"),
    [(Flavour.OPEN_MPI_5, ["--prtemca", "plm_ssh_agent"]), (Flavour.OPEN_MPI_4, ["--mca", "plm_rsh_agent"])],
)
def test_mpirun_is_told_hosts_shell_and_variables(tmp_path, flavour, agent):
    words = hosts(tmp_path, flavour).words({"A": "b"})
    assert words[:3] == ["mpirun", "-n", "4"] and "10.0.0.1:2,10.0.0.2:2" in words
    assert [*agent, f"/bin/sh {tmp_path}/shell"] == words[(at := words.index(agent[1]) - 1) : at + 3]
    assert " -x A " in " ".join(words)


def test_the_shell_may_be_where_nothing_is_executed(tmp_path):
    place = hosts(tmp_path)
    (tmp_path / "up-n1").touch()
    place.shell.chmod(0o600)
    assert place.answers("n1") and not place.answers("n2")


def test_a_lost_host_gives_way_to_the_spare_one(tmp_path):
    place = hosts(tmp_path, spare_nodes=1, node_wait_s=0)
    assert place.after(KILLED) is not None and place.used == ("10.0.0.1", "10.0.0.2"), "a rank's death is not a host's"
    after = place.after(failed_with(Code.NODE, "b.site was lost", "", host="b.site"))
    assert after is not None and (after.nodes, after.ranks) == (2, 4)
    assert place.used == ["10.0.0.1", "10.0.0.3"]
    assert place.after(failed_with(Code.NODE, "a node was lost", "", host=None)) is None


def test_without_a_spare_fewer_hosts_serve_if_the_run_file_allows_it(tmp_path):
    lost = [failed_with(Code.NODE, "a host was lost", "", host=f"10.0.0.{number}") for number in (3, 2)]
    place = hosts(tmp_path, min_nodes=1)
    place.used = ["10.0.0.2", "10.0.0.3"]
    assert place.after(lost[0]) is not None and place.used == ["10.0.0.1", "10.0.0.2"]
    after = place.after(lost[1])
    assert after is not None and (after.nodes, after.ranks, place.used) == (1, 2, ["10.0.0.1"])


def test_hosts_that_are_lost_at_once_are_both_left_out_unless_too_few_remain(tmp_path):
    place = hosts(tmp_path, min_nodes=1)
    place.used = ["10.0.0.1", "10.0.0.2", "10.0.0.3"]
    for ranks in ((4, 5), (2, 3)):
        about = [
            {"rank": rank, "host": "x", "steps": 7, "state": "silent", "doing": "", "stack": None} for rank in ranks
        ]
        line = {"event": "hang", "schema": 1, "time": 2.0, "step": 8, "attempt": 1, "kind": CUT_OFF, "ranks": about}
        with place.run_dir.monitor_events.open("a") as file:
            file.write(f"{json.dumps(line)}\n")
    after = place.after(failed_with(Code.NODE, "a host was lost", "", host="10.0.0.3"))
    assert after is not None and (after.ranks, place.used) == (2, ["10.0.0.1"])


def test_a_host_that_comes_back_is_waited_for_and_used_again(tmp_path):
    """It was ignored, and the run ended."""
    place = hosts(tmp_path, node_wait_s=60)
    place.used = ["10.0.0.2", "10.0.0.3"]
    lost = failed_with(Code.NODE, "a host was lost", "", host="10.0.0.3")
    assert place.after(lost) is not None and place.used == ["10.0.0.1", "10.0.0.2"]
    threading.Timer(0.5, (tmp_path / "up-10.0.0.3").touch).start()
    after = place.after(failed_with(Code.NODE, "a host was lost", "", host="10.0.0.2"))
    assert after is not None and (after.ranks, place.used, place.lost) == (4, ["10.0.0.1", "10.0.0.3"], {"10.0.0.2"})


@pytest.mark.parametrize("how", ["signal", "stop", "job"])
def test_nothing_waits_for_a_host_once_the_run_is_to_end(tmp_path, how, monkeypatch):
    place = hosts(tmp_path, node_wait_s=60)
    place.lost.add("10.0.0.3")
    if how == "signal":
        threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGTERM)).start()
    elif how == "stop":
        place.run_dir.stop_file.touch()
    else:
        monkeypatch.setenv("HPCTRAIN_JOB", "7")
    begin = time.monotonic()
    assert place.after(failed_with(Code.NODE, "a host was lost", "", host="10.0.0.2")) is None
    assert time.monotonic() - begin < 30, "half of node_wait_s"


@pytest.mark.parametrize("names", [("127.0.0.1", "localhost"), ("10.9.8.7", "127.0.0.1", "127.0.0.2")])
def test_one_machine_by_two_names_is_refused(names):
    with pytest.raises(UserError, match="both this machine"):
        require_separate_machines(names)
    require_separate_machines(("10.9.8.7", "10.9.8.6", "no-such-host.invalid"))


def test_hosts_are_looked_up_together_since_a_name_without_an_answer_takes_seconds(monkeypatch):
    asked = threading.Barrier(3)

    def slow(host: str, port: None) -> list[Any]:
        asked.wait(60)
        raise OSError("no answer")

    monkeypatch.setattr("socket.getaddrinfo", slow)
    require_separate_machines(("a", "b", "c"))


@pytest.mark.parametrize(
    "launch", [{"hosts": ("a", "a")}, {"hosts": ("a",), "spare_nodes": 1}, {"hosts": ("a",), "remote_shell": "ssh"}]
)
def test_hosts_that_cannot_be_are_refused(launch):
    with pytest.raises(UserError, match=r"launch\.(hosts|remote_shell)"):
        LaunchConfig(**launch)  # type: ignore[arg-type]

"""What programs of others are told, and how ranks that share nothing but a folder find each other."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from hpctrain.cli import before_program
from hpctrain.errors import RunFailed, UserError
from hpctrain.programs.folder_group import FolderGroup, MeetingStopped, folder_world, place_of
from hpctrain.programs.heartbeat import beat, heartbeat
from hpctrain.programs.plain_command import master_of, reserve_port, variables
from hpctrain.run.folder import RunDir
from hpctrain.system import safe_read

HOSTS = ["n1", "n1", "n2", "n2", "n2"]
ADDRESSES = [(host, 5000 + rank) for rank, host in enumerate(HOSTS)]


def test_torch_and_tensorflow_learn_their_place():
    found = variables("auto", place_of(3, HOSTS), ADDRESSES)
    config = json.loads(found.pop("TF_CONFIG"))
    assert config["cluster"]["worker"][3] == "n2:5003" and config["task"] == {"type": "worker", "index": 3}
    assert found == {
        "RANK": "3",
        "WORLD_SIZE": "5",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "3",
        "GROUP_RANK": "1",
        "MASTER_ADDR": "n1",
        "MASTER_PORT": "5000",
    }


@pytest.mark.parametrize(("convention", "has"), [("torch", "RANK"), ("tensorflow", "TF_CONFIG"), ("mpi", None)])
def test_a_convention_gives_its_own_variables(convention, has):
    found = variables(convention, place_of(0, HOSTS), ADDRESSES)
    assert (has in found) if has else not found
    assert len({"RANK", "TF_CONFIG"} & found.keys()) <= 1


def test_ranks_of_one_host_need_no_name_of_it():
    found = variables("auto", place_of(1, ["n1", "n1"]), ADDRESSES[:2])
    assert found["MASTER_ADDR"] == "127.0.0.1" and "127.0.0.1:5001" in found["TF_CONFIG"]


def test_the_first_rank_is_reached_on_the_fastest_network_of_all_hosts():
    ethernet, infiniband = ("10.0.0.{}", "10.0.0.0/24", 25_000, False), ("10.4.0.{}", "10.4.0.0/24", 0, True)

    def on(host, *networks):
        return f"n{host}", [[address.format(host), *rest] for address, *rest in networks]

    both = [on(host, ethernet, infiniband) for host in (1, 1, 2)]
    assert master_of(both) == "10.4.0.1"
    assert master_of([*both, on(3, ethernet)]) == "10.0.0.1", "n3 has no InfiniBand"
    assert master_of([on(1, ethernet), on(2, infiniband)]) is None
    assert master_of([on(1, ethernet), ("n2", on(1, ethernet)[1])]) is None, "nodes of one machine"
    assert master_of([on(1, ethernet)] * 2) == "127.0.0.1"
    assert variables("torch", place_of(2, HOSTS), ADDRESSES, "10.4.0.1")["MASTER_ADDR"] == "10.4.0.1"


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_a_program_can_listen_on_the_port_that_is_kept_for_it(family):
    with reserve_port() as holder, socket.socket(family, socket.SOCK_STREAM) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("", holder.getsockname()[1]))
        server.listen()
        with reserve_port() as other:
            assert other.getsockname()[1] != holder.getsockname()[1]


def met(run_dir: RunDir, rank: int, size: int) -> list[Any]:
    """What a rank learns."""
    group = FolderGroup("test", run_dir, 1, rank, size)
    group.barrier("begin")
    return [group.allgather({"rank": rank}, "say it"), group.broadcast(rank, "learn it", root=size - 1)]


@pytest.mark.parametrize("size", [1, 3])
def test_ranks_meet_in_a_folder(tmp_path, size):
    run_dir = RunDir(tmp_path / "run")
    run_dir.create()
    with ThreadPoolExecutor(size) as pool:
        found = list(pool.map(lambda rank: met(run_dir, rank, size), range(size)))
    assert found == [[[{"rank": rank} for rank in range(size)], size - 1]] * size
    world = folder_world("test", run_dir, 1, place_of(2, HOSTS))
    assert (world.rank, world.size, world.local_rank, world.local_size, world.node, world.nodes) == (2, 5, 0, 3, 1, 2)


def test_no_wait_is_without_an_end(tmp_path):
    run_dir = RunDir(tmp_path / "run")
    run_dir.create()
    with pytest.raises(RunFailed, match="rank 1 of 2 waited for the other ranks to come"):
        FolderGroup("test", run_dir, 1, 1, 2).allgather(None, "come", timeout_s=0.1)
    with pytest.raises(MeetingStopped):
        FolderGroup("other", run_dir, 1, 0, 2, lambda: True).allgather(None, "come")


def test_without_a_supervisor_a_heartbeat_does_nothing():
    beat.cache_clear()
    heartbeat()
    assert beat.cache_info().currsize == 1
    beat.cache_clear()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["run.yaml", "--seed", "1"], (["run.yaml", "--seed", "1"], [])),
        (["-n", "2", "--", "python", "a.py", "--", "b"], (["", "-n", "2"], ["python", "a.py", "--", "b"])),
        (["run.yaml", "--", "ls"], (["run.yaml"], ["ls"])),
        (["--", "ls"], ([""], ["ls"])),
    ],
)
def test_a_program_stands_behind_two_dashes(words, expected):
    assert before_program(words) == expected


def test_thousands_of_ranks_still_start_their_programs():
    addresses = [(f"node{rank // 8:04}", 30_000 + rank) for rank in range(8000)]
    place = place_of(5, [host for host, _ in addresses])
    found = variables("auto", place, addresses)
    assert found["RANK"] == "5" and "TF_CONFIG" not in found, "it names all ranks"
    subprocess.run(["true"], env=found, check=True)
    with pytest.raises(UserError, match="8000 ranks"):
        variables("tensorflow", place, addresses)


def test_only_one_rank_lists_the_folder(tmp_path, monkeypatch):
    """All ranks would list as many files as there are ranks, several times a second."""
    run_dir, listed, everyone = RunDir(tmp_path), [], os.listdir
    run_dir.create()
    monkeypatch.setattr(os, "listdir", lambda folder: listed.append(folder) or everyone(folder))
    with ThreadPoolExecutor(100) as pool:
        groups = [FolderGroup("test", run_dir, 1, rank, 100) for rank in range(1, 100)]
        waiting = [pool.submit(group.allgather, group.rank, timeout_s=20.0) for group in groups]
        while sum(1 for _ in groups[0].folder.glob("test-1-*")) < 99:
            time.sleep(0.01)
        assert not listed, "each of them waits for one file"
        assert FolderGroup("test", run_dir, 1, 0, 100).allgather(0) == list(range(100)) == waiting[7].result()
    assert len(listed) == 1


def test_a_file_is_seen_by_a_client_that_remembers_it_as_missing(tmp_path, monkeypatch):
    """As clients of NFS do for half a minute and more, unless they open the folder."""
    run_dir, missing, waits = RunDir(tmp_path), set[Path](), threading.get_ident()
    read, opened = safe_read.read_json, os.open

    def read_json(path):
        if threading.get_ident() != waits:  # on another client
            return read(path)
        if path in missing:
            raise FileNotFoundError(path)
        try:
            return read(path)
        except FileNotFoundError:
            missing.add(path)
            raise

    def open_(path, *given, **options):
        if path == first.folder and threading.get_ident() == waits:
            missing.clear()
        return opened(path, *given, **options)

    def come_late():
        while not missing:
            time.sleep(0.001)
        return FolderGroup("test", run_dir, 1, 1, 2).allgather(1, timeout_s=20.0)

    first = FolderGroup("test", run_dir, 1, 0, 2)
    monkeypatch.setattr(safe_read, "read_json", read_json)
    monkeypatch.setattr(os, "open", open_)
    with ThreadPoolExecutor(1) as pool:
        late = pool.submit(come_late)
        assert first.allgather(0, timeout_s=20.0) == [0, 1] == late.result()

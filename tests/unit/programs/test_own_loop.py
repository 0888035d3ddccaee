"""A program's own loop: what it is asked, what it reports, and that neither matters without a supervisor."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

import hpctrain
from hpctrain.callbacks.accelerate import SaveOnStop
from hpctrain.errors import UserError
from hpctrain.programs import own_loop
from hpctrain.programs.folder_group import place_of
from hpctrain.programs.own_loop import Supervised, delayed
from hpctrain.run.folder import RunDir
from hpctrain.run.run_view import RunView
from tests.support.faults import FileServer


@pytest.fixture
def link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Supervised]]:
    """``link(rank, size)`` is what the functions use."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    run = RunDir(tmp_path / "run")
    run.create()

    def make(rank: int = 0, size: int = 1) -> Supervised:
        made = Supervised(run, place_of(rank, ["n1"] * size))
        monkeypatch.setattr(own_loop, "supervised", lambda: made)
        return made

    yield make
    for number, handler in before.items():
        signal.signal(number, handler)


def events(link: Supervised) -> list[tuple[str, int]]:
    return [(event.name, event.step) for event in RunView(link.run_dir.path).events()]


def test_without_a_supervisor_nothing_happens(tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    own_loop.supervised.cache_clear()
    assert hpctrain.stop_requested() is hpctrain.stop_requested(agree=True) is False
    hpctrain.checkpoint_saved(3)
    assert own_loop.saved_step() is None and signal.getsignal(signal.SIGTERM) is before
    own_loop.supervised.cache_clear()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_stop_signal_only_sets_a_flag(link, number):
    link()
    assert not hpctrain.stop_requested()
    signal.raise_signal(number)
    assert hpctrain.stop_requested() and hpctrain.stop_requested()


def test_a_file_server_that_fails_does_not_end_the_program(link, monkeypatch):
    made = link()
    server = FileServer(errno.ESTALE, "STOP", "stat").install(monkeypatch)
    made.run_dir.stop_file.touch()
    assert not hpctrain.stop_requested() and server.failed == 1
    made.next_look = 0.0
    assert hpctrain.stop_requested(), "it is asked again"


def test_a_first_call_from_another_thread_leaves_the_handlers_to_the_main_one(link):
    made = link()
    with ThreadPoolExecutor(1) as threads:
        assert not threads.submit(hpctrain.stop_requested).result()
    assert not made.listens and not hpctrain.stop_requested()
    signal.raise_signal(signal.SIGTERM)
    assert hpctrain.stop_requested()


def test_a_save_with_accelerate_removes_the_one_before_and_a_resume_what_a_kill_cut_off(tmp_path):
    loaded: list[str] = []
    accelerator = SimpleNamespace(
        save_state=lambda folder: Path(folder).mkdir(),
        load_state=loaded.append,
        wait_for_everyone=lambda: None,
        is_main_process=True,
    )
    for name in ("step-3", "partial-3", "partial-4", "partial-9", "partial-results"):
        (tmp_path / name).mkdir()
    save = SaveOnStop(accelerator, str(tmp_path))
    assert save.resume() == 3 and loaded == [str(tmp_path / "step-3")]
    assert {path.name for path in tmp_path.iterdir()} == {"step-3", "partial-results"}, "which is the user's own"
    save.save(5)
    assert {path.name for path in tmp_path.iterdir()} == {"step-5", "partial-results"}


def test_a_stop_file_asks_too(link):
    link().run_dir.stop_file.touch()
    assert hpctrain.stop_requested()


def test_worker_processes_die_of_the_signals_as_before(link):
    link().listen()
    if (child := os.fork()) == 0:
        signal.raise_signal(signal.SIGTERM)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM


def test_steps_and_checkpoints_reach_the_run_folder(link, monkeypatch):
    monkeypatch.setattr(own_loop, "REPORT_S", 0.0)
    rank = link()
    for _ in range(3):
        hpctrain.stop_requested()
        own_loop.supervised().count("heartbeat")  # a heartbeat of the same step
    hpctrain.checkpoint_saved(3)
    hpctrain.stop_requested()
    hpctrain.stop_requested()
    assert events(rank) == [
        ("run_started", 0),
        ("train", 2),
        ("train", 3),
        ("checkpoint_saved", 3),
        ("train", 4),
        ("train", 5),
    ]
    found = RunView(rank.run_dir.path).snapshot()
    assert (found.checkpoint_step, found.progress.step, found.unsaved_steps) == (3, 5, 2)


def test_a_resumed_program_counts_from_the_step_that_was_saved(link):
    link()
    hpctrain.checkpoint_saved(3)
    rank = link()
    hpctrain.checkpoint_saved(3)  # it was loaded
    hpctrain.stop_requested()
    assert rank.step == 4 and own_loop.saved_step() == 3
    assert events(rank) == [("run_started", 3), ("checkpoint_saved", 3), ("run_started", 3)]


def test_ranks_above_0_report_nothing(link):
    rank = link(rank=1, size=2)
    hpctrain.checkpoint_saved(3)
    hpctrain.stop_requested()
    assert events(rank) == [] and own_loop.saved_step() is None


def test_ranks_that_nothing_connects_cannot_agree(link, monkeypatch):
    link(size=2)
    for name in ("torch.distributed", "mpi4py.MPI"):
        monkeypatch.setitem(sys.modules, name, None)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"neither torch\.distributed nor mpi4py connects the ranks"):
        hpctrain.stop_requested(agree=True)


def test_agreement_is_of_the_flags_of_one_call_before_and_final():
    started: list[bool] = []

    def start(mine):
        started.append(mine)
        return lambda: len(started) == 2 or mine  # another rank gives true in the second exchange

    agree = delayed(start)
    assert [agree(False), agree(False), agree(False), agree(False)] == [False, False, True, True]
    assert len(started) == 2, "after the first true nobody waits for anybody"


PROGRAM = """
import sys
import hpctrain
if sys.argv[1] == "torch":
    import torch.distributed as dist
    dist.init_process_group("gloo")
    rank = dist.get_rank()
else:
    from mpi4py import MPI
    rank = MPI.COMM_WORLD.rank
for step in range(1, 1000):
    if step == 3 + rank:  # the ranks are asked at different steps
        hpctrain.programs.own_loop.supervised().asked = True
    if hpctrain.stop_requested(agree=True):
        break
print("stopped at", step, file=open(f"stopped-{rank}", "w"))
"""


@pytest.mark.slow
@pytest.mark.parametrize("by", ["torch", "mpi"])
def test_ranks_stop_at_the_same_step(tmp_path, by):
    (tmp_path / "program.py").write_text(PROGRAM)
    words = [sys.executable, "-m", "hpctrain", "run", "-n", "2", "--", sys.executable, "program.py", by]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert [(tmp_path / f"stopped-{rank}").read_text() for rank in range(2)] == ["stopped at 4\n"] * 2


def test_a_mark_that_is_damaged_is_none(tmp_path):
    run = RunDir(tmp_path)
    run.create()
    run.saved_step.write_text(json.dumps({"step": 3}))
    assert run.newest_checkpoint_step() is None

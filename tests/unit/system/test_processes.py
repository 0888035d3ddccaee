"""Who is alive, who dies with whom, who was killed for memory; with real processes."""

import errno
import fcntl
import os
import select
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from hpctrain.launch.launcher_messages import Passing
from hpctrain.monitor.node import host
from hpctrain.system import processes
from tests.support.command import wait_for
from tests.support.mpi import PATIENCE_S

TETHERED = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", '''
from hpctrain.system.processes import die_with_parent
die_with_parent()
print("ready", flush=True)
import time; time.sleep(60)
'''], stdout=subprocess.PIPE, text=True)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(60)
"""

SWEPT = """
import subprocess, sys
from hpctrain.system.processes import adopt_orphans, end_descendants
adopt_orphans()
leaves = "import subprocess as s; print(s.Popen(['setsid', 'sleep', '60'], stdout=s.DEVNULL, stderr=s.DEVNULL).pid)"
middle = subprocess.run([sys.executable, "-c", leaves], capture_output=True, text=True)
print(middle.stdout.strip(), *end_descendants(0.1), flush=True)
"""
SPARED = """
import subprocess, sys
from hpctrain.system.processes import adopt_orphans, descendants, end_descendants
start = "import subprocess as s, time; print(s.Popen(['sleep', '60']).pid, flush=True); time.sleep(60)"
before = subprocess.Popen([sys.executable, "-c", start], stdout=subprocess.PIPE, text=True)
child = int(before.stdout.readline())
others = descendants()
ours = subprocess.Popen(["sleep", "60"])
print(end_descendants(0.1, others) == [ours.pid] and before.poll() is None and child in descendants(), flush=True)
print(end_descendants(0.1, [before.pid], before.pid) == [child] and before.poll() is None, flush=True)
end_descendants(0.1)
"""


def test_a_process_is_known_by_number_and_birth():
    me = os.getpid()
    assert processes.is_alive(me, processes.birth(me))
    assert not processes.is_alive(me, processes.birth(me) + 1)
    child = subprocess.Popen([sys.executable, "-c", ""])
    born = processes.birth(child.pid)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not processes.is_alive(child.pid, born), "a zombie does not live"
    child.wait()
    assert processes.birth(child.pid) == 0.0


def test_what_was_there_before_is_spared_with_or_without_its_children():
    done = subprocess.run([sys.executable, "-c", SPARED], capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.stdout == "True\nTrue\n", done.stderr


def test_a_tethered_process_dies_with_its_parent():
    parent = subprocess.Popen([sys.executable, "-c", TETHERED], stdout=subprocess.PIPE, text=True)
    child = psutil.Process(int(parent.stdout.readline()))
    parent.send_signal(signal.SIGKILL)
    parent.communicate()
    psutil.wait_procs([child], timeout=PATIENCE_S)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


def test_orphans_in_sessions_of_their_own_are_found_and_ended():
    done = subprocess.run([sys.executable, "-c", SWEPT], capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    orphan, *ended = map(int, done.stdout.split())
    assert ended == [orphan]
    assert not psutil.pid_exists(orphan)


@pytest.mark.parametrize(
    "report", ["=====================\n=   BAD TERMINATION", "---------------\nA daemon failed to report back after"]
)
def test_output_passes_through_but_for_the_launchers_own_report(report, tmp_path):
    read, write = os.pipe()
    target = os.open(tmp_path / "out", os.O_CREAT | os.O_WRONLY)
    with os.fdopen(read, "rb") as source:
        passing = Passing(source, target)
        passing.pump()
        os.write(write, b"model\n=====================\nstep 1\nstep 2\n")
        passing.pump()
        os.write(write, f"step 3\n\n{report}\n".encode())
        os.close(write)
        passing.pump()
    os.close(target)
    assert (tmp_path / "out").read_text() == "model\n=====================\nstep 1\nstep 2\nstep 3\n"
    assert report in passing.text


def test_the_session_folder_of_mpirun_is_private_and_goes_with_it(tmp_path):
    with processes.own_session({"TMPDIR": str(tmp_path), "A": "b"}) as environment:
        (folder,) = tmp_path.iterdir()
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert environment == {"TMPDIR": str(tmp_path), "A": "b", processes.SESSION_BASES[0]: str(folder)}
        (folder / "ompi.1" / "0").mkdir(parents=True)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", processes.SESSION_BASES)
def test_a_session_folder_that_the_user_names_is_used(tmp_path, name):
    """Open MPI refuses to be told two."""
    given = {"TMPDIR": str(tmp_path), name: "/scratch"}
    with processes.own_session(given) as environment:
        assert environment == given and not list(tmp_path.iterdir())


def test_a_name_that_the_kernel_cuts_in_mid_character_hides_no_process(tmp_path):
    program = tmp_path / ("ä" * 8)  # the kernel keeps 15 bytes
    program.symlink_to("/bin/sleep")
    with subprocess.Popen([str(program), "60"]) as child:
        wait_for("process of that name", lambda: b"\xc3)" in Path(f"/proc/{child.pid}/stat").read_bytes())
        try:
            assert processes.is_alive(child.pid, processes.birth(child.pid))
            assert child.pid in host.processor_seconds() and host.process_counters(child.pid)
        finally:
            child.kill()


def test_folders_of_killed_processes_go_and_those_of_others_stay(tmp_path):
    program = "from hpctrain.system import processes as p\nwith p.own_folder('.'): p.os.kill(p.os.getpid(), 9)"
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=False)
    [dead] = tmp_path.iterdir()
    (tmp_path / f"{processes.own_prefix()}link").symlink_to(tmp_path)
    with processes.own_folder(str(tmp_path)) as first, processes.own_folder(str(tmp_path)) as second:
        assert not dead.exists() and first != second
        assert Path(first).is_dir() and Path(second).stat().st_mode & 0o777 == 0o700
    assert [path.is_symlink() for path in tmp_path.iterdir()] == [True]
    with processes.own_folder(str(tmp_path / "missing")) as none:
        assert none == ""
    with pytest.raises(OSError, match="of the body"), processes.own_folder(str(tmp_path)):
        raise OSError("of the body")


def test_folders_on_a_file_system_that_hosts_share_stay(tmp_path, monkeypatch):
    """NFS has no locks of folders, and Lustre may have them on each host for itself (localflock)."""
    with processes.own_folder(str(tmp_path)) as first, monkeypatch.context() as nfs:
        nfs.setattr(fcntl, "flock", lambda *_: (_ for _ in ()).throw(OSError(errno.EBADF, "not open for writing")))
        with processes.own_folder(str(tmp_path)) as second:
            assert Path(first).is_dir() and Path(second).is_dir()
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(socket, "gethostname", lambda: "elsewhere")
        with processes.own_folder(str(tmp_path)) as first, monkeypatch.context() as lustre:
            lustre.setattr(fcntl, "flock", lambda *_: None)
            lustre.setattr(socket, "gethostname", lambda: "here")
            with processes.own_folder(str(tmp_path)):
                assert Path(first).is_dir()
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs pidfds")
@pytest.mark.parametrize(("words", "code"), [(["sleep", "600"], -signal.SIGKILL), (["sh", "-c", "exit 14"], 14)])
def test_how_a_process_ended_is_known_to_others_than_its_parent(monkeypatch, words, code):
    child = subprocess.Popen(words)
    life = os.pidfd_open(child.pid)
    if code < 0:
        assert processes.exit_code_of(child.pid, life) is None and not processes.is_ending(child.pid), "it lives"
        child.kill()
    select.select([life], [], [], PATIENCE_S)
    assert processes.exit_code_of(child.pid, life) == code
    assert processes.is_ending(child.pid)
    child.wait()
    assert not processes.is_ending(child.pid), "it has gone"
    assert processes.exit_code_of(child.pid, life) in (code, None), "only Linux from 6.15 on still knows"
    os.close(life)
    monkeypatch.setattr(processes, "_stat", lambda pid: [*"S00000", "0", *["0"] * 21, str(1 << 8)])
    assert processes.is_ending(child.pid), "SIGKILL is pending"


class Unkillable(subprocess.Popen[bytes]):
    """A process that a signal does not end, as one that waits for a file server."""

    def kill(self):
        pass


def test_what_cannot_be_killed_is_not_waited_for_without_end(monkeypatch):
    monkeypatch.setattr(processes, "KILLED_S", 0.1)
    with Unkillable(["sh", "-c", "trap '' TERM; echo; read line"], stdin=-1, stdout=-1) as process:
        assert process.stdin and process.stdout
        process.stdout.readline()
        processes.end_process(process, 0.1)
        assert process.poll() is None
        process.stdin.close()


@pytest.mark.parametrize(("at_s", "killed"), [(400, False), (1100, True)])
def test_the_kernel_killed_this_process_and_no_earlier_one_of_its_number(tmp_path, monkeypatch, at_s, killed):
    log = tmp_path / "kmsg"
    log.write_text(f"6,339,{at_s * 10**6},-;Out of memory: Killed process 7 (python) total-vm:1kB\n")
    monkeypatch.setattr(processes, "KERNEL_LOG", str(log))
    born = 1000 * os.sysconf("SC_CLK_TCK")
    assert processes.kernel_killed_for_memory(7, born) is killed
    assert not processes.kernel_killed_for_memory(8, born)

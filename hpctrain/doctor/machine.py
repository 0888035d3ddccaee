"""Checks the machine: cores, GPUs, shared memory, and the file system of the run folder."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import socket
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil

from hpctrain.doctor.check import Check, note, problem
from hpctrain.errors import HpctrainError
from hpctrain.system.cgroups import cpu_quota, usable_cores
from hpctrain.system.files import create_exclusively
from hpctrain.system.gpus import usable_gpus

LITTLE_DISK_BYTES = 2 * 2**30
LITTLE_SHM_BYTES = 256 * 2**20
SLOW_FILE_S = 0.05
"""Time to create, lock, rename and remove a small file above which a file system is reported as slow."""


def findings(folder: Path) -> list[Check]:
    """Findings about this machine, and about the file system of a folder that may not exist yet."""
    return [*cores(), *gpus(), *shared_memory(Path("/dev/shm")), *file_system(existing(folder))]


def cores() -> Iterator[Check]:
    """Reports usable cores and memory."""
    quota = cpu_quota()
    limit = f", limited to {quota:g} by the container" if quota is not None else ""
    memory = f"{psutil.virtual_memory().total / 2**30:.0f} GiB memory"
    yield Check("cores", f"{usable_cores()} of {os.cpu_count()} usable{limit}, {memory}, {socket.gethostname()}")


def gpus() -> Iterator[Check]:
    """Reports GPUs according to the driver, independent of the frameworks."""
    found = Counter(gpu.vendor for gpu in usable_gpus())
    program = shutil.which("nvidia-smi")
    if program is None:
        yield note("GPUs", ", ".join(f"{count} of {vendor}" for vendor, count in found.items()) or "none")
        return
    words = [program, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=30, check=False)
    except subprocess.TimeoutExpired:
        yield problem("GPUs", "nvidia-smi does not answer", "the driver hangs: use another node, tell the site")
        return
    if done.returncode:
        fix = "request a GPU in the job, or tell the site"
        yield problem("GPUs", f"nvidia-smi: {(done.stdout + done.stderr).strip()[:200]}", fix)
        return
    lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
    yield Check("GPUs", "; ".join(lines))


def shared_memory(path: Path) -> Iterator[Check]:
    """Checks the space for shared memory of MPI and the monitor: containers often have only 64 MB."""
    try:
        free = shutil.disk_usage(path).free
    except OSError:
        yield problem("shared memory", f"no {path}", "mount a tmpfs there (docker run --shm-size=2g)")
        return
    if free < LITTLE_SHM_BYTES:
        fix = "start the container with more (docker run --shm-size=2g), or remove old files there"
        yield problem("shared memory", f"{free / 2**20:.0f} MiB free in {path}", fix)
    else:
        yield Check("shared memory", f"{free / 2**30:.1f} GiB free in {path}")


def file_system(folder: Path) -> Iterator[Check]:
    """Checks space, permissions, locking and small-file speed where run folders are made."""
    usage = shutil.disk_usage(folder)
    kind = file_system_type(folder)
    value = f"{folder}: {usage.free / 2**30:.1f} GiB free, {kind}"
    if not os.access(folder, os.W_OK):
        yield problem("run folder", f"{folder} may not be written", "set run_dir to a folder that you may write")
        return
    if usage.free < LITTLE_DISK_BYTES:
        yield problem("run folder", value, "free space, or set run_dir to another file system: checkpoints need it")
    else:
        yield Check("run folder", value)
    yield from locking(folder)


def locking(folder: Path) -> Iterator[Check]:
    """Checks exclusive creation, which the run's lock needs, and flock, which HDF5 uses."""
    path = folder / f".hpctrain-doctor-{secrets.token_hex(8)}"
    begin = time.perf_counter()
    try:
        first = create_exclusively(path, b"x")
        second = create_exclusively(path, b"x")
        os.replace(path, path.with_suffix(".renamed"))
        flock = works_with_flock(path.with_suffix(".renamed"))
    except (OSError, HpctrainError) as error:
        yield problem("locking", f"{folder}: {error}", "set run_dir to a folder that you may write")
        return
    finally:
        for left in (path, path.with_suffix(".renamed")):
            with contextlib.suppress(OSError):
                left.unlink()
    spent = time.perf_counter() - begin
    if (first, second) != (True, False):
        fix = "set run_dir to another file system: two runs could use one folder here at the same time"
        yield problem("locking", "exclusive creation of files does not work", fix)
    elif not flock:
        fix = "none needed: run folders do not use it; your own HDF5 code may want HDF5_USE_FILE_LOCKING=FALSE"
        yield note("locking", f"exclusive creation works, flock does not ({spent * 1e3:.1f} ms)", fix)
    elif spent > SLOW_FILE_S:
        fix = "fine for a run folder; keep data sets of many small files elsewhere"
        yield note("locking", f"works; a small file takes {spent * 1e3:.0f} ms", fix)
    else:
        yield Check("locking", f"exclusive creation and flock work ({spent * 1e3:.1f} ms)")


def works_with_flock(path: Path) -> bool:
    """Whether an exclusive flock on a file can be taken."""
    with open(path, "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
    return True


def file_system_type(folder: Path) -> str:
    """File system of a folder (ext4, nfs4, lustre, ...), from the longest matching mount point."""
    best = ("", "unknown")
    with contextlib.suppress(OSError):
        for line in Path("/proc/mounts").read_text().splitlines():
            point, kind = line.split()[1:3]
            if folder.is_relative_to(point) and len(point) >= len(best[0]):
                best = (point, kind)
    return best[1]


def existing(folder: Path) -> Path:
    """The folder itself or its nearest existing parent."""
    while not folder.exists():
        folder = folder.parent
    return folder

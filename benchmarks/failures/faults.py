"""Faults that a rank brings upon itself, as user code does. None imports a framework before it is called."""

from __future__ import annotations

import ctypes
import errno
import json
import mmap
import os
import resource
import signal
import socket
import struct
import sys
import tempfile
import threading
import time
import urllib.request
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np

CUDA_FULL = (
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.15 GiB of which 1.21 GiB is free."
    " Process 4121 has 77.93 GiB memory in use. Of the allocated memory 74.02 GiB is allocated by PyTorch, and 3.01 GiB"
    " is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting"
    " PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
)
"""What PyTorch 2.13 raises on a device that is full."""
CUDA_ERROR = (
    "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other API call, so the "
    "stacktrace below might be incorrect."
)
"""What a kernel's launch says if the driver has no memory left."""
CUBLAS = "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
NCCL = (
    "NCCL error in: /pytorch/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:3699, unhandled cuda error, NCCL version "
    "2.27.5\nncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 2 'out of memory'"
)
"""What NCCL says if it cannot allocate its buffers on a device."""
TF_FULL = (
    "OOM when allocating tensor with shape[4096,4096,64] and type float on "
    "/job:localhost/replica:0/task:0/device:GPU:0 by allocator GPU_0_bfc"
)
PEOPLE_WAIT_S = 600.0


# Memory


def array() -> None:
    """An array larger than the address space."""
    np.ones(2**50)


def limited() -> None:
    """Allocations up to a limit like that of ``ulimit -v``."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**27, resource.RLIM_INFINITY))
    kept = []
    while True:
        kept.append(bytearray(2**24))


def eaten() -> None:
    """Pages until the kernel's limit on the run's control group ends this process."""
    kept = []
    while True:
        kept.append(np.ones(2**22))


def tensor() -> None:
    """A tensor that the host cannot hold."""
    import torch

    torch.ones(2**48)


def device() -> None:
    """A full device, in PyTorch's words."""
    import torch

    raise torch.OutOfMemoryError(CUDA_FULL)


def device_in_backward() -> None:
    """A full device, where a backward pass meets it."""
    import torch

    class Full(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
            raise torch.OutOfMemoryError(CUDA_FULL)

    Full.apply(torch.ones(1, requires_grad=True)).sum().backward()  # type: ignore[no-untyped-call]


def cuda_error() -> None:
    """A full device, in the words of a kernel's launch."""
    import torch

    raise torch.AcceleratorError(CUDA_ERROR)


def cublas() -> None:
    """A full device, in cuBLAS's words."""
    raise RuntimeError(CUBLAS)


def nccl() -> None:
    """A full device, in NCCL's words."""
    import torch

    raise torch.distributed.DistBackendError(NCCL)


def tf_device() -> None:
    """A full device, in TensorFlow's words."""
    import tensorflow as tf

    raise tf.errors.ResourceExhaustedError(None, None, TF_FULL)


# Numbers: the value multiplies the loss


def nan() -> float:
    """A loss that is not a number."""
    return float("nan")


def infinite() -> float:
    """An infinite loss."""
    return float("inf")


def checked() -> None:
    """A loss that the program checks itself."""
    raise FloatingPointError("loss is nan at step 5, aborting")


def anomaly() -> None:
    """A gradient that PyTorch's anomaly detection finds."""
    import torch

    x = torch.zeros(1, requires_grad=True)
    with torch.autograd.set_detect_anomaly(True):
        (x.sqrt() * 0).sum().backward()


def asserted() -> None:
    """A loss that the program asserts to be finite."""
    loss = float("inf")
    assert np.isfinite(loss), f"non-finite loss: {loss}"


# Data


def no_file() -> None:
    """A sample whose file was removed."""
    np.load("/scratch/data/part-00017.npy")


def cut_file() -> None:
    """A sample whose file was cut off."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "part-00017.npy")
        np.save(path, np.ones(64))
        os.truncate(path, 200)
        np.load(path)


def cut_hdf5() -> None:
    """A file of HDF5 that was cut off."""
    import h5py

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "part-00017.h5")
        with h5py.File(path, "w") as file:
            file["x"] = np.ones(4096)
        os.truncate(path, 2048)
        h5py.File(path)


def bad_record() -> None:
    """A record that is not valid JSON."""
    json.loads('{"x": [1.0, 2.0')


def bad_bytes() -> None:
    """A compressed block with a wrong byte."""
    zlib.decompress(zlib.compress(bytes(1000))[:-9] + bytes(9))


def bad_label() -> None:
    """A class that the model does not have."""
    import torch

    torch.nn.functional.cross_entropy(torch.ones(2, 10), torch.tensor([3, 11]))


def bad_index() -> None:
    """A sample that is not there."""
    list(range(4))[17]


# Disks


def full_disk() -> None:
    """A write to a device that is always full."""
    with open("/dev/full", "wb", buffering=0) as file:
        file.write(bytes(4096))


def full_disk_torch() -> None:
    """The same through ``torch.save``."""
    import torch

    torch.save({"weight": torch.ones(1000)}, "/dev/full")


def full_disk_numpy() -> None:
    """The same through ``numpy.save``."""
    with open("/dev/full", "wb") as file:
        np.save(file, np.ones(100_000))


def file_limit() -> None:
    """A file beyond the limit on the size of files."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, resource.RLIM_INFINITY))
    with tempfile.TemporaryFile(buffering=0) as file:
        while True:
            file.write(bytes(2**14))


def quota() -> None:
    """A quota that is used up, in the file system's words."""
    raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT), "/home/user/results/latents.npy")


def filled() -> None:
    """The run folder's own file system, which is small, up to its last byte; then a file there."""
    folder = Path(os.environ["HPCTRAIN_RUN_DIR"])
    try:
        with open(folder / "filler", "wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
    except OSError:
        np.save(folder / "latents.npy", np.ones(10_000))


def read_only() -> None:
    """A file on a file system that may only be read."""
    Path(os.environ["READ_ONLY"], "latents.npy").write_bytes(b"x")


# Network


def refused() -> None:
    """A server that is not there."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = free.getsockname()
    socket.create_connection(address)


def refused_url() -> None:
    """The same through ``urllib``."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    urllib.request.urlopen(f"http://127.0.0.1:{port}/shard-00017.tar")


def reset() -> None:
    """A server that resets the connection."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as mine:
        theirs, _ = server.accept()
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        theirs.close()
        mine.recv(1)


def silent_server() -> None:
    """A server that does not answer."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as mine:
        mine.settimeout(0.5)
        mine.recv(1)


def no_name() -> None:
    """A server that has no address."""
    socket.create_connection(("datasets.invalid", 443))


def unreachable() -> None:
    """A network without a route, in the system's words."""
    raise OSError(errno.EHOSTUNREACH, os.strerror(errno.EHOSTUNREACH))


def no_store() -> None:
    """A rendezvous without a listener."""
    import datetime

    import torch

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.distributed.TCPStore("127.0.0.1", port, 2, False, datetime.timedelta(seconds=2))


# The program


def wrong_type() -> None:
    """Text where a number belongs."""
    _ = "7" + 1  # type: ignore[operator]


def wrong_key() -> None:
    """A dictionary without the key."""
    {"input_ids": 0}["inputs"]


def wrong_attribute() -> None:
    """An attribute that there is not."""
    np.ones(3).to("cuda")  # type: ignore[attr-defined]


def no_module() -> None:
    """A package that is not installed."""
    import flash_attention_of_nobody  # type: ignore[import-not-found]  # noqa: F401


def shapes() -> None:
    """Matrices that do not fit."""
    import torch

    torch.nn.Linear(3, 1)(torch.ones(2, 4))


def wrong_weights() -> None:
    """Weights of another model."""
    import torch

    torch.nn.Linear(3, 1).load_state_dict({"fc.weight": torch.ones(1, 3)})


def no_device() -> None:
    """A device that this PyTorch does not know."""
    import torch

    torch.ones(1).cuda()


def failed_assert() -> None:
    """An assertion of the user's."""
    assert len([1, 2]) == 3, "expected 3 channels"


def asks() -> None:
    """A question to a person, in a batch job."""
    input("overwrite? ")


def leaves() -> None:
    """The end of the process with a code."""
    sys.exit(3)


# Hangs


def sleeps() -> None:
    """Sleep for as long as people wait."""
    time.sleep(PEOPLE_WAIT_S)


def deadlock() -> None:
    """Take a lock twice."""
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def stopped_process() -> None:
    """Stop this process, as a debugger or a frozen container does."""
    os.kill(os.getpid(), signal.SIGSTOP)


def spins() -> None:
    """Compute forever."""
    while True:
        pass


def stuck_reader() -> None:
    """Read from a pipe that has no writer."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "part-00017.bin")
        os.mkfifo(path)
        path.read_bytes()


# Signals


def killed() -> None:
    """SIGKILL, as an administrator or a watchdog sends it."""
    os.kill(os.getpid(), signal.SIGKILL)


def segmentation_fault() -> None:
    """A read of address 0."""
    ctypes.string_at(0)


def bus_error() -> None:
    """A read of a mapped file that was cut off in the meantime."""
    with tempfile.TemporaryFile() as file:
        file.write(bytes(8192))
        file.flush()
        mapped = mmap.mmap(file.fileno(), 8192)
        os.ftruncate(file.fileno(), 0)
        mapped[4096]


def illegal() -> None:
    """An instruction that this processor lacks, as the kernel says it."""
    os.kill(os.getpid(), signal.SIGILL)


def floating_point() -> None:
    """An integer division by zero in a library, as the kernel says it."""
    os.kill(os.getpid(), signal.SIGFPE)


def aborts() -> None:
    """A failed check of a C++ library."""
    os.write(2, b"terminate called after throwing an instance of 'std::logic_error'\n")
    os.abort()


def vanishes() -> None:
    """The end of the process without a word."""
    os._exit(0)


Fault = Callable[[], float | None]
OF_NAME: dict[str, Fault] = {
    name: each
    for name, each in list(globals().items())
    if callable(each) and getattr(each, "__module__", "") == __name__
}
"""All of the above."""


class Injection:
    """Calls a fault on one rank at one step.

    Args:
        fault: its name; empty: none.
        is_here: whether this is the rank.
        step: when ``due`` is called for this time, counted from 1.
    """

    def __init__(self, fault: str, is_here: bool, step: int) -> None:
        self.fault = OF_NAME[fault] if fault and is_here else None
        self.step = step
        self.calls = 0

    def due(self) -> float:
        """The factor of this step's loss, 1 if nothing is wrong with it."""
        self.calls += 1
        if self.fault is None or self.calls != self.step:
            return 1.0
        value = self.fault()
        return 1.0 if value is None else value

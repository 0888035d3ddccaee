"""The runs of the corpus: what goes wrong in each, on which rank and when, and what ``explain`` should say."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from hpctrain.errors import Code

EITHER = (Code.EXCEPTION, Code.USER_ERROR)
"""Errors in the user's code or data: which of the two depends on whether another attempt may cure them."""
CODES: Mapping[str, tuple[Code, ...]] = {
    "host memory": (Code.OUT_OF_MEMORY,),
    "device memory": (Code.OUT_OF_MEMORY,),
    "not finite": (Code.NAN,),
    "data": EITHER,
    "disk": (Code.DISK_FULL,),
    "network": (Code.NETWORK,),
    "node": (Code.NODE,),
    "program": EITHER,
    "hang": (Code.HANG,),
    "limit": (Code.TIME_LIMIT,),
    "preemption": (Code.STOPPED,),
    "signal": (Code.KILLED,),
    "nothing": (Code.COMPLETED,),
}
"""The right answers by class."""


@dataclass(frozen=True)
class Case:
    """One run."""

    name: str
    label: str
    """Its class, a key of CODES."""
    program: str = "torch"
    """``torch``, ``keras``, ``plain``, or the text of a task's file."""
    fault: str = ""
    """A name of ``faults``; empty: what is wrong is in the arguments, or comes from outside."""
    rank: int = 1
    """Who has the fault."""
    step: int = 3
    task_args: Mapping[str, Any] = field(default_factory=dict)
    keys: Mapping[str, Any] = field(default_factory=dict)
    """Sections of the run file."""
    words: tuple[str, ...] = ()
    """Options of the plain program."""
    outside: str = ""
    """What is done to the run after ``step`` steps: ``STOP`` (the file), or a signal's name and whom it hits."""
    around: str = ""
    """``memory`` (a limit of the kernel), ``small`` (the run folder on 4 MiB) or ``read-only`` (a folder)."""
    names: int | None = -1
    """The rank that must be named first; -1: the one with the fault; None: it happens on all, or on none."""
    says: tuple[str, ...] = ()
    """Words that the explanation must contain."""
    codes: tuple[Code, ...] = ()
    """The right answers, if not those of the class."""
    ranks: int = 2

    @property
    def right(self) -> tuple[Code, ...]:
        """Codes that are right."""
        return self.codes or CODES[self.label]

    @property
    def named(self) -> int | None:
        """The rank that must be named; None: any or none."""
        return self.rank if self.names == -1 else self.names


Rows = Iterator[Case]
GLOO, MPI = ("--exchange", "gloo"), ("--exchange", "mpi")
HOROVOD, NCCL = {"reduce": {"kind": "horovod"}}, {"reduce": {"kind": "nccl"}}
HUNG = {"monitor": {"hang_s": 5}}
TWICE = {"launch": {"max_failures": 2}, "checkpoint": {"enabled": False}}


def swept(label: str, fault: str, *places: tuple[str, int, int], **more: Any) -> Rows:
    """A fault in several programs, ranks and steps. Of a plain program, a word after a space is its exchange."""
    for place, rank, step in places:
        program, _, exchange = place.partition(" ")
        words = ("--exchange", exchange) if exchange else ()
        name = "-".join([fault.replace("_", "-"), *place.split(), str(rank), str(step)])
        yield Case(name, label, program, fault, rank, step, words=words, **more)


def memory() -> Rows:
    """Memory of the host and of devices that runs out."""
    host, device = "host memory", "device memory"
    yield from swept(
        host, "array", ("torch", 0, 2), ("torch", 1, 7), ("keras", 1, 3), ("plain", 0, 4), ("plain mpi", 1, 6)
    )
    yield from swept(host, "limited", ("torch", 1, 3), ("plain", 1, 5))
    yield from swept(host, "tensor", ("torch", 0, 5), ("plain gloo", 1, 3))
    yield from swept(host, "eaten", ("torch", 1, 3), ("torch", 0, 6), ("plain", 1, 4), around="memory")
    yield Case("array-sample", host, fault="array", rank=0, step=9, task_args={"place": "sample"})
    yield Case("array-task", host, fault="array", task_args={"place": "task"})
    yield from swept(device, "device", ("torch", 0, 1), ("torch", 1, 8), ("plain", 0, 3), ("plain gloo", 1, 4))
    yield Case("device-task", device, fault="device", task_args={"place": "task"})
    yield Case("device-horovod", device, fault="device", keys=HOROVOD)
    yield Case("device-twice", device, fault="device", keys=TWICE)
    yield from swept(device, "device_in_backward", ("torch", 1, 4), ("plain gloo", 0, 5))
    yield from swept(device, "cuda_error", ("torch", 0, 3), ("plain", 1, 2))
    yield from swept(device, "cublas", ("torch", 1, 2), ("plain gloo", 1, 6))
    yield from swept(device, "nccl", ("torch", 0, 2), ("plain gloo", 0, 3))
    yield from swept(device, "tf_device", ("keras", 0, 2), ("keras", 1, 6), ("plain", 1, 3))


def not_finite() -> Rows:
    """Losses and gradients that are not finite."""
    label = "not finite"
    yield from swept(label, "nan", ("torch", 0, 2), ("torch", 1, 6), ("torch", 1, 11), says=("step",))
    yield from swept(label, "infinite", ("torch", 0, 4), ("torch", 1, 9), says=("step",))
    yield Case("nan-horovod", label, fault="nan", step=5, keys=HOROVOD)
    yield Case("nan-sample", label, task_args={"data": "nan"}, names=None, says=("step",))
    yield Case("nan-sample-keras", label, "keras", task_args={"data": "nan"}, names=None, says=("step",))
    yield Case("diverged", label, task_args={"lr": 1e25}, names=None, says=("step",))
    yield Case("diverged-keras", label, "keras", task_args={"lr": 1e25}, names=None, says=("step",))
    yield from swept(label, "checked", ("torch", 1, 5), ("plain", 0, 5), ("plain gloo", 1, 5))
    yield from swept(label, "anomaly", ("torch", 0, 3), ("plain", 1, 2))
    yield from swept(label, "asserted", ("plain", 0, 6), ("plain mpi", 1, 3))


def data() -> Rows:
    """Files that are missing or cut off, shapes that do not fit, samples that cannot be read."""
    label, here = "data", {"place": "sample"}
    yield Case("no-file", label, task_args={"data": "no.h5"}, names=None, says=("no.h5",))
    yield Case("cut-off", label, task_args={"data": "cut.h5"}, names=None, says=("cut.h5",))
    yield Case("no-hdf5", label, task_args={"data": "text.h5"}, names=None, says=("text.h5",))
    yield Case("ragged", label, task_args={"data": "ragged.h5"}, names=None, says=("ragged.h5",))
    yield Case("no-targets", label, task_args={"data": "targets.h5"}, names=None, says=("y",))
    yield Case("wide", label, task_args={"data": "wide"}, names=None, says=("4",))
    yield Case("no-file-sample", label, fault="no_file", task_args=here, step=20, says=("part-00017",))
    yield Case("bad-record-sample", label, fault="bad_record", task_args=here, rank=0, step=12)
    yield Case("bad-bytes-sample", label, fault="bad_bytes", task_args=here, step=9, says=("decompress",))
    workers = {"data": {"workers": 1}}
    yield Case("cut-hdf5-worker", label, fault="cut_hdf5", task_args=here, step=14, keys=workers, says=("truncated",))
    yield from swept(label, "cut_file", ("plain", 0, 5), ("plain gloo", 1, 3), ("keras", 1, 2))
    yield from swept(label, "cut_hdf5", ("plain", 1, 4), says=("truncated",))
    yield from swept(label, "no_file", ("plain mpi", 0, 6), ("keras", 0, 4), says=("part-00017",))
    yield from swept(label, "bad_label", ("torch", 1, 5), ("plain gloo", 0, 4), says=("11",))
    yield from swept(label, "bad_index", ("torch", 0, 10), ("plain", 0, 2), says=("out of range",))
    yield from swept(label, "bad_record", ("plain", 1, 7), says=("delimiter",))


def disk() -> Rows:
    """Disks that are full, quotas, and file systems that may only be read."""
    label = "disk"
    yield from swept(
        label, "full_disk", ("torch", 0, 3), ("torch", 1, 6), ("keras", 0, 4), ("plain", 1, 3), ("plain mpi", 0, 5)
    )
    yield from swept(label, "full_disk_torch", ("torch", 0, 4), ("plain gloo", 0, 4))
    yield from swept(label, "full_disk_numpy", ("plain", 0, 2))
    yield from swept(label, "file_limit", ("torch", 1, 2), ("plain", 0, 6))
    yield from swept(label, "quota", ("torch", 0, 5), ("plain gloo", 1, 4))
    yield from swept(label, "filled", ("torch", 0, 3), ("torch", 1, 7), around="small")
    only_read: dict[str, Any] = {"around": "read-only", "codes": (Code.READ_ONLY,)}
    yield from swept(label, "read_only", ("torch", 1, 3), ("plain", 0, 3), **only_read)
    yield Case("full-disk-horovod", label, fault="full_disk", keys=HOROVOD)
    yield Case("full-disk-twice", label, fault="full_disk", keys=TWICE)


def network() -> Rows:
    """Servers that refuse, reset, do not answer or have no name."""
    label = "network"
    yield from swept(label, "refused", ("torch", 1, 3), ("keras", 0, 2), ("plain", 1, 4), ("plain gloo", 0, 3))
    yield from swept(label, "refused_url", ("torch", 0, 6), ("plain", 0, 3))
    yield from swept(label, "reset", ("torch", 1, 5), ("plain", 1, 2), ("plain mpi", 0, 4))
    yield from swept(label, "silent_server", ("torch", 0, 2), ("plain gloo", 1, 5))
    yield from swept(label, "no_name", ("torch", 1, 7), ("plain", 0, 4))
    yield from swept(label, "unreachable", ("torch", 0, 4), ("plain", 1, 6))
    yield from swept(label, "no_store", ("plain", 1, 1), ("torch", 0, 3))


SYNTAX = "def task(world)\n    return None\n"
NO_IMPORT = "import flash_attention_of_nobody\n\n\ndef task(world):\n    return None\n"
NOTHING = "def task(world):\n    world.size + 1\n"
WRONG_FIELD = (
    "import numpy as np\nimport torch\nimport hpctrain\n\n\ndef task(world):\n    net = torch.nn.Linear(3, 1)\n"
    "    data = {'x': np.ones((64, 3), np.float32), 'y': np.ones(64, np.float32)}\n"
    "    return hpctrain.TorchTask(model=net, loss='mse', optimiser=torch.optim.SGD(net.parameters(), 0.1), "
    "train=data)\n"
)
FROZEN = WRONG_FIELD.replace("optimiser", "optimizer").replace("(3, 1)\n", "(3, 1).requires_grad_(False)\n")
NO_LOSS = WRONG_FIELD.replace("optimiser", "optimizer").replace("'mse'", "'mean_sqared'")


def program() -> Rows:
    """Mistakes in the user's program."""
    label = "program"
    texts = {"syntax": SYNTAX, "import": NO_IMPORT, "returns-nothing": NOTHING, "wrong-field": WRONG_FIELD}
    texts |= {"frozen": FROZEN, "no-such-loss": NO_LOSS}
    for name, text in texts.items():
        yield Case(name, label, text, names=None, says=("mine.py",) if name in ("syntax", "import") else ())
    yield Case("wrong-argument", label, task_args={"depth": 3}, names=None, says=("depth",))
    yield from swept(label, "wrong_type", ("torch", 0, 3), ("plain", 1, 2), ("keras", 1, 4))
    yield from swept(label, "wrong_key", ("torch", 1, 4), ("plain gloo", 0, 2), says=("inputs",))
    yield from swept(label, "wrong_attribute", ("torch", 0, 1), ("plain mpi", 1, 5), says=("attribute",))
    yield from swept(label, "shapes", ("torch", 1, 6), ("plain gloo", 1, 1), says=("shapes",))
    yield from swept(label, "no_module", ("plain", 0, 1), says=("flash_attention",))
    yield from swept(label, "no_device", ("torch", 0, 2), ("plain", 0, 3), says=("CUDA",))
    yield from swept(label, "failed_assert", ("torch", 1, 8), ("plain", 1, 3), says=("3 channels",))
    yield from swept(label, "asks", ("plain", 0, 3), ("torch", 0, 3), says=("EOF",))
    yield Case("wrong-weights-task", label, fault="wrong_weights", task_args={"place": "task"}, says=("fc.weight",))
    yield Case("wrong-type-twice", label, fault="wrong_type", keys=TWICE, codes=(*EITHER, Code.NO_PROGRESS))
    yield Case("leaves", label, fault="leaves", says=("exit",))
    yield from swept(label, "leaves", ("plain", 1, 4), says=("3",))


def hangs() -> Rows:
    """Ranks that no longer take part."""
    label = "hang"
    for fault, rank, step, keys in (
        ("sleeps", 1, 3, {}), ("sleeps", 0, 6, NCCL), ("deadlock", 1, 4, {}), ("deadlock", 0, 3, HOROVOD),
        ("stopped_process", 1, 5, {}), ("spins", 0, 4, {}), ("sleeps", 1, 7, HOROVOD),
    ):  # fmt: skip
        kind = keys.get("reduce", {}).get("kind", "mpi")
        yield Case(
            f"{fault.replace('_', '-')}-{kind}-{rank}-{step}",
            label,
            fault=fault,
            rank=rank,
            step=step,
            keys=HUNG | keys,
        )
    yield Case("stuck-sample", label, fault="stuck_reader", task_args={"place": "sample"}, step=40, keys=HUNG)
    workers = {"data": {"workers": 1}, **HUNG}
    yield Case("stuck-worker", label, fault="stuck_reader", task_args={"place": "sample"}, step=40, keys=workers)
    words = (*MPI, "--heartbeat")
    yield Case("leaves-plain-mpi", label, "plain", "leaves", 1, 4, words=words, keys=HUNG, names=None)
    yield Case("sleeps-keras", label, "keras", "sleeps", 1, 4, keys=HUNG)
    for exchange in ("none", "gloo", "mpi"):
        words = ("--exchange", exchange, "--heartbeat")
        # heartbeats alone do not tell who waits for whom
        yield Case(f"sleeps-plain-{exchange}", label, "plain", "sleeps", 1, 5, words=words, keys=HUNG, names=None)


def stops() -> Rows:
    """Time limits, preemptions and requests of people."""
    for label, outside in (("limit", "USR1 supervisor"), ("preemption", "TERM supervisor")):
        more: dict[str, Any] = {"outside": outside, "names": None}
        yield Case(f"{label}-torch-3", label, step=3, **more)
        yield Case(f"{label}-torch-8", label, step=8, **more)
        yield Case(f"{label}-keras", label, "keras", step=4, **more)
        yield Case(f"{label}-horovod", label, step=4, keys=HOROVOD, **more)
        yield Case(f"{label}-plain", label, "plain", step=3, **more)
        yield Case(f"{label}-plain-mpi", label, "plain", step=4, words=MPI, **more)
    yield Case("preemption-file", "preemption", step=5, outside="STOP", names=None)
    yield Case("preemption-interrupt", "preemption", step=6, outside="INT supervisor", names=None)


def signals() -> Rows:
    """Signals that end a rank, or its launcher."""
    label = "signal"
    places = (
        ("torch", 0, 2),
        ("torch", 1, 7),
        ("keras", 1, 3),
        ("plain", 0, 4),
        ("plain gloo", 1, 3),
        ("plain mpi", 0, 5),
    )
    yield from swept(label, "killed", *places, says=("SIGKILL",))
    faulted = (("torch", 1, 4), ("keras", 0, 5), ("plain", 1, 3), ("plain gloo", 0, 6))
    yield from swept(label, "segmentation_fault", *faulted, says=("SIGSEGV",))
    yield from swept(label, "bus_error", ("torch", 0, 3), ("plain gloo", 1, 2), says=("SIGBUS",))
    yield from swept(label, "illegal", ("torch", 1, 1), ("plain mpi", 1, 4), says=("SIGILL",))
    yield from swept(label, "floating_point", ("torch", 0, 6), says=("SIGFPE",))
    aborted = (Code.KILLED, Code.EXCEPTION)
    yield from swept(label, "aborts", ("torch", 1, 5), ("plain", 0, 3), codes=aborted, says=("SIGABRT",))
    yield from swept(label, "vanishes", ("torch", 1, 4), codes=(Code.VANISHED,))
    for kind, keys in (("horovod", HOROVOD), ("nccl", NCCL)):
        yield Case(f"killed-{kind}", label, fault="killed", step=5, keys=keys, says=("SIGKILL",))
    for rank in (0, 1):
        yield Case(f"killed-outside-{rank}", label, rank=rank, step=5, outside=f"KILL rank {rank}", says=("SIGKILL",))
    yield Case("launcher-killed", label, step=4, outside="KILL mpirun", names=None, says=("and all ranks",))


def healthy() -> Rows:
    """Runs in which nothing goes wrong."""
    for name, program_, words in (
        ("torch", "torch", ()),
        ("keras", "keras", ()),
        ("plain", "plain", ()),
        ("gloo", "plain", GLOO),
    ):
        yield Case(f"healthy-{name}", "nothing", program_, words=words, names=None)


def nodes() -> Rows:
    """Hosts whose daemon dies."""
    for step in (3, 6):
        more: dict[str, Any] = {"outside": "KILL daemon", "around": "hosts", "names": None, "says": ("host-2",)}
        yield Case(f"daemon-{step}", "node", step=step, **more)


CASES: tuple[Case, ...] = (
    *memory(), *not_finite(), *data(), *disk(), *network(), *program(), *hangs(), *stops(), *signals(), *healthy(),
    *nodes(),
)  # fmt: skip
"""All runs of the corpus."""

"""The doctor's findings, and probes of libraries in separate processes, whose crashes or hangs do not affect it."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from hpctrain.comm.launched import ALONE_START
from hpctrain.system import python

TIMEOUT_S = 120.0
MARK = "hpctrain-probe:"
TELL = f"print({MARK!r} + json.dumps(facts), flush=True)\nos._exit(0)\n"


@dataclass(frozen=True)
class Probe:
    """What a probe process found, or why it failed."""

    facts: dict[str, Any]
    error: str = ""


def probe(code: str) -> Probe:
    """Runs Python statements that put their findings into a dict named ``facts``."""
    words = python.code(f"import json, os\nfacts = {{}}\n{code}\n{TELL}")
    try:
        done = subprocess.run(
            words,
            env={**ALONE_START, **os.environ},
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Probe({}, f"no answer within {TIMEOUT_S:.0f} s")
    for line in done.stdout.splitlines():
        if line.startswith(MARK):
            return Probe(json.loads(line.removeprefix(MARK)))
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    return Probe({}, lines[-1].strip()[:300] if lines else f"ended with code {done.returncode}")


MPI = """
from mpi4py import MPI
levels = {MPI.THREAD_SINGLE: "single", MPI.THREAD_FUNNELED: "funneled", MPI.THREAD_SERIALIZED: "serialized"}
facts["threads"] = levels.get(MPI.Query_thread(), "multiple")
facts["standard"] = ".".join(map(str, MPI.Get_version()))
"""

TORCH = """
import importlib
facts["version"] = importlib.import_module("torch").__version__
facts |= importlib.import_module("hpctrain.backends.torch.accelerator").facts()
"""

TENSORFLOW = """
import importlib, os
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ["KERAS_BACKEND"] = importlib.import_module("hpctrain.system.keras_backend").keras_backend()
tf = importlib.import_module("tensorflow")
keras = importlib.import_module("keras")
facts["version"], facts["keras"], facts["backend"] = tf.__version__, keras.__version__, keras.backend.backend()
facts["gpus"] = [device.name for device in tf.config.list_physical_devices("GPU")]
"""

HOROVOD = """
import importlib, os
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
try:
    importlib.import_module("mpi4py.MPI")
except ImportError:
    pass
hvd = importlib.import_module("horovod.{framework}")
facts["mpi"], facts["nccl"] = bool(hvd.mpi_built()), int(hvd.nccl_built())
facts["for_gpus"] = bool(hvd.cuda_built() or hvd.rocm_built())
accelerator = importlib.import_module("hpctrain.backends.torch.accelerator") if "{framework}" == "torch" else None
facts["trains_on_gpu"] = bool(accelerator and accelerator.available())
with open("/proc/self/maps") as maps:
    facts["maps"] = maps.read()
"""

HDF5 = """
import h5py
facts["h5py"], facts["hdf5"] = h5py.version.version, h5py.version.hdf5_version
"""


class Status(StrEnum):
    """Severity of a finding."""

    OK = "ok"
    NOTE = "note"
    """It works or is not needed, but could be better."""
    PROBLEM = "problem"
    """Runs will fail or be slow until it is fixed."""


@dataclass(frozen=True)
class Check:
    """A finding: topic, result, and what to do about it."""

    topic: str
    value: str
    status: Status = Status.OK
    fix: str = ""


def note(topic: str, value: str, fix: str = "") -> Check:
    """Makes a finding of status NOTE."""
    return Check(topic, value, Status.NOTE, fix)


def problem(topic: str, value: str, fix: str) -> Check:
    """Makes a finding of status PROBLEM."""
    return Check(topic, value, Status.PROBLEM, fix)

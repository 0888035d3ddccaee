"""Checks installed software (Python, MPI, frameworks, Horovod, HDF5), its compatibility, and a run file.

Runs none of the user's code.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import platform
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import hpctrain
from hpctrain.config.loading import load
from hpctrain.config.sections import Config, TrackConfig
from hpctrain.doctor import check
from hpctrain.doctor.check import Check, Probe, note, problem
from hpctrain.errors import HpctrainError, MissingExtra, UserError
from hpctrain.launch.mpi_library import find_mpirun
from hpctrain.launch.mpi_library import probe as probe_mpi
from hpctrain.reduce.horovod_setup import mpi_libraries
from hpctrain.system.python import spec_of, version_of
from hpctrain.track.sinks import missing_extras

INSTALL_HOROVOD = "run: hpctrain install-horovod"


def findings() -> list[Check]:
    """Findings about installed software. Checks run in parallel, since each framework takes seconds to import."""
    parts: list[Callable[[], Iterator[Check]]] = [python, mpi, torch, tensorflow, horovod, hdf5]
    with ThreadPoolExecutor(max_workers=3) as pool:
        return [finding for part in pool.map(lambda part: list(part()), parts) for finding in part]


def python() -> Iterator[Check]:
    """Reports interpreter and package."""
    yield Check("Python", f"{platform.python_version()} ({sys.executable})")
    yield Check("hpctrain", f"{hpctrain.__version__} ({Path(hpctrain.__file__).parent})")


def mpi() -> Iterator[Check]:
    """Checks mpi4py, its library, the matching mpirun, and the thread level."""
    try:
        library = probe_mpi()
    except MissingExtra as error:
        yield note("MPI", "mpi4py is not installed: one rank only", error.fix)
        return
    except HpctrainError as error:
        yield problem("MPI", error.what, error.fix)
        return
    yield Check("MPI", f"{library.version} ({library.path or 'path unknown'})")
    try:
        yield Check("mpirun", find_mpirun(library))
    except HpctrainError as error:
        yield problem("mpirun", error.what, error.fix)
    seen = check.probe(check.MPI)
    if seen.error:
        yield problem("MPI start", seen.error, "start hpctrain doctor inside a job: login nodes may lack the network")
    elif seen.facts["threads"] != "multiple":
        fix = "use an MPI built with MPI_THREAD_MULTIPLE: Horovod and hpctrain communicate from different threads"
        yield problem("MPI threads", f"level {seen.facts['threads']}", fix)
    else:
        yield Check("MPI threads", f"level multiple, standard {seen.facts['standard']}")


def torch() -> Iterator[Check]:
    """Checks PyTorch."""
    yield _framework("PyTorch", "torch", check.TORCH, 'pip install "hpctrain[torch]"')


def tensorflow() -> Iterator[Check]:
    """Checks TensorFlow and Keras."""
    finding = _framework("TensorFlow", "tensorflow", check.TENSORFLOW, 'pip install "hpctrain[tensorflow]"')
    if "backend" in finding.value and not re.search("backend (tensorflow|torch),", finding.value):
        finding = problem("TensorFlow", finding.value, "set KERAS_BACKEND to torch or tensorflow")
    yield finding


def _framework(topic: str, package: str, code: str, install: str) -> Check:
    if not is_installed(package):
        return note(topic, "not installed", install)
    seen = check.probe(code)
    if seen.error:
        return problem(topic, f"cannot be imported: {seen.error}", f"reinstall it: {install}")
    facts = seen.facts
    built = f", {facts['platform']}" if facts.get("platform") else ""
    keras = f", Keras {facts['keras']}, backend {facts['backend']}" if "keras" in facts else ""
    gpus = f"{len(facts['gpus'])} GPU" + ("s" if len(facts["gpus"]) != 1 else "")
    shared = "; gradients of ranks that share one go through host memory, 0.2 s per GB" if facts["gpus"] else ""
    return Check(topic, f"{facts['version']}{built}{keras}, sees {gpus}{shared}")


def horovod() -> Iterator[Check]:
    """Checks Horovod: frameworks it was built for, its MPI library, NCCL."""
    if not is_installed("horovod"):
        value = "not installed, nor needed: gradients go by NCCL on GPUs, else by MPI and shared memory"
        yield note("Horovod", value, f"for reduce.kind: horovod, {INSTALL_HOROVOD}")
        return
    built = built_for()
    version = importlib.metadata.version("horovod")
    against = ", ".join(f"{name} {number}" for name, number in built.items())
    yield Check("Horovod", f"{version}, built for {against or 'nothing known'}")
    for_gpus = False
    for framework in filter(is_installed, ("torch", "tensorflow")):
        topic = f"Horovod {framework}"
        if framework in built:
            seen = check.probe(check.HOROVOD.format(framework=framework))
            for_gpus = for_gpus or seen.facts.get("for_gpus", False)
            yield horovod_for(framework, built[framework], seen)
        elif framework == "tensorflow" and for_gpus:
            yield Check(topic, "left out of builds for GPUs: gradients of Keras models go through mpi4py")
        else:
            yield note(topic, "not built for it", f"{INSTALL_HOROVOD} --force")


def horovod_for(framework: str, built: str, seen: Probe) -> Check:
    """Checks whether Horovod works with the installed version of a framework."""
    topic = f"Horovod {framework}"
    trains_on_gpu = seen.facts.get("trains_on_gpu", False)
    gpu = " --gpu" if trains_on_gpu or seen.facts.get("nccl") else ""
    rebuild = f"{INSTALL_HOROVOD}{gpu} --force"
    installed = version_of(framework, f"{framework}-cpu") or "unknown"
    fits = installed in (built, built.partition("+")[0])  # torch reports 2.13.0+cu130, PyPI's wheel 2.13.0
    if seen.error:
        because = "" if fits else f"it was built against {framework} {built}, {installed} is installed: "
        return problem(topic, f"cannot be imported: {because}{seen.error}", rebuild)
    libraries = mpi_libraries(seen.facts["maps"])
    if len(libraries) > 1:
        fix = f"{rebuild} with the mpicc of mpi4py's MPI on PATH"
        return problem(topic, f"its MPI is not mpi4py's: {' and '.join(libraries)}", fix)
    if not seen.facts["mpi"]:
        return problem(topic, "built without MPI", rebuild)
    if trains_on_gpu and not seen.facts["for_gpus"]:
        fix = f"{rebuild}, if you want reduce.kind: horovod"
        return note(topic, "built for CPUs: on GPUs gradients are summed by the NCCL of PyTorch", fix)
    nccl = seen.facts["nccl"]
    value = f"loads, same MPI library as mpi4py{f', NCCL {nccl}' if nccl else ', no NCCL (CPUs only)'}"
    if not fits:
        return note(topic, f"{value}; built against {framework} {built}, {installed} is installed", rebuild)
    return Check(topic, value)


def built_for() -> dict[str, str]:
    """Framework versions against which the installed Horovod was built."""
    spec = importlib.util.find_spec("horovod")
    folder = Path(next(iter(spec.submodule_search_locations or []), "")) if spec else Path()
    try:
        saved = json.loads((folder / "metadata.json").read_text())
    except (OSError, ValueError):
        return {}
    names = {"pytorch": "torch", "tensorflow": "tensorflow"}
    return {names[key]: str(version) for key, version in saved.items() if key in names}


def hdf5() -> Iterator[Check]:
    """Checks h5py and its library."""
    seen = check.probe(check.HDF5)
    if seen.error:
        yield problem("HDF5", f"h5py cannot be imported: {seen.error}", "pip install --force-reinstall h5py")
    else:
        yield Check("HDF5", f"h5py {seen.facts['h5py']}, HDF5 {seen.facts['hdf5']}")


def is_installed(package: str) -> bool:
    """Whether a package can be found, without importing it."""
    try:
        return importlib.util.find_spec(package) is not None
    except ImportError:
        return False


def of_run_file(path: str, overrides: Sequence[str] = ()) -> tuple[Config | None, list[Check]]:
    """Returns the configuration (None if it cannot be read) and findings about it."""
    try:
        config = load(path, overrides)
    except UserError as error:
        return None, [problem("run file", error.what, error.fix)]
    return config, [Check("run file", path), *sinks(config.track), *task(config.task)]


def sinks(track: TrackConfig) -> list[Check]:
    """Reports packages that are missing for sinks named in the run file."""
    return [problem("track", error.what, error.fix) for error in missing_extras(track)]


def task(name: str) -> Iterator[Check]:
    """Checks whether the module or file of a task exists."""
    if not name:
        return
    module, _, _ = name.rpartition(":")
    if module.endswith(".py"):
        if not Path(module).is_file():
            yield problem("task", f"{module} does not exist", "paths are relative to the folder you start hpctrain in")
            return
    elif spec_of(module) is None:
        yield problem("task", f"no module {module}", "install its package, or start hpctrain where it can be imported")
        return
    yield Check("task", name)

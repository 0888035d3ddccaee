"""Checks Slurm: version, partitions, MPI types, requeue, accounting; and a run's job script."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator

from hpctrain.doctor.check import Check, note, problem
from hpctrain.errors import HpctrainError
from hpctrain.launch.engines.slurm import client
from hpctrain.run import resolve_run


def findings(run_file: str | None) -> list[Check]:
    """Findings about the Slurm on PATH, and about this run's job script."""
    if shutil.which("sbatch") is None:
        return [note("Slurm", "not installed here; only needed to submit jobs")]
    try:
        config = settings(client.run(["scontrol", "show", "config"]))
    except HpctrainError as error:
        said = error.what.rsplit("error:", 1)[-1].rsplit("fatal:", 1)[-1].strip()
        fix = "log in to a node of the cluster, or ask the site"
        return [note("Slurm", f"installed but does not answer: {said}", fix)]
    return [*site(config), *partitions(), *mpi_types(), *(script(run_file) if run_file else [])]


def settings(text: str) -> dict[str, str]:
    """Parses ``scontrol show config``."""
    pairs = (line.split("=", 1) for line in text.splitlines() if "=" in line)
    return {key.strip(): value.strip() for key, value in pairs}


def site(config: dict[str, str]) -> Iterator[Check]:
    """Checks version, requeue, accounting and signals at preemption."""
    version = config.get("SLURM_VERSION", "unknown version")
    cluster = config.get("ClusterName", "?")
    yield Check("Slurm", f"{version}, cluster {cluster}")
    if config.get("JobRequeue") == "0":
        fix = "jobs request it with --requeue; if that is refused, use submit --chain N"
        yield note("requeue", "off by default here", fix)
    else:
        yield Check("requeue", "allowed")
    if config.get("AccountingStorageType", "").endswith("none"):
        yield note("accounting", "none: old jobs are unknown to Slurm", "nothing to do: the run folder knows")
    else:
        yield Check("accounting", config.get("AccountingStorageType", "unknown"))
    preempts = config.get("PreemptType", "preempt/none") != "preempt/none"
    if preempts and "send_user_signal" not in config.get("PreemptParameters", ""):
        fix = "set checkpoint.every_minutes to what you can lose"
        yield note("preemption", "gives no signal before it ends a job", fix)


def partitions() -> Iterator[Check]:
    """Reports partitions: names, limits, nodes, cores, GPUs."""
    try:
        lines = client.run(["sinfo", "--noheader", "--format=%P %l %D %c %G"]).splitlines()
    except HpctrainError as error:
        yield problem("partitions", error.what, error.fix)
        return
    shown = []
    for line in lines:
        if len(words := line.split(maxsplit=4)) == 5:
            name, limit, nodes, cores, gres = words
            gpus = "" if gres == "(null)" else f", {gres}"
            shown.append(f"{name} ({limit}, {nodes} nodes, {cores} cores{gpus})")
    yield Check("partitions", "; ".join(shown) or "none")


def mpi_types() -> Iterator[Check]:
    """Reports the types that srun --mpi accepts."""
    try:
        types = client.mpi_types()
    except HpctrainError as error:
        yield problem("srun --mpi", error.what, error.fix)
        return
    if any(re.match(r"pmix|pmi2|cray", name) for name in types):
        yield Check("srun --mpi", ", ".join(types))
    else:
        yield note("srun --mpi", ", ".join(types) or "none", "set launch.launcher: mpirun")


def script(run_file: str) -> Iterator[Check]:
    """Checks the rendered script with ``sbatch --test-only``."""
    from hpctrain.launch.engines.slurm import submission

    try:
        text = submission.plan(*resolve_run.configured(run_file)).script
        words = [client.find("sbatch"), "--test-only"]
        done = subprocess.run(
            words, env=client.environment(), input=text, capture_output=True, text=True, timeout=60, check=False
        )
    except HpctrainError as error:
        yield problem("job script", error.what, error.fix)
        return
    except subprocess.TimeoutExpired:
        yield problem("job script", "sbatch --test-only did not answer within 60 s", "try again when Slurm answers")
        return
    said = (done.stderr + done.stdout).strip().splitlines()
    last = said[-1].removeprefix("sbatch: ") if said else "no answer"
    if done.returncode:
        yield problem("job script", last, "correct launch.slurm in the run file or the site profile")
    else:
        yield Check("job script", last)

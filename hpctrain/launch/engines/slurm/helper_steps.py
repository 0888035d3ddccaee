"""Short steps on a job's nodes, such as the preflight: run to their end, and again while the controller is away."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence

from hpctrain.launch.engines.slurm import client
from hpctrain.launch.patience import patiently
from hpctrain.run.folder import RunDir


def heard(run: RunDir, words: Sequence[str], env: Mapping[str, str], timeout_s: float) -> tuple[int, str]:
    """Exit code and output of a helper on the nodes, which is started again while Slurm's controller is away.

    Raises:
        RunFailed: the controller stays away.
        Stopped: a person stopped the run meanwhile.
    """

    def ask() -> tuple[int, str]:
        code, output = _run(words, env, timeout_s)
        if code and (said := client.unheard(output)):
            raise client.Unheard(f"Slurm starts no step ({said})", "submit the run again when Slurm's controller is up")
        return code, output

    return patiently(ask, client.Unheard, run)


def _run(words: Sequence[str], env: Mapping[str, str], timeout_s: float) -> tuple[int, str]:
    """Exit code and output of a helper on the nodes; what hangs is ended, with its output until then."""
    with tempfile.TemporaryFile() as output:
        with subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, **env}
        ) as process:
            try:
                process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                process.terminate()
                try:
                    process.wait(10)
                except subprocess.TimeoutExpired:
                    process.kill()
        output.seek(0)
        return process.returncode, output.read().decode(errors="replace")

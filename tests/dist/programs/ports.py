"""Trains examples/ports in the current folder: ports.py '[["dlrm", "run-folder", {...}], ...]'

Each entry names a program, its run folder, and options: ``python`` runs one of its files as a script and writes its
output to the folder; ``kill_after`` kills the last rank after a step; ``stop_after`` requests a stop there; ``keys``
are those of the run file.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import runpy
import signal
import sys
import time
from pathlib import Path
from typing import Any

import hpctrain

PORTS = Path(__file__).parents[3] / "examples" / "ports"


class End(hpctrain.BaseHook):
    """Ends a run early."""

    def __init__(self, kill_after: int | None = None, stop_after: int | None = None) -> None:
        self.kill_after = kill_after
        self.stop_after = stop_after

    def after_step(self, training: hpctrain.Training, result: hpctrain.StepResult) -> hpctrain.StopReason | None:
        step, world = training.state.step, training.world
        if step == self.kill_after and world.rank == world.size - 1:
            deadline = time.monotonic() + 120
            while not list((training.folder / "checkpoints").glob("step-*")) and time.monotonic() < deadline:
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        return hpctrain.StopReason.REQUESTED if step == self.stop_after else None


def main(name: str, folder: str, options: dict[str, Any]) -> None:
    """Run one entry."""
    if torch := sys.modules.get("torch"):  # on some CPUs, oneDNN computes convolutions of fewer samples in another way
        torch.backends.mkldnn.enabled = name != "unet3d"
    if "python" in options:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            runpy.run_path(str(PORTS / name / options["python"]), run_name="__main__")
        Path(folder).mkdir()
        (Path(folder) / "printed").write_text(printed.getvalue())
        return
    ranks = hpctrain.connect().size
    keys = {
        "task": f"{PORTS / name / 'port.py'}:task",
        "run_dir": folder,
        "track.every_steps": 1,
        "monitor.enabled": "false",
        "reduce.kind": "mpi" if ranks > 1 else "none",
        **options.pop("keys", {}),
    }
    words = [word for key, value in keys.items() for word in (f"--{key}", str(value))]
    hpctrain.fit(hpctrain.load_config(PORTS / name / "run.yaml", words), hooks=[End(**options)])


if __name__ == "__main__":
    for entry in json.loads(sys.argv[1]):
        main(*entry)

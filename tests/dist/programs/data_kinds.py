"""Train on each kind of data, in run folders below each folder: data_kinds.py KINDS FOLDER:STEPS...

With KILLED_AT in the environment, rank 1 is killed after that step.
"""

import os
import signal
import sys
from pathlib import Path

import hpctrain
from hpctrain.backends.torch.reduce.reducer import NoReducer  # noqa: F401  loads torch before MPI, as a task does
from hpctrain.config.sections import CheckpointConfig, MonitorConfig, ReduceConfig, TrainConfig

TASK = Path(__file__).parents[2] / "tasks" / "torch_data_kinds_task.py"


class Killed(hpctrain.BaseHook):
    """Kills its process after a step."""

    def after_step(self, training, result):
        if training.state.step == int(os.environ.get("KILLED_AT", "-1")) and training.world.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)


def main(folder: Path, steps: int, kinds: list[str]) -> None:
    """For each kind, start a run or continue it."""
    for kind in kinds:
        config = hpctrain.Config(
            name=kind,
            run_dir=str(folder / f"run-{kind}"),
            task=f"{TASK}:task",
            task_args={"kind": kind, "folder": str(folder)},
            train=TrainConfig(steps=steps, global_batch=8),
            reduce=ReduceConfig(kind="mpi" if hpctrain.connect().size > 1 else "none"),
            checkpoint=CheckpointConfig(
                verify_replicated=True, every_steps=8, mode="sync"
            ),  # saved before the rank is killed
            monitor=MonitorConfig(enabled=False),
        )
        assert hpctrain.fit(config, hooks=[Killed()]).step == steps


if __name__ == "__main__":
    for part in sys.argv[2:]:
        folder, _, steps = part.rpartition(":")
        main(Path(folder), int(steps), sys.argv[1].split(","))

"""One rank on the device in each precision, compared with a bare loop on the CPU in fp32."""

from __future__ import annotations

import torch

from benchmarks.gpu_proof import tasks
from benchmarks.gpu_proof.rows import Figures, Setting, require
from benchmarks.gpu_proof.runs import furthest, run_file, trained

STEPS, BATCH = 20, 8
LARGEST = {"fp32": 1e-3, "fp16": 1e-2, "bf16": 5e-2}
"""Largest differences of losses, which start at about 5: each layer rounds by 2^-24, 2^-11 and 2^-8."""


def row(setting: Setting) -> Figures:
    """Checks that the loss curves agree and decrease."""
    task = tasks.gpt()
    wanted = tasks.bare_loop(task, tasks.batches(task, BATCH, STEPS, torch.device("cpu")))
    config = run_file(setting.folder / "run", "gpt", {}, STEPS, BATCH, train={"precision": setting.word})
    found = trained(config).of_step
    require(sorted(found) == list(range(1, STEPS + 1)), f"losses of steps {sorted(found)} were reported")
    difference = furthest(list(found.values()), wanted)
    require(difference <= LARGEST[setting.word], f"losses differ by {difference:.2g} from fp32 on the CPU")
    require(found[STEPS] < 0.9 * found[1], f"the loss went from {found[1]:.3f} to {found[STEPS]:.3f} only")
    return {"first_loss": found[1], "last_loss": found[STEPS], "largest_difference": difference}

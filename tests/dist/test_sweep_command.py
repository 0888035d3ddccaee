"""A sweep with real ranks: learning rates of the run file's optimizer, a stop, and the table."""

import json

import pytest

from hpctrain.run.run_view import RunView
from tests.support.command import hpctrain

TASK = """
import numpy as np
import torch

from hpctrain import TorchTask


def task() -> TorchTask:
    x = np.linspace(-3, 3, 64, dtype=np.float32)[:, None]
    data = {"x": x, "y": np.sin(x)}
    return TorchTask(torch.nn.Linear(1, 1), "mse", train=data, validation=data)
"""
RUN = "name: wave\ntask: wave.py:task\noptimizer: {name: sgd}\ntrain: {steps: 8, global_batch: 16}\n"


@pytest.mark.tour
def test_rates_are_swept_and_a_longer_sweep_resumes_each(tmp_path):
    (tmp_path / "wave.py").write_text(TASK)
    (tmp_path / "run.yaml").write_text(RUN)
    words = ["sweep", "run.yaml", "-n", "2", "--optimizer.lr", "1e-4,1e-1", "--json"]
    said = hpctrain(*words, cwd=tmp_path, warm="torch").stdout
    table = json.loads(said[said.index("\n{") :])
    assert [point["configuration"]["optimizer.lr"] for point in table["points"]] == [0.1, 0.0001], "the best first"
    assert [point["results"]["steps"] for point in table["points"]] == [8, 8]
    hpctrain(*words, "--train.steps", "12", cwd=tmp_path, warm="torch")
    for point in "01":
        found = RunView(tmp_path / "runs" / "wave" / point).snapshot()
        assert [attempt.from_step for attempt in found.attempts[1:]] == [8]
        assert found.attempts[-1].to_step == 12

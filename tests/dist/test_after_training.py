"""What is done with a trained model: evaluated over other data, exported with its forward pass."""

import json

import h5py
import numpy as np
import torch

from tests.support.command import hpctrain, write_run

TASK = """
import numpy as np
import torch

from hpctrain import TorchTask


def data(seed):
    x = np.random.default_rng(seed).normal(size=(64, 8)).astype("float32")
    return {"x": x, "y": x[:, :3].argmax(1)}


def task():
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    return TorchTask(model, "cross_entropy", optimizer, train=data(0), validation=data(1))
"""


def test_a_trained_model_is_evaluated_over_given_data_and_exported(tmp_path):
    (tmp_path / "task.py").write_text(TASK)
    run = write_run(tmp_path, task="task.py:task", train={"steps": 8, "global_batch": 16})
    hpctrain("run", run, cwd=tmp_path, warm="torch")
    x = np.random.default_rng(1).normal(size=(64, 8)).astype("float32")
    for name, arrays in (("same.h5", {"x": x, "y": x[:, :3].argmax(1)}), ("inputs.h5", {"x": x})):
        with h5py.File(tmp_path / name, "w") as file:
            file.update(arrays)

    def evaluated(*words):
        return json.loads(hpctrain("evaluate", run, "--json", *words, cwd=tmp_path, warm="torch").stdout)["metrics"]

    assert evaluated("--data", "same.h5") == evaluated()
    refused = hpctrain("evaluate", run, "--data", "inputs.h5", cwd=tmp_path, warm="torch", code=64)
    assert "inputs.h5 has no y" in refused.stderr
    hpctrain("predict", run, "--data", "inputs.h5", "-o", "outputs.h5", cwd=tmp_path, warm="torch")
    hpctrain("ckpt", "export", "runs/run", "-o", "model.pt2", cwd=tmp_path)
    with h5py.File(tmp_path / "outputs.h5") as file, torch.no_grad():
        graph = torch.export.load(tmp_path / "model.pt2").module()
        # the batches differ in size, so sums may be formed in another order
        np.testing.assert_allclose(graph(torch.from_numpy(x)), file["output"][:], rtol=1e-5, atol=1e-6)

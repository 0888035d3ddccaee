"""Graphs of models with their forward pass: what they compute, and what cannot be one."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hpctrain import TorchTask, UserError
from hpctrain.backends.torch.graph_export import export_graph, save_onnx

pytestmark = pytest.mark.slow
BATCH = {
    "y": np.zeros(2, np.int64),
    "x": np.random.default_rng(0).normal(size=(2, 4)).astype(np.float32),
}


def first_field(model: Any, batch: Any) -> Any:
    return model(batch["x"])


def export(tmp_path: Path, output: str, forward: Callable[[Any, Any], Any] = first_field) -> torch.nn.Module:
    """Exports a trained model, and returns it."""
    trained, task_model = (
        torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3), torch.nn.Dropout()) for _ in range(2)
    )
    torch.save(trained.state_dict(), tmp_path / "weights.pt")
    optimizer = torch.optim.SGD(task_model.parameters(), lr=0.1)
    task = TorchTask(task_model, "cross_entropy", optimizer, train=BATCH, forward=forward)
    export_graph(task, tmp_path / "weights.pt", BATCH, tmp_path / output)
    return trained.eval()


def test_a_graph_has_the_trained_weights_and_takes_any_number_of_samples(tmp_path):
    trained, x = export(tmp_path, "model.pt2"), torch.randn(5, 4)
    graph = torch.export.load(tmp_path / "model.pt2").module()
    torch.testing.assert_close(graph(x), trained(x), rtol=0, atol=0)


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="onnx and onnxscript not installed") as caught:
        export(tmp_path, "model.onnx")
    assert caught.value.fix == "pip install onnx onnxscript"


def test_a_model_that_looks_at_values_is_refused(tmp_path):
    def looks(model, batch):
        return model(batch["x"]) if batch["x"].sum() > 0 else batch["x"]

    with pytest.raises(UserError, match="cannot be traced"):
        export(tmp_path, "model.pt2", looks)
    assert not (tmp_path / "model.pt2").exists()


def test_a_graph_that_cannot_be_written_is_not_called_untraceable(tmp_path):
    with pytest.raises(UserError, match=r"model[.]pt2 cannot be written: No such file"):
        export(tmp_path, "missing/model.pt2")


def test_weights_beside_a_large_onnx_graph_are_named_after_it(tmp_path):
    def save(path):
        Path(path).write_text(f"weights: {Path(path).name}.data")
        Path(f"{path}.data").write_text("weights")

    save_onnx(save, tmp_path / "model.onnx")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.onnx", "model.onnx.data"]
    assert (tmp_path / "model.onnx").read_text() == "weights: model.onnx.data"


@pytest.mark.parametrize(
    "forward",
    [
        lambda model, batch: model(batch["x"]) * batch.get("mask", 1.0),
        lambda model, batch: masked(model, **batch),
        lambda model, batch: model(batch["x"]) * dict(batch)["mask"],
    ],
    ids=["get", "by name", "as a dict"],
)
def test_arrays_are_inputs_however_forward_reads_them(forward, tmp_path):
    batch = {"x": BATCH["x"], "mask": np.zeros((2, 1), np.float32)}
    model = torch.nn.Linear(4, 3)
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    task = TorchTask(model, "mse", torch.optim.SGD(model.parameters(), lr=0.1), train=batch, forward=forward)
    export_graph(task, tmp_path / "weights.pt", batch, tmp_path / "model.pt2")
    graph = torch.export.load(tmp_path / "model.pt2").module()
    assert not graph(*map(torch.from_numpy, batch.values())).any(), "masked"


def masked(model: Any, x: torch.Tensor, mask: Any = 1.0) -> torch.Tensor:
    return model(x) * mask

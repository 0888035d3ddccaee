"""Exports a task's model with its forward pass, for programs without the task: torch.export (.pt2) or ONNX."""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from hpctrain.backends.named_state import named_outputs
from hpctrain.data.dataset import Samples
from hpctrain.errors import UserError, file_errors
from hpctrain.system.files import replace_whole, sync
from hpctrain.tasks.definition import TorchTask

ONNX = ("onnx", "onnxscript")
"""Packages that torch.onnx needs."""


class ReadNames(dict[str, torch.Tensor]):
    """A batch that notes which of its arrays are read, in any way: all ways but ``pop`` come to ``[]``."""

    def __init__(self, batch: dict[str, torch.Tensor]) -> None:
        super().__init__(batch)
        self.names: dict[str, None] = {}

    def __getitem__(self, name: str) -> torch.Tensor:
        value = super().__getitem__(name)
        self.names[name] = None
        return value

    def __iter__(self) -> Iterator[str]:  # otherwise ** and dict() would copy what is inside
        return super().__iter__()

    get, items, values = Mapping.get, Mapping.items, Mapping.values  # type: ignore[assignment]
    __contains__ = Mapping.__contains__


class ForwardPass(torch.nn.Module):
    """A task's forward pass as a function of arrays."""

    def __init__(self, task: TorchTask, names: Sequence[str]) -> None:
        super().__init__()
        self.model = task.model
        self.task_forward = task.forward
        self.names = names

    def forward(self, *arrays: torch.Tensor) -> Any:
        return self.task_forward(self.model, dict(zip(self.names, arrays, strict=True)))


def export_graph(task: TorchTask, weights: Path, batch: Samples, output: Path) -> None:
    """Writes the model's graph in evaluation mode; the number of samples stays free if the model leaves it free.

    Args:
        task: the task, on the CPU.
        weights: a file of ``export_state_dict``.
        batch: two or more samples.
        output: path ending in .pt2 or .onnx.

    Raises:
        UserError: the model cannot be exported, or a package is missing.
    """
    to_onnx = output.suffix == ".onnx"
    if to_onnx and (missing := [name for name in ONNX if importlib.util.find_spec(name) is None]):
        raise UserError(f"{' and '.join(missing)} not installed", f"pip install {' '.join(missing)}")
    if not isinstance(task.model, torch.nn.Module):
        fix = "export their weights to a .safetensors file"
        raise UserError("the task has several models, and a graph has one", fix)
    task.model.load_state_dict(torch.load(weights, map_location="cpu", weights_only=True))
    task.model.eval()
    given = {name: torch.from_numpy(array) for name, array in batch.items()}
    tensors = ReadNames(given)
    with torch.no_grad():
        outputs = named_outputs(task.forward(task.model, tensors))
    names = list(tensors.names) or list(given)[:1]
    arrays = tuple(given[name] for name in names)
    shapes = {"arrays": tuple({0: torch.export.Dim.AUTO} for _ in names)}
    made = None
    try:
        program = torch.export.export(ForwardPass(task, names).eval(), arrays, dynamic_shapes=shapes)
        if to_onnx:
            made = torch.onnx.export(program, input_names=names, output_names=list(outputs), verbose=False)
            assert made is not None, "with a program and without a path, the graph is returned"
    except Exception as error:  # torch's exporters raise errors of many kinds
        what = f"the model's forward pass cannot be traced: {str(error).strip().splitlines()[0][:300]}"
        raise UserError(what, "see torch.export's limits; weights alone: a .safetensors file") from error
    if made is not None:
        with file_errors(f"{output} cannot be written", "choose another --output"):
            save_onnx(made.save, output)
    else:
        replace_whole(output, lambda path: save_program(program, path))


def save_onnx(save: Callable[[str], object], output: Path) -> None:
    """Saves a graph, whose weights are in a second file next to it, named after it, if they exceed 1.5 GiB."""
    with tempfile.TemporaryDirectory(dir=output.parent) as folder:
        save(str(Path(folder, output.name)))
        for path in sorted(Path(folder).iterdir(), key=lambda one: one.name == output.name):  # the graph last
            sync(path)
            path.replace(output.with_name(path.name))


def save_program(program: torch.export.ExportedProgram, path: Path) -> None:
    """Saves it whatever the path's suffix."""
    with path.open("wb") as file:
        torch.export.save(program, file)

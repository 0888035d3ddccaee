"""Frozen weights that checkpoints leave in their source."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpctrain import CheckpointStore, UserError, fit, load_config
from hpctrain.checkpoint import safetensors
from hpctrain.checkpoint.frozen import FrozenRecord, FrozenSource, FrozenWeight, LeftOut
from hpctrain.checkpoint.reading import open_source
from hpctrain.cli import main
from hpctrain.train.state import ArrayTensor

pytest.importorskip("torch")
from tests.tasks.valueless_tasks import words, write_weights

pytestmark = pytest.mark.usefixtures("environment_of_a_run")

BASE = "base.safetensors"


def train(folder: Path, name: str, steps: int, source: str = BASE, **keys: Any) -> None:
    """Begins or resumes a run; in keys, __ means a dot."""
    given = {"schedule__kind": "constant", "checkpoint__frozen": "source", "task_args__meta": "true", **keys}
    fit(load_config(None, words(folder, name, folder / source, steps, **given)))


def export(folder: Path, name: str, *options: str) -> dict[str, Any]:
    """The weights of a run's newest checkpoint."""
    file = folder / f"{name}.safetensors"
    assert main(["ckpt", "export", str(folder / name), "-o", str(file), *options]) == 0
    return {name: array.tobytes() for name, array in safetensors.read(file)[0].items()}


@pytest.fixture
def begun(tmp_path: Path) -> Path:
    """A folder with a run, ``lora``, and the source of its frozen weights."""
    write_weights(tmp_path / BASE, 8)
    train(tmp_path, "lora", 2)
    return tmp_path


def test_a_resumed_run_is_the_one_whose_checkpoints_hold_all(begun, cli):
    train(begun, "lora", 4)
    train(begun, "whole", 4, checkpoint__frozen="saved")
    lora, whole = (CheckpointStore(begun / name / "checkpoints") for name in ("lora", "whole"))
    held, left = ({name for name, _ in store.manifest(4).tensors()} for store in (lora, whole))
    left -= held
    assert left == {f"model/{layer}.weight" for layer in range(0, 16, 2)}, "of frozen layers"
    found, wanted = (store.load(4).arrays for store in (lora, whole))
    assert found.keys() == wanted.keys()
    for name in wanted:
        np.testing.assert_array_equal(found[name], wanted[name], err_msg=name)
    assert export(begun, "lora") == export(begun, "whole")
    (begun / BASE).unlink()
    assert export(begun, "lora", "--trainable-only") == export(begun, "whole", "--trainable-only")
    cli("ckpt", "inspect", begun / "lora")


def changed(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1  # of a trained bias, which does not matter
    content[-500] ^= 1  # of a frozen one
    file.write_bytes(content)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (Path.unlink, "base.safetensors, in which checkpoints left the frozen weights, does not exist"),
        (changed, "base.safetensors has changed since the run began: 14.weight is not what checkpoints left in it"),
        (lambda file: write_weights(file, 8, without="4.weight"), "has changed since the run began: 4.weight"),
    ],
)
def test_another_source_is_refused(spoil, said, begun, cli):
    spoil(begun / BASE)
    with pytest.raises(UserError, match=said):
        train(begun, "lora", 4)
    out = str(begun / "out.safetensors")
    assert said in cli("ckpt", "export", begun / "lora", "-o", out, code=64).err
    assert said in cli("ckpt", "verify", begun / "lora", code=70).out


def test_a_source_on_a_file_server_that_fails_over_is_waited_for(begun, monkeypatch):
    """It was said not to exist, which ended the run for good."""
    real, left = os.stat, [1, 1]
    monkeypatch.setattr("hpctrain.checkpoint.read_retry.PAUSES_S", (0.0, 0.0))

    def stat(path, **options):
        if str(path) == str(begun / BASE) and left:
            left.pop()
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return real(path, **options)

    monkeypatch.setattr(os, "stat", stat)
    source = FrozenSource(FrozenRecord(BASE, str(begun / BASE), {}), (0, 1), open_source)
    source.verify()
    assert not left


def test_a_source_that_was_moved_is_named_by_the_run_file(begun):
    (begun / BASE).rename(begun / "moved.safetensors")
    train(begun, "lora", 3, "moved.safetensors")
    export(begun, "lora")


def test_the_source_may_be_a_run_whose_source_is_another_file(begun):
    train(begun, "next", 2, "lora")
    train(begun, "lora", 4)  # its newest checkpoint is another one now
    train(begun, "next", 4, "lora")
    frozen = "model/0.weight"
    loaded = CheckpointStore(begun / "next/checkpoints").load()
    assert loaded.source and frozen in loaded.source
    assert loaded.source.record.path == str(begun / "lora/checkpoints/step-000000002")
    np.testing.assert_array_equal(
        loaded.arrays[frozen], CheckpointStore(begun / "lora/checkpoints").load().arrays[frozen]
    )


def test_what_the_task_changes_is_saved():
    """Such as a target network."""
    tensors = [ArrayTensor(f"model/{name}", np.zeros((3, 2), np.float32)) for name in "abc"]
    weight = FrozenWeight("there", (3, 2), "float32", "00000000")
    record = FrozenRecord("base", "/base", {tensor.name: weight for tensor in tensors[:2]})
    left_out = LeftOut(record, tensors, lambda: None)
    assert left_out.without(tensors) == tensors[2:]
    tensors[1].value[2, 1] = 1
    left_out.update(tensors, lambda changed, what: [changed, []])
    assert left_out.without(tensors) == tensors[1:]
    left_out.update(tensors, lambda changed, what: [[], ["model/a"]])
    assert left_out.without(tensors) == tensors, "as another rank has found"


@pytest.mark.parametrize("shape", [(), (1,), (16384,), (40_000, 3), (5, 30_000)])
def test_a_change_of_the_last_rows_is_found(shape):
    """Such as those of new tokens."""
    tensor = ArrayTensor("model/a", np.zeros(shape, np.float32))
    record = FrozenRecord("base", "/base", {"model/a": FrozenWeight("there", shape, "float32", "00000000")})
    left_out = LeftOut(record, [tensor], lambda: None)
    for saved in ([], [tensor]):
        left_out.update([tensor], lambda changed, what: [changed])
        assert left_out.without([tensor]) == saved
        tensor.value[(-1,) * len(shape)] = 1


def test_what_a_resumed_run_trains_is_saved():
    """A layer that was frozen before."""
    tensor = ArrayTensor("model/a", np.zeros(3, np.float32), is_trained=True)
    record = FrozenRecord("base", "/base", {"model/a": FrozenWeight("there", (3,), "float32", "00000000")})
    left_out = LeftOut(record, [tensor], lambda: None)
    assert left_out.without([tensor]) == [tensor]
    left_out.update([tensor], lambda changed, what: [changed])
    assert left_out.without([tensor]) == [tensor] and not left_out.record.weights

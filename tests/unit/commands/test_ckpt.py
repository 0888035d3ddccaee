"""``hpctrain ckpt``."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from hpctrain.checkpoint.store import CheckpointStore
from hpctrain.cli import main


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder with checkpoints of steps 1 and 2."""
    store = CheckpointStore(tmp_path / "checkpoints")
    for step in (1, 2):
        odd = np.array([np.nan, np.inf, 1, 3], np.float32)
        weight = np.full((3, 2), step, np.float32)
        store.save({"model/a/weight": weight, "model/a/odd": odd, "model/b.bias": np.arange(step)}, {"time": 0}, step)
    store.close()
    return tmp_path


def damage(run: Path, step: int) -> None:
    shard = run / "checkpoints" / f"step-{step:09d}" / "shard-00000-of-00001.h5"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)


def test_ls(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ckpt", "ls", str(run)]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2
    (run / "checkpoints" / "step-000000002" / "manifest.json").write_text("{}")
    assert main(["ckpt", "ls", str(run), "--json"]) == 0
    first, second = json.loads(capsys.readouterr().out)
    assert (first["step"], first["ranks"], first["tensors"]) == (1, 1, 3)
    assert "cut short" in second["problem"]


def test_verify(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ckpt", "verify", str(run / "checkpoints")]) == 0
    damage(run, 2)
    assert main(["ckpt", "verify", str(run), "--json"]) == 70
    assert [row["sound"] for row in json.loads(capsys.readouterr().out.splitlines()[-1])] == [True, False]
    assert main(["ckpt", "verify", str(run), "--step", "1"]) == 0
    assert main(["ckpt", "verify", str(run / "checkpoints" / "step-000000002")]) == 70


def test_inspect(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ckpt", "inspect", str(run), "--step", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:3] == ["model/", "  a/"]
    assert "min 1" in lines[3] and "max 3" in lines[3] and "1 NaN 1 infinite" in lines[3]
    assert main(["ckpt", "inspect", str(run), "--name", "model/a", "--json"]) == 0
    odd, weight = json.loads(capsys.readouterr().out)["tensors"]
    assert (odd["name"], odd["nans"], odd["mean"]) == ("model/a/odd", 1, 2)
    assert (weight["shape"], weight["dtype"], weight["most"]) == ([3, 2], "float32", 2)


@pytest.mark.parametrize(("prefix", "tensors"), [("model/b", 1), ("model/b.bias", 1), ("model/", 3), ("", 3)])
def test_inspect_knows_the_names_of_both_frameworks(
    run: Path, capsys: pytest.CaptureFixture[str], prefix: str, tensors: int
) -> None:
    assert main(["ckpt", "inspect", str(run), "--name", prefix, "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["tensors"]) == tensors


def test_inspect_never_falls_back(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damage(run, 2)
    assert main(["ckpt", "inspect", str(run)]) == 70
    assert "is damaged" in capsys.readouterr().err


def test_diff(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = (str(run / "checkpoints" / f"step-00000000{step}") for step in (1, 2))
    assert main(["ckpt", "diff", first, first]) == 0
    assert capsys.readouterr().out == "3 tensors are equal, 0 differ\n"
    assert main(["ckpt", "diff", first, second, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["equal"] == 1
    assert found["different"] == [
        {"name": "model/a/weight", "kind": "values", "largest": 1.0, "changed": 6},
        {"name": "model/b.bias", "kind": "shape", "largest": None, "changed": 0},
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["ls", "/nowhere"], "has no checkpoint"),
        (["inspect", "{run}", "--step", "9"], "no checkpoint of step 9"),
        (["inspect", "{run}", "--name", "nothing"], "no tensor below nothing"),
        (["export", "{run}", "-o", "weights.bin"], "names no format"),
        (["export", "{run}", "-o", "/nowhere/a.safetensors"], "cannot be written"),
        (["export", "{run}", "-o", "a.safetensors", "--ema"], "no averaged weights"),
        (["export", "{run}", "-o", "a.weights.h5"], "not saved by a training run"),
    ],
)
def test_the_users_mistakes(run: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    assert main(["ckpt", *(word.replace("{run}", str(run)) for word in words)]) == 64
    assert message in capsys.readouterr().err

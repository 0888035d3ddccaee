"""``hpctrain ckpt``."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

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


def test_ls(run, cli):
    assert len(cli("ckpt", "ls", run).out.splitlines()) == 2
    (run / "checkpoints" / "step-000000002" / "manifest.json").write_text("{}")
    first, second = json.loads(cli("ckpt", "ls", run, "--json").out)
    assert (first["step"], first["ranks"], first["tensors"]) == (1, 1, 3)
    assert "cut short" in second["problem"]


def test_ls_names_one_checkpoint_as_the_best(tmp_path, cli):
    """Each that was the best when it was saved had the word."""
    store = CheckpointStore(tmp_path / "checkpoints")
    for step, is_best in ((1, True), (2, True), (3, False)):
        store.save({"model/x": np.ones(2)}, {"time": 0, "best": is_best}, step)
    store.close()
    text = cli("ckpt", "ls", tmp_path).out
    assert [line.endswith("  best") for line in text.splitlines()] == [False, True, False]
    assert "1 rank " in text and "1 ranks" not in text


@pytest.mark.slow
def test_verify(run, cli):
    cli("ckpt", "verify", run / "checkpoints")
    damage(run, 2)
    assert [row["sound"] for row in json.loads(cli("ckpt", "verify", run, "--json", code=70).out.splitlines()[-1])] == [
        True,
        False,
    ]
    cli("ckpt", "verify", run, "--step", "1")
    cli("ckpt", "verify", run / "checkpoints" / "step-000000002", code=70)


def test_inspect(run, cli):
    lines = cli("ckpt", "inspect", run, "--step", "1").out.splitlines()
    assert lines[1:3] == ["model/", "  a/"]
    assert "min 1" in lines[3] and "max 3" in lines[3] and "1 NaN 1 infinite" in lines[3]
    odd, weight = json.loads(cli("ckpt", "inspect", run, "--name", "model/a", "--json").out)["tensors"]
    assert (odd["name"], odd["nans"], odd["mean"]) == ("model/a/odd", 1, 2)
    assert (weight["shape"], weight["dtype"], weight["most"]) == ([3, 2], "float32", 2)


@pytest.mark.parametrize(("prefix", "tensors"), [("model/b", 1), ("model/b.bias", 1), ("model/", 3), ("", 3)])
def test_inspect_knows_the_names_of_both_frameworks(run, cli, prefix, tensors):
    assert len(json.loads(cli("ckpt", "inspect", run, "--name", prefix, "--json").out)["tensors"]) == tensors


def test_inspect_never_falls_back(run, cli):
    damage(run, 2)
    assert "is damaged" in cli("ckpt", "inspect", run, code=70).err


def test_diff(run, cli):
    first, second = (str(run / "checkpoints" / f"step-00000000{step}") for step in (1, 2))
    assert cli("ckpt", "diff", first, first).out == "3 tensors are equal, 0 differ\n"
    found = json.loads(cli("ckpt", "diff", first, second, "--json", code=1).out)
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
def test_the_users_mistakes(run, cli, words, message):
    assert message in cli("ckpt", *(word.replace("{run}", str(run)) for word in words), code=64).err


def forge(run: Path, change: Callable[[Any], object]) -> None:
    """Changes the manifest of step 2 and gives it a right checksum."""
    path = run / "checkpoints" / "step-000000002" / "manifest.json"
    manifest = json.loads(path.read_bytes())["manifest"]
    change(manifest)
    body = json.dumps(manifest).replace('"1e999"', "1e999").encode()
    path.write_bytes(b'{"sha256": "%s", "manifest": %s}\n' % (hashlib.sha256(body).hexdigest().encode(), body))


def add(manifest: Any, **values: Any) -> None:
    """A tensor without values."""
    entry = {"name": "new", "dtype": "float32", "shape": [0], "rank": None, "begin": [0], "count": [0], "offset": 0}
    manifest["shards"][0]["tensors"].append(entry | {"crc32": ""} | values)


ODD: list[tuple[Callable[[Any], object], str]] = [
    (lambda m: m["meta"].update(time="noon"), ""),
    (lambda m: m["meta"].update(time=[1]), ""),
    (lambda m: m["meta"].update(time=1e300), ""),
    (lambda m: m["meta"].update(time="1e999"), "1e999 is not JSON"),
    (lambda m: m["shards"][0]["tensors"][0].update(name="model/\ud800"), "is not a name"),
    (lambda m: add(m, shape=[2**55, 0, 2**55], begin=[0, 0, 0], count=[2**55, 0, 2**55]), "new cannot have the shape"),
    (lambda m: add(m, name="model/a/odd", rank=0), "model/a/odd belongs to single ranks and to all of them"),
    (lambda m: m["meta"].update(identity=[]), ""),
    (lambda m: m["meta"].update(identity={"config": []}), ""),
    (lambda m: m["meta"].update(identity={"config": {"train": {}, "task": 3}}), ""),
    (lambda m: m["meta"].update(other_names={"model/a/tied": []}), ""),
]


@pytest.mark.parametrize(("change", "problem"), ODD)
def test_odd_manifests_with_right_checksums(run, capfd, change, problem):
    first, second = (str(run / "checkpoints" / f"step-00000000{step}") for step in (1, 2))
    forge(run, change)
    for words in (["ls", str(run)], ["verify", second], ["inspect", second], ["diff", first, second]):
        expected = {"ls": 0, "diff": 1}.get(words[0], 0) if not problem else 0 if words[0] == "ls" else 70
        assert main(["ckpt", *words]) == expected
        said = "".join(capfd.readouterr())
        assert problem in said
    assert main(["ckpt", "ls", str(run), "--json"]) == 0
    weights = str(run / "a.safetensors")
    assert main(["ckpt", "export", second, "-o", weights]) == (70 if problem else 0)
    assert main(["ckpt", "export", second, "-o", str(run / "a.weights.h5")]) in (64, 70)


@pytest.mark.slow
def test_names_that_no_terminal_can_show(run):
    forge(run, lambda manifest: manifest.update(shards="\ud800"))
    for words in (["ls", str(run)], ["verify", str(run)]):
        done = subprocess.run([sys.executable, "-m", "hpctrain", "ckpt", *words], capture_output=True, text=True)
        assert r"\ud800 is not a list" in done.stdout and not done.stderr


def test_numbers_at_the_end_of_the_range(tmp_path, cli):
    store = CheckpointStore(tmp_path)
    most = np.finfo(np.float64).max
    store.save({"model/a": np.array([most, most, most])}, step=1)
    store.save({"model/a": np.array([-most, most, most])}, step=2)
    store.close()
    (summary,) = json.loads(cli("ckpt", "inspect", tmp_path, "--step", "1", "--json").out, parse_constant=pytest.fail)[
        "tensors"
    ]
    assert summary["least"] == summary["mean"] == summary["most"] == most
    (summary,) = json.loads(cli("ckpt", "inspect", tmp_path, "--step", "2", "--json").out, parse_constant=pytest.fail)[
        "tensors"
    ]
    assert summary["mean"] == pytest.approx(most / 3)
    cli("ckpt", "diff", *(str(tmp_path / f"step-00000000{step}") for step in (1, 2)), code=1)

"""Folders of torch.distributed.checkpoint as a source of initial weights."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpctrain.checkpoint import dcp
from hpctrain.checkpoint.format.layout import DamagedCheckpoint
from hpctrain.checkpoint.initial import load_initial
from hpctrain.checkpoint.initial_match import WeightSource
from hpctrain.checkpoint.lora import Weights
from hpctrain.checkpoint.weight_files import open_weight_files
from hpctrain.comm.world import alone
from hpctrain.errors import UserError

torch = pytest.importorskip("torch")
import torch.distributed.checkpoint as of_torch  # noqa: E402 (after the skip)
from torch.distributed.checkpoint import metadata  # noqa: E402

from tests.tasks.torch_tasks import make_framework  # noqa: E402

nn = torch.nn
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")
TENSORS = {
    "rows": torch.arange(35.0, dtype=torch.float64).view(7, 5),
    "transposed": torch.arange(12.0).view(3, 4).T,
    "channels_last": torch.arange(48.0).view(2, 2, 3, 4).to(memory_format=torch.channels_last),
    "part": torch.arange(20.0).view(4, 5)[:, 1:3],
    "halves": torch.arange(6.0, dtype=torch.bfloat16),
    "scalar": torch.tensor(5),
    "empty": torch.zeros(0, 3),
    "flags": torch.tensor([True, False]),
}


def saved(state: Mapping[str, Any], folder: Path) -> Path:
    of_torch.save(dict(state), checkpoint_id=folder)
    return folder


def opened(folder: Path) -> Weights:
    weights = open_weight_files(str(folder))
    assert weights is not None
    return weights


def values_of(tensor: Any) -> Any:
    plain = tensor.contiguous()
    return plain.view(torch.uint16).numpy() if plain.dtype == torch.bfloat16 else plain.numpy()


@pytest.mark.parametrize(
    ("state", "names"),
    [
        (TENSORS, list(TENSORS)),
        ({"model": TENSORS, "optimizer": {"state": {"rows": torch.ones(3)}}, "step": 3}, list(TENSORS)),
        ({"state_dict": {"model": {"a": torch.ones(2)}}, "epoch": 1}, ["model.a"]),
        ({"model.layers.0": torch.ones(2), "head": torch.ones(3)}, ["model.layers.0", "head"]),
    ],
)
def test_a_folder_has_the_tensors_of_the_model(state, names, tmp_path):
    weights = opened(saved(state, tmp_path))
    assert sorted(weights.arrays) == sorted(names)
    for name, tensor in TENSORS.items() if "rows" in names else ():
        whole = values_of(tensor)
        assert weights.dtypes[name] == str(tensor.dtype).removeprefix("torch.")
        assert weights.arrays[name].dtype == weights.arrays.dtype_of(name) == whole.dtype
        np.testing.assert_array_equal(weights.arrays[name], whole)
        if whole.ndim > 1:
            inner = weights.arrays.part(name, (0, 1, *(0,) * (whole.ndim - 2)), (len(whole), 1, *whole.shape[2:]))
            np.testing.assert_array_equal(inner, whole[:, 1:2])


def in_chunks(folder: Path, change: Callable[[Any], object] = lambda listed: None) -> Any:
    """A matrix of which four ranks have saved a part each, of unequal sizes, in two files."""
    whole = torch.arange(35.0).view(7, 5)
    files, places, chunks = {"__0_0.distcp": b"", "__1_0.distcp": b""}, {}, []
    for number, (rows, columns) in enumerate((r, c) for r in ((0, 4), (4, 7)) for c in ((0, 3), (3, 5))):
        path, file = folder / "part", f"__{number % 2}_0.distcp"
        torch.save(whole[slice(*rows), slice(*columns)].clone(), path)
        begin = torch.Size([rows[0], columns[0]])
        chunks.append(metadata.ChunkStorageMetadata(begin, torch.Size([rows[1] - rows[0], columns[1] - columns[0]])))
        info = of_torch.filesystem._StorageInfo(file, len(files[file]), path.stat().st_size)
        places[metadata.MetadataIndex("a", begin, number)] = info
        files[file] += path.read_bytes()
    for file, content in files.items():
        (folder / file).write_bytes(content)
    described = metadata.TensorStorageMetadata(metadata.TensorProperties(whole.dtype), whole.shape, chunks)
    listed = metadata.Metadata({"a": described}, None, places)
    change(listed)
    (folder / ".metadata").write_bytes(pickle.dumps(listed))
    return whole.numpy()


def test_a_part_needs_only_the_chunks_that_have_some_of_it(tmp_path):
    whole = in_chunks(tmp_path)
    arrays = opened(tmp_path).arrays
    for begin in np.ndindex(7, 5):
        for shape in np.ndindex(8 - begin[0], 6 - begin[1]):
            wanted = whole[tuple(map(slice, begin, np.add(begin, shape)))]
            np.testing.assert_array_equal(arrays.part("a", begin, shape), wanted)
    (tmp_path / "__1_0.distcp").unlink()
    np.testing.assert_array_equal(opened(tmp_path).arrays.part("a", (1, 0), (6, 3)), whole[1:, :3])


def test_a_model_begins_with_them_and_its_average_too(tmp_path):
    def model() -> Any:
        return nn.Sequential(nn.Linear(12, 4), nn.BatchNorm1d(4))

    state = model().state_dict()
    saved({"model": {f"net.{name}": one for name, one in state.items()}, "optimizer": {"a": torch.ones(3)}}, tmp_path)
    framework = make_framework(alone(), model, ema_decay=0.5)
    match, _ = load_initial(WeightSource(str(tmp_path), {"net.": ""}), framework)
    assert not match.missing + match.unexpected + match.reshaped
    assert all(torch.equal(one, state[name]) for name, one in framework.model.state_dict().items())


class Evil:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


@pytest.mark.parametrize(
    "change",
    {
        "evil": lambda content, made: pickle.dumps(Evil(made)),
        "evil inside": lambda content, made: content[:-1] + pickle.dumps([Evil(made)])[2:],
        "list": lambda content, made: pickle.dumps([1, "a"]),
        "object": lambda content, made: pickle.dumps(metadata.StorageMeta("a")),
        "old protocol": lambda content, made: pickle.dumps({"a": 1}, 0),
        "half": lambda content, made: content[: len(content) // 2],
        "text": lambda content, made: b"hello",
        "nothing": lambda content, made: b"",
    }.values(),
)
def test_a_list_that_is_none_is_refused_and_nothing_is_run(change, tmp_path):
    folder, made = tmp_path / "folder", tmp_path / "made"
    path = saved(TENSORS, folder) / ".metadata"
    path.write_bytes(change(path.read_bytes(), made))
    with pytest.raises(UserError, match=r"is not a list of tensors by torch.distributed.checkpoint"):
        opened(folder)
    assert not made.exists()


@pytest.mark.parametrize(
    "change",
    [
        lambda listed: listed.state_dict_metadata["a"].chunks.pop(),
        lambda listed: listed.state_dict_metadata["a"].chunks.append(listed.state_dict_metadata["a"].chunks[0]),
        lambda listed: listed.storage_data.popitem(),
        lambda listed: setattr(listed.state_dict_metadata["a"], "size", torch.Size([7, 4])),
        lambda listed: setattr(next(iter(listed.storage_data.values())), "relative_path", "../other"),
        lambda listed: setattr(next(iter(listed.storage_data.values())), "offset", -1),
        lambda listed: setattr(listed, "storage_data", Evil(Path("evil"))),
    ],
)
def test_chunks_that_do_not_make_up_their_tensors_are_refused(change, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    in_chunks(tmp_path, change)
    with pytest.raises(UserError, match="is not a list of tensors"):
        opened(tmp_path)
    assert not Path("evil").exists()


def test_a_type_that_cannot_be_read_is_named(tmp_path):
    saved({"scales": torch.zeros(3).to(torch.float8_e4m3fn)}, tmp_path)
    with pytest.raises(UserError, match=r"scales of .* is float8_e4m3fn, which cannot be read"):
        opened(tmp_path)


def test_a_file_that_is_cut_off_is_damaged(tmp_path):
    saved({"a": torch.ones(3), "b": torch.ones(4)}, tmp_path)
    path = tmp_path / "__0_0.distcp"
    path.write_bytes(path.read_bytes()[:-1])
    arrays = opened(tmp_path).arrays
    np.testing.assert_array_equal(arrays["a"], np.ones(3))
    with pytest.raises(DamagedCheckpoint, match=r"__0_0.distcp is damaged: at byte .* is not what .metadata lists"):
        arrays["b"]


@pytest.mark.parametrize("content", [torch.ones(2, 3), torch.ones(3, 2, dtype=torch.float64), b"hello", "object"])
def test_a_chunk_that_is_something_else_is_refused_and_nothing_is_run(content, tmp_path):
    path, listed = tmp_path / "a.distcp", tmp_path / ".metadata"
    made = tmp_path / "made"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        torch.save(Evil(made) if isinstance(content, str) else content, path)
    size = torch.Size([3, 2])
    chunk = metadata.ChunkStorageMetadata(torch.Size([0, 0]), size)
    described = metadata.TensorStorageMetadata(metadata.TensorProperties(torch.float32), size, [chunk])
    info = of_torch.filesystem._StorageInfo("a.distcp", 0, path.stat().st_size)
    places = {metadata.MetadataIndex("a", chunk.offsets): info}
    listed.write_bytes(pickle.dumps(metadata.Metadata({"a": described}, {}, places)))
    with pytest.raises((UserError, DamagedCheckpoint), match=r"a.distcp"):
        opened(tmp_path).arrays["a"]
    assert not made.exists()


def test_a_pickle_of_the_newest_protocol_is_parsed():
    value = {"a": [1, -2, 70_000, 2**40, "x" * 300, None, ("b", 1.5), (1, 2, 3), (1, 2, 3, 4), ()], "c": {}}
    for protocol in (4, 5):
        assert dcp.parsed(pickle.dumps(value, protocol)) == value

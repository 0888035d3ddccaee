"""Fine-tuning: initial weights from files of other programs, adapters alone, and folders for ``from_pretrained``."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from hpctrain.checkpoint import export, safetensors
from hpctrain.checkpoint.contents import trained_alone
from hpctrain.checkpoint.initial import load_initial, with_adapters
from hpctrain.checkpoint.initial_match import Match, WeightSource, renamed, require_meant
from hpctrain.checkpoint.lora import merge_lora
from hpctrain.checkpoint.reporter import lines_about
from hpctrain.checkpoint.store import CheckpointStore, open_saver
from hpctrain.checkpoint.weight_files import files_of, join_weights, weights_of_file
from hpctrain.cli import main
from hpctrain.comm.group import Group
from hpctrain.comm.world import alone
from hpctrain.errors import UserError
from hpctrain.run.events import InitialWeights
from hpctrain.train.state import ArrayTensor

torch = pytest.importorskip("torch")
from tests.tasks.torch_tasks import make_framework  # noqa: E402 (after the skip)

nn = torch.nn


class Network(nn.Module):
    """An encoder and a head."""

    def __init__(self, wide: int = 3) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(12, 4), nn.BatchNorm1d(4))
        self.head = nn.Linear(4, wide)

    def forward(self, x: Any) -> Any:
        return self.head(self.encoder(x))


def encoder(scale: float = 1.0) -> dict[str, Any]:
    """A pretrained encoder's state."""
    torch.manual_seed(7)
    return {f"0.{name}": value * scale for name, value in nn.Linear(12, 4).state_dict().items()} | {
        f"1.{name}": value for name, value in nn.BatchNorm1d(4).state_dict().items()
    }


def as_safetensors(state: dict[str, Any], path: Path) -> None:
    arrays = {name: np.asarray(value) for name, value in state.items()}
    parts = safetensors.encode(arrays, {name: value.dtype.name for name, value in arrays.items()}, {})
    path.write_bytes(b"".join(parts))


WRITERS: dict[str, Callable[[dict[str, Any], Path], None]] = {
    "weights.pt": torch.save,
    "weights.pth": lambda state, path: torch.save(state, path, _use_new_zipfile_serialization=False),
    "pytorch_model.bin": lambda state, path: torch.save({"state_dict": state, "epoch": 3}, path),
    "compiled.ckpt": lambda state, path: torch.save({f"_orig_mod.{name}": it for name, it in state.items()}, path),
    "weights.safetensors": as_safetensors,
}


@pytest.mark.parametrize("name", WRITERS)
def test_an_encoder_is_taken_from_each_kind_of_file_under_another_beginning(name, tmp_path):
    path, state = tmp_path / name, encoder()
    WRITERS[name](state, path)
    framework = make_framework(alone(), Network, ema_decay=0.5)
    head = framework.model.head.weight.detach().clone()
    match, _ = load_initial(WeightSource(str(path), {"": "encoder."}, ["head.*"]), framework)
    assert match.missing == ("head.weight", "head.bias") and not match.unexpected + match.reshaped
    assert torch.equal(framework.model.encoder[0].weight, state["0.weight"])
    assert torch.equal(framework.model.head.weight, head)
    average = next(it for it in framework.state() if it.name == "ema/encoder.0.weight")
    assert torch.equal(average.value, state["0.weight"])


def test_folders_of_hugging_face_models_in_one_file_and_in_several(tmp_path):
    state = Network().state_dict()
    as_safetensors(state, tmp_path / "model.safetensors")
    cut = tmp_path / "cut"
    cut.mkdir()
    files = {name: f"model-{number % 2}.safetensors" for number, name in enumerate(state)}
    (cut / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    for file in set(files.values()):
        as_safetensors({name: state[name] for name in state if files[name] == file}, cut / file)
    for folder in (tmp_path, cut):
        framework = make_framework(alone(), Network)
        assert set(load_initial(WeightSource(str(folder)), framework)[0].taken) == set(state)
        assert torch.equal(framework.model.head.weight, state["head.weight"])
    (cut / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../model.safetensors"}}))
    with pytest.raises(Exception, match="not a file in its folder"):
        load_initial(WeightSource(str(cut)), framework)


class Evil:
    """Runs when it is unpickled."""

    def __reduce__(self) -> Any:
        return print, ("unpickled",)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"weight": Evil()}, "not a PyTorch file that holds only weights"),
        (b"hello", "not a PyTorch file"),
        ({"epoch": 3}, "holds no state_dict"),
        ({"weight": torch.zeros(2), "epoch": 3}, "epoch of .* is an int, not"),
        ({"weight": torch.zeros(2).to_sparse()}, "is a torch.sparse_coo, not a dense tensor"),
        ({"weight": torch.zeros(2, dtype=torch.float8_e4m3fn)}, "float8_e4m3fn, which cannot be read"),
    ],
)
def test_files_that_hold_more_than_weights_are_refused_and_nothing_is_run(content, said, tmp_path, capsys):
    path = tmp_path / "weights.pt"
    path.write_bytes(content) if isinstance(content, bytes) else torch.save(content, path)
    with pytest.raises(UserError, match=said):
        load_initial(WeightSource(str(path)), make_framework(alone(), Network))
    assert "unpickled" not in capsys.readouterr().out


def test_a_file_of_another_kind_is_wrong_input(tmp_path):
    """It was a failure, exit code 70, after which a run is started again."""
    path = tmp_path / "wave.py"
    path.write_text("import numpy as np\n")
    with pytest.raises(UserError, match="is not a safetensors file"):
        load_initial(WeightSource(str(path)), make_framework(alone(), Network))


def test_a_partial_match_has_to_be_meant():
    wanted = {"model.a.weight": (2,), "model.b.weight": (2,), "head.weight": (5,)}
    found = {"a.weight": (2,), "b.weight": (2,), "head.weight": (3,), "head.bias": (3,), "pool": (1,)}
    with pytest.raises(UserError, match="no weight of x") as nothing:
        require_meant(WeightSource("x"), wanted, found)
    assert 'init_rename: {"": "model."}' in nothing.value.fix
    mapped = renamed(found, {"": "model.", "head.": "head."}, "x")
    assert mapped.keys() == {"model.a.weight", "model.b.weight", "head.weight", "head.bias", "model.pool"}
    with pytest.raises(
        UserError, match=r"1 have another shape \(head.weight\); not used: head.bias, model.pool"
    ) as error:
        require_meant(WeightSource("x", {"": "model."}), wanted, mapped)
    assert 'checkpoint.init_missing: ["head.*"]' in error.value.fix
    match = require_meant(WeightSource("x", {"": "model."}, ["head.*"]), wanted, mapped)
    assert match == Match(
        taken=("model.a.weight", "model.b.weight"),
        missing=(),
        unexpected=("head.bias", "model.pool"),
        reshaped=("head.weight",),
    )
    half = {"model.a.weight": (2,), "bert.b.weight": (2,), "head.weight": (5,)}
    with pytest.raises(UserError, match="1 are missing") as error:
        require_meant(WeightSource("x"), wanted, half)
    assert '{"bert.": "model."}' in error.value.fix
    with pytest.raises(UserError, match="no weight of x has a name that begins with 'decoder"):
        renamed(found, {"decoder.": ""}, "x")
    with pytest.raises(UserError, match="two weights of x would be called weight"):
        renamed({"a.weight": 1, "b.weight": 2}, {"a.": "", "b.": ""}, "x")


@pytest.fixture(scope="module")
def make_keras() -> Any:
    """A framework around a Keras model. TensorFlow is loaded before a test begins, since it changes the environment."""
    pytest.importorskip("keras")
    from tests.tasks.tensorflow_tasks import make_framework

    return make_framework


def test_keras_files_by_their_own_names(make_keras, tmp_path):
    import keras

    def model(width=3):
        layers = keras.layers
        return keras.Sequential(
            [keras.Input((12,)), layers.Dense(5), layers.BatchNormalization(), layers.Dense(width, name=f"head{width}")]
        )

    other = model()
    path = tmp_path / "pretrained.weights.h5"
    other.save_weights(path)
    framework = make_keras(alone(), model=model, ema_decay=0.5)
    match, _ = load_initial(WeightSource(str(path)), framework)
    assert len(match.taken) == 8 and not match.missing + match.unexpected
    for ours, theirs in zip(framework.task.model.variables, other.variables, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    np.testing.assert_array_equal(framework.source.averages[0], other.trainable_variables[0])

    wide = make_keras(alone(), model=lambda: model(7))
    before = wide.task.model.layers[-1].kernel.numpy()
    with pytest.raises(UserError, match=r"2 have another shape \(layers/dense_1/vars/0, layers/dense_1/vars/1\)"):
        load_initial(WeightSource(str(path)), wide)
    match, _ = load_initial(WeightSource(str(path), missing=["layers/dense_1/*"]), wide)
    assert match.reshaped == ("layers/dense_1/vars/0", "layers/dense_1/vars/1")
    np.testing.assert_array_equal(wide.task.model.layers[-1].kernel, before)
    np.testing.assert_array_equal(wide.task.model.layers[0].kernel, other.layers[0].kernel)
    (tmp_path / "text.weights.h5").write_text("hello")
    with pytest.raises(UserError, match="cannot be read"):
        load_initial(WeightSource(str(tmp_path / "text.weights.h5")), wide)
    with pytest.raises(UserError, match="of a Keras model"):
        load_initial(WeightSource(str(path)), make_framework(alone(), Network))


class Lora(nn.Module):
    """A frozen linear layer and its adapter, in PEFT's names."""

    def __init__(self, base_layer: Any, rank: int = 2, alpha: float = 8.0) -> None:
        super().__init__()
        self.base_layer, self.scale = base_layer.requires_grad_(False), alpha / rank
        self.lora_A = nn.Linear(base_layer.in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, base_layer.out_features, bias=False)

    def forward(self, x: Any) -> Any:
        return self.base_layer(x) + self.scale * self.lora_B(self.lora_A(x))


class Adapted(nn.Module):
    """A frozen encoder with statistics, an adapted layer, a new head."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(12).requires_grad_(False)
        self.layer = Lora(nn.Linear(12, 4))
        self.head = nn.Linear(4, 3)

    def forward(self, x: Any) -> Any:
        return self.head(self.layer(self.norm(x)))


def saved(framework: Any, folder: Path) -> str:
    """A checkpoint as a run makes it."""
    saver = open_saver(CheckpointStore(folder))
    state = framework.state()
    meta = {"other_names": framework.facts.other_names, "trained": trained_alone(state)}
    saver.begin(state, 1, meta, framework.host.synchronize)
    saver.finish().path_or_raise()
    saver.close()
    return str(folder)


def test_an_adapter_is_exported_alone_and_merged(tmp_path, cli):
    framework = make_framework(alone(), Adapted)
    x = np.random.default_rng(0).normal(size=(4, 12)).astype(np.float32)
    for _ in range(3):
        framework.step([{"x": x, "y": np.arange(4) % 3}], 4)
    path = saved(framework, tmp_path / "checkpoints")
    alone_file, whole = tmp_path / "adapter.safetensors", tmp_path / "merged.pt"
    cli("ckpt", "export", path, "-o", alone_file, "--trainable-only")
    assert set(safetensors.read(alone_file)[0]) == {
        "layer.lora_A.weight",
        "layer.lora_B.weight",
        "head.weight",
        "head.bias",
    }
    cli("ckpt", "export", path, "-o", whole, "--merge-lora", "8")
    plain = Adapted()
    plain.layer = nn.Linear(12, 4)
    plain.load_state_dict(torch.load(whole, weights_only=True))
    plain.eval(), framework.model.eval()
    torch.testing.assert_close(plain(torch.from_numpy(x)), framework.model(torch.from_numpy(x)))
    again = make_framework(alone(), Adapted)
    match, _ = load_initial(WeightSource(str(alone_file), missing=["norm.*", "layer.base_layer.*"]), again)
    assert torch.equal(again.model.layer.lora_B.weight, framework.model.layer.lora_B.weight) and len(match.taken) == 4


def test_a_plain_network_has_the_weights_of_one_with_adapters(tmp_path):
    plain, path = Adapted(), tmp_path / "plain.safetensors"
    plain.layer = nn.Linear(12, 4)
    as_safetensors(plain.state_dict(), path)
    framework = make_framework(alone(), Adapted)
    match, _ = load_initial(WeightSource(str(path), missing=["*.lora_*"]), framework)
    assert match.missing == ("layer.lora_A.weight", "layer.lora_B.weight") and not match.unexpected
    assert torch.equal(framework.model.layer.base_layer.weight, plain.layer.weight)


def test_names_of_peft_are_found_under_those_of_the_plain_network():
    wanted = {
        "base_model.model.a.base_layer.weight": "a.weight",
        "base_model.model.head.original_module.bias": "head.bias",
        "base_model.model.head.modules_to_save.default.bias": "head.bias",
        "b.weight": "b.weight",
    }
    source = {name: f"in the file: {name}" for name in ("a.weight", "head.bias", "b.weight", "c.weight")}
    found = with_adapters(source, [*wanted, "base_model.model.a.lora_A.default.weight"])
    assert found == {name: source[plain] for name, plain in wanted.items()} | {"c.weight": source["c.weight"]}


def test_a_whole_model_has_nothing_frozen(tmp_path, cli):
    path = saved(make_framework(alone(), Network), tmp_path / "checkpoints")
    out = tmp_path / "out.safetensors"
    cli("ckpt", "export", path, "-o", out, "--trainable-only", "--rename", "encoder.=bert.")
    assert {"bert.0.weight", "head.weight"} <= set(safetensors.read(out)[0])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--merge-lora", "8"], "no LoRA adapter"),
        (["--merge-lora", "8", "--trainable-only"], "--merge-lora needs the frozen weights"),
        (["--rename", "model."], "has no ="),
        (["--rename", "decoder.="], "begins with 'decoder.'"),
        (["--like", "."], "holds no config.json"),
    ],
)
def test_exports_that_cannot_be_made(options, said, tmp_path, cli, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = saved(make_framework(alone(), Network), tmp_path / "checkpoints")
    assert said in cli("ckpt", "export", path, "-o", tmp_path / "out.safetensors", *options, code=64).err


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "complex64"])
def test_adapters_are_merged_in_the_precision_of_the_weights(dtype):
    rng = np.random.default_rng(0)
    shapes = {"a.base_layer.weight": (4, 6), "a.lora_A": (2, 6), "a.lora_B": (4, 2)}
    arrays = {
        name: (rng.normal(size=shape) * (1 + 1j if dtype[0] == "c" else 1)).astype(dtype)
        for name, shape in shapes.items()
    }
    weight = merge_lora(arrays, dict.fromkeys(arrays, dtype), 4.0)[0]["a.weight"]
    base, down, up = (array.astype(np.result_type(dtype, np.float64)) for array in arrays.values())
    tolerance = 4 * np.finfo(dtype).eps  # a few operations, each with half a unit in the last place
    assert weight.dtype == dtype and np.allclose(weight, base + 2.0 * up @ down, rtol=tolerance, atol=4 * tolerance)


def test_adapters_of_other_kinds_are_not_merged():
    def arrays(**more):
        shapes = {"a.base_layer.weight": (4, 6), "a.lora_A.x.weight": (2, 6), "a.lora_B.x.weight": (4, 2)}
        named = {name.replace("__", "."): shape for name, shape in more.items()}
        return {name: np.ones(shape, np.float32) for name, shape in (shapes | named).items()}

    def merged(arrays):
        return merge_lora(arrays, dict.fromkeys(arrays, "float32"), 4.0)

    assert (merged(arrays())[0]["a.weight"] == 5).all()
    head = merged(arrays(**{"head__original_module__bias": (1,), "head__modules_to_save__x__bias": (2,)}))[0]
    assert head.keys() == {"a.weight", "head.bias"} and head["head.bias"].shape == (2,)
    for wrong, said in [
        ({"a__lora_magnitude_vector__x__weight": (4,)}, "is not merged here"),
        ({"a__lora_A__y__weight": (2, 6), "a__lora_B__y__weight": (4, 2)}, "is not merged here"),
        ({"b__lora_A__x__weight": (2, 6)}, "lacks b.lora_B.x.weight"),
        ({"a__lora_A__x__weight": (2, 5)}, "does not adapt a linear layer"),
    ]:
        with pytest.raises(UserError, match=said):
            merged(arrays(**wrong))


def test_a_folder_for_from_pretrained(tmp_path, cli):
    like = tmp_path / "base"
    like.mkdir()
    for name in ("config.json", "adapter_config.json", "tokenizer.json", "model.safetensors", "pytorch_model.bin"):
        (like / name).write_text("{}")
    path = saved(make_framework(alone(), Adapted), tmp_path / "checkpoints")
    for options, weights in (([], "model.safetensors"), (["--trainable-only"], "adapter_model.safetensors")):
        out = tmp_path / weights
        cli("ckpt", "export", path, "-o", out, "--like", like, *options)
        files = {"config.json", "adapter_config.json", "tokenizer.json", weights}
        assert {file.name for file in out.iterdir()} == files
        assert "head.weight" in safetensors.read(out / weights)[0]
    cli("ckpt", "export", path, "-o", like, "--like", like, code=64)
    assert (like / "model.safetensors").read_text() == "{}"


def test_a_large_model_is_exported_in_several_files_and_an_index(tmp_path, monkeypatch):
    """As Hugging Face writes them; what another export left there is gone, since loaders would prefer it."""
    like, out = tmp_path / "base", tmp_path / "out"
    like.mkdir()
    (like / "config.json").write_text("{}")
    path = saved(make_framework(alone(), Network), tmp_path / "checkpoints")
    command = ["ckpt", "export", path, "-o", str(out), "--like", str(like)]
    assert main(command) == 0
    whole = {name: array.copy() for name, array in safetensors.read(out / "model.safetensors")[0].items()}
    monkeypatch.setattr(export, "MAX_FILE_BYTES", 200)
    assert main(command) == 0
    index = json.loads((out / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert {one.name for one in out.iterdir()} == {"config.json", "model.safetensors.index.json", *files}
    assert len(files) > 1 and files[0] == f"model-00001-of-{len(files):05}.safetensors"
    assert index["metadata"]["total_size"] == sum(array.nbytes for array in whole.values())
    for name, file in index["weight_map"].items():
        assert np.array_equal(load_file(out / file)[name], whole[name])
    assert {one.name for one in files_of(out)} == set(files)
    for largest, left in ((1, len(whole)), (200, len(files))):  # more files, then as many as before
        monkeypatch.setattr(export, "MAX_FILE_BYTES", largest)
        assert main(command) == 0
        assert len([*out.glob("*.safetensors")]) == left
    monkeypatch.undo()
    assert main(command) == 0 and files_of(out) == [out / "model.safetensors"]
    assert [one.name for one in out.glob("*.safetensors")] == ["model.safetensors"]


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_torch_dcp_reads_such_folders_and_writes_them(tmp_path, monkeypatch, cli):
    """By its storage of safetensors: that of its own has a pickle."""
    from torch.distributed import checkpoint as dcp

    (tmp_path / "config.json").write_text("{}")
    path = saved(make_framework(alone(), Network), tmp_path / "checkpoints")
    monkeypatch.setattr(export, "MAX_FILE_BYTES", 200)
    out, back = tmp_path / "out", tmp_path / "back"
    cli("ckpt", "export", path, "-o", out, "--like", tmp_path)
    names = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
    found = {name: torch.full_like(value, 7) for name, value in Network().state_dict().items()}
    dcp.load(found, storage_reader=dcp.HuggingFaceStorageReader(str(out)))
    places = {name: 1 + number % 2 for number, name in enumerate(found)}
    dcp.save(found, storage_writer=dcp.HuggingFaceStorageWriter(str(back), fqn_to_index_mapping=places))
    read = join_weights(map(weights_of_file, files_of(back))).arrays
    assert found.keys() == names.keys() == set(read)
    for name, file in names.items():
        assert np.array_equal(found[name].numpy(), load_file(out / file)[name])
        assert np.array_equal(read[name], found[name].numpy())


@pytest.mark.parametrize("where", ["whole", "inside"])
def test_names_are_those_without_torch_compile(where, tmp_path):
    def compiled():
        model = Network()
        if where == "whole":
            return torch.compile(model, backend="eager")
        model.encoder = torch.compile(model.encoder, backend="eager")
        return model

    plain, other = make_framework(alone(), Network, ema_decay=0.5), make_framework(alone(), compiled, ema_decay=0.5)
    batch = {"x": np.ones((4, 12), np.float32), "y": np.arange(4) % 3}
    for framework in (plain, other):
        framework.step([batch], 4)
    names = [tensor.name for tensor in plain.state()]
    assert [tensor.name for tensor in other.state()] == names and not plain.facts.other_names
    assert not other.facts.other_names
    arrays = CheckpointStore(Path(saved(other, tmp_path))).load().arrays
    plain.load(arrays)
    assert plain.weights_hash() == other.weights_hash()


class OtherStage(Group):
    """A group of two stages, of which the other one says this."""

    def __init__(self, said: dict[str, Any]) -> None:
        super().__init__("pipeline")
        self.said = said

    def allgather(self, value: Any, what: str, timeout_s: float = 0.0) -> list[Any]:
        return [value, self.said]


def test_frozen_weights_of_other_stages_count():
    own = [ArrayTensor("model/a", np.zeros(1), is_trained=True)]
    assert trained_alone(own, OtherStage({"model/b": False})) == ["model/a"]
    assert trained_alone(own, OtherStage({"model/b": True})) is None


def test_a_stage_may_have_none_of_the_weights_that_the_model_takes(tmp_path):
    """Such as a new head. Of the whole model, it is told what was taken, and what is missing."""
    path = tmp_path / "weights.safetensors"
    as_safetensors({"body.weight": torch.ones(4, 4), "old.bias": torch.ones(3)}, path)
    head = make_framework(alone(), lambda: nn.ModuleDict({"head": nn.Linear(4, 3)}))
    before = head.weights_hash()
    match, _ = load_initial(WeightSource(str(path), missing=["head.*"]), head, OtherStage({"body.weight": [4, 4]}))
    assert match == Match(("body.weight",), ("head.weight", "head.bias"), ("old.bias",), ())
    assert head.weights_hash() == before
    with pytest.raises(UserError, match=r"does not have all weights of the model: 1 are missing \(body\.bias\)"):
        load_initial(
            WeightSource(str(path), missing=["head.*"]), head, OtherStage({"body.weight": [4, 4], "body.bias": [4]})
        )


def test_a_line_names_few_weights_of_many():
    """Adapters of a large model are hundreds; the event has all names."""
    many = tuple(f"layers.{number}.lora_A" for number in range(128))
    event = InitialWeights(step=0, path="base", taken=("a",), missing=many, unexpected=("b", "c"), reshaped=())
    assert list(lines_about(event))[1:] == [
        "missing: 128 tensors, e.g. layers.0.lora_A, layers.1.lora_A, layers.2.lora_A",
        "unexpected: b, c",
    ]

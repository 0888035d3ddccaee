"""Weights for other programs, and from them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.checkpoint import safetensors as ours
from hpctrain.checkpoint.export import write_whole
from hpctrain.checkpoint.format.layout import DamagedCheckpoint, convert_values
from hpctrain.checkpoint.initial import load_initial
from hpctrain.checkpoint.initial_match import Match, WeightSource, match_names
from hpctrain.checkpoint.store import CheckpointStore, open_saver
from hpctrain.cli import main
from hpctrain.comm.world import alone
from hpctrain.config.sections import Config, ReduceConfig, TrainConfig
from hpctrain.errors import UserError
from hpctrain.rank import wiring
from hpctrain.rank.problem import make_problem
from hpctrain.train.clock import IntervalClock
from hpctrain.train.framework import Framework
from hpctrain.train.state import ArrayTensor

torch = pytest.importorskip("torch")
STEPS = 2


def trained(kind: str, folder: Path) -> tuple[Any, Framework, Config]:
    """The digits task after a few steps: task, framework, config."""
    config = Config(
        name="digits",
        task=f"hpctrain.tasks.{kind}_digits:task",
        task_args={"data": str(folder / "digits")},
        train=TrainConfig(steps=STEPS, global_batch=32, ema_decay=0.5),
        reduce=ReduceConfig(kind="none"),
    )
    clock, world = IntervalClock(), alone()
    problem = make_problem(config, world)
    framework = wiring.make_framework(config, world, problem.task, clock)
    trainer = wiring.make_trainer(config, world, problem, framework, clock, [])
    with closing(trainer.data):
        trainer.fit()
    return problem.task, framework, config


def saved(framework: Framework, config: Config, folder: Path) -> Path:
    """A checkpoint of it, as a run makes it."""
    import dataclasses

    saver = open_saver(CheckpointStore(folder))
    identity = json.loads(json.dumps({"config": dataclasses.asdict(config)}))
    saver.begin(framework.state(), STEPS, {"identity": identity}, framework.host.synchronize)
    path = saver.finish().path_or_raise()
    saver.close()
    return path


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Framework, Path]]:
    """A torch run: its task, its framework, its checkpoint."""
    folder = tmp_path_factory.mktemp("torch")
    task, framework, config = trained("torch", folder)
    with closing(framework):
        yield task, framework, saved(framework, config, folder / "checkpoints")


@pytest.fixture(scope="module")
def keras_digits(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Framework, Path]]:
    """The same with Keras."""
    pytest.importorskip("keras")
    folder = tmp_path_factory.mktemp("keras")
    task, framework, config = trained("tensorflow", folder)
    with closing(framework):
        yield task, framework, saved(framework, config, folder / "checkpoints")


IMAGES = np.random.default_rng(0).random((5, 1, 8, 8), dtype=np.float32)


def test_torch_state_dict_loads_in_stock_pytorch(digits, tmp_path, cli):
    from hpctrain.tasks.torch_digits import Network

    task, _, path = digits
    cli("ckpt", "export", path, "-o", tmp_path / "out.pt", "--no-ema")
    network = Network()
    network.load_state_dict(torch.load(tmp_path / "out.pt", weights_only=True))
    assert torch.equal(network(torch.from_numpy(IMAGES)), task.model(torch.from_numpy(IMAGES)))


class Tied(torch.nn.Module):
    """Embedding and head share their weights, as in many language models."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.head = torch.nn.Embedding(10, 4), torch.nn.Linear(4, 10, bias=False)
        self.head.weight = self.token.weight


@pytest.mark.parametrize("averaged", [False, True])
def test_tied_weights_are_exported_under_each_name(averaged, tmp_path, cli):
    from tests.tasks.torch_tasks import make_framework

    framework = make_framework(alone(), Tied, ema_decay=0.5)
    average = next(tensor.value for tensor in framework.state() if tensor.name == "ema/token.weight")
    average.zero_()
    saver = open_saver(CheckpointStore(tmp_path))
    saver.begin(framework.state(), 1, {"other_names": framework.facts.other_names}, framework.host.synchronize)
    saver.finish().path_or_raise()
    saver.close()
    more = [] if averaged else ["--no-ema"]
    cli("ckpt", "export", tmp_path, "-o", tmp_path / "out.pt", *more)
    model = Tied()
    model.load_state_dict(torch.load(tmp_path / "out.pt", weights_only=True))
    assert torch.equal(model.head.weight, average if averaged else framework.model.head.weight)


class Counting(torch.nn.Linear):
    """Has extra state, at the top and below it."""

    def __init__(self, below: bool = True, odd: bool = False) -> None:
        super().__init__(12, 3)
        self.below = Counting(below=False) if below else None
        self.state: Any = {"calls": 3, "seen": np.zeros(2) if odd else torch.arange(2)}

    def get_extra_state(self) -> Any:
        return self.state

    def set_extra_state(self, state: Any) -> None:
        self.state = state


@pytest.mark.parametrize("odd", [False, True])
def test_extra_state_of_modules_is_exported_where_pytorch_wants_it(odd, tmp_path, capsys):
    from tests.tasks.torch_tasks import make_framework

    framework = make_framework(alone(), lambda: Counting(odd=odd))
    framework.model.state["calls"] = 7
    saver = open_saver(CheckpointStore(tmp_path))
    saver.begin(framework.state(), 1, {}, framework.host.synchronize)
    saver.finish().path_or_raise()
    saver.close()
    assert main(["ckpt", "export", str(tmp_path), "-o", str(tmp_path / "out.pt")]) == (64 if odd else 0)
    if odd:
        assert "_extra_state holds NumPy arrays" in capsys.readouterr().err
        return
    model = Counting()
    model.load_state_dict(torch.load(tmp_path / "out.pt", weights_only=True))
    assert model.state["calls"] == 7 and model.below is not None and model.below.state["calls"] == 3
    assert torch.equal(model.state["seen"], torch.arange(2))


def test_averaged_weights_differ(digits, tmp_path, cli):
    _, _, path = digits
    for name, more in (("plain.pt", ["--no-ema"]), ("ema.pt", ["--ema"]), ("default.pt", [])):
        cli("ckpt", "export", path, "-o", tmp_path / name, *more)
    names = ("plain.pt", "ema.pt", "default.pt")
    plain, average, default = (torch.load(tmp_path / name, weights_only=True) for name in names)
    assert all(torch.equal(default[name], average[name]) for name in average)
    assert plain.keys() == average.keys()
    assert not torch.equal(plain["conv1.weight"], average["conv1.weight"])


def test_safetensors_loads_in_the_stock_library(digits, tmp_path, cli):
    library = pytest.importorskip("safetensors.torch")
    task, _, path = digits
    cli("ckpt", "export", path, "-o", tmp_path / "out.safetensors", "--no-ema")
    found, expected = library.load_file(tmp_path / "out.safetensors"), task.model.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_keras_weights_load_in_stock_keras(keras_digits, tmp_path, cli):
    import keras

    from hpctrain.tasks.tensorflow_digits import network

    task, _, path = keras_digits
    cli("ckpt", "export", path, "-o", tmp_path / "out.weights.h5", "--no-ema")
    cli("ckpt", "export", path, "-o", tmp_path / "out.keras", "--no-ema")
    model = network()
    model.load_weights(tmp_path / "out.weights.h5")
    for one in (model, keras.saving.load_model(tmp_path / "out.keras")):
        np.testing.assert_array_equal(one(IMAGES), task.model(IMAGES))


def test_weights_of_a_model_with_a_step_of_its_own_load_in_stock_keras(tmp_path, cli):
    """The export did not know what ``compile`` had set, and Keras thinks that a model without ``call`` is not built."""
    pytest.importorskip("keras")
    from tests.tasks import keras_own_steps

    train = TrainConfig(steps=STEPS, global_batch=8)
    task = f"{keras_own_steps.__name__}:vae_task"
    config = Config(name="run", task=task, train=train, reduce=ReduceConfig(kind="none"))
    problem = make_problem(config, alone())
    with closing(wiring.make_framework(config, alone(), problem.task, IntervalClock())) as framework:
        framework.step([{"picture": keras_own_steps.pictures(8)}], 8)
        path = saved(framework, config, tmp_path / "checkpoints")
    cli("ckpt", "export", path, "-o", tmp_path / "out.weights.h5")
    fresh = keras_own_steps.vae()
    fresh.built, fresh.optimizer = True, None
    fresh.load_weights(tmp_path / "out.weights.h5")
    for mine, trained in zip(fresh.decoder.weights, problem.task.model.decoder.weights, strict=True):
        np.testing.assert_array_equal(mine, trained)


def test_adapters_of_keras_are_merged(tmp_path, cli):
    pytest.importorskip("keras")
    from tests.tasks import adapted_keras

    train = TrainConfig(steps=STEPS, global_batch=8)
    config = Config(name="run", task=f"{adapted_keras.__name__}:task", train=train, reduce=ReduceConfig(kind="none"))
    problem = make_problem(config, alone())
    with closing(wiring.make_framework(config, alone(), problem.task, IntervalClock())) as framework:
        framework.step([{"x": adapted_keras.INPUTS, "y": np.ones((8, 2), np.float32)}], 8)
        path = saved(framework, config, tmp_path / "checkpoints")
    wanted = np.asarray(problem.task.model(adapted_keras.INPUTS))
    words = ["ckpt", "export", str(path), "-o", str(tmp_path / "merged.weights.h5")]
    cli(*words)
    plain = adapted_keras.network()
    plain.load_weights(tmp_path / "merged.weights.h5")
    np.testing.assert_allclose(np.asarray(plain(adapted_keras.INPUTS)), wanted, rtol=1e-5, atol=1e-6)
    assert "Keras itself merges adapters" in cli(*words, "--merge-lora", "3", code=64).err


def test_keras_weights_for_a_folder_that_is_not_there(keras_digits, tmp_path, cli):
    _, _, path = keras_digits
    assert (
        "out.weights.h5 cannot be written"
        in cli("ckpt", "export", path, "-o", tmp_path / "none" / "out.weights.h5", code=64).err
    )


def test_both_frameworks_hold_the_same_arrays_under_documented_names(digits, keras_digits):
    from hpctrain.tasks.torch_digits import Network

    keras_arrays = CheckpointStore(keras_digits[2].parent).load().arrays
    torch_arrays = CheckpointStore(digits[2].parent).load().arrays
    state = {}
    for name, array in keras_arrays.items():
        if name.startswith("model/"):
            layer, kind = name.removeprefix("model/").split("/")
            axes = {4: (3, 2, 0, 1), 2: (1, 0), 1: (0,)}[array.ndim]
            full = f"{layer}.{'weight' if kind == 'kernel' else 'bias'}"
            state[full] = torch.from_numpy(array.transpose(axes).copy())
            assert tuple(state[full].shape) == torch_arrays[f"model/{full}"].shape
    network = Network()
    network.load_state_dict(state)
    with torch.no_grad():
        np.testing.assert_allclose(network(torch.from_numpy(IMAGES)), keras_digits[0].model(IMAGES), atol=1e-5)


def test_initial_weights_from_a_checkpoint_and_from_safetensors(digits, tmp_path, cli):
    task, _, path = digits
    cli("ckpt", "export", path, "-o", tmp_path / "out.safetensors", "--no-ema")
    for source in (path, path.parent, tmp_path / "out.safetensors"):
        new, framework, _ = trained("torch", tmp_path)
        with closing(framework):
            match, _ = load_initial(WeightSource(str(source)), framework)
            assert set(match.taken) == set(task.model.state_dict()) and not match.missing + match.unexpected
            expected = task.model.state_dict()["conv2.weight"]
            assert torch.equal(new.model.conv2.weight, expected)
            average = next(it for it in framework.state() if it.name == "ema/conv2.weight")
            value = np.empty(average.shape, np.float32)
            average.copy_into(value)
            np.testing.assert_array_equal(value, expected.numpy())


def test_initial_weights_that_do_not_match_are_listed():
    match = match_names({"a": (1,), "b": (2,), "c": (3,)}, {"a": (1,), "b": (9,), "d": (4,)})
    assert match == Match(taken=("a",), missing=("c",), unexpected=("d",), reshaped=("b",))


def test_no_match_at_all_is_an_error(digits, tmp_path):
    parts = ours.encode({"other": np.zeros(3, np.float32)}, {"other": "float32"}, {})
    (tmp_path / "other.safetensors").write_bytes(b"".join(parts))
    with pytest.raises(UserError, match="no weight of"):
        load_initial(WeightSource(str(tmp_path / "other.safetensors")), digits[1])


def test_no_nan_becomes_a_number_in_bfloat16():
    array = np.array([0x7FFFFFFF, 0xFFFFFFFF, 0x7FC00000, 0x7F800001], np.uint32).view(np.float32)  # CUDA's comes first
    assert np.isnan(convert_values(convert_values(array, "float32", "bfloat16"), "bfloat16", "float32")).all()


@given(st.floats(width=32, allow_nan=False))
def test_conversion_to_bfloat16_rounds_as_torch_does(value):
    array = np.array([value], np.float32)
    expected = torch.from_numpy(array).to(torch.bfloat16)
    assert convert_values(array, "float32", "bfloat16").view(np.int16)[0] == expected.view(torch.int16)[0]
    assert (
        convert_values(expected.view(torch.int16).numpy().view(np.uint16), "bfloat16", "float32")[0]
        == expected.float()[0]
    )


def test_safetensors_that_are_none(tmp_path):
    good = b"".join(ours.encode({"a": np.arange(6, dtype=np.float32)}, {"a": "float32"}, {}))
    path = tmp_path / "a.safetensors"
    path.write_bytes(good)
    np.testing.assert_array_equal(ours.read(path)[0]["a"], np.arange(6))
    header = int.from_bytes(good[:8], "little")
    foreign = [b"", good[:7], (2**63).to_bytes(8, "little") + good[8:], os.urandom(200)]
    damaged = [
        good[: 8 + header],
        good.replace(b"[0,24]", b"[0,20]"),
        good.replace(b"[0,24]", b"[0]   "),
        good.replace(b'"F32"', b'"F99"'),
        good.replace(b"[6]", b"[9]"),
    ]
    for error, files in ((UserError, foreign), (DamagedCheckpoint, damaged)):
        for data in files:
            path.write_bytes(data)
            with pytest.raises(error):
                ours.read(path)


@pytest.mark.parametrize("place", ["none/weights.pt", "file/weights.pt", "folder"])
def test_an_export_that_cannot_be_written_says_so(place, tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    with pytest.raises(UserError, match="cannot be written"):
        write_whole(tmp_path / place, [b"weights"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]


@pytest.mark.parametrize("outer", [False, True])
def test_an_export_of_local_training_says_whose_mean_it_is(outer, tmp_path, cli):
    names = ["model/w", *(["sync/outer"] if outer else [])]
    saver = open_saver(CheckpointStore(tmp_path))
    saver.begin([ArrayTensor(name, np.ones(3, np.float32)) for name in names], 1, {}, lambda: None)
    saver.finish().path_or_raise()
    saver.close()
    assert (
        "evaluations judge the outer weights" in cli("ckpt", "export", tmp_path, "-o", tmp_path / "out.safetensors").out
    ) == outer

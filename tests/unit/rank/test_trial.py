"""Tasks with a mistake are found on one batch, with field, line and what to do; right ones stay as they were."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from hpctrain.backends.torch.steps.batch_metrics import sum_and_weight
from hpctrain.comm.world import alone
from hpctrain.commands.doctor import trial
from hpctrain.config.sections import CheckpointConfig, Config, ReduceConfig, TrainConfig
from hpctrain.doctor.check import Status
from hpctrain.doctor.software import of_run_file
from hpctrain.errors import UserError
from hpctrain.rank import wiring
from hpctrain.rank.batches import first_batch, first_validation
from hpctrain.rank.problem import make_problem
from hpctrain.rank.session import message
from hpctrain.rank.trial import try_task
from hpctrain.train.clock import IntervalClock
from tests.tasks import wrong_keras_tasks, wrong_torch_tasks

pytestmark = pytest.mark.usefixtures("environment_of_a_run")

TORCH = {
    "no_forward": ("the model or forward fails", r'missing the required "forward" function', "x .8, 4."),
    "no_return": ("the model or forward returned None", "", "a return is missing"),
    "wide": ("the model or forward fails", "cannot be multiplied", r"a dict of x \[8, 4\], y \[8\]"),
    "swapped": (
        "loss fails",
        r"wrong_torch_tasks.py:\d+: `return functional.cross_entropy\(outputs, batch",
        "gets outputs a tensor.*The outputs come first",
    ),
    "forgets": ("loss returned None", "", "a return is missing"),
    "each": (r"loss returned a tensor of shape \[8\]", "", "return its mean"),
    "complex": ("loss returned a complex number", "", "a real one"),
    "item": ("loss returned a float that does not depend", "", r"without .item\(\)"),
    "argmax": ("loss returned a tensor of shape .. that does not depend", "", "argmax"),
    "name": ("loss='cross_entrpy' names no loss", "", "cross_entropy, huber, mae, mse"),
    "class": ("loss=CrossEntropyLoss is a class", "", r"loss=CrossEntropyLoss\(\)"),
    "sum": ("loss=CrossEntropyLoss is not the plain mean", "", "sum, weight"),
    "three_arrays": (
        "loss='mse' compares the outputs with the second of two arrays",
        "x, y, w",
        "lambda outputs, batch",
    ),
    "broadcast": ("loss fails", "Using a target size", r"y \[8\].*squeeze\(1\)"),
    "number": ("loss of the task is int 3", "", r"function\(outputs, batch\)"),
    "metric": (r"metrics\['accuracy'\] fails", r"KeyError: 'label' \(wrong_torch_tasks.py:\d+: `return", r"y \[8\]"),
    "metric_class": (r"metrics\['accuracy'\] of the task is the class L1Loss", "", "function"),
    "metric_of_samples": (r"metrics\['wrong'\] returned a tensor of shape \[8\]", "", "return its mean"),
    "validation_names": ("loss fails", r"KeyError: 'y' \(wrong_torch_tasks.py", r"in an evaluation.* label \[8\]"),
    "optimizer_class": ("optimizer of the task is the class Adam", "", "give an object"),
    "model_class": ("model of the task is the class NoForward", "", "give an object"),
    "no_train": ("train of the task is missing", "", "train={'x': ..., 'y': ...}"),
    "no_loss": ("loss of the task is missing", "", r"function\(outputs, batch\)"),
    "no_optimizer": ("optimizer of the task is missing", "", r"optimizer=torch.optim.Adam\(model.parameters\(\)"),
    "optimizer_name": ("optimizer of the task is str 'adam'", "", r"optimizer=torch.optim.Adam\("),
    "optimizers_none": ("optimizer of the task is an empty list", "", r"\[SparseAdam"),
    "optimizers_other": ("optimizer of the task holds str, which is not a torch.optim.Optimizer", "", r"\[SparseAdam"),
    "optimizers_twice": ("cannot be combined: some parameters appear in more than one", "", "each parameter to one"),
    "other_parameters": ("optimizer updates tensors that are not parameters", "", r"model.parameters\(\)"),
    "frozen": ("no parameter of the task's model requires a gradient", "", "leave requires_grad on"),
    "unregistered": ("empty parameter list", r"wrong_torch_tasks.py:\d+: ", "nn.ModuleList"),
    "horovod": ("optimizer of the task is Horovod's DistributedOptimizer", "", "give the plain one"),
    "callbacks": ("unexpected keyword argument 'callbacks'", "", "model, loss, .*Callbacks are hooks"),
    "scripted": ("the task's model is a ScriptModule", "", "leave torch.jit.script out"),
    "halves": ("the model or forward fails", "same dtype", r"leave .half\(\)"),
    "dict_outputs": ("loss fails", "", r"outputs a dict of logits.*as in loss\(outputs\['logits'\]"),
    "backward": ("loss fails", "does not require grad", r"evaluates without gradients.*torch.enable_grad"),
    "no_super": ("cannot assign module before", r"wrong_torch_tasks.py:\d+: `self.layer = ", r"super\(\).__init__\(\)"),
    "lazy": ("parameter weight has no shape yet", "", "example batch"),
    "two_outputs": ("loss fails", r"not tuple \(wrong_torch_tasks.py:\d+: `return", "outputs a tuple of 2"),
    "cuda": (
        "the model or forward fails",
        r"wrong_torch_tasks.py:\d+: `return super\(\).forward\(x.cuda",
        r"x .8, 4..*leave .cuda\(\)",
    ),
    "misspelt": (
        "the task cannot be made: .*'optimiser'",
        r"wrong_torch_tasks.py:\d+: ",
        "model, loss, optimizer, train",
    ),
    "keras_model_fields": (
        "the task cannot be made: .*'fit_data'",
        r"wrong_torch_tasks.py:\d+: ",
        "its fields are model",
    ),
    "not_a_task": ("returned Linear", "", r"return hpctrain.TorchTask"),
    "lengths": ("different numbers of samples: 'x' 40, 'y' 39", "", "equally long"),
    "lists": ("the model or forward fails", "Double and Float", r"x is float64 .*astype\(np.float32\)"),
    "pair": ("train of the task is a tuple of 2 arrays", "", "train={'x': x, 'y': y}"),
    "words": ("'y' has dtype <U3", "", "encode text"),
    "empty": ("holds no samples", "", "at least one sample"),
    "loader": ("the DataLoader of train has batch_size=1,", "", "train.batch_per_rank"),
    "no_file": ("train.h5 does not exist", "", "path"),
    "float64": ("the model or forward fails", "Double and Float", r"x is float64 .*astype\(np.float32\)"),
    "float_labels": ("loss fails", r"got Float \(wrong_torch_tasks.py:\d+: `return", r"y \[8\].*astype\(np.int64\)"),
    "labels": (
        "loss fails",
        r"Target 3 is out of bounds. \(wrong_torch_tasks.py:\d+",
        "outputs a tensor of shape .8, 3..*count from 0",
    ),
    "dict_loss": ("loss returned a dict of loss", "", "return its mean.*give the parts as metrics="),
    "three_values": ("loss returned 3 values", "", "sum, weight"),
    "one_argument": (
        r"loss of the task takes \(outputs\), not \(outputs, batch\)",
        r"wrong_torch_tasks.py:\d+: `",
        r"function\(outputs, batch\)",
    ),
    "forward_of_batch": (
        r"forward of the task takes \(batch\), not \(model, batch\)",
        r"wrong_torch_tasks.py:\d+: `",
        r"function\(model, batch\)",
    ),
    "metrics_list": ("metrics= of the task is a list of function", "", "metrics={'accuracy': accuracy}"),
    "metric_swapped": (
        r"metrics\['accuracy'\] fails",
        r"wrong_torch_tasks.py:\d+: ",
        r"gets \(outputs, batch\).*outputs come first",
    ),
    "transform": (
        r"transform of the task takes \(sample\), not \(sample, rng\)",
        r"wrong_torch_tasks.py:\d+: `",
        r"function\(sample, rng\)",
    ),
    "transform_none": ("the transform returned None for sample", "", "a return is missing"),
    "collate": ("collate returned a list", "", "return a dict of arrays"),
    "sampler": ("sampler of the task is a list of int", "", r"function\(epoch\)"),
    "schedule": ("schedule of the task is str 'cosine'", "", r"function\(step\) .* TorchScheduler"),
    "scheduler": ("schedule= of the task is a TorchScheduler of a StepLR", "", r"TorchScheduler\(lambda optimizer"),
    "tensor_list": ("tensor= of the task is a list of str", "", r"tensor=.'blocks.\*.up': hpctrain.columns"),
    "layers_list": ("layers of the task is a list of Linear", "", r"function\(model\).*lambda model: "),
    "hooks": ("hooks= of the task is a NoForward\n", "", r"hooks=\[MyHook"),
}
KERAS = {
    "wide": ("the model or forward fails", r"wrong_keras_tasks.py:\d+: `return model\(", r"x \[8, 4\]"),
    "swapped": ("loss fails", r"wrong_keras_tasks.py:\d+: `return keras", "gets .outputs, batch..*outputs come first"),
    "each": (r"loss returned a tensor of shape \[8\]", "", "return its mean"),
    "name": ("loss='crossentropi' names no loss", "", "mse, mae"),
    "class": ("loss=SparseCategoricalCrossentropy is a class", "", r"\(\)"),
    "sum": ("is not the plain mean", "", "sum, weight"),
    "metric": (r"metrics\['accuracy'\] fails", "KeyError: 'label'", r"y \[8\]"),
    "argmax": ("loss does not depend on the weights", "", "operations that have gradients, unlike argmax"),
    "no_call": ("the model or forward fails", r"NoCall does not have a `call\(\)` method", r"dict of x \[None, 4\]"),
    "no_return": ("the model or forward returned None", "", "a return is missing"),
    "optimizer_name": ("optimizer of the task is str 'adam'", "", r"optimizer=keras.optimizers.Adam\("),
    "optimizers": ("optimizer of the task is a list of Adam", "", r"optimizer=keras.optimizers.Adam\("),
    "no_optimizer": ("optimizer of the task is missing", "", r"optimizer=keras.optimizers.Adam\("),
    "no_loss": ("loss of the task is missing", "", r"function\(outputs, batch\)"),
    "model_class": ("model of the task is the class Sequential", "", "give an object"),
    "numpy": ("loss does not depend on the weights", "", "unlike argmax and NumPy"),
    "labels": (
        "loss fails",
        r"label value of 3 .*wrong_keras_tasks.py:\d+: `return",
        "outputs a tensor of shape .8, 3..*count from 0",
    ),
    "metrics_list": ("metrics= of the task is a list of str", "", "metrics={'accuracy': accuracy}"),
    "hook_class": ("hooks= of the task holds the class BaseHook", "", r"hooks=\[MyHook"),
    "input_shape": ("the model or forward fails", "to have value 5", r"x \[8, 4\]"),
    "batched": ("the model or forward fails", r"input \[\.\.\.\]with name", r"x \[2, 16, 4\].*leave .batch\(\) out"),
    "loss_of_targets": (
        "loss fails",
        r"array\(\[\.\.\.\]dtype=.*targets - outputs",
        r"outputs come first.*batch\['y'\]",
    ),
    "pair": ("train of the task is a tuple of 2 arrays", "", "train={'x': x, 'y': y}"),
    "validation_names": ("loss fails", r"KeyError: 'y' \(wrong_keras_tasks.py", r"in an evaluation.* label \[8\]"),
    "compiled_without_loss": ("neither the task nor compile has a loss", "", r"model.compile\(optimizer, loss='mse'\)"),
    "compiled_with_a_class": ("loss=MeanSquaredError is a class", "", r"MeanSquaredError\(\)"),
    "compiled_with_four_arrays": ("compile's loss needs x, y", "samples hold x, y, a, b", "fit_data=lambda batch"),
    "compiled_metric": ("compile's metric auc is of class AUC", "", "metrics={.auc.: AUC"),
    "own_step_not_compiled": (
        "OwnStep has a custom train_step, but no optimizer",
        "",
        r"model.compile\(optimizer=",
    ),
    "own_step_and_optimizer": ("which does not use optimizer= of the task", "", "compile the model with it"),
    "own_step_and_data": (
        "train_step of the model fails",
        r"wrong_keras_tasks.py:\d+: `",
        r"x \[None, 4\], y \[None\]",
    ),
}


def config_of(module: Any, which: str) -> Config:
    return Config(
        name="run",
        task=f"{module.__file__}:task",
        task_args={"which": which},
        train=TrainConfig(steps=4, global_batch=8),
        reduce=ReduceConfig(kind="none"),
    )


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("which", wrong_torch_tasks.WRONG)
def test_wrong_torch_tasks(which):
    what, line, fix = TORCH[which]
    with pytest.raises(UserError, match=f"(?s){what}.*{line}.*fix: .*{fix}") as caught:
        try_task(config_of(wrong_torch_tasks, which))
    assert len(caught.value.what) < 700 and "\n" not in caught.value.what


@pytest.mark.filterwarnings("ignore::UserWarning")  # of Keras, before it fails
@pytest.mark.parametrize("which", KERAS)
def test_wrong_keras_tasks(which):
    what, line, fix = KERAS[which]
    with pytest.raises(UserError, match=f"(?s){what}.*{line}.*fix: .*{fix}") as caught:
        try_task(config_of(wrong_keras_tasks, which))
    assert (
        len(caught.value.what) < 700 and "\n" not in caught.value.what and "Arguments received" not in caught.value.what
    )


def test_each_wrong_task_is_in_the_tables():
    assert TORCH.keys() == wrong_torch_tasks.WRONG.keys() and KERAS.keys() == wrong_keras_tasks.WRONG.keys()
    assert len(TORCH) + len(KERAS) >= 40


def test_a_keras_loss_that_depends_on_no_weight_is_found_when_it_is_traced():
    config = config_of(wrong_keras_tasks, "argmax")
    framework, batch = framework_of(config)
    with pytest.raises(UserError, match="loss does not depend on the weights"):
        framework.step([batch], 8)


def framework_of(config: Config) -> tuple[Any, Any]:
    """A framework around a task, and its first batch."""
    problem = make_problem(config, alone())
    framework = wiring.make_framework(config, alone(), problem.task, IntervalClock())
    return framework, first_batch(problem, alone())


@pytest.mark.parametrize(
    ("module", "which"),
    [
        *((wrong_torch_tasks, which) for which in wrong_torch_tasks.RIGHT),
        *((wrong_keras_tasks, which) for which in ("object", "own")),
    ],
    ids=str,
)
def test_right_tasks_pass_and_stay_as_they_were(module, which):
    config = config_of(module, which)
    validation = first_validation(make_problem(config, alone()))
    framework, batch = framework_of(config)

    def values():
        found = {}
        for tensor in framework.state():
            found[tensor.name] = np.empty(tensor.shape, tensor.dtype)
            tensor.copy_into(found[tensor.name])
        return found

    before = values()
    framework.dry_call(batch, validation)
    after = values()
    assert before.keys() == after.keys()
    assert all(np.array_equal(before[name], after[name], equal_nan=True) for name in before)
    framework.step([batch], 8)
    changed = values()
    assert any(not np.array_equal(before[name], changed[name]) for name in before if name.startswith("model/"))


def test_names_and_objects_are_the_functions():
    losses = []
    for which in wrong_torch_tasks.RIGHT.keys() - {"validation_only"}:
        problem = make_problem(config_of(wrong_torch_tasks, which), alone())
        outputs, target = torch.eye(3), torch.tensor([0, 2, 1])
        total, weight = sum_and_weight(problem.task.loss(outputs, {"x": outputs, "y": target}), 3)
        losses.append(float(total / weight))
    assert losses == pytest.approx([losses[0]] * len(losses))  # a sum divided later rounds differently


def test_the_first_batch_is_this_ranks_micro_batch():
    config = config_of(wrong_torch_tasks, "own")
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, accumulate=2))
    problem = make_problem(config, alone())
    batch = first_batch(problem, alone())
    assert len(batch["x"]) == 4
    assert np.array_equal(batch["y"], problem.task.train["y"][problem.order.batch_indices(0, 0)[:4]])
    assert len(first_batch(problem, alone(), 3)["x"]) == 3


def test_the_doctor_tells_what_is_wrong_with_a_task():
    wrong, right = (trial(config_of(wrong_torch_tasks, which)) for which in ("metric", "own"))
    assert (wrong.topic, wrong.status) == ("trial", Status.PROBLEM)
    assert "KeyError: 'label' (wrong_torch_tasks.py:" in wrong.value
    assert right.status is Status.OK
    watching = dataclasses.replace(
        config_of(wrong_torch_tasks, "validation_only"), checkpoint=CheckpointConfig(best_metric="f1")
    )
    assert "checkpoint.best_metric is 'f1', which the task does not report" in trial(watching).value


def test_a_single_process_has_a_log_with_the_traceback(tmp_path):
    from tests.support.command import hpctrain, write_run

    task = f"{wrong_torch_tasks.__file__}:task"
    run_file = write_run(
        tmp_path,
        task=task,
        task_args={"which": "swapped"},
        train={"steps": 1, "global_batch": 8},
        run_dir=f"{tmp_path}/run",
    )
    ended = hpctrain("train", run_file, code=64)
    (log,) = (tmp_path / "run/logs").iterdir()
    assert f"traceback: {log}" in ended.output and "Traceback" not in ended.output
    assert "Traceback" in log.read_text() and "wrong_torch_tasks.py" in log.read_text()


def test_a_run_gives_the_same_advice_as_doctor():
    known = AttributeError("cannot assign module before Module.__init__() call")
    assert message(known)[1].endswith("Begin __init__ of the class with super().__init__()")
    x = torch.ones(2, requires_grad=True).exp()
    y = x.square()
    x += 1
    with pytest.raises(RuntimeError) as caught:
        y.sum().backward()
    assert "write x = x + 1" in message(caught.value)[1]
    memory = message(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"))[1]
    assert "smaller batch" in memory and memory == message(MemoryError("Unable to allocate 3 GiB"))[1]
    assert message(AttributeError("something else"))[1] == "the traceback in the rank's log shows where it comes from"


OBJECT = """
import numpy as np, torch, hpctrain

class Photos(torch.utils.data.Dataset):
    def __init__(self, transform):
        self.transform = transform

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return np.zeros(3, np.float32), np.float32(0)

def task(plain=True):
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = lambda outputs, batch: (outputs[:, 0] - batch["y"]).square().mean()
    train = Photos(str if plain else lambda x: x)
    return hpctrain.TorchTask(model=model, loss=loss, optimizer=optimizer, train=train)
"""


def test_data_workers_are_started_with_any_option_of_the_run_file(tmp_path):
    (tmp_path / "photos.py").write_text(OBJECT)
    (tmp_path / "run.yaml").write_text(
        f"name: run\ntask: {tmp_path}/photos.py:task\ntrain: {{steps: 1, global_batch: 4}}\n"
    )
    config, _ = of_run_file(str(tmp_path / "run.yaml"))
    assert config is not None
    assert try_task(config) == "model gets x [3], loss gets y"
    config, _ = of_run_file(str(tmp_path / "run.yaml"), ["--data.workers", "1", "--task_args.plain", "false"])
    assert config is not None
    with pytest.raises(UserError, match=r"cannot be sent to worker processes: a part of the data is .*lambda"):
        try_task(config)


def test_workers_of_a_loader_that_are_not_used_are_named(tmp_path):
    (tmp_path / "task.py").write_text(
        "import hpctrain, torch\n"
        "from torch.utils.data import DataLoader, TensorDataset\n"
        "def task(world):\n"
        "    model = torch.nn.Linear(2, 1)\n"
        "    train = DataLoader(TensorDataset(torch.ones(8, 2), torch.ones(8, 1)), 8, shuffle=True, num_workers=1)\n"
        "    return hpctrain.TorchTask(model, 'mse', torch.optim.SGD(model.parameters(), lr=1), train)\n"
    )
    found = try_task(Config(name="run", task=f"{tmp_path}/task.py:task", train=TrainConfig(steps=1, global_batch=8)))
    assert "data.workers is 0; num_workers=1 of the DataLoader is not used" in found


def test_a_loss_of_a_stream_that_is_no_mean_is_refused(tmp_path):
    (tmp_path / "task.py").write_text(
        "import hpctrain, torch\n"
        "class Lines:\n"
        "    def __iter__(self):\n"
        "        return ({'x': torch.full((2,), float(i)).numpy()} for i in range(64))\n"
        "def task(world):\n"
        "    model = torch.nn.Linear(2, 1)\n"
        "    optimizer = torch.optim.SGD(model.parameters(), lr=1)\n"
        "    data = hpctrain.open_stream(Lines())\n"
        "    return hpctrain.TorchTask(model, lambda y, batch: (y**2).sum(), optimizer, data)\n"
    )
    with pytest.raises(UserError, match=r"loss is not a mean .* for 2 samples"):
        try_task(Config("run", f"{tmp_path}/task.py:task", train=TrainConfig(steps=1, global_batch=8)))

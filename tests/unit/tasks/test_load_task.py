"""Tasks that cannot be had."""

import subprocess
import sys

import pytest

from hpctrain.comm.world import alone
from hpctrain.errors import UserError
from hpctrain.tasks.load_task import load_task


@pytest.mark.parametrize("reference", ["broken_task:task", "broken_task.py:task"])
def test_a_task_with_a_syntax_error(reference, tmp_path, monkeypatch):
    (tmp_path / "broken_task.py").write_text("def task(:\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(UserError, match="fails to import: SyntaxError"):
        load_task(reference, {}, alone(), seed=lambda: None)
    sys.modules.pop("broken_task", None)


@pytest.mark.parametrize("signature", ["lr: float", "lr=0.1", "lr: 'float' = 0.1", "lr: float = 1"])
def test_an_argument_of_the_wrong_type_is_named_if_the_task_fails(signature, tmp_path):
    """It was an exception of the task, which the run tried twice."""
    path = tmp_path / "typed_task.py"
    path.write_text(f"def task({signature}, name=None):\n    return lr * 0.5\n")
    with pytest.raises(UserError) as refused:
        load_task(f"{path}:task", {"lr": "x", "name": 3}, alone(), seed=lambda: None)
    assert "TypeError: can't multiply" in refused.value.what and "typed_task.py:2" in refused.value.what
    assert refused.value.what.endswith("; task_args.lr is 'x', and the function takes a value of type float")
    path.write_text(f"def task({signature}):\n    return lr + ''\n")
    with pytest.raises(TypeError):
        load_task(f"{path}:task", {"lr": 1}, alone(), seed=lambda: None)
    sys.modules.pop("typed_task", None)


LATE = """
def task():
    import torch
    from hpctrain import TorchTask

    model = torch.nn.Linear(1, 1)
    return TorchTask(model, None, torch.optim.SGD(model.parameters()), train=None)
"""
LOAD = """
from hpctrain.comm.world import alone
from hpctrain.tasks.load_task import load_task
load_task("late.py:task", {}, alone(), lambda: None)
"""


@pytest.mark.slow
def test_a_framework_that_comes_too_late_to_be_seeded(tmp_path):
    (tmp_path / "late.py").write_text(LATE)
    loaded = subprocess.run([sys.executable, "-c", LOAD], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert "imports torch inside the function, too late to be seeded" in loaded.stderr
    (tmp_path / "late.py").write_text("import torch\n" + LATE)
    subprocess.run([sys.executable, "-c", LOAD], cwd=tmp_path, check=True, timeout=60)


def test_a_task_by_module_finds_files_beside_it_when_it_runs(tmp_path):
    (tmp_path / "late.py").write_text("def task():\n    import beside_the_task\n")
    (tmp_path / "beside_the_task.py").touch()
    words = [sys.executable, "-c", LOAD.replace("late.py:task", "late:task")]
    loaded = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert "task late:task returned NoneType" in loaded.stderr


@pytest.mark.parametrize("name", ["torch", "numpy", "sys"])
def test_a_task_file_replaces_no_module_that_the_run_imports(name, tmp_path):
    (tmp_path / f"{name}.py").write_text("def task():\n    pass\n")
    with pytest.raises(UserError, match=f"{name}.py has the name of a module that the run imports"):
        load_task(f"{tmp_path / name}.py:task", {}, alone(), seed=lambda: None)


def test_task_files_of_one_name_follow_each_other(tmp_path):
    for folder in ("a", "b", "a"):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / "same_name.py").write_text(f"def task():\n    raise RuntimeError('{folder}')\n")
        with pytest.raises(RuntimeError, match=folder):
            load_task(f"{tmp_path / folder}/same_name.py:task", {}, alone(), seed=lambda: None)
    sys.modules.pop("same_name", None)

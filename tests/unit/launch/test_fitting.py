"""What programs start on clusters: which runs they may name, and that nothing is waited for if nodes cannot come."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hpctrain.config.loading import load
from hpctrain.config.sections import Config
from hpctrain.errors import RunFailed, UserError
from hpctrain.launch.engines import fitting
from hpctrain.launch.runners.ticket import Ticket
from hpctrain.run.attempts import Attempts
from hpctrain.run.folder import RunDir

RUN = {"name": "digits", "task": "hpctrain.tasks.torch_digits:task", "train": {"steps": 3, "global_batch": 8}}


def test_a_run_is_a_dict_a_file_or_a_config(tmp_path: Path) -> None:
    given = {**RUN, "task_args": {"lr": 1e-05, "data": str(tmp_path)}, "optimizer": {"name": "sgd", "lr": 2e-06}}
    config = fitting.read(given)
    assert config.task_args == given["task_args"] and config.optimizer.lr == 2e-06
    (tmp_path / "run.yaml").write_text(
        "name: digits\ntask: hpctrain.tasks.torch_digits:task\ntrain: {steps: 3, global_batch: 8}"
    )
    assert fitting.read(tmp_path / "run.yaml") == fitting.read(str(tmp_path / "run.yaml")) == fitting.read(RUN)
    assert fitting.read(config) is config
    with pytest.raises(UserError, match="unknown key 'trian'"):
        fitting.read({**RUN, "trian": {}})


@pytest.mark.slow
def test_nodes_that_cannot_come_end_the_call_and_its_supervisor(tmp_path: Path) -> None:
    shown: list[tuple[Config, Ticket]] = []

    @contextlib.contextmanager
    def invite(config: Config, made: Ticket) -> Iterator[Callable[[], str]]:
        shown.append((config, made))
        yield lambda: "no node has room"
        shown.clear()

    errors: list[Exception] = []

    def call() -> None:
        try:
            fitting.fit(fitting.read({**RUN, "run_dir": str(tmp_path / "run")}), invite, False, None)
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=call)  # as in a trainable of Ray Tune
    thread.start()
    thread.join(120)
    [error] = errors
    assert isinstance(error, RunFailed) and "no node has room" in str(error)
    [(config, made)] = shown  # the context has seen the error
    assert config.launch.ticket and not Path(config.launch.ticket).exists() and made.port
    assert Attempts(RunDir(tmp_path / "run")).all() == [] and load(tmp_path / "run" / "run.yaml") == config

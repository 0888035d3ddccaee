"""``python -m benchmarks.step``: what its contenders set, and a loop without hpctrain."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks import step_ranks
from benchmarks.program import start
from benchmarks.step import add_arguments, run
from hpctrain.comm.world import alone
from hpctrain.errors import ExitCode


@pytest.mark.parametrize(
    ("contender", "kind", "shard", "dense"),
    [("sharded", "auto", "optimizer", False), ("densify", "mpi", "none", True)],
)
def test_contenders_set_what_their_name_says(contender, kind, shard, dense):
    opened: list[Any] = []

    def problem(name, world, dense):
        framework = SimpleNamespace(weights_hash=None, close=None)
        batch = {"input": np.zeros((8, 2))}
        return SimpleNamespace(
            batch=batch, open=lambda world, settings, choice: opened.append((dense, settings)) or framework
        )

    step_ranks.configured(contender, alone(), problem)("mlp")
    ((got_dense, settings),) = opened
    assert (settings.reduce.kind, settings.parallel.shard, got_dense) == (kind, shard, dense)


def test_a_contender_of_the_other_framework_is_refused(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["step", "--framework", "tensorflow", "--contenders", "ddp"])
    assert start("step", "", add_arguments, run) == ExitCode.USER_ERROR
    assert "there is no contender 'ddp'" in capsys.readouterr().err

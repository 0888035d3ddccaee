"""``hpctrain bench step``: what each contender is, and both frameworks on one process."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hpctrain.bench.step import Contenders
from hpctrain.comm.world import World, alone
from hpctrain.errors import ExitCode
from hpctrain.reduce.reducer_choice import ReducerChoice
from hpctrain.train.framework import StepSettings


class Framework:
    """Counts steps."""

    facts = SimpleNamespace(reducer_name="mpi-node")

    def __init__(self) -> None:
        self.steps: list[tuple[Any, int]] = []

    def set_learning_rate(self, factor: float) -> None:
        assert factor == 1

    def step(self, batches: Any, samples: int) -> None:
        self.steps.append((batches, samples))

    def weights_hash(self) -> str:
        return "hash"

    def close(self) -> None: ...


@dataclass
class Problem:
    """Remembers what it was asked for."""

    opened: list[tuple[World, StepSettings, ReducerChoice]] = field(default_factory=list)
    batch: dict[str, Any] = field(default_factory=lambda: {"input": np.zeros((8, 2))})

    def open(self, world: World, config: StepSettings, choice: ReducerChoice) -> Any:
        self.opened.append((world, config, choice))
        return Framework()


@pytest.mark.parametrize(
    ("contender", "kind"), [("none", "auto"), ("mpi", "mpi"), ("horovod", "horovod"), ("mpi-flat-fp16", "auto")]
)
def test_contenders_set_what_their_name_says(contender, kind):
    problem, world = Problem(), alone()
    made: Any = Contenders(lambda name, world: problem, world, "none").make(contender, "mlp")
    made.step()
    ((got_world, config, choice),) = problem.opened
    assert (config.reduce.kind, config.parallel.shard) == (kind, "none")
    assert (got_world is world) is (contender != "none")
    assert choice.kept == ("mpi-flat-fp16" if contender == "mpi-flat-fp16" else None)
    assert made.framework.steps == [([problem.batch], 8)]


def test_what_auto_chose_is_kept_for_its_next_turn_with_a_model():
    problem = Problem()
    contenders = Contenders(lambda name, world: problem, alone(), "fp16")
    for model in ("mlp", "mlp", "conv"):
        contenders.make("auto", model)
    assert [choice.kept for *_, choice in problem.opened] == [None, "mpi-node", None]
    assert {config.reduce.compression for _, config, _ in problem.opened} == {"fp16"}


def test_another_contender_has_its_own_loop():
    others: Any = {"ddp": lambda model: f"ddp on {model}"}
    made: Any = Contenders(lambda name, world: Problem(), alone(), "none", others).make("ddp", "gpt")
    assert made == "ddp on gpt"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--models", "mlp,vgg"], "there is no model 'vgg'"),
        (["--contenders", "none,ddp"], "there is no contender 'ddp'"),
        (["--rounds", "0"], "--rounds: give 1 or more in place of 0"),
    ],
)
def test_what_cannot_be_measured_is_refused(words, said, cli):
    assert said in cli("bench", "step", *words, code=ExitCode.USER_ERROR).err


@pytest.mark.slow
def test_both_frameworks_measure_their_step(cli):
    options = ["--models", "mlp", "--contenders", "none", "--ranks", "1", "--rounds", "1", "--steps", "2"]
    found = json.loads(cli("bench", "step", "--framework", "all", *options, "--json").out)["rows"]
    assert [(row["framework"], row["model"], row["contender"]) for row in found] == [
        ("torch", "mlp", "none"),
        ("tensorflow", "mlp", "none"),
    ]
    assert all(row["median_ms"] > 0 and row["weights_equal"] and row["ratio_to_none"] == 1 for row in found)

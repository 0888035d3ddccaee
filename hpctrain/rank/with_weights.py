"""A run's model in this process, with the weights of a file."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from hpctrain.checkpoint.initial import load_initial
from hpctrain.checkpoint.initial_match import Source
from hpctrain.comm.world import alone
from hpctrain.config.sections import Config
from hpctrain.rank.problem import Problem, make_problem
from hpctrain.rank.wiring import make_framework
from hpctrain.train.clock import IntervalClock
from hpctrain.train.framework import Framework


def with_weights(config: Config, weights: str) -> tuple[Framework, Problem]:
    """The model of a run file with the weights of a safetensors file, and its task and data."""
    where, _, function = config.task.rpartition(":")
    task = config.task
    if where.endswith(".py") and not Path(where).is_file():  # it has travelled with the model, and is on the path
        task = f"{Path(where).stem}:{function}"
    train = dataclasses.replace(config.train, ema_decay=None, compile=False)
    plain = dataclasses.replace(config, task=task, train=train)
    problem = make_problem(plain, alone())
    framework = make_framework(plain, alone(), problem.task, IntervalClock())
    load_initial(Source(weights), framework)
    return framework, problem

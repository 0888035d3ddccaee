"""Opens a task without a run: tried on one batch for ``hpctrain doctor``, or with the weights of a file."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from hpctrain.checkpoint.initial import load_initial
from hpctrain.checkpoint.initial_match import Source
from hpctrain.comm.world import alone
from hpctrain.config.sections import Config
from hpctrain.errors import HpctrainError, UserError
from hpctrain.rank import wiring
from hpctrain.rank.batches import first_batch, first_validation
from hpctrain.rank.problem import Problem, make_problem
from hpctrain.rank.session import message
from hpctrain.tasks.user_errors import advised
from hpctrain.train.clock import IntervalClock
from hpctrain.train.framework import Framework

MOST_SAMPLES = 32
"""Samples of the batch at most: this one process would otherwise hold the batch of all ranks."""


def try_task(config: Config) -> None:
    """Makes the task and calls model, loss and metrics on its first samples. Writes nothing.

    Raises:
        HpctrainError: it cannot be trained; names the field of the task and the user's line.
    """
    config = dataclasses.replace(config, reduce=dataclasses.replace(config.reduce, kind="none", compression="none"))
    world = alone()
    with told_shortly():
        problem = make_problem(config, world)
        with closing(wiring.make_framework(config, world, problem.task, IntervalClock())) as framework:
            validation = first_validation(problem)
            framework.dry_call(first_batch(problem, world, MOST_SAMPLES), validation)


@contextmanager
def told_shortly() -> Iterator[None]:
    """Errors of a task's own code in the body become UserErrors that name the line; ours pass through."""
    try:
        yield
    except HpctrainError:
        raise
    except Exception as error:
        what, _ = message(error)
        raise UserError(what, advised("correct the task", what)) from error


def with_weights(config: Config, weights: str) -> tuple[Framework, Problem]:
    """The model of a run file with the weights of a safetensors file, and its task and data."""
    where, _, function = config.task.rpartition(":")
    task = config.task
    if where.endswith(".py") and not Path(where).is_file():  # it has travelled with the model, and is on the path
        task = f"{Path(where).stem}:{function}"
    train = dataclasses.replace(config.train, ema_decay=None, compile=False)
    plain = dataclasses.replace(config, task=task, train=train)
    problem = make_problem(plain, alone())
    framework = wiring.make_framework(plain, alone(), problem.task, IntervalClock())
    load_initial(Source(weights), framework)
    return framework, problem

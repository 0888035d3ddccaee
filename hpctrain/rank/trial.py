"""Tries a task on one batch, without a run, for ``hpctrain doctor``, and turns the task's errors into advice."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import closing, contextmanager

from hpctrain.comm.world import alone
from hpctrain.config.sections import Config
from hpctrain.errors import HpctrainError, UserError
from hpctrain.rank import wiring
from hpctrain.rank.batches import first_batch, first_validation
from hpctrain.rank.problem import make_problem
from hpctrain.rank.session import message
from hpctrain.tasks.user_errors import advised
from hpctrain.train.clock import IntervalClock

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

"""Ranks whose streams differ are stopped."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from hpctrain.data.pipeline import BatchSource
from hpctrain.errors import UserError
from hpctrain.rank.batches import DataPosition
from hpctrain.train.framework import StepResult
from hpctrain.train.hooks import Training


def after_step(digests: list[str]) -> None:
    everyone = SimpleNamespace(allgather=lambda value, what: digests)
    training = SimpleNamespace(world=SimpleNamespace(everyone=everyone), state=SimpleNamespace(step=4))
    data: Any = SimpleNamespace(digest=digests[0])
    DataPosition(cast(BatchSource, data), print).after_step(cast(Training, training), cast(StepResult, None))


def test_other_samples_than_on_rank_0_end_the_run():
    after_step(["a", "a", "a"])
    with pytest.raises(UserError, match="rank 2 other samples than rank 0 in step 4"):
        after_step(["a", "a", "b"])

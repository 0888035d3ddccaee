"""Weights that drift apart end the run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hpctrain.errors import NoRequeue
from hpctrain.train.verify import VerifyWeights


def trainer(step: int, hashes: list[str]) -> Any:
    """What the hook looks at, on rank 0."""
    gathered = []

    def allgather(value: str, what: str) -> list[str]:
        gathered.append(value)
        return hashes

    return SimpleNamespace(
        state=SimpleNamespace(step=step),
        framework=SimpleNamespace(weights_hash=lambda: hashes[0]),
        world=SimpleNamespace(data=SimpleNamespace(allgather=allgather)),
        gathered=gathered,
    )


def test_equal_weights_pass_and_only_every_so_many_steps_are_compared() -> None:
    hook = VerifyWeights(every_steps=3)
    seen = []
    for step in range(1, 7):
        made = trainer(step, ["a", "a"])
        assert hook.after_step(made, None) is None  # type: ignore[arg-type]
        seen += [step] * len(made.gathered)
    assert seen == [3, 6]


def test_a_rank_that_drifted_is_named() -> None:
    with pytest.raises(NoRequeue, match="after step 4 the weights of rank 1, 3 differ from those of rank 0"):
        VerifyWeights(2).after_step(trainer(4, ["a", "b", "a", "c"]), None)  # type: ignore[arg-type]

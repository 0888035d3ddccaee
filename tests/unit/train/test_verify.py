"""Weights that drift apart end the run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hpctrain.errors import NoRequeue
from hpctrain.train.watchers import VerifyWeights

TWO = "2 differ from those of rank 0 and those of rank 3"


def trainer(step: int, hashes: list[str], shared: str = "", tensor: int = 1, pipeline: int = 1, kinds: str = "") -> Any:
    """What the hook looks at, on rank 0: of each rank, hashes of all weights and of those that are not cut."""
    gathered = []

    def allgather(value: list[str], what: str) -> list[list[str]]:
        gathered.append(value)
        same = [""] * len(hashes)
        return [list(said) for said in zip(hashes, shared or same, kinds or same, strict=True)]

    return SimpleNamespace(
        state=SimpleNamespace(step=step),
        framework=SimpleNamespace(weights_hash=lambda shared_only=False: hashes[0]),
        world=SimpleNamespace(
            everyone=SimpleNamespace(allgather=allgather),
            tensor=SimpleNamespace(size=tensor),
            pipeline=SimpleNamespace(size=pipeline),
        ),
        gathered=gathered,
    )


def test_equal_weights_pass_and_only_every_so_many_steps_are_compared():
    hook = VerifyWeights(every_steps=3)
    seen = []
    for step in range(1, 7):
        made = trainer(step, ["a", "a"])
        assert hook.after_step(made, None) is None  # type: ignore[arg-type]
        seen += [(step, value) for value in made.gathered]
    assert seen == [(3, ["a", "", ""]), (6, ["a", "", ""])], "without tensor parallelism weights are hashed once"


def test_the_first_step_of_an_attempt_is_compared_by_default():
    hook, seen = VerifyWeights(None), []
    for step in (8, 9):
        made = trainer(step, ["a", "a"])
        hook.after_step(made, None)  # type: ignore[arg-type]
        seen += [step for _ in made.gathered]
    assert seen == [8]


def test_other_hardware_may_round_otherwise_in_the_first_step_but_not_if_asked_for_equal_bits():
    VerifyWeights(None).after_step(trainer(1, ["a", "b"], kinds="xy"), None)  # type: ignore[arg-type]
    with pytest.raises(NoRequeue, match="rank 1 differ"):
        VerifyWeights(None).after_step(trainer(1, ["a", "b", "c"], kinds="xxy"), None)  # type: ignore[arg-type]
    with pytest.raises(NoRequeue, match="rank 1 differ"):
        VerifyWeights(1).after_step(trainer(1, ["a", "b"]), None)  # type: ignore[arg-type]


def test_a_rank_that_drifted_is_named():
    with pytest.raises(NoRequeue, match="after step 4 the weights of rank 1, 3 differ from those of rank 0"):
        VerifyWeights(2).after_step(trainer(4, ["a", "b", "a", "c"]), None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("hashes", "shared", "odd"),
    [
        ("abab", "ssss", ""),
        ("abac", "ssss", "3"),
        ("abab", "stst", "1, 3"),
        ("aabb", "ssss", TWO),
    ],
)
def test_ranks_that_share_out_a_model_have_equal_parts_and_all_have_what_is_not_cut(hashes, shared, odd):
    made = trainer(1, list(hashes), shared, tensor=2)
    if not odd:
        assert VerifyWeights(1).after_step(made, None) is None  # type: ignore[arg-type]
        return
    with pytest.raises(NoRequeue, match=f"the weights of rank {odd} differ"):
        VerifyWeights(1).after_step(made, None)  # type: ignore[arg-type]


def test_stages_are_compared_with_themselves():
    """Two stages, two data ranks, two tensor ranks."""
    VerifyWeights(1).after_step(trainer(1, list("ababcdcd"), "ssssuuuu", tensor=2, pipeline=2), None)  # type: ignore[arg-type]
    with pytest.raises(NoRequeue, match="the weights of rank 6 differ from those of rank 4"):
        VerifyWeights(1).after_step(trainer(1, list("ababcdxd"), "ssssuuuu", 2, 2), None)  # type: ignore[arg-type]

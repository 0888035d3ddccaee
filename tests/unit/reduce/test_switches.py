"""Switches as Slurm tells them, and rings over them."""

from __future__ import annotations

import random

import pytest

from hpctrain.reduce.ring_allreduce import ADDRESS, PATTERN, in_order, switches


@pytest.mark.parametrize(
    ("address", "pattern", "found"),
    [
        ("s0.s4.s8.tux1", "switch.switch.switch.node", ["s0", "s4", "s8"]),
        ("block2.n7", "block.node", ["block2"]),
        ("s1.n7.cluster.org", "switch.node", ["s1"]),
        ("n7", "node", []),
        ("", "", []),
        ("s0", "switch.node", ["s0"]),
    ],
)
def test_switches_are_what_comes_before_the_node(address: str, pattern: str, found: list[str]) -> None:
    assert switches({ADDRESS: address, PATTERN: pattern}) == found


def test_without_slurm_there_are_none() -> None:
    assert switches({}) == switches({ADDRESS: "s0.n1"}) == []


@pytest.mark.parametrize(
    ("paths", "order"),
    [
        ([["a"], ["b"], ["a"], ["b"]], [0, 2, 1, 3]),
        ([["b"], ["a"], ["a"]], [0, 1, 2]),
        ([["t", "b"], ["u", "c"], ["t", "a"], ["t", "b"], ["u", "c"]], [0, 3, 2, 1, 4]),
        ([["a"], [], ["a"]], [0, 1, 2]),
        ([[], []], [0, 1]),
    ],
)
def test_ranks_of_a_switch_follow_each_other(paths: list[list[str]], order: list[int]) -> None:
    assert in_order(paths) == order


def test_a_ring_enters_each_switch_once() -> None:
    for seed in range(50):
        chosen = random.Random(seed)
        paths = [[f"t{chosen.randrange(2)}", f"s{chosen.randrange(3)}"] for _ in range(9)]
        order = in_order(paths)
        assert sorted(order) == list(range(9)) and order == in_order(paths)
        for depth in (1, 2):
            seen = [tuple(paths[rank][:depth]) for rank in order]
            entered = [here for before, here in zip([None, *seen], seen, strict=False) if before != here]
            assert len(entered) == len(set(entered))

"""Simulated ranks: every part runs, and the first node's memory stays within bounds."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.simulate import PARTS, Cost, growth, measure

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("part", PARTS)
def test_every_part_is_measured(part, tmp_path):
    cost = measure(part, 160, tmp_path)
    assert cost.part == part and cost.ranks == 160 and cost.seconds > 0 and cost.peak_bytes > 0
    assert list(tmp_path.iterdir()) == []


def test_growth_is_the_power_of_the_ranks():
    assert growth(Cost("", 100, 0.5, 1), Cost("", 1000, 50.0, 1)) == pytest.approx(2)


@pytest.mark.slow
def test_the_first_node_takes_memory_in_proportion_to_the_ranks(tmp_path):
    few, many = (measure("chief", ranks, tmp_path).peak_bytes for ranks in (1_000, 10_000))
    assert many < 200 * 2**20
    assert many <= 10.5 * few


@pytest.mark.slow
def test_the_command_prints_both_sizes(tmp_path):
    words = ["--ranks", "200", "--parts", "verdict,next-look", "--json"]
    command = [sys.executable, "-m", "benchmarks.simulate", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
    costs = json.loads(done.stdout)
    assert [(cost["part"], cost["ranks"]) for cost in costs] == [
        ("verdict", 20),
        ("verdict", 200),
        ("next-look", 20),
        ("next-look", 200),
    ]

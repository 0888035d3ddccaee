"""``python -m benchmarks.parallel``: what it refuses, its table, and one real process."""

from __future__ import annotations

import argparse

import numpy as np
import pytest

from benchmarks.parallel import OURS, THEIRS, Row, add_arguments, chosen, run, table
from benchmarks.program import start
from benchmarks.torch_parallel import Ours
from hpctrain.comm.world import alone
from hpctrain.errors import ExitCode


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--contenders", "one,two"], "there is no contender 'two'"),
        (["--contenders", ""], "there is no contender ''"),
        (["--batch", "0"], "--batch is 0"),
        (["--steps", "-1"], "--steps is -1"),
        (["--ranks", "1"], "--ranks 1 cannot have 8 heads divided equally"),
        (["--ranks", "3", "--batch", "24"], "--ranks 3 cannot have 8 heads divided equally"),
        (["--ranks", "8", "--batch", "64"], "give --ranks 2 or 4"),
        (["--batch", "24"], "--batch 24 does not divide into 8 micro-batches on 2 ranks"),
    ],
)
def test_what_cannot_be_measured(words, said, capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["parallel", *words])
    assert start("parallel", "", add_arguments, run) == ExitCode.USER_ERROR
    assert said in capsys.readouterr().err


def given(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(words)


def test_each_contender_is_measured_once():
    assert chosen(given()) == [*OURS, *THEIRS]
    assert chosen(given("--contenders", "tensor,one,tensor")) == ["tensor", "one"]
    assert chosen(given("--contenders", "tensor", "--model", "large", "--ranks", "8", "--batch", "64")) == ["tensor"]


def test_the_table():
    text = table(
        [
            Row("one", 100.0, 1.0, 5.5, 400.0),
            Row("tensor", 70.04, 0.7004, 5.5, exchange=0.158),
            Row("ddp", 80.0, None, 5.5),
        ]
    )
    assert [line.split() for line in text.splitlines()] == [
        ["contender", "median", "ms", "to", "one", "exchange", "peak", "MiB", "loss"],
        ["one", "100.0", "1.00", "-", "400", "5.500000"],
        ["tensor", "70.0", "0.70", "16%", "-", "5.500000"],
        ["ddp", "80.0", "-", "-", "-", "5.500000"],
    ]


def test_one_process_trains():
    contender = Ours("small", 2, 2, alone(), {})
    losses = []
    for _ in range(2):
        contender.step()
        losses.append(contender.loss)
    contender.close()
    assert losses[0] == pytest.approx(np.log(256), abs=0.3), "before it has learned anything"
    assert losses[1] < losses[0]

"""Scripts as the real sbatch reads them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.slurm.run import Run

HOSTILE = [
    "plain", "two words", "it's", 'say "hi"', "$(touch /tmp/owned)", "`id`", "back\\slash", "x # hash", "a#b",
    "semi;colon", "ünïcödé ☃", "--looks=like", " leading", "tab? no", "100% %j", "a=b,c=d", "\\\"'#", "*", "~", "!x",
]  # fmt: skip


@pytest.mark.parametrize("value", HOSTILE)
def test_sbatch_reads_every_comment_as_it_was_given(new_run: Callable[..., Run], value: str) -> None:
    run = new_run(launch={"command": ["true"]}, slurm={"comment": value, "begin": "now+1hour"})
    job = run.submit()
    shown = run.cluster.run("squeue", "-h", "-j", job, "-o", "%k").stdout
    assert shown.rstrip("\n") == value

"""The Horovod wheel that install-horovod makes computes what it should. Never both of its modules in one process."""

from __future__ import annotations

from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parent / "programs"


@pytest.mark.parametrize("framework", ["torch", "tensorflow"])
@pytest.mark.parametrize("ranks", [pytest.param(n, marks=pytest.mark.world_size(n)) for n in (2, 4)])
def test_every_operation_that_we_use_gives_the_right_values(mpirun, framework: str, ranks: int) -> None:
    result = mpirun(ranks, PROGRAMS / f"horovod_{framework}_values.py", timeout=240)
    assert sorted(line for line in result.stdout.splitlines() if line.endswith("values are right")) == [
        f"rank {rank} of {ranks}: values are right" for rank in range(ranks)
    ]

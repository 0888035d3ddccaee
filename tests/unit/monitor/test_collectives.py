"""The collective that a hanging run waits in, from dumps of torch's flight recorder."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hpctrain.monitor.chief.collectives import collectives_in, read, who_is_missing
from hpctrain.run.folder import RunDir

Waits = tuple[str, int]


def dump(groups: dict[str, list[int]], *waits: Waits, **changed: Any) -> dict[str, Any]:
    """As ``_dump_fr_trace_json`` of torch 2.13 writes it, without what is not read."""
    return {
        "version": "2.10",
        "pg_config": {name: {"name": name, "desc": "", "ranks": str(ranks)} for name, ranks in groups.items()},
        "entries": [
            {"process_group": [name, ""], "collective_seq_id": number, "profiling_name": "nccl:all_reduce",
             "input_sizes": [[4, 5]], "input_dtypes": ["Float"], "retired": False, "state": "started",
             "is_p2p": False, **changed}
            for name, number in waits
        ],
    }  # fmt: skip


DATA = {"data": [0, 1, 2, 3]}
GRID = {"data": [0, 2], "tensor": [0, 1]}, {"data": [1, 3], "tensor": [0, 1]}, {"data": [0, 2], "tensor": [2, 3]}


@pytest.mark.parametrize(
    ("dumps", "missing"),
    [
        (
            {rank: dump(DATA, ("data", 812), ("data", 813)) for rank in (0, 1, 3)},
            "rank 2 did not join all_reduce 812 of group data (Float [4, 5]), in which ranks 0-1, 3 wait",
        ),
        (
            {0: dump(DATA, ("data", 7)), 1: dump(DATA, ("data", 8)), 2: dump(DATA, ("data", 7))},
            "rank 3 did not join all_reduce 7 of group data (Float [4, 5]), in which ranks 0, 2 wait",
        ),
        # 0 waits for 2 in its data group, and 2 for 3, which waits nowhere, in its tensor group.
        (
            {0: dump(GRID[0], ("data", 5)), 2: dump(GRID[2], ("tensor", 9))},
            "rank 3 did not join all_reduce 9 of group tensor (Float [4, 5]), in which rank 2 waits",
        ),
        ({rank: dump(DATA, ("data", 812)) for rank in range(4)}, ""),
        ({0: dump(DATA, ("data", 1), retired=True), 1: dump(DATA, ("data", 1), state="completed")}, ""),
        ({}, ""),
    ],
)
def test_the_missing_rank_is_named(dumps, missing):
    assert who_is_missing({rank: list(collectives_in(one)) for rank, one in dumps.items()}) == missing


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b"{}", b'{"pg_config": {}, "entries": [{}]}', b"\x80\x04."])
def test_damaged_files_are_left_out(tmp_path, damage):
    run = RunDir(tmp_path)
    run.monitor.mkdir()
    run.collectives(1, 0).write_bytes(damage)
    run.collectives(1, 1).write_text(json.dumps(dump(DATA, ("data", 3))))
    assert {rank: len(found) for rank, found in read(run, 1, range(4)).items()} == {1: 1}

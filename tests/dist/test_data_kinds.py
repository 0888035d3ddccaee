"""Variable lengths, samplers, random datasets, tables in a store, streams: same samples on any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path

import pytest

from tests.support.command import events, last_words
from tests.support.mpi import mpirun
from tests.support.object_store import ObjectStore, serving
from tests.tasks import torch_data_kinds_task

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "tests/dist/programs/data_kinds.py"
KINDS = ["weighted", "grouped", "endless", "lines", "arrays"]


def train(ranks: int, *parts: str, cwd: Path, kinds: Sequence[str] = KINDS, **environment: str) -> None:
    """Launch runs, each given as FOLDER:STEPS, that resume what is there or are killed."""
    env, dies = {"PYTHONPATH": str(ROOT), **environment}, "KILLED_AT" in environment
    done = mpirun(ranks, PROGRAM, ",".join(kinds), *parts, cwd=cwd, env=env, timeout=200, warm="torch", check=not dies)
    assert bool(done.returncode) == dies


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStore]:
    """Set up an object store with the rows of the kind ``arrays`` in a table of several row groups and in HDF5."""
    import pyarrow
    from pyarrow import parquet
    from pyarrow.fs import FileSystem

    with serving() as store:
        for name, value in store.environment.items():
            monkeypatch.setenv(name, value)
        store.make_bucket("rows")
        system, path = FileSystem.from_uri(torch_data_kinds_task.URI)
        with system.open_output_stream(f"{path}/a.parquet") as file:
            columns = {name: array.tolist() for name, array in torch_data_kinds_task.TABLE.items()}
            schema = {
                "tokens": pyarrow.list_(pyarrow.float32(), 4),
                "id": "int64",
                "mask": pyarrow.list_(pyarrow.float32()),
            }
            parquet.write_table(pyarrow.table(columns, pyarrow.schema(schema)), file, row_group_size=10)
        yield store


def seen(folder: Path, ranks: int, kinds: Sequence[str] = KINDS, steps: int | None = None) -> dict[str, list[str]]:
    """Read and delete the recorded samples, in order of the global batches of the first steps, by kind."""
    found = {}
    for kind in kinds:
        files = [folder / f"{kind}-{rank}" for rank in range(ranks)]
        lines = (file.read_text().splitlines()[:steps] for file in files)
        found[kind] = " ".join(map(" ".join, zip_longest(*lines, fillvalue=""))).split()
        for file in files:
            file.unlink()
    return found


def weights(folder: Path, attempt: int) -> list[str]:
    """Hash of the weights by kind."""
    return [last_words(folder / f"run-{kind}", attempt)[0]["weights_hash"] for kind in KINDS]


@pytest.mark.tour
@pytest.mark.world_size(2)
def test_twenty_and_twenty_steps_are_forty_on_two_ranks_and_on_one(tmp_path):
    for name in ("whole", "parts", "changed"):
        (tmp_path / name).mkdir()
    train(1, "changed:20", cwd=tmp_path)
    alone = seen(tmp_path / "changed", 1)
    train(2, "whole:40", "parts:20", "parts:40", "changed:40", cwd=tmp_path)
    whole = seen(tmp_path / "whole", 2)
    assert all(len(samples) > 250 for samples in whole.values())
    assert seen(tmp_path / "parts", 2) == whole
    assert weights(tmp_path / "parts", 2) == weights(tmp_path / "whole", 1)
    rest = seen(tmp_path / "changed", 2)
    assert {kind: alone[kind] + rest[kind] for kind in KINDS} == whole


@pytest.mark.world_size(4)
def test_data_in_a_store_through_a_kill_and_a_change_of_ranks(tmp_path, store):
    kind, folder = "table", tmp_path / "run"
    folder.mkdir()
    train(1, "run:24", cwd=tmp_path, kinds=["arrays"])
    train(4, "run:24", cwd=tmp_path, kinds=[kind], KILLED_AT="13", **store.environment)
    before = seen(folder, 4, [kind], steps=8)
    train(2, "run:24", cwd=tmp_path, kinds=[kind], **store.environment)
    assert [event["step"] for event in events(folder / f"run-{kind}", "resumed")] == [8]
    assert before[kind] + seen(folder, 2, [kind])[kind] == seen(folder, 1, ["arrays"])["arrays"]

"""Tests of the checkpoint store on real MPI ranks."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from hpctrain.checkpoint.store import CheckpointStore
from hpctrain.checkpoint.verify import verify_checkpoint
from tests.support.mpi import PATIENCE_S, find_mpirun, is_open_mpi, rank_environment

ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).parent / "programs" / "checkpoint_store.py"
UNREADABLE = Path(__file__).parent / "programs" / "checkpoint_unreadable.py"
Run = Callable[..., Any]


@pytest.mark.world_size(4)
def test_any_number_of_ranks_reads_what_three_wrote(mpirun, tmp_path):
    folder = tmp_path / "checkpoints"
    mpirun(3, PROGRAM, "save", folder, "all")
    assert len(list((folder / "step-000000002").iterdir())) == 4
    for ranks in (3, 1, 2, 4):
        assert "loaded 2" in mpirun(ranks, PROGRAM, "load", folder, 3, 2).stdout
    writes_are_shared(folder / "step-000000002")
    the_docs_read_the_same(folder / "step-000000002")

    swapped = [folder / "step-000000002" / f"shard-0000{rank}-of-00003.h5" for rank in (0, 2)]
    swap(*swapped)
    assert "loaded 1" in mpirun(2, PROGRAM, "load", folder, 3, 1).stdout
    swap(*swapped)

    shard = folder / "step-000000002" / "shard-00001-of-00003.h5"  # read by rank 1 of 2
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    assert "loaded 1" in (output := mpirun(2, PROGRAM, "load", folder, 3, 1).stdout)
    assert "shard-00001-of-00003.h5 is damaged: the checksum of model/large does not match" in output


@pytest.mark.world_size(3)
@pytest.mark.parametrize("where", ["manifest.json", "shard-00001-of-00003.h5", "step-000000002"])
def test_what_one_rank_cannot_read_another_one_reads(mpirun, tmp_path, where):
    folder = tmp_path / "checkpoints"
    mpirun(3, PROGRAM, "save", folder, "all")
    for rank in range(3):
        output = mpirun(3, UNREADABLE, folder, rank, where).stdout
        assert sorted(output.splitlines()) == [f"rank {each} loaded 2 0" for each in range(3)]
    output = mpirun(3, UNREADABLE, folder, "all", where).stdout
    for rank in range(3):  # every rank reports the same, and no older checkpoint is used instead
        assert f"rank {rank} ends with 70: {folder}/step-000000002/" in output
        assert "cannot be read now: Input/output error (tried 3 times by different ranks" in output
    assert sorted(os.listdir(folder)) == ["step-000000001", "step-000000002"]


@pytest.mark.world_size(4)
def test_whoever_holds_a_part_writes_it_and_any_other_part_is_read(mpirun, tmp_path):
    """Two parts on four ranks, cut along a different axis for each tensor; read in three parts, and whole."""
    assert "saved True" in mpirun(4, PROGRAM, "save-cut", tmp_path, 2).stdout
    for ranks in (3, 1):
        output = mpirun(ranks, PROGRAM, "load-cut", tmp_path).stdout
        assert float(output.split()[-1]) < {3: 0.99, 1: 1.01}[ranks], (
            output
        )  # relative to the state's size; blocks of 1 MiB
    assert verify_checkpoint(CheckpointStore(tmp_path), 1).problems == ()
    with h5py.File(tmp_path / "step-000000001" / "shard-00001-of-00004.h5") as shard:
        places = [f"up[0, {begin}]" for begin in range(512, 1024, 128)]
        assert sorted(name for name in shard["model"] if name.startswith("up")) == sorted(places)
    the_docs_read_the_same(tmp_path / "step-000000001")


def swap(one: Path, other: Path) -> None:
    """Swap the names of two files."""
    aside = one.with_name("aside")
    one.rename(aside)
    other.rename(one)
    aside.rename(other)


def writes_are_shared(folder: Path) -> None:
    """Check that plain h5py can assemble the split tensor, and that no shard is much larger than another."""
    shards = sorted(folder.glob("*.h5"))
    rows = []
    for shard in shards:
        with h5py.File(shard) as file:
            if "model/large" in file:
                rows.append(file["model/large"][()])
    np.testing.assert_array_equal(np.concatenate(rows).ravel()[:5], np.arange(5) + 2)
    assert sum(map(len, rows)) == 3000
    sizes = [shard.stat().st_size for shard in shards]
    assert max(sizes) - min(sizes) < 100_000


def the_docs_read_the_same(folder: Path) -> None:
    """Check that the docs' h5py example reads the same as the store, including per-rank statistics."""
    text = (ROOT / "docs" / "checkpoint-format.md").read_text()
    (example,) = [each for each in re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL) if "import h5py" in each]
    example = example.replace("checkpoints/step-000000100", str(folder)).replace(
        'arrays["model/weight"].shape', "(3, 4)"
    )
    found: dict[str, Any] = {}
    exec(example, found)  # noqa: S102  a program of ours, from the docs
    arrays = CheckpointStore(folder.parent).load().arrays
    assert found["arrays"].keys() == {name for name in arrays if name != "seen"}
    for name, array in found["arrays"].items():
        assert array.dtype == arrays[name].dtype
        np.testing.assert_array_equal(array, arrays[name], err_msg=name)


@pytest.mark.world_size(4)
@pytest.mark.parametrize(("mode", "writers"), [("one", [0]), ("node", [0]), ("two-nodes", [0, 2])])
def test_one_rank_or_one_of_a_node_writes_what_all_share(mpirun, tmp_path, mode, writers):
    """Four ranks of this host share a writer, or each writes its own part. Any number of ranks can read the result."""
    mpirun(4, PROGRAM, "save", tmp_path, mode)
    sizes = [shard.stat().st_size for shard in sorted((tmp_path / "step-000000002").glob("*.h5"))]
    assert [rank for rank, size in enumerate(sizes) if size > 12_000_000 / len(writers)] == writers
    assert [rank for rank, size in enumerate(sizes) if size > 10_000] == writers
    for ranks in (4, 2):
        mpirun(ranks, PROGRAM, "load", tmp_path, 4, 2)


@pytest.mark.world_size(3)
def test_a_file_size_limit_on_one_rank_abandons_the_checkpoint_on_all(mpirun, tmp_path):
    result = mpirun(3, PROGRAM, "limited", tmp_path / "checkpoints")
    assert "survived: rank 1: [Errno 27] File too large" in result.stdout
    assert CheckpointStore(tmp_path / "checkpoints").steps() == [1, 3]


@pytest.mark.world_size(2)
def test_one_that_is_given_up_makes_way_for_the_one_that_waits(mpirun, tmp_path):
    result = mpirun(2, PROGRAM, "dropped", tmp_path / "checkpoints")
    assert "dropped ['step-000000003']" in result.stdout


@pytest.mark.tour
@pytest.mark.world_size(2)
def test_a_full_disk(tmp_path):
    """The disk is a tmpfs of 16 MB in a separate mount namespace."""
    launcher = find_mpirun()
    assert launcher
    options = ["--map-by", ":OVERSUBSCRIBE", "--bind-to", "none"] if is_open_mpi(launcher) else []
    script = 'mount -t tmpfs -o size=16m none "$0" && exec "$@"'
    command = ["unshare", "-m", *(["-Ur"] if os.getuid() else []), "sh", "-c", script, str(tmp_path)]
    if subprocess.run([*command, "true"], capture_output=True, timeout=PATIENCE_S).returncode:
        pytest.skip("not permitted here: mounting a tmpfs")
    ranks = [launcher, *options, "-n", "2", sys.executable, str(PROGRAM), "full", str(tmp_path / "checkpoints")]
    done = subprocess.run([*command, *ranks], env=rank_environment(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "No space left on device" in done.stdout

"""Several ranks pack a table into the same file, byte for byte, as one does, and report an error once."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hpctrain.cli import main
from tests.support.mpi import mpirun

pyarrow = pytest.importorskip("pyarrow", reason="the extra data is not installed")


@pytest.mark.slow
@pytest.mark.world_size(3)
def test_three_ranks_make_the_file_of_one(tmp_path: Path) -> None:
    from pyarrow import parquet

    folder = tmp_path / "rows"
    folder.mkdir()
    for number in range(3):
        ids = np.arange(number * 500, number * 500 + 500)
        parquet.write_table(pyarrow.table({"id": ids, "x": ids / 7}), folder / f"{number}.parquet", row_group_size=70)
    words = ["data", "pack", str(folder), "--kind", "parquet", "--filter", "id >= 100", "-o"]
    assert main([*words, str(tmp_path / "1.h5")]) == 0
    said = mpirun(3, "hpctrain", *words, "3.h5", cwd=tmp_path).output
    assert said.count("1400 samples of id") == 1
    assert (tmp_path / "3.h5").read_bytes() == (tmp_path / "1.h5").read_bytes()
    parquet.write_table(pyarrow.table({"id": pyarrow.array([1, None])}), folder / "4.parquet")
    words = [folder, "--kind", "parquet", "--columns", "id", "-o", "2.h5"]
    failed = mpirun(3, "hpctrain", "data", "pack", *words, cwd=tmp_path, check=False)
    assert failed.returncode != 0 and failed.output.count("has no value in row 1501") == 1
    assert not (tmp_path / "2.h5").exists()

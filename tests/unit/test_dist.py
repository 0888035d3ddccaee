"""env/dist.py: the files of a release have the same bytes each time."""

from __future__ import annotations

import gzip
import io
import runpy
import tarfile
from pathlib import Path

ROOT = Path(__file__).parents[2]


def archive(path: Path, names: list[str], seconds: int) -> None:
    with tarfile.open(path, "w:gz") as made:
        for name in names:
            member = tarfile.TarInfo(name)
            member.size, member.mtime, member.uname, member.mode = len(name), seconds, f"user{seconds}", 0o664
            made.addfile(member, io.BytesIO(name.encode()))


def test_times_owners_and_order_of_an_archive_are_not_kept(tmp_path):
    repack = runpy.run_path(str(ROOT / "env/dist.py"))["repack"]
    one, other = tmp_path / "one.tar.gz", tmp_path / "other.tar.gz"
    archive(one, ["a", "b/c"], 1)
    archive(other, ["b/c", "a"], 2)
    for each in (one, other):
        repack(each, 1_700_000_000)
    assert one.read_bytes() == other.read_bytes()
    with tarfile.open(fileobj=io.BytesIO(gzip.decompress(one.read_bytes()))) as made:
        assert [(each.name, each.mtime, each.uname, each.mode) for each in made] == [
            ("a", 1_700_000_000, "", 0o644),
            ("b/c", 1_700_000_000, "", 0o644),
        ]
        assert made.extractfile("b/c").read() == b"b/c"

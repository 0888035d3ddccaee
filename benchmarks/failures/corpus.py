"""The corpus on disk: small run folders without names and paths of their machine, in one archive per class."""

from __future__ import annotations

import io
import re
import shutil
import socket
import sys
import sysconfig
import tarfile
from collections.abc import Mapping
from pathlib import Path

from hpctrain.system.processes import machine

ARCHIVES = Path(__file__).parent / "corpus"
MOST_BYTES = 1 << 18
"""Longer files are left out: nothing that ``explain`` reads is as long in a run of seconds."""
LEFT_OUT = ("checkpoints", "filler")


def keep(run: Path, kept: Path, names: Mapping[str, str]) -> None:
    """Copies the texts of a run folder, with paths and host names replaced.

    Args:
        run: the run folder.
        kept: the copy, which appears as a whole.
        names: what replaces what, besides this machine's own names and paths.
    """
    places = {**names, sysconfig.get_path("purelib"): "/opt/venv/lib/python3.11/site-packages"}
    places |= {sys.prefix: "/opt/venv", sys.base_prefix: "/usr", str(Path(__file__).parents[2]): "/home/user/project"}
    places |= {machine(): "machine-1"}
    partial = kept.with_name(f".{kept.name}")
    shutil.rmtree(partial, ignore_errors=True)
    for path in sorted(run.rglob("*")):
        inside = path.relative_to(run)
        if not path.is_file() or inside.parts[0] in LEFT_OUT or path.stat().st_size > MOST_BYTES:
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        for old, new in places.items():
            text = text.replace(old, new)
        text = re.sub(rf"\b{re.escape(socket.gethostname())}\b", "node1", text)
        copy = partial / inside
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(text, encoding="utf-8")
        shutil.copystat(path, copy)
    partial.rename(kept)


def pack(folder: Path) -> int:
    """Writes each class of a made corpus into its archive; returns the bytes of all."""
    ARCHIVES.mkdir(exist_ok=True)
    total = 0
    for label in sorted(path for path in folder.iterdir() if path.is_dir()):
        archive = ARCHIVES / f"{label.name.replace(' ', '-')}.tar.xz"
        with tarfile.open(archive, "w:xz", preset=9) as tar:
            for path in sorted(label.rglob("*")):
                if path.is_file() and not any(part.startswith(".") for part in path.relative_to(label).parts):
                    member = tarfile.TarInfo(str(path.relative_to(folder)))
                    content = path.read_bytes()
                    member.size, member.mtime, member.mode = len(content), int(path.stat().st_mtime), 0o644
                    tar.addfile(member, io.BytesIO(content))
        total += archive.stat().st_size
    return total


def unpack(folder: Path) -> None:
    """Writes the run folders of all archives below a folder."""
    for archive in sorted(ARCHIVES.glob("*.tar.xz")):
        with tarfile.open(archive) as tar:
            tar.extraction_filter = getattr(tarfile, "data_filter", None)  # Python below 3.11.4 lacks it
            tar.extractall(folder)

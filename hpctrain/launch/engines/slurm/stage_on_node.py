"""Copies sources to a node's scratch: ``python -m hpctrain.launch.engines.slurm.stage_on_node FOLDER SOURCE...``.

A copy left by an earlier attempt of the job is reused if its recorded size and time still match the source.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import shutil
import socket
import sys
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from hpctrain.errors import HpctrainError, UserError, code_of, file_errors
from hpctrain.system import foreign_text
from hpctrain.system.files import Diverted, make_private, replacement

MARK = "hpctrain-stage "
"""Prefix of the JSON line that reports an error on a node."""
RECORD = ".hpctrain-staged.json"
ROOM = "name a folder with room in launch.slurm.scratch"


def main() -> int:
    """Stages the sources on this node."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("sources", type=Path, nargs="*")
    parser.add_argument("--unpack", type=Path, help="tar file of a Python environment")
    args = parser.parse_args()
    try:
        stage(args.folder, {source: target(args.folder, source) for source in args.sources})
        if args.unpack:
            unpack(args.unpack, args.folder / "environment")
    except HpctrainError as error:
        foreign_text.show(MARK + json.dumps({"what": error.what, "fix": error.fix, "code": code_of(error)}), sys.stderr)
        return error.exit_code
    return 0


def target(folder: Path, source: Path) -> Path:
    """Returns the path of a source's copy; sources of the same name get different folders."""
    return folder / hashlib.sha256(str(source).encode()).hexdigest()[:8] / source.name


def stage(folder: Path, targets: Mapping[Path, Path]) -> None:
    """Copies sources that have no valid copy yet.

    Raises:
        UserError: a source is missing, cannot be read, or does not fit.
        RunFailed: a copy differs from its source.
    """
    with _explained(f"into {folder}", ROOM):
        record = _record(folder)
        files = [pair for source, copy in targets.items() for pair in _files(source, copy)]
        todo = [
            (source, copy)
            for source, copy in files
            if record.get(str(copy)) != _stamp(source)
            or not copy.exists()
            or copy.stat().st_size != source.stat().st_size
        ]
        _check_room(folder, sum(source.stat().st_size for source, _ in todo))
        _make_own(folder)
        for source, copy in todo:
            copy.parent.mkdir(parents=True, exist_ok=True)
            with _explained(str(source), ROOM), replacement(copy) as temporary:
                shutil.copyfile(source, temporary)
            record[str(copy)] = _stamp(source)
        (folder / RECORD).write_text(json.dumps(record))


def unpack(archive: Path, folder: Path) -> None:
    """Unpacks a Python environment, unless the same archive has been unpacked already.

    Raises:
        UserError: the archive cannot be read, is damaged, or does not fit.
    """
    with _explained(str(archive), f"{ROOM}, or remove {archive}: it is then made again"):
        record = folder / RECORD
        stamp = json.dumps(_stamp(archive))
        if record.exists() and record.read_text() == stamp:
            return
        shutil.rmtree(folder, ignore_errors=True)
        _check_room(folder.parent, archive.stat().st_size)
        with tarfile.open(archive) as tar:
            # Python before 3.11.4 has no filters and trusts every archive; this one was made by ``pack``.
            tar.extraction_filter = getattr(tarfile, "fully_trusted_filter", None)
            tar.extractall(folder)
        record.write_text(stamp)


def pack(prefix: Path, archive: Path) -> None:
    """Packs a Python environment into one archive, so that nodes read one large file instead of many small ones.

    Does nothing if the archive is newer than the last change of installed packages.

    Raises:
        UserError: the archive cannot be written, or a file of the environment cannot be read.
    """
    marks = (prefix / "pyvenv.cfg", prefix / "conda-meta", *prefix.glob("lib*/python*/site-packages"))
    changed = max((path.stat().st_mtime for path in marks if path.exists()), default=float("inf"))
    if archive.exists() and archive.stat().st_mtime > changed:
        return
    explained = file_errors(f"cannot pack {prefix} into {archive}", "free space, or leave out launch.stage_environment")
    with explained, replacement(archive) as temporary, tarfile.open(temporary, "w") as tar:
        tar.add(prefix, arcname=".", filter=lambda entry: None if entry.name.endswith("__pycache__") else entry)


def _make_own(folder: Path) -> None:
    """Makes the folder private to this user: its name can be guessed, and ranks run code from it."""
    try:
        make_private(folder)
    except Diverted as error:
        what = f"{folder} on {socket.gethostname()} is not this user's own"
        raise UserError(what, "have it removed, or name another folder in launch.slurm.scratch") from error


def _files(source: Path, copy: Path) -> list[tuple[Path, Path]]:
    if source.is_dir():
        return [(path, copy / path.relative_to(source)) for path in sorted(source.rglob("*")) if path.is_file()]
    if not source.is_file():
        fix = "correct the path, or put the file where all nodes see it"
        raise UserError(f"launch.stage_in names {source}, which {socket.gethostname()} does not see", fix)
    return [(source, copy)]


@contextlib.contextmanager
def _explained(what: str, fix: str) -> Iterator[None]:
    """Turns OSError and errors of a damaged archive into a UserError."""
    try:
        yield
    except (OSError, tarfile.TarError) as error:
        why = getattr(error, "strerror", None) or error
        raise UserError(f"cannot stage {what} on {socket.gethostname()}: {why}", fix) from error


def _check_room(folder: Path, wanted: int) -> None:
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free, host = shutil.disk_usage(existing).free, socket.gethostname()
    if wanted > free:
        what = f"{wanted / 1e9:.1f} GB to stage, but {existing} on {host} has {free / 1e9:.1f} GB free"
        raise UserError(what, "stage less, or name another folder in launch.slurm.scratch")


def _stamp(source: Path) -> list[int]:
    status = source.stat()
    return [status.st_size, status.st_mtime_ns]


def _record(folder: Path) -> dict[str, list[int]]:
    try:
        return dict(json.loads((folder / RECORD).read_text()))
    except (OSError, ValueError):
        return {}


if __name__ == "__main__":
    sys.exit(main())

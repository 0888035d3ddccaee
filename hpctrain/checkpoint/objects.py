"""A folder in an object store."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from urllib.parse import unquote, urlsplit

from hpctrain.checkpoint.format.layout import DamagedCheckpoint, UnreadableCheckpoint
from hpctrain.errors import foreign_errors
from hpctrain.system.object_store import opened, shortened

PART_BYTES = 8 << 20
"""Minimum size of the parts in a multipart upload; larger if there would be more than MOST_PARTS."""
MOST_PARTS = 9000
PARTS_AT_ONCE = 4
"""Parts that are uploaded concurrently, all held in memory."""


class ObjectFolder:
    """The objects below a URL, by name relative to it.

    The library finds credentials in the environment, from the machine's role and, with boto3, in profiles. They are
    looked up for every request, so that renewed ones take effect. All methods raise UnreadableCheckpoint if a request
    fails, and DamagedCheckpoint if an object is missing.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")

    def sizes(self) -> dict[str, int]:
        """Size of each object in bytes, by name."""
        if is_absent_folder(self.url):
            return {}
        with asking(self.url):
            return {str(it["path"]): int(it["size"]) for chunk in opened(self.url).list() for it in chunk}

    def get(self, name: str) -> bytes:
        """Read an object."""
        with asking(f"{self.url}/{name}"):
            return bytes(opened(self.url).get(name).bytes())

    def fetch(self, name: str, path: Path) -> None:
        """Write an object to a file, which is replaced, in a folder that may be missing."""
        with asking(f"{self.url}/{name}"):
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("wb") as file:
                for piece in opened(self.url).get(name).stream(min_chunk_size=PART_BYTES):
                    file.write(piece)

    def send(self, path: Path, name: str) -> None:
        """Upload a file as an object, atomically."""
        with asking(f"{self.url}/{name}"):
            part = max(PART_BYTES, path.stat().st_size // MOST_PARTS)
            opened(self.url, writes=True).put(name, path, chunk_size=part, max_concurrency=PARTS_AT_ONCE)

    def create(self, name: str, data: bytes) -> bool:
        """Create an object that must not exist yet; returns whether it now exists with these bytes."""
        from obstore.exceptions import AlreadyExistsError

        with asking(f"{self.url}/{name}"):
            try:
                opened(self.url, writes=True).put(name, data, mode="create", use_multipart=False)
            except AlreadyExistsError:  # possibly created by this request, whose response was lost
                return self.get(name) == data
            except NotImplementedError:  # the store has no conditional writes
                if name in self.sizes():
                    return self.get(name) == data
                opened(self.url, writes=True).put(name, data, use_multipart=False)
            return True

    def remove(self, names: Collection[str]) -> None:
        """Remove objects, some of which may be gone."""
        with asking(self.url), suppress(FileNotFoundError):
            if names:
                opened(self.url).delete(list(names))


def is_absent_folder(url: str) -> bool:
    """Whether this is a file:// URL of a missing folder, a case that buckets do not have."""
    parts = urlsplit(url)
    return parts.scheme == "file" and not Path(unquote(parts.path)).exists()


def asking(where: str) -> AbstractContextManager[None]:
    """Turn errors of the library in the body, which share no base class, into those that ``ObjectFolder`` raises."""

    def said(error: Exception) -> DamagedCheckpoint | UnreadableCheckpoint:
        if isinstance(error, FileNotFoundError):
            return DamagedCheckpoint(f"{where} is missing: {shortened(error)}")
        fix = "check the URL, the network and the credentials, then run the same command again"
        return UnreadableCheckpoint(f"{where} cannot be reached now: {shortened(error)}", fix)

    return foreign_errors(said)

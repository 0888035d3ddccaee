"""A folder in an object store."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import unquote, urlsplit

from hpctrain.checkpoint.format.layout import DamagedCheckpoint, UnreadableCheckpoint
from hpctrain.errors import MissingExtra
from hpctrain.system.object_store import opened, shortened

PART_BYTES = 8 << 20
"""Of an upload in parts; larger if there would be more than ..."""
MOST_PARTS = 9000
"""... these."""
PARTS_AT_ONCE = 4
"""In memory."""


class ObjectFolder:
    """Objects below a URL, by their names from there on.

    Credentials are those that the library finds: in the environment, of the machine's role, and, with boto3, of
    profiles. They are looked up for every request, so that new ones count. All methods raise
    UnreadableCheckpoint if the store does not do what it is asked to, and DamagedCheckpoint if something is missing.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")

    def sizes(self) -> dict[str, int]:
        """Bytes of each object, by its name."""
        if is_absent_folder(self.url):
            return {}
        with asking(self.url):
            return {str(it["path"]): int(it["size"]) for chunk in opened(self.url).list() for it in chunk}

    def get(self, name: str) -> bytes:
        """An object."""
        with asking(f"{self.url}/{name}"):
            return bytes(opened(self.url).get(name).bytes())

    def fetch(self, name: str, path: Path) -> None:
        """Writes an object to a file, which is replaced."""
        with asking(f"{self.url}/{name}"), path.open("wb") as file:
            for piece in opened(self.url).get(name).stream(min_chunk_size=PART_BYTES):
                file.write(piece)

    def send(self, path: Path, name: str) -> None:
        """Makes an object of a file: a whole one or none."""
        with asking(f"{self.url}/{name}"):
            part = max(PART_BYTES, path.stat().st_size // MOST_PARTS)
            opened(self.url, writes=True).put(name, path, chunk_size=part, max_concurrency=PARTS_AT_ONCE)

    def create(self, name: str, data: bytes) -> bool:
        """Makes an object that must not be there yet; whether it is there with these bytes now."""
        from obstore.exceptions import AlreadyExistsError

        with asking(f"{self.url}/{name}"):
            try:
                opened(self.url, writes=True).put(name, data, mode="create", use_multipart=False)
            except AlreadyExistsError:  # perhaps by this very request, whose answer was lost
                return self.get(name) == data
            except NotImplementedError:  # nothing better can be had there
                if name in self.sizes():
                    return self.get(name) == data
                opened(self.url, writes=True).put(name, data, use_multipart=False)
            return True

    def remove(self, names: Collection[str]) -> None:
        """Removes objects, some of which may be gone."""
        with asking(self.url), suppress(FileNotFoundError):
            if names:
                opened(self.url).delete(list(names))


def is_absent_folder(url: str) -> bool:
    """Whether a URL is of a folder of this machine that is not there, which buckets have no equal of."""
    parts = urlsplit(url)
    return parts.scheme == "file" and not Path(unquote(parts.path)).exists()


@contextmanager
def asking(where: str) -> Iterator[None]:
    """Raises what ``ObjectFolder`` says for errors of the library in the body."""
    try:
        yield
    except (MissingExtra, DamagedCheckpoint, UnreadableCheckpoint):
        raise
    except FileNotFoundError as error:
        raise DamagedCheckpoint(f"{where} is missing: {shortened(error)}") from error
    except Exception as error:  # of boto3 as well, whose errors have nothing in common
        fix = "check the URL, the network and the credentials, then run the same command again"
        raise UnreadableCheckpoint(f"{where} cannot be reached now: {shortened(error)}", fix) from error

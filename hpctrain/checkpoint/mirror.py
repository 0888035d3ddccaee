"""Opens the checkpoints that a user names, on disk or in an object store, from which files are fetched on demand."""

from __future__ import annotations

import shutil
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from tempfile import mkdtemp

from hpctrain.checkpoint.format.layout import MANIFEST_FILE, Manifest
from hpctrain.checkpoint.objects import ObjectFolder
from hpctrain.checkpoint.remote import FOLDER, Listing, list_store
from hpctrain.checkpoint.store import CheckpointStore, no_best
from hpctrain.config.sections import require_store
from hpctrain.errors import UserError
from hpctrain.run import resolve_run
from hpctrain.run.folder import step_named
from hpctrain.run.resolve_run import BEST


class Mirror(CheckpointStore):
    """Checkpoints in an object store, read-only; what is needed is fetched to a temporary folder."""

    def __init__(self, url: str) -> None:
        self.objects = ObjectFolder(url)
        super().__init__(mkdtemp(prefix="hpctrain-ckpt-"))
        weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)

    @cached_property
    def there(self) -> Listing:
        """The store's listing. Raises DamagedCheckpoint, UnreadableCheckpoint."""
        return list_store(self.objects)

    def steps(self) -> list[int]:
        return sorted(self.there.folders)

    def where(self, step: int) -> str:
        return f"{self.objects.url}/{self.there.folders[step]}"

    def manifest(self, step: int) -> Manifest:
        if not (self.folder(step) / MANIFEST_FILE).exists():
            self._fetch(step, [name for name in self.there.files(step) if name.endswith(f"/{MANIFEST_FILE}")])
        return super().manifest(step)

    @contextmanager
    def whole(self, step: int) -> Iterator[Path]:
        self._fetch(step, self.there.files(step))
        yield self.folder(step)
        shutil.rmtree(self.folder(step))

    def _fetch(self, step: int, names: list[str]) -> None:
        for name in names:
            self.objects.fetch(name, self.folder(step) / name.partition("/")[2])


def locate_checkpoint(text: str, step: int | str | None = None) -> tuple[CheckpointStore, int | None]:
    """Resolve a path or URL that a user gives to a store and, if it names one, a step; see ``resolve_run.checkpoints``.

    The best checkpoint is the step ``best``, or ``<path>/best``.

    Raises:
        UserError: the folder does not exist, or has no checkpoint, or none of this step.
    """
    store: CheckpointStore
    place, _, last = text.rstrip("/").rpartition("/")
    if last == BEST and not Path(text).exists():
        text, step = place, BEST
    if "://" in text:
        require_store(text, "the URL")
        place, _, last = text.rstrip("/").rpartition("/")
        found = FOLDER.fullmatch(last)
        store = Mirror(place if found else text)
        named = step_named(found[1]) if found else None
    else:
        path, named = resolve_run.checkpoints(text)
        store = CheckpointStore(path)
    if step == BEST:
        step = store.best()
        if step is None:
            raise no_best(text)
    step = step if named is None else named
    steps = store.steps()
    if not steps:
        raise UserError(f"{text} has no checkpoint", "give a run folder, its checkpoints folder, or one checkpoint")
    if step is not None and step not in steps:
        raise UserError(f"{text} has no checkpoint of step {step}", f"choose one of {', '.join(map(str, steps))}")
    return store, None if step is None else int(step)

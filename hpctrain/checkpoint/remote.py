"""Copies of the run folder's checkpoints in an object store, uploaded during training.

``step-<number>-<token>/`` has the files of a checkpoint. The manifest is uploaded last; without it, the checkpoint is
ignored. Each attempt creates ``attempts/<number>.json`` once, when it takes over: it names the attempt's token and the
valid checkpoints of older attempts. Anything an older attempt uploads later has a different token and is not listed, so
it is never read.
"""

from __future__ import annotations

import os
import random
import re
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from hpctrain.checkpoint.format.durable_files import is_absent, make_durable_folder
from hpctrain.checkpoint.format.layout import MANIFEST_FILE, UnreadableCheckpoint
from hpctrain.checkpoint.format.strict_json import JsonReader, parse_json, to_json
from hpctrain.checkpoint.objects import ObjectFolder
from hpctrain.checkpoint.place import CheckpointPlace
from hpctrain.checkpoint.policy import Retention
from hpctrain.checkpoint.read_retry import read_among
from hpctrain.checkpoint.reading import Loaded, step_of
from hpctrain.comm.group import Group
from hpctrain.comm.step_vote import SaveVote, StepVote
from hpctrain.config.sections import StoreTierConfig
from hpctrain.errors import HpctrainError, Replaced
from hpctrain.run.events import CheckpointStored, Event, StoreAway
from hpctrain.run.folder import BEGUN_AGAIN, CLAIMED, PARTIAL, name_of_step, step_named
from hpctrain.system.files import write_atomically
from hpctrain.system.retry import retry_files

T = TypeVar("T")

FIRST_PAUSE_S = 1.0
"""Pause before a failed request is retried; doubled after each further failure, up to LONGEST_PAUSE_S."""
LONGEST_PAUSE_S = 60.0
CLOSE_S = 5.0
"""Longest wait for the thread to end, which otherwise ends with the process."""
NICENESS = 10
"""Niceness of the threads, to give priority to training."""
CLAIM = re.compile(r"attempts/(\d{6,9})\.json")
FOLDER = re.compile(r"(step-\d{9,18})-([0-9a-f]{8})")


@dataclass(frozen=True)
class Listing:
    """The contents of a store."""

    sizes: Mapping[str, int]
    """Size of each object in bytes, by name."""
    number: int
    """Number of the newest claim, ``attempts/<number>.json``; 0 if there is none."""
    folders: Mapping[int, str]
    """Folders of the valid checkpoints, by step."""

    def files(self, step: int) -> list[str]:
        """Names of the objects of a checkpoint."""
        return [name for name in self.sizes if name.startswith(f"{self.folders[step]}/")]


def list_store(objects: ObjectFolder) -> Listing:
    """List a store. Raises as ``ObjectFolder`` does, and DamagedCheckpoint if the newest claim is damaged."""
    sizes = objects.sizes()
    number = max((int(found[1]) for found in map(CLAIM.fullmatch, sizes) if found), default=0)
    token, older = "", []
    if number:
        name = claim_name(number)
        reader = JsonReader(parse_json(objects.get(name), f"{objects.url}/{name}"), f"{objects.url}/{name}")
        token = reader.get("token", str, "a string")
        older = reader.get("older", list, "a list")
    folders: dict[int, str] = {}
    for name in sizes:
        folder, _, file = name.partition("/")
        found = FOLDER.fullmatch(folder)
        if file == MANIFEST_FILE and found and (step := step_named(found[1])) is not None:
            if found[2] == token:
                folders[step] = folder
            elif folder in older:
                folders.setdefault(step, folder)
    return Listing(sizes, number, folders)


def claim_name(number: int) -> str:
    """Name of the object that an attempt creates when it takes over."""
    return f"attempts/{number:06d}.json"


class Gone(Exception):
    """Raised in a thread if the files to send were removed, or the run is ending."""


@dataclass
class Sending:
    """A checkpoint that is being uploaded; without a folder, only the takeover of the store."""

    step: int
    folder: Path | None = None
    begin_s: float = field(default_factory=time.monotonic)
    stage: int = 0
    """0 while ranks send shards; 1 while rank 0 commits."""
    future: Future[int] = field(default_factory=Future)
    """This rank's work in the current stage; the result of the commit is the checkpoint's bytes."""


@dataclass(eq=False)
class Remote(CheckpointPlace):
    """A run's checkpoints in an object store: finds and fetches them for a resume, and uploads new ones.

    All ranks call each method. At each step they agree on their ``vote()``, so that they enter each stage together.
    """

    objects: ObjectFolder
    """The run's folder in the store."""
    home: Path
    """Local folder to which checkpoints are fetched."""
    group: Group
    keep: Retention
    """Which checkpoints to keep in the store after an upload."""
    every_steps: int
    """The first checkpoint at or after each multiple of this is uploaded."""
    fence: Callable[[], None]
    """Raises Replaced if this process may no longer write."""
    token: str
    """This attempt's token, equal on all ranks."""
    files: dict[int, list[str]] = field(default_factory=dict)
    """Object names of the checkpoints from which a run may resume, by step."""
    older: int = -1
    """The step from which this attempt resumed: newer checkpoints of older attempts become invalid."""
    number: int = 0
    """Number of this attempt's claim, on rank 0; 0 before the takeover."""
    newest: int = -1
    """Step of the newest checkpoint that is in the store or scheduled for upload."""
    stored: int = -1
    """Step of the newest checkpoint in the store."""
    protected: Collection[int] = ()
    """Steps that must stay in the store."""
    job: Sending | None = None
    pending: tuple[int, Path] | None = None
    """Step and folder of the checkpoint to upload next."""
    problem: str | None = None
    """This rank's last error, until a request succeeds."""
    is_away: bool = False
    """Whether a problem was reported."""
    stopped: threading.Event = field(default_factory=threading.Event)
    thread: threading.Thread | None = None

    def found(self, has_other: bool) -> list[Path]:
        """Local folders, newest first, to which ``fetch`` can fetch the checkpoints in the store."""
        files, problem = {}, None
        if self.group.rank == 0 and not retry_files(self._is_begun_again):
            try:
                there = self._spawn(list_store, self.objects).result()
                files = {step: there.files(step) for step in sorted(there.folders, reverse=True)}
            except HpctrainError as error:
                problem = (error.what, has_other)
        listed, problem = self.group.broadcast([list(files.items()), problem], "list the checkpoints in the store")
        self.files = {step: list(names) for step, names in listed}
        if problem and not problem[1]:
            fix = "run the same command again when the store can be reached, or with --fresh to begin without it"
            raise UnreadableCheckpoint(f"{problem[0]}; whether the run has checkpoints there is not known", fix)
        if problem:
            self.problem = problem[0]
        return [self.home / name_of_step(step) for step in self.files]

    def place_of(self, folder: Path) -> tuple[str, str] | None:
        if folder.parent != self.home:
            return None
        return "store", f"{self.objects.url}/{self.files[step_of(folder)][0].partition('/')[0]}"

    def fetch(self, folder: Path) -> None:
        if folder.parent != self.home:
            return
        names = self.files[step_of(folder)]

        def fetch_one(index: int) -> None:
            self.objects.fetch(names[index], folder / names[index].partition("/")[2])

        read_among(self.group, len(names), fetch_one, f"fetch {folder.name} from the store")

    def take_over(self, loaded: Loaded | None, fresh: bool = False, allocate: Any = None) -> tuple[()]:
        """Start to upload; of the checkpoints in the store, those up to the step resumed from stay valid.

        With ``fresh`` none do, even if this attempt ends before it has taken over the store.
        """
        if self.group.rank == 0:
            shutil.rmtree(self.home, ignore_errors=True)
            if fresh:
                retry_files(partial(make_durable_folder, self.home.parent))
                retry_files(partial(write_atomically, self._mark, b""))
        self.older = loaded.step if loaded else -1
        self.newest = self.stored = max((step for step in self.files if step <= self.older), default=-1)
        self._begin(Sending(self.older))
        if loaded and loaded.path.parent == self.home.parent:
            self.offer(loaded.step, loaded.path)
        return ()

    def offer(self, step: int, folder: Path, is_last: bool = False) -> None:
        """Upload a complete checkpoint of the run folder if it is due; it replaces one that is waiting for upload."""
        if step > self.newest and (is_last or step // self.every_steps > self.newest // self.every_steps):
            self.pending, self.newest = (step, folder), step

    def protect(self, steps: Collection[int]) -> set[int]:
        self.protected = set(steps)
        waiting = {self.pending[0]} if self.pending else set()
        return waiting | ({self.job.step} if self.job and self.job.folder else set())

    def vote(self) -> dict[str, Any]:
        return {"store": SaveVote.on(self.job.future if self.job else None), "store_away": self.problem is not None}

    def advance(self, agreed: StepVote, step: int) -> list[Event]:
        """Enter the next stage if all ranks have finished."""
        events: list[Event] = []
        if agreed.store_away and not self.is_away:
            self.is_away = True
            events.append(self._away(step, self.problem or "another rank cannot reach the store"))
        job = self.job
        if job and agreed.store.finished:
            if not agreed.store.sound:
                error = job.future.exception()
                if error and not isinstance(error, Gone):
                    self.problem = error.what if isinstance(error, HpctrainError) else repr(error)
                self.job = None
            elif job.stage == 0:
                job.stage, job.future = 1, self._spawn(self._commit, job)
            else:
                events += self._arrived(job)
        if self.job is None and self.pending:
            self._begin(Sending(*self.pending))
            self.pending = None
        return events

    def finish(self, step: int, folder: Path, wait_s: float) -> list[Event]:
        """Wait for all uploads; if the checkpoint of ``step`` is missing after that, the last event says so."""
        self.offer(step, folder, is_last=True)
        deadline = time.monotonic() + wait_s
        events: list[Event] = []
        while self.job or self.pending:
            if self.job:
                wait([self.job.future], 0.2)
            is_late = self.group.rank == 0 and time.monotonic() >= deadline
            vote = StepVote(**self.vote(), stop=int(is_late))
            agreed = vote.begin(self.group, "send the last checkpoint to the store", wait_s + 3600.0)()
            events += self.advance(agreed, step)
            if agreed.stop:
                break
        if self.stored < step:
            why = self.problem or "it takes too long"
            events.append(self._away(step, f"the checkpoint of step {step} has not arrived: {why}"))
        return events

    def close(self) -> None:
        """Stop uploads; the next attempt uploads what is missing."""
        self.stopped.set()
        if self.thread:
            self.thread.join(CLOSE_S)

    def _away(self, step: int, error: str) -> StoreAway:
        return StoreAway(step=step, path=self.objects.url, error=error)

    def _arrived(self, job: Sending) -> list[Event]:
        self.job = None
        self.is_away, self.problem = False, None  # also on ranks that had nothing to send since
        if not job.folder:
            return []
        self.stored = job.step
        num_bytes = job.future.result()
        write_s = time.monotonic() - job.begin_s
        path = f"{self.objects.url}/{self._name(job)}"
        return [CheckpointStored(step=job.step, path=path, bytes=num_bytes, write_s=write_s)]

    def _begin(self, job: Sending) -> None:
        self.job = job
        job.future = self._spawn(self._send, job)

    def _name(self, job: Sending) -> str:
        return f"{name_of_step(job.step)}-{self.token}"

    def _spawn(self, work: Callable[..., T], *arguments: Any) -> Future[T]:
        """Call a function in a daemon thread."""
        future: Future[T] = Future()

        def run() -> None:
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
            try:
                future.set_result(work(*arguments))
            except BaseException as error:
                future.set_exception(error)

        self.thread = threading.Thread(target=run, name="checkpoint-store", daemon=True)
        self.thread.start()
        return future

    def _send(self, job: Sending) -> int:
        """Upload this rank's part of the shards."""
        for name, path in list(self._shards(job).items())[self.group.rank :: self.group.size]:
            self._retry(partial(self.objects.send, path, name), path)
        return 0

    def _shards(self, job: Sending) -> dict[str, Path]:
        """Local shard files by object name."""
        if not (folder := job.folder):
            return {}
        names = self._retry(partial(os.listdir, folder), folder)
        return {f"{self._name(job)}/{name}": folder / name for name in sorted(names) if name != MANIFEST_FILE}

    def _commit(self, job: Sending) -> int:
        """On rank 0: take over the store if necessary, and upload the manifest; returns the checkpoint's bytes."""
        if self.group.rank != 0:
            return 0
        self._claim()
        if not job.folder:
            return 0
        shards = self._shards(job)
        sizes = self._retry(lambda: {name: path.stat().st_size for name, path in shards.items()}, job.folder)
        while True:
            there = self._retry(partial(list_store, self.objects))
            missing = [name for name in shards if there.sizes.get(name) != sizes[name]]
            if not missing:
                break
            for name in missing:  # upload again what is missing or incomplete
                self._retry(partial(self.objects.send, shards[name], name), shards[name])
            if self.stopped.wait(FIRST_PAUSE_S):  # listings may lag behind uploads
                raise Gone
        self._retry(partial(self._require_place, there))
        manifest = self._retry((job.folder / MANIFEST_FILE).read_bytes, job.folder)
        name = f"{self._name(job)}/{MANIFEST_FILE}"
        if not self._retry(partial(self.objects.create, name, manifest)):
            raise Replaced(f"{self.objects.url}/{name} was made by another process")
        with suppress(HpctrainError, OSError):  # retried after the next upload
            self._clear(there, job.step)
        return sum(sizes.values()) + len(manifest)

    def _claim(self) -> None:
        """Take over the store, unless already done."""
        while not self.number:
            there = self._retry(partial(list_store, self.objects))
            self._retry(self.fence)
            counting = {} if self._retry(self._is_begun_again) else there.folders
            older = [folder for step, folder in counting.items() if step <= self.older]
            data = to_json({"token": self.token, "older": older})
            if self._retry(partial(self.objects.create, claim_name(there.number + 1), data)):
                if self._retry(self._is_begun_again):
                    self._retry(partial(write_atomically, self._mark, CLAIMED))
                self.number = there.number + 1

    @property
    def _mark(self) -> Path:
        return self.home.parent / BEGUN_AGAIN

    def _is_begun_again(self) -> bool:
        """Whether the run was started over and the store, not taken over yet, still lists the old run's checkpoints."""
        return self._mark.exists() and self._mark.read_bytes() != CLAIMED

    def _require_place(self, there: Listing) -> None:
        """Raise Replaced if another attempt has taken over the store since."""
        self.fence()
        if there.number != self.number:
            raise Replaced(f"another attempt sends its checkpoints to {self.objects.url}")

    def _clear(self, there: Listing, step: int) -> None:
        """Remove checkpoints that are not kept, incomplete uploads, and invalid checkpoints of older attempts.

        Complete but invalid checkpoints are removed only with ``keep.last``, and only once this run has reached their
        step.
        """
        counting = {**there.folders, step: f"{name_of_step(step)}-{self.token}"}
        unwanted = {counting[old] for old in self.keep.removable(counting, {step, *self.protected})}
        others = {name.partition("/")[0] for name in there.sizes} - {*counting.values()}
        for found in filter(None, map(FOLDER.fullmatch, others)):
            is_whole = f"{found[0]}/{MANIFEST_FILE}" in there.sizes
            if not is_whole or (self.keep.last and (step_named(found[1]) or 0) <= step):
                unwanted.add(found[0])
        for folder in sorted(unwanted):
            files = sorted(name for name in there.sizes if name.startswith(f"{folder}/"))
            self._require_place(list_store(self.objects))
            self.objects.remove([name for name in files if name.endswith(f"/{MANIFEST_FILE}")])
            self.objects.remove([name for name in files if not name.endswith(f"/{MANIFEST_FILE}")])

    def _retry(self, work: Callable[[], T], path: Path | None = None) -> T:
        """Retry until ``work`` succeeds. Raises Gone if the run ends first or ``path`` is gone; Replaced propagates."""
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                result = work()
                self.problem = None
                return result
            except Replaced:
                raise
            except (HpctrainError, OSError) as error:
                if path and is_absent(path):
                    raise Gone from error
                self.problem = error.what if isinstance(error, HpctrainError) else str(error)
            if self.stopped.wait(pause_s * random.uniform(0.5, 1.0)):
                raise Gone
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


def open_remote(
    config: StoreTierConfig, checkpoints: Path, group: Group, keep: Retention, fence: Callable[[], None]
) -> Remote | None:
    """Open the store of a run file, if it has one. Collective. Elements of a job array use separate folders."""
    if not config.url:
        return None
    token = group.broadcast(secrets.token_hex(4), "name the attempt in the store")
    element = checkpoints.parent.name
    objects = ObjectFolder(f"{config.url}/{element}" if element.isdigit() else config.url)
    home = checkpoints / f"{PARTIAL}store-{token}"
    return Remote(objects, home, group, keep, config.every_steps or 1, fence, token)

"""A run's identity and attempts: run.json records how they begin and end; a fence stops old ones."""

from __future__ import annotations

import dataclasses
import errno
import functools
import json
import os
import platform
import socket
import subprocess
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import hpctrain
from hpctrain.config.sections import ParallelConfig
from hpctrain.errors import ExitCode, Replaced, UserError
from hpctrain.run import last_words
from hpctrain.run.folder import RunDir
from hpctrain.run.grid import Grid, grid_of
from hpctrain.run.last_words import LastWord
from hpctrain.run.live_lock import UniqueIds
from hpctrain.run.rank_environment import current_attempt, current_job
from hpctrain.run.verdict import RunVerdict
from hpctrain.system import safe_read
from hpctrain.system.files import cannot_write, write_atomically, writing
from hpctrain.system.json_shape import fields_of, is_count, is_time, maker, sound, without_misfits
from hpctrain.system.python import version_of
from hpctrain.system.retry import retry_files

ALWAYS = ("from_step", "job_id", "git_commit")
"""Fields that an entry of run.json has even if they are null."""


@dataclasses.dataclass(frozen=True)
class Attempt:
    """The record of an attempt in run.json; None for what is not known."""

    number: int = 0
    """From 1; 0 for an attempt that has not begun."""
    started: float | None = None
    """Unix seconds."""
    ended: float | None = None
    """Unix seconds. None while it runs, or if it was killed together with its supervisor."""
    from_step: int | None = None
    """Step of the newest checkpoint when it began."""
    to_step: int | None = None
    """Step of the newest checkpoint when it ended."""
    host: str | None = None
    """Host of the supervisor, or of rank 0 if there is none."""
    hosts: Sequence[str] = ()
    """Hosts of the ranks."""
    job: str | None = None
    """Slurm job as scontrol takes it: 123, or 120_4 for an array element."""
    job_id: str | None = None
    """SLURM_JOB_ID, or the job ID of another scheduler."""
    restarts: int | None = None
    """How often Slurm had requeued the job."""
    ranks: int | None = None
    nodes: int | None = None
    tensor: int | None = None
    """Size of the tensor groups; None without tensor parallelism."""
    pipeline: int | None = None
    """Number of pipeline stages; None without a pipeline."""
    shard: str | None = None
    """Value of ``parallel.shard``; None if nothing is sharded."""
    versions: Mapping[str, str | None] = dataclasses.field(default_factory=dict)
    """Versions of packages that affect results."""
    git_commit: str | None = None
    fresh: bool | None = None
    """True if the run began again with it (``--fresh``): earlier attempts do not count."""
    verdict: RunVerdict | None = None

    @property
    def grid(self) -> Grid:
        """The grid of ranks."""
        return grid_of(self.ranks or 1, self.tensor, self.pipeline)

    @property
    def plan(self) -> str:
        """The parallel plan as text, such as "tensor 2 x data 4"; empty if each rank has the whole model."""
        return ", ".join([part for part in (str(self.grid), f"shard {self.shard}" if self.shard else "") if part])

    @property
    def has_progressed(self) -> bool:
        """Whether it saved a checkpoint newer than the one it began from."""
        return self.to_step is not None and (self.from_step is None or self.to_step > self.from_step)

    @property
    def found_complete(self) -> bool:
        """Whether there was nothing left to do, because the run had already finished."""
        is_done = self.verdict is not None and self.verdict.exit_code is ExitCode.DONE
        return is_done and self.from_step is not None and self.from_step == self.to_step

    def under(self, parallel: ParallelConfig) -> Attempt:
        """Returns a copy with the parallel plan of a run file."""
        shard = parallel.shard if parallel.shard != "none" else None
        tensor, pipeline = (size if size > 1 else None for size in (parallel.tensor, parallel.pipeline))
        return dataclasses.replace(self, tensor=tensor, pipeline=pipeline, shard=shard)

    def to_json(self) -> dict[str, Any]:
        """Returns the known fields for run.json."""
        shown = dict(vars(self))
        number, verdict = shown.pop("number"), shown.pop("verdict")
        known = {name: value for name, value in shown.items() if value not in (None, (), {}) or name in ALWAYS}
        known |= {"verdict": verdict.to_json()} if verdict else {}
        return {"attempt": number, **known} if number else known

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> Attempt:
        """Parses an entry of run.json; ignores unknown fields. Raises ValueError if a field has the wrong type."""
        return _attempt_of({**saved, "number": saved["attempt"]})


_OWN = {"started": sound(is_time), "ended": sound(is_time), "verdict": RunVerdict.from_json}
_attempt_of = maker(Attempt, **_OWN)
_sound_entry = without_misfits(fields_of(Attempt, **_OWN))
_info = sound({"fence": int, "attempts": [dict]})
_sound_info = without_misfits(
    {
        "id": sound(str),
        "created": sound(is_time),
        "path": sound(str),
        "trained": sound(is_count),
        "reducer": sound(dict),
        "stages": sound({"layers": [is_count]}),
    }
)


def info_of(value: Any) -> dict[str, Any]:
    """Validates the content of run.json, dropping fields of the wrong type. Raises ValueError if it is unusable."""
    info = _info(value)
    if not all(is_count(entry.get("attempt")) for entry in info.get("attempts", ())):
        raise ValueError("an attempt has no number")
    entries = {"attempts": [_sound_entry(entry) for entry in info["attempts"]]} if "attempts" in info else {}
    return {**_sound_info(info), **entries}


NEW = Attempt()
"""An attempt of which nothing is known before it begins."""


@dataclasses.dataclass(frozen=True)
class Attempts:
    """The attempts of a run. Each has its own files, attempts/<number>..., from which run.json is assembled."""

    run_dir: RunDir

    @property
    def ids(self) -> UniqueIds:
        """Allocates the attempts' numbers."""
        return UniqueIds(self.run_dir.attempts, self.run_dir.path)

    def info(self) -> dict[str, Any]:
        """Returns the content of run.json; empty if there is none yet.

        Raises:
            UserError: it is damaged.
        """
        try:
            info = info_of(safe_read.read_json(self.run_dir.run_json))
        except FileNotFoundError:
            return {}
        except (ValueError, safe_read.NotPlain, safe_read.TooLarge) as error:
            why = error.strerror if isinstance(error, OSError) else error
            fix = f"remove it: the next attempt writes it again from what {self.ids.folder} holds"
            raise UserError(f"{self.run_dir.run_json} is damaged: {why}", fix) from error
        return info

    def update(self, **fields: Any) -> dict[str, Any]:
        """Sets fields of run.json on behalf of this process's attempt; returns the new content of run.json."""
        return self._note(current_attempt(), "fields", fields)

    def begin(self, attempt: Attempt = NEW, run_yaml: str | None = None, forget_stop: bool = True) -> int:
        """Begins a new attempt, which fences off all earlier ones.

        Call it with the run folder's lock held. Adds start time, host, job, versions and git commit to the record.

        Args:
            attempt: what else is known about the attempt.
            run_yaml: text of the resolved run file, which is stored in the folder.
            forget_stop: remove an old stop request. A restart in place must keep one made in the meantime.

        Returns:
            The attempt's number, from 1.

        Raises:
            UserError: STOP is a folder that is not empty, or run.json is damaged.
            RunFailed: the folder cannot be written.
        """
        if forget_stop:
            retry_files(self._forget_stop)
        info = retry_files(self.info)
        begun = dataclasses.replace(
            attempt,
            started=time.time(),
            from_step=self.run_dir.newest_checkpoint_step(),
            host=attempt.host or socket.gethostname(),
            job_id=current_job()[0],
            versions=versions(),
            git_commit=git_commit(),
        )
        new = {"id": uuid.uuid4().hex, "created": time.time(), "path": str(self.run_dir.path.resolve())}
        record = _json({"run": {**new, **_identity(info)}, "attempt": begun.to_json()})
        number = retry_files(lambda: self.ids.take(record))
        if info.get("path", new["path"]) == new["path"]:
            retry_files(self._summarise)
        else:
            self._note(number, "fields", new if self._is_copy(info) else {"path": new["path"]})
        if run_yaml is not None:
            retry_files(lambda: write_atomically(self.run_dir.run_yaml, run_yaml.encode(), self.run_dir.path))
        return number

    def end(self, number: int, verdict: RunVerdict, words: Sequence[LastWord], all_ended: bool = True) -> None:
        """Records how an attempt ended.

        Args:
            number: number of the attempt.
            verdict: the verdict on it.
            words: its ranks' last words.
            all_ended: whether all ranks have ended; if not, their last words are not merged.

        Raises:
            RunFailed: the folder cannot be written.
        """
        if all_ended:
            last_words.merge(self.run_dir, number, words, verdict)
        entry = {"ended": time.time(), "to_step": self.run_dir.newest_checkpoint_step(), "verdict": verdict.to_json()}
        self._note(number, "ended", {**entry, "hosts": sorted({word.host for word in words})})

    def amend(self, number: int, verdict: RunVerdict) -> None:
        """Replaces the verdict on an attempt that has ended. Raises RunFailed if the folder cannot be written."""
        self._note(number, "ended", {"verdict": verdict.to_json()})
        if self.run_dir.words(number).exists() and (words := last_words.read(self.run_dir, number)):
            last_words.merge(self.run_dir, number, words.ranks, verdict)

    def all(self) -> list[Attempt]:
        """Returns the run's attempts since it last began again, oldest first."""
        return since_fresh(retry_files(self.info))

    def fence(self) -> int:
        """Returns the number of the newest attempt, 0 before the first."""
        return self.ids.newest()

    def check_fence(self, attempt: int) -> None:
        """Checks that an attempt may still write.

        Raises:
            Replaced: a newer attempt has begun.
            OSError: the folder cannot be read at the moment.
        """
        if (fence := self.fence()) > attempt:
            raise Replaced(f"attempt {attempt} of {self.run_dir.path} has been replaced by attempt {fence}")

    def _is_copy(self, info: Mapping[str, Any]) -> bool:
        """Whether the run of this run.json still has its own folder elsewhere, of which this one is a copy."""
        with suppress(OSError, UserError, LookupError, ValueError):
            original = Path(info["path"])
            return not original.samefile(self.run_dir.path) and Attempts(RunDir(original)).info()["id"] == info["id"]
        return False

    def _forget_stop(self) -> None:
        """Removes the STOP file, or an empty folder of that name, which counts as a request too."""
        stop = self.run_dir.stop_file
        try:
            if stop.is_dir() and not stop.is_symlink():
                stop.rmdir()
            else:
                stop.unlink(missing_ok=True)
        except OSError as error:
            if error.errno == errno.ENOTEMPTY:
                raise UserError(f"{stop} is a folder that is not empty", "remove it, then start again") from error
            raise cannot_write(stop, error) from error

    def _note(self, attempt: int, what: str, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Adds fields to one of an attempt's own files, which no other attempt writes; returns the new run.json."""
        path = self.ids.path(attempt, what)

        def add() -> dict[str, Any]:
            self.ids.make_folder()
            with writing(path):
                before = _read_object(path)
            write_atomically(path, _json({**before, **fields}), self.run_dir.path)
            return self._summarise()

        return retry_files(add)

    def _summarise(self) -> dict[str, Any]:
        """Writes run.json from the attempts' own files; returns its content.

        Needs no lock, so a writer that is suspended or waits for an fsync does not block others. If it overwrites newer
        content, it corrects that itself: each writer repeats until run.json matches the attempts' own files.
        """
        written = b""
        with writing(self.run_dir.run_json):
            while (content := _json(info := self._gather())) != written:
                write_atomically(self.run_dir.run_json, content, self.run_dir.path)
                written = content
        return info

    def _gather(self) -> dict[str, Any]:
        """Assembles run.json from the attempts' own files."""
        attempts: list[dict[str, Any]] = []
        identity: dict[str, Any] = {}
        fields: dict[str, Any] = {}
        for number in self.ids.taken():
            begun, added, ended = (_read_object(self.ids.path(number, what)) for what in ("", "fields", "ended"))
            attempts.append({"attempt": number, **_object(begun.get("attempt")), **ended})
            identity = {**_object(begun.get("run")), **identity}
            fields |= added
        return {**identity, **fields, "fence": self.fence(), "attempts": attempts}


def _identity(info: Mapping[str, Any]) -> dict[str, Any]:
    return {name: info[name] for name in ("id", "created") if info.get(name)}


def since_fresh(info: Mapping[str, Any]) -> list[Attempt]:
    """Returns the attempts in run.json since the run last began again, oldest first."""
    attempts = [Attempt.from_json(entry) for entry in info.get("attempts", [])]
    return attempts[max((index for index, each in enumerate(attempts) if each.fresh), default=0) :]


def _json(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, indent=2).encode() + b"\n"


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _read_object(path: Path) -> dict[str, Any]:
    """Reads a JSON object; empty if the file is missing or was torn by a crash."""
    try:
        return _object(safe_read.read_json(path))
    except (FileNotFoundError, safe_read.NotPlain, safe_read.TooLarge, ValueError):
        return {}


PACKAGES = ("numpy", "h5py", "mpi4py", "torch", "tensorflow", "tensorflow-cpu", "keras", "horovod")


@functools.cache
def versions() -> dict[str, str]:
    """Returns the versions of Python, hpctrain and the installed PACKAGES, which affect results."""
    found = {name: version for name in PACKAGES if (version := version_of(name))}
    return {"python": platform.python_version(), "hpctrain": hpctrain.__version__, **found}


def git_commit() -> str | None:
    """Returns the commit of the working directory's git repository, with '+changes' if tracked files differ."""
    commit = _git("rev-parse", "HEAD")
    if not commit:
        return None
    return commit + ("+changes" if _git("status", "--porcelain", "--untracked-files=no") else "")


def _git(*words: str) -> str:
    try:
        # The lock that status takes would make a commit of the user fail at that moment.
        env = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
        done = subprocess.run(["git", *words], capture_output=True, env=env, text=True, errors="replace", timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""

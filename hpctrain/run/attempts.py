"""Who the run is, and its attempts: their beginnings and ends in run.json, and the fence between them."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import socket
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpctrain.errors import Replaced, UserError
from hpctrain.run import last_words, provenance
from hpctrain.run.attempt_record import Attempt
from hpctrain.run.documents import info_of
from hpctrain.run.folder import RunDir
from hpctrain.run.last_words import LastWord
from hpctrain.run.rank_environment import current_attempt
from hpctrain.run.tickets import Tickets
from hpctrain.run.verdict import Verdict
from hpctrain.system import safe_read
from hpctrain.system.files import cannot_write, write_atomically

NEW = Attempt()
"""An attempt of which nothing is known before it begins."""


@dataclass(frozen=True)
class Attempts:
    """The attempts of a run. Each has files of its own, attempts/<number>...; run.json is put together from them."""

    run_dir: RunDir

    @property
    def tickets(self) -> Tickets:
        """One number for each attempt."""
        return Tickets(self.run_dir.attempts, self.run_dir.path)

    def info(self) -> dict[str, Any]:
        """Content of run.json; empty if there is none yet.

        Raises:
            UserError: it is damaged.
        """
        try:
            info = info_of(safe_read.read_json(self.run_dir.run_json))
            if info is None:
                raise ValueError("its fields are not of the types that they should be")
        except FileNotFoundError:
            return {}
        except (ValueError, safe_read.NotPlain, safe_read.TooLarge) as error:
            why = error.strerror if isinstance(error, OSError) else error
            fix = f"remove it: the next attempt writes it again from what {self.tickets.folder} holds"
            raise UserError(f"{self.run_dir.run_json} is damaged: {why}", fix) from error
        return info

    def update(self, **fields: Any) -> dict[str, Any]:
        """Sets fields of run.json that this process's attempt has found out; the new content of run.json."""
        return self._note(current_attempt(), "fields", fields)

    def begin(self, attempt: Attempt = NEW, run_yaml: str | None = None) -> int:
        """Counts a new attempt, which fences off all earlier ones, and forgets an old stop request.

        Call it with the run folder's lock. What this process is, and from what it is made, is added.

        Args:
            attempt: what else is known of it.
            run_yaml: the resolved run file, kept in the folder.

        Returns:
            Its number, from 1.

        Raises:
            RunFailed: the folder cannot be written.
        """
        info = self.info()
        begun = dataclasses.replace(
            attempt,
            started=time.time(),
            from_step=self.run_dir.newest_checkpoint_step(),
            host=attempt.host or socket.gethostname(),
            job_id=os.environ.get("SLURM_JOB_ID"),
            versions=provenance.versions(),
            git_commit=provenance.git_commit(),
        )
        identity = {"id": info.get("id") or uuid.uuid4().hex, "created": info.get("created") or time.time()}
        number = self.tickets.take(_json({"run": identity, "attempt": begun.to_json()}), above=info.get("fence", 0))
        self._summarise()
        self.run_dir.stop_file.unlink(missing_ok=True)
        if run_yaml is not None:
            write_atomically(self.run_dir.run_yaml, run_yaml.encode(), self.run_dir.path)
        return number

    def end(self, number: int, verdict: Verdict, words: Sequence[LastWord], all_told: bool = True) -> None:
        """Writes down how an attempt ended.

        Args:
            number: of the attempt.
            verdict: on it.
            words: its ranks' last ones.
            all_told: whether all ranks have ended; else their words are left as they are.

        Raises:
            RunFailed: the folder cannot be written.
        """
        if all_told:
            last_words.merge(self.run_dir, number, words, verdict)
        entry = {"ended": time.time(), "to_step": self.run_dir.newest_checkpoint_step(), "verdict": verdict.to_json()}
        self._note(number, "ended", {**entry, "hosts": sorted({word.host for word in words})})

    def amend(self, number: int, verdict: Verdict) -> None:
        """Replaces the verdict on an attempt that has ended. Raises RunFailed if the folder cannot be written."""
        self._note(number, "ended", {"verdict": verdict.to_json()})
        if self.run_dir.words(number).exists() and (words := last_words.read(self.run_dir, number)):
            last_words.merge(self.run_dir, number, words.ranks, verdict)

    def all(self) -> list[Attempt]:
        """The attempts in run.json, oldest first."""
        return [Attempt.from_json(entry) for entry in self.info().get("attempts", [])]

    def fence(self) -> int:
        """Number of the newest attempt, 0 before the first. Older versions keep it in run.json alone."""
        written = 0
        with contextlib.suppress(UserError):  # damaged; the attempts of this version have their own files
            written = self.info().get("fence", 0)
        return max(written, self.tickets.newest())

    def check_fence(self, attempt: int) -> None:
        """Raises an error if an attempt may not write any more.

        Raises:
            Replaced: a newer one has begun.
            OSError: that cannot be seen now.
        """
        if (fence := self.fence()) > attempt:
            raise Replaced(f"attempt {attempt} of {self.run_dir.path} has been replaced by attempt {fence}")

    def _note(self, attempt: int, what: str, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Adds fields to one of an attempt's own files, which no other attempt writes; the new content of run.json."""
        path = self.tickets.path(attempt, what)
        self.tickets.make_folder()
        try:
            before = _read_object(path)
        except OSError as error:
            raise cannot_write(path, error) from error
        write_atomically(path, _json({**before, **fields}), self.run_dir.path)
        return self._summarise()

    def _summarise(self) -> dict[str, Any]:
        """Writes run.json; its content.

        Nobody is locked out: a writer that sleeps, in an fsync perhaps, holds up nobody. What it replaces too late it
        puts right by itself, since each writer looks again until run.json is what the attempts' own files say.
        """
        written = b""
        try:
            while (content := _json(info := self._gather())) != written:
                write_atomically(self.run_dir.run_json, content, self.run_dir.path)
                written = content
        except OSError as error:
            raise cannot_write(self.run_dir.run_json, error) from error
        return info

    def _gather(self) -> dict[str, Any]:
        """run.json by the attempts' own files; what an older version wrote into it alone stays."""
        info = self.info()
        entries = {entry["attempt"]: entry for entry in info.get("attempts", [])}
        taken = self.tickets.taken()
        identity: dict[str, Any] = {}
        fields: dict[str, Any] = {}
        for number in sorted({*entries, *taken}):
            begun, added, ended = (_read_object(self.tickets.path(number, what)) for what in ("", "fields", "ended"))
            entries[number] = {"attempt": number, **entries.get(number, {}), **_object(begun.get("attempt")), **ended}
            identity = identity or _object(begun.get("run"))
            fields |= added
        fence = max([info.get("fence", 0), *taken])
        return {**info, **identity, **fields, "fence": fence, "attempts": [entries[key] for key in sorted(entries)]}


def _json(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, indent=2).encode() + b"\n"


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _read_object(path: Path) -> dict[str, Any]:
    """Empty if there is none yet, or a crash has torn it."""
    try:
        return _object(safe_read.read_json(path))
    except (FileNotFoundError, safe_read.NotPlain, safe_read.TooLarge, ValueError):
        return {}

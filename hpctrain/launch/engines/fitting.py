"""Runs that a program starts on its cluster (Ray, Spark), with the supervisor in a separate process."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from hpctrain.config.loading import absolute_task, dump, load
from hpctrain.config.sections import Config
from hpctrain.errors import ExitCode, HpctrainError, NoRequeue, RunFailed, UserError
from hpctrain.launch.engines.runners import Invite
from hpctrain.launch.runners import ticket
from hpctrain.run.attempts import Attempts
from hpctrain.run.events import Eval
from hpctrain.run.folder import RunDir
from hpctrain.run.run_view import RunView
from hpctrain.run.verdict import RunVerdict
from hpctrain.system import python
from hpctrain.system.cgroups import THREAD_VARIABLES
from hpctrain.system.files import write_atomically
from hpctrain.system.processes import die_with_parent

LOOK_S = 0.2
"""Seconds between two checks of the supervisor and of new evaluations."""
EVENT_BYTES = 1 << 20
ERRORS: Mapping[int, type[HpctrainError]] = {ExitCode.USER_ERROR: UserError, ExitCode.DO_NOT_REQUEUE: NoRequeue}

Report = Callable[[dict[str, Any]], object]
"""Called with the metrics of each evaluation by name, and ``step``."""


@dataclasses.dataclass(frozen=True)
class RunResult:
    """How a run that a program started has ended."""

    finished: bool
    """Whether it reached its end. If not, it was asked to stop, and the same call resumes it."""
    metrics: Mapping[str, float | None]
    """Metrics of the newest evaluation, averaged over all validation samples; empty if there was none."""
    run_dir: Path
    """The run folder."""
    checkpoint: Path | None
    """Folder of the newest checkpoint."""
    best: Path | None
    """Folder of the checkpoint with the best ``checkpoint.best_metric``, if that is set."""


def read(config: Config | Mapping[str, Any] | str | Path) -> Config:
    """Returns a Config, given one, the path of a run file, or a dict with the content of one.

    Raises:
        UserError: see ``load``.
    """
    if isinstance(config, Config):
        return config
    if not isinstance(config, Mapping):
        return load(config)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "config")
        path.write_text(json.dumps(config, default=str))  # JSON is YAML
        return load(path)


def fit(config: Config, invite: Invite, fresh: bool, report: Report | None) -> RunResult:
    """Trains on nodes that ``invite`` starts. May be called from any thread.

    The supervisor is a separate process, since it handles signals and kills leftover descendants. It is asked to stop
    if this thread ends first.

    Args:
        config: the run; its ``launch.engine`` is ignored.
        invite: see ``runners.Invite``.
        fresh: put existing checkpoints aside.
        report: called with metrics during the run; if it raises, the run stops with a checkpoint and the error is
            raised again.

    Raises:
        UserError, NoRequeue, RunFailed: why the run has failed.
    """
    run_dir = RunDir.of(config.name, config.run_dir)
    before = len(Attempts(run_dir).all())
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as nodes:
        shown = Path(folder, "ticket")
        launch = dataclasses.replace(config.launch, engine="runners", hosts=(), ticket=str(shown))
        task, path = absolute_task(config.task), str(run_dir.path)
        config = dataclasses.replace(config, task=task, run_dir=path, launch=launch)
        run_dir.create()
        write_atomically(run_dir.run_yaml, dump(config).encode(), run_dir.path)
        view, seen = RunView(run_dir.path), 0
        problem: Callable[[], str] | None = None
        with _supervisor(run_dir, fresh) as process:
            while process.poll() is None:
                time.sleep(LOOK_S)
                if problem is None:
                    with contextlib.suppress(FileNotFoundError):
                        problem = nodes.enter_context(invite(config, ticket.read(shown)))
                elif len(Attempts(run_dir).all()) == before and (what := problem()):
                    raise RunFailed(what, "look at the cluster's own status of its tasks")
                seen = _tell(report, view, seen, before)
    _tell(report, view, seen, before)
    attempts = Attempts(run_dir).all()
    return _result(run_dir, process.returncode, attempts[-1].verdict if len(attempts) > before else None)


@contextlib.contextmanager
def _supervisor(run_dir: RunDir, fresh: bool) -> Iterator[subprocess.Popen[bytes]]:
    """Runs ``hpctrain run`` as a process, and terminates it on exit.

    Leaves out variables that limit threads, which clusters set for a program's processes: the run file decides.
    """
    words = python.module("hpctrain", "run", str(run_dir.run_yaml), *["--fresh"] * fresh)
    left_out = (*THREAD_VARIABLES, ticket.KEY, ticket.ADDRESS)
    environment = {name: value for name, value in python.environment().items() if name not in left_out}
    process = subprocess.Popen(
        words,
        env=environment,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=partial(die_with_parent, signal.SIGTERM),  # noqa: PLW1509 (only a system call)
    )
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


def _tell(report: Report | None, view: RunView, seen: int, before: int) -> int:
    """Reports evaluations after offset ``seen``, of attempts above number ``before``; returns the new offset."""
    while report is not None:
        events, after = view.events_from(seen, EVENT_BYTES)
        for event in events:
            if isinstance(event, Eval) and event.attempt > before:
                report({**event.metrics, "step": event.step})
        if after <= seen:
            return after
        seen = after
    return seen


def _result(run_dir: RunDir, exit_code: int, verdict: RunVerdict | None) -> RunResult:
    """Returns the result, or raises as ``fit`` does."""
    if exit_code not in (ExitCode.DONE, ExitCode.STOPPED):
        kind = ERRORS.get(exit_code, RunFailed)
        if verdict is None:
            what = f"the supervisor has ended with exit code {exit_code}, without an attempt"
            raise kind(what, "see its output")
        raise kind(verdict.reason, verdict.fix or f"see the logs in {run_dir.logs}", verdict.code)
    from hpctrain.checkpoint.store import CheckpointStore, best_steps

    newest = RunView(run_dir.path).snapshot().progress.newest(Eval)
    store = CheckpointStore(run_dir.checkpoints)
    steps, best = store.steps(), sorted(best_steps(store))
    return RunResult(
        exit_code == ExitCode.DONE,
        newest.metrics if newest else {},
        run_dir.path,
        store.folder(steps[-1]) if steps else None,
        store.folder(best[0]) if best else None,
    )
